"""How long small copies to a GPU wait behind a large one on another stream, by how the large one is made.

python benchmarks/small_copies.py        prints, per way: GB/s of the large copy, and milliseconds of eight small ones

An engine copies the inputs of its next forward while an offloader copies weights. A copy engine takes what its streams
give it in turns, so it may matter into how many pieces a large copy is cut; and a kernel that reads pinned memory in
place and writes it to the slot leaves the copy engine alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from headrace.memory.pinned import device_view, pinned_region

LARGE_BYTES, SMALL_BYTES, SMALL_COPIES, ROUNDS = 302 << 20, 4096, 8, 20  # eight: the inputs of a step of vLLM's
PIECES_MIB = (302, 16, 4)
TURNS_MIB = (64, 32, 16, 8, 4, 2)
PROGRAMS = (2, 4, 8, 16, 32)
BLOCK = 2048  # words of eight bytes


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _copy_words(source, target, num_words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, num_words, step):
        words = start + tl.arange(0, BLOCK)
        tl.store(target + words, tl.load(source + words, mask=words < num_words), mask=words < num_words)


def main() -> None:
    device = torch.device("cuda")
    source, target = pinned_region(LARGE_BYTES), torch.empty(LARGE_BYTES, dtype=torch.uint8, device=device)
    source.random_(generator=torch.Generator().manual_seed(0))
    ways: dict[str, Callable[[], object]] = {"nothing": lambda: None}
    ways |= {f"pieces of {mib} MiB": partial(_by_engine, source, target, mib << 20) for mib in PIECES_MIB}
    other = torch.cuda.Stream()
    ways |= {f"in turns of {mib} MiB": partial(_in_turns, source, target, mib << 20, other) for mib in TURNS_MIB}
    view = device_view(source, device).view(torch.int64)
    for programs in PROGRAMS:
        ways[f"kernel of {programs} programs"] = partial(_by_kernel, view, target.view(torch.int64), programs)
    inputs, row = pinned_region(SMALL_BYTES), torch.empty(SMALL_BYTES, dtype=torch.uint8, device=device)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for name, way in ways.items():
        target.zero_()
        way()
        assert name == "nothing" or torch.equal(target.cpu(), source), name
        found = [_measure(way, row, inputs, *streams) for _ in range(ROUNDS)]
        large_ms, small_ms = (statistics.median(times) for times in zip(*found, strict=True))
        print(
            f"{name:24s} {LARGE_BYTES / large_ms / 1e6:8.2f} GB/s beside them; {SMALL_COPIES} small copies take "
            f"{small_ms:6.3f} ms (at most {max(small for _, small in found):6.3f})"
        )


def _by_engine(source: torch.Tensor, target: torch.Tensor, piece_bytes: int) -> None:
    for start in range(0, source.numel(), piece_bytes):
        target[start : start + piece_bytes].copy_(source[start : start + piece_bytes], non_blocking=True)


def _in_turns(source: torch.Tensor, target: torch.Tensor, piece_bytes: int, other: torch.cuda.Stream) -> None:
    """Pieces on the current stream and another one alternately, each behind the one before it."""
    first = torch.cuda.current_stream()
    streams = (other, first)
    for index, start in enumerate(range(0, source.numel(), piece_bytes)):
        event = torch.cuda.Event()
        event.record()
        stream = streams[index % 2]
        stream.wait_event(event)
        torch.cuda.set_stream(stream)
        target[start : start + piece_bytes].copy_(source[start : start + piece_bytes], non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    torch.cuda.set_stream(first)
    first.wait_event(event)


def _by_kernel(source: torch.Tensor, target: torch.Tensor, programs: int) -> None:
    _copy_words[(programs,)](source, target, source.numel(), BLOCK=BLOCK, num_warps=8)


def _measure(
    way: Callable[[], object],
    row: torch.Tensor,
    inputs: torch.Tensor,
    weights: torch.cuda.Stream,
    compute: torch.cuda.Stream,
) -> tuple[float, float]:
    """Milliseconds of the large copy, and of small ones on another stream, given while it is under way."""
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    with torch.cuda.stream(weights):
        torch.cuda._sleep(2_000_000)  # a millisecond, until everything has been given
        events[0].record()
        way()
        events[1].record()
    with torch.cuda.stream(compute):
        compute.wait_event(events[0])  # the large copy is about to begin
        torch.cuda._sleep(400_000)
        events[2].record()
        for _ in range(SMALL_COPIES):
            row.copy_(inputs, non_blocking=True)
        events[3].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]), events[2].elapsed_time(events[3])


if __name__ == "__main__":
    main()
