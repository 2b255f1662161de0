"""Words in host memory that a stream writes and waits for: how copies and readers keep time without the host.

CUDA calls them stream memory operations (CUDA Driver API, "Stream Memory Operations"): ``cuStreamWaitValue32`` holds a
stream until a 32-bit word has a value, ``cuStreamWriteValue32`` writes one behind everything the stream did before,
with a fence for the whole system. Both become nodes when the stream is captured. torch has no binding for them, so
they are called in the driver's own library. A host function (``cudaLaunchHostFunc``) would need the interpreter lock in
the middle of a replay.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, Protocol

import torch

from penstock.errors import OptionError, TransferError
from penstock.plan.ring_layout import WORD_BYTES

__all__ = ["CopyStream", "CudaCopyStream"]

_WAIT_VALUE_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ (cuda.h, CUstreamWaitValue_flags)
_WRITE_VALUE_DEFAULT = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: fenced
_TRIAL_S = 10.0
_MEND = "use mode 'cpu', which holds the weights in pinned host memory (--offload-mode cpu)"


class CopyStream(Protocol):
    """Carries out what it is given one after the other, some time later; nothing here blocks the caller."""

    def write(self, word: int, value: int) -> None:
        """Set a word, visible after everything given before is done."""

    def wait_equal(self, word: int, value: int) -> None:
        """Go on only when a word has this value."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between uint8 tensors of one size."""


class CudaCopyStream:
    """A CUDA stream over words at ``address``, one every 64 bytes, in pinned host memory."""

    def __init__(self, stream: torch.cuda.Stream, address: int) -> None:
        """Nothing is given to ``stream`` yet.

        Raises:
            OptionError: the driver has no stream memory operations.
        """
        self._stream = stream
        # Under unified addressing the device's address of registered host memory is the host's.
        self._address = address
        self._write, self._wait = _driver_function("cuStreamWriteValue32"), _driver_function("cuStreamWaitValue32")

    def write(self, word: int, value: int) -> None:
        self._call(self._write, word, value, _WRITE_VALUE_DEFAULT)

    def wait_equal(self, word: int, value: int) -> None:
        self._call(self._wait, word, value, _WAIT_VALUE_EQUAL)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def try_out(self) -> None:
        """Write word 0, wait for it and clear it again.

        Raises:
            OptionError: the device does not do that.
        """
        try:
            self.write(0, 1)
            self.wait_equal(0, 1)
            self.write(0, 0)
        except TransferError as error:
            raise OptionError(
                f"mode 'disk' needs stream memory operations, which fail here ({error}); {_MEND}"
            ) from error
        done = torch.cuda.Event()
        done.record(self._stream)
        deadline = time.monotonic() + _TRIAL_S
        while not done.query():
            if time.monotonic() > deadline:
                raise OptionError(
                    f"mode 'disk' needs stream memory operations, and one was not done after {_TRIAL_S:.0f} s; {_MEND}"
                )
            time.sleep(1e-4)

    def _call(self, function: Any, word: int, value: int, flags: int) -> None:
        code = function(self._stream.cuda_stream, self._address + word * WORD_BYTES, value, flags)
        if code != 0:
            raise TransferError(f"{function.__name__}: error {code} of the CUDA driver (CUresult)")


def _driver_function(name: str) -> Any:
    """A function ``(CUstream, CUdeviceptr, cuuint32_t, unsigned int) -> CUresult`` of the driver.

    The second version of these needs no switch of the kernel module; it came with CUDA 11.7.
    """
    try:
        function = getattr(ctypes.CDLL("libcuda.so.1"), f"{name}_v2")
    except (OSError, AttributeError) as error:
        raise OptionError(
            f"mode 'disk' on a GPU needs {name} of a CUDA driver 11.7 or later ({error}); {_MEND}"
        ) from error
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function
