"""The promise: what a compiler traces uses a slot between wait and release, or the trace ends in an error."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headrace
from checks import require_forwards
from headrace.errors import ModelChangedError, StateError
from headrace.testing import assert_moved, assert_same_bits, boundaries
from models import DIM, Stack, all_layers, expecting, rows
from outside_models import EVERYTHING, Around, Reads

OUTSIDE = r"outside of the forward that it is on the device for, in code that torch\.compile traces.*resident"


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()


def compiled(model: nn.Module, backend: str) -> nn.Module:
    return torch.compile(model, backend=backend, fullgraph=True)  # type: ignore[return-value]


def test_a_model_that_keeps_to_itself_compiles() -> None:
    model, x = Stack(4).eval(), rows()
    with boundaries(model, all_layers(2)):
        expected = compiled(model, "eager")(x)
    torch.compiler.reset()
    with headrace.offload(model, all_layers(2)) as handle:
        step = compiled(model, "eager")
        for forwards in (1, 2, 3):
            assert_same_bits(step(x), expected)
            assert_moved(handle, forwards)
        assert_same_bits(model(x), expected)
        assert handle.stats().notes == ()


def test_after_eager_forwards_and_before() -> None:
    model, x, expected = expecting(Stack(4))
    with headrace.offload(model, all_layers(1)) as handle:
        step = compiled(model, "eager")
        for run in (model, step, model, step):
            assert_same_bits(run(x), expected)
        assert_moved(handle, 4)


def test_an_eager_forward_that_writes_a_weight_after_compiled_ones_is_an_error_at_once() -> None:
    """Tensors that compiled code uses look into their slots all the time, and are not guarded."""

    def write_weight(layer: nn.Module, *_: object) -> None:
        layer.linear.weight.add_(1)  # type: ignore[union-attr, operator]

    model, x, expected = expecting(Stack(4))
    with headrace.offload(model, all_layers(1)):
        assert_same_bits(compiled(model, "eager")(x), expected)
        writes = model.layers[2].register_forward_pre_hook(write_weight)
        with pytest.raises(ModelChangedError, match=r"layers\.2\.linear\.weight was written in place while offloaded"):
            model(x)
        writes.remove()
        assert_same_bits(model(x), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_parent_that_reads_a_childs_weight(backend: str) -> None:
    model = Reads().eval()
    with headrace.offload(model, EVERYTHING), pytest.raises(RuntimeError, match=rf"lin\.weight is used by .*{OUTSIDE}"):
        compiled(model, backend)(rows())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_model_reads_a_table_behind_its_last_unit(backend: str) -> None:
    """An output layer that is tied by hand: the slot of the table has another unit by then."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.stack = nn.Embedding(40, DIM), Stack(3)
            self.stack.head = nn.Identity()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return F.linear(self.stack(self.embed(tokens)), self.embed.weight)

    model, tokens, expected = expecting(Tied(), torch.arange(3))
    rules = headrace.Rules([("embed", "prefetch"), ("linear", "prefetch")])
    with headrace.offload(model, rules) as handle:
        with pytest.raises(RuntimeError, match=rf"embed\.weight is used by .*{OUTSIDE}"):
            compiled(model, backend)(tokens)
        assert "embed.weight" not in handle.plan.resident
    assert_same_bits(model(tokens), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_returned_view(backend: str) -> None:
    model = Around(lambda w: w[:3], lambda g: g.sum(0)).eval()
    with headrace.offload(model, EVERYTHING), pytest.raises(RuntimeError, match=rf"table\.weight is .*{OUTSIDE}"):
        compiled(model, backend)(rows())


@pytest.mark.filterwarnings("ignore:.*It is resident from now on:headrace.HeadraceWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_child_that_is_never_called(backend: str) -> None:
    """It has no window in the graph, so its weight still rests when the compiled code reads it."""
    model, x, expected = expecting(Reads(calls=False))
    with headrace.offload(model, EVERYTHING):
        step = compiled(model, backend)
        try:
            outputs = [step(x), step(x)]
        except RuntimeError as error:
            assert "lin.weight is used by" in str(error) or "Cannot access data pointer" in str(error)  # noqa: PT017
        else:
            for output in outputs:
                assert torch.allclose(output, expected) if backend == "inductor" else torch.equal(output, expected)


@torch.library.custom_op("contracts::count", mutates_args=("seen",))
def _count(seen: torch.Tensor) -> None:
    seen.add_(1)


class Counts(nn.Module):
    def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.lin, self.write = nn.Linear(DIM, DIM), write
        self.register_buffer("seen", torch.zeros(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self.seen)
        return self.lin(x) + (self.seen & self.seen if self.seen.dtype == torch.bool else self.seen)


@pytest.mark.parametrize("write", [
    lambda seen: seen.add_(1), lambda seen: seen.data.mul_(2), lambda seen: seen[:4].detach().zero_(),
    lambda seen: seen.__setitem__(3, 1.0), lambda seen: operator.iadd(seen, 1), lambda seen: torch.relu_(seen),
    lambda seen: torch.add(seen, 1, out=seen), lambda seen: F.relu(seen, inplace=True),
    lambda seen: F.batch_norm(torch.ones(2, DIM), seen, torch.ones(DIM), training=True),
    lambda seen: torch.ops.aten.add_.Scalar(seen, 1), lambda seen: torch.ops.contracts.count(seen),
], ids=[
    "method", "data", "view", "item", "operator", "function", "out", "inplace", "statistics", "overload", "custom",
])  # fmt: skip
@pytest.mark.parametrize("how", ["eager", "inductor", "layers"])
def test_writes_are_refused(write: Callable[[torch.Tensor], Any], how: str) -> None:
    """They would be lost with the next copy; compiled code relies on addresses, and no guard sees them."""
    model, x = nn.Sequential(*(Counts(write) for _ in range(3))).eval(), rows()
    with headrace.offload(model, EVERYTHING):
        run = model if how == "layers" else compiled(model, how)
        for layer in model if how == "layers" else ():
            layer.compile(backend="eager", fullgraph=True)
        with pytest.raises(RuntimeError, match=r"0\.seen is written in place by"):
            run(x)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_scaled_by_a_lookup_are_refused(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(40, DIM, max_norm=0.5), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)).eval()
    with headrace.offload(model, EVERYTHING), pytest.raises(RuntimeError, match=r"0\.weight is written in place by"):
        compiled(model, "eager")(torch.arange(6).view(2, 3))


def test_reads_that_look_like_writes_are_not_refused() -> None:
    model = nn.Sequential(*(Counts(lambda seen: operator.and_(seen, seen).logical_or_(seen)) for _ in range(3))).eval()
    for layer in model:
        layer.seen = torch.rand(DIM) > 0.5
    expected = model(rows())
    with headrace.offload(model, EVERYTHING) as handle:
        assert_same_bits(compiled(model, "eager")(rows()), expected)
        assert_moved(handle, 1)


def test_layers_compiled_one_by_one() -> None:
    model, x, expected = expecting(Stack(4))
    with headrace.offload(model, all_layers(2)) as handle:
        for layer in model.layers:
            layer.compile(backend="eager", fullgraph=True)
        require_forwards(handle, x, expected, 2)


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("part", ["", "layers.1"], ids=["model", "layer"])
def test_export_is_refused_before_anything_changes(part: str, strict: bool, warm: bool) -> None:
    """Its program would hold slots in place of weights, and ops that no other process has."""
    model, x, expected = expecting(Stack(4))
    with headrace.offload(model, all_layers(2)) as handle:
        assert_same_bits(model(x) if warm else expected, expected)
        with pytest.raises(StateError, match=r"torch\.export would record .* call handle\.remove\(\) first"):
            torch.export.export(model.get_submodule(part), (x,), strict=strict)
        for step in (model, compiled(model, "eager"), model):
            assert_same_bits(step(x), expected)
        assert_moved(handle, 3 + warm)
        assert handle.stats().notes == ()
    assert_same_bits(torch.export.export(model, (x,), strict=strict).module()(x), expected)


@pytest.mark.parametrize("strict", [True, False])
def test_export_of_weights_in_place_is_as_without(strict: bool) -> None:
    model, x, expected = expecting(Stack(4))
    with headrace.offload(model, headrace.UVA(params=["ALL_MODEL_PARAMS"])) as handle:
        program = torch.export.export(model, (x,), strict=strict).run_decompositions()
        assert_same_bits(program.module()(x), expected)
        assert handle.plan.uva_bytes > 0
