"""Traces of routing: the experts that each token of a layer chooses, from a seed or recorded, and the hits of a cache.

Measured models use an expert again soon: Qwen3-30B-A3B half of its choices within 2 tokens and 80 % within 8, and which
others it uses is skewed. Uniform choices, as of random weights, have none of that and would show a cache at its worst.

The seeded trace is fitted to hits that others published, which the share of experts in slots decides more than the
number of experts: 24, 49 and 81 slots for 128 experts (top 8, Qwen3-30B-A3B) hit 74, 89 and 96 %, measured by
github.com/kekzl/imp/pull/1374, whose experts take three slots each; 64 and 128 for 512 experts (top 10,
Qwen3.8-Flash-Next) hit 67 and 81 %, from routing recorded by github.com/ggml-org/llama.cpp/pull/27861.
"""

from __future__ import annotations

import functools
import os
import random
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from headrace.errors import OptionError

Trace = np.ndarray[tuple[int, int], np.dtype[np.int32]]  # [tokens, top_k]

# Share of draws among the experts last used 1, 2 and 3 tokens before. Other draws follow popularity and fall on such
# experts, too: of 128 experts, top 8, together 58 % within 2 and 78 % within 8 tokens.
_RECENT = (0.25, 0.1, 0.04)
# Popularity is 1 / (share of experts that are more popular + offset) ** exponent (Zipf-Mandelbrot).
_ZIPF_OFFSET, _ZIPF_EXPONENT = 0.08, 2

# Of a prediction: tokens of a trace, how many of them fill the cache before hits count, and layers.
_TOKENS, _WARM_UP = 640, 128
_LAYERS = 8


def seeded_trace(seed: int, num_tokens: int, num_experts: int, top_k: int) -> Trace:
    """Choices of one layer, int32 [num_tokens, top_k]; a row holds no expert twice.

    Args:
        seed: another one stands for another layer, or another text.
        num_tokens, num_experts, top_k: at least 1; ``top_k`` at most ``num_experts``.
    """
    chooser = random.Random(seed)
    ranked = list(range(num_experts))
    chooser.shuffle(ranked)  # the popular experts of a layer are not its first ones
    weights = [0.0] * num_experts
    for rank, expert in enumerate(ranked):
        weights[expert] = 1 / ((rank + 1) / num_experts + _ZIPF_OFFSET) ** _ZIPF_EXPONENT
    totals = list(accumulate(weights))
    recent: list[list[int]] = []  # the newest first; each expert where it was used last
    trace = np.empty((num_tokens, top_k), np.int32)
    for token in range(num_tokens):
        chosen: list[int] = []
        while len(chosen) < top_k:
            (distance,) = chooser.choices(range(len(_RECENT) + 1), (*_RECENT, 1 - sum(_RECENT)))
            found = recent[distance] if distance < len(recent) else []
            others = [expert for expert in found if expert not in chosen]
            expert = chooser.choice(others) if others else chooser.choices(range(num_experts), cum_weights=totals)[0]
            if expert not in chosen:
                chosen.append(expert)
        recent = [chosen, *([e for e in row if e not in chosen] for row in recent[: len(_RECENT) - 1])]
        trace[token] = chosen
    return trace


def lru_hits(trace: Trace, num_slots: int, warm_up: int = 0) -> float:
    """Share of choices that a cache of ``num_slots`` experts holds, one token a step.

    No expert leaves in the step that uses it; what finds no slot is not kept, nor is the last one of a step without any
    hit (``admit_kernel`` says why).

    Args:
        warm_up: tokens at the beginning that do not count.
    """
    held: OrderedDict[int, None] = OrderedDict()
    counted = 0
    for token, row in enumerate(trace.tolist()):
        missing = sorted(expert for expert in row if expert not in held)
        hits = len(row) - len(missing)
        counted += hits if token >= warm_up else 0
        if len(missing) == len(row) > 1:
            missing.pop()
        for expert in row:
            if expert in held:
                held.move_to_end(expert)
        for expert in missing[: num_slots - hits]:
            if len(held) == num_slots:
                held.popitem(last=False)
            held[expert] = None
    return counted / trace[warm_up:].size


@dataclass(frozen=True, eq=False)
class ExpertHits:
    """Predicts the share of the experts of a step that a cache holds, by replaying a trace.

    Attributes:
        recorded: choices in this model; ``None``: a seeded trace with the locality of published models.
    """

    recorded: Recorded | None = None

    @property
    def source(self) -> str:
        """The trace, for people."""
        return "a seeded trace that hits as published ones do" if self.recorded is None else "the recorded trace"

    def __call__(self, num_slots: int, num_experts: int, top_k: int, touched: float) -> float:
        """The share in a step that uses ``touched`` different experts of ``num_experts``, ``top_k`` for each row."""
        if num_slots >= num_experts or top_k >= num_experts:  # all are in use, and a cache hits what it holds
            return min(1.0, num_slots / num_experts)
        alone = self._of_one_row(num_slots, num_experts, top_k)
        # Rows of one step share no history: with all experts in use, a cache hits what it holds.
        crowd = (touched - top_k) / max(1, num_experts - top_k)
        return (1 - crowd) * alone + crowd * num_slots / num_experts

    @functools.cache  # noqa: B019 - a planner asks for the same few sizes again and again
    def _of_one_row(self, num_slots: int, num_experts: int, top_k: int) -> float:
        if self.recorded is None:
            return lru_hits(_default_trace(num_experts, top_k), num_slots, warm_up=_WARM_UP)
        layers = self.recorded.layers
        some = layers[:: -(-len(layers) // _LAYERS)]
        return sum(lru_hits(trace, num_slots, warm_up=len(trace) // 5) for trace in some) / len(some)


@dataclass(frozen=True, eq=False)
class Recorded:
    """Choices that were recorded while a model ran.

    Attributes:
        layers: layers of experts, in the order of the model.
        num_experts: experts of a layer.
    """

    layers: tuple[Trace, ...]
    num_experts: int


def save_trace(recorded: Recorded, path: str | os.PathLike[str]) -> None:
    """Write a file that :func:`load_trace` reads: numpy's ``.npz``, ids as int16 [layers, tokens, top_k].

    Raises:
        OptionError: no file can be written there.
    """
    try:
        with open(path, "wb") as file:
            ids = np.stack(recorded.layers).astype(np.int16)
            np.savez_compressed(file, ids=ids, num_experts=recorded.num_experts)
    except OSError as error:
        raise OptionError(f"{os.fspath(path)}: no trace of experts can be written there: {error}") from error


def load_trace(path: str | os.PathLike[str]) -> Recorded:
    """The trace in a file that ``--expert-trace`` wrote.

    Raises:
        OptionError: no such file, or no such trace in it.
    """
    name = os.fspath(path)
    try:
        with np.load(name, allow_pickle=False) as arrays:
            ids, num_experts = arrays["ids"], int(arrays["num_experts"])
    except Exception as error:  # numpy and zipfile raise errors of any type; a header may claim terabytes
        raise OptionError(f"{name}: expected a trace that `headrace generate --expert-trace` wrote: {error}") from error
    if ids.ndim != 3 or not ids.size or ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= num_experts:
        raise OptionError(
            f"{name}: expected ids [layers, tokens, top_k] from 0 to {num_experts - 1}, found {ids.dtype} "
            f"{list(ids.shape)}"
        )
    return Recorded(tuple(ids.astype(np.int32)), num_experts)


@dataclass(frozen=True)
class FixedHits:
    """Hit rate that is the same whatever a cache holds; see :class:`ExpertHits`.

    Attributes:
        both: hits of slots and of host memory above files together; ``None``: the share, too.
    """

    share: float
    source: str = "an assumption"
    both: ExpertHits | FixedHits | None = None

    def __call__(self, num_slots: int, num_experts: int, top_k: int, touched: float) -> float:
        """The share."""
        return self.share


@functools.cache
def _default_trace(num_experts: int, top_k: int) -> Trace:
    return seeded_trace(0, _TOKENS, num_experts, top_k)
