"""Products of experts in several passes, each of some of the pairs of a token and an expert, with the bits of one pass.

A pair has a row of outputs of its own, which does not depend on what else its pass computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

# Rows of the pairs of a token and an expert, int64 [pairs], a number that is no row for pairs that are left out; and
# what to call before they are read.
Pass = tuple[torch.Tensor, Callable[[], object]]
Weights = tuple[torch.Tensor, torch.Tensor]  # up [rows, 2 intermediate, hidden], down [rows, hidden, intermediate]

_OUTPUTS = 8  # of a pair, by one program


def grouped(x: torch.Tensor, passes: Sequence[Pass], weights: Weights, top_k: int) -> torch.Tensor:
    """The output of each pair, [pairs, hidden], by grouped products over rows in the order of their experts.

    Pairs that a pass leaves out are sorted behind all groups, where nothing is computed.
    """
    up, down = weights
    bounds = torch.arange(1, up.shape[0] + 1, device=x.device)
    output: torch.Tensor | None = None
    for rows, wait in passes:
        sorted_rows, order = rows.sort(stable=True)
        ends = torch.searchsorted(sorted_rows, bounds).int()
        wait()
        gate, value = F.grouped_mm(x[order // top_k], up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        sorted_output = F.grouped_mm(F.silu(gate) * value, down.transpose(1, 2), offs=ends)
        found = torch.empty_like(sorted_output).index_copy_(0, order, sorted_output)
        output = found if output is None else torch.where((rows < up.shape[0])[:, None], found, output)
    assert output is not None
    return output


def by_pairs(x: torch.Tensor, passes: Sequence[Pass], weights: Weights, top_k: int) -> torch.Tensor:
    """The output of each pair, [pairs, hidden]; a program computes a few numbers of one pair, or nothing."""
    up, down = weights
    num_rows, hidden, intermediate = down.shape
    num_pairs = passes[0][0].numel()
    activated, output = x.new_empty(num_pairs, intermediate), x.new_empty(num_pairs, hidden)
    for rows, wait in passes:
        wait()
        for source, matrices, target, divisor in ((x, up, activated, top_k), (activated, down, output, 1)):
            size, inner = target.shape[1], source.shape[1]
            pair_kernel[(num_pairs, size // _OUTPUTS)](
                source, matrices, target, rows, num_rows, DIVISOR=divisor, SIZE=size, INNER=inner,
                GATED=matrices is up, OUTPUTS=_OUTPUTS, BLOCK=gcd(512, inner),
            )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["num_rows"])
def pair_kernel(
    source,  # [pairs / DIVISOR, INNER]
    matrices,  # [rows, SIZE, INNER], or GATED: [rows, 2 SIZE, INNER]
    target,  # [pairs, SIZE]
    rows,  # of each pair; from num_rows on: nothing is computed
    num_rows,
    DIVISOR: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    INNER: tl.constexpr,  # noqa: N803
    GATED: tl.constexpr,  # noqa: N803
    OUTPUTS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """``matrix @ source`` of each pair; with GATED ``silu(first half) * second half``. A grid of pairs and blocks."""
    pair = tl.program_id(0)
    row = tl.load(rows + pair)
    if row < num_rows:
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        matrix = matrices + row.to(tl.int64) * (SIZE * INNER * (2 if GATED else 1))
        sums = tl.zeros([OUTPUTS, BLOCK], tl.float32)
        second_sums = tl.zeros([OUTPUTS, BLOCK], tl.float32)
        for start in tl.static_range(0, INNER, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(source + (pair // DIVISOR) * INNER + at).to(tl.float32)[None, :]
            here = matrix + output[:, None] * INNER + at[None, :]
            sums += tl.load(here).to(tl.float32) * value
            if GATED:
                second_sums += tl.load(here + SIZE * INNER).to(tl.float32) * value
        total = tl.sum(sums, axis=1)
        if GATED:
            total = total * tl.sigmoid(total) * tl.sum(second_sums, axis=1)
        tl.store(target + pair * SIZE + output, total.to(target.dtype.element_ty))


@triton.jit
def split_kernel(rows, fetched, first, second, num_pairs, num_slots, no_row, BLOCK: tl.constexpr):  # noqa: N803
    """Give ``first`` the rows that were in slots before the admission, ``second`` the others; ``no_row`` elsewhere."""
    at = tl.arange(0, BLOCK)
    is_pair = at < num_pairs
    row = tl.load(rows + at, mask=is_pair, other=0)
    is_missed = (row >= num_slots).to(tl.int32)
    for place in range(tl.load(fetched)):
        is_missed = is_missed | (row == tl.load(fetched + 1 + place)).to(tl.int32)
    tl.store(first + at, tl.where(is_missed == 0, row, no_row), mask=is_pair)
    tl.store(second + at, tl.where(is_missed == 0, no_row, row), mask=is_pair)


PRODUCTS = {"grouped": grouped, "pairs": by_pairs}
