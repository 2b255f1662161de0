"""For ``contest_files.py``: who takes part, the staging ring and the loader of headrace, and a loop with a library."""

from __future__ import annotations

import gc
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import headrace
from contest_readers import LAYERS_PER_FILE, Ground, Read, Setting, bind, meta_stack, open_reader, open_tensors
from harness import capture
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.checkpoint.weight_map import TensorSource
from headrace.config import ALL_MODEL_PARAMS, Mode
from headrace.memory.pages import map_file, resident_bytes
from headrace.memory.pinned import CudaRegistrar
from headrace.memory.system import cpus_near, touch_threads
from headrace.stores.checkpoint_files import DiskStore
from headrace.stores.loader import CudaUploader, Delivery, deliver
from headrace.stores.sources import DiskOptions
from load_checkpoint import forget

__all__ = ["Contestant", "HeadraceRing", "Load", "Offload", "ReaderLoad", "ReaderRing", "TensorLoad", "TensorRing"]


class Contestant(ABC):
    """One way to read."""

    @abstractmethod
    def measure(self) -> tuple[float, bool]:
        """Milliseconds, and whether the bytes are right."""

    def close(self) -> None:
        """Free what it holds."""


class Ring(Contestant):
    """Steps of a stack that is streamed."""

    def __init__(self, ground: Ground, direct: bool, steps: int) -> None:
        self._ground, self._direct, self._steps, self._expected = ground, direct, steps, ground.resident(1)

    def begin(self) -> None:
        """Before the first step of a round."""

    @abstractmethod
    def step(self) -> torch.Tensor:
        """One pass over all layers."""

    def end(self) -> None:
        """After the last step of a round."""

    def measure(self) -> tuple[float, bool]:
        self.begin()
        self.step()
        self._ground.sync()
        start = time.perf_counter()
        for _ in range(self._steps):
            out = self.step()
        self._ground.sync()
        seconds = time.perf_counter() - start
        self.end()
        return seconds * 1e3 / self._steps, torch.equal(out, self._expected)


class HeadraceRing(Ring):
    """Mode ``disk``, called layer by layer or as one CUDA graph."""

    def __init__(self, ground: Ground, direct: bool, steps: int, graph: bool) -> None:
        super().__init__(ground, direct, steps)
        self._stack, self._handle = offload(ground, ground.files[0], LAYERS_PER_FILE, "disk", direct)
        self._replay: Callable[[], object] | None = None
        self._out = ground.x
        if graph:
            self.step()
            self._replay, self._out = capture(self.step)

    def step(self) -> torch.Tensor:
        if self._replay is None:
            self._out = self._stack(self._ground.x)
        else:
            self._replay()
        return self._out

    def close(self) -> None:
        close(self._handle)


class ReaderRing(Ring):
    """The loop by hand: wait for a layer's bytes, run it, have its slot filled again."""

    def __init__(self, ground: Ground, library: str, setting: Setting, direct: bool, steps: int) -> None:
        super().__init__(ground, direct, steps)
        size = ground.layer_bytes
        self._slots = [torch.empty(size, dtype=torch.uint8, device=ground.device) for _ in range(2)]
        self._layers = bind(ground.shape, [self._slots[i % 2] for i in range(LAYERS_PER_FILE)]).layers
        self._reader = open_reader(library, ground.files[:1], setting, direct, ground.device, ground.pinned[: 2 * size])
        self._waits: dict[int, Callable[[], object]] = {}

    def _start(self, layer: int) -> None:
        read = Read(0, self._ground.starts[0] + layer * self._ground.layer_bytes, self._slots[layer % 2])
        self._waits[layer % 2] = self._reader.start([read], layer % 2)

    def begin(self) -> None:
        self._reader.prepare()
        for slot in self._slots:
            slot.fill_(255)  # NaN
        self._ground.sync()
        for layer in range(2):
            self._start(layer)

    def step(self) -> torch.Tensor:
        x = self._ground.x
        for index, layer in enumerate(self._layers):
            self._waits.pop(index % 2)()
            x = layer(x)
            self._ground.sync()  # no library waits for a stream before it fills the slot
            self._start((index + 2) % LAYERS_PER_FILE)
        return x

    def end(self) -> None:
        for wait in self._waits.values():
            wait()
        self._ground.sync()

    def close(self) -> None:
        self._reader.close()


class TensorRing(Ring):
    """InstantTensor, which has a ring on the device itself: one pass over a list that names the file for each step."""

    def __init__(self, ground: Ground, setting: Setting, direct: bool, steps: int) -> None:
        super().__init__(ground, direct, steps)
        self._slot = torch.empty(ground.layer_bytes, dtype=torch.uint8, device=ground.device)
        self._layers = bind(ground.shape, [self._slot] * LAYERS_PER_FILE).layers
        self._setting = setting

    def begin(self) -> None:
        # As much memory as two slots, and a pass more than steps: what is read ahead before the clock starts is read
        # ahead at its end, too.
        files, size = [self._ground.files[0]] * (self._steps + 2), 2 * self._ground.layer_bytes
        self._opened = open_tensors(files, self._setting, self._ground.device, size)
        self._tensors = self._opened.__enter__().tensors()

    def step(self) -> torch.Tensor:
        x = self._ground.x
        for layer in self._layers:
            at = 0
            for _ in layer.parameters():
                found = next(self._tensors)[1].view(-1).view(torch.uint8)
                self._slot[at : at + found.numel()].copy_(found)
                at += found.numel()
            x = layer(x)
        return x

    def end(self) -> None:
        for _ in self._tensors:
            pass
        self._opened.__exit__(None, None, None)


Places = Callable[[], list[torch.Tensor]]


class Load(Contestant):
    """All bytes of the first files into ``places``, one for each file; this one: by the readers of the loader."""

    def __init__(self, ground: Ground, direct: bool, num_files: int, places: Places) -> None:
        self._ground, self._direct, self._num_files, self._places = ground, direct, num_files, places

    def load(self) -> list[torch.Tensor]:
        """Read them; what is returned is compared."""
        ground, places, checkpoint = self._ground, self._places(), Checkpoint.open(self._ground.folder)
        at = {file: (place, start) for file, place, start in zip(ground.files, places, ground.starts, strict=False)}
        tensors = [tensor for tensor in checkpoint.tensors.values() if tensor.path in at]
        sources = {tensor.name: TensorSource.of(tensor) for tensor in tensors}
        files = DiskStore(sources, DiskOptions(direct=None), stamps=checkpoint.stamps)
        deliveries = []
        for tensor in sorted(tensors, key=lambda tensor: (tensor.path, tensor.offset)):
            place, start = at[tensor.path]
            into = place[tensor.offset - start :][: tensor.num_bytes]
            deliveries.append(Delivery(tensor.name, partial(files.copies, tensor.name), into))
        uploader = None if places[0].is_cpu else CudaUploader(ground.device, CudaRegistrar(ground.device))
        deliver(deliveries, num_threads=touch_threads(8), uploader=uploader, cpus=cpus_near(ground.device))
        files.close()
        return places

    def check(self, found: Sequence[torch.Tensor]) -> bool:
        """Compare the bytes, and spoil them for the next one."""
        same = [
            torch.equal(place.to(self._ground.device), truth)
            for place, truth in zip(found, self._ground.truth, strict=False)
        ]
        for place in found:
            place[::4096] = 170
        return all(same)

    def measure(self) -> tuple[float, bool]:
        files = self._ground.files[: self._num_files]
        if self._direct:
            forget(files)
            if (share := max(map(cached_share, files))) > 0.05:
                raise OSError(f"{share:.0%} of a file are still in the page cache")
        self._ground.sync()
        start = time.perf_counter()
        found = self.load()
        self._ground.sync()
        seconds = time.perf_counter() - start
        right = self.check(found)
        del found
        gc.collect()
        return seconds * 1e3, right


class ReaderLoad(Load):
    """One request for each file, all at once; the library's threads and buffers are there before the clock starts."""

    def __init__(self, ground: Ground, direct: bool, num_files: int, places: Places, on: torch.device,
                 library: str, setting: Setting) -> None:  # fmt: skip
        super().__init__(ground, direct, num_files, places)
        self._reader = open_reader(library, ground.files, setting, direct, on, ground.pinned)

    def measure(self) -> tuple[float, bool]:
        self._reader.prepare()
        return super().measure()

    def load(self) -> list[torch.Tensor]:
        places = self._places()
        self._reader.start([Read(i, self._ground.starts[i], place) for i, place in enumerate(places)], 0)()
        return places

    def close(self) -> None:
        self._reader.close()


class TensorLoad(Load):
    """InstantTensor: opened, iterated, closed."""

    def __init__(self, ground: Ground, direct: bool, num_files: int, places: Places, setting: Setting) -> None:
        super().__init__(ground, direct, num_files, places)
        self._setting = setting

    def load(self) -> list[torch.Tensor]:
        places = self._places()
        file, at = 0, 0
        with open_tensors(self._ground.files[: self._num_files], self._setting, self._ground.device) as opened:
            for _, tensor in opened.tensors():
                if at == places[file].numel():
                    file, at = file + 1, 0
                places[file][at : at + tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8))
                at += tensor.nbytes
        return places


class Offload(Load):
    """:func:`headrace.offload` of all layers in mode ``cpu``, pinned memory included; compared by a step."""

    def load(self) -> list[torch.Tensor]:
        layers = self._num_files * LAYERS_PER_FILE
        self._stack, self._handle = offload(self._ground, self._ground.folder, layers, "cpu", None)
        return []

    def check(self, found: Sequence[torch.Tensor]) -> bool:
        right = torch.equal(self._stack(self._ground.x), self._ground.resident(self._num_files))
        close(self._handle)
        del self._stack, self._handle
        return right


def offload(ground: Ground, path: Path, layers: int, mode: Mode, direct: bool | None) -> tuple[Any, headrace.Handle]:
    """A stack whose layers are all offloaded, two slots."""
    stack = meta_stack(ground.shape, layers)
    policy = headrace.Prefetch(1, 1, 2, params=[ALL_MODEL_PARAMS], mode=mode)
    disk = DiskOptions(direct=direct)
    return stack, headrace.offload(stack, policy, device=ground.device, checkpoint=path, disk=disk)


def close(handle: headrace.Handle) -> None:
    """Without the weights, which ``remove()`` would bring back."""
    handle._session._prefetcher.close()  # type: ignore[union-attr]


def cached_share(file: Path) -> float:
    """The part of ``file`` that is in the page cache."""
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        return resident_bytes(map_file(opened.fileno(), 0, size, read_only=True)) / size
