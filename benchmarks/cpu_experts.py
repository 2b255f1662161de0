"""Weights of experts a second by the threads of a CPU, beside a plain sum of memory and torch's own products.

    python benchmarks/cpu_experts.py --threads 1,2 --out FILE

Layers of Qwen3-30B-A3B (bf16, 8 experts a token) and gpt-oss-120b (MXFP4, 4), of which some experts are in memory, far
more than caches hold. All variants take turns; other processes on the cores show in the spread. The floor is the sum.

``bit_equal``: outputs are those of one thread in plain C.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import silu

from harness import append, counts, finish, parser_of
from headrace.experts.cpu import pool
from headrace.experts.cpu.native import INSTRUCTIONS, library
from headrace.experts.order import Projection

HELD_BYTES = 450 * 2**20


def bf16(experts: int, outputs: int, inputs: int) -> Projection:
    row = torch.randn(outputs, inputs) / inputs**0.5
    return Projection(torch.empty(experts, outputs, inputs, dtype=torch.bfloat16).copy_(row))


def mxfp4(experts: int, outputs: int, inputs: int) -> Projection:
    codes = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8)
    scales = torch.randint(114, 121, (experts, outputs, inputs // 32), dtype=torch.uint8)
    return Projection(codes, scales, torch.zeros(experts, outputs, dtype=torch.bfloat16))


SHAPES = {"bf16": (bf16, 2048, 768, 8, 2.0, ()), "mxfp4": (mxfp4, 2880, 2880, 4, 17 / 32, (1.702, 7.0))}


def by_torch(x: torch.Tensor, ids: torch.Tensor, gate_up: Projection, down: Projection) -> torch.Tensor:
    """The same with ``torch``'s products of bf16, without weights of a router."""
    total = torch.zeros(len(x), down.weight.shape[1])
    for expert in ids[0].tolist():
        gate, up = (x @ gate_up.weight[expert].T).chunk(2, -1)
        total += (silu(gate) * up) @ down.weight[expert].T
    return total


class Layer:
    """Experts of a layer, as many as fit ``HELD_BYTES``."""

    def __init__(self, form: str) -> None:
        make, inputs, inner, self.top_k, bytes_each, glu = SHAPES[form]
        one = int(3 * inputs * inner * bytes_each)
        self.form, self.num_bytes, self.experts = form, self.top_k * one, HELD_BYTES // one
        self.gate_up, self.down = (make(self.experts, *shape) for shape in ((2 * inner, inputs), (inputs, inner)))
        self.x, weights = torch.randn(1, inputs).bfloat16(), torch.rand(1, self.top_k)
        self.given = (weights, self.gate_up, self.down, bool(glu), glu)
        self.words = self.gate_up.weight.view(-1).view(torch.int64)

    def choice(self) -> torch.Tensor:
        return torch.randperm(self.experts)[None, : self.top_k]

    def variants(self, threads: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        """What takes turns, by name: functions of a choice of experts."""
        cores, best = pool.physical_cores(), library().experts_best()
        found: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        for kind in range(min(best, 1), best + 1):
            some = pool.Pool([cores[each % len(cores)] for each in range(threads)], kind)
            found[INSTRUCTIONS[kind]] = partial(self.run, some)
        count = self.num_bytes // 8
        found["sum"] = lambda ids: self.words[int(ids[0, 0]) * 1000 :][:count].sum()
        if self.form == "bf16":
            found["torch"] = lambda ids: by_torch(self.x, ids, self.gate_up, self.down)
        return found

    def run(self, some: pool.Pool, ids: torch.Tensor) -> torch.Tensor:
        return pool.run(self.x, ids, *self.given, pool=some)


def rows_of(layer: Layer, threads: int, rounds: int) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(threads)
    variants, plain = layer.variants(threads), pool.Pool(pool.physical_cores()[:1], 0)
    rates: dict[str, list[float]] = {name: [] for name in variants}
    equal = dict.fromkeys(variants, True)
    for _ in range(rounds):
        ids = layer.choice()
        expected = layer.run(plain, ids)
        for name, call in variants.items():
            began = time.perf_counter()
            found = call(ids)
            rates[name].append(layer.num_bytes / (time.perf_counter() - began) / 1e9)
            equal[name] &= name in ("sum", "torch") or torch.equal(found, expected)
    for name, found_rates in rates.items():
        low, median, high = statistics.quantiles(found_rates, n=4)
        yield {
            "case": f"{layer.form} {name}", "threads": threads, "gb_per_s": median, "quartiles": [low, high],
            "best_gb_per_s": max(found_rates), "of_sum": median / statistics.median(rates["sum"]),
            "bit_equal": equal[name],
        }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, rounds=50)
    parser.add_argument("--threads", type=counts, default=[1, len(pool.physical_cores())])
    arguments, rows = parser.parse_args(), []
    torch.manual_seed(0)
    for form in SHAPES:
        layer = Layer(form)
        for threads in arguments.threads:
            for row in rows_of(layer, threads, arguments.rounds):
                rows.append(row)
                append(row, arguments.out)
                low, high = row["quartiles"]
                print(
                    f"{row['case']:<14} {threads:>3} threads  {row['gb_per_s']:6.2f} GB/s ({low:.2f} to {high:.2f}, "
                    f"best {row['best_gb_per_s']:.2f}), {row['of_sum']:.2f} of a sum",
                    flush=True,
                )
    finish("cpu_experts", rows)


if __name__ == "__main__":
    main()
