"""The promise: engines find the classes and calls they know, with the names and arguments of docs/reference.md."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace import UVA, BaseOffloader, NoopOffloader, OffloadConfig, Prefetch, PrefetchOffloader, UVAOffloader
from headrace.errors import OptionError, SelectionError, StateError
from headrace.model.inventory import take_inventory
from headrace.offloaders.layerwise import EngineOffloader
from headrace.plan.build import build_plan
from headrace.planning.request import can_read_in_place
from headrace.testing import assert_same_bits
from models import DIM, Block, MoELayer, Stack, rows


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
    headrace.set_offloader(None)


class Engine(nn.Module):
    """Builds its layers through an offloader, the way vLLM's and SGLang's ``make_layers`` do."""

    def __init__(self, offloader: BaseOffloader, num_layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(offloader.wrap_modules(Block() for _ in range(num_layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def parameters_of(function: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values() if p.name != "self"]


class TestNames:
    def test_arguments(self) -> None:
        empty = inspect.Parameter.empty
        assert parameters_of(PrefetchOffloader) == [
            ("group_size", empty), ("num_in_group", empty), ("prefetch_step", empty), ("offload_params", None),
            ("mode", "cpu"),
        ]  # fmt: skip
        assert parameters_of(UVAOffloader) == [("cpu_offload_max_bytes", empty), ("cpu_offload_params", None)]
        assert parameters_of(NoopOffloader) == []
        assert parameters_of(BaseOffloader.wrap_modules) == [("modules_generator", empty), ("prefix", "")]
        assert [name for name, _ in parameters_of(headrace.create_offloader)] == ["config"]


class TestWrapModules:
    @pytest.mark.parametrize(
        "offloader", [NoopOffloader(), PrefetchOffloader(2, 1, 1), UVAOffloader(10**6)], ids=lambda o: type(o).__name__
    )
    def test_one_module_at_a_time(self, offloader: BaseOffloader) -> None:
        """Layer N is dealt with before layer N+1 is built."""
        log: list[str] = []
        layers = [nn.Linear(4, 4) for _ in range(3)]

        def build() -> Iterator[nn.Module]:
            for index, layer in enumerate(layers):
                log.append(f"build {index}")
                yield layer
                log.append(f"taken {index}")

        modules = offloader.wrap_modules(build())
        assert log == [f"{what} {index}" for index in range(3) for what in ("build", "taken")]
        assert isinstance(modules, list)
        assert list(map(id, modules)) == list(map(id, layers)), "the very modules"


class TestPrefetch:
    @pytest.mark.parametrize(("group_size", "num_in_group", "step"), [(1, 1, 1), (1, 1, 3), (3, 1, 1), (3, 2, 2)])
    def test_life(self, group_size: int, num_in_group: int, step: int) -> None:
        offloader = PrefetchOffloader(group_size, num_in_group, step, ["linear", "norm"])
        engine = Engine(offloader).eval()
        x = rows()
        expected = engine(x)
        addresses = [p.data_ptr() for p in engine.parameters()]
        offloader.post_init()
        plan = offloader.plan
        chosen = [i for i in range(6) if i % group_size >= group_size - num_in_group]
        assert [unit.module_fqn for unit in plan.units] == [f"0.{i}" for i in chosen]
        for _ in range(3):
            offloader.sync_prev_onload()
            assert_same_bits(engine(x), expected)
            offloader.join_after_forward()
        stats = offloader.stats()
        first = sum(unit.payload_bytes for unit in plan.units[: plan.num_slots])
        assert stats.bytes_moved == first + 3 * plan.moved_bytes
        assert stats.misses == 0
        offloader.remove()
        assert [p.data_ptr() for p in engine.parameters()] == addresses
        assert_same_bits(engine(x), expected)

    def test_weights_loaded_between_wrapping_and_post_init(self) -> None:
        """Trap 7: what counts is what the parameters are when ``post_init`` is called."""
        offloader = PrefetchOffloader(1, 1, 1, ["linear"])
        engine = Engine(offloader, 3).eval()
        for layer in engine.layers:
            layer.linear.weight = nn.Parameter(torch.randn(DIM, DIM))
        expected = engine(rows())
        offloader.post_init()
        assert_same_bits(engine(rows()), expected)
        assert offloader.stats().bytes_moved > 0

    def test_several_stacks(self) -> None:
        offloader = PrefetchOffloader(2, 1, 2, ["linear"])
        first, second = Engine(offloader, 2).eval(), Engine(offloader, 5).eval()
        x = rows()
        expected = second(first(x))
        offloader.post_init()
        assert [unit.module_fqn for unit in offloader.plan.units] == ["0.1", "1.1", "1.3"]
        for _ in range(2):
            assert_same_bits(second(first(x)), expected)
        assert offloader.stats().bytes_moved > 0

    def test_a_layer_that_is_called_twice_counts_once(self) -> None:
        """What comes behind it keeps its own place in the stack, and is the one that is offloaded."""
        offloader = PrefetchOffloader(1, 1, 1, ["linear"])
        again = Block()
        layers = offloader.wrap_modules([Block(), again, again, Block()])
        model = nn.Sequential(*layers).eval()
        expected = model(rows())
        offloader.post_init()
        assert [unit.module_fqn for unit in offloader.plan.units] == ["0.0", "0.1", "0.3"]
        assert_same_bits(model(rows()), expected)

    def test_a_plan_for_another_model_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        other = build_plan(take_inventory(Stack(3)), Prefetch(1, 1, 1, ["layers"]))
        monkeypatch.setattr(PrefetchOffloader, "_make_plan", lambda self, inventory: other)
        offloader = PrefetchOffloader(1, 1, 1)
        engine = Engine(offloader, 2)
        addresses = [p.data_ptr() for p in engine.parameters()]
        with pytest.raises(OptionError, match="the plan was made for another model"):
            offloader.post_init()
        assert [p.data_ptr() for p in engine.parameters()] == addresses

    def test_calls_at_the_wrong_moment(self) -> None:
        offloader = PrefetchOffloader(1, 1, 1, ["linear"])
        with pytest.raises(StateError, match=r"nothing is offloaded yet: call post_init\(\)"):
            offloader.stats()
        with pytest.raises(SelectionError, match="of the 0"):
            offloader.post_init()
        Engine(offloader, 2)
        offloader.sync_prev_onload()
        offloader.join_after_forward()
        offloader.post_init()
        with pytest.raises(StateError, match="post_init was called twice"):
            offloader.post_init()
        with pytest.raises(StateError, match="after post_init; use a new offloader"):
            offloader.wrap_modules([])
        offloader.remove()
        offloader.remove()
        offloader.post_init()
        offloader.remove()

    def test_bad_arguments_are_refused_at_once(self) -> None:
        with pytest.raises(OptionError, match="num_in_group = 2 is larger"):
            PrefetchOffloader(1, 2, 1)


class TestUVA:
    def test_life(self) -> None:
        offloader = UVAOffloader(3 * DIM * DIM * 4, ["linear.weight"])
        engine = Engine(offloader).eval()
        expected = engine(rows())
        offloader.post_init()
        assert list(offloader.plan.uva) == [f"0.{i}.linear.weight" for i in range(3)]
        assert_same_bits(engine(rows()), expected)
        assert offloader.stats().mechanism_bytes["uva"] == 3 * DIM * DIM * 4
        offloader.remove()
        assert_same_bits(engine(rows()), expected)

    def test_moves_on_demand_where_nothing_can_be_read_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As on a GPU with HEADRACE_DISABLE_UVA or HEADRACE_DISABLE_PIN_MEMORY."""
        for place in ("context", "checks"):
            monkeypatch.setattr(f"headrace.planning.{place}.can_read_in_place", lambda device: False)
        offloader = UVAOffloader(3 * DIM * DIM * 4, ["linear.weight"])
        engine = Engine(offloader).eval()
        expected = engine(rows())
        offloader.post_init()
        assert not offloader.plan.uva
        assert [unit.module_fqn for unit in offloader.plan.units] == [f"0.{i}" for i in range(3)]
        assert_same_bits(engine(rows()), expected)
        assert offloader.stats().bytes_moved > 0

    @pytest.mark.parametrize("name", ["HEADRACE_DISABLE_UVA", "HEADRACE_DISABLE_PIN_MEMORY"])
    def test_the_switches_are_for_gpus(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        assert can_read_in_place(torch.device("cuda"))
        monkeypatch.setenv(name, "1")
        assert not can_read_in_place(torch.device("cuda"))
        assert can_read_in_place(torch.device("cpu"))

    def test_experts_first(self) -> None:
        offloader = UVAOffloader(10**9, ["experts"])
        offloader.wrap_modules(MoELayer() for _ in range(2))
        offloader.post_init()
        assert len(offloader.plan.uva) == 4
        assert all(".experts." in name for name in offloader.plan.uva)


class TestNoop:
    def test_touches_nothing(self) -> None:
        offloader = NoopOffloader()
        engine = Engine(offloader).eval()
        before = [dict(vars(module)) for module in engine.modules()]
        offloader.post_init()
        offloader.sync_prev_onload()
        engine(rows())
        offloader.join_after_forward()
        offloader.remove()
        assert [dict(vars(module)) for module in engine.modules()] == before


class TestCreate:
    @pytest.mark.parametrize(
        ("config", "kind"),
        [
            (OffloadConfig(), NoopOffloader),
            (OffloadConfig(prefetch=Prefetch(4, 1, 2)), PrefetchOffloader),
            (OffloadConfig(uva=UVA("1GiB")), UVAOffloader),
            (OffloadConfig("none", Prefetch(), UVA("1GiB")), NoopOffloader),
            (OffloadConfig("prefetch", Prefetch(), UVA("1GiB")), PrefetchOffloader),
            (OffloadConfig("uva", Prefetch(), UVA("1GiB")), UVAOffloader),
        ],
        ids=str,
    )
    def test_auto_and_named(self, config: OffloadConfig, kind: type) -> None:
        assert type(headrace.create_offloader(config)) is kind

    def test_options_arrive(self) -> None:
        offloader = headrace.create_offloader(OffloadConfig(prefetch=Prefetch(2, 1, 2, ["linear"])))
        assert isinstance(offloader, PrefetchOffloader)
        Engine(offloader)
        offloader.post_init()
        assert (len(offloader.plan.units), offloader.plan.num_slots) == (3, 2)
        offloader.remove()
        limited = headrace.create_offloader(OffloadConfig(uva=UVA(DIM * DIM * 4, ["linear.weight"])))
        assert isinstance(limited, UVAOffloader)
        Engine(limited)
        limited.post_init()
        assert list(limited.plan.uva) == ["0.0.linear.weight"]
        limited.remove()

    def test_an_option_without_effect_is_refused(self) -> None:
        with pytest.raises(OptionError, match="mode 'disk' has no effect"):
            headrace.create_offloader(OffloadConfig(uva=UVA("1GiB", mode="disk")))


class TestCurrent:
    def test_get_and_set(self) -> None:
        assert isinstance(headrace.get_offloader(), NoopOffloader)
        mine = PrefetchOffloader(1, 1, 1)
        headrace.set_offloader(mine)
        assert headrace.get_offloader() is mine
        headrace.set_offloader(None)
        assert isinstance(headrace.get_offloader(), NoopOffloader)

    def test_offload_neither_reads_nor_sets_it(self) -> None:
        mine = PrefetchOffloader(1, 1, 1)
        headrace.set_offloader(mine)
        with headrace.offload(Stack(3).eval(), Prefetch(params=["layers"])) as handle:
            assert headrace.get_offloader() is mine
            assert handle.stats().bytes_moved > 0
        with pytest.raises(StateError):
            mine.stats()


def test_a_table_in_host_memory_at_the_start_of_a_layer_is_not_the_device() -> None:
    """vLLM 0.33 pins tables of n-grams; here ``meta`` stands for the GPU."""
    table, weight = nn.Embedding(4, 8), nn.Linear(8, 8, device="meta")
    offloader = EngineOffloader(Prefetch(1), lambda: nn.Module())
    list(offloader.wrap_modules(iter([nn.Sequential(table, weight)])))
    assert offloader._device().type == "meta"
