"""Grammars of answers that are JSON or calls of tools, by llguidance, which the extra ``structured`` installs.

A grammar is text in llguidance's dialect of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from transformers import LogitsProcessor

from headrace.serving.answers import REASONING
from headrace.serving.request_body import GenerationRequest, RequestError

# Between the parts of JSON: models that may go on with spaces do.
_SPACES = r"(\n[ \t]{0,32}| )?"
_LEAST = -1e30  # of a logit that stays finite at the least temperature


class GrammarProcessor(LogitsProcessor):
    """Forbids the tokens that a grammar does not allow next. Belongs to one request.

    Attributes:
        ends: tokens of which one has to end the answer.
    """

    def __init__(self, matcher: Any, ends: Sequence[int]) -> None:
        self._matcher, self.ends, self._has_begun = matcher, ends, False

    def copy(self) -> GrammarProcessor:
        """One for another answer; a grammar takes longer to make."""
        return GrammarProcessor(self._matcher.deep_copy(), self.ends)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Take the newest token; float32 logits, [1, vocabulary], in and out.

        Raises:
            RequestError: the grammar has become too complex, or the tokenizer lacks what it needs.
        """
        if self._has_begun:
            self._matcher.consume_token(int(input_ids[0, -1]))
        self._has_begun = True
        found = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        if self._matcher.is_error():
            raise RequestError(f"the format of the answer: {_reason(self._matcher)}")
        allowed = found[: scores.shape[-1]].to(scores.device) > 0
        # Where others have forbidden all that the grammar allows, it counts alone.
        return scores.clamp(min=_LEAST).masked_fill(~allowed, -torch.inf)


def _reason(matcher: Any) -> str:
    return " ".join(str(matcher.get_error()).split("<state>")[0].split()).partition(" 1 | ")[0][:300]


class Grammars:
    """Makes the grammars of requests to one model."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self._tokenizer, self._model = tokenizer, model

    def processor(
        self, request: GenerationRequest, prompt: Sequence[int], template: dict[str, Any] | None
    ) -> GrammarProcessor | None:
        """Processor that forbids other answers; ``None``: the request wants no format. Takes up to seconds.

        Args:
            request: all of a request.
            prompt: its tokens.
            template: by which transformers finds reasoning and calls in answers.

        Raises:
            RequestError: the schema or the template is not supported, or llguidance is not installed.
        """
        must_call = getattr(request, "must_call", False)
        if request.answer_schema is None and not must_call:
            return None
        field = "tool_choice" if must_call else "text" if hasattr(request, "text") else "response_format"
        try:
            from llguidance import LLMatcher

            rules = self._rules(request, self._tokenizer.decode(prompt), template or {}, field)
            matcher = LLMatcher(self._library, "\n".join(rules), log_level=0)
        except RequestError:
            raise
        except ImportError:
            text = f"{field} needs llguidance, which the server lacks: pip install 'headrace[structured]'"
            raise RequestError(text, field) from None
        except ValueError as error:  # half a surrogate pair in a name, or a tokenizer that it does not know
            raise RequestError(f"{field}: {error}", field) from None
        if matcher.is_error():
            raise RequestError(f"{field}: {_reason(matcher)}", field)
        return GrammarProcessor(matcher, self._ends)

    @cached_property
    def _ends(self) -> list[int]:
        ends = self._model.generation_config.eos_token_id
        given = {*(ends if isinstance(ends, list) else [ends]), self._tokenizer.eos_token_id} - {None}
        return sorted(end for end in given if end < len(self._tokenizer))

    @cached_property
    def _library(self) -> Any:
        from llguidance.hf import from_tokenizer

        if not self._ends:
            raise ValueError("expected a tokenizer with a token that ends texts")
        # Models may have more logits than their tokenizers have tokens.
        num_tokens = max(len(self._tokenizer), self._model.get_input_embeddings().num_embeddings)
        return from_tokenizer(self._tokenizer, num_tokens, self._ends)

    def _rules(self, request: Any, prompt: str, template: dict[str, Any], field: str) -> list[str]:
        schema, tools, answers = request.answer_schema, getattr(request, "tools", None) or [], []
        rules = self._thought(prompt, template)
        if schema is not None:
            rules.append(f"json: {_json(schema)}")
            answers.append("json")
        if tools:
            rules += self._calls(request, tools, template, field)
            answers.append("calls")
        return [*rules, f"answer: {' | '.join(answers)}"]

    def _mark(self, tag: str) -> str:
        """A tag in a grammar: a token of its own, or text."""
        token = self._tokenizer.get_added_vocab().get(tag)
        return f"<[{token}]>" if token is not None and self._library.is_special_token(token) else json.dumps(tag)

    def _thought(self, prompt: str, template: dict[str, Any]) -> list[str]:
        """The first rule: reasoning, as far as the model has it and the prompt leaves it open, and the answer."""
        part: dict[str, Any] = next(
            (template["fields"][name] for name in REASONING if name in template.get("fields", ())), {}
        )
        first, last, anchors = part.get("open"), part.get("close"), template.get("start_anchor") or []
        tails = [prompt.rpartition(each)[2] for each in ([anchors] if isinstance(anchors, str) else anchors)]
        tail = min(tails, key=len, default="")
        if not (isinstance(first, str) and isinstance(last, str)) or last in tail:
            return ["start: answer"]
        begin, end = self._mark(first), self._mark(last)
        if first in tail:  # the prompt has begun to reason
            start = "start: thought answer"
        elif begin.startswith("<"):
            start = f"start: ({begin} thought)? answer"
        else:  # no token of the model's: it does not reason
            return ["start: answer"]
        text = f"text {end}\ntext: /(.|\\n)*/" if end.startswith("<") else f"text\ntext[suffix={end}]: /(.|\\n)*/"
        return [start, "thought: reasoning SPACES?", f"reasoning: {text}", "SPACES: /[ \\n]{1,4}/"]

    def _calls(self, request: Any, tools: list[Any], template: dict[str, Any], field: str) -> list[str]:
        """Calls between tags, each an object with a name and arguments."""
        part = template.get("fields", {}).get("tool_calls", {})
        first = part.get("open") or part.get("open_pattern", "").removeprefix(r"\s*")
        is_json = part.get("content") == "json" and not part.get("content_args")
        is_json = is_json and part.get("transform") == {"type": "function", "function": "{content}"}
        if not is_json or not first or "\\" in first or not isinstance(part.get("close"), str):
            text = f"{field} beside tools is not supported for this model, whose calls are not JSON between tags"
            raise RequestError(text, field)
        functions = [tool.get("function", tool) for tool in tools]
        if isinstance(request.tool_choice, dict):
            functions = [each for each in functions if each["name"] == request.tool_choice["name"]]
        rules = []
        for at, function in enumerate(functions):
            begin = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
            rules.append(f'function_{at}: {json.dumps(begin, ensure_ascii=False)} arguments_{at} "}}"')
            rules.append(f"arguments_{at}: {_json(function.get('parameters') or {'type': 'object'})}")
        names = " | ".join(f"function_{at}" for at in range(len(functions)))
        rules.append(f'call: {self._mark(first)} "\\n" ({names}) "\\n" {self._mark(part["close"])}')
        is_one = request.parallel_tool_calls is False or isinstance(request.tool_choice, dict)
        return [*rules, "calls: call" if is_one else 'calls: call ("\\n" call)*']


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': _SPACES}})}"
