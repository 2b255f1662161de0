"""From a model, a policy and a machine to a plan: :func:`make_plan`. Names and sizes only; nothing is allocated.

The command line uses :func:`plan_model`, which also returns the planner. Nothing here imports torch or transformers at
its top: a folder that was planned before needs neither.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from headrace.checkpoint.model_folder import is_quantised, model_name, model_to_plan
from headrace.config import SHARDED_MODES, Budget, Policy, Workload, count, one_of
from headrace.errors import LimitError, OptionError, OptionTypeError, warn_user
from headrace.formatting import format_size
from headrace.memory.system import gc_paused
from headrace.plan.plan import Plan
from headrace.planning.checks import needs_of
from headrace.planning.context import PlanContext, not_in_files
from headrace.planning.request import PlanRequest, Target, compute_device, require_kinds

_LARGE_TABLES_BYTES = 8 << 30  # that a plan mentions

if TYPE_CHECKING:
    import torch
    from torch import nn

    from headrace.checkpoint.metadata_cache import FolderFacts
    from headrace.checkpoint.safetensors_header import Checkpoint
    from headrace.checkpoint.weight_map import WeightMap
    from headrace.model.records import Inventory
    from headrace.plan.build import Planner
    from headrace.plan.cpu_share import CpuShareForecast
    from headrace.plan.plan import DeviceName
    from headrace.plan.prediction import Engine, EngineStep, PlanPrediction
    from headrace.plan.routing_traces import ExpertHits
    from headrace.plan.speculation import DraftCost, SpeculationForecast
    from headrace.stores.file_reads import DiskOptions


def make_plan(
    model: nn.Module | str | os.PathLike[str],
    policy: Policy | Plan | str | int | None = None,
    *,
    workload: Workload | None = None,
    machine: str | os.PathLike[str] | None = None,
    checkpoint: WeightMap | Checkpoint | str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    disk: DiskOptions | None = None,
    num_ranks: int = 1,
    expert_trace: str | os.PathLike[str] | None = None,
    engine: Engine | None = None,
    host_bandwidth: float | None = None,
) -> Plan:
    """The plan that :func:`headrace.offload` or ``load`` would carry out, and its predicted cost; allocates nothing.

    ``print(plan)`` shows both, as ``headrace plan`` does. The plan can be saved, and passed to ``offload`` or ``load``
    in place of a policy::

        plan = headrace.make_plan("Qwen3-8B", "6GiB", workload=headrace.Workload([1, 16], context=4096), machine="h200")
        print(plan)

    Args:
        model: a module, on ``meta`` too, or a transformers folder of safetensors (or its name in the local cache of the
            Hub), of which config and headers are read; a config alone is enough, and for some models their name.
        policy: as for ``offload``. ``None``: everything stays resident, and the smallest budget is shown. A plan is
            checked against model and machine.
        workload: the batch sizes and the context that a budget is planned for, and that predictions are about.
        machine: another machine to plan for: ``"h200"``, a card such as ``"4090"`` or ``"4090@pcie3"``, or a file that
            ``headrace probe --json`` printed there. Default: this one, with its kept probe, or nominal rates and the
            link of its GPU as it is measured now, in 0.3 s with 64 MiB.
        checkpoint: as for ``offload``; a folder given as ``model`` is its own.
        dtype: dtype of the weights, as for ``load``; for folders alone.
        device: where compute runs; default as for ``offload`` and ``load``. Not with ``machine``, which says it.
        disk: how files are read.
        num_ranks: over how many ranks the modes ``sharded_cpu`` and ``sharded_gpu`` split units (``group=``).
        expert_trace: a file of ``headrace generate --expert-trace``, from which hits of cached experts are predicted.
        engine: ``"vllm"`` plans and predicts for the kernels of vLLM, where they were measured; ``"generate"`` for
            headrace's own alone. Default: for these, and of a budget a comparison with vLLM.
        host_bandwidth: GB/s of the host memory of ``machine``, such as 89.6 for two channels of DDR5-5600: predicts
            what the CPU's share in missed experts (``load(cpu_experts=True)``) gains there.

    Returns:
        the plan. What ``machine``, or this one, has no room for is a warning, and printed with the plan.

    Raises:
        OptionError, OptionTypeError: a wrong argument; a selection or budget that cannot be met; a plan for another
            model or machine.
        CheckpointError: no model in the folder, or files for another one.
    """
    options = (workload, machine, checkpoint, dtype, device, disk, num_ranks, expert_trace)
    planned = plan_model(PlanRequest(model, policy, *options, engine=engine, host_bandwidth=host_bandwidth))
    if planned.shortage:
        warn_user(f"the plan {planned.shortage}")
    return planned.with_prediction()


@dataclass(frozen=True)
class PlanResult:
    """A plan with what it was made from.

    Attributes:
        plan: without predictions (:meth:`with_prediction`).
        speculation: decoding with the guesses that were asked for; ``None``: none were.
    """

    plan: Plan
    context: PlanContext
    speculation: SpeculationForecast | None = None

    @property
    def planner(self) -> Planner:
        """Planner of the model, for the machine."""
        return self.context.planner

    @property
    def workload(self) -> Workload:
        """The workload of the predictions."""
        return self.context.request.expected

    @cached_property
    def shortage(self) -> str | None:
        """Why the plan does not fit the machine: ``"does not fit ..."``; ``None``: it does."""
        if self.context.request.given is None:
            return None  # asked for the size of the model and its smallest budget
        profile, target = self.planner.profile, self.context.target
        largest = max(self.workload.batch_sizes), self.workload.context
        beside = profile.workload_bytes(*largest)
        try:
            self.context.require_room(self.plan, workload_bytes=beside)
        except LimitError as error:
            where = "this machine" if target.rates is None else str(target.machine)
            use = f". The cache and activations of {profile.describe(*largest)} take {format_size(beside)} of it"
            return f"does not fit {where}: {str(error).removesuffix('; nothing was allocated')}{use if beside else ''}"
        return None

    @property
    def _host_memory(self) -> str:
        """Host memory that the plan needs beside a GPU."""
        on_gpu, given = self.context.target.device.type == "cuda", self.context.request.given
        num_bytes = needs_of(self.plan, on_gpu=True).host_bytes if on_gpu else 0
        tables = sum(size for name, size in self.plan.uva.items() if self.context.inventory.by_name[name].is_lookup)
        limited = isinstance(given, Budget) and given.host_memory is None and self.context.target.rates is not None
        limited = limited and not self.plan.coded_units  # no codes in files
        less = "; where there is less, --host-memory SIZE leaves the rest in files" if limited else ""
        is_large = tables > _LARGE_TABLES_BYTES
        pinned = f", of which {format_size(tables)} are tables that stay there in any plan" if is_large else ""
        return f"{format_size(num_bytes)} in host memory{pinned}{less}" if num_bytes else ""

    @cached_property
    def cpu_share(self) -> CpuShareForecast | str:
        """Gain by the CPU's share in missed experts, for the first batch size; a text: why that is not known."""
        return self.planner.forecast_cpu_share(self.plan, self.workload.batch_sizes[0], self.workload.context)

    @cached_property
    def prediction(self) -> PlanPrediction:
        """Predictions; for a budget also alternatives."""
        prediction = self.planner.predict(self.context.request.given, self.plan, self.workload)
        engines = self._engines(prediction.forecasts[0].rows_per_s)
        notes = (self.context.automatic, *prediction.notes, self._host_memory, str(self.speculation or ""))
        if engines:
            from headrace.plan.engines import faster_engine

            notes = (*notes, faster_engine(engines))
        if self.context.request.host_bandwidth is not None and isinstance(self.cpu_share, str):
            notes += (f"nothing about the CPU's share in missed experts: {self.cpu_share}",)
        notes = tuple(note for note in notes if note)
        return replace(prediction, shortage=self.shortage, notes=notes, engines=engines)

    def _engines(self, rows_per_s: float) -> tuple[EngineStep, ...]:
        """Steps of ``generate``, which decodes ``rows_per_s`` tokens per second, and of vLLM for the same budget."""
        context, name, device_bytes = self.context, self.plan.model_name, self.context.target.machine.device_bytes
        request, budget = context.request, context.request.given
        size = f"{budget.num_bytes >> 20}MiB" if isinstance(budget, Budget) and not context.automatic else "auto"
        if isinstance(budget, Plan) and context.automatic and device_bytes is not None:  # which fits the GPU
            budget = Budget(device_bytes, workload=self.workload)
        is_plain = isinstance(budget, Budget) and budget == Budget(
            budget.device_memory, workload=budget.workload, host_memory=budget.host_memory
        )
        if not isinstance(budget, Budget) or not is_plain or context.target.device.type != "cuda" or name is None:
            return ()
        if request.engine is not None or request.speculation is not None or budget.workload.repeated:
            return ()
        if not isinstance(request.model, str | os.PathLike):  # a verb runs it already, in one of the engines
            return ()
        from headrace.plan.engines import step_in_vllm, why_not_generate
        from headrace.plan.prediction import EngineStep

        own = EngineStep("generate", rows_per_s, f"headrace generate {shlex.quote(name)} --device-memory {size}")
        if reason := why_not_generate(context.inventory):
            own = EngineStep("generate", None, note=reason)
        return own, step_in_vllm(self.planner, budget, name, device_bytes)

    def with_prediction(self) -> Plan:
        """The plan with its predictions; it prints both."""
        return self.plan.with_prediction(self.prediction)


def plan_model(request: PlanRequest) -> PlanResult:
    """:func:`make_plan` with its planner; takes an ``OpenedModel`` too, and does not warn of a shortage."""
    from headrace.stores.file_reads import File

    require_kinds(request.device, request.disk)
    if request.engine is not None:
        from headrace.plan.engines import ENGINES

        one_of(ENGINES)("engine", request.engine)
    workload, policy = request.workload, request.policy
    if workload is not None and not isinstance(workload, Workload):
        raise OptionTypeError(f"workload: expected a headrace.Workload, found {type(workload).__name__} {workload!r}")
    num_ranks = count("num_ranks", request.num_ranks)
    if num_ranks > 1 and not request.splits_units:
        raise OptionError(
            f"num_ranks = {num_ranks}: expected at least 1, and 1 without mode {' or '.join(SHARDED_MODES)}: in "
            f"other modes no unit is split (--num-ranks)"
        )
    if isinstance(policy, Plan) and request.num_ranks == 1:  # the plan knows its ranks
        request = replace(request, num_ranks=policy.num_ranks)
    with gc_paused():
        context = _context(request).with_draft(_context, _heads_cost)
        plan = context.plan()
        if request.disk is not None and context.weights is not None and (plan.reads_files or context.loads_files):
            for path in context.weights.checkpoint.files:
                File(path, request.disk).close()  # the file system may refuse O_DIRECT
        if plan.offloaded_bytes and plan.reads_files and context.weights is None:
            warn_user(
                "the plan reads safetensors files, and none were given: pass checkpoint=FOLDER here and to "
                "headrace.offload"
            )
        forecast = None if request.speculation is None else context.forecast_speculation(plan, request.speculation)
        return PlanResult(replace(plan, model_name=plan.model_name or context.name), context, forecast)


# -- the model ---------------------------------------------------------------------------------------------------------


def _context(request: PlanRequest) -> PlanContext:
    model, is_folder = request.model, isinstance(request.model, str | os.PathLike)
    if request.dtype is not None and not is_folder:
        raise OptionError("dtype: a module has its own; leave dtype out, or plan a folder")
    if is_folder or hasattr(model, "unstreamable"):  # an OpenedModel; its class needs transformers
        if request.checkpoint is not None:
            raise OptionError("checkpoint: a folder is its own checkpoint; leave checkpoint out")
        context = _folder_context(request, is_folder)
    else:
        from torch import nn

        from headrace.api import refuse_second_offload
        from headrace.runtime.prepare import module_context

        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
        if not isinstance(model, nn.Module):
            raise OptionTypeError(f"model: expected a torch.nn.Module or a folder, found {type(model).__name__}")
        refuse_second_offload(model)
        context = module_context(replace(request, model=model), _target(request, model))
    if request.expert_trace is not None:
        context = replace(context, hits=_hits_of(request.expert_trace, context.inventory))
    return context


def _folder_context(request: PlanRequest, is_folder: bool) -> PlanContext:
    """``is_folder``: the model is one, and no ``OpenedModel``."""
    model = request.model
    # First, since quantised weights take other forms on a GPU and on a CPU.
    target = _target(request)
    facts = _read_folder(request, target) if is_folder else model
    for difference in facts.differences:
        warn_user(difference)
    if is_folder and facts.step_rows and (given := request.given) is not None:
        # As headrace.adapters.diffusers does: what every step runs gets the budget.
        steps = [f"re:{part}\\..*" for part in facts.inventory.children("") if part.startswith("transformer")]
        expected = request.expected
        rows = expected.batch_sizes if max(expected.batch_sizes) > 1 else (facts.step_rows,)
        workload = replace(expected, batch_sizes=rows, repeated=expected.repeated or steps)
        request = replace(request, workload=workload)
        if isinstance(given, Budget):
            request = replace(request, policy=replace(given, workload=workload), workload=None)
    request = replace(request, unstreamable=not_in_files(facts.inventory, facts.weights))
    name, module = (model_name(model_to_plan(model)), None) if is_folder else (model.name, model.module)
    read = partial(getattr, facts, "profile") if is_folder else partial(model.profile, request.expected.context)
    if is_folder and facts.pipeline and request.expected.call_size:
        from headrace.adapters.pipeline_peaks import CallProfile

        read = partial(CallProfile, pipeline=facts.pipeline)
    return PlanContext(request, target, facts.inventory, read, facts.weights, name, module)


def _heads_cost(context: PlanContext) -> DraftCost:
    if context.module is None and isinstance(name := model_to_plan(context.request.model), str):
        raise OptionError(
            f"--speculate mtp: {name} is known by its sizes alone, and its heads are made from its config: "
            f'`hf download {name} --include "*.json"`, or use lookup or a draft'
        )
    from headrace.adapters.transformers.load_folder import build_meta_model
    from headrace.adapters.transformers.speculating import heads_cost

    return heads_cost(context, context.module or build_meta_model(context.request.model, dtype=context.request.dtype))


def _read_folder(request: PlanRequest, target: Target) -> FolderFacts:
    from headrace.checkpoint.metadata_cache import folder_facts, known_facts
    from headrace.transfer.machine_probe import may_have_gpu

    folder, dtype, device = model_to_plan(request.model), request.dtype, target.device.type
    context = request.expected.context
    if isinstance(folder, str):
        if dtype is not None:
            raise OptionError(
                f"dtype: {folder} is known by name in its own alone; leave --dtype out, or fetch its config"
            )
        return known_facts(folder, context)
    if (folder / "model_index.json").is_file():
        from headrace.adapters.pipeline_folder import pipeline_facts

        return pipeline_facts(folder, dtype)
    options = f"{dtype} {device} {may_have_gpu() if is_quantised(folder) else ''}"
    if context:  # the caches measured for it are kept, too
        options += " with caches"

    def read() -> tuple[FolderFacts, Collection[str]]:
        from headrace.adapters.transformers.opened_model import open_model

        return open_model(folder, dtype, None, device, True).facts(context)

    return folder_facts(folder, read, options)


def _hits_of(expert_trace: str | os.PathLike[str], inventory: Inventory) -> ExpertHits:
    from headrace.plan.cost_model import experts_in
    from headrace.plan.routing_traces import ExpertHits, load_trace

    recorded = load_trace(expert_trace)
    found = {experts_in(inventory, storage) for storage in inventory.storages}
    if recorded.num_experts not in found:
        raise OptionError(
            f"{os.fspath(expert_trace)}: a trace of {recorded.num_experts} experts; expected one of this model, whose "
            f"layers have {max(found)} (--expert-trace)"
        )
    return ExpertHits(recorded)


def _target(request: PlanRequest, module: nn.Module | None = None) -> Target:
    from headrace.plan.plan import DeviceName
    from headrace.transfer.machine_probe import may_have_gpu, named_machine

    device, disk = request.device, request.disk
    if request.machine is None:
        if request.host_bandwidth is not None:
            raise OptionError("host_bandwidth has no effect without machine: `headrace probe` measures the CPU here")
        here: torch.device | DeviceName = DeviceName("cpu")
        if module is not None or (may_have_gpu() if device is None else device != "cpu"):
            here = compute_device(module, device)
        return Target.of(here)
    if device is not None:
        raise OptionError("machine and device contradict each other: the machine has its device; leave device out")
    made_for, rates = named_machine(request.machine, disk is not None and bool(disk.direct))
    if request.host_bandwidth is not None:
        from headrace.plan.cpu_share import with_host_memory

        rates = with_host_memory(rates, request.host_bandwidth)
    return Target(DeviceName("cpu" if made_for.device == "cpu" else "cuda"), made_for, rates)
