"""Models of the fuzzer: layers with one trap each, and nets made of them by a :class:`ModelSpec`.

The resident twin is built a second time from the same spec, and not copied: a closure over a weight would go on reading
the first model's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import headrace

VOCAB = 160
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class InjectedError(ValueError):
    """What a layer raises when it is told to."""


class Flags(threading.local):
    """Switches that all layers of a net see, and what they hand out beside the hidden state; by thread."""

    late: bool = False
    write: bool = False
    error: type[BaseException] | None = None
    error_after: bool = False
    keep: bool = True

    def __init__(self) -> None:
        self.extras: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Flags:
        return Flags()


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda w: w,
    "rows": lambda w: w[:3],
    "expand": lambda w: w[:1].expand(4, -1),
    "t": lambda w: w.t(),
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "row": lambda w: w[5],
    "chunk": lambda w: w.chunk(2)[1],
}


@dataclass
class Parts:
    """An output that the pytree library takes for a leaf."""

    hidden: torch.Tensor
    weight: torch.Tensor


class Layer(nn.Module):
    """``style`` says how whoever holds the layer calls it: see :func:`apply`."""

    style = "call"
    stateful = False

    def __init__(self, dim: int, flags: Flags, option: int) -> None:
        super().__init__()
        self.flags = flags
        self.option = option
        self.build(dim)

    def build(self, dim: int) -> None:
        self.lin = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> Any:
        return x + torch.tanh(self.lin(x))


class Plain(Layer):
    """A matrix product and a residual."""


class Norm(Layer):
    def build(self, dim: int) -> None:
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Quant(Layer):
    """int8 and scales as buffers or parameters; the arithmetic reads the weight alone."""

    def build(self, dim: int) -> None:
        self.weight = nn.Parameter(torch.randint(-99, 99, (3 * dim, dim), dtype=torch.int8), requires_grad=False)
        self.register_buffer("scale", torch.rand(dim, 1) / 999)
        self.zero = nn.Parameter(torch.randint(-9, 9, (3 * dim, 1), dtype=torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = (self.weight - self.zero).float().unflatten(0, (3, -1)).sum(0) * self.scale
        return x + F.linear(x, whole.to(x.dtype))


class Mixed(Layer):
    """A bfloat16 product inside, whatever the model is."""

    def build(self, dim: int) -> None:
        self.lin = nn.Linear(dim, 2 * dim, dtype=torch.bfloat16)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.lin(x.to(self.lin.weight.dtype))).to(x.dtype))


class InParameterList(Layer):
    def build(self, dim: int) -> None:
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(dim, dim) / 16) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + torch.tanh(x @ weight)
        return x


class InParameterDict(Layer):
    def build(self, dim: int) -> None:
        self.weights = nn.ParameterDict({"one": torch.randn(dim, dim) / 16, "two": torch.randn(dim, dim) / 16})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(x @ self.weights["one"])
        return x + F.linear(x, self.weights["two"]) if self.option % 2 else x


class Namespace(Layer):
    """A bare module that holds weights and is never called."""

    def build(self, dim: int) -> None:
        self.ns = nn.Module()
        self.ns.weight = nn.Parameter(torch.randn(dim, dim) / 16)
        self.ns.sub = nn.Module()
        self.ns.sub.weight = nn.Parameter(torch.randn(dim, dim) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.ns.weight) @ self.ns.sub.weight


class ReadsChild(Layer):
    """Reads the weight of a child, and calls the child too if ``option`` is odd."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.lin.weight)
        return x + torch.tanh(y + self.lin(x) if self.option % 2 else y)


class ReadsGrandchild(Layer):
    """The child has a forward that is not called in every case; its child's weight is read from two levels up."""

    def build(self, dim: int) -> None:
        self.block = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.block[0]
        return x + (self.block(x) if self.option % 3 else torch.tanh(F.linear(x, first.weight, first.bias)))


class Late(Layer):
    """Reads a child's weight in some later forward only."""

    def build(self, dim: int) -> None:
        self.lin, self.rare = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.lin(x))
        if self.flags.late:
            x = x + (F.linear(x, self.rare.weight) if self.option % 2 else self.rare(x))
        return x


class Decode(Layer):
    """The branch for one token takes the weights apart, as absorbed attention does."""

    def build(self, dim: int) -> None:
        self.kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return x + (x @ self.kv.weight.view(-1, x.shape[-1])[: x.shape[-1]].t()) @ self.out.weight
        return x + self.out(torch.tanh(self.kv(x)))


class Returns(Layer):
    """Hands out its weight or a view of it in a tuple, a dict or a dataclass."""

    style = "parts"

    def forward(self, x: torch.Tensor) -> Any:
        view = list(VIEWS.values())[self.option % len(VIEWS)](self.lin.weight)
        x = x + torch.tanh(self.lin(x))
        kind = self.option // len(VIEWS) % 4
        if kind == 0:
            return x, view
        if kind == 1:
            return {"hidden": x, "weight": [view]}
        return Parts(x, view) if kind == 2 else (x, (view, {"again": self.lin.bias}))


class Getter(Layer):
    """A child whose forward returns its own weight; the layer multiplies with it."""

    class Holder(nn.Module):
        def __init__(self, dim: int, option: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(dim, dim) / 16)
            self.option = option

        def forward(self) -> torch.Tensor:
            return [self.weight, self.weight.t(), self.weight[:], self.weight.data][self.option % 4]

    def build(self, dim: int) -> None:
        self.holder, self.lin = Getter.Holder(dim, self.option), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.holder()
        return x + torch.tanh(self.lin(x)) @ weight


class Keeps(Layer):
    """Keeps a view of its weight, and reads that in the next forward."""

    stateful = True
    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.last is not None:
            x = x + torch.tanh(x @ self.last)
        if self.flags.keep:
            self.last = self.lin.weight.t() if self.option % 2 else self.lin.weight.detach()[:, :]
        return x + torch.tanh(self.lin(x))


class Cached(Layer):
    """Keeps a view of its weight from the beginning, as fused projections do."""

    def build(self, dim: int) -> None:
        self.weight = nn.Parameter(torch.randn(2 * dim, dim) / 16)
        one, two = self.weight.data.chunk(2) if self.option % 2 else self.weight.detach().split(dim)
        self.views = [one, two.t()] if self.option % 3 else (one, two.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.views[0]) @ self.views[1] + F.linear(x, self.weight)[..., : x.shape[-1]]


class Generator(Layer):
    """Its forward is a generator: its body runs after the call has returned."""

    style = "generator"

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        x = x + torch.tanh(self.lin(x))
        yield x
        yield x + F.linear(x, self.lin.weight)


class Closure(Layer):
    """Returns a function that reads the weight later."""

    style = "closure"

    def forward(self, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        weight, x = self.lin.weight, x + torch.tanh(self.lin(x))
        return (lambda y: y + F.linear(x, weight)) if self.option % 2 else (lambda y: y + self.lin(x))


class BuiltClosure(Layer):
    """Reads its weight through a function made when it was built."""

    def build(self, dim: int) -> None:
        self.lin = nn.Linear(dim, dim)
        weight = self.lin.weight if self.option % 2 else self.lin.weight.data
        self.project = lambda x: F.linear(x, weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.project(x)) + (self.lin(x) if self.option % 3 else 0)


class EncodeDecode(Layer):
    """Has methods and no forward."""

    style = "codec"
    forward = nn.Module.forward  # type: ignore[assignment]

    def build(self, dim: int) -> None:
        self.enc, self.w = nn.Linear(dim, dim), nn.Parameter(torch.randn(dim, dim) / 16)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.enc(x))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


class Direct(Layer):
    """Its ``forward`` is called, not the module."""

    style = "direct"


class DirectChild(Layer):
    """Calls its child's ``forward``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.lin.forward(x))


class ByHand(nn.ModuleList):
    """``[attn, ff]``, called one by one by whoever holds it."""

    style = "each"
    stateful = False

    def __init__(self, dim: int, flags: Flags, option: int) -> None:
        super().__init__([Plain(dim, flags, option), Norm(dim, flags, option)])


class DictByHand(nn.ModuleDict):
    style = "each_value"
    stateful = False

    def __init__(self, dim: int, flags: Flags, option: int) -> None:
        super().__init__({"attn": Plain(dim, flags, option), "ff": ReadsChild(dim, flags, option)})


class Writer(Layer):
    """Writes its weight inside its forward when told to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.flags.write:
            with torch.no_grad():
                if self.option % 3 == 0:
                    self.lin.weight.data += 0.01
                elif self.option % 3 == 1:
                    self.lin.weight.add_(0.01)
                else:
                    self.lin.weight.data = self.lin.weight.data * 1.5
        return x + torch.tanh(self.lin(x))


class Raiser(Layer):
    """Raises before or behind its product when told to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.flags.error is not None and not self.flags.error_after:
            raise self.flags.error("injected")
        x = x + torch.tanh(self.lin(x))
        if self.flags.error is not None:
            raise self.flags.error("injected")
        return x


class Wrapper(Layer):
    """Around a layer; a program may take it away."""

    def build(self, dim: int) -> None:
        self.inner = Plain(dim, self.flags, self.option)
        self.scale = nn.Parameter(torch.rand(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (1 + self.scale)


class Hooked(Layer):
    """A user's own hooks read the weight before and after the module runs."""

    def build(self, dim: int) -> None:
        self.lin = nn.Linear(dim, dim)
        self.lin.register_forward_pre_hook(lambda module, args: (args[0] + module.weight[0],))
        self.register_forward_hook(lambda module, args, output: output + module.lin.weight.sum(0).to(output.dtype))
        if self.option % 2:
            self.register_forward_pre_hook(lambda module, args: (args[0] @ module.lin.weight,))


class Buffers(Layer):
    """A large buffer, one that is not saved, and one that is written in every forward."""

    def build(self, dim: int) -> None:
        self.lin = nn.Linear(dim, dim)
        self.register_buffer("table", torch.randn(dim, dim) / 16)
        self.register_buffer("temporary", torch.rand(dim), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.lin(x)) @ self.table.to(x.dtype) + self.temporary.to(x.dtype)


class Counts(Layer):
    """Writes a small buffer in every forward, as running statistics do."""

    stateful = True

    def build(self, dim: int) -> None:
        self.lin = nn.Linear(dim, dim)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + torch.tanh(self.lin(x)) * self.count.to(x.dtype)


class Parametrized(Layer):
    """The weight is computed from others on every access."""

    def build(self, dim: int) -> None:
        self.lin = nn.utils.parametrizations.weight_norm(nn.Linear(dim, dim))


class Experts(Layer):
    """Rows of one three-dimensional weight, chosen by the data."""

    def build(self, dim: int) -> None:
        self.gate, self.up = nn.Linear(dim, 3), nn.Parameter(torch.randn(3, dim, dim) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).argmax(-1)
        return x + torch.einsum("bi,bio->bo", x, self.up[chosen])


class Uneven(Layer):
    """Weights that are transposed, strided, or start in the middle of a storage."""

    def build(self, dim: int) -> None:
        self.one = nn.Parameter(torch.randn(dim, 2 * dim).t()[::2] / 16)
        self.two = nn.Parameter((torch.randn(dim * dim + 7) / 16)[7:].view(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.one) @ self.two


class Loops(Layer):
    """Runs a child several times in one forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 + self.option % 3):
            x = torch.tanh(self.lin(x))
        return x


class Encoder(Layer):
    """torch's own layer: in inference its fast path reads the weights of its children without calling them."""

    def build(self, dim: int) -> None:
        self.block = nn.TransformerEncoderLayer(dim, 4, dim, dropout=0.0, batch_first=True, norm_first=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x.unsqueeze(0)).squeeze(0)


class Recurrent(Layer):
    """torch's GRU keeps a list of its weights beside the Parameters."""

    def build(self, dim: int) -> None:
        self.gru = nn.GRU(dim, dim, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gru(x.unsqueeze(0))[0].squeeze(0)


class Checkpointed(Layer):
    """Activation checkpointing runs the body again in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.body, x, use_reentrant=False)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lin(x)) @ self.lin.weight


class Calls(Layer):
    """Calls another layer's child from outside: the first layer lends its product to the second."""

    def build(self, dim: int) -> None:
        self.lender, self.lin = Plain(dim, self.flags, 0), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lent = self.lender.lin if self.option % 2 else functools.partial(F.linear, weight=self.lender.lin.weight)
        return self.lender(x) + torch.tanh(lent(self.lin(x)))


class Routed(Layer):
    """Experts that it reads by rows, so that a cache may hold them."""

    def build(self, dim: int) -> None:
        self.gate = nn.Linear(dim, 6)
        self.bank = nn.Parameter(torch.randn(6, dim, dim) / 16)
        self.scale = nn.Parameter(torch.rand(6, 3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(x, *headrace.expert_rows(self, self.gate(x).topk(2).indices))

    def mix(self, x: torch.Tensor, experts: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        """``x``: [tokens, dim]; ``rows``: [tokens, experts of each]."""
        return (torch.einsum("bi,bkio->bko", x, experts.bank[rows]) * experts.scale[rows].sum(2)).sum(1)


class RoutedOddly(Routed):
    """Asks twice, reads its experts beside the rows, runs others between, or asks for those of a child."""

    def build(self, dim: int) -> None:
        super().build(dim)
        self.inner = Routed(dim, self.flags, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = self.gate(x).topk(2).indices
        kind = self.option % 5
        if kind == 0:
            one, two = (headrace.expert_rows(self, part) for part in (ids[:, :1], ids[:, 1:]))
            return x + self.mix(x, *one) + self.mix(x, *two)
        if kind == 1:
            return x + self.mix(x, *headrace.expert_rows(self, ids)) @ self.bank[self.option % 6]
        if kind == 2:
            found = headrace.expert_rows(self, ids)
            return self.inner(x) + self.mix(x, *found)
        if kind == 3:
            return x + self.inner.mix(x, *headrace.expert_rows(self.inner, ids))
        return self.inner(x) + self.mix(x, *headrace.expert_rows(self, ids)) + self.inner(-x)


SAFE = [Plain, Norm, Quant, Mixed, Buffers, Experts, Uneven, Loops]
TRAPS = [
    InParameterList, InParameterDict, Namespace, ReadsChild, ReadsGrandchild, Late, Decode, Returns, Getter, Keeps,
    Cached, Generator, Closure, BuiltClosure, EncodeDecode, Direct, DirectChild, ByHand, DictByHand, Writer, Raiser,
    Wrapper, Hooked, Counts, Parametrized, Encoder, Recurrent, Checkpointed, Calls,
]  # fmt: skip
ROUTED = [Routed, RoutedOddly]
LAYERS: dict[str, Callable[..., nn.Module]] = {kind.__name__: kind for kind in (*SAFE, *TRAPS, *ROUTED)}


def apply(layer: nn.Module, x: torch.Tensor, flags: Flags) -> torch.Tensor:
    """Run ``layer`` in the way that it is meant to be used; what it hands out goes to ``flags.extras``."""
    style = getattr(layer, "style", "call")
    if style == "direct":
        return layer.forward(x)
    if style == "codec":
        return x + layer.decode(layer.encode(x))
    if style == "each":
        for part in layer:
            x = part(x)
        return x
    if style == "each_value":
        return layer["ff"](layer["attn"](x))
    result = layer(x)
    if style == "generator":
        *_, x = result
        return x
    if style == "closure":
        return result(x)
    if style == "parts":
        flags.extras.append(result)
        return _hidden(result)
    return result


def _hidden(result: Any) -> torch.Tensor:
    if isinstance(result, dict):
        return result["hidden"]
    return result.hidden if isinstance(result, Parts) else result[0]


class Caller(nn.Module):
    """Makes a layer of any style one that a ``Sequential`` can call."""

    def __init__(self, inner: nn.Module, flags: Flags) -> None:
        super().__init__()
        self.inner = inner
        self.flags = flags

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return apply(self.inner, x, self.flags)


@dataclass(frozen=True)
class ModelSpec:
    """What a net is made of.

    Attributes:
        layers: kind and option of each.
        container: ``list``, ``dict``, ``sequential``, ``deep`` (``model.layers``) or ``attributes``.
        shared: pairs of layers; the second is the same module object as the first.
        ties: pairs of layers; a matrix of the second is the same Parameter as one of the first.
        embed: tokens instead of hidden states come in.
        head: ``none``, ``own``, ``tied`` (a module with the embedding's Parameter) or ``functional`` (no module).
        other: ``none``, or what a second model shares with this one: ``parameter`` or ``module``.
    """

    layers: tuple[tuple[str, int], ...]
    dim: int = 128
    dtype: str = "float32"
    container: str = "list"
    shared: tuple[tuple[int, int], ...] = ()
    ties: tuple[tuple[int, int], ...] = ()
    embed: bool = False
    head: str = "none"
    other: str = "none"
    seed: int = 0
    order: tuple[int, ...] = field(default=())


class Net(nn.Module):
    """The layers in a container, between an embedding and a head."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec, self.flags = spec, Flags()
        if spec.embed:
            self.embed = nn.Embedding(VOCAB, spec.dim)
        layers = [LAYERS[kind](spec.dim, self.flags, option) for kind, option in spec.layers]
        for one, two in spec.shared:
            if max(one, two) < len(layers):
                layers[two] = layers[one]
        self._hold(layers)
        if spec.head in ("own", "tied"):
            self.head = nn.Linear(spec.dim, VOCAB, bias=False)
        if spec.head == "tied" and spec.embed:
            self.head.weight = self.embed.weight

    def _hold(self, layers: list[nn.Module]) -> None:
        container = self.spec.container
        if container == "dict":
            self.layers = nn.ModuleDict({f"layer{index}": layer for index, layer in enumerate(layers)})
        elif container == "sequential":
            plain = [getattr(layer, "style", "call") == "call" for layer in layers]
            fit = [x if ok else Caller(x, self.flags) for x, ok in zip(layers, plain, strict=True)]
            self.layers = nn.Sequential(*fit)
        elif container == "deep":
            self.model = nn.Module()
            self.model.layers = nn.ModuleList(layers)
        elif container == "attributes":
            self.names = [f"layer{index}" for index in range(len(layers))]
            for name, layer in zip(self.names, layers, strict=True):
                setattr(self, name, layer)
        else:
            self.layers = nn.ModuleList(layers)

    def layer_list(self) -> list[nn.Module]:
        """The layers now."""
        if self.spec.container == "attributes":
            return [getattr(self, name) for name in self.names]
        if self.spec.container == "deep":
            return list(self.model.layers)
        return list(self.layers.values() if self.spec.container == "dict" else self.layers)

    def put_layer(self, index: int, layer: nn.Module) -> None:
        """Put another module in place of a layer."""
        if self.spec.container == "attributes":
            setattr(self, self.names[index], layer)
        elif self.spec.container == "dict":
            self.layers[f"layer{index}"] = layer
        else:
            (self.model.layers if self.spec.container == "deep" else self.layers)[index] = layer

    def forward(self, x: torch.Tensor) -> Any:
        self.flags.extras = extras = []
        if self.spec.embed:
            x = self.embed(x)
        if self.spec.container == "sequential" and not self.spec.order:
            x = self.layers(x)
        else:
            layers = self.layer_list()
            for index in self.spec.order or range(len(layers)):
                x = apply(layers[index % len(layers)], x, self.flags)
        if self.spec.head in ("own", "tied"):
            x = self.head(x)
        elif self.spec.head == "functional" and self.spec.embed:
            x = F.linear(x, self.embed.weight)
        return {"out": x, "extras": tuple(extras)} if extras else x


class Other(nn.Module):
    """A second model that shares a weight with the first."""

    def __init__(self, net: Net, kind: str) -> None:
        super().__init__()
        dim = net.spec.dim
        self.first = nn.Linear(dim, dim)
        module, attr = matrices(net)[0]
        if kind == "module":
            self.shared = module
        else:
            self.holder = nn.Module()
            self.holder.weight = getattr(module, attr)
        self.kind, self.attr = kind, attr

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = getattr(self.shared if self.kind == "module" else self.holder, self.attr)
        return F.linear(torch.tanh(self.first(x)), weight.to(x.dtype))


def matrices(root: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where the two-dimensional parameters are, by module and attribute; each Parameter once."""
    seen: dict[int, tuple[nn.Module, str]] = {}
    for module in root.modules():
        for attr, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 2 and min(parameter.shape) > 1:
                seen.setdefault(id(parameter), (module, attr))
    return list(seen.values())


def build(spec: ModelSpec) -> tuple[Net, Other | None]:
    """The net and its companion, with the same bits for the same spec."""
    torch.manual_seed(spec.seed)
    net = Net(spec)
    layers = net.layer_list()
    for one, two in spec.ties:
        if max(one, two) < len(layers):
            _tie(layers[one], layers[two])
    if spec.dtype == "bfloat16":
        net.to(torch.bfloat16)
    other = Other(net, spec.other).eval() if spec.other != "none" and matrices(net) else None
    return net.eval(), other


def _tie(one: nn.Module, two: nn.Module) -> None:
    for module, attr in matrices(one):
        source = getattr(module, attr)
        for target, name in matrices(two):
            found = getattr(target, name)
            if found is not source and (found.shape, found.dtype) == (source.shape, source.dtype):
                target._parameters[name] = source
                return
