"""``/v1/completions``: texts that go on, by OpenAI's API (https://platform.openai.com/docs/api-reference/completions)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headrace.serving.answers import Answer, Piece
from headrace.serving.endpoint import Choices, Event, logprob
from headrace.serving.engine import TokenLogprob
from headrace.serving.request_body import Completion


class Completions(Choices):
    """One request to ``/v1/completions``."""

    kind, prefix, names = Completion, "cmpl-", ("text_completion", "text_completion")
    is_chat = False

    def _prompts(self) -> list[list[int]]:
        tokenizer = self.served.tokenizer
        self._lengths: dict[int, int] = {}  # of the texts of tokens that have been reported, by answer
        return [tokenizer(given)["input_ids"] if isinstance(given, str) else given for given in self.request.prompt]

    def _echo(self, answer: Answer) -> str:
        given = self.request.prompt[answer.index // self.request.num_answers] if self.request.echo else ""
        return given if isinstance(given, str) else self.served.tokenizer.decode(given, skip_special_tokens=True)

    def _choice(self, answer: Answer) -> dict[str, Any]:
        text = self._echo(answer) + "".join(piece.text for piece in answer.pieces)
        return {"text": text, "logprobs": self._logprobs(answer)}

    def begin(self) -> Iterator[Event]:
        for answer in self.answers if self.request.echo else ():
            if self.request.logprobs is None:  # else those of the prompt have to be there first
                yield self._chunk(answer, {"text": self._echo(answer), "logprobs": None})

    def events(self, answer: Answer, pieces: Sequence[Piece]) -> Iterator[Event]:
        is_first = answer.index not in self._lengths
        logprobs = self._logprobs(answer)
        text = "".join(piece.text for piece in pieces)
        if logprobs is not None and is_first:
            text = self._echo(answer) + text
        if text or logprobs or answer.finish_reason:
            yield self._chunk(answer, {"text": text, "logprobs": logprobs}, answer.finish_reason)

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        """Log-probabilities that have not been reported yet, in OpenAI's form."""
        if self.request.logprobs is None:
            return None
        is_first, offset = answer.index not in self._lengths, self._lengths.get(answer.index, 0)
        found: list[TokenLogprob | None] = [*answer.new_logprobs()]
        tokens = [each.token for each in found if each is not None]
        if is_first and self.request.echo:
            tokens = [*answer.request.prompt, *tokens]
            found = [None, *answer.request.prompt_logprobs, *found]  # none of the first token
        texts = [self.served.text_of(token) for token in tokens]
        offsets = [offset := (offset if at == 0 else offset + len(texts[at - 1])) for at in range(len(texts))]
        self._lengths[answer.index] = offset + len(texts[-1]) if texts else offset
        return {
            "tokens": texts,
            "token_logprobs": [None if each is None else logprob(each.logprob) for each in found],
            "top_logprobs": [None if each is None else self._top(each) for each in found],
            "text_offset": offsets,
        }

    def _top(self, found: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the one that was taken; of several with one text the likeliest."""
        pairs = sorted([*found.top, (found.token, found.logprob)], key=lambda pair: pair[1])
        return {self.served.text_of(token): logprob(value) for token, value in pairs}
