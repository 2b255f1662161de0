"""How fast a GPU reads host memory in place, by how the memory was made: mapped and registered, or torch's own.

python benchmarks/uva_pages.py [--gib 1]        prints GB/s of matrix-vector products, interleaved over several rounds

Each product reads an expert of 11.5 MB somewhere in the memory, as a mixture of experts does: a GPU looks pages up, and
how many of them its tables hold at once may depend on their size. ``rows``: torch's kernel, which reads on and on;
``tiles``: in the order of fused kernels of experts, 64 rows at a time and of each only a little.
"""

from __future__ import annotations

import argparse
import random
import statistics

import torch
import triton
import triton.language as tl

from headrace.memory.pages import map_pages, populate_parallel
from headrace.memory.pinned import CudaRegistrar, PinnedBuffer, device_view, pin_threads

EXPERT_ROWS, COLUMNS = 2816, 2048
EXPERT_BYTES = EXPERT_ROWS * COLUMNS * 2
EXPERTS_READ, ROUNDS = 64, 10
TILE_ROWS, TILE_COLUMNS = 64, 64


@triton.jit  # type: ignore[untyped-decorator]
def _tiled_mv(weight, row, out, columns: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    total = tl.zeros((tile_rows,), dtype=tl.float32)
    for start in range(0, columns, tile_columns):
        at = start + tl.arange(0, tile_columns)
        tile = tl.load(weight + rows[:, None] * columns + at[None, :]).to(tl.float32)
        total += tl.sum(tile * tl.load(row + at).to(tl.float32)[None, :], axis=1)
    tl.store(out + rows, total)


def _tiles(expert: torch.Tensor, row: torch.Tensor, out: torch.Tensor) -> None:
    _tiled_mv[(EXPERT_ROWS // TILE_ROWS,)](expert, row, out, COLUMNS, TILE_ROWS, TILE_COLUMNS)


def _rows(expert: torch.Tensor, row: torch.Tensor, out: torch.Tensor) -> None:
    torch.mv(expert, row)


def _registered(num_bytes: int, huge: bool) -> torch.Tensor:
    pinned = PinnedBuffer(torch.from_numpy(map_pages(num_bytes, huge=huge)))
    populate_parallel(pinned.buffer, pin_threads())
    assert pinned.register(CudaRegistrar()) == 0
    return pinned.buffer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1)
    num_experts = int(parser.parse_args().gib * 2**30) // EXPERT_BYTES
    num_bytes = num_experts * EXPERT_BYTES
    device = torch.device("cuda")
    torch.zeros(1, device=device)
    buffers = {
        "registered, huge pages": _registered(num_bytes, True),
        "registered, small pages": _registered(num_bytes, False),
        "torch pin_memory": torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True),
    }
    views = {n: device_view(b, device).view(torch.bfloat16).view(-1, EXPERT_ROWS, COLUMNS) for n, b in buffers.items()}
    row = torch.randn(COLUMNS, device=device, dtype=torch.bfloat16)
    out = torch.empty(EXPERT_ROWS, device=device)
    _check_tiles(next(iter(views.values()))[0], row, out)
    chooser = random.Random(0)
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        chosen = [chooser.randrange(num_experts) for _ in range(EXPERTS_READ)]
        for order, product in (("rows", _rows), ("tiles", _tiles)):
            for name, experts in views.items():
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                for expert in chosen:
                    product(experts[expert], row, out)
                end.record()
                end.synchronize()
                times.setdefault((order, name), []).append(begin.elapsed_time(end))
    for (order, name), found in times.items():
        rate = EXPERTS_READ * EXPERT_BYTES / statistics.median(found) / 1e6
        print(f"{order:6s}{name:26s} {rate:7.2f} GB/s")


def _check_tiles(expert: torch.Tensor, row: torch.Tensor, out: torch.Tensor) -> None:
    expert.copy_(torch.randn(expert.shape, device=row.device))
    _tiles(expert, row, out)
    torch.testing.assert_close(out, torch.mv(expert.float(), row.float()), rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
