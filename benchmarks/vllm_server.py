"""A server of vLLM in a process of its own, for the scripts that measure one: start it, wait, ask it, end it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

# `vllm` itself is not on the path of every machine that can import vLLM.
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
# And that asks for the version of a distribution with the name vllm, which builds of third parties do not have.
API_SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]


@contextmanager
def started(
    command: Sequence[str], log_path: Path, *, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server that has begun to start, as its address and its process; it ends with the block.

    Args:
        command: without a port; a free one is added.
        log_path: what the server prints.
        environment: of the server; that of this process if None.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and the server with it
    port = _free_port()
    with log_path.open("w") as log:
        child = subprocess.Popen(
            [*command, "--port", str(port)], env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield f"http://127.0.0.1:{port}", child
        finally:
            _end(child)


def wait_until_healthy(url: str, child: subprocess.Popen[bytes], log_path: Path, start_s: float = 300) -> None:
    """Return when a server answers; exit if it has ended, or does not answer within ``start_s`` seconds."""
    begin = time.monotonic()
    while not _is_healthy(url):
        if child.poll() is not None or time.monotonic() - begin > start_s:
            raise SystemExit(f"the server did not start within {start_s:.0f} s; see {log_path}")
        time.sleep(0.5)


@contextmanager
def serving(
    command: Sequence[str], log_path: Path, *, environment: Mapping[str, str] | None = None, start_s: float = 300
) -> Iterator[tuple[str, psutil.Process, float]]:
    """``started`` and ready: its address, its process, and the seconds that its start took, at most ``start_s``."""
    begin = time.monotonic()
    with started(command, log_path, environment=environment) as (url, child):
        wait_until_healthy(url, child, log_path, start_s)
        yield url, psutil.Process(child.pid), time.monotonic() - begin


def headrace_stats(url: str) -> dict[str, Any]:
    """What headrace's worker counts, from a server that was started with ``VLLM_SERVER_DEV_MODE=1``."""
    return ask_ranks(url, "headrace_stats")[0]


def ask_ranks(url: str, method: str) -> list[dict[str, Any]]:
    """What ``method`` of each worker returns, by rank; as above."""
    answer = httpx.post(f"{url}/collective_rpc", json={"method": method}, timeout=60)
    answer.raise_for_status()
    found: list[dict[str, Any]] = answer.json()["results"]
    return found


def _end(child: subprocess.Popen[bytes]) -> None:
    """The server and whatever it has started; it may have ended by itself."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(20)
        os.killpg(child.pid, signal.SIGKILL)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        return int(finder.getsockname()[1])
