"""Pools of variants of ``experts.c``: with functions of it that only tests call, and with faults."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.experts.cpu import native, pool
from headrace.experts.order import Projection
from ordered_c import GPT_OSS, projection, spread

DOTS = """
void dots_of(int kind, const matrix *m, int64_t expert, const uint16_t *x, float *out) {
    size_t bytes = (m->inputs + LANES - 1) / LANES * LANES * sizeof(float);
    float *ready = memset(aligned_alloc(LANES, bytes), 0, bytes);
    for (long k = 0; k < m->inputs; k++) ready[place(kind, m->format, k)] = wide(x[k]);
    for (long row = 0; row < m->outputs; row++) {
        const uint8_t *w = m->weight, *s = w;
        table tables[m->inputs / m->scale_inputs + 1];
        const table *made[m->inputs / BLOCK + 1];
        if (m->format != BF16) s = scales_of(kind, m, (expert * m->outputs + row) / m->scale_outputs, tables, made);
        w += (expert * m->expert_stride + row * m->row_stride) * (m->format == BF16 ? 2 : 1);
        out[row] = DOTS[kind][m->format](m, w, s, ready);
    }
    free(ready);
}
void activate_of(const uint16_t *gate, const uint16_t *up, long count, float alpha, float limit, uint16_t *out) {
    for (long i = 0; i < count; i++) out[i] = narrow(activated(wide(gate[i]), wide(up[i]), alpha, limit));
}
"""
# What a test does to a thread of a pool: it never returns, or it is gone.
SIGNALS = """
#include <signal.h>
#include <unistd.h>
#include <sys/syscall.h>
static void stick(int number) { (void)number; for (;;) pause(); }
static void die(int number) { (void)number; syscall(SYS_exit, 0); }
void plant(int thread, int is_death) {
    signal(SIGUSR2, is_death ? die : stick);
    syscall(SYS_tgkill, getpid(), thread, SIGUSR2);
}
"""


def variant(folder: Path, edits: dict[str, str] | None = None, options: tuple[str, ...] = (), more: str = DOTS) -> Any:
    """The library of the source with ``edits``, and ``more`` behind it."""
    text = native.SOURCE.read_text()
    for old, new in (edits or {}).items():
        assert old in text, old
        text = text.replace(old, new)
    with pytest.MonkeyPatch.context() as patch:
        (folder / "experts.c").write_text(text + more)
        (folder / "doorbell.c").write_text(native._WHOLE.read_text())
        patch.setattr(native, "SOURCE", folder / "experts.c")
        patch.setattr(native, "_WHOLE", folder / "doorbell.c")
        patch.setattr(native, "_OPTIONS", (*native._OPTIONS, *options))
        return native.library.__wrapped__()


def of_library(library: Any, threads: int, kind: int, **options: float) -> pool.Pool:
    """A pool of another library."""
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "library", lambda: library)
        return pool.Pool([cores[each % len(cores)] for each in range(threads)], kind, **options)


def dots(library: Any, kind: int, weights: Projection, expert: int, x: torch.Tensor) -> torch.Tensor:
    """Float32 products, neither rounded nor with a bias."""
    out, matrix = torch.empty(weights.outputs_and_inputs()[0]), pool.matrix_of(weights)[0]
    at = ctypes.c_void_p
    library.dots_of(kind, ctypes.byref(matrix), ctypes.c_int64(expert), at(x.data_ptr()), at(out.data_ptr()))
    return out


def case(
    form: str, tokens: int, made: torch.Generator, inputs: int = 96, inner: int = 160, is_oss: bool = True,
    **numbers: float,
) -> tuple[Any, ...]:  # fmt: skip
    """Experts of which each token uses four, some of them twice; the first and the third cancel each other, so that a
    sum in another order is another one."""
    first = projection(form, 5, 2 * inner, inputs, bias=is_oss, made=made, **numbers)
    second = projection(form, 5, inputs, inner, bias=is_oss, made=made, **numbers)
    ids, weights = torch.randint(0, 5, (tokens, 4), generator=made), torch.rand(tokens, 4, generator=made)
    ids[:, 2], weights[:, 0], weights[:, 2] = ids[:, 0], 4096, -4096
    x = spread(tokens, inputs, made=made, **numbers)
    return x, ids, weights.bfloat16(), first, second, is_oss, GPT_OSS if is_oss else ()


def activated(library: Any, gate: torch.Tensor, up: torch.Tensor, glu: Sequence[float]) -> torch.Tensor:
    out, at = torch.empty_like(gate), ctypes.c_void_p
    limits, count = map(ctypes.c_float, glu or (0, 0)), ctypes.c_long(len(gate))
    library.activate_of(at(gate.data_ptr()), at(up.data_ptr()), count, *limits, at(out.data_ptr()))
    return out


def long_case(made: torch.Generator) -> tuple[Any, ...]:
    """Tenths of a second in plain C."""
    return case("mxfp4", 8, made, 1024, 2048)
