"""Name patterns -> storages.

A pattern is tried as, in this order:

1. ``ALL_MODEL_PARAMS``: everything;
2. ``re:...``: a regular expression that must match the whole dotted name;
3. a glob when it contains ``*``, ``?`` or ``[``: matched against the whole dotted name (``*.mlp.down_proj.*``);
4. whole dotted segments: ``experts`` matches ``mlp.experts.w2_weight``, ``expert`` does not; ``mlp.experts`` matches
   two neighbouring segments.

A pattern that matches nothing is an error that lists the nearest names: silence would mean "offloaded" without a
byte moved.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import translate

from penstock.config import ALL_MODEL_PARAMS
from penstock.errors import SelectionError
from penstock.inventory import StorageInfo

__all__ = ["compile_pattern", "select"]

_GLOB = re.compile(r"[*?\[]")


def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """A predicate on dotted tensor names.

    Raises:
        SelectionError: empty, or not a valid regular expression.
    """
    if not pattern:
        raise SelectionError(
            "an empty name pattern; write a segment such as 'mlp', a glob, 're:...' or ALL_MODEL_PARAMS"
        )
    if pattern == ALL_MODEL_PARAMS:
        return lambda name: True
    if pattern.startswith("re:"):
        return _matcher(_compile(pattern, pattern[3:]))
    if _GLOB.search(pattern):
        return _matcher(re.compile(translate(pattern)))
    segments = f".{pattern}."
    return lambda name: segments in f".{name.replace(':', '.')}."


def select(storages: Iterable[StorageInfo], patterns: Sequence[str]) -> list[StorageInfo]:
    """The storages any of whose names matches any pattern, in model order.

    Raises:
        SelectionError: a pattern matches no name; the message lists the nearest names or segments.
    """
    storages = list(storages)
    predicates = [(pattern, compile_pattern(pattern)) for pattern in patterns]
    names = [name for storage in storages for name in storage.names]
    for pattern, matches in predicates:
        if not any(map(matches, names)):
            raise SelectionError(_nothing_matched(pattern, names))
    return [s for s in storages if any(matches(name) for _, matches in predicates for name in s.names)]


def _matcher(compiled: re.Pattern[str]) -> Callable[[str], bool]:
    return lambda name: compiled.fullmatch(name) is not None


def _compile(pattern: str, expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise SelectionError(f"pattern {pattern!r} is not a regular expression: {error}") from None


def _nothing_matched(pattern: str, names: Sequence[str]) -> str:
    # Compare with segments and with whole names: people misspell both.
    vocabulary = list(dict.fromkeys(part for name in names for part in (*name.split("."), name)))
    nearest = difflib.get_close_matches(pattern.removeprefix("re:"), vocabulary, n=5, cutoff=0.4)
    shown = nearest or list(dict.fromkeys(names))[:5]
    return (
        f"pattern {pattern!r} matches none of the {len(names)} tensor names; the nearest are {', '.join(shown)}. "
        f"Names match by whole dotted segments; use globs ('*.mlp.*') or 're:...' for parts."
    )
