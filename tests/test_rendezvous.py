"""The promise: ranks that wait for one another never wait long for one that has failed, ended or not come."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from penstock.errors import OptionError, PeerError
from penstock.rendezvous import Rendezvous


class _Group:
    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def get_group_store(self) -> dist.Store:
        return self._store


class _Peers:
    """What a meeting asks of :class:`penstock.peers.Peers`, without processes."""

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


def test_meetings_do_not_mix_and_ranks_that_missed_one_find_each_other_again(store: dist.Store) -> None:
    early = meet(store, 0, timeout_s=0.1)
    with pytest.raises(PeerError, match="has waited") as caught:
        early.exchange("step", "stale")
    early.fail(str(caught.value))
    with pytest.raises(PeerError, match="rank 0 gave up"):
        meet(store, 1).collect("never", [0])
    threads = [in_thread(lambda rank=rank: meet(store, rank).exchange("step", "fresh")) for rank in range(2)]
    for thread, found in threads:
        thread.join(5)
        assert found == [{0: "fresh", 1: "fresh"}]


@pytest.mark.parametrize("value", ["0", "soon", "-1", "1.5"])
def test_the_timeout_is_a_whole_number_of_seconds(
    value: str, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_PEER_TIMEOUT", value)
    with pytest.raises(OptionError, match="whole number of seconds"):
        Rendezvous(_Peers(store, 0, 1), "test")  # type: ignore[arg-type]
