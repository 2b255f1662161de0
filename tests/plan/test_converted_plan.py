"""The promise: plans count a converted checkpoint by the model's bytes, and its reading by those of the files."""

from __future__ import annotations

import pytest
import torch

from checkpoints import HEADS, SIZE, make
from headrace.adapters.transformers.opened_model import OpenedModel, open_model
from headrace.config import ALL_MODEL_PARAMS, Budget, Prefetch
from headrace.errors import OptionError
from headrace.plan.build import Planner
from headrace.plan.nominal_rates import NOMINAL_CPU, NOMINAL_GPU
from headrace.plan.plan import Machine
from headrace.planning.checks import finalize_plan
from headrace.planning.context import make_planner
from plans import memory_curve

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpenedModel]:
    """A model in bfloat16: of files that hold float32, and of files that hold bfloat16."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("float32", "bfloat16")}
    model = make("Qwen3ForCausalLM", **SIZE, **HEADS, head_dim=16)
    for dtype, folder in folders.items():
        model.to(getattr(torch, dtype)).save_pretrained(folder)
    return {dtype: open_model(folder, "bfloat16") for dtype, folder in folders.items()}


def planner(opened: OpenedModel, device: torch.device = CPU) -> Planner:
    rates = NOMINAL_GPU if device == GPU else NOMINAL_CPU
    return make_planner(opened.inventory, opened.profile(), device, opened.weights, rates, opened.unstreamable)


@pytest.mark.parametrize("mode", ["disk", "cpu"])
def test_sizes_are_those_of_the_model(mode: str, opened: dict[str, OpenedModel]) -> None:
    policy = Prefetch(prefetch_step=2, params=[ALL_MODEL_PARAMS], mode=mode)  # type: ignore[arg-type]
    converted, same = (planner(one).plan(policy) for one in opened.values())
    assert converted == same
    assert converted.offloaded_bytes > 0


def test_reading_is_that_of_the_files(opened: dict[str, OpenedModel]) -> None:
    """Twice the bytes for float32; where memory holds what was converted once, as many as ever."""
    policy = Prefetch(params=[ALL_MODEL_PARAMS], mode="disk")
    for mode, ratio in (("disk", 2.0), ("cpu", 1.0)):
        plans = [planner(one).plan(Prefetch(params=policy.params, mode=mode)) for one in opened.values()]  # type: ignore[arg-type]
        times = [planner(one).forecast(made, 1).link_s for one, made in zip(opened.values(), plans, strict=True)]
        assert times[0] == pytest.approx(ratio * times[1])
        assert times[1] > 0


def test_the_time_of_a_budget_counts_them_too(opened: dict[str, OpenedModel]) -> None:
    """What the solver compares is what is predicted for the plan that it picks."""
    for one in opened.values():
        mine = planner(one)
        budget = Budget(int(0.7 * one.inventory.num_bytes), params=[ALL_MODEL_PARAMS])
        made = mine.plan(budget)
        points = {point.device_bytes: point for point in memory_curve(mine, budget)}
        best = min(p.step_s[0] for size, p in points.items() if size <= budget.num_bytes)
        assert mine.forecast(made, 1).step_s == pytest.approx(best)
        assert made.moved_bytes > 0


def test_a_gpu_keeps_what_is_converted_in_host_memory(opened: dict[str, OpenedModel]) -> None:
    """The process that reads files for it runs without torch."""
    converted, same = opened.values()
    budget = Budget("300KiB", params=[ALL_MODEL_PARAMS], host_memory="1GiB")
    made = planner(converted, GPU).plan(budget)
    assert finalize_plan(made, converted.inventory, GPU, Machine("cuda"), converted.weights) == made
    assert made.offloaded_bytes > 0
    assert not made.staged_units
    spill = planner(converted, GPU).spill
    assert spill is not None
    assert spill.unstreamable == {storage.name for storage in converted.inventory.storages}
    policy = Prefetch(params=[ALL_MODEL_PARAMS], mode="disk")
    with pytest.raises(OptionError, match="have another dtype in the files than in the model, and a GPU reads"):
        finalize_plan(
            planner(converted, GPU).plan(policy), converted.inventory, GPU, Machine("cuda"), converted.weights
        )
    assert finalize_plan(
        planner(same, GPU).plan(policy), same.inventory, GPU, Machine("cuda"), same.weights
    ).staged_units
