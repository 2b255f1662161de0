"""What the process that reads for a staging ring is told, as JSON: nothing in it can run or needs a library to load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.checkpoint.fingerprint import FileFingerprint
from penstock.plan.ring_layout import Piece, RingLayout
from penstock.stores.file_reader import DiskOptions, File
from penstock.transfer.ring import Part

__all__ = ["RingTask"]


@dataclass(frozen=True)
class RingTask:
    """A ring to serve.

    Attributes:
        layout: of the ring.
        parts: the reads of every piece, by position; the sources are files.
        num_threads: readers.
        stuck_s: how long no read may end before the disk counts as dead.
        parent: process id of whom the ring is for.
    """

    layout: RingLayout
    parts: Sequence[Sequence[Part]]
    num_threads: int
    stuck_s: float
    parent: int

    def verify(self, position: int) -> None:
        """Raise ``TransferError`` if a file with bytes of this piece is no longer what it was stamped as."""
        for source in {part.source for part in self.parts[position]}:
            source.require_unchanged()

    @property
    def files(self) -> list[File]:
        """Those that are read, each once."""
        found = dict.fromkeys(part.source for parts in self.parts for part in parts)
        return [file for file in found if isinstance(file, File)]

    @property
    def descriptors(self) -> list[int]:
        """What the process has to inherit."""
        return sorted({fd for file in self.files for fd in file.descriptors if fd is not None})

    def dump(self) -> str:
        """For :meth:`load` in a process that has inherited :attr:`descriptors` under the same numbers."""
        numbers = {file: number for number, file in enumerate(self.files)}
        layout = self.layout
        return json.dumps(
            {
                "entry_bytes": layout.entry_bytes,
                "num_entries": layout.num_entries,
                "pieces": [(p.unit, p.start, p.num_bytes, p.entry) for p in layout.pieces],
                "following": layout.following,
                "parts": [[(numbers[p.source], *p[1:]) for p in parts] for parts in self.parts],  # type: ignore[index]
                "files": [_describe(file) for file in numbers],
                "num_threads": self.num_threads,
                "stuck_s": self.stuck_s,
                "parent": self.parent,
            }
        )

    @classmethod
    def load(cls, text: str) -> RingTask:
        """The task, with files that this process now owns; they are compared with their stamps by :meth:`verify`."""
        told = json.loads(text)
        files = [_inherited(file) for file in told["files"]]
        pieces = tuple(Piece(*piece) for piece in told["pieces"])
        # Who gives the copies needs to know the positions of a unit, and who serves them does not.
        layout = RingLayout(told["entry_bytes"], told["num_entries"], pieces, {}, tuple(told["following"]))
        parts = [[Part(files[number], *rest) for number, *rest in row] for row in told["parts"]]
        return cls(layout, parts, told["num_threads"], told["stuck_s"], told["parent"])


def _describe(file: File) -> dict[str, Any]:
    stamp = file.stamp
    return {
        "path": str(file.path),
        "descriptors": file.descriptors,
        "stamp": None if stamp is None else (stamp.num_bytes, stamp.modified_ns, stamp.inode),
        "direct": file.options.direct,
        "drop_cache": file.options.drop_cache,
    }


def _inherited(told: dict[str, Any]) -> File:
    fd, direct_fd = told["descriptors"]
    path, options = Path(told["path"]), DiskOptions(told["direct"], told["drop_cache"])
    stamp = None if told["stamp"] is None else FileFingerprint(path, *told["stamp"])
    return File(path, options, stamp, opened=(fd, direct_fd))
