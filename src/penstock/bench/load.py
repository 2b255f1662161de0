"""``penstock bench load``: from a checkpoint on disk to the first step, half of the layers' bytes offloaded.

Each way of loading runs in a process of its own, imports, the CUDA context and the loading of kernels not counted, once
with the files in the page cache and once without:

* ``penstock``: :func:`penstock.adapters.transformers.load` with a budget;
* ``pin_memory``: ``from_pretrained`` on the CPU, then torch's ``pin_memory()`` for what is offloaded and
  ``.to(device)`` for the rest; layers copy their weights to the device before they run;
* ``accelerate``: ``load_checkpoint_and_dispatch`` with every other layer on the CPU.

``plain read`` is the same files read by as many threads into memory that is there already: what the disk, or the page
cache, can give. All ways have to give the same logits.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from penstock.bench.decoder import CONFIGS, build_model
from penstock.process import PeakMeter, num_cores, rss_bytes
from penstock.store.disk import DiskOptions, File

__all__ = ["WAYS", "run", "run_child"]

WAYS = ("penstock", "pin_memory", "accelerate")
_PIECE_BYTES = 8 << 20


def run(folder: Path | None, layers: int, ways: Sequence[str], device: str) -> Iterator[dict[str, Any]]:
    """Yield one result per way and state of the page cache; the plain read comes first."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-load-", dir=folder) as place:
        files = _write(Path(place), layers, device)
        num_bytes = sum(file.stat().st_size for file in files)
        for cold in (False, True):
            for direct in (False, True) if cold else (False,):
                if cold:
                    _forget(files)
                seconds = _read_plainly(files, direct)
                name = "plain read, direct" if direct else "plain read"
                yield {"case": name, "cold": cold, "gb_per_s": num_bytes / seconds / 1e9, "load_s": seconds}
            digests = set()
            for way in ways:
                if cold:
                    _forget(files)
                result = _in_child(way, place, device)
                digests.add(result["digest"])
                yield {"case": way, "cold": cold, **result, "bit_equal": len(digests) == 1}


def _write(folder: Path, layers: int, device: str) -> list[Path]:
    shape = CONFIGS["qwen3-8b"]()
    sizes = {} if device != "cpu" else {"hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 32000}
    config = type(shape)(**{**shape.to_dict(), "num_hidden_layers": layers, "layer_types": None, **sizes})
    config.architectures = ["Qwen3ForCausalLM"]
    model: Any = build_model(config, "cpu", device)
    model.save_pretrained(folder, max_shard_size="4GB")
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    return files


def _forget(files: Sequence[Path]) -> None:
    """Drop the files' pages from the cache; they were written back before."""
    for file in files:
        with file.open("rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_plainly(files: Sequence[Path], direct: bool) -> float:
    sources = [File(file, DiskOptions(direct=direct)) for file in files]
    sizes = [file.stat().st_size for file in files]
    pieces = [(s, start) for s, size in enumerate(sizes) for start in range(0, size - _PIECE_BYTES, _PIECE_BYTES)]
    memory = memoryview(mmap.mmap(-1, num_cores() * _PIECE_BYTES))
    rooms = [memory[i * _PIECE_BYTES : (i + 1) * _PIECE_BYTES] for i in range(num_cores())]
    for room in rooms:
        room[:: mmap.PAGESIZE] = bytes(len(room) // mmap.PAGESIZE)

    def read(room: memoryview) -> None:
        while pieces:
            try:
                source, start = pieces.pop()
            except IndexError:
                return
            sources[source].read(start, room)

    begin = time.perf_counter()
    with ThreadPoolExecutor(len(rooms)) as pool:
        list(pool.map(read, rooms))
    seconds = time.perf_counter() - begin
    for source in sources:
        source.close()
    return seconds


def _in_child(way: str, folder: str, device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "penstock.bench.load", way, folder, device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{way} failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@torch.no_grad()
def run_child(way: str, folder: str, device_name: str) -> dict[str, Any]:
    """Load in this process and run one step; seconds, rate and memory."""
    device = torch.device(device_name)
    tokens = torch.arange(4, device=device)[None]
    _warm_up(tokens)
    loaders: dict[str, Callable[[str, torch.device], tuple[Any, dict[str, Any]]]] = {
        "penstock": _penstock,
        "pin_memory": _pin_memory,
        "accelerate": _accelerate,
    }
    before, meter = rss_bytes(), PeakMeter()
    begin = time.perf_counter()
    model, facts = loaders[way](folder, device)
    loaded = time.perf_counter()
    logits = model(tokens, use_cache=False).logits.cpu()
    stepped = time.perf_counter()
    return {
        "load_s": loaded - begin,
        "first_step_s": stepped - begin,
        "rss_growth_bytes": rss_bytes() - before,
        "peak_rss_growth_bytes": meter.growth_bytes(),
        "digest": hashlib.sha256(logits.view(torch.uint8).numpy().tobytes()).hexdigest(),
        **facts,
    }


def _warm_up(tokens: torch.Tensor) -> None:
    """Import what every way needs, make the CUDA context, and have the driver load the kernels of a step."""
    import accelerate  # noqa: F401

    import penstock.adapters.transformers  # noqa: F401

    shape = CONFIGS["qwen3-8b"]()
    config = type(shape)(**{**shape.to_dict(), "num_hidden_layers": 2, "layer_types": None, "vocab_size": 1000})
    model = build_model(config, tokens.device, tokens.device)
    model(tokens, use_cache=False)


def _penstock(folder: str, device: torch.device) -> tuple[Any, dict[str, Any]]:
    from penstock import Budget
    from penstock.adapters.transformers import load

    marks: list[tuple[float, int]] = []
    share = _layers_bytes(folder) // 2
    budget = Budget(_file_bytes(folder) - share, ["layers"], mode="cpu")
    model, handle = load(
        folder, budget, device=device, progress=lambda done, total: marks.append((time.perf_counter(), done))
    )
    seconds, moved = marks[-1][0] - marks[0][0], marks[-1][1] - marks[0][1]
    facts = {"gb_per_s": moved / seconds / 1e9 if seconds else 0.0, "offloaded_bytes": handle.plan.offloaded_bytes}
    return model, facts


def _pin_memory(folder: str, device: torch.device) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    def to_device(module: torch.nn.Module, args: object) -> None:
        module.to(device, non_blocking=True)

    factory: Any = AutoModelForCausalLM
    model = factory.from_pretrained(folder).eval()
    offloaded = 0
    for index, layer in enumerate(model.model.layers):
        if index % 2 == 0:
            layer.to(device)
            continue
        for parameter in layer.parameters():
            parameter.data = parameter.data.pin_memory() if device.type == "cuda" else parameter.data.clone()
            offloaded += parameter.nbytes
        layer.register_forward_pre_hook(to_device)
    for module in (model.model.embed_tokens, model.model.norm, model.model.rotary_emb, model.lm_head):
        module.to(device)
    return model, {"offloaded_bytes": offloaded}


def _accelerate(folder: str, device: torch.device) -> tuple[Any, dict[str, Any]]:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoConfig, AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    with init_empty_weights():
        model = factory.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    target: Any = 0 if device.type == "cuda" else "cpu"
    where: dict[str, Any] = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), target)
    layers = len(model.model.layers)
    where |= {f"model.layers.{index}": target if index % 2 == 0 else "cpu" for index in range(layers)}
    model = load_checkpoint_and_dispatch(model, folder, device_map=where, dtype=torch.bfloat16).eval()
    return model, {"offloaded_bytes": sum(p.nbytes for p in model.model.layers[1].parameters()) * (layers // 2)}


def _file_bytes(folder: str) -> int:
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def _layers_bytes(folder: str) -> int:
    from penstock.checkpoint import Checkpoint

    return sum(tensor.num_bytes for name, tensor in Checkpoint.open(folder).tensors.items() if ".layers." in name)


if __name__ == "__main__":
    print(json.dumps(run_child(sys.argv[1], sys.argv[2], sys.argv[3])))
