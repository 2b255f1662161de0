"""headrace's worker in engines of several ranks: stages, shards, and one copy for replicas."""

from __future__ import annotations

import json
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import vllm_stand_in as vllm
import vllm_workers
from headrace.errors import OptionError, PeerError, StateError
from headrace.transfer.machine_probe import cache_path
from ranks import outcomes, run_ranks
from vllm_workers import GROUP, SOME, another_process, loaded, make, offloaded_names, require_same_outputs, resident

stand_in = vllm_workers.stand_in  # a fixture for every test


@vllm_workers.RUNNERS
@pytest.mark.parametrize(("rank", "layers"), [(0, {1, 3}), (1, {5, 7})])
def test_a_pipeline_stage_offloads_its_own_layers(rank: int, layers: set[int], second: bool) -> None:
    vllm.state.pipeline = (rank, 2)
    worker, plain = loaded({"offload_group_size": 2}, second=second), resident()
    assert {int(name.split(".")[2]) for name in offloaded_names(worker)} == layers
    require_same_outputs(worker, plain)


def test_a_budget_is_for_the_layers_of_a_stage() -> None:
    vllm.state.pipeline = (1, 2)
    worker = loaded(own={"device_memory": "3MiB"})
    assert {int(name.split(".")[2]) for name in offloaded_names(worker) if ".layers." in name} <= {4, 5, 6, 7}
    assert worker._offloader.plan.device_bytes <= 3 * 2**20
    require_same_outputs(worker, resident())


def test_a_stage_without_layers_is_refused() -> None:
    """More stages than layers: nothing could be offloaded there, and nobody would know."""
    vllm.state.pipeline = (0, 16)
    with pytest.raises(StateError, match="no layers were wrapped"):
        loaded(GROUP)


def test_each_tensor_parallel_rank_offloads_its_shard() -> None:
    """A rank's parameters are plain tensors with shapes of their own; two ranks share nothing."""
    sizes = []
    for width in (160, 320):
        another_process()
        worker = loaded(GROUP, width=width)
        require_same_outputs(worker, resident(width=width))
        sizes.append(worker.headrace_stats()["prefetched_bytes"])
    assert sizes[1] == 4 * sizes[0]


def data_parallel_rank(rank: int, own: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        vllm.install(patch)
        vllm.state.data_parallel = SimpleNamespace(world_size=2, cpu_group=dist.group.WORLD)
        worker = loaded(flags, own, second=bool(rank))
        require_same_outputs(worker, resident())
        return dict(worker.headrace_stats())


@pytest.mark.parametrize(
    ("flags", "own"), [(GROUP, {}), ({"cpu_offload_gb": 1.0}, {}), ({}, SOME)], ids=["group", "uva", "budget"]
)
def test_data_parallel_ranks_share_one_copy(flags: dict[str, Any], own: dict[str, Any]) -> None:
    first, second = outcomes(2, data_parallel_rank, {**own, "mode": "shm_cpu"}, flags)
    offloaded = first["prefetched_bytes"] + first["uva_bytes"]
    assert first["store_bytes"]["host_shared"] >= offloaded > 500_000
    assert first["store_bytes"] == second["store_bytes"]
    assert "host" not in first["store_bytes"]


def replica(rank: int, own: dict[str, Any], flags: dict[str, Any], port: int, tensor_rank: int = 0) -> dict[str, Any]:
    """A worker of an engine of a dense model: vLLM says that it is alone, and gives every engine the same port."""
    with pytest.MonkeyPatch.context() as patch:
        vllm.install(patch)
        parallel = vllm.ParallelConfig(data_parallel_rank_local=rank, data_parallel_master_port=port)
        worker = loaded(flags, own, rank=tensor_rank, parallel_config=parallel)
        dist.barrier()  # whoever keeps the store may end when all are done
        require_same_outputs(worker, resident())
        return dict(worker.headrace_stats())


@pytest.mark.parametrize(
    ("flags", "own"), [(GROUP, {}), ({"cpu_offload_gb": 1.0}, {}), ({}, SOME)], ids=["group", "uva", "budget"]
)
def test_engines_of_a_dense_model_share_one_copy(flags: dict[str, Any], own: dict[str, Any]) -> None:
    own = {**own, "mode": "shm_cpu", "replicas": 2}
    first, second = outcomes(2, replica, own, flags, free_port())
    assert first["store_bytes"]["host_shared"] >= first["prefetched_bytes"] + first["uva_bytes"] > 500_000
    assert first["store_bytes"] == second["store_bytes"]
    assert "host" not in first["store_bytes"]


def of_two_by_two(rank: int, port: int) -> dict[str, Any]:
    """Two engines of two tensor-parallel ranks each."""
    return replica(rank // 2, {"mode": "shm_cpu", "replicas": 2}, GROUP, port, rank % 2)


def test_each_tensor_parallel_rank_shares_with_its_like() -> None:
    found = outcomes(4, of_two_by_two, free_port())
    assert all(stats["store_bytes"] == found[0]["store_bytes"] for stats in found)
    assert found[0]["store_bytes"]["host_shared"] > 500_000


def lonely(rank: int, port: int) -> None:
    os.environ["HEADRACE_PEER_TIMEOUT"] = "1"
    replica(rank + 1, {"mode": "shm_cpu", "replicas": 2}, GROUP, port)


def test_an_engine_that_nobody_joins_gives_up() -> None:
    """Bounded, both for the one that keeps the store and for the one that looks for it."""
    port = free_port()
    (seeker,) = run_ranks(1, lonely, port)
    assert isinstance(seeker, PeerError)
    assert f"did not all connect to port {port} within 1 s" in str(seeker)


def test_a_port_that_somebody_has_taken_is_said_to_be() -> None:
    """And not that others did not come, who had no chance to."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        parallel = vllm.ParallelConfig(data_parallel_rank_local=0, data_parallel_master_port=port)
        worker = make(GROUP, {"mode": "shm_cpu", "replicas": 2}, parallel_config=parallel)
        with pytest.raises(PeerError, match=rf"cannot open port {port}.*address already in use.*start vLLM again"):
            worker.load_model()


def test_a_port_where_somebody_else_listens_holds_nobody_up() -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        (seeker,) = run_ranks(1, lonely, stranger.getsockname()[1], limit_s=30)
    assert isinstance(seeker, PeerError)


@pytest.mark.parametrize(
    ("own", "index", "message"),
    [
        ({}, None, r"keeps one copy for data-parallel ranks, and this engine is the only one.*--data-parallel-size N"),
        ({}, 0, r'give their number on this host \("replicas": N\)'),
        ({"replicas": 2}, None, r"start vLLM with --data-parallel-size N"),
        ({"replicas": 2}, 2, r"headrace.replicas = 2, and this is engine 2 of this host, counted from 0"),
    ],
)
def test_one_copy_for_nobody_knows_whom_is_refused(own: dict[str, Any], index: int | None, message: str) -> None:
    parallel = vllm.ParallelConfig(data_parallel_rank_local=index)
    worker = make(GROUP, {"mode": "shm_cpu", **own}, parallel_config=parallel)
    with pytest.raises(OptionError, match=message):
        worker.load_model()


def free_port() -> int:
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        return int(finder.getsockname()[1])


STAGE = {"device_memory": "3MiB"}  # of 5 MiB


# -- ranks that copy at the same time ----------------------------------------------------------------------------------


def rank_of_two(rank: int, own: dict[str, Any], has_stages: bool, has_shards: bool) -> dict[str, Any]:
    """Of an engine with two pipeline stages, or in which the tensors of every layer are split."""
    with pytest.MonkeyPatch.context() as patch:
        vllm.install(patch)
        vllm.state.world = vllm.GroupCoordinator(dist.group.WORLD, rank, 2)
        if has_shards:
            vllm.state.tensor_parallel = vllm.state.world
        if has_stages:
            vllm.state.pipeline = (rank, 2)
        worker = loaded(own=own, rank=rank)
        require_same_outputs(worker, resident())
        rates = worker._offloader._rates
        link = {str(int(size)): rate for size, rate in rates.copy_bytes_per_s.points}
        return {**worker.headrace_stats(), "link": link, "planned_for": rates.machine}


def test_ranks_of_a_host_plan_with_their_links_measured_together() -> None:
    """Kept by their number, so that the next start has the same plan and what was compiled for it."""
    place = cache_path("links-2")
    assert place is not None
    place.unlink(missing_ok=True)
    first, second = outcomes(2, rank_of_two, SOME, False, True)
    assert first["link"] == second["link"] == json.loads(place.read_text())["h2d_bytes_per_s"]
    assert first["planned_for"].endswith("2 links at once")
    assert first["units"] == second["units"] != []
    assert min(first["bytes_moved"], second["bytes_moved"]) > 0
    again = outcomes(2, rank_of_two, SOME, False, True)
    assert again[0]["link"] == again[1]["link"] == first["link"]


def test_tensor_parallel_ranks_with_other_units_are_refused() -> None:
    """The compiler joins collectives with what follows, up to the boundary of a unit; stages have none in common."""
    first, second = outcomes(2, rank_of_two, STAGE, True, False)
    assert set(first["units"]).isdisjoint(second["units"])
    assert min(first["bytes_moved"], second["bytes_moved"]) > 0
    for failure in run_ranks(2, rank_of_two, STAGE, True, True):
        assert isinstance(failure, OptionError)
        assert "tensor-parallel ranks would offload different modules" in str(failure)


def test_an_engine_of_one_rank_measures_nothing() -> None:
    assert loaded(own=SOME)._offloader._rates is None
