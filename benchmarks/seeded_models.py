"""Models with seeded weights that an engine can load: folders of a published shape, and weights made inside vLLM.

A tokenizer has one word per token. vLLM's ``load_format="dummy"`` gives every tensor of one shape the same values, so
all layers are equal and a slot that holds another layer's bytes computes the same bits; and it leaves packed integers
as they are in memory. :func:`use_seeded_weights` has it make weights that differ from layer to layer, quantised too.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import torch

from published_configs import QWEN3_8B

# Of the same family, for a CPU.
QWEN3_TINY = {
    **QWEN3_8B,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2000,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
# Of what an integer or an 8-bit float stands for, so that a weight comes out at about 1 / sqrt(1024).
_MANY_BYTES = 64 << 20  # of experts on a host
_SCALE_OF_4_BITS, _SCALE_OF_8_BITS = 6e-3, 3e-4


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """``config.json`` in ``folder``, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_words(folder: Path, num_tokens: int) -> None:
    """A tokenizer whose token ``i`` is the word ``ti``, so that any tokens survive being text in between."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(num_tokens)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    write_tokenizer(folder, words)


def write_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Save a ``tokenizers.Tokenizer`` where transformers and vLLM look for it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_weights(folder: Path, device: str) -> None:
    """Seeded weights for the configuration in ``folder``, as safetensors; kept if there are some already."""
    if (folder / "model.safetensors").exists() or (folder / "model.safetensors.index.json").exists():
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype, trust_remote_code=False)
    written = (folder / "config.json").read_text()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(written)  # transformers adds to it


def use_seeded_weights() -> None:
    """Have vLLM's dummy loader call this module's initialiser in this process; the first tensor begins anew."""
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    seeds = itertools.count(1)
    scale = [_SCALE_OF_8_BITS]  # of the packed weights that were seen last, whose scales follow them

    def initialize(parameter: torch.Tensor, *_: Any, name: str = "", **__: Any) -> None:
        if parameter.is_meta or parameter.dim() == 0:  # made later; a scalar is an option, as of a KV cache
            return
        if (value := getattr(parameter, "dummy_weight_value", None)) is not None:
            parameter.data.fill_(value)
            return
        generator = torch.Generator(parameter.device)
        generator.manual_seed(next(seeds))
        is_scale = "scale" in name or "Scale" in type(parameter).__name__
        if not is_scale and parameter.dtype.itemsize in (1, 4) and parameter.dtype != torch.float32:
            four_bits = parameter.dtype in (torch.int32, torch.uint8)
            scale[0] = _SCALE_OF_4_BITS if four_bits else _SCALE_OF_8_BITS
        data = parameter.data
        if data.device.type == "cpu" and data.dim() > 2 and data.nbytes > _MANY_BYTES:
            _fill(data[:1], generator, name, is_scale, scale[0])
            data[1:] = data[:1]  # one thread draws, all of them copy
        else:
            _fill(data, generator, name, is_scale, scale[0])

    for module in (weight_utils, dummy_loader):
        module.initialize_single_dummy_weight = initialize  # type: ignore[attr-defined]


def _fill(data: torch.Tensor, generator: torch.Generator, name: str, is_scale: bool, scale: float) -> None:
    dtype = data.dtype
    if dtype == torch.int32:
        if data.dim() > 1 and "g_idx" not in name:  # an order of groups is not asked for
            data.random_(-(2**31), 2**31 - 1, generator=generator)
        else:
            data.zero_()
    elif dtype == torch.int8:
        data.random_(-127, 128, generator=generator)
    elif dtype == torch.float8_e8m0fnu or (dtype == torch.uint8 and is_scale):  # powers of two
        data.view(torch.uint8).random_(117, 121, generator=generator)
    elif dtype == torch.uint8:
        data.random_(0, 256, generator=generator)
    elif not dtype.is_floating_point:
        return
    elif is_scale:
        if "global_scale" in name:  # by which compressed-tensors divides
            data.copy_(_uniform(data, generator, 0.8 / scale, 1.2 / scale))  # experts differ in it, too
        elif dtype.itemsize == 1:
            data.copy_(_uniform(data, generator, 0.5, 1.5))
        else:
            data.copy_(_uniform(data, generator, 0.5 * scale, 1.5 * scale))
    elif dtype.itemsize == 1:
        data.copy_(_uniform(data, generator, -240, 240))
    elif "bias" in name or "sinks" in name:
        data.uniform_(-0.02, 0.02, generator=generator)
    elif data.dim() > 1:
        bound = math.sqrt(3 / data.shape[-1])
        data.uniform_(-bound, bound, generator=generator)
    else:  # of norms
        data.uniform_(0.9, 1.1, generator=generator)


def _uniform(data: torch.Tensor, generator: torch.Generator, low: float, high: float) -> torch.Tensor:
    return torch.empty(data.shape, dtype=torch.float32, device=data.device).uniform_(low, high, generator=generator)
