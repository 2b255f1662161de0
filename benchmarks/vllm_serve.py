"""vLLM's published recipe (``vllm bench serve``) against a server resident, with its own offloader, and with headrace.

``serve``, ``serve-budget`` and ``serve-resident`` are ``headrace serve``, transformers' server, with the same flags, in
the same device memory by a budget, and resident.

    python benchmarks/vllm_serve.py OUT_FOLDER [--layers 12] [--cases NAME...] [FLAG OF VLLM...]
    python benchmarks/vllm_serve.py OUT_FOLDER --publish TABLE        raw results for benchmarks/results, on stdout

Qwen3-8B's shape with seeded weights and a tokenizer of one word per token, both written into OUT_FOLDER, so no network
is needed. ``--layers 0`` takes a tiny shape, for a CPU. A case whose results lie in OUT_FOLDER is not run again. Every
request has to succeed, and headrace to have moved bytes (a budget may read all in place instead); texts of one request
at a time are compared with those of ``still`` (headrace with nothing moved), or without it with those of ``resident``,
which another compiler's rounding may change. Flags of vLLM behind go to every server of vLLM; what a machine lacks of
vLLM's optional kernels is named in ``BENCH_WITHOUT`` (modules, comma-separated). ``--together`` starts the
servers of all cases before the first is asked: less time, one is asked at a time, but starts are not comparable and are
left out. Each vLLM then needs its share of the device: ``--kv-cache-memory-bytes 8G --gpu-memory-utilization 0.1``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from published_configs import QWEN3_8B
from seeded_models import QWEN3_TINY, write_config, write_weights, write_words
from vllm_offload import GROUP, NO_COPY, ONE_ROUNDING, WORKER, python_path, same_memory

# `vllm` itself is not on the path of every machine that can import vLLM.
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
GROUP_FLAGS = [word for name, value in GROUP.items() for word in ("--" + name.replace("_", "-"), str(value))]
CASES = ("resident", "headrace", "budget", "vllm", "still", "serve", "serve-budget", "serve-resident")


class Recipe(NamedTuple):
    """What ``vllm bench serve`` asks."""

    tokens_in: int
    tokens_out: int
    requests: int
    at_once: int | None  # None: all
    warmups: int = 1


RECIPES = {
    "2047 in, 1 out": Recipe(2047, 1, 64, None),
    "128 in, 128 out; 1 at once": Recipe(128, 128, 4, 1),
    "128 in, 128 out; 4 at once": Recipe(128, 128, 8, 4),
    "128 in, 128 out; 16 at once": Recipe(128, 128, 32, 16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=12, help="of Qwen3-8B's 36; 0: a tiny shape")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES[:4]))
    parser.add_argument("--together", action="store_true", help="start all servers before the first is asked")
    parser.add_argument("--publish", metavar="TABLE", help="print the rows of all cases in OUT_FOLDER as JSON lines")
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    given, more = parser.parse_known_args()
    given.out.mkdir(parents=True, exist_ok=True)
    folder = given.out / "model"
    if given.publish:
        for row in _rows(given.out):
            print(json.dumps({"table": given.publish, **row}))
    elif given.client:
        _ask(given.client, folder, given.out, given.cases[0])
    elif given.write:
        _write_model(folder, given.layers)
    else:
        # In a process of its own, which gives the GPU back.
        subprocess.run([sys.executable, __file__, given.out, "--write", "--layers", str(given.layers)], check=True)
        left = [case for case in given.cases if not (given.out / f"{case}.json").exists()]
        for cases in [left] if given.together else [[case] for case in left]:
            _measure(cases, folder, given.out, more)
        _print(_rows(given.out))


def _write_model(folder: Path, layers: int) -> None:
    import torch

    config = {**QWEN3_8B, "num_hidden_layers": layers} if layers else QWEN3_TINY
    write_config(folder, config)
    write_words(folder, config["vocab_size"])
    write_weights(folder, "cuda" if torch.cuda.is_available() else "cpu")


def _command(case: str, folder: Path, more: Sequence[str]) -> list[str]:
    """The server of a case, without its port."""
    budget = f"{same_memory(json.loads((folder / 'config.json').read_text())) >> 10}KiB"
    if case.startswith("serve"):
        flags = {"serve": GROUP_FLAGS, "serve-budget": ["--device-memory", budget]}.get(case, [])
        return [sys.executable, "-m", "headrace", "serve", str(folder), "--batch", "1,4,16", *flags]
    own: dict[str, Any] = {}
    if case == "budget":
        own = {"device_memory": budget, "batch": [1, 4, 16]}
    flags = [] if case in ("resident", "budget") else GROUP_FLAGS
    if case in ("headrace", "budget", "still"):
        flags = [*flags, "--worker-cls", NO_COPY if case == "still" else WORKER]
    if own:
        flags = [*flags, "--additional-config", json.dumps({"headrace": own})]
    return [*vllm_command(folder), *flags, *more]


def vllm_command(folder: Path) -> list[str]:
    """The flags of every server of vLLM."""
    # vLLM refuses a prompt of more characters than so many tokens can have, and the words of the tokenizer are long.
    flags = ["--max-model-len", "4096", "--no-enable-prefix-caching", "--compilation-config"]
    flags += [json.dumps({"cudagraph_capture_sizes": [1, 2, 4, 8, 16], **ONE_ROUNDING})]
    return [*VLLM, "serve", str(folder), *flags]


def server_environment(out: Path) -> dict[str, str]:
    """Of servers and of their client."""
    paths = [python_path(out), str(Path(__file__).resolve().parent)]  # of NO_COPY
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VLLM_SERVER_DEV_MODE": "1",  # for collective_rpc
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_DETERMINISTIC": "1",  # with ONE_ROUNDING
    }


def own_caches(out: Path, case: str) -> dict[str, str]:
    """Variables with which a case finds nothing that another one compiled."""
    caches = {"VLLM_CACHE_ROOT": "cache", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    return {name: str(out / f"{kind}-{case}") for name, kind in caches.items()}


def _measure(cases: Sequence[str], folder: Path, out: Path, more: Sequence[str]) -> None:
    """Start the servers of ``cases``, and ask one after the other; one that fails is left out, with a line."""
    shared = server_environment(out)
    with ExitStack() as stack:
        begin = time.monotonic()
        servers = {}
        for case in cases:
            environment = shared | own_caches(out, case)
            starting = started(_command(case, folder, more), out / f"{case}.log", environment)
            servers[case] = stack.enter_context(starting)
        healthy = []
        for case, (url, child) in servers.items():
            try:
                wait_until_healthy(url, child, out / f"{case}.log")
                healthy.append(case)
            except SystemExit as error:
                print(f"{case}: {error}", flush=True)
        start_s = time.monotonic() - begin if len(cases) == 1 else None
        for case in healthy:
            client = [sys.executable, __file__, str(out), "--cases", case, "--client", servers[case][0]]
            with (out / f"{case}-client.log").open("w") as log:
                code = subprocess.run(client, env=shared, stdout=log, stderr=subprocess.STDOUT).returncode
            if code:
                print(f"{case}: the client ended with exit code {code}; see {log.name}", flush=True)
                continue
            moved = _moved(case, servers[case][0])
            facts = {"start_s": start_s, **{key: moved.get(key) for key in ("bytes_moved", "moved_bytes_per_forward")}}
            (out / f"{case}.json").write_text(json.dumps(facts))


def _moved(case: str, url: str) -> dict[str, Any]:
    """What headrace counts in the server of a case; nothing where it moves nothing."""
    if case not in ("headrace", "budget", "serve", "serve-budget"):
        return {}
    if case.startswith("serve"):
        metrics = httpx.get(f"{url}/metrics", timeout=60).text
        found = re.search(r"^headrace_moved_bytes_total (\S+)$", metrics, re.M)
        moved = {"bytes_moved": int(float(found[1])) if found else 0}
    else:
        moved = headrace_stats(url)
    if case in ("headrace", "serve") and not moved["bytes_moved"] > 0:
        raise SystemExit(f"{case}: nothing moved")
    return moved


def _ask(url: str, folder: Path, out: Path, case: str) -> None:
    for number, recipe in enumerate(RECIPES.values()):
        bench(url, folder, out / f"{case}-{number}.json", recipe, seed=number)


def bench(url: str, folder: Path, result: Path, recipe: Recipe, seed: int) -> None:
    """``vllm bench serve`` in this process, by its own entry point; what it found is written to ``result``."""
    from vllm.entrypoints.cli.main import main as vllm

    wanted = {
        "base-url": url,
        "model": folder,
        "dataset-name": "random",
        "random-input-len": recipe.tokens_in,
        "random-output-len": recipe.tokens_out,
        "num-prompts": recipe.requests,
        "num-warmups": recipe.warmups,
        "seed": seed,
        "temperature": 0,
        "result-dir": result.parent,
        "result-filename": result.name,
        **({} if recipe.at_once is None else {"max-concurrency": recipe.at_once}),
    }
    words = [word for name, value in wanted.items() for word in (f"--{name}", str(value))]
    sys.argv = ["vllm", "bench", "serve", *words, "--ignore-eos", "--save-result", "--save-detailed"]
    vllm()


def recipe_row(case: str, name: str, recipe: Recipe, found: dict[str, Any]) -> dict[str, Any]:
    """What ``vllm bench serve`` found; exits unless every request succeeded."""
    if found["completed"] != recipe.requests or found["failed"]:
        raise SystemExit(f"{case}, {name}: {found['completed']} of {recipe.requests} succeeded: {found['errors']}")
    if found["total_output_tokens"] != recipe.requests * recipe.tokens_out:
        raise SystemExit(f"{case}, {name}: {found['total_output_tokens']} tokens came back")
    tokens_out = recipe.tokens_out
    return {
        "case": case,
        "recipe": name,
        "requests": recipe.requests,
        "failed": found["failed"],
        "tokens_in": recipe.tokens_in,
        "tokens_out": tokens_out,
        "duration_s": found["duration"],
        "tokens_per_s": found["total_token_throughput" if tokens_out == 1 else "output_throughput"],
        **{f"{at}_ttft_ms": found[f"{at}_ttft_ms"] for at in ("median", "p99")},
        **{f"{at}_tpot_ms": found[f"{at}_tpot_ms"] if tokens_out > 1 else None for at in ("median", "p99")},
    }


def _rows(out: Path) -> list[dict[str, Any]]:
    rows = []
    present = [case for case in CASES if (out / f"{case}.json").exists()]
    for case in present:
        facts = json.loads((out / f"{case}.json").read_text())
        for number, (name, recipe) in enumerate(RECIPES.items()):
            found = json.loads((out / f"{case}-{number}.json").read_text())
            row = {**recipe_row(case, name, recipe, found), **facts}
            twins = {"headrace": ("still", "resident")}.get(
                case, ("serve-resident" if "serve" in case else "resident",)
            )
            beside = next((twin for twin in twins if twin in present and twin != case), None)
            if recipe.at_once == 1 and case != "still" and beside is not None:
                wanted = json.loads((out / f"{beside}-{number}.json").read_text())["generated_texts"]
                same = sum(a == b for a, b in zip(found["generated_texts"], wanted, strict=True))
                row |= {"compared_with": beside, "same_texts": same}
            rows.append(row)
    return rows


def _print(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        step = "" if row["median_tpot_ms"] is None else f"{row['median_tpot_ms']:8.2f} ms/token,"
        same = f", {row['same_texts']} texts as {row['compared_with']}" if "same_texts" in row else ""
        start = "" if row["start_s"] is None else f", start {row['start_s']:5.1f} s"
        print(
            f"{row['case']:14s} {row['recipe']:28s} {row['tokens_per_s']:9.1f} tok/s,{step} first after "
            f"{row['median_ttft_ms']:8.1f} ms{start}{same}"
        )


# -- a server in a process of its own ----------------------------------------------------------------------------------


@contextmanager
def started(
    command: Sequence[str], log_path: Path, environment: Mapping[str, str]
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server that has begun to start, as its address and its process; it ends with the block.

    Args:
        command: without a port; a free one is added.
        log_path: what the server prints.
        environment: of the server.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and the server with it
    port = _free_port()
    with log_path.open("w") as log:
        child = subprocess.Popen(
            [*command, "--port", str(port)], env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield f"http://127.0.0.1:{port}", child
        finally:
            _end(child)


def wait_until_healthy(url: str, child: subprocess.Popen[bytes], log_path: Path, start_s: float = 300) -> None:
    """Return when a server answers; exit if it has ended, or does not answer within ``start_s`` seconds."""
    begin = time.monotonic()
    while not _is_healthy(url):
        if child.poll() is not None or time.monotonic() - begin > start_s:
            raise SystemExit(f"the server did not start within {start_s:.0f} s; see {log_path}")
        time.sleep(0.5)


def headrace_stats(url: str) -> dict[str, Any]:
    """What headrace's worker counts, from a server that was started with ``VLLM_SERVER_DEV_MODE=1``."""
    answer = httpx.post(f"{url}/collective_rpc", json={"method": "headrace_stats"}, timeout=60)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()["results"][0]
    return found


def _end(child: subprocess.Popen[bytes]) -> None:
    """The server and whatever it has started; it may have ended by itself."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(20)
        os.killpg(child.pid, signal.SIGKILL)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        return int(finder.getsockname()[1])


if __name__ == "__main__":
    main()
