"""``/v1/responses``, by OpenAI's API (https://platform.openai.com/docs/api-reference/responses)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from headrace.serving.answers import Piece
from headrace.serving.endpoint import Event, Items
from headrace.serving.request_body import Message, RequestError, Response, read


class Responses(Items):
    """One request to ``/v1/responses``, whose answer is a list of items: messages, reasoning and calls."""

    kind, prefix = Response, "resp_"
    _num_events = 0

    def _messages(self) -> list[dict[str, Any]]:
        asked = self.request
        given = asked.input if isinstance(asked.input, list) else [{"role": "user", "content": asked.input}]
        if given and "role" not in given[0] and str(given[0].get("type")).startswith("input_"):  # parts of one message
            given = [{"role": "user", "content": given}]
        if asked.instructions:
            given = [{"role": "system", "content": asked.instructions}, *given]
        return _messages(given)

    # -- whole ---------------------------------------------------------------------------------------------------------

    def _response(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        about = {"id": self.id, "object": "response", "created_at": self.created, "model": self.served.names[0]}
        asked: dict[str, Any] = {"tools": [], "tool_choice": "auto"}  # which clients need to be there
        asked["parallel_tool_calls"] = self.request.parallel_tool_calls is not False
        return {**about, "status": status, "output": output, **asked, **more}

    def whole(self) -> dict[str, Any]:
        (answer,), usage = self.answers, self.usage()
        counts = {"input_tokens": usage["prompt_tokens"], "input_tokens_details": {"cached_tokens": 0}}
        counts |= {"output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0}}
        more: dict[str, Any] = {"usage": {**counts, "total_tokens": usage["total_tokens"]}}
        if is_cut := answer.finish_reason == "length":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._response("incomplete" if is_cut else "completed", self._whole_items(), **more)

    def _item(self, at: int, item: Piece, status: str = "completed") -> dict[str, Any]:
        own = f"{self.id.removeprefix(self.prefix)}_{at}"
        if item.kind == "call":
            about = {"id": f"fc_{own}", "call_id": f"call_{own}", "type": "function_call", "name": item.name}
            return {**about, "arguments": item.text, "status": status}
        content = [self._part(item)] if status == "completed" else []
        if item.kind == "reasoning":
            return {"id": f"rs_{own}", "type": "reasoning", "summary": [], "content": content, "status": status}
        return {"id": f"msg_{own}", "type": "message", "role": "assistant", "content": content, "status": status}

    @staticmethod
    def _part(item: Piece) -> dict[str, Any]:
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": item.text}
        return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": []}

    # -- streamed ------------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._num_events - 1, **fields}

    def begin(self) -> Iterator[Event]:
        yield self._event("created", response=self._response("queued", []))
        yield self._event("in_progress", response=self._response("in_progress", []))

    def _delta(self, at: int, piece: Piece) -> Event:
        return self._about(f"{_NAMES[piece.kind]}.delta", at, piece, delta=piece.text)

    def _about(self, kind: str, at: int, item: Piece, **fields: Any) -> Event:
        """An event within an item."""
        part = {} if item.kind == "call" else {"content_index": 0}
        more: dict[str, Any] = {"logprobs": []} if kind.startswith("output_text") else {}
        return self._event(kind, item_id=self._item(at, item)["id"], output_index=at, **part, **fields, **more)

    def _open(self, at: int, item: Piece) -> Iterator[Event]:
        empty = item._replace(text="")
        yield self._event("output_item.added", output_index=at, item=self._item(at, empty, "in_progress"))
        if item.kind == "text":
            yield self._about("content_part.added", at, item, part=self._part(empty))

    def _close(self, at: int, item: Piece) -> Iterator[Event]:
        name = {"name": item.name, "arguments": item.text} if item.kind == "call" else {"text": item.text}
        yield self._about(f"{_NAMES[item.kind]}.done", at, item, **name)
        if item.kind == "text":
            yield self._about("content_part.done", at, item, part=self._part(item))
        yield self._event("output_item.done", output_index=at, item=self._item(at, item))

    def end(self) -> Iterable[Event]:
        yield self._event("completed", response=self.whole())

    def failure(self, error: dict[str, Any]) -> Iterator[Event]:
        about = {"code": "server_error", "message": error["message"]}
        yield {**self._event("error", **about, param=None), "type": "error"}
        yield self._event("failed", response=self._response("failed", [], error=about))


_NAMES = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}  # in events


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a chat, of the items of a conversation.

    Raises:
        RequestError: an item is none, or of a kind that is not supported.
    """
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for at, item in enumerate(items):
        try:
            match item.get("type", "message"):
                case "message":
                    message = {"role": item["role"], "content": item.get("content")}
                    if reasoning and item["role"] == "assistant":
                        message["reasoning_content"], reasoning = reasoning, ""
                    messages.append(message)
                case "reasoning":
                    reasoning = "".join(part["text"] for part in item.get("content") or [])
                case "function_call":
                    call = {"id": item["call_id"], "function": {"name": item["name"], "arguments": item["arguments"]}}
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant"})
                        if reasoning:
                            messages[-1]["reasoning_content"], reasoning = reasoning, ""
                    messages[-1].setdefault("tool_calls", []).append(call)
                case "function_call_output":
                    messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
                case other:
                    raise TypeError(f"{other!r} is not supported")
        except (LookupError, TypeError, AttributeError) as error:
            expected = "input: expected a text or a list of messages and tool calls"
            raise RequestError(f"{expected}; item {at}: {type(error).__name__}: {error}", "input") from None
    if not messages:
        raise RequestError("input: expected a text or a list of messages, found none", "input")
    return [read(Message, message).model_dump(exclude_none=True) for message in messages]
