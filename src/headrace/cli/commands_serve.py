"""``headrace serve``: headrace's own server, or vLLM with headrace as its weight offloader."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.checkpoint.model_folder import model_folder, model_name
from headrace.cli.arguments import (
    CPU_EXPERTS_HELP,
    DTYPE_HELP,
    EXPERTS_HELP,
    LIGER_HELP,
    VERB_FLAGS,
    SpeculationFlags,
    asked_of_cpu,
    check_cpu_experts,
    check_dtype,
    disk_options,
    refuse_idle,
    requested,
    require_packages,
    target_device,
    with_flags,
)
from headrace.cli.terminal import byte_bar, log_lines, stderr
from headrace.cli.vllm_launcher import KEY_VARIABLE, serve_in_vllm, why_not_vllm
from headrace.config import AUTO_CONTEXT, Workload, count, one_of
from headrace.errors import CheckpointError, OptionError
from headrace.flags import OffloadFlags, Surface, counts, row
from headrace.formatting import format_size
from headrace.sizes import parse_size

if TYPE_CHECKING:
    import torch

    from headrace.adapters.transformers.opened_model import OpenedModel
    from headrace.api import Handle
    from headrace.plan.cpu_share import CpuShareForecast
    from headrace.plan_model import PlanResult
    from headrace.planning.request import PlanRequest
    from headrace.serving.endpoint import ServedModel
    from headrace.serving.switch import Hosted
    from headrace.stores.store import Progress

_SURFACE = Surface(modes=("cpu", "disk"), inside=" of headrace serve", needs={"batch": (), "context": ()})
_BATCH = "1,8"
_CONTEXT = 2048
_MAX_QUEUE = 256


def _check_blanks(flag: str, value: str | list[str]) -> None:
    """Refuse an empty text, as of a shell variable that is not set, and blanks around one, as of a file with CRLF."""
    for text in [value] if isinstance(value, str) else value:
        if not text or text != text.strip():
            found = "one with some" if text else "an empty one"
            raise OptionError(
                f"{flag}: expected a text without blanks around it, found {found}; set it, or leave {flag} out"
            )


def _check_port(flag: str, value: int) -> None:
    if not 0 <= value <= 65535:
        raise OptionError(f"{flag} {value}: expected a port from 1 to 65535, or 0 for a free one")


def _check_seconds(flag: str, value: float) -> None:
    if not 0 <= value < inf:  # NaN is neither
        raise OptionError(f"{flag} {value:g}: expected a number of seconds, 0 or more")


@dataclass(frozen=True)
class _ServeOptions(SpeculationFlags):
    """The flags of the verb itself; ``None`` stands for the default of either engine."""

    engine: str | None = row(
        "auto|vllm|own",
        "auto (default): vLLM where it is installed and runs the model on this GPU, else headrace's own server.",
        one_of(("auto", "vllm", "own")),
    )
    host: str | None = row("ADDRESS", "Address to listen on (default 127.0.0.1: this machine only).", _check_blanks)
    port: int | None = row("N", "Default 8000; 0: a free one.", _check_port)
    api_key: str | None = row(
        "KEY",
        f"Bearer token that requests need; {KEY_VARIABLE} sets it without showing it to other users.",
        _check_blanks,
    )
    served_model_name: list[str] | None = row(
        "NAME...", "Names of the model in requests (default MODEL).", _check_blanks
    )
    max_queue: int | None = row("N", "Requests that may wait (default 256); others are answered with 429.", count)
    switch_after: float | None = row(
        "SECONDS",
        "Of several models: the turn of one, while requests wait for another, is so long (default 10); not in vLLM.",
        _check_seconds,
    )
    cors: bool = row("", "Allow pages of any origin (Access-Control-Allow-Origin: *); not in vLLM.", off=False)
    allowed_hosts: list[str] | None = row(
        "NAME...",
        "Names in the header Host (default: any with a key or another address, else this machine's); not in vLLM.",
        _check_blanks,
    )
    generation_config: str | None = row(
        "auto|none",
        "Sampling of requests that set none: auto (default), as in the model's generation_config.json; none, greedy.",
    )
    dtype: str | None = row("NAME", DTYPE_HELP)
    experts_implementation: str | None = row("NAME", f"{EXPERTS_HELP}; not in vLLM.")
    cpu_experts: str | None = row("on|auto", f"{CPU_EXPERTS_HELP}; not in vLLM.", check_cpu_experts)
    use_liger_kernel: bool = row("", f"{LIGER_HELP}; not in vLLM.", off=False)
    additional_config: str | None = row("JSON", "vLLM's; headrace's flags are added to it.")
    dry_run: bool = row("", "Print the plan, or the command of vLLM, and start nothing.", off=False)


@with_flags(
    _ServeOptions,
    (*VERB_FLAGS, "measure_stalls"),
    {
        "batch": "Sequences that run together (default 8); others wait. In vLLM: rows of "
        "a step to plan for, e.g. 1,16,256.",
        "context": "Tokens of the longest sequence, prompt and answer (default 2048, or the model's own if less). If "
        "given, the cache counts in --device-memory.",
        "offload_mode": "Where offloaded weights are stored: cpu or disk. In vLLM: cpu (default), pinned host memory; "
        "shm_cpu, one copy per host for data-parallel ranks.",
        "measure_stalls": "Time every wait for a unit; in vLLM only.",
    },
    logs=False,  # -v is left to vLLM
)
def serve(
    call: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL... [VLLM FLAGS]",
            help="Folder of a causal language model, or a name in the Hub's cache; several take turns on the device. "
            "With --engine vllm one, as vLLM takes it, followed by any flags of vLLM.",
        ),
    ],
    *,
    options: _ServeOptions,
    flags: OffloadFlags,
) -> None:
    """Serve models that do not fit the device, with OpenAI's API.

    Inside vLLM, whose flags follow MODEL (`--` may stand between), or with headrace's own server in this process, on a
    GPU or on a CPU; --engine decides.
    """
    if options.api_key is None and KEY_VARIABLE in os.environ:
        _check_blanks(KEY_VARIABLE, os.environ[KEY_VARIABLE])
    engine = options.engine or "auto"
    words = [arg for arg in call.args if arg != "-v"]
    models = [model, *takewhile(lambda word: not word.startswith("-"), words)]
    if len(models) > 1 and engine == "vllm" and not model.startswith("-"):
        raise OptionError(
            f"--engine vllm serves one model, and there are {len(models)} ({', '.join(models)}); leave it out: "
            f"headrace's own server has several"
        )
    if engine == "auto":
        several = "several models take turns in it alone" if len(models) > 1 else None
        reason = several or why_not_vllm(model, vars(options), flags)
        engine = "own" if reason else "vllm"
        why = f"headrace's own server: {reason}" if reason else "vLLM, which runs this model here (else --engine own)"
        stderr.print(f"serving with {why}", markup=False, soft_wrap=True)
    if engine == "vllm":
        serve_in_vllm(model, call.args, vars(options), flags)
        return
    if unknown := words[len(models) - 1 :]:  # no flag of the table, since vLLM has another
        raise OptionError(
            f"{unknown[0]}: headrace serve has no such flag; flags of vLLM need --engine vllm, and "
            f"`headrace serve --help` lists the others"
        )
    vllm_only = {"--additional-config": options.additional_config, "--measure-stalls": flags.measure_stalls}
    refuse_idle(vllm_only, "without --engine vllm")
    if options.dtype is not None:
        check_dtype("--dtype", options.dtype)
    if options.generation_config is not None:
        one_of(("auto", "none"))("--generation-config", options.generation_config)
    require_packages(
        "serve", "serve", "transformers", "starlette", "uvicorn", "pydantic", "prometheus_client", "jinja2"
    )
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as main() does for the verbs that become no other program
    with log_lines(call.args.count("-v")):
        _run_server(models, flags, replace(options, api_key=options.api_key or os.environ.get(KEY_VARIABLE)))


# -- the own server ----------------------------------------------------------------------------------------------------


def _run_server(models: Sequence[str], flags: OffloadFlags, options: _ServeOptions) -> None:
    """Load ``models`` as the flags ask for, and serve them until a signal ends the server.

    Raises:
        OptionError, CheckpointError: anything that cannot be served, before it is loaded.
    """
    folders = [model_folder(model) for model in models]
    names = _names_of(models, folders, flags, options)
    device = target_device(flags.device)
    if flags.context is not None:
        count("--context", flags.context)
    hosted = [_host(folder, each, device, flags, options) for folder, each in zip(folders, names, strict=True)]
    from headrace.memory.system import read_limits
    from headrace.serving.app import App
    from headrace.serving.listening import bind, run_app
    from headrace.serving.switch import Switch

    limits = read_limits(device)
    free = [limits.host_available_bytes or inf, limits.cgroup_available_bytes or inf]
    limit = min(free) if flags.host_memory is None else parse_size(flags.host_memory, "--host-memory")
    after_s = 10.0 if options.switch_after is None else options.switch_after
    switch = Switch(hosted, options.max_queue or _MAX_QUEUE, limit if len(models) > 1 else inf, after_s)
    first = switch.first()
    for each in hosted if len(models) > 1 else []:
        where = "parked beside others" if each in first else "loaded from its files when it is wanted (--host-memory)"
        text = f"{each.names[0]}: {format_size(each.host_bytes)} of host memory; {where}"
        stderr.print(text, markup=False, soft_wrap=True)
    if options.dry_run:
        return
    bound = bind(options.host or "127.0.0.1", 8000 if options.port is None else options.port)
    for each in reversed(first):  # the first one stays on the device
        with byte_bar("loading", stderr) as progress:
            switch.bring(each, progress)
    app = App(switch, options.api_key, options.cors, options.allowed_hosts)
    bound.listen()  # requests wait until the server runs
    _print_address(bound.getsockname(), [each[0] for each in names], options.api_key is not None)
    run_app(app, bound)


def _names_of(
    models: Sequence[str], folders: Sequence[Path], flags: OffloadFlags, options: _ServeOptions
) -> list[list[str]]:
    """Names of each model in requests: of several, the last part of its own, and as it is written.

    Raises:
        OptionError: two have one name; flags that are for one model, or for several.
    """
    given, num = options.served_model_name, len(models)
    if num == 1:
        refuse_idle({"--switch-after": options.switch_after}, "with one model")
        return [given or [*models]]
    if flags.plan is not None or options.speculate not in (None, "lookup"):
        flag = "--plan" if flags.plan is not None else f"--speculate {options.speculate}"
        raise OptionError(
            f"{flag}: expected one model, found {num}, which take turns on the device (a plan is that of one, and a "
            f"draft stays there); leave it out"
        )
    each_one = f"--served-model-name with a name for each of the {num} models, in their order"
    if given is not None and len(given) != num:
        raise OptionError(f"expected {each_one}, found {len(given)}")
    own = given or [model_name(folder).rpartition("/")[2] for folder in folders]
    for name in own:
        if len(same := [model for model, other in zip(models, own, strict=True) if other == name]) > 1:
            raise OptionError(
                f"{' and '.join(same)} have one name in requests, {name!r}; tell them apart by {each_one}"
            )
    return [[name] if given else [*dict.fromkeys((name, model))] for name, model in zip(own, models, strict=True)]


def _host(
    folder: Path, names: Sequence[str], device: torch.device, flags: OffloadFlags, options: _ServeOptions
) -> Hosted:
    """The model in ``folder``, planned and not loaded; prints the plan.

    Raises:
        OptionError, CheckpointError: it cannot be served.
    """
    batch = _BATCH if flags.batch is None else flags.batch
    sequences = max(counts("--batch", batch))
    if flags.device_memory is not None:
        flags = replace(flags, batch=batch)
    policy, speculation = requested(flags, device, _SURFACE), options.speculation()
    if options.speculate == "mtp":
        raise OptionError("--speculate mtp reads hidden states, which rows do not return; use lookup or a draft")
    from headrace.adapters.transformers.load_folder import load_matched
    from headrace.adapters.transformers.opened_model import open_model
    from headrace.cli.prompt import open_with_template
    from headrace.planning.request import PlanRequest
    from headrace.serving.async_engine import AsyncEngine
    from headrace.serving.endpoint import ServedModel
    from headrace.serving.switch import Hosted

    how: Any = {"experts_implementation": options.experts_implementation, "use_liger_kernel": options.use_liger_kernel}
    reopen = partial(open_model, folder, options.dtype, device=device, **how)
    opened = [reopen()]
    tokenizer = open_with_template(folder)
    _check_template(folder, tokenizer.chat_template)
    settings = _default_settings(opened[0], tokenizer, greedy=options.generation_config == "none")
    if policy is None and device.type == "cuda":
        policy = opened[0].default_budget(sequences, int(flags.context or AUTO_CONTEXT))
    asked = PlanRequest(opened[0], policy, device=device, disk=disk_options(flags), speculation=speculation)
    request, longest, host_bytes, share = _plan(opened[0], asked, sequences, flags, options.cpu_experts)

    def load(progress: Progress) -> tuple[ServedModel, Handle]:
        found = opened.pop() if opened else reopen()  # a loaded model is held by the server alone
        module: Any = found.module
        has_draft = speculation is not None  # graphs are the draft's
        handle = load_matched(folder, replace(request, model=module), found.match, progress, has_draft, share)
        module.generation_config = settings
        engine = AsyncEngine(module, sequences, longest, options.max_queue or _MAX_QUEUE)
        return ServedModel(module, tokenizer, names, engine), handle

    return Hosted(names, longest, load, host_bytes)


def _plan(
    opened: OpenedModel, request: PlanRequest, sequences: int, flags: OffloadFlags, cpu_experts: str | None
) -> tuple[PlanRequest, int, int, CpuShareForecast | str | bool]:
    """``request`` with its plan, which is printed, and no model; tokens of the longest sequence; bytes in the host;
    what is asked of the CPU.
    """
    from headrace.model.memory_profile import notes_on_experts
    from headrace.plan.slabs import slab_bytes
    from headrace.plan.tables import render
    from headrace.plan_model import plan_model
    from headrace.planning.checks import needs_of

    planned, speculation = plan_model(request), request.speculation
    longest, automatic = _longest(flags, planned), planned.context.automatic
    _check_rows(opened, longest, speculation is not None)
    request = replace(request, policy=planned.plan, workload=Workload([sequences], longest))
    planned = plan_model(request)  # again, to measure the cache of that workload
    if planned.shortage:
        raise OptionError(f"the plan {planned.shortage}; use a smaller --batch or --context, or less --device-memory")
    if speculation is not None and (forecast := planned.speculation) is not None:
        forecast.require_faster()
        speculation = replace(speculation, guesses=forecast.guesses)
    plan, on_gpu = planned.plan, planned.context.target.device.type == "cuda"
    stderr.print(render(plan, opened.name))
    for line in (*filter(None, [automatic]), *notes_on_experts(opened.module, ())):
        stderr.print(line, soft_wrap=True)
    cache = format_size(planned.planner.profile.cache_bytes(sequences, longest))
    stderr.print(
        f"cache: {sequences} sequences of {longest} tokens; {cache} "
        f"{'counted in --device-memory' if plan.context else 'beside the weights'}",
        soft_wrap=True,
    )
    on_meta = [storage.name for storage in opened.inventory.storages]
    host_bytes = needs_of(plan, on_gpu=on_gpu, on_meta=on_meta).host_bytes + slab_bytes(plan.resident.values())
    share = asked_of_cpu(cpu_experts, planned, stderr)
    return replace(request, model=None, policy=plan, speculation=speculation), longest, host_bytes, share


def _check_template(folder: Path, template: str | dict[str, str] | None) -> None:
    """Refuse a chat template that is none, which would end every request to a chat.

    Raises:
        CheckpointError: Jinja cannot read it.
    """
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    for text in template.values() if isinstance(template, dict) else [template] * bool(template):
        try:
            _compile_jinja_template(text)
        except TemplateError as error:
            line = getattr(error, "lineno", "?")
            raise CheckpointError(
                f"{folder}: expected a chat template that Jinja can read, found: {error.message} (line {line}); "
                f"download it again, or remove it to serve texts alone (/v1/completions)"
            ) from error


def _default_settings(opened: OpenedModel, tokenizer: Any, *, greedy: bool) -> Any:
    """The generation config that requests start from; ``greedy``: without the sampling of the model's own.

    Raises:
        OptionError, CheckpointError: the model generates no text, or in a way that is not supported.
    """
    from transformers import GenerationConfig

    opened.require_causal("headrace serve")
    _check_rows(opened, 0)
    settings, fix = opened.generation_settings, ""
    if greedy:
        settings = {name: settings.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    else:
        fix = ", leave its sampling out with --generation-config none, or use --engine vllm"
    opened.check_generation(tokenizer, settings, fix, batched=True)
    return GenerationConfig.from_dict(settings)


def _check_rows(opened: OpenedModel, num_tokens: int, guesses: bool = False) -> None:
    """Refuse a model whose sequences of ``num_tokens`` cannot decode together."""
    from headrace.graphs.cache_rows import why_not_in_rows

    if reason := why_not_in_rows(opened.module, num_tokens, guesses=guesses):
        raise OptionError(f"headrace serve cannot run this model: {reason}; use --engine vllm, or headrace generate")


def _longest(flags: OffloadFlags, planned: PlanResult) -> int:
    """Tokens of the longest sequence: as the flags or the plan set it, else a default."""
    limit = planned.planner.profile.max_context
    asked = int(flags.context) if flags.context is not None else planned.plan.context
    planned.planner.profile.check_context(asked)
    return asked or min(_CONTEXT, limit or _CONTEXT)


def _print_address(address: Any, names: Sequence[str], has_key: bool) -> None:
    host, port = address[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    body = json.dumps({"model": names[0], "prompt": "Water", "max_tokens": 16})
    key = " -H 'Authorization: Bearer KEY'" if has_key else ""
    lines = [f"serving {', '.join(names)} at {url}/v1, Ctrl-C ends it; in another terminal:"]
    lines += [f"  curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"]
    if not has_key and not host.startswith("127.") and host != "::1":
        lines.append(f"every client that reaches {host} is answered; --api-key or HEADRACE_API_KEY requires a key")
    for line in lines:
        stderr.print(line, markup=False, soft_wrap=True)
