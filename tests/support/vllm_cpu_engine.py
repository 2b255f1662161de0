"""One engine of vLLM on a CPU, run as a program: writes greedy tokens, log-probabilities, and what moved, as JSON.

python vllm_cpu_engine.py FOLDER CASE eager|compiled        cases: see CASES, WITH_TOWER, QUANTISED

A case of CASES and ``:still`` traces the same boundaries and moves nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from published_configs import AWQ, GPTQ, INT4
from seeded_models import use_seeded_weights

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 768,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2000,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "eos_token_id": 1, "torch_dtype": "float32",
}  # fmt: skip
GROUP = {"offload_group_size": 4}
# The folder of its model is filled in.
DRAFT = {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}}
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}}
NGRAM_TOKENS = 96
RESIDENT = ("resident", "draft-resident", "ngram-resident", "one", "life-resident", "fresh-resident")
CASES: dict[str, dict[str, Any]] = {
    "resident": {},
    "draft-resident": DRAFT,
    "draft": {**GROUP, **DRAFT},
    "ngram-resident": NGRAM,
    "ngram": {**GROUP, **NGRAM},
    "prefetch": GROUP,
    "named": {"offload_group_size": 2, "offload_params": {"mlp"}},
    "uva": {"cpu_offload_gb": 0.01},
    "budget": {"additional_config": {"headrace": {"device_memory": "12MiB", "batch": [1, 4]}}},
    "lora": {**GROUP, "enable_lora": True},
    # Two engines, which vLLM tells nothing of each other.
    "replicas": {
        **GROUP,
        "data_parallel_size": 2,
        "additional_config": {"headrace": {"mode": "shm_cpu", "replicas": 2}},
    },
}
# Of a model in files, over two ranks: weights that vLLM makes are not those of the same layers in one process.
PAIRS = {"offload_group_size": 2}
SMALL = {"device_memory": "8MiB", "batch": [1, 4]}  # of what a rank has
TWO_SHARDS = {"tensor_parallel_size": 2}
TWO_STAGES = {"pipeline_parallel_size": 2}
ON_RAY = {**TWO_STAGES, "distributed_executor_backend": "ray"}
# vLLM's own processes, started on each node by the same command.
TWO_NODES = {**TWO_STAGES, "distributed_executor_backend": "mp", "nnodes": 2, "master_addr": "127.0.0.1"}
WITH_RANKS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp": {**PAIRS, **TWO_SHARDS},
    "tp-budget": {**TWO_SHARDS, "additional_config": {"headrace": SMALL}},
    "pp": {**PAIRS, **TWO_STAGES},
    "pp-budget": {**TWO_STAGES, "additional_config": {"headrace": SMALL}},
    "ray": {**PAIRS, **ON_RAY},
    "nodes": {**PAIRS, **TWO_NODES},
    "nodes-budget": {**TWO_NODES, "additional_config": {"headrace": SMALL}},
    "ray-budget": {**ON_RAY, "additional_config": {"headrace": SMALL}},
}
# An engine that sleeps, wakes up and gets new weights (:func:`_live`); a fresh one has these from the start.
LIVING: dict[str, dict[str, Any]] = {
    "life-resident": {},
    "life-prefetch": PAIRS,
    "life-uva": {"cpu_offload_gb": 0.01},
    "life-budget": {"additional_config": {"headrace": {"device_memory": "12MiB", "batch": [1, 4]}}},
    "fresh-resident": {},
    "fresh-prefetch": PAIRS,
}
_GROUP_0 = {
    "targets": ["Linear"],
    "weights": {"symmetric": True, "dynamic": False, "num_bits": 8, "type": "float", "strategy": "channel"},
    "input_activations": {"symmetric": True, "num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}
FORMATS: dict[str, dict[str, Any]] = {
    "fp8-channel": {**INT4, "format": "float-quantized", "config_groups": {"group_0": _GROUP_0}},
    "int4": INT4,
    "gptq": GPTQ,
    "awq": AWQ,
}
# Of a quantised model; the case is a format, a slash, and one of these.
QUANTISED: dict[str, dict[str, Any]] = {
    "resident": {},
    "prefetch": {"offload_group_size": 2},
    "uva": {"cpu_offload_gb": 1},
    "budget": {"additional_config": {"headrace": {"device_memory": "6MiB", "batch": [1, 4]}}},
}
# Of models with a tower, given the name of that; the case is FAMILY and one of these, with a space between.
WITH_TOWER: dict[str, Callable[[str], dict[str, Any]]] = {
    "resident": lambda tower: {},
    "prefetch": lambda tower: GROUP,
    "named": lambda tower: {**GROUP, "offload_params": {tower, "mlp"}},
    "group": lambda tower: {**GROUP, "offload_params": {"@vision"}},
    "uva": lambda tower: {"cpu_offload_gb": 0.002},
    "budget": lambda tower: {"additional_config": {"headrace": {"device_memory": "12MiB", "batch": [1, 4]}}},
}


def worker_class() -> type:
    """headrace's part of a worker before vLLM's worker for CPUs, whose runner keeps no account of memory."""
    import torch
    import vllm._custom_ops as ops
    from vllm.v1.worker.cpu_worker import CPUWorker

    ops._supports_onednn = False  # it would pack the weights into objects of its own, which nobody can move
    use_seeded_weights()  # in every process of an engine
    from vllm.device_allocator.cumem import CuMemAllocator

    from headrace.adapters.vllm.worker import OffloadingWorker
    from vllm_pool import pool_of

    class PooledWorker(CPUWorker):
        """Sleeps as a worker on a GPU does."""

        def sleep(self, level: int = 1) -> None:
            CuMemAllocator.instance.sleep(("weights",) if level == 1 else ())

        def wake_up(self, tags: list[str] | None = None) -> None:
            CuMemAllocator.instance.wake_up(tags)

    class CpuWorker(OffloadingWorker, PooledWorker):
        def load_model(self, **kwargs: Any) -> None:
            self.model_runner.model_memory_usage = 0
            super().load_model(**kwargs)
            CuMemAllocator.instance = pool = pool_of(self)
            torch.cuda.memory_snapshot = pool.snapshot

        def saved_bytes(self) -> int:
            """What the latest sleep has saved."""
            return int(CuMemAllocator.instance.saved_bytes)

        def determine_available_memory(self) -> int:
            # A stage receives into buffers that the profile run makes, which this worker skips without a compiler.
            if self.parallel_config.pipeline_parallel_size > 1 and self.model_config.enforce_eager:
                self.model_runner.profile_run()
            return int(super().determine_available_memory())

        def node(self) -> dict[str, Any]:
            """Which node of vLLM's this worker is on, and the process that started it."""
            return {"node": self.parallel_config.node_rank, "started_by": os.getppid()}

        def actor(self) -> dict[str, Any]:
            """Where this worker runs on Ray, and a variable that the driver set after Ray's nodes had started."""
            import ray

            found = ray.get_runtime_context()
            timeout = os.environ.get("HEADRACE_PEER_TIMEOUT")
            return {"node": found.get_node_id(), "actor": found.get_actor_id(), "peer_timeout": timeout}

    return CpuWorker


def __getattr__(name: str) -> Any:
    """``vllm_cpu_engine.Worker`` and ``NoCopyWorker``, as vLLM asks for them by name."""
    if name == "Worker":
        return worker_class()
    if name == "NoCopyWorker":
        from no_copy import moves_nothing

        return moves_nothing(worker_class())
    raise AttributeError(name)


def two_nodes() -> None:
    """Start two nodes of Ray here, as if each had a GPU."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=100 << 20, include_dashboard=False)
    ray.init(address=cluster.address, runtime_env={"worker_process_setup_hook": "vllm_cpu_engine.name_ray_device"})
    os.environ["HEADRACE_PEER_TIMEOUT"] = "77"
    name_ray_device()


def name_ray_device() -> None:
    """In the driver and in each actor: vLLM asks Ray for the devices of its platform, and that for CPUs names none."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


@contextmanager
def second_node(given: dict[str, Any], folder: Path) -> Iterator[None]:
    """The second of two nodes, by the command that a user starts there; it ends with the block."""
    words = ["--headless", "--node-rank", "1"]
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif name != "model":
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", given["model"], *words]
    path = os.pathsep.join([name_distribution(folder), os.environ["PYTHONPATH"]])
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, start_new_session=True)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(20)
            os.killpg(child.pid, signal.SIGKILL)


def name_distribution(folder: Path) -> str:
    """A folder for PYTHONPATH: the command of vLLM asks for a distribution with that name, CPU builds have another."""
    version = metadata.version("vllm-cpu")
    found = folder / "distribution" / f"vllm-{version}.dist-info"
    found.mkdir(parents=True, exist_ok=True)
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return str(found.parent)


def free_port() -> int:
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        return int(finder.getsockname()[1])


def quantised_arguments(folder: Path, case: str, mode: str) -> dict[str, Any]:
    name, _, what = case.partition("/")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128, "num_hidden_layers": 4, "vocab_size": 2048}
    config = {**CONFIG, **sizes, "num_attention_heads": 8, "torch_dtype": "bfloat16"}
    return {
        "model": _write_config(folder / name, {**config, "quantization_config": FORMATS[name]}),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "enforce_eager": mode == "eager",
        "enable_prefix_caching": False,
        **QUANTISED[what],
        **({} if what in RESIDENT else {"worker_cls": "vllm_cpu_engine.Worker"}),
    }


def arguments(folder: Path, case: str, mode: str) -> dict[str, Any]:
    if "/" in case:
        return quantised_arguments(folder, case, mode)
    family, _, what = case.partition(" ")
    if what:
        import vllm_towers

        if not (folder / family).exists():
            vllm_towers.write_model(family, folder / family)
        tower = vllm_towers.TOWERS[family][0]
        return {
            "model": str(folder / family),
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 8,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            **WITH_TOWER[what](tower),
            **({} if what in RESIDENT else {"worker_cls": "vllm_cpu_engine.Worker"}),
        }
    _write_config(folder, CONFIG)
    name, _, still = case.partition(":")
    options = {**CASES, **WITH_RANKS, **LIVING}[name]
    if name in WITH_RANKS or name in LIVING:
        files = folder / ("new-files" if name.startswith("fresh-") else "files")
        options = {**options, "model": _write_model(files), "load_format": "auto"}
    if (speculative := options.get("speculative_config")) and speculative["method"] == "draft_model":
        drafter = _write_config(folder / "draft", {**CONFIG, "num_hidden_layers": 2})
        options = {**options, "speculative_config": {**speculative, "model": drafter}}
    return {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "enforce_eager": mode == "eager",
        "enable_prefix_caching": False,
        **options,
        **({} if case in RESIDENT else {"worker_cls": f"vllm_cpu_engine.{'NoCopy' if still else ''}Worker"}),
    }


def _write_model(folder: Path) -> str:
    if not folder.exists():
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(len(folder.name))
        Qwen3ForCausalLM(Qwen3Config(**CONFIG)).save_pretrained(folder)
    return str(folder)


def _write_config(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def prompts() -> list[Any]:
    return [{"prompt_token_ids": [(7 * row + i) % 1999 + 1 for i in range(20 + row)]} for row in range(4)]


def sampling() -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "detokenize": False, "logprobs": 0}


def found_in(outputs: list[Any]) -> dict[str, Any]:
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [[next(iter(step.values())).logprob for step in output.logprobs] for output in outputs],
    }


def main(folder: Path, case: str, mode: str) -> None:
    import vllm._custom_ops as ops
    from vllm import LLM

    ops._supports_onednn = False
    use_seeded_weights()
    if case.startswith("ray"):
        two_nodes()
    options = arguments(folder, case, mode)
    with ExitStack() as stack:
        if case.startswith("nodes"):
            options["master_port"] = free_port()
            stack.enter_context(second_node(options, folder))
        _answer(LLM(disable_log_stats=True, **options), folder, case, mode)


def _answer(engine: Any, folder: Path, case: str, mode: str) -> None:
    from vllm import SamplingParams

    family, _, what = case.partition(" ")
    given, asked = SamplingParams(**sampling()), prompts()
    if case.startswith("ngram"):  # one sequence, long enough to repeat itself
        given, asked = SamplingParams(**{**sampling(), "max_tokens": NGRAM_TOKENS}), asked[:1]
    if what:
        import vllm_towers

        asked = vllm_towers.prompts(family)
    engine.generate(asked, given, use_tqdm=False)
    outputs = [output.outputs[0] for output in engine.generate(asked, given, use_tqdm=False)]
    lived = _live(engine, folder, case in RESIDENT) if case.startswith("life-") else {}
    resident = (what or case.partition("/")[2] or case) in RESIDENT
    ranks = [{}] if resident else engine.collective_rpc("headrace_stats")
    found = {**found_in(outputs), **lived, "stats": ranks[0], "ranks": ranks}
    if case.startswith("nodes"):
        found["nodes"] = engine.collective_rpc("node")
    if case.startswith("ray"):
        found["actors"] = engine.collective_rpc("actor")
        found["executor"] = type(engine.llm_engine.engine_core.engine_core.model_executor).__name__
    (folder / f"{case.replace('/', ' ')}-{mode}.json").write_text(json.dumps(found))


def _live(engine: Any, folder: Path, resident: bool) -> dict[str, Any]:
    """What the engine answers after each thing that is done to it, by a name for that."""
    import torch
    from safetensors.torch import load_file
    from vllm import SamplingParams

    found: dict[str, Any] = {}
    new, old = (_write_model(folder / name) for name in ("new-files", "files"))
    weights = load_file(Path(new) / "model.safetensors")
    # Those that vLLM keeps as they are in files; norms begin as ones.
    some = {name: value * 1.5 for name, value in weights.items() if "norm" in name or ".7.mlp.down_proj" in name}

    def answer() -> dict[str, Any]:
        return found_in([each.outputs[0] for each in engine.generate(prompts(), SamplingParams(**sampling()))])

    def reload(what: str, **given: Any) -> None:
        try:
            with torch.no_grad():  # without it vLLM refuses weights in the form of its kernels
                engine.collective_rpc("reload_weights", kwargs=given)
        except Exception as error:
            found[f"{what}: error"] = f"{type(error).__name__}: {error}"
        found[what] = answer()

    if not resident:
        for level, tags in ((1, [None]), (2, [["kv_cache"], ["weights"]]), (1, [["weights"], ["kv_cache"]])):
            engine.sleep(level=level)
            found[f"saved at {level}"] = engine.collective_rpc("saved_bytes")[0]
            for each in tags:
                engine.wake_up(tags=each)
            found[f"slept at {level}, woken by {tags}"] = answer()
        # Refused; without an offload vLLM goes on with a part of it, or ends with the model in pieces.
        wrong = {**weights, "lm_head.weight": torch.zeros(7, 7)}
        parts = {name: value for name, value in weights.items() if "k_proj" not in name}
        reload("shape", weights_iterator=[*wrong.items()])
        reload("name", weights_iterator=[*weights.items(), ("model.layers.3.mlp.no_proj.weight", torch.zeros(1))])
        reload("part", weights_iterator=[*parts.items()])
        reload(
            "kernel name", weights_iterator=[*some.items(), ("no.weight", torch.zeros(1))], is_checkpoint_format=False
        )
        reload("folder", weights_path=str(folder / "no-such-files"))
    reload("some", weights_iterator=[*some.items()], is_checkpoint_format=False)
    reload("new", weights_path=new)
    if not resident:
        engine.sleep(level=2)
        engine.wake_up()
        found["new, slept"] = answer()
    reload("old", weights_path=old)
    reload("iterator", weights_iterator=[*weights.items()])
    return found


async def main_of_two(folder: Path, mode: str) -> None:
    """Two engines: every prompt is given to both, one after the other, so that no batch differs."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(folder, "replicas", mode)))
    try:
        engines = []
        for rank in (0, 1):
            outputs = []
            for number, prompt in enumerate(prompts()):
                name = f"{rank}-{number}"
                async for output in engine.generate(
                    prompt, SamplingParams(**sampling()), name, data_parallel_rank=rank
                ):
                    last = output
                outputs.append(last.outputs[0])
            engines.append(found_in(outputs))
        stats = await engine.collective_rpc("headrace_stats")
        (folder / f"replicas-{mode}.json").write_text(json.dumps({"engines": engines, "stats": stats}))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    if sys.argv[2] == "replicas":
        asyncio.run(main_of_two(Path(sys.argv[1]), sys.argv[3]))
    else:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
