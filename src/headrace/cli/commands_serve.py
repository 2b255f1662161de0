"""``headrace serve``: a server of its own, or with ``--engine vllm`` vLLM with headrace as its weight offloader."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from headrace.cli.arguments import DTYPE_HELP, VERB_FLAGS, check_dtype, refuse_idle, with_offload_flags
from headrace.cli.vllm_launcher import KEY_VARIABLE, serve_in_vllm
from headrace.errors import OptionError
from headrace.flags import OffloadFlags

__all__ = ["serve"]

_PACKAGES = ("transformers", "fastapi", "uvicorn", "openai", "prometheus_client", "jinja2")


def _flag(name: str, metavar: str | None, text: str, panel: str | None = "Server", **bounds: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=text, rich_help_panel=panel, **bounds)


@with_offload_flags(
    (*VERB_FLAGS, "measure_stalls"),
    {
        "batch": "Sequences of --context tokens that run together (default 8); more shorter ones do, too. In vLLM: "
        "rows of a step to plan for, e.g. 1,16,256.",
        "context": "Tokens of the longest sequence, prompt and answer (default 2048, or the model's own if less). If "
        "given, the cache counts in --device-memory.",
        "offload_mode": "Where offloaded weights are stored: cpu or disk. In vLLM: cpu (default), pinned host memory; "
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
        str | None, _flag("--engine", "NAME", "transformers (default) or vllm, the faster one on a GPU.", None)
    ] = None,
    host: Annotated[
        str | None, _flag("--host", "ADDRESS", "Where to listen (default 127.0.0.1: this machine).")
    ] = None,
    port: Annotated[int | None, _flag("--port", "N", "Default 8000; 0: a free one.", min=0, max=65535)] = None,
    api_key: Annotated[
        str | None,
        _flag("--api-key", "KEY", f"A bearer token that requests need; {KEY_VARIABLE} says it unseen by other users."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, _flag("--served-model-name", "NAME...", "What requests call the model (default MODEL).")
    ] = None,
    max_queue: Annotated[
        int | None,
        _flag("--max-queue", "N", "Requests that may wait (default 256); others are answered with 429.", min=1),
    ] = None,
    cors: Annotated[
        bool, _flag("--cors", None, "Answer pages of any origin (Access-Control-Allow-Origin: *); not in vLLM.")
    ] = False,
    generation_config: Annotated[
        str | None,
        _flag(
            "--generation-config",
            "auto|none",
            "Sampling of requests that do not say it: auto (default), as the model's generation_config.json; none, "
            "greedy.",
        ),
    ] = None,
    dtype: Annotated[str | None, _flag("--dtype", "NAME", DTYPE_HELP, None)] = None,
    additional_config: Annotated[
        str | None, _flag("--additional-config", "JSON", "vLLM's; what the flags here say is added to it.", None)
    ] = None,
    dry_run: Annotated[
        bool, _flag("--dry-run", None, "Print the plan, or the command of vLLM, and start nothing.", None)
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
        refuse_idle({"--max-queue": max_queue, "--cors": cors or None}, "inside vLLM; leave it out")
        serve_in_vllm(model, call.args, shared, additional_config, dry_run, flags)
        return
    if call.args:
        raise OptionError(
            f"{call.args[0]}: headrace serve has no such flag; flags of vLLM need --engine vllm, and "
            f"`headrace serve --help` shows those here"
        )
    refuse_idle(
        {"--additional-config": additional_config, "--measure-stalls": flags.measure_stalls}, "without --engine vllm"
    )
    check_dtype("--dtype", dtype)
    if generation_config not in (None, "auto", "none"):
        raise OptionError(f"--generation-config {generation_config!r}: expected auto or none")
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise OptionError(
            f"headrace serve needs packages that are not installed ({', '.join(missing)}): "
            f"pip install 'headrace[serve]'"
        )
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as main() does for the verbs that become no other program
    from headrace.cli.own_server import ServerOptions, run_server

    options = ServerOptions(
        host or "127.0.0.1",
        8000 if port is None else port,
        key,
        served_model_name or [model],
        max_queue or 256,
        cors,
        is_plain=generation_config == "none",
        dtype=dtype,
        dry_run=dry_run,
    )
    run_server(model, flags, options)
