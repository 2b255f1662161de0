"""vLLM's speculative decoding beside headrace: bits, what is copied for a pass, and the time of one.

    python benchmarks/vllm_speculation.py OUT_FOLDER [CASE...] [--tiny]     one engine after another
    python benchmarks/vllm_speculation.py OUT_FOLDER --publish TABLE        rows for benchmarks/results, on stdout

* ``ngram``: Qwen3-8B's shape, every fourth layer prefetched, four guesses by n-grams of a prompt that repeats itself.
  2.5 of them are accepted on average whatever the model would choose: vLLM's ``synthetic`` acceptance, which the worker
  refuses elsewhere. Random weights would accept none.
* ``draft``: eight layers, and a draft model of two; three guesses, none of which need be accepted.
* ``eagle3``: eight layers, and a made-up EAGLE-3 head, which shares the embedding of the target.

Each is run by headrace's worker and by the one that computes the same and copies nothing (``no_copy.py``), both
eagerly: tokens and log-probabilities have to be equal. A pass of the target copies all units once, whatever a drafter
runs between; passes are vLLM's own count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from published_configs import QWEN3_8B
from seeded_models import QWEN3_TINY, write_config
from seeded_weights import use_seeded_weights
from vllm_cases import GROUP, NO_COPY, WORKER
from vllm_offload import LINK_BYTES_PER_S, compared, engine_environment, sampling, scored

NEW_TOKENS, TIMED_TOKENS, PROMPT_TOKENS, PERIOD = 64, 512, 128, 8
SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.5}
# layers of the target, layers of the draft, speculative_config
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "ngram": (36, 0, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, **SYNTHETIC}),
    "draft": (8, 2, {"method": "draft_model", "num_speculative_tokens": 3}),
    "eagle3": (8, 1, {"method": "eagle3", "num_speculative_tokens": 3}),
}
WORKERS = {"headrace": WORKER, "still": NO_COPY}
CPU_WORKERS = {"headrace": "vllm_cpu_engine.Worker", "still": "vllm_cpu_engine.NoCopyWorker"}  # of tests/support


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    parser.add_argument("--tiny", action="store_true", help="small layers, on a CPU, with tests/support on PYTHONPATH")
    parser.add_argument("--publish", metavar="TABLE")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.publish:
        for row in rows(given.out, given.publish):
            print(json.dumps(row))
    elif given.worker:
        measure(given.out, given.cases[0], given.worker, given.tiny)
    else:
        for case in given.cases or CASES:
            for worker in WORKERS:
                command = [sys.executable, __file__, str(given.out), case, "--worker", worker]
                # The newer runner needs Triton.
                environment = engine_environment(given.out) | {"VLLM_USE_V2_MODEL_RUNNER": str(int(not given.tiny))}
                subprocess.run(command + ["--tiny"] * given.tiny, env=environment, check=True)
        for row in rows(given.out, "vllm-speculation"):
            print({key: row[key] for key in ("case", "tokens_per_pass", "ms", "floor_ms", "bit_equal", "compared")})


def measure(out: Path, case: str, worker: str, tiny: bool) -> None:
    """Run one engine, and keep its figures in ``out``."""
    from vllm import LLM

    from headrace.adapters.vllm import options

    options.REFUSED = tuple(each for each in options.REFUSED if "rejection_sample_method" not in each.field)
    use_seeded_weights()
    layers, draft_layers, speculative = CASES[case]
    shape = {**(QWEN3_TINY if tiny else QWEN3_8B), "num_hidden_layers": 8 if tiny else layers}
    target = write_config(out / f"model-{case}", shape)
    if draft_layers:
        speculative = {**speculative, "model": str(write_config(out / f"drafter-{case}", _drafter(case, shape)))}
    worker_cls = (CPU_WORKERS if tiny else WORKERS)[worker]
    memory = {} if tiny else {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.1}
    engine = LLM(
        model=str(target), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_model_len=1024,
        max_num_seqs=8, enable_prefix_caching=False, disable_log_stats=False, worker_cls=worker_cls,
        speculative_config=speculative, **GROUP, **memory,
    )  # fmt: skip
    prompt = [{"prompt_token_ids": [100 + i % PERIOD for i in range(PROMPT_TOKENS)]}]
    engine.generate(prompt, sampling(8), use_tqdm=False)  # warms up
    samples = []
    for _ in range(5):
        seconds, made, moved = _timed(engine, prompt, TIMED_TOKENS)
        samples.append({"ms": seconds / made * 1e3, "passes": made, "bytes": moved / made})
    facts = engine.collective_rpc("headrace_stats")[0]
    found = {"samples": samples, **scored(engine, prompt, NEW_TOKENS), "facts": {**facts, "uva_names": []}}
    (out / f"speculation-{case}-{worker}.json").write_text(json.dumps(found))


def _timed(engine: Any, prompt: list[dict[str, list[int]]], tokens: int) -> tuple[float, int, int]:
    """Seconds, passes and bytes of an answer."""
    passes, moved = _passes(engine), engine.collective_rpc("headrace_stats")[0]["bytes_moved"]
    begin = time.perf_counter()
    engine.generate(prompt, sampling(tokens), use_tqdm=False)
    seconds = time.perf_counter() - begin
    return seconds, _passes(engine) - passes, engine.collective_rpc("headrace_stats")[0]["bytes_moved"] - moved


def _drafter(case: str, target: dict[str, Any]) -> dict[str, Any]:
    layers = CASES[case][1]
    if case == "draft":
        return {**target, "num_hidden_layers": layers}
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    kept = (*names, "max_position_embeddings", "rms_norm_eps", "torch_dtype")
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": layers,
        "draft_vocab_size": min(32_000, target["vocab_size"]), "hidden_act": "silu", "tie_word_embeddings": False,
        **{name: target[name] for name in kept if name in target},
    }  # fmt: skip


def _passes(engine: Any) -> int:
    """Iterations of the engine so far: each runs the target once."""
    counts = [m for m in engine.get_metrics() if m.name == "vllm:iteration_tokens_total"]
    return int(sum(metric.count for metric in counts))


def rows(out: Path, table: str) -> list[dict[str, Any]]:
    """A row of each case that both workers have run."""
    made = []
    for case in CASES:
        paths = {worker: out / f"speculation-{case}-{worker}.json" for worker in WORKERS}
        if not all(path.exists() for path in paths.values()):
            continue
        found = {worker: json.loads(path.read_text()) for worker, path in paths.items()}
        mine, still = found["headrace"], found["still"]
        samples = sorted(mine["samples"], key=lambda sample: sample["ms"])
        middle, moved = samples[len(samples) // 2], mine["facts"]["moved_bytes_per_forward"]
        made.append({
            "table": table, "case": case, "rows": CASES[case][2]["num_speculative_tokens"] + 1, "ms": middle["ms"],
            "spread_ms": samples[-1]["ms"] - samples[0]["ms"], "floor_ms": moved / LINK_BYTES_PER_S * 1e3,
            "passes": middle["passes"], "tokens_per_pass": TIMED_TOKENS / middle["passes"],
            "samples_ms": [sample["ms"] for sample in mine["samples"]],
            "bytes_moved": middle["bytes"], "planned_bytes": moved,
            "still_ms": statistics.median(sample["ms"] for sample in still["samples"]),
            "bit_equal": all(mine[key] == still[key] for key in ("tokens", "logprobs")) and middle["bytes"] > 0,
            "compared": compared(mine, still),
        })  # fmt: skip
    return made


if __name__ == "__main__":
    main()
