"""The CPU's share in the experts that a step misses: it computes some of them while the link brings the others.

An expert has the same bits wherever it runs (:mod:`headrace.experts.order`), so who computes what shows in no result.
Kernels write which experts, and what they multiply, to pinned memory; a thread of ``doorbell.c`` has the pool compute
them; the second product waits for their outputs. An expert that was computed enters no slot.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from headrace.api import session_of
from headrace.errors import OptionError, StateError
from headrace.experts import order
from headrace.experts.cpu.native import Request
from headrace.experts.cpu.pool import Pool, matrix_of, physical_cores
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
)  # fmt: skip
from headrace.experts.rows import SHARED, CachedExperts, cached_experts
from headrace.forks import OwnProcess
from headrace.formatting import pluralize

if TYPE_CHECKING:
    from headrace.experts.cache import ExpertCache
    from headrace.plan.cached_experts import CachedLayer
    from headrace.runtime.session import OffloadSession

_MOST_MISSING, _MOST_PAIRS, _MOST_INPUTS = 64, 256, 16384
# Of the pool, after which it is lost, and of kernels that wait for it: each poll crosses the link in about 1 us.
_PATIENCE_S, _MOST_POLLS = 1.0, 2_000_000
# Threads wait busily from layer to layer, and the one that looks for requests from step to step.
_SPIN_S, _LOOK_S = 2e-3, 20e-3
_BLOCK = 2048
# With fewer it is slower than the link of a desktop; measured in docs/benchmarks.
_LEAST_CORES = 8

_log = logging.getLogger(__name__)


class CpuShare:
    """The CPU computes a share of what the cached experts of a model miss, from :meth:`attach` to :meth:`remove`.

    Attributes:
        counts: ``None``, as it guesses no tokens.
        memory: for :func:`headrace.experts.ordered.run`: what device and host both write, and what the device alone.
    """

    counts = None

    def __init__(
        self, model: Any, session: OffloadSession, cores: Sequence[int], shares: Sequence[int] | None = None
    ) -> None:
        """
        Args:
            cores: processors to compute on, see :class:`~headrace.experts.cpu.pool.Pool`.
            shares: of n missing experts of a layer the CPU computes ``shares[n]``; default as measured while it runs.

        Raises:
            OptionError: no experts that both can run are cached.
            StateError: there is no compiler; the system refuses a thread.
        """
        self._model, self._session = model, session
        self._layers = [(layer, cache, _cached(model, layer)) for layer, cache in session._caches]
        requests, self._kept = zip(*(_request(session, *each) for each in self._layers), strict=True)
        outputs = max(request.down.outputs for request in requests)
        is_cuda = session._device.type == "cuda"
        words = torch.zeros(OUTPUTS_AT + _MOST_PAIRS * outputs * 2, dtype=torch.uint8, pin_memory=is_cuda, device="cpu")
        self.memory = [words, torch.zeros(2, dtype=torch.int64, device=session._device)]
        self._words, self._process = words[:X_AT].view(torch.int64), OwnProcess()
        self._requests = (Request * len(requests))(*requests)
        self.shares = self._words[SHARES.value : SHARES.value + _MOST_MISSING + 1]
        if shares is not None:
            self.shares.copy_(torch.tensor([shares[min(n, len(shares) - 1)] for n in range(_MOST_MISSING + 1)]))
        self._threads = len(cores)
        pool = Pool(cores, spin_s=_SPIN_S, patience_s=_PATIENCE_S)
        self._library, address = pool._library, words.data_ptr()
        self._at: int | None = self._library.doorbell_start(
            pool.give(), address, address + X_AT, address + OUTPUTS_AT, self._requests, len(requests),
            shares is not None, _LOOK_S,
        )  # fmt: skip
        if self._at is None:
            raise StateError("experts on the CPU: the system has no memory for another thread, or refused it")

    def attach(self) -> None:
        """Let the caches ask from here on."""
        for number, (_, cache, cached) in enumerate(self._layers):
            vars(cached.twin)[SHARED] = self.memory
            cache.share = LayerShare(self, number)
        self._drop_graphs()
        self._session.attachments.append(self)

    def remove(self) -> None:
        """Let the link bring everything, and end the threads. Idempotent."""
        at, self._at = self._at, None
        if at is None or self._process.is_forked:
            return
        # Between asking and waiting a thread has the lock.
        with self._layers[0][1].turn.lock:
            self._detach()
        if self._library.doorbell_stop(at):
            _lost.append((self.memory, self._kept, self._requests))

    def _detach(self) -> None:
        for _, cache, cached in self._layers:
            cache.share = None
            vars(cached.twin).pop(SHARED, None)
        self._drop_graphs()
        with suppress(ValueError):
            self._session.attachments.remove(self)
        if self._session._device.type == "cuda":
            torch.cuda.synchronize(self._session._device)

    def _drop_graphs(self) -> None:
        for steps in self._session.captured:
            steps.drop()

    def check(self) -> None:
        """Raise ``StateError`` where an output is not to be used, because it was not computed in time."""
        if self._words[CODE.value] or self._words[GIVEN_UP.value]:
            why = "a thread is dead or stopped" if self._words[CODE.value] else "there was no answer for seconds"
            raise StateError(
                f"experts on the CPU: {why}, so the outputs of the last step are NaN: do not use them; call remove() "
                f"of the share, or restart the process"
            )

    @property
    def computed(self) -> int:
        """Experts that the CPU has computed so far."""
        return int(self._words[COMPUTED.value])

    @property
    def us_per_expert(self) -> tuple[float, float]:
        """Microseconds that another expert takes, as measured: on the CPU, and over the link."""
        return int(self._words[CPU_NS.value]) / 1e3, int(self._words[LINK_NS.value]) / 1e3

    @property
    def notes(self) -> Sequence[str]:
        """A line about what the CPU does."""
        cpu_us, link_us = self.us_per_expert
        if not self.computed:
            return [f"experts on the CPU: none so far ({pluralize(self._threads, 'thread')})"]
        is_off = not self.shares[1:9].any()
        return [
            f"experts on the CPU: {self.computed} computed by {pluralize(self._threads, 'thread')}, {cpu_us:.0f} us "
            f"each; the link takes {link_us:.0f} us{', so it has all of them now' if is_off else ''}"
        ]


_lost: list[object] = []


class LayerShare:
    """The share in one layer's experts."""

    def __init__(self, share: CpuShare, number: int) -> None:
        self._share, self._number, self.shares = share, number, share.shares

    def check(self, num_ids: int) -> None:
        """Raise, before anything of a step changes: see :meth:`CpuShare.check`; too many experts."""
        self._share.check()
        if num_ids > _MOST_PAIRS:
            raise OptionError(f"experts of a step: expected at most {_MOST_PAIRS}, found {num_ids}")

    def ring(self, ids: torch.Tensor, rows: torch.Tensor, inputs: torch.Tensor, fetched: torch.Tensor) -> None:
        """Launch what asks for the experts ``ids`` whose ``rows`` are elsewhere; ``inputs``: bf16 [tokens, inputs]."""
        memory, state = self._share.memory
        x = inputs.contiguous().view(torch.int64)
        ring_kernel[(1,)](
            ids, rows, x, fetched, state, memory[:X_AT].view(torch.int64), memory[X_AT:OUTPUTS_AT].view(torch.int64),
            self._number, ids.shape[-1], NUM_IDS=ids.numel(), SIZE=x.numel(), BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip


def wait(memory: torch.Tensor, state: torch.Tensor, size: int) -> torch.Tensor:
    """Launch what waits for ``size`` outputs; returns them, bf16 as int16, in pinned memory."""
    outputs = memory[OUTPUTS_AT:].view(torch.int16)
    words = memory[:X_AT].view(torch.int64)
    wait_kernel[(1,)](state, words, outputs, SIZE=size, BLOCK=_BLOCK, MOST_POLLS=_MOST_POLLS, num_warps=1)
    return outputs


def share_experts(model: Any, cores: Sequence[int] | None = None, shares: Sequence[int] | None = None) -> CpuShare:
    """Let the CPU compute a share of the cached experts that ``model`` misses, until ``remove()``.

    Args:
        model: offloaded, its experts cached, with ``experts_implementation="headrace"``.
        cores: processors to compute on; default one of each core but one, which is left to Python.
        shares: of n missing experts of a layer the CPU computes ``shares[n]``; default as measured while it runs.

    Raises:
        OptionError, StateError: as :class:`CpuShare`.
    """
    session = session_of(model)
    if session is None or not session._caches:
        raise OptionError("share_experts: expected an offloaded model with cached experts, found none")
    share = CpuShare(model, session, cores or physical_cores()[:-1] or physical_cores(), shares)
    share.attach()
    return share


def share_by_default(model: Any) -> CpuShare | None:
    """:func:`share_experts` where it is likely to gain; ``None``: this machine or model is not one of these."""
    if len(physical_cores()) < _LEAST_CORES:
        return None
    try:
        return share_experts(model)
    except (OptionError, StateError) as error:
        _log.info("the CPU computes no experts: %s", error)
        return None


def _cached(model: Any, layer: CachedLayer) -> CachedExperts:
    module = model.get_submodule(layer.module_fqn)
    cached = cached_experts(module)
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if cached is None or implementation != "headrace":
        raise OptionError(
            f"share_experts: expected experts_implementation='headrace', found {implementation!r} for "
            f"{layer.module_fqn}: call model.set_experts_implementation('headrace') before"
        )
    return cached


def _request(
    session: OffloadSession, layer: CachedLayer, cache: ExpertCache, cached: CachedExperts
) -> tuple[Request, object]:
    """What C needs of a layer's experts in host memory, and what owns it."""
    from headrace.adapters.transformers.ordered_experts import arguments_of

    assert session._ranges is not None
    tensors = {}
    for name in layer.storages:
        (tensor,) = session._bound[name].tensors
        info = tensor.info
        tensors[info.locations[0].attr] = session._ranges.in_place(name).view(info.dtype).view(info.shape)
    host = cached.twin_of(tensors)
    gate_up, down, is_interleaved, glu = arguments_of(host)
    inputs = gate_up.outputs_and_inputs()[1]
    if inputs > _MOST_INPUTS or inputs % 4:
        raise OptionError(f"share_experts: expected at most {_MOST_INPUTS} inputs, found {inputs}")
    for each in (gate_up, down):
        if any(part is not None and part.device.type != "cpu" for part in each[:3]):
            raise OptionError(f"share_experts: expected all tensors of {layer.module_fqn} in its cache")
    order.require_bf16(*(each.weight for each in (gate_up, down) if each.scales is None))
    (first, *kept), (second, *others) = matrix_of(gate_up), matrix_of(down)
    request = Request(first, second, layer.num_experts, 0, 0, 0, is_interleaved, 1)
    request.alpha, request.limit = glu or (0.0, 0.0)
    return request, (kept, others)
