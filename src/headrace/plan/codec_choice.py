"""Which codec a budget's units get: ``exp3`` where the coded step is predicted to be faster, or fits alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np

from headrace.codec.layout import UNITS_AHEAD, UNITS_AT_ONCE
from headrace.config import Budget
from headrace.errors import BudgetError, HeadraceWarning, OptionError
from headrace.plan.candidates import Spill, mean_log
from headrace.plan.cost_model import Forecast
from headrace.plan.plan import Plan

Forecasts = Callable[[Plan, int, int], Forecast]


def faster_codec(
    budget: Budget, plan: Callable[[Budget], Plan], forecast: Forecasts, spill: Spill | None, *, decodes_slowly: bool
) -> Plan:
    """The plan for ``budget``, coded or not, of a device that has the kernels which decode.

    Args:
        budget: its codec is ``"auto"``.
        plan: makes the plan for a budget with a given codec.
        forecast: predicts a step of a plan with so many rows at a context.
        spill: what host memory has free.
        decodes_slowly: the device decodes more slowly than it copies: only what fits no other way is coded.

    Raises:
        BudgetError: the budget is below the minimum, coded or not.
    """
    try:
        plain = plan(replace(budget, codec="none"))
    except BudgetError:
        with suppress(BudgetError, OptionError):  # there may be room for the code alone
            return plan(replace(_within_free(budget, spill), codec="exp3"))
        raise
    if decodes_slowly or not plain.offloaded_bytes:
        return plain
    if plain.reads_files:  # host memory is short: experts may be in files, and no unit
        largest = max((unit.num_bytes for unit in plain.units), default=0)
        uncoded_bytes = (UNITS_AT_ONCE + UNITS_AHEAD) * largest
        budget = _within_free(budget, spill, uncoded_bytes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HeadraceWarning)  # it is that of the plan above
            coded = plan(replace(budget, codec="exp3"))
    except (BudgetError, OptionError):
        return plain
    work = budget.workload
    plans = [[forecast(p, rows, work.context).step_s for rows in work.batch_sizes] for p in (plain, coded)]
    plain_s, coded_s = mean_log(np.array(plans).T)
    return coded if coded_s < plain_s else plain


def _within_free(budget: Budget, spill: Spill | None, uncoded_bytes: int = 0) -> Budget:
    """``budget`` for a code, of which nothing is in files: free memory holds it, and units until they are coded."""
    if spill is None or spill.free_bytes is None:
        return budget
    room = max(1, spill.free_bytes - uncoded_bytes)
    return replace(budget, host_memory=min(room, budget.host_limit_bytes or room))
