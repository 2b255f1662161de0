"""Models on meta for the planner, their plans, and what is true of every plan."""

from __future__ import annotations

import io
import itertools
import json
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from headrace.config import Budget, Mode, Policy
from headrace.errors import HeadraceWarning
from headrace.model.inventory import take_inventory
from headrace.model.records import Inventory, StorageInfo, is_within
from headrace.plan.alternatives import Point, curve
from headrace.plan.build import Planner, build_plan
from headrace.plan.kinds import Unit
from headrace.plan.plan import Plan
from headrace.plan.rates import Curve, Rates
from headrace.plan.slabs import SLAB_ALIGNMENT_BYTES, SlabEntry, slab_bytes
from headrace.plan.tables import render
from headrace.plan.units import worth_moving
from models import Reader

KIB = 2**10


DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.complex64]


def plan_text(plan: Plan, width: int = 160, name: str = "m") -> str:
    """What a report of ``plan`` says, on so wide a page."""
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render(plan, name))
    return console.export_text()


def holder(**tensors: torch.Tensor) -> nn.Module:
    """A module with these parameters."""
    module = Reader()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Layers alike or not, ties within and across them, things before, after and around them, all on ``meta``.

    Some modules have no forward, some hang in two places.
    """
    kinds = st.sampled_from([Reader, Reader, nn.Module])
    sizes = st.integers(1, 300 * KIB)
    tensors = st.builds(lambda n, d: torch.empty(n, dtype=d, device="meta"), sizes, st.sampled_from(DTYPES))
    model = nn.Module()
    if draw(st.booleans()):
        model.embed = nn.Embedding(draw(st.integers(1, 900)), 64, device="meta")
    if draw(st.booleans()):
        model.register_parameter("around", nn.Parameter(draw(tensors), requires_grad=False))
    roles = draw(st.lists(tensors, min_size=1, max_size=4))
    alike = draw(st.booleans())
    layers = []
    for _ in range(draw(st.integers(0, 7))):
        layer = draw(kinds)()
        mine = [t.clone() for t in roles] if alike else draw(st.lists(tensors, max_size=3))
        for index, tensor in enumerate(mine):
            layer.add_module(f"part{chr(97 + index)}", holder(weight=tensor))
        layers.append(layer)
    if layers:
        model.layers = nn.ModuleList([*layers, layers[0]] if draw(st.booleans()) else layers)
        if len(layers) > 1 and draw(st.booleans()):
            layers[1].add_module("shared", layers[-1]._modules.get("partb", holder(weight=draw(tensors))))
        if len(layers) > 2 and layers[0]._modules and layers[2]._modules and draw(st.booleans()):
            layers[2].parta.weight = layers[0].parta.weight
    if draw(st.booleans()):
        model.head = holder(weight=draw(tensors)) if draw(st.booleans()) else Reader()
        model.head.inner = draw(kinds)()
        model.head.inner.weight = nn.Parameter(draw(tensors), requires_grad=False)
    if hasattr(model, "embed") and draw(st.booleans()):
        model.out = nn.Linear(64, model.embed.num_embeddings, bias=False, device="meta")
        model.out.weight = model.embed.weight
    return model


def plan_for(inventory: Inventory, policy: Policy, mode: Mode = "cpu", **options: Any) -> Plan:
    """:func:`build_plan`, whatever it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadraceWarning)
        return build_plan(inventory, policy, mode, **options)


def check_plan(plan: Plan, inventory: Inventory) -> None:
    """What is true of every plan."""
    placed = Counter(entry.storage for unit in plan.units for entry in unit.entries)
    placed.update([*plan.resident, *plan.uva])
    assert placed == Counter(storage.name for storage in inventory.storages), "every storage exactly once"
    assert plan.weight_bytes == inventory.num_bytes
    plan.check(inventory)
    by_name = {storage.name: storage for storage in inventory.storages}
    order = {name: index for index, name in enumerate(inventory.modules)}
    for index, unit in enumerate(plan.units):
        assert (unit.index, unit.slot) == (index, index % plan.num_slots)
        assert unit.entries
        end = 0
        for entry in unit.entries:
            assert entry.offset % SLAB_ALIGNMENT_BYTES == 0
            assert entry.offset >= end, "entries overlap"
            assert entry.num_bytes == by_name[entry.storage].num_bytes
            end = entry.offset + entry.num_bytes
            for owner in by_name[entry.storage].modules:  # so ties travel together, or not at all
                assert is_within(owner, unit.module_fqn), "read outside its module"
                assert unit.module_fqn in inventory.dominators(owner), "read on another path"
        assert 0 <= unit.num_bytes - end < SLAB_ALIGNMENT_BYTES
        assert unit.num_bytes == slab_bytes(entry.num_bytes for entry in unit.entries)
        assert unit.bytes_in_slot <= plan.slot_bytes[unit.slot]
    fqns = [unit.module_fqn for unit in plan.units]
    assert fqns == sorted(fqns, key=order.__getitem__), "in the order of the model"
    assert inventory.containers.isdisjoint(fqns), "never waited for"
    for one in fqns:
        assert inventory.ancestors(one).isdisjoint(fqns), "nested on some path"
        assert not any(one != other and is_within(one, other) for other in fqns), "nested fqns"
    assert plan.num_slots <= max(len(plan.units), 0)
    decoded = max((unit.num_bytes for unit in plan.units if unit.kind.is_coded), default=0)
    assert plan.device_bytes == plan.resident_bytes + sum(plan.slot_bytes) + decoded
    back = json.loads(json.dumps(plan.to_json()))
    assert back == plan.to_json()
    assert back["device_bytes"] == plan.device_bytes
    assert [unit["num_bytes"] for unit in back["units"]] == [unit.num_bytes for unit in plan.units]


KIB = 2**10


# Rates at which a copy of 100 KiB takes about as long as a few kernels, so that neither side is lost in the other.
SMALL = Rates(
    machine="a test", copy_bytes_per_s=Curve.of({KIB: 1e9, 2**20: 4e9}),
    product_s_per_byte=Curve.of({1: 1e-11, 64: 1e-11, 1024: 4e-10}), grouped_s_per_byte=Curve.of({1: 1e-11}),
    in_place_s_per_byte=Curve.of({1: 3e-10, 128: 3e-10, 1024: 3e-9}), in_place_grouped_s_per_byte=Curve.of({1: 3e-10}),
    kernel_s=2e-6, device_bytes_per_s=1e12,
)  # fmt: skip


def memory_curve(planner: Planner, budget: Budget) -> list[Point]:
    """Step times against device memory, from which the alternatives to the plan for ``budget`` are chosen."""
    table = planner.candidates(budget)
    return curve(table, table.host_limit(budget))


def layered(num_layers: int, *sizes: int, head: int = 0) -> Inventory:
    model = nn.Module()
    layers = []
    for _ in range(num_layers):
        layer = Reader()
        for index, size in enumerate(sizes):
            layer.add_module(f"part{chr(97 + index)}", holder(weight=torch.empty(size // 256, 64, device="meta")))
        layers.append(layer)
    model.layers = nn.ModuleList(layers)
    if head:
        model.head = holder(weight=torch.empty(head // 256, 64, device="meta"))
    return take_inventory(model)


def unit(index: int, *sizes: int) -> Unit:
    """A unit of storages ``u<index>.<i>`` of these sizes, laid out as the planner does."""
    entries, offset = [], 0
    for i, size in enumerate(sizes):
        entries.append(SlabEntry(f"u{index}.{i}", offset, size))
        offset += -(-size // 256) * 256
    return Unit(index, f"layers.{index}", 0, tuple(entries), offset, "cpu")


def assignments(inventory: Inventory) -> Iterator[tuple[dict[str, list[StorageInfo]], list[StorageInfo]]]:
    """Every assignment of a mechanism to every storage: what is prefetched by fqn, and what is read in place."""
    movable = worth_moving(inventory.storages)
    for how in itertools.product(("resident", "prefetch", "uva"), repeat=len(movable)):
        drafts: dict[str, list[StorageInfo]] = {}
        for storage, mechanism in zip(movable, how, strict=True):
            if mechanism == "prefetch":
                fqn = ".".join(storage.name.split(".")[:2]) if "layers" in storage.name else "head"
                drafts.setdefault(fqn, []).append(storage)
        yield drafts, [s for s, mechanism in zip(movable, how, strict=True) if mechanism == "uva"]


def part_bytes(plan: Plan) -> int:
    """Bytes of all units of ``plan`` that one rank stores."""
    return plan.kind.part_bytes(plan, plan.units)  # type: ignore[attr-defined]
