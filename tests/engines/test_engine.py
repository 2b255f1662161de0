"""Offloaders of engines: layers handed over as they are built, plans over the whole model."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import engines
from engines import Layer, Linear, Wrapped, build, ids, is_lookup, resident, unfinished
from headrace import UVA, Budget, Prefetch
from headrace.errors import BudgetError, OptionError, StateError
from headrace.model.inventory import without_lora
from headrace.model.records import Inventory, ModelProfile
from headrace.offloaders.layerwise import EngineOffloader, EnginePolicy, EngineTraits
from headrace.plan.units import TINY_BYTES
from headrace.planning.context import make_planner
from no_copy import NoCopyOffloader

SUPPORT = Path(__file__).resolve().parents[1] / "support"

TRAITS = EngineTraits(is_lookup, without_lora)
SOME = 7 * 2**20  # of 9 MiB
COMPILED_LAYERS = 4  # the compiler takes its time for each
POLICIES = {
    "prefetch": Prefetch(4, 1, 1), "two of three": Prefetch(3, 2, 2), "named": Prefetch(2, 1, 1, ["mlp"]),
    "uva": UVA(2**40), "uva, limited": UVA(1_000_000), "budget": Budget(SOME),
}  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@torch.inference_mode()
def test_same_bits_and_bytes_moved(policy: EnginePolicy) -> None:
    plain = resident()
    model, offloader = build(policy)
    for rows in (1, 3, 3, 1):
        assert torch.equal(model(ids(rows)), plain(ids(rows)))
    plan, stats = offloader.plan, offloader.stats()
    assert plan.offloaded_bytes > 0
    assert all(unit.runs == 4 and unit.bytes_moved > 0 for unit in stats.units)
    if isinstance(policy, UVA):
        assert not plan.units
        assert plan.uva_bytes > 500_000
    if isinstance(policy, Prefetch):
        assert [unit.module_fqn for unit in plan.units][:1] == [
            f"model.layers.{policy.group_size - policy.num_in_group}"
        ]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_pass_is_refused(compiled: bool) -> None:
    """Tensors view their slots all the time here, which other units have been in since."""
    model, offloader = build(Prefetch(1, 1, 1), num_layers=COMPILED_LAYERS)
    if compiled:
        model.model.forward = torch.compile(model.model.forward, fullgraph=True, dynamic=False)  # type: ignore[method-assign]
    with torch.enable_grad():
        output = model(ids())
        assert all(unit.bytes_moved > 0 for unit in offloader.stats().units)
        with pytest.raises(StateError, match=r"a backward pass needs model\.layers\.3\..*headrace is for inference"):
            output.sum().backward()


def test_compiled_as_engines_do() -> None:
    """The decoder alone is compiled, with its layers' hooks inside and those of the model outside."""
    plain = resident(COMPILED_LAYERS)
    model, offloader = build(Prefetch(2, 1, 1), num_layers=COMPILED_LAYERS)
    model.model.forward = torch.compile(model.model.forward, fullgraph=True, dynamic=False)  # type: ignore[method-assign]
    with torch.inference_mode():
        for _ in range(3):
            # The compiler rounds in another order than eager code; a stale slot would be wrong altogether.
            torch.testing.assert_close(model(ids()), plain(ids()), rtol=1e-2, atol=1e-3)
    assert sum(unit.runs for unit in offloader.stats().units) == 6


@pytest.mark.parametrize("policy", [Prefetch(2, 1, 1), Prefetch(1, 1, 2), Budget("3MiB")], ids=str)
def test_compiled_bits_equal_those_of_the_same_boundaries(policy: EnginePolicy) -> None:
    """Contract 1, as an engine compiles: the reference is traced alike and moves nothing."""
    outputs = []
    for kind in (EngineOffloader, NoCopyOffloader):
        torch._dynamo.reset()
        model, offloader = build(policy, kind, num_layers=COMPILED_LAYERS)
        model.model.forward = torch.compile(model.model.forward, fullgraph=True, dynamic=False)  # type: ignore[method-assign]
        with torch.inference_mode():
            outputs.append([model(ids(rows)) for rows in (3, 3, 1)])
        moved = sum(unit.bytes_moved for unit in offloader.stats().units)
        assert (moved > 0) == (kind is EngineOffloader)
        offloader.remove()
    assert all(torch.equal(mine, reference) for mine, reference in zip(*outputs, strict=True))


@pytest.mark.parametrize("kind", [EngineOffloader, NoCopyOffloader])
@pytest.mark.parametrize(
    "policy", [POLICIES["prefetch"], UVA(1_000_000), Prefetch(4, 1, 1, ["visual", "mlp"])], ids=str
)
def test_what_is_read_in_place_alone_has_the_engines_mark(policy: EnginePolicy, kind: type[EngineOffloader]) -> None:
    """vLLM's kernels of experts ask for it: the reference has to take the path that the offload takes."""
    model, offloader = unfinished(policy, kind, traits=TRAITS)
    for parameter in model.parameters():  # as in host memory while the model is built
        parameter._vllm_is_uva_offloaded = True  # type: ignore[attr-defined]
    tiny = {name for name, p in model.named_parameters() if p.nbytes < TINY_BYTES}  # never there

    def marked() -> set[str]:
        named = model.named_parameters()
        return {name for name, p in named if getattr(p, "_vllm_is_uva_offloaded", False)}

    offloader.post_init()
    assert marked() - tiny == set(offloader.plan.uva)
    assert bool(offloader.plan.uva) == (policy != POLICIES["prefetch"])
    offloader.remove()
    assert marked() == set()


def test_names_are_those_of_named_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a runner of experts in vLLM holds the shared experts of its layer, which have a name without it."""

    class WithRunner(Layer):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.runner = nn.Module()
            self.runner.own, self.runner.shared = Linear(width, width), self.mlp

    monkeypatch.setattr(engines, "Layer", WithRunner)
    _, offloader = build(UVA(10_000_000, ["runner"]))
    assert set(offloader.plan.uva) == {f"model.layers.{index}.runner.own.weight" for index in range(8)}


def test_a_budget_counts_no_kernels_of_an_eager_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines fuse kernels, also of a model whose code is that of transformers."""
    seen: list[ModelProfile] = []

    def planner(inventory: Inventory, profile: ModelProfile, *args: Any, **options: Any) -> Any:
        seen.append(profile)
        return make_planner(inventory, profile, *args, **options)

    monkeypatch.setattr("headrace.offloaders.layerwise.profile_of", lambda *_: ModelProfile(kernels_per_step=9))
    monkeypatch.setattr("headrace.offloaders.layerwise.make_planner", planner)
    build(Budget(SOME))
    assert [profile.kernels_per_step for profile in seen] == [None]


@pytest.mark.parametrize("kind", [EngineOffloader, NoCopyOffloader])
def test_a_tower_needs_to_be_read_in_place(kind: type[EngineOffloader], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with HEADRACE_DISABLE_UVA: layers are moved on demand, and what is outside of them is refused."""
    for place in ("context", "checks"):
        monkeypatch.setattr(f"headrace.planning.{place}.can_read_in_place", lambda device: False)
    plain = resident()
    model, offloader = build(UVA(2**40), kind)
    assert not offloader.plan.uva
    assert len(offloader.plan.units) == 8
    with torch.inference_mode():
        assert torch.equal(model(ids()), plain(ids()))
    with pytest.raises(OptionError, match=r"visual\.0\.weight is outside the layers.*HEADRACE_DISABLE_UVA"):
        build(UVA(2**40, ["visual"]), kind)


TOWER = {"visual.0.weight", "visual.1.weight"}


@pytest.mark.parametrize("kind", [EngineOffloader, NoCopyOffloader])
@pytest.mark.parametrize(
    ("policy", "in_place"),
    [
        (Prefetch(4, 1, 1), set()),
        (Prefetch(4, 1, 1, ["visual", "mlp"]), TOWER),
        (Prefetch(4, 1, 1, ["@mlp"]), TOWER),
        (UVA(2**40, ["visual"]), TOWER),
        (UVA(150_000), {"visual.0.weight"}),  # counted in the order of the model, as vLLM does
        (Budget(SOME), set()),
        (Budget(SOME, rules=[("visual", "uva")]), TOWER),
    ],
)
def test_a_tower_that_is_handed_over(policy: EnginePolicy, in_place: set[str], kind: type[EngineOffloader]) -> None:
    plain = resident()
    model, offloader = build(policy, kind, hands_over=True)
    assert TOWER.intersection(offloader.plan.uva) == in_place
    if isinstance(policy, UVA):
        assert set(offloader.plan.uva) == in_place
    with torch.inference_mode():
        assert torch.equal(model(ids()), plain(ids()))
    if kind is EngineOffloader and offloader.plan.units:
        assert offloader.stats().bytes_moved > 0


def test_a_budget_that_only_a_tower_in_place_can_meet() -> None:
    _, offloader = build(Budget(SOME))
    assert not TOWER.intersection(offloader.plan.uva)
    with pytest.raises(BudgetError) as refused:
        build(Budget(1))
    least = refused.value.minimum_bytes
    plain = resident()
    model, offloader = build(Budget(least))
    assert TOWER.issubset(offloader.plan.uva)
    assert offloader.plan.device_bytes <= least
    with torch.inference_mode():
        assert torch.equal(model(ids()), plain(ids()))
    assert offloader.stats().bytes_moved > 0


def build_wrapped(policy: EnginePolicy, layers: range) -> EngineOffloader:
    model, offloader = unfinished(policy, traits=TRAITS)
    for index in layers:
        mlp = model.model.layers[index].mlp
        mlp.down_proj = Wrapped(mlp.down_proj)
    offloader.post_init()
    return offloader


def test_patterns_find_layers_of_which_lora_has_wrapped_some() -> None:
    offloader = build_wrapped(Prefetch(2, 1, 1, ["mlp.down_proj.weight"]), range(4))
    assert [unit.module_fqn for unit in offloader.plan.units] == [f"model.layers.{index}" for index in (1, 3, 5, 7)]


def test_rules_find_layers_that_lora_has_wrapped() -> None:
    rules = [("down_proj.weight", "uva"), ("o_proj.weight", "resident")]
    offloader = build_wrapped(Budget("7MiB", (), "cpu", rules), range(8))  # type: ignore[arg-type]
    assert all(f"model.layers.{index}.mlp.down_proj.base_layer.weight" in offloader.plan.uva for index in range(8))


@pytest.mark.parametrize("kind", [EngineOffloader, NoCopyOffloader])
def test_what_an_engine_keeps_elsewhere_stays_there(kind: type[EngineOffloader]) -> None:
    model, offloader = unfinished(Prefetch(4, 1, 1), kind, traits=TRAITS)
    model.model.register_buffer("elsewhere", torch.zeros(4, device="meta"))
    two = TwoTensor(*(torch.zeros(4, device="meta") for _ in range(2)))
    model.model.packed = nn.Parameter(two, requires_grad=False)  # type: ignore[assignment]
    offloader.post_init()
    assert [unit.module_fqn for unit in offloader.plan.units][:1] == ["model.layers.3"]
    assert model.model.elsewhere.is_meta
    assert not any("packed" in name for name in offloader.plan.resident)


@pytest.mark.parametrize("kind", [EngineOffloader, NoCopyOffloader])
def test_set_too_late(kind: type[EngineOffloader]) -> None:
    model = resident()
    offloader = kind(Prefetch(4, 1, 1), lambda: model)
    with pytest.raises(StateError, match="before the model is built"):
        offloader.post_init()


def test_post_init_twice_is_once() -> None:
    _, offloader = build(Prefetch(4, 1, 1))
    plan = offloader.plan
    offloader.post_init()
    assert offloader.plan is plan


KEPT = """
import sys
import torch
from engines import build, ids
from headrace import Prefetch

if sys.argv[1] == "load":  # hooks are numbered by the history of the process
    for _ in range(37):
        torch.nn.Linear(1, 1).register_forward_hook(lambda *_: None)
model, offloader = build(Prefetch(2, 1, 1), num_layers=4)
torch._dynamo.config.enable_aot_compile = True
with torch.inference_mode():
    expected = model(ids())
    forward = model.model.forward
    if sys.argv[1] == "save":
        options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        compiled = torch.compile(forward, fullgraph=True, dynamic=False, options=options).aot_compile(((ids(),), {}))
        compiled.save_compiled_function(sys.argv[2])
    else:
        with open(sys.argv[2], "rb") as file:
            compiled = torch.compiler.load_compiled_function(file)
    model.model.forward = lambda given: compiled(model.model, given)
    for _ in range(3):
        torch.testing.assert_close(model(ids()), expected, rtol=1e-2, atol=1e-3)
assert [unit.runs for unit in offloader.stats().units] == [4, 4]
assert all(unit.misses == 0 for unit in offloader.stats().units)
"""


def test_code_kept_on_disk_is_right_in_the_next_process(tmp_path: Path) -> None:
    """As vLLM keeps it: without guards, so what it refers to has to be found by the same path from the model."""
    for step in ("save", "load"):
        command = [sys.executable, "-c", KEPT, step, str(tmp_path / "code")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=SUPPORT, check=False)
        assert done.returncode == 0, done.stderr


class CountingLayer(Layer):
    """Writes buffers in every forward, a small one and a large one."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("counts", torch.zeros(width, width))

    def forward(self, *given: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        self.count += 1
        self.counts += 1
        return super().forward(*given)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [Budget(SOME), UVA(2**40)], ids=str)
@torch.inference_mode()
def test_without_names_neither_buffers_nor_tiny_tensors_leave(
    policy: EnginePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.Layer", CountingLayer)
    model, offloader = build(policy)
    for _ in range(3):
        model(ids())
    assert all(layer.count == 3 and layer.counts.eq(3).all() for layer in model.model.layers)
    plan = offloader.plan
    assert plan.offloaded_bytes > 0
    moved = {*plan.uva, *(entry.storage for unit in plan.units for entry in unit.entries)}
    assert "model.layers.7.norm.weight" not in moved
    assert moved.isdisjoint(f"model.layers.{index}.{name}" for index in range(8) for name in ("count", "counts"))


@torch.inference_mode()
def test_a_budget_beside_a_rule_that_reads_in_place() -> None:
    """On a machine without a rate for that, too; it was taken for a lack of host memory."""
    plain = resident()
    model, offloader = build(Budget("7MiB", ["mlp"], "cpu", [("down_proj", "uva")]))
    assert offloader.plan.uva
    assert all("down_proj" in name or "embed" in name for name in offloader.plan.uva)
    assert torch.equal(model(ids()), plain(ids()))


@pytest.mark.parametrize(
    "policy",
    [UVA(2**40), Budget("3MiB"), Prefetch(1, 1, 1, ["layers"]), Prefetch(1, 1, 1, ["ALL_MODEL_PARAMS"])],
    ids=str,
)
def test_norms_stay_where_they_are(policy: EnginePolicy) -> None:
    _, offloader = build(policy)
    plan = offloader.plan
    names = [*plan.uva, *(entry.storage for unit in plan.units for entry in unit.entries)]
    assert names
    assert not [name for name in names if "norm" in name]


def test_model_code_that_reads_the_data_of_a_norm_compiles() -> None:
    """As vLLM's norms do, in inference mode; a budget for next to nothing would offload whatever it may."""

    def forward(layer: Layer, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        residual = x if residual is None else x + residual
        x = layer.self_attn(residual * layer.norm.weight.data)
        return layer.mlp(x), residual

    model, offloader = build(Budget("2MiB"), num_layers=COMPILED_LAYERS)
    for layer in model.model.layers:
        layer.__dict__["forward"] = partial(forward, layer)
    model.model.forward = torch.compile(model.model.forward, fullgraph=True, dynamic=False)  # type: ignore[method-assign]
    with torch.inference_mode():
        assert torch.equal(model(ids()), model(ids()))
    assert all(unit.bytes_moved > 0 for unit in offloader.stats().units)


def test_cached_experts_are_refused_before_the_model_is_built() -> None:
    """An engine's kernels would read rows of a cache as the experts of these numbers."""
    for kind in (EngineOffloader, NoCopyOffloader):
        with pytest.raises(OptionError, match=r"cannot be cached inside this engine, .* use experts=uva"):
            kind(Budget("1GiB", rules=[("experts", "cache")]), lambda: nn.Linear(1, 1))
