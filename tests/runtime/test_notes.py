"""``stats().notes`` says which implementation reads experts in place."""

from __future__ import annotations

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import headrace
from headrace import UVA


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_experts_implementation_is_named(implementation: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    config = Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, num_attention_heads=2, vocab_size=100)
    model = Qwen3MoeForCausalLM(config).eval()
    model.set_experts_implementation(implementation)
    with headrace.offload(model, UVA(params=["experts"])) as handle:
        (note,) = handle.stats().notes
        assert repr(implementation) in note
        assert "routed" in note
        assert handle.stats().mechanism_bytes["uva"] > 0


def test_no_note_without_experts() -> None:
    config = Qwen3MoeConfig(hidden_size=64, num_hidden_layers=1, num_experts=4, num_attention_heads=2, vocab_size=100)
    model = Qwen3MoeForCausalLM(config).eval()
    with headrace.offload(model, UVA(params=["embed_tokens"])) as handle:
        assert handle.stats().notes == ()
