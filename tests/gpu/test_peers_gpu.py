"""The promise: on GPUs too, ranks that share bytes or links give the bits of one alone, or an error in bounded time.

All but one need several GPUs with peer access: they take four if there are four, else two.
"""

from __future__ import annotations

import copy
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_models import build

import headrace
from commands import TINY, run, succeed
from headrace import Prefetch
from headrace.cli.demo_run import ensure_model
from headrace.errors import OptionError, TransferError
from headrace.stores import rank_stores
from headrace.stores.sharded import ShardedStore
from headrace.testing import assert_moved
from headrace.transfer.link_rates import COPY_SIZES
from headrace.transfer.measuring import mutual_peers, peer_rates
from ranks import outcomes, run_ranks

NUM_RANKS = 4 if torch.cuda.device_count() >= 4 else 2
MODES = ["sharded_gpu", "sharded_cpu"]
# After a trap the context is lost, and giving memory back in it would end the process before it has reported.
KEPT: list[Any] = []
needs_peers = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def share(model: Any, mode: str, slots: int = 2) -> headrace.Handle:
    policy = Prefetch(1, 1, slots, params=["layers"], mode=mode)  # type: ignore[arg-type]
    return headrace.offload(model, policy, device="cuda", group=dist.group.WORLD)


def capture(model: Any, ids: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(ids)
    return graph, out


@torch.no_grad()
def bits(rank: int, mode: str, slots: int, rest: str) -> int:
    """Eager, captured, replayed and mixed, from weights on the device and in host memory; small chunks."""
    rank_stores.CHUNK_BYTES = 64 << 10
    resident = build(7)
    model = copy.deepcopy(resident).to(rest)
    ids = torch.arange(8, device="cuda")
    expected = resident(ids)
    handle = share(model, mode, slots)
    for _ in range(3):
        assert torch.equal(model(ids), expected)
    assert_moved(handle, 3)
    graph, out = capture(model, ids)
    for turn in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected), f"replay {turn}"
        if turn % 3 == rank % 3 and mode == "sharded_gpu":
            time.sleep(0.01)  # ranks at their own pace
        if turn % 5 == 0:
            assert torch.equal(model(ids), expected), f"eager after replay {turn}"
    store = handle._session._store
    assert isinstance(store, ShardedStore)
    part = handle.plan.prefetched_bytes / dist.get_world_size()
    assert part <= store.host_bytes + store.device_bytes <= 1.01 * part + 4096 * len(handle.plan.units)
    assert store.host_bytes == 0 or store.local.is_pinned()
    assert handle.plan.device_bytes >= handle.plan.resident_bytes + store.device_bytes
    dist.barrier()
    del graph
    handle.remove(graphs_released=True)
    assert torch.equal(model.to("cuda")(ids), expected)
    return store.host_bytes


@needs_peers
@pytest.mark.parametrize("rest", ["cuda", "cpu"])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_bits(mode: str, slots: int, rest: str) -> None:
    outcomes(NUM_RANKS, bits, mode, slots, rest, backend="nccl", timeout_s=60)


def load_and_generate(rank: int, folder: str, mode: str) -> str:
    """What ``headrace generate`` prints, in a group without NCCL; before it, ``load`` in the same mode."""
    from headrace.adapters.transformers import load

    torchrun = {"TORCHELASTIC_RUN_ID": "none", "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in torchrun.items()})
    torch.cuda.set_device(rank)
    ids = torch.arange(9, device="cuda")[None]
    with torch.no_grad():
        policy = Prefetch(params=["layers"], mode=mode)  # type: ignore[arg-type]
        model, handle = load(folder, policy, group=dist.group.WORLD)
        found = model(ids).logits
        assert_moved(handle, 1)
        handle.remove()
        assert torch.equal(found, model.cuda()(ids).logits)
    flags = ("--device-memory", "3MiB", "--offload-mode", mode)
    result = succeed("generate", folder, "--prompt", "Water", "--max-new-tokens", 8, *flags)
    return str(result.stdout)


@needs_peers
@pytest.mark.parametrize("mode", MODES)
def test_a_folder_is_loaded_and_generated_from_in_parts(mode: str, tmp_path: Path) -> None:
    ensure_model(tmp_path / "model", TINY)
    alone = run("generate", tmp_path / "model", "--prompt", "Water", "--max-new-tokens", 8).stdout
    assert alone
    assert outcomes(2, load_and_generate, str(tmp_path / "model"), mode, timeout_s=60) == [alone, ""]


@torch.no_grad()
def compiled(rank: int, mode: str) -> None:
    resident = build(5)
    model = copy.deepcopy(resident)
    ids = torch.arange(8, device="cuda")
    with headrace.testing.boundaries(resident, Prefetch(1, 1, 2, params=["layers"])):
        expected = torch.compile(resident, fullgraph=True)(ids)
    torch._dynamo.reset()
    handle = share(model, mode)
    run = torch.compile(model, fullgraph=True)
    for _ in range(3):
        assert torch.equal(run(ids), expected)
    assert_moved(handle, 3)
    handle.remove(graphs_released=True)


@needs_peers
@pytest.mark.parametrize("mode", MODES)
def test_compiled(mode: str) -> None:
    outcomes(2, compiled, mode, backend="nccl", timeout_s=120, limit_s=300)


@torch.no_grad()
def memory(rank: int) -> None:
    """Parts of units count as planned device memory; peak within 64 MiB and torch's granularity of 2 MiB."""
    small = build(2, device="cpu")  # the context, cuBLAS and its workspace, and what torch needs for symmetric memory
    handle = share(small, "sharded_gpu")
    small(torch.arange(8, device="cuda"))
    torch.cuda.synchronize()
    model = build(24, device="cpu")
    free = torch.cuda.mem_get_info()[0]
    handle = share(model, "sharded_gpu")
    model(torch.arange(8, device="cuda"))
    torch.cuda.synchronize()
    used = free - torch.cuda.mem_get_info()[0]
    assert used <= handle.plan.device_bytes + (64 << 20), (used, handle.plan.device_bytes)
    dist.barrier()
    handle.remove(graphs_released=True)


@needs_peers
@pytest.mark.alone
def test_planned_memory() -> None:
    outcomes(2, memory, backend="nccl", timeout_s=60)


@torch.no_grad()
def die(rank: int, mode: str, replayed: bool) -> str:
    """Rank 1 is killed; what happens on the others."""
    resident = build(7)
    model = copy.deepcopy(resident)
    ids = torch.arange(8, device="cuda")
    expected = resident(ids)
    KEPT.append(share(model, mode))
    assert torch.equal(model(ids), expected)
    graph, out = capture(model, ids)
    KEPT.append(graph)
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    try:
        for _ in range(20):
            if replayed:
                out.zero_()
                graph.replay()
                torch.cuda.synchronize()
            assert torch.equal(out if replayed else model(ids), expected), "wrong bits"
    except (TransferError, RuntimeError) as error:
        return type(error).__name__
    return "right"


@needs_peers
@pytest.mark.parametrize("replayed", [False, True])
def test_sharded_parts_outlive_the_rank_that_made_them(replayed: bool) -> None:
    found = run_ranks(NUM_RANKS, die, "sharded_gpu", replayed, backend="nccl", timeout_s=20, limit_s=90)
    assert found[1] is None
    assert found[0] == "right"


@needs_peers
@pytest.mark.parametrize("replayed", [False, True])
def test_a_killed_rank_of_sharded_host_memory_is_an_error_on_the_others(replayed: bool) -> None:
    begin = time.monotonic()
    found = run_ranks(NUM_RANKS, die, "sharded_cpu", replayed, backend="nccl", timeout_s=10, limit_s=90)
    assert found[1] is None
    assert found[0] in (["TransferError"] if not replayed else ["AcceleratorError", "RuntimeError"])
    assert time.monotonic() - begin < 90


@torch.no_grad()
def out_of_step(rank: int) -> str:
    model = build(6)
    ids = torch.arange(8, device="cuda")
    KEPT.append(share(model, "sharded_cpu"))
    if rank == 1:
        layers = list(model.layers)
        model.forward = lambda ids: model.head(layers[3](layers[1](layers[0](model.embed(ids)))))  # type: ignore[method-assign,assignment]
    try:
        for _ in range(3):
            model(ids)
            torch.cuda.synchronize()
    except RuntimeError as error:
        return type(error).__name__
    return "went on"


@needs_peers
def test_ranks_out_of_step_are_an_error() -> None:
    found = run_ranks(2, out_of_step, backend="nccl", timeout_s=10, limit_s=90)
    assert "went on" not in found


@needs_peers
def test_a_probe_measures_copies_among_devices() -> None:
    """Of this process alone, and so that plans can be made with them."""
    device = torch.device("cuda", 0)
    count = len(mutual_peers(device))
    found = peer_rates(device)
    if count < 2:
        assert found == {}
        return
    assert tuple(found["peer_bytes_per_s"]) == COPY_SIZES
    assert list(found["gather_bytes_per_s"]) == list(range(2, count + 1))
    assert all(1e8 < rate < 1e13 for rates in found.values() for rate in rates.values())
    # A lane of every pair at once: the sum is no less than what one pair has while the others are idle.
    assert count * found["gather_bytes_per_s"][count] > 0.9 * found["peer_bytes_per_s"][COPY_SIZES[-1]]


def same_device(rank: int, mode: str) -> str:
    """Two ranks on one GPU, which cannot be peers of itself."""
    torch.cuda.set_device(0)
    model = build(3)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with pytest.raises(OptionError) as caught:
        share(model, mode)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    return str(caught.value)


@pytest.mark.parametrize("mode", MODES)
def test_devices_that_are_no_peers_are_refused(mode: str) -> None:
    for message in outcomes(2, same_device, mode, timeout_s=30):
        assert "cannot address one another's memory" in message
