"""The interface engines build models against, the offloader that does nothing, and the one an engine has set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import nn


class BaseOffloader(ABC):
    """Selects weights layer by layer while a model is built, and offloads them.

    The names and the order of calls are those of vLLM and SGLang: ``wrap_modules`` once per stack of layers,
    ``post_init`` when weights are final, then ``sync_prev_onload`` before and ``join_after_forward`` after a forward
    that is captured or replayed.
    """

    # vLLM checks it before it passes the vision and audio towers of a model, which are not built layer by layer.
    supports_tower_offload = False

    @abstractmethod
    def wrap_modules(self, modules_generator: Iterable[nn.Module], prefix: str = "") -> list[nn.Module]:
        """Consume the generator one module at a time: layer N is offloaded before layer N+1 is built.

        ``prefix``: of a tower, its name within the model; layers have none.
        """

    @abstractmethod
    def post_init(self) -> None:
        """Weights are loaded and final: take them over and start the first copies."""

    def sync_prev_onload(self) -> None:
        """Order compute after every pending copy; no effect without one."""

    # Both names are vLLM's; headrace's copies join compute in order, so both do the same.
    def join_after_forward(self) -> None:
        """Order the end of this forward after the copies that it has started; no effect without one."""
        self.sync_prev_onload()

    def remove(self) -> None:
        """Restore the tensors of the modules; no effect by default."""


class NoopOffloader(BaseOffloader):
    """Builds the modules and leaves everything resident."""

    def wrap_modules(self, modules_generator: Iterable[nn.Module], prefix: str = "") -> list[nn.Module]:
        return list(modules_generator)

    def post_init(self) -> None:
        """Nothing to take over."""


# Of the process, because the model code of an engine asks for it without any argument.
_current: BaseOffloader | None = None


def set_offloader(offloader: BaseOffloader | None) -> None:
    """Set the offloader that :func:`get_offloader` returns; for engines whose model code asks for one."""
    global _current
    _current = offloader


def get_offloader() -> BaseOffloader:
    """The offloader set last, or one that does nothing. ``headrace.offload`` neither reads nor sets it."""
    return _current if _current is not None else NoopOffloader()
