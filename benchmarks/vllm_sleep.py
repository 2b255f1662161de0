"""Sleep, wake-up and new weights inside vLLM on a GPU: headrace's worker against vLLM's own, one process each.

    python benchmarks/vllm_sleep.py OUT_FOLDER [CASE...] [--layers N] [--rounds N]

Each case (``CASES``) answers, sleeps and wakes up ``--rounds`` times (the first time host memory is taken), at level 1
and, with headrace's worker, at level 2; then it gets new weights from files. It answers after each of these. One line
of JSON for each case: seconds, GiB that sleep has freed, and whether all answers (tokens and log-probabilities) were
those from before, or after new weights those of an engine that was started with these. Engines run eagerly if
``--eager``; else with CUDA graphs, which hold addresses of weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from published_configs import QWEN3_8B
from seeded_models import write_config
from vllm_offload import GROUP, ONE_ROUNDING, WORKER, engine_environment, prompts

CASES: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm-offload": GROUP,
    "headrace": {**GROUP, "worker_cls": WORKER},
    "headrace-in-place": {"cpu_offload_gb": 1, "worker_cls": WORKER},
    "fresh": {**GROUP, "worker_cls": WORKER},  # started with the new weights
}
LEVELS = {"headrace": (1, 2), "headrace-in-place": (1, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", default=[], metavar="CASE")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print("RESULT " + json.dumps(_run(given, given.cases[0])), flush=True)
        return
    write_models(given.out, given.layers)
    for case in given.cases or CASES:
        options = ["--layers", str(given.layers), "--rounds", str(given.rounds), *["--eager"] * given.eager]
        command = [sys.executable, __file__, str(given.out), case, "--child", *options]
        environment = {**engine_environment(given.out), "VLLM_CACHE_ROOT": str(given.out / "cache")}
        log = given.out / f"{case}.log"
        with log.open("w") as file:
            subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
        rows = [line[7:] for line in log.read_text().splitlines() if line.startswith("RESULT ")]
        print(rows[0] if rows else f"{case}: no result, see {log}", flush=True)
        (given.out / f"{case}.json").write_text(rows[0] if rows else "{}")


def write_models(out: Path, layers: int) -> None:
    """Two models of Qwen3-8B's shape in files, which differ in all weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for seed, name in enumerate(("old", "new")):
        folder = write_config(out / name, {**QWEN3_8B, "num_hidden_layers": layers})
        if not list(folder.glob("*.safetensors")):
            torch.manual_seed(seed)
            written = (folder / "config.json").read_text()
            with torch.device("cuda"):
                model = AutoModelForCausalLM.from_config(
                    AutoConfig.from_pretrained(folder, trust_remote_code=False), dtype=torch.bfloat16,
                    trust_remote_code=False,
                )  # fmt: skip
            model.save_pretrained(folder)
            (folder / "config.json").write_text(written)
            del model
            torch.cuda.empty_cache()


def _run(given: argparse.Namespace, case: str) -> dict[str, Any]:
    import torch
    from vllm import LLM, SamplingParams

    new, old = str(given.out / "new"), str(given.out / "old")
    engine = LLM(
        model=new if case == "fresh" else old, skip_tokenizer_init=True, enable_sleep_mode=True, max_model_len=1024,
        max_num_seqs=16, kv_cache_memory_bytes=2 << 30, gpu_memory_utilization=0.9, enforce_eager=given.eager,
        enable_prefix_caching=False,
        compilation_config={"cudagraph_capture_sizes": [1, 16], **ONE_ROUNDING}, **CASES[case],
    )  # fmt: skip

    def answer() -> list[Any]:
        asked = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
        outputs = [each.outputs[0] for each in engine.generate(prompts(4, 64), asked, use_tqdm=False)]
        return [[list(o.token_ids), [next(iter(s.values())).logprob for s in o.logprobs]] for o in outputs]

    def timed(act: Any) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        act()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    row: dict[str, Any] = {"case": case, "layers": given.layers, "eager": given.eager, "sleeps": []}
    first = answer()
    for level in LEVELS.get(case, (1,)):
        for _ in range(given.rounds):
            before = torch.cuda.mem_get_info()[0]
            seconds = timed(lambda level=level: engine.sleep(level=level))  # type: ignore[misc]
            freed = torch.cuda.mem_get_info()[0] - before
            weights_s, cache_s = (timed(lambda tag=tag: engine.wake_up(tags=[tag])) for tag in ("weights", "kv_cache"))
            row["sleeps"].append(
                {
                    "level": level, "sleep_s": seconds, "freed_gib": freed / 2**30, "wake_weights_s": weights_s,
                    "wake_cache_s": cache_s, "same_answers": answer() == first,
                }
            )  # fmt: skip
    if case.startswith("headrace"):
        before = torch.cuda.mem_get_info()[0]
        row["reload_s"] = timed(lambda: engine.collective_rpc("reload_weights", kwargs={"weights_path": new}))
        row["reload_took_gib"] = (before - torch.cuda.mem_get_info()[0]) / 2**30
        kept = given.out / "fresh.json"
        row["new_answers"] = answer()
        engine.sleep(level=2)
        engine.wake_up()
        row["same_new_answers"] = answer() == row["new_answers"] != first
        if kept.exists():
            row["those_of_fresh"] = json.loads(kept.read_text()).get("new_answers") == row["new_answers"]
        row["bytes_moved"] = engine.collective_rpc("headrace_stats")[0]["bytes_moved"]
    if case == "fresh":
        row["new_answers"] = first
    return row


if __name__ == "__main__":
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    main()
