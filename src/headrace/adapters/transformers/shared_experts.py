"""Cached experts of transformers of which the CPU computes a share; :mod:`headrace.experts.cpu.share` says how."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from headrace.adapters.transformers.ordered_experts import NAME, arguments_of
from headrace.api import session_of
from headrace.errors import OptionError, StateError
from headrace.experts import order
from headrace.experts.cpu.native import Request
from headrace.experts.cpu.pool import matrix_of, spare_cores
from headrace.experts.cpu.share import Doorbell, LayerShare
from headrace.experts.rows import SHARED, CachedExperts, cached_experts
from headrace.forks import OwnProcess
from headrace.formatting import pluralize
from headrace.model.memory_profile import chosen_by
from headrace.plan.cpu_share import CpuShareForecast

if TYPE_CHECKING:
    from headrace.plan.cached_experts import CachedLayer
    from headrace.runtime.session import OffloadSession

_log = logging.getLogger(__name__)
ONE_CORE = "this process may run on one physical core, which Python needs (cores= names others)"


class CpuShare:
    """The CPU computes a share of what the cached experts of a model miss, from :meth:`attach` to :meth:`remove`.

    Attributes:
        counts: ``None``, as it guesses no tokens.
        doorbell: by which kernels ask for experts.
        expected: what the plan expected of it; empty: no plan was asked.
    """

    counts, expected = None, ""

    def __init__(
        self, model: Any, session: OffloadSession, cores: Sequence[int], shares: Sequence[int] | None = None
    ) -> None:
        """Arguments and errors as for :func:`share_experts`."""
        self._session, self._process = session, OwnProcess()
        self._caches = [cache for _, cache in session._caches]  # the session forgets them when the offload ends
        self._cached = [_cached(model, layer) for layer, _ in session._caches]
        layers = zip(session._caches, self._cached, strict=True)
        requests, kept = zip(*(_request(session, layer, cached) for (layer, _), cached in layers), strict=True)
        self.doorbell = Doorbell(requests, kept, session._device, cores, shares)

    def attach(self) -> None:
        """Let the caches ask from here on."""
        for number, (cache, cached) in enumerate(zip(self._caches, self._cached, strict=True)):
            vars(cached.twin)[SHARED] = self.doorbell.memory
            cache.share = LayerShare(self.doorbell, number)
        self._drop_graphs()
        self._session.attachments.append(self)

    def remove(self) -> None:
        """Let the link bring everything, and end the threads. Idempotent."""
        if self._process.is_forked:
            return
        with self._caches[0].turn.lock:  # a thread has it between asking and waiting
            for cache, cached in zip(self._caches, self._cached, strict=True):
                cache.share = None
                vars(cached.twin).pop(SHARED, None)
            self._drop_graphs()
            with suppress(ValueError):
                self._session.attachments.remove(self)
            if self._session._device.type == "cuda":
                torch.cuda.synchronize(self._session._device)
        self.doorbell.stop()

    def _drop_graphs(self) -> None:
        for steps in self._session.captured:
            steps.drop()

    def check(self) -> None:
        """Raise ``StateError`` where outputs of the last step are not to be used."""
        self.doorbell.check()

    @property
    def notes(self) -> Sequence[str]:
        """A line about what the CPU does."""
        threads, (cpu_us, link_us) = pluralize(self.doorbell.threads, "thread"), self.doorbell.us_per_expert
        expected = [f"experts on the CPU: {self.expected}"] * bool(self.expected)
        if not self.doorbell.computed:
            return [*expected, f"experts on the CPU: none so far ({threads})"]
        is_off = not self.doorbell.shares[1:9].any()
        return [
            *expected,
            f"experts on the CPU: {self.doorbell.computed} computed by {threads}, {cpu_us:.0f} us each; the link takes "
            f"{link_us:.0f} us{', so it has all of them now' if is_off else ''}",
        ]


class NoShare:
    """Says in ``stats()`` why the CPU computes none of the missed experts, from :meth:`attach` to :meth:`remove`."""

    counts = None

    def __init__(self, session: OffloadSession, why: str) -> None:
        self.session, self.notes = session, [f"experts on the CPU: off: {why}"]

    def attach(self) -> None:
        """Say it from here on."""
        _log.info("%s", self.notes[0])
        self.session.attachments.append(self)

    def remove(self) -> None:
        """Say it no more. Idempotent."""
        with suppress(ValueError):
            self.session.attachments.remove(self)

    def check(self) -> None:
        """Nothing can be wrong."""


def share_if_worthwhile(model: Any, forecast: CpuShareForecast | str) -> CpuShare | NoShare:
    """:func:`share_experts` where ``forecast`` says so and it can be; ``stats()`` has the reason either way."""
    session, why = session_of(model), str(forecast)
    assert session is not None  # load() has offloaded it
    if isinstance(forecast, CpuShareForecast) and forecast.is_worthwhile:
        try:
            share = share_experts(model)
            if isinstance(share, CpuShare):
                share.expected = why
            return share
        except (OptionError, StateError) as error:
            why = str(error)
    no_share = NoShare(session, why)
    no_share.attach()
    return no_share


def share_experts(
    model: Any, cores: Sequence[int] | None = None, shares: Sequence[int] | None = None
) -> CpuShare | NoShare:
    """Let the CPU compute a share of the cached experts that ``model`` misses, until ``remove()``.

    Args:
        model: offloaded, its experts cached, with ``experts_implementation="headrace"``.
        cores: processors to compute on; default one of each core but one, which is left to Python: with one core the
            link keeps all, and ``stats()`` says so.
        shares: of n missing experts of a layer the CPU computes ``shares[n]``; default as measured while it runs.

    Raises:
        OptionError: no experts that both can run are cached.
        StateError: there is no compiler; the system refuses a thread.
    """
    session = session_of(model)
    if session is None or not session._caches:
        raise OptionError(
            "share_experts: expected an offloaded model with cached experts, found none: offload it with "
            "rules=[('experts', 'cache')]"
        )
    if session.plan.kind.host_slots is not None:
        raise OptionError(
            f"share_experts: expected experts in host memory, found mode {session.plan.mode!r}: "
            f"use mode 'cpu', or leave it out (cpu_experts=False)"
        )
    cores = spare_cores() if cores is None else cores
    share = CpuShare(model, session, cores, shares) if cores else NoShare(session, ONE_CORE)
    share.attach()
    return share


def _cached(model: Any, layer: CachedLayer) -> CachedExperts:
    module = model.get_submodule(layer.module_fqn)
    cached = cached_experts(module)
    implementation = chosen_by(module)
    if cached is None or implementation != NAME:
        raise OptionError(
            f"share_experts: expected experts_implementation={NAME!r}, found {implementation!r} for "
            f"{layer.module_fqn}: call model.set_experts_implementation({NAME!r}) before"
        )
    return cached


def _request(session: OffloadSession, layer: CachedLayer, cached: CachedExperts) -> tuple[Request, object]:
    """The experts of a layer in host memory for C, and what owns their memory."""
    assert session._ranges is not None  # there are cached layers
    tensors = {}
    for name in layer.storages:
        (tensor,) = session._bound[name].tensors
        host = session._ranges.in_place(name).view(tensor.info.dtype).view(tensor.info.shape)
        tensors[tensor.info.locations[0].attr] = host
    gate_up, down, is_interleaved, glu = arguments_of(cached.twin_of(tensors))
    for each in (gate_up, down):
        if any(part is not None and part.device.type != "cpu" for part in each[:3]):
            raise OptionError(
                f"share_experts: expected all tensors of {layer.module_fqn} in its cache, found some on the device: "
                f"leave experts to the link (cpu_experts=False)"
            )
    order.require_bf16(*(each.weight for each in (gate_up, down) if each.scales is None))
    (first, *kept), (second, *others) = matrix_of(gate_up), matrix_of(down)
    request = Request(first, second, layer.num_experts, 0, 0, 0, is_interleaved, True)
    request.alpha, request.limit = glu or (0.0, 0.0)
    return request, (kept, others)
