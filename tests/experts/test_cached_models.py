"""The promise: models whose experts are cached return the bits of the resident model, and experts move.

Kernels run in Triton's interpreter, on a CPU, where a range has one memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from checks import run_threads
from headrace import Rules
from headrace.adapters.transformers import load
from headrace.errors import HeadraceWarning, ModelChangedError, OptionError, RuleError, StateError
from headrace.experts.rows import CachedExperts, CacheStreamOrder, NoCache
from headrace.model.inventory import take_inventory
from headrace.plan.build import build_plan
from headrace.plan.cached_experts import PIECE_BYTES, CachedLayer, cache_bytes, with_slots
from headrace.plan.plan import Plan
from headrace.testing import assert_same_bits, boundaries
from moe_models import IDS, cached, gpt_oss, outputs, qwen


class Experts(nn.Module):
    """A module of one's own that reads its experts by rows."""

    def __init__(self, num_outputs: int = 32) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(6, num_outputs, 24))
        self.gate = nn.Linear(24, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts, rows = headrace.expert_rows(self, self.gate(x).topk(2).indices)
        return torch.einsum("bkoi,bi->bo", experts.up[rows], x)


class TestBits:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("implementation", "num_slots"), [("grouped_mm", 1), ("grouped_mm", 3), ("batched_mm", 3), ("batched_mm", 99)]
    )
    def test_transformers(self, implementation: str, num_slots: int) -> None:
        model = qwen(implementation)
        expected, state = outputs(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with headrace.offload(model, cached(num_slots)) as handle:
            assert_same_bits(outputs(model), expected)
            assert_same_bits(dict(model.state_dict()), state)
            stats = handle.stats()
            assert stats.bytes_moved > 0
            for layer in stats.experts:
                assert (layer.steps, layer.num_slots) == (4, min(num_slots, 8))
                assert layer.fetched > 0
                assert layer.hits > 0 or num_slots == 1
                assert layer.fetched - layer.evicted <= layer.num_slots
                assert layer.in_place >= (2 if num_slots == 1 else 1)  # the first step reads one in place anyway
        assert_same_bits(outputs(model), expected)

    @pytest.mark.slow
    def test_more_ids_than_slots(self) -> None:
        """Experts without a slot are read in overflow rows, and what came before and after is as it was."""
        model, ids = qwen(num_hidden_layers=4), torch.arange(160).remainder(100)[None]
        with torch.inference_mode():
            expected = [model(ids[:, :n]).logits for n in (2, 160, 2)]
            plan = build_plan(take_inventory(model), cached(4))
            plan = replace(plan, cached=tuple(replace(layer, overflow_rows=2) for layer in plan.cached))
            with headrace.offload(model, plan) as handle:
                layer = handle.plan.cached[0]
                rows = handle._session._caches[0][1]._rows[0][layer.first_overflow_row :][:2].zero_()
                assert_same_bits(model(ids[:, :2]).logits, expected[0])
                assert not rows.any()
                assert_same_bits(model(ids).logits, expected[1])
                assert rows.any(1).all()
                assert_same_bits(model(ids[:, :2]).logits, expected[2])
                assert handle.stats().experts[0].in_place > 2

    @pytest.mark.slow
    def test_biases_and_other_mechanisms(self) -> None:
        model = gpt_oss()
        expected = outputs(model)
        policy = Rules([("experts", "cache"), ("@attention", "prefetch")], expert_slots=3)
        with headrace.offload(model, policy) as handle:
            assert_same_bits(outputs(model), expected)
            moved = handle.stats()
            assert moved.copies > 0
            assert all(layer.fetched > 0 for layer in moved.experts)
            assert {len(layer.storages) for layer in handle.plan.cached} == {4}

    @pytest.mark.slow
    @pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "headrace"])
    def test_compiled(self, implementation: str) -> None:
        model = qwen(implementation).to(torch.bfloat16)
        with torch.inference_mode():
            with boundaries(model, cached(3)):
                compiled = torch.compile(model, fullgraph=True)
                expected = [compiled(IDS).logits for _ in range(2)]
            torch._dynamo.reset()
            with headrace.offload(model, cached(3)) as handle:
                compiled = torch.compile(model, fullgraph=True)
                assert_same_bits([compiled(IDS).logits for _ in range(2)], expected)
                assert handle.stats().bytes_moved > 0
        torch._dynamo.reset()

    @pytest.mark.slow
    def test_layers_compiled_one_by_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Their hooks are compiled by themselves, and are given the experts, which have no bytes of their own."""
        monkeypatch.setenv("HEADRACE_DEBUG", "1")  # a mode, in which torch looks up no fallback of a dispatch key
        model, x = nn.Sequential(Experts(24), Experts(24)).eval(), torch.randn(5, 24)
        expected = model(x)
        with headrace.offload(model, Rules([("*up", "cache"), ("*gate*", "prefetch")], expert_slots=3)) as handle:
            for layer in model:
                layer.compile()
            torch.testing.assert_close([model(x), model(x)], [expected, expected], rtol=1e-5, atol=1e-4)
            assert handle.stats().bytes_moved > 0
        torch._dynamo.reset()

    @pytest.mark.slow
    def test_loaded_from_a_folder(self, tmp_path: Path) -> None:
        model = qwen()
        expected = outputs(model)
        model.save_pretrained(tmp_path)  # each expert in tensors of its own
        loaded, handle = load(tmp_path, cached(3), device="cpu", dtype=torch.float32)
        with handle:
            assert_same_bits(outputs(loaded), expected)
            assert handle.stats().bytes_moved > 0

    def test_a_module_of_ones_own(self) -> None:
        model = nn.Sequential(Experts(), nn.Linear(32, 24), Experts()).eval()
        x = torch.randn(5, 24)
        expected = model(x)
        with headrace.offload(model, Rules([("*.up", "cache")], expert_slots=3)) as handle:
            assert_same_bits(model(x), expected)
            assert handle.stats().bytes_moved > 0

    @pytest.mark.parametrize("how", ["class", "forward of the class", "attribute"])
    def test_a_module_that_is_changed(self, how: str) -> None:
        class Scaled(Experts):
            scale = 2.0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                experts, rows = headrace.expert_rows(self, self.gate(x).topk(2).indices)
                return torch.einsum("bkoi,bi->bo", experts.up[rows] * experts.scale, x)

        class Own(Experts): ...

        module, x = Own().eval(), torch.randn(5, 24)
        if how == "attribute":
            module.__class__ = Scaled
        with headrace.offload(nn.Sequential(module), Rules([("*.up", "cache")], expert_slots=3)) as handle:
            before = module(x)
            if how == "class":
                module.__class__ = Scaled
            elif how == "attribute":
                module.scale = 3.0
            else:
                Own.scale, Own.forward = 2.0, Scaled.forward
            found = module(x)
            assert handle.stats().bytes_moved > 0
        assert_same_bits(found, module(x))
        assert not torch.equal(found, before)

    @pytest.mark.slow
    def test_ids_of_no_expert(self) -> None:
        """They find no row of another expert: negative ones count from the end, and what is beyond raises."""

        class Chosen(Experts):
            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                experts, rows = headrace.expert_rows(self, ids)
                return experts.up[rows]

        def run(model: nn.Module, expert: int) -> torch.Tensor | None:
            try:
                return model[1](torch.tensor([0, expert, 3]))
            except IndexError:
                return None

        model = nn.Sequential(Chosen(), Chosen(), Chosen()).eval()
        ids = (-99, -8, -7, -6, -1, 5, 6, 7, 8, 11, 12, 99)
        expected = [run(model, expert) for expert in ids]
        assert [output is None for output in expected] == [not -6 <= expert < 6 for expert in ids]
        with headrace.offload(model, Rules([("*.up", "cache")], expert_slots=3)) as handle:
            for expert, output in zip(ids, expected, strict=True):
                found = run(model, expert)
                assert (found is None) == (output is None), expert
                if output is not None:
                    assert_same_bits(found, output)
            assert handle.stats().bytes_moved > 0

    @pytest.mark.slow
    def test_compiled_calls_that_do_not_depend_on_each_other(self) -> None:
        """A compiler may move ops, but no admission before the reads of the one before: two slots hold one call's."""
        model = Shared().eval()
        calls = [(torch.randn(2, 24), torch.tensor(ids)) for ids in ([[0, 1], [1, 0]], [[2, 3], [3, 2]], [[4, 5]] * 2)]
        policy = Rules([("*.up", "cache")], expert_slots=2)
        with torch.inference_mode():
            with boundaries(model, policy):
                expected = torch.compile(model, fullgraph=True)(calls)
            torch._dynamo.reset()
            with headrace.offload(model, policy) as handle:
                assert_same_bits(torch.compile(model, fullgraph=True)(calls), expected)
                assert handle.stats().experts[0].evicted > 0
        torch._dynamo.reset()

    @pytest.mark.slow
    def test_compiled_code_waits_for_the_latest_run_on_another_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """At each call, and not when it is traced: which streams are current is not known before."""
        model, x, followed = Experts().eval(), torch.randn(2, 24), list[torch.device]()
        monkeypatch.setattr(CacheStreamOrder, "follow", lambda turn, device: followed.append(device))
        with torch.inference_mode(), headrace.offload(model, Rules([("*up", "cache")], expert_slots=2)):
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            compiled(x)
            followed.clear()
            for _ in range(3):
                compiled(x)
        torch._dynamo.reset()
        assert followed == [x.device] * 3

    @pytest.mark.slow
    def test_two_threads(self) -> None:
        """One slot: each thread evicts what the other has just admitted, unless it waits."""
        model = Experts().eval()
        inputs = [torch.randn(3, 24) for _ in range(2)]
        wrong: list[int] = []
        with torch.inference_mode():
            expected = [model(x) for x in inputs]

        def run(index: int) -> None:
            with torch.inference_mode():
                for _ in range(12):
                    if not torch.equal(model(inputs[index]), expected[index]):
                        wrong.append(index)

        with headrace.offload(model, Rules([("up", "cache")], expert_slots=1)) as handle:
            run_threads([partial(run, 0), partial(run, 1)])
            assert handle.stats().experts[0].steps == 24
            assert handle.stats().bytes_moved > 0
        assert not wrong

    @pytest.mark.slow
    def test_compiled_code_in_two_threads(self) -> None:
        """One after the other; a forward between an admission and its reads in another thread is refused."""
        model, x = Experts().eval(), torch.randn(2, 24)
        with torch.inference_mode():
            expected = model(x)
        found: list[Any] = []

        def run(forward: Any) -> None:
            try:
                with torch.inference_mode():
                    found.append(forward(x))
            except StateError as error:
                found.append(error)

        with torch.inference_mode(), headrace.offload(model, Rules([("up", "cache")], expert_slots=2)) as handle:
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            assert_same_bits(compiled(x), expected)
            run_threads([partial(run, compiled)])
            run_threads([partial(run, model)])
            assert_same_bits(found, [expected] * 2)
            cache = vars(model)["_headrace_cached_experts"].cache
            torch.ops.headrace.expert_rows(cache.turn.token, cache.location, torch.tensor([0, 1]))
            for forward in (model, compiled, model):  # also after one that was refused
                run_threads([partial(run, forward)])
                assert "another thread runs, or raised in, compiled code" in str(found.pop())
            torch.ops.headrace.experts_read(cache.turn.token, cache.location, [])
            run_threads([partial(run, compiled)])
            assert_same_bits(found.pop(), expected)
            assert handle.stats().bytes_moved > 0
        torch._dynamo.reset()

    def test_a_module_that_does_not_ask_for_rows(self) -> None:
        """It gets temporary copies of its tensors: slow, and right."""
        model = Experts().eval()
        model.forward = lambda x: model.up.sum() * x  # type: ignore[method-assign]
        expected = model(torch.ones(2))
        with headrace.offload(model, Rules([("up", "cache")], expert_slots=3)) as handle:
            with pytest.warns(HeadraceWarning, match=r"reads its experts through a cache .*bytes are copied"):
                assert_same_bits(model(torch.ones(2)), expected)
            assert any("copied for every use" in note for note in handle.stats().notes)
            with pytest.raises(headrace.HeadraceError, match="writes it in place"):
                model.up.data.zero_()


class Shared(nn.Module):
    """One module of experts for several calls, each with ids of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Asked()

    def forward(self, calls: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        return torch.stack([self.experts(x, ids).sin() for x, ids in calls]).sum(0)


class Asked(nn.Module):
    """Asks for the rows of its ids in ``parts``, and calls ``between`` before it reads them."""

    def __init__(self, parts: int = 1, between: nn.Module | None = None) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(6, 32, 24))
        self.parts, self.between = parts, between

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        found = [headrace.expert_rows(self, part) for part in ids.chunk(self.parts)]
        if self.between is not None:
            x = x + self.between(x, ids).sum()
        up = torch.cat([experts.up[rows] for experts, rows in found])
        return torch.einsum("bkoi,bi->bo", up, x)


class FromOutside(nn.Module):
    """Asks for the rows of two children before it reads the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Asked(), Asked()

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        found = [headrace.expert_rows(child, ids) for child in (self.first, self.second)]
        return sum((torch.einsum("bkoi,bi->bo", e.up[rows], x) for e, rows in found), torch.zeros(()))


class NotedCache(NoCache):
    compared = 0

    def compare(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.compared += 1


class AdmitsWhereNonzero(Experts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.any() else x


def test_a_forward_that_raised_leaves_no_rows_to_compare() -> None:
    module = AdmitsWhereNonzero()
    cache = NotedCache(6, CacheStreamOrder(torch.device("cpu")))
    CachedExperts(module, {"up": module.up.detach()}, cache).attach()
    x = torch.ones(2, 24)
    with torch.inference_mode():
        module(x)
        with pytest.raises(RuntimeError):
            module(torch.ones(2, 3, 24))  # after the admission
        module(torch.zeros(2, 24))  # admits nothing
    assert cache.compared == 1


class TestRefusals:
    @pytest.mark.parametrize("make", [lambda: Asked(2), lambda: Asked(1, Asked()), FromOutside])
    @pytest.mark.parametrize("how", ["eager", "compiled", "gradients"])
    def test_experts_that_could_leave_before_they_are_read(self, make: Callable[[], nn.Module], how: str) -> None:
        """With gradients the compiler leaves a module with a cache to Python."""
        model, x, ids = make().eval(), torch.randn(2, 24), torch.tensor([[0, 1], [2, 3]])
        fullgraph = how == "compiled"
        run = model if how == "eager" else torch.compile(model, fullgraph=fullgraph, backend="eager")
        with nullcontext() if how == "gradients" else torch.inference_mode():
            expected = model(x, ids)
            with headrace.offload(model, Rules([("*up", "cache")], expert_slots=2)):
                for _ in range(3):
                    with pytest.raises(Exception, match=r"call headrace.expert_rows once in the forward of the module"):
                        run(x, ids)
            assert_same_bits(model(x, ids), expected)
        torch._dynamo.reset()

    def test_sums_in_the_order_of_the_experts(self) -> None:
        with pytest.raises(OptionError, match=r"run by 'eager', and cached experts need one of grouped_mm, batched_mm"):
            headrace.offload(qwen("eager"), cached(3))

    def test_an_implementation_chosen_later(self) -> None:
        model = qwen()
        with headrace.offload(model, cached(3)):
            model.set_experts_implementation("eager")
            with pytest.raises(OptionError, match="run by 'eager'"):
                outputs(model)

    @pytest.mark.parametrize("how", ["replaced", "deleted", "data", "swapped"])
    def test_a_tensor_that_is_no_longer_the_cached_one(self, how: str) -> None:
        """Its rows would be read on."""
        model = qwen()
        experts = model.model.layers[1].mlp.experts
        own, other = experts.down_proj, nn.Parameter(experts.down_proj.detach() * 2)
        with headrace.offload(model, cached(3)):
            with torch.inference_mode():
                model(IDS)
            if how == "data":
                own.data = other.data
            elif how == "swapped":
                torch.utils.swap_tensors(own, other)
            elif how == "deleted":
                del experts.down_proj
            else:
                experts.down_proj = other
            with pytest.raises(ModelChangedError, match=r"down_proj was .*call handle\.remove\(\) first"):
                outputs(model)

    def test_a_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRITON_INTERPRET")
        with pytest.raises(OptionError, match="are cached, and the device is a CPU; expected a CUDA device"):
            headrace.offload(qwen(), cached(3))

    def test_a_backward_pass(self) -> None:
        model = qwen()
        with headrace.offload(model, cached(3)), pytest.raises(StateError, match="a backward pass needs experts"):
            model(IDS).logits.sum().backward()

    @pytest.mark.parametrize("trained", [True, False])
    def test_gradients(self, trained: bool) -> None:
        """Those of experts would be lost; those of an input are the resident model's."""
        model, inputs = Experts().eval().requires_grad_(trained), [torch.randn(5, 24, requires_grad=True) for _ in "ab"]
        inputs[1].data = inputs[0].data
        model(inputs[0]).sum().backward()
        with headrace.offload(model, Rules([("up", "cache")], expert_slots=6)):
            output = model(inputs[1])
            if trained:
                with pytest.raises(StateError, match="a backward pass needs experts of Experts"):
                    output.sum().backward()
                return
            output.sum().backward()
            assert_same_bits(inputs[1].grad, inputs[0].grad)

    def test_tracers(self) -> None:
        model = Experts().eval()
        with headrace.offload(model, Rules([("up", "cache")], expert_slots=3)):
            with pytest.raises(StateError, match=r"torch.fx.symbolic_trace would record"):
                torch.fx.symbolic_trace(nn.Sequential(model))
            with pytest.raises(StateError, match=r"a transform of torch.func .* would record"), torch.no_grad():
                torch.vmap(model)(torch.randn(2, 5, 24))

    @pytest.mark.parametrize("strict", [True, False])
    def test_export(self, strict: bool) -> None:
        model, x = Experts().eval(), torch.randn(5, 24)
        with headrace.offload(model, Rules([("up", "cache")], expert_slots=3)), torch.no_grad():
            with pytest.raises(StateError, match=r"torch\.export would record where weights"):
                torch.export.export(model, (x,), strict=strict)
            assert_same_bits(model(x), model(x))
        torch.export.export(model, (x,), strict=strict)

    def test_compiled_with_gradients(self) -> None:
        model = Experts().eval()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        policy, refused = Rules([("up", "cache")], expert_slots=3), pytest.raises(Exception, match="without gradients")
        with headrace.offload(model, policy), refused:
            compiled(torch.randn(5, 24))

    @pytest.mark.parametrize(
        ("pattern", "why"),
        [
            pytest.param("*.gate_up_proj", "down_proj of the same experts has to be cached, too", id="one of two"),
            pytest.param("q_proj", "expected tensors [experts, ., .] of one module", id="no experts"),
            pytest.param("q_norm", "expected a contiguous tensor [experts, ...]", id="a vector"),
        ],
    )
    def test_other_tensors(self, pattern: str, why: str) -> None:
        with pytest.raises(RuleError) as caught:
            build_plan(take_inventory(qwen()), Rules([(pattern, "cache")], expert_slots=3))
        assert why in str(caught.value)

    def test_slots_and_rules_go_together(self) -> None:
        for rules, slots in ((["experts", "cache"], None), (["experts", "uva"], 3)):
            with pytest.raises(OptionError, match="needs a number of slots"):
                Rules([tuple(rules)], expert_slots=slots)

    def test_another_store(self) -> None:
        policy = Rules([("experts", "cache")], expert_slots=3, mode="meta")
        with pytest.raises(OptionError, match="stored in 'meta'; expected 'cpu'"):
            headrace.offload(qwen(), policy)


class TestLayout:
    def test_the_memories_do_not_overlap(self) -> None:
        """Slots end and host memory begins in different pieces of 2 MiB, of every tensor, with the least rows."""
        for num_slots in range(1, 9):
            for rows in (
                [11_534_336, 5_767_168],
                [8_294_400, 4_147_200, 518_400, 11_520],
                [65_536],
                [70_001, 40_000_003],
                [5_767_168, 2_883_584, 360_448, 45_056],
                [9_043_968, 4_521_984, 565_248, 282_624, 11_776],
            ):
                sizes = {f"w{index}": 8 * row for index, row in enumerate(rows)}
                layer = CachedLayer("experts", 8, num_slots, sizes)
                split = [name for name in sizes if layer.is_split(name)]
                for name in split:
                    assert layer.slots_bytes(name) <= layer.host_start(name) <= layer.first_row * layer.row_bytes(name)
                    assert layer.host_start(name) % PIECE_BYTES == layer.range_bytes(name) % PIECE_BYTES == 0
                # Of these, few rows make whole pieces: then memory that was made before can be mapped there. Of scales
                # many do, and they are copied.
                few = {11_534_336: 4, 5_767_168: 8, 9_043_968: 32}.get(rows[0], 1)
                for name in split[:2] if few > 1 else ():
                    assert layer.host_start(name) == layer.first_row * layer.row_bytes(name)
                fewer = layer.first_row - few
                ends = (fewer * layer.row_bytes(n) // PIECE_BYTES * PIECE_BYTES < layer.slots_bytes(n) for n in split)
                assert fewer < num_slots or any(ends)
                assert layer.host_bytes <= layer.num_bytes + 2 * len(split) * PIECE_BYTES

    def test_overflow_rows_lie_between_the_memories(self) -> None:
        """In memory that layers with as many of them have in common, also where they have other slots."""
        for row, overflow_rows in ((11_534_336, 3), (8_294_400, 2), (70_001, 5), (2_100_000, 1)):
            memories = set()
            for num_slots in range(1, 9 - overflow_rows):
                layer = CachedLayer("experts", 8, num_slots, {"w": 8 * row}, overflow_rows)
                first, end = layer.first_overflow_row * row, (layer.first_overflow_row + overflow_rows) * row
                start = layer.overflow_start("w")
                assert layer.slots_bytes("w") <= start <= first
                assert start % PIECE_BYTES == 0
                assert end <= start + layer.overflow_bytes("w") <= layer.host_start("w")
                memories.add(layer.overflow_memories["w"])
            assert len(memories) == 1

    def test_overflow_rows_take_a_small_part_of_the_cache(self) -> None:
        layer = CachedLayer("experts", 64, 1, {"w13": 64 * 11_534_336, "w2": 64 * 5_767_168, "scale": 64 * 512})
        layers = [replace(layer, module_fqn=str(index)) for index in range(26)]
        for num_slots in (1, 8, 32, 63, 64):
            sized = with_slots(layers, num_slots)
            slots_bytes = sum(each.device_bytes for each in sized)
            assert cache_bytes(sized) <= slots_bytes * 9 / 8
            assert sized[0].overflow_rows == 64 - num_slots or num_slots < 32
            assert (cache_bytes(sized) > slots_bytes) == (num_slots < 64)
        many = CachedLayer("experts", 512, 1, {"w": 512 * 11_534_336})
        assert with_slots([many] * 40, 256)[0].num_rows < 1024

    def test_a_plan_file(self, tmp_path: Path) -> None:
        plan = build_plan(take_inventory(qwen()), cached(3))
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
        assert plan.device_bytes == plan.resident_bytes + plan.cache_bytes
        assert plan.store_bytes["cpu"] == plan.cached_bytes == plan.weight_bytes - plan.resident_bytes


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()
