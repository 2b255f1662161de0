"""The scheme that static slots replaced, kept as a baseline: a fresh allocation and a copy per tensor at each onload.

Before a layer runs, the next one is copied on a side stream into newly allocated tensors; after it has run its tensors
are dropped. Addresses change at every step, so it cannot be captured, and each copy pays for an allocation.
"""

from __future__ import annotations

import torch
from torch import nn

from penstock.config import Prefetch
from penstock.model.inventory import take_inventory
from penstock.plan import Plan, build_plan

__all__ = ["FreshOnload"]


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
            anchor = model.get_submodule(unit.anchor)
            anchor.register_forward_pre_hook(lambda module, args, index=index: self._before(index))
            anchor.register_forward_hook(lambda module, args, out, index=index: self._after(index))

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
