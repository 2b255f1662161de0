"""The promise: `load` takes encoders, speech and vision models as it takes language models: same bits, bytes moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from headrace import Rules
from headrace.adapters.transformers import load
from headrace.errors import CheckpointError
from headrace.testing import assert_same_bits
from models import aligned

Make = Callable[[], tuple[Any, dict[str, Any]]]

IDS = torch.arange(12).reshape(2, 6) * 7 % 90 + 3
PIXELS = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
SIZES: dict[str, Any] = {"hidden_size": 160, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 320}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VISION: dict[str, Any] = {**SIZES, "image_size": 32, "patch_size": 8}


def bert() -> tuple[Any, dict[str, Any]]:
    return tf.BertForSequenceClassification(tf.BertConfig(**TEXT)), {"input_ids": IDS}


def modern_bert() -> tuple[Any, dict[str, Any]]:
    config = tf.ModernBertConfig(**TEXT, cls_token_id=1, sep_token_id=2)
    return tf.ModernBertForMaskedLM(config), {"input_ids": IDS}


def t5_encoder() -> tuple[Any, dict[str, Any]]:
    config = tf.T5Config(d_model=160, d_kv=80, d_ff=320, num_layers=3, num_heads=2, vocab_size=100)
    return tf.T5EncoderModel(config), {"input_ids": IDS}


def whisper() -> tuple[Any, dict[str, Any]]:
    sides = ("encoder", "decoder")
    sizes = {f"{s}_{n}": v for s in sides for n, v in (("layers", 3), ("attention_heads", 2), ("ffn_dim", 320))}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "vocab_size": 100}
    lengths = {"num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 40}
    config = tf.WhisperConfig(d_model=160, **sizes, **tokens, **lengths)
    sound = torch.linspace(-1, 1, 800).reshape(1, 8, 100)
    return tf.WhisperForConditionalGeneration(config), {"input_features": sound, "decoder_input_ids": IDS[:1]}


def wav2vec2() -> tuple[Any, dict[str, Any]]:
    config = tf.Wav2Vec2Config(**SIZES, conv_dim=(32,) * 7, vocab_size=40)
    return tf.Wav2Vec2ForCTC(config), {"input_values": torch.linspace(-1, 1, 4000)[None]}


def vit() -> tuple[Any, dict[str, Any]]:
    return tf.ViTForImageClassification(tf.ViTConfig(**VISION)), {"pixel_values": PIXELS}


def dinov2() -> tuple[Any, dict[str, Any]]:
    config = tf.Dinov2Config(**{name: value for name, value in VISION.items() if name != "intermediate_size"})
    return tf.Dinov2Model(config), {"pixel_values": PIXELS}


def siglip() -> tuple[Any, dict[str, Any]]:
    config = tf.SiglipConfig(text_config=TEXT, vision_config=VISION)
    return tf.SiglipModel(config), {"input_ids": IDS[:1], "pixel_values": PIXELS}


def llava() -> tuple[Any, dict[str, Any]]:
    """A vision tower, a projector and a language model."""
    config = tf.LlavaConfig(
        text_config={**TEXT, "model_type": "llama", "num_key_value_heads": 2},
        vision_config={**VISION, "model_type": "clip_vision_model", "projection_dim": 64},
        image_token_id=99,
        vision_feature_layer=-2,
    )
    ids = torch.cat([torch.full((1, 16), 99), IDS[:1]], dim=1)
    return tf.LlavaForConditionalGeneration(config), {"input_ids": ids, "pixel_values": PIXELS}


def chinese_clip() -> tuple[Any, dict[str, Any]]:
    """Its padding row is zero, and transformers zeroes it again after loading."""
    config = tf.ChineseCLIPConfig(text_config=TEXT, vision_config=VISION)
    return tf.ChineseCLIPModel(config), {"input_ids": IDS[:1], "pixel_values": PIXELS}


def speecht5() -> tuple[Any, dict[str, Any]]:
    """It generates in a way of its own, without what other generating models have."""
    sides = ("encoder", "decoder")
    sizes = {f"{s}_{n}": v for s in sides for n, v in (("layers", 3), ("attention_heads", 2), ("ffn_dim", 320))}
    speech = {"num_mel_bins": 8, "speech_decoder_prenet_units": 32, "speech_decoder_prenet_dropout": 0.0}
    config = tf.SpeechT5Config(vocab_size=100, hidden_size=160, **sizes, **speech)
    inputs = {"input_ids": IDS[:1], "decoder_input_values": torch.linspace(-1, 1, 48).reshape(1, 6, 8)}
    inputs["speaker_embeddings"] = torch.linspace(-1, 1, 512)[None]
    return tf.SpeechT5ForTextToSpeech(config), inputs


def zaya() -> tuple[Any, dict[str, Any]]:
    """Its routers' last bias is set to -1 after loading."""
    config = tf.ZayaConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        moe_intermediate_size=64, num_experts=4, router_hidden_size=32, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return tf.ZayaForCausalLM(config), {"input_ids": IDS}


def tensors(output: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


MODELS: list[Make] = [
    bert, modern_bert, t5_encoder, whisper, wav2vec2, vit, dinov2, siglip, llava, chinese_clip, speecht5,
    *[zaya] * hasattr(tf, "ZayaConfig"),
]  # fmt: skip


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_same_bits_within_two_thirds_of_the_weights(make: Make, tmp_path: Path) -> None:
    torch.manual_seed(4)
    model, inputs = make()
    model.eval().save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = tensors(model(**inputs))
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    loaded, handle = load(tmp_path, weight_bytes * 2 // 3, device="cpu")
    with handle, torch.inference_mode():
        assert type(loaded) is type(model)
        assert_same_bits(tensors(loaded(**inputs)), expected)
        assert handle.stats().bytes_moved > 0
        assert handle.plan.device_bytes <= weight_bytes * 2 // 3


def test_a_padding_row_that_transformers_would_zero_is_refused(tmp_path: Path) -> None:
    model, _ = chinese_clip()
    with torch.no_grad():
        model.text_model.embeddings.word_embeddings.weight[0, 159] = 1e-30
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"word_embeddings\.weight: Transformers changes .*: keep it resident"):
        load(tmp_path, Rules([("re:.*word_embeddings.*", "prefetch")]), device="cpu")


def test_what_transformers_sets_after_loading_is_set_where_it_is_resident(tmp_path: Path) -> None:
    """As ``from_pretrained`` sets it, whatever the files say."""
    torch.manual_seed(4)
    model, inputs = chinese_clip()
    model.text_model.embeddings.word_embeddings.weight.data[0, 159] = 1
    inputs["input_ids"] = torch.zeros_like(inputs["input_ids"])
    model.save_pretrained(tmp_path)
    resident = aligned(tf.ChineseCLIPModel.from_pretrained(tmp_path))
    rules = [("re:.*word_embeddings.*", "resident"), ("re:.*layer.*", "prefetch")]
    loaded, handle = load(tmp_path, Rules(rules), device="cpu")
    with handle, torch.inference_mode():
        assert loaded.get_parameter("text_model.embeddings.word_embeddings.weight")[0].count_nonzero() == 0
        assert_same_bits(tensors(loaded(**inputs)), tensors(resident(**inputs)))
        assert handle.stats().bytes_moved > 0
    assert_same_bits(dict(loaded.state_dict()), dict(resident.state_dict()))


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [("@vision", {"vision_tower", "multi_modal_projector"}), ("multi_modal_projector", {"multi_modal_projector"})],
)
def test_a_tower_and_a_projector_by_name(pattern: str, parts: set[str], tmp_path: Path) -> None:
    torch.manual_seed(4)
    model, inputs = llava()
    model.eval().save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(**inputs).logits
    loaded, handle = load(tmp_path, Rules([(pattern, "prefetch")], mode="disk"), device="cpu")
    with handle, torch.inference_mode():
        assert_same_bits(loaded(**inputs).logits, expected)
        moved = {unit.module_fqn.split(".")[1] for unit in handle.stats().units if unit.bytes_moved}
        assert moved == parts


def test_whisper_generates(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model, inputs = whisper()
    model.generation_config.begin_suppress_tokens = None
    model.eval().save_pretrained(tmp_path)
    sound = inputs["input_features"]
    expected = model.generate(sound, max_new_tokens=6, do_sample=False)
    loaded, handle = load(tmp_path, sum(p.nbytes for p in model.parameters()) * 2 // 3, device="cpu")
    with handle:
        assert_same_bits(loaded.generate(sound, max_new_tokens=6, do_sample=False), expected)
        assert handle.stats().bytes_moved > 0
