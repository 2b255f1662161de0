"""What the body of a request may ask for, and what of it takes effect: functions of JSON values.

Field names are those of OpenAI's API (https://platform.openai.com/docs/api-reference), and of vLLM's additions to it.
Nothing is ignored: a field that this server does not carry out may have its neutral value alone, one that leaves the
answer as it is without the field.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from headrace.errors import OptionError

__all__ = ["RequestError", "Wanted", "read_chat", "read_completion"]

_LEAST_TEMPERATURE = 0.01  # below, quotients of logits leave the range of float32
_MAX_SEED = 2**63 - 1

# Fields that are not carried out, and the values besides null that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "use_beam_search": (False,),
}
_NEUTRAL_IN_COMPLETIONS: dict[str, tuple[object, ...]] = {"best_of": (1,), "echo": (False,), "suffix": ("",)}
_NEUTRAL_IN_CHATS: dict[str, tuple[object, ...]] = {
    "audio": (),
    "add_generation_prompt": (True,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "web_search_options": (),
}
# Labels of the client's own, which change no answer whatever their value.
_LABELS = {"user", "safety_identifier", "prompt_cache_key"}
_USED = {
    *("model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos"),
}


class RequestError(OptionError):
    """A request that is not served.

    Attributes:
        status: the HTTP status of the answer.
        field: the field of the body that is wrong, if it is one.
    """

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field = field
        self.status = status


@dataclass(frozen=True)
class Wanted:
    """What a request asks for, checked.

    Attributes:
        body: the fields that transformers' handler reads: model, stream, and the prompt or the messages.
        max_tokens: of the answer; ``None``: as the server sees fit.
        temperature: 0 is greedy; ``None`` for this and the next two: the model's own.
        top_p: of the likeliest tokens, those that have this probability together.
        top_k: of the likeliest tokens, so many; 0: all.
        seed: the answer depends on it alone, not on what else runs.
        ignore_eos: whether the answer goes on after the token that ends texts.
        include_usage: whether a stream ends with a chunk that counts tokens.
    """

    body: dict[str, Any]
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    ignore_eos: bool = False
    include_usage: bool = False


def read_completion(body: Mapping[str, Any]) -> Wanted:
    """What a request to ``/v1/completions`` asks for.

    Raises:
        RequestError: a field that is unknown, wrong, or would have no effect.
    """
    _refuse_without_effect(body, {**_NEUTRAL, **_NEUTRAL_IN_COMPLETIONS}, {*_USED, "prompt"})
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not _is_text(prompt) or not prompt:
        raise RequestError(f"prompt: expected a text, found {_shown(prompt)}; send one prompt per request", "prompt")
    return _wanted(body, {"prompt": prompt}, _number(body, "max_tokens", int, 1))


def read_chat(body: Mapping[str, Any], template_arguments: Collection[str] = ()) -> Wanted:
    """What a request to ``/v1/chat/completions`` asks for.

    Args:
        body: of the request.
        template_arguments: names that ``chat_template_kwargs`` may not have: arguments of ``apply_chat_template``.

    Raises:
        RequestError: a field that is unknown, wrong, or would have no effect.
    """
    names = {"messages", "max_completion_tokens", "chat_template_kwargs"}
    _refuse_without_effect(body, {**_NEUTRAL, **_NEUTRAL_IN_CHATS}, _USED | names)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages: expected a list of messages, found {_shown(messages)}", "messages")
    fields: dict[str, Any] = {"messages": [_message(index, message) for index, message in enumerate(messages)]}
    given = body.get("chat_template_kwargs")
    if given is not None:
        if not isinstance(given, dict) or not set(given).isdisjoint(template_arguments):
            raise RequestError(
                f"chat_template_kwargs: expected variables of the chat template, such as "
                f'{{"enable_thinking": false}}, found {_shown(given)}',
                "chat_template_kwargs",
            )
        fields["chat_template_kwargs"] = given
    longest = [_number(body, name, int, 1) for name in ("max_completion_tokens", "max_tokens")]
    if None not in longest and longest[0] != longest[1]:
        raise RequestError("max_completion_tokens and max_tokens differ: send one of the two", "max_tokens")
    return _wanted(body, fields, longest[0] if longest[1] is None else longest[1])


def _refuse_without_effect(
    body: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]], used: Collection[str]
) -> None:
    for name, value in body.items():
        if value is None or name in used or name in _LABELS:
            continue
        if name not in neutral:
            near = get_close_matches(name, [*used, *neutral], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; leave it out"
            raise RequestError(f"{name[:80]!r} is no field that this server knows{hint}", name[:80])
        # A truth value and a number may be equal in Python; "logprobs": 0 asks for something, and false does not.
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral[name]):
            allowed = " or ".join(_shown(other) for other in neutral[name]) or "null"
            raise RequestError(
                f"{name} = {_shown(value)} would have no effect here (expected {allowed}); leave it out, or use a "
                f"server that has it: headrace serve --engine vllm",
                name,
            )


def _wanted(body: Mapping[str, Any], fields: dict[str, Any], max_tokens: int | None) -> Wanted:
    stream = _flag(body, "stream")
    temperature = _number(body, "temperature", float, 0, 2)
    if temperature and temperature < _LEAST_TEMPERATURE:
        raise RequestError(
            f"temperature = {temperature:g}: expected 0 (greedy), or from {_LEAST_TEMPERATURE} to 2", "temperature"
        )
    top_p = _number(body, "top_p", float, 0, 1)
    if top_p == 0:
        raise RequestError("top_p = 0: expected a probability above 0, at most 1; 1 is all tokens", "top_p")
    top_k = _number(body, "top_k", int, -1, 2**31 - 1)
    model = body.get("model")
    if not isinstance(model, str | None):
        raise RequestError(f"model: expected a name, found {_shown(model)}", "model")
    return Wanted(
        {**fields, "model": model, "stream": stream},
        max_tokens,
        temperature,
        top_p,
        None if top_k is None else max(top_k, 0),  # -1 is vLLM's for all of them
        _number(body, "seed", int, -_MAX_SEED, _MAX_SEED),
        _flag(body, "ignore_eos"),
        _include_usage(body, stream),
    )


def _include_usage(body: Mapping[str, Any], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    known = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    if not isinstance(options, dict) or not known.issuperset(options) or not stream:
        raise RequestError(
            f'stream_options: expected {{"include_usage": true}} beside "stream": true, found {_shown(options)}',
            "stream_options",
        )
    for name in known - {"include_usage"}:
        if _flag(options, name):
            raise RequestError(f"stream_options: {name} would have no effect here; leave it out", "stream_options")
    return _flag(options, "include_usage")


def _message(index: int, message: Any) -> dict[str, Any]:
    """One message with its content as one text."""
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not _is_text(message.get("role")):
        raise RequestError(f"{where}: expected an object with role and content, found {_shown(message)}", "messages")
    for name, value in message.items():
        if name not in ("role", "content") and value not in (None, [], ""):
            raise RequestError(f"{where}.{name[:80]} would have no effect here; leave it out", "messages")
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        is_text = isinstance(part, dict) and set(part) == {"type", "text"} and part["type"] == "text"
        if not is_text or not _is_text(part["text"]):
            raise RequestError(
                f'{where}.content: expected a text, or a list of {{"type": "text", "text": ...}}, found '
                f"{_shown(content)}",
                "messages",
            )
    return {"role": message["role"], "content": parts}


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    if not isinstance(value, bool | None):
        raise RequestError(f"{name}: expected true or false, found {_shown(value)}", name)
    return bool(value)


def _number(body: Mapping[str, Any], name: str, kind: type, least: float, most: float = 2**31 - 1) -> Any:
    """A number of the body as a ``kind``, int or float; ``None`` if it is not there."""
    value = body.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or kind(value) != value:
        noun = "an integer" if kind is int else "a number"
        bounds = f"at least {least:g}" if most >= 2**31 - 1 else f"from {least:g} to {most:g}"
        raise RequestError(f"{name}: expected {noun}, {bounds}, found {_shown(value)}", name)
    return kind(value)


def _is_text(value: object) -> bool:
    """Whether a value is a string that UTF-8 can write, which half of a pair of surrogates is not."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
