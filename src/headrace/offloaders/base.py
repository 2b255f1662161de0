"""The interface engines build models against, the offloader that does nothing, and the one an engine has set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import nn

__all__ = ["BaseOffloader", "NoopOffloader", "get_offloader", "set_offloader"]


class BaseOffloader(ABC):
    """Decides, layer by layer while a model is built, what leaves the device, and then moves it.

    The names and the order of calls are those of vLLM and SGLang: ``wrap_modules`` once per stack of layers,
    ``post_init`` when weights are final, then ``sync_prev_onload`` before and ``join_after_forward`` after a forward
    that is captured or replayed.
    """

    # vLLM asks before it hands over the vision and audio towers of a model, which are not built layer by layer.
    supports_tower_offload = False

    @abstractmethod
    def wrap_modules(self, modules_generator: Iterable[nn.Module], prefix: str = "") -> list[nn.Module]:
        """Consume the generator one module at a time: layer N is dealt with before layer N+1 is built.

        ``prefix``: the name of the module within the model, of a tower; layers come without one.
        """

    @abstractmethod
    def post_init(self) -> None:
        """Weights are loaded and final: take them over and start the first copies."""

    def sync_prev_onload(self) -> None:
        """Order compute after every copy under way; no effect when none is."""

    # Both names are vLLM's; where copies are joined to compute in order, one action does for both.
    def join_after_forward(self) -> None:
        """Bring copies that this forward has started back under its end; no effect when there are none."""
        self.sync_prev_onload()

    def remove(self) -> None:
        """Give the modules their tensors back; no effect by default."""


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
