"""Hits of a cache of experts by replacement policy, on seeded traces and without a GPU.

    python benchmarks/expert_policies.py [--layers 8] [--tokens 2048] [--json]

``lru`` and ``lfu`` keep slots per layer; ``pooled`` is one LRU over all layers with as many slots together; ``static``
keeps the experts that the whole trace uses most; ``optimum`` evicts what is used latest (Belady), which no policy can
know. Every trace is headrace's own (plan/traces.py): its locality follows published figures, it was not recorded.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable

import numpy as np

from headrace.plan.traces import Trace, lru_hits, reuse_distances, seeded_trace

SHAPES = {"Qwen3-30B-A3B": (128, 8), "DeepSeek-V2-Lite": (64, 6), "gpt-oss-20b": (32, 4)}
SHARES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8)


def lru(traces: list[Trace], num_slots: int) -> float:
    return statistics.mean(lru_hits(trace, num_slots) for trace in traces)


def lfu(traces: list[Trace], num_slots: int) -> float:
    """The least often used leaves; counts are halved every 256 tokens, so that old favourites fade."""
    hits = 0.0
    for trace in traces:
        held: set[int] = set()
        counts: Counter[int] = Counter()
        for token, row in enumerate(trace.tolist()):
            hits += len(held.intersection(row))
            counts.update(row)
            for expert in row:
                if expert not in held:
                    if len(held) == num_slots:
                        held.remove(min(held - set(row), key=counts.__getitem__))
                    held.add(expert)
            if token % 256 == 255:
                counts = Counter({expert: count // 2 for expert, count in counts.items()})
    return hits / sum(trace.size for trace in traces)


def pooled(traces: list[Trace], num_slots: int) -> float:
    # A step of the pool is one layer of one token; an expert of another layer is another expert.
    num_experts = 1 + max(int(trace.max()) for trace in traces)
    apart = [trace + layer * num_experts for layer, trace in enumerate(traces)]
    return lru_hits(np.stack(apart, axis=1).reshape(-1, traces[0].shape[1]), num_slots * len(traces))


def static(traces: list[Trace], num_slots: int) -> float:
    kept = [sum(n for _, n in Counter(trace.flatten().tolist()).most_common(num_slots)) for trace in traces]
    return sum(kept) / sum(trace.size for trace in traces)


def optimum(traces: list[Trace], num_slots: int) -> float:
    hits = 0
    for trace in traces:
        uses: dict[int, list[int]] = {}
        for token, row in reversed(list(enumerate(trace.tolist()))):
            for expert in row:
                uses.setdefault(expert, []).append(token)
        held: set[int] = set()
        for row in trace.tolist():
            hits += len(held.intersection(row))
            for expert in row:
                uses[expert].pop()
            for expert in row:
                if expert not in held:
                    if len(held) == num_slots:
                        held.remove(max(held - set(row), key=lambda e: uses[e][-1] if uses[e] else len(trace)))
                    held.add(expert)
    return hits / sum(trace.size for trace in traces)


POLICIES: dict[str, Callable[[list[Trace], int], float]] = {
    "lru": lru,
    "lfu": lfu,
    "pooled": pooled,
    "static": static,
    "optimum": optimum,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--json", action="store_true", help="one line for each row")
    given = parser.parse_args()
    for shape, (num_experts, top_k) in SHAPES.items():
        traces = [seeded_trace(seed, given.tokens, num_experts, top_k) for seed in range(given.layers)]
        distances = [distance for trace in traces for distance in reuse_distances(trace)]
        for share in SHARES:
            num_slots = max(top_k, round(num_experts * share))
            hits = {name: policy(traces, num_slots) for name, policy in POLICIES.items()}
            if given.json:
                facts = {"table": "policies", "case": shape, "experts": num_experts, "top_k": top_k, "slots": num_slots}
                within = {f"within_{n}": sum(d <= n for d in distances) / len(distances) for n in (2, 8)}
                print(json.dumps({**facts, **within, **hits}))
            else:
                print(
                    f"{shape:17s} {num_slots:4d} slots  "
                    + "  ".join(f"{name} {hit:6.1%}" for name, hit in hits.items())
                )


if __name__ == "__main__":
    main()
