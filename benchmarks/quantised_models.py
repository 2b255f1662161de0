"""config.json of small models in the formats that quantised checkpoints have, dense and with experts."""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
DENSE = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "intermediate_size": 3072,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
}
EXPERTS = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GPT_OSS = {
    **_COMMON,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "intermediate_size": 1024,
    "head_dim": 64,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "attention_bias": True,
    "initial_context_length": 4096,
    "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "swiglu_limit": 7.0,
    "router_aux_loss_coef": 0.9,
}


def _compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    if inputs is not None:
        group["input_activations"] = {"symmetric": True, **inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


_BY_TOKEN = {"strategy": "token", "dynamic": True}
_BY_CHANNEL = {"strategy": "channel"}
_INT4_BY_GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_NOT_THE_GATES = [f"model.layers.{index}.mlp.gate" for index in range(_COMMON["num_hidden_layers"])]
_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "ignored_layers": ["lm_head", *_NOT_THE_GATES],
}
# name: quantization_config of the checkpoint; None: there is none.
FORMATS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "fp8-block": {**_FP8, "weight_block_size": [128, 128]},
    "fp8-tensor": _FP8,
    "fp8-channel": _compressed(
        "float-quantized",
        {"num_bits": 8, "type": "float", **_BY_CHANNEL},
        {"num_bits": 8, "type": "float", **_BY_TOKEN},
    ),
    "int8": _compressed(
        "int-quantized", {"num_bits": 8, "type": "int", **_BY_CHANNEL}, {"num_bits": 8, "type": "int", **_BY_TOKEN}
    ),
    "int4": _compressed("pack-quantized", _INT4_BY_GROUP),
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "dynamic": {"-:.*mlp.gate$": {}},
    },
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
    },
    "nvfp4": _compressed("nvfp4-pack-quantized", _NVFP4, {**_NVFP4, "dynamic": "local"}),
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def _with(config: dict[str, Any], found: dict[str, Any] | None) -> dict[str, Any]:
    if found is None:
        return config
    if found["quant_method"] == "awq" and config is EXPERTS:  # part of a name; a dense layer has a gate_up_proj
        found = {**found, "modules_to_not_convert": ["mlp.gate"]}
    return {**config, "quantization_config": found}


# name: config.json of the model, and arguments of the engine.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        f"{shape}-{name}": (_with(config, found), {})
        for shape, config in (("dense", DENSE), ("moe", EXPERTS))
        for name, found in FORMATS.items()
    },
    # Quantised while they load, from a checkpoint in bfloat16.
    "dense-fp8-online": (DENSE, {"quantization": "fp8"}),
    "moe-fp8-online": (EXPERTS, {"quantization": "fp8"}),
    "gpt-oss-mxfp4": (_with(GPT_OSS, MXFP4), {"moe_backend": "marlin"}),
    # By a kernel whose weights are objects of its own: refused.
    "gpt-oss-mxfp4-triton": (_with(GPT_OSS, MXFP4), {"moe_backend": "triton"}),
}
