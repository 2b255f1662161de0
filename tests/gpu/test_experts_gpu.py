"""Cached experts on a GPU: one range over two memories, kernels in captured graphs, and memory that is given back."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

import headrace
from headrace import Budget, Rules
from headrace.experts.rows import CachedExperts
from headrace.memory.split_range import MappedMemory, SplitRange
from headrace.model.inventory import take_inventory
from headrace.offloaders.layerwise import EngineOffloader, EngineTraits
from headrace.plan.build import build_plan
from headrace.plan.cached_experts import PIECE_BYTES
from headrace.testing import assert_same_bits

CUDA = torch.device("cuda", 0)


def test_a_range_over_two_memories() -> None:
    """What the host writes the device reads behind its own memory, and the other way round."""
    whole = SplitRange(2 * PIECE_BYTES, 3 * PIECE_BYTES, 8 * PIECE_BYTES, CUDA)
    assert whole.whole.numel() == 8 * PIECE_BYTES
    assert whole.host.is_cpu
    whole.host.copy_(torch.arange(whole.host.numel()) % 251)
    on_device = whole.whole[3 * PIECE_BYTES :]
    assert torch.equal(on_device.cpu(), whole.host)
    whole.whole[: 2 * PIECE_BYTES].copy_(on_device[: 2 * PIECE_BYTES])
    assert torch.equal(whole.whole[: 2 * PIECE_BYTES].cpu(), whole.host[: 2 * PIECE_BYTES])
    on_device.fill_(7)
    torch.cuda.synchronize()
    assert bool((whole.host == 7).all())


@pytest.mark.alone
def test_memory_is_given_back() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info(CUDA)[0]
    whole = SplitRange(32 * PIECE_BYTES, 32 * PIECE_BYTES, 64 * PIECE_BYTES, CUDA)
    assert before - torch.cuda.mem_get_info(CUDA)[0] >= 32 * PIECE_BYTES
    view = whole.host[:1]
    del whole
    gc.collect()
    view.fill_(1)  # a view keeps both memories
    del view
    gc.collect()
    assert before - torch.cuda.mem_get_info(CUDA)[0] < 4 * PIECE_BYTES


@pytest.mark.alone
def test_memory_that_ends_in_a_capture_is_given_back_after_it() -> None:
    """To wait for the device would make the capture invalid."""
    x = torch.zeros(8, device=CUDA)
    (x + 1).sum().item()  # CUDA loads kernels at their first use
    torch.cuda.empty_cache()  # as a capture does when it begins
    before = torch.cuda.mem_get_info(CUDA)[0]
    whole = SplitRange(32 * PIECE_BYTES, 32 * PIECE_BYTES, 64 * PIECE_BYTES, CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        del whole
        gc.collect()
    graph.replay()
    assert y.sum().item() == 8
    assert before - torch.cuda.mem_get_info(CUDA)[0] >= 32 * PIECE_BYTES
    SplitRange(PIECE_BYTES, PIECE_BYTES, 2 * PIECE_BYTES, CUDA)
    assert before - torch.cuda.mem_get_info(CUDA)[0] < 16 * PIECE_BYTES  # what the graph keeps


def test_host_memory_that_is_there_is_mapped_again() -> None:
    made = MappedMemory(4 * PIECE_BYTES, CUDA)
    made.on_device.copy_((torch.arange(4 * PIECE_BYTES) % 251).to(CUDA))
    torch.cuda.synchronize()
    whole = SplitRange(PIECE_BYTES, 2 * PIECE_BYTES, 6 * PIECE_BYTES, CUDA, host=made)
    made.buffer[:3] = 9  # one memory, two addresses
    expected = made.buffer.clone()
    del made
    gc.collect()
    assert torch.equal(whole.whole[2 * PIECE_BYTES :].cpu(), expected)
    assert torch.equal(whole.host, expected)


class Experts(nn.Module):
    """Its ids are given, so that a test drives them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(16, 512, 384, dtype=torch.bfloat16), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(16, 3, dtype=torch.bfloat16), requires_grad=False)  # rows of 6 bytes

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        experts, rows = headrace.expert_rows(self, ids)
        weighed = experts.up[rows] * experts.scale[rows].sum(-1)[..., None, None]
        return torch.einsum("bkoi,bi->bko", weighed, x)


@torch.no_grad()
def test_another_budget_or_prompt_compiles_no_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With overflow rows and without: two, whatever the slots and the tokens. Processes keep them for each other."""
    knobs, names = pytest.importorskip("triton.knobs"), list[str]()
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, metadata, **_: names.append(metadata["name"]))
    model = Experts().to(CUDA).eval()
    for num_slots in (5, 6, 8):
        with headrace.offload(model, Rules([("up", "cache"), ("scale", "cache")], expert_slots=num_slots)):
            for shape in ((1, 1), (1, 2), (3, 3), (8, 2)):
                ids = torch.randint(0, 16, shape, device=CUDA)
                model(torch.randn(shape[0], 384, device=CUDA, dtype=torch.bfloat16), ids)
    assert names.count("admit_kernel") <= 2, names


@pytest.mark.parametrize("num_slots", [1, 5, 16])
@torch.no_grad()
def test_bits_in_replays_and_between(num_slots: int) -> None:
    """Eager steps and replays of a graph share one cache, whatever each of them leaves in it."""
    model = Experts().to(CUDA).eval()
    steps = [torch.randint(0, 16, (2, 3), generator=torch.Generator().manual_seed(seed)) for seed in range(40)]
    x = torch.randn(2, 384, device=CUDA, dtype=torch.bfloat16)
    expected = [model(x, ids.to(CUDA)) for ids in steps]
    with headrace.offload(model, Rules([("up", "cache"), ("scale", "cache")], expert_slots=num_slots)) as handle:
        chosen = steps[0].to(CUDA)
        model(x, chosen)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x, chosen)
        begin = handle.stats().experts[0]
        found = []
        for number, ids in enumerate(steps):
            if number % 3 == 1:
                found.append(model(x, ids.to(CUDA)))
            else:
                chosen.copy_(ids)
                graph.replay()
                found.append(captured.clone())
        assert_same_bits(found, expected)
        end = handle.stats().experts[0]
        assert end.steps - begin.steps == len(steps)
        used = sum(len(ids.unique()) for ids in steps)
        assert sum(getattr(end, n) - getattr(begin, n) for n in ("hits", "fetched", "in_place")) == used
        assert end.fetched > begin.fetched
        assert (end.evicted > 0) == (num_slots < 16)
        del graph
    assert_same_bits([model(x, steps[0].to(CUDA))], expected[:1])


@torch.no_grad()
def test_the_first_forward_may_run_on_another_stream() -> None:
    """It may come before what made the cache has ended."""
    model = Experts().to(CUDA).eval()
    ids, x = torch.tensor([[1, 5, 9], [2, 5, 9]], device=CUDA), torch.randn(2, 384, device=CUDA, dtype=torch.bfloat16)
    expected = model(x, ids)
    policy, side = Rules([("up", "cache"), ("scale", "cache")], expert_slots=5), torch.cuda.Stream(CUDA)
    torch.cuda.synchronize()
    for _ in range(2):
        with headrace.offload(model, policy) as handle:
            with torch.cuda.stream(side):
                found = [model(x, ids)]
                first = handle.stats().experts[0]
                found += [model(x, ids) for _ in range(3)]
            side.synchronize()
            assert_same_bits(found, [expected] * 4)
            assert first.hits == 0
            assert first.fetched > 0


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(8))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, ids).float().mean(1)[:, :384].to(x.dtype) / 256
        return x


@pytest.mark.alone
@torch.no_grad()
def test_prompts_have_memory_in_common() -> None:
    """In eager mode, in graphs of one stream and of two, and on two streams at once, with small steps between."""
    model = Layers().to(CUDA).eval()
    torch.manual_seed(1)
    prompts, steps = (
        [(torch.randn(n, 384, device=CUDA).bfloat16(), torch.randint(0, 16, (n, 2), device=CUDA)) for _ in range(4)]
        for n in (300, 2)
    )
    expected = [model(*each) for each in (*prompts, *steps)]
    of_layers = [[layer(*each) for layer in (*model.layers[::2], *model.layers[1::2])] for each in prompts]
    before = torch.cuda.mem_get_info(CUDA)[0]
    plan = build_plan(take_inventory(model), Rules([("up", "cache"), ("scale", "cache")], expert_slots=8))
    plan = replace(plan, cached=tuple(replace(layer, overflow_rows=8) for layer in plan.cached))
    with headrace.offload(model, plan) as handle:
        torch.cuda.empty_cache()
        freed = torch.cuda.mem_get_info(CUDA)[0] - before
        assert freed > handle.plan.weight_bytes - handle.plan.device_bytes - (32 << 20)
        assert_same_bits([model(*each) for each in (*prompts, *steps)], expected)
        x, ids = prompts[0][0].clone(), prompts[0][1].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x, ids)
        found = []
        for prompt, step in zip(prompts, steps, strict=True):
            x.copy_(prompt[0])
            ids.copy_(prompt[1])
            graph.replay()
            found += [captured.clone(), model(*step)]
        assert_same_bits(found, [each for pair in zip(expected[:4], expected[4:], strict=True) for each in pair])
        del graph
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(CUDA)
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                forked = [layer(x, ids) for layer in model.layers[::2]]
            forked += [layer(x, ids) for layer in model.layers[1::2]]
            main.wait_stream(side)
        for prompt, wanted in zip(prompts, of_layers, strict=True):
            x.copy_(prompt[0])
            ids.copy_(prompt[1])
            graph.replay()
            assert_same_bits(forked, wanted)
        del graph, forked
        streams = [torch.cuda.Stream(CUDA) for _ in range(2)]
        torch.cuda.synchronize()
        found = []
        for number in range(12):
            with torch.cuda.stream(streams[number % 2]):
                found.append(model(*prompts[number % 4]))
        torch.cuda.synchronize()
        assert_same_bits(found, expected[:4] * 3)
        assert sum(layer.in_place for layer in handle.stats().experts) > 8 * 20


@torch.no_grad()
def test_compiled_code_on_two_streams() -> None:
    """Each forward replaces experts in slots that the other, on its own stream, still reads."""
    model = Layers().to(CUDA).eval()
    streams = [torch.cuda.Stream(CUDA) for _ in range(2)]
    steps = []
    for _ in range(12):
        chosen = torch.randperm(16, device=CUDA)[:3]  # all of one step fit in the slots
        ids = chosen[torch.randint(0, 3, (256, 2), device=CUDA)]
        steps.append((torch.randn(256, 384, device=CUDA).bfloat16(), ids))
    expected = [model(*each) for each in steps]
    with headrace.offload(model, Rules([("up", "cache"), ("scale", "cache")], expert_slots=3)) as handle:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        compiled(*steps[0])
        torch.cuda.synchronize()
        found = []
        for number, each in enumerate(steps):
            with torch.cuda.stream(streams[number % 2]):
                found.append(compiled(*each))
        torch.cuda.synchronize()
        assert_same_bits(found, expected)
        assert all(layer.evicted > 12 for layer in handle.stats().experts)
    torch._dynamo.reset()


@torch.no_grad()
def test_no_step_waits_for_the_device() -> None:
    model = Experts().to(CUDA).eval()
    with headrace.offload(model, Rules([("up", "cache"), ("scale", "cache")], expert_slots=4)):
        x, ids = torch.randn(2, 384, device=CUDA, dtype=torch.bfloat16), torch.tensor([[1, 2], [3, 9]], device=CUDA)
        model(x, ids)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x, ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Routed(nn.Module):
    """A layer of an engine: its router, and experts that are read by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(384, 16, dtype=torch.bfloat16)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts(x, self.gate(x).topk(3).indices)
        return x + y.float().mean(1)[:, :384].to(x.dtype)


class ByRows(CachedExperts):
    @staticmethod
    def find(model: nn.Module) -> dict[str, str | None]:
        return {name: None for name, module in model.named_modules() if isinstance(module, Experts)}


@torch.no_grad()
def test_experts_of_an_engine_are_in_host_memory_once() -> None:
    """They are built in the memory that the cache maps behind its slots."""
    layers = 4
    with torch.device(CUDA):
        torch.manual_seed(3)
        resident = nn.Sequential(*(Routed() for _ in range(layers))).eval()
    policy = Budget("16MiB", rules=[("experts", "cache")], expert_slots=4)
    with torch.device(CUDA):
        torch.manual_seed(3)
        offloader = EngineOffloader(policy, lambda: model, EngineTraits(expert_kernels=ByRows))
        model = nn.Sequential(*offloader.wrap_modules(Routed() for _ in range(layers))).eval()
    found = [offloader._pool.find(layer.experts.up.data) for layer in model]
    places = {held.memory for held in found if held is not None}
    assert len(places) == layers
    assert all(isinstance(memory, MappedMemory) for memory in places)
    del found, places
    offloader.post_init()
    session = offloader._session
    assert session is not None
    assert session._ranges is not None
    copied = [*session._ranges.destinations]
    assert len(copied) == layers
    assert all(name.endswith(".scale") for name in copied)
    gc.collect()
    assert offloader._pool.num_bytes == 0
    for seed in range(8):
        x = torch.randn(2, 384, generator=torch.Generator().manual_seed(seed)).to(CUDA, torch.bfloat16)
        assert torch.equal(model(x), resident(x))
    assert all(layer.fetched > 0 for layer in offloader.stats().experts)
    state = resident.state_dict()
    assert all(torch.equal(tensor.to(CUDA), state[name]) for name, tensor in model.state_dict().items())
    offloader.remove()
