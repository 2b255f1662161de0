"""Arguments that verbs share: model, policy, device, output file and folder."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import typer
from rich.console import Console

from headrace.checkpoint.model_folder import NotFetchedError, model_folder, name_on_hub
from headrace.checkpoint.safetensors_header import read_json
from headrace.cli.terminal import log_lines, print_line
from headrace.config import AUTO, Policy, count, one_of
from headrace.errors import CheckpointError, HeadraceError, OptionError
from headrace.flags import COMMAND_LINE, OffloadFlags, Surface, flag_of, row

if TYPE_CHECKING:
    import torch

    from headrace.plan.cpu_share import CpuShareForecast
    from headrace.plan.plan import DeviceName, Plan
    from headrace.plan.speculation import Speculation
    from headrace.plan_model import PlanResult
    from headrace.stores.file_reads import DiskOptions

DTYPE_HELP = "bfloat16, float16 or float32 (default the checkpoint's own)."
EXPERTS_HELP = "Experts of transformers: grouped_mm, ... (default headrace on a GPU, where it runs the model)"
CPU_EXPERTS_HELP = "The CPU computes a share of the cached experts that a step misses, same bits; auto: if it pays"
check_cpu_experts = one_of(("on", AUTO))
LIGER_HELP = "RMSNorm of the package liger-kernel, on a GPU: faster, other bits than transformers' own"
check_dtype = one_of(("bfloat16", "float16", "float32"))

_VERBOSE_HELP = "Log progress to stderr (-vv: more)."
_VERBOSE = typer.Option(0, "-v", "--verbose", count=True, metavar="", help=_VERBOSE_HELP, show_default=False)

# What a model and its tokenizer are loaded from: no code, no pickles.
_LOADED = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken")
_HUB_TIMEOUT_S = 20

# All flags except the one of engines alone.
VERB_FLAGS = tuple(row.name for row in fields(OffloadFlags) if row.name != "measure_stalls")


@dataclass(frozen=True)
class SpeculationFlags:
    """Flags of verbs that generate, or plan for it."""

    speculate: str | None = row("WHAT", "Verify several guesses a pass: lookup (n-grams), mtp (heads), or a MODEL.")
    guesses: int | None = row("K", "Guesses of a pass (default: the fastest by the plan).", count)
    accepted: float | None = row("T", "Tokens that a pass yields, as you know them (default: assumed).")
    accepted_from: Path | None = row("FILE", "The same, from a file of `generate --acceptance`.")

    def speculation(self) -> Speculation | None:
        """The speculation that the flags ask for.

        Raises:
            OptionError: flags without ``--speculate``; a file of something else.
        """
        from headrace.plan.speculation import Speculation

        if self.speculate is None:
            given = {"--guesses": self.guesses, "--accepted": self.accepted, "--accepted-from": self.accepted_from}
            refuse_idle(given, "without --speculate; add --speculate lookup, for example")
            return None
        if self.accepted_from is None:
            return Speculation(self.speculate, self.guesses, self.accepted)
        if self.accepted is not None:
            raise OptionError("--accepted and --accepted-from contradict each other: leave one out")
        return Speculation.measured(self.speculate, self.accepted_from, self.guesses)


def with_flags(
    own: type[Any],
    names: Sequence[str] = VERB_FLAGS,
    helps: Mapping[str, str] | None = None,
    *,
    logs: bool = True,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add flags to a verb: those of the table ``own``, as its argument ``options``.

    ``names``: flags of :class:`OffloadFlags` to add, as its argument ``flags``; ``helps`` replace their texts.
    ``logs``: also ``--verbose``, by which records of the logger ``headrace`` go to stderr.
    """

    def add(verb: Callable[..., None]) -> Callable[..., None]:
        def run(*, verbose: int = 0, **values: Any) -> None:
            options = {flag.name: values.pop(flag.name) for flag in fields(own)}
            for flag in fields(own):
                if options[flag.name] is not None:
                    flag.metadata["check"](flag_of(flag.name), options[flag.name])
            if names:
                values["flags"] = OffloadFlags(**{name: values.pop(name) for name in names})
            with log_lines(verbose):
                verb(options=own(**options), **values)

        # Annotations are strings here (PEP 563), and typer needs the types.
        hints = get_type_hints(verb, include_extras=True)
        given = [p.replace(annotation=hints[p.name]) for p in inspect.signature(verb).parameters.values()]
        shown = [p for p in given if p.name not in ("flags", "options")] + _options(own, {})
        shown += [option for option in _options(OffloadFlags, helps or {}, "Offloading") if option.name in names]
        if logs:
            keyword = inspect.Parameter.KEYWORD_ONLY
            shown.append(inspect.Parameter("verbose", keyword, default=_VERBOSE, annotation=int))
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in shown}
        run.__name__ = verb.__name__
        # typer would keep the lines of the source.
        run.__doc__ = "\n\n".join(" ".join(part.split()) for part in (verb.__doc__ or "").split("\n\n"))
        return run

    return add


def _options(table: type[Any], helps: Mapping[str, str], panel: str | None = None) -> list[inspect.Parameter]:
    """The rows of ``table`` as typer takes options."""
    hints = get_type_hints(table)
    return [
        inspect.Parameter(
            row.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(
                row.default,
                flag_of(row.name),
                metavar=row.metadata["metavar"],
                help=helps.get(row.name, row.metadata["help"]),
                rich_help_panel="Speculation" if row.name in SpeculationFlags.__dataclass_fields__ else panel,
                show_default=False,
            ),
            annotation=hints[row.name],
        )
        for row in fields(table)
    ]


def requested(
    flags: OffloadFlags, device: torch.device | DeviceName, surface: Surface = COMMAND_LINE
) -> Policy | Plan | None:
    """The policy or plan that the flags of a verb ask for on ``device``; ``None`` if nothing is to be offloaded.

    Raises:
        OptionError: flags that contradict one another or have no effect; a file of ``--plan`` that holds no plan.
    """
    # On a CPU the files of the checkpoint are the store; a copy in memory is made only on request.
    policy = flags.policy(surface, default_mode="cpu" if device.type == "cuda" else "disk")
    if flags.plan is None:
        return policy
    from headrace.plan.plan import Plan

    return Plan.load(flags.plan)


def disk_options(flags: OffloadFlags) -> DiskOptions | None:
    """How checkpoint files are read; ``None`` without a flag for it."""
    from headrace.stores.file_reads import DiskOptions

    # None and not the defaults, which differ between loading and streaming.
    if not (flags.disk_direct or flags.disk_drop_cache):
        return None
    return DiskOptions(direct=flags.disk_direct, drop_cache=flags.disk_drop_cache)


def target_device(name: str | None, instead: str = "") -> torch.device:
    """Device of compute: ``--device``, or by default a GPU where there is one.

    ``instead``: an alternative for a user without that device, as the end of the message.

    Raises:
        OptionError: this machine has no device of that name.
    """
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise OptionError(f"--device {name!r}: expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"--device {name!r}: torch sees {torch.cuda.device_count()} CUDA device(s) here; --device cpu needs none"
            f"{instead}"
        )
    return device


def folder_or_download(model: str, console: Console, *, fetch: bool) -> Path:
    """:func:`model_folder`; downloads a model of the Hub that is not there, on a yes at a terminal, or to ``fetch``.

    Raises:
        CheckpointError: no such model, here or on the Hub; the answer is not yes.
    """
    name = name_on_hub(model)
    try:
        folder = model_folder(model)
        if name is None or not _lacks_weights(folder):
            return folder
        missing = f"{folder}: expected all safetensors files of {name}, found some missing: `hf download {name}`"
    except NotFetchedError as error:
        if name is None:
            raise
        missing = str(error)
    # Ranks of torchrun would all read the answer.
    asks = console.is_terminal and sys.stdin is not None and sys.stdin.isatty() and "RANK" not in os.environ
    if not (fetch or (asks and not console.quiet)):
        raise CheckpointError(f"{missing}; or add --download")
    try:
        return _download(name, console, fetch)
    except HeadraceError:
        raise
    except Exception as error:  # classes differ by release: no network, no such name, a gated model, a full disk
        why = next(iter(str(error).strip().splitlines()), "")
        raise CheckpointError(
            f"{name}: not all of it is here, and the Hub does not give it ({type(error).__name__}: {why}); check the "
            f"name and the network (a gated model: `hf auth login`), or give the folder of a model"
        ) from error


def _lacks_weights(folder: Path) -> bool:
    """Whether safetensors files are missing: by the index, or all of them."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        return not any(folder.glob("*.safetensors"))
    placed = read_json(index).get("weight_map")
    return isinstance(placed, dict) and not all((folder / file).exists() for file in set(map(str, placed.values())))


def _download(name: str, console: Console, fetch: bool) -> Path:
    """Download what a model is loaded from, to the Hub's local cache; without ``fetch``, on a yes."""
    from huggingface_hub import model_info, snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    # Folders inside hold other formats of the same weights, and so do consolidated files.
    sizes = {
        file.rfilename: file.size or 0
        for file in model_info(name, files_metadata=True, timeout=_HUB_TIMEOUT_S).siblings or []
        if file.rfilename.endswith(_LOADED) and "/" not in file.rfilename and "consolidated" not in file.rfilename
    }
    if not any(file.endswith(".safetensors") for file in sizes):
        raise CheckpointError(f"{name}: expected safetensors files on the Hub, found none; use a release that has them")
    num_bytes = sum(sizes.values())
    size = f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"  # as the Hub shows them
    if fetch:
        print_line(console, f"downloading {name} ({size})")
    else:
        console.print(f"download {name} ({size})? [y/N] ", end="", markup=False)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise CheckpointError(f"{name}: not downloaded, as you said; give the folder of a model, or another name")
    if console.quiet or not console.is_terminal:
        disable_progress_bars()
    return Path(snapshot_download(name, allow_patterns=[escape(file) for file in sizes]))


def require_packages(verb: str, extra: str, *names: str) -> None:
    """Refuse to begin without the packages of an extra; importing them would take seconds."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise OptionError(
            f"headrace {verb} needs packages that are not installed ({', '.join(missing)}): "
            f"pip install 'headrace[{extra}]'"
        )


def asked_of_cpu(cpu_experts: str | None, planned: PlanResult, notes: Console) -> CpuShareForecast | str | bool:
    """``--cpu-experts`` for ``load_matched``; prints what ``auto`` decides by."""
    if cpu_experts != AUTO:
        return cpu_experts is not None
    print_line(notes, f"--cpu-experts auto: {planned.cpu_share}")
    return planned.cpu_share


def refuse_idle(flags: Mapping[str, object], why: str) -> None:
    """Refuse flags that would have no effect; ``None`` and ``False`` mean not given."""
    for flag, given in flags.items():
        if given is not None and given is not False:  # not by its truth: 0 and '' were given
            raise OptionError(f"{flag} has no effect {why}")


def require_folder(flag: str, path: Path) -> None:
    """Refuse a folder in which files cannot be made, before anything is measured."""
    if not path.is_dir():
        found = "something else" if path.exists() else "no such folder"
        raise OptionError(f"{flag} {str(path)!r}: expected a folder, found {found}; make it, or leave {flag} out")
    _require_access(flag, path, path)


def require_writable(flag: str, path: Path) -> None:
    """Refuse an output file that cannot be written, before the work for it begins."""
    if not path.parent.is_dir() or path.is_dir():
        raise OptionError(f"{flag} {str(path)!r}: expected a file name in a folder that exists")
    _require_access(flag, path, path if path.exists() else path.parent)


def _require_access(flag: str, path: Path, place: Path) -> None:
    if not os.access(place, os.W_OK):
        raise OptionError(
            f"{flag} {str(path)!r}: expected a path that user {os.geteuid()} may write to; choose another"
        )
