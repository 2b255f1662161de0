"""From a request about a model to a plan for its machine: :class:`PlanContext`. Allocates nothing of the model.

Functions that need torch import it: without a GPU none of them does, so that a folder that was planned before can be
planned again without it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from headrace.config import AUTO, Budget, Rules, Workload, pin_memory_disabled
from headrace.errors import BudgetError, CheckpointError, OptionError, warn_user
from headrace.formatting import format_size
from headrace.memory.system import Limits, Needs, read_limits
from headrace.model.records import Inventory, ModelProfile, StorageInfo
from headrace.plan.cached_experts import why_not_cached
from headrace.plan.plan import DeviceName, Plan, assemble
from headrace.planning.checks import check_limits, finalize_plan, memory_kind, needs_of, require_one_process
from headrace.planning.request import PlanRequest, Target, can_read_in_place, has_triton, peer_of
from headrace.stores.sources import TENSOR_ALIGN_BYTES

if TYPE_CHECKING:
    import torch
    from torch import nn

    from headrace.checkpoint.weight_map import WeightMap
    from headrace.model.live_tensors import BoundStorage
    from headrace.plan.build import Planner
    from headrace.plan.candidates import MappedFiles
    from headrace.plan.rates import Rates
    from headrace.plan.routing_traces import ExpertHits
    from headrace.plan.speculation import DraftCost, Speculation, SpeculationForecast
    from headrace.stores.file_reads import DiskOptions

_log = logging.getLogger(__name__)

# Of free host memory, at most: what a plan leaves to the process itself.
_HEADROOM_BYTES = 1 << 30
# Pieces of tensors that are read in place, one mapping each: of the 65,530 that Linux gives a process.
_MAX_MAPPINGS = 48_000
# Of free device memory, which --device-memory auto leaves to the display, to other programs and to fragmentation.
_AUTO_MARGIN_BYTES = 1 << 30
_VECTOR_BYTES = 16  # of SSE, the shortest of an x86 CPU


@dataclass(frozen=True)
class PlanContext:
    """A request, with the model and the machine that it is about as names and sizes.

    Attributes:
        read_profile: returns the profile of the model; a finished plan needs none.
        weights: the checkpoint.
        name: name of the model, for output.
        module: the model; on ``meta`` for a folder, and ``None`` where the folder was planned before.
        bound: the live tensors of every storage, by storage name; empty for a folder, of which no model is built.
        hits: hit rates of cached experts, where they were recorded.
        draft: cost of the draft model, if one guesses tokens.
        held_bytes: host memory that an offload of the model has, which another one takes over; ``None``: there is none.
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
    held_bytes: int | None = None
    automatic: str = ""

    @cached_property
    def planner(self) -> Planner:
        """Planner of the model, for the machine."""
        request, target, profile = self.request, self.target, self.read_profile().for_workload(self.request.expected)
        facts = (self.inventory, profile, target.device, self.weights, target.rates, request.unstreamable)
        in_group = request.num_ranks > 1 or (request.ranks is not None and request.ranks.size > 1)
        planner = make_planner(*facts, request.disk, request.num_ranks if request.splits_units else 1, in_group)
        if request.engine == "vllm":
            from headrace.plan.engines import vllm_planner

            planner = vllm_planner(planner)
        if (spill := planner.spill) is not None:
            free_bytes = None if spill.free_bytes is None else spill.free_bytes + (self.held_bytes or 0)
            is_shared = memory_kind(target.device, target.machine) == "shared"
            # An offload that is resized cannot come to have a cache above files.
            spill = replace(spill, free_bytes=free_bytes, is_device_memory=is_shared, may_cache=self.held_bytes is None)
            planner = replace(planner, spill=spill)
        return planner if self.hits is None else replace(planner, hits=self.hits)

    def sized(self, guesser_bytes: int = 0) -> PlanContext:
        """The request with a size in place of ``"auto"``, or with a plan that offloads nothing if the model fits it.

        ``guesser_bytes``: of a draft or heads beside the model.

        Raises:
            OptionError: no GPU, or one whose memory is not known.
        """
        given = self.request.given
        if isinstance(given, Budget) and given.device_memory == AUTO:
            return self._sized(given, guesser_bytes)
        return self

    def _sized(self, given: Budget, guesser_bytes: int) -> PlanContext:
        target = self.target
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
        num_bytes, workload = max(1, free_bytes - _AUTO_MARGIN_BYTES - guesser_bytes), given.workload
        profile, asked = self.read_profile().for_workload(workload), workload.context
        # A pipeline of diffusers has steps, and no tokens in a cache.
        workload = replace(workload, context=0 if workload.repeated else min(asked, profile.max_context or asked))
        beside = profile.workload_bytes(rows := max(workload.batch_sizes), workload.context)
        policy: Budget | Plan = replace(given, device_memory=num_bytes, workload=workload)
        fits = self.inventory.num_bytes + beside <= num_bytes and not given.rules
        if fits:
            plan = assemble(self.inventory, [], 0, given.mode or "cpu")
            policy = replace(plan, made_for=target.machine, context=workload.context)
        text = (
            f"auto: {format_size(num_bytes)} of device memory, which leaves {format_size(_AUTO_MARGIN_BYTES)} of what "
            f"is free{f', beside {format_size(guesser_bytes)} for what guesses' if guesser_bytes else ''}"
            f"{f'; {format_size(beside)} of it for {rows} x {workload.context} tokens' if workload.context else ''}"
            f"{'; the weights fit, and nothing is offloaded' if fits else ''}"
        )
        _log.info(text)
        request = replace(self.request, policy=policy, workload=workload)
        return replace(self, request=request, automatic=text, read_profile=lambda: profile)

    def with_draft(self, open_draft: Callable[..., PlanContext], heads_cost: Callable[..., DraftCost]) -> PlanContext:
        """:meth:`sized`, beside the draft that the request names, all of it resident: a budget loses what that takes.

        Args:
            open_draft: reads the draft in the folder that is the model of its argument.
            heads_cost: cost of the heads of multi-token prediction that the model of its argument, a context, has.

        Raises:
            BudgetError: nothing is left.
        """
        speculation = self.request.speculation
        return self.sized() if speculation is None else self._with_draft(speculation, open_draft, heads_cost)

    def _with_draft(
        self, speculation: Speculation, open_draft: Callable[..., PlanContext], heads_cost: Callable[..., DraftCost]
    ) -> PlanContext:
        from headrace.checkpoint.model_folder import draft_folder, draft_to_plan
        from headrace.plan.speculation import LOOKUP, DraftCost

        context = self.sized()
        if speculation.guesser == LOOKUP:
            return context
        request, policy = context.request, context.request.given
        if speculation.draft is None:
            cost = heads_cost(context)
        else:
            find = draft_to_plan if isinstance(request.model, str | os.PathLike) else draft_folder
            folder, alone = find(speculation.draft), Workload([1], request.expected.context)
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
        """Prediction of ``plan`` with guesses."""
        from headrace.plan.speculation import forecast_speculation

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
            workload_bytes: bytes of caches and activations.

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


def free_on_peer(plan: Plan, device: torch.device | DeviceName) -> int | None:
    """Memory that can be taken on the peer; ``None`` where ``plan`` has no units there."""
    return read_limits(peer_of(device)).device_free_bytes if plan.peer_bytes else None


# -- the planner ------------------------------------------------------------------------------------------------------


def make_planner(
    inventory: Inventory,
    profile: ModelProfile,
    device: torch.device | DeviceName,
    weights: WeightMap | None = None,
    rates: Rates | None = None,
    unstreamable: Collection[str] = (),
    disk: DiskOptions | None = None,
    num_ranks: int = 1,
    in_group: bool = False,
) -> Planner:
    """The planner for the model of ``inventory`` and ``profile`` on ``device``.

    A budget is planned with ``rates``, or else the kept probe of this machine, or if there is none nominal rates with
    the link of a GPU as it is measured now, in 0.3 s; with the caches and activations that follow from the model's
    configuration; and with reads in place where the device can address host memory. Given ``weights``, a CPU streams
    from its files, and for a GPU what host memory has no room for stays in them. Free host memory counts only for this
    machine, not with the ``rates`` of another. ``disk``: how a CPU reads files, which decides the rate. Each of several
    ranks that split units plans for itself, and all have to come to one plan, so nothing counts that they may see
    differently: no free host memory, and of any group (``in_group``) no slot that a GPU is in, and no measured link.
    """
    from headrace.plan.build import Planner
    from headrace.plan.candidates import Spill
    from headrace.transfer.machine_probe import planning_rates

    on_gpu = device.type == "cuda"
    profile = profile if on_gpu else replace(profile, kernels_per_step=None)  # a CPU has no graphs
    stored_bytes = {} if weights is None else weights.converted_bytes(inventory)
    spill = None
    if weights is not None and on_gpu and num_ranks == 1 and not pin_memory_disabled():
        # The process that reads files for a GPU converts nothing: it runs without torch.
        not_readable = {s.name for s in inventory.storages if s.name in stored_bytes or not _streams(s, weights)}
        free_bytes = None if rates is not None else _free_host_bytes(device, inventory)
        spill = Spill(frozenset(not_readable.union(unstreamable)), free_bytes)
    in_place, triton = on_gpu and can_read_in_place(device), has_triton(device)
    past_cache = disk is not None and bool(disk.direct)
    if not on_gpu and weights is not None and rates is None:  # files that the page cache cannot keep
        past_cache |= (free := _free_host_bytes(device, inventory)) is not None and inventory.num_bytes > free
    rates = rates or planning_rates(device, past_cache, in_group)
    can_cache = in_place and triton if on_gpu else weights is not None
    readers = set(profile.row_readers) if can_cache and rates.fetch_bytes_per_s is not None else set()
    experts = {s.name for s in inventory.storages if not readers.isdisjoint(s.modules)}
    if not on_gpu and not experts.isdisjoint(unstreamable):  # a CPU's caches read the files
        experts = set()
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
    """Storages that a CPU cannot read in place in the files, and the memory that reading the others takes."""
    from headrace.plan.candidates import MappedFiles

    refused: dict[str, str] = {}
    joined_bytes: dict[str, int] = {}
    mappings = 0
    for storage, source in weights.sources_of(inventory):
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
