"""The promise: what a compiler traces uses a slot between wait and release, or the trace ends in an error."""

from __future__ import annotations

import copy
import itertools
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headrace
from checks import require_forwards
from headrace.errors import ModelChangedError, OutsideAccessError, StateError
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
    def write_weight(layer: nn.Module, *_: object) -> None:
        layer.linear.weight.add_(1)  # type: ignore[union-attr, operator]

    model, x, expected = expecting(Stack(4))
    with headrace.offload(model, all_layers(1)):
        assert_same_bits(compiled(model, "eager")(x), expected)
        writes = model.layers[2].register_forward_pre_hook(write_weight)
        with pytest.raises(ModelChangedError, match=r"layers\.2\.linear\.weight was written in place by aten\.add_"):
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


_READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "clone": lambda w: w.clone(),
    "product": lambda w: w @ torch.ones(DIM, 2),
    "sum": lambda w: w.float().sum(),
    "data": lambda w: w.data.mul(3),
    "view": lambda w: w.t()[1:3],
    "numpy": lambda w: torch.from_numpy(w.detach().numpy().copy()),
    "list": lambda w: torch.tensor(w.tolist()),
    "gradient": lambda w: torch.autograd.grad(w.square().sum(), w)[0],
}


def _compile_all(model: Stack, how: str, backend: str) -> nn.Module:
    if how == "layers":
        for layer in model.layers:
            layer.compile(backend=backend, fullgraph=True)
    return model if how == "layers" else compiled(model, backend)


@pytest.mark.filterwarnings("ignore:.*its bytes are copied for every such use:headrace.HeadraceWarning")
@pytest.mark.parametrize(("how", "backend"), [("model", "eager"), ("layers", "eager"), ("model", "inductor")])
def test_reads_after_compiled_forwards(how: str, backend: str) -> None:
    """Compiled code relies on addresses, so each weight has that of its slot, where another layer's bytes may be."""
    model, x = Stack(6).eval(), rows()
    weights = [layer.linear.weight.detach().clone().requires_grad_() for layer in model.layers]
    with headrace.offload(model, all_layers(2)) as handle:
        step = _compile_all(model, how, backend)
        expected = step(x)
        aliases = [layer.linear.weight.data for layer in model.layers]
        for name, read in _READS.items():
            for index in (4, 1, 5, 0, 2, 3):
                with torch.set_grad_enabled(name == "gradient"):
                    found, wanted = read(model.layers[index].linear.weight), read(weights[index])
                assert_same_bits(found, wanted)
            assert_same_bits(step(x), expected)
        assert_same_bits([alias.clone() for alias in aliases], [weight.detach() for weight in weights])
        for use in (lambda w: w.data_ptr(), lambda w: copy.deepcopy(w.data), lambda w: w.data.share_memory_()):
            with pytest.raises(OutsideAccessError, match=r"layers\.4\.linear\.weight"):
                use(model.layers[4].linear.weight)
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch.from_dlpack(model.layers[4].linear.weight.detach())
        with torch.no_grad():
            model.layers[4].linear.weight.mul_(2)
        assert_same_bits(model.layers[4].linear.weight.clone(), weights[4].detach() * 2)
        found = step(x)
        assert_moved(handle, len(_READS) + 2)
    assert_same_bits(model.layers[4].linear.weight.detach(), weights[4].detach() * 2)
    assert torch.allclose(found, model(x), atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*It is resident from now on:headrace.HeadraceWarning")
def test_a_weight_that_was_promoted_before() -> None:
    """Our ops count as writes of what they are given, and a promoted weight was taken for one that its user writes."""
    model, x, expected = expecting(Stack(4))
    with headrace.offload(model, all_layers(1)) as handle:
        weight = model.layers[2].linear.weight
        assert_same_bits(weight.sum(), weight.clone().sum())
        step = compiled(model, "eager")
        assert_same_bits([step(x), step(x), step(x)], [expected] * 3)
        assert handle.stats().bytes_moved > 0
        assert "layers.2.linear.weight" in handle.plan.resident


class Splits(Stack):
    def forward(self, x: torch.Tensor) -> Any:
        part = self.layers[1].linear.weight.chunk(2)[1]
        return super().forward(x), part


@pytest.mark.filterwarnings("ignore:.*It is resident from now on:headrace.HeadraceWarning")
@pytest.mark.parametrize("how", ["model", "layers"])
def test_views_of_a_weight_that_was_promoted_before(how: str) -> None:
    """Autograd gives up a part of a split whose base is written; what is not promoted of other layers is written on."""
    model, x, expected = expecting(Splits(4))
    with torch.enable_grad(), headrace.offload(model, all_layers(1)) as handle:
        assert_same_bits(model(x), expected)
        assert "layers.1.linear.weight" in handle.plan.resident
        for part in [model] if how == "model" else model.layers:
            part.compile(backend="eager", fullgraph=True)
        assert_same_bits([model(x), model(x)], [expected] * 2)
        assert handle.stats().bytes_moved > 0


@torch.library.custom_op("contracts::stumble", mutates_args=())
def _stumble(x: torch.Tensor) -> torch.Tensor:
    if _stumbles:
        raise _stumbles.pop()
    return x.clone()


@_stumble.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_stumbles: list[BaseException] = []


@pytest.mark.filterwarnings("ignore:.*its bytes are copied for every such use:headrace.HeadraceWarning")
@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("whole", [True, False], ids=["model", "function"])
def test_reads_after_a_compiled_forward_raised_and_beside_one(error: BaseException, whole: bool) -> None:
    """No hook of ours runs behind an error in compiled code of a function that calls the model."""
    found: list[Any] = []

    class Stumbles(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.contracts.stumble(super().forward(x))

    def read() -> None:
        found.append([layer.weight.clone() for layer in model])

    model = nn.Sequential(*(Stumbles(DIM, DIM) for _ in range(5))).eval()
    weights = [layer.weight.detach().clone() for layer in model]
    model, x, expected = expecting(model)
    with headrace.offload(model, EVERYTHING) as handle:
        step = torch.compile(model if whole else lambda x: model(x), backend="eager", fullgraph=True)
        assert_same_bits(step(x), expected)
        _stumbles.append(error)
        with pytest.raises(type(error)):
            step(x)
        aliases = [layer.weight.data for layer in model]
        read()
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        assert_same_bits([step(x), model(x)], [expected, expected])
        read()
        found.append([alias.clone() for alias in aliases])
        assert_same_bits(found, [weights] * 4)
        assert handle.stats().bytes_moved > 0


@pytest.mark.filterwarnings("ignore:.*its bytes are copied for every such use:headrace.HeadraceWarning")
def test_reads_around_a_graph_break_inside_of_a_layer() -> None:
    """What follows it in the layer reads the slot, and what a parent reads there is its own weight."""

    class Breaks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            torch._dynamo.graph_break()
            return y + self.weight.sum(0) + (0 if self.other is None else self.other.weight.mean())

    model = nn.Sequential(*(Breaks(DIM, DIM) for _ in range(4))).eval()
    for one, other in itertools.pairwise(model):
        one.other = None
        other.__dict__["other"] = one
    model, x, expected = expecting(model)
    with headrace.offload(model, EVERYTHING) as handle:
        step = torch.compile(model, backend="eager")
        assert_same_bits([step(x), step(x)], [expected, expected])
        assert_moved(handle, 2)


@pytest.mark.parametrize("grad", [True, False])
def test_a_view_returned_behind_a_graph_break(grad: bool) -> None:
    """The layer's code is a graph of its own then, and so is its hook, to which the view is an input."""

    class Returns(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            torch._dynamo.graph_break()
            return super().forward(x[0]), self.weight.t()

    model = nn.Sequential(*(Returns(DIM, DIM) for _ in range(3))).eval()
    with headrace.offload(model, EVERYTHING), torch.set_grad_enabled(grad):
        compiled = torch.compile(model, backend="eager")
        with pytest.raises(Exception, match=r"0.weight is returned by its module, whole or as a view outside"):
            compiled((rows(), None))


class Keeps(nn.Linear):
    """Keeps a view of its weight when it is told to."""

    def __init__(self, breaks: bool) -> None:
        super().__init__(DIM, DIM)
        self.breaks, self.keeps, self.kept = breaks, False, [torch.zeros(1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        if self.keeps:
            self.kept[0] = self.weight.t()[2:]
        return x + super().forward(x)


def _keeping(breaks: bool) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    model = nn.Sequential(*(Keeps(breaks) for _ in range(5)))
    model[1].keeps = True
    return model, rows(), model[1].weight.detach().t()[2:].clone()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_view_that_one_graph_keeps(backend: str, grad: bool) -> None:
    model, x, _ = _keeping(breaks=False)
    with (
        headrace.offload(model, headrace.Prefetch(1, 1, 1, params=["ALL_MODEL_PARAMS"])),
        torch.set_grad_enabled(grad),
        pytest.raises(RuntimeError, match=r"a view of 1\.weight was kept beyond .* torch\.compile traces.*resident"),
    ):
        compiled(model, backend)(x)


@pytest.mark.filterwarnings("ignore:.*its bytes are copied for every such use:headrace.HeadraceWarning")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("how", ["break", "layers", "eager"])
def test_a_view_kept_otherwise_is_read_as_its_weight(how: str, grad: bool) -> None:
    """Behind a graph break, by a layer that is compiled alone, or in an eager forward after compiled ones."""
    model, x, expected = _keeping(breaks=how == "break")
    with (
        headrace.offload(model, headrace.Prefetch(1, 1, 1, params=["ALL_MODEL_PARAMS"])) as handle,
        torch.set_grad_enabled(grad),
    ):
        step = model if how == "layers" else torch.compile(model, backend="eager")
        for layer in model if how == "layers" else ():
            layer.compile(backend="eager")
        if how == "eager":
            model[1].keeps = False
            step(x)
            step, model[1].keeps = model, True
        for _ in range(2):
            step(x)
            kept = model[1].kept[0]
            found = [kept.clone(), kept.data.clone(), torch.from_numpy(kept.detach().numpy().copy()), kept[1:] * 1]
            assert_same_bits([view.detach() for view in found], [expected, expected, expected, expected[1:]])
        assert handle.stats().bytes_moved > 0


@pytest.mark.parametrize("fullgraph", [True, False])
def test_what_an_alias_from_before_the_offload_writes(fullgraph: bool) -> None:
    """It counts in every forward: the store is the memory that the alias views."""
    model, x = Stack(4).eval(), rows()
    alias = model.layers[0].linear.weight.detach().numpy()
    with headrace.offload(model, EVERYTHING) as handle, torch.no_grad():
        step = torch.compile(model, backend="eager", fullgraph=fullgraph)
        found = [step(x)]
        for value in (0.5, 0.25):
            alias[:9] = value
            found.append(step(x))
        assert handle.stats().bytes_moved > 0
    for value, output in zip((0.5, 0.25), found[1:], strict=True):
        alias[:9] = value
        assert_same_bits(output, model(x))


def test_a_read_behind_the_last_unit_of_a_layer_compiled_alone() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lender, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.last(self.lender(x)), self.lender.weight)

    model = nn.ModuleDict({"only": Calls()}).eval()
    with headrace.offload(model, headrace.Rules([("only", "prefetch")], prefetch_step=1)) as handle:
        assert [unit.module_fqn for unit in handle.plan.units] == ["only.lender", "only.last"]
        model["only"].compile(backend="eager")
        with pytest.raises(RuntimeError, match=rf"only\.lender\.weight is used by .*{OUTSIDE}"):
            model["only"](rows())


class Borrows(nn.Module):
    """Reads a weight of ``others``, or of its child, in code that has no hook around it."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.lin, self.how = nn.Linear(DIM, DIM), how
        self.others: list[Borrows] = []

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.lin.weight.cos() / DIM

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.lin.forward(x) if self.how == "child" else self.lin(x))
        for other in self.others:
            x = x + (other.product(x) if self.how == "method" else other.lin.weight.cos().mean())
        return x


class Borrowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = Borrows(), Borrows("child"), Borrows("child")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.two(self.one(x)))


@pytest.mark.filterwarnings("ignore:.*its bytes are copied for every such use:headrace.HeadraceWarning")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("how", ["child", "weight", "method"])
def test_layers_compiled_one_by_one_that_read_weights_outside(how: str, backend: str) -> None:
    """Their units are in no slot then, or in one that another unit has taken since."""
    model = Borrowing() if how == "child" else nn.Sequential(Borrows(), Borrows(how), Borrows(how))
    layers = list(model.children())
    for layer in layers[1:] if how != "child" else ():
        layer.others.append(layers[0])
    model, x, expected = expecting(model)
    with headrace.offload(model, headrace.Prefetch(1, 1, 1, params=["ALL_MODEL_PARAMS"])) as handle:
        assert [unit.module_fqn.endswith("lin") for unit in handle.plan.units] == [how == "child"] * 3
        for layer in layers:
            layer.compile(backend=backend)
        for forwards in (1, 2, 3):
            torch.testing.assert_close(model(x), expected, rtol=0, atol=0 if backend == "eager" else 1e-4)
            assert handle.stats().bytes_moved >= forwards * layers[0].lin.weight.nbytes


@pytest.mark.filterwarnings("ignore:.*its bytes are copied for every such use:headrace.HeadraceWarning")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_compiled_forward_of_a_layer_beside_the_compiled_model(backend: str) -> None:
    model, x = Stack(4).eval(), rows()
    expected = [layer(x) for layer in model.layers]
    with headrace.offload(model, all_layers(1)) as handle:
        compiled(model, backend)(x)
        for _ in range(2):
            found = [torch.compile(layer.forward, backend=backend)(x) for layer in model.layers]
            torch.testing.assert_close(found, expected, rtol=0, atol=0 if backend == "eager" else 1e-5)
        assert_moved(handle, 1)
