"""Experts in files below a GPU, with host memory between: bits of the resident model, and memory to the byte."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_model
from torch import nn
from transformers import Qwen3MoeForCausalLM

import headrace
from checks import eventually
from expert_layers import Experts, Graph, Layers, X, fail_read, steps
from headrace import Budget, Handle, Plan, Rules
from headrace.adapters.transformers import load
from headrace.errors import OptionError, StateError, TransferError
from headrace.graphs.cache_rows import Rows
from headrace.memory.pages import map_file, resident_bytes
from headrace.model.inventory import take_inventory
from headrace.plan import cached_experts
from headrace.plan.build import build_plan
from headrace.plan.cached_experts import with_host_slots
from headrace.planning.checks import needs_of
from headrace.serving.engine import Engine, Request
from headrace.stores.file_reads import can_read_direct
from headrace.testing import assert_same_bits, boundaries
from headrace.transfer import cuda_stream, expert_tiers
from headrace.transfer.expert_tiers import TieredCache
from moe_models import IDS, cached, qwen

pytestmark = pytest.mark.usefixtures("no_grad")
MIB = 2**20
CUDA = torch.device("cuda", 0)
ALL = torch.arange(40)
EXPERT_BYTES = 4 * (192 * 128 + 192)
SIZES = [(1, 0), (1, 1), (3, 5), (6, 34), (10, 1), (39, 1), (40, 0)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(Layers(), str(tmp_path / "model.safetensors"))
    return tmp_path


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows for what is read, so that every step uses them again."""
    monkeypatch.setattr(cached_experts, "_STAGING_BYTES", 1)


def tiered(model: nn.Module, num_slots: int, host_slots: int, pattern: str = "layers") -> Plan:
    plan = build_plan(take_inventory(model), Rules([(pattern, "cache")], expert_slots=num_slots, mode="disk"))
    return replace(plan, cached=tuple(with_host_slots(layer, host_slots) for layer in plan.cached))


def offloaded(folder: Path, num_slots: int = 6, host_slots: int = 10, **sizes: int) -> tuple[Layers, Handle]:
    with torch.device("meta"):
        model = Layers(**sizes).eval().requires_grad_(False)
    plan = tiered(model, num_slots, host_slots)
    return model, headrace.offload(model, plan, checkpoint=folder, device=CUDA)


def resident() -> Layers:
    return Layers().eval().requires_grad_(False).to(CUDA)


def run(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = model(X.to(CUDA), ids.to(CUDA))
    return found


def caches(handle: Handle) -> Iterator[TieredCache]:
    for _, cache in handle._session._caches:
        assert isinstance(cache, TieredCache)
        yield cache


def require_exclusive(handle: Handle, model: Layers) -> None:
    """No expert is in both tiers, and rows hold its bytes."""
    torch.cuda.synchronize()
    for cache, layer in zip(caches(handle), model.layers, strict=True):
        slots, places = cache._slot_of, cache._place_of
        assert not slots.keys() & places.keys()
        assert len(slots) <= cache.num_slots
        assert len(places) <= cache._host_slots
        weights = [weight.flatten(1).view(torch.uint8) for weight in (layer.up, layer.bias)]
        for (rows, _), held, weight in zip(cache._parts, cache._held, weights, strict=True):
            assert rows.is_cuda
            assert held.is_cpu
            assert all(torch.equal(rows[row], weight[expert]) for expert, row in slots.items())
            assert all(torch.equal(held[place], weight[expert].cpu()) for expert, place in places.items())


class TestBits:
    @pytest.mark.usefixtures("few_rows")
    @pytest.mark.parametrize(("num_slots", "host_slots"), SIZES)
    def test_many_steps(self, folder: Path, num_slots: int, host_slots: int) -> None:
        expected, (model, handle) = resident(), offloaded(folder, num_slots, host_slots)
        with handle:
            for number, ids in enumerate((*steps(60), ALL, *steps(30, most=30, seed=1), *steps(60, most=3, seed=2))):
                assert_same_bits(run(model, ids), run(expected, ids))
                if number % 10 == 0:
                    require_exclusive(handle, expected)
            assert_same_bits(run(model, ALL), run(expected, ALL))
            require_exclusive(handle, expected)

    @pytest.mark.usefixtures("few_rows")
    def test_kernels_read_after_the_host_has_gone_on(self, folder: Path) -> None:
        """The device is behind: rows are not overwritten before it has read them, whatever the stream."""

        def forward(self: Experts, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            experts, rows = headrace.expert_rows(self, ids)
            torch.cuda._sleep(1_000_000)
            return torch.einsum("eoi,i->eo", experts.up[rows], x) + experts.bias[rows]

        expected, (model, handle) = resident(), offloaded(folder, 4, 6)
        other, choices = torch.cuda.Stream(), [*steps(60, most=12, seed=7), ALL]
        with handle, pytest.MonkeyPatch.context() as patched:
            patched.setattr(Experts, "forward", forward)
            found = []
            for number, ids in enumerate(choices):
                with torch.cuda.stream(other if number % 3 == 1 else torch.cuda.current_stream()):
                    found.append(run(model, ids))
            torch.cuda.synchronize()
            assert_same_bits(found, [run(expected, ids) for ids in choices])

    @pytest.mark.usefixtures("few_rows")
    @pytest.mark.parametrize("in_graphs", [False, True])
    @pytest.mark.parametrize("slow", ["up", "down", "up down", "up or down"])
    @pytest.mark.parametrize(("num_slots", "host_slots"), [(1, 1), (3, 5), (6, 34), (39, 1)])
    def test_slow_copies(
        self, folder: Path, num_slots: int, host_slots: int, slow: str, in_graphs: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A stream that is behind: another one that does not wait for it reads or writes too early."""
        expected, (model, handle) = resident(), offloaded(folder, num_slots, host_slots)
        choices = [*steps(20), ALL, *steps(10, most=30, seed=1), *steps(20, most=3, seed=2)]
        with handle:
            graph = partial(run, model)
            if in_graphs:
                graph, choices = Graph(model, 8, CUDA), choices_of(8, 40)
            copy, streams, chooser = expert_tiers._copy, next(caches(handle))._streams, np.random.default_rng(0)

            def late(stream: torch.cuda.Stream, pairs: Any) -> None:
                name = "up" if stream == streams.up else "down"
                if name in slow and ("or" not in slow or chooser.random() < 0.3):
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(1_000_000)
                copy(stream, pairs)

            monkeypatch.setattr(expert_tiers, "_copy", late)
            found = [graph(ids) if number % 4 else run(model, ids) for number, ids in enumerate(choices)]
            torch.cuda.synchronize()
            assert_same_bits(found, [run(expected, ids) for ids in choices])
            require_exclusive(handle, expected)

    def test_a_step_does_not_wait_for_what_leaves_slots(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The next one does; and the end of the offload gives the streams to others when they are idle."""
        expected, (model, handle) = resident(), offloaded(folder, 6, 10)
        with handle:
            streams, copy = next(caches(handle))._streams, expert_tiers._copy
            for at in range(0, 12, 6):
                run(model, torch.arange(at, at + 6))
            torch.cuda.synchronize()

            def late(stream: torch.cuda.Stream, pairs: Any) -> None:
                if stream == streams.down:
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(1_500_000_000)  # most of a second
                copy(stream, pairs)

            x, ids = X.to(CUDA), torch.arange(12, 18, device=CUDA)
            with monkeypatch.context() as patched:
                patched.setattr(expert_tiers, "_copy", late)
                found = model.layers[0](x, ids)
                torch.cuda.current_stream().synchronize()
                assert not streams.down.query()
            assert_same_bits(found, expected.layers[0](x, ids))
            assert_same_bits(run(model, torch.arange(6, 18)), run(expected, torch.arange(6, 18)))
            own = [streams.up, streams.down]
        assert all(stream.query() for stream in own)
        assert all(stream in cuda_stream._unused[CUDA] for stream in own)

    def test_debug_mode_finds_no_difference(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HEADRACE_DEBUG", "1")
        model, handle = offloaded(folder, 4, 6)
        with handle:
            for ids in (*steps(20), ALL):
                run(model, ids)
            assert handle.stats().experts[0].steps == 21

    def test_a_long_prompt(self, tmp_path: Path) -> None:
        """It uses all experts, and each is read once."""
        qwen(num_experts=32).to(torch.bfloat16).save_pretrained(tmp_path)
        ids = (torch.arange(1024) * 37 % 97)[None].to(CUDA)
        options: Any = {"dtype": torch.bfloat16, "experts_implementation": "grouped_mm"}
        model = Qwen3MoeForCausalLM.from_pretrained(tmp_path, **options).eval().to(CUDA)
        expected = model(ids).logits
        loaded, handle = load(tmp_path, tiered(model, 4, 8, "experts"), device=CUDA, **options)
        with handle:
            before = read_bytes(handle)
            assert torch.equal(loaded(ids).logits, expected)
            assert read_bytes(handle) - before <= handle.plan.cached_bytes
            before = read_bytes(handle)
            assert torch.equal(loaded(ids).logits, expected)
            assert read_bytes(handle) - before <= handle.plan.cached_bytes * 20 // 32

    def test_compiled(self, tmp_path: Path) -> None:
        qwen().to(torch.bfloat16).save_pretrained(tmp_path)
        options: Any = {"dtype": torch.bfloat16, "experts_implementation": "grouped_mm"}
        model = Qwen3MoeForCausalLM.from_pretrained(tmp_path, **options).eval().to(CUDA)
        ids = IDS.to(CUDA)
        with torch.inference_mode():
            with boundaries(model, cached(3)):
                compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
                expected = [compiled(ids).logits for _ in range(2)]
            torch._dynamo.reset()
            loaded, handle = load(tmp_path, tiered(model, 3, 3, "experts"), device=CUDA, **options)
            with handle:
                compiled = torch.compile(loaded, fullgraph=True, backend="aot_eager")
                assert_same_bits([compiled(ids).logits for _ in range(2)], expected)
        torch._dynamo.reset()

    def test_a_capture_is_refused(self, folder: Path) -> None:
        expected, (model, handle) = resident(), offloaded(folder)
        x, ids = X.to(CUDA), torch.arange(5, device=CUDA)
        with handle:
            model(x, ids)
            with pytest.raises(StateError, match="graph is being captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
                model(x, ids)
            for chosen in steps(10):
                assert_same_bits(run(model, chosen), run(expected, chosen))


def choices_of(count: int, num: int, seed: int = 0) -> list[torch.Tensor]:
    chooser = np.random.default_rng(seed)
    return [torch.from_numpy(chooser.choice(40, count, replace=False)) for _ in range(num)]


class TestGraphs:
    """Of which one ends where the host has to bring experts."""

    @pytest.mark.usefixtures("few_rows")
    @pytest.mark.parametrize(("num_slots", "host_slots"), SIZES)
    def test_many_steps(self, folder: Path, num_slots: int, host_slots: int) -> None:
        """Between eager ones, on two streams, and without a wait of the host for what they compute."""
        expected, (model, handle) = resident(), offloaded(folder, num_slots, host_slots)
        other = torch.cuda.Stream()
        with handle:
            graphs = {count: Graph(model, count, CUDA) for count in (3, 8, 30)}
            for seed, ids in enumerate((*steps(20), ALL, *steps(10, most=30, seed=1))):
                choices = [choices_of(count, 1, seed)[0] for count in graphs]
                with torch.cuda.stream(other if seed % 3 == 1 else torch.cuda.current_stream()):
                    found = [graph(each) for graph, each in zip(graphs.values(), choices, strict=True)]
                    found.append(run(model, ids))
                torch.cuda.synchronize()
                assert_same_bits(found, [run(expected, each) for each in (*choices, ids)])
                require_exclusive(handle, expected)
            assert handle.stats().bytes_moved > 0

    def test_an_error_of_the_disk(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        expected, (model, handle) = resident(), offloaded(folder, 4, 6)
        with handle:
            graph = Graph(model, 8, CUDA)
            for failing in (1, 3):
                graph(torch.arange(8))
                with monkeypatch.context() as patched:
                    fail_read(patched, failing)
                    with pytest.raises(TransferError, match="Input/output error"):
                        graph(torch.arange(20, 28))
                for ids in choices_of(8, 20):
                    assert_same_bits(graph(ids), run(expected, ids))

    @pytest.mark.parametrize("debug", ["0", "1"])
    @pytest.mark.parametrize("implementation", ["grouped_mm", "headrace"])
    def test_generate(
        self, tmp_path: Path, implementation: str, debug: str, monkeypatch: pytest.MonkeyPatch,
        recwarn: pytest.WarningsRecorder,
    ) -> None:  # fmt: skip
        monkeypatch.setenv("HEADRACE_DEBUG", debug)
        model, loaded, handle = loaded_twice(tmp_path, implementation)
        graphs = headrace.decode_in_graphs(model)
        expected = generated(model)
        graphs.remove()
        logits = outputs_on(model)
        with handle:
            before = read_bytes(handle)
            for _ in range(3):
                assert torch.equal(generated(loaded), expected)
            assert_same_bits(outputs_on(loaded), logits)
            assert vars(loaded)["_headrace_decode_graphs"].replays > 50
            assert read_bytes(handle) > before
            assert not [each for each in recwarn if "eagerly" in str(each.message)]
            with monkeypatch.context() as patched:
                fail_read(patched, 1)
                with pytest.raises(TransferError, match="Input/output error"):
                    generated(loaded)
            assert torch.equal(generated(loaded), expected)
            assert handle.stats().bytes_moved > 0
        assert_same_bits(outputs_on(loaded), logits)

    def test_served(self, tmp_path: Path) -> None:
        """One after another, so that both models run steps of the same rows."""
        model, loaded, handle = loaded_twice(tmp_path, "headrace")
        with handle:
            before = read_bytes(handle)
            assert served(loaded) == served(model)
            assert read_bytes(handle) > before

    def test_parked(self, folder: Path) -> None:
        """Slots come back where the graphs have them."""
        expected, (model, handle) = resident(), offloaded(folder)
        with handle:
            graph = Graph(model, 8, CUDA)
            for ids in choices_of(8, 6):
                assert_same_bits(graph(ids), run(expected, ids))
                handle.park()
                handle.resume()


def served(model: Any) -> list[list[int]]:
    """Tokens of three prompts, from rows of a cache."""
    rows, found = Rows(model, 3, 256), []
    engine = Engine(rows, CUDA, 64, lambda _: None)
    engine.start()
    for length in (5, 60, 17):
        asked = Request([(7 * at + length) % 90 for at in range(length)], 30, (), transformers.LogitsProcessorList)
        engine.submit(asked)
        assert eventually(partial(getattr, asked, "has_ended"), 60)
        assert asked.error is None
        found.append(asked.tokens)
    engine.stop(30)
    assert rows.replays > 60
    rows.release()
    return found


def loaded_twice(folder: Path, implementation: str) -> tuple[Any, Any, Handle]:
    """A resident model, and the same with experts in files and its offload."""
    qwen().to(torch.bfloat16).save_pretrained(folder)
    options: Any = {"dtype": torch.bfloat16, "experts_implementation": implementation}
    model = Qwen3MoeForCausalLM.from_pretrained(folder, **options).eval().to(CUDA)
    return model, *load(folder, tiered(model, 3, 3, "experts"), device=CUDA, **options)


def generated(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(IDS.to(CUDA), max_new_tokens=24, do_sample=False, eos_token_id=None)
    return found


def outputs_on(model: nn.Module) -> list[torch.Tensor]:
    with torch.inference_mode():
        ids = IDS.to(CUDA)
        return [model(ids).logits, *(model(ids[:, at : at + 1]).logits for at in (0, 4, 0))]


def read_bytes(handle: Handle) -> int:
    reads: Any = handle._session._ranges.reads  # type: ignore[union-attr]
    found: int = reads.direct + reads.buffered
    return found


class TestMemory:
    def test_host_memory_is_that_of_the_plan(self, folder: Path) -> None:
        _model, handle = offloaded(folder)
        with handle:
            ranges: Any = handle._session._ranges
            needs, staging = needs_of(handle.plan, on_gpu=True), 40 * EXPERT_BYTES
            assert needs.pinned_bytes == needs.host_bytes == 2 * 10 * EXPERT_BYTES + staging
            assert handle.stats().store_bytes["host_pinned"] == needs.pinned_bytes
            held = [part for cache in caches(handle) for part in cache._held]
            assert sum(part.numel() for part in (*held, *ranges.staging)) == needs.pinned_bytes

    def test_a_budget(self, folder: Path) -> None:
        """Of both memories, in which it runs."""
        expected = Layers(num_experts=400).eval().requires_grad_(False)
        save_model(expected, str(folder / "model.safetensors"))
        expected.to(CUDA)
        with torch.device("meta"):
            model = Layers(num_experts=400).eval().requires_grad_(False)
        policy = Budget("60MiB", host_memory="60MiB", rules=[("layers", "cache")], mode="disk")
        with headrace.offload(model, policy, checkpoint=folder, device=CUDA) as handle:
            assert handle.plan.device_bytes <= 60 * MIB
            assert 59 * MIB < needs_of(handle.plan, on_gpu=True).pinned_bytes <= 60 * MIB
            assert all(layer.host_slots for layer in handle.plan.cached)
            for ids in (*steps(20), ALL, torch.arange(400)):
                assert_same_bits(run(model, ids), run(expected, ids))

    @pytest.mark.alone
    def test_device_memory_comes_and_goes(self, tmp_path: Path) -> None:
        """Parked, and after the end."""
        save_model(Layers(num_experts=800), str(tmp_path / "model.safetensors"))
        run(resident(), ALL)  # libraries are loaded
        before = free_bytes()
        model, handle = offloaded(tmp_path, 600, 100, num_experts=800)
        run(model, torch.arange(700))
        slots = sum(layer.slots_bytes("layers.0.up") for layer in handle.plan.cached[:1]) * 2
        assert slots > 100 * MIB
        taken = before - free_bytes()
        assert slots < taken <= handle.plan.device_bytes + 64 * MIB
        handle.park()
        assert before - free_bytes() <= taken - slots + 4 * MIB
        with pytest.raises(StateError, match="park"):
            run(model, torch.arange(5))
        handle.resume()
        assert abs(before - free_bytes() - taken) <= 4 * MIB
        run(model, torch.arange(700))
        found = handle.plan.weight_bytes
        handle.remove()
        gc.collect()
        assert before - free_bytes() <= found + 32 * MIB
        del model, handle
        gc.collect()
        assert before - free_bytes() <= 32 * MIB

    def test_no_page_stays_in_the_cache(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        if not can_read_direct(path):
            pytest.skip("no direct reads here")
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            mapped = map_file(file.fileno(), 0, path.stat().st_size, read_only=True)
        model, handle = offloaded(folder, 4, 6)
        with handle:
            for ids in (*steps(30), ALL):
                run(model, ids)
            assert handle.stats().bytes_moved > 4 * MIB
            assert resident_bytes(mapped) <= 512 << 10


class TestLife:
    def test_park(self, folder: Path) -> None:
        """Slots are given back; host memory keeps what it holds."""
        expected, (model, handle) = resident(), offloaded(folder)
        with handle:
            for _ in range(2):
                for ids in (*steps(9), ALL):
                    assert_same_bits(run(model, ids), run(expected, ids))
                handle.park()
                handle.resume()
                assert all(len(cache._place_of) == 10 for cache in caches(handle))
                require_exclusive(handle, expected)

    def test_removed(self, folder: Path) -> None:
        expected, (model, handle) = resident(), offloaded(folder)
        run(model, torch.arange(9))
        handle.remove()
        assert_same_bits(dict(model.state_dict()), dict(expected.state_dict()))
        assert_same_bits(run(model, ALL), run(expected, ALL))

    def test_update_and_resize_are_refused(self, folder: Path) -> None:
        expected, (model, handle) = resident(), offloaded(folder)
        with handle:
            with pytest.raises(OptionError, match="takes no new values"):
                handle.update({"layers.0.up": torch.zeros(40, 192, 128)})
            with pytest.raises(OptionError, match="experts in files on a GPU"):
                handle.resize("14MiB")
            assert_same_bits(run(model, ALL), run(expected, ALL))

    def test_a_truncated_file(self, folder: Path) -> None:
        """Both tiers still have what they hold."""
        expected, (model, handle) = resident(), offloaded(folder, 4, 6)
        run(model, torch.arange(4))
        run(model, torch.arange(4, 8))
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(MIB)
        assert_same_bits(run(model, torch.arange(8)), run(expected, torch.arange(8)))
        for _ in range(2):
            with pytest.raises(TransferError, match=r"model\.safetensors"):
                run(model, torch.arange(20, 40))
        with pytest.raises(TransferError, match=r"model\.safetensors"):
            handle.remove()
        handle._session._store.close()


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(CUDA)[0]
