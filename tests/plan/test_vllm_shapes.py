"""The promise: inside vLLM a budget alone makes the plan of the rule ``experts=cache``, for five published shapes.

One plan is one engine, so a budget is as fast as the rule; and without a cache the best plan is predicted to take far
longer, so that no error of the rates turns the choice. Layouts are those that vLLM's kernels read, on ``meta``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headrace.config import Budget
from headrace.experts.rows import CachedExperts
from headrace.model.inventory import take_inventory
from headrace.model.records import ModelProfile
from headrace.offloaders.layerwise import EngineOffloader, EngineTraits
from headrace.plan.cost_model import Forecaster, experts_in
from headrace.plan.nominal_rates import NOMINAL_GPU
from headrace.plan.plan import DeviceName, Plan, assemble
from headrace.planning.context import make_planner
from headrace.transfer.machine_probe import named_machine
from published_configs import DEEPSEEK_V2_LITE, GLM_4_5_AIR, GPT_OSS_20B, GPT_OSS_120B, QWEN3_30B_A3B

GIB = 2**30
# shape, format, GiB for the weights: a third to two thirds of them.
SHAPES = [
    (GPT_OSS_20B, "mxfp4", 8),
    (GPT_OSS_120B, "mxfp4", 22.35),
    (QWEN3_30B_A3B, "4 bits", 8),
    (DEEPSEEK_V2_LITE, "bf16", 16),
    (DEEPSEEK_V2_LITE, "fp8", 10),
    (GLM_4_5_AIR, "zero points", 22.35),
]
MACHINES = ["h200", "4090"]


class Holder(nn.ModuleDict):
    """Parameters of (shape, dtype), and modules."""

    def __init__(self, **members: Any) -> None:
        super().__init__({name: member for name, member in members.items() if isinstance(member, nn.Module)})
        for name, member in members.items():
            if not isinstance(member, nn.Module):
                shape, dtype = member
                made = torch.empty(shape, dtype=dtype, device="meta")
                setattr(self, name, nn.Parameter(made, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class MLAAttention(Holder):
    """Holds what vLLM makes of ``kv_b_proj``: parameters of three dimensions, as experts are."""


def weights(form: str, rows: int, width: int, *experts: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """A matrix, or one of each expert, with the tensors beside it."""
    if form == "fp8":
        scale = -(-rows // 128), -(-width // 128)
        return {"": ((*experts, rows, width), torch.float8_e4m3fn), "_scale": ((*experts, *scale), torch.float32)}
    if form == "bf16":
        return {"": ((*experts, rows, width), torch.bfloat16)}
    packed = {"": ((*experts, width // 16, 2 * rows), torch.int32)}
    if form == "mxfp4":
        bias = (*experts, rows)
        return {**packed, "_scale": ((*experts, width // 32, rows), torch.uint8), "_bias": (bias, torch.bfloat16)}
    packed["_scale"] = (*experts, width // 128, rows), torch.bfloat16
    if form == "zero points":
        packed["_zeros"] = (*experts, width // 128, rows // 8), torch.int32
    return packed


def matrices(form: str, sizes: Mapping[str, tuple[int, ...]]) -> Holder:
    found = {name: weights(form, *size).items() for name, size in sizes.items()}
    return Holder(**{name + part: made for name, parts in found.items() for part, made in parts})


def layer(config: Mapping[str, Any], form: str, experts: int, is_dense: bool) -> Holder:
    hidden, width = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    heads = config.get("head_dim", 128) * config["num_attention_heads"]
    plain = "bf16" if form == "mxfp4" else form  # gpt-oss quantises experts alone
    attention = matrices(plain, {"qkv": (2 * heads, hidden), "o": (hidden, heads)})
    if rank := config.get("kv_lora_rank"):
        heads = config["num_attention_heads"]
        parts = {
            "W_UV": ((heads, rank, config["v_head_dim"]), torch.bfloat16),
            "W_UK_T": ((heads, config["qk_nope_head_dim"], rank), torch.bfloat16),
        }
        attention.add_module("mla_attn", MLAAttention(**parts))
    if is_dense:
        width = config["intermediate_size"]
        return Holder(self_attn=attention, mlp=matrices("bf16", {"up": (2 * width, hidden), "down": (hidden, width)}))
    rows = -(-width // 64) * 64
    mlp = matrices(form, {"w13": (2 * rows, hidden, experts), "w2": (hidden, rows, experts)})
    gate = matrices("bf16", {"weight": (experts, hidden)})
    return Holder(self_attn=attention, mlp=Holder(gate=gate, experts=mlp))


def model_of(config: Mapping[str, Any], form: str) -> Any:
    keys = ("n_routed_experts", "num_experts", "num_local_experts")
    experts = next(config[key] for key in keys if key in config)
    dense = config.get("first_k_dense_replace", 0)
    table = (config["vocab_size"], config["hidden_size"]), torch.bfloat16
    layers = [layer(config, form, experts, index < dense) for index in range(config["num_hidden_layers"])]
    embed = nn.Embedding(*table[0], device="meta", dtype=torch.bfloat16)
    model: Any = Holder(model=Holder(embed_tokens=embed, layers=nn.ModuleList(layers)), lm_head=Holder(weight=table))
    text = SimpleNamespace(num_experts_per_tok=config["num_experts_per_tok"], num_experts=experts)
    model.config = SimpleNamespace(get_text_config=lambda decoder: text)
    return model


class Kernels(CachedExperts):
    """Can run all experts."""

    @staticmethod
    def find(model: nn.Module) -> dict[str, str | None]:
        return {name: None for name, _ in model.named_modules() if name.endswith("experts")}

    @staticmethod
    def hold_packed(module: nn.Module) -> dict[str, str]:
        return {}


@pytest.mark.parametrize(
    ("owner", "shape", "dtype", "count"),
    [
        ("RoutedExperts", (64, 128, 32), torch.bfloat16, 64),
        ("GptOssExperts", (32, 5760, 90, 16), torch.uint8, 32),  # MXFP4
        ("Qwen3MoeExperts", (128, 256, 1536), torch.int32, 128),  # GPTQ
        ("Qwen3MoeExperts", (128, 1572864, 1), torch.uint8, 128),  # bitsandbytes
        ("Linear", (1572864, 1), torch.uint8, 1),
        ("MLAAttention", (16, 128, 512), torch.bfloat16, 1),
        ("ColumnParallelLinear", (8192, 1, 4), torch.bfloat16, 1),  # conv1d of Qwen3-Next
        ("Conv1d", (64, 32, 3), torch.bfloat16, 1),
        ("Downsampler", (64, 32, 3, 3), torch.bfloat16, 1),
    ],
)
def test_what_counts_as_experts(owner: str, shape: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
    module = type(owner, (Holder,), {})(weight=(shape, dtype))
    inventory = take_inventory(Holder(layer=module))
    assert experts_in(inventory, inventory.storages[0]) == count


def test_experts_with_tensors_of_their_own_count_as_those_of_a_fused_parameter() -> None:
    """As files have them in GPTQ and AWQ (``experts.0.gate_proj.qweight``), where one expert in so many is read."""
    fused = Holder(up_proj_qweight=((8, 512, 4096), torch.int32))
    names = [f"{expert}_up_proj_qweight" for expert in range(8)]
    apart = Holder(**dict.fromkeys(names, ((512, 4096), torch.int32)))
    seconds = []
    for experts in (fused, apart):
        inventory = take_inventory(Holder(layers=nn.ModuleList(Holder(experts=experts) for _ in range(3))))
        assert {experts_in(inventory, storage) for storage in inventory.storages} == {8}
        seconds.append(Forecaster(inventory, NOMINAL_GPU, ModelProfile(2), 1)(assemble(inventory, [], 0, "cpu")).step_s)
    assert seconds[1] == pytest.approx(seconds[0], rel=0.05)


def plan_of(model: Any, policy: Budget, kernels: Any) -> Plan:
    """As inside an engine."""
    traits = EngineTraits(expert_kernels=kernels)
    offloader = EngineOffloader(policy, lambda: model, traits)
    offloader.wrap_modules(model.model.layers)
    return offloader._make_plan(offloader._take_inventory(model))


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("config", "form", "gib"), SHAPES)
def test_a_budget_makes_the_plan_of_the_rule(
    config: Mapping[str, Any], form: str, gib: float, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rates = named_machine(machine)
    planner: Any = None

    def on_gpu(inventory: Any, profile: Any, *_: Any, **options: Any) -> Any:
        nonlocal planner
        planner = make_planner(inventory, profile, DeviceName("cuda"), rates=rates)
        return planner

    monkeypatch.setattr("headrace.offloaders.layerwise.make_planner", on_gpu)
    model = model_of(config, form)
    size = int(gib * GIB)
    alone = plan_of(model, Budget(size), Kernels)
    step_s = planner.forecast(alone, 1).step_s
    assert len(alone.cached) == config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    assert alone.device_bytes <= size < take_inventory(model).num_bytes
    assert alone == plan_of(model, Budget(size, rules=[("experts", "cache")]), Kernels)
    other = plan_of(model, Budget(size), None)
    assert not other.cached
    assert planner.forecast(other, 1).step_s > 1.5 * step_s
