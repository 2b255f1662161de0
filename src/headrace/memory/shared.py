"""Memory that processes of one host share: host memory by descriptor, and device memory that ranks can address.

*Host memory.* ``memfd_create(2)`` makes a file in memory that has no name: two models cannot collide, it cannot be
found by guessing, and the kernel frees it with the last process that maps it, however that process ends. A segment of
``shm_open`` would need a name and a tracker to unlink it, would outlive a kill of all processes, and would count
against the size of ``/dev/shm``, which containers limit to 64 MiB.

Other processes open it as ``/proc/PID/fd/N`` (proc(5)), which the kernel allows only to processes of the same user that
may inspect PID: the mode is 0600. The label of that link contains a random token, which shows when the number has been
reused for another file. The size is sealed, so an access to a mapping can never fault.

*Device memory.* torch's symmetric memory, over NVLink or PCIe peer access: every rank allocates the same size at the
same time. A rank's view of a peer's memory is an ordinary tensor on its own device, so a copy between the two is one
that copy engines carry out and graphs can capture. The physical memory stays until the last rank has closed its mapping
(CUDA driver API, virtual memory management: an imported handle keeps the allocation), so a view outlives the process
that it was made with.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed._symmetric_memory as symm
from torch._C._distributed_c10d import _SymmetricMemory

from headrace.errors import BudgetError, OptionError, PeerError
from headrace.memory.pages import map_file
from headrace.memory.system import dup_above_stdio
from headrace.ranks.group import RankGroup

_MFD_NOEXEC_SEAL = 0x0008  # <linux/memfd.h>, Linux 6.3; required where vm.memfd_noexec = 2
_F_SEAL_FUTURE_WRITE = 0x0010  # <linux/fcntl.h>, Linux 5.1
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
# Below this a huge page at the end could be more than the one percent that contract 3 leaves.
_HUGE_FROM_BYTES = 256 << 20
_MORE_FILES = "raise the limit of open files (ulimit -n)"


class SharedMemory:
    """A descriptor of shared memory; mappings made from it live on without it.

    Attributes:
        num_bytes: its size, sealed.
        token: random, hexadecimal; part of its label.
    """

    def __init__(self, fd: int, num_bytes: int, token: str) -> None:
        """Take over ``fd``; use :meth:`create` and :meth:`open`."""
        self.num_bytes, self.token = num_bytes, token
        self._fd = fd
        self.close = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """New memory, all zeros; its pages are allocated when they are first touched.

        Raises:
            BudgetError: the system grants no memory of that size.
        """
        token = secrets.token_hex(16)
        try:
            memory = cls(_new_file(f"headrace-{token}"), num_bytes, token)  # its finalizer closes it if anything fails
            os.fchmod(memory._fd, 0o600)
            os.ftruncate(memory._fd, num_bytes)
            fcntl.fcntl(memory._fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        except OSError as error:
            fix = _MORE_FILES if error.errno == errno.EMFILE else "offload less, or use mode 'cpu' or 'disk'"
            raise BudgetError(
                f"the system grants no {num_bytes} bytes of shared memory: {error.strerror}; {fix}", num_bytes
            ) from error
        return memory

    @classmethod
    def open(cls, address: Mapping[str, Any]) -> SharedMemory:
        """The memory that another process of this host has described with :meth:`describe`.

        Raises:
            PeerError: it cannot be opened from here, or is not that memory.
        """
        path = f"/proc/{address['pid']}/fd/{address['fd']}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            fix = (
                "the ranks of a host have to run as one user and see each other in /proc (same PID namespace, no "
                "hidepid, dumpable); start them so, or give each rank its own copy with mode 'cpu'"
            )
            raise PeerError(
                f"the shared memory of process {address['pid']} cannot be opened ({path}: {error.strerror}): "
                f"{_MORE_FILES if error.errno == errno.EMFILE else fix}"
            ) from error
        memory = cls(fd, address["num_bytes"], address["token"])
        try:
            memory._check(path)
        except PeerError:
            memory.close()
            raise
        return memory

    def _check(self, path: str) -> None:
        label, status = os.readlink(f"/proc/self/fd/{self._fd}"), os.fstat(self._fd)
        if f"headrace-{self.token}" not in label or status.st_size != self.num_bytes:
            raise PeerError(
                f"{path}: expected shared memory 'headrace-{self.token}' of {self.num_bytes} bytes, found {label!r} of "
                f"{status.st_size}: the process that made it has ended or is seen under another number here; start all "
                f"ranks anew, in one PID namespace"
            )
        sealed = fcntl.fcntl(self._fd, fcntl.F_GET_SEALS) & _SIZE_SEALS == _SIZE_SEALS
        if not sealed or stat.S_IMODE(status.st_mode) != 0o600 or status.st_uid != os.geteuid():
            raise PeerError(f"{path}: expected sealed memory of this user with mode 0600, found {status}")

    def fileno(self) -> int:
        """The descriptor, for a process that is to inherit it; valid until :meth:`close`."""
        return self._fd

    def describe(self) -> dict[str, Any]:
        """The arguments of :meth:`open` for another process, as JSON's types; valid until :meth:`close`."""
        return {"pid": os.getpid(), "fd": self._fd, "num_bytes": self.num_bytes, "token": self.token}

    def map(self, start: int, num_bytes: int, *, private: bool = False) -> torch.Tensor:
        """``num_bytes`` from ``start`` (a multiple of the page size) on: uint8, 1-D, host; keeps the memory alive.

        ``private``: a write stays in this process; pages that were not written to are still shared.

        Raises:
            BudgetError: the system has no address space for it.
        """
        huge = self.num_bytes >= _HUGE_FROM_BYTES
        try:
            return torch.from_numpy(map_file(self._fd, start, num_bytes, private=private, huge=huge))
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise BudgetError(
                f"the system maps no {num_bytes} bytes of shared memory: {error.strerror}; check `ulimit -v` and "
                f"vm.max_map_count, or use mode 'cpu' or 'disk'",
                num_bytes,
            ) from error

    def forbid_writing(self) -> None:
        """Forbid new writable shared mappings; existing mappings stay writable."""
        with suppress(OSError):  # an older kernel
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)


def _new_file(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return dup_above_stdio(os.memfd_create(name, flags | _MFD_NOEXEC_SEAL))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return dup_above_stdio(os.memfd_create(name, flags))  # an older kernel


# -- device memory ---------------------------------------------------------------------------------------------------


class SymmetricMemory:
    """``num_bytes`` on each rank's device.

    Attributes:
        rank: this process.
        views: the memory of each rank as a tensor on ``device`` (uint8, 1-D).
    """

    def __init__(self, num_bytes: int, device: torch.device, ranks: RankGroup) -> None:
        """Collective; uninitialised.

        Raises:
            OptionError: the devices cannot address one another.
            PeerError: another rank failed, ended or did not come in time.
            torch.OutOfMemoryError: no room on this one.
        """
        self.rank = ranks.rank
        self._timeout_ms = int(ranks.timeout_s * 1e3)
        with torch.cuda.device(device):
            try:
                # What symm.empty calls. That takes it from a pool, which would keep freed memory.
                local = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
            except RuntimeError as error:
                raise torch.OutOfMemoryError(f"{device}: no room for {num_bytes} bytes: {error}") from error
            ranks.exchange("allocate")  # torch's rendezvous does not notice a rank that had no memory
            try:
                self._handle = symm.rendezvous(local, ranks.process_group.group_name)
            except RuntimeError as error:
                raise OptionError(
                    f"{device} and the devices of the other ranks cannot address one another's memory "
                    f"({str(error).strip().splitlines()[0]}); give every rank a device of its own, all of one host "
                    f"with peer access (nvidia-smi topo -p2p r), or offload without group="
                ) from error
            self.views = [
                local if rank == self.rank else self._handle.get_buffer(rank, (num_bytes,), torch.uint8)
                for rank in range(ranks.size)
            ]

    @property
    def local(self) -> torch.Tensor:
        """Memory of this rank: uint8, 1-D."""
        return self.views[self.rank]

    def barrier(self) -> None:
        """Let the current stream wait until the current streams of all ranks have come here.

        A rank that does not come within the timeout of the group makes the kernel trap: the next call that waits for
        this device raises, in graphs too, and nothing that was to follow runs.
        """
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)
