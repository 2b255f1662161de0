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


# Of tables that are no steps: names of tables, and the fields of their rows.
OTHER_FIELDS = {
    table: set(fields.split())
    for tables, fields in {
        "bits": "case shape bit_equal layers trace rows compiled",
        "captured": "bit_equal captured format backend",
        "overhead overhead-again overhead-streams vllm": "case before_ms after_ms difference_ms rounds bit_equal",
        "overhead-rounds overhead-again-rounds overhead-streams-rounds overhead-streams-vllm-rounds vllm-rounds "
        "card-overhead": "case bit_equal ms bytes_moved tree round",
        "lm-eval": "case bit_equal bytes_moved task samples equal distinct score",
        "recipe recipe-reference recipe-own-caches recipe-cpu": "case recipe requests failed tokens_per_s "
        "median_ttft_ms median_tpot_ms start_s",
        "soak": "case requests seconds clients generated_tokens moved_gb memory_mib failures",
        "quantised": "case bit_equal bytes_moved kernels policy uva_bytes host_ratio repeats",
        "idle peers-x2": "case bit_equal ms bytes_moved way captured ranks gb_per_s host_bytes",
        "ranks-one-gpu": "case bit_equal moved_a_step_by_rank moved_by_rank pss_bytes logprobs",
        "ranks-two": "case bit_equal ms floor_ms moved_a_step_by_rank moved_by_rank pss_bytes logprobs still_ms",
        "ranks-dp-compiled": "case logprobs differ worst flags_has_the_same_two",
        "coded coded-patches coded-unchained coded-second-stream": "case bit_equal ms spread_ms floor_ms "
        "resident_ms bytes_moved link_gb_per_s",
        "coded-predicted": "case bit_equal ms rows predicted_ms error",
        "coded-start": "case start_s store_gb",
        "decode-launch": "case bit_equal gb_per_s block warps",
        "code-every-bit": "case bit_equal differ coded tensors num_bytes code_bytes longer",
        "code-host-decode": "case bit_equal gb_per_s num_bytes",
        "python-calls": "case device units calls resident_calls",
        "code-shares": "case bit_equal num_bytes share weights_per_escape",
        "decode-blocks": "case bit_equal gb_per_s block warps share",
        "two-links": "case bit_equal alone together",
        "policies": "case experts top_k slots within_2 within_8 lru optimum",
        "start-phases": "case start_s run load_model_s profile_run_s warm_up_and_capture_s",
        "host-memory": "case gb_per_s num_bytes threads",
        "ranges": "case ok why",
        "experts-steps experts-steps-again experts-overflow experts-gpt-oss-24 experts-vllm experts-vllm-48 "
        "experts-vllm-120b experts-vllm-20b experts-vllm-gptq experts-vllm-triton experts-vllm-20b-triton "
        "experts-vllm-qwen-gptq experts-vllm-deepseek-fp8 experts-vllm-deepseek-fp8-mended "
        "experts-vllm-deepseek-bf16 experts-vllm-glm-awq experts-vllm-glm experts-vllm-gptq-before "
        "experts-vllm-fp8 experts-vllm-fp8-overflow experts-vllm-prompts "
        "experts-vllm-nvfp4": "case shape bit_equal ms resident_ms layers trace rows hits missed_bytes",
        "experts-overlap experts-overlap-again": "case bit_equal ms spread_ms bytes_moved layers rows hits "
        "products gain sum_ms bound_ms fetch_gb_per_s missed_per_layer",
        "experts-vllm-rows": "case shape bit_equal ms resident_ms layers trace rows hits missed_bytes format steps "
        "rows_compared repeats_itself",
        "files-contest files-trial": "case contest way setting ms least_ms most_ms rounds gb_per_s ratio bit_equal",
        "files-contest-rounds files-trial-rounds": "case contest way phase ms gb_per_s bit_equal",
        "admission": "case layers experts slots admit_and_fetch_us admit_us same_state",
        "admission-kernels admission-others": "ms layers trace rows variant same",
        "admission-host": "ms layers rows variant",
        "experts-vllm-prompt-memory": "case planned_device_bytes cache_bytes host_pinned_bytes",
        "experts-vllm-rounding": "case run values",
        "experts-vllm-memory": "case bytes_moved planned_device_bytes host_pinned_bytes experts_bytes",
        "experts-vllm-starts": "case shape round layers start_s added_host_bytes added_rss_bytes",
        "experts-launch": "case block warps programs us_and_gb_per_s",
        "experts-launch-small": "case block warps programs misses us memcpy_us bytes",
        "summary": "way equal differs crashed refused timeout",
        "starts-wan starts-flux": "case shape asked_device_bytes offload_s prepared_s ready_s held_device_bytes",
        "pipelines": "case weight_bytes budget_bytes step_weight_bytes step_moved_bytes",
        "smallest": "case weight_bytes budget_bytes",
        "formats": "format package cpu_load cpu_offload h200_load h200_offload",
        "card": "case bit_equal ms spread_ms floor_ms resident_ms bytes_moved table link_gb_per_s "
        "peak_device_bytes layers rows hits tokens_per_s start_s planned_device_bytes model first_token_ms card_bytes "
        "within_card",
        "families": "way family what detail moved_bytes",
        "kernel-bits": "rows format repeats resident_differs cached_differs largest_difference fetched",
        "scripted-guesses": "case bit_equal ms floor_ms rows tokens_per_s model tokens_per_pass pass_bytes "
        "predicted_tokens_per_s resident_tokens_per_s",
        "vllm-speculation": "case ms floor_ms bytes_moved rows passes planned_bytes compared",
        "speculation": "case bytes_moved tokens_per_s equal tokens_per_pass prompts as_plain",
        "cards more-cards": "case predicted weight_bytes",
        "card-cpu": "case predicted host_bandwidth",
        "card-pipelines": "case predicted_seconds host_bytes weight_bytes",
        "calls-8 calls-12 calls-16": "case stored budget_bytes host_bytes calls",
        "card-start": "tree way first_s total_s text",
        "card-fetch": "programs misses words us_a_layer expert_bytes",
        "two-four": "case recipe median_ttft_ms ranks moved_bytes status requests_per_s_gpu",
        "two-four-links": "case bit_equal rows rank copy_slower all_reduce_slower",
        "two-four-bits": "case bit_equal bits",
        "two-four-power": "case gpu limit_w power_w sm_clock_mhz",
        "card-between": "case layers model token_ms graph_ms between_ms",
        "served-steps": "model tokens link_gb_per_s case way at_once",
        "switches switching": "case bit_equal model ms switch_ms bytes_moved",
        "first-tokens": "case start first_token_s command_s link_gb_per_s",
        "peers": "peer model case ms tokens_per_s",
        "lifetime": "model case call ms samples_ms link_gb_per_s",
        "ordered-experts": "model layers case way ms samples_ms tokens_per_s bit_equal",
        "shared-experts": "model layers case way slots ms bit_equal device cores",
        "ordered-kernels": "shape way us",
        "ordered-launches ordered-orders": "shape product lanes chunk outputs chunks warps us",
        "expert-files": "case requests ms plain_ms gb_per_s plain_gb_per_s ratio rounds bytes_moved read_ratio "
        "page_cache_mib bit_equal load_average",
        "expert-steps": "case device tokens tokens_per_s ms floor_ms share_of_floor bytes_read plain_gb_per_s "
        "device_hits misses_of_both host_pinned_bytes planned_device_bytes page_cache_mib bit_equal",
        "expert-hints": "case accuracy tokens mean_ms of_no_hints read_bytes_per_token floor_ms bit_equal",
        "expert-step-phases": "case tokens mean_ms before_reads_ms reading_ms after_reads_ms floor_ms bit_equal",
        "expert-prompts": "case device tokens rounds ms plain_ms floor_ms times_floor read_ratio experts experts_used "
        "experts_read plain_gb_per_s host_pinned_bytes planned_device_bytes page_cache_mib bit_equal",
        "expert-plain-reads": "case round threads whole_ms pieces_of_2_mib_ms",
        "share-trace": "model layers slots case held_gb_per_s wait_us fetch_us",
        "resize-phases": "model case to_gib ms residents_to_host_ms coding_ms bit_equal",
        "copy-after-free": "case num_bytes pause_s samples_ms device",
        "pipeline-peaks": "case height width tiling counted_bytes measured_bytes share device",
        "vllm-sleep": "case layers eager sleeps device bit_equal",
        "remove": "case call bytes ms samples_ms device bit_equal",
        "adapters": "case operation seconds samples_s resident_s floor_s adapter_bytes bit_equal",
        "frames": "case ms resident_ms frames counted_frames peak_bytes counted_bytes card_bytes bit_equal",
        "share-off": "case model layers slots fetched ms samples_ms ratios_ms bit_equal",
        "expert-tiers": "case experts top_k texts gpu_slots host_slots gpu lru aged_16 aged_64",
        "packed-prompts": "device rows ms",
        "packed-unpacking": "device before_us us before_in_place_us in_place_us",
        "expected-rates": "case tokens expected_tokens_per_s tokens_per_s link_gb_per_s",
    }.items()
    for table in tables.split()
}  # fmt: skip


# Nothing was computed there, or the run ended before bits were compared, which the report says.
NOTHING_COMPARED = {
    "policies", "expert-tiers", "host-memory", "ranges", "cards", "more-cards", "two-four", "two-four-power",
    "experts-launch", "experts-launch-small", "experts-vllm-memory", "experts-vllm-starts", "pipelines",
    "card-pipelines", "card-cpu", "calls-8", "calls-12", "calls-16",
    "admission", "experts-vllm-prompt-memory", "experts-vllm-rounding", "ranks-dp-compiled",
    "smallest", "coded-start", "starts-wan", "starts-flux", "start-phases", "card-start", "card-fetch", "card-between",
    "copy-after-free", "pipeline-peaks",
    "python-calls", "first-tokens", "ordered-kernels", "ordered-launches", "ordered-orders", "expected-rates", "peers",
    "expert-plain-reads", "share-trace", "packed-prompts", "packed-unpacking",
}  # fmt: skip


@pytest.mark.slow
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
        if row["table"] == "served-steps":  # several requests at once round as their batch does
            assert row.get("bit_equal") is not False
            continue
        if row["table"] in NOTHING_COMPARED:
            continue
        why = row.get("why_not_equal")  # a compiler may round otherwise; then the report says how much
        assert row["bit_equal"] or why, f"{row['case']}, {row['rows']} rows: published although the bits differ"
    assert (ROOT / "docs" / "benchmarks" / path.with_suffix(".md").name).exists()
