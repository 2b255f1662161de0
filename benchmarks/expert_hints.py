"""Steps of experts in files that start to read what the next layer is expected to choose, beside steps that do not.

    python benchmarks/expert_hints.py --folder FOLDER --layers 6          on a GPU, in int4

The layers of ``expert_files.py --steps``. While a layer lands what it has missed, threads go on with the experts of a
*hint* that the next layer has in no memory, and its step drops those it does not use. A router with random weights
predicts nothing, so hints have a given accuracy: each expert of the next layer's choice is in the hint, or, with one
less that probability, another one that some token of the trace chooses. Each token takes one of the ways at random, as
the trace has a period; none changes what a memory holds.
"""

from __future__ import annotations

import argparse
import statistics
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from expert_files import Layers, run_steps
from harness import append, finish, parser_of, writable_folder
from headrace.plan.routing_traces import Trace
from headrace.transfer.expert_tiers import TieredCache

ACCURACIES = (None, 1.0, 0.8, 0.6)


class Hints:
    """Has caches read what the next layer is expected to choose.

    Attributes:
        of_next: by cache, the experts that are expected of the one behind it.
    """

    def __init__(self) -> None:
        self.of_next: dict[TieredCache, Sequence[int]] = {}
        exchange, bring = TieredCache._exchange, TieredCache._bring

        def then_hint(cache: TieredCache, *arguments: Any) -> None:
            """After the layer's own reads have started, before it waits for them."""
            self._start(cache)
            exchange(cache, *arguments)

        def or_hint(cache: TieredCache, used: Sequence[int]) -> dict[int, int]:
            """The same of a layer that reads nothing."""
            row_of = bring(cache, used)
            if cache in self.of_next:
                with cache._reader.reading(), torch.inference_mode():
                    self._start(cache)
            return row_of

        TieredCache._exchange, TieredCache._bring = then_hint, or_hint  # type: ignore[method-assign]

    def _start(self, cache: TieredCache) -> None:
        following, expected = cache.next, self.of_next.pop(cache, ())
        if following is None or cache._staging.ahead:
            return
        held: Collection[int] = {*following._slot_of, *following._place_of}
        cache._staging.ahead = following._ahead
        following._start(deque(expert for expert in expected if expert not in held), {}, following._ahead)


def hinted(chosen: Trace, trace: Trace, accuracy: float, chooser: np.random.Generator) -> list[int]:
    """The experts ``chosen``, of which each is right with probability ``accuracy``; those that are wrong come last."""
    is_right = chooser.random(len(chosen)) < accuracy
    wrong = chooser.choice(trace.reshape(-1), int((~is_right).sum())).tolist()
    return list(dict.fromkeys([*chosen[is_right].tolist(), *wrong]))


def measure(layers: Layers, warm: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each accuracy."""
    traces = layers.traces(warm + given.tokens)
    caches = [cache for _, cache in layers.handle._session._caches if isinstance(cache, TieredCache)]
    hints, chooser, rates, bit_equal = Hints(), np.random.default_rng(2), list[float](), True
    times: list[list[float]] = [[] for _ in ACCURACIES]
    read_bytes, way = [0 for _ in ACCURACIES], 0  # the first token has no hint
    for token, took_s, num_bytes, is_equal in run_steps(layers, traces, warm, given.seconds, rates):
        bit_equal &= is_equal
        if token >= warm:
            times[way].append(took_s)
            read_bytes[way] += num_bytes
        way, following = int(chooser.integers(len(ACCURACIES))), min(token + 1, warm + given.tokens - 1)
        if (accuracy := ACCURACIES[way]) is not None:
            behind = zip(caches, traces[1:], strict=False)
            hints.of_next = {cache: hinted(trace[following], trace, accuracy, chooser) for cache, trace in behind}
    rate, rows = statistics.median(rates), []
    for accuracy, each, num_bytes in zip(ACCURACIES, times, read_bytes, strict=True):
        row = layers.row("expert-hints") | {
            "accuracy": accuracy, "tokens": len(each), "ms": 1e3 * statistics.median(each),
            "mean_ms": 1e3 * statistics.mean(each), "read_bytes_per_token": num_bytes // len(each),
            "floor_ms": 1e3 * read_bytes[0] / len(times[0]) / rate, "plain_gb_per_s": rate / 1e9,
            "bit_equal": bit_equal,
        }  # fmt: skip
        row["of_no_hints"] = row["mean_ms"] / (1e3 * statistics.mean(times[0]))
        print(row, flush=True)
        append(row, given.out)
        rows.append(row)
    return rows


def main() -> None:
    parser = parser_of(__doc__, rounds=1)
    parser.add_argument("--folder", type=writable_folder, default=Path("/tmp"), help="on the disk to measure")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--slots", type=int, default=13, help="experts of a layer on the device")
    parser.add_argument("--held", type=int, default=51, help="experts of a layer in host memory beside those")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=8192, help="steps after the first 160, if there is time")
    parser.add_argument("--seconds", type=float, default=60, help="after which the steps end")
    parser.add_argument("--tiny", action="store_true", help="small layers")
    given = parser.parse_args()
    layers = Layers(given.folder, given.device, "int4", given.layers, given.tiny, (given.slots, given.held))
    with layers.handle, torch.inference_mode():
        finish("expert_hints", measure(layers, 20 if given.tiny else 160, given))


if __name__ == "__main__":
    main()
