"""Whatever writes, exchanges, wraps or traces the weights of an offloaded model gives equal bits or an error.

Each case does one thing to an offloaded model and the same thing to a resident twin. Either the forwards agree, during
the offload and after ``remove()``, and so do the weights; or something was raised. A silent difference is the failure.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace import Prefetch
from headrace.errors import HeadraceError, ModelChangedError
from headrace.testing import assert_same_bits
from models import DIM, Block, all_layers, rows

# A weight that is used outside of its forward becomes resident, with a warning; its bits are what counts here.
pytestmark = pytest.mark.filterwarnings(
    *("ignore::headrace.HeadraceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
)

Action = Callable[[Any], Any]  # does something to a model; returns what is to be called afterwards


class Lora(nn.Module):
    """A linear layer with an adapter beside it, as peft has it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.a = nn.Parameter(torch.randn(4, base_layer.in_features) / 8)
        self.b = nn.Parameter(torch.randn(base_layer.out_features, 4) / 8)
        self.merged = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base_layer(x)
        return y if self.merged else y + x @ self.a.T @ self.b.T

    def merge(self) -> None:
        self.base_layer.weight.data += self.b @ self.a
        self.merged = True


class Stacked(nn.Module):
    """Blocks one after the other, without anything that a tracer cannot follow."""

    def __init__(self, lora: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        if lora:
            for layer in self.layers:
                layer.linear = Lora(layer.linear)
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def plain() -> nn.Module:
    torch.manual_seed(1)
    return Stacked().eval().requires_grad_(False)


def with_lora() -> nn.Module:
    torch.manual_seed(1)
    return Stacked(lora=True).eval().requires_grad_(False)


def budget(model: nn.Module) -> int:
    """Half of the weights: some of them stay where they are."""
    return max(sum(parameter.nbytes for parameter in model.parameters()) // 2, 1)


POLICIES = pytest.mark.parametrize(
    "policy", [lambda model: all_layers(1), lambda model: all_layers(2)], ids=["one slot", "two slots"]
)
WHEN = pytest.mark.parametrize("warm", [False, True], ids=["before a forward", "behind a forward"])


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: _whole(tensor).detach().clone() for name, tensor in state.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a sharded tensor; the values of a quantised one."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.dequantize() if hasattr(tensor, "tensor_data_names") else tensor


def require_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert torch.equal(found[name], expected[name]), name
    else:
        assert torch.equal(found, expected)


def equal_or_refused(
    make: Callable[[], nn.Module], act: Action, policy: Action, x: torch.Tensor, warm: bool = True
) -> str:
    """Hold ``act`` on an offloaded model against ``act`` on a resident one; returns ``equal`` or the error's kind."""
    model, twin, untouched = make(), make(), make()
    torch.manual_seed(2)
    expected = act(twin)
    try:
        handle = headrace.offload(model, policy(model))
    except HeadraceError as error:
        return f"not offloaded: {type(error).__name__}"
    if warm:
        require_same(_run(model, x), _run(untouched, x))
    try:
        torch.manual_seed(2)
        changed = act(model)
    except Exception as error:
        _require_untouched(model, handle, untouched, x)
        return type(error).__name__
    try:
        outputs = [_run(changed, x) for _ in range(3)]
    except HeadraceError as error:  # noticed late, but noticed
        with suppress(HeadraceError):
            handle.remove()
        return type(error).__name__
    for output in outputs:
        require_same(output, _run(expected, x))
    assert handle.stats().bytes_moved or handle.plan.uva or handle.stats().notes
    handle.remove()
    require_same(_run(changed, x), _run(expected, x))
    if isinstance(expected, nn.Module):
        require_same(weights_of(changed), weights_of(expected))
    return "equal"


def _run(module: Any, x: torch.Tensor) -> torch.Tensor:
    output = module(x)
    return (output if isinstance(output, torch.Tensor) else output.logits).detach()


def _require_untouched(model: nn.Module, handle: headrace.Handle, untouched: nn.Module, x: torch.Tensor) -> None:
    """What was refused has changed nothing, and the offload goes on."""
    for _ in range(2):
        require_same(_run(model, x), _run(untouched, x))
    handle.remove()
    require_same(_run(model, x), _run(untouched, x))
    require_same(weights_of(model), weights_of(untouched))


# -- writes ------------------------------------------------------------------------------------------------------------


def add_delta(model: Any) -> Any:
    for layer in model.layers[1:3]:
        layer.linear.weight.data += torch.randn(DIM, DIM)
    return model


def add_under_no_grad(model: Any) -> Any:
    with torch.no_grad():
        for layer in model.layers:
            layer.linear.weight.add_(1.0).mul_(0.5)
            layer.linear.bias[2] = 3.0
    return model


def write_through_an_alias(model: Any) -> Any:
    alias = model.layers[2].linear.weight.detach()
    flat = alias.view(-1)
    flat[5:50] = 0.25
    alias.t()[0].copy_(torch.ones(DIM))
    return model


def write_through_numpy(model: Any) -> Any:
    model.layers[0].linear.weight.detach().numpy()[:] = 0.125
    return model


def swap_data(model: Any) -> Any:
    first, second = (model.layers[index].linear.weight for index in (0, 3))
    first.data, second.data = second.data.clone(), first.data.clone()
    return model


def exchange_the_data_of_a_resident(model: Any) -> Any:
    model.head.weight.data = torch.randn(3, DIM)
    return model


def replace_a_parameter(model: Any) -> Any:
    model.layers[1].linear.weight = nn.Parameter(torch.randn(DIM, DIM), requires_grad=False)
    return model


def initialise(model: Any) -> Any:
    for layer in model.layers:
        nn.init.normal_(layer.linear.weight, std=0.1)
    return model


def average(model: Any) -> Any:
    """As model soups and the like do."""
    mean = torch.stack([layer.linear.weight for layer in model.layers]).mean(0)
    for layer in model.layers:
        layer.linear.weight.data.lerp_(mean, 0.5)
    return model


def write_to_state_dict(model: Any) -> Any:
    """As moving averages of weights do; some of those are in slots at that moment."""
    for value in model.state_dict().values():
        value.mul_(0.5)
    return model


def vector_to_parameters(model: Any) -> Any:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    return model


@WHEN
@POLICIES
@pytest.mark.parametrize("act", [
    add_delta, add_under_no_grad, write_through_an_alias, write_through_numpy, swap_data,
    exchange_the_data_of_a_resident, replace_a_parameter, initialise, average, write_to_state_dict,
    vector_to_parameters,
])  # fmt: skip
def test_writes(act: Action, policy: Action, warm: bool) -> None:
    equal_or_refused(plain, act, policy, rows(), warm)


@WHEN
@pytest.mark.parametrize("index", range(4))
def test_a_write_within_a_budget(index: int, warm: bool) -> None:
    """Larger weights: what is smaller than 64 KiB a budget keeps."""

    def wide() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).eval().requires_grad_(False)

    def add(model: Any) -> Any:
        model[index].weight.data += torch.randn(256, 256)
        return model

    equal_or_refused(wide, add, budget, torch.randn(2, 256), warm)


def merge(model: Any) -> Any:
    for layer in model.layers:
        layer.linear.merge()
    return model


def take_wrappers_off(model: Any) -> Any:
    for layer in model.layers:
        layer.linear = layer.linear.base_layer
    return model


def merge_and_take_off(model: Any) -> Any:
    return take_wrappers_off(merge(model))


@WHEN
@POLICIES
@pytest.mark.parametrize("act", [merge, take_wrappers_off, merge_and_take_off])
def test_adapters_by_hand(act: Action, policy: Action, warm: bool) -> None:
    equal_or_refused(with_lora, act, policy, rows(), warm)


@POLICIES
def test_layers_exchanged_for_what_they_wrap(policy: Action) -> None:
    """The wrapper is the layer itself: its unit loses its module."""

    def wrapped() -> nn.Module:
        torch.manual_seed(1)
        model = Stacked().eval().requires_grad_(False)
        for index in range(4):
            model.layers[index] = Lora(nn.Linear(DIM, DIM)).requires_grad_(False)  # type: ignore[assignment]
        return model

    def take_off(model: Any) -> Any:
        for index in range(4):
            model.layers[index] = model.layers[index].base_layer
        return model

    equal_or_refused(wrapped, take_off, policy, rows())


# -- classes and their forwards ----------------------------------------------------------------------------------------


class Negated(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - torch.tanh(self.linear(self.norm(x)))


def of_own_classes() -> nn.Module:
    """Classes that no other model has, to be changed; a root that is one of torch.fx."""
    model: Any = plain()
    for module in (model, *model.layers):
        module.__class__ = type("Own", (type(module),), {})
    return model


def as_graph() -> nn.Module:
    return torch.fx.symbolic_trace(plain())


def exchange_classes(model: Any) -> Any:
    for layer in model.layers[1:3]:
        layer.__class__ = Negated
    return model


def patch_class(model: Any) -> Any:
    """As libraries of fast kernels do."""
    type(model.layers[1]).forward = Negated.forward
    return model


def patch_root(model: Any) -> Any:
    plain_forward = type(model).forward
    type(model).forward = lambda self, x: plain_forward(self, x) * 2
    return model


def recompile(model: Any) -> Any:
    for node in model.graph.find_nodes(op="call_function", target=torch.tanh):
        node.target = torch.sin
    model.recompile()
    return model


@WHEN
@pytest.mark.parametrize(
    "policy",
    [
        lambda model: all_layers(1),
        lambda model: all_layers(2),
        lambda model: headrace.Rules([("ALL_MODEL_PARAMS", "prefetch")]),
        lambda model: headrace.Rules([("re:.*linear.weight", "prefetch")]),
        lambda model: headrace.UVA(params=["ALL_MODEL_PARAMS"]),
    ],
    ids=["one slot", "two slots", "every module", "matrices", "in place"],
)
@pytest.mark.parametrize(
    ("make", "act"),
    [
        (of_own_classes, exchange_classes),
        (of_own_classes, patch_class),
        (of_own_classes, patch_root),
        (as_graph, recompile),
    ],
)
def test_forwards_of_classes(make: Callable[[], nn.Module], act: Action, policy: Action, warm: bool) -> None:
    assert equal_or_refused(make, act, policy, rows(), warm) == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("act", [exchange_classes, patch_class, patch_root])
def test_forwards_of_classes_in_compiled_code(act: Action) -> None:
    """Torch does not compile a resident model again for a class that was patched; this one is what it is then."""
    torch._dynamo.reset()
    model, x = of_own_classes(), rows()
    with torch.no_grad(), headrace.offload(model, all_layers(2)) as handle:
        before = torch.compile(model, backend="eager", fullgraph=True)(x)
        found = torch.compile(act(model), backend="eager", fullgraph=True)(x)
        assert handle.stats().bytes_moved > 0
    torch._dynamo.reset()
    assert torch.equal(found, model(x))
    assert not torch.equal(found, before)


# -- casts and moves ---------------------------------------------------------------------------------------------------


# Torch's own, perhaps before headrace is asked: it was built without CUDA, or there is no driver.
NO_CUDA = (AssertionError, RuntimeError)


@POLICIES
@pytest.mark.parametrize(
    ("cast", "error"),
    [
        (lambda m: m.half(), ModelChangedError),
        (lambda m: m.bfloat16(), ModelChangedError),
        (lambda m: m.double(), ModelChangedError),
        (lambda m: m.to(torch.float64), ModelChangedError),
        (lambda m: m.to("meta"), ModelChangedError),
        (lambda m: m.cuda(), ModelChangedError if torch.cuda.is_available() else (ModelChangedError, *NO_CUDA)),
    ],
    ids=["half", "bfloat16", "double", "to", "meta", "cuda"],
)
def test_casts_and_moves_are_refused_at_once(cast: Action, error: Any, policy: Action) -> None:
    for part in (lambda m: m, lambda m: m.layers, lambda m: m.layers[2].linear):
        model, untouched = plain(), plain()
        handle = headrace.offload(model, policy(model))
        with pytest.raises(error):
            cast(part(model))
        _require_untouched(model, handle, untouched, rows())


# -- tracers -----------------------------------------------------------------------------------------------------------


def traced_by_fx(model: Any) -> Any:
    return torch.fx.symbolic_trace(model)


def traced_by_make_fx(model: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(model)(rows())


def traced_and_saved(model: Any) -> Any:
    """The graph keeps constants of its own, which must not be bytes of a slot."""
    return copy.deepcopy(traced_by_make_fx(model))


def linearized(model: Any) -> Any:
    output, tangent = torch.func.linearize(model, rows())
    return lambda x: output + tangent(x)


def mapped(model: Any) -> Any:
    return torch.func.vmap(model)


def called_functionally(model: Any) -> Any:
    weights = {name: value.detach() * 0.5 for name, value in model.named_parameters()}
    return lambda x: torch.func.functional_call(model, weights, (x,))


def ensembled(model: Any) -> Any:
    parameters, buffers = torch.func.stack_module_state([model, model])
    bare = copy.deepcopy(Stacked()).to("meta")

    def run(one: Any, other: Any, x: torch.Tensor) -> Any:
        return torch.func.functional_call(bare, (one, other), (x,))

    return lambda x: torch.func.vmap(run, in_dims=(0, 0, None))(parameters, buffers, x)


def jitted(model: Any) -> Any:
    return torch.jit.trace(model, rows())


def exported(model: Any) -> Any:
    return torch.export.export(model, (rows(),)).module()


def jacobian(model: Any) -> Any:
    return lambda x: torch.func.jacrev(model)(x)


@pytest.mark.slow
@POLICIES
@pytest.mark.parametrize("act", [
    traced_by_fx, traced_by_make_fx, traced_and_saved, pytest.param(linearized, marks=pytest.mark.slow), mapped,
    called_functionally, ensembled, jitted, exported, jacobian,
])  # fmt: skip
def test_tracers(act: Action, policy: Action) -> None:
    x = rows()
    if act is linearized:  # it computes once, here with a grad mode of its own
        x = torch.zeros_like(x)

    def run(model: Any) -> Any:
        traced = act(model)
        return lambda given: traced(given)

    def at_once(model: Any) -> Any:
        """Traced and run under the offload; the result is what is compared."""
        output = run(model)(x)
        return lambda given: output

    for action in (run, at_once):
        equal_or_refused(plain, action, policy, x)


# -- FSDP --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def shard(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shard_around(model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


@pytest.mark.usefixtures("alone")
@POLICIES
@pytest.mark.parametrize("act", [shard, shard_around], ids=["FSDP2", "FSDP1"])
def test_sharded_after_the_offload(act: Action, policy: Action) -> None:
    equal_or_refused(plain, act, policy, rows())


@pytest.mark.usefixtures("alone")
@POLICIES
@pytest.mark.parametrize("act", [shard, shard_around], ids=["FSDP2", "FSDP1"])
def test_sharded_before_the_offload(act: Action, policy: Action) -> None:
    equal_or_refused(lambda: act(plain()), lambda model: model, policy, rows())


# -- peft --------------------------------------------------------------------------------------------------------------

TOKENS = torch.arange(10).view(2, 5)


@cache
def _tiny_qwen() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(**sizes, head_dim=32, num_hidden_layers=3, vocab_size=64)
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def tiny_qwen() -> Any:
    return copy.deepcopy(_tiny_qwen())


def adapted(model: Any, **options: Any) -> Any:
    """With adapters whose weights are random, so that merging them changes something."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **{"init_lora_weights": False, **options})
    return peft.get_peft_model(model, config).eval().requires_grad_(False)


@cache
def _adapted_qwen() -> Any:
    return adapted(tiny_qwen())


def adapted_qwen() -> Any:
    return copy.deepcopy(_adapted_qwen())


def merge_adapter(model: Any) -> Any:
    model.merge_adapter()
    return model


def merge_and_unmerge(model: Any) -> Any:
    model.merge_adapter()
    model.unmerge_adapter()
    return model


def disabled(model: Any) -> Any:
    def run(tokens: torch.Tensor) -> Any:
        with model.disable_adapter():
            return model(tokens)

    return run


def merged_and_disabled(model: Any) -> Any:
    """Disabling unmerges."""
    return disabled(merge_adapter(model))


IN_LAYERS = pytest.mark.parametrize(
    "policy",
    [
        pytest.param(lambda m: Prefetch(params=["q_proj", "down_proj"]), marks=pytest.mark.slow, id="targets"),
        pytest.param(lambda m: Prefetch(params=["mlp", "self_attn"], prefetch_step=2), id="all"),
    ],
)


@pytest.mark.slow
@WHEN
@IN_LAYERS
@pytest.mark.parametrize(
    "act",
    [
        merge_adapter,
        merge_and_unmerge,
        lambda m: m.merge_and_unload(),
        lambda m: m.merge_and_unload(safe_merge=True),
        lambda m: m.unload(),
        disabled,
        merged_and_disabled,
    ],
    ids=["merge", "merge, unmerge", "merge_and_unload", "safe merge", "unload", "disable", "merge, disable"],
)
def test_peft_on_an_adapted_model(act: Action, policy: Action, warm: bool) -> None:
    pytest.importorskip("peft")
    equal_or_refused(adapted_qwen, act, policy, TOKENS, warm)


@IN_LAYERS
@pytest.mark.parametrize(("options", "then"), [
    pytest.param({}, lambda m: m, id="LoRA-add"), pytest.param({}, merge_adapter, id="LoRA-merge"),
    pytest.param({}, lambda m: m.merge_and_unload(), id="LoRA-unload"),
    pytest.param({"use_dora": True}, lambda m: m, id="DoRA-add"),
    pytest.param({"use_dora": True}, lambda m: m.merge_and_unload(), id="DoRA-unload"),
    pytest.param({"init_lora_weights": "pissa"}, merge_adapter, id="PiSSA-merge"),
    pytest.param({"init_lora_weights": "olora"}, lambda m: m.merge_and_unload(), id="OLoRA-unload"),
    pytest.param({"init_lora_weights": "orthogonal"}, merge_adapter, id="orthogonal-merge"),
])  # fmt: skip
def test_peft_on_an_offloaded_model(options: dict[str, Any], then: Action, policy: Action) -> None:
    """DoRA reads norms of the weights when it is made; PiSSA and OLoRA write the weights as well."""
    pytest.importorskip("peft")
    equal_or_refused(tiny_qwen, lambda model: then(adapted(model, **options)), policy, TOKENS)


# -- torchao -----------------------------------------------------------------------------------------------------------


def quantised(model: Any) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


@WHEN
@POLICIES
def test_torchao_on_an_offloaded_model(policy: Action, warm: bool) -> None:
    pytest.importorskip("torchao")
    equal_or_refused(plain, quantised, policy, rows(), warm)


@POLICIES
def test_torchao_before_the_offload(policy: Action) -> None:
    pytest.importorskip("torchao")
    equal_or_refused(lambda: quantised(plain()), lambda model: model, policy, rows())


def test_a_class_exchanged_under_a_wrapped_forward() -> None:
    """The resident model keeps the forward that was wrapped; which one that was cannot be seen from here."""
    model = plain()
    with torch.no_grad(), headrace.offload(model, all_layers(2)):
        layer: Any = model.layers[1]  # type: ignore[index]
        wrapped = layer.forward
        layer.forward = lambda *args, **kwargs: wrapped(*args, **kwargs) * 2
        layer.__class__ = Negated
        with pytest.raises(ModelChangedError, match=r"Negated was a .* when its forward was wrapped"):
            model(rows())


# -- forward as a method ----------------------------------------------------------------------------------------------


def test_forward_is_a_method_with_its_signature() -> None:
    for policy in (all_layers(1), headrace.Rules([("ALL_MODEL_PARAMS", "prefetch")])):
        model, untouched = plain(), plain()
        handle = headrace.offload(model, policy)
        for module, same in zip(model.modules(), untouched.modules(), strict=True):
            if "forward" in vars(module):
                assert module.forward.__self__ is module
                assert inspect.signature(module.forward) == inspect.signature(same.forward)
                assert next(iter(inspect.signature(module.forward.__func__).parameters)) == "self"
                assert module.forward.__name__ == "forward"
        model.forward = MethodType(model.forward.__func__, model)  # type: ignore[method-assign]
        _require_untouched(model, handle, untouched, rows())
        assert "forward" not in vars(model)


class OwnWeight(Stacked):
    """The root has a unit, too, so that its forward is wrapped twice."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.linspace(1, 2, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.own)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize("policy", [all_layers(1), headrace.Rules([("ALL_MODEL_PARAMS", "prefetch")])])
@pytest.mark.parametrize("prepared", ["before", "after"])
def test_unwrapped_by_accelerate(policy: Any, prepared: str) -> None:
    from accelerate import Accelerator

    def seeded() -> Any:
        model: Any = OwnWeight()
        model.load_state_dict(plain().state_dict(), strict=False)
        return model.eval()

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model, twin, x = seeded(), accelerator.prepare_model(seeded()), rows()
    if prepared == "before":
        model = accelerator.prepare_model(model)
    with torch.no_grad(), headrace.offload(model, policy) as handle:
        if prepared == "after":
            model = accelerator.prepare_model(model)
        assert_same_bits(model(x), twin(x))
        for each in (model, twin):
            accelerator.unwrap_model(each, keep_fp32_wrapper=False)
        for _ in range(2):
            assert_same_bits(model(x), twin(x))
        assert handle.stats().bytes_moved > 0
    with torch.no_grad():
        assert_same_bits(model(x), twin(x))
