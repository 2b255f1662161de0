"""Tiny models, one per trap, and what the tests do with them again and again."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from headrace import Prefetch
from headrace.model.inventory import inner_tensors
from headrace.stores.sources import TENSOR_ALIGN_BYTES

DIM = 32
M = TypeVar("M", bound=nn.Module)


def aligned(model: Any) -> Any:
    """``model`` with the weights at multiples of 64 bytes, where contract 1 has those of a reference; ties stay.

    safetensors maps files, and so do from_pretrained() and load_file(): a weight then lies at any multiple of 8, from
    where some CPUs' products round otherwise.
    """
    moved: dict[object, torch.Tensor] = {}
    for weight in (*model.parameters(), *model.buffers()):
        for _, tensor in inner_tensors(weight):
            if tensor.device.type == "cpu" and tensor.data_ptr() % TENSOR_ALIGN_BYTES:
                place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
                tensor.data = moved.setdefault(place, tensor.detach().clone())
    return model


class Block(nn.Module):
    """Norm, matrix product, residual; sleeps between them, so that copies and compute interleave in many ways."""

    def __init__(self, dim: int = DIM, max_pause_s: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, dim)
        self.max_pause_s = max_pause_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.max_pause_s:
            time.sleep(random.uniform(0, self.max_pause_s))
        return x + torch.tanh(self.linear(self.norm(x)))


class Reader(nn.Module):
    """A module for trees that are planned and not run: it has a forward, unlike ``nn.Module()``."""

    def forward(self) -> None: ...


class ReaderDict(nn.ModuleDict):
    """The same with named children."""

    def forward(self) -> None: ...


class Stack(nn.Module):
    """``num_layers`` blocks and a head; ``order`` says which blocks run, and when."""

    def __init__(self, num_layers: int = 5, dim: int = DIM, max_pause_s: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dim, max_pause_s) for _ in range(num_layers))
        self.head = nn.Linear(dim, 3)
        self.order = list(range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return self.head(x)


class QuantLinear(nn.Module):
    """``(w - zero) * scale`` from int8: arithmetic that reads the weight alone, and two dtypes in one unit."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-99, 99, (dim, dim), dtype=torch.int8), requires_grad=False)
        self.zero = nn.Parameter(torch.randint(-9, 9, (dim, 1), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(dim, 1) / 999, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, (self.weight - self.zero).float() * self.scale)


class QuantStack(nn.Module):
    """Quantised layers with ``1 + w`` norms."""

    def __init__(self, num_layers: int = 5, dim: int = DIM) -> None:
        super().__init__()
        self.layers = nn.ModuleList(QuantLinear(dim) for _ in range(num_layers))
        self.norm = nn.Parameter(torch.rand(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x * (1 + self.norm)))
        return x


class Experts(nn.Module):
    """Fused experts: one 3-D parameter each, all of them read for a few rows."""

    def __init__(self, num_experts: int = 4, dim: int = DIM) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(num_experts, dim, dim) / 6)
        self.down_proj = nn.Parameter(torch.randn(num_experts, dim, dim) / 6)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        up = torch.einsum("bi,bio->bo", x, self.up_proj[chosen])
        return torch.einsum("bi,bio->bo", torch.relu(up), self.down_proj[chosen])


class MoELayer(nn.Module):
    """Router, routed experts and a dense one whose name differs by a letter."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.gate = nn.Linear(dim, 4)
        self.mlp.experts = Experts(4, dim)
        self.mlp.shared_expert = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.mlp.gate(x).argmax(-1)
        return x + self.mlp.experts(x, chosen) + self.mlp.shared_expert(x)


class MoE(nn.Module):
    """A mixture of experts with a tied head."""

    def __init__(self, num_layers: int = 3, dim: int = DIM) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, dim)
        self.layers = nn.ModuleList(MoELayer(dim) for _ in range(num_layers))
        self.head = nn.Linear(dim, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Odd(nn.Module):
    """A layer of everything that is easily lost: views, a transpose, buffers, fp8, bool, a tie inside the layer."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim) / 6)
        self.same = self.weight
        self.cached_t = self.weight.data.t()
        self.cached_row = self.weight.data[3]
        self.strided = nn.Parameter(torch.randn(dim, 2 * dim).t()[::2])
        self.fp8 = nn.Parameter(torch.randn(dim, dim).to(torch.float8_e4m3fn).t(), requires_grad=False)
        self.register_buffer("mask", torch.rand(dim) > 0.5)
        self.register_buffer("table", torch.randint(-5, 5, (dim,), dtype=torch.int8), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("placeholder", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.cached_t + self.cached_row + F.linear(x, self.same)
        x = torch.where(self.mask, x @ self.strided, x @ self.fp8.float())
        return torch.tanh(x + self.table)


class OddStack(nn.Module):
    """Odd layers."""

    def __init__(self, num_layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Odd() for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Scaled(torch.Tensor):
    """A weight kept as int8 and scale, the way quantisation libraries do: a wrapper subclass with two inner tensors."""

    data_int8: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data_int8: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, data_int8.shape, dtype=scale.dtype, device=data_int8.device
        )

    def __init__(self, data_int8: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_int8 = data_int8
        self.scale = scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_int8", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return cls(inner["data_int8"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_int8.detach(), args[0].scale.detach())
        plain = torch.utils._pytree.tree_map_only(cls, lambda t: t.data_int8.to(t.scale.dtype) * t.scale, args)
        return func(*plain, **(kwargs or {}))


class ScaledStack(nn.Module):
    """Linear layers whose weights are :class:`Scaled`."""

    def __init__(self, num_layers: int = 4, dim: int = DIM) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(num_layers))
        for layer in self.layers:
            weight = Scaled(torch.randint(-99, 99, (dim, dim), dtype=torch.int8), torch.rand(dim, 1) / 99)
            layer.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def on_meta(build: Callable[..., M], *args: Any, **options: Any) -> M:
    """A model without data, in evaluation mode."""
    with torch.device("meta"):
        return build(*args, **options).eval()


def all_layers(slots: int = 2, mode: str = "cpu", **options: Any) -> Prefetch:
    """Everything in every layer, biases and norms too, through ``slots`` slots."""
    return Prefetch(params=["layers"], prefetch_step=slots, mode=mode, **options)  # type: ignore[arg-type]


def rows(dim: int = DIM) -> torch.Tensor:
    """An input."""
    return torch.randn(4, dim, generator=torch.Generator().manual_seed(7))


def expecting(model: M, x: torch.Tensor | None = None) -> tuple[M, torch.Tensor, torch.Tensor]:
    """``model`` in evaluation mode, an input, and the output that it has to have when it is offloaded."""
    model.eval()
    x = rows() if x is None else x
    return model, x, model(x)


def open_files(folder: Path) -> int:
    """How many descriptors of this process lead into ``folder``."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder))
        except OSError:  # the descriptor that listed the folder
            continue
    return count


def save(model: nn.Module, folder: Path, num_shards: int = 1) -> Path:
    """Write a checkpoint of ``model`` the way the libraries do, in one file or in several with an index."""
    import json

    state: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, int]] = set()
    for name, tensor in model.state_dict().items():
        if (tensor.data_ptr(), tensor.numel()) not in seen or not tensor.numel():
            seen.add((tensor.data_ptr(), tensor.numel()))
            state[name] = tensor.contiguous()
    names = list(state)
    if num_shards == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{index % num_shards}.safetensors" for index, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({n: state[n] for n in names if weight_map[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


earlier_threads: set[threading.Thread] = set()  # at the start of the test: those of garbage may end at any time


def state_of(model: nn.Module) -> list[Any]:
    """Everything an offload may touch: objects, memory, hooks, attributes."""
    tensors = [
        (id(t), t.device, t.data_ptr() if not t.is_meta else 0) for t in model.state_dict(keep_vars=True).values()
    ]
    attributes = [
        {name: list(value) if "hooks" in name else id(value) for name, value in vars(module).items()}
        for module in model.modules()
    ]
    threads = set(threading.enumerate()) - earlier_threads
    return [tensors, attributes, sorted(t.name for t in threads if t.name.startswith("headrace"))]
