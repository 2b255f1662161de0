"""``headrace serve``: headrace's own server, or vLLM with headrace as its weight offloader."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Sequence
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
    cpu_experts: bool = row("", f"{CPU_EXPERTS_HELP}; not in vLLM.", off=False)
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
    if len(models) > 1 and engine == "vllm":
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
    names = _names_of(models, folders, options, flags)
    device = target_device(flags.device)
    if flags.context is not None:
        count("--context", flags.context)
    planned = [_Planned.of(folder, device, flags, options) for folder in folders]
    from headrace.memory.system import read_limits
    from headrace.serving.app import App
    from headrace.serving.listening import bind, run_app
    from headrace.serving.switch import Hosted, Switch

    max_waiting, hosted = options.max_queue or _MAX_QUEUE, list[Hosted]()
    for name, each in zip(names, planned, strict=True):
        load: Any = partial(each.load, name, max_waiting)
        hosted.append(Hosted(name, each.longest, load, each.host_bytes if len(models) > 1 else 0))
    limits = read_limits(device)
    free = (limits.host_available_bytes, limits.cgroup_available_bytes)
    limit = min((found for found in free if found is not None), default=None)
    if flags.host_memory is not None:
        limit = parse_size(flags.host_memory, "--host-memory")
    switch = Switch(hosted, max_waiting, limit, 10.0 if options.switch_after is None else options.switch_after)
    first = switch.first()
    if len(models) > 1:
        _print_places(hosted, first, limit)
    if options.dry_run:
        return
    bound = bind(options.host or "127.0.0.1", 8000 if options.port is None else options.port)
    for model in reversed(first):  # the first one stays on the device
        with byte_bar("loading", stderr) as progress:
            switch.bring(model, progress)
    app = App(switch, options.api_key, options.cors, options.allowed_hosts)
    bound.listen()  # requests wait until the server runs
    _print_address(bound.getsockname(), [name[0] for name in names], options.api_key is not None)
    run_app(app, bound)


def _names_of(
    models: Sequence[str], folders: Sequence[Path], options: _ServeOptions, flags: OffloadFlags
) -> list[list[str]]:
    """Names of each model in requests; of several, the last part of its own, and as it is written.

    Raises:
        OptionError: two have one name; flags that are for one model.
    """
    given = options.served_model_name
    if len(models) == 1:
        refuse_idle({"--switch-after": options.switch_after}, "with one model; name others behind it")
        return [given or [*models]]
    if flags.plan is not None:
        raise OptionError("--plan is the plan of one model, and there are several; give --device-memory instead")
    if options.speculate not in (None, "lookup"):
        raise OptionError(
            f"--speculate {options.speculate}: a draft stays on the device, which several models take in turns; use "
            f"--speculate lookup, or leave it out"
        )
    if given is not None and len(given) != len(models):
        raise OptionError(
            f"--served-model-name: expected a name for each of the {len(models)} models, in their order, found "
            f"{len(given)}"
        )
    own = given or [model_name(folder).rpartition("/")[2] for folder in folders]
    for name in own:
        if len(same := [model for model, other in zip(models, own, strict=True) if other == name]) > 1:
            raise OptionError(
                f"{' and '.join(same)} are both {name!r} in requests; tell them apart with --served-model-name and a "
                f"name for each of the {len(models)} models, in their order"
            )
    if given:
        return [[name] for name in own]
    return [list(dict.fromkeys((name, model))) for name, model in zip(own, models, strict=True)]


def _print_places(hosted: Sequence[Hosted], first: Sequence[Hosted], limit: int | None) -> None:
    """Where the models are while another one runs."""
    of = "" if limit is None else f" of {format_size(limit)}"
    each = ", ".join(f"{model.names[0]} {format_size(model.host_bytes)}" for model in hosted)
    stderr.print(f"host memory of stores, and of what is parked: {each}{of}", markup=False, soft_wrap=True)
    for model in (model for model in hosted if model not in first):
        text = "has no room there beside the others, and is loaded from its files when it is wanted (--host-memory)"
        stderr.print(f"{model.names[0]} {text}", markup=False, soft_wrap=True)


@dataclass
class _Planned:
    """One model of the server with its plan, to load as often as it takes.

    Attributes:
        opened: on ``meta``; ``None``: it has been loaded, and has to be opened again.
        host_bytes: host memory of its stores, and of its residents while it is parked.
    """

    open: Callable[[], OpenedModel]
    opened: OpenedModel | None
    tokenizer: Any
    settings: Any
    request: PlanRequest
    sequences: int
    longest: int
    cpu_experts: bool
    host_bytes: int

    @classmethod
    def of(cls, folder: Path, device: torch.device, flags: OffloadFlags, options: _ServeOptions) -> _Planned:
        """Plan the model in ``folder``, and print the plan.

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
        from headrace.adapters.transformers.opened_model import open_model
        from headrace.cli.prompt import open_with_template
        from headrace.model.memory_profile import notes_on_experts
        from headrace.plan.slabs import slab_bytes
        from headrace.plan.tables import render
        from headrace.plan_model import plan_model
        from headrace.planning.checks import needs_of
        from headrace.planning.request import PlanRequest

        how: Any = {"experts_implementation": options.experts_implementation}
        how["use_liger_kernel"] = options.use_liger_kernel
        reopen = partial(open_model, folder, options.dtype, device=device, **how)
        opened = reopen()
        tokenizer = open_with_template(folder)
        _check_template(folder, tokenizer.chat_template)
        settings = _default_settings(opened, tokenizer, greedy=options.generation_config == "none")
        if policy is None and device.type == "cuda":
            policy = opened.default_budget(sequences, int(flags.context or AUTO_CONTEXT))
        request = PlanRequest(opened, policy, device=device, disk=disk_options(flags), speculation=speculation)
        planned = plan_model(request)
        longest, automatic = _longest(flags, planned), planned.context.automatic
        _check_rows(opened, longest, speculation is not None)
        request = replace(request, policy=planned.plan, workload=Workload([sequences], longest))
        planned = plan_model(request)  # again, to measure the cache of that workload
        if planned.shortage:
            fix = "use a smaller --batch or --context, or less --device-memory"
            raise OptionError(f"the plan {planned.shortage}; {fix}")
        if speculation is not None and (forecast := planned.speculation) is not None:
            forecast.require_faster()
            request = replace(request, speculation=replace(speculation, guesses=forecast.guesses))
        plan = planned.plan
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
        stores = needs_of(plan, on_gpu=device.type == "cuda", on_meta=on_meta).host_bytes
        host_bytes = stores + slab_bytes(plan.resident.values())
        request = replace(request, model=None, policy=plan)
        return cls(reopen, opened, tokenizer, settings, request, sequences, longest, options.cpu_experts, host_bytes)

    def load(self, names: Sequence[str], max_waiting: int, progress: Progress) -> tuple[ServedModel, Handle]:
        """The model on its device, with an engine that has not started."""
        from headrace.adapters.transformers.load_folder import load_matched
        from headrace.serving.async_engine import AsyncEngine
        from headrace.serving.endpoint import ServedModel

        opened, self.opened = self.opened or self.open(), None
        module: Any = opened.module
        request = replace(self.request, model=module)
        has_draft = request.speculation is not None  # graphs are the draft's
        handle = load_matched(opened.folder, request, opened.match, progress, has_draft, self.cpu_experts)
        module.generation_config = self.settings
        engine = AsyncEngine(module, self.sequences, self.longest, max_waiting)
        return ServedModel(module, self.tokenizer, names, engine), handle


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
        lines.append(f"anyone who can reach {host} may use it; --api-key or HEADRACE_API_KEY requires a key")
    for line in lines:
        stderr.print(line, markup=False, soft_wrap=True)
