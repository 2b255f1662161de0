"""How ranks come to share one store: who is on this host, whether all mean the same, and who brings what.

An attempt (:func:`attempt`) is one call of ``penstock.offload`` with a group, from its first line to its last: one
meeting of all ranks, which the store, the channels and the call itself use. So whatever fails in one rank is told to
all, and until everything is attached in all of them each can undo its own.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch

from penstock.checkpoint.weight_map import WeightMap
from penstock.env import reader_threads
from penstock.errors import CheckpointError, OptionError, PeerError, warn_user
from penstock.loading.convert import TensorConverter
from penstock.loading.loader import require_weights
from penstock.memory.byte_ranges import fill
from penstock.memory.memfd import SharedMemory
from penstock.memory.pinned import HostRegistrar, refuse_capture
from penstock.model.inventory import StorageInfo
from penstock.model.live_tensors import BoundStorage
from penstock.plan.plan import Plan
from penstock.ranks.digest import json_digest
from penstock.ranks.peers import Peers
from penstock.ranks.rendezvous import Rendezvous, this_host
from penstock.runtime.parts import splits_units
from penstock.stores.disk import DiskOptions, DiskStore
from penstock.stores.file_reader import ReadCounter
from penstock.stores.shared_host import SharedStore, shared_bytes
from penstock.stores.store import new_blob

__all__ = ["Attempt", "attempt", "compare_plans", "open_shared", "spans_ranks"]

_DYING_S = 2.0

_OFFLOAD = "offload"

Said = dict[int, dict[str, Any]]  # what each rank says of itself

_thread = threading.local()


class _Meeting(Rendezvous):
    """One that goes on when the store has been filled."""

    def leave(self) -> None:
        """Nothing yet; see :meth:`end`."""

    def end(self) -> None:
        """What :meth:`leave` is for others."""
        super().leave()


@dataclass(frozen=True)
class Attempt(Peers):
    """Peers in the course of one call of ``penstock.offload``.

    Attributes:
        meeting: theirs.
    """

    meeting: Rendezvous = field(kw_only=True)
    _channels: Iterator[int] = field(kw_only=True, default_factory=count, repr=False)

    def agree_on_name(self) -> str:
        """Without a collective: a rank that fails instead of coming would leave one half done in the group."""
        return str(self.meeting.exchange(f"channel {next(self._channels)}", uuid.uuid4().hex)[0])

    def look_for_cause(self) -> None:
        self.meeting.look_for_cause()


@contextmanager
def attempt(peers: Peers | None) -> Iterator[Attempt | None]:
    """Whatever is raised within is told to the other ranks; None without a group.

    Within another attempt of the same group in the same thread it is that one, which began before.

    Raises:
        PeerError: the store of the group does not answer.
    """
    if peers is None:
        yield None
        return
    under_way: list[Attempt] = vars(_thread).setdefault("attempts", [])
    outer = next((one for one in under_way if one.group is peers.group), None)
    if outer is not None:
        yield replace(outer, pool_links=peers.pool_links)
        return
    meeting = _Meeting(peers, _OFFLOAD)
    try:
        under_way.append(Attempt(peers.group, peers.pool_links, meeting=meeting))
        yield under_way[-1]
    except BaseException as error:
        meeting.fail(str(error))
        raise
    finally:
        under_way[:] = [one for one in under_way if one.meeting is not meeting]
    meeting.end()


def spans_ranks(plan: Plan, peers: Peers) -> bool:
    """Whether ``plan`` needs the other ranks, and not this process alone."""
    return plan.mode == "shm_cpu" or splits_units(plan, peers)


def compare_plans(plan: Plan, bound: Mapping[str, BoundStorage], weights: WeightMap | None, attempt: Attempt) -> None:
    """Say what this rank is about to do, and where units are split over ranks, require the same of all.

    A store that ranks share asks by itself (:func:`open_shared`). Any other mode is each rank's own: it is said for
    those that expect another one, and nobody is waited for.

    Raises:
        OptionError: ranks with different plans.
        PeerError: another rank failed, ended or did not come in time.
    """
    if not spans_ranks(plan, attempt):
        attempt.meeting.post("plan", {"plan": _modes(plan, attempt)})
        return
    if plan.mode == "shm_cpu":
        return
    offloaded = {name: bound[name] for name in plan.offloaded_names}
    attempt.meeting.limit(attempt.timeout_s, "the timeout of the process group")
    said = attempt.meeting.exchange("plan", _say(plan, offloaded, weights, attempt))
    _require_same_plan(said, attempt.rank)


def open_shared(
    plan: Plan,
    offloaded: Mapping[str, BoundStorage],
    registrar: HostRegistrar | None,
    weights: WeightMap | None,
    disk: DiskOptions | None,
    peers: Peers,
) -> tuple[SharedStore, dict[str, torch.Tensor]]:
    """The store of all ranks of this host, and the destinations in it that this rank has to fill.

    Nothing is allocated before every rank of the group has been found to have the same plan.

    Raises:
        OptionError: ranks with different plans.
        CheckpointError: tensors on ``meta`` and no files for them.
        PeerError: another rank failed, ended or did not come in time; memory that cannot be opened from here.
        StateError: a graph is being captured.
    """
    meeting = peers.meeting if isinstance(peers, Attempt) else Rendezvous(peers, _OFFLOAD)
    try:
        if registrar is not None:
            refuse_capture(registrar)
        said = meeting.exchange("plan", _say(plan, offloaded, weights, peers))
        _require_same_plan(said, meeting.rank)
        here = [rank for rank in said if said[rank]["host"] == said[meeting.rank]["host"]]
        _warn_of_further_copies(said, meeting.rank)
        memory = _join_memory(meeting, here[0], shared_bytes(plan.units, plan.uva))
        store = SharedStore(plan.units, plan.uva, registrar, memory, meeting, here)
        store.touch()
    except BaseException as error:
        meeting.fail(str(error))
        raise
    store.doubted = {r for r in here if said[r]["files"] != said[meeting.rank]["files"]}
    store.check = partial(_check_others, store, offloaded, weights, disk)
    return store, {name: store.destination(name) for name in store.mine}


def _check_others(
    store: SharedStore,
    bound: Mapping[str, BoundStorage],
    weights: WeightMap | None,
    disk: DiskOptions | None,
) -> None:
    """Raise ``CheckpointError`` if this rank's weights differ from what the others have brought in their place.

    Live tensors are compared. Tensors on ``meta`` are too where the other rank has read other files than this one would
    (a copy, say); the same files are not read twice.
    """
    others = {name: rank for name, rank in store.owners.items() if name not in store.mine}
    live = [name for name in others if not bound[name].on_meta]
    unread = [name for name in others if bound[name].on_meta and others[name] in store.doubted]
    for name in live:
        _require_same(name, bound[name].original_bytes().cpu(), store, others[name])
    if unread:
        _warn_of_other_files(unread, others)
        _compare_files(unread, bound, require_weights(weights), disk, store)


def _join_memory(meeting: Rendezvous, leader: int, num_bytes: int) -> SharedMemory:
    """Made by the first rank of the host, opened by the others."""
    if meeting.rank == leader:
        memory = SharedMemory.create(num_bytes)
        meeting.post("memory", memory.describe())
        return memory
    address = meeting.collect("memory", [leader])[leader]
    try:
        return SharedMemory.open(address)
    except PeerError:
        meeting.require_running(leader, _DYING_S)  # a better reason than its missing file
        raise


# -- what ranks compare ------------------------------------------------------------------------------------------------


def _say(plan: Plan, offloaded: Mapping[str, BoundStorage], weights: WeightMap | None, peers: Peers) -> dict[str, Any]:
    on_meta = [name for name, bound in offloaded.items() if bound.on_meta]
    sources = {name: _origin(require_weights(weights), offloaded[name].info) for name in on_meta}
    stamps = weights.checkpoint.stamps if weights is not None and on_meta else ()
    return {
        "host": this_host(),
        "plan": {
            **_modes(plan, peers),
            "slots": plan.num_slots,
            "units": _short([asdict(unit) for unit in plan.units], len(plan.units), plan.prefetched_bytes),
            "tensors read in place": _short(plan.uva, len(plan.uva), plan.uva_bytes),
            "resident tensors": _short(plan.resident, len(plan.resident), plan.resident_bytes),
            "tensors to be read from files": _short(sources, len(on_meta)),
        },
        "files": json_digest([[s.path.name, s.num_bytes, s.modified_ns, s.inode] for s in stamps]),
    }


def _modes(plan: Plan, peers: Peers) -> dict[str, Any]:
    return {"mode": plan.mode, "pool_links": peers.pool_links}


def _origin(weights: WeightMap, storage: StorageInfo) -> list[list[str | int]]:
    """Which tensors of the files make ``storage``, with their bytes and where they go."""
    recipe = weights.recipe(storage)
    if recipe is not None:
        return [[part.name, part.num_bytes, "made"] for part in recipe[1].parts]
    return [[part.tensor.name, part.tensor.num_bytes, part.offset] for part in weights.source(storage).parts]


def _short(value: object, count: int, num_bytes: int | None = None) -> str:
    size = "" if num_bytes is None else f" of {num_bytes} bytes"
    return f"{count}{size} ({json_digest(value)[:12]})"


def _require_same_plan(said: Said, rank: int) -> None:
    for other, theirs in said.items():
        differences = [
            f"{what}: {said[rank]['plan'][what]} here, {found} there"
            for what, found in theirs["plan"].items()
            if found != said[rank]["plan"][what]
        ]
        if differences:
            raise OptionError(
                f"rank {rank} and rank {other} have different plans and cannot share a store: "
                f"{'; '.join(differences)}. Give every rank of the group the same model, policy and checkpoint, or "
                f"the same plan file, and let only ranks that hold the same weights be in the group"
            )


def _warn_of_further_copies(said: Said, rank: int) -> None:
    """Said by the first rank of each further part of a host."""
    boot = said[rank]["host"][0]
    parts = list({tuple(s["host"]): r for r, s in reversed(said.items()) if s["host"][0] == boot}.values())
    if len(parts) > 1 and rank in parts:
        warn_user(
            f"the ranks of this host run in {len(parts)} PID namespaces or as several users, which cannot open each "
            f"other's memory, so the host keeps {len(parts)} copies of the offloaded weights; start its ranks in one "
            f"container and as one user"
        )


def _warn_of_other_files(unread: list[str], owners: Mapping[str, int]) -> None:
    ranks = sorted({owners[name] for name in unread})
    warn_user(
        f"rank {', '.join(map(str, ranks))} of this host has read other files than this rank was given, so this rank "
        f"reads its own too, to compare; give all ranks of a host the same folder"
    )


def _compare_files(
    names: list[str],
    bound: Mapping[str, BoundStorage],
    weights: WeightMap,
    disk: DiskOptions | None,
    store: SharedStore,
) -> None:
    recipes = {name: recipe for name in names if (recipe := weights.recipe(bound[name].info)) is not None}
    sources = {name: weights.source(bound[name].info) for name in names if name not in recipes}
    stamps, options = weights.checkpoint.stamps, disk or DiskOptions()
    files = DiskStore(sources, options, stamps=stamps)
    maker = TensorConverter(recipes, options, ReadCounter(), num_threads=reader_threads(), stamps=stamps)
    try:
        for name in [*sources, *maker.order]:
            blob = new_blob(bound[name].info.num_bytes)
            fill(blob, files.copies(name) if name in sources else maker.copies(name))
            _require_same(name, blob, store, store.owners[name])
    finally:
        files.close()
        maker.close()


def _require_same(name: str, blob: torch.Tensor, store: SharedStore, owner: int) -> None:
    if not torch.equal(blob, store.destination(name)):
        raise CheckpointError(
            f"{name}: this rank's values differ from those of rank {owner}, with which it was to share them; load the "
            f"same weights in every rank of the group, or give each its own copy with mode 'cpu'"
        )
