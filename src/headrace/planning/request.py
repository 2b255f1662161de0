"""The request for a plan, checked, and the device that it is for. Names and facts; nothing is allocated.

Functions that need torch import it: without a GPU none of them does, so that a folder that was planned before can be
planned again without it.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from headrace.config import Budget, Policy, Workload, as_policy, pin_memory_disabled, uva_disabled
from headrace.errors import OptionError, OptionTypeError
from headrace.model.records import Inventory, ModelProfile
from headrace.plan.kinds import kind_of
from headrace.plan.plan import DeviceName, Machine, Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from headrace.checkpoint.safetensors_header import Checkpoint
    from headrace.checkpoint.weight_map import WeightMap
    from headrace.plan.prediction import Engine
    from headrace.plan.rates import Rates
    from headrace.plan.speculation import Speculation
    from headrace.ranks.group import RankGroup
    from headrace.stores.file_reads import DiskOptions


_ANY = Workload()


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of :func:`headrace.make_plan`, and what a caller adds that has read or built the model itself.

    Attributes:
        inventory: inventory of ``model`` in its present state; taken by default.
        profile: profile of a ``model`` that has no config.
        unstreamable: storages that the files do not hold in this form (:func:`not_in_files`).
        ranks: ranks that share the weights.
        speculation: what guesses tokens while the model generates; its draft is part of a budget.
        engine: the engine whose kernels predictions are about; ``None``: ``generate``, compared with vLLM.
        host_bandwidth: GB/s of the memory of ``machine``.
    """

    model: Any
    policy: Policy | Plan | str | int | None
    workload: Workload | None = None
    machine: str | os.PathLike[str] | None = None
    checkpoint: WeightMap | Checkpoint | str | os.PathLike[str] | None = None
    dtype: torch.dtype | str | None = None
    device: torch.device | str | None = None
    disk: DiskOptions | None = None
    num_ranks: int = 1
    expert_trace: str | os.PathLike[str] | None = None
    inventory: Inventory | None = None
    profile: ModelProfile | None = None
    unstreamable: Collection[str] = ()
    ranks: RankGroup | None = None
    speculation: Speculation | None = None
    engine: Engine | None = None
    host_bandwidth: float | None = None

    @cached_property
    def given(self) -> Policy | Plan | None:
        """The policy as an object, with the workload."""
        if self.policy is None or isinstance(self.policy, Plan):
            return self.policy
        policy, workload = as_policy(self.policy), self.workload
        if workload is None or not isinstance(policy, Budget) or policy.workload == workload:
            return policy
        if policy.workload != Budget(policy.device_memory).workload:
            raise OptionError(f"workload: the budget has {policy.workload}, found {workload} beside it; leave one out")
        return replace(policy, workload=workload)

    @property
    def splits_units(self) -> bool:
        """Whether a store was asked for of which each rank has a part of every unit."""
        mode = getattr(self.given, "mode", None)
        return mode is not None and kind_of(mode).is_split

    @property
    def expected(self) -> Workload:
        """The workload that predictions are about."""
        return self.given.workload if isinstance(self.given, Budget) else self.workload or _ANY


@dataclass(frozen=True)
class Target:
    """Machine that a plan is for; ``rates`` are ``None`` for this machine, whose own count."""

    device: torch.device | DeviceName
    machine: Machine
    rates: Rates | None = None

    @classmethod
    def of(cls, device: torch.device | DeviceName) -> Target:
        """``device`` of this machine."""
        return cls(device, describe_device(device))


def require_kinds(device: object, disk: object) -> None:
    """Refuse a ``device=`` or ``disk=`` of a wrong kind, before anything is read or built.

    Raises:
        OptionError, OptionTypeError: a text that names no device; another type.
    """
    if disk is not None:
        from headrace.stores.file_reads import DiskOptions

        if not isinstance(disk, DiskOptions):
            raise OptionTypeError(
                f"disk: expected headrace.DiskOptions, such as DiskOptions(direct=True), found {type(disk).__name__} "
                f"{disk!r}"
            )
    if device is not None and device != "cpu":
        _require_device(device)


def _require_device(device: object) -> None:
    import torch

    expected = "expected 'cpu', 'cuda', 'cuda:N' or a torch.device"
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise OptionTypeError(f"device: {expected}, found {type(device).__name__} {device!r}")
    if isinstance(device, str):
        try:
            torch.device(device)
        except RuntimeError:  # its message lists all devices that torch has a name for
            raise OptionError(f"device {device!r}: {expected}") from None


# -- the device -------------------------------------------------------------------------------------------------------


def compute_device(model: nn.Module | None, device: torch.device | str | None = None) -> torch.device:
    """Device on which ``model`` will run: ``device``, or where it is; if that is ``meta``, a GPU where there is one.

    Where all parameters are on ``meta``, the devices of buffers do not count.

    Raises:
        OptionError: tensors on several devices and none named; a device that is neither a CPU nor CUDA.
    """
    import torch

    model = torch.nn.Module() if model is None else model
    parameters = list(model.parameters())
    on_meta = bool(parameters) and all(parameter.is_meta for parameter in parameters)
    tensors = [] if on_meta else [*parameters, *model.buffers()]
    found = sorted({str(tensor.device) for tensor in tensors if not tensor.is_meta})
    if device is None and len(found) > 1:
        raise OptionError(f"the model's tensors are on {', '.join(found)}; pass the one to run on as device=")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    target = torch.device(device if device is not None else found[0] if found else default)
    if target.type not in ("cpu", "cuda"):
        raise OptionError(f"device {target}: expected a CPU or a CUDA device")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            f"device {target}: torch sees no CUDA device here; leave device out to run on the CPU; "
            f"headrace.make_plan(..., machine=...) plans for a machine that has one"
        )
    # With its index, because it is compared with the devices of tensors, which always have one.
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return target


def describe_device(device: torch.device | DeviceName) -> Machine:
    """Description of the hardware that a plan made for ``device`` is bound to."""
    if device.type != "cuda":
        return Machine(device.type)
    import torch

    facts = torch.cuda.get_device_properties(device.index)
    return Machine(facts.name, facts.total_memory)


def gpu_memory_kind(device: torch.device | DeviceName) -> Literal["own", "shared", "coherent"]:
    """Whose memory a GPU computes in: its own; the host's (integrated GPUs, GB10); its own, with the host's linked
    coherently (GH200, GB200). A CPU's is the host's."""
    if device.type != "cuda":
        return "shared"
    import torch

    if not torch.cuda.is_available():  # planned for, and not here
        return "own"
    if torch.cuda.get_device_properties(device.index).is_integrated:
        return "shared"
    try:
        driver: Any = import_module("cuda.bindings.driver")
    except ImportError:  # a torch that does not bring it: nothing but the log depends on it
        return "own"
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
    code, is_coherent = driver.cuDeviceGetAttribute(attribute, device.index or 0)
    return "coherent" if int(code) == 0 and is_coherent else "own"


def can_read_in_place(device: torch.device | DeviceName) -> bool:
    """Whether compute on ``device`` may address host memory; memory that is not pinned has no address on a GPU."""
    return device.type != "cuda" or not (uva_disabled() or pin_memory_disabled())


def has_triton(device: torch.device | DeviceName) -> bool:
    """Whether ``device`` can run the kernels that decode weights and fetch experts; of another machine: assumed."""
    return device.type != "cuda" or isinstance(device, DeviceName) or find_spec("triton") is not None


def peer_of(device: torch.device | DeviceName) -> torch.device:
    """The GPU whose memory holds units beside that of ``device``: the next one that ``device`` can address.

    Raises:
        OptionError: there is none.
    """
    if device.type != "cuda":
        raise OptionError(
            "peer_memory: expected a GPU as the device, and another one whose memory holds units, found a CPU; leave "
            "it out (--peer-memory)"
        )
    import torch

    count, here = torch.cuda.device_count(), device.index or 0
    for other in ((here + step) % count for step in range(1, count)):
        if torch.cuda.can_device_access_peer(here, other):
            return torch.device("cuda", other)
    raise OptionError(
        f"peer_memory: expected another GPU whose memory {device} can address (nvidia-smi topo -p2p r), found none "
        f"among {count}; leave it out (--peer-memory), or let CUDA_VISIBLE_DEVICES name one"
    )
