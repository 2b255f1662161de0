"""The promise: units in a second GPU's memory run with the same bits, eager and in graphs, and it gets its memory back.

Where a test has ``peer``, it runs twice: the memory is that of a second GPU, or the GPU's own in its place.
"""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import pytest
import torch
from gpu_files import captured, inputs, require_bits_in_any_order, save
from gpu_models import Stack, build, offloaded

import headrace
from headrace import Budget, Plan, Prefetch
from headrace.errors import HeadraceWarning, LimitError, OptionError
from headrace.model.inventory import take_inventory
from headrace.plan.build import build_plan
from headrace.plan.cached_experts import PIECE_BYTES
from headrace.planning.context import free_on_peer
from headrace.planning.request import peer_of
from headrace.stores.peer import peer_memory
from headrace.testing import assert_moved
from peers import on_peer
from spills import staged

pytestmark = pytest.mark.alone

HERE, NEXT = torch.device("cuda", 0), torch.device("cuda", 1)
needs_peer = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(params=["itself", pytest.param("another", marks=needs_peer)])
def peer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "another":
        return NEXT
    for module in ("planning.checks", "planning.context", "runtime.prepare"):
        monkeypatch.setattr(f"headrace.{module}.peer_of", lambda device: HERE)
    return HERE


def plan_of(model: Stack, slots: int, *indices: int) -> Plan:
    return on_peer(build_plan(take_inventory(model), Prefetch(1, 1, slots, params=["layers"])), *indices)


def test_its_memory_is_written_read_and_given_back(peer: torch.device) -> None:
    gc.collect()
    torch.cuda.empty_cache()  # of the tests before
    torch.cuda.mem_get_info(peer)  # the context is there to stay
    before = torch.cuda.mem_get_info(peer)[0]
    memory = peer_memory(31 * PIECE_BYTES + 256, HERE, peer)
    assert memory.device == HERE
    assert memory.numel() == 31 * PIECE_BYTES + 256
    assert before - torch.cuda.mem_get_info(peer)[0] >= 32 * PIECE_BYTES
    pattern = (torch.arange(memory.numel()) % 251).to(torch.uint8)
    memory.copy_(pattern.pin_memory(), non_blocking=True)  # as weights are loaded
    assert torch.equal(memory.clone().cpu(), pattern)  # as they are read for state_dict()
    slot = torch.empty(256, dtype=torch.uint8, device=HERE)
    slot.copy_(memory[-256:], non_blocking=True)
    assert torch.equal(slot.cpu(), pattern[-256:])
    del memory
    gc.collect()
    torch.cuda.empty_cache()  # of the clone
    assert before - torch.cuda.mem_get_info(peer)[0] < 4 * PIECE_BYTES


@torch.no_grad()
@pytest.mark.parametrize("rest", ["cuda", "cpu", "meta"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_eager_captured_and_replayed(slots: int, rest: str, peer: torch.device, tmp_path: Path) -> None:
    """Beside units in host memory and, from ``meta``, in files."""
    resident = build()
    expected = [resident(inputs(seed)).clone() for seed in range(4)]
    folder = save(resident, tmp_path) if rest == "meta" else None
    model = copy.deepcopy(resident).to(rest)
    plan = plan_of(model, slots, 1, 2, 6)
    if folder is not None:
        plan = staged(plan, 4)
    with offloaded(model, plan, checkpoint=folder, device=HERE) as handle:
        for forwards in (1, 2):
            assert torch.equal(model(inputs(1)), expected[1])
            assert_moved(handle, forwards)
        moved = handle.stats().moved_by_store
        assert all(moved[place] > 0 for place in ("peer", "cpu"))
        require_bits_in_any_order(model, expected)
        stores = handle.stats().store_bytes
        assert stores["peer"] == plan.peer_bytes
        assert stores["host_pinned"] == sum(unit.num_bytes for unit in plan.units if unit.store == "cpu")
        state = model.state_dict()
        assert all(torch.equal(state[name].to(HERE), tensor) for name, tensor in resident.state_dict().items())
    assert torch.equal(model.to(HERE)(inputs(1)), expected[1])


@torch.no_grad()
def test_compiled(peer: torch.device) -> None:
    resident = build(5)
    model, ids = copy.deepcopy(resident), inputs()
    with headrace.testing.boundaries(resident, Prefetch(1, 1, 2, params=["layers"])):
        expected = torch.compile(resident, fullgraph=True)(ids)
    torch._dynamo.reset()
    with offloaded(model, plan_of(model, 2, 0, 3)) as handle:
        run = torch.compile(model, fullgraph=True)
        for _ in range(3):
            assert torch.equal(run(ids), expected)
        assert_moved(handle, 3)


@torch.no_grad()
def test_a_budget_and_what_is_written(peer: torch.device) -> None:
    """What an adapter is merged into is copied from there, also by a graph that was captured before."""
    twin = build(12)
    model, ids = copy.deepcopy(twin), inputs()
    num_bytes = take_inventory(model).num_bytes
    with offloaded(model, Budget(num_bytes // 2, ["layers"], peer_memory=num_bytes)) as handle:
        assert handle.plan.store_bytes["cpu"] == 0 < handle.plan.peer_bytes
        parameters = dict(twin.named_parameters())
        name = next(entry.storage for entry in handle.plan.units[1].entries if entry.storage in parameters)
        assert torch.equal(model(ids), twin(ids))
        graph, out = captured(model, ids)
        delta = torch.randn_like(parameters[name], dtype=torch.float32).to(parameters[name].dtype)
        for each in (model, twin):
            each.get_parameter(name).data += delta
        for _ in range(3):
            graph.replay()
            assert torch.equal(out, twin(ids))
        assert torch.equal(model(ids), twin(ids))
        assert not handle.stats().notes


@needs_peer
@torch.no_grad()
def test_the_next_gpu_takes_them_and_gives_back_its_memory() -> None:
    """From host memory to a fresh model's units on it, and neither GPU has more than was planned."""
    warm = build(2, device="cpu")
    with offloaded(warm, plan_of(warm, 1, 0), device=HERE):
        warm(inputs())
    model = build(24, device="cpu")
    gc.collect()
    torch.cuda.empty_cache()
    free = [torch.cuda.mem_get_info(each)[0] for each in (HERE, NEXT)]
    with offloaded(model, plan_of(model, 2, *range(24)), device=HERE) as handle:
        model(inputs())
        torch.cuda.synchronize()
        used = [before - torch.cuda.mem_get_info(each)[0] for before, each in zip(free, (HERE, NEXT), strict=True)]
        assert used[0] <= handle.plan.device_bytes + (64 << 20)
        assert handle.plan.peer_bytes <= used[1] <= handle.plan.peer_bytes + 2 * PIECE_BYTES
    gc.collect()
    assert free[1] - torch.cuda.mem_get_info(NEXT)[0] <= 2 * PIECE_BYTES


def test_more_than_it_has_is_refused(peer: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(3, device="cpu")
    plan = plan_of(model, 1, 0, 1)
    free = free_on_peer(plan, HERE)
    assert free is not None
    assert free > plan.peer_bytes
    monkeypatch.setattr("headrace.planning.context.free_on_peer", lambda *_: plan.peer_bytes - 1)
    with pytest.raises(LimitError, match=r"of memory of the peer GPU.* use a smaller --peer-memory"):
        headrace.offload(model, plan, device=HERE)


def test_one_gpu_has_no_peer() -> None:
    if torch.cuda.device_count() > 1:
        assert peer_of(HERE) == NEXT
        return
    model = build(3, device="cpu")
    with pytest.raises(OptionError, match=r"another GPU whose memory cuda:0 can address .* found none among 1"):
        headrace.offload(model, plan_of(model, 1, 0), device=HERE)
    with pytest.warns(HeadraceWarning, match="fit the budget"):
        headrace.offload(model, Budget("1GiB", peer_memory="1GiB"), device=HERE).remove()
