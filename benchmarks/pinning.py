"""What pinning host memory costs here: touching, registering, filling from the page cache, and torch's own way.

python benchmarks/pinning.py [--gib 4] [--folder /tmp]

Every row maps memory of its own. The CUDA context is made and the driver is warmed up before anything is timed.
Needs about twice the size in host memory, and as much room in the folder for the file rows.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from headrace.loading.read_pool import Delivery, deliver
from headrace.memory.pages import map_pages, pieces, populate, populate_parallel, whole_pages
from headrace.memory.pinned import CudaRegistrar
from headrace.memory.system import cpus_near
from headrace.plan.plan import SlabEntry, Unit
from headrace.stores.pinned_host import PinnedStore
from headrace.stores.sources import ByteRange, Copy, DiskOptions, File

MIB, GIB = 1 << 20, 1 << 30
CORES = len(os.sched_getaffinity(0))


def say(name: str, num_bytes: int, seconds: float) -> None:
    print(f"{name:<66} {seconds:7.3f} s {num_bytes / seconds / 1e9:7.2f} GB/s", flush=True)


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def fresh(num_bytes: int, huge: bool = True) -> torch.Tensor:
    return torch.from_numpy(map_pages(num_bytes, huge=huge))


def in_threads(num_threads: int, run: Callable[[int, int], object], num_bytes: int, piece: int) -> float:
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(int, range(num_threads)))  # the threads are there before the clock starts
        return timed(lambda: list(pool.map(lambda ends: run(*ends), pieces(num_bytes, piece))))


def check(code: object) -> None:
    if int(code):  # type: ignore[call-overload]
        raise RuntimeError(f"CUDA error {int(code)}")  # type: ignore[call-overload]


@contextmanager
def registered(buffer: torch.Tensor, num_threads: int, piece: int) -> Iterator[float]:
    """Seconds that registering ``buffer`` took; unregistered at the end."""
    cudart, address = torch.cuda.cudart(), buffer.data_ptr()

    def register(start: int, end: int) -> None:
        check(cudart.cudaHostRegister(address + start, end - start, 0))

    try:
        yield in_threads(num_threads, register, buffer.numel(), piece)
    finally:
        for start, _ in pieces(buffer.numel(), piece):
            check(cudart.cudaHostUnregister(address + start))


def touching(num_bytes: int) -> None:
    for huge in (True, False):
        for num_threads in sorted({1, 4, 8, CORES}):
            buffer = fresh(num_bytes if num_threads > 1 else GIB, huge)
            seconds = timed(lambda buffer=buffer, n=num_threads: populate_parallel(buffer, n))
            say(f"populate, {num_threads} threads, {'huge' if huge else 'small'} pages", buffer.numel(), seconds)
    shared = mmap.mmap(-1, num_bytes)
    shared.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(shared, dtype=torch.uint8)
    say(f"populate, {CORES} threads, shared mapping", num_bytes, timed(lambda: populate_parallel(buffer, CORES)))
    strided = fresh(num_bytes)

    def write(start: int, end: int) -> None:
        np.copyto(strided.numpy()[start : end : mmap.PAGESIZE], np.uint8(0))

    say(f"strided writes, {CORES} threads, huge pages", num_bytes, in_threads(CORES, write, num_bytes, 32 * MIB))


def registering(num_bytes: int) -> None:
    for huge in (True, False):
        buffer = fresh(num_bytes, huge)
        populate_parallel(buffer, CORES)
        for num_threads, piece in ((1, num_bytes), (1, GIB), (4, GIB), (1, 256 * MIB), (4, 256 * MIB), (8, 256 * MIB)):
            with registered(buffer, num_threads, piece) as seconds:
                name = "the whole" if piece == num_bytes else f"{piece // MIB} MiB"
                pages = "huge" if huge else "small"
                say(f"register {name} in {num_threads} threads, touched {pages} pages", num_bytes, seconds)
    buffer = fresh(num_bytes)
    with registered(buffer, 1, num_bytes) as seconds:
        say("register the whole, untouched huge pages", num_bytes, seconds)
    seconds = timed(lambda: torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))
    say("torch.empty(pin_memory=True)", num_bytes, seconds)


def filling(num_bytes: int, folder: Path) -> None:
    """Page cache into memory that becomes pinned."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        block = os.urandom(64 * MIB)
        for _ in range(0, num_bytes, len(block)):
            file.write(block)
        file.flush()
        for huge in (True, False):
            for piece in (2 * MIB, 8 * MIB, 32 * MIB):
                for first in (True, False):
                    _fill(file.fileno(), fresh(num_bytes, huge), piece, first, "huge" if huge else "small")
        warm = fresh(num_bytes)
        populate_parallel(warm, CORES)
        _fill(file.fileno(), warm, 8 * MIB, False, "touched")
        for num_threads in (4, 8):
            _fill(file.fileno(), warm, 8 * MIB, False, "touched", num_threads)
        with registered(warm, 1, num_bytes):
            _fill(file.fileno(), warm, 8 * MIB, False, "registered")
        del warm
        for direct in (False, True):
            _store(Path(file.name), num_bytes, direct, cold=False)
            _read_plainly(Path(file.name), num_bytes, direct)
            _store(Path(file.name), num_bytes, direct, cold=True)


def _store(path: Path, num_bytes: int, direct: bool, *, cold: bool) -> None:
    """The whole pass of headrace itself: mapped, read, registered slab by slab."""
    if cold:
        _forget(path)
    size = 256 * MIB
    units = [Unit(i, "", 0, (SlabEntry(f"{i}", 0, size),), size, "cpu") for i in range(num_bytes // size)]
    file = File(path, DiskOptions(direct=direct))
    device = torch.device("cuda", 0)

    def run() -> PinnedStore:
        store = PinnedStore(units, {}, CudaRegistrar(device))
        rows = (
            Delivery(f"{i}", partial(_copies, file, i * size, size), store.destination(f"{i}"))
            for i in range(len(units))
        )
        deliver(rows, num_threads=CORES, on_loaded=store.on_loaded, cpus=cpus_near(device))
        store.finish()
        return store

    how = "direct" if direct else "buffered"
    say(f"{'cold' if cold else 'cached'} file -> PinnedStore, {how}", num_bytes, timed(run))


def _copies(file: File, offset: int, num_bytes: int) -> list[Copy]:
    return [Copy(ByteRange(file, offset, num_bytes), 0)]


def _read_plainly(path: Path, num_bytes: int, direct: bool) -> None:
    """The bar for a cold file: the same threads, into one small buffer each."""
    _forget(path)
    file = File(path, DiskOptions(direct=direct))
    local = threading.local()

    def read(start: int, end: int) -> None:
        local.buffer = getattr(local, "buffer", None) or memoryview(bytearray(4 * MIB))
        file.read(start, local.buffer[: end - start])

    how = "direct" if direct else "buffered"
    say(f"cold file, read plainly, {how}", num_bytes, in_threads(CORES, read, num_bytes, 4 * MIB))


def _forget(path: Path) -> None:
    """Ask the kernel to drop the file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _fill(
    fd: int, buffer: torch.Tensor, piece: int, populate_first: bool, pages: str, num_threads: int = CORES
) -> None:
    view = buffer.numpy().data

    def read(start: int, end: int) -> None:
        if populate_first:
            populate(buffer[start:end])
        done = start
        while done < end:
            done += os.preadv(fd, [view[done:end]], done)

    seconds = in_threads(num_threads, read, buffer.numel(), piece)
    how = "populate, then read" if populate_first else "read"
    say(f"{how}, {piece // MIB} MiB pieces, {num_threads} threads, {pages} pages", buffer.numel(), seconds)


def overlapping(num_bytes: int) -> None:
    """Touch in all threads, register 256 MiB or 1 GiB slabs in one more as they are ready."""
    for slab in (256 * MIB, GIB):
        buffer = fresh(num_bytes)
        seconds = timed(partial(_touch_and_register, buffer, slab))
        say(f"touch and register {slab // MIB} MiB slabs side by side", num_bytes, seconds)
        for start, _ in pieces(num_bytes, slab):
            check(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr() + start))


def _touch_and_register(buffer: torch.Tensor, slab_bytes: int) -> None:
    register = torch.cuda.cudart().cudaHostRegister
    with ThreadPoolExecutor(CORES) as pool, ThreadPoolExecutor(1) as registrar:
        slabs = [buffer[start:end] for start, end in pieces(buffer.numel(), slab_bytes)]
        touched = [[pool.submit(populate, slab[a:b]) for a, b in pieces(slab.numel(), 8 * MIB)] for slab in slabs]
        codes = []
        for slab, futures in zip(slabs, touched, strict=True):
            for future in futures:
                future.result()
            codes.append(registrar.submit(register, slab.data_ptr(), slab.numel(), 0))
        for code in codes:
            check(code.result())


def copying(num_bytes: int) -> None:
    """What the link then makes of it, and whether a copy may cross from one registration into the next."""
    size = min(num_bytes, GIB)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    for huge in (True, False):
        buffer = fresh(size, huge)
        populate_parallel(buffer, CORES)
        with registered(buffer, 1, size):
            say(f"copy to the device, {'huge' if huge else 'small'} pages", size, _copy_s(device, buffer))
    buffer = fresh(size)
    populate_parallel(buffer, CORES)
    with registered(buffer, 1, size // 2):
        try:
            say("copy across two registrations", size, _copy_s(device, buffer))
        except RuntimeError as error:
            print(f"copy across two registrations: {str(error).splitlines()[0]}", flush=True)


def _copy_s(device: torch.Tensor, buffer: torch.Tensor) -> float:
    def run() -> None:
        device.copy_(buffer, non_blocking=True)
        torch.cuda.synchronize()

    return statistics.median(timed(run) for _ in range(3))


def machine() -> None:
    thp = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    print(f"{CORES} cores, {nodes} NUMA nodes, kernel {os.uname().release}, torch {torch.__version__}")
    print(f"transparent huge pages: {thp.read_text().strip() if thp.exists() else 'unknown'}")
    props = torch.cuda.get_device_properties(0)
    address = f"{props.pci_domain_id:04x}:{props.pci_bus_id:02x}:{props.pci_device_id:02x}.0"
    for name in ("numa_node", "local_cpulist"):
        file = Path("/sys/bus/pci/devices", address, name)
        print(f"{props.name} at {address}: {name} {file.read_text().strip() if file.exists() else 'unknown'}")


def warm_up() -> None:
    buffer = fresh(whole_pages(MIB))
    populate(buffer)
    with registered(buffer, 1, buffer.numel()):
        torch.zeros(1, device="cuda").copy_(buffer[:1])
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=None, help="for the file rows; default: temporary files")
    arguments = parser.parse_args()
    warm_up()
    machine()
    num_bytes = arguments.gib * GIB
    touching(num_bytes)
    registering(num_bytes)
    overlapping(num_bytes)
    filling(num_bytes, arguments.folder)
    copying(num_bytes)


if __name__ == "__main__":
    main()
