"""The promise: with ``HEADRACE_DEBUG=1`` no race goes unseen, and none is seen where there is none.

The races are planted. Without the variable each of them changes the output, so the plants are real.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace import Prefetch
from headrace.config import debug_enabled
from headrace.errors import HeadraceWarning, OptionError, OutsideAccessError, RaceError
from headrace.model.inventory import take_inventory
from headrace.plan.build import build_plan
from headrace.runtime.debug import POISON, Guard
from headrace.stores.plain_host import CpuStore
from headrace.stores.store import Load
from headrace.testing import SlowLink, assert_same_bits, offload_over
from headrace.transfer.link import ComputeEvent, ThreadLink, ThreadTransfer, Transfer
from models import DIM, MoE, OddStack, Stack, all_layers, expecting, on_meta, rows, save

pytestmark = pytest.mark.usefixtures("no_grad")


class Packs(nn.Linear):
    """Keeps a packed weight by its address, as kernels for CPUs do."""

    packed: dict[Any, torch.Tensor]
    key: Callable[[nn.Parameter], Any]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.packed.setdefault(self.key(self.weight), self.weight.t().contiguous())


def packing(key: Callable[[nn.Parameter], Any]) -> nn.Sequential:
    model = nn.Sequential(*(Packs(DIM, DIM) for _ in range(4))).eval()
    packed: dict[Any, torch.Tensor] = {}
    for layer in model:
        layer.packed, layer.key = packed, key
    return model


class EarlyLink(SlowLink):
    """A planted race: every copy is declared done while it still runs."""

    def wait(self, transfer: Transfer, measure: bool = False) -> float:
        return 0.0


class TramplingLink(ThreadLink):
    """A planted race: :meth:`trample`, called while a unit is read, copies another one over it."""

    def __init__(self) -> None:
        super().__init__(num_threads=2)
        self._loads: dict[int, tuple[Load, torch.Tensor]] = {}
        self._reading: int | None = None

    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> ThreadTransfer:
        self._loads[load.unit] = (load, slot)
        return super().copy(load, slot, after)

    def wait(self, transfer: Transfer, measure: bool = False) -> float:
        if measure:  # it is a module's wait, and no other
            self._reading = transfer.unit
        return super().wait(transfer, measure)

    def trample(self) -> None:
        """Overwrite the unit waited for last with another that has used its slot before; return when it is done."""
        assert self._reading is not None, "no unit has been waited for"
        _, slot = self._loads[self._reading]
        for unit, (load, other) in self._loads.items():
            if unit != self._reading and other.data_ptr() == slot.data_ptr():
                return super().copy(load, slot, ()).result()
        raise AssertionError(f"unit {self._reading} has its slot to itself")


@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DEBUG", "1")


class TestPlantedRaces:
    def early(self) -> tuple[Any, torch.Tensor, torch.Tensor, Any]:
        model, x, expected = expecting(Stack(5))
        return model, x, expected, offload_over(model, all_layers(2), EarlyLink(max_delay_s=0.2))

    def trampled(self, layer: int) -> tuple[Any, torch.Tensor, torch.Tensor, Any]:
        model, x, expected = expecting(Stack(5))
        link = TramplingLink()
        handle = offload_over(model, all_layers(2), link)
        assert_same_bits(model(x), expected)
        model.layers[layer].norm.register_forward_pre_hook(lambda module, args: link.trample())
        return model, x, expected, handle

    @pytest.mark.slow
    def test_a_copy_declared_done_too_early_changes_the_output(self) -> None:
        model, x, expected, handle = self.early()
        assert not torch.equal(model(x), expected)
        handle.remove()
        assert_same_bits(model(x), expected)

    @pytest.mark.slow
    @pytest.mark.usefixtures("debug")
    def test_a_copy_declared_done_too_early_is_caught(self) -> None:
        model, x, expected, handle = self.early()
        # Whichever it is: on a busy machine the first ones may have landed before anybody reads them.
        message = r"unit (\d) \(layers\.\1\): checksum [0-9a-f]{8} in the store, [0-9a-f]{8} in its slot after its copy"
        with pytest.raises(RaceError, match=message):
            model(x)
        handle.remove()
        assert_same_bits(model(x), expected)

    @pytest.mark.parametrize("layer", [0, 2, 4])
    def test_a_slot_overwritten_while_it_is_read_changes_the_output(self, layer: int) -> None:
        model, x, expected, handle = self.trampled(layer)
        assert not torch.equal(model(x), expected)
        handle.remove()

    @pytest.mark.usefixtures("debug")
    @pytest.mark.parametrize("layer", [0, 2, 4])
    def test_a_slot_overwritten_while_it_is_read_is_caught(self, layer: int) -> None:
        model, x, expected, handle = self.trampled(layer)
        message = rf"unit {layer} \(layers\.{layer}\): .* after its module ran: the slot was overwritten while"
        for _ in range(2):
            with pytest.raises(RaceError, match=message):
                model(x)
        model.layers[layer].norm._forward_pre_hooks.clear()
        for _ in range(2):
            assert_same_bits(model(x), expected)
        handle.remove()

    @pytest.mark.parametrize("key", [lambda w: w.data_ptr(), lambda w: (w.data_ptr(), w.shape)], ids=["int", "tuple"])
    def test_a_cache_by_address(self, key: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        model, x = packing(key), rows()
        expected = model(x)
        model[0].packed.clear()
        with headrace.offload(model, Prefetch(params=["ALL_MODEL_PARAMS"])) as handle:
            assert not torch.equal(model(x), expected)
            assert handle.stats().bytes_moved > 0
        model[0].packed.clear()
        monkeypatch.setenv("HEADRACE_DEBUG", "1")
        message = r"data_ptr\(\) of 1\.weight is used as a key, and has been one for 0\.weight, .*same slot"
        policy = Prefetch(params=["ALL_MODEL_PARAMS"])
        with headrace.offload(model, policy), pytest.raises(OutsideAccessError, match=message):
            model(x)
        model[0].packed.clear()
        assert_same_bits(model(x), expected)
        assert not any("data_ptr" in vars(parameter) for parameter in model.parameters())


@pytest.mark.usefixtures("debug")
class TestNoFalseAlarms:
    def test_addresses_for_kernels(self) -> None:
        """A kernel that was given the address at once has read the right weight."""

        def read(weight: nn.Parameter) -> bytes:
            return ctypes.string_at(weight.data_ptr(), weight.nbytes)

        model, x = packing(read), rows()
        expected = model(x)
        model[0].packed.clear()
        with headrace.offload(model, Prefetch(params=["ALL_MODEL_PARAMS"])) as handle:
            for _ in range(2):
                assert_same_bits(model(x), expected)
            assert handle.stats().bytes_moved > 0

    @pytest.mark.slow
    def test_all_small_schedules(self) -> None:
        x = rows(8)
        for num_units, slots in itertools.product(range(2, 8), range(1, 6)):
            if slots > num_units:
                continue
            model = Stack(num_units, dim=8).eval()
            expected = model(x)
            handle = offload_over(model, all_layers(slots), SlowLink(max_delay_s=0.0002))
            for _ in range(3):
                assert_same_bits(model(x), expected)
            assert handle.stats().bytes_moved >= 3 * handle.plan.prefetched_bytes
            handle.remove()

    def test_out_of_order(self) -> None:
        model = Stack(5).eval()
        x = rows()
        orders = [[0, 2, 4], [4, 3, 2, 1, 0], [1, 1, 1], [0, 1, 2, 3, 4]]
        expected = []
        for model.order in orders:
            expected.append(model(x))
        with headrace.offload(model, all_layers(2)) as handle:
            for model.order, output in zip(orders, expected, strict=True):
                assert_same_bits(model(x), output)
            assert handle.stats().misses > 0

    @pytest.mark.parametrize("model", [MoE(4), OddStack(3)], ids=lambda m: type(m).__name__)
    def test_models_from_disk(self, model: nn.Module, tmp_path: Path) -> None:
        model.eval()
        x = torch.arange(5) if isinstance(model, MoE) else rows()
        expected = model(x)
        params = ["experts"] if isinstance(model, MoE) else ["mask"]
        policy = Prefetch(params=params, mode="disk")
        with headrace.offload(model, policy, checkpoint=save(model, tmp_path)) as handle:
            for _ in range(3):
                assert_same_bits(model(x), expected)
            assert handle.stats().bytes_moved > 0

    @pytest.mark.slow
    def test_compiled(self) -> None:
        model, x, expected = expecting(Stack(5))
        with headrace.offload(model, all_layers(2)) as handle:
            step = torch.compile(model, backend="eager", fullgraph=True)
            for run in (step, step, model, step):
                assert_same_bits(run(x), expected)
            assert [unit.runs for unit in handle.stats().units] == [4] * 5

    def test_a_promoted_weight_that_is_written(self) -> None:
        """On a CPU it may lie in the store's memory, from which nobody copies it any more."""
        twin, model, x = Stack(4).eval(), Stack(4).eval(), rows()
        model.load_state_dict(twin.state_dict())
        with headrace.offload(model, all_layers(2), device="cpu"):
            assert_same_bits(model(x), twin(x))
            with pytest.warns(HeadraceWarning, match="resident from now on"):
                next(iter(model.layers[1].parameters()))[1:3].copy_(torch.ones(()))
            next(iter(twin.layers[1].parameters()))[1:3].copy_(torch.ones(()))
            for _ in range(3):
                assert_same_bits(model(x), twin(x))

    def test_mode_meta_has_no_bytes_to_check(self) -> None:
        model = on_meta(Stack, 3)
        with headrace.offload(model, all_layers(2, "meta")) as handle:
            assert handle.stats().bytes_moved > 0
        assert all(tensor.is_meta for tensor in model.parameters())


def test_released_slots_are_poisoned() -> None:
    model = Stack(2)
    inventory = take_inventory(model)
    plan = build_plan(inventory, all_layers(1))
    store = CpuStore({s.name: torch.zeros(s.num_bytes, dtype=torch.uint8) for s in inventory.storages})
    loads: list[Load] = [store.load(unit) for unit in plan.units]
    guard = Guard(plan, [load.copies for load in loads])
    slot = torch.zeros(plan.slot_bytes[0], dtype=torch.uint8)
    guard.copied(0, slot)
    guard.before_reuse(0, slot)
    assert slot.eq(POISON).all()
    assert slot.view(torch.float32).isnan().all()
    with pytest.raises(RaceError):
        guard.copied(0, slot)


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_variable(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool) -> None:
    if value is not None:
        monkeypatch.setenv("HEADRACE_DEBUG", value)
    assert debug_enabled() is expected


def test_a_bad_value_is_refused_before_the_model_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DEBUG", "yes")
    model = Stack(3).eval()
    before = {name: t.data_ptr() for name, t in model.state_dict().items()}
    with pytest.raises(OptionError, match="HEADRACE_DEBUG='yes': expected 0 or 1"):
        headrace.offload(model, all_layers())
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == before
