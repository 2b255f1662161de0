"""A model folder opened for planning: the model on ``meta``, matched with the headers of its files."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, conversion_mapping, core_model_loading

from headrace.adapters.transformers.conversion import Match, match
from headrace.adapters.transformers.load_folder import build_meta_model, differences
from headrace.adapters.transformers.ordered_experts import prefer_ordered
from headrace.adapters.transformers.packed_layout import use_packed_layout
from headrace.adapters.transformers.quantised import NotHereError, stated_quantisation
from headrace.checkpoint.metadata_cache import FolderFacts
from headrace.checkpoint.model_folder import indexed_bytes, model_folder, model_name
from headrace.checkpoint.safetensors_header import Checkpoint, read_json
from headrace.checkpoint.weight_map import WeightMap
from headrace.config import AUTO, Budget, Workload
from headrace.errors import CheckpointError, OptionError
from headrace.formatting import format_size
from headrace.memory.system import gc_paused
from headrace.model.inventory import take_inventory
from headrace.model.memory_profile import measured, profile_of
from headrace.model.records import Inventory, ModelProfile
from headrace.planning.context import not_in_files
from headrace.planning.request import compute_device

# Settings of generation_config.json that change no token of one text, or that batches have, too; and that only
# ``generate`` has.
_BATCHED = """bos_token_id decoder_start_token_id pad_token_id max_length max_new_tokens use_cache cache_implementation
cache_config max_cache_len prefill_chunk_size disable_compile low_memory early_stopping length_penalty diversity_penalty
return_dict_in_generate output_attentions output_hidden_states output_scores output_logits num_assistant_tokens
num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind target_lookbehind
max_matching_ngram_size eos_token_id do_sample temperature top_k top_p repetition_penalty no_repeat_ngram_size
bad_words_ids min_length min_new_tokens suppress_tokens begin_suppress_tokens stop_strings transformers_version"""
_ALONE = """max_time min_p top_h typical_p epsilon_cutoff eta_cutoff encoder_repetition_penalty renormalize_logits
encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id sequence_bias
remove_invalid_values watermarking_config"""
_CLOSE = 0.01  # files may hold a few more small tensors than the model


_SLOW_CACHES = ("offloaded", "quantized")  # or inexact ones
_NO_SETTINGS = GenerationConfig.from_dict({})


@dataclass(frozen=True)
class OpenedModel:
    """A model on ``meta`` and the sources of its weights; ``module`` has no data."""

    folder: Path
    module: PreTrainedModel
    match: Match
    base: ModelProfile
    note: str | None = None  # why it can only be planned

    @property
    def weights(self) -> WeightMap:
        """The ranges of the files with the tensors of the model."""
        return self.match.weights

    @property
    def name(self) -> str:
        """Name of the model, for output."""
        return model_name(self.folder)

    @property
    def inventory(self) -> Inventory:
        """Inventory of the model as stored in its files."""
        # Not take_inventory(): match() cut ties between tensors with different values in the checkpoint.
        return self.match.inventory

    @property
    def differences(self) -> list[str]:
        """Warnings, as of :func:`differences`."""
        return [*([self.note] if self.note else []), *differences(self.module, self.match)]

    @property
    def generation_settings(self) -> dict[str, Any]:
        """Settings of generation_config.json, or else of the module.

        Raises:
            CheckpointError: the file is damaged.
        """
        file = self.folder / "generation_config.json"
        return read_json(file) if file.exists() else self.module.generation_config.to_dict()

    def check_generation(self, tokenizer: Any, settings: Mapping[str, Any], fix: str = "", *, batched: bool) -> None:
        """Refuse settings of generation_config.json that would not be applied, before weights are loaded.

        Args:
            tokenizer: tokenizer of the model.
            settings: those of the file, less what is not used of them.
            fix: what to do beside taking a setting out of the file.
            batched: whether several requests are generated together.

        Raises:
            CheckpointError: a setting that differs from the default is not applied here, or has an invalid value.
        """
        defaults = GenerationConfig._get_default_generation_params()
        applied = (_BATCHED if batched else f"{_BATCHED} {_ALONE}").split()
        for name, value in settings.items():
            if value is None or value == defaults.get(name) or name.startswith("_") or name not in vars(_NO_SETTINGS):
                continue
            try:
                if name not in applied or (name == "cache_implementation" and str(value).startswith(_SLOW_CACHES)):
                    raise ValueError("it is not applied here")
                self._try_setting(name, value, tokenizer)
            except Exception as error:  # of any type: transformers takes any JSON
                text = (str(error).splitlines() or [type(error).__name__])[0]
                raise CheckpointError(
                    f"{self.folder}/generation_config.json: {name} = {str(value)[:60]}: {text[:300]}; "
                    f"take it out of the file{fix}"
                ) from error

    def _try_setting(self, name: str, value: Any, tokenizer: Any) -> None:
        """Do with one setting what ``generate`` does between two tokens."""
        for each in value if isinstance(value, list) else [value]:
            if name.endswith("_token_id") and type(each) is not int:
                raise ValueError("expected the number of a token")
            if each == "":
                raise ValueError("expected a text that is not empty")
            if isinstance(each, float) and not math.isfinite(each):
                raise ValueError("expected a finite number")
        module: Any = self.module
        config: Any = GenerationConfig.from_dict({"do_sample": True, "eos_token_id": 0, "max_length": 9, name: value})
        module._prepare_special_tokens(config, device="cpu")
        ids = torch.zeros(1, 1, dtype=torch.long)
        scores = torch.zeros(1, module.config.get_text_config().vocab_size)
        module._get_logits_processor(config, 1, ids, device="cpu")(ids, scores)
        module._get_stopping_criteria(config, [], tokenizer)(ids, scores)

    def require_causal(self, verb: str) -> None:
        """Refuse a model that does not continue text; ``verb``: what needs it."""
        module: Any = self.module
        if not module.can_generate() or module.config.is_encoder_decoder:
            raise OptionError(
                f'{verb} needs a causal language model (architectures ["...ForCausalLM"] in config.json), found '
                f"{type(module).__name__}"
            )

    def profile(self, context: int = 0) -> ModelProfile:
        """Facts beyond names and sizes; with a ``context``, memory too."""
        return self._measured if context else self.base

    def default_budget(self, batch: int, context: int) -> Budget | None:
        """Budget without a flag: what the GPU has free; ``None`` if no cache can be measured."""
        with suppress(OptionError):
            self.profile(context)
            return Budget(AUTO, workload=Workload([batch], context))
        return None

    @cached_property
    def _measured(self) -> ModelProfile:
        return measured(self.base, self.module)

    def facts(self, context: int) -> tuple[FolderFacts, set[str]]:
        """Everything that planning for ``context`` needs, for the cache, and the files with the code that made it."""
        described = (self.module.config, *self.module.modules())
        names = {base.__module__ for each in described for base in type(each).__mro__}
        names |= {conversion_mapping.__name__, core_model_loading.__name__}
        files = {getattr(sys.modules[name], "__file__", None) for name in names}
        facts = FolderFacts(self.inventory, self.profile(context), self.weights, tuple(self.differences))
        return facts, {file for file in files if file is not None}

    @property
    def unstreamable(self) -> list[str]:
        """Storages whose bytes are in no file unchanged."""
        return not_in_files(self.inventory, self.weights)


def open_model(
    path: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
    device: torch.device | str | None = None,
    to_plan: bool = False,
    experts_implementation: str | None = None,
    use_liger_kernel: bool = False,
) -> OpenedModel:
    """Read config and file headers of a model; arguments as for ``load``.

    ``to_plan``: a quantised model that cannot run here, on ``device``, is described as stored in its files; and a
    folder without files by its config.json alone.

    Raises:
        CheckpointError: no folder of a model, or one without a config or safetensors files that fit together; without
            ``to_plan`` also weights that cannot run here.
    """
    folder = model_folder(path)
    with gc_paused():
        target = compute_device(None) if device is None else torch.device(device)
        if to_plan and not any(folder.glob("*.safetensors")):
            return _from_config(folder, dtype, attn_implementation, target)
        try:
            how: Any = {"attn_implementation": attn_implementation, "experts_implementation": experts_implementation}
            how["use_liger_kernel"] = use_liger_kernel
            module = build_meta_model(folder, dtype=dtype, device=target, **how)
            profile = profile_of(module)
            return OpenedModel(folder, module, match(module, Checkpoint.open(folder), target), profile)
        except NotHereError as error:
            if not to_plan:
                raise
            note = (
                f"{folder}: planned from the headers of the files, with quantised weights as stored there; not with "
                f"their library, which cannot load them here ({error.why})"
            )
        module = _built_to_plan(folder, dtype, attn_implementation, target)
        profile = profile_of(module)  # before its modules lose their weights
        found = match(module, Checkpoint.open(folder), as_stored=stated_quantisation(module.config) is not None)
        return OpenedModel(folder, module, found, profile, note)


def _built_to_plan(
    folder: Path, dtype: torch.dtype | str | None, attn_implementation: str | None, device: torch.device
) -> PreTrainedModel:
    """The model without what a library would put in to run it quantised."""
    module = build_meta_model(folder, dtype=dtype, attn_implementation=attn_implementation)
    if device.type == "cuda":
        prefer_ordered(module)
    return module


def _from_config(
    folder: Path, dtype: torch.dtype | str | None, attn_implementation: str | None, device: torch.device
) -> OpenedModel:
    """The model of a folder without weights, as if its files held each tensor unchanged."""
    module = _built_to_plan(folder, dtype, attn_implementation, device)
    profile, stated = profile_of(module), stated_quantisation(module.config)
    if stated is not None:
        use_packed_layout(folder, module, stated)
    inventory = take_inventory(module)
    saved, indexed = sum(s.num_bytes for s in inventory.storages if s.is_saved), indexed_bytes(folder)
    note = f"{folder}: planned from config.json alone, as if files held every tensor of {type(module).__name__}"
    if indexed is not None and abs(indexed - saved) > _CLOSE * indexed:
        note += f"; they have {format_size(saved)}, and the files {format_size(indexed)} by their index"
    weights = WeightMap.expected(inventory, folder)
    return OpenedModel(folder, module, Match(weights, {}, (), (), (), inventory), profile, note)
