"""The promise: sequences that share the rows of a cache decode as each does alone, whenever they come and go.

Graphs of a CPU here: operators of one step that run again (recorded_graphs.py). tests/gpu has CUDA's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

import headrace
from headrace.config import Prefetch
from headrace.errors import HeadraceWarning, OptionError
from headrace.graphs import cache_rows, decoding
from headrace.graphs.cache_rows import Rows
from recorded_graphs import SIZES, WINDOWS, RecordedStep

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT2 = {"vocab_size": 128, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 2048, "eos_token_id": None}
STRONG = {"initializer_range": 0.3}  # a state that is wrong changes tokens
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, **STRONG,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("Qwen3", SIZES),
    "one window": ("Mistral", {**SIZES, "sliding_window": 12}),
    "windows": ("Gemma3Text", {**SIZES, **WINDOWS}),
    "softcap": ("Gemma2", {**SIZES, **WINDOWS}),
    "sinks": ("GptOss", {**SIZES, **WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "experts": ("Qwen3Moe", {**SIZES, **EXPERTS, "experts_implementation": "batched_mm"}),
    "learned positions": ("GPT2", GPT2),
    "parallel": ("Phi", {key: value for key, value in SIZES.items() if key != "head_dim"}),
    "latent": (
        "DeepseekV2",
        {**SIZES, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
         "v_head_dim": 8, "first_k_dense_replace": 4, "num_key_value_heads": 4},
    ),
    "recurrences": ("Qwen3_5Text", {**SIZES, **LINEAR}),
    "recurrences and experts": (
        "Qwen3Next", {**SIZES, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 2,
                      "experts_implementation": "batched_mm"},
    ),
    "convolutions": ("Lfm2", {**SIZES, "layer_types": ["conv", "full_attention"] * 2, **STRONG}),
    "both in a layer": (
        "FalconH1", {**SIZES, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
                     "mamba_chunk_size": 16, **STRONG},
    ),
    "scans that begin with zeros": (
        "Jamba", {**SIZES, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, **STRONG,
                  "mamba_d_state": 8, "mamba_dt_rank": 8, "experts_implementation": "batched_mm"},
    ),
}  # fmt: skip
LENGTHS, TOKENS, CHUNK = [1, 37, 7, 90, 20], 20, 16


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**sizes)
    with torch.device("cpu"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    return made.eval().requires_grad_(False)


def prompt(length: int) -> list[int]:
    ids: list[int] = torch.randint(1, 128, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return ids


def alone(model: Any, ids: list[int]) -> list[int]:
    out = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)
    found: list[int] = out[0, len(ids) :].tolist()
    return found


def together(shared: Rows, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of every prompt. Parts of one run between steps, then it joins, and leaves when it is done."""
    found: list[list[int]] = [[] for _ in prompts]
    waiting, active = list(range(len(prompts))), list[int]()
    part = CHUNK if shared.continues else 1000
    step, row, start = 0, 0, 0
    while waiting or active:
        if waiting and (start or (step % 3 == 0 and len(active) < shared.num_rows)):
            ids, row = prompts[waiting[0]], row if start else len(active)
            logits = shared.prompts(row, [ids[start : start + part]], start)
            start += part
            if start >= len(ids):
                start, joins = 0, waiting.pop(0)
                found[joins].append(int(logits.argmax()))
                if row > len(active):
                    shared.move(row, len(active), len(ids))
                active.append(joins)
        if active:
            run_step(shared, prompts, found, active)
        step += 1
    return found


def run_step(shared: Rows, prompts: list[list[int]], found: list[list[int]], active: list[int]) -> None:
    positions = [len(prompts[each]) + len(found[each]) - 1 for each in active]
    logits = shared.step([found[each][-1] for each in active], positions)
    assert logits.shape == (len(active), 128)
    assert logits.dtype == torch.float32
    for each, token in zip(active, logits.argmax(-1).tolist(), strict=True):
        found[each].append(token)
    for row in reversed(range(len(active))):
        if len(found[active[row]]) == TOKENS:
            last = len(active) - 1
            if row < last:
                shared.swap(last, row, max(positions) + 1)
                active[row] = active[last]
            active.pop()


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decoding, "StepGraph", RecordedStep)
    monkeypatch.setattr(cache_rows, "GRAPH_DEVICES", ("cpu",))
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadraceWarning)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("family", [
    name if name in ("full", "convolutions") else pytest.param(name, marks=pytest.mark.slow)
    for name in FAMILIES
])  # fmt: skip
def test_rows_decode_as_each_does_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family)
    prompts = [prompt(length) for length in LENGTHS]
    expected = [alone(model, ids) for ids in prompts]
    assert len({tuple(each) for each in expected}) == len(prompts), "prompts with one answer test nothing"
    shared = Rows(model, 4, 300)
    assert together(shared, prompts) == expected
    assert shared.replays > 10
    monkeypatch.setattr(cache_rows, "GRAPH_DEVICES", ())  # recorded operators would keep views of weights
    with headrace.offload(model, Prefetch(1, 1, 2, ("ALL_MODEL_PARAMS",))) as handle:
        shared, before = Rows(model, 4, 300), handle.stats().bytes_moved
        assert together(shared, prompts) == expected
        assert shared.replays == 0
        assert handle.stats().bytes_moved - before >= len(prompts) * TOKENS // 4 * handle.plan.moved_bytes > 0


@pytest.mark.parametrize("family", ["recurrences", "scans that begin with zeros"])
def test_a_prompt_runs_in_parts_where_its_states_go_on(family: str) -> None:
    """As ``continues`` says: the parts have the logits of the whole, or others."""
    model, ids = model_of(family), prompt(250)
    shared = Rows(model, 1, 300)
    whole = shared.prompts(0, [ids])
    for start in range(0, len(ids), CHUNK):
        parts = shared.prompts(0, [ids[start : start + CHUNK]], start)
    assert shared.has_states
    is_close = bool((parts - whole).abs().max() < 1e-4 * whole.std())
    assert is_close == shared.continues == (family == "recurrences")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["full", "windows", "learned positions"])
def test_prompts_that_run_together(family: str) -> None:
    model = model_of(family)
    prompts = [prompt(length) for length in (3, 40, 17)]
    shared = Rows(model, 3, 300)
    found = [[token] for token in shared.prompts(0, prompts).argmax(-1).tolist()]
    for _ in range(TOKENS - 1):
        positions = [len(ids) + len(each) - 1 for ids, each in zip(prompts, found, strict=True)]
        tokens = shared.step([each[-1] for each in found], positions).argmax(-1).tolist()
        for each, token in zip(found, tokens, strict=True):
            each.append(token)
    assert found == [alone(model, ids) for ids in prompts]


def test_the_log_tells_the_parts_of_first_calls(caplog: pytest.LogCaptureFixture) -> None:
    shared = Rows(model_of("full"), 2, 300)
    with caplog.at_level("INFO", "headrace"):
        for start in (0, 3):
            shared.prompts(0, [[1, 2, 3]], start)
        for position in (6, 7, 8):
            shared.step([1], [position])
    told = [record.getMessage().split(": ")[0] for record in caplog.records]
    parts = ["first prompt of [1, 3]", "first eager forward of [1, 1]", "capture of a forward of [1, 1]"]
    assert told == [f"{part} tokens" for part in parts]


@pytest.mark.parametrize("family", [name for name, (_, sizes) in FAMILIES.items() if "initializer_range" not in sizes])
def test_guesses_are_verified_in_one_step(family: str) -> None:
    """Two that are right and one that is not; what the last has written is read by nothing."""
    model, ids = model_of(family), prompt(37)
    expected, shared = alone(model, ids), Rows(model, 2, 300)
    found = [int(shared.prompts(0, [ids])[0].argmax())]
    while len(found) + 4 <= TOKENS:
        at = len(found)
        guesses = [expected[at - 1], *expected[at : at + 2], (expected[at + 2] + 1) % 128]
        found += shared.verify(guesses, len(ids) + at - 1).argmax(-1).tolist()[:3]
        found.append(int(shared.step(found[-1:], [len(ids) + len(found) - 1]).argmax()))
    assert found == expected[: len(found)]
    assert shared.replays > 4


LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64, "factor": 32.0,
}  # fmt: skip
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "positions from the length of the cache": (
        "Bart", {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "is_encoder_decoder": False},
        "takes no position_ids",
    ),
    "bidirectional": ("Bert", {**SIZES}, "bidirectional attention"),
    "bidirectional by its config": ("Gemma3Text", {**SIZES, "use_bidirectional_attention": True}, "bidirectional"),
    "positions behind those of padding": ("Kosmos2_5", {}, "counts positions from padding"),
    "states of its own": ("RecurrentGemma", {**SIZES, "lru_width": 32}, "states outside of its cache"),
    "alibi": ("Falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}, "ALiBi"),
    "a mask of its own": (
        "GPTNeo",
        {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        "a mask of its own .*bias",
    ),
    "dynamic": (
        "Llama",
        {**SIZES, "max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4,
                                                                     "factor": 2.0}},
        "beyond 64 tokens its dynamic positions .*; use a context of 64 or less",
    ),
    "longrope": (
        "Phi3", {**SIZES, "rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64},
        "beyond 64 tokens its longrope positions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_whose_rows_would_differ_is_refused(case: str) -> None:
    name, sizes, reason = REFUSED[case]
    config = getattr(transformers, f"{name}Config")(**sizes)
    made_by = (
        transformers.Kosmos2_5ForConditionalGeneration if name == "Kosmos2_5" else transformers.AutoModelForCausalLM
    )
    with torch.device("meta"):
        model = made_by._from_config(config) if name == "Kosmos2_5" else made_by.from_config(config)
    with pytest.raises(OptionError, match=reason):
        Rows(model, 2, 100)


def test_states_take_no_guesses() -> None:
    model = model_of("recurrences")
    assert cache_rows.why_not_in_rows(model) is None
    assert "cannot remove guesses from its states" in str(cache_rows.why_not_in_rows(model, guesses=True))


@pytest.mark.slow
def test_positions_that_depend_on_all_rows_do_not_below_their_limit() -> None:
    config = transformers.Phi3Config(**{**SIZES, "rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64})
    torch.manual_seed(0)
    model = transformers.Phi3ForCausalLM(config).eval().requires_grad_(False)
    prompts = [prompt(length) for length in (3, 40, 17)]
    assert together(Rows(model, 2, 64), prompts) == [alone(model, ids) for ids in prompts]


def test_gpt_neox_is_causal_whatever_its_config_says_of_decoders() -> None:
    config = transformers.GPTNeoXConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
    with torch.device("meta"):
        assert cache_rows.why_not_in_rows(transformers.GPTNeoXForCausalLM(config)) is None
