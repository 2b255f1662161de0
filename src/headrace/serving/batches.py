"""The engine: transformers' continuous batching, behind the interface of the generation managers of its server.

One request too large for the cache ends the continuous-batching manager for all, so requests pass
:class:`~headrace.serving.admission.Admission` first. The manager has the sampling of each request, but samples all of
them from one generator, so a request with a seed runs alone.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList, TopKLogitsWarper
from transformers.cli.serving import utils
from transformers.generation.continuous_batching import cb_logits_processors
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from headrace.errors import OptionError
from headrace.formatting import TokenText
from headrace.serving.admission import Admission, Pool
from headrace.serving.request_body import Completion, GenerationRequest, RequestError

BLOCK_TOKENS = 32
_STEP_TOKENS = 2048
_ANSWER_TOKENS = 1024
_CHECK_S = 1.0
_STEP_S = 600  # of the longest forward: 2,048 tokens of a model on a slow disk


# -- sampling ----------------------------------------------------------------------------------------------------------


def settings_of(request: GenerationRequest, default: GenerationConfig) -> SimpleNamespace:
    """How a request generates: as ``default``, changed by the fields of the request.

    Raises:
        RequestError: a field has no effect on greedy decoding.
    """
    given = request.model_dump(include={"temperature", "top_k", "top_p"}, exclude_none=True)
    samples = given.get("temperature", bool(default.do_sample)) > 0
    idle = [name for name, value in given.items() if value not in (1, 0, -1)]  # all tokens, or only the likeliest
    if idle and not samples and "temperature" not in given:
        name = idle[0]
        raise RequestError(f"{name} has no effect on greedy decoding, the default here; add temperature", name)
    temperature, top_k, top_p = (given.get(name, getattr(default, name)) for name in ("temperature", "top_k", "top_p"))
    if not samples:
        temperature, top_k, top_p = 1, 1, 1  # greedy decoding
    processing = {
        "eos_token_id": -1 if request.ignore_eos else default.eos_token_id,  # no token is -1
        "temperature": float(temperature or 1),
        "top_k": top_k if top_k and top_k > 0 else 2**31 - 1,
        "top_p": float(top_p or 1),
    }
    if samples and request.seed not in (None, -1):  # -1: a random one
        processing["seed"] = request.seed
    changes = {"repetition_penalty": request.repetition_penalty, "min_new_tokens": request.min_tokens}
    own = default.stop_strings or []
    return SimpleNamespace(
        max_new_tokens=request.max_tokens,
        most_tokens=default.max_new_tokens or _ANSWER_TOKENS,
        tools=getattr(request, "tools", None),
        one_call=getattr(request, "parallel_tool_calls", None) is False,
        stops=[*(request.stop or []), *([own] if isinstance(own, str) else own)],
        continues=isinstance(request, Completion),
        processing=processing,
        changes={name: value for name, value in changes.items() if value is not None},
    )


def _processors(model: Any, settings: SimpleNamespace, num_prompt: int, device: torch.device) -> LogitsProcessorList:
    """Logits processors of ``generate`` for the tokens of a request."""
    config, ends = copy.deepcopy(model.generation_config), settings.processing["eos_token_id"]
    vars(config).update(settings.changes, do_sample=False, eos_token_id=None if ends == -1 else ends)
    model._prepare_special_tokens(config, device=device)
    found: LogitsProcessorList = model._get_logits_processor(config, num_prompt, device=device)
    return found


class _Processors(cb_logits_processors.ContinuousBatchingLogitsProcessor):
    """Applies the processors of each request, made at its first token, to all its tokens.

    In a batch transformers has only the last token of each, and drops these processors.
    """

    supported_kwargs: dict[str, type] = {"processors": Callable}  # type: ignore[dict-item] # noqa: RUF012
    ignored_kwargs = ()
    _states: Sequence[Any] = ()

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()  # not read

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._states = [request.state for request in requests_with_new_token]
        return torch.zeros(len(self._states), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        for at, state in enumerate(self._states):
            if processors := state.logit_processor_kwargs["processors"](scores.device):
                ids = torch.tensor([state.initial_tokens + state.generated_tokens], device=scores.device)
                scores[at] = processors(ids, scores[at : at + 1])[0]
        return scores


class _TopK(cb_logits_processors.ContinuousBatchingTopKLogitsWarper):
    """transformers' own, but a ``top_k`` of 1 keeps only the token of greedy decoding, not all equally likely ones."""

    # The seed is for the scheduler.
    supported_kwargs = cb_logits_processors.ContinuousBatchingTopKLogitsWarper.supported_kwargs | {"seed": int}

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        top_k = tensor_arg[: scores.size(0)].clamp(max=scores.size(-1))  # up to 5.23 theirs needs it
        first = scores.argmax(-1, keepdim=True)
        only = torch.full_like(scores, self.filter_value).scatter(-1, first, scores.gather(-1, first))
        return torch.where((top_k == 1).unsqueeze(-1), only, super().__call__(scores, top_k))


cb_logits_processors.CLASSIC_TO_CB_PROCESSORS_MAP[TopKLogitsWarper] = _TopK


class _Scheduler(FIFOScheduler):
    """transformers' own, but what others have drawn, or have left in the cache, does not change an answer to a seed."""

    def __init__(self, cache: Any, *args: Any, **options: Any) -> None:
        super().__init__(cache, *args, **options)
        self._shares_prefixes = cache.use_prefix_sharing
        self.begin_s = time.monotonic()  # of the step that runs

    def clear_cancelled_requests(self) -> Any:
        self.begin_s = time.monotonic()  # the batching loop calls this before each step, and ten times a second if idle
        return super().clear_cancelled_requests()

    def add_waiting_request(self, state: Any) -> None:
        # A request with a seed runs alone: nothing is drawn from here to its first token.
        seed = state.logit_processor_kwargs.get("seed")
        torch.manual_seed(secrets.randbits(63) if seed is None else seed)
        self.cache.use_prefix_sharing = self._shares_prefixes and seed is None
        super().add_waiting_request(state)


SCHEDULER_MAPPING["headrace"] = _Scheduler


# -- the manager -------------------------------------------------------------------------------------------------------


def pool_blocks(config: Any, num_blocks: int) -> int:
    """The blocks that transformers' cache needs to hold ``num_blocks`` of every layer, for layers of any kinds.

    Raises:
        OptionError: continuous batching has no cache for some layers.
    """
    try:
        grouped: Any = group_layers_by_attn_type(config)
    except ValueError as error:
        raise OptionError(
            f"{config.model_type}: transformers' server batches only models of full and sliding attention ({error}); "
            f"use --engine vllm, or headrace generate"
        ) from error
    if isinstance(grouped, tuple):  # up to transformers 5.19: groups of layers share the blocks
        return num_blocks * len(grouped[0])
    sizes = [len(layers) for layers in grouped.values()]
    # Each kind of layers is given sectors, which its blocks fill; the last sector of each may be partly filled.
    return num_blocks + (len(sizes) > 1) * len(sizes) * -(-math.lcm(*sizes) // sum(sizes))


def _new_manager(model: Any, pool: Pool) -> Any:
    known = {row.name for row in fields(ContinuousBatchingConfig)}
    options: dict[str, Any] = {
        # Graphs and asynchronous batches would double the memory, and save nothing where the link is the limit.
        "use_cuda_graph": False,
        "use_async_batching": False,
        "auto_switch_to_flash": False,
        "page_size" if "page_size" in known else "block_size": pool.block_tokens,  # the latter up to transformers 5.19
        "num_blocks": pool_blocks(model.config.get_text_config(), pool.num_blocks),
        "max_batch_tokens": min(_STEP_TOKENS, pool.num_tokens),
        "per_request_processors": True,
        "scheduler_type": "headrace",
    }
    # A value that changes nothing would leave the processor out.
    settings = {"do_sample": True, "temperature": 0.5, "top_k": 50, "top_p": 0.5, "use_cache": False}
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig.from_dict(settings),
        continuous_batching_config=ContinuousBatchingConfig(**{k: v for k, v in options.items() if k in known}),
    )
    applied = manager.logit_processor
    applied.logits_processor.insert(0, _Processors())
    applied.tensors_required += 1
    applied.supported_keys.update(_Processors.supported_kwargs)
    manager.start()
    return manager


# -- requests ----------------------------------------------------------------------------------------------------------


class _Job(utils.CBStreamer):
    """One request, as transformers' streamer, but with the answer up to a stop string."""

    task: asyncio.Task[None]

    def __init__(
        self, batches: Batches, name: str, processor: Any, inputs: Any, settings: Any, parser: Any = None
    ) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()  # of texts, and of what the parser finds; ends with None
        tokenizer, loop = processor._tokenizer, asyncio.get_running_loop()
        super().__init__(batches, name, tokenizer, loop, self.queue, parser)  # type: ignore[arg-type] # to cancel
        self.name, self.prompt, self.settings = name, list(inputs["input_ids"]), settings
        self.tokens: list[int] = []
        self.text = ""
        self.admitted = asyncio.Event()
        self.ended = asyncio.Future[None]()
        # Special tokens are left to the parser of transformers, if there is one.
        decode = partial(tokenizer.decode, skip_special_tokens=processor.response_template is None)
        self._new_text = TokenText(decode, self.prompt if settings.continues else ())
        # Text that may begin a stop string has to wait for the next tokens.
        self._num_held = max(map(len, settings.stops), default=1) - 1
        self._num_sent, self._has_called = 0, False

    def put(self, output: Any) -> None:
        """Take a further part of the answer from the manager."""
        if self.ended.done():
            return
        if output.error is not None:
            self.ended.set_exception(RequestError(output.error, status=503))
            return
        found: list[int] = []
        ended: list[int | None] = [None] if output.is_finished() else []
        for token in [*output.generated_tokens[len(self.tokens) :], *ended]:
            self.tokens += [] if token is None else [token]
            self.text += self._new_text.add(token)
            found = [at for stop in self.settings.stops if (at := self.text.find(stop)) >= 0]
            if found:
                self.text = self.text[: min(found)]
                break
        self.total_tokens = len(self.tokens)
        ends = self.settings.processing["eos_token_id"]
        if found or self.tokens[-1] in (ends if isinstance(ends, list) else [ends]):
            self.settings.max_new_tokens = None  # by it transformers' handlers tell "length" from "stop"
        has_ended = output.is_finished() or bool(found)
        ready = self.text[self._num_sent : None if has_ended or not self._num_held else -self._num_held]
        self._num_sent += len(ready)
        parser: Any = self._parser
        chunks = [ready] * bool(ready) if parser is None else _found(parser.feed, ready)
        if has_ended:
            self.ended.set_result(None)
            chunks += [None] if parser is None else [*_found(lambda: parser.finalize()[1]), None]
        for chunk in chunks:
            is_call = isinstance(chunk, utils.ToolCall)
            if not (is_call and self._has_called and self.settings.one_call):
                self.queue.put_nowait(chunk)
            self._has_called |= is_call


def _found(read: Callable[..., Any], *texts: str) -> list[Any]:
    """Tool calls that transformers' parser finds; nothing in a call that is incomplete, no JSON, or without a name."""
    with suppress(Exception):  # of any type: transformers takes any JSON of a model for a call
        chunks = utils.response_events_to_chunks(read(*texts))
        if all(chunk.name.encode() for chunk in chunks if isinstance(chunk, utils.ToolCall)):
            return chunks
    return []


def _message(chunks: list[Any]) -> dict[str, Any]:
    """The message of an answer, of what was found in it."""
    calls = [chunk for chunk in chunks if isinstance(chunk, utils.ToolCall)]
    return {
        "thinking": "".join(chunk for chunk in chunks if isinstance(chunk, utils.ReasoningText)) or None,
        "content": "".join(chunk for chunk in chunks if type(chunk) is str),
        "tool_calls": [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls],
    }


class Batches(utils.BaseGenerateManager):
    """Runs the requests of transformers' handlers; belongs to one event loop.

    Args:
        model: a causal language model, offloaded or not.
        pool: the cache that requests share.
        max_waiting: requests that may wait for it.
    """

    def __init__(self, model: Any, pool: Pool, max_waiting: int) -> None:
        self.model = model
        self.admission = Admission(pool, max_waiting)
        self.prompt_tokens = self.generated_tokens = 0  # of requests that ended without an error
        self._jobs: dict[str, _Job] = {}
        self._manager: Any = None  # until the first request
        self._error: str | None = None

    # -- what transformers' handlers call ------------------------------------------------------------------------------

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Any]:
        """A queue of texts that ends with ``None``, and the request, which counts its tokens.

        Raises:
            RequestError: the request can never run, or the queue is full.
        """
        job = _Job(self, request_id, processor, inputs, gen_config, response_parser)
        settings, num_tokens, longest = job.settings, len(job.prompt), self.admission.pool.longest
        if not job.prompt:
            raise RequestError("the prompt has no tokens; a causal language model needs at least one to continue")
        largest, vocabulary = max(job.prompt), self.model.get_input_embeddings().num_embeddings
        if largest >= vocabulary:
            raise RequestError(f"token {largest} of the prompt: the model has embeddings for {vocabulary}")
        if settings.max_new_tokens is None:
            settings.max_new_tokens = max(1, min(settings.most_tokens, longest - num_tokens))
        self.require_alive()
        if self._manager is None:
            self._manager = _new_manager(self.model, self.admission.pool)
        settings.processing["processors"] = cache(partial(_processors, self.model, settings, num_tokens))
        alone = job.name if "seed" in settings.processing else None
        self.admission.enter(job.name, num_tokens, settings.max_new_tokens, alone)
        self._jobs[job.name] = job
        job.task = asyncio.create_task(self._run(job))
        self._admit()
        return job.queue, job

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """The text, the number of tokens of the prompt, and the tokens of the answer.

        Raises:
            RequestError: the request can never run, the queue is full, or the batch ended with an error.
        """
        parser = utils.build_response_parser(processor, model, inputs["input_ids"], gen_config.tools)
        queue, job = self.generate_streaming(model, processor, inputs, gen_config, request_id, parser)
        chunks: list[Any] = []
        while (item := await queue.get()) is not None:
            if isinstance(item, utils._StreamError):
                raise RequestError(json.loads(f'"{item.msg}"'), status=503)
            chunks.append(item)
        # Handlers would parse the tokens, also those behind a stop string, and fail at an incomplete tool call.
        processor.parse_response = lambda *_, **__: _message(chunks)
        return job.text, len(job.prompt), job.tokens

    def cancel_request(self, request_id: str) -> None:
        """End a request, and free its part of the cache; an unknown one is ignored."""
        if request_id in self._jobs:
            self._jobs[request_id].task.cancel("the request was cancelled")

    def stop(self) -> None:
        """Stop the engine; requests that still run or wait fail."""
        self._error = "the server stops"
        for job in self._jobs.values():
            job.task.cancel(self._error)
        if self._manager is not None:
            self._manager.stop(block=True, hard_stop=True)

    def dead_reason(self) -> str | None:
        """Why no request can run any more; ``None``: the engine is alive."""
        if (manager := self._manager) is None or self._error is not None:
            return self._error
        if not manager.is_running() or manager.background_thread_status.fatal_error is not None:
            error = manager.background_thread_status.fatal_error or "its thread is gone"
            self._error = f"the batching loop has ended: {error}"
        elif manager.batch_processor and (s := time.monotonic() - manager.batch_processor.scheduler.begin_s) > _STEP_S:
            return f"the model hangs: its step has run for {s:.0f} s"
        return self._error

    def require_alive(self) -> bool:
        """``True``, or a RequestError with the reason why no request can run."""
        if (reason := self.dead_reason()) is not None:
            raise RequestError(reason, status=503)
        return True

    # -- the life of a request -----------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Reserve cache for requests that wait; at once, so that none that could run counts as waiting."""
        for name in self.admission.start():
            self._jobs[name].admitted.set()

    async def _run(self, job: _Job) -> None:
        """A request from its place in the queue to its end."""
        manager, settings = self._manager, job.settings
        try:
            await job.admitted.wait()
            manager.register_result_handler(job.name, job.put)
            manager.add_request(job.prompt, job.name, settings.max_new_tokens, streaming=True, **settings.processing)
            # A request that is added while the batching loop ends with an error may be dropped.
            while not (await asyncio.wait({job.ended}, timeout=_CHECK_S))[0]:
                self.require_alive()
            await job.ended
            self.prompt_tokens += len(job.prompt)
            self.generated_tokens += job.total_tokens
        except (Exception, asyncio.CancelledError) as error:
            # transformers puts it between quotes.
            job.queue.put_nowait(utils._StreamError(json.dumps(str(error))[1:-1]))
        finally:
            del self._jobs[job.name]
            job.ended.cancel()
            self.admission.leave(job.name)
            manager.cancel_request(job.name)
            manager.output_router.result_handlers.pop(job.name, None)
            while manager.get_result(timeout=0) is not None:
                pass  # drop the last tokens of cancelled requests
            self._admit()
