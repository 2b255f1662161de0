"""The rates of a machine, measured by a probe or nominal, from which the cost model predicts times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
        fetch_bytes_per_s: of experts, by kernels that copy many at once into slots; ``None``: not known, and a budget
            caches no experts unless a rule says so.
        coded_share: bytes on the link of a byte that is copied.
        decode_s_per_byte: seconds per byte of compute, to decode a byte of a unit.
        copies_take_cores: a copy keeps the cores busy that compute needs (reading out of a CPU's page cache).
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
    coded_share: float = 1.0
    decode_s_per_byte: float = 0.0

    @property
    def file_s_per_byte(self) -> float:
        """Seconds to read a byte of a file before the link copies it; 0 where nothing is read first."""
        return 0.0 if self.file_bytes_per_s is None else 1 / self.file_bytes_per_s

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


# A PCIe 4.0 x16 link and a device of 1 TB/s and 150 TFLOP/s: the order of the workstation cards that most people have.
_NOMINAL_PRODUCT = Curve.of({1: 1.1e-12, 64: 1.2e-12, 256: 2e-12, 1024: 7e-12, 8192: 55e-12})
_NOMINAL_IN_PLACE = Curve.of({1: 45e-12, 128: 45e-12, 256: 70e-12, 2048: 360e-12, 8192: 1440e-12})
_FETCH_SHARE = 0.92  # of the link's rate: kernels that fetch experts, by the probe of an H200 (51.2 of 55.5 GB/s)
NOMINAL_GPU = Rates(
    machine="a nominal GPU on PCIe 4.0 x16 (no probe was run)",
    copy_bytes_per_s=Curve.of({2**18: 16e9, 2**20: 21e9, 2**24: 24e9, 2**26: 25e9}),
    product_s_per_byte=_NOMINAL_PRODUCT,
    grouped_s_per_byte=_NOMINAL_PRODUCT,
    in_place_s_per_byte=_NOMINAL_IN_PLACE,
    in_place_grouped_s_per_byte=_NOMINAL_IN_PLACE,
    kernel_s=2e-6,
    device_bytes_per_s=0.8e12,
    is_measured=False,
    file_bytes_per_s=3e9,  # one NVMe drive on PCIe 3.0 x4
    fetch_bytes_per_s=_FETCH_SHARE * 25e9,
)


def nominal_rates(device: str, link_bytes_per_s: float, memory_bytes_per_s: float, flops_per_s: float) -> Rates:
    """Rates from a GPU's data sheet: of its link, its memory, its bf16 matrix products.

    Kernels get the share of each that the probe of an H200 found of its own (64 GB/s, 4.8 TB/s, 989 TFLOPS).
    """
    link, memory, flops = 0.87 * link_bytes_per_s, 0.75 * memory_bytes_per_s, 0.82 * flops_per_s
    # A byte of a 16-bit weight takes one operation per row: half a multiplication and half an addition.
    product = Curve.of({rows: max(1 / memory, rows / flops) for rows in (1, 64, 128, 256, 512, 1024, 8192)})
    # Read in place, a weight crosses the link once per tile of 256 rows.
    in_place = Curve.of({rows: max(1.0, rows / 256) / (0.93 * link) for rows in (1, 128, 256, 512, 2048, 8192)})
    return replace(
        NOMINAL_GPU,
        machine=f"{device}, nominal",
        copy_bytes_per_s=Curve.of({2**18: 0.66 * link, 2**20: 0.88 * link, 2**24: link}),
        product_s_per_byte=product,
        grouped_s_per_byte=product,
        in_place_s_per_byte=in_place,
        in_place_grouped_s_per_byte=in_place,
        device_bytes_per_s=0.86 * memory_bytes_per_s,
        kernel_s=1.1e-6,
        fetch_bytes_per_s=_FETCH_SHARE * link,
    )


_NOMINAL_CPU_PRODUCT = Curve.of({1: 50e-12, 16: 60e-12, 256: 500e-12, 2048: 4e-9})
NOMINAL_CPU = Rates(
    machine="a nominal CPU (no probe was run)",
    copy_bytes_per_s=Curve.of({2**20: 2e9}),
    product_s_per_byte=_NOMINAL_CPU_PRODUCT,
    grouped_s_per_byte=_NOMINAL_CPU_PRODUCT,
    in_place_s_per_byte=None,
    in_place_grouped_s_per_byte=_NOMINAL_CPU_PRODUCT,  # out of the page cache, which is memory as any other
    kernel_s=10e-6,
    device_bytes_per_s=10e9,
    copies_take_cores=True,
    is_measured=False,
)
