"""The offloader that leaves everything resident."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from penstock.offloaders.base import BaseOffloader

__all__ = ["NoopOffloader"]


class NoopOffloader(BaseOffloader):
    """Builds the modules and touches none."""

    def wrap_modules(self, modules_generator: Iterable[nn.Module]) -> list[nn.Module]:
        return list(modules_generator)

    def post_init(self) -> None:
        """Nothing to take over."""
