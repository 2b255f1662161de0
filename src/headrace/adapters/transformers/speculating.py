"""``generate`` with speculation: transformers makes the guesses and accepts them, this adds the arguments and counts.

Calls of one sequence, greedy or sampled, are speculated; others run as they would without, with one warning.
"""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from headrace.checkpoint.model_folder import draft_folder
from headrace.errors import OptionError, warn_user
from headrace.graphs.decoding import arguments_in_force
from headrace.plan.speculation import Speculation
from headrace.stats import SpeculationCounts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Speculating"]

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class Speculating:
    """Makes ``model.generate`` speculate, from :meth:`attach` to :meth:`remove`."""

    def __init__(self, model: PreTrainedModel, speculation: Speculation, device: torch.device) -> None:
        """
        Args:
            model: perhaps still on ``meta``.
            speculation: with a number of guesses; its draft is loaded onto ``device``.

        Raises:
            OptionError: a model that cannot verify guesses, or a draft whose tokens do not fit.
            CheckpointError: the folder of the draft.
        """
        if model._is_stateful or not model.can_generate() or model.config.is_encoder_decoder:
            raise OptionError(
                f"speculate: expected a causal language model with a cache, from which guesses that are not accepted "
                f"can be removed, found {type(model).__name__}; leave speculate out (--speculate)"
            )
        self._model: Any = model
        own_type: Any = type(model)
        self._eager = functools.partial(own_type.generate, model)
        self._guesses = speculation.guesses or 4
        self._counts = SpeculationCounts(speculation.guesser, self._guesses)
        self._lock, self._inside = threading.Lock(), threading.local()
        self._arguments: dict[str, Any] = {"prompt_lookup_num_tokens": self._guesses}
        if (draft := speculation.draft) is not None:
            self._arguments = self._with_draft(draft_folder(draft), device)
        self._warned: set[str] = set()
        self._attached: Any = None
        self._plain = self._installed = self._eager

    def attach(self) -> None:
        """Put ``generate`` in place; what is there now runs the calls that are not speculated."""
        self._installed = vars(self._model).get("generate")
        self._plain = self._model.generate  # perhaps in CUDA graphs, in which nothing is verified

        @functools.wraps(self._plain)
        def generate(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "generate", False):  # early exit calls it for its guesses
                return self._plain(*args, **kwargs)
            self._inside.generate = True
            try:
                return self._generate(*args, **kwargs)
            finally:
                self._inside.generate = False

        vars(self._model)["generate"] = self._attached = generate

    def remove(self) -> None:
        """Undo :meth:`attach`; frees the draft model."""
        self._arguments = {}
        if vars(self._model).get("generate") is not self._attached:
            return
        del vars(self._model)["generate"]
        if self._installed is not None:
            vars(self._model)["generate"] = self._installed

    @property
    def counts(self) -> SpeculationCounts:
        """Of all calls so far."""
        return self._counts

    def _with_draft(self, folder: Path, device: torch.device) -> dict[str, Any]:
        shows_progress = is_progress_bar_enabled()
        disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            draft: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        finally:
            if shows_progress:
                enable_progress_bar()  # type: ignore[no-untyped-call]
        draft.to(device).eval()
        config = draft.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = self._guesses, "constant"
        config.assistant_confidence_threshold = 0.0  # or it ends a chain early, and the number of guesses varies
        tokenizers = [_tokenizer(self._model.config.name_or_path), _tokenizer(folder)]
        words = [None if each is None else each.get_vocab() for each in tokenizers]
        sizes = [each.config.get_text_config(decoder=True).vocab_size for each in (self._model, draft)]
        # transformers takes vocabularies of one size for the same, and translates between others.
        if sizes[0] == sizes[1] and words[0] == words[1]:
            return {"assistant_model": draft}
        if sizes[0] == sizes[1] or None in tokenizers:
            raise OptionError(
                f"speculate: the tokens of {folder} ({sizes[1]}) are others than those of the model ({sizes[0]}), and "
                f"transformers translates where the sizes differ and both folders have a tokenizer (tokenizer.json); "
                f"use another draft, or lookup"
            )
        return {"assistant_model": draft, "tokenizer": tokenizers[0], "assistant_tokenizer": tokenizers[1]}

    def _generate(self, inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        reason = (
            "it has more than two positional arguments" if args else self._why_not(inputs, generation_config, kwargs)
        )
        if reason is not None:
            if reason not in self._warned:
                self._warned.add(reason)
                warn_user(f"generate runs without speculation: {reason}")
            return self._plain(inputs, generation_config, *args, **kwargs)
        passes, caller = [0], threading.get_ident()

        def count(*_: Any) -> None:
            passes[0] += threading.get_ident() == caller  # others have hooks of their own

        hook = self._model.register_forward_pre_hook(count)
        try:
            output = self._eager(inputs, generation_config, **{**self._arguments, **kwargs})
        finally:
            hook.remove()
        prompt = kwargs.get("input_ids") if inputs is None else inputs
        tokens = getattr(output, "sequences", output).shape[1] - (0 if prompt is None else prompt.shape[1])
        with self._lock:
            before = self._counts
            self._counts = SpeculationCounts(
                before.guesser, before.guesses, before.passes + passes[0], before.tokens + tokens
            )
        return output

    def _why_not(self, inputs: Any, given: Any, kwargs: dict[str, Any]) -> str | None:
        """Why a call is not speculated."""
        config, prompt = arguments_in_force(self._model, inputs, given, kwargs)
        mode = config.get_generation_mode(kwargs.get("assistant_model"))
        if getattr(config, "assistant_early_exit", None) is not None:
            return "assistant_early_exit moves the first layers once for every guess"
        if mode not in _MODES:
            return f"the call asks for {mode.value.replace('_', ' ')}"
        if prompt is not None and prompt.shape[0] * (config.num_return_sequences or 1) > 1:
            return "one sequence at a time can be speculated"
        if config.use_cache is False or config.cache_implementation not in (None, "dynamic"):
            return "it needs a cache that grows (use_cache, cache_implementation)"
        return None


def _tokenizer(folder: Any) -> Any:
    """``None``: the folder has none."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError):
        return None
