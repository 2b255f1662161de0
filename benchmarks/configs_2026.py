"""config.json of models of 2026, as far as it decides names and sizes; `known_models.py` has their published sizes.

Written without a connection to the Hub, from what is public elsewhere: the defaults of transformers 5.23, which are
those of Qwen3.5-35B-A3B, GLM-4.7-Flash, GLM-5, MiniMax-M2, DeepSeek-V3.2 and Llama-4-Scout; sizes of Qwen3.5-27B and
-397B-A17B in github.com/THUDM/slime (scripts/models); of Qwen3.8-Flash-Next in tests of its ports on GitHub; forms in
stored copies of config.json (MiniMax-M2, QuantTrio's GLM-4.7-AWQ) and of model cards. Each has the number of parameters
that its publisher states.
"""

from __future__ import annotations

from typing import Any

from published_configs import AWQ, GLM_4_5_AIR, GPTQ, INT4

_ROPE = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}


def qwen3_5(model_type: str, layers: int, hidden: int, heads: tuple[int, int, int], **sizes: int) -> dict[str, Any]:
    """``heads``: of attention, their keys and values, values of linear attention."""
    architecture = "Qwen3_5MoeForConditionalGeneration" if "moe" in model_type else "Qwen3_5ForConditionalGeneration"
    text = {
        "model_type": f"{model_type}_text", "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "linear_num_value_heads": heads[2],
        "head_dim": 256, "vocab_size": 248320, "max_position_embeddings": 262144, "rope_parameters": _ROPE,
        "tie_word_embeddings": False, **sizes,
    }  # fmt: skip
    return {"architectures": [architecture], "model_type": model_type, "text_config": text}


def experts(count: int, top_k: int, width: int) -> dict[str, int]:
    sizes = {"moe_intermediate_size": width, "shared_expert_intermediate_size": width}
    return {"num_experts": count, "num_experts_per_tok": top_k, **sizes}


QWEN3_5_9B = qwen3_5("qwen3_5", 32, 4096, (16, 4, 32), intermediate_size=12288)
QWEN3_5_27B = qwen3_5("qwen3_5", 64, 5120, (24, 4, 48), intermediate_size=17408)
QWEN3_5_35B = qwen3_5("qwen3_5_moe", 40, 2048, (16, 2, 32), **experts(256, 8, 512))
QWEN3_5_122B = qwen3_5("qwen3_5_moe", 48, 3072, (32, 2, 64), **experts(256, 8, 1024))
QWEN3_5_397B = qwen3_5("qwen3_5_moe", 60, 4096, (32, 2, 64), **experts(512, 10, 1024))
QWEN3_8_FLASH_NEXT = {
    "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp",
    "text_config": {
        "model_type": "qwen4_exp_text", "hidden_size": 2560, "num_hidden_layers": 48, "num_attention_heads": 24,
        "num_key_value_heads": 2, "linear_num_value_heads": 48, "hc_lowrank": 320, "ple_layer_ids": [2],
        "ple_embed_dim": 2560, "split_ngram_parts": 128, "indexer_n_heads": 4, "indexer_kv_heads": 1,
        "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4, "output_gate_type": "sigmoid",
        "max_position_embeddings": 262144, "bos_token_id": 248044, "eos_token_id": 248044, "rope_parameters": _ROPE,
        **experts(512, 10, 640),
    },
}  # fmt: skip
# Qwen's own checkpoints in four bits leave all but the experts of a mixture in 16.
_IN_16_BITS = ("lm_head", ".*attn.*", ".*shared_expert.*", ".*mtp.*", ".*visual.*")
EXPERTS_GPTQ: dict[str, Any] = {**GPTQ, "dynamic": {f"-:{name}": {} for name in _IN_16_BITS}}
VISION_GPTQ: dict[str, Any] = {**GPTQ, "dynamic": {"-:lm_head": {}, "-:.*visual.*": {}}}
GLM_4_7 = {
    **GLM_4_5_AIR, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 92, "first_k_dense_replace": 3, "n_routed_experts": 160, "use_qk_norm": True,
    "routed_scaling_factor": 2.5, "max_position_embeddings": 202752,
}  # fmt: skip
# The first layers of GLM-4.5-Air are 10,944 wide, which has no whole groups of 128.
GLM_AWQ = {**AWQ, "modules_to_not_convert": ["mlp.gate", "layers.0.mlp"]}
GLM_4_7_FLASH = {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}
GLM_5 = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"}
# All but embeddings, heads and shared experts is in four bits. Its config has parts of names, as vLLM takes them; here
# are patterns, as transformers does.
GLM_4_7_AWQ = {**AWQ, "modules_to_not_convert": ["embed_tokens", ".*shared_experts", "shared_head", "lm_head"]}
MINIMAX_M2 = {"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2"}
MINIMAX_IN_16_BITS = {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}
DEEPSEEK_V3_2 = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
LLAMA_4_SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
    "text_config": {"model_type": "llama4_text"}, "vision_config": {"model_type": "llama4_vision_model"},
}  # fmt: skip
LLAMA_4_MAVERICK = {
    **LLAMA_4_SCOUT, "text_config": {
        "model_type": "llama4_text", "num_local_experts": 128, "interleave_moe_layer_step": 2,
        "max_position_embeddings": 1048576,
    },
}  # fmt: skip


def kimi_k2_5(deepseek_v3: dict[str, Any]) -> dict[str, Any]:
    """The language model of ``deepseek_v3``'s kind, with its experts in int4 of compressed-tensors."""
    text = {key: value for key, value in deepseek_v3.items() if key not in ("architectures", "quantization_config")}
    text |= {
        "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "first_k_dense_replace": 1,
        "vocab_size": 163840, "n_group": 1, "topk_group": 1, "max_position_embeddings": 262144,
    }  # fmt: skip
    weights = {**INT4["config_groups"]["group_0"]["weights"], "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "architectures": ["Kimi_K25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text,
        "tie_word_embeddings": False, "quantization_config": {**INT4, "config_groups": groups},
    }  # fmt: skip
