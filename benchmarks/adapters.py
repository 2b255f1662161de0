"""Seconds to load, exchange, scale and unload adapters of 0.5 GB on an offloaded FLUX.1-dev, beside the resident one.

    python benchmarks/adapters.py --out benchmarks/results/DATE-adapters-GPU.jsonl
    python benchmarks/adapters.py --device cpu --tiny                        tries the script

The pipeline is FLUX.1-dev's transformer in its published shape, with seeded weights and embeddings for prompts. Two
LoRA of rank 64 over all linears of attention and feed-forward lie in files in the format of diffusers, in the page
cache. Every case goes through the operations below in the same order, and makes an image in one step after each:

* ``load``: ``load_lora_weights`` of the first file; ``hotswap``: the second file in its place; ``second``: the second
  file as another adapter
* ``swap``, ``scale``, ``mix``: ``set_adapters`` of the second, of the second at half its strength, of both
* ``delete``: ``delete_adapters`` of the first; ``unload``: ``unload_lora_weights``

``resident`` has all weights on the device, ``none`` and ``exp3`` ``--memory`` there and the others in pinned host
memory, as they are or coded. Images have to have the bits of ``resident``, and no operation may plan or load anew.

    floor of an operation that reads a file = read it + copy it to the device, each alone

Between the floor and the seconds is Python code of diffusers and peft, for 418 layers.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from safetensors.torch import load_file, save_file
from torch import nn

from card_24gb import free_memory, rest_on_host
from harness import append, finish, parser_of, words_of
from headrace.adapters.diffusers import load
from headrace.config import Budget
from headrace.model.inventory import take_inventory
from headrace.sizes import parse_size
from other_offloaders import SHAPES, build

CASES = ("none", "exp3")
FILES = ("one.safetensors", "two.safetensors")


def operations(pipe: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """By name, in the order in which they are called."""

    def read(name: str, file: str, **options: Any) -> Callable[[], Any]:
        return lambda: pipe.load_lora_weights(folder, weight_name=file, adapter_name=name, **options)

    return {
        "load": read("a", FILES[0]),
        "hotswap": read("a", FILES[1], hotswap=True),
        "second": read("b", FILES[1]),
        "swap": lambda: pipe.set_adapters("b"),
        "scale": lambda: pipe.set_adapters("b", 0.5),
        "mix": lambda: pipe.set_adapters(["a", "b"], [0.7, 0.3]),
        "delete": lambda: pipe.delete_adapters("a"),
        "unload": lambda: pipe.unload_lora_weights(),
    }


def write_adapter(model: nn.Module, file: Path, rank: int, seed: int, device: torch.device) -> int:
    """A LoRA of the linears of all blocks but those of their norms; returns its bytes."""
    generator = torch.Generator(device).manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    for name, linear in model.named_modules():
        if not isinstance(linear, nn.Linear) or "blocks" not in name or "norm" in name:
            continue
        for part, shape in (("A", (rank, linear.in_features)), ("B", (linear.out_features, rank))):
            made = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
            state[f"transformer.{name}.lora_{part}.weight"] = made.mul_(0.02).cpu()
    save_file(state, file)
    return file.stat().st_size


def floor_s(file: Path, device: torch.device) -> tuple[float, float]:
    """Seconds to read a file of adapters as diffusers does, and to copy its tensors to ``device``."""
    begin = time.perf_counter()
    state = {name: tensor.clone() for name, tensor in load_file(file).items()}  # which touches the mapped pages
    read_s = time.perf_counter() - begin
    begin = time.perf_counter()
    there = [tensor.to(device) for tensor in state.values()]
    _wait(device)
    del there
    return read_s, time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Bench:
    """One pipeline, resident at first and then offloaded in one way after another."""

    def __init__(self, given: Namespace, folder: Path) -> None:
        self._given, self._folder, self._device = given, folder, torch.device(given.device)
        shape = SHAPES["flux"](given.tiny)
        model = build(shape, self._device, self._device).eval()
        self.weight_bytes = take_inventory(model).num_bytes
        rank = 8 if given.tiny else 64
        self.adapter_bytes = [
            write_adapter(model, folder / file, rank, i, self._device) for i, file in enumerate(FILES)
        ]
        none = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
        self._pipe = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=model, **none)
        self._pipe.set_progress_bar_config(disable=True)
        words = torch.Generator().manual_seed(1)
        text, pooled = shape.inputs["encoder_hidden_states"], shape.inputs["pooled_projections"]
        self._prompt = {
            "prompt_embeds": torch.randn(*text, generator=words).to(self._device, torch.bfloat16),
            "pooled_prompt_embeds": torch.randn(*pooled, generator=words).to(self._device, torch.bfloat16),
        }

    def image(self) -> str:
        """Digest of the latents of an image that was made in one step."""
        side = 128 if self._given.tiny else 1024
        size = {"height": side, "width": side, "num_inference_steps": 1, "output_type": "latent"}
        made = self._pipe(**self._prompt, **size, generator=torch.Generator().manual_seed(2), return_dict=False)[0]
        if not made.isfinite().all():
            raise RuntimeError("expected finite latents")
        return hashlib.sha256(made.cpu().contiguous().view(torch.uint8).numpy()).hexdigest()

    def rounds(self) -> tuple[dict[str, list[float]], dict[str, str]]:
        """Seconds of each operation in each round, and the image after it, which is the same in all rounds."""
        seconds: dict[str, list[float]] = {}
        images = {"before": self.image()}
        for _ in range(self._given.rounds):
            for name, call in operations(self._pipe, self._folder).items():
                _wait(self._device)
                begin = time.perf_counter()
                call()
                _wait(self._device)
                seconds.setdefault(name, []).append(time.perf_counter() - begin)
                image = self.image()
                if images.setdefault(name, image) != image:
                    raise RuntimeError(f"{name}: another image than in the round before")
        return seconds, images

    def offloaded(self, codec: Any) -> tuple[dict[str, list[float]], dict[str, str], dict[str, Any]]:
        """The same within a budget; last what the offload is."""
        memory = self.weight_bytes // 3 if self._given.tiny else parse_size(self._given.memory)
        begin = time.perf_counter()
        rest_on_host(self._pipe.transformer)
        free_memory(self._device)
        _, handle = load(self._pipe, Budget(memory, codec=codec), device=self._device)
        facts: dict[str, Any] = {"offload_s": time.perf_counter() - begin}
        session, plan = handle._session, handle.plan
        self.image()  # codes are made beside the first steps
        seconds, images = self.rounds()
        facts |= {"device_bytes": plan.device_bytes, "moved_bytes": plan.moved_bytes}
        facts["planned_once"] = handle._session is session and handle.plan.moved_bytes == plan.moved_bytes
        handle.remove()
        return seconds, images, facts


def run(given: Namespace, folder: Path) -> list[dict[str, Any]]:
    """One row per case and operation."""
    begin = time.perf_counter()
    bench = Bench(given, folder)
    print(f"built after {time.perf_counter() - begin:.0f} s, adapters of {bench.adapter_bytes} bytes", flush=True)
    floors = [floor_s(folder / FILES[0], torch.device(given.device)) for _ in range(3)]
    read_s, copy_s = (statistics.median(each) for each in zip(*floors, strict=True))
    resident_s, expected = bench.rounds()
    if len(set(expected.values())) != len(expected) - 3:  # one of hotswap, second and swap; one of unload and before
        raise RuntimeError(f"expected another image for each choice of adapters, found {expected}")
    found: list[tuple[str, Any, Any, dict[str, Any]]] = [("resident", resident_s, expected, {})]
    found += [(case, *bench.offloaded(case)) for case in given.cases]
    made = []
    for case, seconds, images, facts in found:
        for name, samples in seconds.items():
            row = {"table": "adapters", "case": case, "operation": name, "seconds": statistics.median(samples)}
            row |= {"samples_s": samples, "resident_s": statistics.median(resident_s[name])}
            row |= {"floor_s": read_s + copy_s if name in ("load", "hotswap", "second") else 0.0}
            row |= {"read_s": read_s, "copy_s": copy_s, "adapter_bytes": bench.adapter_bytes[0]}
            row |= {"weight_bytes": bench.weight_bytes, **facts}
            row["bit_equal"] = images["before"] == expected["before"] and images[name] == expected[name]
            made.append(row)
            append(row, given.out)
            print(
                f"{case:<9} {name:<8} floor {row['floor_s']:.3f}  median {row['seconds']:.3f} s  of "
                f"{', '.join(f'{each:.3f}' for each in samples)}  resident {row['resident_s']:.3f} s  "
                f"{'same bits' if row['bit_equal'] else 'OTHER BITS'}"
                f"{'' if facts.get('planned_once', True) else '  PLANNED ANEW'}",
                flush=True,
            )
    return made


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--cases", type=words_of(CASES), default=list(CASES), help="codecs of the budgets")
    parser.add_argument("--memory", default="6GiB", help="on the device for weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small layers, a third of them on the device")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = run(given, Path(folder))
    failed = sorted({f"{row['case']}: planned anew" for row in rows if not row.get("planned_once", True)})
    finish("adapters", rows, failed=failed)


if __name__ == "__main__":
    main()
