"""The ordering edges of a compiled graph: ``penstock::wait`` and ``release`` around a module, ``begin`` and ``join``
around a forward.

A compiler may move any operation whose inputs it believes to be ready. Weights are inputs of the graph, so without an
edge ``(w - zero) * scale`` is ready from the start and would be hoisted above the wait. An edge on the hidden state
does not help, since this arithmetic reads no hidden state. So both ops declare the unit's own tensors as *mutated*:

* ``wait(tag, token!, tensors!, inputs!)`` writes them as far as the compiler knows, so every read of the weight stays
  behind it. It writes what the module is given too: a custom op of an engine may find its weights by the name of its
  layer and not among its arguments, and then the hidden states are all that holds it behind the wait;
* ``release(tag, token!, tensors!, outputs!)`` writes them again, so it stays behind every read of the weight, and
  writes what the module returned. Reading that would not be enough: an output that is cheap to compute (a row of an
  embedding) is inlined into whatever uses it later, and would be computed there from a slot that holds another unit.

Neither op computes anything; functionalisation sees an in-place operator and the inductor adds no copy of a weight.

``begin`` and ``join`` stand at the ends of a forward. ``join`` reads what the model returns and a tensor of every unit,
so it comes last.

All of them declare the offload's one ``token`` as mutated. It keeps them in the order of the program and from being
dropped as dead code. Without it nothing would hold the ``wait`` of a unit behind the ``release`` of the one before it
in the same slot, because the compiler must not see that both look into one memory: it would rebuild their tensors from
a common base, which it cannot do for several dtypes, and its cache would hand that code to a plan with other slots. So
every tensor in a slot has a storage of its own (``BoundStorage.point_at_slot``). The tag is not declared mutated: a
backend may hand a mutated tensor over as a copy, and the tag is known by its address.

Which unit is meant is said by ``tag``, a one-element tensor known by its address, and not by a number: a number would
be a constant of the graph, and an engine that compiles one layer and reuses the code for its siblings could not. Tags
and the token hang on the modules themselves, and tensors are found by their paths from there, so that code kept on
disk finds them again in the next process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from penstock.errors import StateError

__all__ = ["Boundary", "new_tag", "new_token"]


class Boundary(Protocol):
    """What the ops do when they run: the two ends of a module's use of its unit."""

    def enter_compiled(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called by ``penstock::wait`` and ``penstock::begin``."""

    def leave_compiled(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called by ``penstock::release`` and ``penstock::join``."""


_boundaries: weakref.WeakValueDictionary[int, Boundary] = weakref.WeakValueDictionary()

_library = torch.library.Library("penstock", "DEF")


def new_tag(boundary: Boundary, device: torch.device) -> torch.Tensor:
    """A tag that stands for ``boundary`` in compiled graphs, for as long as the boundary lives.

    Returns:
        int64, shape ``[1]``, on ``device``. Its address is the identity; the caller keeps it alive.
    """
    tag = torch.zeros(1, dtype=torch.int64, device=device)
    _boundaries[tag.data_ptr()] = boundary
    return tag


def new_token(device: torch.device) -> torch.Tensor:
    """What all ops of one offload declare as mutated: int64, shape ``[1]``, on ``device``."""
    return torch.zeros(1, dtype=torch.int64, device=device)


def _boundary(tag: torch.Tensor) -> Boundary:
    boundary = _boundaries.get(tag.data_ptr())
    if boundary is None:
        raise StateError(
            "compiled code refers to an offload that is gone; compile the model again (torch._dynamo.reset())"
        )
    return boundary


def _define(name: str, arguments: str, run: Callable[..., None]) -> None:
    """Register the op ``name`` with its kernel; on fake tensors it does nothing, because it has no output."""
    _library.define(f"{name}({arguments}) -> ()")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"penstock::{name}", lambda *_: None, lib=_library)


_Tensors = Sequence[torch.Tensor]


def _enter(tag: torch.Tensor, token: torch.Tensor, tensors: _Tensors = (), inputs: _Tensors = ()) -> None:
    _boundary(tag).enter_compiled(tensors)


def _leave(tag: torch.Tensor, token: torch.Tensor, tensors: _Tensors, outputs: _Tensors = ()) -> None:
    _boundary(tag).leave_compiled(tensors)


_define("wait", "Tensor tag, Tensor(a!) token, Tensor(b!)[] tensors, Tensor(c!)[] inputs", _enter)
_define("release", "Tensor tag, Tensor(a!) token, Tensor(b!)[] tensors, Tensor(c!)[] outputs", _leave)
_define("begin", "Tensor tag, Tensor(a!) token", _enter)
_define("join", "Tensor tag, Tensor(a!) token, Tensor[] inputs", _leave)
