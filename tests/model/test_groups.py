"""The promise: the groups `attention`, `mlp`, `experts`, ... hold the right tensors in any family, found by structure.

The families are transformers' own models, small and on `meta`. What no family of today shows is made by hand, with
names that say nothing where structure has to decide.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from headrace.model.inventory import Inventory, take_inventory
from headrace.model.semantic_groups import GROUPS, semantic_groups

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 200,
    "pad_token_id": 0,
}  # fmt: skip
HEADS = {**TEXT, "num_key_value_heads": 2}
MOE = {**HEADS, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    **MOE, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_routed_experts": 8,
}  # fmt: skip
VISION = {
    "hidden_size": 40, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
QWEN_VISION = {"depth": 2, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2}
STACKS = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 200, "max_position_embeddings": 64,
}  # fmt: skip


def on_meta(name: str, **config: Any) -> Callable[[], nn.Module]:
    """A model of this class of transformers, without data."""

    def make() -> nn.Module:
        model_class = getattr(transformers, name)
        with torch.device("meta"):
            model: nn.Module = model_class(model_class.config_class(**config))
        return model

    return make


# What every decoder of the Llama line has. Patterns are globs over roles: names with `*` for every number.
LLAMA = {
    "attention": ["model.layers.*.self_attn.*"],
    "mlp": ["model.layers.*.mlp.*"],
    "embeddings": ["model.embed_tokens.weight"],
    "lm_head": ["lm_head.weight"],
}
SPARSE = {**LLAMA, "mlp": [], "experts": ["model.layers.*.mlp.experts.*"]}
DENSE_FIRST = {
    **SPARSE,
    "mlp": ["model.layers.0.mlp.*"],
    "experts": ["model.layers.1.mlp.experts.*"],
    "shared_experts": ["model.layers.1.mlp.shared_experts.*"],
}
TIED = {"embeddings": ["model.embed_tokens.weight"], "lm_head": ["model.embed_tokens.weight"]}
IN_TOWER = {
    "attention": ["model.language_model.layers.*.self_attn.*"],
    "mlp": ["model.language_model.layers.*.mlp.*"],
    "embeddings": ["model.language_model.embed_tokens.weight"],
    "lm_head": ["lm_head.weight"],
}
BERT = {
    "attention": ["*encoder.layer.*.attention.*"],
    "mlp": ["*encoder.layer.*.intermediate.dense.*", "*encoder.layer.*[0-9].output.*"],
    "embeddings": ["*embeddings.*_embeddings.weight"],
}

# name -> (model, the groups it has, 2-D parameters in the layers that are in none: the routers)
FAMILIES: dict[str, tuple[Callable[[], nn.Module], dict[str, list[str]], list[str]]] = {
    "llama": (on_meta("LlamaForCausalLM", **HEADS, attention_bias=True, mlp_bias=True), LLAMA, []),
    "one layer": (on_meta("LlamaForCausalLM", **{**HEADS, "num_hidden_layers": 1}), LLAMA, []),
    "qwen2": (on_meta("Qwen2ForCausalLM", **HEADS), LLAMA, []),
    "qwen3": (on_meta("Qwen3ForCausalLM", **HEADS), LLAMA, []),
    "qwen3 tied": (on_meta("Qwen3ForCausalLM", **HEADS, tie_word_embeddings=True), {**LLAMA, **TIED}, []),
    "mistral": (on_meta("MistralForCausalLM", **HEADS), LLAMA, []),
    "gemma2": (on_meta("Gemma2ForCausalLM", **HEADS), {**LLAMA, **TIED}, []),
    "gemma3": (on_meta("Gemma3ForCausalLM", **HEADS), {**LLAMA, **TIED}, []),
    "phi": (on_meta("PhiForCausalLM", **TEXT), {**LLAMA, "lm_head": ["lm_head.*"]}, []),
    "phi3": (on_meta("Phi3ForCausalLM", **HEADS), LLAMA, []),
    "qwen3 moe": (on_meta("Qwen3MoeForCausalLM", **MOE, num_experts=4), SPARSE, ["*.mlp.gate.weight"]),
    "as many experts as wide": (
        on_meta("Qwen3MoeForCausalLM", **MOE, num_experts=64), SPARSE, ["*.mlp.gate.weight"],
    ),
    "mixtral": (on_meta("MixtralForCausalLM", **HEADS, num_local_experts=4), SPARSE, ["*.mlp.gate.weight"]),
    "gpt-oss": (
        on_meta("GptOssForCausalLM", **HEADS, num_local_experts=4, head_dim=16), SPARSE, ["*.mlp.router.weight"],
    ),
    "qwen2 moe": (
        on_meta("Qwen2MoeForCausalLM", **MOE, num_experts=4, shared_expert_intermediate_size=48),
        {**SPARSE, "shared_experts": ["*.mlp.shared_expert.*"]},
        ["*.mlp.gate.weight", "*.mlp.shared_expert_gate.weight"],
    ),
    "deepseek v2": (
        on_meta("DeepseekV2ForCausalLM", **MLA, q_lora_rank=None, n_group=1, topk_group=1),
        DENSE_FIRST,
        ["*.mlp.gate.weight"],
    ),
    "deepseek v3": (
        on_meta("DeepseekV3ForCausalLM", **MLA, q_lora_rank=32, n_group=4, topk_group=2),
        DENSE_FIRST,
        ["*.mlp.gate.weight"],
    ),
    "jamba": (
        on_meta("JambaForCausalLM", **{**HEADS, "num_hidden_layers": 8}, num_experts=4),
        {
            **SPARSE,
            "attention": ["*.layers.*.self_attn.*", "*.layers.*.mamba.*"],
            "mlp": [f"*.layers.{index}.feed_forward.*" for index in (0, 2, 4, 6)],
            "experts": ["*.feed_forward.experts.*"],
        },
        ["*.feed_forward.router.weight"],
    ),
    "gpt2": (
        on_meta("GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, vocab_size=200, n_positions=64),
        {
            "attention": ["transformer.h.*.attn.*"],
            "mlp": ["transformer.h.*.mlp.*"],
            "embeddings": ["transformer.wte.weight", "transformer.wpe.weight"],
            "lm_head": ["transformer.wte.weight"],
        },
        [],
    ),
    "opt": (
        on_meta(
            "OPTForCausalLM", hidden_size=64, word_embed_proj_dim=64, ffn_dim=96, num_hidden_layers=2,
            num_attention_heads=4, vocab_size=200,
        ),
        {
            "attention": ["*.layers.*.self_attn.*"],
            "mlp": ["*.layers.*.fc1.*", "*.layers.*.fc2.*"],
            "embeddings": ["*.embed_tokens.weight", "*.embed_positions.weight"],
            "lm_head": ["*.embed_tokens.weight"],
        },
        [],
    ),
    "bert": (on_meta("BertModel", **TEXT), BERT, []),
    "bert for tokens": (
        on_meta("BertForMaskedLM", **TEXT),
        {**BERT, "lm_head": ["*.word_embeddings.weight", "cls.predictions.bias"]},
        [],
    ),
    "bert for classes": (on_meta("BertForSequenceClassification", **TEXT), BERT, []),
    "t5": (
        on_meta("T5ForConditionalGeneration", d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=200),
        {
            "attention": ["*.SelfAttention.*", "*.EncDecAttention.*"],
            "mlp": ["*.DenseReluDense.*"],
            "embeddings": ["shared.weight"],
            "lm_head": ["shared.weight"],
        },
        [],
    ),
    "bart": (
        on_meta("BartForConditionalGeneration", **STACKS),
        {
            "attention": ["*.self_attn.*", "*.encoder_attn.*"],
            "mlp": ["*.fc1.*", "*.fc2.*"],
            "embeddings": ["model.shared.weight", "*.embed_positions.weight"],
            "lm_head": ["model.shared.weight"],
        },
        [],
    ),
    "vit": (
        on_meta("ViTForImageClassification", **VISION),
        {"attention": ["vit.layers.*.attention.*"], "mlp": ["vit.layers.*.mlp.*"]},
        [],
    ),
    "llava": (
        on_meta(
            "LlavaForConditionalGeneration", text_config={**HEADS, "model_type": "llama"},
            vision_config={**VISION, "model_type": "clip_vision_model"},
        ),
        {**IN_TOWER, "vision": ["model.vision_tower.*", "model.multi_modal_projector.*"]},
        [],
    ),
    "gemma3 with images": (
        on_meta("Gemma3ForConditionalGeneration", text_config=HEADS, vision_config=VISION, mm_tokens_per_image=4),
        {
            **IN_TOWER,
            "lm_head": ["model.language_model.embed_tokens.weight"],
            "vision": ["model.vision_tower.*", "model.multi_modal_projector.*"],
        },
        [],
    ),
    "qwen2 vl": (
        on_meta(
            "Qwen2VLForConditionalGeneration", text_config=HEADS,
            vision_config={**QWEN_VISION, "embed_dim": 40, "hidden_size": 64},
        ),
        {**IN_TOWER, "vision": ["model.visual.*"]},
        [],
    ),
    "qwen2.5 vl": (
        on_meta(
            "Qwen2_5_VLForConditionalGeneration", text_config=HEADS,
            vision_config={**QWEN_VISION, "hidden_size": 40, "intermediate_size": 80, "out_hidden_size": 64},
        ),
        {**IN_TOWER, "vision": ["model.visual.*"]},
        [],
    ),
    "llama4": (
        on_meta(
            "Llama4ForConditionalGeneration",
            text_config={**HEADS, "num_local_experts": 4, "intermediate_size_mlp": 96, "head_dim": 16},
            vision_config={
                **VISION, "intermediate_size": 160, "vision_output_dim": 48, "projector_input_dim": 56,
                "projector_output_dim": 48,
            },
        ),
        {
            "attention": ["language_model.*.self_attn.*"],
            "experts": ["language_model.*.feed_forward.experts.*"],
            "shared_experts": ["language_model.*.feed_forward.shared_expert.*"],
            "embeddings": ["language_model.model.embed_tokens.weight"],
            "lm_head": ["language_model.lm_head.weight"],
            "vision": ["vision_model.*", "multi_modal_projector.*"],
        },
        ["*.feed_forward.router.weight"],
    ),
    "clip": (
        on_meta("CLIPModel", text_config=TEXT, vision_config=VISION, projection_dim=48),
        {
            "attention": ["text_model.encoder.layers.*.self_attn.*"],
            "mlp": ["text_model.encoder.layers.*.mlp.*"],
            "embeddings": ["text_model.embeddings.*_embedding.weight"],
            "vision": ["vision_model.*"],
        },
        [],
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Inventory, dict[str, list[str]], list[str]]:
    transformers.logging.set_verbosity_error()
    make, expected, routers = FAMILIES[request.param]
    return take_inventory(make()), expected, routers


def parameters(inventory: Inventory) -> list[str]:
    return [storage.name for storage in inventory.storages if storage.has_parameter]


def dimensions(inventory: Inventory, name: str) -> int:
    return len(inventory.by_name[name].tensors[0].shape)


def packed(linear: nn.Module) -> nn.Module:
    """What GPTQ makes of ``linear``: 4 bits, groups of 16."""
    rows, columns = linear.weight.shape  # type: ignore[misc]
    module = nn.Module()
    module.register_buffer("qweight", torch.empty(columns // 8, rows, dtype=torch.int32, device="meta"))
    module.register_buffer("qzeros", torch.empty(columns // 16, rows // 8, dtype=torch.int32, device="meta"))
    module.register_buffer("scales", torch.empty(columns // 16, rows, dtype=torch.float16, device="meta"))
    module.register_buffer("g_idx", torch.empty(columns, dtype=torch.int32, device="meta"))
    return module


class TestFamilies:
    def test_each_group_is_what_its_patterns_match(self, family: Any) -> None:
        inventory, expected, _ = family
        for group, found in semantic_groups(inventory).items():
            patterns = expected.get(group, [])
            matched = {n for n in parameters(inventory) if any(fnmatchcase(n, pattern) for pattern in patterns)}
            # Norms may join the block that they stand in; what has bytes decides.
            wanted = {name for name in matched if dimensions(inventory, name) > 1}
            assert {name for name in found if dimensions(inventory, name) > 1} == wanted, group
            for pattern in patterns:
                assert any(fnmatchcase(name, pattern) for name in found), f"{group}: nothing like {pattern}"

    def test_groups_do_not_overlap_but_for_tied_heads(self, family: Any) -> None:
        inventory, _, _ = family
        groups = semantic_groups(inventory)
        assert tuple(groups) == GROUPS
        for name in parameters(inventory):
            inside = [group for group in GROUPS if name in groups[group]]
            assert len(inside) <= 1 or inside == ["embeddings", "lm_head"], name
            if len(inside) == 2:
                assert len(inventory.by_name[name].modules) > 1, "both, though not tied"

    def test_all_of_a_layer_but_routers_is_in_a_group(self, family: Any) -> None:
        inventory, _, routers = family
        taken = set().union(*semantic_groups(inventory).values())
        left = {
            name
            for name in parameters(inventory)
            if re.search(r"\.\d+\.", name) and name not in taken and dimensions(inventory, name) > 1
        }
        assert {name for name in left if not any(fnmatchcase(name, router) for router in routers)} == set()
        for router in routers:
            assert any(fnmatchcase(name, router) for name in left), f"{router} is in a group"


# -- by structure alone ------------------------------------------------------------------------------------------------

WIDTH = 24


def blocks(*sizes: tuple[int, int]) -> nn.Module:
    """Matrices of these shapes, under names that say nothing."""
    return nn.ModuleDict({f"part_{chr(97 + i)}": nn.Linear(cols, rows) for i, (rows, cols) in enumerate(sizes)})


def stacked(make: Callable[[], nn.Module], **outside: nn.Module) -> Inventory:
    model = nn.Module()
    with torch.device("meta"):
        model.layers = nn.ModuleList(make() for _ in range(2))
    for name, module in outside.items():
        model.add_module(name, module.to("meta"))
    return take_inventory(model)


def group_of(inventory: Inventory, name: str) -> list[str]:
    return [group for group, storages in semantic_groups(inventory).items() if name in storages]


class Fused(nn.Module):
    """Experts as parameters [experts, ., .] with biases."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.empty(num_experts, WIDTH, 2 * WIDTH))
        self.into_bias = nn.Parameter(torch.empty(num_experts, 2 * WIDTH))
        self.out_of = nn.Parameter(torch.empty(num_experts, 2 * WIDTH, WIDTH))


class TestStructure:
    @pytest.mark.parametrize(
        ("sizes", "group"),
        [
            ([(WIDTH, WIDTH)] * 4, "attention"),
            ([(WIDTH, WIDTH), (8, WIDTH), (8, WIDTH), (WIDTH, WIDTH)], "attention"),
            ([(3 * WIDTH, WIDTH), (WIDTH, WIDTH)], "attention"),
            ([(2 * WIDTH, WIDTH), (WIDTH, WIDTH)], "attention"),
            ([(WIDTH, WIDTH), (16, WIDTH), (WIDTH, WIDTH)], "attention"),
            ([(96, WIDTH), (WIDTH, 96)], "mlp"),
            ([(96, WIDTH), (96, WIDTH), (WIDTH, 96)], "mlp"),
            ([(192, WIDTH), (WIDTH, 96)], "mlp"),
            ([(WIDTH, 96), (96, WIDTH)], "mlp"),
        ],
    )
    def test_blocks_without_telling_names(self, sizes: list[tuple[int, int]], group: str) -> None:
        inventory = stacked(lambda: nn.ModuleDict({"first": blocks(*sizes), "norm": nn.LayerNorm(WIDTH)}))
        assert group_of(inventory, "layers.1.first.part_a.weight") == [group]
        assert group_of(inventory, "layers.1.norm.weight") == []

    def test_a_name_settles_what_shapes_leave_open(self) -> None:
        square = [(WIDTH, WIDTH), (WIDTH, WIDTH)]
        inventory = stacked(lambda: nn.ModuleDict({"x_attn": blocks(*square), "y": blocks(*square)}))
        assert group_of(inventory, "layers.0.x_attn.part_a.weight") == ["attention"]
        assert group_of(inventory, "layers.0.y.part_a.weight") == ["mlp"]

    def test_multihead_attention(self) -> None:
        inventory = stacked(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 48))
        assert group_of(inventory, "layers.0.self_attn.in_proj_weight") == ["attention"]
        assert group_of(inventory, "layers.0.linear1.weight") == ["mlp"]

    def test_fused_experts(self) -> None:
        inventory = stacked(
            lambda: nn.ModuleDict(
                {
                    "x": nn.ModuleDict(
                        {"many": Fused(5), "pick": nn.Linear(WIDTH, 5), "beside": blocks((9, WIDTH), (WIDTH, 9))}
                    )
                }
            )
        )
        for name in ("into", "into_bias", "out_of"):
            assert group_of(inventory, f"layers.1.x.many.{name}") == ["experts"]
        assert group_of(inventory, "layers.1.x.pick.weight") == []
        assert group_of(inventory, "layers.1.x.beside.part_a.weight") == ["shared_experts"]

    def test_numbered_experts(self) -> None:
        def layer() -> nn.Module:
            many = nn.ModuleList(blocks((9, WIDTH), (9, WIDTH), (WIDTH, 9)) for _ in range(6))
            x = nn.ModuleDict({"many": many, "pick": nn.Linear(WIDTH, 6), "beside": blocks((9, WIDTH), (WIDTH, 9))})
            return nn.ModuleDict({"x": x, "y": blocks((96, WIDTH), (WIDTH, 96))})

        inventory = stacked(layer)
        assert len(semantic_groups(inventory)["experts"]) == 2 * 6 * 6
        assert group_of(inventory, "layers.1.x.many.5.part_c.bias") == ["experts"]
        assert group_of(inventory, "layers.1.x.pick.weight") == []
        assert group_of(inventory, "layers.1.x.beside.part_b.weight") == ["shared_experts"]
        assert group_of(inventory, "layers.1.y.part_b.weight") == ["mlp"]

    def test_experts_with_names_for_numbers(self) -> None:
        """As in NLLB, where siblings are called expert_0, expert_1, ..."""
        experts = {f"expert_{i}": blocks((9, WIDTH), (WIDTH, 9)) for i in range(3)}
        ffn = nn.ModuleDict({"router": nn.ModuleDict({"scores": nn.Linear(WIDTH, 3)}), "many": nn.ModuleDict(experts)})
        inventory = stacked(lambda: nn.ModuleDict({"ffn": ffn}))
        assert group_of(inventory, "layers.0.ffn.many.expert_2.part_a.weight") == ["experts"]
        assert group_of(inventory, "layers.0.ffn.router.scores.weight") == []

    def test_a_dense_block_beside_experts_in_the_layer_itself_is_no_shared_expert(self) -> None:
        inventory = stacked(
            lambda: nn.ModuleDict(
                {"many": Fused(5), "pick": nn.Linear(WIDTH, 5), "dense": blocks((96, WIDTH), (WIDTH, 96))}
            )
        )
        assert group_of(inventory, "layers.0.many.into") == ["experts"]
        assert group_of(inventory, "layers.0.dense.part_a.weight") == ["mlp"]
        assert group_of(inventory, "layers.0.pick.weight") == []

    @pytest.mark.parametrize("num_siblings", [2, 3])
    def test_siblings_without_a_router_are_no_experts(self, num_siblings: int) -> None:
        inventory = stacked(
            lambda: nn.ModuleDict({"x": nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_siblings)))})
        )
        assert group_of(inventory, "layers.0.x.1.weight") == ["mlp"]

    def test_convolutions_are_no_experts(self) -> None:
        class Recurrence(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.along = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH)
                self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

        inventory = stacked(lambda: nn.ModuleDict({"x": Recurrence(), "y": blocks((96, WIDTH), (WIDTH, 96))}))
        assert group_of(inventory, "layers.0.x.along.weight") == ["attention"]
        assert group_of(inventory, "layers.0.x.a.weight") == ["attention"]
        assert group_of(inventory, "layers.0.y.part_a.weight") == ["mlp"]
        alone = stacked(lambda: nn.ModuleDict({"x": nn.Conv1d(8, 8, 3), "y": nn.Conv1d(8, 8, 3)}))
        assert not any(semantic_groups(alone).values())

    def test_a_tower_of_convolutions_alone(self) -> None:
        tower = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3))
        wrapped = nn.ModuleDict({"net": tower})
        inventory = stacked(
            lambda: nn.ModuleDict({"y": blocks((96, WIDTH), (WIDTH, 96))}),
            embed=nn.Embedding(50, WIDTH), eye=wrapped, bridge=nn.Linear(16, WIDTH), head=nn.Linear(WIDTH, 50),
        )  # fmt: skip
        assert group_of(inventory, "eye.net.1.weight") == ["vision"]
        assert group_of(inventory, "bridge.weight") == ["vision"]
        assert group_of(inventory, "head.weight") == ["lm_head"]
        assert group_of(inventory, "layers.0.y.part_a.weight") == ["mlp"]

    def test_layers_with_convolutions_of_their_own_are_no_towers(self) -> None:
        """Nystromformer's attention has one, and SAM has towers alone: no layers of text are left."""

        def layer() -> nn.Module:
            return nn.ModuleDict({"attn": blocks((WIDTH, WIDTH)), "conv": nn.Conv2d(4, 4, 3)})

        groups = semantic_groups(stacked(layer, embed=nn.Embedding(50, WIDTH)))
        assert not groups["vision"]
        assert "layers.0.attn.part_a.weight" in groups["attention"]

    def test_audio_is_no_vision(self) -> None:
        audio = nn.ModuleDict({"stem": nn.Conv2d(1, 8, 3), "layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(2))})
        inventory = stacked(lambda: blocks((96, WIDTH), (WIDTH, 96)), embed=nn.Embedding(50, WIDTH), audio_tower=audio)
        assert not semantic_groups(inventory)["vision"]

    def test_buffers_are_in_no_group(self) -> None:
        def layer() -> nn.Module:
            attention = blocks((WIDTH, WIDTH))
            attention.register_buffer("cache", torch.empty(4, 4))
            return nn.ModuleDict({"self_attn": attention})

        inventory = stacked(layer)
        assert group_of(inventory, "layers.0.self_attn.part_a.weight") == ["attention"]
        assert group_of(inventory, "layers.0.self_attn.cache") == []

    @pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2"])
    def test_packed_weights_are_where_plain_ones_are(self, name: str) -> None:
        """GPTQ and AWQ hold them in buffers, of other shapes and under other names."""
        make = FAMILIES[name][0]
        plain, model = take_inventory(make()), make()
        linears = [
            name for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".layers." in name
        ]
        for each in linears:
            model.set_submodule(each, packed(model.get_submodule(each)))
        expected, found = semantic_groups(plain), semantic_groups(take_inventory(model))
        for group in GROUPS:
            of_modules = ({name.rpartition(".")[0] for name in groups[group]} for groups in (expected, found))
            assert len({frozenset(names) for names in of_modules}) == 1, group
        assert f"{linears[0]}.qzeros" in found["attention"]

    def test_models_without_layers(self) -> None:
        assert set(semantic_groups(take_inventory(nn.ReLU()))) == set(GROUPS)
        model = nn.ModuleDict({"embed": nn.Embedding(50, WIDTH), "out": nn.Linear(WIDTH, 50)})
        groups = semantic_groups(take_inventory(model))
        assert (groups["embeddings"], groups["lm_head"]) == ({"embed.weight"}, {"out.weight", "out.bias"})
