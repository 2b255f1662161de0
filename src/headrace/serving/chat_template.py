"""The chat template of a model: prompts from messages, and what its answers hold besides text."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from headrace.serving.request_body import RequestError


class ChatTemplate:
    """The chat template of ``tokenizer``.

    Attributes:
        answers: transformers' template that finds reasoning and calls in answers; ``None``: there is none that fits.
        special: ids of the tokens that are no text, which it reads with the text.
    """

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self._tokenizer = tokenizer
        self.special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        self.answers = self._answer_template(model)
        self._takes_tools = self._reads_tools()

    def _answer_template(self, model: Any) -> dict[str, Any] | None:
        from transformers.cli.serving.utils import get_response_template

        template: dict[str, Any] | None = get_response_template(self._tokenizer, model)
        if template is None or getattr(self._tokenizer, "response_template", None) is not None:
            return template
        asked, turn = [{"role": "user", "content": "?"}], ""
        with suppress(Exception):  # templates are programs, and raise errors of any type
            turn = self._tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        # A parser that finds no anchor takes the prompt for a part of the answer.
        anchors = template.get("start_anchor") or ""
        return template if any(each in turn for each in ([anchors] if isinstance(anchors, str) else anchors)) else None

    def _reads_tools(self) -> bool:
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
        asked = [{"role": "user", "content": "?"}]
        try:
            texts = [
                self._tokenizer.apply_chat_template(asked, tools=tools, add_generation_prompt=True, tokenize=False)
                for tools in (None, [tool])
            ]
        except Exception:  # of any type: some templates refuse such a chat
            return True
        return bool(texts[0] != texts[1])

    def tokens(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: dict[str, Any]
    ) -> list[int]:
        """Token ids of a prompt.

        Args:
            messages: as transformers' templates take them, but contents are lists of texts.
            tools: functions as in OpenAI's API, each in an object of its own or not.
            variables: further ones of the template.

        Raises:
            RequestError: the template has no place for them, or raises an error.
        """
        if tools and self.answers is None:
            raise RequestError("tools is not supported: the tokenizer has no template for answers", "tools")
        if tools and not self._takes_tools:
            raise RequestError("tools is not supported: the chat template shows none to the model", "tools")
        field = "chat_template_kwargs"
        if inspect.signature(type(self._tokenizer).apply_chat_template).parameters.keys() & variables.keys():
            raise RequestError(f"{field}: expected only variables of the chat template", field)
        given = [{**each, "content": " ".join(part["text"] for part in each.get("content", []))} for each in messages]
        nested = [
            {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
            if "function" not in tool
            else tool
            for tool in tools or []
        ]
        try:
            found: list[int] = self._tokenizer.apply_chat_template(
                given, tools=nested or None, add_generation_prompt=True, tokenize=True, return_dict=True, **variables
            )["input_ids"]
        except Exception as error:  # templates are programs, and raise errors of any type
            raise RequestError(
                f"the chat template refuses messages, tools or {field}: {type(error).__name__}: {error}"
            ) from None
        return found

    def parser(self, prompt: list[int], tools: list[dict[str, Any]] | None) -> ResponseParser | None:
        """Parser of one answer; ``None``: answers are text."""
        if self.answers is None:
            return None
        # Up to transformers 5.17 it takes no tools.
        taken: dict[str, Any] = {"tools": tools} if "tools" in inspect.signature(ResponseParser).parameters else {}
        return ResponseParser(self.answers, prefix=self._tokenizer.decode(prompt), **taken)
