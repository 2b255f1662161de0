"""The promise: the same bits, whatever a model's forward does around its modules, in every family tried.

A selection of the families that ``scripts/test-families`` sweeps, with those whose forwards read weights in ways of
their own: views of a parent's parameter, children's weights without a call of the child, methods other than forward.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

import headrace
from families import builders, diffusion, ways

FAMILIES = (
    "albert", "bart", "bert", "bloom", "clip", "deepseek_v3", "emu3", "encodec", "falcon_h1", "flaubert", "florence2",
    "funnel", "gemma", "gemma3", "glpn", "gpt2", "gpt_oss", "janus", "llama", "llava", "longcat_flash", "mamba", "mimi",
    "mixtral", "mobilebert", "opt", "paligemma", "perceiver", "poolformer", "pvt", "qwen2_5_vl", "qwen3", "qwen3_moe",
    "squeezebert", "swin", "t5", "vit", "wav2vec2", "whisper", "xlm", "zamba",
)  # fmt: skip
PIPELINES = ("diffusers/autoencoder_kl", "diffusers/flux", "diffusers/vq_model")


def check(case: builders.Case) -> None:
    found = ways.outcomes(case)
    wrong = [f"{o.way}: {o.what}: {o.detail}" for o in found if o.what != "equal"]
    assert not wrong, "\n".join(wrong)
    by_cache = (2 if case.loads else 1) if ways.cacheable(case.model) else 0
    assert len(found) == (4 if case.loads else 2) + by_cache
    assert all(outcome.moved_bytes > 0 for outcome in found)


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str) -> None:
    check(builders.build(name))


@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="diffusers is not installed")
@pytest.mark.parametrize("name", PIPELINES)
def test_diffusers(name: str) -> None:
    check(diffusion.build(name))


@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="diffusers is not installed")
@pytest.mark.parametrize("name", PIPELINES)
def test_diffusers_with_weights_that_are_cast_at_use(name: str) -> None:
    case, twin = diffusion.build(name), diffusion.build(name)
    plain = ways.leaves_of(ways.forward(twin.model, twin.calls))
    for model in (case.model, twin.model):
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    expected = ways.leaves_of(ways.forward(twin.model, twin.calls))
    assert ways.difference(plain, expected)
    policy = headrace.Prefetch(params=[headrace.config.ALL_MODEL_PARAMS])
    with headrace.offload(case.model, policy) as handle:
        for _ in range(2):
            assert ways.difference(ways.leaves_of(ways.forward(case.model, case.calls)), expected) == ""
        assert handle.stats().bytes_moved > 0
    assert ways.difference(ways.leaves_of(ways.forward(case.model, case.calls)), expected) == ""
    assert ways.difference(ways.state_of(case.model), ways.state_of(twin.model)) == ""


class TestTool:
    """What compares can see a difference."""

    def test_a_changed_bit_is_a_difference(self) -> None:
        leaves = {"a": torch.ones(3), "b": torch.tensor([1.0, float("nan")])}
        changed = {**leaves, "b": torch.tensor([2.0, float("nan")])}
        assert ways.difference(leaves, {name: leaf.clone() for name, leaf in leaves.items()}) == ""
        assert ways.difference(changed, leaves) == "1 of 2 tensors: b"
        assert ways.difference({"a": leaves["a"]}, leaves) == "other tensors: b"

    def test_outputs_and_caches_are_walked(self) -> None:
        case = builders.build("llama")
        leaves = ways.leaves_of(ways.forward(case.model, case.calls))
        assert "0.logits" in leaves
        assert any(name.endswith(".layers.0.keys") for name in leaves), "the cache, whose name differs by version"

    def test_no_two_tensors_of_a_case_are_constant(self) -> None:
        for parameter in builders.build("bert").model.parameters():
            assert parameter.unique().numel() > 1
