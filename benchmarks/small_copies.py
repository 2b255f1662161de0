"""How long small copies to a GPU wait behind a large one on another stream, by the pieces that one is cut into.

python benchmarks/small_copies.py        prints, per size of a piece: GB/s of the large copy alone, and the wait

An engine copies the inputs of its next forward while an offloader copies weights. A copy engine takes what its streams
give it in turns; how fine these are is what this measures.
"""

from __future__ import annotations

import statistics

import torch

from penstock.store.pinned import pinned_region

LARGE_BYTES, SMALL_BYTES, SMALL_COPIES, ROUNDS = 302 << 20, 4096, 8, 20  # eight: the inputs of a step of vLLM's
PIECES_MIB = (302, 64, 32, 16, 8, 4, 2)


def main() -> None:
    device = torch.device("cuda")
    source, target = pinned_region(LARGE_BYTES), torch.empty(LARGE_BYTES, dtype=torch.uint8, device=device)
    inputs, row = pinned_region(SMALL_BYTES), torch.empty(SMALL_BYTES, dtype=torch.uint8, device=device)
    weights, compute = torch.cuda.Stream(), torch.cuda.Stream()
    for mib in PIECES_MIB:
        rates, waits, alone = [], [], []
        for _ in range(ROUNDS):
            rates.append(LARGE_BYTES / _copy_ms(weights, source, target, mib << 20, None, inputs, row)[0] / 1e6)
            waits.append(_copy_ms(weights, source, target, mib << 20, compute, inputs, row)[1])
            alone.append(_copy_ms(weights, source[:4096], target[:4096], mib << 20, compute, inputs, row)[1])
        print(
            f"pieces of {mib:4d} MiB: {statistics.median(rates):6.2f} GB/s; {SMALL_COPIES} small copies take "
            f"{statistics.median(waits):6.3f} ms (at most {max(waits):6.3f}), alone {statistics.median(alone):6.3f} ms"
        )


def _copy_ms(
    stream: torch.cuda.Stream,
    source: torch.Tensor,
    target: torch.Tensor,
    piece_bytes: int,
    other: torch.cuda.Stream | None,
    inputs: torch.Tensor,
    row: torch.Tensor,
) -> tuple[float, float]:
    """Milliseconds of the large copy; and of small ones on ``other``, given while the large one is under way."""
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000)  # until everything has been given
        events[0].record()
        for start in range(0, source.numel(), piece_bytes):
            target[start : start + piece_bytes].copy_(source[start : start + piece_bytes], non_blocking=True)
        events[1].record()
    if other is not None:
        with torch.cuda.stream(other):
            other.wait_event(events[0])  # the large copy is about to begin
            events[2].record()
            for _ in range(SMALL_COPIES):
                row.copy_(inputs, non_blocking=True)
            events[3].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]), events[2].elapsed_time(events[3]) if other is not None else 0.0


if __name__ == "__main__":
    main()
