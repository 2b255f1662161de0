"""What this machine has room for, asked before anything is allocated (contract 3).

:func:`read_limits` looks, :func:`needs_of` and :func:`check_limits` are arithmetic. A plan is refused only for what is
certain to be missing: memory that the kernel or torch's allocator would give back on demand counts as free.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch

from penstock.config import format_gib
from penstock.env import pin_memory_disabled
from penstock.errors import BudgetError, LimitError, OptionError
from penstock.memory.system import cgroup_available_bytes, host_available_bytes, memlock_bytes
from penstock.plan.machine import Machine
from penstock.plan.plan import Plan, slab_bytes
from penstock.plan.ring_layout import ring_bytes

__all__ = ["Limits", "Needs", "check_limits", "describe_device", "last_true", "needs_of", "read_limits", "require_disk"]

_SEARCH_STEPS = 256
# Stores whose bytes are host memory; those of shm_cpu are there once for all ranks of a host, whichever rank asks.
_HOST_MODES = ("cpu", "shm_cpu")


@dataclass(frozen=True)
class Limits:
    """Bytes that can still be taken; ``None`` means not limited, or not known.

    Attributes:
        device_free_bytes: memory of the GPU, blocks that torch's allocator holds but does not use included.
        host_available_bytes: host memory that programs can take without swapping.
        cgroup_available_bytes: what the control groups of this process leave it.
        memlock_bytes: host memory that may be pinned.
    """

    device_free_bytes: int | None = None
    host_available_bytes: int | None = None
    cgroup_available_bytes: int | None = None
    memlock_bytes: int | None = None


@dataclass(frozen=True)
class Needs:
    """Bytes that carrying out a plan adds to what is in use at its peak; ``pinned_bytes`` are among ``host_bytes``."""

    device_bytes: int = 0
    host_bytes: int = 0
    pinned_bytes: int = 0


def describe_device(device: torch.device) -> Machine:
    """What a plan made for ``device`` is bound to."""
    if device.type != "cuda":
        return Machine(device.type)
    facts = torch.cuda.get_device_properties(device)
    return Machine(facts.name, facts.total_memory)


def read_limits(device: torch.device, *, pinned_bytes: int = 0) -> Limits:
    """The limits of this machine and process now.

    Args:
        device: where compute runs.
        pinned_bytes: how much would be pinned. Only if that is above ``RLIMIT_MEMLOCK`` is the driver asked whether it
            keeps to it, since most do not: measured with driver 580 as an ordinary user.
    """
    host, group = host_available_bytes(), cgroup_available_bytes()
    lockable = memlock_bytes() if device.type == "cuda" else None
    if lockable is not None and not lockable < min(pinned_bytes, host or pinned_bytes, group or pinned_bytes):
        lockable = None
    return Limits(
        device_free_bytes=_device_free_bytes(device) if device.type == "cuda" else None,
        host_available_bytes=host,
        cgroup_available_bytes=group,
        memlock_bytes=lockable if lockable is None or not _can_register(lockable + mmap.PAGESIZE) else None,
    )


def _device_free_bytes(device: torch.device) -> int:
    free, _total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _can_register(num_bytes: int) -> bool:
    """Whether the driver pins this much for this process."""
    mapping = mmap.mmap(-1, num_bytes)
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    runtime = torch.cuda.cudart()
    registered = int(runtime.cudaHostRegister(address, num_bytes, 0)) == 0
    if registered:
        runtime.cudaHostUnregister(address)
    return registered


def needs_of(plan: Plan, *, on_gpu: bool, elsewhere: Collection[str] = (), on_meta: Collection[str] = ()) -> Needs:
    """What ``plan`` adds to what is in use, before anything old is given back; what ranks share counts once.

    Args:
        on_gpu: compute runs on a GPU; on a CPU its memory is host memory.
        elsewhere: names of the storages that are not on the device yet; as residents they have to move there.
        on_meta: those of them that have no bytes yet and are read from files; others are adopted by a CPU's store.
    """
    arriving = [num_bytes for name, num_bytes in plan.resident.items() if name in elsewhere]
    slots = sum(plan.slot_bytes)
    if not on_gpu:
        copied = on_meta if plan.mode == "cpu" else dict(_offloaded(plan)) if plan.mode == "shm_cpu" else ()
        stored = sum(size for name, size in _offloaded(plan) if name in copied and plan.store_of(name) != "disk")
        if plan.num_ranks > 1 or plan.mode == "sharded_gpu":
            stored = plan.part_bytes  # copied, wherever the tensors lie
        return Needs(host_bytes=slots + sum(arriving) + stored)
    in_place = sum(slab_bytes([size]) for size in plan.uva.values())  # a GPU cannot address a mapped file
    units = sum(unit.num_bytes for unit in plan.units if unit.store in _HOST_MODES) + ring_bytes(plan)
    pinned = units + in_place if plan.mode in (*_HOST_MODES, "disk") else 0
    if plan.num_ranks > 1:
        pinned = plan.part_bytes if plan.mode == "cpu" else 0
    parts = plan.part_bytes if plan.mode == "sharded_gpu" else 0
    staging = max(arriving, default=0)  # residents pass through host memory one at a time
    return Needs(
        device_bytes=slots + slab_bytes(arriving) + parts,
        host_bytes=pinned + staging,
        pinned_bytes=0 if pin_memory_disabled() else pinned,
    )


def _offloaded(plan: Plan) -> Iterator[tuple[str, int]]:
    yield from plan.uva.items()
    yield from ((entry.storage, entry.num_bytes) for unit in plan.units for entry in unit.entries)


@dataclass(frozen=True)
class _Shortfall:
    """A limit that the needs exceed."""

    limit: str
    needed_bytes: int
    available_bytes: int

    @property
    def missing_bytes(self) -> int:
        return self.needed_bytes - self.available_bytes


def check_limits(
    plan: Plan,
    limits: Limits,
    needs: Callable[[Plan], Needs],
    replan: Callable[[int], Plan] | None = None,
) -> None:
    """Refuse ``plan`` if ``limits`` have no room for it; pure.

    Args:
        limits: of :func:`read_limits`.
        needs: what carrying out a plan takes, as :func:`needs_of` says it.
        replan: makes the plan for a device-memory budget in bytes, so that the refusal can name one that fits; raises
            ``BudgetError`` with the minimum for one that is too small.

    Raises:
        LimitError: names the limit that misses most, by how much, and a budget that fits.
    """
    shortfalls = list(_shortfalls(needs(plan), limits))
    if not shortfalls:
        return
    worst = max(shortfalls, key=lambda shortfall: shortfall.missing_bytes)
    search = None if replan is None else _Search(plan, limits, needs, replan, worst)
    budget = None if search is None else search.run()
    raise LimitError(
        f"the plan needs {format_gib(worst.needed_bytes)} ({worst.needed_bytes} bytes) of {worst.limit}, and "
        f"{format_gib(worst.available_bytes)} ({worst.available_bytes} bytes) can be had: "
        f"{format_gib(worst.missing_bytes)} ({worst.missing_bytes} bytes) too little. "
        f"{_advice(search, budget)}{_mend(worst, limits, plan)}; nothing was allocated",
        worst.limit,
        worst.needed_bytes,
        worst.available_bytes,
        budget,
    )


def require_disk(folder: str | os.PathLike[str], num_bytes: int, mend: str) -> None:
    """Refuse to write ``num_bytes`` below ``folder`` if its file system has no room for them.

    An offload itself writes nothing: its disk store reads the unmodified files.

    Args:
        mend: what to do about it.

    Raises:
        LimitError: it has not.
    """
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise LimitError(
            f"{format_gib(num_bytes)} are to be written in {folder} and {format_gib(free)} are free on its disk: "
            f"{format_gib(num_bytes - free)} too little; {mend}",
            "disk space",
            num_bytes,
            free,
        )


_DEVICE = "device memory"
_HOST = "host memory"
_CGROUP = "host memory under its cgroup's limit"
_MEMLOCK = "locked memory (RLIMIT_MEMLOCK)"


def _shortfalls(needs: Needs, limits: Limits) -> Iterator[_Shortfall]:
    for name, needed, available in (
        (_DEVICE, needs.device_bytes, limits.device_free_bytes),
        (_HOST, needs.host_bytes, limits.host_available_bytes),
        (_CGROUP, needs.host_bytes, limits.cgroup_available_bytes),
        (_MEMLOCK, needs.pinned_bytes, limits.memlock_bytes),
    ):
        if available is not None and needed > available:
            yield _Shortfall(name, needed, available)


def _advice(search: _Search | None, budget: int | None) -> str:
    if search is None:
        return "Offload less or in smaller units, or "
    if budget is None:
        return f"No {'larger' if search.grow else 'smaller'} device-memory budget fits this machine as it is: "
    which = "smallest budget that leaves little enough to host memory" if search.grow else "largest budget that fits"
    size = f"{budget // 2**20}MiB" if budget % 2**20 == 0 else f"{budget}B"
    return f"The {which} is --device-memory {size}; use it, or "


def _mend(worst: _Shortfall, limits: Limits, plan: Plan) -> str:
    in_files = plan.mode in _HOST_MODES and (limits.device_free_bytes is None or worst.limit != _DEVICE)
    first = {
        _DEVICE: "free device memory first",
        _HOST: "free host memory first",
        _CGROUP: "raise the limit of the container or group (memory.max)",
        _MEMLOCK: "raise `ulimit -l`",
    }[worst.limit]
    if not in_files:
        return first
    some = "" if limits.device_free_bytes is None else ", or what does not fit: pass checkpoint=FOLDER and no mode"
    return f"{first}, or let the weights rest in the files (--offload-mode disk){some}"


class _Search:
    """For the device-memory budget nearest to ``plan`` that fits, to half a percent of the weights.

    A smaller budget takes less device memory and, on a GPU, more host memory, so the budgets that satisfy one side are
    those below, or above, a border. The search looks for the border of the side that ``worst`` is on, from where
    arithmetic expects it, and believes only a budget whose plan fits all limits.
    """

    def __init__(
        self,
        plan: Plan,
        limits: Limits,
        needs: Callable[[Plan], Needs],
        replan: Callable[[int], Plan],
        worst: _Shortfall,
    ) -> None:
        self.grow = limits.device_free_bytes is not None and worst.limit != _DEVICE
        self._limits, self._needs, self._replan = limits, needs, replan
        on_gpu = limits.device_free_bytes is not None
        device_alone = Limits(device_free_bytes=limits.device_free_bytes)
        self._side = replace(limits, device_free_bytes=None) if self.grow else device_alone if on_gpu else limits
        self._step = 1 << max(0, (plan.weight_bytes // _SEARCH_STEPS).bit_length() - 1)
        self._guess = plan.device_bytes + (worst.missing_bytes if self.grow else -worst.missing_bytes)
        self._weight_bytes = plan.weight_bytes
        self._tried: dict[int, Needs | None] = {}

    def run(self) -> int | None:
        """The largest budget that fits, or with ``grow`` the smallest; ``None`` if none does."""
        low = self._minimum()
        high = low + self._weight_bytes  # everything is resident there
        best = self._border(high, -(-low // self._step), -1) if self.grow else self._border(low, high // self._step, 1)
        return best if self._fits(best, self._limits) else None

    def _border(self, sure: int, end: int, sign: int) -> int:
        """The last multiple of the step from ``sure``, which should satisfy its side, towards ``end`` that does too."""
        if not self._fits(sure, self._side):
            return sure
        start = sign * sure // self._step + 1
        found = last_true(
            lambda index: self._fits(sign * index * self._step, self._side),
            start,
            sign * end,
            sign * self._guess // self._step,
        )
        return sure if found < start else sign * found * self._step

    def _fits(self, budget: int, limits: Limits) -> bool:
        if budget not in self._tried:  # a plan for a large model takes most of a second
            self._tried[budget] = self._needs_for(budget)
        found = self._tried[budget]
        return found is not None and not any(_shortfalls(found, limits))

    def _needs_for(self, budget: int) -> Needs | None:
        try:
            return self._needs(self._replan(budget))
        except OptionError:
            return None

    def _minimum(self) -> int:
        try:
            return self._replan(1).device_bytes
        except BudgetError as error:
            return error.minimum_bytes
        except OptionError:
            return 1


def last_true(holds: Callable[[int], bool], first: int, last: int, guess: int) -> int:
    """The largest of ``first``..``last`` for which ``holds``, which is true up to a border; ``first - 1`` for none.

    Steps away from ``guess`` in doubling strides, then halves: a good guess costs two or three calls.
    """
    below, above = first - 1, last + 1  # holds, holds not
    if below + 1 >= above:
        return below
    probe, stride = min(max(guess, first), last), 1
    rising = holds(probe)
    below, above = (probe, above) if rising else (below, probe)
    while above - below > 1:
        probe = min(below + stride, above - 1) if rising else max(above - stride, below + 1)
        if holds(probe) != rising:
            below, above = (below, probe) if rising else (probe, above)
            break
        below, above = (probe, above) if rising else (below, probe)
        stride *= 2
    while above - below > 1:
        probe = (below + above) // 2
        below, above = (probe, above) if holds(probe) else (below, probe)
    return below
