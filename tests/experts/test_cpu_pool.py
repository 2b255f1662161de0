"""The promise: the threads that run experts on a CPU end with an answer or an error, never with a wait that has no end.

Threads that are stopped or dead, forks, signals, exit, cores that others use, and a machine without a compiler.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cpu_experts import SIGNALS, case, long_case, of_library, variant
from headrace.errors import HeadraceWarning, OptionError, StateError
from headrace.experts import order, ordered
from headrace.experts.cpu import native, pool
from ordered_c import different, experts_in_c

SUPPORT = Path(__file__).parents[1] / "support"
PROGRAM = """
import hashlib, os, signal, sys, threading, time, torch, types
from cpu_experts import case, long_case, of_library
from headrace.experts.cpu import native, pool
made = torch.Generator().manual_seed(0)
"""
TWICE = "given = case('mxfp4', 4, made, 512, 512)\nfound = [pool.run(*given) for _ in range(200)]\n"
DIGEST = "print(hashlib.sha256(torch.stack(found).view(torch.uint8).numpy().tobytes()).hexdigest())\n"


@pytest.fixture
def made() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return variant(tmp_path_factory.mktemp("planted"), more=SIGNALS)


def threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def started(make: Callable[[], pool.Pool]) -> tuple[pool.Pool, list[int]]:
    """A pool, and the system's numbers of its threads."""
    before = threads()
    new = make()
    return new, sorted(threads() - before)


def program(code: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(SUPPORT), *sys.path])
    command = [sys.executable, "-c", PROGRAM + textwrap.dedent(code)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    )


def output_of(process: subprocess.Popen[str]) -> str:
    try:
        out, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return out


@pytest.mark.slow
class TestLostThreads:
    @pytest.mark.parametrize("is_death", [False, True], ids=["stopped", "dead"])
    def test_one_with_work_is_an_error_within_a_second_and_a_half(
        self, is_death: bool, planted: Any, made: torch.Generator
    ) -> None:
        given = long_case(made)
        broken, (worker,) = started(lambda: of_library(planted, 2, 0))
        timer = threading.Timer(0.03, lambda: planted.plant(worker, is_death))
        timer.start()
        began = time.monotonic()
        with pytest.raises(
            StateError, match=r"one of 2 threads \(cores .*\) is dead or stopped.*: restart the process"
        ):
            pool.run(*given, pool=broken)
        assert 1.0 < time.monotonic() - began < 3.0
        timer.join()
        began = time.monotonic()
        with pytest.raises(StateError, match="dead or stopped"):
            pool.run(*given, pool=broken)
        assert time.monotonic() - began < 0.1
        broken.stop()

    @pytest.mark.parametrize("is_death", [False, True], ids=["stopped", "dead"])
    def test_one_without_work_is_done_without(self, is_death: bool, planted: Any, made: torch.Generator) -> None:
        given = case("bf16", 2, made)
        few, workers = started(lambda: of_library(planted, 3, 0))
        time.sleep(0.05)  # all asleep
        planted.plant(workers[0], is_death)
        time.sleep(0.05)
        assert different(pool.run(*given, pool=few), experts_in_c(*given)) == 0
        few.stop()

    def test_a_process_that_was_stopped_goes_on(self, made: torch.Generator) -> None:
        running = program("""
            given, few = long_case(made), of_library(native.library(), 2, 0)
            print("ready", flush=True)
            for _ in range(10):
                pool.run(*given, pool=few)
        """)
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        time.sleep(0.2)
        running.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        running.send_signal(signal.SIGCONT)
        output_of(running)

    def test_the_system_refuses_a_thread(self, planted: Any, tmp_path: Path) -> None:
        refused = variant(tmp_path, {"if (pthread_create(": "if (p->threads == 3 || pthread_create("}, more="")
        before = threads()
        with pytest.raises(StateError, match=r"no memory for 5 threads, or refused: raise this process's limits"):
            of_library(refused, 5, 0)
        assert threads() == before


class TestProcesses:
    def test_a_forked_child_starts_its_own(self, made: torch.Generator) -> None:
        given = case("bf16", 2, made)
        expected, mine = pool.run(*given), pool.default_pool()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 10 * different(pool.run(*given), expected) + (pool.default_pool() is mine)
                pool.run(*given, pool=mine)
            except StateError as error:
                code += 0 if "fork of the one that started this Pool" in str(error) else 2
            else:
                code += 4
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert different(pool.run(*given), expected) == 0

    @pytest.mark.slow
    def test_a_fork_while_another_thread_runs(self, made: torch.Generator) -> None:
        code = """
            given, ends = case("bf16", 8, made, 512, 512), []
            pool.run(*given)  # a fork during an operator's first call waits for ever: torch initialises it once, locked
            run = lambda: all(pool.run(*given) is not None for _ in iter(lambda: not ends, False))
            thread = threading.Thread(target=run)
            thread.start()
            for _ in range(20):
                if (child := os.fork()) == 0:
                    pool.run(*given)
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
            ends.append(1)
        """
        output_of(program(code))

    @pytest.mark.slow
    def test_two_processes_on_the_same_cores(self) -> None:
        both = [program(TWICE + DIGEST) for _ in range(2)]
        first, second = map(output_of, both)
        assert first == second != ""

    @pytest.mark.slow
    @pytest.mark.parametrize("end", ["", "sys.exit(0)", "signal.raise_signal(signal.SIGTERM)"])
    def test_exit(self, end: str) -> None:
        """While threads wait, and while a thread of Python has them work.

        That thread calls no operator of torch: Python ends threads at exit where they take the GIL, in torch's C++ too,
        which then ends the process ("terminate called without an active exception").
        """
        forever = """
            kept = []
            pool.run(*given, pool=types.SimpleNamespace(run=lambda *request: kept.extend(request)))
            each = pool.default_pool()
            threading.Thread(target=lambda: [each.run(*kept) for _ in iter(int, 1)], daemon=True).start()
        """
        after = "time.sleep(0.2)\nprint('end', flush=True)\n"
        running = program(TWICE + textwrap.dedent(forever) + after + end)
        out, errors = running.communicate(timeout=60)
        assert (out, errors) == ("end\n", "")
        assert running.returncode == (-signal.SIGTERM if "SIGTERM" in end else 0)

    def test_an_interrupt_comes_after_the_products(self, made: torch.Generator) -> None:
        given, few = long_case(made), of_library(native.library(), 2, 0)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
        timer = threading.Timer(0.03, lambda: signal.raise_signal(signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):  # on busy cores the timer is late
            [pool.run(*given, pool=few) for _ in iter(timer.is_alive, False)]
        signal.signal(signal.SIGINT, before)
        assert different(pool.run(*given, pool=few), pool.run(*given)) == 0
        few.stop()

    def test_calls_of_several_threads_come_one_after_another(self, made: torch.Generator) -> None:
        cases = [case(form, tokens, made, 352, 288) for form in ("bf16", "mxfp4") for tokens in (1, 5)]
        found: list[int] = []

        def compare(given: Any) -> None:
            expected = experts_in_c(*given)
            found.extend(different(pool.run(*given), expected) for _ in range(50))

        runners = [threading.Thread(target=compare, args=[given]) for given in cases]
        for each in runners:
            each.start()
        for each in runners:
            each.join()
        assert found == [0] * 200

    def test_a_caller_keeps_its_cores_and_a_stopped_pool_its_threads_end(self, made: torch.Generator) -> None:
        given, before = case("bf16", 1, made), threads()
        few, workers = started(lambda: of_library(native.library(), 3, 0))
        time.sleep(0.05)
        assert len(workers) == 2
        assert all(len(os.sched_getaffinity(each)) == 1 for each in workers)
        cores = os.sched_getaffinity(0)
        pool.run(*given, pool=few)
        assert os.sched_getaffinity(0) == cores
        few.stop()
        few.stop()
        assert threads() == before
        with pytest.raises(StateError, match="is stopped: start another"):
            pool.run(*given, pool=few)

    def test_cores_that_are_taken_away(self, made: torch.Generator) -> None:
        """Of all threads' places one is none, and the others are one core."""
        given = case("mxfp4", 3, made)
        few = pool.Pool([100_000, 0, 100_000, 0])
        assert different(pool.run(*given, pool=few), experts_in_c(*given)) == 0
        few.stop()


class TestCores:
    def machine(self, folder: Path, siblings: dict[int, str]) -> Path:
        for cpu, text in siblings.items():
            (folder / f"devices/system/cpu/cpu{cpu}/topology").mkdir(parents=True)
            (folder / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").write_text(text + "\n")
        return folder

    @pytest.mark.parametrize(
        ("allowed", "expected"), [({0, 1, 2, 3, 4, 5, 6, 7}, [0, 1, 2, 3]), ({2, 5, 6}, [2, 5]), ({7}, [7])]
    )
    def test_one_of_each_core(
        self, allowed: set[int], expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
        sysfs = self.machine(tmp_path, {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
        assert pool.physical_cores(sysfs, "", tmp_path) == expected
        assert pool.physical_cores(tmp_path / "hidden", "", tmp_path) == sorted(allowed)

    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({"a/cpu.max": "250000 100000"}, 2), ({"a/cpu.max": "max 100000"}, 8), ({"a/cpu.max": "50000 100000"}, 1),
            ({"cpu.max": "300000 100000", "a/cpu.max": "max 100000"}, 3), ({}, 8), ({"a/cpu.max": "no number"}, 8),
            ({"cpu/b/cpu.cfs_quota_us": "400000", "cpu/b/cpu.cfs_period_us": "100000"}, 4),
            ({"cpu/b/cpu.cfs_quota_us": "-1", "cpu/b/cpu.cfs_period_us": "100000"}, 8),
        ],
    )  # fmt: skip
    def test_no_more_than_control_groups_give_time_for(
        self, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text + "\n")
        assert len(pool.physical_cores(tmp_path, "4:memory:/m\n1:cpu,cpuacct:/b\n0::/a\n", tmp_path)) == expected


class TestLibrary:
    @pytest.fixture(autouse=True)
    def own_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    @staticmethod
    def load() -> Any:
        return native.library.__wrapped__()

    def test_it_is_compiled_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.load()
        (kept,) = (tmp_path / "cache/headrace").iterdir()
        assert kept.suffix == ".so"
        monkeypatch.setenv("PATH", "")
        assert self.load().experts_best() in range(3)

    def test_without_a_compiler(self, made: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        with pytest.raises(StateError, match=r"no C compiler: expected \$CC, cc, gcc or clang: install one"):
            self.load()
        monkeypatch.setattr(native, "library", native.library.__wrapped__)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        ordered._threads.cache_clear()
        given = case("bf16", 1, made)
        with pytest.warns(HeadraceWarning, match=r"experts on 'cpu' run in torch, slowly: .* no C compiler"):
            found = ordered.run(*given)
        ordered._threads.cache_clear()
        assert different(found, order.run_experts(*given)) == 0

    def test_a_compiler_that_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        script = tmp_path / "bad"
        script.write_text("#!/bin/sh\necho 'x.c:1:1: fatal error: stdint.h: No such file' >&2\nexit 1\n")
        script.chmod(0o755)
        monkeypatch.setenv("CC", str(script))
        with pytest.raises(StateError, match=r"bad failed on experts.c: x.c:1:1: fatal error: stdint.h.*: set CC"):
            self.load()

    @pytest.mark.slow
    @pytest.mark.parametrize("state", ["others may write", "no folder", "no home"])
    def test_where_nothing_can_be_kept(self, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is compiled for this process."""
        folder = tmp_path / "cache/headrace"
        if state == "others may write":
            self.load()
            (kept,) = folder.iterdir()
            kept.unlink()  # the loaded one stays
            kept.write_bytes(b"somebody else's")
            kept.chmod(0o666)
        elif state == "no folder":
            folder.parent.write_text("a file")
        else:
            monkeypatch.setattr(native, "cache_folder", lambda: None)
        assert self.load().experts_best() in range(3)

    def test_a_file_that_is_no_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def cut_off(path: Path) -> Path:
            path.write_bytes(b"cut off")
            return path

        monkeypatch.setattr(native, "_compiled", cut_off)
        with pytest.raises(StateError, match=r"set XDG_CACHE_HOME and TMPDIR to folders"):
            self.load()

    def test_other_instructions_are_refused(self) -> None:
        with pytest.raises(OptionError, match=r"instructions: expected one of \('plain C'.*found -1"):
            pool.Pool([0], -1)

    @pytest.mark.slow
    def test_another_processor_has_plain_c(self, tmp_path: Path, made: torch.Generator) -> None:
        changed = variant(tmp_path, {"defined(__x86_64__)": "0"}, more="")
        assert changed.experts_best() == 0
        few = of_library(changed, 2, 0)
        for form in ("bf16", "mxfp4"):
            given = case(form, 2, made)
            assert different(pool.run(*given, pool=few), experts_in_c(*given)) == 0
        few.stop()
