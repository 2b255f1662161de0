"""The promise: with speculation `generate` gives the tokens of the resident model run the same way, in fewer passes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

from checks import run_threads
from headrace import Budget, Prefetch, Speculation, decode_in_graphs
from headrace.adapters.transformers import load
from headrace.adapters.transformers.speculating import Speculating
from headrace.errors import BudgetError, HeadraceWarning, OptionError, OptionTypeError, StateError
from headrace.graphs import decoding
from headrace.planning import context as planning_context
from models import aligned
from recorded_graphs import RecordedStep

CPU = torch.device("cpu")
PROMPT = torch.tensor([[5, 9, 3, 5, 9, 3, 5, 9]])
CALL: dict[str, Any] = {"max_new_tokens": 40, "pad_token_id": 0}
PREFETCH = Prefetch(group_size=2, num_in_group=1, prefetch_step=1)


def llama(folder: Path, layers: int, vocabulary: int = 64) -> Path:
    torch.manual_seed(layers)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "max_position_embeddings": 256}
    sizes["eos_token_id"] = None  # type: ignore[assignment] # so that all answers have one length
    LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_hidden_layers=layers, **sizes)).save_pretrained(folder)
    return folder


def with_words(folder: Path, first: int) -> Path:
    """A tokenizer of 64 words, other ones for another ``first``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"?": 0, **{f"w{first + i}": i + 1 for i in range(63)}}
    made = Tokenizer(models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?", pad_token="?").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("target"), 4)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("draft"), 1)


@pytest.fixture(params=["lookup", "draft"])
def guesser(request: pytest.FixtureRequest, draft: Path) -> str:
    return "lookup" if request.param == "lookup" else str(draft)


def generated(model: Any, prompt: torch.Tensor = PROMPT, seed: int = 0, **changes: Any) -> list[int]:
    torch.manual_seed(seed)
    return list(model.generate(prompt, **{**CALL, **changes})[0].tolist())


def resident(folder: Path, speculation: Speculation) -> Any:
    model = aligned(LlamaForCausalLM.from_pretrained(folder).eval())
    Speculating(model, speculation, CPU).attach()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_k": 20}])
def test_tokens_of_the_resident_model(target: Path, guesser: str, sampled: dict[str, Any]) -> None:
    speculation = Speculation(guesser, guesses=4)
    expected = resident(target, speculation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadraceWarning)  # such small models are not faster
        model, handle = load(target, PREFETCH, device="cpu", speculate=speculation)
    assert [generated(model, **sampled) for _ in range(2)] == [generated(expected, **sampled)] * 2
    stats = handle.stats()
    assert stats.bytes_moved > 0
    assert stats.speculation is not None
    assert stats.speculation.tokens == 80
    assert stats.speculation.passes < 80
    assert f"{80 / stats.speculation.passes:.2f} tokens a pass" in str(stats)
    assert stats.to_json()["speculation"]["guesses"] == 4
    handle.remove()
    assert "generate" not in vars(model)
    assert generated(model) == generated(aligned(LlamaForCausalLM.from_pretrained(target).eval()))


def alone(folder: Path, guesser: str) -> tuple[Any, dict[str, Any]]:
    """The resident model, and what transformers takes to have it guess 3 tokens a pass."""
    model = aligned(LlamaForCausalLM.from_pretrained(folder).eval())
    if guesser == "lookup":
        return model, {"prompt_lookup_num_tokens": 3}
    assistant = aligned(LlamaForCausalLM.from_pretrained(guesser).eval())
    config = assistant.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = 3, "constant"
    config.assistant_confidence_threshold = 0.0
    return model, {"assistant_model": assistant}


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.6},
    {"temperature": 1.3, "top_p": 0.8, "top_k": 0},
    {"min_p": 0.05, "repetition_penalty": 1.2},
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::headrace.errors.HeadraceWarning")  # such small models are not faster
@pytest.mark.parametrize(
    "policy", [PREFETCH, Budget("1.6MB"), Budget("1.6MB", mode="cpu")], ids=["group", "disk", "cpu"]
)
def test_sampled_tokens_of_transformers_alone(target: Path, guesser: str, policy: Any) -> None:
    """By its own arguments and without any of ours; each sampled guess is accepted or not by a draw.

    With a draft of other words transformers itself draws other tokens in each call of one seed.
    """
    expected, options = alone(target, guesser)
    model, handle = load(target, policy, device="cpu", speculate=Speculation(guesser, 3))
    answers = set()
    for sampling in SAMPLINGS:
        for seed in range(5):
            found = generated(model, seed=seed, do_sample=True, **sampling)
            assert found == generated(expected, seed=seed, do_sample=True, **sampling, **options), (sampling, seed)
            answers.add(tuple(found))
    stats = handle.stats()
    assert len(answers) == 15
    assert stats.bytes_moved > 0
    assert stats.speculation is not None
    assert stats.speculation.passes < stats.speculation.tokens == 15 * 40


@pytest.mark.slow
def test_a_draft_that_guesses_all(target: Path) -> None:
    """The model itself: every pass but the last yields one token more than there are guesses."""
    with pytest.warns(HeadraceWarning, match="leave speculate out"):
        model, handle = load(target, PREFETCH, device="cpu", speculate=Speculation(str(target), 4, accepted=1.5))
    generated(model)
    stats = handle.stats()
    assert stats.speculation is not None
    assert (stats.speculation.tokens, stats.speculation.passes) == (40, 8)


@pytest.mark.slow
@pytest.mark.parametrize("guesses_all", [True, False])
def test_a_captured_draft_guesses_the_same(
    target: Path, draft: Path, guesses_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of the draft but the prompt's is a replay; a sampled call is left to transformers."""
    speculation = Speculation(str(target if guesses_all else draft), 4, accepted=1.5)
    expected, replays = resident(target, speculation), []
    eager = [generated(expected, max_new_tokens=count) for count in (40, 20, 300)]

    class Counted(RecordedStep):
        def replay(self, inputs: Any) -> Any:
            replays.append(1)
            return super().replay(inputs)

    monkeypatch.setattr(decoding, "StepGraph", Counted)
    monkeypatch.setattr(decoding, "GRAPH_DEVICES", ("cpu",))
    with pytest.warns(HeadraceWarning, match="leave speculate out"):
        model, handle = load(target, PREFETCH, device="cpu", speculate=speculation)
    assert [generated(model, max_new_tokens=count) for count in (40, 20, 300)] == eager
    counts = handle.stats().speculation
    assert counts is not None
    assert counts.tokens == 360
    assert counts.passes == 8 + 4 + 60 if guesses_all else 72 < counts.passes < 360
    assert handle.stats().bytes_moved > 0
    assert len(replays) >= 4 * 7
    made = len(replays)
    sampled = {"do_sample": True, "top_k": 20}
    assert generated(model, **sampled) == generated(expected, **sampled)
    # A step of the captured draft knows no padding, so that its guesses would be accepted less often.
    padded = {"attention_mask": torch.tensor([[0, *[1] * (PROMPT.shape[1] - 1)]])}
    before = handle.stats().speculation
    assert before is not None
    assert generated(model, **padded) == generated(expected, **padded)
    after = handle.stats().speculation
    assert after is not None
    assert not guesses_all or after.passes - before.passes == 8
    assert len(replays) == made
    handle.remove()
    with pytest.warns(HeadraceWarning, match="leave speculate out"):
        model, handle = load(target, PREFETCH, device="cpu", speculate=speculation, graphs=False)
    assert generated(model) == eager[0]
    assert len(replays) == made


@pytest.mark.slow
def test_other_words(target: Path, draft: Path, tmp_path: Path) -> None:
    """transformers translates between tokenizers; without one, nothing says what a token means."""
    folders = [llama(tmp_path / "target", 4), llama(tmp_path / "draft", 1, 96), llama(tmp_path / "same size", 1)]
    for folder, first in zip(folders, (0, 20, 20), strict=True):
        with_words(folder, first)
    speculation = Speculation(str(folders[1]), 3)
    model, handle = load(folders[0], PREFETCH, device="cpu", speculate=speculation)
    assert generated(model) == generated(resident(folders[0], speculation))
    assert handle.stats().speculation.passes > 0  # type: ignore[union-attr]
    larger = llama(tmp_path / "larger", 1, 96)
    refused = {
        (folders[0], folders[2]): "some of the 64 tokens of .* are other words than in the model",
        (folders[0], draft): rf"model, of 64 tokens, and of its draft, of 64, .* found none in {draft}; copy it there",
        (target, folders[2]): rf"found none in {target}; copy it there",
        (target, larger): rf"model, of 64 tokens, and of its draft, of 96, .* found none in {larger}; copy it there",
    }
    for (model_folder, other), message in refused.items():
        with pytest.raises(OptionError, match=message):
            load(model_folder, PREFETCH, device="cpu", speculate=str(other))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_beams": 2}, "the call asks for beam search"),
        ({"do_sample": True, "num_return_sequences": 2}, "one sequence at a time"),
        ({"use_cache": False}, "it needs a cache that grows"),
        ({"guidance_scale": 1.5}, "guidance_scale keeps a cache of its own"),
        ({"assistant_early_exit": 2}, "assistant_early_exit moves the first layers once for every guess"),
    ],
)
def test_calls_that_run_without(target: Path, changes: dict[str, Any], why: str) -> None:
    model, handle = load(target, PREFETCH, device="cpu", speculate="lookup")
    with pytest.warns(HeadraceWarning, match=why):
        found = generated(model, **changes)
    assert found == generated(aligned(LlamaForCausalLM.from_pretrained(target).eval()), **changes)
    assert handle.stats().speculation.passes == 0  # type: ignore[union-attr]


@pytest.mark.slow
def test_embeddings_of_a_prompt(target: Path, guesser: str) -> None:
    """A draft has no use for them; n-grams are then those of the answer."""
    plain = aligned(LlamaForCausalLM.from_pretrained(target).eval())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HeadraceWarning)
        model, handle = load(target, PREFETCH, device="cpu", speculate=Speculation(guesser, 4, accepted=4))
        expected, found = (
            each.generate(inputs_embeds=each.get_input_embeddings()(PROMPT), **CALL) for each in (plain, model)
        )
    assert torch.equal(found, expected)
    assert handle.stats().bytes_moved
    assert any("not inputs_embeds" in str(warning.message) for warning in caught) == (guesser != "lookup")


@pytest.mark.slow
def test_two_threads(target: Path) -> None:
    model, handle = load(target, PREFETCH, device="cpu", speculate=Speculation("lookup", 4))
    expected = generated(model)
    found: list[list[int]] = []

    def call() -> None:
        found.append(generated(model))

    before = handle.stats().speculation
    run_threads([call, call])
    assert found == [expected] * 2
    after = handle.stats().speculation
    assert before is not None
    assert after is not None
    assert (after.tokens, after.passes) == (3 * before.tokens, 3 * before.passes)


def test_graphs_beside_it(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.graphs.decoding.GRAPH_DEVICES", ("cpu",))
    model, _ = load(target, PREFETCH, device="cpu", speculate="lookup")
    with pytest.raises(StateError, match="generate speculates, which does not run in CUDA graphs"):
        decode_in_graphs(model)


@pytest.mark.slow
def test_a_draft_is_part_of_the_budget(target: Path, draft: Path) -> None:
    size = sum(p.nbytes for p in LlamaForCausalLM.from_pretrained(draft).parameters())
    budget = 3 * size
    _, plain = load(target, budget, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadraceWarning)
        _, handle = load(target, budget, device="cpu", speculate=str(draft))
    assert handle.plan.device_bytes <= budget - size < plain.plan.device_bytes
    message = "the draft takes .* of the budget, and the model needs at least .* beside it: use --device-memory"
    for less in (size // 2, size + size // 2):
        with pytest.raises(BudgetError, match=message) as refused:
            load(target, less, device="cpu", speculate=str(draft))
        _, handle = load(target, refused.value.minimum_bytes, device="cpu", speculate=str(draft))
        assert handle.plan.device_bytes <= refused.value.minimum_bytes - size


def test_a_budget_holds_weights_that_are_used_elsewhere(target: Path) -> None:
    """As without speculation: what has no room is copied for each use, not made resident."""
    budget = sum(p.nbytes for p in LlamaForCausalLM.from_pretrained(target).parameters()) * 3 // 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadraceWarning)
        model, handle = load(target, Budget(budget, mode="cpu"), device="cpu", speculate="lookup")
        for name in list(handle.plan.offloaded_names):
            assert torch.equal(model.get_parameter(name) * 2, model.state_dict()[name] * 2)
    assert handle.plan.device_bytes <= budget
    generated(model)
    assert handle.stats().bytes_moved > 0


@pytest.mark.parametrize("given", [5, True, ["lookup"]])
def test_what_is_no_guesser(target: Path, given: Any) -> None:
    with pytest.raises(OptionTypeError, match="speculate: expected 'lookup', 'mtp' or a draft model, found"):
        load(target, PREFETCH, device="cpu", speculate=given)


def test_a_recurrent_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2)).save_pretrained(tmp_path)
    with pytest.raises(OptionError, match=r"expected a causal language model with a cache, .* found MambaForCausalLM"):
        load(tmp_path, "1MB", device="cpu", speculate="lookup")


@pytest.mark.slow
def test_memory_is_checked_beside_the_draft(target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a budget a plan has no share for it, so what is free is read when it is loaded."""
    seen: list[str] = []
    limits, made = planning_context.read_limits, Speculating.__init__

    def read(*args: Any, **options: Any) -> Any:
        seen.append("limits")
        return limits(*args, **options)

    def make(self: Speculating, *args: Any) -> None:
        made(self, *args)
        seen.append("draft")

    monkeypatch.setattr(planning_context, "read_limits", read)
    monkeypatch.setattr(Speculating, "__init__", make)
    model, handle = load(target, PREFETCH, device="cpu", speculate=Speculation(str(draft), 2, accepted=1.9))
    with handle:
        model.generate(PROMPT, **CALL)
        assert handle.stats().bytes_moved
    assert seen == ["limits", "draft", "limits"]  # the first: whether the page cache can keep the files
