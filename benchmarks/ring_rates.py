"""How fast files in the page cache come through a staging ring: by its size, its readers and the size of their reads.

    python benchmarks/ring_rates.py [--gib 2] [--readers 8,12,16] [--rings 16x8,32x16] [--reads 2,4] [--rounds 3]

Three rates, each the median of rounds in turns: ``taken``: entries are given back as soon as they are full, so that
reading is all there is; ``copied``: a GPU copies them to a slot, as in mode ``disk``; ``copies``: the same copies of
entries that stay as they are. Rings: MiB of an entry x entries; a small one may stay in the processor's cache. Reads:
MiB of each. Without a GPU the first rate alone, of memory that is not pinned.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.memory.memfd import SharedMemory
from headrace.memory.pages import collapse_parallel, populate_parallel
from headrace.memory.pinned import CudaRegistrar, PinnedBuffer, pin_shared, pin_threads
from headrace.plan.schedule import ENTRY_BYTES, MAX_ENTRIES, lay_out_ring
from headrace.stores.sources import ByteRange, Copy, DiskOptions, File
from headrace.stores.store import Load
from headrace.transfer.ring import READ_BYTES, STUCK_S, WANTED
from headrace.transfer.ring_process import RingTask
from headrace.transfer.ring_readers import ReaderProcess
from headrace.transfer.ring_streams import CudaCopyStream, StagingRing, reads_of

NUM_UNITS = 4


@dataclass(frozen=True)
class Ring:
    """One ring that is being served."""

    ring: StagingRing
    buffer: torch.Tensor
    stream: CudaCopyStream | None
    slot: torch.Tensor | None

    def taken(self) -> float:
        """GB/s of one pass."""
        memory, num_bytes, begin = self.ring.memory, 0, time.perf_counter()
        for position, piece in enumerate(memory.layout.pieces):
            memory.words[WANTED] = position + 1
            while memory.tag(piece.entry) != position + 1:
                time.sleep(0)
            memory.words[WANTED] = 0
            memory.set_tag(piece.entry, 0)
            num_bytes += piece.num_bytes
        return num_bytes / (time.perf_counter() - begin) / 1e9

    def copied(self) -> float:
        """GB/s of one pass, by the clock of the host."""
        assert self.slot is not None
        assert self.stream is not None
        begin = time.perf_counter()
        for unit in range(NUM_UNITS):
            self.ring.enqueue(unit, self.slot, self.stream)
        torch.cuda.synchronize()
        return self._num_bytes() / (time.perf_counter() - begin) / 1e9

    def copies(self) -> float:
        """GB/s of the copies of one pass."""
        assert self.slot is not None
        assert self.stream is not None
        begin = time.perf_counter()
        for piece in self.ring.memory.layout.pieces:
            entry = self.buffer[piece.entry * self.ring.memory.layout.entry_bytes :][: piece.num_bytes]
            self.stream.copy(self.slot[piece.start : piece.start + piece.num_bytes], entry)
        torch.cuda.synchronize()
        return self._num_bytes() / (time.perf_counter() - begin) / 1e9

    def _num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.ring.memory.layout.pieces)


@contextmanager
def serving(path: Path, readers: int, size: tuple[int, int], read_bytes: int) -> Iterator[Ring]:
    unit_bytes = path.stat().st_size // NUM_UNITS
    layout = lay_out_ring([unit_bytes] * NUM_UNITS, 1, *size)
    file = File(path, DiskOptions())
    loads = [Load(u, (Copy(ByteRange(file, u * unit_bytes, unit_bytes), 0),)) for u in range(NUM_UNITS)]
    shared = SharedMemory.create(layout.num_bytes)
    pinned = PinnedBuffer(shared.map(0, layout.num_bytes))
    collapse_parallel(pinned.buffer, pin_threads())
    stream = slot = None
    if torch.cuda.is_available():
        pin_shared(pinned, CudaRegistrar(), "try again")
        copies = torch.cuda.Stream()
        stream = CudaCopyStream(copies, pinned.buffer[layout.words_at :].data_ptr())
        slot = torch.empty(unit_bytes, dtype=torch.uint8, device="cuda")
    else:
        populate_parallel(pinned.buffer, pin_threads())
    ring = StagingRing(layout, pinned.buffer)
    task = RingTask(layout, reads_of(layout, loads, read_bytes), readers, STUCK_S)
    process = ReaderProcess(task, ring.memory, shared.fileno())
    try:
        process.serve()
        yield Ring(ring, pinned.buffer, stream, slot)
        ring.check()
    finally:
        process.close()
        file.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--readers", default="8,12,16")
    parser.add_argument("--rings", default=f"{ENTRY_BYTES >> 20}x{MAX_ENTRIES}")
    parser.add_argument("--reads", default=f"{READ_BYTES >> 20}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to read from (default: temporary files)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "file"
        with path.open("wb") as file:
            for _ in range(int(args.gib * 16)):
                file.write(os.urandom(64 << 20))
        cases = list(
            itertools.product(args.rings.split(","), map(int, args.reads.split(",")), map(int, args.readers.split(",")))
        )
        found: dict[tuple[str, int, int, str], list[float]] = {}
        for _ in range(args.rounds):
            for size, read_mib, readers in cases:
                entry_mib, num_entries = map(int, size.split("x"))
                with serving(path, readers, (entry_mib << 20, num_entries), read_mib << 20) as ring:
                    ring.taken()  # the first pass meets pages that the readers' process has not mapped yet
                    for measure in (ring.taken, *([ring.copied, ring.copies] if ring.stream else [])):
                        case = size, read_mib, readers, measure.__name__
                        found.setdefault(case, []).extend(measure() for _ in range(3))
    for (size, read_mib, readers, rate), rates in found.items():
        case_name = f"{size:>6s}, {readers:2d} readers of {read_mib:2d} MiB"
        print(f"{case_name}, {rate:7s} {statistics.median(rates):7.2f} GB/s (spread {max(rates) - min(rates):.2f})")


if __name__ == "__main__":
    main()
