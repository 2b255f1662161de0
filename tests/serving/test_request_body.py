"""The promise: a request is carried out as it is written, or refused with the field, what was expected, and the fix."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from headrace.serving import request_body
from headrace.serving.request_body import Chat, Completion, GenerationRequest, RequestError, _log_ignored, read
from headrace.serving.sampling import read_sampling

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


KINDS: list[tuple[type[GenerationRequest], dict[str, Any]]] = [
    (Completion, {"prompt": "hi"}),
    (Chat, CHAT),
    (request_body.Response, {"input": "hi"}),
]


def refusal(body: dict[str, Any]) -> str:
    with pytest.raises(RequestError) as caught:
        read(Chat if "messages" in body else Completion, body)
    assert caught.value.status == 400
    return str(caught.value)


# Fields whose other values would change the answer: a value that does, and those that do not.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (3, 1),
    "function_call": ("auto", "none"),
    "functions": ([{"name": "f"}], []),
    "guided_json": ({"type": "object"},),
    "modalities": (["audio"], ["text"]),
    "previous_response_id": ("resp_1",),
    "reasoning": ({"effort": "low"}, {}),
    "reasoning_effort": ("low",),
    "skip_special_tokens": (False, True),
    "suffix": ("x", ""),
    "truncation": ("auto", "disabled"),
    "use_beam_search": (True, False),
}


@pytest.mark.parametrize(("kind", "body"), KINDS)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_no_endpoint_carries_out(kind: type[GenerationRequest], body: dict[str, Any], name: str) -> None:
    asked, *neutral = UNSUPPORTED[name]
    with pytest.raises(RequestError, match=f"^'?{name}'?.* is not supported") as caught:
        read(kind, {**body, name: asked})
    assert (caught.value.status, caught.value.field) == (400, name)
    for value in (None, *neutral):
        assert read(kind, {**body, name: value}).model_dump(include={"prompt", "messages", "input"})


@pytest.mark.parametrize(("given", "seconds"), [
    (0, 0), (2.5, 2.5), (-1, None), (-0.5, None), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("250ms", 0.25),
    ("0s", 0), ("-1m", None), (None, None),
])  # fmt: skip
def test_keep_alive(given: Any, seconds: float | None) -> None:
    """As Ollama has it (https://github.com/ollama/ollama/blob/main/docs/faq.md)."""
    for kind, body in KINDS:
        assert read(kind, {**body, "keep_alive": given}).keep_alive == seconds


@pytest.mark.parametrize(
    "given",
    ["", "5", "m", "5 m", "5m!", "forever", "--1s", True, [5], {"s": 5}, 1e400, pytest.param(10**400, id="long")],
)
def test_no_keep_alive(given: Any) -> None:
    kind, body = KINDS[0]
    with pytest.raises(RequestError, match="keep_alive: ") as caught:
        read(kind, {**body, "keep_alive": given})
    assert (caught.value.status, caught.value.field) == (400, "keep_alive")


@pytest.mark.parametrize(("kind", "body"), KINDS)
@pytest.mark.parametrize("name", [
    "user", "cache_prompt", "num_ctx", "prompt_cache_retention", "store", "metadata", "verbosity",
])  # fmt: skip
def test_what_changes_no_answer(
    kind: type[GenerationRequest], body: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    _log_ignored.cache_clear()
    with caplog.at_level("INFO"):
        for _ in range(3):
            read(kind, {**body, name: "anything"})
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} in requests is ignored: it changes no answer"
    ]


@pytest.mark.parametrize(("fields", "message"), [
    ({"best_of": 2}, "best_of = 2 is not supported (expected 1); leave it out, or use a server that has it"),
    ({"n": 0}, "n: Input should be greater than or equal to 1, found 0"),
    ({"n": 129}, "n: Input should be less than or equal to 128, found 129"),
    ({"logprobs": True}, "logprobs: Input should be a valid integer, found true"),
    ({"logprobs": 21}, "logprobs: Input should be less than or equal to 20, found 21"),
    ({"echo": 0}, "echo: Input should be a valid boolean, found 0"),
    ({"top_logprobs": 2}, "top_logprobs = 2 is not supported (expected 0)"),
    ({"repetition_penalty": 0}, "repetition_penalty: Input should be greater than 0, found 0"),
    ({"min_tokens": -1}, "min_tokens: Input should be greater than or equal to 0, found -1"),
    ({"stop": [""]}, "stop.0: String should have at least 1 character, found \"\""),
    ({"stop": ["x"] * 65}, "stop: List should have at most 64 items"),
    ({"stop": 5}, "stop: Input should be a valid list, found 5"),
    ({"temprature": 1}, "'temprature' is not supported; did you mean 'temperature'?"),
    ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1, found 0"),
    ({"max_tokens": True}, "max_tokens: Input should be a valid integer, found true"),
    ({"temperature": 2.5}, "temperature: Input should be less than or equal to 2, found 2.5"),
    ({"temperature": float("nan")}, "temperature: Input should be a finite number, found NaN"),
    ({"temperature": 1e-9}, "temperature: expected 0 (greedy), or from 0.01 to 2"),
    ({"temperature": 10**400}, "temperature: Input should be"),
    ({"prompt": "a\ud800"}, "prompt: 'utf-8' codec can't encode character '\\ud800' in position 1"),
    ({"top_p": 0}, "top_p: Input should be greater than 0, found 0"),
    ({"min_p": 1.5}, "min_p: Input should be less than or equal to 1, found 1.5"),
    ({"presence_penalty": "1"}, "presence_penalty: Input should be a valid number, found \"1\""),
    ({"frequency_penalty": -3}, "frequency_penalty: Input should be greater than or equal to -2, found -3"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5: Input should be less than or equal to 100, found 101"),
    ({"logit_bias": {"a": 1}}, "logit_bias.a.[key]: String should match pattern"),
    ({"logit_bias": [5]}, "logit_bias: Input should be a valid dictionary, found [5]"),
    ({"bad_words": "x"}, "bad_words: Input should be a valid list, found \"x\""),
    ({"bad_words": ["x", ""]}, "bad_words.1: String should have at least 1 character"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0: Input should be greater than or equal to 0, found -1"),
    ({"allowed_token_ids": ["5"]}, "allowed_token_ids.0: Input should be a valid integer, found \"5\""),
    ({"top_k": -2}, "top_k: Input should be greater than or equal to -1, found -2"),
    ({"seed": 2**70}, "seed: Input should be less than"),
    ({"stream": "yes"}, "stream: Input should be a valid boolean, found \"yes\""),
    ({"stream_options": {"include_usage": True}}, 'stream_options: expected "stream": true beside it'),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats = true is"),
    ({"model": 5}, "model: Input should be a valid string, found 5"),
    ({"prompt": None}, "prompt: Field required, found {}"),
    *(
        ({"prompt": wrong}, "prompt: expected a text, token ids, or a list of texts or of lists of token ids, found")
        for wrong in ("", [], ["a", ""], [1, "a"], [[1], []], [[1], [True]], [-1], [[-1]], [1.0], {"a": 1}, [None], 5)
    ),
])  # fmt: skip
def test_what_a_completion_cannot_have(fields: dict[str, Any], message: str) -> None:
    assert message in refusal({"prompt": "hi", **fields})


@pytest.mark.parametrize(("fields", "message"), [
    ({"tools": "f"}, "tools: Input should be a valid list, found \"f\""),
    ({"logprobs": 5}, "logprobs: Input should be a valid boolean, found 5"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: Input should be less than or equal to 20, found 21"),
    ({"top_logprobs": 2}, 'top_logprobs: expected "logprobs": true beside it'),
    ({"echo": True}, "echo = true is not supported (expected false)"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema: Field required"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos: expected false beside a format"),
    ({"tool_choice": "required"}, "tool_choice: expected one of the tools beside it, []"),
    ({"tool_choice": "any"}, "tool_choice: expected \"auto\", \"none\", \"required\" or"),
    ({"reasoning_effort": "low"}, "reasoning_effort = \"low\" is not supported (expected null)"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs: Input should be a valid dictionary, found 1"),
    ({"messages": []}, "messages: List should have at least 1 item after validation, not 0, found []"),
    ({"messages": "hi"}, "messages: Input should be a valid list, found \"hi\""),
    ({"messages": ["hi"]}, "messages.0: Input should be a valid dictionary or instance of Message, found \"hi\""),
    ({"messages": [{"content": "hi"}]}, "messages.0.role: Field required, found {\"content\": \"hi\"}"),
    ({"messages": [{"role": "user"}]}, "messages.0: content: expected a text"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input should be a valid list, found 5"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type: Input should be 'text', 'input_text' or 'output_text', found \"image_url\"",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
        "messages.0.tool_calls.0.function: Field required",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages.0.tool_calls.0.function.arguments: Invalid JSON",
    ),
])  # fmt: skip
def test_what_a_chat_cannot_have(fields: dict[str, Any], message: str) -> None:
    assert message in refusal({**CHAT, **fields})


# -- bodies of clients -------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "What is in a.txt?"}
TEXT = {"type": "text", "text": "What is in a.txt?"}
CACHED = {**TEXT, "cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": []}
FUNCTION = {"type": "function", "function": {"name": "read", "description": "", "parameters": SCHEMA}}
TOOLS = [FUNCTION]
STRICT = [{"type": "function", "function": {**FUNCTION["function"], "strict": False}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.txt"}'}}
EMPTY = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": ""}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "ok"}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def turn(**fields: Any) -> list[Any]:
    """The history of an agent: a question, a message with a call, and its result."""
    return [USER, {"role": "assistant", "content": None, "tool_calls": [CALL], **fields}, RESULT]


def echoed(**fields: Any) -> list[Any]:
    return [USER, {"role": "assistant", "content": "It is empty.", **fields}, USER]


# As each sends them, with what its servers answered put into the next turn.
CLIENTS: dict[str, dict[str, Any]] = {
    "openai, a message of an answer": {"messages": turn(refusal=None, annotations=[], audio=None, function_call=None)},
    "openai, pieces of a stream": {"messages": turn(tool_calls=[{**CALL, "index": 0}]), "tools": TOOLS},
    "openai, parsed": {"messages": turn(parsed=None), "tools": STRICT, "parallel_tool_calls": False},
    "openai, labels": {**CHAT, "store": False, "metadata": {"a": "b"}, "prompt_cache_key": "k", "verbosity": "low"},
    "openai, cache": {**CHAT, "prompt_cache_retention": "24h", "safety_identifier": "u", "service_tier": "auto"},
    "openai, no tools this time": {"messages": turn(), "tools": TOOLS, "tool_choice": "none"},
    "openai, agents": {"messages": turn(content=""), "tools": TOOLS, "tool_choice": "auto", "stream": False},
    "langchain": {"messages": turn(), "model": "m", "stream": False, "temperature": 0.7, "n": 1},
    "langchain, streamed": {"messages": turn(tool_calls=[EMPTY]), "tools": TOOLS, **USAGE},
    "langchain, parts": {"messages": [{"role": "user", "content": [{**TEXT, "id": "lc_1", "index": 0}]}]},
    "langchain, js": {**CHAT, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "n": 1, "stream": False},
    "langgraph": {"messages": turn(name="agent"), "tools": TOOLS, "parallel_tool_calls": False},
    "litellm": {"messages": turn(provider_specific_fields=None, reasoning_content="hm"), "tools": TOOLS},
    "litellm, of anthropic": {"messages": turn(thinking_blocks=[{"type": "thinking", "thinking": "hm"}])},
    "litellm, cached": {"messages": [{"role": "system", "content": [CACHED]}, USER], "temperature": 0.0},
    "litellm, of ollama": {**CHAT, "num_ctx": 8192, "keep_alive": "5m"},
    "open webui": {**CHAT, "model": "m", "stream": True},
    "open webui, usage": {**CHAT, **USAGE, "temperature": 0.8, "top_p": 0.9, "max_tokens": 128, "stop": ["</s>"]},
    "open webui, titles": {**CHAT, "stream": False, "max_completion_tokens": 1000, "metadata": {"task": "title"}},
    "open webui, ids": {"messages": echoed(id="m1")},
    "continue": {**CHAT, "max_tokens": 4096, "temperature": 0, "stop": ["<|im_end|>"], "stream": True},
    "continue, tools": {"messages": turn(content=" "), "tools": TOOLS, "tool_choice": "auto", **USAGE},
    "cline": {"messages": [{"role": "user", "content": [TEXT, CACHED]}], "temperature": 0, **USAGE},
    "cline, tools": {"messages": turn(reasoning_details=[{"type": "reasoning.text", "text": "hm"}]), "tools": TOOLS},
    "roo": {"messages": [{"role": "system", "content": "s", "cache_control": {"type": "ephemeral"}}, USER], **USAGE},
    "aider": {"messages": [USER, {"role": "assistant", "content": "Ok."}, USER], "temperature": 0, "stream": True},
    "aider, cached": {"messages": [{"role": "user", "content": [CACHED]}], "stream": True},
    "llamaindex": {"messages": turn(), "model": "m", "stream": False, "temperature": 0.1, "tools": STRICT},
    "vercel": {"messages": turn(content=""), "tools": TOOLS, "tool_choice": "auto", "max_tokens": 512, **USAGE},
    "vercel, reasoning": {"messages": echoed(reasoning_content="hm")},
    "n8n": {"messages": turn(content=""), "tools": TOOLS, "parallel_tool_calls": True, "top_p": 1, "temperature": 0.7},
    "vllm, its answer": {"messages": turn(reasoning="hm", content=None, refusal=None)},
    "vllm, both names": {"messages": echoed(reasoning="hm", reasoning_content="hm")},
    "vllm, cut within reasoning": {"messages": [USER, {"role": "assistant", "content": None, "reasoning": "hm"}, USER]},
    "vllm, benchmark": {**CHAT, "ignore_eos": True, "request_id": "r", "priority": 0, **USAGE},
    "llama.cpp": {**CHAT, "cache_prompt": True, "timings_per_token": True, "stream": True},
    "ollama, arguments": {"messages": turn(tool_calls=[{"function": {"name": "read", "arguments": {"path": "a"}}}])},
}


@pytest.mark.parametrize("body", CLIENTS.values(), ids=CLIENTS)
def test_bodies_of_clients(body: dict[str, Any]) -> None:
    wanted = read(Chat, json.loads(json.dumps(body)))
    assert [message.role for message in wanted.messages] == [message["role"] for message in body["messages"]]
    assert (wanted.tools or []) == ([] if body.get("tool_choice") == "none" else body.get("tools", []))
    read_sampling(wanted, GenerationConfig())


def test_what_clients_send_back_is_read() -> None:
    read_all = [read(Chat, CLIENTS[name]).messages[1] for name in CLIENTS if len(CLIENTS[name]["messages"]) == 3]
    calls = [call for message in read_all for call in message.tool_calls or []]
    assert [call.function.arguments for call in calls].count({}) == 1
    assert {"path": "a.txt"} in [call.function.arguments for call in calls]
    assert [message.reasoning_content for message in read_all].count("hm") == 5
    assert read(Chat, CLIENTS["langgraph"]).model_dump()["parallel_tool_calls"] is False


@pytest.mark.parametrize("fields", [{"prefix": True}, {"content": [{**TEXT, "video": "x"}]}, {"tool_calls": [
    {**CALL, "function": {**CALL["function"], "arguments": "a.txt"}}]}])  # fmt: skip
def test_what_a_message_cannot_have(fields: dict[str, Any]) -> None:
    assert "messages.1" in refusal({"messages": echoed(**fields)})


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_the_name_of_a_length_that_is_not_null(name: str) -> None:
    """Clients send the others as null."""
    lengths = dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"))
    assert read(Chat, {**CHAT, **lengths, name: 5}).max_tokens == 5


@pytest.mark.parametrize(("kind", "body"), KINDS[1:])
def test_tools_are_functions(kind: type[GenerationRequest], body: dict[str, Any]) -> None:
    tools = [{"function": {"name": "f", "parameters": {"default": None}}, "type": "function"}]
    assert str(read(kind, {**body, "tools": tools}).model_dump(exclude_none=True)["tools"]) == str(tools)
    with pytest.raises(RequestError, match=r'tools\.1: expected "type": "function", found {"type": "web_search"}'):
        read(kind, {**body, "tools": [*tools, {"type": "web_search"}]})


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
def test_what_greedy_decoding_does_not_read(name: str) -> None:
    """Refused, unless the request says that it is greedy, or the value changes nothing."""
    asked = {"prompt": "hi", name: 0.5 if name != "top_k" else 5}
    with pytest.raises(RequestError, match=f"{name} has no effect on greedy decoding, the default here"):
        read_sampling(read(Completion, asked), GenerationConfig())
    for more in ({"temperature": 0}, {"temperature": 1}, {name: 1}):
        read_sampling(read(Completion, {**asked, **more}), GenerationConfig())


def test_contents_of_several_parts_are_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    wanted = read(Chat, {"messages": [{"role": "user", "content": parts, "name": None}], "max_completion_tokens": 5})
    assert wanted.model_dump(exclude_none=True)["messages"] == [{"role": "user", "content": parts}]
    assert wanted.max_tokens == 5


@pytest.mark.parametrize(("given", "prompts"), [
    ("hi", ["hi"]), (["hi", "you"], ["hi", "you"]), ([1, 0], [[1, 0]]), ([[1], [2, 3]], [[1], [2, 3]]),
])  # fmt: skip
def test_prompts_are_texts_or_tokens(given: Any, prompts: list[Any]) -> None:
    assert read(Completion, {"prompt": given}).prompt == prompts


def test_what_is_carried_out() -> None:
    wanted = read(
        Completion,
        {
            "prompt": ["hi"], "model": "m", "max_tokens": 3, "temperature": 1, "top_p": 0.5, "top_k": -1, "seed": 4,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "stop": "x",
        },
    )  # fmt: skip
    assert (wanted.prompt, wanted.model, wanted.stream, wanted.stop) == (["hi"], "m", True, ["x"])
    assert (wanted.max_tokens, wanted.temperature, wanted.top_p, wanted.top_k, wanted.seed) == (3, 1.0, 0.5, -1, 4)
    assert wanted.ignore_eos
    assert wanted.stream_options is not None
    assert wanted.stream_options.include_usage


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=5,
)
NAMES = [
    "prompt", "messages", "model", "n", "stream", "stream_options", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "top_k", "seed", "ignore_eos", "stop", "logprobs", "echo", "chat_template_kwargs", "tools",
    "input", "other",
]  # fmt: skip


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(NAMES), JSON))
def test_any_json_is_read_or_refused(body: dict[str, Any]) -> None:
    for kind, _ in KINDS:
        with suppress(RequestError):
            read(kind, body)
