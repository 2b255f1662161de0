"""The memory and the cores of this process and its machine: what is in use, and the limits of what can be taken."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import re
import resource
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from headrace.config import number_in
from headrace.errors import LimitError
from headrace.formatting import format_size

if TYPE_CHECKING:
    import torch

_Item = TypeVar("_Item")

DEVICE = "device memory"
PEER = "memory of the peer GPU"

SYSFS = Path("/sys")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
# Limit, use, and prefix of the counters of page cache; of v2 and v1.
_CGROUP_FILES = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
_MOST_READERS = 1024
_MOST_TOUCHING = 16
_CAP_IPC_LOCK = 14  # capabilities(7), linux/capability.h


def rss_bytes() -> int:
    """Resident memory now, in bytes (``VmRSS``)."""
    return _kib_line("VmRSS", _read("/proc/self/status")) or 0


def peak_rss_bytes() -> int:
    """The most resident memory so far, in bytes (``VmHWM``)."""
    return _kib_line("VmHWM", _read("/proc/self/status")) or 0


def is_wsl() -> bool:
    """Whether Linux runs inside Windows (Windows Subsystem for Linux, whose kernel says so in its release)."""
    return "microsoft" in os.uname().release.lower()


def num_cores() -> int:
    """Cores this process may use; not ``os.cpu_count()``: a container may have a few cores of many."""
    return len(os.sched_getaffinity(0))


def reader_threads(at_least: int = 1, at_most: int | None = None, spare_one_in: int | None = None) -> int:
    """Threads that read files: ``HEADRACE_READERS``, or one per core, within ``at_least`` and ``at_most``.

    ``spare_one_in``: one core of so many is left free.
    """
    if (asked := number_in("HEADRACE_READERS", "threads", _MOST_READERS)) is not None:
        return asked
    cores = num_cores()
    if spare_one_in is not None:
        cores -= cores // spare_one_in
    return max(at_least, cores if at_most is None else min(cores, at_most))


# Requests of up to 2 MiB, of a thread each, by which experts are read: NVMe drives need as many for their rate.
EXPERT_READERS = 16


def touch_threads(at_least: int = 1) -> int:
    """Threads that touch or fill host memory, see :func:`reader_threads`; more than sixteen are no faster."""
    return min(_MOST_TOUCHING, reader_threads(at_least))


def each_in_threads(work: Callable[[_Item], object], items: Iterable[_Item], num_threads: int) -> None:
    """Call ``work`` with each of ``items`` in threads; here, with all again, if one cannot start, as at exit."""
    items, results = list(items), None
    with ThreadPoolExecutor(num_threads) as pool:
        with suppress(RuntimeError):  # at the end those that were started are waited for
            results = pool.map(work, items)
        for _ in results or ():
            pass
    for item in items if results is None else ():
        work(item)


def round_up(number: int, step: int) -> int:
    """The least multiple of ``step`` that is not below ``number``."""
    return -(-number // step) * step


def trim_heap() -> None:
    """Return free memory inside the C heap to the system (``malloc_trim(3)``); no effect without glibc."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage collection of cycles within the block."""
    # A large checkpoint makes 46,000 tensors. They would trigger many collections, each over all objects of torch.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def dup_above_stdio(fd: int) -> int:
    """``fd``, or, in place of it, a copy from 3 on: what a child inherits as 0, 1 or 2 is replaced by its own streams.

    A program that was started with one of them closed gets that number for the next file it opens.
    """
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


class PeakMeter:
    """Meter of the most by which resident memory grows from here on.

    Resets the kernel's high-water mark (``proc(5)``, ``/proc/pid/clear_refs``, value 5). Where that is not allowed an
    earlier peak stays in the value, which then is too high and never too low.
    """

    def __init__(self) -> None:
        self._start_bytes = rss_bytes()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def growth_bytes(self) -> int:
        """The high-water mark less what was resident at the start."""
        return max(0, peak_rss_bytes() - self._start_bytes)


# -- what can still be taken -------------------------------------------------------------------------------------------


def host_available_bytes(meminfo: str | None = None) -> int | None:
    """Bytes that this process can take without swapping: ``MemAvailable`` of proc(5), reclaimable page cache included.

    Within its limit of address space (``ulimit -v``), which mapped files and stacks of threads take from, too.

    Args:
        meminfo: text of ``/proc/meminfo``; default that of this machine.

    Returns:
        bytes; ``None`` where the kernel does not report it.
    """
    available = _kib_line("MemAvailable", _read("/proc/meminfo", meminfo))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if available is None or limit == resource.RLIM_INFINITY:
        return available
    return max(0, min(available, limit - (_kib_line("VmSize", _read("/proc/self/status")) or 0)))


def cgroup_available_bytes(membership: str | None = None, root: Path = _CGROUP_ROOT) -> int | None:
    """Bytes that control groups leave this process: the least over its own group and all above, of v1 and v2.

    A group leaves its limit less its use; page cache counts as free, since the kernel takes it back before it kills a
    process (cgroups(7); Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst). A container sees its own group
    as the root, under whatever path the host has for it: levels that are not there are passed over.

    Args:
        membership: text of ``/proc/self/cgroup``; default that of this process.
        root: where the hierarchies are mounted.

    Returns:
        bytes, at least 0; ``None`` without a limit.
    """
    levels = group_levels("memory", membership, root)
    return min((left for level in levels if (left := _left_in(level)) is not None), default=None)


def memlock_bytes(status: str | None = None, soft_limit: int | None = None) -> int | None:
    """Bytes that ``RLIMIT_MEMLOCK`` lets this process lock beyond what it has locked; ``None``: no limit binds it.

    Args:
        status: text of ``/proc/self/status``; default that of this process.
        soft_limit: bytes, ``resource.RLIM_INFINITY`` for none; default that of this process.
    """
    text = _read("/proc/self/status", status)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if soft_limit is None else soft_limit
    capabilities = re.search(r"^CapEff:\s+([0-9a-f]+)$", text, re.MULTILINE)
    if limit == resource.RLIM_INFINITY or (capabilities and int(capabilities[1], 16) >> _CAP_IPC_LOCK & 1):
        return None
    return max(0, limit - (_kib_line("VmLck", text) or 0))


def group_levels(controller: str, membership: str | None = None, root: Path = _CGROUP_ROOT) -> Iterator[Path]:
    """The folders of the groups in which ``controller`` (``memory``, ``cpu``) counts this process, innermost first."""
    for line in _read("/proc/self/cgroup", membership).splitlines():
        hierarchy, _, others = line.partition(":")
        controllers, _, path = others.partition(":")
        if hierarchy == "0" and not controllers:
            mount = root
        elif controller in controllers.split(","):
            mount = root / controller
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for count in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:count])


def _left_in(level: Path) -> int | None:
    """Limit less use of one group; ``None`` if it has no limit, or if there is no such group here."""
    for limit_file, use_file, prefix in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # no such file; "max"
            limit = int((level / limit_file).read_text())
            if limit >= 2**62:  # what v1 calls unlimited: the largest multiple of a page
                continue
            used = int((level / use_file).read_text())
            return max(0, limit - max(0, used - _page_cache_bytes(level, prefix)))
    return None


def _page_cache_bytes(level: Path, prefix: str) -> int:
    """Pages of files on the kernel's lists, which hold neither locked nor shared anonymous memory."""
    with suppress(OSError):
        found = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", (level / "memory.stat").read_text(), re.MULTILINE)
        return sum(map(int, found))
    return 0


# -- the limits that plans are held against ----------------------------------------------------------------------------
#
# A plan is refused only for what is certain to be missing (contract 3): memory that the kernel or torch's allocator
# would free on demand counts as free.


class _Device(Protocol):
    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


@dataclass(frozen=True)
class Needs:
    """Bytes that carrying out a plan adds to what is in use at its peak; ``pinned_bytes`` are among ``host_bytes``."""

    device_bytes: int = 0
    host_bytes: int = 0
    pinned_bytes: int = 0
    peer_bytes: int = 0


class Shortage(NamedTuple):
    """A limit that has no room for what is needed, in bytes, and what frees some."""

    limit: str
    needed: int
    available: int
    fix: str


@dataclass(frozen=True)
class Limits:
    """Bytes that can still be taken; ``None`` means not limited, or not known.

    Attributes:
        device_free_bytes: memory of the GPU, blocks that torch's allocator holds but does not use included.
        host_available_bytes: host memory that programs can take without swapping.
        cgroup_available_bytes: what the control groups of this process leave it.
        memlock_bytes: host memory that may be pinned.
        peer_free_bytes: memory of the GPU beside the one that computes.
    """

    device_free_bytes: int | None = None
    host_available_bytes: int | None = None
    cgroup_available_bytes: int | None = None
    memlock_bytes: int | None = None
    peer_free_bytes: int | None = None

    def shortage(self, needs: Needs) -> Shortage | None:
        """The limit that lacks most of ``needs``; ``None``: there is room for all of them."""
        group_fix = "raise the limit of the container or group (memory.max)"
        host_fix = "free host memory first (and raise `ulimit -v` if it is set)"
        group = "host memory under its cgroup's limit"
        checked = (
            (DEVICE, needs.device_bytes, self.device_free_bytes, "free device memory first"),
            ("host memory", needs.host_bytes, self.host_available_bytes, host_fix),
            (group, needs.host_bytes, self.cgroup_available_bytes, group_fix),
            ("locked memory (RLIMIT_MEMLOCK)", needs.pinned_bytes, self.memlock_bytes, "raise `ulimit -l`"),
            (PEER, needs.peer_bytes, self.peer_free_bytes, "use a smaller --peer-memory"),
        )
        exceeded = [
            Shortage(limit, needed, available, fix)
            for limit, needed, available, fix in checked
            if available is not None and needed > available
        ]
        return max(exceeded, key=lambda found: found.needed - found.available, default=None)


def read_limits(device: torch.device | _Device, *, pinned_bytes: int = 0) -> Limits:
    """The limits of this machine and process now.

    Args:
        device: where compute runs.
        pinned_bytes: how much would be pinned. Only if that is above ``RLIMIT_MEMLOCK`` is the driver asked whether it
            keeps to it, since most do not: measured with driver 580 as an ordinary user.
    """
    host, group = host_available_bytes(), cgroup_available_bytes()
    lockable = memlock_bytes() if device.type == "cuda" else None
    if lockable is not None:
        # One page above the limit is the smallest trial that a driver bound by it refuses.
        is_enough = lockable >= min(pinned_bytes, host or pinned_bytes, group or pinned_bytes)
        lockable = None if is_enough or _can_register(lockable + mmap.PAGESIZE) else lockable
    device_free = None
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device.index) - torch.cuda.memory_allocated(device.index)
        device_free = torch.cuda.mem_get_info(device.index)[0] + unused
    return Limits(device_free, host, group, lockable)


def _can_register(num_bytes: int) -> bool:
    """Whether the driver pins this much for this process."""
    import torch

    mapping = mmap.mmap(-1, num_bytes)
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    runtime = torch.cuda.cudart()
    registered = int(runtime.cudaHostRegister(address, num_bytes, 0)) == 0
    if registered:
        runtime.cudaHostUnregister(address)
    return registered


def require_disk(folder: str | os.PathLike[str], num_bytes: int, fix: str) -> None:
    """Refuse to write ``num_bytes`` below ``folder`` if its file system has no room for them.

    An offload itself writes nothing: its disk store reads the unmodified files.

    Args:
        fix: what the message tells the user to do.

    Raises:
        LimitError: there is not enough room.
    """
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        message = (
            f"{format_size(num_bytes)} are to be written in {folder} and {format_size(free)} are free on its disk: "
            f"{format_size(num_bytes - free)} too little; {fix}"
        )
        raise LimitError(message, "disk space", num_bytes, free)


# -- the processors near a GPU -----------------------------------------------------------------------------------------

# Formats: Documentation/ABI/testing/sysfs-bus-pci, sysfs-devices-node.


def parse_cpu_list(text: str) -> frozenset[int]:
    """The processors of a kernel list such as ``"0-3,8,10-11"``; an empty one has none.

    Raises:
        ValueError: not of that form.
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def local_cpus(address: str, allowed: Collection[int], sysfs: Path = SYSFS) -> frozenset[int] | None:
    """CPUs of ``allowed`` that share a memory node with the PCI device at ``address`` (``"0000:1b:00.0"``).

    ``None`` where there is nothing to choose: one node, a device without a node, or none of its processors allowed.
    """
    if len(list((sysfs / "devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    folder = sysfs / "bus/pci/devices" / address
    try:
        if int((folder / "numa_node").read_text()) < 0:
            return None
        near = parse_cpu_list((folder / "local_cpulist").read_text()) & frozenset(allowed)
    except (OSError, ValueError):  # a container without the device's folder
        return None
    return near if near and near != frozenset(allowed) else None


def cpus_near(device: torch.device) -> frozenset[int] | None:
    """The processors of this process near ``device``; ``None`` for a CPU or where there is nothing to choose."""
    if device.type != "cuda":
        return None
    import torch  # not at the top: the process that fills a staging ring has no torch

    return local_cpus(pci_address(torch.cuda.get_device_properties(device)), os.sched_getaffinity(0))


def pci_address(gpu: Any) -> str:
    """Address of ``gpu``, properties as torch has them, as sysfs writes it."""
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


# -- lines of proc(5) --------------------------------------------------------------------------------------------------


def _kib_line(key: str, text: str) -> int | None:
    """The bytes that a line of proc(5) such as ``VmRSS:   1234 kB`` gives; ``None``: there is no such line."""
    match = re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _read(path: str, given: str | None = None) -> str:
    if given is not None:
        return given
    with suppress(OSError):
        return Path(path).read_text()
    return ""
