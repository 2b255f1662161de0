"""Where the staging ring loses time: reads from the page cache by threads, by processes, and by its server alone.

    python benchmarks/trial_reads.py [FOLDER] [GB/s OF THE LINK]

No GPU and no torch: a process that takes entries at the link's rate stands in for the stream. One line for each case.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headrace.memory.pages import collapse, map_file
from headrace.plan.schedule import RingLayout, cut, lay_out_ring
from headrace.stores.sources import ByteRange, Copy, DiskOptions, File
from headrace.transfer.ring import RingMemory, RingServer

MIB = 1 << 20
LAYER, LAYERS = 368 * MIB, 4
SIZE = LAYER * LAYERS
PASSES = 6


def plain(fd: int, count: int, piece: int, fork: bool) -> float:
    """GB/s of ``count`` threads or processes that do nothing else."""
    view, slots = memoryview(mmap.mmap(-1, 128 * MIB)), 128 * MIB // piece
    view[:] = bytes(len(view))

    def work(number: int) -> None:
        for index in range(number, PASSES * SIZE // piece, count):
            at = index % slots * piece
            os.preadv(fd, [view[at : at + piece]], index * piece % SIZE)

    begin = time.perf_counter()
    if fork:
        for pid in [start(work, number) for number in range(count)]:
            os.waitpid(pid, 0)
    else:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return PASSES * SIZE / (time.perf_counter() - begin) / 1e9


def start(function: Callable[..., object], *args: object) -> int:
    """A fork that does this and ends."""
    if pid := os.fork():
        return pid
    try:
        function(*args)
    finally:
        os._exit(0)


def served(path: Path, rate: float, setting: tuple[int, int, int, int], huge: bool, owners: bool) -> str:
    """A ring of (MiB of an entry, entries, MiB of a read, readers), whose entries are taken at ``rate``."""
    entry, entries, read, readers = setting
    layout = lay_out_ring([LAYER] * LAYERS, 2, entry * MIB, entries)
    fd = os.memfd_create("ring")
    os.ftruncate(fd, layout.num_bytes)
    shared = map_file(fd, 0, layout.num_bytes)
    got = collapse(shared) if huge else False
    shared[::4096] = 0
    memory, file = RingMemory(layout, shared), File(path, DiskOptions())
    reads = [
        [Copy(ByteRange(file, p.unit * LAYER + p.start + a, n), a) for a, n in cut(p.num_bytes, read * MIB)]
        for p in layout.pieces
    ]
    if owners:
        pids = [start(own, layout, memory, file, number, readers) for number in range(readers)]
    else:
        pids = [start(RingServer(reads, memory, num_threads=readers).serve)]
    for _ in range(2):  # the first one warms up
        begin, waited = time.perf_counter(), 0.0
        for _ in range(2):
            for position, piece in enumerate(layout.pieces):
                memory.words[0] = position + 1
                asked = time.perf_counter()
                while memory.tag(piece.entry) != position + 1:
                    pass
                now = time.perf_counter()
                waited += now - asked
                while time.perf_counter() < now + piece.num_bytes / rate / 1e9:
                    pass
                memory.words[0] = 0
                memory.set_tag(piece.entry, 0)
        seconds = time.perf_counter() - begin
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(fd)
    return f"{2 * SIZE / seconds / 1e9:5.1f} GB/s, waited {waited / seconds:4.0%}{', huge pages' if got else ''}"


def own(layout: RingLayout, memory: RingMemory, file: File, number: int, readers: int) -> None:
    """One of several processes that never speak to each other: it fills its own entries, each in its order."""
    mine = {entry: [p for p, piece in enumerate(layout.pieces) if piece.entry == entry]
            for entry in range(number, len(memory.entries), readers)}  # fmt: skip
    turn = dict.fromkeys(mine, 0)
    while True:
        idle = True
        for entry, positions in mine.items():
            if memory.tag(entry) == 0:
                position = positions[turn[entry] % len(positions)]
                turn[entry] += 1
                piece = layout.pieces[position]
                into = memory.entries[entry].data[: piece.num_bytes]
                file.read(piece.unit * LAYER + piece.start, into)
                memory.set_tag(entry, position + 1)
                idle = False
        if idle:
            time.sleep(5e-5)


def main() -> None:
    rate = float(sys.argv[2]) if len(sys.argv) > 2 else 54.0
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        path = Path(folder) / "file"
        block = np.random.default_rng(0).integers(0, 255, LAYER, np.uint8)
        with path.open("wb") as out:
            for _ in range(LAYERS):
                out.write(block.data)
        fd = os.open(path, os.O_RDONLY)
        plain(fd, 8, 8 * MIB, False)
        cores = os.cpu_count() or 1
        print(f"{cores} cores, {Path('/proc/cpuinfo').read_text().split('model name')[1].splitlines()[0]}, "
              f"{os.uname().release}, Python {sys.version.split()[0]}")  # fmt: skip
        for name in ("enabled", "shmem_enabled"):
            print(name, Path("/sys/kernel/mm/transparent_hugepage", name).read_text().strip())
        print("L3", Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip(),
              Path("/sys/devices/system/cpu/cpu0/cache/index3/shared_cpu_list").read_text().strip())  # fmt: skip
        for count in (8, 12, 16):
            rates = {piece: [plain(fd, count, piece * MIB, fork) for fork in (False, True)] for piece in (4, 8, 16)}
            cells = [f"{piece} MiB: {threads:5.1f} {forks:5.1f}" for piece, (threads, forks) in rates.items()]
            print(f"{count:2} threads, processes   {'   '.join(cells)}", flush=True)
        small = [
            (16, 8, 4, 14),
            (16, 8, 4, 8),
            (16, 8, 16, 8),
            (8, 16, 8, 8),
            (8, 16, 8, 12),
            (4, 32, 4, 8),
            (16, 16, 16, 12),
        ]
        for setting in small:
            for huge in (False, True):
                print(f"server {setting}: {served(path, rate, setting, huge, False)}", flush=True)
        for setting in [(4, 32, 4, 8), (4, 32, 4, 14), (8, 16, 8, 8), (8, 16, 8, 14), (8, 32, 8, 14), (16, 16, 16, 14)]:
            print(f"owners {setting}: {served(path, rate, setting, True, True)}", flush=True)


if __name__ == "__main__":
    main()
