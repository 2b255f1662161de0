"""The language model of part B: Qwen3 architecture, seeded random weights, a byte-level tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.errors import OptionError
from headrace.runtime.this_machine import require_disk

__all__ = ["ModelSize", "ensure_model"]

_MARK = "headrace-demo.json"
_VOCABULARY = 258  # every byte, and two special tokens
_HEADROOM_BYTES = 64 * 2**20  # for headers, the tokenizer, the trace


@dataclass(frozen=True)
class ModelSize:
    """Shape of the model; the default weighs 1.16 GB in float32."""

    hidden: int = 1024
    intermediate: int = 3072
    layers: int = 24
    heads: int = 16
    key_value_heads: int = 4  # few, so that the KV cache adds little to the measured memory
    seed: int = 20

    def build(self) -> Any:
        """The model with its weights; under ``torch.device("meta")`` without them."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=_VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.hidden // self.heads,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,  # every text then has the same number of tokens
            pad_token_id=_VOCABULARY - 1,
            dtype="float32",
            architectures=["Qwen3ForCausalLM"],
        )
        # Random weights make no sensible text, but run through the same code as trained ones; nothing is downloaded.
        torch.manual_seed(self.seed)
        model: Any = Qwen3ForCausalLM(config)
        model.requires_grad_(False)
        model.model.embed_tokens.weight.normal_()  # with similar tokens all texts would continue alike
        return model


def ensure_model(folder: Path, size: ModelSize) -> bool:
    """Write the model to ``folder`` unless it is there and complete; returns whether it was written.

    A half-written folder is removed, whatever ended the writing.

    Raises:
        OptionError: the disk is too full, or ``folder`` holds something the demo did not write.
    """
    if folder.exists():
        if _is_complete(folder, size):
            return False
        if not (folder / _MARK).is_file():
            raise OptionError(
                f"{folder} exists and was not written by headrace demo; choose another place with --folder DIR"
            )
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        num_bytes = sum(parameter.nbytes for parameter in size.build().parameters())
    require_disk(folder.parent, num_bytes + _HEADROOM_BYTES, "make room, or choose another disk with --folder DIR")
    partial = folder.with_name(f".{folder.name}.headrace-partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
    try:
        partial.mkdir()
        model = size.build()
        model.save_pretrained(partial, max_shard_size="200MB")
        # Otherwise the kernel writes back while the demo measures, with the cores and the disk it measures.
        for path in partial.glob("*.safetensors"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        _write_tokenizer(partial)
        (partial / _MARK).write_text(json.dumps(asdict(size)))
        partial.rename(folder)  # last, so that an interrupt never leaves a half-written model under this name
    except (OSError, SafetensorError) as error:  # a SafetensorError has an OSError only as text
        raise OptionError(
            f"the model cannot be written to {folder}: {error}; choose another place with --folder DIR"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _is_complete(folder: Path, size: ModelSize) -> bool:
    """Whether ``folder`` is a model of this size; the headers and lengths of its files are checked."""
    try:
        if json.loads((folder / _MARK).read_text()) != asdict(size):
            return False
        Checkpoint.open(folder)
    except (OSError, ValueError):  # CheckpointError and JSON errors are ValueErrors
        return False
    return True


def _write_tokenizer(folder: Path) -> None:
    """A byte-level BPE without merges: one token per byte of UTF-8, and two special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>", "<|pad|>"]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[-2:])
    wrapped: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=tokens[-2],
        pad_token=tokens[-1],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    wrapped.save_pretrained(folder)
