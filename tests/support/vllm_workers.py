"""Workers of headrace's and of vLLM's own over the stand-in for vLLM, and what their outputs are compared by."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import vllm_stand_in as vllm
from engines import VOCABULARY

RUNNERS = pytest.mark.parametrize("second", [True, False], ids=["second runner", "first runner"])
GROUP = {"offload_group_size": 4}
# Of the stand-in.
_IMPORTERS = tuple(f"headrace.adapters.vllm.{name}" for name in ("worker", "experts", "sleep"))
SOME = {"device_memory": "7MiB"}  # of 9 MiB


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    vllm.install(monkeypatch)
    for name in _IMPORTERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in _IMPORTERS:
        sys.modules.pop(name, None)


def make(
    flags: dict[str, Any] | None = None, own: dict[str, Any] | None = None, *, second: bool = True, rank: int = 0,
    moves: bool = True, **config: Any,
) -> Any:  # fmt: skip
    """headrace's worker as vLLM makes it, before the model is loaded; ``moves=False``: the reference's."""
    flags = flags or {}
    uva = {name: value for name, value in flags.items() if name.startswith("cpu_")}
    prefetch = {name: value for name, value in flags.items() if name.startswith("offload_")}
    offload = vllm.OffloadConfig("auto", vllm.UVAOffloadConfig(**uva), vllm.PrefetchOffloadConfig(**prefetch))
    config.setdefault("additional_config", {"headrace": own} if own else {})
    return start(vllm.VllmConfig(offload, use_v2_model_runner=second, **config), rank, moves)


def start(config: vllm.VllmConfig, rank: int = 0, moves: bool = True) -> Any:
    worker_class = importlib.import_module("headrace.adapters.vllm" if moves else "no_copy").Worker
    worker = worker_class(
        vllm_config=config, local_rank=0, rank=rank, distributed_init_method="", is_driver_worker=rank == 0
    )
    worker.init_device()
    return worker


def loaded(*args: Any, **kwargs: Any) -> Any:
    worker = make(*args, **kwargs)
    worker.load_model()
    return worker


def another_process() -> None:
    """Nothing that was done so far has been done in the process of the next worker."""
    vllm.set_offloader(None)
    for name in _IMPORTERS:
        sys.modules.pop(name, None)


def resident(**config: Any) -> vllm.Worker:
    """vLLM alone, as if in a process of its own."""
    before = vllm.get_offloader()
    vllm.set_offloader(None)
    worker = vllm.Worker(vllm.VllmConfig(**config), 0, 0, "")
    worker.init_device()
    worker.load_model()
    vllm.set_offloader(before)
    return worker


def ids(rows: int = 3) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, 5), generator=torch.Generator().manual_seed(rows))


def require_same_outputs(worker: Any, plain: vllm.Worker) -> None:
    for rows in (1, 3, 3, 1):
        assert torch.equal(worker.execute_model(ids(rows)), plain.execute_model(ids(rows)))


def offloaded_names(worker: Any) -> set[str]:
    plan = worker._offloader.plan
    return {entry.storage for unit in plan.units for entry in unit.entries} | set(plan.uva)
