"""The promise: Anthropic's clients get what a chat answers, in their form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from served_answers import HI, answering, answers, saying
from servers import NAME, Served

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOL: Any = {"name": "f", "description": "", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with answering(tmp_path_factory.mktemp("messages") / "model") as running:
        yield running


@pytest.fixture
def says(served: Served, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return saying(served, monkeypatch)


def client(served: Served) -> Any:
    from anthropic import Anthropic  # on demand, as it takes half a second in each process of the tests

    return Anthropic(base_url=served.url, api_key="none", max_retries=0)


def asked(**fields: Any) -> Any:
    return {"model": NAME, "messages": [HI], "max_tokens": 8, **fields}


@pytest.mark.slow
def test_an_answer_is_that_of_a_chat(served: Served) -> None:
    whole, _ = answers(served, "chat/completions", max_tokens=8)
    before = served.handle.stats().bytes_moved
    message = client(served).messages.create(**asked())
    assert served.handle.stats().bytes_moved > before
    assert "".join(block.text for block in message.content if block.type == "text") == whole["text"]
    assert (message.stop_reason, message.model, message.role) == ("max_tokens", NAME, "assistant")
    counts = (message.usage.input_tokens, message.usage.output_tokens)
    assert counts == (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"])


@pytest.mark.slow
@pytest.mark.parametrize(("said", "fields", "blocks", "reason"), [
    ("abc", {"max_tokens": 3}, [("text", "abc")], "max_tokens"),
    ("abcdef", {"stop_sequences": ["de"]}, [("text", "abc")], "stop_sequence"),
    (f"<think>hm</think>ok{CALL}{CALL}", {"tools": [TOOL]},
     [("thinking", "hm"), ("text", "ok"), ("tool_use", {"x": 1}), ("tool_use", {"x": 1})], "tool_use"),
    (f"{CALL}{CALL}", {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
     [("tool_use", {"x": 1})], "tool_use"),
])  # fmt: skip
def test_blocks(
    served: Served, says: Callable[[str], None], said: str, fields: Any, blocks: list[Any], reason: str
) -> None:
    says(said)
    fields = {"max_tokens": len(said), **fields}
    message = client(served).messages.create(**asked(**fields))
    with client(served).messages.stream(**asked(**fields)) as stream:
        streamed = stream.get_final_message()
    for found in (message, streamed):
        values = [block.input if block.type == "tool_use" else getattr(block, block.type) for block in found.content]
        assert list(zip([block.type for block in found.content], values, strict=True)) == blocks
        assert (found.stop_reason, found.stop_sequence) == (reason, "de" if reason == "stop_sequence" else None)
    assert message.usage == streamed.usage


def test_a_conversation(served: Served) -> None:
    """All parts reach the template, as those of a chat of OpenAI's."""
    messages = [
        HI,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "thought", "signature": ""},
            {"type": "text", "text": "said"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 7}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "result"}]},
            {"type": "text", "text": "and"},
        ]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}}]
    found = client(served).messages.create(**asked(messages=messages, system=system, tools=[TOOL], max_tokens=1))
    turns = ["system\nbrief", "user\nhi", "assistant\nthoughtsaid7", "tool\nresult", "user\nand", "assistant\n"]
    prompt = "f" + "".join(f"<|im_start|>{turn}" for turn in turns)
    assert found.usage.input_tokens == len(served.tokenizer(prompt).input_ids)


@pytest.mark.parametrize(("fields", "message"), [
    ({"max_tokens": None}, "max_tokens: Field required"),
    ({"messages": []}, "messages: List should have at least 1 item"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content of type 'image' is not supported"),
    ({"messages": [{"role": "user"}]}, "messages, system or tools: KeyError: 'content'"),
    ({"messages": 5}, "messages, system or tools: TypeError"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "a tool of type 'web_search_20250305'"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice: expected one of the tools"),
    ({"n": 2}, "n = 2 is not supported"),
    ({"logprobs": True}, "logprobs = true is not supported"),
    ({"temperature": 3}, "temperature: Input should be less than or equal to 2"),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes(served: Served, fields: dict[str, Any], message: str, stream: bool) -> None:
    status, text = served.send("/v1/messages", {**asked(**fields), "stream": stream})
    assert (status, json.loads(text)["type"]) == (400, "error")
    assert message in json.loads(text)["error"]["message"]
