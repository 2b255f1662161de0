"""The processes that a launcher such as torchrun started together, for stores that span processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config import Mode
from penstock.errors import OptionError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["process_group"]


def process_group(mode: Mode, device: torch.device) -> ProcessGroup | None:
    """The group of all ranks where ``mode`` shares a host's memory, else ``None``; each rank gets its own GPU.

    Raises:
        OptionError: this process was started alone, or ``mode`` needs more than a launcher gives.
    """
    if mode == "sharded_gpu":  # of a plan that a program saved
        raise OptionError(
            f"the plan's mode is {mode}, which needs a group of GPUs that a program passes to penstock.offload: carry "
            f"it out there, or make a plan for the command line with --offload-mode shm_cpu or cpu"
        )
    if mode != "shm_cpu":
        return None
    import torch.distributed as dist

    if not dist.is_torchelastic_launched():
        raise OptionError(
            f"--offload-mode {mode} shares one copy of the weights between processes, and this one was started alone: "
            f"start several with `torchrun --nproc-per-node N -m penstock ...`, or use --offload-mode cpu"
        )
    if not dist.is_initialized():
        dist.init_process_group("gloo")  # only its key-value store is used: no memory of a GPU
    if device.type == "cuda" and device.index is None:
        import torch

        torch.cuda.set_device(dist.get_node_local_rank())
    return dist.group.WORLD
