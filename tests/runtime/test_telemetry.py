"""The promise: ``stats()`` proves what moved, and the timeline shows when (contract 2)."""

from __future__ import annotations

import itertools
import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import headrace
from checks import raising
from headrace import UVA
from headrace.errors import HeadraceWarning, OptionError, TransferError
from headrace.formatting import format_size
from headrace.model.inventory import take_inventory
from headrace.stats import Recorder, Stats, UnitStats
from headrace.testing import SlowLink, assert_moved, offload_over
from models import Stack, all_layers, on_meta, rows, save

pytestmark = pytest.mark.usefixtures("no_grad")


class TestStats:
    def test_per_unit_and_in_total(self) -> None:
        model, x = Stack(5).eval(), rows()
        with headrace.offload(model, all_layers(2)) as handle:
            before = handle.stats()
            assert [unit.copies for unit in before.units] == [1, 1, 0, 0, 0]
            for _ in range(3):
                model(x)
            stats = handle.stats()
            size = handle.plan.units[0].payload_bytes
            assert [unit.module_fqn for unit in stats.units] == [f"layers.{i}" for i in range(5)]
            assert [unit.copies for unit in stats.units] == [4, 4, 3, 3, 3]
            assert [unit.bytes_moved for unit in stats.units] == [4 * size, 4 * size, 3 * size, 3 * size, 3 * size]
            assert [unit.runs for unit in stats.units] == [3] * 5
            assert stats.bytes_moved == 17 * size
            assert stats.copies == 17
            assert stats.misses == 0
            assert stats.bytes_moved - before.bytes_moved == 3 * handle.plan.moved_bytes, "a snapshot stands still"

    def test_in_one_line(self) -> None:
        model, x = Stack(5).eval(), rows()
        handle = offload_over(model, all_layers(2), SlowLink(max_delay_s=0.01))
        assert "; 8.8 KiB moved in 2 copies, 0 stalls (0.00 ms)>" in repr(handle)
        for _ in range(3):
            model(x)
        stats = handle.stats()
        assert (stats.copies, stats.stalls > 0) == (17, True)
        assert str(stats).startswith(f"{format_size(stats.bytes_moved)} moved in 17 copies, {stats.stalls} stalls (")
        assert repr(stats) == f"<headrace.Stats of 5 units: {stats}>"
        in_force = f"<headrace.Handle of Stack: {format_size(handle.plan.weight_bytes)} of weights in "
        assert repr(handle) == f"{in_force}{format_size(handle.plan.device_bytes)} of device memory; {stats}>"
        handle.remove()
        assert repr(handle) == f"<headrace.Handle of Stack: removed, its weights are back; {stats}>"

    def test_of_a_gpu_say_that_stalls_are_not_measured(self) -> None:
        """They are counted only where waiting blocks the host; None stands for a wait that nobody has timed."""
        units = [UnitStats("a", copies=2, bytes_moved=2**20, runs=2), UnitStats("b", runs=1)]
        assert str(Stats(tuple(units))) == "1.00 MiB moved in 2 copies, stalls not measured"
        units[0].last_stall_s = 0.25
        assert str(Stats(tuple(units))) == "1.00 MiB moved in 2 copies, 250.0 ms waited in the latest runs"

    def test_a_repr_neither_raises_nor_takes_an_error_away(self) -> None:
        model, link = Stack(3).eval(), SlowLink()
        handle = offload_over(model, all_layers(1), link)
        link.check = raising(TransferError("gone"))  # type: ignore[method-assign]
        assert "moved in" in repr(handle)
        with pytest.raises(TransferError, match="gone"):
            handle.stats()
        del link.check
        handle.remove()

    def test_bytes_by_mechanism(self) -> None:
        model = Stack(5).eval()
        for policy, mechanism in ((all_layers(2), "prefetch"), (UVA(params=["layers"]), "uva")):
            with headrace.offload(model, policy) as handle:
                found = handle.stats().mechanism_bytes
                assert sum(found.values()) == sum(p.nbytes for p in model.parameters())
                assert found["resident"] == model.head.weight.nbytes + model.head.bias.nbytes
                assert found[mechanism] == handle.plan.offloaded_bytes

    def test_bytes_by_store(self, tmp_path: Path) -> None:
        model = Stack(5).eval()
        sizes = {s.name: s.num_bytes for s in take_inventory(model).storages}
        folder = save(model, tmp_path)
        for mode, where in (("cpu", "adopted"), ("disk", "file")):
            with headrace.offload(model, all_layers(2, mode), checkpoint=folder if mode == "disk" else None) as handle:
                found, plan = handle.stats().store_bytes, handle.plan
                slots = sum(plan.slot_bytes)
                assert found == {"resident": plan.resident_bytes, "slots": slots, where: plan.offloaded_bytes}
                assert plan.store_bytes == {"resident": plan.resident_bytes, "slots": slots, mode: plan.offloaded_bytes}
                assert found["resident"] + found[where] == sum(sizes.values())
                assert handle.stats().to_json()["store_bytes"] == found
        empty = on_meta(Stack, 5)
        with headrace.offload(empty, all_layers(2, "cpu"), checkpoint=folder) as handle:
            assert handle.stats().store_bytes["host"] == handle.plan.offloaded_bytes

    def test_stalls(self) -> None:
        model, x = Stack(4).eval(), rows()
        handle = offload_over(model, all_layers(1), SlowLink(max_delay_s=0.02, seed=3))
        model(x)
        stats = handle.stats()
        assert 1 <= stats.stalls <= 4
        assert stats.stalls == sum(unit.stalls for unit in stats.units)
        for unit in stats.units:
            assert (unit.stall_s > 0) == (unit.stalls > 0)
            assert unit.last_stall_s == pytest.approx(unit.stall_s)
        assert stats.stall_s == pytest.approx(sum(unit.stall_s for unit in stats.units))
        handle.remove()

    def test_no_stall_once_all_units_are_there(self) -> None:
        model, x = Stack(3).eval(), rows()
        with headrace.offload(model, all_layers(3)) as handle:
            model(x)
            settled = handle.stats()
            model(x)
            assert handle.stats().stalls == settled.stalls
            assert handle.stats().bytes_moved == settled.bytes_moved
            assert [unit.last_stall_s for unit in handle.stats().units] == [0.0] * 3

    def test_to_json(self) -> None:
        model, x = Stack(3).eval(), rows()
        with headrace.offload(model, all_layers(1)) as handle:
            model(x)
            stats = handle.stats()
        back = json.loads(json.dumps(stats.to_json()))
        assert back["bytes_moved"] == stats.bytes_moved > 0
        assert [unit["module_fqn"] for unit in back["units"]] == ["layers.0", "layers.1", "layers.2"]
        assert back["mechanism_bytes"] == stats.mechanism_bytes


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == kind]


class TestTrace:
    @pytest.fixture(autouse=True)
    def _slow_copies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.runtime.session.ThreadLink", partial(SlowLink, 0.005))

    def test_is_a_chrome_trace(self, tmp_path: Path) -> None:
        model, x = Stack(5, max_pause_s=0.002).eval(), rows()
        handle = headrace.offload(model, all_layers(2))
        for _ in range(3):
            model(x)
        assert_moved(handle, 3)
        handle.remove()  # so that the last copies are in it
        handle.trace(tmp_path / "trace.json")
        trace = json.loads((tmp_path / "trace.json").read_text())
        assert trace["displayTimeUnit"] == "ms"
        names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
        assert {"MainThread"} < set(names.values())
        assert any(name.startswith("headrace-reader") for name in names.values())
        spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert {event["tid"] for event in spans} == set(names)
        for event in spans:
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["name"] == f"{event['cat']} layers.{event['args']['unit']}"
        copied = sum(event["args"]["bytes"] for event in events(tmp_path / "trace.json", "copy"))
        assert copied == handle.stats().bytes_moved
        assert len(events(tmp_path / "trace.json", "compute")) == 15
        assert len(events(tmp_path / "trace.json", "stall")) == handle.stats().stalls

    def test_copies_and_compute_overlap_in_time(self, tmp_path: Path) -> None:
        model, x = Stack(6, max_pause_s=0.01).eval(), rows()
        handle = headrace.offload(model, all_layers(2))
        for _ in range(3):
            model(x)
        handle.remove()
        handle.trace(tmp_path / "trace.json")
        compute = events(tmp_path / "trace.json", "compute")
        overlapping = [
            (c["args"]["unit"], k["args"]["unit"])
            for c in events(tmp_path / "trace.json", "copy")
            for k in compute
            if c["ts"] < k["ts"] + k["dur"] and k["ts"] < c["ts"] + c["dur"]
        ]
        assert overlapping, "nothing ran side by side"
        assert all(copied != computed for copied, computed in overlapping), "a unit is copied while it is read"

    def test_spans_on_one_track_do_not_cross(self, tmp_path: Path) -> None:
        model, x = Stack(5).eval(), rows()
        with headrace.offload(model, all_layers(2)) as handle:
            model(x)
            handle.trace(tmp_path / "trace.json")
        for kind in ("compute", "stall"):
            spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events(tmp_path / "trace.json", kind))
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))

    def test_nothing_to_show(self, tmp_path: Path) -> None:
        with headrace.offload(Stack(3).eval(), UVA(params=["layers"])) as handle:
            handle.trace(tmp_path / "trace.json")
        assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


@pytest.mark.slow
def test_the_record_is_bounded_and_safe_to_read_while_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.stats._MAX_SPANS", 300)
    recorder = Recorder()
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            recorder.add("copy", 0, 0, 1)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for index in range(20):
        recorder.write(tmp_path / f"{index}.json", ["unit"])
    stop.set()
    for thread in threads:
        thread.join()
    for _ in range(305):
        recorder.add("compute", 0, 0)
    assert len(recorder.spans) == 300


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.parametrize("attempt", range(5))
def test_a_thread_may_record_its_first_span_while_spans_are_read(switching: None, attempt: int) -> None:
    recorder = Recorder()
    done = threading.Event()

    def record() -> None:
        for number in range(3000):
            threading.current_thread().name = f"thread {number}"
            recorder.add("copy", number, 0, 1)
        done.set()

    thread = threading.Thread(target=record)
    thread.start()
    while not done.is_set():
        assert all(span.track == f"thread {span.unit}" for span in recorder.spans)
    thread.join()


class TestLog:
    """The logger ``headrace``, which nobody hears by default."""

    def test_what_happens_is_told(self, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
        model = Stack(5).eval()
        folder = save(model, tmp_path)
        empty = on_meta(Stack, 5)
        caplog.set_level(logging.INFO, "headrace")
        handle = headrace.offload(empty, all_layers(2), checkpoint=folder)
        with pytest.warns(HeadraceWarning):
            empty.layers[1].linear.weight.sum()
        handle.remove()
        told = [(record.levelno, record.name, record.getMessage()) for record in caplog.records]
        assert {level for level, _, _ in told} == {logging.INFO}
        assert all(name.startswith("headrace.") for _, name, _ in told)
        expected = (
            r"plan: <headrace\.Plan .* of weights on the device, 5 units in 2 slots, mode 'cpu'>, .* moved per forward",
            r"link opened: ThreadLink to cpu for 5 units",
            r"loading begins: \d+ bytes",
            r"loading ended: .*s, \d+\.\d\d GB/s; read from files: .* KiB",
            r"Stack is offloaded",
            r"promoted to resident \(.*\): layers\.1\.linear\.weight was given to aten\.sum",
            r"Stack has its weights again; .* moved in \d+ copies",
        )
        for pattern, (_, _, message) in zip(expected, told, strict=True):
            assert re.match(pattern, message), message

    def test_what_is_refused_is_told_at_debug(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "headrace")
        with pytest.raises(OptionError):
            headrace.offload(Stack(2), "20")
        assert [record.levelname for record in caplog.records] == ["DEBUG"]
        assert "refused: SizeError: device_memory: size '20' has no unit" in caplog.text

    def test_no_handler_is_installed_and_nothing_is_printed(self, capfd: pytest.CaptureFixture[str]) -> None:
        handle = headrace.offload(Stack(2).eval(), all_layers())
        handle.remove()
        assert capfd.readouterr() == ("", "")
        names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "headrace"]
        assert names
        assert all(logging.getLogger(name).handlers == [] for name in names)
