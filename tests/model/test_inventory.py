"""The promise: one walk finds every tensor under every name, and what shares memory stays together (contract 7)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import headrace
from headrace.errors import OptionError, StateError
from headrace.model.inventory import StorageInfo, TensorInfo, take_inventory
from models import DIM, MoE, OddStack, Scaled, ScaledStack, Stack


def bare(**tensors: torch.Tensor) -> nn.Module:
    """A module with these parameters (floats) and buffers (the rest)."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            module.register_parameter(name, nn.Parameter(tensor))
        else:
            module.register_buffer(name, tensor)
    return module


def only_storage(model: nn.Module) -> StorageInfo:
    (storage,) = take_inventory(model).storages
    return storage


def tensor_named(storage: StorageInfo, name: str) -> TensorInfo:
    return next(t for t in storage.tensors if name in [place.name for place in t.locations])


class TestCounts:
    def test_every_parameter_and_buffer_once(self) -> None:
        model = Stack(3)
        inventory = take_inventory(model)
        assert list(inventory.by_name) == [name for name, _ in model.named_parameters()]
        assert inventory.num_bytes == sum(p.nbytes for p in model.parameters())
        assert list(inventory.modules) == [name for name, _ in model.named_modules()]
        assert inventory.modules["layers.1.linear"] == "Linear"

    def test_order_is_the_models(self) -> None:
        names = [s.name for s in take_inventory(Stack(12)).storages if s.name.endswith("linear.weight")]
        assert names == [f"layers.{i}.linear.weight" for i in range(12)]

    def test_under_a_module(self) -> None:
        inventory = take_inventory(Stack(12))
        assert {s.name for s in inventory.under("layers.1")} == {
            f"layers.1.{n}" for n in ("norm.weight", "norm.bias", "linear.weight", "linear.bias")
        }
        assert inventory.children("layers") == [f"layers.{i}" for i in range(12)]
        assert len(inventory.under("")) == len(inventory.storages)

    def test_nothing(self) -> None:
        inventory = take_inventory(nn.Module())
        assert (inventory.storages, inventory.num_bytes, inventory.modules) == ((), 0, {"": "Module"})


class TestTies:
    def test_one_object_under_two_names(self) -> None:
        inventory = take_inventory(MoE())
        tied = inventory.by_name["head.weight"]
        assert tied is inventory.by_name["embed.weight"]
        assert tied.names == ("embed.weight", "head.weight")
        assert tied.modules == {"embed", "head"}
        assert tied.num_bytes == 50 * DIM * 4

    def test_a_tie_across_layers_belongs_to_neither(self) -> None:
        model = Stack(3)
        model.layers[2].linear.weight = model.layers[0].linear.weight
        inventory = take_inventory(model)
        assert "layers.0.linear.weight" not in {s.name for s in inventory.under("layers.0")}
        assert "layers.0.linear.weight" in {s.name for s in inventory.under("layers")}

    def test_a_module_under_two_names_is_walked_once(self) -> None:
        model = nn.Module()
        model.first = model.second = nn.Linear(4, 4)
        inventory = take_inventory(model)
        assert [s.names for s in inventory.storages] == [
            ("first.weight", "second.weight"),
            ("first.bias", "second.bias"),
        ]
        assert inventory.by_name["second.weight"].name == "first.weight"

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_two_tensors_on_one_storage(self, device: str) -> None:
        flat = torch.randn(24, device=device)
        storage = only_storage(bare(whole=flat, part=flat[6:18].view(3, 4)))
        assert storage.num_bytes == 96
        assert [(t.name, t.byte_offset, t.shape) for t in storage.tensors] == [
            ("whole", 0, (24,)),
            ("part", 24, (3, 4)),
        ]

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_neighbours_on_one_storage_are_separate(self, device: str) -> None:
        flat = torch.randn(24, device=device)
        inventory = take_inventory(bare(a=flat[:8], b=flat[8:20], c=flat[19:]))
        assert [(s.names, s.num_bytes) for s in inventory.storages] == [(("a",), 32), (("b", "c"), 64)]
        assert [t.byte_offset for t in inventory.by_name["b"].tensors] == [0, 44]

    def test_an_overlap_through_a_third_tensor_joins_two_neighbours(self) -> None:
        flat = torch.randn(24)
        storage = only_storage(bare(a=flat[:8], b=flat[8:16], bridge=flat[4:12]))
        assert set(storage.names) == {"a", "b", "bridge"}

    def test_views_keep_their_alignment(self) -> None:
        flat = torch.zeros(64, dtype=torch.uint8)
        model = nn.Module()
        model.register_buffer("odd", flat[3:20])
        model.register_buffer("floats", flat[4:20].view(torch.float32))
        storage = only_storage(model)
        assert [(t.name, t.byte_offset) for t in storage.tensors] == [("odd", 3), ("floats", 4)]
        assert storage.num_bytes == 20

    def test_interleaved_columns_overlap(self) -> None:
        table = torch.randn(6, 4)
        storage = only_storage(bare(left=table[:, :2], right=table[:, 2:]))
        assert storage.num_bytes == 96
        assert [t.extent_bytes for t in storage.tensors] == [88, 88]


class TestAttributes:
    def test_cached_views_belong_to_their_weight(self) -> None:
        inventory = take_inventory(OddStack(1))
        storage = inventory.by_name["layers.0.weight"]
        assert storage.names == ("layers.0.weight", "layers.0.same", "layers.0.cached_t", "layers.0.cached_row")
        assert [t.kind for t in storage.tensors] == ["parameter", "attribute", "attribute"]
        assert tensor_named(storage, "layers.0.cached_t").stride == (1, DIM)
        assert tensor_named(storage, "layers.0.cached_row").byte_offset == 3 * DIM * 4

    def test_unrelated_attributes_are_left_alone(self) -> None:
        model = bare(weight=torch.randn(4))
        model.scratch = torch.randn(1000)
        model.computed = model.weight.detach() * 2
        assert only_storage(model).names == ("weight",)

    def test_a_view_held_by_another_module_ties_the_two(self) -> None:
        model = Stack(2)
        model.head.peek = model.layers[0].linear.weight.data[0]
        storage = take_inventory(model).by_name["layers.0.linear.weight"]
        assert storage.modules == {"layers.0.linear", "head"}


class TestLayout:
    def test_strides_and_extent(self) -> None:
        transposed = tensor_named(only_storage(bare(w=torch.randn(6, 4).t())), "w")
        assert (transposed.shape, transposed.stride, transposed.is_contiguous) == ((4, 6), (1, 4), False)
        assert transposed.extent_bytes == 96
        every_other = tensor_named(only_storage(bare(w=torch.randn(10)[1::3])), "w")
        assert (every_other.stride, every_other.extent_bytes) == ((3,), 28)

    def test_expanded(self) -> None:
        storage = only_storage(bare(w=torch.randn(1, 4).expand(100, 4)))
        assert storage.num_bytes == 16

    def test_scalar(self) -> None:
        assert only_storage(bare(w=torch.tensor(3.0))).num_bytes == 4

    @pytest.mark.parametrize("dtype", [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.uint16, torch.float16, torch.bfloat16,
        torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    ])  # fmt: skip
    def test_dtypes(self, dtype: torch.dtype) -> None:
        storage = only_storage(bare(w=torch.zeros(3, 5).to(dtype)))
        assert storage.num_bytes == 15 * dtype.itemsize
        assert storage.tensors[0].dtype == dtype

    def test_meta(self) -> None:
        with torch.device("meta"):
            model = MoE()
        real = take_inventory(MoE())
        assert take_inventory(model).storages == real.storages


class TestRefusals:
    def test_lazy_modules(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
        with pytest.raises(StateError, match=r"^1\.weight: .* found UninitializedParameter.*run the model once"):
            headrace.offload(model, "1MiB")
        model(torch.ones(4))
        assert len(take_inventory(model).storages) == 4

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_torchscript(self) -> None:
        scripted = torch.jit.script(nn.Linear(4, 4))
        traced = torch.jit.trace(nn.Linear(4, 4), torch.ones(4))
        for inner in (scripted, traced):
            with pytest.raises(OptionError, match=r"module '1' \(.*Module\) is TorchScript: .*torch\.jit\.script or"):
                headrace.offload(nn.Sequential(nn.Linear(4, 4), inner), "1MiB")
            with pytest.raises(OptionError, match="the model"):
                headrace.offload(inner, "1MiB")


class TestOddities:
    def test_placeholders_never_move(self) -> None:
        inventory = take_inventory(OddStack(2))
        assert inventory.empty == ("layers.0.placeholder", "layers.1.placeholder")
        assert "layers.0.placeholder" not in inventory.by_name
        assert "layers.0.none" not in inventory.by_name

    def test_buffers_persistent_or_not(self) -> None:
        inventory = take_inventory(OddStack(1))
        for name, num_bytes in (("mask", DIM), ("table", DIM)):
            storage = inventory.by_name[f"layers.0.{name}"]
            assert (storage.num_bytes, storage.has_parameter) == (num_bytes, False)

    def test_subclass_is_its_inner_tensors(self) -> None:
        inventory = take_inventory(ScaledStack(2))
        assert list(inventory.by_name) == [
            f"layers.{i}.weight:{inner}" for i in range(2) for inner in ("data_int8", "scale")
        ]
        assert inventory.num_bytes == 2 * (DIM * DIM + DIM * 4)
        assert inventory.by_name["layers.0.weight:data_int8"].tensors[0].dtype == torch.int8
        assert inventory.by_name["layers.0.weight:scale"].has_parameter

    def test_inner_tensors_of_a_tied_subclass_are_tied(self) -> None:
        model = ScaledStack(2)
        model.layers[1].weight = model.layers[0].weight
        assert len(take_inventory(model).storages) == 2

    def test_a_subclass_inside_a_subclass(self) -> None:
        inner = Scaled(torch.ones(3, 3, dtype=torch.int8), torch.ones(3, 1))
        model = nn.Module()
        model.register_buffer("w", Scaled(torch.ones(3, 3, dtype=torch.int8), inner))
        assert list(take_inventory(model).by_name) == ["w:data_int8", "w:scale:data_int8", "w:scale:scale"]

    def test_lookup_tables(self) -> None:
        model = nn.Module()
        model.alone = nn.Embedding(5, 4)
        model.tied = nn.Embedding(5, 4)
        model.head = nn.Linear(4, 5, bias=False)
        model.head.weight = model.tied.weight
        by_name = take_inventory(model).by_name
        assert by_name["alone.weight"].is_lookup
        assert not by_name["tied.weight"].is_lookup

    def test_a_scalar_in_an_embedding_is_no_table(self) -> None:
        """As in Gemma's scaled embeddings, which no planner could divide into rows."""
        embed = nn.Embedding(5, 4)
        embed.register_buffer("scale", torch.tensor(2.0))
        by_name = take_inventory(embed).by_name
        assert by_name["weight"].is_lookup
        assert not by_name["scale"].is_lookup

    def test_buffers_that_are_not_persistent_are_not_saved(self) -> None:
        model = nn.Module()
        model.inner = bare(mask=torch.ones(4, dtype=torch.int64))
        model.inner.register_buffer("table", torch.ones(4), persistent=False)
        by_name = take_inventory(model).by_name
        assert {name: storage.is_saved for name, storage in by_name.items()} == {
            "inner.mask": True,
            "inner.table": False,
        }

    def test_tensors_without_plain_memory_are_left_alone(self) -> None:
        model = bare(w=torch.randn(4))
        model.register_buffer("sparse", torch.eye(4).to_sparse())
        model.register_buffer("csr", torch.eye(4).to_sparse_csr())
        model.register_buffer("nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
        model.attribute = torch.eye(4).to_sparse()
        inventory = take_inventory(model)
        assert list(inventory.by_name) == ["w"]

    def test_reads_and_changes_nothing(self) -> None:
        model = OddStack(2)
        before = {name: (id(t), t.data_ptr(), t._version) for name, t in model.state_dict(keep_vars=True).items()}
        take_inventory(model)
        after = {name: (id(t), t.data_ptr(), t._version) for name, t in model.state_dict(keep_vars=True).items()}
        assert after == before
