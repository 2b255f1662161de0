"""From a request to a plan for this machine: its device, its planner, and whether it has room. Allocates nothing.

Functions that need torch import it: without a GPU none of them does, so that a folder that was planned before can be
planned again without it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from headrace.checkpoint.model_folder import draft_folder
from headrace.checkpoint.weight_map import TensorSource, WeightMap
from headrace.config import (
    AUTO,
    Budget,
    Policy,
    Rules,
    Workload,
    as_policy,
    pin_memory_disabled,
    uva_disabled,
)
from headrace.errors import BudgetError, CheckpointError, LimitError, OptionError, OptionTypeError, warn_user
from headrace.formatting import format_size
from headrace.memory.system import DEVICE, PEER, Limits, Needs, read_limits, round_up
from headrace.model.records import Inventory, ModelProfile, StorageInfo
from headrace.plan.build import Planner
from headrace.plan.cached_experts import why_not_cached
from headrace.plan.candidates import MappedFiles, Spill
from headrace.plan.kinds import kind_of, slab_bytes
from headrace.plan.plan import Machine, Plan, assemble
from headrace.plan.rates import Rates
from headrace.plan.speculation import LOOKUP, DraftCost, Speculation, SpeculationForecast, forecast_speculation
from headrace.plan.units import move_on_demand
from headrace.stores.sources import TENSOR_ALIGN_BYTES, DiskOptions
from headrace.transfer.machine_probe import DeviceName, planning_rates

if TYPE_CHECKING:
    import torch
    from torch import nn

    from headrace.checkpoint.safetensors_header import Checkpoint
    from headrace.model.live_tensors import BoundStorage
    from headrace.plan.routing_traces import ExpertHits
    from headrace.ranks.group import RankGroup
    from headrace.runtime.build_time import BuildTimePool

__all__ = [
    "PlanContext",
    "PlanRequest",
    "Target",
    "can_read_in_place",
    "check_limits",
    "describe_device",
    "finalize_plan",
    "free_on_peer",
    "gpu_memory_kind",
    "make_planner",
    "needs_of",
    "not_in_files",
    "peer_of",
    "require_kinds",
    "require_one_process",
]

_log = logging.getLogger(__name__)

# Of free host memory, at most: what a plan leaves to the process itself.
_HEADROOM_BYTES = 1 << 30
# Pieces of tensors that are read in place, one mapping each: of the 65,530 that Linux gives a process.
_MAX_MAPPINGS = 48_000
# Of free device memory, which --device-memory auto leaves to the display, to other programs and to fragmentation.
_AUTO_MARGIN_BYTES = 1 << 30
_VECTOR_BYTES = 16  # of SSE, the shortest of an x86 CPU
_MIB = 2**20


def require_kinds(device: object, disk: object) -> None:
    """Refuse a ``device=`` or ``disk=`` of a wrong kind, before anything is read or built.

    Raises:
        OptionError, OptionTypeError: a text that names no device; another type.
    """
    if disk is not None and not isinstance(disk, DiskOptions):
        raise OptionTypeError(
            f"disk: expected headrace.DiskOptions, such as DiskOptions(direct=True), found {type(disk).__name__} "
            f"{disk!r}"
        )
    if device is None or device == "cpu":
        return
    import torch

    expected = "expected 'cpu', 'cuda', 'cuda:N' or a torch.device"
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise OptionTypeError(f"device: {expected}, found {type(device).__name__} {device!r}")
    if isinstance(device, str):
        try:
            torch.device(device)
        except RuntimeError:  # its message lists all devices that torch has a name for
            raise OptionError(f"device {device!r}: {expected}") from None


def describe_device(device: torch.device | DeviceName) -> Machine:
    """What a plan made for ``device`` is bound to."""
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


def _warn_of_memory(plan: Plan, device: torch.device) -> None:
    """Warn where offloading to host memory frees nothing, because the GPU computes in it."""
    kind = gpu_memory_kind(device)
    if kind == "shared" and plan.kind.on_host and plan.offloaded_bytes > plan.spilled_bytes:
        warn_user(
            f"{device} computes in the host's memory, so offloading weights to host memory frees nothing: store them "
            f"in files (mode 'disk', --offload-mode disk), or leave the model resident"
        )
    elif kind == "coherent":
        _log.info("%s reads host memory coherently; `headrace probe` measures how fast", device)


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


def free_on_peer(plan: Plan, device: torch.device | DeviceName) -> int | None:
    """Memory that can be taken on the peer; ``None`` where ``plan`` has no units there."""
    return read_limits(peer_of(device)).device_free_bytes if plan.peer_bytes else None


# -- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of :func:`headrace.make_plan`, and what a caller adds that has read or built the model itself.

    Attributes:
        inventory: of ``model`` in its present state; taken by default.
        unstreamable: storages that the files do not hold in this form (:func:`not_in_files`).
        ranks: those that share the weights.
        pool: where weights were put while the model was built.
        speculation: what guesses tokens while the model generates; its draft is part of a budget.
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
    unstreamable: Collection[str] = ()
    ranks: RankGroup | None = None
    pool: BuildTimePool | None = None
    speculation: Speculation | None = None

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
        return self.given.workload if isinstance(self.given, Budget) else self.workload or Workload()


@dataclass(frozen=True)
class Target:
    """Where a plan is to be carried out; ``rates`` are ``None`` for this machine, whose own count."""

    device: torch.device | DeviceName
    machine: Machine
    rates: Rates | None = None


@dataclass(frozen=True)
class PlanContext:
    """A request, with the model and the machine that it is about as names and sizes.

    Attributes:
        read_profile: returns the profile of the model; a finished plan needs none.
        weights: the checkpoint.
        name: of the model, for output.
        module: the model; on ``meta`` for a folder, and ``None`` where the folder was planned before.
        bound: the live tensors of every storage, by storage name; empty for a folder, of which no model is built.
        hits: of cached experts, where they were recorded.
        draft: of the draft model, if one guesses tokens.
        automatic: what a budget of ``"auto"`` was taken for, in words; empty for others.
    """

    request: PlanRequest
    target: Target
    inventory: Inventory
    read_profile: Callable[[], ModelProfile]
    weights: WeightMap | None = None
    name: str | None = None
    module: nn.Module | None = None
    bound: Mapping[str, BoundStorage] = field(default_factory=dict, repr=False)
    hits: ExpertHits | None = None
    draft: DraftCost | None = None
    automatic: str = ""

    @cached_property
    def planner(self) -> Planner:
        """Of the model, for the machine."""
        request, target = self.request, self.target
        split = request.num_ranks if request.splits_units else 1
        facts = (self.inventory, self.read_profile(), target.device, self.weights, target.rates, request.unstreamable)
        planner = make_planner(*facts, request.disk, split)
        return planner if self.hits is None else replace(planner, hits=self.hits)

    def sized(self, guesser_bytes: int = 0) -> PlanContext:
        """The same with a size in place of ``"auto"``, or with a plan that offloads nothing if the model fits it.

        ``guesser_bytes``: of a draft or heads beside the model.

        Raises:
            OptionError: no GPU, or one whose memory is not known.
        """
        given, target = self.request.given, self.target
        if not isinstance(given, Budget) or given.device_memory != AUTO:
            return self
        free_bytes = target.machine.device_bytes
        if target.device.type == "cuda" and target.rates is None:
            free_bytes = read_limits(target.device).device_free_bytes
        if target.device.type != "cuda" or free_bytes is None:
            raise OptionError(
                f"--device-memory auto is what a GPU has free, and of {target.machine} that is not known: give a size, "
                f'such as 8GiB, or plan for a card (`headrace plan --machine 4090`, machine="4090")'
            )
        free_bytes += sum(storage.info.num_bytes for storage in self.bound.values() if storage.home == target.device)
        if self.request.ranks is not None:  # which have to come to one plan
            free_bytes = min(self.request.ranks.exchange("free memory", free_bytes))
        profile, num_bytes = self.read_profile(), max(1, free_bytes - _AUTO_MARGIN_BYTES - guesser_bytes)
        workload = replace(
            given.workload, context=min(given.workload.context, profile.max_context or given.workload.context)
        )
        beside = profile.workload_bytes(max(workload.batch_sizes), workload.context)
        policy: Budget | Plan = replace(given, device_memory=num_bytes, workload=workload)
        fits = self.inventory.num_bytes + beside <= num_bytes and not given.rules
        if fits:
            plan = assemble(self.inventory, [], 0, given.mode or "cpu")
            policy = replace(plan, made_for=target.machine, context=workload.context)
        text = (
            f"auto: {format_size(num_bytes)} of device memory, which leaves {format_size(_AUTO_MARGIN_BYTES)} of what "
            f"is free{f', beside {format_size(guesser_bytes)} for what guesses' if guesser_bytes else ''}; "
            f"{format_size(beside)} of it for {max(workload.batch_sizes)} x {workload.context} tokens"
            f"{'; the weights fit, and nothing is offloaded' if fits else ''}"
        )
        _log.info(text)
        request = replace(self.request, policy=policy, workload=workload)
        return replace(self, request=request, automatic=text, read_profile=lambda: profile)

    def with_draft(self, open_draft: Callable[..., PlanContext], heads_cost: Callable[..., DraftCost]) -> PlanContext:
        """:meth:`sized`, beside the draft that the request names, all of it resident: a budget loses what that takes.

        Args:
            open_draft: reads the draft in the folder that is the model of its argument.
            heads_cost: of the heads of multi-token prediction that the model of its argument, a context, has itself.

        Raises:
            BudgetError: nothing is left.
        """
        context, speculation = self.sized(), self.request.speculation
        if speculation is None or speculation.guesser == LOOKUP:
            return context
        request, policy = context.request, context.request.given
        if speculation.draft is None:
            cost = heads_cost(context)
        else:
            folder, alone = draft_folder(speculation.draft), Workload([1], request.expected.context)
            draft = open_draft(PlanRequest(folder, None, alone, request.machine, device=request.device))
            cost = DraftCost.of(draft.planner, draft.plan(), request.expected.context)
        if is_all_resident := isinstance(policy, Plan) and bool(context.automatic):  # perhaps not beside the guesser
            context = self.sized(cost.device_bytes)
            request, policy = context.request, context.request.given
        if speculation.draft is None and isinstance(policy, Budget | Rules):
            # Each head multiplies with it, and would have it copied once more.
            policy = replace(policy, rules=(("lm_head", "resident"), *policy.rules))
        if isinstance(policy, Budget) and not is_all_resident:
            left = policy.num_bytes - cost.device_bytes
            policy = replace(policy, device_memory=max(1, left))
            if left < 1:
                least = replace(context, request=replace(request, policy=policy), draft=cost)
                least.plan()  # raises, unless the least is this one byte
                raise least._beside_draft(BudgetError("it needs a byte", 1))
        return replace(context, request=replace(request, policy=policy), draft=cost)

    def forecast_speculation(self, plan: Plan, speculation: Speculation) -> SpeculationForecast:
        """What guesses bring to ``plan``."""
        at, on_gpu = self.request.expected.context, self.target.device.type == "cuda"
        return forecast_speculation(speculation, self.planner, plan, at, self.draft, on_gpu=on_gpu)

    def plan(self) -> Plan:
        """The plan that was asked for, checked against model, files and machine."""
        try:
            return self._plan()
        except BudgetError as error:
            if self.draft is None:
                raise
            raise self._beside_draft(error) from error

    def _beside_draft(self, error: BudgetError) -> BudgetError:
        """``error`` about what a draft leaves of the budget, with all of the budget in its place."""
        draft_bytes = 0 if self.draft is None else self.draft.device_bytes
        least = error.minimum_bytes + draft_bytes
        host = f"; of what the draft leaves, {error}" if "--host-memory" in str(error) else ""
        return BudgetError(
            f"the draft takes {format_size(draft_bytes)} of the budget, and the model needs at least "
            f"{format_size(error.minimum_bytes)} beside it: use --device-memory {-(-least >> 20)}MiB or more, a "
            f"smaller draft, or --speculate lookup, which takes none{host}",
            least,
        )

    def _plan(self) -> Plan:
        given, target = self.request.given, self.target
        if isinstance(given, Plan):
            plan = given
        else:
            planner = self.planner
            plan = assemble(self.inventory, [], 0, planner.default_mode) if given is None else planner.plan(given)
            plan = replace(plan, made_for=target.machine)
        plan = finalize_plan(plan, self.inventory, target.device, target.machine, self.weights, self.request.num_ranks)
        if plan.peer_bytes and target.rates is None:
            require_one_process(self.request.ranks)
        if plan.cached and self.module is not None:
            from headrace.experts.rows import require_rows

            for layer in plan.cached:
                require_rows(self.module.get_submodule(layer.module_fqn))
        self._check_sources(plan)
        return plan

    @property
    def loads_files(self) -> bool:
        """Whether weights are read from files whatever the plan."""
        return not self.bound or any(storage.on_meta for storage in self.bound.values())

    def _check_sources(self, plan: Plan) -> None:
        """Refuse stores that do not fit the tensors; warn of options about files that are not read.

        Raises:
            CheckpointError: a tensor that ``plan`` streams from files has another form there.
            OptionError: mode ``meta`` for a tensor that has bytes.
        """
        request, given = self.request, self.request.given
        for name, placement in plan.placements.items():
            kind = placement.kind
            if kind is not None and kind.in_files and self.weights is not None:
                self.weights.source(self.inventory.by_name[name])
            loses_bytes = kind is not None and not kind.has_bytes
            if loses_bytes and name in self.bound and not self.bound[name].on_meta:
                raise OptionError(
                    f"mode 'meta' keeps no bytes, and {name} has some; build the model under torch.device('meta'), or "
                    f"use mode 'cpu' or 'disk'"
                )
        # With files to spill to, a checkpoint has shaped the choice of the plan even if no unit ended up in one.
        may_spill = isinstance(given, Budget) and given.mode is None and self.planner.spill is not None
        if given is None or may_spill or plan.reads_files or self.loads_files:
            return
        for name, value in (("checkpoint", self.weights), ("disk", request.disk)):
            if value is not None:
                warn_user(
                    f"{name}=... has no effect: mode {plan.mode!r} takes the weights from the model itself, not from "
                    f"files"
                )

    def require_room(
        self, plan: Plan, moving: Collection[str] = (), pinned_already: int = 0, workload_bytes: int = 0
    ) -> None:
        """Refuse ``plan`` if this machine, or of another one the device, has no room for what it adds.

        Args:
            moving: storages that are not in the memory of the device although their tensors are on it.
            pinned_already: bytes that stay in the pinned memory where they are.
            workload_bytes: of caches and activations.

        Raises:
            LimitError: see :func:`check_limits`.
        """
        device, bound, on_gpu = self.target.device, self.bound, self.target.device.type == "cuda"
        names = {storage.name for storage in self.inventory.storages}
        here = {name for name, storage in bound.items() if storage.home == device}.difference(moving)
        on_meta = {name for name in names if name not in bound or bound[name].on_meta}
        needs = needs_of(plan, on_gpu=on_gpu, elsewhere=names - here, on_meta=on_meta)
        beside = 0 if on_gpu else workload_bytes
        if plan.kind.in_files and not on_gpu and self.weights is not None:
            beside += sum(self.weights.source(self.inventory.by_name[name]).joined_bytes for name in plan.uva)
        needs = Needs(
            needs.device_bytes + (workload_bytes if on_gpu else 0),
            max(0, needs.host_bytes - pinned_already) + beside,
            max(0, needs.pinned_bytes - pinned_already),
            needs.peer_bytes,
        )
        limits = Limits(self.target.machine.device_bytes)
        if self.target.rates is None:
            limits = read_limits(device, pinned_bytes=needs.pinned_bytes)
            limits = replace(limits, peer_free_bytes=free_on_peer(plan, device))
        check_limits(plan, limits, needs)


def make_planner(
    inventory: Inventory,
    profile: ModelProfile,
    device: torch.device | DeviceName,
    weights: WeightMap | None = None,
    rates: Rates | None = None,
    unstreamable: Collection[str] = (),
    disk: DiskOptions | None = None,
    num_ranks: int = 1,
) -> Planner:
    """The planner for the model of ``inventory`` and ``profile`` on ``device``.

    A budget is planned with ``rates``, or else the kept probe of this machine, or nominal rates if there is none; with
    the caches and activations that follow from the model's configuration; and with reads in place where the device can
    address host memory. Given ``weights``, a CPU streams from its files, and for a GPU what host memory has no room for
    stays in them. Free host memory counts only for this machine, not with the ``rates`` of another. ``disk``: how a CPU
    reads files, which decides the rate. Each of several ranks that split units plans for itself, and all have to come
    to one plan, so nothing counts that they may see differently: no free host memory.
    """
    on_gpu = device.type == "cuda"
    if not on_gpu:  # which has no graphs
        profile = replace(profile, kernels_per_step=None)
    stored_bytes = {} if weights is None else _converted(inventory, weights)
    spill = None
    if weights is not None and on_gpu and num_ranks == 1 and not pin_memory_disabled():
        # The process that reads files for a GPU converts nothing: it runs without torch.
        not_readable = {s.name for s in inventory.storages if s.name in stored_bytes or not _streams(s, weights)}
        free_bytes = None if rates is not None else _free_host_bytes(device, inventory)
        spill = Spill(frozenset(not_readable.union(unstreamable)), free_bytes)
    in_place, triton = on_gpu and can_read_in_place(device), has_triton(device)
    rates = rates or planning_rates(device, disk is not None and bool(disk.direct))
    can_cache = in_place and triton and rates.fetch_bytes_per_s is not None
    readers = set(profile.row_readers) if can_cache else set()
    experts = {s.name for s in inventory.storages if not readers.isdisjoint(s.modules)}
    return Planner(
        inventory,
        rates,
        profile,
        zero_copy=in_place,
        has_triton=triton,
        default_mode="cpu" if weights is None or on_gpu else "disk",
        unstreamable=unstreamable,
        stored_bytes=stored_bytes,
        spill=spill,
        mapped=None if weights is None or on_gpu else _mapped_files(inventory, weights),
        num_ranks=num_ranks,
        cacheable=frozenset(experts) if experts and not why_not_cached(inventory, experts) else frozenset(),
    )


def not_in_files(inventory: Inventory, weights: WeightMap) -> list[str]:
    """Storages that are made or rearranged while loading, so that no file can stand in for them."""
    return [s.name for s in inventory.storages if weights.sources.keys().isdisjoint(s.names)]


def _mapped_files(inventory: Inventory, weights: WeightMap) -> MappedFiles:
    """Which storages a CPU cannot read in place in the files, and the memory that reading the others takes."""
    refused: dict[str, str] = {}
    joined_bytes: dict[str, int] = {}
    mappings = 0
    for storage, source in _sources_of(inventory, weights):
        why, pieces = source.why_not_mappable, len(source.parts)
        misaligned = source.parts[0].tensor.offset % TENSOR_ALIGN_BYTES
        # What is tried are products; a convolution over one dimension has a weight of three, as fused experts have.
        convolves = any(inventory.modules[module].startswith("Conv") for module in storage.modules)
        is_scalar, itemsize = not source.shape, source.dtype.itemsize
        untried = convolves or len(source.shape) > 3 or (itemsize < 2 and not is_scalar)
        # MKL on an AMD EPYC (Zen 4) rounds such products differently; 16-bit types are equal at every address.
        differs = not is_scalar and itemsize > 2 and misaligned % _VECTOR_BYTES > 0
        if not why and misaligned and (untried or differs) and not storage.is_lookup:
            why = (
                f"starts {misaligned} bytes after a multiple of {TENSOR_ALIGN_BYTES} in its file, where kernels "
                f"for {len(source.shape)} dimensions of {source.dtype} may round differently"
            )
        if not why and pieces > 1:
            mappings += pieces
            if mappings > _MAX_MAPPINGS:
                why = f"lies in {pieces} pieces in the checkpoint, more than a process may map (vm.max_map_count)"
        if why:
            refused[storage.name] = why
        elif source.joined_bytes:
            joined_bytes[storage.name] = source.joined_bytes
    return MappedFiles(refused, joined_bytes)


def _converted(inventory: Inventory, weights: WeightMap) -> dict[str, int]:
    """Bytes in the files of every storage that has another dtype there."""
    return {
        storage.name: source.file_bytes for storage, source in _sources_of(inventory, weights) if source.is_converted
    }


def _sources_of(inventory: Inventory, weights: WeightMap) -> Iterator[tuple[StorageInfo, TensorSource]]:
    """The storages that files hold, under any of their names."""
    for storage in inventory.storages:
        source = next((weights.sources[name] for name in storage.names if name in weights.sources), None)
        if source is not None:
            yield storage, source


def _refuse_converting(plan: Plan, converted: Mapping[str, int]) -> None:
    """Refuse to have a GPU read units from files that hold them in another dtype."""
    names = [entry.storage for unit in plan.staged_units for entry in unit.entries if entry.storage in converted]
    if names:
        raise OptionError(
            f"{names[0]} and {len(names) - 1} others have another dtype in the files than in the model, and a GPU "
            f"reads files without converting: store them in host memory, where they are converted once (no mode, or "
            f"--offload-mode cpu), or save the model in its dtype first: model.save_pretrained(FOLDER)"
        )


def _streams(storage: StorageInfo, weights: WeightMap) -> bool:
    """Whether mode ``disk`` can read ``storage``."""
    if weights.sources.keys().isdisjoint(storage.names):
        return False  # the error would name the nearest of all names in the files, which takes 0.1 s for 45,000 of them
    try:
        weights.source(storage)
    except CheckpointError:
        return False
    return True


def _free_host_bytes(device: torch.device | DeviceName, inventory: Inventory) -> int | None:
    """Host memory that units may take unless the user sets a limit (``host_memory``)."""
    limits = read_limits(device, pinned_bytes=inventory.num_bytes)
    host = [limits.host_available_bytes, limits.cgroup_available_bytes, limits.memlock_bytes]
    free_bytes = min((found for found in host if found is not None), default=None)
    if free_bytes is None:
        return None
    # Residents pass through host memory one at a time, and the process itself needs some.
    staging = max((storage.num_bytes for storage in inventory.storages), default=0)
    return max(0, free_bytes - staging - min(_HEADROOM_BYTES, free_bytes // 16))


def finalize_plan(
    plan: Plan,
    inventory: Inventory,
    device: torch.device | DeviceName,
    machine: Machine,
    weights: WeightMap | None = None,
    num_ranks: int = 1,
) -> Plan:
    """``plan`` checked against model, files and ``machine``, in the form that ``num_ranks`` of it can carry out."""
    plan.check(inventory)
    plan.check_machine(machine)
    if device.type == "cuda" and weights is not None and plan.staged_units:
        _refuse_converting(plan, _converted(inventory, weights))
    if plan.cached and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise OptionError(
            f"experts of {plan.cached[0].module_fqn} are cached, and the device is a CPU; expected a CUDA device, "
            f"which has memory of its own (on a CPU use experts=uva)"
        )
    if (plan.cached or plan.coded_units) and not has_triton(device):
        raise OptionError(
            "cached experts and codecs are run by Triton, which is not installed: install it (pip install triton; on "
            "Windows triton-windows), or use experts=uva and codec='none' (--offload-codec none)"
        )
    if plan.cached and not can_read_in_place(device):
        raise OptionError(
            f"experts of {plan.cached[0].module_fqn} are cached, for which {device} has to address host memory; "
            f"expected HEADRACE_DISABLE_UVA and HEADRACE_DISABLE_PIN_MEMORY not to be set"
        )
    if device.type == "cuda" and not isinstance(device, DeviceName):
        _warn_of_memory(plan, device)
    if plan.peer_bytes and (device.type == "cpu" or not isinstance(device, DeviceName)):
        peer_of(device)
    num_ranks = num_ranks if plan.kind.is_split else 1
    if plan.uva and (plan.kind.is_split or not can_read_in_place(device)):  # split: no rank has a whole tensor
        moved = move_on_demand(inventory, plan)
        facts: dict[str, Any] = {"context": plan.context, "budget_bytes": plan.budget_bytes}
        plan = replace(moved, model_name=plan.model_name, made_for=plan.made_for, **facts)
    plan = plan if plan.num_ranks == num_ranks else replace(plan, num_ranks=num_ranks)
    if plan.offloaded_bytes and plan.device_bytes > plan.weight_bytes:
        warn_user(
            f"the plan takes {format_size(plan.device_bytes)} of device memory, more than all weights, which have "
            f"{format_size(plan.weight_bytes)}: leave the model resident, or use fewer slots (prefetch_step, "
            f"expert_slots)"
        )
    _log.info("plan: %r, %d bytes moved per forward, for %s", plan, plan.moved_bytes, machine)
    return plan


def require_one_process(ranks: RankGroup | None) -> None:
    """Refuse units on another GPU where that may be another process's own."""
    import torch.distributed as dist

    num_processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks is not None or num_processes > 1:
        raise OptionError(
            f"peer_memory is for one process beside an idle GPU, and this is one of {num_processes}: let them share "
            f"their memory (mode 'sharded_gpu' with group=), or leave peer_memory out (--peer-memory)"
        )


# -- what a plan needs of the machine ---------------------------------------------------------------------------------


def needs_of(plan: Plan, *, on_gpu: bool, elsewhere: Collection[str] = (), on_meta: Collection[str] = ()) -> Needs:
    """What ``plan`` adds to what is in use, before anything old is freed; memory that ranks share counts once.

    Args:
        on_gpu: compute runs on a GPU; on a CPU its memory is host memory.
        elsewhere: names of the storages that are not on the device yet; as residents they have to move there.
        on_meta: those of them that have no bytes yet and are read from files; others are adopted by a CPU's store.
    """
    moved = [num_bytes for name, num_bytes in plan.resident.items() if name in elsewhere]
    experts_bytes = sum(layer.host_bytes for layer in plan.cached)
    if not on_gpu:
        stored = plan.cache_bytes + experts_bytes
        for kind, units in plan.units_by_kind.items():
            sizes = {entry.storage: entry.num_bytes for unit in units for entry in unit.entries}
            stored += kind.host_bytes(plan, units, {**(plan.uva if kind is plan.kind else {}), **sizes}, on_meta)
        return Needs(host_bytes=plan.slots_bytes + sum(moved) + stored)
    in_place = sum(slab_bytes([size]) for size in plan.uva.values())  # a GPU cannot address a mapped file
    pinned = experts_bytes + sum(
        kind.pinned_bytes(plan, units, in_place if kind is plan.kind else 0)
        for kind, units in plan.units_by_kind.items()
    )
    parts = sum(kind.device_bytes(plan, units) for kind, units in plan.units_by_kind.items())
    staging = max(moved, default=0)  # residents pass through host memory one at a time
    return Needs(
        device_bytes=plan.slots_bytes + slab_bytes(moved) + parts + plan.cache_bytes,
        host_bytes=pinned + staging,
        pinned_bytes=0 if pin_memory_disabled() else pinned,
        peer_bytes=plan.peer_bytes,
    )


def _offloaded(plan: Plan) -> Iterator[tuple[str, int]]:
    yield from plan.uva.items()
    yield from ((entry.storage, entry.num_bytes) for unit in plan.units for entry in unit.entries)


def check_limits(plan: Plan, limits: Limits, needs: Needs) -> None:
    """Refuse ``plan`` if ``limits`` (:func:`read_limits`) have no room for its ``needs`` (:func:`needs_of`); pure.

    Raises:
        LimitError: names the limit that misses most, by how much, and a device-memory budget that should fit.
    """
    shortage = limits.shortage(needs)
    if shortage is None:
        return
    limit, needed, available, fix = shortage
    missing = needed - available
    on_gpu, budget = limits.device_free_bytes is not None, _fitting_budget(plan, limit, missing, limits, needs)
    advice = "Offload less or in smaller units"
    if budget is not None:
        size = f"{budget // _MIB}MiB" if budget % _MIB == 0 else f"{budget}B"
        which = "larger" if budget > plan.device_bytes else "smaller"
        advice = f"A {which} budget should fit, about --device-memory {size}; use it"
    if plan.kind.on_host and not (on_gpu and limit in (DEVICE, PEER)):
        fix += f", or store the weights in the files (--offload-mode disk{', no codec' if plan.coded_units else ''})"
        fix += ", or what does not fit: pass checkpoint=FOLDER and no mode" if on_gpu else ""
        fix += " or codec" if on_gpu and plan.coded_units else ""
    message = (
        f"the plan needs {format_size(needed)} ({needed} bytes) of {limit}, and {format_size(available)} ({available} "
        f"bytes) can be had: {format_size(missing)} ({missing} bytes) too little. {advice}, or {fix}; nothing was "
        f"allocated"
    )
    raise LimitError(message, limit, needed, available, budget)


def _fitting_budget(plan: Plan, limit: str, missing: int, limits: Limits, needs: Needs) -> int | None:
    """A device-memory budget that should fit, in whole MiB where that is possible; ``None`` if none would.

    A first-order estimate: every byte of weights that is not in one memory is in the other.
    """
    if limit == PEER:
        return None
    less = max(0, plan.device_bytes - missing)
    smaller = less // _MIB * _MIB or less or None
    if limits.device_free_bytes is None:  # on a CPU both are host memory
        return smaller
    if limit == DEVICE:
        host = (limits.host_available_bytes, limits.cgroup_available_bytes)
        spare = min((found - needs.host_bytes for found in host if found is not None), default=missing)
        return None if plan.kind.on_host and spare < missing else smaller
    # Residents pass through host memory one storage at a time; a rank holds only its part of a split unit.
    staging = max((num_bytes for _, num_bytes in _offloaded(plan)), default=0)
    more = (missing + staging) * plan.num_ranks  # 1 where no unit is split
    if not plan.kind.on_host or more > min(plan.offloaded_bytes, limits.device_free_bytes - needs.device_bytes):
        return None
    return round_up(plan.device_bytes + more, _MIB)
