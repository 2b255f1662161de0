"""The op ``headrace::ordered_experts``: the experts of up to 8 rows with the same bits wherever they lie.

A number of an expert, or the row in which a cache has it, is an index into the weights, which are read there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from headrace.errors import StateError, warn_user
from headrace.experts import order
from headrace.experts.order import Projection


class Launch(NamedTuple):
    """How a kernel divides its work; no bit depends on it.

    Attributes:
        rows: outputs of a program, a power of two.
        chunks: chunks that it adds up at once, a power of two.
        warps: warps of a program.
    """

    rows: int
    chunks: int
    warps: int


# Of the first product and of the second, by format; the fastest on an H200 for one row of Qwen3-30B-A3B in bf16 and of
# gpt-oss-120b in MXFP4; int4 and fp8 have the latter's.
LAUNCHES = {
    "pairs": (Launch(8, 4, 2), Launch(1, 4, 1)),
    "single": (Launch(16, 1, 4), Launch(32, 1, 4)),
    "mxfp4": (Launch(2, 2, 1), Launch(1, 4, 1)),
    "int4": (Launch(2, 2, 1), Launch(1, 4, 1)),
    "fp8": (Launch(2, 2, 1), Launch(1, 4, 1)),
}
_WORDS = 1024  # that a program of values_kernel unpacks
# Pairs of a token and an expert that threads multiply in less time than they take to unpack the experts of 32.
_FEW = {"mxfp4": 256, "int4": 256, "fp8": 64}


def run(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Projection, down: Projection,
    is_interleaved: bool = False, glu: Sequence[float] = (), shared: Sequence[torch.Tensor] = (),
) -> torch.Tensor:  # fmt: skip
    """Run experts as :func:`headrace.experts.order.run_experts` does, by kernels on a GPU, also in compiled code.

    ``shared``: a :attr:`headrace.experts.cpu.share.Doorbell.memory`, where some are computed by the CPU.

    Raises:
        OptionError: another dtype than bf16.
    """
    order.require_dtypes(x, weights, gate_up, down)
    op, transposed = torch.ops.headrace.ordered_experts, gate_up.is_transposed
    output: torch.Tensor = op(
        x, ids, weights, *gate_up[:3], *down[:3], transposed, is_interleaved, list(glu), list(shared)
    )
    return output


def _ordered_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    gate_up: torch.Tensor, gate_up_scales: torch.Tensor | None, gate_up_bias: torch.Tensor | None,
    down: torch.Tensor, down_scales: torch.Tensor | None, down_bias: torch.Tensor | None,
    transposed: bool, interleaved: bool, glu: Sequence[float], shared: Sequence[torch.Tensor] = (),
) -> torch.Tensor:  # fmt: skip
    first = Projection(gate_up, gate_up_scales, gate_up_bias, transposed)
    second = Projection(down, down_scales, down_bias, transposed)
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    if not _has_kernels(x):
        threads = _threads(x.device.type)
        run_here = order.run_experts if threads is None else threads.run
        return run_here(x, ids, weights, first, second, interleaved, glu)
    with torch.cuda.device_of(x):  # Triton launches on the current device, whatever the tensors' one is
        inner = _launch_gate_up(x, ids, first, interleaved, glu, bool(shared))
        if not shared:
            return _launch_down(inner, ids, weights, second)
        from headrace.experts.cpu.share import wait

        apart = wait(shared[0], shared[1], ids.numel() * second.outputs_and_inputs()[0])
        return _launch_down(inner, ids, weights, second, apart)


def _has_kernels(x: torch.Tensor) -> bool:
    """Whether Triton's kernels run where ``x`` is; its interpreter runs them on a CPU."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def is_few(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, form: str) -> bool:
    """Whether :func:`run` takes these rows: up to 8, and by threads of a CPU more, as long as unpacking takes longer.

    It depends on shapes alone, and not on how many experts a cache says that there are.
    """
    has_gradients = torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)
    if len(x) <= order.MAX_ROWS or _has_kernels(x) or has_gradients:
        return len(x) <= order.MAX_ROWS
    return ids.numel() <= _FEW.get(form, 0) and _threads(x.device.type) is not None


def unpack(projection: Projection, expert: int, out: torch.Tensor) -> torch.Tensor:
    """Weights of ``expert``, written into ``out``: bf16 [outputs, inputs], contiguous. Codes are read once.

    Raises:
        IndexError: there is no such row of experts.
        OptionError: scales that no kernel reads.
        StateError: a thread of the CPU is lost.
    """
    weight, scales = projection.weight, projection.scales
    if not 0 <= expert < len(weight):
        raise IndexError(f"expert {expert}: expected one from 0 to {len(weight) - 1}")
    if scales is None:
        return out.copy_(projection.values(expert))
    order.require_blocks(projection, scales)
    if not _has_kernels(weight) and (threads := _threads(weight.device.type)) is not None:
        threads.unpack(projection, expert, out)
        return out
    if projection.form == "fp8" or not _has_kernels(weight):
        return out.copy_(projection.values(expert))
    from headrace.experts.order_kernels import values_kernel

    words, scales = weight[expert].contiguous().view(-1).view(torch.int32), scales[expert].contiguous()
    scales = scales.view(torch.int16) if projection.form == "int4" else scales
    options = {"FORMAT": projection.form, "SCALE_K": projection.of_a_scale()[1], "BLOCK": _WORDS}
    with torch.cuda.device_of(weight):
        values_kernel[(-(-words.numel() // _WORDS),)](words, scales, out.view(torch.int16), words.numel(), **options)
    return out


@cache
def _threads(device: str) -> Any:
    """The module whose threads run experts on ``device``; ``None``: torch does, as elsewhere or without a compiler."""
    why: object = "there are no kernels for it"
    if device == "cpu":
        from headrace.experts.cpu import native, pool

        try:
            native.library()
            return pool
        except StateError as error:
            why = error
    warn_user(f"experts_implementation 'headrace': experts on {device!r} run in torch, slowly: {why}")
    return None


def _launch_gate_up(
    x: torch.Tensor, ids: torch.Tensor, projection: Projection, is_interleaved: bool, glu: Sequence[float],
    is_shared: bool,
) -> torch.Tensor:  # fmt: skip
    from headrace.experts.order_kernels import gate_up_kernel

    pairs, count = ids.numel(), projection.outputs_and_inputs()[0] // 2
    inner = x.new_empty(pairs, count + count % 2)  # rows begin at multiples of 4 bytes
    (read, *tensors), options, rows = _arguments(x, projection, 0)
    gate_up_kernel[(pairs, -(-count // rows))](
        read, ids, *tensors[:3], inner.view(torch.int16), len(projection.weight), count, *tensors[3:], inner.stride(0),
        *(glu or (0.0, 0.0)), TOP_K=ids.shape[1], INTERLEAVED=is_interleaved, CLAMPED=bool(glu), SHARED=is_shared,
        **options,
    )  # fmt: skip
    return inner


def _launch_down(
    inner: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, projection: Projection,
    apart: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    from headrace.experts.order_kernels import down_kernel

    is_rounded, count = weights.dtype == torch.bfloat16, projection.outputs_and_inputs()[0]
    output = inner.new_empty(len(ids), count)
    (read, *tensors), options, rows = _arguments(inner, projection, 1)
    down_kernel[(len(ids), -(-count // rows))](
        read, ids, weights.view(torch.int16) if is_rounded else weights, *tensors[:3], output.view(torch.int16),
        len(projection.weight), count, *tensors[3:], apart, TOP_K=ids.shape[1], ROUNDED=is_rounded,
        SHARED=apart is not None, **options,
    )  # fmt: skip
    return output


def _arguments(x: torch.Tensor, projection: Projection, which: int) -> tuple[list[Any], dict[str, Any], int]:
    """Arguments of a kernel (x, weight, scales, bias, strides, 1), its launch options, and outputs of a program."""
    weight, inputs = projection.weight, projection.outputs_and_inputs()[1]
    form, scales, (scale_rows, scale_inputs) = projection.form, weight, projection.of_a_scale()
    if projection.scales is not None:
        word, scales = torch.int32, projection.scales.contiguous()
        scales = scales.view(torch.int16) if form == "int4" else scales
        weight = weight.flatten(2)
    else:
        places = (inputs, weight.storage_offset(), *weight.stride()[:2])
        in_pairs = weight.stride(2) == 1 and not projection.is_transposed and not any(place % 2 for place in places)
        form, word = ("pairs", torch.int32) if in_pairs else ("single", torch.int16)
    weight, read = weight.view(word), x.view(word)
    expert, row, k = (weight.mT if projection.is_transposed else weight).stride()
    at_once, chunks = LAUNCHES[form][which], -(-inputs // order.CHUNK)
    together = min(at_once.chunks, 1 << (chunks - 1).bit_length())
    groups = -(-chunks // together)
    bias = projection.bias if projection.bias is None else projection.bias.contiguous().view(torch.int16)
    launch = {
        "BIAS": bias is not None, "FORMAT": form, "K": inputs, "ROW_STRIDE": row, "K_STRIDE": k,
        "SCALE_ROWS": scale_rows, "SCALE_K": scale_inputs, "ROWS": at_once.rows, "LANES": order.LANES,
        "CHUNK": order.CHUNK, "CHUNKS": together, "GROUPS": groups, "GROUPS_2": 1 << (groups - 1).bit_length(),
        "num_warps": at_once.warps, "enable_fp_fusion": False,
    }  # fmt: skip
    return [read, weight, scales, bias, read.stride(0), expert, 1], launch, at_once.rows


def _backward(*_: Any) -> None:
    raise StateError(
        "experts ran by 'headrace', which has no gradients: call model.set_experts_implementation('grouped_mm') before"
    )


_library = torch.library.Library("headrace", "FRAGMENT")
_library.define(
    "ordered_experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor? gate_up_scales, "
    "Tensor? gate_up_bias, Tensor down, Tensor? down_scales, Tensor? down_bias, bool transposed, bool interleaved, "
    "float[] glu, Tensor[] shared) -> Tensor"
)
_library.impl("ordered_experts", _ordered_experts, "CompositeExplicitAutograd")
torch.library.register_fake("headrace::ordered_experts", lambda x, *_: torch.empty_like(x), lib=_library)
torch.library.register_autograd("headrace::ordered_experts", _backward, lib=_library)
