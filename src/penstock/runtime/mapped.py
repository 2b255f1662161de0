"""Weights that a CPU reads where the checkpoint's file is mapped: noticing that somebody writes to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from penstock.runtime.state_dict import NotCopyable
from penstock.stores.store import Store

__all__ = ["MappedFilesGuard"]


class MappedFilesGuard(NotCopyable):
    """Compares mapped files with their stamps before and after every forward of ``model``.

    Nothing can be compared while a matrix product reads them, and a page that a shorter file has no longer ends the
    program (SIGBUS, mmap(2)). Compiled code does not look: it would have to leave its graph for it.
    """

    def __init__(self, model: nn.Module, store: Store) -> None:
        self._store = store
        self._model = model
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Put the hooks in place; an interrupt leaves what :meth:`remove` takes off."""
        self._handles.append(self._model.register_forward_pre_hook(self._compare, prepend=True))
        self._handles.append(self._model.register_forward_hook(self._compare))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _compare(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._store.require_mapped_unchanged()
