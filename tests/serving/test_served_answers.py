"""The promise: answers of every endpoint are the same streamed and not streamed, and end alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from commands import write_llama_tokenizer
from headrace.formatting import TokenText
from served_answers import HI, answering, answers, saying
from servers import EVERY_LAYER, NAME, Served, serving

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
Says = Callable[[str], None]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with answering(tmp_path_factory.mktemp("answers") / "model") as running:
        yield running


@pytest.fixture
def says(served: Served, monkeypatch: pytest.MonkeyPatch) -> Says:
    return saying(served, monkeypatch)


ENDPOINTS = ["completions", "chat/completions", "responses"]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
class TestEnds:
    @pytest.mark.parametrize(
        ("stop", "text", "tokens"),
        [
            ("gh", "abcdef", 8),
            (["zz", "def", "cde"], "ab", 5),
            (["a"], "", 1),
            ("hx", "abcdefg", 9),
            ("fghz", "abcdefghxx", 10),
            ("xxx", "abcdefghxx", 10),
        ],
    )
    def test_stop_strings(self, served: Served, says: Says, endpoint: str, stop: Any, text: str, tokens: int) -> None:
        says("abcdefgh")
        whole, streamed = answers(served, endpoint, stop=stop, max_tokens=10)
        assert whole == streamed
        assert whole["text"] == text
        assert (
            whole["usage"]["total_tokens"]
            - next(count for name, count in whole["usage"].items() if name in ("prompt_tokens", "input_tokens"))
            == tokens
        )
        if endpoint != "responses":
            assert whole["reason"] == ("length" if text == "abcdefghxx" else "stop")
        assert served.engine.running == 0

    @pytest.mark.parametrize(
        ("stop", "text"), [("t", "abc"), ("endof", "abc"), ("d", "abc"), (">", "abc"), ("c", "ab")]
    )
    def test_a_stop_string_within_a_special_token(
        self, served: Served, says: Says, endpoint: str, stop: str, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its name is no text of the answer, whether it ends it or not."""
        says("abc<|endoftext|>")
        whole, streamed = answers(served, endpoint, stop=stop, max_tokens=4)
        assert whole == streamed
        assert whole["text"] == text
        assert whole.get("reason") in (None, "stop" if stop == "c" else "length")
        monkeypatch.setattr(served.model.generation_config, "eos_token_id", served.tokenizer.eos_token_id)
        whole, streamed = answers(served, endpoint, stop=stop, max_tokens=9)
        assert (whole, whole["text"], whole.get("reason", "stop")) == (streamed, text, "stop")

    def test_a_character_that_is_cut(self, served: Served, says: Says, endpoint: str) -> None:
        says("aö")
        whole, streamed = answers(served, endpoint, max_tokens=2)
        assert whole == streamed
        assert whole["text"] == "a\ufffd"

    def test_a_byte_that_is_no_text(
        self, served: Served, says: Says, endpoint: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where tokens may be bytes, as of Llama 2 and Gemma, it changes the text before it: the request hung."""
        parts = [decoders.Replace("\u010a", "<0x0A>"), decoders.Replace("\u00c3", "<0xC3>")]
        decoder = decoders.Sequence([*parts, decoders.ByteFallback(), decoders.Fuse()])
        monkeypatch.setattr(served.tokenizer._tokenizer, "decoder", decoder)
        says("a\n\u00e9")
        whole, streamed = answers(served, endpoint, max_tokens=5)
        assert whole == streamed
        assert whole["text"] == "a\n\ufffd\u00a9x"

    def test_a_stop_string_at_the_last_token(self, served: Served, says: Says, endpoint: str) -> None:
        says("abc")
        whole, streamed = answers(served, endpoint, stop="c", max_tokens=3)
        assert whole == streamed
        assert whole["text"] == "ab"
        assert whole.get("reason", "stop") == "stop"


class TestTools:
    @pytest.mark.slow
    @pytest.mark.parametrize("endpoint", [pytest.param(ENDPOINTS[1], marks=pytest.mark.slow), ENDPOINTS[2]])
    def test_one_call_at_a_time(self, served: Served, says: Says, endpoint: str) -> None:
        call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        says(call * 2)
        tool = TOOL if endpoint == "chat/completions" else {"type": "function", "name": "f", "parameters": {}}
        for several in (True, False):
            fields = {"tools": [tool], "parallel_tool_calls": several, "max_tokens": 2 * len(call)}
            whole, streamed = answers(served, endpoint, **fields)
            assert whole == streamed
            assert len(whole["calls"]) == (2 if several else 1)

    def test_tools_that_may_not_be_called(self, served: Served) -> None:
        """The template does not show them."""
        body = {"messages": [HI], "max_tokens": 1, "tools": [TOOL]}
        counts = []
        for more in ({}, {"tool_choice": "none"}):
            status, text = served.send("/v1/chat/completions", {**body, **more})
            assert status == 200, text
            counts.append(json.loads(text)["usage"]["prompt_tokens"])
        assert counts[0] == counts[1] + 1

    @pytest.mark.slow
    @pytest.mark.parametrize("endpoint", ENDPOINTS[1:])
    def test_calls_and_reasoning(self, served: Served, says: Says, endpoint: str) -> None:
        text = f"<think>hm</think>ok{CALL}"
        says(text)
        tool = TOOL if endpoint == "chat/completions" else {"type": "function", "name": "f", "parameters": {}}
        whole, streamed = answers(served, endpoint, tools=[tool], max_tokens=len(text))
        assert whole == streamed
        assert (whole["text"], whole["thought"]) == ("ok", "hm")
        assert [(call["name"], json.loads(call["arguments"])) for call in whole["calls"]] == [("f", {"x": 1})]
        assert whole.get("reason", "tool_calls") == "tool_calls"

    @pytest.mark.parametrize("endpoint", ENDPOINTS[1:])
    def test_a_stop_string_within_reasoning(self, served: Served, says: Says, endpoint: str) -> None:
        says(f"<think>hm, so</think>ok{CALL}")
        whole, streamed = answers(served, endpoint, stop=",", max_tokens=40)
        assert whole == streamed
        assert (whole["text"], whole["thought"], whole["calls"]) == ("", "hm", [])

    @pytest.mark.slow
    @pytest.mark.parametrize("endpoint", ENDPOINTS[1:])
    @pytest.mark.parametrize("call", [CALL[:20], "<tool_call>\n{bad</tool_call>"])
    def test_a_call_that_is_none(self, served: Served, says: Says, endpoint: str, call: str) -> None:
        """The answer is cut within it, or it is no JSON: streams hung then, and whole answers were errors."""
        says(f"<think>hm</think>ok{call}")
        whole, streamed = answers(served, endpoint, max_tokens=len(f"<think>hm</think>ok{call}"))
        assert whole == streamed
        assert (whole["text"], whole["thought"], whole["calls"]) == ("ok", "hm", [])
        assert whole.get("reason", "length") == "length"
        assert served.engine.running == 0

    @pytest.mark.slow
    @pytest.mark.parametrize(("endpoint", "end"), [("chat/completions", "\n</tool_call>"), ("responses", "\n")])
    @pytest.mark.parametrize("call", ["[1]", '{"arguments": {}}', '{"name": "f"}', '{"name": 5, "arguments": {}}'])
    def test_json_that_is_no_call(self, served: Served, says: Says, endpoint: str, call: str, end: str) -> None:
        """Streams hung with all requests of their batch, and whole answers were 500."""
        text = f"ok<tool_call>\n{call}{end}"
        says(text)
        whole, streamed = answers(served, endpoint, max_tokens=len(text))
        assert whole == streamed
        assert (whole["text"], whole["calls"], whole.get("reason", "length")) == ("ok", [], "length")
        assert served.engine.running == 0

    def test_a_chat_after_a_call(self, served: Served) -> None:
        """The template receives all fields of the messages."""
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "said", "reasoning_content": "thought", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "result"},
        ]
        items = [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "thought"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "said", "annotations": []}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 7}'},
            {"type": "function_call_output", "call_id": "1", "output": "result"},
        ]
        prompt = (
            "f<|im_start|>user\nhi<|im_start|>assistant\nthoughtsaid7<|im_start|>tool\nresult<|im_start|>assistant\n"
        )
        expected = len(served.tokenizer(prompt).input_ids)
        for path, fields in (
            ("chat/completions", {"messages": messages, "tools": [TOOL]}),
            ("responses", {"input": items, "tools": [TOOL]}),
        ):
            status, text = served.send(f"/v1/{path}", {**fields, "max_tokens": 2})
            assert status == 200, text
            usage = json.loads(text)["usage"]
            assert usage.get("prompt_tokens", usage.get("input_tokens")) == expected

    def test_without_a_template_for_answers(self, served: Served, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(served.folder, tmp_path / "plain"))
        (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        with serving(folder, EVERY_LAYER) as plain:
            for path, fields in (
                ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
                ("responses", {"input": "hi"}),
            ):
                status, text = plain.send(f"/v1/{path}", {**fields, "tools": [TOOL]})
                assert status == 400
                assert "tools is not supported: the tokenizer has no template for answers" in text


class TestResponses:
    @pytest.mark.slow
    def test_openai_client(self, served: Served, says: Says) -> None:
        says("abcdef")
        client = served.client()
        answer = client.responses.create(model=NAME, input="hi", instructions="be brief", max_output_tokens=4)
        assert answer.output_text == "abcd"
        with client.responses.stream(model=NAME, input="hi", max_output_tokens=4) as stream:
            assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == "abcd"

    @pytest.mark.slow
    @pytest.mark.parametrize(("said", "text"), [("ok{}", "ok"), ("ok{}, so{}", "ok, so"), ("<think>hm</think>{}", "")])
    def test_events_of_calls(self, served: Served, says: Says, said: str, text: str) -> None:
        """Each item has its own index: a message was sent again at that of the call, and openai's client broke."""
        says(said.format(CALL, CALL))
        num_tokens = len(said.format(CALL, CALL))
        tool: Any = {"type": "function", "name": "f", "parameters": {}}
        asked: Any = {"model": NAME, "input": "hi", "tools": [tool], "max_output_tokens": num_tokens}
        with served.client().responses.stream(**asked) as stream:
            items = [(each.output_index, each.item.id) for each in stream if each.type == "response.output_item.done"]
            answer = stream.get_final_response()
        assert answer.output_text == text
        assert items == list(enumerate(item.id for item in answer.output))
        assert [item.type for item in answer.output].count("function_call") == said.count("{}")

    def test_instructions_before_a_system_message(self, served: Served) -> None:
        """Both reach the template; the message was dropped."""
        given = [{"role": "system", "content": "in French"}, HI]
        status, text = served.send("/v1/responses", {"input": given, "instructions": "be brief", "max_tokens": 1})
        assert status == 200, text
        turns = ["system\nbe brief", "system\nin French", "user\nhi", "assistant\n"]
        expected = len(served.tokenizer("".join(f"<|im_start|>{turn}" for turn in turns)).input_ids)
        assert json.loads(text)["usage"]["input_tokens"] == expected

    @pytest.mark.slow
    @pytest.mark.parametrize(("given", "message"), [
        ([HI, {"type": "image_generation_call"}], "input: expected a text or a list of messages"),
        ([HI, {"type": "function_call"}], "input: expected a text or a list of messages"),
        ([{"type": 5}], "input: expected a text or a list of messages"),
        ([], "messages"),
        ([{"role": "user", "text": "hi"}], "content: expected a text"),
        ([HI, {"role": "assistant", "content": None}], "content: expected a text"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "content.0.type: Input should"),
        ([{"type": "input_image", "image_url": "x"}], "content.0.type: Input should"),
        ([{"role": "user", "content": 5}], "content: Input should be a valid list"),
        (5, "input"),
    ])  # fmt: skip
    @pytest.mark.parametrize("stream", [False, True])
    def test_mistakes(self, served: Served, given: Any, message: str, stream: bool) -> None:
        status, text = served.send("/v1/responses", {"input": given, "stream": stream})
        assert status == 400, text
        assert message in json.loads(text)["error"]["message"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("llama")
    write_llama_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


class TestTokenText:
    @pytest.mark.slow
    @given(st.lists(st.integers(3, 198).filter(lambda token: token not in (4, 5, 6))), st.text("ab \n", max_size=9))
    def test_any_tokens_behind_a_prompt(self, llama: Tokenizer, tokens: list[int], prompt: str) -> None:
        """The text of all, less that of the prompt."""
        before = llama.encode(prompt).ids
        text = TokenText(llama.decode, before)
        whole = llama.decode([*before, *tokens])[len(llama.decode(before)) :]
        if before:
            assert "".join(map(text.add, [*tokens, None])) == whole
        alone = TokenText(llama.decode)
        assert "".join(map(alone.add, [*tokens, None])) == llama.decode(tokens)

    @pytest.mark.parametrize(("pieces", "text"), [
        ("a <0x0A> \u2581b", ["a", "\n", " b"]),
        ("a <0xC3> <0xA9> \u2581b", ["a", "", "\u00e9", " b"]),
        ("a <0x0A> <0xFF> \u2581b", ["a", "\n", "", "\ufffd b"]),
        ("a <0x0A> <0xC3> <0xFF>", ["a", "\n", "", "", "\ufffd\ufffd"]),
        ("a </s> \u2581b", ["a", "", " b"]),
    ])  # fmt: skip
    def test_bytes(self, llama: Tokenizer, pieces: str, text: list[str]) -> None:
        """A space behind a byte that is no UTF-8 was lost, or the last bytes of an answer."""
        found = TokenText(llama.decode)
        tokens = [llama.token_to_id(piece) for piece in pieces.split()]
        assert [found.add(token) for token in [*tokens, None]] == [*text, ""][: len(tokens) + 1]
