"""The promise: ``bench load`` compares ways of loading with plain reads of the same files, and says how they read."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.bench.load import summary
from penstock.bench.plain import forget, read_plainly, touch_fresh
from penstock.cli import app


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
    rates = {"plain read": (2.0, 1.0, 3.0), "plain read, direct": (4.0, 4.0, 1.0), "penstock": (3.0, 3.8, 3.6)}
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


def test_rows_tell_how_the_files_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    out = tmp_path / "rows.jsonl"
    command = ["bench", "load", "--device", "cpu", "--layers", "2", "--ways", "penstock,penstock-buffered"]
    done = CliRunner().invoke(app, [*command, "--files", "cached", "--folder", str(tmp_path), "--out", str(out)])
    assert done.exit_code == 0, done.output
    rows = {row["case"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert rows.keys() == {"plain read", "penstock", "penstock-buffered"}
    auto, buffered = rows["penstock"]["reads_bytes"], rows["penstock-buffered"]["reads_bytes"]
    total = buffered["buffered"]
    assert total > 100_000_000
    assert (buffered["direct"], buffered["cached"]) == (0, 0)
    assert auto["direct"] + auto["cached"] + auto["buffered"] == total
    assert rows["penstock-buffered"]["reads"] in done.output
    assert rows["penstock"]["bit_equal"]


@pytest.mark.parametrize(("option", "value"), [("--ways", "penstok"), ("--files", "warm")])
def test_unknown_words_are_refused(option: str, value: str) -> None:
    done = CliRunner().invoke(app, ["bench", "load", "--device", "cpu", option, value])
    assert done.exit_code == 2
    assert f"{option}: expected some of" in " ".join(done.stderr.split())
