"""Weights used outside their module on a GPU, in eager mode and beside captured graphs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from gpu_models import offloaded
from torch import nn

import headrace
from headrace.errors import ModelChangedError, OutsideAccessError, StateError

pytestmark = pytest.mark.usefixtures("no_grad")

DIM = 512
EVERYTHING = headrace.Rules([("ALL_MODEL_PARAMS", "prefetch")])
promoted = pytest.mark.filterwarnings("ignore:.*It is resident from now on:headrace.HeadraceWarning")


class Odd(nn.Module):
    """Reads the weight of a layer it also calls, and gets rows of a table from the table itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(6))
        self.reads = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table(3)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.reads:
            x = x + F.linear(x, self.layers[2].weight)
        return x + rows.sum(0)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, count: int) -> torch.Tensor:
        return self.weight[:count].expand(count, DIM)


@pytest.fixture
def pair() -> tuple[Odd, Odd]:
    """A resident model and its twin."""
    torch.manual_seed(0)
    model = Odd().cuda().eval()
    return copy.deepcopy(model), model


def inputs() -> torch.Tensor:
    return torch.randn(4, DIM, device="cuda")


@promoted
def test_reads_and_returned_views(pair: tuple[Odd, Odd]) -> None:
    resident, model = pair
    with offloaded(model, EVERYTHING) as handle:
        for _ in range(4):
            x = inputs()
            assert torch.equal(model(x), resident(x))
        assert handle.stats().bytes_moved > 0
        assert handle.plan.mechanism_of("layers.2.weight") == "resident"
        assert handle.plan.mechanism_of("table.weight") == "resident"
        for name, tensor in resident.state_dict().items():
            assert torch.equal(model.state_dict()[name].cuda(), tensor)
    assert torch.equal(model(x), resident(x))


@promoted
def test_writes(pair: tuple[Odd, Odd]) -> None:
    resident, model = pair
    with offloaded(model, EVERYTHING):
        for twin in (resident, model):
            twin.layers[4].weight.data += 0.5
        x = inputs()
        for _ in range(2):
            assert torch.equal(model(x), resident(x))
        hook = model.layers[3].register_forward_pre_hook(lambda layer, _: layer.weight.data.mul_(2))
        with pytest.raises(ModelChangedError, match=r"layers\.3\.weight was written in place by aten\.mul_"):
            model(x)
        hook.remove()
        assert torch.equal(model(x), resident(x))


def test_tensors_of_a_state_dict(pair: tuple[Odd, Odd]) -> None:
    """They view the store, pinned as it is, and are guarded; what moves one of them leaves the store where it is."""
    resident, model = pair
    resident.reads = model.reads = False
    x = inputs()
    with offloaded(model, headrace.Rules([("table", "resident"), ("layers", "prefetch")])) as handle:
        assert torch.equal(model(x), resident(x))
        value = model.state_dict()["layers.2.weight"]
        assert value.is_pinned()
        assert torch.equal(value.to("cuda", non_blocking=True), resident.layers[2].weight)
        with pytest.raises(ModelChangedError, match=r"layers\.2\.weight was written in place by aten\.mul_"):
            value.mul_(2)
        value.share_memory_()
        for _ in range(2):
            assert torch.equal(model(x), resident(x))
        assert handle.stats().bytes_moved > 0
    assert torch.equal(model(x), resident(x))


def test_a_kept_view_is_refused(pair: tuple[Odd, Odd]) -> None:
    resident, model = pair
    kept = []
    with offloaded(model, headrace.Rules([("table", "resident"), ("layers", "prefetch")])):
        hook = model.layers[3].register_forward_pre_hook(lambda layer, _: kept.append(layer.weight.t()))
        with pytest.raises(OutsideAccessError, match=r"a view of layers\.3\.weight was kept"):
            model(inputs())
        hook.remove()
        kept.clear()
        model.reads = resident.reads = False
        x = inputs()
        assert torch.equal(model(x), resident(x))


@promoted
def test_a_raw_pointer_is_refused(pair: tuple[Odd, Odd]) -> None:
    _, model = pair
    with (
        offloaded(model, EVERYTHING),
        pytest.raises(OutsideAccessError, match=r"data_ptr\(\) of layers.0.weight was called"),
    ):
        model.layers[0].weight.data_ptr()


@promoted
def test_captured_graphs(pair: tuple[Odd, Odd]) -> None:
    resident, model = pair
    x = inputs()
    handle = headrace.offload(model, EVERYTHING)
    with pytest.raises(OutsideAccessError, match="nothing can be loaded while a graph is captured"):
        _capture(model, x)
    for _ in range(2):
        assert torch.equal(model(x), resident(x))  # promotes
    graph, captured = _capture(model, x)
    for _ in range(3):
        x.copy_(inputs())
        graph.replay()
        assert torch.equal(captured, resident(x))
        assert torch.equal(model(x), resident(x))
    with pytest.raises(StateError, match="graphs_released=True"):
        handle.remove()
    graph.replay()
    assert torch.equal(captured, resident(x))
    del graph
    handle.remove(graphs_released=True)
    assert torch.equal(model(x), resident(x))


@promoted
def test_a_write_between_replays(pair: tuple[Odd, Odd]) -> None:
    resident, model = pair
    resident.reads = model.reads = False
    x = inputs()
    handle = headrace.offload(model, EVERYTHING)
    for _ in range(2):
        assert torch.equal(model(x), resident(x))
    graph, captured = _capture(model, x)
    for index in range(6):
        for twin in (resident, model):
            twin.layers[index].weight.data += 0.5
        graph.replay()
        assert torch.equal(captured, resident(x))
    assert handle.stats().bytes_moved > 0
    del graph
    handle.remove(graphs_released=True)
    assert torch.equal(model(x), resident(x))


def _capture(model: nn.Module, x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(x)
    return graph, output
