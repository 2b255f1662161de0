"""Models that `headrace plan` knows by name: their configs, and the package data that is made from them.

Each has the source of its config and the number of parameters, in billions, that its publisher states. The configs
hold what decides names and sizes. They were written without a connection to the Hub; `tests/plan/test_known_models.py`
builds each and compares the count, to the digits that are published.

    python benchmarks/known_models.py            write src/headrace/checkpoint/known_models.zip
    python benchmarks/known_models.py NAME...    print the count of some
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from torch import nn

from configs_2026 import (
    DEEPSEEK_V3_2,
    EXPERTS_GPTQ,
    GLM_4_7,
    GLM_4_7_AWQ,
    GLM_4_7_FLASH,
    GLM_5,
    LLAMA_4_MAVERICK,
    LLAMA_4_SCOUT,
    MINIMAX_IN_16_BITS,
    MINIMAX_M2,
    QWEN3_5_9B,
    QWEN3_5_27B,
    QWEN3_5_35B,
    QWEN3_5_122B,
    QWEN3_5_397B,
    QWEN3_8_FLASH_NEXT,
    VISION_GPTQ,
    kimi_k2_5,
)
from headrace.adapters.pipeline_peaks import describe
from headrace.adapters.transformers.load_folder import build_meta_model
from headrace.adapters.transformers.opened_model import open_model
from headrace.checkpoint.metadata_cache import KNOWN_MODELS, FolderFacts, body_text
from headrace.checkpoint.weight_map import WeightMap
from headrace.model.inventory import take_inventory
from headrace.model.records import ModelProfile
from other_offloaders import SHAPES
from published_configs import (
    AWQ,
    DEEPSEEK_V2_LITE,
    GLM_4_5_AIR,
    GPT_OSS_20B,
    GPT_OSS_120B,
    GPTQ,
    INT4,
    LLAMA_3_3_70B,
    MXFP4,
    QWEN3_8B,
    QWEN3_30B_A3B,
)

_NOTE = (
    "{name}: no file of it is here, so this is planned from its published config, known by name; to plan from the "
    'files\' own: hf download {name} --include "*.json"'
)
_PIPELINE = (
    "{name}: no file of it is here, so this is planned from its published configs, known by name. It is a pipeline of "
    "diffusers, which headrace.adapters.diffusers.load runs{step}"
)
_CONTEXT = 1024  # caches are measured by two short forwards, whatever it is


@dataclass(frozen=True)
class Known:
    """A published config; ``billions``: parameters as its publisher states them, ``source``: where.

    ``gigabytes``: of its files, where someone states them; with heads of multi-token prediction, which are not counted.
    """

    config: dict[str, Any]
    billions: float
    source: str = "its model card"
    gigabytes: float | None = None


def qwen3(hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool = False) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**QWEN3_8B, **sizes, "intermediate_size": intermediate, "tie_word_embeddings": tied}


def qwen2(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate, "vocab_size": 152064, "max_position_embeddings": 32768,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip


LONG = {**QWEN3_30B_A3B, "max_position_embeddings": 262144, "rope_theta": 10000000}
QWEN3_235B = {
    **QWEN3_30B_A3B, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 94, "num_attention_heads": 64,
}  # fmt: skip
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "intermediate_size": 5120, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "partial_rotary_factor": 0.25, "vocab_size": 151936,
    "max_position_embeddings": 262144, "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
NF4 = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "vocab_size": 129280, "max_position_embeddings": 163840,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "quantization_config": FP8,
}  # fmt: skip
LLAMA_3_1_8B = {
    **LLAMA_3_3_70B, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 32000, "max_position_embeddings": 32768, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
MISTRAL_SMALL = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768,
    "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 131072, "max_position_embeddings": 32768, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
PHI_4 = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352,
    "max_position_embeddings": 16384, "original_max_position_embeddings": 16384, "sliding_window": None,
    "pad_token_id": 100349, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA_3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "mm_tokens_per_image": 256,
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168,
        "sliding_window": 1024, "vocab_size": 262208, "max_position_embeddings": 131072,
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip

MODELS = {
    "Qwen/Qwen3-4B": Known(qwen3(2560, 36, 32, 9728, tied=True), 4.0),
    "Qwen/Qwen3-8B": Known(QWEN3_8B, 8.2),
    "Qwen/Qwen3-14B": Known(qwen3(5120, 40, 40, 17408), 14.8),
    "Qwen/Qwen3-32B": Known(qwen3(5120, 64, 64, 25600), 32.8),
    "Qwen/Qwen3-30B-A3B": Known(QWEN3_30B_A3B, 30.5),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": Known(LONG, 30.5),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": Known(LONG, 30.5),
    "Qwen/Qwen3-235B-A22B": Known(QWEN3_235B, 235),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Known(QWEN3_NEXT, 80),
    "Qwen/Qwen2.5-7B-Instruct": Known(qwen2(3584, 28, 28, 4, 18944), 7.61),
    "Qwen/Qwen2.5-32B-Instruct": Known(qwen2(5120, 64, 40, 8, 27648), 32.8, "the Hub's count of its files"),
    "Qwen/Qwen2.5-72B-Instruct": Known(qwen2(8192, 80, 64, 8, 29568), 72.7),
    "meta-llama/Llama-3.1-8B-Instruct": Known(LLAMA_3_1_8B, 8.03, "the Hub's count of its files"),
    "meta-llama/Llama-3.3-70B-Instruct": Known(LLAMA_3_3_70B, 70.6, "the Hub's count of its files"),
    "unsloth/Llama-3.3-70B-Instruct-bnb-4bit": Known(
        {**LLAMA_3_3_70B, "quantization_config": NF4}, 70.6, "the Hub's count of the files that it was made from"
    ),
    "openai/gpt-oss-20b": Known({**GPT_OSS_20B, "quantization_config": MXFP4}, 20.91),
    "openai/gpt-oss-120b": Known({**GPT_OSS_120B, "quantization_config": MXFP4}, 116.83),
    "zai-org/GLM-4.5-Air": Known(GLM_4_5_AIR, 106),
    "deepseek-ai/DeepSeek-V3": Known(DEEPSEEK_V3, 671),
    "deepseek-ai/DeepSeek-V2-Lite": Known(DEEPSEEK_V2_LITE, 15.7),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": Known(MIXTRAL, 46.7),
    "mistralai/Mistral-Small-24B-Instruct-2501": Known(MISTRAL_SMALL, 23.6, "the Hub's count of its files"),
    "microsoft/phi-4": Known(PHI_4, 14.7),
    "google/gemma-3-27b-it": Known(GEMMA_3_27B, 27.4, "the Hub's count of its files"),
    "Qwen/Qwen3-32B-AWQ": Known({**qwen3(5120, 64, 64, 25600), "quantization_config": AWQ}, 32.8),
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": Known({**QWEN3_30B_A3B, "quantization_config": GPTQ}, 30.5),
    "Qwen/Qwen3-235B-A22B-GPTQ-Int4": Known({**QWEN3_235B, "quantization_config": GPTQ}, 235),
    "Qwen/Qwen3.5-9B": Known(QWEN3_5_9B, 9),
    "Qwen/Qwen3.5-27B": Known(QWEN3_5_27B, 27),
    "Qwen/Qwen3.5-27B-GPTQ-Int4": Known({**QWEN3_5_27B, "quantization_config": VISION_GPTQ}, 27),
    "Qwen/Qwen3.6-27B": Known(QWEN3_5_27B, 27),
    "Qwen/Qwen3.5-35B-A3B": Known(QWEN3_5_35B, 35),
    "Qwen/Qwen3.6-35B-A3B": Known(QWEN3_5_35B, 35),
    "Qwen/Qwen3.5-35B-A3B-GPTQ-Int4": Known(
        {**QWEN3_5_35B, "quantization_config": EXPERTS_GPTQ}, 35, "22.8 GiB in a table of servers on GitHub", 24.5
    ),
    "Qwen/Qwen3.5-122B-A10B": Known(QWEN3_5_122B, 122),
    "Qwen/Qwen3.5-122B-A10B-GPTQ-Int4": Known(
        {**QWEN3_5_122B, "quantization_config": EXPERTS_GPTQ}, 122, "73 GiB in the same table", 78.9
    ),
    "Qwen/Qwen3.5-397B-A17B": Known(QWEN3_5_397B, 397),
    "deepseek-ai/DeepSeek-V3.1": Known(DEEPSEEK_V3, 671),
    "moonshotai/Kimi-K2.5": Known(
        kimi_k2_5(DEEPSEEK_V3), 1027, "the Hub's count of Kimi-K2, and its vision tower", 595
    ),
    "moonshotai/Kimi-K2.6": Known(
        kimi_k2_5(DEEPSEEK_V3), 1027, "its config's class, and the size of its files in Unsloth's guide", 595
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": Known(LLAMA_4_SCOUT, 109),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": Known(LLAMA_4_MAVERICK, 400),
    "Qwen/Qwen3.8-27B": Known(QWEN3_5_27B, 27, "the documentation of NVIDIA's NeMo AutoModel: Qwen3.5's architecture"),
    "Qwen/Qwen3.8-Flash-Next": Known(
        QWEN3_8_FLASH_NEXT, 176, "SGLang's cookbook: 51 of them an n-gram table; files in Unsloth's guide", 355
    ),
    "zai-org/GLM-4.7": Known(GLM_4_7, 355, "the report of GLM-4.5, of the same shape"),
    "zai-org/GLM-4.7-Flash": Known(GLM_4_7_FLASH, 30),
    "QuantTrio/GLM-4.7-AWQ": Known({**GLM_4_7, "quantization_config": GLM_4_7_AWQ}, 355, "the same, and its config"),
    "zai-org/GLM-5": Known(GLM_5, 744),
    "deepseek-ai/DeepSeek-V3.2": Known({**DEEPSEEK_V3_2, "quantization_config": FP8}, 671),
    **{
        f"MiniMaxAI/MiniMax-{version}": Known(
            {**MINIMAX_M2, "quantization_config": FP8 | MINIMAX_IN_16_BITS}, 230, "its model card, its config in copies"
        )
        for version in ("M2", "M2.1", "M2.5", "M2.7")
    },
    "et0dev/MiniMax-M2.7-AWQ-4bit": Known({**MINIMAX_M2, "quantization_config": INT4}, 230),
}

_T5 = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
_VAE = {
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "latent_channels": 16, "use_quant_conv": False,
    "scaling_factor": 0.3611, "shift_factor": 0.1159, "sample_size": 1024,
}  # fmt: skip


@dataclass(frozen=True)
class Pipeline:
    """Components in the order of a call; ``billions``: of one transformer, as published; ``rows`` of a step of it."""

    parts: dict[str, Callable[[], Any]]
    billions: float
    rows: int
    step: str
    name: str  # of its class
    scheduler: Any
    index: dict[str, Any] = field(default_factory=dict)  # the rest of its model_index.json


def transformer_of(shape: str) -> Any:
    found = SHAPES[shape](False)
    return getattr(diffusers, str(found.model))(**found.config)


def qwen2_5_vl() -> Any:
    text = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
    text |= {"intermediate_size": 18944, "vocab_size": 152064}
    config = transformers.Qwen2_5_VLConfig(text_config={**text, "tie_word_embeddings": False}, vision_config=vision)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def mistral_small_3() -> Any:
    vision = {"model_type": "pixtral", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    vision |= {"intermediate_size": 4096, "head_dim": 64}
    config = transformers.Mistral3Config(text_config=MISTRAL_SMALL, vision_config=vision)
    return transformers.Mistral3ForConditionalGeneration(config)


def gemma3_12b() -> Any:
    text = {**GEMMA_3_27B["text_config"], "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48}
    text |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256}
    config = transformers.Gemma3Config(text_config=text, vision_config=GEMMA_3_27B["vision_config"])
    return transformers.Gemma3ForConditionalGeneration(config)


def clip_l() -> Any:
    return transformers.CLIPTextModel(
        transformers.CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12)
    )


def llama_3_8b() -> Any:
    sizes = {"vocab_size": 128320, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    return transformers.LlamaModel(transformers.LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8))


_FLOW = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
_LTX_RATIOS = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
_IMAGE = "; its step is a call with one step of the transformer, for an image of 1024 x 1024"
PIPELINES = {
    "black-forest-labs/FLUX.1-dev": Pipeline(
        {
            "text_encoder": clip_l,
            "text_encoder_2": lambda: transformers.T5EncoderModel(transformers.T5Config(vocab_size=32128, **_T5)),
            "transformer": lambda: transformer_of("flux"),
            "vae": lambda: diffusers.AutoencoderKL(**_VAE),
        },
        12,
        4608,
        _IMAGE,
        "FluxPipeline",
        _FLOW,
    ),
    "black-forest-labs/FLUX.2-dev": Pipeline(
        {
            "text_encoder": mistral_small_3,
            "transformer": lambda: diffusers.Flux2Transformer2DModel(),
            "vae": lambda: diffusers.AutoencoderKLFlux2(),
        },
        32,
        4608,
        _IMAGE,
        "Flux2Pipeline",
        _FLOW,
    ),
    "Qwen/Qwen-Image": Pipeline(
        {
            "text_encoder": qwen2_5_vl,
            "transformer": lambda: diffusers.QwenImageTransformer2DModel(),
            "vae": lambda: diffusers.AutoencoderKLQwenImage(),
        },
        20,
        4352,
        _IMAGE,
        "QwenImagePipeline",
        _FLOW,
    ),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": Pipeline(
        {
            "text_encoder": lambda: transformers.UMT5EncoderModel(transformers.UMT5Config(vocab_size=256384, **_T5)),
            "transformer": lambda: transformer_of("wan"),
            "transformer_2": lambda: transformer_of("wan"),
            "vae": lambda: diffusers.AutoencoderKLWan(),
        },
        14,
        32760,
        "; its step is a call with one step of each transformer, for 81 frames of 480 x 832",
        "WanPipeline",
        diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        {"boundary_ratio": 0.875},
    ),
    "Lightricks/LTX-2": Pipeline(
        {
            "text_encoder": gemma3_12b,
            "connectors": lambda: LTX2TextConnectors(),
            "transformer": lambda: diffusers.LTX2VideoTransformer3DModel(),
            "vae": lambda: diffusers.AutoencoderKLLTX2Video(**_LTX_RATIOS),
            "audio_vae": lambda: diffusers.AutoencoderKLLTX2Audio(),
            "vocoder": lambda: LTX2Vocoder(),
        },
        19,
        6144,
        "; its step is a call with one step of the transformer, for 121 frames of 512 x 768",
        "LTX2Pipeline",
        _FLOW,
    ),
    "hunyuanvideo-community/HunyuanVideo": Pipeline(
        {
            "text_encoder": llama_3_8b,
            "text_encoder_2": clip_l,
            "transformer": lambda: diffusers.HunyuanVideoTransformer3DModel(),
            "vae": lambda: diffusers.AutoencoderKLHunyuanVideo(),
        },
        13,
        118800,
        "; its step is a call with one step of the transformer, for 129 frames of 720 x 1280",
        "HunyuanVideoPipeline",
        diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    ),
}


def in_folder(config: dict[str, Any], folder: str) -> Path:
    (Path(folder) / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **config}))
    return Path(folder)


def num_parameters(known: Known) -> int:
    """Of the model without its quantisation."""
    plain = {key: value for key, value in known.config.items() if key != "quantization_config"}
    with tempfile.TemporaryDirectory() as folder:
        model = build_meta_model(in_folder(plain, folder))
    return sum(parameter.numel() for parameter in model.parameters())


def facts_of(name: str, known: Known) -> FolderFacts:
    """What planning for a GPU needs of the model, as from a folder with nothing but the config."""
    with tempfile.TemporaryDirectory() as folder:
        opened = open_model(in_folder(known.config, folder), None, None, "cuda", to_plan=True)
        facts, _ = opened.facts(_CONTEXT)
    return replace(facts, differences=(_NOTE.format(name=name),))


def pipeline_facts(name: str, pipeline: Pipeline) -> FolderFacts:
    """The same of a pipeline, whose components are the modules of one model."""
    components = nn.Module()
    for part, make in pipeline.parts.items():
        with torch.device("meta"):
            components.add_module(part, make().to(torch.bfloat16).eval())
    inventory, note = take_inventory(components), _PIPELINE.format(name=name, step=pipeline.step)
    weights, parts = WeightMap.expected(inventory, Path(name)), dict(components.named_children())
    index = {"_class_name": pipeline.name, **pipeline.index}
    described = describe(index, {"scheduler": pipeline.scheduler, **parts})
    return FolderFacts(inventory, ModelProfile(), weights, (note,), pipeline.rows, described)


def texts() -> Iterator[tuple[str, str]]:
    """Names of files and their text."""
    yield from ((f"{name}.json", body_text(facts_of(name, known))) for name, known in MODELS.items())
    for name, pipeline in PIPELINES.items():
        facts = pipeline_facts(name, pipeline)
        yield f"{name}.json", body_text(facts)
        yield f"{name}.pipeline", facts.pipeline


def write(file: Path = KNOWN_MODELS) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, text in texts():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))  # the same bytes at any time
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text, compresslevel=9)


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        print(asked, num_parameters(MODELS[asked]))
    if not sys.argv[1:]:
        write()
