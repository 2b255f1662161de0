"""Cards that are known by name, their published rates, and those of the GPU that is there."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from headrace.errors import OptionError
from headrace.json_files import parse, read_file
from headrace.memory.system import SYSFS, pci_address
from headrace.plan.nominal_rates import nominal_rates
from headrace.plan.rates import Rates

_log = logging.getLogger(__name__)

GIB = 2**30
# Machines that plans can be made for by name: the GPU as torch names it, and no more memory than any driver leaves.
# Without a probe of theirs the rates follow from published values: link (PCIe, one direction), memory, bf16 with sums
# in float32 and without sparsity. "names" are of cards with the same. "link_bytes_per_s" is of superchips, whose GPU is
# not on PCIe; "shares_host_memory" of those where it computes in the host's.
CARDS: dict[str, dict[str, Any]] = parse(read_file(Path(__file__).with_name("cards.json")))
MACHINES = ("h200", *CARDS)
# PCI Express, one direction: generation, and lanes if not 16.
_LINK = re.compile(r"pcie([345])(?:x(1|2|4|8|16))?")
_GENERATIONS = {8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # by GT/s of a lane
_MOST_LANES = 16
# What people call GPUs and accelerators of other makers: MI300X, M4 Max, RX 7900 XTX, Arc B580, TPU v5e.
OTHER_MAKERS = re.compile(
    r"(amd|apple|intel|google|radeon|instinct|arc|ryzen|gaudi|tpu|mps|rocm|rx)\b[\w -]*|(rx|mi|gfx|tpu|gaudi)\d\w*|"
    r"m[1-5]( ?(pro|max|ultra))?|[ab](310|380|570|580|750|770)"
)


def spelling(name: str) -> str:
    """The part of a card's ``name`` that tells it from others."""
    return re.sub(r"nvidia|geforce|tesla|rtx|[\s_-]", "", name.lower())


def find_card(name: str) -> dict[str, Any] | None:
    """The card that a user or a driver calls ``name``."""
    for key, card in CARDS.items():
        if spelling(name) in (key, *map(spelling, (card["device"], *card.get("names", ())))):
            return card
    return None


def parse_link(link: str) -> tuple[int, int]:
    """Generation and lanes of a link as ``--link`` names it.

    Raises:
        OptionError: not a name of one.
    """
    if (found := _LINK.fullmatch(link)) is None:
        raise OptionError(f"--link {link!r}: expected pcie3, pcie4 or pcie5, with its lanes if not 16, as in pcie4x8")
    return int(found[1]), int(found[2] or _MOST_LANES)


def link_rate(generation: int, lanes: int) -> float:
    """Nominal bytes per second of PCI Express in one direction."""
    return lanes * 1e9 * 2.0 ** (generation - 3)


def card_link_rate(card: dict[str, Any], link: str = "") -> float:
    """Nominal bytes per second of a card's own link, or of ``link``, in one direction."""
    own = card.get("link_bytes_per_s")
    if own is not None and link:
        raise OptionError(f"--link {link!r}: {card['device']} is not on PCIe but on {card['link']}; leave --link out")
    return float(own or link_rate(*parse_link(link or card["link"])))


def shares_host_memory(name: str) -> bool:
    """Whether the card called ``name`` is known to compute in the host's memory."""
    return bool((find_card(name) or {}).get("shares_host_memory"))


# -- the GPU that is there ---------------------------------------------------------------------------------------------

# Operations of bf16 products per clock of an SM, by compute capability; others have as many as GeForce cards.
_OPERATIONS = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192}
_CONSUMER_OPERATIONS = 512


def rates_of_gpu(index: int | None, of_card_alone: bool = False) -> Rates:
    """Nominal rates of GPU ``index`` of this machine, where torch finds one: its card's, on the link that it is on.

    A card that is not known has what its driver reports of clocks and widths, or else the order of a workstation's.

    Args:
        index: ``None`` for the current device.
        of_card_alone: whatever its slot, for ranks that have to come to the same rates.
    """
    import torch  # not at the top: plans for other machines need none

    gpu: Any = torch.cuda.get_device_properties(index)
    card, name = find_card(gpu.name), gpu.name
    if card is not None and gpu.total_memory < 0.9 * card["gib"] * GIB:
        card = None  # another one of that name, with less memory on a narrower bus
    links = [] if card is None or "link_bytes_per_s" in card else [parse_link(card["link"])]
    if not of_card_alone:
        links += _links_at(pci_address(gpu))
    generation, lanes = (min(ends) for ends in zip(*(links or [(4, _MOST_LANES)]), strict=True))
    link, place = link_rate(generation, lanes), f"PCIe {generation}.0 x{lanes}"
    if card is not None and "link_bytes_per_s" in card:
        link, place = card_link_rate(card), card["link"]
    memory, flops = (card["memory_bytes_per_s"], card["flops_per_s"]) if card is not None else _reported(gpu)
    if not memory or not flops:
        name, memory, flops = f"{name}, taken for a GPU of 1 TB/s and 150 TFLOP/s,", 1e12, 150e12
    machine = f"{name} on {place}"
    if of_card_alone:
        _log.info("nominal rates of %s: ranks have to come to one plan, so none measures its own link", machine)
    return nominal_rates(machine, link, memory, flops)


def _reported(gpu: Any) -> tuple[float, float]:
    """Bytes and operations per second by the clocks that ``gpu`` reports; 0 where it does not, as virtual ones."""
    clock, memory_clock = (1e3 * getattr(gpu, name, 0) for name in ("clock_rate", "memory_clock_rate"))  # of kHz
    operations = _OPERATIONS.get((gpu.major, gpu.minor), _CONSUMER_OPERATIONS)
    return 2 * memory_clock * getattr(gpu, "memory_bus_width", 0) / 8, clock * gpu.multi_processor_count * operations


def _links_at(address: str) -> list[tuple[int, int]]:
    """Highest generation and most lanes of either end of the link to the device at ``address``, as far as known.

    What the link runs at says less: an idle GPU lowers it. Ports of virtual machines and of Thunderbolt claim what no
    link of a GPU has (2.5 GT/s, or 32 lanes), and do not count.
    """
    device, found = (SYSFS / "bus/pci/devices" / address).resolve(), []
    for end in (device, device.parent):
        try:
            speed, lanes = ((end / f"max_link_{name}").read_text().split()[0] for name in ("speed", "width"))
            generation, width = _GENERATIONS.get(float(speed)), int(lanes)
        except (OSError, ValueError, IndexError):  # "Unknown"; a container without the folder; no port above
            continue
        if generation is not None and 0 < width <= _MOST_LANES:
            found.append((generation, width))
    return found
