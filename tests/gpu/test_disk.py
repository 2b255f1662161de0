"""Mode ``disk`` on a GPU: same bits in every order of eager runs and replays; failures are said and never hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from gpu_files import POLICIES, bytes_read_by_ten, captured, inputs, replay, require_bits_in_any_order, save
from gpu_models import Stack, build, offloaded, twins

import headrace
from checks import eventually
from faulty_readers import Faults
from headrace import DiskOptions, Handle
from headrace.errors import OptionError, StateError, TransferError
from headrace.model.inventory import take_inventory
from headrace.transfer.ring_streams import RingLink


def readers() -> set[int]:
    """Process ids, of rings that this process has now; each has a thread that listens to it."""
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("headrace-ring-")]
    return {int(name.rpartition("-")[2]) for name in names}


def ring_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:headrace-")


@pytest.mark.usefixtures("no_grad")
class TestBits:
    @pytest.mark.usefixtures("ring")
    @pytest.mark.parametrize("options", [DiskOptions(), DiskOptions(direct=True)], ids=["plain", "direct"])
    @pytest.mark.parametrize("name", POLICIES)
    def test_eager_captured_and_replayed_in_any_order(self, name: str, options: DiskOptions, tmp_path: Path) -> None:
        resident, model = twins()
        expected = [resident(inputs(seed)).clone() for seed in range(4)]
        with offloaded(model, POLICIES[name], checkpoint=save(model, tmp_path), disk=options) as handle:
            assert handle.plan.mode == "disk"
            require_bits_in_any_order(model, expected)
            if handle.plan.units:
                staging = handle.stats().staging
                assert staging is not None
                assert staging.bytes_read > handle.stats().bytes_moved / 2
        assert torch.equal(model(inputs(1)), expected[1])

    def test_from_meta_and_under_a_compiler(self, tmp_path: Path) -> None:
        resident = build()
        save(resident, tmp_path)
        expected = resident(inputs())
        model = build(device="meta")
        handle = headrace.offload(model, POLICIES["two slots"], checkpoint=tmp_path, device="cuda")
        assert torch.equal(model(inputs()), expected)
        compiled = torch.compile(model, fullgraph=True)
        first = compiled(inputs())
        for _ in range(3):
            assert torch.equal(compiled(inputs()), first)
        assert torch.equal(model(inputs()), expected)
        handle.remove(graphs_released=True)

    @pytest.mark.usefixtures("ring")
    def test_a_slow_disk_holds_the_device_and_not_the_bits(self, tmp_path: Path, faults: Faults) -> None:
        resident, model = twins()
        expected = resident(inputs())
        handle = headrace.offload(model, POLICIES["two slots"], checkpoint=save(model, tmp_path))
        graph, out = captured(model, inputs())
        faults.slow(0.003)
        for _ in range(4):
            graph.replay()
            assert torch.equal(out, expected)
            assert torch.equal(model(inputs()), expected)
        staging = handle.stats().staging
        assert staging is not None
        assert staging.stalls > 0
        assert staging.stall_s > 0.003
        handle.remove(graphs_released=True)

    def test_a_replay_reads_the_files(self, tmp_path: Path) -> None:
        """And no more of them than it moves."""
        model = build(12)
        handle = headrace.offload(model, POLICIES["two slots"], checkpoint=save(model, tmp_path))
        graph, _ = captured(model, inputs())
        ring_bytes = handle.plan.moved_bytes  # the ring of a small model holds all of it
        assert abs(bytes_read_by_ten(graph, handle) - 10 * handle.plan.moved_bytes) <= ring_bytes
        handle.remove(graphs_released=True)

    def test_debug_checksums(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HEADRACE_DEBUG", "1")
        resident, model = twins()
        with offloaded(model, POLICIES["two slots"], checkpoint=save(model, tmp_path)):
            for _ in range(3):
                assert torch.equal(model(inputs()), resident(inputs()))


@pytest.mark.usefixtures("no_grad")
class TestFailure:
    @pytest.mark.parametrize("options", [DiskOptions(), DiskOptions(direct=True)], ids=["plain", "direct"])
    @pytest.mark.parametrize("harm", ["rewrite", "truncate"])
    def test_a_file_that_changes_under_replays(self, harm: str, options: DiskOptions, tmp_path: Path) -> None:
        model, handle, path = self.offloaded(tmp_path, options)
        graph, out = captured(model, inputs())
        replay(graph)
        time.sleep(0.02)
        whole, at = path.read_bytes(), path.stat()
        if harm == "rewrite":
            path.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
        else:
            with path.open("r+b") as file:
                file.truncate(len(whole) // 4)
        replay(graph, 4)  # the bounded wait: pytest would be stopped here otherwise
        assert out.isnan().all()
        for call in (handle.stats, lambda: model(inputs()), lambda: captured(model, inputs())):
            with pytest.raises(TransferError, match="while in use"):
                call()
        path.write_bytes(whole)
        os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))  # as `cp -p` does: which bytes are in it cannot be known
        with pytest.raises(TransferError, match="while in use"):
            handle.remove(graphs_released=True)

    @pytest.mark.parametrize("harm", ["remove", "replace"])
    def test_a_file_that_goes_is_still_open(self, harm: str, tmp_path: Path) -> None:
        model, handle, path = self.offloaded(tmp_path)
        expected = model(inputs())
        graph, out = captured(model, inputs())
        if harm == "remove":
            path.unlink()
        else:
            other = path.with_suffix(".new")
            other.write_bytes(bytes(path.stat().st_size))
            other.rename(path)
        for _ in range(3):
            graph.replay()
            assert torch.equal(out, expected)
            assert torch.equal(model(inputs()), expected)
        handle.remove(graphs_released=True)

    def test_an_error_of_the_disk_in_eager_code(self, tmp_path: Path, faults: Faults) -> None:
        model, handle, _ = self.offloaded(tmp_path)
        model(inputs())
        faults.error(5)
        with pytest.raises(TransferError, match="Input/output error"):
            self.forwards(model)
        with pytest.raises(TransferError, match="Input/output error"):
            model(inputs())
        handle.remove()  # this process can read: nothing is lost
        assert model(inputs()).isfinite().all()

    def test_a_read_that_never_ends(self, tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.transfer.ring_streams.RingLink", partial(RingLink, stuck_s=1.0))
        model, handle, _ = self.offloaded(tmp_path)
        graph, _ = captured(model, inputs())
        replay(graph)
        faults.never()
        start = time.monotonic()
        replay(graph, 4)
        assert time.monotonic() - start < 10
        with pytest.raises(TransferError, match=r"no read has ended.*bytes at \d+ of .*model\.safetensors"):
            handle.stats()
        handle.remove(graphs_released=True)

    @pytest.mark.parametrize("victims", ["server", "group"])
    def test_readers_that_are_killed(self, victims: str, tmp_path: Path) -> None:
        before = readers()
        model, handle, _ = self.offloaded(tmp_path)
        (pid,) = readers() - before
        graph, out = captured(model, inputs())
        replay(graph)
        if victims == "group":
            os.killpg(pid, signal.SIGKILL)
        else:
            psutil.Process(pid).children()[0].kill()
        start = time.monotonic()
        replay(graph, 4)
        assert time.monotonic() - start < 10
        assert out.isnan().all()
        for call in (handle.stats, lambda: model(inputs())):
            with pytest.raises(TransferError, match=r"ended by signal 9.*remove\(\)"):
                call()
        handle.remove(graphs_released=True)
        assert model(inputs()).isfinite().all()

    @staticmethod
    def offloaded(tmp_path: Path, options: DiskOptions | None = None) -> tuple[Stack, Handle, Path]:
        model = build()
        handle = headrace.offload(model, POLICIES["two slots"], checkpoint=save(model, tmp_path), disk=options)
        return model, handle, tmp_path / "model.safetensors"

    @staticmethod
    def forwards(model: Stack) -> None:
        for _ in range(10):
            model(inputs())
            torch.cuda.synchronize()


class TestLimits:
    def test_without_pinned_memory_it_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = build(2)
        folder = save(model, tmp_path)
        addresses = [p.data_ptr() for p in model.parameters()]
        monkeypatch.setenv("HEADRACE_DISABLE_PIN_MEMORY", "1")
        with pytest.raises(OptionError, match="HEADRACE_DISABLE_PIN_MEMORY=1 forbids"):
            headrace.offload(model, POLICIES["one slot"], checkpoint=folder)
        assert [p.data_ptr() for p in model.parameters()] == addresses

    def test_a_driver_without_stream_memory_operations(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = build(2)
        folder = save(model, tmp_path)

        def missing(name: str) -> None:
            raise OptionError(f"mode 'disk' on a GPU needs {name}; use mode 'cpu'")

        monkeypatch.setattr("headrace.transfer.ring_streams._driver_function", missing)
        with pytest.raises(OptionError, match=r"needs cuStreamWriteValue32.*mode 'cpu'"):
            headrace.offload(model, POLICIES["one slot"], checkpoint=folder)
        assert model(inputs()).isfinite().all()

    def test_not_within_a_capture(self, tmp_path: Path) -> None:
        model = build(2, device="cpu")
        folder = save(model, tmp_path)
        graph, error = torch.cuda.CUDAGraph(), None
        x = torch.zeros(1, device="cuda")
        with torch.cuda.graph(graph):
            x.add_(1)
            try:
                headrace.offload(model, POLICIES["one slot"], checkpoint=folder, device="cuda")
            except StateError as caught:
                error = caught
        assert error is not None

    def test_everything_is_given_back(self, tmp_path: Path) -> None:
        assert eventually(lambda: not readers()), "readers of an earlier test stay"
        mapped = ring_mappings()
        model = build()
        addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
        handle = headrace.offload(model, POLICIES["two slots"], checkpoint=save(model, tmp_path))
        (pid,) = readers()
        assert psutil.pid_exists(pid)
        assert ring_mappings() > mapped
        assert take_inventory(model).num_bytes > 0
        handle.remove(graphs_released=True)
        assert not readers()
        assert not psutil.pid_exists(pid)
        assert ring_mappings() == mapped
        assert set(addresses) == {name for name, _ in model.named_parameters()}
        assert all(p.device.type == "cuda" for p in model.parameters())

    @torch.no_grad()
    def test_an_offload_that_nobody_removes(self, tmp_path: Path, faults: Faults) -> None:
        """Its readers end some time after the last copy, and the thread that listened gives the memory back."""
        assert eventually(lambda: not readers()), "readers of an earlier test stay"
        mapped = ring_mappings()
        faults.linger(0.5)
        model = build()
        handle = headrace.offload(model, POLICIES["two slots"], checkpoint=save(model, tmp_path))
        model(inputs())
        (pid,) = readers()
        assert ring_mappings() > mapped
        del handle, model
        assert eventually(lambda: not readers())
        assert not psutil.pid_exists(pid)
        assert ring_mappings() == mapped
