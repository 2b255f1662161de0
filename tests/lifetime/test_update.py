"""The promise: ``update()`` gives weights new values, all or none, wherever their bytes are.

Beside every model runs its resident twin, which gets the same values by ``copy_``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import headrace
from checks import raising, run_threads
from headrace import Prefetch
from headrace.errors import (
    BudgetError,
    CheckpointError,
    HeadraceWarning,
    ModelChangedError,
    OptionError,
    OptionTypeError,
    StateError,
)
from headrace.lifetime import update as lifetime_update
from headrace.runtime.session import OffloadSession
from headrace.stores.coded_host import CodedStore
from headrace.testing import assert_same_bits
from interrupts import Interrupter
from lifetimes import WAYS, Model, Pair, pair

TAKES = [way for way in WAYS if not way.startswith("disk")]


def new_values(here: Pair, seed: int = 0, part: Callable[[str], bool] = lambda _: True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {name: tensor for name, tensor in here.twin.state_dict().items() if part(name)}
    made = {t.data_ptr(): torch.randn(t.shape, generator=generator).mul_(0.05).to(t.dtype) for t in state.values()}
    return {name: made[tensor.data_ptr()] for name, tensor in state.items()}


def give(here: Pair, values: dict[str, torch.Tensor]) -> None:
    """To the twin."""
    with torch.no_grad():
        for name, tensor in here.twin.state_dict().items():
            if name in values:
                tensor.copy_(values[name])


@pytest.fixture
def plain(tmp_path: Path) -> Pair:
    return pair("prefetch", tmp_path)


class TestBits:
    @pytest.mark.parametrize("way", TAKES)
    def test_all_weights(self, way: str, tmp_path: Path) -> None:
        here = pair(way, tmp_path)
        here.check()
        for seed in range(3):
            values = new_values(here, seed)
            give(here, values)
            num_bytes = sum(t.numel() * t.itemsize for t in {id(value): value for value in values.values()}.values())
            assert here.handle.update(values) == num_bytes
            here.check()
        here.check_state()

    @pytest.mark.parametrize("way", TAKES)
    def test_while_it_is_parked(self, way: str, tmp_path: Path) -> None:
        here = pair(way, tmp_path)
        here.check()
        here.handle.park()
        values = new_values(here, part=lambda name: "layers.1" in name or "first" in name)
        give(here, values)
        here.handle.update(values)
        with pytest.raises(StateError, match=r"resume\(\)"):
            here.run(here.model)
        here.handle.resume()
        here.check()
        here.handle.park(resume="auto")
        here.check()
        here.check_state()

    @pytest.mark.parametrize("way", ["prefetch", "coded"])
    def test_a_part_in_debug_mode(self, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HEADRACE_DEBUG", "1")
        here = pair(way, tmp_path)
        here.check()
        values = new_values(here, part=lambda name: "layers.2" in name)
        give(here, values)
        here.handle.update(values)
        here.check()
        here.check_state()

    def test_a_folder(self, plain: Pair, tmp_path: Path) -> None:
        values = new_values(plain, part=lambda name: "first" not in name)
        save_file(values, tmp_path / "model.safetensors")
        give(plain, values)
        plain.handle.update(tmp_path)
        plain.check()
        plain.check_state()

    def test_codes_of_another_length(self, tmp_path: Path) -> None:
        here = pair("coded", tmp_path)
        here.check()
        generator = torch.Generator().manual_seed(0)
        for name, spread in (("layers.1.linear.weight", 60.0), ("layers.3.linear.weight", 0.0)):
            shape = here.twin.state_dict()[name].shape
            values = {name: torch.randn(shape, generator=generator).mul(spread).exp().clamp(max=1e9).bfloat16()}
            give(here, values)
            here.handle.update(values)
            here.check()
        here.check_state()

    def test_tensors_of_other_strides_and_in_inference_mode(self, plain: Pair) -> None:
        values = {"layers.0.linear.weight": torch.randn(256, 256).T, "first.weight": torch.randn(256, 512)[:, ::2]}
        give(plain, {**values, "last.weight": values["first.weight"]})
        with torch.inference_mode():
            plain.handle.update(values)
        plain.check()
        plain.check_state()

    @pytest.mark.parametrize("way", TAKES)
    def test_of_an_offload_that_began_in_inference_mode(self, way: str, tmp_path: Path) -> None:
        """Torch refuses to write to its tensors elsewhere."""
        with torch.inference_mode():
            here = pair(way, tmp_path)
            values = new_values(here)
            give(here, values)
        here.handle.update(values)
        with torch.inference_mode():
            here.check()
        here.handle.park()
        here.handle.resume()
        with torch.inference_mode():
            here.check()

    def test_compiled_code_sees_it(self, plain: Pair) -> None:
        compiled, x = torch.compile(plain.model, backend="eager", fullgraph=True), torch.ones(2, 256)
        plain.run = lambda each: (compiled if each is plain.model else each)(x)
        plain.check()
        values = new_values(plain)
        give(plain, values)
        plain.handle.update(values)
        plain.check()
        torch.compiler.reset()

    def test_what_autograd_has_saved_is_no_longer_valid(self, plain: Pair) -> None:
        x = torch.ones(2, 256, requires_grad=True)
        output = plain.model.last(x).sum()  # type: ignore[operator]
        plain.handle.update({"last.weight": torch.zeros(256, 256)})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()

    def test_a_promoted_weight(self, plain: Pair) -> None:
        with pytest.warns(match="resident from now on"):
            plain.model.layers[1].linear.weight.sum()  # type: ignore[index, union-attr]
        values = new_values(plain)
        give(plain, values)
        plain.handle.update(values)
        plain.check()
        plain.check_state()

    def test_names_of_one_tensor_are_compared_by_bits(self, plain: Pair) -> None:
        values = {name: torch.full((256, 256), float("nan")) for name in ("first.weight", "last.weight")}
        give(plain, values)
        plain.handle.update(values)
        plain.check()
        zero = torch.zeros(256, 256)
        with pytest.raises(OptionError, match="differ"):
            plain.handle.update({"first.weight": zero, "last.weight": -zero})
        plain.check_state()

    @pytest.mark.parametrize("way", ["prefetch", "checkpoint"])
    def test_a_whole_state_with_a_tensor_without_elements(
        self, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make = Model.__init__

        def make_with_it(model: Model) -> None:
            make(model)
            model.register_buffer("empty", torch.zeros(0, 4))

        monkeypatch.setattr(Model, "__init__", make_with_it)
        here = pair(way, tmp_path)
        values = new_values(here)
        give(here, values)
        here.handle.update(values)
        with pytest.raises(OptionError, match=r"empty: expected \[0, 4\].*found \[0, 3\]"):
            here.handle.update({"empty": torch.zeros(0, 3)})
        here.check()
        here.check_state()


class TestRefused:
    """Nothing is changed then."""

    @pytest.mark.parametrize(
        ("values", "error", "message"),
        [
            ({"layers.9.linear.weight": torch.ones(1)}, OptionError, "no tensor 'layers.9.linear.weight'"),
            ({"last.bias": torch.ones(255)}, OptionError, r"expected \[256\] torch.float32, found \[255\]"),
            ({"last.bias": torch.ones(256).half()}, OptionError, r"found \[256\] torch.float16"),
            ({"last.bias": torch.ones(256, device="meta")}, OptionTypeError, "dense tensor"),
            ({"last.bias": [1.0] * 256}, OptionTypeError, "dense tensor"),
            ({"first.weight": torch.ones(256, 256), "last.weight": torch.zeros(256, 256)}, OptionError, "differ"),
            (7, OptionTypeError, "expected tensors by name"),
        ],
    )
    def test_of_wrong_values(self, values: Any, error: Any, message: str, plain: Pair) -> None:
        given = {"layers.0.linear.weight": torch.ones(256, 256), **values} if isinstance(values, dict) else values
        with pytest.raises(error, match=message):
            plain.handle.update(given)
        plain.check()
        plain.check_state()

    def test_of_a_tensor_that_no_plan_has(self, plain: Pair) -> None:
        plain.model.added = torch.nn.Parameter(torch.zeros(3))
        plain.model.register_buffer("sparse", torch.eye(3).to_sparse())
        for name, message in (
            ("added", "added was added since"),
            ("sparse", r"sparse is a Tensor \(torch\.sparse_coo\)"),
        ):
            with pytest.raises(OptionError, match=message + r".*nothing was changed\. Write it in the model"):
                plain.handle.update({"last.bias": torch.ones(256), name: torch.ones(3)})
        plain.check()

    @pytest.mark.parametrize("way", ["disk", "disk in place"])
    def test_of_files(self, way: str, tmp_path: Path) -> None:
        here = pair(way, tmp_path)
        with pytest.raises(OptionError, match=r"mode 'disk', which takes no new values.*nothing was changed"):
            here.handle.update(new_values(here))
        here.check()
        values = {"layers.1.norm.weight": torch.ones(256) * 2}
        if here.handle.plan.mechanism_of("layers.1.norm.weight") == "resident":
            give(here, values)
            here.handle.update(values)
        here.check()

    def test_of_a_folder(self, plain: Pair, tmp_path: Path) -> None:
        save_file({"last.bias": torch.ones(256), "other": torch.ones(2)}, tmp_path / "model.safetensors")
        with pytest.raises(OptionError, match="no tensor 'other'; nothing was changed"):
            plain.handle.update(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"no header")
        with pytest.raises(CheckpointError):
            plain.handle.update(tmp_path)
        plain.check()

    @pytest.mark.parametrize("way", ["prefetch", "in place", "all resident"])
    @pytest.mark.parametrize("parked", [False, True])
    def test_of_memory_that_is_written(self, way: str, parked: bool, tmp_path: Path) -> None:
        """Two weights that change places: the first write would be the value of the second."""
        here = pair(way, tmp_path)
        if parked:
            here.handle.park()
        for kind in ("linear", "norm"):
            names = [f"layers.{index}.{kind}.weight" for index in range(2)]
            for held in (here.model.state_dict(), dict(here.model.named_parameters())):
                with pytest.raises(OptionError, match=r"memory of the model.*\.clone\(\)"):
                    here.handle.update({names[0]: held[names[1]], names[1]: held[names[0]]})
        here.handle.resume()
        here.check()
        here.check_state()

    def test_of_memory_that_was_the_weight_before_the_offload(self) -> None:
        model = Model().eval()
        aliases = [model.layers[index].linear.weight.data for index in range(2)]  # type: ignore[index, union-attr]
        handle = headrace.offload(model, Prefetch(1, 1, 2, params=("linear.weight",)))
        with pytest.raises(OptionError, match="memory of the model"):
            handle.update({"layers.0.linear.weight": aliases[1], "layers.1.linear.weight": aliases[0]})

    def test_that_a_value_is_compared_once(self, plain: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not once for each weight of the model: that took longer than the copies."""
        found: list[torch.Tensor] = []
        span = lifetime_update._span
        monkeypatch.setattr(lifetime_update, "_span", lambda tensor: [found.append(tensor), span(tensor)][1])
        values = new_values(plain)
        plain.handle.update(values)
        assert len(found) <= 2 * len(values)

    def test_of_a_replaced_weight(self, plain: Pair) -> None:
        for model in (plain.model, plain.twin):
            model.last.bias = torch.nn.Parameter(torch.ones(256))
        with pytest.raises(ModelChangedError, match=r"last.bias or a module around it was replaced"):
            plain.handle.update({"last.bias": torch.zeros(256)})
        plain.check()

    @pytest.mark.parametrize("name", ["layers.1.linear.weight", "layers.1.norm.weight", "layers.1.count"])
    def test_of_a_weight_whose_module_has_another_place(self, name: str, plain: Pair) -> None:
        """The name is one of another tensor now."""
        values = {name: torch.ones_like(plain.twin.state_dict()[name])}
        for model in (plain.model, plain.twin):
            layers: Any = model.layers
            layers[1], layers[2] = layers[2], layers[1]
        with pytest.raises(ModelChangedError, match="or a module around it was replaced"):
            plain.handle.update(values)
        for model in (plain.model, plain.twin):
            layers = model.layers
            layers[1], layers[2] = layers[2], layers[1]
        plain.handle.update(values)
        give(plain, values)
        plain.check()
        plain.check_state()


def fail_in_the_middle(here: Pair, values: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the device fail when some values are written."""
    real, count = torch.Tensor.copy_, [0]

    def copy_(*arguments: Any, **named: Any) -> torch.Tensor:
        is_writing = threading.current_thread().name == "headrace-update"
        count[0] += is_writing
        if is_writing and count[0] == 4:
            raise RuntimeError("device lost")
        return real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copy_)
        with pytest.raises(StateError, match=r"failed in the middle.*device lost") as caught:
            here.handle.update(values)
    assert caught.value.__notes__[-1] == "headrace: the offload is half updated"


class TestFaults:
    @pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
    def test_before_anything_is_written(
        self, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here = pair("coded", tmp_path)
        here.check()
        with monkeypatch.context() as patch:
            patch.setattr(CodedStore, "code_of", raising(error))
            with pytest.raises(type(error)) as caught:
                here.handle.update(new_values(here))
        assert caught.value.__notes__[-1] == "headrace: the offload is as it was before"
        here.check()
        here.check_state()

    @pytest.mark.parametrize("parked", [False, True])
    @pytest.mark.parametrize("way", ["prefetch", "all resident", "coded"])
    def test_in_the_middle(self, way: str, parked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Only a broken device does this: no forward runs until all is written."""
        here = pair(way, tmp_path)
        if parked:
            here.handle.park()
        values = new_values(here)
        give(here, values)
        fail_in_the_middle(here, values, monkeypatch)
        for call in (lambda: here.run(here.model), here.handle.park, here.handle.resume):
            with pytest.raises(StateError, match=r"call update\(\).*or call remove\(\)"):
                call()
        here.handle.update(values)
        here.handle.resume()
        here.check()
        here.check_state()

    @pytest.mark.parametrize("parked", [False, True])
    @pytest.mark.parametrize("way", ["prefetch", "all resident", "coded"])
    def test_removed_in_the_middle(
        self, way: str, parked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The model is the caller's again, with a warning, since its weights are of two kinds."""
        here = pair(way, tmp_path)
        here.check()
        if parked:
            here.handle.park()
        values = new_values(here)
        fail_in_the_middle(here, values, monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(OffloadSession, "remove", raising(BudgetError("no room", 1)))
            with pytest.raises(BudgetError):
                here.handle.remove()
        with pytest.raises(StateError, match=r"call update\(\)"):
            here.run(here.model)
        with pytest.warns(HeadraceWarning, match="Load the weights again"):
            here.handle.remove()
        assert not any(module._forward_pre_hooks for module in here.model.modules())
        here.model.load_state_dict(here.twin.state_dict())
        here.check()
        pair_again = headrace.offload(here.model, "1GiB")
        here.check()
        pair_again.remove()

    @pytest.mark.slow
    @pytest.mark.parametrize("way", ["prefetch", "coded"])
    def test_an_interrupt_at_every_line(self, way: str, tmp_path: Path) -> None:
        """Behind it all values are the new ones, or all the old ones."""
        here = pair(way, tmp_path)
        counter, olds, seen = Interrupter(-1), new_values(here), set()
        here.handle.update(olds)
        counter.run(lambda: here.handle.update(olds))
        for at in range(0, counter.lines, max(1, counter.lines // 120)):
            news = new_values(here, at + 1)
            _, error = Interrupter(at).run(lambda news=news: here.handle.update(news))
            assert error is None or isinstance(error, KeyboardInterrupt), (at, error)
            here.handle.park()
            here.handle.resume()
            is_new = bool(torch.equal(here.model.state_dict()["last.bias"], news["last.bias"]))
            seen.add(is_new)
            give(here, news if is_new else olds)
            here.check()
            olds = news if is_new else olds
            give(here, olds)
            here.handle.update(olds)
        assert seen == {True, False}


class TestThreads:
    def test_forwards_see_all_values_or_none(self, plain: Pair) -> None:
        """One in each thread; a forward waits or has the bits of one set of weights."""
        x, stop = torch.ones(2, 256), threading.Event()
        sets = [new_values(plain, seed, lambda name: "count" not in name) for seed in range(2)]
        for layer in (*plain.model.layers, *plain.twin.layers):  # type: ignore[union-attr]
            layer.register_forward_pre_hook(lambda module, _: (module.count.zero_(), None)[1])
        expected = []
        for values in sets:
            give(plain, values)
            expected.append(plain.twin(x).detach())
        outputs: list[torch.Tensor] = []
        plain.handle.update(sets[0])

        def forwards() -> None:
            while not stop.is_set():
                with torch.no_grad():
                    outputs.append(plain.model(x))

        def update() -> None:
            try:
                for index in range(20):
                    plain.handle.update(sets[index % 2])
            finally:
                stop.set()

        run_threads([forwards, update])
        assert outputs
        assert all(any(torch.equal(output, each) for each in expected) for output in outputs)
        assert_same_bits(plain.model(x).detach(), expected[1])
