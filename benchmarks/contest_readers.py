"""For ``contest_files.py``: the files, and libraries that read them into memory of the host or of a GPU.

Each library is called as its own loader calls it, below the part that makes tensors, so that destinations can be given.
Threads, buffers and handles are made once and kept.
"""

from __future__ import annotations

import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from headrace.cli.bench_step import DecoderShape, Stack
from headrace.memory.pinned import pinned_region

__all__ = [
    "LAYERS_PER_FILE",
    "LIBRARIES",
    "SETTINGS",
    "SMALL",
    "Ground",
    "Read",
    "Reader",
    "Setting",
    "bind",
    "meta_stack",
    "open_reader",
    "open_tensors",
    "prepare",
]

LAYERS_PER_FILE = 4  # even, so that a layer of the ring always uses the same of two slots
SMALL = DecoderShape("small", 0, 512, 1536, 512, 256)

Setting = tuple[Any, ...]

# kvikio: threads, MiB of a task and of its buffer. fastsafetensors: threads, MiB of all buffers (two for each thread).
# runai: threads of each of two streamers, MiB of a read. instanttensor: kind of I/O, operations in flight, MiB of each;
# None: its default. The first of each is the library's own default, or what its documentation recommends.
SETTINGS: dict[str, dict[bool, list[Setting]]] = {
    "kvikio": {
        False: [(16, 4), (8, 8), (12, 4), (16, 16), (32, 4)],
        True: [(16, 4), (32, 8)],
    },
    "fastsafetensors": {
        False: [(16, 16), (8, 64), (16, 64), (16, 256), (32, 128)],
        True: [(16, 16), (16, 128), (32, 256)],
    },
    "runai": {
        False: [(16, 2), (8, 2), (16, 8), (32, 2)],
        True: [(16, 2), (32, 8)],
    },
    "instanttensor": {
        False: [("URING_BUFFERED", None, None), ("MMAP", None, None), ("URING_BUFFERED", 32, 4), ("MMAP", 48, 8)],
        True: [("URING", None, None), ("URING", 64, 4), ("AIO", 64, 8)],
    },
}
LIBRARIES = tuple(SETTINGS)
_RUNAI_RANGE_BYTES = 8 << 20


# -- the files ---


@dataclass(frozen=True)
class Ground:
    """The files, and what is in them.

    Attributes:
        starts: where the tensors of each file begin in it, in bytes.
        truth: the bytes of the tensors of each file, on ``device``.
        pinned: host memory for all of ``truth``.
    """

    shape: DecoderShape
    device: torch.device
    folder: Path
    files: Sequence[Path]
    starts: Sequence[int]
    truth: Sequence[torch.Tensor]
    pinned: torch.Tensor
    x: torch.Tensor

    @property
    def layer_bytes(self) -> int:
        """Of one layer."""
        return self.truth[0].numel() // LAYERS_PER_FILE

    def resident(self, num_files: int) -> torch.Tensor:
        """What the layers of the first files make of ``x``."""
        stack = bind(self.shape, [part for file in self.truth[:num_files] for part in file.split(self.layer_bytes)])
        out: torch.Tensor = stack(self.x)
        return out

    def host_places(self, num_files: int) -> list[torch.Tensor]:
        """Pinned memory for each of the first files."""
        return list(self.pinned.split([file.numel() for file in self.truth])[:num_files])

    def fresh_places(self) -> list[torch.Tensor]:
        """The same for all files, in memory that was not there before."""
        return list(pinned_memory(self.pinned.numel(), self.device).split([file.numel() for file in self.truth]))

    def sync(self) -> None:
        """Return when the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def meta_stack(shape: DecoderShape, layers: int) -> Stack:
    """Layers without bytes."""
    return Stack(replace(shape, num_layers=layers), torch.bfloat16, "meta").eval().requires_grad_(False)


def bind(shape: DecoderShape, layers: Sequence[torch.Tensor]) -> Stack:
    """A stack whose layers are views of ``layers`` (uint8)."""
    stack = meta_stack(shape, len(layers))
    for layer, memory in zip(stack.layers, layers, strict=True):
        state, at = {}, 0
        for name, parameter in layer.named_parameters():
            state[name] = memory[at : at + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            at += parameter.nbytes
        layer.load_state_dict(state, assign=True)
    return stack


def prepare(folder: Path, shape: DecoderShape, num_files: int, device: torch.device) -> Ground:
    """Write the files, as safetensors does, and make the other memory that all share."""
    generator, truth, writes = torch.Generator(device).manual_seed(0), [], []
    with ThreadPoolExecutor(4) as pool:
        for index in range(num_files):
            parts, header, at = [], {}, 0
            for name, parameter in meta_stack(shape, LAYERS_PER_FILE).named_parameters():
                part = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
                part.fill_(1.0) if part.dim() == 1 else part.normal_(0.0, 0.02, generator=generator)
                _, layer, rest = name.split(".", 2)
                header[f"layers.{index * LAYERS_PER_FILE + int(layer)}.{rest}"] = {
                    "dtype": "BF16", "shape": list(part.shape), "data_offsets": [at, at + part.nbytes]
                }  # fmt: skip
                at += part.nbytes
                parts.append(part.view(-1).view(torch.uint8))
            truth.append(torch.cat(parts))
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            path = folder / f"model-{index + 1:05}-of-{num_files:05}.safetensors"
            writes.append((path, 8 + len(text)))
            pool.submit(_write, path, len(text).to_bytes(8, "little") + text, truth[-1].cpu())
    num_bytes = sum(file.numel() for file in truth)
    pinned = pinned_memory(num_bytes, device)
    x = torch.randn(1, shape.hidden, generator=generator, device=device).to(torch.bfloat16)
    files, starts = zip(*writes, strict=True)
    return Ground(shape, device, folder, files, starts, truth, pinned, x)


def pinned_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Of the host, near ``device``; ordinary memory where that is the CPU."""
    return pinned_region(num_bytes, device) if device.type == "cuda" else torch.empty(num_bytes, dtype=torch.uint8)


def _write(path: Path, header: bytes, tensors: torch.Tensor) -> None:
    with path.open("wb") as file:
        file.write(header)
        file.write(tensors.numpy().data)
        os.fsync(file.fileno())  # pages that are not written back are not dropped


# -- the libraries ---


@dataclass(frozen=True)
class Read:
    """Bytes of file number ``file`` from ``offset`` on, which fill ``into`` (uint8, 1-D, contiguous)."""

    file: int
    offset: int
    into: torch.Tensor


class Reader(ABC):
    """A library with its threads."""

    def prepare(self) -> None:
        """Set what a process has once; no read is under way."""

    @abstractmethod
    def start(self, reads: Sequence[Read], lane: int) -> Callable[[], object]:
        """Begin to read; returns a function that waits for the bytes. One start at a time in each of two lanes."""

    @abstractmethod
    def close(self) -> None:
        """End its threads; no read is under way."""


class KvikioReader(Reader):
    """``CuFile.pread``: a pool of threads, each with a pinned buffer; in compatibility mode: no GPUDirect Storage."""

    _prepared: ClassVar[KvikioReader | None] = None

    def __init__(self, files: Sequence[Path], setting: Setting, direct: bool) -> None:
        # Direct reads of whole pages around a range, for which there is no other switch.
        os.environ.update(KVIKIO_COMPAT_MODE="ON", KVIKIO_AUTO_DIRECT_IO_READ_OVERREAD="1")
        self._kvikio = importlib.import_module("kvikio")
        self._defaults = importlib.import_module("kvikio.defaults")
        threads, task_mib = setting
        self._task_bytes = task_mib << 20
        self._settings = {
            "num_threads": threads,
            "task_size": self._task_bytes,
            "bounce_buffer_size": self._task_bytes + 8192,  # the pages around an unaligned task
            "auto_direct_io_read": direct,
        }
        self._files = [self._kvikio.CuFile(file) for file in files]

    def prepare(self) -> None:
        if KvikioReader._prepared is not self:  # its threads end and begin anew
            self._defaults.set(self._settings)
            KvikioReader._prepared = self

    def start(self, reads: Sequence[Read], lane: int) -> Callable[[], object]:
        futures = [
            self._files[read.file].pread(
                read.into.numpy() if read.into.is_cpu else read.into, read.into.numel(), read.offset, self._task_bytes
            )
            for read in reads
        ]
        return lambda: [future.get() for future in futures]

    def close(self) -> None:
        for file in self._files:
            file.close()


class FastsafetensorsReader(Reader):
    """The reader of its ``nogds`` copier: a pool of threads, each with two pinned buffers and streams."""

    def __init__(self, files: Sequence[Path], setting: Setting, direct: bool, device: torch.device) -> None:
        self._cpp = importlib.import_module("fastsafetensors.cpp")
        with open("/proc/self/maps") as maps:  # the runtime that torch has loaded; no loader finds it by name
            self._cpp.load_library_functions(next((line.split()[-1] for line in maps if "libcudart" in line), ""))
        self._cpp.set_gil_release(True)
        threads, buffer_mib = setting
        self._cuda = device.type == "cuda"
        self._reader = self._cpp.nogds_file_reader(False, buffer_mib << 10, threads, self._cuda, device.index or 0)
        self._fds = [os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0)) for file in files]

    def start(self, reads: Sequence[Read], lane: int) -> Callable[[], object]:
        requests = []
        for read in reads:
            buffer = self._cpp.gds_device_buffer(read.into.data_ptr(), read.into.numel(), self._cuda)
            requests.append(self._reader.submit_read(self._fds[read.file], buffer, read.offset, read.into.numel(), 0))

        def wait() -> None:
            done = [self._reader.wait_read(request) for request in requests]  # all of them: a buffer is free then
            if not all(done):
                raise OSError("fastsafetensors: a read failed")

        return wait

    def close(self) -> None:
        self._reader = None
        for fd in self._fds:
            os.close(fd)


class RunaiReader(Reader):
    """``runai_request`` into pinned memory, and to a GPU a copy of each range that has come; reads are buffered."""

    def __init__(self, files: Sequence[Path], setting: Setting, direct: bool, staging: torch.Tensor) -> None:
        """``staging``: pinned; half of it for each lane, or all of it where only lane 0 is used."""
        threads, block_mib = setting
        os.environ.update(RUNAI_STREAMER_CONCURRENCY=str(threads), RUNAI_STREAMER_CHUNK_BYTESIZE=str(block_mib << 20))
        self._library = importlib.import_module("runai_model_streamer.libstreamer.libstreamer")
        self._files, self._staging = files, staging
        self._dropped = [os.open(file, os.O_RDONLY) for file in files] if direct else []
        self._streamers = [self._library.runai_start() for _ in range(2)]

    def start(self, reads: Sequence[Read], lane: int) -> Callable[[], object]:
        sizes = [read.into.numel() for read in reads]
        hosts = [read.into for read in reads]
        if not hosts[0].is_cpu:
            hosts = list(self._staging[lane * self._staging.numel() // 2 :][: sum(sizes)].split(sizes))
        ranges = [[len(part) for part in host.split(_RUNAI_RANGE_BYTES)] for host in hosts]
        self._library.runai_request(
            self._streamers[lane],
            [str(self._files[read.file]) for read in reads],
            [read.offset for read in reads],
            sizes,
            [host.numpy() for host in hosts],
            ranges,
        )

        def wait() -> None:
            for _ in range(sum(map(len, ranges))):
                index, part = self._library.runai_response(self._streamers[lane])
                if not reads[index].into.is_cpu:
                    at = slice(part * _RUNAI_RANGE_BYTES, (part + 1) * _RUNAI_RANGE_BYTES)
                    reads[index].into[at].copy_(hosts[index][at], non_blocking=True)
            if not reads[0].into.is_cpu:
                torch.cuda.current_stream().synchronize()
            for read in reads if self._dropped else ():
                os.posix_fadvise(self._dropped[read.file], read.offset, read.into.numel(), os.POSIX_FADV_DONTNEED)

        return wait

    def close(self) -> None:
        for streamer in self._streamers:
            self._library.runai_end(streamer)
        for fd in self._dropped:
            os.close(fd)


def open_reader(
    library: str, files: Sequence[Path], setting: Setting, direct: bool, device: torch.device, staging: torch.Tensor
) -> Reader:
    """Open a reader of ``files`` into memory of ``device``; ``staging``: pinned, as large as what is under way."""
    if library == "kvikio":
        return KvikioReader(files, setting, direct)
    if library == "fastsafetensors":
        return FastsafetensorsReader(files, setting, direct, device)
    return RunaiReader(files, setting, direct, staging)


def open_tensors(files: Sequence[Path], setting: Setting, device: torch.device, buffer_bytes: int | None = None) -> Any:
    """InstantTensor's ``safe_open``: a context whose ``tensors()`` are views of a buffer, valid until the next one."""
    library = importlib.import_module("instanttensor")
    backend, depth, chunk_mib = setting
    kind = importlib.import_module("instanttensor._impl").Backend[backend]
    return library.safe_open(
        [str(file) for file in files], "pt", device, backend=kind, copy=False, buffer_size=buffer_bytes,
        io_depth=depth, chunk_size=None if chunk_mib is None else chunk_mib << 20,
    )  # fmt: skip
