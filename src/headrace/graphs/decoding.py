"""``generate`` of transformers with its decoding step in CUDA graphs, captured from the eager forward.

An eager step of a large model launches thousands of kernels, and Python takes longer to launch them than a GPU to run
them: 31 ms for 36 layers of Qwen3-8B's shape, of which the GPU needs 8. A replay launches all of them at once; where
the host brings experts from files, all between two layers' admissions.

``generate`` is unchanged, with a static cache (keys and values at fixed addresses) and a prompt that runs eagerly. For
each further token it calls ``model.__call__``, an attribute that it looks up at the instance; there headrace puts a
function that replays. The first step of a kind runs eagerly, as its warm-up; the second is captured. Steps are of one
kind if their inputs have equal shapes and if Python sees the same in the cache: a sliding window that is full takes
another path than one that is not. Everything else that Python sees of the model (modules, attributes, hooks, which
tensors) is compared once per call: a replay does not run Python, so a change drops the graphs.

Calls that cannot be captured run eagerly, with one warning that names the reason.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import operator
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map_only
from transformers import GenerationConfig, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from headrace.api import session_of
from headrace.config import RANK_MODES
from headrace.errors import OptionError, StateError, warn_user
from headrace.experts.rows import CUT, IS_CHECKED, RowMap, setting
from headrace.formatting import format_size
from headrace.graphs.own_graphs import capturing, replaying
from headrace.memory.system import gc_paused, round_up
from headrace.model.torch_private import storage_id
from headrace.stats import timed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from headrace.runtime.prefetcher import Prefetcher
    from headrace.runtime.session import OffloadSession

Inputs = Mapping[str, Any]

_log = logging.getLogger(__name__)
_MARK = "_headrace_decode_graphs"  # at the model

GRAPH_DEVICES = ("cuda",)

# Values of ``cache_implementation`` by which transformers makes a growing cache; the one of Gemma 2's files, too.
_GROWING_CACHES = (None, "dynamic", "hybrid")

# transformers 5.24 has another name for the argument, and warns of the older one.
CACHE_NAME = "cache" if hasattr(GenerateDecoderOnlyOutput, "cache") else "past_key_values"

# Lengths of caches are multiples, so that calls of similar lengths share one.
LENGTH_STEP = 256


def decode_in_graphs(model: PreTrainedModel, context: int = 0, *, with_hooks: bool = True) -> DecodeGraphs:
    """Make ``model.generate`` decode in CUDA graphs, until ``remove()`` of the result or of the offload.

    Args:
        model: model of transformers, offloaded or resident. ``load`` makes this call by itself, without hooks.
        context: the cache has room for at least so many tokens of prompt and answer; by default each call sets it.
        with_hooks: capture your forward hooks with the model: their kernels are replayed and their Python code is not.
            Without it, ``generate`` runs eagerly while the model has any.

    Raises:
        OptionError: the model is not on a GPU.
        StateError: its ``generate`` speculates.
    """
    if model.device.type not in GRAPH_DEVICES:
        raise OptionError(f"decode_in_graphs: expected a model on a GPU, found one on {model.device}")
    session = session_of(model)
    if session is not None and session.guesses is not None:
        raise StateError(
            f"decode_in_graphs: {type(model).__name__}.generate speculates, which does not run in CUDA graphs: load it "
            f"without speculate="
        )
    if (earlier := vars(model).get(_MARK)) is not None:
        earlier.remove()
    graphs = DecodeGraphs(model, session, context, with_hooks)
    graphs.attach()
    return graphs


class DecodeGraphs:
    """Makes ``model.generate`` decode in CUDA graphs, from :meth:`attach` to :meth:`remove`.

    Attributes:
        counts: ``None``, as graphs guess no tokens.
        notes: none.
        session: that of the offload, if any; another one after a resize.
        replays: steps that were replayed so far.
        num_bytes: device memory that the graphs take, without the cache.
    """

    counts, notes = None, ()

    def __init__(self, model: PreTrainedModel, session: OffloadSession | None, context: int, with_hooks: bool) -> None:
        """``session``: of the offload of ``model``, if any. Other arguments as for :func:`decode_in_graphs`."""
        self._model: Any = model
        self.session, self._context, self._with_hooks = session, context, with_hooks
        self._original: Any = self._model.generate
        self._lock = threading.Lock()  # one call at a time uses the cache; others run eagerly
        self._cache: StaticCache | None = None
        self._kind: tuple[int, int, bool] | None = None  # of the cache: sequences, tokens, inference mode
        self._steps = CapturedSteps(model, session)
        self._plan = None if session is None else session.plan
        self._seen: _Seen | None = None  # of the model by the steps that were captured
        self._is_first_step = True  # of a call

    def attach(self) -> None:
        """Put ``generate`` in place."""

        @functools.wraps(self._original)
        def generate(*args: Any, **kwargs: Any) -> Any:
            return self._generate(*args, **kwargs)

        vars(self._model).update({"generate": generate, _MARK: self})
        if self.session is not None:
            self.session.attachments.append(self)

    def remove(self) -> None:
        """Restore ``generate`` and free cache and graphs. Idempotent."""
        if vars(self._model).get(_MARK) is not self:
            return
        for name in ("generate", _MARK):
            del vars(self._model)[name]
        self.release()
        if self.session is not None:
            self.session.attachments.remove(self)
        if (prefetcher := self._steps.prefetcher) is not None:
            prefetcher.replays.release_graphs()

    def check(self) -> None:
        """Nothing: steps have no outputs that are not to be used."""

    def release(self) -> None:
        """Free cache and graphs; the next call makes new ones."""
        self._steps.drop()
        self._cache, self._kind = None, None

    @property
    def num_bytes(self) -> int:
        return self._steps.num_bytes

    @property
    def replays(self) -> int:
        return self._steps.replays

    # -- a call of generate -----------------------------------------------------------------------------------------

    def _generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if args or not self._lock.acquire(blocking=False):
            return self._original(inputs, generation_config, *args, **kwargs)
        try:
            size = self._size_of_call(inputs, generation_config, kwargs)
            if isinstance(size, str):
                self._warn(size)
                return self._original(inputs, generation_config, **kwargs)
            return self._generate_in_graphs(size, inputs, generation_config, kwargs)
        finally:
            self._model.__dict__.pop("__call__", None)
            self._lock.release()

    def _generate_in_graphs(
        self, size: tuple[int, int], inputs: Any, config: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> Any:
        self._model.__dict__["__call__"] = self._step
        self._is_first_step = True
        cache = self._cache_of(*size)
        # The name of an implementation beside a cache would be refused.
        ours = {**kwargs, CACHE_NAME: cache, "cache_implementation": None, "disable_compile": True}
        try:
            with setting(IS_CHECKED, True):
                output = self._original(inputs, config, **ours)
        except torch.OutOfMemoryError as error:
            if not self._is_first_step:  # the prompt has run, so the cache has its memory
                raise
            reason = "a cache of {} sequences with {} tokens does not fit: ".format(*size)
            reason += reason_of(error, self._model.device)
        else:
            self._steps.check()
            if not isinstance(output, torch.Tensor):
                self.release()  # the caller has the cache now
            return output
        # Outside of the except block, whose traceback keeps the tensors of the prompt alive.
        del ours, cache, self._model.__dict__["__call__"]
        self.release()
        self._warn(reason)
        if kwargs.get("streamer") is not None:
            kwargs["streamer"] = _AfterPrompt(kwargs["streamer"])
        return self._original(inputs, config, **kwargs)

    def _size_of_call(
        self, inputs: torch.Tensor | None, given: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> tuple[int, int] | str:
        """Sequences and tokens of a call that can decode in graphs, or why it cannot."""
        config, prompt = arguments_in_force(self._model, inputs, given, kwargs)
        default: Any = GenerationConfig
        if config.max_new_tokens is None and config.max_length == default().max_length:
            return "the call has no max_new_tokens"
        mode = config.get_generation_mode(kwargs.get("assistant_model"))
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            return f"{mode.value.replace('_', ' ')} is not captured"
        if kwargs.get("custom_generate") is not None or kwargs.get("synced_gpus"):
            return "custom_generate and synced_gpus are not captured"
        has_cache = any(kwargs.get(name) is not None for name in ("past_key_values", "cache"))
        if has_cache or config.cache_implementation not in _GROWING_CACHES:
            return f"{CACHE_NAME} or cache_implementation ask for a cache of their own"
        if config.use_cache is False or config.output_attentions or config.output_hidden_states:
            return "use_cache=False, output_attentions and output_hidden_states are not captured"
        if prompt is None:
            return "the call has no prompt of tokens"
        if reason := self._why_not_captured():
            return reason
        end = config.max_length if config.max_new_tokens is None else prompt.shape[1] + config.max_new_tokens
        length = round_up(max(self._context, end), LENGTH_STEP)
        return prompt.shape[0] * (config.num_return_sequences or 1), length

    def _why_not_captured(self) -> str | None:
        """Why no call of this model is captured."""
        model = self._model
        if self._steps.eager_because is not None:
            return self._steps.eager_because
        config, taken = model.config.get_text_config(decoder=True), inspect.signature(type(model).forward).parameters
        # Mamba 2 has a cache of another kind, by another name; ALiBi is computed from a mask of the text's length.
        has_other = "cache_params" in taken or getattr(config, "alibi", False)
        if model.config.is_encoder_decoder or has_other or not model._can_compile_fullgraph:
            return f"{type(model).__name__} does not decode with a static cache"
        for layer in StaticCache(config=config, max_cache_len=LENGTH_STEP).layers:
            if type(layer) not in _COUNTED:  # its state in Python is not known
                return f"its cache has a {type(layer).__name__}"
        if self.session is not None and self.session.plan.mode in RANK_MODES:
            return f"several ranks share its weights (mode {self.session.plan.mode})"
        prefetcher = self._steps.prefetcher
        if prefetcher is not None and not prefetcher.replays.can_capture():
            return "other code has captured CUDA graphs over this offload"
        if not self._with_hooks and (name := _hooked_module(model)) is not None:
            return (
                f"{name} has a forward hook, whose Python code a replay does not run (decode_in_graphs(model) captures "
                f"its kernels)"
            )
        return None

    def _warn(self, reason: str) -> None:
        if reason != self._warned:
            warn_user(f"generate runs eagerly, without CUDA graphs: {reason}")
        self._warned = reason

    _warned: str | None = None

    def _cache_of(self, sequences: int, length: int) -> StaticCache:
        """An empty cache; the one of the call before if that fits."""
        plan = None if self.session is None else self.session.plan
        kind = sequences, length, torch.is_inference_mode_enabled()
        if self._cache is None or self._kind != kind or plan is not self._plan:
            self.release()
            self._cache = StaticCache(config=self._model.config.get_text_config(decoder=True), max_cache_len=length)
            for layer in _layers(self._cache):
                layer.__class__ = _COUNTED[type(layer)]
                layer.cumulative_length_int = 0
            self._kind, self._plan = kind, plan
        cache: Any = self._cache
        cache.reset()
        return self._cache

    # -- a step -----------------------------------------------------------------------------------------------------

    def _step(self, *args: Any, **inputs: Any) -> Any:
        call = functools.partial(type(self._model).__call__, self._model)
        cache = self._cache
        is_ours = cache is not None and any(value is cache for value in inputs.values())
        tokens = [inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None]
        is_ours &= all(each.shape[1] == 1 for each in tokens)  # transformers calls chunks of a prompt as it calls steps
        if args or cache is None or not is_ours or self._steps.eager_because is not None:
            return call(*args, **inputs)
        if self._is_first_step:
            self._is_first_step = False
            self._compare_model()
        lengths = [layer.cumulative_length_int for layer in _layers(cache)]

        def step(**given: Any) -> Any:  # also where a capture has failed half way
            for layer, length in zip(_layers(cache), lengths, strict=True):
                layer.cumulative_length_int = length
            return call(**given)

        key = (_reach(cache), signature(inputs))
        is_first = key not in self._steps
        output = self._steps.run(key, step, inputs)
        for layer, length in zip(_layers(cache), lengths, strict=True):
            layer.cumulative_length_int = length + 1  # a replay runs no Python code of a step
        if is_first and _Seen(self._model) != self._seen:
            self._steps.eager_because = "its modules change in Python from step to step"
        if self._steps.eager_because is not None:
            self._warn(self._steps.eager_because)
        return output

    def _compare_model(self) -> None:
        """Drop the graphs if the model has changed for Python."""
        seen = _Seen(self._model)
        if seen != self._seen:
            self._steps.drop()
            self._seen = seen


def arguments_in_force(model: Any, inputs: Any, given: GenerationConfig | None, kwargs: Mapping[str, Any]) -> Any:
    """Generation config and prompt of a call of ``model.generate``; ``None``: it has no prompt of tokens."""
    config: Any = copy.deepcopy(model.generation_config)
    if given is not None:
        config.update(**given.to_diff_dict())
    config.update(**{name: value for name, value in kwargs.items() if hasattr(config, name)})
    prompt = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), inputs)
    return config, prompt


def _hooked_module(model: PreTrainedModel) -> str | None:
    """The first module with a forward hook that is not one of an offload or of transformers."""
    for name, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not str(getattr(hook, "__module__", "")).startswith(("headrace.runtime.", "transformers.")):
                return name or type(module).__name__
    return None


class _Seen:
    """Everything that the Python code of a forward can see of a model, except values of tensors; comparable."""

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        self._plain: list[object] = [config._attn_implementation, getattr(config, "_experts_implementation", None)]
        self._things: list[object] = []  # compared by identity; the references keep ids unique
        for module in model.modules():
            self._things += [type(module), type(module).forward, *module._forward_hooks.values()]
            self._things += module._forward_pre_hooks.values()
            for name, value in vars(module).items():
                if value is None or isinstance(value, bool | int | float | str):
                    self._plain.append(value)
                elif isinstance(value, list | tuple | set):
                    self._plain.append(repr(value))  # of adapters that are active
                elif isinstance(value, torch.Tensor) or (callable(value) and name != "__call__"):
                    self._things.append(value)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                self._things.append(tensor)
                self._plain.append(None if tensor is None else storage_id(tensor))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Seen) or len(self._things) != len(other._things):
            return False
        return self._plain == other._plain and all(map(operator.is_, self._things, other._things))

    __hash__ = None  # type: ignore[assignment]


class _AfterPrompt(BaseStreamer):
    """``streamer`` for a call that runs again: it has the prompt already."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer: Any = streamer
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self._streamer.put(value)
        self._has_prompt = True

    def end(self) -> None:
        self._streamer.end()


class _Captured(NamedTuple):
    step: StepGraph
    copied: list[int]  # units that a replay copies itself


class _Full(StaticLayer):  # type: ignore[no-untyped-call]
    """Reads the part of its cache that is filled, up to a multiple: a step costs what its text costs."""

    cumulative_length_int: int  # the tokens that Python knows of

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.cumulative_length_int += key_states.shape[-2]
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        length = self._part(self.cumulative_length_int)
        return keys[:, :, :length], values[:, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._part(self.cumulative_length_int + query_length), 0

    def _part(self, num_tokens: int) -> int:
        return bucket(num_tokens, LENGTH_STEP, self.max_cache_len)

    def reset(self) -> None:
        super().reset()
        self.cumulative_length_int = 0


class _Window(StaticSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """A sliding window whose step can be captured when it is full: no index is computed on the host."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if key_states.shape[-2] != 1 or self.cumulative_length_int < self.max_cache_len:
            return super().update(key_states, value_states, *args, **kwargs)
        self.cumulative_length_int += 1
        pairs: Any = (self.keys, key_states), (self.values, value_states)
        for cached, new in pairs:
            cached.copy_(torch.cat((cached[:, :, 1:], new), dim=-2))
        return self.keys, self.values


_COUNTED: dict[type, Any] = {StaticLayer: _Full, StaticSlidingWindowLayer: _Window}


def _layers(cache: StaticCache) -> list[Any]:
    return list(cache.layers)


def _reach(cache: StaticCache) -> tuple[int | bool, ...]:
    """Tokens of each layer that the next step reads; of a sliding window, whether it is full."""
    return tuple(
        layer.get_mask_sizes(1)[0] if type(layer) is _Full else layer.cumulative_length_int >= layer.max_cache_len
        for layer in _layers(cache)
    )


def bucket(number: int, least: int, most: int) -> int:
    """The first of ``least``, 2 ``least``, 4 ``least``, ... that is not below ``number``; ``most`` at most."""
    while least < number:
        least *= 2
    return min(least, most)


# -- steps as CUDA graphs ----------------------------------------------------------------------------------------------


def reason_of(error: BaseException, device: torch.device) -> str:
    """The first line of an error of ``device``, and where memory was lacking, how much is free."""
    text = str(error).splitlines()[0]
    if not isinstance(error, torch.OutOfMemoryError):
        return text
    return f"{text} ({format_size(torch.cuda.mem_get_info(device)[0])} of device memory are free)"


class CapturedSteps:
    """Steps of one model as CUDA graphs, by their kind; they compute in one memory.

    Attributes:
        session: that of the offload, if any; another one after a resize.
        replays: steps that were replayed so far.
        replaying: threads that are inside a replay, where nothing else orders these.
        eager_because: why all steps run eagerly; ``None``: they are captured.
    """

    def __init__(self, model: PreTrainedModel, session: OffloadSession | None) -> None:
        """``session``: of the offload of ``model``, if any."""
        self._model, self.session = model, session
        self.replaying = set[int]()
        if session is not None:
            session.captured.add(self)
        self._steps: dict[Hashable, _Captured | None] = {}  # None: ran eagerly so far
        self.replays = 0
        self.eager_because: str | None = None
        self._in_parts = session is not None and bool(session.plan.cached) and session.plan.kind.in_files
        if self._in_parts and self.prefetcher is not None:
            self.eager_because = "the host reads what layers miss of their experts, and units are copied meanwhile"

    @property
    def prefetcher(self) -> Prefetcher | None:
        return None if self.session is None else self.session.prefetcher

    def __contains__(self, key: Hashable) -> bool:
        return key in self._steps

    def run(self, key: Hashable, call: Callable[..., Any], inputs: Inputs) -> Any:
        """The output of ``call(**inputs)``, a step of the kind ``key``: first a warm-up, then replays."""
        self.check()
        if self.eager_because is not None:
            return call(**inputs)
        if key not in self._steps:  # libraries and kernels are loaded
            self._steps[key] = None
            with timed(_log, f"first eager forward of {_tokens(inputs)}", self._model.device):
                return call(**inputs)
        if self._steps[key] is None:
            self.eager_because = self._capture(key, call, inputs)
        captured = self._steps[key]
        if captured is None:
            return call(**inputs)
        self.replays += 1
        if (prefetcher := self.prefetcher) is not None:
            with replaying(prefetcher, captured.copied):
                return captured.step.replay(inputs)
        with self._as_forward():
            if (captured := self._steps.get(key)) is None:  # dropped meanwhile
                return call(**inputs)
            return captured.step.replay(inputs)

    @contextmanager
    def _as_forward(self) -> Iterator[None]:
        """Within, a replay is a forward for what waits for those to end, and holds others until it has: parking.py."""
        me = threading.get_ident()
        self.replaying.add(me)
        try:
            for hook in list(self._model._forward_pre_hooks.values()):
                if getattr(hook, "__name__", "") == "_gate":
                    hook(self._model, ())
            yield
        finally:
            self.replaying.discard(me)

    def _capture(self, key: Hashable, call: Callable[..., Any], inputs: Inputs) -> str | None:
        """Capture ``call``, a step of a kind that has been warmed up; returns why it cannot be captured."""
        device = self._model.device
        pool = next((captured.step.pool for captured in self._steps.values() if captured is not None), None)
        units = nullcontext(list[int]()) if self.prefetcher is None else capturing(self.prefetcher)
        try:
            with timed(_log, f"capture of a forward of {_tokens(inputs)}", device), units as copied:
                step = StepGraph(call, inputs, device, pool, in_parts=self._in_parts)
            self._steps[key] = _Captured(step, copied)
        except (RuntimeError, StateError) as error:
            return f"its decoding step cannot be captured: {reason_of(error, device)}"
        return None

    def check(self) -> None:
        """Raise ``StateError`` where the output of the step before is not to be used."""
        for attachment in () if self.session is None else self.session.attachments:
            attachment.check()

    def drop(self) -> None:
        """Free the graphs."""
        if self._steps and self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)  # replays may be under way
        self._steps = {}

    @property
    def num_bytes(self) -> int:
        """Device memory that the graphs compute in."""
        return max((captured.step.num_bytes for captured in self._steps.values() if captured is not None), default=0)


def _tokens(inputs: Inputs) -> str:
    ids = inputs.get("input_ids", inputs.get("ids"))
    return f"{'?' if ids is None else list(ids.shape)} tokens"


def signature(inputs: Inputs) -> Hashable:
    """The part of ``inputs`` that is fixed in a graph: all but the values of tensors.

    Objects other than numbers and strings are compared by identity, so the graph has to keep them alive.
    """
    leaves, _ = tree_flatten_with_path(dict(inputs))
    return tuple((path, _constant_part(leaf)) for path, leaf in leaves)


def _constant_part(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return leaf if leaf is None or isinstance(leaf, bool | int | float | str) else id(leaf)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Stream for captures: without it ``torch.cuda.graph`` uses the device that was current at the process's first."""
    return torch.cuda.Stream(device)


class _Parts:
    """In place of the graph of ``torch.cuda.graph``: one after another, of which each begins where the last has ended.

    Attributes:
        admitted: between two: the cache that admits, ids, and their rows.
    """

    def __init__(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.admitted: list[tuple[RowMap, torch.Tensor, torch.Tensor]] = []
        self._is_open, self._options = False, dict[str, Any]()

    def capture_begin(self, *pool: Any, **options: Any) -> None:
        """Begin the next graph, with options of ``torch.cuda.CUDAGraph.capture_begin``."""
        self._options, self._is_open = options, True
        self.graphs.append(torch.cuda.CUDAGraph())
        try:
            self.graphs[-1].capture_begin(*pool, **options)
        except Exception:
            self._is_open = False
            raise

    def capture_end(self) -> None:
        """End it; nothing where it has ended, or failed to: to end it twice would hide an interrupt or an error."""
        was_open, self._is_open = self._is_open, False
        if was_open:
            self.graphs[-1].capture_end()

    def cut(self, cache: RowMap, ids: torch.Tensor) -> torch.Tensor:
        """End a graph where ``cache`` admits, and begin another; returns the rows of ``ids``, filled in a replay."""
        rows = torch.zeros_like(ids)  # rows that there are, whatever runs
        self.admitted.append((cache, ids, rows))
        self.capture_end()
        self.capture_begin(self.graphs[0].pool(), **self._options)
        return rows


class StepGraph:
    """A captured ``call(**inputs)``. A replay copies its inputs into tensors at fixed addresses.

    Where the host has to bring experts, one graph ends and another begins: it does so between two replays.

    Attributes:
        pool: the memory that it computes in, for ``torch.cuda.graph``.
        num_bytes: the size of that.
    """

    def __init__(
        self, call: Callable[..., Any], inputs: Inputs, device: torch.device, pool: Any = None, in_parts: bool = False
    ) -> None:
        """``call`` has run before with inputs of this :func:`signature`, so that libraries and kernels are loaded.

        Args:
            device: a GPU, where it computes.
            pool: that of another, of which no replay runs beside one of this.
            in_parts: caches may have the host bring experts.

        It is captured now: its Python code runs once, and its kernels do not.

        Raises:
            RuntimeError: an operation cannot be captured, such as one that waits for the device.
        """
        self._inputs: Inputs = tree_map_only(torch.Tensor, torch.clone, dict(inputs))
        self._tensors = _tensors_of(self._inputs)
        self._parts = _Parts()
        # Other threads may allocate and launch meanwhile. torch leaves the stream of a capture that ends in an error.
        capture: Any = torch.cuda.graph
        with (
            gc_paused(),  # a destructor that frees pinned memory would end the capture
            torch.cuda.device(device),  # for which torch.cuda.graph waits
            torch.cuda.stream(torch.cuda.current_stream(device)),
            capture(self._parts, pool, _capture_stream(device), "thread_local"),
            setting(CUT, self._parts.cut if in_parts else None),
        ):
            self._output = call(**self._inputs)
        self.pool, segments = self._parts.graphs[0].pool(), torch.cuda.memory_snapshot()
        mine = [each for each in segments if tuple(each["segment_pool_id"]) == tuple(self.pool)]
        self.num_bytes = sum(each["total_size"] for each in mine)

    def replay(self, inputs: Inputs) -> Any:
        """The output of ``call(**inputs)`` in new tensors; ``inputs`` has the signature of the captured ones.

        Raises:
            TransferError: experts cannot be read.
        """
        torch._foreach_copy_(self._tensors, _tensors_of(inputs))
        first, *others = self._parts.graphs
        first.replay()
        for (cache, ids, rows), graph in zip(self._parts.admitted, others, strict=True):
            with cache.turn.eager_run(ids.device):
                rows.copy_(cache.admit(ids))
                graph.replay()
                cache.compare(ids, rows)
        return tree_map_only(torch.Tensor, torch.clone, self._output)


def _tensors_of(inputs: Inputs) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(dict(inputs)) if isinstance(leaf, torch.Tensor)]
