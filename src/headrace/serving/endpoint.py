"""A request to an endpoint that generates: its prompts, its answers, and their form, whole or as events of a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, ClassVar

from headrace.serving.answers import Answer, Piece
from headrace.serving.async_engine import AsyncEngine
from headrace.serving.chat_template import ChatTemplate
from headrace.serving.engine import Request
from headrace.serving.request_body import GenerationRequest, RequestError, read
from headrace.serving.sampling import Sampling, logits_processors, read_sampling, token_sequences
from headrace.serving.structured import GrammarProcessor, Grammars

Event = dict[str, Any]
_LISTS = ("messages", "input", "tools")  # each item takes at least one token
_LEAST_LOGPROB = -9999.0  # OpenAI's, of a probability of zero, which JSON cannot hold


@dataclass(frozen=True)
class ServedModel:
    """The model of a server, and what the endpoints need beside it.

    Attributes:
        names: of the model in requests; answers contain the first.
    """

    model: Any
    tokenizer: Any
    names: Sequence[str]
    engine: AsyncEngine

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template."""
        return ChatTemplate(self.tokenizer, self.model)

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars of answers that have a format."""
        return Grammars(self.tokenizer, self.model)

    @cached_property
    def text_of(self) -> Callable[[int], str]:
        """Text of a token; those of a long prompt and their likeliest ones are some 100,000, and few different."""
        return cache(lambda token: self.tokenizer.decode([token]))


class Endpoint(ABC):
    """One request to an endpoint.

    Attributes:
        request: its fields.
        answers: for each prompt as many as the request wants.
    """

    kind: ClassVar[type[GenerationRequest]]
    prefix: ClassVar[str]  # of the names of its answers
    is_chat: ClassVar[bool] = True
    request: Any

    def __init__(self, served: ServedModel, body: Mapping[str, Any]) -> None:
        """Read a body; takes up to seconds.

        Raises:
            RequestError: the request cannot be carried out.
        """
        self.served, tokenizer, longest = served, served.tokenizer, served.engine.longest
        if self.is_chat and not tokenizer.chat_template:
            raise RequestError(f"{served.names[0]!r} has no chat template; send texts to /v1/completions", status=404)
        for field in _LISTS:
            if isinstance(items := body.get(field), list) and len(items) > longest:
                text = f"{field}: {len(items)} items are more than the {longest} tokens of a sequence here (--context)"
                raise RequestError(text, field)
        self.request = read(self.kind, body)
        self.id, self.created = f"{self.prefix}{uuid.uuid4().hex}", int(time.time())
        sampling = read_sampling(self.request, served.model.generation_config)
        self._bad_words = token_sequences(self.request.bad_words or [], tokenizer)
        self.prompts = self._prompts()
        engine, each = served.engine.engine, self.request.num_answers
        if (num := len(self.prompts) * each) > (most := engine.rows.num_rows + engine.max_waiting):
            field = "n" if each > 1 else "prompt"
            limit = f"the {most} that may run and wait here (--max-queue)"
            raise RequestError(f"{field}: {num} answers to a request are more than {limit}", field)
        for prompt in self.prompts:
            sampling.check_tokens(served.model.get_input_embeddings().num_embeddings, prompt)
        # Only the prompt of a chat, which has one, may count for it.
        template = served.template.answers if self.is_chat else None
        grammar = served.grammars.processor(self.request, self.prompts[0], template)
        self.answers = [self._answer(at, self.prompts[at // each], sampling, grammar) for at in range(num)]

    def _prompts(self) -> list[list[int]]:
        """Token ids of the prompts."""
        asked = self.request
        return [self.served.template.tokens(self._messages(), asked.tools, asked.chat_template_kwargs or {})]

    def _messages(self) -> list[dict[str, Any]]:
        """Messages of a chat."""
        return [message.model_dump(exclude_none=True) for message in self.request.messages]

    def _answer(self, index: int, prompt: list[int], sampling: Sampling, grammar: GrammarProcessor | None) -> Answer:
        served, asked, grammar = self.served, self.request, grammar and grammar.copy()
        most = sampling.most_tokens
        if asked.max_tokens is None:
            most = max(1, min(most, served.engine.longest - len(prompt)))
        request = Request(
            prompt,
            most,
            [*sampling.ends, *(grammar.ends if grammar else [])],
            partial(logits_processors, served.model, self._bad_words, sampling, len(prompt), grammar),
            samples=sampling.samples,
            seed=None if sampling.seed is None else sampling.seed + index,
            num_logprobs=asked.num_logprobs,
            reports_prompt=asked.num_logprobs is not None and bool(getattr(asked, "echo", False)),
        )
        parser = served.template.parser(prompt, asked.tools) if self.is_chat else None
        return Answer(
            index,
            request,
            # Special tokens are left to the parser, if there is one.
            partial(served.tokenizer.decode, skip_special_tokens=parser is None),
            stops=sampling.stops,
            hidden=asked.stop_token_ids or (),
            special=served.template.special if parser else (),
            continues=not self.is_chat,
            parser=parser,
            one_call=getattr(asked, "parallel_tool_calls", None) is False,
        )

    # -- the form of the answers ---------------------------------------------------------------------------------------

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The body of the response, once all answers have ended."""

    def begin(self) -> Iterable[Event]:
        """First events of a stream."""
        return ()

    @abstractmethod
    def events(self, answer: Answer, pieces: Sequence[Piece]) -> Iterator[Event]:
        """Events of new pieces, and of the end of an answer."""

    def end(self) -> Iterable[Event | str]:
        """Last events of a stream."""
        return ()

    def failure(self, error: dict[str, Any]) -> Iterable[Event]:
        """Events of an error in OpenAI's form, which ends a stream."""
        return ({"error": error},)

    def usage(self) -> dict[str, int]:
        """Numbers of tokens, by OpenAI's names."""
        prompts, answers = sum(map(len, self.prompts)), sum(answer.num_tokens for answer in self.answers)
        return {"prompt_tokens": prompts, "completion_tokens": answers, "total_tokens": prompts + answers}


class Choices(Endpoint):
    """A request whose answers are OpenAI's choices: completions of texts, and of chats."""

    names: ClassVar[tuple[str, str]]  # of a whole object, and of a chunk

    def _object(self, choices: list[dict[str, Any]], *, is_chunk: bool, **more: Any) -> dict[str, Any]:
        about = {"id": self.id, "object": self.names[is_chunk], "created": self.created}
        return {**about, "model": self.served.names[0], "choices": choices, **more}

    def whole(self) -> dict[str, Any]:
        choices = [
            {"index": each.index, **self._choice(each), "finish_reason": each.finish_reason} for each in self.answers
        ]
        return self._object(choices, is_chunk=False, usage=self.usage())

    def _chunk(self, answer: Answer, part: dict[str, Any], finish_reason: str | None = None) -> Event:
        return self._object([{"index": answer.index, **part, "finish_reason": finish_reason}], is_chunk=True)

    def end(self) -> Iterable[Event | str]:
        options = self.request.stream_options
        if options is not None and options.include_usage:
            yield self._object([], is_chunk=True, usage=self.usage())
        yield "[DONE]"

    @abstractmethod
    def _choice(self, answer: Answer) -> dict[str, Any]:
        """A whole answer."""


class Items(Endpoint):
    """A request whose one answer is a list of items: texts, reasoning and calls, in their order."""

    _items: list[Piece]  # as far as they have been sent

    def events(self, answer: Answer, pieces: Sequence[Piece]) -> Iterator[Event]:
        items = self._items = getattr(self, "_items", [])
        for piece in pieces:
            if _extend(items, piece):
                if len(items) > 1:
                    yield from self._close(len(items) - 2, items[-2])
                yield from self._open(len(items) - 1, piece)
            yield self._delta(len(items) - 1, piece)
        if answer.finish_reason and items:
            yield from self._close(len(items) - 1, items[-1])

    def _whole_items(self) -> list[dict[str, Any]]:
        items: list[Piece] = []
        for piece in self.answers[0].pieces:
            _extend(items, piece)
        return [self._item(at, item) for at, item in enumerate(items)]

    @abstractmethod
    def _item(self, at: int, item: Piece) -> dict[str, Any]:
        """A whole item."""

    @abstractmethod
    def _open(self, at: int, item: Piece) -> Iterator[Event]:
        """Events before the first piece of an item."""

    @abstractmethod
    def _delta(self, at: int, piece: Piece) -> Event:
        """A piece of an item."""

    @abstractmethod
    def _close(self, at: int, item: Piece) -> Iterator[Event]:
        """Events after the last piece of an item."""


def _extend(items: list[Piece], piece: Piece) -> bool:
    """Add a piece to the last of ``items``, or as a new one: whether it is one."""
    is_new = not items or piece.kind == "call" or items[-1].kind != piece.kind
    items[-1:] = [*items[-1:], piece] if is_new else [Piece(piece.kind, items[-1].text + piece.text)]
    return is_new


def logprob(value: float) -> float:
    """A log-probability as JSON holds it."""
    return max(value, _LEAST_LOGPROB)
