"""Published tables are those of the raw results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
FIELDS = {
    "table", "case", "rows", "ms", "spread_ms", "floor_ms", "resident_ms", "bytes_moved", "link_gb_per_s",
    "peak_device_bytes", "planned_device_bytes", "bit_equal",
}  # fmt: skip


# Of tables that are no steps.
_STARTS = {"case", "shape", "asked_device_bytes", "offload_s", "prepared_s", "ready_s", "held_device_bytes"}
_BEFORE_AFTER = {"case", "before_ms", "after_ms", "difference_ms", "rounds", "bit_equal"}
_CODED = {"case", "ms", "spread_ms", "floor_ms", "resident_ms", "bytes_moved", "link_gb_per_s", "bit_equal"}
_ROUND = {"case", "tree", "round", "ms", "bytes_moved", "bit_equal"}
_EXPERTS = {"shape", "layers", "trace", "case", "rows", "hits", "missed_bytes", "ms", "resident_ms", "bit_equal"}
_OVERLAP = {
    "products", "rows", "hits", "case", "layers", "ms", "spread_ms", "gain", "sum_ms", "bound_ms", "fetch_gb_per_s",
    "bytes_moved", "missed_per_layer", "bit_equal",
}  # fmt: skip
_RECIPE = {"case", "recipe", "requests", "failed", "tokens_per_s", "median_ttft_ms", "median_tpot_ms", "start_s"}
_RANKS = {"case", "moved_a_step_by_rank", "moved_by_rank", "pss_bytes", "logprobs", "bit_equal"}
_PEERS = {"case", "way", "captured", "ranks", "ms", "gb_per_s", "bytes_moved", "host_bytes", "bit_equal"}
_ADMISSION = {"trace", "variant", "rows", "layers", "ms", "same"}
OTHER_FIELDS = {
    "bits": {"shape", "layers", "case", "trace", "rows", "compiled", "bit_equal"},
    "captured": {"format", "backend", "captured", "bit_equal"},
    **dict.fromkeys(("overhead", "overhead-again", "overhead-streams"), _BEFORE_AFTER),
    **dict.fromkeys(("overhead-rounds", "overhead-again-rounds", "overhead-streams-rounds"), _ROUND),
    "overhead-streams-vllm-rounds": _ROUND,
    "vllm": _BEFORE_AFTER,
    "vllm-rounds": _ROUND,
    "lm-eval": {"case", "task", "samples", "equal", "distinct", "score", "bytes_moved", "bit_equal"},
    "recipe": _RECIPE,
    "recipe-reference": _RECIPE,
    "recipe-own-caches": _RECIPE,
    "recipe-cpu": _RECIPE,
    "soak": {"case", "seconds", "clients", "requests", "generated_tokens", "moved_gb", "memory_mib", "failures"},
    "quantised": {"case", "kernels", "policy", "bytes_moved", "uva_bytes", "host_ratio", "repeats", "bit_equal"},
    **dict.fromkeys(("idle", "peers-x2"), _PEERS),
    "ranks-one-gpu": _RANKS,
    "ranks-two": {*_RANKS, "ms", "floor_ms", "still_ms"},
    "ranks-dp-compiled": {"case", "logprobs", "differ", "worst", "flags_has_the_same_two"},
    **dict.fromkeys(("coded", "coded-patches", "coded-unchained", "coded-second-stream"), _CODED),
    "coded-predicted": {"case", "rows", "predicted_ms", "ms", "error", "bit_equal"},
    "coded-start": {"case", "start_s", "store_gb"},
    "decode-launch": {"case", "block", "warps", "gb_per_s", "bit_equal"},
    "code-every-bit": {"case", "tensors", "num_bytes", "coded", "code_bytes", "longer", "differ", "bit_equal"},
    "code-host-decode": {"case", "num_bytes", "gb_per_s", "bit_equal"},
    "python-calls": {"case", "device", "units", "calls", "resident_calls"},
    "code-shares": {"case", "num_bytes", "share", "weights_per_escape", "bit_equal"},
    "decode-blocks": {"case", "block", "warps", "gb_per_s", "share", "bit_equal"},
    "two-links": {"case", "alone", "together", "bit_equal"},  # bytes per second by bytes of a copy
    "policies": {"case", "experts", "top_k", "slots", "within_2", "within_8", "lru", "optimum"},
    "start-phases": {"case", "run", "start_s", "load_model_s", "profile_run_s", "warm_up_and_capture_s"},
    "host-memory": {"case", "threads", "gb_per_s", "num_bytes"},
    "ranges": {"case", "ok", "why"},
    "experts-steps": _EXPERTS,
    "experts-steps-again": _EXPERTS,
    "experts-overflow": _EXPERTS,
    "experts-gpt-oss-24": _EXPERTS,
    "experts-vllm": _EXPERTS,
    "experts-vllm-48": _EXPERTS,
    "experts-vllm-120b": _EXPERTS,
    "experts-vllm-20b": _EXPERTS,
    "experts-vllm-gptq": _EXPERTS,
    "experts-vllm-triton": _EXPERTS,
    "experts-vllm-20b-triton": _EXPERTS,
    "experts-vllm-qwen-gptq": _EXPERTS,
    **dict.fromkeys(("experts-vllm-deepseek-fp8", "experts-vllm-deepseek-fp8-mended"), _EXPERTS),
    **dict.fromkeys(("experts-vllm-deepseek-bf16", "experts-vllm-glm-awq"), _EXPERTS),
    **dict.fromkeys(("experts-overlap", "experts-overlap-again"), _OVERLAP),
    "experts-vllm-glm": _EXPERTS,
    "experts-vllm-rows": {*_EXPERTS, "format", "steps", "rows_compared", "repeats_itself"},
    "experts-vllm-gptq-before": _EXPERTS,
    "experts-vllm-fp8": _EXPERTS,
    "experts-vllm-fp8-overflow": _EXPERTS,
    "experts-vllm-prompts": _EXPERTS,
    "admission": {"case", "experts", "slots", "layers", "admit_and_fetch_us", "admit_us", "same_state"},
    "admission-kernels": _ADMISSION,
    "admission-others": _ADMISSION,
    "admission-host": {"variant", "rows", "layers", "ms"},
    "experts-vllm-prompt-memory": {"case", "planned_device_bytes", "cache_bytes", "host_pinned_bytes"},
    "experts-vllm-rounding": {"case", "run", "values"},
    "experts-vllm-memory": {"case", "planned_device_bytes", "host_pinned_bytes", "experts_bytes", "bytes_moved"},
    "experts-vllm-starts": {"shape", "layers", "round", "case", "start_s", "added_host_bytes", "added_rss_bytes"},
    "experts-launch": {"case", "programs", "block", "warps", "us_and_gb_per_s"},
    "experts-launch-small": {"case", "programs", "block", "warps", "misses", "us", "memcpy_us", "bytes"},
    "summary": {"way", "equal", "differs", "crashed", "refused", "timeout"},
    "starts-wan": _STARTS,
    "starts-flux": _STARTS,
    "pipelines": {"case", "weight_bytes", "budget_bytes", "step_weight_bytes", "step_moved_bytes"},
    "smallest": {"case", "weight_bytes", "budget_bytes"},
    "formats": {"format", "package", "cpu_load", "cpu_offload", "h200_load", "h200_offload"},
    "card": {
        "model", "layers", "tokens_per_s", "first_token_ms", "hits", "card_bytes", "within_card", "start_s", *FIELDS
    },
    "families": {"family", "way", "what", "detail", "moved_bytes"},
    "kernel-bits": {"format", "rows", "repeats", "resident_differs", "cached_differs", "largest_difference", "fetched"},
    "scripted-guesses": {
        "model", "case", "rows", "tokens_per_pass", "ms", "pass_bytes", "floor_ms", "tokens_per_s",
        "predicted_tokens_per_s", "resident_tokens_per_s", "bit_equal",
    },
    "vllm-speculation": {"case", "rows", "ms", "floor_ms", "passes", "bytes_moved", "planned_bytes", "compared"},
    "speculation": {"case", "prompts", "tokens_per_pass", "equal", "as_plain", "tokens_per_s", "bytes_moved"},
    "cards": {"case", "weight_bytes", "host_bytes"},  # and tokens a second, or seconds
    "card-start": {"tree", "way", "first_s", "total_s", "text"},
    "card-overhead": {"tree", "case", "round", "ms", "bytes_moved", "bit_equal"},
    "card-fetch": {"programs", "words", "misses", "us_a_layer", "expert_bytes"},
    "two-four": {"case", "status", "recipe", "ranks", "requests_per_s_gpu", "median_ttft_ms", "moved_bytes"},
    "two-four-links": {"case", "rank", "rows", "copy_slower", "all_reduce_slower", "bit_equal"},
    "two-four-bits": {"case", "bits", "bit_equal"},
    "two-four-power": {"case", "gpu", "limit_w", "power_w", "sm_clock_mhz"},
    "card-between": {"model", "layers", "case", "token_ms", "graph_ms", "between_ms"},
}  # fmt: skip


# Nothing was computed there, or the run ended before bits were compared, which the report says.
NOTHING_COMPARED = {
    "policies", "host-memory", "ranges", "cards", "two-four", "two-four-power",
    "experts-launch", "experts-launch-small", "experts-vllm-memory", "experts-vllm-starts", "pipelines",
    "admission", "experts-vllm-prompt-memory", "experts-vllm-rounding", "ranks-dp-compiled",
    "smallest", "coded-start", "starts-wan", "starts-flux", "start-phases", "card-start", "card-fetch", "card-between",
    "python-calls",
}  # fmt: skip


def test_tables_agree_with_the_raw_results() -> None:
    command = [sys.executable, ROOT / "benchmarks" / "tables.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_raw_results_are_complete(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows
    for row in rows:
        assert row.keys() >= OTHER_FIELDS.get(row["table"], FIELDS)
        if row["table"] in ("summary", "families"):
            assert row.get("differs", 0) == 0
            assert row.get("what") != "differs", row["family"]
            continue
        if row["table"] == "formats":
            assert all(cell["what"] != "differs" for cell in row.values() if isinstance(cell, dict)), row["format"]
            continue
        if row["table"].startswith("recipe"):
            assert row["failed"] == 0, f"{row['case']}, {row['recipe']}"
            continue
        if row["table"] == "soak":
            assert row["failures"] == []
            continue
        if row["table"].startswith("admission-"):
            assert row.get("same") is not False, f"{row['trace']}, {row['variant']}"
            continue
        if row["table"] in NOTHING_COMPARED:
            continue
        why = row.get("why_not_equal")  # a compiler may round otherwise; then the report says how much
        assert row["bit_equal"] or why, f"{row['case']}, {row['rows']} rows: published although the bits differ"
    assert (ROOT / "docs" / "benchmarks" / path.with_suffix(".md").name).exists()
