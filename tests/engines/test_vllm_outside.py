"""The promise inside vLLM: what lies outside the layers is never copied into slots, and a failed start leaves nothing.

vLLM compiles parts of towers by replacing ``__call__`` of their blocks, multiplies with heads without calling them, and
may start another engine in the same process.
"""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import vllm_stand_in as vllm
import vllm_workers
from engines import Linear
from headrace.errors import OptionError, PeerError, StateError
from headrace.offloaders.layerwise import EngineOffloader
from ranks import outcomes
from vllm_workers import GROUP, RUNNERS, ids, loaded, make, offloaded_names, require_same_outputs, resident

stand_in = vllm_workers.stand_in  # a fixture for every test

TOWER = {"visual.0.weight", "visual.1.weight"}


class Compiled(Linear):
    """As vLLM's ``support_torch_compile`` leaves a block, compiled or not: no hooks run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


@pytest.fixture
def compiled_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    build = vllm.Model.__init__

    def with_tower(model: nn.Module, *args: Any) -> None:
        build(model, *args)
        for index, block in enumerate(list(model.visual)):
            compiled = Compiled(*block.weight.shape)
            compiled.weight = block.weight
            model.visual[index] = compiled

    monkeypatch.setattr(vllm.Model, "__init__", with_tower)


@pytest.mark.usefixtures("compiled_tower")
@RUNNERS
@pytest.mark.parametrize("params", [["visual", "mlp"], ["ALL_MODEL_PARAMS"], ["visual", "layers"]])
def test_a_budget_reads_a_tower_in_place(params: list[str], second: bool) -> None:
    worker = loaded(own={"device_memory": "5MiB", "params": params}, second=second)
    stats = worker.headrace_stats()
    assert set(stats["uva_names"]) >= TOWER
    assert stats["prefetched_bytes"] > 0
    require_same_outputs(worker, resident())


@pytest.mark.parametrize(
    ("rules", "stays", "in_place"),
    [
        (["visual=resident"], TOWER, set()),
        (["visual=uva"], set(), TOWER),
        (["lm_head=resident"], {"lm_head.weight"}, set()),
        (["lm_head=uva"], set(), {"lm_head.weight"}),
        (["@lm_head=resident"], {"lm_head.weight"}, set()),
        (["visual=resident", "ALL_MODEL_PARAMS=uva"], TOWER, {"lm_head.weight"}),
    ],
)
def test_rules_for_what_is_outside(rules: list[str], stays: set[str], in_place: set[str]) -> None:
    worker = loaded(own={"device_memory": "4MiB", "params": ["ALL_MODEL_PARAMS"], "rules": rules})
    uva = set(worker.headrace_stats()["uva_names"])
    assert uva >= in_place
    assert offloaded_names(worker).isdisjoint(stays)
    assert offloaded_names(worker)
    require_same_outputs(worker, resident())


@pytest.mark.parametrize("rule", ["visual=prefetch", "lm_head=prefetch", "ALL_MODEL_PARAMS=prefetch"])
def test_a_rule_that_would_copy_it_is_refused(rule: str) -> None:
    with pytest.raises(OptionError, match=r"matches \S+ outside the layers, .* give it uva or resident in a rule"):
        loaded(own={"device_memory": "4MiB", "rules": [rule]})
    assert type(vllm.get_offloader()).__module__.startswith("vllm")


def test_layers_that_run_no_hooks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.Layer, "__call__", lambda layer, *args: layer.forward(*args), raising=False)
    with pytest.raises(OptionError, match=r"model\.layers\.\S+ \(Layer\) replaces Module\.__call__"):
        loaded(GROUP)


def test_layers_that_go_on_to_torch_are_none_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of transformers, for instance, which vLLM runs too: GradientCheckpointingLayer."""

    class Layer(vllm.Layer):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    monkeypatch.setattr(vllm, "Layer", Layer)
    worker = loaded(GROUP)
    assert worker.headrace_stats()["prefetched_bytes"] > 0
    require_same_outputs(worker, resident())


# -- starts that fail, and engines that end ----------------------------------------------------------------------------


@RUNNERS
@pytest.mark.parametrize("wrong", [{"offload_params": {"no_such_name"}}, {"offload_num_in_group": 9}])
def test_a_start_that_failed_leaves_vllm_as_it_was(wrong: dict[str, Any], second: bool) -> None:
    with pytest.raises(OptionError):
        loaded({**GROUP, **wrong}, second=second)
    assert type(vllm.get_offloader()) in (vllm.NoopOffloader, vllm.PrefetchOffloader)  # before the runner's, after it
    require_same_outputs(resident(use_v2_model_runner=second), resident())
    require_same_outputs(loaded(GROUP, second=second), resident())


@RUNNERS
def test_the_next_engine_of_a_process(second: bool) -> None:
    plain = resident(use_v2_model_runner=second)
    worker = loaded(GROUP, second=second)
    with pytest.raises(StateError, match="an engine of this process has headrace's offloader already"):
        make(GROUP, second=second)
    require_same_outputs(worker, plain)
    worker.shutdown()
    assert not isinstance(vllm.get_offloader(), EngineOffloader)
    require_same_outputs(loaded(GROUP, second=second), plain)


@RUNNERS
def test_an_engine_without_headrace_in_the_same_process_stops_the_first_one(second: bool) -> None:
    """Its runner sets vLLM's offloader, so nothing would make the slots ready for the graphs of the other engine."""
    worker = loaded(GROUP, second=second)
    vllm.Worker(vllm.VllmConfig(use_v2_model_runner=second), 0, 0, "").init_device()
    with pytest.raises(StateError, match="another engine of this process has replaced headrace's offloader"):
        worker.execute_model(ids())


def test_a_vllm_of_another_version_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules are not asked for names that it never had, or has no longer."""
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.11.0")
    monkeypatch.delitem(sys.modules, "vllm.model_executor.offloader.base")
    with pytest.raises(OptionError, match=r"vLLM 0\.11\.0 is too old: expected 0\.20\.2 to"):
        make(GROUP)


def fail_before_it_meets(rank: int, own: dict[str, Any]) -> float:
    os.environ["HEADRACE_PEER_TIMEOUT"] = "60"
    with pytest.MonkeyPatch.context() as patch:
        vllm.install(patch)
        vllm.state.data_parallel = SimpleNamespace(world_size=2, cpu_group=dist.group.WORLD)
        begin = time.monotonic()
        if rank == 1:
            with pytest.raises(OptionError):
                loaded({**GROUP, "offload_params": {"no_such_name"}}, own)
        else:
            with pytest.raises(PeerError, match=r"rank 1 gave up a shared offload.*no_such_name"):
                loaded(GROUP, own)
        return time.monotonic() - begin


def test_an_error_in_one_engine_is_one_in_those_it_shares_with() -> None:
    assert max(outcomes(2, fail_before_it_meets, {"mode": "shm_cpu"})) < 30
