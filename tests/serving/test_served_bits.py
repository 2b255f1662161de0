"""The promise: a served model answers as ``generate`` of the resident one does, whoever asks and however."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

import quantised_checkpoints
from commands import TINY, changed, write_llama_tokenizer
from headrace.cli.demo_run import ensure_model
from headrace.config import Prefetch
from models import aligned
from quantised_checkpoints import FORMATS
from servers import NAME, Served, serving

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PROMPTS = ["Water", "The sea is", "Höhe", "a" * 150, "1, 2, 3, 4,", "x"]
TOKENS = 24
# For tests of requests, to which it does not matter where weights come from.
one_store = pytest.mark.parametrize("served", ["budget"], indirect=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model of 4 MB with a chat template."""
    plain = tmp_path_factory.mktemp("served") / "plain"
    ensure_model(plain, TINY)
    (plain / "chat_template.jinja").write_text(TEMPLATE)
    return plain


@pytest.fixture(scope="module", params=["budget", "all layers"])
def served(folder: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(folder, "2MiB" if request.param == "budget" else Prefetch(1, 1, 1, mode="disk")) as running:
        yield running


@pytest.fixture(scope="module")
def resident(folder: Path) -> Any:
    return aligned(AutoModelForCausalLM.from_pretrained(folder).eval())


@pytest.fixture(scope="module")
def expected(folder: Path, resident: Any) -> dict[str, list[int]]:
    """Greedy tokens of the resident model for every prompt, and for every one as a chat."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokens = {}
    for prompt in PROMPTS:
        chat = tokenizer.apply_chat_template(message(prompt), add_generation_prompt=True, tokenize=False)
        for key, text in ((prompt, prompt), (f"chat {prompt}", chat)):
            ids = tokenizer(text, return_tensors="pt").input_ids
            with torch.no_grad():
                tokens[key] = resident.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()
    assert len({tuple(each) for each in tokens.values()}) > len(PROMPTS), "prompts with one answer test nothing"
    return tokens


def message(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def text_of(served: Served, tokens: list[int]) -> str:
    return str(served.tokenizer.decode(tokens, skip_special_tokens=True))


class TestEqualsGenerate:
    @pytest.mark.slow
    def test_completions(self, served: Served, expected: dict[str, list[int]]) -> None:
        before = served.handle.stats().bytes_moved
        for prompt in PROMPTS:
            answer = served.complete(prompt, max_tokens=TOKENS)
            assert answer["choices"][0]["text"] == text_of(served, expected[prompt])
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == TOKENS
        assert served.handle.stats().bytes_moved - before >= len(PROMPTS) * TOKENS * served.handle.plan.moved_bytes > 0

    @pytest.mark.slow
    def test_many_at_once(self, served: Served, expected: dict[str, list[int]]) -> None:
        """More than fit the cache together, so that some wait for others."""
        before, asked = served.handle.stats().bytes_moved, PROMPTS * 4
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda prompt: served.complete(prompt, max_tokens=TOKENS), asked))
        for prompt, answer in zip(asked, answers, strict=True):
            assert answer["choices"][0]["text"] == text_of(served, expected[prompt])
        assert served.handle.stats().bytes_moved > before

    @pytest.mark.slow
    def test_openai_client(self, served: Served, expected: dict[str, list[int]]) -> None:
        client = served.client()
        for prompt in PROMPTS:
            chat = client.chat.completions.create(model=NAME, messages=message(prompt), max_tokens=TOKENS)
            assert chat.choices[0].message.content == text_of(served, expected[f"chat {prompt}"])
            completion = client.completions.create(model="alias", prompt=prompt, max_tokens=TOKENS, temperature=0)
            assert completion.choices[0].text == text_of(served, expected[prompt])
            assert completion.model == NAME
        assert [model.id for model in client.models.list()] == [NAME, "alias"]

    @pytest.mark.slow
    def test_openai_client_streams(self, served: Served, expected: dict[str, list[int]]) -> None:
        client = served.client()
        for prompt in PROMPTS:
            options: Any = {"max_tokens": TOKENS, "stream": True, "stream_options": {"include_usage": True}}
            chunks = list(client.chat.completions.create(model=NAME, messages=message(prompt), **options))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == text_of(served, expected[f"chat {prompt}"])
            assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [TOKENS]
            parts = list(client.completions.create(model=NAME, prompt=prompt, **options))
            assert "".join(part.choices[0].text for part in parts if part.choices) == text_of(served, expected[prompt])
            assert parts[-1].choices == []

    @pytest.mark.slow
    @one_store
    @pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
    def test_curl(self, served: Served, expected: dict[str, list[int]]) -> None:
        """The line that the command prints."""
        body = json.dumps({"model": NAME, "prompt": "Water", "max_tokens": TOKENS})
        command = ["curl", "-s", f"{served.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert json.loads(done.stdout)["choices"][0]["text"] == text_of(served, expected["Water"])

    @pytest.mark.parametrize("chat", [False, True])
    def test_vllm_bench_serve(self, served: Served, expected: dict[str, list[int]], chat: bool) -> None:
        """The bodies that its client sends, and what that reads of the answers."""
        fields: dict[str, Any] = {
            "model": NAME,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0.0,
            "repetition_penalty": 1.0,
        }
        if chat:
            content = [{"type": "text", "text": "Water"}]
            fields |= {"messages": [{"role": "user", "content": content}], "max_completion_tokens": TOKENS}
        else:
            fields |= {"prompt": "Water", "max_tokens": TOKENS, "logprobs": None}
        status, text = served.send(f"/v1/{'chat/' if chat else ''}completions", fields)
        assert status == 200, text
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks if not chunk["choices"]] == [TOKENS]
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        texts = [choice["delta"].get("content") if chat else choice["text"] for choice in choices]
        assert "".join(filter(None, texts)) == text_of(served, expected["chat Water" if chat else "Water"])


SETTINGS: list[dict[str, Any]] = [
    {"min_new_tokens": 9},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 0.2},
    {"stop_strings": [")", "]", "<"]},
    {"repetition_penalty": 0.2},
    {"min_length": 12},
    {"bad_words_ids": [[at] for at in range(0, 256, 2)]},
    {"suppress_tokens": list(range(1, 256, 2))},
    {"begin_suppress_tokens": list(range(0, 256, 2))},
]
SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in SETTINGS[3:]]


@pytest.mark.slow
@pytest.mark.parametrize("setting", [*SETTINGS[:3], *SLOW], ids=lambda setting: next(iter(setting)))
def test_settings_of_the_model(
    folder: Path, resident: Any, expected: dict[str, list[int]], tmp_path: Path, setting: dict[str, Any]
) -> None:
    """The tokens of ``generate`` with the same generation_config.json, for each of several requests at once."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompts = PROMPTS[::2]

    def tokens_of(prompt: str, **given: Any) -> list[int]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        output = resident.generate(ids, max_new_tokens=TOKENS, do_sample=False, tokenizer=tokenizer, **given)
        return output[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

    # Ends that the model chooses early, so that the least numbers of tokens count.
    ends = {"eos_token_id": sorted({expected[prompt][2] for prompt in prompts})} if "min" in str(setting) else {}
    made = changed(folder, tmp_path / "settings", "generation_config.json", **ends, **setting)
    wanted = [tokens_of(prompt, **ends, **setting) for prompt in prompts]
    plain = [tokens_of(prompt, **ends) if ends else expected[prompt] for prompt in prompts]
    assert wanted != plain, "the setting has an effect"
    with serving(made, "2MiB") as served, ThreadPoolExecutor(len(prompts)) as pool:
        before = served.handle.stats().bytes_moved
        answers = list(pool.map(lambda prompt: served.complete(prompt, max_tokens=TOKENS), prompts))
        for tokens, answer in zip(wanted, answers, strict=True):
            text, stops = text_of(served, tokens), setting.get("stop_strings", [])
            cut = min((text.find(stop) for stop in stops if stop in text), default=len(text))
            assert answer["choices"][0]["text"] == text[:cut]
            assert answer["usage"]["completion_tokens"] == len(tokens)
        assert served.handle.stats().bytes_moved > before


@pytest.mark.slow
@one_store
def test_settings_of_a_request(served: Served, resident: Any) -> None:
    ids = served.tokenizer("Water", return_tensors="pt").input_ids
    plain = served.complete("Water", max_tokens=TOKENS)["choices"][0]["text"]
    wanted = resident.generate(ids, max_new_tokens=TOKENS, do_sample=False, repetition_penalty=0.2)[0, ids.shape[1] :]
    answer = served.complete("Water", max_tokens=TOKENS, repetition_penalty=0.2, min_tokens=TOKENS)
    assert answer["choices"][0]["text"] == text_of(served, wanted.tolist()) != plain


class Penalty(LogitsProcessor):
    """OpenAI's formula, token by token."""

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        answer = input_ids[0, 1:].tolist()
        return scores - torch.tensor(
            [[0.25 * answer.count(at) + 1.5 * (at in answer) for at in range(scores.shape[1])]]
        )


BAD_WORDS = [chr(at + 33) for at in range(33)]  # tokens 0, 1, ... of the tokenizer
# Fields of requests, and what generate takes in their place.
FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"logit_bias": {"65": 0.5, "66": 0.25}}, {"sequence_bias": {(65,): 0.5, (66,): 0.25}}),
    ({"temperature": 1.5, "seed": 7, "min_p": 0.5}, {"do_sample": True, "temperature": 1.5, "min_p": 0.5, "top_k": 0}),
    ({"presence_penalty": 1.5, "frequency_penalty": 0.25}, {"logits_processor": [Penalty()]}),
    ({"allowed_token_ids": [3, 5, 9]}, {"prefix_allowed_tokens_fn": lambda *_: [3, 5, 9]}),
    ({"bad_words": BAD_WORDS}, {"bad_words_ids": [[at] for at in range(33)]}),
]


@pytest.mark.slow
@one_store
@pytest.mark.parametrize(("fields", "options"), FIELDS, ids=lambda each: next(iter(each)))
def test_fields_that_are_processors(
    served: Served, resident: Any, expected: dict[str, list[int]], fields: dict[str, Any], options: dict[str, Any]
) -> None:
    ids = served.tokenizer("x", return_tensors="pt").input_ids
    torch.manual_seed(fields.get("seed", 0))
    wanted = resident.generate(ids, max_new_tokens=TOKENS, **{"do_sample": False, **options})[0, ids.shape[1] :]
    assert wanted.tolist() != expected["x"], "the fields have an effect"
    answer = served.complete("x", max_tokens=TOKENS, **fields)
    assert answer["choices"][0]["text"] == text_of(served, wanted.tolist())


@pytest.mark.slow
@one_store
def test_words_of_several_tokens_are_forbidden(served: Served, expected: dict[str, list[int]]) -> None:
    """Also one whose first tokens are the end of the prompt; nothing else changes."""
    text = text_of(served, expected["x"])
    for word in (text[:2], text[1:3]):
        assert word in text
        assert word not in served.complete("x", max_tokens=TOKENS, bad_words=[word])["choices"][0]["text"]


@one_store
def test_tokens_that_end_an_answer_and_are_not_shown(served: Served, expected: dict[str, list[int]]) -> None:
    tokens = expected["Water"]
    at = next(at for at, token in enumerate(tokens) if at > 2 and token not in tokens[:at])
    answer = served.complete("Water", max_tokens=TOKENS, stop_token_ids=[tokens[at]], ignore_eos=True)
    assert answer["choices"][0] | {"logprobs": None} == {
        "text": text_of(served, tokens[:at]), "index": 0, "finish_reason": "stop", "logprobs": None,
    }  # fmt: skip
    assert answer["usage"]["completion_tokens"] == at + 1


@one_store
@pytest.mark.parametrize(
    "fields", [{"logit_bias": {"999": 1}}, {"stop_token_ids": [999]}, {"allowed_token_ids": [999]}]
)
def test_tokens_that_the_model_has_not(served: Served, fields: dict[str, Any]) -> None:
    status, text = served.send("/v1/completions", {"prompt": "x", **fields})
    error = json.loads(text)["error"]
    assert (status, error["param"]) == (400, next(iter(fields)))
    assert "token 999, and the model has embeddings for 2" in error["message"]


@pytest.mark.slow
def test_a_tokenizer_that_strips_the_first_space(tmp_path: Path) -> None:
    """A completion goes on behind the prompt, whole and streamed: it lost a space at the seam."""
    ensure_model(tmp_path / "llama", TINY)
    write_llama_tokenizer(tmp_path / "llama")
    model: Any = aligned(AutoModelForCausalLM.from_pretrained(tmp_path / "llama").eval())
    with serving(tmp_path / "llama", "2MiB") as served:
        decode, spaces, before = served.tokenizer.decode, 0, served.handle.stats().bytes_moved
        for prompt in ("x", "one two", "Be here!"):
            ids = served.tokenizer(prompt, return_tensors="pt").input_ids
            answer = model.generate(ids, max_new_tokens=3, do_sample=False)[0].tolist()
            wanted = decode(answer, skip_special_tokens=True)[len(decode(ids[0], skip_special_tokens=True)) :]
            assert served.complete(prompt, max_tokens=3)["choices"][0]["text"] == wanted
            chunks = served.client().completions.create(model=NAME, prompt=prompt, max_tokens=3, stream=True)
            assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == wanted
            spaces += wanted.startswith(" ")
        assert spaces > 1
        assert served.handle.stats().bytes_moved > before


class TestSampling:
    @pytest.mark.slow
    def test_a_seed_gives_the_same_answer_whatever_else_runs(self, served: Served) -> None:
        def ask(seed: int) -> str:
            answer = served.complete("Water", max_tokens=TOKENS, temperature=1.5, seed=seed)
            return str(answer["choices"][0]["text"])

        first, other = ask(7), ask(8)
        assert first != other
        with ThreadPoolExecutor(6) as pool:
            busy = [pool.submit(served.complete, "x", max_tokens=60, temperature=1.0) for _ in range(3)]
            again = [pool.submit(ask, 7) for _ in range(2)]
            assert [each.result() for each in again] == [first, first]
            assert all(each.result() for each in busy)

    @pytest.mark.slow
    def test_every_request_has_its_own_sampling(self, served: Served, expected: dict[str, list[int]]) -> None:
        """In one batch, beside others: greedy answers are the same beside requests that sample."""
        served.complete("Water", max_tokens=2)
        asked = [(prompt, temperature) for prompt in PROMPTS[:3] for temperature in (0, 0.9, 0)]
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(
                pool.map(lambda each: served.complete(each[0], max_tokens=TOKENS, temperature=each[1]), asked)
            )
        for (prompt, temperature), answer in zip(asked, answers, strict=True):
            assert answer["usage"]["completion_tokens"] == TOKENS
            if temperature == 0:
                assert answer["choices"][0]["text"] == text_of(served, expected[prompt])
        for narrow in ({"top_k": 1}, {"top_p": 1e-9}):
            answer = served.complete("Water", max_tokens=TOKENS, temperature=2, **narrow)
            assert answer["choices"][0]["text"] == text_of(served, expected["Water"])
        for wide in ({"top_k": 10**9}, {"top_k": 0}, {"top_k": -1}, {"top_p": 1}):
            texts = {served.complete("Water", max_tokens=8, temperature=2, **wide)["choices"][0]["text"] for _ in "123"}
            assert len(texts) == 3

    @pytest.mark.slow
    def test_the_seed_that_clients_mean_as_random(self, served: Served) -> None:
        """-1; its answer was always the same."""
        fields: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 1.5, "seed": -1}
        assert len({served.complete("Water", **fields)["choices"][0]["text"] for _ in range(3)}) > 1

    @pytest.mark.slow
    @one_store
    def test_a_seed_depends_on_nothing_that_was_before(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither on draws of cancelled requests, nor on the cache; and what comes later does not depend on it."""
        prompt = "a" * 150

        def ask(**fields: Any) -> str:
            fields = {"max_tokens": 12, "temperature": 1.5, **fields}
            return str(served.complete(prompt, **fields)["choices"][0]["text"])

        first = ask(seed=7)
        rows, starts = served.engine.rows, list[int]()
        run: Any = rows.prompts
        monkeypatch.setattr(rows, "prompts", lambda *given: starts.append(given[2]) or run(*given))
        later = set()
        for _ in range(3):
            assert ask(stop=[*"abcdefghijklmnopqrstuvwxyz "], ignore_eos=True) is not None
            del starts[:]
            assert ask(seed=7) == first
            assert starts == [0], "a seed read what others have left in the cache"
            later.add(ask())
            assert starts[1] > 100, "others still share prefixes"
        assert len(later) == 3

    @one_store
    def test_the_token_that_ends_texts(self, served: Served, expected: dict[str, list[int]]) -> None:
        """An answer ends at it; ``ignore_eos`` goes on."""
        tokens = expected["Water"]
        stop = next(token for index, token in enumerate(tokens) if index > 2 and token not in tokens[:index])
        settings = served.model.generation_config
        settings.eos_token_id = stop
        try:
            cut = served.complete("Water", max_tokens=TOKENS)
            whole = served.complete("Water", max_tokens=TOKENS, ignore_eos=True)
        finally:
            settings.eos_token_id = None
        assert cut["choices"][0]["finish_reason"] == "stop"
        assert cut["usage"]["completion_tokens"] == tokens.index(stop) + 1
        assert whole["choices"][0]["text"] == text_of(served, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compressed-tensors int8", "torchao int8", "fp8, blocks, experts"])
def test_quantised_checkpoints(folder: Path, tmp_path: Path, name: str) -> None:
    form = FORMATS[name]
    if not form.is_here:
        pytest.skip(f"{form.package} is not installed")
    sizes = {**(form.sizes or {}), "vocab_size": 258, "eos_token_id": None}
    made = replace(form, sizes=sizes).write(tmp_path / "model")
    for each in folder.glob("token*"):
        shutil.copy(each, made)
    model: Any = quantised_checkpoints.resident(made)
    tokenizer: Any = AutoTokenizer.from_pretrained(made)
    with serving(made, Prefetch(1, 1, 1, ("ALL_MODEL_PARAMS",))) as served:
        for prompt in PROMPTS[:3]:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
            answer = served.complete(prompt, max_tokens=12, temperature=0)
            assert answer["choices"][0]["text"] == text_of(served, expected)
        assert served.handle.stats().bytes_moved > 0
