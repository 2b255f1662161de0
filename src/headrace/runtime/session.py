"""A plan in force on a model: tensors pointed at slots, files or host memory, hooks in place, copies running.

The handle and the engines' offloaders own an :class:`OffloadSession` each. It opens the store of its plan
(:func:`open_store`) and the link that copies units from it (:func:`open_link`), fills the store, and puts the hooks on
the model.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headrace.config import debug_enabled
from headrace.errors import BudgetError, StateError, TransferError
from headrace.formatting import format_size
from headrace.memory.system import trim_heap
from headrace.model.live_tensors import BoundStorage, fill_empty, used_elsewhere
from headrace.plan.cached_experts import CachedLayer
from headrace.plan.plan import Plan
from headrace.plan.slabs import slab_bytes
from headrace.runtime.forwards import release_left
from headrace.runtime.hooks import AroundForward, CalledForwardHook, ForwardHook, UnitHook, new_token, unhooked_modules
from headrace.runtime.outside_access import NotCopyable, Promoter, StateGuard, TableGuard
from headrace.runtime.prefetcher import Prefetcher
from headrace.runtime.prepare import Prepared
from headrace.runtime.replays import BreakCapture
from headrace.stats import ExpertStats, ReadStats, Recorder, SpeculationCounts, Stats
from headrace.stores.open_store import OpenedStore, open_store
from headrace.stores.store import Progress, Store, new_buffer, touched_buffer
from headrace.transfer.link import Link, ThreadLink

if TYPE_CHECKING:
    from headrace.experts.cache import ExpertCache
    from headrace.experts.counts import CountsReader
    from headrace.experts.rows import ExpertHook, ReadsRows
    from headrace.runtime.debug import AddressGuard
    from headrace.stores.expert_files import ExpertFiles
    from headrace.stores.expert_ranges import ExpertRanges

    Hook = UnitHook | ForwardHook | StateGuard | TableGuard | ExpertHook | AddressGuard

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionOptions:
    """How a prepared plan is carried out.

    Attributes:
        progress: called with (bytes loaded, bytes to load) while weights are read or moved.
        link: moves the units; by default the link that fits store and device (:func:`open_link`).
        entry: the module whose forward begins a forward of the model; default the model itself.
        called: the module whose forward is one of the model, where an engine calls ``called.forward`` past its hooks.
        measure_stalls: on a GPU, time every wait (two event records each); a CPU always does.
        replays_announced: :meth:`OffloadSession.wait_all` is called before every capture and every replay of a whole
            forward, and :meth:`OffloadSession.reset` soon after it.
        break_capture: see ``[Note: breakable captures]`` in replays.py.
        keeps_addresses: an engine compiles or captures the model: tensors view their slots all the time.
        never_promotes: why a tensor that is used outside of its module's forward is an error; ``None``: it is promoted.
        repeats: a forward may run modules several times, or not at all, in an order that is learned; no graphs.
        expert_kernel_factory: makes what runs cached experts read them by rows; ``None``: they are of transformers.
    """

    progress: Progress | None = None
    link: Link | None = None
    entry: nn.Module | None = None
    called: nn.Module | None = None
    measure_stalls: bool = False
    replays_announced: bool = False
    break_capture: BreakCapture | None = None
    keeps_addresses: bool = False
    never_promotes: str | None = None
    repeats: bool = False
    expert_kernel_factory: ReadsRows | None = None


class Attachment(Protocol):
    """A change to an offloaded model that ends before its offload: graphs of ``generate``, or guesses for it."""

    @property
    def counts(self) -> SpeculationCounts | None: ...

    @property
    def notes(self) -> Sequence[str]: ...

    def check(self) -> None: ...

    def remove(self) -> None: ...


class OffloadSession(NotCopyable):
    """Executes a prepared plan from :meth:`attach` to :meth:`remove`.

    Attributes:
        attachments: in the order in which they were attached; :meth:`remove` removes the last one first.
        captured: steps of the model in CUDA graphs of our own, for which addresses have to stay.
        prefetcher: copies the units; ``None``: there are none.
        planned: the plan without promotions.
        in_force: from :meth:`attach` to :meth:`remove`.
        half_removed: tensors are being given back, or :meth:`remove` has ended in the middle of that.
        has_ranks: it is one of a group.
    """

    def __init__(self, prepared: Prepared, options: SessionOptions = SessionOptions()) -> None:
        self.recorder = Recorder()
        self._prepared: Prepared | None = prepared  # until attach() is done
        self.planned = prepared.plan
        self._options = options
        self._model, self._device, self._bound = prepared.model, prepared.device, prepared.bound
        self.has_ranks = prepared.ranks is not None
        self._promoter = Promoter(prepared.plan, self._bound, self._device, options.never_promotes)
        self._hooks: list[Hook | RemovableHandle | AroundForward] = []  # empty once they are taken off
        self._caches: list[tuple[CachedLayer, ExpertCache]] = []
        self._ranges: ExpertRanges | ExpertFiles | None = None
        self.prefetcher: Prefetcher | None = None
        self._reads = ReadStats()
        self._link = options.link
        self.in_force = self.half_removed = False
        self.attachments: list[Attachment] = []
        self.captured: weakref.WeakSet[Any] = weakref.WeakSet()

    def attach(self) -> None:
        """Load the weights and take the model over; returns when the first copies are under way.

        Raises:
            CheckpointError, OptionError, BudgetError, TransferError, PeerError: with everything undone. An interrupt
                while originals are released, at the very end, leaves what :meth:`remove` undoes.
        """
        assert self._prepared is not None, "attached once already"
        prepared, ranks, options = self._prepared, self._prepared.ranks, self._options
        on_cpu = self._device.type == "cpu"
        viewed = {bound.info.name for bound in used_elsewhere(self._bound.values())} if on_cpu else set()
        opened = open_store(prepared)
        self._store, self._ranges = opened.store, opened.ranges
        self.in_force = True
        try:
            if units := self.plan.units:  # the readers of a ring start while weights are loaded
                if self._link is None:  # the session has it at once: an interrupt must find it
                    self._link = open_link(self._store, self.plan, self._device, self.recorder, options.measure_stalls)
                self._link.start(self.plan, [self._store.load(unit) for unit in units])
                _log.info("link opened: %s to %s for %d units", type(self._link).__name__, self._device, len(units))
            self._load(prepared, opened)
            self._store.finish()
            self._account = self._store.account
            self._attach_hooks()
            if viewed:
                self._bring_again(viewed)
            self.reset()
            if ranks is not None:
                ranks.exchange("attached")  # up to here each rank can undo its part
        except BaseException:
            self._undo()
            raise
        self._forget_originals(prepared)
        if self.plan.kind.has_bytes:
            fill_empty(self._model, self._device)
        self._prepared = None
        _log.info("%s is offloaded", type(self._model).__name__)

    def _bring_again(self, viewed: Collection[str]) -> None:
        """Have slots empty before each forward where an alias may have written the memory that is the store."""
        units = [unit.index for unit in self.plan.units if any(entry.storage in viewed for entry in unit.entries)]
        prefetcher = self.prefetcher
        if prefetcher is None or not units:
            return

        def empty_slots() -> None:
            for unit in units:
                with prefetcher.rewriting(unit):
                    pass

        for hook in self._hooks:
            if isinstance(hook, ForwardHook):
                hook.before = empty_slots

    @property
    def plan(self) -> Plan:
        """Plan in force now: tensors that were promoted are resident in it."""
        return self._promoter.plan

    def stats(self) -> Stats:
        """Counters since the offload began.

        Raises:
            TransferError: a copy failed in a replay, where no caller waited for it.
        """
        plan = self.plan
        sizes = {"resident": plan.resident_bytes, "prefetch": plan.prefetched_bytes, "uva": plan.uva_bytes}
        sizes |= {"cache": plan.cached_bytes} if plan.cached else {}
        experts = tuple(_stats_of(layer, cache) for layer, cache in self._caches)
        units = self.prefetcher.snapshot() if self.prefetcher else ()
        staging = self._link.staging_stats() if self._link else None
        slots_bytes = self.prefetcher.slots_bytes if self.prefetcher else 0
        stores = {"resident": plan.resident_bytes, "slots": slots_bytes, "cache": plan.cache_bytes}
        sizes_by_store = {name: size for name, size in (stores | self._account).items() if size}
        return Stats(units, sizes, self._notes(), sizes_by_store, staging, self._reads, experts, self.guesses)

    @property
    def guesses(self) -> SpeculationCounts | None:
        """Counters of what guesses tokens for ``generate``; ``None``: nothing does."""
        return next((counts for each in self.attachments if (counts := each.counts) is not None), None)

    def counts_reader(self) -> CountsReader | None:
        """Reader of the counts of all cached experts; ``None``: there are none."""
        from headrace.experts.counts import CountsReader

        return CountsReader([cache for _, cache in self._caches]) if self._caches else None

    @property
    def has_run(self) -> bool:
        """Whether a forward of the model has begun."""
        return self.prefetcher is not None and self.prefetcher.has_run

    def counters(self) -> Stats:
        """The totals of :meth:`stats`, without its errors, and without waiting for a GPU."""
        units = self.prefetcher.stats if self.prefetcher else ()
        if self._device.type == "cpu" and self._link is not None:
            units = [replace(unit, last_stall_s=self._link.last_stall_s(index)) for index, unit in enumerate(units)]
        return Stats(tuple(units), notes=self._notes())

    def reset(self) -> None:
        """No forward runs, whether one was interrupted or not: make the slots hold what the next one needs first."""
        if self.prefetcher is not None:
            self.prefetcher.finish_forward(whole=False)

    def wait_all(self) -> None:
        """Order compute after every copy under way."""
        if self.prefetcher is not None:
            self.prefetcher.wait_all()

    @contextmanager
    def as_placeholders(self) -> Iterator[None]:
        """Within, tensors are placeholders outside of their modules' forwards even where they always view their slots.

        What uses one there raises ``OutsideAccessError``. No compiled code may run within: it relies on addresses.
        """
        names = [entry.storage for unit in self.plan.units for entry in unit.entries]
        names += [name for layer in self.plan.cached for name in layer.storages]
        tensors = [tensor for name in names for tensor in self._bound[name].tensors]
        try:
            for tensor in tensors:
                tensor.leave_slot(self._promoter.on_outside_access)
            yield
        finally:
            for tensor in tensors:
                tensor.stay_in_slot()

    def remove(self, graphs_released: bool = False) -> None:
        """Give the model its tensors back, where they were, and everything else to the system. Idempotent.

        ``graphs_released``: no graph that was captured over this offload will be replayed again.

        After an error or an interrupt, call it again; until then no forward of the model runs.

        Raises:
            BudgetError: the model came from a GPU on which its weights no longer fit; the offload stays in force.
            StateError: called inside a forward, or while another thread does not end one; graphs may still be replayed.
        """
        if not self.in_force:
            return
        if any(hook.runs_here for hook in self._hooks if isinstance(hook, UnitHook | ForwardHook)):
            raise StateError("remove() was called inside a forward of the model: call it when the forward has returned")
        try:
            for attachment in reversed([*self.attachments]):  # graphs leave the list themselves
                attachment.remove()
            self._remove(graphs_released)
        except BaseException:
            release_left(self._promoter.tensor_lock)
            if self.prefetcher is not None:
                self.prefetcher.abandon()
            raise

    def _remove(self, graphs_released: bool) -> None:
        if self.prefetcher is not None:
            self.prefetcher.stop(graphs_released)
        try:
            # Read everything first: if a file is gone or memory is short the offload stays in force, nothing is lost.
            with self._promoter.tensor_lock:
                names = (*self.plan.offloaded_names, *self.plan.resident)
                restored = {name: self._bring_back(name) for name in names}
        except Exception:
            if self.prefetcher is not None:
                self.prefetcher.forwards.resume()
            raise
        self.half_removed = True
        # Tensors before hooks: an interrupt here leaves a model that refuses to run, not one that runs without waiting.
        for name, buffer in restored.items():
            bound = self._bound[name]
            # What was read from the files for good stays where it is.
            stays = buffer is None and name in self.plan.resident and bound.on_meta and self.plan.kind.has_bytes
            if not stays and not bound.is_back:  # is_back: by a call that was interrupted
                bound.give_back(buffer)
        self._detach()
        self._store.close()
        self.in_force = False
        self._promoter.close()
        self._bound, self._caches, self._ranges = {}, [], None
        _log.info("%s has its weights again; %s", type(self._model).__name__, self.counters())

    # -- building ---------------------------------------------------------------------------------------------------

    def _load(self, prepared: Prepared, opened: OpenedStore) -> None:
        moving = [self._bound[name] for name in self.plan.resident if prepared.must_move(name)]
        # To the loader both are memory of the device.
        on_meta = [bound.info.name for bound in moving if bound.on_meta]
        places = {**allocate_residents(moving, self._device, on_meta), **opened.on_device}
        if opened.on_host or places:  # not on a CPU, where host memory or files hold everything already
            self._fill(prepared, opened, moving, places)

    def _fill(
        self, prepared: Prepared, opened: OpenedStore, moving: list[BoundStorage], places: dict[str, torch.Tensor]
    ) -> None:
        from headrace.stores.loader import WeightLoader

        without_bytes = {b.info.name for b in moving if b.on_meta and not self.plan.kind.has_bytes}
        for name in without_bytes:
            places[name].zero_()  # the memory is used, like that of the slots
        num_bytes = sum(self._bound[name].info.num_bytes for name in (*opened.on_host, *places))
        _log.info("loading begins: %d bytes", num_bytes)
        begin = time.perf_counter()
        self._reads = WeightLoader(
            self._bound,
            self._store,
            opened.on_host,
            {name: place for name, place in places.items() if name not in without_bytes},
            device=self._device,
            weights=prepared.weights,
            disk=prepared.disk,
            progress=self._options.progress,
            taken=prepared.taken,
        ).run()
        seconds = time.perf_counter() - begin
        rate = num_bytes / seconds / 1e9
        _log.info("loading ended: %.3f s, %.2f GB/s; read from files: %s", seconds, rate, self._reads)
        for bound in moving:
            bound.point_at(places[bound.info.name])

    def _attach_hooks(self) -> None:
        plan = self.plan
        self._promoter.store = self._store
        if self._link is not None and plan.units:
            self._attach_units(self._link)
        if plan.uva:
            self._attach_in_place()
        if plan.cached:
            self._attach_cached()
        self._hook(StateGuard(self._model, [self._bound[name] for name in plan.offloaded_names], self._state_bytes))

    def _attach_units(self, link: Link) -> None:
        options, debug = self._options, debug_enabled() and not self._store.is_split
        try:
            graphs = options.replays_announced, options.break_capture, options.repeats
            self.prefetcher = prefetcher = Prefetcher(
                self.plan, self._store, link, self.recorder, debug, *graphs, self._promoter.promoted
            )
        except torch.OutOfMemoryError as error:
            needed = self.plan.slots_bytes
            raise BudgetError(
                f"{self._device} has no room for {len(self.plan.slot_bytes)} slots of {format_size(needed)} together; "
                f"offload before the model is on the device, or use fewer or smaller units (--offload-prefetch-step)",
                needed,
            ) from error
        unit_of = {entry.storage: unit.index for unit in self.plan.units for entry in unit.entries}
        self._promoter.rewriting = lambda name: prefetcher.rewriting(unit_of[name])
        token, unhooked = new_token(self._device), unhooked_modules(self._model)
        promoter = None if options.keeps_addresses else self._promoter
        point_at_slots(self.plan, self._bound, prefetcher, promoter)
        units: list[UnitHook] = []  # each hook knows all
        for unit in self.plan.units:
            storages = [self._bound[part.storage] for part in unit.entries]
            module = self._model.get_submodule(unit.module_fqn)
            facts = module in unhooked, promoter is not None and module is self._model
            units.append(UnitHook(module, unit.index, storages, prefetcher, token, promoter, units, *facts))
            self._hook(units[-1])
        if debug:
            from headrace.runtime.debug import AddressGuard

            names = [part.storage for unit in self.plan.units for part in unit.entries]
            self._hook(AddressGuard([tensor for name in names for tensor in self._bound[name].tensors]))
        entry, called = options.entry or self._model, options.called or self._model
        if options.called is not None or self._model in unhooked:
            is_unhooked = options.called is None
            self._hook(CalledForwardHook(called, called, units, prefetcher, token, promoter, unhooked=is_unhooked))
        else:
            in_own = promoter is not None and entry is self._model
            self._hook(ForwardHook(self._model, entry, units, prefetcher, token, promoter, traced_in_forward=in_own))

    def _attach_in_place(self) -> None:
        plan = self.plan
        tables = []  # whose rows are the same at any address, and products with them are not
        is_mapped = self._device.type == "cpu" and plan.kind.in_files
        if is_mapped:
            from headrace.stores.product_bits import rounds_in_place
        elif self._device.type == "cuda":
            from headrace.memory.pinned import device_view
        for name in plan.uva:
            buffer, bound = self._store.in_place(name), self._bound[name]
            if is_mapped and bound.info.is_lookup and rounds_in_place(bound, buffer):
                bound.point_at_slot(buffer, self._promoter.on_table_access)
                tables.append(bound)
            else:
                bound.point_at(device_view(buffer, self._device) if self._device.type == "cuda" else buffer)
        if tables:
            self._hook(TableGuard(self._model, tables, self._promoter))
            if not plan.units:  # else there is one, which checks what a compiler traces
                model, token = self._model, new_token(self._device)
                self._hook(ForwardHook(model, model, [], None, token, self._promoter, traced_in_forward=True))
        if is_mapped:
            # A page that a shorter file has no longer ends the program (SIGBUS, mmap(2)), so files are compared before.
            unhooked = unhooked_modules(self._model)
            # A caller may run a module alone.
            read = {(module, name) for name in plan.uva for t in self._bound[name].tensors for module, _ in t.places}
            for module, storage in read | {(module, None) for module in (self._model, *unhooked.values())}:
                self._compare_mapped_files_around(module, storage, module in unhooked)

    def _attach_cached(self) -> None:
        from headrace.experts.attach import cached_hook
        from headrace.experts.rows import CacheStreamOrder

        assert self._ranges is not None  # there are cached layers
        turn, factory = CacheStreamOrder(self._device), self._options.expert_kernel_factory
        on_access = None if self._options.keeps_addresses else self._promoter.on_outside_access
        make_cache = import_module(self.plan.kind.caches_module or "").open_caches(self._ranges, turn)
        for layer in self.plan.cached:
            rows = {name: self._ranges.rows(name) for name in layer.storages}
            hook, cache = cached_hook(self._model, layer, self._bound, rows, make_cache, factory, on_access)
            self._caches.append((layer, cache))
            self._hook(hook)
        turn.follow(self._device)  # the first forward may run on another stream than what made the caches

    def _hook(self, hook: Hook) -> None:
        """Keep it first: an interrupt while it is attached must find it."""
        self._hooks.append(hook)
        hook.attach()

    def _compare_mapped_files_around(self, module: nn.Module, storage: str | None, unhooked: bool) -> None:
        """Have ``module`` refuse to read in place, or to return what was read, from files that were written to."""

        def compare(*_: Any) -> None:
            if torch.compiler.is_compiling():
                return  # it would have to leave its graph
            try:
                self._store.require_mapped_unchanged(storage)
            except (OSError, TransferError):
                # A thread that was about to call this hook when remove() took it off finds the files closed, and the
                # model with bytes of its own.
                if self._hooks:
                    raise

        self._hooks.append(AroundForward(module, compare) if unhooked else module.register_forward_hook(compare))
        if not unhooked:
            self._hooks.append(module.register_forward_pre_hook(compare, prepend=True))

    def _forget_originals(self, prepared: Prepared) -> None:
        moved = [name for name in prepared.plan.offloaded_names if not self._store.adopts(name)]
        moved += [name for name in prepared.plan.resident if prepared.must_move(name)]
        for name in moved:
            self._bound[name].forget_original()
        if prepared.plan.coded_units:  # beside which they were until now
            trim_heap()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # whole blocks of the old weights would stay with the allocator otherwise

    # -- bringing back ----------------------------------------------------------------------------------------------

    def _bring_back(self, name: str) -> torch.Tensor | None:
        """The bytes of a storage on the device that it came from; ``None``: it has them there."""
        bound = self._bound[name]
        is_elsewhere = bound.on_meta or not bound.keeps_original
        if name in self.plan.resident:
            is_elsewhere = not bound.on_meta and bound.home != self._device
        if not self.plan.kind.has_bytes or bound.is_back or not is_elsewhere:
            return None
        home = self._device if bound.on_meta else bound.home
        try:
            found, lead = self._current_bytes(name, home), bound.lead_bytes
            if found.device != home:
                place = touched_buffer(found.numel()) if home.type == "cpu" else torch.empty_like(found, device=home)
                found = place.copy_(found)
            # With the storage offset that it had.
            return found if not lead else torch.cat([found.new_empty(lead), found])[lead:]
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"{home} has no room to bring back {name}; free device memory first, the offload stays in force",
                bound.info.num_bytes,
            ) from error

    def _notes(self) -> tuple[str, ...]:
        """Notes for the user about how the offload runs."""
        notes = []
        if self.plan.uva or self.plan.cached:
            from headrace.model.memory_profile import notes_on_experts

            notes += notes_on_experts(self._model, self.plan.uva)
        notes += self._ranges.notes if self._ranges is not None else ()
        for what, names in (
            ("resident since they were used outside of their module's forward", self._promoter.promoted),
            ("copied for every use outside of their module's forward, for want of room", self._promoter.copied),
        ):
            if names:
                notes.append(f"{what}: {', '.join(names)}")
        return (*notes, *(note for each in self.attachments for note in each.notes))

    def _current_bytes(self, name: str, home: torch.device | str = "cpu") -> torch.Tensor:
        """Copy of the bytes of what is not resident: in host memory, or on ``home`` if it is read in place."""
        if name in self.plan.resident:
            return self._bound[name].current_bytes()
        # May have been written to, unlike what is in slots.
        if name in self.plan.uva and self.plan.kind.has_bytes and not self._bound[name].is_placeholder:
            self._store.require_mapped_unchanged()
            return self._bound[name].current_bytes().to(home, copy=True)
        buffer = touched_buffer(self._bound[name].info.num_bytes)
        self._store.read(name, buffer)
        return buffer

    def _state_bytes(self, name: str) -> torch.Tensor | None:
        if name in self.plan.resident and self._bound[name].is_placeholder:  # promoted, and parked since
            return None
        if self._bound[name].is_back:  # by a remove() that was interrupted
            return self._bound[name].current_bytes()
        # Of shared memory a GPU's tensors see the very pages that other ranks read; a CPU's have pages of their own.
        kind = self.plan.placements[name].kind
        own = kind is not None and kind.state_is_store and not (kind.needs_ranks and self._device.type == "cuda")
        return self._store.in_place(name) if own else self._current_bytes(name)

    # -- taking apart -----------------------------------------------------------------------------------------------

    def _detach(self) -> None:
        for hook in reversed(self._hooks):  # of two wrappers of a forward the outer one first
            hook.remove()
        self._hooks.clear()  # one of them holds this
        if self.prefetcher is not None:
            self.prefetcher.close()
        elif self._link is not None:
            self._link.close()

    def _undo(self) -> None:
        self.in_force = False
        try:
            self._detach()
        finally:
            for bound in self._bound.values():
                bound.restore()
            self._store.unpin()  # tensors moved into it stay there, in ordinary memory
            self._store.close()


def point_at_slots(
    plan: Plan, bound: Mapping[str, BoundStorage], prefetcher: Prefetcher, promoter: Promoter | None
) -> None:
    """Make the tensors of units views of their slots, or placeholders for which ``promoter`` is asked."""
    on_access = None if promoter is None else promoter.on_outside_access
    for unit in plan.units:
        memory = prefetcher.slot_memory(unit.index)
        for part in unit.entries:
            bound[part.storage].point_at_slot(memory[part.offset : part.offset + part.num_bytes], on_access)


def allocate_residents(
    storages: Sequence[BoundStorage], device: torch.device, staying: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Memory for each resident; on a GPU, all in one allocation, and in one more those ``staying`` after remove().

    The caching allocator gives each tensor above 1 MB a block that may be up to 1 MB too large; with a thousand
    tensors the plan would be wrong by a gigabyte. On a CPU, memory has pages: nothing is reserved.
    """
    if device.type == "cpu":
        return {bound.info.name: new_buffer(bound.info.num_bytes) for bound in storages}
    places = dict[str, torch.Tensor]()
    for stays in (False, True):  # one tensor that stays would keep the memory of all
        group = [bound.info for bound in storages if (bound.info.name in staying) is stays]
        sizes = [slab_bytes([info.num_bytes]) for info in group]
        parts = torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(sizes)
        places |= {info.name: part[: info.num_bytes] for info, part in zip(group, parts, strict=True)}
    return places


def open_link(store: Store, plan: Plan, device: torch.device, recorder: Recorder, measure_stalls: bool) -> Link:
    """The link for ``store`` and ``device``; collective where each rank stores a part of every unit."""
    if device.type == "cpu" and not plan.kind.is_split:
        return ThreadLink(recorder=recorder)
    modules = (kind.link_module for kind, units in plan.units_by_kind.items() if units)
    module = import_module(next(filter(None, modules), "headrace.transfer.cuda_stream"))
    link: Link = module.open_link(store, device, recorder, measure_stalls)
    return link


def _stats_of(layer: CachedLayer, cache: ExpertCache) -> ExpertStats:
    counts, expert_bytes = cache.counts(), layer.num_bytes // layer.num_experts
    return ExpertStats(layer.module_fqn, layer.num_experts, layer.num_slots, expert_bytes, **asdict(counts))
