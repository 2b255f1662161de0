"""``generate`` with speculation: transformers makes the guesses and accepts them, this adds the arguments and counts.

Calls of one sequence, greedy or sampled, are speculated; others run as they would without, with one warning.
On a GPU a draft guesses in a CUDA graph where the call is greedy: Python takes long to launch its eager steps, and the
link waits meanwhile (a draft of a billion weights, four guesses: 45 ms a pass on an H100).
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessorList, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.generation.candidate_generator import CandidateGenerator, MTPCandidateGenerator
from transformers.generation.configuration_utils import GenerationMode
from transformers.initialization import meta_device_safe_creation_ops
from transformers.modeling_layers import MtpModel

from headrace.api import session_of
from headrace.checkpoint.model_folder import draft_folder, open_tokenizer
from headrace.errors import CheckpointError, OptionError, warn_user
from headrace.graphs import decoding
from headrace.memory.system import round_up
from headrace.model.inventory import take_inventory
from headrace.model.memory_profile import profile_of
from headrace.plan.plan import assemble
from headrace.plan.speculation import MTP, DraftCost, Speculation
from headrace.planning.context import PlanContext, make_planner
from headrace.stats import SpeculationCounts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENIZERS = {"target": "tokenizer", "assistant": "assistant_tokenizer"}  # names of ``generate``
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class Speculating:
    """Makes ``model.generate`` speculate, from :meth:`attach` to :meth:`remove`, or to the end of its offload."""

    def __init__(
        self, model: PreTrainedModel, speculation: Speculation, device: torch.device, graphs: bool = True
    ) -> None:
        """
        Args:
            model: perhaps still on ``meta``.
            speculation: with a number of guesses; its draft is loaded onto ``device``.
            graphs: a draft on a GPU guesses in a CUDA graph where the call is greedy.

        Raises:
            OptionError: a model that cannot verify guesses, or has no heads; a draft whose tokens do not fit.
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
        self._guesses, self._graphs = speculation.guesses or 4, graphs
        self._lock, self._inside = threading.Lock(), threading.local()
        self._arguments: dict[str, Any] = {"prompt_lookup_num_tokens": self._guesses}
        self._heads: Any = None
        if speculation.guesser == MTP:
            self._guesses, self._arguments = len(_meta_heads(model).layers), {"use_mtp": True}
        elif (draft := speculation.draft) is not None:
            self._arguments = self._with_draft(draft_folder(draft), device)
        self._counts = SpeculationCounts(speculation.guesser, self._guesses)
        self._warned: set[str] = set()
        self._attached: Any = None
        self._plain = self._installed = self._eager

    def attach(self) -> None:
        """Put ``generate`` in place; what is there now runs the calls that are not speculated. Loads the heads.

        Raises:
            CheckpointError: the checkpoint has no heads, or not all of their weights.
        """
        if "use_mtp" in self._arguments:
            try:  # the generator of a call reads the heads: here once
                self._heads = MTPCandidateGenerator(self._model, self._model.generation_config, {})
            except (OSError, ValueError, RuntimeError) as error:
                raise CheckpointError(f"speculate: expected all weights of heads (mtp): {error}; use lookup") from error
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
        vars(self._model)["_get_candidate_generator"] = self._generator_of
        if (session := session_of(self._model)) is not None:
            session.attachments.append(self)

    notes = ()

    def check(self) -> None:
        """Nothing: steps have no outputs that are not to be used."""

    def remove(self) -> None:
        """Undo :meth:`attach`; frees the draft model, or the heads."""
        self._arguments, self._inside, self._heads = {}, threading.local(), None
        vars(self._model).pop("_get_candidate_generator", None)
        if vars(self._model).get("generate") is not self._attached:
            return
        del vars(self._model)["generate"]
        if self._installed is not None:
            vars(self._model)["generate"] = self._installed

    @property
    def counts(self) -> SpeculationCounts:
        """Counts of all calls so far."""
        return self._counts

    def _with_draft(self, folder: Path, device: torch.device) -> dict[str, Any]:
        draft: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False)
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
        if None in tokenizers:
            lacks = folder if tokenizers[1] is None else self._model.config.name_or_path
            raise OptionError(
                f"speculate: expected a tokenizer (tokenizer.json) of the model, of {sizes[0]} tokens, and of its "
                f"draft, of {sizes[1]}, which say what they mean, found none in {lacks}; copy it there, or use another "
                f"draft, or lookup"
            )
        if sizes[0] == sizes[1]:
            raise OptionError(
                f"speculate: some of the {sizes[1]} tokens of {folder} are other words than in the model, and "
                f"transformers translates only between different numbers of tokens; use another draft, or lookup"
            )
        return {"assistant_model": draft, "tokenizer": tokenizers[0], "assistant_tokenizer": tokenizers[1]}

    def _generator_of(self, **given: Any) -> Any:
        """The candidate generator of a call of ``generate``; transformers asks for it."""
        draft, config = given["assistant_model"], given["generation_config"]
        if self._heads is not None and config.use_mtp:
            made = copy.copy(self._heads)
            made.mtp_cache, made.do_sample = copy.deepcopy(made.mtp_cache), config.do_sample  # the cache is empty
            # transformers 5.17 ends guesses at the token for the end; later ones do not read it.
            made.logits_processor, made.eos_token_id = given["logits_processor"], config._eos_token_tensor
            return made
        is_ours = self._graphs and draft is not None and draft is self._arguments.get("assistant_model")
        mask = given["model_kwargs"].get("attention_mask")
        is_padded = mask is not None and not mask.all()
        if is_ours and given["assistant_tokenizer"] is None and not config.do_sample and not is_padded:
            captured: _CapturedDraft = vars(self._inside).setdefault("draft", _CapturedDraft(draft, self._guesses))
            if captured.begin(config.max_length):
                return captured
        own_type: Any = type(self._model)
        return own_type._get_candidate_generator(self._model, **given)

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
        self.count(passes[0], tokens)
        return output

    def count(self, passes: int, tokens: int) -> None:
        """Add to ``counts``."""
        with self._lock:
            before = self._counts
            self._counts = replace(before, passes=before.passes + passes, tokens=before.tokens + tokens)

    def of_sequence(self, longest: int) -> Callable[[Sequence[int]], list[int]]:
        """A function that guesses tokens of one sequence, of ``longest`` at most; its caller verifies them."""
        lookup, draft = (self._arguments.get(name) for name in ("prompt_lookup_num_tokens", "assistant_model"))
        made: Any = None

        @torch.no_grad()
        def guess(tokens: Sequence[int]) -> list[int]:
            nonlocal made
            ids = torch.tensor([tokens], device="cpu" if draft is None else draft.device)
            if made is None:
                options: dict[str, Any] = {"prompt_lookup_num_tokens": lookup, "max_length": longest, "min_length": 0}
                config: Any = GenerationConfig.from_dict(options)
                config._eos_token_tensor = None  # guesses behind the end are not taken
                tokenizers = {f"{name}_tokenizer": self._arguments.get(key) for name, key in _TOKENIZERS.items()}
                made = self._generator_of(
                    generation_config=config, input_ids=ids, inputs_tensor=ids, logits_processor=LogitsProcessorList(),
                    model_kwargs={}, assistant_model=draft, **tokenizers,
                )  # fmt: skip
            found: list[int] = made.get_candidates(ids)[0][0, len(tokens) :].tolist()
            return found

        return guess

    def _why_not(self, inputs: Any, given: Any, kwargs: dict[str, Any]) -> str | None:
        """Why a call is not speculated."""
        config, prompt = decoding.arguments_in_force(self._model, inputs, given, kwargs)
        mode = config.get_generation_mode(kwargs.get("assistant_model"))
        if getattr(config, "assistant_early_exit", None) is not None:
            return "assistant_early_exit moves the first layers once for every guess"
        if mode not in _MODES:
            return f"the call asks for {mode.value.replace('_', ' ')}"
        if prompt is not None and prompt.shape[0] * (config.num_return_sequences or 1) > 1:
            return "one sequence at a time can be speculated"
        if config.guidance_scale not in (None, 1):
            return "guidance_scale keeps a cache of its own, which holds guesses that were not kept"
        if self._heads is not None and (config.output_hidden_states or kwargs.get("inputs_embeds") is not None):
            return (
                "heads (mtp) read the tokens and hidden states of the prompt, not inputs_embeds or output_hidden_states"
            )
        if "assistant_model" in self._arguments and kwargs.get("inputs_embeds") is not None:
            return "a draft reads the tokens of the prompt, not inputs_embeds"
        if config.use_cache is False or config.cache_implementation not in (None, "dynamic"):
            return "it needs a cache that grows (use_cache, cache_implementation)"
        return None


class _CapturedDraft(CandidateGenerator):
    """Greedy guesses of a draft model, whose steps of one token are replayed."""

    def __init__(self, model: Any, guesses: int) -> None:
        self._model, self._guesses = model, guesses
        self._options: dict[str, Any] = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
        self._cache: Any = None
        self._kind: tuple[int, bool] | None = None  # of the cache: tokens, inference mode
        self._step: Callable[[decoding.Inputs], torch.Tensor] | None = None
        self._known = self._max_length = 0  # tokens in the cache, and of prompt and answer

    def begin(self, max_length: int) -> bool:
        """Prepare for a call of ``generate``; ``False``: this draft cannot be captured."""
        if not self._model._can_compile_fullgraph or self._model.device.type not in decoding.GRAPH_DEVICES:
            return False
        kind = round_up(max_length, decoding.LENGTH_STEP), torch.is_inference_mode_enabled()
        if self._kind != kind:
            config = self._model.config.get_text_config(decoder=True)
            self._cache, self._step = StaticCache(config=config, max_cache_len=kind[0]), None
            self._kind = kind
        self._known, self._max_length = 0, max_length
        return all(type(each) is StaticLayer for each in self._cache.layers)

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: int) -> None:
        """The number of guesses is constant."""

    def get_candidates(self, input_ids: Any, **kwargs: Any) -> Any:
        length, made, scores = input_ids.shape[1], input_ids, []
        count = min(self._guesses, self._max_length - length - 1)
        self._known = min(self._known, length - 1)  # guesses behind it were not accepted
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(self._known)
        if length - self._known > self._guesses + 1:  # the prompt
            self._forward(input_ids[:, self._known : -1])
        else:
            for at in range(self._known, length - 1):
                self._replay(input_ids[:, at : at + 1])
        for _ in range(count):
            scores.append(self._replay(made[:, -1:]))
            made = torch.cat([made, scores[-1].argmax(dim=-1, keepdim=True)], dim=1)
        self._known = length - 1 + count
        return made, torch.stack(scores, dim=1) if scores else None

    def _forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        output = self._model(input_ids=input_ids, use_cache=True, **{decoding.CACHE_NAME: self._cache}, **self._options)
        scores: torch.Tensor = output.logits[:, -1]
        return scores

    def _replay(self, token: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids": token}
        if self._step is None:
            self._forward(token)  # the warm-up
            for layer in self._cache.layers:
                layer.cumulative_length.sub_(1)
            try:
                self._step = decoding.StepGraph(self._forward, inputs, token.device).replay
            except RuntimeError as error:
                warn_user(f"the draft guesses eagerly, without CUDA graphs: {str(error).splitlines()[0]}")
                self._step = lambda inputs: self._forward(**inputs)
        return self._step(inputs)


def heads_cost(context: PlanContext, model: Any) -> DraftCost:
    """Cost of the heads of multi-token prediction of ``model``, which ``context`` plans.

    Raises:
        OptionError: it has none that transformers runs, or its files have none.
    """
    target, at = context.target, context.request.expected.context
    heads = _meta_heads(model, () if context.weights is None else context.weights.checkpoint.tensors)
    count, num_bytes = len(heads.layers), sum(parameter.nbytes for parameter in heads.layers.parameters())
    with torch.device("meta"), meta_device_safe_creation_ops():
        twin = type(model.get_decoder())._from_config(heads.config, dtype=model.dtype)  # its cache is like theirs
    del heads.layers[1:]  # a guess takes one, and the output head
    planner = make_planner(take_inventory(heads), profile_of(twin, at), target.device, rates=target.rates)
    guess = planner.forecast(assemble(planner.inventory, [], 0, "cpu"), 1, at)
    return DraftCost(num_bytes + planner.profile.workload_bytes(1, at), guess.step_s, count)


def _meta_heads(model: Any, names: Collection[str] = ()) -> Any:
    """The heads of ``model`` on ``meta``, with its embedding and output head in them; ``names``: of file tensors."""
    try:
        if getattr(model.config, "quantization_config", None) is not None:
            raise ValueError("it is quantised, and the heads would be read without their scales")
        with torch.device("meta"), meta_device_safe_creation_ops():
            heads: Any = MtpModel(model, model.config.get_text_config(decoder=True).num_mtp_layers)
        if not len(heads.layers) or heads.embed_tokens is not model.get_input_embeddings():
            raise ValueError("num_mtp_layers is 0, or the heads would copy the embedding")
        find = getattr(heads, "get_mtp_weights_regex", None)  # 5.17 does not say it before it loads them
        if names and find is not None and not any(map(find(model).search, names)):
            raise ValueError(f"no tensor in its files is named like {find(model).pattern}")
    except Exception as error:  # the code of any model
        raise OptionError(
            f"speculate: expected heads of multi-token prediction (mtp) that transformers {transformers.__version__} "
            f"runs beside an offload, found {type(model).__name__} without: {error}; use lookup or a draft"
        ) from error
    heads.layers.to(model.dtype)
    return heads


def _tokenizer(folder: str | Path) -> Any:
    """``None``: the folder has none."""
    try:
        return open_tokenizer(Path(folder))
    except CheckpointError:
        return None
