"""``remove()`` beside forwards of another thread, and ``fork()`` beside them; run in a process of its own.

python tests/support/threads_and_forks.py remove prefetch 20     prints one JSON object: what came of 20 rounds
python tests/support/threads_and_forks.py fork disk 12
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headrace
from fuzz_judge import is_ours
from interrupts import Subject

REMOVE_S = 15.0  # for remove() beside forwards that take milliseconds
CHILD_S = 5  # for a forward in a forked child


class Pause(nn.Module):
    """Makes a forward long enough for something to happen in it, or stops one until it has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False
        self.inside, self.go = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.0005)
        if self.armed:
            self.armed = False
            self.inside.set()
            self.go.wait(5)
        return x

    def stop_next(self, longest_s: float) -> None:
        """Return when a forward stands here; it goes on after ``longest_s``, for what may wait for its end."""
        self.inside.clear()
        self.go.clear()
        self.armed = True
        if not self.inside.wait(5):
            raise RuntimeError("no forward has come")
        timer = threading.Timer(longest_s, self.go.set)
        timer.daemon = True
        timer.start()


def prepare(mode: str, folder: Path) -> Subject:
    """A model of :mod:`interrupts`, slower."""
    subject = Subject(mode if mode != "resident" else "prefetch", folder)
    for index, layer in enumerate(subject.model):
        if isinstance(layer, nn.Sequential):
            subject.model[index].append(Pause())
    return subject


class Loop(threading.Thread):
    """Calls the model until told to stop, and counts what comes of it."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(daemon=True)
        self.subject, self.stopping = subject, False
        self.counts: Counter[str] = Counter()
        self.notes: set[str] = set()
        self.may_run, self.idle = threading.Event(), threading.Event()
        self.may_run.set()

    def run(self) -> None:
        while not self.stopping:
            if not self.may_run.is_set():
                self.idle.set()
                self.may_run.wait()
                continue
            self.counts[outcome(self.subject, self.notes)] += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No forward runs inside: nothing is promised of one that has begun before ``offload()``."""
        self.idle.clear()
        self.may_run.clear()
        try:
            self.idle.wait(10)
            yield
        finally:
            self.may_run.set()

    def stop(self) -> bool:
        """Returns whether the thread ended in time."""
        self.stopping = True
        self.join(10)
        return not self.is_alive()


def outcome(subject: Subject, notes: set[str]) -> str:
    """A forward: ``right``, ``refused``, ``WRONG`` or ``FOREIGN``."""
    try:
        return "right" if torch.equal(subject.forward(), subject.expected) else "WRONG"
    except BaseException as error:
        # torch iterates over a module's hooks while remove() takes them off in another thread.
        if is_ours(error) or re.search(r"mutated during iteration|changed size during iteration", str(error)):
            return "refused"
        notes.add(repr(error)[:200])
        return "FOREIGN"


def remove_beside_forwards(mode: str, rounds: int) -> dict[str, Any]:
    """Each round: offload, forwards in a thread, ``remove()`` in the middle of one or at a random moment, a check."""
    removals: Counter[str] = Counter()
    after: Counter[str] = Counter()
    slowest_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        subject = prepare(mode, Path(folder))
        pauses = [module for module in subject.model.modules() if isinstance(module, Pause)]
        loop = Loop(subject)
        handle = subject.offload()
        loop.start()
        for index in range(rounds):
            if index % 2:
                time.sleep(random.Random(index).uniform(0, 0.03))
            else:
                pauses[index // 2 % len(pauses)].stop_next(0.1)
            start = time.monotonic()
            kind = _bounded(handle.remove)
            slowest_s = max(slowest_s, time.monotonic() - start)
            for pause in pauses:
                pause.go.set()
            removals[kind] += 1
            if kind == "HUNG":
                break
            if kind != "removed" and not _remove_alone(loop, handle):
                removals["STUCK"] += 1
                break
            if not loop.is_alive():
                loop = _next(loop)
            after[outcome(subject, loop.notes)] += 1
            with loop.paused():
                handle = subject.offload()
        ended = loop.stop()
        if ended and not removals["HUNG"]:
            with suppress(headrace.HeadraceError):
                handle.remove()
            after[outcome(subject, loop.notes)] += 1
        return {
            "forwards": dict(loop.counts), "removals": dict(removals), "after": dict(after),
            "slowest_s": round(slowest_s, 3), "ended": ended, "notes": sorted(loop.notes),
        }  # fmt: skip


def _remove_alone(loop: Loop, handle: Any) -> bool:
    """A refused ``remove()`` again, with no forward beside it."""
    return loop.stop() and _bounded(handle.remove) == "removed"


def _next(before: Loop) -> Loop:
    loop = Loop(before.subject)
    loop.counts, loop.notes = before.counts, before.notes
    loop.start()
    return loop


def _bounded(call: Any) -> str:
    """``removed``, ``refused``, ``FOREIGN`` or ``HUNG``."""
    ends: list[str] = []

    def work() -> None:
        try:
            call()
            ends.append("removed")
        except BaseException as error:
            ends.append("refused" if is_ours(error) else f"FOREIGN {error!r:.200}")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(REMOVE_S)
    return ends[0] if ends else "HUNG"


def fork_beside_forwards(mode: str, rounds: int) -> dict[str, Any]:
    """Each round: ``fork()`` while a thread is in a forward; the child calls the model once."""
    codes = {0: "right", 3: "refused", 4: "WRONG", 5: "FOREIGN"}
    children: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        subject = prepare(mode, Path(folder))
        if mode != "resident":
            subject.offload()
        loop = Loop(subject)
        loop.start()
        for index in range(rounds):
            time.sleep(random.Random(index).uniform(0.001, 0.02))
            pid = os.fork()
            if pid == 0:
                # The default action, since a thread that waits for a lock for ever may run no handler of Python's.
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(CHILD_S)
                found = outcome(subject, set())
                os._exit(next(code for code, word in codes.items() if word == found))
            status = os.waitpid(pid, 0)[1]
            hung = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
            children["HUNG" if hung else codes.get(os.waitstatus_to_exitcode(status), f"DIED {status}")] += 1
        ended = loop.stop()
        return {"children": dict(children), "forwards": dict(loop.counts), "ended": ended, "notes": sorted(loop.notes)}


def main() -> None:
    """What, which way to offload, how often."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.setswitchinterval(2e-5)  # threads change places between any two lines
    what, mode, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    result = remove_beside_forwards(mode, rounds) if what == "remove" else fork_beside_forwards(mode, rounds)
    print(json.dumps(result), flush=True)
    os._exit(0)  # a thread that hangs must not keep the process


if __name__ == "__main__":
    main()
