"""The promise: experts that stay in the files are read when a step chooses them, and give the resident model's bits."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from transformers import Qwen3MoeForCausalLM

import headrace
from checks import run_threads
from expert_layers import Layers, X, fail_read, steps
from headrace import Budget, DiskOptions, Handle, Rules
from headrace.adapters.transformers import load
from headrace.errors import HeadraceWarning, OptionError, StateError, TransferError
from headrace.memory.pages import map_file, resident_bytes
from headrace.planning import context
from headrace.stores import expert_files, file_reads
from headrace.stores.file_reads import can_read_direct
from headrace.testing import assert_same_bits, boundaries
from headrace.transfer.expert_reads import FileCache
from moe_models import IDS, cached, gpt_oss, outputs, qwen

MIB = 2**20


def in_files(num_slots: int) -> Rules:
    return Rules([("experts", "cache")], expert_slots=num_slots, mode="disk")


RULE = Rules([("layers", "cache")], expert_slots=6, mode="disk")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(Layers(), str(tmp_path / "model.safetensors"))
    return tmp_path


def offloaded(folder: Path, policy: Any = RULE, **options: Any) -> tuple[Layers, Handle]:
    model = Layers().eval()
    return model, headrace.offload(model, policy, checkpoint=folder, device="cpu", **options)


class TestBits:
    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize(("implementation", "num_slots"), [("grouped_mm", 1), ("grouped_mm", 3), ("batched_mm", 3)])
    def test_transformers(self, tmp_path: Path, implementation: str, num_slots: int, fused: bool) -> None:
        model = qwen(implementation)
        expected, state = outputs(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.save_pretrained(tmp_path, save_original_format=not fused)  # or each expert in tensors of its own
        loaded, handle = load(
            tmp_path, in_files(num_slots), device="cpu", dtype=torch.float32, experts_implementation=implementation
        )
        with handle:
            assert_same_bits(outputs(loaded), expected)
            assert_same_bits(dict(loaded.state_dict()), state)
            stats = handle.stats()
            assert stats.bytes_moved > 0
            for layer in stats.experts:
                assert (layer.steps, layer.num_slots) == (4, num_slots)
                assert layer.fetched > 0
                assert layer.in_place > 0  # the prompt, in overflow rows
                assert layer.hits > 0 or num_slots == 1
                assert layer.fetched - layer.evicted <= layer.num_slots
        assert_same_bits(outputs(loaded), expected)

    @pytest.mark.parametrize("num_slots", [1, 2, 6])
    def test_biases(self, tmp_path: Path, num_slots: int) -> None:
        """Rows of a few hundred bytes are read with their experts."""
        model = gpt_oss()
        expected = outputs(model)
        model.save_pretrained(tmp_path)
        loaded, handle = load(tmp_path, in_files(num_slots), device="cpu", dtype=torch.float32)
        with handle:
            assert_same_bits(outputs(loaded), expected)
            assert {len(layer.storages) for layer in handle.plan.cached} == {4}
            assert handle.stats().bytes_moved > 0

    def test_another_dtype(self, tmp_path: Path) -> None:
        """Threads convert what they read."""
        qwen().save_pretrained(tmp_path)
        model = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        model.set_experts_implementation("grouped_mm")
        loaded, handle = load(
            tmp_path, in_files(3), device="cpu", dtype=torch.bfloat16, experts_implementation="grouped_mm"
        )
        with handle:
            assert_same_bits(outputs(loaded), outputs(model))
            assert handle.stats().bytes_moved > 0

    @pytest.mark.slow
    @pytest.mark.parametrize("implementation", ["grouped_mm", "headrace"])
    def test_compiled(self, tmp_path: Path, implementation: str) -> None:
        qwen(implementation).to(torch.bfloat16).save_pretrained(tmp_path)
        options = {"dtype": torch.bfloat16, "experts_implementation": implementation}
        model = Qwen3MoeForCausalLM.from_pretrained(tmp_path, **options).eval()
        with torch.inference_mode():
            with boundaries(model, cached(3)):
                compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
                expected = [compiled(IDS).logits for _ in range(2)]
            torch._dynamo.reset()
            loaded, handle = load(tmp_path, in_files(3), device="cpu", **options)
            with handle:
                compiled = torch.compile(loaded, fullgraph=True, backend="aot_eager")
                assert_same_bits([compiled(IDS).logits for _ in range(2)], expected)
                assert handle.stats().bytes_moved > 0
        torch._dynamo.reset()

    def test_many_steps(self, folder: Path) -> None:
        resident, (model, handle) = Layers(), offloaded(folder)
        with handle, torch.inference_mode():
            for ids in (*steps(300), torch.arange(40), *steps(50, seed=1)):
                assert_same_bits(model(X, ids), resident(X, ids))
            assert all(layer.hits and layer.fetched and layer.in_place for layer in handle.stats().experts)

    def test_numbers_that_are_no_expert(self, folder: Path) -> None:
        _model, handle = offloaded(folder)
        with handle:
            (_, cache), *_ = handle._session._caches
            ids = torch.tensor([[-1, 39], [40, 0]], dtype=torch.int32)
            rows = cache.admit(ids)
            assert (rows.dtype, rows.shape, rows[0, 0].item()) == (torch.int32, ids.shape, -1)
            assert rows[1, 0] >= len(cache._parts[0][0])

    def test_threads(self, folder: Path) -> None:
        resident, (model, handle) = Layers(), offloaded(folder)

        ended = []

        def run(seed: int) -> None:
            for ids in steps(40, seed=seed):
                assert_same_bits(model(X, ids), resident(X, ids))
            ended.append(seed)

        with handle:
            run_threads([partial(run, seed) for seed in range(3)])
            assert sorted(ended) == [0, 1, 2]


class TestReads:
    def test_only_what_is_chosen(self, folder: Path) -> None:
        """A tenth of the experts is chosen: at most 1.05 of their bytes come from the disk."""
        if not can_read_direct(folder / "model.safetensors"):
            pytest.skip("no direct reads here")
        model, handle = offloaded(folder)
        row = sum(each.numel() * 4 for each in model.layers[0].parameters()) // 40
        with handle:
            before = disk_bytes()
            for ids in (torch.tensor([3, 9, 27, 39]), torch.tensor([39, 3, 4, 9])):
                model(X, ids)
            read, stats = disk_bytes() - before, handle.stats()
        chosen = 2 * 5 * row
        assert stats.bytes_moved == chosen
        assert chosen <= read <= 1.05 * chosen + 2 * 5 * 2 * 8192  # parts of pages, which are large for so small rows

    def test_large_experts(self, tmp_path: Path) -> None:
        if not can_read_direct(Path(__file__)):
            pytest.skip("no direct reads here")
        model = qwen(hidden_size=256, moe_intermediate_size=512, num_experts=20)
        model.save_pretrained(tmp_path)
        expected = outputs(model)
        loaded, handle = load(tmp_path, in_files(8), device="cpu", dtype=torch.float32)
        with handle:
            before = disk_bytes()
            assert_same_bits(outputs(loaded), expected)
            chosen, read = handle.stats().bytes_moved, disk_bytes() - before
        assert 0 < chosen < 0.6 * handle.plan.cached_bytes
        assert chosen <= read <= 1.05 * chosen

    def test_no_page_stays_in_the_cache(self, folder: Path) -> None:
        """Neither past the cache nor through it."""
        path = folder / "model.safetensors"
        for disk in (None, DiskOptions(direct=False, drop_cache=True)):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                mapped = map_file(file.fileno(), 0, path.stat().st_size, read_only=True)
            resident, (model, handle) = Layers(), offloaded(folder, disk=disk)
            drop(path)
            with handle:
                for ids in steps(30):
                    assert_same_bits(model(X, ids), resident(X, ids))
                assert handle.stats().bytes_moved > 4 * MIB
                assert resident_bytes(mapped) <= 512 << 10

    def test_where_no_file_can_be_read_directly(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> int:
            raise OSError(22, "Invalid argument")

        monkeypatch.setattr(file_reads, "_open_direct", refuse)
        model, handle = offloaded(folder)
        with handle:
            assert_same_bits(model(X, torch.arange(5)), Layers()(X, torch.arange(5)))
            (note,) = handle.stats().notes
            assert "model.safetensors" in note
            assert "O_DIRECT" in note
            ranges = handle._session._ranges
            assert isinstance(ranges, expert_files.ExpertFiles)
            assert ranges.reads.direct == 0
            assert ranges.reads.buffered > 0

    def test_a_step_reads_an_expert_once(self, folder: Path) -> None:
        model, handle = offloaded(folder)
        with handle:
            model(X, torch.arange(40).repeat(7))
            for layer in handle.stats().experts:
                assert (layer.fetched, layer.in_place, layer.read) == (6, 34, 40)
            model(X, torch.arange(40))
            assert [layer.read for layer in handle.stats().experts] == [74, 74]

    def test_requests_are_many_at_a_time(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        under_way, most, lock = [0], [0], threading.Lock()
        read = file_reads.File.read

        def counted(self: Any, offset: int, into: memoryview) -> None:
            with lock:
                under_way[0] += 1
                most[0] = max(most[0], under_way[0])
            gate.wait(5)
            read(self, offset, into)
            with lock:
                under_way[0] -= 1

        gate = threading.Barrier(16)
        monkeypatch.delenv("HEADRACE_READERS", raising=False)
        model, handle = offloaded(folder)
        with handle:
            with monkeypatch.context() as patched:
                patched.setattr(file_reads.File, "read", counted)
                model.layers[0](X, torch.arange(16))
            assert most[0] >= 16


class TestLeastRecentlyUsed:
    def test_against_a_model_in_python(self, folder: Path) -> None:
        _model, handle = offloaded(folder)
        with handle:
            (_, cache), *_ = handle._session._caches
            held: list[int] = []
            for ids in steps(200, most=5, seed=3):
                used = sorted(ids.tolist())
                missing = [each for each in used if each not in held]
                held = [each for each in held if each not in used] + [each for each in used if each in held]
                held = [*held, *missing][-6:]
                cache.admit(ids)
                assert list(cache._slot_of) == held
            assert isinstance(cache, FileCache)

    def test_what_a_prompt_uses_keeps_its_slots(self, folder: Path) -> None:
        model, handle = offloaded(folder)
        with handle:
            before = handle.stats().experts[0]
            model(X, torch.tensor([30, 31, 32, 33, 34, 35]))
            model(X, torch.arange(40))
            model(X, torch.tensor([30, 31, 32, 33, 34, 35]))
            assert handle.stats().experts[0].hits - before.hits == 12


class TestPlans:
    def test_memory_is_exact(self, folder: Path) -> None:
        _model, handle = offloaded(folder)
        with handle:
            plan, stats = handle.plan, handle.stats()
            layers = plan.cached
            assert [(layer.num_slots, layer.overflow_rows, layer.host_slots) for layer in layers] == [(6, 34, 0)] * 2
            assert stats.store_bytes["cache"] == plan.cache_bytes
            assert stats.store_bytes["file"] == plan.cached_bytes
            assert plan.store_bytes["disk"] == plan.cached_bytes

    def test_file(self, folder: Path, tmp_path: Path) -> None:
        _model, handle = offloaded(folder)
        with handle:
            plan = handle.plan
        plan.save(tmp_path / "plan.json")
        assert headrace.Plan.load(tmp_path / "plan.json") == plan
        with offloaded(folder, headrace.Plan.load(tmp_path / "plan.json"))[1] as handle:
            assert handle.plan == plan

    def test_budget(self, folder: Path) -> None:
        model = Layers(num_experts=400)
        save_model(model, str(folder / "model.safetensors"))
        bound = 60 * MIB
        loaded = Layers(num_experts=400)
        with headrace.offload(loaded, Budget(bound, rules=[("layers", "cache")]), checkpoint=folder) as handle:
            assert handle.plan.mode == "disk"
            assert handle.plan.device_bytes <= bound
            (first, second) = handle.plan.cached
            assert first.num_slots == second.num_slots > 20
            assert_same_bits(loaded(X, torch.arange(9)), model(X, torch.arange(9)))
        with pytest.raises(headrace.HeadraceError, match="too small"):
            headrace.offload(loaded, Budget(30 * MIB, rules=[("layers", "cache")]), checkpoint=folder)

    def test_chosen_by_the_planner(self, tmp_path: Path) -> None:
        """Where no page cache keeps the files."""
        model = qwen(hidden_size=256, moe_intermediate_size=512, num_experts=32, num_hidden_layers=3)
        expected = outputs(model)
        model.save_pretrained(tmp_path)
        loaded, handle = load(tmp_path, "90MiB", device="cpu", dtype=torch.float32, disk=DiskOptions(direct=True))
        with handle:
            plan = handle.plan
            assert len(plan.cached) == 3
            assert 80 * MIB < plan.device_bytes <= 90 * MIB
            assert_same_bits(outputs(loaded), expected)
            assert handle.stats().bytes_moved > 0
        predicted = [
            headrace.make_plan(tmp_path, size, device="cpu", disk=DiskOptions(direct=True)).prediction
            for size in ("70MiB", "90MiB", "130MiB")
        ]
        rates = [each.forecasts[0].rows_per_s for each in predicted]
        assert rates == sorted(set(rates))
        assert any("memory" in str(each) for each in predicted[0].alternatives)

    def test_files_larger_than_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = qwen(hidden_size=256, moe_intermediate_size=512, num_experts=32, num_hidden_layers=3)
        model.save_pretrained(tmp_path)
        assert not headrace.make_plan(tmp_path, "90MiB", device="cpu").cached
        monkeypatch.setattr(context, "_free_host_bytes", lambda *_: 100 * MIB)
        assert headrace.make_plan(tmp_path, "90MiB", device="cpu").cached

    def test_an_alias_is_refused(self, folder: Path) -> None:
        """A write to it would not reach the slots."""
        model = Layers().eval()
        alias = model.layers[1].up.detach()
        with pytest.raises(OptionError, match=r"layers\.1\.up .*another user"):
            headrace.offload(model, RULE, checkpoint=folder, device="cpu")
        assert_same_bits(alias, Layers().layers[1].up.detach())
        del alias
        with headrace.offload(model, RULE, checkpoint=folder, device="cpu"):
            assert_same_bits(model(X, torch.arange(5)), Layers()(X, torch.arange(5)))

    def test_without_files(self) -> None:
        with pytest.raises(OptionError, match="checkpoint=FOLDER"):
            headrace.offload(Layers(), RULE, device="cpu")


class TestFaults:
    def test_replaced(self, folder: Path) -> None:
        """The open file still has the right bytes."""
        model, handle = offloaded(folder)
        other = folder / "other"
        save_model(Layers(num_experts=3), str(other))
        other.rename(folder / "model.safetensors")
        with handle:
            assert_same_bits(model(X, torch.arange(5)), Layers()(X, torch.arange(5)))
            assert handle.stats().bytes_moved > 0

    @pytest.mark.parametrize("how", ["truncated", "written"])
    def test_changed(self, folder: Path, how: str) -> None:
        model, handle = offloaded(folder)
        model(X, torch.arange(5))
        with (folder / "model.safetensors").open("r+b") as file:
            if how == "truncated":
                file.truncate(MIB)
            else:
                file.seek(-4, os.SEEK_END)
                file.write(b"\0\0\0\0")
        model(X, torch.arange(5))  # in slots
        with pytest.raises(TransferError, match=r"model\.safetensors"):
            model(X, torch.arange(20, 40))
        with pytest.raises(TransferError, match=r"model\.safetensors"):
            handle.remove()
        handle._session._store.close()

    @pytest.mark.parametrize("failing", [1, 2, 7])
    def test_an_error_of_the_disk(self, folder: Path, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A slot whose read failed holds no expert, and the next step reads again."""
        resident, (model, handle) = Layers(), offloaded(folder)
        with handle:
            model(X, torch.arange(6))
            fail_read(monkeypatch, failing)
            with pytest.raises(TransferError, match="Input/output error"):
                model(X, torch.arange(3, 15))
            for ids in (*steps(20), torch.arange(40)):
                assert_same_bits(model(X, ids), resident(X, ids))

    def test_short_reads(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        preadv = os.preadv
        monkeypatch.setattr(
            os,
            "preadv",
            lambda fd, views, offset: preadv(fd, [views[0][: max(4096, len(views[0]) // 8192 * 4096)]], offset),
        )
        model, handle = offloaded(folder)
        with handle:
            assert_same_bits(model(X, torch.arange(20)), Layers()(X, torch.arange(20)))

    def test_an_interrupt_while_experts_are_read(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Threads may still write into rows, so the next step waits for them before it reads others there."""
        resident, (model, handle) = Layers(), offloaded(folder)
        gate, read = threading.Event(), file_reads.File.read

        def slow(self: Any, offset: int, into: memoryview) -> None:
            gate.wait(10)
            read(self, offset, into)

        with handle, monkeypatch.context() as patched:
            model(X, torch.arange(6))
            reader = handle._session._caches[0][1]._reader
            patched.setattr(file_reads.File, "read", slow)
            patched.setattr(reader._link, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(X, torch.arange(10, 30))
            patched.delattr(reader._link, "wait")
            threading.Timer(0.3, gate.set).start()
            for ids in (torch.arange(30, 40), torch.arange(40), *steps(10)):
                assert_same_bits(model(X, ids), resident(X, ids))


def interrupt(*_: object) -> float:
    raise KeyboardInterrupt


class TestLife:
    def test_park(self, folder: Path) -> None:
        resident, (model, handle) = Layers(), offloaded(folder)
        with handle:
            for _ in range(2):
                for ids in (*steps(5), torch.arange(40)):
                    assert_same_bits(model(X, ids), resident(X, ids))
                rows = handle._session._ranges.rows("layers.0.up")
                assert rows.any()
                handle.park()
                assert not rows.any()
                with pytest.raises(StateError, match="park"):
                    model(X, torch.arange(5))
                handle.resume()

    def test_update_is_refused(self, folder: Path) -> None:
        _model, handle = offloaded(folder)
        with handle, pytest.raises(OptionError, match="takes no new values"):
            handle.update({"layers.0.up": torch.zeros(40, 192, 128)})

    def test_resize(self, tmp_path: Path) -> None:
        resident, model = Layers(num_experts=400), Layers(num_experts=400)
        save_model(resident, str(tmp_path / "model.safetensors"))
        budget, ids = Budget("60MiB", rules=[("layers", "cache")]), torch.arange(40)
        with headrace.offload(model, budget, checkpoint=tmp_path, device="cpu") as handle:
            before = handle.plan.cached[0].num_slots
            for size in ("66MiB", "58MiB"):
                assert_same_bits(model(X, ids), resident(X, ids))
                handle.resize(size)
                assert (handle.plan.cached[0].num_slots > before) == (size == "66MiB")
            assert_same_bits(model(X, ids), resident(X, ids))

    def test_removed(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HEADRACE_READERS", raising=False)
        resident, (model, handle) = Layers(), offloaded(folder)
        model(X, torch.arange(9))
        readers = handle._session._caches[0][1]._reader._link._workers
        assert len(readers) >= 16
        handle.remove()
        assert_same_bits(dict(model.state_dict()), dict(resident.state_dict()))
        assert_same_bits(model(X, torch.arange(9)), resident(X, torch.arange(9)))
        assert not any(thread.is_alive() for thread in readers)

    def test_debug(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HEADRACE_DEBUG", "1")
        model, handle = offloaded(folder)
        with handle:
            model(X, torch.arange(9))
            handle.stats()
            (_, cache), *_ = handle._session._caches
            slot = cache._slot_of[3]
            cache._parts[0][0][slot, 0] ^= 1
            model(X, torch.arange(3, 5))
            with pytest.raises(headrace.HeadraceError, match="differ from the store"):
                handle.stats()

    def test_a_batch_outside_of_its_module(self, folder: Path) -> None:
        """A tensor that is used outside is read whole, for that use."""
        model, handle = offloaded(folder)
        with handle, pytest.warns(HeadraceWarning):
            assert torch.equal(model.layers[1].bias + 0, Layers().layers[1].bias)


def drop(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_bytes() -> int:
    """Bytes that this process has had storage read (proc(5))."""
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])
