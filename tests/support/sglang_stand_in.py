"""A stand-in for SGLang: the modules, signatures and order of calls that headrace's plugin sees, no more.

On a GPU its graphs are CUDA graphs, captured as SGLang captures them. On a CPU a replay runs the model again.
``test_sglang_plugin.py`` holds it to the same list of names (``sglang_names.py``) that a real SGLang is held to.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from engines import VOCABULARY, WIDTH, Head, Layer, Table
from headrace.memory.system import gc_paused
from vllm_stand_in import put_module

NUM_LAYERS = 8

# What of a real process is global: set by `install`.
state = SimpleNamespace()

# -- plugins -----------------------------------------------------------------------------------------------------------


class HookType(Enum):
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    @classmethod
    def register(
        cls, target: str, hook: Callable[..., Any], hook_type: HookType = HookType.AFTER, *, source: Any = None
    ) -> None:
        state.hooks.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls) -> None:
        """As SGLang's: REPLACE before the others, and an exception is only logged."""
        for target, hook, hook_type in sorted(state.hooks, key=lambda entry: entry[2] is not HookType.REPLACE):
            try:
                place, _, name = target.rpartition(".")
                owner = pkgutil.resolve_name(place)
                state.monkeypatch.setattr(owner, name, _wrapped(getattr(owner, name), hook, hook_type))
            except Exception as error:
                state.log.append(f"Failed to apply hooks to {target}: {error}")
        state.hooks.clear()


def _wrapped(original: Callable[..., Any], hook: Callable[..., Any], hook_type: HookType) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if hook_type is HookType.REPLACE:
            return hook(*args, **kwargs)
        if hook_type is HookType.AROUND:
            return hook(original, *args, **kwargs)
        changed = hook(result := original(*args, **kwargs), *args, **kwargs)
        return result if changed is None else changed

    return wrapper


def load_plugins() -> None:
    """Runs ``state.plugins``; an exception of one is only logged."""
    for plugin in state.plugins:
        try:
            plugin()
        except Exception as error:
            state.log.append(f"Failed to execute general plugin: {error}")
    HookRegistry.apply_hooks()


# -- runtime_context ---------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {
    "cpu_offload_gb": 0,
    "offload_group_size": -1,
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
    "offload_mode": "cpu",
    "cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="breakable")),
    "tp_size": 1,
    "dp_size": 1,
    "nnodes": 1,
    "dwdp_size": 1,
    "startup_weight_load_mode": "serial",
    "weight_cache_mode": "off",
}


class RuntimeContext:
    def config_leaf(self, name: str) -> Any:
        return state.fields.get(name, DEFAULTS.get(name))

    def override(self, source: str, **fields: Any) -> None:
        state.fields.update(fields)


def get_context() -> RuntimeContext:
    return RuntimeContext()


def get_parallel() -> Any:
    return state.parallel


# -- offloader ---------------------------------------------------------------------------------------------------------


class BaseOffloader:
    def wrap_modules(
        self, all_modules_generator: Iterable[nn.Module], submodule_accessor: Any = None,
        whitelist_param_names_creator: Any = None,
    ) -> list[nn.Module]:  # fmt: skip
        return list(all_modules_generator)

    def post_init(self) -> None:
        return

    @property
    def forbid_copy_engine_usage(self) -> bool:
        return False


class NoopOffloader(BaseOffloader):
    pass


class OffloaderV2(BaseOffloader):
    pass


def create_offloader() -> Any:
    return OffloaderV2() if state.fields.get("offload_group_size", -1) > 0 else NoopOffloader()


def set_offloader(instance: Any) -> None:
    state.offloader = instance


def get_offloader() -> Any:
    return state.offloader


# -- models ------------------------------------------------------------------------------------------------------------


class VocabParallelEmbedding(Table):
    pass


class ParallelLMHead(VocabParallelEmbedding):
    forward = Head.forward


def make_layers(num_hidden_layers: int, layer_fn: Callable[..., nn.Module]) -> nn.ModuleList:
    limits = {"submodule_accessor": lambda layer: layer.mlp, "whitelist_param_names_creator": lambda module: []}
    return nn.ModuleList(
        get_offloader().wrap_modules((layer_fn(idx=index) for index in range(num_hidden_layers)), **limits)
    )


class Decoder(nn.Module):
    def __init__(self, layer_fn: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(VOCABULARY, WIDTH)
        self.layers = make_layers(NUM_LAYERS, layer_fn)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        x, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            if getattr(layer, "is_skipped", False):
                continue
            x, residual = layer(positions, x, residual)
            _attention_breaks()
        return x + residual


class Model(nn.Module):
    def __init__(self, layer_fn: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.model = Decoder(layer_fn)
        self.lm_head = ParallelLMHead(VOCABULARY, WIDTH)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        return functional.linear(self.model(input_ids, positions, forward_batch), self.lm_head.weight)


# -- graphs ------------------------------------------------------------------------------------------------------------

_current_capture_var: ContextVar[Any] = ContextVar("current_capture", default=None)


def eager_on_graph(fn: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:
        capture = _current_capture_var.get()
        if capture is None:
            return fn(*args)
        capture._end_current_segment()
        output = fn(*args)
        capture.cuda_graph._break_fns.append(lambda: fn(*args))
        capture._begin_new_segment()
        return output

    return wrapper


def _attention_breaks() -> None:
    capture = _current_capture_var.get()
    if capture is not None and capture._current_graph is not None:
        eager_on_graph(lambda: None)()


class BreakableCUDAGraph:
    def __init__(self) -> None:
        self._segments: list[Any] = []
        self._break_fns: list[Callable[[], Any]] = []

    def replay(self) -> None:
        for index, segment in enumerate(self._segments):
            segment.replay()
            if index < len(self._break_fns):
                self._break_fns[index]()


class BreakableCUDAGraphCapture:
    def __init__(self, cuda_graph: BreakableCUDAGraph, pool: Any, stream: Any) -> None:
        self.cuda_graph = cuda_graph
        self._pool, self._stream = pool, stream
        self._current_graph: Any = None

    def __enter__(self) -> BreakableCUDAGraphCapture:
        self._stream_context = torch.cuda.stream(self._stream)
        self._stream_context.__enter__()
        self._token = _current_capture_var.set(self)
        self._begin_new_segment()
        return self

    def __exit__(self, *args: object) -> None:
        self._end_current_segment()
        _current_capture_var.reset(self._token)
        self._stream_context.__exit__(*args)

    def _begin_new_segment(self) -> None:
        self._current_graph = torch.cuda.CUDAGraph()
        self._current_graph.capture_begin(pool=self._pool)

    def _end_current_segment(self) -> None:
        self._current_graph.capture_end()
        self.cuda_graph._segments.append(self._current_graph)
        self._current_graph = None


class BaseRunner:
    def __init__(self, model_runner: Any) -> None:
        self.model_runner = model_runner


class GraphBackend:
    """Captures on a GPU, behind two warm-ups; elsewhere a replay runs the model again."""

    def __init__(self, cuda_graph_runner: Any) -> None:
        self._cuda_graph_runner = cuda_graph_runner
        self._graphs: dict[Any, Any] = {}

    def capture_one(
        self, shape_key: Any, forward_fn: Callable[[], Any], capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        for _ in range(2):
            warm = forward_fn()
            if post_warmup_hook is not None:
                post_warmup_hook()
        self._graphs[shape_key] = self._captured(forward_fn, warm) if warm.is_cuda else forward_fn

    def replay(self, shape_key: Any, static_forward_batch: Any = None, **kwargs: Any) -> Any:
        return self._graphs[shape_key]()

    def _captured(self, forward_fn: Callable[[], Any], warm: torch.Tensor) -> Callable[[], torch.Tensor]:
        raise NotImplementedError


class FullCudaGraphBackend(GraphBackend):
    def _captured(self, forward_fn: Callable[[], Any], warm: torch.Tensor) -> Callable[[], torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(cuda_graph=graph, stream=torch.cuda.Stream()):
            out = forward_fn()
        return functools.partial(_replayed, graph, out)


class BreakableCudaGraphBackend(GraphBackend):
    def _captured(self, forward_fn: Callable[[], Any], warm: torch.Tensor) -> Callable[[], torch.Tensor]:
        graph, out = BreakableCUDAGraph(), torch.empty_like(warm)
        torch.cuda.synchronize()
        with BreakableCUDAGraphCapture(graph, torch.cuda.graph_pool_handle(), torch.cuda.Stream()):
            out.copy_(forward_fn())
        return functools.partial(_replayed, graph, out)


def _replayed(graph: Any, output: torch.Tensor) -> torch.Tensor:
    graph.replay()
    return output


# -- the model runner --------------------------------------------------------------------------------------------------


class ModelRunner:
    """``layer_fn``: makes a layer. ``kinds``: the graphs that it captures, ``decode`` (full) and ``prefill``."""

    def __init__(
        self, device: str = "cpu", layer_fn: Callable[..., nn.Module] | None = None,
        kinds: tuple[str, ...] = ("decode", "prefill"), is_draft_worker: bool = False,
    ) -> None:  # fmt: skip
        self.device, self.is_draft_worker, self._kinds = device, is_draft_worker, kinds
        self._layer_fn = layer_fn or (lambda idx: Layer(WIDTH))
        offloader = sys.modules["sglang.srt.utils.offloader"]
        offloader.set_offloader(offloader.create_offloader())
        self.initialize()

    def initialize(self) -> None:
        self.load_model()

    def load_model(self) -> None:
        state.log.append("load_model")
        torch.manual_seed(7)
        with torch.device(self.device):
            self.model = Model(self._layer_fn)
        if not self.is_draft_worker:
            get_offloader().post_init()

    @torch.inference_mode()
    def init_cuda_graphs(self, capture_decode_cuda_graph: bool = True) -> None:
        """A decode graph holds ``model.forward``; one of a prefill only the body, and the head runs without a graph."""
        with torch.device(self.device):
            self.ids = torch.zeros(2, 3, dtype=torch.long)
        runner, body = BaseRunner(self), self.model.model.forward
        self.decode, self.prefill = FullCudaGraphBackend(runner), BreakableCudaGraphBackend(runner)
        with gc_paused():  # as SGLang's freeze_gc: garbage may hold graphs, and to free one ends a capture
            if "decode" in self._kinds:
                self.decode.capture_one(3, lambda: self.model.forward(self.ids, self.ids[0], None))
            if "prefill" in self._kinds:
                self.prefill.capture_one(3, lambda: body(self.ids, self.ids[0], None))

    @torch.inference_mode()
    def forward(self, forward_batch: Any) -> torch.Tensor:
        """``forward_batch``: see :func:`batch`. The result is a copy."""
        ids, kind = forward_batch.ids, forward_batch.kind
        if kind == "eager":
            return self.model.forward(ids, ids[0], forward_batch).clone()
        self.ids.copy_(ids)
        if kind == "decode":
            return self.decode.replay(3).clone()
        body = self.model.model
        original, body.forward = body.forward, lambda *_: self.prefill.replay(3)
        try:
            return self.model.forward(ids, ids[0], forward_batch).clone()
        finally:
            body.forward = original

    def check_weights(self, action: str) -> str:
        return action


def batch(ids: torch.Tensor, kind: str) -> Any:
    return SimpleNamespace(ids=ids, kind=kind, forward_mode=SimpleNamespace(is_idle=lambda: False))


# -- what reads and writes weights -------------------------------------------------------------------------------------


def _output(name: str) -> type:
    def init(self: Any, success: bool, message: str) -> None:
        self.success, self.message = success, message

    return type(name, (), {"__init__": init})


OUTPUTS = [
    _output(name)
    for name in ("BeginWeightUpdateReqOutput", "EndWeightUpdateReqOutput", "UpdateWeightsFromIPCReqOutput")
]


class WeightUpdater:
    """Of one runner. ``files``: weights by path."""

    def __init__(self, runner: ModelRunner) -> None:
        self.get_model_runner = lambda: runner
        self.model_config = SimpleNamespace(model_path="first")
        self.files: dict[str, dict[str, torch.Tensor]] = {}

    def update_weights_from_disk(
        self, model_path: str, load_format: str, weight_name_filter: Any = None, recapture_cuda_graph: bool = False
    ) -> tuple[bool, str]:
        """After an error SGLang loads again, and from the new path."""
        self.model_config.model_path = model_path
        if model_path not in self.files:
            return False, "Failed to get weights iterator"
        self.load(self.files[model_path])
        state.log.append(f"recapture {recapture_cuda_graph}")
        return True, "Succeeded to update model weights."

    def begin_weight_update(self) -> None:
        state.log.append("restore")

    def end_weight_update(self, *, run_post_load: bool) -> None:
        state.log.append("postprocess")

    def load_weights_from_distributed(self, named_tensors: Any) -> tuple[bool, str]:
        self.load(dict(named_tensors))
        return True, "Succeeded"

    def update_weights_from_tensor(self, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
        self.load(dict(named_tensors))
        return True, "Success"

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            self.get_model_runner().model.get_parameter(name).data.copy_(weight)


class SchedulerWeightUpdaterManager:
    def __init__(self, runner: ModelRunner) -> None:
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.updater = WeightUpdater(runner)
        self._session: Any = None
        self.flush_cache: Any = lambda: state.log.append("flush") or True

    def begin_weight_update(self, recv_req: Any) -> Any:
        if self._session is not None:
            return OUTPUTS[0](False, "a weight-update session is already open")
        self.updater.begin_weight_update()
        self._session = "open"
        return OUTPUTS[0](True, "begun")

    def end_weight_update(self, recv_req: Any) -> Any:
        if self._session is None:
            return OUTPUTS[1](False, "no weight-update session is open")
        self.updater.end_weight_update(run_post_load=False)
        self._session = None
        return OUTPUTS[1](True, "ended")

    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        return OUTPUTS[2](True, "updated")

    def update_weights_from_distributed(self, recv_req: Any) -> Any:
        return self._session and self.updater.load_weights_from_distributed(recv_req.tensors)

    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        return self._session and self.updater.update_weights_from_tensor(recv_req.tensors)


class _ServerArgs:
    def __getattr__(self, name: str) -> Any:
        return get_context().config_leaf(name)


class TokenizerControlMixin:
    def __init__(self) -> None:
        self.server_args = _ServerArgs()

    async def release_memory_occupation(self, obj: Any, request: Any = None) -> None:
        state.log.append("released")

    async def resume_memory_occupation(self, obj: Any, request: Any = None) -> None:
        state.log.append("resumed")


class WeightExporter:
    def __init__(self, runner: ModelRunner) -> None:
        self.get_model = lambda: runner.model

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Any:
        return self.get_model().get_parameter(name)[:1].tolist()

    def send_weights_to_remote_instance(self, master_address: str, ports: str, group_name: str) -> Any:
        return True, "sent"


class Scheduler:
    def __init__(self, runner: ModelRunner) -> None:
        self.tp_worker = SimpleNamespace(model_runner=runner)

    def get_internal_state(self, recv_req: Any) -> Any:
        return SimpleNamespace(internal_state={})


_CAPTURE = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
_MODULES: dict[str, list[Any]] = {
    "sglang": [],
    "sglang.srt.plugins": [load_plugins],
    "sglang.srt.plugins.hook_registry": [HookRegistry, HookType],
    "sglang.srt.runtime_context": [RuntimeContext, get_context, get_parallel],
    "sglang.srt.utils.offloader": [
        *(BaseOffloader, NoopOffloader, OffloaderV2),
        *(create_offloader, set_offloader, get_offloader),
    ],
    "sglang.srt.utils.common": [make_layers],
    "sglang.srt.layers.vocab_parallel_embedding": [VocabParallelEmbedding, ParallelLMHead],
    "sglang.srt.model_executor.model_runner": [ModelRunner],
    "sglang.srt.model_executor.runner.base_runner": [BaseRunner],
    "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend": [FullCudaGraphBackend],
    "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend": [BreakableCudaGraphBackend],
    _CAPTURE: [BreakableCUDAGraph, BreakableCUDAGraphCapture, eager_on_graph],
    "sglang.srt.model_executor.model_runner_components.weight_exporter": [WeightExporter],
    "sglang.srt.managers.scheduler": [Scheduler],
    "sglang.srt.managers.scheduler_components.weight_updater": [SchedulerWeightUpdaterManager],
    "sglang.srt.managers.tokenizer_control_mixin": [TokenizerControlMixin],
    "sglang.srt.model_executor.model_runner_components.weight_updater": [WeightUpdater],
    "sglang.srt.managers.io_struct": OUTPUTS,
}


def install(monkeypatch: pytest.MonkeyPatch, plugins: Iterable[Callable[[], None]], **fields: Any) -> None:
    """Put the stand-in where SGLang would be, in its first state, until the test ends.

    ``plugins``: what its entry points name. ``fields``: of its configuration.
    """
    state.__dict__.update(hooks=[], log=[], plugins=list(plugins), fields=fields, offloader=NoopOffloader())
    one = SimpleNamespace(world_size=1, cpu_group=None)
    state.monkeypatch = monkeypatch
    state.parallel = SimpleNamespace(dp_rank=0, num_dp_ranks=1, pp_size=1, tp_group=one)
    for name in [name for name in sys.modules if name.startswith("headrace.adapters.sglang")]:
        monkeypatch.delitem(sys.modules, name)  # they hold what an earlier test has installed
    for name, things in _MODULES.items():
        put_module(monkeypatch, name)
        for thing in things:
            monkeypatch.setattr(thing, "__module__", name)
            setattr(sys.modules[name], thing.__name__, thing)
    sys.modules["sglang"].__version__ = "0.5.23"  # type: ignore[attr-defined]
    sys.modules[_CAPTURE]._current_capture_var = _current_capture_var  # type: ignore[attr-defined]
