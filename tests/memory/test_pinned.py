"""The promise: pinned memory is exactly as large as what rests in it, registered once, and given back."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceWarning, StateError
from headrace.memory.pages import map_pages, pack, populate, populate_parallel
from headrace.memory.pinned import MIN_ADOPTED_BYTES, PinnedBuffer, can_pin_in_place, is_anonymous
from headrace.plan.kinds import Unit
from headrace.stores.pinned_host import AlreadyPinned, PinnedStore
from headrace.stores.sources import fill, pieces
from plans import unit
from registrars import Ledger

MIB = 1 << 20


def fill_store(store: PinnedStore, units: Sequence[Unit], in_place: Mapping[str, int]) -> dict[str, torch.Tensor]:
    written = {}
    for name in [entry.storage for u in units for entry in u.entries] + list(in_place):
        room = store.destination(name)
        written[name] = torch.randint(0, 256, room.shape, dtype=torch.uint8)
        room.copy_(written[name])
        store.on_loaded(name)
    store.finish()
    return written


class TestPages:
    def test_populate_makes_every_page_real_and_keeps_bytes(self) -> None:
        buffer = torch.from_numpy(map_pages(8 * MIB + 123, huge=False))
        buffer[5 * MIB] = 7
        before = resident_pages()
        populate(buffer[MIB + 1 : -1])
        # Of 8 MiB the first is left out but for the page that holds the cut, and one page was there.
        assert resident_pages() - before >= 7 * MIB // mmap.PAGESIZE - 8
        assert buffer[5 * MIB] == 7
        assert buffer.count_nonzero() == 1

    def test_an_older_kernel_is_served_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.memory.pages._MADV_POPULATE_WRITE", 9999)
        buffer = torch.from_numpy(map_pages(8 * MIB + 1, huge=False))
        buffer[-1] = 3
        before = resident_pages()
        populate_parallel(buffer, 2, MIB + 1)
        assert resident_pages() - before >= 8 * MIB // mmap.PAGESIZE - 8
        assert buffer[-1] == 3

    @given(st.integers(0, 100), st.integers(1, 30))
    def test_pieces_cover_everything_once(self, num_bytes: int, piece: int) -> None:
        covered = [i for start, end in pieces(num_bytes, piece) for i in range(start, end)]
        assert covered == list(range(num_bytes))
        assert all(0 < end - start <= piece for start, end in pieces(num_bytes, piece))


def resident_pages() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


class TestPinnedBytes:
    @pytest.mark.slow
    def test_a_view_keeps_the_registration(self) -> None:
        ledger = Ledger()
        pinned = PinnedBuffer(torch.arange(100, dtype=torch.uint8))
        assert pinned.register(ledger) == 0
        view = pinned.buffer[10:20].view(torch.int16)
        address = pinned.buffer.data_ptr()
        del pinned
        gc.collect()
        assert ledger.held == {address: 100}
        assert view.view(torch.uint8).tolist() == list(range(10, 20))
        del view
        gc.collect()
        assert ledger.held == {}

    @pytest.mark.slow
    def test_capture_is_refused_and_what_ends_in_one_waits(self) -> None:
        ledger = Ledger()
        first = PinnedBuffer(torch.zeros(10, dtype=torch.uint8))
        first.register(ledger)
        ledger.capturing = True
        del first
        gc.collect()
        assert len(ledger.held) == 1
        second = PinnedBuffer(torch.zeros(10, dtype=torch.uint8))
        with pytest.raises(StateError, match=r"Call headrace\.offload before the capture begins"):
            second.register(ledger)
        ledger.capturing = False
        second.register(ledger)
        assert [what for what, _, _ in ledger.log] == ["register", "unregister", "register"]

    def test_what_ends_in_a_capture_of_another_thread_waits_too(self) -> None:
        """There the driver refuses to wait for the device. Memory that is freed while it is registered is lost."""

        class Busy(Ledger):
            is_busy = True

            def unregister(self, address: int) -> None:
                if self.is_busy:
                    raise RuntimeError("operation not permitted when stream is capturing")
                super().unregister(address)

        ledger, memory = Busy(), torch.zeros(10, dtype=torch.uint8)
        first, left = PinnedBuffer(memory), weakref.ref(memory)
        first.register(ledger)
        del first, memory
        gc.collect()
        assert left() is not None
        assert len(ledger.held) == 1
        ledger.is_busy = False
        PinnedBuffer(torch.zeros(10, dtype=torch.uint8)).register(ledger)
        gc.collect()
        assert [what for what, _, _ in ledger.log] == ["register", "unregister", "register", "unregister"]
        assert left() is None

    def test_capture_of_another_thread_is_named(self) -> None:
        pinned = PinnedBuffer(torch.zeros(10, dtype=torch.uint8))
        with pytest.raises(StateError, match="another thread is capturing"):
            pinned.register(Ledger(refusals=[900]))


class TestPack:
    @given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 60))
    def test_runs_keep_order_and_limit(self, sizes: list[int], limit: int) -> None:
        runs = pack(sizes, limit)
        assert [i for run in runs for i in run] == list(range(len(sizes)))
        assert all(len(run) == 1 or sum(sizes[i] for i in run) <= limit for run in runs)
        for run, following in pairwise(runs):
            assert sum(sizes[i] for i in run) + sizes[following[0]] > limit


class TestStore:
    units = (unit(0, 1000, 3), unit(1, 70_000), unit(2, 256, 256, 9))
    in_place = MappingProxyType({"table": 5000})

    @pytest.mark.slow
    @pytest.mark.parametrize("limit", [1, 72_000, 1 << 30])
    def test_sizes_alignment_and_bytes(self, limit: int) -> None:
        ledger = Ledger()
        store = PinnedStore(self.units, self.in_place, ledger, max_slab_bytes=limit)
        assert ledger.log == [], "nothing is pinned before it is there"
        written = fill_store(store, self.units, self.in_place)
        for name, expected in written.items():
            assert torch.equal(store.in_place(name), expected)
            assert store.in_place(name).data_ptr() % 256 == 0
        payload = sum(u.num_bytes for u in self.units) + 5120
        assert store.host_bytes == sum(ledger.held.values()) == payload
        assert all(address % mmap.PAGESIZE == 0 for address in ledger.held)
        for u in self.units:
            slab = store.load(u).slab
            assert slab is not None
            assert slab.numel() == u.num_bytes
            inside = [
                a for a, n in ledger.held.items() if a <= slab.data_ptr() and slab.data_ptr() + len(slab) <= a + n
            ]
            assert len(inside) == 1, "a copy may not cross registrations"
            for entry in u.entries:
                assert torch.equal(slab[entry.offset :][: entry.num_bytes], written[entry.storage])
        assert len(ledger.held) == (4 if limit == 1 else 2 if limit == 72_000 else 1)
        del slab
        store.close()
        gc.collect()
        assert ledger.held == {}

    def test_a_slab_is_registered_when_its_last_storage_has_landed(self) -> None:
        ledger = Ledger()
        store = PinnedStore(self.units, {}, ledger, max_slab_bytes=1)
        store.on_loaded("u0.0")
        store.on_loaded("u2.0")
        store.on_loaded("u1.0")
        store.on_loaded("u0.1")
        store.finish()
        assert [n for _, _, n in ledger.log] == [self.units[1].num_bytes, self.units[0].num_bytes]

    def test_pinned_first_for_a_device_to_write(self) -> None:
        ledger = Ledger()
        store = PinnedStore(self.units, self.in_place, ledger)
        before = store.destination("table").data_ptr()
        store.pin_now()
        assert sum(ledger.held.values()) == store.host_bytes
        fill_store(store, self.units, self.in_place)
        assert len(ledger.log) == 1
        assert store.destination("table").data_ptr() == before

    @pytest.mark.parametrize("first", [True, False])
    def test_a_refused_slab_moves(self, first: bool) -> None:
        ledger = Ledger(refusals=[0, 2])
        store = PinnedStore(self.units, self.in_place, ledger, max_slab_bytes=72_000)
        if first:
            with pytest.warns(HeadraceWarning, match="refused to register"):
                store.pin_now()
            written = fill_store(store, self.units, self.in_place)
        else:
            with pytest.warns(HeadraceWarning, match="refused to register"):
                written = fill_store(store, self.units, self.in_place)
        assert [what for what, _, _ in ledger.log] == ["register", "refuse", "allocate"]
        for name, expected in written.items():
            assert torch.equal(store.in_place(name), expected)

    @pytest.mark.slow
    def test_unpinned_on_request_while_views_live(self) -> None:
        ledger = Ledger()
        store = PinnedStore(self.units, self.in_place, ledger)
        written = fill_store(store, self.units, self.in_place)
        view = store.in_place("table")
        store.unpin()
        store.close()
        assert ledger.held == {}
        assert torch.equal(view, written["table"])
        del view
        gc.collect()
        assert [what for what, _, _ in ledger.log] == ["register", "unregister"]

    def test_no_registrar_pins_nothing(self) -> None:
        store = PinnedStore(self.units, self.in_place, None)
        written = fill_store(store, self.units, self.in_place)
        assert torch.equal(store.in_place("u1.0"), written["u1.0"])


class TestAdoption:
    units = (unit(0, 70_000), unit(1, 100, 100))
    in_place = MappingProxyType({"table": 5000})

    def test_what_is_alone_in_its_unit_stays_where_it_is(self) -> None:
        ledger = Ledger()
        given_ = {name: torch.ones(size, dtype=torch.uint8) for name, size in (("u0.0", 70_000), ("u1.0", 100))}
        given_["table"] = torch.ones(5000, dtype=torch.uint8)
        store = PinnedStore(self.units, self.in_place, ledger, adopt=given_)
        assert store.adopted == {"u0.0", "table"}
        assert ledger.held == {given_[name].data_ptr(): given_[name].numel() for name in store.adopted}
        for name in store.adopted:
            assert store.in_place(name).data_ptr() == given_[name].data_ptr()
        slab = store.load(self.units[0]).slab
        assert slab is not None
        assert slab.data_ptr() == given_["u0.0"].data_ptr()
        assert store.host_bytes == 70_000 + 5000 + self.units[1].num_bytes

    def test_a_refused_one_is_copied(self) -> None:
        buffer = torch.ones(70_000, dtype=torch.uint8)
        store = PinnedStore(self.units, {}, Ledger(refusals=[712]), adopt={"u0.0": buffer})
        assert store.adopted == frozenset()
        assert store.destination("u0.0").data_ptr() != buffer.data_ptr()

    def test_only_large_whole_anonymous_memory(self, tmp_path: object) -> None:
        big = torch.zeros(MIN_ADOPTED_BYTES, dtype=torch.uint8)
        assert can_pin_in_place(big, alignment=1)
        assert can_pin_in_place(big, alignment=256) == (big.data_ptr() % 256 == 0)
        assert not can_pin_in_place(torch.zeros(MIN_ADOPTED_BYTES - 1, dtype=torch.uint8), alignment=1)
        assert not can_pin_in_place(
            torch.zeros(2 * MIN_ADOPTED_BYTES, dtype=torch.uint8)[:MIN_ADOPTED_BYTES], alignment=1
        )

    def test_a_mapped_file_is_no_host_memory(self, tmp_path: os.PathLike[str]) -> None:
        path = os.path.join(tmp_path, "weights")
        with open(path, "wb") as file:
            file.truncate(MIN_ADOPTED_BYTES)
        mapped = torch.from_file(path, shared=False, size=MIN_ADOPTED_BYTES, dtype=torch.uint8)
        assert not can_pin_in_place(mapped, alignment=1)

    @pytest.mark.parametrize(
        ("start", "end", "expected"),
        [
            (0x1000, 0x2000, True),
            (0x1800, 0x3800, True),  # two mappings side by side
            (0x3800, 0x4800, False),  # the second is a file's
            (0x4000, 0x5000, False),
            (0x5000, 0x6000, False),  # read only
            (0x6000, 0x7000, False),  # shared
            (0x1000, 0x9000, False),  # a hole
            (0x9000, 0xA000, False),  # unmapped
        ],
    )
    def test_maps(self, start: int, end: int, expected: bool) -> None:
        maps = """\
1000-3000 rw-p 00000000 00:00 0
3000-4000 rw-p 00000000 00:00 0                          [heap]
4000-5000 rw-p 00000000 fe:00 1234                       /models/model.safetensors
5000-6000 r--p 00000000 00:00 0
6000-7000 rw-s 00000000 00:00 0
8000-9000 rw-p 00000000 00:00 0
"""
        assert is_anonymous(maps, start, end) is expected


class TestHeld:
    """What lies in pinned memory before there is a store."""

    def memory(self, num_bytes: int, ledger: Ledger) -> PinnedBuffer:
        memory = PinnedBuffer(torch.randint(0, 256, (num_bytes,), dtype=torch.uint8))
        assert memory.register(ledger) == 0
        return memory

    def test_a_unit_held_side_by_side_travels_in_one_piece_and_is_registered_once(self) -> None:
        ledger = Ledger()
        whole = unit(0, 1000, 700)
        memory = self.memory(256 + whole.num_bytes, ledger)
        held = {e.storage: AlreadyPinned(memory, 256 + e.offset, e.num_bytes) for e in whole.entries}
        store = PinnedStore([whole], {}, ledger, held=held)
        load = store.load(whole)
        assert load.slab is not None
        assert torch.equal(load.slab, memory.buffer[256:])
        assert store.kept == {"u0.0", "u0.1"}
        assert [what for what, _, _ in ledger.log] == ["register"]
        assert store.account == {"host_pinned": memory.buffer.numel(), "adopted": 0}

    def test_a_unit_held_apart_travels_in_pieces(self) -> None:
        ledger = Ledger()
        whole = unit(0, 1000, 700)
        memories = [self.memory(e.num_bytes, ledger) for e in whole.entries]
        held = {e.storage: AlreadyPinned(m, 0, e.num_bytes) for e, m in zip(whole.entries, memories, strict=True)}
        store = PinnedStore([whole], {}, ledger, held=held)
        load = store.load(whole)
        assert load.slab is None
        assert [(start, piece.numel()) for start, piece in load.in_memory] == [(0, 1000), (1024, 700)]
        for (_, piece), memory in zip(load.in_memory, memories, strict=True):
            assert torch.equal(piece, memory.buffer)
        slab = torch.zeros(whole.num_bytes, dtype=torch.uint8)
        fill(slab, load.copies)
        assert torch.equal(slab[1024:1724], memories[1].buffer)

    def test_an_offload_that_fails_leaves_what_was_held_pinned(self) -> None:
        """Tensors of a GPU look into it, and go on doing so."""
        ledger, whole = Ledger(), unit(0, 1000)
        memory = self.memory(1000, ledger)
        store = PinnedStore([whole, unit(1, 500)], {}, ledger, held={"u0.0": AlreadyPinned(memory, 0, 1000)})
        store.pin_now()
        assert len(ledger.held) == 2
        store.unpin()
        assert list(ledger.held) == [memory.buffer.data_ptr()]

    def test_a_unit_held_in_part_is_made_anew(self) -> None:
        ledger = Ledger()
        whole = unit(0, 1000, 700)
        held = {"u0.0": AlreadyPinned(self.memory(1000, ledger), 0, 1000)}
        store = PinnedStore([whole], {}, ledger, held=held)
        assert not store.kept
        written = fill_store(store, [whole], {})
        assert torch.equal(store.in_place("u0.0"), written["u0.0"])

    def test_what_is_read_in_place_stays_where_it_is(self) -> None:
        ledger = Ledger()
        memory = self.memory(5000, ledger)
        store = PinnedStore([], {"table": 5000}, ledger, held={"table": AlreadyPinned(memory, 0, 5000)})
        assert store.in_place("table").data_ptr() == memory.buffer.data_ptr()

    @pytest.mark.slow
    def test_the_last_view_gives_it_back(self) -> None:
        ledger = Ledger()
        memory = self.memory(5000, ledger)
        again = weakref.ref(memory)
        assert again() == memory
        store = PinnedStore([], {"table": 5000}, ledger, held={"table": AlreadyPinned(memory, 0, 5000)})
        view = store.in_place("table")
        del memory
        store.close()
        gc.collect()
        assert again() is not None
        assert ledger.held
        del view
        gc.collect()
        assert again() is None
        assert not ledger.held
