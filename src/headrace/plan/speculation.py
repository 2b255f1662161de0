"""Speculative decoding in a plan: one pass verifies several guesses, and weights cross the link once for all of them.

A pass with K guesses computes K + 1 rows. If every guess is accepted with the probability a, independently of the
others, it yields (1 - a ** (K + 1)) / (1 - a) tokens (Leviathan, Kalman and Matias, "Fast Inference from Transformers
via Speculative Decoding", ICML 2023, equation 1).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.config import count
from headrace.errors import OptionError, OptionTypeError
from headrace.formatting import format_rate, format_time
from headrace.json_files import decode, parse, read_file
from headrace.model.layers import find_layers
from headrace.stats import SpeculationCounts

if TYPE_CHECKING:
    from headrace.plan.build import Planner
    from headrace.plan.plan import Plan

LOOKUP = "lookup"
MTP = "mtp"

# Assumed probabilities that a guess is accepted. Published for Qwen3-32B with a draft of 1.7B: 3.28 tokens a pass at
# K = 4, 4.04 at K = 8; 0.65 for the first head of multi-token prediction. N-grams of passages of our docs: 1.39 at
# K = 4 (docs/benchmarks/2026-11-25-speculation-cpu.md).
_ACCEPTANCE = {LOOKUP: 0.28, MTP: 0.65, "draft": 0.78}
_MOST_GUESSES = 16
# A layer of an eager forward takes Python so long on a GPU: 31.4 ms for the 36 of Qwen3-8B's shape (H200).
_EAGER_LAYER_S = 31.4e-3 / 36


@dataclass(frozen=True)
class Speculation:
    """Guesser of tokens that the model verifies.

    Attributes:
        guesser: ``"lookup"`` (n-grams of the prompt and the answer), ``"mtp"`` (heads of multi-token prediction in the
            checkpoint), or a draft model: a folder, or a name in the Hub's cache.
        guesses: guesses of a pass; ``None``: as many as are predicted to be fastest.
        accepted: tokens that a pass yields, that of the model included; ``None``: assumed.
    """

    guesser: str
    guesses: int | None = None
    accepted: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.guesser, str) or not self.guesser:
            raise OptionTypeError(f"speculate: expected 'lookup', 'mtp' or a draft model, found {self.guesser!r}")
        if self.guesses is not None:
            count("guesses", self.guesses)
        if isinstance(self.accepted, bool) or not isinstance(self.accepted, int | float | None):
            raise OptionTypeError(f"accepted: expected a number of tokens a pass, such as 1.5, found {self.accepted!r}")
        most = (self.guesses or _MOST_GUESSES) + 1
        if self.accepted is not None and not 1 <= self.accepted <= most:
            raise OptionError(
                f"accepted = {self.accepted:g} tokens a pass: expected 1 to {most}, one more than there are guesses"
            )

    @property
    def draft(self) -> str | None:
        """The draft model; ``None``: there is none."""
        return None if self.guesser in (LOOKUP, MTP) else self.guesser

    @classmethod
    def measured(cls, guesser: str, path: str | os.PathLike[str], guesses: int | None = None) -> Speculation:
        """Speculation with the tokens a pass of a file that ``headrace generate --acceptance`` wrote.

        Raises:
            OptionError: no such file, of another guesser, or of another number of guesses.
        """
        flag = f"--accepted-from {os.fspath(path)!r}"
        try:
            counts = decode(SpeculationCounts, parse(read_file(Path(path))))
        except (OSError, ValueError) as error:
            raise OptionError(
                f"{flag}: expected a file of `headrace generate --acceptance FILE`, found: {error}"
            ) from error
        is_fit = counts.guesser == guesser and guesses in (None, counts.guesses)
        if not is_fit or not 0 < counts.passes <= counts.tokens:
            raise OptionError(
                f"{flag}: expected {guesses or 'any number of'} guesses by {guesser}, found {counts.guesses} by "
                f"{counts.guesser}, {counts.tokens} tokens in {counts.passes} passes; measure it again with `headrace "
                f"generate --acceptance FILE`"
            )
        return cls(guesser, counts.guesses, min(counts.tokens_per_pass, counts.guesses + 1.0))


@dataclass(frozen=True)
class DraftCost:
    """Cost of a draft on the device: memory with its cache, and seconds of a guess, which is a pass of one row.

    ``heads``: of multi-token prediction, one for each guess; 0: the draft is a model.
    """

    device_bytes: int
    pass_s: float
    heads: int = 0

    @classmethod
    def of(cls, planner: Planner, plan: Plan, context: int) -> DraftCost:
        """Cost of the model of ``planner``, all of which is resident in ``plan``; on a GPU its pass is captured."""
        used = plan.device_bytes + planner.profile.workload_bytes(1, context)
        return cls(used, planner.forecast(plan, 1, context).step_s)


@dataclass(frozen=True)
class SpeculationForecast:
    """Decoding one sequence with and without speculation.

    Attributes:
        guesser, guesses: see :class:`Speculation`.
        tokens_per_pass: assumed, or as given.
        is_assumed: whether it is.
        pass_s, guess_s: seconds of verification, and of making the guesses.
        tokens_per_s, plain_tokens_per_s: with and without.
    """

    guesser: str
    guesses: int
    tokens_per_pass: float
    is_assumed: bool
    pass_s: float
    guess_s: float
    tokens_per_s: float
    plain_tokens_per_s: float

    @property
    def is_faster(self) -> bool:
        """Whether speculation is predicted to pay."""
        return self.tokens_per_s > self.plain_tokens_per_s

    def __str__(self) -> str:
        source, noun = "assumed" if self.is_assumed else "as given", "guess" if self.guesses == 1 else "guesses"
        made = f", and {format_time(self.guess_s)} to guess" if self.guess_s else ""
        return (
            f"speculation with {self.guesses} {noun} by {self.guesser}: {self.tokens_per_pass:.1f} tokens a pass "
            f"({source}), {format_time(self.pass_s)} to verify{made}: {format_rate(self.tokens_per_s)} tokens/s in "
            f"place of {format_rate(self.plain_tokens_per_s)}"
        )

    def require_faster(self) -> None:
        """Raise ``OptionError`` unless speculation is predicted to pay."""
        if not self.is_faster:
            measured = ", or state what you have measured (--accepted)" if self.is_assumed else ""
            raise OptionError(f"{self}: leave --speculate out{measured}")


def forecast_speculation(
    speculation: Speculation, planner: Planner, plan: Plan, context: int, draft: DraftCost | None, *, on_gpu: bool
) -> SpeculationForecast:
    """The fastest number of guesses, or the one given, for one sequence with ``context`` tokens in the KV cache.

    Raises:
        OptionError: another number than there are heads.
    """
    if draft is not None and draft.heads:
        if speculation.guesses not in (None, draft.heads):
            raise OptionError(f"guesses = {speculation.guesses}: expected {draft.heads}, one a head; leave it out")
        speculation = replace(speculation, guesses=draft.heads)
    # What Python takes to launch an eager forward; assisted generation refuses the static cache of graphs.
    eager_s = len(find_layers(planner.inventory)) * _EAGER_LAYER_S if on_gpu else 0.0
    made = _forecasts(speculation, planner, plan, context, draft, eager_s)
    return max(made, key=lambda each: each.tokens_per_s)


def _forecasts(
    speculation: Speculation, planner: Planner, plan: Plan, context: int, draft: DraftCost | None, eager_s: float
) -> Iterator[SpeculationForecast]:
    plain_s = planner.forecast(plan, 1, context).step_s
    acceptance = _ACCEPTANCE.get(speculation.guesser, _ACCEPTANCE["draft"])
    accepted = speculation.accepted
    counts = range(1, _MOST_GUESSES + 1) if accepted is None else [max(4, round(accepted))]
    for guesses in counts if speculation.guesses is None else [speculation.guesses]:
        pass_s = max(planner.forecast(plan, guesses + 1, context).step_s, eager_s)
        guess_s = 0.0 if draft is None else guesses * draft.pass_s
        tokens = accepted or (1 - acceptance ** (guesses + 1)) / (1 - acceptance)
        yield SpeculationForecast(
            speculation.guesser, guesses, tokens, accepted is None, pass_s, guess_s,
            tokens / (pass_s + guess_s), 1 / plain_s,
        )  # fmt: skip
