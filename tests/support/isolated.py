"""Jobs run one after the other in worker processes, each with a limit of CPU time: what hangs or dies costs its worker.

A worker reads a job per line (JSON) from its standard input and writes a result per line; what it prints otherwise goes
to its standard error.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
START_S = 120.0  # a worker imports torch on a machine that does other things too


def serve(work: Callable[[Any], Any]) -> None:
    """The main loop of a worker. SIGUSR1 makes it write the stacks of its threads to its standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.enable()
    print(json.dumps("ready"), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(work(json.loads(line))), file=out, flush=True)
    out.flush()
    os._exit(0)  # threads that a job has left behind must not keep the process


class Worker:
    """A process that serves jobs; started again after a job that hung or killed it."""

    def __init__(self, command: list[str], limit_s: float) -> None:
        self.command, self.limit_s = command, limit_s
        self.process: subprocess.Popen[bytes] | None = None
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    def run(self, job: Any) -> Any:
        """The result of ``job``, or ``{"hung": stacks}`` or ``{"died": what it wrote}``."""
        if self.process is None:
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
            line = self._line(self.limit_s)
        except BrokenPipeError:
            line = b""
        if line is None:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.3)
            return {"hung": self._stop()}
        if not line:
            code = self.process.wait(10)
            return {"died": f"exit status {code}\n{self._stop()}"}
        return json.loads(line)

    def _start(self) -> None:
        self.errors.seek(0)
        self.errors.truncate()
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, bufsize=0,
            start_new_session=True, env=environment(),
        )  # fmt: skip
        self._rest = b""
        if not self._line(START_S):
            raise RuntimeError(f"the worker does not start:\n{self._stop()}")

    def _line(self, limit_s: float) -> bytes | None:
        """The next line; empty at the end of the worker, ``None`` if it hangs.

        It hangs after ``limit_s`` seconds of CPU time, as many without any, or ten times as many in all. On a busy
        machine the time on the wall says little.
        """
        assert self.process is not None
        assert self.process.stdout is not None
        begin = progress = time.monotonic()
        begin_cpu = last_cpu = self._cpu_s()
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(min(limit_s / 4, 1.0)):
                    now, cpu = time.monotonic(), self._cpu_s()
                    progress, last_cpu = (now, cpu) if cpu > last_cpu else (progress, last_cpu)
                    if cpu - begin_cpu > limit_s or now - progress > limit_s or now - begin > 10 * limit_s:
                        return None
                    continue
                found = os.read(self.process.stdout.fileno(), 1 << 16)
                if not found:
                    return b""
                self._rest += found
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _cpu_s(self) -> float:
        """CPU time that the worker has used; of one that has ended, nothing more."""
        assert self.process is not None
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()  # proc_pid_stat(5)
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _stop(self) -> str:
        """End the process; the last of what it has written."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None
        self.errors.seek(0)
        return self.errors.read()[-6000:].decode(errors="replace")

    def close(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            self._stop()
        self.errors.close()


def run_jobs(command: list[str], jobs: Iterable[Any], num_workers: int, limit_s: float) -> Iterator[tuple[Any, Any]]:
    """Pairs of a job and its result, as they come, from ``num_workers`` workers started by ``command``."""
    todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Any, Any] | BaseException | None] = queue.SimpleQueue()
    for job in jobs:
        todo.put((job,))

    def work() -> None:
        worker = Worker(command, limit_s)
        try:
            while True:
                (job,) = todo.get_nowait()
                done.put((job, worker.run(job)))
        except queue.Empty:
            done.put(None)
        except BaseException as error:
            done.put(error)
        finally:
            worker.close()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_workers)]
    for thread in threads:
        thread.start()
    left = num_workers
    while left:
        item = done.get()
        if item is None:
            left -= 1
        elif isinstance(item, BaseException):
            raise item
        else:
            yield item


def environment() -> dict[str, str]:
    """Ours, with headrace of this tree and none of its options."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    paths = [str(HERE.parents[1] / "src"), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"HEADRACE_READERS": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
