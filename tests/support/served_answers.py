"""Answers of every endpoint in one form, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.cli.demo_run import ensure_model
from headrace.serving import engine
from servers import EVERY_LAYER, SMALL, Served, serving

# As of Qwen, whose answers transformers knows how to read.
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
HI = {"role": "user", "content": "hi"}


@contextmanager
def answering(folder: Path) -> Iterator[Served]:
    """A server of a small model with ``TEMPLATE``, which is written into ``folder``."""
    ensure_model(folder, SMALL)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(folder, EVERY_LAYER, longest=1024) as running:
        yield running


def answers(served: Served, endpoint: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """One answer whole and streamed, in one form."""
    asked = {
        "completions": {"prompt": "hi"},
        "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "responses": {"input": "hi"},
    }[endpoint]
    status, text = served.send(f"/v1/{endpoint}", {**asked, **fields})
    assert status == 200, text
    whole = json.loads(text)
    options = {"stream": True} | ({} if endpoint == "responses" else {"stream_options": {"include_usage": True}})
    status, text = served.send(f"/v1/{endpoint}", {**asked, **fields, **options})
    assert status == 200, text
    lines = [line.partition("data: ")[2] for line in text.split("\n\n") if line]
    if endpoint == "responses":
        return of_response(whole), of_response(json.loads(lines[-1])["response"])
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    usage = chunks.pop()["usage"]
    parts = [chunk["choices"][0] for chunk in chunks]
    found = {"usage": usage, "reason": parts[-1]["finish_reason"]}
    if endpoint == "completions":
        choice = whole["choices"][0]
        return (
            {"usage": whole["usage"], "reason": choice["finish_reason"], "text": choice["text"]},
            {**found, "text": "".join(part["text"] for part in parts)},
        )
    choice = whole["choices"][0]
    deltas = [part["delta"] for part in parts]

    def joined(name: str) -> str:
        return "".join(delta.get(name) or "" for delta in deltas)

    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or []]
    message = choice["message"]
    return (
        {
            "usage": whole["usage"],
            "reason": choice["finish_reason"],
            "text": message.get("content") or "",
            "thought": message.get("reasoning_content") or "",
            "calls": [call["function"] for call in message.get("tool_calls") or []],
        },
        {**found, "text": joined("content"), "thought": joined("reasoning_content"), "calls": calls},
    )


def of_response(response: dict[str, Any]) -> dict[str, Any]:
    kinds: dict[str, list[Any]] = {"message": [], "reasoning": [], "function_call": []}
    for item in response["output"]:
        kinds[item["type"]].append(item)
    return {
        "usage": response["usage"],
        "text": "".join(part["text"] for item in kinds["message"] for part in item["content"]),
        "thought": "".join(part["text"] for item in kinds["reasoning"] for part in item["content"]),
        "calls": [{"name": item["name"], "arguments": item["arguments"]} for item in kinds["function_call"]],
    }


def saying(served: Served, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that makes the model generate a text in the next answers, and then only x."""

    def say(text: str) -> None:
        tokens = served.tokenizer(text).input_ids
        (x,) = served.tokenizer("x").input_ids

        def follow(chooser: Any, logits: torch.Tensor) -> torch.Tensor:
            chooser.at = getattr(chooser, "at", -1) + 1
            return torch.tensor([[*tokens, *[x] * 100][chooser.at]])

        monkeypatch.setattr(engine._Chooser, "choose", follow)
        monkeypatch.setattr(engine._Chooser, "is_greedy", False)

    return say
