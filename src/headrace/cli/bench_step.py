"""The step of ``headrace bench step``: a reference stack, offloaded in several ways, against the floor.

The stack has the layers of a decoder of a published shape, seeded random weights, and no attention state. A step reads
every weight that a decode step of the real model reads, in the same order and sizes. The results of every variant have
to be bit-identical with those of the resident stack.

    floor on a GPU = max(resident step, bytes moved / host-to-device rate)
    floor on a CPU = max(resident step, time to read the bytes)

All terms are measured in the run. ``benchmarks/`` uses the same stack and the same protocol.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import headrace
from headrace.codec.layout import coded_bytes
from headrace.config import CODES, Budget, Codec, Policy, Prefetch
from headrace.errors import OptionError
from headrace.memory.pinned import pinned_region
from headrace.model.inventory import take_inventory
from headrace.plan.build import build_plan
from headrace.stores.file_reads import DiskOptions

WARM_UP_S = 0.2

Step = Callable[[], object]
Timer = Callable[[Step, int], list[float]]
Model = TypeVar("Model", bound=nn.Module)


# -- the protocol ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Times of one variant over all rounds, in ms."""

    samples_ms: tuple[float, ...]

    @property
    def ms(self) -> float:
        """Median."""
        return statistics.median(self.samples_ms)

    @property
    def spread_ms(self) -> float:
        """Distance between the quartiles."""
        if len(self.samples_ms) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.samples_ms, n=4)
        return third - first


def time_cuda(step: Step, repeats: int) -> list[float]:
    """Device time of each of ``repeats`` runs in ms, by events; the runs of the first 0.2 s are not counted."""
    # A variant that waits for the link cools the device, and the next one runs at a higher clock for a while.
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_UP_S:
        step()
        torch.cuda.synchronize()
    return event_times(step, repeats)


def event_times(step: Step, repeats: int) -> list[float]:
    """Device time of each of ``repeats`` runs in ms, by events, one after the other without a pause."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    marks[-1].synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def time_host(step: Step, repeats: int) -> list[float]:
    """Wall time of each of ``repeats`` runs in ms; the run before them is not counted."""
    step()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def interleave(steps: Mapping[str, Step], rounds: int, repeats: int, timer: Timer) -> dict[str, Timing]:
    """Time every step ``repeats`` times in each of ``rounds`` rounds, in a new (seeded) order each round."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    # In turns, so that a drift of the machine affects all of them.
    shuffle = random.Random(0)
    for _ in range(rounds):
        for name in shuffle.sample(list(steps), len(steps)):
            samples[name] += timer(steps[name], repeats)
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def capture(step: Callable[[], torch.Tensor]) -> tuple[Step, torch.Tensor]:
    """Capture ``step``, which has run before, in one CUDA graph.

    Returns:
        The replay of the graph, and the tensor that each replay writes.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    # Slots have the contents of the last replay, not of the capture: two replays reach the steady state.
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, out


class LinkProbe:
    """One large copy from pinned memory to the device: the rate that the floor is computed with."""

    num_bytes = 1 << 30

    def __init__(self, device: torch.device) -> None:
        self._host = pinned_region(self.num_bytes)
        self._slot = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def copy(self) -> None:
        """Copy 1 GiB."""
        self._slot.copy_(self._host, non_blocking=True)


# -- the stack ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a dense decoder layer with grouped-query attention and a gated MLP, in elements.

    Attributes:
        hidden, intermediate: widths of the residual stream and of the MLP.
        query, key_value: widths of the query and of each of the key and value projections.
    """

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    query: int
    key_value: int


# Qwen3-8B: config.json of the published checkpoint (32 query and 8 key-value heads of 128).
QWEN3_8B = DecoderShape("qwen3-8b", 36, 4096, 12288, 4096, 1024)


class Layer(nn.Module):
    """The projections of one decoder layer; attention is replaced by an elementwise mix of the same widths."""

    # Without a KV cache and a tokenizer, the time of a step is that of the weights, which offloading changes.

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False, dtype=dtype, device=device)
        norm = partial(nn.RMSNorm, shape.hidden, eps=1e-6, dtype=dtype, device=device)
        self.input_norm = norm()
        self.q_proj = linear(shape.hidden, shape.query)
        self.k_proj = linear(shape.hidden, shape.key_value)
        self.v_proj = linear(shape.hidden, shape.key_value)
        self.o_proj = linear(shape.query, shape.hidden)
        self.post_norm = norm()
        self.gate_proj = linear(shape.hidden, shape.intermediate)
        self.up_proj = linear(shape.hidden, shape.intermediate)
        self.down_proj = linear(shape.intermediate, shape.hidden)
        self._repeat = shape.query // shape.key_value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [rows, hidden]."""
        h = self.input_norm(x)
        x = x + self.o_proj(self.q_proj(h) + (self.k_proj(h) * self.v_proj(h)).repeat(1, self._repeat))
        h = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """``num_layers`` layers, nothing else."""

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape, dtype, device) for _ in range(shape.num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [rows, hidden] -> the same."""
        for layer in self.layers:
            x = layer(x)
        return x


def build_stack(
    shape: DecoderShape, dtype: torch.dtype, store: torch.device | str, generate_on: torch.device | str
) -> Stack:
    """A stack whose weights are on ``store``; random numbers are drawn on ``generate_on``."""
    return fill(Stack(shape, dtype, "meta"), store, generate_on)


def fill(model: Model, store: torch.device | str, generate_on: torch.device | str, seed: int = 0) -> Model:
    """Give ``model``, which is on ``meta``, seeded weights on ``store``.

    Random numbers are drawn on ``generate_on``.
    """
    model.eval().requires_grad_(False)
    generator = torch.Generator(device=generate_on).manual_seed(seed)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                # One parameter at a time: a model too large for the device is still filled at the device's speed.
                drawn = torch.bfloat16 if parameter.dtype.itemsize == 1 else parameter.dtype  # fp8 cannot be drawn
                value = torch.empty(parameter.shape, dtype=drawn, device=generate_on)
                # The scale 0.02 keeps activations finite through any number of layers.
                value.fill_(1.0) if value.dim() == 1 else value.normal_(0.0, 0.02, generator=generator)
                setattr(module, name, nn.Parameter(value.to(parameter.dtype).to(store), requires_grad=False))
    return model


# -- variants ----------------------------------------------------------------------------------------------------------


def parse_policy(text: str, weight_bytes: int, layer_bytes: int) -> Policy:
    """The policy of ``even:0.25``, ``memory:0.8`` or ``group:4/1/2``; what follows a ``+`` may be a codec.

    ``even:F`` offloads at least the share F of the weights, spread over all layers; ``memory:F`` allows the share F of
    the weights as device memory, slots included; ``group:A/B/C`` is the group rule.
    """
    kind, _, value = text.partition("+")[0].partition(":")
    codec: Codec = next((code for code in CODES if code in text.split("+")[1:]), "none")
    if kind == "group":
        size, number, step = (int(part) for part in value.split("/"))
        return Prefetch(size, number, step, codec=codec)
    if kind == "even":
        # The budget holds the resident part and two slots of this share of a layer; of its code, and a decoded one.
        slots = 2.1 if codec == "none" else 2.1 * coded_bytes(layer_bytes) / layer_bytes + 1.05
        return Budget(int(weight_bytes * (1 - float(value)) + slots * float(value) * layer_bytes), codec=codec)
    if kind == "memory":
        return Budget(int(weight_bytes * float(value)), codec=codec)
    raise OptionError(f"variant {text!r}: expected even:F, memory:F or group:A/B/C")


def _row(case: str, rows: int, timings: Mapping[str, Timing], moved_bytes: int, link_ms: float) -> dict[str, Any]:
    """``link_ms``: the time to copy the bytes alone."""
    floor_ms = max(timings["resident"].ms, link_ms)
    return {
        "case": case,
        "rows": rows,
        "ms": timings[case].ms,
        "spread_ms": timings[case].spread_ms,
        "floor_ms": floor_ms,
        "share_of_floor": timings[case].ms / floor_ms,
        "resident_ms": timings["resident"].ms,
        "bytes_moved": moved_bytes,
        "link_gb_per_s": moved_bytes / link_ms / 1e6 if link_ms else None,
    }


def run_cuda(
    shape: DecoderShape, variants: Sequence[str], rows: Sequence[int], rounds: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield one result per variant and number of rows, in the order of ``rows``; all variants exist side by side."""
    for text in variants:
        if unknown := set(text.split("+")[1:]) - {"eager", *CODES}:
            raise OptionError(f"variant {text!r}: unknown option {', '.join(sorted(unknown))}; use +eager or +exp3")
    device = torch.device("cuda", torch.cuda.current_device())
    weight_bytes = take_inventory(Stack(shape, torch.bfloat16, "meta")).num_bytes
    policies = {text: parse_policy(text, weight_bytes, weight_bytes // shape.num_layers) for text in variants}
    with torch.no_grad():
        stacks = {"resident": build_stack(shape, torch.bfloat16, device, device)}
        handles = {}
        for text, policy in policies.items():
            stacks[text] = build_stack(shape, torch.bfloat16, "cpu", device)
            plan = build_plan(take_inventory(stacks[text]), policy)
            handles[text] = headrace.offload(stacks[text], plan, device=device)
        probe = LinkProbe(device)
        for count in rows:
            generator = torch.Generator(device=device).manual_seed(count)
            x = torch.randn(count, shape.hidden, device=device, generator=generator).to(torch.bfloat16)
            eager = {name: partial(stack, x) for name, stack in stacks.items()}
            for warm in (*eager.values(), *eager.values()):
                warm()  # a captured step has run before
            captured = {name: capture(step) for name, step in eager.items() if "+eager" not in name}
            steps: dict[str, Callable[[], Any]] = {**eager, **{name: replay for name, (replay, _) in captured.items()}}
            timings = interleave({**steps, "link": probe.copy}, rounds, repeats, time_cuda)
            for name, step in steps.items():
                out = step()  # after the timing, to notice slots that the interleaving has damaged
                found = captured[name][1] if name in captured else out  # a replay returns nothing
                moved_bytes = handles[name].plan.moved_bytes if name in handles else 0
                row = _row(name, count, timings, moved_bytes, timings["link"].ms * moved_bytes / probe.num_bytes)
                yield {**row, "bit_equal": torch.equal(found, captured["resident"][1])}


CPU_SHAPE = DecoderShape("cpu-reference", 8, 1536, 4096, 1536, 512)
CPU_POLICY = Prefetch(1, 1, 2, mode="disk")
CPU_ROWS = (1, 256)  # bound by reading, and by compute


def run_cpu(rounds: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield one result per case: with the files in the page cache and past it, each number of rows."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder, torch.no_grad():
        resident = build_stack(CPU_SHAPE, torch.float32, "cpu", "cpu")
        save_file(dict(resident.state_dict()), str(Path(folder) / "model.safetensors"))
        for case, disk in {"page cache": DiskOptions(), "direct": DiskOptions(direct=True)}.items():
            stacks = [Stack(CPU_SHAPE, torch.float32, "meta").eval().requires_grad_(False) for _ in range(2)]
            streamed, read = stacks
            for layer in read.layers:
                layer.forward = nn.Identity()  # the same store and link, and nothing is computed
            offload = partial(headrace.offload, policy=CPU_POLICY, checkpoint=folder, device="cpu", disk=disk)
            with offload(streamed) as handle, offload(read):
                for rows in CPU_ROWS:
                    x = torch.randn(rows, CPU_SHAPE.hidden, generator=torch.Generator().manual_seed(rows))
                    steps = {"resident": partial(resident, x), case: partial(streamed, x), "read": partial(read, x)}
                    timings = interleave(steps, rounds, repeats, time_host)
                    row = _row(case, rows, timings, handle.plan.moved_bytes, timings["read"].ms)
                    yield {**row, "bit_equal": torch.equal(streamed(x), resident(x))}
