"""The order of sums of experts in C (``ordered.c``), compiled where there is a compiler, and numbers to compare."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.experts import order, ordered
from headrace.experts.order import Projection

FORMATS = ("bf16", "transposed", "mxfp4", "int4", "fp8")
GPT_OSS = (1.702, 7.0)


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_int), ("outputs", ctypes.c_long), ("inputs", ctypes.c_long),
        ("scale_outputs", ctypes.c_long), ("scale_inputs", ctypes.c_long), ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p), ("bias", ctypes.c_void_p),
    )  # fmt: skip


@cache
def _library() -> ctypes.CDLL:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the reference of the order (gcc, cc)")
    made = Path(tempfile.mkdtemp()) / "ordered.so"
    options = ["-O2", "-ffp-contract=off", "-shared", "-fPIC", "-o", str(made)]
    subprocess.run([compiler, *options, str(Path(__file__).with_name("ordered.c"))], check=True)
    return ctypes.CDLL(str(made))


def _at(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    assert tensor is None or (tensor.is_cpu and tensor.is_contiguous())
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def _matrix(projection: Projection) -> Any:
    form = FORMATS.index("transposed" if projection.is_transposed else projection.form)
    places = (_at(each).value for each in projection[:3])
    return ctypes.byref(_Matrix(form, *projection.outputs_and_inputs(), *projection.of_a_scale(), *places))


def on_cpu(projection: Projection) -> Projection:
    tensors = (None if each is None else each.detach().cpu().contiguous() for each in projection[:3])
    return Projection(*tensors, projection.is_transposed)  # type: ignore[arg-type]


def dots_in_c(
    projection: Projection, expert: int, x: torch.Tensor, lanes: int = order.LANES, chunk: int = order.CHUNK
) -> torch.Tensor:
    """Float32 products of an expert with ``x`` (bf16), neither rounded nor with a bias."""
    projection, wide = on_cpu(projection), x.float().cpu()
    out = torch.empty(projection.outputs_and_inputs()[0])
    _library().dots(_matrix(projection), ctypes.c_long(expert), _at(wide), lanes, chunk, _at(out))
    return out


def activated_in_c(gate: torch.Tensor, up: torch.Tensor, glu: Sequence[float]) -> torch.Tensor:
    alpha, limit = map(ctypes.c_float, glu or (0, 0))
    out = torch.empty_like(gate)
    _library().activate(_at(gate), _at(up), ctypes.c_long(len(gate)), alpha, limit, _at(out))
    return out


def experts_in_c(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Projection, down: Projection,
    is_interleaved: bool, glu: Sequence[float], lanes: int = order.LANES, chunk: int = order.CHUNK,
) -> torch.Tensor:  # fmt: skip
    """As :func:`headrace.experts.order.run_experts`."""
    sizes = map(ctypes.c_long, (len(gate_up.weight), *ids.shape))
    x, ids, weights = (each.detach().cpu().contiguous() for each in (x, ids.long(), weights))
    gate_up, down = on_cpu(gate_up), on_cpu(down)
    alpha, limit = map(ctypes.c_float, glu or (0, 0))
    out, is_bf16 = torch.empty(len(x), down.outputs_and_inputs()[0], dtype=torch.bfloat16), weights.dtype != torch.float
    _library().experts(
        _matrix(gate_up), _matrix(down), *sizes, _at(x), _at(ids), _at(weights), int(is_bf16),
        int(is_interleaved), alpha, limit, lanes, chunk, _at(out),
    )  # fmt: skip
    return out


def spread(
    *shape: int, wide: float = 0.0, special: float = 0.0, size: float = 0.125, made: torch.Generator
) -> torch.Tensor:
    """Normally distributed bf16 of ``size``, whose exponents are spread by ``wide``; ``special``: share of random bits,
    which are denormal, infinite or not a number, too."""
    with made.device:
        x = torch.randn(shape, generator=made) * torch.exp(wide * torch.randn(shape, generator=made)) * size
        bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=made).to(torch.int16)
        kinds = torch.tensor([0x0001, 0x007F, 0x0080, 0x7F7F, 0x7F80, 0x7FC0, -0x8000, -0x80], dtype=torch.int16)
        bits = torch.where(bits % 2 == 0, bits, kinds[torch.randint(0, len(kinds), shape, generator=made)])
        return torch.where(torch.rand(shape, generator=made) < special, bits.view(torch.bfloat16), x.bfloat16())


def _float_scales(scales: torch.Tensor, made: torch.Generator) -> torch.Tensor:
    """Float32 numbers of which ``scales`` are the beginning."""
    with made.device:
        return (
            (scales.float().view(torch.int32) | torch.randint(1 << 16, scales.shape, generator=made))
            .int()
            .view(torch.float)
        )


def projection(
    form: str, experts: int, outputs: int, inputs: int, *, bias: bool = False, made: torch.Generator, **kinds: float
) -> Projection:
    """Weights in one of ``FORMATS``."""
    biases = spread(experts, outputs, made=made) if bias else None
    if form == "mxfp4":
        low, high = (0, 256) if kinds.get("special") else (110, 130)
        if size := kinds.get("size"):
            low, high = (40, 70) if size < 1 else (0, 3)
        with made.device:
            codes = torch.randint(0, 256, (experts, outputs, inputs // 2), generator=made, dtype=torch.uint8)
            scales = torch.randint(low, high, (experts, outputs, inputs // 32), generator=made).to(torch.uint8)
        return Projection(codes, scales, biases)
    if form in ("int4", "fp8"):
        group = max(size for size in (32, 64, 96, 128) if inputs % size == 0)
        block = max(size for size in range(1, 129) if outputs % size == 0) if form == "fp8" else 1
        with made.device:
            codes = torch.randint(-128, 128, (experts, outputs, inputs), generator=made).to(torch.int8)
        if form == "int4":
            codes = codes[..., : inputs // 2].contiguous().view(torch.int32)
        elif not kinds.get("special"):  # NaN of e4m3
            codes = torch.where(codes & 127 == 127, 0, codes)
        scales = spread(experts, outputs // block, inputs // group, made=made, **kinds)
        return Projection(
            *((codes, scales) if form == "int4" else (codes.view(torch.float8_e4m3fn), _float_scales(scales, made))),
            biases,
        )
    weight = spread(experts, outputs, inputs, made=made, **kinds)
    return Projection(weight.mT.contiguous() if form == "transposed" else weight, None, biases, form == "transposed")


def different(found: torch.Tensor, expected: torch.Tensor) -> int:
    """How many numbers differ in a bit; one NaN is as good as another."""
    integer = {2: torch.int16, 4: torch.int32}[found.element_size()]
    found, expected = found.cpu(), expected.cpu()
    same = (found.view(integer) == expected.view(integer)) | (found.isnan() & expected.isnan())
    return int((~same).sum())


@contextmanager
def compared_with_c() -> Iterator[list[int]]:
    """Numbers that differ, of each call; on a CPU torch runs it."""
    found: list[int] = []
    run: Callable[..., torch.Tensor] = ordered.run

    def compared(*given: Any, shared: Any = ()) -> torch.Tensor:
        output = run(*given, shared=shared)
        found.append(different(output, experts_in_c(*given)))
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered, "run", compared)
        yield found
