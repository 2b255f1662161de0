"""The UNet of SDXL in plain torch: names, shapes and declared order of diffusers' UNet2DConditionModel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

SDXL = (320, 640, 1280)
TINY = (40, 80, 160)
# stabilityai/stable-diffusion-xl-base-1.0, unet/config.json: what differs from the defaults of diffusers.
SDXL_CONFIG = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": list(SDXL),
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
    "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "use_linear_projection": True,
}


class Attention(nn.Module):
    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(context, width, bias=False)
        self.to_v = nn.Linear(context, width, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(width, width), nn.Dropout(0.0)])

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.to_out[1](self.to_out[0](mixed))


class Gated(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 2 * inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.proj(x).chunk(2, -1)
        return value * F.gelu(gate)


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.ModuleList([Gated(width, 4 * width), nn.Dropout(0.0), nn.Linear(4 * width, width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.net:
            x = module(x)
        return x


class TransformerBlock(nn.Module):
    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn1 = Attention(width, width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.attn2 = Attention(width, context, heads)
        self.norm3 = nn.LayerNorm(width)
        self.ff = FeedForward(width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attn1(y, y)
        x = x + self.attn2(self.norm2(x), context)
        return x + self.ff(self.norm3(x))


class Transformer(nn.Module):
    def __init__(self, width: int, context: int, heads: int, depth: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.proj_in = nn.Linear(width, width)
        self.transformer_blocks = nn.ModuleList(TransformerBlock(width, context, heads) for _ in range(depth))
        self.proj_out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        y = self.proj_in(self.norm(x).flatten(2).transpose(1, 2))
        for block in self.transformer_blocks:
            y = block(y, context)
        return x + self.proj_out(y).transpose(1, 2).unflatten(2, x.shape[2:])


class Resnet(nn.Module):
    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(4, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time_emb_proj = nn.Linear(embedding, outputs)
        self.norm2 = nn.GroupNorm(4, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        if inputs != outputs:
            self.conv_shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time_emb_proj(F.silu(embedding))[:, :, None, None]
        y = self.conv2(F.silu(self.norm2(y)))
        return y + (self.conv_shortcut(x) if hasattr(self, "conv_shortcut") else x)


class Resample(nn.Module):
    def __init__(self, width: int, down: bool) -> None:
        super().__init__()
        self.down = down
        self.conv = nn.Conv2d(width, width, 3, stride=2 if down else 1, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x if self.down else F.interpolate(x, scale_factor=2.0))


class Block(nn.Module):
    """Down, up or middle; declares all attentions before all convolutions, and runs them in turn."""

    def __init__(
        self, inputs: Sequence[int], width: int, embedding: int, context: int, heads: int, depth: int, resample: str
    ) -> None:
        super().__init__()
        self.resample = resample
        if depth:
            count = 1 if resample == "middle" else len(inputs)
            self.attentions = nn.ModuleList(Transformer(width, context, heads, depth) for _ in range(count))
        self.resnets = nn.ModuleList(Resnet(size, width, embedding) for size in inputs)
        if resample in ("down", "up"):
            self.add_module(f"{resample}samplers", nn.ModuleList([Resample(width, resample == "down")]))

    def forward(
        self, x: torch.Tensor, embedding: torch.Tensor, context: torch.Tensor, skips: list[torch.Tensor]
    ) -> torch.Tensor:
        going_up = self.resample.startswith("up")
        for index, resnet in enumerate(self.resnets):
            x = resnet(torch.cat([x, skips.pop()], dim=1) if going_up else x, embedding)
            if hasattr(self, "attentions") and index < len(self.attentions):
                x = self.attentions[index](x, context)
            if self.resample.startswith("down"):
                skips.append(x)
        if self.resample == "down":
            x = self.downsamplers[0](x)
            skips.append(x)
        return self.upsamplers[0](x) if self.resample == "up" else x


class Embedding(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(inputs, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))


class UNet(nn.Module):
    """Declares its middle block after those that go up, as diffusers does."""

    def __init__(self, widths: tuple[int, int, int] = TINY) -> None:
        super().__init__()
        a, b, c = widths
        self.context, self.added = 2048 * a // 320, 2816 * a // 320
        e = 4 * a
        shared = {"embedding": e, "context": self.context}
        self.conv_in = nn.Conv2d(4, a, 3, padding=1)
        self.time_embedding = Embedding(a, e)
        self.add_embedding = Embedding(self.added, e)
        self.down_blocks = nn.ModuleList(
            [
                Block([a, a], a, heads=5, depth=0, resample="down", **shared),
                Block([a, b], b, heads=10, depth=2, resample="down", **shared),
                Block([b, c], c, heads=20, depth=10, resample="down, last", **shared),
            ]
        )
        self.up_blocks = nn.ModuleList(
            [
                Block([c + c, c + c, c + b], c, heads=20, depth=10, resample="up", **shared),
                Block([c + b, b + b, b + a], b, heads=10, depth=2, resample="up", **shared),
                Block([b + a, a + a, a + a], a, heads=5, depth=0, resample="up, last", **shared),
            ]
        )
        self.mid_block = Block([c, c], c, heads=20, depth=10, resample="middle", **shared)
        self.conv_norm_out = nn.GroupNorm(4, a)
        self.conv_out = nn.Conv2d(a, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor, context: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        embedding = self.time_embedding(time) + self.add_embedding(added)
        x = self.conv_in(x)
        skips = [x]
        for block in (*self.down_blocks, self.mid_block, *self.up_blocks):
            x = block(x, embedding, context, skips)
        return self.conv_out(F.silu(self.conv_norm_out(x)))

    def example(self) -> tuple[torch.Tensor, ...]:
        """Inputs of one step: one small picture."""
        generator = torch.Generator().manual_seed(0)
        shapes = ((1, 4, 8, 8), (1, self.conv_in.out_channels), (1, 5, self.context), (1, self.added))
        return tuple(torch.randn(shape, generator=generator) for shape in shapes)
