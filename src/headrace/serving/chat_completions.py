"""``/v1/chat/completions``, by OpenAI's API (https://platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headrace.serving.answers import Answer, Piece
from headrace.serving.endpoint import Choices, Event, logprob
from headrace.serving.request_body import Chat


class ChatCompletions(Choices):
    """One request to ``/v1/chat/completions``."""

    kind, prefix, names = Chat, "chatcmpl-", ("chat.completion", "chat.completion.chunk")

    def _choice(self, answer: Answer) -> dict[str, Any]:
        kinds = ("text", "reasoning")
        text, reasoning = ("".join(each.text for each in answer.pieces if each.kind == kind) for kind in kinds)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = [piece for piece in answer.pieces if piece.kind == "call"]
        if calls:
            message["tool_calls"] = [self._call(answer, at, call) for at, call in enumerate(calls)]
        return {"message": message, "logprobs": self._logprobs(answer)}

    def _call(self, answer: Answer, at: int, call: Piece) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.text}
        return {
            "id": f"call_{self.id.removeprefix(self.prefix)}_{answer.index}_{at}",
            "type": "function",
            "function": function,
        }

    def begin(self) -> Iterable[Event]:
        for answer in self.answers:
            yield self._chunk(answer, {"delta": {"role": "assistant", "content": ""}, "logprobs": None})

    def events(self, answer: Answer, pieces: Sequence[Piece]) -> Iterator[Event]:
        logprobs = self._logprobs(answer)
        num_calls = answer.num_calls - sum(piece.kind == "call" for piece in pieces)
        for piece in pieces:
            delta: dict[str, Any] = {"content" if piece.kind == "text" else "reasoning_content": piece.text}
            if piece.kind == "call":
                delta = {"tool_calls": [{"index": num_calls, **self._call(answer, num_calls, piece)}]}
                num_calls += 1
            yield self._chunk(answer, {"delta": delta, "logprobs": logprobs})
            logprobs = None
        if logprobs or answer.finish_reason:
            yield self._chunk(answer, {"delta": {}, "logprobs": logprobs}, answer.finish_reason)

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        """Log-probabilities that have not been reported yet, in OpenAI's form."""
        if not self.request.logprobs:
            return None
        return {
            "content": [
                {**self._entry(each.token, each.logprob), "top_logprobs": [self._entry(*pair) for pair in each.top]}
                for each in answer.new_logprobs()
            ]
        }

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text = self.served.text_of(token)
        return {"token": text, "logprob": logprob(value), "bytes": list(text.encode())}
