"""The promise: several prompts, several answers and log-probabilities equal those of the resident model, one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.cli.demo_run import ensure_model
from headrace.serving.endpoint import ServedModel
from models import aligned
from served_answers import TEMPLATE
from servers import EVERY_LAYER, NAME, SMALL, Served, serving

PROMPTS = ["Water", "The sea is", "x"]
TOKENS = 6


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("choices") / "model"
    ensure_model(folder, SMALL)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(folder, EVERY_LAYER, longest=700, max_waiting=8) as running:
        yield running


@pytest.fixture(scope="module")
def resident(served: Served) -> Any:
    return aligned(AutoModelForCausalLM.from_pretrained(served.folder).eval())


def asked(served: Served, endpoint: str = "completions", **fields: Any) -> dict[str, Any]:
    before = served.handle.stats().bytes_moved
    status, text = served.send(f"/v1/{endpoint}", fields)
    assert status == 200, text
    assert served.handle.stats().bytes_moved > before
    return json.loads(text)  # type: ignore[no-any-return]


def streamed(served: Served, endpoint: str = "completions", **fields: Any) -> list[dict[str, Any]]:
    status, text = served.send(f"/v1/{endpoint}", {**fields, "stream": True})
    assert status == 200, text
    *chunks, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert last == "[DONE]"
    return [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]


def logprobs_of(model: Any, ids: list[int]) -> torch.Tensor:
    """[tokens - 1, vocabulary]: of what follows each token but the last."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_prompts_in_a_list(served: Served) -> None:
    """As texts and as tokens, each with the answer that it has alone."""
    alone = [asked(served, prompt=prompt, max_tokens=TOKENS)["choices"][0]["text"] for prompt in PROMPTS]
    tokens = [served.tokenizer(prompt).input_ids for prompt in PROMPTS]
    for given in (PROMPTS, tokens):
        answer = asked(served, prompt=given, max_tokens=TOKENS)
        assert [choice["text"] for choice in answer["choices"]] == alone
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        num = sum(map(len, tokens))
        assert answer["usage"] == {"prompt_tokens": num, "completion_tokens": 18, "total_tokens": num + 18}
        parts = streamed(served, prompt=given, max_tokens=TOKENS)
        texts = ["".join(part["text"] for part in parts if part["index"] == index) for index in range(3)]
        assert texts == alone
        assert [part["finish_reason"] for part in parts].count("length") == 3
    assert asked(served, prompt=tokens[1], max_tokens=TOKENS)["choices"][0]["text"] == alone[1]


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_several_answers(served: Served, endpoint: str) -> None:
    """Drawn by seeds that follow one another."""
    fields: dict[str, Any] = {"prompt": "Water"} if endpoint == "completions" else {}
    fields |= {} if fields else {"messages": [{"role": "user", "content": "Water"}]}
    fields |= {"max_tokens": TOKENS, "temperature": 1}

    def texts(choices: list[dict[str, Any]]) -> list[str]:
        return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]

    answer = asked(served, endpoint, **fields, n=3, seed=7)
    alone = [asked(served, endpoint, **fields, seed=seed)["choices"] for seed in (7, 8, 9)]
    assert texts(answer["choices"]) == [texts(each)[0] for each in alone]
    assert len(set(texts(answer["choices"]))) == 3
    assert answer["usage"]["completion_tokens"] == 3 * TOKENS
    parts = streamed(served, endpoint, **fields, n=3, seed=7)
    for index, text in enumerate(texts(answer["choices"])):
        mine = [part for part in parts if part["index"] == index]
        assert "".join(part["text"] if "text" in part else part["delta"].get("content", "") for part in mine) == text
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == ["length"]
    assert served.engine.running == 0


def test_logprobs_of_a_completion(served: Served, resident: Any) -> None:
    ids = served.tokenizer("Water").input_ids
    answer = asked(served, prompt=ids, max_tokens=TOKENS, logprobs=3, temperature=0)["choices"][0]
    found = answer["logprobs"]
    with torch.no_grad():
        tokens = resident.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)[0].tolist()
    expected = logprobs_of(resident, tokens)[len(ids) - 1 :]
    texts = [served.tokenizer.decode([token]) for token in tokens[len(ids) :]]
    assert found["tokens"] == texts
    assert found["text_offset"] == [sum(map(len, texts[:at])) for at in range(TOKENS)]
    own = expected.gather(1, torch.tensor(tokens[len(ids) :])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found["token_logprobs"]), own, atol=1e-4, rtol=0)
    for top, row in zip(found["top_logprobs"], expected, strict=True):
        # Of several tokens with one text, the likeliest.
        pairs = [*zip(*(each.tolist() for each in row.topk(3)), strict=True)][::-1]
        assert top == pytest.approx({served.tokenizer.decode([token]): value for value, token in pairs}, abs=1e-4)
    parts = [part["logprobs"] for part in streamed(served, prompt=ids, max_tokens=TOKENS, logprobs=3, temperature=0)]
    for name in found:
        assert [value for part in parts for value in part[name]] == found[name]


@pytest.mark.parametrize("length", [1, 5, 600])
def test_logprobs_of_a_prompt(served: Served, resident: Any, length: int) -> None:
    """As lm-eval asks for them; a long prompt runs in chunks."""
    ids = [65 + at * at % 50 for at in range(length)]
    fields: dict[str, Any] = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    answer = asked(served, prompt=[ids, ids[:1]], **fields)
    choice, found = answer["choices"][0], answer["choices"][0]["logprobs"]
    assert choice["text"].startswith(served.tokenizer.decode(ids))
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == length + 1
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    expected = logprobs_of(resident, ids).gather(1, torch.tensor(ids[1:], dtype=torch.long)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found["token_logprobs"][1:-1]), expected, atol=1e-4, rtol=1e-5)
    likeliest = [max(top.values()) for top in found["top_logprobs"][1:]]
    assert all(own <= best for own, best in zip(found["token_logprobs"][1:], likeliest, strict=True))
    assert found["token_logprobs"][-1] == likeliest[-1], "greedy"
    parts = streamed(served, prompt=ids, **fields)
    assert "".join(part["text"] for part in parts) == choice["text"]
    for name in found:
        assert [value for part in parts for value in part["logprobs"][name]] == found[name]


def test_an_echo_without_logprobs(served: Served) -> None:
    alone = asked(served, prompt="Water", max_tokens=TOKENS)["choices"][0]["text"]
    for given in ("Water", served.tokenizer("Water").input_ids):
        assert asked(served, prompt=given, max_tokens=TOKENS, echo=True)["choices"][0]["text"] == f"Water{alone}"
        parts = streamed(served, prompt=given, max_tokens=TOKENS, echo=True)
        assert "".join(part["text"] for part in parts) == f"Water{alone}"


def test_the_text_of_a_token_is_decoded_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop, which all clients wait for, decodes them."""
    decoded: list[list[int]] = []
    decode = served.tokenizer.decode
    monkeypatch.setattr(served.tokenizer, "decode", lambda ids, **more: decoded.append(ids) or decode(ids, **more))
    asked(served, prompt=[65] * 600, max_tokens=1, logprobs=20, echo=True)
    assert len(decoded) < 600


def test_bad_words_are_encoded_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each answer by the engine, whose other rows would wait."""
    encoded: list[str] = []
    encode = served.tokenizer.encode
    monkeypatch.setattr(served.tokenizer, "encode", lambda text, **more: encoded.append(text) or encode(text, **more))
    asked(served, prompt="Water", max_tokens=1, n=4, bad_words=["ab", "cd"])
    assert encoded == ["ab", " ab", "cd", " cd"]


def test_an_echo_of_tokens_that_have_no_text(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a space of Llama 2's, alone: what has been sent is not known by its length."""
    monkeypatch.setattr(ServedModel, "text_of", property(lambda _: lambda token: ""))
    parts = streamed(served, prompt=[65], max_tokens=TOKENS, logprobs=1, echo=True, temperature=0)
    answer = asked(served, prompt=[65], max_tokens=TOKENS, logprobs=1, echo=True, temperature=0)
    assert "".join(part["text"] for part in parts) == answer["choices"][0]["text"]
    assert sum(len(part["logprobs"]["tokens"]) for part in parts) == 1 + TOKENS


def test_an_echo_of_a_token_that_is_none(served: Served) -> None:
    status, text = served.send("/v1/completions", {"prompt": [2**40], "echo": True})
    assert (status, json.loads(text)["error"]["param"]) == (400, "prompt")


@pytest.mark.slow
def test_logprobs_of_a_chat(served: Served) -> None:
    """In the form of OpenAI's client, which checks it."""
    messages: Any = [{"role": "user", "content": "Water"}]
    asked: Any = {"model": NAME, "messages": messages, "max_tokens": TOKENS, "logprobs": True, "top_logprobs": 2}
    choice = served.client().chat.completions.create(**asked).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert "".join(each.token for each in content) == choice.message.content
    assert [each.logprob for each in content] == [each.top_logprobs[0].logprob for each in content], "greedy"
    assert all(bytes(each.bytes or []).decode() == each.token and len(each.top_logprobs) == 2 for each in content)
    parts = [chunk.choices[0] for chunk in served.client().chat.completions.create(**asked, stream=True)]
    found = [each for part in parts if part.logprobs is not None for each in part.logprobs.content or []]
    assert [each.token for each in found] == [each.token for each in content]
    # The second request may read the beginning that the first has left in the cache, which rounds otherwise.
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in content], abs=1e-4)


def test_more_answers_than_may_wait(served: Served) -> None:
    status, text = served.send("/v1/completions", {"prompt": ["a"] * 5, "n": 3})
    assert (status, json.loads(text)["error"]["param"]) == (400, "n")
    assert "n: 15 answers to a request are more than the 12 that may run and wait here" in text
    assert len(asked(served, prompt=["a"] * 4, n=3, max_tokens=2)["choices"]) == 12


def test_a_model_by_its_name(served: Served) -> None:
    client = served.client()
    assert client.models.retrieve("alias").id == "alias"
    status, text = served.send("/v1/models/none/such")
    assert status == 404
    assert f"model 'none/such' is not served here, {NAME!r} is" in text
