"""The promise: shared memory has no name, one size, one user and one writer; opening it gives exactly that memory."""

from __future__ import annotations

import fcntl
import gc
import json
import mmap
import os
import resource
import stat
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BudgetError, OptionError, PeerError
from headrace.memory.shared import SharedMemory
from headrace.ranks.group import RankGroup
from headrace.stores.shared_host import SharedStore, share_out, shared_bytes
from plans import unit
from registrars import Ledger

PAGE = mmap.PAGESIZE


def open_fds() -> list[str]:
    gc.collect()
    found = []
    for entry in os.scandir("/proc/self/fd"):
        link = os.readlink(entry.path) if os.path.lexists(entry.path) else ""
        if "memfd:headrace" in link:
            found.append(link)
    return found


class TestSharedMemory:
    def test_no_address_space_for_it(self) -> None:
        made = SharedMemory.create(1 << 40)  # takes no room before it is touched
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 39, before[1]))
        try:
            with pytest.raises(BudgetError, match=r"maps no 1099511627776 bytes .* allocate memory; check `ulimit -v`"):
                made.map(0, 1 << 40)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        made.map(0, 1 << 40)[-1] = 1
        made.close()

    def test_no_more_open_files(self) -> None:
        """More room, or another PID namespace, would not help."""
        made, before = SharedMemory.create(PAGE), resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            with pytest.raises(BudgetError, match=r"Too many open files; raise the limit of open files \(ulimit -n\)$"):
                SharedMemory.create(PAGE)
            with pytest.raises(PeerError, match=r"Too many open files\): raise the limit of open files \(ulimit -n\)$"):
                SharedMemory.open(made.describe())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    @pytest.mark.slow
    def test_two_descriptors_one_memory(self) -> None:
        made = SharedMemory.create(3 * PAGE)
        opened = SharedMemory.open(made.describe())
        made.map(PAGE, 10)[:] = 7
        assert opened.map(PAGE, 10).tolist() == [7] * 10
        assert opened.map(0, PAGE).count_nonzero() == 0
        made.close()
        opened.close()
        assert open_fds() == []

    def test_mode_size_and_labels(self) -> None:
        made, other = SharedMemory.create(PAGE), SharedMemory.create(PAGE)
        fd = made.describe()["fd"]
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        assert made.token != other.token
        for size in (0, 2 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        assert os.get_inheritable(fd) is False

    def test_private_mappings_read_the_same_and_write_apart(self) -> None:
        made = SharedMemory.create(2 * PAGE)
        shared = made.map(0, 2 * PAGE)
        shared[:] = 1
        one, two = (made.map(0, 2 * PAGE, private=True) for _ in range(2))
        one[5] = 9
        assert (shared[5], two[5]) == (1, 1)
        assert one[5] == 9

    def test_no_new_writers(self) -> None:
        made = SharedMemory.create(PAGE)
        early = made.map(0, PAGE)
        made.forbid_writing()
        if not fcntl.fcntl(made.describe()["fd"], fcntl.F_GET_SEALS) & 0x10:
            pytest.skip("the kernel has no F_SEAL_FUTURE_WRITE")
        with pytest.raises(PermissionError):
            made.map(0, PAGE)
        early[0] = 3
        assert made.map(0, PAGE, private=True)[0] == 3

    @pytest.mark.slow
    def test_a_mapping_outlives_the_descriptor_and_then_frees(self) -> None:
        made = SharedMemory.create(PAGE)
        view = made.map(0, PAGE)[8:16]
        made.close()
        view[:] = 4
        assert view.tolist() == [4] * 8
        del view
        assert open_fds() == []
        assert "memfd:headrace" not in Path("/proc/self/maps").read_text()

    @pytest.mark.slow
    def test_the_address_of_a_dead_process(self) -> None:
        code = (
            "import json; from headrace.memory.shared import SharedMemory\n"
            "memory = SharedMemory.create(4096); print(json.dumps(memory.describe()))"
        )
        address = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        with pytest.raises(PeerError, match=r"cannot be opened .* mode 'cpu'"):
            SharedMemory.open(address)

    @pytest.mark.slow
    def test_another_file_under_the_same_number(self) -> None:
        made = SharedMemory.create(PAGE)
        address = made.describe()
        made.close()
        other = SharedMemory.create(PAGE)  # takes the lowest free number
        assert other.describe()["fd"] == address["fd"]
        with pytest.raises(PeerError, match="expected shared memory 'headrace-"):
            SharedMemory.open(address)
        del other
        assert open_fds() == []

    def test_looser_modes_are_refused(self) -> None:
        made = SharedMemory.create(PAGE)
        os.fchmod(made.describe()["fd"], 0o644)
        with pytest.raises(PeerError, match="mode 0600"):
            SharedMemory.open(made.describe())


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 9))
def test_shares_are_runs_that_cover_everything_evenly(sizes: list[int], num_parts: int) -> None:
    named = {f"s{index}": size for index, size in enumerate(sizes)}
    parts = share_out(named, num_parts)
    assert [name for part in parts for name in part] == list(named)
    assert len(parts) == num_parts
    for part in parts:
        assert sum(named[name] for name in part) <= sum(sizes) / num_parts + max(sizes, default=0)


UNITS = [unit(0, 300, 20), unit(1, 5000), unit(2, 10)]
IN_PLACE = {"table": 9000}


def open_store(ledger: Ledger | None) -> tuple[SharedStore, dict[str, torch.Tensor]]:
    ranks = RankGroup(dist.ProcessGroup(dist.HashStore(), 0, 1))
    memory = SharedMemory.create(shared_bytes(UNITS, IN_PLACE, 6000))
    store = SharedStore(UNITS, IN_PLACE, ledger, memory, ranks, [0], max_slab_bytes=6000)
    written = {}
    for name in store.mine:
        written[name] = torch.randint(0, 256, store.destination(name).shape, dtype=torch.uint8)
        store.destination(name).copy_(written[name])
        store.on_loaded(name)
    return store, written


class TestSharedStore:
    @pytest.mark.parametrize("pinned", [True, False])
    def test_layout_is_that_of_the_pinned_store(self, pinned: bool) -> None:
        ledger = Ledger() if pinned else None
        store, written = open_store(ledger)
        store.finish()
        assert sorted(written) == ["table", "u0.0", "u0.1", "u1.0", "u2.0"]
        assert store.account == {"host_shared": shared_bytes(UNITS, IN_PLACE, 6000)}
        for name, buffer in written.items():
            assert torch.equal(store.destination(name), buffer)
        for one in UNITS:
            slab = store.load(one).slab
            assert slab is not None
            assert slab.numel() == one.num_bytes
            assert slab.data_ptr() % 256 == 0
            for entry in one.entries:
                assert torch.equal(slab[entry.offset :][: entry.num_bytes], written[entry.storage])

    @pytest.mark.slow
    def test_slabs_are_registered_once_on_pages_of_their_own_and_given_back(self) -> None:
        ledger = Ledger()
        store, _ = open_store(ledger)
        assert ledger.held == {}, "not before all ranks have brought their share"
        store.finish()
        spans = sorted(ledger.held.items())
        assert sum(num_bytes for _, num_bytes in spans) == sum(one.num_bytes for one in UNITS) + 9216
        assert all(start % PAGE == 0 for start, _ in spans)
        assert len(spans) == 3
        assert all(-(-(first + size) // PAGE) * PAGE <= second for (first, size), (second, _) in pairwise(spans))
        store.close()
        del store
        gc.collect()
        assert ledger.held == {}
        assert open_fds() == []

    @pytest.mark.slow
    def test_a_driver_that_refuses_is_an_error_and_leaves_nothing(self) -> None:
        ledger = Ledger(refusals=[0, 1])
        store, _ = open_store(ledger)
        with pytest.raises(OptionError, match=r"error 1\); check `ulimit -l`"):
            store.finish()
        store.unpin()
        store.close()
        assert ledger.held == {}
        assert open_fds() == []
