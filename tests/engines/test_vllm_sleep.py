"""The promise inside vLLM: after sleep and wake-up a model has the weights that it had, and new weights reach it whole.

Here over a stand-in whose memory of weights holds NaN where vLLM's allocator would have unmapped it. vLLM itself runs
in ``test_vllm_cpu.py``, and on a GPU in ``tests/gpu/test_vllm_sleep_gpu.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import vllm_stand_in as vllm
import vllm_workers
from headrace.errors import LimitError, ModelChangedError, OptionError, StateError
from vllm_experts import Experts, OAITritonExperts, TritonExperts
from vllm_pool import Pool, pool_of
from vllm_workers import GROUP, RUNNERS, SOME, another_process, ids, loaded, require_same_outputs, resident

stand_in = vllm_workers.stand_in  # a fixture for every test

WAYS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "group": (GROUP, None),
    "every layer": ({"offload_group_size": 1}, None),
    "in place": ({"cpu_offload_gb": 0.002}, None),
    "budget": (None, SOME),
}
CACHED = {"device_memory": "54MiB", "rules": ["experts=cache"], "expert_slots": 3}
MOVES = [way for way in WAYS if way != "in place"]
Start = Callable[..., tuple[Any, Pool]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """A worker, and the pool that its weights are in."""

    def given(way: str, **kwargs: Any) -> tuple[Any, Pool]:
        worker = loaded(*{**WAYS, "cached": (None, CACHED)}[way], **kwargs)
        pool = pool_of(worker)
        monkeypatch.setattr(vllm.CuMemAllocator, "instance", pool)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", pool.snapshot)
        return worker, pool

    return given


def new_weights(seed: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    model = resident().get_model()
    return {name: torch.randn_like(weight) / 8 for name, weight in model.named_parameters()}


def given(weights: dict[str, torch.Tensor]) -> vllm.Worker:
    """vLLM alone, started with these ``weights``."""
    plain = resident()
    plain.get_model().load_state_dict(weights, strict=False)
    return plain


def tensors(worker: Any) -> dict[str, int]:
    return {name: id(tensor) for name, tensor in worker.model_runner.get_model().named_parameters()}


def copied() -> list[str]:
    lines = [line.partition("headrace: ")[2] for line in vllm.state.logger.lines]
    return [line.partition(" of resident")[0] for line in lines if "copied to host memory" in line]


# -- sleep -------------------------------------------------------------------------------------------------------------


@RUNNERS
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_weights_are_back_after_it(start: Start, way: str, level: int, second: bool) -> None:
    """vLLM saves nothing of what headrace has; its own small tensors are saved at level 2, too."""
    plain, (worker, pool) = resident(), start(way, second=second)
    small = sum(parameter.nbytes for parameter in plain.get_model().parameters() if parameter.dim() == 1)
    require_same_outputs(worker, plain)
    for _ in range(3):
        worker.sleep(level)
        assert pool.saved_bytes == small
        assert worker.model_runner.get_model().lm_head.weight.isnan().all()
        with pytest.raises(
            StateError, match=r"the weights are asleep: end the sleep of the engine first \(wake_up\(\)\)"
        ):
            worker.execute_model(ids())
        worker.wake_up()
        require_same_outputs(worker, plain)
    assert (worker.headrace_stats()["bytes_moved"] > 0) == (way in MOVES)
    first, *later = copied()
    assert first != "0 B"
    assert later == ["0 B", "0 B"]
    assert worker.calls.count("sleep 1") == 3


def test_weights_and_the_cache_wake_up_one_after_the_other(start: Start) -> None:
    plain, (worker, _) = resident(), start("group")
    worker.sleep(1)
    worker.wake_up(["kv_cache"])
    with pytest.raises(StateError, match="asleep"):
        worker.execute_model(ids())
    worker._offloader.prepare_next()  # vLLM's replays call it: no copy goes to memory that is gone
    worker.wake_up(["weights"])
    require_same_outputs(worker, plain)
    worker.wake_up()
    require_same_outputs(worker, plain)
    assert worker.headrace_stats()["bytes_moved"] > 0


def test_what_was_written_to_a_resident_meanwhile_stays(start: Start) -> None:
    plain, (worker, _) = resident(), start("group")
    for _ in range(2):
        for each in (plain, worker):
            each.model_runner.get_model().lm_head.weight.data.mul_(2)
        worker.sleep(1)
        worker.wake_up()
        require_same_outputs(worker, plain)
    assert [line == "0 B" for line in copied()] == [False, False]


def test_memory_with_other_tensors_in_it_is_saved_by_vllm(start: Start) -> None:
    """The allocator of torch puts small allocations into one."""
    plain, (worker, pool) = resident(), start("group")
    address = worker.model_runner.get_model().lm_head.weight.data_ptr()
    worker.sleep(1)
    alone = pool.saved_bytes
    worker.wake_up()
    pool.mixed[address] = address + 64
    worker.sleep(1)
    assert pool.saved_bytes == alone + pool.pointer_to_data[address].size
    worker.wake_up()
    require_same_outputs(worker, plain)


def test_without_sleep_mode_it_stays_as_it_is() -> None:
    """vLLM has no pool then, and frees nothing."""
    plain, worker = resident(), loaded(GROUP)
    sys.modules.pop("vllm.device_allocator.cumem")
    worker.sleep(1)
    assert copied() == ["0 B"]
    worker.wake_up()
    require_same_outputs(worker, plain)


def test_an_error_of_vllm_leaves_it_asleep(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, (worker, pool) = resident(), start("group")
    with monkeypatch.context() as patch:
        patch.setattr(pool, "sleep", lambda offload_tags: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            worker.sleep(1)
    assert {data.tag for data in pool.pointer_to_data.values()} == {"weights"}
    with pytest.raises(StateError, match="asleep"):
        worker.execute_model(ids())
    worker.wake_up()
    require_same_outputs(worker, plain)


def test_too_little_host_memory_leaves_it_awake(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, (worker, pool) = resident(), start("group")

    def full(*_: Any, **__: Any) -> None:
        raise LimitError("no room", "MemAvailable", 2, 1)

    monkeypatch.setattr(worker._offloader.life.copies, "make_room", full)
    with pytest.raises(LimitError):
        worker.sleep(1)
    assert not any(data.is_asleep for data in pool.pointer_to_data.values())
    require_same_outputs(worker, plain)


@pytest.mark.parametrize("kernel", [TritonExperts, OAITritonExperts])
def test_cached_experts_are_fetched_again(start: Start, kernel: type[TritonExperts]) -> None:
    """New weights would meet another kernel, made while they are loaded."""
    mlp = partial(Experts, experts_cls=kernel)
    plain, (worker, _) = resident(mlp=mlp), start("cached", mlp=mlp)
    for level in (1, 2):
        require_same_outputs(worker, plain)
        before = [layer["fetched"] for layer in worker.headrace_stats()["experts"]]
        worker.sleep(level)
        worker.wake_up()
        require_same_outputs(worker, plain)
        after = [layer["fetched"] for layer in worker.headrace_stats()["experts"]]
        assert all(now > then for now, then in zip(after, before, strict=True))
    what = "objects of its own" if kernel is OAITritonExperts else "its kernels of cached experts anew"
    with pytest.raises(OptionError, match=rf"reload_weights is refused: .*{what}.*nothing was changed"):
        worker.reload_weights([])
    require_same_outputs(worker, plain)


def test_a_worker_that_offloads_nothing_sleeps_as_vllms(start: Start) -> None:
    worker = loaded()
    worker.sleep(2)
    worker.wake_up()
    assert worker.calls == ["sleep 2", "wake_up"]


# -- new weights -------------------------------------------------------------------------------------------------------


@RUNNERS
@pytest.mark.parametrize("way", WAYS)
def test_new_weights_are_those_of_a_fresh_start(start: Start, way: str, second: bool) -> None:
    worker, _ = start(way, second=second)
    require_same_outputs(worker, resident())
    before = tensors(worker)
    for seed in (1, 2):
        weights = new_weights(seed)
        worker.reload_weights(weights.items())
        fresh = given(weights)
        require_same_outputs(worker, fresh)
        assert worker.compute_weight_checksums() == fresh.compute_weight_checksums()
        assert tensors(worker) == before
        worker.sleep(2)  # what a sleep keeps is the new
        worker.wake_up()
        require_same_outputs(worker, fresh)
    assert (worker.headrace_stats()["bytes_moved"] > 0) == (way in MOVES)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_given_stays(start: Start, way: str) -> None:
    worker, _ = start(way)
    weights = {name: weight for name, weight in new_weights().items() if ".3." in name or "lm_head" in name}
    worker.reload_weights(weights.items())
    require_same_outputs(worker, given(weights))


def test_zeros(start: Start) -> None:
    plain, (worker, _) = resident(), start("group")
    for each in (plain, worker):
        each.reset_weights()
    require_same_outputs(worker, plain)
    assert worker.headrace_stats()["bytes_moved"] > 0


def interrupt(model: Any) -> None:
    raise KeyboardInterrupt


def replace(model: Any) -> None:
    model.model.layers[3].mlp.down_proj.weight = nn.Parameter(torch.zeros(1))


# What fails when all other weights are written, the error, and what vLLM does after loading.
FAILURES: dict[str, tuple[dict[str, Any], type[BaseException], str, Any]] = {
    "name": ({"model.layers.9.weight": torch.zeros(2)}, AttributeError, "9", None),
    "shape": ({"lm_head.weight": torch.zeros(3, 5)}, RuntimeError, "size", None),
    "part": ({"model.layers.3.mlp.down_proj.weight": torch.zeros(8, 1)}, OptionError, "down_proj was given in part", 0),
    "interrupt": ({}, KeyboardInterrupt, "", interrupt),
    "replaced": ({}, ModelChangedError, "has put other tensors into the model; nothing was changed", replace),
}


@pytest.mark.parametrize("what", FAILURES)
@pytest.mark.parametrize("way", WAYS)
def test_after_an_error_all_weights_are_the_old_ones(start: Start, way: str, what: str) -> None:
    wrong, error, message, after_loading = FAILURES[what]
    plain, (worker, _) = resident(), start(way)
    model, before = worker.model_runner.get_model(), tensors(worker)
    weights = new_weights()
    if after_loading:
        model.after_loading = lambda: after_loading(model)
    with pytest.raises(error, match=message):
        worker.reload_weights({**{n: w for n, w in weights.items() if n not in wrong}, **wrong}.items())
    assert tensors(worker) == before
    require_same_outputs(worker, plain)
    assert worker.compute_weight_checksums() == plain.compute_weight_checksums()
    with pytest.raises(StateError, match="load_weights would write into slots"):
        model.load_weights(weights.items())
    vars(model).pop("after_loading", None)
    worker.reload_weights(weights.items())
    require_same_outputs(worker, given(weights))


def test_a_write_that_fails_in_the_middle_stops_the_model(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a device that fails can do that; a complete reload mends it."""
    worker, _ = start("group")
    weights = new_weights()
    with monkeypatch.context() as patch:
        patch.setattr("headrace.lifetime.update._bytes_of", _failing_once(sys.modules["headrace.lifetime.update"]))
        with pytest.raises(StateError, match="some weights are new and others are not"):
            worker.reload_weights(weights.items())
    with pytest.raises(StateError, match="some weights are new and others are not"):
        worker.execute_model(ids())
    worker.reload_weights(weights.items())
    require_same_outputs(worker, given(weights))


def _failing_once(module: Any) -> Callable[..., torch.Tensor]:
    real, calls = module._bytes_of, list[str]()

    def bytes_of(life: Any, name: str) -> torch.Tensor:
        calls.append(name)
        if life.broken and calls.count(name) == 2 and len(calls) > len(set(calls)) + 3:
            raise RuntimeError("the device failed")
        return real(life, name)  # type: ignore[no-any-return]

    return bytes_of


def test_while_asleep_they_are_refused(start: Start) -> None:
    plain, (worker, _) = resident(), start("group")
    worker.sleep(1)
    with pytest.raises(StateError, match=r'reload_weights: the weights are asleep; call wake_up\(tags=\["weights"\]\)'):
        worker.reload_weights(new_weights().items())
    worker.wake_up()
    require_same_outputs(worker, plain)


def test_codes_are_refused() -> None:
    worker = loaded(GROUP, {"codec": "exp3"}, change_model=lambda model: model.bfloat16())
    assert worker._offloader.plan.coded_units
    before = worker.execute_model(ids())
    with pytest.raises(OptionError, match=r"reload_weights is refused: .*length of the codes.*nothing was changed"):
        worker.reload_weights(new_weights().items())
    assert torch.equal(worker.execute_model(ids()), before)


def test_a_worker_that_offloads_nothing_reloads_as_vllms() -> None:
    weights = new_weights()
    another_process()
    worker = loaded()
    worker.reload_weights(weights.items())
    require_same_outputs(worker, given(weights))
