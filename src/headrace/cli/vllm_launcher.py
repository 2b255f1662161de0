"""``headrace serve --engine vllm``: vLLM with headrace as its weight offloader."""

from __future__ import annotations

import difflib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

import typer

from headrace.adapters.vllm.interface import require_version
from headrace.adapters.vllm.options import FLAG_OF_KEY, FORM, KEYS, REFUSED, engine_options
from headrace.checkpoint.model_folder import NotFetchedError, model_folder
from headrace.checkpoint.safetensors_header import read_json
from headrace.cli.arguments import VERB_FLAGS, refuse_idle
from headrace.errors import OptionError
from headrace.flags import OffloadFlags, counts, flag_of

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
# Flags of both servers, passed on under the same names.
_SHARED_FLAGS = ("host", "port", "api_key", "served_model_name", "generation_config", "dtype")
# Flags of headrace, which are passed in --additional-config.
_OWN_FLAGS = tuple(name for name in FLAG_OF_KEY.values() if name not in _VLLM_FLAGS)
# Flags of headrace's own server alone: of the verb, and of all verbs.
_SERVER_FLAGS = (
    "max_queue", "cors", "allowed_hosts", "experts_implementation", "cpu_experts", "use_liger_kernel", "speculate",
    "guesses", "accepted", "accepted_from", "switch_after",
)  # fmt: skip
_IDLE_FLAGS = tuple(name for name in VERB_FLAGS if name not in (*_VLLM_FLAGS, *_OWN_FLAGS, "device"))


def serve_in_vllm(
    model: str,
    rest: Sequence[str],
    options: Mapping[str, Any],
    flags: OffloadFlags,
) -> None:
    """Become ``vllm serve`` with headrace as its weight offloader; ``options``: flags of ``headrace serve`` alone."""
    refuse_idle({flag_of(name): options[name] for name in _SERVER_FLAGS}, "inside vLLM; leave it out")
    refuse_idle({flag_of(name): getattr(flags, name) for name in _IDLE_FLAGS}, "inside vLLM; leave it out")
    _require_rest(model, rest)
    given = _parsed(options["additional_config"])
    engine_options(given, flags)  # raises errors now that the worker would raise minutes later
    config = _with_flags(given, flags)
    _count_replicas(config, rest)
    passed = {name: getattr(flags, name) for name in _VLLM_FLAGS}
    if flags.device_memory is not None:
        del passed["offload_params"]  # in the configuration, see _with_flags
    passed["additional_config"] = json.dumps(config) if config else None
    passed |= {name: options[name] for name in _SHARED_FLAGS} | {"device": flags.device}
    command = ["vllm", "serve", model, "--worker-cls", WORKER]
    for name, value in passed.items():
        if value is not None and value != []:
            command += [flag_of(name), *(value if isinstance(value, list) else [str(value)])]
    command += rest
    if options["dry_run"]:
        typer.echo(shlex.join(command))
        return
    if KEY_VARIABLE in os.environ and options["api_key"] is None:
        os.environ["VLLM_API_KEY"] = os.environ[KEY_VARIABLE]
    _become(command)


def why_not_vllm(model: str, options: Mapping[str, Any], flags: OffloadFlags) -> str | None:
    """Why ``--engine auto`` takes headrace's own server; ``None``: vLLM is here and runs the model on this GPU."""
    try:
        require_version(_installed_version())
    except metadata.PackageNotFoundError:
        return "vLLM is not installed (pip install 'headrace[vllm]')"
    except OptionError as error:
        return str(error)
    import torch

    if flags.device == "cpu" or not torch.cuda.is_available():
        return "vLLM needs a GPU here"
    own = [name for name in _SERVER_FLAGS if options[name]] + [name for name in _IDLE_FLAGS if flags.given(name)]
    if own or flags.offload_mode == "disk":
        return f"{flag_of(own[0]) if own else '--offload-mode disk'} is not in vLLM"
    from vllm.model_executor.models.registry import ModelRegistry

    try:
        folder = model_folder(model)
    except NotFetchedError:  # vLLM downloads it, and then knows
        return None
    wanted = read_json(folder / "config.json").get("architectures") or ["?"]
    known = ModelRegistry.get_supported_archs()
    return None if known & set(wanted) else f"vLLM has no {wanted[0]}"


def _installed_version() -> str:
    """Version of vLLM for this Python; builds of third parties have other distribution names."""
    names = metadata.packages_distributions() if util.find_spec("vllm") else {}  # looks through all that is installed
    return metadata.version(next(iter(names.get("vllm", ["vllm"]))))


def _require_rest(model: str, rest: Sequence[str]) -> None:
    """Refuse arguments after MODEL that vLLM would misread."""
    if model.startswith("-"):
        raise OptionError(
            f"MODEL is expected before the flags of vLLM, found {model!r}; write `headrace serve --engine vllm MODEL "
            f"{model} ...`"
        )
    taken = {flag_of(name) for name in (*_VLLM_FLAGS, *_OWN_FLAGS, "additional_config", "engine", "dry_run")}
    elsewhere = {flag_of(name) for name in VERB_FLAGS} - taken - {"--device"}
    refused = {refusal.flag: refusal.reason for refusal in REFUSED if refusal.refused is bool}
    for word in rest:
        name = word.partition("=")[0].partition(".")[0].replace("_", "-")
        if name == "--worker-cls":
            raise OptionError(f"--worker-cls is {WORKER} here; leave it out, or call `vllm serve` yourself")
        if name in taken:
            raise OptionError(f"{word} is read by headrace: write {name} and its value before `--`")
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
    number = _number_after(("--data-parallel-size-local", "-dpl"), rest)
    one_here = _number_after(("--data-parallel-rank", "-dpn"), rest) is not None  # other commands start the others
    hosts = _number_after(("--nnodes", "-n"), rest) or 1  # with several hosts, vLLM distributes the engines
    if number is None and not one_here and hosts == 1:
        number = _number_after(("--data-parallel-size", "-dp"), rest)
    if number is not None and number > 1:
        own["replicas"] = number


def _number_after(flags: Sequence[str], rest: Sequence[str]) -> int | None:
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
        require_version(_installed_version())
    except metadata.PackageNotFoundError:
        raise OptionError(f"vLLM is not installed for {sys.executable}: pip install 'headrace[vllm]'") from None
    beside = Path(sys.executable).with_name(command[0])
    program = str(beside) if beside.exists() else shutil.which(command[0])
    if program is None:
        raise OptionError(
            f"vLLM is installed for {sys.executable}, but its command {command[0]!r} is neither next to it nor on "
            f"PATH: add its folder to PATH"
        )
    sys.stdout.flush()  # exec discards buffered output
    os.execvp(program, list(command))
