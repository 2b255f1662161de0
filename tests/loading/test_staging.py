"""The promise: what goes to a device through a few buffers arrives whole, whichever thread starts the
copies, and when."""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from headrace.errors import CheckpointError, TransferError
from headrace.memory.pages import map_pages
from headrace.stores.file_reads import DiskOptions, File
from headrace.stores.loader import _BUFFER_BYTES, BUFFER_BYTES, NUM_BUFFERS, CudaUploader, Read, UploadRing
from headrace.stores.sources import ByteRange, MemorySource, Source, writable_view
from registrars import Ledger

SIZE = 64
PATIENCE_S = 10


class Device:
    """Copies some time later, one after the other, as a stream does."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.batches: list[int] = []
        self._delay_s = delay_s
        self._given: queue.SimpleQueue[tuple[Sequence[tuple[torch.Tensor, torch.Tensor]], threading.Event] | None]
        self._given = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def start(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        self.batches.append(len(copies))
        done = threading.Event()
        self._given.put((copies, done))

        def wait() -> None:
            assert done.wait(PATIENCE_S)

        return wait

    def close(self) -> None:
        self._given.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            time.sleep(self._delay_s)
            for into, staged in given[0]:
                into.copy_(staged)
            given[1].set()


def pieces(content: bytes, target: torch.Tensor) -> list[list[Read]]:
    """Each of two parts."""
    source = MemorySource(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return [
        [Read(ByteRange(source, at, size), target[at : at + size]) for at, size in ((start, 5), (start + 5, SIZE - 5))]
        for start in range(0, len(content), SIZE)
    ]


def buffers(count: int) -> list[torch.Tensor]:
    return [torch.zeros(SIZE + 4 * 4096, dtype=torch.uint8) for _ in range(count)]


class Planted(Source):
    """A source whose reads do something first."""

    def __init__(self, source: MemorySource, before: Callable[[], None]) -> None:
        self._source, self._before = source, before

    def read(self, offset: int, into: memoryview) -> None:
        self._before()
        self._source.read(offset, into)


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("delay_s", [0.0, 0.001])
def test_bytes_arrive_whole(threads: int, delay_s: float) -> None:
    """A buffer that were filled again before its copy is done would bring the bytes of another piece."""
    content = os.urandom(200 * SIZE)
    target = torch.zeros(len(content), dtype=torch.uint8)
    device = Device(delay_s)
    ring = UploadRing(buffers(3), device.start)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(ring.upload, pieces(content, target)))
    device.close()
    assert bytes(writable_view(target)) == content
    assert sum(device.batches) == 400


def test_one_thread_starts_the_copies_of_all() -> None:
    content = os.urandom(3 * SIZE)
    target = torch.zeros(len(content), dtype=torch.uint8)
    starting, go_on = threading.Event(), threading.Event()
    starters: list[int] = []
    sizes: list[int] = []

    def start(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        starters.append(threading.get_ident())
        sizes.append(len(copies))
        starting.set()
        assert go_on.wait(PATIENCE_S)
        for into, staged in copies:
            into.copy_(staged)
        return lambda: None

    ring = UploadRing(buffers(3), start)
    first, *others = pieces(content, target)
    thread = threading.Thread(target=ring.upload, args=(first,))
    thread.start()
    assert starting.wait(PATIENCE_S)
    for piece in others:
        ring.upload(piece)  # comes back although nothing of it was started
    assert sizes == [2]
    go_on.set()
    thread.join(PATIENCE_S)
    assert sizes == [2, 4]
    assert set(starters) == {thread.ident}
    assert bytes(writable_view(target)) == content


@pytest.mark.parametrize("place", ["read", "start"])
def test_a_failure_leaves_no_buffer_behind(place: str) -> None:
    """With one buffer, the next piece would wait for it for ever."""
    content = os.urandom(SIZE)
    target = torch.zeros(SIZE, dtype=torch.uint8)
    failing = [True]

    def fail(where: str) -> None:
        if failing[0] and where == place:
            raise TransferError("planted")

    def start(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        fail("start")
        for into, staged in copies:
            into.copy_(staged)
        return lambda: None

    ring = UploadRing(buffers(1), start)
    source = Planted(MemorySource(torch.frombuffer(bytearray(content), dtype=torch.uint8)), lambda: fail("read"))
    piece = [Read(ByteRange(source, 0, SIZE), target)]
    with pytest.raises(TransferError, match="planted"):
        ring.upload(piece)
    failing[0] = False
    thread = threading.Thread(target=ring.upload, args=(piece,), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert bytes(writable_view(target)) == content


@pytest.mark.slow
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("size", [300, 4097])
def test_many_parts_share_a_buffer(tmp_path: Path, direct: bool, size: int) -> None:
    """As much as a buffer takes, each part at an odd offset: none may take room that those behind it need."""
    path = tmp_path / "weights"
    content = os.urandom(CudaUploader.piece_bytes + 7)
    path.write_bytes(content)
    try:
        file = File(path, DiskOptions(direct=direct))
    except CheckpointError:
        pytest.skip("no direct reads on this file system")
    target = torch.zeros(CudaUploader.piece_bytes, dtype=torch.uint8)
    parts = [
        Read(ByteRange(file, 7 + start, len(into)), into)
        for start, into in zip(range(0, target.numel(), size), target.split(size), strict=True)
    ]
    device = Device()
    ring = UploadRing(torch.from_numpy(map_pages(_BUFFER_BYTES)).split(_BUFFER_BYTES), device.start)
    ring.upload(parts)
    device.close()
    file.close()
    assert bytes(writable_view(target)) == content[7:]


class Stream:
    def wait_stream(self, other: object) -> None:
        pass


@pytest.mark.slow
def test_buffers_end_with_their_uploader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the next collection of garbage: they are 48 MiB of pinned memory."""
    monkeypatch.setattr("torch.cuda.Stream", lambda device: Stream())
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: Stream())
    ledger = Ledger()
    gc.collect()
    gc.disable()
    try:
        uploader = CudaUploader(torch.device("cuda", 0), ledger)
        (held,) = ledger.held.values()
        assert NUM_BUFFERS * BUFFER_BYTES <= held < 1.01 * NUM_BUFFERS * BUFFER_BYTES
        del uploader
        assert ledger.held == {}
    finally:
        gc.enable()
