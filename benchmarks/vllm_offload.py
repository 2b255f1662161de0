"""vLLM with headrace as its offloader, against others and against vLLM resident; same flags, one engine each.

    python benchmarks/vllm_offload.py OUT_FOLDER CASE... [--files] [--again] [--limit-s S] [--profile]
    python benchmarks/vllm_offload.py OUT_FOLDER --publish TABLE        raw results for benchmarks/results, on stdout

Cases: see ``CASES``; one whose results lie in OUT_FOLDER is not run again. Weights are seeded and differ from
layer to layer (seeded_models.py), and every case has the same ones; but other offloaders fill those that they keep
on the host there, slowly and with other values, so ``--files`` loads seeded weights from files, which are written
once. The greedy tokens of a case, and the log-probabilities of them, are compared to the last bit with those of the
case that computes the same and moves nothing (``still...``), or without it with the first of its shape. ``ms`` is the
time of all tokens over the number of steps, prefill included. Each case has a compile cache of its own: at a second
start vLLM compiles the model that it kept at the first, which can round differently. ``--again`` starts every case
twice more at the end and measures start and host memory of the third, when all caches are equally warm. ``--profile``
adds what each kernel of one prefill takes. What a machine lacks of vLLM's optional kernels is named in
``BENCH_WITHOUT`` (modules, comma-separated). Shapes in ``DRIVEN_SHAPES`` route tokens by a stated
distribution (driven_routing.py).
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from published_configs import DEEPSEEK_V2_LITE, QWEN3_8B
from seeded_models import use_seeded_weights, write_config, write_weights

LINK_BYTES_PER_S = 55.5e9  # H2D of the reference machine
_SHORT = {**QWEN3_8B, "num_hidden_layers": 8}
SHAPES = {
    "qwen": QWEN3_8B,
    "qwen-12": {**QWEN3_8B, "num_hidden_layers": 12},
    "experts": {**DEEPSEEK_V2_LITE, "num_hidden_layers": 8},
    "qwen-short": _SHORT,
    "qwen-short-tp": _SHORT,
    "qwen-short-pp": _SHORT,
}
WORKER = "headrace.adapters.vllm.Worker"
NO_COPY = "no_copy.Worker"  # the reference: compiled as WORKER is, and nothing moves
FLEXTENSOR = "flextensor.contrib.vllm.worker.FlexTensorOffloadWorker"
CODED: dict[str, Any] = {"additional_config": {"headrace": {"codec": "exp3"}}}
GROUP: dict[str, Any] = {"offload_group_size": 4, "offload_num_in_group": 1, "offload_prefetch_step": 1}
# Decoding too, which otherwise is one whole graph.
SEGMENTS = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
EXPERTS = {"cpu_offload_gb": 40, "cpu_offload_params": {"experts"}}
DRIVEN = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 16, 64]}}
# With TORCHINDUCTOR_DETERMINISTIC=1, two compiles round alike: Inductor tunes a combined kernel by time, and with
# it the reductions of norms that it holds.
ONE_ROUNDING = {"inductor_compile_config": {"combo_kernels": False, "benchmark_combo_kernel": False}}
# Shapes whose router follows a stated distribution (driven_routing.py).
DRIVEN_SHAPES = {"experts"}


def same_memory(config: dict[str, Any]) -> int:
    """Bytes of the device that a Qwen3 takes under ``GROUP``: what is resident, and the slots."""
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    attention = hidden * config["head_dim"] * 2 * (heads + config["num_key_value_heads"])
    size = 4 if config["torch_dtype"] == "float32" else 2
    layer = size * (attention + 3 * hidden * config["intermediate_size"])
    # By part, the slots take a little more than one layer.
    return int((layers - layers // 4 + 1 + 1 / 15) * layer) + size * 2 * config["vocab_size"] * hidden


def _budget(shape: str, num_bytes: int | None = None) -> dict[str, Any]:
    size = f"{(num_bytes or same_memory(SHAPES[shape])) >> 10}KiB"
    batch = sorted({load[0] for load in LOADS[shape] if load[2] > 1})
    return {"worker_cls": WORKER, "additional_config": {"headrace": {"device_memory": size, "batch": batch}}}


# sequences, tokens in, tokens out, repeats
_LONG = [(1, 128, 64, 2), (16, 128, 64, 2), (256, 128, 64, 2), (256, 128, 1, 3), (64, 2047, 1, 3)]
LOADS = {
    "qwen": _LONG,
    "qwen-12": _LONG,
    **{name: [(1, 128, 16, 2), (16, 300, 16, 2)] for name in ("qwen-short", "qwen-short-tp", "qwen-short-pp")},
    "experts": [(2, 16, 32, 2), (16, 16, 32, 2), (64, 16, 32, 2)],
}


def _contest(shape: str, behind: str) -> dict[str, tuple[str, int, dict[str, Any]]]:
    """What the newest vLLM runs, each in the same device memory."""
    return {
        f"resident-v2{behind}": (shape, 2, {}),
        f"headrace-v2{behind}": (shape, 2, {**GROUP, "worker_cls": WORKER}),
        f"budget-v2{behind}": (shape, 2, _budget(shape)),
        f"vllm-v2{behind}": (shape, 2, GROUP),
        f"still-v2{behind}": (shape, 2, {**GROUP, "worker_cls": NO_COPY}),
        f"flextensor{behind}": (shape, 2, {"worker_cls": FLEXTENSOR}),
    }


# name: (shape, model runner, arguments of the engine)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "resident": ("qwen", 1, {}),
    "vllm": ("qwen", 1, GROUP),
    "headrace": ("qwen", 1, {**GROUP, "worker_cls": WORKER}),
    "budget": ("qwen", 1, _budget("qwen")),
    **_contest("qwen", ""),
    **_contest("qwen-12", "-12"),
    "still": ("qwen", 1, {**GROUP, "worker_cls": NO_COPY}),
    "eager": ("qwen-short", 1, {"enforce_eager": True}),
    "headrace-eager": ("qwen-short", 1, {**GROUP, "worker_cls": WORKER, "enforce_eager": True}),
    "short": ("qwen-short", 2, {}),
    "short-v1": ("qwen-short", 1, {}),
    "headrace-short-v1": ("qwen-short", 1, {**GROUP, "worker_cls": WORKER}),
    # vLLM measures itself how much memory is left for its cache.
    "headrace-profiled": (
        "qwen-short",
        2,
        {**GROUP, "worker_cls": WORKER, "kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.5},
    ),
    "coded": ("qwen", 2, {**GROUP, **CODED, "worker_cls": WORKER}),
    "coded-eager": ("qwen-short", 1, {**GROUP, **CODED, "worker_cls": WORKER, "enforce_eager": True}),
    "headrace-short": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER}),
    "vllm-short": ("qwen-short", 2, GROUP),
    "breakable": ("qwen-short", 2, SEGMENTS),
    "headrace-breakable": ("qwen-short", 2, {**GROUP, **SEGMENTS, "worker_cls": WORKER}),
    "breakable-full": ("qwen-short", 2, {}),
    "headrace-breakable-full": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER}),
    "still-short": ("qwen-short", 2, {**GROUP, "worker_cls": NO_COPY}),
    "sleep-short": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER, "enable_sleep_mode": True}),
    # The memory of graphs is saved, too.
    "sleep-graphs-short": (
        "qwen-short",
        2,
        {**GROUP, "worker_cls": WORKER, "enable_sleep_mode": True, "sleep_mode_offload_cudagraph": True},
    ),
    # vLLM raises where a step makes the host wait for the GPU.
    "sync-check-short": ("qwen-short", 2, {}),
    "headrace-sync-check-short": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER}),
    "headrace-sync-check-eager": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER, "enforce_eager": True}),
    "lora-short": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER, "enable_lora": True, "max_lora_rank": 16}),
    "fp8-short": ("qwen-short", 1, {"quantization": "fp8"}),
    "headrace-fp8-short": ("qwen-short", 1, {**GROUP, "worker_cls": WORKER, "quantization": "fp8"}),
    "tp": ("qwen-short-tp", 2, {"tensor_parallel_size": 2}),
    "headrace-tp": ("qwen-short-tp", 2, {**GROUP, "worker_cls": WORKER, "tensor_parallel_size": 2}),
    "budget-tp": ("qwen-short-tp", 2, {**_budget("qwen-short-tp", int(1.4 * 2**30)), "tensor_parallel_size": 2}),
    "pp": ("qwen-short-pp", 1, {"pipeline_parallel_size": 2}),
    # Every second layer, so that each of the two stages has more than its slots hold.
    "headrace-pp": (
        "qwen-short-pp",
        1,
        {**GROUP, "offload_group_size": 2, "worker_cls": WORKER, "pipeline_parallel_size": 2},
    ),
    "experts-resident": ("experts", 2, DRIVEN),
    "experts-headrace": ("experts", 2, {**EXPERTS, **DRIVEN, "worker_cls": WORKER}),
    "experts-vllm": ("experts", 2, {**EXPERTS, **DRIVEN}),
    "still-experts": ("experts", 2, {**EXPERTS, **DRIVEN, "worker_cls": NO_COPY}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    parser.add_argument("--publish", metavar="TABLE", help="print the rows of all cases in OUT_FOLDER as JSON lines")
    parser.add_argument("--files", action="store_true", help="load weights from files instead of dummies")
    parser.add_argument("--again", action="store_true", help="start each case twice more, from warm caches")
    parser.add_argument("--limit-s", type=float, help="end an engine that takes longer, and go on with the next")
    parser.add_argument("--profile", action="store_true", help="of the last load of each case, kernel by kernel")
    parser.add_argument("--child", choices=["write", "measure", "warm", "again"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.publish:
        _publish(given.out, given.publish)
    elif given.child == "write":
        write_weights(_model_folder(given.out, CASES[given.cases[0]][0]), "cuda")
    elif given.child == "measure":
        _measure(given.out, given.cases[0], given.files, given.profile)
    elif given.child == "warm":
        _start(given.out, given.cases[0], given.files)
    elif given.child == "again":
        _start_again(given.out, given.cases[0], given.files)
    else:
        _run_cases(given)


def _run_cases(given: argparse.Namespace) -> None:
    for case in given.cases:
        kept = given.out / f"vllm-{case}.json"
        if not kept.exists() or len(json.loads(kept.read_text())["rows"]) < len(LOADS[CASES[case][0]]):
            if given.files:
                _run_child("write", case, given)  # a process of its own gives the GPU back
            _run_child("measure", case, given)
        if kept.exists():
            print("\n".join(_summary(given.out, case)), flush=True)
    for what in ("warm", "again") if given.again else ():  # one after another, so that all caches are equally warm
        for case in given.cases:
            if not (kept := _again(given.out, case)).exists():
                _run_child(what, case, given)
            if what == "again" and kept.exists():
                found = json.loads(kept.read_text())
                anon, every = (found[f"warm_{name}_bytes"] / 2**30 for name in ("rss_anon", "rss"))
                print(f"{case}: warm start {found['warm_start_s']:.1f} s, RSS {every:.3f} GiB, anonymous {anon:.3f}")


def _run_child(what: str, case: str, given: argparse.Namespace) -> None:
    options = ["--files"] * given.files + ["--profile"] * given.profile
    command = [sys.executable, __file__, "--child", what, str(given.out), case, *options]
    log_path = given.out / f"vllm-{case}{'' if what == 'measure' else '-' + what}.log"
    run_logged(case, command, _environment(case, given.out), log_path, given.limit_s)


def run_logged(
    case: str, command: Sequence[str], environment: Mapping[str, str], log_path: Path, limit_s: float | None
) -> bool:
    """Run an engine in a process of its own, for ``limit_s`` seconds at most; if it fails, print a line."""
    with log_path.open("w") as log:
        try:
            code: int | str = subprocess.run(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=limit_s
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"ended after {limit_s:.0f} s"
    if code:
        print(f"{case}: exit {code}, see {log_path}", flush=True)
    return not code


def _environment(case: str, out: Path) -> dict[str, str]:
    return {
        **engine_environment(out),
        "VLLM_CACHE_ROOT": str(out / f"cache-{case}"),
        "VLLM_USE_V2_MODEL_RUNNER": str(CASES[case][1] - 1),
        "VLLM_USE_BREAKABLE_CUDAGRAPH": str(int("breakable" in case)),
        **({"VLLM_GPU_SYNC_CHECK": "error"} if "sync-check" in case else {}),
    }


def engine_environment(out: Path) -> dict[str, str]:
    """Of a process with an engine in it, which lacks what BENCH_WITHOUT names."""
    return {
        **os.environ,
        "PYTHONPATH": python_path(out),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # With ONE_ROUNDING: else each start tries several shapes of a reduction and keeps the fastest.
        "TORCHINDUCTOR_DETERMINISTIC": "1",
    }


def python_path(out: Path) -> str:
    """PYTHONPATH with which Python begins without the modules that ``BENCH_WITHOUT`` names."""
    given = os.environ.get("PYTHONPATH", "")
    without = [*filter(None, os.environ.get("BENCH_WITHOUT", "").split(","))]
    if not without:
        return given
    folder = out / "without"
    folder.mkdir(parents=True, exist_ok=True)
    # Every process of an engine begins with it, its workers too.
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({without})\n")
    return os.pathsep.join([str(folder), given])


def _measure(out: Path, case: str, from_files: bool, profile: bool) -> None:
    shape, _, arguments = CASES[case]
    engine, before, start_s = _start(out, case, from_files)
    rows = []
    sleeps = arguments.get("enable_sleep_mode", False)
    for load in LOADS[shape]:
        if sleeps:
            engine.sleep(level=1)
            engine.wake_up()
        rows.append({**_run(engine, *load), "case": case, "shape": shape, "start_s": start_s})
        _write(out, case, engine, rows, before)
    if profile:
        (out / f"vllm-{case}-profile.json").write_text(json.dumps(_profile(engine, *load)))


def _start(out: Path, case: str, from_files: bool) -> tuple[Any, dict[str, int], float]:
    """The engine of a case, the host memory before it, and the seconds it took to start."""
    import torch
    from vllm import LLM

    shape, _, arguments = CASES[case]
    folder = _model_folder(out, shape)
    use_seeded_weights()
    if shape in DRIVEN_SHAPES:
        from driven_routing import drive_routing  # needs Triton

        drive_routing()
    torch.cuda.init()
    if arguments.get("worker_cls") == FLEXTENSOR:
        use_flextensor(same_memory(SHAPES[shape]))
    before = host_memory()
    begin = time.perf_counter()
    loading = {"load_format": "auto" if from_files else "dummy"}
    compilation = {"cudagraph_capture_sizes": [1, 16, 256], **ONE_ROUNDING, **arguments.get("compilation_config", {})}
    given = {**_arguments(shape), **loading, **arguments, "compilation_config": compilation}
    engine = LLM(model=str(folder), **given)
    return engine, before, time.perf_counter() - begin


def use_flextensor(weights_bytes: int) -> None:
    """Have the engines of this process, with FlexTensor's worker, keep so many bytes of weights on the device."""
    import torch

    fraction = weights_bytes / torch.cuda.mem_get_info()[1]
    os.environ |= {"FT_ENABLED": "1", "FT_MAX_GPU_MEM_FRACTION": f"{fraction:.6f}"}
    os.environ.setdefault("FT_PINNED_MEMORY_MODE", "host_register")  # the default takes more host memory


def _start_again(out: Path, case: str, from_files: bool) -> None:
    engine, before, start_s = _start(out, case, from_files)
    engine.generate(prompts(1, 128), sampling(2), use_tqdm=False)
    grown = {f"warm_{name}": now - before[name] for name, now in host_memory().items()}
    _again(out, case).write_text(json.dumps({"warm_start_s": start_s, **grown}))


def _again(out: Path, case: str) -> Path:
    return out / f"vllm-{case}-again.json"


def _model_folder(out: Path, shape: str) -> Path:
    return write_config(out / f"model-{shape}", SHAPES[shape])


def _arguments(shape: str) -> dict[str, Any]:
    """Of every engine, unless its case says otherwise."""
    share = SHAPES[shape]["num_hidden_layers"] / QWEN3_8B["num_hidden_layers"]
    return {
        "skip_tokenizer_init": True,
        "max_model_len": 2304,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": int(24 * share if shape.startswith("qwen") and share > 0.3 else 4) << 30,
        "gpu_memory_utilization": 0.25 if shape.startswith("qwen-short") else 0.9,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }


def _write(out: Path, case: str, engine: Any, rows: list[dict[str, Any]], before: dict[str, int]) -> None:
    """After each load, so that a run that is cut short has what came before."""
    import torch

    facts = {
        "case": case,
        "shape": CASES[case][0],
        "start_s": rows[0]["start_s"],
        **{name: now - before[name] for name, now in host_memory().items()},
        "device_bytes": torch.cuda.memory_allocated(),
        "peak_device_bytes": torch.cuda.max_memory_allocated(),
        "offloader": _offloader_facts(engine, case),
    }
    (out / f"vllm-{case}.json").write_text(json.dumps({"facts": facts, "rows": rows}))


def prompts(num_sequences: int, tokens_in: int) -> list[dict[str, list[int]]]:
    """Seeded token ids."""
    chooser = random.Random(num_sequences * 10_000 + tokens_in)
    return [
        {"prompt_token_ids": [chooser.randrange(1000, 100_000) for _ in range(tokens_in)]} for _ in range(num_sequences)
    ]


def sampling(tokens_out: int) -> Any:
    """Greedy, so many tokens."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens_out, ignore_eos=True, detokenize=False)


def _profile(engine: Any, num_sequences: int, tokens_in: int, tokens_out: int, repeats: int) -> list[dict[str, Any]]:
    """Microseconds and launches of each kernel of one run, the longest first; and when none of them ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        engine.generate(prompts(num_sequences, tokens_in), sampling(tokens_out), use_tqdm=False)
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
    asked, how = prompts(num_sequences, tokens_in), sampling(tokens_out)
    times, tokens = [], []
    engine.generate(asked, sampling(min(2, tokens_out)), use_tqdm=False)  # warms up
    for _ in range(repeats):
        begin = time.perf_counter()
        outputs = engine.generate(asked, how, use_tqdm=False)
        times.append(time.perf_counter() - begin)
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
    assert all(found == tokens[0] for found in tokens), "the same prompts gave other tokens"
    median = statistics.median(times)
    return {
        "rows": num_sequences,
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "ms": median / tokens_out * 1e3,
        "spread_ms": (max(times) - min(times)) / tokens_out * 1e3,
        "tokens_per_s": num_sequences * (tokens_in if tokens_out == 1 else tokens_out) / median,
        **scored(engine, asked, tokens_out),
        "tokens": tokens[0],
    }


def scored(engine: Any, asked: list[dict[str, list[int]]], tokens_out: int) -> dict[str, Any]:
    """The tokens that the engine answers, and the log-probability of each; by sequence."""
    how = sampling(tokens_out)
    how.logprobs = 0  # of the chosen token alone
    outputs = [output.outputs[0] for output in engine.generate(asked, how, use_tqdm=False)]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [[next(iter(step.values())).logprob for step in output.logprobs] for output in outputs],
    }


def _offloader_facts(engine: Any, case: str) -> dict[str, Any]:
    if CASES[case][2].get("worker_cls") in (WORKER, NO_COPY):
        ranks = engine.collective_rpc("headrace_stats")
        found: dict[str, Any] = ranks[0]
        return found if len(ranks) == 1 else {**found, "moved_by_rank": [rank["bytes_moved"] for rank in ranks]}
    from vllm.model_executor.offloader.base import get_offloader

    offloader = get_offloader()
    if CASES[case][2].get("worker_cls") == FLEXTENSOR:
        sizes = offloader.runtime_state.label_to_size_map  # bytes of each layer that are streamed
        return {"offloader": type(offloader).__name__, "offloaded_bytes": sum(sizes.values())}
    moved = getattr(offloader, "total_offloaded_bytes", 0) or getattr(offloader, "cpu_offload_bytes", 0)
    return {"offloader": type(offloader).__name__, "offloaded_bytes": moved}


def host_memory() -> dict[str, int]:
    """What is taken of the machine, and what of that is of this process; its RSS also by what is behind the pages."""
    taken = _field("/proc/meminfo", "MemTotal") - _field("/proc/meminfo", "MemAvailable")
    parts = {
        f"rss_{part.lower()}_bytes": _field("/proc/self/status", f"Rss{part}") for part in ("Anon", "File", "Shmem")
    }
    return {"host_bytes": taken, "rss_bytes": _field("/proc/self/status", "VmRSS"), **parts}


def _field(path: str, name: str) -> int:
    line = next(line for line in Path(path).read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def _publish(out: Path, table: str) -> None:
    """Each row with the floor of its steps: decode is bound by the link, prefill by compute."""
    found = {name: json.loads(path.read_text()) for name in CASES if (path := out / f"vllm-{name}.json").exists()}
    for name, result in found.items():
        shape, runner, _ = CASES[name]
        still = ("NoopOffloader", "NoCopyOffloader")
        beside = [r for n, r in found.items() if CASES[n][0] == shape]
        reference = next((r for r in beside if r["facts"]["offloader"]["offloader"] in still), beside[0])
        prefill = {r["rows"]: r["ms"] for r in reference["rows"] if r["tokens_out"] == 1 and r["tokens_in"] == 128}
        again = json.loads(_again(out, name).read_text()) if _again(out, name).exists() else {}
        facts = {**result["facts"], **again}
        twin = found.get(_twin(name)) if "headrace" in name else None
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
                **{key: facts[key] for key in facts if key.startswith(("host_", "rss_", "warm_"))},
                "uva_bytes": facts["offloader"].get("uva_bytes", 0),
                **{key: row[key] for key in ("rows", "tokens_in", "tokens_out", "ms", "spread_ms", "tokens_per_s")},
            }
            if "moved_by_rank" in facts["offloader"]:
                published["moved_by_rank"] = facts["offloader"]["moved_by_rank"]
            if "logprobs" in row and "logprobs" in wanted:
                published["compared"] = compared(row, wanted)
            if twin is not None:
                unmoved = twin["rows"][number]
                published["compared_with_still"] = compared(row, unmoved)
                if not published["bit_equal"] and all(row[key] == unmoved[key] for key in ("tokens", "logprobs")):
                    published["why_not_equal"] = "a compiler with other cuts rounds at other places; equal to still"
            elif not published["bit_equal"]:
                published["why_not_equal"] = "not compiled as resident is, and no twin that moves nothing was run"
            print(json.dumps(published))


def _twin(case: str) -> str:
    """The case that computes the same and moves nothing."""
    if any(word in case for word in ("breakable", "eager")):  # not compiled, so resident is such a case
        return case.removeprefix("headrace-")
    return next((name for name in CASES if name.startswith("still") and CASES[name][0] == CASES[case][0]), case)


def _moved_bytes(offloader: dict[str, Any]) -> int:
    """Per forward."""
    if offloader["offloader"] in ("NoCopyOffloader", "UVAOffloader"):  # vLLM's own, which reads in place
        return 0
    return int(offloader.get("moved_bytes_per_forward", offloader.get("offloaded_bytes", 0)))


def _summary(out: Path, case: str) -> list[str]:
    found = json.loads((out / f"vllm-{case}.json").read_text())
    facts = found["facts"]
    known = [_twin(case), *(name for name, (shape, _, _) in CASES.items() if shape == facts["shape"])]
    path = next(path for name in known if (path := out / f"vllm-{name}.json").exists())
    wanted = json.loads(path.read_text())["rows"]
    lines = [
        f"{case}: start {facts['start_s']:.1f} s, host {facts['host_bytes'] / 2**30:.2f} GiB (RSS "
        f"{facts['rss_bytes'] / 2**30:.2f}), device {facts['device_bytes'] / 2**30:.2f} GiB"
    ]
    offloader = {k: v for k, v in facts["offloader"].items() if k != "uva_names"}
    lines.append(f"  {offloader}")
    for index, row in enumerate(found["rows"]):
        same = compared(row, wanted[index]) if path.name != f"vllm-{case}.json" else "the reference"
        lines.append(
            f"  {row['rows']:4d} x ({row['tokens_in']} in, {row['tokens_out']} out): {row['ms']:8.2f} ms/step "
            f"+- {row['spread_ms']:.2f}, {row['tokens_per_s']:9.1f} tok/s, {same}"
        )
    return lines


def compared(row: dict[str, Any], wanted: dict[str, Any]) -> str:
    """How many tokens and log-probabilities of two results of :func:`scored` are equal."""
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
