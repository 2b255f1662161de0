"""Mode ``disk`` on a GPU beside garbage of a device: Python collects it in any thread, readers of the ring included.

The stream waits for a reader; if what ends in that reader waits for the device, or for a lock that the caller's thread
holds in the driver meanwhile, nothing moves any more until the watchdog of the ring gives up.
"""

from __future__ import annotations

import copy
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from gpu_models import build
from test_disk import POLICIES, captured, inputs, save

import penstock
from penstock.store.pinned import pinned_region


def events() -> list[object]:
    found = [torch.cuda.Event() for _ in range(400)]
    for event in found:
        event.record()
    return list(found)


def graphs() -> list[object]:
    found: list[object] = []
    x = torch.zeros(1000, device="cuda")
    for _ in range(20):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
        graph.replay()
        found.append((graph, y))
    return found


GARBAGE = {
    "events": events,
    "graphs": graphs,
    "tensors": lambda: [torch.empty(3 << 20, device="cuda") for _ in range(50)],
    "registered memory": lambda: [pinned_region(1 << 20) for _ in range(20)],
    "torch's pinned memory": lambda: [torch.empty(1 << 20, pin_memory=True) for _ in range(20)],
}


@torch.no_grad()
@pytest.mark.parametrize("kind", GARBAGE)
def test_what_ends_in_a_reader_holds_nobody_up(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resident = build()
    model = copy.deepcopy(resident)
    expected = resident(inputs())
    handle = penstock.offload(model, POLICIES["two slots"], checkpoint=save(model, tmp_path))
    graph, out = captured(model, inputs())
    garbage = GARBAGE[kind]()
    torch.cuda.synchronize()
    real = os.preadv

    def read_and_collect(*args: object) -> int:
        time.sleep(0.001)
        with suppress(IndexError):
            garbage.pop()
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("os.preadv", read_and_collect)
    begin = time.monotonic()
    while garbage:
        graph.replay()
        assert torch.equal(out, expected)
        for _ in range(60):  # more than a stream takes before it makes the caller wait
            last = model(inputs())
        assert torch.equal(last, expected)
    assert time.monotonic() - begin < 30
    handle.remove()
