"""The identity of a file when it was opened; without torch, for the process that fills a staging ring."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import CheckpointError

__all__ = ["FileFingerprint", "fault", "opened", "require_file", "too_many_open"]

_AGAIN = "Download or copy it again."
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


@dataclass(frozen=True)
class FileFingerprint:
    """A file as it was when opened: size, modification time in ns since 1970, inode (of a link's target)."""

    path: Path
    num_bytes: int
    modified_ns: int
    inode: int

    def check(self) -> None:
        """Raise CheckpointError if the file on disk is gone or no longer the one that was opened."""
        with opened(self.path) as (_, now):
            if now != self:
                raise fault(self.path, str(self), str(now), "It changed while in use: open it again.")


def fault(path: Path, expected: str, found: str, fix: str = _AGAIN) -> CheckpointError:
    """The error for a file that differs from what it should be; ``fix`` says what to do."""
    return CheckpointError(f"{path}: expected {expected}; found {found}. {fix}")


def require_file(path: Path) -> None:
    """Raise CheckpointError for anything but a file or a folder: opening a pipe blocks until another process writes."""
    if kind := _KINDS.get(stat.S_IFMT(os.stat(path).st_mode)):
        raise fault(path, "a regular file", kind, "Write the weights to a file, or link to one.")


def too_many_open(error: OSError) -> str:
    """What to do about an error that the limit of open files has caused; empty for any other."""
    if error.errno != errno.EMFILE:
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"Raise the limit of open files (ulimit -n), which is {limit}, or save the weights in fewer shards."


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, FileFingerprint]]:
    """A file descriptor and the fingerprint of its file. Every OSError becomes a CheckpointError."""
    try:
        require_file(path)
        fd = os.open(path, os.O_RDONLY)
        try:
            status = os.fstat(fd)
            yield fd, FileFingerprint(path, status.st_size, status.st_mtime_ns, status.st_ino)
        finally:
            os.close(fd)
    except OSError as error:
        fix = too_many_open(error) or "Check the path, its permissions (`chmod u+rX` as the owner) and the disk."
        raise fault(path, f"files that user {os.geteuid()} can read", str(error.strerror), fix) from error
