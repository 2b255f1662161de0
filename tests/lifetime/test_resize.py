"""The promise: ``resize()`` gives an offload another budget, by the plan that ``offload`` would make, with equal bits.

Beside every model runs its resident twin. No file is read for what is in host memory, nothing is pinned twice, and a
fault at any place leaves the offload as before, or parked.
"""

from __future__ import annotations

import copy
import gc
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import headrace
from checks import raising, run_threads
from headrace.errors import (
    BudgetError,
    CheckpointError,
    HeadraceWarning,
    LimitError,
    ModelChangedError,
    OptionError,
    OptionTypeError,
    StateError,
)
from headrace.lifetime import resizing
from headrace.lifetime.host_copies import HostCopies
from headrace.memory.system import Limits
from headrace.model import live_tensors
from headrace.plan.slabs import slab_bytes
from headrace.runtime.outside_access import Promoter
from headrace.runtime.session import OffloadSession
from headrace.stores import plain_host
from headrace.stores.pinned_host import open_pinned
from headrace.stores.store import Opened
from headrace.testing import assert_same_bits
from headrace.transfer.link import ThreadLink
from interrupts import Interrupter
from lifetimes import UNIT_BYTES, WAYS, Pair, pair
from moe_models import outputs, qwen

SIZES = {"experts": ("3MiB", "1GiB", "2560KiB", "1MiB"), "coded": ("600KiB", "1GiB", "640KiB", "700KiB")}
DENSE_SIZES = ("640KiB", "1GiB", "1MiB", "600KiB")


def sizes_of(way: str) -> tuple[str, ...]:
    return SIZES.get(way.split()[0], DENSE_SIZES)


@pytest.fixture
def plain(tmp_path: Path) -> Pair:
    return pair("prefetch", tmp_path)


@pytest.fixture(params=[0, 1 << 30], ids=["full device", "free device"])
def beside_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Stores and residents as beside a GPU, of which so much is free: slabs of the store's own, and copies of both."""

    def open_units(given: Any, units: Any, offloaded: Any) -> Opened:
        return Opened(*open_pinned(given.plan, dict(offloaded), None, given.pooled))

    free: int = request.param
    monkeypatch.setattr(plain_host, "open_units", open_units)
    monkeypatch.setattr(resizing, "_has_own_memory", lambda device: True)
    monkeypatch.setattr(resizing, "read_limits", lambda *_, **__: Limits(device_free_bytes=free))
    monkeypatch.setattr(resizing, "check_limits", lambda *_: None)  # of a device that is full on paper
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    return free


def check_moved(here: Pair) -> None:
    """Bits, and that each unit was copied for them."""
    before = here.handle.stats().bytes_moved
    here.check()
    here.check()
    here.handle.sync_prev_onload()
    moved = here.handle.stats().bytes_moved - before
    assert moved > 0 or not here.handle.plan.prefetched_bytes


class TestBits:
    @pytest.mark.parametrize("way", WAYS)
    def test_between_forwards(self, way: str, tmp_path: Path) -> None:
        here = pair(way, tmp_path)
        here.check()
        for size in (*sizes_of(way), *sizes_of(way)):
            resident = set(here.handle.plan.resident)
            try:
                moved = here.handle.resize(size)
            except BudgetError as error:  # experts, of which none fit
                assert error.minimum_bytes > 1 << 20  # noqa: PT017
                moved = 0
            names = resident ^ set(here.handle.plan.resident)
            sizes = {name: placed.num_bytes for name, placed in here.handle.plan.placements.items()}
            assert moved == sum(sizes[name] for name in names)
            check_moved(here)
        here.check_state()

    @pytest.mark.parametrize("way", [way for way in WAYS if "disk" not in way])
    @pytest.mark.parametrize("parked", [False, True])
    def test_beside_a_gpu(self, way: str, parked: bool, beside_gpu: int, tmp_path: Path) -> None:
        here = pair(way, tmp_path)
        here.check()
        here.handle.park()
        here.handle.resume()
        here.check()
        for size in (*sizes_of(way)[:3], *sizes_of(way)[:3]):
            if parked:
                here.handle.park(resume="auto")
            here.handle.resize(size)
            check_moved(here)
        here.handle.park()
        here.handle.resume()
        here.check()
        here.check_state()

    @pytest.mark.parametrize("way", ["budget", "prefetch", "checkpoint", "all resident", "disk"])
    def test_the_plan_is_that_of_an_offload(self, way: str, tmp_path: Path) -> None:
        here = pair(way, tmp_path)
        for size in DENSE_SIZES:
            here.handle.resize(size)
            twin, mode = copy.deepcopy(here.twin), "disk" if way == "disk" else "cpu"
            checkpoint = tmp_path if way == "disk" else None
            with headrace.offload(twin, headrace.Budget(size, mode=mode), checkpoint=checkpoint) as other:  # type: ignore[arg-type]
                assert here.handle.plan.placements == other.plan.placements
                assert here.handle.plan.slots_bytes == other.plan.slots_bytes
            assert here.handle.plan.device_bytes <= other.plan.device_bytes

    def test_a_budget_with_the_same_plan(self, plain: Pair) -> None:
        plain.handle.resize("600KiB")
        session, device_bytes = plain.handle._session, plain.handle.plan.device_bytes
        assert plain.handle.resize(device_bytes) == 0
        assert plain.handle._session is session
        assert plain.handle.plan.budget_bytes == device_bytes
        with pytest.warns(HeadraceWarning, match="exceed the budget"):  # for which there was room before
            plain.model.layers[1].linear.weight.sum()  # type: ignore[index, union-attr]
        check_moved(plain)

    @pytest.mark.parametrize("resume", ["call", "auto"])
    def test_a_parked_one_is_resumed(self, resume: Any, plain: Pair) -> None:
        for size in DENSE_SIZES:
            plain.handle.park(resume=resume)
            plain.handle.resize(size)
            check_moved(plain)
        plain.check_state()

    def test_between_all_others(self, plain: Pair) -> None:
        """What is updated, promoted or parked between is there after it."""
        for step, size in enumerate((*DENSE_SIZES, *DENSE_SIZES)):
            plain.handle.resize(size)
            value = torch.randn(256, 256, generator=torch.Generator().manual_seed(step)).mul(0.05)
            plain.handle.update({f"layers.{step % 5}.linear.weight": value})
            plain.twin.get_parameter(f"layers.{step % 5}.linear.weight").data.copy_(value)
            check_moved(plain)
            plain.handle.park()
            plain.handle.resume()
        plain.check_state()

    def test_a_promoted_weight(self, plain: Pair) -> None:
        with pytest.warns(HeadraceWarning, match="resident from now on"):
            plain.model.layers[1].linear.weight.sum()  # type: ignore[index, union-attr]
        for model in (plain.model, plain.twin):
            model.layers[1].linear.weight.data.mul_(0.5)  # type: ignore[index, union-attr]
        assert plain.handle.resize("600KiB") == UNIT_BYTES
        check_moved(plain)
        plain.check_state()

    def test_debug_mode(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HEADRACE_DEBUG", "1")
        here = pair("budget", tmp_path)
        for size in DENSE_SIZES:
            here.handle.resize(size)
            check_moved(here)
        here.check_state()

    def test_compiled(self, plain: Pair) -> None:
        """Code that was compiled before is compiled again."""
        graphs: list[object] = []
        backend = lambda graph, _: graphs.append(graph) or graph  # noqa: E731
        compiled, x = torch.compile(plain.model, backend=backend, fullgraph=True), torch.ones(2, 256)
        plain.run = lambda each: (compiled if each is plain.model else each)(x)
        for count, size in enumerate(("600KiB", "1MiB", "640KiB"), start=1):
            plain.handle.resize(size)
            check_moved(plain)
            assert len(graphs) == count
        torch.compiler.reset()

    def test_a_backward_pass_after_it(self, plain: Pair) -> None:
        x = torch.ones(2, 256)
        outputs = [model.last(x).sum() for model in (plain.model, plain.twin)]  # type: ignore[operator]
        plain.handle.resize("640KiB")
        for output in outputs:
            output.backward()
        assert_same_bits(plain.model.first.weight.grad, plain.twin.first.weight.grad)  # type: ignore[union-attr]


class TestMemory:
    def test_no_file_is_read(self, tmp_path: Path) -> None:
        here = pair("checkpoint", tmp_path)
        shutil.rmtree(tmp_path)
        for size in DENSE_SIZES:
            here.handle.resize(size)
            check_moved(here)
        here.check_state()

    def test_files_are_read_for_what_is_in_files(self, tmp_path: Path) -> None:
        here = pair("disk", tmp_path)
        assert here.handle.resize("1GiB")
        shutil.rmtree(tmp_path)
        here.check()
        with pytest.raises(CheckpointError) as caught:
            here.handle.resize("600KiB")
        assert caught.value.__notes__ == ["headrace: the offload is as it was before"]
        here.check()

    @pytest.mark.parametrize("way", ["prefetch", "budget", "in place", "all resident"])
    def test_every_tensor_is_back_in_its_memory(self, way: str, tmp_path: Path) -> None:
        model = pair(way, tmp_path)
        model.handle.remove()
        before = {name: tensor.data_ptr() for name, tensor in model.model.state_dict().items()}
        handle = headrace.offload(model.model, "600KiB")
        for size in ("1GiB", "1MiB", "640KiB"):
            handle.resize(size)
        assert handle.stats().store_bytes["adopted"] == handle.plan.offloaded_bytes
        handle.remove()
        assert {name: tensor.data_ptr() for name, tensor in model.model.state_dict().items()} == before

    def test_pinned_memory_is_taken_once(self, beside_gpu: int, tmp_path: Path) -> None:
        """After the first time the host has one copy of the weights, in the memory in which it was."""
        here, places = pair("budget", tmp_path), list[set[int]]()
        for size in (*DENSE_SIZES, *DENSE_SIZES):
            here.handle.park()
            here.handle.resize(size)
            life, store = here.handle._lifetime, here.handle._session._store
            held = [store.held(name) for name in here.handle.plan.offloaded_names]
            held += [life.copies.held(name) for name in here.handle.plan.resident]
            memories = {id(each.memory): each.memory.num_bytes for each in held if each is not None}
            assert sum(memories.values()) <= 1.01 * here.handle.plan.weight_bytes
            places.append(set(memories))
            check_moved(here)
        assert all(each == places[0] for each in places[1:])

    def test_codes_of_equal_units_are_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from headrace.stores.coded_host import CodedStore

        here, made = pair("coded budget", tmp_path), list[int]()
        code_of = CodedStore.code_of
        monkeypatch.setattr(CodedStore, "code_of", lambda *args: made.append(1) or code_of(*args))
        here.handle.resize("640KiB")
        first, num_units = len(made), len(here.handle.plan.coded_units)
        here.handle.resize("650KiB")
        assert here.handle.plan.coded_units
        assert len(made) == first <= num_units
        check_moved(here)

    @pytest.mark.parametrize("has_room", [True, False])
    def test_codes_are_made_on_the_device(
        self, has_room: bool, beside_gpu: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of what it decodes itself; where it has no room, in host memory."""
        from headrace.stores.coded_host import CodedStore

        in_host_memory, zeros = list[str](), torch.zeros
        destination = CodedStore._destination

        def no_room(*args: Any, **options: Any) -> torch.Tensor:
            if options.get("dtype") == torch.uint8 and "device" in options:
                raise torch.OutOfMemoryError("no room")
            return zeros(*args, **options)

        def noted(self: CodedStore, storage: str) -> torch.Tensor:
            in_host_memory.append(storage)
            return destination(self, storage)

        here = pair("coded budget", tmp_path)
        monkeypatch.setattr(CodedStore, "_destination", noted)
        if not has_room:
            monkeypatch.setattr(torch, "zeros", no_room)
        for size in ("1GiB", "600KiB", "640KiB", "600KiB"):
            here.handle.resize(size)
            check_moved(here)
        assert here.handle.plan.coded_units
        assert bool(in_host_memory) is not has_room

    def test_an_interrupt_at_the_end(self, beside_gpu: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Parked, with the copies of what is parked."""
        here, note = pair("coded budget", tmp_path), resizing.Exchange._note_memory

        def interrupted(*arguments: Any) -> Any:
            note(*arguments)
            raise KeyboardInterrupt

        for size in ("640KiB", "1GiB"):
            here.handle.resize(size)
        with monkeypatch.context() as patched:
            patched.setattr(resizing.Exchange, "_note_memory", interrupted)
            with pytest.raises(KeyboardInterrupt) as caught:
                here.handle.resize("640KiB")
        assert "parked" in caught.value.__notes__[0]
        here.handle.resume()
        check_moved(here)
        here.handle.resize("640KiB")
        check_moved(here)
        here.check_state()

    def test_codes_of_what_was_cached(self, beside_gpu: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Their rows are read to host memory alone."""
        filled, fill = set[bool](), resizing.Exchange._fill

        def noted(self: resizing.Exchange, name: str, into: torch.Tensor) -> None:
            filled.add(self._plain(name) is not None or name in self._coded)
            fill(self, name, into)

        monkeypatch.setattr(resizing.Exchange, "_fill", noted)
        model = qwen(num_experts=16, num_hidden_layers=3, moe_intermediate_size=256).to(torch.bfloat16)
        expected, rules = outputs(model), [("experts", "cache"), ("self_attn", "prefetch")]
        with headrace.offload(model, headrace.Rules(rules, expert_slots=3, codec="exp3")) as handle:
            assert handle.plan.cached
            handle.resize("6000KiB")
            assert not handle.plan.cached
            assert handle.plan.coded_units
            assert_same_bits(outputs(model), expected)
            handle.sync_prev_onload()
            assert handle.stats().bytes_moved > 0
        assert filled == {True}

    @pytest.mark.parametrize("way", ["prefetch", "coded budget"])
    def test_residents_of_before_are_freed(
        self, way: str, beside_gpu: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also while something keeps the records of tensors, as their cycles do until garbage is collected."""
        allocated, records, allocate = list[StorageWeakRef](), list[Any](), resizing.allocate_residents

        def in_one(storages: Any, device: torch.device, staying: Any = ()) -> dict[str, torch.Tensor]:
            places = allocate(storages, device, staying)
            sizes = [slab_bytes([place.numel()]) for place in places.values()]
            whole = torch.empty(sum(sizes), dtype=torch.uint8)
            allocated.append(StorageWeakRef(whole.untyped_storage()))
            parts = zip(places.items(), whole.split(sizes), strict=True)
            return {name: part[: place.numel()] for (name, place), part in parts}

        monkeypatch.setattr(resizing, "allocate_residents", in_one)
        here = pair(way, tmp_path)
        for size in ("1MiB", "640KiB", "1MiB", "640KiB"):
            records.append(dict(here.handle._session._bound))
            here.handle.resize(size)
            check_moved(here)
            assert all(memory.expired() for memory in allocated[:-1])
        assert sum(not memory.expired() for memory in allocated) <= 1

    def test_nothing_is_left(self, tmp_path: Path) -> None:
        here, threads = pair("prefetch", tmp_path), threading.active_count()
        for size in DENSE_SIZES:
            here.handle.resize(size)
        session = weakref.ref(here.handle._session)
        here.handle.resize("1MiB")
        here.check()
        gc.collect()
        assert session() is None
        assert threading.active_count() <= threads
        here.handle.remove()
        model = weakref.ref(here.model)
        del here
        gc.collect()
        assert model() is None


def _inside_a_forward(here: Pair) -> None:
    def hook(*_: object) -> None:
        here.handle.resize("640KiB")

    handle = here.model.layers[1].register_forward_hook(hook)  # type: ignore[index, union-attr]
    try:
        with torch.no_grad():
            here.run(here.model)
    finally:
        handle.remove()


def _replaced(here: Pair) -> None:
    linear = here.model.layers[1].linear  # type: ignore[index, union-attr]
    linear.weight = nn.Parameter(torch.ones(256, 256))
    here.twin.layers[1].linear.weight.data.fill_(1)  # type: ignore[index, union-attr]
    here.handle.resize("640KiB")


def _set(here: Pair) -> None:
    for model in (here.model, here.twin):
        model.last.bias.data = torch.ones(256)  # type: ignore[union-attr]
    here.handle.resize("640KiB")


def _attached(here: Pair) -> None:
    class Guesses:
        counts, notes = None, ()

        def remove(self) -> None: ...

    here.handle._session.attachments.append(Guesses())  # type: ignore[arg-type]
    here.handle.resize("640KiB")


class TestRefused:
    @pytest.mark.parametrize(
        ("call", "error", "match"),
        [
            (lambda here: here.handle.resize("10KiB"), BudgetError, "too small"),
            (lambda here: here.handle.resize("auto"), OptionError, "expected a size"),
            (lambda here: here.handle.resize("much"), OptionError, "much"),
            (lambda here: here.handle.resize(None), OptionTypeError, "device_memory"),
            (_inside_a_forward, StateError, "inside a forward"),
            (_replaced, ModelChangedError, "was replaced"),
            (_set, ModelChangedError, "data was set"),
            (_attached, OptionError, "Guesses"),
        ],
    )
    @pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
    def test_before_anything_changes(
        self, call: Callable[[Pair], object], error: type[Exception], match: str, plain: Pair
    ) -> None:
        before = plain.handle._session
        with pytest.raises(error, match=match) as caught:
            call(plain)
        notes = getattr(caught.value, "__notes__", [])
        assert all(note == "headrace: the offload is as it was before" for note in notes)
        assert plain.handle._session is before
        if call is not _inside_a_forward:  # of which the twin has seen nothing
            plain.check()

    def test_an_ended_offload(self, plain: Pair) -> None:
        plain.handle.remove()
        with pytest.raises(StateError, match="has ended"):
            plain.handle.resize("640KiB")

    def test_no_host_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        here = pair("all resident", tmp_path)
        monkeypatch.setattr(resizing, "read_limits", lambda *_, **__: Limits(host_available_bytes=5))
        with pytest.raises(LimitError, match="host memory"):
            here.handle.resize("600KiB")
        here.check()

    def test_no_room_on_the_device(self, beside_gpu: int, plain: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        from headrace.planning.checks import check_limits

        monkeypatch.setattr(resizing, "check_limits", check_limits)
        if beside_gpu:
            return
        with pytest.raises(LimitError, match="device memory"):
            plain.handle.resize("1GiB")
        plain.check()

    def test_files_with_other_values(self, tmp_path: Path) -> None:
        here = pair("disk", tmp_path)
        here.handle.resize("1GiB")
        for model in (here.model, here.twin):
            model.layers[3].linear.weight.data.mul_(2)  # type: ignore[index, union-attr]
        with pytest.raises(CheckpointError, match=r"layers\.3\.linear\.weight"):
            here.handle.resize("600KiB")
        here.check()

    def test_an_alias_of_what_a_file_replaces(self, tmp_path: Path) -> None:
        here = pair("disk", tmp_path)
        here.handle.resize("1GiB")
        alias = here.model.layers[3].linear.weight.detach()  # type: ignore[index, union-attr]
        with pytest.raises(OptionError, match=r"another user"):
            here.handle.resize("600KiB")
        del alias
        here.handle.resize("600KiB")
        check_moved(here)

    @pytest.mark.parametrize("is_old_gone", [False, True])
    def test_an_alias_of_what_was_offloaded_before(self, is_old_gone: bool, plain: Pair) -> None:
        alias = plain.model.layers[1].linear.weight.detach()  # type: ignore[index, union-attr]
        plain.handle.resize("600KiB")
        if is_old_gone:
            gc.collect()
        with pytest.raises(StateError, match=r"resized.*take (it|the alias) again"):
            alias.clone()

    def test_an_alias_of_a_resident_that_leaves_a_gpu(self, beside_gpu: int, tmp_path: Path) -> None:
        here = pair("all resident", tmp_path)
        alias = here.model.layers[3].linear.weight.detach()  # type: ignore[index, union-attr]
        with pytest.raises(OptionError, match=r"layers.3.linear.weight .*another user"):
            here.handle.resize("600KiB")
        del alias
        here.handle.resize("600KiB")
        check_moved(here)

    def test_a_pipeline(self, tmp_path: Path) -> None:
        here = pair("prefetch", tmp_path)
        object.__setattr__(here.handle._session._options, "repeats", True)
        with pytest.raises(OptionError, match="pipeline"):
            here.handle.resize("640KiB")

    def test_a_forked_child(self, plain: Pair) -> None:
        if (child := os.fork()) == 0:
            code = 1
            try:
                plain.handle.resize("640KiB")
            except StateError as error:
                code = 0 if "fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        plain.handle.resize("640KiB")
        check_moved(plain)


PLACES: list[tuple[Any, str]] = [
    (HostCopies, "update"),
    (resizing.Exchange, "_bind"),
    (resizing.Exchange, "_place"),
    (resizing.Exchange, "_note_memory"),
    (resizing, "OffloadSession"),
    (OffloadSession, "_attach_hooks"),
    (OffloadSession, "_forget_originals"),
    (OffloadSession, "reset"),
    (ThreadLink, "allocate"),
]


class TestFaults:
    @pytest.mark.parametrize("error", [RuntimeError("no"), torch.OutOfMemoryError("no"), KeyboardInterrupt()])
    @pytest.mark.parametrize(("owner", "name"), PLACES)
    @pytest.mark.parametrize("how", ["once", "always"])
    @pytest.mark.parametrize("way", ["prefetch", "checkpoint"])
    def test_anywhere(
        self, way: str, how: str, owner: Any, name: str, error: BaseException, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        here, original, calls = pair(way, tmp_path), getattr(owner, name), list[int]()
        here.check()

        def fail(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if how == "once" and len(calls) > 1:
                return original(*args, **kwargs)
            raise error

        is_full = isinstance(error, torch.OutOfMemoryError)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(BudgetError if is_full else type(error)) as caught:
                here.handle.resize("640KiB")
        note = caught.value.__notes__[-1]
        if note == "headrace: the offload is parked":
            with pytest.raises(StateError, match=r"resume\(\)"):
                here.run(here.model)
            with pytest.raises(StateError, match=r"resume\(\)"):
                here.model.layers[1].linear.weight.clone()  # type: ignore[index, union-attr, operator]
            here.handle.resume()
        else:
            assert note == "headrace: the offload is as it was before"
        assert note.endswith("parked") or how == "once" or owner is HostCopies
        here.check()
        here.handle.resize("640KiB")
        check_moved(here)
        here.check_state()

    @pytest.mark.parametrize("then", ["resize", "remove", "forward"])
    def test_what_follows_an_interrupt(
        self, then: str, beside_gpu: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here = pair("budget", tmp_path)
        here.handle.park(resume="auto")
        with monkeypatch.context() as patch:
            patch.setattr(OffloadSession, "_attach_hooks", raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                here.handle.resize("1MiB")
        with pytest.raises(StateError, match=r"resume\(\) first"):
            here.handle.update({"last.bias": torch.ones(256)})
        assert here.handle.park(resume="auto") == 0
        if then == "resize":
            here.handle.resize("1MiB")
        elif then == "remove":
            here.handle.remove()
        here.check()
        here.check_state()

    @pytest.mark.slow
    @pytest.mark.parametrize("way", ["prefetch", "checkpoint", "experts"])
    def test_an_interrupt_at_every_line(self, way: str, tmp_path: Path) -> None:
        here, sizes = pair(way, tmp_path), ("2560KiB", "3MiB") if way == "experts" else ("640KiB", "1MiB")
        for size in sizes:  # and what is imported once
            here.handle.resize(size)
        counter = Interrupter(-1)
        counter.run(lambda: here.handle.resize(sizes[0]))
        for number, at in enumerate(range(0, counter.lines, max(1, counter.lines // 150))):
            _, error = Interrupter(at).run(lambda: here.handle.resize(sizes[number % 2]))  # noqa: B023
            assert error is None or isinstance(error, KeyboardInterrupt), (at, error)
            here.handle.resume()
            here.check()
        here.check_state()


class TestThreads:
    def test_forwards_beside_it(self, plain: Pair) -> None:
        """They wait, and have the right bits."""
        stop, outputs = threading.Event(), []
        x = torch.ones(2, 256)

        def forwards() -> None:
            while not stop.is_set():
                with torch.no_grad():
                    outputs.append(plain.model.first(x))  # type: ignore[operator]
                    plain.model.layers[3].linear(x)  # type: ignore[index, union-attr]

        def resizes() -> None:
            try:
                for number in range(20):
                    plain.handle.resize(DENSE_SIZES[number % 4])
                    time.sleep(0.002)
            finally:
                stop.set()

        run_threads([forwards, forwards, resizes])
        expected = plain.twin.first(x)  # type: ignore[operator]
        assert outputs
        for each in outputs:
            assert_same_bits(each, expected.detach())
        plain.check()

    @pytest.mark.parametrize("size", ["640KiB", "1GiB"])
    @pytest.mark.parametrize(
        ("way", "owner", "name"),
        [("all resident", live_tensors, "_materialize"), ("prefetch", Promoter, "on_outside_access")],
    )
    def test_a_weight_used_outside_just_before_it(
        self, way: str, owner: Any, name: str, size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The weight belongs to another session, or is resident, when its bytes are asked for."""
        here, weight, real, sizes = pair(way, tmp_path), "layers.1.linear.weight", getattr(owner, name), [size]
        here.handle.park(resume="auto")

        def after_a_resize(*args: Any) -> Any:
            if sizes:
                run_threads([lambda: here.handle.resize(sizes.pop())])
            return real(*args)

        monkeypatch.setattr(owner, name, after_a_resize)
        with torch.no_grad():
            assert_same_bits(here.model.get_parameter(weight).clone(), here.twin.get_parameter(weight))
        here.check_state()

    def test_two_threads(self, plain: Pair) -> None:
        def work(sizes: tuple[str, ...]) -> None:
            for size in sizes * 4:
                plain.handle.resize(size)
                plain.handle.park()
                plain.handle.resume()

        run_threads([lambda: work(DENSE_SIZES), lambda: work(DENSE_SIZES[::-1])])
        plain.check()
        plain.check_state()
