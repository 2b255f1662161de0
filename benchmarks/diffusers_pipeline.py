"""One denoising step of a transformer of diffusers, offloaded in several ways, against the floor.

    python benchmarks/diffusers_pipeline.py --shapes wan,flux --cases headrace,leaf,flextensor --out FILE

Shapes are those of published checkpoints, with seeded bf16 weights: ``wan`` is one expert of Wan2.2-T2V-A14B, and a
step has the tokens of 81 frames of 480 x 832; ``flux`` is FLUX.1-dev with those of an image of 1024 x 1024. The cases:

* ``headrace``: ``headrace.offload`` within ``--budget`` (default 12 GiB for wan and 6 GiB for flux);
* ``leaf``: diffusers' group offloading, leaf by leaf, with a stream and ``record_stream``;
* ``block``: the same, a block of layers at a time;
* ``flextensor``: NVIDIA's FlexTensor with its defaults, where it is installed; its first steps discover and profile.

All of them hold a copy of the weights at once and take turns. On a CPU (``--device cpu``) the shapes are tiny, and the
cases of diffusers run without streams: that tries the script.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

import headrace
from harness import LinkProbe, Timing, append, finish, interleave, parser_of, print_step, time_cuda, time_host, words_of
from headrace.config import Budget, Workload
from headrace.figures import parse_size
from headrace.model.inventory import take_inventory

CASES = ("headrace", "leaf", "block", "flextensor")
BUDGETS = {"wan": "12GiB", "flux": "6GiB"}
# FlexTensor's steps before its schedule is in force: it discovers in one and profiles in ten.
_PROFILED = 12


# -- shapes --------------------------------------------------------------------------------------------------------


def _wan(tiny: bool) -> tuple[str, dict[str, Any], dict[str, Sequence[int]], int]:
    """Class, configuration, shapes of the inputs, tokens of a step."""
    config = {
        "patch_size": (1, 2, 2), "num_attention_heads": 40, "attention_head_dim": 128, "in_channels": 16,
        "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 13824, "num_layers": 40,
        "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "rope_max_seq_len": 1024,
    }  # fmt: skip
    # 81 frames are (81 - 1) / 4 + 1 latents, and each side is an eighth.
    latents = (21, 60, 104)
    if tiny:
        config |= {"num_attention_heads": 2, "text_dim": 128, "ffn_dim": 512, "num_layers": 6}
        latents = (2, 8, 8)
    text = (1, 512, config["text_dim"])
    inputs = {"hidden_states": (1, 16, *latents), "timestep": (1,), "encoder_hidden_states": text}
    return "WanTransformer3DModel", config, inputs, latents[0] * latents[1] * latents[2] // 4


def _flux(tiny: bool) -> tuple[str, dict[str, Any], dict[str, Sequence[int]], int]:
    config = {
        "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
        "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
        "axes_dims_rope": (16, 56, 56),
    }  # fmt: skip
    tokens, words = 4096, 512
    if tiny:
        config |= {"num_layers": 3, "num_single_layers": 6, "num_attention_heads": 2, "joint_attention_dim": 128}
        tokens, words = 64, 16
    inputs = {
        "hidden_states": (1, tokens, 64), "encoder_hidden_states": (1, words, config["joint_attention_dim"]),
        "pooled_projections": (1, 768), "timestep": (1,), "guidance": (1,), "img_ids": (tokens, 3),
        "txt_ids": (words, 3),
    }  # fmt: skip
    return "FluxTransformer2DModel", config, inputs, tokens + words


SHAPES = {"wan": _wan, "flux": _flux}


def build(shape: str, device: torch.device, rest: torch.device) -> nn.Module:
    """The transformer with seeded weights, the same every time, made on ``device`` and kept on ``rest``."""
    import diffusers

    name, config, _, _ = SHAPES[shape](device.type == "cpu")
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model: nn.Module = getattr(diffusers, name)(**config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False).to(rest)


def inputs_of(shape: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Seeded inputs of a step."""
    _, _, shapes, _ = SHAPES[shape](device.type == "cpu")
    generator = torch.Generator().manual_seed(1)
    made = {name: torch.randn(*sizes, generator=generator).to(device, torch.bfloat16) for name, sizes in shapes.items()}
    for name in ("timestep", "guidance"):
        if name in made:
            made[name] = made[name].abs()
    return made


# -- cases ---------------------------------------------------------------------------------------------------------


class _Case:
    """One copy of the transformer under one way of offloading it."""

    def __init__(self, name: str, shape: str, budget: str | None, device: torch.device) -> None:
        self.name = name
        on_gpu = device.type == "cuda"
        self.model = build(shape, device, device if name == "resident" else torch.device("cpu"))
        self.weight_bytes = take_inventory(self.model).num_bytes
        gc.collect()
        before = 0
        if on_gpu:
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        self.planned_bytes, self.moved_bytes, self.warm_up = 0, self.weight_bytes, 2
        self._offload(shape, budget, device)
        self._inputs = inputs_of(shape, device)
        for _ in range(self.warm_up):
            self.output = self.step().clone()
        self.peak_bytes = torch.cuda.max_memory_allocated(device) - before if on_gpu else self.planned_bytes

    def _offload(self, shape: str, budget: str | None, device: torch.device) -> None:
        if self.name == "resident":
            self.moved_bytes = 0
        elif self.name == "headrace":
            rows = SHAPES[shape](device.type == "cpu")[3]
            size = parse_size(budget or BUDGETS[shape]) if device.type == "cuda" else self.weight_bytes // 3
            self.handle = headrace.offload(self.model, Budget(size, workload=Workload((rows,))), device=device)
            self.planned_bytes, self.moved_bytes = self.handle.plan.device_bytes, self.handle.plan.moved_bytes
        elif self.name == "flextensor":
            import flextensor

            blocks = ["blocks.*", "transformer_blocks.*", "single_transformer_blocks.*"]
            self.model = flextensor.offload(self.model, config=flextensor.OffloadConfig(include_patterns=blocks))
            self.warm_up = _PROFILED
        else:
            from diffusers.hooks import apply_group_offloading

            streams = {"use_stream": True, "record_stream": True} if device.type == "cuda" else {}
            kind = {"offload_type": "leaf_level"}
            if self.name == "block":
                kind = {"offload_type": "block_level", "num_blocks_per_group": 1}
            apply_group_offloading(
                self.model, onload_device=device, offload_device=torch.device("cpu"), **kind, **streams
            )

    def step(self) -> torch.Tensor:
        """One denoising step."""
        with torch.no_grad():
            made: torch.Tensor = self.model(**self._inputs, return_dict=False)[0]
        return made


def _copy_rate(device: torch.device) -> tuple[Callable[[], object], int]:
    """A large copy over the link, and its bytes."""
    if device.type == "cuda":
        probe = LinkProbe(device)
        return probe.copy, probe.num_bytes
    source, target = (torch.ones(64 << 20, dtype=torch.uint8) for _ in range(2))
    return lambda: target.copy_(source), source.numel()


def run(
    shape: str, names: Sequence[str], budget: str | None, device: torch.device, rounds: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """One result per case."""
    cases = [_Case(name, shape, budget, device) for name in ("resident", *names)]
    copy, copied_bytes = _copy_rate(device)
    steps: dict[str, Callable[[], object]] = {case.name: case.step for case in cases}
    timings = interleave({**steps, "link": copy}, rounds, repeats, time_cuda if device.type == "cuda" else time_host)
    for case in cases:
        yield _row(shape, case, cases[0], timings, copied_bytes / timings["link"].ms * 1e3)


def _row(shape: str, case: _Case, resident: _Case, timings: dict[str, Timing], link: float) -> dict[str, Any]:
    timing, resident_ms = timings[case.name], timings["resident"].ms
    return {
        "table": f"diffusers-{shape}",
        "case": case.name,
        "rows": SHAPES[shape](case.output.device.type == "cpu")[3],
        "ms": timing.ms,
        "spread_ms": timing.spread_ms,
        "floor_ms": max(resident_ms, case.moved_bytes / link * 1e3),
        "resident_ms": resident_ms,
        "bytes_moved": case.moved_bytes,
        "weight_bytes": case.weight_bytes,
        "link_gb_per_s": link / 1e9,
        "peak_device_bytes": case.peak_bytes,
        "planned_device_bytes": case.planned_bytes,
        "bit_equal": bool(torch.equal(case.step(), resident.output)),
    }


def main() -> None:
    """Run from the command line."""
    parser = parser_of(__doc__, rounds=3, repeats=3)
    parser.add_argument("--shapes", type=words_of(tuple(SHAPES)), default=["wan", "flux"], help="default wan,flux")
    parser.add_argument("--cases", type=words_of(CASES), default=["headrace", "leaf"], help="of " + ", ".join(CASES))
    parser.add_argument("--budget", help="of headrace, for weights; default by shape")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    device, rows, missing = torch.device(given.device), [], []
    if "flextensor" in given.cases and (importlib.util.find_spec("flextensor") is None or device.type == "cpu"):
        given.cases.remove("flextensor")
        missing = ["flextensor"]  # not installed, or without the GPU that it needs
    for shape in given.shapes:
        for row in run(shape, given.cases, given.budget, device, given.rounds, given.repeats):
            rows.append(row)
            print_step(row)
            append(row, given.out)
        gc.collect()
    finish("diffusers_pipeline", rows, not_run=missing)


if __name__ == "__main__":
    main()
