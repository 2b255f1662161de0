"""The promise: ranks that share the bytes of a model compute what one alone does, or say soon what is wrong."""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import os
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import headrace
from checks import raising, require_forwards
from commands import TINY, run, succeed
from headrace import Prefetch
from headrace.cli.demo_run import ensure_model
from headrace.errors import HeadraceWarning, OptionError, PeerError, TransferError
from headrace.memory.shared import SymmetricMemory
from headrace.plan.slabs import equal_chunk_bytes
from headrace.ranks.group import RankGroup
from headrace.stores import rank_stores
from headrace.stores.rank_stores import checksum
from headrace.stores.sharded import ShardedStore, Striping
from headrace.testing import assert_moved, assert_same_bits, boundaries
from models import MoE, OddStack, ScaledStack, Stack, aligned, all_layers, on_meta, rows, save
from plans import part_bytes
from ranks import outcomes, run_ranks

MODES = ["sharded_gpu", "sharded_cpu"]


def share(model: nn.Module, mode: str, slots: int = 2, **options: Any) -> headrace.Handle:
    """Offload every layer over all ranks."""
    return headrace.offload(model, all_layers(slots, mode), group=dist.group.WORLD, **options)


def store_of(handle: headrace.Handle) -> ShardedStore:
    store = handle._session._store
    assert isinstance(store, ShardedStore)
    return store


class TestStriping:
    @settings(max_examples=200, deadline=None)
    @given(st.integers(1, 300), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 20)))
    def test_every_byte_belongs_to_one_rank(self, blocks: int, ranks: int, max_chunk: int | None) -> None:
        limit = None if max_chunk is None else 256 * max_chunk
        striping = Striping.of(256 * blocks, ranks, limit)
        covered = [(s.start, s.end) for _, s in striping.in_order()]
        assert covered[0][0] == 0
        assert covered[-1][1] == 256 * blocks
        assert all(one[1] == other[0] for one, other in itertools.pairwise(covered))
        for rank in range(ranks):
            mine = list(striping.stretches(rank))
            assert [s.offset for s in mine] == [sum(t.num_bytes for t in mine[:i]) for i in range(len(mine))]
            assert striping.part_bytes(rank) == sum(s.num_bytes for s in mine) <= striping.part_bytes(0)
            assert all(limit is None or s.num_bytes <= limit for s in mine)
            assert limit is not None or len(mine) <= 1
        assert limit is not None or striping.part_bytes(0) == min(equal_chunk_bytes(256 * blocks, ranks), 256 * blocks)
        assert striping.part_bytes(0) <= 256 * blocks / ranks + 256 * max(1, len(list(striping.stretches(0))))


class TestChecksum:
    @settings(max_examples=60, deadline=None)
    @given(st.binary(min_size=1, max_size=60), st.integers(0, 9), st.integers(0, 59), st.integers(1, 255))
    def test_sees_every_byte_and_no_address(self, data: bytes, offset: int, place: int, change: int) -> None:
        buffer = torch.tensor(list(data), dtype=torch.uint8)
        moved = torch.cat([torch.zeros(offset, dtype=torch.uint8), buffer])[offset:]
        assert checksum(moved) == checksum(buffer)
        moved[place % len(data)] ^= change
        assert checksum(moved) != checksum(buffer)

    def test_order_and_length_count(self) -> None:
        buffer = torch.arange(3 << 20, dtype=torch.int64).view(torch.uint8)
        other = buffer.clone()
        other[:8], other[8:16] = buffer[8:16], buffer[:8]
        blocks = torch.cat([buffer[8 << 20 :], buffer[: 8 << 20]])
        assert len({checksum(buffer), checksum(other), checksum(buffer[:-1]), checksum(blocks)}) == 4


def forwards(rank: int, mode: str, folder: str | None) -> dict[str, Any]:
    """Two eager forwards of several models, with small chunks; what is left afterwards."""
    rank_stores.CHUNK_BYTES = 1024
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    facts: dict[str, Any] = {}
    with torch.no_grad():
        for cls in (Stack, OddStack, ScaledStack, MoE):
            torch.manual_seed(1)
            model = cls().eval()
            x = torch.arange(9) if cls is MoE else rows()
            expected = model(x)
            before = dict(model.named_parameters())
            state = {name: t.clone() for name, t in model.state_dict().items() if cls is not ScaledStack}
            handle = share(model, mode, 2)
            require_forwards(handle, x, expected, 2)
            store = store_of(handle)
            assert store.host_bytes <= handle.plan.prefetched_bytes / dist.get_world_size() + 4096
            if cls is not ScaledStack:
                assert_same_bits(dict(model.state_dict()), state)
            handle.remove()
            assert_same_bits(model(x), expected)
            assert all(p is before[name] for name, p in model.named_parameters())
            del handle, store
        if folder is not None:
            facts["from files"] = from_files(mode, Path(folder))
    gc.collect()
    facts["threads"] = threading.active_count() - threads
    facts["fds"] = len(os.listdir("/proc/self/fd")) - fds
    return facts


def from_files(mode: str, folder: Path) -> bool:
    """A model on meta, every rank reading its own part of the files only."""
    torch.manual_seed(1)
    source = Stack().eval()
    model = on_meta(Stack)
    handle = share(model, mode, 2, checkpoint=folder)
    assert_same_bits(model(rows()), source(rows()))
    handle.remove()
    assert_same_bits(dict(model.named_parameters()), dict(source.named_parameters()))
    return True


def load_and_generate(rank: int, folder: str) -> list[str]:
    """What ``headrace generate`` prints in each mode; before it, ``load`` in the same mode has the resident's bits."""
    from headrace.adapters.transformers import load

    torchrun = {"TORCHELASTIC_RUN_ID": "none", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in torchrun.items()})
    printed, ids = [], torch.arange(9)[None]
    for mode in MODES:
        with torch.no_grad():
            policy = Prefetch(params=["layers"], mode=mode)  # type: ignore[arg-type]
            model, handle = load(folder, policy, device="cpu", group=dist.group.WORLD)
            found = model(ids).logits
            assert store_of(handle).host_bytes <= handle.plan.prefetched_bytes / 2 + 4096
            assert_moved(handle, 1)
            handle.remove()
            assert_same_bits(found, model(ids).logits)
            assert_same_bits(found, aligned(type(model).from_pretrained(folder))(ids).logits)
        flags = ("--device-memory", "3MiB", "--offload-mode", mode, "--device", "cpu")
        result = succeed("generate", folder, "--prompt", "Water", "--max-new-tokens", 8, *flags)
        assert rank > 0 or re.search(r"(?m)^[1-9][\d.]* M?i?B moved \(", result.stderr), result.stderr
        printed.append(result.stdout)
    return printed


def test_a_folder_is_loaded_and_generated_from_in_parts(tmp_path: Path) -> None:
    """Under torchrun, too, where the first rank prints."""
    ensure_model(tmp_path / "model", TINY)
    alone = run("generate", tmp_path / "model", "--prompt", "Water", "--max-new-tokens", 8, "--device", "cpu").stdout
    assert alone
    assert outcomes(2, load_and_generate, str(tmp_path / "model")) == [[alone] * 2, [""] * 2]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_bits_bytes_and_what_is_left(num_ranks: int, mode: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    save(Stack(), tmp_path)
    for facts in outcomes(num_ranks, forwards, mode, str(tmp_path)):
        assert facts["from files"]
        assert facts["threads"] <= 0 + 2  # gloo's own device thread and torch's heartbeat stay with the process
        assert facts["fds"] <= 4


def compiled(rank: int) -> bool:
    model = Stack(3).eval()
    with torch.no_grad():
        with boundaries(model, all_layers(2)):
            expected = torch.compile(model, fullgraph=True)(rows())
        for mode in MODES:
            torch._dynamo.reset()
            handle = share(model, mode)
            run = torch.compile(model, fullgraph=True)
            for _ in range(3):
                assert_same_bits(run(rows()), expected)
            assert_moved(handle, 3)
            handle.remove()
    return True


def test_compiled() -> None:
    assert outcomes(2, compiled, timeout_s=60) == [True, True]


def disagree(rank: int, mode: str, what: str) -> str:
    torch.manual_seed(rank if what == "weights" else 0)
    model = Stack().eval()
    tensors = {name: p.data_ptr() for name, p in model.named_parameters()}
    slots = 1 + rank if what == "plan" else 2
    with pytest.raises(OptionError) as caught:
        share(model, mode, slots)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == tensors
    return str(caught.value)


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_differ_are_refused(mode: str) -> None:
    first, second = outcomes(2, disagree, mode, "plan")
    assert first.startswith("rank 0 and rank 1 differ and cannot share a store: slots: 1 here, 2 there;")
    assert second.startswith("rank 1 and rank 0 differ and cannot share a store: slots: 2 here, 1 there;")
    for message in outcomes(2, disagree, mode, "weights"):
        assert "weights of layers.0.linear.weight: " in message


def die(rank: int, mode: str, moment: str) -> Any:
    model = Stack(6).eval()
    expected = model(rows())
    if rank == 1 and moment == "opening":
        os.kill(os.getpid(), signal.SIGKILL)
    handle = share(model, mode)
    with torch.no_grad():
        assert_same_bits(model(rows()), expected)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        if moment == "forward":
            for _ in range(100):
                assert_same_bits(model(rows()), expected)
        handle.remove()
    return time.monotonic() - begin


@pytest.mark.parametrize("moment", ["opening", "forward", "remove"])
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_rank_is_an_error_on_the_others(mode: str, moment: str) -> None:
    begin = time.monotonic()
    found = run_ranks(2, die, mode, moment, timeout_s=8)
    assert found[1] is None
    if moment == "opening":  # nobody has heard of it, so only the timeout of the group tells
        assert isinstance(found[0], PeerError), found[0]
        assert "rank 0 has waited 8 s for rank 1" in str(found[0])
        assert "raise the timeout of the process group" in str(found[0])
    else:
        assert isinstance(found[0], TransferError), found[0]
        message = str(found[0])
        assert "rank 0 of 2: the connection to rank 1 was closed: it has ended" in message
        assert "restart all ranks together" in message
        assert not any(word in message for word in ("within", "gloo", "pair.cc"))
    assert time.monotonic() - begin < 45


def late(rank: int) -> Any:
    model = Stack(6).eval()
    handle = share(model, "sharded_cpu")
    if rank == 1:
        time.sleep(9)
        return "late"
    with torch.no_grad():
        for _ in range(3):
            model(rows())
    return handle


def test_a_rank_that_does_not_come_is_an_error_within_the_timeout() -> None:
    found = run_ranks(2, late, timeout_s=3)
    assert isinstance(found[0], TransferError)
    assert "within 3 s" in str(found[0])


def out_of_order(rank: int) -> Any:
    model = Stack(6).eval()
    if rank == 1:
        model.order = [0, 2, 1, 3, 4, 5]
    share(model, "sharded_cpu")
    with torch.no_grad():
        for _ in range(2):
            model(rows())


def test_ranks_out_of_step_are_an_error() -> None:
    found = run_ranks(2, out_of_order, timeout_s=8)
    assert all(isinstance(error, TransferError) for error in found)
    assert any("in the same order" in str(error) for error in found)


def other_state_dicts(rank: int, mode: str) -> Any:
    model = Stack().eval()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    handle = share(model, mode)
    with pytest.raises(TransferError, match=r"rank 0 layers\.0\.\S+, rank 1 layers\.1\.\S+; call state_dict"):
        model.layers[rank].state_dict()
    whole = model.state_dict()
    handle.remove()
    for state in (whole, model.state_dict()):
        assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_read_other_weights_are_told(mode: str) -> None:
    outcomes(2, other_state_dicts, mode)


def end_a_fork(rank: int) -> bool:
    model = Stack().eval()
    expected = model(rows())
    with share(model, "sharded_cpu"):
        for _ in range(5):
            assert_same_bits(model(rows()), expected)
            if (child := os.fork()) == 0:
                signal.alarm(10)
                atexit._run_exitfuncs()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        assert_same_bits(model(rows()), expected)
    return True


def test_the_end_of_a_fork_closes_no_connection() -> None:
    assert outcomes(2, end_a_fork, timeout_s=8) == [True] * 2


def broken_source(rank: int, folder: str) -> Any:
    """One rank cannot read its part of the files."""
    model = on_meta(Stack)
    if rank == 1:
        rank_stores._clipped = raising(TransferError("planted"))  # type: ignore[assignment]
    share(model, "sharded_gpu", checkpoint=folder)


def test_a_rank_that_cannot_load_fails_all(tmp_path: Path) -> None:
    save(Stack(), tmp_path)
    found = run_ranks(2, broken_source, str(tmp_path))
    assert "planted" in str(found[1])
    assert "rank 1 gave up a shared offload" in str(found[0])
    assert "TransferError: planted" in str(found[0])


def other_files(rank: int, folders: list[str]) -> str:
    model = on_meta(Stack)
    with pytest.raises(OptionError) as caught:
        share(model, "sharded_cpu", checkpoint=folders[rank])
    return str(caught.value)


def test_ranks_with_other_files_are_refused(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        save(Stack(), folder)
    assert all("checkpoint files: 1" in text for text in outcomes(2, other_files, list(map(str, folders))))


def refusals(rank: int) -> list[str]:
    found = []
    model = Stack().eval()
    with pytest.raises(OptionError) as caught:
        headrace.offload(model, all_layers(2, "sharded_gpu"))
    found.append(str(caught.value))
    with headrace.offload(model, headrace.UVA(params=["layers"], mode="sharded_cpu"), group=dist.group.WORLD) as handle:
        found.append(",".join({handle.plan.mechanism_of("layers.0.linear.weight")}))
    os.environ["HEADRACE_DEBUG"] = "1"
    with pytest.warns(HeadraceWarning, match="checks no units that are split"):
        share(model, "sharded_cpu").remove()
    return found


class TestDevicesWithoutPeerAccess:
    """Said with the mend. torch is asked as on GPUs, and answers as it does where they cannot address one another."""

    def ask(self, monkeypatch: pytest.MonkeyPatch, *, room: bool = True) -> None:
        def empty(shape: tuple[int, ...], *rest: Any) -> torch.Tensor:
            if not room:
                raise RuntimeError("CUDA driver error: out of memory")
            return torch.empty(shape, dtype=torch.uint8)

        refused = RuntimeError("CUDASymmetricMemory: peer access from device 0 to device 1 is not supported\n  at ...")
        memory: Any = type("Fake", (), {"empty_strided_p2p": staticmethod(empty)})
        monkeypatch.setattr("headrace.memory.shared._SymmetricMemory", memory)
        monkeypatch.setattr("headrace.memory.shared.symm.rendezvous", raising(refused))
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        group: Any = type("Group", (), {"group_name": "0"})
        ranks: Any = SimpleNamespace(
            rank=0, size=2, timeout_s=10.0, process_group=group, exchange=lambda step: [None, None]
        )
        SymmetricMemory(1 << 20, torch.device("cuda", 0), ranks)

    def test_names_the_device_the_reason_and_the_mend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(OptionError) as caught:
            self.ask(monkeypatch)
        message = str(caught.value)
        assert message.startswith("cuda:0 and the devices of the other ranks cannot address one another's memory")
        assert "(CUDASymmetricMemory: peer access from device 0 to device 1 is not supported)" in message
        assert "with peer access (nvidia-smi topo -p2p r), or offload without group=" in message

    def test_no_room_is_another_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(torch.OutOfMemoryError, match="cuda:0: no room for 1048576 bytes: CUDA driver error"):
            self.ask(monkeypatch, room=False)


def watched(rank: int) -> Any:
    with RankGroup.open(dist.group.WORLD) as ranks:
        assert ranks is not None
        ranks.exchange("begin")
    assert ranks.watch.ended == set(), "before one was killed"
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # The other rank ends, too, once it has seen this.
    deadline = time.monotonic() + 20
    while 1 not in (found := ranks.watch.wait_for_end(1.0)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 1 in found, f"the watch of rank {rank} has found {found}"


def test_a_killed_process_is_noticed_without_asking_it() -> None:
    assert run_ranks(3, watched) == [None, None, None]


def budgets(rank: int) -> None:
    x = rows(128)
    for mode in MODES:
        model = Stack(8, 128).eval()
        expected = model(x).detach()  # its graph would view weights, whose slots are then filled again
        total = sum(p.nbytes for p in model.parameters())
        budget = total * 5 // 6
        handle = headrace.offload(
            model,
            headrace.Budget(budget, mode=mode),  # type: ignore[arg-type]
            group=dist.group.WORLD,
        )
        plan, store = handle.plan, store_of(handle)
        assert plan.num_ranks == 2
        assert plan.uva == {}
        assert part_bytes(plan) <= store.host_bytes <= part_bytes(plan) + 256 * len(plan.units)
        own = plan.resident_bytes + sum(plan.slot_bytes)
        assert plan.device_bytes == own + (part_bytes(plan) if mode == "sharded_gpu" else 0) <= budget
        assert mode == "sharded_cpu" or own + part_bytes(plan) > budget - 128 * 128 * 4, (
            "memory is left that could hold residents"
        )
        with torch.no_grad():
            assert_same_bits(model(x), expected)
        assert_moved(handle, 1)
        handle.remove()


def test_a_budget_counts_what_the_parts_take() -> None:
    outcomes(2, budgets)


def idle(rank: int) -> None:
    with pytest.warns(HeadraceWarning, match="group=... has no effect: mode 'cpu'"):
        headrace.offload(Stack().eval(), all_layers(2), group=dist.group.WORLD)


def test_a_group_without_effect_is_said() -> None:
    outcomes(1, idle)


def test_options() -> None:
    no_group, moved = outcomes(1, refusals)[0]
    assert "no process group was given" in no_group
    assert moved == "prefetch"
