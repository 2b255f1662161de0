"""``headrace bench step``: one step of a reference stack, offloaded in several ways, against the floor.

The stack has the layers of a decoder of a published shape, seeded random weights, and no attention state. A step reads
every weight that a decode step of the real model reads, in the same order and sizes. Every variant has to give the bits
of the resident stack.

    floor on a GPU = max(resident step, bytes moved / host-to-device rate)
    floor on a CPU = max(resident step, time to read the bytes, (CPU s of compute + CPU s of reading) / cores)

All terms are measured in the run. ``accelerate.disk_offload`` of the same stack takes its turn with the others.
``benchmarks/`` uses the same protocol.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import headrace
from headrace.checkpoint.weight_map import WeightMap
from headrace.config import Budget, Policy, Prefetch
from headrace.errors import OptionError
from headrace.memory.pinned import pinned_region
from headrace.memory.system import PeakMeter
from headrace.model.inventory import take_inventory
from headrace.plan.build import build_plan
from headrace.plan.plan import Plan
from headrace.stores.sources import DiskOptions
from headrace.stores.store import DiskStore
from headrace.transfer.link import ThreadLink

__all__ = [
    "QWEN3_8B", "DecoderShape", "LinkProbe", "Stack", "Step", "Timing", "Variant", "build_stack", "capture", "describe",
    "fill", "interleave", "measure_cuda", "parse_policy", "run_cpu", "run_cuda", "time_cuda", "time_host",
]  # fmt: skip

WARM_UP_S = 0.2

Step = Callable[[], object]
Timer = Callable[[Step, int], list[float]]
Model = TypeVar("Model", bound=nn.Module)
# Another way to offload the stack; returns an object with the plan.
Offload = Callable[["Stack", Policy, torch.device], Any]


# -- the protocol of every benchmark -----------------------------------------------------------------------------------


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
    # In turns and not one variant after another: a drift of the machine then affects all of them.
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
        """Move 1 GiB."""
        self._slot.copy_(self._host, non_blocking=True)


def describe(row: Mapping[str, Any]) -> str:
    """One line about one result."""
    over_mib = (row["peak_device_bytes"] - row["planned_device_bytes"]) / 2**20
    return (
        f"{row['case']:<28} {row['rows']:>5} rows  floor {row['floor_ms']:9.2f}  median {row['ms']:9.2f} ms "
        f"(spread {row['spread_ms']:.2f}, {row['ms'] / row['floor_ms']:.3f} x floor)  "
        f"resident {row['resident_ms']:9.2f}  {row['bytes_moved'] / 1e9:.2f} GB at {row['link_gb_per_s']:.1f} GB/s  "
        f"peak - plan {over_mib:+.0f} MiB  {'same bits' if row['bit_equal'] else 'OTHER BITS'}"
    )


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

    # Without a KV cache and a tokenizer, the time of a step is that of the weights, which is what offloading changes.

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
    shape: DecoderShape, dtype: torch.dtype, rest: torch.device | str, generate_on: torch.device | str, seed: int = 0
) -> Stack:
    """A stack whose weights are on ``rest``; random numbers are drawn on ``generate_on``."""
    return fill(Stack(shape, dtype, "meta"), rest, generate_on, seed)


def fill(model: Model, rest: torch.device | str, generate_on: torch.device | str, seed: int = 0) -> Model:
    """Give ``model``, which is on ``meta``, seeded weights on ``rest``.

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
                setattr(module, name, nn.Parameter(value.to(parameter.dtype).to(rest), requires_grad=False))
    return model


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def parse_policy(text: str, weight_bytes: int, layer_bytes: int) -> Policy:
    """The policy of ``even:0.25``, ``memory:0.8`` or ``group:4/1/2``; what follows a ``+`` is ignored.

    ``even:F`` offloads at least the share F of the weights, spread over all layers; ``memory:F`` allows the share F of
    the weights as device memory, slots included; ``group:A/B/C`` is the group rule.
    """
    kind, _, value = text.partition("+")[0].partition(":")
    if kind == "group":
        size, number, step = (int(part) for part in value.split("/"))
        return Prefetch(size, number, step)
    if kind == "even":
        # The budget holds the resident part and two slots of this share of a layer.
        return Budget(int(weight_bytes * (1 - float(value)) + 2.1 * float(value) * layer_bytes))
    if kind == "memory":
        return Budget(int(weight_bytes * float(value)))
    raise OptionError(f"variant {text!r}: expected even:F, memory:F or group:A/B/C")


def _offload(stack: Stack, policy: Policy, device: torch.device) -> headrace.Handle:
    return headrace.offload(stack, build_plan(take_inventory(stack), policy), device=device)


class Variant:
    """A stack under one policy (``None``: resident); ``+eager`` in its name runs it without a CUDA graph."""

    def __init__(
        self, name: str, shape: DecoderShape, policy: Policy | None, device: torch.device, offload: Offload = _offload
    ) -> None:
        self.name, self.eager = name, "+eager" in name
        torch.cuda.synchronize()
        base_bytes = torch.cuda.memory_allocated(device)
        self.stack = build_stack(shape, torch.bfloat16, device if policy is None else "cpu", device)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        self.handle = None if policy is None else offload(self.stack, policy, device)
        self.plan: Plan | None = self.handle.plan if self.handle is not None else None
        # Measured for the weights here; activations are added per number of rows.
        self._own_bytes = torch.cuda.memory_allocated(device) - base_bytes
        self._load_peak_bytes = torch.cuda.max_memory_allocated(device) - base_bytes

    def prepare(self, x: torch.Tensor) -> None:
        """Warm up, measure memory, and capture the step for the rows of ``x``."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        for _ in range(2):
            out = self.stack(x)
        torch.cuda.synchronize()
        self.activation_bytes = torch.cuda.max_memory_allocated() - before_bytes
        self.peak_bytes = max(self._load_peak_bytes, self._own_bytes + self.activation_bytes)
        self.step: Step = partial(self.stack, x)
        self.output = out.clone()
        if not self.eager:
            del out
            self.step, self.output = capture(partial(self.stack, x))


def run_cuda(
    shape: DecoderShape, variants: Sequence[str], rows: Sequence[int], rounds: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield one result per variant and number of rows, rows ascending as given; all variants live side by side."""
    for text in variants:
        if unknown := set(text.split("+")[1:]) - {"eager"}:
            raise OptionError(f"variant {text!r}: unknown option {', '.join(sorted(unknown))}; the only one is +eager")
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.no_grad():
        weight_bytes = take_inventory(Stack(shape, torch.bfloat16, "meta")).num_bytes
        layer_bytes = weight_bytes // shape.num_layers
        policies = {text: parse_policy(text, weight_bytes, layer_bytes) for text in variants}
        models = [Variant(text, shape, policy, device) for text, policy in [("resident", None), *policies.items()]]
        yield from measure_cuda(models, shape, rows, rounds, repeats)


def measure_cuda(
    models: Sequence[Variant], shape: DecoderShape, rows: Sequence[int], rounds: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Time ``models``, the first of which is the resident one, interleaved with the link alone."""
    device = next(models[0].stack.parameters()).device
    probe, resident, weight_bytes = LinkProbe(device), models[0], take_inventory(models[0].stack).num_bytes
    for count in rows:
        generator = torch.Generator(device=device).manual_seed(count)
        x = torch.randn(count, shape.hidden, device=device, generator=generator).to(torch.bfloat16)
        for model in models:
            model.prepare(x)
        timings = interleave({**{m.name: m.step for m in models}, "link": probe.copy}, rounds, repeats, time_cuda)
        link_bytes_per_s = probe.num_bytes / (timings["link"].ms / 1e3)
        for model in models:
            model.step()  # after the timing, so that bytes in a slot that the interleaving damaged are noticed
            torch.cuda.synchronize()
            plan, timing = model.plan, timings[model.name]
            moved_bytes = plan.moved_bytes if plan else 0
            floor_ms = max(timings["resident"].ms, moved_bytes / link_bytes_per_s * 1e3)
            yield {
                "case": model.name,
                "rows": count,
                "ms": timing.ms,
                "spread_ms": timing.spread_ms,
                "floor_ms": floor_ms,
                "share_of_floor": timing.ms / floor_ms,
                "resident_ms": timings["resident"].ms,
                "bytes_moved": moved_bytes,
                "link_gb_per_s": link_bytes_per_s / 1e9,
                "peak_device_bytes": model.peak_bytes,
                "planned_device_bytes": (plan.device_bytes if plan else weight_bytes) + resident.activation_bytes,
                "bit_equal": bool(torch.equal(model.output, resident.output)),
                "num_units": len(plan.units) if plan else 0,
                "num_slots": plan.num_slots if plan else 0,
            }


# -- on a CPU, from files ----------------------------------------------------------------------------------------------

CPU_SHAPE = DecoderShape("cpu-reference", 8, 1536, 4096, 1536, 512)
CPU_POLICY = Prefetch(1, 1, 2, mode="disk")
CPU_ROWS = (1, 256)  # bound by reading, and by compute


def run_cpu(rounds: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield one result per case: each number of rows, with the files in the page cache and past it."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder, torch.inference_mode(False), torch.no_grad():
        resident = build_stack(CPU_SHAPE, torch.float32, "cpu", "cpu")
        save_file(dict(resident.state_dict()), str(Path(folder) / "model.safetensors"))
        accelerated = None
        with suppress(ImportError):
            from accelerate import disk_offload

            model = build_stack(CPU_SHAPE, torch.float32, "cpu", "cpu")
            accelerated = disk_offload(model, f"{folder}/accelerate", execution_device=torch.device("cpu"))
        for disk in (DiskOptions(), DiskOptions(direct=True)):
            for rows in CPU_ROWS:
                others: dict[str, nn.Module] = {"resident": resident}
                if accelerated is not None and not disk.direct:
                    others["accelerate"] = accelerated
                yield from _measure_cpu(others, folder, disk, rows, rounds, repeats)


def _measure_cpu(
    others: dict[str, nn.Module], folder: str, disk: DiskOptions, rows: int, rounds: int, repeats: int
) -> Iterator[dict[str, Any]]:
    x = torch.randn(rows, CPU_SHAPE.hidden, generator=torch.Generator().manual_seed(rows))
    streamed = Stack(CPU_SHAPE, torch.float32, "meta").eval().requires_grad_(False)
    expected = others["resident"](x)
    # In a fresh process: the peak of this one contains the resident stack. Spawned, because a fork would inherit it.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        growth_bytes = pool.submit(_stream_alone, folder, disk, rows).result()
    with headrace.offload(streamed, CPU_POLICY, checkpoint=folder, device="cpu", disk=disk) as handle:
        plan, reader = handle.plan, _Reader(handle.plan, folder, disk)
        models = {**others, "headrace": streamed}
        equal = {name: all(torch.equal(model(x), expected) for _ in range(3)) for name, model in models.items()}
        steps = {name: _Metered(partial(model, x)) for name, model in models.items()}
        steps["read"] = _Metered(reader.step)
        timings = interleave(steps, rounds, repeats, time_host)
        equal["headrace"] &= torch.equal(streamed(x), expected)
        reader.link.close()
    cores = len(os.sched_getaffinity(0))
    cpu_ms = {name: statistics.median(steps[name].cpu_ms) for name in ("resident", "read")}
    common = {
        "rows": rows,
        # The last term: copies out of the page cache take time of the cores that compute needs.
        "floor_ms": max(timings["resident"].ms, timings["read"].ms, sum(cpu_ms.values()) / cores),
        "resident_ms": timings["resident"].ms,
        "read_ms": timings["read"].ms,
        "cpu_ms": cpu_ms,
        "cores": cores,
        "bytes_moved": plan.moved_bytes,
        "link_gb_per_s": plan.moved_bytes / timings["read"].ms / 1e6,
        "planned_device_bytes": plan.device_bytes,
    }
    for name in [name for name in ("headrace", "accelerate") if name in models]:
        yield {
            "case": f"{name}, {'direct' if disk.direct else 'page cache'}",
            "ms": timings[name].ms,
            "spread_ms": timings[name].spread_ms,
            "bit_equal": equal[name],
            **common,
            "peak_device_bytes": growth_bytes if name == "headrace" else plan.device_bytes,
        }


def _stream_alone(folder: str, disk: DiskOptions, rows: int) -> int:
    """Growth of the peak resident memory by three steps, in bytes; needs a process that does nothing else."""
    with torch.no_grad():
        tiny = build_stack(DecoderShape("tiny", 1, 64, 64, 64, 64), torch.float32, "cpu", "cpu")
        tiny(torch.randn(rows, 64))  # buffers of the kernels are not counted
        x = torch.randn(rows, CPU_SHAPE.hidden)
        streamed = Stack(CPU_SHAPE, torch.float32, "meta").eval().requires_grad_(False)
        build_plan(take_inventory(streamed), CPU_POLICY)
        meter = PeakMeter()
        with headrace.offload(streamed, CPU_POLICY, checkpoint=folder, device="cpu", disk=disk):
            for _ in range(3):
                streamed(x)
            return meter.growth_bytes()


class _Reader:
    """Reads all units of a plan in order through the slots, with no compute in between."""

    # With the store and the link of the offload, so that the floor contains no other way to read.
    def __init__(self, plan: Plan, folder: str, disk: DiskOptions) -> None:
        weights = WeightMap.open(folder)
        inventory = take_inventory(Stack(CPU_SHAPE, torch.float32, "meta"))
        names = {entry.storage for unit in plan.units for entry in unit.entries}
        self.link, self._units = ThreadLink(), plan.units
        store = DiskStore({name: weights.source(inventory.by_name[name]) for name in names}, disk)
        self._loads = [store.load(unit) for unit in plan.units]
        self._slots = [self.link.allocate(num_bytes) for num_bytes in plan.slot_bytes]

    def step(self) -> None:
        """Read every unit once; as many copies are under way as there are slots."""
        pending: list[Any] = [None] * len(self._slots)
        for unit, load in zip(self._units, self._loads, strict=True):
            if pending[unit.slot] is not None:
                self.link.wait(pending[unit.slot])
            pending[unit.slot] = self.link.copy(load, self._slots[unit.slot], ())
        for transfer in pending:
            self.link.wait(transfer)


class _Metered:
    """A step that notes the CPU time of all threads at each run, under the load of that moment."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        self.cpu_ms: list[float] = []

    def __call__(self) -> None:
        before = time.process_time()
        self._step()
        self.cpu_ms.append((time.process_time() - before) * 1e3)
