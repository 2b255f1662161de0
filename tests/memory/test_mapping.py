"""Mappings of files in memory: placed for huge pages, kept as long as an array refers to them, gone afterwards."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from checks import mappings
from headrace.errors import BudgetError
from headrace.memory.pages import HUGE_PAGE_BYTES, TOUCH_BYTES, collapse, collapse_parallel, map_file, map_pages
from headrace.memory.shared import SharedMemory
from headrace.stores.shared_host import SharedStore, shared_bytes

NAME = "headrace-test-mapping"
SIZE = 3 * HUGE_PAGE_BYTES + 5000


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create(NAME)
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def mapped(field: str) -> list[int]:
    """KiB that the mappings of the file have of a field of smaps (proc(5))."""
    return [int(re.findall(rf"^{field}:\s+(\d+) kB", part, re.M)[0]) for part in mappings() if NAME in part]


@pytest.mark.parametrize("start", [0, 4096, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 12288])
def test_address_and_place_in_the_file_agree(file: int, start: int) -> None:
    os.pwrite(file, b"here", start)
    memory = map_file(file, start, SIZE - start)
    assert (memory.ctypes.data - start) % HUGE_PAGE_BYTES == 0
    assert bytes(memory[:4]) == b"here"
    memory[-1] = 7
    assert os.pread(file, 1, SIZE - 1) == b"\7"


def test_a_private_write_stays_here(file: int) -> None:
    map_file(file, 0, SIZE, private=True)[5] = 9
    assert os.pread(file, 1, 5) == b"\0"


@pytest.mark.slow
def test_views_keep_it_and_the_last_one_ends_it() -> None:
    fd = os.memfd_create(NAME)
    os.ftruncate(fd, SIZE)
    view = map_file(fd, 0, SIZE)[100:200]
    os.close(fd)
    gc.collect()
    view[:] = 3
    assert view.sum() == 300
    assert len(mapped("Rss")) == 1
    del view
    assert mapped("Rss") == []


def test_what_cannot_be_mapped(file: int) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        map_file(file, 100, 5000)
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_file(-1, 0, 5000)


def test_huge_pages_whatever_the_system_says(file: int) -> None:
    memory = map_file(file, 0, SIZE)
    memory[::4096] = np.arange(len(memory[::4096]), dtype=np.uint32).astype(np.uint8)
    before = memory.copy()
    is_huge = collapse(memory)
    assert np.array_equal(memory, before)
    # A kernel before 6.1 cannot, and one without free huge pages does not; then it says so.
    assert mapped("ShmemPmdMapped") == [3 * HUGE_PAGE_BYTES // 1024 if is_huge else 0]
    other = map_file(file, 0, SIZE)
    assert np.array_equal(other, before)
    assert sum(mapped("ShmemPmdMapped")) == (6 * HUGE_PAGE_BYTES // 1024 if is_huge else 0)


def test_whole_huge_pages_alone(file: int) -> None:
    """And nothing beyond the stretch that was given is touched."""
    memory = map_file(file, 0, SIZE)
    assert collapse(memory[10 : HUGE_PAGE_BYTES + 4000])
    assert mapped("Rss") == [0]
    if collapse(memory[100 : 2 * HUGE_PAGE_BYTES + 1]):
        assert mapped("ShmemPmdMapped") == [HUGE_PAGE_BYTES // 1024]


def test_shared_memory_is_mapped_so() -> None:
    shared = SharedMemory.create(40 << 20)
    buffer = shared.map(0, 40 << 20)
    collapse_parallel(buffer, 2)
    assert buffer.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not buffer.any()
    buffer[12345] = 1
    assert torch.equal(shared.map(0, 40 << 20), buffer)
    shared.close()


def test_the_first_refusal_is_the_last_try(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def refuse(memory: Any) -> bool:
        tried.append(memory.size)
        return len(tried) < 2

    monkeypatch.setattr("headrace.memory.pages.collapse", refuse)
    shared = SharedMemory.create(5 * TOUCH_BYTES)
    collapse_parallel(shared.map(0, 5 * TOUCH_BYTES), 1)
    assert tried == [TOUCH_BYTES, TOUCH_BYTES]
    shared.close()


def test_each_rank_touches_what_it_brings() -> None:
    sizes = dict.fromkeys("abcd", 3 * HUGE_PAGE_BYTES)
    shared = SharedMemory.create(shared_bytes([], sizes))
    ranks: Any = SimpleNamespace(rank=1)
    store = SharedStore([], sizes, None, shared, ranks, [0, 1])
    store.touch()
    pages = 2 * 3  # of c and d; the slab begins where the file does
    touched = [torch.count_nonzero(resident(store.destination(name))).item() for name in "abcd"]
    if touched[3] == 3 * HUGE_PAGE_BYTES // 4096:  # whole
        assert touched == [0, 0, *[pages // 2 * 512] * 2]
    else:  # a kernel that cannot: one page of each
        assert touched == [0, 0, pages // 2, pages // 2]
    store.close()


def resident(buffer: torch.Tensor) -> torch.Tensor:
    """Whether each page of 4 KiB is there (mincore(2))."""
    found = torch.zeros(buffer.numel() // 4096, dtype=torch.uint8)
    code = ctypes.CDLL(None).mincore(
        ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(buffer.numel()), ctypes.c_void_p(found.data_ptr())
    )
    assert code == 0
    return found & 1


def test_memory_that_the_system_does_not_have() -> None:
    with pytest.raises(BudgetError, match=f"no memory for another {1 << 60} bytes"):
        map_pages(1 << 60)
