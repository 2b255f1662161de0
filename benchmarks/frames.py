"""Frames of Wan2.2-T2V-A14B that a card of 24 GB has room for, stored in fp8: resident, and offloaded by headrace.

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python benchmarks/frames.py --out FILE
    python benchmarks/frames.py --device cpu --tiny                            tries the script

The transformer is one expert of the published shape with seeded weights, under diffusers' layerwise casting: 14.3 GB.
In bf16 it has 28.6 GB, and a card of 24 GB does not hold it. Frames are of 480 x 832. ``headrace`` has ``--memory``
for weights, and the rest of the card for activations.

* A step of 81 frames is timed without a limit, the two in turns, and has to have the same bits.
* Then one allocation holds what the GPU has beyond ``--card``, and the most frames are searched for which a step runs,
  twice in a row. All weights are there, and two of the equal blocks run, since the peak does not depend on how many do.
  The search begins with what is counted on ``meta``, as ``headrace plan --frames`` counts, for the memory that is free.

Without expandable segments gaps of torch's allocator take a quarter of the memory. On an H200 it takes 80 s in all.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from argparse import Namespace
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

import headrace
from card_24gb import Card, free_memory, rest_on_host
from harness import append, finish, parser_of
from headrace.adapters.pipeline_peaks import FusedKernels, LiveBytes
from headrace.config import Budget, Workload
from headrace.model.inventory import take_inventory
from headrace.sizes import parse_size
from other_offloaders import SHAPES, Shape, build, store

BLOCKS = 2  # that run where memory is measured
TIMED_FRAMES = 81
_MOST = 256  # latent frames that are tried


def frames_of(latents: int) -> int:
    """Frames of a video that has so many latent ones."""
    return 4 * (latents - 1) + 1


def inputs_of(shape: Shape, latents: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Inputs of a step, the same every time."""
    sizes = {**shape.inputs, "hidden_states": (1, 16, latents, *shape.inputs["hidden_states"][3:])}
    generator = torch.Generator("cpu").manual_seed(1)
    made = {name: torch.randn(*size, generator=generator).bfloat16() for name, size in sizes.items()}
    return {name: each.abs().to(device) if name == "timestep" else each.to(device) for name, each in made.items()}


def step(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """One pass of the transformer."""
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]  # type: ignore[no-any-return]


@contextmanager
def few_blocks(model: Any) -> Iterator[None]:
    """Within, a step runs the first blocks alone; the others stay where they are."""
    blocks = model.blocks
    model._modules["blocks"] = nn.ModuleList(blocks[:BLOCKS])
    try:
        yield
    finally:
        model._modules["blocks"] = blocks


class Counted:
    """The transformer on ``meta``, of which a step's activations are counted."""

    def __init__(self, shape: Shape) -> None:
        import diffusers

        self._shape, self._live = shape, LiveBytes()
        with self._live, torch.device("meta"):  # which counts weights, too: casts exchange them
            self._model = getattr(diffusers, str(shape.model))(**{**shape.config, "num_layers": BLOCKS}).bfloat16()
            store(self._model, "fp8", torch.device("meta"))
        self._weight_bytes = take_inventory(self._model).num_bytes
        self.peak_bytes = cache(self._peak_bytes)

    def _peak_bytes(self, latents: int) -> int:
        inputs = inputs_of(self._shape, latents, torch.device("meta"))
        self._live.peak_bytes = 0
        with FusedKernels(), self._live:
            step(self._model, inputs)
        return self._live.peak_bytes - self._weight_bytes + sum(each.nbytes for each in inputs.values())

    def most(self, free_bytes: int) -> int:
        """The most latent frames whose step takes no more, with the hundredth that plans leave."""
        return bisect_right(range(1, _MOST), free_bytes, key=lambda latents: self.peak_bytes(latents) * 101 // 100)


class Bench:
    """The model twice, in device memory and offloaded."""

    def __init__(self, given: Namespace) -> None:
        self._given, self._device = given, torch.device(given.device)
        self._shape = SHAPES["wan"](given.tiny)
        self._counted = Counted(self._shape)
        self._models = {"resident": self._build(), "headrace": self._build()}
        self.weight_bytes = take_inventory(self._models["resident"]).num_bytes
        self.bf16_bytes = 2 * sum(parameter.numel() for parameter in self._models["resident"].parameters())
        memory = self.weight_bytes // 3 if given.tiny else parse_size(given.memory)
        self._card_bytes = 2 * self.weight_bytes if given.tiny else parse_size(given.card)
        if self._device.type == "cuda":
            rest_on_host(self._models["headrace"])
        begin = time.perf_counter()
        budget = Budget(memory, workload=Workload((self._shape.rows,)))
        self.handle = headrace.offload(self._models["headrace"], budget, device=self._device)
        self.offload_s = time.perf_counter() - begin
        self._held = {"resident": self.weight_bytes, "headrace": self.handle.plan.device_bytes}

    def _build(self) -> nn.Module:
        model = build(self._shape, self._device, self._device).eval()
        store(model, "fp8", self._device)
        free_memory(self._device)
        return model

    def timed(self) -> dict[str, dict[str, Any]]:
        """Milliseconds of a step by case, and whether it has the bits of the resident one."""
        latents = self._shape.inputs["hidden_states"][2]
        inputs = inputs_of(self._shape, latents, self._device)
        samples: dict[str, list[float]] = {name: [] for name in self._models}
        digests: dict[str, set[str]] = {name: set() for name in self._models}
        for round_ in range(1 + self._given.rounds):
            for name in list(self._models)[:: -1 if round_ % 2 else 1]:
                self._wait()
                begin = time.perf_counter()
                output = step(self._models[name], inputs)
                self._wait()
                samples[name] += [(time.perf_counter() - begin) * 1e3] if round_ else []  # the first one warms up
                digests[name].add(hashlib.sha256(output.cpu().view(torch.uint8).numpy()).hexdigest())
                finite = bool(output.isfinite().all())
                del output
        same = len(digests["resident"]) == 1 and digests["headrace"] == digests["resident"] and finite
        return {
            name: {"timed_frames": frames_of(latents), "ms": statistics.median(each), "samples_ms": each,
                   "resident_ms": statistics.median(samples["resident"]), "bit_equal": same}
            for name, each in samples.items()
        }  # fmt: skip

    def searched(self, name: str) -> dict[str, Any]:
        """The most frames that run on the card, where the other copy has no device memory."""
        model = self._models[name]
        with Card(self._card_bytes, self._device), few_blocks(model):
            if self._device.type != "cuda":
                free_bytes = self._card_bytes - self._held[name]
                latents = counted = self._counted.most(free_bytes)
                peak_bytes = None
            else:
                free_bytes = torch.cuda.mem_get_info(self._device)[0]
                latents = counted = self._counted.most(free_bytes)
                while latents and not self._fits(model, latents):
                    latents -= 1
                while latents >= counted and self._fits(model, latents + 1):
                    latents += 1
                peak_bytes = self._peak_bytes(model, latents)
        found = {"free_bytes": free_bytes, "held_bytes": self._held[name], "counted_frames": frames_of(counted)}
        found |= {"frames": frames_of(latents), "peak_bytes": peak_bytes}
        return {**found, "counted_bytes": self._counted.peak_bytes(latents)}

    def rows(self) -> Iterator[dict[str, Any]]:
        """One for each case."""
        timed = self.timed()
        self.handle.park()
        searched = {"resident": self.searched("resident")}
        del self._models["resident"]
        free_memory(self._device)
        self.handle.resume()
        searched["headrace"] = self.searched("headrace")
        for name, found in searched.items():
            row = {"table": "frames", "case": name, "stored": "fp8", **timed[name], **found}
            row |= {"weight_bytes": self.weight_bytes, "bf16_bytes": self.bf16_bytes, "card_bytes": self._card_bytes}
            yield row | {"resident_frames": searched["resident"]["frames"], "offload_s": self.offload_s}

    def _fits(self, model: nn.Module, latents: int) -> bool:
        try:
            self._peak_bytes(model, latents)
        except torch.OutOfMemoryError:
            return False
        finally:
            free_memory(self._device)
        return True

    def _peak_bytes(self, model: nn.Module, latents: int) -> int:
        """Of the allocator in two steps, beside what is allocated before."""
        before = torch.cuda.memory_allocated(self._device)
        inputs = inputs_of(self._shape, latents, self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        for _ in range(2):
            step(model, inputs)
        self._wait()
        return torch.cuda.max_memory_allocated(self._device) - before

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--memory", default="1GiB", help="on the device for weights")
    parser.add_argument("--card", default="24GB", help="device memory that is left")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small layers, a third of them in the budget")
    given = parser.parse_args()
    begin = time.perf_counter()
    bench = Bench(given)
    print(f"built after {time.perf_counter() - begin:.0f} s\n{bench.handle.plan}", flush=True)
    rows = []
    for row in bench.rows():
        rows.append(row)
        append(row, given.out)
        print(
            f"{row['case']:<9} {row['held_bytes'] / 1e9:.2f} GB of {row['weight_bytes'] / 1e9:.2f} on a card of "
            f"{row['card_bytes'] / 1e9:.2f}: {row['frames']} frames ({row['frames'] / row['resident_frames']:.2f} x "
            f"resident, {row['counted_frames']} counted)  median {row['ms']:.0f} ms for {row['timed_frames']} frames "
            f"({row['ms'] / row['resident_ms']:.4f} x resident)  {'same bits' if row['bit_equal'] else 'OTHER BITS'}",
            flush=True,
        )
    finish("frames", rows, seconds=round(time.perf_counter() - begin))


if __name__ == "__main__":
    main()
