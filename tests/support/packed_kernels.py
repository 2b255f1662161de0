"""What of triton_kernels (3.5.1) holds packed experts and runs them, for a CPU: objects, tiles, and two products.

Weights lie mirrored, as a layout of MXFP4 permutes bytes within an expert. A product is summed in blocks whose size
depends on the place of a tile and on the number of experts, so other tiles, or another number, would give other bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

HEIGHTS = 2, 4  # of tiles
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_FP4 = torch.cat((_FP4, -_FP4))


@dataclass
class Storage:
    data: torch.Tensor
    layout: str = "mirrored"

    def unswizzled(self) -> torch.Tensor:
        return self.data.flip(-2)


@dataclass
class Tensor:
    storage: Storage
    shape: list[int]
    shape_max: list[int] | None = None


@dataclass
class PrecisionConfig:
    weight_scale: Tensor


def swizzled(data: torch.Tensor) -> Tensor:
    """``data``: [experts, outputs, size of a sum]."""
    held = data.flip(-1).contiguous().mT
    return Tensor(Storage(held), list(held.shape))


@dataclass
class ExptData:
    hist: torch.Tensor
    token_offs_raw: torch.Tensor
    token_offs_pad: dict[int, torch.Tensor]
    block_pid_map: dict[int, torch.Tensor]


@dataclass
class RoutingData:
    gate_scal: torch.Tensor
    n_expts_tot: int
    n_expts_act: int
    expt_data: ExptData


@dataclass
class Indices:
    src_indx: torch.Tensor
    dst_indx: torch.Tensor


def route(
    ids: torch.Tensor, weights: torch.Tensor, num_experts: int, heights: tuple[int, ...] = HEIGHTS
) -> tuple[RoutingData, Indices, Indices]:
    """Tokens sorted by the number of their expert, in tiles; numbers below 0 are left out."""
    flat = ids.flatten().long()
    order = torch.where(flat < 0, num_experts, flat).sort(stable=True).indices
    hist = torch.bincount(flat[flat >= 0], minlength=num_experts)
    tiles: dict[int, torch.Tensor] = {}
    first: dict[int, torch.Tensor] = {}
    for height in heights:
        counts = -(-hist // height)
        first[height] = _offsets(counts)
        used = [expert + (place << 16) for expert, n in enumerate(counts.tolist()) for place in range(n)]
        tiles[height] = torch.tensor(used + [-1] * (flat.numel() + 1 - len(used)), dtype=torch.int32)
    place = order.argsort()
    data = ExptData(hist.int(), _offsets(hist), first, tiles)
    found = RoutingData(weights.flatten()[order], num_experts, ids.shape[1], data)
    return found, Indices(order.int(), place.int()), Indices(place.int(), order.int())


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    return functional.pad(counts.cumsum(0), (1, 0)).int()


def product(
    x: torch.Tensor, weight: Tensor, bias: torch.Tensor, routing: RoutingData, config: PrecisionConfig
) -> torch.Tensor:
    """``x`` in the order of tokens that tiles have, each times the weight that its tile names."""
    data = routing.expt_data
    made = torch.zeros(len(x), weight.shape[2])
    height = HEIGHTS[len(x) > 3 * routing.n_expts_tot]
    for place, tile in enumerate(data.block_pid_map[height].tolist()):
        if tile < 0:
            continue
        expert, block = tile & 0xFFFF, tile >> 16
        count, start = int(data.hist[expert]), int(data.token_offs_raw[expert])
        values, scales = weight.storage.unswizzled()[expert], config.weight_scale.storage.unswizzled()[expert]
        if values.dtype == torch.uint8:  # MXFP4
            values, scales = (
                _FP4[torch.stack((values & 15, values >> 4), 1).flatten(0, 1).long()],
                2.0 ** (scales - 127.0),
            )
        values = values * scales.repeat_interleave(len(values) // len(scales), 0)
        step = 8 << ((place + routing.n_expts_tot) % 3)
        for at in range(start + block * height, start + min(count, (block + 1) * height)):
            for k in range(0, x.shape[1], step):
                made[at] += x[at, k : k + step] @ values[k : k + step]
            made[at] += bias[expert]
    return made


def fused_experts(
    output: torch.Tensor, x: torch.Tensor, w1: Any, w2: Any, routing: RoutingData, gather: Indices, config: Any
) -> torch.Tensor:
    """The output of the experts, written into ``output``."""
    given = x[gather.src_indx.long() // routing.n_expts_act]
    gate, up = product(given, w1, config._w1.bias, routing, config._w1.scale).chunk(2, dim=-1)
    down = product(functional.silu(gate) * up, w2, config._w2.bias, routing, config._w2.scale)
    down = down * routing.gate_scal[:, None]
    kept = int(routing.expt_data.token_offs_pad[HEIGHTS[0]][-1]) > 0
    output.copy_(down[gather.dst_indx.long()].view(len(x), routing.n_expts_act, -1).sum(1) * kept)
    return output


# -- what transformers calls -------------------------------------------------------------------------------------------


def _matmul_ogs(
    x: torch.Tensor, w: Tensor, bias: torch.Tensor, routing_data: RoutingData, gather_indx: Indices | None = None,
    scatter_indx: Indices | None = None, precision_config: Any = None, gammas: Any = None, fused_activation: Any = None,
) -> torch.Tensor:  # fmt: skip
    given = x.float() if gather_indx is None else x.float()[gather_indx.src_indx.long() // routing_data.n_expts_act]
    found = product(given, w, bias, routing_data, precision_config)
    if fused_activation is not None:
        gate, up = found[:, ::2], found[:, 1::2]
        found = functional.silu(gate) * up
    if scatter_indx is not None:
        found = found * gammas[:, None]
        found = found[scatter_indx.src_indx.long()].view(-1, routing_data.n_expts_act, found.shape[-1]).sum(1)
    return found.to(x.dtype)


def _routing(logits: torch.Tensor, top_k: int) -> tuple[RoutingData, Indices, Indices]:
    weights, ids = logits.float().topk(top_k)
    return route(ids, weights.softmax(-1), logits.shape[-1])


def _config(weight_scale: Tensor, flex_ctx: Any) -> PrecisionConfig:
    return PrecisionConfig(weight_scale)


hub = SimpleNamespace(
    matmul_ogs=SimpleNamespace(
        PrecisionConfig=_config, FlexCtx=SimpleNamespace, InFlexData=SimpleNamespace, matmul_ogs=_matmul_ogs,
        FnSpecs=lambda *_: None, FusedActivation=lambda *_: "swiglu",
    ),
    tensor=SimpleNamespace(
        FP4=None,
        wrap_torch_tensor=lambda data, dtype=None: Tensor(Storage(data), list(data.shape)),
        convert_layout=lambda tensor, layout, **_: swizzled(tensor.storage.data.mT),
    ),
    tensor_details=SimpleNamespace(
        layout=SimpleNamespace(StridedLayout=None, make_default_matmul_mxfp4_w_layout=lambda mx_axis: (None, {}))
    ),
    swiglu=SimpleNamespace(swiglu_fn=None),
    routing=SimpleNamespace(routing=_routing),
)  # fmt: skip


def use_in_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have transformers run MXFP4 with them on a CPU."""
    from transformers.integrations import hub_kernels
    from transformers.quantizers import quantizer_mxfp4

    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *_, **__: hub)
    monkeypatch.setattr(quantizer_mxfp4, "get_current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(quantizer_mxfp4.Mxfp4HfQuantizer, "validate_environment", lambda *_, **__: None)
    monkeypatch.setattr("headrace.adapters.transformers.quantised._DEQUANTISED_ON_CPU", ())
