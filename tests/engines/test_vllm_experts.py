"""The promise: inside vLLM, cached experts give the bits of the resident engine, or are refused with the reason."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import headrace.experts.cache  # noqa: F401 - before the first test, for its fixture
import packed_kernels
import vllm_experts
import vllm_stand_in as vllm
import vllm_workers
from engines import WIDTH
from headrace.errors import OptionError, OptionTypeError, RaceError, StateError
from headrace.plan.nominal_rates import NOMINAL_GPU
from headrace.planning.context import make_planner
from vllm_experts import (
    NUM_EXPERTS,
    DeepGemmExperts,
    Experts,
    FusedMoEParallelConfig,
    MarlinExperts,
    OAITritonExperts,
    OAITritonMxfp4ExpertsMonolithic,
    TritonExperts,
)
from vllm_workers import another_process, ids, loaded, make, offloaded_names, require_same_outputs, resident

stand_in = vllm_workers.stand_in  # a fixture for every test

CACHE = {"device_memory": "54MiB", "rules": ["experts=cache"]}


def cached(slots: int, **own: Any) -> dict[str, Any]:
    return {**CACHE, "expert_slots": slots, **own}


@pytest.mark.parametrize("slots", [3, 24])
def test_packed_weights_have_two_names(slots: int) -> None:
    """AWQ, GPTQ and compressed-tensors give the packed weights a second name in the same module."""
    mlp = partial(Experts, experts_cls=MarlinExperts, packed=True)
    worker, plain = loaded(own=cached(slots), mlp=mlp), resident(mlp=mlp)
    require_same_outputs(worker, plain)
    assert all(layer["fetched"] > 0 for layer in worker.headrace_stats()["experts"])
    said = [line for line in vllm.state.logger.lines if "Marlin kernel of experts repeats its own bits" in line]
    assert len(said) == 1  # of 8 layers


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("slots", [1, 3, 12])
def test_scales_of_whole_experts(slots: int, divided: bool) -> None:
    """NVFP4 in Marlin: beside the scales of blocks, which move with an expert, it has one float per expert and weight.

    Those stay on the device, and the kernel finds them by row.
    """
    mlp = partial(Experts, experts_cls=MarlinExperts, scaled=True, divided=divided)
    worker = loaded(own=cached(slots, device_memory="42MiB"), mlp=mlp)
    require_same_outputs(worker, resident(mlp=mlp))
    layers = worker.headrace_stats()["experts"]
    assert len(layers) == vllm.NUM_LAYERS
    assert all(layer["fetched"] > 0 for layer in layers)


def test_scales_of_whole_experts_that_a_kernel_cannot_find_by_row() -> None:
    with pytest.raises(OptionError, match=r"its kernel has a w1\.alpha_or_gscale \[32\] per expert outside the module"):
        loaded(own=cached(3), mlp=partial(Experts, scaled=True))


KERNELS = [TritonExperts, MarlinExperts]
PACKED = [OAITritonMxfp4ExpertsMonolithic, OAITritonExperts]  # weights and scales are in objects
IN_TURN = [(1, True), (3, True), (3, False), (24, True)]


@pytest.mark.parametrize(
    ("kernel", "slots", "second"),
    [*((kernel, *each) for kernel in KERNELS for each in IN_TURN), (PACKED[0], 1, True), (PACKED[1], 24, False)],
)
def test_outputs_are_the_same_and_experts_move(slots: int, second: bool, kernel: type[TritonExperts]) -> None:
    """The stand-in's kernels round by the number of experts that they are configured for, as vLLM's may."""
    mlp = partial(Experts, experts_cls=kernel)
    plain = resident(use_v2_model_runner=second, mlp=mlp)
    worker = loaded(own=cached(slots), second=second, mlp=mlp)
    require_same_outputs(worker, plain)
    layers = worker.headrace_stats()["experts"]
    assert len(layers) == vllm.NUM_LAYERS
    for layer in layers:
        assert (layer["steps"], layer["num_slots"]) == (4, slots)
        assert layer["fetched"] > 0
        assert layer["in_place"] > 0
    assert f"info: headrace: of {vllm.NUM_LAYERS} layers, {slots} of {NUM_EXPERTS} experts on the GPU at a time" in (
        "\n".join(vllm.state.logger.lines)
    )


@pytest.mark.parametrize("slots", [None, 3])  # a number needs no rule
@pytest.mark.parametrize(
    ("kernel", "is_cached"), [(TritonExperts, True), (MarlinExperts, True), (PACKED[0], True), (DeepGemmExperts, False)]
)
def test_a_budget_caches_where_that_is_faster(
    kernel: type[TritonExperts], is_cached: bool, slots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_gpu(inventory: Any, profile: Any, *args: Any, **options: Any) -> Any:
        made = make_planner(inventory, profile, *args, **options)
        readers = {s.name for s in inventory.storages if not s.modules.isdisjoint(profile.row_readers)}
        rates = replace(NOMINAL_GPU, fetch_bytes_per_s=NOMINAL_GPU.copy_bytes_per_s.points[-1][1])
        profile = replace(made.profile, experts_per_token=2)
        return replace(made, rates=rates, profile=profile, cacheable=frozenset(readers))

    monkeypatch.setattr("headrace.offloaders.layerwise.make_planner", on_gpu)
    mlp, own = partial(Experts, experts_cls=kernel), {"device_memory": "44MiB" if kernel in PACKED else "42MiB"}
    if slots and not is_cached:
        with pytest.raises(OptionError, match="expert_slots = 3 has no effect: the plan caches no experts"):
            loaded(own={**own, "expert_slots": slots}, mlp=mlp)
        return
    worker = loaded(own={**own, "expert_slots": slots} if slots else own, mlp=mlp)
    require_same_outputs(worker, resident(mlp=mlp))
    layers = worker.headrace_stats()["experts"]
    assert len(layers) == (vllm.NUM_LAYERS if is_cached else 0)
    assert all(layer["fetched"] > 0 and slots in (None, layer["num_slots"]) for layer in layers)


@pytest.mark.parametrize("rules", [[], ["experts=uva"]])
def test_small_scales_stay_where_nothing_is_cached(rules: list[str]) -> None:
    worker = loaded(own={"device_memory": "42MiB", "rules": rules}, mlp=Experts)
    assert worker.headrace_stats()["uva_bytes"] + worker.headrace_stats()["prefetched_bytes"] > 0
    assert not [name for name in worker.headrace_stats()["uva_names"] if "scale" in name]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("divided", [False, True])
def test_rows_are_compared_with_the_store(
    kernel: type[TritonExperts], divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With HEADRACE_DEBUG=1, after each run of a kernel; what another stream has overwritten meanwhile is found."""
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    worker = loaded(
        own={**cached(5), "device_memory": "42MiB"}, mlp=partial(Experts, experts_cls=kernel, divided=divided)
    )
    worker.execute_model(ids())
    assert all(layer["fetched"] > 0 for layer in worker.headrace_stats()["experts"])
    apply = kernel.apply

    def overwritten(self: Any, **arguments: Any) -> None:
        apply(self, **arguments)
        arguments["w2"][:5].zero_()  # slots

    monkeypatch.setattr(kernel, "apply", overwritten)
    worker.execute_model(ids())
    with pytest.raises(RaceError, match="differ from the store"):
        worker.headrace_stats()


@pytest.mark.parametrize("fault", ["overwritten", "scale", "numbers"])
def test_rows_of_packed_experts_are_compared_with_the_store(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also their scales, which lie in other objects; and rows that are those of other experts."""
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    worker = loaded(own=cached(24), mlp=partial(Experts, experts_cls=PACKED[0]))
    worker.execute_model(ids())
    assert all(layer["fetched"] > 0 for layer in worker.headrace_stats()["experts"])
    packed = sys.modules[vllm_experts.PACKED_MOE]
    run = packed.triton_kernel_fused_experts

    def faulty(output: Any, x: Any, w1: Any, w2: Any, routing: Any, *others: Any, **kinds: Any) -> Any:
        found = run(output, x, w1, w2, routing, *others, **kinds)
        values, scales = w2.storage.data, kinds["quant_config"]._w2.scale.weight_scale.storage.data
        if fault == "numbers":
            values[:24] = values[:24].roll(1, 0)
        else:
            (values if fault == "overwritten" else scales)[:24] = 0
        return found

    monkeypatch.setattr(packed, "triton_kernel_fused_experts", faulty)
    worker.execute_model(ids())
    with pytest.raises(RaceError, match="differ from the store"):
        worker.headrace_stats()


@pytest.mark.parametrize(
    "own", [{"rules": ["experts=uva"]}, {"rules": ["experts=prefetch"]}, {"device_memory": "12MiB"}]
)
def test_packed_experts_move_without_a_cache(own: dict[str, Any]) -> None:
    """What objects hold is where its parameter lies: in a slot, in host memory, on the device."""
    mlp = partial(Experts, experts_cls=PACKED[0])
    worker = loaded(own={"device_memory": "42MiB", **own}, mlp=mlp)
    require_same_outputs(worker, resident(mlp=mlp))
    stats = worker.headrace_stats()
    assert stats["uva_bytes"] + stats["bytes_moved"] > 0
    moved = offloaded_names(worker)
    assert {name.rpartition(".")[2] for name in moved} >= {"w13_weight_bytes", "w2_weight_bytes"}


class DeepGemmMegaMoEExperts(nn.Module):
    """As vLLM 0.33 has one: experts in a kernel's own layout, and not in a ``RoutedExperts``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.randn(NUM_EXPERTS, width, width) / width, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w13_weight[3]


def test_experts_beside_those_of_vllm_are_refused_by_name() -> None:
    with pytest.raises(OptionError, match=r"DeepGemmMegaMoEExperts runs them, which reads no rows: choose another"):
        loaded(own=cached(3), mlp=DeepGemmMegaMoEExperts)
    worker = loaded(own={"device_memory": "8MiB"}, mlp=DeepGemmMegaMoEExperts)  # a budget moves them in another way
    assert worker._offloader.plan.cached == ()
    require_same_outputs(worker, resident(mlp=DeepGemmMegaMoEExperts))


def test_another_triton_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[vllm_experts.PACKED_MOE], "triton_kernels_version", "3.6")
    with pytest.raises(OptionError, match=r"triton_kernels 3\.6 lists tiles in another way: remove it, .*3\.5\.1"):
        loaded(own=cached(3), mlp=partial(Experts, experts_cls=PACKED[0]))


def test_a_layout_that_mixes_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of scales for Blackwell do."""
    plain = packed_kernels.swizzled

    def mixed(data: torch.Tensor) -> Any:
        made = plain(data)
        if data.shape[-1] == 4:  # scales
            made.storage.data = made.storage.data.reshape(1, -1, 8)
        return made

    monkeypatch.setattr(packed_kernels, "swizzled", mixed)
    model = resident(mlp=partial(Experts, experts_cls=PACKED[0])).model_runner.get_model()
    kernels = importlib.import_module("headrace.adapters.vllm.experts").KernelExperts
    experts = model.model.layers[0].mlp.experts
    assert kernels.hold_packed(experts) == {}
    reasons = kernels.find(model)
    assert len(reasons) == vllm.NUM_LAYERS
    assert all("layout that mixes experts: choose another kernel (--moe-backend marlin)" in r for r in reasons.values())


@pytest.mark.parametrize("kernel", [*KERNELS, *PACKED])
def test_experts_of_other_ranks_are_left_out(kernel: type[TritonExperts]) -> None:
    """With expert parallelism a rank has some of the experts, and numbers of all of them come in."""
    mlp = partial(Experts, divided=True, experts_cls=kernel)
    plain = resident(mlp=mlp)
    worker = loaded(own={**cached(5), "device_memory": "42MiB"}, mlp=mlp)
    require_same_outputs(worker, plain)
    layers = worker.headrace_stats()["experts"]
    assert [layer["num_experts"] for layer in layers] == [3 * NUM_EXPERTS // 4] * vllm.NUM_LAYERS
    assert all(layer["fetched"] > 0 for layer in layers)


def test_hits_are_logged_and_counted_while_the_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = loaded(own=cached(24), mlp=Experts)
    monkeypatch.setattr(sys.modules["headrace.adapters.vllm.worker"], "_LOG_EVERY_S", 0.0)
    worker._hits._next = 0.0
    for _ in range(4):  # asked for in one step, logged in the next
        worker.execute_model(ids())
    layers = worker.headrace_stats()["experts"]
    used = sum(layer["hits"] + layer["fetched"] + layer["in_place"] for layer in layers) // 4
    lines = [line for line in vllm.state.logger.lines if "experts in use were on the GPU" in line]
    assert len(lines) == 2
    assert f"info: headrace: 0.0% of {used} experts in use" in lines[0]
    assert f"of {2 * used} experts in use were on the GPU" in lines[1]
    assert "info: headrace: 0.0%" not in lines[1]
    samples = [sample for metric in worker._hits._uses.collect() for sample in metric.samples]
    counted = {s.labels["found"]: s.value for s in samples if s.name == "headrace_expert_uses_total"}
    assert sum(counted.values()) == 3 * used
    assert counted["device"] > 0
    assert counted["fetched"] > 0


def test_the_kernel_of_the_stand_in_rounds_by_its_configuration() -> None:
    experts = Experts(WIDTH)
    experts.experts.quant_method.process_weights_after_loading(experts.experts)
    x = torch.randn(4, WIDTH)
    plain = experts(x)
    with vllm_experts.override_config(vllm_experts.try_get_optimal_moe_config((99, 1, 1), (99, 1, 1), 2, None, 4)):
        assert not torch.equal(experts(x), plain)


@pytest.mark.parametrize("kernel", [TritonExperts, PACKED[0]])
def test_the_reference_moves_nothing(kernel: type[TritonExperts]) -> None:
    mlp = partial(Experts, experts_cls=kernel)
    plain = resident(mlp=mlp)
    worker = loaded(own=cached(3), moves=False, mlp=mlp)
    require_same_outputs(worker, plain)
    stats = worker.headrace_stats()
    assert (stats["offloader"], stats["experts"]) == ("NoCopyOffloader", [])


def test_checksums_are_those_of_the_weights() -> None:
    worker = loaded(own=cached(3), mlp=Experts)
    worker.execute_model(ids())
    assert worker.compute_weight_checksums() == resident(mlp=Experts).compute_weight_checksums()


def test_a_kernel_that_changes_later_is_asked() -> None:
    """vLLM sets attributes of a kernel at any time."""
    worker, plain = loaded(own=cached(3), mlp=Experts), resident(mlp=Experts)
    for each in (worker, plain):
        kernel = each.model_runner.get_model().model.layers[0].mlp.experts.quant_method.moe_kernel.fused_experts
        kernel.quant_config._w2.scale = None
        kernel.factor = 3.0
        own = type(kernel).apply

        def tripled(self: Any, own: Any = own, **arguments: Any) -> None:
            own(self, **arguments)
            arguments["output"].mul_(self.factor if hasattr(self, "factor") else 1.0)

        kernel.__class__ = type("Tripled", (type(kernel),), {"apply": tripled})
    require_same_outputs(worker, plain)


@pytest.mark.parametrize(("kind", "reason"), [
    ({"experts_cls": DeepGemmExperts}, r"DeepGemmExperts runs them, .* \(--moe-backend triton, or marlin\)"),
    ({"parallel": FusedMoEParallelConfig(use_all2all=True)}, r"data and expert parallelism together"),
    ({"parallel": FusedMoEParallelConfig(enable_eplb=True)}, r"--enable-eplb"),
    ({"with_lora": True}, r"LoRA adapters .* \(--enable-lora\)"),
], ids=["another kernel", "tokens travel", "experts travel", "LoRA"])  # fmt: skip
def test_refused_before_the_weights_are_loaded(kind: dict[str, Any], reason: str) -> None:
    final: list[Any] = []
    config = {"mlp": partial(Experts, **kind), "change_model": final.append}
    with pytest.raises(OptionError, match=rf"mlp\.experts cannot be cached: .*{reason}.*experts=uva"):
        loaded(own=cached(3), **config)
    assert not final
    another_process()
    # What nobody asked to cache is only not cached.
    require_same_outputs(loaded(own={"device_memory": "54MiB"}, mlp=partial(Experts, **kind)), resident(**config))


def test_a_kernel_that_keeps_scales_for_itself_is_refused() -> None:
    mlp = partial(Experts, copies_scales=True)
    message = r"cannot be cached: its kernel has a w1\.scale \[32, 256\] per expert outside"
    with pytest.raises(OptionError, match=message):
        loaded(own=cached(3), mlp=mlp)


def test_experts_that_never_run_are_found() -> None:
    worker = loaded(own=cached(3), mlp=partial(Experts, is_called=False))
    worker.determine_available_memory()
    with pytest.raises(StateError, match=r"8 of 8 offloaded modules did not run .*layers\.0\.mlp\.experts"):
        worker.execute_model(ids())


def test_an_older_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.install(monkeypatch, "0.31.0")
    with pytest.raises(OptionError, match=r"experts cannot be cached inside this engine.*experts=uva"):
        loaded(own=cached(3), mlp=Experts)


@pytest.mark.parametrize(("own", "error", "text"), [
    (cached(0), OptionError, r"headrace\.expert_slots = 0: expected at least 1"),
    ({**CACHE, "expert_slots": "3"}, OptionTypeError, r"headrace\.expert_slots: .* found str '3'"),
    ({"expert_slots": 3}, OptionError, r"headrace\.expert_slots has no effect without headrace\.device_memory"),
    ({**CACHE, "rules": "experts=cache"}, OptionTypeError, r"headrace\.rules: expected a list"),
])  # fmt: skip
def test_keys(own: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(own=own)
