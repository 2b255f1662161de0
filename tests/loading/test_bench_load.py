"""The promise: benchmarks compare loading with plain reads of the same files, and refuse wrong arguments first."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import read_plainly
from load_checkpoint import forget, summary, touch_fresh

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def script(name: str, *args: object) -> subprocess.CompletedProcess[str]:
    """One of the benchmarks, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, BENCHMARKS / f"{name}.py", *map(str, args)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_scripts_import_what_headrace_has(path: Path) -> None:
    """Most need a GPU to run; here at least a name that was moved is found."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace"):
            if node.module == "headrace.bench.reference_step":  # of older trees, in overhead.py
                continue
            module = importlib.import_module(node.module or "")
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            assert not missing, f"{node.module} has no {', '.join(missing)}"


@pytest.mark.parametrize("direct", [False, True])
def test_plain_reads_read_everything(tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    for file, size in zip(files, (300_001, 4096), strict=True):
        file.write_bytes(os.urandom(size))
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    forget(files)
    counts: list[int] = []
    plain = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: counts.append(plain(*args)) or counts[-1])
    if direct:
        try:
            os.close(os.open(files[0], os.O_RDONLY | os.O_DIRECT))
        except OSError:
            pytest.skip("no direct reads on this file system")
    assert read_plainly(files, direct, 1 << 16) > 0
    assert sorted(counts) == sorted([*[1 << 16] * 4, 300_001 - 4 * (1 << 16), 4096])
    assert touch_fresh(1 << 20) > 0


def test_the_summary_compares_with_the_faster_plain_read() -> None:
    rates = {"plain read": (2.0, 1.0, 3.0), "plain read, direct": (4.0, 4.0, 1.0), "headrace": (3.0, 3.8, 3.6)}
    rows = [
        {"case": case, "cold": True, "load_s": 1 / rate, "gb_per_s": rate}
        for case, each in rates.items()
        for rate in each
    ]
    rows.append({"case": "accelerate", "cold": True, "load_s": 2.0})
    lines = list(summary(rows))
    assert [line[11:36].strip() for line in lines] == [*rates, "accelerate"]
    assert "0.50 x the faster plain read" in lines[0]
    assert "0.90 x the faster plain read" in lines[2]
    assert lines[3].endswith("2.00 s")


@pytest.mark.slow
def test_rows_tell_how_the_files_were_read(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    args = ("--device", "cpu", "--layers", 1, "--ways", "headrace,headrace-buffered", "--files", "cached")
    done = script("load_checkpoint", *args, "--folder", tmp_path, "--out", out)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert rows.keys() == {"plain read", "headrace", "headrace-buffered"}
    auto, buffered = rows["headrace"]["reads_bytes"], rows["headrace-buffered"]["reads_bytes"]
    total = buffered["buffered"]
    assert total > 100_000_000
    assert (buffered["direct"], buffered["cached"]) == (0, 0)
    assert auto["direct"] + auto["cached"] + auto["buffered"] == total
    assert rows["headrace-buffered"]["reads"] in done.stdout
    assert rows["headrace"]["bit_equal"]
    assert json.loads(done.stdout.splitlines()[-1]) == {"bench": "load", "cases": 3, "not_bit_equal": []}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("load_checkpoint", "--ways", "penstok"), "argument --ways: expected some of headrace, headrace-direct"),
        (("load_checkpoint", "--files", "warm"), "argument --files: expected some of cached, cold, found 'warm'"),
        (("load_checkpoint", "--plain-blocks", "0.5"), "--plain-blocks: expected whole numbers, each at least 1"),
        (("load_checkpoint", "--folder", "/nonexistent/x"), "--folder: expected a folder that can be written to"),
        (("plan_predictions", "--rows", "1,0"), "argument --rows: expected whole numbers, each at least 1"),
        (("plan_predictions", "--shares", "half"), "argument --shares: expected numbers above 0"),
        (("plan_predictions", "--shares", "0"), "argument --shares: expected numbers above 0"),
        (("plan_predictions", "--out", "/nonexistent/o.jsonl"), "--out: expected a file that can be written, in a"),
        (("decode_step", "--model", "gpt-2"), "argument --model: invalid choice: 'gpt-2'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_arguments_are_refused_before_anything_is_measured(
    args: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: each start of a benchmark imports torch and transformers for some seconds."""
    name, *options = args
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
