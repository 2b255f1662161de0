"""The promise: adapters of PEFT work on an offloaded model as on a resident one, whenever they came, and stay put."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import headrace
from headrace import Rules
from headrace.errors import HeadraceWarning, ModelChangedError, OutsideAccessError, StateError
from headrace.testing import assert_same_bits
from moe_models import qwen

if importlib.util.find_spec("peft") is None:
    pytest.skip("peft is not installed", allow_module_level=True)

from peft import LoraConfig, PeftModel, get_peft_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("error::headrace.HeadraceWarning"),
]
IDS = torch.arange(12)[None]


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
    )
    return LlamaForCausalLM(config).eval()


def with_adapters(model: Any) -> PeftModel:
    """Two, of which one is large enough to be moved if it were no adapter."""
    for name, rank in (("one", 4), ("two", 128)):
        torch.manual_seed(rank)
        config = LoraConfig(r=rank, init_lora_weights=False, target_modules=["q_proj", "up_proj", "down_proj"])
        if isinstance(model, PeftModel):
            model.add_adapter(name, config)
        else:
            model = get_peft_model(model, config, adapter_name=name)
    model.set_adapter("one")
    return model.eval()


@torch.no_grad()
def run(model: nn.Module) -> torch.Tensor:
    logits: torch.Tensor = model(IDS).logits
    return logits


def weight_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _disabled(model: PeftModel) -> torch.Tensor:
    with model.disable_adapter():
        return run(model)


STEPS: list[Callable[[PeftModel], Any]] = [
    lambda model: model.set_adapter("two"),
    lambda model: model.base_model.set_adapter(["one", "two"]),
    _disabled,
    lambda model: model.merge_adapter(),
    lambda model: model.unmerge_adapter(),
    lambda model: model.merge_adapter(["two"]),
    lambda model: model.unmerge_adapter(),
    lambda model: model.delete_adapter("two"),
    lambda model: model.set_adapter("one"),
]


@pytest.mark.parametrize("policy", ["budget", headrace.Prefetch(1, 1, 2)], ids=["budget", "prefetch"])
@pytest.mark.parametrize("loaded", ["before", "after"])
def test_as_resident(loaded: str, policy: Any) -> None:
    """Switched, several at once, disabled, merged into the store and out of it, deleted."""
    model, twin = base(), with_adapters(base())
    if loaded == "before":
        model = with_adapters(model)
    handle = headrace.offload(model, weight_bytes(model) * 7 // 10 if policy == "budget" else policy)
    plan = handle.plan
    if loaded == "after":
        run(model)
        model = with_adapters(model)
    assert_same_bits(run(model), run(twin))
    for step in STEPS:
        moved = handle.stats().bytes_moved
        assert_same_bits((step(model), run(model)), (step(twin), run(twin)))
        assert handle.stats().bytes_moved > moved
    assert handle.plan == plan, "merging made nothing resident"
    assert not any("lora_" in name for name in plan.offloaded_names)
    handle.remove()
    assert_same_bits(run(model), run(twin))
    assert_same_bits(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_loaded_from_files(low_cpu_mem_usage: bool, tmp_path: Path) -> None:
    """Onto a base that is offloaded already, and saved from there again."""
    twin = with_adapters(base())
    twin.save_pretrained(tmp_path / "first")
    model = base()
    with headrace.offload(model, weight_bytes(model) * 7 // 10) as handle:
        one, two = (tmp_path / "first" / name for name in ("one", "two"))
        adapted = PeftModel.from_pretrained(model, one, "one", low_cpu_mem_usage=low_cpu_mem_usage)
        adapted.load_adapter(two, "two", low_cpu_mem_usage=low_cpu_mem_usage)
        for name in ("one", "two"):
            twin.set_adapter(name)
            adapted.set_adapter(name)
            assert_same_bits(run(adapted.eval()), run(twin))
        assert handle.stats().bytes_moved > 0
        adapted.save_pretrained(tmp_path / "second")
    for file in ("one/adapter_model.safetensors", "two/adapter_model.safetensors"):
        assert (tmp_path / "second" / file).read_bytes() == (tmp_path / "first" / file).read_bytes()


def test_modules_to_save_are_copied_if_resident() -> None:
    """PEFT copies such a module; what is offloaded cannot be copied, and the error says what to do."""

    def adapted(model: nn.Module) -> Any:
        torch.manual_seed(3)
        config = LoraConfig(
            r=4, init_lora_weights=False, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"]
        )
        return get_peft_model(model, config).eval()

    with (
        headrace.offload(base(), Rules([("*", "prefetch")])) as handle,
        pytest.raises(StateError, match=r"nor can a module in it .* keep what is copied resident"),
    ):
        adapted(handle.model)
    with headrace.offload(base(), Rules([("lm_head", "resident"), ("*", "prefetch")])) as handle:
        assert_same_bits(run(adapted(handle.model)), run(adapted(base())))
        assert handle.stats().bytes_moved > 0


def test_merged_for_good() -> None:
    model, twin = with_adapters(base()), with_adapters(base())
    expected = run(twin.merge_and_unload())
    handle = headrace.offload(model, weight_bytes(model) * 7 // 10)
    merged = model.merge_and_unload()
    assert_same_bits(run(merged), expected)
    assert handle.stats().bytes_moved > 0
    handle.remove()
    assert_same_bits(run(merged), expected)


def test_merging_that_exchanges_weights_is_refused() -> None:
    model = with_adapters(base())
    with headrace.offload(model, weight_bytes(model) * 7 // 10) as handle:
        least = handle.plan.device_bytes
    with headrace.offload(model, least):
        with pytest.warns(HeadraceWarning, match="would exceed the budget of"):
            model.merge_adapter(safe_merge=True)
        with pytest.raises(ModelChangedError, match=r"proj\.base_layer\.weight was moved .*handle\.remove\(\)"):
            run(model)


def test_merging_into_files_is_refused(tmp_path: Path) -> None:
    model = base()
    model.save_pretrained(tmp_path)
    budget = headrace.Budget(weight_bytes(model) * 7 // 10, mode="disk")
    least = headrace.make_plan(model, budget, checkpoint=tmp_path).device_bytes
    with headrace.offload(model, headrace.Budget(least, mode="disk"), checkpoint=tmp_path) as handle:
        adapted, twin = with_adapters(model), with_adapters(base())
        assert_same_bits(run(adapted), run(twin))
        assert handle.stats().bytes_moved > 0
        with pytest.raises(OutsideAccessError, match=r"which writes it in place.*offload in mode 'cpu'"):
            adapted.merge_adapter()


def test_merging_while_slots_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """HEADRACE_DEBUG knows checksums of the store."""
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    model, twin = with_adapters(base()), with_adapters(base())
    with headrace.offload(model, headrace.Prefetch(1, 1, 2)) as handle:
        for step in (run, lambda model: model.merge_adapter(), lambda model: model.unmerge_adapter()):
            step(model)
            step(twin)
            assert_same_bits(run(model), run(twin))
        assert handle.stats().bytes_moved > 0


@pytest.mark.parametrize("mechanism", ["uva", "prefetch", "cache"])
@pytest.mark.parametrize("loaded", ["before", "after"])
def test_adapters_of_experts(loaded: str, mechanism: str) -> None:
    """PEFT replaces the parameter in each forward: in place it reads the adapted experts, elsewhere it is refused."""
    warnings.filterwarnings("ignore", message="the plan takes .* more than all weights")  # of toys

    def adapted(model: Any) -> PeftModel:
        torch.manual_seed(5)
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = LoraConfig(r=2, target_modules=[], target_parameters=names, init_lora_weights=False)
        return get_peft_model(model, config).eval()

    with torch.inference_mode():
        plain, expected = qwen()(IDS).logits, adapted(qwen())(IDS).logits
        model: Any = adapted(qwen()) if loaded == "before" else qwen()
        rules = [(name, mechanism) for name in ("*.gate_up_proj", "*.down_proj")]
        slots = 3 if mechanism == "cache" else None
        with headrace.offload(model, Rules(rules, expert_slots=slots)) as handle:
            if mechanism == "uva":
                model = adapted(model) if loaded == "after" else model
                assert_same_bits(model(IDS).logits, expected)
                assert not torch.equal(expected, plain)
                assert handle.plan.uva_bytes > 0
                return
            with pytest.raises((ModelChangedError, OutsideAccessError), match=r"experts\..*keep it resident"):
                (adapted(model) if loaded == "after" else model)(IDS)
