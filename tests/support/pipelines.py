"""Tiny pipelines of diffusers with seeded weights, and the calls that are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from families.builders import scramble


def seeded(module: nn.Module, seed: int) -> Any:
    scramble(module, seed)
    return module.eval()


def tokenizer(length: int) -> Any:
    """Knows letters as words, and pads to ``length``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<pad>", "<unk>", *"abcdefghijklmnopqr"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="r", model_max_length=length
    )


def clip_text(seed: int, width: int = 128) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=1000, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=77, projection_dim=width, eos_token_id=19, bos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return seeded(CLIPTextModel(config), seed)


def t5(kind: str, seed: int, width: int = 128) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=1000, d_model=width, d_kv=32, d_ff=4 * width, num_layers=3, num_heads=4, pad_token_id=0,
        eos_token_id=19, decoder_start_token_id=0,
    )  # fmt: skip
    return seeded(getattr(transformers, f"{kind}EncoderModel")(config), seed)


def autoencoder(latent_channels: int = 4, **more: Any) -> Any:
    from diffusers import AutoencoderKL

    config = {
        "block_out_channels": (64, 128), "down_block_types": ("DownEncoderBlock2D",) * 2, "layers_per_block": 1,
        "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": latent_channels, "sample_size": 32, **more,
    }  # fmt: skip
    return seeded(AutoencoderKL(**config), 4)


def unet(**more: Any) -> Any:
    from diffusers import UNet2DConditionModel

    config = {
        "sample_size": 16, "block_out_channels": (64, 128), "layers_per_block": 1, "cross_attention_dim": 128,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 4,
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), **more,
    }  # fmt: skip
    return seeded(UNet2DConditionModel(**config), 5)


def stable_diffusion() -> Any:
    """Stable Diffusion: a text encoder, a UNet, a VAE."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    parts = {"vae": autoencoder(), "text_encoder": clip_text(1), "tokenizer": tokenizer(77), "unet": unet()}
    scheduler = DDIMScheduler(clip_sample=False)
    none = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return _quiet(StableDiffusionPipeline(**parts, scheduler=scheduler, **none))


def controlnet() -> Any:
    """The same with a ControlNet, which takes turns with the UNet in every step."""
    from diffusers import ControlNetModel, DDIMScheduler, StableDiffusionControlNetPipeline

    base = unet()
    parts = {"vae": autoencoder(), "text_encoder": clip_text(1), "tokenizer": tokenizer(77), "unet": base}
    control = seeded(ControlNetModel.from_unet(base, conditioning_embedding_out_channels=(16, 32)), 6)
    none = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    scheduler = DDIMScheduler(clip_sample=False)
    return _quiet(StableDiffusionControlNetPipeline(**parts, controlnet=control, scheduler=scheduler, **none))


def flux() -> Any:
    """FLUX.1: two text encoders, a transformer, a VAE."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    config = {
        "patch_size": 1, "in_channels": 16, "num_layers": 3, "num_single_layers": 4, "joint_attention_dim": 128,
        "pooled_projection_dim": 128, "guidance_embeds": True, "num_attention_heads": 2, "attention_head_dim": 64,
        "axes_dims_rope": (16, 24, 24),
    }  # fmt: skip
    return _quiet(
        FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(), vae=autoencoder(shift_factor=0.0),
            text_encoder=clip_text(1), tokenizer=tokenizer(77), text_encoder_2=t5("T5", 2), tokenizer_2=tokenizer(32),
            transformer=seeded(FluxTransformer2DModel(**config), 3),
        )
    )  # fmt: skip


def wan() -> Any:
    """Wan 2.2: one text encoder, a transformer for high noise and one for low, a VAE over time."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

    config = {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 64, "in_channels": 16,
        "out_channels": 16, "text_dim": 128, "freq_dim": 64, "ffn_dim": 256, "num_layers": 4,
    }  # fmt: skip
    vae = {"base_dim": 32, "z_dim": 16, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
    vae["temperal_downsample"] = [False, True, True]
    high, low = (seeded(WanTransformer3DModel(**config), seed) for seed in (7, 8))
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return _quiet(
        WanPipeline(
            tokenizer=tokenizer(32), text_encoder=t5("UMT5", 2), vae=seeded(AutoencoderKLWan(**vae), 4),
            scheduler=scheduler, transformer=high, transformer_2=low, boundary_ratio=0.8,
        )
    )  # fmt: skip


def ip_adapter(model: Any) -> dict[str, Any]:
    """The state of an IP-adapter for the UNet ``model``, for embeddings of an image of 32 numbers."""
    generator, width, tokens = torch.Generator().manual_seed(9), model.config.cross_attention_dim, 4

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / 9

    layers: dict[str, torch.Tensor] = {}
    names = [name for name in model.attn_processors if not name.endswith("attn1.processor")]
    for index, name in enumerate(names):
        hidden = model.get_submodule(name.removesuffix(".processor")).to_q.out_features
        layers |= {f"{2 * index + 1}.to_{part}_ip.weight": noise(hidden, width) for part in "kv"}
    project = {"proj.weight": noise(tokens * width, 32), "proj.bias": noise(tokens * width)}
    norm = {"norm.weight": noise(width), "norm.bias": noise(width)}
    return {"image_proj": project | norm, "ip_adapter": layers}


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(pipe: Any, **more: Any) -> torch.Tensor:
    """What ``pipe`` makes of one prompt in a few steps."""
    given: dict[str, Any] = {"prompt": "a b c", "num_inference_steps": 3, "height": 16, "width": 16}
    name = type(pipe).__name__
    if name == "WanPipeline":
        given |= {"num_frames": 5, "negative_prompt": "d", "guidance_scale": 2.0, "max_sequence_length": 16}
    elif name == "FluxPipeline":
        given |= {"max_sequence_length": 16}
    else:
        given |= {"negative_prompt": "d", "guidance_scale": 2.0}
    if "ControlNet" in name:
        given["image"] = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    given |= {"output_type": "pt", "generator": torch.Generator().manual_seed(0), "return_dict": False} | more
    made: torch.Tensor = pipe(**given)[0]
    return made


def build(name: str) -> Any:
    """The pipeline of that case; the same weights every time."""
    torch.manual_seed(3)
    return CASES[name]()


CASES = {"stable diffusion": stable_diffusion, "controlnet": controlnet, "flux": flux, "wan": wan}
