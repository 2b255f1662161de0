"""The experts implementation ``headrace`` of transformers: for up to 8 rows the order of :mod:`headrace.experts.order`.

Importing this registers it, so ``from_pretrained(..., experts_implementation="headrace")`` takes it, too, and
``model.set_experts_implementation("headrace")``. More rows are multiplied by ``grouped_mm``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.integrations import moe

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


moe.ALL_EXPERTS_FUNCTIONS.register(NAME, ordered_experts_forward)


def arguments_of(module: Any) -> tuple[Projection, Projection, bool, tuple[float, ...]]:
    """What :func:`headrace.experts.ordered.run` is given of ``module``; raises ``OptionError`` if it cannot run it."""
    if isinstance(module, Mxfp4Experts):
        names, ends = ("gate_up_proj", "down_proj"), ("blocks", "scales", "bias")
        first, second = (Projection(*(getattr(module, f"{name}_{end}") for end in ends)) for name in names)
        return first, second, True, (module.alpha, module.limit)
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
        if len(hidden_states) > MAX_ROWS:
            return self._one_by_one(hidden_states, top_k_index, top_k_weights)
        return ordered.run(hidden_states, top_k_index, top_k_weights, *arguments_of(self), shared=shared_with(self))

    def _one_by_one(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Many rows: each expert in use is made bf16, and multiplied with its tokens; the host waits for ``ids``."""
        first, second, *_ = arguments_of(self)
        outputs = x.new_empty(*ids.shape, x.shape[1])
        biases: Any = first.bias, second.bias
        for row in ids.unique().tolist():
            token, place = torch.where(ids == row)
            both = linear(x[token], first.values(row).to(x.dtype), biases[0][row])
            gate, up = both[:, ::2].clamp(max=self.limit), both[:, 1::2].clamp(-self.limit, self.limit)
            inner = (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
            outputs[token, place] = linear(inner, second.values(row).to(x.dtype), biases[1][row])
        return (outputs * weights[..., None]).sum(1).to(x.dtype)


def put_mxfp4_experts(model: PreTrainedModel) -> None:
    """Give a plain gpt-oss on ``meta`` experts with the tensors of MXFP4 files."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "GptOssExperts":
            with torch.device("meta"):
                model.set_submodule(name, Mxfp4Experts(model.config))


def prefer_ordered(model: PreTrainedModel) -> None:
    """Have this implementation run the experts of ``model`` in place of ``grouped_mm``, if it can run them all."""
    if any(chosen_implementation(module) == "grouped_mm" for module in model.modules()):
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
            if not isinstance(module, Mxfp4Experts):
                _glu_of(module)
            order.require_bf16(*(each for each in module.parameters() if each.is_floating_point()))
