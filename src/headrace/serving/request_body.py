"""The whitelist of fields in the body of a request, per endpoint.

Field names are those of OpenAI's API (https://platform.openai.com/docs/api-reference), and of vLLM's additions to it.
A field that is not supported may have a neutral value, which leaves the answer as it is without the field; any other
value is an error. A field that cannot change an answer, whatever its value, is ignored with one line in the log.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    ValidationError,
    model_validator,
)

from headrace.errors import OptionError

logger = logging.getLogger(__name__)

_LEAST_TEMPERATURE = 0.01  # logits divided by less leave the range of float32

# Fields that are not supported, by the values (besides null) that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("audio", "max_tool_calls", "prediction", "previous_response_id"), ()),
    **dict.fromkeys(("reasoning_effort", "web_search_options"), ()),
    **dict.fromkeys(("functions", "include"), ([],)),
    "top_logprobs": (0,),
    **dict.fromkeys(("best_of", "length_penalty", "n"), (1,)),
    **dict.fromkeys(("background", "echo", "logprobs", "use_beam_search"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens"), (True,)),
    "reasoning": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
    "suffix": ("",),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),
    "tool_choice": ("auto", "none"),  # of which the latter leaves tools out
    "truncation": ("disabled",),
}
# Labels, and hints for other servers: their caches, their queues, and how wordy their models are.
_IGNORED = (
    "cache_prompt", "metadata", "num_ctx", "priority", "prompt_cache_key", "prompt_cache_retention",
    "request_id", "safety_identifier", "service_tier", "store", "timings_per_token", "user", "verbosity",
)  # fmt: skip
# In messages and their parts: what answers of servers hold, and clients send back with them. Reasoning that has
# another name, too, is that of its first name.
_ECHOED = (
    "annotations", "cache_control", "extra_content", "id", "index", "provider_specific_fields", "reasoning",
    "reasoning_details", "status", "thinking_blocks",
)  # fmt: skip
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")


class RequestError(OptionError):
    """A request that is refused.

    Attributes:
        status: the HTTP status of the answer.
        field: the field of the body that is wrong, if it is one.
    """

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field = field
        self.status = status


class _Object(BaseModel):
    model_config = _STRICT

    @model_validator(mode="after")
    def _check_others(self) -> _Object:
        for name, value in (self.model_extra or {}).items():
            if name in _ECHOED:
                _log_ignored(name)
            elif value not in (None, [], "", False):
                raise ValueError(f"{name[:80]} = {_shown(value)} is not supported; leave it out")
        return self


class _TextPart(_Object):
    type: Literal["text", "input_text", "output_text"]
    text: str


class _Function(_Object):
    name: str
    # As objects, which templates read; a call without arguments may have an empty text.
    arguments: Annotated[
        Json[Any], BeforeValidator(lambda given: json.dumps(given) if isinstance(given, dict) else given or "{}")
    ]


class _ToolCall(_Object):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function


def _require_function(tool: dict[str, Any]) -> dict[str, Any]:
    # Templates would show others, such as OpenAI's web search, as functions without a name.
    if tool.get("type", "function") != "function":
        raise ValueError('expected "type": "function"')
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("expected a function with a name")
    if not isinstance(function.get("parameters") or {}, dict):
        raise ValueError("expected parameters that are a JSON schema, an object")
    return tool


_Tools = list[Annotated[dict[str, Any], AfterValidator(_require_function)]]


class Message(_Object):
    """One message of a chat; its content is text."""

    role: str
    name: str | None = None
    content: Annotated[
        list[_TextPart] | None,
        BeforeValidator(lambda given: [{"type": "text", "text": given}] if isinstance(given, str) else given),
    ] = None
    reasoning_content: str | None = Field(None, validation_alias=AliasChoices("reasoning_content", "reasoning"))
    tool_calls: Annotated[list[_ToolCall] | None, BeforeValidator(lambda given: given or None)] = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.content is None and not self.tool_calls and not self.reasoning_content:
            raise ValueError("content: expected a text")
        return self


class _StreamOptions(_Object):
    include_usage: bool | None = None


class _Schema(_Object):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # an answer always follows its schema
    content: dict[str, Any] = Field(alias="schema")


class _Format(_Object):
    """A ``response_format``, or a ``text.format``, which has the fields of its schema beside its type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None

    @model_validator(mode="before")
    @classmethod
    def _nest(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("type") != "json_schema" or "json_schema" in given:
            return given
        return {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """``None``: any text."""
        if self.type == "json_object":
            return {"type": "object"}
        return None if self.json_schema is None else self.json_schema.content


class _Text(_Object):
    format: _Format | None = None


def _named(given: Any) -> Any:
    """The choice of a tool by its name, in one form."""
    if given in ("auto", "none", "required"):
        return given
    function = given.get("function", given) if isinstance(given, dict) and given.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        expected = '{"type": "function", "function": {"name": NAME}}'
        raise ValueError(f'expected "auto", "none", "required" or {expected}')
    return {"name": function["name"]}


_Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=64)]  # 64: each is one more to look for
_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_NumAnswers = Annotated[int, Field(ge=1, le=128)]
_NumTop = Annotated[int, Field(ge=0, le=20)]


_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


def _seconds(given: Any) -> float:
    """A number of seconds, or, as Ollama has it, a text such as "5m" or "1h30m"; negative: without end."""
    if isinstance(given, int | float) and not isinstance(given, bool):
        with suppress(OverflowError):
            return float(given)
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|[smh])", str(given))
    if not parts or str(given).removeprefix("-") != "".join(map("".join, parts)):
        raise ValueError('expected seconds, or a text such as "5m"; 0: none, -1: without end')
    return sum(float(number) * _UNITS[unit] for number, unit in parts) * (-1 if str(given).startswith("-") else 1)


_KeepAlive = Annotated[float | None, AfterValidator(lambda s: s if s >= 0 else None), BeforeValidator(_seconds)]


class GenerationRequest(BaseModel):
    """Fields of every endpoint; ``None``: the model's own.

    ``keep_alive``: seconds until the idle model is parked, ``None``: it is not; ``temperature`` of 0 is greedy;
    ``top_k`` of 0 or -1: all tokens; with ``seed`` the answer does not depend on other requests.
    """

    model_config = _STRICT

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^(0|[1-9]\d{0,8})$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    bad_words: _Texts | None = None
    allowed_token_ids: list[_Token] | None = None
    stop_token_ids: list[_Token] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    seed: Annotated[int, Field(gt=-(2**63), lt=2**63)] | None = None
    ignore_eos: bool | None = None
    stop: Annotated[
        _Texts | None, BeforeValidator(lambda given: [given] * bool(given) if isinstance(given, str) else given)
    ] = None
    stream_options: _StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(None, validation_alias=AliasChoices(*_LENGTHS))
    keep_alive: _KeepAlive = None

    @model_validator(mode="after")
    def _check(self) -> GenerationRequest:
        if self.temperature and self.temperature < _LEAST_TEMPERATURE:
            raise ValueError(f"temperature: expected 0 (greedy), or from {_LEAST_TEMPERATURE} to 2")
        if self.stream_options is not None and not self.stream:
            raise ValueError('stream_options: expected "stream": true beside it')
        if self.ignore_eos and self.answer_schema is not None:
            raise ValueError("ignore_eos: expected false beside a format, whose answers end")
        return self

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; ``None``: it is any text."""
        given = getattr(self, "response_format", None) or getattr(getattr(self, "text", None), "format", None)
        return given and given.schema_of_answer

    @property
    def num_answers(self) -> int:
        """Answers to each prompt."""
        return getattr(self, "n", None) or 1

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report with each token; ``None``: no log-probability is reported."""
        return None


def _prompts(given: Any) -> list[str | list[int]]:
    """Each a text or token ids."""
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    for prompt in given if isinstance(given, list) and given else [None]:
        is_tokens = isinstance(prompt, list) and prompt and all(type(each) is int and each >= 0 for each in prompt)
        if not (is_tokens or (isinstance(prompt, str) and prompt)):
            raise ValueError("expected a text, token ids, or a list of texts or of lists of token ids")
        if isinstance(prompt, str):
            prompt.encode()  # a ValueError where it has half a surrogate pair
    return given  # type: ignore[no-any-return]


class Completion(GenerationRequest):
    """A request to ``/v1/completions``."""

    prompt: Annotated[Any, AfterValidator(_prompts)]
    response_format: _Format | None = None
    n: _NumAnswers | None = None
    echo: bool | None = None
    logprobs: Annotated[_NumTop | None, BeforeValidator(lambda given: None if given is False else given)] = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class _Conversation(GenerationRequest):
    tools: _Tools | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tool_choice: Annotated[str | dict[str, str], BeforeValidator(_named)] = "auto"

    @property
    def must_call(self) -> bool:
        """Whether the answer is a call."""
        return self.tool_choice not in ("auto", "none")

    @model_validator(mode="after")
    def _check_tools(self) -> _Conversation:
        if self.tool_choice == "none":
            self.tools = None
        if not self.must_call:
            return self
        names = [tool.get("function", tool).get("name") for tool in self.tools or ()]
        if not names or (isinstance(self.tool_choice, dict) and self.tool_choice["name"] not in names):
            raise ValueError(f"tool_choice: expected one of the tools beside it, {_shown(names)}")
        if self.ignore_eos or self.answer_schema is not None:
            raise ValueError("tool_choice: expected neither ignore_eos nor a format beside a call that has to be")
        return self


class OneChat(_Conversation):
    """A request to ``/v1/messages``, as one of OpenAI's."""

    messages: Annotated[list[Message], Field(min_length=1)]
    response_format: _Format | None = None


class Chat(OneChat):
    """A request to ``/v1/chat/completions``."""

    n: _NumAnswers | None = None
    logprobs: bool | None = None
    top_logprobs: _NumTop | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Chat:
        if self.top_logprobs and not self.logprobs:
            raise ValueError('top_logprobs: expected "logprobs": true beside it')
        return self


class Response(_Conversation):
    """A request to ``/v1/responses``."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    text: _Text | None = None


_Model = TypeVar("_Model", bound=BaseModel)


def read(kind: type[_Model], body: Mapping[str, Any]) -> _Model:
    """A request to an endpoint, or a part of one.

    Raises:
        RequestError: a field that is unknown, wrong, or not supported.
    """
    try:
        # Without nulls, by which clients mean a field that they leave out; of two names of one field, too.
        request = kind.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = [str(each) for each in first["loc"]]
        message = first["msg"].removeprefix("Value error, ")
        found = f"{'.'.join(where)}: {message}, found {_shown(first['input'])}" if where else message
        raise RequestError(found, where[0] if where else message.partition(":")[0]) from None
    for name, value in (request.model_extra or {}).items():
        if name in _IGNORED:
            _log_ignored(name)
        elif isinstance(request, GenerationRequest):  # parts of one have read theirs
            _require_neutral(name, value, type(request).model_fields)
    return request


@cache  # once per name
def _log_ignored(name: str) -> None:
    logger.warning("%s in requests is ignored: it changes no answer", name)


def _require_neutral(name: str, value: object, supported: Collection[str]) -> None:
    if name in _LENGTHS:
        raise RequestError(f"{name}: expected only one of {', '.join(_LENGTHS)}; leave the others out", name)
    if name not in _NEUTRAL:
        near = get_close_matches(name, [*supported, *_NEUTRAL], n=1)
        hint = f"did you mean {near[0]!r}?" if near else "leave it out"
        raise RequestError(f"{name[:80]!r} is not supported; {hint}", name[:80])
    # In Python False == 0, but "logprobs": 0 asks for something, and false does not.
    if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in _NEUTRAL[name]):
        allowed = " or ".join(map(_shown, _NEUTRAL[name])) or "null"
        raise RequestError(
            f"{name} = {_shown(value)} is not supported (expected {allowed}); leave it out, or use a server that "
            f"has it: headrace serve --engine vllm",
            name,
        )


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
