"""The command line: one file per verb; the flags are those of the table in :mod:`headrace.flags`.

Nothing imported here or at the top of a verb's file may import torch or transformers, which takes seconds; a verb
imports them when it runs. ``tests/cli/test_cli.py`` checks this.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Annotated

import typer

from headrace.cli.commands_bench import bench
from headrace.cli.commands_demo import demo
from headrace.cli.commands_generate import chat, generate
from headrace.cli.commands_plan import plan, probe
from headrace.cli.commands_serve import serve
from headrace.cli.terminal import HeadraceGroup

__all__ = ["app", "main"]


def _print_version(asked: bool) -> None:
    if asked:
        import headrace

        typer.echo(f"headrace {headrace.__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=HeadraceGroup,
    help="Run PyTorch models whose weights do not fit on the device, with bit-identical results.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    # Users have no use for a traceback with values of locals; terminal.py prints errors as one line.
    pretty_exceptions_enable=False,
)


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", metavar="", help="Print the version.", is_eager=True, callback=_print_version),
    ] = False,
) -> None: ...


for verb in (demo, plan, probe, generate, chat):
    app.command()(verb)
# Unknown flags are passed to the engine.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.add_typer(bench, name="bench")


def main() -> None:
    """The ``headrace`` command. Exit codes: 0 done, 2 an error, 130 interrupted.

    1: a check of the demo or the benchmark failed; or the plan was printed, but does not fit the machine.
    """
    # On a CPU, compute threads and file readers share the cores. By default the compute threads spin for milliseconds
    # after each product, on cores that the readers need. OpenMP reads the variable once, when torch is imported later.
    # `serve` may become vLLM's process, which inherits the environment and has no readers; else it sets it itself.
    if sys.argv[1:2] != ["serve"]:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Importing torch and transformers makes a million permanent objects, which every garbage collection scans. Verbs
    # that run a model keep Python's thresholds, because garbage may hold tensors there. gc.freeze() is no alternative:
    # frozen objects are not freed at exit, and Triton's bindings would report leaks.
    if sys.argv[1:2] == ["plan"]:
        gc.set_threshold(100_000, 50)
    app(prog_name="headrace")
