"""The tensors of a live model while they are offloaded: pointed at other memory and back, and guarded in between.

A tensor object is never exchanged while it can be kept: ties, optimizers and caches hold references to it. Only its
data is pointed elsewhere (``tensor.data = ...``). Tensors on ``meta`` cannot take data and are replaced in all places
that hold them.

Three dispatch keys that no kernel of PyTorch uses mark offloaded tensors. The dispatcher reads the keys of all
arguments before it selects a kernel, so it calls the functions below first: from any thread, module, model or library,
whatever modes are active. Tensors without these keys never reach this code and cost nothing.

*Placeholders* (``DeferredInit``, reserved for code outside of PyTorch's tree) have shape, strides, dtype and device,
and no memory. Any operator that takes one, its ``.data`` or its ``.detach()`` calls :func:`_on_access`. Torch refuses
raw pointers ("Cannot access data pointer"), since the storage has none.

Compiled code relies on addresses, so a placeholder that it reads is *pinned*: it has the address of its slot, and a
key of its own (``TESTING_ONLY_GenericMode``). Graphs with our ops run with that key excluded (:func:`read_pinned`), in
their thread alone and until they end, however they end; guards of Dynamo see the same keys at all times.

*Guarded* tensors (``TESTING_ONLY_GenericWrapper``) view bytes that are valid for a limited time: a slot, a copy.
Operators that read them run at full speed, because the key falls through to their kernels. An operator that writes them
in place, through any view, reaches :func:`_on_write` and is refused, since the next copy would overwrite the write.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, cast

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from headrace.errors import ModelChangedError, OutsideAccessError, StateError, warn_user
from headrace.model import torch_private
from headrace.model.records import Location, StorageInfo, TensorInfo
from headrace.model.torch_private import leave_to_python, storage_id

if "refuse_reload" in globals():  # this module is being reloaded
    globals()["refuse_reload"]()

# What an operator gets in place of a placeholder, which other threads and compiled code may read meanwhile, and
# release_copy, to call when it has run.
TemporaryCopy = tuple[torch.Tensor, Callable[[], None] | None]

# Gives a placeholder its bytes for good (returns None), or the operator a copy of them. Takes the tensor, the operator
# that uses it, and whether the operator writes it in place. OutsideAccessError: it cannot have them.
OnAccess = Callable[["BoundTensor", OpOverload, bool], TemporaryCopy | None]

# Attributes from a module to a tensor at or below it, into a tensor subclass too.
Path = tuple[str, ...]


def bind(model: nn.Module, storages: Iterable[StorageInfo]) -> dict[str, BoundStorage]:
    """The live side of ``storages``, by storage name."""
    return {storage.name: BoundStorage(model, storage) for storage in storages}


_bound: weakref.WeakSet[BoundTensor] = weakref.WeakSet()  # all of this process


def refuse_reload() -> None:
    """Raise ``StateError`` while a tensor is offloaded: its hooks and dispatch keys call functions of these modules."""
    for bound in tuple(_bound):
        if place := vars(bound.tensor).get("_headrace_offloaded"):
            raise StateError(
                f"headrace was reloaded (importlib.reload) while {bound.name} of {place} is offloaded, whose hooks and "
                f"dispatch keys belong to the modules as they are: call handle.remove() first, then reload"
            )


class TensorState(Enum):
    """Memory that an offloaded tensor views, and so what an operator finds there.

    - RESIDENT: Memory that stays, with its bytes: what the model came with, or what has replaced that. It follows every
      state: ``point_at`` moves or promotes a tensor, ``return_to`` and ``restore`` end its offload.
    - FIXED: Its slot at all times, as engines need it, whose compiled code takes addresses and waits for units. It
      follows RESIDENT (``point_at_slot``), PLACEHOLDER and PINNED (``stay_in_slot``).
    - PLACEHOLDER: No memory. An operator that takes it calls ``on_access``, which makes it RESIDENT, or gives the
      operator a temporary copy and leaves the state. It follows RESIDENT (``point_at_slot`` with ``on_access``), FIXED
      (``leave_slot``) and OPEN (``to_placeholder``).
    - OPEN: Its slot, read-only, for a window of its module. It follows PLACEHOLDER (``open``).
    - PINNED: Its slot, whose address compiled code has. To all others outside of windows it is a placeholder. It
      follows PLACEHOLDER and OPEN (``pin_to_slot``).
    - PARKED: Neither memory nor a slot, as long as the offload is parked (:mod:`headrace.lifetime`); an operator that
      takes it calls ``on_access``. It follows every state (``park``).
    - LOST: As FIXED, PLACEHOLDER or OPEN, but the model holds another tensor in its place, or none, and uses what it
      holds. It ends when the model holds this one again.

    ``point_at_slot`` refuses what is neither RESIDENT nor PARKED; other methods leave alone what may not move, since
    their callers go over all tensors. OPEN and LOST are read off the tensor and the model, so that an interrupt between
    two lines leaves no contradiction.
    """

    RESIDENT = auto()
    FIXED = auto()
    PLACEHOLDER = auto()
    OPEN = auto()
    PINNED = auto()
    PARKED = auto()
    LOST = auto()


# Every forward compares these for each tensor, and in Python 3.11 an attribute of an Enum is a call.
RESIDENT, FIXED, PLACEHOLDER, OPEN, PINNED, PARKED, LOST = TensorState


class BoundTensor:
    """One tensor object and every place that holds it.

    Attributes:
        in_slot: a view of the slot, read-only unless FIXED; set by :meth:`point_at_slot`, and kept when RESIDENT again.
        bare: a PINNED placeholder without its address.
    """

    def __init__(self, model: nn.Module, info: TensorInfo) -> None:
        self.info = info
        self.places = [(model.get_submodule(place.module), place) for place in info.locations]
        module, place = self.places[0]
        self._holder, self._attr = _holder(module, place), place.attr
        self._is_registered = not place.inner and place.kind != "attribute"  # as a parameter or buffer
        tensor = _find(module, (place.attr, *place.inner))
        assert isinstance(tensor, torch.Tensor), place.name  # the inventory was taken a moment ago
        self.tensor = self.original = self.original_data = tensor
        _bound.add(self)  # before it has another tensor over that memory
        self.original_data = tensor.data
        self._weak_original: Callable[[], torch.Tensor | None] | None = None  # None: it was not released
        self._state, self._is_lost = RESIDENT, False  # together: see state
        self.in_slot: torch.Tensor
        self._unguarded: torch.Tensor  # the same for engines, whose compiled code counts as writing
        self._placeholder: torch.Tensor
        self._slot_storage = self._placeholder_storage = self._num_own_views = 0
        self.on_access: OnAccess | None = None
        self.bare: torch.Tensor | None = None
        self._runs_here: Callable[[], bool] = lambda: False
        self._reported = False
        has_memory = tensor.device.type != "meta" and not is_placeholder(tensor)
        self._first_address = self._address = tensor.data_ptr() if has_memory else 0
        self._version: int | None = None
        self._is_replayed = False  # by CUDA graphs of compiled code, which raise the version and call nothing of ours

    @property
    def state(self) -> TensorState:
        """State of the tensor now; LOST as the latest window or check has found it."""
        if self._is_lost and self._state in (FIXED, PLACEHOLDER):
            return LOST
        is_open = self._state is PLACEHOLDER and storage_id(self.tensor) == self._slot_storage
        return OPEN if is_open else self._state

    def point_at(self, buffer: torch.Tensor) -> None:
        """Make the tensor a view of ``buffer`` (uint8, 1-D), with its own shape, strides and dtype."""
        self._state = RESIDENT
        # Inference tensors and others cannot take each other's data.
        with torch.inference_mode(self.original.is_inference()):
            view = self.view_of(buffer)
        if self.tensor.device.type != "meta":
            self.tensor.data = view
        else:
            if self.info.kind == "parameter" and not self.info.locations[0].inner:
                # A meta tensor cannot take data (`.data = view`), so a new object has to replace it, with its
                # attributes: bitsandbytes keeps scales there.
                attributes = vars(self.tensor)
                view = torch_private.make_subclass(type(self.tensor), view, self.tensor.requires_grad)
                vars(view).update(attributes)
            self._put(view)
            self.tensor = view
        self._address = view.data_ptr()
        self.note_version()

    def point_at_slot(self, buffer: torch.Tensor, on_access: OnAccess | None) -> None:
        """Make the tensor a view of ``buffer`` while it is open; with ``on_access`` it is a placeholder at other times.

        ``on_access``: called when the placeholder is used.
        """
        if self._state not in (RESIDENT, PARKED):
            raise StateError(
                f"{self.name} cannot get a slot, because it is {self._state.name}; this is a bug in headrace: please "
                f"report it, and offload the model again"
            )
        meanwhile = self.tensor.data if self._state is PARKED and self.has_other_data else None
        self.point_at(own_storage(buffer))  # in no local variable, which would count as one of our own views below
        self.in_slot = self._unguarded = self.tensor.data
        self._slot_storage = storage_id(self.in_slot)
        self._state = FIXED
        if on_access is not None:
            self.on_access = on_access
            with torch.inference_mode(self.original.is_inference()):
                self._placeholder = placeholder_like(self.in_slot, self)
                self.in_slot = guarded(self.in_slot, self)
            self._placeholder_storage = storage_id(self._placeholder)
            self._state = PLACEHOLDER
            self.tensor.data = self._placeholder
            self._num_own_views = torch_private.use_count(self._slot_storage)  # with torch's own, by version
            if meanwhile is not None:
                self.tensor.data = meanwhile  # an error in the next forward, as if it had not been parked
            elif self.bare is not None:  # pinned before it was parked: compiled code is still there
                self.pin_to_slot()

    def park(self, on_access: OnAccess) -> None:
        """Give up memory and slot, until :meth:`point_at` or :meth:`point_at_slot`; ``on_access``: called when used."""
        if self._state is PARKED:
            return
        if self._state in (RESIDENT, FIXED):
            with torch.inference_mode(self.original.is_inference()):
                self._placeholder = placeholder_like(self.tensor.data, self)
        elif self.bare is not None:
            self._placeholder = self.bare
        self.on_access, self.tensor.data = on_access, self._placeholder
        self.in_slot = self._unguarded = self._placeholder
        self._placeholder_storage = self._slot_storage = storage_id(self._placeholder)
        self._num_own_views, self._state = 0, PARKED

    def open(self) -> None:
        """Make the tensor a view of its slot, which holds its unit now.

        Raises:
            ModelChangedError: it was moved or written since :meth:`to_placeholder`. A replaced or deleted tensor is the
                caller's right: it is reported once, and the new one is used.
        """
        if self._state is RESIDENT:
            return
        if self._state is FIXED:
            self.check()  # looks for a loss itself
            self.note_version()  # unknown after compiled code, whose ops count as writes
        elif self._find_loss():
            return
        elif self.tensor.untyped_storage()._cdata == self._placeholder_storage or not self.has_other_data:
            if self._state is not PINNED:  # which is read in its slot, too, and so are views that are kept of it
                self.tensor.data = self.in_slot  # where an interrupt may have left it
        else:
            raise self._moved()

    def to_placeholder(self) -> ModelChangedError | None:
        """Make the tensor a placeholder, because its slot may get another unit.

        Returns:
            what is wrong, if it was moved or written since :meth:`open`.
        """
        if self._state is RESIDENT or self._is_lost:
            return None
        if self._state is FIXED:
            error = self._change()
            self.note_version()
            return error
        found = self.tensor.untyped_storage()._cdata
        if found == self._slot_storage:
            self.tensor.data = self._placeholder
        return None if found in (self._slot_storage, self._placeholder_storage) else self._moved()

    def _find_loss(self) -> bool:
        """Whether the model now holds another tensor, or none, at this place; warns the first time."""
        if self._is_registered:  # what getattr() finds, without its detour
            self._is_lost = self._holder.get(self._attr) is not self.tensor
        else:
            module, place = self.places[0]
            self._is_lost = not self.is_held_by(module, place.attr, place.inner)
        if self._is_lost and not self._reported:
            self._reported = True
            module, place = self.places[0]
            what = "replaced" if hasattr(module, place.attr) else "deleted"
            warn_user(
                f"{place.name} was {what} after it was offloaded; headrace leaves the new state alone and the tensor "
                f"is resident from now on. Offload again to bring it back under the plan"
            )
        return self._is_lost

    def _moved(self) -> ModelChangedError:
        return ModelChangedError(
            f"{self.name} was moved (.data = ... or a private way to move it) while offloaded; its bytes are in the "
            f"store, not in the tensor: call handle.remove() first, then move, then offload again"
        )

    def require_in_place(self) -> None:
        """Raise ``ModelChangedError`` if the model has another tensor here, or this one has other data."""
        module, place = self.places[0]
        if not self.is_held_by(module, place.attr, place.inner):
            raise ModelChangedError(
                f"{place.name} was replaced or deleted while its experts are cached, whose rows are read in its place: "
                f"call handle.remove() first, change it, then offload again"
            )
        if self.has_other_data:
            raise self._moved()

    def copy_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """View of ``buffer`` as this tensor, for reading only."""
        with torch.inference_mode(self.original.is_inference()):
            return guarded(self.view_of(buffer), self)

    def reads(self, buffer: torch.Tensor) -> bool:
        """Whether the tensor views ``buffer``, the bytes of its storage, and will until the offload ends."""
        is_fixed = self._state is RESIDENT and not is_placeholder(self.tensor)
        return is_fixed and self.tensor.data_ptr() == self.view_of(buffer).data_ptr()

    def leave_slot(self, on_access: OnAccess) -> None:
        """Make a FIXED tensor a placeholder, until :meth:`stay_in_slot`; ``on_access``: as above."""
        if self._state is not FIXED or self._find_loss():
            return
        self.on_access = on_access
        with torch.inference_mode(self.original.is_inference()):
            self._placeholder = placeholder_like(self.in_slot, self)
        self._placeholder_storage = storage_id(self._placeholder)
        self._state = PLACEHOLDER
        self.tensor.data = self._placeholder

    def stay_in_slot(self) -> None:
        """Keep a placeholder in its slot from now on."""
        if self._state in (PLACEHOLDER, PINNED) and not self._find_loss():
            # The declared mutations of the custom ops, which order compiled code, are writes that a guard would refuse.
            self.in_slot = self._unguarded
            self.open()
            self.tensor.data = self.in_slot  # where it was pinned, too
            self._state = FIXED
            self.note_version()

    def pin_to_slot(self, runs_here: Callable[[], bool] | None = None) -> None:
        """Give a placeholder the address of the slot, because compiled code relies on addresses.

        ``runs_here``: whether the slot holds the unit for a run of its module in the calling thread.
        """
        # Tracing may put another tensor in its place for a while (torch.export), which reads no slot.
        if self._state is not PLACEHOLDER or self._find_loss():
            return
        with torch.inference_mode(self.original.is_inference()):
            pinned = _marked_view(self.in_slot, self, _PINNED_KEY, _BELOW_PYTHON)
        pinned.untyped_storage().__class__ = _PlaceholderStorage
        self.bare, self._version, self._runs_here = self._placeholder, None, runs_here or self._runs_here
        if is_placeholder(self.tensor):
            self.tensor.data = pinned  # first: as a view of its slot a PLACEHOLDER is right, too
        # In one line, since `bare` would be another one after an interrupt in between.
        self._placeholder, self._placeholder_storage, self._state = pinned, self._slot_storage, PINNED

    @property
    def is_read_here(self) -> bool:
        """Whether compiled code of the calling thread reads a pinned placeholder, or its module runs in the thread."""
        is_compiled = torch_private.is_excluded(_PINNED)
        return self._state is PINNED and (is_compiled or self._runs_here())

    @property
    def name(self) -> str:
        """The first name."""
        return self.info.name

    def is_viewed(self, num_known: int = 0) -> bool:
        """Whether more than ``num_known`` other tensors view the slot through this tensor's storage."""
        if not self._num_own_views:  # never a placeholder in a slot, so there may be no slot to ask about
            return False
        # Every view holds the storage, in any thread and any container; torch has no list of a tensor's views.
        has_more = torch_private.use_count(self._slot_storage) > self._num_own_views + num_known
        return has_more and self._state not in (FIXED, PINNED)  # compiled code has views of its own

    def offset_in_slot(self, view: torch.Tensor) -> int | None:
        """Bytes from this tensor's first one in its slot to the first of ``view``; ``None``: it views other memory."""
        if storage_id(view) != self._slot_storage:
            return None
        return int(view.storage_offset() * view.itemsize - self.in_slot.storage_offset() * self.in_slot.itemsize)

    def like(self, view: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Part of ``whole``, this tensor elsewhere, that ``view`` is of this tensor in its slot."""
        if (offset := self.offset_in_slot(view)) is None:
            return whole  # an alias of a placeholder
        if view.dtype != whole.dtype:  # made by view(dtype)
            whole = whole.detach().view(-1).view(view.dtype)
        start = whole.storage_offset() + offset // view.itemsize
        found = whole.as_strided(view.shape, view.stride(), start)
        return found.conj() if view.is_conj() != found.is_conj() else found

    def is_part(self, view: torch.Tensor) -> bool:
        """Whether ``view`` views the slot otherwise than the tensor itself does."""
        whole = self.in_slot
        geometry = view.shape == whole.shape and view.stride() == whole.stride() and view.dtype == whole.dtype
        return (offset := self.offset_in_slot(view)) is not None and not (geometry and offset == 0)

    def view_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """View of ``buffer``, the bytes of the storage, with this tensor's shape, strides and dtype."""
        start = buffer.storage_offset() + self.info.byte_offset
        view = torch.empty(0, dtype=self.info.dtype, device=buffer.device)
        view.set_(buffer.untyped_storage(), start // view.itemsize, self.info.shape, self.info.stride)
        view = view.conj() if self.original.is_conj() else view
        return torch_private.negative_view(view) if self.original.is_neg() else view

    def restore(self) -> None:
        """Restore the original tensor object and its original memory."""
        self._state = RESIDENT
        if self.tensor is not self.original:
            self._put(self.original)
            self.tensor = self.original
        elif self.tensor.device.type != "meta":
            self.tensor.data = self.original_data
            self._address = 0 if is_placeholder(self.tensor) else self.tensor.data_ptr()

    def return_to(self, data: torch.Tensor) -> None:
        """Make the tensor a view of ``data``, which is memory that it had before."""
        self._state = RESIDENT
        self.tensor.data = self.original_data = data
        self._address = self.tensor.data_ptr()

    def forget_original(self) -> None:
        """Release the memory that the tensor had."""
        if self.original.device.type != "meta":
            self._weak_original = self._weak_original or torch_private.weak_memory(self.original_data)
            self.original_data = self.tensor.data

    def original_memory(self) -> torch.Tensor | None:
        """The memory that :meth:`forget_original` released, if views that the model keeps elsewhere still hold it."""
        return None if self._weak_original is None else self._weak_original()

    def is_held_by(self, module: nn.Module, attr: str, inner: tuple[str, ...] = ()) -> bool:
        """Whether ``module`` has this very tensor at ``attr`` now; ``inner``: the path inside a subclass."""
        return _find(module, (attr, *inner)) is self.tensor

    def check(self) -> None:
        """Compare with the state after :meth:`point_at`, for tensors without placeholders; cheap enough for every run.

        Raises:
            ModelChangedError: moved, or written in place.
        """
        if error := self._change():
            raise error

    def _change(self) -> ModelChangedError | None:
        if self._state in (RESIDENT, PARKED) or self._find_loss():
            return None
        if torch.Tensor.data_ptr(self.tensor) != self._address:
            return self._moved()
        if self._version is not None and _version(self.tensor) != self._version:
            return ModelChangedError(
                f"{self.name} was written in place while offloaded; the write is lost with the next copy: call "
                f"handle.remove() first, or leave this tensor out of the selection"
            )
        return None

    @property
    def has_other_data(self) -> bool:
        """Whether its data was set (``tensor.data = ...``) since :meth:`point_at` or :meth:`point_at_slot`."""
        if self.tensor.device.type == "meta":
            return False
        if self._state is RESIDENT:
            # Not the tensor's own data_ptr, which torch.utils.swap_tensors gives to another, and asks that one.
            return not is_placeholder(self.tensor) and torch.Tensor.data_ptr(self.tensor) != self._address
        return storage_id(self.tensor) not in (self._placeholder_storage, self._slot_storage)

    def refuse_copy(self, given: Collection[int], module: nn.Module, path: Path) -> None:
        """Raise unless compiled code was given this very memory (``given``: addresses), and the tensor is not lost.

        Raises:
            ModelChangedError: the tensor is no longer at ``path`` from ``module``, since a module between was replaced.
            StateError: the compiler passes a copy.
        """
        if self._is_lost or self._state is RESIDENT or self._address in given:
            return
        if _find(module, path) is not self.tensor:
            raise ModelChangedError(
                f"{self.name} is no longer in its {type(module).__name__}, of which a child was replaced while "
                f"offloaded: compiled code expects it at {'.'.join(path)}. Call handle.remove() first, replace the "
                f"child, then offload again"
            )
        raise StateError(
            f"{self.info.name}: the compiler passes a copy made before the bytes are on the device, so the result "
            f"would be wrong; compile with backend='inductor' or 'eager', run under torch.inference_mode() or "
            f"no_grad(), and leave tensor subclasses out of the selection"
        )

    def note_replays(self) -> None:
        """Compiled code that declares writes is captured: from now on versions tell nothing."""
        self._is_replayed = True

    def note_version(self, known: bool = True) -> None:
        """Remember the version counter, so that :meth:`check` sees writes; ``known=False`` forgets it."""
        if self._state is FIXED or self._state is RESIDENT:  # a write of others raises before it happens
            self._version = _version(self.tensor) if known and not self._is_replayed else None

    def invalidate_saved(self) -> None:
        """Invalidate what autograd has saved of this tensor, whose data is about to change."""
        # A backward through a saved tensor with a newer version raises. Without this it would use another unit's bytes.
        if self._state is not RESIDENT and _version(self.tensor) is not None:
            torch.autograd.graph.increment_version(self.tensor)

    def _put(self, tensor: torch.Tensor) -> None:
        for module, place in self.places:
            if not self.is_held_by(module, place.attr, place.inner):
                continue  # replaced since; the new one stays
            if place.inner:
                setattr(_find(module, (place.attr, *place.inner[:-1])), place.inner[-1], tensor)
            else:
                _holder(module, place)[place.attr] = tensor


class BoundStorage:
    """All tensors that view one stretch of memory, moved together so that they keep overlapping."""

    def __init__(self, model: nn.Module, info: StorageInfo) -> None:
        self.info = info
        self.tensors = [BoundTensor(model, tensor) for tensor in info.tensors]
        self.home = self.tensors[0].original.device
        self.keeps_original = True
        # Before it in the memory that a view came with; more than it has itself would be other tensors'.
        first = self._first.original
        before = first.storage_offset() * first.dtype.itemsize - self._first.info.byte_offset
        self.lead_bytes = before if before <= info.num_bytes else 0
        self.is_back = False  # remove() has given the tensors their bytes

    @property
    def on_meta(self) -> bool:
        """Whether the model has no bytes for it yet."""
        return self.home.type == "meta"

    def original_bytes(self) -> torch.Tensor:
        """The memory the model came with: uint8, 1-D."""
        return self._bytes_around(self._first.original_data)

    def current_bytes(self) -> torch.Tensor:
        """The memory that the tensors view now: uint8, 1-D."""
        return self._bytes_around(self._first.tensor.data)

    def held_memory(self) -> list[torch.Tensor]:
        """Memory that the tensors view, or are to view again; of what has no bytes of its own none."""
        # A tensor from `meta` has an original without memory for good.
        data = [tensor.tensor if self.on_meta else tensor.original_data for tensor in self.tensors]
        return [each for each in data if not each.is_meta and not is_placeholder(each)]

    @property
    def is_kept_elsewhere(self) -> bool:
        """Whether the memory that the model came with was released, and views kept elsewhere hold it still."""
        return not self.keeps_original and any(tensor.original_memory() is not None for tensor in self.tensors)

    @property
    def is_placeholder(self) -> bool:
        """Whether one of the tensors has no memory now."""
        return any(is_placeholder(tensor.tensor) and tensor.state is not PINNED for tensor in self.tensors)

    def _bytes_around(self, first: torch.Tensor) -> torch.Tensor:
        start = first.storage_offset() * first.dtype.itemsize - self._first.info.byte_offset
        buffer = torch.empty(0, dtype=torch.uint8, device=first.device)
        return buffer.set_(first.untyped_storage(), start, (self.info.num_bytes,), (1,))

    @property
    def _first(self) -> BoundTensor:
        return min(self.tensors, key=lambda tensor: tensor.info.byte_offset)

    def point_at(self, buffer: torch.Tensor) -> None:
        """Make every tensor a view of ``buffer`` at its own offset."""
        for tensor in self.tensors:
            tensor.point_at(buffer)

    def point_at_slot(self, buffer: torch.Tensor, on_access: OnAccess | None = None) -> None:
        """Make the tensors views of a slot, which other units' tensors view, too; see :mod:`headrace.runtime.hooks`."""
        for tensor in self.tensors:
            tensor.point_at_slot(buffer, on_access)

    def adopt(self, buffer: torch.Tensor) -> None:
        """Make ``buffer`` the memory that the model came with: for what was on ``meta`` and is computed, not read."""
        self.point_at(buffer)
        for tensor in self.tensors:
            tensor.original, tensor.original_data = tensor.tensor, tensor.tensor.data
        self.home = buffer.device

    def return_to_original(self) -> bool:
        """Point every tensor at the memory that the model came with, if views kept elsewhere hold it still."""
        found = [tensor.original_data if self.keeps_original else tensor.original_memory() for tensor in self.tensors]
        if self.on_meta or any(data is None for data in found):
            return False
        for tensor, data in zip(self.tensors, found, strict=True):
            tensor.return_to(data)  # type: ignore[arg-type] # none is None
        return True

    def give_back(self, buffer: torch.Tensor | None) -> None:
        """Make every tensor a view of ``buffer``, or restore it; a tensor whose data was set since keeps that data.

        Where views kept elsewhere still hold the memory that the model came with, the bytes of ``buffer`` go there.
        """
        left = [tensor for tensor in self.tensors if not tensor.has_other_data]
        if buffer is not None and len(left) == len(self.tensors) and self.return_to_original():
            self.original_bytes().copy_(buffer)
            left = []
        for tensor in left:
            if buffer is None:
                tensor.restore()
            else:
                tensor.point_at(buffer)
                tensor.forget_original()
        self.is_back = True

    def restore(self) -> None:
        """Restore the original object and memory of every tensor."""
        for tensor in self.tensors:
            tensor.restore()

    def forget_original(self) -> None:
        """Release the memory that the model came with."""
        self.keeps_original = False
        for tensor in self.tensors:
            tensor.forget_original()


def fill_empty(model: nn.Module, device: torch.device) -> None:
    """Move tensors without elements, which no storage has, from ``meta``: kernels want arguments on one device."""
    made: dict[int, torch.Tensor] = {}  # ties survive
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta and tensor.numel() == 0:
                    empty = torch.empty_like(tensor, device=device)
                    empty = nn.Parameter(empty, tensor.requires_grad) if held is module._parameters else empty
                    held[name] = made.setdefault(id(tensor), empty)  # type: ignore[assignment]


def used_elsewhere(storages: Collection[BoundStorage]) -> list[BoundStorage]:
    """Storages whose memory has another user than the model: an alias, an array of ``numpy()``, a list of views."""
    count = torch_private.use_count
    probe = torch.empty(1, device="cpu")
    of_python = count(storage_id(probe)) - 1  # Python's object of a storage, which storage_id() makes, counts too
    own: dict[int, dict[int, torch.Tensor]] = {}  # by storage and identity
    for bound in tuple(_bound):  # also those of plans, and of an offload that has failed, which its traceback keeps
        for data in (bound.tensor, bound.original_data):
            own.setdefault(storage_id(data), {})[id(data)] = data
    for base in _held_by_views(bound.tensor for bound in tuple(_bound)):
        own.setdefault(storage_id(base), {})[id(base)] = base
    used = {address for address, tensors in own.items() if count(address) > len(tensors) + of_python}
    return [storage for storage in storages if used & {storage_id(data) for data in storage.held_memory()}]


def _held_by_views(views: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Bases of ``views``, which keep them, without those that somebody else has, too."""
    with torch.inference_mode(False):  # where no view has a base
        probe = torch.empty(1, device="cpu")[:]
    bases = {id(view._base): view._base for view in (probe, *views) if view._base is not None}
    counts = {key: sys.getrefcount(bases[key]) for key in bases}  # a view's own reference is one of C++
    return [base for key, base in bases.items() if counts[key] == counts[id(probe._base)]]


def live_tensors(module: nn.Module, paths: Iterable[Path]) -> Iterator[torch.Tensor]:
    """The tensors at ``paths`` right now; traced by the compiler, hence without any state of ours."""
    for path in paths:
        found = _find(module, path)
        if isinstance(found, torch.Tensor):  # or deleted since
            yield found


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The ``forward`` that ``module`` keeps whatever becomes of its class; ``None``: that of its class at each call."""
    is_method = getattr(module.forward, "__func__", None) is type(module).forward
    return None if is_method and "forward" not in vars(module) else module.forward


def _find(module: nn.Module, path: Path) -> object:
    found: object = module
    for attr in path:
        found = getattr(found, attr, None)
    return found


def _holder(module: nn.Module, place: Location) -> dict[str, torch.Tensor | None]:
    if place.kind == "parameter":
        return module._parameters  # type: ignore[return-value]
    return module._buffers if place.kind == "buffer" else vars(module)


def own_storage(buffer: torch.Tensor) -> torch.Tensor:
    """Tensor over the memory of ``buffer``, kept alive, under a storage object of its own."""
    # The tensors of all units in a slot share its memory. With one storage for all, its use count (is_viewed) and its
    # owner (_owners) would mix the tensors of different units.
    if buffer.is_cpu:
        return torch.frombuffer(buffer.numpy(), dtype=torch.uint8)
    from headrace.memory.pinned import device_view

    return device_view(buffer, buffer.device)


class Saved:
    """Value that autograd saves of ``tensor``, which is no weight in a slot, as it would without hooks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # An output itself would keep its history alive, which keeps this: a circle that no collector sees.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version

    def tensor(self) -> torch.Tensor:
        """Tensor for the backward pass; ``StateError`` after a write, for which torch does not look behind hooks."""
        if self._tensor._version != self._version:
            raise StateError(
                f"a backward pass needs a tensor {list(self._tensor.shape)} of an offloaded module's forward that was "
                f"written in place since: version {self._version} expected, {self._tensor._version} found; write to a "
                f"copy (.clone()), as without an offload"
            )
        return self._tensor


def _version(tensor: torch.Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode, which does without; autograd saves no such tensor
        return None


# -- dispatch keys -----------------------------------------------------------------------------------------------------

_DEFERRED_KEY, _PINNED_KEY, _GUARDED_KEY = "DeferredInit", "TESTING_ONLY_GenericMode", "TESTING_ONLY_GenericWrapper"
# Within the `__torch_dispatch__` of a subclass, torch excludes all keys above Python's: one below it sees what the
# subclass does with a placeholder inside of it. No backend has kernels for this one.
_BELOW_PYTHON = "CustomRNGKeyId"
_DEFERRED, _PINNED, _GUARDED = map(torch_private.parse_key, (_DEFERRED_KEY, _PINNED_KEY, _GUARDED_KEY))
_GUARDED_KEYS, _PINNED_KEYS = torch_private.key_set(_GUARDED_KEY), torch_private.key_set(_PINNED_KEY, _BELOW_PYTHON)

# These neither read nor write bytes: bookkeeping, aliases, and factories that only ask for shape, dtype and device.
_TOUCHES_NOTHING = {
    "set_data", "_has_compatible_shallow_copy_type", "detach", "alias", "requires_grad_", "retain_grad",
    "record_stream", "is_pinned", "is_same_size",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full",
}  # fmt: skip

# These write running statistics, which their schemas do not say; the first ones only if their sixth argument is true.
_NORMS = {f"aten::{name}batch_norm" for name in ("", "native_", "cudnn_", "miopen_")} | {"aten::_batch_norm_impl_index"}
_STATISTICS_OF = _NORMS | {
    "aten::batch_norm_update_stats", "aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts",
}  # fmt: skip
_STATISTICS = ("running_mean", "running_var")

_owners: weakref.WeakValueDictionary[int, BoundTensor] = weakref.WeakValueDictionary()


def _own(tensor: torch.Tensor, owner: BoundTensor) -> None:
    """Note the owner of the storage of ``tensor``, for as long as there is that storage."""
    if _owners.get(key := storage_id(tensor)) is not owner:
        _owners[key] = owner
        weakref.finalize(tensor.untyped_storage(), _owners.pop, key, None).atexit = False


class _PlaceholderStorage(torch.UntypedStorage):
    """Storage without bytes: what copied it would copy nothing, and find nothing wrong."""

    def nbytes(self) -> int:
        """The size of what the placeholder stands for."""
        owner = _owners.get(int(self._cdata))
        view = None if owner is None else owner.tensor if owner.state is RESIDENT else owner.in_slot
        memory = None if view is None else view.untyped_storage()
        return super().nbytes() if memory is None or memory._cdata == self._cdata else memory.nbytes()

    size = __len__ = nbytes

    def _refuse(self, name: str, *args: Any, **kwargs: Any) -> Any:
        owner = _owners.get(int(self._cdata))
        if owner is not None and owner.state is PINNED and (owner.is_read_here or not is_placeholder(owner.tensor)):
            return getattr(torch.UntypedStorage, name)(self, *args, **kwargs)
        is_parked = owner is not None and owner.state is PARKED
        fix = "the offload is parked, call handle.resume() first" if is_parked else "use the tensor or .clone()"
        raise OutsideAccessError(
            f"the storage of {'a weight' if owner is None else owner.name}, which is offloaded, was read, written or "
            f"copied (by copy.deepcopy, torch.save, storage.clone() or the like), and has no bytes now: {fix}"
        )

    _REFUSED = "__copy__ __deepcopy__ __getitem__ __iter__ clone tolist data_ptr copy_ fill_ resize_ share_memory_"
    for _name in f"{_REFUSED} _share_fd_cpu_ _share_filename_cpu_ _share_cuda_".split():
        locals()[_name] = functools.partialmethod(_refuse, _name)


def placeholder_like(tensor: torch.Tensor, owner: BoundTensor) -> torch.Tensor:
    """A placeholder of the shape, strides, dtype and device of ``tensor``, which ``owner`` answers for."""
    _register()
    placeholder = torch_private.with_keys(tensor, _DEFERRED_KEY, _BELOW_PYTHON)
    # The class is kept, like the object itself, with the storage of C++.
    placeholder.untyped_storage().__class__ = _PlaceholderStorage
    # Code that asks for the pointer gets an error of torch instead of the null pointer of an empty storage.
    torch_private.refuse_pointer(placeholder)
    _own(placeholder, owner)
    return placeholder


def guarded(tensor: torch.Tensor, owner: BoundTensor) -> torch.Tensor:
    """``tensor`` over the same storage, read-only for everything that the dispatcher sees."""
    return _marked_view(tensor, owner, _GUARDED_KEY)


@contextmanager
def read_pinned() -> Iterator[None]:
    """Within, pinned placeholders are read at their addresses: for compiled code that waits for their units."""
    with torch_private.excluding(_PINNED_KEYS):
        yield


def reading_pinned(compiled: Callable[..., Any], positions: Collection[int]) -> Callable[..., Any]:
    """``compiled``, which reads pinned placeholders at their addresses.

    ``positions``: arguments that nothing in it waits for: outside of the window of their module it gets their bytes.
    """

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        given = list(args)
        for position in positions:
            owner = _owners.get(storage_id(given[position]))
            if owner is not None and not owner.is_read_here:
                given[position] = given[position].view_as(given[position])  # by way of _on_access
        with read_pinned():
            return compiled(*given)

    return run


def _marked_view(tensor: torch.Tensor, owner: BoundTensor, *marks: str) -> torch.Tensor:
    _register()
    view = torch_private.with_keys(tensor, *marks)
    # `set_` itself is declared as a write of `view`, which the guard would refuse.
    with torch.no_grad(), read_pinned(), torch_private.excluding(_GUARDED_KEYS):
        view.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    _own(view, owner)
    return view


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether the bytes of ``tensor`` are elsewhere, or, where it is pinned, may be."""
    return torch_private.has_key(tensor, _DEFERRED, _PINNED)


def owner_of(tensor: torch.Tensor) -> BoundTensor | None:
    """Owner of the storage of ``tensor``; ``None``: it has its bytes, or its offload has ended."""
    return _owners.get(storage_id(tensor))


def resident_rule(name: str) -> str:
    """How to keep the tensor ``name`` on the device, for messages: in Python and on a command line."""
    return f"rules=[({name!r}, 'resident')], --offload-rule {name}=resident"


def leave_placeholders(library: torch.library.Library, op: str) -> None:
    """Let the custom operator ``op`` of ``library``, which reads no bytes of them, run on placeholders as they are."""
    for key in (_DEFERRED_KEY, _PINNED_KEY, _BELOW_PYTHON):
        library.impl(op, torch.library.fallthrough_kernel, key)


@leave_to_python
def _on_access(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Give every placeholder among the arguments its bytes, then run ``operator`` as if nothing were offloaded."""
    targets = (target for target in written_in_place(operator, args, kwargs) if isinstance(target, torch.Tensor))
    written = {storage_id(target) for target in targets}
    copies: dict[int, TemporaryCopy] = {}  # by storage, which aliases share
    given: dict[int, torch.Tensor] = {}  # in place of placeholders, by their ids
    returned: dict[int, torch.Tensor] = {}  # what is written; `numpy()` and `tolist()` take the pointer of what is read
    try:
        for argument in tree_leaves((args, kwargs)):
            if isinstance(argument, torch.Tensor) and is_placeholder(argument):
                storage = storage_id(argument)
                owner = _owners.get(storage)  # as of now: a resize() of another thread ends it
                if operator.is_view and owner is not None and owner.is_read_here:
                    return _view_pinned(operator, args, kwargs)
                copy = copies.get(storage) or _materialize(argument, operator, storage in written)
                if copy is not None:
                    copies[storage] = copy
                    part = copy[0] if owner is None else owner.like(argument, copy[0])
                    given[id(argument)] = with_bytes = _with_history(argument, part)
                    returned |= {id(with_bytes): argument} if storage in written else {}
        if given:
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: given.get(id(tensor), tensor), (args, kwargs))
        output = operator(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda t: returned.get(id(t), t), output) if returned else output
    finally:
        for _, release_copy in copies.values():
            if release_copy is not None:
                release_copy()


def _view_pinned(operator: OpOverload, args: Any, kwargs: Any) -> Any:
    """A view that is a pinned placeholder, too, should it be kept beyond the window in which it is made."""
    with read_pinned():
        if not torch.is_grad_enabled():  # autograd would ask for the version of a view of a leaf
            args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        return operator(*args, **kwargs)


@leave_to_python
def _on_detach(tensor: torch.Tensor) -> torch.Tensor:
    """An alias of a pinned placeholder without its address: what asks for the pointer alone is not to find the slot."""
    owner = _owners.get(storage_id(tensor))
    if owner is not None and owner.is_part(tensor):
        return cast(torch.Tensor, _on_access(torch.ops.aten.detach.default, tensor))
    with read_pinned():
        return (tensor if owner is None or owner.bare is None else owner.bare).detach()


@leave_to_python
def _on_named_access(name: str, overload: str, /, *args: Any, **kwargs: Any) -> Any:
    return _on_access(_operator(name, overload), *args, **kwargs)


@leave_to_python
def _on_write(name: str, overload: str, /, *args: Any, **kwargs: Any) -> Any:
    """Refuse an operator of ``aten`` if it writes a guarded tensor; others may be among its arguments."""
    operator = _operator(name, overload)
    for target in written_in_place(operator, args, kwargs):
        if isinstance(target, torch.Tensor) and torch_private.has_key(target, _GUARDED):
            owner = _owners.get(storage_id(target))
            name = "a weight" if owner is None else owner.name
            raise ModelChangedError(
                f"{name} was written in place by {operator} while offloaded, where the model would see the write late "
                f"or never: write to a copy (.clone()), keep it resident ({resident_rule(name)}), or call "
                f"handle.remove() first, and state_dict() again"
            )
    # Without the key excluded, the dispatcher would call this function again.
    # A tensor that C++ has made of a number comes as a number, which another overload takes (`2 ** weight`).
    arguments = zip(operator._schema.arguments, args, strict=False)
    is_number = any(isinstance(value, int | float | complex) and str(a.type) == "Tensor" for a, value in arguments)
    with torch_private.excluding(_GUARDED_KEYS):
        return (operator.overloadpacket if is_number else operator)(*args, **kwargs)


@functools.cache
def _operator(name: str, overload: str) -> OpOverload:
    # When it is called: torch makes the object of an operator when it is asked for, and of all 1,457 that takes 0.1 s.
    operator: OpOverload = getattr(getattr(torch.ops.aten, name), overload)
    return operator


def written_in_place(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that ``operator`` writes in place, such as tensors."""
    targets: list[Any] = []
    is_norm = operator._schema.name in _NORMS
    keeps_statistics = is_norm and not (args[5] if len(args) > 5 else kwargs.get("training"))
    for position, name in _written(operator):
        if keeps_statistics and name in _STATISTICS:
            continue
        target = args[position] if position < len(args) else kwargs.get(name)
        targets += target if isinstance(target, list | tuple) else [target]
    return targets


@functools.cache
def _written(operator: OpOverload) -> list[tuple[int, str]]:
    """Position and name of each argument that ``operator`` writes."""
    undeclared = _STATISTICS if operator._schema.name in _STATISTICS_OF else ()
    arguments = enumerate(operator._schema.arguments)
    return [(p, a.name) for p, a in arguments if a.name in undeclared or (a.alias_info and a.alias_info.is_write)]


def _materialize(argument: torch.Tensor, operator: OpOverload, is_written: bool) -> TemporaryCopy | None:
    while (first := _owners.get(storage := storage_id(argument))) is None:
        if not is_placeholder(argument):
            return None  # it has its bytes since, by another thread's resume() or resize()
        if storage == storage_id(argument):
            raise StateError(
                f"{operator} was given an alias (.data or .detach()) of a weight, taken while its model was offloaded; "
                f"the offload has ended or was resized: take the alias again"
            )
    owner, is_alias = first, argument is not first.tensor
    has_other_data = owner.has_other_data
    if is_placeholder(owner.tensor):  # perhaps for another offload than the one in which the alias was taken
        latest = _owners.get(storage_id(owner.tensor), owner)
        has_other_data = latest is not owner and latest._first_address != owner._address
        owner = latest
    if is_alias and has_other_data:
        raise StateError(
            f"{operator} was given an alias (.data or .detach()) of {owner.name}, which was taken while the weight was "
            f"offloaded, and since then the offload was resized or the weight's data was set (.data = ...), so the "
            f"alias stands for it no longer: take it again"
        )
    if owner.is_read_here:
        return owner.in_slot.data, None
    is_out = owner.state is PINNED or is_placeholder(owner.tensor)
    copy = owner.on_access(owner, operator, is_written) if owner.on_access and is_out else None
    # An alias of the placeholder has a TensorImpl of its own, which is not changed with the owner's.
    if copy is None and is_alias:
        with torch.no_grad():
            argument.data = first.like(argument, owner.tensor.data)
    return copy


def _with_history(argument: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """``copy``, to autograd a view of ``argument``."""
    if not argument.requires_grad:
        return copy
    view: torch.Tensor = torch.ops.aten.alias(argument)
    view.data = copy
    return view


@functools.cache
def _register() -> tuple[torch.library.Library, ...]:
    """Register the meaning of the keys with the dispatcher, once."""
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    # A fallback of a key serves the operators of every library in every thread. A TorchDispatchMode would cost 10 us
    # per operator, see one thread only, and change how composite operators decompose.
    for key in (_DEFERRED_KEY, _PINNED_KEY, _BELOW_PYTHON):
        everything.fallback(_on_access, key)
    everything.fallback(torch.library.fallthrough_kernel, _GUARDED_KEY)
    for schema, qualified, consists_of_others in torch_private.aten_operators():
        name, overload = schema.name.removeprefix("aten::"), schema.overload_name or "default"
        reads = any("Tensor" in str(argument.type) for argument in schema.arguments) and name not in _TOUCHES_NOTHING
        # By operator, since torch looks up no fallback beside a tensor of a subclass, such as a jagged one, nor in a
        # TorchDispatchMode, and since many operators have a kernel for every backend's keys, also for _BELOW_PYTHON.
        on_access = functools.partial(_on_named_access, name, overload) if reads else torch.library.fallthrough_kernel
        # An operator that consists of others needs none below Python, where each of those is found. With one it would
        # fail for tensors in the layout of oneDNN (to_mkldnn()), whose key of autograd that of _BELOW_PYTHON is, too.
        for key in (_DEFERRED_KEY, _PINNED_KEY, *(() if consists_of_others else (_BELOW_PYTHON,))):
            aten.impl(qualified, _on_detach if (name, key) == ("detach", _PINNED_KEY) else on_access, key)
        if schema.is_mutable or schema.name in _STATISTICS_OF:  # all others keep the fall-through and their speed
            aten.impl(qualified, functools.partial(_on_write, name, overload), _GUARDED_KEY)
    return everything, aten
