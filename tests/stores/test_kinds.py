"""A kind of store is one file: plan, prediction, limits, store, link and tables ask it, and nothing else names it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

import pytest
import torch

import headrace
from headrace.config import StoreName
from headrace.errors import OptionError
from headrace.model.inventory import take_inventory
from headrace.model.records import ModelProfile
from headrace.plan import kinds
from headrace.plan.cost_model import Forecaster
from headrace.plan.kinds import HOST, kind_of
from headrace.plan.nominal_rates import NOMINAL_GPU
from headrace.plan.plan import Plan
from headrace.planning.checks import needs_of
from models import Stack, all_layers, rows


@pytest.fixture
def inverted(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kind of ``toy_kind.py``, with all that registers it."""
    monkeypatch.setitem(kinds.WINGS, "inverted", "toy_kind")
    monkeypatch.setattr(kinds.StoreKind, "beside", (*HOST.beside, "inverted"))
    yield "inverted"
    kind_of.cache_clear()


def planned(model: Stack, store: str) -> Plan:
    plan = headrace.make_plan(model, all_layers(2))
    return replace(plan, units=tuple(replace(unit, store=store) if unit.index % 2 else unit for unit in plan.units))


@torch.no_grad()
def test_a_new_kind_is_carried_out(inverted: str) -> None:
    model = Stack(6).eval()
    expected, weight = model(rows()), model.layers[1].linear.weight.clone()
    plan = planned(model, inverted)
    there = sum(unit.payload_bytes for unit in plan.units if unit.store == inverted)
    with headrace.offload(model, plan) as handle:
        assert torch.equal(model(rows()), expected)
        stats = handle.stats()
        assert {unit.store for unit in stats.units if unit.bytes_moved} == {"cpu", inverted}
        assert stats.store_bytes["host"] == there
        assert torch.equal(model.state_dict()["layers.1.linear.weight"], weight)
    assert torch.equal(model(rows()), expected)


def test_a_new_kind_is_counted_and_timed_and_printed(inverted: str) -> None:
    model = Stack(6).eval()
    plan, plain = planned(model, inverted), headrace.make_plan(model, all_layers(2))
    there = sum(unit.payload_bytes for unit in plan.units if unit.store == inverted)
    assert plan.store_bytes == {**plain.store_bytes, "cpu": plain.store_bytes["cpu"] - there, inverted: there}
    assert inverted in str(plan)
    names = [storage.name for storage in take_inventory(model).storages]
    assert needs_of(plan, on_gpu=True).pinned_bytes == needs_of(plain, on_gpu=True).pinned_bytes - sum(
        unit.num_bytes for unit in plan.units if unit.store == inverted
    )
    assert needs_of(plan, on_gpu=False, on_meta=names) == needs_of(plain, on_gpu=False, on_meta=names)
    slow, fast = (Forecaster(take_inventory(model), NOMINAL_GPU, ModelProfile(), 1)(each) for each in (plan, plain))
    assert slow.link_s == pytest.approx(2 * fast.link_s)


def test_beside_host_memory_alone(inverted: str) -> None:
    model = Stack(6).eval()
    units = [replace(unit, store="disk") if unit.store == "cpu" else unit for unit in planned(model, inverted).units]
    plan = replace(planned(model, inverted), units=tuple(units))
    with pytest.raises(OptionError, match=r"unit 1 .* is stored in 'inverted', and the plan has mode 'disk'"):
        replace(plan, mode="disk").check(take_inventory(model))


@pytest.mark.parametrize("name", [HOST.name, *kinds.WINGS])
def test_every_kind_has_its_name_and_what_opens_it(name: StoreName) -> None:
    kind = kind_of(name)
    assert kind.name == name
    assert callable(import_module(kind.store_module).open_units)
    assert set(kind.beside) <= kinds.WINGS.keys()
    if kind.link_module is not None and (torch.cuda.is_available() or not kind.in_files):
        assert callable(import_module(kind.link_module).open_link)
