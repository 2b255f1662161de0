"""The promise: ranks that wait for one another never wait long for one that has failed, ended or not come."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import OptionError, PeerError
from headrace.ranks.group import ProcessWatch, RankGroup, this_host


class _Group:
    """What is asked of a process group, without processes."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.get_group_store, self.rank, self.size = lambda: store, lambda: rank, lambda: size


@contextmanager
def opened(store: Any, rank: int, size: int = 2) -> Iterator[RankGroup]:
    with RankGroup.open(_Group(store, rank, size)) as ranks:  # type: ignore[arg-type]
        assert ranks is not None
        yield ranks


def exchange(store: Any, rank: int, size: int = 2, value: object = 1) -> list[Any]:
    """One call of one rank."""
    with opened(store, rank, size) as ranks:
        return ranks.exchange("step", value)


def fail(store: Any, rank: int, size: int = 2) -> None:
    with pytest.raises(ValueError, match="no such folder"), opened(store, rank, size):
        raise ValueError("no such folder")


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def timeout(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    return lambda seconds: monkeypatch.setattr("headrace.ranks.group.peer_timeout_s", lambda: seconds)


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except (PeerError, ValueError) as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_every_rank_gets_the_values_of_all_in_every_call(store: dist.Store) -> None:
    for turn in range(3):
        threads = [in_thread(partial(exchange, store, rank, 3, {"rank": rank, "turn": turn})) for rank in range(3)]
        for thread, found in threads:
            thread.join(5)
            assert found == [[{"rank": rank, "turn": turn} for rank in range(3)]]


def test_ranks_that_do_not_come_are_named(store: dist.Store, timeout: Callable[[float], None]) -> None:
    timeout(0.2)
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"waited 0 s for ranks 1, 2 \('step' .*HEADRACE_PEER_TIMEOUT"):
        exchange(store, 0, 3)
    assert 0.2 <= time.monotonic() - begin < 2


def test_a_failure_reaches_ranks_that_wait_at_once_with_its_reason(store: dist.Store) -> None:
    thread, found = in_thread(partial(exchange, store, 0))
    time.sleep(0.1)
    begin = time.monotonic()
    fail(store, 1)
    thread.join(5)
    assert time.monotonic() - begin < 4
    assert "rank 1 gave up" in str(found[0])
    assert "ValueError: no such folder" in str(found[0])


def test_a_failure_reaches_ranks_that_come_later(store: dist.Store) -> None:
    fail(store, 1, 3)
    begin = time.monotonic()
    for rank in (0, 2):  # rank 2 gets the cause, and not that rank 0 has failed with it
        with pytest.raises(PeerError, match=r"rank 1 gave up .* no such folder"):
            exchange(store, rank, 3)
    assert time.monotonic() - begin < 4


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_that_has_failed_refuses_further_calls(rank: int, store: dist.Store) -> None:
    fail(store, 1)
    for _ in range(2):
        with pytest.raises(PeerError, match=r"no such folder. To try again, make a new group on all ranks"):
            exchange(store, rank)


def test_what_was_said_before_a_failure_still_counts(store: dist.Store) -> None:
    def say_and_fail() -> None:
        with opened(store, 1) as second:
            second.exchange("step", "here")
            raise ValueError("later")

    with opened(store, 0) as first:
        thread, failed = in_thread(say_and_fail)
        store.set(f"{first.prefix}/1 step/0", "0")
        thread.join(5)
        assert str(failed[0]) == "later"
        assert first.exchange("step", 1) == [1, "here"]


@pytest.mark.parametrize("said", [False, True])
def test_a_process_that_ends_is_noticed_unless_it_has_said_all(store: dist.Store, said: bool) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with opened(store, 0) as first:
        store.set("headrace/process/1", json.dumps({"pid": child.pid, "host": this_host()}))
        if said:
            store.set(f"{first.prefix}/1 step/1", "2")
        thread, found = in_thread(lambda: first.exchange("step", 1))
        time.sleep(0.1)
        child.kill()
        thread.join(5)
        child.wait()
        assert first.watch.ended == {1}
    assert found == [[1, 2]] if said else "rank 1 has ended, and a shared offload needs every rank" in str(found[0])


def test_a_process_that_is_about_to_end_is_waited_for(store: dist.Store) -> None:
    child = subprocess.Popen(["sleep", "0.3"])
    with opened(store, 0) as ranks:
        ranks.watch.add(1, child.pid)
        with pytest.raises(PeerError, match="rank 1 has ended"):
            ranks.look_for_cause()
    child.wait()
    watch = ProcessWatch()
    watch.add(2, child.pid)
    assert watch.ended == {2}


def test_a_store_that_does_not_answer() -> None:
    host = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, None, False, wait_for_workers=False)
    begin = time.monotonic()
    with opened(client, 0) as ranks:
        del host
        with pytest.raises(PeerError, match="does not answer"):
            ranks.exchange("step", 1)
    assert time.monotonic() - begin < 10


class _Stopped:
    """A store whose process is stopped: the kernel takes what it is sent, and nothing ever comes back."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: threading.Event().wait(60)


def test_a_store_whose_process_is_stopped_holds_no_rank_up(timeout: Callable[[float], None]) -> None:
    timeout(0.2)
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"has not answered for 0 s: the process that holds it hangs or is stopped"):
        exchange(_Stopped(), 0)
    assert time.monotonic() - begin < 10


class _Interrupted:
    """A store in whose n-th call the user presses Ctrl-C."""

    def __init__(self, store: dist.Store, calls: int) -> None:
        self._store, self._calls = store, calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._calls -= 1
            if not self._calls:
                raise KeyboardInterrupt
            return getattr(self._store, name)(*args)

        return call


@pytest.mark.parametrize("calls", range(1, 5))
def test_an_interrupt_at_the_beginning_of_a_call_is_a_failure_in_all(store: dist.Store, calls: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        exchange(_Interrupted(store, calls), 1)
    with pytest.raises(PeerError, match=r"rank 1 gave up .* KeyboardInterrupt"):
        exchange(store, 0)


def test_a_timeout_that_cannot_be_is_a_failure_in_all(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PEER_TIMEOUT", "soon")
    with pytest.raises(OptionError):
        exchange(store, 1)
    monkeypatch.delenv("HEADRACE_PEER_TIMEOUT")
    with pytest.raises(PeerError, match=r"rank 1 gave up .* OptionError: HEADRACE_PEER_TIMEOUT"):
        exchange(store, 0)


BEHAVIOURS = ["right", "fails at once", "fails later", "does not come"]


def behave(store: dist.Store, rank: int, behaviour: str, delay_s: float) -> str:
    time.sleep(delay_s)
    if behaviour == "does not come":
        return behaviour
    try:
        with opened(store, rank, 3) as ranks:
            if behaviour == "fails at once":
                raise ValueError("planted")
            ranks.exchange("one", 1)
            if behaviour == "fails later":
                raise ValueError("planted")
            ranks.exchange("two", 1)
    except (PeerError, ValueError) as error:
        return type(error).__name__
    return "right"


@settings(max_examples=25, deadline=None)
@given(st.tuples(*[st.sampled_from(BEHAVIOURS)] * 3), st.tuples(*[st.sampled_from([0, 0, 0.05])] * 3))
def test_all_ranks_succeed_or_none(behaviours: tuple[str, ...], delays: tuple[float, ...]) -> None:
    store = dist.HashStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.ranks.group.peer_timeout_s", lambda: 0.3)
        for turn in (["right"] * 3, behaviours):  # a call that succeeds changes nothing for the next one
            threads = [in_thread(partial(behave, store, *args)) for args in zip(range(3), turn, delays, strict=True)]
            for thread, _ in threads:
                thread.join(10)
            found = [said[0] for _, said in threads]
            if set(turn) == {"right"}:
                assert found == ["right"] * 3
            else:
                assert "right" not in found, (turn, found)


@pytest.mark.parametrize("value", ["0", "soon", "-1", "1.5", "1" + "0" * 400])
def test_the_timeout_is_a_whole_number_of_seconds(
    value: str, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_PEER_TIMEOUT", value)
    with pytest.raises(OptionError, match="whole number of seconds"):
        exchange(store, 0, 1)
