"""Names of a checkpoint -> names of a transformers model, by transformers' own rules, fast enough for 45,000 names.

A rule is a regular expression, tried on every name; a mixture of experts has thousands of names that differ only in
the numbers of layer and expert. So the rules run once per *form* of a name, with numbers in it that occur nowhere
else, and each name takes its own numbers through the outcome. That is right as long as no rule looks at the value or
the length of a number, which :func:`_ignores_numbers` reads off the rules; where one does, all names run through them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

__all__ = ["Renamer", "natural_order"]

_ANY_NUMBER = re.compile(r"\(?\\d\+\)?")
_DIGIT_OF_WORD = re.compile(r"(?<=[A-Za-z_])[0-9]+")  # w1, conv1d: never a whole segment
_LOOKS_AT_DIGITS = re.compile(r"[0-9]|\\d|\\w|\[|\(\?<|\{")

_STAND_IN = re.compile(r"(900000[1-9])")  # no layer, no expert

_Renamed = tuple[str, str | None]  # new name, and the pattern of the converter that matched
_Outcome = tuple[list[str], list[int], str | None]  # texts, the number that follows each but the last, and the pattern


class Renamer:
    """What :func:`transformers.core_model_loading.rename_source_key` returns, name by name."""

    def __init__(self, mapping: Iterable[WeightTransform], prefix: str, state: dict[str, Any]) -> None:
        entries = list(mapping)
        self._renamings = [entry for entry in entries if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
        self._prefix, self._state = prefix, state
        self._by_form = all(map(_ignores_numbers, [*self._renamings, *self._converters]))
        self._forms: dict[str, _Outcome | None] = {}
        self._prefixed: dict[str, str] = {}

    def __call__(self, key: str) -> _Renamed:
        """The name of ``key`` in the model, should it have one, and the pattern of its converter."""
        name, pattern = self._renamed(key)
        name = self._with_prefix(name)
        if name not in self._state and key in self._state:
            return self._with_prefix(key), None
        return name, pattern

    def _renamed(self, key: str) -> _Renamed:
        parts = key.split(".")
        numbers = [part for part in parts if part.isdigit()]
        if not self._by_form or not 0 < len(numbers) < 10:
            return self._by_rules(key)
        form = ".".join(["#" if part.isdigit() else part for part in parts])
        if form not in self._forms:
            self._forms[form] = self._of_form(parts, numbers)
        outcome = self._forms[form]
        return self._by_rules(key) if outcome is None else (_fill_in(outcome, numbers), outcome[2])

    def _of_form(self, parts: list[str], numbers: list[str]) -> _Outcome | None:
        """What becomes of names like this one, the first of them; ``None`` if its own outcome is another."""
        count = itertools.count(1)
        name, pattern = self._by_rules(".".join(f"900000{next(count)}" if part.isdigit() else part for part in parts))
        pieces = _STAND_IN.split(name)
        outcome = pieces[::2], [int(piece[-1]) - 1 for piece in pieces[1::2]], pattern
        return outcome if (_fill_in(outcome, numbers), pattern) == self._by_rules(".".join(parts)) else None

    def _by_rules(self, key: str) -> _Renamed:
        name, pattern = rename_source_key(key, self._renamings, self._converters)
        return name, pattern

    def _with_prefix(self, name: str) -> str:
        if name not in self._prefixed:
            self._prefixed[name] = rename_source_key(name, [], [], self._prefix, self._state)[0]
        return self._prefixed[name]


def natural_order(keys: Iterable[str]) -> list[str]:
    """``keys`` sorted by transformers' ``dot_natural_key``, each different segment judged once."""
    segments = _Segments()
    return sorted(keys, key=lambda key: [segments[part] for part in key.split(".")])


class _Segments(dict[str, Any]):
    def __missing__(self, part: str) -> Any:
        self[part] = dot_natural_key(part)[0]
        return self[part]


def _ignores_numbers(entry: WeightTransform) -> bool:
    """Whether ``entry`` treats names alike that differ in whole-segment numbers only."""
    if type(entry).rename_source_key is not WeightTransform.rename_source_key:
        return False  # some count, or remember what they saw
    patterns = [*entry.source_patterns, entry.scope_prefix or ""]
    rest = [_DIGIT_OF_WORD.sub("", _ANY_NUMBER.sub("", pattern)) for pattern in patterns]
    return not any(map(_LOOKS_AT_DIGITS.search, rest))


def _fill_in(outcome: _Outcome, numbers: list[str]) -> str:
    texts, indices, _ = outcome
    filled = texts[0]
    for text, index in zip(texts[1:], indices, strict=True):
        filled += numbers[index] + text
    return filled
