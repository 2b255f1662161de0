"""What the planner predicts against measurements on a GPU, and against settings made by hand.

    python benchmarks/plan_predictions.py [--model qwen3-8b] [--rivals 4/1/1,4/1/2] [--rows 1,256] [--out FILE.jsonl]

For each budget (a share of the weights) and each number of rows a plan is made by the rates of this machine, run, and
compared with its prediction. Each hand-made setting is run beside the plan that headrace makes for the device memory
that this setting takes. All run as one captured graph, interleaved, and must give the bits of the resident stack.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import headrace
from decoder_models import DEEPSEEK_V2_LITE, MoeStack
from harness import append, capture, counts, finish, interleave, numbers, parser_of, time_cuda
from headrace.cli.bench_step import QWEN3_8B, Stack, fill
from headrace.config import UVA, Budget, Prefetch, Workload
from headrace.model.inventory import Inventory, take_inventory
from headrace.model.memory_profile import ModelProfile
from headrace.plan.build import build_plan
from headrace.plan.cost_model import Forecaster
from headrace.plan.plan import Plan, assemble
from headrace.plan.rates import Rates
from headrace.transfer.machine_probe import Probe, load, save
from headrace.transfer.measuring import measure

STACKS = ("qwen3-8b", "deepseek-v2-lite")

# Of one round of variants that live side by side; what does not fit waits for the next round.
_HOST_BYTES = 88 * 2**30
_DEVICE_BYTES = 110 * 2**30


@dataclass
class Contest:
    """Plans that are compared with one another at one amount of device memory.

    Attributes:
        name: the share of the weights, or the rival's setting.
        plans: by name; "headrace" plans have the rows they were made for.
        rows: which rows each is run with.
    """

    name: str
    plans: dict[str, Plan] = field(default_factory=dict)
    rows: dict[str, list[int]] = field(default_factory=dict)

    def add(self, name: str, plan: Plan, rows: Sequence[int]) -> None:
        """One more plan; one that is there under another name gets the rows."""
        known = next((key for key, other in self.plans.items() if other == plan and name.startswith("headrace")), None)
        self.plans.setdefault(known or name, plan)
        self.rows.setdefault(known or name, []).extend(rows)

    @property
    def host_bytes(self) -> int:
        """Of all its plans."""
        return sum(plan.offloaded_bytes for plan in self.plans.values())

    @property
    def device_bytes(self) -> int:
        """Of all its plans."""
        return sum(plan.device_bytes for plan in self.plans.values())


def build(name: str) -> tuple[nn.Module, ModelProfile]:
    """The stack of this name on ``meta``, and its profile."""
    with torch.device("meta"):
        if name == "qwen3-8b":
            return Stack(QWEN3_8B, torch.bfloat16, "meta"), ModelProfile()
        profile = ModelProfile(experts_per_token=DEEPSEEK_V2_LITE.experts_per_token)
        return MoeStack(DEEPSEEK_V2_LITE, torch.bfloat16), profile


class Planner:
    """Makes the contests of one stack."""

    def __init__(self, inventory: Inventory, rates: Rates, profile: ModelProfile, rows: Sequence[int]) -> None:
        self._inventory, self._rates, self._profile, self._rows = inventory, rates, profile, rows

    def at_share(self, share: float) -> Contest:
        """headrace's plans for this share of the weights, and as much read in place as the others move."""
        budget = int(self._inventory.num_bytes * share)
        contest = self._contest(f"{share:.0%}", budget)
        contest.add("uva", build_plan(self._inventory, UVA(self._inventory.num_bytes - budget)), self._rows)
        return contest

    def against(self, setting: str) -> Contest:
        """A group rule, and headrace's plans for the memory it takes."""
        size, number, step = (int(part) for part in setting.split("/"))
        rival = build_plan(self._inventory, Prefetch(size, number, step))
        contest = self._contest(setting, rival.device_bytes)
        contest.add(f"group:{setting}", rival, self._rows)
        return contest

    def _contest(self, name: str, device_bytes: int) -> Contest:
        contest = Contest(name)
        for rows in self._rows:
            budget = Budget(device_bytes, workload=Workload([rows]), codec="none")
            plan = build_plan(self._inventory, budget, rates=self._rates, profile=self._profile, zero_copy=True)
            contest.add(f"headrace, made for {rows} rows", plan, [rows])
        return contest


def split(contest: Contest) -> list[Contest]:
    """By rows, until each part fits the machine."""
    every = sorted({count for rows in contest.rows.values() for count in rows})
    if contest.host_bytes <= _HOST_BYTES or len(every) == 1:
        return [contest]
    halves = every[: len(every) // 2], every[len(every) // 2 :]
    return [part for half in halves for part in split(_with_rows(contest, half))]


def _with_rows(contest: Contest, wanted: Sequence[int]) -> Contest:
    part = Contest(contest.name)
    for name, plan in contest.plans.items():
        if rows := [count for count in contest.rows[name] if count in wanted]:
            part.add(name, plan, rows)
    return part


def rounds_of(contests: Sequence[Contest]) -> Iterator[list[Contest]]:
    """Contests that fit the machine side by side."""
    waiting = sorted((part for contest in contests for part in split(contest)), key=lambda part: -part.host_bytes)
    while waiting:
        chosen = [waiting.pop(0)]
        for contest in list(waiting):
            together = [*chosen, contest]
            fits_host = sum(c.host_bytes for c in together) <= _HOST_BYTES
            if fits_host and sum(c.device_bytes for c in together) <= _DEVICE_BYTES:
                chosen.append(contest)
                waiting.remove(contest)
        yield chosen


@dataclass
class _Running:
    """A stack under a plan on the device."""

    contest: str
    name: str
    plan: Plan
    rows: list[int]
    model: nn.Module
    own_bytes: int = 0
    handle: headrace.Handle | None = None
    steps: dict[int, Any] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    peak_bytes: dict[int, int] = field(default_factory=dict)


def _start(contest: str, name: str, plan: Plan, rows: list[int], stack: str, device: torch.device) -> _Running:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    # Born on the device: from there the weights reach the store at the link's rate.
    running = _Running(contest, name, plan, rows, fill(build(stack)[0], device, device))
    if plan.units or plan.uva:
        running.handle = headrace.offload(running.model, plan, device=device)
    gc.collect()
    running.own_bytes = torch.cuda.memory_allocated(device) - before
    return running


def _prepare(running: _Running, x: torch.Tensor) -> None:
    """Warm up, measure memory, capture."""
    rows = len(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        out = running.model(x)
    torch.cuda.synchronize()
    running.peak_bytes[rows] = running.own_bytes + torch.cuda.max_memory_allocated() - before
    del out
    running.steps[rows], running.outputs[rows] = capture(lambda: running.model(x))


def run(
    stack: str,
    shares: Sequence[float],
    rivals: Sequence[str],
    rows: Sequence[int],
    rounds: int,
    repeats: int,
    probe: Probe,
) -> Iterator[dict[str, Any]]:
    """Yield one result per contest, plan and number of rows."""
    rates = probe.gpu_rates()
    if rates is None:
        raise SystemExit("this benchmark needs a CUDA device; there is none here")
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.no_grad():
        model, profile = build(stack)
        inventory = take_inventory(model)
        planner = Planner(inventory, rates, profile, rows)
        contests = [planner.at_share(share) for share in shares] + [planner.against(rival) for rival in rivals]
        for together in rounds_of(contests):
            for result in _measure(together, stack, rows, rounds, repeats, device):
                seen = Forecaster(inventory, rates, profile, result["rows"])(result.pop("plan"))
                predicted = {"predicted_ms": seen.step_s * 1e3, "floor_ms": seen.floor_s * 1e3, "bound": seen.bound}
                yield {"stack": stack, **result, **predicted, "error": seen.step_s * 1e3 / result["ms"] - 1}


def _measure(
    contests: Sequence[Contest], stack: str, rows: Sequence[int], rounds: int, repeats: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    everything = assemble(take_inventory(build(stack)[0]), [], 0, "cpu")
    resident = _start("100%", "resident", everything, list(rows), stack, device)
    variants = [resident]
    for contest in contests:
        variants += [
            _start(contest.name, name, plan, contest.rows[name], stack, device) for name, plan in contest.plans.items()
        ]
    hidden = next(iter(resident.model.parameters())).shape[-1]
    for count in rows:
        if not any(count in variant.rows for variant in variants[1:]):
            continue
        generator = torch.Generator(device=device).manual_seed(count)
        x = torch.randn(count, hidden, device=device, generator=generator).to(torch.bfloat16)
        taking_part = [variant for variant in variants if count in variant.rows]
        for variant in taking_part:
            _prepare(variant, x)
        steps = {f"{v.contest} {v.name}": v.steps[count] for v in taking_part}
        timings = interleave(steps, rounds, repeats, time_cuda)
        activations = resident.peak_bytes[count] - resident.own_bytes
        for variant in taking_part:
            variant.steps[count]()
            torch.cuda.synchronize()
            timing = timings[f"{variant.contest} {variant.name}"]
            plan = variant.plan
            yield {
                "case": variant.name,
                "contest": variant.contest,
                "rows": count,
                "ms": timing.ms,
                "spread_ms": timing.spread_ms,
                "resident_ms": timings["100% resident"].ms,
                "bytes_moved": plan.moved_bytes,
                "uva_bytes": plan.uva_bytes,
                "peak_device_bytes": variant.peak_bytes[count],
                "planned_device_bytes": plan.device_bytes + activations,
                "bit_equal": bool(torch.equal(variant.outputs[count], resident.outputs[count])),
                "num_units": len(plan.units),
                "num_slots": plan.num_slots,
                "plan": plan,
            }
        for variant in taking_part:
            del variant.steps[count], variant.outputs[count]


def describe(row: dict[str, Any]) -> str:
    """One line about one result."""
    over_mib = (row["peak_device_bytes"] - row["planned_device_bytes"]) / 2**20
    return (
        f"{row['contest']:>6} {row['case']:<32} {row['rows']:>5} rows  predicted {row['predicted_ms']:9.2f}  "
        f"measured {row['ms']:9.2f} ms  error {row['error']:+7.1%}  memory {over_mib:+6.0f} MiB  "
        f"{'same bits' if row['bit_equal'] else 'OTHER BITS'}"
    )


def main() -> None:
    parser = parser_of(__doc__, rounds=3, repeats=3)
    parser.add_argument("--model", choices=STACKS, default=STACKS[0], help="a stack of that shape")
    parser.add_argument(
        "--shares", type=numbers, default=[0.1, 0.25, 0.5, 0.75], help="budgets as shares of the weights"
    )
    parser.add_argument("--rivals", default="", help="group rules to compare with, GROUP/NUMBER/STEP,...")
    parser.add_argument("--rows", type=counts, default=[1, 16, 256, 2048], help="rows per step")
    given = parser.parse_args()
    probe = load()
    if probe is None:
        probe = measure()
        save(probe)
    rivals = [rival for rival in given.rivals.split(",") if rival]
    results = []
    for row in run(given.model, given.shares, rivals, given.rows, given.rounds, given.repeats, probe):
        results.append(row)
        print(describe(row), flush=True)
        append(row, given.out)
    errors = sorted(abs(row["error"]) for row in results)
    finish("plan", results, median_error=errors[len(errors) // 2], worst_error=errors[-1])


if __name__ == "__main__":
    main()
