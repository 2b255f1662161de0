"""The promise: ``park()`` gives the memory of all weights back and ``resume()`` takes it again, with equal bits.

Beside every model runs its resident twin. A fault at any place leaves the offload as before, or parked.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from checks import raising, run_threads
from headrace import Prefetch
from headrace.errors import (
    BudgetError,
    HeadraceWarning,
    LimitError,
    ModelChangedError,
    OptionError,
    OutsideAccessError,
    StateError,
)
from headrace.lifetime import parking
from headrace.lifetime.host_copies import HostCopies
from headrace.lifetime.resizing import Exchange
from headrace.memory.system import Limits
from headrace.model.live_tensors import BoundStorage, _owners
from headrace.model.torch_private import weak_memory
from headrace.runtime.session import OffloadSession, allocate_residents
from headrace.testing import assert_same_bits
from headrace.transfer.link import ThreadLink
from interrupts import Interrupter
from lifetimes import UNIT_BYTES, WAYS, Pair, pair


@pytest.fixture
def plain(tmp_path: Path) -> Pair:
    return pair("prefetch", tmp_path)


class TestBits:
    @pytest.mark.parametrize("way", WAYS)
    def test_between_forwards(self, way: str, tmp_path: Path) -> None:
        here = pair(way, tmp_path)
        here.check()
        for _ in range(3):
            assert here.handle.park() <= here.handle.plan.resident_bytes
            with pytest.raises(StateError, match=r"resume\(\)"):
                here.run(here.model)
            assert here.handle.resume() == here.handle.plan.resident_bytes
            here.check()
        here.check_state()

    @pytest.mark.parametrize("way", WAYS)
    def test_a_forward_resumes(self, way: str, tmp_path: Path) -> None:
        here = pair(way, tmp_path)
        for _ in range(3):
            here.handle.park(resume="auto")
            here.check()
        here.handle.park(resume="auto")
        assert_same_bits(next(here.model.parameters()) * 2, next(here.twin.parameters()) * 2)
        here.check_state()

    @pytest.mark.parametrize("way", WAYS)
    def test_parked_when_it_ends(self, way: str, tmp_path: Path) -> None:
        here = pair(way, tmp_path)
        here.check()
        here.handle.park()
        here.handle.remove()
        here.check_state()

    @pytest.mark.parametrize("way", WAYS)
    def test_nothing_is_left_of_a_cycle(self, way: str, tmp_path: Path) -> None:
        """What says to whom a storage belongs was kept for storages that are gone."""
        here, counts = pair(way, tmp_path), []
        here.check()
        for _ in range(6):
            kept = [torch.UntypedStorage(0) for _ in range(20)]  # so that addresses differ
            here.handle.park()
            here.handle.resume()
            here.check()
            gc.collect()
            counts.append(len(_owners))
            kept.clear()
        assert counts[-1] <= counts[0]

    def test_debug_mode(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HEADRACE_DEBUG", "1")
        here = pair("budget", tmp_path)
        here.check()
        here.handle.park()
        here.handle.resume()
        here.check()
        here.check_state()

    def test_compiled(self, plain: Pair) -> None:
        """Code that was compiled before goes on, and is not compiled again."""
        graphs: list[object] = []
        backend = lambda graph, _: graphs.append(graph) or graph  # noqa: E731
        compiled, x = torch.compile(plain.model, backend=backend, fullgraph=True), torch.ones(2, 256)
        plain.run = lambda each: (compiled if each is plain.model else each)(x)
        plain.check()
        for _ in range(3):
            plain.handle.park()
            with pytest.raises(StateError, match=r"resume\(\)"), torch.no_grad():
                compiled(x)
            plain.handle.resume()
            plain.check()
            plain.handle.park(resume="auto")
            plain.check()
        assert len(graphs) == 1
        torch.compiler.reset()

    def test_a_promoted_weight(self, plain: Pair) -> None:
        with pytest.warns(HeadraceWarning, match="resident from now on"):
            plain.model.layers[1].linear.weight.sum()  # type: ignore[index, union-attr]
        plain.handle.park()
        plain.handle.resume()
        plain.check()
        plain.check_state()

    def test_residents_keep_what_was_written_in_any_way(self, plain: Pair) -> None:
        assert plain.handle.park() == plain.handle.plan.resident_bytes
        plain.handle.resume()
        for write in (
            lambda m: m.first.weight.data.mul_(2),
            lambda m: m.last.bias.detach().numpy().__setitem__(3, 7.0),
            lambda m: m.layers[2].norm.weight.data.view(torch.int32).bitwise_xor_(-(2**31)),  # of all in one word
        ):
            for model in (plain.model, plain.twin):
                write(model)
            assert 0 < plain.handle.park() < plain.handle.plan.resident_bytes
            plain.handle.resume()
            plain.check()
        plain.check_state()

    def test_data_that_is_set_while_it_is_parked_stays(self, plain: Pair) -> None:
        plain.handle.park()
        for model in (plain.model, plain.twin):
            model.last.bias.data = torch.ones(256)  # type: ignore[union-attr]
        plain.handle.resume()
        plain.check()

    @pytest.mark.parametrize("way", ["prefetch", "coded"])
    def test_data_of_a_unit_that_is_set_while_it_is_parked_is_an_error(self, way: str, tmp_path: Path) -> None:
        """As where it is not parked: the copy of the unit would undo it."""
        here = pair(way, tmp_path)
        weight = here.model.layers[1].linear.weight  # type: ignore[index, union-attr]
        here.handle.park()
        weight.data = torch.ones_like(here.twin.layers[1].linear.weight)  # type: ignore[index, union-attr]
        here.handle.resume()
        with pytest.raises(ModelChangedError, match=r"layers.1.linear.weight was moved"):
            here.check()
        here.handle.remove()
        assert_same_bits(weight.data, torch.ones_like(weight.data))

    def test_a_backward_pass_after_it(self, plain: Pair) -> None:
        x = torch.ones(2, 256)
        outputs = [model.last(x).sum() for model in (plain.model, plain.twin)]  # type: ignore[operator]
        plain.handle.park()
        plain.handle.resume()
        for output in outputs:
            output.backward()
        assert_same_bits(plain.model.first.weight.grad, plain.twin.first.weight.grad)  # type: ignore[union-attr]


class TestBytes:
    def test_a_second_park_copies_what_was_written(self, plain: Pair) -> None:
        resident_bytes = plain.handle.plan.resident_bytes
        assert plain.handle.park() == resident_bytes
        assert plain.handle.park() == 0
        assert plain.handle.resume() == resident_bytes
        assert plain.handle.resume() == 0
        assert plain.handle.park() == 0
        plain.handle.resume()
        plain.check()  # which writes the five buffers
        assert plain.handle.park() == 5 * 3 * 4

    @pytest.mark.parametrize("num_bytes", [1, 7, 4096, 5 << 20, (16 << 20) + 3])
    @pytest.mark.parametrize("start", [0, 1])
    def test_a_write_of_any_bits_is_found(self, num_bytes: int, start: int) -> None:
        """Of one bit, of the signs of two numbers, of numbers that change places."""
        copies, random = HostCopies(torch.device("cpu")), torch.Generator().manual_seed(num_bytes)
        buffer = torch.randint(0, 256, (num_bytes + start,), generator=random).to(torch.uint8)[start:]
        writes = [torch.tensor([0]), torch.tensor([num_bytes - 1])]
        writes += [torch.randint(0, num_bytes, (2,), generator=random) | 3 for _ in range(20) if num_bytes > 3]
        assert copies.update({"it": buffer}) == num_bytes
        assert copies.update({"it": buffer}) == 0
        for positions in writes:
            if (positions := positions[positions < num_bytes].unique()).numel():
                buffer[positions] ^= 128
                assert copies.update({"it": buffer}) == num_bytes
        if num_bytes > 8:
            buffer[:8] = torch.cat([buffer[4:8], buffer[:4]])
            assert copies.update({"it": buffer}) == num_bytes
        assert torch.equal(copies.bytes_of("it"), buffer)

    def test_units_move_as_before(self, plain: Pair) -> None:
        plain.check()
        before = plain.handle.stats().bytes_moved
        plain.handle.park()
        plain.handle.resume()
        plain.check()
        plain.handle.sync_prev_onload()
        assert plain.handle.stats().bytes_moved - before == 7 * UNIT_BYTES  # five of a forward, two slots

    def test_memory_is_freed(self, plain: Pair) -> None:
        plain.check()
        session = plain.handle._session
        assert session.prefetcher is not None
        slots = [weakref.ref(slot.memory) for slot in session.prefetcher.replays.live]
        (resident,) = {weak_memory(plain.model.last.bias.data)}  # type: ignore[union-attr]
        assert resident() is not None
        plain.handle.park()
        assert resident() is None
        assert [slot() for slot in slots] == [None, None]

    def test_state_dict_of_a_parked_model(self, plain: Pair) -> None:
        plain.handle.park()
        state = plain.model.state_dict()
        assert_same_bits(state["layers.2.linear.weight"], plain.twin.state_dict()["layers.2.linear.weight"])
        with pytest.raises(StateError, match=r"resume\(\)"):
            state["last.bias"].clone()
        with pytest.raises(OutsideAccessError, match=r"parked, call handle.resume\(\)"):
            torch.save(state, io.BytesIO())
        plain.handle.resume()
        assert_same_bits(state["last.bias"].clone(), plain.twin.state_dict()["last.bias"])

    @pytest.mark.parametrize("way", ["coded", "disk", "checkpoint"])
    def test_state_dict_with_a_parked_weight_that_was_promoted(self, way: str, tmp_path: Path) -> None:
        """It is as any other resident's."""
        here, name = pair(way, tmp_path, Prefetch(1, 1, 2) if way == "checkpoint" else None), "layers.3.linear.weight"
        here.model.get_parameter(name).sum()
        here.handle.park()
        state = here.model.state_dict()
        with pytest.raises(StateError, match=r"resume\(\)"):
            state[name].clone()
        here.handle.park(resume="auto")
        assert_same_bits(here.model.state_dict()[name].clone(), here.twin.state_dict()[name])
        here.check_state()


class TestRefused:
    @pytest.mark.parametrize("then", ["resume", "resize"])
    @pytest.mark.parametrize("way", ["prefetch", "all resident", "checkpoint"])
    def test_residents_with_another_user_stay(self, way: str, then: str, tmp_path: Path) -> None:
        """Also those of a model that came without bytes, whose memory is the offload's."""
        here = pair(way, tmp_path)
        aliases = [model.last.bias.detach()[1:] for model in (here.model, here.twin)]  # type: ignore[union-attr]
        with pytest.warns(HeadraceWarning, match=r"1\.0 KiB of residents \(last\.bias, 1 in all\) stay where they are"):
            here.handle.park()
        here.handle.resume() if then == "resume" else here.handle.resize("600KiB")
        for alias, model in zip(aliases, (here.model, here.twin), strict=True):
            alias.mul_(3)
            model.layers[2].norm.weight.data.mul_(2)  # type: ignore[index, union-attr]
        here.check()
        new = torch.full([256], 0.5)
        here.handle.update({"last.bias": new})
        assert_same_bits(aliases[0], new[1:])

    @pytest.mark.parametrize("is_kept", [True, False])
    def test_a_buffer_that_is_a_view(self, is_kept: bool, tmp_path: Path) -> None:
        """Torch keeps what a view was made of: another user only if somebody else has it."""
        here = pair("prefetch", tmp_path)
        here.handle.remove()
        kept = list[torch.Tensor]()
        for model in (here.model, here.twin):
            kept.append(whole := torch.zeros(2, 256))
            model.register_buffer("shift", whole[0])
        if not is_kept:
            del kept[:], whole
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handle = headrace.offload(here.model, Prefetch(1, 1, 2, params=("linear.weight",)))
            handle.park()
            handle.resume()
        assert ["stay where they are" in str(each.message) for each in caught] == [True] * is_kept
        for model in (here.model, here.twin):
            model.shift.add_(1)  # type: ignore[operator, union-attr]
        assert_same_bits(kept[:1], kept[1:])

    def test_inside_a_forward(self, plain: Pair) -> None:
        hook = plain.model.layers[1].register_forward_hook(lambda *_: plain.handle.park() and None)  # type: ignore[index, union-attr]
        with pytest.raises(StateError, match="inside a forward"), torch.no_grad():
            plain.run(plain.model)
        hook.remove()
        assert plain.handle._lifetime.parked is None

    def test_a_wrong_resume(self, plain: Pair) -> None:
        with pytest.raises(OptionError, match="'call', 'auto'"):
            plain.handle.park(resume="always")  # type: ignore[arg-type]
        plain.check()

    def test_an_ended_offload(self, plain: Pair) -> None:
        plain.handle.remove()
        with pytest.raises(StateError, match="has ended"):
            plain.handle.park()

    def test_no_host_memory(self, plain: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        from headrace.lifetime import host_copies

        monkeypatch.setattr(host_copies, "read_limits", lambda *_, **__: Limits(host_available_bytes=5))
        with pytest.raises(LimitError, match="nothing was changed") as caught:
            plain.handle.park()
        assert caught.value.__notes__ == ["headrace: the offload is as it was before"]
        plain.check()

    def test_a_forked_child(self, plain: Pair) -> None:
        plain.handle.park()
        if (child := os.fork()) == 0:
            code = 1
            try:
                plain.handle.resume()
            except StateError as error:
                code = 0 if "fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        plain.handle.resume()
        plain.check()

    @pytest.mark.parametrize("is_parked", [False, True])
    def test_a_forked_child_of_a_thread_that_parks(self, is_parked: bool, plain: Pair) -> None:
        """A lock that another thread held is locked in the child forever, also for the first call there."""
        if is_parked:
            plain.handle.park(resume="auto")
        lock, has_it, is_over = plain.handle._lock, threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                has_it.set()
                is_over.wait(60)

        def fork() -> None:
            has_it.wait(60)
            if (child := os.fork()) == 0:
                signal.alarm(10)
                try:
                    plain.run(plain.model) if is_parked else plain.handle.park()
                except StateError:
                    os._exit(0)
                finally:
                    os._exit(1)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            is_over.set()

        codes: list[int] = []
        run_threads([hold, fork])
        assert codes == [0]
        plain.check()


class TestFaults:
    @pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
    @pytest.mark.parametrize(
        ("owner", "name", "parked"),
        [
            (HostCopies, "update", False),
            (HostCopies, "_fingerprints", False),
            (parking, "free_slots", True),
            (parking.Lifetime, "release_graphs", False),
        ],
    )
    def test_of_park(
        self, owner: Any, name: str, parked: bool, error: BaseException, plain: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain.check()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, raising(error))
            with pytest.raises(type(error)) as caught:
                plain.handle.park()
        assert caught.value.__notes__[-1] == f"headrace: the offload is {'parked' if parked else 'as it was before'}"
        if parked:
            with pytest.raises(StateError, match=r"resume\(\)"):
                plain.run(plain.model)
            plain.handle.resume()
        plain.check()
        plain.check_state()

    def test_a_second_park_frees_what_an_error_has_left(self, plain: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(parking, "free_slots", raising(RuntimeError("no")))
            with pytest.raises(RuntimeError):
                plain.handle.park()
        prefetcher = plain.handle._session.prefetcher
        assert prefetcher is not None
        assert all(slot.memory.nbytes for slot in prefetcher.replays.live)
        assert plain.handle.park() == 0
        assert not any(slot.memory.nbytes for slot in prefetcher.replays.live)
        plain.handle.resume()
        plain.check()

    @pytest.mark.parametrize("error", [RuntimeError("no"), torch.OutOfMemoryError("no"), KeyboardInterrupt()])
    @pytest.mark.parametrize(
        ("owner", "name"),
        [
            (HostCopies, "finish"),
            (HostCopies, "fill"),
            (ThreadLink, "allocate"),
            (parking, "allocate_residents"),
            (parking, "point_at_slots"),
        ],
    )
    def test_of_resume(
        self, owner: Any, name: str, error: BaseException, plain: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain.handle.park()
        is_full = isinstance(error, torch.OutOfMemoryError)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, raising(error))
            with pytest.raises(BudgetError if is_full else type(error)) as caught:
                plain.handle.resume()
        assert caught.value.__notes__[-1] == "headrace: the offload is parked"
        with pytest.raises(StateError, match=r"resume\(\)"):
            plain.run(plain.model)
        plain.handle.resume()
        plain.check()
        plain.check_state()

    def test_an_interrupt_of_a_forward_that_resumes(self, plain: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        plain.handle.park(resume="auto")
        with monkeypatch.context() as patch:
            patch.setattr(HostCopies, "fill", raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt) as caught:
                plain.run(plain.model)
        assert caught.value.__notes__ == ["headrace: the offload is parked"]
        run_threads([plain.handle.resume])  # no lock is left to this thread
        plain.check()
        plain.check_state()

    @pytest.mark.parametrize("way", ["prefetch", "budget", "all resident"])
    def test_an_interrupt_in_the_middle_of_remove(
        self, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing but another remove() goes on from there."""
        here, give_back = pair(way, tmp_path), BoundStorage.give_back
        if way == "budget":  # the others have nothing yet of what park() and its like need
            here.handle.resume()

        def interrupt(*args: Any) -> None:
            give_back(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(BoundStorage, "give_back", interrupt)
            with pytest.raises(KeyboardInterrupt) as caught:
                here.handle.remove()
        assert caught.value.__notes__ == ["headrace: the offload is in force until remove() has been called again"]
        handle, values = here.handle, {"last.bias": torch.ones(256)}
        for call in (handle.park, lambda: handle.resize("640KiB"), lambda: handle.update(values)):
            with pytest.raises(StateError, match=r"call remove\(\) again"):
                call()
        here.handle.remove()
        here.check()
        here.check_state()

    @pytest.mark.parametrize("call", ["park", "resume", "update"])
    @pytest.mark.parametrize("again", [True, False])
    def test_an_interrupt_where_forwards_begin_again(
        self, call: str, again: bool, plain: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handle, values = plain.handle, {"last.bias": torch.ones(256)}
        calls = {"park": handle.park, "resume": handle.resume, "update": lambda: handle.update(values)}
        if call == "resume":
            plain.handle.park()
        with monkeypatch.context() as patch:
            patch.setattr(parking.Lifetime, "_open", raising(KeyboardInterrupt()))
            if call == "park":
                patch.setattr(HostCopies, "update", raising(RuntimeError("no")))
            with pytest.raises(KeyboardInterrupt):
                calls[call]()
        if call == "update":
            plain.twin.last.bias.data.fill_(1)  # type: ignore[union-attr]
        if again:
            plain.handle.resume()
        plain.check()
        plain.check_state()

    @pytest.mark.slow
    @pytest.mark.parametrize("call", ["park", "resume"])
    def test_an_interrupt_at_every_line(self, call: str, tmp_path: Path) -> None:
        here = pair("prefetch", tmp_path)
        here.handle.park()
        here.handle.resume()
        counter = Interrupter(-1)
        if call == "resume":
            here.handle.park()
        counter.run(getattr(here.handle, call))
        lines = counter.lines
        here.handle.resume()
        here.check()
        for at in range(0, lines, max(1, lines // 150)):
            if call == "resume":
                here.handle.park()
            _, error = Interrupter(at).run(getattr(here.handle, call))
            assert error is None or isinstance(error, KeyboardInterrupt), (at, error)
            here.handle.resume()
            here.check()
        here.check_state()


class TestThreads:
    @pytest.mark.parametrize("way", ["prefetch", "all resident"])
    @pytest.mark.parametrize("resume", ["call", "auto"])
    def test_forwards_beside_it(self, way: str, resume: str, tmp_path: Path) -> None:
        """A forward beside park and resume has the right bits, or raises."""
        here = pair(way, tmp_path)
        stop, outcomes = threading.Event(), []
        x = torch.ones(2, 256)

        def forwards() -> None:
            while not stop.is_set():
                try:
                    with torch.no_grad():
                        outcomes.append(here.model.first(x))  # type: ignore[operator]
                        here.model.layers[3].linear(x)  # type: ignore[index, union-attr]
                except StateError as error:
                    outcomes.append(error)

        def lifetimes() -> None:
            try:
                for _ in range(20):
                    here.handle.park(resume=resume)  # type: ignore[arg-type]
                    time.sleep(0.002)
                    here.handle.resume()
                    time.sleep(0.002)
            finally:
                stop.set()

        run_threads([forwards, forwards, lifetimes])
        expected = here.twin.first(x)  # type: ignore[operator]
        found = [each for each in outcomes if isinstance(each, torch.Tensor)]
        assert found
        for each in found:
            assert_same_bits(each, expected.detach())
        here.check()

    def test_two_threads_park(self, plain: Pair) -> None:
        def work() -> None:
            for _ in range(10):
                plain.handle.park()
                plain.handle.resume()

        run_threads([work, work])
        plain.check()

    @pytest.mark.parametrize("call", ["park", "resume", "resize", "update", "remove"])
    @pytest.mark.parametrize("way", ["prefetch", "all resident"])
    def test_in_the_middle_of_remove(
        self, call: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What another thread calls waits, and finds an offload that has ended."""
        here, remove = pair(way, tmp_path), OffloadSession.remove
        arguments = {"resize": ["640KiB"], "update": [{"last.bias": torch.ones(256)}]}.get(call, [])
        errors: list[StateError] = []

        def other() -> None:
            try:
                getattr(here.handle, call)(*arguments)
            except StateError as error:
                errors.append(error)

        def in_the_middle(*args: Any) -> None:
            monkeypatch.setattr(OffloadSession, "remove", remove)
            thread.start()
            thread.join(0.3)
            assert thread.is_alive()
            remove(*args)

        thread = threading.Thread(target=other)
        monkeypatch.setattr(OffloadSession, "remove", in_the_middle)
        here.handle.remove()
        thread.join(60)
        assert [str(error).partition(";")[0] for error in errors] == (
            [] if call in ("resume", "remove") else [f"{call}(): this offload has ended"]
        )
        here.check()
        here.check_state()

    @pytest.mark.parametrize("what", ["resume", "a use"])
    def test_in_the_middle_of_update_and_resize(self, what: str, plain: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another thread waits for the end, and takes no state of the middle for it."""
        owner, name = (HostCopies, "forget") if what == "resume" else (Exchange, "_place")
        real, found = getattr(owner, name), []

        def other() -> None:
            found.append(plain.handle.resume() if what == "resume" else plain.model.layers[1].linear.weight.sum())  # type: ignore[index, union-attr]

        def in_the_middle(*args: Any) -> Any:
            monkeypatch.setattr(owner, name, real)
            thread.start()
            thread.join(0.3)
            return real(*args)

        thread = threading.Thread(target=other)
        monkeypatch.setattr(owner, name, in_the_middle)
        if what == "resume":
            plain.handle.update({"last.bias": plain.twin.last.bias.detach().clone()})  # type: ignore[union-attr, operator]
        else:
            plain.handle.resize("640KiB")
        thread.join(60)
        assert [float(each) for each in found] == [
            0 if what == "resume" else float(plain.twin.layers[1].linear.weight.sum())  # type: ignore[index, union-attr]
        ]
        plain.check()
        plain.check_state()

    def test_a_forward_that_the_gate_lets_go(self, tmp_path: Path) -> None:
        """It counts as one that runs before another thread can park."""
        here = pair("all resident", tmp_path)
        here.handle.park(resume="auto")
        begins, parked = threading.Event(), threading.Event()

        class Waiting(set[int]):
            def discard(self, thread: int) -> None:
                if thread in self:
                    begins.set()
                    parked.wait(0.3)
                super().discard(thread)

        def park() -> None:
            begins.wait(10)
            here.handle.park()
            parked.set()

        here.handle._lifetime._waiting = Waiting()
        thread = threading.Thread(target=park)
        thread.start()
        here.check()
        thread.join(60)
        here.handle.resume()
        here.check()

    def test_it_waits_for_a_forward(self, plain: Pair) -> None:
        order: list[str] = []

        def slow(*_: object) -> None:
            inside.set()
            time.sleep(0.2)
            order.append("forward")

        inside = threading.Event()
        for model in (plain.model, plain.twin):
            model.layers[2].register_forward_hook(slow if model is plain.model else lambda *_: None)  # type: ignore[index, union-attr]

        def forward() -> None:
            with torch.no_grad():
                plain.run(plain.model)

        def park() -> None:
            inside.wait(10)
            plain.handle.park()
            order.append("park")

        run_threads([forward, park])
        assert order == ["forward", "park"]


def test_nothing_is_left(tmp_path: Path) -> None:
    here = pair("prefetch", tmp_path)
    here.handle.park()
    here.handle.resume()
    here.handle.remove()
    model, before = weakref.ref(here.model), threading.active_count()
    del here
    gc.collect()
    assert model() is None
    assert threading.active_count() <= before


def test_a_resident_that_stays_shares_no_memory_with_those_that_leave(plain: Pair) -> None:
    """``remove()`` leaves a tensor where it came from; on a GPU it would hold the one allocation of all residents."""
    bound = list(plain.handle._session._bound.values())
    staying = bound[1].info.name
    places = allocate_residents(bound, torch.device("meta"), [staying])  # as on a GPU
    assert [places[each.info.name].numel() for each in bound] == [each.info.num_bytes for each in bound]
    memory = {name: place.untyped_storage()._cdata for name, place in places.items()}
    alone = memory.pop(staying)
    assert alone not in memory.values()
    assert len(set(memory.values())) == 1
