"""The language model of part B: Qwen3 architecture, seeded random weights, a byte-level tokenizer.

Random weights say nothing sensible, but every bit of them passes through the same code as trained ones, and greedy
decoding repeats exactly. The weights are written layer by layer: no more than one layer is in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from penstock.checkpoint.safetensors_header import Checkpoint
from penstock.errors import OptionError
from penstock.runtime.limits import require_disk

__all__ = ["ModelSize", "ensure_model", "write_tokenizer"]

_MARK = "penstock-demo.json"
_INDEX = "model.safetensors.index.json"
_VOCABULARY = 258  # every byte, and two special tokens
_DEVIATION, _EMBEDDING_DEVIATION = 0.02, 1.0  # tokens that differ little would all continue alike
_HEADROOM_BYTES = 64 * 2**20  # for headers, the tokenizer, the timeline


@dataclass(frozen=True)
class ModelSize:
    """Shape of the model; the default weighs 1.16 GB in float32.

    Grouped-query attention with few heads keeps the key-value cache, which is no weight, out of the memory figures.
    """

    hidden: int = 1024
    intermediate: int = 3072
    layers: int = 24
    heads: int = 16
    key_value_heads: int = 4
    seed: int = 20

    def config(self) -> Any:
        """The transformers configuration. No token ends a text, so that its length is fixed."""
        from transformers import Qwen3Config

        return Qwen3Config(
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
            eos_token_id=None,
            pad_token_id=_VOCABULARY - 1,
            dtype="float32",
            architectures=["Qwen3ForCausalLM"],
        )

    def shapes(self) -> dict[str, torch.Size]:
        """Name -> shape of every parameter, in order."""
        from transformers import Qwen3ForCausalLM

        with torch.device("meta"):
            model = Qwen3ForCausalLM(self.config())
        return {name: parameter.shape for name, parameter in model.named_parameters()}


def ensure_model(folder: Path, size: ModelSize, progress: Callable[[int, int], None]) -> bool:
    """Write the model to ``folder`` unless it is there, complete; returns whether it was written.

    A half-written folder is removed, whatever ended the writing.

    Raises:
        OptionError: the disk is too full, or ``folder`` holds something the demo did not write.
    """
    if folder.exists():
        if _is_complete(folder, size):
            return False
        _remove_own(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shapes = size.shapes()
    num_bytes = sum(shape.numel() * 4 for shape in shapes.values())
    require_disk(folder.parent, num_bytes + _HEADROOM_BYTES, "make room, or choose another disk with --folder DIR")
    partial = folder.with_name(f".{folder.name}.penstock-partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    try:
        partial.mkdir()
        _write(partial, size, shapes, progress)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:  # the second has the first only as text
        raise OptionError(
            f"the model cannot be written to {folder}: {error}; choose another place with --folder DIR"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE without merges: one token per byte of UTF-8, and two special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>", "<|pad|>"]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[-2:])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokens[-2],
        "pad_token": tokens[-1],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _is_complete(folder: Path, size: ModelSize) -> bool:
    """Whether ``folder`` is a model of this size; the headers and lengths of its files are checked."""
    try:
        if json.loads((folder / _MARK).read_text()) != asdict(size):
            return False
        Checkpoint.open(folder)
    except (OSError, ValueError):  # CheckpointError and JSON errors are ValueErrors
        return False
    return True


def _remove_own(folder: Path) -> None:
    if not (folder / _MARK).is_file():
        raise OptionError(
            f"{folder} exists and was not written by penstock demo; choose another place with --folder DIR"
        )
    shutil.rmtree(folder)


def _write(folder: Path, size: ModelSize, shapes: dict[str, torch.Size], progress: Callable[[int, int], None]) -> None:
    shards = _shards(shapes)
    total = sum(shape.numel() * 4 for shape in shapes.values())
    done = 0
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        progress(done, total)
        done += _write_shard(folder / file, {name: shapes[name] for name in names}, size.seed + index)
        weight_map |= dict.fromkeys(names, file)
    progress(done, total)
    _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    size.config().save_pretrained(folder)
    write_tokenizer(folder)
    _write_json(folder / _MARK, asdict(size))


def _shards(shapes: Iterable[str]) -> list[list[str]]:
    """Names by file: one file per layer, one for what is outside the layers."""
    shards: dict[str, list[str]] = {}
    for name in shapes:
        parts = name.split(".")
        shards.setdefault(parts[2] if parts[1] == "layers" else "", []).append(name)
    return list(shards.values())


def _write_shard(path: Path, shapes: dict[str, torch.Size], seed: int) -> int:
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _values(name, shape, generator) for name, shape in shapes.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    # Otherwise the kernel writes back while the demo measures, with the cores and the disk it measures.
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return sum(tensor.nbytes for tensor in tensors.values())


def _values(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape)  # scales of norms
    return torch.randn(shape, generator=generator).mul_(_EMBEDDING_DEVIATION if "embed" in name else _DEVIATION)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
