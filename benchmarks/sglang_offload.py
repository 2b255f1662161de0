"""SGLang on a GPU: resident, its own offloader, and headrace's plugin; same tokens, bytes moved, time per step.

Each case is a process of its own (``HEADRACE_SGLANG`` asks for headrace), with seeded weights of Qwen3-8B's shape from
files (SGLang's dummy weights are alike in all layers) and CUDA graphs. A step is the slope between two lengths of the
same batch. Writes one line of JSON per case to ``--out``.

    python benchmarks/sglang_offload.py --out rows.jsonl [--layers 36] [--cases resident,group,...] [--flag name=value]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from seeded_models import write_weights

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
LENGTHS, REPEATS, SEQUENCES = (16, 48), 3, (1, 16)
LINK_BYTES_PER_S = 55.46e9  # measured on one H200; for the column "floor" alone


def layer_bytes(shape: dict[str, Any]) -> int:
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"] + shape["num_key_value_heads"]
    return 2 * (2 * heads * shape["head_dim"] * hidden + 3 * hidden * shape["intermediate_size"])


def cases(shape: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str | None]]:
    """Flags of SGLang, and ``HEADRACE_SGLANG``. Each offloads a quarter of the layers, or as much as GiB allow."""
    layers, size = shape["num_hidden_layers"], layer_bytes(shape)
    gib = max(1, layers // 4 * size // 2**30)
    # What the group rule keeps on the device: residents, embedding and head, and one slot.
    kept = (layers - layers // 4 + 1) * size + 4 * shape["vocab_size"] * shape["hidden_size"]
    return {
        "resident": ({}, None),
        "group": ({"offload_group_size": 4}, "1"),
        "limit": ({"cpu_offload_gb": gib}, "1"),
        "budget": ({}, json.dumps({"device_memory": kept, "batch": list(SEQUENCES)})),
        "own-limit": ({"cpu_offload_gb": gib}, None),
        "group-eager": ({"offload_group_size": 4, "disable_cuda_graph": True}, "1"),
    }


def run_case(name: str, folder: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: start, generate, measure."""
    import sglang

    shape = json.loads((folder / "config.json").read_text())
    begin = time.perf_counter()
    options: dict[str, Any] = {
        "model_path": str(folder),
        "skip_tokenizer_init": True,
        "max_running_requests": max(SEQUENCES),
        "max_total_tokens": 16384,
        "cuda_graph_max_bs_decode": max(SEQUENCES),
        "disable_radix_cache": True,
        "log_level": "info",
        **extra,
    }
    engine = sglang.Engine(**{**options, **cases(shape)[name][0]})
    row: dict[str, Any] = {
        "case": name,
        "layers": shape["num_hidden_layers"],
        "start_s": round(time.perf_counter() - begin, 1),
    }

    def generate(sequences: int, tokens: int) -> tuple[float, list[Any]]:
        prompts = [[(7 * index + 3 * at) % 5000 + 10 for at in range(32)] for index in range(sequences)]
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        start = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        return time.perf_counter() - start, answers

    for sequences in SEQUENCES:
        _, answers = generate(sequences, LENGTHS[1])
        row[f"tokens_{sequences}"] = [answer["output_ids"] for answer in answers]
        row[f"logprobs_{sequences}"] = [
            [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers
        ]
        slopes = []
        for _ in range(REPEATS):
            short, long = generate(sequences, LENGTHS[0])[0], generate(sequences, LENGTHS[1])[0]
            slopes.append((long - short) / (LENGTHS[1] - LENGTHS[0]) * 1e3)
        row[f"step_ms_{sequences}"] = round(statistics.median(slopes), 2)
        row[f"spread_ms_{sequences}"] = round(max(slopes) - min(slopes), 2)
    row["headrace"] = engine.get_server_info()["internal_states"][0].get("headrace")
    engine.shutdown()
    return row


def table(rows: list[dict[str, Any]]) -> None:
    plain = next((row for row in rows if row["case"] == "resident" and "error" not in row), None)
    heads, widths = ("start", "1 seq", "16 seq", "floor", "tokens", "log-probabilities"), (7, 9, 9, 7, 7, 18)
    print(f"{'case':12}" + "".join(f" {head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    for row in rows:
        if "error" in row:
            print(f"{row['case']:12} failed: {row['error'].splitlines()[-1][:140] if row['error'] else '?'}")
            continue
        figures = row["headrace"] or {}
        floor = figures.get("moved_bytes_per_forward", 0) / LINK_BYTES_PER_S * 1e3
        same, distance = "-", "-"
        if plain is not None and row is not plain:
            same = "equal" if all(row[f"tokens_{n}"] == plain[f"tokens_{n}"] for n in SEQUENCES) else "DIFFER"
            pairs = [
                abs(a - b)
                for n in SEQUENCES
                for mine, theirs in zip(row[f"logprobs_{n}"], plain[f"logprobs_{n}"], strict=True)
                for a, b in zip(mine, theirs, strict=True)
            ]
            distance = f"{max(pairs):.2e}"
        moved = f"{figures.get('bytes_moved', 0) / 1e9:.1f} GB, {figures.get('captured_copies', 0)} in graphs"
        print(
            f"{row['case']:12} {row['start_s']:6.1f}s {row['step_ms_1']:6.2f} ms {row['step_ms_16']:6.2f} ms "
            f"{floor:7.2f} {same:>7} {distance:>18} {moved if figures else ''}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tiny", action="store_true", help="narrow layers, to try this script out")
    parser.add_argument("--cases", default="resident,group,limit,budget,own-limit,group-eager")
    parser.add_argument("--flag", action="append", default=[], help="of SGLang, for all cases: name=JSON")
    parser.add_argument("--timeout", type=int, default=280, help="seconds for a case")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    extra = {name: json.loads(value) for name, _, value in (flag.partition("=") for flag in args.flag)}
    if args.one == "weights":
        write_weights(args.folder, "cuda" if torch.cuda.is_available() else "cpu")
        return
    if args.one:
        args.out.write_text(json.dumps(run_case(args.one, args.folder, extra)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as work:
        folder, result = Path(work) / "model", Path(work) / "row.json"
        folder.mkdir()
        shape = {**SHAPE, **(TINY if args.tiny else {}), "num_hidden_layers": args.layers}
        (folder / "config.json").write_text(json.dumps(shape))
        # In a process of its own, which gives the GPU back.
        subprocess.run([sys.executable, *sys.argv, "--one", "weights", "--folder", str(folder)], check=True)
        for name in args.cases.split(","):
            environment = {key: value for key, value in os.environ.items() if key != "HEADRACE_SGLANG"}
            if (asked := cases(shape)[name][1]) is not None:
                environment["HEADRACE_SGLANG"] = asked
            command = [sys.executable, *sys.argv, "--one", name, "--folder", str(folder), "--out", str(result)]
            result.unlink(missing_ok=True)
            log = args.out.with_name(f"{args.out.stem}-{name}.log")
            with log.open("w") as output:
                try:
                    subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=args.timeout)
                except subprocess.TimeoutExpired:
                    output.write(f"\nended after {args.timeout} s")
            if result.exists():
                rows.append(json.loads(result.read_text()))
            else:
                rows.append({"case": name, "error": log.read_text()[-2000:]})
            with args.out.open("a") as kept:
                kept.write(json.dumps(rows[-1]) + "\n")
    table(rows)


if __name__ == "__main__":
    main()
