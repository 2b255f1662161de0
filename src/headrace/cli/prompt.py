"""The prompt of ``headrace generate``: a tokenizer, its chat template, and token ids."""

from __future__ import annotations

import mmap
import os
import re
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.checkpoint.model_folder import open_tokenizer
from headrace.errors import CheckpointError, OptionError
from headrace.formatting import format_size

if TYPE_CHECKING:
    from headrace.adapters.transformers.opened_model import OpenedModel

_ANSWER = {"role": "assistant", "content": "headrace"}
_RENDER_S = 10  # of a processor, and _RENDER_BYTES of memory: for a chat template
_RENDER_BYTES = 2**30

# Names of models that were not tuned to follow instructions: Qwen3-8B-Base, gemma-2-2b-pt.
_BASE = re.compile(r"(^|[-_.])(base|pt|pretrain(ed)?)([-_.]|$)", re.IGNORECASE)


def open_with_template(folder: Path, messages: list[dict[str, str]] | None = None) -> Any:
    """The tokenizer of a model's folder, whose chat template is tried with ``messages``.

    Raises:
        CheckpointError: there is none that transformers can read, or its chat template takes much time or memory.
    """
    tokenizer, ask = open_tokenizer(folder), messages_of("?", None)
    if tokenizer.chat_template:
        _require_bounded(tokenizer, folder, (messages or ask, [*ask, _ANSWER], [*ask, _ANSWER, *ask]))
    return tokenizer


def _require_bounded(tokenizer: Any, folder: Path, chats: Sequence[list[dict[str, str]]]) -> None:
    """Refuse a chat template, a program from the model's folder, that takes much time or memory for one of ``chats``.

    One operation of it can take all memory, or never end, so it is tried in a process that the system ends.
    """
    if not (child := os.fork()):
        status = 0
        try:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE + _RENDER_BYTES
            for limit, most in (resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, _RENDER_S), (resource.RLIMIT_AS, size):
                resource.setrlimit(limit, (most, most))
            status = any(_renders_much(tokenizer, chat) for chat in chats)
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        raise CheckpointError(
            f"{folder}: expected a chat template that renders within {_RENDER_S} s and {format_size(_RENDER_BYTES)}, "
            f"found one that takes more; correct it (chat_template.jinja, or in tokenizer_config.json), or use another"
        )


def _renders_much(tokenizer: Any, chat: list[dict[str, str]]) -> bool:
    """Whether ``chat`` is too large when rendered; errors of a template, of any type, are reported where it is used."""
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=chat[-1] != _ANSWER)
    except Exception as error:
        return isinstance(error, MemoryError)
    return len(text) > _RENDER_BYTES // 16


def messages_of(text: str, system: str | None) -> list[dict[str, str]]:
    """A chat that begins with ``text``, after a ``system`` message if there is one."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def is_instruct(tokenizer: Any, opened: OpenedModel) -> bool:
    """Whether generation ends where a turn of the tokenizer's chat template ends, and the name is not of a base model.

    Base models have templates, too (Qwen3-8B-Base), but their text ends elsewhere.
    """
    if not getattr(tokenizer, "chat_template", None) or _BASE.search(opened.name):
        return False
    try:
        turns = [*messages_of("?", None), _ANSWER]
        end = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(_ANSWER["content"])[2]
    except Exception:  # templates are programs and raise errors of any type
        return False
    eos = opened.generation_settings.get("eos_token_id")
    stops = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
    return not stops.isdisjoint(tokenizer(end, add_special_tokens=False).input_ids)


def tokenize(tokenizer: Any, folder: Path, text: str, messages: list[dict[str, str]] | None) -> dict[str, Any]:
    """Token ids and perhaps their mask: of ``messages`` in the chat template, or else of ``text``."""
    if messages is None:
        inputs = dict(tokenizer(text, return_tensors="pt", return_token_type_ids=False))
    elif not getattr(tokenizer, "chat_template", None):
        raise OptionError(
            f"--chat, --system and `headrace chat` need a chat template, and the tokenizer in {folder} has none; leave "
            f"them out to continue the text as it is (`headrace generate`)"
        )
    else:
        try:
            inputs = dict(
                tokenizer.apply_chat_template(
                    messages,
                    add_generation_prompt=True,
                    return_tensors="pt",
                    return_dict=True,
                    tokenizer_kwargs={"return_token_type_ids": False},
                )
            )
        except Exception as error:  # of any type: see is_instruct
            raise OptionError(
                f"the chat template in {folder} refuses these messages ({error}); leave --system out, or use --no-chat"
            ) from error
    if not inputs["input_ids"].numel():
        raise OptionError(f"--prompt {text!r} has no tokens in the vocabulary of {len(tokenizer)}")
    return inputs
