"""Driven routing with hints: choices that hit a stated share of a cache, and guesses of what it will miss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from expert_steps import ExpertsShape

HINTS = (0.5, 0.8)  # shares of the misses that are guessed right


@dataclass(frozen=True)
class Routing:
    """Choices of all layers, int64 [steps, layers, rows, top_k], and hints of the same shape by their share."""

    ids: torch.Tensor
    hints: Mapping[float, torch.Tensor]


def driven(shape: ExpertsShape, num_slots: int, rows: int, hits: float, num_steps: int) -> Routing:
    """Routing of which a cache of ``num_slots`` hits the share ``hits`` of the different experts of a step."""
    layers = [_driven_layer(shape, num_slots, rows, hits, num_steps, layer) for layer in range(shape.num_layers)]
    stacked = [torch.tensor(each).transpose(0, 1).contiguous() for each in zip(*layers, strict=True)]
    return Routing(stacked[0], dict(zip(HINTS, stacked[1:], strict=True)))


def _driven_layer(
    shape: ExpertsShape, num_slots: int, rows: int, hits: float, num_steps: int, layer: int
) -> list[list[list[list[int]]]]:
    """[choices, hints...], each [steps, rows, top_k]. Wrong hints are of experts that no case has in slots then."""
    shared = shared_experts(rows, shape.top_k)
    num_used = rows * (shape.top_k - shared)
    order = [(expert + layer) % shape.num_experts for expert in range(shape.num_experts)]  # least recently used first
    touched = dict.fromkeys(HINTS, order)  # the same, with what hints have fetched
    owed = layer / shape.num_layers  # so that not all layers miss in the same step
    owed_right = dict.fromkeys(HINTS, owed * 7 % 1)
    found: list[list[list[list[int]]]] = [[] for _ in range(1 + len(HINTS))]
    for _ in range(num_steps):
        owed += hits * num_used
        num_kept = int(owed + 1e-9)
        owed -= num_kept
        kept, missing = order[len(order) - num_kept :], order[: num_used - num_kept]
        held = {*order[-num_slots:], *missing}.union(*(each[-num_slots:] for each in touched.values()))
        others = [expert for expert in reversed(order) if expert not in held]
        for share, hinted in zip(HINTS, found[1:], strict=True):
            owed_right[share] += share * len(missing)
            num_right = int(owed_right[share] + 1e-9)
            owed_right[share] -= num_right
            wrong = others[: len(missing) - num_right]
            if num_right + len(wrong) != len(missing):
                raise ValueError(
                    f"hits {hits}: expected experts enough for wrong hints, found {len(wrong)}; state more hits"
                )
            guesses = kept + missing[:num_right] + wrong
            hinted.append(_dealt(guesses, rows, shared))
            touched[share] = _used(_used(touched[share], guesses), kept + missing)
        order = _used(order, kept + missing)
        found[0].append(_dealt(kept + missing, rows, shared))
    return found


def shared_experts(rows: int, top_k: int) -> int:
    """Experts that a row has in common with the next one."""
    return top_k // 4 if rows > 1 else 0


def _used(order: list[int], experts: list[int]) -> list[int]:
    last = set(experts)
    return [expert for expert in order if expert not in last] + experts


def _dealt(experts: list[int], rows: int, shared: int) -> list[list[int]]:
    """[rows, top_k]: each row gets its own experts, and ``shared`` of those of the next row."""
    own = [experts[row::rows] for row in range(rows)]
    return [mine + own[(row + 1) % rows][:shared] for row, mine in enumerate(own)]
