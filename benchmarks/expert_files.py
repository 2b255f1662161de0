"""Experts in files: reads of what steps miss, steps of layers above them, and hits of two tiers by replacement policy.

    python benchmarks/expert_files.py --folder FOLDER [--gib 4] [--rounds 40] [--out FILE]
    python benchmarks/expert_files.py --steps --folder FOLDER [--form int4] [--layers 3] [--tokens 2000] [--out FILE]
    python benchmarks/expert_files.py --prompt 2047 --folder FOLDER [--form int4] [--layers 3] [--out FILE]
    python benchmarks/expert_files.py --policies [--out FILE]

*Reads.* A layer of experts of 9.4 MB each (two tensors, those of Qwen3-235B-A22B in four bits) lies in a file of
random bytes. A step asks for some experts that are in no slot: by headrace's cache, and by plain requests, a whole
tensor of an expert each, that 16 threads read past the page cache into memory of their own. Both take turns, and choose
at random: neither finds what the other has read. The floor is the plain reads. ``bit_equal``: rows hold the bytes of
the file.

*Steps.* Layers of experts alone, those of Qwen3-235B-A22B in bf16 (37.7 MB each, 4.8 GB a layer) or in int4 with
groups of 128 (9.7 MB each, 1.2 GB a layer), in a file that is written first and stays. A token chooses 8 of 128 by a
seeded trace (plan/routing_traces.py). A budget leaves slots on the device for 13, and host memory for 51 more; a CPU
has no second tier. Every few tokens plain requests read whole tensors of other experts; the floor is the bytes that
steps read from the file, at that rate. On a GPU half of the tokens, drawn by lot, replay CUDA graphs. ``bit_equal``:
every output is that of the same layers with all experts on the device. Products are those of
``experts_implementation="headrace"``.

*Prompts.* The same layers, and as many tokens at once, before which no expert is in a memory. Plain requests of the
same ranges take turns. ``times_floor``: the time by that of the bytes of all experts at the plain rate.

*Policies.* Seeded traces of headrace's own (plan/routing_traces.py), a token a step, of one text and of texts of 128
tokens with popular experts of their own. The GPU's slots are LRU; the tier below is asked for what they miss. ``lru``
and ``aged`` (the least often used leaves; uses are halved every 16 or 64 tokens) keep what they are asked for;
``lru_exclusive`` gives up what the GPU takes, and takes what the GPU gives up.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import headrace
from harness import append, finish, parser_of, writable_folder
from headrace import Budget, Rules
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.experts import ordered
from headrace.experts.order import MAX_ROWS, Projection
from headrace.memory.pages import map_file, resident_bytes
from headrace.model.inventory import take_inventory
from headrace.plan.cached_experts import cache_bytes, cached_layers, host_memory_bytes, with_host_slots
from headrace.plan.routing_traces import Trace, seeded_trace

ROWS = {"gate_up": (3072, 2048), "down": (4096, 768)}  # bytes of an expert: int4 [3072, 4096] and [4096, 1536]
EXPERT_BYTES = sum(rows * columns for rows, columns in ROWS.values())
MISSES, THREADS, ALIGN = (2, 8, 32), 16, 4096


class Layer(nn.Module):
    """Experts without products."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        for name, shape in ROWS.items():
            weight = torch.empty(num_experts, *shape, dtype=torch.uint8, device="meta")
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = headrace.expert_rows(self, ids)[1]
        return rows


class Model(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.layer = Layer(num_experts)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.layer(ids)


def write_folder(folder: Path, num_experts: int) -> Path:
    """A folder with the experts; one that is there already is taken."""
    path = folder / "model.safetensors"
    sizes = {f"layer.{name}": (num_experts, *shape) for name, shape in ROWS.items()}
    places, at = {}, 0
    for name, shape in sizes.items():
        places[name] = {"dtype": "U8", "shape": shape, "data_offsets": [at, at := at + int(np.prod(shape))]}
    header = json.dumps(places).encode()
    header += b" " * (-len(header) % 8)
    if not path.exists() or path.stat().st_size != 8 + len(header) + at:
        chooser = np.random.default_rng(0)
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for start in range(0, at, 64 << 20):
                file.write(chooser.bytes(min(64 << 20, at - start)))
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


class PlainReads:
    """Threads that each read one range at a time into memory of their own."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        """``most_bytes``: of a range."""
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._pool = ThreadPoolExecutor(THREADS)
        self._buffers = [mmap.mmap(-1, most_bytes + 2 * ALIGN) for _ in range(THREADS)]
        for buffer in self._buffers:
            buffer[:: mmap.PAGESIZE] = bytes(len(buffer) // mmap.PAGESIZE)

    def __call__(self, ranges: Sequence[tuple[int, int]]) -> float:
        free, left = list(self._buffers), list(ranges)

        def read(each: tuple[int, int]) -> int:
            buffer = free.pop()
            start, end = each[0] // ALIGN * ALIGN, -(-(each[0] + each[1]) // ALIGN) * ALIGN
            found = os.preadv(self._fd, [memoryview(buffer)[: end - start]], start)
            free.append(buffer)
            return found

        begin = time.perf_counter()
        found = sum(self._pool.map(read, left))
        seconds = time.perf_counter() - begin
        if found < sum(size for _, size in ranges):
            raise OSError("a short read")
        return seconds


def reads(folder: Path, num_experts: int, rounds: int, out: Path | None) -> list[dict[str, Any]]:
    path = write_folder(folder, num_experts)
    tensors = Checkpoint.open(path).tensors
    plain, chooser, rows = PlainReads(path, max(map(prod, ROWS.values()))), np.random.default_rng(1), []
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped = map_file(file.fileno(), 0, path.stat().st_size, read_only=True)
    model, policy = Model(num_experts), Rules([("layer", "cache")], expert_slots=max(MISSES), mode="disk")
    with headrace.offload(model, policy, checkpoint=folder, device="cpu") as handle:
        model(torch.arange(max(MISSES)))  # pages of the slots are there
        cached_before = resident_bytes(mapped)
        for misses in MISSES:
            times: dict[str, list[float]] = {"plain": [], "headrace": []}
            read_bytes, bit_equal = 0, True
            for turn in range(rounds):
                for way in ("plain", "headrace")[:: -1 if turn % 2 else 1]:
                    ids = chooser.choice(num_experts - max(MISSES), misses, replace=False) + max(MISSES)
                    if way == "plain":
                        parts = [tensors[f"layer.{name}"] for name in ROWS]
                        sizes = [part.num_bytes // num_experts for part in parts]
                        at = [
                            (part.offset + int(i) * size, size)
                            for part, size in zip(parts, sizes, strict=True)
                            for i in ids
                        ]
                        times[way].append(plain(at))
                        continue
                    handle._session._caches[0][1].reset()
                    before, begin = disk_bytes(), time.perf_counter()
                    found = model(torch.from_numpy(ids))
                    times[way].append(time.perf_counter() - begin)
                    read_bytes += disk_bytes() - before
                    bit_equal &= turn % 8 > 0 or same_bytes(handle, tensors, found.tolist(), ids.tolist(), num_experts)
            medians = {way: statistics.median(found) for way, found in times.items()}
            moved = misses * EXPERT_BYTES
            rows.append({
                "table": "expert-files", "case": f"{misses} experts", "requests": misses * len(ROWS),
                "ms": 1e3 * medians["headrace"], "plain_ms": 1e3 * medians["plain"],
                "gb_per_s": moved / medians["headrace"] / 1e9, "plain_gb_per_s": moved / medians["plain"] / 1e9,
                "ratio": medians["plain"] / medians["headrace"], "rounds": rounds, "bytes_moved": moved,
                "read_ratio": read_bytes / rounds / moved,
                "page_cache_mib": (resident_bytes(mapped) - cached_before) / 2**20, "bit_equal": bit_equal,
            })  # fmt: skip
            print(rows[-1], flush=True)
            append(rows[-1], out)
    return rows


def same_bytes(handle: Any, tensors: Any, rows: list[int], ids: list[int], num_experts: int) -> bool:
    for name in ROWS:
        part, memory = tensors[f"layer.{name}"], handle._session._ranges.rows(f"layer.{name}")
        size = part.num_bytes // num_experts
        with part.path.open("rb") as file:
            for row, expert in zip(rows, ids, strict=True):
                file.seek(part.offset + expert * size)
                if file.read(size) != memory[row].numpy().tobytes():
                    return False
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def disk_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])


# -- steps and prompts -------------------------------------------------------------------------------------------------

GROUP = 128  # weights of a row with one scale, in int4


class Mixture(nn.Module):
    """Experts of one layer, in bf16 or in int4 of compressed-tensors; what each token chooses is given."""

    def __init__(self, form: str, num_experts: int, width: int, inner: int) -> None:
        super().__init__()
        shapes = {"gate_up": (num_experts, 2 * inner, width), "down": (num_experts, width, inner)}
        tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        if form == "int4":
            for name, (*rows, columns) in shapes.items():
                tensors[name] = torch.empty(*rows, columns // 8, dtype=torch.int32)
                tensors[f"{name}_scales"] = torch.empty(*rows, columns // GROUP, dtype=torch.bfloat16)
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        experts, rows = headrace.expert_rows(self, ids)
        gate_up, down = (
            Projection(getattr(experts, n), getattr(experts, f"{n}_scales", None)) for n in ("gate_up", "down")
        )
        weights = x.new_full(ids.shape, 1 / ids.shape[1])
        if len(x) <= MAX_ROWS:
            return x + ordered.run(x, rows, weights, gate_up, down)
        y = torch.zeros_like(x)
        for expert, row in sorted(dict(zip(ids.flatten().tolist(), rows.flatten().tolist(), strict=True)).items()):
            tokens = (ids == expert).any(1).nonzero().flatten()
            gate, up = (x[tokens] @ values(gate_up, row).T).chunk(2, dim=-1)
            y[tokens] += (torch.nn.functional.silu(gate) * up) @ values(down, row).T / ids.shape[1]
        return x + y


def values(projection: Projection, row: int) -> torch.Tensor:
    """Weights of an expert in bf16 [outputs, inputs]."""
    weight = projection.weight[row]
    if projection.scales is None:
        return weight
    scales, shifts = projection.scales[row], torch.arange(0, 32, 4, device=weight.device, dtype=torch.int32)
    codes = (weight[..., None] >> shifts & 15) - 8
    return (codes.view(*scales.shape, -1).bfloat16() * scales[..., None]).flatten(1)


class Mixtures(nn.Module):
    def __init__(self, num_layers: int, form: str, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture(form, *sizes) for _ in range(num_layers))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for layer, chosen in zip(self.layers, ids, strict=True):
            x = nn.functional.rms_norm(layer(x, chosen), x.shape[-1:])  # or it is infinite after five layers in int4
        return x


def fill(model: Mixtures, device: str) -> None:
    """Give ``model``, which is on ``meta``, seeded weights on ``device``."""
    model.to_empty(device=device)
    made = torch.Generator(device).manual_seed(0)
    for name, weight in model.named_parameters():
        for part in weight.data:
            if weight.dtype == torch.int32:
                part.random_(-(2**31), 2**31, generator=made)
            elif name.endswith("_scales"):
                part.uniform_(0.02, 0.06, generator=made).div_(GROUP**0.5)
            else:
                part.normal_(generator=made).div_(part.shape[1] ** 0.5)


def write_layers(model: Mixtures, path: Path) -> None:
    """Write the weights of ``model`` by threads; a file of that size is taken as it is."""
    places, at, words = {}, 0, {torch.bfloat16: "BF16", torch.int32: "I32"}
    for name, weight in model.named_parameters():
        span = [at, at := at + weight.nbytes]
        places[name] = {"dtype": words[weight.dtype], "shape": list(weight.shape), "data_offsets": span}
    header = json.dumps(places).encode()
    header += b" " * (-len(header) % 8)
    if path.exists() and path.stat().st_size == 8 + len(header) + at:
        return

    def write(name: str, start: int, part: torch.Tensor) -> None:
        left = memoryview(part.cpu().view(torch.uint8).flatten().numpy())
        start += 8 + len(header) + places[name]["data_offsets"][0]
        while left:
            done = os.pwrite(file.fileno(), left, start)
            left, start = left[done:], start + done

    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(8) as pool:
        file.write(len(header).to_bytes(8, "little") + header)
        parts = [(n, i * part.nbytes, part) for n, w in model.named_parameters() for i, part in enumerate(w.data)]
        list(pool.map(lambda each: write(*each), parts))
        os.fsync(file.fileno())


def drop_pages(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def budget_of(model: Mixtures, device: str, slots: int, held: int) -> Budget:
    """Memory for ``slots`` experts of each layer on the device, and for ``held`` in host memory."""
    names = [name for name, _ in model.named_parameters()]
    layers = cached_layers(take_inventory(model), names, slots, 0)
    on_gpu = device != "cpu"
    host_bytes = host_memory_bytes([with_host_slots(layer, held) for layer in layers], on_gpu)
    host = host_bytes if on_gpu else None
    return Budget(cache_bytes(layers), host_memory=host, rules=[("layers", "cache")], expert_slots=slots, mode="disk")


class Layers:
    """Layers of experts in a file, a resident model with all of them, and what plain reads take.

    Attributes:
        sizes: experts of a layer, inputs, and values between the products of an expert.
        top_k: experts of a token.
        expert_bytes: of one expert.
        per_layer: tensors of a layer; in the file gate_up and down come before their scales.
        handle: of ``model``.
        in_graphs: whether a run replays the step that was captured.
        resident_times: seconds of the resident model, of each run.
    """

    def __init__(self, folder: Path, device: str, form: str, num_layers: int, tiny: bool, given: Sequence[int]) -> None:
        self.sizes, self.top_k = ((16, 256, 128), 2) if tiny else ((128, 4096, 1536), 8)
        slots, held = (3, 5) if tiny else given
        self.device, self.num_layers, self._form = device, num_layers, form
        self.path = folder / f"layers-{form}" / "model.safetensors"
        self.path.parent.mkdir(exist_ok=True)
        with torch.device("meta"):
            self.model, self.resident = (Mixtures(num_layers, form, *self.sizes) for _ in range(2))
        fill(self.resident, device)
        write_layers(self.resident, self.path)
        drop_pages(self.path)
        with self.path.open("rb") as file:
            self._mapped = map_file(file.fileno(), 0, self.path.stat().st_size, read_only=True)
        self._parts = sorted(Checkpoint.open(self.path).tensors.values(), key=lambda part: part.offset)
        self.per_layer = len(self._parts) // num_layers
        self.expert_bytes = sum(part.num_bytes for part in self._parts) // num_layers // self.sizes[0]
        self._plain = PlainReads(self.path, max(part.num_bytes for part in self._parts) // self.sizes[0])
        policy = budget_of(self.model, device, slots, held)
        self.handle = headrace.offload(self.model, policy, checkpoint=self.path.parent, device=device)
        self._cached_before = resident_bytes(self._mapped)
        self.resident_times: list[float] = []
        self.in_graphs = False
        self._step: Any = None

    def capture(self, x: torch.Tensor, ids: torch.Tensor) -> None:
        """Capture a step of ``x`` as headrace captures those of ``generate``; ``ids``: any."""
        from headrace.graphs.decoding import StepGraph  # imports transformers

        self.model(x, ids)
        self._step = StepGraph(lambda ids: (self.model(x, ids),), {"ids": ids}, x.device, in_parts=True)

    def traces(self, num_tokens: int) -> list[Trace]:
        """What tokens choose, by layer."""
        return [seeded_trace(seed, num_tokens, self.sizes[0], self.top_k) for seed in range(self.num_layers)]

    def plain(self, parts: Collection[int], experts: Sequence[int]) -> tuple[int, float]:
        """Bytes, and seconds in which plain requests read ``experts`` in some of the file's tensors."""
        sizes = [(part.offset, part.num_bytes // self.sizes[0]) for i, part in enumerate(self._parts) if i in parts]
        spots = [(offset + each * size, size) for offset, size in sizes for each in experts]
        return sum(size for _, size in spots), self._plain(spots)

    def run(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[float, int, bool]:
        """Seconds, bytes that were read, and whether the output is that of the resident model."""
        ranges: Any = self.handle._session._ranges
        before, begin = ranges.reads, time.perf_counter()
        found = self._step.replay({"ids": ids})[0] if self.in_graphs else self.model(x, ids)
        if self.device != "cpu":
            torch.cuda.synchronize()
        seconds, reads = time.perf_counter() - begin, ranges.reads
        num_bytes = reads.direct + reads.buffered - before.direct - before.buffered
        begin = time.perf_counter()
        expected = self.resident(x, ids)
        if self.device != "cpu":
            torch.cuda.synchronize()
        self.resident_times.append(time.perf_counter() - begin)
        return seconds, num_bytes, torch.equal(found, expected) and bool(found.isfinite().all())

    def forget(self) -> None:
        """No expert is in a memory."""
        for _, cache in self.handle._session._caches:
            cache.reset()
            vars(cache).get("_place_of", {}).clear()

    def row(self, what: str) -> dict[str, Any]:
        layer = self.handle.plan.cached[0]
        case = f"{self.num_layers} layers in {self._form}, {layer.num_slots} and {layer.host_slots} of {self.sizes[0]}"
        stats = self.handle.stats()
        return {
            "table": what, "case": case, "device": self.device, "expert_bytes": self.expert_bytes,
            "host_pinned_bytes": stats.store_bytes.get("host_pinned", 0),
            "planned_device_bytes": self.handle.plan.device_bytes,
            "resident_ms": 1e3 * statistics.median(self.resident_times),
            "page_cache_mib": (resident_bytes(self._mapped) - self._cached_before) / 2**20,
        }  # fmt: skip


def run_steps(
    layers: Layers, traces: Sequence[Trace], warm: int, seconds: float, rates: list[float], is_captured: bool = False
) -> Iterator[tuple[int, float, int, bool]]:
    """Of each token in ``traces`` its number and :meth:`Layers.run`, as many as run in ``seconds``.

    ``rates`` gets those of plain reads in between, in bytes a second.
    """
    num_experts, width, _ = layers.sizes
    x = torch.linspace(-1, 1, width).to(layers.device, torch.bfloat16)[None]
    if is_captured:
        layers.capture(x, torch.zeros(layers.num_layers, 1, layers.top_k, dtype=torch.int64, device=x.device))
    chooser, end = np.random.default_rng(1), time.perf_counter() + seconds
    for token in range(len(traces[0])):
        ids = torch.from_numpy(np.stack([trace[token] for trace in traces])).long().to(layers.device)
        if token % 20 == 0:
            others = chooser.choice(num_experts, min(2 * THREADS, num_experts // 2), replace=False)
            at = token // 20 % layers.num_layers * layers.per_layer + token // 20 % 2  # not the scales
            num_bytes, plain_s = layers.plain([at], others.tolist())
            rates.append(num_bytes / plain_s)
        yield token, *layers.run(x, ids[:, None])
        if time.perf_counter() > end and token > warm + 20:
            break


def steps(
    layers: Layers, warm: int, tokens: int, seconds: float, out: Path | None, is_captured: bool
) -> list[dict[str, Any]]:
    """``tokens`` after the first ``warm``, or as many as run in ``seconds``; replays and eager steps drawn by lot."""
    traces, chooser = layers.traces(warm + tokens), random.Random(3)
    ways = ["eager", "graphs"] if is_captured else ["eager"]
    times: dict[str, list[float]] = {way: [] for way in ways}
    rates, read_bytes, bit_equal, way = list[float](), dict.fromkeys(ways, 0), True, "eager"
    for token, took_s, num_bytes, is_equal in run_steps(layers, traces, warm, seconds, rates, is_captured):
        bit_equal &= is_equal
        if token >= warm:
            times[way].append(took_s)
            read_bytes[way] += num_bytes
        way = chooser.choice(ways)
        layers.in_graphs = way == "graphs"
    counts, rate, rows = layers.handle.stats().experts, statistics.median(rates), []
    for way, each in times.items():
        floor_s = read_bytes[way] / rate
        row = layers.row("expert-steps") | {
            "way": way, "tokens": len(each), "tokens_per_s": len(each) / sum(each),
            "ms": 1e3 * statistics.median(each), "mean_ms": 1e3 * statistics.mean(each),
            "floor_ms": 1e3 * floor_s / len(each), "share_of_floor": floor_s / sum(each), "bytes_read": read_bytes[way],
            "plain_gb_per_s": rate / 1e9,
            "device_hits": sum(e.hits for e in counts) / (len(counts) * layers.top_k * counts[0].steps),
            "misses_of_both": read_bytes[way] / (len(each) * layers.num_layers * layers.top_k * layers.expert_bytes),
            "experts_read": sum(e.read for e in counts), "bit_equal": bit_equal,
        }  # fmt: skip
        print(row, flush=True)
        append(row, out)
        rows.append(row)
    return rows


def prompts(layers: Layers, tokens: int, rounds: int, seconds: float, out: Path | None) -> dict[str, Any]:
    """Prompts of ``tokens`` by turns with plain reads, at least two of each."""
    num_experts, width, _ = layers.sizes
    ids = torch.from_numpy(np.stack(layers.traces(tokens))).long().to(layers.device)
    made = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=made).to(layers.device, torch.bfloat16)
    used = [chosen.unique().tolist() for chosen in ids]
    times, plain_times, ratios, bit_equal, end = list[float](), list[float](), list[float](), True, None
    for turn in range(rounds):
        for way in ("plain", "headrace")[:: -1 if turn % 2 else 1]:
            if way == "plain":
                starts = range(0, layers.num_layers * layers.per_layer, layers.per_layer)
                parts = [range(start, start + layers.per_layer) for start in starts]
                reads = [layers.plain(*each) for each in zip(parts, used, strict=True)]
                plain_bytes = sum(num_bytes for num_bytes, _ in reads)
                plain_times.append(sum(plain_s for _, plain_s in reads))
            else:
                layers.forget()
                took_s, num_bytes, is_equal = layers.run(x, ids)
                times.append(took_s)
                ratios.append(num_bytes / sum(map(len, used)) / layers.expert_bytes)
                bit_equal &= is_equal
        if time.perf_counter() > (end := end or time.perf_counter() + seconds) and turn:
            break
    rate = plain_bytes / statistics.median(plain_times)
    floor_s = layers.num_layers * num_experts * layers.expert_bytes / rate
    row = layers.row("expert-prompts") | {
        "tokens": tokens, "rounds": len(times), "ms": 1e3 * statistics.median(times),
        "plain_ms": 1e3 * statistics.median(plain_times), "floor_ms": 1e3 * floor_s,
        "times_floor": statistics.median(times) / floor_s, "read_ratio": max(ratios),
        "experts": layers.num_layers * num_experts, "experts_used": sum(map(len, used)),
        "experts_read": sum(e.read for e in layers.handle.stats().experts) / len(times),
        "plain_gb_per_s": rate / 1e9, "bit_equal": bit_equal,
    }  # fmt: skip
    print(row, flush=True)
    append(row, out)
    return row


# -- policies ----------------------------------------------------------------------------------------------------------


class Lru:
    """The least recently used leaves."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots, self.held = num_slots, OrderedDict[int, None]()

    def use(self, used: Sequence[int]) -> list[int]:
        """Keep ``used``, of which those that are held are hits; returns the others."""
        missing = [each for each in used if each not in self.held]
        for each in used:
            self.held[each] = None
            self.held.move_to_end(each)
        while len(self.held) > self.num_slots:
            self.held.popitem(last=False)
        return missing


class Aged:
    """The least often used leaves; uses are halved every ``half_life`` tokens."""

    def __init__(self, half_life: int, num_slots: int) -> None:
        self.num_slots, self.half_life, self.tokens = num_slots, half_life, 0
        self.held, self.uses = set[int](), dict[int, float]()

    def use(self, used: Sequence[int]) -> list[int]:
        missing = [each for each in used if each not in self.held]
        self.tokens += 1
        if self.tokens % self.half_life == 0:
            self.uses = {each: count / 2 for each, count in self.uses.items()}
        for each in used:
            self.uses[each] = self.uses.get(each, 0) + 1
        self.held.update(missing)
        while len(self.held) > self.num_slots:
            others = self.held.difference(used) or self.held
            self.held.remove(min(others, key=lambda each: self.uses[each]))
        return missing


def tiers(
    trace: Trace, gpu_slots: int, host_slots: int, policy: Callable[[int], Any], exclusive: bool
) -> tuple[float, float]:
    """Hits of the GPU's slots, and of both tiers together, as shares of all choices."""
    gpu, host, counted = Lru(gpu_slots), policy(host_slots), [0, 0]
    warm_up = len(trace) // 5
    for token, row in enumerate(trace.tolist()):
        before = set(gpu.held)
        missing = gpu.use(row) if gpu_slots else row
        if exclusive:
            read = [each for each in missing if each not in host.held]
            for each in missing:
                host.held.pop(each, None)
            host.use([each for each in before if each not in gpu.held])
        else:
            read = host.use(missing) if missing else []
        if token >= warm_up:
            counted[0] += len(missing)
            counted[1] += len(read)
    total = trace[warm_up:].size
    return 1 - counted[0] / total, 1 - counted[1] / total


SHAPES = {"Qwen3-235B-A22B, GLM-4.7": (128, 8), "DeepSeek-V3": (256, 8), "Kimi-K2": (384, 8), "512, top 10": (512, 10)}
SHARES = [(0.0, 0.2), (0.0, 0.4), (0.0, 0.7), (0.1, 0.2), (0.1, 0.4), (0.1, 0.7), (0.25, 0.4)]


POLICIES: list[tuple[str, Callable[[int], Any], bool]] = [
    ("lru", Lru, False), ("aged_16", partial(Aged, 16), False), ("aged_64", partial(Aged, 64), False),
    ("lru_exclusive", Lru, True),
]  # fmt: skip


def policies(out: Path | None, layers: int = 4, tokens: int = 1024) -> list[dict[str, Any]]:
    rows = []
    for shape, (experts, top_k) in SHAPES.items():
        one = [seeded_trace(seed, tokens, experts, top_k) for seed in range(layers)]
        seeds = np.arange(layers * tokens // 128).reshape(layers, -1)
        several = [np.concatenate([seeded_trace(int(s), 128, experts, top_k) for s in each]) for each in seeds]
        for (gpu, host), (text, traces) in product(SHARES, (("one", one), ("several", several))):
            found, sizes = {}, (round(gpu * experts), round(host * experts))
            for name, policy, exclusive in POLICIES:
                if exclusive and not gpu:
                    continue
                each = [tiers(trace, *sizes, policy, exclusive) for trace in traces]
                found["gpu"], found[name] = (statistics.mean(column) for column in zip(*each, strict=True))
            row = {
                "table": "expert-tiers",
                "case": shape,
                "experts": experts,
                "top_k": top_k,
                "texts": text,
                "gpu_slots": sizes[0],
                "host_slots": sizes[1],
            }
            rows.append(row | {name: round(hits, 4) for name, hits in found.items()})
            print(rows[-1], flush=True)
            append(rows[-1], out)
    return rows


def main() -> None:
    parser = parser_of(__doc__, rounds=40)
    parser.add_argument("--folder", type=writable_folder, default=Path("/tmp"), help="on the disk to measure")
    parser.add_argument("--gib", type=float, default=4, help="size of the file, which stays in the folder")
    parser.add_argument("--steps", action="store_true", help="steps of layers")
    parser.add_argument("--prompt", type=int, metavar="TOKENS", help="prompts of so many tokens through layers")
    parser.add_argument("--form", choices=["bf16", "int4"], default="bf16", help="of the layers")
    parser.add_argument("--layers", type=int, default=3, help="of 4.8 or 1.2 GB; all of them have to fit the device")
    parser.add_argument("--slots", type=int, default=13, help="experts of a layer on the device")
    parser.add_argument("--held", type=int, default=51, help="experts of a layer in host memory beside those")
    parser.add_argument("--device", default="cuda", help="of the layers")
    parser.add_argument("--tokens", type=int, default=4096, help="steps after the first 160, if there is time")
    parser.add_argument("--seconds", type=float, default=60, help="after which the steps or prompts end")
    parser.add_argument("--tiny", action="store_true", help="small layers")
    parser.add_argument("--no-graphs", action="store_true", help="eager steps alone")
    parser.add_argument("--policies", action="store_true", help="hits by policy, and no reads")
    given = parser.parse_args()
    if given.policies:
        return finish("expert_files policies", policies(given.out))
    if given.steps or given.prompt:
        slots = given.slots, given.held
        layers = Layers(given.folder, given.device, given.form, given.layers, given.tiny, slots)
        with layers.handle, torch.inference_mode():
            if given.prompt:
                rows = [prompts(layers, given.prompt, given.rounds, given.seconds, given.out)]
            else:
                warm, is_captured = 20 if given.tiny else 160, given.device != "cpu" and not given.no_graphs
                rows = steps(layers, warm, given.tokens, given.seconds, given.out, is_captured)
        return finish("expert_files", rows)
    num_experts = int(given.gib * 2**30) // EXPERT_BYTES
    finish("expert_files", reads(given.folder, num_experts, given.rounds, given.out))


if __name__ == "__main__":
    main()
