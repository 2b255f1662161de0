"""Store ``shm_cpu``: one copy in host memory for all ranks of a host.

The ranks of a host share anonymous memory (:mod:`headrace.memory.shared`) with the layout of the pinned slabs of the
``cpu`` store. Each rank loads an equal share of the bytes, so that files are read once and by the reader threads of all
ranks at the same time. An offload succeeds in all ranks or in none: until every rank is attached, the failure or death
of one is an error in all (:mod:`headrace.ranks.group`). From then on no rank needs another.

On a GPU every rank registers the same pages with its own driver context. On a CPU every rank maps the loaded pages
privately: a stray write into a weight that is read in place makes a private page and cannot change another rank's.

The host tensors of the model are kept until all ranks are ready. The tensors of a rank that fails must not be left
pointing into memory that other ranks can write to.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch

from headrace.memory.pages import collapse_parallel, whole_pages
from headrace.memory.pinned import CudaRegistrar, PinnedBuffer, pin_shared
from headrace.memory.shared import SharedMemory
from headrace.memory.system import touch_threads
from headrace.plan.kinds import Unit
from headrace.ranks.group import RankGroup
from headrace.stores.pinned_host import SLAB_BYTES, PinnedStore, SlabRange, slab_sizes

_FIX = "use mode 'cpu', or set HEADRACE_DISABLE_PIN_MEMORY=1 to copy from memory that is not pinned"


def shared_bytes(units: Sequence[Unit], in_place: Mapping[str, int], max_slab_bytes: int = SLAB_BYTES) -> int:
    """Size of the shared memory for these units and storages: their slabs, each rounded up to whole pages."""
    return sum(whole_pages(size) for size in slab_sizes(units, in_place, max_slab_bytes))


def share_out(sizes: Mapping[str, int], num_parts: int) -> list[list[str]]:
    """Split ``sizes`` into ``num_parts`` consecutive runs of about equal size.

    No run exceeds an equal part by more than one storage.
    """
    parts: list[list[str]] = [[] for _ in range(num_parts)]
    total = sum(sizes.values())
    for (name, size), end in zip(sizes.items(), accumulate(sizes.values()), strict=True):
        # A storage goes to the part in which its middle lies; doubled, to stay in whole numbers.
        middle = 2 * end - size
        parts[min(num_parts - 1, middle * num_parts // max(1, 2 * total))].append(name)
    return parts


class SharedStore(PinnedStore):
    """Slabs in shared memory, loaded by several ranks: fill the destinations of :attr:`mine`, then :meth:`finish`.

    Attributes:
        mine: the storages that this rank loads.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        in_place: Mapping[str, int],
        registrar: CudaRegistrar | None,
        memory: SharedMemory,
        ranks: RankGroup,
        host_ranks: Sequence[int],
        *,
        max_slab_bytes: int = SLAB_BYTES,
    ) -> None:
        """Map the memory, without touching or registering it.

        Args:
            units, in_place, registrar, max_slab_bytes: as for the pinned store; the same in every rank.
            memory: memory of size :func:`shared_bytes`; this store closes it.
            ranks: all ranks of the group.
            host_ranks: ranks that share ``memory``; the first one created it.
        """
        self._memory = memory
        self._ranks = ranks
        self._leads = ranks.rank == host_ranks[0]
        # Before the constructor of the base class, which calls _allocate.
        self._starts: list[int] = []
        self._end = 0
        super().__init__(units, in_place, registrar, max_slab_bytes=max_slab_bytes)
        sizes = {name: place.num_bytes for name, place in self._storages.items()}
        shares = share_out(sizes, len(host_ranks))
        self.mine: Collection[str] = frozenset(shares[host_ranks.index(ranks.rank)])

    def takes_over(self, storage: str) -> bool:
        return False  # tensors of a rank that fails must not be left in memory that other ranks can write to

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        self._starts.append(self._end)
        self._end += whole_pages(num_bytes)  # each slab is a mapping of its own, which begins with a page
        return self._memory.map(self._starts[-1], num_bytes)

    def touch(self) -> None:
        """Allocate the pages of :attr:`mine`, as huge pages where the kernel can: small ones are slower to fill."""
        by_slab: dict[int, list[SlabRange]] = {}
        for name in self.mine:
            place = self._storages[name]
            by_slab.setdefault(place.slab, []).append(place)
        for slab, places in by_slab.items():  # in each slab they are neighbours
            start, end = min(p.start for p in places), max(p.start + p.num_bytes for p in places)
            collapse_parallel(self._slabs[slab].buffer[start:end], touch_threads())

    def on_loaded(self, storage: str) -> None:
        """Nothing to do: a slab is complete when all ranks have loaded their shares."""

    def finish(self) -> None:
        """Wait until all ranks have loaded their shares, and make the memory ready to be read. Collective.

        Raises:
            PeerError: another rank failed, ended or did not come in time.
            OptionError: the driver refuses to register the memory.
        """
        self._ranks.exchange("loaded")
        if self._leads:
            self._memory.forbid_writing()  # all ranks have mapped it by now
        for index, (slab, start) in enumerate(zip(self._slabs, self._starts, strict=True)):
            if self.registrar is not None:
                pin_shared(slab, self.registrar, _FIX)
            else:
                self._slabs[index] = PinnedBuffer(self._memory.map(start, slab.num_bytes, private=True))
        self._memory.close()  # the mappings live on without the descriptor

    @property
    def account(self) -> dict[str, int]:
        return {"host_shared": self._end}

    @property
    def host_bytes(self) -> int:
        """Bytes of the shared memory, which the host holds once for all ranks."""
        return self._end

    def close(self) -> None:
        super().close()
        self._memory.close()
