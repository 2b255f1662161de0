"""The promise: an answer has the format that its request asks for, or the request is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.serving.structured import Grammars
from served_answers import HI, answering, answers
from servers import Served

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"$ref": "#/$defs/B"}},
    "$defs": {"B": {"type": "integer", "minimum": 3, "maximum": 9}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g\u00e9")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with answering(tmp_path_factory.mktemp("structured") / "model") as running:
        yield running


def is_valid(text: str) -> bool:
    found = json.loads(text)
    return found.keys() == {"a", "b"} and found["a"] in ("x", "yy") and 3 <= found["b"] <= 9


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("endpoint", ["completions", "chat/completions", "responses"])
def test_json_of_a_schema(served: Served, endpoint: str, temperature: float) -> None:
    named = {"name": "n", "schema": SCHEMA, "strict": True}
    fields: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": named}}
    if endpoint == "responses":
        fields = {"text": {"format": {"type": "json_schema", **named}}}
    seed = {"seed": 3} if temperature else {}
    whole, streamed = answers(served, endpoint, **fields, **seed, temperature=temperature, max_tokens=200)
    assert whole == streamed
    assert is_valid(whole["text"])
    assert whole.get("reason", "stop") == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g\u00e9"}}])
def test_a_call_that_has_to_be(served: Served, choice: Any) -> None:
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 300}
    whole, streamed = answers(served, "chat/completions", **fields, temperature=1, seed=5)
    assert whole == streamed
    (call,) = whole["calls"]
    assert call["name"] in (("f", "g\u00e9") if choice == "required" else ("g\u00e9",))
    assert is_valid(call["arguments"])
    assert whole["reason"] == "tool_calls"


def test_a_grammar_is_made_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all prompts and answers of a request, each of which is as far with it as its own text."""
    made: list[Any] = []
    read = Grammars.processor
    monkeypatch.setattr(Grammars, "processor", lambda *given: made.append(given) or read(*given))
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    fields = {"prompt": ["hi", "ho"], "n": 3, "temperature": 1, "seed": 3, "max_tokens": 200}
    status, text = served.send("/v1/completions", {**fields, "response_format": named})
    assert (status, len(made)) == (200, 1)
    assert all(is_valid(choice["text"]) for choice in json.loads(text)["choices"])


@pytest.mark.parametrize("schema", [{"type": "foo"}, {"type": "string", "pattern": "(?=a)b"}, {"uniqueItems": True}])
def test_a_schema_that_is_refused(served: Served, schema: Any) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    status, text = served.send("/v1/chat/completions", {"messages": [HI], "response_format": asked})
    assert (status, json.loads(text)["error"]["param"]) == (400, "response_format")


def test_without_the_extra(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    asked = {"messages": [HI], "response_format": {"type": "json_object"}}
    status, text = served.send("/v1/chat/completions", asked)
    assert status == 400
    assert "response_format needs llguidance, which the server lacks: pip install 'headrace[structured]'" in text
