"""The rates of a machine, measured by a probe or nominal, from which the cost model predicts times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Curve:
    """A rate or time measured at some sizes, and interpolated between them on logarithmic axes.

    Attributes:
        points: (size, value), ascending sizes, positive values. Beyond the ends the end values hold.
    """

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, values: Mapping[int, float]) -> Curve:
        """From a table of measurements."""
        return cls(tuple(sorted((float(size), value) for size, value in values.items())))

    def __call__(self, size: float) -> float:
        """The value at ``size``."""
        # Thousands of tensors have a few sizes.
        if size not in self._known:
            self._known[size] = float(self.over(np.array(size)))
        return self._known[size]

    def of_rows(self, rows: float) -> float:
        """The value at ``rows``, of a time of products; beyond the last that was measured it grows with them."""
        return self(rows) * max(1.0, rows / self.points[-1][0])

    def over(self, sizes: Floats) -> Floats:
        """The values at many positive sizes."""
        values: Floats = np.exp(np.interp(np.log(sizes), *np.log(self.points).T))
        return values

    @cached_property
    def _known(self) -> dict[float, float]:
        return {}


# Peers with links of their own are at least so many times as fast as the own link. Over PCIe they are as fast, within
# the error of measurement; a bridge of NVLink between workstation cards has twice the rate of PCIe 4.0.
OWN_LINKS = 1.25


@dataclass(frozen=True)
class Rates:
    """The rates of a machine that planning needs; ``headrace probe`` measures them.

    Attributes:
        machine: for people.
        copy_bytes_per_s: from the store into a slot, by bytes of one copy.
        product_s_per_byte: time of a matrix product per byte of its resident 16-bit weight, by rows; holds both the
            reading of the weight and the arithmetic.
        grouped_s_per_byte: seconds per byte of a grouped product over experts, by rows per expert.
        in_place_s_per_byte, in_place_grouped_s_per_byte: the same for weights in host memory that are read in place;
            ``None`` where only lookups can be (on a CPU dense weights are not: a step reads every page of them).
        kernel_s: an empty kernel, among others in a graph.
        device_bytes_per_s: elementwise kernels, bytes read plus bytes written.
        file_bytes_per_s: reading files with all threads, before the link to a GPU; ``None``: not known, or on a CPU,
            where ``copy_bytes_per_s`` is the rate of files.
        peer_bytes_per_s: from the memory of one other device (a peer), by bytes of one copy; ``None``: not known.
        gather_bytes_per_s: into each of so many devices that copy from all the others at once, large copies, by their
            number; ``None``: as fast as from one other device.
        cpu_bytes_per_s: at which the CPU computes experts while the link copies, by format (``"bf16"``, ``"mxfp4"``,
            ...); empty: not known.
        fetch_bytes_per_s: of experts, by kernels that copy many at once into slots, or on a CPU from files by many
            requests at a time; ``None``: not known, and a budget caches no experts unless a rule says so.
        coded_share: bytes on the link of a byte that is copied.
        decode_s_per_byte: seconds per byte of compute, to decode a byte of a unit.
        copies_take_cores: a copy keeps the cores busy that compute needs (reading out of a CPU's page cache).
        layer_s: the kernels of a layer beside the reading of its weights, inside an engine that fuses them
            (:mod:`headrace.plan.engines`); ``None``: as many as its tensors and the profile say.
        is_measured: false for nominal rates, where no probe was run.
    """

    machine: str
    copy_bytes_per_s: Curve
    product_s_per_byte: Curve
    grouped_s_per_byte: Curve
    in_place_s_per_byte: Curve | None
    in_place_grouped_s_per_byte: Curve | None
    kernel_s: float
    device_bytes_per_s: float
    copies_take_cores: bool = False
    is_measured: bool = True
    file_bytes_per_s: float | None = None
    peer_bytes_per_s: Curve | None = None
    gather_bytes_per_s: Curve | None = None
    fetch_bytes_per_s: float | None = None
    cpu_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    coded_share: float = 1.0
    decode_s_per_byte: float = 0.0
    layer_s: float | None = None

    @property
    def file_s_per_byte(self) -> float:
        """Seconds to read a byte of a file before the link copies it; 0 where nothing is read first."""
        return 0.0 if self.file_bytes_per_s is None else 1 / self.file_bytes_per_s

    @property
    def expert_bytes_per_s(self) -> float:
        """``fetch_bytes_per_s``, or if that is not known, that of the largest copies."""
        return self.fetch_bytes_per_s or self.copy_bytes_per_s.points[-1][1]

    def copy_s(self, num_bytes: float) -> float:
        """Seconds of one copy over the link."""
        return num_bytes / self.copy_bytes_per_s(max(num_bytes, 1.0)) if num_bytes > 0 else 0.0

    def copies_s(self, num_bytes: Floats) -> Floats:
        """Seconds of each of many copies of more than 0 bytes."""
        return num_bytes / self.copy_bytes_per_s.over(num_bytes)

    @cached_property
    def from_peer_bytes_per_s(self) -> Curve:
        """``peer_bytes_per_s``, or if that is not known, the least of a peer with a link of its own."""
        if self.peer_bytes_per_s is not None:
            return self.peer_bytes_per_s
        return Curve(tuple((size, OWN_LINKS * rate) for size, rate in self.copy_bytes_per_s.points))
