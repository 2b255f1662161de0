"""A plan in force on a model: tensors pointed at slots, files or host memory, hooks in place, copies running.

:class:`OffloadSession` is what the handle and the engines' offloaders have in common. Building one either succeeds or
leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from penstock.checkpoint.weight_map import WeightMap
from penstock.config import format_gib
from penstock.env import debug_enabled
from penstock.errors import BudgetError, StateError
from penstock.loading.loader import WeightLoader
from penstock.loading.read_pool import Progress
from penstock.memory.pinned import device_view
from penstock.model.inventory import Inventory
from penstock.model.live_tensors import BoundStorage, bind
from penstock.ops import new_token
from penstock.plan.plan import Plan, slab_bytes
from penstock.ranks.peers import Peers
from penstock.runtime.hooks import ForwardHook, UnitHook
from penstock.runtime.mapped import MappedFilesGuard
from penstock.runtime.notes import notes_on
from penstock.runtime.prefetcher import Prefetcher, release_left
from penstock.runtime.promotion import Promoter
from penstock.runtime.state_dict import NotCopyable, StateGuard
from penstock.runtime.store_factory import open_store
from penstock.runtime.under_construction import Holding, held_storages, strayed_storages
from penstock.stats import Recorder, Stats
from penstock.stores.disk import DiskOptions
from penstock.stores.store import new_blob
from penstock.transfer.link import Link
from penstock.transfer.ring_streams import RingLink

__all__ = ["OffloadSession", "Progress"]

Hook = UnitHook | ForwardHook | StateGuard | MappedFilesGuard


class OffloadSession(NotCopyable):
    """Executes ``plan`` on ``model`` until :meth:`remove`.

    Args:
        model: on any one device; tensors on ``meta`` are filled from ``weights``.
        plan: made from ``inventory``.
        inventory: of ``model`` as it is now.
        device: where compute runs; residents are moved there.
        weights: the checkpoint; needed for what rests in ``disk`` and for tensors on ``meta``.
        disk: how checkpoint files are read.
        progress: called with (bytes loaded, bytes to load) while weights are read or moved.
        link: moves the units; by default worker threads on a CPU, a copy stream on a GPU.
        entry: the module whose forward begins a forward of the model; default the model itself.
        measure_stalls: on a GPU, time every wait (two event records each); a CPU always does.
        peers: for stores and links that span processes.
        holding: where weights wait in pinned memory already; what of it is offloaded stays there.
        replays_announced: :meth:`join` is called before every capture and every replay of a whole forward, and
            :meth:`rewind` soon after it.
        budget_bytes: device memory that weights may take, also when a tensor is promoted; ``None``: no such limit.
        keeps_addresses: an engine compiles or captures the model: tensors look into their slots all the time.
        never_promotes: why a tensor that is used outside of its module's forward is an error; ``None``: it is promoted.
        on_attached: called with this as soon as all is in place: from then on :meth:`remove` undoes it, also if an
            interrupt ends the rest.

    Raises:
        CheckpointError, OptionError, BudgetError, TransferError: with everything undone.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        inventory: Inventory,
        *,
        device: torch.device,
        weights: WeightMap | None = None,
        disk: DiskOptions | None = None,
        progress: Progress | None = None,
        link: Link | None = None,
        measure_stalls: bool = False,
        entry: nn.Module | None = None,
        peers: Peers | None = None,
        holding: Holding | None = None,
        replays_announced: bool = False,
        on_attached: Callable[[OffloadSession], None] | None = None,
        budget_bytes: int | None = None,
        keeps_addresses: bool = False,
        never_promotes: str | None = None,
    ) -> None:
        self.recorder = Recorder()
        self._model = model
        self._device = device
        self._weights = weights
        self._bound = bind(model, inventory.storages)
        self._promoter = Promoter(plan, self._bound, device, budget_bytes, never_promotes)
        self._rests = not keeps_addresses
        self._hooks: list[Hook] = []
        self._units: list[UnitHook] = []
        self._pipeline: Prefetcher | None = None
        self._removed = False
        self._replays_announced = replays_announced
        self._held = held_storages(self._bound, holding)
        self._strayed = strayed_storages(self._bound)
        self._link: Link | None = None  # before the pipeline has it
        opened = open_store(plan, self._bound, device, weights, disk, peers, self._held)
        self._store = opened.store
        try:
            self._start_link(link, measure_stalls)
            self._load(opened.destinations, disk, progress)
            self._store.finish()
            self._account = self._store.account
            if self._link is None:  # the session has it at once: an interrupt must find it
                self._link = opened.make_link(device, self.recorder, measure_stalls)
            self._attach_units(self._link, entry)
            self._promoter.serve(self._store)
            for name in plan.uva:
                self._bound[name].point_at(self._in_place(name))
            if plan.uva and plan.mode == "disk" and device.type == "cpu":
                self._hook(MappedFilesGuard(model, self._store))
            self._hook(StateGuard(model, [self._bound[name] for name in self.plan.offloaded_names], self._state_bytes))
            self.rewind()
            if on_attached is not None:
                on_attached(self)
        except BaseException:
            self._undo()
            raise
        self._forget_originals()

    @property
    def plan(self) -> Plan:
        """In force now: tensors that were promoted are resident in it."""
        return self._promoter.plan

    def stats(self) -> Stats:
        """Counters since the offload began.

        Raises:
            TransferError: bytes failed to arrive in a replay, where no caller was there to be told.
        """
        plan = self.plan
        sizes = {"resident": plan.resident_bytes, "prefetch": plan.prefetched_bytes, "uva": plan.uva_bytes}
        units = self._pipeline.snapshot() if self._pipeline else ()
        staging = self._pipeline.staging() if self._pipeline else None
        stores = {"resident": plan.resident_bytes, "slots": sum(plan.slot_bytes), **self._account}
        sizes_by_store = {name: size for name, size in stores.items() if size}
        return Stats(
            units, sizes, (*notes_on(self._model, plan), *self._promotions()), sizes_by_store, staging, self._reads
        )

    def limit(self, budget_bytes: int | None) -> None:
        """Device memory that weights may take, promoted tensors included."""
        self._promoter.budget_bytes = budget_bytes

    def rewind(self) -> None:
        """No forward runs, whether one was interrupted or not: make the slots hold what the next one needs first."""
        if self._pipeline is not None:
            self._pipeline.finish_forward(whole=False)

    def join(self) -> None:
        """Order compute behind every copy under way."""
        if self._pipeline is not None:
            self._pipeline.wait_all()

    def remove(self, graphs_released: bool = False) -> None:
        """Give the model its tensors back, where they were, and everything else to the system. Idempotent.

        ``graphs_released``: no graph that was captured over this offload will be replayed again.

        After an error or an interrupt, call it again; until then no forward of the model runs.

        Raises:
            BudgetError: the model came from a GPU on which its weights no longer fit; the offload stays in force.
            StateError: called inside a forward, or while another thread does not end one; graphs may still be replayed.
        """
        if self._removed:
            return
        if any(hook.runs_here for hook in self._hooks if isinstance(hook, UnitHook | ForwardHook)):
            raise StateError("remove() was called inside a forward of the model: call it when the forward has returned")
        try:
            self._remove(graphs_released)
        except BaseException:
            release_left(self._promoter.tensor_lock)
            if self._pipeline is not None:
                self._pipeline.abandon()
            raise

    def _remove(self, graphs_released: bool) -> None:
        if self._pipeline is not None:
            self._pipeline.stop(graphs_released)
        try:
            # Read everything first: if a file is gone or memory is short the offload stays in force, nothing is lost.
            with self._promoter.tensor_lock:
                names = [n for n in (*self.plan.offloaded_names, *self.plan.resident) if self._must_bring_back(n)]
                restored = {name: self._bring_back(name) for name in names}
        except Exception:
            if self._pipeline is not None:
                self._pipeline.resume()
            raise
        # Tensors before hooks: an interrupt here leaves a model that refuses to run, not one that runs without waiting.
        for name in (*self.plan.offloaded_names, *self.plan.resident):
            self._give_back(name, restored.get(name))
        self._detach()
        self._store.close()
        self._removed = True
        self._promoter.close()
        self._bound, self._units = {}, []

    def _give_back(self, name: str, restored: torch.Tensor | None) -> None:
        bound = self._bound[name]
        if bound.is_back:
            return  # by a call that was interrupted
        stays = restored is None and name in self.plan.resident and bound.on_meta and self.plan.mode != "meta"
        if not stays:  # as residents do that were read from the files
            bound.give_back(restored)

    # -- building ---------------------------------------------------------------------------------------------------

    def _start_link(self, link: Link | None, measure_stalls: bool) -> None:
        """The readers of a ring come up while weights are loaded."""
        self._link = link
        if link is None and self._device.type == "cuda" and self.plan.staged_units:
            self._link = RingLink(self._device, measure_stalls=measure_stalls, recorder=self.recorder)
        if self._link is not None and self.plan.units:
            self._link.start(self.plan, [self._store.load(unit) for unit in self.plan.units])

    def _load(self, destinations: dict[str, torch.Tensor], disk: DiskOptions | None, progress: Progress | None) -> None:
        elsewhere = [self._bound[name] for name in self.plan.resident if self._must_arrive(name)]
        places = self._resident_places(elsewhere)
        nothing = {b.info.name for b in elsewhere if self.plan.mode == "meta" and b.on_meta}
        for name in nothing:
            places[name].zero_()  # takes its room, like the slots
        loader = WeightLoader(
            self._bound,
            self._store,
            destinations,
            {name: place for name, place in places.items() if name not in nothing},
            device=self._device,
            weights=self._weights,
            disk=disk,
            progress=progress,
        )
        loader.run()
        self._reads = loader.reads
        for bound in elsewhere:
            bound.point_at(places[bound.info.name])

    def _attach_units(self, link: Link, entry: nn.Module | None) -> None:
        if not self.plan.units:
            link.close()
            self._link = None
            return
        debug = debug_enabled() and not self._store.is_split
        try:
            self._pipeline = Prefetcher(self.plan, self._store, link, self.recorder, debug, self._replays_announced)
        except torch.OutOfMemoryError as error:
            needed = sum(self.plan.slot_bytes)
            raise BudgetError(
                f"{self._device} has no room for {len(self.plan.slot_bytes)} slots of {format_gib(needed)} together; "
                f"offload before the model is on the device, or use fewer or smaller units (--offload-prefetch-step)",
                needed,
            ) from error
        token = new_token(self._device)
        session = self._promoter if self._rests else None
        for unit in self.plan.units:
            memory = self._pipeline.slot_memory(unit.index)
            storages = [self._bound[part.storage] for part in unit.entries]
            for part, bound in zip(unit.entries, storages, strict=True):
                slot = memory[part.offset : part.offset + part.num_bytes]
                bound.point_at_slot(slot, self._promoter.wake if self._rests else None)
            anchor = self._model.get_submodule(unit.anchor)
            self._units.append(UnitHook(anchor, unit.index, storages, self._pipeline, token, session, self._units))
            self._hook(self._units[-1])
        self._hook(ForwardHook(self._model, entry or self._model, self._units, self._pipeline, token, session))

    def _hook(self, hook: Hook) -> None:
        """Keep it first: an interrupt while it is attached must find it."""
        self._hooks.append(hook)
        hook.attach()

    def _in_place(self, name: str) -> torch.Tensor:
        blob = self._store.in_place(name)
        return device_view(blob, self._device) if self._device.type == "cuda" else blob

    def _resident_places(self, storages: Sequence[BoundStorage]) -> dict[str, torch.Tensor]:
        """Where each resident goes; on a GPU, all in one allocation.

        The caching allocator gives each tensor above 1 MB a block that may be up to 1 MB too large; with a thousand
        tensors the plan would be wrong by a gigabyte. On a CPU, memory has pages: nothing is reserved.
        """
        if self._device.type == "cpu":
            return {bound.info.name: new_blob(bound.info.num_bytes) for bound in storages}
        sizes = [slab_bytes([bound.info.num_bytes]) for bound in storages]
        parts = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device).split(sizes)
        return {b.info.name: part[: b.info.num_bytes] for b, part in zip(storages, parts, strict=True)}

    def _forget_originals(self) -> None:
        for name in self.plan.offloaded_names:
            if not self._store.adopts(name):
                self._bound[name].forget_original()
        for name in self.plan.resident:
            if self._must_arrive(name):
                self._bound[name].forget_original()
        self._held, self._strayed = {}, frozenset()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # whole blocks of the old weights would stay with the allocator otherwise

    def _must_arrive(self, name: str) -> bool:
        """Whether a resident is not in the memory of the device yet."""
        return self._bound[name].home != self._device or name in self._held or name in self._strayed

    # -- bringing back ----------------------------------------------------------------------------------------------

    def _must_bring_back(self, name: str) -> bool:
        bound = self._bound[name]
        if self.plan.mode == "meta" or bound.is_back:
            return False
        if name in self.plan.resident:
            return not bound.on_meta and bound.home != self._device
        return bound.on_meta or not bound.keeps_original

    def _bring_back(self, name: str) -> torch.Tensor:
        bound = self._bound[name]
        home = self._device if bound.on_meta else bound.home
        try:
            return self._current_bytes(name).to(home)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"{home} has no room to bring back {name}; free device memory first, the offload stays in force",
                bound.info.num_bytes,
            ) from error

    def _promotions(self) -> list[str]:
        told = (
            ("resident since they were used outside of their module's forward", self._promoter.promoted),
            ("copied for every use outside of their module's forward, for want of room", self._promoter.lent),
        )
        return [f"{what}: {', '.join(names)}" for what, names in told if names]

    def _current_bytes(self, name: str) -> torch.Tensor:
        if name in self.plan.resident:
            return self._bound[name].current_bytes()
        if name in self.plan.uva and self.plan.mode != "meta":  # may have been written to, unlike what is in slots
            self._store.require_mapped_unchanged()
            return self._bound[name].current_bytes().clone()
        blob = new_blob(self._bound[name].info.num_bytes)
        self._store.read(name, blob)
        return blob

    def _state_bytes(self, name: str) -> torch.Tensor:
        if self._bound[name].is_back:  # by a remove() that was interrupted
            return self._bound[name].current_bytes()
        # Of shared memory a GPU's tensors see the very pages that other ranks read; a CPU's have pages of their own.
        store = self.plan.store_of(name)
        own = store == "cpu" or (store == "shm_cpu" and self._device.type == "cpu")
        whole = own and not self._store.is_split
        return self._store.in_place(name) if whole else self._current_bytes(name)

    # -- taking apart -----------------------------------------------------------------------------------------------

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()  # one of them holds this
        if self._pipeline is not None:
            self._pipeline.close()
        elif self._link is not None:
            self._link.close()

    def _undo(self) -> None:
        self._removed = True
        try:
            self._detach()
        finally:
            for bound in self._bound.values():
                bound.restore()
            self._store.unpin()  # tensors moved into it stay there, in ordinary memory
            self._store.close()
