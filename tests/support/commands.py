"""The command line inside the test process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.demo_run import ModelSize, ensure_model

TINY = ModelSize(hidden=128, intermediate=384, layers=4, heads=4, key_value_heads=2)
# Of every verb that offloads, in the order of its help.
OFFLOAD_FLAGS = [
    "--device-memory", "--batch", "--context", "--host-memory", "--peer-memory", "--offload-backend",
    "--cpu-offload-gb", "--cpu-offload-params", "--offload-group-size", "--offload-num-in-group",
    "--offload-prefetch-step", "--offload-params", "--offload-rule", "--expert-slots", "--offload-mode",
    "--offload-codec", "--device", "--plan", "--disk-direct", "--disk-drop-cache",
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model of 4 MB, with a byte-level tokenizer and without a chat template."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    ensure_model(folder, TINY)
    return folder


def run(*args: object, stdin: str | None = None) -> Any:
    """The command line in this process: exit_code, stdout, stderr."""
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin, prog_name="headrace")


def succeed(*args: object, stdin: str | None = None) -> Any:
    """:func:`run`, which has to end with exit code 0."""
    result = run(*args, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


def error_of(*args: object) -> str:
    """The one line that the failing command prints; nothing goes to stdout."""
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "Traceback" not in result.stderr
    return lines[0]
