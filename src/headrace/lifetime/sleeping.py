"""Sleep of an offload inside an engine, whose allocator takes device memory away, and maps it again later.

Unlike a parked offload this one keeps its tensors and slots: graphs of the engine hold their addresses, at which the
allocator maps other memory. Stores have the bytes of all but residents, and :class:`HostCopies` those.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from headrace.lifetime.parking import Lifetime, empty_slots
from headrace.plan.slabs import slab_bytes

_ASLEEP = "the model was called while its weights are asleep: end the sleep of the engine first (wake_up())"


def refillable_memory(life: Lifetime) -> dict[int, int]:
    """Allocations in which nothing lies but slots and residents, which :func:`end_sleep` fills: size by address."""
    session, found, used = life.session, dict[int, int](), dict[int, int]()
    for name in session.plan.resident:
        memory = session._bound[name].current_bytes().untyped_storage()
        found[memory.data_ptr()] = memory.nbytes()
        used[memory.data_ptr()] = used.get(memory.data_ptr(), 0) + slab_bytes([session._bound[name].info.num_bytes])
    found = {address: size for address, size in found.items() if used[address] >= size}
    if session.prefetcher is not None:
        slots = [slot.memory for slot in session.prefetcher.replays.live]
        decoding = session.prefetcher._decoding
        for slot in [*slots, *([decoding.memory] if decoding is not None else [])]:
            found[slot.data_ptr()] = slot.nbytes
    return found


def fall_asleep(life: Lifetime, lost: Collection[int]) -> int:
    """Have the allocations at the addresses ``lost``, some of :func:`refillable_memory`, hold nothing that is needed.

    From here to :func:`end_sleep` no forward begins, no copy is under way, and cached experts have no device memory.

    Returns:
        bytes that were copied to host memory.

    Raises:
        LimitError: the host has no memory for residents; nothing was changed.
    """
    session = life.session
    life._process.require_own_process()
    if life.parked is not None:
        return 0
    with torch.inference_mode(False), torch.no_grad():
        bound = {name: session._bound[name] for name in session.plan.resident}
        residents = {name: each.current_bytes() for name, each in bound.items()}
        residents = {name: each for name, each in residents.items() if each.untyped_storage().data_ptr() in lost}
        moved = life.copies.update(residents)
        life.parked, life.names = "call", set(residents)
        if session.prefetcher is not None:
            session.prefetcher.forwards.parked = _ASLEEP
            session.prefetcher.stop(graphs_released=True)  # none of them is replayed until end_sleep()
            empty_slots(session.prefetcher)
        if session._ranges is not None:
            session._ranges.free_slots()
    if life.device.type == "cuda":
        torch.cuda.synchronize(life.device)
    return moved


def end_sleep(life: Lifetime) -> int:
    """Fill the memory that was lost, which is mapped again where it was; returns bytes that were copied there."""
    session = life.session
    if life.parked is None:
        return 0
    with torch.inference_mode(False), torch.no_grad():
        places = {name: session._bound[name].current_bytes() for name in life.names}
        moved = life.copies.fill(places)
        if session._ranges is not None:
            session._ranges.take_slots()
            for _, cache in session._caches:
                cache.reset()
        life.copies.finish(places)
        life.parked, life.names = None, set()
        life._open()
        session.reset()
    return moved
