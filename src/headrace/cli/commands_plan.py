"""``headrace plan``: the plan and cost of an offload, from headers alone. ``headrace probe``: rates of this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.checkpoint.model_folder import model_to_plan
from headrace.cli.arguments import (
    DTYPE_HELP,
    SpeculationFlags,
    check_dtype,
    disk_options,
    refuse_idle,
    requested,
    require_folder,
    require_writable,
    target_device,
    with_flags,
)
from headrace.cli.terminal import stderr, stdout
from headrace.config import AUTO, CALL_SIZE, SHARDED_MODES, Budget, count
from headrace.errors import BudgetError, OptionError, warn_user
from headrace.flags import OffloadFlags, row

if TYPE_CHECKING:
    import torch

    from headrace.plan.plan import DeviceName

EXIT_UNFIT = 1
_MACHINE = "--machine 4090, h200, ..., or a file of `headrace probe --json`"


@dataclass(frozen=True)
class PlanOptions(SpeculationFlags):
    """The flags of this verb alone."""

    json: bool = row("", "Print the plan as JSON, with sizes in bytes, and nothing else.", off=False)
    save: Path | None = row("FILE", "Write the plan to FILE, for --plan FILE.", require_writable)
    machine: str | None = row(
        "NAME", "Plan for h200 (measured), a nominal card (4090, 5080, ...), or a file of a probe."
    )
    link: str | None = row("NAME", "PCIe of that card, if not its own: pcie3, pcie4x8, ...")
    host_bandwidth: float | None = row(
        "GB/S", "Of that machine's host memory, e.g. 89.6: what the CPU's share in missed experts gains."
    )
    dtype: str | None = row("NAME", DTYPE_HELP, check_dtype)
    expert_trace: Path | None = row("FILE", "Predict hits of cached experts from a file of `headrace generate`.")
    height: int | None = row("PIXELS", "Of a pipeline's image or video: its call fits the budget, too.", count)
    width: int | None = row("PIXELS", "The same (default: the pipeline's own).", count)
    frames: int | None = row("N", "The same, of a video.", count)
    tiling: bool = row("", "The pipeline's VAE decodes in tiles (pipe.vae.enable_tiling()).", off=False)
    steps: int | None = row("N", "Of a pipeline's call (num_inference_steps): predict the time of them.", count)
    num_ranks: int | None = row("N", "Processes that share the weights in mode sharded_cpu or sharded_gpu.")


@with_flags(PlanOptions)
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model, its config.json, or a name.")],
    *,
    options: PlanOptions,
    flags: OffloadFlags,
) -> None:
    """Show which weights would be offloaded, and the predicted speed; loads no weights.

    Without offloading flags: with --machine as generate would do there, by --device-memory auto; else the size of the
    weights and the smallest budget that runs the model. Exit code 1 if the plan does not fit the machine.
    """
    folder, machine, num_ranks, save = model_to_plan(model), options.machine, options.num_ranks, options.save
    if machine is None:
        others = {"--link": options.link, "--host-bandwidth": options.host_bandwidth}
        refuse_idle(others, "without --machine: it is another machine's")
    if options.link is not None:
        machine = f"{machine}@{options.link}"
    device = _planned_device(flags, machine)
    chosen = _by_default(flags, machine)
    policy = requested(chosen, device)
    mode = getattr(policy, "mode", None)
    if mode in SHARDED_MODES and num_ranks is None and flags.plan is None:
        raise OptionError(
            f"--offload-mode {mode} splits every unit over the processes of torchrun: give their number with "
            f"--num-ranks N"
        )
    if policy is None:
        reads = {"--disk-direct": flags.disk_direct, "--disk-drop-cache": flags.disk_drop_cache}
        idle = {"--expert-trace": options.expert_trace, "--host-bandwidth": options.host_bandwidth}
        idle |= {"--save": save, **reads, **{f"--{name}": getattr(options, name) for name in CALL_SIZE}}
        refuse_idle(idle, "without a plan: nothing would be offloaded; add --device-memory, for example")
    from headrace.plan.tables import plan_table
    from headrace.plan_model import plan_model
    from headrace.planning.request import PlanRequest

    name = device.type if device.index is None else f"{device.type}:{device.index}"
    here = name if machine is None else None
    request = PlanRequest(folder, policy, machine=machine, dtype=options.dtype, device=here, disk=disk_options(flags))
    ranks, speculation = 1 if num_ranks is None else num_ranks, options.speculation()
    request = replace(request, num_ranks=ranks, expert_trace=options.expert_trace, speculation=speculation)
    request = replace(request, host_bandwidth=options.host_bandwidth)
    if sizes := {name: size for name in CALL_SIZE if (size := getattr(options, name))}:
        workload = replace(request.expected, **sizes)
        policy = replace(policy, workload=workload) if isinstance(policy, Budget) else policy
        request = replace(request, policy=policy, workload=workload)
    try:
        planned = plan_model(request)
    except OptionError as error:
        if chosen is flags or speculation is not None or isinstance(error, BudgetError):
            raise
        warn_user(f"planned without a budget, since that of all memory needs caches: {error}")
        planned = plan_model(replace(request, policy=None))
    if planned.speculation is not None:
        planned.speculation.require_faster()
    made = planned.with_prediction()
    if save is not None:
        made.save(save)
        stderr.print(f"plan saved in {save} (use it with --plan {save})", soft_wrap=True)
    if options.json:  # not by rich, which wraps long lines
        json.dump({**made.to_json(), "prediction": planned.prediction.to_json()}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        stdout.print(plan_table(made))
    if planned.shortage:
        raise typer.Exit(EXIT_UNFIT)


def _planned_device(flags: OffloadFlags, machine: str | None) -> torch.device | DeviceName:
    """The device of this machine, or the kind of device of ``machine``; does not import torch for a CPU."""
    from headrace.plan.plan import DeviceName
    from headrace.transfer.machine_probe import may_have_gpu, named_machine

    if machine is None:
        if flags.device == "cpu" or (flags.device is None and not may_have_gpu()):
            return DeviceName("cpu")
        return target_device(flags.device, "; to plan for a machine with a GPU: " + _MACHINE)
    if flags.device is not None:
        raise OptionError("--machine and --device contradict each other: the machine has its device; leave one out")
    return DeviceName("cpu" if named_machine(machine)[0].device == "cpu" else "cuda")


def _by_default(flags: OffloadFlags, machine: str | None) -> OffloadFlags:
    """``flags``; where none asks for an offload, with all memory of a named GPU, as ``headrace generate`` has it."""
    if machine is None or flags.asks():
        return flags
    from headrace.transfer.cards import shares_host_memory
    from headrace.transfer.machine_probe import named_machine

    made_for, _ = named_machine(machine)
    if not made_for.device_bytes:
        return flags
    mode = flags.offload_mode or ("disk" if shares_host_memory(made_for.device) else None)
    return replace(flags, device_memory=AUTO, offload_mode=mode)


@dataclass(frozen=True)
class ProbeOptions:
    """The flags of ``headrace probe``."""

    folder: Path | None = row("DIR", "A folder on the disk with your checkpoints.", require_folder)
    json: bool = row("", "Print JSON and nothing else.", off=False)


@with_flags(ProbeOptions, ())
def probe(*, options: ProbeOptions) -> None:
    """Measure the link, the device, the CPU and the disk of this machine; takes about half a minute.

    The result is saved for plans. If that fails, it is printed all the same, with a warning and exit code 0.
    """
    from headrace.plan.tables import titled_table
    from headrace.transfer.machine_probe import save
    from headrace.transfer.measuring import measure

    if not options.json:
        stderr.print("measuring ...")
    result = measure(options.folder)
    if options.json:
        typer.echo(json.dumps(result.to_json()))
    else:
        table = titled_table("This machine", "what", "rate")
        for fact in result.machine.items():
            table.add_row(*fact)
        table.add_section()
        for rate in rates_of(result.to_json()):
            table.add_row(*rate)
        stdout.print(table)
    try:
        path = save(result)
    except OptionError as error:
        warn_user(f"{error}; or save it yourself: `headrace probe --json > FILE`, and plan with --machine FILE")
        return
    if not options.json:
        stderr.print(f"saved in {path}", soft_wrap=True)


_NAMES = {
    "h2d_bytes_per_s": "host to device, copies of {} KiB",
    "device_copy_bytes_per_s": "device copy (read + written)",
    "fetch_bytes_per_s": "experts into slots",
    "peer_bytes_per_s": "device to device, copies of {} KiB",
    "cached_read_bytes_per_s": "file read, page cache",
    "disk_read_bytes_per_s": "file read, direct",
}


def rates_of(values: dict[str, object]) -> list[tuple[str, str]]:
    """The rates of ``Probe.to_json()`` as (name, rate), formatted."""
    rows = []
    for key, name in _NAMES.items():
        value = values[key]
        by_size: dict[int, Any] = value if isinstance(value, dict) else {0: value}
        rows += [(name.format(int(size) // 1024), f"{rate / 1e9:.1f} GB/s") for size, rate in by_size.items() if rate]
    forms: Any = values["cpu_bytes_per_s"]
    rows += [(f"experts in {form} by the CPU", f"{rate / 1e9:.1f} GB/s") for form, rate in forms.items()]
    gathers: Any = values["gather_bytes_per_s"]
    rows += [(f"into each of {n} devices from all others at once", f"{r / 1e9:.1f} GB/s") for n, r in gathers.items()]
    products: Any = values["product_s_per_byte"]
    rows += [
        (f"matrix product, {n} row{'' if int(n) == 1 else 's'}, per GB of weight", f"{s * 1e12:.2f} ms")
        for n, s in products.items()
    ]
    if kernel_s := values["kernel_s"]:
        rows.append(("small kernel in a graph", f"{float(str(kernel_s)) * 1e6:.1f} us"))
    return rows
