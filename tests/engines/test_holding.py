"""The promise: weights of a model under construction lie in pinned memory once, and behave as before.

Without a GPU: parameters of a CPU count as those of one, and a registrar pins nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from headrace.config import Mode, Prefetch
from headrace.errors import OptionError
from headrace.memory.pages import RawMemory
from headrace.memory.pinned import PinnedBuffer
from headrace.memory.split_range import MappedMemory
from headrace.memory.system import Limits
from headrace.model.inventory import take_inventory
from headrace.model.live_tensors import bind
from headrace.offloaders import build_time
from headrace.offloaders.build_time import BuildTimeFilter, BuildTimePool
from headrace.plan.build import build_plan
from headrace.plan.cached_experts import PIECE_BYTES, CachedLayer
from headrace.plan.kinds import Unit
from headrace.plan.plan import Machine
from headrace.plan.slabs import SlabEntry
from headrace.planning import context as planning_context
from headrace.planning.request import PlanRequest
from headrace.runtime import prepare as prepare_module
from headrace.runtime.prepare import prepare
from headrace.runtime.session import OffloadSession
from headrace.stores.expert_ranges import ExpertRanges, mappable
from headrace.stores.pinned_host import AlreadyPinned, PinnedStore
from registrars import Ledger


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> BuildTimePool:
    is_plain = build_time._is_plain

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert is_plain(nn.Parameter(torch.zeros(2)))
    monkeypatch.setattr(
        build_time, "device_view", lambda buffer, device: torch.frombuffer(buffer.numpy(), dtype=torch.uint8)
    )
    return BuildTimePool(lambda device: Ledger())


@pytest.mark.parametrize("apart", [True, False])
def test_placeholders_stay(pool: BuildTimePool, apart: bool) -> None:
    """Engines keep parameters without elements; memory of no bytes cannot be mapped."""
    layer = nn.Linear(4, 4)
    layer.scale = nn.Parameter(torch.empty(0))
    before = layer.weight.detach().clone()
    assert pool.take(layer, lambda name, num_bytes: True, apart=apart) == 80
    assert torch.equal(layer.weight, before)
    assert layer.scale.numel() == 0


@pytest.mark.parametrize("apart", [True, False])
def test_what_shares_memory_goes_on_sharing_it(pool: BuildTimePool, apart: bool) -> None:
    """Weights are loaded after this: one of two views would keep what it had before."""
    layer = nn.Linear(4, 4)
    layer.twin = nn.Parameter(layer.weight.detach())
    layer.turned = layer.weight.detach().t()
    assert pool.take(layer, lambda name, num_bytes: True, apart=apart) == 16  # the bias
    layer.weight.data.fill_(7.0)
    assert layer.twin.eq(7.0).all()
    assert layer.turned.eq(7.0).all()


def test_one_parameter_of_two_names_is_held_once(pool: BuildTimePool) -> None:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    layers[1].weight = layers[0].weight
    assert [pool.take(layer, lambda name, num_bytes: True, apart=True) for layer in layers] == [64, 0]
    assert layers[1].weight is layers[0].weight
    assert pool.num_bytes == 256


def needed_pinned_bytes(monkeypatch: pytest.MonkeyPatch, held_names: list[str], mode: Mode) -> int:
    """What :func:`prepare` compares with the limits, for a model on a GPU of which these storages are in the pool."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)) for _ in range(2)))
    inventory = take_inventory(model)
    plan = build_plan(inventory, Prefetch(1, 1, 1, ["re:.*weight"], mode))
    stretch = AlreadyPinned(PinnedBuffer(torch.zeros(256 * 1024, dtype=torch.uint8)), 0, 256 * 1024)
    pool: Any = SimpleNamespace(
        find_storages=lambda bound: dict.fromkeys(held_names, stretch), find_in_engine_memory=lambda bound: frozenset()
    )
    monkeypatch.setattr(prepare_module, "compute_device", lambda model, device: torch.device("cuda", 0))
    monkeypatch.setattr("headrace.planning.request.describe_device", lambda device: Machine("a GPU"))
    monkeypatch.setattr(planning_context, "read_limits", lambda *given, **options: Limits())
    found: list[int] = []
    monkeypatch.setattr(planning_context, "check_limits", lambda p, limits, needs: found.append(needs.pinned_bytes))
    prepare(PlanRequest(model, plan), pool=pool)
    return found[0]


WEIGHT = 256 * 1024
ALL = [f"{i}.{j}.weight" for i in range(2) for j in range(2)]


def test_what_is_held_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert needed_pinned_bytes(monkeypatch, ALL, "cpu") == 0
    assert needed_pinned_bytes(monkeypatch, ALL[:2], "cpu") == 2 * WEIGHT


def test_a_unit_held_in_part_is_made_anew_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert needed_pinned_bytes(monkeypatch, ALL[:3], "cpu") == 2 * WEIGHT
    assert needed_pinned_bytes(monkeypatch, ALL[1:2], "cpu") == 4 * WEIGHT


def test_the_shared_copy_is_made_beside_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    assert needed_pinned_bytes(monkeypatch, ALL, "shm_cpu") == 4 * WEIGHT


NAMES = ["self_attn.o_proj.weight", "mlp.up_proj.weight", "norm.weight"]


def leaving(rule: BuildTimeFilter, index: int, names: list[str]) -> tuple[bool, list[str]]:
    is_exact = rule.is_exact
    return is_exact, [name for name in names if rule(index, name, 2**20 if "proj" in name else 100)]


def test_a_word_for_a_group_leaves_early_too() -> None:
    """No module is called ``attention``, so the plan will take the group; a model too large has to leave before."""
    rule = BuildTimeFilter(Prefetch(1, 1, 1, ["attention"]))
    assert leaving(rule, 0, NAMES) == (True, [])
    assert leaving(rule, 1, NAMES) == (False, NAMES[:2])


def test_a_word_that_is_a_name_means_the_name() -> None:
    rule = BuildTimeFilter(Prefetch(1, 1, 1, ["mlp", "experts"]))
    assert leaving(rule, 0, NAMES) == (True, NAMES[1:2])
    assert leaving(rule, 1, ["mlp.experts.w2_proj", *NAMES]) == (False, ["mlp.experts.w2_proj", NAMES[1]])
    assert leaving(rule, 2, NAMES) == (True, NAMES[1:2])


def test_what_the_engine_has_moved_away_is_told_by_mark_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    bound = bind(model, take_inventory(model).storages)
    for storage in bound.values():
        storage.home = torch.device("cuda")
    assert BuildTimePool().find_in_engine_memory(bound) == frozenset()
    model.weight._vllm_is_uva_offloaded = True  # type: ignore[attr-defined]
    assert BuildTimePool().find_in_engine_memory(bound) == frozenset()  # it lies on the device in spite of the mark
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    assert BuildTimePool().find_in_engine_memory(bound) == {"weight"}


@torch.inference_mode()
def test_what_the_engine_has_moved_away_comes_back_if_it_is_to_be_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that was repacked while it was held: every step would read it over the link."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    given = torch.randn(2, 256)
    expected, before = model(given), {name: p.data_ptr() for name, p in model.named_parameters()}
    monkeypatch.setattr(BuildTimePool, "find_in_engine_memory", lambda pool, bound: frozenset({"0.weight"}))
    prepared = prepare(PlanRequest(model, Prefetch(3, 1, 1)), pool=BuildTimePool())
    plan, session = prepared.plan, OffloadSession(prepared)
    session.attach()
    moved = {name for name, p in model.named_parameters() if name in plan.resident and p.data_ptr() != before[name]}
    assert moved == {"0.weight"}
    assert torch.equal(model(given), expected)
    session.remove()
    assert torch.equal(model(given), expected)


class Repack:
    """Makes weights final as an engine's quantisation methods do, in one of their ways."""

    def __init__(self, way: str) -> None:
        self.way = way

    def process_weights_after_loading(self, layer: Any) -> None:
        made = layer.weight.data * 2
        if self.way == "data":
            layer.weight.data = made
        elif self.way == "half":
            layer.weight.data = made.half()
        elif self.way == "transposed":
            layer.weight.data = made.t().contiguous().t()
        elif self.way == "object":
            layer.weight = nn.Parameter(made, requires_grad=False)
        elif self.way == "name":
            layer.packed = nn.Parameter(made, requires_grad=False)
            del layer.weight
        elif self.way == "foreign":
            del layer.weight
            layer.weight = SimpleNamespace(data=made)


def repacked(pool: BuildTimePool, way: str, apart: bool) -> tuple[nn.Module, torch.Tensor]:
    """A layer of two parts that left, of which the first was repacked; and what that has to hold now."""
    layer: Any = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    layer[0].quant_method = method = Repack(way)
    pool.take(layer, lambda name, num_bytes: "weight" in name, apart=apart)
    expected = layer[0].weight.detach() * 2
    with torch.no_grad():
        layer[0].quant_method.process_weights_after_loading(layer[0])
    pool.compact()
    assert "process_weights_after_loading" not in vars(method)
    return layer, expected.half() if way == "half" else expected


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("way", ["none", "data", "half", "transposed", "object", "name"])
def test_what_repacked_weights_become_leaves_too(pool: BuildTimePool, way: str, apart: bool) -> None:
    layer, expected = repacked(pool, way, apart)
    parameter = layer.get_parameter("0.packed" if way == "name" else "0.weight")
    assert torch.equal(parameter, expected) == (way != "none")
    assert parameter.stride() == ((1, 256) if way == "transposed" else (256, 1))
    held = [pool.find(p.data) for p in (parameter, layer.get_parameter("1.weight"))]
    assert None not in held
    assert (held[0].memory is held[1].memory) == (not apart)  # type: ignore[union-attr]
    assert pool.find(layer.get_parameter("0.bias").data) is None
    assert pool.num_bytes == (WEIGHT // 2 if way == "half" else WEIGHT) + WEIGHT, "none of the former memory is left"


def test_what_becomes_an_object_of_a_kernel_is_refused(pool: BuildTimePool) -> None:
    refused = r"Linear: weight would be offloaded, .* has a types\.SimpleNamespace in its place.*--moe-backend marlin"
    with pytest.raises(OptionError, match=refused):
        repacked(pool, "foreign", apart=True)


def test_a_kernel_that_is_known_to_make_objects_is_refused_before_the_weights_load(pool: BuildTimePool) -> None:
    layer: Any = nn.Linear(256, 256)
    layer.quant_method = Repack("foreign")
    layer.quant_method.mxfp4_backend = SimpleNamespace(name="TRITON")
    assert pool.take(layer, lambda name, num_bytes: False, apart=True) == 0, "nothing of it is to leave"
    with pytest.raises(OptionError, match=r"weight would be offloaded, .* has an object of triton_kernels"):
        pool.take(layer, lambda name, num_bytes: name == "weight", apart=True)


@pytest.mark.parametrize("leaves", [True, False])
def test_what_an_object_holds_leaves_as_a_parameter(pool: BuildTimePool, leaves: bool) -> None:
    """Where the weight that it takes the place of has left."""

    def hold_packed(module: Any) -> dict[str, str]:
        module.packed = nn.Parameter(module.weight.data, requires_grad=False)
        return {"packed": "weight"}

    pool.hold_packed = hold_packed
    layer: Any = nn.Linear(256, 256)
    layer.other = nn.Parameter(torch.randn(256, 256), requires_grad=False)
    layer.quant_method = Repack("foreign")
    layer.quant_method.mxfp4_backend = SimpleNamespace(name="TRITON")
    pool.take(layer, lambda name, num_bytes: name == "other" or (leaves and name == "weight"), apart=True)
    expected = layer.weight.data * 2
    with torch.no_grad():
        layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer.packed, expected)
    assert (pool.find(layer.packed.data) is not None) == leaves
    assert pool.num_bytes == WEIGHT * (1 + leaves), "none of the former memory is left"


def test_weights_that_are_quantised_while_they_load_leave_when_they_are_made(pool: BuildTimePool) -> None:
    """They have no memory before: an engine builds them on meta."""
    layer: Any = nn.Linear(256, 256, device="meta")
    layer.quant_method = Repack("half")
    assert pool.take(layer, lambda name, num_bytes: name == "weight", apart=False) == 0
    layer.weight, layer.bias = (nn.Parameter(torch.randn(*p.shape)) for p in (layer.weight, layer.bias))
    with torch.no_grad():
        layer.quant_method.process_weights_after_loading(layer)
    assert pool.find(layer.weight.data) is not None
    assert pool.num_bytes == WEIGHT // 2


# -- experts that will be cached ---------------------------------------------------------------------------------------


class Mapped(MappedMemory):
    """Ordinary memory in the place of what the driver maps."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        assert num_bytes % PIECE_BYTES == 0
        self._pages = torch.zeros(num_bytes, dtype=torch.uint8)
        RawMemory.__init__(self, self._pages.data_ptr(), num_bytes, keeps=self._pages)
        self.address, self.num_bytes = self._pages.data_ptr(), num_bytes

    @property
    def buffer(self) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self))

    @property
    def on_device(self) -> torch.Tensor:
        return self.buffer


class Stacked(nn.Module):
    """Eight experts of 1.5 MiB and their scales."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, 512, 768), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(8, 512), requires_grad=False)


def test_cached_experts_are_built_where_their_range_takes_them(pool: BuildTimePool) -> None:
    pool._make_mapped = Mapped
    layer = nn.Sequential(nn.Linear(512, 512), Stacked())
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    pool.take(layer, lambda name, num_bytes: num_bytes > 1 << 16, apart=True, cached=["1"])
    found = {name: pool.find(parameter.data) for name, parameter in layer.named_parameters()}
    assert {name for name, held in found.items() if held is not None} == {"0.weight", "1.up"}
    assert all(torch.equal(parameter, before[name]) for name, parameter in layer.named_parameters())
    held = {name: place for name, place in found.items() if place is not None}
    assert isinstance(held["1.up"].memory, Mapped)
    assert not isinstance(held["0.weight"].memory, MappedMemory)
    assert pool.num_bytes == 4 * 512 * 512 + 6 * PIECE_BYTES  # of exact size
    up, scale = before["1.up"].nbytes, before["1.scale"].nbytes
    cached = CachedLayer("1", 8, 3, {"1.up": up, "1.scale": scale})
    assert mappable(cached, "1.up", held) is held["1.up"].memory
    assert mappable(cached, "1.scale", held) is None
    # Scales of which only many rows make whole pieces do not keep the weights from theirs.
    beside = CachedLayer("1", 8, 3, {"1.up": up, "1.scale": 8 * 360_448})
    assert mappable(beside, "1.up", held) is held["1.up"].memory
    # A range that begins inside a piece, and memory of another size, are copied.
    assert mappable(CachedLayer("1", 8, 3, {"1.up": up + 8 * 4096}), "1.up", held) is None
    ranges = ExpertRanges([cached], torch.device("cpu"), held)
    assert [*ranges.destinations] == ["1.scale"]
    assert "1.up" not in ranges.destinations
    ranges.close()


def test_experts_that_a_plan_caches_are_mapped_when_it_is_made(pool: BuildTimePool) -> None:
    pool._make_mapped = Mapped
    layer = nn.Sequential(nn.Linear(512, 512), Stacked())
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    pool.take(layer, lambda name, num_bytes: num_bytes > 1 << 16, apart=True)
    experts = layer.get_submodule("1")
    for _ in range(2):  # what is mapped already stays
        pool.map_experts(experts.parameters())
        found = {name: pool.find(parameter.data) for name, parameter in layer.named_parameters()}
        kinds = {name: type(held.memory) for name, held in found.items() if held is not None}
        assert kinds == {"0.weight": PinnedBuffer, "1.up": Mapped}
        assert all(torch.equal(parameter, before[name]) for name, parameter in layer.named_parameters())
        del found
        assert pool.num_bytes == 4 * 512 * 512 + 6 * PIECE_BYTES  # the registered memory is free


def test_what_becomes_of_cached_experts_is_mapped_too(pool: BuildTimePool) -> None:
    class Repack:
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            layer.up = nn.Parameter(layer.get_parameter("up").detach() * 2, requires_grad=False)

    pool._make_mapped = Mapped
    layer = Stacked()
    layer.quant_method = Repack()  # type: ignore[assignment]
    expected = layer.up.detach() * 2
    pool.take(layer, lambda name, num_bytes: num_bytes > 1 << 16, apart=True, cached=[""])
    layer.quant_method.process_weights_after_loading(layer)  # type: ignore[operator, union-attr]
    held = pool.find(layer.up.data)
    assert held is not None
    assert isinstance(held.memory, Mapped)
    assert torch.equal(layer.up, expected)
    pool.compact()


def test_mapped_memory_is_no_registered_memory() -> None:
    """A pinned store copies it: it keeps slabs that it registers, and copies from them at the link's rate."""
    unit = Unit(0, "layer", 0, (SlabEntry("layer.up", 0, PIECE_BYTES),), PIECE_BYTES, "cpu")
    held = {"layer.up": AlreadyPinned(Mapped(PIECE_BYTES, torch.device("cpu")), 0, PIECE_BYTES)}
    store = PinnedStore([unit], {}, Ledger(), held=held)
    assert store.kept == frozenset()
    store.close()
