"""Tiny checkpoints in every format of quantised weights, with seeded numbers.

All but those of torchao and bitsandbytes are written without the library of the format, as their packed tensors alone.
``python tests/support/quantised_checkpoints.py OUT.jsonl`` loads and offloads each on a CPU and writes what came of it;
with ``cuda`` behind that, on a GPU, into the rows that are there.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import headrace
import plain_fp8
from headrace.adapters.transformers import load
from headrace.errors import HeadraceError, HeadraceWarning
from models import aligned

Pack = Callable[[int, int], dict[str, torch.Tensor]]

GROUP = 32
SIZE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 64}
MOVES = headrace.Prefetch(prefetch_step=1, params=[headrace.config.ALL_MODEL_PARAMS], mode="cpu")
IDS = torch.arange(10, 24).reshape(2, 7)


def _codes(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, dtype=torch.int64).to(dtype)


def _scales(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.rand(shape) * 0.01 + 0.002).to(dtype)


def _fp8(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns).clamp(-4, 4).to(torch.float8_e4m3fn)


def _compressed(bits: int, kind: str, layout: str, **weights: Any) -> dict[str, Any]:
    numbers = {"num_bits": bits, "type": kind, "symmetric": True, **weights}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": numbers, "format": layout}
    if bits == 8:
        group["input_activations"] = {
            "num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True
        }  # fmt: skip
    ignore = ["lm_head", "re:.*mlp.gate$"]
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }


def _packed(bits: int) -> Pack:
    return lambda rows, columns: {
        "weight_packed": _codes(rows, columns * bits // 32),
        "weight_scale": _scales(rows, columns // GROUP),
        "weight_shape": torch.tensor([rows, columns]),
    }


def _nvfp4(rows: int, columns: int) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": _codes(rows, columns // 2, dtype=torch.uint8),
        "weight_scale": _scales(rows, columns // 16, dtype=torch.float32).mul(1000).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([1000.0]),
    }


def _gptq(rows: int, columns: int, bits: int = 4) -> dict[str, torch.Tensor]:
    zeros = 0x77777777 if bits == 4 else 0x7F7F7F7F  # one less than the middle, in each place
    return {
        "qweight": _codes(columns * bits // 32, rows),
        "qzeros": torch.full((columns // GROUP, rows * bits // 32), zeros, dtype=torch.int32),
        "scales": _scales(columns // GROUP, rows),
        "g_idx": (torch.arange(columns) // GROUP).to(torch.int32),
    }


def _gptq_ordered(rows: int, columns: int) -> dict[str, torch.Tensor]:
    packed = _gptq(rows, columns)
    return packed | {"g_idx": packed["g_idx"][torch.randperm(columns)]}


def _awq(rows: int, columns: int) -> dict[str, torch.Tensor]:
    shapes = {"qweight": (columns, rows // 8), "qzeros": (columns // GROUP, rows // 8)}
    return {**{name: _codes(*shape) for name, shape in shapes.items()}, "scales": _scales(columns // GROUP, rows)}


def _fp8_blocks(rows: int, columns: int) -> dict[str, torch.Tensor]:
    scale = _scales(rows // GROUP, columns // GROUP, dtype=torch.float32)
    return {"weight": _fp8(rows, columns), "weight_scale_inv": scale}


@dataclass(frozen=True)
class Format:
    """One format: how its checkpoint is written, and what it needs to be loaded."""

    package: str | None
    config: dict[str, Any] | None = None
    pack: Pack | None = None  # rows and columns of a linear layer to its tensors in the file
    model: str = "LlamaForCausalLM"
    sizes: dict[str, Any] | None = None
    quantise: Callable[[], Any] | None = None  # the library's own configuration, for from_pretrained
    streams: bool = False  # from the files, as they lie there

    @property
    def is_here(self) -> bool:
        """Whether its package is installed."""
        return self.package is None or importlib.util.find_spec(self.package) is not None

    def write(self, folder: Path) -> Path:
        """Write the checkpoint."""
        torch.manual_seed(0)
        model_class = getattr(transformers, self.model)
        model = model_class(model_class.config_class(**SIZE | (self.sizes or {}))).to(torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.05)
        model.save_pretrained(folder)
        if self.quantise is not None:
            options = {"quantization_config": self.quantise(), "dtype": torch.bfloat16}
            quantised = model_class.from_pretrained(folder, **options)
            quantised.save_pretrained(folder)
            return folder
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            tensors |= self._packed(name, tensor)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": self.config}))
        return folder

    def _packed(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.pack is None:  # MXFP4, of whole experts
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                return {name: tensor}
            count, columns, rows = tensor.shape
            blocks = _codes(count, rows, columns // 32, 16, dtype=torch.uint8)
            scales = torch.randint(118, 124, (count, rows, columns // 32), dtype=torch.uint8)
            return {f"{name}_blocks": blocks, f"{name}_scales": scales}
        if "proj" not in name or tensor.dim() != 2:
            return {name: tensor}
        owner = name.removesuffix("weight")
        return {owner + suffix: part for suffix, part in self.pack(*tensor.shape).items()}


def _torchao(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        from torchao import quantization

        return transformers.TorchAoConfig(getattr(quantization, name)(**options))

    return make


def _bitsandbytes(**options: Any) -> Callable[[], Any]:
    return lambda: transformers.BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=torch.bfloat16)


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]}
_CHANNEL = {"strategy": "channel", "dynamic": False}
_GROUPS = {"strategy": "group", "group_size": GROUP}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_TILES = {"hidden_size": 128}  # of Marlin on a GPU, which reorders whole ones alone
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
_INT4 = _compressed(4, "int", "pack-quantized", **_GROUPS)

FORMATS = {
    "fp8, blocks": Format(None, _FP8, _fp8_blocks),
    "fp8, blocks, experts": Format(None, _FP8, _fp8_blocks, "DeepseekV3ForCausalLM", MLA),
    "MXFP4, experts": Format(None, {"quant_method": "mxfp4"}, None, "GptOssForCausalLM", OSS),
    "compressed-tensors fp8, channels": Format(
        "compressed_tensors",
        _compressed(8, "float", "float-quantized", **_CHANNEL),
        lambda rows, columns: {"weight": _fp8(rows, columns), "weight_scale": _scales(rows, 1)},
    ),
    "compressed-tensors int8": Format(
        "compressed_tensors",
        _compressed(8, "int", "int-quantized", **_CHANNEL),
        lambda rows, columns: {
            "weight": _codes(rows, columns, dtype=torch.int8), "weight_scale": _scales(rows, 1) / 50
        },
    ),
    "compressed-tensors int4": Format("compressed_tensors", _INT4, _packed(4)),
    "compressed-tensors int4, experts": Format("compressed_tensors", _INT4, _packed(4), "Qwen3MoeForCausalLM", MOE),
    "compressed-tensors int4, dequantised": Format("compressed_tensors", _INT4 | {"dequantize": True}, _packed(4)),
    "compressed-tensors NVFP4": Format(
        "compressed_tensors",
        _compressed(4, "float", "nvfp4-pack-quantized", strategy="tensor_group", group_size=16),
        _nvfp4,
    ),
    "GPTQ int4": Format("gptqmodel", _GPTQ, _gptq, sizes=_TILES),
    "GPTQ int4, in another order": Format("gptqmodel", _GPTQ | {"desc_act": True}, _gptq_ordered, sizes=_TILES),
    "GPTQ int8": Format("gptqmodel", _GPTQ | {"bits": 8}, partial(_gptq, bits=8), sizes=_TILES),
    "AWQ int4": Format("gptqmodel", _AWQ, _awq, sizes=_TILES),
    "torchao int8": Format("torchao", quantise=_torchao("Int8WeightOnlyConfig", version=2), streams=True),
    "torchao fp8": Format("torchao", quantise=_torchao("Float8WeightOnlyConfig"), streams=True),
    "torchao int4": Format(
        "torchao", quantise=_torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4), streams=True
    ),
    "bitsandbytes nf4": Format("bitsandbytes", quantise=_bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "bitsandbytes nf4, scales quantised": Format(
        "bitsandbytes",
        quantise=_bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    ),
    "bitsandbytes fp4": Format("bitsandbytes", quantise=_bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4")),
    "bitsandbytes int8": Format("bitsandbytes", quantise=_bitsandbytes(load_in_8bit=True)),
}  # fmt: skip


def resident(folder: Path, device: str = "cpu") -> transformers.PreTrainedModel:
    """The library's own model."""
    named = json.loads((folder / "config.json").read_text())["architectures"][0]
    place = {} if device == "cpu" else {"device_map": {"": device}}
    return aligned(getattr(transformers, named).from_pretrained(folder, **place))


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(IDS.to(next(model.parameters()).device))[0].clone()


def _outcome(work: Callable[[Path, str], tuple[bool, int]], folder: Path, device: str) -> dict[str, Any]:
    try:
        equal, moved = work(folder, device)
    except HeadraceError as error:
        return {"what": "refused", "detail": str(error).replace(str(folder), "FOLDER"), "moved_bytes": 0}
    except Exception as error:  # of the library, in its own model
        traceback.print_exc()
        return {"what": "not run", "detail": f"{type(error).__name__}: {error}".replace(str(folder), "FOLDER")[:600]}
    return {"what": "equal" if equal and moved else "differs", "detail": "", "moved_bytes": moved}


def by_load(folder: Path, device: str = "cpu") -> tuple[bool, int]:
    """Whether two forwards after :func:`load`, and one after ``remove()``, equal the resident model; bytes moved.

    On a GPU MXFP4 has kernels of our own, with other rounding; the library's own experts are asked for by name.
    """
    expected = logits(resident(folder, device))
    is_mxfp4 = '"mxfp4"' in (folder / "config.json").read_text()
    model, handle = load(folder, MOVES, device=device, experts_implementation="grouped_mm" if is_mxfp4 else None)
    same = [torch.equal(logits(model), expected) for _ in range(2)]
    moved = sum(handle.stats().moved_by_store.values())
    handle.remove()
    return all([*same, torch.equal(logits(model.to(device)), expected)]), moved


def by_offload(folder: Path, device: str = "cpu") -> tuple[bool, int]:
    """The same for ``offload`` of the library's own model, which ran once."""
    expected = logits(resident(folder, device))
    model = resident(folder, device)
    logits(model)
    handle = headrace.offload(model, MOVES, device=device)
    same = [torch.equal(logits(model), expected) for _ in range(2)]
    moved = sum(handle.stats().moved_by_store.values())
    handle.remove()
    return all([*same, torch.equal(logits(model), expected)]), moved


def main(out: Path, device: str = "cpu") -> None:
    """Write a row for every format; a GPU fills the columns of the H200."""
    warnings.simplefilter("ignore", HeadraceWarning)
    transformers.logging.set_verbosity_error()
    rows = {row["format"]: row for row in map(json.loads, out.read_text().splitlines())} if out.exists() else {}
    column = "cpu" if device == "cpu" else "h200"
    if device != "cpu":
        plain_fp8.install()
    for name, form in FORMATS.items():
        row = rows.setdefault(name, {"table": "formats", "format": name, "package": form.package})
        for key in ("cpu_load", "cpu_offload", "h200_load", "h200_offload"):
            row.setdefault(key, {"what": "not run"})
        if not form.is_here:
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = form.write(Path(place))
            row[f"{column}_load"] = _outcome(by_load, folder, device)
            row[f"{column}_offload"] = _outcome(by_offload, folder, device)
        print(name, {key: row[f"{column}_{key}"]["what"] for key in ("load", "offload")}, flush=True)
        out.write_text("".join(json.dumps(each) + "\n" for each in rows.values()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
