"""Which parameters leave the device before there is a plan: those that a policy is sure, or likely, to offload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.config import UVA, Budget, Prefetch
from penstock.plan.units import TINY_BYTES
from penstock.select import compile_pattern

__all__ = ["EarlyRule", "early_rule"]


class EarlyRule(Protocol):
    """Asked once for each parameter, in the order in which layers are built.

    Attributes:
        is_exact: the plan will offload just what leaves early; otherwise some of it may come back.
    """

    is_exact: bool

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
        self.is_exact = self._named.is_exact

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
    semantic group needs the whole model, so it stands for everything.
    """

    def __init__(self, params: Sequence[str]) -> None:
        self._matches = [compile_pattern(pattern) for pattern in params if not pattern.startswith("@")]
        self._everything = not params or len(self._matches) < len(params)
        self.is_exact = not any(pattern.startswith(("@", "re:")) or set("*?[") & set(pattern) for pattern in params)

    def __call__(self, index: int, name: str, num_bytes: int) -> bool:
        if self._everything or num_bytes < TINY_BYTES:
            return num_bytes >= TINY_BYTES
        return any(matches(name) or matches(f"model.layers.{index}.{name}") for matches in self._matches)
