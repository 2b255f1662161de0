"""SGLang's compiled kernels have no build for CPUs on the package index: each name is here, and raises when called."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.4.10"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no build for CPUs")

    return absent
