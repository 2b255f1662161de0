"""What holds for every verb: lists after one flag, errors as one line, Ctrl-C without a traceback."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from penstock.cli.console import penstock_warnings_as_lines, print_error, stderr
from penstock.cli.options import LIST_FLAGS
from penstock.env import debug_enabled
from penstock.errors import PenstockError

__all__ = ["PenstockGroup", "expand_lists"]

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class PenstockGroup(TyperGroup):
    """The root command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, expand_lists(args))

    def invoke(self, ctx: Any) -> Any:
        with penstock_warnings_as_lines(), _errors_as_lines():
            return super().invoke(ctx)


@contextmanager
def _errors_as_lines() -> Iterator[None]:
    with_traceback = False
    try:
        with_traceback = debug_enabled()
        yield
    except BrokenPipeError:
        raise  # the reader of our output has seen enough; typer ends quietly
    except Exception as error:
        if with_traceback or type(error).__module__.partition(".")[0] in ("typer", "click"):  # these say it themselves
            raise
        error.__traceback__ = None  # what its frames hold may be all the memory there is
        try:
            print_error(_line_of(error))
        except MemoryError:
            os.write(2, b"error: no memory is left\n")
        raise typer.Exit(EXIT_ERROR) from None
    except KeyboardInterrupt as interrupt:
        stderr.print("interrupted", style="yellow")
        raise typer.Exit(EXIT_INTERRUPTED) from interrupt


def _line_of(error: Exception) -> str:
    """What an error says; one that penstock did not raise or expect says what it is, too."""
    if isinstance(error, PenstockError) or (isinstance(error, OSError) and error.strerror):
        return str(error)
    if isinstance(error, MemoryError):
        return (
            f"no memory is left ({str(error) or 'MemoryError'}): free some, or raise this process's limit (ulimit -v)"
        )
    return f"{type(error).__name__}: {error}; PENSTOCK_DEBUG=1 shows where it comes from"


def expand_lists(args: Sequence[str]) -> list[str]:
    """``--offload-params a b`` becomes ``--offload-params a --offload-params b``.

    Engines whose flags these are take a list after one flag, which typer's parser cannot. A list ends at the next
    flag or at ``--``, so ``MODEL`` goes before it or behind a ``--``.

    Raises:
        typer.BadParameter: a flag without a name after it; the parser would take the next flag for one.
    """
    expanded: list[str] = []
    flag, values = "", 0
    for index, arg in enumerate(args):
        if flag and not arg.startswith("-"):
            expanded += [flag, arg]
            values += 1
            continue
        _require_values(flag, values)
        if arg == "--":
            return [*expanded, *args[index:]]
        flag, values = (arg, 0) if arg in LIST_FLAGS else ("", 0)
        if not flag:
            expanded.append(arg)
    _require_values(flag, values)
    return expanded


def _require_values(flag: str, values: int) -> None:
    if flag and not values:
        what = "rule" if "=" in LIST_FLAGS[flag] else "name"
        raise typer.BadParameter(f"{flag} needs at least one {what} after it, e.g. {flag} {LIST_FLAGS[flag]}")
