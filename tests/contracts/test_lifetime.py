"""The promise: a view keeps its bytes alive, everything is given back, and changes to an offloaded model are detected
(contract 6)."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from checks import eventually, require_forwards
from headrace import UVA, HeadraceWarning, Prefetch, Rules
from headrace.errors import ModelChangedError, StateError
from headrace.model.live_tensors import is_placeholder
from headrace.testing import assert_moved, assert_same_bits
from models import DIM, MoE, ScaledStack, Stack, all_layers, earlier_threads, expecting, open_files, rows, save

pytestmark = pytest.mark.usefixtures("no_grad")


def readers() -> list[threading.Thread]:
    found = [thread for thread in threading.enumerate() if thread not in earlier_threads]
    return [thread for thread in found if thread.name.startswith("headrace-reader")]


def zero_weight(module: nn.Module, args: object) -> None:
    module.weight.zero_()


class TestGivenBack:
    @pytest.mark.parametrize("mode", ["cpu", "disk"])
    def test_remove_ends_threads_and_closes_files(self, mode: str, tmp_path: Path) -> None:
        assert eventually(lambda: readers() == [])
        model = Stack(4).eval()
        checkpoint = save(model, tmp_path) if mode == "disk" else None
        handle = headrace.offload(model, all_layers(2, mode), checkpoint=checkpoint)
        model(rows())
        assert len(readers()) == 2
        assert open_files(tmp_path) == (1 if mode == "disk" else 0)
        slot = weakref.ref(handle._session.prefetcher.slot_memory(0))
        handle.remove()
        assert readers() == []
        assert open_files(tmp_path) == 0
        del handle
        assert eventually(lambda: slot() is None)

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["cpu", "disk"])
    def test_so_does_dropping_the_model(self, mode: str, tmp_path: Path) -> None:
        assert eventually(lambda: readers() == [])
        model = Stack(4).eval()
        checkpoint = save(model, tmp_path) if mode == "disk" else None
        handle = headrace.offload(model, all_layers(2, mode), checkpoint=checkpoint)
        model(rows())
        slot, weight = weakref.ref(handle._session.prefetcher.slot_memory(0)), weakref.ref(model.head.weight)
        del model, handle
        assert eventually(lambda: readers() == [] and open_files(tmp_path) == 0)
        assert slot() is None
        assert weight() is None

    @pytest.mark.slow
    def test_dropping_the_handle_changes_nothing(self) -> None:
        model = Stack(4).eval()
        expected = model(rows())
        headrace.offload(model, all_layers(2))
        gc.collect()
        assert_same_bits(model(rows()), expected)
        assert len(readers()) == 2
        with pytest.raises(StateError, match="offloaded already"):
            headrace.offload(model, all_layers(2))

    @pytest.mark.slow
    def test_in_disk_mode_the_old_weights_are_let_go(self, tmp_path: Path) -> None:
        model = Stack(4).eval()
        folder = save(model, tmp_path)
        old = weakref.ref(model.layers[1].linear.weight.untyped_storage())
        with headrace.offload(model, all_layers(2, "disk"), checkpoint=folder):
            gc.collect()
            assert old() is None
            assert open_files(tmp_path) == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["cpu", "disk"])
    def test_removed_offloads_are_no_garbage(self, mode: str, tmp_path: Path) -> None:
        """Events and slots of a GPU among them: the collector would end them in whatever thread runs."""
        model = Stack(5).eval()
        checkpoint = save(model, tmp_path) if mode == "disk" else None
        gc.collect()
        gc.disable()
        try:
            handle = headrace.offload(model, all_layers(2, mode), checkpoint=checkpoint)
            model(rows())
            assert_moved(handle, 1)
            attachment = handle._session
            gone = [
                weakref.ref(thing) for thing in (attachment, attachment.prefetcher, *attachment.prefetcher.replays.live)
            ]
            handle.remove()
            del handle, attachment
            assert [ref() for ref in gone] == [None] * len(gone)
        finally:
            gc.enable()

    @pytest.mark.slow
    def test_a_hundred_times(self) -> None:
        model, x, expected = expecting(Stack(2))
        for _ in range(100):
            with headrace.offload(model, all_layers(1)):
                model(x)
        assert readers() == []
        assert_same_bits(model(x), expected)


class TestSharedMemory:
    """A tensor's storage moves to shared memory when it is sent to another process; its old memory is freed."""

    @pytest.mark.parametrize("take", [
        lambda model: model.state_dict()["layers.1.linear.weight"],
        lambda model: model.state_dict()["layers.2.linear.weight"],
    ], ids=["out of a slot", "in a slot"])  # fmt: skip
    @pytest.mark.parametrize("policy", [all_layers(1), UVA(params=["layers"])], ids=["slots", "in place"])
    def test_of_a_state_dict(self, policy: Any, take: Callable[[nn.Module], torch.Tensor]) -> None:
        model, x, expected = expecting(Stack(3, 256), torch.randn(2, 256))
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        with headrace.offload(model, policy):
            model(x)
            state = take(model).share_memory_()
            assert state.is_shared()
            for _ in range(2):
                assert_same_bits(model(x), expected)
            assert_same_bits(dict(model.state_dict()), weights)
        assert_same_bits(model(x), expected)

    def test_of_an_older_alias(self) -> None:
        model, x, expected = expecting(Stack(3, 256), torch.randn(2, 256))
        alias = model.layers[1].linear.weight.detach()
        with headrace.offload(model, all_layers(1)) as handle:
            model(x)
            handle.sync_prev_onload()
            alias.share_memory_()
            for _ in range(2):
                assert_same_bits(model(x), expected)
        assert_same_bits(model(x), expected)


class TestEnd:
    @pytest.mark.slow
    def test_of_the_program_while_copies_are_under_way(self) -> None:
        """The first units of a next forward that never comes; a thread torn out of a copy would abort the process."""
        code = """
            import torch, headrace
            torch.set_num_threads(1)
            with torch.no_grad():
                layers = [torch.nn.Linear(3000, 3000, bias=False, dtype=torch.float64) for _ in range(9)]
                handle = headrace.offload(torch.nn.Sequential(*layers), headrace.Prefetch(1, 1, 8))
                handle.model(torch.zeros(1, 3000, dtype=torch.float64))
        """
        for _ in range(2):
            done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


class TestViews:
    @pytest.mark.slow
    def test_of_a_slot_stay_readable_after_remove(self) -> None:
        model = Stack(4).eval()
        handle = headrace.offload(model, all_layers(2))
        model(rows())
        handle.sync_prev_onload()  # between forwards the slot is being filled for the next one
        view = model.layers[0].linear.weight.detach()
        expected = view.clone()
        handle.remove()
        del handle
        gc.collect()
        junk = [torch.full((DIM, DIM), 7.0) for _ in range(100)]
        assert_same_bits(view, expected)
        del junk

    @pytest.mark.slow
    def test_of_a_mapped_file_stay_readable_after_remove(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Embedding(4000, DIM), nn.Linear(DIM, DIM)).eval()
        expected = model[0].weight.clone()
        policy = UVA(params=["0.weight"], mode="disk")
        handle = headrace.offload(model, policy, checkpoint=save(model, tmp_path))
        view = model[0].weight.detach()
        handle.remove()
        del handle
        gc.collect()
        assert_same_bits(view, expected)
        assert_same_bits(model[0].weight.detach(), expected)
        assert view.data_ptr() != model[0].weight.data_ptr()

    @pytest.mark.slow
    def test_from_before_the_offload_share_the_weight_after_remove(self, tmp_path: Path) -> None:
        """As fused projections do, which a model may keep where no inventory sees them."""
        model = Stack(4).eval()
        folder = save(model, tmp_path)
        view = model.layers[0].linear.weight.data[1:3].t()
        for _ in range(2):
            with headrace.offload(model, all_layers(2, "disk"), checkpoint=folder):
                model(rows())
            assert_same_bits(view.t(), model.layers[0].linear.weight[1:3])
        with headrace.offload(model, all_layers(2, "disk"), checkpoint=folder), torch.no_grad():
            model.layers[0].linear.weight[1:3].copy_(torch.ones(()))
            assert view.eq(1).all()
        with torch.no_grad():
            model.layers[0].linear.weight[1:3].mul_(2)
        assert view.eq(2).all()

    @pytest.mark.slow
    def test_of_pinned_or_adopted_memory_outlive_the_model(self) -> None:
        """Trap 9."""
        model = Stack(4).eval()
        expected = model.layers[1].linear.weight.clone()
        headrace.offload(model, all_layers(1))
        state = model.state_dict()
        del model
        gc.collect()
        assert_same_bits(state["layers.1.linear.weight"], expected)


class TestRemove:
    def test_twice(self) -> None:
        model = Stack(3).eval()
        handle = headrace.offload(model, all_layers())
        handle.remove()
        address = model.layers[0].linear.weight.data_ptr()
        handle.remove()
        assert model.layers[0].linear.weight.data_ptr() == address

    def test_by_leaving_a_with_block_in_any_way(self) -> None:
        model = Stack(3).eval()
        addresses = [p.data_ptr() for p in model.parameters()]
        handle = headrace.offload(model, all_layers())
        assert is_placeholder(model.layers[0].linear.weight)
        with pytest.raises(ZeroDivisionError), handle:
            raise ZeroDivisionError
        assert [p.data_ptr() for p in model.parameters()] == addresses

    def test_an_old_handle_does_not_end_a_new_offload(self) -> None:
        model, x, expected = expecting(Stack(3))
        old = headrace.offload(model, all_layers())
        old.remove()
        with headrace.offload(model, all_layers()) as new:
            old.remove()
            require_forwards(new, x, expected, 1)

    def test_stats_and_plan_stay_readable(self) -> None:
        model = Stack(3).eval()
        handle = headrace.offload(model, all_layers())
        model(rows())
        moved = handle.stats().bytes_moved
        handle.remove()
        assert handle.stats().bytes_moved == moved > 0
        assert len(handle.plan.units) == 3

    def test_while_frames_of_a_forward_are_kept(self) -> None:
        """As by a traceback or a debugger: a frame that is kept keeps those of its callers, with their variables."""
        model = Stack().eval()
        kept = []
        model.layers[1].register_forward_hook(lambda *_: kept.append(sys._getframe()))
        with headrace.offload(model, all_layers(2)) as handle:
            model(rows())
            assert_moved(handle, 1)
        assert len(kept) == 1

    def test_while_another_thread_is_in_a_forward(self) -> None:
        model, x, expected = expecting(Stack(6, max_pause_s=0.01))
        handle = headrace.offload(model, all_layers(2))
        outcomes: list[Any] = []

        def work() -> None:
            with torch.no_grad():
                try:
                    outcomes.append(model(x))
                except StateError as error:
                    outcomes.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.01)
        handle.remove()
        thread.join(60)
        (outcome,) = outcomes
        if isinstance(outcome, torch.Tensor):
            assert_same_bits(outcome, expected)
        else:
            assert "was removed while a forward was running" in str(outcome)
        assert_same_bits(model(x), expected)


class TestReplaced:
    """Trap 7: quantisation and post-load processing put new parameters in place of the old."""

    def test_the_new_value_is_used_and_said_once(self) -> None:
        model, x = Stack(4).eval(), rows()
        handle = headrace.offload(model, all_layers(2))
        new = nn.Parameter(torch.randn(DIM, DIM))
        model.layers[1].linear.weight = new
        with pytest.warns(HeadraceWarning, match=r"layers\.1\.linear\.weight was replaced after it was offloaded"):
            output = model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same_bits(model(x), output)
        assert_moved(handle, 2)
        assert model.state_dict()["layers.1.linear.weight"].data_ptr() == new.data_ptr()
        handle.remove()
        assert model.layers[1].linear.weight is new
        assert_same_bits(model(x), output)

    def test_before_any_forward_and_removed_at_once(self, tmp_path: Path) -> None:
        source = Stack(3)
        for mode, device in (("cpu", "cpu"), ("disk", "cpu"), ("disk", "meta"), ("meta", "meta")):
            with torch.device(device):
                model = Stack(3)
            if device == "cpu":
                model.load_state_dict(source.state_dict())
            checkpoint = save(source, tmp_path) if mode == "disk" else None
            handle = headrace.offload(model.eval(), all_layers(2, mode), checkpoint=checkpoint)
            new = nn.Parameter(torch.ones(DIM, DIM))
            model.layers[1].linear.weight = new
            assert_same_bits(model.state_dict()["layers.1.linear.weight"], new)
            handle.remove()
            assert model.layers[1].linear.weight is new
            assert_same_bits(new, torch.ones(DIM, DIM))

    def test_a_parameter_of_another_dtype(self) -> None:
        model, x = Stack(4).eval(), rows()
        with headrace.offload(model, all_layers(2)):
            model.layers[1].linear.weight = nn.Parameter(torch.zeros(DIM, DIM, dtype=torch.float64))
            model.layers[1].linear.bias = nn.Parameter(torch.zeros(DIM, dtype=torch.float64))
            with pytest.warns(HeadraceWarning, match="replaced"), pytest.raises(RuntimeError, match="dtype"):
                model(x)

    def test_deleted(self) -> None:
        model, x, expected = expecting(Stack(4))
        model.layers[2].linear.register_parameter("unused", nn.Parameter(torch.randn(9)))
        with headrace.offload(model, all_layers(2)):
            del model.layers[2].linear.unused
            with pytest.warns(HeadraceWarning, match=r"layers\.2\.linear\.unused was deleted"):
                assert_same_bits(model(x), expected)
            assert "layers.2.linear.unused" not in model.state_dict()
        assert not hasattr(model.layers[2].linear, "unused")

    def test_set_to_none(self) -> None:
        model, x = Stack(4).eval(), rows()
        with headrace.offload(model, all_layers(2)):
            model.layers[1].linear.bias = None
            with pytest.warns(HeadraceWarning, match=r"layers\.1\.linear\.bias was replaced"):
                output = model(x)
        assert model.layers[1].linear.bias is None
        assert_same_bits(model(x), output)

    def test_a_subclass(self) -> None:
        model, x = ScaledStack(3).eval(), rows()
        with headrace.offload(model, all_layers(2)):
            new = nn.Parameter(torch.randn(DIM, DIM))
            model.layers[1].weight = new
            with pytest.warns(HeadraceWarning, match=r"layers\.1\.weight:\w+ was (replaced|deleted)"):
                output = model(x)
        assert model.layers[1].weight is new
        assert_same_bits(model(x), output)

    def test_lent_out_and_put_back(self) -> None:
        """``functional_call`` runs the model with other tensors and then puts its own back in place."""
        model, x = Stack(4).eval(), rows()
        other = {"layers.1.linear.weight": torch.randn(DIM, DIM)}
        expected, swapped = model(x), torch.func.functional_call(model, other, x)
        address = model.layers[1].linear.weight.data_ptr()
        handle = headrace.offload(model, all_layers(2))
        with pytest.warns(HeadraceWarning, match="replaced"):
            assert_same_bits(torch.func.functional_call(model, other, x), swapped)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same_bits(model(x), expected)
            assert_same_bits(torch.func.functional_call(model, other, x), swapped)
            assert_same_bits(model(x), expected)
        assert_moved(handle, 4)
        assert_same_bits(torch.func.functional_call(model, other, x), swapped)
        handle.remove()
        assert model.layers[1].linear.weight.data_ptr() == address
        assert_same_bits(model(x), expected)


class TestChanged:
    @pytest.mark.parametrize("change", [
        nn.Module.half, nn.Module.double, lambda m: m.to(torch.bfloat16),
        lambda m: m.to_empty(device="cpu").half(), lambda m: m.to_empty(device="cpu", recurse=False).half(),
        lambda m: m.to(memory_format=torch.channels_last, dtype=torch.float64),
    ], ids=["half", "double", "to", "to_empty", "to_empty alone", "to a format"])  # fmt: skip
    def test_a_cast_is_refused_at_once(self, change: Callable[[nn.Module], Any]) -> None:
        model, x, expected = expecting(Stack(3))
        with headrace.offload(model, all_layers(2)) as handle:
            for module in (model, model.layers, model.layers[1].linear):
                with pytest.raises(ModelChangedError, match=r"would change offloaded weights.*handle\.remove"):
                    change(module)
            require_forwards(handle, x, expected, 1)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        change(model)
        assert model.head.weight.dtype != torch.float32

    def test_a_cast_that_changes_nothing(self) -> None:
        """Of a module beside others of another dtype, in each forward, as routers of transformers do it."""

        class Router(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.to(torch.float32)
                return super().forward(x.float())

        model, x, expected = expecting(
            nn.Sequential(nn.Linear(DIM, DIM).bfloat16(), Router(DIM, DIM)), rows().bfloat16()
        )
        with headrace.offload(model, Prefetch(params=["ALL_MODEL_PARAMS"])) as handle:
            require_forwards(handle, x, expected, 2)
            message = r"\(1\.weight, torch\.float32\).* in its forward, keep it resident .*1\.weight=resident"
            with pytest.raises(ModelChangedError, match=message):
                model[1].half()

    def test_a_cast_of_residents(self) -> None:
        """Refused too, since what casts layer by layer would get half way; in a forward it is the model's own doing."""

        class Wider(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.double()
                return super().forward(x.double())

        model, twin = (
            nn.Sequential(*Stack(3).layers, Wider(DIM, DIM), nn.Linear(DIM, 2).double()).eval() for _ in "12"
        )
        twin.load_state_dict(model.state_dict())
        with headrace.offload(model, Rules([(r"re:[34]\..*", "resident"), ("*", "prefetch")])) as handle:
            for part in model[3:]:
                for cast in (
                    nn.Module.half, lambda m: m.to(torch.float8_e4m3fn),
                    lambda m: m._apply(lambda t: t.bfloat16() if t.ndim > 1 else t),
                ):  # fmt: skip
                    with pytest.raises(ModelChangedError, match=r"to\(\), half\(\).* would change .*handle\.remove"):
                        cast(part)
                assert copy.deepcopy(part).half().weight.dtype == torch.float16
            model[4].double()
            model[4].to_empty(device="cpu", recurse=False).load_state_dict(twin[4].state_dict())
            assert pickle.loads(pickle.dumps(model[4])).half().weight.dtype == torch.float16
            require_forwards(handle, rows(), twin(rows()), 1)
        assert_same_bits(dict(model.state_dict()), dict(twin.state_dict()))
        assert model.half()[3].weight.dtype == torch.float16

    def test_a_cast_of_residents_by_a_callback(self) -> None:
        """Which runs in the forward of the root, layer by layer, and is no module's own doing."""

        class Root(Stack):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.called_back()
                return super().forward(x)

        model, x = Root(4).eval(), rows()
        model.called_back = lambda: None
        expected = model(x)
        with headrace.offload(model, Rules([("layers.0", "resident"), ("*", "prefetch")])) as handle:
            model.called_back = lambda: [part.half() for part in model.modules() if not [*part.children()]]
            with pytest.raises(ModelChangedError, match=r"would change .*handle\.remove"):
                model(x)
            model.called_back = lambda: None
            assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
            require_forwards(handle, x, expected, 1)

    def test_moved_data_of_one_tensor(self) -> None:
        model, x = Stack(3).eval(), rows()
        with headrace.offload(model, all_layers(2)):
            model.layers[2].linear.weight.data = torch.zeros(DIM, DIM)
            with pytest.raises(ModelChangedError, match=r"layers\.2\.linear\.weight was moved"):
                model(x)

    def test_swapped_tensors_stay_swapped(self) -> None:
        """torch swaps the attributes of the tensors, too, such as the methods that an offload puts there."""
        model, x, other = Stack(3).eval(), rows(), Stack(3).eval()
        other.load_state_dict(model.state_dict())
        with headrace.offload(model, UVA(params=["linear"])):
            for each in (model, other):
                torch.utils.swap_tensors(each.layers[0].linear.weight, each.layers[1].linear.weight)
            assert_same_bits(model(x), other(x))
        assert_same_bits(dict(model.state_dict()), dict(other.state_dict()))

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("when", ["before", "between"])
    def test_written_in_place_between_forwards_counts(self, when: str) -> None:
        """The store has what was written, and no weight becomes resident for it."""
        model, x, other = Stack(3).eval(), rows(), Stack(3).eval()
        other.load_state_dict(model.state_dict())
        other.layers[1].linear.weight.zero_()
        with headrace.offload(model, all_layers(2)) as handle:
            if when != "before":
                model(x)
            plan = handle.plan
            model.layers[1].linear.weight.zero_()
            for _ in range(2):
                assert_same_bits(model(x), other(x))
            assert handle.plan == plan
            assert_same_bits(model.state_dict(), other.state_dict())
            assert handle.stats().bytes_moved > 0
        assert_same_bits(model(x), other(x))

    @pytest.mark.filterwarnings("error")  # one error, and no echo of it
    def test_written_in_place_during_a_forward(self) -> None:
        model, x = Stack(3).eval(), rows()
        with headrace.offload(model, all_layers(2)):
            model.layers[1].linear.register_forward_pre_hook(zero_weight)
            with pytest.raises(ModelChangedError, match=r"layers\.1\.linear\.weight was written in place"):
                model(x)

    def test_to_the_same_device_and_dtype_is_no_change(self) -> None:
        model, x, expected = expecting(Stack(3))
        with headrace.offload(model, all_layers(2)) as handle:
            model.to("cpu").float().eval().requires_grad_(False)
            require_forwards(handle, x, expected, 1)


class TestRefused:
    @pytest.mark.parametrize("policy", [all_layers(2), UVA(params=["layers"])], ids=["prefetch", "uva"])
    def test_load_state_dict_writes_nothing(self, policy: Prefetch | UVA) -> None:
        model = MoE(3).eval()
        state = {name: torch.zeros_like(t) for name, t in model.state_dict().items()}
        expected = {name: t.clone() for name, t in model.state_dict().items()}
        with headrace.offload(model, policy):
            for part, prefix in ((model, ""), (model.layers, "layers."), (model.layers[1].mlp, "layers.1.mlp.")):
                own = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
                with pytest.raises(ModelChangedError, match=r"handle\.remove\(\) first, load"):
                    part.load_state_dict(own)
            assert_same_bits(dict(model.state_dict()), expected)
        model.load_state_dict(state)
        assert_same_bits(dict(model.state_dict()), state)

    def test_the_offloaded_tensor_of_a_state_is_named(self) -> None:
        """By its name in the model that loads, and also if it is the last of many, of a model around."""
        around = nn.ModuleDict({"model": Stack(3).eval()})
        with headrace.offload(around["model"], all_layers(2)):
            state = {**{f"model.head.{name}": torch.ones(1) for name in "abc"}, "model.layers.1.linear.bias": rows()}
            with pytest.raises(ModelChangedError, match=r"write model\.layers\.1\.linear\.bias, which is offloaded"):
                around.load_state_dict(state, strict=False)

    @pytest.mark.parametrize("policy", [all_layers(2), UVA(params=["layers"])], ids=["prefetch", "uva"])
    def test_loading_residents_beside_offloaded_tensors_is_fine(self, policy: Prefetch | UVA) -> None:
        """The residents of a model, and what a module within an offloaded one got since, as adapters do."""
        model = Stack(3).eval()
        with headrace.offload(model, policy):
            model.layers[1].linear.adapter = nn.Linear(2, 2)
            state = {"layers.1.linear.adapter.weight": torch.eye(2), "head.weight": torch.zeros(3, DIM)}
            missing, unexpected = model.load_state_dict({**state, "head.bias": torch.ones(3)}, strict=False)
            assert not unexpected
            assert "layers.1.linear.weight" in missing
            assert_same_bits(model.layers[1].linear.adapter.weight, torch.eye(2))
            assert_same_bits(model(rows()), torch.ones(4, 3))

    def test_loading_a_resident_part_is_fine(self) -> None:
        model = Stack(3).eval()
        with headrace.offload(model, all_layers(2)):
            model.head.load_state_dict({"weight": torch.zeros(3, DIM), "bias": torch.ones(3)})
            assert_same_bits(model(rows()), torch.ones(4, 3))

    @pytest.mark.parametrize("policy", [all_layers(2), UVA(params=["layers"])], ids=["prefetch", "uva"])
    @pytest.mark.parametrize(
        "how",
        [
            copy.deepcopy,
            pickle.dumps,
            lambda model: torch.save(model, io.BytesIO()),
            lambda model: copy.deepcopy(model.layers[1].linear),
        ],
        ids=["deepcopy", "pickle", "torch.save", "part"],
    )
    def test_copies(self, policy: Prefetch | UVA, how: Callable[[nn.Module], Any]) -> None:
        model, x, expected = expecting(Stack(3))
        with headrace.offload(model, policy):
            with pytest.raises(StateError, match="cannot be copied or pickled"):
                how(model)
            assert_same_bits(copy.deepcopy(model.head)(torch.ones(1, DIM)), model.head(torch.ones(1, DIM)))
            assert_same_bits(model(x), expected)
        assert_same_bits(copy.deepcopy(model)(x), expected)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.parametrize("part", ["", "layers.1"])
    def test_replicas(self, part: str) -> None:
        """What ``nn.DataParallel`` makes of each module: the attributes are copied, ``forward`` among them."""
        model, x, expected = expecting(Stack(3))
        with headrace.offload(model, all_layers(2)) as handle:
            replica = model.get_submodule(part)._replicate_for_data_parallel()
            with pytest.raises(
                StateError, match=r"copy of a (Stack|Block) that is offloaded was called.*handle\.remove"
            ):
                replica(x)
            require_forwards(handle, x, expected, 1)

    def test_a_forward_in_a_forked_process(self) -> None:
        """Threads do not come along: an error, where there would be a wait for ever."""
        model, x, expected = expecting(Stack(3))
        with headrace.offload(model, all_layers(1)) as handle:
            model(x)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
                child = os.fork()
            if child == 0:
                status = 1
                try:
                    handle._session.prefetcher.wait(1)
                except StateError as error:
                    status = 0 if "is a fork of the one that offloaded" in str(error) else 2
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert_same_bits(model(x), expected)

    def test_a_second_offload(self) -> None:
        model, x, expected = expecting(nn.Sequential(Stack(3), nn.Linear(3, 3)))
        for policy in (all_layers(2), UVA(params=["layers"])):
            handle = headrace.offload(model[0], policy)
            for again in (model, model[0], model[0].layers, model[0].layers[1].linear):
                with pytest.raises(StateError, match="offloaded already"):
                    headrace.offload(again, Prefetch(params=["ALL_MODEL_PARAMS"]))
            assert_same_bits(model(x), expected)
            handle.remove()
        assert_same_bits(model(x), expected)
        with headrace.offload(model[0], all_layers(2)):
            its_own = r"already; call remove\(\) on the handle that headrace\.offload returned for it before you"
            as_part = r"already, as 'layers\.1\.linear' of a Stack; call remove\(\) on the handle or offloader of that"
            for again, message in (
                (model[0], rf"^this module \(Stack\) is offloaded {its_own} offload it again$"),
                (model, rf"^the submodule '0' \(Stack\) is offloaded {its_own} offload the model around it$"),
                (model[0].layers[1].linear, rf"^this module \(Linear\) is offloaded {as_part}"),
                (model[0].layers[1], rf"^the submodule 'norm' .* {as_part.replace('linear', 'norm')}"),
            ):
                with pytest.raises(StateError, match=message):
                    headrace.offload(again, UVA(params=["weight"]))
        offloader = headrace.PrefetchOffloader(1, 1, 1, ["weight"])
        offloader.wrap_modules(model[0].layers)
        offloader.post_init()
        with pytest.raises(StateError, match="offloaded already"):
            headrace.offload(model, all_layers(1))
        offloader.remove()
        headrace.offload(model, all_layers(1)).remove()
