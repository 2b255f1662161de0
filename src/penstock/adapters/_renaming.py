"""Names of a checkpoint -> names of a transformers model, by transformers' own rules, fast enough for 45,000 names.

A rule is a regular expression, tried on every name; a mixture of experts has thousands of names that differ only in
the numbers of layer and expert. So the rules run once per *form* of a name, with numbers in it that occur nowhere
else, and each name takes its own numbers through the outcome. That is right as long as no rule looks at the value or
the length of a number, which :func:`_ignores_numbers` reads off the rules; where one does, all names run through them.
"""

from __future__ import annotations

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

_NUMBER = re.compile(r"(?:(?<=\.)|^)([0-9]+)(?=\.|$)")  # a whole segment
_ANY_NUMBER = re.compile(r"\(?\\d\+\)?")
_DIGIT_OF_WORD = re.compile(r"(?<=[A-Za-z_])[0-9]+")  # w1, conv1d: never a whole segment
_LOOKS_AT_DIGITS = re.compile(r"[0-9]|\\d|\\w|\[|\(\?<|\{")

_Renamed = tuple[str, str | None]  # new name, and the pattern of the converter that matched


class Renamer:
    """What :func:`transformers.core_model_loading.rename_source_key` returns, name by name."""

    def __init__(self, mapping: Iterable[WeightTransform], prefix: str, state: dict[str, Any]) -> None:
        entries = list(mapping)
        self._renamings = [entry for entry in entries if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
        self._prefix, self._state = prefix, state
        self._by_form = all(map(_ignores_numbers, [*self._renamings, *self._converters]))
        self._forms: dict[tuple[str, ...], _Renamed | None] = {}
        self._prefixed: dict[str, str] = {}

    def __call__(self, key: str) -> _Renamed:
        """The name of ``key`` in the model, should it have one, and the pattern of its converter."""
        name, pattern = self._renamed(key)
        name = self._with_prefix(name)
        if name not in self._state and key in self._state:
            return self._with_prefix(key), None
        return name, pattern

    def _renamed(self, key: str) -> _Renamed:
        pieces = _NUMBER.split(key)
        if len(pieces) == 1 or not self._by_form:
            return self._by_rules(key)
        form, numbers = tuple(pieces[::2]), pieces[1::2]
        if form not in self._forms:
            self._forms[form] = self._of_form(form, numbers, key)
        outcome = self._forms[form]
        return self._by_rules(key) if outcome is None else (_fill_in(outcome[0], numbers), outcome[1])

    def _of_form(self, form: tuple[str, ...], numbers: list[str], key: str) -> _Renamed | None:
        """The outcome for names of ``form``; ``None`` if that of ``key``, the first of them, speaks against it."""
        stand_ins = map(_stand_in, range(len(numbers)))
        example = "".join(part for pair in zip(form, [*stand_ins, ""], strict=True) for part in pair)
        name, pattern = self._by_rules(example)
        return (name, pattern) if (_fill_in(name, numbers), pattern) == self._by_rules(key) else None

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


def _stand_in(index: int) -> str:
    return str(9_000_001 + index)  # no layer, no expert


def _fill_in(name: str, numbers: list[str]) -> str:
    for index, number in enumerate(numbers):
        name = name.replace(_stand_in(index), number)
    return name
