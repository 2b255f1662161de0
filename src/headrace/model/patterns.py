"""Name patterns -> storages.

A pattern is tried as, in this order:

1. ``ALL_MODEL_PARAMS``: everything, but for counters and running statistics, which forwards write in training;
2. ``re:...``: a regular expression that must match the whole dotted name;
3. a glob when it contains ``*``, ``?`` or ``[``: matched against the whole dotted name (``*.mlp.down_proj.*``);
4. ``@GROUP``: a semantic group (:mod:`headrace.model.semantic_groups`), whatever the names are: ``@attention``;
5. whole dotted segments: ``experts`` matches ``mlp.experts.w2_weight``, ``expert`` does not; ``mlp.experts`` matches
   two neighbouring segments. In a mixture of experts ``mlp`` is everything below a module of that name, and ``@mlp``
   the dense blocks alone;
6. a word that is no segment of any name, but names a semantic group: ``attention``.

A pattern that matches nothing is an error that lists the nearest names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from fnmatch import translate

from headrace.config import ALL_MODEL_PARAMS, check_pattern
from headrace.errors import SelectionError
from headrace.model.records import Inventory, StorageInfo

_GLOB = re.compile(r"[*?\[]")


def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """A predicate on dotted tensor names; semantic groups do not depend on names and need :func:`matching`.

    Raises:
        SelectionError: empty, or not a valid regular expression.
    """
    check_pattern(pattern)
    if pattern == ALL_MODEL_PARAMS:
        return lambda name: True
    if pattern.startswith("re:"):
        compiled = re.compile(pattern[3:])
    elif _GLOB.search(pattern):
        compiled = re.compile(translate(pattern))
    else:
        # Segments and not substrings: vLLM's --offload-params has this meaning.
        segments = f".{pattern}."
        return lambda name: segments in f".{name.replace(':', '.')}."
    return lambda name: compiled.fullmatch(name) is not None


def is_segments(pattern: str) -> bool:
    """Whether ``pattern`` means whole dotted segments: neither a regular expression, nor a glob, nor ``@GROUP``."""
    return not pattern.startswith(("@", "re:")) and not _GLOB.search(pattern)


def select(inventory: Inventory, patterns: Sequence[str]) -> list[StorageInfo]:
    """The storages that any pattern matches, in model order.

    Raises:
        SelectionError: as for :func:`matching`.
    """
    chosen = {name for pattern in patterns for name in matching(inventory, pattern)}
    return [storage for storage in inventory.storages if storage.name in chosen]


def matching(inventory: Inventory, pattern: str) -> frozenset[str]:
    """Names of the storages that ``pattern`` stands for, by any name of theirs; never empty.

    Raises:
        SelectionError: it matches no name, and is no semantic group that this model has; the message lists the nearest
            names or segments, and the groups there are.
    """
    if pattern.startswith("@"):
        return _group(inventory, pattern[1:])
    matches = compile_pattern(pattern)
    storages = [s for s in inventory.storages if not (pattern == ALL_MODEL_PARAMS and s.counts)]
    if found := frozenset(s.name for s in storages if any(map(matches, s.names))):
        return found
    from headrace.model.semantic_groups import GROUPS, semantic_groups

    groups = semantic_groups(inventory)
    if found := groups.get(pattern, frozenset()):
        return found
    # An error and not a warning: a run that offloads nothing would look like a success.
    # Compare with segments, with whole names and with groups: people misspell all of them.
    names = list(inventory.by_name)
    present = [group for group, storages in groups.items() if storages]
    vocabulary = dict.fromkeys(part for name in names for part in (*name.split("."), name))
    nearest = difflib.get_close_matches(pattern.removeprefix("re:"), [*vocabulary, *present], n=5, cutoff=0.4)
    empty = f"; the group @{pattern} is empty in it" if pattern in GROUPS else ""
    raise SelectionError(
        f"pattern {pattern!r} matches none of the {len(names)} tensor names; the nearest are "
        f"{', '.join(dict.fromkeys(nearest or names[:5]))}. Names match by whole dotted segments; use globs "
        f"('*.mlp.*') or 're:...' for parts. This model has {_groups_in(groups)}{empty}."
    )


def _group(inventory: Inventory, word: str) -> frozenset[str]:
    from headrace.model.semantic_groups import GROUPS, semantic_groups

    groups = semantic_groups(inventory)
    if word not in groups:
        raise SelectionError(f"'@{word}': expected one of the groups {', '.join('@' + group for group in GROUPS)}")
    if not groups[word]:
        raise SelectionError(
            f"'@{word}': this group is empty in this model, which has {_groups_in(groups)}; use one of them or names"
        )
    return groups[word]


def _groups_in(groups: dict[str, frozenset[str]]) -> str:
    present = [f"@{group}" for group, storages in groups.items() if storages]
    return f"the groups {', '.join(present)}" if present else "no groups"
