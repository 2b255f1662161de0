"""Experts in objects of triton_kernels: their bytes are a parameter's, and tiles find the rows of a cache."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.quantizers.base import HfQuantizer

import headrace
import packed_kernels
from checks import entering, raising
from headrace import Rules
from headrace.adapters.transformers import load
from headrace.errors import CheckpointError, OptionError, RaceError
from headrace.experts.packed import at_rows, hold_packed, route_by_rows
from quantised_checkpoints import FORMATS, IDS, OSS, logits, resident

pytestmark = pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")

NUM_EXPERTS = 6


class Rows:
    """Every expert has a row, in no order."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = torch.tensor(rows, dtype=torch.int32)
        self.asked: list[int] = []

    def admit(self, ids: torch.Tensor) -> torch.Tensor:
        is_expert = (ids >= 0) & (ids < NUM_EXPERTS)
        self.asked += ids[is_expert].tolist()
        return torch.where(is_expert, self.rows[torch.where(is_expert, ids, 0).long()], ids + 1000)


def tokens_of(data: Any, height: int) -> list[tuple[int, int, int]]:
    """Expert or row, count and first token of each tile, in their order, as a kernel finds them."""
    tiles = [tile for tile in data.block_pid_map[height].tolist() if tile != -1]
    return [(tile & 0xFFFF, int(data.hist[tile & 0xFFFF]), int(data.token_offs_raw[tile & 0xFFFF])) for tile in tiles]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(-1, NUM_EXPERTS - 1), min_size=2, max_size=2), min_size=1, max_size=9),
    rows=st.permutations(range(2 * NUM_EXPERTS)),
    heights=st.sampled_from([(16,), (2, 4), (1, 2, 8)]),
)
def test_tiles_keep_their_order_and_tokens(ids: list[list[int]], rows: list[int], heights: tuple[int, ...]) -> None:
    chosen = torch.tensor(ids)
    routing, *_ = packed_kernels.route(chosen, torch.ones(chosen.shape), NUM_EXPERTS, heights)
    before = copy.deepcopy(routing)
    cache = Rows(rows[:NUM_EXPERTS])
    routed, asked, found = route_by_rows(routing, cache, 2 * NUM_EXPERTS)  # type: ignore[arg-type]
    assert set(cache.asked) == {each for each in chosen.flatten().tolist() if each >= 0}
    assert asked.shape == found.shape
    for height in heights:
        expected = [(rows[expert], *others) for expert, *others in tokens_of(before.expt_data, height)]
        assert tokens_of(routed.expt_data, height) == expected
        places = before.expt_data.block_pid_map[height] >> 16
        assert torch.equal(routed.expt_data.block_pid_map[height] >> 16, places)
        # The same alignment is the same kernel of Triton's.
        assert routed.expt_data.block_pid_map[height].data_ptr() % 16 == 0
    assert routed.expt_data.token_offs_raw.data_ptr() % 16 == 0
    assert (routed.n_expts_tot, routed.n_expts_act) == (NUM_EXPERTS, 2)
    for height in heights:  # what came in is as it was
        assert torch.equal(routing.expt_data.block_pid_map[height], before.expt_data.block_pid_map[height])
    assert routing.expt_data.hist.tolist() == before.expt_data.hist.tolist()


def test_a_prompt_has_more_tiles_than_one_program_takes() -> None:
    ids = torch.randint(0, NUM_EXPERTS, (1200, 2))
    routing, *_ = packed_kernels.route(ids, torch.ones(ids.shape), NUM_EXPERTS)
    expected = [(11 - expert, *others) for expert, *others in tokens_of(routing.expt_data, 2)]
    routed, *_ = route_by_rows(routing, Rows([11 - expert for expert in range(NUM_EXPERTS)]), 12)  # type: ignore[arg-type]
    assert len(expected) > 1024
    assert tokens_of(routed.expt_data, 2) == expected


def test_tiles_are_listed_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which a caller with a model on another GPU need not have set."""
    routing, *_ = packed_kernels.route(torch.tensor([[0, 1]]), torch.ones(1, 2), NUM_EXPERTS)
    current: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "device_of", entering(current))
    kernel = defaultdict(lambda: lambda tiles, *_, **__: launched.append(tiles is current[-1]))  # type: ignore[misc]
    launched: list[bool] = []
    monkeypatch.setattr("headrace.experts.packed.tiles_of_rows_kernel", kernel)
    route_by_rows(routing, Rows([*range(NUM_EXPERTS)]), NUM_EXPERTS)  # type: ignore[arg-type]
    assert launched == [True]


def packed(values: torch.Tensor) -> tuple[packed_kernels.Tensor, packed_kernels.PrecisionConfig]:
    return packed_kernels.swizzled(values), packed_kernels.PrecisionConfig(packed_kernels.swizzled(values[..., :2]))


def test_objects_follow_their_parameters() -> None:
    module, values = nn.Module(), torch.randn(NUM_EXPERTS, 8, 4)
    weight, config = packed(values)
    for _ in range(2):  # the second time it is as it was
        names = hold_packed(module, "up", weight, config, NUM_EXPERTS)
        assert names == {"up_bytes": "up", "up_scale_bytes": "up_scale"}
    assert sorted(names) == sorted(name for name, _ in module.named_parameters())
    assert module.up_bytes.is_contiguous()
    assert torch.equal(weight.storage.unswizzled(), values.mT)
    module.up_bytes.data = module.up_bytes.data * 2
    assert torch.equal(weight.storage.unswizzled(), values.mT * 2)
    assert weight.storage.layout == "mirrored"
    weight.storage.data = weight.storage.data.view(torch.float32)  # as matmul_ogs does
    tensors = {name: torch.cat([parameter.data] * 2) for name, parameter in module.named_parameters()}
    made, other = at_rows(weight, config, tensors)
    assert made.shape == made.shape_max == [2 * NUM_EXPERTS, 4, 8]
    assert torch.equal(made.storage.unswizzled()[NUM_EXPERTS:], values.mT * 2)
    assert torch.equal(other.weight_scale.storage.unswizzled()[NUM_EXPERTS:], values[..., :2].mT)
    assert weight.shape == [NUM_EXPERTS, 4, 8]
    assert len(config.weight_scale.storage.data) == NUM_EXPERTS


def test_memory_is_free_without_a_collection_of_garbage() -> None:
    """Layers are made one by one while a model is loaded, on a GPU that has no room for all."""
    module: Any = nn.Module()
    module.weight, module.config = packed(torch.randn(NUM_EXPERTS, 8, 4))
    hold_packed(module, "up", module.weight, module.config, NUM_EXPERTS)
    gone = weakref.ref(module.up_bytes)
    gc.disable()
    try:
        del module
        assert gone() is None
    finally:
        gc.enable()


def test_a_copy_of_the_module_has_objects_of_its_own() -> None:
    module: Any = nn.Module()
    module.weight, module.config = packed(torch.randn(NUM_EXPERTS, 8, 4))
    hold_packed(module, "up", module.weight, module.config, NUM_EXPERTS)
    twin = copy.deepcopy(module)
    twin.up_bytes.data.zero_()
    assert not twin.weight.storage.data.any()
    assert module.weight.storage.data.all()


@pytest.mark.parametrize("data", [
    torch.zeros(1, NUM_EXPERTS, 4, 2, 8), torch.zeros(1, NUM_EXPERTS * 4, 8).mT, torch.zeros(8, 4, NUM_EXPERTS).mT.mT,
    torch.zeros(NUM_EXPERTS, 8, 4)[..., :2].mT,
], ids=["Blackwell's scales", "no experts", "experts last", "gaps"])  # fmt: skip
def test_a_layout_that_mixes_experts_is_not_held(data: torch.Tensor) -> None:
    module = nn.Module()
    weight, config = packed(torch.randn(NUM_EXPERTS, 8, 4))
    config.weight_scale.storage.data = data
    assert hold_packed(module, "up", weight, config, NUM_EXPERTS) == {}
    assert not list(module.parameters())


class TestTransformers:
    """MXFP4 as transformers runs it; its kernels are stood in for."""

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        if not hasattr(HfQuantizer, "get_new_dtype"):
            pytest.skip("quantised folders need transformers 5.23, and are refused before")
        packed_kernels.use_in_transformers(monkeypatch)
        sizes = OSS | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
        return replace(FORMATS["MXFP4, experts"], sizes=sizes).write(tmp_path)

    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["cache", "prefetch", "uva"])
    def test_experts_move_and_give_the_same_bits(
        self, folder: Path, how: headrace.config.Mechanism, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HEADRACE_DEBUG", "1")
        plain = resident(folder)
        assert type(plain.get_submodule("model.layers.1.mlp.experts")).__name__ == "Mxfp4GptOssExperts"
        expected = logits(plain)
        model, handle = load(folder, Rules([("experts", how)], expert_slots=2 if how == "cache" else None))
        for _ in range(2):
            assert torch.equal(logits(model), expected)
        stats = handle.stats()
        assert len(stats.experts) == (2 if how == "cache" else 0)
        assert all(layer.fetched > 0 and layer.steps == 2 for layer in stats.experts)
        assert stats.bytes_moved > 0 or handle.plan.uva_bytes > 0
        handle.remove()
        assert torch.equal(logits(model), expected)

    @pytest.mark.slow
    def test_generate(self, folder: Path) -> None:
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
        expected = resident(folder).generate(IDS, **options)
        model, handle = load(folder, Rules([("experts", "cache")], expert_slots=3))
        assert torch.equal(model.generate(IDS, **options), expected)
        assert all(layer.hits > 0 and layer.fetched > 0 for layer in handle.stats().experts)

    @pytest.mark.slow
    @pytest.mark.parametrize("fault", ["values", "scale"])
    def test_what_a_kernel_has_read_is_compared_with_the_store(
        self, folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HEADRACE_DEBUG", "1")
        model, handle = load(folder, Rules([("experts", "cache")], expert_slots=3))
        logits(model)
        assert all(layer.fetched > 0 for layer in handle.stats().experts)
        run = packed_kernels.hub.matmul_ogs.matmul_ogs

        def faulty(x: torch.Tensor, w: Any, *others: Any, precision_config: Any, **kinds: Any) -> torch.Tensor:
            found: torch.Tensor = run(x, w, *others, precision_config=precision_config, **kinds)
            (w if fault == "values" else precision_config.weight_scale).storage.data[:3] = 0
            return found

        monkeypatch.setattr(packed_kernels.hub.matmul_ogs, "matmul_ogs", faulty)
        logits(model)
        with pytest.raises(RaceError, match="differ from the store"):
            handle.stats()

    @pytest.mark.slow
    def test_compiled_code_calls_it_between_graphs(self, folder: Path) -> None:
        expected = logits(resident(folder))
        model, handle = load(folder, Rules([("experts", "cache")], expert_slots=2))
        compiled: Any = torch.compile(model, backend="eager")
        with torch.no_grad():
            assert torch.equal(compiled(input_ids=IDS).logits, expected)
        assert all(layer.fetched > 0 for layer in handle.stats().experts)
        torch._dynamo.reset()

    def test_a_live_model_is_refused(self, folder: Path) -> None:
        with pytest.raises(OptionError, match=r"objects of triton_kernels, .*load it with headrace's load\(\)"):
            headrace.offload(resident(folder), Rules([("experts", "cache")], expert_slots=2))

    def test_a_layout_that_mixes_experts_is_refused(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def mixed(tensor: Any, *_: Any, **__: Any) -> Any:
            tensor.storage.data = tensor.storage.data.reshape(1, -1, 8)
            return tensor

        monkeypatch.setattr(packed_kernels.hub.tensor, "convert_layout", mixed)
        with pytest.raises(CheckpointError, match=r"kernels for this GPU mix the bytes of experts"):
            load(folder, Rules([("experts", "cache")], expert_slots=2))

    def test_a_converter_that_fails_says_why(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        missing = RuntimeError("no kernel of this name")
        monkeypatch.setattr(packed_kernels.hub.tensor, "convert_layout", raising(missing))
        with pytest.raises(CheckpointError, match=r"mxfp4 for cpu: no kernel of this name"):
            load(folder, Rules([("experts", "cache")], expert_slots=2))
