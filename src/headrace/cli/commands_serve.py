"""``headrace serve``: a server of its own, or with ``--engine vllm`` vLLM with headrace as its weight offloader."""

from __future__ import annotations

import difflib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.adapters.vllm.interface import require_version
from headrace.adapters.vllm.options import FLAG_OF_KEY, FORM, KEYS, REFUSED, engine_options
from headrace.cli.arguments import VERB_FLAGS, refuse_idle, require_dtype, with_offload_flags
from headrace.errors import OptionError
from headrace.flags import OffloadFlags, counts, flag_of

__all__ = ["serve"]

WORKER = "headrace.adapters.vllm.Worker"
KEY_VARIABLE = "HEADRACE_API_KEY"

# Flags of vLLM, passed on under the same names.
_VLLM_FLAGS = (
    "offload_backend",
    "cpu_offload_gb",
    "cpu_offload_params",
    "offload_group_size",
    "offload_num_in_group",
    "offload_prefetch_step",
    "offload_params",
)
# Flags of headrace, which travel in --additional-config.
_OWN_FLAGS = ("device_memory", "batch", "offload_rule", "expert_slots", "offload_mode", "measure_stalls")
_SERVER = "Server"


@with_offload_flags(
    (*VERB_FLAGS, "measure_stalls"),
    {
        "batch": "Sequences of --context tokens that run together (default 8); more shorter ones do, too. In vLLM: "
        "rows of a step to plan for, e.g. 1,16,256.",
        "context": "Tokens of the longest sequence, prompt and answer (default 2048, or the model's own if less). If "
        "given, the cache counts in --device-memory.",
        "offload_mode": "Where offloaded weights rest: cpu or disk. In vLLM: cpu (default), pinned host memory; "
        "shm_cpu, one copy per host for data-parallel ranks.",
        "measure_stalls": "Time every wait for a unit; in vLLM alone.",
    },
)
def serve(
    call: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL [VLLM FLAGS]",
            help="Folder of a causal language model, or a name in the Hub's cache; with --engine vllm as vLLM takes "
            "it, with any flags of vLLM behind.",
        ),
    ],
    *,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="NAME", help="transformers (default) or vllm, the faster one on a GPU."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Where to listen (default 127.0.0.1: this machine).",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", metavar="N", min=0, max=65535, help="Default 8000; 0: a free one.", rich_help_panel=_SERVER
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help=f"What requests have to carry as a bearer token; {KEY_VARIABLE} says it unseen by other users.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME...",
            help="What requests call the model (default MODEL).",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    max_queue: Annotated[
        int | None,
        typer.Option(
            "--max-queue",
            metavar="N",
            min=1,
            help="Requests that may wait (default 256); further ones are answered with 429.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    generation_config: Annotated[
        str | None,
        typer.Option(
            "--generation-config",
            metavar="auto|none",
            help="Sampling of requests that do not say it: auto (default), as the model's generation_config.json; "
            "none, greedy.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="NAME", help="bfloat16, float16 or float32 (default the checkpoint's own)."),
    ] = None,
    additional_config: Annotated[
        str | None,
        typer.Option("--additional-config", metavar="JSON", help="vLLM's; what the flags here say is added to it."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, or the command of vLLM, and start nothing.")
    ] = False,
    flags: OffloadFlags,
) -> None:
    """Serve a model that does not fit the device, with OpenAI's API.

    By default with transformers' server, in this process, on a GPU or on a CPU. With --engine vllm inside vLLM, whose
    flags follow MODEL; `--` may stand between.
    """
    if engine not in (None, "transformers", "vllm"):
        raise OptionError(f"--engine {engine!r}: expected transformers or vllm")
    key = os.environ.get(KEY_VARIABLE) if api_key is None else api_key
    key_flag = KEY_VARIABLE if api_key is None else "--api-key"
    named = [("--served-model-name", name) for name in served_model_name or []]
    for flag, text in [("--host", host), (key_flag, key), *named]:
        if text is not None and text != (text.strip() or None):  # of a variable that is not set, or a file with CRLF
            raise OptionError(
                f"{flag}: expected a text without blanks around it, found "
                f"{'one with some' if text else 'an empty one'}; set it, or leave {flag} out"
            )
    if engine == "vllm":
        shared = {
            "--host": host,
            "--port": port,
            "--api-key": api_key,
            "--served-model-name": served_model_name,
            "--generation-config": generation_config,
            "--dtype": dtype,
            "--device": flags.device,
        }
        refuse_idle({"--max-queue": max_queue}, "inside vLLM; leave it out")
        _serve_in_vllm(model, call.args, shared, additional_config, dry_run, flags)
        return
    if call.args:
        raise OptionError(
            f"{call.args[0]}: headrace serve has no such flag; flags of vLLM need --engine vllm, and "
            f"`headrace serve --help` shows those here"
        )
    refuse_idle(
        {"--additional-config": additional_config, "--measure-stalls": flags.measure_stalls}, "without --engine vllm"
    )
    require_dtype(dtype)
    if generation_config not in (None, "auto", "none"):
        raise OptionError(f"--generation-config {generation_config!r}: expected auto or none")
    _require_packages()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as main() does for the verbs that become no other program
    from headrace.cli.own_server import ServerOptions, run_server

    run_server(
        model,
        flags,
        ServerOptions(
            host=host or "127.0.0.1",
            port=8000 if port is None else port,
            api_key=key,
            names=served_model_name or [model],
            max_queue=max_queue or 256,
            plain=generation_config == "none",
            dtype=dtype,
            dry_run=dry_run,
        ),
    )


def _require_packages() -> None:
    missing = [
        name
        for name in ("transformers", "fastapi", "uvicorn", "openai", "prometheus_client", "jinja2")
        if find_spec(name) is None
    ]
    if missing:
        raise OptionError(
            f"headrace serve needs packages that are not installed ({', '.join(missing)}): "
            f"pip install 'headrace[serve]'"
        )


# -- inside vLLM -------------------------------------------------------------------------------------------------------


def _serve_in_vllm(
    model: str,
    rest: Sequence[str],
    shared: Mapping[str, object],
    additional_config: str | None,
    dry_run: bool,
    flags: OffloadFlags,
) -> None:
    """Fill in what makes headrace vLLM's weight offloader, and become ``vllm serve``; ``shared``: flags of both."""
    for name in VERB_FLAGS:
        if name not in (*_VLLM_FLAGS, *_OWN_FLAGS, "device"):
            refuse_idle({flag_of(name): getattr(flags, name)}, "inside vLLM; leave it out")
    _require_rest(model, rest)
    given = _parsed(additional_config)
    engine_options(given, flags)  # finds here what the worker would refuse minutes later
    config = _with_flags(given, flags)
    _count_replicas(config, rest)
    command = ["vllm", "serve", model, "--worker-cls", WORKER]
    for name in _VLLM_FLAGS:
        value = getattr(flags, name)
        if value is None or value == [] or (name == "offload_params" and flags.device_memory is not None):
            continue
        command += _words(flag_of(name), value)
    if config:
        command += ["--additional-config", json.dumps(config)]
    for flag, value in shared.items():
        if value is not None and value != []:
            command += _words(flag, value)
    command += rest
    if dry_run:
        typer.echo(shlex.join(command))
        return
    if KEY_VARIABLE in os.environ and shared["--api-key"] is None:
        os.environ["VLLM_API_KEY"] = os.environ[KEY_VARIABLE]
    _become(command)


def _words(flag: str, value: object) -> list[str]:
    return [flag, *(value if isinstance(value, list) else [str(value)])]


def _require_rest(model: str, rest: Sequence[str]) -> None:
    """Refuse arguments after MODEL that vLLM would misread."""
    if model.startswith("-"):
        raise OptionError(
            f"MODEL is expected before the flags of vLLM, found {model!r}; write `headrace serve --engine vllm MODEL "
            f"{model} ...`"
        )
    taken = {flag_of(name) for name in (*_VLLM_FLAGS, *_OWN_FLAGS, "additional_config", "engine", "dry_run")}
    elsewhere = {flag_of(name) for name in VERB_FLAGS} - taken - {"--device"}
    refused = {refusal.flag: refusal.reason for refusal in REFUSED if refusal.values is None}
    for word in rest:
        name = word.partition("=")[0].partition(".")[0].replace("_", "-")
        if name == "--worker-cls":
            raise OptionError(f"--worker-cls is {WORKER} here; leave it out, or call `vllm serve` yourself")
        if name in taken:
            raise OptionError(f"{word} is read by headrace: write it as {name} before `--`, its value behind it")
        if name in elsewhere:
            raise OptionError(f"{name} has no effect inside vLLM; leave it out")
        if name in refused:
            raise OptionError(f"{name} {refused[name]}; leave it out, or offload nothing (`vllm serve`)")


def _parsed(text: str | None) -> dict[str, Any]:
    """The user's additional configuration; keys that resemble headrace's are refused."""
    try:
        given = json.loads(text or "{}")
    except ValueError as error:
        raise OptionError(f"--additional-config {text!r}: expected JSON ({error}); {FORM}") from None
    if not isinstance(given, dict):
        raise OptionError(f"--additional-config: expected a JSON object, found {text!r}; {FORM}")
    # vLLM ignores unknown keys, so a misspelled one would have no effect and give no error.
    for key in given:
        if key in KEYS:
            raise OptionError(f"--additional-config: {key!r} belongs under 'headrace'; {FORM}")
        if key != "headrace" and difflib.get_close_matches(key.lower(), ["headrace"], cutoff=0.8):
            raise OptionError(f"--additional-config: {key!r} has no effect; did you mean 'headrace'? {FORM}")
    return given


def _with_flags(given: Mapping[str, Any], flags: OffloadFlags) -> dict[str, Any]:
    """The additional configuration with headrace's flags added under its key ``headrace``."""
    own: dict[str, Any] = {}
    for key, name in FLAG_OF_KEY.items():
        # Names go to vLLM's own flag, except with a budget, for which vLLM has no flag.
        if flags.given(name) and (key != "params" or flags.device_memory is not None):
            own[key] = counts("--batch", flags.batch or "") if key == "batch" else getattr(flags, name)
    merged = {**given.get("headrace", {}), **own}
    return {**given, "headrace": merged} if merged else dict(given)


def _count_replicas(config: dict[str, Any], rest: Sequence[str]) -> None:
    """Add the number of engines of this host that share one store, where the command line gives it."""
    # vLLM does not pass it to the engines of a dense model, each of which has a world size of 1.
    own = config.get("headrace", {})
    if own.get("mode") != "shm_cpu" or "replicas" in own:
        return
    number = _number_behind(("--data-parallel-size-local", "-dpl"), rest)
    one_here = _number_behind(("--data-parallel-rank", "-dpn"), rest) is not None  # other commands start the others
    hosts = _number_behind(("--nnodes", "-n"), rest) or 1  # with several hosts, vLLM distributes the engines
    if number is None and not one_here and hosts == 1:
        number = _number_behind(("--data-parallel-size", "-dp"), rest)
    if number is not None and number > 1:
        own["replicas"] = number


def _number_behind(flags: Sequence[str], rest: Sequence[str]) -> int | None:
    """The value of the last of ``flags`` in a command line, if it is a number; vLLM refuses anything else."""
    found = None
    for index, word in enumerate(rest):
        name, _, value = word.partition("=")
        if name.replace("_", "-") in flags:
            found = value or next(iter(rest[index + 1 :]), "")
    return int(found) if found and found.isdecimal() else None


def _become(command: Sequence[str]) -> None:
    """Replace this process by vLLM of the same Python, which has to import headrace.

    Raises:
        OptionError: it is not installed, or of another version than those headrace knows.
    """
    try:
        # Builds of third parties have other distribution names.
        name = next(iter(metadata.packages_distributions().get("vllm", ["vllm"])))
        require_version(metadata.version(name))
    except metadata.PackageNotFoundError:
        raise OptionError(f"vLLM is not installed for {sys.executable}: pip install 'headrace[vllm]'") from None
    beside = Path(sys.executable).with_name(command[0])
    program = str(beside) if beside.exists() else shutil.which(command[0])
    if program is None:
        raise OptionError(
            f"vLLM is installed for {sys.executable}, but its command {command[0]!r} is neither beside that nor on "
            f"PATH: add its folder to PATH"
        )
    sys.stdout.flush()  # exec discards what Python has buffered
    os.execvp(program, list(command))
