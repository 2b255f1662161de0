"""headrace's plugin against a stand-in for SGLang: same outputs, eager and in graphs; in force, or the server ends."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sglang_stand_in as sglang
from engine_names import differences
from engines import VOCABULARY, Layer
from headrace.adapters.sglang.keys import parse_keys, read_options
from headrace.config import Budget
from headrace.errors import OptionError, StateError
from ranks import outcomes
from sglang_names import NAMES

GROUP = {"offload_group_size": 4}
BUDGET = '{"device_memory": "3MB"}'


def register() -> None:
    """What the entry point names."""
    importlib.import_module("headrace.adapters.sglang").register()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A model runner of a process in which the plugin was loaded."""

    def make(
        asked: str | None = "1", *plugins: Callable[[], None], runner: dict[str, Any] | None = None, **fields: Any
    ):
        sglang.install(monkeypatch, [register, *plugins], **fields)
        monkeypatch.delenv("HEADRACE_SGLANG", raising=False)
        if asked is not None:
            monkeypatch.setenv("HEADRACE_SGLANG", asked)
        sglang.load_plugins()
        return started(**(runner or {}))

    return make


def module(name: str) -> Any:
    return sys.modules[name]


def ids(seed: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 3), generator=torch.Generator().manual_seed(seed))


def outputs(runner: Any, kinds: tuple[str, ...] = ("eager", "decode", "prefill", "decode", "eager")) -> list[Any]:
    return [runner.forward(sglang.batch(ids(seed), kind)) for seed, kind in enumerate(kinds)]


def figures(runner: Any) -> dict[str, Any]:
    state = module("sglang.srt.managers.scheduler").Scheduler(runner).get_internal_state(None)
    return dict(state.internal_state.get("headrace", {}))


def test_the_stand_in_has_what_a_real_one_has_to_have(start: Callable[..., Any]) -> None:
    start(None)
    assert differences(NAMES, "0.5.23") == []


# -- what it moves -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        ("1", GROUP),
        ("1", {"offload_group_size": 3, "offload_num_in_group": 2, "offload_prefetch_step": 2}),
        ('{"params": ["mlp"], "measure_stalls": true}', {"offload_group_size": 2}),
        ("1", {"cpu_offload_gb": 1}),
        (BUDGET, {}),
        ('{"device_memory": "5MB", "batch": [1, 16], "params": ["mlp"], "rules": ["down_proj=prefetch"]}', {}),
    ],
    ids=["group", "two of three", "named", "limited", "budget", "budget, narrowed"],
)
def test_outputs_are_the_same_and_bytes_move(start: Callable[..., Any], asked: str, fields: dict[str, Any]) -> None:
    plain = outputs(start(None))
    runner = start(asked, **fields)
    for found, expected in zip(outputs(runner), plain, strict=True):
        assert torch.equal(found, expected)
    stats = figures(runner)
    assert stats["prefetched_bytes"] > 500_000
    assert stats["bytes_moved"] >= 9 * stats["prefetched_bytes"]  # two captures of two warm-ups, and five forwards
    assert type(module("sglang.srt.utils.offloader").get_offloader()).__name__ == "SGLangOffloader"


def test_a_group_is_the_last_of_every_n_layers_with_all_their_weights(start: Callable[..., Any]) -> None:
    stats = figures(start("1", offload_group_size=4, offload_num_in_group=2))
    layer = sum(p.nbytes for p in Layer(sglang.WIDTH).parameters() if p.nbytes > 10_000)
    assert stats["prefetched_bytes"] == 4 * layer


def test_a_limit_is_copied_ahead_and_not_read_in_place(start: Callable[..., Any]) -> None:
    stats = figures(start("1", cpu_offload_gb=1))
    assert stats["uva_bytes"] == 0
    assert stats["num_units"] == sglang.NUM_LAYERS
    assert stats["num_slots"] == 2


def test_copies_are_ahead_of_their_use(start: Callable[..., Any]) -> None:
    runner = start("1", **GROUP)
    outputs(runner)
    assert figures(runner)["misses"] == 0


def test_model_code_sees_that_layers_are_offloaded_by_a_budget(start: Callable[..., Any]) -> None:
    seen: list[int] = []

    def layer(idx: int) -> nn.Module:
        seen.append(module("sglang.srt.runtime_context").get_context().config_leaf("offload_group_size"))
        return Layer(sglang.WIDTH)

    start(BUDGET, runner={"layer_fn": layer})
    assert seen == [1] * sglang.NUM_LAYERS


def test_buffers_stay(start: Callable[..., Any]) -> None:
    def layer(idx: int) -> nn.Module:
        made = Layer(sglang.WIDTH)
        made.mlp.register_buffer("table", torch.randn(200, 200))
        return made

    runner = start('{"params": ["mlp"]}', runner={"layer_fn": layer}, offload_group_size=1)
    mlp = sum(p.nbytes for p in Layer(sglang.WIDTH).mlp.parameters())
    assert figures(runner)["prefetched_bytes"] == sglang.NUM_LAYERS * mlp


def replica(rank: int, asked: str, fields: dict[str, Any], run_id: str) -> dict[str, Any]:
    """One of two data-parallel ranks, each a world of its own to torch."""
    with pytest.MonkeyPatch.context() as patch:
        sglang.install(patch, [])
        plain = outputs(started())
    with pytest.MonkeyPatch.context() as patch:
        sglang.install(patch, [register], offload_mode="shm_cpu", dp_size=2, **fields)
        sglang.state.parallel = sglang.SimpleNamespace(dp_rank=rank, num_dp_ranks=2)
        patch.setenv("HEADRACE_SGLANG", asked)
        patch.setenv("SGLANG_RUN_ID", run_id)
        sglang.load_plugins()
        runner = started()
        assert all(torch.equal(found, expected) for found, expected in zip(outputs(runner), plain, strict=True))
        return figures(runner)


def started(**options: Any) -> Any:
    runner = module("sglang.srt.model_executor.model_runner").ModelRunner(**options)
    runner.init_cuda_graphs()
    return runner


@pytest.mark.parametrize(
    ("asked", "fields"), [("1", GROUP), ("1", {"cpu_offload_gb": 1}), (BUDGET, {})], ids=["group", "limited", "budget"]
)
def test_data_parallel_ranks_share_one_copy(asked: str, fields: dict[str, Any], tmp_path: Path) -> None:
    first, second = outcomes(2, replica, asked, fields, f"run-{tmp_path.name}-{os.getpid()}")
    assert first["store_bytes"]["host_shared"] >= first["prefetched_bytes"] > 500_000
    assert first["bytes_moved"] > 0
    assert first["store_bytes"] == second["store_bytes"]
    assert "host" not in first["store_bytes"]


# -- asked for or not --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, "", "0"])
def test_without_the_variable_nothing_is_imported_or_changed(start: Callable[..., Any], asked: str | None) -> None:
    registry = module("headrace").__name__  # headrace itself is imported by this test
    assert registry == "headrace"
    runner = start(asked, offload_group_size=4)
    assert "headrace.adapters.sglang.plugin" not in sys.modules
    assert type(module("sglang.srt.utils.offloader").get_offloader()) is sglang.OffloaderV2
    assert not hasattr(type(runner).load_model, "__wrapped__")
    assert figures(runner) == {}


def test_a_fresh_process_imports_three_empty_packages() -> None:
    code = (
        "import os, sys; os.environ.pop('HEADRACE_SGLANG', None); before = set(sys.modules)\n"
        "from headrace.adapters.sglang import register; register()\n"
        "print(sorted(set(sys.modules) - before - {'importlib', '__future__', 'typing'}))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd="src")
    ours = [name for name in eval(done.stdout) if name.partition(".")[0] in ("headrace", "torch", "numpy")]
    assert ours == ["headrace", "headrace.adapters", "headrace.adapters.sglang"]


def test_nothing_to_do_is_said(start: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")  # other tests of the process switch warnings off
    runner = start("1")
    assert "headrace has nothing to do" in caplog.text
    assert figures(runner) == {}


# -- in force, or the server ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("yes", "expected 1 or a JSON object"),
        ('{"device_memroy": "2MB"}', r"HEADRACE_SGLANG.device_memroy is unknown: .* did you mean 'device_memory'"),
        ("[1]", "HEADRACE_SGLANG: expected an object, found list"),
    ],
)
def test_an_invalid_variable_ends_the_process(start: Callable[..., Any], asked: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        start(asked, **GROUP)


def test_another_version_ends_the_process(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def older() -> None:
        module("sglang").__version__ = "0.5.22"

    sglang.install(monkeypatch, [older, register])
    monkeypatch.setenv("HEADRACE_SGLANG", "1")
    with pytest.raises(SystemExit, match=r"SGLang 0.5.22 has not been tried with headrace: expected 0.5.23"):
        sglang.load_plugins()


def test_a_name_that_is_gone_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang.install(monkeypatch, [register])
    monkeypatch.setenv("HEADRACE_SGLANG", "1")
    monkeypatch.delattr(sglang.GraphBackend, "capture_one")
    with pytest.raises(SystemExit, match=r"differs from the tested versions: .*Backend.capture_one is missing"):
        sglang.load_plugins()


def test_a_hook_that_was_not_applied_ends_the_start(start: Callable[..., Any]) -> None:
    def drops_a_hook() -> None:
        sglang.state.hooks[:] = [entry for entry in sglang.state.hooks if not entry[0].endswith("Backend.replay")]

    with pytest.raises(StateError, match=r"SGLang has not hooked .*FullCudaGraphBackend.replay"):
        start("1", drops_a_hook, **GROUP)
    assert "load_model" not in sglang.state.log


def test_another_offloader_ends_the_start(start: Callable[..., Any]) -> None:
    def replaces_it() -> None:
        registry = module("sglang.srt.plugins.hook_registry")
        target = "sglang.srt.utils.offloader.create_offloader"
        registry.HookRegistry.register(target, sglang.OffloaderV2, registry.HookType.REPLACE)

    with pytest.raises(StateError, match="OffloaderV2 would be SGLang's offloader: another plugin replaces"):
        start("1", replaces_it, **GROUP)
    assert "load_model" not in sglang.state.log


def test_a_layer_that_does_not_run_ends_the_server(start: Callable[..., Any]) -> None:
    def layer(idx: int) -> nn.Module:
        made = Layer(sglang.WIDTH)
        made.is_skipped = idx == 7
        return made

    with pytest.raises(StateError, match=r"1 of 2 offloaded modules did not run .* \(model.layers.7\)"):
        start("1", runner={"layer_fn": layer}, **GROUP)
    runner = start("1", runner={"layer_fn": layer, "kinds": ()}, **GROUP)  # without graphs
    with pytest.raises(StateError, match="1 of 2 offloaded modules did not run"):
        outputs(runner, ("eager",))


def test_guesses_by_n_grams_are_let_through(start: Callable[..., Any]) -> None:
    """They have no draft model, and SGLang verifies them in forwards of the target."""
    expected = outputs(start(None, speculative_algorithm="NGRAM"))
    runner = start("1", **GROUP, speculative_algorithm="NGRAM")
    found = outputs(runner)
    assert all(torch.equal(each, other) for each, other in zip(found, expected, strict=True))
    assert figures(runner)["bytes_moved"] > 0


# -- refused before the model loads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"offload_mode": "meta"}, "--offload-mode meta stores no weights"),
        ({"offload_mode": "sharded_gpu"}, "--offload-mode sharded_gpu .* shm_cpu keeps one copy"),
        ({"offload_mode": "shm_cpu"}, "this is the only one: add --dp-size N"),
        ({"offload_mode": "shm_cpu", "tp_size": 2, "dp_size": 2}, "expected --tp-size 1, found 2"),
        ({"cpu_offload_gb": 1}, "--offload-group-size and --cpu-offload-gb contradict|contradict each other"),
        ({"enable_eplb": True}, "--enable-eplb moves experts"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap runs parts of a batch"),
        ({"enable_pdmux": True}, "--enable-pdmux runs parts"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE runs a draft model"),
        ({"speculative_algorithm": "STANDALONE"}, "--speculative-algorithm STANDALONE runs a draft model"),
        ({"enable_lora": True}, "--enable-lora replaces linear modules"),
        ({"enable_memory_saver": True}, "--enable-memory-saver frees and restores weights"),
        ({"startup_weight_load_mode": "overlap"}, "--startup-weight-load-mode overlap writes weights"),
        ({"enable_torch_compile": True}, "--enable-torch-compile compiles"),
        (
            {"cuda_graph_config": sglang.SimpleNamespace(prefill=sglang.SimpleNamespace(backend="tc_piecewise"))},
            "--cuda-graph-backend-prefill tc_piecewise",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_headrace_cannot_run_with_is_refused(
    start: Callable[..., Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        start("1", **{**GROUP, **fields})
    assert "load_model" not in sglang.state.log


def test_a_budget_chooses_no_code() -> None:
    """Which no test has run inside SGLang."""
    options = read_options(parse_keys(BUDGET), sglang.DEFAULTS.get)
    assert isinstance(options.policy, Budget)
    assert options.policy.codec == "none"


@pytest.mark.parametrize(
    ("asked", "fields", "message"),
    [
        (BUDGET, GROUP, r"HEADRACE_SGLANG.device_memory and --offload-group-size contradict each other"),
        ('{"batch": [1]}', {}, r"HEADRACE_SGLANG.batch has no effect without HEADRACE_SGLANG.device_memory|batch has"),
        ('{"batch": [0], "device_memory": "2MB"}', {}, "expected at least 1"),
        ('{"rules": ["mlp=uva"]}', GROUP, "contradict|has no effect"),
        ("1", {"offload_num_in_group": 2}, "--offload-num-in-group has no effect without --offload-group-size"),
    ],
)
def test_contradictions_are_refused(
    start: Callable[..., Any], asked: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        start(asked, **fields)
    assert "load_model" not in sglang.state.log


# -- what would write or read slots ------------------------------------------------------------------------------------


UPDATED = [GROUP, {"cpu_offload_gb": 1}, {"offload_group_size": 1}]


def manager_of(runner: Any) -> Any:
    return module("sglang.srt.managers.scheduler_components.weight_updater").SchedulerWeightUpdaterManager(runner)


def new_weights(runner: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {name: torch.randn(weight.shape) / 8 for name, weight in runner.model.named_parameters()}


@pytest.mark.parametrize("fields", UPDATED, ids=str)
def test_new_weights_from_disk_are_those_of_a_fresh_start(start: Callable[..., Any], fields: dict[str, Any]) -> None:
    plain = start(None)
    old, weights = outputs(plain), new_weights(plain)
    plain.model.load_state_dict(weights, strict=False)
    fresh = outputs(plain)
    runner = start("1", **fields)
    updater = manager_of(runner).updater
    updater.files |= {"new": weights, "wrong": {**weights, "model.layers.3.mlp.down_proj.weight": torch.zeros(5)}}
    for path, message in (("nowhere", "weights iterator"), ("wrong", "size")):
        success, found = updater.update_weights_from_disk(path, "auto")
        assert not success
        assert message in found
        assert found.endswith("(headrace: the weights are the ones from before)")
        assert updater.model_config.model_path == "first"
        require_equal(outputs(runner), old)
    assert updater.update_weights_from_disk("new", "auto", recapture_cuda_graph=True) == (True, SUCCEEDED)
    assert sglang.state.log[-1] == "recapture False"  # over the copies
    require_equal(outputs(runner), fresh)
    assert figures(runner)["bytes_moved"] > 0


SUCCEEDED = "Succeeded to update model weights."


def require_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("source", ["tensor", "distributed"])
@pytest.mark.parametrize("fields", UPDATED, ids=str)
def test_a_session_of_new_weights(start: Callable[..., Any], fields: dict[str, Any], source: str) -> None:
    """Until its end, and after one that has failed, the weights are the old ones."""
    plain = start(None)
    old, weights = outputs(plain), new_weights(plain)
    plain.model.load_state_dict(weights, strict=False)
    fresh = outputs(plain)
    runner = start("1", **fields)
    manager = manager_of(runner)

    def write(weights: list[Any]) -> Any:
        asked = sglang.SimpleNamespace(tensors=weights, flush_cache=weights[0][0].endswith("lm_head.weight"))
        return getattr(manager, f"update_weights_from_{source}")(asked)

    for fails in (True, False, False):
        assert manager.begin_weight_update(None).success
        assert not manager.begin_weight_update(None).success
        for name, weight in weights.items():
            assert write([(name, weight)])[0]
            if name.endswith("layers.3.mlp.down_proj.weight"):
                require_equal(outputs(runner), old)
        if fails:
            success, message = write([("model.layers.3.mlp.down_proj.weight", torch.zeros(5))])
            assert not success
            assert "size" in message
            assert write([("lm_head.weight", weights["lm_head.weight"])])[0]
        answer = manager.end_weight_update(None)
        assert answer.success is not fails
        assert ("nothing was changed, because rank 0 has failed" in answer.message) == fails
        assert not manager.end_weight_update(None).success
        assert (sglang.state.log[-1] == "flush") is not fails, "forwards since have filled the cache"
        sglang.state.log.clear()
        old = old if fails else fresh
        require_equal(outputs(runner), old)
    assert figures(runner)["bytes_moved"] > 0


def test_a_cache_that_is_not_flushed_is_said(start: Callable[..., Any]) -> None:
    runner = start("1", **GROUP)
    manager = manager_of(runner)
    manager.flush_cache = lambda: False
    for flush in (False, True):
        manager.begin_weight_update(None)
        manager.update_weights_from_tensor(sglang.SimpleNamespace(tensors=[], flush_cache=flush))
        answer = manager.end_weight_update(None)
        assert answer.success is not flush
        assert ("the cache was not flushed" in answer.message) == flush


def test_new_weights_that_cannot_be_taken_are_refused_with_a_message(start: Callable[..., Any]) -> None:
    runner = start("1", **GROUP)
    before, manager = outputs(runner), manager_of(runner)
    answer = manager.update_weights_from_ipc(None)
    assert not answer.success
    assert "headrace offloads this model" in answer.message
    sglang.state.parallel.pp_size = 2
    for answer in (manager.begin_weight_update(None), manager.updater.update_weights_from_disk("new", "auto")):
        success, message = answer if isinstance(answer, tuple) else (answer.success, answer.message)
        assert not success
        assert "stages of a pipeline get new weights one by one" in message
    require_equal(outputs(runner), before)


@pytest.mark.parametrize("call", ["release_memory_occupation", "resume_memory_occupation"])
def test_memory_is_not_released_in_silence(start: Callable[..., Any], call: str) -> None:
    start("1", **GROUP)
    requests = module("sglang.srt.managers.tokenizer_control_mixin").TokenizerControlMixin()
    with pytest.raises(OptionError, match=f"{call} is refused: it needs --enable-memory-saver"):
        getattr(requests, call)(None)
    start("1")  # nothing to do
    requests = module("sglang.srt.managers.tokenizer_control_mixin").TokenizerControlMixin()
    asyncio.run(getattr(requests, call)(None))
    assert sglang.state.log[-1] in ("released", "resumed")


def test_reads_of_slots_are_refused(start: Callable[..., Any]) -> None:
    runner = start("1", **GROUP)
    exporter = module("sglang.srt.model_executor.model_runner_components.weight_exporter").WeightExporter(runner)
    assert exporter.get_weights_by_name("model.layers.3.mlp.down_proj.weight") is None
    assert exporter.send_weights_to_remote_instance("", "", "")[0] is False
    with pytest.raises(StateError, match="check_weights would read slots"):
        runner.check_weights("checksum")


def test_a_resident_model_is_written_and_read_as_always(start: Callable[..., Any]) -> None:
    runner = start("1")  # in force, and nothing to do
    manager = manager_of(runner)
    exporter = module("sglang.srt.model_executor.model_runner_components.weight_exporter").WeightExporter(runner)
    manager.updater.files["new"] = new_weights(runner)
    assert manager.updater.update_weights_from_disk("new", "auto")[0]
    assert manager.begin_weight_update(None).success
    assert manager.update_weights_from_ipc(None).success
    assert exporter.get_weights_by_name("model.layers.3.mlp.down_proj.weight")
    assert runner.check_weights("checksum") == "checksum"


def test_saved_weights_are_the_true_ones(start: Callable[..., Any]) -> None:
    plain = start(None).model.state_dict()
    runner = start("1", **GROUP)
    outputs(runner)
    for name, weight in runner.model.state_dict().items():
        assert torch.equal(weight, plain[name]), name
    assert figures(runner)["bytes_moved"] > 0
