"""The promise: the demo measures what it claims, notices when a claim fails, and leaves no mess. At tiny size."""

from __future__ import annotations

import json
import mmap
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from commands import TINY, error_of, run, succeed
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.cli import demo_run
from headrace.cli.demo_run import Result, comparison_table, digest_of, ensure_model, failed_checks, run_alone
from headrace.errors import OptionError, StateError
from headrace.memory.system import PeakMeter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model."""
    ensure_model(tmp_path / "model", TINY)
    return tmp_path / "model"


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_model_is_complete_repeatable_and_reused(folder: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.tensors.keys() == dict(TINY.build().named_parameters()).keys()
    assert not ensure_model(folder, TINY)
    assert ensure_model(tmp_path / "again", TINY)
    again = Checkpoint.open(tmp_path / "again")
    assert all(torch.equal(checkpoint.read(name), again.read(name)) for name in checkpoint.tensors)


def test_the_default_model_is_as_large_as_promised() -> None:
    with torch.device("meta"):
        num_bytes = sum(parameter.nbytes for parameter in demo_run.ModelSize().build().parameters())
    assert 10**9 <= 2**30 <= num_bytes <= 1.25 * 10**9


@pytest.mark.parametrize("text", ["Wasser, über Stein: 水 🌊", " leading and  double spaces\n"])
def test_the_tokenizer_knows_every_byte(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_half_written_model_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    seen: list[int] = []

    def failing(folder: Path) -> None:
        seen.append(len(list(folder.glob("*.safetensors"))))
        raise error

    monkeypatch.setattr(demo_run, "_write_tokenizer", failing)
    with pytest.raises((KeyboardInterrupt, OptionError)):
        ensure_model(tmp_path / "model", TINY)
    assert seen == [1]
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(2**40, 2**40, 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OptionError, match=r"1\.00 MiB are free on its disk: .* too little; .*--folder"):
        ensure_model(tmp_path / "model", TINY)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_model_is_written_again_a_foreign_folder_never(folder: Path, tmp_path: Path) -> None:
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert ensure_model(folder, TINY)
    assert ensure_model(folder, replace(TINY, seed=1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(OptionError, match="was not written by headrace demo"):
        ensure_model(tmp_path / "mine", TINY)
    assert (tmp_path / "mine" / "thesis.txt").exists()


# -- the runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(folder: Path, tmp_path: Path) -> tuple[Result, Result]:
    """Resident and streamed, tiny, in this process."""
    budget = Checkpoint.open(folder).num_bytes // 2
    resident, streamed = (demo_run.run(folder, size, tmp_path / "trace.json", 4) for size in (None, budget))
    assert streamed.planned_bytes <= budget
    return resident, replace(streamed, growth_bytes=0)  # that of a process that has run other models says nothing


@pytest.mark.slow
def test_generated_tokens_and_logits_are_equal(runs: tuple[Result, Result]) -> None:
    assert failed_checks(*runs) == []
    assert [each.num_tokens for each in runs] == [8, 8]
    assert runs[1].moved_bytes > runs[1].forward_bytes > 0
    assert comparison_table(10**6, *runs).row_count == 6


@pytest.mark.slow
def test_one_different_bit_is_noticed(runs: tuple[Result, Result]) -> None:
    resident, streamed = runs
    logits = torch.zeros(2, 3)
    flipped = logits.clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    others = {digest_of(flipped), digest_of(logits.view(3, 2)), digest_of(logits.int()), digest_of(logits, logits)}
    assert len({digest_of(logits), *others}) == 5
    changed = replace(streamed, digest="other")
    assert failed_checks(resident, changed) == ["the streamed results differ from the resident ones"]
    changed = replace(streamed, restored_digest="other")
    assert failed_checks(resident, changed) == ["the results after remove() differ"]


@pytest.mark.slow
def test_too_much_memory_and_nothing_moved_are_noticed(runs: tuple[Result, Result]) -> None:
    resident, streamed = runs
    large = replace(streamed, growth_bytes=streamed.limit_bytes + 1)
    assert "memory grew by" in failed_checks(resident, large)[0]
    assert failed_checks(resident, replace(streamed, moved_bytes=0)) == ["nothing was streamed"]


@pytest.mark.slow
def test_the_trace_is_written(runs: tuple[Result, Result], tmp_path: Path) -> None:
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"copy", "compute"} <= {event.get("cat") for event in events}


@pytest.mark.slow
def test_a_child_process_measures(folder: Path, tmp_path: Path) -> None:
    result = run_alone(folder, Checkpoint.open(folder).num_bytes // 2, tmp_path / "trace.json", 4)
    assert result.restored_digest == result.digest
    assert 0 < result.growth_bytes <= result.planned_bytes + 64 * 2**20
    assert (tmp_path / "trace.json").exists()


@pytest.mark.slow
def test_a_failing_child_says_why(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"code 1: .*nothing"):
        run_alone(tmp_path / "nothing", None, tmp_path / "trace.json")


def test_peak_meter_sees_what_was_freed() -> None:
    meter = PeakMeter()
    with mmap.mmap(-1, 64 * 2**20) as block:  # not from the heap, which may still hold as much of earlier tests
        torch.frombuffer(block, dtype=torch.uint8).fill_(1)
    assert 60 * 2**20 <= meter.growth_bytes() <= 80 * 2**20


# -- the verb ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """``headrace demo`` over a tiny model, in this process."""

    def in_process(*args: Any) -> Result:
        return replace(demo_run.run(*args, new_tokens=4), growth_bytes=0)

    monkeypatch.setattr(demo_run, "run_alone", in_process)
    tiny = demo_run.ModelSize(64, 128, 2, 4, 2)
    monkeypatch.setattr(demo_run, "ModelSize", lambda *args: tiny if args else TINY)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_demo")
def test_demo_tells_shows_and_tidies_up(tmp_path: Path) -> None:
    result = succeed("demo", "--folder", tmp_path / "out")
    for text in ("sha256 of the results", "measured growth", "trace.json", "Every bit is equal"):
        assert text in result.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["trace.json"]


@pytest.mark.usefixtures("tiny_demo")
def test_demo_fails_when_a_promise_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_run, "failed_checks", lambda *runs: ["a promise"])
    result = run("demo", "--folder", tmp_path / "out", "--keep")
    assert result.exit_code == 1
    assert "failed: a promise" in result.stdout
    assert (tmp_path / "out" / "model" / "config.json").exists()


def test_demo_into_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "File exists" in error_of("demo", "--folder", tmp_path / "file")
