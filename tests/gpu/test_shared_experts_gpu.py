"""The promise on a GPU: whoever computes a missed expert, logits are the resident model's, in graphs too."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

import headrace
from headrace.adapters.transformers import load
from headrace.adapters.transformers.shared_experts import share_experts
from headrace.errors import StateError
from moe_models import cached, qwen
from quantised_checkpoints import FORMATS

SHARES = {"none": [0], "a third": [0, 0, 1, 1, 1, 2, 2, 3], "all": list(range(65)), "measured": None}
TOKENS = 60


def build() -> Any:
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 4}
    return qwen("headrace", **sizes, num_hidden_layers=4).bfloat16().cuda()


def logits_of(model: Any, seed: int = 0) -> torch.Tensor:
    """Of a sampled text; routers see another text for each seed."""
    prompt = torch.randint(0, 50, (1, 5), generator=torch.Generator().manual_seed(seed)).cuda()
    found: list[torch.Tensor] = []

    def keep(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        found.append(scores.clone())
        return scores

    torch.manual_seed(seed)
    processors = LogitsProcessorList([keep])  # type: ignore[no-untyped-call]
    model.generate(
        prompt, max_new_tokens=TOKENS, do_sample=True, pad_token_id=0, eos_token_id=None, logits_processor=processors
    )
    return torch.cat(found)


@pytest.mark.parametrize("shares", SHARES)
def test_bits(shares: str) -> None:
    model = build()
    graphs = headrace.decode_in_graphs(model)
    expected = [logits_of(model, seed) for seed in range(4)]
    graphs.remove()
    with headrace.offload(model, cached(6)) as handle:
        share = share_experts(model, shares=SHARES[shares])
        graphs = headrace.decode_in_graphs(model)
        for seed, logits in enumerate(expected):
            assert torch.equal(logits_of(model, seed), logits)
        assert graphs.replays > 2 * TOKENS
        assert (share.doorbell.computed > 0) is (shares != "none")
        assert any(layer.fetched for layer in handle.stats().experts) is (shares != "all")


def test_another_share_in_each_text(tmp_path: Any) -> None:
    """MXFP4 as files have it; between texts eager prompts run, and the share is taken away and given back."""
    FORMATS["MXFP4, experts"].write(tmp_path)
    whole, one = load(tmp_path, "1GiB", experts_implementation="headrace")
    expected = [logits_of(whole, seed) for seed in range(5)]
    one.remove()
    model, handle = load(tmp_path, cached(2), experts_implementation="headrace")
    made = torch.Generator().manual_seed(0)
    with handle:
        for seed, logits in enumerate(expected):
            share = share_experts(model, shares=torch.randint(0, 4, (65,), generator=made).tolist())
            assert torch.equal(logits_of(model, seed), logits)
            share.remove()
        assert torch.equal(logits_of(model, 0), expected[0])


def test_a_coordinator_that_is_gone_is_an_error_within_seconds() -> None:
    model = build()
    expected = logits_of(model)
    with headrace.offload(model, cached(6)):
        share = share_experts(model, shares=SHARES["all"])
        headrace.decode_in_graphs(model)
        assert torch.equal(logits_of(model), expected)
        share.doorbell.stop()
        began = time.monotonic()
        with pytest.raises(StateError, match="there was no answer for seconds"):
            logits_of(model)
        assert time.monotonic() - began < 30
        share.remove()
        assert torch.equal(logits_of(model), expected)
