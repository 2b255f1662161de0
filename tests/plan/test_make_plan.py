"""The promise: one call plans a live module, one on meta or a folder, for this machine or another, and allocates
nothing; what it returns is carried out as it is, and shows itself.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, get_args
from unittest.mock import patch

import hypothesis
import pytest
import torch
import torch.distributed as dist
import transformers
from hypothesis import assume, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import headrace
from checkpoints import SIZE, make, resident, rewrite
from checkpoints import run as forward
from commands import error_of, run, tiny_model
from headrace import UVA, Budget, Prefetch, Rules, Workload, errors
from headrace.adapters.transformers import load
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.config import ALL_MODEL_PARAMS, RANK_MODES, SHARDED_MODES, Mode, Policy
from headrace.errors import HeadraceWarning, LimitError, OptionError, OptionTypeError, SelectionError, StateError
from headrace.plan.plan import Machine
from headrace.plan_model import plan_model
from headrace.planning.request import PlanRequest
from headrace.stores.file_reads import DiskOptions
from headrace.transfer.cards import MACHINES
from headrace.transfer.machine_probe import Probe, named_machine
from models import MoE, OddStack, Stack, aligned, on_meta, rows, save, state_of
from moe_models import qwen
from plans import part_bytes

folder = tiny_model

REPORT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "2026-11-21-plan-h200-probe.json"

MIXTURE = {
    **SIZE, "hidden_size": 256, "intermediate_size": 768, "moe_intermediate_size": 192, "num_experts": 16,
    "num_experts_per_tok": 2, "num_hidden_layers": 6,
}  # fmt: skip


# -- what can be planned -----------------------------------------------------------------------------------------------


class TestModules:
    def test_a_live_module_is_planned_and_left_alone(self) -> None:
        model = Stack().eval()
        before, out = state_of(model), model(rows())
        plan = headrace.make_plan(model, Prefetch(params=["layers"], prefetch_step=2))
        assert state_of(model) == before
        assert plan.model_name == "Stack"
        with headrace.offload(model, plan) as handle:
            assert handle.plan == plan
            assert torch.equal(model(rows()), out)
            assert handle.stats().bytes_moved > 0

    def test_it_is_the_plan_that_offload_makes(self) -> None:
        model = Stack().eval()
        weight = sum(p.nbytes for p in model.parameters())
        budget = Budget(weight * 2 // 3, params=["layers"])
        plan = headrace.make_plan(model, budget)
        assert plan.units
        with headrace.offload(model, budget) as handle:
            assert handle.plan == plan

    def test_a_module_on_meta_with_a_checkpoint_of_its_weights(self, tmp_path: Path) -> None:
        live = Stack()
        save(live, tmp_path)
        model = on_meta(Stack)
        plan = headrace.make_plan(model, Prefetch(params=["layers"], mode="disk"), checkpoint=tmp_path, device="cpu")
        assert all(p.is_meta for p in model.parameters())
        with headrace.offload(model, plan, checkpoint=tmp_path, device="cpu") as handle:
            assert torch.equal(model(rows()), live(rows()))
            assert handle.stats().bytes_moved > 0

    @pytest.mark.slow
    def test_hundreds_of_gigabytes_on_meta(self) -> None:
        model = on_meta(Stack, num_layers=40, dim=40_000)
        plan = headrace.make_plan(model, "60GiB", machine="h200")
        assert plan.weight_bytes > 200 * 2**30
        assert 0 < plan.device_bytes <= 60 * 2**30

    @pytest.mark.parametrize("mode", SHARDED_MODES)
    def test_units_that_ranks_split(self, mode: Mode) -> None:
        model = Stack(dim=400)
        alone, split = (headrace.make_plan(model, Prefetch(mode=mode), num_ranks=ranks) for ranks in (1, 4))
        assert (alone.num_ranks, split.num_ranks) == (1, 4)
        assert part_bytes(split) < 0.3 * part_bytes(alone)
        assert "spans several processes: pass group=" in " ".join(str(split).split())
        for policy, ranks in ((Prefetch(), 2), (Prefetch(mode=mode), 0)):
            with pytest.raises(OptionError, match=f"num_ranks = {ranks}: expected at least 1"):
                headrace.make_plan(model, policy, num_ranks=ranks)

    def test_wrong_types(self) -> None:
        for name, value in (("num_ranks", 2.0), ("workload", [1, 16]), ("machine", 3), ("device", 1.5), ("disk", True)):
            with pytest.raises(OptionTypeError, match=f"^{name}: expected"):
                headrace.make_plan(Stack(), "1MiB", **{name: value})  # type: ignore[arg-type]

    def test_what_is_no_model(self) -> None:
        with pytest.raises(OptionTypeError, match=r"expected a torch\.nn\.Module or a folder, found int"):
            headrace.make_plan(3, "1GiB")  # type: ignore[arg-type]


class TestFolders:
    def test_load_carries_it_out_unchanged(self, tmp_path: Path) -> None:
        make("LlamaForCausalLM", **{**SIZE, "hidden_size": 256, "intermediate_size": 512}).save_pretrained(tmp_path)
        plan = headrace.make_plan(tmp_path, "4MiB", device="cpu")
        file = tmp_path / "plan.json"
        plan.save(file)
        assert headrace.Plan.load(file) == plan
        for given in (plan, headrace.Plan.load(file)):
            model, handle = load(tmp_path, given, device="cpu")
            assert handle.plan == plan
            assert torch.equal(forward(model), forward(resident(tmp_path)))
            assert handle.stats().bytes_moved > 0
            handle.remove()

    @pytest.mark.slow
    def test_it_is_the_plan_of_the_command_line(self, folder: Path) -> None:
        plan = headrace.make_plan(folder, "2MiB", workload=Workload([1, 4], context=32), device="cpu")
        flags = ("--device-memory", "2MiB", "--batch", "1,4", "--context", "32", "--device", "cpu")
        data = json.loads(run("plan", folder, *flags, "--json").stdout)
        prediction = data.pop("prediction")
        assert data == plan.to_json()
        assert [step["rows"] for step in prediction["steps"]] == [1, 4]
        shown = run("plan", folder, *flags).stdout
        assert [line.rstrip() for line in shown.splitlines()] == str(plan).splitlines()

    def test_a_plan_is_checked_against_the_model(self, folder: Path) -> None:
        plan = headrace.make_plan(folder, "2MiB", device="cpu")
        assert headrace.make_plan(folder, plan, device="cpu") == plan
        with pytest.raises(OptionError, match="made for another model"):
            headrace.make_plan(Stack(), plan)

    def test_in_another_dtype(self, tmp_path: Path) -> None:
        make("LlamaForCausalLM", **SIZE).save_pretrained(tmp_path)
        whole = headrace.make_plan(tmp_path)
        data = json.loads(run("plan", tmp_path, "--dtype", "bfloat16", "--json").stdout)
        plan = headrace.make_plan(tmp_path, dtype="bfloat16")
        assert data["model"] == plan.to_json()["model"]
        assert 0.5 * whole.weight_bytes <= plan.weight_bytes < 0.51 * whole.weight_bytes
        model, handle = load(tmp_path, plan, dtype=torch.bfloat16, device="cpu")
        with handle:
            assert torch.equal(forward(model), forward(resident(tmp_path, dtype=torch.bfloat16)))
        with pytest.raises(OptionError, match="leave dtype out"):
            headrace.make_plan(model, dtype="bfloat16")

    def test_a_folder_has_no_other_checkpoint(self, folder: Path) -> None:
        with pytest.raises(OptionError, match="a folder is its own checkpoint"):
            headrace.make_plan(folder, "2MiB", checkpoint=folder)


class TestWorkloads:
    def test_predictions_are_about_it_whatever_the_policy(self) -> None:
        for policy in (Prefetch(), Budget("1MiB"), "1MiB", None):
            plan = headrace.make_plan(Stack(dim=300), policy, workload=Workload([2, 64]))
            assert [forecast.rows for forecast in plan.prediction.forecasts] == [2, 64]  # type: ignore[attr-defined]

    def test_two_that_differ(self) -> None:
        budget = Budget("1MiB", workload=Workload([2]))
        with pytest.raises(OptionError, match="leave one out"):
            headrace.make_plan(Stack(), budget, workload=Workload([3]))


class TestRepeated:
    """What a call runs once leaves the device to what every step runs."""

    def two(self) -> torch.nn.Module:
        model = torch.nn.Module()
        model.once, model.steps = Stack(6, 256), Stack(6, 256)
        model.forward = lambda x: x
        return model

    @pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
    def test_residents(self, share: float) -> None:
        model, workload = self.two(), Workload(repeated=["steps"])
        size = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
        plan = headrace.make_plan(model, Budget(int(share * size), workload=workload))
        offloaded = {part: sum(n.startswith(part) for n in plan.offloaded_names) for part in ("once", "steps")}
        every = sum(name.startswith("once") for name, p in model.named_parameters() if p.nbytes >= 2**16)
        assert offloaded["once"] == every
        assert (offloaded["steps"] == 0) == (share > 0.5)
        assert plan.device_bytes <= share * size

    def test_rules_come_first_and_everything_may_fit(self) -> None:
        model, workload = self.two(), Workload(repeated=["steps"])
        rule = ("once.layers.0.linear", "resident")
        plan = headrace.make_plan(model, Budget("1MiB", workload=workload, rules=[rule]))
        assert plan.mechanism_of("once.layers.0.linear.weight") == "resident"
        assert plan.mechanism_of("once.layers.1.linear.weight") == "prefetch"
        with pytest.warns(HeadraceWarning, match="fit the budget"):
            assert not headrace.make_plan(model, Budget("1GiB", workload=workload)).units

    def test_a_name_that_is_none(self) -> None:
        with pytest.raises(SelectionError, match=r"pattern 'stepps' matches none"):
            headrace.make_plan(self.two(), Budget("1MiB", workload=Workload(repeated=["stepps"])))


# -- what would be refused later ---------------------------------------------------------------------------------------


class TestHonesty:
    def test_more_than_the_machine_has(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Said with both figures, after the plan and with an exit code; the plan is saved all the same."""
        monkeypatch.setattr("headrace.memory.system.host_available_bytes", lambda: 2**20)
        saved = folder / "saved.json"
        result = run("plan", folder, "--device-memory", "2MiB", "--device", "cpu", "--save", saved)
        assert result.exit_code == 1
        text = " ".join(result.stdout.split())
        assert "Predicted steps" in text
        assert "This plan does not fit this machine: the plan needs" in text
        assert "of host memory, and 1.00 MiB (1048576 bytes) can be had" in text
        with pytest.warns(HeadraceWarning, match="the plan does not fit this machine"):
            plan = headrace.make_plan(folder, headrace.Plan.load(saved), device="cpu")
        assert "does not fit this machine" in " ".join(str(plan).split())
        with pytest.raises(LimitError):
            load(folder, plan, device="cpu")

    def test_more_than_another_machine_has(self) -> None:
        model = on_meta(Stack, num_layers=12, dim=40_000)
        with pytest.warns(HeadraceWarning, match="does not fit NVIDIA GeForce RTX 4090 with 23"):
            headrace.make_plan(model, "40GiB", machine="4090")

    def test_caches_of_the_workload_count(self, folder: Path) -> None:
        with pytest.warns(HeadraceWarning, match="fit this machine.* activations of batch 4000000 at 400 tokens take"):
            headrace.make_plan(folder, Prefetch(mode="disk"), workload=Workload([4_000_000], 400), device="cpu")

    def test_without_a_policy_nothing_has_to_fit(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.memory.system.host_available_bytes", lambda: 2**10)
        assert run("plan", folder, "--device", "cpu").exit_code == 0

    @pytest.mark.parametrize(("mode", "said"), [("meta", "cannot be carried out"), ("shm_cpu", "torchrun")])
    def test_modes_that_need_more_than_one_process_or_keep_nothing(self, mode: str, said: str, folder: Path) -> None:
        shown = run("plan", folder, "--device-memory", "2MiB", "--offload-mode", mode).stdout
        assert said in " ".join(shown.split())

    def test_a_config_without_a_class(self, tmp_path: Path) -> None:
        """With its head where the files hold one; else what is taken, and what is left out, is said."""
        make("LlamaForCausalLM", **SIZE).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        del config["architectures"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.warns(HeadraceWarning, match="taken for a LlamaForCausalLM$"):
            plan = headrace.make_plan(tmp_path)
        assert "lm_head.weight" in plan.resident
        with pytest.warns(HeadraceWarning, match="taken for a LlamaForCausalLM$"):
            model, handle = load(tmp_path, Prefetch(params=["layers"]), device="cpu")
        with handle:
            expected = aligned(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
            assert torch.equal(forward(model), forward(expected))
            assert handle.stats().bytes_moved > 0
        rewrite(tmp_path, lambda tensors: tensors.update(extra=tensors.pop("lm_head.weight")))
        with pytest.warns(HeadraceWarning) as warned:
            plan = headrace.make_plan(tmp_path)
        assert "lm_head.weight" not in plan.resident
        texts = [str(each.message) for each in warned]
        assert any('taken for a LlamaModel; for text name LlamaForCausalLM there, "architectures"' in t for t in texts)
        assert any("1 tensor (extra)" in text and "not used: LlamaModel does not have it" in text for text in texts)

    @pytest.mark.slow
    def test_what_of_the_files_is_missing(self, tmp_path: Path) -> None:
        make("LlamaForCausalLM", **SIZE).save_pretrained(tmp_path)
        rewrite(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
        with pytest.warns(HeadraceWarning, match=r"1 tensor \(model\.norm\.weight\) of LlamaForCausalLM not in"):
            headrace.make_plan(tmp_path)
        assert "model.norm.weight" in run("plan", tmp_path).stderr

    def test_convolutions_in_place_where_they_may_round_differently(self, tmp_path: Path) -> None:
        model = torch.nn.Sequential(*(torch.nn.Conv2d(64, 64, 3) for _ in range(2))).eval()
        for padding in range(0, 64, 8):
            save_file(dict(model.state_dict()), tmp_path / "model.safetensors", {"padding": "x" * padding})
            if all(tensor.offset % 64 for tensor in Checkpoint.open(tmp_path).tensors.values()):
                break
        for call in (headrace.make_plan, headrace.offload):
            message = r"2 tensors .* cannot be read in place: 0\.weight starts \d+ bytes"
            with pytest.raises(SelectionError, match=message):
                call(model, UVA(mode="disk"), checkpoint=tmp_path)

    def test_files_of_another_form_than_the_model(self, tmp_path: Path) -> None:
        model = OddStack().eval()
        save(model, tmp_path)
        for call in (headrace.make_plan, headrace.offload):
            with pytest.raises(errors.CheckpointError, match="the file is row-major"):
                call(model, Prefetch(params=["layers"], mode="disk"), checkpoint=tmp_path)

    def test_files_that_nobody_named(self) -> None:
        """Sizes alone are fine; what is missing later is said."""
        with pytest.warns(HeadraceWarning, match="pass checkpoint=FOLDER here and to headrace.offload"):
            plan = headrace.make_plan(Stack(), Prefetch(params=["layers"], mode="disk"))
        assert plan.units

    @pytest.mark.slow
    def test_a_workload_beyond_the_budget_names_those_that_fit(self, folder: Path) -> None:
        args = ("plan", folder, "--device", "cpu", "--device-memory", "40MiB")
        message = error_of(*args, "--batch", "1,500", "--context", "256")
        found = re.search(r"fits --batch (\d+) at 256 tokens, or --context (\d+) with batch 500", message)
        assert found is not None, message
        largest, longest = map(int, found.groups())
        for batch, context in ((largest, 256), (500, longest)):
            assert run(*args, "--batch", batch, "--context", context).exit_code == 0
        for batch, context in ((largest + 1, 256), (500, longest + 1)):
            assert "too small" in error_of(*args, "--batch", batch, "--context", context)

    @pytest.mark.slow
    def test_more_memory_is_never_slower(self) -> None:
        """On average over the batch sizes of the workload."""
        with torch.device("meta"):
            model = make("Qwen3MoeForCausalLM", torch.bfloat16, **MIXTURE)
        workload, weights = Workload([1, 16, 256]), sum(p.nbytes for p in model.parameters())
        averages = []
        for share in (1, 2, 3, 4):
            planned = plan_model(PlanRequest(model, Budget(weights * share // 12), workload=workload, machine="h200"))
            averages.append(sum(math.log(forecast.step_s) for forecast in planned.prediction.forecasts))
        assert averages == sorted(averages, reverse=True)
        assert len(set(averages)) > 2


# -- machines ----------------------------------------------------------------------------------------------------------


class TestMachines:
    @pytest.mark.slow
    def test_names(self, folder: Path) -> None:
        for name, device in (("h200", "H200"), ("h100", "H100"), ("4090", "4090")):
            plan = headrace.make_plan(folder, "2MiB", machine=name)
            data = json.loads(run("plan", folder, "--device-memory", "2MiB", "--machine", name, "--json").stdout)
            prediction = data.pop("prediction")
            assert data == plan.to_json()
            assert plan.made_for is not None
            assert device in plan.made_for.device
            assert plan.mode == "cpu", "a GPU takes its weights from host memory"
            nominal = name != "h200"
            assert prediction["is_measured"] is not nominal
            assert ("nominal" in prediction["machine"]) is nominal

    def test_unknown_names_list_the_known(self, folder: Path) -> None:
        message = error_of("plan", folder, "--device-memory", "2MiB", "--machine", "h900")
        assert all(name in message for name in (*MACHINES, "h900", "headrace probe --json"))

    def test_faster_machines_are_faster(self, folder: Path) -> None:
        def step_s(machine: str) -> float:
            model = on_meta(Stack, num_layers=12, dim=8000)
            plan = headrace.make_plan(model, Prefetch(), machine=machine)
            return float(plan.prediction.forecasts[0].step_s)  # type: ignore[attr-defined]

        assert step_s("h200") < 1.1 * step_s("h100") < step_s("4090")

    def test_the_h200_is_the_one_that_was_measured(self) -> None:
        measured = Probe.from_json(json.loads(REPORT.read_text())).gpu_rates()
        machine, shipped = named_machine("H200")
        assert machine.device == "NVIDIA H200"
        assert measured is not None
        for name in ("copy", "device"):
            key = f"{name}_bytes_per_s"
            found, expected = getattr(shipped, key), getattr(measured, key)
            pairs = [(found, expected)] if name == "device" else zip(found.points, expected.points, strict=True)
            assert all(one == pytest.approx(other, rel=1e-3) for one, other in pairs)

    def test_a_cpu_only_machine_points_to_the_names(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
        message = error_of("plan", folder, "--device-memory", "2MiB", "--device", "cuda")
        assert "--machine 4090, h200" in message

    def test_machine_and_device(self) -> None:
        with pytest.raises(OptionError, match="machine and device contradict"):
            headrace.make_plan(Stack(), "1MiB", machine="h200", device="cuda")

    def test_a_plan_for_another_machine_is_not_carried_out_here(self) -> None:
        model = Stack(dim=300)
        plan = headrace.make_plan(model, "1MiB", machine="4090")
        assert plan.made_for == Machine("NVIDIA GeForce RTX 4090", 47 * 2**29)
        with pytest.raises(OptionError, match="made for another machine"):
            headrace.offload(model, plan)


# -- how it shows itself -----------------------------------------------------------------------------------------------


class TestShown:
    @pytest.mark.parametrize("columns", [80, 100, 160])
    def test_printed_at_the_width_of_the_terminal(
        self, columns: int, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        text = str(headrace.make_plan(folder, "2MiB", workload=Workload([1, 16]), device="cpu"))
        assert "Predicted steps" in text
        assert "Tensors by role" in text
        assert 70 < max(map(len, text.splitlines())) <= columns

    def test_a_line_for_debuggers_and_a_table_for_notebooks(self, folder: Path) -> None:
        plan = headrace.make_plan(folder, "2MiB", device="cpu")
        assert repr(plan).startswith("<headrace.Plan tiny: ")
        assert len(repr(plan)) < 120
        html = plan._repr_html_()
        assert html.startswith("<pre")
        assert "Predicted steps" in html

    def test_without_a_policy_the_smallest_budget(self, folder: Path) -> None:
        text = str(headrace.make_plan(folder, device="cpu"))
        assert "weighs" in text
        assert "The smallest budget is --device-memory" in text

    def test_predictions_are_not_carried_to_another_plan(self, folder: Path, tmp_path: Path) -> None:
        plan = headrace.make_plan(folder, "2MiB", device="cpu")
        plan.save(tmp_path / "plan.json")
        assert "prediction" not in json.loads((tmp_path / "plan.json").read_text())
        for other in (replace(plan, num_ranks=2), headrace.Plan.load(tmp_path / "plan.json")):
            assert other.prediction is None
            assert "Predicted steps" not in str(other)


# -- one door ----------------------------------------------------------------------------------------------------------

MODES = st.sampled_from(get_args(Mode))
NAMES = st.sampled_from(((), (), (ALL_MODEL_PARAMS,), ("layers",), ("experts",), ("re:.*weight",)))
RULES = st.tuples(
    st.sampled_from(("experts", "layers", "head")), st.sampled_from(("prefetch", "uva", "cache", "resident"))
)


@st.composite
def policies(draw: st.DrawFn, weight_bytes: int) -> Callable[[], Policy]:
    """What makes a policy of any kind, for a model of that size; some are wrong for it."""
    kind, mode, names = draw(st.sampled_from(("prefetch", "uva", "rules", "budget"))), draw(MODES), draw(NAMES)
    slots, rules = draw(st.sampled_from((None, 1, 2))), draw(st.lists(RULES, min_size=1, max_size=2))
    if kind == "prefetch":
        return partial(Prefetch, draw(st.integers(1, 3)), 1, draw(st.integers(1, 8)), names, mode)
    if kind == "uva":
        return partial(UVA, draw(st.sampled_from((1, 5_000, 10**9))), names, mode)
    if kind == "rules":
        return partial(Rules, rules, mode=mode, expert_slots=slots)
    num_bytes = int(draw(st.sampled_from((0.1, 0.4, 0.6, 0.8, 0.95, 1.5))) * weight_bytes)
    some, peer = draw(st.sampled_from(((), (), rules))), draw(st.sampled_from((None, None, "1MiB")))
    chosen = draw(st.none() | MODES)
    return partial(Budget, num_bytes, names, mode=chosen, rules=some, expert_slots=slots, peer_memory=peer)


TOKENS = torch.arange(6)
SMALL: dict[str, tuple[Callable[[], torch.nn.Module], torch.Tensor]] = {
    "stack": (lambda: Stack(6), rows()),
    "experts": (MoE, TOKENS),
    "odd": (OddStack, rows()),
    "transformers": (qwen, TOKENS[None]),
}


def outcome(call: Callable[[], Any]) -> tuple[Any, set[str]]:
    """What a call returns, or the type of its error, and its warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            found = call()
        except errors.HeadraceError as error:
            found = type(error)
    return found, {str(warning.message) for warning in seen}


@torch.no_grad()
def output(model: torch.nn.Module, given: torch.Tensor) -> Any:
    out = model(given)
    return getattr(out, "logits", out)


def held_bytes(model: torch.nn.Module, handle: headrace.Handle) -> int:
    """Device memory that weights have: residents by the tensors of the model, and slots."""
    resident, tensors = handle.plan.resident, chain(model.named_parameters(), model.named_buffers())
    live = {tensor.untyped_storage().data_ptr(): tensor.nbytes for name, tensor in tensors if name in resident}
    prefetcher = handle._session.prefetcher
    slots = [] if prefetcher is None else [slot.memory for slot in prefetcher.replays.live]
    return sum(live.values()) + sum(memory.nbytes for memory in slots if memory is not None)


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
class TestOneDoor:
    """What ``make_plan`` returns without a warning ``offload`` takes, and what one refuses, the other does."""

    @pytest.mark.slow
    @settings(max_examples=200, deadline=None)
    @hypothesis.given(data=st.data(), name=st.sampled_from(sorted(SMALL)))
    def test_it_is_that_of_the_offload(
        self, data: st.DataObject, name: str, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        model, given = SMALL[name][0]().eval(), SMALL[name][1]
        policy, _ = outcome(data.draw(policies(headrace.make_plan(model).weight_bytes), "policy"))
        assume(not isinstance(policy, type))
        expected = output(model, given)
        options: dict[str, Any] = {"disk": data.draw(st.sampled_from((None, None, DiskOptions())), "disk")}
        if data.draw(st.booleans(), "checkpoint"):
            options["checkpoint"] = save(model, tmp_path_factory.mktemp("door"))
        free = data.draw(st.sampled_from((2**40, 2**40, 2_000)), "free host memory")
        interpreter = data.draw(st.sampled_from("01"), "TRITON_INTERPRET")
        with (
            patch("headrace.memory.system.host_available_bytes", lambda: free),
            patch.dict(os.environ, {"TRITON_INTERPRET": interpreter}),
        ):
            plan, warned = outcome(lambda: headrace.make_plan(model, policy, **options))
            group = {"group": dist.new_group()} if policy.mode in RANK_MODES else {}
            handle, told = outcome(lambda: headrace.offload(model, policy, **options, **group))
        if isinstance(plan, type):
            assert handle is plan
        elif isinstance(handle, type):
            why = {LimitError: "does not fit this machine", OptionError: "pass checkpoint=FOLDER"}[handle]
            assert any(why in text for text in warned)
        else:
            with handle:
                assert handle.plan == plan
                assert {text for text in warned if "does not fit" not in text} == told
                assert torch.equal(output(model, given), expected)
                assert held_bytes(model, handle) <= plan.device_bytes
                assert handle.stats().bytes_moved > 0 or not plan.units

    def test_a_budget_that_all_weights_fit_needs_no_files(self) -> None:
        model, given = SMALL["experts"][0]().eval(), SMALL["experts"][1]
        expected, budget = output(model, given), Budget("1MiB", mode="disk")
        plan, warned = outcome(lambda: headrace.make_plan(model, budget))
        with headrace.offload(model, plan) as handle:
            assert handle.plan == plan
            assert not plan.offloaded_bytes
            assert torch.equal(output(model, given), expected)
        assert all("nothing is offloaded" in text for text in warned)

    def test_cached_experts_on_a_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRITON_INTERPRET")
        for call in (headrace.make_plan, headrace.offload):
            with pytest.raises(OptionError, match="are cached, and the device is a CPU; expected a CUDA device"):
                call(qwen(), Rules([("experts", "cache")], expert_slots=2))

    def test_implementations_of_experts_that_add_up_in_order(self) -> None:
        for call in (headrace.make_plan, headrace.offload):
            with pytest.raises(
                OptionError,
                match=r"run by 'eager', and cached experts need one of .* \(rules=\[\('experts', 'uva'\)\], --",
            ):
                call(qwen("eager"), Rules([("experts", "cache")], expert_slots=2))

    def test_a_module_that_keeps_addresses_of_its_weights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As a layer of ExLlama's does."""
        monkeypatch.setitem(sys.modules, "gptqmodel", ModuleType("gptqmodel"))  # whose layer it is
        model = Stack()
        vars(model.layers[3].linear)["q_handle"] = object()
        for machine in (None, "h200"):
            with pytest.raises(OptionError, match="runs on addresses that it took once"):
                headrace.make_plan(model, "20KiB", machine=machine)

    def test_weights_that_are_offloaded_already(self) -> None:
        model, policy = Stack().eval(), Prefetch(params=["layers"])
        with headrace.offload(model, policy), pytest.raises(StateError, match="is offloaded already"):
            headrace.make_plan(model, policy)

    def test_more_device_memory_than_the_weights_have(self) -> None:
        """Cached experts are mapped in pieces of 2 MiB."""
        for call in (headrace.make_plan, headrace.offload):
            with pytest.warns(HeadraceWarning, match=r"takes [\d.]+ MiB of device memory, more than all weights"):
                call(qwen(), Rules([("experts", "cache")], expert_slots=2))

    def test_options_without_effect(self, tmp_path: Path) -> None:
        model = Stack()
        for call in (headrace.make_plan, headrace.offload):
            with pytest.warns(HeadraceWarning, match=r"checkpoint=\.\.\. has no effect: mode 'cpu' takes"):
                call(model, Prefetch(params=["layers"]), checkpoint=save(model, tmp_path))

    def test_a_store_without_bytes(self) -> None:
        for call in (headrace.make_plan, headrace.offload):
            with pytest.raises(OptionError, match="mode 'meta' keeps no bytes, and layers"):
                call(Stack(), Prefetch(params=["layers"], mode="meta"))
