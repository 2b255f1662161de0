"""The promise: all ranks of a host share one copy, whatever happens to any of them, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import headrace
from headrace import UVA, Prefetch
from models import Stack, all_layers, rows, save
from shm_models import SHARED, build, expected, mappings, offload, on_meta
from shm_ranks import pss_bytes, ranks

MIB = 1 << 20


# -- the same bits -----------------------------------------------------------------------------------------------------


def run_and_remove(rank: int, talk: Connection, policy: Any, folder: str | None) -> dict[str, Any]:
    x, want = rows(), expected()
    model: nn.Module = build() if folder is None else on_meta()
    handle = offload(model, policy, checkpoint=folder)
    found = [model(x) for _ in range(3)]
    stats = handle.stats()
    attached = mappings()
    handle.remove()
    return {
        "same": all(torch.equal(y, want) for y in found) and torch.equal(model(x), want),
        "moved": stats.bytes_moved,
        "stores": stats.store_bytes,
        "offloaded": handle.plan.offloaded_bytes,
        "attached": len(attached),
        "named": any("/dev/shm/" in line for line in attached),
        "left": mappings(),
    }


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("source", ["live", "checkpoint"])
@pytest.mark.parametrize("policy", [SHARED, UVA(params=["layers"], mode="shm_cpu")], ids=["prefetch", "uva"])
def test_same_bits_in_every_rank_and_nothing_left(size: int, source: str, policy: Any, tmp_path: Path) -> None:
    folder = None if source == "live" else str(save(build(), tmp_path))
    with ranks(size, tmp_path, run_and_remove, policy, folder) as group:
        for found in [rank.hear() for rank in group]:
            assert found["same"]
            assert (found["moved"] > 0) == isinstance(policy, Prefetch)
            assert found["offloaded"] <= found["stores"]["host_shared"] <= 1.5 * found["offloaded"]
            assert found["attached"] > 0
            assert not found["named"]
            assert found["left"] == []
        assert [rank.join() for rank in group] == [0] * size


def two_models(rank: int, talk: Connection) -> list[bool]:
    """The same class, names and sizes; other weights."""
    other_group = dist.new_group()
    assert other_group is not None
    first, second, third = build(1), build(2), build(3)
    one = offload(first)
    two = headrace.offload(second, SHARED, group=other_group)
    three = offload(third)
    same = [torch.equal(model(rows()), expected(seed)) for seed, model in ((1, first), (2, second), (3, third))]
    two.remove()
    same += [torch.equal(model(rows()), expected(seed)) for seed, model in ((1, first), (2, second), (3, third))]
    one.remove()
    three.remove()
    return [*same, mappings() == []]


def test_models_of_one_name_at_once(tmp_path: Path) -> None:
    with ranks(2, tmp_path, two_models) as group:
        for rank in group:
            assert rank.hear() == [True] * 7


def write_in_place(rank: int, talk: Connection) -> list[bool]:
    model = build()
    handle = offload(model, UVA(params=["layers"], mode="shm_cpu"))
    if rank == 0:
        model.layers[0].linear.weight.zero_()
        handle_state = model.state_dict()
        handle_state["layers.1.linear.weight"].zero_()
    dist.barrier()
    return [torch.equal(model(rows()), expected()), handle.stats().store_bytes["host_shared"] > 0]


def test_a_stray_write_stays_in_its_rank(tmp_path: Path) -> None:
    with ranks(2, tmp_path, write_in_place) as group:
        assert [rank.hear() for rank in group] == [[False, True], [True, True]]


# -- one copy ----------------------------------------------------------------------------------------------------------

WIDE = {"num_layers": 80, "dim": 640}


def grow(rank: int, talk: Connection, policy: Any, folder: str, live: bool = False) -> tuple[int, dict[str, int]]:
    """By how much the memory of this process grows, once every page is used by every rank; bytes."""
    shared = policy.mode == "shm_cpu"
    group = dist.group.WORLD if shared else None
    small = build() if live else on_meta()
    with headrace.offload(small, policy, checkpoint=None if live else f"{folder}/small", group=group):
        small(rows())  # what is imported and started once
    model = Stack(**WIDE).eval().requires_grad_(False) if live else on_meta(**WIDE)
    x = rows(WIDE["dim"])
    _ = model(x) if live else None
    gc.collect()
    dist.barrier()
    before = pss_bytes()
    dist.barrier()
    handle = headrace.offload(model, policy, checkpoint=None if live else folder, group=group)
    model(x)
    gc.collect()
    dist.barrier()
    growth = pss_bytes() - before
    dist.barrier()
    return growth, handle.stats().store_bytes


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("wide")
    (folder / "small").mkdir()
    save(build(), folder / "small")
    return str(save(Stack(**WIDE), folder))


def grown(size: int, folder: Path, policy: Any, *args: Any) -> list[tuple[int, dict[str, int]]]:
    folder.mkdir()
    with ranks(size, folder, grow, policy, *args) as group:
        return [rank.hear() for rank in group]


@pytest.mark.slow
def test_memory_is_measured_whatever_other_programs_end() -> None:
    code = "import torch, sys; print('mapped', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "mapped\n"
        before = pss_bytes()
        other.communicate()
    assert before > MIB
    assert abs(pss_bytes() - before) < MIB  # of torch's libraries alone, 6 MB were shared with the other one


def test_two_ranks_hold_one_copy(wide: str, tmp_path: Path) -> None:
    ((one, stores),) = grown(1, tmp_path / "one", all_layers(1, "cpu"), wide)
    both = grown(2, tmp_path / "two", all_layers(1, "shm_cpu"), wide)
    assert one >= stores["host"] > 100 * MIB
    assert sum(growth for growth, _ in both) <= 1.05 * one, (one, both)


@pytest.mark.parametrize(("mode", "live"), [("cpu", False), ("cpu", True), ("shm_cpu", False), ("disk", False)])
def test_stats_say_what_memory_is_taken(mode: str, live: bool, wide: str, tmp_path: Path) -> None:
    size = 2 if mode == "shm_cpu" else 1
    for growth, stores in grown(size, tmp_path / "ranks", all_layers(8, mode), wide, live):
        known = {"resident", "slots", "host", "host_shared", "adopted", "file"}
        assert known >= stores.keys()
        resident = 0 if live else stores["resident"]  # there before the offload began
        told = resident + stores["slots"] + stores.get("host", 0) + stores.get("host_shared", 0) // size
        assert abs(growth - told) <= 3 * MIB + told // 50, (growth, stores)
        offloaded = {"cpu": "adopted" if live else "host", "shm_cpu": "host_shared", "disk": "file"}[mode]
        assert stores[offloaded] >= 100 * MIB


# -- deaths ------------------------------------------------------------------------------------------------------------


def run_again_when_told(rank: int, talk: Connection) -> bool:
    model, x, want = build(), rows(), expected()
    handle = offload(model, all_layers(2, "shm_cpu"))
    same = torch.equal(model(x), want)
    talk.send("attached")
    talk.recv()
    for _ in range(3):
        same &= torch.equal(model(x), want)
    handle.remove()
    return same and torch.equal(model(x), want) and mappings() == []


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("victims", [[0], [2], [0, 1]])
def test_ranks_go_on_when_others_are_killed(victims: list[int], tcp: bool, tmp_path: Path) -> None:
    with ranks(3, tmp_path, run_again_when_told, tcp=tcp) as group:
        assert [rank.hear() for rank in group] == ["attached"] * 3
        for victim in victims:
            group[victim].kill()
        for rank in group:
            if rank.rank not in victims:
                rank.tell("go on")
                assert rank.hear() is True


def die_while_loading(rank: int, talk: Connection, folder: str, victim: int, signal_number: int) -> Any:
    def progress(done: int, total: int) -> None:
        if rank == victim and done:
            os.kill(os.getpid(), signal_number)

    model = on_meta()
    begin = time.monotonic()
    with pytest.raises(headrace.HeadraceError) as caught:
        offload(model, checkpoint=folder, progress=progress)
    seconds, kind, message = time.monotonic() - begin, type(caught.value).__name__, str(caught.value)
    del caught
    return seconds, kind, message, all(p.is_meta for p in model.parameters()), mappings()


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_loading_is_an_error_in_the_others(victim: int, tcp: bool, tmp_path: Path) -> None:
    folder = str(save(build(), tmp_path))
    with ranks(3, tmp_path, die_while_loading, folder, victim, signal.SIGKILL, tcp=tcp) as group:
        for rank in group:
            if rank.rank == victim:
                assert rank.join() == -signal.SIGKILL
                continue
            seconds, kind, message, untouched, left = rank.hear()
            assert seconds < 10
            assert kind == "PeerError"
            # Rank 0 holds the store of a TCP group: it may be gone before the others know its process.
            holder_gone = tcp and victim == 0 and "the process that holds it may have ended" in message
            # And it ends itself when it has seen the victim's end: then both are named.
            assert f"rank {victim}" in message or "ranks 0, 1 have ended" in message or holder_gone
            assert untouched
            assert left == []


def late_rank(rank: int, talk: Connection) -> Any:
    model = build()
    if rank == 1:
        talk.recv()
    os.environ["HEADRACE_PEER_TIMEOUT"] = "1" if rank == 0 else "20"
    begin = time.monotonic()
    with pytest.raises(headrace.HeadraceError) as caught:
        offload(model)
    talk.send((type(caught.value).__name__, str(caught.value), time.monotonic() - begin))
    os.environ["HEADRACE_PEER_TIMEOUT"] = "20"
    with headrace.offload(model, SHARED, group=dist.new_group()):
        return torch.equal(model(rows()), expected())


def test_a_rank_that_never_comes_is_not_waited_for_and_is_told_when_it_comes(tmp_path: Path) -> None:
    with ranks(2, tmp_path, late_rank) as (first, second):
        kind, message, seconds = first.hear()
        assert kind == "PeerError"
        assert "has waited 1 s for rank 1" in message
        assert "HEADRACE_PEER_TIMEOUT" in message
        assert 1 <= seconds < 5
        second.tell("come")
        kind, message, seconds = second.hear()
        assert kind == "PeerError"
        assert "rank 0 gave up" in message
        assert "has waited 1 s for rank 1" in message
        assert "make a new group on all ranks" in message
        assert seconds < 5
        assert first.hear() is True
        assert second.hear() is True


def fail_while_loading(rank: int, talk: Connection) -> Any:
    def progress(done: int, total: int) -> None:
        if rank == 1 and done:
            raise ValueError("no more coffee")

    model = build()
    pointers = [p.data_ptr() for p in model.parameters()]
    try:
        offload(model, progress=progress)
    except (ValueError, headrace.HeadraceError) as error:
        found = type(error).__name__, str(error)
    untouched = pointers == [p.data_ptr() for p in model.parameters()]
    return found, untouched and torch.equal(model(rows()), expected()), mappings()


def test_what_fails_in_one_rank_fails_in_all_and_leaves_the_models_alone(tmp_path: Path) -> None:
    with ranks(2, tmp_path, fail_while_loading) as group:
        (error, same, left), (own, own_same, own_left) = (rank.hear() for rank in group)
    assert error[0] == "PeerError"
    assert "rank 1 gave up" in error[1]
    assert "ValueError: no more coffee" in error[1]
    assert own == ("ValueError", "no more coffee")
    assert (same, own_same, left, own_left) == (True, True, [], [])


# -- ranks that do not agree -------------------------------------------------------------------------------------------


def disagree(rank: int, talk: Connection, what: str) -> Any:
    model, policy = build(), SHARED
    if rank == 1 and what == "slots":
        policy = all_layers(3, "shm_cpu")
    if rank == 1 and what == "layers":
        model = build(num_layers=6)
    if rank == 1 and what == "weights":
        model.layers[1].linear.weight[3, 3] += 1
    want = model(rows())
    try:
        offload(model, policy)
    except headrace.HeadraceError as error:
        found = type(error).__name__, str(error)
    return (*found, torch.equal(model(rows()), want), mappings())


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("slots", ["slots: 2 here, 3 there", "units"]),
        ("layers", ["units: 5 of", "here, 6 of"]),
        ("weights", ["weights of layers.1.linear.weight", "mode 'cpu'"]),
    ],
)
def test_other_plans_or_weights_are_refused(what: str, words: list[str], tmp_path: Path) -> None:
    with ranks(2, tmp_path, disagree, what) as group:
        found = [rank.hear() for rank in group]
    assert [kind for kind, _, _, _ in found] == ["OptionError"] * 2
    assert all((same, left) == (True, []) for _, _, same, left in found)
    told = " ".join(message for _, message, _, _ in found)
    assert all(word in told for word in words)


def read_own_files(rank: int, talk: Connection, folders: list[str]) -> Any:
    try:
        offload(on_meta(), checkpoint=folders[rank])
    except headrace.HeadraceError as error:
        return type(error).__name__, str(error)


def test_copies_of_a_checkpoint_are_refused(tmp_path: Path) -> None:
    """Each rank reads a part of the bytes, so all have to read the same files."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    save(build(), folders[0])
    shutil.copyfile(folders[0] / "model.safetensors", folders[1] / "model.safetensors")
    with ranks(2, tmp_path, read_own_files, [str(folder) for folder in folders]) as group:
        for kind, message in [rank.hear() for rank in group]:
            assert kind == "OptionError"
            assert "checkpoint files: 1" in message
            assert "same model, weights, policy and checkpoint folder" in message


# -- who may open it ---------------------------------------------------------------------------------------------------


def show_address(rank: int, talk: Connection) -> list[str]:
    found = []

    def progress(done: int, total: int) -> None:
        if done == total and not found:
            for entry in os.scandir("/proc/self/fd"):
                link = os.readlink(entry.path) if os.path.islink(entry.path) else ""
                if "memfd:headrace" in link:
                    found.append(f"/proc/{os.getpid()}/fd/{entry.name}")
            talk.send(found)
            talk.recv()

    offload(build(), progress=progress)
    return found


def test_no_other_user_can_open_it(tmp_path: Path) -> None:
    with ranks(2, tmp_path, show_address) as group:
        for rank in group:
            paths = rank.hear()
            assert paths
            for path in paths:
                assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
                if os.geteuid() == 0:
                    asked = subprocess.run(["head", "-c1", path], user=65534, group=65534, capture_output=True)
                    assert asked.returncode != 0
                    assert b"ermission denied" in asked.stderr
        for rank in group:
            rank.tell("go on")
        for rank in group:
            rank.hear()


def test_without_a_group_it_is_refused() -> None:
    with pytest.raises(headrace.HeadraceError, match="no process group was given: pass group="):
        headrace.offload(build(), SHARED)
