"""Two GPUs with offloaded weights against four without, inside vLLM: requests per second and GPU.

    python benchmarks/vllm_two_against_four.py OUT_FOLDER [--cases collectives two still four two-again four-again]
    python benchmarks/vllm_two_against_four.py OUT_FOLDER --publish TABLE     rows for benchmarks/results, on stdout

============  ==================================================================================================
collectives   no vLLM: copies of two ranks beside all-reduces (copies_beside_collectives.py)
two           tensor parallel over two GPUs, every second layer offloaded with two slots, mode cpu
still         the same boundaries and nothing moved; it takes the memory that ``two`` does not have
four          tensor parallel over four GPUs, vLLM's own worker, everything resident
two-again     a second start of ``two``, asked for the first recipe alone; ``four-again`` likewise
============  ==================================================================================================

The model is made on the GPUs, from seeds (two_four_plans.py has its shape, the recipes and the predictions). In every
worker but those of ``still`` an allocation leaves 34 GB of its GPU (``--left-gb``), so that two GPUs do not hold the
model: ``two`` is refused where a rank's share of the weights would fit. Where there are four GPUs, ``two`` and
``still`` start at once, on GPUs 0, 1 and 2, 3, and are asked one after the other; otherwise all cases run one by one.
``two`` and ``still`` need two GPUs, ``four`` needs four: each half runs by itself and appends its rows to
OUT_FOLDER/two-against-four.jsonl as they come; a case whose rows are there is not run again.

Bits: ``two`` and ``still`` answer the same prompts (``BITS``), one after the other; tokens and log-probabilities have
to be the same in both, or the exit code is 1, and ``two`` has to have moved bytes. Its counters leave out the copies
that CUDA graphs replay, that is, nearly all of a decode step.

Expected, from plans with the rates of an H200 and two all-reduces a layer, without attention (``two_four_plans.py``
prints them): a prefill step of 8192 tokens takes 449 ms on two GPUs, whose copies (308 ms) it hides, and 270 ms on
four: 1.20 times the requests per second and GPU, 4.4 against 3.7. The bar is 1.07. Tokens one after another wait for
the link: 308 ms each for any batch, against 6 ms on four GPUs; offloading is no way to decode. Measured on four H200s:
1.095 and 1.083 times (docs/benchmarks/2026-11-26-two-against-four.md has why).

``--tiny``: a small model on CPU ranks (vLLM for CPUs, tests/support on PYTHONPATH), short recipes, nothing capped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import torch

import copies_beside_collectives
from seeded_models import write_config, write_words
from seeded_weights import use_seeded_weights
from two_four_plans import (
    CASES,
    CONFIG,
    GROUP,
    LEFT_BYTES,
    RECIPES,
    STEP_TOKENS,
    TINY,
    TINY_RECIPES,
    Rank,
    describe,
    predictions,
    ratios,
    step_ms,
    unknown,
    with_missing,
)
from vllm_cases import Recipe
from vllm_offload import compared
from vllm_serve import bench, own_caches, recipe_row, server_environment, vllm_command
from vllm_server import ask_ranks, started, wait_until_healthy

BITS = ((4, 128), (1, 2047))  # prompts, tokens of each
TINY_BITS = ((2, 20),)
BITS_TOKENS = 16
BESIDE = {"still": "two", "two-again": "two", "four-again": "four"}
START_S = 400.0
_LEFT = "BENCH_LEFT_BYTES"  # for a worker
_START = "BENCH_START_S"  # for a client
# Without NVLink's multicast, which can take GPUs that others share out of service.
_NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_USE_V2_MODEL_RUNNER": "0"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", nargs="+", choices=["collectives", *CASES], default=["collectives", *CASES])
    parser.add_argument("--work", type=Path, default=Path("build/two-against-four"), help="for model, caches and logs")
    parser.add_argument("--left-gb", type=float, default=LEFT_BYTES / 1e9, help="of each GPU that workers may take")
    parser.add_argument("--tiny", action="store_true", help="a small model on CPU ranks")
    parser.add_argument("--publish", metavar="TABLE", help="print the rows in OUT_FOLDER as JSON lines")
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.work = given.work.resolve()
    for folder in (given.out, given.work):
        folder.mkdir(parents=True, exist_ok=True)
    if given.publish:
        recipes, others = _split(_rows(given.out))
        for row in [*predictions(), *with_missing(recipes), *others]:
            kind = {"collectives": "-links", "bits": "-bits"}.get(row["case"], "")
            print(json.dumps({"table": given.publish + kind, **row}))
    elif given.client:
        _ask(given)
    else:
        _run(given)


def _run(given: argparse.Namespace) -> None:
    if given.tiny:
        path = importlib.import_module("vllm_cpu_engine").name_distribution(given.work)
        os.environ["PYTHONPATH"] = os.pathsep.join([path, os.environ["PYTHONPATH"]])
    config = TINY if given.tiny else CONFIG
    write_words(write_config(given.work / "model", config), config["vocab_size"])
    done = {row["case"] for row in _rows(given.out)}
    left = [case for case in CASES if case in given.cases and case not in done]
    if not given.tiny and "two" in left and (weights := Rank(2, offloads=True).weight_bytes) <= given.left_gb * 1e9:
        raise SystemExit(f"--left-gb {given.left_gb}: a rank's {weights / 1e9:.1f} GB of weights would fit; leave less")
    if "collectives" in given.cases and "collectives" not in done:
        for row in copies_beside_collectives.measure(2, given.tiny):
            _append(given.out, {**row, "case": "collectives", "status": "measured"})
    for cases in _at_once(left, torch.cuda.device_count()):
        _measure(cases, given)
        _compare(given)
    _compare(given)  # also where the last run was ended before it could
    recipes, others = _split(_rows(given.out))
    if not any(row["case"] == "bits" for row in others):
        print("bits: two and still were not both asked")
    for row in others:
        print(row["bits"] if row["case"] == "bits" else copies_beside_collectives.describe(row))
    recipes = [*predictions(), *with_missing(recipes)]
    print("\n".join([*map(describe, recipes), *ratios(recipes)]))
    sys.exit(not all(row["bit_equal"] for row in others))


def _at_once(cases: Sequence[str], num_gpus: int) -> Iterator[list[str]]:
    """The cases whose servers start together."""
    pair = [case for case in cases if case in ("two", "still")]
    if num_gpus >= 4 and len(pair) == 2:
        yield pair
        cases = [case for case in cases if case not in pair]
    yield from ([case] for case in cases)


# -- servers -----------------------------------------------------------------------------------------------------------


def _measure(cases: Sequence[str], given: argparse.Namespace) -> None:
    """Start the servers of ``cases`` and ask one after the other; one that fails is left out, with a line."""
    with ExitStack() as stack:
        servers = {}
        for index, case in enumerate(cases):
            log = given.work / f"{case}.log"
            environment = _environment(case, given, first_gpu=2 * index)
            url, child = stack.enter_context(started(_command(case, given), log, environment=environment))
            servers[case] = url, child, log, time.monotonic()
        for case, (url, child, log, begin) in servers.items():
            try:
                wait_until_healthy(url, child, log, START_S)
            except SystemExit as error:
                print(f"{case}: {error}", flush=True)
                continue
            start_s = time.monotonic() - begin if len(cases) == 1 else None
            command = [sys.executable, __file__, str(given.out), "--client", url, "--cases", case]
            command += ["--work", str(given.work), *["--tiny"] * given.tiny]
            environment = {**server_environment(given.work), _START: json.dumps(start_s)}
            with (given.work / f"{case}-client.log").open("w") as output:
                code = subprocess.run(command, env=environment, stdout=output, stderr=output).returncode
            print(f"{case}: asked, exit code {code}; see {output.name}" if code else f"{case}: asked", flush=True)


def _command(case: str, given: argparse.Namespace) -> list[str]:
    """The server of a case, without its port."""
    tiny = "Tiny" * given.tiny
    flags = {
        "tensor-parallel-size": CASES[case].ranks,
        "worker-cls": f"vllm_two_against_four.{tiny}{CASES[case].worker}",
        "load-format": "dummy",
        "max-num-seqs": 64,
        "max-num-batched-tokens": 256 if given.tiny else STEP_TOKENS,
        "kv-cache-memory-bytes": "64M" if given.tiny else "4G",
        # Checked at the start, before a worker takes what it leaves to nobody.
        "gpu-memory-utilization": 0.3,
        **({} if CASES[case].worker == "ResidentWorker" else {k.replace("_", "-"): v for k, v in GROUP.items()}),
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [*vllm_command(given.work / "model"), *words, *["--enforce-eager"] * given.tiny]


def _environment(case: str, given: argparse.Namespace, first_gpu: int) -> dict[str, str]:
    ranks = CASES[case].ranks
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(str(first_gpu + rank) for rank in range(ranks))}
    own = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        **(_ON_CPU if given.tiny else {}),
        **own_caches(given.work, case.removesuffix("-again")),  # a second start finds what the first compiled
        **({} if given.tiny else gpus),
    }
    if CASES[case].is_capped and not given.tiny:
        own |= {_LEFT: str(int(given.left_gb * 1e9))}
    return {**server_environment(given.work), **_NO_MULTICAST, **own}


# -- inside of a client's process --------------------------------------------------------------------------------------


def _ask(given: argparse.Namespace) -> None:
    case, url, model = given.cases[0], given.client, given.work / "model"
    recipes: dict[str, Recipe] = TINY_RECIPES if given.tiny else RECIPES
    start_s = json.loads(os.environ[_START])
    if case in ("two", "still"):
        answers = _bits(url, model, TINY_BITS if given.tiny else BITS)
        (given.work / f"{case}-bits.json").write_text(json.dumps(answers))
    for number, (name, recipe) in enumerate(list(recipes.items())[: CASES[case].num_recipes]):
        before = ask_ranks(url, "bench_facts")
        result = given.work / f"{case}-{number}.json"
        bench(url, model, result, recipe, seed=number)
        after = ask_ranks(url, "bench_facts")
        found = json.loads(result.read_text())
        row = {**unknown(case, name), **recipe_row(case, name, recipe, found), "step_ms": step_ms(found)}
        row |= _same_texts(case, number, found, given.work)
        moved = [now["bytes_moved"] - then["bytes_moved"] for now, then in zip(after, before, strict=True)]
        row |= {
            "status": "measured",
            "requests_per_s_gpu": recipe.requests / row["duration_s"] / CASES[case].ranks,
            "moved_bytes": max(moved),
            "moved_by_rank": moved,
            "facts_by_rank": after,
            "start_s": start_s,
        }
        if case.startswith("two"):
            if not min(moved) > 0:
                raise SystemExit(f"{case}, {name}: ranks moved {moved} bytes")
        elif any(moved):
            raise SystemExit(f"{case}, {name}: ranks moved {moved} bytes, and nothing should move")
        _append(given.out, row)


def _same_texts(case: str, number: int, found: dict[str, Any], work: Path) -> dict[str, Any]:
    """How many answers are those of the case with the same weights; requests may have fallen into other steps there."""
    beside = BESIDE.get(case)
    path = work / f"{beside}-{number}.json"
    if beside is None or not path.exists():
        return {}
    wanted = json.loads(path.read_text())["generated_texts"]
    same = sum(a == b for a, b in zip(found["generated_texts"], wanted, strict=True))
    return {"compared_with": beside, "same_texts": same}


def _bits(url: str, model: Path, loads: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Tokens and log-probabilities of greedy answers to seeded prompts, asked one after the other."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    answers = []
    for num_prompts, num_tokens in loads:
        for prompt in torch.randint(
            2, vocabulary, (num_prompts, num_tokens), generator=torch.Generator().manual_seed(0)
        ):
            asked = {"model": str(model), "prompt": prompt.tolist(), "max_tokens": BITS_TOKENS, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json={**asked, "ignore_eos": True, "logprobs": 1}, timeout=120)
            answer.raise_for_status()
            answers.append(answer.json()["choices"][0]["logprobs"])
    return {
        "tokens": [answer["tokens"] for answer in answers],
        "logprobs": [answer["token_logprobs"] for answer in answers],
    }


# -- what was found ----------------------------------------------------------------------------------------------------


def _rows(out: Path) -> list[dict[str, Any]]:
    path = out / "two-against-four.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _split(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Those of recipes, and the others, which compare bits."""
    return [row for row in rows if "recipe" in row], [row for row in rows if "recipe" not in row]


def _compare(given: argparse.Namespace) -> None:
    """Append whether ``two`` answers as ``still`` does, once both were asked."""
    paths = [given.work / f"{case}-bits.json" for case in ("two", "still")]
    if any(row["case"] == "bits" for row in _rows(given.out)) or not all(path.exists() for path in paths):
        return
    two, still = (json.loads(path.read_text()) for path in paths)
    row = {"case": "bits", "status": "measured", "bits": compared(two, still), "bit_equal": two == still}
    _append(given.out, row)


def _append(out: Path, row: dict[str, Any]) -> None:
    with (out / "two-against-four.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


# -- inside of a worker's process --------------------------------------------------------------------------------------


def __getattr__(name: str) -> Any:
    """``vllm_two_against_four.Worker``, ``NoCopyWorker``, ``ResidentWorker`` and ``Tiny...``, as vLLM asks for them."""
    if name not in {f"{size}{case.worker}" for size in ("", "Tiny") for case in CASES.values()}:
        raise AttributeError(name)
    use_seeded_weights()
    from no_copy import moves_nothing

    if name.endswith("ResidentWorker"):
        module, kind = ("cpu_worker", "CPUWorker") if "Tiny" in name else ("gpu_worker", "Worker")
        worker = getattr(importlib.import_module(f"vllm.v1.worker.{module}"), kind)
    else:
        worker = importlib.import_module("vllm_cpu_engine" if "Tiny" in name else "headrace.adapters.vllm").Worker
    return _capped(moves_nothing(worker) if "NoCopy" in name else worker)


def _capped(worker: Any) -> Any:
    """``worker``, which has as much of its GPU as ``BENCH_LEFT_BYTES`` says, and tells what it took and moved."""

    class Capped(worker):  # type: ignore[misc]
        def load_model(self, **kwargs: Any) -> None:
            if _LEFT in os.environ:
                self._taken = _all_but(int(os.environ[_LEFT]), self.device)
            super().load_model(**kwargs)

        def bench_facts(self) -> dict[str, Any]:
            stats = self.headrace_stats() if hasattr(self, "headrace_stats") else {}
            facts = {key: stats.get(key, 0) for key in ("bytes_moved", "moved_bytes_per_forward", "prefetched_bytes")}
            if _LEFT in os.environ:
                facts["taken_bytes"] = self._taken.nbytes
            if torch.cuda.is_available():
                facts["peak_device_bytes"] = torch.cuda.max_memory_allocated()
            return facts

    return Capped


def _all_but(left_bytes: int, device: torch.device) -> torch.Tensor:
    """An allocation of all free memory of ``device`` but ``left_bytes``."""
    free_bytes = torch.cuda.mem_get_info(device)[0]
    if free_bytes < left_bytes:
        raise SystemExit(f"{device} has {free_bytes} bytes free, and --left-gb leaves {left_bytes}: give it less")
    return torch.empty(free_bytes - left_bytes, dtype=torch.uint8, device=device)


if __name__ == "__main__":
    main()
