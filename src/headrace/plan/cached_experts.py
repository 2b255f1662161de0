"""Layers of cached experts: their tensors, and the addresses of their rows.

Each tensor of such a layer is one range of rows: rows 0 to S - 1 are slots on the device, the next ones overflow rows,
and from row H on lie all experts in host memory. Overflow rows are on the device, in memory that all layers share: a
step copies experts there that have no slot. CUDA maps memory in pieces of 2 MiB, so overflow rows and H begin
at the first row at which the pieces of two memories are apart; what is between is not mapped. Tensors with small rows
(scales, zero points, biases) have the same rows, all of them on the device.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from headrace.json_files import Positive
from headrace.memory.system import round_up
from headrace.model.records import Inventory, StorageInfo

# cuMemGetAllocationGranularity of device and host memory alike, on every GPU so far.
PIECE_BYTES = 2 << 20

# Of tensors with small rows, each row between slots and host memory takes device memory.
_MOST_ROWS = 32

# A row of fewer bytes is not worth a transfer.
_MIN_ROW_BYTES = 64 << 10

# Overflow rows take an eighth of the slots' memory at most.
_OVERFLOW_SHARE = 8

# Rows for experts on their way from files to a GPU: pieces for all threads, and what they read while a layer computes.
_STAGING_BYTES = 256 << 20

# vLLM's moe_align_block_size takes fewer than 1024 experts.
_MOST_KERNEL_ROWS = 992


@dataclass(frozen=True)
class CachedLayer:
    """The cached experts of one module: some of them are on the device at a time.

    Attributes:
        module_fqn: dotted name of the module that holds their tensors.
        num_experts: experts of the module; the first dimension of each of its tensors.
        num_slots: experts that the device holds, at most ``num_experts``.
        storages: names of the tensors, each with the bytes of all experts.
        overflow_rows: experts beyond the slots that a step copies to the device, until the next layer does.
        host_slots: of experts that are stored in files, those that host memory holds beside the slots: 0, where a CPU
            computes, whose slots are host memory. All that have no slot have an overflow row then. ``None``: host
            memory stores all experts.
    """

    module_fqn: str
    num_experts: Positive
    num_slots: Positive
    storages: Mapping[str, Positive]
    overflow_rows: int = 0
    host_slots: int | None = None

    @cached_property
    def form(self) -> tuple[int | None, ...]:
        """All but the names: layers of equal form take the same memory, and a model has few forms."""
        return self.num_experts, self.num_slots, self.overflow_rows, self.host_slots, *self.storages.values()

    def row_bytes(self, storage: str) -> int:
        """Bytes of one expert in ``storage``."""
        return self.storages[storage] // self.num_experts

    def is_split(self, storage: str) -> bool:
        """Whether ``storage`` is in two memories; else all of it is on the device."""
        return self.row_bytes(storage) >= _MIN_ROW_BYTES

    @property
    def split_row_bytes(self) -> list[int]:
        """Bytes of one expert in each tensor that is in two memories."""
        return [self.row_bytes(name) for name in self.storages if self.is_split(name)]

    @cached_property
    def first_row(self) -> int:
        """The row of expert 0 in host memory, of all tensors alike.

        It begins a piece of each tensor of which few rows make whole pieces, so that memory made before can be mapped
        there.
        """
        least = self.first_overflow_row
        for name in self.overflow_memories:
            end = self.overflow_start(name) + self.overflow_bytes(name)
            least = max(least, -(-end // self.row_bytes(name)))
        whole = (PIECE_BYTES // math.gcd(row, PIECE_BYTES) for row in self.split_row_bytes)  # a power of two
        return round_up(least, max((rows for rows in whole if rows <= _MOST_ROWS), default=1))

    @cached_property
    def first_overflow_row(self) -> int:
        """The first row behind the last piece of the slots, of all tensors alike."""
        ends = (-(-round_up(self.num_slots * row, PIECE_BYTES) // row) for row in self.split_row_bytes)
        return max(ends, default=self.num_slots)

    def overflow_start(self, storage: str) -> int:
        """Bytes from the beginning of the range of ``storage`` to the memory of its overflow rows."""
        return self.first_overflow_row * self.row_bytes(storage) // PIECE_BYTES * PIECE_BYTES

    def overflow_bytes(self, storage: str) -> int:
        """Device memory of the overflow rows of ``storage``, of the same size wherever in a piece they begin."""
        if self.overflow_rows == 0 or not self.is_split(storage):
            return 0
        return round_up(self.overflow_rows * self.row_bytes(storage), PIECE_BYTES) + PIECE_BYTES

    @property
    def overflow_memories(self) -> dict[str, tuple[int, int]]:
        """Index in the layer, and bytes, of each storage with overflow rows. Layers share those that are equal."""
        split = [name for name in self.storages if self.overflow_bytes(name)]
        return {name: (index, self.overflow_bytes(name)) for index, name in enumerate(split)}

    @property
    def num_rows(self) -> int:
        """Rows of each tensor's range, those between slots and host memory included."""
        if self.host_slots is not None:
            return self.first_overflow_row + self.overflow_rows
        return self.first_row + self.num_experts

    def slots_bytes(self, storage: str) -> int:
        """Device memory of ``storage``."""
        row = self.row_bytes(storage)
        return round_up(self.num_slots * row, PIECE_BYTES) if self.is_split(storage) else self.num_rows * row

    def host_start(self, storage: str) -> int:
        """Bytes from the beginning of the range of ``storage`` to that of its host memory."""
        return self.first_row * self.row_bytes(storage) // PIECE_BYTES * PIECE_BYTES

    def range_bytes(self, storage: str) -> int:
        """Addresses of ``storage``."""
        num_bytes = self.num_rows * self.row_bytes(storage)
        return round_up(num_bytes, PIECE_BYTES) if self.is_split(storage) else num_bytes

    @cached_property
    def device_bytes(self) -> int:
        """Device memory of all tensors but for overflow rows, see :func:`cache_bytes`."""
        return sum(map(self.slots_bytes, self.storages))

    @property
    def host_bytes(self) -> int:
        """Host memory of all tensors. Those that are wholly on the device have a copy there, for ``state_dict()``."""
        if self.host_slots is not None:
            return self.host_slots * self.expert_bytes
        return sum(
            self.range_bytes(name) - self.host_start(name) if self.is_split(name) else size
            for name, size in self.storages.items()
        )

    @property
    def most_host_bytes(self) -> int:
        """The most of :attr:`host_bytes` with any number of slots, by which expert 0 begins elsewhere in a piece."""
        if self.host_slots is not None:
            return self.host_bytes
        whole = (PIECE_BYTES // math.gcd(row, PIECE_BYTES) for row in self.split_row_bytes)
        inside = sum(rows > _MOST_ROWS for rows in whole)  # tensors of which it does not begin a piece
        sizes = (round_up(size, PIECE_BYTES) if self.is_split(name) else size for name, size in self.storages.items())
        return sum(sizes) + inside * PIECE_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes of all experts."""
        return sum(self.storages.values())

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return self.num_bytes // self.num_experts


def cached_layers(
    inventory: Inventory, names: Collection[str], num_slots: int, host_slots: int | None = None
) -> list[CachedLayer]:
    """The layers of the storages ``names``, for which :func:`why_not_cached` gives no reason, in model order."""
    found: dict[str, dict[str, int]] = {}
    num_experts = {}
    for storage in inventory.storages:
        if storage.name in names:
            tensor = storage.tensors[0]
            found.setdefault(tensor.locations[0].module, {})[storage.name] = storage.num_bytes
            num_experts[tensor.locations[0].module] = tensor.shape[0]
    layers = [CachedLayer(fqn, num_experts[fqn], 1, sizes, host_slots=host_slots) for fqn, sizes in found.items()]
    return with_slots(layers, num_slots)


def with_slots(layers: Iterable[CachedLayer], num_slots: int) -> list[CachedLayer]:
    """``layers`` with another number of slots, and the overflow rows that go with it."""
    layers = list(layers)
    made = _sized(layers, num_slots)
    return [replace(made[layer.form], module_fqn=layer.module_fqn, storages=layer.storages) for layer in layers]


def _sized(layers: Sequence[CachedLayer], num_slots: int) -> dict[tuple[int | None, ...], CachedLayer]:
    """One of ``layers`` of each form, by the form, with so many slots."""
    sized = {
        form: replace(layer, num_slots=min(num_slots, layer.num_experts)) for form, layer in _by_form(layers).items()
    }
    room = sum(sized[layer.form].device_bytes for layer in layers) // _OVERFLOW_SHARE
    sized = {form: replace(layer, overflow_rows=_overflow_rows(layer, room)) for form, layer in sized.items()}
    return {form: with_host_slots(layer, layer.host_slots) for form, layer in sized.items()}


def _by_form(layers: Iterable[CachedLayer]) -> dict[tuple[int | None, ...], CachedLayer]:
    """One layer of each form."""
    return {layer.form: layer for layer in layers}


def with_host_slots(layer: CachedLayer, count: int | None) -> CachedLayer:
    """``layer`` with ``count`` of its experts in host memory above the files, as far as they are not in slots."""
    return replace(layer, host_slots=None if count is None else min(count, layer.num_experts - layer.num_slots))


def fill_host_memory(layers: Iterable[CachedLayer], room_bytes: float) -> list[CachedLayer]:
    """``layers`` of experts in files with as many of these in host memory as ``room_bytes`` hold, evenly."""
    layers = list(layers)
    counts = range(max(layer.num_experts - layer.num_slots for layer in layers) + 1)
    fitting = bisect_right(
        counts, room_bytes, key=lambda count: sum(with_host_slots(layer, count).host_bytes for layer in layers)
    )
    filled = [with_host_slots(layer, max(0, fitting - 1)) for layer in layers]
    left = room_bytes - sum(layer.host_bytes for layer in filled)
    for index, layer in enumerate(filled):
        filled[index] = with_host_slots(layer, fitting) if layer.expert_bytes <= left else layer
        left -= filled[index].host_bytes - layer.host_bytes
    return filled


def staging_rows(layers: Collection[CachedLayer], on_gpu: bool) -> tuple[int, int]:
    """Rows of host memory, and bytes of each, through which experts pass on their way from files to a GPU.

    All ``layers`` share them: as many as keep threads reading, and at least one to read while another is copied. Where
    a CPU computes without host memory beside its slots, there are none.
    """
    if not layers or any(layer.host_slots is None or not (on_gpu or layer.host_slots) for layer in layers):
        return 0, 0
    row_bytes = max(layer.expert_bytes for layer in layers)
    return min(max(layer.num_experts for layer in layers), max(2, -(-_STAGING_BYTES // row_bytes))), row_bytes


def host_memory_bytes(layers: Collection[CachedLayer], on_gpu: bool) -> int:
    """Host memory of cached experts beside slots that are host memory."""
    return sum(layer.host_bytes for layer in layers) + math.prod(staging_rows(layers, on_gpu))


def _overflow_rows(layer: CachedLayer, room: int) -> int:
    split = layer.split_row_bytes
    if layer.host_slots is not None:
        return layer.num_experts - layer.num_slots
    if not split:
        return 0
    fitting = (room - 3 * PIECE_BYTES * len(split)) // sum(split)  # each memory has up to three pieces more
    useful = min(layer.num_experts - layer.num_slots, _MOST_KERNEL_ROWS - layer.num_experts - layer.num_slots)
    return max(0, min(fitting, useful))


def cache_bytes(layers: Iterable[CachedLayer], num_slots: int | None = None) -> int:
    """Device memory of ``layers``, in which overflow rows exist once; with another number of slots, if one is given."""
    layers = list(layers)
    # Memory that is mapped twice begins with a piece of its own: see MappedMemory.
    alike = _by_form(layers) if num_slots is None else _sized(layers, num_slots)
    overflow_bytes = sum(size + PIECE_BYTES for _, size in overflow_memories(alike.values()))
    return sum(alike[layer.form].device_bytes for layer in layers) + overflow_bytes


def overflow_memories(layers: Iterable[CachedLayer]) -> set[tuple[int, int]]:
    """The memories that ``layers`` share, see :attr:`CachedLayer.overflow_memories`."""
    return {memory for layer in layers for memory in layer.overflow_memories.values()}


def why_not_cached(inventory: Inventory, names: Collection[str]) -> dict[str, str]:
    """Storages of ``names`` that a cache of experts cannot hold, each with the reason."""
    reasons: dict[str, str] = {}
    wanted: dict[str, list[StorageInfo]] = {}
    for storage in inventory.storages:
        if storage.name in names:
            tensor = storage.tensors[0]
            if len(storage.tensors) > 1 or len(storage.modules) > 1:
                reasons[storage.name] = "several tensors or modules share it"
            elif len(tensor.shape) < 2 or not tensor.is_contiguous or storage.num_bytes != tensor.extent_bytes:
                reasons[storage.name] = f"expected a contiguous tensor [experts, ...], found {list(tensor.shape)}"
            wanted.setdefault(tensor.locations[0].module, []).append(storage)
    for fqn, storages in wanted.items():
        sizes = {storage.tensors[0].shape[:1] for storage in storages}
        rows = {s.name for s in inventory.storages if fqn in s.modules and s.tensors[0].shape[:1] in sizes}
        why = next((f"{s.name} cannot be: {reasons[s.name]}" for s in storages if s.name in reasons), None)
        if len(sizes) > 1 or max(len(s.tensors[0].shape) for s in storages) < 3:
            why = "expected tensors [experts, ., .] of one module, all with as many experts"
        elif left := sorted(rows.difference(names)):
            why = f"{left[0]} of the same experts has to be cached, too"
        if why is not None:
            reasons |= {storage.name: reasons.get(storage.name, why) for storage in storages}
    return reasons
