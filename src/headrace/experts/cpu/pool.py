"""Threads that run experts of few rows from this machine's memory, with the bits of the kernels on a GPU.

No bit depends on the number of threads or on the processor's instructions; ``experts.c`` says how work is divided.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from headrace.errors import MORE_THREADS, OptionError, StateError
from headrace.experts import order
from headrace.experts.cpu.native import INSTRUCTIONS, Matrix, Request, library
from headrace.experts.order import Projection
from headrace.memory.system import SYSFS, group_levels, parse_cpu_list

# How long threads wait busily for the next product: they take the core from torch's own threads meanwhile.
SPIN_S = 50e-6
# A thread that makes no output for so long is lost; it makes hundreds in a millisecond.
PATIENCE_S = 1.0
_FORMS = ("bf16", "mxfp4", "int4", "fp8")
_FINE, _NO_MEMORY, _STUCK = range(3)
# What a lost thread may still read and write.
_lost: list[object] = []


class Pool:
    """Threads of a process, one of them the caller.

    Args:
        cores: processors to run on, one for each thread; the caller has the first, while it runs.
        instructions: index into ``INSTRUCTIONS``; default the best that the processor has.

    Raises:
        StateError: there is no compiler; the system refuses a thread.
    """

    def __init__(
        self, cores: Sequence[int], instructions: int | None = None, spin_s: float = SPIN_S,
        patience_s: float = PATIENCE_S,
    ) -> None:  # fmt: skip
        self.cores, self._pid, self._lock = tuple(cores), os.getpid(), threading.Lock()
        self._library = library()
        best = self._library.experts_best()
        kind = best if instructions is None else instructions
        if not 0 <= kind <= best:
            raise OptionError(f"instructions: expected one of {INSTRUCTIONS[: best + 1]}, found {kind}")
        places = (ctypes.c_int * len(cores))(*cores)
        self._at: int | None = self._library.experts_start(len(cores), places, kind, spin_s, patience_s)
        if self._at is None:
            raise StateError(f"experts on the CPU: no memory for {len(cores)} threads, or refused: {MORE_THREADS}")

    def run(self, request: Request, *kept: object) -> None:
        """Run ``request``; ``kept``: what owns the memory that it names.

        Raises:
            StateError: a thread is lost, or was before; there is no memory; this process is a fork.
        """
        self._call(self._library.experts_run, (ctypes.byref(request),), kept)

    def unpack(self, matrix: Matrix, expert: int, out: torch.Tensor, *kept: object) -> None:
        """Write weights of one expert into ``out``, bf16 [outputs, inputs]; ``matrix`` is packed. As :meth:`run`."""
        self._call(self._library.experts_unpack, (ctypes.byref(matrix), expert, out.data_ptr()), (out, *kept))

    def _call(self, function: Callable[..., int], arguments: tuple[object, ...], kept: tuple[object, ...]) -> None:
        if os.getpid() != self._pid:
            raise StateError("this process is a fork of the one that started this Pool of threads: start another here")
        with self._lock:
            if self._at is None:
                raise StateError("this Pool of threads is stopped: start another")
            code = function(self._at, *arguments)
        if code == _STUCK:
            _lost.append(kept)
            raise StateError(
                f"experts on the CPU: one of {len(self.cores)} threads (cores {', '.join(map(str, self.cores))}) is "
                f"dead or stopped, and its outputs are missing: restart the process"
            )
        if code:
            raise StateError("experts on the CPU: the system has no memory for the values between two products")

    def give(self) -> int | None:
        """The pool of ``experts.c``, for an owner there; this one is stopped."""
        with self._lock:
            at, self._at = self._at, None
            return at

    def stop(self) -> None:
        """End the threads, once a request that runs has ended."""
        with self._lock:
            at, self._at = self._at, None
            if at is not None and os.getpid() == self._pid:
                self._library.experts_stop(at)


def physical_cores(sysfs: Path = SYSFS, membership: str | None = None, groups: Path = SYSFS / "fs/cgroup") -> list[int]:
    """One processor of each core that this thread may run on, and no more than control groups give it time for."""
    found: dict[int, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            file = sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            siblings = parse_cpu_list(file.read_text())
        except (OSError, ValueError):  # some containers hide it
            siblings = frozenset((cpu,))
        found.setdefault(min(siblings), cpu)
    shares = [share for level in group_levels("cpu", membership, groups) if (share := _share_of_time(level))]
    return list(found.values())[: max(1, int(min(shares, default=len(found))))]


def spare_cores() -> list[int]:
    """:func:`physical_cores` but one, which is left to Python: the cores that a model's missed experts are for."""
    return physical_cores()[:-1]


def _share_of_time(level: Path) -> float | None:
    """Processors' time that a control group may use in a time (v2: cpu.max); ``None``: any."""
    with suppress(OSError, ValueError):
        quota, period = (level / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = ((level / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    return None


_pools: dict[int, Pool] = {}
_starting = threading.Lock()


def _in_child() -> None:
    """A lock that another thread held would stay locked."""
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def default_pool() -> Pool:
    """This process's own pool, of all its cores; a forked child starts another."""
    with _starting:
        return _pools.get(os.getpid()) or _pools.setdefault(os.getpid(), Pool(physical_cores()))


def run(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Projection, down: Projection,
    is_interleaved: bool = False, glu: Sequence[float] = (), pool: Pool | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run experts as :func:`headrace.experts.order.run_experts` does, from host memory.

    Raises:
        OptionError: another dtype than bf16, or tensors that do not fit together.
        StateError: see :class:`Pool`.
    """
    order.require_dtypes(x, weights, gate_up, down)
    (count, inputs), (outputs, inner) = gate_up.outputs_and_inputs(), down.outputs_and_inputs()
    found = (*x.shape, *weights.shape, count, len(down.weight))
    if found != (len(ids), inputs, *ids.shape, 2 * inner, len(gate_up.weight)):
        raise OptionError(f"experts: expected tensors that fit together, found {tuple(x.shape)}, {found[2:]}")
    is_bf16, out = weights.dtype == torch.bfloat16, x.new_zeros(len(x), outputs)
    x, ids, weights = x.contiguous(), ids.long().contiguous(), weights.float().contiguous()
    (first, *kept), (second, *others) = matrix_of(gate_up), matrix_of(down)
    request = Request(
        first, second, len(gate_up.weight), *ids.shape, is_bf16, is_interleaved, False,
        *(each.data_ptr() for each in (x, ids, weights, out)), *(glu or (0.0, 0.0)),
    )  # fmt: skip
    if ids.numel():
        (pool or default_pool()).run(request, x, ids, weights, out, *kept, *others)
    return out


def unpack(projection: Projection, expert: int, out: torch.Tensor, pool: Pool | None = None) -> None:
    """Write packed weights of ``expert`` into ``out``: bf16 [outputs, inputs], contiguous; errors: :class:`Pool`."""
    matrix, *kept = matrix_of(projection)
    (pool or default_pool()).unpack(matrix, expert, out, *kept)


def matrix_of(projection: Projection) -> tuple[Matrix, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The projection for C, and what owns its memory; weights are read where they lie."""
    weight, scales, bias, is_transposed = projection
    if scales is not None:  # codes are counted in bytes
        weight, scales = weight.flatten(2).view(torch.uint8), scales.contiguous()
    bias = None if bias is None else bias.contiguous()
    expert, row, k = (weight.mT if is_transposed else weight).stride()
    if scales is not None and k != 1:
        raise OptionError(
            f"codes of {projection.form}: expected those of a row one after another, found strides {weight.stride()}"
        )
    form, sizes = _FORMS.index(projection.form), projection.of_a_scale()
    places = (None if each is None else each.data_ptr() for each in (weight, scales, bias))
    return Matrix(form, *projection.outputs_and_inputs(), expert, row, k, *sizes, *places), weight, scales, bias
