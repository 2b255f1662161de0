"""The promise: ranks that wait for one another never wait long for one that has failed, ended or not come."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import OptionError, PeerError
from penstock.ranks.rendezvous import Rendezvous, this_host


class _Group:
    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def get_group_store(self) -> dist.Store:
        return self._store


class _Peers:
    """What a meeting asks of :class:`penstock.ranks.peers.Peers`, without processes."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.group, self.rank, self.size = _Group(store), rank, size


def meet(store: dist.Store, rank: int, size: int = 2, timeout_s: float = 5.0) -> Rendezvous:
    return Rendezvous(_Peers(store, rank, size), "test", timeout_s)  # type: ignore[arg-type]


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except PeerError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_everybody_hears_everybody(store: dist.Store) -> None:
    threads = [in_thread(lambda rank=rank: meet(store, rank, 3).exchange("step", {"rank": rank})) for rank in range(3)]
    for thread, found in threads:
        thread.join(5)
        assert found == [{rank: {"rank": rank} for rank in range(3)}]


def test_who_does_not_come_is_named(store: dist.Store) -> None:
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"waited 0 s for ranks 1, 2 \('step' .*PENSTOCK_PEER_TIMEOUT"):
        meet(store, 0, 3, timeout_s=0.2).exchange("step", 1)
    assert 0.2 <= time.monotonic() - begin < 2


def test_a_failure_is_heard_at_once_with_its_reason(store: dist.Store) -> None:
    first, second = meet(store, 0), meet(store, 1)
    thread, found = in_thread(lambda: first.exchange("step", 1))
    time.sleep(0.1)
    begin = time.monotonic()
    second.fail("the disk is gone")
    thread.join(5)
    assert time.monotonic() - begin < 1
    assert "rank 1 gave up" in str(found[0])
    assert "the disk is gone" in str(found[0])


def test_what_was_said_before_a_failure_still_counts(store: dist.Store) -> None:
    first, second = meet(store, 0), meet(store, 1)
    second.post("step", "here")
    second.fail("later")
    assert first.exchange("step", 1) == {0: 1, 1: "here"}


@pytest.mark.parametrize("said", [False, True])
def test_a_process_that_ends_is_noticed_unless_it_had_said_all(store: dist.Store, said: bool) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    first, second = meet(store, 0), meet(store, 1)
    first.watch({0: 1, 1: child.pid})
    if said:
        second.post("step", 2)
    thread, found = in_thread(lambda: first.exchange("step", 1))
    child.kill()
    thread.join(5)
    child.wait()
    with pytest.raises(PeerError, match="rank 1 has ended"):
        first.require_running(1)
    first.require_running(0)
    if said:
        assert found == [{0: 1, 1: 2}]
    else:
        assert "rank 1 has ended" in str(found[0])


def test_a_process_that_is_about_to_end_is_waited_for(store: dist.Store) -> None:
    child = subprocess.Popen(["sleep", "0.3"])
    meeting = meet(store, 0)
    meeting.watch({1: child.pid})
    meeting.require_running(1)
    with pytest.raises(PeerError, match="rank 1 has ended"):
        meeting.require_running(1, 5.0)
    child.wait()


def test_a_store_that_does_not_answer() -> None:
    host = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, None, False, wait_for_workers=False)
    meeting = meet(client, 0)
    del host
    begin = time.monotonic()
    with pytest.raises(PeerError, match="does not answer"):
        meeting.exchange("step", 1)
    assert time.monotonic() - begin < 10


class _Stopped:
    """A store whose process is stopped: the kernel takes what it is sent, and nothing ever comes back."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: threading.Event().wait(60)


def test_a_store_whose_process_is_stopped_holds_nobody_up(store: dist.Store) -> None:
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"has not answered for 0 s: the process that holds it hangs or is stopped"):
        meet(_Stopped(), 0, timeout_s=0.2)  # type: ignore[arg-type]
    meeting = meet(store, 0, timeout_s=0.2)
    meeting.post("step", 1)
    meeting._store = _Stopped()  # type: ignore[assignment]
    with pytest.raises(PeerError, match="hangs or is stopped"):
        meeting.collect("step", [1])
    meeting.fail("no answer")
    assert time.monotonic() - begin < 10


def give_up(meeting: Rendezvous) -> None:
    with pytest.raises(PeerError, match="has waited") as caught:
        meeting.exchange("step", "stale")
    meeting.fail(str(caught.value))


def require_fresh(store: dist.Store, size: int = 2, delays_s: tuple[float, ...] = (0, 0, 0)) -> None:
    """The next meeting of all ranks, which come at different times, is as if there had been none before."""

    def come(rank: int) -> Any:
        time.sleep(delays_s[rank])
        return meet(store, rank, size).exchange("step", "fresh")

    threads = [in_thread(lambda rank=rank: come(rank)) for rank in range(size)]
    for thread, found in threads:
        thread.join(10)
        assert found == [dict.fromkeys(range(size), "fresh")]


@pytest.mark.parametrize("first", [0, 1])
def test_meetings_do_not_mix_and_ranks_that_missed_one_find_each_other_again(store: dist.Store, first: int) -> None:
    for _ in range(2):
        give_up(meet(store, 0, timeout_s=0.1))
    require_fresh(store, delays_s=(0.2 * first, 0.2 - 0.2 * first))


def test_a_failure_before_anybody_else_has_come_is_heard_by_all(store: dist.Store) -> None:
    meet(store, 1, 3).fail("no such folder")
    begin = time.monotonic()
    for rank in (0, 2):
        meeting = meet(store, rank, 3)
        with pytest.raises(PeerError, match=r"rank 1 gave up .* no such folder") as caught:
            meeting.exchange("step", 1)
        meeting.fail(str(caught.value))  # rank 2 hears of rank 1, and not that rank 0 has heard of it
    assert time.monotonic() - begin < 1
    require_fresh(store, 3)


def test_one_that_was_left_behind_twice_over_joins_the_others(store: dist.Store) -> None:
    """It missed a meeting which failed for a reason of its own; the others have gone on to the next."""
    meet(store, 1, 3).fail("no such folder")
    with pytest.raises(PeerError, match="rank 1 gave up") as caught:
        (meeting := meet(store, 0, 3)).exchange("step", 1)
    meeting.fail(str(caught.value))
    require_fresh(store, 3, (0, 0, 0.3))


def test_one_that_went_on_without_a_word_is_not_waited_for(store: dist.Store) -> None:
    meeting = meet(store, 0)
    meet(store, 1)
    meet(store, 1)
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"rank 1 gave up a shared offload and began another one") as caught:
        meeting.exchange("step", 1)
    meeting.fail(str(caught.value))
    assert time.monotonic() - begin < 1


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
def test_an_interrupt_while_it_is_counted_is_heard_too(store: dist.Store, calls: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        meet(_Interrupted(store, calls), 1)  # type: ignore[arg-type]
    meeting = meet(store, 0)
    with pytest.raises(PeerError, match=r"rank 1 gave up .* KeyboardInterrupt") as caught:
        meeting.exchange("step", 1)
    meeting.fail(str(caught.value))
    require_fresh(store)


def test_a_timeout_that_cannot_be_is_heard_too(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PEER_TIMEOUT", "soon")
    with pytest.raises(OptionError):
        Rendezvous(_Peers(store, 1, 2), "test")  # type: ignore[arg-type]
    with pytest.raises(PeerError, match=r"rank 1 gave up .* OptionError: PENSTOCK_PEER_TIMEOUT"):
        meet(store, 0).exchange("step", 1)


def test_a_process_that_came_once_is_watched_before_it_comes_again(store: dist.Store) -> None:
    child = subprocess.Popen(["sleep", "60"])
    meet(store, 1).fail("for the first time")
    store.set("penstock/test/process/1", json.dumps({"pid": child.pid, "host": this_host()}))
    with pytest.raises(PeerError, match="rank 1 gave up") as caught:
        (meeting := meet(store, 0)).exchange("step", 1)
    meeting.fail(str(caught.value))
    child.kill()
    child.wait()
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"rank 1 has ended, and a shared offload needs every rank .* restart all"):
        meet(store, 0).exchange("step", 1)
    assert time.monotonic() - begin < 1


BEHAVIOURS = ["right", "fails at once", "fails later", "does not come"]


def behave(store: dist.Store, rank: int, behaviour: str, delay_s: float) -> str:
    time.sleep(delay_s)
    if behaviour == "does not come":
        return behaviour
    meeting = meet(store, rank, 3, timeout_s=0.3)
    try:
        if behaviour == "fails at once":
            raise ValueError("planted")
        meeting.exchange("one", 1)
        if behaviour == "fails later":
            raise ValueError("planted")
        meeting.settle()
    except (PeerError, ValueError) as error:
        meeting.fail("")
        return type(error).__name__
    meeting.leave()
    return "right"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(*[st.sampled_from(BEHAVIOURS)] * 3), min_size=1, max_size=3), st.randoms())
def test_whatever_went_wrong_the_next_attempt_works(rounds: list[tuple[str, ...]], random: Random) -> None:
    """Unless a rank did not come and another failed by itself: then the late one still hears of that first."""
    store = dist.HashStore()
    for behaviours in [*rounds, ("right",) * 3]:
        if {"does not come"} < set(behaviours) - {"right"}:
            behaviours = tuple("right" if one == "does not come" else one for one in behaviours)
        delays = [random.choice([0, 0, 0.05]) for _ in range(3)]
        threads = [in_thread(partial(behave, store, *args)) for args in zip(range(3), behaviours, delays, strict=True)]
        for thread, _ in threads:
            thread.join(10)
        found = [said[0] for _, said in threads]
        assert (found == ["right"] * 3) == (set(behaviours) == {"right"}), (behaviours, found)


@pytest.mark.parametrize("value", ["0", "soon", "-1", "1.5", "1" + "0" * 400])
def test_the_timeout_is_a_whole_number_of_seconds(
    value: str, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_PEER_TIMEOUT", value)
    with pytest.raises(OptionError, match="whole number of seconds"):
        Rendezvous(_Peers(store, 0, 1), "test")  # type: ignore[arg-type]
