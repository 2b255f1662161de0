"""One tiny FLUX transformer in each format in which diffusers keeps weights of 4 to 8 bits, with seeded numbers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pipelines

WIDTH = 256  # the elements of a k-quant's block
CONFIG = {
    "patch_size": 1, "in_channels": 64, "num_layers": 1, "num_single_layers": 2, "joint_attention_dim": WIDTH,
    "pooled_projection_dim": WIDTH, "guidance_embeds": True, "num_attention_heads": 2, "attention_head_dim": 128,
    "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
# Where a block of random bytes has its float16 scales.
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def write_gguf(path: Path, kind: str, state: dict[str, torch.Tensor]) -> None:
    """A file of ``state``: matrices in ``kind``, such as ``"Q4_K"``, the rest in float32."""
    import gguf
    import numpy as np

    wanted = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[wanted]
    random, writer = np.random.default_rng(3), gguf.GGUFWriter(path, "flux")
    for name, tensor in state.items():
        values, shape = tensor.float().numpy(), tensor.shape
        if len(shape) == 1 or shape[1] % block:
            writer.add_tensor(name, values)
        elif kind in _SCALES:  # gguf has no quantiser of them
            packed = random.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
            for at in _SCALES[kind]:
                packed[:, :, at : at + 2] = np.array([1e-5], np.float16).view(np.uint8)
            writer.add_tensor(name, packed.reshape(shape[0], -1), raw_dtype=wanted)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf(kind: str) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig

        if not (file := folder / f"{kind}.gguf").exists():
            write_gguf(file, kind, load_file(folder / "plain" / "diffusion_pytorch_model.safetensors"))
        config = GGUFQuantizationConfig(compute_dtype=torch.bfloat16)
        return FluxTransformer2DModel.from_single_file(
            str(file), config=str(folder / "plain"), quantization_config=config, torch_dtype=torch.bfloat16
        )

    return make


def _int8() -> Any:
    from diffusers import TorchAoConfig
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig(version=2))


def _int4() -> Any:
    """The layout of int4 that CPUs have; those of GPUs cannot be made here."""
    from diffusers import TorchAoConfig
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return TorchAoConfig(PrototypeInt4WeightOnlyConfig(group_size=64, set_inductor_config=False))


def _bitsandbytes(**options: Any) -> Callable[[], Any]:
    def config() -> Any:
        from diffusers import BitsAndBytesConfig

        return BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=torch.bfloat16)

    return config


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CONFIGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "torchao int8": ("torchao", _int8),
    "torchao int4": ("torchao", _int4),
    "bitsandbytes nf4": ("bitsandbytes", _bitsandbytes(**NF4)),
    "bitsandbytes nf4, scales quantised": (
        "bitsandbytes", _bitsandbytes(**NF4, bnb_4bit_use_double_quant=True)
    ),
    "bitsandbytes int8": ("bitsandbytes", _bitsandbytes(load_in_8bit=True)),
}  # fmt: skip
GGUF = ("Q4_0", "Q8_0", *_SCALES, "BF16")
FORMATS = (*(f"GGUF {kind}" for kind in GGUF), *CONFIGS)


def run_bitsandbytes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let diffusers take bitsandbytes without a GPU, as transformers does: its kernels have a CPU's version."""
    from diffusers.quantizers.bitsandbytes import bnb_quantizer

    for kind in (bnb_quantizer.BnB4BitDiffusersQuantizer, bnb_quantizer.BnB8BitDiffusersQuantizer):
        monkeypatch.setattr(kind, "validate_environment", lambda self, **_: None)
        monkeypatch.setattr(kind, "update_device_map", lambda self, given: given or {"": "cpu"})


def transformer(name: str, folder: Path) -> Any:
    """The transformer in that format, in host memory; its files are written to ``folder`` once."""
    from diffusers import FluxTransformer2DModel

    package = "gguf" if name.startswith("GGUF") else CONFIGS[name][0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if not (plain := folder / "plain").exists():
        torch.manual_seed(3)
        pipelines.seeded(FluxTransformer2DModel(**CONFIG), 3).to(torch.bfloat16).save_pretrained(plain)
    if package == "gguf":
        return _gguf(name.split()[1])(folder).eval()
    config = CONFIGS[name][1]()
    made = FluxTransformer2DModel.from_pretrained(plain, quantization_config=config, torch_dtype=torch.bfloat16).eval()
    if "bitsandbytes" in name:  # the first forward repacks the weights on some CPUs
        step(made)
    return made


def pipeline(made: Any) -> Any:
    """FLUX.1 around the transformer ``made``, in bfloat16."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    torch.manual_seed(3)
    parts = {
        "vae": pipelines.autoencoder(16, shift_factor=0.0), "text_encoder": pipelines.clip_text(1, WIDTH),
        "text_encoder_2": pipelines.t5("T5", 2, WIDTH),
    }  # fmt: skip
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), transformer=made, tokenizer=pipelines.tokenizer(77),
        tokenizer_2=pipelines.tokenizer(32), **{name: part.to(torch.bfloat16) for name, part in parts.items()},
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


@torch.inference_mode()
def step(made: Any) -> torch.Tensor:
    """What the transformer makes of seeded latents and embeddings: (1, 16, 64), bfloat16."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "hidden_states": (1, 16, 64), "encoder_hidden_states": (1, 8, WIDTH), "pooled_projections": (1, WIDTH)
    }  # fmt: skip
    given = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}
    ids = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3)}
    scalars = {"timestep": torch.tensor([0.5], dtype=torch.bfloat16), "guidance": torch.tensor([3.5])}
    found: torch.Tensor = made(**given, **ids, **scalars).sample
    return found
