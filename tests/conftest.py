"""What every test gets: nothing of headrace's from outside (variables, a probe of this machine), few threads, the same
random numbers."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator

import pytest

# Threads of a kernel that wait for one another sleep: where another process wants the core, spinning ones take five
# times as long. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if "PYTEST_XDIST_WORKER" in os.environ:
    # At the end, after what others register below: to free all objects of torch and transformers takes five seconds.
    atexit.register(os._exit, 0)

os.environ.pop("COLUMNS", None)  # in processes of pytest-xdist 80, for which tables are wrapped
_caches = tempfile.TemporaryDirectory(prefix="headrace-tests-")
os.environ["XDG_CACHE_HOME"] = _caches.name


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("dist", "no") != "no":
        return  # the process that hands out tests needs no torch
    import torch

    if torch.cuda.is_available():
        torch.set_num_threads(2)
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
        # Models this small are slower on two threads, which `test_numerics` has. The variable is for processes that
        # tests start.
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
        # The other one formats three tracebacks for devices that are not here, 0.4 ms of each test.
        torch.manual_seed = torch.default_generator.manual_seed


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton's bindings report at exit that they are not freed
    _caches.cleanup()


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """What imports have made stays: each collection looked through a million objects of torch's and transformers'."""
    gc.collect()
    gc.freeze()
    # Or pytest attaches and detaches its handlers at each of torch's loggers, six times a test.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def _clean_slate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("HEADRACE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HEADRACE_READERS", "2")
    monkeypatch.setenv("HEADRACE_DISABLE_CACHE", "1")  # or a folder would be read in the first of many tests only
    torch = sys.modules["torch"]
    torch.manual_seed(0)
    if (models := sys.modules.get("models")) is not None:
        models.earlier_threads.clear()
        models.earlier_threads.update(threading.enumerate())
    # Triton's interpreter runs one program after another, and each takes its time to start.
    if not torch.cuda.is_available() and (cache := sys.modules.get("headrace.experts.cache")) is not None:
        monkeypatch.setattr(cache, "_PROGRAMS", 3)


@pytest.fixture
def no_grad() -> Iterator[None]:
    with sys.modules["torch"].no_grad():
        yield


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("headrace.adapters.transformers.load_folder.load_matched", load)
