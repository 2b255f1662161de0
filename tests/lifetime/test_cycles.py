"""The promise: park, resize, update and forwards in any order keep the bits, and what they take they give back."""

from __future__ import annotations

import gc
import random
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from headrace.errors import CheckpointError
from lifetimes import WAYS, pair


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_hundred_in_random_order(way: str, tmp_path: Path) -> None:
    threads = threading.active_count()
    here, chosen = pair(way, tmp_path), random.Random(way)
    names = [n for n, _ in here.twin.named_parameters() if here.handle.plan.placements.get(n) is not None]
    copies, sizes = None, ("2560KiB", "1GiB") if way == "experts" else ("640KiB", "1GiB")
    for step in range(100):
        call = chosen.choice(["park", "auto", "resume", "update", "resize", "forward", "forward"])
        placements = here.handle.plan.placements
        takes = [n for n in names if (kind := placements[n].kind) is None or not kind.in_files]
        if call == "park":
            here.handle.park()
        elif call == "auto":
            here.handle.park(resume="auto")
        elif call == "resume":
            here.handle.resume()
        elif call == "resize":
            with suppress(CheckpointError):  # the files have another value than an update
                here.handle.resize(chosen.choice(sizes))
            copies = None
        elif call == "update" and takes:
            name = chosen.choice(takes)
            twin = here.twin.get_parameter(name)
            value = torch.randn(twin.shape, generator=torch.Generator().manual_seed(step)).mul(0.05).to(twin.dtype)
            here.handle.update({name: value})
            twin.data.copy_(value)
        elif here.handle._life is None or here.handle._life.parked != "call":
            here.check()
        if here.handle._life is not None and here.handle._life.parked:
            kept = here.handle._life.copies
            placed = {kept.bytes_of(name).data_ptr() for name in kept._held}
            copies = copies or placed
            assert placed == copies  # taken once
    here.handle.resume()
    here.check()
    gc.collect()
    here.check_state()
    assert threading.active_count() <= threads
