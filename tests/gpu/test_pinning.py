"""The promise: loading for a GPU takes exactly as much host memory as is offloaded, and gives it back; same bits."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from gpu_models import build
from safetensors.torch import save_model
from torch import nn

import headrace
from headrace import UVA, Prefetch
from headrace.errors import StateError
from headrace.memory.pages import map_pages, populate_parallel
from headrace.memory.pinned import CudaRegistrar, PinnedBuffer
from headrace.runtime.session import OffloadSession
from headrace.stores.pinned_host import PinnedStore

pytestmark = pytest.mark.alone

MIB = 1 << 20


def store_of(handle: headrace.Handle) -> PinnedStore:
    attachment: OffloadSession = handle._session
    assert isinstance(attachment._store, PinnedStore)
    return attachment._store


@torch.no_grad()
@pytest.mark.parametrize("home", ["cpu", "cuda", "meta"])
@pytest.mark.parametrize("policy", [Prefetch(1, 1, 2), Prefetch(3, 2, 2), UVA(params=["up_proj"])], ids=str)
def test_bits_and_exact_bytes(tmp_path: Path, home: str, policy: headrace.Prefetch | headrace.UVA) -> None:
    resident = build()
    ids = torch.arange(8, device="cuda")
    expected = resident(ids)
    checkpoint = None
    if home == "meta":
        save_model(resident, str(tmp_path / "model.safetensors"))
        checkpoint = tmp_path
    for _ in range(3):  # a second offload of the same size works, so the first gave everything back
        model = copy.deepcopy(resident).to(home)
        handle = headrace.offload(model, policy, checkpoint=checkpoint, device="cuda")
        plan, store = handle.plan, store_of(handle)
        aligned = sum(u.num_bytes for u in plan.units) + sum(-(-n // 256) * 256 for n in plan.uva.values())
        assert store.host_bytes == aligned
        for unit in plan.units:
            slab = store.load(unit).slab
            assert slab is not None
            assert slab.is_pinned()
            del slab
        for name in plan.uva:
            assert store.in_place(name).is_pinned()
        for _ in range(3):
            assert torch.equal(model(ids), expected)
        handle.remove(graphs_released=True)
        assert torch.equal(model.to("cuda")(ids), expected)


@torch.no_grad()
def test_remove_unregisters_while_the_handle_lives() -> None:
    class Counting(CudaRegistrar):
        held: dict[int, int] = {}  # noqa: RUF012

        def register(self, address: int, num_bytes: int) -> int:
            code = super().register(address, num_bytes)
            if code == 0:
                self.held[address] = num_bytes
            return code

        def unregister(self, address: int) -> None:
            super().unregister(address)
            del self.held[address]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.stores.pinned_host.CudaRegistrar", Counting)
        model = build(device="cpu")
        handle = headrace.offload(model, Prefetch(1, 1, 2), device="cuda")
        assert sum(Counting.held.values()) == store_of(handle).host_bytes
        handle.remove(graphs_released=True)
        gc.collect()
        assert Counting.held == {}


@torch.no_grad()
def test_large_live_tensors_are_adopted_in_place() -> None:
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4))).eval()
    before = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    x = torch.randn(2, 4096)
    resident = copy.deepcopy(model).cuda()
    handle = headrace.offload(model, Prefetch(1, 1, 2, params=["weight"]), device="cuda")
    assert store_of(handle).adopted == set(before)
    for _ in range(3):
        assert torch.equal(model(x.cuda()), resident(x.cuda()))
    handle.remove(graphs_released=True)
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == before
    assert not any(tensor.is_pinned() for tensor in model.parameters())
    assert torch.equal(model[0].weight, resident[0].weight.cpu())


@torch.no_grad()
def test_offload_during_a_capture_is_refused() -> None:
    model = build(2, device="cpu")
    addresses = [p.data_ptr() for p in model.parameters()]
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(StateError, match="before the capture begins"):
            headrace.offload(model, Prefetch(1, 1, 1), device="cuda")
    graph.replay()
    assert y.sum().item() == 8
    assert [p.data_ptr() for p in model.parameters()] == addresses


@torch.no_grad()
def test_what_is_dropped_during_a_capture_is_unregistered_after_it() -> None:
    registrar = CudaRegistrar()
    buffer = torch.zeros(8 * MIB, dtype=torch.uint8)
    pinned: PinnedBuffer | None = PinnedBuffer(buffer)
    assert pinned is not None
    assert pinned.register(registrar) == 0
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        pinned = None
        gc.collect()
    graph.replay()
    assert y.sum().item() == 8
    again = PinnedBuffer(buffer)
    assert again.register(registrar) == 0, "the same memory, which has to have been given back before"


def test_a_refusal_leaves_no_error_behind() -> None:
    registrar = CudaRegistrar()
    buffer = torch.from_numpy(map_pages(8 * MIB))
    populate_parallel(buffer, 2)
    assert registrar.register(buffer.data_ptr(), buffer.numel()) == 0
    try:
        assert registrar.register(buffer.data_ptr(), buffer.numel()) != 0
        assert torch.ones(4, device="cuda").add(1).sum().item() == 8
    finally:
        registrar.unregister(buffer.data_ptr())


GROWTH = """
import gc, json, sys, torch, headrace
from headrace import Prefetch
from headrace.memory.system import PeakMeter, rss_bytes
sys.path.insert(0, sys.argv[1])
from gpu_models import Stack, build
from safetensors.torch import save_model

home, folder = sys.argv[2:]

def offload(layers, width, checkpoint=None):
    torch.set_default_dtype(torch.bfloat16)  # never there in float32: that would be the peak
    with torch.device("meta" if home == "meta" else "cpu"):
        model = Stack(layers, width).eval().requires_grad_(False)
    handle = headrace.offload(model, Prefetch(1, 1, 2), checkpoint=checkpoint, device="cuda")
    with torch.no_grad():
        model(torch.arange(8, device="cuda"))
        torch.cuda.synchronize()
    return model, handle

offload(3, 512, folder + "/small" if home == "meta" else None)[1].remove()  # whatever CUDA opens for good
gc.collect()
start, meter = rss_bytes(), PeakMeter()
model, handle = offload(16, 3072, folder + "/big" if home == "meta" else None)
print(json.dumps([rss_bytes() - start, meter.growth_bytes(), handle.plan.offloaded_bytes, handle.plan.resident_bytes]))
"""


@pytest.mark.parametrize("home", ["meta", "cpu"])
def test_host_memory_grows_by_what_is_offloaded(tmp_path: Path, home: str) -> None:
    """The bar: 1 % and 64 MiB, at the end and at the peak; there, of a live model, residents and one tensor more."""
    if home == "meta":
        from gpu_models import Stack

        for name, layers, width in (("small", 3, 512), ("big", 16, 3072)):
            (tmp_path / name).mkdir()
            model = Stack(layers, width).eval().requires_grad_(False).to(torch.bfloat16)
            save_model(model, str(tmp_path / name / "model.safetensors"))
            del model
    command = [sys.executable, "-c", textwrap.dedent(GROWTH), str(Path(__file__).parent), home, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    growth, peak, offloaded, resident = json.loads(done.stdout)
    assert offloaded > 1000 * MIB
    bar = 1.01 * offloaded + 64 * MIB
    assert growth <= bar, f"{growth / MIB:.0f} MiB for {offloaded / MIB:.0f} MiB"
    live = resident + 2 * 3072 * 3072 * 2 if home == "cpu" else 0
    assert peak <= bar + live, f"{peak / MIB:.0f} MiB for {offloaded / MIB:.0f} MiB"
