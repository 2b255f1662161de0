"""vLLM's published recipe (``vllm bench serve``) against a server resident, with its own offloader, and with headrace.

    python benchmarks/vllm_serve.py OUT_FOLDER [--layers 12] [--cases NAME...] [FLAG OF VLLM...]
    python benchmarks/vllm_serve.py OUT_FOLDER --publish TABLE        raw results for docs/benchmarks, on stdout

Qwen3-8B's shape with seeded weights and a tokenizer of one word per token, both written into OUT_FOLDER, so no network
is needed. ``--layers 0`` takes a tiny shape, for a CPU. A case whose results lie in OUT_FOLDER is not run again. Every
request has to succeed, and headrace has to have moved bytes; texts of one request at a time are compared with those of
``still`` (headrace with nothing moved), or without it with those of ``resident``, which another compiler's rounding may
change. Flags of vLLM behind go to every server; what a machine lacks of vLLM's optional kernels is named in
``HEADRACE_BENCH_WITHOUT`` (modules, comma-separated).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from published_configs import QWEN3_8B
from seeded_models import QWEN3_TINY, write_config, write_weights, write_words
from vllm_cases import GROUP, WORKER, python_path, same_memory
from vllm_server import VLLM, headrace_stats, serving

GROUP_FLAGS = [word for name, value in GROUP.items() for word in ("--" + name.replace("_", "-"), str(value))]
CASES = ("resident", "headrace", "budget", "vllm", "still")
# name: tokens in, tokens out, requests, requests at once (None: all)
RECIPES: dict[str, tuple[int, int, int, int | None]] = {
    "2047 in, 1 out": (2047, 1, 64, None),
    "128 in, 128 out; 1 at once": (128, 128, 4, 1),
    "128 in, 128 out; 4 at once": (128, 128, 8, 4),
    "128 in, 128 out; 16 at once": (128, 128, 32, 16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=12, help="of Qwen3-8B's 36; 0: a tiny shape")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES[:4]))
    parser.add_argument("--publish", metavar="TABLE", help="print the rows of all cases in OUT_FOLDER as JSON lines")
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    given, more = parser.parse_known_args()
    given.out.mkdir(parents=True, exist_ok=True)
    folder = given.out / "model"
    if given.publish:
        for row in _rows(given.out):
            print(json.dumps({"table": given.publish, **row}))
    elif given.client:
        _ask(given.client, folder, given.out, given.cases[0])
    elif given.write:
        _write_model(folder, given.layers)
    else:
        # In a process of its own, which gives the GPU back.
        subprocess.run([sys.executable, __file__, given.out, "--write", "--layers", str(given.layers)], check=True)
        for case in given.cases:
            if not (given.out / f"{case}.json").exists():
                _measure(case, folder, given.out, more)
        _print(_rows(given.out))


def _write_model(folder: Path, layers: int) -> None:
    import torch

    config = {**QWEN3_8B, "num_hidden_layers": layers} if layers else QWEN3_TINY
    write_config(folder, config)
    write_words(folder, config["vocab_size"])
    write_weights(folder, "cuda" if torch.cuda.is_available() else "cpu")


def _flags(case: str, folder: Path) -> list[str]:
    own: dict[str, Any] = {}
    if case == "budget":
        memory = same_memory(json.loads((folder / "config.json").read_text()))
        own = {"device_memory": f"{memory >> 10}KiB", "batch": [1, 4, 16]}
    if case == "still":
        own = {"boundaries_only": True}
    flags = [] if case in ("resident", "budget") else [*GROUP_FLAGS]
    if case in ("headrace", "budget", "still"):
        flags += ["--worker-cls", WORKER]
    return [*flags, "--additional-config", json.dumps({"headrace": own})] if own else flags


def _measure(case: str, folder: Path, out: Path, more: Sequence[str]) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(out),
        "VLLM_SERVER_DEV_MODE": "1",  # for collective_rpc
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # vLLM refuses a prompt of more characters than so many tokens can have, and the words of the tokenizer are long.
    common = ["--max-model-len", "4096", "--no-enable-prefix-caching", "--compilation-config"]
    common.append(json.dumps({"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}))
    command = [*VLLM, "serve", str(folder), *common, *_flags(case, folder), *more]
    client = [sys.executable, __file__, str(out), "--cases", case, "--client"]
    with serving(command, out / f"{case}.log", environment=environment) as (url, _, start_s):
        with (out / f"{case}-client.log").open("w") as log:
            subprocess.run([*client, url], env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
        moved = headrace_stats(url) if case in ("headrace", "budget") else {}
    if moved and not moved["bytes_moved"] > 0:
        raise SystemExit(f"{case}: nothing moved")
    facts = {"start_s": start_s, **{key: moved.get(key) for key in ("bytes_moved", "moved_bytes_per_forward")}}
    (out / f"{case}.json").write_text(json.dumps(facts))


def _ask(url: str, folder: Path, out: Path, case: str) -> None:
    """``vllm bench serve`` for each recipe: the command's own entry point, imported once."""
    from vllm.entrypoints.cli.main import main as vllm

    for number, (tokens_in, tokens_out, requests, at_once) in enumerate(RECIPES.values()):
        wanted = {
            "base-url": url,
            "model": folder,
            "dataset-name": "random",
            "random-input-len": tokens_in,
            "random-output-len": tokens_out,
            "num-prompts": requests,
            "num-warmups": 1,
            "seed": number,
            "temperature": 0,
            "result-dir": out,
            "result-filename": f"{case}-{number}.json",
            **({} if at_once is None else {"max-concurrency": at_once}),
        }
        words = [word for name, value in wanted.items() for word in (f"--{name}", str(value))]
        sys.argv = ["vllm", "bench", "serve", *words, "--ignore-eos", "--save-result", "--save-detailed"]
        vllm()


def _rows(out: Path) -> list[dict[str, Any]]:
    rows = []
    present = [case for case in CASES if (out / f"{case}.json").exists()]
    for case in present:
        facts = json.loads((out / f"{case}.json").read_text())
        for number, (name, (tokens_in, tokens_out, requests, at_once)) in enumerate(RECIPES.items()):
            found = json.loads((out / f"{case}-{number}.json").read_text())
            if found["completed"] != requests or found["failed"]:
                raise SystemExit(f"{case}, {name}: {found['completed']} of {requests} succeeded: {found['errors']}")
            if found["total_output_tokens"] != requests * tokens_out:
                raise SystemExit(f"{case}, {name}: {found['total_output_tokens']} tokens came back")
            row = {
                "case": case,
                "recipe": name,
                "requests": requests,
                "failed": found["failed"],
                "tokens_in": tokens_in,
                "tokens_out": tokens_out,
                "duration_s": found["duration"],
                "tokens_per_s": found["total_token_throughput" if tokens_out == 1 else "output_throughput"],
                **{f"{at}_ttft_ms": found[f"{at}_ttft_ms"] for at in ("median", "p99")},
                **{f"{at}_tpot_ms": found[f"{at}_tpot_ms"] if tokens_out > 1 else None for at in ("median", "p99")},
                **facts,
            }
            if at_once == 1 and case not in ("resident", "still"):
                beside = "still" if "still" in present and case == "headrace" else "resident"
                wanted = json.loads((out / f"{beside}-{number}.json").read_text())["generated_texts"]
                same = sum(a == b for a, b in zip(found["generated_texts"], wanted, strict=True))
                row |= {"compared_with": beside, "same_texts": same}
            rows.append(row)
    return rows


def _print(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        step = "" if row["median_tpot_ms"] is None else f"{row['median_tpot_ms']:8.2f} ms/token,"
        same = f", {row['same_texts']} texts as {row['compared_with']}" if "same_texts" in row else ""
        print(
            f"{row['case']:9s} {row['recipe']:28s} {row['tokens_per_s']:9.1f} tok/s,{step} first after "
            f"{row['median_ttft_ms']:8.1f} ms, start {row['start_s']:5.1f} s{same}"
        )


if __name__ == "__main__":
    main()
