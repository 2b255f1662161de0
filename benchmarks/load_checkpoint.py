"""From a checkpoint on disk to the first step, half of the layers' bytes offloaded.

    python benchmarks/load_checkpoint.py [--layers 16] [--ways headrace,pin_memory] [--files cold] [--out FILE.jsonl]

Each way of loading runs in a process of its own, imports, the CUDA context and the loading of kernels not counted, with
the files in the page cache and without. The ways:

* ``headrace``: :func:`headrace.adapters.transformers.load` with a budget, reads as it chooses; ``headrace-direct``
  and ``headrace-buffered``: past the page cache, and through it; ``headrace-disk``: offloaded weights stay in the
  files, and every step reads them there;
* ``pin_memory``: ``from_pretrained`` on the CPU, then torch's ``pin_memory()`` for offloaded layers and
  ``.to(device)`` for the rest; offloaded layers copy their weights to the device before they run;
* ``accelerate``: ``load_checkpoint_and_dispatch`` with every other layer on the CPU.

``plain read`` reads the same files with as many threads into memory that is touched already: the limit of the disk, or
of the page cache. ``fresh memory`` touches half as much memory for the first time, and reads nothing. A virtual disk
changes from minute to minute, so all of them take turns, in another order in each repeat. All ways have to give the
same logits.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decoder_models import CONFIGS, build_model
from harness import append, counts, finish, parser_of, read_plainly, words_of, writable_folder
from headrace.config import Mode
from headrace.memory.pages import map_pages, populate_parallel
from headrace.memory.system import PeakMeter, num_cores, rss_bytes
from headrace.stores.file_reads import DiskOptions

_HEADRACE: dict[str, tuple[Mode, DiskOptions | None]] = {
    "headrace": ("cpu", None),
    "headrace-direct": ("cpu", DiskOptions(direct=True)),
    "headrace-buffered": ("cpu", DiskOptions(direct=False)),
    "headrace-disk": ("disk", None),
}
WAYS = (*_HEADRACE, "pin_memory", "accelerate")
_PLAIN = "plain read"
_FRESH = "fresh memory"


def run(
    folder: Path | None,
    layers: int,
    ways: Sequence[str],
    device: str,
    *,
    repeats: int = 1,
    block_mib: Sequence[int] = (8,),
    states: Sequence[bool] = (False, True),
) -> Iterator[dict[str, Any]]:
    """Yield one result per repeat, state of the page cache, and way or plain read.

    Args:
        folder: where the checkpoint is written; default temporary files.
        layers: of the model.
        ways: of :data:`WAYS`.
        device: where the model runs.
        repeats: of everything.
        block_mib: requests of the plain direct reads, in MiB.
        states: not cached, or cached.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-bench-load-", dir=folder) as place:
        files = _write(Path(place), layers, device)
        cases: list[tuple[str, Callable[[], dict[str, Any]]]] = [(_PLAIN, partial(_plain, files, False, 8))]
        cases += [(_plain_direct(size, block_mib), partial(_plain, files, True, size)) for size in block_mib]
        cases.append((_FRESH, partial(_fresh, sum(file.stat().st_size for file in files) // 2)))
        cases += [(way, partial(_in_child, way, place, device)) for way in ways]
        digests: set[str] = set()
        for repeat in range(repeats):
            turn = repeat * len(cases) // repeats
            for cold in states:
                if not cold:
                    read_plainly(files, False, 8 << 20)
                for name, measure in (*cases[turn:], *cases[:turn]):
                    if not cold and (name == _FRESH or (name.startswith(_PLAIN) and name != _PLAIN)):
                        continue
                    if cold:
                        forget(files)
                    result = measure()
                    if "digest" in result:
                        digests.add(result["digest"])
                        result["bit_equal"] = len(digests) == 1
                    yield {"case": name, "cold": cold, "repeat": repeat, **result}


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """For people: the median of each case, and its rate as a share of the faster plain read's."""
    for cold in sorted({bool(row["cold"]) for row in rows}):
        here = [row for row in rows if row["cold"] is cold]
        rates = {
            case: statistics.median(rates)
            for case in dict.fromkeys(row["case"] for row in here)
            if (rates := [row["gb_per_s"] for row in here if row["case"] == case and "gb_per_s" in row])
        }
        floor = max((rate for case, rate in rates.items() if case.startswith(_PLAIN)), default=None)
        for case in dict.fromkeys(row["case"] for row in here):
            load_s = statistics.median(row["load_s"] for row in here if row["case"] == case)
            rate = f"{rates[case]:7.2f} GB/s" if case in rates else ""
            share = f"{rates[case] / floor:5.2f} x the faster plain read" if floor and case in rates else ""
            yield f"{'not cached' if cold else 'cached':<11}{case:<25}{load_s:7.2f} s {rate:<14}{share}".rstrip()


def _plain_direct(size_mib: int, sizes_mib: Sequence[int]) -> str:
    return f"{_PLAIN}, direct" if len(sizes_mib) == 1 else f"{_PLAIN}, direct, {size_mib} MiB"


def forget(files: Sequence[Path]) -> None:
    """Drop the files' pages from the page cache; they were written back before."""
    for file in files:
        with file.open("rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def touch_fresh(num_bytes: int) -> float:
    """Seconds until one thread per core has touched ``num_bytes`` of memory for the first time.

    A load into new memory waits for this too, and a virtual machine may have to ask its host for the pages.
    """
    memory = torch.from_numpy(map_pages(num_bytes))
    begin = time.perf_counter()
    populate_parallel(memory, num_cores())
    return time.perf_counter() - begin


def _plain(files: Sequence[Path], direct: bool, block_mib: int) -> dict[str, Any]:
    seconds = read_plainly(files, direct, block_mib << 20)
    return {"load_s": seconds, "gb_per_s": sum(file.stat().st_size for file in files) / seconds / 1e9}


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


def _fresh(num_bytes: int) -> dict[str, Any]:
    seconds = touch_fresh(num_bytes)
    return {"load_s": seconds, "gb_per_s": num_bytes / seconds / 1e9}


def _in_child(way: str, folder: str, device: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", way, folder, device]
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
        **dict.fromkeys(_HEADRACE, partial(_headrace, way)),
        "pin_memory": _pin_memory,
        "accelerate": _accelerate,
    }
    before, meter = rss_bytes(), PeakMeter()
    begin = time.perf_counter()
    model, facts = loaders[way](folder, device)
    loaded = time.perf_counter()
    logits = model(tokens, use_cache=False).logits.cpu()
    stepped = time.perf_counter()
    rss_growth_bytes = rss_bytes() - before
    model(tokens, use_cache=False).logits.cpu()
    return {
        "load_s": loaded - begin,
        "first_step_s": stepped - begin,
        "second_step_takes_s": time.perf_counter() - stepped,
        "rss_growth_bytes": rss_growth_bytes,
        "peak_rss_growth_bytes": meter.growth_bytes(),
        "digest": hashlib.sha256(logits.view(torch.uint8).numpy().tobytes()).hexdigest(),
        **facts,
    }


def _warm_up(tokens: torch.Tensor) -> None:
    """Import what every way needs, make the CUDA context, and have the driver load the kernels of a step."""
    import accelerate  # noqa: F401

    import headrace.adapters.transformers.load_folder  # noqa: F401

    shape = CONFIGS["qwen3-8b"]()
    config = type(shape)(**{**shape.to_dict(), "num_hidden_layers": 2, "layer_types": None, "vocab_size": 1000})
    model = build_model(config, tokens.device, tokens.device)
    model(tokens, use_cache=False)


def _headrace(way: str, folder: str, device: torch.device) -> tuple[Any, dict[str, Any]]:
    from headrace import Budget
    from headrace.adapters.transformers import load

    marks: list[tuple[float, int]] = []
    share = _layers_bytes(folder) // 2
    mode, disk = _HEADRACE[way]
    budget = Budget(_file_bytes(folder) - share, ["layers"], mode=mode)
    model, handle = load(
        folder,
        budget,
        device=device,
        disk=disk,
        progress=lambda done, total: marks.append((time.perf_counter(), done)),
    )
    seconds, moved = marks[-1][0] - marks[0][0], marks[-1][1] - marks[0][1]
    reads = handle.stats().loading
    return model, {
        "gb_per_s": moved / seconds / 1e9 if seconds else 0.0,
        "offloaded_bytes": handle.plan.offloaded_bytes,
        "reads": str(reads),
        "reads_bytes": asdict(reads),
    }


def _pin_memory(folder: str, device: torch.device) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    def to_device(module: torch.nn.Module, args: object) -> None:
        module.to(device, non_blocking=True)

    factory: Any = AutoModelForCausalLM
    model = factory.from_pretrained(folder, trust_remote_code=False).eval()
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
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = factory.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    target: Any = 0 if device.type == "cuda" else "cpu"
    where: dict[str, Any] = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), target)
    layers = len(model.model.layers)
    where |= {f"model.layers.{index}": target if index % 2 == 0 else "cpu" for index in range(layers)}
    model = load_checkpoint_and_dispatch(model, folder, device_map=where, dtype=torch.bfloat16).eval()
    return model, {"offloaded_bytes": sum(p.nbytes for p in model.model.layers[1].parameters()) * (layers // 2)}


def _file_bytes(folder: str) -> int:
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def _layers_bytes(folder: str) -> int:
    from headrace.checkpoint.safetensors_header import Checkpoint

    return sum(tensor.num_bytes for name, tensor in Checkpoint.open(folder).tensors.items() if ".layers." in name)


def describe(row: dict[str, Any]) -> str:
    """One line about one result."""
    rate = f"{row['gb_per_s']:6.2f} GB/s" if "gb_per_s" in row else ""
    step = f"first step after {row['first_step_s']:6.2f} s" if "first_step_s" in row else ""
    beyond = (row["rss_growth_bytes"] - row["offloaded_bytes"]) / 2**20 if "offloaded_bytes" in row else None
    memory = "" if beyond is None else f"resident memory - offloaded bytes {beyond:+8.0f} MiB"
    where = "cold" if row["cold"] else "cached"
    return f"{where:<7} {row['case']:<25} {row['load_s']:7.2f} s  {rate:<12}  {step}  {memory}  {row.get('reads', '')}"


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(run_child(*sys.argv[2:])))
        return
    parser = parser_of(__doc__, repeats=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=16, help="layers of Qwen3-8B's shape in the checkpoint")
    parser.add_argument("--ways", type=words_of(WAYS), default=list(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--plain-blocks", type=counts, default=[8], help="requests of the plain direct reads, in MiB")
    parser.add_argument("--files", type=words_of(("cached", "cold")), default=["cached", "cold"])
    parser.add_argument("--folder", type=writable_folder, help="where the checkpoint is written (default: temporary)")
    given = parser.parse_args()
    states = [word == "cold" for word in given.files]
    rows = []
    for row in run(
        given.folder,
        given.layers,
        given.ways,
        given.device,
        repeats=given.repeats,
        block_mib=given.plain_blocks,
        states=states,
    ):
        rows.append(row)
        print(describe(row), flush=True)
        append(row, given.out)
    print("\n".join(["", *summary(rows)]))
    finish("load", rows)


if __name__ == "__main__":
    main()
