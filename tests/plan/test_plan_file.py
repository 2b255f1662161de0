"""The promise: a plan survives its file unchanged, and a file or plan that is not right is refused with the reason."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import headrace
from checks import raising
from headrace.config import ALL_MODEL_PARAMS, UVA, Budget, Mode, Policy, Prefetch
from headrace.errors import BudgetError, HeadraceWarning, OptionError, OptionTypeError, PlanFileError, SelectionError
from headrace.model.inventory import take_inventory
from headrace.plan.build import build_plan
from headrace.plan.plan import Machine, Plan
from headrace.plan.slabs import slab_bytes
from headrace.testing import assert_moved, assert_same_bits
from models import MoE, Stack, all_layers, on_meta, rows, save
from plans import models, plan_for

pytestmark = pytest.mark.usefixtures("no_grad")

CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]

GIB = 2**30
H200 = Machine("NVIDIA H200", 140 * GIB)

POLICIES = st.one_of(
    st.builds(lambda share, mode: (share, mode), st.floats(0.05, 1.1), st.sampled_from(["cpu", "disk", "meta"])),
    st.builds(lambda group, step: Prefetch(group, 1, step, [ALL_MODEL_PARAMS]), st.integers(1, 3), st.integers(1, 5)),
    st.just(UVA(params=[ALL_MODEL_PARAMS])),
)


@pytest.fixture
def plan() -> Plan:
    """Five units in two slots, a resident head, and two tensors read in place."""
    whole = build_plan(take_inventory(Stack(6)), all_layers())
    return replace(whole, units=whole.units[:5], uva={e.storage: e.num_bytes for e in whole.units[5].entries[:2]})


def write(path: Path, plan: Plan, change: Callable[[Any], object]) -> Path:
    """The file of ``plan`` after ``change`` was made to it."""
    data = plan.to_json()
    change(data)
    path.write_text(json.dumps(data))
    return path


class TestRoundTrip:
    @pytest.mark.slow
    @given(models(), POLICIES, st.sampled_from([None, "a model, \N{SNOWMAN}"]), st.sampled_from([None, H200]))
    @settings(deadline=None, max_examples=100, suppress_health_check=CHECKS)
    def test_any_plan(
        self, tmp_path: Path, model: nn.Module, policy: Any, name: str | None, machine: Machine | None
    ) -> None:
        inventory = take_inventory(model)
        made = replace(make(inventory.num_bytes, policy, model), model_name=name, made_for=machine)
        made.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert loaded == made
        assert loaded.to_json() == made.to_json()
        assert list(loaded.resident) == list(made.resident), "the order is part of it: residents are read in it"
        loaded.check(inventory)

    @torch.no_grad()
    @pytest.mark.parametrize("gone", [["layers.0.linear.weight"], ["head.weight", "head.bias"]], ids=["part", "unit"])
    def test_weights_that_became_resident_stay_so(self, gone: list[str], tmp_path: Path) -> None:
        """Used outside of their module; what is left of their unit begins where they began."""
        model, x = Stack(6).eval(), rows()
        expected = model(x)
        handle = headrace.offload(model, headrace.Rules([("layers", "prefetch"), ("head", "prefetch")]))
        with pytest.warns(HeadraceWarning, match="resident from now on"):
            assert sum(model.get_parameter(name).sum() for name in gone).isfinite()
        assert set(gone) <= handle.plan.resident.keys()
        handle.plan.save(tmp_path / "plan.json")
        handle.remove()
        plan = Plan.load(tmp_path / "plan.json")
        assert set(gone) <= plan.resident.keys()
        with headrace.offload(model, plan) as handle:
            assert_same_bits(model(x), expected)
            assert_moved(handle, 1)

    def test_the_file_names_model_and_machine(self, plan: Plan, tmp_path: Path) -> None:
        replace(plan, model_name="stack", made_for=H200).save(tmp_path / "plan.json")
        data = json.loads((tmp_path / "plan.json").read_text())
        sizes = {s.name: s.num_bytes for s in take_inventory(Stack(6)).storages if s.name in known(plan)}
        digest = hashlib.sha256(json.dumps(sorted(sizes.items()), separators=(",", ":")).encode()).hexdigest()
        assert data["schema"] == 7
        assert data["model"] == {
            "name": "stack",
            "num_storages": len(sizes),
            "weight_bytes": sum(sizes.values()),
            "sha256": digest,
        }
        assert data["machine"] == {"device": "NVIDIA H200", "device_bytes": 140 * GIB}

    def test_the_keys_are_frozen(self, plan: Plan) -> None:
        """Another set of keys is another schema: raise the version."""
        assert plan.to_json()["schema"] == 7
        assert list(plan.to_json()) == [
            "schema", "model", "machine", "mode", "num_ranks", "context", "budget_bytes", "num_slots", "slot_bytes",
            "device_bytes", "resident_bytes", "prefetched_bytes", "moved_bytes", "store_bytes", "uva_bytes", "units",
            "resident", "uva", "cached",
        ]  # fmt: skip

    @pytest.mark.parametrize("policy", [Budget("12KiB", ["layers"]), all_layers(), UVA(params=["linear"])], ids=str)
    def test_same_bits_and_bytes_as_the_policy(self, policy: Policy, tmp_path: Path) -> None:
        resident, x = Stack(5).eval(), rows()
        expected = resident(x)
        found = []
        for source in ("policy", "file"):
            model = Stack(5).eval()
            model.load_state_dict(resident.state_dict())
            handle = headrace.offload(model, policy if source == "policy" else Plan.load(tmp_path / "plan.json"))
            handle.plan.save(tmp_path / "plan.json")
            before = handle.stats().bytes_moved
            assert torch.equal(model(x), expected)
            assert torch.equal(model(x), expected)
            found.append((handle.plan, handle.stats().bytes_moved - before))
            handle.remove()
        assert found[0] == found[1]

    @torch.no_grad()
    def test_the_budget_goes_with_the_plan(self, tmp_path: Path) -> None:
        """A weight that is used outside of its module's forward is not promoted beyond it."""
        model = Stack(5).eval()
        made = headrace.make_plan(model, Budget("12KiB", ["layers"]))
        made.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert loaded.budget_bytes == made.budget_bytes == 12 * 1024
        assert replace(loaded, budget_bytes=None) == loaded
        names = [entry.storage for unit in loaded.units for entry in unit.entries]
        with headrace.offload(model, loaded) as handle:
            with pytest.warns(HeadraceWarning, match="would exceed the budget of 12288 bytes"):
                [model.get_parameter(name).sum() for name in names]
            assert handle.plan.device_bytes <= 12 * 1024

    def test_streams_from_a_checkpoint(self, tmp_path: Path) -> None:
        resident = MoE().eval()
        save(resident, tmp_path)
        model = on_meta(MoE)
        build_plan(take_inventory(model), all_layers(mode="disk")).save(tmp_path / "plan.json")
        with headrace.offload(model, Plan.load(tmp_path / "plan.json"), checkpoint=tmp_path) as handle:
            tokens = torch.arange(9)
            assert_same_bits(model(tokens), resident(tokens))
            assert_moved(handle, 1)


def make(num_bytes: int, policy: Any, model: nn.Module) -> Plan:
    inventory = take_inventory(model)
    if isinstance(policy, tuple):
        share, mode = policy
        policy = Budget(max(1, int(num_bytes * share)), mode=mode)
    try:
        return plan_for(inventory, policy)
    except BudgetError as error:
        return plan_for(inventory, Budget(error.minimum_bytes, mode=policy.mode))
    except SelectionError:
        assume(False)
        raise


def known(plan: Plan) -> set[str]:
    return {*plan.resident, *plan.uva, *(entry.storage for unit in plan.units for entry in unit.entries)}


# -- files that are no plans -------------------------------------------------------------------------------------------


def at(*keys: Any, value: Any) -> Callable[[Any], None]:
    """Sets the value at ``keys``."""

    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return change


def without(*keys: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        del data[keys[-1]]

    return change


FIRST = "layers.0.norm.weight"
DAMAGE = {
    "schema 1": (at("schema", value=1), r"schema: expected 7, the version that this headrace reads .*, found 1"),
    "schema 2": (at("schema", value=2), r"schema: expected 7, .*, found 2"),
    "schema true": (at("schema", value=True), "schema: expected 7, .* found true"),
    "schema 1.0": (at("schema", value=1.0), r"schema: expected 7, .* found 1\.0"),
    "no schema": (without("schema"), "schema: expected 7, .* found null"),
    "key missing": (without("uva"), "expected the key 'uva', which is missing"),
    "key unknown": (at("speed", value=3), 'the file: expected no key but schema, .*, found "speed"'),
    "unit key missing": (without("units", 1, "module_fqn"), "expected the key 'module_fqn', which is missing"),
    "unit key unknown": (at("units", 1, "x", value=0), r'units\[1\]: expected no key but index, .* found "x"'),
    "entry key missing": (without("units", 0, "entries", 2, "offset"), r"units\[0\]\.entries\[2\]: expected the key"),
    "mode": (at("mode", value="tape"), 'mode: expected one of cpu, .*, sharded_cpu, disk, .*, meta, found "tape"'),
    "mode type": (at("mode", value=["cpu"]), r"mode: expected one of cpu, shm_cpu, sharded_cpu, .*, found \["),
    "slots type": (at("num_slots", value=2.0), r"num_slots: expected 1 to 5, .*, found 2\.0"),
    "slots bool": (at("num_slots", value=True), "num_slots: expected 1 to 5, .*, found true"),
    "slots negative": (at("num_slots", value=-1), "num_slots: expected 1 to 5, .*, found -1"),
    "no slots": (at("num_slots", value=0), "num_slots: expected 1 to 5, the number of units, found 0"),
    "too many slots": (at("num_slots", value=6), "expected 1 to 5, the number of units, found 6"),
    "slots without units": (at("units", value=[]), "num_slots: expected 0 without units, found 2"),
    "another number of slots": (at("num_slots", value=3), r"slot_bytes: expected \[.*\], which follows from the rest"),
    "units type": (at("units", value={}), "units: expected a list, found {}"),
    "unit type": (at("units", 3, value="a"), r'units\[3\]: expected an object, found "a"'),
    "slot": (at("units", 1, "slot", value=0), r"units\[1\]\.slot: expected 1, which follows from .*, found 0"),
    "index": (at("units", 1, "index", value=3), r"units\[1\]\.index: expected 1, which follows from .*, found 3"),
    "unit store": (at("units", 1, "store", value="tape"), r'\[1\]\.store: expected one of cpu, .*, found "tape"'),
    "unit store of others": (at("units", 1, "store", value="shm_cpu"), r"units\[1\]\.store: expected one of cpu, disk"),
    "unit store missing": (without("units", 1, "store"), "expected the key 'store', which is missing"),
    "a store that changes the sums": (at("units", 1, "store", value="disk"), "store_bytes: expected the key"),
    "no entries": (at("units", 0, "entries", value=[]), r"units\[0\]\.entries: expected at least one entry"),
    "fqn type": (at("units", 0, "module_fqn", value=None), r"units\[0\]\.module_fqn: expected a string, found null"),
    "overlap": (at("units", 0, "entries", 1, "offset", value=0), r"entries\[1\]\.offset: expected 256, .* found 0"),
    "alignment": (at("units", 0, "entries", 1, "offset", value=200), r"\[1\]\.offset: expected 256, .* found 200"),
    "beyond the slab": (at("units", 0, "num_bytes", value=256), r"units\[0\]\.num_bytes: expected 4864, .* found 256"),
    "ragged slab": (at("units", 0, "num_bytes", value=4800), r"units\[0\]\.num_bytes: expected 4864, .* found 4800"),
    "no bytes": (at("units", 0, "entries", 0, "num_bytes", value=0), r"entries\[0\]\.num_bytes: expected a whole"),
    "size type": (at("resident", "head.bias", value="12"), r"resident\['head\.bias'\]: expected a whole number"),
    "negative size": (at("uva", "layers.5.norm.bias", value=-4), r"uva\['layers\.5\.norm\.bias'\]: .* found -4"),
    "resident type": (at("resident", value=[]), r"resident: expected an object, found \[\]"),
    "twice, resident": (at("resident", FIRST, value=128), f"each storage in one place, .* found \"{FIRST}\""),
    "twice, uva": (at("uva", "head.bias", value=12), 'each storage in one place, .* found "head.bias"'),
    "twice, units": (
        at("units", 2, "entries", 1, "storage", value=FIRST),
        f"each storage in one place, .* found \"{FIRST}\"",
    ),
    "renamed": (at("units", 2, "entries", 1, "storage", value="x"), r"model\.sha256: expected .* follows from the"),
    "weight bytes": (at("model", "weight_bytes", value=7), r"model\.weight_bytes: expected \d+, which follows"),
    "model name": (at("model", "name", value=7), r"model\.name: expected a string, found 7"),
    "model type": (at("model", value=None), "model: expected an object, found null"),
    "sum": (at("moved_bytes", value=0), r"moved_bytes: expected \d+, which follows from the rest of the file, found 0"),
    "slot bytes": (at("slot_bytes", value=[1, 2]), r"slot_bytes\[0\]: expected \d+, which follows .* found 1"),
    "machine type": (at("machine", value="H200"), 'machine: expected an object, found "H200"'),
    "machine key": (at("machine", value={"device": "cpu"}), "machine: expected the key 'device_bytes', found"),
    "machine bytes": (at("machine", value={"device": "x", "device_bytes": 0}), "device_bytes: expected a whole"),
}  # fmt: skip


class TestDamagedFiles:
    @pytest.mark.parametrize("damage", DAMAGE)
    def test_what_is_wrong_and_where(self, damage: str, plan: Plan, tmp_path: Path) -> None:
        change, message = DAMAGE[damage]
        file = write(tmp_path / "plan.json", plan, change)
        with pytest.raises(PlanFileError, match=message) as caught:
            Plan.load(file)
        assert str(caught.value).startswith(f"{file}: ")
        assert str(caught.value).endswith("make it again with `headrace plan MODEL ... --save FILE`")

    def test_undamaged(self, plan: Plan, tmp_path: Path) -> None:
        assert Plan.load(write(tmp_path / "plan.json", plan, lambda data: None)) == plan

    def test_sorted_keys(self, plan: Plan, tmp_path: Path) -> None:
        """As tools that reformat JSON write them."""
        (tmp_path / "plan.json").write_text(json.dumps(plan.to_json(), sort_keys=True))
        assert Plan.load(tmp_path / "plan.json") == plan

    @pytest.mark.slow
    @given(st.data())
    @settings(deadline=None, max_examples=300, suppress_health_check=CHECKS)
    def test_any_other_value_anywhere(self, plan: Plan, tmp_path: Path, data: st.DataObject) -> None:
        """Whatever one value is replaced by: an error of ours, or a plan that the file states in full."""
        content = plan.to_json()
        keys = data.draw(st.sampled_from(list(leaves(content))))
        value = data.draw(st.one_of(st.none(), st.booleans(), st.integers(-9, 9999), st.text(max_size=4), st.just([])))
        at(*keys, value=value)(content)
        (tmp_path / "plan.json").write_text(json.dumps(content))
        with contextlib.suppress(PlanFileError):
            assert Plan.load(tmp_path / "plan.json").to_json() == content

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "expected a plan in JSON, found"),
            (b"{", "expected a plan in JSON, found"),
            (b"\xff\xfe{}", "expected a plan in JSON, found: 'utf-8'"),
            (b"[" * 100_000, "expected a plan in JSON, found"),
            (b"9" * 5000, "expected a plan in JSON, found"),
            (b"[]", r"the file: expected an object, found \[\]"),
            (b"null", "the file: expected an object, found null"),
            (b'{"schema": 7, "schema": 7}', "the key 'schema' twice in one object"),
            (b'{"schema": NaN}', "schema: expected 7, .* found NaN"),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_no_json_or_none_of_ours(self, content: bytes, message: str, tmp_path: Path) -> None:
        (tmp_path / "plan.json").write_bytes(content)
        with pytest.raises(PlanFileError, match=message):
            Plan.load(tmp_path / "plan.json")

    @pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["fifo", "device"])
    def test_what_is_no_file_is_not_waited_for(self, make: Callable[[Path], object], tmp_path: Path) -> None:
        make(tmp_path / "plan.json")
        with pytest.raises(PlanFileError, match="found: no regular file"):
            Plan.load(tmp_path / "plan.json")

    def test_no_file(self, tmp_path: Path) -> None:
        once = r"^\S*none\.json: expected a plan file, found: No such file or directory; make it again [^;]*$"
        with pytest.raises(PlanFileError, match=once):
            Plan.load(tmp_path / "none.json")
        with pytest.raises(PlanFileError, match="expected a plan file, found: Is a directory"):
            Plan.load(tmp_path)
        with pytest.raises(OptionTypeError, match="path: expected a str or path of a plan file, found int"):
            Plan.load(3)  # type: ignore[arg-type]


def leaves(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to every value that holds no others."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, item in items:
        yield from leaves(item, (*keys, key))
    if not items:
        yield keys


class TestWriting:
    def test_a_reader_never_sees_half_a_file(self, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "plan.json"
        plan.save(file)
        before = file.read_bytes()
        monkeypatch.setattr(os, "fsync", raising(OSError(28, os.strerror(28))))
        with pytest.raises(OptionError, match=r"plan\.json': the plan cannot be written there: No space left"):
            replace(plan, model_name="another").save(file)
        assert file.read_bytes() == before
        assert os.listdir(tmp_path) == ["plan.json"], "no draft is left behind"

    def test_writes_over_what_is_there_and_through_links(self, plan: Plan, tmp_path: Path) -> None:
        (tmp_path / "there.json").write_text("old")
        (tmp_path / "link.json").symlink_to(tmp_path / "there.json")
        plan.save(str(tmp_path / "link.json"))
        assert (tmp_path / "link.json").is_symlink()
        assert Plan.load(tmp_path / "there.json") == plan

    def test_places_that_take_no_file(self, plan: Plan, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match="expected a file name in a folder that exists, found no such folder"):
            plan.save(tmp_path / "no" / "plan.json")
        with pytest.raises(OptionError, match="found a folder"):
            plan.save(tmp_path)
        with pytest.raises(OptionError, match="found something that is no file"):
            plan.save("/dev/null")
        assert not os.path.isfile("/dev/null")


# -- plans for others --------------------------------------------------------------------------------------------------


def refusal(model: nn.Module, plan: Plan) -> str:
    """What ``offload`` says; the model has to be as it was."""
    before = {name: (id(t), t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()}
    with pytest.raises(OptionError) as caught:
        headrace.offload(model, plan)
    assert {name: (id(t), t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()} == before
    return str(caught.value)


class TestOtherModels:
    def test_the_difference(self) -> None:
        plan = replace(build_plan(take_inventory(Stack(5)), all_layers()), model_name="five")
        message = refusal(Stack(6), plan)
        assert "made for another model (five): 4 of 26 storages differ: " in message
        assert "layers.5.linear.bias (128 bytes, in the model alone)" in message
        assert "and 1 more" in message
        assert re.search(r"The plan places 22 storages, \d+\.\d KiB \(\d+ bytes\), the model has 26 storages", message)
        assert "in the plan alone" in refusal(Stack(4), plan)
        message = refusal(Stack(5, dim=16), plan)
        assert "layers.0.linear.bias (128 bytes in the plan, 64 in the model)" in message
        assert "`headrace plan MODEL ... --save FILE`" in message

    def test_a_module_that_is_not_there(self) -> None:
        plan = build_plan(take_inventory(Stack(2)), all_layers())
        wrong = replace(plan, units=(replace(plan.units[0], module_fqn="layers.7"), *plan.units[1:]))
        assert "the model has no module 'layers.7'" in refusal(Stack(2), wrong)

    def test_a_unit_that_is_waited_for_elsewhere(self) -> None:
        """Its layer would read the slot before the copy is done: bits, not speed."""
        plan = build_plan(take_inventory(Stack(2)), all_layers())
        first, second = plan.units
        swapped = replace(plan, units=(replace(first, module_fqn="layers.1"), replace(second, module_fqn="layers.0")))
        assert "in the unit of 'layers.1', but module 'layers.0." in refusal(Stack(2), swapped)


class TestOtherMachines:
    def test_units_that_are_read_at_the_same_time(self) -> None:
        """Two at one module, or one inside another's: with a slot for both in turn the first is overwritten."""
        model = Stack(5)
        plan = build_plan(take_inventory(model), all_layers(2))
        first = plan.units[0]
        entries = [replace(entry, offset=0) for entry in first.entries]
        halves = [replace(first, entries=(entry,), num_bytes=slab_bytes([entry.num_bytes])) for entry in entries]
        units = [replace(unit, index=i, slot=i % 2) for i, unit in enumerate([*halves, *plan.units[1:]])]
        message = refusal(model, replace(plan, units=tuple(units)))
        assert "the plan has units 0 and 1 at 'layers.0' and 'layers.0'; expected modules none of which" in message
        for outer in ("", "layers"):
            units = [replace(unit, module_fqn=outer) if unit.index == 2 else unit for unit in plan.units]
            message = refusal(model, replace(plan, units=tuple(units)))
            assert f"the plan has units 2 and 0 at {outer!r} and 'layers.0'; expected modules" in message

    def test_another_device(self) -> None:
        plan = replace(build_plan(take_inventory(Stack(5)), all_layers()), made_for=H200)
        message = refusal(Stack(5), plan)
        assert "made for another machine: for NVIDIA H200 with 140.000 GiB, and this is cpu; make it again" in message

    @pytest.mark.parametrize(
        ("here", "suits"),
        [
            (H200, True),
            (replace(H200, device_bytes=141 * GIB), True),
            (replace(H200, device_bytes=139 * GIB), False),
            (Machine("NVIDIA H100", 140 * GIB), False),
            (Machine("cpu"), False),
        ],
    )
    def test_less_memory_or_another_name(self, here: Machine, suits: bool) -> None:
        plan = replace(build_plan(take_inventory(Stack(5)), all_layers()), made_for=H200)
        with contextlib.nullcontext() if suits else pytest.raises(OptionError, match=f"for {H200}, and this is {here}"):
            plan.check_machine(here)

    def test_plans_that_name_no_machine_go_everywhere(self) -> None:
        plan = build_plan(take_inventory(Stack(5)), all_layers())
        assert plan.made_for is None
        for here in (H200, Machine("cpu")):
            plan.check_machine(here)

    def test_the_plan_in_force_names_its_machine(self) -> None:
        with headrace.offload(Stack(5).eval(), all_layers()) as handle:
            assert handle.plan.made_for == Machine("cpu")


@pytest.mark.parametrize("mode", ["cpu", "disk", "meta"])
def test_modes_survive(mode: Mode, tmp_path: Path) -> None:
    build_plan(take_inventory(Stack(3)), all_layers(mode=mode)).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").mode == mode
