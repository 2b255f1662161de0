"""Device memory that all ranks of a group can address: torch's symmetric memory, over NVLink or PCIe peer access.

Allocations are made by every rank together, at the same size. A rank's view of a peer's memory is an ordinary tensor on
its own device, so a copy between the two is one that copy engines carry out and graphs can capture. The physical memory
stays until the last rank has let go of its mapping (CUDA driver API, virtual memory management: an imported handle
keeps the allocation), so a view outlives the process that it was made with.
"""

from __future__ import annotations

import torch
import torch.distributed._symmetric_memory as symm
from torch._C._distributed_c10d import _SymmetricMemory

from headrace.errors import OptionError
from headrace.ranks.group import RankGroup

__all__ = ["SymmetricMemory"]


class SymmetricMemory:
    """``num_bytes`` on each rank's device.

    Attributes:
        rank: this process.
        views: the memory of each rank as a tensor on ``device`` (uint8, 1-D).
    """

    def __init__(self, num_bytes: int, device: torch.device, ranks: RankGroup) -> None:
        """Collective; uninitialised.

        Raises:
            OptionError: the devices cannot address one another.
            PeerError: another rank failed, ended or did not come in time.
            torch.OutOfMemoryError: no room on this one.
        """
        self.rank = ranks.rank
        self._timeout_ms = int(ranks.timeout_s * 1e3)
        with torch.cuda.device(device):
            try:
                # What symm.empty calls. That takes it from a pool, which would keep what is given back.
                local = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
            except RuntimeError as error:
                raise torch.OutOfMemoryError(f"{device}: no room for {num_bytes} bytes: {error}") from error
            ranks.exchange("allocate")  # torch's rendezvous does not notice a rank that had no memory
            try:
                self._handle = symm.rendezvous(local, ranks.process_group.group_name)
            except RuntimeError as error:
                raise OptionError(
                    f"{device} and the devices of the other ranks cannot address one another's memory "
                    f"({str(error).strip().splitlines()[0]}); give every rank a device of its own, all of one host "
                    f"with peer access (nvidia-smi topo -p2p r), or offload without group="
                ) from error
            self.views = [
                local if rank == self.rank else self._handle.get_buffer(rank, (num_bytes,), torch.uint8)
                for rank in range(ranks.size)
            ]

    @property
    def local(self) -> torch.Tensor:
        """This rank's memory: uint8, 1-D."""
        return self.views[self.rank]

    def barrier(self) -> None:
        """Let the current stream wait until the current streams of all ranks have come here.

        A rank that does not come within the timeout of the group makes the kernel trap: the next call that waits for
        this device raises, in graphs too, and nothing that was to follow runs.
        """
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)
