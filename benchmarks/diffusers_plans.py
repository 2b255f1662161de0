"""What the planner says of pipelines and UNets of published shapes: bytes that a step moves, and the smallest budgets.

    python benchmarks/diffusers_plans.py --out FILE

Models are on ``meta``, so nothing is run; plans are made with the rates of an H200, for 4,096 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import headrace
from harness import append, finish, parser_of
from headrace.config import Budget, Workload
from headrace.errors import BudgetError
from headrace.model.inventory import take_inventory
from other_offloaders import SHAPES

_ROWS = 4096
_T5 = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
_VAE = {
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}  # fmt: skip


def _clip() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12))


def _t5(kind: str, words: int) -> Any:
    import transformers

    return getattr(transformers, f"{kind}EncoderModel")(getattr(transformers, f"{kind}Config")(vocab_size=words, **_T5))


def _of_diffusers(name: str, **config: Any) -> Any:
    import diffusers

    return getattr(diffusers, name)(**config)


def _transformer(shape: str) -> Any:
    found = SHAPES[shape](False)
    return _of_diffusers(str(found.model), **found.config)


def _unet_of_sdxl() -> Any:
    return _of_diffusers(
        "UNet2DConditionModel",
        sample_size=128, block_out_channels=(320, 640, 1280), cross_attention_dim=2048, use_linear_projection=True,
        attention_head_dim=(5, 10, 20), transformer_layers_per_block=(1, 2, 10), addition_embed_type="text_time",
        addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


# Components in the order that a call runs them in; budgets.
PIPELINES: dict[str, tuple[dict[str, Callable[[], Any]], tuple[str, ...]]] = {
    "FLUX.1-dev: CLIP, T5-XXL, transformer, VAE": (
        {
            "text_encoder": _clip,
            "text_encoder_2": lambda: _t5("T5", 32128),
            "transformer": lambda: _transformer("flux"),
            "vae": lambda: _of_diffusers("AutoencoderKL", **_VAE, latent_channels=16, use_quant_conv=False),
        },
        ("6GiB", "12GiB", "24GiB"),
    ),
    "Wan2.2-T2V-A14B: UMT5-XXL, two transformers, VAE": (
        {
            "text_encoder": lambda: _t5("UMT5", 256384),
            "transformer": lambda: _transformer("wan"),
            "transformer_2": lambda: _transformer("wan"),
            "vae": lambda: _of_diffusers("AutoencoderKLWan"),
        },
        ("12GiB", "24GiB"),
    ),
}
ALONE: dict[str, Callable[[], Any]] = {
    "UNet of SDXL": _unet_of_sdxl,
    "UNet of Stable Diffusion 1.5": lambda: _of_diffusers(
        "UNet2DConditionModel", sample_size=64, cross_attention_dim=768
    ),
    "VAE of both (`AutoencoderKL`)": lambda: _of_diffusers("AutoencoderKL", **_VAE),
    "transformer of FLUX.1": lambda: _transformer("flux"),
}


def on_meta(make: Callable[[], Any]) -> Any:
    """What ``make`` makes, in bf16 without bytes."""
    with torch.device("meta"):
        return make().to(torch.bfloat16).eval()


def pipelines() -> Iterator[dict[str, Any]]:
    """What a run of the first transformer moves, by budget."""
    for case, (parts, budgets) in PIPELINES.items():
        components = nn.Module()
        for name, make in parts.items():
            components.add_module(name, on_meta(make))
        steps = tuple(f"re:{name}\\..*" for name in parts if name.startswith("transformer"))
        workload = Workload((_ROWS,), repeated=steps)
        inventory = take_inventory(components)
        step_bytes = sum(s.num_bytes for s in inventory.under("transformer"))
        for text in budgets:
            plan = headrace.make_plan(components, Budget(text, workload=workload), machine="h200")
            moved = sum(unit.num_bytes for unit in plan.units if unit.module_fqn.startswith("transformer."))
            yield {
                "table": "pipelines",
                "case": case,
                "weight_bytes": inventory.num_bytes,
                "budget_bytes": Budget(text).num_bytes,
                "step_weight_bytes": step_bytes,
                "step_moved_bytes": moved,
            }


def smallest_budgets() -> Iterator[dict[str, Any]]:
    """The least device memory that each model alone can run in."""
    for case, make in ALONE.items():
        model = on_meta(make)
        num_bytes = take_inventory(model).num_bytes
        try:
            headrace.make_plan(model, 1, device="cpu")  # where nothing is read in place
        except BudgetError as error:
            yield {
                "table": "smallest", "case": case, "weight_bytes": num_bytes, "budget_bytes": error.minimum_bytes
            }  # fmt: skip


def main() -> None:
    """Run from the command line."""
    given = parser_of(__doc__).parse_args()
    rows = [*pipelines(), *smallest_budgets()]
    for row in rows:
        print(row)
        append(row, given.out)
    finish("diffusers_plans", rows)


if __name__ == "__main__":
    main()
