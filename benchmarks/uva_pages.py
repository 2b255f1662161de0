"""How fast a GPU reads host memory in place, by how the memory was made: mapped and registered, or torch's own.

python benchmarks/uva_pages.py [--gib 1]        prints GB/s of matrix-vector products, interleaved over several rounds

Each product reads an expert of 11.5 MB somewhere in the memory, as a mixture of experts does: a GPU looks pages up, and
how many of them its tables hold at once may depend on their size.
"""

from __future__ import annotations

import argparse
import random
import statistics

import torch

from penstock.store.pages import map_pages, populate_parallel
from penstock.store.pinning import device_view, pin_threads
from penstock.store.registration import CudaRegistrar, PinnedBytes

EXPERT_ROWS, COLUMNS = 2816, 2048
EXPERT_BYTES = EXPERT_ROWS * COLUMNS * 2
EXPERTS_READ, ROUNDS = 64, 10


def _registered(num_bytes: int, huge: bool) -> torch.Tensor:
    pinned = PinnedBytes(torch.frombuffer(map_pages(num_bytes, huge=huge), dtype=torch.uint8))
    populate_parallel(pinned.blob, pin_threads())
    assert pinned.register(CudaRegistrar()) == 0
    return pinned.blob


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1)
    num_experts = int(parser.parse_args().gib * 2**30) // EXPERT_BYTES
    num_bytes = num_experts * EXPERT_BYTES
    device = torch.device("cuda")
    torch.zeros(1, device=device)
    blobs = {
        "registered, huge pages": _registered(num_bytes, True),
        "registered, small pages": _registered(num_bytes, False),
        "torch pin_memory": torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True),
    }
    views = {n: device_view(b, device).view(torch.bfloat16).view(-1, EXPERT_ROWS, COLUMNS) for n, b in blobs.items()}
    row = torch.randn(COLUMNS, device=device, dtype=torch.bfloat16)
    chooser = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in views}
    for _ in range(ROUNDS):
        chosen = [chooser.randrange(num_experts) for _ in range(EXPERTS_READ)]
        for name, experts in views.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for expert in chosen:
                torch.mv(experts[expert], row)
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    for name, found in times.items():
        print(f"{name:26s} {EXPERTS_READ * EXPERT_BYTES / statistics.median(found) / 1e6:7.2f} GB/s")


if __name__ == "__main__":
    main()
