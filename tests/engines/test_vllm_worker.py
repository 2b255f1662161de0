"""headrace's worker against a stand-in for vLLM: the right offloader at the right moment, with both model runners.

What vLLM's own tests ask of an offloader is here too: the same outputs with and without, the right offloader
installed, more than no bytes, towers reached.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import vllm_stand_in as vllm
import vllm_workers
from checks import raising
from engine_names import differences
from engines import WIDTH, Wrapped
from headrace.adapters.engine_interface import Refusal
from headrace.adapters.vllm.options import REFUSED, refuse_unsupported
from headrace.config import Prefetch
from headrace.errors import OptionError, OutsideAccessError, SelectionError, StateError
from headrace.offloaders.layerwise import EngineOffloader
from vllm_names import NAMES
from vllm_workers import GROUP, RUNNERS, SOME, another_process, ids, loaded, make, require_same_outputs, resident

stand_in = vllm_workers.stand_in  # a fixture for every test


def test_the_stand_in_has_what_a_real_one_has_to_have() -> None:
    assert differences(NAMES, "0.33.0") == []


# -- which offloader, what it moves ------------------------------------------------------------------------------------


@RUNNERS
@pytest.mark.parametrize(
    ("flags", "own"),
    [
        (GROUP, None),
        ({"offload_group_size": 3, "offload_num_in_group": 2, "offload_prefetch_step": 2}, None),
        ({"offload_group_size": 2, "offload_params": {"mlp"}}, {"measure_stalls": True}),
        ({"cpu_offload_gb": 1.0}, None),
        ({"cpu_offload_gb": 0.001, "cpu_offload_params": {"mlp"}}, None),
        ({}, SOME),
        ({}, {**SOME, "batch": [1, 16], "params": ["mlp"], "rules": ["down_proj=prefetch"]}),
    ],
    ids=["group", "two of three", "named", "uva", "uva, limited", "budget", "budget, narrowed"],
)
def test_outputs_are_the_same_and_bytes_move(flags: dict[str, Any], own: dict[str, Any] | None, second: bool) -> None:
    plain = resident(use_v2_model_runner=second)
    worker = loaded(flags, own, second=second)
    assert type(vllm.get_offloader()) is EngineOffloader
    require_same_outputs(worker, plain)
    stats = worker.headrace_stats()
    assert stats["offloader"] == "EngineOffloader"
    assert stats["prefetched_bytes"] + stats["uva_bytes"] > 500_000
    if stats["num_units"]:
        assert stats["bytes_moved"] >= 4 * stats["prefetched_bytes"]
        assert stats["copies"] >= 4 * stats["num_units"]
    assert any(line.startswith("info: headrace: ") for line in vllm.state.logger.lines)


@RUNNERS
def test_coded_units_give_the_same_outputs(second: bool) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        plain, worker = vllm_workers.resident(), loaded(GROUP, {"codec": "exp3"}, second=second)
        require_same_outputs(worker, plain)
    finally:
        torch.set_default_dtype(torch.float32)
    stats = worker.headrace_stats()
    assert {unit.store for unit in worker._offloader.plan.units} == {"exp3"}
    assert 0 < stats["bytes_moved"] < 0.8 * stats["copies"] * stats["prefetched_bytes"] / stats["num_units"]


@pytest.mark.parametrize(
    ("version", "second", "num_calls"), [("0.33.0", True, 3), ("0.33.0", False, 3), ("0.27.0", True, 2)]
)
def test_layers_are_wrapped_while_the_model_is_built_and_finished_once(
    monkeypatch: pytest.MonkeyPatch, version: str, second: bool, num_calls: int
) -> None:
    vllm.install(monkeypatch, version)
    calls = []
    for name in ("wrap_modules", "post_init"):
        method = getattr(EngineOffloader, name)

        def noted(self: Any, *args: Any, _name: str = name, _method: Callable[..., Any] = method) -> Any:
            calls.append(_name)
            return _method(self, *args)

        monkeypatch.setattr(EngineOffloader, name, noted)
    worker = loaded(GROUP, second=second)
    # Both runners end loading with a call of their own (the second one since 0.28), and a second call has no effect.
    assert calls == ["wrap_modules", "post_init", "post_init"][:num_calls]
    assert "load_model" not in vars(worker.model_runner)
    assert len(worker._offloader.plan.units) == 2


@RUNNERS
def test_the_next_forward_is_prepared_behind_each_one(monkeypatch: pytest.MonkeyPatch, second: bool) -> None:
    worker = loaded(GROUP, second=second)
    prepared = []
    monkeypatch.setattr(worker._offloader, "prepare_next", lambda: prepared.append(True))
    worker.execute_model(ids())
    assert prepared == [True]


def test_a_replay_after_an_interrupt_finds_its_units() -> None:
    """Hooks run after an error, but not after Ctrl-C: the forward seemed to go on, so nothing was made ready."""
    worker = loaded(GROUP)
    plain = worker.execute_model(ids())
    pipeline = worker._offloader._session.prefetcher

    hook = worker.model_runner.get_model().visual[0].register_forward_hook(raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        worker.execute_model(ids())
    hook.remove()
    worker._offloader.sync_prev_onload()
    assert pipeline.replays.is_due
    assert [slot.unit for slot in pipeline.replays.live] == [0]
    assert torch.equal(worker.execute_model(ids()), plain)


def test_the_group_rule_counts_the_layers_of_the_model() -> None:
    worker = loaded({**GROUP, "offload_params": {"mlp"}})
    assert vllm_workers.offloaded_names(worker) == {
        f"model.layers.{index}.mlp.{name}.weight" for index in (3, 7) for name in ("gate_up_proj", "down_proj")
    }
    assert worker._options.policy == Prefetch(4, 1, 1, ["mlp"])


@RUNNERS
def test_a_pattern_reaches_a_tower(second: bool) -> None:
    worker = loaded({**GROUP, "offload_params": {"mlp", "visual"}}, second=second)
    assert worker.headrace_stats()["uva_names"] == ["visual.0.weight", "visual.1.weight"]
    require_same_outputs(worker, resident())


def test_a_budget_looks_rows_up_in_place_and_keeps_the_head() -> None:
    """A budget so small that whatever may leave does; the table and the head are told apart by vLLM's classes."""
    plan = loaded(own={"device_memory": "2MiB"})._offloader.plan
    assert "model.embed_tokens.weight" in plan.uva
    assert "lm_head.weight" in plan.resident
    assert plan.device_bytes <= 2 * 2**20


def wrap_down_proj(model: vllm.Model) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj = Wrapped(layer.mlp.down_proj)


@RUNNERS
def test_names_reach_what_lora_has_wrapped(second: bool) -> None:
    flags = {**GROUP, "offload_params": {"mlp.down_proj.weight"}}
    worker = loaded(flags, second=second, change_model=wrap_down_proj)
    assert vllm_workers.offloaded_names(worker) == {
        f"model.layers.{index}.mlp.down_proj.base_layer.weight" for index in (3, 7)
    }
    require_same_outputs(worker, resident())


@RUNNERS
def test_a_draft_model_stays_where_it_is(second: bool) -> None:
    worker = loaded(GROUP, second=second, draft_layers=4)
    plain = resident(draft_layers=4)
    assert worker.headrace_stats()["num_units"] == 2
    assert {name.split(".")[2] for name in vllm_workers.offloaded_names(worker)} == {"3", "7"}
    with torch.inference_mode():
        assert torch.equal(worker.model_runner.drafter(ids()), plain.model_runner.drafter(ids()))  # type: ignore[misc]
    require_same_outputs(worker, plain)


@RUNNERS
def test_graphs_of_a_draft_model_are_not_taken_for_the_models(second: bool) -> None:
    """Each would make what the next forward needs first be copied again."""
    copies = []
    for draft_replays in (0, 3):
        another_process()
        worker = loaded(GROUP, second=second, draft_layers=4)
        for _ in range(5):
            worker.execute_model(ids())
            worker.sample_tokens(None, draft_replays=draft_replays)
        copies.append(worker.headrace_stats()["copies"])
    assert copies[0] == copies[1]
    vllm.get_offloader().sync_prev_onload()  # the model's own, for one that is not replayed: the units are given up
    worker.execute_model(ids())
    assert worker.headrace_stats()["copies"] - copies[1] > copies[1] / 5


# -- layers that do not run --------------------------------------------------------------------------------------------


def serve(worker: Any) -> float:
    """What vLLM has a loaded worker do before it serves."""
    assert worker.determine_available_memory() == 10**9
    return float(worker.compile_or_warm_up_model())


def go_around_hooks(model: vllm.Model) -> None:
    """The parts of layers 3 and 7 are run one by one, so that nothing calls these layers."""
    model.model.__class__ = Inlining


class Inlining(vllm.Decoder):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, residual = self.embed_tokens(ids), None
        for index, layer in enumerate(self.layers):
            if index in (3, 7):
                residual = x + residual
                x = layer.mlp(layer.self_attn(layer.norm(residual)))
            else:
                x, residual = layer(torch.arange(ids.shape[-1]), x, residual)
        return x + residual


@RUNNERS
@pytest.mark.parametrize("profiles", [True, False])
@pytest.mark.parametrize(("flags", "own"), [(GROUP, None), ({}, SOME), ({"cpu_offload_gb": 1.0}, None)])
def test_a_model_that_runs_all_its_units_serves(
    flags: dict[str, Any], own: dict[str, Any] | None, profiles: bool, second: bool
) -> None:
    worker = loaded(flags, own, second=second, profiles=profiles)
    assert serve(worker) == 0.5
    require_same_outputs(worker, resident())


@RUNNERS
@pytest.mark.parametrize("profiles", [True, False])
@pytest.mark.filterwarnings("ignore:.*offloaded modules did not run in this forward")
def test_a_layer_whose_hook_never_runs_ends_the_start(profiles: bool, second: bool) -> None:
    """What it reads is whatever its slot holds: other tokens, and no error."""
    worker = loaded(GROUP, second=second, profiles=profiles, change_model=go_around_hooks)
    # While vLLM profiles, weights rest outside of their module's forward; where it does not, runs are counted.
    message = r"2 of 2 offloaded modules did not run .*\(model.layers.3, model.layers.7\)"
    if profiles:
        message = r"model.layers.3.self_attn.qkv_proj.weight was given to aten.linear.default outside of the forward"
    with pytest.raises(OutsideAccessError if profiles else StateError, match=message):
        serve(worker)
    assert not isinstance(vllm.get_offloader(), EngineOffloader)
    left_out = {"device_memory": "7MiB", "rules": ["re:.*\\.[37]\\..*=resident"]}
    assert serve(loaded(own=left_out, second=second, change_model=go_around_hooks)) == 0.5


@RUNNERS
@pytest.mark.parametrize("profiles", [True, False])
def test_parts_of_a_layer_that_are_units_may_run_without_it(profiles: bool, second: bool) -> None:
    """Hooks are on the module of each unit: a model may go around the layer if it calls the parts that travel."""
    config = {"width": 2 * WIDTH, "change_model": go_around_hooks, "profiles": profiles}
    plain = resident(use_v2_model_runner=second, **config)
    worker = loaded(GROUP, second=second, **config)
    units = [unit.module_fqn.removeprefix("model.layers.") for unit in worker._offloader.plan.units]
    assert units == ["3.self_attn", "3.mlp", "7.self_attn", "7.mlp"]
    assert serve(worker) == 0.5
    require_same_outputs(worker, plain)


def go_around_compiled_hooks(model: vllm.Model) -> None:
    """As vLLM compiles a model: all layers in one graph, below the module whose forward is the model's."""
    go_around_hooks(model)
    model.model.compile(backend="eager", fullgraph=True)


@RUNNERS
def test_a_layer_whose_op_never_runs_in_compiled_code_ends_the_start(second: bool) -> None:
    config = {"change_model": go_around_compiled_hooks, "compilation_config": vllm.CompilationConfig(mode=3)}
    with pytest.raises(StateError, match=r"2 of 2 offloaded modules did not run .*\(model.layers.3, model.layers.7\)"):
        serve(loaded(GROUP, second=second, **config))
    assert not isinstance(vllm.get_offloader(), EngineOffloader)
    plain = resident(use_v2_model_runner=second, width=2 * WIDTH, change_model=go_around_hooks)
    by_part = loaded(GROUP, second=second, width=2 * WIDTH, **config)
    assert serve(by_part) == 0.5
    require_same_outputs(by_part, plain)


class Peeking(vllm.Decoder):
    """Every layer is called, and the weights of one are read outside of its forward, too."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().forward(ids)
        return x + self.layers[3].self_attn.qkv_proj.weight.sum()


def peek(model: vllm.Model) -> None:
    model.model.__class__ = Peeking


@RUNNERS
def test_weights_that_are_read_outside_of_their_layer_end_the_start(second: bool) -> None:
    """Every unit runs, so counting them finds nothing; what is read is the layer that has the slot by then."""
    plain = resident(use_v2_model_runner=second, change_model=peek)
    worker = loaded(GROUP, second=second, change_model=peek)
    with pytest.raises(OutsideAccessError, match=r"model.layers.3.self_attn.qkv_proj.weight was given to aten.sum"):
        serve(worker)
    assert not isinstance(vllm.get_offloader(), EngineOffloader)
    left_out = {"device_memory": "7MiB", "rules": [r"re:.*\.3\..*=resident"]}
    worker = loaded(own=left_out, second=second, change_model=peek)
    assert serve(worker) == 0.5
    require_same_outputs(worker, plain)


def test_a_worker_that_moves_nothing_has_no_units_to_run() -> None:
    for flags, moves in (({}, True), (GROUP, False)):
        another_process()
        assert serve(loaded(flags, moves=moves, change_model=go_around_hooks)) == 0.5


# -- what vLLM is told -------------------------------------------------------------------------------------------------


@RUNNERS
def test_device_memory_that_the_offload_frees_or_takes_is_accounted_for(
    monkeypatch: pytest.MonkeyPatch, second: bool
) -> None:
    """vLLM has measured what the model takes before the plan is carried out; the KV cache gets what is left."""
    in_use = iter([5_000_000, 3_000_000])
    monkeypatch.setattr("headrace.offloaders.layerwise._device_bytes", lambda device: next(in_use))
    worker = loaded(GROUP, second=second)
    assert worker.model_runner.model_memory_usage == resident().model_runner.model_memory_usage - 2_000_000
    assert worker.headrace_stats()["added_device_bytes"] == -2_000_000


@RUNNERS
def test_the_plan_is_part_of_the_compile_cache_key(second: bool) -> None:
    flags = [GROUP, {"offload_group_size": 2}, {**GROUP, "offload_params": {"mlp"}}, GROUP]
    keys = []
    for given in flags:
        another_process()
        worker = make(given, second=second)
        before = worker.vllm_config.compute_hash()
        worker.load_model()
        assert worker.vllm_config.compute_hash() != before
        keys.append(worker.vllm_config.compute_hash())
    assert len(set(keys)) == 3
    assert keys[0] == keys[3]


def test_an_offload_runs_the_code_that_its_reference_compiled() -> None:
    """A compiler that compiles again may choose a kernel that rounds differently."""
    keys = set()
    for own, moves in ((None, True), (None, False), ({"measure_stalls": True}, True)):
        vllm.set_offloader(vllm.NoopOffloader())
        given = {"headrace": own, "theirs": 1} if own else {"theirs": 1}
        worker = make(GROUP, moves=moves, additional_config=given)
        worker.load_model()
        keys.add(worker.vllm_config.compute_hash())
        worker.shutdown()
        assert given == ({"headrace": own, "theirs": 1} if own else {"theirs": 1})
    assert len(keys) == 1


def test_an_additional_config_that_is_no_dict_is_refused_at_start() -> None:
    message = r"additional_config: expected a dict .* found tuple; the plan has to be part"
    with pytest.raises(OptionError, match=message):
        make(GROUP, additional_config=())


def test_the_compiled_model_is_cut_at_headraces_ops_once() -> None:
    worker = make(GROUP)
    expected = ["vllm::unified_attention", "headrace::wait", "headrace::release"]
    assert worker.vllm_config.compilation_config.splitting_ops == expected
    another_process()
    again = vllm_workers.start(worker.vllm_config)
    assert again.vllm_config.compilation_config.splitting_ops == expected


@pytest.mark.parametrize("ops", [[], None])
def test_a_model_in_one_piece_is_not_cut(ops: list[str] | None) -> None:
    worker = make(GROUP, compilation_config=vllm.CompilationConfig(splitting_ops=ops))
    assert worker.vllm_config.compilation_config.splitting_ops == ops
    worker.load_model()
    assert worker._offloader._require_session()._options.replays_announced


def test_where_the_compiler_cuts_the_graph_replays_are_not_relied_on() -> None:
    compilation = vllm.CompilationConfig(use_inductor_graph_partition=True)
    worker = loaded(GROUP, compilation_config=compilation)
    assert compilation.splitting_ops == ["vllm::unified_attention"]
    assert not worker._offloader._require_session()._options.replays_announced
    require_same_outputs(worker, resident())


# -- what reaches weights ----------------------------------------------------------------------------------------------


def test_checksums_are_those_of_the_stored_weights() -> None:
    """Of a slot they would be those of whichever layer ran last."""
    worker, plain = loaded(GROUP), resident()
    for _ in range(2):
        assert worker.compute_weight_checksums() == plain.compute_weight_checksums()
        worker.execute_model(ids())
    require_same_outputs(worker, plain)
    assert worker.headrace_stats()["bytes_moved"] > 0


def test_the_sharded_state_is_that_of_the_stored_weights(tmp_path: Path) -> None:
    worker, plain = loaded(GROUP), resident()
    worker.execute_model(ids())
    for index, each in enumerate((worker, plain)):
        each.save_sharded_state(str(tmp_path / str(index)))
    saved, expected = (torch.load(tmp_path / str(index)) for index in range(2))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    assert worker.headrace_stats()["bytes_moved"] > 0


def test_a_discard_of_the_cache_is_passed_on() -> None:
    worker = loaded(GROUP)
    worker.discard(("kv_cache",))
    assert worker.calls == ["discard kv_cache"]


# What each method that is refused while weights are offloaded is called with, and what it then says.
REFUSED_CALLS: dict[str, tuple[tuple[Any, ...], str]] = {
    "discard": ((("weights",),), "a discard of weights would lose those that headrace does not hold; use sleep()"),
    "save_tensorized_model": (({},), "would save the current contents of slots; save_sharded_state saves the weights"),
    "checkpoint_prepare": ((), "checkpoint_prepare prepares the process for a CUDA checkpoint"),
}


def refusing_methods() -> set[str]:
    """Of headrace's worker: what raises a ``StateError`` itself or in a method ``_refuse_...``."""
    own = importlib.import_module("headrace.adapters.vllm.worker").OffloadingWorker
    codes = {name: thing.__code__ for name, thing in vars(own).items() if isinstance(thing, FunctionType)}
    names = {name for name, code in codes.items() if any("_refuse_" in used for used in code.co_names)}
    return {name for name in names | {n for n, c in codes.items() if "StateError" in c.co_names} if name[0] != "_"}


def test_every_refusing_method_is_held() -> None:
    # These two raise if the model does not run what is offloaded, and load_model beside another offloader.
    others = {"load_model", "compile_or_warm_up_model", "execute_model"}
    assert refusing_methods() - others == REFUSED_CALLS.keys()


@RUNNERS
@pytest.mark.parametrize("what", REFUSED_CALLS)
def test_what_would_reach_slots_is_refused_while_offloaded_and_passed_on_otherwise(what: str, second: bool) -> None:
    args, message = REFUSED_CALLS[what]
    worker, plain = loaded(GROUP, second=second), resident()
    with pytest.raises(StateError, match=message):
        getattr(worker, what)(*args)
    assert worker.calls == []
    require_same_outputs(worker, plain)
    another_process()
    idle = loaded(second=second)
    getattr(idle, what)(*args)
    assert [call.split()[0] for call in idle.calls] == [what]


@RUNNERS
def test_new_weights_from_a_worker_extension_are_refused(second: bool) -> None:
    """Those of trainers call the model themselves: what they wrote would last until the next copy."""
    new = [("model.layers.3.mlp.down_proj.weight", torch.zeros(())), ("lm_head.weight", torch.zeros(()))]
    worker, plain = loaded(GROUP, second=second), resident()
    with pytest.raises(StateError, match=r"load_weights would write into slots.*call reload_weights"):
        worker.model_runner.get_model().load_weights(new)
    require_same_outputs(worker, plain)
    another_process()
    assert loaded(second=second).model_runner.get_model().load_weights(new) == {name for name, _ in new}


@RUNNERS
def test_a_function_of_the_model_gets_true_weights_or_an_error(second: bool) -> None:
    plain = resident(use_v2_model_runner=second)
    worker = loaded(GROUP, second=second)
    worker.execute_model(ids())
    name = "model.layers.3.self_attn.qkv_proj.weight"
    with pytest.raises(OutsideAccessError, match=f"{name} was given to aten.*sum"):
        worker.apply_model(lambda model: model.get_parameter(name).sum())
    with pytest.raises(OutsideAccessError, match=f"{name} was given to aten.zero_"):
        worker.apply_model(lambda model: model.get_parameter(name).data.zero_())
    assert (
        worker.apply_model(lambda model: model.get_parameter(name).shape) == plain.get_model().get_parameter(name).shape
    )
    saved = worker.apply_model(lambda model: model.state_dict()[name])
    assert torch.equal(saved, plain.get_model().get_parameter(name))
    require_same_outputs(worker, plain)
    assert worker.headrace_stats()["bytes_moved"] > 0


# -- refused -----------------------------------------------------------------------------------------------------------


class ForeignOffloader(vllm.NoopOffloader):
    pass


def test_a_foreign_offloader_is_not_replaced() -> None:
    worker = make(GROUP)
    foreign = ForeignOffloader()
    vllm.set_offloader(foreign)
    message = r"test_vllm_worker.ForeignOffloader is vLLM's offloader already.*one of the tw"
    with pytest.raises(StateError, match=message):
        worker.load_model()
    assert vllm.get_offloader() is foreign


@pytest.mark.parametrize("flags", [GROUP, {"cpu_offload_gb": 1.0}])
def test_vllms_own_offloader_is_replaced_unless_it_has_wrapped_layers(flags: dict[str, Any]) -> None:
    worker = make(flags)
    own = vllm.get_offloader()
    assert type(own).__module__.startswith("vllm.")
    own.module_offloaders = [nn.Identity()]  # type: ignore[attr-defined]
    if "cpu_offload_gb" in flags:
        own.module_offloaders, own.cpu_offload_bytes = [], 4096  # type: ignore[attr-defined]
    with pytest.raises(StateError, match=f"vLLM's own {type(own).__name__} has offloaded layers in this process"):
        worker.load_model()


@RUNNERS
def test_nothing_to_do_is_said(second: bool) -> None:
    worker = loaded(second=second)
    lines = [line for line in vllm.state.logger.lines if line.startswith("warning: ")]
    assert len(lines) == 1
    assert "headrace has nothing to do" in lines[0]
    assert type(vllm.get_offloader()) is vllm.NoopOffloader
    assert worker.headrace_stats() == {}
    assert worker.vllm_config == vllm.VllmConfig(use_v2_model_runner=second)  # nothing of it was touched
    require_same_outputs(worker, resident())


def test_a_budget_with_nothing_to_offload_is_refused() -> None:
    with pytest.raises(OptionError, match="offloads nothing: all weights together have"):
        loaded(own={"device_memory": "1GiB"})


def test_a_name_that_matches_nothing_is_refused() -> None:
    with pytest.raises(SelectionError, match="'experts' matches none"):
        loaded({**GROUP, "offload_params": {"experts"}})


# A refused value of each field of vLLM's configuration, and one that is not.
VALUES: dict[str, tuple[Any, Any]] = {
    "parallel_config.enable_eplb": (True, False),
    "parallel_config.enable_dbo": (True, False),
    "parallel_config.ubatch_size": (2, 1),
    "weight_transfer_config": ({"backend": "nccl"}, None),
    "load_config.load_format": ("ipc_cache", "dummy"),
    "speculative_config.rejection_sample_method": ("synthetic", "block"),
    "model_config.multimodal_config.mm_encoder_only": (True, False),
}


def test_a_refused_value_of_every_field_is_known() -> None:
    assert [refusal.field for refusal in REFUSED] == list(VALUES)


def full_config() -> Any:
    """With every optional part."""
    model = vllm.ModelConfig(multimodal_config=vllm.MultiModalConfig())
    return vllm.VllmConfig(model_config=model, speculative_config=vllm.SpeculativeConfig())


def config_with(field: str, value: Any) -> dict[str, Any]:
    """Arguments of a ``VllmConfig`` in which ``field`` is ``value``."""
    config = full_config()
    *path, last = field.split(".")
    setattr(functools.reduce(getattr, path, config), last, value)
    name = field.partition(".")[0]
    return {name: getattr(config, name)}


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.flag)
def test_what_would_reach_weights_is_refused_before_the_model_loads(
    monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    refused, allowed = VALUES[refusal.field]
    monkeypatch.setattr(vllm, "load", lambda config: pytest.fail("the model was loaded"))
    with pytest.raises(
        OptionError, match=f"^{refusal.flag}.* {re.escape(refusal.reason)}; leave it out, or offload nothing"
    ):
        make(GROUP, **config_with(refusal.field, refused))
    make(**config_with(refusal.field, refused))  # nothing is offloaded: vLLM's affair
    make(GROUP, **config_with(refusal.field, allowed))


@pytest.mark.parametrize("field", VALUES)
def test_a_field_that_was_renamed_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    config = full_config()
    refuse_unsupported(config, Prefetch(1))
    *path, last = field.split(".")
    owner = functools.reduce(getattr, path, config)
    monkeypatch.delattr(type(owner), last)
    delattr(owner, last)
    with pytest.raises(OptionError, match=f"expected a field {field} in the engine's configuration"):
        refuse_unsupported(config, Prefetch(1))


def test_steps_that_call_no_layers_are_refused_by_name() -> None:
    """vLLM 0.33's ``SpecializedDecode`` of DeepSeek-V4.1."""
    with pytest.raises(OptionError, match=r"decode_backend 'latency_specialized' .* without calling the layers"):
        make(GROUP, additional_config={"decode_backend": "latency_specialized"})
    make(GROUP, additional_config={"decode_backend": "auto"})
    make(additional_config={"decode_backend": "latency_specialized"})  # nothing is offloaded: vLLM's affair


@pytest.mark.parametrize(("flags", "own"), [(GROUP, None), ({}, SOME)])
def test_a_model_whose_layers_are_never_called_is_refused_by_name(
    flags: dict[str, Any], own: dict[str, Any] | None
) -> None:
    model = vllm.ModelConfig(["AliceAIForCausalLM"])
    with pytest.raises(OptionError, match="AliceAIForCausalLM runs the parts of its layers without calling these"):
        make(flags, own, model_config=model)
    loaded({"cpu_offload_gb": 1.0}, model_config=model)  # read in place, no copies to wait for


@pytest.mark.parametrize("version", ["0.20.1", "0.34.0"])
def test_another_version_is_refused_at_start(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    vllm.install(monkeypatch, version)
    with pytest.raises(OptionError, match=f"vLLM {version} is .*expected 0.20.2 to 0.33.x"):
        make(GROUP)


def test_a_patched_one_whose_replays_are_not_announced_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.CUDAGraphWrapper, "__call__", lambda self, *args: None)
    with pytest.raises(OptionError, match=r"CUDAGraphWrapper.__call__ no longer uses sync_prev_onload, join_after_"):
        make(GROUP)


def test_a_renamed_field_is_found_by_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    annotations = {**vllm.ParallelConfig.__annotations__}
    del annotations["enable_dbo"]
    monkeypatch.setattr(vllm.ParallelConfig, "__annotations__", annotations)
    assert differences(NAMES, "0.33.0") == ["vllm.config.parallel.ParallelConfig has no field enable_dbo"]


def test_a_failed_load_leaves_the_runner_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make(GROUP)
    monkeypatch.setattr(vllm, "load", raising(RuntimeError("no such file")))
    with pytest.raises(RuntimeError, match="no such file"):
        worker.load_model()
    assert "load_model" not in vars(worker.model_runner)


@RUNNERS
def test_both_ends_of_a_unit_lie_between_segments_of_a_breakable_graph(second: bool) -> None:
    """As attention does; outside of a capture, and between two segments, they run at once."""
    worker = loaded(GROUP, second=second)
    model = worker.model_runner.get_model()
    expected = resident().model_runner.get_model()(ids())
    with torch.inference_mode(), vllm.BreakableCUDAGraphCapture() as capture:
        assert torch.equal(model(ids()), expected)
    before = worker.headrace_stats()["bytes_moved"]
    units = len(worker._offloader.plan.units)
    assert len(capture.segments) == 2 * units + 2  # and both ends of the forward
    for action in capture.segments:
        action()
    assert worker.headrace_stats()["bytes_moved"] > before > 0
    assert [unit.runs for unit in worker._offloader.stats().units] == [2] * units
    require_same_outputs(worker, resident())
