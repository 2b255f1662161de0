"""The promise: an interrupt at any moment of ``offload()`` and ``remove()`` loses nothing and hangs nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from torch import nn

import headrace
from checks import raising, require_forwards
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.errors import OptionError
from headrace.model.live_tensors import BoundStorage
from headrace.stores import file_reads
from headrace.testing import assert_same_bits
from headrace.transfer import link as threads
from interrupts import Interrupter
from models import Stack, all_layers, open_files, rows, save

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize("call", ["offload", "remove"])
def test_while_files_are_opened_or_closed(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor stays open: nobody would close it."""
    model, policy = Stack(5).eval(), all_layers(2, "disk")
    expected, folder = model(rows()), save(model, tmp_path)
    close = os.close

    interrupted = raising(KeyboardInterrupt)
    if call == "offload":
        with monkeypatch.context() as patch:
            patch.setattr(file_reads, "dup_above_stdio", interrupted)
            with pytest.raises(KeyboardInterrupt):
                headrace.offload(model, policy, checkpoint=folder)
    else:
        handle = headrace.offload(model, policy, checkpoint=folder)
        require_forwards(handle, rows(), expected, 1)
        with monkeypatch.context() as patch:
            patch.setattr(file_reads.os, "close", lambda fd: interrupted(close(fd)))
            with pytest.raises(KeyboardInterrupt):
                handle.remove()
        handle.remove()
    gc.collect()
    assert open_files(folder) == 0
    assert_same_bits(model(rows()), expected)


def test_while_a_checkpoint_is_read(tmp_path: Path) -> None:
    """At every line: no descriptor stays open."""
    folder = save(Stack(1), tmp_path)

    def read() -> None:
        checkpoint = Checkpoint.open(folder)
        checkpoint.read(next(iter(checkpoint.tensors)))

    read()  # what is imported or cached is no part of it
    counted = Interrupter(-1)
    counted.run(read)
    lines = {moments[0] for moments in counted.seen.values()}
    assert len(lines) > 50
    for at in sorted(lines):
        interrupter = Interrupter(at)
        _, error = interrupter.run(read)
        assert isinstance(error, KeyboardInterrupt)
        error.__traceback__ = None
        assert open_files(folder) == 0, interrupter.place


@pytest.mark.parametrize("at", [0, 3, 8])
def test_while_the_originals_are_let_go(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the store has their bytes from here on."""
    model = Stack(5).eval()
    expected, folder = model(rows()), save(model, tmp_path)
    forget, calls = BoundStorage.forget_original, iter(range(1000))

    def interrupted(bound: BoundStorage) -> None:
        if next(calls) == at:
            raise KeyboardInterrupt
        forget(bound)

    with monkeypatch.context() as patch:
        patch.setattr(BoundStorage, "forget_original", interrupted)
        with pytest.raises(KeyboardInterrupt):
            headrace.offload(model, all_layers(2, "disk"), checkpoint=folder)
    assert next(calls) > at
    assert_same_bits(model(rows()), expected)
    with headrace.offload(model, all_layers(2, "disk"), checkpoint=folder) as handle:
        require_forwards(handle, rows(), expected, 1)
    assert_same_bits(model(rows()), expected)


_REMOVE = """
    import faulthandler, sys, torch, headrace
    from headrace.transfer import link as threads
    faulthandler.dump_traceback_later(60, exit=True)
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    handle = headrace.offload(torch.nn.Sequential(*layers).eval(), headrace.Prefetch(1, 1, 2))

    def tracer(frame, event, arg):
        if event == "call" and frame.f_code is threads.end_threads.__code__:
            sys.settrace(None)
            raise KeyboardInterrupt

    sys.settrace(tracer)
    try:
        handle.remove()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize("again", [True, False])
def test_while_readers_are_sent_home(again: bool) -> None:
    """The second remove(), or else the end of the program, waits for readers that nobody has told."""
    code = textwrap.dedent(_REMOVE) + ("handle.remove()\n" if again else "") + "print('ends', flush=True)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("interrupted\nends\n", 0), done.stderr


@pytest.mark.parametrize(
    "policy", [headrace.Prefetch(1, 1, 1, mode="disk"), headrace.Prefetch(1, 1, 1, codec="exp3")], ids=str
)
@pytest.mark.parametrize("refused", ["all", "the second"])
def test_weights_come_back_where_no_thread_starts(
    policy: headrace.Prefetch, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in functions of atexit, which save a model or remove the offload."""
    model = nn.Sequential(*(nn.Linear(2048, 2100, bias=False).bfloat16() for _ in range(2))).eval()
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    handle = headrace.offload(model, policy, checkpoint=save(model, tmp_path) if policy.mode == "disk" else None)
    start, calls = threading.Thread.start, iter(range(1000))

    def refuse(thread: threading.Thread) -> None:
        if refused == "all" or next(calls) % 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setenv("HEADRACE_READERS", "4")
    assert_same_bits(dict(model.state_dict()), expected)
    handle.remove()
    assert_same_bits(dict(model.state_dict()), expected)


def test_readers_that_cannot_be_started_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(3).eval()
    expected = model(rows())
    before, start, calls = set(threading.enumerate()), threading.Thread.start, iter(range(1000))

    def fails_at_the_second(thread: threading.Thread) -> None:
        if thread.name.startswith("headrace-reader") and next(calls) % 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threads.threading.Thread, "start", fails_at_the_second)
        for _ in range(3):
            with pytest.raises(OptionError, match=r"starts no 2 threads to read with.*ulimit -u.*HEADRACE_READERS"):
                headrace.offload(model, all_layers(1))
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before
    assert_same_bits(model(rows()), expected)
