"""Small transformers checkpoints, loaded as Transformers does and as headrace does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.model.inventory import take_inventory
from models import aligned

SIZE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128,
}  # fmt: skip


HEADS = {"num_key_value_heads": 2}


def make(name: str, dtype: torch.dtype = torch.float32, **config: Any) -> transformers.PreTrainedModel:
    """A random model of class `name`; no two tensors are equal, biases and norms included."""
    torch.manual_seed(len(name))
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**config)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def resident(folder: Path, model_class: Any = None, **options: Any) -> transformers.PreTrainedModel:
    """What `load` has to equal."""
    named = json.loads((folder / "config.json").read_text())["architectures"][0]
    return aligned((model_class or getattr(transformers, named)).from_pretrained(folder, **options))


def run(model: transformers.PreTrainedModel) -> torch.Tensor:
    """The outputs of one forward, one after another in one tensor."""
    ids = torch.arange(10, 24).reshape(2, 7)
    inputs: dict[str, Any] = {"input_ids": ids}
    if model.main_input_name == "input_values":
        inputs = {"input_values": torch.sin(torch.arange(4000.0))[None]}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids.flip(1)
    with torch.no_grad():
        return model(**inputs)[0].clone()


def assert_same_tensors(model: nn.Module, reference: nn.Module) -> None:
    """Names, dtypes and bits of every parameter and buffer, and which of them are one."""
    for kind in ("named_parameters", "named_buffers"):
        found = dict(getattr(model, kind)(remove_duplicate=False))
        expected = dict(getattr(reference, kind)(remove_duplicate=False))
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].device.type == "cpu", name
            assert (found[name].dtype, found[name].stride()) == (tensor.dtype, tensor.stride()), name
            assert torch.equal(found[name], tensor), name
    described = [take_inventory(each) for each in (model, reference)]
    assert {s.names for s in described[0].storages} == {s.names for s in described[1].storages}


def rewrite(folder: Path, alter: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """The folder's weights as one file, altered."""
    tensors: dict[str, torch.Tensor] = {}
    for file in Checkpoint.open(folder).files:
        tensors.update(load_file(file))
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    alter(tensors)
    save_file(tensors, folder / "model.safetensors")


def save_transposed(folder: Path, layers: int, **sizes: int) -> Path:
    """A mixture of experts whose checkpoint holds every expert transposed, as early releases of it did."""
    text = {**SIZE, **HEADS, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 48, "num_hidden_layers": layers}
    text |= sizes
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "deepstack_visual_indexes": [0]}
    vision["out_hidden_size"] = text["hidden_size"]
    make("Qwen3VLMoeForConditionalGeneration", text_config=text, vision_config=vision).save_pretrained(folder)

    def transpose(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if ".experts." in name:
                tensors[name] = tensor.transpose(1, 2).contiguous()

    rewrite(folder, transpose)
    return folder


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
