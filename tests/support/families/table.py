"""What the general rules get wrong, family by family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Entry:
    """How a family is built where the general rules do not do it.

    Attributes:
        model_class: name of the class.
        model_type: of the config; default the family's first.
        way: the only one of ``shrink.WAYS`` to try, because it is known to work.
        changes: arguments of the config by dotted path, in addition to those that are found.
        config: makes the whole config.
        inputs: makes the inputs from the config.
        more: inputs in addition to those that are found.
        why_not: why there is no case.
    """

    model_class: str = ""
    model_type: str = ""
    way: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    config: Callable[[], Any] | None = None
    inputs: Callable[[Any], dict[str, Any]] | None = None
    more: dict[str, Any] = field(default_factory=dict)
    why_not: str = ""


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(11))


def _ids(batch: int, length: int, limit: int = 400) -> torch.Tensor:
    return torch.randint(20, limit, (batch, length), generator=torch.Generator().manual_seed(12))


def _text(length: int = 12) -> dict[str, Any]:
    return {"input_ids": _ids(2, length)}


# -- parts of configs -------------------------------------------------------------------------------------------------

_STATE_SPACE = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_expand": 2, "hidden_size": 256}
_SERIES = {
    "prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2, 3], "d_model": 128, "num_time_features": 1,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24], "partial_rotary_factor": 1.0}


def _auto(name: str, **options: Any) -> Any:
    import transformers

    return getattr(transformers, name)(**options)


def _bert_config() -> Any:
    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 256}
    return _auto("BertConfig", vocab_size=512, **sizes)


def _vit_config() -> Any:
    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 256}
    return _auto("ViTConfig", image_size=32, patch_size=8, **sizes)


def _wav2vec2_config() -> Any:
    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 256}
    stacks = {"conv_dim": (64, 64), "conv_kernel": (10, 3), "conv_stride": (5, 4), "num_feat_extract_layers": 2}
    return _auto("Wav2Vec2Config", **sizes, **stacks)


def _pair(name: str, encoder: Callable[[], Any]) -> Callable[[], Any]:
    """The config of a model of two others."""

    def make() -> Any:
        parts = {"encoder": encoder(), "decoder": _bert_config()}
        parts["decoder"].is_decoder = parts["decoder"].add_cross_attention = True
        import transformers

        config = getattr(transformers, name).from_encoder_decoder_configs(parts["encoder"], parts["decoder"])
        config.decoder_start_token_id, config.pad_token_id = 1, 0
        return config

    return make


# -- inputs -----------------------------------------------------------------------------------------------------------


def _patches(config: Any) -> dict[str, Any]:
    """Images as flat patches with their grid, as Qwen2-VL and its like take them."""
    vision, text = config.vision_config, config.get_text_config()
    merge = getattr(vision, "spatial_merge_size", 2)
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or 3
    size = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    num_tokens, place = 16 // merge**2, config.image_token_id
    ids = _ids(1, 12, min(400, text.vocab_size))
    start = getattr(config, "vision_start_token_id", None)
    lead = torch.full((1, 1), start if start is not None else 5)
    ids = torch.cat([ids[:, :3], lead, torch.full((1, num_tokens), place), ids[:, 3:]], 1)
    given = {"input_ids": ids, "pixel_values": _floats(16, size), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return given | {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == place).long()}


def _series(config: Any) -> dict[str, Any]:
    past = config.context_length + max(config.lags_sequence)
    given = {"past_values": _floats(2, past), "past_time_features": _floats(2, past, 1)}
    ahead = {"future_values": _floats(2, 4), "future_time_features": _floats(2, 4, 1)}
    return given | ahead | {"past_observed_mask": torch.ones(2, past)}


def _decisions(config: Any) -> dict[str, Any]:
    given = {"states": _floats(1, 5, config.state_dim), "actions": _floats(1, 5, config.act_dim)}
    given |= {"rewards": _floats(1, 5, 1), "returns_to_go": _floats(1, 5, 1), "timesteps": torch.arange(5)[None]}
    return given | {"attention_mask": torch.ones(1, 5)}


def _queries(config: Any) -> dict[str, Any]:
    """Text with places for the query tokens of a Q-Former."""
    count, size = config.num_query_tokens, config.vision_config.image_size
    holders = torch.full((2, count), config.image_token_index if config.image_token_index is not None else 511)
    ids = torch.cat([holders, _ids(2, 8)], 1)
    given = {"pixel_values": _floats(2, 3, size, size), "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if config.text_config.is_encoder_decoder:
        given["decoder_input_ids"] = _ids(2, 5)
    return given


def _instructed(config: Any) -> dict[str, Any]:
    return _queries(config) | {"qformer_input_ids": _ids(2, 6), "qformer_attention_mask": torch.ones(2, 6).long()}


def _kosmos2(config: Any) -> dict[str, Any]:
    count, size = config.latent_query_num, config.vision_config.image_size
    ids = _ids(2, count + 10)
    mask = torch.zeros_like(ids)
    mask[:, 1 : 1 + count] = 1
    return {"pixel_values": _floats(2, 3, size, size), "input_ids": ids, "image_embeds_position_mask": mask}


def _lxmert(config: Any) -> dict[str, Any]:
    return _text() | {"visual_feats": _floats(2, 6, config.visual_feat_dim), "visual_pos": _floats(2, 6, 4).sigmoid()}


def _siglip2(config: Any) -> dict[str, Any]:
    vision = config.vision_config
    given = {"pixel_values": _floats(2, 16, vision.num_channels * vision.patch_size**2), "input_ids": _ids(2, 12)}
    shapes = torch.tensor([[4, 4], [2, 8]])
    return given | {"pixel_attention_mask": torch.ones(2, 16).long(), "spatial_shapes": shapes}


def _idefics(config: Any) -> dict[str, Any]:
    size = config.vision_config.image_size
    given = _text() | {"attention_mask": torch.ones(2, 12).long(), "pixel_values": _floats(2, 1, 3, size, size)}
    return given | {"image_attention_mask": torch.ones(2, 12, 1).long()}


def _musicgen(config: Any) -> dict[str, Any]:
    count = config.decoder.num_codebooks
    return _text() | {"decoder_input_ids": _ids(2 * count, 6, 60)}


def _moving(config: Any) -> dict[str, Any]:
    return {"pixel_values": _floats(1, 2, 3, 64, 64)}


def _vocabulary(count: int) -> dict[str, int]:
    """Words of Emu3 and Chameleon, of which ``count`` stand for codes of images."""
    words = {"<image>": 500, "<|extra_200|>": 501}
    words |= {f"<|visual token {index:06d}|>": 100 + index for index in range(count)}
    return words | {
        f"IMGIMG{'ABCDEFGHIJ'[index // 10]}{'ABCDEFGHIJ'[index % 10]}Z": 300 + index for index in range(count)
    }


_CODES = {"base_channels": 32, "channel_multiplier": [1, 2, 2, 2], "num_res_blocks": 1, "embed_dim": 64}

_VISION_GRID = Entry(inputs=_patches)
_GLM_GRID = Entry(inputs=_patches, changes={"text_config.rope_parameters": _MROPE})
_NO_TIMM = Entry(why_not="needs timm, which is not installed")

_THIN = {"width_coefficient": 0.5, "depth_coefficient": 0.6, "hidden_dim": 640}

TABLE: dict[str, Entry] = {
    "align": Entry(
        changes={
            "vision_config": {**_THIN, "model_type": "align_vision_model", "image_size": 64},
            "projection_dim": 640,
        },
    ),
    "efficientnet": Entry(config=lambda: _auto("EfficientNetConfig", image_size=64, **_THIN), way=0),
    "autoformer": Entry(changes=_SERIES, inputs=_series),
    "bamba": Entry(changes={**_STATE_SPACE, "attn_layer_indices": [1, 3]}),
    "blip_2": Entry(inputs=_queries, changes={"image_token_index": 511}),
    "blt": Entry(changes={"encoder_hash_byte_group_vocab": 300}),
    "bros": Entry(
        changes={"dim_bbox_sinusoid_emb_2d": 64, "dim_bbox_sinusoid_emb_1d": 8, "dim_bbox_projection": 64},
        inputs=lambda c: _text() | {"bbox": torch.rand(2, 12, 8, generator=torch.Generator().manual_seed(1))},
    ),
    "chameleon": Entry(
        way=1,
        changes={
            "vocabulary_map": _vocabulary(64),
            "vq_config": {**_CODES, "num_embeddings": 64, "latent_channels": 64},
        },
        inputs=lambda c: _text(),
    ),
    "clap": Entry(
        inputs=lambda c: _text() | {"input_features": _floats(2, 1, 1024, 64), "is_longer": torch.zeros(2, 1).bool()}
    ),
    "codegen": Entry(changes={"n_head": 4, "rotary_dim": 32}),
    "cvt": Entry(
        config=lambda: _auto("CvtConfig", embed_dim=[64, 128, 192], depth=[1, 2, 2], num_heads=[1, 2, 3]), way=0
    ),
    "dbrx": Entry(changes={"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 1, "clip_qkv": 8.0}}),
    "decision_transformer": Entry(inputs=_decisions),
    "deepseek_v2": Entry(changes={"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}),
    "dinat": Entry(why_not="needs natten, which is not installed"),
    "dots1": Entry(changes={"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}),
    "edgetam": _NO_TIMM,
    "emu3": Entry(
        way=0,
        changes={
            "vocabulary_map": _vocabulary(64),
            "vq_config": {**_CODES, "codebook_size": 64, "hidden_size": 64, "latent_channels": 64},
        },
        inputs=lambda c: {
            "input_ids": torch.cat([_ids(1, 4), torch.full((1, 16), 500), _ids(1, 4)], 1),
            "pixel_values": _floats(1, 3, 32, 32), "image_sizes": torch.tensor([[32, 32]]),
        },
    ),
    "encoder_decoder": Entry(
        model_class="EncoderDecoderModel", config=_pair("EncoderDecoderConfig", _bert_config), way=0,
        inputs=lambda c: _text() | {"decoder_input_ids": _ids(2, 7)},
    ),
    "esm": Entry(changes={"vocab_size": 512, "mask_token_id": 32, "pad_token_id": 1}),
    "falcon_h1": Entry(changes={**_STATE_SPACE, "mamba_d_ssm": 512}),
    "fast_vlm": _NO_TIMM,
    "gemma3n": _NO_TIMM,
    "glm46v": _GLM_GRID,
    "glm4v": _GLM_GRID,
    "glm4v_moe": Entry(
        inputs=_patches,
        changes={"text_config.rope_parameters": {**_MROPE, "mrope_section": [4, 6, 6], "partial_rotary_factor": 0.5}},
    ),
    "glm_ocr": _VISION_GRID,
    "glmga": _GLM_GRID,
    "granitemoehybrid": Entry(changes={**_STATE_SPACE, "layer_types": ["mamba", "attention"] * 2}),
    "idefics": Entry(inputs=_idefics),
    "informer": Entry(changes=_SERIES, inputs=_series),
    "instructblip": Entry(inputs=_instructed, changes={"image_token_index": 511}),
    "instructblipvideo": Entry(why_not="as instructblip, with frames"),
    "janus": Entry(
        way=0, changes={"vq_config": {**_CODES, "embed_dim": 8, "num_embeddings": 256, "latent_channels": 64}}
    ),
    "jamba": Entry(changes={"attn_layer_period": 2, "attn_layer_offset": 1}),
    "kyutai_speech_to_text": Entry(inputs=lambda c: {"input_ids": _ids(2, 12 * 33).reshape(2, 12, 33)}),
    "kosmos2": Entry(inputs=_kosmos2),
    "layoutlmv2": Entry(why_not="needs detectron2, which is not installed"),
    "layoutlmv3": Entry(changes={"coordinate_size": 44, "shape_size": 40}),
    "lfm2_moe": Entry(changes={"layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    "lilt": Entry(changes={"hidden_size": 192, "num_attention_heads": 4, "intermediate_size": 384}),
    "lightglue": Entry(inputs=_moving, changes={"keypoint_detector_config": {"model_type": "superpoint"}}),
    "lxmert": Entry(inputs=_lxmert),
    "markuplm": Entry(changes={"tag_pad_id": 216, "subs_pad_id": 1001}),
    "mimi": Entry(
        way=0, config=lambda: _auto(
            "MimiConfig", hidden_size=128, num_hidden_layers=3, intermediate_size=256, num_attention_heads=2,
            num_key_value_heads=2, num_filters=16, vector_quantization_hidden_dimension=64, codebook_dim=64,
            upsample_groups=128, codebook_size=512,
        ),
    ),
    "musicgen": Entry(model_class="MusicgenForConditionalGeneration", inputs=_musicgen),
    "musicgen_melody": Entry(model_class="MusicgenMelodyForConditionalGeneration", inputs=_musicgen),
    "nystromformer": Entry(changes={"segment_means_seq_len": 12, "num_landmarks": 4}),
    "paddleocr_vl": Entry(
        inputs=lambda c: _patches(c) | {"pixel_values": _floats(16, 3, *[c.vision_config.patch_size] * 2)}
    ),
    "pe_audio_video": _NO_TIMM,
    "pe_video": _NO_TIMM,
    "perceiver": Entry(
        way=0,
        changes={
            "num_self_attends_per_block": 2, "d_latents": 256, "num_latents": 64, "d_model": 192,
            "num_self_attention_heads": 8, "num_cross_attention_heads": 8,
        },
    ),
    "perception_lm": _NO_TIMM,
    "qwen2_5_vl": _VISION_GRID,
    "qwen2_vl": _VISION_GRID,
    "qwen3_5": _VISION_GRID,
    "qwen3_5_moe": _VISION_GRID,
    "qwen3_vl": _VISION_GRID,
    "qwen3_vl_moe": _VISION_GRID,
    "siglip2": Entry(inputs=_siglip2),
    "speech_encoder_decoder": Entry(
        model_class="SpeechEncoderDecoderModel", config=_pair("SpeechEncoderDecoderConfig", _wav2vec2_config), way=0,
        inputs=lambda c: {"input_values": _floats(2, 4000), "decoder_input_ids": _ids(2, 7)},
    ),
    "superglue": Entry(inputs=_moving, changes={"keypoint_detector_config": {"model_type": "superpoint"}}),
    "superpoint": Entry(config=lambda: _auto("SuperPointConfig"), way=0),
    "time_series_transformer": Entry(changes=_SERIES, inputs=_series),
    "timesfm": Entry(
        inputs=lambda c: {
            "past_values": _floats(2, c.context_length), "past_values_padding": torch.zeros(2, c.context_length),
            "freq": torch.zeros(2, 1).long(),
        }
    ),
    "timm_backbone": _NO_TIMM,
    "timm_wrapper": _NO_TIMM,
    "zamba": Entry(
        changes={"num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"]}
    ),
    "vision_encoder_decoder": Entry(
        model_class="VisionEncoderDecoderModel", config=_pair("VisionEncoderDecoderConfig", _vit_config), way=0,
        inputs=lambda c: {"pixel_values": _floats(2, 3, 32, 32), "decoder_input_ids": _ids(2, 7)},
    ),
}  # fmt: skip
