"""The machine a plan was made for: what has to be the same where it is carried out."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import format_gib

__all__ = ["Machine"]


@dataclass(frozen=True)
class Machine:
    """A device as a plan sees it. Nothing here changes between reboots, and no name of a host is kept.

    Attributes:
        device: ``"cpu"``, or the name of the GPU as the driver reports it.
        device_bytes: total memory of the GPU; ``None`` for a CPU, whose memory is that of the host, and for a GPU of
            which nobody said.
    """

    device: str
    device_bytes: int | None = None

    def __str__(self) -> str:
        return self.device if self.device_bytes is None else f"{self.device} with {format_gib(self.device_bytes)}"

    def suits(self, here: Machine) -> bool:
        """Whether a plan made for this machine may be carried out on ``here``: the same device, no less memory."""
        return self.device == here.device and (self.device_bytes or 0) <= (here.device_bytes or 0)
