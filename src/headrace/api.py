"""The one verb, :func:`offload`, and the :class:`Handle` it returns."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from headrace.config import RANK_MODES, Policy, instead_of
from headrace.errors import OptionTypeError, StateError, warn_user
from headrace.forks import OwnProcess
from headrace.formatting import format_size
from headrace.plan.plan import Plan
from headrace.planning.request import PlanRequest, require_kinds
from headrace.runtime.outside_access import place_of
from headrace.runtime.prepare import Prepared, open_ranks, prepare
from headrace.runtime.session import OffloadSession, SessionOptions
from headrace.stats import Stats
from headrace.stores.store import Progress
from headrace.transfer.link import Link

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from headrace.checkpoint.safetensors_header import Checkpoint
    from headrace.checkpoint.weight_map import WeightMap
    from headrace.lifetime.parking import Lifetime
    from headrace.planning.context import PlanContext
    from headrace.stores.file_reads import DiskOptions

__all__ = ["Handle", "handle_of", "offload", "refuse_second_offload", "session_of", "start"]

_log = logging.getLogger(__name__)


class Handle:
    """An active offload. Leaving its ``with`` block, or :meth:`remove`, ends it; dropping the handle does not."""

    def __init__(self, model: nn.Module, session: OffloadSession, context: PlanContext | None = None) -> None:
        self.model = model
        self._first_session, self._context = session, context
        self._life: Lifetime | None = None
        self._lock, self._process = threading.RLock(), OwnProcess()

    @property
    def _session(self) -> OffloadSession:
        return self._first_session if self._life is None else self._life.session

    def __repr__(self) -> str:
        name, plan = type(self.model).__name__, self.plan
        state = f"{format_size(plan.weight_bytes)} of weights in {format_size(plan.device_bytes)} of device memory"
        if not self._session.in_force:
            state = "removed, its weights are back"
        elif self._life is not None and self._life.parked:
            state = "parked"
        return f"<headrace.Handle of {name}: {state}; {self._session.counters()}>"

    @property
    def plan(self) -> Plan:
        """The store and the access mechanism of every tensor."""
        return self._session.plan

    def stats(self) -> Stats:
        """Bytes moved, copies, stalls and misses, per unit and in total, since the offload began."""
        return self._session.stats()

    def sync_prev_onload(self) -> None:
        """Order the current stream after every copy under way; on a CPU, return when all are done.

        Needed only by code that captures or replays parts of a model itself, or reads a slot: :func:`offload` does it
        around a forward of the whole model. No effect when nothing is under way.
        """
        self._session.wait_all()

    def join_after_forward(self) -> None:
        """Join copies at the end of a part that is captured: those that it has started become part of its graph."""
        self._session.wait_all()

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the latest spans of the host as Chrome trace JSON (open it in Perfetto).

        On a CPU: copies, compute and stalls. On a GPU: only how long the host took to launch each unit's module, and
        nothing of a graph replay. Copies to a GPU, and reads of files for it, are not recorded in any mode. Use
        ``torch.profiler`` for them, and ``stats()`` for each unit's latest stall (``measure_stalls=True``) and for the
        staging ring.

        Raises:
            OptionError, OptionTypeError: no file can be written there; no path.
        """
        self._session.recorder.write(path, [unit.module_fqn for unit in self.plan.units])

    def remove(self, *, graphs_released: bool = False) -> None:
        """Restore the model exactly, with all weights resident. A second call has no effect.

        Waits up to 30 seconds for forwards of other threads. If this call raises or is interrupted, no forward of
        the model runs until it is repeated.

        Args:
            graphs_released: no CUDA graph that was captured over this offload will be replayed again; needed where
                there were some, since a replay would read freed memory.

        Raises:
            StateError: called inside a forward; another thread does not end one; graphs may still be replayed.
            BudgetError: the device the model came from has no room for it; the offload stays in force.
        """
        with self._alone():
            if self._life is None:
                try:
                    self._session.remove(graphs_released)
                except BaseException as error:
                    error.add_note("headrace: the offload is in force until remove() has been called again")
                    raise
                return self._forget()
        self._life.remove(graphs_released, self._forget)

    def _alone(self) -> AbstractContextManager[object]:
        """The lock of what changes the offload; a forked child has one thread, and a lock that may stay locked."""
        return nullcontext() if self._process.is_forked else self._lock

    @property
    def _lifetime(self) -> Lifetime:
        from headrace.lifetime.parking import Lifetime

        with self._alone():
            lock = None if self._process.is_forked else self._lock
            self._life = self._life or Lifetime(self._first_session, context=self._context, lock=lock)
        return self._life

    def _forget(self) -> None:
        # A model may have been offloaded again since, and then has another handle.
        if handle_of(self.model) is self:
            del self.model.__dict__[_MARK]

    def park(self, *, resume: Literal["call", "auto"] = "call", graphs_released: bool = False) -> int:
        """Give the device memory of all weights back, until :meth:`resume`; the stores stay as they are.

        Residents are copied to host memory, which is pinned for a GPU, at the first park, and stay there: a later one
        copies those alone that were written since. Slots of units and of cached experts have no memory then, and CUDA
        graphs of ``generate`` and of a server's rows are freed, with the cache of ``generate``; they are captured again
        at their next use. Forwards of other threads end first. ``state_dict()`` has what is offloaded.

        Args:
            resume: what a forward of the parked model does: ``"call"``: it raises, until :meth:`resume` is called;
                ``"auto"``: it resumes the offload, but in compiled code, which raises.
            graphs_released: see :meth:`remove`.

        Returns:
            bytes that were copied to host memory.

        Raises:
            StateError: as :meth:`remove`.
            LimitError: host memory has no room for the residents.
            OptionError: ranks share the weights, or an engine has the model.

        After an error or interrupt the offload is as before, or parked; a note of the exception says which.
        """
        return self._lifetime.park(resume, graphs_released)

    def resume(self) -> int:
        """Take device memory again, and copy the residents back; no effect unless the offload is parked.

        Returns:
            bytes that were copied to the device, without those of the first units, which are under way.

        Raises:
            BudgetError: the device has no room; the offload stays parked.
        """
        return self._lifetime.resume()

    def resize(self, device_memory: str | int, *, graphs_released: bool = False) -> int:
        """Give the offload another device budget, between two forwards; a parked one is resumed by it.

        The plan is the one that :func:`offload` would make with the policy of this offload and that budget (of another
        policy than a :class:`~headrace.Budget`: its mode and codec). What is in host memory stays there or goes to the
        device over the link, and what leaves the device comes back over it; files are read for what a plan has in
        files, and for nothing else. Host memory that a tensor has once stays its own, also while it is resident, for
        the next call: one copy of the weights at most. Units in another form, codes and cached experts, are made beside
        what they are made of. CUDA graphs of ``generate`` and of a server are captured again, code of ``torch.compile``
        is compiled again, and ``stats()`` begins anew.

        Args:
            device_memory: as for :func:`offload`, but no ``"auto"``.
            graphs_released: see :meth:`remove`.

        Returns:
            bytes of weights that have become resident, or are so no longer.

        Raises:
            BudgetError, LimitError: the budget is too small; the device or the host has no room. All but the memory
                that the allocator fails to give is found before anything changes.
            OptionError, OptionTypeError: a budget that is none; ranks that share the weights, an engine, a pipeline, a
                peer, speculation, experts on the CPU; memory of a weight that has another user.
            ModelChangedError, CheckpointError: a weight was replaced, or has another value than files that are to
                replace it.
            StateError: as :meth:`remove`.

        After an error or interrupt the offload is as before, or parked; a note of the exception says which.
        """
        from headrace.lifetime.resizing import resize

        return resize(self._lifetime, device_memory, graphs_released)

    def update(self, tensors: Mapping[str, torch.Tensor] | str | os.PathLike[str]) -> int:
        """Give weights and buffers new values, in the store and on the device, between two forwards.

        Bytes are written where they are, so graphs stay valid, but for coded units: those are coded again, and graphs
        of our own are captured again. The next forward sees cached experts as they are now. Parked or not. The device
        has no more memory in use than before, but for coding: up to eight times the bytes of a tensor.

        Args:
            tensors: by the names of the model, on a CPU or GPU; or a folder or file of safetensors with these names.
                What is left out stays.

        Returns:
            bytes that were written.

        Raises:
            OptionError, OptionTypeError, CheckpointError: a name that the model has not, another shape or dtype, files
                that cannot be read, or a tensor in files or on a peer; nothing was changed.
            StateError: as :meth:`remove`; or the writing has failed in the middle, and no forward runs until update()
                has been called again. remove() ends the offload then, and warns that some weights are new and others
                are not. An interrupt comes when everything is written.
        """
        from headrace.lifetime.update import update

        return update(self._lifetime, tensors)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


_MARK = "_headrace_handle"


@instead_of(torch_dtype="model.to(dtype) before: an offload keeps the dtype that the model has")
def offload(
    model: nn.Module,
    policy: Policy | Plan | str | int,
    *,
    checkpoint: WeightMap | Checkpoint | str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    disk: DiskOptions | None = None,
    progress: Progress | None = None,
    measure_stalls: bool = False,
    group: ProcessGroup | None = None,
) -> Handle:
    """Run ``model`` in less memory than its weights need; outputs stay the same bit for bit.

    For example::

        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).eval()
        with headrace.offload(model, "20MB") as handle, torch.inference_mode():
            model(torch.randn(4, 1024))
            print(handle.stats())

    Args:
        model: any module; tensors on ``meta`` are filled from ``checkpoint``.
        policy: a device-memory budget for the weights, ``"20GiB"`` or ``"24G"`` (binary), ``"20GB"`` (decimal) or an
            int of bytes, ``"auto"`` (what is free on the GPU less 1 GiB), or :class:`~headrace.Prefetch`,
            :class:`~headrace.UVA`, :class:`~headrace.Rules`, :class:`~headrace.Budget`, or a finished
            :class:`~headrace.Plan`, from a file too (``Plan.load(path)``).
        checkpoint: folder or file of safetensors that holds the weights. Mode ``disk`` reads from it. A budget
            without a mode reads from it the units for which host memory has no room.
        device: where compute runs; default the device the model is on (for ``meta``, a GPU where there is one).
        disk: how its files are read, in mode ``disk`` and while loading; default: units stream through the page cache;
            loading takes cached pages from there and reads the rest past it.
        progress: called with (bytes loaded, bytes to load) while weights are read or moved.
        measure_stalls: on a GPU, time every wait, in graphs too, for ``stats()``; a CPU always does.
        group: ranks that offload the same weights, for modes ``shm_cpu``, ``sharded_cpu`` and ``sharded_gpu``.
            All of them make this call, in the same order. It succeeds in all or in none; after a failure, try again
            with a new group.
            In mode ``sharded_cpu`` the ranks run in step: they call the model for the same modules in the same order,
            each within that timeout (see ``PeerError``), and ``state_dict()`` and ``remove()`` are calls that all ranks
            make, because each has to pass on its part. The same holds for ``sharded_gpu`` on a CPU.

    Returns:
        the handle; ``handle.remove()`` undoes everything.

    Raises:
        OptionError, OptionTypeError: a wrong policy; a selection or budget that cannot be; a plan for another model or
            machine; a sharded mode on devices without peer access.
        LimitError: the device or the host has no room for the plan; found before anything is allocated.
        CheckpointError: files missing, damaged or for another model.
        StateError: the model, a part of it or a model around it is offloaded already.
        PeerError: another rank of ``group`` failed, ended, or did not come within ``HEADRACE_PEER_TIMEOUT`` seconds,
            or the timeout of the group if that is shorter; or the group has failed before.

    The model is untouched when anything is raised. While it is offloaded, a parameter that is copied ahead of use has
    its bytes on the device only while its module runs. Whatever else uses it through PyTorch's dispatcher gets the same
    bits, and the parameter is resident from then on, or an
    :class:`~headrace.errors.OutsideAccessError` or :class:`~headrace.errors.ModelChangedError` is raised. Code that
    torch.compile traces is checked at trace time.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper; the code behind it retraces by itself
    was_offloaded = isinstance(model, nn.Module) and handle_of(model) is not None
    try:
        # Before any check: an error in one rank, a wrong argument too, is then an error in all, and none waits for it.
        with open_ranks(group) as ranks:
            if not isinstance(model, nn.Module):
                raise OptionTypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
            refuse_second_offload(model)
            require_kinds(device, disk)
            request = PlanRequest(model, policy, checkpoint=checkpoint, device=device, disk=disk, ranks=ranks)
            return start(prepare(request), progress=progress, measure_stalls=measure_stalls)
    except BaseException as error:
        _log.debug("refused: %s: %s", type(error).__name__, error)
        # An interrupt after start() has returned leaves no handle to the caller.
        if not was_offloaded and isinstance(model, nn.Module) and (handle := handle_of(model)) is not None:
            handle.remove()
        raise


def start(
    prepared: Prepared,
    *,
    progress: Progress | None = None,
    measure_stalls: bool = False,
    link: Link | None = None,
    repeats: bool = False,
) -> Handle:
    """Carry out a prepared plan. Raises the errors of :func:`offload`, and then leaves the model unchanged.

    ``repeats``: see :class:`~headrace.runtime.session.SessionOptions`.
    """
    if prepared.model.training:
        _warn_about_training(prepared)
    if prepared.ranks is not None and not prepared.plan.kind.needs_ranks:
        warn_user(
            f"group=... has no effect: mode {prepared.plan.mode!r} is each process's own; use mode "
            f"{', '.join(map(repr, RANK_MODES))}"
        )
    kept = None if prepared.ranks is None else "the ranks of a group keep to one plan"
    options = SessionOptions(
        progress=progress, link=link, measure_stalls=measure_stalls, never_promotes=kept, repeats=repeats
    )
    session = OffloadSession(prepared, options)
    handle = Handle(prepared.model, session, prepared.context)
    try:
        session.attach()
        if "diffusers" in sys.modules:
            import_module("headrace.adapters.layerwise_casting").CastsAtUse(prepared.model).attach(session)
        # The model keeps the handle, because dropping the handle must not end the offload.
        vars(prepared.model)[_MARK] = handle
        return handle
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # their locals may be views of the model's memory
        handle.remove()  # no effect unless an interrupt came after attach(), which undoes its own part
        raise


def handle_of(module: nn.Module) -> Handle | None:
    """The handle of the offload of ``module`` itself, if it is offloaded."""
    return vars(module).get(_MARK)


def session_of(module: nn.Module) -> OffloadSession | None:
    """The session of the offload of ``module`` itself, if it is offloaded."""
    handle = handle_of(module)
    return None if handle is None else handle._session


def refuse_second_offload(model: nn.Module) -> None:
    """Raise ``StateError`` if ``model``, a part of it or one of its tensors is offloaded, or sharded by FSDP."""
    for name, module in model.named_modules():
        has_handle, place = handle_of(module) is not None, place_of(module)
        if has_handle or place:
            what, again = (f"the submodule {name!r}", "the model around it") if name else ("this module", "it again")
            where, owner = f", as {place}", "the handle or offloader of that model"
            if has_handle:
                where, owner = "", "the handle that headrace.offload returned for it"
            raise StateError(
                f"{what} ({type(module).__name__}) is offloaded already{where}; call remove() on {owner} before you "
                f"offload {again}"
            )
        if any(base.__module__.startswith("torch.distributed.fsdp") for base in type(module).__mro__):
            raise StateError(
                f"{name or 'the model'} ({type(module).__name__}) is sharded by FSDP, which moves its weights itself: "
                f"offload the model before it is wrapped, or use FSDP's own CPUOffload"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if place := place_of(tensor):
            raise StateError(
                f"{name} is offloaded already, as a tensor of {place}; call remove() on the handle or offloader of "
                f"that model first, or give this model a copy of its own (.clone())"
            )


def _warn_about_training(prepared: Prepared) -> None:
    model, plan, by_name = prepared.model, prepared.plan, prepared.inventory.by_name
    if any(
        p.requires_grad and name in by_name and plan.mechanism_of(by_name[name].name) != "resident"
        for name, p in model.named_parameters()
    ):
        warn_user(
            "the model is in training mode; headrace is for inference, and a backward pass that needs an offloaded "
            "tensor is refused. Call model.eval()"
        )
