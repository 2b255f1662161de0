"""Units that are stored and copied in a code: bits, bytes, memory, and what is refused."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import headrace
from checks import raising, run_threads
from headrace import UVA, Budget, Plan, Prefetch, Rules
from headrace.codec.layout import coded_bytes
from headrace.config import Policy
from headrace.errors import (
    BudgetError,
    HeadraceWarning,
    ModelChangedError,
    OptionError,
    PlanFileError,
    SlotConflictError,
)
from headrace.flags import OffloadFlags
from headrace.model.inventory import take_inventory
from headrace.plan.build import Planner, build_plan
from headrace.plan.candidates import Spill
from headrace.plan.nominal_rates import NOMINAL_GPU
from headrace.plan.slabs import slab_bytes
from headrace.planning.checks import needs_of
from headrace.stores import sources
from headrace.stores.coded_host import CodedUnit
from headrace.testing import assert_same_bits
from models import Stack, rows, save
from moe_models import qwen

DIM = 256

ALL = Prefetch(1, 1, 2, codec="exp3")
POLICIES: dict[str, Policy] = {
    "all layers": ALL,
    "one slot": Prefetch(1, 1, 1, codec="exp3"),
    "every other": Prefetch(2, 1, 1, codec="exp3"),
    "rules": Rules([("linear", "prefetch")], codec="exp3"),
    "budget": Budget("600KiB", mode="cpu", codec="exp3"),
}


@pytest.fixture(autouse=True)
def _no_grad() -> object:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadraceWarning)
        yield


def build(layers: int = 6) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model = Stack(layers, DIM).eval().to(torch.bfloat16)
    x = rows(DIM).to(torch.bfloat16)
    return model, x, model(x)


def refused(*parts: str) -> pytest.RaisesExc[OptionError]:
    return pytest.RaisesExc(OptionError, check=lambda error: all(part in str(error) for part in parts))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_bits_and_bytes(policy: Policy) -> None:
    model, x, expected = build()
    with headrace.offload(model, policy) as handle:
        for _ in range(4):
            assert_same_bits(model(x), expected)
        plan, stats = handle.plan, handle.stats()
        coded = [unit for unit in plan.units if unit.store == policy.codec]
        assert coded
        for unit, counts in zip(plan.units, stats.units, strict=True):
            whole = counts.copies * unit.num_bytes
            assert 0 < counts.bytes_moved < (0.8 if unit in coded else 1.01) * whole
    assert_same_bits(model(x), expected)


def test_host_memory_is_three_quarters(tmp_path: Path) -> None:
    model, x, expected = build()
    save(model, tmp_path)
    with torch.device("meta"):
        fresh = Stack(6, DIM).to(torch.bfloat16).eval()
    with headrace.offload(fresh, ALL, checkpoint=tmp_path, device="cpu") as handle:
        assert_same_bits(fresh(x), expected)
        units = sum(unit.num_bytes for unit in handle.plan.units)
        assert handle.plan.store_bytes["exp3"] <= 0.76 * units
        assert handle.stats().store_bytes["host"] <= 0.77 * units
        assert handle.stats().bytes_moved


GROWTH = """
import json, sys, torch, headrace
from torch import nn
from headrace.memory.system import rss_bytes

def run(layers, file):
    with torch.device("meta" if file else "cpu"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers))).bfloat16().eval()
    return headrace.offload(model, headrace.Prefetch(1, 1, 2, codec="exp3"), checkpoint=file or None, device="cpu")

run(2, sys.argv[1]).remove()
start = rss_bytes()
handle = run(48, sys.argv[1])
print(json.dumps([rss_bytes() - start, handle.stats().store_bytes["host"], handle.plan.slots_bytes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("live", [False, True], ids=["from files", "live"])
def test_what_encoding_took_is_given_back(tmp_path: Path, live: bool) -> None:
    """48 tensors of 2 MiB, of which threads of their own make and free some in the C heap."""
    file = tmp_path / "model.safetensors"
    save_file({f"{i}.weight": (torch.randn(1024, 1024) * 0.02).bfloat16() for i in range(48)}, file)
    argument = "" if live else str(file)
    done = subprocess.run([sys.executable, "-c", GROWTH, argument], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    growth, stored, slots = json.loads(done.stdout)
    assert 0.6 * 96 * 2**20 < stored < 0.72 * 96 * 2**20
    assert growth <= 1.01 * stored + slots + (48 << 20)  # of 96 MiB of weights; untrimmed, more than 90 stay


def test_state_dict_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that begin and end inside of a weight, or of a block of the code, in three threads."""
    model, _, _ = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    threads = set()
    read = CodedUnit.read

    def noted(self: CodedUnit, offset: int, into: memoryview) -> None:
        threads.add(threading.get_ident())
        time.sleep(0.001)  # or one thread would be done before the others begin
        read(self, offset, into)

    monkeypatch.setattr(sources, "_PIECE_BYTES", 10_007)
    monkeypatch.setattr(sources, "touch_threads", lambda: 3)
    with headrace.offload(model, ALL) as handle:
        assert handle.plan.store_bytes["exp3"]
        monkeypatch.setattr(CodedUnit, "read", noted)
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in before.items())
    assert len(threads) > 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_state_dict_and_writes() -> None:
    """A weight that is written while it is coded becomes resident, and is used from then on."""
    model, x, _ = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with headrace.offload(model, ALL) as handle:
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in before.items())
        name = handle.plan.offloaded_names[0]
        with pytest.raises(ModelChangedError, match=rf"{name} was written in place by aten\.mul_"):  # a decoded copy
            state[name].mul_(2)
        del state
        name, weight = next((n, p) for n, p in model.named_parameters() if n in handle.plan.offloaded_names)
        weight.mul_(2)
        assert handle.plan.mechanism_of(name) == "resident"
        found = model(x)
    assert_same_bits(model(x), found)
    assert torch.equal(model.state_dict()[name], before[name] * 2)


def test_random_bits_are_stored_as_they_are() -> None:
    model, x, _ = build(3)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            made = torch.randint(0, 256, (parameter.nbytes,), dtype=torch.uint8)
            parameter.view(torch.uint8).view(-1).copy_(made)
    before = {name: value.clone().view(torch.uint8) for name, value in model.state_dict().items()}
    with headrace.offload(model, ALL) as handle:
        model(x)
        stats = handle.stats()
        moved = (c.copies * unit.num_bytes for unit, c in zip(handle.plan.units, stats.units, strict=True))
        assert stats.bytes_moved == sum(moved)
        assert stats.store_bytes["slots"] == 3 * handle.plan.units[0].num_bytes > handle.plan.slots_bytes
        state = model.state_dict()
        assert all(torch.equal(state[name].view(torch.uint8), value) for name, value in before.items())
        del state


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=["numpy", "torch"]
)
def test_without_memory_for_the_code_weights_are_stored_as_they_are(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.stores.coded_host.encode", raising(error))
    model, x, expected = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = headrace.offload(model, ALL)
    with handle:
        assert_same_bits(model(x), expected)
        stats = handle.stats()
        moved = (c.copies * unit.num_bytes for unit, c in zip(handle.plan.units, stats.units, strict=True))
        assert 0 < stats.bytes_moved == sum(moved)
    assert sum("no memory was left to code" in str(warning.message) for warning in caught) == 1


@pytest.mark.slow
def test_remove_frees_what_is_decoded() -> None:
    """Also while the handle is kept."""
    model, x, _ = build()
    handle = headrace.offload(model, ALL)
    model(x)

    def decoded() -> int:
        gc.collect()
        tensors = (found for found in gc.get_objects() if isinstance(found, torch.Tensor))
        return sum(t.dtype == torch.uint8 and t.numel() == handle.plan.decoding_bytes for t in tensors)

    before = decoded()
    handle.remove()
    assert decoded() < before


def test_other_errors_of_encoding_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.stores.coded_host.encode", raising(RuntimeError("not about memory")))
    model, _, _ = build()
    with pytest.raises(RuntimeError, match="not about memory"):
        headrace.offload(model, ALL)


def test_a_copy_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    model, x, expected = build()
    with headrace.offload(model, ALL) as handle:
        for _ in range(3):
            assert_same_bits(model(x), expected)
        assert handle.stats().bytes_moved


class Slow(nn.Linear):
    """Reads its weight once more after others had time to run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = super().forward(x)
        time.sleep(0.002)
        return first + super().forward(x)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_layers_in_two_threads_are_decoded_in_turn(slots: int) -> None:
    """What is decoded is read by one unit at a time, whatever slots hold."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Slow(DIM, DIM, bias=False) for _ in range(6))).eval().bfloat16()
    x = torch.randn(2, DIM).bfloat16()
    expected = [layer(x) for layer in model]
    found: list[list[torch.Tensor]] = [[], []]
    with headrace.offload(model, Prefetch(1, 1, slots, codec="exp3")) as handle:
        run_threads([lambda n=n: found[n].extend(model[n](x) for _ in range(8)) for n in range(2)])  # type: ignore[misc]
        assert handle.stats().bytes_moved
    for results, wanted in zip(found, expected[:2], strict=True):
        assert len(results) == 8
        for result in results:
            assert_same_bits(result, wanted)


def test_a_forked_child_reads_weights() -> None:
    model, _, _ = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with headrace.offload(model, ALL) as handle:
        if (child := os.fork()) == 0:  # which has no threads: no operator that shares its work out among some
            with suppress(BaseException):
                state = model.state_dict()
                found = (state[name].view(torch.uint8).numpy().tobytes() for name in before)
                os._exit(list(found) != [value.view(torch.uint8).numpy().tobytes() for value in before.values()])
            os._exit(2)
        assert handle.plan.coded_units
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Outer(nn.Linear):
    """Runs another layer in the middle of its own forward."""

    inner: list[nn.Module]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.inner[0](super().forward(x)))


def test_a_unit_inside_another_is_refused_whatever_the_slots() -> None:
    layers = [Outer(DIM, DIM), *(nn.Linear(DIM, DIM) for _ in range(3))]
    layers[0].inner = [layers[1]]
    model = nn.Sequential(*layers).eval().bfloat16()
    with (
        headrace.offload(model, Prefetch(1, 1, 3, codec="exp3")),
        pytest.raises(SlotConflictError, match=r"1 .* inside 0 .* decoded at a time: keep 1 resident"),
    ):
        model(torch.zeros(1, DIM).bfloat16())


@pytest.mark.slow
def test_an_alias_is_refused() -> None:
    model, _, _ = build()
    alias = next(p for p in model.parameters() if p.dim() == 2).detach()
    with refused("has another user", "codec='none'"):
        headrace.offload(model, ALL)
    del alias
    headrace.offload(model, ALL).remove()


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: Prefetch(1, codec="exp4"), ("codec 'exp4'", "none, exp3")),
        (lambda: Prefetch(1, mode="disk", codec="exp3"), ("mode 'cpu'", "--offload-codec")),
        (lambda: Budget("1GiB", mode="sharded_cpu", codec="exp3"), ("mode 'cpu'", "--offload-codec")),
    ],
)
def test_policies_refuse(make: object, parts: tuple[str, ...]) -> None:
    with refused(*parts):
        make()  # type: ignore[operator]


def test_the_command_line_stores_it_in_host_memory() -> None:
    flags = OffloadFlags(offload_group_size=1, offload_codec="exp3")
    assert flags.policy(default_mode="disk") == Prefetch(1, codec="exp3")
    assert Budget("1GiB", codec="exp3").mode == "cpu"


def test_a_model_of_other_dtypes_is_refused() -> None:
    with refused("codec 'exp3' has no effect", "bf16"):
        headrace.make_plan(Stack(3, DIM), ALL)


def test_a_code_that_is_stated_is_used_where_reading_in_place_would_take_less_memory() -> None:
    with torch.device("meta"):
        inventory = take_inventory(Stack(3, 1024).to(torch.bfloat16))
    planner = Planner(inventory, NOMINAL_GPU, zero_copy=True)
    with pytest.raises(BudgetError, match="with everything offloaded and a unit coded headrace still needs") as error:
        planner.plan(Budget("3MiB", codec="exp3"))
    assert planner.plan(Budget(error.value.minimum_bytes, codec="exp3")).coded_units
    assert planner.plan(Budget("3MiB", codec="auto")).uva
    with refused("codec 'exp3' has no effect: what is offloaded is read in place", "give more device memory"):
        planner.plan(Rules([("*.weight", "uva")], codec="exp3"))


def test_why_a_code_has_no_effect() -> None:
    with torch.device("meta"):
        stack, experts = (take_inventory(model.to(torch.bfloat16)) for model in (Stack(16, 1024), qwen()))
    budget = Budget(int(0.8 * stack.num_bytes), peer_memory=stack.num_bytes, codec="exp3")
    with refused("all units are in the memory of another GPU", "less --peer-memory"):
        build_plan(stack, budget, rates=NOMINAL_GPU)
    with refused("cached experts are not coded"):
        build_plan(experts, Rules([("experts", "cache")], expert_slots=3, codec="exp3"), rates=NOMINAL_GPU)


def test_plan_files(tmp_path: Path) -> None:
    model, x, expected = build()
    plan = headrace.make_plan(model, ALL)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    (tmp_path / "other.json").write_text((tmp_path / "plan.json").read_text().replace('"exp3"', '"exp4"'))
    with pytest.raises(PlanFileError, match=r'store: expected one of .*, exp3, found "exp4"; make it again with'):
        Plan.load(tmp_path / "other.json")
    with headrace.offload(model, again) as handle:
        assert_same_bits(model(x), expected)
        assert handle.stats().bytes_moved
    with refused("is coded in 'exp3'", "not bf16"):
        again.check(take_inventory(model.half()))


def test_a_plan_counts_the_link_and_the_code() -> None:
    model, _, _ = build()
    inventory = take_inventory(model)
    plain, coded = (build_plan(inventory, Prefetch(1, 1, 2, codec=codec)) for codec in ("none", "exp3"))
    assert coded.moved_bytes == sum(coded_bytes(unit.num_bytes) for unit in coded.units)
    code_bytes = coded_bytes(coded.units[0].num_bytes)
    assert coded.slot_bytes == (slab_bytes([code_bytes]),) * 2
    assert coded.decoding_bytes == coded.units[0].num_bytes  # of one unit, for both slots
    assert (
        coded.device_bytes == plain.device_bytes - sum(plain.slot_bytes) + sum(coded.slot_bytes) + coded.decoding_bytes
    )
    steps = [Planner(inventory, NOMINAL_GPU).forecast(plan, 1) for plan in (plain, coded)]
    assert 0.65 < steps[1].link_s / steps[0].link_s < 0.8


@pytest.mark.parametrize("share", [0.2, 0.3, 0.5, 0.8])
def test_a_budget_holds_code_and_a_decoded_unit(share: float) -> None:
    with torch.device("meta"):
        inventory = take_inventory(Stack(16, 1024).to(torch.bfloat16))
    num_bytes = int(share * inventory.num_bytes)
    plain, coded = (
        build_plan(inventory, Budget(num_bytes, codec=each), rates=NOMINAL_GPU) for each in ("none", "exp3")
    )
    assert coded.decoding_bytes > 0
    largest = max(unit.num_bytes for unit in coded.units)
    assert num_bytes - 2 * largest < coded.device_bytes <= num_bytes
    assert coded.moved_bytes < 0.85 * plain.moved_bytes


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("peer", [0.1, 0.25])
def test_a_budget_holds_units_of_a_peer_beside_code(share: float, peer: float) -> None:
    """They are copied as they are, so a slot of one is larger than that of a code."""
    with torch.device("meta"):
        inventory = take_inventory(Stack(16, 1024).to(torch.bfloat16))
    num_bytes, peer_bytes = int(share * inventory.num_bytes), int(peer * inventory.num_bytes)
    plan = build_plan(inventory, Budget(num_bytes, peer_memory=peer_bytes, codec="exp3"), rates=NOMINAL_GPU)
    assert {unit.store for unit in plan.units} == {"exp3", "peer"}
    assert plan.device_bytes <= num_bytes


def test_a_limit_of_host_memory_is_for_the_code() -> None:
    with torch.device("meta"):
        inventory = take_inventory(Stack(16, 1024).to(torch.bfloat16))
    half, host = inventory.num_bytes // 2, int(0.45 * inventory.num_bytes)
    with pytest.raises(BudgetError, match="--host-memory"):
        build_plan(inventory, Budget(half, host_memory=host, codec="none"), rates=NOMINAL_GPU)
    plan = build_plan(inventory, Budget(half, host_memory=host, codec="exp3"), rates=NOMINAL_GPU)
    assert plan == build_plan(inventory, Budget(half, host_memory=host), rates=NOMINAL_GPU)  # codec 'auto'
    assert host < sum(unit.num_bytes for unit in plan.units)
    assert sum(unit.link_bytes for unit in plan.coded_units) <= host
    with pytest.raises(BudgetError) as error:
        build_plan(inventory, Budget(half, host_memory=host // 2, codec="exp3"), rates=NOMINAL_GPU)
    assert "in files" not in str(error.value)
    with pytest.raises(BudgetError, match="--host-memory"):
        build_plan(inventory, Budget(half, host_memory=host // 2, codec="auto"), rates=NOMINAL_GPU)
    with pytest.raises(BudgetError, match="is too small"):
        build_plan(inventory, Budget(1, codec="auto"), "disk")


@pytest.mark.parametrize("dim", [256, 264, 1024])
def test_the_least_budget_that_an_error_names_is_enough(dim: int) -> None:
    with torch.device("meta"):
        inventory = take_inventory(Stack(3, dim).to(torch.bfloat16))
    with pytest.raises(BudgetError, match="is too small") as error:
        build_plan(inventory, Budget(1, codec="exp3"), rates=NOMINAL_GPU)
    plan = build_plan(inventory, Budget(error.value.minimum_bytes, codec="exp3"), rates=NOMINAL_GPU)
    assert plan.coded_units
    assert plan.device_bytes <= error.value.minimum_bytes


def test_units_on_a_peer_are_as_fast_beside_coded_ones() -> None:
    model, _, _ = build()
    inventory = take_inventory(model)
    plain, coded = (build_plan(inventory, Prefetch(1, 1, 2, codec=codec)) for codec in ("none", "exp3"))

    def link_s(plan: Plan, number: int) -> float:
        """Of the plan with its first ``number`` units on a peer."""
        units = (*(replace(unit, store="peer") for unit in plan.units[:number]), *plan.units[number:])
        return Planner(inventory, NOMINAL_GPU).forecast(replace(plan, units=units), 1).link_s

    on_peer = [link_s(plan, 3) - (link_s(plan, 0) - link_s(plan, 0) * 3 / 6) for plan in (plain, coded)]
    assert on_peer[0] == pytest.approx(on_peer[1], rel=0.01)


def test_reading_in_place_has_no_codec() -> None:
    with pytest.raises(TypeError):
        UVA(codec="exp3")  # type: ignore[call-arg]


class TestAuto:
    def stores(self, dtype: torch.dtype, **options: Any) -> set[str]:
        with torch.device("meta"):
            inventory = take_inventory(Stack(36, 8192).to(dtype))
        budget = Budget(int(inventory.num_bytes * 0.8), codec="auto", **options)
        return {unit.store for unit in build_plan(inventory, budget, rates=NOMINAL_GPU).units}

    def test_codes_what_the_link_bounds(self) -> None:
        assert self.stores(torch.bfloat16) == {"exp3"}

    def test_leaves_other_dtypes(self) -> None:
        assert self.stores(torch.float16) == {"cpu"}

    def test_leaves_compute_bound_steps(self) -> None:
        assert self.stores(torch.bfloat16, workload=headrace.Workload([100_000])) == {"cpu"}

    @pytest.mark.slow
    def test_alternatives_are_those_of_the_codec_that_is_chosen(self) -> None:
        with torch.device("meta"):
            inventory = take_inventory(Stack(36, 8192).to(torch.bfloat16))
        planner = Planner(inventory, NOMINAL_GPU)
        predictions = []
        for codec in ("auto", "exp3"):
            budget = Budget(inventory.num_bytes // 2, codec=codec)
            predictions.append(planner.predict(budget, planner.plan(budget)))
        assert predictions[0].alternatives
        assert predictions[0] == predictions[1]

    def test_warns_once(self) -> None:
        """Two plans are made, with a codec and without."""
        with torch.device("meta"):
            model = Stack(36, 1024).to(torch.bfloat16)
            model.table = nn.ParameterList([nn.Parameter(torch.empty(8, dtype=torch.bfloat16))])
        inventory = take_inventory(model)
        budget = Budget(inventory.num_bytes // 2, [headrace.config.ALL_MODEL_PARAMS], codec="auto")
        with pytest.warns(HeadraceWarning, match="cannot be prefetched") as caught:
            assert build_plan(inventory, budget, rates=NOMINAL_GPU).codec == "exp3"
        assert len(caught) == 1

    @pytest.mark.parametrize("limited", ["by what is free", "by the budget"])
    def test_codes_what_would_not_fit_host_memory_otherwise(self, limited: str) -> None:
        """All of it then crosses the link, in place of a part that comes from files; what does not fit stays there."""
        with torch.device("meta"):
            inventory = take_inventory(Stack(36, 8192).to(torch.bfloat16))
        half = inventory.num_bytes // 2
        for share, stores in ((0.8, {"exp3"}), (0.5, {"cpu", "disk"})):
            room, given = int(half * share), limited == "by the budget"
            free = room + 5 * slab_bytes(s.num_bytes for s in inventory.storages) // 36  # until they are coded
            planner = Planner(inventory, NOMINAL_GPU, spill=Spill([], None if given else free))
            budget = Budget(half, host_memory=room if given else None, codec="auto")
            made = planner.plan(budget)
            assert {unit.store for unit in made.units} == stores
            assert needs_of(made, on_gpu=True).pinned_bytes <= (room if given else free)

    def test_is_for_budgets(self) -> None:
        with refused("codec 'auto'", "none, exp3 without a budget"):
            Prefetch(1, codec="auto")
