"""The CPU's share in the experts that a step misses: it computes some of them while the link brings the others.

An expert has the same bits wherever it runs (:mod:`headrace.experts.order`), so its place shows in no result.
Kernels write which experts, and what they multiply, to pinned memory; a thread of ``doorbell.c`` has the pool compute
them; the second product waits for their outputs. An expert that was computed enters no slot.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch

from headrace.errors import OptionError, StateError
from headrace.experts.cpu.native import Request
from headrace.experts.cpu.pool import Pool
from headrace.experts.cpu.share_kernels import (
    CODE,
    COMPUTED,
    CPU_NS,
    GIVEN_UP,
    LINK_NS,
    OUTPUTS_AT,
    SHARES,
    X_AT,
    ring_kernel,
    wait_kernel,
)
from headrace.experts.rows import IS_CHECKED
from headrace.forks import OwnProcess

_MOST_MISSING, _MOST_PAIRS, _MOST_INPUTS = 64, 256, 16384
# Of the pool, after which it is lost, and of kernels that wait for it: each poll crosses the link in about 1 us.
_PATIENCE_S, _MOST_POLLS = 1.0, 2_000_000
# Threads wait busily from layer to layer, and the one that looks for requests from step to step.
_SPIN_S, _LOOK_S = 2e-3, 20e-3
_BLOCK = 2048
# Memory that a lost thread may still read and write.
_lost: list[object] = []


class Doorbell:
    """A pool of threads and the pinned memory by which a device asks it for experts, until :meth:`stop`.

    Attributes:
        memory: for :func:`headrace.experts.ordered.run`: what device and host both write, and what the device alone.
        shares: int64 [65], read by the device: of n missing experts of a layer the CPU computes ``shares[n]``; 0 in
            ``shares[0]``: it is off.
        threads: how many compute.
    """

    def __init__(
        self, layers: Sequence[Request], kept: object, device: torch.device, cores: Sequence[int],
        shares: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            layers: of each layer its experts in host memory.
            kept: what owns that.
            device: that asks.
            cores: processors to compute on, see :class:`~headrace.experts.cpu.pool.Pool`.
            shares: the last one holds for more missing experts, too; default as measured while it runs.

        Raises:
            OptionError: experts with more inputs than there is room for.
            StateError: there is no compiler; the system refuses a thread.
        """
        for layer in layers:
            if (inputs := layer.gate_up.inputs) > _MOST_INPUTS or inputs % 4:
                raise OptionError(
                    f"experts on the CPU: expected inputs in fours, at most {_MOST_INPUTS}, found {inputs}: leave them "
                    f"to the link (cpu_experts=False)"
                )
        self._layers = (Request * len(layers))(*layers)
        size = OUTPUTS_AT.value + _MOST_PAIRS * max(layer.down.outputs for layer in layers) * 2
        words = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu")
        self.memory = [words, torch.zeros(3, dtype=torch.int64, device=device)]
        self._words = words[: X_AT.value].view(torch.int64)
        self.shares = self._words[SHARES.value : SHARES.value + _MOST_MISSING + 1]
        if shares is not None:
            self.shares.copy_(
                torch.tensor([1, *(shares[min(n, len(shares) - 1)] for n in range(1, _MOST_MISSING + 1))])
            )
        pool, address, self.threads = Pool(cores, spin_s=_SPIN_S, patience_s=_PATIENCE_S), words.data_ptr(), len(cores)
        at = pool._library.doorbell_start(
            pool.give(), address, address + X_AT.value, address + OUTPUTS_AT.value, self._layers, len(layers),
            shares is not None, _LOOK_S,
        )  # fmt: skip
        if at is None:
            raise StateError("experts on the CPU: the system has no memory for another thread, or refused it")
        # Also when the process exits or nothing refers to this any more: threads read memory that would be gone.
        kept = self.memory, self._layers, kept
        self._stop = weakref.finalize(self, _stop, pool._library, at, OwnProcess(), kept)

    def stop(self) -> None:
        """End the threads; the device asks for nothing any more. Idempotent."""
        self._stop()

    def check(self, num_ids: int = 0) -> None:
        """Check, before anything of a step of ``num_ids`` experts changes, that outputs so far were computed in time.

        Raises:
            StateError: they were not, and are not to be used.
            OptionError: there is no room for so many experts.
        """
        if self._words[CODE.value] or self._words[GIVEN_UP.value]:
            why = "a thread is dead or stopped" if self._words[CODE.value] else "there was no answer for seconds"
            raise StateError(
                f"experts on the CPU: {why}, so the outputs of the last step are not computed: do not use them; "
                f"call remove() of the share, or restart the process"
            )
        if num_ids > _MOST_PAIRS:
            raise OptionError(
                f"experts on the CPU: expected at most {_MOST_PAIRS} in a step, found {num_ids}: run fewer rows, or "
                f"leave them to the link (cpu_experts=False)"
            )

    @property
    def computed(self) -> int:
        """Experts that the CPU has computed so far."""
        return int(self._words[COMPUTED.value])

    @property
    def us_per_expert(self) -> tuple[float, float]:
        """Microseconds that another expert takes, as measured: on the CPU, and over the link."""
        return int(self._words[CPU_NS.value]) / 1e3, int(self._words[LINK_NS.value]) / 1e3


def _stop(library: ctypes.CDLL, at: int, process: OwnProcess, kept: object) -> None:
    """``kept``: what threads read and write until they have ended."""
    if process.is_forked or library.doorbell_stop(at):
        _lost.append(kept)


class LayerShare:
    """The share in the experts of one layer, the ``number``-th of its doorbell.

    Attributes:
        shares, uses: for :func:`headrace.experts.kernels.admit_kernel`.
    """

    def __init__(self, doorbell: Doorbell, number: int) -> None:
        self._doorbell, self._number = doorbell, number
        self.shares, self.check = doorbell.shares, doorbell.check
        count, device = doorbell._layers[number].num_experts, doorbell.memory[1].device
        self.uses = torch.zeros(2, count, dtype=torch.int32, device=device)

    def ring(self, ids: torch.Tensor, rows: torch.Tensor, inputs: torch.Tensor, fetched: torch.Tensor) -> None:
        """Launch what asks for the experts ``ids`` whose ``rows`` are elsewhere.

        Args:
            inputs: bf16 [tokens, inputs of an expert].
            fetched: int32, first how many experts come over the link.
        """
        memory, state = self._doorbell.memory
        words, to = memory[: X_AT.value].view(torch.int64), memory[X_AT.value : OUTPUTS_AT.value].view(torch.int64)
        x = inputs.contiguous().view(torch.int64)
        ring_kernel[(1,)](
            ids, rows, x, fetched, state, words, to, self._number, ids.shape[-1], NUM_IDS=ids.numel(), SIZE=x.numel(),
            BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip


def wait(memory: torch.Tensor, state: torch.Tensor, size: int) -> torch.Tensor:
    """Launch what waits for ``size`` outputs; returns them, bf16 as int16, in pinned memory.

    What was given up is NaN; or 0, in a forward that :meth:`Doorbell.check` follows: sampling from NaN ends the CUDA
    context.
    """
    outputs, words = memory[OUTPUTS_AT.value :].view(torch.int16), memory[: X_AT.value].view(torch.int64)
    instead = 0 if IS_CHECKED.get() else 0x7FC0
    wait_kernel[(1,)](
        state, words, outputs, SIZE=size, BLOCK=_BLOCK, MOST_POLLS=_MOST_POLLS, INSTEAD=instead, num_warps=1
    )
    return outputs
