"""Tiny models with a vision tower, in folders that vLLM reads: weights, tokenizer, image processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 2000
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
PIXELS = 56
# The family: what its tower is called, and a prompt.
TOWERS = {
    "llava": ("vision_tower", "w10 <image> w11 w12"),
    "qwen2_5_vl": ("visual", "w10 <|vision_start|><|image_pad|><|vision_end|> w11 w12"),
}


def write_model(family: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    {"llava": _write_llava, "qwen2_5_vl": _write_qwen}[family](folder)


def prompts(family: str) -> list[Any]:
    chooser = np.random.default_rng(0)
    shape = (PIXELS, PIXELS, 3)
    images = [Image.fromarray(chooser.integers(0, 255, shape, dtype=np.uint8)) for _ in range(2)]
    return [{"prompt": TOWERS[family][1], "multi_modal_data": {"image": image}} for image in images]


def _write_llava(folder: Path) -> None:
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": PIXELS}, crop_size={"height": PIXELS, "width": PIXELS}
        ),
        tokenizer=_tokenizer(["<image>"]),
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(folder)
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "image_size": PIXELS, "patch_size": 14,
    }  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision, text_config={"model_type": "llama", **TEXT}, image_token_index=3, image_seq_length=16
    )
    _save(transformers.LlavaForConditionalGeneration(config), folder)
    # vLLM still has a level that transformers has dropped.
    file = folder / "model.safetensors"
    weights = load_file(file)
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): weight for name, weight in weights.items()}
    save_file(renamed, file, metadata={"format": "pt"})


def _write_qwen(folder: Path) -> None:
    size = {"min_pixels": PIXELS**2, "max_pixels": PIXELS**2, "patch_size": 14, "merge_size": 2}
    processor = transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**size),
        tokenizer=_tokenizer(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]),
        video_processor=transformers.Qwen2VLVideoProcessor(**size),
    )
    processor.save_pretrained(folder)
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [8, 12, 12]}
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_heads": 4,
        "out_hidden_size": TEXT["hidden_size"],
        "window_size": PIXELS,
        "fullatt_block_indexes": [1, 3],
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_scaling": rope},
        vision_config=vision,
        vision_start_token_id=3,
        vision_end_token_id=4,
        image_token_id=5,
        video_token_id=6,
    )
    _save(transformers.Qwen2_5_VLForConditionalGeneration(config), folder)


def _tokenizer(special: list[str]) -> PreTrainedTokenizerFast:
    words = ["<unk>", "<s>", "</s>", *special]
    vocabulary = {word: index for index, word in enumerate(words)}
    vocabulary |= {f"w{index}": index for index in range(len(words), VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>",
        additional_special_tokens=special,
    )  # fmt: skip


def _save(model: Any, folder: Path) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:  # large enough for an image to change what is said about it
                torch.nn.init.normal_(weight, std=0.08)
    model.save_pretrained(folder)
