"""Mode ``disk`` on a GPU beside garbage of a device, which Python collects in any thread.

What ends while the device waits for a read waits for the device, or for a lock of the driver whose holder waits for it.
So nothing that the device waits for may be a thread of this process: with the readers in it this stood still.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gpu_files import POLICIES, captured, inputs, save
from gpu_models import twins

import headrace
from faulty_readers import Faults
from headrace.memory.pinned import pinned_region

pytestmark = pytest.mark.alone


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


@contextmanager
def collecting(garbage: list[object], pause_s: float = 0.001) -> Iterator[None]:
    """End one thing after the other in a thread, beside what the caller does."""

    def collect() -> None:
        while garbage:
            garbage.pop()
            time.sleep(pause_s)

    thread = threading.Thread(target=collect)
    thread.start()
    yield
    thread.join(30)
    assert not thread.is_alive(), "garbage waits for the device"


@torch.no_grad()
@pytest.mark.parametrize("kind", GARBAGE)
def test_what_ends_while_the_device_waits_holds_nobody_up(kind: str, tmp_path: Path, faults: Faults) -> None:
    resident, model = twins()
    expected = resident(inputs())
    handle = headrace.offload(model, POLICIES["two slots"], checkpoint=save(model, tmp_path))
    graph, out = captured(model, inputs())
    garbage = GARBAGE[kind]()
    torch.cuda.synchronize()
    faults.slow(0.001)
    begin = time.monotonic()
    rounds = 0
    with collecting(garbage):
        while garbage or rounds < 2:
            for _ in range(3):
                graph.replay()
            for _ in range(60):  # more than a stream takes before it makes the caller wait
                last = model(inputs())
            assert torch.equal(out, expected)
            assert torch.equal(last, expected)
            rounds += 1
    assert time.monotonic() - begin < 30
    staging = handle.stats().staging
    assert staging is not None
    assert staging.stalls > 0, "the device waited for no read"
    handle.remove(graphs_released=True)
