"""The promise: ties, aliases, strides, buffers and subclasses survive (contract 7).

While offloaded, what was one tensor is one tensor and what was a view looks at the same bytes; after ``remove()`` every
object is the one it was, and in mode ``cpu`` so is its memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import headrace
from headrace import UVA, Prefetch
from headrace.testing import assert_moved, assert_same_bits
from models import DIM, MoE, Odd, OddStack, Scaled, ScaledStack, Stack, all_layers, on_meta, rows, save

pytestmark = pytest.mark.usefixtures("no_grad")


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of the model that hangs anywhere, attributes and inner tensors included; not the marks of ours."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        held = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and not name.startswith("_headrace_"):
                found[f"{prefix}.{name}"] = value
                if isinstance(value, Scaled):
                    found[f"{prefix}.{name}:data"], found[f"{prefix}.{name}:scale"] = value.data_int8, value.scale
    return found


def signature(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    """All there is to know about them but their values."""
    return {
        name: (id(t), type(t), t.dtype, t.shape, t.stride(), t.requires_grad, t.is_leaf, *_memory(t))
        for name, t in tensors.items()
    }


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    if isinstance(tensor, Scaled):
        return ()
    return tensor.data_ptr(), tensor.storage_offset(), tensor.untyped_storage().nbytes(), tensor._is_view()


MODELS = {
    "odd": (lambda: OddStack(4), rows()),
    "tied": (lambda: MoE(4), torch.arange(9)),
    "subclass": (lambda: ScaledStack(4), rows()),
}


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("policy", [all_layers(2), all_layers(1, group_size=2), UVA(params=["layers"])], ids=repr)
def test_everything_is_as_it_was_after_remove(build: str, policy: Prefetch | UVA) -> None:
    make, x = MODELS[build]
    model = make().eval()
    expected = model(x)
    before = signature(tensors_of(model))
    values = {name: t.clone() for name, t in tensors_of(model).items()}
    handle = headrace.offload(model, policy)
    for forwards in (1, 2):
        assert_same_bits(model(x), expected)
        if isinstance(policy, Prefetch):
            assert_moved(handle, forwards)
        else:
            assert handle.stats().mechanism_bytes["uva"] > 0
    handle.remove()
    assert signature(tensors_of(model)) == before
    for name, tensor in tensors_of(model).items():
        assert_same_bits(tensor.clone(), values[name], name)


def test_views_keep_their_offsets_where_other_memory_comes_back() -> None:
    """With a code the memory that they came with is gone. Of a large one only what they view is there again."""
    model, wide = nn.Sequential(*(nn.Linear(256, 256) for _ in range(5))).eval().bfloat16(), 256 * 256

    def view(before: int, size: int) -> torch.Tensor:
        return torch.randn(before + size).bfloat16()[before:]

    shared = view(5, wide + 256)
    model[1].weight = nn.Parameter(shared[:wide].view(256, 256))
    model[1].other = nn.Parameter(shared[256:].view(256, 256))
    del shared
    model[2].weight = nn.Parameter(view(2 * wide, wide).view(256, 256))
    model[3].weight = nn.Parameter(view(768, wide).view(256, 256))
    x = rows(256).bfloat16()
    expected, values = model(x), {name: p.clone() for name, p in model.named_parameters()}
    offsets = {name: p.storage_offset() for name, p in model.named_parameters()}
    handle = headrace.offload(model, Prefetch(1, 1, 2, codec="exp3"))
    assert_same_bits(model(x), expected)
    assert handle.stats().bytes_moved > 0
    assert handle.plan.coded_units
    handle.remove()
    offsets["2.weight"] = 0
    assert {name: p.storage_offset() for name, p in model.named_parameters()} == offsets
    assert model[1].other.untyped_storage().data_ptr() == model[1].weight.untyped_storage().data_ptr()
    assert_same_bits(dict(model.named_parameters()), values)
    assert_same_bits(model(x), expected)


def test_ties_and_views_hold_while_offloaded() -> None:
    model = OddStack(4).eval()
    layer = model.layers[1]
    assert isinstance(layer, Odd)
    objects = {name: id(tensor) for name, tensor in tensors_of(model).items()}
    looks = []

    def look(*_: object) -> None:
        assert {name: id(tensor) for name, tensor in tensors_of(model).items()} == objects
        assert layer.same is layer.weight
        assert layer.cached_t.data_ptr() == layer.weight.data_ptr()
        assert layer.cached_t.stride() == (1, DIM)
        assert layer.cached_row.data_ptr() == layer.weight.data_ptr() + 3 * DIM * 4
        unit = handle.plan.units[1]
        memory = handle._session.prefetcher.slot_memory(1)
        for tensor in (layer.weight, layer.strided, layer.fp8, layer.mask, layer.table):
            offset = tensor.data_ptr() - memory.data_ptr()
            assert offset in {entry.offset for entry in unit.entries}
            assert tensor.data_ptr() % 64 == 0
        looks.append(unit.index)

    layer.register_forward_pre_hook(look)
    with headrace.offload(model, all_layers(2)) as handle:
        model(rows())
    assert looks == [1]


def test_tensors_in_slots_share_memory_but_no_storage_object() -> None:
    """A compiler that saw the sharing would rebuild them from one base, and its cache would hand that code to a plan
    with other slots (see ``runtime/hooks.py``)."""
    model = OddStack(5).eval()
    with headrace.offload(model, all_layers(2)):
        tensors = [t for name, t in tensors_of(model).items() if t.numel() and not name.endswith(".same")]
        assert len({t.untyped_storage()._cdata for t in tensors}) == len(tensors)
        addresses: list[int] = []
        for layer in (model.layers[0], model.layers[2]):
            layer.register_forward_pre_hook(lambda layer, *_: addresses.append(layer.weight.data_ptr()))
        model(rows())
        assert len(addresses) == 2
        assert len(set(addresses)) == 1


@pytest.mark.parametrize("dtype", [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float16,
    torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
])  # fmt: skip
@pytest.mark.parametrize("mode", ["cpu", "disk"])
def test_every_dtype_every_bit(dtype: torch.dtype, mode: str, tmp_path: Path) -> None:
    """All byte patterns (NaNs with payloads, negative zeros), and trap 3: nothing asks for the range of an integer."""
    pattern = torch.arange(4096, dtype=torch.int64).mul(73).to(torch.uint8)
    value = (pattern % 2).view(torch.bool) if dtype is torch.bool else pattern.view(dtype)

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("value", value.clone())

        def forward(self) -> torch.Tensor:
            return self.value.clone()

    model = nn.Module()
    model.layers = nn.ModuleList(Reader() for _ in range(3))
    model.forward = lambda: [layer() for layer in model.layers]
    checkpoint = save(model, tmp_path) if mode == "disk" else None
    with headrace.offload(model.eval(), all_layers(1, mode), checkpoint=checkpoint) as handle:
        for forwards in (1, 2):
            for found in model():
                assert found.dtype == dtype
                assert_same_bits(found, value)
            assert_moved(handle, forwards)


@pytest.mark.parametrize("flip", ["conj", "neg", "both"])
def test_lazy_conjugates_and_negatives(flip: str) -> None:
    value = torch.randn(8, 8, dtype=torch.complex64)
    value = value.conj() if flip in ("conj", "both") else value
    if flip in ("neg", "both"):
        value = torch._neg_view(value)
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Identity() for _ in range(3))
    for layer in model.layers:
        layer.register_buffer("value", value.clone().conj() if flip == "conj" else value)
    expected = model.layers[1].value.resolve_conj().resolve_neg().clone()
    with headrace.offload(model.eval(), UVA(params=["layers"])) as handle:
        assert_same_bits(model.layers[1].value, expected)
        assert handle.plan.uva_bytes > 0
    assert_same_bits(model.layers[1].value, expected)


class TestMeta:
    """Tensors on meta cannot take data: they are replaced in every place that holds them."""

    @pytest.mark.parametrize("mode", ["cpu", "disk"])
    def test_ties(self, mode: str, tmp_path: Path) -> None:
        source = MoE(3).eval()
        model = on_meta(MoE, 3)
        with headrace.offload(model, all_layers(2, mode), checkpoint=save(source, tmp_path)) as handle:
            assert model.head.weight is model.embed.weight
            assert isinstance(model.head.weight, nn.Parameter)
            assert_same_bits(model(torch.arange(9)), source(torch.arange(9)))
            assert_moved(handle, 1)
        assert model.head.weight is model.embed.weight
        for name, tensor in model.state_dict().items():
            assert_same_bits(tensor, source.state_dict()[name], name)

    def test_flags_survive(self, tmp_path: Path) -> None:
        source = Stack(3)
        with torch.device("meta"):
            model = Stack(3)
        model.layers[1].linear.weight.requires_grad_(False)
        with headrace.offload(model.eval(), all_layers(), checkpoint=save(source, tmp_path)):
            flags = {name: p.requires_grad for name, p in model.named_parameters()}
        assert {name for name, flag in flags.items() if not flag} == {"layers.1.linear.weight"}
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())

    def test_recurrent_layers_that_keep_a_list_of_their_weights(self, tmp_path: Path) -> None:
        source = nn.LSTM(DIM, DIM, 2).eval()
        with torch.device("meta"):
            model = nn.LSTM(DIM, DIM, 2).eval()
        policy = Prefetch(params=["ALL_MODEL_PARAMS"], mode="disk")
        with headrace.offload(model, policy, checkpoint=save(source, tmp_path)) as handle:
            assert_same_bits(model(rows()), source(rows()))
            assert handle.stats().bytes_moved > 0


class TestStateDict:
    @pytest.mark.parametrize("build", MODELS)
    @pytest.mark.parametrize("policy", [all_layers(2), UVA(params=["layers"])], ids=["prefetch", "uva"])
    def test_gives_the_weights(self, build: str, policy: Prefetch | UVA) -> None:
        make, x = MODELS[build]
        model = make().eval()
        expected = {name: t.clone() for name, t in model.state_dict().items()}
        kinds = {name: type(t) for name, t in model.state_dict().items()}
        with headrace.offload(model, policy):
            for _ in range(2):
                state = model.state_dict()
                assert list(state) == list(expected)
                for name, tensor in state.items():
                    assert type(tensor) is kinds[name]
                    assert_same_bits(tensor.clone(), expected[name], name)
                model(x)

    def test_of_a_part_with_a_prefix_into_a_plain_dict(self) -> None:
        model = Stack(4).eval()
        expected = model.layers[2].state_dict(prefix="here.")
        expected = {name: t.clone() for name, t in expected.items()}
        with headrace.offload(model, all_layers(1)):
            found: dict[str, torch.Tensor] = {}
            model.layers[2].state_dict(destination=found, prefix="here.")
            assert_same_bits(found, expected)

    @pytest.mark.parametrize("mode", ["cpu", "disk"])
    def test_ties_stay_ties(self, mode: str, tmp_path: Path) -> None:
        model = OddStack(3).eval()
        folder = save(nn.ModuleDict({"layers": model.layers}), tmp_path)
        policy = Prefetch(params=["layers.0.weight", "layers.1.weight"], mode=mode)
        if mode == "disk":
            model.layers[2].weight.data.add_(1)  # not offloaded, so it may differ
        with headrace.offload(model, policy, checkpoint=folder if mode == "disk" else None):
            state = model.state_dict()
            assert state["layers.0.weight"].data_ptr() == state["layers.0.same"].data_ptr()
            assert state["layers.0.weight"].data_ptr() != state["layers.1.weight"].data_ptr()

    def test_costs_no_memory_in_mode_cpu(self) -> None:
        model = Stack(4).eval()
        address = model.layers[1].linear.weight.data_ptr()
        with headrace.offload(model, all_layers(1)):
            assert model.state_dict()["layers.1.linear.weight"].data_ptr() == address

    def test_can_be_saved_and_loaded_elsewhere(self, tmp_path: Path) -> None:
        model, other = Stack(4).eval(), Stack(4).eval()
        with headrace.offload(model, all_layers(2)):
            save(model, tmp_path)
            other.load_state_dict(model.state_dict())
            assert_same_bits(other(rows()), model(rows()))
        assert_same_bits(other(rows()), model(rows()))
