"""Triton kernels of the expert cache: one chooses the experts in slots, one copies the missing ones, one compares rows.

One more gives the tiles of triton_kernels the rows of their experts.

They run on the stream of the forward without the host, so a CUDA graph can contain them. A layer has E experts and S
slots. Each of its tensors is one range of rows: rows 0 to S - 1 are slots in device memory, and rows from H on are the
experts in host memory. ``location[e]`` is the row at which expert e is read: its slot, or its own row. Between them may
be P overflow rows, in device memory that all layers share: a large step reads experts without a slot there.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The row of an expert that the CPU computes in this step (headrace.experts.cpu.share).
ELSEWHERE = tl.constexpr(-(1 << 30))
_MOST_SHARED = tl.constexpr(64)


# Sizes that follow from a budget or a prompt are no constants, and Triton does not look at their values: with another
# plan or prompt it finds the kernel that an earlier process compiled.
@triton.jit(do_not_specialize=["num_ids", "shift", "num_slots", "num_overflow_rows", "first_overflow_row"])
def admit_kernel(
    ids,  # experts that tokens chose, any order, repeated; numbers outside [0, E) are padding
    rows,  # of the dtype of ids: the row of each at the end; padding from E on plus shift, below -E minus shift
    num_ids,
    shift,
    home,  # [E]: the row of each expert in host memory; -1: another rank has it
    location,  # [E], of the same dtype
    expert_in,  # int32 [S] or [first overflow row + P]: the expert in each slot; -1: empty
    last_used,  # int64 [S]: the step in which each slot was last used
    fetched,  # int32 [1 + S + P]: how many experts this step fetches, then their rows
    counters,  # int64 [5]: steps, hits, experts fetched into slots, experts without a slot, evicted experts
    chosen,  # int64 [E]: the step that chose each expert last
    missing,  # int32 [E]: scratch
    num_slots,
    num_overflow_rows,  # P
    first_overflow_row,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
    HAS_OVERFLOW: tl.constexpr,  # false: experts without a slot are read in host memory
    shares=None,  # int64 [65] in pinned memory: of so many missing experts the CPU computes so many; None: none
    uses=None,  # int32 [2, E], for shares: how often each expert was chosen, of which old times fade, and scratch
):
    """Give every chosen expert a slot as far as there are any, least recently used first; one program.

    No slot that this step uses is evicted. Experts beyond the slots are read in overflow rows, for this step alone, as
    far as there are any, or in their own rows; so is the last expert of a step that finds none of several in slots.
    """
    tally = tl.arange(0, 8)
    counts = tl.load(counters + tally, mask=tally < 5, other=0)
    step = tl.sum(tl.where(tally == 0, counts, 0), axis=0) + 1
    expert = tl.arange(0, BLOCK_EXPERTS)
    is_expert = expert < NUM_EXPERTS
    home_row = tl.load(home + expert, mask=is_expert, other=-1)
    row = tl.load(location + expert, mask=is_expert, other=-1)
    for start in range(0, num_ids, BLOCK_IDS):
        at = start + tl.arange(0, BLOCK_IDS)
        one = tl.load(ids + at, mask=at < num_ids, other=-1)
        mark = tl.zeros([BLOCK_IDS], tl.int64) + step
        tl.store(chosen + one, mark, mask=(one >= 0) & (one < NUM_EXPERTS))
    tl.debug_barrier()

    is_chosen = (tl.load(chosen + expert, mask=is_expert, other=0) == step) & (home_row >= 0)
    is_hit = is_chosen & (row < num_slots)
    is_missing = is_chosen & (row >= num_slots)
    num_hits = tl.sum(is_hit.to(tl.int32), axis=0)
    num_missing = tl.sum(is_missing.to(tl.int32), axis=0)
    if shares is not None:
        share = tl.load(shares + tl.minimum(num_missing, _MOST_SHARED), volatile=True).to(tl.int32)
        used_often = tl.load(uses + expert, mask=is_expert, other=0)
        used_often += tl.where(is_chosen, 1024, 0) - (used_often >> 7)
        tl.store(uses + expert, used_often, mask=is_expert)
        is_elsewhere = is_missing & (num_missing <= share)
        if (share > 0) & (share < num_missing):
            # An expert that the CPU computes enters no slot, so it has those that were used least.
            key = tl.where(is_missing, used_often, 1 << 30)
            tl.store(uses + NUM_EXPERTS + expert, key, mask=is_expert)
            tl.debug_barrier()
            place = tl.zeros([BLOCK_EXPERTS], tl.int32)
            for start in range(0, NUM_EXPERTS, BLOCK_OTHERS):
                other_one = start + tl.arange(0, BLOCK_OTHERS)
                other_key = tl.load(uses + NUM_EXPERTS + other_one, mask=other_one < NUM_EXPERTS, other=1 << 30)
                precedes = (other_key[None, :] < key[:, None]) | (
                    (other_key[None, :] == key[:, None]) & (other_one[None, :] < expert[:, None])
                )
                place += tl.sum(precedes.to(tl.int32), axis=1)
            is_elsewhere = is_missing & (place < share)
        is_missing = is_missing & (is_elsewhere == 0)
        num_missing -= tl.sum(is_elsewhere.to(tl.int32), axis=0)
        tl.store(location + expert, tl.zeros([BLOCK_EXPERTS], home_row.dtype) + ELSEWHERE, mask=is_elsewhere)
        tl.debug_barrier()
    tl.store(last_used + row, tl.zeros([BLOCK_EXPERTS], tl.int64) + step, mask=is_hit)
    num_fetched = num_missing * 0
    num_evicted = num_missing * 0
    if num_missing > 0:
        tl.store(missing + tl.cumsum(is_missing.to(tl.int32), axis=0) - 1, expert, mask=is_missing)
        tl.debug_barrier()
        slot = tl.arange(0, BLOCK_SLOTS)
        is_slot = slot < num_slots
        used = tl.load(last_used + slot, mask=is_slot, other=0)
        rank = tl.zeros([BLOCK_SLOTS], tl.int32)  # of the slot, the least recently used first
        for start in range(0, num_slots, BLOCK_OTHERS):
            other = start + tl.arange(0, BLOCK_OTHERS)
            other_used = tl.load(last_used + other, mask=other < num_slots, other=0)
            is_before = (other_used[None, :] < used[:, None]) | (
                (other_used[None, :] == used[:, None]) & (other[None, :] < slot[:, None])
            )
            rank += tl.sum((is_before & (other < num_slots)[None, :]).to(tl.int32), axis=1)
        # A step that fetches everything would wait for it before its first product. One expert that is read in place
        # instead crosses the link during the products of the others.
        num_wanted = num_missing - ((num_missing > 1) & (num_hits == 0)).to(tl.int32)
        takes = is_slot & (used < step) & (rank < num_wanted)
        newcomer = tl.load(missing + rank, mask=takes, other=0)
        leaver = tl.load(expert_in + slot, mask=takes, other=-1)
        leaves = takes & (leaver >= 0)
        tl.store(location + leaver, tl.load(home + leaver, mask=leaves, other=-1), mask=leaves)
        tl.store(location + newcomer, slot, mask=takes)
        tl.store(expert_in + slot, newcomer, mask=takes)
        tl.store(last_used + slot, tl.zeros([BLOCK_SLOTS], tl.int64) + step, mask=takes)
        tl.store(fetched + 1 + rank, slot, mask=takes)
        num_fetched = tl.sum(takes.to(tl.int32), axis=0)
        num_evicted = tl.sum(leaves.to(tl.int32), axis=0)
        tl.debug_barrier()
    num_rows = num_fetched
    if HAS_OVERFLOW:
        # Those that got a slot are the first ones missing.
        overflow_row = tl.cumsum(is_missing.to(tl.int32), axis=0) - 1 - num_fetched
        in_overflow_row = is_missing & (overflow_row >= 0) & (overflow_row < num_overflow_rows)
        tl.store(location + expert, first_overflow_row + overflow_row, mask=in_overflow_row)
        tl.store(expert_in + first_overflow_row + overflow_row, expert, mask=in_overflow_row)
        tl.store(fetched + 1 + num_fetched + overflow_row, first_overflow_row + overflow_row, mask=in_overflow_row)
        num_rows += tl.sum(in_overflow_row.to(tl.int32), axis=0)
        tl.debug_barrier()
    tl.store(fetched, num_rows)
    for start in range(0, num_ids, BLOCK_IDS):
        at = start + tl.arange(0, BLOCK_IDS)
        one = tl.load(ids + at, mask=at < num_ids, other=-1)
        is_one = (one >= 0) & (one < NUM_EXPERTS)
        found = tl.load(location + one, mask=is_one, other=-1).to(one.dtype)
        outside = one + tl.where(one >= NUM_EXPERTS, shift, 0) - tl.where(one < -NUM_EXPERTS, shift, 0)
        tl.store(rows + at, tl.where(is_one, found, outside), mask=at < num_ids)
    if HAS_OVERFLOW:
        tl.debug_barrier()
        tl.store(location + expert, home_row, mask=in_overflow_row)
    if shares is not None:
        tl.debug_barrier()
        tl.store(location + expert, home_row, mask=is_elsewhere)

    added = tl.where(tally == 1, num_hits, 0) + tl.where(tally == 2, num_fetched, 0)
    added += tl.where(tally == 3, num_missing - num_fetched, 0) + tl.where(tally == 4, num_evicted, 0)
    tl.store(counters + tally, tl.where(tally == 0, step, counts + added), mask=tally < 5)


@triton.jit
def fetch_kernel(
    fetched,  # int32 [1 + S + P], see admit_kernel
    expert_in,  # int32 [S] or [first overflow row + P]
    home,  # [E]
    tensors,  # int64 [T, 2]: address of row 0, and words in a row
    NUM_TENSORS: tl.constexpr,
    WORD: tl.constexpr,  # int64, for rows that begin at multiples of 16 bytes, or uint8
    BLOCK: tl.constexpr,  # words that a program copies at a time
):
    """Copy the experts that :func:`admit_kernel` admitted from their own rows to their new ones; any grid."""
    first, num_programs = tl.program_id(0), tl.num_programs(0)
    num_fetched = tl.load(fetched)
    for tensor in tl.static_range(NUM_TENSORS):
        base = tl.load(tensors + 2 * tensor).to(tl.pointer_type(WORD))
        words = tl.load(tensors + 2 * tensor + 1)
        blocks = tl.cdiv(words, BLOCK)
        num_items = num_fetched * blocks
        for item in range(first, num_items, num_programs):
            target = tl.load(fetched + 1 + item // blocks)
            source = tl.load(home + tl.load(expert_in + target))
            word = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
            inside = word < words
            read = base + source.to(tl.int64) * words + word
            written = base + target.to(tl.int64) * words + word
            if tl.int64 == WORD:  # so that each thread moves 16 bytes at a time
                read, written = tl.multiple_of(read, 16), tl.multiple_of(written, 16)
                inside = tl.max_constancy(inside, 2)
            tl.store(written, tl.load(read, mask=inside), mask=inside)
        # The next tensor begins with the program after the last one here: small tensors wait for each other otherwise.
        first = (first + num_programs - num_items % num_programs) % num_programs


@triton.jit
def compare_kernel(
    row_of,  # int64 [E]: the row in which a kernel has read each expert; below 0: it has not
    home,  # [E], see admit_kernel
    tensors,  # int64 [T, 2], see fetch_kernel
    differing,  # int64 [1]: words that differ from the expert's own row are added
    NUM_EXPERTS: tl.constexpr,
    NUM_TENSORS: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compare the rows that a kernel has read with the experts in host memory; any grid."""
    for tensor in tl.static_range(NUM_TENSORS):
        base = tl.load(tensors + 2 * tensor).to(tl.pointer_type(WORD))
        words = tl.load(tensors + 2 * tensor + 1)
        blocks = tl.cdiv(words, BLOCK)
        for item in range(tl.program_id(0), NUM_EXPERTS * blocks, tl.num_programs(0)):
            row, own = tl.load(row_of + item // blocks), tl.load(home + item // blocks).to(tl.int64)
            if (row >= 0) & (own >= 0) & (row != own):
                word = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
                read = tl.load(base + row * words + word, mask=word < words, other=0)
                stored = tl.load(base + own * words + word, mask=word < words, other=0)
                different = tl.sum((read != stored).to(tl.int32), axis=0)
                if different > 0:
                    tl.atomic_add(differing, different.to(tl.int64))


@triton.jit(do_not_specialize=["stride", "num_tiles"])
def tiles_of_rows_kernel(
    tiles,  # int32 [heights, stride]: number of its expert + 2**16 * place among the tiles of that expert; -1: none
    stride,
    num_tiles,
    rows,  # [num_tiles]: the row of the expert of each tile of the least height
    first_tile,  # int32 [E]: of these, the first of each expert
    counts,  # int32 [E]: tokens of each expert
    starts,  # int32 [E]: the first of them
    counts_by_row,  # int32 [rows]: both, for the rows of experts in use
    starts_by_row,
    BLOCK: tl.constexpr,
):
    """Replace the number of the expert of each tile by its row; a grid of blocks of tiles, and heights."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = tiles + tl.program_id(1) * stride + at
    tile = tl.load(here, mask=at < num_tiles, other=-1)
    is_tile = tile >= 0
    expert = tl.where(is_tile, tile & 0xFFFF, 0)
    row = tl.load(rows + tl.load(first_tile + expert, mask=is_tile, other=0), mask=is_tile, other=0).to(tl.int32)
    tl.store(here, tile - expert + row, mask=is_tile)
    tl.store(counts_by_row + row, tl.load(counts + expert, mask=is_tile, other=0), mask=is_tile)
    tl.store(starts_by_row + row, tl.load(starts + expert, mask=is_tile, other=0), mask=is_tile)
