"""Park and resume: the device memory of an offload's weights is given back, and taken again.

Parked, every byte of the model is in its store or, for residents, in :class:`HostCopies`; tensors are PARKED, slots and
slots of cached experts have no memory. Hooks, link and store stay. While an operation changes this, and as long as the
offload is parked, each module has one more hook (*the gate*): forwards of other threads that began before go on to
their end, new ones wait; of a parked model they resume it, or raise.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils.hooks import RemovableHandle

from headrace.errors import BudgetError, OptionError, StateError, TransferError, warn_user
from headrace.forks import OwnProcess
from headrace.formatting import format_size
from headrace.lifetime.host_copies import HostCopies
from headrace.model.live_tensors import (
    BoundStorage,
    BoundTensor,
    TemporaryCopy,
    is_placeholder,
    used_elsewhere,
)
from headrace.model.torch_private import leave_to_python
from headrace.planning.context import PlanContext
from headrace.runtime.forwards import STOP_TIMEOUT_S, release_left
from headrace.runtime.prefetcher import Prefetcher, new_guard
from headrace.runtime.session import OffloadSession, allocate_residents, point_at_slots
from headrace.transfer.decoded_units import slot_sizes

_RESUME = ("call", "auto")
UPDATE = "update()"
BROKEN = (
    "update() has failed in the middle, so that some weights are new and others are not: call update() with all of "
    "these tensors again, or call remove() and load the weights again"
)
_HALF = (
    "the offload has ended after an update() that failed in the middle: some weights of the model are new and others "
    "are not. Load the weights again before you use it"
)
_PARKED = (
    "the offload is parked, so that its weights are not on the device: call handle.resume() first, or park with "
    "resume='auto', which compiled code does not do"
)


class Lifetime:
    """The operations of one offload that change it between forwards.

    Attributes:
        copies: bytes of residents in host memory.
        parked: what resumes it: ``"call"`` of resume(), or ``"auto"``, a forward; ``None``: it is not parked.
        broken: why no forward may run; ``None``: it may.
        in_engine: an engine owns the offload, and calls nothing beside a forward.
        session: the session in force; or while it is detached the one whose store has the bytes.
        context: what its plan was made from; ``None``: it was not made from a request.
        detached: attaches the offload again, because a resize has ended in the middle; ``None``: its hooks are on.
        bound: the live tensors meanwhile.
    """

    def __init__(
        self,
        session: OffloadSession,
        in_engine: bool = False,
        context: PlanContext | None = None,
        lock: threading.RLock | None = None,
    ) -> None:
        """``lock``: that of its handle, which may have none."""
        self.session, self.device, self.in_engine, self.context = session, session._device, in_engine, context
        self.detached: Callable[[], int] | None = None
        self.bound: dict[str, BoundStorage] = {}
        self.copies = HostCopies(self.device)
        self.parked: str | None = None
        self.broken: str | None = None
        self._process = OwnProcess()
        self._lock = lock or threading.RLock()
        self._gates: list[RemovableHandle] = []
        self._modules: set[nn.Module] = set()  # that have gates
        self._waiting: set[int] = set()  # threads that the gate holds
        self.names: set[str] = set()  # of residents that are parked

    # -- park and resume --------------------------------------------------------------------------------------------

    def park(self, resume: str = "call", graphs_released: bool = False) -> int:
        """See :meth:`headrace.api.Handle.park`."""
        if resume not in _RESUME:
            raise OptionError(f"resume: expected one of {', '.join(map(repr, _RESUME))}, found {resume!r}")
        with self.alone("park()", graphs_released):
            if self.parked is not None:
                self.parked = resume
                if not self.detached:
                    self.free()  # what an error or interrupt has left
                return 0
            residents = self._residents()
            moved = self.copies.update({name: bound.current_bytes() for name, bound in residents.items()})
            self.release_graphs()
            self.parked, self.names = resume, set(residents)
            self.free()
            return moved

    def resume(self) -> int:
        """See :meth:`headrace.api.Handle.resume`."""
        with self._undisturbed():
            self._require_whole("resume()")
            return self._resume()

    def remove(self, graphs_released: bool, then: Callable[[], None]) -> None:
        """See :meth:`headrace.api.Handle.remove`; ``then`` is called at the end, while others still wait."""
        if self._process.is_forked and not self.session.in_force:
            return
        with self._undisturbed("in force until remove() has been called again"):
            self._resume()
            self.session.remove(graphs_released)
            self.copies = HostCopies(self.device)
            then()
            if self.broken is not None:
                self.broken = None
                self._open()
                warn_user(_HALF)

    def _resume(self) -> int:
        with self._undisturbed():
            if self.parked is None:
                if self._gates:  # left by an interrupt, since no operation has the lock
                    self._open()
                return 0
            try:
                moved = self.detached() if self.detached else self.refill()
            except BaseException as error:
                if not self.detached:
                    self.free()
                if not isinstance(error, torch.OutOfMemoryError):
                    raise
                raise BudgetError(
                    f"{self.device} has no room to resume the offload, which stays parked: free device "
                    f"memory, then call resume() again",
                    self.session.plan.device_bytes,
                ) from error
            self.parked, self.names = None, set()
            self._open()
            self.session.reset()
            return moved

    def on_use(self, what: str) -> None:
        """A parked weight is needed: resume, or raise ``StateError`` that says ``what`` has happened."""
        with self._undisturbed():  # another thread may be about to resume it, or to end an update
            self._require_whole(what)
            if self.parked == "call":
                raise StateError(f"{what}, and {_PARKED}")
            self._resume()

    def _require_whole(self, what: str) -> None:
        if self.broken is not None:
            raise StateError(f"{what}: {self.broken}")

    def free(self) -> None:
        """Give the device memory of a parked offload back; whatever an error or interrupt has left. Idempotent."""
        session = self.session
        for name in self.names:
            park_storage(session._bound[name], self._on_access)
            session._bound[name].forget_original()
        for unit in session.plan.units:
            for entry in unit.entries:
                park_storage(session._bound[entry.storage], self._on_access)
        if session.prefetcher is not None:
            session.prefetcher.forwards.parked = f"the model was called, and {_PARKED}"
            free_slots(session.prefetcher)
        if session._ranges is not None:
            session._ranges.free_slots()
        for layer in session.plan.cached:
            for tensor in (tensor for name in layer.storages for tensor in session._bound[name].tensors):
                tensor.on_access = self._on_access
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def refill(self) -> int:
        """Take device memory again; returns bytes that were copied there."""
        self.free()  # what an interrupt has left
        session = self.session
        parked = {name: session._bound[name] for name in self.names}
        for name in [name for name, bound in parked.items() if not _is_ours(bound)]:
            for tensor in parked.pop(name).tensors:  # data that was set meanwhile stays
                tensor.return_to(tensor.tensor.data)
        staying = [name for name, bound in parked.items() if bound.on_meta or bound.home == self.device]
        places = allocate_residents(list(parked.values()), self.device, staying)
        moved = self.copies.fill(places)  # under way
        for name, bound in parked.items():
            bound.point_at(places[name])
            bound.forget_original()
        if session._ranges is not None:
            session._ranges.take_slots()
            for layer, cache in session._caches:
                cache.reset()
                for tensor in (tensor for name in layer.storages for tensor in session._bound[name].tensors):
                    tensor.on_access = session._promoter.on_outside_access
        if session.prefetcher is not None:
            take_slots(session)
            point_at_slots(session.plan, session._bound, session.prefetcher, session._promoter)
        self.copies.finish(places)  # the host was busy meanwhile
        return moved

    def _residents(self) -> dict[str, BoundStorage]:
        """Residents to be parked; others stay where they are, with a warning."""
        session = self.session
        residents = {name: session._bound[name] for name in session.plan.resident}
        for unit in session.plan.units:
            for tensor in (tensor for part in unit.entries for tensor in session._bound[part.storage].tensors):
                if tensor.has_other_data:
                    raise tensor._moved()
        shared = {bound.info.name for bound in used_elsewhere(residents.values())}
        own = {name: bound for name, bound in residents.items() if name not in shared and _is_ours(bound)}
        left = [name for name in residents if name not in own and name not in session._promoter.promoted]
        if left:
            num_bytes = sum(residents[name].info.num_bytes for name in left)
            warn_user(
                f"{format_size(num_bytes)} of residents ({left[0]}, {len(left)} in all) stay where they are while the "
                f"offload is parked: their memory has another user (an alias such as .detach(), a state_dict()), or "
                f"their data was set; drop it first (del)"
            )
        return own

    def _on_access(self, tensor: BoundTensor, operator: OpOverload, is_written: bool) -> TemporaryCopy | None:
        self.on_use(f"{tensor.name} was given to {operator}")
        bound = [each for storage in self.session._bound.values() for each in storage.tensors]
        tensor = next((each for each in bound if each.tensor is tensor.tensor), tensor)  # of another session, perhaps
        is_out = tensor.on_access is not None and is_placeholder(tensor.tensor)
        return tensor.on_access(tensor, operator, is_written) if is_out and tensor.on_access else None

    def release_graphs(self) -> None:
        for attachment in self.session.attachments:
            getattr(attachment, "release", lambda: None)()
        for steps in self.session.captured:
            steps.drop()
        if self.session.prefetcher is not None:
            self.session.prefetcher.replays.release_graphs(of_others=True)

    # -- beside forwards --------------------------------------------------------------------------------------------

    @contextmanager
    def alone(self, call: str, graphs_released: bool = True) -> Iterator[None]:
        """Within, no forward of the model runs or begins; ``call`` is what asks for it.

        Raises:
            StateError: called inside a forward, in a forked process, or of an offload that has ended; another thread
                does not end its forward; graphs may still be replayed.
            OptionError: the offload is of a kind that this is not for.
        """
        with self._undisturbed():
            self._require_supported(call)
            if self.parked is None:
                self._close(call, graphs_released)
            try:
                yield
            finally:
                if self.parked is None:
                    self._open()

    @contextmanager
    def _undisturbed(self, otherwise: str = "as it was before") -> Iterator[None]:
        """Within, no other thread changes the offload. Everything that depends on its state has to be inside.

        An error says what has become of the offload: ``otherwise``, if it is neither parked nor half updated. Locks
        are given up, whatever an interrupt has left of them.
        """
        is_inner = self._lock._is_owned()  # type: ignore[attr-defined] # a caller still needs the lock
        try:
            self._process.require_own_process()  # in a fork the lock may be locked forever
            # What is made lives on after the caller's mode.
            with self._lock, torch.inference_mode(False), torch.no_grad():
                yield
        except BaseException as error:
            if is_inner:
                raise
            if not isinstance(error, Exception):
                release_left(self._lock)
                release_left(self.session._promoter.tensor_lock)
                if self.session.prefetcher is not None:
                    self.session.prefetcher.abandon()
            state = otherwise if self.parked is None else "parked"
            error.add_note(f"headrace: the offload is {'half updated' if self.broken else state}")
            raise

    def _require_supported(self, call: str) -> None:
        session, options = self.session, self.session._options
        if call != UPDATE:
            self._require_whole(call)
        if not session.in_force:
            raise StateError(f"{call}: this offload has ended; offload the model again")
        if session.half_removed:
            raise StateError(f"{call}: a remove() has ended in the middle: call remove() again")
        if self.detached and call == UPDATE:
            raise StateError(f"{call}: a resize() has ended in the middle: call resume() first")
        kinds = {unit.kind for unit in session.plan.units} | {session.plan.kind}
        why = next((f"mode {kind.name!r}" for kind in kinds if kind.needs_ranks or not kind.has_bytes), None)
        why = why or ("group=" if session.has_ranks else None)
        in_other = not self.in_engine and (options.keeps_addresses or options.replays_announced)
        why = why or ("an engine" if in_other else None)
        if why is not None:
            raise OptionError(
                f"{call}: not for an offload with {why}, whose memory is not this call's alone; nothing was changed. "
                f"Use mode 'cpu' or 'disk' in one process, or call remove() and offload again"
            )

    def _close(self, call: str, graphs_released: bool) -> None:
        """Return when no forward runs; none begins until :meth:`_open`."""
        self._modules = set(self.session._model.modules())
        if threading.get_ident() in self._inside():
            raise StateError(f"{call} was called inside a forward of the model: call it when the forward has returned")
        for module in self._modules:
            self._gates.append(module.register_forward_pre_hook(self._gate, prepend=True))
        try:
            if self.session.prefetcher is not None:
                self.session.prefetcher.stop(graphs_released)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while self._inside() - self._waiting:
                if time.monotonic() > deadline:
                    raise StateError(
                        f"another thread has been inside a forward of the model for {STOP_TIMEOUT_S:.0f} s: let it "
                        f"end, then call {call} again"
                    )
                time.sleep(0.001)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except BaseException:
            self._open()
            raise

    def _open(self) -> None:
        if self.broken is not None:
            if self.session.prefetcher is not None:
                self.session.prefetcher.forwards.parked = f"the model was called, and {self.broken}"
            return
        if self.session.prefetcher is not None:
            self.session.prefetcher.forwards.parked = ""
            self.session.prefetcher.forwards.resume()
        while self._gates:
            self._gates[-1].remove()
            self._gates.pop()

    def _inside(self) -> set[int]:
        """Threads that are inside a call of one of the modules, or a replay of them."""
        code = nn.Module._call_impl.__code__
        return {ident for steps in list(self.session.captured) for ident in list(steps.replaying)} | {
            ident
            for ident, frame in sys._current_frames().items()
            for each, _ in traceback.walk_stack(frame)
            if each.f_code is code and each.f_locals.get("self") in self._modules
        }

    @leave_to_python
    def _gate(self, module: nn.Module, args: Any) -> None:
        self._process.require_own_process()
        me, code = threading.get_ident(), nn.Module._call_impl.__code__
        if self.parked is None:
            frames = [frame for frame, _ in traceback.walk_stack(sys._getframe()) if frame.f_code is code]
            if sum(frame.f_locals.get("self") in self._modules for frame in frames) > 1:
                return  # a part of a forward that began before
        self._waiting.add(me)
        try:
            with self._undisturbed():
                self.on_use(f"{type(module).__name__} was called")
                self._waiting.discard(me)  # with the lock: what takes it next has to wait for this forward
        finally:
            self._waiting.discard(me)


def empty_slots(prefetcher: Prefetcher) -> None:
    """Have all slots hold nothing, and no copy under way to them."""
    with prefetcher._lock:
        for slot in prefetcher.replays.live:
            if slot.transfer is not None:
                with suppress(TransferError):
                    slot.wait_for_copy(prefetcher._link)
            slot.to_empty()
            slot.transfer, slot.events = None, []


def free_slots(prefetcher: Prefetcher) -> None:
    """Give up the memory of all slots, and of what is decoded."""
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    with prefetcher._lock:
        empty_slots(prefetcher)
        for slot in prefetcher.replays.live:
            slot.memory = nothing
        if prefetcher._decoding is not None:
            prefetcher._decoding.memory = nothing


def take_slots(session: OffloadSession) -> None:
    """Take memory for the slots again, for the units as the store has them now."""
    prefetcher = session.prefetcher
    assert prefetcher is not None
    plan = prefetcher._plan
    with prefetcher._lock:
        prefetcher._loads[:] = [session._store.load(unit) for unit in plan.units]
        pairs = zip(prefetcher._loads, plan.units, strict=True)
        prefetcher._copy_bytes[:] = [load.link_bytes(unit) for load, unit in pairs]
        sizes = slot_sizes(plan.slot_bytes, prefetcher._loads)
        for slot, num_bytes in zip(prefetcher.replays.live, sizes, strict=True):
            slot.to_empty()
            slot.memory = prefetcher._link.allocate(num_bytes)
        if prefetcher._decoding is not None:
            prefetcher._decoding.memory = prefetcher._link.allocate(plan.decoding_bytes)
        prefetcher.slots_bytes = sum(sizes) + plan.decoding_bytes
        if prefetcher._guard is not None:
            prefetcher._guard = new_guard(plan, session._store, prefetcher._loads, session._promoter.promoted)


def _is_ours(bound: BoundStorage) -> bool:
    return not any(tensor.has_other_data for tensor in bound.tensors)


def park_storage(bound: BoundStorage, on_access: Callable[..., TemporaryCopy | None]) -> None:
    """Take all tensors of ``bound`` their memory; ``on_access``: called when one is used."""
    for tensor in bound.tensors:
        tensor.park(on_access)
