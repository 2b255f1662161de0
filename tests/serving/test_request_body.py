"""The promise: a request is carried out as it is written, or refused with the field, what was expected, and the fix."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.serving.request_body import RequestError, read_chat, read_completion

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def refusal(body: dict[str, Any]) -> str:
    with pytest.raises(RequestError) as caught:
        (read_chat if "messages" in body else read_completion)(body, *([["tools"]] if "messages" in body else []))
    assert caught.value.status == 400
    return str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "best_of": 1, "echo": False, "logprobs": None, "suffix": ""},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}},
        {"stop": None, "user": "me", "min_p": 0.0, "use_beam_search": False},
    ],
)
def test_a_neutral_value_is_as_good_as_none(fields: dict[str, Any]) -> None:
    assert read_completion({"prompt": "hi", **fields}) == read_completion({"prompt": "hi"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 2}, "n = 2 would have no effect here (expected 1); leave it out, or use a server that has it"),
        ({"logprobs": 0}, "logprobs = 0 would have no effect here (expected false)"),
        ({"logprobs": 5}, "logprobs = 5 would have no effect"),
        ({"echo": True}, "echo = true would have no effect"),
        ({"echo": 0}, "echo = 0 would have no effect"),
        ({"best_of": 3}, "best_of = 3"),
        ({"presence_penalty": 0.5}, "presence_penalty = 0.5 would"),
        ({"frequency_penalty": -1}, "frequency_penalty = -1 would"),
        ({"repetition_penalty": 1.05}, "repetition_penalty = 1.05 would"),
        ({"logit_bias": {"5": 1}}, "logit_bias = {\"5\": 1} would"),
        ({"stop": ["\n"]}, "stop = [\"\\n\"] would have no effect here (expected [] or \"\")"),
        ({"suffix": "x"}, "suffix = \"x\" would"),
        ({"temprature": 1}, "'temprature' is no field that this server knows; did you mean 'temperature'?"),
        ({"max_tokens": 0}, "max_tokens: expected an integer, at least 1, found 0"),
        ({"max_tokens": 1.5}, "max_tokens: expected an integer, at least 1, found 1.5"),
        ({"max_tokens": True}, "max_tokens: expected an integer, at least 1, found true"),
        ({"max_tokens": "many"}, "max_tokens: expected an integer, at least 1, found \"many\""),
        ({"temperature": 2.5}, "temperature: expected a number, from 0 to 2, found 2.5"),
        ({"temperature": float("nan")}, "temperature: expected a number, from 0 to 2, found NaN"),
        ({"temperature": 1e-9}, "temperature = 1e-09: expected 0 (greedy), or from 0.01 to 2"),
        ({"temperature": 10**400}, "temperature: expected a number, from 0 to 2, found 1000"),
        ({"prompt": "a\ud800"}, 'prompt: expected a text, found "a\\ud800"'),
        ({"top_p": 0}, "top_p = 0: expected a probability above 0"),
        ({"top_k": -2}, "top_k: expected an integer, at least -1, found -2"),
        ({"seed": 2**70}, "seed: expected an integer"),
        ({"stream": "yes"}, "stream: expected true or false, found \"yes\""),
        ({"stream_options": {"include_usage": True}}, 'expected {"include_usage": true} beside "stream": true'),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats would have no"),
        ({"model": 5}, "model: expected a name, found 5"),
        ({"prompt": None}, "prompt: expected a text, found null"),
        ({"prompt": ""}, "prompt: expected a text, found \"\""),
        ({"prompt": ["a", "b"]}, "prompt: expected a text, found [\"a\", \"b\"]; send one prompt per request"),
        ({"prompt": [1, 2, 3]}, "prompt: expected a text, found [1, 2, 3]"),
        ({"prompt": [5]}, "prompt: expected a text, found 5"),
    ],
)  # fmt: skip
def test_what_a_completion_cannot_have(fields: dict[str, Any], message: str) -> None:
    assert message in refusal({"prompt": "hi", **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools = [{\"type\": \"function\"}] would have no effect"),
        ({"tool_choice": "required"}, "tool_choice = \"required\" would"),
        ({"logprobs": True}, "logprobs = true would"),
        ({"top_logprobs": 2}, "top_logprobs = 2 would"),
        ({"response_format": {"type": "json_object"}}, "response_format = {\"type\": \"json_object\"} would"),
        ({"reasoning_effort": "low"}, "reasoning_effort = \"low\" would have no effect here (expected null)"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens and max_tokens differ"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs: expected variables of the chat template"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs: expected variables"),
        ({"messages": []}, "messages: expected a list of messages, found []"),
        ({"messages": "hi"}, "messages: expected a list of messages, found \"hi\""),
        ({"messages": ["hi"]}, "messages[0]: expected an object with role and content, found \"hi\""),
        ({"messages": [{"content": "hi"}]}, "messages[0]: expected an object with role and content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: expected a text"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: expected a text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content: expected a text, or a list of",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls would have no effect here",
        ),
    ],
)  # fmt: skip
def test_what_a_chat_cannot_have(fields: dict[str, Any], message: str) -> None:
    assert message in refusal({**CHAT, **fields})


def test_contents_of_several_parts_are_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    wanted = read_chat({"messages": [{"role": "user", "content": parts, "name": None}], "max_completion_tokens": 5})
    assert wanted.body["messages"] == [{"role": "user", "content": parts}]
    assert wanted.max_tokens == 5


def test_what_is_carried_out() -> None:
    wanted = read_completion(
        {
            "prompt": ["hi"], "model": "m", "max_tokens": 3, "temperature": 1, "top_p": 0.5, "top_k": -1, "seed": 4,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }
    )  # fmt: skip
    assert wanted.body == {"prompt": "hi", "model": "m", "stream": True}
    assert (wanted.max_tokens, wanted.temperature, wanted.top_p, wanted.top_k, wanted.seed) == (3, 1.0, 0.5, 0, 4)
    assert wanted.ignore_eos
    assert wanted.include_usage


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=5,
)
NAMES = [
    "prompt", "messages", "model", "n", "stream", "stream_options", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "top_k", "seed", "ignore_eos", "stop", "logprobs", "echo", "chat_template_kwargs", "tools",
    "other",
]  # fmt: skip


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(NAMES), JSON))
def test_any_json_is_read_or_refused(body: dict[str, Any]) -> None:
    for read in (read_completion, read_chat):
        with suppress(RequestError):
            read(body)
