"""Does the resident model repeat its own bits? Where it does not, equality with it cannot be promised.

python benchmarks/repeatability.py
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from decoder_models import CONFIGS, DecodeStep, build_model


@torch.no_grad()
def main() -> None:
    device = torch.device("cuda", 0)
    config = CONFIGS["qwen3-8b"]()
    config.num_hidden_layers, config.layer_types = 8, config.layer_types[:8]
    model = build_model(config, device, device)

    def differing(batch: int) -> int:
        step = DecodeStep(model, model, batch, device)
        first = step().clone()
        return sum(not torch.equal(first, step()) for _ in range(10))

    for batch in (1, 8, 16, 32):
        default = differing(batch)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        full_sums = differing(batch)
        with sdpa_kernel(SDPBackend.MATH):
            plain_attention = differing(batch)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        with sdpa_kernel(SDPBackend.MATH):
            only_attention = differing(batch)
        print(f"{batch=} of 10 differ: {default=} {full_sums=} {plain_attention=} {only_attention=}", flush=True)


if __name__ == "__main__":
    main()
