"""The CPU's share in missed experts, in a plan: tokens a second with it, beside those of the link alone.

A step misses each of the experts that a layer uses with the same probability, so their number is binomial: of 8 of 128
with 24 slots 2.0 on average, and none to three in nine steps of ten. Of ``n`` missing experts the CPU computes as many
as :func:`shares` says, which is the rule of ``divide`` in ``experts/cpu/doorbell.c`` with expected times in place of
measured ones. Against the rows of docs/benchmarks/2026-11-29-shared-experts-h200.md: ``tests/plan/test_cpu_share.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import TYPE_CHECKING

from headrace.formatting import format_rate

if TYPE_CHECKING:
    from headrace.model.records import Inventory
    from headrace.plan.build import Planner
    from headrace.plan.cached_experts import CachedLayer
    from headrace.plan.plan import Plan

# A plan that expects less turns nothing on, since it may as well lose.
WORTHWHILE = 1.05
_MOST_ROWS = 8  # of a step in which the CPU computes
# Asking and waiting in a graph, where something is missing and where nothing is (the H200 of the report).
_ASKED_S, _NOT_ASKED_S = 5.5e-6, 2e-6
# As in doorbell.c: of what the CPU computes so much is missed again, and a share has to gain so much.
_AGAIN, _GAIN = 0.33, 0.97
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


def forecast_cpu_share(planner: Planner, plan: Plan, rows: int, context: int = 0) -> CpuShareForecast | str:
    """The forecast for a step of ``rows`` rows; a text: why there is none."""
    rates, inventory = planner.rates, planner.inventory
    forms = {_form_of(inventory, layer) for layer in plan.cached}
    if not forms:
        return "the plan caches no experts"
    if rows > _MOST_ROWS:
        return f"steps of {rows} rows leave it to the link; up to {_MOST_ROWS} do not"
    if not rates.cpu_bytes_per_s:
        return f"no rate of the CPU of {rates.machine} is known: run `headrace probe`"
    if unknown := sorted(forms - rates.cpu_bytes_per_s.keys()):
        return f"no rate of the CPU for experts in {unknown[0]} is known"
    link_s = shared_s = 0.0
    for layer in plan.cached:
        times = _seconds(planner, layer, rows)
        link_s, shared_s = link_s + times[0], shared_s + times[1]
    if not link_s:
        return "all experts are on the device"
    fetch, forecasts = rates.expert_bytes_per_s, []
    for rate in (fetch * link_s / shared_s, fetch):  # as if the link fetched in that time
        other = replace(planner, rates=replace(rates, fetch_bytes_per_s=rate))
        forecasts.append(other.forecast(plan, rows, context).rows_per_s)
    return CpuShareForecast(*forecasts)


def shares(cpu_s: float, link_s: float, most: int) -> list[int]:
    """Of 0 to ``most`` missing experts, how many the CPU computes; seconds of an expert there, and over the link."""
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
        probability = comb(in_use, missing) * missed**missing * (1 - missed) ** (in_use - missing)
        alone += probability * missing * link_s
        asking_s = _ASKED_S if missing else _NOT_ASKED_S
        shared += probability * (_ends(missing, share, cpu_s, link_s) + asking_s)
    return alone, shared


def _ends(missing: int, share: int, cpu_s: float, link_s: float) -> float:
    """Seconds until both have ended, and what is missed again has been fetched."""
    return max((missing - share) * link_s, share * cpu_s) + _AGAIN * share * link_s


def _seconds(planner: Planner, layer: CachedLayer, rows: int) -> tuple[float, float]:
    from headrace.plan.cost_model import share_in_use

    rates, profile = planner.rates, planner.profile
    in_use = layer.num_experts * share_in_use(layer.num_experts, rows, profile)[0]
    top_k = profile.experts_per_token or layer.num_experts
    hit = planner.hits(layer.num_slots, layer.num_experts, top_k, in_use)
    size = layer.num_bytes / layer.num_experts
    cpu_s, link_s = size / rates.cpu_bytes_per_s[_form_of(planner.inventory, layer)], size / rates.expert_bytes_per_s
    return expected_s(cpu_s, link_s, 1 - hit, shares(cpu_s, link_s, round(in_use)))


def _form_of(inventory: Inventory, layer: CachedLayer) -> str:
    """Format of the experts, as :mod:`headrace.experts.cpu.pool` names it, or their dtype."""
    tensor = inventory.by_name[max(layer.storages, key=layer.row_bytes)].tensors[0]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return "mxfp4" if len(tensor.shape) == 4 else _FORMS.get(dtype, dtype)
