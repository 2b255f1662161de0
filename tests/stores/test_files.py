"""The promise: bytes of files are the same whichever way they are read; a load uses the page cache, and spares it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import mappings, raising
from headrace.errors import CheckpointError, TransferError
from headrace.memory.pages import HUGE_PAGE_BYTES, map_file, map_pages, resident_bytes
from headrace.stats import ReadStats
from headrace.stores import file_reads as files
from headrace.stores.file_reads import ALIGN_BYTES, ConvertedFile, DiskOptions, File
from headrace.stores.loader import Delivery, deliver, read_staged
from headrace.stores.sources import ByteRange, Copy, writable_view
from models import open_files

SIZE = 1_000_007
MIB = 1 << 20


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("files") / "weights"
    content = os.urandom(SIZE)
    path.write_bytes(content)
    return path, content


def forget(path: Path) -> None:
    """Drop the pages of ``path`` from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def direct_or_skip(path: Path, direct: bool | None) -> DiskOptions:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("no direct reads on this file system")
    return DiskOptions(direct)


def direct_bytes(path: Path, content: bytes, options: DiskOptions) -> int:
    """How many of the thousand bytes that are read and compared here came past the page cache."""
    file, into = File(path, options), bytearray(1000)
    file.read(11, memoryview(into))
    assert into == content[11:1011]
    file.close()
    return file.counter.stats.direct


class TestSameBytes:
    @pytest.mark.slow
    @pytest.mark.parametrize("direct", [False, True, None])
    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_scattered(self, written: tuple[Path, bytes], direct: bool | None, data: st.DataObject) -> None:
        path, content = written
        options = direct_or_skip(path, direct)
        offset = data.draw(st.integers(0, SIZE - 1))
        ends = sorted(data.draw(st.lists(st.integers(offset, SIZE), min_size=1, max_size=6)))
        views = [bytearray(b - a) for a, b in zip([offset, *ends], ends, strict=False)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "BLOCK_BYTES", data.draw(st.sampled_from([ALIGN_BYTES, 1 << 16, 4 * MIB])))
            patch.setattr(files, "_local", threading.local())  # buffers of that size
            forget(path)
            file = File(path, options)
            file.scatter(offset, [memoryview(view) for view in views])
            file.close()
        assert b"".join(views) == content[offset : ends[-1]]
        stats = file.counter.stats
        assert stats.direct + stats.cached + stats.buffered == ends[-1] - offset
        assert direct is not True or stats.direct == ends[-1] - offset

    @pytest.mark.parametrize("direct", [False, True, None])
    @pytest.mark.parametrize(("stored", "dtype"), [
        (torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float32),
        (torch.float64, torch.bfloat16), (torch.float8_e4m3fn, torch.bfloat16),
    ], ids=str)  # fmt: skip
    @settings(max_examples=15, deadline=None)
    @given(data=st.data())
    def test_converted(
        self, tmp_path_factory: pytest.TempPathFactory, direct: bool | None, stored: Any, dtype: Any,
        data: st.DataObject,
    ) -> None:  # fmt: skip
        """Any range of the converted bytes, wherever it cuts elements and blocks, and wherever they are in the file."""
        count, head = 50_001, data.draw(st.sampled_from([0, 3, 8, ALIGN_BYTES - 1]))
        values = (torch.randn(count) * 10 ** torch.randint(-9, 9, (count,))).to(stored)
        path = tmp_path_factory.mktemp("converted") / "weights"
        path.write_bytes(bytes(head) + values.view(torch.uint8).numpy().tobytes())
        expected = values.to(dtype).view(torch.uint8).numpy().tobytes()
        start, end = sorted(data.draw(st.lists(st.integers(0, len(expected)), min_size=2, max_size=2)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "BLOCK_BYTES", data.draw(st.sampled_from([ALIGN_BYTES, 1 << 16, 4 * MIB])))
            patch.setattr(files, "_local", threading.local())  # buffers of that size
            file = File(path, direct_or_skip(path, direct))
            into = bytearray(end - start)
            ByteRange(ConvertedFile(file, head, stored, dtype), start, end - start).read(memoryview(into))
            file.close()
        assert bytes(into) == expected[start:end]

    def test_conversion_needs_no_other_threads(self, written: tuple[Path, bytes]) -> None:
        """torch gives work from 32,768 elements on to threads that compute needs."""
        path, _ = written
        elements = SIZE // 4
        sizes: list[int] = []

        class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is torch.ops.aten.copy_.default:
                    sizes.append(args[0].numel())
                return func(*args, **(kwargs or {}))

        file = File(path, DiskOptions())
        with Sizes():
            ConvertedFile(file, 0, torch.float32, torch.bfloat16).read(0, memoryview(bytearray(2 * elements)))
        file.close()
        assert sum(sizes) == elements
        assert max(sizes) < 32_768

    @pytest.mark.parametrize("direct", [False, True, None])
    @pytest.mark.parametrize("offset", [0, 7, ALIGN_BYTES, SIZE - 300_000])
    def test_read_with_room_around(self, written: tuple[Path, bytes], direct: bool | None, offset: int) -> None:
        path, content = written
        forget(path)
        file = File(path, direct_or_skip(path, direct))
        buffer = torch.from_numpy(map_pages(4 * MIB))
        free = buffer
        for size in (300_000, 1000, 0, 1):
            size = min(size, SIZE - offset)
            staged, free = read_staged(ByteRange(file, offset, size), free)
            assert bytes(writable_view(staged)) == content[offset : offset + size]
        file.close()

    def test_a_full_staging_buffer_is_read_without_room(self, written: tuple[Path, bytes]) -> None:
        path, content = written
        file = File(path, direct_or_skip(path, True))
        free = torch.from_numpy(map_pages(ALIGN_BYTES))[5:]
        staged, free = read_staged(ByteRange(file, 3, 4091), free)
        assert (bytes(writable_view(staged)), free.numel()) == (content[3 : 3 + 4091], 0)
        file.close()

    @pytest.mark.parametrize("direct", [False, True, None])
    @pytest.mark.parametrize("size", [300, 2048, 2049, 14 * 1024])
    def test_a_job_of_small_parts_fits_its_staging_buffer(
        self, written: tuple[Path, bytes], direct: bool | None, size: int
    ) -> None:
        """Each part would begin a page: together they would need more room than the buffer has."""
        path, content = written
        forget(path)
        file = File(path, direct_or_skip(path, direct))
        free = torch.from_numpy(map_pages((1 << 17) + 4 * ALIGN_BYTES))
        left = (1 << 17) - ALIGN_BYTES  # as much as a job has
        for offset in range(3, 3 + left, size):
            part = ByteRange(file, offset, min(size, left))
            left -= part.num_bytes
            staged, free = read_staged(part, free, left)
            assert bytes(writable_view(staged)) == content[offset : offset + part.num_bytes]
        assert left == 0
        file.close()

    @pytest.mark.parametrize("direct", [False, True, None])
    def test_a_file_that_ends_too_soon(self, written: tuple[Path, bytes], direct: bool | None) -> None:
        path, _ = written
        file = File(path, direct_or_skip(path, direct))
        with pytest.raises(TransferError, match=r"expected \d+ bytes at .*, the file ended after"):
            file.read(SIZE - 10, memoryview(bytearray(11)))
        with pytest.raises(TransferError, match="the file ended after"):
            file.read_around(SIZE - 10, 11, memoryview(mmap.mmap(-1, 1 << 16)))
        file.close()


def test_neighbours_in_a_file_are_read_in_one_go(written: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """200 small tensors in a row, in rooms of their own: one request for every 16 KiB of them, not 200."""
    path, content = written
    file = File(path, DiskOptions())
    reads: list[int] = []
    plain = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: reads.append(offset) or plain(fd, views, offset))
    rooms = [torch.zeros(1000, dtype=torch.uint8) for _ in range(200)]
    deliver(
        [
            Delivery(str(i), lambda i=i: [Copy(ByteRange(file, 5 + 1000 * i, 1000), 0)], room)  # type: ignore[misc]
            for i, room in enumerate(rooms)
        ],
        num_threads=2,
        piece_bytes=16 << 10,
    )
    assert b"".join(bytes(writable_view(room)) for room in rooms) == content[5 : 5 + 200_000]
    assert len(reads) == -(-200 // 16)
    file.close()


class TestPageCache:
    def test_tells_what_is_there(self, tmp_path: Path) -> None:
        path = tmp_path / "weights"
        path.write_bytes(os.urandom(3 * MIB))
        forget(path)
        fd = os.open(path, os.O_RDONLY)
        mapped = map_file(fd, 0, 3 * MIB, read_only=True)
        if resident_bytes(mapped):
            pytest.skip("this file system keeps its pages")
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        os.pread(fd, 64 << 10, MIB)
        assert resident_bytes(mapped) == 64 << 10
        assert resident_bytes(mapped[MIB : MIB + (64 << 10)]) == 64 << 10
        assert resident_bytes(mapped[MIB + 100 : MIB + 200]) == 4096
        assert resident_bytes(mapped[2 * MIB :]) == 0
        os.close(fd)

    def test_what_is_not_in_the_cache_goes_past_it_at_first(self, tmp_path: Path) -> None:
        """Once, for a load: pages that are there are used, and pages that are not do not push others out."""
        path = tmp_path / "weights"
        content = os.urandom(3 * MIB)
        path.write_bytes(content)
        forget(path)
        file = File(path, direct_or_skip(path, None))
        mapped = map_file(file.fd, 0, len(content), read_only=True)
        if resident_bytes(mapped):
            pytest.skip("this file system keeps its pages")
        into = bytearray(len(content) - 10)
        file.read(7, memoryview(into))
        assert into == content[7:-3]
        assert resident_bytes(mapped) == 0, "it went past the cache"
        assert (file.counter.stats.direct, file.counter.stats.cached) == (len(into), 0)
        path.read_bytes()
        file.read(7, memoryview(into))
        assert into == content[7:-3]
        assert (file.counter.stats.direct, file.counter.stats.cached) == (len(into), len(into))
        file.close()

    def test_where_a_direct_read_fails_files_are_read_all_the_same(
        self, written: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A device of blocks larger than ours, say: it opens, and refuses every read."""
        path, content = written
        options = direct_or_skip(path, None)
        forget(path)
        plain = os.preadv

        def refuse(fd: int, *rest: Any) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return plain(fd, *rest)

        monkeypatch.setattr(os, "preadv", refuse)
        assert direct_bytes(path, content, options) == 0
        with pytest.raises(CheckpointError, match="may not support --disk-direct"):
            File(path, DiskOptions(direct=True))
        assert open_files(path.parent) == 0

    def test_where_a_file_cannot_be_mapped_it_is_read_directly(
        self, written: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Which pages are cached cannot be asked then; some network file systems map nothing."""
        path, content = written
        options = direct_or_skip(path, None)

        monkeypatch.setattr(files, "map_file", raising(OSError(errno.ENODEV, "No such device")))
        assert direct_bytes(path, content, options) == 1000

    def test_where_direct_reads_are_refused_files_are_read_all_the_same(
        self, written: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, content = written
        forget(path)
        plain = os.open

        def refuse(name: Any, flags: int, *rest: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct I/O")
            return plain(name, flags, *rest)

        monkeypatch.setattr(os, "open", refuse)
        assert direct_bytes(path, content, DiskOptions(direct=None)) == 0


class TestReadStats:
    def test_says_what_was_read(self) -> None:
        assert str(ReadStats(14_200_000_000, 600_000_000)) == "direct 13.225 GiB, page cache 572.20 MiB"
        assert str(ReadStats(buffered=10**9)) == "through the page cache 953.67 MiB"
        assert str(ReadStats()) == "nothing"


class TestRequests:
    def test_a_direct_read_anywhere_is_cut_into_no_small_ones(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "weights"
        content = os.urandom(5 * MIB)
        path.write_bytes(content)
        file = File(path, direct_or_skip(path, True))
        plain, sizes = os.preadv, []

        def recording(fd: int, views: Any, offset: int) -> int:
            sizes.append(sum(map(len, views)))
            return plain(fd, views, offset)

        monkeypatch.setattr(os, "preadv", recording)
        into = bytearray(4 * MIB)
        file.read(1000, memoryview(into))
        file.close()
        assert into == content[1000 : 1000 + len(into)]
        assert sizes == [files.BLOCK_BYTES + ALIGN_BYTES] * 2

    def test_buffers_have_huge_pages_and_a_fork_has_them(self, written: tuple[Path, bytes]) -> None:
        """Pages of 4 KiB are more parts than a request to the disk may have."""
        path, content = written
        file, into = File(path, direct_or_skip(path, True)), bytearray(SIZE)
        file.read(0, memoryview(into))
        address = np.frombuffer(files._bounce_buffer(), np.uint8).ctypes.data
        assert address % HUGE_PAGE_BYTES == 0
        (flags,) = (each.partition("VmFlags:")[2] for each in mappings() if each.startswith(f"{address:08x}-"))
        assert "hg" in flags.split()
        assert into == content
        if (child := os.fork()) == 0:
            try:
                file.read(0, memoryview(into := bytearray(SIZE)))
            finally:
                os._exit(into != content)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        file.close()

    def test_pages_are_given_back_wherever_reads_begin(self, tmp_path: Path) -> None:
        """Read-ahead brings pages around a read that are in no range."""
        path = tmp_path / "weights"
        path.write_bytes(os.urandom(32 * MIB))
        forget(path)
        file = File(path, DiskOptions(drop_cache=True))
        mapped = map_file(file.fd, 0, 32 * MIB, read_only=True)
        if resident_bytes(mapped):
            pytest.skip("this file system keeps its pages")
        into = bytearray(MIB)
        for start in range(1000, 31 * MIB, MIB):
            file.read(start, memoryview(into))
        left = resident_bytes(mapped)
        file.close()
        assert left <= 33 * ALIGN_BYTES  # the page that two reads share
