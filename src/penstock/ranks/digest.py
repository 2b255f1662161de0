"""A fast checksum of tensors on any device, to compare weights across ranks, and a SHA-256 digest of JSON values."""

from __future__ import annotations

import hashlib
import json
from functools import cache

import torch

__all__ = ["checksum", "json_digest"]

_WORDS = 1 << 20  # per block
_PRIME = (1 << 61) - 1


def json_digest(value: object) -> str:
    """SHA-256 of ``value`` as JSON, in hexadecimal digits; the order of keys does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def checksum(blob: torch.Tensor) -> int:
    """Of ``blob`` (uint8, 1-D): equal for equal bytes on any device, and for other bytes only by chance.

    Each block is a sum of words times fixed odd random numbers modulo 2^64, so that every bit and every place counts
    (multilinear hashing: Lemire and Kaser, "Strongly universal string hashing is fast", 2014); the blocks are the
    coefficients of a polynomial modulo 2^61 - 1.
    """
    factors = _factors().to(blob.device)
    sums = [(_words(part) * factors[: -(-part.numel() // 8)]).sum() for part in blob.split(8 * _WORDS)]
    total = blob.numel()
    for value in torch.stack(sums).tolist() if sums else ():
        total = (total * 0x9E3779B97F4A7C15 + value) % _PRIME
    return total


@cache
def _factors() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (_WORDS,), dtype=torch.int64, generator=generator) | 1


def _words(part: torch.Tensor) -> torch.Tensor:
    if part.numel() % 8 or part.storage_offset() % 8 or part.data_ptr() % 8:
        whole = torch.zeros(-(-part.numel() // 8) * 8, dtype=torch.uint8, device=part.device)
        whole[: part.numel()] = part
        part = whole
    return part.view(torch.int64)
