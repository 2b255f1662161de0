"""Engines' offloaders on a GPU: weights held while the model is built, announced replays, bits."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import engines
from engines import VOCABULARY, EngineModel, Linear, is_lookup
from headrace import UVA, Budget, Prefetch
from headrace.offloaders.layerwise import EngineOffloader, EnginePolicy, EngineTraits

WIDTH, LAYERS = 1024, 8


def unfinished(policy: EnginePolicy, **options: bool) -> tuple[EngineModel, EngineOffloader]:
    with torch.device("cuda"):
        traits = EngineTraits(is_lookup, **options)
        return engines.unfinished(policy, traits=traits, num_layers=LAYERS, width=WIDTH)


def build(policy: EnginePolicy, **options: bool) -> tuple[EngineModel, EngineOffloader]:
    model, offloader = unfinished(policy, **options)
    offloader.post_init()
    return model, offloader


def resident() -> EngineModel:
    with torch.device("cuda"):
        return engines.resident(LAYERS, WIDTH)


def ids(rows: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, 5), generator=torch.Generator().manual_seed(rows)).cuda()


POLICIES = {
    "prefetch": Prefetch(4, 1, 1), "every layer": Prefetch(1, 1, 2), "named": Prefetch(2, 1, 1, ["mlp"]),
    "with a tower": Prefetch(4, 1, 1, ["mlp", "visual"]), "glob": Prefetch(2, 1, 1, ["*.mlp.down_proj.*"]),
    "uva": UVA(2**40), "uva, limited": UVA(30_000_000), "budget": Budget("100MiB"),
}  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@torch.inference_mode()
def test_same_bits_after_weights_were_held(policy: EnginePolicy) -> None:
    plain = resident()
    model, offloader = build(policy)
    for rows in (1, 16, 300, 1):
        assert torch.equal(model(ids(rows)), plain(ids(rows)))
    plan, stats = offloader.plan, offloader.stats()
    assert plan.offloaded_bytes > 0
    assert all(unit.runs == 4 and unit.misses == 0 for unit in stats.units)
    assert stats.store_bytes["host_pinned"] <= 1.01 * plan.offloaded_bytes + 2**20


def test_layers_leave_the_device_while_they_are_built() -> None:
    """Of a model whose layers all leave, the device never holds more than one layer and what is no layer."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        offloader = EngineOffloader(Prefetch(1, 1, 1), lambda: model)
        model = EngineModel(offloader, LAYERS, WIDTH)
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    rest = sum(p.nbytes for p in model.parameters()) - LAYERS * layer
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= rest + 2.2 * layer  # an initial value is made beside the empty tensor
    offloader.post_init()
    after = torch.cuda.memory_allocated() - before
    assert after <= offloader.plan.device_bytes + 2**20


class Repack:
    """Makes weights final on the device, as kernels of quantised weights do."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = layer.get_parameter("weight")
        if weight.shape[0] != weight.shape[1]:  # some stay as they are
            weight.data = (weight.data * 2).t().contiguous().t()


def repack(model: EngineModel) -> None:
    for module in model.modules():
        if isinstance(module, Linear):
            module.quant_method.process_weights_after_loading(module)  # type: ignore[operator,union-attr]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@torch.inference_mode()
def test_repacked_weights_leave_the_device_again(policy: EnginePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer, into memory of exact size; the memory of what they replace is not kept."""
    monkeypatch.setattr(Linear, "quant_method", Repack(), raising=False)
    plain = resident()
    repack(plain)
    gc.collect()
    model, offloader = unfinished(policy)
    built = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    repack(model)
    largest = max(p.nbytes for p in model.model.layers[0].parameters())
    assert torch.cuda.memory_allocated() <= built + 2**20
    assert torch.cuda.max_memory_allocated() <= built + 3 * largest
    offloader.post_init()
    for rows in (1, 16, 300, 1):
        assert torch.equal(model(ids(rows)), plain(ids(rows)))
    plan, stats = offloader.plan, offloader.stats()
    assert plan.offloaded_bytes > 0
    assert all(unit.runs == 4 and unit.misses == 0 and unit.bytes_moved > 0 for unit in stats.units)
    assert stats.store_bytes["host_pinned"] <= 1.01 * plan.offloaded_bytes + 2**20
    assert offloader._pool.num_bytes <= stats.store_bytes["host_pinned"], "of nothing else"


@pytest.mark.parametrize("policy", [Prefetch(4, 1, 1), Prefetch(1, 1, 2), Budget("100MiB")], ids=str)
@pytest.mark.parametrize("announced", [True, False], ids=["announced", "joined"])
@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "late"])
@torch.inference_mode()
def test_replays_as_an_engine_does(policy: EnginePolicy, announced: bool, ahead: bool) -> None:
    """Graphs of two sizes, eager forwards in between, copies started after a replay or only before the next."""
    plain = resident()
    model, offloader = build(policy, announces_replays=announced)
    inputs = {rows: ids(rows) for rows in (1, 16)}
    model(inputs[16])
    graphs, outputs = {}, {}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for rows, given in inputs.items():
            model(given)
            graphs[rows] = torch.cuda.CUDAGraph()
            offloader.sync_prev_onload()
            with torch.cuda.graph(graphs[rows], stream=stream):
                outputs[rows] = model(given)
                offloader.join_after_forward()
    torch.cuda.current_stream().wait_stream(stream)
    for rows in (1, 16, 16, 300, 1, 300, 300, 16, 1, 1):
        if rows in graphs:
            inputs[rows].copy_(given := ids(rows).roll(rows))
            offloader.sync_prev_onload()
            graphs[rows].replay()
            found = outputs[rows].clone()
        else:
            found = model(given := ids(rows))
        if ahead:
            offloader.prepare_next()
        assert torch.equal(found, plain(given)), rows
    stats = offloader.stats()
    assert not offloader.plan.units or sum(unit.captured_copies for unit in stats.units) > 0
    assert all(unit.misses == 0 for unit in stats.units)


def test_what_is_replaced_takes_its_memory_with_it() -> None:
    model, offloader = unfinished(Prefetch(1, 1, 1))
    held = offloader._pool.num_bytes
    plain = resident()
    for layer, original in zip(model.model.layers, plain.model.layers, strict=True):
        for mine, theirs in zip(layer.modules(), original.modules(), strict=True):
            if isinstance(mine, Linear):
                mine.weight = nn.Parameter(theirs.weight.clone(), requires_grad=False)
    assert offloader._pool.num_bytes < held / 10
    model.model.embed_tokens.load_state_dict(plain.model.embed_tokens.state_dict())
    for mine, theirs in ((model.visual, plain.visual), (model.lm_head, plain.lm_head)):
        mine.load_state_dict(theirs.state_dict())
    offloader.post_init()
    with torch.inference_mode():
        assert torch.equal(model(ids(3)), plain(ids(3)))
    assert offloader.stats().store_bytes["host_pinned"] <= 1.01 * offloader.plan.offloaded_bytes + 2**20


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@torch.inference_mode()
def test_no_step_makes_the_host_wait(policy: EnginePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """What VLLM_GPU_SYNC_CHECK=error raises for: synchronising calls, and copies that stage through pageable memory."""
    plain = resident()
    model, offloader = build(policy)
    given = [ids(rows) for rows in (1, 300, 1)]
    model(given[0])  # kernels are loaded
    outputs, sources = [], []
    copy = torch.Tensor.copy_

    def checked(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        sources.append((non_blocking, source.is_cuda or (source.is_pinned() and source.is_contiguous())))
        return copy(self, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", checked)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for each in given:
            outputs.append(model(each))
            offloader.prepare_next()
    finally:
        torch.cuda.set_sync_debug_mode(before)
        monkeypatch.undo()
    assert all(torch.equal(output, plain(each)) for output, each in zip(outputs, given, strict=True))
    assert sources or not offloader.plan.units
    assert all(non_blocking and is_pinned for non_blocking, is_pinned in sources)
