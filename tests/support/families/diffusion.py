"""Tiny models of diffusers, called where its pipelines call them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .builders import Case, movable, quiet, scramble
from .inputs import Inputs

Calls = list[tuple[str, Inputs]]


def _case(name: str, class_name: str, config: dict[str, Any], calls: Callable[[], Calls]) -> Case:
    import diffusers

    model_class = getattr(diffusers, class_name)
    torch.manual_seed(3)
    with quiet():
        model = model_class(**config).eval()
    scramble(model, 3)
    notes = {
        "class": class_name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "movable": movable(model),
        "inputs": {f"{method}.{key}": list(v.shape) for method, given in calls() for key, v in _tensors(given)},
    }
    return Case(f"diffusers/{name}", model, calls(), model_class.from_pretrained, loads=False, notes=notes)


def _tensors(given: Inputs) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in given.items() if isinstance(value, torch.Tensor)]


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(11))


def _forward(**inputs: Any) -> Callable[[], Calls]:
    return lambda: [("forward", inputs)]


def _autoencode(image: torch.Tensor, latent: torch.Tensor) -> Callable[[], Calls]:
    """What pipelines call: encode and decode, never forward."""
    return lambda: [("encode", {"x": image}), ("decode", {"z": latent})]


def _flux() -> Case:
    heads = {"num_attention_heads": 2, "attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)}
    config = {
        "patch_size": 1, "in_channels": 16, "num_layers": 3, "num_single_layers": 4, "joint_attention_dim": 128,
        "pooled_projection_dim": 64, "guidance_embeds": True, **heads,
    }  # fmt: skip
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
    given = _forward(
        hidden_states=_floats(2, 16, 16), encoder_hidden_states=_floats(2, 8, 128), pooled_projections=_floats(2, 64),
        timestep=torch.tensor([0.5, 0.5]), guidance=torch.tensor([3.0, 3.0]), img_ids=ids, txt_ids=torch.zeros(8, 3),
    )  # fmt: skip
    return _case("flux", "FluxTransformer2DModel", config, given)


def _wan() -> Case:
    config = {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 64, "in_channels": 16,
        "out_channels": 16, "text_dim": 128, "freq_dim": 64, "ffn_dim": 256, "num_layers": 4,
    }  # fmt: skip
    given = _forward(
        hidden_states=_floats(1, 16, 2, 8, 8), timestep=torch.tensor([7]), encoder_hidden_states=_floats(1, 8, 128)
    )
    return _case("wan", "WanTransformer3DModel", config, given)


def _sd3() -> Case:
    config = {
        "sample_size": 16, "patch_size": 2, "in_channels": 16, "num_layers": 4, "attention_head_dim": 64,
        "num_attention_heads": 2, "joint_attention_dim": 128, "caption_projection_dim": 128, "out_channels": 16,
        "pooled_projection_dim": 64, "pos_embed_max_size": 24,
    }  # fmt: skip
    given = _forward(
        hidden_states=_floats(2, 16, 16, 16), encoder_hidden_states=_floats(2, 8, 128),
        pooled_projections=_floats(2, 64), timestep=torch.tensor([7, 7]),
    )  # fmt: skip
    return _case("sd3", "SD3Transformer2DModel", config, given)


def _sdxl_unet() -> Case:
    config = {
        "sample_size": 16, "block_out_channels": (64, 128), "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": (2, 4),
        "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
        "transformer_layers_per_block": (1, 2), "projection_class_embeddings_input_dim": 112,
        "cross_attention_dim": 64,
    }  # fmt: skip
    added = {"text_embeds": _floats(2, 64), "time_ids": torch.tensor([[16, 16, 0, 0, 16, 16]] * 2)}
    given = _forward(
        sample=_floats(2, 4, 16, 16), timestep=torch.tensor(7), encoder_hidden_states=_floats(2, 8, 64),
        added_cond_kwargs=added,
    )  # fmt: skip
    return _case("sdxl_unet", "UNet2DConditionModel", config, given)


def _autoencoder_kl() -> Case:
    config = {
        "block_out_channels": (64, 128), "down_block_types": ("DownEncoderBlock2D",) * 2, "latent_channels": 4,
        "up_block_types": ("UpDecoderBlock2D",) * 2, "layers_per_block": 1, "sample_size": 32,
    }  # fmt: skip
    return _case("autoencoder_kl", "AutoencoderKL", config, _autoencode(_floats(1, 3, 32, 32), _floats(1, 4, 16, 16)))


def _autoencoder_kl_wan() -> Case:
    config = {"base_dim": 32, "z_dim": 16, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
    config["temperal_downsample"] = [False, True, True]
    given = _autoencode(_floats(1, 3, 5, 32, 32), _floats(1, 16, 2, 4, 4))
    return _case("autoencoder_kl_wan", "AutoencoderKLWan", config, given)


def _vq_model() -> Case:
    config = {
        "block_out_channels": (64, 128), "down_block_types": ("DownEncoderBlock2D",) * 2, "latent_channels": 4,
        "up_block_types": ("UpDecoderBlock2D",) * 2, "num_vq_embeddings": 256, "vq_embed_dim": 4,
    }  # fmt: skip

    def calls() -> Calls:
        # A list of calls, of which the last reads the code book too.
        return [("encode", {"x": _floats(1, 3, 32, 32)}), ("decode", {"h": _floats(1, 4, 16, 16)})]

    return _case("vq_model", "VQModel", config, calls)


def _forward_of(make: Callable[[], Case], name: str, key: str, value: torch.Tensor) -> Case:
    case = make()
    case.family, case.calls = f"diffusers/{name}", [("forward", {key: value})]
    return case


CASES: dict[str, Callable[[], Case]] = {
    "diffusers/flux": _flux,
    "diffusers/wan": _wan,
    "diffusers/sd3": _sd3,
    "diffusers/sdxl_unet": _sdxl_unet,
    "diffusers/autoencoder_kl": _autoencoder_kl,
    "diffusers/autoencoder_kl_forward": partial(
        _forward_of, _autoencoder_kl, "autoencoder_kl_forward", "sample", _floats(1, 3, 32, 32)
    ),
    "diffusers/autoencoder_kl_wan": _autoencoder_kl_wan,
    "diffusers/vq_model": _vq_model,
}


def build(name: str) -> Case:
    """The case ``diffusers/<name>``."""
    return CASES[name]()
