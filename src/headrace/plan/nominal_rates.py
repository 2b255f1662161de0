"""Rates of machines that no probe has measured: nominal ones, and those of a data sheet."""

from __future__ import annotations

from dataclasses import replace

from headrace.plan.rates import Curve, Rates

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
    fetch_bytes_per_s=2e9,
    copies_take_cores=True,
    is_measured=False,
)
