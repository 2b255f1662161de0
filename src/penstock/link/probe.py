"""What this machine can do: the rates a plan is made from, measured once and kept.

Every figure is the median of a few timed runs over buffers far larger than caches. Rates are in bytes per second,
except ``matmul_flops_per_s``. The result is stored per machine (devices, CPU, torch) under the user's cache folder, so
that planning costs nothing.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from penstock.errors import OptionError
from penstock.link.measuring import measured_rates
from penstock.plan.cost import NOMINAL_CPU, NOMINAL_GPU, Curve, Rates
from penstock.plan.machine import Machine
from penstock.store.digest import json_digest

__all__ = ["Probe", "cache_path", "load", "measure", "planning_rates", "read_probe", "save"]

MIB = 1 << 20
SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Probe:
    """Measured rates of one machine.

    Attributes:
        machine: what was measured; a probe counts only where this is the same.
        h2d_bytes_per_s: pinned host to device, by bytes of one copy. Empty without a GPU, as the next four.
        uva_read_bytes_per_s: an elementwise kernel that reads pinned host memory in place.
        uva_gather_bytes_per_s: gathering rows in place, by bytes of a row.
        pin_bytes_per_s: mapping, touching and registering host memory.
        device_copy_bytes_per_s: device to device, bytes read plus bytes written.
        matmul_flops_per_s: an 8192-cubed bf16 product on the GPU.
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
    uva_read_bytes_per_s: float | None = None
    uva_gather_bytes_per_s: dict[int, float] = field(default_factory=dict)
    pin_bytes_per_s: float | None = None
    device_copy_bytes_per_s: float | None = None
    matmul_flops_per_s: float | None = None
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
        total = self.machine.get("device_bytes")  # the first probes did not say
        return Machine(self.machine["devices"].split(", ")[0], None if total is None else int(total))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Probe:
        """The inverse of :meth:`to_json`; raises ``ValueError`` on another schema."""
        values = dict(data)
        if values.pop("schema", None) != SCHEMA_VERSION:
            raise ValueError(f"probe schema {data.get('schema')!r}, expected {SCHEMA_VERSION}")
        for name in (name for name, value in values.items() if isinstance(value, dict) and name != "machine"):
            values[name] = {int(size): rate for size, rate in values[name].items()}
        return cls(**values)

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
        "cpu": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "devices": ", ".join(devices) or "none",
        "device_bytes": str(torch.cuda.get_device_properties(0).total_memory) if devices else "0",
        "torch": torch.__version__,
    }


def cache_path() -> Path:
    """Where the probe of this machine is kept (``XDG_CACHE_HOME``, else ``~/.cache``)."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "penstock" / f"probe-{json_digest(describe_machine())[:16]}.json"


def load() -> Probe | None:
    """The kept probe of this machine, or ``None`` if there is none that can be read."""
    try:
        probe = Probe.from_json(json.loads(cache_path().read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return probe if probe.machine == describe_machine() else None


def read_probe(path: Path) -> Probe:
    """A probe that ``penstock probe --json`` printed, of any machine.

    Raises:
        OptionError: no such file, or no probe of this version in it.
    """
    try:
        probe = Probe.from_json(json.loads(path.read_text()))
        _ = probe.planned_machine, probe.gpu_rates() or probe.cpu_rates()  # what is missing shows here
        return probe
    except OSError as error:
        raise OptionError(
            f"{str(path)!r}: expected a file that `penstock probe --json` printed: {error.strerror}"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        found = f"no key {error}" if isinstance(error, KeyError) else error
        raise OptionError(
            f"{str(path)!r}: expected what `penstock probe --json` of this version printed, found: {found}; run it "
            f"again on that machine"
        ) from error


def save(probe: Probe) -> Path:
    """Keep ``probe``; returns where."""
    path = cache_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(probe.to_json(), indent=1))
    return path


def measure(folder: Path | None = None, num_bytes: int = 1024 * MIB) -> Probe:
    """Measure everything; about half a minute. ``folder``: on the disk to read from (default: temporary files)."""
    return Probe(describe_machine(), **measured_rates(folder, num_bytes))
