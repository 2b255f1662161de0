"""A device of two streams that does what it was given in any order that events allow, and a link to it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from headrace.codec.exponents import Piece
from headrace.model.inventory import Inventory, Location, StorageInfo, TensorInfo
from headrace.plan.kinds import Unit
from headrace.plan.plan import Plan, UnitSpec, assemble
from headrace.stores.plain_host import CpuStore
from headrace.stores.sources import ByteRange, MemorySource, fill
from headrace.stores.sources import Copy as Copied
from headrace.stores.store import Load, Store
from headrace.transfer.link import ComputeEvent, Link, Transfer

BYTES = 256


@dataclass(eq=False)
class Op:
    """Something a stream does; ``after``: what has to be done before, besides what stands before it in its stream."""

    run: Callable[[], None]
    after: list[Op] = field(default_factory=list)
    done: bool = False
    external: Event | None = None  # in a graph: wait for where it was recorded last when the graph is launched


class Device:
    """Streams, ``compute``, ``copy`` and those of replays, whose heads run in any order that events allow."""

    def __init__(self, seed: int) -> None:
        self.streams: dict[str, list[Op]] = {"compute": [], "copy": []}
        self._random = random.Random(seed)

    def give(self, stream: str, op: Op) -> Op:
        self.streams.setdefault(stream, []).append(op)
        if self._random.random() < 0.5:
            self.advance()
        return op

    def advance(self) -> bool:
        ready = [ops for ops in self.streams.values() if ops and all(before.done for before in ops[0].after)]
        if not ready:
            return False
        op = self._random.choice(ready).pop(0)
        op.run()
        op.done = True
        return True

    def run_ready(self) -> None:
        while self.advance():
            pass

    def finish(self) -> None:
        self.run_ready()
        assert not any(self.streams.values()), "deadlock"


@dataclass
class Event:
    """Stands behind the op that was last when it was recorded."""

    op: Op | None = None
    capture: int | None = None


@dataclass
class Copy:
    unit: int
    event: Event
    done: bool = False
    external: bool = False


class Graph:
    """Ops by stream with dependencies among them; given to the device as a whole at each replay."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.ops: list[tuple[str, Op, Event | None]] = []
        self.number = next(self.numbers)

    def launch(self, device: Device) -> None:
        # Both ends of a graph are ordered with the stream it is launched into.
        begin = device.give("compute", Op(lambda: None))
        twins: dict[int, Op] = {}
        for stream, op, external in self.ops:
            after = [begin, *(twins[id(before)] for before in op.after)]
            after += [op.external.op] if op.external is not None and op.external.op is not None else []
            # A graph keeps its own order: what streams outside of it are given is ordered with its two ends alone.
            twins[id(op)] = device.give(f"graph {id(twins)} {stream}", Op(op.run, after))
            if external is not None:
                external.op = twins[id(op)]
        device.give("compute", Op(lambda: None, list(twins.values())))


class DeviceLink(Link):
    """Copies of the CPU store's slabs, by a :class:`Device`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.graph: Graph | None = None
        self.current = "compute"  # the stream that the caller has made current
        self.replay_events: dict[int, Event] = {}
        self.copy_events: dict[int, Event] = {}
        self._last: dict[str, Op | None] = {"compute": None, "copy": None}

    def give(self, stream: str, run: Callable[[], None], after: Sequence[Op] = (), external: Event | None = None) -> Op:
        op = Op(run, list(after))
        if self.graph is None:
            return self.device.give(stream, op)
        previous = [o for s, o, _ in self.graph.ops if s == stream]
        op.after += previous[-1:]
        self.graph.ops.append((stream, op, external))
        return op

    def allocate(self, num_bytes: int) -> torch.Tensor:
        assert num_bytes, "memory that ranks share cannot be empty"
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    @property
    def capturing(self) -> bool:
        return self.graph is not None

    @property
    def capture_id(self) -> int | None:
        return None if self.graph is None else self.graph.number

    def record_compute(self) -> ComputeEvent:
        return Event(self.give(self.current, lambda: None), self.capture_id)

    def leave_replay_event(self, slot: int) -> None:
        event = self.replay_events.setdefault(slot, Event())
        self.give(self.current, lambda: None, external=event)

    def replay_event(self, slot: int) -> ComputeEvent | None:
        return self.replay_events.get(slot)

    def leave_copy_event(self, slot: int) -> None:
        self.copy_events.setdefault(slot, Event()).op = self.give("copy", lambda: None)

    def copy_event(self, slot: int, unit: int) -> Transfer | None:
        return Copy(unit, self.copy_events[slot], external=True) if slot in self.copy_events else None

    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> Transfer:
        marks = [mark for mark in after if isinstance(mark, Event)]
        assert all(mark.capture in (self.capture_id, None) for mark in marks), "an event of another capture"
        assert not self.capturing or all(mark.capture is not None for mark in marks), "an event from outside"
        before = [mark.op for mark in marks if mark.op is not None]

        def move() -> None:
            fill(slot, load.copies)

        # In two halves: half of another unit must never be seen.
        self.give("copy", lambda: slot.fill_(254), before)
        return Copy(load.unit, Event(self.give("copy", move), self.capture_id))

    def decode(self, load: Load, slot: torch.Tensor, into: torch.Tensor, after: Sequence[ComputeEvent]) -> None:
        """The code of a unit is half as long, and each byte of it stands for two."""
        marks = [mark for mark in after if isinstance(mark, Event)]
        assert all(mark.capture == self.capture_id for mark in marks), "an event of another timeline"
        (piece,) = load.coded
        before = [mark.op for mark in marks if mark.op is not None]
        self.give(self.current, lambda: into.fill_(254), before)
        self.give(self.current, lambda: into.copy_(slot[: piece.code_bytes].repeat_interleave(2)))

    def wait(self, transfer: Transfer, measure: bool = False) -> float:
        assert isinstance(transfer, Copy)
        if transfer.external:
            assert self.capturing
            self.give(self.current, lambda: None).external = transfer.event
            return 0.0
        if transfer.event.capture == self.capture_id:
            assert transfer.event.op is not None
            self.give(self.current, lambda: None, [transfer.event.op])
        return 0.0

    def close(self) -> None:
        self.device.finish()


class HalfStore(CpuStore):
    """Its units that a plan says are coded are stored in half of their bytes."""

    def load(self, unit: Unit) -> Load:
        load = super().load(unit)
        if unit.store == "cpu":
            return load
        code = torch.full((BYTES // 2,), unit.index, dtype=torch.uint8)
        copy = Copied(ByteRange(MemorySource(code), 0, len(code)), 0)
        return Load(unit.index, (copy,), code, coded=(Piece(0, BYTES, True, 0, len(code)),))


def plan_and_store(
    num_units: int, num_slots: int, coded: Callable[[int], bool] = lambda unit: False
) -> tuple[Plan, Store]:
    """``coded``: of which units."""

    def storage(unit: int) -> StorageInfo:
        tensor = TensorInfo((Location(f"l{unit}", "w", "parameter"),), 0, (BYTES,), (1,), torch.uint8)
        return StorageInfo((tensor,), BYTES)

    storages = [storage(unit) for unit in range(num_units)]
    inventory = Inventory(tuple(storages), (), {f"l{unit}": "Module" for unit in range(num_units)})
    plan = assemble(inventory, [UnitSpec(f"l{u}", (s,)) for u, s in enumerate(storages)], num_slots, "cpu")
    plan = replace(plan, units=tuple(replace(u, store="exp3") if coded(u.index) else u for u in plan.units))
    return plan, HalfStore({s.name: torch.full((BYTES,), u, dtype=torch.uint8) for u, s in enumerate(storages)})
