"""Offloaders for engines, and the one for a configuration."""

from __future__ import annotations

from headrace.config import OffloadConfig
from headrace.errors import OptionError
from headrace.offloaders.base import BaseOffloader, NoopOffloader, get_offloader, set_offloader
from headrace.offloaders.layerwise import PrefetchOffloader, UVAOffloader

__all__ = [
    "BaseOffloader",
    "NoopOffloader",
    "PrefetchOffloader",
    "UVAOffloader",
    "create_offloader",
    "get_offloader",
    "set_offloader",
]


def create_offloader(config: OffloadConfig) -> BaseOffloader:
    """The offloader for ``config``: prefetch if a group size is set, UVA if a byte budget is set, else noop."""
    prefetch, uva = config.prefetch, config.uva
    if config.resolved == "prefetch":
        assert prefetch is not None  # checked by OffloadConfig
        return PrefetchOffloader(
            prefetch.group_size, prefetch.num_in_group, prefetch.prefetch_step, prefetch.params, prefetch.mode
        )
    if config.resolved == "uva":
        assert uva is not None  # checked by OffloadConfig
        if uva.mode != "cpu":
            raise OptionError(f"backend 'uva' of an engine reads host memory: mode {uva.mode!r} has no effect")
        # The first argument is a number, as in vLLM: the largest one means no limit.
        return UVAOffloader(uva.limit_bytes if uva.limit_bytes is not None else 2**63 - 1, uva.params)
    return NoopOffloader()
