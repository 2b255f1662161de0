"""Two engines of one server that share one pinned copy, against one resident engine: tokens, and host memory.

    python benchmarks/vllm_replicas.py OUT_FOLDER [--layers 8] [--servers NAME...] [FLAG OF VLLM...]

Starts ``vllm serve`` of Qwen3-8B's shape (dummy weights) resident, then ``headrace serve --engine vllm`` with
``--data-parallel-size 2`` twice: a copy for each engine, and ``--offload-mode shm_cpu``. The same prompts go to all
three over HTTP, to both engines in turns; the tokens of the first are kept in OUT_FOLDER, for servers of later runs.
Proportional set sizes (smaps_rollup, proc(5)) are of all processes of a server together.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from published_configs import QWEN3_8B
from vllm_server import serving

PROMPTS, TOKENS_IN, TOKENS_OUT = 16, 100, 16
OFFLOAD = ["--offload-group-size", "4"]
SERVERS: dict[str, list[str]] = {
    "resident": [],
    "a copy each": [*OFFLOAD, "--offload-mode", "cpu", "--data-parallel-size", "2"],
    "one copy": [*OFFLOAD, "--offload-mode", "shm_cpu", "--data-parallel-size", "2"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    given, more = parser.parse_known_args()
    folder = given.out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**QWEN3_8B, "num_hidden_layers": given.layers}))
    kept = given.out / "tokens.json"
    for name in given.servers:
        log = given.out / f"serve-{name.replace(' ', '-')}.log"
        with serving(_command(name, folder, more), log) as (url, process, start_s):
            tokens = _ask(url, 1 + bool(SERVERS[name]))
            if not kept.exists():
                kept.write_text(json.dumps(tokens))
            is_equal = tokens == json.loads(kept.read_text())
            row = {"case": name, "start_s": start_s, "bit_equal": is_equal, **_memory(process)}
        print(json.dumps(row), flush=True)


def _command(name: str, folder: Path, more: Sequence[str]) -> list[str]:
    flags = SERVERS[name]
    command = ["vllm", "serve", str(folder)]
    if flags:
        command = [sys.executable, "-m", "headrace", "serve", "--engine", "vllm", str(folder), *flags]
    dummy = ["--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "1024", "--max-num-seqs", "16"]
    return [*command, *dummy, "--no-enable-prefix-caching", *more]


def _ask(url: str, num_engines: int) -> list[list[int]]:
    """Greedy tokens of every prompt, one after the other (batches change bits), the engines taking turns."""
    chooser = random.Random(0)
    prompts = [[chooser.randrange(1000, 100_000) for _ in range(TOKENS_IN)] for _ in range(PROMPTS)]
    model = str(httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"])
    wanted = {"model": model, "max_tokens": TOKENS_OUT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    tokens = []
    for number, prompt in enumerate(prompts):
        engine = {"X-data-parallel-rank": str(number % num_engines)} if num_engines > 1 else {}
        answer = httpx.post(f"{url}/v1/completions", json={**wanted, "prompt": prompt}, headers=engine, timeout=120)
        answer.raise_for_status()
        tokens.append(answer.json()["choices"][0]["token_ids"])
    return tokens


def _memory(server: psutil.Process) -> dict[str, Any]:
    """Bytes: what is of files in shared memory (headrace's copy is such a one), and everything."""
    found = [_rollup(process.pid) for process in [server, *server.children(recursive=True)]]
    return {
        "pss_bytes": sum(row.get("Pss", 0) for row in found),
        "pss_shared_bytes": sum(row.get("Pss_Shmem", 0) for row in found),
        "processes_with_shared": [row["Pss_Shmem"] for row in found if row.get("Pss_Shmem", 0) > 100 << 20],
    }


def _rollup(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:  # it has ended
        return {}
    return {name.rstrip(":"): int(size) * 1024 for name, size, *_ in map(str.split, lines)}


if __name__ == "__main__":
    main()
