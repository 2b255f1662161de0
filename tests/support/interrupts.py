"""A KeyboardInterrupt at every line of headrace's own files; ``scripts/test-interrupts`` runs all of them.

A run is a phase (``offload``, ``forward``, ``remove``), a way to offload, and a number k: the interrupt comes at the
k-th line that the calling thread executes in ``src/headrace``. Behind it the model must be right, or say an error and
be right once the interrupted call is made again. What comes of a run:

    right      a forward and the state were right at once
    repeated   something raised an error of headrace's, and a second call made it right
    WRONG      a forward or state_dict() gave other bits without an error
    FOREIGN    something raised an error that is not headrace's
    STUCK      the second call does not help
    BLOCKED    a forward in another thread took longer than 5 s
    HUNG       the process had to be killed; DIED: it ended
    LEAKED     right or repeated, and a thread or a file descriptor was left
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for `python -m tests.interrupts`

from isolated import run_jobs, serve

PHASES = ("offload", "forward", "remove")
MODES = ("prefetch", "disk", "budget")
GOOD = ("right", "repeated", "not reached")
SOURCES = str(Path(__file__).resolve().parents[2] / "src" / "headrace")
# What changes models, threads and files; the rest of offload() only plans.
ROOMS = ("api", "loading", "memory", "model/live_tensors", "offloaders", "ops", "runtime", "stores", "transfer")
CHANGING = tuple(os.path.join(SOURCES, name) for name in ROOMS)
WAIT_S = 5.0  # for a forward in another thread
LIMIT_S = 45.0  # for a run: several such waits
COMMAND = [sys.executable, str(Path(__file__).resolve()), "--worker"]


class Interrupter:
    """A trace function that raises at the ``at``-th line of our files; -1 only counts."""

    def __init__(self, at: int) -> None:
        self.at, self.lines, self.place = at, 0, ""
        self.seen: dict[tuple[str, int], list[int]] = {}  # while counting: when each line was executed

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(SOURCES) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.at < 0:
                self.seen.setdefault((frame.f_code.co_filename, frame.f_lineno), []).append(self.lines - 1)
            elif self.lines == self.at + 1:
                name = os.path.relpath(frame.f_code.co_filename, SOURCES)
                self.place = f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return self._line

    def run(self, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """What ``call`` returned or raised."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return call(), None
        except BaseException as error:
            return None, error
        finally:
            sys.settrace(before)

    def first_and_last(self, *folders: str) -> list[int]:
        """Of a counted run: when each line of ``folders`` was executed first and last."""
        seen = [found for (name, _), found in self.seen.items() if name.startswith(folders)]
        return sorted({at for found in seen for at in (found[0], found[-1])})


class Subject:
    """A model, what is right for it, and a way to offload it."""

    def __init__(self, mode: str, folder: Path) -> None:
        import torch
        from safetensors.torch import save_file
        from torch import nn

        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(4)]
        self.model = nn.Sequential(nn.Embedding(1500, 128), *layers) if mode == "budget" else nn.Sequential(*layers)
        self.model.eval()
        self.x = torch.tensor([0, 3, 1499]) if mode == "budget" else torch.randn(3, 128)
        self.mode, self.handle = mode, None
        self.state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.path = folder / f"{mode}.safetensors"
        if not self.path.exists():
            save_file(self.state, self.path)
        with torch.no_grad():
            self.expected = self.model(self.x)

    def offload(self) -> Any:
        """Put the model under the policy of the mode."""
        import headrace

        if self.mode == "prefetch":
            return headrace.offload(self.model, headrace.Prefetch(prefetch_step=2))
        if self.mode == "disk":
            policy = headrace.Prefetch(prefetch_step=2, mode="disk", params=["ALL_MODEL_PARAMS"])
            return headrace.offload(self.model, policy, checkpoint=self.path)
        return headrace.offload(self.model, "180KiB", checkpoint=self.path)

    def forward(self) -> Any:
        """A forward; grad mode belongs to the thread."""
        import torch

        with torch.no_grad():
            return self.model(self.x)

    def check(self) -> tuple[set[str], list[str]]:
        """What a forward in another thread, one in this and the state come to: ``right``, ``error``, or worse."""
        found: list[tuple[str, str]] = []
        thread = threading.Thread(target=lambda: found.append(self._judge("thread", self._forward_wrong)), daemon=True)
        thread.start()
        thread.join(WAIT_S)
        if thread.is_alive():
            return {"BLOCKED"}, ["a forward in another thread does not end"]
        found.append(self._judge("forward", self._forward_wrong))
        found.append(self._judge("state_dict()", self._state_wrong))
        return {word for word, _ in found}, [note for word, note in found if word != "right"]

    def _judge(self, what: str, wrong: Callable[[], str]) -> tuple[str, str]:
        from fuzz_judge import is_ours

        try:
            problem = wrong()
        except BaseException as error:
            text = f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
            return ("error" if is_ours(error) else "FOREIGN"), text
        return ("WRONG", f"{what}: {problem}") if problem else ("right", "")

    def _forward_wrong(self) -> str:
        import torch

        return "" if torch.equal(self.forward(), self.expected) else "other bits"

    def _state_wrong(self) -> str:
        import torch

        state = self.model.state_dict()
        if state.keys() != self.state.keys():
            return "other names"
        return next((name for name, value in self.state.items() if not torch.equal(state[name], value)), "")


class Bench:
    """Runs in a worker; a model that came out right is used again."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="headrace-interrupts-")
        self.subjects: dict[str, Subject] = {}

    def work(self, job: dict[str, Any]) -> dict[str, Any]:
        """A run, or with ``at`` = -1 the number of lines that there are."""
        subject = self.subjects.pop(job["mode"], None) or self._warm(job["mode"])
        threads, files = threading.active_count(), _open_files()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = _Run(subject, job["phase"], job["at"])
            outcome = run.run()
        if outcome in GOOD:
            self.subjects[job["mode"]] = subject
            deadline = time.monotonic() + 1
            while (threading.active_count() > threads or _open_files() > files) and time.monotonic() < deadline:
                time.sleep(0.001)
                gc.collect()
        leaked = max(threading.active_count() - threads, 0) + len(_open_files() - files)
        return {
            "outcome": outcome,
            "place": run.interrupter.place,
            "lines": run.interrupter.lines,
            "first_and_last": run.interrupter.first_and_last(SOURCES),
            "changing": run.interrupter.first_and_last(*CHANGING),
            "notes": run.notes,
            "call": run.call_ended,
            "leaked": leaked if outcome in GOOD else 0,
        }

    def _warm(self, mode: str) -> Subject:
        """A new subject that has been through everything once: imports are no part of a run."""
        subject = Subject(mode, Path(self.folder.name))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                with subject.offload():
                    subject.check()
        return subject


def _open_files() -> set[tuple[str, str]]:
    """Descriptors of this process, and what they are of."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing is closed
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


class _Run:
    """One interrupt and what comes behind it."""

    def __init__(self, subject: Subject, phase: str, at: int) -> None:
        self.subject, self.phase = subject, phase
        self.interrupter = Interrupter(at)
        self.notes: list[str] = []
        self.call_ended = ""

    def run(self) -> str:
        subject = self.subject
        if self.phase != "offload":
            subject.handle = subject.offload()
            subject.forward()
        call = {"offload": subject.offload, "forward": subject.forward, "remove": lambda: subject.handle.remove()}
        value, error = self.interrupter.run(call[self.phase])
        self.call_ended = "returned" if error is None else type(error).__name__
        if self.phase == "offload" and error is None:
            subject.handle = value
        if error is not None and not isinstance(error, KeyboardInterrupt):
            self.notes.append(f"the call raised {error!r:.200}")
        outcome = self._behind(call[self.phase], error)
        subject.handle = None
        return "not reached" if outcome in GOOD and not self.interrupter.place else outcome

    def _behind(self, call: Callable[[], Any], error: BaseException | None) -> str:
        """Checks, the call again where it did not return, checks, and ``remove()``."""
        first = self._check("behind the interrupt")
        if bad := first - {"right", "error"}:
            return min(bad)
        if error is not None:
            try:
                value = call()
            except BaseException as again:
                self.notes.append(f"again: {type(again).__name__}: {str(again)[:200]}")
                return "STUCK"
            if self.phase == "offload":
                self.subject.handle = value
        if (second := self._check("behind the second call")) != {"right"}:
            return min(second - {"right", "error"}, default="STUCK")
        try:
            self.subject.handle.remove()
        except BaseException as last:
            self.notes.append(f"remove() at the end: {last!r:.200}")
            return "STUCK"
        if (third := self._check("behind remove() at the end")) != {"right"}:
            return min(third - {"right", "error"}, default="STUCK")
        return "right" if first == {"right"} else "repeated"

    def _check(self, where: str) -> set[str]:
        words, notes = self.subject.check()
        self.notes += [f"{where}: {note}" for note in notes]
        return words


def run_all(
    phases: tuple[str, ...], modes: tuple[str, ...], every: str, points: int | None, jobs: int
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of a run and its result.

    Args:
        phases, modes: all pairs of them.
        every: ``event`` is every execution of a line; ``line`` the first and the last one of each line.
        points: at most as many per phase and mode, a third of them spread over all lines and the rest over those that
            change something; ``None``: all.
        jobs: worker processes.
    """
    pairs = [{"phase": phase, "mode": mode, "at": -1} for phase in phases for mode in modes]
    runs: list[dict[str, Any]] = []
    for job, result in run_jobs(COMMAND, pairs, 1, LIMIT_S):
        if result.get("outcome") != "not reached":
            yield job, _worded(result)  # not even without an interrupt
            continue
        # The number of lines differs a little from run to run, as waits for threads do.
        ats = list(range(result["lines"])) if every == "event" else result["first_and_last"]
        if points is not None:
            changing = _spread(result["changing"], points - points // 3)
            ats = sorted([*changing, *_spread([at for at in ats if at not in changing], points // 3)])
        runs += [{**job, "at": at} for at in ats]
    for job, result in run_jobs(COMMAND, runs, jobs, LIMIT_S):
        yield job, _worded(result)


def _spread(ats: list[int], points: int) -> list[int]:
    """At most ``points`` of ``ats``, evenly spread."""
    stride = max(len(ats) / points, 1.0)
    return [ats[int(index * stride)] for index in range(min(points, len(ats)))]


def _worded(result: dict[str, Any]) -> dict[str, Any]:
    """A result with an outcome, for workers that hung or died too."""
    if "outcome" in result:
        return result
    kind, text = next(iter(result.items()))
    return {"outcome": kind.upper(), "place": "", "notes": [text], "lines": 0, "call": "", "leaked": 0}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument(
        "--every",
        choices=("event", "line"),
        default="line",
        help="every execution of a line, or only the first and the last one of each (default)",
    )
    parser.add_argument("--points", type=int, help="at most so many per phase and mode, spread over the lines")
    parser.add_argument("--at", type=int, help="only this line; needs one phase and one mode")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--quiet", action="store_true", help="the summary only")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        import torch

        torch.set_num_threads(1)
        serve(Bench().work)
        return 0
    if args.at is not None:
        job = {"phase": args.phases[0], "mode": args.modes[0], "at": args.at}
        runs: Any = ((job, _worded(result)) for job, result in run_jobs(COMMAND, [job], 1, LIMIT_S))
    else:
        runs = run_all(tuple(args.phases), tuple(args.modes), args.every, args.points, args.jobs)
    return report(runs, args.quiet)


def report(runs: Iterator[tuple[dict[str, Any], dict[str, Any]]], quiet: bool) -> int:
    """Print what came of ``runs``; 1 if one of them is bad."""
    start, counts, places, calls = time.monotonic(), {}, Counter(), Counter()
    for job, result in runs:
        key = f"{job['phase']} {job['mode']}"
        counts.setdefault(key, Counter())[result["outcome"]] += 1
        calls[result["call"]] += 1
        if result["leaked"]:
            places[f"{'LEAKED':8} {key:17} {result['place']}"] += 1
        if result["outcome"] not in GOOD:
            places[f"{result['outcome']:8} {key:17} {result['place']}"] += 1
            if not quiet:
                notes = "".join(f"\n    {note}" for note in result["notes"][-3:])
                print(f"{key} --at {job['at']}: {result['outcome']} at {result['place']}{notes}", flush=True)
    num_runs = sum(sum(found.values()) for found in counts.values())
    took = time.monotonic() - start
    print(f"{num_runs} runs in {took:.0f} s, {num_runs / max(took, 1e-9):.0f}/s; the interrupted call: {dict(calls)}")
    for key, found in counts.items():
        print(f"{key:17} {', '.join(f'{name} {count}' for name, count in found.most_common())}")
    for place, count in sorted(places.items()):
        print(f"{count:4} {place}")
    return int(bool(places))


if __name__ == "__main__":
    sys.exit(main())
