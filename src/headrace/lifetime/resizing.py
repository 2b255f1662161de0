"""Another budget for an offload: the session of its plan is exchanged for that of another plan.

The offload is parked in between, with its store open and its hooks off (*detached*). What is in pinned memory stays
where it is, and units of the new plan view it there. Residents that leave a GPU go to :class:`HostCopies` first, whose
memory the new store keeps, and the memory of what becomes resident is such a copy from then on: so nothing is pinned
twice. The old store is closed when the new session is attached. Until then an error leaves all that it takes to attach
the old plan again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial

import torch

from headrace.config import AUTO, Budget
from headrace.errors import BudgetError, CheckpointError, ModelChangedError, OptionError
from headrace.lifetime.parking import Lifetime, park_storage
from headrace.memory.pinned import PinnedBuffer
from headrace.memory.system import Needs, read_limits
from headrace.model.live_tensors import BoundStorage, bind
from headrace.model.torch_private import weak_memory
from headrace.plan.kinds import HOST, Unit
from headrace.plan.plan import Plan
from headrace.plan.slabs import SLAB_ALIGNMENT_BYTES, SlabEntry, slab_bytes
from headrace.planning.checks import check_limits, needs_of
from headrace.planning.context import PlanContext
from headrace.runtime.prepare import Prepared
from headrace.runtime.session import OffloadSession, allocate_residents
from headrace.stores.pinned_host import registrar_for
from headrace.stores.sources import ByteRange, Copy
from headrace.stores.store import AlreadyPinned, Code, Stores, kept_by_others, new_buffer, require_weights

_META = torch.device("meta")
_CODED_AT_ONCE = 4  # units: host memory of a code is made while others are computed


def resize(life: Lifetime, device_memory: str | int, graphs_released: bool) -> int:
    """See :meth:`headrace.api.Handle.resize`."""
    with life.alone("resize()", graphs_released):
        context, was_parked = _context(life, device_memory), life.parked is not None
        before, plan = life.session.planned, context.plan()
        if plan == before and not was_parked and not life.session._promoter.promoted:
            life.session.planned = life.session._promoter.plan = plan  # in which the budget itself may be another
            return 0
        if _has_own_memory(life.device) and any(p.cached and p.kind.in_files for p in (before, plan)):
            raise OptionError(
                "resize(): not for an offload with cached experts in files on a GPU, before or after: the host memory "
                "above the files would be taken twice; nothing was changed. Call remove(), offload again"
            )
        exchange = Exchange(life, context, plan)
        exchange.check()
        try:
            exchange.carry_out()
        except BaseException as error:
            if life.detached and not was_parked and isinstance(error, Exception):
                with suppress(Exception):  # or it stays parked
                    Exchange(life, context, before).carry_out()
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            raise BudgetError(
                f"resize(): {life.device} has no room for the plan of that budget; free device memory, then call it "
                f"again",
                plan.device_bytes,
            ) from error
        return exchange.num_bytes


def attach_again(life: Lifetime) -> int:
    """Attach the plan from before a resize that an error or interrupt has ended; returns bytes that become resident."""
    assert life.context is not None
    exchange = Exchange(life, life.context, life.session.planned)
    exchange.carry_out()
    return sum(life.session.plan.resident.values())


def _context(life: Lifetime, device_memory: str | int) -> PlanContext:
    """The request of the offload, with that budget.

    Raises:
        OptionError, OptionTypeError: no size; an offload that keeps its size.
    """
    session, kept = life.session, life.context
    fixed = [type(each).__name__ for each in session.attachments if not hasattr(each, "session")]
    why = f"a {fixed[0]}, which was made for its budget" if fixed else None
    if session._options.repeats or session._options.link is not None:
        why = "the components of a pipeline, which take turns"
    if kept is None or why is not None:
        raise OptionError(f"resize(): not for an offload with {why}; nothing was changed. Call remove(), offload again")
    given, policy = kept.request.given, Budget(device_memory)  # which checks it
    if policy.device_memory == AUTO:
        raise OptionError("resize(): expected a size, such as '8GiB', found 'auto'; nothing was changed")
    if isinstance(given, Budget):
        policy = replace(given, device_memory=policy.device_memory)
    elif given is not None:
        policy = replace(policy, mode=given.mode, codec=getattr(given, "codec", "auto"))
    if policy.peer_limit_bytes or any(not (u.kind.on_host or u.kind.in_files) for u in session.plan.units):
        raise OptionError(
            "resize(): not for an offload with units on a peer (peer_memory), whose memory is not sized again; nothing "
            "was changed. Call remove(), offload again"
        )
    held_bytes = session._store.host_bytes + life.copies.num_bytes
    return replace(kept, request=replace(kept.request, policy=policy), bound=session._bound, held_bytes=held_bytes)


def _has_own_memory(device: torch.device) -> bool:
    """Whether residents of ``device`` are elsewhere than what is offloaded."""
    return device.type == "cuda"


def _where(plan: Plan, name: str) -> str:
    """Place of a storage in ``plan``: ``device``, ``host`` as it is, ``files``, or as ``rows`` or codes."""
    mechanism, _, _ = placed = plan.placements[name]
    if (kind := placed.kind) is None:
        return "device"
    if kind.in_files:
        return "files"
    return "host" if kind is HOST and mechanism != "cache" else "rows"


class Exchange:
    """A session in place of another, of the same model on the same device.

    Attributes:
        num_bytes: bytes of weights that become resident, or no longer are.
    """

    def __init__(self, life: Lifetime, context: PlanContext, plan: Plan) -> None:
        self._life, self._context, self._plan, self._old = life, context, plan, life.session
        self._bound, self._on_gpu = self._old._bound, _has_own_memory(life.device)
        self._home = {name: bound.home for name, bound in self._bound.items()}
        self._now = {name: _where(self._old.plan, name) for name in self._bound}
        self._then = {name: _where(plan, name) for name in self._bound}
        changes = [name for name in self._bound if (self._now[name] == "device") != (self._then[name] == "device")]
        self.num_bytes = sum(self._bound[name].info.num_bytes for name in changes)
        live = {n: b for n, b in self._bound.items() if self._now[n] == "device" and n not in life.names}
        self._live = set(live)
        self._aliased = set(kept_by_others(self._bound, live))
        # What keeps its memory. Other residents of a GPU lie in one allocation, which is freed as a whole.
        self._stay = {n for n, b in live.items() if self._then[n] == "device" and self._may_stay(n, b)}
        self._hosted = {n for n in live if self._then[n] in ("host", "rows")} if self._on_gpu else set()
        self._moving = {n for n in live if self._then[n] == "device"} - self._stay
        if self._moving and self._needs().device_bytes > self._free_bytes():  # no room beside what is there
            self._hosted |= self._moving

    def _may_stay(self, name: str, bound: BoundStorage) -> bool:
        is_alone = name in self._aliased or (bound.keeps_original and bound.home == self._life.device)
        return is_alone or not self._on_gpu

    # -- before anything changes ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise for what cannot be carried out.

        Raises:
            ModelChangedError, OptionError, CheckpointError: a tensor that was replaced, or that has another user, or
                other values than the files in which the plan has it.
            LimitError: device or host have no room.
        """
        self._require_own()
        self._compare_with_files()
        needs = self._needs()
        limits = read_limits(self._life.device, pinned_bytes=needs.pinned_bytes)
        if limits.device_free_bytes is not None:
            leaving = [b.info.num_bytes for n, b in self._bound.items() if self._leaves_device(n)]
            limits = replace(limits, device_free_bytes=self._free_bytes() + slab_bytes(leaving))
        elif limits.host_available_bytes is not None:
            limits = replace(limits, host_available_bytes=limits.host_available_bytes + self._slots_bytes())
        check_limits(self._plan, limits, needs)

    def _leaves_device(self, name: str) -> bool:
        is_live = self._now[name] == "device" and name not in self._life.names
        return is_live and (name in self._hosted or self._then[name] == "files")

    def _require_own(self) -> None:
        modules = set(self._old._model.modules())
        for name, bound in (self._life.bound or self._bound).items():
            for tensor in bound.tensors:
                held = [module in modules and tensor.is_held_by(module, p.attr, p.inner) for module, p in tensor.places]
                if tensor.has_other_data or not (name in self._stay or all(held)):
                    raise ModelChangedError(
                        f"resize(): {tensor.name} or a module around it was replaced, or its data was set, since it "
                        f"was offloaded; nothing was changed. Call remove(), then offload again"
                    )
        aliased = self._aliased - self._stay
        if not self._on_gpu:  # where memory of the model is the store
            gone = {n for n in self._bound if self._then[n] not in ("device", "host")} - self._life.names
            gone = {n for n in gone if self._plain(n) is not None}
            aliased = set(kept_by_others(self._bound, {name: self._bound[name] for name in gone}))
        aliased |= {n for n, where in self._now.items() if where == "files" and self._old._store.adopts(n)}
        if aliased:
            raise OptionError(
                f"resize(): the memory of {min(aliased)} (of {len(aliased)} weights) has another user (an alias such "
                f"as .detach(), a state_dict(), an array of .numpy()), and its bytes are to go elsewhere; nothing was "
                f"changed. Drop it first (del)"
            )

    def _compare_with_files(self) -> None:
        """Require that files, where they are to replace other memory, hold its bytes."""
        names = [n for n in self._bound if self._then[n] == "files" and self._now[n] != "files"]
        if not names:
            return
        from headrace.stores.checkpoint_files import DiskStore

        weights = require_weights(self._context.weights)
        sources = {name: weights.source(self._bound[name].info) for name in names}
        files = DiskStore(sources, self._context.request.disk, stamps=weights.checkpoint.stamps)
        try:
            for name in names:
                found, mine = (new_buffer(self._bound[name].info.num_bytes) for _ in range(2))
                files.read(name, found)
                plain = self._plain(name)
                if plain is None:
                    self._old._store.read(name, mine)
                else:
                    mine.copy_(plain)
                if not torch.equal(found, mine):
                    raise CheckpointError(
                        f"resize(): the plan has {name} in the files, whose values differ from the model's; nothing "
                        f"was changed. Save the model (save_pretrained), or keep to host memory (mode 'cpu')"
                    )
        finally:
            files.close()

    def _slots_bytes(self) -> int:
        prefetcher = self._old.prefetcher
        return 0 if self._life.parked is not None or prefetcher is None else prefetcher.slots_bytes

    def _free_bytes(self) -> int:
        """Device memory that is free when slots are, without what torch's allocator has between used blocks."""
        if self._life.device.type == "cuda":
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info(self._life.device)[0]
        else:
            free = read_limits(self._life.device).device_free_bytes or 0
        return free + self._slots_bytes() + (0 if self._life.parked is not None else self._old.plan.cache_bytes)

    def _needs(self) -> Needs:
        """Memory that is taken beside the old store, and beside residents that stay."""
        plan, placed = self._plan, {n for n in self._bound if self._then[n] == "device"} - self._stay
        adopted = {n for n in self._bound if not self._on_gpu and self._plain(n) is not None}
        adopted -= {n for n in self._life.names if self._then[n] == "device"}
        needs = needs_of(plan, on_gpu=self._on_gpu, elsewhere=placed - adopted, on_meta=self._bound.keys() - adopted)
        if not self._on_gpu:
            return needs
        names = {n for n in self._bound if self._now[n] == "host"} | self._hosted | self._life.names
        blocks = [[entry.storage for entry in unit.entries] for unit in plan.units_by_kind.get(HOST, ())]
        blocks += [[name] for name in plan.uva]
        kept = sum(slab_bytes(self._bound[n].info.num_bytes for n in block) for block in blocks if names >= set(block))
        kept += sum(memory.num_bytes for memory, _ in self._codes.values())
        kept += self._mapped_bytes()
        copied = slab_bytes(self._bound[n].info.num_bytes for n in self._hosted if not self._life.copies.has(n))
        staging = max((plan.resident[n] for n in placed), default=0)
        host_bytes = max(0, needs.host_bytes - staging - kept) + copied
        return replace(needs, host_bytes=host_bytes, pinned_bytes=min(needs.pinned_bytes, host_bytes))

    def _mapped_bytes(self) -> int:
        """Host memory of cached experts that is mapped again, and not made."""
        if not self._plan.cached:
            return 0
        from headrace.stores.expert_ranges import mappable

        found = [mappable(layer, n, self._held) for layer in self._plan.cached for n in layer.storages]
        return sum(memory.num_bytes for memory in found if memory is not None)

    # -- where the bytes are ----------------------------------------------------------------------------------------

    def _plain(self, name: str) -> torch.Tensor | None:
        """The bytes of a storage where they are now (uint8, 1-D); ``None``: in another form, or in files."""
        if self._now[name] == "device":
            copies = self._life.copies
            return copies.bytes_of(name) if name in self._life.names else self._bound[name].current_bytes()
        return self._old._store.in_place(name) if self._now[name] == "host" else None

    @property
    def _held(self) -> dict[str, AlreadyPinned]:
        """Memory beside a GPU that a new store may keep."""
        copies, store = self._life.copies, self._old._store
        found: dict[str, AlreadyPinned | None] = {n: copies.held(n) for n in self._bound if copies.has(n)}
        found |= {n: store.held(n) for n, where in self._now.items() if where in ("host", "rows")}
        return {name: held for name, held in found.items() if held is not None and self._on_gpu}

    @cached_property
    def _coded(self) -> set[str]:
        """Storages that are coded now."""
        names = (entry.storage for unit in self._old.planned.coded_units for entry in unit.entries)
        return {name for name in names if self._now[name] == "rows"}

    @cached_property
    def _codes(self) -> dict[tuple[SlabEntry, ...], Code]:
        """Codes of units that the plan has, too."""
        coded = {unit.entries: unit for unit in self._old.planned.coded_units}
        same = [unit.entries for unit in self._plan.coded_units if unit.entries in coded]
        same = [entries for entries in same if self._coded.issuperset(entry.storage for entry in entries)]
        store = self._old._store
        if same and isinstance(store, Stores):
            store = store.of(same[0][0].storage)
        return {entries: store.code(coded[entries].index) for entries in same}  # type: ignore[attr-defined]

    def _new_codes(self) -> dict[tuple[SlabEntry, ...], Code]:
        """Codes of the plan's other units, made while the device has room; none of units in files, or with rows."""
        others = {name for name, where in self._now.items() if where in ("files", "rows")} - self._coded
        units = [unit for unit in self._plan.coded_units if unit.entries not in self._codes]
        units = [unit for unit in units if others.isdisjoint(entry.storage for entry in unit.entries)]
        if not (self._on_gpu and units):
            return {}
        from headrace.stores.coded_host import CodedStore

        store = CodedStore(units, self._life.device, registrar_for(self._life.device))

        def make(unit: Unit) -> Code:
            slab = torch.zeros(unit.num_bytes, dtype=torch.uint8, device=self._life.device)
            for entry in unit.entries:
                self._fill(entry.storage, slab[entry.offset : entry.offset + entry.num_bytes])
            return store.code_of(slab)

        for threads in (_CODED_AT_ONCE, 1):
            with suppress(torch.OutOfMemoryError), ThreadPoolExecutor(threads) as pool:
                made = dict(zip([unit.entries for unit in units], pool.map(make, units), strict=True))
                store.warn_of_length()
                return made
        return {}  # they are made in host memory, as at first

    def _fill(self, name: str, into: torch.Tensor) -> None:
        """Copy the bytes of what is coded, or plain in memory, ``into`` memory of the device, on the current stream."""
        plain = self._plain(name)
        if plain is None:
            self._old._store.read(name, into)
        else:
            into.copy_(plain, non_blocking=True)

    # -- the exchange -----------------------------------------------------------------------------------------------

    def carry_out(self) -> None:
        """Attach the plan. After an error or interrupt the offload is as before, or parked."""
        life, old = self._life, self._old
        assert life.context is not None
        life.copies.update({name: self._bound[name].current_bytes() for name in self._hosted})
        if not life.detached:
            if life.parked is None:
                life.release_graphs()
            life.parked, life.names = life.parked or "call", life.names | self._hosted
            life.free()
            life.detached = partial(attach_again, life)
        life.names |= self._hosted
        old._detach()  # again, if an interrupt has ended it
        old._caches = []
        fresh = self._bind()
        prepared = Prepared(
            self._plan,
            life.device,
            fresh,
            self._context.weights if "files" in (*self._now.values(), *self._then.values()) else None,
            self._context.request.disk,
            pooled={n: at for n, at in self._held.items() if self._then[n] != "device" and self._is_aligned(n, at)},
            taken={n: copies for n in self._bound if (copies := self._copies(n))},
            codes=self._codes | self._new_codes(),
            model=old._model,
            inventory=self._context.inventory,
            context=life.context,
        )
        new = OffloadSession(prepared, replace(old._options, progress=None))
        try:
            with self._homes(fresh):
                self._place(new, fresh)
                if self._on_gpu:
                    torch.cuda.empty_cache()  # slots that were cut from the old memory would keep all of it
                new.attach()
                kept = self._note_memory(new, fresh)
            for each in (*old.attachments, *old.captured):
                each.session = new
            new.attachments, new.captured = old.attachments, old.captured
            life.session, life.detached, life.parked, life.names = new, None, None, set()
        except BaseException:
            if new.in_force:  # an interrupt at the end of attach()
                new._undo()
            self._park(fresh)
            for name in self._live - life.names - self._stay:
                fresh[name].adopt(self._bound[name].original_bytes())  # which no other store has
            for name in fresh.keys() - self._stay:
                fresh[name].forget_original()  # perhaps a place on the device
            raise
        life.copies.keep(kept)  # not before: what is parked has no others
        life.bound = {}
        for name, bound in self._bound.items():
            for tensor in bound.tensors if fresh[name] is not bound else ():
                tensor.original_data = new_buffer(0)  # garbage with cycles would keep residents until the next resize
        old.in_force = False
        old._store.close()
        old._promoter.close()
        old._bound, old._ranges = {}, None
        if self._on_gpu:
            torch.cuda.empty_cache()

    def _is_aligned(self, name: str, held: AlreadyPinned) -> bool:
        """Whether compute may read ``name`` there in place with the same bits, if it is to."""
        is_mapped = not isinstance(held.memory, PinnedBuffer)
        address = held.memory.buffer.data_ptr() + held.start
        return is_mapped or name not in self._plan.uva or address % SLAB_ALIGNMENT_BYTES == 0

    def _copies(self, name: str) -> Sequence[Copy]:
        """Copies of ``name`` for a store or the device; empty for what is placed, or in files."""
        if self._now[name] == "rows":
            return [] if self._is_decoded(name) else self._old._store.copies(name)
        plain = self._plain(name) if self._is_copied(name) else None
        return [] if plain is None else [Copy(ByteRange.of(plain), 0)]

    def _is_decoded(self, name: str) -> bool:
        """Whether it is decoded to the device, where it is to be."""
        return self._on_gpu and name in self._coded and self._then[name] == "device"

    def _is_copied(self, name: str) -> bool:
        """Whether its bytes are copied into the store, or it keeps their memory, and no live tensor has them."""
        on_host = self._then[name] == "rows" and name in self._life.names
        return on_host or (self._on_gpu and self._then[name] in ("host", "rows"))

    def _bind(self) -> dict[str, BoundStorage]:
        """New records of the live tensors, but for those that stay; of an exchange that has failed, its own."""
        moved = [bound.info for name, bound in self._bound.items() if name not in self._stay]
        for tensor in [tensor for name in self._live for tensor in self._bound[name].tensors]:
            if tensor.tensor is not tensor.original:  # which was on meta
                tensor.original, tensor.original_data = tensor.tensor, tensor.tensor.data
        fresh = self._life.bound or self._bound | bind(self._old._model, moved)
        for name, bound in self._bound.items():
            fresh[name].lead_bytes, fresh[name].keeps_original = bound.lead_bytes, bound.keeps_original
        self._life.bound = fresh  # by which an operator finds them
        self._park(fresh)
        return fresh

    def _park(self, fresh: Mapping[str, BoundStorage]) -> None:
        """Take all memory from what is not a resident on the device."""
        for name, bound in fresh.items():
            if self._now[name] != "device" or name in self._life.names:
                park_storage(bound, self._life._on_access)

    @contextmanager
    def _homes(self, fresh: Mapping[str, BoundStorage]) -> Iterator[None]:
        """Within, each storage is where an offload is to find it: on the device, in host memory, or nowhere yet."""
        try:
            for name, bound in fresh.items():
                bound.home = self._life.device if name in self._stay else _META
            yield
        finally:
            for name, bound in fresh.items():
                bound.home = self._home[name]

    def _place(self, new: OffloadSession, fresh: Mapping[str, BoundStorage]) -> None:
        """Give what becomes resident its bytes; on a CPU, where all memory is the device's, leave it where it is."""
        names = [n for n in fresh if n not in self._stay and self._then[n] != "files" and not self._is_copied(n)]
        found = {name: self._plain(name) for name in names}
        plain = {name: buffer for name, buffer in found.items() if buffer is not None}
        moving = {n for n in plain if self._then[n] == "device" and (self._on_gpu or n in self._life.names)}
        # Since an exchange has failed; it stays.
        was_set = {name for name in moving if any(tensor.has_other_data for tensor in fresh[name].tensors)}
        plain |= {name: fresh[name].current_bytes() for name in was_set}
        moving |= {name for name in names if self._is_decoded(name)}
        moving -= was_set
        staying = [name for name in moving if self._home[name] in (_META, self._life.device)]
        places = allocate_residents([fresh[name] for name in moving], self._life.device, staying)
        for name, place in places.items():
            self._fill(name, place)
        if self._on_gpu:
            torch.cuda.synchronize(self._life.device)
        stays = {n: plain[n] for n in (was_set if self._on_gpu else plain.keys() - moving)}
        for name, buffer in (places | stays).items():
            fresh[name].adopt(buffer)
            if name in moving:
                self._bound[name].forget_original()

    def _note_memory(self, new: OffloadSession, fresh: Mapping[str, BoundStorage]) -> dict[str, AlreadyPinned]:
        """Note the memory that tensors had at first; returns the host memory of residents."""
        held = self._held
        for name, bound in fresh.items():
            before = self._bound[name]
            if bound is before or (bound.keeps_original and not self._on_gpu):
                continue  # it has the same
            bound.keeps_original = False
            # Those of ``before`` keep their own, until the end.
            for tensor, earlier in zip(bound.tensors, before.tensors, strict=True):
                weak = earlier._weak_original or weak_memory(earlier.original_data)
                tensor._weak_original = None if self._home[name] == _META else weak
        residents = {name: at for name, at in held.items() if self._then[name] == "device"}
        kept = {n for n, where in self._then.items() if where == "host" and self._is_kept(new, n, held.get(n))}
        # Not of memory of which other parts are used no longer: it would be kept as a whole.
        left = {id(at.memory) for name, at in held.items() if name not in kept and name not in residents}
        return {n: at for n, at in residents.items() if id(at.memory) not in left}

    def _is_kept(self, new: OffloadSession, name: str, held: AlreadyPinned | None) -> bool:
        now = new._store.held(name)
        return held is not None and now is not None and now.memory is held.memory
