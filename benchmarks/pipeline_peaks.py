"""Device memory of a pipeline's call beside the weights: measured on a GPU, against what `headrace plan` counts.

    python benchmarks/pipeline_peaks.py --out benchmarks/results/DATE-pipeline-peaks-GPU.jsonl

Pipelines are those that are known by name, in their published shapes with seeded weights, which stay on the device;
prompts are embeddings. Those whose weights and activations a GPU does not hold are named and left out. On a CPU nothing
is measured: a row has the count alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from harness import append, finish, parser_of, words_of
from headrace.adapters import pipeline_peaks
from headrace.checkpoint.metadata_cache import known_facts
from known_models import PIPELINES

SIZES = {
    "black-forest-labs/FLUX.1-dev": (1024, 1024, None),
    "black-forest-labs/FLUX.2-dev": (1024, 1024, None),
    "Qwen/Qwen-Image": (1024, 1024, None),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": (480, 832, 81),
    "Lightricks/LTX-2": (512, 768, 121),
    "hunyuanvideo-community/HunyuanVideo": (720, 1280, 61),
}


def measured_bytes(description: str, size: dict[str, int], tiling: bool) -> int:
    """Peak of the allocator in a call, less what is allocated before it."""
    pipe = pipeline_peaks.on_meta(description)
    generator = torch.Generator("cuda").manual_seed(1)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.to_empty(device="cuda")
            for tensor in (*part.parameters(), *part.buffers()):
                if tensor.is_floating_point():
                    tensor.data.normal_(0, 0.02, generator=generator)
            for module in part.modules():  # what is neither: frequencies of rotary embeddings
                for key, each in vars(module).items():
                    if isinstance(each, torch.Tensor) and each.is_meta:
                        vars(module)[key] = torch.ones_like(each, device="cuda")
    if tiling:
        pipe.vae.enable_tiling()
    known = inspect.signature(type(pipe).__call__).parameters
    prompt = {name: each.cuda() for name, each in pipeline_peaks.prompt(pipe, known).items()}
    for _ in range(2):  # libraries allocate in the first call
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() - sum(each.nbytes for each in prompt.values())
        with torch.no_grad():
            pipe(**prompt, **size, num_inference_steps=1, output_type="pt", return_dict=False)
    return torch.cuda.max_memory_allocated() - before


def rows(names: list[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        height, width, frames = SIZES[name]
        size = {"height": height, "width": width, **({"num_frames": frames} if frames else {})}
        for tiling in (False, True):
            description = known_facts(name, 0).pipeline
            counted = pipeline_peaks.count_call(description, height, width, frames, tiling).peak_bytes
            row = {"table": "pipeline-peaks", "case": name, **size, "tiling": tiling, "counted_bytes": counted}
            if torch.cuda.is_available():
                try:
                    row["measured_bytes"] = measured_bytes(description, size, tiling)
                    row["share"] = counted / row["measured_bytes"]
                except torch.OutOfMemoryError as error:
                    row["why_not"] = str(error).splitlines()[0]
                torch.cuda.empty_cache()
            yield row


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--names", type=words_of(tuple(PIPELINES)), default=list(SIZES), help="default all")
    args = parser.parse_args()
    made = []
    for row in rows(args.names):
        print(row, flush=True)
        append(row, args.out)
        made.append(row)
    finish("pipeline_peaks", made)


if __name__ == "__main__":
    main()
