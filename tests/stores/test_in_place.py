"""The promise: a CPU reads experts and tables where they lie in the files, with the bits of a resident model.

16-bit types at any multiple of the element size, wider ones at multiples of 16 bytes; fused or one by one in the files.
What cannot be read so is planned another way, and a rule or policy that asks for it is refused with the reason.
"""

from __future__ import annotations

import copy
import json
import os
import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import headrace
from checkpoints import assert_same_tensors, make, resident, run
from checks import mappings
from headrace.adapters.transformers import load
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.checkpoint.weight_map import FilePart, TensorSource
from headrace.config import UVA, Budget, Rules
from headrace.errors import (
    CheckpointError,
    HeadraceWarning,
    OptionError,
    RuleError,
    SelectionError,
    StateError,
    TransferError,
)
from headrace.memory.pages import whole_pages
from headrace.plan_model import plan_model
from headrace.planning import context as planning_context
from headrace.planning.request import PlanRequest
from headrace.stores import product_bits
from headrace.stores.checkpoint_files import DiskStore
from headrace.stores.product_bits import same_bits_at
from headrace.testing import assert_same_bits
from models import MoE, save

PAGE = whole_pages(1)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
EXPERTS = UVA(params=["experts"], mode="disk")
TOKENS = torch.arange(9)


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def start_data_at(file: Path, start: int) -> None:
    """Rewrite a safetensors file such that its data starts ``start`` bytes into a page; a header may end in spaces."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end] + b" " * ((start - end) % PAGE)
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])


def step_of(dtype: torch.dtype) -> int:
    """Where tensors that are read in place may start, from multiples of 64 bytes on."""
    return dtype.itemsize if dtype.itemsize < 4 else 16


def mapping_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The file, and the KiB of each field of smaps (proc(5)), of the mapping that a tensor starts in."""
    for part in mappings():
        low, high = (int(end, 16) for end in part.split(" ")[0].split("-"))
        if low <= tensor.data_ptr() < high:
            return {"file": part.split("\n")[0].split()[-1], **dict(re.findall(r"^(\w+):\s+(\d+) kB", part, re.M))}
    raise AssertionError("not mapped")


def from_files(model: nn.Module, folder: Path, policy: Any) -> tuple[Any, headrace.Handle]:
    """The same model from ``meta``, offloaded over ``folder``."""
    with torch.device("meta"):
        other = MoE(len(model.layers), model.embed.embedding_dim).to(model.embed.weight.dtype).eval()
    return other, headrace.offload(other, policy, checkpoint=folder)


class TestOffsets:
    @pytest.mark.slow
    @DTYPES
    def test_same_bits_at_every_offset_that_is_planned(
        self, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(product_bits, "_TRIED_ROWS", (1,))  # this tries them itself
        source = MoE(1).to(dtype).eval()
        expected = source(TOKENS)
        file = save(source, tmp_path) / "model.safetensors"
        rules = Rules([("experts", "uva"), ("re:.*shared_expert.weight", "uva"), ("embed", "uva")], mode="disk")
        first = min(tensor.offset for tensor in Checkpoint.open(tmp_path).tensors.values())
        for offset in range(-first % 16, 64, step_of(dtype)):
            start_data_at(file, first + offset)
            model, handle = from_files(source, tmp_path, rules)
            with handle:
                weights = [layer.mlp.experts.up_proj for layer in model.layers]
                assert {weight.data_ptr() % dtype.itemsize for weight in weights} == {0}
                assert (
                    weights[0].data_ptr() % PAGE
                    == Checkpoint.open(tmp_path).tensors["layers.0.mlp.experts.up_proj"].offset % PAGE
                )
                assert mapping_of(weights[0])["file"] == str(file)
                assert torch.equal(model(TOKENS), expected)
                assert handle.stats().mechanism_bytes["uva"] == handle.plan.uva_bytes > 0
                assert handle.plan.uva.keys() >= {"embed.weight", "layers.0.mlp.shared_expert.weight"}

    @pytest.mark.parametrize(
        ("start", "why"),
        [(50, "at no multiple of the 4 bytes of an element"), (8, "starts .* bytes after a multiple of 64")],
    )
    def test_between_elements_or_16_bytes_it_is_planned_another_way(self, start: int, why: str, tmp_path: Path) -> None:
        """Products with wide types between 16 bytes round differently on some CPUs (MKL on AMD's)."""
        source = MoE(4).eval()
        start_data_at(save(source, tmp_path) / "model.safetensors", start)
        model, handle = from_files(source, tmp_path, Budget("60KiB", ["ALL_MODEL_PARAMS"]))
        with handle:
            assert not handle.plan.uva
            assert torch.equal(model(TOKENS), source(TOKENS))
            assert handle.stats().bytes_moved > 0
        with pytest.raises(SelectionError, match=rf"8 tensors \(.*experts.* {why}"):
            from_files(source, tmp_path, EXPERTS)

    @pytest.mark.parametrize("strict", [True, False])
    def test_a_table_after_an_export_that_is_refused(
        self, strict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While torch traces, the model holds another tensor in the table's place."""
        model = nn.Sequential(nn.Embedding(64, 96), nn.Linear(96, 96)).eval()
        twin, tokens = copy.deepcopy(model), torch.tensor([5])
        start_data_at(save(model, tmp_path) / "model.safetensors", 8)
        monkeypatch.setattr(product_bits, "same_bits_at", lambda *_: False)
        with (
            torch.no_grad(),
            headrace.offload(model, Rules([("0", "uva")], mode="disk"), checkpoint=tmp_path) as handle,
        ):
            with pytest.raises(StateError, match=r"torch\.export would record"):
                torch.export.export(model, (tokens,), strict=strict)
            for _ in range(2):
                assert_same_bits(model(tokens), twin(tokens))
            assert set(handle.plan.uva) == {"0.weight"}

    @pytest.mark.slow
    @pytest.mark.parametrize("functional", [False, True], ids=["rows", "a product"])
    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    @pytest.mark.parametrize("units", [False, True], ids=["alone", "beside units"])
    def test_a_table_is_used_in_a_product(
        self, functional: bool, compiled: bool, units: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its rows are the same wherever it lies; a product with it has to read it elsewhere."""

        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.lin = nn.Embedding(64, 96), nn.Linear(96, 96)

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                hidden = torch.tanh(self.lin(self.embed(tokens)))
                return F.linear(hidden, self.embed.weight) if functional else hidden

        model = Tied().eval()
        twin, tokens = copy.deepcopy(model), torch.tensor([5])
        start_data_at(save(model, tmp_path) / "model.safetensors", 8)
        monkeypatch.setattr(product_bits, "same_bits_at", lambda *_: False)  # as on the CPUs that round otherwise
        rules = Rules([("embed", "uva"), ("lin", "prefetch" if units else "resident")], mode="disk")
        with torch.no_grad(), headrace.offload(model, rules, checkpoint=tmp_path) as handle:
            if not compiled:
                with pytest.warns(HeadraceWarning, match="resident from now on") if functional else nullcontext():
                    assert_same_bits(model(tokens), twin(tokens))
                assert_same_bits([model(tokens), dict(model.state_dict())], [twin(tokens), dict(twin.state_dict())])
                assert ("embed.weight" in handle.plan.uva) is not functional
                assert (handle.stats().bytes_moved > 0) is units
            elif functional:
                with pytest.raises(RuntimeError, match=r"embed\.weight is used by .* keep it resident"):
                    torch.compile(model, backend="eager")(tokens)
            else:
                assert_same_bits(torch.compile(model, backend="eager")(tokens), twin(tokens))
                assert "embed.weight" in handle.plan.uva
        assert_same_bits(dict(model.state_dict()), dict(twin.state_dict()))
        assert_same_bits(model(tokens), twin(tokens))

    def test_only_routed_experts_are_read(self, tmp_path: Path) -> None:
        source = MoE(1, 512).eval()
        start_data_at(save(source, tmp_path) / "model.safetensors", 0)
        model, handle = from_files(source, tmp_path, EXPERTS)
        with handle:
            weight = model.layers[0].mlp.experts.up_proj
            assert torch.equal(model(TOKENS[:1]), source(TOKENS[:1]))
            # One expert of four, and what the kernel maps around a page that is touched.
            assert weight.nbytes == 4 * 2**20
            assert 2**10 <= int(mapping_of(weight)["Rss"]) < 2 * 2**10

    def test_a_file_that_is_written_to_ends_it(self, tmp_path: Path) -> None:
        source = MoE(2).eval()
        start_data_at(save(source, tmp_path) / "model.safetensors", 0)
        model, handle = from_files(source, tmp_path, EXPERTS)
        model(TOKENS)
        with (tmp_path / "model.safetensors").open("ab") as file:
            file.write(b"more")
        with pytest.raises(TransferError, match=r"written to while in use"):
            model(TOKENS)
        del handle

    @pytest.mark.parametrize(
        ("layer", "x"),
        [
            (nn.Embedding(5000, 16), TOKENS),
            (nn.TransformerEncoderLayer(64, 4, batch_first=True), torch.ones(1, 3, 64)),  # calls no module in it
        ],
        ids=["embedding", "encoder"],
    )
    def test_a_file_that_is_cut_ends_a_module_that_runs_alone(
        self, layer: nn.Module, x: torch.Tensor, tmp_path: Path
    ) -> None:
        """A read of a page that the file has no longer would end the program."""
        source = nn.Sequential(copy.deepcopy(layer), nn.Identity()).eval()
        start_data_at(save(source, tmp_path) / "model.safetensors", 0)
        handle = headrace.offload(source, Rules([("0", "uva")], mode="disk"), checkpoint=tmp_path)
        with torch.no_grad():
            source[0](x)
            os.truncate(tmp_path / "model.safetensors", 2000)
            with pytest.raises(TransferError, match=r"written to while in use"):
                source[0](x)
        del handle

    @pytest.mark.parametrize("is_root", [False, True])
    @pytest.mark.parametrize("beside_units", [False, True])
    def test_encoder_layers_keep_their_fast_path(self, is_root: bool, beside_units: bool, tmp_path: Path) -> None:
        """torch leaves it for hooks, and rounds otherwise: under autocast of a CPU to another dtype."""
        layer = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True).eval()
        source, x = layer if is_root else nn.Sequential(layer), torch.rand(1, 3, 64)
        start_data_at(save(source, tmp_path) / "model.safetensors", 0)
        rules = Rules(
            [*([("re:.*linear1.bias", "prefetch")] if beside_units else []), ("re:.*weight", "uva")], mode="disk"
        )
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("ignore", HeadraceWarning)  # the fast path reads what is in units within the layer
            expected = source(x)
            with headrace.offload(source, rules, checkpoint=tmp_path) as handle:
                assert_same_bits(source(x), expected)
                assert handle.stats().mechanism_bytes["uva"] > 0
                assert bool(handle.plan.units) == beside_units
            assert_same_bits(source(x), expected)
        assert expected.dtype == torch.bfloat16
        assert not any("forward" in vars(module) for module in source.modules())


class TestKernels:
    """What reads a weight in place may not round differently from what reads it aligned."""

    @DTYPES
    @pytest.mark.parametrize("shape", [(4, 96, 64), (3, 30, 10), (100, 64), (700,)], ids=str)
    def test_tried_on_this_machine(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Equal on every x86 CPU so far; on one where it is not, this says so before a user finds out."""
        assert all(same_bits_at(offset, shape, dtype) for offset in range(0, 64, step_of(dtype)))

    def test_what_was_not_tried_is_not_said_to_be_equal(self) -> None:
        assert not same_bits_at(8, (4, 4, 3, 3), torch.float32)
        assert not same_bits_at(8, (4, 4), torch.int8)
        assert same_bits_at(16, (2, 4, 4), torch.float64)  # which has no grouped products

    def test_other_bits_are_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = product_bits._tried_products

        def rounded_by_address(weight: torch.Tensor, apart: int) -> list[torch.Tensor]:
            return [product + weight.data_ptr() % 64 * 1e-3 for product in plain(weight, apart)]

        monkeypatch.setattr(product_bits, "_tried_products", rounded_by_address)
        assert not same_bits_at.__wrapped__(8, (6, 8), torch.float32)
        assert same_bits_at.__wrapped__(0, (6, 8), torch.float32)

    def test_vectors_have_products_of_their_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in spectral_norm: what a dot product gives where a vector lies is tried, or the vector is copied."""

        class Normed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.vector = nn.Parameter(torch.randn(101))
                self.linear = nn.Linear(101, 101)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.linear(x) / torch.dot(x[0], self.vector)

        source, x = Normed().eval(), torch.randn(1, 101)
        file = save(source, tmp_path) / "model.safetensors"
        tensors = Checkpoint.open(file).tensors
        before = tensors["vector"].offset - min(tensor.offset for tensor in tensors.values())
        rules = Rules([("vector", "uva"), ("linear", "prefetch")], prefetch_step=1, mode="disk")
        start_data_at(file, 64 + 8 - before)
        with pytest.raises(RuleError, match=r"8 bytes after a multiple of 64 .* 1 dimensions .*prefetch would do"):
            headrace.offload(copy.deepcopy(source), rules, checkpoint=file)
        start_data_at(file, 64 + 16 - before)
        with headrace.offload(model := copy.deepcopy(source), rules, checkpoint=file) as handle:
            assert torch.equal(model(x), source(x))
            assert handle.stats().mechanism_bytes["uva"] == 404
        dot = torch.dot
        monkeypatch.setattr(torch, "dot", lambda a, b: dot(a, b) + b.data_ptr() % 64)  # as CPUs that round otherwise
        assert not same_bits_at.__wrapped__(16, (101,), torch.float32)
        monkeypatch.setattr(product_bits, "same_bits_at", same_bits_at.__wrapped__)
        with pytest.raises(OptionError, match="vector starts 16 bytes after a multiple of 64"):
            headrace.offload(copy.deepcopy(source), rules, checkpoint=file)

    def test_they_refuse_it_before_anything_runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(product_bits, "same_bits_at", lambda *_: False)
        source = MoE(1).eval()
        start_data_at(save(source, tmp_path) / "model.safetensors", 16)
        with pytest.raises(OptionError, match=r"bytes after a multiple of 64 .*--offload-rule 'layers.*=prefetch'"):
            from_files(source, tmp_path, EXPERTS)
        start_data_at(tmp_path / "model.safetensors", 64)
        model, handle = from_files(source, tmp_path, EXPERTS)
        with handle:
            assert torch.equal(model(TOKENS), source(TOKENS))


# -- transformers: experts one by one in the files, one tensor in the model --------------------------------------------


def folder_of(tmp_path: Path, layout: str, dtype: torch.dtype = torch.float32, size: int = 64) -> Path:
    """A mixture of experts of ``size`` x 64 each."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128}
    model = make(
        "Qwen3MoeForCausalLM", dtype, **shape, **heads, num_experts=12, num_experts_per_tok=2,
        moe_intermediate_size=size,
    )  # fmt: skip
    model.save_pretrained(tmp_path, save_original_format=layout == "one by one")
    return tmp_path


class TestExpertsOfTransformers:
    @pytest.mark.slow
    @DTYPES
    @pytest.mark.parametrize("layout", ["one by one", "fused"])
    def test_a_budget_reads_them_in_place(self, layout: str, dtype: torch.dtype, tmp_path: Path) -> None:
        folder = folder_of(tmp_path, layout, dtype)
        in_files = [name for name in Checkpoint.open(folder).tensors if ".experts." in name]
        assert len(in_files) == (2 * 12 * 3 if layout == "one by one" else 2 * 2)
        for offset in (0, 48 + step_of(dtype) % 16):
            start_data_at(folder / "model.safetensors", offset)
            reference = resident(folder)
            expected = run(reference)
            model, handle = load(folder, Budget("400KiB"))
            fused = [name for name in handle.plan.uva if ".experts." in name]
            assert len(fused) == 4
            assert handle.plan.uva_bytes > 0.7 * handle.plan.weight_bytes
            assert model.get_parameter(fused[0]).data_ptr() % 64 in range(0, 64, step_of(dtype))
            assert mapping_of(model.get_parameter(fused[0]))["file"].endswith("model.safetensors")
            for _ in range(2):
                assert torch.equal(run(model), expected)
            assert handle.stats().store_bytes.get("host", 0) == (
                # The pieces of a tensor that are no neighbours; gate and up of an expert are.
                4 * 11 * PAGE if layout == "one by one" and model.get_parameter(fused[0]).data_ptr() % PAGE else 0
            )
            handle.remove()
            assert_same_tensors(model, reference)
            assert torch.equal(run(model), expected)

    def test_pieces_that_are_no_whole_pages_are_copied(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path, "one by one", size=24)
        budget = Budget("400KiB")
        why = r"4 tensors \(.*\) of experts cannot be read in place, .* lies in 12 pieces in the checkpoint"
        assert re.search(why, "\n".join(plan_model(PlanRequest(folder, budget, device="cpu")).prediction.notes))
        model, handle = load(folder, budget)
        with handle:
            assert not any(".experts." in name for name in handle.plan.uva)
            assert torch.equal(run(model), run(resident(folder)))
            assert handle.stats().bytes_moved > 0
        message = "pieces in the checkpoint, which do not meet at whole pages, cannot be read"
        with pytest.raises(RuleError, match=message):
            load(folder, Rules([("experts", "uva")], mode="disk"))

    def test_what_joining_takes_is_said_before(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path, "one by one")
        start_data_at(folder / "model.safetensors", 16)
        prediction = plan_model(PlanRequest(folder, EXPERTS, device="cpu")).prediction
        assert len(prediction.notes) == 1
        assert "4 tensors" in prediction.notes[0]
        assert "loading maps and joins them" in prediction.notes[0]
        assert json.loads(json.dumps(prediction.to_json()))["notes"] == list(prediction.notes)

    def test_layers_that_differ_keep_what_they_can(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As when a process may have no more mappings, or one layer's experts lie in two files."""
        monkeypatch.setattr(planning_context, "_MAX_MAPPINGS", 30)
        folder = folder_of(tmp_path, "one by one")
        start_data_at(folder / "model.safetensors", 0)
        model, handle = load(folder, Budget("1MiB"))
        with handle:
            mechanisms = {handle.plan.mechanism_of(f"model.layers.{i}.mlp.experts.gate_up_proj") for i in range(2)}
            assert mechanisms == {"uva", "prefetch"} or mechanisms == {"uva", "resident"}
            assert torch.equal(run(model), run(resident(folder)))
            assert sum(".layers.0." in name for name in handle.plan.uva) == 2


def test_only_parts_that_meet_at_pages_are_mapped(tmp_path: Path) -> None:
    save(MoE(2), tmp_path)
    tensors = Checkpoint.open(tmp_path).tensors
    whole, odd = tensors["layers.0.mlp.experts.up_proj"], tensors["layers.0.mlp.gate.bias"]
    assert whole.num_bytes % PAGE == 0 != odd.num_bytes % PAGE
    source = TensorSource((FilePart(odd), FilePart(whole, odd.num_bytes)), (1,), torch.float32)
    store = DiskStore({"made": source})
    with pytest.raises(CheckpointError, match="made lies in 2 pieces in the checkpoint, which do not meet"):
        store.in_place("made")
    store.close()


def test_what_a_policy_cannot_read_in_place_stays_with_a_warning(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "one by one", size=24)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HeadraceWarning)
        _, handle = load(folder, UVA(params=["experts", "embed_tokens"], mode="disk"))
    with handle:
        assert set(handle.plan.uva) == {"model.embed_tokens.weight"}
    assert any("cannot be read in place" in str(entry.message) for entry in caught)


def test_a_convolution_is_not_taken_for_experts(tmp_path: Path) -> None:
    """Its weight [channels, ., .] has as many dimensions; where it is not aligned, nothing reads it in place."""
    model = nn.Sequential(*(nn.Sequential(nn.Conv1d(64, 64, 9), nn.ReLU()) for _ in range(3))).eval()
    save(model, tmp_path)
    x = torch.randn(1, 64, 40)
    with torch.no_grad():
        expected = model(x)
    with headrace.offload(model, "300KiB", checkpoint=tmp_path) as handle, torch.no_grad():
        assert not handle.plan.uva
        assert torch.equal(model(x), expected)
        assert handle.stats().bytes_moved > 0
    start_data_at(tmp_path / "model.safetensors", 8)
    with pytest.raises(RuleError, match=r"starts \d+ bytes after a multiple of 64 .* may round differently"):
        headrace.offload(model, Rules([("0.0.weight", "uva")], mode="disk"), checkpoint=tmp_path)
