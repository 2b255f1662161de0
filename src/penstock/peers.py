"""The other processes of an offload: a process group of ``torch.distributed``, and what it is used for.

Ranks of one group have to make the same plan for the same weights; stores that span processes check that before
anything is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from penstock.errors import OptionError

__all__ = ["Peers", "require_peers"]


@dataclass(frozen=True)
class Peers:
    """Processes that share bytes at rest or a way to the device.

    Attributes:
        group: ranks that hold the same weights; ``shm_cpu`` keeps one copy per host.
        pool_links: every rank copies a part of each unit over its own link and passes it on to the others.
    """

    group: dist.ProcessGroup
    pool_links: bool = False

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Processes in the group."""
        return dist.get_world_size(self.group)


def require_peers(peers: Peers | None, what: str) -> Peers:
    """``peers``, or an error that says where to get them."""
    if peers is None:
        raise OptionError(
            f"{what} spans processes and no process group was given: pass group=torch.distributed.group.WORLD (after "
            f"torch.distributed.init_process_group) to penstock.offload"
        )
    return peers
