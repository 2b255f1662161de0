"""Cached experts inside vLLM: resident, read in place, and with a part of them on the GPU; one engine each.

    python benchmarks/vllm_experts.py OUT [--shape deepseek] [--layers N] [--format fp8] [--share 0.5] [--cases NAME...]
    python benchmarks/vllm_experts.py OUT --publish TABLE        raw results for benchmarks/results, on stdout

Shapes are those of published models, with seeded weights; Marlin runs the formats of four bits, and with ``--kernel
triton`` triton_kernels runs MXFP4. All cases take the same choices of experts from tables (driven_routing.py), which
replace the router's: with a stated share of hits for a cache of this size, and the seeded trace that the project ships.
A step is the slope between two lengths of the answer, prefill left out; tokens and log-probabilities are compared to
the last bit with those of ``still``, which has the same boundaries and moves nothing, or without it with those of
``resident``. The floor of a step is the bytes of missing experts at 50 GB/s, and the step of ``resident``. ``--budget-
gib`` gives the weights so much and lets the planner choose the number of slots; ``budget`` gives them the same without
a rule.

With ``--together FILE`` the engines of all cases start at once and take turns to measure, and so do those of other runs
that name this file; device memory is then left out. With ``--rounds`` they take turns so many times, and a row has the
median of its rounds. Two compilations may round in two ways: with ``--bits eager``
nothing is compiled, with ``--bits artifact`` all cases take the code that the first one has compiled, and both compare
bits and time nothing; with HEADRACE_DEBUG=1 each step also compares the rows that a kernel has read with the store.
``uva``, ``prefetch`` and ``flextensor`` are offloaders of others in the memory of ``--budget-gib``; their weights have
other values, and bits are not compared. ``--card`` is all that torch's allocator may take of the device once an engine
has started, and ``--one`` measures one sequence alone.
With ``--starts`` engines start and end, in the order given, and ``OUT/starts.jsonl`` has the seconds; a case that
started before finds its compiled code.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace.sizes import parse_size
from published_configs import (
    AWQ,
    DEEPSEEK_V2_LITE,
    GLM_4_5_AIR,
    GPT_OSS_20B,
    GPT_OSS_120B,
    GPTQ,
    INT4,
    MXFP4,
    NVFP4,
    QWEN3_30B_A3B,
)
from seeded_models import use_seeded_weights, write_config
from vllm_offload import (
    FLEXTENSOR,
    NO_COPY,
    ONE_ROUNDING,
    WORKER,
    compared,
    engine_environment,
    host_memory,
    prompts,
    run_logged,
    sampling,
    scored,
    use_flextensor,
)

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("deepseek-v2-lite", DEEPSEEK_V2_LITE),
    "qwen": ("qwen3-30b-a3b", QWEN3_30B_A3B),
    "gpt-oss-20b": ("gpt-oss-20b", GPT_OSS_20B),
    "gpt-oss-120b": ("gpt-oss-120b", GPT_OSS_120B),
    "glm": ("glm-4.5-air", GLM_4_5_AIR),
}
OWN = ("still", "cache", "in-place", "budget")  # headrace's worker
CASES = (*OWN, "resident", "uva", "prefetch", "flextensor")
HITS = (0.0, 0.5, 0.67, 0.8, 0.9, 1.0)
QUANTISED: dict[str, Any] = {
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "mxfp4": MXFP4,
    "gptq": GPTQ,
    # Part of a name, and not "gate", as a dense layer has a gate_up_proj.
    "awq": {**AWQ, "modules_to_not_convert": ["mlp.gate"]},
    "int4": INT4,
    "nvfp4": NVFP4,
}
# Bytes of a weight and its part of the scales and zero points.
_BYTES_OF_4_BITS = {
    "mxfp4": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
    "gptq": 0.5 + 2 / 128,
    "int4": 0.5 + 2 / 128,
    "awq": 0.5 + 2.5 / 128,
}
BYTES = {"bf16": 2.0, "fp8": 1.0, **_BYTES_OF_4_BITS}
LENGTHS, REPEATS, SCORED = {1: (8, 136), 16: (8, 24)}, 2, 16
SLOW_LENGTHS = {1: (4, 16), 16: (4, 12)}  # of offloaders that move whole layers for each token
LINK_BYTES_PER_S = 50e9  # of the bar
STEPS = 600  # of a table
PROMPTS = 2047, 8191  # tokens
_PAUSE_S = 0.4  # in which another engine takes its turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="deepseek")
    parser.add_argument("--layers", type=int, help="default those of the published model")
    parser.add_argument("--format", choices=BYTES, default="bf16")
    parser.add_argument("--kernel", choices=["triton", "marlin"], help="that runs experts; default by the format")
    parser.add_argument("--budget-gib", type=float, help="for the weights, in place of --share")
    parser.add_argument("--share", type=float, default=0.5, help="of the experts of a layer on the GPU")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="may be repeated with --starts")
    parser.add_argument("--limit-s", type=float, help="end an engine that takes longer, and go on with the next")
    parser.add_argument(
        "--together", type=Path, metavar="FILE", help="start all engines at once; measure one at a time"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of all loads but prompts")
    parser.add_argument("--bits", choices=["eager", "artifact"], help="compare bits and time nothing")
    parser.add_argument("--scored", type=int, default=SCORED, help="tokens that are compared of one sequence")
    parser.add_argument("--starts", action="store_true", help="measure nothing but the time to start")
    parser.add_argument("--card", type=parse_size, help="device memory for torch's allocator, from the start on")
    parser.add_argument("--one", action="store_true", help="measure one sequence alone, by the seeded trace")
    parser.add_argument("--kv-gib", type=float, default=2, help="of the KV cache")
    parser.add_argument("--publish", metavar="TABLE")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    name, published = SHAPES[given.shape]
    config = {**published}
    config["num_hidden_layers"] = given.layers or config["num_hidden_layers"]
    if given.format in QUANTISED:
        config["quantization_config"] = QUANTISED[given.format]
    if given.format == "awq" and config.get("first_k_dense_replace"):
        # The first layer of GLM-4.5-Air is 10,944 wide, which has no whole groups of 128.
        config["quantization_config"] = {**QUANTISED["awq"], "modules_to_not_convert": ["mlp.gate", "layers.0.mlp"]}
    if given.format == "fp8":
        # vLLM quantises activations in whole blocks of 128, and the first layer of DeepSeek-V2-Lite is 10,944 wide.
        config["intermediate_size"] = -(-config["intermediate_size"] // 128) * 128
    if given.publish:
        for row in _published(given.out, config, given.format):
            if row["ms"] is not None or given.bits:
                how = {"format": given.format, **({"kernel": given.kernel} if given.kernel else {})}
                print(json.dumps({"table": given.publish, "shape": name, **how, **row}))
    elif given.child:
        _measure(given, config)
    else:
        with ThreadPoolExecutor(len(given.cases) if given.together else 1) as at_once:
            list(at_once.map(lambda case: _run_child(case, given), given.cases))
        if given.starts:
            print((given.out / "starts.jsonl").read_text())
            return
        for row in _published(given.out, config, given.format):
            _print(row)


def _print(row: dict[str, Any]) -> None:
    text = f"{row['case']:9s} {row['trace']:22s}"
    if row["ms"] is not None:
        text += f" {row['ms']:8.2f} ms +- {row['spread_ms']:.2f} {row['tokens_per_s']:8.1f} tokens/s"
    if row["hits"] is not None and row["missed_bytes"] is not None and row["resident_ms"] is not None:
        floor = row["missed_bytes"] / LINK_BYTES_PER_S * 1e3 + row["resident_ms"]
        text += f", {row['hits']:.1%} hits, {row['ms'] / floor:.3f} x floor"
    print(text, "same bits" if row["bit_equal"] else row["why_not_equal"])


def _run_child(case: str, given: argparse.Namespace) -> None:
    command = [sys.executable, __file__, str(given.out), "--child", "--cases", case, "--shape", given.shape]
    command += ["--share", str(given.share), *(["--layers", str(given.layers)] if given.layers else [])]
    command += ["--format", given.format]
    command += ["--kernel", given.kernel] if given.kernel else []
    command += ["--budget-gib", str(given.budget_gib)] if given.budget_gib else []
    command += ["--scored", str(given.scored)]
    command += ["--together", str(given.together)] if given.together else []
    command += ["--rounds", str(given.rounds), *(["--card", f"{given.card}B"] if given.card else [])]
    command += ["--one"] * given.one + ["--kv-gib", str(given.kv_gib)]
    command += ["--starts"] * given.starts
    command += ["--bits", given.bits] if given.bits else []
    environment = {**engine_environment(given.out), "VLLM_CACHE_ROOT": str(given.out / f"cache-{case}")}
    if given.bits == "artifact":
        environment |= {"VLLM_CACHE_ROOT": str(given.out / "cache"), "VLLM_USE_AOT_COMPILE": "0"}
    environment["VLLM_USE_DEEP_GEMM"] = "0"  # it compiles with nvcc when the engine runs
    has_run = run_logged(case, command, environment, given.out / f"{case}.log", given.limit_s)
    if has_run and (given.out / f"{case}.json").exists():
        facts = json.loads((given.out / f"{case}.json").read_text())["facts"]
        print(case, {key: value for key, value in facts.items() if key != "offloader"}, flush=True)


def _experts(config: dict[str, Any], form: str) -> tuple[int, int, int, int]:
    """Layers with experts, experts of each, experts of a token, bytes of one as the checkpoint has it."""
    layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    count = next(config[key] for key in ("n_routed_experts", "num_experts", "num_local_experts") if key in config)
    weights = 3 * config["hidden_size"] * config.get("moe_intermediate_size", config["intermediate_size"])
    return layers, count, config["num_experts_per_tok"], int(weights * BYTES[form])


def _loads(config: dict[str, Any], form: str) -> Iterator[tuple[str, int, Any]]:
    """Name, sequences, and choices [steps, rows, top_k]."""
    import torch

    from expert_steps import ExpertsShape, driven
    from headrace.plan.routing_traces import seeded_trace

    _, count, top_k, _ = _experts(config, form)
    if count == DEEPSEEK_V2_LITE["n_routed_experts"]:
        shape = ExpertsShape(1, count, top_k, config["hidden_size"], config["moe_intermediate_size"])
        for share in HITS:
            yield f"{share:.0%} hits", 1, torch.from_numpy(driven(shape, STEPS, share).layers[0]).unsqueeze(1)
    for rows in (1, 16):
        traces = [torch.from_numpy(seeded_trace(row, STEPS, count, top_k)) for row in range(rows)]
        yield f"seeded trace, {rows} seq", rows, torch.stack(traces, dim=1)


def _measure(given: argparse.Namespace, config: dict[str, Any]) -> None:
    import torch
    from vllm import LLM

    from driven_routing import replay_routing
    from headrace.config import debug_enabled

    out, case, share = given.out, given.cases[0], given.share
    turn = None if given.together is None else given.together.open("a")
    if turn is not None:
        fcntl.flock(turn, fcntl.LOCK_SH)  # nobody measures while an engine starts
    layers, count, top_k, size = _experts(config, given.format)
    folder = write_config(out / f"model-{case}", config)
    use_seeded_weights()
    torch.cuda.init()
    replay = replay_routing(layers, STEPS, top_k)
    replay.begin(torch.arange(16 * top_k).view(1, 16, top_k) % count)
    if given.budget_gib:
        budget: dict[str, Any] = {"device_memory": int(given.budget_gib * 2**30)}
        cached = {**budget, "rules": ["experts=cache"]}
    else:  # what is not experts takes less than the last part
        budget = {"device_memory": layers * round(share * count) * (size + (2 << 20)) + int(3.5 * 2**30)}
        cached = {**budget, "rules": ["experts=cache"], "expert_slots": round(share * count)}
    own: dict[str, Any] = {
        "still": cached,
        "cache": cached,
        "in-place": {**budget, "rules": ["experts=uva"]},
        "budget": budget,
    }.get(case, {})
    worker = NO_COPY if case == "still" else WORKER
    others = {} if case in OWN or case == "resident" else _other_offloader(case, config, given)
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": [1, 16], **ONE_ROUNDING}
    if given.bits == "eager":
        compilation = {}
    elif given.bits == "artifact":
        compilation |= {"cache_dir": str(out / "artifact")}  # vLLM's own place depends on our options
    (before, (free, total)), begin = (host_memory(), torch.cuda.mem_get_info()), time.perf_counter()
    engine = LLM(
        model=str(folder),
        load_format="dummy",
        moe_backend=given.kernel or ("triton" if given.format in ("bf16", "fp8") else "marlin"),
        skip_tokenizer_init=True,
        max_model_len=PROMPTS[-1] + 257,
        max_num_seqs=16,
        max_num_batched_tokens=PROMPTS[-1] + 257,
        kv_cache_memory_bytes=int(given.kv_gib * 2**30),
        gpu_memory_utilization=0.9 if turn is None else 0.1,
        enable_prefix_caching=False,
        disable_log_stats=True,
        enforce_eager=given.bits == "eager",
        compilation_config=compilation,
        **({"worker_cls": worker, "additional_config": {"headrace": own}} if own else others),
    )
    start_s = time.perf_counter() - begin
    start_peak = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if given.card:
        torch.cuda.set_per_process_memory_fraction(given.card / total)
    if given.starts:
        with (out / "starts.jsonl").open("a") as lines:
            lines.write(json.dumps({"case": case, "start_s": start_s, **_added(before)}) + "\n")
        return
    facts = {
        "start_s": start_s,
        "device_bytes": free - torch.cuda.mem_get_info()[0] if turn is None else None,
        "start_peak_device_bytes": start_peak,
        "experts_bytes": layers * count * size,
        "started_with_others": turn is not None,
        "compiled": {None: "each by itself", "eager": "not", "artifact": "once for all"}[given.bits],
        "rows_compared": bool(own) and debug_enabled(),
    }
    if turn is not None:
        fcntl.flock(turn, fcntl.LOCK_EX)
    rows: list[dict[str, Any]] = []
    loads = [load for load in _loads(config, given.format) if not given.one or load[0] == "seeded trace, 1 seq"]
    for number, (name, _, choices) in enumerate(loads * given.rounds):
        if number and turn is not None and given.rounds > 1:
            fcntl.flock(turn, fcntl.LOCK_UN)
            time.sleep(_PAUSE_S)
            fcntl.flock(turn, fcntl.LOCK_EX)
        is_timed = case in ("cache", "budget") or "trace" in name or (case, name) == ("in-place", "0% hits")
        if is_timed or case == "still":
            is_timed &= given.bits is None and (case != "still" or name == "100% hits")  # what the cache itself takes
            rows.append({"load": name, **_run(engine, case, replay, choices, is_timed, given.scored)})
        facts["offloader"] = engine.collective_rpc("headrace_stats")[0] if own else {}
        facts |= _added(before) | _held(facts["offloader"])
        (out / f"{case}.json").write_text(json.dumps({"facts": facts, "rows": rows}))
    for length in PROMPTS if given.bits is None else ():
        replay.begin(choices[:, :1].transpose(0, 1) if given.one else choices)  # tokens choose as those of a text
        rows.append({"load": f"{length} in, 1 out", **_prefill(engine, case, length)})
        facts |= _held(facts["offloader"])
        (out / f"{case}.json").write_text(json.dumps({"facts": facts, "rows": rows}))


def _by_load(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rounds of each load."""
    return {load: [row for row in rows if row["load"] == load] for load in dict.fromkeys(row["load"] for row in rows)}


def _merged(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of all rounds: the median of their times, and how far these are apart."""
    if len(rounds) == 1 or rounds[0]["ms"] is None:
        return rounds[0]
    times = [row["ms"] for row in rounds]
    means = {key: [row[key] for row in rounds] for key in ("hits", "missed_per_step") if rounds[0][key] is not None}
    ms = statistics.median(times)
    merged = {**rounds[0], **{key: statistics.mean(values) for key, values in means.items()}, "ms": ms}
    return {**merged, "spread_ms": max(times) - min(times), "tokens_per_s": rounds[0]["sequences"] / ms * 1e3}


def _other_offloader(case: str, config: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the engine: experts beyond the budget are elsewhere, of whole layers if they are prefetched."""
    layers, count, _, size = _experts(config, given.format)
    hidden, heads = config["hidden_size"], config["num_attention_heads"] + config["num_key_value_heads"]
    rest = 2 * (2 * config["vocab_size"] * hidden + layers * 2 * hidden * config["head_dim"] * heads)
    beyond = layers * count * size + rest - int(given.budget_gib * 2**30)
    if case == "uva":
        return {"cpu_offload_gb": beyond / 2**30, "cpu_offload_params": {"experts"}}
    if case == "prefetch":  # and one layer of slots
        moved = beyond / (count * size) + 1
        group = next(n for n in range(2, layers + 1) if layers % n == 0 and layers - layers // n >= moved)
        return {"offload_group_size": group, "offload_num_in_group": group - 1, "offload_params": {"experts"}}
    use_flextensor(int(given.budget_gib * 2**30))
    return {"worker_cls": FLEXTENSOR}


def _held(offloader: dict[str, Any]) -> dict[str, int]:
    """Device memory since the start, of torch's allocator and of slots, and what is pinned in host memory."""
    import torch

    stores = offloader.get("store_bytes", {})
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    device = torch.cuda.max_memory_reserved() + stores.get("cache", 0)
    return {"peak_device_bytes": device, "host_bytes": stores.get("host_pinned", pinned)}


def _added(before: dict[str, int]) -> dict[str, int]:
    return {f"added_{key}": now - before[key] for key, now in host_memory().items()}


def _counts(engine: Any, has_worker: bool) -> tuple[int, int, int]:
    """Experts that all steps so far found and missed, and steps."""
    layers = engine.collective_rpc("headrace_stats")[0].get("experts", []) if has_worker else []
    missed = sum(layer["fetched"] + layer["in_place"] for layer in layers)
    return sum(layer["hits"] for layer in layers), missed, layers[0]["steps"] if layers else 0


def _run(engine: Any, case: str, replay: Any, choices: Any, is_timed: bool, length: int) -> dict[str, Any]:
    sequences = choices.shape[1]
    asked, found = prompts(sequences, 16), []
    has_worker = case in OWN
    begun = _counts(engine, has_worker)
    for _ in range(2):  # an engine may round otherwise in its first steps
        replay.begin(choices)
        found.append(scored(engine, asked, length if sequences == 1 else SCORED))
    slopes: list[float] = []
    hits, missed, steps = 0, 0, 0
    if not is_timed:  # with HEADRACE_DEBUG=1 each of these steps compares rows, and a difference raises here
        hits, missed, steps = (now - then for now, then in zip(_counts(engine, has_worker), begun, strict=True))
    short, long = (LENGTHS if has_worker or case == "resident" else SLOW_LENGTHS)[sequences]
    for _ in range(REPEATS if is_timed else 0):
        times = []
        for length, sign in ((short, -1), (long, 1)):  # so that prefill counts in neither
            before, begin = _counts(engine, has_worker), time.perf_counter()
            engine.generate(asked, sampling(length), use_tqdm=False)
            times.append(time.perf_counter() - begin)
            grown = [sign * (now - then) for now, then in zip(_counts(engine, has_worker), before, strict=True)]
            hits, missed, steps = hits + grown[0], missed + grown[1], steps + grown[2]
        slopes.append((times[1] - times[0]) / (long - short) * 1e3)
    ms = statistics.median(slopes) if slopes else None
    return {
        "sequences": sequences,
        "ms": ms,
        "spread_ms": max(slopes) - min(slopes) if slopes else None,
        "tokens_per_s": sequences / ms * 1e3 if ms else None,
        "hits": hits / (hits + missed) if hits + missed else None,
        "missed_per_step": missed / steps if steps else 0 if case in ("resident", "still") else None,
        "steps": steps,
        "repeats_itself": found[0] == found[1],
        "first_answers": found[0],
        **found[1],
    }


def _prefill(engine: Any, case: str, length: int) -> dict[str, Any]:
    asked, times = prompts(1, length), []
    for _ in range(4):
        begin = time.perf_counter()
        answers = scored(engine, asked, 1)
        times.append(time.perf_counter() - begin)
    ms = statistics.median(times[1:]) * 1e3
    return {
        "sequences": 1,
        "ms": ms,
        "spread_ms": (max(times[1:]) - min(times[1:])) * 1e3,
        "tokens_per_s": length / ms * 1e3,
        "hits": None,
        "missed_per_step": 0 if case in ("resident", "still") else None,
        "repeats_itself": None,  # each takes other steps of the table
        **answers,
    }


def _published(out: Path, config: dict[str, Any], form: str) -> Iterator[dict[str, Any]]:
    found = {name: json.loads(path.read_text()) for name in CASES if (path := out / f"{name}.json").exists()}
    layers, count, _, size = _experts(config, form)
    unmoved = _by_load(found.get("still", found.get("resident", {"rows": []}))["rows"])
    # Of one sequence, and of several; a prompt has steps of its own.
    plain = [_merged(rows) for rows in _by_load(found.get("resident", {"rows": []})["rows"]).values()]
    resident = {row["sequences"]: row["ms"] for row in plain if "trace" in row["load"]}
    resident_by_load = {row["load"]: row["ms"] for row in plain}
    for case, result in found.items():
        facts = {key: value for key, value in result["facts"].items() if key != "offloader"}
        experts = result["facts"]["offloader"].get("experts", [])
        size = experts[0]["expert_bytes"] if experts else size  # a kernel may pad them
        for load, rounds in _by_load(result["rows"]).items():
            pairs = list(zip(rounds, unmoved.get(load, [None] * len(rounds)), strict=False))
            differ = [(a, b) for a, b in pairs if b is None or any(a[key] != b[key] for key in ("tokens", "logprobs"))]
            equal, row = not differ, _merged(rounds)
            why = "nothing to compare with" if load not in unmoved else compared(*differ[0]) if differ else ""
            yield {
                "case": f"{case if case == 'budget' else 'slots'} {experts[0]['num_slots']}"
                if experts
                else case.replace("-", " "),
                "layers": layers,
                "experts": count,
                "trace": row["load"],
                "rows": row["sequences"],
                **{key: row[key] for key in ("ms", "spread_ms", "tokens_per_s", "hits")},
                "missed_bytes": None if (missed := row["missed_per_step"]) is None else missed * size,
                "resident_ms": resident_by_load.get(row["load"], resident.get(row["sequences"])),
                "repeats_itself": row.get("repeats_itself"),
                "steps": row.get("steps"),
                "bit_equal": equal,
                **({} if equal else {"why_not_equal": why}),
                **facts,
            }


if __name__ == "__main__":
    main()
