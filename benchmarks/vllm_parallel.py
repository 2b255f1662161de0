"""vLLM on two GPUs, split in four ways, offloaded by flags and by a budget: bits, bytes and steps.

    python benchmarks/vllm_parallel.py OUT [--kinds links tp pp ep moe-tp dp] [--cases still flags ...] [--together]

======  ======================================================================================================
links   no vLLM: each link alone, and both at once, as budgets are planned with; kept for the engines that follow
tp      tensor parallel, 8 layers of Qwen3-8B's shape
pp      pipeline parallel, the same model
ep      a mixture of experts (Qwen3-30B-A3B's layers, half of the experts) with expert parallel
moe-tp  the same mixture of experts, tensor parallel
dp      two engines of the dense model, not compiled: a copy each, and one copy for both
======  ======================================================================================================

The engines of a kind start at once and are measured in turns. ``still`` has the boundaries of ``flags``, and
``...-still`` those of ``...`` (``budget``; ``cache`` has half of a rank's experts on the GPU): nothing moves there, and
tokens and log-probabilities of the other have to be the same to the last bit, or the exit code is 1. A step is the
difference between 33 tokens and one. Its floor is the step of the engine in which nothing moves, or the bytes of the
rank that moves most at the rate of its link beside the others. Host memory is the proportional set size of all
processes of an engine. A case whose row is in OUT is not run again.

With ``--together`` the engines of all kinds start at once: less time, and about 8 GB of each GPU for an engine.
With ``--one-gpu`` both ranks run on the first GPU, which shows bits and bytes; steps then have the time slices of two
processes in them. NCCL 2.30 or newer allows it with ``NCCL_MULTI_RANK_GPU_ENABLE=1``.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import random
import re
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from published_configs import QWEN3_8B, QWEN3_30B_A3B
from seeded_weights import use_seeded_weights
from vllm_cases import GROUP, ONE_ROUNDING
from vllm_offload import engine_environment

KINDS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
    "ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "moe-tp": {"tensor_parallel_size": 2},
    "dp": {"data_parallel_size": 2},
}
SHAPES = {
    "dense": {**QWEN3_8B, "num_hidden_layers": 8},
    "moe": {**QWEN3_30B_A3B, "num_hidden_layers": 8, "num_experts": 64},
}
# With --tiny, for a look at the script itself on a CPU.
TINY = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TINY |= {"vocab_size": 2000, "moe_intermediate_size": 256, "num_experts": 8, "torch_dtype": "float32"}
# Device memory for the weights of each rank, about what the flags leave there; all of them have 2.6, 2.6, 3.0 and 5.2.
BUDGETS_GIB = {"tp": 2.4, "pp": 2.1, "ep": 2.65, "dp": 3.6}
CACHE_GIB = 2.4
CASES = ("still", "flags", "budget-still", "budget")
CACHE_CASES = ("cache-still", "cache")
CASES_OF = {
    "ep": (*CASES, *CACHE_CASES),
    "moe-tp": CACHE_CASES,
    "dp": ("still", "flags", "shared", "shared-budget-still", "shared-budget"),
}
# Two engines of one case compile at once and may round in two ways, the two of `still` as well. Graphs stay.
NOT_COMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
LOADS = ((1, 128), (16, 300))  # sequences, tokens of each prompt
STEPS, ROUNDS = 32, 3
START_S, ANSWER_S = 300.0, 60.0
_ONE_GPU = "VLLM_PARALLEL_ONE_GPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=["links", *KINDS], default=["links", *KINDS])
    parser.add_argument("--cases", nargs="+", help="of each kind; default all")
    parser.add_argument("--work", type=Path, default=Path("build/vllm-parallel"), help="for models and caches")
    parser.add_argument("--one-gpu", action="store_true", help="for bits and bytes without a second GPU")
    parser.add_argument("--together", action="store_true", help="start the engines of all kinds at once")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", metavar="KIND/CASE", help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        _serve(given)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    if "links" in given.kinds:
        _write(given.out, _links(given))
    kinds = [kind for kind in given.kinds if kind != "links"]
    for at_once in [kinds] if given.together else [[kind] for kind in kinds]:
        with ExitStack() as stack:
            engines = {kind: stack.enter_context(_engines(kind, _cases(kind, given), given)) for kind in at_once}
            for kind in at_once:
                _write(given.out, _measure(kind, engines[kind]))
    lines = _table(given.out)
    print("\n".join(lines))
    sys.exit(not all(line.endswith(("GB/s", "bits", "  equal")) for line in lines))


def _environment(given: argparse.Namespace) -> dict[str, str]:
    caches = str(given.work.resolve() / "caches")
    found = {"NCCL_NVLS_ENABLE": "0", **engine_environment(given.work), "XDG_CACHE_HOME": caches}
    return found | {"PYTHONPATH": os.pathsep.join([found["PYTHONPATH"], str(Path(__file__).resolve().parent)])}


# -- links -------------------------------------------------------------------------------------------------------------


def _links(given: argparse.Namespace) -> list[dict[str, Any]]:
    import torch.multiprocessing as mp

    os.environ["XDG_CACHE_HOME"] = _environment(given)["XDG_CACHE_HOME"]
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_link, (str(given.work.resolve() / f"store-{os.getpid()}"), answers), nprocs=2)  # type: ignore[no-untyped-call]
    return sorted((answers.get() for _ in range(2)), key=lambda row: int(row["rank"]))


def _link(rank: int, store: str, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    from headrace.transfer.machine_probe import cache_path
    from headrace.transfer.measuring import link_rates, rates_among

    Path(store).parent.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)

    def exchange(value: Any) -> list[Any]:
        found: list[Any] = [None, None]
        dist.all_gather_object(found, value)
        return found

    alone: dict[int, float] = {}
    for turn in (0, 1):
        if turn == rank:
            alone = link_rates(device)
        dist.barrier()
    together = link_rates(device, dist.barrier)
    (cache_path("links-2") or Path(os.devnull)).unlink(missing_ok=True)
    planned = dict(rates_among(device, exchange).copy_bytes_per_s.points)
    row = {"kind": "links", "rank": rank, "alone": alone, "together": together, "planned": planned}
    answers.put(row)
    dist.barrier()


# -- engines -----------------------------------------------------------------------------------------------------------


def _cases(kind: str, given: argparse.Namespace) -> list[str]:
    """The wanted cases of ``kind`` that have no row yet."""
    cases = CASES_OF.get(kind, CASES)
    done = {row["case"] for row in _rows(given.out) if row["kind"] == kind}
    return [case for case in cases if case in (given.cases or cases) and case not in done]


def _measure(kind: str, engines: dict[str, _Engine]) -> list[dict[str, Any]]:
    """Measure the engines of ``kind`` in turns, and ask for their bits."""
    rows = {case: {"kind": kind, "case": case, **engine.ask("facts", START_S)} for case, engine in engines.items()}
    times: dict[str, dict[str, list[float]]] = {case: {} for case in engines}
    for _ in range(ROUNDS):
        for case, engine in engines.items():
            for name, ms in engine.ask("step", ANSWER_S).items():
                times[case].setdefault(name, []).append(ms)
    for case, engine in engines.items():
        rows[case] |= engine.ask("bits", ANSWER_S)
        rows[case]["pss_bytes"] = _pss_bytes(engine.pid)
        rows[case]["ms"] = {name: statistics.median(found) for name, found in times[case].items()}
        rows[case]["spread_ms"] = {name: max(found) - min(found) for name, found in times[case].items()}
    return [row for row in rows.values() if "bits" in row]


class _Engine:
    """A process with one engine, which answers one line of JSON to each line."""

    def __init__(self, kind: str, case: str, given: argparse.Namespace) -> None:
        self.name = f"{kind}/{case}"
        ours, theirs = os.pipe()
        self._answers = os.fdopen(ours)
        self.log = given.out / f"vllm-parallel-{kind}-{case}.log"
        command = [sys.executable, __file__, str(given.out), "--child", self.name, "--answers", str(theirs)]
        command += ["--work", str(given.work), *["--tiny"] * given.tiny]
        environment = _environment(given) | ({_ONE_GPU: "1"} if given.one_gpu else {})
        environment["VLLM_CACHE_ROOT"] = str(given.work.resolve() / f"vllm-{kind}-{case}")
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                env=environment,
                pass_fds=[theirs],
                start_new_session=True,
            )
        os.close(theirs)
        self.pid = self._process.pid

    def ask(self, what: str, patience_s: float) -> dict[str, Any]:
        """An empty answer means that the engine has ended, or takes too long."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{what}\n")
            self._process.stdin.flush()
            line = self._answers.readline() if select.select([self._answers], [], [], patience_s)[0] else ""
        except (BrokenPipeError, ValueError):  # it has ended, now or before
            line = ""
        if not line:
            print(f"{self.name}: no answer to {what!r}; see {self.log}", flush=True)
            self.end()
            return {}
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Nothing more is asked: the engine ends."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self) -> None:
        """The process and whatever it has started."""
        self.close()
        if self._process.poll() is None:
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()


def _pss_bytes(session: int) -> int:
    """Host memory of all processes of ``session``; what several share counts once (proc(5))."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                found = re.search(r"^Pss:\s+(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)
                total += int(found[1]) * 1024 if found else 0
        except OSError:  # it has ended
            continue
    return total


@contextmanager
def _engines(kind: str, cases: list[str], given: argparse.Namespace) -> Iterator[dict[str, _Engine]]:
    begin = time.monotonic()
    engines = {case: _Engine(kind, case, given) for case in cases}
    try:
        yield engines
    finally:
        for engine in engines.values():
            engine.close()
        for engine in engines.values():
            engine.end()
        print(f"{kind}: {', '.join(cases)} in {time.monotonic() - begin:.0f} s", flush=True)


# -- inside of an engine's process -------------------------------------------------------------------------------------


def _serve(given: argparse.Namespace) -> None:
    kind, case = given.child.split("/")
    answers = os.fdopen(given.answers, "w")
    _share_gpu()
    begin = time.perf_counter()
    engine = (_Replicas if kind == "dp" else _Offline)(_arguments(kind, case, given))
    facts = {"start_s": time.perf_counter() - begin, "ranks": engine.stats()}
    for load in LOADS:  # warms up
        engine.run(*load, 2)
    for line in sys.stdin:
        answer = {"facts": lambda: facts, "step": lambda: _steps(engine), "bits": lambda: _bits(engine)}[line.strip()]()
        print(json.dumps(answer), file=answers, flush=True)
    engine.end()


def __getattr__(name: str) -> Any:
    """``vllm_parallel.Worker`` and ``NoCopyWorker``: in a process whose weights differ from layer to layer."""
    if name not in ("Worker", "TinyWorker", "NoCopyWorker", "TinyNoCopyWorker"):
        raise AttributeError(name)
    use_seeded_weights()
    _share_gpu()
    from no_copy import moves_nothing

    module = importlib.import_module("vllm_cpu_engine" if "Tiny" in name else "headrace.adapters.vllm")
    return moves_nothing(module.Worker) if "NoCopy" in name else module.Worker


def _share_gpu() -> None:
    """With ``--one-gpu``, in each process: vLLM finds two GPUs, and each of them is the first."""
    if _ONE_GPU not in os.environ:
        return
    import torch
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    platform.device_id_to_physical_device_id = classmethod(lambda cls, device_id: 0)
    platform.device_count = classmethod(lambda cls: 2)
    torch.accelerator.device_count = lambda: 2


def _arguments(kind: str, case: str, given: argparse.Namespace) -> dict[str, Any]:
    shape = "moe" if kind in ("ep", "moe-tp") else "dense"
    folder = given.work.resolve() / shape
    folder.mkdir(parents=True, exist_ok=True)
    config = {**SHAPES[shape], **(TINY if given.tiny else {})}
    (folder / "config.json").write_text(json.dumps(config))
    own: dict[str, Any] = {}
    # Every second layer of a stage, so that each stage has more than its slots hold.
    flags = {**GROUP, "offload_group_size": 2 if kind == "pp" else 4}
    if "budget" in case:
        size = 9 * 2**10 if given.tiny else int(BUDGETS_GIB[kind] * 2**20)
        flags, own = {}, {"device_memory": f"{size}KiB", "batch": [rows for rows, _ in LOADS]}
    if "cache" in case:
        held = SHAPES[shape]["num_experts"] // (2 if kind == "ep" else 1)  # by a rank
        flags = {"moe_backend": "triton"}
        own |= {"device_memory": f"{CACHE_GIB}GiB", "rules": ["experts=cache"], "expert_slots": held // 2}
    if "shared" in case:
        own |= {"mode": "shm_cpu", "replicas": 2}
    return {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 2**30,
        "gpu_memory_utilization": 0.15,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "compilation_config": {"cudagraph_capture_sizes": [1, 16], **(NOT_COMPILED if kind == "dp" else ONE_ROUNDING)},
        "disable_custom_all_reduce": _ONE_GPU in os.environ,  # it asks NVML how two GPUs are connected
        "worker_cls": f"vllm_parallel.{'Tiny' * given.tiny}{'NoCopy' * ('still' in case)}Worker",
        "additional_config": {"headrace": own} if own else {},
        **flags,
        **KINDS[kind],
        **({"enforce_eager": True} if given.tiny else {}),
    }


def _sampling(num_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=0)


def _prompts(num_sequences: int, num_tokens: int) -> list[dict[str, list[int]]]:
    chooser = random.Random(num_tokens)
    return [{"prompt_token_ids": [chooser.randrange(2, 1999) for _ in range(num_tokens)]} for _ in range(num_sequences)]


class _Offline:
    """One engine over all ranks."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self._engine = LLM(**arguments)

    def stats(self) -> list[dict[str, Any]]:
        return [_without_names(rank) for rank in self._engine.collective_rpc("headrace_stats")]

    def run(self, num_sequences: int, tokens_in: int, tokens_out: int) -> list[Any]:
        found = self._engine.generate(_prompts(num_sequences, tokens_in), _sampling(tokens_out), use_tqdm=False)
        return [output.outputs[0] for output in found]

    def end(self) -> None:
        del self._engine


class _Replicas:
    """Two engines, each of which is given all sequences."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._engine: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self._count = 0

    def stats(self) -> list[dict[str, Any]]:
        ranks = self._loop.run_until_complete(self._engine.collective_rpc("headrace_stats"))
        return [_without_names(rank) for rank in ranks]

    def run(self, num_sequences: int, tokens_in: int, tokens_out: int) -> list[Any]:
        """Sequences one after the other: vLLM may batch those that are given at once in several ways."""

        async def one(prompt: Any, rank: int) -> Any:
            self._count += 1
            name, last = str(self._count), Any
            async for output in self._engine.generate(prompt, _sampling(tokens_out), name, data_parallel_rank=rank):
                last = output
            return last.outputs[0]

        async def engine(rank: int) -> list[Any]:
            prompts = _prompts(num_sequences, tokens_in)
            if num_sequences == 1:
                return [await one(prompts[0], rank)]
            return list(await asyncio.gather(*(one(prompt, rank) for prompt in prompts)))

        async def both() -> list[Any]:
            first, second = await asyncio.gather(engine(0), engine(1))
            return first + second

        return self._loop.run_until_complete(both())

    def end(self) -> None:
        self._engine.shutdown()


def _without_names(stats: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in stats.items() if key not in ("uva_names", "last_stalls_s")}


def _steps(engine: Any) -> dict[str, float]:
    """Milliseconds of a decode step, by load."""
    found = {}
    for load in LOADS:
        seconds = []
        for tokens_out in (1, 1 + STEPS):
            begin = time.perf_counter()
            engine.run(*load, tokens_out)
            seconds.append(time.perf_counter() - begin)
        found[f"{load[0]} x {load[1]}"] = (seconds[1] - seconds[0]) / STEPS * 1e3
    return found


def _bits(engine: Any) -> dict[str, Any]:
    """Tokens and log-probabilities, and what each rank moved meanwhile."""
    before = [rank["bytes_moved"] for rank in engine.stats()]
    # Of one sequence where several engines answer, see _Replicas.
    loads = LOADS[:1] if isinstance(engine, _Replicas) else LOADS
    outputs = [output for load in loads for output in engine.run(*load, 16)]
    after = engine.stats()
    return {
        "bits": {
            "tokens": [list(output.token_ids) for output in outputs],
            "logprobs": [[next(iter(step.values())).logprob for step in output.logprobs] for output in outputs],
        },
        "moved_bytes": [rank["bytes_moved"] - first for rank, first in zip(after, before, strict=True)],
    }


# -- what was found ----------------------------------------------------------------------------------------------------


def _rows(out: Path) -> list[dict[str, Any]]:
    path = out / "vllm-parallel.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    with (out / "vllm-parallel.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


def _table(out: Path) -> list[str]:
    rows = _rows(out)
    lines, links = [], [row for row in rows if row["kind"] == "links"]
    for row in links:
        largest = max(row["alone"], key=int)
        rates = ", ".join(f"{what} {row[what][largest] / 1e9:.1f}" for what in ("alone", "together"))
        lines.append(f"link {row['rank']}: {rates} GB/s")
    link = min((row["together"][max(row["together"], key=int)] for row in links), default=55.5e9)
    columns = "    ms spread    still   floor  share  MB moved, by rank  GiB host  start s  bits"
    lines.append(f"kind   {'case':19} {'load':8} {columns}")
    for row in (row for row in rows if row["kind"] != "links"):
        same = [each for each in rows if each["kind"] == row["kind"]]
        still = _reference(row, same)
        moved = [0 if "still" in row["case"] else rank["moved_bytes_per_forward"] for rank in row["ranks"]]
        found = _compared(row, still)
        for load, ms in row["ms"].items():
            floor = max(max(moved) / link * 1e3, still["ms"][load] if still else 0.0)
            lines.append(
                f"{row['kind']:6} {row['case']:19} {load:8} {ms:6.2f} {row['spread_ms'][load]:6.2f} "
                f"{still['ms'][load] if still else 0.0:8.2f} {floor:7.2f} {floor / ms:6.1%}  "
                f"{' '.join(f'{b / 1e6:.1f}' for b in moved):17} {row['pss_bytes'] / 2**30:9.2f} "
                f"{row['start_s']:8.1f}  {found}"
            )
    return lines


def _reference(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The engine with the same boundaries in which nothing moves, or else the first."""
    units = [rank["units"] for rank in row["ranks"]]
    found = (each for each in rows if "still" in each["case"] and [rank["units"] for rank in each["ranks"]] == units)
    return next(found, next((each for each in rows if each["case"] == "still"), None))


def _compared(row: dict[str, Any], still: dict[str, Any] | None) -> str:
    moves = all(row["moved_bytes"]) if "still" not in row["case"] else not any(row["moved_bytes"])
    if still is None:
        return "nothing to compare with"
    units = [rank["units"] for rank in row["ranks"]]
    others = "" if units == [rank["units"] for rank in still["ranks"]] else ", other units"
    if row["kind"] in ("tp", "ep", "moe-tp") and units[0] != units[-1]:
        others += ", RANKS DIFFER"
    mine, theirs = (chain.from_iterable(each["bits"]["logprobs"]) for each in (row, still))
    same, worst = row["bits"] == still["bits"], max(abs(a - b) for a, b in zip(mine, theirs, strict=True))
    tokens = "tokens equal" if row["bits"]["tokens"] == still["bits"]["tokens"] else "OTHER TOKENS"
    found = "equal" if same else f"{tokens}, log-probabilities differ by up to {worst:.1e}"
    return f"{found}{others}{'' if moves else ', MOVED AS IT SHOULD NOT'}"


if __name__ == "__main__":
    main()
