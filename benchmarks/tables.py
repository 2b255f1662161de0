"""Writes the tables and the picture of README.md and docs/ from the raw results, or checks that they agree.

A table stands between two comments; the first says where its rows come from:

    <!-- table: 2026-11-21-step-h200.jsonl reference cases=even:0.25,group:4/1/2 -->
    <!-- end table -->

    python benchmarks/tables.py            rewrite
    python benchmarks/tables.py --check    exit 1 and name the files that differ
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TABLE = re.compile(r"(<!-- table: (\S+) (\S+)(?: (cases|contest)=(\S+))? -->\n).*?(<!-- end table -->)", re.DOTALL)


def columns(headings: str) -> list[str]:
    """Headings as a table of Markdown has them."""
    return headings.split(" | ")


STEP_HEADINGS = columns("case | rows | floor ms | median ms | spread ms | x floor | resident ms | GB moved | same bits")
PLAN_HEADINGS = columns(
    "device memory | case | rows | predicted ms | measured ms | error | GB moved | GB in place | "
    "units / slots | peak - plan MiB | same bits"
)


def plan_cells(row: dict[str, Any]) -> list[str]:
    return [
        f"as {row['contest']}" if "/" in row["contest"] else row["contest"],
        row["case"],
        str(row["rows"]),
        f"{row['predicted_ms']:.2f}",
        f"{row['ms']:.2f}",
        f"{row['error']:+.1%}",
        f"{row['bytes_moved'] / 1e9:.2f}",
        f"{row['uva_bytes'] / 1e9:.2f}",
        f"{row['num_units']} / {row['num_slots']}",
        f"{(row['peak_device_bytes'] - row['planned_device_bytes']) / 2**20:+.0f}",
        "yes" if row["bit_equal"] else "NO",
    ]


def step_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["case"],
        str(row["rows"]),
        f"{row['floor_ms']:.2f}",
        f"{row['ms']:.2f}",
        f"{row['spread_ms']:.2f}",
        f"{row['ms'] / row['floor_ms']:.3f}",
        f"{row['resident_ms']:.2f}",
        f"{row['bytes_moved'] / 1e9:.2f}",
        "yes" if row["bit_equal"] else "NO",
    ]


LOAD_HEADINGS = columns(
    "files | way | load s | GB/s | first step after s | second step ms | resident memory - offloaded MiB | same bits"
)
FILES_HEADINGS = columns(
    "contest | way | setting | median ms | least to most ms | rounds | GB/s | x headrace | same bits"
)
PEER_HEADINGS = columns("case | way | graph | ms | GB/s into each GPU | host GiB per rank | same bits")


def load_cells(row: dict[str, Any]) -> list[str]:
    beyond = (row["rss_growth_bytes"] - row["offloaded_bytes"]) / 2**20 if "offloaded_bytes" in row else None
    return [
        "not cached" if row["cold"] else "cached",
        row["case"],
        f"{row['load_s']:.2f}",
        f"{row['gb_per_s']:.2f}" if "gb_per_s" in row else "",
        f"{row['first_step_s']:.2f}" if "first_step_s" in row else "",
        f"{1e3 * row['second_step_takes_s']:.0f}" if "second_step_takes_s" in row else "",
        "" if beyond is None else f"{beyond:+.0f}",
        "yes" if row.get("bit_equal") else "" if beyond is None else "NO",
    ]


def files_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["contest"],
        row["way"],
        row["setting"],
        f"{row['ms']:.1f}",
        f"{row['least_ms']:.1f} to {row['most_ms']:.1f}",
        str(row["rounds"]),
        f"{row['gb_per_s']:.1f}",
        f"{row['ratio']:.2f}",
        "yes" if row["bit_equal"] else "NO",
    ]


def peer_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["case"],
        row["way"],
        "yes" if row["captured"] else "no",
        f"{row['ms']:.2f}",
        f"{row['gb_per_s']:.1f}",
        f"{row['host_bytes'] / 2**30:.2f}",
        "yes" if row["bit_equal"] else "NO",
    ]


ENGINE_HEADINGS = columns(
    "case | runner | sequences | tokens in / out | ms / step | spread ms | floor ms | resident ms | "
    "tokens / s | GB moved | start s | host GiB | same tokens"
)


def engine_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["case"],
        row["runner"],
        str(row["rows"]),
        f"{row['tokens_in']} / {row['tokens_out']}",
        f"{row['ms']:.2f}",
        f"{row['spread_ms']:.2f}",
        "" if row["floor_ms"] is None else f"{row['floor_ms']:.2f}",
        "" if row["resident_ms"] is None else f"{row['resident_ms']:.2f}",
        f"{row['tokens_per_s']:.1f}",
        "" if row["bytes_moved"] is None else f"{row['bytes_moved'] / 1e9:.2f}",
        f"{row['start_s']:.1f}",
        "" if row["rss_bytes"] is None else f"{row['rss_bytes'] / 2**30:.2f}",
        "yes" if row["bit_equal"] else "NO",
    ]


WARM_HEADINGS = [*ENGINE_HEADINGS, "warm start s", "warm host GiB"]


def warm_cells(row: dict[str, Any]) -> list[str]:
    return [*engine_cells(row), f"{row['warm_start_s']:.1f}", f"{row['warm_rss_bytes'] / 2**30:.2f}"]


RECIPE_HEADINGS = columns(
    "case | recipe | requests | tokens / s | ms / token | its p99 | first token ms | its p99 ms | "
    "GB moved / step | start s | same texts"
)


def recipe_cells(row: dict[str, Any]) -> list[str]:
    moved = row["moved_bytes_per_forward"]
    return [
        row["case"],
        row["recipe"],
        str(row["requests"]),
        f"{row['tokens_per_s']:.1f}",
        *("" if row[key] is None else f"{row[key]:.2f}" for key in ("median_tpot_ms", "p99_tpot_ms")),
        *(f"{row[key]:.1f}" for key in ("median_ttft_ms", "p99_ttft_ms")),
        "" if moved is None else f"{moved / 1e9:.2f}",
        "" if row["start_s"] is None else f"{row['start_s']:.1f}",
        f"{row['same_texts']}, as {row['compared_with']}" if "same_texts" in row else "",
    ]


SAMPLE_HEADINGS = columns("case | task | samples | equal to resident | different from one another | score | GB moved")


def sample_cells(row: dict[str, Any]) -> list[str]:
    counts = (str(row[key]) for key in ("samples", "equal", "distinct"))
    return [row["case"], row["task"], *counts, f"{row['score']:.2f}", f"{row['bytes_moved'] / 1e9:.2f}"]


PROFILE_HEADINGS = columns("case | no kernel runs, ms | kernels ms | of them products ms | copies to the device ms")


def profile_cells(row: dict[str, Any]) -> list[str]:
    return [row["case"], *(f"{row[key]:.1f}" for key in ("idle_ms", "kernels_ms", "products_ms", "copies_ms"))]


OVERHEAD_HEADINGS = columns("what | before, ms | after, ms | difference within a round, ms | rounds | same bits")


def overhead_cells(row: dict[str, Any]) -> list[str]:
    figures = (f"{row['before_ms']:.3f}", f"{row['after_ms']:.3f}", f"{row['difference_ms']:+.3f}")
    return [row["case"], *figures, str(row["rounds"]), "yes" if row["bit_equal"] else "no"]


FAMILY_HEADINGS = columns("way | equal | differs | crashed | refused | timeout")


def family_cells(row: dict[str, Any]) -> list[str]:
    return [row["way"], *(str(row[outcome]) for outcome in FAMILY_HEADINGS[1:])]


QUANTISED_HEADINGS = columns(
    "model | kernels | way | prefetched MB | in place MB | moved MB | host memory | "
    "device while loading | same bits | against resident"
)


def quantised_cells(row: dict[str, Any]) -> list[str]:
    first = [row["case"], ", ".join(row["kernels"]), row["policy"]]
    if "error" in row:
        return [*first, "", "", "", "", "", row["error"].replace("|", "/"), ""]
    megabytes = (row["prefetched_bytes"], row["uva_bytes"], row["bytes_moved"])
    return [
        *first,
        *(f"{count / 1e6:.0f}" for count in megabytes),
        f"{row['host_ratio']:.3f} x" if row["host_ratio"] else "",
        f"{row['load_peak_bytes'] / row['resident_load_peak_bytes']:.2f} x resident",
        "yes" if row["bit_equal"] else "NO",
        row["compared_with_resident"],
    ]


RANKS_HEADINGS = columns(
    "case | MB a step, by rank | GB in the comparison, by rank | host GiB | log-probabilities | same bits"
)


def ranks_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["case"],
        " ".join(f"{size / 1e6:.1f}" for size in row["moved_a_step_by_rank"]),
        " ".join(f"{size / 1e9:.1f}" for size in row["moved_by_rank"]),
        f"{row['pss_bytes'] / 2**30:.2f}",
        str(row["logprobs"]),
        "the reference" if row["compared_with"] is None else "yes" if row["bit_equal"] else "NO",
    ]


RANKS_STEP_HEADINGS = [
    *RANKS_HEADINGS[:3],
    *("ms, 1 / 16 sequences", "floor ms", "nothing moves, ms"),
    *RANKS_HEADINGS[3:],
]


def ranks_step_cells(row: dict[str, Any]) -> list[str]:
    cells = ranks_cells(row)
    times = [" / ".join(f"{ms:.2f}" for ms in (row[key] or {}).values()) for key in ("ms", "floor_ms", "still_ms")]
    return [*cells[:3], *times, *cells[3:]]


EXPERTS_HEADINGS = columns(
    "shape | layers | trace | rows | case | hits | GB missed | ms | at 50 GB/s + resident, ms | ratio | "
    "tokens/s | same bits"
)


def experts_cells(row: dict[str, Any]) -> list[str]:
    missed = row["missed_bytes"]  # not counted in all cases
    is_known = missed is not None and row["resident_ms"] is not None
    goal_ms = missed / 50e9 * 1e3 + row["resident_ms"] if is_known else None
    return [
        row["shape"],
        str(row["layers"]),
        row["trace"],
        str(row["rows"]),
        row["case"],
        "" if row["hits"] is None else f"{row['hits']:.1%}",
        "" if missed is None else f"{missed / 1e9:.2f}",
        f"{row['ms']:.2f}",
        "" if goal_ms is None else f"{goal_ms:.2f}",
        "" if goal_ms is None else f"{row['ms'] / goal_ms:.3f}",
        f"{row['tokens_per_s']:.1f}",
        "yes" if row["bit_equal"] else "NO",
    ]


STARTS_HEADINGS = columns(
    "case | GB asked for | offloaded after s | prepared after s | next step ends after s | GB held | peak GB until then"
)


def starts_cells(row: dict[str, Any]) -> list[str]:
    asked = row["asked_device_bytes"]
    return [
        row["case"],
        "" if asked is None else f"{asked / 1e9:.2f}",
        *(f"{row[key]:.1f}" for key in ("offload_s", "prepared_s", "ready_s")),
        *(f"{row[key] / 1e9:.2f}" for key in ("held_device_bytes", "start_peak_device_bytes")),
    ]


OFFLOADER_HEADINGS = columns(
    "case | rows | median ms | spread ms | x resident | GB moved | held GB | peak GB | "
    "peak at start GB | prepared after s | first step at that speed after s | same bits"
)


def offloader_cells(row: dict[str, Any]) -> list[str]:
    moved = row["bytes_moved"]
    sizes = (row[key] for key in ("held_device_bytes", "peak_device_bytes", "start_peak_device_bytes"))
    return [
        row["case"],
        str(row["rows"]),
        f"{row['ms']:.1f}",
        f"{row['spread_ms']:.1f}",
        f"{row['ms'] / row['resident_ms']:.3f}",
        "" if moved is None else f"{moved / 1e9:.2f}",
        *(f"{size / 1e9:.2f}" for size in sizes),
        f"{row['prepared_s']:.1f}",
        f"{row['ready_s']:.1f}",
        "yes" if row["bit_equal"] else "NO",
    ]


FORMAT_HEADINGS = columns("format | package | load, CPU | offload, CPU | load, H200 | offload, H200")


def format_cells(row: dict[str, Any]) -> list[str]:
    ways = ("cpu_load", "cpu_offload", "h200_load", "h200_offload")
    return [row["format"], row["package"] or "none", *(row[way]["what"] for way in ways)]


CARD_HEADINGS = columns(
    "model | layers | case | decodes | tokens/s | floor tokens/s | ms | spread ms | floor ms | x floor | "
    "resident ms | GB a token | experts hit | peak of card, GB | first token ms | offloaded after s | same bits"
)


def card_cells(row: dict[str, Any]) -> list[str]:
    peak = row["peak_device_bytes"]  # not limited on a CPU
    return [
        row["model"],
        str(row["layers"]),
        row["case"],
        {"graphs": "in graphs"}.get(row.get("way", ""), "eagerly"),
        *(f"{row[key]:.2f}" for key in ("tokens_per_s", "floor_tokens_per_s", "ms", "spread_ms", "floor_ms")),
        f"{row['ms'] / row['floor_ms']:.3f}",
        f"{row['resident_ms']:.2f}",
        f"{row['bytes_moved'] / 1e9:.2f}",
        "" if row["hits"] is None else f"{row['hits']:.1%}",
        "" if peak is None else f"{peak / 1e9:.2f} of {row['card_bytes'] / 1e9:.0f}",
        f"{row['first_token_ms']:.0f}",
        f"{row['start_s']:.1f}",
        "yes" if row["bit_equal"] else "NO",
    ]


GUESSES_HEADINGS = columns(
    "model | guesses by | tokens a pass | pass ms | spread ms | link's floor ms | GB a pass | tokens/s | "
    "predicted | error | resident tokens/s | same bits"
)


def guesses_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["model"],
        "nothing" if row["case"] == "plain" else row["case"],
        f"{row['tokens_per_pass']:.2f}",
        *(f"{row[key]:.1f}" for key in ("ms", "spread_ms", "floor_ms")),
        f"{row['pass_bytes'] / 1e9:.2f}",
        f"{row['tokens_per_s']:.2f}",
        f"{row['predicted_tokens_per_s']:.2f}",
        f"{row['predicted_tokens_per_s'] / row['tokens_per_s'] - 1:+.1%}",
        f"{row['resident_tokens_per_s']:.1f}",
        "yes" if row["bit_equal"] else "NO",
    ]


OVERLAP_HEADINGS = columns(
    "products | rows | hits | case | ms a layer | spread | gain | sum | bound | fetch GB/s | experts missed | same bits"
)


def overlap_cells(row: dict[str, Any]) -> list[str]:
    ms, spread, total, bound = (f"{row[f'{key}ms'] / row['layers']:.3f}" for key in ("", "spread_", "sum_", "bound_"))
    return [
        row["products"],
        str(row["rows"]),
        f"{row['hits']:.0%}",
        row["case"],
        ms,
        spread,
        f"{row['gain']:+.1%}",
        total,
        bound,
        f"{row['fetch_gb_per_s']:.1f}",
        f"{row['missed_per_layer']:.2f}",
        "yes" if row["bit_equal"] else "NO",
    ]


CARD_PLAN_HEADINGS = columns(
    "model | weights GB | 8 GB (4060) | 12 GB (3060) | 16 GB (4080) | 24 GB (4090) | 32 GB (5090) | 80 GB (h100) | "
    "host memory GB for 24 GB | 24 GB and a host of 128 GB | of 64 GB | of 32 GB"
)
PIPELINE_HEADINGS = CARD_PLAN_HEADINGS[:9]


def card_plan_cells(row: dict[str, Any]) -> list[str]:
    """``v``: inside vLLM; ``=``: as without a limit, and -: no plan."""
    found, beside = row["predicted"], row["predicted"]["4090"]
    return [
        row["case"],
        f"{row['weight_bytes'] / 1e9:.1f}",
        *(rate_cell(cards[""]) for cards in found.values()),
        "" if beside[""] is None else f"{beside['']['host_bytes'] / 1e9:.0f}",
        *(rate_cell(beside[host]) if host in beside else "=" for host in ("128", "64", "32")),
    ]


def rate_cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    kept = "" if cell["host_bytes"] else ", fits"
    rate = f"{cell['tokens_per_s']:.3g}" if cell["tokens_per_s"] >= 0.1 else "< 0.1"
    return f"{rate}{' v' if cell['engine'] == 'vllm' else ''}{kept}"


def cpu_card_cells(row: dict[str, Any]) -> list[str]:
    """The link alone, and with the CPU; -: no experts are cached, or the CPU computes none of that form."""
    pairs = row["predicted"].values()
    return [row["case"], *("-" if pair is None else f"{pair[0]:.3g}, {pair[1]:.3g}" for pair in pairs)]


def pipeline_cells(row: dict[str, Any]) -> list[str]:
    fits = {card: "" if host_bytes else ", fits" for card, host_bytes in row["host_bytes"].items()}
    return [
        row["case"],
        f"{row['weight_bytes'] / 1e9:.1f}",
        *(f"{seconds_cell(s)}{fits[card]}" for card, s in row["predicted_seconds"].items()),
        f"{row['host_bytes']['4090'] / 1e9:.0f}",
    ]


def seconds_cell(seconds: float) -> str:
    return f"{float(f'{seconds:.2g}'):,.0f} s"


CARD_NAMES = {"4060": "RTX 4060", "3060": "RTX 3060", "4070": "RTX 4070"}
CARD_NAMES |= {"4060ti": "RTX 4060 Ti 16 GB", "5060ti": "RTX 5060 Ti 16 GB"}


def call_headings(row: dict[str, Any]) -> list[str]:
    return columns("pipeline | stored in | budget GiB | host memory GB") + [CARD_NAMES[card] for card in row["calls"]]


def call_cells(row: dict[str, Any]) -> list[str]:
    calls = row["calls"].values()
    return [
        row["case"].split("/")[1].removesuffix("-Diffusers"),
        row["stored"],
        f"{row['budget_bytes'] / 2**30:.1f}",
        f"{row['host_bytes'] / 1e9:.0f}",
        *(f"{seconds_cell(call['predicted_seconds'])}{', link' if call['waits_for_link'] else ''}" for call in calls),
    ]


TWO_FOUR_HEADINGS = columns(
    "case | GPUs | recipe | requests |  | requests/s and GPU | tokens/s | first token ms | ms / token | "
    "GB counted a rank"
)
LINKS_HEADINGS = columns(
    "run | rank | rows | copies GB/s | beside all-reduces | slower | all-reduce ms | beside copies | slower | same bits"
)


def two_four_cells(row: dict[str, Any]) -> list[str]:
    moved = row["moved_bytes"]
    return [
        row["case"],
        str(row["ranks"]),
        row["recipe"],
        str(row["requests"]),
        row["status"],
        "" if (rate := row["requests_per_s_gpu"]) is None else f"{rate:.3g}",
        *("" if row[key] is None else f"{row[key]:,.0f}" for key in ("tokens_per_s", "median_ttft_ms")),
        "" if row["median_tpot_ms"] is None else f"{row['median_tpot_ms']:.1f}",
        "" if moved is None else f"{moved / 1e9:.0f}",
    ]


def links_cells(row: dict[str, Any]) -> list[str]:
    return [
        *(str(row[key]) for key in ("run", "rank", "rows")),
        *(f"{row[key]:.2f}" for key in ("copy_gb_per_s", "copy_beside_gb_per_s")),
        f"{row['copy_slower']:+.1%}",
        *(f"{row[key]:.3f}" for key in ("all_reduce_ms", "all_reduce_beside_ms")),
        f"{row['all_reduce_slower']:+.1%}",
        "yes" if row["bit_equal"] else "NO",
    ]


SERVED_HEADINGS = columns(
    "model | case | way | at once | context | ms a step | ms a token of the slowest | same tokens"
)
FIRST_HEADINGS = columns("case | start | first token after the weights, s | whole command, s | link GB/s")
ORDERED_HEADINGS = columns("model | layers | case | way | ms a token | tokens/s | same bits")


def served_cells(row: dict[str, Any]) -> list[str]:
    times = (f"{row[name]:.2f}" if name in row else "" for name in ("ms", "answer_ms"))
    same = {True: "yes", False: "NO"}.get(row.get("bit_equal"), "")
    return [row["model"], row["case"], row["way"], str(row["at_once"]), str(row.get("context", "")), *times, same]


def first_cells(row: dict[str, Any]) -> list[str]:
    seconds = f"{row['first_token_s']:.2f}", f"{row['command_s']:.1f}"
    return [row["case"], str(row["start"]), *seconds, f"{row['link_gb_per_s']:.0f}"]


def ordered_cells(row: dict[str, Any]) -> list[str]:
    of_model = row["model"], str(row["layers"]), row["case"], row["way"]
    return [*of_model, f"{row['ms']:.2f}", f"{row['tokens_per_s']:.1f}", "yes" if row["bit_equal"] else "NO"]


def layout_of(row: dict[str, Any]) -> tuple[list[str], Callable[[dict[str, Any]], list[str]]]:
    own = {
        "served-steps": (SERVED_HEADINGS, served_cells),
        "first-tokens": (FIRST_HEADINGS, first_cells),
        "ordered-experts": (ORDERED_HEADINGS, ordered_cells),
    }
    if row["table"] in own:
        return own[row["table"]]
    if row["table"].startswith("files-"):
        return FILES_HEADINGS, files_cells
    if "requests_per_s_gpu" in row:
        return TWO_FOUR_HEADINGS, two_four_cells
    if "copy_slower" in row:
        return LINKS_HEADINGS, links_cells
    if "hinted_per_layer" in row:
        return OVERLAP_HEADINGS, overlap_cells
    if "pass_bytes" in row:
        return GUESSES_HEADINGS, guesses_cells
    if row["table"] == "card-cpu":
        return CARD_PLAN_HEADINGS[:1] + CARD_PLAN_HEADINGS[2:8], cpu_card_cells
    if "predicted" in row:
        return CARD_PLAN_HEADINGS, card_plan_cells
    if row["table"].startswith("calls-"):
        return call_headings(row), call_cells
    if "predicted_seconds" in row:
        return PIPELINE_HEADINGS, pipeline_cells
    if "card_bytes" in row:
        return CARD_HEADINGS, card_cells
    if "asked_device_bytes" in row:
        return STARTS_HEADINGS, starts_cells
    if "prepared_s" in row:
        return OFFLOADER_HEADINGS, offloader_cells
    if "cpu_load" in row:
        return FORMAT_HEADINGS, format_cells
    if "policy" in row:
        return QUANTISED_HEADINGS, quantised_cells
    if "moved_a_step_by_rank" in row:
        return (RANKS_STEP_HEADINGS, ranks_step_cells) if "still_ms" in row else (RANKS_HEADINGS, ranks_cells)
    if "missed_bytes" in row:
        return EXPERTS_HEADINGS, experts_cells
    if "before_ms" in row:
        return OVERHEAD_HEADINGS, overhead_cells
    if "way" in row and "equal" in row:
        return FAMILY_HEADINGS, family_cells
    if "idle_ms" in row:
        return PROFILE_HEADINGS, profile_cells
    if "samples" in row:
        return SAMPLE_HEADINGS, sample_cells
    if "recipe" in row:
        return RECIPE_HEADINGS, recipe_cells
    if "warm_start_s" in row:
        return WARM_HEADINGS, warm_cells
    if "tokens_in" in row:
        return ENGINE_HEADINGS, engine_cells
    if "predicted_ms" in row:
        return PLAN_HEADINGS, plan_cells
    if "cold" in row:
        return LOAD_HEADINGS, load_cells
    return (PEER_HEADINGS, peer_cells) if "ranks" in row else (STEP_HEADINGS, step_cells)


def render(file: str, table: str, key: str | None, wanted: str | None) -> str:
    rows = [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]
    rows = [row for row in rows if row["table"] == table]
    if wanted is not None:
        rows = [row for row in rows if row["contest" if key == "contest" else "case"] in wanted.split(",")]
    if not rows:
        raise SystemExit(f"{file}: no rows for table {table!r}, {key} {wanted}")
    headings, cells_of = layout_of(rows[0])
    lines = [headings, ["---"] * len(headings), *map(cells_of, rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def rewrite(text: str) -> str:
    return TABLE.sub(lambda match: match[1] + render(match[2], match[3], match[4], match[5]) + match[6], text)


# -- the picture ------------------------------------------------------------------------------------------------------

PICTURE = ROOT / "docs" / "benchmarks" / "steps-beside-others.svg"
# Title; file, table and rows; the case whose floor counts; the cases as bars.
GROUPS = (
    (
        "Qwen3-8B in vLLM 0.33, a quarter of the layers offloaded",
        ("2026-11-23-vllm33-h200.jsonl", "contest-36", 1),
        {"headrace-v2": "headrace", "vllm-v2": "vLLM's own offloader"},
    ),
    (
        "Qwen3-8B in transformers, every fourth layer offloaded",
        ("2026-11-21-step-h200.jsonl", "qwen3-8b", 1),
        {"group:4/1/2": "headrace", "accelerate": "accelerate"},
    ),
    (
        "Qwen3-8B in transformers, all layers offloaded",
        ("2026-11-21-step-h200.jsonl", "qwen3-8b", 1),
        {"group:1/1/2": "headrace", "diffusers": "diffusers, group offloading"},
    ),
    (
        "FLUX.1-dev's transformer in 6 GiB, an image of 1024 x 1024",
        ("2026-11-23-offloaders-h200.jsonl", "offloaders-flux", 4608),
        {"headrace": "headrace", "leaf": "diffusers, group offloading"},
    ),
)
LEFT, BAR, WIDTH, MOST = 190, 22, 760, 7.0  # pixels, and the multiple of the floor at the right end


def bars_of(source: tuple[str, str, int], cases: dict[str, str]) -> tuple[float, list[tuple[str, float]]]:
    """The floor of the first case, and the measured time of each, in ms."""
    file, table, num_rows = source
    found = [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]
    rows = {row["case"]: row for row in found if row["table"] == table and row.get("rows", 1) == num_rows}
    return rows[next(iter(cases))]["floor_ms"], [(name, rows[case]["ms"]) for case, name in cases.items()]


def picture() -> str:
    """Steps as multiples of what the link needs for the bytes that headrace moves."""
    scale = (WIDTH - LEFT - 170) / MOST
    parts, y = [], 58
    for title, source, cases in GROUPS:
        floor_ms, bars = bars_of(source, cases)
        parts.append(f'<text x="12" y="{y}" font-weight="bold">{title}</text>')
        for name, ms in bars:
            y += BAR + 4
            color = "#1b7f5c" if name == "headrace" else "#b8bec4"
            width = scale * ms / floor_ms
            label = f"{ms:.0f} ms, {ms / floor_ms:.2f} x floor"
            parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{name}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y - 15}" width="{width:.1f}" height="{BAR - 2}" fill="{color}"/>')
            parts.append(f'<text x="{LEFT + width + 6:.1f}" y="{y}">{label}</text>')
        y += 40
    floor = LEFT + scale
    line = f'<line x1="{floor:.1f}" y1="40" x2="{floor:.1f}" y2="{y - 22}" stroke="#c0392b" stroke-dasharray="4 3"/>'
    head = "Time of a step, measured on an NVIDIA H200 (PCIe 5.0); shorter is better. Dashed: what the link needs."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" '
        f'font-family="sans-serif" font-size="13" fill="#222">\n<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="12" y="24">{head}</text>\n' + "\n".join([*parts, line]) + "\n</svg>\n"
    )


def main() -> int:
    stale = []
    if not PICTURE.exists() or PICTURE.read_text() != picture():
        stale.append(str(PICTURE.relative_to(ROOT)))
        if "--check" not in sys.argv:
            PICTURE.write_text(picture())
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text()
        if rewrite(text) != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in sys.argv:
                path.write_text(rewrite(text))
    if stale:
        print("tables differ from the raw results in:" if "--check" in sys.argv else "rewritten:", *stale)
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
