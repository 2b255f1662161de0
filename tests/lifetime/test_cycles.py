"""The promise: park, resume, update and forwards in any order keep the bits, and what they take they give back."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path

import pytest
import torch

from lifetimes import WAYS, pair


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_hundred_in_random_order(way: str, tmp_path: Path) -> None:
    here, chosen = pair(way, tmp_path), random.Random(way)
    names = [n for n, _ in here.twin.named_parameters() if here.handle.plan.placements.get(n) is not None]
    takes = [
        name
        for name in names
        if (placed := here.handle.plan.placements[name]).mechanism == "resident" or not placed.kind.in_files  # type: ignore[union-attr]
    ]
    threads, copies = threading.active_count(), None
    for step in range(100):
        call = chosen.choice(["park", "auto", "resume", "update", "forward"])
        if call == "park":
            here.handle.park()
        elif call == "auto":
            here.handle.park(resume="auto")
        elif call == "resume":
            here.handle.resume()
        elif call == "update" and takes:
            name = chosen.choice(takes)
            twin = here.twin.get_parameter(name)
            value = torch.randn(twin.shape, generator=torch.Generator().manual_seed(step)).mul(0.05).to(twin.dtype)
            here.handle.update({name: value})
            twin.data.copy_(value)
        elif here.handle._life is None or here.handle._life.parked != "call":
            here.check()
        if here.handle._life is not None and here.handle._life.parked:
            placed = {each.data_ptr() for each in here.handle._life.copies._buffers.values()}
            copies = copies or placed
            assert placed == copies  # taken once
    here.handle.resume()
    here.check()
    assert threading.active_count() <= threads
    gc.collect()
    here.check_state()
