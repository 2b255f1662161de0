"""Runs a function in several processes of one gloo group, each rank with what it returns or raises; never hangs."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

_context = mp.get_context("forkserver")
# What tests import, or every rank would import it again (2.4 s).
_context.set_forkserver_preload(
    ["torch", "torch.distributed.tensor", "headrace.testing", "commands", "checks", "models", "hypothesis", "pytest"]
)


@cache
def _start_server() -> None:
    """Start the server that ranks are forked from; up to Python 3.12 it finds modules by PYTHONPATH alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def run_ranks(
    num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 20.0, limit_s: float = 120.0,
    backend: str = "gloo",
) -> list[Any]:  # fmt: skip
    """``function(rank, *args)`` on every rank; what each returns, an exception that it raised, or None if it died.

    ``timeout_s``: of the group. ``limit_s``: after this the test fails. ``backend``: with ``nccl`` each rank has the
    device of its number.
    """
    _start_server()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            ours, theirs = _context.Pipe(False)
            options = (rank, num_ranks, str(Path(folder) / "store"), timeout_s, backend, theirs, function, args)
            processes.append(_context.Process(target=_main, args=options, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            deadline = time.monotonic() + limit_s
            results = [_receive(pipe, deadline) for pipe in pipes]
            if hanging := [rank for rank, result in enumerate(results) if isinstance(result, _Hangs)]:
                raised = next((result for result in results if isinstance(result, Exception)), None)
                raise AssertionError(f"ranks {hanging} hang") from raised
            return results
        finally:
            for process in processes:
                process.join(5)
                process.kill()


def outcomes(num_ranks: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """The same, where any failure fails the test."""
    results = run_ranks(num_ranks, function, *args, **options)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class _Hangs:
    """What a rank returns that is not done by the deadline."""


def _receive(pipe: Connection, deadline: float) -> Any:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        return _Hangs()
    try:
        return pipe.recv()
    except EOFError:
        return None


def _main(
    rank: int, num_ranks: int, store: str, timeout_s: float, backend: str, pipe: Connection,
    function: Callable[..., Any], args: tuple[Any, ...],
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    os.environ["HEADRACE_READERS"] = "2"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    files = dist.FileStore(store, num_ranks)
    timeout = timedelta(seconds=timeout_s)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=files, rank=rank, world_size=num_ranks, timeout=timeout)
    files.set(f"connected {rank}", "")  # a test may kill its rank at once; the others must have connected by then
    files.wait([f"connected {other}" for other in range(num_ranks)], timeout)
    torch.manual_seed(0)
    try:
        result = function(rank, *args)
    except BaseException as error:
        error.add_note(f"rank {rank}:\n{traceback.format_exc()}")
        result = error
    try:
        pipe.send(result)
    except Exception:
        pipe.send(RuntimeError(f"rank {rank}: {result!r} cannot be sent"))
    os._exit(0)  # nobody waits for the others at exit
