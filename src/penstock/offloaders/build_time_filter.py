"""Which parameters leave the device before there is a plan: those that a policy is sure, or likely, to offload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.config import UVA, Budget, Prefetch
from penstock.model.patterns import compile_pattern, is_segments
from penstock.plan.layers import TINY_BYTES

__all__ = ["EarlyRule", "early_rule"]

# As plain words they mean modules of that name, and where there are none the group.
_GROUPS_OF_LAYERS = frozenset({"attention", "mlp", "experts", "shared_experts"})


class EarlyRule(Protocol):
    """Asked once for each parameter, in the order in which layers are built."""

    @property
    def is_exact(self) -> bool:
        """Whether the plan will offload just what leaves early; otherwise some of it may come back."""

    def __call__(self, index: int, name: str, num_bytes: int) -> bool:
        """Whether the parameter ``name`` of the layer at ``index`` of its stack leaves the device at once."""


def early_rule(policy: Prefetch | UVA | Budget) -> EarlyRule:
    """The rule for ``policy``."""
    if isinstance(policy, Prefetch):
        return _GroupRule(policy)
    return _UpTo(policy.params, policy.limit_bytes if isinstance(policy, UVA) else None)


class _GroupRule:
    """What the group rule offloads, no more and no less."""

    def __init__(self, policy: Prefetch) -> None:
        self._policy = policy
        self._named = _Named(policy.params)

    @property
    def is_exact(self) -> bool:
        return self._named.is_exact

    def __call__(self, index: int, name: str, num_bytes: int) -> bool:
        kept = self._policy.group_size - self._policy.num_in_group
        return index % self._policy.group_size >= kept and self._named(index, name, num_bytes)


class _UpTo:
    """Everything that is named, up to a limit: of a budget nobody knows yet which part of it will stay."""

    def __init__(self, params: Sequence[str], limit_bytes: int | None) -> None:
        self._named = _Named(params)
        self._left = limit_bytes
        self.is_exact = False

    def __call__(self, index: int, name: str, num_bytes: int) -> bool:
        if not self._named(index, name, num_bytes) or (self._left is not None and num_bytes > self._left):
            return False
        if self._left is not None:
            self._left -= num_bytes
        return True


class _Named:
    """Patterns on names, of which only the end is known yet.

    Whole segments match there as they will later; for globs and regular expressions the usual beginning is assumed. A
    semantic group needs the whole model, so it stands for everything; a word that is the name of one does, too, after
    the first layer, until one of them has a module of that name.
    """

    def __init__(self, params: Sequence[str]) -> None:
        self._matches = [compile_pattern(pattern) for pattern in params if not pattern.startswith("@")]
        self._everything = not params or len(self._matches) < len(params)
        self._is_plain = all(map(is_segments, params))
        self._words = {word: compile_pattern(word) for word in params if word in _GROUPS_OF_LAYERS}
        self._first_index: int | None = None

    @property
    def is_exact(self) -> bool:
        return self._is_plain and not (self._words and self._first_index is not None)

    def __call__(self, index: int, name: str, num_bytes: int) -> bool:
        may_be_meant = self._everything or self._meets_a_group(index, name)
        if may_be_meant or num_bytes < TINY_BYTES:
            return num_bytes >= TINY_BYTES
        return any(matches(name) or matches(f"model.layers.{index}.{name}") for matches in self._matches)

    def _meets_a_group(self, index: int, name: str) -> bool:
        """Whether ``name`` may belong to a group whose word is no name so far."""
        self._words = {word: matches for word, matches in self._words.items() if not matches(name)}
        if self._first_index is None:
            self._first_index = index
        return bool(self._words) and index != self._first_index
