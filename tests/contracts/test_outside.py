"""The promise: a weight that is used outside of its module's forward gives the same bits, or an error in our words."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import headrace
from checks import raising
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.errors import CheckpointError, HeadraceWarning, ModelChangedError, OutsideAccessError, StateError
from headrace.model.live_tensors import is_placeholder
from headrace.testing import assert_same_bits
from models import DIM, ScaledStack, Stack, all_layers, expecting, rows, save
from outside_models import EVERYTHING, Around, Reads
from peers import on_peer, stand_in

pytestmark = pytest.mark.usefixtures("no_grad")

KEPT = r"a view of table\.weight was kept beyond the forward of its Table"
promoted = pytest.mark.filterwarnings("ignore:.*It is resident from now on:headrace.HeadraceWarning")


def limit(handle: headrace.Handle, budget_bytes: int | None) -> None:
    """Have the plan in force be one for this budget."""
    promoter = handle._session._promoter
    promoter.plan = replace(promoter.plan, budget_bytes=budget_bytes)


def assert_used(model: Any, x: torch.Tensor, use: Callable[[Any], Any], room: bool, within: Any = None) -> None:
    """Uses of weights outside of their modules and forwards in turns, ``within`` a context; ``room``: to promote."""
    expected, after = use(model), model(x)
    with headrace.offload(model, all_layers(1)) as handle:
        if not room:
            limit(handle, 1)
        with within or contextlib.nullcontext():
            for _ in range(2):
                assert_same_bits(use(model), expected)
                assert_same_bits(model(x), after)
        assert handle.stats().bytes_moved > 0


@dataclass
class Opaque:
    """What no pytree knows."""

    tensor: torch.Tensor


def judged(model: nn.Module, x: torch.Tensor, policy: Any = EVERYTHING, forwards: int = 3) -> tuple[str, ...]:
    """Offload, compare ``forwards`` forwards and the state with those of the resident; returns the notes."""
    model.eval()
    twin = copy.deepcopy(model)
    expected = [twin(x) for _ in range(forwards)]
    with headrace.offload(model, policy) as handle:
        for output in expected:
            assert_same_bits(model(x), output)
        assert handle.stats().bytes_moved > 0
        assert_same_bits(dict(model.state_dict()), dict(twin.state_dict()))
        notes = handle.stats().notes
        for name in handle.plan.resident:
            assert handle.plan.mechanism_of(name) == "resident"
        assert handle.stats().mechanism_bytes["resident"] == handle.plan.resident_bytes
    assert_same_bits(model(x), twin(x))
    return notes


async def _later(weight: nn.Parameter) -> torch.Tensor:
    return weight * 2


def _rows_of(weight: nn.Parameter) -> Iterator[torch.Tensor]:
    yield from weight.unbind()


@promoted
@pytest.mark.parametrize(
    ("give", "take"),
    [
        (lambda w: w, lambda g: g[0]),
        (lambda w: w[:3], lambda g: g.sum(0)),
        (lambda w: w[None].expand(5, DIM, DIM), lambda g: g[4, 1]),
        (lambda w: w.t(), lambda g: g[2]),
        (lambda w: {"rows": (w[1:2], 7), "none": None}, lambda g: g["rows"][0][0]),
        (lambda w: w.detach()[1:], lambda g: g[0]),
        (lambda w: w.data, lambda g: g[0]),
        (lambda w: lambda: w * 3, lambda g: g()[0]),
        (_rows_of, lambda g: next(g)),
        (_later, lambda g: asyncio.run(g)[0]),
        (lambda w: w.view(torch.int32)[:1], lambda g: g.view(torch.float32)[0]),
    ],
    ids=["whole", "rows", "expand", "t", "nested", "detach", "data", "closure", "generator", "coroutine", "dtype"],
)
def test_returned_weights(give: Callable[..., Any], take: Callable[..., Any]) -> None:
    (note,) = judged(Around(give, take), rows())
    assert note.endswith("table.weight")


@pytest.mark.slow
def test_an_output_that_nothing_looks_into_is_refused() -> None:
    model = Around(lambda w: Opaque(w[:2]), lambda g: g.tensor[0]).eval()
    with headrace.offload(model, EVERYTHING), pytest.raises(OutsideAccessError, match=KEPT):
        model(rows())


@pytest.mark.slow
@promoted
def test_a_view_that_is_returned_and_kept_is_refused() -> None:
    kept: list[torch.Tensor] = []
    model = Around(lambda w: (kept.append(w.t()), w[:2])[1], lambda g: g[0]).eval()
    with headrace.offload(model, EVERYTHING), pytest.raises(OutsideAccessError, match=KEPT):
        model(rows())


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(DIM, DIM)
        self.last: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last.append(self.lin.weight.t())
        return self.lin(x)


@pytest.mark.slow
def test_a_view_kept_by_a_module_that_returns_nothing_is_refused() -> None:
    kept: list[torch.Tensor] = []
    model = Around(lambda w: kept.append(w.t()), lambda g: kept[0][0]).eval()
    with headrace.offload(model, EVERYTHING), pytest.raises(OutsideAccessError, match=KEPT):
        model(rows())


@pytest.mark.slow
def test_a_kept_view_is_refused_in_every_forward() -> None:
    model = nn.Sequential(Keeps(), Keeps()).eval()
    with headrace.offload(model, EVERYTHING):
        for _ in range(2):
            message = r"\('0\.lin\.weight', 'resident'\).*or let the module keep a c"
            with pytest.raises(OutsideAccessError, match=message):
                model(rows())
    with headrace.offload(model, headrace.Rules([("lin.weight", "resident"), ("lin", "prefetch")])):
        assert_same_bits(model(rows()), nn.Sequential(*model)(rows()))


@promoted
@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("policy", [EVERYTHING, headrace.Prefetch(1, 1, 2, params=["ALL_MODEL_PARAMS"])])
def test_a_parent_that_reads_a_childs_weight(calls: bool, policy: headrace.Prefetch) -> None:
    (note,) = judged(Reads(calls), rows(), policy)
    assert note.endswith(" lin.weight")


@promoted
def test_only_in_some_later_forward() -> None:
    model, x = Reads().eval(), rows()
    model.reads = False
    before = model(x)
    model.reads = True
    after = model(x)
    with headrace.offload(model, EVERYTHING) as handle:
        model.reads = False
        for _ in range(3):
            assert_same_bits(model(x), before)
        assert handle.stats().notes == ()
        model.reads = True
        assert_same_bits(model(x), after)
        assert "lin.weight" in handle.stats().notes[0]


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return x


@pytest.mark.filterwarnings("error")
def test_forward_called_directly() -> None:
    assert judged(Direct(), rows()) == ()


def test_promotion_says_so_once_and_names_the_rule() -> None:
    model = Reads().eval()
    with headrace.offload(model, EVERYTHING) as handle:
        before = handle.plan
        with pytest.warns(HeadraceWarning, match=r"lin\.weight was given to aten\.linear") as caught:
            nn.Sequential(model, model)(rows())
        assert len(caught) == 1
        assert "(rules=[('lin.weight', 'resident')], --offload-rule lin.weight=resident)" in str(caught[0].message)
        assert handle.plan.resident_bytes == before.resident_bytes + DIM * DIM * 4
        assert handle.plan.device_bytes == before.device_bytes + DIM * DIM * 4
        assert handle.plan.mechanism_of("lin.weight") == "resident"
        assert handle.plan.weight_bytes == before.weight_bytes


@pytest.mark.filterwarnings("ignore:.*would exceed the budget of:headrace.HeadraceWarning")
class TestNoRoom:
    """A budget that the plan has used up: bytes are copied for every such use."""

    @staticmethod
    def tight(model: nn.Module, share: float = 0.4) -> headrace.Handle:
        size = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
        handle = headrace.offload(model, int(size * share))
        handle.remove()
        return headrace.offload(model, handle.plan.device_bytes)

    def test_reads(self) -> None:
        model = nn.Sequential(*(nn.Linear(DIM * 8, DIM * 8) for _ in range(6))).eval()
        x, twin = torch.randn(2, DIM * 8), copy.deepcopy(model)
        with self.tight(model) as handle:
            plan = handle.plan
            for unit in plan.units:
                linear, same = model[int(unit.module_fqn)], twin[int(unit.module_fqn)]
                assert_same_bits((x @ linear.weight, linear.weight.data * 2), (x @ same.weight, same.weight * 2))
                assert is_placeholder(linear.weight)
                assert_same_bits(model(x), twin(x))
            assert handle.plan == plan
            assert handle.stats().notes[0].startswith("copied for every use outside of their module's forward")

    @pytest.mark.parametrize(
        "read",
        [
            lambda w: w.numpy(),
            lambda w: w.data.numpy(),
            lambda w: w.detach().numpy(force=True),
            lambda w: np.asarray(w),
            lambda w: w.tolist(),
            lambda w: torch.from_dlpack(w),
            lambda w: np.from_dlpack(w),
        ],
        ids=["numpy", "data.numpy", "force", "asarray", "tolist", "from_dlpack", "numpy's from_dlpack"],
    )
    @pytest.mark.parametrize("room", [True, False])
    def test_arrays_and_lists(self, read: Callable[[torch.Tensor], Any], room: bool) -> None:
        model = nn.Sequential(*(nn.Linear(DIM * 8, DIM * 8) for _ in range(6))).eval().requires_grad_(False)
        x = torch.randn(2, DIM * 8)
        expected, weights = model(x), [linear.weight.clone() for linear in model]
        with self.tight(model) as handle:
            if room:
                limit(handle, None)
            indices = [int(unit.module_fqn) for unit in handle.plan.units]
            found = [torch.as_tensor(read(model[index].weight)) for index in indices]
            assert [is_placeholder(model[index].weight) for index in indices] == [not room] * len(indices)
            assert_same_bits(model(x), expected)
            assert room or handle.stats().bytes_moved > 0
            assert_same_bits(found, [weights[index] for index in indices])  # after a forward has used the slots

    def test_writes_go_to_the_store(self) -> None:
        """By every way to write; also where the slot holds the unit that is written."""
        model = nn.Sequential(*(nn.Linear(DIM * 8, DIM * 8) for _ in range(6))).eval()
        x, twin = torch.randn(2, DIM * 8), copy.deepcopy(model)
        other = torch.randn(DIM * 8, DIM * 8)

        @torch.no_grad()
        def change(model: nn.Sequential, index: int) -> None:
            weight = model[index].weight
            weight.data += 0.5
            weight.mul_(2)
            torch.add(other, 1, out=weight.data)
            torch._foreach_add_([weight, weight.data], 0.25)
            weight.copy_(weight.data.t() + other)

        with self.tight(model) as handle:
            plan = handle.plan
            for unit in (*plan.units, plan.units[0]):
                change(model, int(unit.module_fqn))
                change(twin, int(unit.module_fqn))
                assert_same_bits(model(x), twin(x))
            assert handle.plan == plan
            assert handle.stats().bytes_moved > 0
            assert_same_bits(model.state_dict(), twin.state_dict())
        assert_same_bits(model(x), twin(x))

    def test_of_files_writes_are_errors(self, tmp_path: Path) -> None:
        model = nn.Sequential(*(nn.Linear(DIM * 8, DIM * 8) for _ in range(6))).eval()
        save(model, tmp_path)
        size = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
        plan = headrace.make_plan(model, headrace.Budget(size // 2, mode="disk"), checkpoint=tmp_path)
        with headrace.offload(model, plan.device_bytes, checkpoint=tmp_path) as handle:
            linear = model[int(handle.plan.units[0].module_fqn)]
            for step in (linear.weight.zero_, lambda: linear.weight.data.add_(1)):
                message = "writes it in place, and making it resident would exceed the budget of"
                with pytest.raises(OutsideAccessError, match=message):
                    step()

    def test_views_that_are_written_are_errors(self) -> None:
        model = nn.Sequential(*(nn.Linear(DIM * 8, DIM * 8) for _ in range(6))).eval()
        x, twin = torch.randn(2, DIM * 8), copy.deepcopy(model)
        with self.tight(model) as handle:
            linear = model[int(handle.plan.units[0].module_fqn)]
            view = linear.weight.t()
            with pytest.raises(ModelChangedError, match=r"weight was written in place by aten\.mul_"):
                view[1:].mul_(2)
            assert_same_bits(x @ view, x @ twin[int(handle.plan.units[0].module_fqn)].weight.t())
            assert_same_bits(model(x), twin(x))

    def test_returned_views_are_copied(self) -> None:
        model = Around(lambda w: w[None].expand(5, *w.shape), lambda g: g[4, 1])
        model.table.weight = nn.Parameter(torch.randn(DIM * 16, DIM))
        shapes = ((DIM, DIM * 16), (DIM * 16, DIM))
        model.layers = nn.ModuleList(nn.Sequential(*(nn.Linear(*shape) for shape in shapes)) for _ in range(4))
        model.eval()
        twin, x = copy.deepcopy(model), rows()
        rule = headrace.Budget(450 * 2**10, rules=[("table", "prefetch")])
        with headrace.offload(model, rule) as handle:
            assert handle.plan.device_bytes + DIM * DIM * 64 > rule.num_bytes
            for _ in range(3):
                assert_same_bits(model(x), twin(x))
            assert handle.stats().notes[0].startswith("copied for every use")
            model.take = lambda g: g[4].zero_()[0]
            with pytest.raises(ModelChangedError, match=r"table\.weight was written in place by aten\.zero_"):
                model(x)


@pytest.mark.filterwarnings("error")
def test_parameters_that_share_a_version_counter() -> None:
    """Halves of one tensor: torch counts a write to either for both."""

    class Halves(nn.Module):
        def __init__(self, halves: tuple[torch.Tensor, ...]) -> None:
            super().__init__()
            self.first, self.second = map(nn.Parameter, halves)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x @ self.first, x @ self.second], 1)

    layers = [Halves(torch.randn(DIM, DIM).chunk(2, 1)) for _ in range(3)]
    assert all(layer.first._version == layer.second._version for layer in layers)
    assert judged(nn.Sequential(*layers).eval(), rows(), headrace.Prefetch(1, 1, 1, params=["first", "second"])) == ()


class Writes(nn.Module):
    def __init__(self, write: Callable[[nn.Linear], Any]) -> None:
        super().__init__()
        self.lin = nn.Linear(DIM, DIM)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self.lin)
        return self.lin(x)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda lin: lin.weight.add_(1),
        lambda lin: lin.weight.data.add_(1),
        lambda lin: lin.weight.data[2:].copy_(torch.ones(())),
        lambda lin: lin.weight.t().detach().mul_(2),
        lambda lin: torch.mul(lin.weight, 2, out=lin.weight.data),
        lambda lin: torch._foreach_add_([lin.weight.data, torch.ones(3)], 1),
        lambda lin: nn.init.normal_(lin.weight),
    ],
    ids=["add_", "data", "view", "t", "out", "foreach", "init"],
)
def test_writes_inside_a_forward_are_refused(write: Callable[[nn.Linear], Any], inference: bool) -> None:
    with torch.inference_mode(inference):
        model, x, expected = expecting(nn.Sequential(*(Writes(lambda lin: None) for _ in range(3))))
        with headrace.offload(model, EVERYTHING) as handle:
            assert_same_bits(model(x), expected)
            model[1].write = write
            with pytest.raises(ModelChangedError, match=r"1\.lin\.weight was written in place by aten"):
                model(x)
            model[1].write = lambda lin: torch.zeros(DIM).add_(lin.bias)  # others may be written with it
            assert_same_bits(model(x), expected)
            assert handle.stats().bytes_moved > 0


def test_statistics_written_in_training_are_refused() -> None:
    """The schema of batch norm does not say that it writes them."""
    model, x, expected = expecting(nn.Sequential(*(nn.BatchNorm1d(DIM) for _ in range(3))))
    with headrace.offload(model, headrace.Prefetch(1, 1, 1, params=["running_mean", "running_var"])) as handle:
        assert_same_bits(model(x), expected)
        model[1].train()
        with pytest.raises(ModelChangedError, match=r"1\.running_mean was written in place by aten\.batch_norm"):
            model(x)
        model[1].eval()
        assert_same_bits(model(x), expected)
        assert handle.stats().bytes_moved > 0


@pytest.mark.parametrize("compiler", [None, pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "policy",
    [headrace.Prefetch(1, 1, 2, ["ALL_MODEL_PARAMS"]), headrace.Rules([("ALL_MODEL_PARAMS", "prefetch")])],
)
def test_batch_norms_of_a_model_in_training(policy: Any, compiler: str | None) -> None:
    """Their counters and statistics stay on the device when everything is named."""
    layers = [
        [nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.InstanceNorm1d(DIM, track_running_stats=True)] for _ in "123"
    ]
    model, x = nn.Sequential(*(nn.Sequential(*layer) for layer in layers)), torch.randn(5, DIM, DIM)
    twin = copy.deepcopy(model)
    with headrace.offload(model, policy) as handle:
        assert "0.1.weight" in handle.plan.offloaded_names
        called = model if compiler is None else torch.compile(model, backend=compiler)
        for _ in range(3):
            assert_same_bits(called(x), twin(x))
        assert handle.stats().bytes_moved > 0
        assert_same_bits(dict(model.state_dict()), dict(twin.state_dict()))
    assert_same_bits(dict(model.state_dict()), dict(twin.state_dict()))


def test_statistics_written_outside_go_to_the_store() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.BatchNorm1d(DIM * 8) for _ in range(4))
            self.layers = nn.Sequential(*(nn.Linear(DIM * 8, DIM * 8) for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for norm in self.norms:
                x = F.batch_norm(norm(x), norm.running_mean, norm.running_var, training=True)
            return self.layers(x)

    model, x = Parent().eval(), torch.randn(5, DIM * 8)
    twin = copy.deepcopy(model)
    budget = headrace.Budget("257KiB", ["norms", "layers"], rules=[("re:.*running.*", "prefetch")])
    with headrace.offload(model, budget) as handle:
        assert handle.plan.device_bytes + DIM * 8 * 4 > budget.num_bytes
        for _ in range(3):
            assert_same_bits(model(x), twin(x))
        assert handle.stats().bytes_moved
        assert not handle.stats().notes
    assert_same_bits(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("number", [2, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_numbers_beside_a_weight_in_its_own_module(number: float, dtype: torch.dtype) -> None:
    """The kernels of these are called by torch itself, which makes tensors of the numbers."""

    class Numbers(nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight, requires_grad=False)

        def forward(self) -> tuple[torch.Tensor, ...]:
            one = self.weight[0, 0]  # without dimensions a tensor's dtype counts, and that of a number does not
            return number**self.weight, torch.pow(number, one), torch.isin(number, self.weight), torch.isin(number, one)

    model = nn.ModuleList(Numbers(torch.randn(DIM, DIM).to(dtype)) for _ in range(3))
    expected = [layer() for layer in model]
    with headrace.offload(model, EVERYTHING) as handle:
        assert_same_bits([layer() for layer in model], expected)
        assert handle.stats().bytes_moved > 0


def test_data_set_inside_a_forward_stays_and_is_refused() -> None:
    model, x = nn.Sequential(*(Writes(lambda lin: None) for _ in range(3))).eval(), rows()
    new = torch.randn(DIM, DIM)
    with headrace.offload(model, EVERYTHING):
        model[1].write = lambda lin: setattr(lin.weight, "data", new)
        for _ in range(2):
            with pytest.raises(ModelChangedError, match=r"1\.lin\.weight was moved"):
                model(x)
            model[1].write = lambda lin: None
    assert_same_bits(model[1].lin.weight, new)


def save_aligned(model: nn.Module, folder: Path) -> Path:
    """With matrices at multiples of 64, so that they can be read in place."""
    for padding in range(0, 64, 8):
        save_file(dict(model.state_dict()), folder / "model.safetensors", {"padding": "x" * padding})
        if all(tensor.offset % 64 == 0 for tensor in Checkpoint.open(folder).tensors.values()):
            return folder
    raise AssertionError("no padding aligns it")


class TestOthers:
    """Nothing but the dispatcher sees these, and it sees all of them."""

    @promoted
    def test_another_model_with_the_same_parameter(self) -> None:
        model, draft = Stack(4).eval(), nn.Linear(DIM, DIM, bias=False)
        draft.weight = model.layers[1].linear.weight
        x = torch.randn(2, DIM)
        expected = draft(x), model(x)
        with headrace.offload(model, all_layers(1)):
            assert_same_bits((draft(x), model(x)), expected)
            with pytest.raises(StateError, match=r"weight is offloaded already, as a tensor of a Stack"):
                headrace.offload(draft, EVERYTHING)
        assert_same_bits((draft(x), model(x)), expected)

    @pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
    @pytest.mark.parametrize("room", [True, False])
    @pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
    def test_beside_a_nested_tensor(self, layout: torch.layout, room: bool) -> None:
        def use(model: Stack) -> list[torch.Tensor]:
            linear, norm = model.layers[1].linear, model.layers[1].norm
            projected = F.linear(nested, linear.weight, linear.bias)
            return [*projected.unbind(), *F.layer_norm(nested, (DIM,), norm.weight, norm.bias).unbind()]

        model, x = Stack(3).eval(), rows()
        nested = torch.nested.nested_tensor([torch.randn(3, DIM), torch.randn(5, DIM)], layout=layout)
        assert_used(model, x, use, room)

    @pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
    @pytest.mark.parametrize("room", [True, False])
    def test_in_a_dispatch_mode(self, room: bool) -> None:
        """As those that count flops or log operators; the reads take one tensor, or two."""

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return func(*args, **(kwargs or {}))

        def use(model: Stack) -> list[torch.Tensor]:
            weight = model.layers[1].linear.weight
            return [weight.sum(), x @ weight.t(), F.linear(x, weight), torch.from_numpy(weight.numpy().copy())]

        model, x = Stack(3).eval(), rows()
        assert_used(model, x, use, room, Mode())

    @pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
    @pytest.mark.parametrize("room", [True, False])
    def test_within_the_dispatch_of_a_subclass(self, room: bool) -> None:
        """As of a quantised weight, whose operators read the tensors inside of it."""

        def use(model: ScaledStack) -> list[torch.Tensor]:
            weight = model.layers[1].weight
            return [weight.clone(), weight[:2], x @ weight.t(), F.linear(x, weight), weight.data_int8 + 1]

        model, x = ScaledStack(3).eval(), rows()
        assert_used(model, x, use, room)

    @pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")
    def test_tensors_in_the_layout_of_onednn_are_left_alone(self) -> None:
        """They have no other key of autograd than a backend that torch knows by name alone."""
        x, weight = rows().to_mkldnn(), torch.randn(DIM, DIM).to_mkldnn()

        def use() -> list[torch.Tensor]:
            made = [F.linear(x, weight), x.reshape(-1), x.softmax(-1), F.dropout(x, 0.5, training=False)]
            return [each.to_dense() for each in made]

        model, expected = Stack(3).eval(), use()
        with headrace.offload(model, all_layers(1)):
            assert_same_bits(use(), expected)

    @promoted
    def test_another_thread(self) -> None:
        model, x = Stack(3).eval(), torch.randn(2, DIM)
        expected = x @ model.layers[2].linear.weight
        found: list[torch.Tensor] = []
        with headrace.offload(model, all_layers(1)):
            thread = threading.Thread(target=lambda: found.append(x @ model.layers[2].linear.weight.detach()))
            thread.start()
            thread.join(30)
        assert_same_bits(found, [expected])

    @promoted
    @pytest.mark.parametrize("inference", [False, True])
    def test_writes_around_the_version_counter(self, inference: bool) -> None:
        with torch.inference_mode(inference):
            model, delta, x = Stack(4).eval(), torch.randn(DIM, DIM), rows()
            twin = copy.deepcopy(model)
            twin.layers[1].linear.weight.data += delta
            with headrace.offload(model, all_layers(2)) as handle:
                model(x)
                model.layers[1].linear.weight.data += delta
                for _ in range(2):
                    assert_same_bits(model(x), twin(x))
                assert_same_bits(dict(model.state_dict()), dict(twin.state_dict()))
                assert handle.stats().bytes_moved > 0
            assert_same_bits(model(x), twin(x))

    @promoted
    def test_an_alias_that_outlives_the_offload(self) -> None:
        model = Stack(3).eval()
        expected = model.layers[0].linear.weight.clone()
        handle = headrace.offload(model, all_layers(1))
        alias = model.layers[0].linear.weight.data
        handle.remove()
        del handle
        assert not is_placeholder(model.layers[0].linear.weight)
        with contextlib.suppress(StateError):  # unless the collector has not run yet
            assert_same_bits(alias.clone(), expected)

    @promoted
    def test_an_alias_under_the_next_offload(self) -> None:
        model, x = Stack(3).eval(), rows()
        expected = model.layers[0].linear.weight.clone()
        first = headrace.offload(model, all_layers(1))
        alias = model.layers[0].linear.weight.data
        owners = [*first._session._bound.values()]  # without them an alias has no offload to ask, and says that
        first.remove()
        with headrace.offload(model, all_layers(1)) as handle:
            assert_same_bits(alias.clone(), expected)
            assert owners
            model(x)
            assert handle.stats().bytes_moved > 0

    @promoted
    @pytest.mark.filterwarnings("ignore:.*its bytes are copied for every such use:headrace.HeadraceWarning")
    @pytest.mark.parametrize("when", ["promoted", "copied", "resting", "removed", "offloaded again"])
    def test_an_alias_of_a_weight_whose_data_was_set(self, when: str) -> None:
        """The resident's alias keeps the old bytes, which are nowhere any more."""
        model = Stack(3).eval()
        weight = model.layers[0].linear.weight
        before, other = weight.clone(), torch.ones(DIM, DIM)
        handle = headrace.offload(model, all_layers(1))
        if when == "copied":
            limit(handle, 1)
        used, alias = weight.data, weight.detach()[:, :]
        owners = [*handle._session._bound.values()]  # without them an alias has no offload to ask, and says that
        if when in ("removed", "offloaded again"):
            handle.remove()
        elif when != "resting":
            assert_same_bits(used * 1, before)
        weight.data = other
        if when == "offloaded again":
            headrace.offload(model, all_layers(1))
        if when == "promoted":
            assert_same_bits(used * 1, before)  # it has the bytes since it was used
        message = r"alias .* of layers\.0\.linear\.weight, .* data was set .* take it again"
        with pytest.raises(StateError, match=message):
            alias.clone()
        del owners

    @promoted
    @pytest.mark.parametrize("way", ["cpu", "peer"])
    def test_views_that_the_model_keeps_in_a_list_see_writes(self, way: str) -> None:
        class Listed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(DIM * 2, DIM))
                self.views = list(self.weight.data.chunk(2))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x @ self.views[0] + F.linear(x, self.weight)[:, :DIM]

        def build() -> nn.Module:  # a deep copy would not share memory between the weight and the views
            torch.manual_seed(3)
            return nn.Sequential(*(Listed() for _ in range(3))).eval()

        model, twin, x = build(), build(), rows()
        rules = headrace.Rules([("weight", "prefetch")])
        policy = on_peer(headrace.make_plan(model, rules), 0, 1, 2) if way == "peer" else rules
        with stand_in(), headrace.offload(model, policy) as handle:
            assert_same_bits(model(x), twin(x))
            for each in (model, twin):
                each[1].weight.add_(1)
            assert_same_bits(model(x), twin(x))
            assert handle.stats().bytes_moved > 0
        assert_same_bits(model(x), twin(x))

    @pytest.mark.slow
    @promoted
    @pytest.mark.parametrize("mechanism", ["prefetch", "uva"])
    @pytest.mark.parametrize("mode", ["cpu", "disk"])
    @pytest.mark.parametrize(
        "alias",
        [
            lambda model: model.layers[0].linear.weight.detach(),
            lambda model: model.layers[0].linear.weight.detach().numpy(),
            lambda model: list(model.layers[0].linear.weight.data.chunk(2)),
            lambda model: model.state_dict()["layers.0.linear.weight"],
        ],
        ids=["detach", "numpy", "list of views", "state_dict"],
    )
    def test_an_alias_from_before_the_offload(self, alias: Any, mode: str, mechanism: str, tmp_path: Path) -> None:
        """What it writes counts, also where files replace the other weights."""
        model, x = Stack(4).eval(), rows()
        folder = save_aligned(nn.ModuleDict({"layers": model.layers}), tmp_path) if mode == "disk" else None
        rules = headrace.Rules([("layers", mechanism)], mode=mode)
        before, kept = model(x), alias(model)
        with headrace.offload(model, rules, checkpoint=folder) as handle:
            (kept[0] if isinstance(kept, list) else kept)[:9] = 0.5
            found = model(x)
            assert handle.stats().bytes_moved > 0 or handle.plan.uva_bytes > 0
        assert_same_bits(found, model(x))
        assert not torch.equal(found, before)

    def test_an_offload_that_failed_is_no_user(self, tmp_path: Path) -> None:
        """Its traceback, which a debugger or a notebook keeps, holds what it had made."""
        model, x = Stack(4).eval(), rows()
        expected, policy = model(x), all_layers(2, "disk")
        plan = headrace.make_plan(model, policy)
        save(Stack(4), tmp_path)
        with pytest.raises(CheckpointError, match="differ from the checkpoint's") as failed:
            headrace.offload(model, policy, checkpoint=tmp_path)
        save(model, tmp_path)
        with headrace.offload(model, policy, checkpoint=tmp_path) as handle:
            assert_same_bits(model(x), expected)
            assert handle.stats().bytes_moved > 0
        assert failed.traceback, plan

    @promoted
    def test_a_wrapper_that_is_taken_off(self) -> None:
        class Wrapped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.base_layer = nn.Linear(DIM, DIM)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.base_layer(x) * 2

        model = nn.Sequential(*(Wrapped() for _ in range(3))).eval()
        twin = nn.Sequential(*(copy.deepcopy(layer.base_layer) for layer in model))
        with headrace.offload(model, EVERYTHING):
            for index in range(3):
                model[index] = model[index].base_layer
            assert_same_bits(model(rows()), twin(rows()))

    @pytest.mark.filterwarnings("error")
    def test_what_reads_no_bytes_wakes_nothing(self) -> None:
        model = Stack(3).eval()
        with headrace.offload(model, all_layers(1)) as handle:
            weight = model.layers[1].linear.weight
            assert (weight.shape, weight.dtype, weight.device, weight.stride()) == (
                (DIM, DIM),
                torch.float32,
                torch.device("cpu"),
                (DIM, 1),
            )
            assert torch.zeros_like(weight).shape == weight.new_empty(DIM, DIM).shape
            model.requires_grad_(False).to("cpu").float()
            model.state_dict()
            assert handle.stats().notes == ()
            assert is_placeholder(weight)

    @pytest.mark.parametrize("debug", ["0", "1"])
    def test_a_raw_pointer_is_refused(self, debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """By the name of the tensor, which torch's own error lacks; a tensor of another object has that error."""
        monkeypatch.setenv("HEADRACE_DEBUG", debug)
        model = Stack(3).eval()
        weight = model.layers[1].linear.weight
        with headrace.offload(model, all_layers(1)):
            with pytest.raises(
                OutsideAccessError, match=r"data_ptr\(\) of layers\.1\.linear\.weight .* no address: keep"
            ):
                weight.data_ptr()
            with pytest.raises(RuntimeError, match="Cannot access data pointer"):
                weight.detach().data_ptr()
            weight.sum()
            assert weight.data_ptr(), "it is resident now"
        assert "data_ptr" not in vars(weight)

    def test_the_size_of_a_storage_without_bytes_is_the_weights(self) -> None:
        model, x, expected = expecting(Stack(3))
        with headrace.offload(model, all_layers(1)) as handle:
            weight = model.layers[1].linear.weight
            storages = [weight.untyped_storage(), weight.data.untyped_storage()]
            sizes = [(storage.nbytes(), storage.size(), len(storage)) for storage in storages]
            assert sizes == [(weight.nbytes,) * 3] * 2
            assert_same_bits(model(x), expected)
            assert handle.stats().bytes_moved > 0

    @pytest.mark.parametrize(
        "take",
        [
            lambda w: copy.deepcopy(w.detach()),
            lambda w: w.untyped_storage().clone(),
            lambda w: bytes(w.untyped_storage()),
            lambda w: w.untyped_storage().tolist(),
            lambda w: w.untyped_storage().fill_(0),
            lambda w: w.untyped_storage().copy_(torch.zeros(w.nbytes, dtype=torch.uint8).untyped_storage()),
            lambda w: w.untyped_storage().resize_(0),
            lambda w: torch.save(w.detach(), io.BytesIO()),
            lambda w: pickle.dumps(w.detach()),
        ],
        ids=["deepcopy", "clone", "bytes", "tolist", "fill_", "copy_", "resize_", "save", "pickle"],
    )
    def test_a_storage_without_bytes_is_refused(self, take: Callable[[torch.Tensor], Any]) -> None:
        """Torch would copy its no bytes into new memory of the whole size."""
        model, x, expected = expecting(Stack(3))
        with headrace.offload(model, all_layers(1)) as handle:
            for _ in range(2):
                message = r"storage of layers\.1\.linear\.weight, .* has no bytes now"
                with pytest.raises(OutsideAccessError, match=message):
                    take(model.layers[1].linear.weight)
                assert_same_bits(model(x), expected)
            assert handle.stats().bytes_moved > 0


class TestTracers:
    @promoted
    @pytest.mark.parametrize(
        "trace",
        [
            lambda model, x: torch.fx.experimental.proxy_tensor.make_fx(model)(x)(x),
            lambda model, x: torch.func.linearize(model, x)[0],
            lambda model, x: torch.func.vmap(model)(x),
            lambda model, x: torch.fx.symbolic_trace(model)(x),
            lambda model, x: torch.jit.trace(model, x, check_trace=False)(x),
        ],
        ids=["make_fx", "linearize", "vmap", "symbolic_trace", "jit"],
    )
    def test_are_refused(self, trace: Callable[..., torch.Tensor]) -> None:

        model, x, expected = expecting(
            nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU()) for _ in range(3)))
        )
        with headrace.offload(model, EVERYTHING):
            with pytest.raises(StateError, match="would record what slots hold"):
                trace(model, x)
            assert_same_bits(model(x), expected)


def test_a_users_function_with_the_name_of_one_that_reads_no_values() -> None:
    """diffusers' of that name gets placeholders, which cannot be saved."""

    def load_lora_adapter(model: nn.Module) -> dict[str, torch.Tensor]:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        return torch.load(io.BytesIO(file.getvalue()))  # type: ignore[no-any-return]

    model = Stack(3).eval()
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    with headrace.offload(model, all_layers(1)):
        assert_same_bits(dict(load_lora_adapter(model)), expected)


class TestRemove:
    def test_inside_a_forward(self) -> None:
        model, x, expected = expecting(Stack(3))
        handle = headrace.offload(model, all_layers(1))
        hook = model.layers[1].register_forward_hook(lambda *_: handle.remove())
        with pytest.raises(StateError, match=r"remove\(\) was called inside a forward"):
            model(x)
        hook.remove()
        assert_same_bits(model(x), expected)
        handle.remove()
        assert_same_bits(model(x), expected)

    def test_leaves_a_wrapper_that_came_later(self) -> None:
        model, x, expected = expecting(Stack(3))
        handle = headrace.offload(model, all_layers(1))
        inner, calls = model.layers[1].forward, []

        def wrapper(*args: Any) -> Any:
            calls.append(args)
            return inner(*args)

        model.layers[1].forward = wrapper  # type: ignore[method-assign]
        handle.remove()
        assert model.layers[1].forward is wrapper
        assert_same_bits(model(x), expected)
        assert len(calls) == 1

    def test_holds_no_slots(self) -> None:
        import weakref

        model = Stack(3).eval()
        handle = headrace.offload(model, all_layers(1))
        slot = weakref.ref(handle._session.prefetcher.slot_memory(0))
        model(rows())
        handle.remove()
        assert slot() is None
        assert handle.stats().bytes_moved > 0


@pytest.mark.slow
@promoted
def test_a_weight_is_read_while_another_thread_runs_its_module() -> None:
    """The slot is that thread's: a view of it would outlive the run, and a product would read it behind the run."""
    inside, may_pause = threading.Event(), threading.Event()

    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if may_pause.is_set():
                may_pause.clear()
                inside.set()
                time.sleep(0.3)
            return super().forward(x)

    class Shows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = Slow(DIM, DIM)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            half = self.lin.weight.chunk(2)[1]
            return self.lin(x), half

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Shows(), Shows()

        def forward(self, x: torch.Tensor) -> Any:
            x, half = self.first(x)
            return *self.second(x), half

    model, x = Both().eval(), rows()
    with torch.no_grad():
        expected = copy.deepcopy(model(x))
    budget = sum(p.nbytes for p in model.parameters()) - 1  # no room to promote a weight
    with headrace.offload(model, headrace.Budget(budget, ["weight"])) as handle:
        found: list[Any] = []

        def work() -> None:
            with torch.no_grad():
                found.append(model(x))

        threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
        may_pause.set()
        threads[0].start()
        assert inside.wait(5)
        threads[1].start()
        for thread in threads:
            thread.join(10)
        assert handle.stats().bytes_moved > 0
        assert_same_bits(found, [expected, expected])


def test_views_that_another_thread_soon_drops_are_waited_for() -> None:
    """As those of a thread that saves the model while another one serves it."""
    inside, taken = threading.Event(), threading.Event()

    class Waits(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            taken.wait(5)
            return super().forward(x)

    taken.set()
    model, x, expected = expecting(nn.Sequential(Waits(DIM, DIM), nn.Linear(DIM, DIM)))
    weight = model[0].weight.clone()
    found: list[torch.Tensor] = []

    def serve() -> None:
        with torch.no_grad():
            found.append(model(x))

    with headrace.offload(model, headrace.Prefetch(1, 1, 1, params=["weight"])) as handle:
        inside.clear()
        taken.clear()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert inside.wait(5)
        view = model[0].weight.detach()
        taken.set()
        time.sleep(0.1)
        assert torch.equal(view, weight), "the slot stays"
        del view
        thread.join(5)
        assert handle.stats().bytes_moved > 0
    assert_same_bits(found, [expected])


def test_a_forward_ended_by_an_interrupt_holds_up_no_other_thread() -> None:
    model, x, expected = expecting(Stack(4))
    with headrace.offload(model, all_layers(1)):
        for where in (model.layers[1].linear, model.layers[2]):
            hook = where.register_forward_pre_hook(raising(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                model(x)
            hook.remove()
            found: list[torch.Tensor] = []
            thread = threading.Thread(target=lambda found=found: found.append(model(x)), daemon=True)
            with torch.no_grad():
                thread.start()
            thread.join(5)
            assert not thread.is_alive()
            assert_same_bits(found[0].detach(), expected)
            assert_same_bits(model(x), expected)
