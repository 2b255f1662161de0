"""Cards that are known by name, and their published rates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from headrace.errors import OptionError
from headrace.json_files import parse, read_file

GIB = 2**30
# Machines that plans can be made for by name: the GPU as torch names it, and no more memory than any driver leaves.
# Without a probe of theirs the rates follow from published values: link (PCIe, one direction), memory, bf16 with sums
# in float32 and without sparsity.
CARDS: dict[str, dict[str, Any]] = parse(read_file(Path(__file__).with_name("cards.json")))
MACHINES = ("h200", *CARDS)
# PCI Express, one direction: generation, and lanes if not 16.
_LINK = re.compile(r"pcie([345])(?:x(1|2|4|8|16))?")
_LANE_BYTES_PER_S = {"3": 1e9, "4": 2e9, "5": 4e9}


def spelling(name: str) -> str:
    """The part of a card's ``name`` that tells it from others, as ``CARDS`` has it."""
    return re.sub(r"nvidia|geforce|rtx|[\s_-]", "", name.lower())


def link_rate(link: str) -> float:
    """Bytes per second of a link as ``--link`` names it.

    Raises:
        OptionError: not a name of one.
    """
    if (found := _LINK.fullmatch(link)) is None:
        raise OptionError(f"--link {link!r}: expected pcie3, pcie4 or pcie5, with its lanes if not 16, as in pcie4x8")
    return _LANE_BYTES_PER_S[found[1]] * int(found[2] or 16)
