"""Folders of models that an engine can load: a published shape, seeded weights, a tokenizer of one word per token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype, trust_remote_code=False)
    written = (folder / "config.json").read_text()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(written)  # transformers adds to it
