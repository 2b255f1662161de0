"""Steps of the fuzzer's programs: what a user does with a model, the same on the offloaded one and on its twin."""

from __future__ import annotations

import contextvars
import copy
import functools
import io
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fuzz_models import VIEWS, VOCAB, InjectedError, Net, Other, Plain, Wrapper, apply, matrices
from headrace.errors import BudgetError

JOIN_S = 60.0  # of the threads that a step starts; the worker's limit finds those that hang


class StuckThreadError(Exception):
    """A thread of a step did not end in time."""


@dataclass
class Raised:
    """In place of an output: what a thread of a step raised."""

    error: BaseException


@dataclass
class Env:
    """One of the two worlds that a program runs in.

    Attributes:
        offload: puts the model under the case's policy and returns the handle; ``None`` for the resident twin.
        kept: what steps leave for later ones, and the judge compares again at the end.
        has_peer: some units are stored on a peer, where an older alias does not write.
    """

    model: Net
    other: Other | None
    mode: str
    dtype: torch.dtype
    offload: Callable[[nn.Module], Any] | None = None
    handle: Any = None
    other_handle: Any = None
    kept: dict[str, Any] = field(default_factory=dict)
    has_peer: bool = False

    def context(self) -> AbstractContextManager[Any]:
        """The grad mode of the case."""
        if self.mode == "inference":
            return torch.inference_mode()
        return torch.no_grad() if self.mode == "no_grad" else torch.enable_grad()

    def input(self, arg: int, rows: int = 4) -> torch.Tensor:
        """One of a few inputs; equal for equal ``arg``."""
        x = _input(self.model.spec.embed, self.model.spec.dim, arg % 4, rows)
        return x if self.model.spec.embed else x.to(self.dtype)

    def weight(self, arg: int) -> tuple[nn.Module, str]:
        """One of the matrices: its module and its name there."""
        places = matrices(self.model)
        return places[arg % len(places)]


@functools.lru_cache(64)
@torch.inference_mode(False)  # kept for later cases, and autograd saves no inference tensor
def _input(tokens: bool, dim: int, arg: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(arg)
    if tokens:
        return torch.randint(0, VOCAB, (rows,), generator=generator)
    return torch.randn(rows, dim, generator=generator)


def forward(env: Env, arg: int) -> Any:
    return env.model(env.input(arg))


def decode(env: Env, arg: int) -> Any:
    return env.model(env.input(arg, rows=1))


def late(env: Env, arg: int) -> Any:
    with _flag(env, late=True):
        return env.model(env.input(arg))


def autocast(env: Env, arg: int) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return env.model(env.input(arg))


def by_hand(env: Env, arg: int) -> Any:
    """The program calls the layers one by one; nobody calls the model."""
    x = torch.ones(3, env.model.spec.dim, dtype=env.dtype)
    for layer in env.model.layer_list():
        x = apply(layer, x, env.model.flags)
    return x


def model_forward(env: Env, arg: int) -> Any:
    return env.model.forward(env.input(arg))


def outer(env: Env, arg: int) -> Any:
    """The model is a part of another one that was made later."""
    return nn.Sequential(env.model)(env.input(arg))


def patch_forward(env: Env, arg: int) -> Any:
    """Somebody wraps the ``forward`` of a module, as tools for tracing do; it stays wrapped after ``remove()``."""
    modules = [module for module in env.model.modules() if isinstance(module, nn.Linear)]
    if modules:
        module = modules[arg % len(modules)]
        plain = module.forward
        module.forward = lambda x: plain(x) * 2
    return env.model(env.input(arg))


def add_hook(env: Env, arg: int) -> Any:
    """A hook of the user's that comes later than the offload, and perhaps before its hooks, reads the weight."""
    modules = [module for module in env.model.modules() if isinstance(module, nn.Linear)]
    if modules:
        module = modules[arg % len(modules)]
        if arg % 2:
            module.register_forward_pre_hook(lambda m, args: (args[0] + m.weight.mean(),), prepend=arg % 3 == 0)
        else:
            module.register_forward_hook(lambda m, args, output: output + m.weight.mean(), prepend=arg % 3 == 0)
        torch.compiler.reset()  # compiled code does not look for hooks that come later
    return env.model(env.input(arg))


def replace_layer(env: Env, arg: int) -> Any:
    layers = env.model.layer_list()
    index = arg % len(layers)
    if getattr(layers[index], "style", "call") == "call":
        torch.manual_seed(arg)
        env.model.put_layer(index, Plain(env.model.spec.dim, env.model.flags, arg).to(env.dtype).eval())
    return env.model(env.input(arg))


def keep_view(env: Env, arg: int) -> Any:
    """A view of a weight is held from outside, and compared when the program ends."""
    module, attr = env.weight(arg)
    env.kept["view"] = list(VIEWS.values())[arg % len(VIEWS)](getattr(module, attr))


def use_view(env: Env, arg: int) -> Any:
    view = env.kept.get("view")
    return None if view is None else view.float().sum()


def read_weight(env: Env, arg: int) -> Any:
    """The program reads a weight between forwards."""
    module, attr = env.weight(arg)
    return getattr(module, attr).detach().clone()


READS: list[Callable[[torch.Tensor], Any]] = [
    lambda w: w.clone(),
    lambda w: w.data.clone(),
    lambda w: w @ torch.ones(w.shape[1], 2, dtype=w.dtype),
    lambda w: w.float().sum(),
    lambda w: w.t()[1:3] * 2,
    lambda w: w.data.chunk(2)[1].contiguous(),
    lambda w: torch.tensor(w.tolist()),
    lambda w: torch.from_numpy(w.detach().float().numpy().copy()),
    lambda w: torch.from_dlpack(w.detach()).clone(),
    lambda w: copy.deepcopy(w.data),
    lambda w: w.untyped_storage().nbytes() >= w.nbytes,  # of several weights, perhaps, or with padding
    # From the weight on: what lies before it in its storage is not the same after every step.
    lambda w: w.data.untyped_storage().tolist()[w.storage_offset() * w.element_size() :][:64],
]


def read_any(env: Env, arg: int) -> Any:
    """A weight is read in one of many ways."""
    module, attr = env.weight(arg)
    return READS[arg // 7 % len(READS)](getattr(module, attr))


def keep_data(env: Env, arg: int) -> None:
    """An alias is taken now, and read by a later step."""
    module, attr = env.weight(arg)
    env.kept["data"] = getattr(module, attr).data


def use_data(env: Env, arg: int) -> Any:
    alias = env.kept.get("data")
    return None if alias is None else alias.clone()


def compile_model(env: Env, arg: int) -> Any:
    """From here on what calls the model, in whichever step, runs compiled code."""
    env.model.compile(backend="eager", fullgraph=arg % 3 == 0)
    return env.model(env.input(arg))


def compile_layers(env: Env, arg: int) -> Any:
    """The same of each layer by itself, or of every second one."""
    # Where tracing of a compiled model was refused, torch compiles no frame below it, and calls that an error.
    fullgraph = arg % 3 == 0 and env.model._compiled_call_impl is None
    for layer in env.model.layer_list()[:: 1 + arg % 2]:
        layer.compile(backend="eager", fullgraph=fullgraph)
    return env.model(env.input(arg))


def compiled_function(env: Env, arg: int) -> Any:
    """What is compiled calls the model, and goes on behind it."""
    step = torch.compile(lambda x: _main_output(env.model(x)) + 1, backend="eager", fullgraph=arg % 3 == 0)
    return step(env.input(arg))


def compile_off(env: Env, arg: int) -> Any:
    for module in env.model.modules():
        module._compiled_call_impl = None
    return env.model(env.input(arg))


def inductor(env: Env, arg: int) -> None:
    """One compiled forward that rounds as it likes; what it leaves is for later steps to find."""
    torch.compile(env.model, backend="inductor")(env.input(arg))


def linear_outside(env: Env, arg: int) -> Any:
    module, attr = env.weight(arg)
    weight = getattr(module, attr).float()
    return F.linear(torch.ones(2, weight.shape[1]), weight)


def one_layer(env: Env, arg: int) -> Any:
    """A layer by itself: called, or its ``forward``."""
    layers = env.model.layer_list()
    layer = layers[arg % len(layers)]
    if getattr(layer, "style", "call") != "call":
        return None
    x = torch.ones(3, env.model.spec.dim, dtype=env.dtype)
    return layer(x) if arg % 3 else layer.forward(x)


def write_data(env: Env, arg: int) -> None:
    module, attr = env.weight(arg)
    getattr(module, attr).data += 1


def write_add(env: Env, arg: int) -> None:
    module, attr = env.weight(arg)
    with torch.no_grad():
        getattr(module, attr).add_(1)


def write_set_data(env: Env, arg: int) -> None:
    module, attr = env.weight(arg)
    weight = getattr(module, attr)
    weight.data = weight.data * 2


def write_copy(env: Env, arg: int) -> None:
    module, attr = env.weight(arg)
    with torch.no_grad():
        getattr(module, attr)[1:3].copy_(torch.ones(()))


def write_inside(env: Env, arg: int) -> Any:
    with _flag(env, write=True):
        return env.model(env.input(arg))


def replace_parameter(env: Env, arg: int) -> None:
    module, attr = env.weight(arg)
    old = getattr(module, attr)
    if old.is_floating_point():
        new = torch.linspace(-1, 1, old.numel(), dtype=old.dtype).view(old.shape)
        setattr(module, attr, nn.Parameter(new))


def delete_parameter(env: Env, arg: int) -> None:
    """A bias goes, or else a weight, which makes the next forward fail on both sides."""
    linears = [module for module in env.model.modules() if isinstance(module, nn.Linear)]
    if linears:
        module = linears[arg % len(linears)]
        if arg % 5:
            module.bias = None
        else:
            del module.weight


def unwrap(env: Env, arg: int) -> None:
    for index, layer in enumerate(env.model.layer_list()):
        if isinstance(layer, Wrapper):
            env.model.put_layer(index, layer.inner)
            return


def swap_layers(env: Env, arg: int) -> None:
    layers = env.model.layer_list()
    one, two = arg % len(layers), (arg // 7) % len(layers)
    env.model.put_layer(one, layers[two])
    env.model.put_layer(two, layers[one])


def two_threads(env: Env, arg: int) -> Any:
    """Two threads call the model at once, each twice."""
    results: list[Any] = [None, None]

    def work(index: int) -> None:
        try:
            with env.context():
                results[index] = [env.model(env.input(arg + index + again)) for again in range(2)]
        except BaseException as error:
            results[index] = Raised(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4 if arg % 2 else before)
    try:
        _run_threads([functools.partial(work, index) for index in range(2)])
    finally:
        sys.setswitchinterval(before)
    return results


def other_thread(env: Env, arg: int) -> Any:
    """One forward in a thread that ends behind it."""
    results: list[Any] = []

    def work() -> None:
        try:
            with env.context():
                results.append(env.model(env.input(arg)))
        except BaseException as error:
            results.append(Raised(error))

    _run_threads([work])
    return results


def _run_threads(works: list[Callable[[], None]]) -> None:
    contexts = [contextvars.copy_context() for _ in works]  # with the options of the compiler
    threads = [
        threading.Thread(target=context.run, args=(work,), daemon=True)
        for context, work in zip(contexts, works, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        if thread.is_alive():
            raise StuckThreadError(f"a forward in a thread did not end in {JOIN_S} s")


def raise_inside(env: Env, arg: int) -> Any:
    """An exception inside a layer, a forward behind it."""
    kind = KeyboardInterrupt if arg % 2 else InjectedError
    try:
        with _flag(env, error=kind, error_after=bool(arg // 2 % 2)):
            first = env.model(env.input(arg))
    except (KeyboardInterrupt, InjectedError) as error:
        first = type(error).__name__
    return first, env.model(env.input(arg + 1))


def backward(env: Env, arg: int) -> Any:
    """Gradients of the weights and the input; must be equal, or an error."""
    return _gradients(env, arg, between=False)


def late_backward(env: Env, arg: int) -> Any:
    """The same with another forward between the two passes."""
    return _gradients(env, arg, between=True)


def _gradients(env: Env, arg: int, between: bool) -> Any:
    if env.mode == "inference":
        return None
    with torch.enable_grad():
        x = env.input(arg)
        x = x.clone().requires_grad_() if x.is_floating_point() else x
        output = _main_output(env.model(x))
        if between:
            env.model(env.input(arg + 1))
        env.model.zero_grad(set_to_none=True)
        try:
            output.float().sum().backward()
            gradients = [None if p.grad is None else p.grad.clone() for p in env.model.parameters()]
        finally:
            env.model.zero_grad(set_to_none=True)
        return gradients, x.grad


def _main_output(output: Any) -> torch.Tensor:
    return output["out"] if isinstance(output, dict) else output


def state_dict(env: Env, arg: int) -> Any:
    """Compared by the judge; weights that the program wrote may be left out there."""
    env.model.state_dict()


def load_state_dict(env: Env, arg: int) -> None:
    state = {name: value.clone() for name, value in env.model.state_dict().items()}
    name = sorted(state)[arg % len(state)]
    state[name] = state[name] + 1
    env.model.load_state_dict(state)


def parameters_sum(env: Env, arg: int) -> Any:
    """A program walks the parameters, as one that counts norms does."""
    return [parameter.detach().double().sum() for parameter in env.model.parameters()]


def deep_copy(env: Env, arg: int) -> Any:
    return copy.deepcopy(env.model)(env.input(arg))


def shallow_copy(env: Env, arg: int) -> Any:
    return copy.copy(env.model)(env.input(arg))


def save_whole(env: Env, arg: int) -> Any:
    """``torch.save`` of a layer's weights as tensors, and of a part of the model's state."""
    module, attr = env.weight(arg)
    buffer = io.BytesIO()
    torch.save({"weight": getattr(module, attr)}, buffer)
    buffer.seek(0)
    return torch.load(buffer)["weight"].detach()


def convert(env: Env, arg: int) -> None:
    dtype = [torch.float16, torch.bfloat16, torch.float64, torch.float32][arg % 4]
    env.model.to(dtype)
    env.dtype = dtype


def to_cpu(env: Env, arg: int) -> None:
    env.model.to("cpu")


def vmap(env: Env, arg: int) -> Any:
    x = torch.stack([env.input(arg), env.input(arg + 1)])
    return torch.func.vmap(lambda one: _main_output(env.model(one)))(x)


def functional_call(env: Env, arg: int) -> Any:
    module, attr = env.weight(arg)
    name = next(name for name, found in env.model.named_modules() if found is module)
    value = torch.full_like(getattr(module, attr), 0.01).detach()
    return torch.func.functional_call(env.model, {f"{name}.{attr}".lstrip("."): value}, (env.input(arg),))


def fx_trace(env: Env, arg: int) -> Any:
    return torch.fx.symbolic_trace(env.model)(env.input(arg))


def jit_trace(env: Env, arg: int) -> Any:
    x = env.input(arg)
    return torch.jit.trace(env.model, (x,), check_trace=False, strict=False)(env.input(arg + 1))


def export(env: Env, arg: int) -> Any:
    return torch.export.export(env.model, (env.input(arg),), strict=bool(arg % 2)).module()(env.input(arg + 1))


def export_layer(env: Env, arg: int) -> Any:
    """One of the layers, which somebody exports by itself."""
    layer = env.model.layer_list()[arg % len(env.model.layer_list())]
    if getattr(layer, "style", "call") != "call":
        return None
    x = torch.ones(3, env.model.spec.dim, dtype=env.dtype)
    return torch.export.export(layer, (x,), strict=bool(arg // 7 % 2)).module()(x)


class Doubled(nn.Linear):
    """What a module of another class becomes."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def exchange_class(env: Env, arg: int) -> Any:
    modules = [module for module in env.model.modules() if type(module) is nn.Linear]
    if modules:
        modules[arg % len(modules)].__class__ = Doubled
    return env.model(env.input(arg))


def patch_class(env: Env, arg: int) -> Any:
    """The class of all linear layers or of one layer has another ``forward`` for a while, as with faster kernels.

    Torch guards on the ``forward`` of a class in some places only, more of them where hooks are: code is compiled anew.
    """
    layers = env.model.layer_list()
    layer = layers[arg % len(layers)]
    kind = nn.Linear if arg % 2 or getattr(layer, "style", "call") != "call" else type(layer)
    plain = kind.forward
    kind.forward = lambda self, *args, **kwargs: _halved(plain(self, *args, **kwargs))
    torch.compiler.reset()
    try:
        first = env.model(env.input(arg))
    finally:
        kind.forward = plain
        torch.compiler.reset()
    return first, env.model(env.input(arg + 1))


def _halved(output: Any) -> Any:
    return output * 0.5 if isinstance(output, torch.Tensor) else output


def alias(env: Env, arg: int) -> Any:
    """A weight is written through an alias that is older than the offload."""
    remove(env, arg)
    module, attr = env.weight(arg)
    old = getattr(module, attr).detach()
    old = old.numpy() if arg % 2 and old.dtype == torch.float32 else old
    if env.offload is not None:
        env.handle = env.offload(env.model)
    if arg % 3:
        env.model(env.input(arg))
    if not env.has_peer:
        with torch.no_grad():
            old[1:3] *= 2
    return env.model(env.input(arg + 1))


def numpy_alias(env: Env, arg: int) -> Any:
    """Reads in ways that ask for the pointer."""
    module, attr = env.weight(arg)
    weight = getattr(module, attr).detach()
    if weight.dtype != torch.float32:
        return None
    reads = [lambda w: torch.from_numpy(w.numpy().copy()), lambda w: torch.tensor(w.tolist()), copy.deepcopy]
    return reads[arg % 3](weight)


def other_forward(env: Env, arg: int) -> Any:
    if env.other is None:
        return None
    return env.other(torch.ones(2, env.model.spec.dim, dtype=env.other.first.weight.dtype))


def other_offload(env: Env, arg: int) -> Any:
    """The other model is offloaded beside the first; they share a weight."""
    if env.other is not None and env.offload is not None and env.other_handle is None:
        env.other_handle = env.offload(env.other)
    return other_forward(env, arg)


def other_remove(env: Env, arg: int) -> Any:
    if env.other_handle is not None:
        env.other_handle.remove()
        env.other_handle = None
    return other_forward(env, arg)


def again(env: Env, arg: int) -> None:
    """``remove()`` and ``offload()`` in the middle."""
    remove(env, arg)
    if env.offload is not None:
        env.handle = env.offload(env.model)


def remove(env: Env, arg: int) -> None:
    if env.handle is not None:
        env.handle.remove()
        env.handle = None


def park(env: Env, arg: int) -> Any:
    """Parked and resumed, by the program or by the forward that follows."""
    if (park := getattr(env.handle, "park", None)) is not None:
        park(resume="auto", graphs_released=True)
        if arg % 2:
            env.handle.resume()
    return env.model(env.input(arg))


def resize(env: Env, arg: int) -> Any:
    """Another budget, of a parked offload too."""
    if (resize := getattr(env.handle, "resize", None)) is not None:
        if arg % 3 == 0:
            env.handle.park(graphs_released=True)
        try:
            with suppress(BudgetError):  # too small for this model: nothing has changed
                resize(env.handle.plan.weight_bytes * (2 + arg % 5) // 5, graphs_released=True)
        finally:
            env.handle.resume()
    return env.model(env.input(arg))


def update(env: Env, arg: int) -> None:
    """One of the matrices has new values."""
    module, attr = env.weight(arg)
    weight = getattr(module, attr)
    value = torch.randn(weight.shape, generator=torch.Generator().manual_seed(arg)).mul(0.1).to(weight.dtype)
    names = [name for name, parameter in env.model.named_parameters() if parameter is weight]
    if (update := getattr(env.handle, "update", None)) is not None:
        update({names[0]: value})
    else:
        with torch.no_grad():
            weight.copy_(value)


def remove_between(env: Env, arg: int) -> Any:
    """An output from before ``remove()`` is read after it."""
    output = env.model(env.input(arg))
    again(env, arg)
    return output


@contextmanager
def _flag(env: Env, **flags: Any) -> Any:
    for name, value in flags.items():
        setattr(env.model.flags, name, value)
    try:
        yield
    finally:
        for name in flags:
            setattr(env.model.flags, name, getattr(type(env.model.flags), name))


@dataclass(frozen=True)
class Kind:
    """A step as the generator and the judge see it.

    Attributes:
        changes: the model is another one behind it, so a refusal of it may leave the old or the new one.
        weight: how often it is drawn.
        own_errors: matches errors of torch that count as a refusal of this step.
    """

    run: Callable[[Env, int], Any]
    changes: bool = False
    weight: float = 1.0
    own_errors: str | None = None


# torch itself refuses these of the offloaded model, for want of a pointer and by a version counter.
_NO_POINTER = "Cannot access data pointer"
_AUTOGRAD = "modified by an inplace operation|has been modified inplace"
_KINDS = [
    Kind(forward, weight=8), Kind(decode, weight=3), Kind(late, weight=2), Kind(autocast), Kind(by_hand),
    Kind(model_forward, weight=0.7), Kind(outer, weight=0.7), Kind(patch_forward, changes=True, weight=0.5),
    Kind(add_hook, changes=True, weight=0.7), Kind(replace_layer, changes=True, weight=0.7), Kind(keep_view),
    Kind(use_view), Kind(read_any, weight=2, own_errors=_NO_POINTER), Kind(keep_data), Kind(use_data),
    Kind(compile_model, weight=1.5),
    Kind(compile_layers), Kind(compiled_function), Kind(compile_off, weight=0.5), Kind(inductor, weight=0.1),
    Kind(read_weight), Kind(linear_outside), Kind(one_layer), Kind(write_data, changes=True),
    Kind(write_add, changes=True), Kind(write_set_data, changes=True, weight=0.7),
    Kind(write_copy, changes=True, weight=0.7), Kind(write_inside, changes=True, weight=0.7),
    Kind(replace_parameter, changes=True), Kind(delete_parameter, changes=True, weight=0.7), Kind(unwrap, changes=True),
    Kind(swap_layers, changes=True, weight=0.5), Kind(two_threads, weight=1.5), Kind(other_thread, weight=0.7),
    Kind(raise_inside, weight=1.5), Kind(backward, own_errors=_AUTOGRAD), Kind(late_backward, own_errors=_AUTOGRAD),
    Kind(state_dict, weight=2), Kind(load_state_dict, changes=True, weight=0.5), Kind(parameters_sum, weight=0.5),
    Kind(deep_copy, weight=0.6), Kind(shallow_copy, weight=0.3), Kind(save_whole, weight=0.4),
    Kind(convert, changes=True, weight=0.6), Kind(to_cpu, changes=True, weight=0.5), Kind(vmap, weight=0.6),
    Kind(functional_call, weight=0.6), Kind(fx_trace, weight=0.3), Kind(jit_trace, weight=0.3),
    Kind(export, weight=0.4), Kind(export_layer, weight=0.4), Kind(exchange_class, changes=True), Kind(patch_class),
    Kind(alias, changes=True), Kind(numpy_alias), Kind(other_forward), Kind(other_offload),
    Kind(other_remove, weight=0.5), Kind(again, weight=1.5), Kind(remove, weight=0.3), Kind(remove_between, weight=0.7),
    Kind(park, weight=1.5), Kind(resize), Kind(update, changes=True),
]  # fmt: skip
STEPS = {kind.run.__name__: kind for kind in _KINDS}
OTHERS = {"other_forward", "other_offload", "other_remove"}
# Not for layers that change in a forward: threads would race on the twin too, tracers leave their own values there, and
# what they keep of a weight that was used outside of its module is a copy.
NOT_STATEFUL = {"two_threads", "alias", "export", "export_layer", "fx_trace", "jit_trace", "vmap", "functional_call"}
