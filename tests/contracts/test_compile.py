"""The promise: `torch.compile(fullgraph=True)` of an offloaded model, no graph break, same bits, whatever came before.

The reference is the compiled resident model with the same boundaries (contract 1). Most tests compile with the backend
``eager``, which traces as the others do and takes a tenth of the time; what the inductor itself may do to the order is
tested with the inductor, on as few and small models as will do.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

import headrace
from checks import require_forwards, run_threads
from headrace.errors import HeadraceWarning, ModelChangedError, StateError
from headrace.model.live_tensors import BoundTensor
from headrace.runtime.prefetcher import Prefetcher
from headrace.testing import SlowLink, assert_moved, assert_same_bits, boundaries, offload_over
from models import DIM, Block, MoE, OddStack, QuantStack, ScaledStack, Stack, all_layers, expecting, rows


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", autouse=True)
def _own_cache() -> Iterator[None]:
    """What an earlier version has left in the user's cache must not be what is tested."""
    from torch._inductor.utils import fresh_cache  # a second, also where this file is only collected

    with fresh_cache():
        yield


def stepping(model: nn.Module, backend: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A compiled function around ``model``, so that its own hooks are traced too; one graph or an error."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    return torch.compile(step, backend=backend, fullgraph=True)


class Plain(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Doubled(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Shifted(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class Half(nn.Linear):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return torch.cat([right, super().forward(left)]).chunk(2)


class Halves(nn.Module):
    """Each layer hands on two views of one tensor, as the single-stream blocks of FLUX do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Half(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = x.chunk(2)
        for layer in self.layers:
            halves = layer(*halves)
        return torch.cat(halves)


class Passing(nn.Module):
    """Its layers use what they are given, and hand it on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Passed() for _ in range(3))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = torch.zeros_like(left)
        for layer in self.layers:
            left, right, total = layer(left, right, total)
        return left, right, total


class Passed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, DIM)

    def forward(self, left: torch.Tensor, right: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return left, right, total + super().forward(left) + super().forward(right)


def num_graphs() -> int:
    assert not torch._dynamo.utils.counters["graph_break"]
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


class Shifting(nn.Module):
    """Its adapter may be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.adapter = nn.Linear(DIM, DIM), nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        return self.linear(x + shift).tanh() * self.adapter


class Added(nn.Module):
    """Residuals lead around its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Shifting() for _ in range(3))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + shift + layer(x, shift=shift) + layer.adapter
        return x


class Image(nn.Sequential):
    """Of a class of its own, so that what is traced of other layers says nothing of it."""


class Towers(nn.Module):
    """Layers that run if ``always``, and others that run if they are asked for."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always
        self.text = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2))
        self.images = nn.ModuleList(Image(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, looks: bool) -> torch.Tensor:
        for layer in (*(self.images if looks else ()), *(self.text if self.always else ())):
            x = x + layer(x)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.cell(x)[0]


class TestInductor:
    @pytest.mark.parametrize(
        ("build", "x"),
        [(lambda: QuantStack(3), rows()), (lambda: MoE(3), torch.arange(9))],
        ids=["weight-only arithmetic", "experts"],
    )
    def test_same_bits_in_one_graph(self, build: Callable[[], nn.Module], x: torch.Tensor) -> None:
        """Through one slot, then through two: compiled code must not know which units share memory (the compiler's
        cache would hand it on). Eager runs in between."""
        model = build().eval()
        eager = model(x)
        with boundaries(model, all_layers(2)) as plan:
            expected = stepping(model, "inductor")(x)
            assert num_graphs() == 1
        torch.testing.assert_close(expected, eager)
        for slots in (1, 2):
            torch._dynamo.reset()
            handle = offload_over(model, all_layers(slots), SlowLink(seed=slots))
            assert [unit.module_fqn for unit in handle.plan.units] == [unit.module_fqn for unit in plan.units]
            step = stepping(model, "inductor")
            for forwards, run in enumerate((step, model, step, step, model, step), start=1):
                assert_same_bits(run(x), eager if run is model else expected)
                assert_moved(handle, forwards)
            handle.remove()
        assert_same_bits(model(x), eager)
        assert not torch._dynamo.utils.counters["graph_break"]

    def test_coded_units(self) -> None:
        model, x = Stack(3, 256).eval().bfloat16(), rows(256).bfloat16()
        policy = headrace.Prefetch(1, 1, 2, codec="exp3")
        with boundaries(model, policy):
            expected = stepping(model, "inductor")(x)
        torch._dynamo.reset()
        with headrace.offload(model, policy) as handle:
            step = stepping(model, "inductor")
            for _ in range(3):
                assert_same_bits(step(x), expected)
            assert {unit.store for unit in handle.plan.units} == {"exp3"}
            assert 0 < handle.stats().bytes_moved < 0.8 * handle.stats().copies * handle.plan.units[0].num_bytes

    def test_encoder_layers_of_torch(self) -> None:
        """Their units have no hooks; what hooks trace, the wrapper of their forward does."""
        layer = nn.TransformerEncoderLayer(DIM, 4, 64, batch_first=True, activation="gelu")
        model, x = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval(), rows().unsqueeze(0)
        policy = headrace.Prefetch(1, 1, 1, params=["ALL_MODEL_PARAMS"])
        with boundaries(model, policy):
            expected = stepping(model, "inductor")(x)
            assert num_graphs() == 1
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with headrace.offload(model, policy) as handle:
            step = stepping(model, "inductor")
            for forwards in (1, 2, 3):
                assert_same_bits(step(x), expected)
                assert_moved(handle, forwards)
        assert num_graphs() == 1

    def test_layers_compiled_one_by_one_share_their_code(self) -> None:
        model = Stack(12).eval()
        x = rows()
        for layer in model.layers:
            layer.compile(fullgraph=True)
        with boundaries(model, all_layers(2)):
            expected = model(x)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        handle = offload_over(model, all_layers(2), SlowLink())
        require_forwards(handle, x, expected, 2)
        assert num_graphs() <= 3, "one for the layers, not one for each"
        assert not torch._dynamo.utils.counters["recompile_limit"]
        handle.remove()

    def test_layers_that_hand_on_two_views_of_one_tensor(self) -> None:
        """Compiled one by one, their hooks are graphs of their own, and none of them writes what it is given.

        Inductor copies a given view that an op writes beside another of its storage; torch 2.11 copied wrong bytes.
        """
        from torch._inductor.compile_fx import compile_fx

        model, x = Halves(), rows()
        eager = model(x)
        policy = headrace.Prefetch(1, 1, 2, params=["ALL_MODEL_PARAMS"])
        ordered: list[Any] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            ops = torch.ops.headrace.wait, torch.ops.headrace.release
            ordered.extend(node.args[3] for node in graph.graph.nodes if node.target in ops)
            return compile_fx(graph, inputs)

        for layer in model.layers:
            layer.compile(fullgraph=True, backend=backend)
        with boundaries(model, policy):
            expected = model(x)
        torch.testing.assert_close(expected, eager)
        assert ordered == [[]] * len(ordered) != []
        with offload_over(model, policy, SlowLink()) as handle:
            require_forwards(handle, x, expected, 2)

    def test_inputs_that_a_layer_uses_and_returns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It may have written them, so its release follows what does. Older versions of Inductor would misread them."""
        model, (left, right) = Passing(), torch.randn(12, DIM)[4:].chunk(2)
        policy = headrace.Prefetch(1, 1, 2, params=["ALL_MODEL_PARAMS"])
        expected = model(left, right)
        with offload_over(model, policy, SlowLink()) as handle:
            monkeypatch.setattr("headrace.runtime.compile_ops._MISREADS_OFFSETS", True)
            compiled = torch.compile(model, fullgraph=True)
            with pytest.raises(Exception, match=r"begins inside of its storage.*give the model a copy of it"):
                compiled(left, right)
            found = compiled(left.clone(), right.clone())
            torch._dynamo.reset()
            if torch.__version__ >= "2.13":
                monkeypatch.setattr("headrace.runtime.compile_ops._MISREADS_OFFSETS", False)
                found = compiled(left, right)
            assert handle.stats().bytes_moved > 0
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("always", [True, False])
    def test_units_that_a_forward_does_not_run(self, always: bool) -> None:
        """As of the tower of a model of images and text that is asked about text: their tensors rest."""
        model, x = Towers(always).eval(), rows()
        policy = headrace.Rules([("text", "prefetch"), ("images", "prefetch")])
        calls = (False, True, False)
        with boundaries(model, policy):
            compiled = torch.compile(model, fullgraph=True)
            expected = [compiled(x, looks) for looks in calls]
        torch._dynamo.reset()
        with offload_over(model, policy, SlowLink()) as handle:
            compiled = torch.compile(model, fullgraph=True)
            assert_same_bits([compiled(x, looks) for looks in calls], expected)
            assert handle.stats().bytes_moved > 0

    def test_kinds_of_layers_do_not_share_the_recompile_limit(self) -> None:
        """Each class has four versions, its hooks have one each: 12 layers, and torch keeps 8 versions of a code."""
        model = Stack(12).eval()
        kinds: list[type[nn.Sequential]] = [Plain, Doubled, Shifted]
        model.layers = nn.ModuleList(
            kind(*(nn.Linear(DIM, DIM) for _ in range(count))) for kind in kinds for count in (1, 2, 3, 4)
        )
        x = rows()
        for layer in model.layers:
            layer.compile(backend="eager", fullgraph=True)
        expected = model(x)
        handle = offload_over(model, all_layers(2), SlowLink())
        require_forwards(handle, x, expected, 2)
        assert not torch._dynamo.utils.counters["recompile_limit"]
        handle.remove()

    @pytest.mark.parametrize("whole", [True, False])
    def test_recurrent_layers(self, whole: bool) -> None:
        """Dynamo breaks its graph at an LSTM. It compiled what copies weights, and parts of the hooks."""
        model, x = nn.Sequential(*(Recurrent() for _ in range(4))).eval(), rows()
        expected = model(x)
        with offload_over(model, headrace.Prefetch(1, 1, 2, params=["ALL_MODEL_PARAMS"]), SlowLink()) as handle:
            for module in [model] if whole else model:
                module.compile(backend="eager")
            require_forwards(handle, x, expected, 2)
            for function in (Prefetcher.wait, Prefetcher.release, BoundTensor.open):
                assert not _debug_get_cache_entry_list(function.__code__)

    def test_layers_around_units_share_compiled_code(self) -> None:
        """Torch guards on ids of hooks below a layer that is compiled, and keeps 8 versions of a code."""
        model, x = Stack(12).eval(), rows()
        blocks = {f"block{index}": block for index, block in enumerate(model.layers)}
        model.layers = nn.ModuleDict({**blocks, "block12": nn.Linear(DIM, DIM)})  # of two kinds: no stack
        model.order = list(model.layers)
        for layer in blocks.values():
            layer.compile(backend="eager", fullgraph=True)
        expected = model(x)
        torch._dynamo.reset()
        handle = offload_over(model, headrace.Rules([("layers.block*", "prefetch")]), SlowLink())
        assert handle.plan.units[0].module_fqn.startswith("layers.block0.")
        require_forwards(handle, x, expected, 2)
        handle.remove()

    @pytest.mark.parametrize("frozen", [True, False])
    def test_gradients_end_at_offloaded_modules(self, frozen: bool) -> None:
        """The forward has the right bits; autograd saved weights whose slots hold other units, and found no fault."""
        model = Stack(4).eval().requires_grad_(not frozen)
        x = rows().requires_grad_()
        with torch.enable_grad():
            with boundaries(model, all_layers(2)):
                expected = stepping(model, "inductor")(x)
            torch._dynamo.reset()
            with headrace.offload(model, all_layers()) as handle:
                output = stepping(model, "inductor")(x)
                assert_same_bits(output, expected)
                assert_moved(handle, 1)
                with pytest.raises(StateError, match=r"a backward pass needs layers\.3\.norm\.weight.*remove\(\)"):
                    output.sum().backward()
            assert x.grad is None

    def test_a_subclass_is_refused(self) -> None:
        """Its inner tensors would reach the graph twice, with and without the edges: an error, no wrong result."""
        model = ScaledStack(2).eval()
        with (
            headrace.offload(model, all_layers()),
            pytest.raises((StateError, torch._dynamo.exc.BackendCompilerFailed)),
        ):
            stepping(model, "inductor")(rows())


class TestOtherBackends:
    @pytest.mark.parametrize("slots", [1, 2])
    @pytest.mark.parametrize("build", [Stack, QuantStack, OddStack, ScaledStack])
    def test_eager(self, build: Callable[[], nn.Module], slots: int) -> None:
        model, x, expected = expecting(build())
        handle = offload_over(model, all_layers(slots), SlowLink(max_delay_s=0.001))
        step = stepping(model, "eager")
        for forwards, run in enumerate((step, model, step, step), start=1):
            assert_same_bits(run(x), expected)
            assert_moved(handle, forwards)
        assert num_graphs() == 1
        handle.remove()
        assert_same_bits(step(x), expected)

    def test_a_backend_that_copies_weights_is_refused(self) -> None:
        model = Stack().eval()
        with headrace.offload(model, all_layers()), pytest.raises(StateError, match="backend='inductor' or 'eager'"):
            stepping(model, "aot_eager")(rows())

    def test_two_threads(self) -> None:
        model, x, expected = expecting(Stack(max_pause_s=0.0))
        handle = offload_over(model, all_layers(2), SlowLink(max_delay_s=0.001))
        step = stepping(model, "eager")
        assert_same_bits(step(x), expected)
        outputs: list[torch.Tensor] = []

        def work() -> None:
            with torch.no_grad():
                outputs.extend(step(x) for _ in range(5))

        run_threads([work, work])
        assert len(outputs) == 10
        for output in outputs:
            assert_same_bits(output, expected)
        assert handle.stats().units[3].runs == 11
        handle.remove()


class Changeable(Block):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(DIM))
        self.act = torch.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(super().forward(x)) * self.scale + self.shift
        return x + 1 if self.training else x


class Negated(Changeable):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


def halve_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output / 2


def halved(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args: forward(*args) / 2


def reverse(model: Any) -> None:
    model.layers = nn.ModuleList(reversed(model.layers))


# Each takes the model, one of its layers, and pytest's monkeypatch.
CHANGES: dict[str, Callable[[Any, Any, pytest.MonkeyPatch], Any]] = {
    "hook of a layer": lambda model, layer, patch: layer.register_forward_hook(halve_output),
    "hook of the model": lambda model, layer, patch: model.register_forward_hook(halve_output),
    "hook of a child": lambda model, layer, patch: layer.linear.register_forward_hook(halve_output),
    "pre-hook": lambda model, layer, patch: layer.register_forward_pre_hook(lambda _, args: (args[0] / 2,)),
    "hook removed": lambda model, layer, patch: model.hook.remove(),
    "forward of a layer": lambda model, layer, patch: setattr(layer, "forward", halved(layer.forward)),
    "forward of the model": lambda model, layer, patch: setattr(model, "forward", halved(model.forward)),
    "forward of a child": lambda model, layer, patch: setattr(layer.linear, "forward", halved(layer.linear.forward)),
    "new forward": lambda model, layer, patch: setattr(layer, "forward", lambda x: torch.cos(x)),
    "class": lambda model, layer, patch: setattr(layer, "__class__", Negated),
    "forward of the class": lambda *args: args[2].setattr(Changeable, "forward", halved(Changeable.forward)),
    "forward of the class of children": lambda *args: args[2].setattr(nn.Linear, "forward", halved(nn.Linear.forward)),
    "attribute of the class": lambda model, layer, patch: patch.setattr(Changeable, "scale", 2.0),
    "attribute": lambda model, layer, patch: setattr(layer, "scale", 2.0),
    "function": lambda model, layer, patch: setattr(layer, "act", torch.cos),
    "layer": lambda model, layer, patch: model.layers.insert(1, Changeable().eval()),
    "order of layers": lambda model, layer, patch: reverse(model),
    "parameter": lambda model, layer, patch: setattr(layer.linear, "weight", nn.Parameter(torch.ones(DIM, DIM))),
    "parameter removed": lambda model, layer, patch: setattr(layer.linear, "bias", None),
    "buffer": lambda model, layer, patch: setattr(layer, "shift", torch.ones(DIM)),
    "training": lambda model, layer, patch: layer.train(),
}


def outputs_around(change: str, wrap: str, fullgraph: bool, offload: bool) -> list[torch.Tensor]:
    """What a model returns before a change and after it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Stack().eval()
    model.layers = nn.ModuleList(Changeable().eval() for _ in range(3))
    model.order = list(range(3))
    model.hook = model.layers[2].register_forward_hook(halve_output)
    handle = headrace.offload(model, all_layers()) if offload else None
    run: Any = model
    if wrap == "function":
        run = torch.compile(lambda x: model(x), backend="eager", fullgraph=fullgraph)
    for module in {"model": [model], "layers": model.layers}.get(wrap, []):
        module.compile(backend="eager", fullgraph=fullgraph)
    with pytest.MonkeyPatch.context() as patch:
        outputs = [run(rows())]
        CHANGES[change](model, model.layers[1], patch)
        outputs += [run(rows()), run(rows())]
    if handle is not None:
        assert handle.stats().bytes_moved > 2 * handle.plan.moved_bytes
        handle.remove()
    return outputs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::headrace.errors.HeadraceWarning")  # of a parameter that was replaced
@pytest.mark.parametrize(
    ("wrap", "fullgraph"), [("model", True), ("model", False), ("function", True), ("layers", True)]
)
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_compiling(change: str, wrap: str, fullgraph: bool) -> None:
    """What a resident model is compiled again for, this one is; where hooks are, torch guards on more of it."""
    expected = outputs_around(change, "", fullgraph, offload=False)
    assert not torch.equal(expected[0], expected[1])
    found = outputs_around(change, wrap, fullgraph, offload=True)
    if not all(map(torch.equal, found, expected)):  # torch may not see the change in the resident model either
        assert_same_bits(found, outputs_around(change, wrap, fullgraph, offload=False))


@pytest.mark.parametrize("wrap", ["model", "layers"])
@pytest.mark.parametrize("child", [nn.Linear(DIM, DIM), nn.Identity()])
def test_a_child_that_is_replaced_after_compiling(child: nn.Module, wrap: str) -> None:
    """The old one may run in another layer now, where its bytes have left the device."""
    model = Stack().eval()
    with headrace.offload(model, all_layers()) as handle:
        for module in [model] if wrap == "model" else model.layers:
            module.compile(backend="eager", fullgraph=True)
        model(rows())
        assert_moved(handle, 1)
        model.layers[2].linear, model.layers[1].linear = model.layers[1].linear, child
        with pytest.raises(
            RuntimeError, match=r"layers\.1\.linear\.weight is (no longer in its Block|used by .*outside)"
        ):
            model(rows())


class Neighbour(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.other[0].linear.weight


@pytest.mark.parametrize(("backend", "tolerance"), [("eager", 0), ("inductor", 1e-5)])  # the latter rounds otherwise
def test_a_layer_compiled_alone_that_reads_the_weight_of_another(backend: str, tolerance: float) -> None:
    """The graph of a layer holds no wait for the weights of its neighbour, whose slot may hold other bytes."""

    def run() -> tuple[Any, Any]:
        model: Any = Stack(3).eval()
        model.layers = nn.ModuleList(Neighbour().eval() for _ in range(3))
        for layer, other in zip(model.layers, reversed(model.layers), strict=True):
            layer.other = [other]
        return model, [model(rows()) for _ in range(2)]

    torch.manual_seed(0)
    model, expected = run()
    with headrace.offload(model, all_layers()) as handle:
        for layer in model.layers:
            layer.compile(backend=backend, fullgraph=True)
        found = [model(rows()) for _ in range(2)]
        assert handle.stats().bytes_moved > 0
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


class TestBeforeAndAfter:
    """torch.compile does not guard on hooks: code compiled before an offload or during another must not run in it."""

    @pytest.mark.parametrize("wrap", ["model", "function", "layers"])
    def test_compiled_first_then_offloaded_removed_and_offloaded_again(self, wrap: str) -> None:
        model, x, expected = expecting(Stack())
        run: Any = model
        if wrap == "model":
            run = torch.compile(model, backend="eager", fullgraph=True)
        elif wrap == "function":
            run = stepping(model, "eager")
        else:
            for layer in model.layers:
                layer.compile(backend="eager", fullgraph=True)
        assert_same_bits(run(x), expected)
        for slots in (2, 1, 2):
            handle = offload_over(run if wrap == "model" else model, all_layers(slots), SlowLink())
            for forwards in (1, 2):
                assert_same_bits(run(x), expected)
                assert_moved(handle, forwards)
            handle.remove()
            assert_same_bits(run(x), expected)
            moved = handle.stats().bytes_moved
            assert_same_bits(run(x), expected)
            assert handle.stats().bytes_moved == moved, "after remove() nothing moves"
            del handle
            gc.collect()
            assert_same_bits(run(x), expected)

    def test_a_forward_that_was_compiled_in_place_while_offloaded(self) -> None:
        """``model.forward = torch.compile(model.forward)`` keeps our wrapper, also after remove()."""
        model, x, expected = expecting(Stack())
        handle = headrace.offload(model, all_layers())
        model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)  # type: ignore[method-assign]
        require_forwards(handle, x, expected, 2)
        handle.remove()
        assert_same_bits([model(x), model(x)], [expected, expected])
        with headrace.offload(model, all_layers()) as handle:
            require_forwards(handle, x, expected, 2)
        assert_same_bits(model(x), expected)

    def test_offloading_a_compiled_model_offloads_the_model(self) -> None:
        model = Stack().eval()
        handle = headrace.offload(torch.compile(model, backend="eager"), all_layers())
        assert handle.model is model
        with pytest.raises(StateError, match="offloaded already"):
            headrace.offload(model, all_layers())
        handle.remove()

    def test_the_marks_on_the_layers_go_with_the_offload(self) -> None:
        model = Stack()
        before = [dict(vars(module)) for module in model.modules()]
        headrace.offload(model.eval(), all_layers()).remove()
        model.train()
        assert [dict(vars(module)) for module in model.modules()] == before


class TestChangedModels:
    def test_moved(self) -> None:
        model = Stack().eval()
        x = rows()
        with headrace.offload(model, all_layers()):
            step = stepping(model, "eager")
            step(x)
            for parameter in model.parameters():
                parameter.data = parameter.data.half()
            with pytest.raises(ModelChangedError, match=r"layers\.0\.norm\.weight was moved"):
                step(x.half())

    def test_replaced_and_deleted(self) -> None:
        model = Stack().eval()
        x = rows()
        model.layers[2].linear.register_buffer("extra", torch.randn(3))
        with headrace.offload(model, all_layers()) as handle:
            step = stepping(model, "eager")
            step(x)
            new = nn.Parameter(torch.randn(32, 32))
            model.layers[1].linear.weight = new
            del model.layers[2].linear.extra
            with pytest.warns(HeadraceWarning) as warned:
                output = step(x)
            assert_same_bits(step(x), output)
            assert handle.stats().bytes_moved > 3 * handle.plan.moved_bytes
        assert sorted(str(w.message).split(" after")[0] for w in warned) == [
            "layers.1.linear.weight was replaced",
            "layers.2.linear.extra was deleted",
        ]
        assert model.layers[1].linear.weight is new
        assert_same_bits(model(x), output)

    def test_gradients(self) -> None:
        model = Stack().eval()
        x = rows().requires_grad_()
        with headrace.offload(model, all_layers()) as handle, torch.enable_grad():
            output = stepping(model, "eager")(x)
            assert_moved(handle, 1)
            with pytest.raises(StateError, match="a backward pass needs"):
                output.sum().backward()

    @pytest.mark.parametrize("wrap", ["model", "layers"])
    @pytest.mark.parametrize("of", ["input", "keyword", "adapter"])
    def test_gradients_of_chosen_tensors(self, of: str, wrap: str) -> None:
        """Autograd runs what leads to them alone: past the ends of the layers, by the residuals, to wrong gradients."""
        model, x = Added().eval().requires_grad_(False), rows().requires_grad_()
        shift, adapter = rows().requires_grad_(), model.layers[1].adapter.requires_grad_()
        wanted = {"input": x, "keyword": shift, "adapter": adapter}[of]
        run = torch.compile(model, backend="eager", fullgraph=True) if wrap == "model" else model
        with headrace.offload(model, headrace.Prefetch(1, 1, 1, params=["linear"])) as handle, torch.enable_grad():
            for layer in model.layers if wrap == "layers" else ():
                layer.compile(backend="eager", fullgraph=True)
            output = run(x, shift)
            assert_moved(handle, 1)
            with pytest.raises(StateError, match=r"a backward pass needs layers\.\d\.linear\.weight"):
                torch.autograd.grad(output.sum(), wanted)


def test_boundaries_leave_nothing_behind() -> None:
    model = OddStack().eval()
    before = [dict(vars(module)) for module in model.modules()]
    x = rows()
    expected = model(x)
    with boundaries(model, all_layers()) as plan:
        assert len(plan.units) == 5
        assert_same_bits(model(x), expected)
    assert [dict(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("wait", ["token", "tensors", "inputs"]),
        ("release", ["token", "tensors", "outputs"]),
        ("begin", ["token"]),
        ("join", ["token"]),
    ],
)
def test_every_op_declares_as_written_what_orders_it(name: str, written: list[str]) -> None:
    """The token keeps all of them in the order of the program. The inductor of today keeps it anyway, so no result
    would show that an edge is missing; and the tag must not be written, since it is known by its address."""
    schema = getattr(torch.ops.headrace, name).default._schema
    assert [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write] == written
    assert schema.returns == []


def test_a_forward_without_graph_breaks_is_one_graph_that_knows_it() -> None:
    """A CUDA graph of it may then end with copies under way: its end waits for all of them."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    def whole() -> list[list[object]]:
        begins = [graph.graph.find_nodes(op="call_function", target=torch.ops.headrace.begin) for graph in graphs]
        return [[node.args[2] for node in found] for found in begins]

    model, x, expected = expecting(OddStack())
    with headrace.offload(model, all_layers()) as handle:
        assert_same_bits(torch.compile(model, backend=keep)(x), expected)
        assert whole() == [[True]]
        graphs.clear()
        torch._dynamo.reset()
        model.layers[1].register_forward_hook(lambda *_: torch._dynamo.graph_break())
        assert_same_bits(torch.compile(model, backend=keep)(x), expected)
        assert len(graphs) > 1
        assert [True] not in whole()
        assert_moved(handle, 2)
