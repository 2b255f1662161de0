"""Several processes of one group on this host, for tests: spoken to one by one, never waited for long."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

# The server imports once what each rank needs, so that a rank starts in milliseconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "safetensors.torch", "headrace.api"])

TIMEOUT_S = 60.0


def pss_bytes() -> int:
    """Proportional set size: resident pages, each divided by the number of processes that map it (proc(5)).

    The sum over processes is the host memory that they take together, shared pages counted once. Pages of files are
    left out: the share of a library's grows when another program that maps it ends.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kib = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    return 1024 * (kib["Pss:"] - kib["Pss_File:"])


class Rank:
    """One process; ``body(rank, talk, *args)`` runs in it, and :meth:`hear` returns what it sends or returns."""

    def __init__(self, rank: int, size: int, meeting: str, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.rank = rank
        self._talk, theirs = _context.Pipe()
        self._process = _context.Process(target=_run, args=(rank, size, meeting, theirs, body, args), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def hear(self, timeout_s: float = TIMEOUT_S) -> Any:
        """The next thing it says; its exception as ``(class name, message)``."""
        assert self._talk.poll(timeout_s), f"rank {self.rank} says nothing for {timeout_s} s"
        return self._talk.recv()

    def tell(self, what: object) -> None:
        self._talk.send(what)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self.join()

    def join(self) -> int | None:
        self._process.join(TIMEOUT_S)
        return self._process.exitcode

    def end(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join(TIMEOUT_S)
        self._talk.close()


@contextlib.contextmanager
def ranks(size: int, folder: Path, body: Callable[..., Any], *args: Any, tcp: bool = False) -> Iterator[list[Rank]]:
    """``size`` processes in a gloo group; all have ended afterwards.

    They meet in ``folder``, or with ``tcp`` at a port of rank 0, whose end is then also the end of their store.
    """
    meeting = f"tcp://127.0.0.1:{_free_port()}" if tcp else f"file://{folder}/meeting"
    started: list[Rank] = []
    try:
        for rank in range(size):
            started.append(Rank(rank, size, meeting, body, args))
        yield started
    finally:
        for one in started:
            one.end()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _run(rank: int, size: int, meeting: str, talk: Connection, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
        talk.send(body(rank, talk, *args))
    except BaseException as error:
        traceback.print_exc()
        talk.send((type(error).__name__, str(error)))
    os._exit(0)  # a killed rank must not hold up the end of the others
