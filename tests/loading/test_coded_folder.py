"""A folder of transformers whose units are coded as they are read: tokens, and what crosses the link."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import headrace
from headrace import Budget, Prefetch
from headrace.adapters.transformers import load
from headrace.config import Policy
from headrace.testing import assert_same_bits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=128, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("coded") / "qwen3"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path, max_shard_size="1MB")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [Prefetch(1, 1, 2, codec="exp3"), Prefetch(2, 1, 1, codec="exp3"), Budget("4MiB", codec="exp3")]
)
def test_tokens_of_the_resident_model(folder: Path, policy: Policy) -> None:
    ids = torch.arange(5)[None]
    resident = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    for parameter in resident.parameters():
        parameter.data = parameter.data.clone()  # a mapped file has it at any address
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = resident.generate(ids, **options)
    model, handle = load(folder, policy, device="cpu")
    with handle:
        for _ in range(2):
            found = model.generate(ids, **options)
            assert torch.equal(found.sequences, expected.sequences)
            assert_same_bits(torch.cat(found.logits), torch.cat(expected.logits))
        plan, stats = handle.plan, handle.stats()
        assert {unit.store for unit in plan.units} == {"exp3"}
        assert stats.bytes_moved >= 8 * plan.moved_bytes
        assert stats.store_bytes["host"] <= 0.77 * plan.prefetched_bytes
    assert headrace.make_plan(folder, policy, device="cpu").moved_bytes == plan.moved_bytes
