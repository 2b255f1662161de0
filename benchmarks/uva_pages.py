"""How fast a GPU reads host memory in place, by how the memory was made: mapped and registered, or torch's own.

python benchmarks/uva_pages.py        prints GB/s of a matrix-vector product, interleaved over several rounds
"""

from __future__ import annotations

import statistics

import torch

from penstock.store.pages import map_pages, populate_parallel
from penstock.store.pinned import device_view, pin_threads
from penstock.store.registration import CudaRegistrar, PinnedBytes

BYTES, COLUMNS, ROUNDS = 1 << 30, 2048, 20


def _registered(huge: bool) -> torch.Tensor:
    pinned = PinnedBytes(torch.frombuffer(map_pages(BYTES, huge=huge), dtype=torch.uint8))
    populate_parallel(pinned.blob, pin_threads())
    assert pinned.register(CudaRegistrar()) == 0
    return pinned.blob


def main() -> None:
    device = torch.device("cuda")
    torch.zeros(1, device=device)
    blobs = {
        "registered, huge pages": _registered(True),
        "registered, small pages": _registered(False),
        "torch pin_memory": torch.zeros(BYTES, dtype=torch.uint8, pin_memory=True),
    }
    views = {name: device_view(blob, device).view(torch.bfloat16).view(-1, COLUMNS) for name, blob in blobs.items()}
    row = torch.randn(COLUMNS, device=device, dtype=torch.bfloat16)
    times: dict[str, list[float]] = {name: [] for name in views}
    for _ in range(ROUNDS):
        for name, matrix in views.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            torch.mv(matrix, row)
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    for name, found in times.items():
        print(f"{name:26s} {BYTES / statistics.median(found) / 1e6:7.2f} GB/s")


if __name__ == "__main__":
    main()
