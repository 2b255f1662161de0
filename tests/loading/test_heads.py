"""The promise: heads of multi-token prediction guess beside an offload as beside the resident model, are read once, and
copy nothing of it."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MellumForCausalLM
from transformers.modeling_layers import MtpModel
from transformers.models.inkling.configuration_inkling import InklingTextConfig
from transformers.models.inkling.modeling_inkling import InklingForCausalLM

from checkpoints import rewrite
from checks import run_threads
from headrace import Budget, Prefetch, Rules, Speculation, make_plan
from headrace.adapters.transformers import load
from headrace.adapters.transformers.speculating import Speculating
from headrace.errors import BudgetError, CheckpointError, HeadraceWarning, OptionError, RuleError
from headrace.plan_model import plan_model
from headrace.planning.request import PlanRequest
from heads import LAYERS, mellum
from models import aligned

PROMPT = torch.tensor([[5, 9, 3, 5, 9, 3, 5, 9]])
CALL: dict[str, Any] = {"max_new_tokens": 40, "pad_token_id": 0}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 20}
NUCLEUS: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "top_p": 0.8, "repetition_penalty": 1.1}
GROUP = Prefetch(group_size=2, num_in_group=1, prefetch_step=1)


@pytest.fixture(scope="module", params=["dense", "sparse"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mellum(tmp_path_factory.mktemp(request.param), request.param, vocabulary=4096)


@pytest.fixture(scope="module")
def large_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mellum(tmp_path_factory.mktemp("large head"), vocabulary=4096)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mellum(tmp_path_factory.mktemp("small"))


def resident(folder: Path) -> Any:
    return aligned(MellumForCausalLM.from_pretrained(folder).eval())


def head_bytes(folder: Path) -> int:
    """As transformers loads it."""
    return sum(tensor.nbytes for tensor in MtpModel.from_pretrained(resident(folder)).layers.state_dict().values())


def generated(model: Any, **options: Any) -> list[int]:
    torch.manual_seed(0)
    return list(model.generate(PROMPT, **{**CALL, **options})[0].tolist())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::headrace.errors.HeadraceWarning")  # such small models need not be faster
@pytest.mark.parametrize("policy", [GROUP, Budget("4MiB", mode="cpu"), Rules([("re:.*mlp.*", "prefetch")])], ids=str)
def test_tokens_of_transformers_alone(folder: Path, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled; the heads are read once, and transformers reads them for every call."""
    expected = [generated(resident(folder), use_mtp=True, **options) for options in ({}, SAMPLED, NUCLEUS)]
    reads, read = [], MtpModel.from_pretrained.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(MtpModel, "from_pretrained", classmethod(lambda *a, **k: reads.append(1) or read(*a, **k)))
    model, handle = load(folder, policy, device="cpu", speculate="mtp")
    for _ in range(2):
        assert [generated(model), generated(model, **SAMPLED), generated(model, **NUCLEUS)] == expected
    stats, counts = handle.stats(), handle.stats().speculation
    assert stats.bytes_moved > 0
    assert counts is not None
    assert (counts.guesser, counts.guesses, counts.tokens) == ("mtp", 1, 6 * 40)
    assert 6 * 20 < counts.passes < 6 * 40
    assert f"{6 * 40 / counts.passes:.2f} tokens a pass" in str(stats)
    assert reads == [1]
    (speculating,) = handle._session.attachments
    assert speculating._heads.mtp_cache.get_seq_length() == 0  # type: ignore[attr-defined]
    handle.remove()
    assert "generate" not in vars(model)
    assert generated(model) == generated(resident(folder))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::headrace.errors.HeadraceWarning")
def test_a_pass_copies_each_unit_once(large_head: Path) -> None:
    """The output head, which each guess multiplies with, would be one of them in so small a budget."""
    tight = Budget("2.75MiB", mode="cpu")
    assert make_plan(large_head, tight, device="cpu").mechanism_of("lm_head.weight") == "prefetch"
    with pytest.raises(BudgetError, match=r"the draft takes .*, and the model needs at least .* beside it") as error:
        load(large_head, Budget(tight.num_bytes + head_bytes(large_head), mode="cpu"), device="cpu", speculate="mtp")
    model, handle = load(large_head, Budget(error.value.minimum_bytes, mode="cpu"), device="cpu", speculate="mtp")
    assert handle.plan.mechanism_of("lm_head.weight") == "resident"
    generated(model)
    counts, units = handle.stats().speculation, handle.stats().units
    assert counts is not None
    assert {unit.module_fqn for unit in units} >= {f"model.layers.{index}" for index in range(LAYERS)}
    for unit in units:
        assert unit.runs == counts.passes
        assert unit.copies <= counts.passes + 1


@pytest.mark.slow
def test_a_plan_that_moves_the_output_head(large_head: Path) -> None:
    """Each guess copies it, and the tokens are the same; in two threads, too."""
    plan = make_plan(large_head, Rules([("lm_head", "prefetch"), ("re:.*mlp.*", "prefetch")]), device="cpu")
    model, handle = load(large_head, plan, device="cpu", speculate="mtp")
    expected = generated(resident(large_head), use_mtp=True)
    assert generated(model) == expected
    counts = handle.stats().speculation
    assert counts is not None
    (head,) = (unit for unit in handle.stats().units if unit.module_fqn == "lm_head")
    assert head.runs == 2 * counts.passes - 1  # the first pass is the prompt's, before any guess
    assert head.bytes_moved > 0
    found: list[list[int]] = []
    run_threads([lambda: found.append(generated(model))] * 2)
    assert found == [expected] * 2


@pytest.mark.slow
def test_tied_weights(tmp_path: Path) -> None:
    folder = mellum(tmp_path, vocabulary=4096, tied=True)
    model, handle = load(folder, "4MiB", device="cpu", speculate="mtp")
    assert generated(model) == generated(resident(folder), use_mtp=True)
    assert handle.plan.mechanism_of("model.embed_tokens.weight") == "resident"
    assert handle.stats().bytes_moved > 0


@pytest.mark.slow
def test_heads_are_part_of_the_budget(large_head: Path) -> None:
    num_bytes, budget = head_bytes(large_head), 4 * 2**20
    _, plain = load(large_head, budget, device="cpu")
    _, handle = load(large_head, budget, device="cpu", speculate="mtp")
    assert handle.plan.device_bytes <= budget - num_bytes < plain.plan.device_bytes
    request = PlanRequest(large_head, budget, device="cpu", speculation=Speculation("mtp"))
    planned = plan_model(request)
    assert planned.plan.placements == handle.plan.placements
    assert planned.speculation is not None
    assert (planned.speculation.guesses, planned.speculation.tokens_per_pass) == (1, pytest.approx(1.65))
    assert 0 < planned.speculation.guess_s < planned.speculation.pass_s
    assert "speculation with 1 guess by mtp: 1.6 tokens a pass (assumed)" in str(planned.with_prediction())
    with pytest.raises(BudgetError, match=r"the draft takes .* of the budget"):
        load(large_head, num_bytes // 2, device="cpu", speculate="mtp")
    with pytest.raises(RuleError, match="'lm_head=resident' and 'lm_head=prefetch' contradict each other"):
        load(large_head, Budget(budget, rules=[("lm_head", "prefetch")]), device="cpu", speculate="mtp")


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        (Speculation("mtp", guesses=2), "guesses = 2: expected 1, one a head"),
        (Speculation("mtp", accepted=2.5), "accepted = 2.5 tokens a pass: expected 1 to 2"),
    ],
)
def test_numbers_that_do_not_fit_the_heads(dense: Path, speculation: Speculation, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load(dense, GROUP, device="cpu", speculate=speculation)


def without_heads(folder: Path) -> None:
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")])


def no_layers(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 0}))


@pytest.mark.parametrize(
    ("alter", "why"),
    [
        (without_heads, r"no tensor in its files is named like .*mtp"),
        (no_layers, "num_mtp_layers is 0"),
    ],
)
def test_checkpoints_without_heads(alter: Any, why: str, tmp_path: Path) -> None:
    alter(mellum(tmp_path))
    for attempt in (
        lambda: load(tmp_path, GROUP, device="cpu", speculate="mtp"),
        lambda: plan_model(PlanRequest(tmp_path, GROUP, device="cpu", speculation=Speculation("mtp"))),
    ):
        with pytest.raises(OptionError, match=rf"expected heads .*, found MellumForCausalLM without: .*{why}"):
            attempt()


def test_a_head_that_lacks_a_tensor(tmp_path: Path) -> None:
    rewrite(mellum(tmp_path), lambda tensors: tensors.pop("mtp.fc.weight"))
    with pytest.raises(CheckpointError, match=r"expected all weights of heads \(mtp\): .*eh_proj"):
        load(tmp_path, GROUP, device="cpu", speculate="mtp")


def test_models_whose_heads_cannot_run_beside_an_offload(dense: Path) -> None:
    """Named in the error: no heads, quantised ones, and those that would copy the embedding."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    small = {**sizes, "vocab_size": 64, "num_hidden_layers": 2}
    quantised = MellumForCausalLM.from_pretrained(dense)
    quantised.config.quantization_config = {"quant_method": "fp8"}
    with torch.device("meta"):
        inkling = InklingForCausalLM(InklingTextConfig(**small, num_mtp_layers=2))
    for model, why in (
        (LlamaForCausalLM(LlamaConfig(**small)), "no attribute 'num_mtp_layers'"),
        (quantised, "it is quantised"),
        (inkling, "the heads would copy the embedding"),
    ):
        with pytest.raises(OptionError, match=rf"found {type(model).__name__} without: .*{why}.*; use lookup"):
            Speculating(model, Speculation("mtp"), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"output_hidden_states": True, "return_dict_in_generate": True}, r"heads \(mtp\) read the tokens and hidden"),
        ({"num_beams": 2}, "the call asks for beam search"),
        ({"use_cache": False}, "it needs a cache that grows"),
    ],
)
def test_calls_that_run_without(dense: Path, options: dict[str, Any], why: str) -> None:
    model, handle = load(dense, GROUP, device="cpu", speculate="mtp")
    with pytest.warns(HeadraceWarning, match=why):
        found = model.generate(PROMPT, **CALL, **options)
    expected = resident(dense).generate(PROMPT, **CALL, **options)
    assert torch.equal(getattr(found, "sequences", found), getattr(expected, "sequences", expected))
    assert handle.stats().speculation.passes == 0  # type: ignore[union-attr]
    assert handle.stats().bytes_moved > 0


@pytest.mark.slow
def test_a_prompt_of_embeddings_runs_without(dense: Path) -> None:
    model, handle = load(dense, GROUP, device="cpu", speculate="mtp")
    reference = resident(dense)
    prompts = [each.get_input_embeddings()(PROMPT) for each in (model, reference)]
    with pytest.warns(HeadraceWarning, match="not inputs_embeds"):
        found = model.generate(inputs_embeds=prompts[0], **CALL)
    assert torch.equal(found, reference.generate(inputs_embeds=prompts[1], **CALL))
    assert handle.stats().speculation.passes == 0  # type: ignore[union-attr]


@pytest.mark.slow
def test_removal_frees_the_heads(dense: Path) -> None:
    model, handle = load(dense, GROUP, device="cpu", speculate="mtp")
    generated(model)
    speculating: Any = handle._session.attachments[-1]
    head = weakref.ref(speculating._heads.mtp_model)
    handle.remove()
    del speculating
    gc.collect()
    assert head() is None
