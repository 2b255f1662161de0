"""Cached experts inside vLLM: its Triton and Marlin kernels of experts, and triton_kernels, read the rows of a cache.

vLLM runs the experts of a layer by one object (``FusedMoEExpertsModular``), with the weights and the expert numbers of
each token as arguments. The kernel indexes weights by these numbers, so headrace passes a range with all rows of the
cache in place of the weights, and rows in place of numbers. Its quantisation config has the other tensors that it reads
per expert (scales, zero points, biases).

Marlin splits the sum of a product between thread blocks by the position of a tile, and tiles are sorted by the number
of their expert. So the numbers stay until they are sorted, and only the expert of each tile is replaced by its row. So
it is with triton_kernels (MXFP4), which also keeps weights and scales in objects: :mod:`headrace.experts.packed`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import override_config
from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as oai_moe
from vllm.model_executor.layers.fused_moe.experts import marlin_moe
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from headrace.experts.packed import at_rows, hold_packed, route_by_rows
from headrace.experts.rows import RowMap
from headrace.offloaders.build_time import mark_host_resident

logger = init_logger("vllm.headrace")

_PARTS = ("_a1", "_a2", "_w1", "_w2")  # of FusedMoEQuantConfig
_BESIDE = "MegaMoEExperts"  # how classes of experts with a kernel of their own are called, beside RoutedExperts
_PACKED = (oai_moe.OAITritonMxfp4ExpertsMonolithic, oai_moe.OAITritonExperts)


class KernelExperts:
    """Makes the kernel of one layer read the rows of a cache, from :meth:`attach` to :meth:`remove`."""

    def __init__(self, module: nn.Module, tensors: Mapping[str, torch.Tensor], cache: RowMap) -> None:
        """
        Args:
            module: one that :meth:`find` returns without a reason.
            tensors: by attribute of ``module``, all rows [rows, ...].
            cache: the row of each expert.
        """
        self._cache = cache
        self._kernel: Any = _kernel_of(module)
        self._num_rows = len(next(iter(tensors.values())))
        own: dict[int, Any] = {id(getattr(module, name)): rows for name, rows in tensors.items()}
        for _, weight, config in _packed(module):
            own[id(weight)], own[id(config)] = at_rows(weight, config, tensors)
        if isinstance(self._kernel, marlin_moe.MarlinExperts):
            _say_that_marlin_varies()
            # It chooses the height of tiles by the number of experts, and reads a row at any distance from the first.
            own = {key: rows[: module.local_num_experts] for key, rows in own.items()}
        self._w13, self._w2 = own[id(module.w13_weight)], own[id(module.w2_weight)]
        self._quant_config = copy.copy(self._kernel.quant_config)
        self._scales: list[tuple[torch.Tensor, torch.Tensor]] = []  # by expert, and by row with one for none
        for part, desc in _descs(self._quant_config):
            by_rows = {name: own.get(id(value), value) for name, value in vars(desc).items()}
            if _has_scale_of_expert(module, self._kernel, part, scale := desc.alpha_or_gscale):
                self._scales.append((scale, scale.new_zeros(self._num_rows + 1)))
                by_rows["alpha_or_gscale"] = self._scales[-1][1][: module.local_num_experts]
            setattr(self._quant_config, part, replace(desc, **by_rows))
        # For expert parallelism: a row maps to itself, and one further number stands for experts of other ranks.
        numbers = torch.arange(self._num_rows + 1, dtype=torch.int32, device=cache.location.device)
        self._map_of_rows = torch.where(numbers < self._num_rows, numbers, -1)

    @staticmethod
    def find(model: nn.Module) -> dict[str, str | None]:
        """The modules of experts in ``model``: by name, why the kernel of each cannot read rows; ``None``: it can.

        Before the weights are loaded there is no kernel yet, and the class of the kernel decides.
        """
        found = {}
        for name, module in model.named_modules():
            if isinstance(module, RoutedExperts):
                found[name] = _why_not(module)
            elif (kind := type(module).__name__).endswith(_BESIDE):
                found[name] = f"{kind} runs them, which reads no rows: choose another kernel (--moe-backend marlin)"
        return found

    @staticmethod
    def hold_packed(module: Any) -> dict[str, str]:
        """Make parameters of what the kernel of ``module`` keeps in objects; by name, whose place each takes."""
        held = (hold_packed(module, *each, module.local_num_experts) for each in _packed(module))
        return {made: replaced for names in held for made, replaced in names.items()}

    def attach(self) -> None:
        """Point the kernel here."""
        vars(self._kernel)["apply"] = self._apply

    def remove(self) -> None:
        """Undo :meth:`attach`."""
        vars(self._kernel).pop("apply", None)

    def _apply(self, **arguments: Any) -> Any:
        """vLLM calls it by keywords. Its ``w1`` and ``w2`` have the shapes that a kernel is tuned for."""
        by_rows: Any = copy.copy(self._kernel)  # now, since vLLM sets attributes of it at any time
        vars(by_rows).pop("apply")
        by_rows.quant_config = self._quant_config
        if isinstance(by_rows, _PACKED):
            with _replaced(oai_moe, "triton_kernel_fused_experts", self._run_packed):
                return by_rows.apply(**arguments)
        return self._apply_rows(by_rows, **arguments)

    def _run_packed(self, run: Callable[..., Any], *given: Any, **kinds: Any) -> Any:
        """Replace ``run``, which gets weights, and the tiles of a step."""
        output, x, _, _, routing, *indices = given
        routing, ids, rows = route_by_rows(routing, self._cache, self._num_rows)
        result = run(output, x, self._w13, self._w2, routing, *indices, **kinds)
        self._cache.compare(ids, rows)
        return result

    def _apply_rows(self, by_rows: Any, *, w1: Any, w2: Any, topk_ids: torch.Tensor, **arguments: Any) -> Any:
        expert_map = arguments["expert_map"]
        ids = topk_ids if expert_map is None else expert_map[topk_ids]
        rows = self._cache.admit(ids.contiguous())
        if isinstance(by_rows, marlin_moe.MarlinExperts):
            arguments["topk_ids"] = topk_ids
            for scale, by_row in self._scales:
                by_row[rows.flatten()] = scale[ids.flatten()]  # -1 is an expert of another rank
            as_resident = _replaced(marlin_moe, "moe_align_block_size", _align_rows, rows)
        else:
            _, num_tokens, _, _, top_k = by_rows.moe_problem_size(arguments["hidden_states"], w1, w2, topk_ids)
            # Block sizes set the order in which products are summed, and vLLM chooses them by the number of experts.
            dtype = by_rows.quant_config.config_name(arguments["hidden_states"].dtype)
            config = try_get_optimal_moe_config(w1.size(), w2.size(), top_k, dtype, num_tokens, by_rows.block_shape)
            # Experts beyond the slots are read over the link, so once each and not once per token.
            mark_host_resident(self._w13, topk_ids.numel() > self._cache.num_slots)
            arguments |= self._numbers_of(rows, topk_ids.dtype, is_divided=expert_map is not None)
            as_resident = override_config(config)
        with as_resident:
            result = by_rows.apply(**{**arguments, "w1": self._w13, "w2": self._w2})
        self._cache.compare(ids, rows)
        return result

    def _numbers_of(self, rows: torch.Tensor, dtype: torch.dtype, is_divided: bool) -> dict[str, Any]:
        """Arguments with ``rows`` in place of numbers; those of divided experts are numbers of all ranks' experts."""
        num_rows = self._num_rows
        if not is_divided:
            return {"topk_ids": rows, "global_num_experts": num_rows}
        return {
            "topk_ids": torch.where(rows < 0, num_rows, rows).to(dtype),
            "expert_map": self._map_of_rows,
            "global_num_experts": num_rows + 1,
        }


@functools.cache
def _say_that_marlin_varies() -> None:
    logger.info(
        "headrace: vLLM's Marlin kernel of experts repeats its own bits for up to 8 sequences at once; with more it "
        "may not, without a cache either. HEADRACE_DEBUG=1 compares the rows that it reads with the stored weights"
    )


def _align_rows(align: Any, rows: torch.Tensor, topk_ids: Any, block_size: int, *args: Any, **kinds: Any) -> Any:
    """The result of vLLM's ``align``, with the row of each tile's expert; ``rows`` has one for each id."""
    positions, _, num_padded = align(topk_ids, block_size, *args, **kinds)
    first = positions[::block_size].clamp(0, rows.numel() - 1)  # unused tiles hold any number
    return positions, rows.flatten().index_select(0, first).int(), num_padded


@contextmanager
def _replaced(module: ModuleType, name: str, by: Callable[..., Any], *given: Any) -> Iterator[None]:
    """Within, ``by`` runs in the place of a function of vLLM's, and is given that and ``given`` first."""
    before = getattr(module, name)
    setattr(module, name, functools.partial(by, before, *given))
    try:
        yield
    finally:
        setattr(module, name, before)


def _why_not(module: Any) -> str | None:
    method, layout = module.quant_method, module.moe_config
    kernel = _kernel_of(module)
    kind = getattr(method, "experts_cls", None) if kernel is None else type(kernel)
    if kind not in (TritonExperts, marlin_moe.MarlinExperts, *_PACKED):
        name = getattr(kind, "__name__", type(method).__name__)
        return f"{name} runs them, which may not read rows: choose another kernel (--moe-backend triton, or marlin)"
    if kind in _PACKED and oai_moe.triton_kernels_version != "3.5.1":
        return f"triton_kernels {oai_moe.triton_kernels_version} lists tiles in another way: remove it, vLLM has 3.5.1"
    if layout.moe_parallel_config.use_all2all_kernels or layout.moe_parallel_config.enable_eplb:
        return "tokens or experts move between ranks (data and expert parallelism together, --enable-eplb)"
    if layout.is_lora_enabled:
        return "LoRA adapters of experts are read by their numbers (--enable-lora)"
    if kernel is None:
        return None
    if not all(hasattr(weight.storage, "holder") for _, weight, _ in _packed(module)):
        return "its kernel keeps them in a layout that mixes experts: choose another kernel (--moe-backend marlin)"
    own = {id(parameter) for parameter in module.parameters(recurse=False)}
    for part, desc in _descs(kernel.quant_config):
        for name, value in vars(desc).items():
            per_expert = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == module.local_num_experts
            is_kept = name == "alpha_or_gscale" and _has_scale_of_expert(module, kernel, part, value)
            if per_expert and (id(value) not in own or (value.dim() < 2 and not is_kept)):
                return f"its kernel has a {part.strip('_')}.{name} {list(value.shape)} per expert outside the module"
    return None


def _has_scale_of_expert(module: Any, kernel: Any, part: str, scale: Any) -> bool:
    """Whether ``scale`` is one float per expert of NVFP4's weights, which Marlin takes beside the scales of blocks."""
    of_weights = isinstance(kernel, marlin_moe.MarlinExperts) and part in ("_w1", "_w2") and scale is not None
    return of_weights and scale.shape == (module.local_num_experts,)


def _kernel_of(module: Any) -> Any:
    """The kernel of the experts of ``module``; ``None`` before their weights are final."""
    made = getattr(module.quant_method, "moe_kernel", None)
    return None if made is None else made.fused_experts


def _packed(module: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, weight and ``PrecisionConfig`` of what a kernel keeps in objects of triton_kernels; of others nothing."""
    quant_config = getattr(isinstance(module, RoutedExperts) and _kernel_of(module), "quant_config", None)
    for name, part in (("w13_weight", "_w1"), ("w2_weight", "_w2")):
        config = getattr(getattr(quant_config, part, None), "scale", None)
        if hasattr(config, "weight_scale"):
            yield name, getattr(module, name), config


def _descs(quant_config: Any) -> Iterator[tuple[str, Any]]:
    return ((part, getattr(quant_config, part)) for part in _PARTS)
