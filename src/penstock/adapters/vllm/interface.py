"""What of vLLM penstock relies on: which versions, which names, which parameters.

Checked when a worker starts, so that a vLLM that has moved on is refused by name and not by a traceback, or by weights
that are silently not offloaded.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from typing import Any

from penstock.errors import OptionError

__all__ = ["NAMES", "NEWEST", "OLDEST", "Name", "differences", "require_supported"]

OLDEST = (0, 20, 2)
NEWEST = (0, 26)  # and what is fixed in it later


@dataclass(frozen=True)
class Name:
    """A function or class of vLLM, and the parameters that penstock gives it or is given by it, in order."""

    module: str
    path: str
    parameters: tuple[str, ...] | None = None


_OFFLOADER = "vllm.model_executor.offloader.base"
NAMES = (
    Name(_OFFLOADER, "get_offloader", ()),
    Name(_OFFLOADER, "set_offloader", ("instance",)),
    Name(_OFFLOADER, "NoopOffloader"),
    Name(_OFFLOADER, "BaseOffloader.wrap_modules", ("self", "modules_generator")),
    Name(_OFFLOADER, "BaseOffloader.post_init", ("self",)),
    Name(_OFFLOADER, "BaseOffloader.sync_prev_onload", ("self",)),
    Name(_OFFLOADER, "BaseOffloader.join_after_forward", ("self",)),
    Name("vllm.model_executor.models.utils", "make_layers", ("num_hidden_layers", "layer_fn", "prefix")),
    Name("vllm.model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding"),
    Name("vllm.model_executor.layers.vocab_parallel_embedding", "ParallelLMHead"),
    Name("vllm.v1.worker.gpu_worker", "Worker.load_model", ("self", "load_dummy_weights")),
    Name("vllm.v1.worker.gpu_worker", "Worker.sleep", ("self", "level")),
    Name("vllm.v1.worker.gpu_worker", "Worker.reload_weights"),
    Name("vllm.v1.worker.gpu_worker", "Worker.update_weights"),
    Name("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.load_model", ("self", "load_dummy_weights")),
    Name("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.get_model", ("self",)),
    Name("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.load_model", ("self", "load_dummy_weights")),
    Name("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.get_model", ("self",)),
    Name("vllm.distributed.parallel_state", "get_dp_group", ()),
    Name("vllm.config.offload", "OffloadConfig"),
)


def require_supported(version: str) -> None:
    """Refuse a vLLM that is older or newer than those penstock was tried with, or that lacks a name it relies on.

    Raises:
        OptionError: says which versions will do, or which names differ.
    """
    _require_version(version)
    if found := differences():
        raise OptionError(
            f"vLLM {version} is not as penstock knows it: {'; '.join(found)}. Use an unchanged vLLM "
            f"{_range()}, or leave --worker-cls out to run it without penstock"
        )


def _require_version(version: str) -> None:
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    number = tuple(int(part or 0) for part in match.groups()) if match else ()
    if number < OLDEST or number[:2] > NEWEST:
        age = "too old" if number < OLDEST else "newer than what penstock knows"
        raise OptionError(
            f"vLLM {version} is {age}: expected {_range()}; install one of these (pip install 'vllm==0.26.0'), or "
            f"leave --worker-cls out to run vLLM without penstock"
        )


def _range() -> str:
    return f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}.x"


def differences() -> list[str]:
    """Names that are missing, or take other parameters than expected; empty if all is well. Imports vLLM."""
    return [problem for name in NAMES if (problem := _difference(name))]


def _difference(name: Name) -> str:
    where = f"{name.module}.{name.path}"
    try:
        found: Any = importlib.import_module(name.module)
        for part in name.path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        return f"{where} is missing ({error})"
    if name.parameters is None:
        return ""
    taken = tuple(inspect.signature(found).parameters)
    if taken[: len(name.parameters)] != name.parameters:
        return f"{where} takes ({', '.join(taken)}), expected ({', '.join(name.parameters)}, ...)"
    return ""
