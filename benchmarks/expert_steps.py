"""Steps of layers of experts that replay a trace: cached, in place and resident.

    python benchmarks/expert_steps.py --device cuda --hits 0.5,0.9 --slots 32 --out FILE
    python benchmarks/expert_steps.py --trace choices.npz --slots 32,48,64       on a CPU: hits alone, nothing is timed

    floor = bytes of the experts that a step fetches or reads in place / host-to-device rate + resident step

All terms are measured in the run. Attention and dense layers are left out: they do not depend on where experts are. A
trace is what ``headrace generate --expert-trace`` recorded, or made from a seed, or one that hits stated shares.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import headrace
from harness import LinkProbe, append, capture, counts, finish, interleave, parser_of, time_cuda, time_host
from headrace.cli.bench_step import fill
from headrace.config import Rules
from headrace.plan.routing_traces import Recorded, Trace, load_trace, lru_hits, seeded_trace


@dataclass(frozen=True)
class ExpertsShape:
    """Layers of experts of a published model, in bfloat16."""

    num_layers: int
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def expert_bytes(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.intermediate * torch.bfloat16.itemsize


SHAPES = {
    "deepseek-v2-lite": ExpertsShape(26, 64, 6, 2048, 1408),
    "qwen3-30b-a3b": ExpertsShape(48, 128, 8, 2048, 768),
    "gpt-oss-20b": ExpertsShape(24, 32, 4, 2880, 2880),
}


def seeded(shape: ExpertsShape, num_tokens: int) -> Recorded:
    """A seeded trace for every layer."""
    layers = (seeded_trace(layer, num_tokens, shape.num_experts, shape.top_k) for layer in range(shape.num_layers))
    return Recorded(tuple(layers), shape.num_experts)


def driven(shape: ExpertsShape, num_tokens: int, hits: float) -> Recorded:
    """A trace of which a cache of at most ``num_experts - top_k`` slots hits the share ``hits``.

    Each token uses that share of the experts of the one before, and others that were not used for longest.
    """
    layers = []
    for layer in range(shape.num_layers):
        order = [
            (expert + layer) % shape.num_experts for expert in range(shape.num_experts)
        ]  # least recently used first
        trace = np.empty((num_tokens, shape.top_k), np.int32)
        owed = 0.0
        for token in range(num_tokens):
            owed += hits * shape.top_k if token else 0.0
            num_kept = int(owed + 1e-9)
            owed -= num_kept
            chosen = order[len(order) - num_kept :] + order[: shape.top_k - num_kept]
            order = [expert for expert in order if expert not in chosen] + chosen
            trace[token] = chosen
        layers.append(trace)
    return Recorded(tuple(layers), shape.num_experts)


class _Layer(nn.Module):
    """Experts as grouped products over rows in the order of their experts."""

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__()
        sizes = ((2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate))
        self.up, self.down = (
            nn.Parameter(torch.empty(shape.num_experts, *size, dtype=torch.bfloat16)) for size in sizes
        )

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        experts, rows = headrace.expert_rows(self, ids)
        sorted_rows, order = rows.flatten().sort(stable=True)
        bounds = torch.arange(1, experts.up.shape[0] + 1, device=x.device, dtype=rows.dtype)
        ends = torch.searchsorted(sorted_rows, bounds).int()
        hidden = F.rms_norm(x, x.shape[-1:])  # or values would grow with every layer
        gate, up = F.grouped_mm(hidden[order // ids.shape[1]], experts.up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        down = F.grouped_mm(F.silu(gate) * up, experts.down.transpose(1, 2), offs=ends)
        return x + torch.empty_like(down).index_copy_(0, order, down).view(*ids.shape, -1).sum(1)


class _Stack(nn.Module):
    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_layers))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for layer, chosen in zip(self.layers, ids, strict=True):
            x = layer(x, chosen)
        return x


class _Case:
    """A stack under one policy (``None``: resident), whose steps take their ids from the trace, one after another."""

    def __init__(
        self, name: str, shape: ExpertsShape, policy: Rules | None, ids: torch.Tensor, x: torch.Tensor
    ) -> None:
        self.name, self._ids, self._at, self._x = name, ids, 0, x
        on_gpu = x.device.type == "cuda"
        with torch.device("meta"):
            stack = _Stack(shape)
        self.stack = fill(stack, x.device if policy is None else torch.device("cpu"), x.device).eval()
        begin = time.perf_counter()
        self.handle = None if policy is None else headrace.offload(self.stack, policy, device=x.device)
        self.start_s = time.perf_counter() - begin
        self._chosen = ids[0].clone()
        self.output = self.stack(x, self._chosen)
        self._step: Any = None
        if on_gpu:
            self._step, self.output = capture(lambda: self.stack(x, self._chosen))

    def step(self) -> None:
        """The next step of the trace."""
        self._chosen.copy_(self._ids[self._at % len(self._ids)])
        self._at += 1
        if self._step is None:
            self.output = self.stack(self._x, self._chosen)
        else:
            self._step()

    def replay(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Begin with ``ids``, and return the outputs of the first steps."""
        self._ids, self._at, outputs = ids, 0, []
        for _ in range(8):
            self.step()
            outputs.append(self.output.clone())
        return outputs


def run(
    shape: ExpertsShape,
    traces: Mapping[str, Recorded],
    num_slots: Sequence[int],
    rows: int,
    rounds: int,
    repeats: int,
    device: torch.device,
    with_resident: bool = True,
) -> Iterator[dict[str, Any]]:
    """Yield one result per trace and case: ``resident``, ``in place``, ``slots N`` for each of ``num_slots``.

    Args:
        shape: its layers are those of the traces.
        traces: by name, replayed token by token; ``rows`` sequences take their tokens from equal parts of one.
        rows: sequences of a step.
        rounds, repeats: all cases take turns in each round, so many steps each.
        with_resident: the experts fit the device; without, floors lack the resident step.
    """
    generator = torch.Generator(device=device).manual_seed(rows)
    x = torch.randn(rows, shape.hidden, device=device, generator=generator).to(torch.bfloat16)
    steps = {name: _steps(trace.layers, rows).to(device) for name, trace in traces.items()}
    policies = {f"slots {count}": Rules([("layers", "cache")], expert_slots=count) for count in num_slots}
    policies = {"in place": Rules([("layers", "uva")]), **policies}
    first = next(iter(steps.values()))
    with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        cases = [_Case("resident", shape, None, first, x)] if with_resident else []
        cases += [_Case(name, shape, policy, first, x) for name, policy in policies.items()]
        probe = LinkProbe(device) if device.type == "cuda" else None
        for name, ids in steps.items():
            for row in _measure(shape, cases, ids, probe, rounds, repeats):
                yield {"trace": name, "rows": rows, **row}


def _measure(
    shape: ExpertsShape, cases: Sequence[_Case], ids: torch.Tensor, probe: LinkProbe | None, rounds: int, repeats: int
) -> Iterator[dict[str, Any]]:
    outputs = {case.name: case.replay(ids) for case in cases}
    before = {case.name: _moved(case) for case in cases}
    steps = {case.name: case.step for case in cases} | ({"link": probe.copy} if probe else {})
    timings = interleave(steps, rounds, repeats, time_cuda if probe else time_host)
    link = probe.num_bytes / (timings["link"].ms / 1e3) if probe else None
    resident_ms = timings["resident"].ms if "resident" in timings else 0.0
    for case in cases:
        hits, missed, num_steps = (a - b for a, b in zip(_moved(case), before[case.name], strict=True))
        missed_bytes = missed * shape.expert_bytes / num_steps if num_steps else 0.0
        if case.name == "in place":
            missed_bytes = float(np.mean([_used(step) for step in ids.cpu().numpy()])) * shape.expert_bytes
        floor_ms = missed_bytes / link * 1e3 + resident_ms if link else None
        mean_ms = statistics.mean(timings[case.name].samples_ms)
        yield {
            "case": case.name,
            "ms": mean_ms,  # and not the median: hits differ from step to step
            "floor_ms": floor_ms,
            "over_floor": mean_ms / floor_ms if floor_ms else None,
            "tokens_per_s": ids.shape[2] / mean_ms * 1e3,
            "hits": hits / (hits + missed) if hits + missed else None,
            "missed_bytes": missed_bytes,
            "start_s": case.start_s,
            "device_bytes": case.handle.plan.device_bytes if case.handle else None,
            "link_gb_per_s": link / 1e9 if link else None,
            "bit_equal": all(map(torch.equal, outputs[case.name], outputs[cases[0].name])),
        }


def _steps(layers: Sequence[Trace], rows: int) -> torch.Tensor:
    """int64 [steps, layers, rows, top_k]."""
    length = len(layers[0]) // rows
    parts = np.stack([layer[: length * rows].reshape(rows, length, -1) for layer in layers])
    return torch.from_numpy(parts.transpose(2, 0, 1, 3).astype(np.int64))


def _used(ids: np.ndarray[Any, Any]) -> int:
    """Different experts of a step, over all layers."""
    return sum(len(np.unique(layer)) for layer in ids)


def _moved(case: _Case) -> tuple[int, int, int]:
    """(experts hit, experts missed, steps) so far."""
    layers = () if case.handle is None else case.handle.stats().experts
    missed = sum(layer.fetched + layer.in_place for layer in layers)
    return sum(layer.hits for layer in layers), missed, layers[0].steps if layers else 0


def shares(text: str) -> list[float]:
    """Numbers from 0 to 1, separated by commas."""
    found = [float(part) for part in text.split(",")]
    if not all(0 <= share <= 1 for share in found):
        raise argparse.ArgumentTypeError(f"expected shares from 0 to 1, such as 0.5,0.9, found {text!r}")
    return found


def main() -> None:
    parser = parser_of(__doc__, rounds=5, repeats=40)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="deepseek-v2-lite")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--trace", type=Path, help="a file of --expert-trace (default: a seeded trace)")
    which.add_argument("--hits", type=shares, default=[], help="traces that hit these shares")
    parser.add_argument("--slots", type=counts, help="experts of each layer on the device (default: half of them)")
    parser.add_argument("--rows", type=int, default=1, help="sequences of a step")
    parser.add_argument("--layers", type=int, help="default the shape's, or the trace's")
    parser.add_argument("--no-resident", action="store_true", help="not with all experts on the device")
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    if given.trace is not None:
        recorded = load_trace(given.trace)
        layers = recorded.layers[: given.layers]
        num_experts, top_k = recorded.num_experts, layers[0].shape[1]
        shape = replace(shape, num_layers=len(layers), num_experts=num_experts, top_k=top_k)
        traces = {str(given.trace): replace(recorded, layers=layers)}
    else:
        shape = replace(shape, num_layers=given.layers or shape.num_layers)
        num_tokens = given.rows * (given.rounds * given.repeats + 64)
        traces = {f"{share:.0%} hits": driven(shape, num_tokens, share) for share in given.hits}
        traces = traces or {"seeded": seeded(shape, num_tokens)}
    slots = given.slots or [shape.num_experts // 2]
    if given.device == "cpu":
        for name, each in traces.items():
            for number in slots:
                found = sum(lru_hits(one, number, warm_up=len(one) // 5) for one in each.layers) / len(each.layers)
                print(f"{name}: {number} of {shape.num_experts} experts on the device, {found:.1%} of choices hit")
        return
    results = []
    device = torch.device(given.device)
    for row in run(shape, traces, slots, given.rows, given.rounds, given.repeats, device, not given.no_resident):
        results.append(row)
        share = "" if row["hits"] is None else f"  {row['hits']:6.1%} hit"
        print(
            f"{row['trace']:<10} {row['case']:<10} {row['rows']:>4} rows  {row['ms']:8.2f} ms  "
            f"{row['tokens_per_s']:7.1f} tokens/s  {row['over_floor']:6.3f} x floor{share}  "
            f"{'same bits' if row['bit_equal'] else 'OTHER BITS'}",
            flush=True,
        )
        append({"shape": given.shape, **row}, given.out)
    finish("expert steps", results)


if __name__ == "__main__":
    main()
