"""vLLM with headrace as its offloader, against vLLM's own and against vLLM resident; same flags, one engine each.

    python benchmarks/vllm_offload.py OUT_FOLDER CASE... [--profile]        cases: see vllm_cases.py
    python benchmarks/vllm_offload.py OUT_FOLDER --publish TABLE        raw results for docs/benchmarks, on stdout

Weights are seeded and differ from layer to layer (seeded_weights.py), and every case has the same ones. The greedy
tokens of a case, and the log-probabilities of them, have to equal those of the first case of its shape to the last bit.
``ms`` is the time of all tokens over the number of steps, prefill included. ``--profile`` adds what each kernel of one
prefill takes. What a machine lacks of vLLM's optional kernels is named in ``HEADRACE_BENCH_WITHOUT`` (modules,
comma-separated). Shapes in ``DRIVEN_SHAPES`` route tokens by a stated distribution (driven_routing.py).
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

from driven_routing import drive_routing
from published_configs import QWEN3_8B
from seeded_weights import use_seeded_weights
from vllm_cases import CASES, DRIVEN_SHAPES, LOADS, SHAPES

LINK_BYTES_PER_S = 55.5e9  # H2D of the reference machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    parser.add_argument("--publish", metavar="TABLE", help="print the rows of all cases in OUT_FOLDER as JSON lines")
    parser.add_argument("--profile", action="store_true", help="of the last load of each case, kernel by kernel")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.publish:
        _publish(given.out, given.publish)
        return
    if given.child:
        _measure(given.out, given.cases[0], given.profile)
        return
    for case in given.cases:
        with (given.out / f"vllm-{case}.log").open("w") as log:
            command = [sys.executable, __file__, "--child", str(given.out), case, *["--profile"] * given.profile]
            environment = _environment(case, given.out)
            code = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
        if code:
            print(f"{case}: exit {code}, see {log.name}")
        if (given.out / f"vllm-{case}.json").exists():
            print("\n".join(_summary(given.out, case)), flush=True)


def _environment(case: str, out: Path) -> dict[str, str]:
    return {
        **engine_environment(out),
        "VLLM_USE_V2_MODEL_RUNNER": str(CASES[case][1] - 1),
        "VLLM_USE_BREAKABLE_CUDAGRAPH": str(int("breakable" in case)),
    }


def engine_environment(out: Path) -> dict[str, str]:
    """Of a process with an engine in it, which lacks what HEADRACE_BENCH_WITHOUT names."""
    without = filter(None, os.environ.get("HEADRACE_BENCH_WITHOUT", "").split(","))
    (out / "without").mkdir(parents=True, exist_ok=True)
    # Every process of an engine begins with it, its workers too.
    (out / "without" / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({[*without]})\n")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(out / "without"), os.environ.get("PYTHONPATH", "")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _measure(out: Path, case: str, profile: bool) -> None:
    import torch
    from vllm import LLM

    shape, _, arguments = CASES[case]
    folder = _model_folder(out, shape)
    if speculative := arguments.get("speculative_config"):
        drafter = str(_model_folder(out, speculative["model"]))
        arguments = {**arguments, "speculative_config": {**speculative, "model": drafter}}
    use_seeded_weights()
    if shape in DRIVEN_SHAPES:
        drive_routing()
    torch.cuda.init()
    host_before, rss_before = _available_bytes(), _resident_bytes()
    begin = time.perf_counter()
    engine = LLM(model=str(folder), **{**_arguments(shape), **arguments})
    start_s = time.perf_counter() - begin
    rows = []
    sleeps = arguments.get("enable_sleep_mode", False)
    for load in LOADS[shape]:
        if sleeps:
            engine.sleep(level=1)
            engine.wake_up()
        rows.append({**_run(engine, *load), "case": case, "shape": shape, "start_s": start_s})
        _write(out, case, engine, rows, {"host_bytes": host_before, "rss_bytes": rss_before})
    if profile:
        (out / f"vllm-{case}-profile.json").write_text(json.dumps(_profile(engine, *load)))


def _model_folder(out: Path, shape: str) -> Path:
    folder = out / f"model-{shape}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return folder


def _arguments(shape: str) -> dict[str, Any]:
    """Of every engine, unless its case says otherwise."""
    is_full = SHAPES[shape] is QWEN3_8B
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 2304,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": (24 if is_full else 4) << 30,
        "gpu_memory_utilization": 0.25 if shape.startswith("qwen-short") else 0.9,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "compilation_config": {"cudagraph_capture_sizes": [1, 16, 256]},
    }


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
        "offloader": _offloader_facts(engine, case),
    }
    (out / f"vllm-{case}.json").write_text(json.dumps({"facts": facts, "rows": rows}))


def _prompts(num_sequences: int, tokens_in: int) -> list[dict[str, list[int]]]:
    chooser = random.Random(num_sequences * 10_000 + tokens_in)
    return [
        {"prompt_token_ids": [chooser.randrange(1000, 100_000) for _ in range(tokens_in)]} for _ in range(num_sequences)
    ]


def _sampling(tokens_out: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens_out, ignore_eos=True, detokenize=False)


def _profile(engine: Any, num_sequences: int, tokens_in: int, tokens_out: int, repeats: int) -> list[dict[str, Any]]:
    """Microseconds and launches of each kernel of one run, the longest first; and when none of them ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        engine.generate(_prompts(num_sequences, tokens_in), _sampling(tokens_out), use_tqdm=False)
    events = [e for e in profiler.profiler.kineto_results.events() if str(e.device_type()).endswith("CUDA")]
    events.sort(key=lambda event: event.start_ns())
    kernels: dict[str, list[float]] = {}
    idle_us, end_ns = 0.0, events[0].start_ns()
    for event in events:
        count = kernels.setdefault(event.name(), [0, 0.0])
        count[0] += 1
        count[1] += event.duration_ns() / 1e3
        if not event.name().startswith("Memcpy HtoD"):
            idle_us += max(0, event.start_ns() - end_ns) / 1e3
            end_ns = max(end_ns, event.start_ns() + event.duration_ns())
    rows = [{"kernel": name, "launches": count, "us": us} for name, (count, us) in kernels.items()]
    return [{"kernel": "none", "launches": 0, "us": idle_us}, *sorted(rows, key=lambda row: -float(row["us"]))]


def _run(engine: Any, num_sequences: int, tokens_in: int, tokens_out: int, repeats: int) -> dict[str, Any]:
    prompts, sampling = _prompts(num_sequences, tokens_in), _sampling(tokens_out)
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


def _offloader_facts(engine: Any, case: str) -> dict[str, Any]:
    if "worker_cls" in CASES[case][2]:
        ranks = engine.collective_rpc("headrace_stats")
        found: dict[str, Any] = ranks[0]
        return found if len(ranks) == 1 else {**found, "moved_by_rank": [rank["bytes_moved"] for rank in ranks]}
    from vllm.model_executor.offloader.base import get_offloader

    offloader = get_offloader()
    moved = getattr(offloader, "total_offloaded_bytes", 0) or getattr(offloader, "cpu_offload_bytes", 0)
    return {"offloader": type(offloader).__name__, "offloaded_bytes": moved}


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
    still = {CASES[name][0]: result for name, result in found.items() if name.startswith("still")}
    for name, result in found.items():
        shape, runner, _ = CASES[name]
        reference = next(r for n, r in found.items() if CASES[n][0] == shape)
        prefill = {r["rows"]: r["ms"] for r in reference["rows"] if r["tokens_out"] == 1 and r["tokens_in"] == 128}
        facts = result["facts"]
        for number, (row, wanted) in enumerate(zip(result["rows"], reference["rows"], strict=False)):
            moved = _moved_bytes(facts["offloader"])
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
            if "moved_by_rank" in facts["offloader"]:
                published["moved_by_rank"] = facts["offloader"]["moved_by_rank"]
            if "logprobs" in row and "logprobs" in wanted:
                published["compared"] = _compared(row, wanted)
            if shape in still and name.startswith("headrace"):
                published["compared_with_still"] = _compared(row, still[shape]["rows"][number])
            print(json.dumps(published))


def _moved_bytes(offloader: dict[str, Any]) -> int:
    """Per forward."""
    if offloader["offloader"] == "NoCopyOffloader":
        return 0
    return int(offloader.get("moved_bytes_per_forward", offloader.get("offloaded_bytes", 0)))


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
