"""The reference step on a GPU without one of its parts: no graph, one copy per tensor, or no static slots.

    python benchmarks/step_ablation.py --rows 1,2048 --variants group:4/1/2,group:4/1/2+tensors,group:4/1/2+fresh

``+eager`` runs without a CUDA graph, ``+tensors`` makes one copy per tensor instead of one per unit, and ``+fresh``
(group rules only, eager) is the scheme that static slots replaced: before a layer runs, the next one is copied on a
side stream into newly allocated tensors; after it has run its tensors are dropped. Addresses change at every step, so
it cannot be captured, and each copy pays for an allocation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import headrace
from harness import append, counts, finish, parser_of, print_step
from headrace.api import start
from headrace.bench.reference_step import QWEN3_8B, Stack, Variant, measure_cuda, parse_policy
from headrace.config import Policy, Prefetch
from headrace.model.inventory import take_inventory
from headrace.plan.build import build_plan
from headrace.plan.plan import Plan
from headrace.runtime.prepare import prepare
from headrace.runtime.this_machine import PlanRequest
from headrace.stores.store import Load
from headrace.transfer.cuda_stream import StreamLink


class FreshOnload:
    """Group rule with fresh allocations; eager only; for models whose tensors are plain and untied."""

    def __init__(self, model: nn.Module, policy: Prefetch, device: torch.device) -> None:
        self.plan: Plan = build_plan(take_inventory(model), policy)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._units: list[list[tuple[nn.Parameter, torch.Tensor]]] = []
        self._events: dict[int, torch.cuda.Event] = {}
        offloaded = {entry.storage for unit in self.plan.units for entry in unit.entries}
        for name, parameter in model.named_parameters():
            if name not in offloaded:
                parameter.data = parameter.data.to(device)
        for unit in self.plan.units:
            pairs = [(model.get_parameter(entry.storage)) for entry in unit.entries]
            self._units.append([(p, p.data.pin_memory()) for p in pairs])
            for parameter, host in self._units[-1]:
                parameter.data = host
        for index, unit in enumerate(self.plan.units):
            module = model.get_submodule(unit.module_fqn)
            module.register_forward_pre_hook(lambda module, args, index=index: self._before(index))
            module.register_forward_hook(lambda module, args, out, index=index: self._after(index))

    def _onload(self, index: int) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for parameter, host in self._units[index]:
                parameter.data = host.to(self._device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._events[index] = event

    def _before(self, index: int) -> None:
        if index not in self._events:
            self._onload(index)
        torch.cuda.current_stream(self._device).wait_event(self._events.pop(index))
        for parameter, _host in self._units[index]:
            parameter.data.record_stream(torch.cuda.current_stream(self._device))
        if index + 1 < len(self._units):
            self._onload(index + 1)

    def _after(self, index: int) -> None:
        for parameter, host in self._units[index]:
            parameter.data = host


class PerTensorLink(StreamLink):
    """One copy per tensor instead of one per unit."""

    def _enqueue(self, load: Load, slot: torch.Tensor) -> None:
        assert load.slab is not None
        for copy in load.copies:
            part = slice(copy.dst_offset, copy.dst_end)
            slot[part].copy_(load.slab[part], non_blocking=True)


def offload_per_tensor(stack: Stack, policy: Policy, device: torch.device) -> headrace.Handle:
    plan = build_plan(take_inventory(stack), policy)
    return start(prepare(PlanRequest(stack, plan, device=device)), link=PerTensorLink(device))


def variant(text: str, weight_bytes: int, device: torch.device) -> Variant:
    """``even:F``, ``memory:F`` or ``group:A/B/C``, with one of the options."""
    policy = parse_policy(text, weight_bytes, weight_bytes // QWEN3_8B.num_layers)
    option = text.partition("+")[2]
    if option == "fresh" and isinstance(policy, Prefetch):
        fresh = Variant(text, QWEN3_8B, policy, device, FreshOnload)
        fresh.eager = True
        return fresh
    if option == "tensors":
        return Variant(text, QWEN3_8B, policy, device, offload_per_tensor)
    if option in ("", "eager"):
        return Variant(text, QWEN3_8B, policy, device)
    raise SystemExit(f"variant {text!r}: expected +eager, +tensors, or +fresh after a group rule")


@torch.no_grad()
def main() -> None:
    parser = parser_of(__doc__, rounds=3, repeats=5)
    parser.add_argument("--rows", type=counts, default=[1, 2048], help="rows per step")
    parser.add_argument("--variants", default="group:4/1/2,group:4/1/2+tensors,group:4/1/2+eager,group:4/1/2+fresh")
    given = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    weight_bytes = take_inventory(Stack(QWEN3_8B, torch.bfloat16, "meta")).num_bytes
    models = [Variant("resident", QWEN3_8B, None, device)]
    models += [variant(text, weight_bytes, device) for text in given.variants.split(",")]
    results: list[dict[str, Any]] = []
    for row in measure_cuda(models, QWEN3_8B, given.rows, given.rounds, given.repeats):
        results.append(row)
        print_step(row)
        append(row, given.out)
    finish("step ablation", results)


if __name__ == "__main__":
    main()
