"""Memory is planned: on the device to 64 MiB, on the host to 1 %; and everything is given back."""

from __future__ import annotations

import copy
import gc
from contextlib import suppress

import psutil
import pytest
import torch
from gpu_models import build, offloaded, twins

import headrace
from headrace import UVA, Prefetch
from headrace.errors import BudgetError, OptionError
from headrace.memory import pinned as pinning

pytestmark = pytest.mark.alone

MIB = 2**20


@torch.no_grad()
def test_device_peak_is_the_plan() -> None:
    model = build(40, device="cpu")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with offloaded(model, Prefetch(4, 3, 2), device="cuda") as handle:
        ids = torch.arange(8, device="cuda")
        model(ids)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        assert handle.stats().bytes_moved > 0
        assert peak <= handle.plan.device_bytes + 64 * MIB
        assert peak >= handle.plan.device_bytes


def test_host_memory_is_exact() -> None:
    num_bytes = 300 * MIB + 12_345
    process = psutil.Process()
    before = process.memory_info().rss
    region = pinning.pinned_region(num_bytes)
    assert region.numel() == num_bytes
    assert region.is_pinned()
    assert process.memory_info().rss - before <= num_bytes * 1.01 + 8 * MIB
    del region
    gc.collect()
    assert process.memory_info().rss - before <= 16 * MIB


def test_a_view_keeps_the_region_alive() -> None:
    view = pinning.pinned_region(MIB)[10:20]
    view.fill_(7)
    gc.collect()
    assert view.is_pinned()
    assert view.tolist() == [7] * 10


def test_refused_registration_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def cudaHostRegister(self, *args: object) -> int:  # noqa: N802
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    with pytest.warns(headrace.HeadraceWarning, match="refused to register"):
        region = pinning.pinned_region(MIB)
    assert region.is_pinned()


@torch.no_grad()
def test_unpinned_memory_works_eagerly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DISABLE_PIN_MEMORY", "1")
    resident, model = twins()
    ids = torch.arange(8, device="cuda")
    with pytest.warns(headrace.HeadraceWarning, match="HEADRACE_DISABLE_PIN_MEMORY"):
        handle = headrace.offload(model, Prefetch(1, 1, 2))
    for _ in range(3):
        assert torch.equal(model(ids), resident(ids))
    assert handle.stats().bytes_moved >= 3 * handle.plan.moved_bytes > 0
    handle.remove(graphs_released=True)


@torch.no_grad()
def test_remove_restores_everything() -> None:
    resident = build()
    for device in ("cuda", "cpu"):
        model = copy.deepcopy(resident).to(device)
        tensors = dict(model.named_parameters())
        handle = headrace.offload(model, Prefetch(2, 1, 2), device="cuda")
        model(torch.arange(8, device="cuda"))
        assert handle.stats().bytes_moved > 0
        handle.remove(graphs_released=True)
        for name, parameter in model.named_parameters():
            assert parameter is tensors[name]
            assert parameter.device.type == device
            assert torch.equal(parameter.cpu(), resident.get_parameter(name).cpu())
        del model, handle
        gc.collect()


@torch.no_grad()
def test_weights_read_in_place_return_to_the_host_without_device_memory() -> None:
    resident = build(device="cpu")
    model = copy.deepcopy(resident)
    handle = headrace.offload(model, UVA("1GiB"), device="cuda")
    assert handle.plan.uva
    model(torch.arange(8, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    handle.remove(graphs_released=True)
    assert torch.cuda.max_memory_allocated() == before
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, resident.get_parameter(name))


@torch.no_grad()
def test_device_memory_is_given_back() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = build()
    handle = headrace.offload(model, Prefetch(1, 1, 3))
    model(torch.arange(8, device="cuda"))
    del model, handle
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= MIB


@torch.no_grad()
def test_no_room_for_slots_leaves_the_model_intact(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = build(dtype=torch.float32)
    model = copy.deepcopy(resident)
    ids = torch.arange(8, device="cuda")
    _free, total = torch.cuda.mem_get_info()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    hoard = []  # what the allocator still has in its blocks
    for size in (1 << 22, 1 << 20, 1 << 18):
        with suppress(torch.OutOfMemoryError):
            while True:
                hoard.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    try:
        with pytest.raises(BudgetError, match="no room for 7 slots"):
            headrace.offload(model, Prefetch(1, 1, 7))
        hoard.clear()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(model(ids), resident(ids))
    with offloaded(model, Prefetch(1, 1, 2)) as handle:
        assert torch.equal(model(ids), resident(ids))
        assert handle.stats().bytes_moved > 0


def test_no_unified_addressing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(2)
    addresses = [p.data_ptr() for p in model.parameters()]

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("pointer is not a device pointer")

    monkeypatch.setattr(torch, "as_tensor", refuse)
    with pytest.raises(OptionError, match="HEADRACE_DISABLE_UVA=1"):
        headrace.offload(model, UVA(params=["up_proj"]))
    assert [p.data_ptr() for p in model.parameters()] == addresses


@torch.no_grad()
def test_views_of_zero_copy_tensors_keep_their_bytes() -> None:
    model = build(2)
    expected = model.layers[0].up_proj.weight[3].clone()
    handle = headrace.offload(model, UVA(params=["up_proj"]))
    row = model.layers[0].up_proj.weight[3]
    handle.remove(graphs_released=True)
    del handle, model
    gc.collect()
    assert torch.equal(row, expected)
