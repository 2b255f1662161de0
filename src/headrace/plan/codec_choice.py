"""Which codec a budget's units get: ``exp3`` where the coded step is predicted to be faster, or fits alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.codec.layout import UNITS_AHEAD, UNITS_AT_ONCE
from headrace.config import Budget
from headrace.errors import BudgetError, HeadraceWarning, OptionError
from headrace.plan.candidates import mean_log
from headrace.plan.kinds import HOST, kind_of

if TYPE_CHECKING:
    from headrace.plan.build import Planner
    from headrace.plan.plan import Plan


def faster_codec(planner: Planner, budget: Budget, plan: Callable[[Budget], Plan]) -> Plan:
    """The plan for ``budget``, whose codec is ``"auto"``; ``plan`` makes those that are compared, with ``planner``.

    Raises:
        BudgetError: the budget is below the minimum, coded or not.
    """
    try:
        plain = plan(replace(budget, codec="none"))
    except BudgetError:
        with suppress(BudgetError, OptionError):  # there may be room for the code alone
            if planner.has_triton and kind_of(budget.mode or planner.default_mode) is HOST:
                return plan(replace(_within_free(planner, budget), codec="exp3"))
        raise
    on_link = plain.offloaded_bytes and plain.kind is HOST and planner.has_triton
    if not on_link or planner.rates.copies_take_cores:  # a CPU decodes more slowly than it copies
        return plain
    if plain.staged_units:
        uncoded_bytes = (UNITS_AT_ONCE + UNITS_AHEAD) * max(unit.num_bytes for unit in plain.units)
        budget = _within_free(planner, budget, uncoded_bytes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HeadraceWarning)  # it is that of the plan above
            coded = plan(replace(budget, codec="exp3"))
    except (BudgetError, OptionError):
        return plain
    work = budget.workload
    plans = [[planner.forecast(p, rows, work.context).step_s for rows in work.batch_sizes] for p in (plain, coded)]
    plain_s, coded_s = mean_log(np.array(plans).T)
    return coded if coded_s < plain_s else plain


def _within_free(planner: Planner, budget: Budget, uncoded_bytes: int = 0) -> Budget:
    """``budget`` for a code, of which nothing is in files: free memory holds it, and units until they are coded."""
    free_bytes = None if planner.spill is None else planner.spill.free_bytes
    if free_bytes is None:
        return budget
    room = max(1, free_bytes - uncoded_bytes)
    return replace(budget, host_memory=min(room, budget.host_limit_bytes or room))
