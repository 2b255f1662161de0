"""One answer: what its tokens say, up to a stop string."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from headrace.formatting import TokenText
from headrace.serving.engine import Request, TokenLogprob

REASONING = ("reasoning_content", "thinking", "reasoning")  # names in templates of answers


class Piece(NamedTuple):
    """Part of an answer: ``text``, ``reasoning``, or a ``call`` of a tool, whose text is its arguments as JSON."""

    kind: str
    text: str
    name: str = ""


class Answer:
    """Grows with the tokens of its request.

    Attributes:
        index: among the answers of an HTTP request.
        num_tokens: tokens that have been read.
        pieces: what they say.
        finish_reason: ``stop``, ``length`` or ``tool_calls``; ``None``: it goes on.
        stop: the text that has ended it.
        num_calls: calls among its pieces.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        decode: Callable[[list[int]], str],
        *,
        stops: Sequence[str] = (),
        hidden: Sequence[int] = (),
        special: Collection[int] = (),
        continues: bool = False,
        parser: Any = None,
        one_call: bool = False,
    ) -> None:
        """Args:
        index, request: see above; the request must not have run.
        decode: text of token ids.
        stops: texts that end the answer, of which they are no part.
        hidden: tokens that are no part of its text.
        special: tokens whose text is only for the parser: no stop string is in it.
        continues: its text goes on where that of the prompt ends.
        parser: of transformers, finds reasoning and calls.
        one_call: calls after the first are left out.
        """
        self.index, self.request, self.num_tokens = index, request, 0
        self.pieces: list[Piece] = []
        self.finish_reason: str | None = None
        self.stop: str | None = None
        self._new_text = TokenText(decode, request.prompt if continues else ())
        self._stops, self._hidden, self._special = stops, hidden, special
        self._parser, self._one_call = parser, one_call
        # Text that may begin a stop string has to wait for the next tokens.
        self._num_held = max(map(len, stops), default=1) - 1
        self._waiting, self.num_calls, self._num_logprobs = "", 0, 0

    def read(self, num_tokens: int, has_ended: bool) -> list[Piece]:
        """Read on to the first ``num_tokens`` tokens: what they say; ``has_ended``: no further ones follow."""
        if self.finish_reason is not None:
            return []
        found: list[Piece] = []
        for at in range(self.num_tokens, num_tokens):
            found += self._read(self.request.tokens[at], has_ended and at == num_tokens - 1)
            if self.finish_reason is not None:
                break
        self.pieces += found
        return found

    def _read(self, token: int, has_ended: bool) -> list[Piece]:
        self.num_tokens += 1
        num_held = 0 if has_ended or token in self._special else self._num_held
        for each in [*([] if token in self._hidden else [token]), *[None] * has_ended]:
            self._waiting += self._new_text.add(each)
            if token in self._special:
                continue
            if stops := [(at, stop) for stop in self._stops if (at := self._waiting.find(stop)) >= 0]:
                at, self.stop = min(stops)
                self._waiting, has_ended = self._waiting[:at], True
                num_held = 0
                break
        num_ready = max(0, len(self._waiting) - num_held)
        ready, self._waiting = self._waiting[:num_ready], self._waiting[num_ready:]
        pieces = self._parse(ready, has_ended)
        if has_ended:
            is_stop = self.stop is not None or token in self.request.ends
            self.finish_reason = "tool_calls" if self.num_calls else "stop" if is_stop else "length"
        return pieces

    def _parse(self, text: str, has_ended: bool) -> list[Piece]:
        if self._parser is None:
            return [Piece("text", text)] * bool(text)
        found = _pieces(self._parser.feed, text)
        if has_ended:
            found += _pieces(lambda: self._parser.finalize()[1])
        kept = []
        for piece in found:
            if piece.kind != "call" or not (self._one_call and self.num_calls):
                kept.append(piece)
                self.num_calls += piece.kind == "call"
        return kept

    def new_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the tokens that have been read since the last call."""
        start, self._num_logprobs = self._num_logprobs, self.num_tokens
        return self.request.logprobs[start : self.num_tokens]


def _pieces(read: Callable[..., list[dict[str, Any]]], *texts: str) -> list[Piece]:
    """Pieces that transformers' parser finds; none in a call that is incomplete, no JSON, or without a name."""
    found: list[Piece] = []
    with suppress(Exception):  # of any type: the parser takes any JSON of a model for a call
        for event in read(*texts):
            kind, field = event["type"], event.get("field")
            if kind == "region_close" and field == "tool_calls":
                function = event["value"]["function"]
                given = function["arguments"]
                function["name"].encode()  # halves of surrogate pairs have no UTF-8
                found.append(Piece("call", given if isinstance(given, str) else json.dumps(given), function["name"]))
            elif kind == "region_chunk" and not event.get("dirty") and field in ("content", *REASONING):
                text = event.get("text") or ""
                found += [Piece("text" if field == "content" else "reasoning", text)] * bool(text)
        return found
    return []
