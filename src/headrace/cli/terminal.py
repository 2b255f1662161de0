"""Shared by all verbs: output streams, errors as one line, Ctrl-C without a traceback, lists after one flag.

The result of a verb goes to stdout, messages go to stderr: ``headrace generate ... > story.txt`` and
``headrace plan --json | jq`` get the result alone.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import timedelta
from itertools import takewhile
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text
from typer.core import TyperGroup

from headrace.config import debug_enabled, warn_about_variables
from headrace.errors import MORE_THREADS, HeadraceError, HeadraceWarning
from headrace.formatting import format_time

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, the convention of shells

# Flags that take a list, each with a value to show.
LIST_FLAGS = {
    "--cpu-offload-params": "mlp",
    "--offload-params": "mlp",
    "--offload-rule": "experts=uva",
    "--served-model-name": "my-model",
    "--allowed-hosts": "my-server.example",
}

# Obey COLUMNS, and else the terminal. 0 is that of a terminal of unknown width; rich would print nothing.
if os.environ.get("COLUMNS") == "0":
    del os.environ["COLUMNS"]
stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)

_EXTRAS = ("transformers", "diffusers")  # packages that an extra of the same name installs
# Wide enough for the tables of a plan in a file or a pipe, where rich would assume 80.
_PIPE_WIDTH = 120
for _console in (stdout, stderr):
    if not _console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        _console.width = _PIPE_WIDTH


# For errors and warnings of ranks whose other output is that of the first rank.
_notices = Console(stderr=True)


def print_error(message: str) -> None:
    """One red line on stderr."""
    # Names from files may contain anything, also control sequences of terminals.
    printable = (c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.split()))
    _notice(f"error: {''.join(printable)}", "red")


def _notice(line: str, style: str) -> None:
    """A line on stderr, unless another rank has printed the same one."""
    if _is_first_to_print(line):
        # Beside a bar only the bar's own console prints above it.
        print_line(_notices if stderr.quiet else stderr, line, style)


def print_line(console: Console, line: str, style: str = "") -> None:
    """Print ``line`` as it is, broken between words at a terminal, which would break them; scripts read by line."""
    console.print(Text(line, style=style), soft_wrap=not console.is_terminal)


# -- several processes of one command ----------------------------------------------------------------------------------


def _rank() -> int:
    """The rank of this process under torchrun; 0 without."""
    return int(os.environ.get("RANK", 0)) if "TORCHELASTIC_RUN_ID" in os.environ else 0


@contextmanager
def _one_output() -> Iterator[None]:
    """Within, ranks other than the first print errors and warnings alone."""
    if _rank() == 0:
        yield
        return
    stdout.quiet = stderr.quiet = True
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        stdout.quiet = stderr.quiet = False


def _is_first_to_print(line: str) -> bool:
    """Whether no other rank has printed ``line``, by torchrun's store; ``True`` without a store."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    key = f"headrace/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{line}"
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return int(TCPStore(*address, is_master=False, timeout=timedelta(seconds=5)).add(key, 1)) == 1
    except RuntimeError:  # the launcher has ended
        return True


def _log_kernel(*, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
    """Called by Triton when it has compiled a kernel, or has found it where an earlier process left it."""
    how = "found in Triton's cache" if cache_hit else "compiled"
    logging.getLogger("headrace").info("kernel %s %s: %s", metadata["name"], how, format_time(times.total / 1e6))


# -- the root command --------------------------------------------------------------------------------------------------


@contextmanager
def log_lines(verbose: int) -> Iterator[None]:
    """Within, records of the logger ``headrace`` are printed on stderr: INFO and above, with 2 also DEBUG."""
    logger, handler = logging.getLogger("headrace"), logging.StreamHandler()
    if not verbose or _rank() != 0:
        yield
        return
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    level = logger.level
    logger.setLevel(logging.INFO if verbose == 1 else logging.DEBUG)
    logger.addHandler(handler)
    with suppress(ImportError):  # no Triton
        from triton import knobs

        knobs.compilation.listener = _log_kernel
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def byte_bar(text: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for bytes, at a terminal: call it with (done, total). It is gone once all is done.

    It is hidden until the total is above zero.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(text, total=None)

    def show(done: int, total: int) -> None:
        if total > 0 and console.is_terminal:
            bar.update(task, completed=done, total=total)
            bar.start()

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Within, a :class:`HeadraceWarning` is a yellow line on stderr; other warnings are printed as before."""
    with warnings.catch_warnings():
        ordinary = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **rest: Any) -> None:
            if issubclass(category, HeadraceWarning):
                _notice(f"warning: {message}", "yellow")
            else:
                ordinary(message, category, *where, **rest)

        warnings.showwarning = show
        yield


class HeadraceGroup(TyperGroup):
    """The root command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _errors_as_lines():
            return super().parse_args(ctx, expand_lists(args))

    def invoke(self, ctx: Any) -> Any:
        with _one_output(), _warnings_as_lines(), _errors_as_lines():
            warn_about_variables()
            return super().invoke(ctx)


@contextmanager
def _errors_as_lines() -> Iterator[None]:
    with_traceback = False
    try:
        with_traceback = debug_enabled()
        yield
    except BrokenPipeError:
        raise  # the reader of the output closed it; typer ends quietly
    except Exception as error:
        if with_traceback:
            raise
        if type(error).__module__.partition(".")[0] in ("typer", "click"):
            if hasattr(error, "format_message") and not type(error).__name__.startswith("NoArgs"):
                help_of = getattr(getattr(error, "ctx", None), "command_path", "headrace")
                print_error(f"{error.format_message().rstrip('.')}; `{help_of} -h` lists what there is")
                raise typer.Exit(EXIT_ERROR) from None
            raise  # the end, or a verb alone, for which typer prints its help
        error.__traceback__ = None  # its frames may hold much memory
        try:
            print_error(_line_of(error))
        except (MemoryError, SystemError):  # C code without memory may raise either
            os.write(2, b"error: no memory is left\n")
        raise typer.Exit(EXIT_ERROR) from None
    except KeyboardInterrupt as interrupt:
        stderr.print("interrupted", style="yellow")
        raise typer.Exit(EXIT_INTERRUPTED) from interrupt


def _line_of(error: Exception) -> str:
    """The message of an error; with its type, if it is not headrace's own or an OSError."""
    if isinstance(error, HeadraceError) or (isinstance(error, OSError) and error.strerror):
        return str(error)
    if isinstance(error, MemoryError):
        return (
            f"no memory is left ({str(error) or 'MemoryError'}): free some, or raise this process's limit (ulimit -v)"
        )
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return f"the system starts no further thread ({error}): {MORE_THREADS}"
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        return f"{error.name} is not installed: pip install 'headrace[{error.name}]'"
    return f"{type(error).__name__}: {error}; HEADRACE_DEBUG=1 shows the traceback"


def expand_lists(args: Sequence[str]) -> list[str]:
    """``--offload-params a b`` becomes ``--offload-params a --offload-params b``.

    A list ends at the next flag or at ``--``; put ``MODEL`` before it or after a ``--``.

    Raises:
        typer.BadParameter: a flag without a name after it; the parser would use the next flag as its value.
    """
    # Engines accept a list after these flags, which typer's parser does not support.
    expanded: list[str] = []
    rest = list(args)
    while rest and rest[0] != "--":
        flag = rest.pop(0)
        if flag not in LIST_FLAGS:
            expanded.append(flag)
            continue
        values = list(takewhile(lambda word: not word.startswith("-"), rest))
        if not values:
            what = "rule" if "=" in LIST_FLAGS[flag] else "name"
            raise typer.BadParameter(f"{flag} needs at least one {what} after it, e.g. {flag} {LIST_FLAGS[flag]}")
        for value in values:
            expanded += [flag, value]
        del rest[: len(values)]
    return expanded + rest
