"""The engine: transformers' continuous batching, one batch after another, behind the seam of transformers' server.

transformers decides the sampling when a batching manager is made, and one request too large for its cache ends the
manager for everybody. So requests pass :class:`~headrace.serving.admission.Admission` first, and a batch with another
sampling gets a manager of its own once the batch before it has ended.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.utils import BaseGenerateManager, CBStreamer, CBWorkerDeadError, _StreamError
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

from headrace.errors import OptionError
from headrace.serving.admission import Admission, Pool
from headrace.serving.request_body import RequestError, Wanted

__all__ = ["BLOCK_TOKENS", "Batches", "pool_blocks", "refused_processors", "settings_of"]

BLOCK_TOKENS = 32
_STEP_TOKENS = 2048
_ANSWER_TOKENS = 1024
_LOOK_S = 1.0


@dataclass(frozen=True)
class _Sampling:
    """How a batch chooses tokens: of requests that run together it is equal.

    ``alone``: the request that a batch is for. One with a seed has a batch to itself, because all requests of a batch
    draw from one generator.
    """

    do_sample: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    alone: str | None = None


@dataclass
class _Job:
    """One request, from its arrival to its end."""

    prompt: list[int]
    settings: GenerationConfig
    sampling: _Sampling
    streaming: bool
    deliver: Callable[[Any], None]  # is given transformers' GenerationOutput
    fail: Callable[[str], None]
    has_started: bool = False


def settings_of(wanted: Wanted, default: GenerationConfig) -> GenerationConfig:
    """The generation config of a request: the model's own, and what the request says.

    Raises:
        RequestError: for sampling that greedy decoding would ignore.
    """
    settings = copy.deepcopy(default)
    settings.max_new_tokens, settings.max_length = wanted.max_tokens, None
    settings.use_cache = False  # the manager has its own
    if wanted.temperature is not None:
        settings.do_sample, settings.temperature = wanted.temperature > 0, wanted.temperature
    for name in ("top_p", "top_k"):
        value = getattr(wanted, name)
        if value is None:
            continue
        if wanted.temperature is None and not settings.do_sample:
            raise RequestError(
                f"{name} has no effect on greedy decoding, the default here; send temperature, too", name
            )
        setattr(settings, name, value)
    if wanted.ignore_eos:
        settings.eos_token_id = -1  # no token has it
    settings.seed = wanted.seed  # type: ignore[attr-defined]
    return settings


def refused_processors(model: Any, settings: GenerationConfig) -> str | None:
    """Why continuous batching would not choose tokens as ``generate`` does with ``settings``; ``None``: it would."""
    # It leaves out, with a warning in the log, what it does not support.
    processors = model._get_logits_processor(settings)
    unfit = [type(each).__name__ for each in processors if not each.supports_continuous_batching]
    if not unfit:
        return None
    asked = {name: value for name, value in settings.to_diff_dict().items() if isinstance(value, int | float | list)}
    return f"{', '.join(unfit)}: transformers does not apply this in a batch of several requests (settings: {asked})"


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


def _config(block_tokens: int, **options: Any) -> ContinuousBatchingConfig:
    """A configuration of continuous batching; what a version of transformers does not have is left out."""
    known = {row.name for row in fields(ContinuousBatchingConfig)}
    size = "page_size" if "page_size" in known else "block_size"  # up to transformers 5.19
    options = {size: block_tokens, "auto_switch_to_flash": False, **options}
    # Graphs and asynchronous batches would double the memory, and change nothing where the link decides.
    return ContinuousBatchingConfig(
        use_cuda_graph=False,
        use_async_batching=False,
        **{name: value for name, value in options.items() if name in known},
    )


class Batches(BaseGenerateManager):
    """Runs requests of the handlers of transformers' server; belongs to one event loop.

    Args:
        model: a causal language model, offloaded or not.
        pool: the cache that requests share.
        max_waiting: requests that wait for it.
    """

    def __init__(self, model: Any, pool: Pool, max_waiting: int) -> None:
        self.model = model
        self.admission: Admission[_Sampling] = Admission(pool, max_waiting)
        self.prompt_tokens = self.generated_tokens = 0  # of requests that ended well
        self._jobs: dict[str, _Job] = {}
        self._manager: Any = None
        self._sampling = _Sampling()  # what the manager was made for
        self._admitted: deque[str] = deque()  # hold their part of the cache, and are to be started
        self._wake = asyncio.Event()
        self._starter: asyncio.Task[None] | None = None
        self._error: str | None = None
        self._vocabulary = model.get_input_embeddings().num_embeddings

    # -- the seam of transformers' handlers ----------------------------------------------------------------------------

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Nothing: a batch is made when its first request starts."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Any]:
        """A queue of texts that ends with ``None``, and what counts and cancels.

        Raises:
            RequestError: for a request that can never run, and if the queue is full.
        """
        queue: asyncio.Queue[Any] = asyncio.Queue()
        tokenizer = getattr(processor, "tokenizer", processor)._tokenizer
        loop = asyncio.get_running_loop()
        canceller: Any = self
        streamer = CBStreamer(canceller, request_id, tokenizer, loop, queue, response_parser=response_parser)

        def deliver(output: Any) -> None:
            streamer.put(output)
            if output.is_finished():
                streamer.end()

        def fail(message: str) -> None:
            queue.put_nowait(_StreamError(json.dumps(message)[1:-1]))  # transformers puts it between quotes

        self._enter(request_id, inputs, gen_config, True, deliver, fail)
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """The text, the number of tokens of the prompt, and the tokens of the answer.

        Raises:
            RequestError: for a request that can never run, and if the queue is full.
            CBWorkerDeadError: the batch ended with an error.
        """
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

        def deliver(output: Any) -> None:
            if output.is_finished() and not answer.done():
                answer.set_result(output.generated_tokens)

        def fail(message: str) -> None:
            if not answer.done():
                answer.set_exception(CBWorkerDeadError(message))

        self._enter(request_id, inputs, gen_config, False, deliver, fail)
        try:
            tokens = await answer
        finally:
            self.cancel_request(request_id)  # of a client that has gone; else it has ended already
        return processor.decode(tokens, skip_special_tokens=True), len(inputs["input_ids"]), tokens

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

    def _enter(
        self,
        name: str,
        inputs: Any,
        settings: GenerationConfig,
        streaming: bool,
        deliver: Callable[[Any], None],
        fail: Callable[[str], None],
    ) -> None:
        prompt = list(inputs["input_ids"])
        if not prompt:
            raise RequestError("the prompt has no tokens; a causal language model needs at least one to continue")
        if max(prompt) >= self._vocabulary:
            raise RequestError(f"token {max(prompt)} of the prompt: the model has embeddings for {self._vocabulary}")
        if settings.max_new_tokens is None:
            settings.max_new_tokens = max(1, min(_ANSWER_TOKENS, self.admission.pool.longest - len(prompt)))
        refused = refused_processors(self.model, settings)
        if refused is not None:
            raise RequestError(refused)
        reason = self.dead_reason()
        if reason is not None:
            raise CBWorkerDeadError(reason)
        sampling = _Sampling()
        if settings.do_sample:
            seed = getattr(settings, "seed", None)
            drawn = settings.temperature, settings.top_p, settings.top_k
            sampling = _Sampling(True, *drawn, seed, None if seed is None else name)
        self.admission.enter(name, len(prompt), settings.max_new_tokens, sampling)
        self._jobs[name] = _Job(prompt, settings, sampling, streaming, deliver, fail)
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
        if name in self._jobs and (self._manager is None or self._jobs[name].sampling != self._sampling):
            # Whatever ran has ended. A new pool is allocated, which takes a while.
            await asyncio.to_thread(self._new_manager, self._jobs[name])
        job = self._jobs.get(name)
        if job is None:  # cancelled meanwhile
            return

        def on_output(output: Any) -> None:
            if name not in self._jobs:
                return
            if output.error is not None:
                self._fail(name, str(output.error))
                return
            if output.is_finished():
                del self._jobs[name]
                self.admission.leave(name)
                self.prompt_tokens += len(job.prompt)
                self.generated_tokens += len(output.generated_tokens)
                self._admit()
            job.deliver(output)

        self._manager.register_result_handler(name, on_output)
        job.has_started = True
        self._manager.add_request(
            job.prompt,
            request_id=name,
            max_new_tokens=job.settings.max_new_tokens,
            streaming=job.streaming,
            eos_token_id=job.settings.eos_token_id,
        )

    def _new_manager(self, job: _Job) -> None:
        # Taken away first: requests that come meanwhile would find a manager whose loop has ended.
        ended, self._manager = self._manager, None
        if ended is not None:
            ended.stop(block=True)
        del ended  # with its cache, before the next one is allocated
        seed = {} if job.sampling.seed is None else {"seed": job.sampling.seed}
        # Up to transformers 5.20 the configuration has no seed.
        torch.manual_seed(job.sampling.seed) if seed else torch.seed()
        pool, config = self.admission.pool, self.model.config.get_text_config()
        manager = self.model.init_continuous_batching(
            generation_config=copy.deepcopy(job.settings),
            continuous_batching_config=_config(
                pool.block_tokens,
                num_blocks=pool_blocks(config, pool.num_blocks),
                max_batch_tokens=min(_STEP_TOKENS, pool.num_tokens),
                **seed,
            ),
        )
        manager.start()
        self._manager, self._sampling = manager, job.sampling

    def _fail(self, name: str, message: str) -> None:
        job = self._jobs[name]
        self.cancel_request(name)
        job.fail(message)

    def _fail_all(self, message: str) -> None:
        for name in list(self._jobs):
            self._fail(name, message)
