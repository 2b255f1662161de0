"""``penstock bench step`` on a GPU: one step of a reference stack, offloaded in several ways, against the floor.

    floor = max(resident step, bytes moved / host-to-device rate measured in the same run)

All variants live on the device at once and are timed in turn. Each must give the bits of the resident stack.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import penstock
from penstock.bench.fresh import FreshOnload
from penstock.bench.measure import Timing, interleave, time_cuda
from penstock.bench.shapes import DecoderShape, Stack, build_stack
from penstock.config import Budget, Policy, Prefetch
from penstock.errors import OptionError
from penstock.memory.pinning import pinned_region
from penstock.model.inventory import take_inventory
from penstock.plan import build_plan
from penstock.runtime.session import OffloadSession
from penstock.transfer.cuda_stream import StreamLink

__all__ = ["LinkProbe", "VariantSpec", "parse_variant", "run"]


@dataclass(frozen=True)
class VariantSpec:
    """One way to run the stack.

    Attributes:
        name: as given on the command line.
        policy: ``None`` for the resident stack.
        graph: replay one captured graph instead of running eagerly.
        per_tensor: one copy per tensor (ablation).
        fresh: allocate at each onload, as engines did before static slots (ablation; eager only).
    """

    name: str
    policy: Policy | None
    graph: bool = True
    per_tensor: bool = False
    fresh: bool = False


def parse_variant(text: str, weight_bytes: int, layer_bytes: int) -> VariantSpec:
    """A variant from ``even:0.25``, ``group:4/1/2``, ``memory:0.8``, with ``+eager``, ``+tensors`` or ``+fresh``.

    ``even:F`` offloads at least the share F of the weights, spread over all layers; ``memory:F`` allows the share F of
    the weights as device memory, slots included; ``group:A/B/C`` is the group rule.
    """
    kind, _, value = text.split("+")[0].partition(":")
    options = set(text.split("+")[1:])
    if unknown := options - {"eager", "tensors", "fresh"}:
        raise OptionError(f"variant {text!r}: unknown option {unknown}; use +eager, +tensors or +fresh")
    policy: Policy
    if kind == "group":
        size, number, step = (int(part) for part in value.split("/"))
        policy = Prefetch(size, number, step)
    elif kind == "even":
        # Two slots of this share of a layer come on top of what stays.
        policy = Budget(int(weight_bytes * (1 - float(value)) + 2.1 * float(value) * layer_bytes))
    elif kind == "memory":
        policy = Budget(int(weight_bytes * float(value)))
    else:
        raise OptionError(f"variant {text!r}: expected even:F, memory:F or group:A/B/C")
    return VariantSpec(text, policy, not options & {"eager", "fresh"}, "tensors" in options, "fresh" in options)


class _Variant:
    """A stack under one spec, with its inputs, captured steps and what it costs."""

    def __init__(self, spec: VariantSpec, shape: DecoderShape, device: torch.device) -> None:
        self.spec = spec
        torch.cuda.synchronize()
        base_bytes = torch.cuda.memory_allocated(device)
        rest = device if spec.policy is None else "cpu"
        self.stack = build_stack(shape, torch.bfloat16, rest, device)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        self.handle: penstock.Handle | FreshOnload | None = None
        if spec.fresh and isinstance(spec.policy, Prefetch):
            self.handle = FreshOnload(self.stack, spec.policy, device)
        elif spec.policy is not None:
            self.handle = _offload(self.stack, spec, device)
        # What the weights take, measured; activations are added per number of rows.
        self._own_bytes = torch.cuda.memory_allocated(device) - base_bytes
        self._load_peak_bytes = torch.cuda.max_memory_allocated(device) - base_bytes
        self.activation_bytes: dict[int, int] = {}
        self.steps: dict[int, Any] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        self.peak_bytes: dict[int, int] = {}

    def prepare(self, x: torch.Tensor) -> None:
        """Warm up, check memory, and capture the step for the rows of ``x``."""
        rows = x.shape[0]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        for _ in range(2):
            out = self.stack(x)
        torch.cuda.synchronize()
        self.activation_bytes[rows] = torch.cuda.max_memory_allocated() - before_bytes
        self.peak_bytes[rows] = max(self._load_peak_bytes, self._own_bytes + self.activation_bytes[rows])
        if not self.spec.graph:
            self.outputs[rows] = out.clone()
            self.steps[rows] = lambda: self.stack(x)
            return
        del out
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.stack(x)
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        self.outputs[rows] = out
        self.steps[rows] = graph.replay

    @property
    def moved_bytes(self) -> int:
        """Bytes over the link per step."""
        return self.handle.plan.moved_bytes if self.handle is not None else 0

    @property
    def planned_bytes(self) -> int:
        """Device memory for weights."""
        if self.handle is not None:
            return self.handle.plan.device_bytes
        return take_inventory(self.stack).num_bytes


def run(
    shape: DecoderShape, variants: Sequence[str], rows: Sequence[int], rounds: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield one result per variant and number of rows, rows ascending; see ``docs/design.md`` ("Evidence")."""
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.no_grad():
        sizes = take_inventory(Stack(shape, torch.bfloat16, "meta"))
        layer_bytes = sizes.num_bytes // shape.num_layers
        specs = [VariantSpec("resident", None)]
        specs += [parse_variant(text, sizes.num_bytes, layer_bytes) for text in variants]
        models = [_Variant(spec, shape, device) for spec in specs]
        probe = LinkProbe(device)
        for count in rows:
            yield from _measure_rows(models, count, shape, probe, rounds, repeats, device)


def _measure_rows(
    models: Sequence[_Variant],
    count: int,
    shape: DecoderShape,
    probe: LinkProbe,
    rounds: int,
    repeats: int,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    generator = torch.Generator(device=device).manual_seed(count)
    x = torch.randn(count, shape.hidden, device=device, generator=generator).to(torch.bfloat16)
    for model in models:
        model.prepare(x)
    steps = {model.spec.name: model.steps[count] for model in models}
    timings = interleave({**steps, "link": probe.copy}, rounds, repeats, time_cuda)
    link_bytes_per_s = probe.num_bytes / (timings.pop("link").ms / 1e3)
    resident = models[0]
    activation_bytes = resident.activation_bytes[count]
    for model in models:
        # After the timing: whatever the interleaving did to the slots shows here.
        model.steps[count]()
        torch.cuda.synchronize()
        yield _row(model, count, timings, link_bytes_per_s, activation_bytes, resident)


def _row(
    model: _Variant,
    count: int,
    timings: dict[str, Timing],
    link_bytes_per_s: float,
    activation_bytes: int,
    resident: _Variant,
) -> dict[str, Any]:
    timing = timings[model.spec.name]
    resident_ms = timings["resident"].ms
    floor_ms = max(resident_ms, model.moved_bytes / link_bytes_per_s * 1e3)
    return {
        "case": model.spec.name,
        "rows": count,
        "ms": timing.ms,
        "spread_ms": timing.spread_ms,
        "floor_ms": floor_ms,
        "share_of_floor": timing.ms / floor_ms,
        "resident_ms": resident_ms,
        "bytes_moved": model.moved_bytes,
        "link_gb_per_s": link_bytes_per_s / 1e9,
        "peak_device_bytes": model.peak_bytes[count],
        "planned_device_bytes": model.planned_bytes + activation_bytes,
        "bit_equal": bool(torch.equal(model.outputs[count], resident.outputs[count])),
        "num_units": len(model.handle.plan.units) if model.handle else 0,
        "num_slots": model.handle.plan.num_slots if model.handle else 0,
    }


def _offload(stack: Stack, spec: VariantSpec, device: torch.device) -> penstock.Handle:
    assert spec.policy is not None
    inventory = take_inventory(stack)
    plan = build_plan(inventory, spec.policy)
    link = StreamLink(device, per_tensor=spec.per_tensor)
    return penstock.Handle(stack, OffloadSession(stack, plan, inventory, device=device, link=link))


class LinkProbe:
    """One large pinned copy to the device."""

    num_bytes = 1 << 30

    def __init__(self, device: torch.device) -> None:
        self._host = pinned_region(self.num_bytes)
        self._slot = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def copy(self) -> None:
        """Move 1 GiB."""
        self._slot.copy_(self._host, non_blocking=True)
