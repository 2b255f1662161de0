"""Quantised models in vLLM, offloaded in every way: same bits as the same engine that moves nothing?

    python benchmarks/vllm_quantised.py OUT_FOLDER [MODEL...] [--at-once 4] [--seconds 480]
    python benchmarks/vllm_quantised.py OUT_FOLDER gpt-oss-mxfp4 moe-gptq --policies cache --eager
    python benchmarks/vllm_quantised.py OUT_FOLDER --publish        raw results for benchmarks/results, on stdout

Models: see quantised_models.py; all of them by default. Each is run resident, then for each policy once with a worker
that moves nothing (``still ...``, see no_copy.py) and once offloaded; ``--eager``: without a compiler, so that the
resident engine is the reference. With cached experts the rows that kernels read are compared with the store in every
step (HEADRACE_DEBUG=1). Weights are seeded and differ by layer. Results
are kept engine by engine: run it again to go on. What a machine lacks of vLLM's optional kernels is named in
``BENCH_WITHOUT`` (modules, comma-separated).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import words_of
from quantised_models import MODELS
from seeded_weights import use_seeded_weights
from vllm_cases import ONE_ROUNDING
from vllm_offload import engine_environment

POLICIES: dict[str, dict[str, Any]] = {
    "flags": {"offload_group_size": 2},
    "budget": {},  # of BUDGET of the weights
    "in place": {"cpu_offload_gb": 8},
    "cache": {},  # the same budget, with a rule
}
BUDGET = 0.6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL")
    parser.add_argument("--at-once", type=int, default=4, help="models that run beside one another")
    parser.add_argument("--seconds", type=float, default=480, help="after these all ends; call it again to go on")
    parser.add_argument("--policies", type=words_of(list(POLICIES)), default=["flags", "budget", "in place"])
    parser.add_argument("--eager", action="store_true", help="compile nothing, and compare with the resident engine")
    parser.add_argument("--publish", action="store_true", help="print the rows of all results as JSON lines")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    models = given.models or list(MODELS)
    kinds = [""] if given.eager else ["still ", ""]
    engines = ["resident", *(f"{still}{policy}" for policy in given.policies for still in kinds)]
    if given.child:
        run_engines(given.out, models[0], engines, given.eager)
    elif given.publish:
        for row in (row for name in MODELS for row in rows_of(given.out, name)):
            print(json.dumps(row))
    else:
        options = ["--policies", ",".join(given.policies), *(["--eager"] if given.eager else [])]
        run_models(given.out, models, given.at_once, given.seconds, engines, options)


# -- the processes -----------------------------------------------------------------------------------------------------


def run_models(
    out: Path, models: list[str], at_once: int, seconds: float, engines: list[str], options: list[str]
) -> None:
    """Start a process for each model, some beside one another, and print each model's rows when it is done."""
    out.mkdir(parents=True, exist_ok=True)
    begin, waiting = time.monotonic(), list(models)
    running: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
    while running or waiting:
        in_time = time.monotonic() - begin < seconds
        while waiting and in_time and len(running) < at_once:
            name = waiting.pop(0)
            forget_errors(out, name)
            running[name] = start(out, name, options), 0
        for name, (process, num_errors) in list(running.items()):
            if (code := process.poll()) is None:
                continue
            del running[name]
            if code and len(errors(out, name)) == num_errors:  # it ended without a word, in the first without a result
                unknown = next((engine for engine in engines if engine not in results(out, name)), engines[-1])
                keep(out, name, unknown, {"error": f"the process ended with {code}"})
            is_done = len(results(out, name)) == len(engines) or "resident" in errors(out, name)
            if is_done:
                print("\n".join(lines_of(out, name)), flush=True)
            else:
                # With the engine after the one that failed.
                running[name] = start(out, name, options), len(errors(out, name))
        if not in_time:
            for name, (process, _) in running.items():
                process.kill()
                print("\n".join(lines_of(out, name)))
            print(f"not finished: {', '.join([*running, *waiting]) or 'none'}")
            return
        time.sleep(0.2)


def start(out: Path, name: str, options: list[str]) -> subprocess.Popen[bytes]:
    environment = {
        **engine_environment(out),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": os.environ.get("VLLM_USE_DEEP_GEMM", "0"),  # needs a compiler for CUDA
        "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", str(out / "cache")),
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
    }
    with (out / f"quantised-{name}.log").open("ab") as log:
        command = [sys.executable, __file__, "--child", *options, str(out), name]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def results(out: Path, name: str) -> dict[str, dict[str, Any]]:
    """What is kept of a model, by engine."""
    path = out / f"quantised-{name}.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def keep(out: Path, name: str, engine: str, result: dict[str, Any]) -> None:
    (out / f"quantised-{name}.json").write_text(json.dumps({**results(out, name), engine: result}))


def forget_errors(out: Path, name: str) -> None:
    """Engines that failed in a former call are tried again."""
    kept = {engine: found for engine, found in results(out, name).items() if "error" not in found}
    (out / f"quantised-{name}.json").write_text(json.dumps(kept))


def errors(out: Path, name: str) -> list[str]:
    """The engines that failed."""
    return [engine for engine, found in results(out, name).items() if "error" in found]


# -- one process -------------------------------------------------------------------------------------------------------


def run_engines(out: Path, name: str, engines: list[str], eager: bool) -> None:
    """All engines of a model that have no result yet, one after the other; ends after the first that fails."""
    import torch

    for engine in engines:
        if engine in results(out, name):
            continue
        try:
            keep(out, name, engine, run_engine(out, name, engine, eager))
        except BaseException as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            keep(out, name, engine, {"error": f"{type(error).__name__}: {lines[0] if lines else ''}"[:600]})
            raise
        gc.collect()
        torch._dynamo.reset()


def run_engine(out: Path, name: str, engine: str, eager: bool) -> dict[str, Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    config, arguments = MODELS[name]
    folder = out / f"model-{name}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    use_seeded_weights()
    begin = time.perf_counter()
    llm = LLM(model=str(folder), **common_arguments(eager), **arguments, **engine_arguments(out, name, engine))
    try:
        start_s = time.perf_counter() - begin
        runs = [[scored(llm, count) for count in (1, 16)] for _ in range(2)]
        (facts,) = llm.collective_rpc("facts")
        return {**facts, "start_s": start_s, "repeats": runs[0] == runs[1], "scored": runs[1]}
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def common_arguments(eager: bool) -> dict[str, Any]:
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 256 << 20,
        "gpu_memory_utilization": 0.2,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        **(
            {"enforce_eager": True}
            if eager
            else {"compilation_config": {"cudagraph_capture_sizes": [1, 16], **ONE_ROUNDING}}
        ),
    }


def engine_arguments(out: Path, name: str, engine: str) -> dict[str, Any]:
    if engine == "resident":
        return {"worker_cls": "vllm_quantised.Resident"}
    policy = engine.removeprefix("still ")
    own: dict[str, Any] = {}
    if policy == "cache":
        own["rules"] = ["experts=cache"]
        os.environ["HEADRACE_DEBUG"] = "1"
    if policy in ("budget", "cache"):
        own["device_memory"] = f"{int(BUDGET * results(out, name)['resident']['weight_bytes'] / 1024)}KiB"
        own["batch"] = [1, 16]
    worker = "vllm_quantised.Offloading" if engine == policy else "vllm_quantised.NoCopy"
    return {**POLICIES[policy], "worker_cls": worker, **({"additional_config": {"headrace": own}} if own else {})}


def scored(llm: Any, count: int) -> list[list[list[float]]]:
    """Tokens and their log-probabilities, of each of ``count`` sequences."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(37 * row + 11 * i) % 2000 + 2 for i in range(20 + row)]} for row in range(count)]
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = [output.outputs[0] for output in llm.generate(prompts, sampling, use_tqdm=False)]
    chosen = [[next(iter(step.values())).logprob for step in output.logprobs] for output in outputs]
    return [[list(output.token_ids), scores] for output, scores in zip(outputs, chosen, strict=True)]


def __getattr__(name: str) -> Any:
    """Workers that measure what loading takes; vLLM asks for them by name."""
    if name not in ("Resident", "Offloading", "NoCopy"):
        raise AttributeError(name)
    import torch
    from vllm.v1.worker.gpu_worker import Worker as Plain

    # Importing the package needs vLLM, which is looked up only here.
    base: Any = Plain if name == "Resident" else importlib.import_module("headrace.adapters.vllm").Worker
    if name == "NoCopy":
        from no_copy import moves_nothing

        base = moves_nothing(base)

    class Measured(base):  # type: ignore[misc]
        def load_model(self, **kwargs: Any) -> None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated(), _pinned_by_torch()
            super().load_model(**kwargs)
            self.peak = torch.cuda.max_memory_allocated() - self.before[0]
            self.after = torch.cuda.memory_allocated() - self.before[0], _pinned_by_torch() - self.before[1]

        def facts(self) -> dict[str, Any]:
            model = self.model_runner.get_model()
            found = {
                "kernels": sorted({*_kernels(model)}),
                "weight_bytes": sum(p.nbytes for p in model.parameters()),
                "load_peak_bytes": self.peak,
                "allocated_bytes": self.after[0],
            }
            offloader = getattr(self, "_offloader", None)
            if offloader is None:
                return found
            stats = self.headrace_stats()
            del stats["uva_names"], stats["last_stalls_s"]
            return {**found, **stats, "host_bytes": self.after[1] + _held_bytes(offloader)}

    return Measured


def _pinned_by_torch() -> int:
    import torch

    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def _held_bytes(offloader: Any) -> int:
    """Host memory of the store, and of what a layer was built in, if that is still there."""
    store = getattr(offloader._session, "_store", None)
    parts = [part for part in (getattr(store, "_most", store), getattr(store, "_beside", None)) if part is not None]
    slabs = [slab for part in parts for slab in getattr(part, "_slabs", ())]
    buffers = [*slabs, *(memory for _, find in offloader._pool._memory if (memory := find()) is not None)]
    ranges = sum(part.host_bytes for part in parts if not hasattr(part, "_slabs"))
    return ranges + sum({slab.buffer.data_ptr(): slab.buffer.numel() for slab in buffers}.values())


def _kernels(model: Any) -> Iterator[str]:
    """Classes of what multiplies with the weights of the decoder."""
    for module in model.modules():
        methods = [getattr(module, name, None) for name in ("quant_method", "scheme")]
        for method in filter(None, methods):
            parts = [*vars(method).values(), getattr(getattr(method, "moe_kernel", None), "fused_experts", None)]
            names = (type(part).__name__ for part in parts)
            yield from {name for name in names if re.search(r"(Kernel|Experts\w*|LinearOp)$", name)}


# -- the results -------------------------------------------------------------------------------------------------------


def rows_of(out: Path, name: str) -> list[dict[str, Any]]:
    """A row for each policy."""
    kept = results(out, name)
    rows = []
    for policy in POLICIES:
        found, still, resident = (kept.get(engine, {}) for engine in (policy, f"still {policy}", "resident"))
        if not found and "error" not in still and "error" not in resident:
            continue
        row = {"table": "quantised", "case": name, "policy": policy, "kernels": resident.get("kernels", [])}
        if error := found.get("error") or still.get("error") or resident.get("error"):
            rows.append({**row, "error": error})
            continue
        cached = {"hits": 0, "fetched": 0, "in_place": 0}
        for layer in found.get("experts", []):
            cached = {count: value + layer[count] for count, value in cached.items()}
        in_cache = sum(layer["num_experts"] * layer["expert_bytes"] for layer in found.get("experts", []))
        reference, counted = still or resident, 1 if in_cache else 2  # Marlin repeats its own bits for few rows alone
        offloaded = found["prefetched_bytes"] + found["uva_bytes"] + in_cache
        row |= {
            "weight_bytes": found["weight_bytes"],
            "prefetched_bytes": found["prefetched_bytes"],
            "uva_bytes": found["uva_bytes"],
            "bytes_moved": found["bytes_moved"],
            "host_ratio": found["host_bytes"] / offloaded if offloaded else None,
            "load_peak_bytes": found["load_peak_bytes"],
            "resident_load_peak_bytes": resident.get("load_peak_bytes"),
            "allocated_bytes": found["allocated_bytes"],
            "planned_device_bytes": found["device_bytes"],
            "start_s": found["start_s"],
            "repeats": found["repeats"] and (still or resident).get("repeats"),
            "experts": cached,
            "bit_equal": "scored" in reference and found["scored"][:counted] == reference["scored"][:counted],
            "compared": compared(found, still),
            "compared_with_resident": compared(found, resident),
        }
        rows.append(row)
    return rows


def compared(found: dict[str, Any], other: dict[str, Any]) -> str:
    """How many sequences have equal tokens, and the largest difference of log-probabilities while they are equal."""
    if "scored" not in other:
        return "nothing to compare with"
    pairs = [
        pair
        for mine, theirs in zip(found["scored"], other["scored"], strict=True)
        for pair in zip(mine, theirs, strict=True)
    ]
    same = sum(mine[0] == theirs[0] for mine, theirs in pairs)
    worst = 0.0
    for (tokens, scores), (other_tokens, other_scores) in pairs:
        equal = next((i for i, (a, b) in enumerate(zip(tokens, other_tokens, strict=True)) if a != b), len(tokens))
        worst = max([worst, *(abs(a - b) for a, b in zip(scores[:equal], other_scores[:equal], strict=True))])
    return f"{same} of {len(pairs)} sequences, worst {worst:.1e}"


def lines_of(out: Path, name: str) -> list[str]:
    kept = results(out, name)
    resident = kept.get("resident", {})
    spread = sorted({score for run in resident.get("scored", [])[1:] for _, scores in run for score in scores})
    lines = [
        f"{name}: {', '.join(resident.get('kernels', [])) or resident.get('error', 'not run')}; "
        f"{len(spread)} different log-probabilities, repeats {resident.get('repeats')}, "
        f"start {resident.get('start_s', 0):.0f} s"
    ]
    for row in rows_of(out, name):
        if "error" in row:
            lines.append(f"  {row['policy']:<9} {row['error']}")
            continue
        bits = "same bits" if row["bit_equal"] else "OTHER BITS"
        lines.append(
            f"  {row['policy']:<9} {bits} ({row['compared']}), to resident: "
            f"{row['compared_with_resident']}; prefetched {row['prefetched_bytes'] / 1e6:.0f} MB, in place "
            f"{row['uva_bytes'] / 1e6:.0f}, experts {row['experts']}, moved {row['bytes_moved'] / 1e6:.0f}, "
            f"host x {row['host_ratio'] or 0:.3f}, "
            f"device at load {row['load_peak_bytes'] / 1e6:.0f} of {row['resident_load_peak_bytes'] / 1e6:.0f} MB, "
            f"start {row['start_s']:.0f} s"
        )
    return lines


if __name__ == "__main__":
    main()
