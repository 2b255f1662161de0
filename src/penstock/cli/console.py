"""Where the command line writes: the product of a verb to stdout, everything about it to stderr.

``penstock generate ... > story.txt`` and ``penstock plan --json | jq`` therefore get the product alone.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text

from penstock.errors import PenstockWarning

__all__ = ["byte_bar", "penstock_warnings_as_lines", "print_error", "stderr", "stdout"]

stdout = Console()
stderr = Console(stderr=True)

# Wide enough for the plan's tables when the output is a file or a pipe, where rich would assume 80.
_PIPE_WIDTH = 120
for _console in (stdout, stderr):
    if not _console.is_terminal:
        _console.width = _PIPE_WIDTH


def print_error(message: str) -> None:
    """One red line on stderr, whatever its length: scripts read it."""
    # Names out of files may hold anything, sequences that command a terminal among it.
    printable = (c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.split()))
    line = Text(f"error: {''.join(printable)}", style="red")
    stderr.print(line, soft_wrap=True)


@contextmanager
def byte_bar(text: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for bytes: call it with (done, total). Nothing shows before there is something to do."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    bar = Progress(*columns, console=console)
    task = bar.add_task(text, total=None)

    def show(done: int, total: int) -> None:
        if total > 0:
            bar.update(task, completed=done, total=total)
            bar.start()

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def penstock_warnings_as_lines() -> Iterator[None]:
    """Within, a :class:`PenstockWarning` is a yellow line on stderr; other warnings look as they always do."""
    with warnings.catch_warnings():
        ordinary = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, PenstockWarning):
                stderr.print(Text(f"warning: {message}", style="yellow"), soft_wrap=True)
            else:
                ordinary(message, category, filename, lineno, file or sys.stderr, line)

        warnings.showwarning = show
        yield
