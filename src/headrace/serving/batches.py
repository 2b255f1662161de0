"""The engine: transformers' continuous batching behind the seam of transformers' server.

One request too large for the cache ends a batching manager for everybody, so requests pass
:class:`~headrace.serving.admission.Admission` first. All requests share one manager, which has the sampling of each;
a request with a seed has a manager to itself, because a manager draws from one generator.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections import deque
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    CBWorkerDeadError,
    _StreamError,
    response_events_to_chunks,
)
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingTopKLogitsWarper

from headrace.errors import OptionError
from headrace.serving.admission import Admission, Pool
from headrace.serving.request_body import GenerationRequest, RequestError

__all__ = ["BLOCK_TOKENS", "Batches", "batch_settings", "pool_blocks", "settings_of"]

BLOCK_TOKENS = 32
_STEP_TOKENS = 2048
_ANSWER_TOKENS = 1024
_LOOK_S = 1.0


# -- sampling ----------------------------------------------------------------------------------------------------------


def settings_of(request: GenerationRequest, default: GenerationConfig) -> GenerationConfig:
    """The generation config of a request: the model's own, and what the request says.

    Raises:
        RequestError: for sampling that greedy decoding would ignore.
    """
    settings: Any = copy.deepcopy(default)
    settings.max_new_tokens, settings.max_length = request.max_tokens, None
    if request.temperature is not None:
        settings.do_sample, settings.temperature = request.temperature > 0, request.temperature
    for name in ("top_p", "top_k"):
        value = getattr(request, name)
        if value is None:
            continue
        if request.temperature is None and not settings.do_sample:
            raise RequestError(
                f"{name} has no effect on greedy decoding, the default here; send temperature, too", name
            )
        setattr(settings, name, value)
    if request.ignore_eos:
        settings.eos_token_id = -1  # no token has it
    settings.seed = request.seed if settings.do_sample else None
    settings.stop_strings = request.stop
    return settings  # type: ignore[no-any-return]


def batch_settings(model: Any, default: GenerationConfig) -> GenerationConfig:
    """What a manager is made with: it has a temperature, top_k and top_p for every request to replace.

    Raises:
        OptionError: continuous batching would not choose tokens as ``generate`` does with ``default``.
    """
    settings: Any = copy.deepcopy(default)
    settings.use_cache = False  # the manager has its own
    # A value that changes nothing would leave the processor out.
    settings.do_sample, settings.temperature, settings.top_k, settings.top_p = True, 0.5, 50, 0.5
    # It leaves out, with a warning in the log, what it does not support.
    unfit = [each for each in model._get_logits_processor(settings) if not each.supports_continuous_batching]
    if unfit:
        raise OptionError(
            f"{', '.join(type(each).__name__ for each in unfit)}: transformers does not apply this in a batch of "
            f"several requests"
        )
    return settings  # type: ignore[no-any-return]


def _sampling(settings: Any) -> dict[str, Any]:
    """For transformers' processors per request; greedy is the first of one token."""
    if not settings.do_sample:
        return {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
    drawn = settings.temperature or 1.0, settings.top_p or 1.0
    top_k = settings.top_k if settings.top_k and settings.top_k > 0 else 2**31 - 1
    return {"temperature": float(drawn[0]), "top_k": top_k, "top_p": float(drawn[1])}


class _TopK(ContinuousBatchingTopKLogitsWarper):
    """transformers' own, but a ``top_k`` of 1 keeps the one token that greedy decoding takes, not all equal ones."""

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        top_k = tensor_arg[: scores.size(0)].clamp(max=scores.size(-1))  # up to 5.23 theirs needs it
        first = scores.argmax(-1, keepdim=True)
        only = torch.full_like(scores, self.filter_value).scatter(-1, first, scores.gather(-1, first))
        return torch.where((top_k == 1).unsqueeze(-1), only, super().__call__(scores, top_k))


# -- the manager -------------------------------------------------------------------------------------------------------


def pool_blocks(config: Any, num_blocks: int) -> int:
    """The blocks that transformers' cache needs to hold ``num_blocks`` of every layer, whatever the layers' kinds.

    Raises:
        OptionError: layers that continuous batching has no cache for.
    """
    try:
        grouped: Any = group_layers_by_attn_type(config)
    except ValueError as error:
        raise OptionError(
            f"{config.model_type}: transformers' server batches models of full and sliding attention alone ({error}); "
            f"use --engine vllm, or headrace generate"
        ) from error
    if isinstance(grouped, tuple):  # up to transformers 5.19: groups of layers share the blocks
        return num_blocks * len(grouped[0])
    sizes = [len(layers) for layers in grouped.values()]
    if len(sizes) == 1:
        return num_blocks
    # Kinds of layers are given whole sectors, which blocks of each kind fill: one sector of each may be begun.
    return num_blocks + len(sizes) * -(-math.lcm(*sizes) // sum(sizes))


def _new_manager(model: Any, pool: Pool, seed: int | None) -> Any:
    known = {row.name for row in fields(ContinuousBatchingConfig)}
    options: dict[str, Any] = {
        # Graphs and asynchronous batches would double the memory, and change nothing where the link decides.
        "use_cuda_graph": False,
        "use_async_batching": False,
        "auto_switch_to_flash": False,
        "page_size" if "page_size" in known else "block_size": pool.block_tokens,  # the latter up to transformers 5.19
        "num_blocks": pool_blocks(model.config.get_text_config(), pool.num_blocks),
        "max_batch_tokens": min(_STEP_TOKENS, pool.num_tokens),
        "per_request_processors": True,
        "seed": seed,
    }
    torch.seed() if seed is None else torch.manual_seed(seed)  # up to transformers 5.20 the configuration has no seed
    manager = model.init_continuous_batching(
        generation_config=batch_settings(model, model.generation_config),
        continuous_batching_config=ContinuousBatchingConfig(**{k: v for k, v in options.items() if k in known}),
    )
    processors = manager.logit_processor.logits_processor
    for index, processor in enumerate(processors):
        if isinstance(processor, ContinuousBatchingTopKLogitsWarper):
            processors[index] = _TopK(processor)  # type: ignore[arg-type] # has what it reads of transformers' own
    manager.start()
    return manager


# -- requests ----------------------------------------------------------------------------------------------------------


class _Job:
    """One request, from its arrival to its end: texts in a queue that ends with ``None``, up to a stop string.

    For transformers' handlers it is the streamer, too.
    """

    def __init__(
        self, prompt: list[int], settings: Any, tokenizer: Any, is_raw: bool, is_streaming: bool, parser: Any = None
    ) -> None:
        self.prompt, self.settings, self.is_streaming = prompt, settings, is_streaming
        self.stops = settings.stop_strings or []
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.tokens: list[int] = []
        self.text = ""
        self.cancel: Any = None
        self.error: str | None = None
        self.has_started = False
        self._tokenizer, self._parser, self._skips = tokenizer._tokenizer, parser, not is_raw
        self._stream: Any = DecodeStream([], skip_special_tokens=self._skips)
        self._sent = 0
        self._put_events([] if parser is None else parser.initial_events)

    @property
    def total_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens)

    def add(self, tokens: list[int], is_last: bool) -> bool:
        """Take further tokens; whether the answer has ended with them."""
        is_stopped = False
        for token in tokens:
            self.tokens.append(token)
            self.text += self._stream.step(self._tokenizer, token) or ""
            is_stopped = self._cut()
            if is_stopped:
                break
        if is_last and not is_stopped:
            # With the bytes of a character that the last token leaves open.
            whole = self._tokenizer.decode(self.tokens, skip_special_tokens=self._skips)
            self.text = whole if whole.startswith(self.text) else self.text
            is_stopped = self._cut()
        ends = self.settings.eos_token_id
        if is_stopped or self.tokens[-1:] == [ends] or (isinstance(ends, list) and self.tokens[-1] in ends):
            self.settings.max_new_tokens = None  # by it transformers' handlers tell "length" from "stop"
        has_ended = is_last or is_stopped
        # What may be the begin of a stop string has to wait.
        held = 0 if has_ended else max((_common(self.text[self._sent :], stop) for stop in self.stops), default=0)
        self._put(self.text[self._sent : len(self.text) - held])
        self._sent = len(self.text) - held
        if has_ended:
            self._finish()
        return has_ended

    def fail(self, message: str) -> None:
        """End without an answer."""
        self.error = message
        self.queue.put_nowait(_StreamError(json.dumps(message)[1:-1]))  # transformers puts it between quotes

    def _cut(self) -> bool:
        found = [at for stop in self.stops if (at := self.text.find(stop)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def _put(self, text: str) -> None:
        if self._parser is not None:
            self._put_events(self._parser.feed(text) if text else [])
        elif text:
            self.queue.put_nowait(text)

    def _finish(self) -> None:
        if self._parser is not None:
            with suppress(ValueError, RuntimeError):  # of an answer that ends within a call of a tool
                self._put_events(self._parser.finalize()[1])
        self.queue.put_nowait(None)

    def _put_events(self, events: list[Any]) -> None:
        for item in response_events_to_chunks(events):
            self.queue.put_nowait(item)


def _common(text: str, stop: str) -> int:
    """Characters at the end of a text that a stop string begins with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


class Batches(BaseGenerateManager):
    """Runs requests of the handlers of transformers' server; belongs to one event loop.

    Args:
        model: a causal language model, offloaded or not.
        pool: the cache that requests share.
        max_waiting: requests that wait for it.
    """

    def __init__(self, model: Any, pool: Pool, max_waiting: int) -> None:
        self.model = model
        self.admission = Admission(pool, max_waiting)
        self.prompt_tokens = self.generated_tokens = 0  # of requests that ended well
        self._jobs: dict[str, _Job] = {}
        self._manager: Any = None
        self._alone: str | None = None  # the request that the manager was made for
        self._admitted: deque[str] = deque()  # hold their part of the cache, and are to be started
        self._wake = asyncio.Event()
        self._starter: asyncio.Task[None] | None = None
        self._error: str | None = None
        self._vocabulary = model.get_input_embeddings().num_embeddings

    # -- the seam of transformers' handlers ----------------------------------------------------------------------------

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Nothing: a manager is made when a first request starts."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Any]:
        """A queue of texts that ends with ``None``, and what counts and cancels.

        Raises:
            RequestError: for a request that can never run, and if the queue is full.
        """
        is_raw = response_parser is not None
        job = _Job(list(inputs["input_ids"]), gen_config, processor, is_raw, True, response_parser)
        self._enter(request_id, job)
        return job.queue, job

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """The text, the number of tokens of the prompt, and the tokens of the answer.

        Raises:
            RequestError: for a request that can never run, and if the queue is full.
            CBWorkerDeadError: the batch ended with an error.
        """
        is_raw = processor.response_template is not None
        job = _Job(list(inputs["input_ids"]), gen_config, processor, is_raw, False)
        self._enter(request_id, job)
        try:
            while (item := await job.queue.get()) is not None:
                if isinstance(item, _StreamError):
                    raise CBWorkerDeadError(job.error)
        finally:
            self.cancel_request(request_id)  # of a client that has gone; else it has ended already
        # So that handlers parse the answer as it was cut, not the tokens behind a stop string.
        parse = processor.parse_response
        processor.parse_response = lambda _, *args, **options: parse(job.text, *args, **options)
        return job.text, len(job.prompt), job.tokens

    def cancel_request(self, request_id: str) -> None:
        """End a request whose answer nobody waits for; one that has ended is none."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return
        self.admission.leave(request_id)
        if job.has_started and self._manager is not None:
            self._manager.cancel_request(request_id)
            self._manager.output_router.result_handlers.pop(request_id, None)
        self._admit()

    def stop(self) -> None:
        """End the batch; requests that still run fail."""
        self._fail_all("the server stops")
        if self._starter is not None:
            self._starter.cancel()
        if self._manager is not None:
            self._manager.stop(block=True)
            self._manager = None

    def dead_reason(self) -> str | None:
        """Why no request can be carried out any more; ``None``: the engine is alive."""
        if self._error is None and self._manager is not None:
            error = self._manager.background_thread_status.fatal_error
            if error is not None or not self._manager.is_running():
                self._error = f"the batching loop has ended: {error or 'it gave no reason'}"
        return self._error

    # -- the life of a request -----------------------------------------------------------------------------------------

    def _enter(self, name: str, job: _Job) -> None:
        if not job.prompt:
            raise RequestError("the prompt has no tokens; a causal language model needs at least one to continue")
        if max(job.prompt) >= self._vocabulary:
            raise RequestError(
                f"token {max(job.prompt)} of the prompt: the model has embeddings for {self._vocabulary}"
            )
        if job.settings.max_new_tokens is None:
            job.settings.max_new_tokens = max(1, min(_ANSWER_TOKENS, self.admission.pool.longest - len(job.prompt)))
        reason = self.dead_reason()
        if reason is not None:
            raise CBWorkerDeadError(reason)
        alone = None if job.settings.seed is None else name
        self.admission.enter(name, len(job.prompt), job.settings.max_new_tokens, alone)
        self._jobs[name] = job
        job.cancel = lambda: self.cancel_request(name)
        if self._starter is None:
            self._starter = asyncio.get_running_loop().create_task(self._start_requests())
        self._admit()

    def _admit(self) -> None:
        """Give their parts of the cache to requests that wait; at once, so that the queue holds none that could run."""
        self._admitted.extend(self.admission.start())
        self._wake.set()

    async def _start_requests(self) -> None:
        """Start requests as they come and as others end."""
        try:
            while self.dead_reason() is None:
                while self._admitted:
                    await self._start(self._admitted.popleft())
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _LOOK_S)
                self._wake.clear()
                while self._manager is not None and self._manager.get_result(timeout=0) is not None:
                    pass  # the last tokens of requests that were cancelled
        except Exception as error:  # of a manager that cannot be made
            self._error = f"no batch can be made: {type(error).__name__}: {error}"
        self._fail_all(str(self._error))

    async def _start(self, name: str) -> None:
        job = self._jobs.get(name)
        if job is None:  # cancelled meanwhile
            return
        alone = None if job.settings.seed is None else name
        if self._manager is None or self._alone != alone:
            # Whatever ran has ended. Taken away first, or requests that come meanwhile would find the ended manager.
            ended, self._manager = self._manager, None
            if ended is not None:
                await asyncio.to_thread(ended.stop, block=True)
            del ended  # with its cache, before the next one is allocated, which takes a while
            self._manager = await asyncio.to_thread(_new_manager, self.model, self.admission.pool, job.settings.seed)
            self._alone = alone
            if name not in self._jobs:
                return

        def on_output(output: Any) -> None:
            if name not in self._jobs:
                return
            if output.error is not None:
                self.cancel_request(name)
                job.fail(str(output.error))
            elif job.add(output.generated_tokens[job.total_tokens :], output.is_finished()):
                self.prompt_tokens += len(job.prompt)
                self.generated_tokens += job.total_tokens
                self.cancel_request(name)

        self._manager.register_result_handler(name, on_output)
        job.has_started = True
        self._manager.add_request(
            job.prompt,
            request_id=name,
            max_new_tokens=job.settings.max_new_tokens,
            streaming=job.is_streaming or bool(job.stops),
            eos_token_id=job.settings.eos_token_id,
            **_sampling(job.settings),
        )

    def _fail_all(self, message: str) -> None:
        for name, job in list(self._jobs.items()):
            self.cancel_request(name)
            job.fail(message)
