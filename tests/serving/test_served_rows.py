"""Requests run in order, each in a row of its own, and end alone: whoever comes, leaves or fails beside them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList

import headrace
from checks import eventually, raising
from headrace.adapters.transformers import load
from headrace.config import Prefetch
from headrace.graphs.cache_rows import Rows
from headrace.serving.engine import Engine, Request
from headrace.serving.request_body import RequestError

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
LONGEST = 200
# With a state per row: prompts in parts, and of Jamba in one.
STATES: dict[str, dict[str, Any]] = {
    "Qwen3_5Text": {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 8, "mamba_dt_rank": 8},
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).eval().requires_grad_(False)


def request(prompt: list[int], tokens: int = 8, **fields: Any) -> Request:
    return Request(prompt, tokens, (), LogitsProcessorList, **fields)


def prompt(length: int, seed: int = 0) -> list[int]:
    chooser = random.Random(f"{length} {seed}")
    return [chooser.randrange(1, 64) for _ in range(length)]


def alone(model: Any, asked: Request, **options: Any) -> list[int]:
    ids = torch.tensor([asked.prompt])
    out = model.generate(ids, max_new_tokens=asked.most_tokens, **{"do_sample": False, **options})
    found: list[int] = out[0, len(asked.prompt) :].tolist()
    return found


@contextmanager
def running(
    model: Any, num_rows: int, max_waiting: int = 64, tell: Callable[..., None] = lambda _: None
) -> Iterator[Engine]:
    engine = Engine(Rows(model, num_rows, LONGEST), model.device, max_waiting, tell)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(30)


def is_done(asked: Sequence[Request]) -> Callable[[], bool]:
    return lambda: all(each.has_ended or each.error is not None for each in asked)


@pytest.mark.slow
def test_requests_of_all_lengths_at_once(model: Any) -> None:
    """More than there are rows, so that some wait, and rows are exchanged as others leave."""
    asked = [request(prompt(1 + 13 * (at % 7), at), 3 + at % 11) for at in range(24)]
    with running(model, 4) as engine:
        for each in asked:
            engine.submit(each)
        assert eventually(is_done(asked), 60)
        assert eventually(lambda: engine.running == engine.waiting == engine.used_tokens == 0, 10)
    assert [each.tokens for each in asked] == [alone(model, each) for each in asked]


@pytest.mark.slow
@pytest.mark.parametrize("family", STATES)
def test_rows_with_states(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a prompt runs before a step of more rows than sequences; a chat goes on, and nothing is shared."""
    monkeypatch.setattr("headrace.serving.engine._PROMPT_TOKENS", 16)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **STATES[family], initializer_range=0.3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    asked = [request(prompt(1 + 13 * (at % 7), at), 3 + at % 11) for at in range(10)]
    chat = request([*asked[5].prompt, *alone(model, asked[5]), *prompt(3)])
    expected = [alone(model, each) for each in [*asked, chat]]
    assert len({tuple(each) for each in expected}) == len(expected)
    with headrace.offload(model, Prefetch(1, 1, 1, ("ALL_MODEL_PARAMS",))) as handle, running(model, 4) as engine:
        run, starts = engine.rows.prompts, set[int]()
        engine.rows.prompts = lambda *given: starts.add(given[2]) or run(*given)  # type: ignore[method-assign,func-returns-value]
        for each in [*asked, chat]:
            engine.submit(each)
        assert eventually(is_done([*asked, chat]), 60)
        assert [each.tokens for each in [*asked, chat]] == expected
        assert starts == (set(range(0, 80, 16)) if family == "Qwen3_5Text" else {0})
        assert handle.stats().bytes_moved > 20 * handle.plan.moved_bytes > 0


@pytest.fixture(params=["lookup", pytest.param("draft", marks=pytest.mark.slow)])
def guessed(request: pytest.FixtureRequest, model: Any, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """The model, whose tokens n-grams guess or the model itself, and its handle."""
    model.save_pretrained(tmp_path)
    guesser = "lookup" if request.param == "lookup" else str(tmp_path)
    policy, speculation = Prefetch(1, 1, 1, ("ALL_MODEL_PARAMS",)), headrace.Speculation(guesser, 3, accepted=3.5)
    loaded, handle = load(tmp_path, policy, device="cpu", speculate=speculation)
    yield loaded, handle
    handle.remove()


@pytest.mark.slow
def test_guesses_for_a_single_row(model: Any, guessed: tuple[Any, Any]) -> None:
    """The tokens without them, in fewer passes, whoever joins, leaves, draws tokens or ends within the guesses."""

    def processors() -> LogitsProcessorList:
        return LogitsProcessorList([transformers.TemperatureLogitsWarper(0.05)])

    loaded, handle = guessed
    stays, joins = request(prompt(30), 120), request(prompt(12), 20)
    draws = Request(prompt(40, 1), 60, (), processors, samples=True, seed=3)
    fills = request(prompt(150), 50)  # the row
    answer = alone(model, fills)
    ends = Request(prompt(150), 50, (answer[30],), LogitsProcessorList)
    with running(loaded, 3) as engine:
        sizes: list[int] = []
        run = engine.rows.step
        engine.rows.step = lambda *given: sizes.append(len(given[0])) or run(*given)  # type: ignore[method-assign,func-returns-value]
        engine.submit(stays)
        assert eventually(lambda: len(stays.tokens) > 40, 60)
        engine.submit(joins)
        for each in (stays, joins, draws, fills, ends):
            if each not in (stays, joins):
                engine.submit(each)
            assert eventually(is_done([each]), 60)
        before, moved = handle.stats().speculation, handle.stats().bytes_moved
    assert [each.tokens for each in (stays, joins, fills)] == [alone(model, each) for each in (stays, joins, fills)]
    assert ends.tokens == answer[: answer.index(answer[30]) + 1]
    torch.manual_seed(3)
    assert draws.tokens == alone(model, draws, do_sample=True, temperature=0.05)
    assert 2 in sizes, "nothing has joined"
    assert before.tokens > 1.5 * before.passes > 0
    assert moved >= (before.passes + len(sizes)) * handle.plan.moved_bytes > 0


@pytest.mark.slow
def test_the_turns_of_a_chat_share_their_beginning(model: Any) -> None:
    with running(model, 3) as engine:
        starts: list[int] = []
        run = engine.rows.prompts
        engine.rows.prompts = lambda *given: starts.append(given[2]) or run(*given)  # type: ignore[method-assign,func-returns-value]
        text, expected = prompt(60), []
        for turn in range(4):
            asked = [request(text), request(prompt(5, turn))]
            for each in asked:
                engine.submit(each)
            assert eventually(is_done(asked), 60)
            assert [each.tokens for each in asked] == [alone(model, each) for each in asked]
            expected.append(len(text) + 7)  # the last token of an answer has not run
            text = [*text, *asked[0].tokens, *prompt(3, turn)]
        shared = [start for start in starts if start]
        assert shared == expected[:3]


def test_seeds_draw_what_generate_draws(model: Any) -> None:
    def processors() -> LogitsProcessorList:
        return LogitsProcessorList([transformers.TemperatureLogitsWarper(1.5), transformers.TopKLogitsWarper(20)])

    asked = [Request(prompt(40, 1), 12, (), processors, samples=True, seed=seed) for seed in (1, 2, 3, 1)]
    with running(model, 3) as engine:
        for each in asked:
            engine.submit(each)
        assert eventually(is_done(asked), 60)
    for each in asked:
        torch.manual_seed(each.seed or 0)
        assert each.tokens == alone(model, each, do_sample=True, temperature=1.5, top_k=20)
    assert asked[0].tokens == asked[3].tokens != asked[1].tokens


def test_a_queue_has_a_limit(model: Any) -> None:
    goes_on, told = threading.Event(), threading.Event()

    def tell(_: Any) -> None:
        told.set()
        assert goes_on.wait(60)

    with running(model, 1, 2, tell) as engine:
        first = request(prompt(3))
        engine.submit(first)
        assert told.wait(60)
        others = [request(prompt(4)), request(prompt(5))]
        for each in others:
            engine.submit(each)
        with pytest.raises(RequestError, match="1 requests run and 2 wait, the limit of --max-queue") as caught:
            engine.submit(request(prompt(6)))
        assert caught.value.status == 429
        engine.cancel(others[0])  # leaves the queue
        last = request(prompt(6))
        engine.submit(last)
        goes_on.set()
        assert eventually(is_done([first, others[1], last]), 60)
    assert others[0].tokens == []
    assert last.tokens == alone(model, last)


@pytest.mark.parametrize(
    ("length", "tokens", "fix"), [(150, 51, "max_tokens of 50 or less"), (200, 1, "shorter prompt")]
)
def test_what_is_longer_than_a_row_is_refused(model: Any, length: int, tokens: int, fix: str) -> None:
    with running(model, 1) as engine:
        with pytest.raises(RequestError, match=f"together more than the 200 that a sequence may have here .*{fix}"):
            engine.submit(request(prompt(length), tokens))
        fits = request(prompt(150), 50)
        engine.submit(fits)
        assert eventually(is_done([fits]), 60)
    assert fits.tokens == alone(model, fits)


def test_a_request_that_leaves_frees_its_row(model: Any) -> None:
    gone, stays = request(prompt(9), 180), request(prompt(30), 60)
    with running(model, 2) as engine:
        for each in (gone, stays):
            engine.submit(each)
        assert eventually(lambda: len(gone.tokens) > 3, 60)
        engine.cancel(gone)
        after = request(prompt(12))
        engine.submit(after)
        assert eventually(is_done([stays, after]), 60)
    assert len(gone.tokens) < 180
    assert (stays.tokens, after.tokens) == (alone(model, stays), alone(model, after))


@pytest.mark.slow
def test_a_prompt_that_raises_ends_its_request_alone(model: Any) -> None:
    stays = request(prompt(30), 120)
    with running(model, 2) as engine:
        engine.submit(stays)
        assert eventually(lambda: len(stays.tokens) > 3, 60)
        run, engine.rows.prompts = engine.rows.prompts, raising(RuntimeError("bad"))  # type: ignore[method-assign]
        bad = request(prompt(5))
        engine.submit(bad)
        assert eventually(lambda: bad.error is not None, 60)
        engine.rows.prompts = run  # type: ignore[method-assign]
        good = request(prompt(7))
        engine.submit(good)
        assert eventually(is_done([stays, good]), 60)
        assert engine.why_dead() is None
    assert (stays.tokens, good.tokens) == (alone(model, stays), alone(model, good))


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("after", [0, 3])
def test_processors_that_leave_no_token_end_their_request_alone(model: Any, samples: bool, after: int) -> None:
    """To draw from no probabilities would be an error of the whole device."""
    end = 9 + after

    class Forbids(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return scores - torch.inf if input_ids.shape[1] >= end else scores

    bad = Request(prompt(9), 8, (), lambda: LogitsProcessorList([Forbids()]), samples=samples)
    stays = request(prompt(30), 40)
    with running(model, 2) as engine:
        for each in (stays, bad):
            engine.submit(each)
        assert eventually(is_done([stays, bad]), 60)
        assert engine.why_dead() is None
    assert str(bad.error) == "no token is left: its fields, or those of the model, forbid all of them"
    assert len(bad.tokens) == after
    assert stays.tokens == alone(model, stays)


def test_a_prompt_that_raises_beside_others(model: Any) -> None:
    """Prompts that run together are run again one by one; processors that raise end their request alone."""

    def broken() -> LogitsProcessorList:
        raise KeyError("none")

    goes_on = threading.Event()
    with running(model, 4, tell=lambda _: goes_on.wait(60)) as engine:
        run: Any = engine.rows.prompts

        def prompts(first: int, tokens: Any, *more: Any) -> Any:
            if any(ids[0] == 63 for ids in tokens):
                raise RuntimeError("bad")
            return run(first, tokens, *more)

        engine.rows.prompts = prompts  # type: ignore[method-assign]
        first, bad, fails = request([5, 6], 1), request([63, 1]), Request([7, 8], 4, (), broken)
        good = [request(prompt(4)), request(prompt(9))]
        for each in (first, good[0], bad, fails, good[1]):
            engine.submit(each)
        goes_on.set()
        assert eventually(is_done([first, bad, fails, *good]), 60)
        assert (str(bad.error), str(fails.error)) == ("bad", "'none'")
    assert [each.tokens for each in good] == [alone(model, each) for each in good]


def test_a_prompt_that_is_cancelled_half_way_is_not_shared(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.serving.engine._PROMPT_TOKENS", 40)
    with running(model, 1) as engine:
        run: Any = engine.rows.prompts
        gone = request(prompt(150))

        def prompts(first: int, tokens: Any, *more: Any) -> Any:
            logits = run(first, tokens, *more)
            if not gone.is_cancelled:
                engine.cancel(gone)
            return logits

        engine.rows.prompts = prompts  # type: ignore[method-assign]
        engine.submit(gone)
        assert eventually(lambda: gone.is_cancelled and engine.running == 0, 60)
        again = request(prompt(150))
        engine.submit(again)
        assert eventually(is_done([again]), 60)
    assert again.tokens == alone(model, again)


def test_a_step_that_raises_ends_all(model: Any) -> None:
    asked = [request(prompt(30), 120), request(prompt(31), 120), request(prompt(32), 120)]
    with running(model, 2) as engine:
        engine.rows.step = raising(RuntimeError("worse"))  # type: ignore[method-assign]
        for each in asked:
            engine.submit(each)
        assert eventually(lambda: all(str(each.error) == "worse" for each in asked), 60)
        assert engine.why_dead() == "the engine has ended: RuntimeError: worse"
