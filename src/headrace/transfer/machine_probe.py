"""Rates of this machine that plans are made from, measured once (:mod:`headrace.transfer.measuring`) and kept.

The result is stored per machine (devices, CPU, torch) under the user's cache folder, so that planning costs nothing.
"""

from __future__ import annotations

import ctypes
import difflib
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.config import cache_folder
from headrace.errors import OptionError, OptionTypeError, warn_user
from headrace.json_files import decode, encode, parse, read_file, require, write_file
from headrace.memory.system import num_cores
from headrace.plan.nominal_rates import NOMINAL_CPU, NOMINAL_GPU, nominal_rates
from headrace.plan.plan import DeviceName, Machine
from headrace.plan.rates import Curve, Rates
from headrace.transfer.cards import GIB, MACHINES, OTHER_MAKERS, card_link_rate, find_card, rates_of_gpu, spelling

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
SCHEMA_VERSION = 3  # in 2, experts seemed to be fetched 4/3 as fast


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
        fetch_bytes_per_s: of experts that a cache fetches; ``None`` without a GPU, where device and host memory cannot
            be mapped into one range, and in probes from before it was measured.
        disk_read_bytes_per_s: reading a file past the page cache, with as many threads as cores.
        expert_read_bytes_per_s: the same with as many requests at a time as experts are read by.
        cached_read_bytes_per_s: bytes per second out of the page cache.
        peer_bytes_per_s: from one other GPU's memory, by bytes of one copy. Empty, as the next one, where no two GPUs
            can address each other's memory, and in probes from before it was measured.
        gather_bytes_per_s: into each of so many GPUs while each copies from all the others, by their number.
        cpu_bytes_per_s: at which the CPU computes experts while the link copies, by format. Empty without a GPU, with
            one core, without a C compiler, and in probes from before it was measured.
    """

    machine: dict[str, str]
    h2d_bytes_per_s: dict[int, float] = field(default_factory=dict)
    device_copy_bytes_per_s: float | None = None
    product_s_per_byte: dict[int, float] = field(default_factory=dict)
    grouped_s_per_byte: dict[int, float] = field(default_factory=dict)
    in_place_s_per_byte: dict[int, float] = field(default_factory=dict)
    in_place_grouped_s_per_byte: dict[int, float] = field(default_factory=dict)
    kernel_s: float | None = None
    fetch_bytes_per_s: float | None = None
    disk_read_bytes_per_s: float | None = None
    expert_read_bytes_per_s: float | None = None
    cached_read_bytes_per_s: float = 0.0
    peer_bytes_per_s: dict[int, float] = field(default_factory=dict)
    gather_bytes_per_s: dict[int, float] = field(default_factory=dict)
    cpu_bytes_per_s: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {"schema": SCHEMA_VERSION, **encode(self)}

    @property
    def planned_machine(self) -> Machine:
        """Machine of plans made with this probe: its first GPU, or else its CPU."""
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
        # None: the machine has no such thing, or does not report it.
        probe: Probe = decode(cls, {name: value for name, value in data.items() if value is not None})
        total = probe.machine.get("device_bytes", "0")
        require(total.isdecimal(), "machine.device_bytes", "a whole number", total)
        forms = probe.cpu_bytes_per_s
        require(forms.keys() <= {"bf16", "mxfp4"}, "cpu_bytes_per_s", "rates by 'bf16' and 'mxfp4'", forms)
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
        """Rates for this machine's GPU, weights in pinned host memory or in files; ``None`` if it has none."""
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
            fetch_bytes_per_s=self.fetch_bytes_per_s,
            cpu_bytes_per_s=self.cpu_bytes_per_s,
        )

    def cpu_rates(self, direct: bool = False) -> Rates:
        """Rates for this machine's CPU, weights in files, read past the page cache if ``direct``."""
        read = self.disk_read_bytes_per_s if direct else None
        # On a machine with a GPU the CPU's own products are not measured.
        product = NOMINAL_CPU.product_s_per_byte if self.h2d_bytes_per_s else Curve.of(self.product_s_per_byte)
        return replace(
            NOMINAL_CPU,
            machine=self.machine["cpu"],
            copy_bytes_per_s=Curve.of({MIB: read or self.cached_read_bytes_per_s}),
            product_s_per_byte=product,
            grouped_s_per_byte=product,
            in_place_grouped_s_per_byte=None if direct else product,  # mapped pages are those of the page cache
            fetch_bytes_per_s=self.expert_read_bytes_per_s or self.disk_read_bytes_per_s,
            copies_take_cores=read is None,
            is_measured=True,
        )


def planning_rates(device: torch.device | DeviceName, direct: bool = False, in_group: bool = False) -> Rates:
    """The rates that plans for ``device`` use: those of the saved probe of this machine, or else nominal ones.

    Beside the nominal ones of a GPU its link is measured now, in 0.3 s. ``in_group``: others plan, too, and all have to
    come to one plan, so it is not.
    """
    probe = load()
    if device.type == "cpu":
        nominal = replace(NOMINAL_CPU, in_place_grouped_s_per_byte=None) if direct else NOMINAL_CPU
        return nominal if probe is None else probe.cpu_rates(direct)
    return _gpu_rates(probe, device, in_group)


def _gpu_rates(probe: Probe | None, device: torch.device | DeviceName, in_group: bool) -> Rates:
    if probe is not None and (measured := probe.gpu_rates()) is not None:
        names = probe.machine["devices"].split(", ")
        if not device.index or names[device.index] == names[0]:  # the first is what was measured
            return measured
    if not may_have_gpu():
        return NOMINAL_GPU
    nominal = rates_of_gpu(device.index, of_card_alone=in_group)
    if in_group or isinstance(device, DeviceName):
        return nominal
    from headrace.transfer.link_rates import with_measured_link

    return with_measured_link(nominal, device)


def describe_machine() -> dict[str, str]:
    """Description of the hardware that a probe is valid for."""
    devices, device_bytes = [], 0
    if may_have_gpu():
        import torch

        devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        device_bytes = torch.cuda.get_device_properties(0).total_memory if devices else 0
    return {
        "host": platform.node(),
        "cpu": f"{platform.machine()}, {num_cores()} cores",
        "devices": ", ".join(devices) or "none",
        "device_bytes": str(device_bytes),
        "torch": _torch_build()["__version__"],
    }


def may_have_gpu() -> bool:
    """Whether torch may find a GPU here; where it cannot, as this says without it, its import of a second is saved."""
    if "torch" in sys.modules:
        import torch

        return torch.cuda.device_count() > 0
    build = _torch_build()
    if not (build.get("cuda") or build.get("hip")):
        return False
    try:
        ctypes.CDLL("libcuda.so.1")  # the driver's library
    except OSError:
        return Path("/dev/kfd").exists()  # the kernel's side of ROCm
    return True


@cache
def _torch_build() -> dict[str, str]:
    """``__version__`` of torch, and the versions of ``cuda`` and ``hip`` that it is built for, from its own file."""
    package: Any = find_spec("torch")
    text = Path(package.origin).with_name("version.py").read_text()
    return dict(re.findall(r"^(\w+)[^=\n]*= '(.*)'$", text, re.MULTILINE))


def cache_path(kind: str = "probe") -> Path | None:
    """File of the probe of this machine, or of another ``kind`` of measurement; ``None`` without a home."""
    folder = cache_folder()
    if folder is None:
        return None
    machine = hashlib.sha256(json.dumps(describe_machine(), sort_keys=True).encode()).hexdigest()
    return folder / f"{kind}-{machine[:16]}.json"


def load() -> Probe | None:
    """The kept probe of this machine; ``None`` without one, and with a warning for a file that is none."""
    again = "plans use nominal rates until `headrace probe` has measured again, or the file is deleted"
    return _kept("probe", Probe.from_json, "the kept probe", again)


@dataclass(frozen=True)
class _SharedLink:
    machine: dict[str, str]
    h2d_bytes_per_s: dict[int, float]


K = TypeVar("K", Probe, _SharedLink)


def _kept(kind: str, read: Callable[[Any], K], what: str, then: str) -> K | None:
    """The measurement ``kind`` of this machine; ``None`` without one, and with a warning for anything else."""
    path = cache_path(kind)
    if path is None or not os.path.lexists(path):
        return None
    try:
        kept = read(parse(read_file(path)))
        if kept.machine == describe_machine():
            return kept
        found: object = f"{what.replace('kept ', '')} of another machine"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or error
    _warn_once(f"{path}: expected {what} of this machine, found: {found}; {then}")
    return None


_warn_once = cache(warn_user)


def read_probe(path: Path) -> Probe:
    """A probe that ``headrace probe --json`` printed, of any machine.

    Raises:
        OptionError: no such file, or no probe of this version in it.
    """
    try:
        return Probe.from_json(parse(read_file(path)))
    except OSError as error:
        if OTHER_MAKERS.fullmatch(str(path).lower()):
            raise OptionError(
                f"machine {str(path)!r}: headrace runs on NVIDIA GPUs only; expected one of {', '.join(MACHINES)}"
            ) from error
        near = ", ".join(difflib.get_close_matches(path.name.lower(), MACHINES)) or "none"
        raise OptionError(
            f"machine {str(path)!r}: expected {', '.join(MACHINES)}, or a file that `headrace probe --json` printed on "
            f"that machine: {error.strerror} (nearest name: {near})"
        ) from error
    except ValueError as error:
        raise OptionError(
            f"{str(path)!r}: expected what `headrace probe --json` of this version printed, found: {error}; run it "
            f"again on that machine"
        ) from error


def named_machine(machine: str | os.PathLike[str], direct: bool = False) -> tuple[Machine, Rates]:
    """Machine to plan for: ``machine`` is one of ``MACHINES`` or a file of a probe.

    A card may have another link than its own, as in ``"4090@pcie3"``. ``direct``: a machine without a GPU reads files
    past the page cache.

    Raises:
        OptionError, OptionTypeError: neither a name nor a file that holds a probe.
    """
    if not isinstance(machine, str | os.PathLike):
        known = ", ".join(MACHINES)
        raise OptionTypeError(f"machine: expected {known}, or the file of a probe, found {type(machine).__name__}")
    card, _, link = str(machine).lower().partition("@")
    is_measured = spelling(card) == "h200"
    if not is_measured and (published := find_card(card)) is not None:
        device = published["device"]
        rates = (card_link_rate(published, link), published["memory_bytes_per_s"], published["flops_per_s"])
        return Machine(device, int(published["gib"] * GIB)), nominal_rates(f"{device}{link and ' on '}{link}", *rates)
    if link and not Path(machine).exists():
        raise OptionError(f"--link {link!r}: expected a card with nominal rates, found {card!r}, which was measured")
    if is_measured:
        probe = read_probe(Path(__file__).with_name("h200.json"))
        made_for = Machine("NVIDIA H200", 139 * GIB)  # not in the probe, which is from before it was kept
    else:
        probe = read_probe(Path(machine).expanduser())
        made_for = probe.planned_machine
    return made_for, probe.gpu_rates() or probe.cpu_rates(direct)


def save(probe: Probe) -> Path:
    """Keep ``probe``; returns where. A reader finds the file that was there before, or the whole new one.

    Raises:
        OptionError: there is no place for it.
    """
    return _keep("probe", probe.to_json())


def load_shared_link(num_ranks: int) -> dict[int, float] | None:
    """Shared link that :func:`save_shared_link` kept; ``None`` without it, and with a warning for anything else."""
    what = f"the rates of {num_ranks} links"
    kept = _kept(_of_ranks(num_ranks), partial(decode, _SharedLink), what, "they are measured again")
    return None if kept is None else kept.h2d_bytes_per_s


def save_shared_link(num_ranks: int, h2d_bytes_per_s: dict[int, float]) -> Path:
    """Keep pinned host memory to device, by bytes of one copy, as each of ``num_ranks`` processes copies at once.

    Raises:
        OptionError: there is no place for it.
    """
    return _keep(_of_ranks(num_ranks), encode(_SharedLink(describe_machine(), h2d_bytes_per_s)))


def _of_ranks(num_ranks: int) -> str:
    return f"links-{num_ranks}"


def _keep(kind: str, content: dict[str, Any]) -> Path:
    """Write ``content`` as the measurement ``kind`` of this machine; a reader finds what was before, or all of it."""
    path = cache_path(kind)
    if path is None:
        raise OptionError(
            f"the probe cannot be kept: user {os.geteuid()} has no home folder (neither HOME nor an entry in passwd); "
            f"set XDG_CACHE_HOME to a folder for it"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(content, indent=1))
    except OSError as error:
        raise OptionError(
            f"{path}: the probe cannot be kept there: {error.strerror}; make room for it, or set XDG_CACHE_HOME to "
            f"another folder"
        ) from error
    return path
