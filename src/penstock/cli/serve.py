"""``penstock serve --engine vllm``: fill in what makes penstock vLLM's weight offloader, and become ``vllm serve``."""

from __future__ import annotations

import difflib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from penstock.cli.options import OffloadFlags, with_some_offload_flags
from penstock.config import Budget
from penstock.errors import OptionError

__all__ = ["serve"]

WORKER = "penstock.adapters.vllm.Worker"

# Passed on under the same names.
_VLLM_FLAGS = (
    "offload_backend",
    "cpu_offload_gb",
    "cpu_offload_params",
    "offload_group_size",
    "offload_num_in_group",
    "offload_prefetch_step",
    "offload_params",
)
_OWN_FLAGS = ("device_memory", "batch", "offload_rule")
# Of penstock's other verbs; inside vLLM they mean nothing.
_ELSEWHERE = ("--context", "--host-memory", "--plan", "--disk-direct", "--disk-drop-cache")
# The worker refuses them too, after minutes.
_MOVE_WEIGHTS = ("--enable-eplb", "--enable-dbo")


@with_some_offload_flags(*_VLLM_FLAGS, *_OWN_FLAGS)
def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL [VLLM FLAGS]", help="The model, as vLLM takes it; any flags of vLLM behind.")
    ],
    *,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="NAME", help="vllm; penstock has no engine of its own yet.")
    ] = None,
    offload_mode: Annotated[
        str | None,
        typer.Option(
            "--offload-mode",
            metavar="NAME",
            help="cpu (default): pinned host memory; shm_cpu: one copy per host for data-parallel ranks.",
            rich_help_panel="Offloading",
        ),
    ] = None,
    measure_stalls: Annotated[
        bool, typer.Option("--measure-stalls", help="Time every wait for a unit.", rich_help_panel="Offloading")
    ] = False,
    additional_config: Annotated[
        str | None,
        typer.Option("--additional-config", metavar="JSON", help="vLLM's; what the flags here say is added to it."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, and start nothing.")] = False,
    flags: OffloadFlags,
) -> None:
    """Serve a model that does not fit the GPU: inside vLLM, with penstock moving the weights.

    Flags that are not listed here go to `vllm serve`. MODEL comes before them; `--` may stand between.
    """
    _require_engine(engine)
    _require_rest(model, context.args)
    flags = replace(flags, offload_mode=offload_mode)
    config = _additional_config(additional_config, _own_keys(flags, measure_stalls))
    _count_replicas(config, context.args)
    _require_sense(flags, config)
    command = ["vllm", "serve", model, "--worker-cls", WORKER, *_vllm_flags(flags)]
    if config:
        command += ["--additional-config", json.dumps(config)]
    command += context.args
    if dry_run:
        typer.echo(shlex.join(command))
        return
    _become(command)


def _require_engine(engine: str | None) -> None:
    if engine is None:
        raise OptionError(
            "penstock's own engine is not there yet: write `penstock serve --engine vllm MODEL ...`, which needs vLLM "
            "(pip install 'penstock[vllm]'); `penstock generate MODEL` makes text without a server"
        )
    if engine != "vllm":
        raise OptionError(f"--engine {engine!r}: expected vllm, the only engine that there is a server for")


def _require_rest(model: str, rest: Sequence[str]) -> None:
    """Refuse what would be read in another way than it is meant."""
    from penstock.adapters.vllm.options import REFUSED

    if model.startswith("-"):
        raise OptionError(
            f"MODEL is expected before the flags of vLLM, found {model!r}; write `penstock serve --engine vllm MODEL "
            f"{model} ...`"
        )
    taken = {_flag(name) for name in (*_VLLM_FLAGS, *_OWN_FLAGS)}
    taken |= {"--offload-mode", "--measure-stalls", "--additional-config", "--engine", "--dry-run"}
    for word in rest:
        name = word.partition("=")[0].partition(".")[0].replace("_", "-")
        if name == "--worker-cls":
            raise OptionError(f"--worker-cls is {WORKER} here; leave it out, or call `vllm serve` yourself")
        if name in taken:
            raise OptionError(f"{word} is read by penstock: write it as {name} before `--`, its value behind it")
        if name in _ELSEWHERE:
            raise OptionError(f"{name} has no effect inside vLLM; leave it out")
        if name in _MOVE_WEIGHTS:
            raise OptionError(f"{name} {REFUSED[name]}; leave it out, or offload nothing (`vllm serve`)")


def _own_keys(flags: OffloadFlags, measure_stalls: bool) -> dict[str, Any]:
    """The keys of ``penstock.adapters.vllm.options`` that the flags stand for.

    Raises:
        OptionError: flags that contradict one another; the message names them as they were given.
    """
    policy = flags.policy(on_gpu=True, in_engine=True)
    keys: dict[str, Any] = {}
    if isinstance(policy, Budget):
        keys["device_memory"] = flags.device_memory
        if flags.batch is not None:
            keys["batch"] = list(policy.workload.batch_sizes)
        if flags.offload_params:
            keys["params"] = list(flags.offload_params)
    elif flags.offload_rule:
        raise OptionError("--offload-rule has no effect inside vLLM without --device-memory; add it")
    if flags.offload_rule:
        keys["rules"] = list(flags.offload_rule)
    if flags.offload_mode is not None:
        keys["mode"] = flags.offload_mode
    if measure_stalls:
        keys["measure_stalls"] = True
    return keys


def _additional_config(text: str | None, own: Mapping[str, Any]) -> dict[str, Any]:
    """The user's, with ``own`` added under its key ``penstock``."""
    given = _parsed(text)
    _refuse_misplaced(given)
    theirs = given.get("penstock", {})
    if not isinstance(theirs, dict):
        return given  # read_options says what is wrong with it
    for key in own:
        if key in theirs and theirs[key] != own[key]:
            raise OptionError(
                f"penstock.{key} is given twice: {theirs[key]!r} in --additional-config and {own[key]!r} as a flag; "
                f"leave one of them out"
            )
    merged = {**theirs, **own}
    return {**given, "penstock": merged} if merged else given


def _refuse_misplaced(given: Mapping[str, Any]) -> None:
    """vLLM passes on keys that nobody reads."""
    from penstock.adapters.vllm.options import KEYS

    for key in given:
        if key in KEYS:
            raise OptionError(f"--additional-config: {key!r} belongs under 'penstock'; {_FORM}")
        if key != "penstock" and difflib.get_close_matches(key.lower(), ["penstock"], cutoff=0.8):
            raise OptionError(f"--additional-config: {key!r} is read by nobody; did you mean 'penstock'? {_FORM}")


def _count_replicas(config: dict[str, Any], rest: Sequence[str]) -> None:
    """Say how many engines of this host share one store, which vLLM does not tell those of a dense model."""
    own = config.get("penstock", {})
    if not isinstance(own, dict) or own.get("mode") != "shm_cpu" or "replicas" in own:
        return
    number = _number_behind(("--data-parallel-size-local", "-dpl"), rest)
    one_here = _number_behind(("--data-parallel-rank", "-dpn"), rest) is not None  # the others are other commands'
    hosts = _number_behind(("--nnodes", "-n"), rest) or 1  # of several, vLLM shares the engines out
    if number is None and not one_here and hosts == 1:
        number = _number_behind(("--data-parallel-size", "-dp"), rest)
    if number is not None and number > 1:
        own["replicas"] = number


def _number_behind(flags: Sequence[str], rest: Sequence[str]) -> int | None:
    """The value of the last of ``flags`` in a command line, if it is a number; what is not, vLLM refuses."""
    found = None
    for index, word in enumerate(rest):
        name, _, value = word.partition("=")
        if name.replace("_", "-") in flags:
            found = value or next(iter(rest[index + 1 :]), "")
    return int(found) if found and found.isdecimal() else None


def _parsed(text: str | None) -> dict[str, Any]:
    try:
        given = json.loads(text or "{}")
    except ValueError as error:
        raise OptionError(f"--additional-config {text!r}: expected JSON ({error}); {_FORM}") from None
    if not isinstance(given, dict):
        raise OptionError(f"--additional-config: expected a JSON object, found {text!r}; {_FORM}")
    return given


_FORM = """write it like --additional-config '{"penstock": {"device_memory": "20GiB"}}'"""


def _require_sense(flags: OffloadFlags, config: Mapping[str, Any]) -> None:
    """What the worker would refuse, minutes later, is refused here."""
    if flags.offload_backend not in (None, "auto", "prefetch", "uva"):
        raise OptionError(
            f"--offload-backend {flags.offload_backend!r}: expected auto, prefetch or uva, those of vLLM; to offload "
            f"nothing leave the offloading flags out"
        )
    from penstock.adapters.vllm.options import read_options

    names = () if flags.device_memory is not None else flags.offload_params or ()
    prefetch = SimpleNamespace(
        offload_group_size=flags.offload_group_size or 0,
        offload_num_in_group=1 if flags.offload_num_in_group is None else flags.offload_num_in_group,
        offload_prefetch_step=1 if flags.offload_prefetch_step is None else flags.offload_prefetch_step,
        offload_params=set(names),
    )
    uva = SimpleNamespace(
        cpu_offload_gb=flags.cpu_offload_gb or 0.0, cpu_offload_params=set(flags.cpu_offload_params or ())
    )
    read_options(SimpleNamespace(offload_backend=flags.offload_backend or "auto", prefetch=prefetch, uva=uva), config)


def _vllm_flags(flags: OffloadFlags) -> list[str]:
    words: list[str] = []
    for name in _VLLM_FLAGS:
        value = getattr(flags, name)
        if value is None or value == [] or (name == "offload_params" and flags.device_memory is not None):
            continue
        words += [_flag(name), *(value if isinstance(value, list) else [str(value)])]
    return words


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _become(command: Sequence[str]) -> None:
    """Replace this process by vLLM of the same Python, which has to import penstock.

    Raises:
        OptionError: it is not installed, or of another version than those penstock knows.
    """
    from importlib import metadata

    from penstock.adapters.vllm.interface import require_version

    try:
        # Builds of third parties have names of their own.
        name = next(iter(metadata.packages_distributions().get("vllm", ["vllm"])))
        require_version(metadata.version(name))
    except metadata.PackageNotFoundError:
        raise OptionError(f"vLLM is not installed for {sys.executable}: pip install 'penstock[vllm]'") from None
    beside = Path(sys.executable).with_name(command[0])
    program = str(beside) if beside.exists() else shutil.which(command[0])
    if program is None:
        raise OptionError(
            f"vLLM is installed for {sys.executable}, but its command {command[0]!r} is neither beside that nor on "
            f"PATH: add its folder to PATH"
        )
    sys.stdout.flush()
    os.execvp(program, list(command))
