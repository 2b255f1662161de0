"""Which workers of this host hold the same weights as this one: those that one copy can serve, in mode ``shm_cpu``.

Data-parallel ranks of a mixture of experts are ranks of one world, and vLLM has a group of them. Those of a dense model
are engines of their own: vLLM tells each that it is alone, and only how many there are has to be said. They meet in a
key-value store (``torch.distributed.TCPStore``) at the port that vLLM has set aside for the ranks of this launch, and
that engines of a dense model leave unused.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore  # type: ignore[attr-defined,unused-ignore]

from penstock.config import peer_timeout_s
from penstock.errors import OptionError, PeerError
from penstock.ranks.group import GRACE_S, call_within

__all__ = ["replica_group"]

_HOST = "127.0.0.1"


def replica_group(replicas: int | None, parallel: Any, rank: int) -> ProcessGroup:
    """The workers that hold what this one holds.

    Args:
        replicas: engines of a dense model that one command starts on this host; not asked where vLLM has the group.
        parallel: vLLM's ``ParallelConfig``.
        rank: of this worker in its engine; tensor-parallel ranks hold different weights.

    Raises:
        OptionError: there are none, or their number was not given.
        PeerError: another engine did not come in time.
    """
    from vllm.distributed.parallel_state import get_dp_group

    group = get_dp_group()
    if group.world_size > 1:
        return group.cpu_group  # type: ignore[no-any-return]
    index = parallel.data_parallel_rank_local
    if replicas is None or index is None:
        raise OptionError(
            "penstock.mode 'shm_cpu' keeps one copy for data-parallel ranks, and this engine is the only one that it "
            "knows of: start vLLM with --data-parallel-size N, and for a dense model, whose ranks vLLM runs as engines "
            'of their own, add how many of them this host has ("replicas": N); or leave the mode out'
        )
    if index >= replicas:
        raise OptionError(
            f"penstock.replicas = {replicas}, and this is engine {index} of this host, counted from 0: write how many "
            f"--data-parallel-size starts here"
        )
    store = _meeting_place(parallel.data_parallel_master_port, index == rank == 0, replicas)
    return ProcessGroup(PrefixStore(f"penstock/replicas/{rank}", store), index, replicas)


def _meeting_place(port: int, keeps_it: bool, replicas: int) -> Store:
    """The store of all workers of the launch, kept by one of them."""
    patience = timedelta(seconds=peer_timeout_s())
    try:
        # The timeout of TCPStore does not end where another program listens at the port and never answers.
        return call_within(
            patience.total_seconds() + GRACE_S,
            lambda: TCPStore(_HOST, port, is_master=keeps_it, timeout=patience, wait_for_workers=False),
        )
    except RuntimeError as error:  # DistNetworkError and DistStoreError are ones
        reason = str(error).splitlines()[0]
        if keeps_it:
            raise PeerError(
                f"the first of {replicas} engines that share one copy (penstock.replicas) cannot open port {port}, "
                f"where they are to meet ({reason}): start vLLM again, which looks for a free one each time"
            ) from error
        raise PeerError(
            f"the {replicas} engines that share one copy (penstock.replicas) did not meet at port {port} within "
            f"{patience.total_seconds():.0f} s ({reason}): one `vllm serve --data-parallel-size` "
            f"has to start all of them. Look at the errors of the first; if it is only slow, raise "
            f"PENSTOCK_PEER_TIMEOUT"
        ) from error
