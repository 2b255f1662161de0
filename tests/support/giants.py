"""Folders of checkpoints too large for any test machine: headers are real, weights are holes in sparse files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["DEEPSEEK_V3", "write_deepseek_v3"]

# https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json, without the quantization_config: the form in
# which others published it dequantised.
DEEPSEEK_V3: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 129280,
}  # fmt: skip
_NUM_SHARDS = 163

_Tensor = tuple[str, str, list[int]]  # name, dtype as safetensors writes it, shape


def write_deepseek_v3(folder: Path) -> int:
    """config.json, index and 163 shards of DeepSeek-V3 in bfloat16, with the published names; returns data bytes.

    The shards are sparse: their length is right, and nothing but the header takes room on the disk.
    """
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_V3, indent=2))
    shards = list(_shards(list(_deepseek_v3())))
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):06}.safetensors"
        _write_shard(folder / file, shard)
        places.update({name: file for name, _, _ in shard})
    total = sum(_num_bytes(tensor) for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _shards(tensors: list[_Tensor]) -> Iterator[list[_Tensor]]:
    share = sum(map(_num_bytes, tensors)) / _NUM_SHARDS
    shard: list[_Tensor] = []
    filled = number = 0
    for tensor in tensors:
        shard.append(tensor)
        filled += _num_bytes(tensor)
        if filled >= share * (number + 1) and number + 1 < _NUM_SHARDS:
            yield shard
            shard, number = [], number + 1
    yield shard


def _deepseek_v3() -> Iterator[_Tensor]:
    """All tensors in order, those of the multi-token prediction layer (61), which transformers leaves out, included."""
    hidden, vocabulary, layers = (DEEPSEEK_V3[key] for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
    yield "model.embed_tokens.weight", "BF16", [vocabulary, hidden]
    for layer in range(layers):
        yield from _layer(f"model.layers.{layer}.", dense=layer < DEEPSEEK_V3["first_k_dense_replace"])
    yield "model.norm.weight", "BF16", [hidden]
    yield "lm_head.weight", "BF16", [vocabulary, hidden]
    prediction = f"model.layers.{layers}."
    yield from _layer(prediction, dense=False)
    yield f"{prediction}embed_tokens.weight", "BF16", [vocabulary, hidden]
    yield f"{prediction}eh_proj.weight", "BF16", [hidden, 2 * hidden]
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{prediction}{norm}.weight", "BF16", [hidden]
    yield f"{prediction}shared_head.head.weight", "BF16", [vocabulary, hidden]


def _layer(prefix: str, *, dense: bool) -> Iterator[_Tensor]:
    size = DEEPSEEK_V3
    hidden, experts, inner = size["hidden_size"], size["n_routed_experts"], size["moe_intermediate_size"]
    yield from _attention(f"{prefix}self_attn.")
    yield f"{prefix}input_layernorm.weight", "BF16", [hidden]
    yield f"{prefix}post_attention_layernorm.weight", "BF16", [hidden]
    if dense:
        yield from _mlp(f"{prefix}mlp.", size["intermediate_size"])
        return
    yield f"{prefix}mlp.gate.weight", "BF16", [experts, hidden]
    yield f"{prefix}mlp.gate.e_score_correction_bias", "F32", [experts]
    yield from _mlp(f"{prefix}mlp.shared_experts.", size["n_shared_experts"] * inner)
    for expert in range(experts):
        yield from _mlp(f"{prefix}mlp.experts.{expert}.", inner)


def _attention(prefix: str) -> Iterator[_Tensor]:
    size = DEEPSEEK_V3
    hidden, heads, query_rank, kv_rank = (
        size[key] for key in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = (size[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    yield f"{prefix}q_a_proj.weight", "BF16", [query_rank, hidden]
    yield f"{prefix}q_a_layernorm.weight", "BF16", [query_rank]
    yield f"{prefix}q_b_proj.weight", "BF16", [heads * (nope + rope), query_rank]
    yield f"{prefix}kv_a_proj_with_mqa.weight", "BF16", [kv_rank + rope, hidden]
    yield f"{prefix}kv_a_layernorm.weight", "BF16", [kv_rank]
    yield f"{prefix}kv_b_proj.weight", "BF16", [heads * (nope + value), kv_rank]
    yield f"{prefix}o_proj.weight", "BF16", [hidden, heads * value]


def _mlp(prefix: str, inner: int) -> Iterator[_Tensor]:
    hidden = DEEPSEEK_V3["hidden_size"]
    yield f"{prefix}gate_proj.weight", "BF16", [inner, hidden]
    yield f"{prefix}up_proj.weight", "BF16", [inner, hidden]
    yield f"{prefix}down_proj.weight", "BF16", [hidden, inner]


def _num_bytes(tensor: _Tensor) -> int:
    _, dtype, shape = tensor
    return math.prod(shape) * (4 if dtype == "F32" else 2)


def _write_shard(file: Path, tensors: list[_Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + _num_bytes((name, dtype, shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    with file.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + end)
