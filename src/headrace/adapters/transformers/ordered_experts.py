"""The experts implementation ``headrace`` of transformers: for up to 8 rows the order of :mod:`headrace.experts.order`.

Importing this registers it, so ``from_pretrained(..., experts_implementation="headrace")`` takes it, too, and
``model.set_experts_implementation("headrace")``. More rows are multiplied by ``grouped_mm``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel
from transformers.integrations import compressed_tensors, finegrained_fp8, moe
from transformers.quantizers.quantizers_utils import should_convert_module

from headrace.checkpoint.safetensors_header import FileTensor
from headrace.errors import OptionError
from headrace.experts import order, ordered
from headrace.experts.order import MAX_ROWS, MXFP4_BLOCK, Projection
from headrace.experts.rows import shared_with
from headrace.model.memory_profile import chosen_implementation

NAME = "headrace"


def ordered_experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Forward of transformers' experts; ``top_k_index`` holds numbers of experts, or their rows in a cache.

    Raises:
        OptionError: experts with another activation, another dtype than bf16, or split among ranks.
    """
    module: Any = self
    arguments = arguments_of(module)
    if len(hidden_states) > MAX_ROWS:
        return moe.grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    return ordered.run(hidden_states, top_k_index, top_k_weights, *arguments, shared=shared_with(module))


def ordered_fp8_experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Forward of experts in fp8 blocks: weights become bf16, and activations stay what they are.

    Kernels of transformers, which round activations to fp8, too, run more rows on a GPU.
    """
    module: Any = self
    _glu_of(module)
    if len(hidden_states) > MAX_ROWS and hidden_states.is_cuda:
        return finegrained_fp8.fp8_grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    return _run_quantised(hidden_states, top_k_index, top_k_weights, module)


moe.ALL_EXPERTS_FUNCTIONS.register(NAME, ordered_experts_forward)
finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, ordered_fp8_experts_forward)


def _fp8_projections(module: Any) -> tuple[Projection, Projection]:
    scales = (module.gate_up_proj_scale_inv.float(), module.down_proj_scale_inv.float())  # exponents alone, in some
    return Projection(module.gate_up_proj, scales[0]), Projection(module.down_proj, scales[1])


def _projections(module: nn.Module, codes: str, scales: str) -> tuple[Projection, Projection]:
    tensors: Mapping[str, Any] = module._parameters
    first, second = (
        Projection(tensors[f"{name}_{codes}"], tensors[f"{name}_{scales}"], tensors.get(f"{name}_bias"))
        for name in ("gate_up_proj", "down_proj")
    )
    return first, second


def _run_quantised(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, module: Any) -> torch.Tensor:
    """Experts in the order of sums; for many rows each expert in use is unpacked, and multiplied with its tokens.

    The host waits for ``ids`` of many rows.
    """
    first, second, is_interleaved, glu = arguments_of(module)
    if ordered.is_few(x, ids, weights, first.form):
        return ordered.run(x, ids, weights, first, second, is_interleaved, glu, shared=shared_with(module))
    pairs = ids.flatten().argsort(stable=True)
    rows, counts = (each.tolist() for each in ids.flatten()[pairs].unique_consecutive(return_counts=True))

    def multiplied(x: torch.Tensor, by: Projection) -> torch.Tensor:
        """Products of the rows of ``x``, which are sorted by expert."""
        room = torch.empty(by.outputs_and_inputs(), dtype=torch.bfloat16, device=x.device)
        outputs = []
        for part, row in zip(x.split(counts), rows, strict=True):
            # Gradients keep the weights of every expert.
            weight = ordered.unpack(by, row, torch.empty_like(room) if x.requires_grad else room)
            outputs.append(linear(part, weight.to(x.dtype), None if by.bias is None else by.bias[row]))
        return torch.cat(outputs)

    both = multiplied(x[pairs // ids.shape[1]], first)
    gate, up = (both[:, ::2], both[:, 1::2]) if is_interleaved else both.chunk(2, -1)
    if glu:
        gate, up = gate.clamp(max=glu[1]), up.clamp(-glu[1], glu[1])
        inner = (up + 1) * (gate * torch.sigmoid(gate * glu[0]))
    else:
        inner = silu(gate) * up
    outputs = x.new_empty(len(pairs), x.shape[1])
    outputs[pairs] = multiplied(inner, second)
    return (outputs.view(*ids.shape, -1) * weights[..., None]).sum(1).to(x.dtype)


def arguments_of(module: Any) -> tuple[Projection, Projection, bool, tuple[float, ...]]:
    """Arguments of :func:`headrace.experts.ordered.run` for ``module``; ``OptionError`` if it cannot run it."""
    if isinstance(module, Mxfp4Experts):
        return *_projections(module, "blocks", "scales"), True, (module.alpha, module.limit)
    if isinstance(module, Int4Experts):
        return *_projections(module, "packed", "scale"), False, ()
    if isinstance(module, finegrained_fp8.FP8Experts):
        return *_fp8_projections(module), False, _glu_of(module)
    glu, is_transposed = _glu_of(module), module.is_transposed
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    first = Projection(module.gate_up_proj, None, biases[0], is_transposed)
    return first, Projection(module.down_proj, None, biases[1], is_transposed), not module.is_concatenated, glu


def _glu_of(module: Any) -> tuple[float, ...]:
    """Activation of ``module``, for :func:`headrace.experts.order.activated`; raises ``OptionError`` for others."""
    gate = getattr(type(module), "_apply_gate", None)
    found = f"the activation of {type(module).__name__}"
    is_split = getattr(module, "_is_expert_parallel", False)  # not in transformers 5.17
    if is_split or not module.has_gate or getattr(module, "has_post_expert_norm", False):
        found = "experts without a gate, with a norm of their own, or split among ranks"
    elif isinstance(module, finegrained_fp8.FP8Experts):
        found = "experts in fp8 with fixed scales of activations, in four bits, or with limits of their own"
        limits = (module.gate_softcap, module.limit, module.swiglu_alpha)
        is_plain = limits == (None,) * 3 and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")
        if is_plain and module.activation_scheme == "dynamic" and module.gate_up_proj.dtype == torch.float8_e4m3fn:
            return ()
    elif gate is moe._default_apply_gate and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation"):
        return ()
    elif getattr(gate, "__qualname__", None) == "GptOssExperts._apply_gate":
        return module.alpha, module.limit
    raise OptionError(
        f"experts_implementation {NAME!r}: expected gated experts with SiLU, or those of gpt-oss, found {found}: use "
        f"experts_implementation='grouped_mm', or leave it out"
    )


class Mxfp4Experts(nn.Module):
    """gpt-oss's experts in MXFP4 with the tensors of the files, unchanged: no package of kernels is needed."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.num_experts, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.alpha, self.limit = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            scales = torch.empty(self.num_experts, rows, columns // MXFP4_BLOCK, dtype=torch.uint8)
            codes = torch.empty(*scales.shape, MXFP4_BLOCK // 2, dtype=torch.uint8)
            bias = torch.empty(self.num_experts, rows, dtype=torch.bfloat16)
            for end, tensor in (("blocks", codes), ("scales", scales), ("bias", bias)):
                self.register_parameter(f"{name}_{end}", nn.Parameter(tensor, requires_grad=False))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Forward in the order of sums; see :func:`ordered_experts_forward`."""
        return _run_quantised(hidden_states, top_k_index, top_k_weights, self)


class Int4Experts(nn.Module):
    """Experts in int4 of compressed-tensors (``pack-quantized``) with the tensors of the files, side by side."""

    def __init__(self, plain: Any, group_size: int | None) -> None:
        super().__init__()
        self.config, self.num_experts = plain.config, plain.num_experts
        for name in ("gate_up_proj", "down_proj"):
            count, rows, columns = getattr(plain, name).shape
            packed = torch.empty(count, rows, columns // 8, dtype=torch.int32)
            scales = torch.empty(count, rows, columns // (group_size or columns), dtype=torch.bfloat16)
            for end, tensor in (("packed", packed), ("scale", scales)):
                self.register_parameter(f"{name}_{end}", nn.Parameter(tensor, requires_grad=False))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Forward in the order of sums; see :func:`ordered_experts_forward`."""
        return _run_quantised(hidden_states, top_k_index, top_k_weights, self)


def put_mxfp4_experts(model: PreTrainedModel) -> None:
    """Give a plain gpt-oss on ``meta`` experts with the tensors of MXFP4 files."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "GptOssExperts":
            with torch.device("meta"):
                model.set_submodule(name, Mxfp4Experts(model.config))


def keep_quantised(model: PreTrainedModel, quantizer: Any, tensors: Mapping[str, FileTensor]) -> None:
    """Give ``model``, on ``meta``, experts with ``tensors`` of the files where ``quantizer`` would make them bf16.

    Its converters then merge packed numbers and scales as they merge weights. Scales of int4 that are not bf16 would
    make other weights.
    """
    scales = {name.rpartition(".")[2]: tensor.dtype for name, tensor in tensors.items() if ".experts." in name}
    is_fp8, is_int4 = "weight_scale_inv" in scales, scales.get("weight_scale") == torch.bfloat16
    ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), r"\.experts\.(gate_up|down)_proj_shape$"}
    for name, module in list(model.named_modules()):
        if chosen_implementation(module) != NAME or not name.endswith(".experts"):
            continue
        with torch.device("meta"):
            made = _fp8_experts(quantizer, name, module) if is_fp8 else None
            made = _int4_experts(quantizer, module) if is_int4 else made
        if made is not None:
            model.set_submodule(name, made)
            vars(model)["_keys_to_ignore_on_load_unexpected"] = ignored  # what int4's packed tensors say themselves


def _fp8_experts(quantizer: Any, name: str, module: Any) -> nn.Module | None:
    stated = quantizer.quantization_config
    is_fp8 = getattr(stated, "weight_block_size", None) and getattr(stated, "dequantize", False)
    if not is_fp8 or not should_convert_module(name, getattr(quantizer, "modules_to_not_convert", None)):
        return None
    kind = moe.use_experts_implementation(
        experts_class=type("FP8Experts", (finegrained_fp8.FP8Experts,), {}),
        experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS, has_bias=module.has_bias, has_gate=module.has_gate,
    )  # fmt: skip
    options = {key: getattr(stated, key) for key in ("activation_scheme", "scale_fmt", "expert_dtype")}
    made: nn.Module = kind(module.config, stated.weight_block_size, **options)
    return made


def _int4_experts(quantizer: Any, module: Any) -> nn.Module | None:
    compressor = getattr(quantizer, "compressor", None)
    if compressor is None or module.has_bias or module.is_transposed or _glu_of(module):
        return None
    config = compressor.quantization_config
    scheme: Any = compressed_tensors.get_experts_scheme(config)  # type: ignore[no-untyped-call]
    stated, layout = scheme.weights, scheme.format or config.format
    is_plain = (stated.num_bits, stated.type, stated.symmetric, layout) == (4, "int", True, "pack-quantized")
    if not is_plain or stated.strategy not in ("group", "channel") or stated.actorder == "group":
        return None
    size = stated.group_size if stated.strategy == "group" else None
    return None if (size or MXFP4_BLOCK) % MXFP4_BLOCK else Int4Experts(module, size)  # no kernel has others


def prefer_ordered(model: PreTrainedModel) -> None:
    """Have this implementation run the experts of ``model`` in place of ``grouped_mm``, if it can run them all."""
    modules = [module for module in model.modules() if chosen_implementation(module) == "grouped_mm"]
    # Experts in fp8 round activations by their own kernels: other numbers come only where they are asked for.
    if modules and not any(isinstance(module, finegrained_fp8.FP8Experts) for module in modules):
        model.set_experts_implementation(NAME)
        try:
            require_effect(model, NAME)
        except OptionError:
            model.set_experts_implementation("grouped_mm")


def require_effect(model: PreTrainedModel, name: str) -> None:
    """Raise ``OptionError`` if the experts of ``model``, which is built, cannot run by ``name``, or if it has none."""
    modules = [module for module in model.modules() if chosen_implementation(module) == name]
    if not modules:
        raise OptionError(
            f"experts_implementation {name!r}: expected a model with fused experts of transformers, found "
            f"{type(model).__name__} without: leave it out"
        )
    if name == NAME:
        for module in modules:
            if not isinstance(module, (Mxfp4Experts, Int4Experts)):
                _glu_of(module)
            if isinstance(module, finegrained_fp8.FP8Experts):
                for each in _fp8_projections(module):
                    order.require_blocks(each, cast(torch.Tensor, each.scales))
            else:
                order.require_bf16(*(each for each in module.parameters() if each.is_floating_point()))
