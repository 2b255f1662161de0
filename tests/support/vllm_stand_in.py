"""A stand-in for vLLM on a CPU: the modules, signatures and order of calls that headrace's worker sees, no more.

``test_vllm_worker.py`` holds it to the same list of names (``vllm_names.py``) that a real vLLM is held to.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import vllm_experts
from engines import VOCABULARY, WIDTH, Head, Layer, Linear, Table
from vllm_pool import Pool

NUM_LAYERS = 8
PROFILED = torch.zeros(2, 3, dtype=torch.long)

# What of a real process is global: set by `install`.
state = SimpleNamespace()

# -- offloader.base, offloader.prefetch, offloader.uva -----------------------------------------------------------------


class BaseOffloader:
    def wrap_modules(self, modules_generator: Iterable[nn.Module]) -> list[nn.Module]:
        raise NotImplementedError

    def post_init(self) -> None:
        return

    def sync_prev_onload(self) -> None:
        return

    def join_after_forward(self) -> None:
        return


class NoopOffloader(BaseOffloader):
    def wrap_modules(self, modules_generator: Iterable[nn.Module]) -> list[nn.Module]:
        return list(modules_generator)


class PrefetchOffloader(NoopOffloader):
    def __init__(self) -> None:
        self.module_offloaders: list[nn.Module] = []

    def wrap_modules(self, modules_generator: Iterable[nn.Module]) -> list[nn.Module]:
        self.module_offloaders = list(modules_generator)
        return self.module_offloaders


class UVAOffloader(NoopOffloader):
    def __init__(self) -> None:
        self.cpu_offload_bytes = 0


def get_offloader() -> BaseOffloader:
    return state.offloader


def set_offloader(instance: BaseOffloader | None) -> None:
    state.offloader = NoopOffloader() if instance is None else instance


def create_offloader(config: OffloadConfig) -> BaseOffloader:
    if config.prefetch.offload_group_size > 0:
        return PrefetchOffloader()
    return UVAOffloader() if config.uva.cpu_offload_gb > 0 else NoopOffloader()


# -- config ------------------------------------------------------------------------------------------------------------


@dataclass
class UVAOffloadConfig:
    cpu_offload_gb: float = 0
    cpu_offload_params: set[str] = field(default_factory=set)


@dataclass
class PrefetchOffloadConfig:
    offload_group_size: int = 0
    offload_num_in_group: int = 1
    offload_prefetch_step: int = 1
    offload_params: set[str] = field(default_factory=set)


@dataclass
class OffloadConfig:
    offload_backend: str = "auto"
    uva: UVAOffloadConfig = field(default_factory=UVAOffloadConfig)
    prefetch: PrefetchOffloadConfig = field(default_factory=PrefetchOffloadConfig)


@dataclass
class CompilationConfig:
    mode: int = 0  # nothing is compiled
    splitting_ops: list[str] | None = field(default_factory=lambda: ["vllm::unified_attention"])
    use_inductor_graph_partition: bool = False


@dataclass
class ParallelConfig:
    enable_eplb: bool = False
    enable_dbo: bool = False
    ubatch_size: int = 0
    data_parallel_rank_local: int | None = None
    data_parallel_master_port: int = 29500


@dataclass
class LoadConfig:
    load_format: str = "auto"


@dataclass
class MultiModalConfig:
    mm_encoder_only: bool = False


@dataclass
class SpeculativeConfig:
    rejection_sample_method: str = "standard"


@dataclass
class ModelConfig:
    architectures: list[str] = field(default_factory=lambda: ["LlamaForCausalLM"])
    multimodal_config: MultiModalConfig | None = None
    quantization: str | None = None

    @property
    def architecture(self) -> str:
        return self.architectures[0]


@dataclass
class VllmConfig:
    """``use_v2_model_runner`` and below: what vLLM reads from elsewhere.

    ``profiles``: before it warms up. ``mlp``: what layers have in place of an MLP.
    """

    offload_config: OffloadConfig = field(default_factory=OffloadConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    model_config: ModelConfig = field(default_factory=ModelConfig)
    load_config: LoadConfig = field(default_factory=LoadConfig)
    weight_transfer_config: dict[str, str] | None = None
    speculative_config: SpeculativeConfig | None = None
    additional_config: Any = field(default_factory=dict)
    use_v2_model_runner: bool = True
    width: int = WIDTH
    change_model: Callable[[Model], Any] = lambda model: None
    draft_layers: int = 0
    profiles: bool = True
    mlp: Callable[[int], nn.Module] | None = None

    def compute_hash(self) -> str:
        return str(sorted(self.additional_config.items(), key=str))


# -- models ------------------------------------------------------------------------------------------------------------


class VocabParallelEmbedding(Table):
    pass


class ParallelLMHead(VocabParallelEmbedding):
    forward = Head.forward


class PPMissingLayer(nn.Identity):
    pass


def make_layers(
    num_hidden_layers: int, layer_fn: Callable[..., nn.Module], prefix: str
) -> tuple[int, int, nn.ModuleList]:
    rank, size = state.pipeline
    start, end = rank * num_hidden_layers // size, (rank + 1) * num_hidden_layers // size
    modules = nn.ModuleList(
        [PPMissingLayer() for _ in range(start)]
        + get_offloader().wrap_modules(layer_fn(prefix=f"{prefix}.{index}") for index in range(start, end))
        + [PPMissingLayer() for _ in range(end, num_hidden_layers)]
    )
    return start, end, modules


class Decoder(nn.Module):
    def __init__(self, num_layers: int, width: int, mlp: Callable[[int], nn.Module] | None) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(VOCABULARY, width)

        def build(prefix: str) -> nn.Module:
            layer = Layer(width)
            if mlp is not None:
                layer.mlp = mlp(width)  # type: ignore[assignment]
            return layer

        self.start, self.end, self.layers = make_layers(num_layers, build, prefix="model.layers")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, residual = self.embed_tokens(ids), None
        positions = torch.arange(ids.shape[-1])
        for layer in self.layers[self.start : self.end]:
            x, residual = layer(positions, x, residual)
        return x if residual is None else x + residual


class Model(nn.Module):
    """With a tower that is not built by ``make_layers``."""

    def __init__(self, num_layers: int, width: int, mlp: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__()
        self.model = Decoder(num_layers, width, mlp)
        self.visual = nn.ModuleList(Linear(width, width) for _ in range(2))
        self.lm_head = ParallelLMHead(VOCABULARY, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.model(ids)
        for layer in self.visual:
            x = layer(x)
        return functional.linear(x, self.lm_head.weight)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """A weight may be given in rows: the first ones."""
        loaded = set()
        for name, weight in weights:
            parameter = self.get_parameter(name)
            target = parameter.data[: len(weight)] if weight.dim() else parameter.data
            target.copy_(weight)
            get_layerwise_info(self.get_submodule(name.rpartition(".")[0])).load_numel += target.numel()
            loaded.add(name)
        return loaded

    def after_loading(self) -> None:
        """What a test replaces."""


@dataclass
class LayerReloadingInfo:
    load_numel: int = 0
    load_numel_total: int | None = None
    kernel_tensors: dict[str, nn.Parameter] | None = None

    def reset(self) -> None:
        self.load_numel, self.load_numel_total, self.kernel_tensors = 0, None, None


def get_layerwise_info(layer: nn.Module) -> LayerReloadingInfo:
    return vars(layer).setdefault("reloading", LayerReloadingInfo())  # type: ignore[no-any-return]


class CuMemAllocator(Pool):
    instance: Any = None


@contextmanager
def device_loading_context(module: nn.Module, target_device: torch.device) -> Iterator[nn.Module]:
    """Of use on a GPU only; it is among what headrace relies on."""
    yield module
    for parameter in module.parameters():
        parameter._vllm_is_uva_offloaded = True  # type: ignore[attr-defined]


def process_weights_after_loading(model: nn.Module) -> None:
    for module in model.modules():
        if (quant_method := getattr(module, "quant_method", None)) is not None:
            quant_method.process_weights_after_loading(module)


def _weights_host_resident(*weights: torch.Tensor) -> bool:
    return any(getattr(weight, "_vllm_is_uva_offloaded", False) for weight in weights)


# -- runners and worker ------------------------------------------------------------------------------------------------


class CUDAGraphWrapper:
    """Every call is a replay: it is announced."""

    def __init__(self, runnable: nn.Module) -> None:
        self.runnable = runnable

    def unwrap(self) -> nn.Module:
        return self.runnable

    def __call__(self, *args: Any) -> Any:
        get_offloader().sync_prev_onload()
        output = self.runnable(*args)
        get_offloader().join_after_forward()
        return output


class CudaGraphManager:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def capture(self) -> None:
        get_offloader().sync_prev_onload()
        get_offloader().join_after_forward()

    def run_fullgraph(self, *args: Any) -> Any:
        get_offloader().sync_prev_onload()
        return self.model(*args)


class FirstRunner:
    """Sets an offloader, and ends loading with ``post_init``."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        set_offloader(create_offloader(vllm_config.offload_config))

    def load_model(self, load_dummy_weights: bool = False) -> None:
        model, self.drafter, self.model_memory_usage = load(self.vllm_config)
        self.model = CUDAGraphWrapper(model)
        get_offloader().post_init()

    def get_model(self) -> nn.Module:
        return self.model.unwrap()

    def execute(self, *args: Any) -> Any:
        return self.model(*args)

    @torch.inference_mode()
    def profile_run(self) -> None:
        self.get_model()(PROFILED)


class SecondRunner:
    """The default for nearly every model since vLLM 0.32: like the first one since 0.28, and neither before."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        if state.second_sets_offloader:
            set_offloader(create_offloader(vllm_config.offload_config))

    def load_model(self, load_dummy_weights: bool = False, *args: Any, **kwargs: Any) -> None:
        self.model, self.drafter, self.model_memory_usage = load(self.vllm_config)
        if state.second_sets_offloader:
            get_offloader().post_init()
        self.graphs = CudaGraphManager(self.model)

    def get_model(self) -> nn.Module:
        return self.model

    def execute(self, *args: Any) -> Any:
        return self.graphs.run_fullgraph(*args)

    @torch.inference_mode()
    def profile_run(self) -> None:
        self.model(PROFILED)


def load(config: VllmConfig) -> tuple[nn.Module, nn.Module | None, int]:
    """The model, a draft model, and the bytes of both."""
    torch.manual_seed(7)
    model = Model(NUM_LAYERS, config.width, config.mlp)
    process_weights_after_loading(model)
    config.change_model(model)
    draft = Model(config.draft_layers, config.width) if config.draft_layers else None
    models = [model] if draft is None else [model, draft]
    return model, draft, sum(p.nbytes for each in models for p in each.parameters())


class WorkerBase:
    def __init__(self, vllm_config: VllmConfig, rank: int) -> None:
        self.vllm_config = vllm_config
        self.rank = rank
        self.model_runner: Any = None

    def get_model(self) -> nn.Module:
        raise NotImplementedError

    def apply_model(self, fn: Callable[[nn.Module], Any]) -> Any:
        return fn(self.get_model())


class Worker(WorkerBase):
    def __init__(
        self, vllm_config: VllmConfig, local_rank: int, rank: int, distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(vllm_config, rank)
        self.calls: list[str] = []

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        runner = SecondRunner if self.vllm_config.use_v2_model_runner else FirstRunner
        self.model_runner = runner(self.vllm_config)

    def get_model(self) -> nn.Module:
        model: nn.Module = self.model_runner.get_model()
        return model

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.model_runner.load_model(load_dummy_weights=load_dummy_weights)

    def determine_available_memory(self) -> int:
        """Profiles the model, unless what the cache gets was said (as vLLM's worker for CPUs has it)."""
        if self.vllm_config.profiles:
            self.model_runner.profile_run()
        return 10**9

    def compile_or_warm_up_model(self) -> float:
        if not self.vllm_config.profiles:
            self.model_runner.profile_run()
        return 0.5  # seconds of compilation

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        if self.vllm_config.use_v2_model_runner:
            set_offloader(None)  # since 0.31

    def execute_model(self, scheduler_output: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.model_runner.execute(scheduler_output)

    def sample_tokens(self, grammar_output: None = None, *, draft_replays: int = 0) -> None:
        """With a draft model, pieces of which are graphs."""
        for _ in range(draft_replays):
            get_offloader().sync_prev_onload()

    def sleep(self, level: int = 1) -> None:
        self.calls.append(f"sleep {level}")
        if (pool := CuMemAllocator.instance) is not None:
            pool.sleep(offload_tags=("weights",) if level == 1 else ())

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append("wake_up")
        if (pool := CuMemAllocator.instance) is not None:
            pool.wake_up(tags)

    def reload_weights(self, weights_iterator: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        """Each weight is loaded into a new tensor, and copied from there as soon as it is whole."""
        self.calls.append("reload_weights")
        model = self.model_runner.get_model()
        for module in model.modules():
            if (info := get_layerwise_info(module)).load_numel_total is None:
                info.load_numel_total = sum(p.numel() for p in module.parameters(recurse=False))
                info.kernel_tensors = {**module._parameters}
                for name, parameter in info.kernel_tensors.items():
                    made = torch.full(parameter.shape, float("nan"))
                    module._parameters[name] = nn.Parameter(made, requires_grad=False)
        loaded = dict(weights_iterator)
        model.load_weights(loaded.items())
        for name, module in model.named_modules():
            info = get_layerwise_info(module)
            for attr, parameter in (info.kernel_tensors or {}).items():
                if f"{name}.{attr}" in loaded:
                    parameter.data.copy_(module._parameters[attr])
                module._parameters[attr] = parameter
            info.reset()
        model.after_loading()

    def reset_weights(self) -> None:
        self.calls.append("reset_weights")
        for parameter in self.model_runner.get_model().parameters():
            parameter.data.zero_()

    def save_tensorized_model(self, tensorizer_config: dict[str, Any]) -> None:
        self.calls.append("save_tensorized_model")

    def save_sharded_state(self, path: str) -> None:
        torch.save(self.model_runner.get_model().state_dict(), path)

    def checkpoint_prepare(self) -> None:
        self.calls.append("checkpoint_prepare")

    def discard(self, tags: tuple[str, ...]) -> None:
        self.calls.append(f"discard {' '.join(tags)}")

    def compute_weight_checksums(self) -> dict[str, str]:
        parameters = self.model_runner.get_model().named_parameters()
        return {name: hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest() for name, weight in parameters}


class GroupCoordinator:
    def __init__(self, cpu_group: Any = None, rank_in_group: int = 0, world_size: int = 1) -> None:
        self.cpu_group = cpu_group
        self.rank_in_group = rank_in_group
        self.world_size = world_size

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        if self.world_size == 1:
            return obj
        found = [obj]
        dist.broadcast_object_list(found, src, self.cpu_group)
        return found[0]


def get_dp_group() -> Any:
    return state.data_parallel


def get_tp_group() -> GroupCoordinator:
    return state.tensor_parallel


def get_world_group() -> GroupCoordinator:
    return state.world


class Logger:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str, *args: Any) -> None:
        self.lines.append("info: " + (text % args if args else text))

    def warning(self, text: str, *args: Any) -> None:
        self.lines.append("warning: " + (text % args if args else text))


def init_logger(name: str) -> Logger:
    return state.logger


class BreakableCUDAGraphCapture:
    """Of vLLM 0.32: records what runs between two segments; the segments themselves run at once here."""

    _active: BreakableCUDAGraphCapture | None = None

    def __init__(self) -> None:
        self.segments: list[Callable[[], Any]] = []
        self._capturing = False

    @classmethod
    def current(cls) -> BreakableCUDAGraphCapture | None:
        return BreakableCUDAGraphCapture._active

    def __enter__(self) -> BreakableCUDAGraphCapture:
        BreakableCUDAGraphCapture._active = self
        self._capturing = True
        return self

    def __exit__(self, *_: object) -> None:
        self._end_segment()
        BreakableCUDAGraphCapture._active = None

    def _end_segment(self) -> None:
        self._capturing = False

    def add_eager(self, fn: Callable[[], Any]) -> Any:
        self._end_segment()
        result = fn()
        self.segments.append(fn)
        self._capturing = True
        return result


_MODULES: dict[str, list[Any]] = {
    "vllm": [],
    "vllm.logger": [init_logger],
    "vllm.config.vllm": [VllmConfig],
    "vllm.config.compilation": [CompilationConfig],
    "vllm.config.parallel": [ParallelConfig],
    "vllm.config.load": [LoadConfig],
    "vllm.config.model": [ModelConfig],
    "vllm.config.multimodal": [MultiModalConfig],
    "vllm.config.speculative": [SpeculativeConfig],
    "vllm.config.offload": [OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig],
    "vllm.compilation.cuda_graph": [CUDAGraphWrapper],
    "vllm.compilation.breakable_cudagraph": [BreakableCUDAGraphCapture],
    "vllm.distributed.parallel_state": [GroupCoordinator, get_dp_group, get_tp_group, get_world_group],
    "vllm.model_executor.offloader.base": [BaseOffloader, NoopOffloader, get_offloader, set_offloader],
    "vllm.model_executor.offloader.prefetch": [PrefetchOffloader],
    "vllm.model_executor.offloader.uva": [UVAOffloader],
    "vllm.model_executor.layers.fused_moe": [vllm_experts.override_config],
    "vllm.model_executor.layers.fused_moe.config": [
        vllm_experts.FusedMoEQuantConfig,
        vllm_experts.FusedMoEParallelConfig,
    ],
    "vllm.model_executor.layers.fused_moe.fused_moe": [_weights_host_resident, vllm_experts.try_get_optimal_moe_config],
    "vllm.model_executor.layers.fused_moe.modular_kernel": [vllm_experts.FusedMoEKernelModularImpl],
    "vllm.model_executor.layers.fused_moe.routed_experts": [vllm_experts.RoutedExperts],
    "vllm.model_executor.layers.fused_moe.experts.triton_moe": [vllm_experts.TritonExperts],
    "vllm.model_executor.layers.fused_moe.experts.marlin_moe": [
        vllm_experts.MarlinExperts,
        vllm_experts.moe_align_block_size,
    ],
    "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe": [
        vllm_experts.OAITritonExperts,
        vllm_experts.OAITritonMxfp4ExpertsMonolithic,
        vllm_experts.triton_kernel_fused_experts,
        vllm_experts.triton_kernel_moe_forward,
    ],
    "vllm.device_allocator.cumem": [CuMemAllocator],
    "vllm.model_executor.model_loader.reload.layerwise": [get_layerwise_info],
    "vllm.model_executor.model_loader.reload.types": [LayerReloadingInfo],
    "vllm.model_executor.model_loader.utils": [device_loading_context, process_weights_after_loading],
    "vllm.model_executor.models.utils": [make_layers, PPMissingLayer],
    "vllm.model_executor.layers.vocab_parallel_embedding": [VocabParallelEmbedding, ParallelLMHead],
    "vllm.v1.worker.worker_base": [WorkerBase],
    "vllm.v1.worker.gpu_worker": [Worker],
    "vllm.v1.worker.gpu_model_runner": [FirstRunner],
    "vllm.v1.worker.gpu.model_runner": [SecondRunner],
    "vllm.v1.worker.gpu.cudagraph_utils": [CudaGraphManager],
}
_RUNNERS = (FirstRunner, SecondRunner)


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.33.0") -> None:
    """Put the stand-in where vLLM would be, in its first state, until the test ends."""
    state.second_sets_offloader = int(version.split(".")[1]) >= 28
    state.offloader, state.pipeline, state.logger = NoopOffloader(), (0, 1), Logger()
    state.data_parallel = SimpleNamespace(world_size=1, cpu_group=None)
    monkeypatch.setattr(CuMemAllocator, "instance", None)
    state.tensor_parallel = state.world = GroupCoordinator()
    for name, things in _MODULES.items():
        put_module(monkeypatch, name)
        for thing in things:
            monkeypatch.setattr(thing, "__module__", name)
            known_as = "GPUModelRunner" if thing in _RUNNERS else thing.__name__
            setattr(sys.modules[name], known_as, thing)
    sys.modules["vllm"].__version__ = version  # type: ignore[attr-defined]
    sys.modules[vllm_experts.PACKED_MOE].triton_kernels_version = "3.5.1"  # type: ignore[attr-defined]


def put_module(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An empty module ``name``, and the packages above it."""
    parent, _, last = name.rpartition(".")
    if parent and not hasattr(sys.modules.get(parent), "stands_in"):
        put_module(monkeypatch, parent)
    module = ModuleType(name)
    module.__path__ = []
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.stands_in = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    if parent:
        setattr(sys.modules[parent], last, module)
