"""``/v1/messages``, by Anthropic's API (https://docs.anthropic.com/en/api/messages), as a chat of OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from headrace.serving.answers import Piece
from headrace.serving.endpoint import Event, Items, ServedModel
from headrace.serving.request_body import OneChat, RequestError

_RENAMED = {"stop_sequences": "stop"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TYPES = {"text": "text", "reasoning": "thinking", "call": "tool_use"}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class Messages(Items):
    """One request to ``/v1/messages``, whose answer is a list of content blocks."""

    kind, prefix = OneChat, "msg_"

    def __init__(self, served: ServedModel, body: Mapping[str, Any]) -> None:
        super().__init__(served, _chat(body))

    def _message(self, content: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        usage = {"input_tokens": len(self.prompts[0]), "output_tokens": self.answers[0].num_tokens}
        about = {"id": self.id, "type": "message", "role": "assistant", "model": self.served.names[0]}
        return {**about, "content": content, "stop_reason": None, "stop_sequence": None, "usage": usage, **more}

    def _end(self) -> dict[str, Any]:
        answer = self.answers[0]
        reason = "stop_sequence" if answer.stop is not None else _REASONS.get(answer.finish_reason or "", "end_turn")
        return {"stop_reason": reason, "stop_sequence": answer.stop}

    def whole(self) -> dict[str, Any]:
        return self._message(self._whole_items(), **self._end())

    def _item(self, at: int, item: Piece) -> dict[str, Any]:
        kind = _TYPES[item.kind]
        if item.kind == "call":
            own = self.id.removeprefix(self.prefix)
            return {"type": kind, "id": f"toolu_{own}_{at}", "name": item.name, "input": _input(item.text)}
        return {"type": kind, kind: item.text} | ({"signature": ""} if kind == "thinking" else {})

    def begin(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self._message([])}

    def _open(self, at: int, item: Piece) -> Iterator[Event]:
        yield {"type": "content_block_start", "index": at, "content_block": self._item(at, item._replace(text=""))}

    def _delta(self, at: int, piece: Piece) -> Event:
        kind, name = f"{_TYPES[piece.kind]}_delta", _TYPES[piece.kind]
        if piece.kind == "call":
            kind, name = "input_json_delta", "partial_json"
        return {"type": "content_block_delta", "index": at, "delta": {"type": kind, name: piece.text}}

    def _close(self, at: int, item: Piece) -> Iterator[Event]:
        yield {"type": "content_block_stop", "index": at}

    def end(self) -> Iterator[Event]:
        usage = {"output_tokens": self.answers[0].num_tokens}
        yield {"type": "message_delta", "delta": self._end(), "usage": usage}
        yield {"type": "message_stop"}

    def failure(self, error: dict[str, Any]) -> Iterator[Event]:
        yield {"type": "error", "error": error}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments of a call as an object, which they are not for each model."""
    with suppress(ValueError):
        if isinstance(found := json.loads(arguments or "{}"), dict):
            return found
    return {"arguments": arguments}


# -- requests ----------------------------------------------------------------------------------------------------------


def _chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body as one of a chat of OpenAI's, of which further fields may be in it.

    Raises:
        RequestError: a part of it is none of Anthropic's, or not supported.
    """
    found = {_RENAMED.get(name, name): value for name, value in body.items()}
    if not isinstance(body.get("max_tokens"), int):
        raise RequestError("max_tokens: Field required, a number of tokens", "max_tokens")
    try:
        messages = [each for message in found.get("messages") or [] for each in _turn(message)]
        if system := found.pop("system", None):
            messages.insert(0, {"role": "system", "content": _texts(system)})
        found["messages"] = messages
        if tools := found.get("tools"):
            found["tools"] = [_tool(tool) for tool in tools]
        if choice := found.pop("tool_choice", None):
            named = {"type": "function", "function": {"name": choice.get("name")}}
            found["tool_choice"] = named if choice["type"] == "tool" else _CHOICES[choice["type"]]
            found["parallel_tool_calls"] = False if choice.get("disable_parallel_tool_use") else None
        if (found.pop("thinking", None) or {}).get("type") == "disabled":  # as Qwen's templates and others name it
            found["chat_template_kwargs"] = {"enable_thinking": False, **found.get("chat_template_kwargs", {})}
    except (LookupError, TypeError, AttributeError) as error:
        raise RequestError(f"messages, system or tools: {type(error).__name__}: {error}", "messages") from None
    return found


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise TypeError(f"a tool of type {tool['type']!r} is not supported")
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _texts(content: Any) -> str | list[dict[str, Any]]:
    """Content that is text alone."""
    if isinstance(content, str):
        return content
    return [{"type": part["type"], "text": part["text"]} for part in content]


def _turn(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The messages of OpenAI's that one of Anthropic's is: results of calls are messages of their own."""
    role, content = message["role"], message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    found: dict[str, Any] = {"role": role, "content": [], "tool_calls": []}
    for part in parts:
        match part["type"]:
            case "text":
                found["content"].append({"type": "text", "text": part["text"]})
            case "thinking":
                found["reasoning_content"] = found.get("reasoning_content", "") + part["thinking"]
            case "tool_use":
                function = {"name": part["name"], "arguments": part["input"]}
                found["tool_calls"].append({"id": part["id"], "type": "function", "function": function})
            case "tool_result":
                result = _texts(part.get("content") or "")
                yield {"role": "tool", "tool_call_id": part["tool_use_id"], "content": result}
            case other:
                raise TypeError(f"content of type {other!r} is not supported")
    if found["content"] or found["tool_calls"] or "reasoning_content" in found:
        yield {name: value for name, value in found.items() if value != []}
