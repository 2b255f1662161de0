"""The promise: the GPU links of sharded stores bring every byte of a unit to its place. Streams are simulated: they do
at once what they are given, so what is tested is which bytes go where, and not their order.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checks import entering
from headrace.errors import TransferError
from headrace.plan.kinds import Unit
from headrace.plan.slabs import SlabEntry
from headrace.stores.sharded import DeviceShardedStore, HostShardedStore, PartLayout, ShardedStore
from headrace.transfer.cuda_stream import StreamLink
from headrace.transfer.sharded_copy import DeviceShardLink, HostShardLink

UNITS = [
    Unit(0, "layers.0", 0, (SlabEntry("a", 0, 5000),), 5120, "sharded_cpu"),
    Unit(1, "layers.1", 1, (SlabEntry("b", 0, 300), SlabEntry("c", 512, 1000)), 1536, "sharded_cpu"),
]
SIZES = {"a": 5000, "b": 300, "c": 1000}


class _Event:
    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass


class _Stream:
    def __init__(self, *args: Any) -> None:
        pass

    def wait_event(self, event: object) -> None:
        assert isinstance(event, _Event)

    def record_event(self) -> _Event:
        return _Event()


class _Symmetric:
    """Memory of all ranks in one process."""

    def __init__(self, num_bytes: int, device: torch.device, ranks: Any) -> None:
        self.rank = ranks.rank
        self.views = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(ranks.size)]

    @property
    def local(self) -> torch.Tensor:
        return self.views[self.rank]

    def barrier(self) -> None:
        pass


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "Event": _Event,
        "Stream": _Stream,
        "stream": contextlib.nullcontext,
        "current_device": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("headrace.transfer.cuda_stream._create_stream", _Stream)
    monkeypatch.setattr("headrace.transfer.cuda_stream._unused", defaultdict(list))
    monkeypatch.setattr(torch, "_assert_async", lambda condition, message: None)
    monkeypatch.setattr("headrace.transfer.sharded_copy.SymmetricMemory", _Symmetric)


def ranks_of(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=rank, size=size, watch=SimpleNamespace(ended=set()))


def link_of(store: ShardedStore) -> Any:
    if isinstance(store, DeviceShardedStore):
        return DeviceShardLink(torch.device("cpu"), store)
    return HostShardLink(torch.device("cpu"), store.layout, store.ranks)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {name: torch.randint(0, 256, (size,), dtype=torch.uint8) for name, size in SIZES.items()}


def test_links_share_no_stream_until_one_is_closed() -> None:
    first, second = StreamLink(torch.device("cpu")), StreamLink(torch.device("cpu"))
    assert first._stream is not second._stream
    first.close()
    first.close()
    third, fourth = StreamLink(torch.device("cpu")), StreamLink(torch.device("cpu"))
    assert third._stream is first._stream
    assert len({id(link._stream) for link in (second, third, fourth)}) == 3


def test_a_stream_that_another_thread_takes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    class Emptied(list[Any]):
        def __len__(self) -> int:
            return 1

    monkeypatch.setattr("headrace.transfer.cuda_stream._unused", defaultdict(Emptied))
    assert isinstance(StreamLink(torch.device("cpu"))._stream, _Stream)


def test_a_capture_on_another_gpu_is_none_of_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that are taken for nodes of its graph would overwrite slots at once, and no record would say so."""
    current, captures = [torch.device("cuda", 0)], 0
    monkeypatch.setattr(torch.cuda, "device", entering(current))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1].index)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1].index == captures)
    links = [StreamLink(torch.device("cuda", index)) for index in range(2)]
    for captures in range(2):
        assert [link.capturing for link in links] == [index == captures for index in range(2)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_device_parts_are_gathered_from_all_ranks(size: int, weights: dict[str, torch.Tensor]) -> None:
    ranks, layout = ranks_of(size - 1, size), PartLayout(UNITS, size)
    memory: Any = _Symmetric(layout.num_bytes, torch.device("cpu"), ranks)
    for rank in range(size):
        filled = DeviceShardedStore(UNITS, layout, ranks_of(rank, size), SimpleNamespace(views=memory.views))  # type: ignore[arg-type]
        for name, whole in weights.items():
            for start, into in filled.own_runs(name):
                into.copy_(whole[start : start + into.numel()])
    store = DeviceShardedStore(UNITS, layout, ranks, memory)
    link = link_of(store)
    for unit in UNITS:
        slot = torch.zeros(unit.num_bytes, dtype=torch.uint8)
        link.copy(store.load(unit), slot, [_Event()])
        for entry in unit.entries:
            assert torch.equal(slot[entry.offset :][: entry.num_bytes], weights[entry.storage])
    for name, whole in weights.items():
        into = torch.zeros_like(whole)
        store.read(name, into)
        assert torch.equal(into, whole)
    link.close()
    store.close()
    assert store.device_bytes == store.host_bytes == 0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_host_parts_are_passed_on_to_all_ranks(size: int, weights: dict[str, torch.Tensor]) -> None:
    """Each rank writes its own part into the slots of all; together they write every byte."""
    layout = PartLayout(UNITS, size, 512)
    slots = {unit.index: torch.zeros(unit.num_bytes, dtype=torch.uint8) for unit in UNITS}
    for rank in range(size):
        channel: Any = SimpleNamespace(rank=rank, close=lambda: None)
        memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        store = HostShardedStore(UNITS, layout, ranks_of(rank, size), memory, channel)
        for name, whole in weights.items():
            for start, into in store.own_runs(name):
                into.copy_(whole[start : start + into.numel()])
        link = link_of(store)
        for unit in UNITS:
            slot = link.allocate(unit.num_bytes)
            link.copy(store.load(unit), slot, [_Event()])
            link.copy(store.load(unit), slot, [_Event()])
            views = link._slots[slot.data_ptr()].views
            assert all(torch.equal(view, views[0]) for view in views)
            slots[unit.index] += views[0]  # no byte is written by two ranks
        link.close()
        store.close()
    for unit in UNITS:
        for entry in unit.entries:
            assert torch.equal(slots[unit.index][entry.offset :][: entry.num_bytes], weights[entry.storage])


def test_a_rank_that_has_ended_is_an_error_with_the_next_copy() -> None:
    layout, ranks = PartLayout(UNITS, 2, 512), ranks_of(0, 2)
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    store = HostShardedStore(UNITS, layout, ranks, memory, SimpleNamespace(rank=0, close=lambda: None))  # type: ignore[arg-type]
    link = link_of(store)
    slot = link.allocate(UNITS[0].num_bytes)
    link.copy(store.load(UNITS[0]), slot, [])
    ranks.watch.ended.add(1)
    with pytest.raises(TransferError, match="rank 1 has ended, and with it the part of each unit"):
        link.copy(store.load(UNITS[0]), slot, [])
