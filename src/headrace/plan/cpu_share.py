"""The CPU's share in missed experts, in a plan: tokens a second with it, beside those of the link alone.

A step misses each of the experts that a layer uses with the same probability, so their number is binomial: of 8 of 128
with 24 slots 2.0 on average, and none to three in nine steps of ten. Of ``n`` missing experts the CPU computes as many
as :func:`shares` says, which is the rule of ``divide`` in ``experts/cpu/doorbell.c`` with expected times in place of
measured ones. Against the rows of docs/benchmarks/2026-11-29-shared-experts-h200.md: ``tests/plan/test_cpu_share.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.errors import OptionError, OptionTypeError
from headrace.formatting import format_rate
from headrace.model.records import Inventory, ModelProfile
from headrace.plan.cached_experts import CachedLayer
from headrace.plan.cost_model import share_in_use
from headrace.plan.rates import Rates
from headrace.plan.routing_traces import ExpertHits, FixedHits

# A plan that expects less turns nothing on, since it may as well lose.
WORTHWHILE = 1.05
_MOST_ROWS = 8  # of a step in which the CPU computes
# Asking and waiting in a graph, where something is missing and where nothing is (the H200 of the report).
_ASKED_S, _NOT_ASKED_S = 5.5e-6, 2e-6
# As in doorbell.c: of what the CPU computes so much is missed again, and a share has to gain so much.
_AGAIN, _GAIN = 0.33, 0.97
# What CPU and link together read of memory's rate: an assumption, 72 GB/s of two channels of DDR5-5600 (89.6).
_READ_SHARE = 0.8
_CPU_FORMS = ("bf16", "mxfp4", "int4", "fp8")
_FORMS = {"bfloat16": "bf16", "float8_e4m3fn": "fp8", "int32": "int4"}  # by dtype


@dataclass(frozen=True)
class CpuShareForecast:
    """Steps with and without the CPU's share.

    Attributes:
        rows_per_s: tokens a second with it.
        link_rows_per_s: and of the link alone.
    """

    rows_per_s: float
    link_rows_per_s: float

    @property
    def is_worthwhile(self) -> bool:
        """Whether ``cpu_experts="auto"`` turns it on."""
        return self.rows_per_s >= WORTHWHILE * self.link_rows_per_s

    def __str__(self) -> str:
        gain = self.rows_per_s / self.link_rows_per_s
        return (
            f"{format_rate(self.rows_per_s)} tokens/s expected with the CPU's share in missed experts, "
            f"{format_rate(self.link_rows_per_s)} without ({gain:.2f} x, worthwhile from {WORTHWHILE})"
        )


def slowdown(
    layers: Sequence[CachedLayer],
    inventory: Inventory,
    rates: Rates,
    profile: ModelProfile,
    hits: ExpertHits | FixedHits,
    rows: int,
) -> float | str:
    """Seconds of the CPU and the link, over those of the link alone, for what a step of ``rows`` rows misses.

    A text: why there is no such number.
    """
    forms = {_form_of(inventory, layer) for layer in layers}
    if not forms:
        return "the plan caches no experts"
    if any(layer.host_slots is not None for layer in layers):
        return "experts are in files, and not all of them in host memory"
    if rows > _MOST_ROWS:
        return f"steps of {rows} rows leave it to the link; up to {_MOST_ROWS} do not"
    if not rates.cpu_bytes_per_s:
        return f"no rate of the CPU of {rates.machine} is known: run `headrace probe`"
    if unknown := sorted(forms - rates.cpu_bytes_per_s.keys()):
        return f"no rate of the CPU for experts in {unknown[0]} is known"
    alone_s = shared_s = 0.0
    for layer in layers:
        in_use = layer.num_experts * share_in_use(layer.num_experts, rows, profile)[0]
        hit = hits(layer.num_slots, layer.num_experts, profile.experts_per_token or layer.num_experts, in_use)
        size = layer.num_bytes / layer.num_experts
        cpu_s, link_s = size / rates.cpu_bytes_per_s[_form_of(inventory, layer)], size / rates.expert_bytes_per_s
        times = expected_s(cpu_s, link_s, 1 - hit, shares(cpu_s, link_s, round(in_use)))
        alone_s, shared_s = alone_s + times[0], shared_s + times[1]
    return shared_s / alone_s if alone_s else "all experts are on the device"


def shares(cpu_s: float, link_s: float, most: int) -> list[int]:
    """How many the CPU computes of 0 to ``most`` missing experts; seconds of an expert there, and over the link."""
    found = [0]
    for missing in range(1, most + 1):
        best, least = 0, missing * link_s
        for share in range(1, missing + 1):
            if (seconds := _ends(missing, share, cpu_s, link_s)) < _GAIN * least:
                best, least = share, seconds
        found.append(best)
    return found


def expected_s(cpu_s: float, link_s: float, missed: float, divided: Sequence[int]) -> tuple[float, float]:
    """Expected seconds for the missing experts of a layer: by the link alone, and with the CPU.

    Args:
        cpu_s, link_s: see :func:`shares`.
        missed: the probability that an expert in use is missing.
        divided: shares of 0 missing experts up to all that the layer uses.
    """
    alone, shared, in_use = 0.0, 0.0, len(divided) - 1
    for missing, share in enumerate(divided):
        probability = math.comb(in_use, missing) * missed**missing * (1 - missed) ** (in_use - missing)
        alone += probability * missing * link_s
        asking_s = _ASKED_S if missing else _NOT_ASKED_S
        shared += probability * (_ends(missing, share, cpu_s, link_s) + asking_s)
    return alone, shared


def _ends(missing: int, share: int, cpu_s: float, link_s: float) -> float:
    """Seconds until both have ended, and what is missed again has been fetched."""
    return max((missing - share) * link_s, share * cpu_s) + _AGAIN * share * link_s


def _form_of(inventory: Inventory, layer: CachedLayer) -> str:
    """Format of the experts, as :mod:`headrace.experts.cpu.pool` names it, or their dtype."""
    tensor = inventory.by_name[max(layer.storages, key=layer.row_bytes)].tensors[0]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return "mxfp4" if len(tensor.shape) == 4 else _FORMS.get(dtype, dtype)


def with_host_memory(rates: Rates, gb_per_s: float) -> Rates:
    """``rates`` with those of a CPU of eight cores or more, which computes experts as fast as it reads them.

    Args:
        rates: of a machine whose CPU was not measured.
        gb_per_s: of all channels of its memory, by the names of its modules: 51.2 for two of DDR4-3200.

    Raises:
        OptionError, OptionTypeError: no number; a CPU that was measured; the link alone takes as much.
    """
    if isinstance(gb_per_s, bool) or not isinstance(gb_per_s, int | float):
        raise OptionTypeError(f"host_bandwidth: expected GB/s of host memory, such as 89.6, found {gb_per_s!r}")
    if rates.cpu_bytes_per_s:
        raise OptionError(f"--host-bandwidth {gb_per_s:g}: the CPU of {rates.machine} was measured; leave it out")
    left = _READ_SHARE * gb_per_s * 1e9 - rates.expert_bytes_per_s
    if not 0 < left < math.inf:
        raise OptionError(
            f"--host-bandwidth {gb_per_s:g}: expected GB/s of host memory, more than the "
            f"{rates.expert_bytes_per_s / _READ_SHARE / 1e9:.1f} that copies to the GPU take, such as 89.6 for two "
            f"channels of DDR5-5600"
        )
    return replace(rates, cpu_bytes_per_s=dict.fromkeys(_CPU_FORMS, left))
