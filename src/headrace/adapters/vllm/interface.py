"""Versions of vLLM that headrace runs in, and the functions that are hooked or that call headrace."""

from __future__ import annotations

from headrace.adapters.engine_interface import require_hooks, version_number
from headrace.errors import OptionError

OLDEST = (0, 20, 2)
NEWEST = (0, 33)  # with its later patch releases
OLDEST_WITH_CACHE = (0, 32)  # experts can be cached

_FIX = "install one of these (pip install 'vllm==0.33.0'), or leave --worker-cls out to run vLLM without headrace"

# Methods that the worker overrides, and calls without which outputs would be wrong without any error.
_OVERRIDDEN = (
    *("load_model", "determine_available_memory", "compile_or_warm_up_model", "execute_model", "sample_tokens"),
    *("sleep", "wake_up", "reload_weights", "save_tensorized_model", "apply_model"),
)
_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager"
_AROUND_CAPTURE = ("sync_prev_onload", "join_after_forward")
HOOKS: dict[str, tuple[str, ...]] = {
    **{f"vllm.v1.worker.gpu_worker.Worker.{name}": () for name in _OVERRIDDEN},
    # vLLM announces every replay; the prefetcher relies on this.
    "vllm.compilation.cuda_graph.CUDAGraphWrapper.__call__": _AROUND_CAPTURE,
    f"{_GRAPHS}.capture": _AROUND_CAPTURE,
    f"{_GRAPHS}.run_fullgraph": ("sync_prev_onload",),
    # The additional configuration, which names the units, is part of the compile cache's key.
    "vllm.config.vllm.VllmConfig.compute_hash": ("additional_config",),
}


def require_supported(version: str) -> None:
    """Refuse a vLLM that is older or newer than the tested ones, or that lacks one of :data:`HOOKS`.

    Raises:
        OptionError: names the supported versions, or the differences.
    """
    require_version(version)
    instead = f"vLLM {_range()}, or leave --worker-cls out to run it without"
    require_hooks(f"vLLM {version}", HOOKS, instead)


def require_version(version: str) -> None:
    """Refuse a vLLM that is older or newer than the tested ones; imports nothing.

    Raises:
        OptionError: names the supported versions.
    """
    number = version_number(version)
    if number is None:
        raise OptionError(f"vLLM calls itself {version!r}, which is no version number: expected {_range()}; {_FIX}")
    if number < OLDEST or number[:2] > NEWEST:
        age = "too old" if number < OLDEST else "newer than the tested ones"
        raise OptionError(f"vLLM {version} is {age}: expected {_range()}; {_FIX}")


def _range() -> str:
    return f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}.x"
