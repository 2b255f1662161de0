"""Arguments of :func:`penstock.offload` of a wrong kind: refused by name, before anything makes use of them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from penstock.errors import OptionError, OptionTypeError
from penstock.stores.file_reader import DiskOptions

__all__ = ["require_group", "require_kinds"]


def require_kinds(device: object, disk: object) -> None:
    """Look at what was given; ``None`` means not given, and is fine.

    Args:
        device: where compute runs; whether it is here is asked later.
        disk: how files are read.

    Raises:
        OptionTypeError: of another Python type.
        OptionError: the name of no device.
    """
    _require_device(device)
    if disk is not None and not isinstance(disk, DiskOptions):
        raise OptionTypeError(
            f"disk: expected penstock.DiskOptions, such as DiskOptions(direct=True), found {_shown(disk)}"
        )


def require_group(group: object) -> None:
    """Raise ``OptionTypeError`` for what is no process group: what ``new_group`` gives to no member is none, either."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise OptionTypeError(
            f"group: expected a process group, such as torch.distributed.group.WORLD after "
            f"torch.distributed.init_process_group, found {_shown(group)}"
        )


def _require_device(device: object) -> None:
    expected = "expected 'cpu', 'cuda', 'cuda:N' or a torch.device"
    if device is not None and (isinstance(device, bool) or not isinstance(device, torch.device | str | int)):
        raise OptionTypeError(f"device: {expected}, found {_shown(device)}")
    if not isinstance(device, str):
        return
    try:
        torch.device(device)
    except RuntimeError:  # a list of all devices that torch has a name for
        raise OptionError(f"device {device!r}: {expected}") from None


def _shown(value: object) -> str:
    return f"{type(value).__name__} {value!r}"
