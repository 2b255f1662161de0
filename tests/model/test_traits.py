"""The promise: what the planner believes of caches and activations is what a transformers model then takes."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import checkpoints
import headrace
from headrace.config import Workload
from headrace.errors import OptionError
from headrace.model.inventory import take_inventory
from headrace.model.memory_profile import ModelProfile, profile_of

SIZE = {**checkpoints.SIZE, "max_position_embeddings": 512}
HEADS = {"num_key_value_heads": 2, "head_dim": 16}
MLA = {
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24, "num_key_value_heads": 4,
    "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention"] * 2
QWEN3_NEXT = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**SIZE, **HEADS}),
    "qwen3": ("Qwen3ForCausalLM", {**SIZE, **HEADS, "head_dim": 32}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**SIZE, **HEADS, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gemma2": ("Gemma2ForCausalLM", {**SIZE, **HEADS, "sliding_window": 6, "layer_types": SLIDING}),
    "gemma3": ("Gemma3ForCausalLM", {**SIZE, **HEADS, "sliding_window": 6, "layer_types": SLIDING}),
    "mixtral": ("MixtralForCausalLM", {**SIZE, **HEADS, "num_local_experts": 4}),
    "mistral": ("MistralForCausalLM", {**SIZE, **HEADS, "sliding_window": 5}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**SIZE, **MLA, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**SIZE, **MLA, "q_lora_rank": 32}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {**SIZE, **HEADS, "num_local_experts": 4, "sliding_window": 6, "layer_types": SLIDING},
    ),
    "phi3": ("Phi3ForCausalLM", {**SIZE, "num_key_value_heads": 2, "pad_token_id": 0}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128, "n_positions": 64}),
    "opt": ("OPTForCausalLM", {**SIZE, "ffn_dim": 128, "word_embed_proj_dim": 64, "pad_token_id": 0}),
    "falcon": ("FalconForCausalLM", {**SIZE, "multi_query": True, "new_decoder_architecture": False}),
    "qwen3_next": ("Qwen3NextForCausalLM", {**SIZE, **HEADS, **QWEN3_NEXT}),
    "mamba": ("MambaForCausalLM", {**SIZE, "state_size": 8, "expand": 2}),
    "mamba2": (
        "Mamba2ForCausalLM",
        {**SIZE, "state_size": 8, "expand": 2, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    ),
    "zamba": (
        "ZambaForCausalLM",
        {
            **SIZE, "num_key_value_heads": 4, "n_mamba_heads": 2, "mamba_dt_rank": 4,
            "layers_block_type": ["mamba", "hybrid"] * 2,
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", {**SIZE, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"] * 2}),
}  # fmt: skip


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    kind, size = MODELS[name]
    model_class = getattr(transformers, kind)
    return model_class(model_class.config_class(**{**size, **changes})).to(dtype).eval()


def bytes_of(cache: Any) -> int:
    """Bytes of the memory behind every tensor that the layers of ``cache`` keep."""
    found: dict[int, int] = {}
    for layer in cache.layers:
        for name, kept in vars(layer).items():
            for tensor in kept.values() if isinstance(kept, dict) else [kept]:
                if isinstance(tensor, torch.Tensor) and name != "_sliding_window_tensor":
                    found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(found.values())


@torch.no_grad()
def sizes_while_decoding(model: Any, batch: int, steps: int) -> list[int]:
    """Bytes of the default cache after every step of one token for ``batch`` sequences."""
    key = "cache_params" if "Mamba" in type(model).__name__ else "past_key_values"
    cache, sizes = None, []
    for step in range(steps):
        found = model(input_ids=torch.full((batch, 1), 5 + step), use_cache=True, **{key: cache} if cache else {})
        cache = getattr(found, key)
        sizes.append(bytes_of(cache))
    return sizes


class TestCaches:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", MODELS)
    def test_bytes_are_those_of_the_default_cache(self, name: str, dtype: torch.dtype) -> None:
        """Before and after a window is full."""
        model = make(name, dtype)
        profile = profile_of(model, 9)
        assert sizes_while_decoding(model, 3, 9) == [profile.cache_bytes(3, tokens) for tokens in range(1, 10)]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are alive at once; ``held`` are those that are not counted."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.live = self.peak = 0
        tensors = (*held.parameters(), *held.buffers())
        self._seen = {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._seen:
            return
        self._seen.add(storage._cdata)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.live -= num_bytes


@torch.no_grad()
def peak_of_step(model: Any, batch: int, context: int) -> int:
    """Peak bytes of a step that brings ``batch`` sequences to ``context`` tokens, their cache included."""
    ids = torch.ones(batch, 1, dtype=torch.int64)
    with LiveBytes(model) as meter:
        cache = model(input_ids=ids.expand(batch, context - 2), use_cache=True, logits_to_keep=1).past_key_values
        # Once more: after a prompt, a layer with a window holds all of it until the next step.
        cache = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        gc.collect()
        meter.peak = meter.live
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        scores = logits[:, -1].to(copy=True, dtype=torch.float32)  # as generate does
        assert scores.shape == (batch, model.config.get_text_config().vocab_size)
    return meter.peak


# Where the MLP is what counts, and where the logits are.
WIDE = {"inner": {"intermediate_size": 512}, "vocabulary": {"vocab_size": 4096}}
WITH_PROMPT = [name for name in MODELS if name not in ("qwen3_next", "mamba", "mamba2", "zamba", "lfm2")]


def planned_and_measured(model: Any, batch: int, context: int) -> tuple[int, int]:
    """What a step takes beside the caches: as planned, and as metered."""
    profile = replace(profile_of(model, context), kernels_per_step=None)  # eager steps
    caches = profile.cache_bytes(batch, context)
    return profile.workload_bytes(batch, context) - caches, peak_of_step(model, batch, context) - caches


class TestActivations:
    """A bound of the peak, and at most twice what is measured."""

    @pytest.mark.parametrize("rows", [64, 256])
    @pytest.mark.parametrize("wide", WIDE)
    @pytest.mark.parametrize("name", WITH_PROMPT)
    def test_per_row(self, name: str, wide: str, rows: int) -> None:
        model = make(name, torch.bfloat16, **WIDE[wide])
        planned, measured = planned_and_measured(model, rows, 3)
        assert measured <= planned <= 2 * measured

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    # All layers of mistral keep a window; falcon's own attention code repeats what its heads share.
    @pytest.mark.parametrize("name", [name for name in WITH_PROMPT if name not in ("mistral", "falcon")])
    def test_per_token_of_the_context(self, name: str, attention: str) -> None:
        model = make(name, **({"n_positions": 512} if name == "gpt2" else {}))
        if attention == "sdpa" and not model._supports_sdpa:
            pytest.skip(f"{name} has no such attention")
        model.set_attn_implementation(attention)
        planned, measured = planned_and_measured(model, 4, 400)
        assert measured <= planned <= 2 * measured

    def test_the_meter_sees_what_is_alive_at_once(self) -> None:
        model = nn.Linear(256, 256, bias=False)
        with LiveBytes(model) as meter, torch.no_grad():
            kept = model(torch.ones(16, 256))
            for _ in range(3):
                kept = model(kept)
        assert meter.peak == 2 * kept.nbytes


class Launches(TorchDispatchMode):
    """Counts calls of operations that make or change tensors, products of matrices apart."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func._schema.name.removeprefix("aten::")
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        if made and not func.is_view and "empty" not in name and name not in ("mm", "bmm", "addmm", "_unsafe_view"):
            self.names.append(name)
        return result


@torch.no_grad()
def launches_of_step(model: Any, prompt: int) -> int:
    """Kernels of a step of one token behind ``prompt`` others, without logits; on the CPU, by weights with values."""
    model.set_attn_implementation("eager")
    key = "cache_params" if "Mamba" in type(model).__name__ else "past_key_values"
    decoder, tokens = model.get_decoder(), torch.ones(1, prompt, dtype=torch.int64)
    cache = getattr(decoder(input_ids=tokens, use_cache=True), key)
    with Launches() as meter:
        decoder(input_ids=tokens[:, :1], use_cache=True, **{key: cache})
    return len(meter.names)


class TestKernels:
    # Falcon's attention is not chosen by name.
    @pytest.mark.parametrize("name", [name for name in MODELS if name != "falcon"])
    def test_as_many_as_a_step_has(self, name: str) -> None:
        """But for masks, which depend on values."""
        model = make(name, torch.bfloat16)
        model.set_experts_implementation("batched_mm")
        counted = profile_of(model, 64).kernels_per_step
        assert counted is not None
        assert counted == pytest.approx(launches_of_step(model, 32), abs=4)

    @pytest.mark.parametrize(
        ("name", "per_layer"),
        [
            # Two norms of 8, two rotations of 5, the cache 2, repeated heads 2, scores 5 (scaled, masked, softmax,
            # two casts), two sums, an activation and a product.
            ("llama", 39),
            ("qwen3", 39 + 2 * 8),  # norms of queries and keys
        ],
    )
    def test_of_a_layer_by_hand(self, name: str, per_layer: int) -> None:
        few, more = (profile_of(make(name, torch.bfloat16, num_hidden_layers=n), 64).kernels_per_step for n in (2, 5))
        assert few is not None
        assert more == few + 3 * per_layer

    def test_not_without_a_context_nor_a_decoder(self) -> None:
        assert profile_of(make("llama")).kernels_per_step is None
        assert profile_of(transformers.BertModel(transformers.BertConfig(**SIZE)), 64).kernels_per_step is None

    @pytest.mark.parametrize("how", ["grouped_mm", "eager"])
    def test_copies_of_experts_count_where_rows_are_read(self, how: str) -> None:
        """Decoding in ``batched_mm`` copies all weights of the experts of a row; ``eager`` copies none."""
        model = make("mixtral", torch.bfloat16)
        model.set_experts_implementation(how)
        profile, config = profile_of(model, 64), model.config
        each = 3 * config.hidden_size * config.intermediate_size * 2
        assert profile.copied_experts_bytes_per_row == (how == "grouped_mm") * config.num_experts_per_tok * each
        eager = replace(profile, kernels_per_step=None)
        graphs = profile.workload_bytes(3, 64) - eager.workload_bytes(3, 64)
        assert graphs == (54 << 20) + 3 * profile.copied_experts_bytes_per_row

    def test_memory_is_known_where_no_step_could_be_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        known, forward = profile_of(make("llama"), 64), transformers.LlamaModel.forward

        def only_prompts(self: Any, input_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
            assert input_ids.shape[1] > 1
            return forward(self, input_ids, *args, **options)

        monkeypatch.setattr(transformers.LlamaModel, "forward", only_prompts)
        assert profile_of(make("llama"), 64) == replace(known, kernels_per_step=None)


class TestReading:
    def test_numbers_of_the_configuration(self) -> None:
        assert profile_of(make("qwen3_moe")).experts_per_token == 2
        assert profile_of(make("llama")).experts_per_token is None
        assert profile_of(make("gpt2")).max_context == 64
        assert profile_of(make("gemma2"), 64).window == 6

    def test_other_modules_claim_nothing(self) -> None:
        assert profile_of(nn.Linear(4, 4), 64) == ModelProfile()

    def test_memory_is_measured_for_a_context_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make("llama")
        before = torch.get_rng_state()
        assert profile_of(model, 64).kv_bytes_per_token == 4 * 2 * 2 * 16 * 4
        assert torch.equal(torch.get_rng_state(), before)
        monkeypatch.setattr("headrace.model.memory_profile.measured", lambda *_: pytest.fail("measured"))
        assert profile_of(model).cache_bytes(4, 100) == 0

    def test_a_cache_that_is_stated_and_not_returned_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = transformers.LlamaModel.forward

        def without(self: Any, *args: Any, **options: Any) -> Any:
            found = forward(self, *args, **options)
            return transformers.modeling_outputs.BaseModelOutput(found.last_hidden_state)

        monkeypatch.setattr(transformers.LlamaModel, "forward", without)
        with pytest.raises(OptionError, match=r"LlamaForCausalLM keeps one .* found none \(its forward returns none\)"):
            headrace.offload(make("llama"), headrace.Budget("1GiB", workload=Workload([4], 64)))
        monkeypatch.setattr(transformers.LlamaModel, "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(OptionError, match=r"found none \(ZeroDivisionError: .*; leave the context out"):
            headrace.make_plan(make("llama"), "1GiB", workload=Workload([4], 64))

    def test_a_plan_says_that_no_cache_is_counted(self) -> None:
        config = transformers.OpenAIGPTConfig(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64)
        plans = [make("llama"), transformers.OpenAIGPTLMHeadModel(config)]
        told = [str(headrace.make_plan(model, "1GiB", workload=Workload([4], 64))) for model in plans]
        assert ["no KV cache is counted" in text for text in told] == [False, True]

    def test_a_wrapper_is_measured_as_what_it_wraps(self) -> None:
        class Wrapper(nn.Module):
            def __init__(self, inner: Any) -> None:
                super().__init__()
                self.inner, self.config = inner, inner.config

        assert profile_of(Wrapper(make("gemma2")), 64) == profile_of(make("gemma2"), 64)

    def test_encoders_keep_nothing(self) -> None:
        config = transformers.BertConfig(**SIZE)
        profile = profile_of(transformers.BertModel(config), 64)
        assert profile.cache_bytes(4, 100) == 0 < profile.activation_bytes_per_row

    @pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BartForConditionalGeneration"])
    def test_a_decoder_keeps_its_own_tokens_and_those_of_the_source(self, name: str) -> None:
        size: dict[str, Any] = {"d_model": 64, "vocab_size": 128, "decoder_start_token_id": 0, "pad_token_id": 0}
        size |= {"d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4} if name[0] == "T" else {}
        size |= {"decoder_layers": 3, "encoder_layers": 2, "decoder_ffn_dim": 128, "encoder_ffn_dim": 128}
        size |= {"decoder_attention_heads": 4, "encoder_attention_heads": 4}
        model_class = getattr(transformers, name)
        model = model_class(model_class.config_class(**size)).eval()
        ids = torch.ones(2, 7, dtype=torch.int64)
        with torch.no_grad():
            cache = model(input_ids=ids, decoder_input_ids=ids, use_cache=True).past_key_values
        kept = bytes_of(cache.self_attention_cache) + bytes_of(cache.cross_attention_cache)
        assert kept == profile_of(model, 7).cache_bytes(2, 7) > 0

    def test_the_text_part_of_a_composite_model(self) -> None:
        text = transformers.Gemma3TextConfig(**{**SIZE, **HEADS, "sliding_window": 6, "layer_types": SLIDING})
        vision = transformers.SiglipVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28
        )
        model = transformers.Gemma3ForConditionalGeneration(
            transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision.to_dict())
        )
        found, alone = profile_of(model, 64), profile_of(make("gemma3"), 64)
        assert found.cache_bytes(2, 50) == alone.cache_bytes(2, 50)
        assert (found.window, found.max_context) == (alone.window, alone.max_context)

    def test_offload_plans_for_a_live_model(self) -> None:
        model = make("qwen3", intermediate_size=4096)
        weights = take_inventory(model).num_bytes
        work = Workload([4], 256)
        beside = replace(profile_of(model, 256), kernels_per_step=None).workload_bytes(4, 256)  # a CPU has no graphs
        with headrace.offload(model, headrace.Budget(weights + beside // 2, workload=work)) as handle:
            assert handle.plan.device_bytes <= weights - beside // 2
        with pytest.raises(OptionError, match="context of 513 tokens is longer than the 512"):
            headrace.offload(model, headrace.Budget("1GiB", workload=Workload([1], 513)))
