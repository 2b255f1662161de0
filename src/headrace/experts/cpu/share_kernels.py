"""Triton kernels of the doorbell: one asks the CPU for experts in pinned memory, one waits for their outputs there.

The number of a request is written last, with ``release`` at the scope of the system; ``doorbell.c`` has the layout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.experts.kernels import ELSEWHERE

# Words of 8 bytes, as ``mail`` of doorbell.c has them.
POSTED, AWAITED, LAYER, TOKENS, TOP_K, FETCHED, GIVEN_UP = (tl.constexpr(word) for word in range(7))
DONE, CODE, REQUESTS, COMPUTED, CPU_NS, LINK_NS = (tl.constexpr(word) for word in range(16, 22))
SHARES, IDS = tl.constexpr(32), tl.constexpr(128)
# Bytes from the beginning: inputs of 8 rows, of at most 16,384 each, and outputs by pair.
X_AT, OUTPUTS_AT = tl.constexpr(4096), tl.constexpr(4096 + 8 * 16384 * 2)


@triton.jit(do_not_specialize=["layer"])
def ring_kernel(
    ids, rows, x, fetched, state, words, to, layer, top_k, NUM_IDS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Ask for the experts ``ids`` [NUM_IDS] whose ``rows`` are ELSEWHERE, of ``x`` (SIZE words of 8 bytes); 1 program.

    fetched: int32 [1], experts that come over the link. state: int64 [3]: the last request's number, if it is
    awaited, if one was given up. words: pinned. to: where x goes there. Without a missing expert nothing is asked, and
    without one for the CPU only for the time of the link, unless the share is off.
    """
    count = tl.load(fetched)
    at = tl.arange(0, triton.next_power_of_2(NUM_IDS))
    row = tl.load(rows + at, mask=at < NUM_IDS, other=0)
    is_here = (row == ELSEWHERE) & (at < NUM_IDS)
    asks = tl.max(is_here.to(tl.int32), axis=0) > 0
    if (count > 0) & (asks == 0):
        asks = tl.load(words + SHARES, volatile=True) != 0
    if asks:
        tl.store(words + IDS + at, tl.where(is_here, tl.load(ids + at, mask=at < NUM_IDS, other=0), -1).to(tl.int64),
                 mask=at < NUM_IDS)  # fmt: skip
        for start in tl.range(0, SIZE, BLOCK):
            word = start + tl.arange(0, BLOCK)
            tl.store(to + word, tl.load(x + word, mask=word < SIZE), mask=word < SIZE)
        number = tl.load(state) + 1
        tl.store(words + LAYER, tl.zeros([], tl.int64) + layer)
        tl.store(words + TOKENS, tl.zeros([], tl.int64) + NUM_IDS // top_k)
        tl.store(words + TOP_K, tl.zeros([], tl.int64) + top_k)
        tl.store(words + FETCHED, count.to(tl.int64))
        tl.store(state, number)
        tl.debug_barrier()
        tl.atomic_xchg(words + POSTED, number, sem="release", scope="sys")
        tl.store(state + 1, tl.zeros([], tl.int64) + 1)  # last: what was not posted is not awaited


@triton.jit
def wait_kernel(
    state, words, outputs, SIZE: tl.constexpr, BLOCK: tl.constexpr, MOST_POLLS: tl.constexpr, INSTEAD: tl.constexpr
):
    """Wait until the host has written the outputs (bf16 [SIZE]) of the last request; without end, write INSTEAD."""
    if tl.load(state + 1) != 0:
        number = tl.load(state)
        tl.atomic_xchg(words + AWAITED, number, sem="relaxed", scope="sys")
        done = tl.load(words + DONE, volatile=True)
        polls = 0
        most = tl.where(tl.load(state + 2) == 0, MOST_POLLS, 0)  # once: a step waits in each of its layers
        while (done != number) & (polls < most):
            done = tl.load(words + DONE, volatile=True)
            polls += 1
        if done != number:
            for start in tl.range(0, SIZE, BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.store(outputs + at, tl.zeros([BLOCK], tl.int16) + INSTEAD, mask=at < SIZE)
            tl.store(state + 2, tl.zeros([], tl.int64) + 1)
            tl.atomic_xchg(words + GIVEN_UP, number, sem="relaxed", scope="sys")
        tl.store(state + 1, tl.zeros([], tl.int64))
