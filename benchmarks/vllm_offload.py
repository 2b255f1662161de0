"""vLLM with penstock as its offloader, against vLLM's own and against vLLM resident; same flags, one engine each.

    python benchmarks/vllm_offload.py OUT_FOLDER CASE...        cases: see CASES
    python benchmarks/vllm_offload.py OUT_FOLDER --publish TABLE        raw results for docs/benchmarks, on stdout

Weights are vLLM's seeded dummies, so every case has the same ones. The greedy tokens of a case, and the
log-probabilities of them, have to equal those of the first case of its shape to the last bit. ``ms`` is the time of all
tokens over the number of steps, prefill included. What a machine lacks of vLLM's optional kernels is named in
``PENSTOCK_BENCH_WITHOUT`` (modules, comma-separated).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": 100001,
    "torch_dtype": "bfloat16",
}
SHAPES = {
    "qwen": QWEN3_8B,
    "qwen-prefill": QWEN3_8B,
    "deepseek": DEEPSEEK_V2_LITE,
    "qwen-short": {**QWEN3_8B, "num_hidden_layers": 8},
}
WORKER = "penstock.adapters.vllm.Worker"
LINK_BYTES_PER_S = 55.5e9  # H2D of the reference machine
GROUP = {"offload_group_size": 4, "offload_num_in_group": 1, "offload_prefetch_step": 1}
EXPERTS = {"cpu_offload_gb": 40, "cpu_offload_params": {"experts"}}


def _budget(gib: float, **more: Any) -> dict[str, Any]:
    size = f"{int(gib * 2**20)}KiB"
    return {"worker_cls": WORKER, "additional_config": {"penstock": {"device_memory": size, **more}}}


# Device memory for weights under 4/1/1: what is resident, and one slot.
_QWEN_SAME_MEMORY_GIB = 12.405
# name: (shape, model runner, arguments of the engine)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "resident": ("qwen", 1, {}),
    "vllm": ("qwen", 1, GROUP),
    "penstock": ("qwen", 1, {**GROUP, "worker_cls": WORKER}),
    "budget": ("qwen", 1, _budget(_QWEN_SAME_MEMORY_GIB, batch=[1, 16, 256])),
    "resident-v2": ("qwen", 2, {}),
    "penstock-v2": ("qwen", 2, {**GROUP, "worker_cls": WORKER}),
    "budget-v2": ("qwen", 2, _budget(_QWEN_SAME_MEMORY_GIB, batch=[1, 16, 256])),
    "still": (
        "qwen",
        1,
        {**GROUP, "worker_cls": WORKER, "additional_config": {"penstock": {"boundaries_only": True}}},
    ),
    "penstock-stalls": (
        "qwen-prefill",
        1,
        {**GROUP, "worker_cls": WORKER, "additional_config": {"penstock": {"measure_stalls": True}}},
    ),
    "eager": ("qwen-short", 1, {"enforce_eager": True}),
    "penstock-eager": ("qwen-short", 1, {**GROUP, "worker_cls": WORKER, "enforce_eager": True}),
    "short": ("qwen-short", 2, {}),
    "penstock-short": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER}),
    "sleep-short": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER, "enable_sleep_mode": True}),
    "lora-short": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER, "enable_lora": True, "max_lora_rank": 16}),
    "fp8-short": ("qwen-short", 1, {"quantization": "fp8"}),
    "penstock-fp8-short": ("qwen-short", 1, {**GROUP, "worker_cls": WORKER, "quantization": "fp8"}),
    "moe-resident": ("deepseek", 1, {}),
    "moe-vllm": ("deepseek", 1, EXPERTS),
    "moe-penstock": ("deepseek", 1, {**EXPERTS, "worker_cls": WORKER}),
    "moe-prefetch": (
        "deepseek",
        1,
        {**GROUP, "offload_params": {"w13_weight", "w2_weight"}, "worker_cls": WORKER},
    ),
}
# sequences, tokens in, tokens out, repeats
LOADS = {
    "qwen": [(1, 128, 64, 3), (16, 128, 64, 3), (256, 128, 64, 2), (256, 128, 1, 2), (64, 2047, 1, 3)],
    "qwen-prefill": [(64, 2047, 1, 3)],
    "qwen-short": [(1, 128, 16, 2), (16, 300, 16, 2)],
    "deepseek": [(1, 128, 32, 4)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    parser.add_argument("--publish", metavar="TABLE", help="print the rows of all cases in OUT_FOLDER as JSON lines")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.publish:
        _publish(given.out, given.publish)
        return
    if given.child:
        _measure(given.out, given.cases[0])
        return
    for case in given.cases:
        with (given.out / f"vllm-{case}.log").open("w") as log:
            command = [sys.executable, __file__, "--child", str(given.out), case]
            code = subprocess.run(command, env=_environment(case), stdout=log, stderr=subprocess.STDOUT).returncode
        print(f"{case}: exit {code}" if code else "\n".join(_summary(given.out, case)), flush=True)


def _environment(case: str) -> dict[str, str]:
    runner = CASES[case][1]
    return {
        **os.environ,
        "VLLM_USE_V2_MODEL_RUNNER": str(runner - 1),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _measure(out: Path, case: str) -> None:
    for name in filter(None, os.environ.get("PENSTOCK_BENCH_WITHOUT", "").split(",")):
        sys.modules[name] = None  # type: ignore[assignment]
    import torch
    from vllm import LLM

    shape, _, arguments = CASES[case]
    folder = out / f"model-{shape}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    torch.cuda.init()
    host_before, rss_before = _available_bytes(), _resident_bytes()
    begin = time.perf_counter()
    engine = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2304,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=24 << 30 if SHAPES[shape] is QWEN3_8B else 4 << 30,
        enable_prefix_caching=False,
        disable_log_stats=True,
        compilation_config={"cudagraph_capture_sizes": [1, 16, 256]},
        **arguments,
    )
    start_s = time.perf_counter() - begin
    rows = []
    sleeps = arguments.get("enable_sleep_mode", False)
    for load in LOADS[shape]:
        if sleeps:
            engine.sleep(level=1)
            engine.wake_up()
        rows.append({**_run(engine, *load), "case": case, "shape": shape, "start_s": start_s})
        _write(out, case, engine, rows, {"host_bytes": host_before, "rss_bytes": rss_before})


def _write(out: Path, case: str, engine: Any, rows: list[dict[str, Any]], before: dict[str, int]) -> None:
    """After each load, so that a run that is cut short has what came before."""
    import torch

    facts = {
        "case": case,
        "shape": CASES[case][0],
        "start_s": rows[0]["start_s"],
        "host_bytes": before["host_bytes"] - _available_bytes(),
        "rss_bytes": _resident_bytes() - before["rss_bytes"],
        "device_bytes": torch.cuda.memory_allocated(),
        "peak_device_bytes": torch.cuda.max_memory_allocated(),
        "offloader": _offloader_facts(engine),
    }
    (out / f"vllm-{case}.json").write_text(json.dumps({"facts": facts, "rows": rows}))


def _run(engine: Any, num_sequences: int, tokens_in: int, tokens_out: int, repeats: int) -> dict[str, Any]:
    from vllm import SamplingParams

    chooser = random.Random(num_sequences * 10_000 + tokens_in)
    prompts = [
        {"prompt_token_ids": [chooser.randrange(1000, 100_000) for _ in range(tokens_in)]} for _ in range(num_sequences)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens_out, ignore_eos=True, detokenize=False)
    times, tokens = [], []
    for _ in range(repeats + 1):  # the first run warms up
        begin = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        times.append(time.perf_counter() - begin)
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
    assert all(found == tokens[0] for found in tokens), "the same prompts gave other tokens"
    sampling.logprobs = 0  # of the chosen token alone
    scored = engine.generate(prompts, sampling, use_tqdm=False)
    logprobs = [[next(iter(step.values())).logprob for step in output.outputs[0].logprobs] for output in scored]
    median = statistics.median(times[1:])
    return {
        "rows": num_sequences,
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "ms": median / tokens_out * 1e3,
        "spread_ms": (max(times[1:]) - min(times[1:])) / tokens_out * 1e3,
        "tokens_per_s": num_sequences * (tokens_in if tokens_out == 1 else tokens_out) / median,
        "tokens": tokens[0],
        "logprobs": logprobs,
    }


def _offloader_facts(engine: Any) -> dict[str, Any]:
    from vllm.model_executor.offloader.base import get_offloader

    offloader = get_offloader()
    name = type(offloader).__name__
    if name == "EngineOffloader":
        found: dict[str, Any] = engine.collective_rpc("penstock_stats")[0]
        return found
    moved = getattr(offloader, "total_offloaded_bytes", 0) or getattr(offloader, "cpu_offload_bytes", 0)
    return {"offloader": name, "offloaded_bytes": moved}


def _available_bytes() -> int:
    return _field("/proc/meminfo", "MemAvailable")


def _resident_bytes() -> int:
    return _field("/proc/self/status", "VmRSS")


def _field(path: str, name: str) -> int:
    line = next(line for line in Path(path).read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def _publish(out: Path, table: str) -> None:
    """Each row with the floor of its steps: decode is bound by the link, prefill by compute."""
    found = {name: json.loads(path.read_text()) for name in CASES if (path := out / f"vllm-{name}.json").exists()}
    for name, result in found.items():
        shape, runner, _ = CASES[name]
        reference = next(r for n, r in found.items() if CASES[n][0] == shape)
        prefill = {r["rows"]: r["ms"] for r in reference["rows"] if r["tokens_out"] == 1 and r["tokens_in"] == 128}
        facts = result["facts"]
        for row, wanted in zip(result["rows"], reference["rows"], strict=False):
            moved = facts["offloader"].get("moved_bytes_per_forward", facts["offloader"].get("offloaded_bytes", 0))
            steps = row["tokens_out"]
            link_ms = moved / LINK_BYTES_PER_S * 1e3
            decode_ms = (wanted["ms"] * steps - prefill.get(row["rows"], wanted["ms"])) / max(1, steps - 1)
            first_ms = max(prefill.get(row["rows"], wanted["ms"]), link_ms)
            floor_ms = max(wanted["ms"], (first_ms + (steps - 1) * max(decode_ms, link_ms)) / steps)
            published = {
                "table": table,
                "case": name,
                "runner": f"V{runner}",
                "bit_equal": row["tokens"] == wanted["tokens"],
                "floor_ms": floor_ms,
                "resident_ms": wanted["ms"],
                "bytes_moved": moved,
                "link_gb_per_s": LINK_BYTES_PER_S / 1e9 if moved else None,
                "peak_device_bytes": facts["peak_device_bytes"],
                "planned_device_bytes": facts["offloader"].get("device_bytes"),
                "start_s": facts["start_s"],
                "host_bytes": facts["host_bytes"],
                "rss_bytes": facts["rss_bytes"],
                "uva_bytes": facts["offloader"].get("uva_bytes", 0),
                **{key: row[key] for key in ("rows", "tokens_in", "tokens_out", "ms", "spread_ms", "tokens_per_s")},
            }
            if "logprobs" in row and "logprobs" in wanted:
                published["compared"] = _compared(row, wanted)
            print(json.dumps(published))


def _summary(out: Path, case: str) -> list[str]:
    found = json.loads((out / f"vllm-{case}.json").read_text())
    facts = found["facts"]
    known = [name for name, (shape, _, _) in CASES.items() if shape == facts["shape"]]
    path = next(path for name in known if (path := out / f"vllm-{name}.json").exists())
    wanted = json.loads(path.read_text())["rows"]
    lines = [
        f"{case}: start {facts['start_s']:.1f} s, host {facts['host_bytes'] / 2**30:.2f} GiB (RSS "
        f"{facts['rss_bytes'] / 2**30:.2f}), device {facts['device_bytes'] / 2**30:.2f} GiB"
    ]
    offloader = {k: v for k, v in facts["offloader"].items() if k != "uva_names"}
    lines.append(f"  {offloader}")
    for index, row in enumerate(found["rows"]):
        same = _compared(row, wanted[index]) if path.name != f"vllm-{case}.json" else "the reference"
        lines.append(
            f"  {row['rows']:4d} x ({row['tokens_in']} in, {row['tokens_out']} out): {row['ms']:8.2f} ms/step "
            f"+- {row['spread_ms']:.2f}, {row['tokens_per_s']:9.1f} tok/s, {same}"
        )
    return lines


def _compared(row: dict[str, Any], wanted: dict[str, Any]) -> str:
    tokens = sum(a == b for a, b in zip(row["tokens"], wanted["tokens"], strict=True))
    pairs = [
        (a, b)
        for mine, theirs in zip(row["logprobs"], wanted["logprobs"], strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    same = sum(a == b for a, b in pairs)
    worst = max(abs(a - b) for a, b in pairs)
    return (
        f"{tokens} of {len(row['tokens'])} sequences equal, {same} of {len(pairs)} log-probabilities "
        f"(worst difference {worst:.1e})"
    )


if __name__ == "__main__":
    main()
