"""Conformance helpers, for headrace's own tests and for projects that offload their own models or write a link.

The promise worth testing is contract 1: the same bits as the resident model. Three things make such a test vacuous, and
each has a helper here:

* nothing moved: :func:`assert_moved` proves from the counters that every unit came once per forward;
* a compiler fused differently without the offload: :func:`boundaries` gives the resident model the same ones;
* the race never happened: :class:`SlowLink` stretches every copy by random delays.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from headrace.api import Handle, start
from headrace.config import Policy
from headrace.experts.rows import CachedExperts, CacheStreamOrder, ExpertHook, NoCache, ReadsRows
from headrace.plan.plan import Plan
from headrace.planning.request import PlanRequest
from headrace.runtime.hooks import CalledForwardHook, ForwardHook, UnitHook, new_token, unhooked_modules
from headrace.runtime.prepare import Prepared, prepare
from headrace.stats import Recorder
from headrace.stores.file_reads import DiskOptions
from headrace.stores.sources import Source
from headrace.stores.store import Load
from headrace.transfer.link import ComputeEvent, Link, ThreadLink, ThreadTransfer

__all__ = ["SlowLink", "assert_moved", "assert_same_bits", "boundaries", "offload_over"]


def offload_over(
    model: nn.Module,
    policy: Policy | Plan | str | int,
    link: Link,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    disk: DiskOptions | None = None,
) -> Handle:
    """:func:`headrace.offload`, with copies made by ``link``; the handle closes it."""
    return start(prepare(PlanRequest(model, policy, checkpoint=checkpoint, disk=disk)), link=link)


@contextmanager
def boundaries(model: nn.Module, policy: Policy | Plan | str | int) -> Iterator[Plan]:
    """Give a resident model the boundaries of an offload: the same ops are traced, nothing moves.

    Under ``torch.compile`` this is the reference of contract 1. A compiler may fuse across what would be a boundary and
    then round differently; such a difference is the compiler's, and comparing with this context leaves it out.

    Args:
        model: resident, on any device.
        policy: as for :func:`headrace.offload`.

    Yields:
        the plan whose units set the boundaries.
    """
    # Without limits: the model is resident already, and nothing is added.
    prepared = prepare(PlanRequest(model, policy), allocates=False)
    with boundaries_of(prepared, model, traced_in_forward=True):
        yield prepared.plan


@contextmanager
def boundaries_of(
    prepared: Prepared,
    entry: nn.Module,
    expert_kernel_factory: ReadsRows | None = None,
    traced_in_forward: bool = False,
) -> Iterator[None]:
    """The boundaries of a plan that was prepared without allocating anything.

    Args:
        entry: the module whose forward begins a forward of the model.
        expert_kernel_factory: see ``SessionOptions``.
        traced_in_forward: where an offload of the whole model traces its ops, see :mod:`headrace.runtime.hooks`.
    """
    model, token = prepared.model, new_token(prepared.device)
    hooks: list[UnitHook | ForwardHook | ExpertHook] = []
    try:
        units, unhooked = [], unhooked_modules(model)
        for unit in prepared.plan.units:
            storages = [prepared.bound[entry.storage] for entry in unit.entries]
            module = model.get_submodule(unit.module_fqn)
            is_root = traced_in_forward and module is model
            units.append(
                UnitHook(
                    module, unit.index, storages, None, token, unhooked=module in unhooked, traced_in_forward=is_root
                )
            )
            hooks.append(units[-1])
        kind = CalledForwardHook if model in unhooked else ForwardHook
        is_unhooked = model in unhooked
        hooks.append(kind(model, entry, units, None, token, unhooked=is_unhooked, traced_in_forward=traced_in_forward))
        turn = CacheStreamOrder(prepared.device)
        for layer in prepared.plan.cached:
            module = model.get_submodule(layer.module_fqn)
            bound = [tensor for name in layer.storages for tensor in prepared.bound[name].tensors]
            tensors = {tensor.places[0][1].attr: tensor.tensor.detach() for tensor in bound}
            hooks.append((expert_kernel_factory or CachedExperts)(module, tensors, NoCache(layer.num_experts, turn)))
        for hook in hooks:
            hook.attach()
        yield
    finally:
        for hook in hooks:
            hook.remove()


def assert_same_bits(found: Any, expected: Any, what: str = "output") -> None:
    """Raise ``AssertionError`` unless two structures of tensors agree in structure, dtype, shape and every bit."""
    found_leaves, found_spec = tree_flatten(found)
    leaves, spec = tree_flatten(expected)
    if found_spec != spec:
        raise AssertionError(f"{what}: expected the structure {spec}, found {found_spec}")
    for index, (one, other) in enumerate(zip(found_leaves, leaves, strict=True)):
        if not isinstance(other, torch.Tensor):
            if one != other:
                raise AssertionError(f"{what}[{index}]: expected {other!r}, found {one!r}")
        elif (one.dtype, one.shape) != (other.dtype, other.shape):
            raise AssertionError(
                f"{what}[{index}]: expected {other.dtype} {list(other.shape)}, found {one.dtype} {list(one.shape)}"
            )
        elif not torch.equal(_bits(one), _bits(other)):
            differing = int((_bits(one) != _bits(other)).sum())
            raise AssertionError(f"{what}[{index}]: {differing} of {_bits(other).numel()} bytes differ")


def assert_moved(handle: Handle, forwards: int) -> None:
    """Raise ``AssertionError`` unless exactly the bytes of ``forwards`` whole forwards have moved, by prefetch.

    Counts from the offload on; the forwards ran in order.
    """
    plan, stats = handle.plan, handle.stats()
    # The first units are copied before the first forward. The last copies of every forward are the units that the next
    # one needs first, so each forward moves all bytes once.
    first_bytes = sum(unit.payload_bytes for unit in plan.units[: plan.num_slots])
    expected = first_bytes + forwards * plan.moved_bytes
    runs = [unit.runs for unit in stats.units]
    if not plan.units or plan.prefetched_bytes == 0:
        raise AssertionError("nothing is offloaded by prefetch")
    if stats.bytes_moved != expected or stats.misses or runs != [forwards] * len(plan.units):
        raise AssertionError(
            f"after {forwards} forwards: expected {expected} bytes moved, no misses and {forwards} runs of each unit; "
            f"found {stats.bytes_moved} bytes, {stats.misses} misses, runs {runs}"
        )


class SlowLink(ThreadLink):
    """Sleeps for a random time before every piece of every copy.

    Args:
        max_delay_s: the longest sleep, in seconds.
        seed: seed of the random numbers.
        recorder: recorder of the copies, for a timeline.
    """

    def __init__(self, max_delay_s: float = 0.002, seed: int = 0, recorder: Recorder | None = None) -> None:
        super().__init__(num_threads=2, recorder=recorder)  # two, so that pieces may complete out of order
        self._random = random.Random(seed)
        self._max_delay_s = max_delay_s

    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> ThreadTransfer:
        longest = self._max_delay_s
        delayed = (
            replace(copy, src=replace(copy.src, source=_Delayed(copy.src.source, self._random.uniform(0, longest))))
            for copy in load.copies
        )
        return super().copy(replace(load, copies=tuple(delayed)), slot, after)


@dataclass(frozen=True)
class _Delayed(Source):
    source: Source
    delay_s: float

    def read(self, offset: int, into: memoryview) -> None:
        time.sleep(self.delay_s)
        self.source.read(offset, into)

    def require_unchanged(self) -> None:
        self.source.require_unchanged()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # As bytes: torch.equal of floats holds NaN for unequal to itself, and -0.0 for equal to 0.0.
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
