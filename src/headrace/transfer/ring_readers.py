"""Starting and watching the process that reads files into a staging ring (:mod:`headrace.transfer.ring_process`)."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.spawn import get_executable
from pathlib import Path

import headrace.errors
from headrace.errors import OptionError
from headrace.memory.system import dup_above_stdio
from headrace.transfer.ring import Counter, RingMemory, RingServer
from headrace.transfer.ring_process import RingTask, exit_description, poison

# The module whose main() is the program; tests replace it by one that injects faults.
PROGRAM = "headrace.transfer.ring_process"
# The paths are those of this process, so that both find the same packages wherever they were started. They are set
# before anything is imported, by a module that every interpreter has within it.
_BOOTSTRAP = "import sys; sys.path[:] = {paths}; from importlib import import_module; import_module({program!r}).main()"
_FIX = "use mode 'cpu', which needs no readers (--offload-mode cpu)"
START_S = 30.0
JOIN_S = 5.0


class ReaderProcess:
    """A child that serves a ring, and a thread that waits for its end.

    The thread is the last owner of the ring's memory when an offload is collected that was not removed. It also answers
    the stream, with poison, if both processes of the child are killed.

    Attributes:
        pid: pid of the child, the leader of a process group of its own.
    """

    def __init__(self, task: RingTask, memory: RingMemory, memory_fd: int) -> None:
        """Start it; it does not touch the ring before :meth:`serve`.

        Args:
            task: what it serves.
            memory: memory of the ring; ``memory_fd`` is its descriptor.

        Raises:
            OptionError: no process can be started.
        """
        self._memory = memory
        self._closing = False
        self._owner = os.getpid()
        self._ended = threading.Event()
        self._stand_in: RingServer | None = None
        try:
            self._errors = os.fdopen(os.memfd_create("headrace-readers-stderr", os.MFD_CLOEXEC), "rb")
            self._process = _start(task, memory_fd, self._errors.fileno())
        except OSError as error:
            raise OptionError(
                f"the process that reads files for the GPU cannot be started ({_python()}: {error.strerror}); free "
                f"processes, open files and memory (`ulimit -u`, `ulimit -n`), call multiprocessing.set_executable "
                f"with the path of this Python's interpreter, or {_FIX}"
            ) from error
        assert self._process.stdin is not None
        self._input = self._process.stdin
        self.pid = self._process.pid
        self._thread = threading.Thread(target=self._watch, name=f"headrace-ring-{self.pid}", daemon=True)
        self._thread.start()

    def serve(self) -> None:
        """Let it serve, and wait until it does.

        Raises:
            OptionError: it ended, or was not ready within 30 s.
        """
        deadline = time.monotonic() + START_S
        with suppress(OSError):  # it has ended, which is seen below
            self._input.write(b"serve\n")
        while not self._memory.counters[Counter.SERVING]:
            if self._ended.wait(0.001) or time.monotonic() > deadline:
                raise OptionError(
                    f"the process that reads files for the GPU ({_python()} -c ... {PROGRAM}) does not serve after "
                    f"{START_S:.0f} s at most: it {exit_description(self._process.returncode, self._errors.fileno())}. "
                    f"It needs the Python interpreter of this process: call multiprocessing.set_executable with its "
                    f"path, or {_FIX}"
                )

    def close_when_idle(self) -> None:
        """Let it end when the stream has been done for some seconds, for an owner that cannot wait for it."""
        if self._owner != os.getpid():  # the end of a process that the owner has forked means nothing
            return
        self._memory.counters[Counter.CLOSE_WHEN_IDLE] = 1
        if not self._memory.counters[Counter.SERVING]:  # then no stream waits for it
            self._input.close()

    def close(self) -> None:
        """End it now, whatever it is doing: the stream has to be done. Idempotent."""
        if self._owner != os.getpid():
            return
        self._closing = True
        if self._stand_in is not None:
            self._stand_in.close()
        if self._process.returncode is None:  # else the number may be that of another group by now
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        self._input.close()
        self._thread.join(JOIN_S)

    def _watch(self) -> None:
        self._process.wait()
        self._ended.set()
        counters = self._memory.counters
        asked_to = self._closing or (counters[Counter.CLOSE_WHEN_IDLE] and self._process.returncode == 0)
        if not counters[Counter.SERVING] or asked_to:
            return
        # Let every wait of the stream end, with poison, and every call of the host raise.
        how = exit_description(self._process.returncode, self._errors.fileno())
        server = self._stand_in = poison(self.pid, how, self._memory)
        if not self._closing:
            server.serve()


def _start(task: RingTask, memory_fd: int, errors_fd: int) -> subprocess.Popen[bytes]:
    # A file and not the input pipe, which would block this process if the child does not read.
    task_fd = dup_above_stdio(os.memfd_create("headrace-readers-task", os.MFD_CLOEXEC))
    try:
        with open(task_fd, "wb", closefd=False) as file:
            pickle.dump(task, file)
        os.lseek(task_fd, 0, os.SEEK_SET)
        return subprocess.Popen(
            [*_command(), str(memory_fd), str(task_fd)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors_fd,
            pass_fds=(memory_fd, task_fd, *task.descriptors),
            cwd="/",
            env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1")},
            # Signals for the caller's group, Ctrl-C above all, are not for it. It stays in the caller's session: Linux
            # shares processors out among sessions (sched(7), autogroup), and of one on which the caller spins until the
            # device is done, another session's readers would get next to nothing.
            process_group=0,
        )
    finally:
        os.close(task_fd)


# numpy's library for linear algebra, which the readers do not use, would start a thread per core, with its memory.
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def _command() -> list[str]:
    """-P, -s, -S: nothing is looked for in the current folder, and no hook of a site runs before the program."""
    # What this process imports from, and headrace's own place, which an editable install leaves out.
    own = str(Path(headrace.errors.__file__).resolve().parents[1])
    paths = dict.fromkeys([*(os.path.abspath(path) for path in sys.path if path), own])
    code = _BOOTSTRAP.format(paths=ascii(list(paths)), program=PROGRAM)
    return [_python(), "-P", "-s", "-S", "-c", code]


def _python() -> str:
    """The interpreter that is set in multiprocessing, where programs that embed Python have to set it."""
    found = get_executable()
    if not found or (getattr(sys, "frozen", False) and os.fsdecode(found) == sys.executable):
        raise OptionError(
            f"files are read for a GPU by a process of its own, and the Python interpreter of this program is not "
            f"known (sys.executable is {sys.executable!r}): call multiprocessing.set_executable with the "
            f"path, or {_FIX}"
        )
    return os.fsdecode(found)
