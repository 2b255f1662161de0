"""Tokens per second of mixtures of experts in 24 GB of device memory: headrace, vLLM's own offloaders and llama.cpp.

    python benchmarks/peers.py OUT --model qwen3-30b-a3b --peers generate,llama.cpp --library FOLDER --turns FILE
    CUDA_VISIBLE_DEVICES=1 python benchmarks/peers.py OUT --model qwen3-30b-a3b --peers uva --turns FILE
    python benchmarks/peers.py OUT --publish           raw results for benchmarks/results, on stdout

Published shapes, seeded random weights, one sequence. ``generate``: headrace's own, as ``load`` sets it up, with the
link alone and with the CPU's share. ``headrace``, ``uva``, ``prefetch`` and ``flextensor``: vLLM's engine with that
offloader (``vllm_experts.py``). ``llama.cpp``: ``llama_cpp.py``. Routers follow one seeded trace; those of llama.cpp
choose as they please, and what the CPU computes does not depend on it.

Each gets ``--card`` less ``--reserve`` bytes for weights. Of ``generate`` and llama.cpp the rest of the device is held
while they start, so they have a GPU of their own; an engine of vLLM may take ``--card`` bytes from torch's allocator
once it has started. All that name one file in ``--turns`` start at once and measure one at a time, when nothing starts.

A token is a mean: of those of ``generate`` and llama.cpp after the first eight, of an engine the slope from eight to
136 tokens (from four to 16 where whole layers move). Prompts run twice, and the second is timed. ``host_bytes``:
weights in host memory as each has them there; of engines what torch has pinned, and ``added_rss_anon_bytes`` all else
too.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from harness import words_of
from headrace.sizes import parse_size

# Shape and format of the engines, and GiB of a KV cache that holds the longest prompt.
MODELS = {"qwen3-30b-a3b": ("qwen", "bf16", 1), "gpt-oss-120b": ("gpt-oss-120b", "mxfp4", 0.5)}
ENGINES = {
    "headrace": ["--cases", "cache"], "uva": ["--cases", "uva"], "prefetch": ["--cases", "prefetch"],
    "flextensor": ["--cases", "flextensor"],
}  # fmt: skip
PEERS = ["generate", "llama.cpp", *ENGINES]
PROMPTS = 2047, 8191
_CHUNKS = None, 2048, 1024, 512, 256  # of a prompt: attention of all tokens at once may take more than is left
_HERE = Path(__file__).parent


class Turns:
    """Of all processes that name a file: they start at once, and measure one at a time."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a")
        self.start()

    def start(self) -> None:
        """Others may start, and nobody measures."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_SH)

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Wait until nobody starts or measures; within, this process is alone."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if self._file is not None:
                fcntl.flock(self._file, fcntl.LOCK_UN)


def generate_rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """headrace's ``generate``, with the link alone and with the CPU's share; bits against the resident model."""
    import headrace
    from card_24gb import Card, Rehearsal, _Sequence, rest_on_host
    from headrace.adapters.transformers.liger import use_liger_norms
    from headrace.adapters.transformers.shared_experts import share_experts
    from headrace.experts.cpu.pool import physical_cores
    from headrace.model.inventory import take_inventory
    from shared_experts import build

    device = torch.device(given.device)
    sizes = parse_size(given.card), parse_size(given.reserve)
    model = build(Rehearsal(given.model, given.layers, given.tiny, *sizes, device, ["graphs"]))
    prompts = (8, 16) if given.tiny else given.prompts

    def run(prompt: int, new: int, chunk: int | None = None, at_first: Callable[[], object] = lambda: None) -> Any:
        """The second of two runs; ``at_first`` is called when its first token is there."""
        sequence = _Sequence(model, prompt, new, device)
        model.generation_config.prefill_chunk_size = chunk
        graphs = headrace.decode_in_graphs(model) if device.type == "cuda" else None
        try:
            sequence.run()
            return sequence.run(at_first)
        finally:
            sequence.routing.remove()
            if graphs is not None:
                graphs.remove()

    def computed(share: Any) -> int:
        """Experts that the CPU has computed."""
        return share.doorbell.computed if share else 0

    if given.liger_kernel:
        use_liger_norms(model, device)
    token, first = ((8, 4), 1) if given.tiny else ((16, 136), 8)  # tokens of which the first are not timed
    turns = Turns(given.turns)
    resident = run(*token)
    rest_on_host(model)
    weights = take_inventory(model).num_bytes
    with Card(sizes[0], device) as card:
        begin = time.perf_counter()
        budget = weights // 2 if given.tiny else sizes[0] - sizes[1]
        rules = (("experts", "cache"),) if device.type == "cuda" else ()
        offloading = headrace.offload(model, headrace.Budget(budget, rules=rules), device=device)
        start_s = time.perf_counter() - begin  # before the wait for a turn
        with offloading as handle, turns.mine():
            for way in ("link", "link and CPU") if device.type == "cuda" else ("link",):
                share = share_experts(model, physical_cores()[1:][-15:]) if "CPU" in way else None
                begun: list[Any] = []
                found = run(*token, at_first=lambda at=begun, by=share: at.extend((handle.stats(), computed(by))))
                (before, had), after, rates = begun, handle.stats(), {}
                for length in prompts if share is None else ():
                    for chunk in _CHUNKS:
                        try:
                            rates[str(length)] = length / run(length, 1, chunk).first_token_ms * 1e3
                            break
                        except torch.OutOfMemoryError as error:
                            print(f"{length} tokens in chunks of {chunk}: {error!r}"[:300], flush=True)
                        gc.collect()  # frames of the error hold what the next chunks need
                        torch.cuda.empty_cache()
                hits = [sum(each.hits for each in stats.experts) for stats in (before, after)]
                missed = [sum(each.fetched + each.in_place for each in stats.experts) for stats in (before, after)]
                used = hits[1] - hits[0] + missed[1] - missed[0] + computed(share) - had
                yield {
                    "peer": "headrace generate", "case": way + ", liger-kernel" * given.liger_kernel,
                    "ms": statistics.mean(found.samples_ms[first - 1 :]), "prompt_tokens_per_s": rates or None,
                    "layers": model.config.num_hidden_layers,
                    "resident_ms": statistics.mean(resident.samples_ms[first - 1 :]),
                    "hits": (hits[1] - hits[0]) / used if used else None, "start_s": start_s,
                    "host_bytes": handle.plan.offloaded_bytes, "peak_device_bytes": card.peak_bytes(),
                    "bit_equal": torch.equal(found.logits, resident.logits) and after.bytes_moved > before.bytes_moved,
                }  # fmt: skip
                if share is not None:
                    share.remove()


def llama_rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """llama.cpp, with experts of the first layers on the CPU."""
    from llama_cpp import quiet_library, row_of

    options = {"folder": Path("/dev/shm"), "tokens": 64, "threads": None, **vars(given)}
    options |= {"prompts": [64]} if given.tiny else {}
    turns = Turns(given.turns)
    row = row_of(quiet_library(given.library), given.model, argparse.Namespace(**options), turns.mine)
    yield row | {"peer": "llama.cpp b7347"}


def engine_rows(peer: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """vLLM with that offloader, in a process of its own."""
    shape, form, kv_gib = MODELS[given.model]
    room = parse_size(given.card) - parse_size(given.reserve)
    folder = given.out / f"{given.model}-{peer}"
    command = [sys.executable, str(_HERE / "vllm_experts.py"), str(folder), "--shape", shape]
    command += ["--format", form, "--budget-gib", f"{room / 2**30:.3f}", *ENGINES[peer], "--one", "--card", given.card]
    command += ["--kv-gib", str(kv_gib)]
    command += ["--limit-s", str(given.limit_s)] * bool(given.limit_s)
    command += ["--kernel", given.kernel] if given.kernel else []
    command += ["--layers", str(given.layers)] * bool(given.layers)
    subprocess.run(command + (["--together", str(given.turns)] if given.turns else []), check=True)
    command += ["--publish", "peers"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [json.loads(line) for line in found]
    steps = [row for row in rows if "trace" in row["trace"]]
    prompts = {row["trace"].split()[0]: row["tokens_per_s"] for row in rows if "in, 1 out" in row["trace"]}
    for row in steps:
        yield {
            "peer": "headrace in vLLM 0.33.0" if peer == "headrace" else f"{peer} in vLLM 0.33.0", "case": row["case"],
            "layers": row["layers"], "ms": row["ms"], "prompt_tokens_per_s": prompts, "hits": row["hits"],
            "start_s": row["start_s"], "host_bytes": row["host_bytes"], "peak_device_bytes": row["peak_device_bytes"],
            "start_peak_device_bytes": row["start_peak_device_bytes"],
            "added_rss_anon_bytes": row["added_rss_anon_bytes"],
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--peers", type=words_of(PEERS), default=["generate"])
    parser.add_argument(
        "--prompts", type=lambda text: [int(each) for each in text.split(",")], default=list(PROMPTS),
        help="their tokens, of generate and llama.cpp",
    )  # fmt: skip
    parser.add_argument("--turns", type=Path, metavar="FILE", help="start beside others; measure when nobody else does")
    parser.add_argument("--library", type=Path, help="the folder of llama.cpp's libraries")
    parser.add_argument("--kernel", choices=["triton", "marlin"], help="that runs experts of an engine")
    parser.add_argument("--limit-s", type=float, help="end an engine that takes longer")
    parser.add_argument("--card", default="24GB", help="device memory that is left")
    parser.add_argument("--reserve", default="3.6GB", help="of it, what is no weights: CUDA, activations, cache, ...")
    parser.add_argument("--layers", type=int, help="fewer than the published model has")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--liger-kernel", action="store_true", help="generate() with its RMSNorm")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--publish", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.publish:
        for path in sorted(given.out.glob("*.row")):
            print(path.read_text().strip())
        return
    runs = {"generate": generate_rows, "llama.cpp": llama_rows}
    for peer in given.peers:
        for number, row in enumerate(runs.get(peer, partial(engine_rows, peer))(given)):
            device = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
            row = {"table": "peers", "model": given.model, "device": device, **row}
            row |= {"card_bytes": parse_size(given.card), "tokens_per_s": 1e3 / row["ms"]}
            (given.out / f"{given.model}-{peer}{'-liger' * given.liger_kernel}-{number}.row").write_text(
                json.dumps(row)
            )
            print({key: value for key, value in row.items() if key not in ("table", "device")}, flush=True)


if __name__ == "__main__":
    main()
