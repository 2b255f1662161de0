"""The library of ``experts.c``: compiled where it first runs, kept in headrace's cache, and called by ctypes.

The wheel holds the source, so that it is the same for every processor and C library. Triton compiles its launchers in
the same way: where experts run on a GPU there is a compiler.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path

from headrace.config import cache_folder
from headrace.errors import StateError

SOURCE = Path(__file__).with_name("experts.c")
_WHOLE = Path(__file__).with_name("doorbell.c")  # includes it
INSTRUCTIONS = ("plain C", "AVX2", "AVX-512")
_OPTIONS = ("-O3", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
_I64, _AT, _F32 = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class Matrix(ctypes.Structure):
    """The ``matrix`` of ``experts.c``."""

    _fields_ = (
        ("format", _I64), ("outputs", _I64), ("inputs", _I64), ("expert_stride", _I64), ("row_stride", _I64),
        ("k_stride", _I64), ("scale_outputs", _I64), ("scale_inputs", _I64), ("weight", _AT),
        ("scales", _AT), ("bias", _AT),
    )  # fmt: skip


class Request(ctypes.Structure):
    """The ``request`` of ``experts.c``."""

    _fields_ = (
        ("gate_up", Matrix), ("down", Matrix), ("num_experts", _I64), ("tokens", _I64), ("top_k", _I64),
        ("weights_are_bf16", _I64), ("interleaved", _I64), ("is_apart", _I64), ("x", _AT), ("ids", _AT),
        ("weights", _AT), ("out", _AT), ("alpha", _F32), ("limit", _F32),
    )  # fmt: skip


@cache
def library() -> ctypes.CDLL:
    """The library, compiled if the cache does not have it.

    Raises:
        StateError: there is no compiler, or it failed.
    """
    kind = f"{_OPTIONS} {platform.machine()} {platform.libc_ver()}".encode()
    name = f"experts-{sha256(kind + SOURCE.read_bytes() + _WHOLE.read_bytes()).hexdigest()[:16]}.so"
    with tempfile.TemporaryDirectory() as temporary:
        path = _kept(name) or _compiled(Path(temporary) / name)
        try:
            found = ctypes.CDLL(str(path))
        except OSError as error:
            raise StateError(
                f"experts on the CPU: {error}: set XDG_CACHE_HOME and TMPDIR to folders from which libraries are loaded"
            ) from None
    found.experts_start.argtypes = (ctypes.c_int, _AT, ctypes.c_int, ctypes.c_double, ctypes.c_double)
    found.experts_start.restype, found.experts_run.argtypes, found.experts_stop.argtypes = _AT, (_AT, _AT), (_AT,)
    found.experts_unpack.argtypes = (_AT, _AT, _I64, _AT)
    found.doorbell_start.argtypes = (_AT, _AT, _AT, _AT, _AT, ctypes.c_int, ctypes.c_int, ctypes.c_double)
    found.doorbell_start.restype, found.doorbell_stop.argtypes = _AT, (_AT,)
    return found


def _kept(name: str) -> Path | None:
    """The library in the cache, where it is put if it is not there; ``None``: there is no such folder to write to."""
    if (folder := cache_folder()) is None:
        return None
    path = folder / name
    try:
        if path.exists():
            kept = path.stat()
            # Somebody else's file would run as this user.
            return path if kept.st_uid == os.getuid() and not kept.st_mode & 0o022 else None
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            return _compiled(Path(draft) / name).replace(path)
    except OSError:
        return None


def _compiled(path: Path) -> Path:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None)
    if compiler is None:
        raise StateError(
            "experts on the CPU are compiled when they first run, and there is no C compiler: expected $CC, cc, gcc or "
            "clang: install one, such as by `apt install gcc libc6-dev`"
        )
    command = [compiler, *_OPTIONS, "-o", str(path), str(_WHOLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no word"]
        )
        raise StateError(
            f"experts on the CPU: {compiler} failed on {SOURCE.name}: {lines[0].strip()}: set CC to a compiler of C11 "
            f"that has the headers of Linux (`apt install gcc libc6-dev`)"
        )
    path.chmod(0o755)
    return path
