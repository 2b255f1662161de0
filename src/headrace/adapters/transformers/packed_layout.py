"""Sizes of quantised weights from config.json alone: the tensors that files of each format hold, on ``meta``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from headrace.adapters.transformers.quantised import method_of
from headrace.errors import CheckpointError

# Shape and dtype of each tensor that stands for one `weight`, by the end of its name.
_Tensors: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]
_BNB_BLOCK, _BNB_NESTED_BLOCK = 64, 256  # weights per scale, and scales per scale of scales
_MXFP4_BLOCK = 32


def _bitsandbytes(stated: Mapping[str, Any], rows: int, columns: int) -> _Tensors:
    if not stated.get("load_in_4bit"):
        return {"weight": ((rows, columns), torch.int8), "SCB": ((rows,), torch.float32)}
    blocks = ceil(rows * columns / _BNB_BLOCK)
    found: _Tensors = {"weight": ((ceil(rows * columns / 2), 1), torch.uint8)}
    found["weight_quant_map"] = ((16,), torch.float32)
    if not stated.get("bnb_4bit_use_double_quant"):
        return {**found, "weight_absmax": ((blocks,), torch.float32)}
    nested = ((ceil(blocks / _BNB_NESTED_BLOCK),), torch.float32)
    found["weight_absmax"] = ((blocks,), torch.uint8)
    return {**found, "weight_nested_absmax": nested, "weight_nested_quant_map": ((256,), torch.float32)}


def _fp8(stated: Mapping[str, Any], rows: int, columns: int) -> _Tensors:
    block = stated.get("weight_block_size") or (rows, columns)
    scales = (ceil(rows / block[0]), ceil(columns / block[1]))
    return {"weight": ((rows, columns), torch.float8_e4m3fn), "weight_scale_inv": (scales, torch.float32)}


def _fp4(stated: Mapping[str, Any], rows: int, columns: int) -> _Tensors:
    """Experts of ``expert_dtype`` fp4 beside layers in fp8, as transformers' finegrained_fp8 allocates them."""
    scale = torch.float8_e8m0fnu if stated.get("scale_fmt") == "ue8m0" else torch.float32
    packed = (rows, columns // 2), torch.int8
    return {"weight": packed, "weight_scale_inv": ((rows, columns // _MXFP4_BLOCK), scale)}


def _mxfp4(stated: Mapping[str, Any], rows: int, columns: int) -> _Tensors:
    blocks = (columns, ceil(rows / _MXFP4_BLOCK))  # experts are stored transposed
    return {"blocks": ((*blocks, _MXFP4_BLOCK // 2), torch.uint8), "scales": (blocks, torch.uint8)}


def _in_groups(stated: Mapping[str, Any], rows: int, columns: int) -> _Tensors:
    """GPTQ and AWQ: integers of ``bits`` packed into 32, with zeros and scales per group of inputs."""
    bits = int(stated.get("bits") or stated.get("w_bit") or 4)
    size = int(stated.get("group_size") or stated.get("q_group_size") or 128)
    groups, packed = 1 if size < 0 else ceil(columns / size), ceil(rows * bits / 32)
    found: _Tensors = {"qzeros": ((groups, packed), torch.int32), "scales": ((groups, rows), torch.float16)}
    if method_of(stated) == "awq":
        return {"qweight": ((columns, packed), torch.int32), **found}
    shape = (ceil(columns * bits / 32), rows)
    return {"qweight": (shape, torch.int32), **found, "g_idx": ((columns,), torch.int32)}


def _int4(stated: Mapping[str, Any], rows: int, columns: int) -> _Tensors:
    """``pack-quantized`` of compressed-tensors: symmetric integers of four bits."""
    weights = next(iter(stated["config_groups"].values()))["weights"]
    size = weights.get("group_size") if weights.get("strategy") == "group" else columns
    packed = (rows, ceil(columns / 8)), torch.int32
    return {"packed": packed, "scale": ((rows, columns // size), torch.bfloat16)}


_LAYOUTS: Mapping[str, Callable[[Mapping[str, Any], int, int], _Tensors]] = {
    "awq": _in_groups,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _int4,
    "fp8": _fp8,
    "gptq": _in_groups,
    "mxfp4": _mxfp4,
}


def use_packed_layout(folder: Path, model: PreTrainedModel, stated: Mapping[str, Any]) -> None:
    """Give the layers of a plain ``model`` on ``meta`` that ``stated`` (quantization_config) quantises packed tensors.

    Raises:
        CheckpointError: a format whose sizes do not follow from config.json, or one that quantises nothing here.
    """
    method = method_of(stated)
    if method not in _LAYOUTS or (method == "compressed-tensors" and not _keeps_int4(stated)):
        form = stated.get("format") or stated.get("quant_algo")
        raise CheckpointError(
            f"{folder}/config.json: expected a quantization whose sizes follow from it ({', '.join(_LAYOUTS)} with "
            f"symmetric int4 alone), found {method}{f' with {form}' if form else ''}; its files have headers that say "
            f"them: download the model first, or take a release in one of these"
        )
    skipped = [*(stated.get("modules_to_not_convert") or ()), *(stated.get("llm_int8_skip_modules") or ())]
    skipped += [key.removeprefix("-:") for key in (stated.get("dynamic") or {}) if key.startswith("-:")]  # of GPTQ
    kept = [*skipped, *get_keys_to_not_convert(model)]
    weights = [
        (module, attr, tensor)
        for path, module in model.named_modules()
        for attr, tensor in list(module._parameters.items())
        if tensor is not None and _is_quantised(module, path, tensor, method) and should_convert_module(path, kept)
    ]
    if not weights:
        raise CheckpointError(f"{folder}/config.json: expected layers that {method} quantises, found none; correct it")
    for module, attr, tensor in weights:
        module._parameters[attr] = None
        *experts, rows, columns = tensor.shape
        is_fp4 = bool(experts) and method == "fp8" and stated.get("expert_dtype") == "fp4"
        for ending, (shape, dtype) in (_fp4 if is_fp4 else _LAYOUTS[method])(stated, rows, columns).items():
            empty = torch.empty((*experts, *shape), dtype=dtype, device="meta")
            module.register_parameter(_attr(attr, ending), nn.Parameter(empty, requires_grad=False))


def _keeps_int4(stated: Mapping[str, Any]) -> bool:
    """Whether headrace's experts keep the integers of the files."""
    groups = list((stated.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") or {}) if len(groups) == 1 else {}
    is_int4 = (weights.get("num_bits"), weights.get("type"), weights.get("symmetric")) == (4, "int", True)
    return is_int4 and stated.get("format") == "pack-quantized" and not weights.get("actorder")


def _is_quantised(module: nn.Module, path: str, tensor: torch.Tensor, method: str) -> bool:
    """Whether it is the weight of a linear layer, or of all experts of a layer together."""
    if path.endswith(".experts"):
        return tensor.ndim == 3
    # Linear layers of compressed-tensors run decompressed, and gpt-oss has none that are quantised.
    return method not in ("mxfp4", "compressed-tensors") and type(module) is nn.Linear and tensor.ndim == 2


def _attr(attr: str, ending: str) -> str:
    if attr == "weight":
        return ending
    rest = ending.removeprefix("weight").strip("_")
    return f"{attr}_{rest}" if rest else attr
