"""Offloaders by backend name, and how a configuration becomes one."""

from __future__ import annotations

from collections.abc import Callable

from penstock.config import OffloadConfig
from penstock.errors import OptionError
from penstock.offloaders.base import BaseOffloader, NoopOffloader, get_offloader, set_offloader
from penstock.offloaders.layerwise import PrefetchOffloader, UVAOffloader

__all__ = [
    "BaseOffloader",
    "NoopOffloader",
    "PrefetchOffloader",
    "UVAOffloader",
    "create_offloader",
    "get_offloader",
    "register_offloader",
    "set_offloader",
]

Factory = Callable[[OffloadConfig], BaseOffloader]


def register_offloader(backend: str, factory: Factory) -> None:
    """Make ``factory`` answer for ``backend``; replaces an earlier one."""
    _registry[backend] = factory


def create_offloader(config: OffloadConfig) -> BaseOffloader:
    """The offloader for ``config``: prefetch if a group size is set, UVA if a byte budget is set, else noop."""
    backend = config.resolved
    if backend not in _registry:
        raise OptionError(f"backend {backend!r}: expected one of {', '.join(sorted(_registry))} (--offload-backend)")
    return _registry[backend](config)


def _prefetch(config: OffloadConfig) -> BaseOffloader:
    options = config.prefetch
    assert options is not None  # checked by OffloadConfig
    return PrefetchOffloader(
        options.group_size, options.num_in_group, options.prefetch_step, options.params, options.mode
    )


def _uva(config: OffloadConfig) -> BaseOffloader:
    options = config.uva
    assert options is not None  # checked by OffloadConfig
    if options.mode != "cpu":
        raise OptionError(f"backend 'uva' of an engine reads host memory: mode {options.mode!r} would have no effect")
    return UVAOffloader(options.limit_bytes if options.limit_bytes is not None else 2**63 - 1, options.params)


_registry: dict[str, Factory] = {"none": lambda config: NoopOffloader(), "prefetch": _prefetch, "uva": _uva}
