"""The promise: benchmarks of experts replay the trace that they say, and compare bits."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import card_24gb
import expert_steps
import tables
from expert_steps import ExpertsShape, driven, run, seeded
from headrace.experts import cache
from headrace.plan.routing_traces import lru_hits, save_trace
from held_link import HeldLink, ThrottledLink, hold_kernel

TINY = ExpertsShape(num_layers=2, num_experts=8, top_k=2, hidden=64, intermediate=64)


@pytest.mark.parametrize("hits", [0.0, 0.5, 0.67, 0.9, 1.0])
def test_driven_traces_hit_what_they_say(hits: float) -> None:
    shape = ExpertsShape(3, 64, 6, 8, 8)
    for layer in driven(shape, 600, hits).layers:
        assert all(len(set(row)) == 6 for row in layer.tolist())
        assert lru_hits(layer, 32, warm_up=100) == pytest.approx(hits, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_cases_have_equal_bits_and_the_hits_of_the_trace(rows: int) -> None:
    found = {
        row["case"]: row
        for row in run(TINY, {"half": driven(TINY, 90 * rows, 0.5)}, [4], rows, 1, 6, torch.device("cpu"))
    }
    assert list(found) == ["resident", "in place", "slots 4"]
    assert all(row["bit_equal"] for row in found.values())
    if rows == 1:
        assert found["slots 4"]["hits"] == pytest.approx(0.5, abs=0.1)
        assert found["slots 4"]["missed_bytes"] == pytest.approx(2 * TINY.expert_bytes, rel=0.3)
        assert found["in place"]["missed_bytes"] == pytest.approx(4 * TINY.expert_bytes)


def test_hits_of_a_trace_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(*args: object) -> str:
        monkeypatch.setattr(sys, "argv", ["expert_steps.py", *map(str, args)])
        expert_steps.main()
        return capsys.readouterr().out

    save_trace(seeded(TINY, 80), tmp_path / "trace")
    assert "trace: 8 of 8 experts on the device" in script("--trace", tmp_path / "trace", "--slots", "2,8")
    assert "50% hits: 32 of 64 experts on the device, 50" in script("--hits", 0.5)
    for args, message in (
        (("--hits", 0.5, "--trace", tmp_path / "trace"), "not allowed with argument --hits"),
        (("--hits", 2), "expected shares from 0 to 1"),
        (("--shape", "x"), "invalid choice: 'x'"),
    ):
        with pytest.raises(SystemExit):
            script(*args)
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("model", card_24gb.MODELS)
def test_the_rehearsal_of_a_card_on_a_cpu(model: str) -> None:
    """Each case generates with the bits of the resident model, and its bytes are counted; kernels are interpreted."""
    if "nf4" in model and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    failed: list[str] = []
    cases = list(card_24gb.MODELS[model].rules)
    layers = 16 if "8b" in model else 2  # of which every fourth moves, or all may
    tiny = card_24gb.Rehearsal(model, layers, True, 24 << 30, 2 << 30, torch.device("cpu"), ["eager"])
    found = {row["case"]: row for row in tiny.rows(cases, failed)}
    assert failed == []
    assert list(found) == cases
    for row in found.values():
        assert row["bit_equal"]
        assert row["repeats"]
        assert row["bytes_moved"] > 0
        headings, cells_of = tables.layout_of(row)
        assert len(cells_of(row)) == len(headings)
        assert card_24gb.describe(row).endswith("same bits")
    if "cache" in cases:
        assert 0 < found["cache"]["hits"] < 1
        assert found["cache"]["expert_bytes_moved"] > 0


def test_what_holds_the_link_copies_each_piece_and_says_when() -> None:
    source, target = torch.arange(4 * 64), torch.zeros(2 * 64, dtype=torch.int64)
    taken, seen = torch.zeros(2, 1, dtype=torch.int64)
    for number, last in ((1, [0, 1]), (2, [2, 3])):
        hold_kernel[(3,)](source, target, taken, seen, number, [6, 12][number - 1], PIECES=4, TARGETS=2, BLOCK=64)
        assert torch.equal(target.view(2, 64), source.view(4, 64)[last])
        assert (int(seen), int(taken)) == (number, 6 * number + 3)


@pytest.mark.parametrize(("gb_per_s", "left", "programs"), [(22, 22, 48), (11, 11, 128), (1, 6.1, 256), (60, 53, 1)])
def test_calibration_of_a_held_link(gb_per_s: float, left: float, programs: int) -> None:
    """The nearest that there is."""

    class Fair(HeldLink):
        def __init__(self) -> None:
            self.copying = 0

        @contextmanager
        def held(self, programs: int | None = None) -> Iterator[None]:
            self.copying = programs or 0
            yield
            self.copying = 0

        def latency_ms(self) -> float:
            return 0.05

        def left_bytes_per_s(self) -> float:
            return 55e9 * 32 / (32 + self.copying)

    link = Fair()
    assert link.calibrate(gb_per_s * 1e9) == pytest.approx(left * 1e9, rel=0.02)
    assert link.programs == programs


def test_calibration_of_a_throttled_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """By programs and blocks, which are as before afterwards."""

    class ByReads(ThrottledLink):
        def __init__(self) -> None:
            pass

        def left_bytes_per_s(self) -> float:
            return min(55e9, 1e6 * cache._PROGRAMS * cache._BLOCK)

    monkeypatch.setattr(cache, "_PROGRAMS", 32)
    link, before = ByReads(), (cache._PROGRAMS, cache._BLOCK)
    left = link.calibrate(2.2e9)
    assert left == 1e6 * link.programs * link.block == pytest.approx(2.2e9, rel=0.1)
    with link.held():
        assert (link.programs, link.block) == (cache._PROGRAMS, cache._BLOCK)
    assert before == (cache._PROGRAMS, cache._BLOCK)
