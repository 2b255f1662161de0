"""One order of sums for the products of experts, in torch: the reference of every kernel that keeps it.

:func:`dot` defines the sum of a product, :func:`activated` what comes between the two products of an expert, and
:func:`run_experts` the sum over a token's experts; docs/notes/order-of-sums.md says why. Each operation below rounds
once, as IEEE 754 says, so its bits are the same wherever it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from headrace.errors import OptionError

# Of a sum of products, element k is in chunk k / CHUNK, and in lane k % LANES of it.
LANES, CHUNK = 64, 256
# More rows are run by other implementations: from here on weights are read once for several rows.
MAX_ROWS = 8
MXFP4_BLOCK = 32
_FORMS = {torch.int32: "int4", torch.float8_e4m3fn: "fp8"}
_SCALES = {"mxfp4": torch.uint8, "int4": torch.bfloat16, "fp8": torch.float32}
_MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_EXP = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


class Projection(NamedTuple):
    """Weights of one product of all experts of a layer.

    Attributes:
        weight: bf16 [experts, outputs, inputs]; with ``scales`` MXFP4: uint8 [experts, outputs, inputs / 2] or with
            blocks of 16 bytes as a fourth dimension, two codes in each, the first in the lower bits; int4: int32
            [experts, outputs, inputs / 8], so, too, of numbers of which each is 8 larger; fp8: float8_e4m3fn.
        scales: MXFP4: uint8 [experts, outputs, inputs / 32]; int4: bf16 [experts, outputs, groups]; fp8: float32
            [experts, blocks of outputs, blocks of inputs].
        bias: bf16 [experts, outputs].
        is_transposed: ``weight`` is [experts, inputs, outputs].
    """

    weight: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    is_transposed: bool = False

    def outputs_and_inputs(self) -> tuple[int, int]:
        """How many each expert has."""
        if self.form == "mxfp4":
            return self.weight.shape[1], self.weight.shape[2:].numel() * 2
        rows, columns = self.weight.shape[1:]
        columns *= 8 if self.form == "int4" else 1
        return (columns, rows) if self.is_transposed else (rows, columns)

    @property
    def form(self) -> str:
        """One of bf16, mxfp4, int4 and fp8."""
        return "bf16" if self.scales is None else _FORMS.get(self.weight.dtype, "mxfp4")

    def of_a_scale(self) -> tuple[int, int]:
        """Number of outputs and of inputs that one scale is for."""
        if self.scales is None:
            return 1, MXFP4_BLOCK
        (outputs, inputs), (_, rows, columns) = self.outputs_and_inputs(), self.scales.shape
        return outputs // rows, inputs // columns

    def values(self, expert: int) -> torch.Tensor:
        """Weights of ``expert``: float32 [outputs, inputs]."""
        weight = self.weight[expert]
        if self.scales is None:
            return (weight.T if self.is_transposed else weight).float()
        scales, (rows, columns) = self.scales[expert], self.of_a_scale()
        if self.form == "mxfp4":
            return mxfp4_values(weight, scales)
        if self.form == "int4":
            weight = (weight[..., None] >> torch.arange(0, 32, 4, device=weight.device) & 15).flatten(-2) - 8
        full = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return (weight.float() * full).bfloat16().float()  # as the weights are made that take the place of packed ones

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """The product of ``expert`` with ``x`` (bf16 [inputs]), rounded, and its bias: bf16 [outputs]."""
        y = dot(self.values(expert), x.float()).bfloat16()
        return y if self.bias is None else y + self.bias[expert]


def require_bf16(*tensors: torch.Tensor) -> None:
    """Raise ``OptionError`` for another dtype."""
    if found := {tensor.dtype for tensor in tensors} - {torch.bfloat16}:
        raise OptionError(
            f"experts_implementation 'headrace': expected weights and hidden states in torch.bfloat16, found "
            f'{found.pop()}: load the model with dtype="bfloat16", or use experts_implementation="grouped_mm"'
        )


def require_dtypes(x: torch.Tensor, weights: torch.Tensor, gate_up: Projection, down: Projection) -> None:
    """Raise ``OptionError`` for arguments of :func:`run_experts` in other dtypes."""
    require_bf16(x, *(each.weight for each in (gate_up, down) if each.scales is None))
    if weights.dtype not in (torch.bfloat16, torch.float32):
        raise OptionError(f"weights of experts: expected torch.bfloat16 or torch.float32, found {weights.dtype}")
    for each in (gate_up, down):
        if each.scales is not None:
            require_blocks(each, each.scales)


def require_blocks(projection: Projection, scales: torch.Tensor) -> None:
    """Raise ``OptionError`` for ``scales`` that no kernel reads."""
    form, (outputs, inputs), (rows, columns) = projection.form, projection.outputs_and_inputs(), projection.of_a_scale()
    is_whole = outputs == rows * scales.shape[1] and inputs == columns * scales.shape[2] and columns % MXFP4_BLOCK == 0
    if not is_whole or scales.dtype != _SCALES[form] or (rows > 1 and form != "fp8"):
        raise OptionError(
            f"experts in {form}: expected scales in {_SCALES[form]}, each of a whole number of outputs and of "
            f"{MXFP4_BLOCK} inputs, found {list(scales.shape)} in {scales.dtype} for {outputs} outputs and {inputs} "
            f"inputs: use experts_implementation='grouped_mm', or leave it out"
        )


def mxfp4_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 values of ``codes`` (uint8 [..., bytes of a row]) with ``scales`` (uint8 [..., blocks]).

    A scale s stands for 2 ** (s - 127), and 255 for infinity, as transformers has it.
    """
    codes = codes.reshape(*scales.shape, MXFP4_BLOCK // 2)
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    values = torch.tensor(_MXFP4, device=codes.device)[both.int()]
    powers = (scales.int() << 23).clamp(min=1 << 22).view(torch.float32)  # 2 ** -127 is no normal number
    return (values * powers[..., None]).flatten(-2)


def dot(weight: torch.Tensor, x: torch.Tensor, lanes: int = LANES, chunk: int = CHUNK) -> torch.Tensor:
    """Sums over the last dimension of ``weight * x`` (float32): in sequence in each lane, then by trees."""
    products = weight * x
    products = pad(products, (0, -products.shape[-1] % chunk)).unflatten(-1, (-1, chunk // lanes, lanes))
    sums = torch.zeros_like(products[..., 0, :])
    for step in range(chunk // lanes):
        sums = sums + products[..., step, :]
    return _tree(_tree(sums))


def _tree(sums: torch.Tensor) -> torch.Tensor:
    """Sum of the last dimension: of neighbours, then of neighbours among these sums, and so on."""
    while sums.shape[-1] > 1:
        sums = pad(sums, (0, sums.shape[-1] % 2))
        sums = sums[..., ::2] + sums[..., 1::2]
    return sums[..., 0]


def exp_of_minus(x: torch.Tensor) -> torch.Tensor:
    """exp(-x) of float32, by Cephes' polynomial; infinity from exp(88) on, and for NaN."""
    t = torch.where(x > -88, -x, 88)
    t = torch.where(t > -87, t, -87)
    power = (t * 1.44269504 + 12582912.0) - 12582912.0  # to the nearest whole number
    r = (t - power * 0.693359375) - power * -2.12194440e-4
    value = torch.full_like(r, 1.9875691500e-4)
    for coefficient in _EXP:
        value = value * r + coefficient
    value = value * (r * r) + r + 1.0
    value = value * ((power.int() + 127) << 23).view(torch.float32)
    return torch.where(x > -88, value, torch.inf)


def activated(gate: torch.Tensor, up: torch.Tensor, glu: Sequence[float]) -> torch.Tensor:
    """SiLU of ``gate`` times ``up``, bf16; with ``glu`` (alpha, limit) the clamped unit of gpt-oss."""
    if not glu:
        x = gate.float()
        return (x / (1.0 + exp_of_minus(x))).bfloat16() * up
    alpha, limit = glu
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    sigmoid = 1.0 / (1.0 + exp_of_minus((gate * alpha).float()))
    return (up + 1) * (gate * sigmoid.bfloat16())


def run_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Projection,
    down: Projection,
    is_interleaved: bool,
    glu: Sequence[float],
) -> torch.Tensor:
    """Each token's experts, weighed and added up in the order of ``ids``, with torch; slow.

    Args:
        x: bf16 [tokens, inputs].
        ids: [tokens, experts of a token]; a number that is no expert makes the token's outputs NaN.
        weights: bf16 or float32, like ``ids``; a product with bf16 is rounded to bf16.
        is_interleaved: outputs of ``gate_up`` are gate, up, gate, up, ...; else all gates come first.
        glu: see :func:`activated`.

    Returns:
        bf16 [tokens, outputs of ``down``].
    """
    outputs = []
    for token, row in enumerate(x):
        total = torch.zeros(down.outputs_and_inputs()[0], device=x.device)
        for expert, weight in zip(ids[token].tolist(), weights[token].split(1), strict=True):
            if not 0 <= expert < len(gate_up.weight):
                total = total + torch.nan
                continue
            both = gate_up(row, expert)
            gate, up = (both[::2], both[1::2]) if is_interleaved else both.chunk(2)
            total = total + down(activated(gate, up, glu), expert) * weight
        outputs.append(total.bfloat16())
    return torch.stack(outputs)
