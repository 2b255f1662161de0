"""How the tokens of an answer are chosen: the fields of its request, as logits processors of ``generate``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PrefixConstrainedLogitsProcessor

from headrace.serving.request_body import GenerationRequest, RequestError

_ANSWER_TOKENS = 1024


@dataclass(frozen=True)
class Sampling:
    """How one request generates.

    Attributes:
        request: with the fields that need no default.
        most_tokens: tokens of the longest answer.
        ends: tokens that end the answer.
        stops: texts that end it.
        samples: tokens are drawn; else the likeliest are taken.
        seed: of the generator that they are drawn from; ``None``: a random one.
        changes: attributes of the generation config.
    """

    request: GenerationRequest
    most_tokens: int
    ends: list[int]
    stops: list[str]
    samples: bool
    seed: int | None
    changes: dict[str, Any]

    def check_tokens(self, vocabulary: int, prompt: Sequence[int]) -> None:
        """Refuse tokens that a model with embeddings for ``vocabulary`` has not.

        Raises:
            RequestError: with the field that names one.
        """
        if not prompt:
            raise RequestError("the prompt has no tokens; a causal language model needs at least one to continue")
        named = {
            name: getattr(self.request, name) or () for name in ("logit_bias", "stop_token_ids", "allowed_token_ids")
        }
        for field, ids in {"prompt": prompt, **named}.items():
            if (largest := max(map(int, ids), default=0)) >= vocabulary:
                raise RequestError(f"{field}: token {largest}, and the model has embeddings for {vocabulary}", field)


def read_sampling(request: GenerationRequest, default: GenerationConfig) -> Sampling:
    """How ``request`` generates: as ``default``, changed by its fields.

    Raises:
        RequestError: a field has no effect on greedy decoding.
    """
    given = request.model_dump(include={"temperature", "top_k", "top_p", "min_p"}, exclude_none=True)
    samples = given.get("temperature", bool(default.do_sample)) > 0
    idle = [name for name, value in given.items() if value not in (1, 0, -1)]  # all tokens, or only the likeliest
    if idle and not samples and "temperature" not in given:
        name = idle[0]
        raise RequestError(f"{name} has no effect on greedy decoding, the default here; add temperature", name)
    temperature, top_k, top_p = (given.get(name, getattr(default, name)) for name in ("temperature", "top_k", "top_p"))
    changes: dict[str, Any] = {"repetition_penalty": request.repetition_penalty, "min_new_tokens": request.min_tokens}
    if samples:
        changes |= {"temperature": float(temperature or 1), "top_p": float(top_p or 1)}
        changes["top_k"] = top_k if top_k and top_k > 0 else 0
        changes["min_p"] = request.min_p or None
    bias = {(int(token),): float(value) for token, value in (request.logit_bias or {}).items()}
    changes["sequence_bias"] = bias or None
    ends, own = default.eos_token_id, default.stop_strings or []
    ends = [] if request.ignore_eos or ends is None else ends if isinstance(ends, list) else [ends]
    return Sampling(
        request,
        request.max_tokens or default.max_new_tokens or _ANSWER_TOKENS,
        [*ends, *(request.stop_token_ids or [])],
        [*(request.stop or []), *([own] if isinstance(own, str) else own)],
        samples,
        None if request.seed == -1 or not samples else request.seed,
        {name: value for name, value in changes.items() if value is not None},
    )


class _AnswerPenalty(LogitsProcessor):
    """Lowers tokens by how often the answer has them, by OpenAI's formula."""

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        self._num_prompt, self._presence, self._frequency = num_prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        answer = input_ids[:, self._num_prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


def token_sequences(words: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Tokens of texts at the beginning of a text and within one, by vLLM's rule."""
    found: list[list[int]] = []
    for word in words:
        first, within = (tokenizer.encode(f"{space}{word.lstrip()}", add_special_tokens=False) for space in ("", " "))
        found += [first] if within[:1] == first[:1] or len(within) != len(first) else [first, within]
    return [each for each in found if each]


def logits_processors(
    model: Any, bad_words: list[list[int]], sampling: Sampling, num_prompt: int, grammar: LogitsProcessor | None
) -> LogitsProcessorList:
    """Logits processors of ``generate`` for a request, and those that it has not.

    Args:
        bad_words: those of the request as tokens.
        num_prompt: tokens of the prompt.
        grammar: forbids other answers than the request wants.
    """
    request, config = sampling.request, copy.deepcopy(model.generation_config)
    vars(config).update(sampling.changes, do_sample=sampling.samples, eos_token_id=sampling.ends or None)
    config.bad_words_ids = [*(config.bad_words_ids or []), *bad_words] or None
    model._prepare_special_tokens(config, device=model.device)
    more = LogitsProcessorList()
    if request.presence_penalty or request.frequency_penalty:
        more.append(_AnswerPenalty(num_prompt, request.presence_penalty or 0, request.frequency_penalty or 0))
    if allowed := request.allowed_token_ids:
        more.append(PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1))
    if grammar is not None:
        more.append(grammar)
    found: LogitsProcessorList = model._get_logits_processor(
        config, num_prompt, logits_processor=more, device=model.device
    )
    return found
