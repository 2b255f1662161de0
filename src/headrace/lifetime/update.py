"""New values for weights of an offload, where their bytes are: in the store, on the device, in host copies.

Everything that can fail comes first: names and shapes are checked, codes are made. What follows are
copies of bytes to memory that is there, in a thread of its own, which no Ctrl-C ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headrace.errors import ModelChangedError, OptionError, OptionTypeError, StateError
from headrace.lifetime.parking import BROKEN, UPDATE, Lifetime
from headrace.model.live_tensors import BoundTensor, is_placeholder
from headrace.model.records import TensorInfo
from headrace.runtime.session import OffloadSession
from headrace.stores.store import Stores

if TYPE_CHECKING:
    from headrace.codec.exponents import Piece
    from headrace.memory.pinned import PinnedBuffer
    from headrace.stores.coded_host import CodedStore

_STAGED_BYTES = 64 << 20
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)

# By storage: its tensors that get values.
_Writes = dict[str, list[tuple[BoundTensor, torch.Tensor]]]


def update(
    life: Lifetime,
    given: Mapping[str, torch.Tensor] | str | os.PathLike[str],
    beside: Callable[[], None] = lambda: None,
) -> int:
    """See :meth:`headrace.api.Handle.update`; ``beside`` writes more tensors, which are part of the same whole."""
    values = given if isinstance(given, Mapping) else _read_folder(given)
    with life.alone(UPDATE):
        writes = _checked(life.session, values)
        num_bytes = sum(value.nbytes for pairs in writes.values() for _, value in pairs)
        _refuse_own_memory(life, writes)
        for device in {value.device for pairs in writes.values() for _, value in pairs if value.is_cuda}:
            torch.cuda.synchronize(device)  # another thread reads them, on another stream
        codes = _new_codes(life, writes)
        _to_the_end(partial(_write, life, writes, codes, beside))
        if life.parked is None:
            life.session.reset()
    return num_bytes


# -- what is to be written ---------------------------------------------------------------------------------------------


def _tensors_by_name(session: OffloadSession) -> dict[str, tuple[str, BoundTensor]]:
    """Storage and tensor of every name in the model."""
    return {
        name: (storage, tensor)
        for storage, bound in session._bound.items()
        for tensor in bound.tensors
        for name in tensor.info.names
    }


def _checked(session: OffloadSession, values: Mapping[str, torch.Tensor]) -> _Writes:
    """Values by storage, if all of them fit the model and its stores."""
    known, modules = _tensors_by_name(session), dict(session._model.named_modules(remove_duplicate=False))
    found: dict[int, tuple[str, str, BoundTensor, torch.Tensor]] = {}
    for name, value in values.items():
        if name not in known:
            _check_unknown(name, value, modules)
            continue
        storage, tensor = known[name]
        _check_value(name, tensor.info, value)
        _check_place(session, modules, storage, name, tensor)
        other = found.setdefault(id(tensor), (name, storage, tensor, value))
        if other[3] is not value and not torch.equal(_bits(other[3]).to(value.device), _bits(value)):
            raise OptionError(
                f"update(): {other[0]} and {name} are one tensor of the model, and their values differ; nothing was "
                f"changed. Leave one of them out"
            )
    writes: _Writes = {}
    for name, storage, tensor, value in found.values():
        for other_tensor, _ in writes.setdefault(storage, []):
            first, second = sorted((tensor.info, other_tensor.info), key=lambda info: info.byte_offset)
            if second.byte_offset < first.byte_offset + first.extent_bytes:
                raise OptionError(f"update(): {name} shares bytes with {other_tensor.name}; leave one of them out")
        writes[storage].append((tensor, value.detach()))
    return writes


def _check_unknown(name: str, value: Any, modules: Mapping[str, nn.Module]) -> None:
    """Raise unless the model has a tensor without elements there, which no plan has, and ``value`` is like it."""
    module, _, attr = name.rpartition(".")
    found = getattr(modules.get(module), attr, None)
    if not isinstance(found, torch.Tensor):
        raise OptionError(f"update(): the model has no tensor {name!r}; nothing was changed. Leave it out")
    if found.numel():
        is_plain = type(found) in _PLAIN and found.layout == torch.strided
        why = "was added since the model was offloaded" if is_plain else f"is a {type(found).__name__} ({found.layout})"
        raise OptionError(
            f"update(): {name} {why}, so that no plan has it; nothing was changed. Write it in the model itself, or "
            f"leave it out"
        )
    _check_value(name, found, value)


def _check_value(name: str, expected: TensorInfo | torch.Tensor, value: Any) -> None:
    if type(value) not in _PLAIN or value.is_meta or value.layout != torch.strided:
        raise OptionTypeError(
            f"update(): {name}: expected a dense tensor of a CPU or GPU, found {type(value).__name__}; nothing was "
            f"changed"
        )
    if tuple(value.shape) != tuple(expected.shape) or value.dtype != expected.dtype:
        raise OptionError(
            f"update(): {name}: expected {list(expected.shape)} {expected.dtype}, found {list(value.shape)} "
            f"{value.dtype}; nothing was changed. Convert it first (.to({expected.dtype}))"
        )


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def _refuse_own_memory(life: Lifetime, writes: _Writes) -> None:
    """Raise ``OptionError`` for a value that an earlier write would change, or that is not there to be read."""
    # Residents of a GPU lie in one allocation, and units in slabs: few spans, and thousands of values.
    written = {_span(_bytes_of(life, name)) for name in writes if not _is_coded(life.session, name)}
    for pairs in writes.values():
        for tensor, value in pairs:
            # One span for each value, and none for a placeholder, which has no memory.
            if is_placeholder(value) or any(_overlap(span, each) for span in [_span(value)] for each in written):
                raise OptionError(
                    f"update(): the value for {tensor.name} lies in memory of the model itself, which is written; "
                    f"nothing was changed. Pass a copy (.clone())"
                )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of the memory that ``tensor`` lies in, and the one behind it."""
    # Not by storages: several of torch's may be of one memory.
    memory = tensor.untyped_storage()
    return memory.data_ptr(), memory.data_ptr() + memory.nbytes()


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _is_coded(session: OffloadSession, storage: str) -> bool:
    kind = session.plan.placements[storage].kind
    return kind is not None and kind.is_coded


def _check_place(
    session: OffloadSession, modules: Mapping[str, nn.Module], storage: str, name: str, tensor: BoundTensor
) -> None:
    """Raise unless the model, whose ``modules`` have these names now, has the tensor there, and its store takes it."""
    parent = name.partition(":")[0].rpartition(".")[0]
    is_there = any(
        owner is modules.get(parent)
        and replace(place, module=parent).name == name
        and tensor.is_held_by(owner, place.attr, place.inner)
        for owner, place in tensor.places
    )
    if tensor.has_other_data or not is_there:
        raise ModelChangedError(
            f"update(): {name} or a module around it was replaced, or its data was set, since it was offloaded; "
            f"nothing was changed. Set it in the model itself"
        )
    kind = session.plan.placements[storage].kind
    if kind is not None and not (kind.on_host and not kind.needs_ranks):
        raise OptionError(
            f"update(): {name} is stored in mode {kind.name!r}, which takes no new values; nothing was changed. Keep "
            f"it resident or in host memory (mode 'cpu'), or call remove(), change the model, and offload it again"
        )


def _read_folder(folder: Any) -> dict[str, torch.Tensor]:
    """The tensors of safetensors files, whose pages are read when they are used."""
    from safetensors.torch import load_file

    from headrace.checkpoint.safetensors_header import Checkpoint

    if not isinstance(folder, str | os.PathLike):
        raise OptionTypeError(
            f"update(): expected tensors by name, or the path of safetensors, found {type(folder).__name__}"
        )
    return {name: tensor for file in Checkpoint.open(folder).files for name, tensor in load_file(file).items()}


# -- codes -------------------------------------------------------------------------------------------------------------


# By coded unit: the store that has its code.
_Codes = dict[int, tuple["CodedStore", tuple["PinnedBuffer", tuple["Piece", ...]]]]


def _new_codes(life: Lifetime, writes: _Writes) -> _Codes:
    """Codes of the units of ``writes`` that are coded, with the new values; those are taken out of ``writes``."""
    session = life.session
    coded = [name for name in writes if _is_coded(session, name)]
    if not coded:
        return {}
    prefetcher = session.prefetcher
    assert prefetcher is not None
    if life.in_engine:
        raise OptionError(
            f"update(): {coded[0]} is coded, and slots and graphs of the engine have the length of its code; nothing "
            f"was changed. Start the engine again with the new weights, or without a codec"
        )
    if prefetcher.replays.exist and not prefetcher.replays.are_own:
        raise StateError(
            f"update(): {coded[0]} is coded, and a CUDA graph has the length of its code; nothing was changed. Delete "
            f"your graphs and call park(graphs_released=True) first, or offload without a codec"
        )
    codes: _Codes = {}
    for unit in prefetcher._plan.units:
        names = {entry.storage for entry in unit.entries}
        if names.isdisjoint(coded):
            continue
        store: Any = session._store.of(coded[0]) if isinstance(session._store, Stores) else session._store
        slab = torch.zeros(unit.num_bytes, dtype=torch.uint8, device="cpu")
        for entry in unit.entries:
            part = slab[entry.offset : entry.offset + entry.num_bytes]
            store.read(entry.storage, part)
            for tensor, value in writes.get(entry.storage, ()) if entry.storage in coded else ():
                tensor.view_of(part).copy_(value)
        codes[unit.index] = store, store.code_of(slab)
    for name in coded:
        del writes[name]
    life.release_graphs()
    return codes


# -- writing -----------------------------------------------------------------------------------------------------------


def _write(life: Lifetime, writes: _Writes, codes: _Codes, beside: Callable[[], None]) -> None:
    session = life.session
    with torch.no_grad():  # this thread is another one
        life.broken = BROKEN
        beside()
        # What the device copies by itself comes first, so that the host copies the rest meanwhile.
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, pairs in sorted(writes.items(), key=lambda each: session.plan.mechanism_of(each[0]) != "resident"):
            is_unit = session.plan.mechanism_of(name) == "prefetch"
            with session._promoter.rewriting(name) if is_unit else nullcontext():
                buffer = _bytes_of(life, name)
                life.copies.forget(name)
                with torch.inference_mode():  # as the residents of an offload that began there
                    for tensor, value in pairs:
                        place = tensor.view_of(buffer)
                        if _is_staged(place, value):
                            staged.append((_bits(place), _bits(value)))
                        else:
                            place.copy_(value, non_blocking=_is_async(buffer, value))
        _copy_staged(staged, life.device)
        if session._ranges is not None:
            session._ranges.finish()  # small rows have a copy on the device
        for _, cache in session._caches:
            cache.reset()
        for unit, (store, code) in codes.items():
            store.replace(unit, code)
        if codes and life.parked is None:
            life.refill()  # slots may have another size
        if life.device.type == "cuda":
            torch.cuda.synchronize(life.device)
        life.broken = None
    for name in writes:
        for tensor in session._bound[name].tensors:  # what autograd has saved of it is no longer valid
            if not tensor.tensor.is_inference():
                torch.autograd.graph.increment_version(tensor.tensor)


def _is_async(place: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether ``value`` is read by the device alone, past memory of torch's that is freed before it is read."""
    return place.is_cuda and value.is_contiguous() and value.is_pinned()


def _is_staged(place: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether ``value`` passes through pinned memory, since the driver copies from other memory with one thread."""
    is_pageable = place.is_cuda and value.is_cpu and not value.is_pinned()
    return is_pageable and value.numel() > 0 and value.is_contiguous() and place.is_contiguous()


@torch.inference_mode()
def _copy_staged(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> None:
    """Copy each second to each first (uint8, 1-D): torch's threads fill one buffer while the device reads another."""
    if not pairs:
        return
    with torch.cuda.device(device):  # of the events
        made = [(torch.empty(_STAGED_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)]
        ring = cycle(made)
        for place, value in pairs:
            for into, piece in zip(place.split(_STAGED_BYTES), value.split(_STAGED_BYTES), strict=True):
                buffer, was_read = next(ring)
                was_read.synchronize()
                into.copy_(buffer[: piece.numel()].copy_(piece), non_blocking=True)
                was_read.record()


def _bytes_of(life: Lifetime, name: str) -> torch.Tensor:
    """Memory that has the bytes of a storage, to be written: uint8, 1-D."""
    session = life.session
    if name not in session.plan.resident:
        return session._store.in_place(name)
    if life.parked is not None and name in life.names:
        return life.copies.bytes_of(name)
    return session._bound[name].current_bytes()


def _to_the_end(work: Callable[[], None]) -> None:
    """Call ``work`` in a thread of its own, which no Ctrl-C ends: an interrupt comes before it, or when it returned."""
    # Plain locks: a Ctrl-C inside the Python code of an event can leave its lock taken forever.
    start, has_ended, errors = threading.Lock(), list[bool](), list[BaseException]()

    def run() -> None:
        try:
            if start.acquire(blocking=False):
                work()
        except BaseException as error:
            errors.append(error)
        finally:
            has_ended.append(True)

    interrupt: BaseException | None = None
    try:
        threading.Thread(target=run, name="headrace-update", daemon=True).start()
        while not has_ended:
            time.sleep(0.0005)
    except BaseException as error:
        if start.acquire(blocking=False):  # so that it never begins
            raise
        interrupt = error
        while not has_ended:
            with suppress(KeyboardInterrupt):
                time.sleep(0.0005)
    if errors:
        raise StateError(f"{BROKEN} ({errors[0]})") from errors[0]
    if interrupt is not None:
        raise interrupt
