"""What this machine can do: the rates a plan is made from, measured once and kept.

Every figure is the median of a few timed runs over buffers far larger than caches. The result is stored per machine
(devices, CPU, torch) under the user's cache folder, so that planning costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import platform
import stat
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.nn.functional as F

from headrace.errors import OptionError, warn_user
from headrace.memory.pinned import device_view, pinned_region
from headrace.memory.system import num_cores
from headrace.plan.cost_model import NOMINAL_CPU, NOMINAL_GPU, Curve, Rates, nominal_rates
from headrace.plan.plan import Machine
from headrace.stores.sources import DiskOptions, File

__all__ = [
    "COPY_SIZES",
    "MACHINES",
    "Probe",
    "cache_path",
    "load",
    "measure",
    "mutual_peers",
    "named_machine",
    "peer_rates",
    "planning_rates",
    "read_probe",
    "save",
]

MIB = 1 << 20
SCHEMA_VERSION = 2
COPY_SIZES = (MIB // 4, MIB, 4 * MIB, 16 * MIB, 256 * MIB)
_MAX_FILE_BYTES = MIB  # a probe has some kilobytes
_MAX_DIGITS = 18
_LEAST, _MOST = 1e-30, 1e30

# Of an 8-billion-parameter decoder's MLP: 100 MB in bf16, so that six of them pass through any cache.
_PRODUCT_SHAPE = (12288, 4096)
_PRODUCT_WEIGHTS = 6
_PRODUCT_ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# A layer's experts of a fine-grained mixture: 738 MB.
_EXPERTS_SHAPE = (64, 2816, 2048)
_EXPERT_ROWS = (1, 4, 16, 64, 128, 256, 1024)
_CPU_PRODUCT_ROWS = (1, 16, 256)


@dataclass(frozen=True)
class Probe:
    """Measured rates of one machine.

    Attributes:
        machine: what was measured; a probe counts only where this is the same.
        h2d_bytes_per_s: pinned host to device, by bytes of one copy. Empty without a GPU.
        device_copy_bytes_per_s: device to device, bytes read plus bytes written.
        product_s_per_byte: ``F.linear`` 4096 -> 12288 with a bf16 weight, per byte of it, by rows; within a graph, over
            weights that no cache holds. On a machine without a GPU: 4096 -> 8192 in float32.
        grouped_s_per_byte: ``F.grouped_mm`` over 64 experts of 2048 -> 2816, by rows per expert.
        in_place_s_per_byte, in_place_grouped_s_per_byte: both with the weight in pinned host memory.
        kernel_s: an elementwise kernel over 8 KiB, one of many in a graph.
        disk_read_bytes_per_s: reading a file past the page cache, with as many threads as cores.
        cached_read_bytes_per_s: the same out of the page cache.
        peer_bytes_per_s: from one other GPU's memory, by bytes of one copy. Empty, as the next one, where no two GPUs
            can address each other's memory, and in probes from before it was measured.
        gather_bytes_per_s: into each of so many GPUs while each copies from all the others, by their number.
    """

    machine: dict[str, str]
    h2d_bytes_per_s: dict[int, float] = field(default_factory=dict)
    device_copy_bytes_per_s: float | None = None
    product_s_per_byte: dict[int, float] = field(default_factory=dict)
    grouped_s_per_byte: dict[int, float] = field(default_factory=dict)
    in_place_s_per_byte: dict[int, float] = field(default_factory=dict)
    in_place_grouped_s_per_byte: dict[int, float] = field(default_factory=dict)
    kernel_s: float | None = None
    disk_read_bytes_per_s: float | None = None
    cached_read_bytes_per_s: float = 0.0
    peer_bytes_per_s: dict[int, float] = field(default_factory=dict)
    gather_bytes_per_s: dict[int, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {"schema": SCHEMA_VERSION, **asdict(self)}

    @property
    def planned_machine(self) -> Machine:
        """What plans made with this probe are for: its first GPU, or else its CPU."""
        if not self.h2d_bytes_per_s:
            return Machine("cpu")
        total = self.machine.get("device_bytes")  # absent from probes of older versions
        return Machine(self.machine["devices"].split(", ")[0], None if total is None else int(total))

    @classmethod
    def from_json(cls, data: object) -> Probe:
        """The inverse of :meth:`to_json`. What only earlier versions measured is ignored.

        Raises:
            ValueError: another schema, a value that no measurement gives, or too few to plan with.
        """
        schema = data.get("schema") if isinstance(data, dict) else data
        if not isinstance(data, dict) or schema != SCHEMA_VERSION:
            raise ValueError(f"schema {schema!r:.60}, expected {SCHEMA_VERSION}")
        values: dict[str, Any] = {"machine": _facts(data.get("machine", {}))}
        for each in fields(cls)[1:]:
            value = data.get(each.name)
            if each.default_factory is dict and each.name in data:
                values[each.name] = _curve(each.name, value)
            elif value is not None:  # None: the machine has no such thing, or does not report it
                values[each.name] = _positive(each.name, value)
        probe = cls(**values)
        # What plans for its device need.
        key, needed = "cpu", ["product_s_per_byte", "cached_read_bytes_per_s"]
        if probe.h2d_bytes_per_s:
            key, needed = "devices", ["product_s_per_byte", "grouped_s_per_byte", "in_place_s_per_byte"]
            needed += ["in_place_grouped_s_per_byte", "kernel_s", "device_copy_bytes_per_s"]
        if key not in probe.machine:
            raise ValueError(f"no key {key!r}")
        for name in needed:
            if not getattr(probe, name):
                raise ValueError(f"no value for {name!r}")
        return probe

    def gpu_rates(self) -> Rates | None:
        """For planning on this machine's GPU, weights in pinned host memory or in files; ``None`` if it has none."""
        if not self.h2d_bytes_per_s or not self.kernel_s or not self.device_copy_bytes_per_s:
            return None
        return Rates(
            machine=self.machine["devices"],
            copy_bytes_per_s=Curve.of(self.h2d_bytes_per_s),
            product_s_per_byte=Curve.of(self.product_s_per_byte),
            grouped_s_per_byte=Curve.of(self.grouped_s_per_byte),
            in_place_s_per_byte=Curve.of(self.in_place_s_per_byte),
            in_place_grouped_s_per_byte=Curve.of(self.in_place_grouped_s_per_byte),
            kernel_s=self.kernel_s,
            device_bytes_per_s=self.device_copy_bytes_per_s,
            # What is offloaded to files because the host has no room for it does not stay in its page cache either.
            file_bytes_per_s=self.disk_read_bytes_per_s or self.cached_read_bytes_per_s or None,
            peer_bytes_per_s=Curve.of(self.peer_bytes_per_s) if self.peer_bytes_per_s else None,
            gather_bytes_per_s=Curve.of(self.gather_bytes_per_s) if self.gather_bytes_per_s else None,
        )

    def cpu_rates(self, direct: bool = False) -> Rates:
        """For planning on this machine's CPU, weights in files, read past the page cache if ``direct``."""
        read = self.disk_read_bytes_per_s if direct else None
        # On a machine with a GPU the CPU's own products are not measured.
        product = NOMINAL_CPU.product_s_per_byte if self.h2d_bytes_per_s else Curve.of(self.product_s_per_byte)
        return replace(
            NOMINAL_CPU,
            machine=self.machine["cpu"],
            copy_bytes_per_s=Curve.of({MIB: read or self.cached_read_bytes_per_s}),
            product_s_per_byte=product,
            grouped_s_per_byte=product,
            copies_take_cores=read is None,
            is_measured=True,
        )


def planning_rates(device: torch.device, direct: bool = False) -> Rates:
    """What plans for ``device`` are made with: the kept probe of this machine, or else nominal figures."""
    probe = load()
    if device.type == "cpu":
        return NOMINAL_CPU if probe is None else probe.cpu_rates(direct)
    return (probe.gpu_rates() if probe is not None else None) or NOMINAL_GPU


def describe_machine() -> dict[str, str]:
    """What a probe is valid for."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "host": platform.node(),
        "cpu": f"{platform.machine()}, {num_cores()} cores",
        "devices": ", ".join(devices) or "none",
        "device_bytes": str(torch.cuda.get_device_properties(0).total_memory) if devices else "0",
        "torch": torch.__version__,
    }


def cache_path() -> Path | None:
    """Where the probe of this machine is kept (``XDG_CACHE_HOME``, else ``~/.cache``); ``None`` without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:  # neither HOME nor an entry in passwd, as a container with a bare user id has it
        return None
    machine = hashlib.sha256(json.dumps(describe_machine(), sort_keys=True).encode()).hexdigest()
    return folder / "headrace" / f"probe-{machine[:16]}.json"


def load() -> Probe | None:
    """The kept probe of this machine; ``None`` without one, and with a warning for a file that is none."""
    path = cache_path()
    if path is None:
        return None
    try:
        probe = Probe.from_json(json.loads(_content(path)))
        if probe.machine == describe_machine():
            return probe
        found: object = "the probe of another machine"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        found = getattr(error, "strerror", None) or error
    _warn_once(
        f"{path}: expected the kept probe of this machine, found: {found}; plans use nominal rates until `headrace "
        f"probe` has measured again, or the file is deleted"
    )
    return None


_warn_once = cache(warn_user)


def _content(path: Path) -> bytes:
    """The content of a regular file; opening anything else may block forever."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("no regular file")
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise ValueError(f"more than {_MAX_FILE_BYTES} bytes")
    return content


def read_probe(path: Path) -> Probe:
    """A probe that ``headrace probe --json`` printed, of any machine.

    Raises:
        OptionError: no such file, or no probe of this version in it.
    """
    try:
        return Probe.from_json(json.loads(path.read_bytes()))
    except OSError as error:
        raise OptionError(
            f"machine {str(path)!r}: expected {', '.join(MACHINES)}, or a file that `headrace probe --json` printed on "
            f"that machine: {error.strerror}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise OptionError(
            f"{str(path)!r}: expected what `headrace probe --json` of this version printed, found: {error}; run it "
            f"again on that machine"
        ) from error


# Machines that plans can be made for by name: the GPU as torch names it, and no more memory than any driver leaves.
# Without a probe of theirs the rates follow from published figures: link (PCIe, one direction), memory, bf16 with sums
# in float32 and without sparsity.
_GIB = 2**30
_NOMINAL: dict[str, tuple[Machine, float, float, float]] = {
    # NVIDIA H100 Tensor Core GPU datasheet, column SXM: PCIe Gen5 x16, 3.35 TB/s, 989 TFLOPS.
    "h100": (Machine("NVIDIA H100 80GB HBM3", 79 * _GIB), 64e9, 3.35e12, 989e12),
    # NVIDIA Ada GPU architecture whitepaper, appendix A, GeForce RTX 4090: PCIe Gen4 x16, 1,008 GB/s, 165.2 TFLOPS.
    "4090": (Machine("NVIDIA GeForce RTX 4090", 47 * _GIB // 2), 32e9, 1.008e12, 165.2e12),
}
MACHINES = ("h200", *_NOMINAL)


def named_machine(machine: str | os.PathLike[str], direct: bool = False) -> tuple[Machine, Rates]:
    """What to plan with for ``machine``, one of ``MACHINES`` or a file of a probe.

    ``direct``: a machine without a GPU reads files past the page cache.

    Raises:
        OptionError: neither a name nor a file that holds a probe.
    """
    name = str(machine).lower()
    if name in _NOMINAL:
        made_for, *published = _NOMINAL[name]
        return made_for, nominal_rates(made_for.device, *published)
    if name == "h200":
        probe = read_probe(Path(__file__).with_name("h200.json"))
        made_for = Machine("NVIDIA H200", 139 * _GIB)  # not in the probe, which is from before it was kept
    else:
        probe = read_probe(Path(machine).expanduser())
        made_for = probe.planned_machine
    return made_for, probe.gpu_rates() or probe.cpu_rates(direct)


def save(probe: Probe) -> Path:
    """Keep ``probe``; returns where. A reader finds the file that was there before, or the whole new one.

    Raises:
        OptionError: there is no place for it.
    """
    path = cache_path()
    if path is None:
        raise OptionError(
            f"the probe cannot be kept: user {os.geteuid()} has no home folder (neither HOME nor an entry in passwd); "
            f"set XDG_CACHE_HOME to a folder for it"
        )
    draft = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(probe.to_json(), indent=1))
        draft.replace(path)
    except OSError as error:
        raise OptionError(
            f"{path}: the probe cannot be kept there: {error.strerror}; make room for it, or set XDG_CACHE_HOME to "
            f"another folder"
        ) from error
    finally:
        with suppress(OSError):
            draft.unlink()
    return path


# -- what a probe's file may hold --------------------------------------------------------------------------------------


def _facts(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(fact, str) for fact in value.values()):
        raise ValueError(f"machine: {value!r:.60}, expected texts by name")
    if not value.get("device_bytes", "0").isdecimal():
        raise ValueError(f"machine.device_bytes: {value['device_bytes']!r:.60}, expected a whole number")
    return value


def _curve(name: str, value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: {value!r:.60}, expected numbers by size")
    for size in value:
        if not (size.isascii() and size.isdecimal() and len(size) <= _MAX_DIGITS and int(size) > 0):
            raise ValueError(f"{name}: the size {size!r:.60}, expected a whole number above 0")
    return {int(size): _positive(f"{name}[{size}]", rate) for size, rate in value.items()}


def _positive(name: str, value: object) -> float:
    # Within these bounds no sum or quotient of rates overflows; NaN is not.
    if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST <= value <= _MOST:
        raise ValueError(f"{name}: {value!r:.60}, expected a finite number above 0")
    return value


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(folder: Path | None = None, num_bytes: int = 1024 * MIB) -> Probe:
    """Measure everything, over buffers of ``num_bytes``; about half a minute.

    ``folder``: on the disk to read from (default: temporary files).
    """
    rates: dict[str, Any] = dict(_disk(folder, num_bytes))
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        rates |= _cuda(device, num_bytes)
        rates |= peer_rates(device)  # last, when the other measurements have freed their memory
    else:
        weight = torch.randn(8192, 4096)
        rates["product_s_per_byte"] = {
            rows: median_s(partial(F.linear, _rows(rows, weight), weight)) / weight.nbytes for rows in _CPU_PRODUCT_ROWS
        }
    return Probe(describe_machine(), **rates)


def median_s(run: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of ``repeats`` calls, after one that does not count."""
    run()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _disk(folder: Path | None, num_bytes: int) -> dict[str, float | None]:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        block = os.urandom(16 * MIB)
        for _ in range(0, num_bytes, len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        path = Path(file.name)
        return {
            "cached_read_bytes_per_s": _read_rate(path, num_bytes, DiskOptions()),
            "disk_read_bytes_per_s": _read_rate(path, num_bytes, DiskOptions(direct=True)),
        }


def _read_rate(path: Path, num_bytes: int, options: DiskOptions) -> float | None:
    try:
        source = File(path, options)
    except ValueError:  # no direct I/O on this file system
        return None
    piece = 8 * MIB
    into = memoryview(mmap.mmap(-1, num_bytes))

    def read(start: int) -> None:
        source.read(start, into[start : start + piece])

    with ThreadPoolExecutor(num_cores()) as pool:
        seconds = median_s(lambda: list(pool.map(read, range(0, num_bytes, piece))), 3)
    source.close()
    return num_bytes / seconds


def _cuda(device: torch.device, num_bytes: int) -> dict[str, Any]:
    host = pinned_region(num_bytes)
    slot = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    other = torch.empty_like(slot)
    small = torch.zeros(2048, device=device)
    return {
        "h2d_bytes_per_s": {size: _copy_rate(slot, host, size, [device]) for size in COPY_SIZES},
        "device_copy_bytes_per_s": 2 * num_bytes / _timed(lambda: other.copy_(slot)),
        **_products(device, device_view(host, device)),
        "kernel_s": _timed(_graph(lambda: [small.add_(1.0) for _ in range(500)])) / 500,
    }


def _timed(run: Callable[[], object]) -> float:
    """Median seconds of ``run`` until the current device, which is the one that is measured, has done it."""

    def step() -> None:
        run()
        torch.cuda.synchronize()

    return median_s(step)


def _graph(run: Callable[[], object]) -> Callable[[], None]:
    """``run`` as a captured graph: the time in which the host launches kernels does not count."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _products(device: torch.device, in_place: torch.Tensor) -> dict[str, dict[int, float]]:
    bf16 = torch.bfloat16
    dense = [torch.randn(_PRODUCT_SHAPE, device=device, dtype=bf16) for _ in range(_PRODUCT_WEIGHTS)]
    experts = torch.randn(_EXPERTS_SHAPE, device=device, dtype=bf16)
    weight, weights = _like(dense[0], in_place), _like(experts, in_place)
    # In place, a wide product and a narrow one are tiled differently; the mean of both.
    wide, narrow = (_by_rows(_PRODUCT_ROWS, [w], F.linear) for w in (weight, weight.view(_PRODUCT_SHAPE[::-1])))
    return {
        "product_s_per_byte": _by_rows(_PRODUCT_ROWS, dense, F.linear),
        "grouped_s_per_byte": _by_rows(_EXPERT_ROWS, [experts], _grouped),
        "in_place_s_per_byte": {rows: (wide[rows] + narrow[rows]) / 2 for rows in wide},
        "in_place_grouped_s_per_byte": _by_rows(_EXPERT_ROWS, [weights], _grouped),
    }


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _by_rows(counts: Sequence[int], weights: Sequence[torch.Tensor], product: Product) -> dict[int, float]:
    """Seconds per byte of ``weights``, by rows (per expert, if they have experts), in a graph."""
    num_bytes = sum(weight.nbytes for weight in weights)
    per_count = len(weights[0]) if weights[0].dim() == 3 else 1

    def seconds(count: int) -> float:
        x = _rows(count * per_count, weights[0])
        return _timed(_graph(lambda: [product(x, weight) for weight in weights]))

    return {count: seconds(count) / num_bytes for count in counts}


def _grouped(x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    each = len(x) // len(experts)
    ends = torch.arange(each, len(x) + 1, each, device=x.device, dtype=torch.int32)
    return F.grouped_mm(x, experts.mT, offs=ends)


def _like(weight: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    return memory[: weight.nbytes].view(weight.dtype).view(weight.shape)


def _rows(count: int, weight: torch.Tensor) -> torch.Tensor:
    return torch.randn(count, weight.shape[-1], device=weight.device, dtype=weight.dtype)


def _copy_rate(into: torch.Tensor, source: torch.Tensor, size: int, devices: Sequence[torch.device]) -> float:
    """Bytes per second of copies of ``size`` bytes, one after the other; small ones are bound by their launches."""
    count = max(1, min(source.numel(), 512 * MIB) // size)

    def run() -> None:
        for i in range(count):
            piece = slice(i * size, (i + 1) * size)
            into[piece].copy_(source[piece], non_blocking=True)
        _wait_for(devices)

    return count * size / median_s(run)


# -- among devices ---------------------------------------------------------------------------------------------------


def peer_rates(device: torch.device, sizes: Sequence[int] = COPY_SIZES) -> dict[str, dict[int, float]]:
    """How fast devices copy from one another: one pair alone, and all at once. Raises nothing.

    Both are measured from this one process, by the copy engines. A pair alone says little of several: of four H200 that
    gather at once each gets less than a pair alone does.

    ``sizes``: bytes of one copy, ascending; the last is also that of each copy when all devices gather.

    Returns:
        fields of a :class:`Probe`; none where ``device`` has no peers.
    """
    try:
        devices = mutual_peers(device)
        if len(devices) < 2:
            return {}
        into, source = (torch.empty(2 * sizes[-1], dtype=torch.uint8, device=each) for each in devices[:2])
        pair = {size: _copy_rate(into, source, size, devices[:2]) for size in sizes}
        del into, source
        every = {count: _gather(devices[:count], sizes[-1]) for count in range(2, len(devices) + 1)}
    except RuntimeError as error:  # no room on a peer that others use, a driver that refuses; plans do without
        reason = str(error).strip().splitlines()[0]
        warn_user(f"copies between devices could not be measured: {reason}")
        return {}
    return {"peer_bytes_per_s": pair, "gather_bytes_per_s": every}


def mutual_peers(device: torch.device) -> list[torch.device]:
    """``device``, and others of its kind such that each can address the memory of each."""
    can_access = torch.cuda.can_device_access_peer
    found = [device.index]
    for other in range(torch.cuda.device_count()):
        if other not in found and all(can_access(other, one) and can_access(one, other) for one in found):
            found.append(other)
    return [torch.device(device.type, index) for index in found]


def _gather(devices: Sequence[torch.device], size: int) -> float:
    """Bytes per second into each of ``devices`` while each copies ``size`` bytes from each of the others."""
    sources = [torch.empty(size, dtype=torch.uint8, device=device) for device in devices]
    copies = []
    for step in range(1, len(devices)):  # as the link of sharded_gpu does it: every device begins with its neighbour
        for index, device in enumerate(devices):
            source = sources[(index + step) % len(devices)]
            # torch lets the current streams of both devices wait for a copy between them, so copies side by side need
            # streams of their own on either.
            streams = torch.cuda.Stream(device), torch.cuda.Stream(source.device)
            copies.append((torch.empty_like(source, device=device), source, *streams))

    def run() -> None:
        for into, source, stream, source_stream in copies:
            with torch.cuda.stream(stream), torch.cuda.stream(source_stream):
                into.copy_(source, non_blocking=True)
        _wait_for(devices)

    return (len(devices) - 1) * size / median_s(run)


def _wait_for(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)
