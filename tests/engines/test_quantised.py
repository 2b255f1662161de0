"""The promise: a quantised checkpoint is loaded, planned and offloaded as its own library runs it, or refused by name.

Checkpoints are made here in every format (`quantised_checkpoints`), and compared with what transformers makes of them,
resident. Formats whose package is missing are skipped, but for their plans, which need no package.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from inspect import unwrap
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.quantizers.base import HfQuantizer

import headrace
from headrace.adapters.self_managed import reject_self_managed_weights
from headrace.adapters.transformers import build_meta_model, load, quantised
from headrace.adapters.transformers.conversion import match
from headrace.adapters.transformers.opened_model import open_model
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.errors import CheckpointError, OptionError
from headrace.model.inventory import take_inventory
from quantised_checkpoints import FORMATS, MOVES, by_load, by_offload, logits, resident
from ranks import outcomes

pytestmark = pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")

REFUSED = {"bitsandbytes int8": "writes its weight in every forward"}
COMPRESSED = [name for name in FORMATS if name.startswith("compressed-tensors") and "dequ" not in name]
HAND_MADE = [name for name, form in FORMATS.items() if form.quantise is None]


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a format, written once."""
    if not hasattr(HfQuantizer, "get_new_dtype"):
        pytest.skip("quantised folders need transformers 5.23, and are refused before")
    folders: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in folders:
            folders[name] = FORMATS[name].write(tmp_path_factory.mktemp("quantised"))
        return folders[name]

    return save


def need(name: str) -> str:
    """Skip unless the package of the format is installed."""
    if not FORMATS[name].is_here:
        pytest.skip(f"{FORMATS[name].package} is not installed")
    return name


def with_config(folder: Path, place: Path, **changes: Any) -> Path:
    """The same files in ``place``, with another config.json."""
    config = json.loads((folder / "config.json").read_text())
    (place / "model.safetensors").symlink_to(folder / "model.safetensors")
    (place / "config.json").write_text(json.dumps(config | changes))
    return place


def with_tensors(folder: Path, place: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """The same configuration in ``place``, with tensors that ``change`` has changed."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    (place / "config.json").write_bytes((folder / "config.json").read_bytes())
    return place


def made_with(monkeypatch: pytest.MonkeyPatch, attributes: Callable[[str], dict[str, Any]]) -> None:
    """Modules that the library makes have ``attributes`` of their names, too."""
    make = quantised._ModuleBuilder.make

    def make_with(self: Any, parts: Any) -> nn.Module:
        module = make(self, parts)
        vars(module).update(attributes(self.name))
        return module

    monkeypatch.setattr(quantised._ModuleBuilder, "make", make_with)


class Packed(nn.Module):
    """Like the layers of GPTQModel, which hold all they have in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.randint(-8, 8, (512, 512), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(64, 512) / 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.qweight * self.scales.repeat_interleave(8, 0))  # type: ignore[operator]


def in_ranks(rank: int, folder: Path) -> tuple[bool, int]:
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    model, handle = load(folder, replace(MOVES, mode="sharded_cpu"), device="cpu", group=torch.distributed.group.WORLD)
    found = logits(model)
    moved = handle.stats().moved_by_store["sharded_cpu"]
    handle.remove()
    return torch.equal(found, logits(resident(folder))), moved


class TestLoad:
    @pytest.mark.parametrize("name", [name for name in FORMATS if name not in REFUSED])
    def test_equals_the_library(self, name: str, saved: Callable[[str], Path]) -> None:
        equal, moved = by_load(saved(need(name)))
        assert equal
        assert moved > 0

    @pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.streams])
    def test_streams_what_lies_in_the_files_as_it_runs(self, name: str, saved: Callable[[str], Path]) -> None:
        folder = saved(need(name))
        policy = headrace.Prefetch(prefetch_step=1, params=[headrace.config.ALL_MODEL_PARAMS], mode="disk")
        model, handle = load(folder, policy, device="cpu")
        with handle:
            assert torch.equal(logits(model), logits(resident(folder)))
            assert handle.stats().moved_by_store["disk"] > 0
            packed = "model.layers.1.mlp.up_proj.weight:qdata"
            assert handle.plan.mechanism_of(packed) != "resident"

    @pytest.mark.slow
    def test_two_ranks_share_its_bytes(self, saved: Callable[[str], Path]) -> None:
        """What a rank keeps a part of is made before the offload."""
        folder = saved(need("compressed-tensors int4"))
        for equal, moved in outcomes(2, in_ranks, folder, timeout_s=60.0):
            assert equal
            assert moved > 0

    @pytest.mark.parametrize("name", [name for name in HAND_MADE if name not in COMPRESSED])
    def test_gives_the_tensors_of_the_library(self, name: str, saved: Callable[[str], Path]) -> None:
        folder = saved(need(name))
        model, handle = load(folder, MOVES, device="cpu")
        reference = resident(folder)
        logits(reference)  # some repack in their first forward
        handle.remove()
        for name, tensor in (*reference.named_parameters(), *reference.named_buffers()):
            found = model.get_parameter_or_buffer(name)
            assert (type(found), found.dtype, found.shape) == (type(tensor), tensor.dtype, tensor.shape), name
            assert torch.equal(found, tensor), name
        assert type(model.config.to_dict().get("quantization_config")) is type(
            reference.config.to_dict().get("quantization_config")
        )

    def test_a_recipe_makes_a_whole_module(self, saved: Callable[[str], Path]) -> None:
        folder = saved(need("compressed-tensors int4"))
        found = match(build_meta_model(folder, device=torch.device("cpu")), Checkpoint.open(folder))
        recipe = found.weights.recipes["model.layers.1.mlp.up_proj.weight"]
        made = recipe.make({part.name: found.weights.checkpoint.read(part.name) for part in recipe.parts})
        reference = resident(folder)
        logits(reference)
        for name, value in made.items():
            assert torch.equal(value, reference.get_parameter_or_buffer(name)), name

    @pytest.mark.parametrize("name", ["compressed-tensors int8", "compressed-tensors int4"])
    def test_is_saved_as_the_library_saves_it(self, name: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
        """Decompressed, and config.json says so."""
        folder = saved(need(name))
        model, handle = load(folder, MOVES, device="cpu")
        with handle:
            model.save_pretrained(tmp_path)
        assert torch.equal(logits(resident(tmp_path)), logits(resident(folder)))

    def test_placeholders_of_a_kernel(self, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """GPTQModel's Marlin leaves tensors without elements in the modules that it repacks; no file holds them."""
        make = quantised._ModuleBuilder.make

        def make_with_placeholder(work: Any, parts: Any) -> nn.Module:
            module = make(work, parts)
            module.register_buffer("g_idx", torch.empty(0, dtype=torch.int32), persistent=False)
            return module

        monkeypatch.setattr(quantised._ModuleBuilder, "make", make_with_placeholder)
        folder = saved(need("compressed-tensors int4"))
        model, handle = load(folder, MOVES, device="cpu")
        with handle:
            assert torch.equal(logits(model), logits(resident(folder)))
            assert handle.stats().moved_by_store["cpu"] > 0
            assert model.get_buffer("model.layers.1.mlp.up_proj.g_idx").device.type == "cpu"

    @pytest.mark.parametrize("name", ["bitsandbytes nf4", "torchao int8", "GPTQ int4"])
    def test_marks_the_model_as_the_library_does(self, name: str, saved: Callable[[str], Path]) -> None:
        folder = saved(need(name))
        model, handle = load(folder, MOVES, device="cpu")
        kinds = {name: (type(parameter), parameter.device) for name, parameter in model.named_parameters()}
        handle.remove()
        marks = ("is_quantized", "quantization_method", "is_loaded_in_4bit")
        reference = resident(folder)
        assert {mark: getattr(model, mark, None) for mark in marks} == {
            mark: getattr(reference, mark, None) for mark in marks
        }
        assert kinds == {name: (type(each), each.device) for name, each in reference.named_parameters()}
        assert type(model.hf_quantizer) is type(reference.hf_quantizer)
        assert model.device == reference.device

    def test_refuses_methods_that_were_not_compared(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        folder = with_config(saved("fp8, blocks"), tmp_path, quantization_config={"quant_method": "hqq"})
        with pytest.raises(CheckpointError, match="cannot: hqq for cpu: headrace loads awq, bitsandbytes, compressed"):
            load(folder, MOVES, device="cpu")

    def test_refuses_quantised_tables(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        """Only a linear layer can be run on one row."""
        folder = saved(need("compressed-tensors int4"))
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        config["config_groups"]["group_0"]["targets"] = ["Linear", "Embedding"]
        with pytest.raises(CheckpointError, match=r"in linear layers alone, found model\.embed_tokens"):
            load(with_config(folder, tmp_path, quantization_config=config), MOVES, device="cpu")

    @pytest.mark.parametrize(("name", "message"), REFUSED.items())
    def test_refuses_what_writes_its_weights(self, name: str, message: str, saved: Callable[[str], Path]) -> None:
        with pytest.raises(CheckpointError, match=message):
            load(saved(need(name)), MOVES, device="cpu")

    @pytest.mark.parametrize(("name", "lacks", "message"), [
        ("compressed-tensors int4", "utils.quantization_config.is_compressed_tensors_available", "pip install comp"),
        ("GPTQ int4", "quantizers.quantizer_gptq.is_optimum_available", r"pip install optimum"),
        ("AWQ int4", "quantizers.quantizer_awq.is_gptqmodel_available", "pip install gptqmodel"),
    ])  # fmt: skip
    def test_says_which_package_it_needs(
        self, name: str, lacks: str, message: str, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(f"transformers.{lacks}", lambda: False)
        with pytest.raises(CheckpointError, match=f"found quantised ones .* that cannot: .*{message}"):
            load(saved(name), MOVES, device="cpu")

    def test_of_another_kind_than_the_first_is_refused(
        self, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A library that chooses by the numbers in a module: what was planned for the first is not true of this one."""
        folder = saved(need("compressed-tensors int4"))
        made_with(monkeypatch, lambda name: {"kernel": "other" if "layers.2" in name else "first"})
        with pytest.raises(CheckpointError, match=r"layers\.2\..*expected a module like the first of its kind.*kernel"):
            load(folder, MOVES, device="cpu")

    def test_a_copy_runs_its_own_compiled_method(self) -> None:
        """GPTQModel compiles a method of each module; that of the first module would give all others its weights."""
        module: Any = nn.Linear(2, 2)
        module.doubled = torch.compile(MethodType(lambda self: 2 * self.weight, module))
        assert unwrap(quantised._on_meta(module, "up_proj").doubled).__self__ is not module

    def test_weights_in_another_place_are_refused(
        self, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = saved(need("compressed-tensors int4"))
        made_with(monkeypatch, lambda name: {"hidden": {"packed": torch.zeros(4)}})
        with pytest.raises(CheckpointError, match=r"found some in another place of Linear"):
            load(folder, MOVES, device="cpu")


def _in_float32(model: Any) -> tuple[str, ...]:
    """Ends of names of what transformers keeps in float32: DeepSeek's biases of experts, from 5.24 on its routers."""
    return tuple(model._keep_in_fp32_modules_strict or ())


LAYER = "model.layers.1."
DENSE, EXPERT = f"{LAYER}mlp.down_proj.", f"{LAYER}mlp.experts.3.down_proj."


class TestDamagedFiles:
    @pytest.mark.parametrize(("name", "lost", "named"), [
        ("fp8, blocks", f"{DENSE}weight_scale_inv", ""),
        ("fp8, blocks", f"{DENSE}weight", ""),
        ("fp8, blocks, experts", f"{EXPERT}weight_scale_inv", ""),
        ("fp8, blocks, experts", f"{EXPERT}weight", ""),
        ("MXFP4, experts", f"{LAYER}mlp.experts.down_proj_scales", ""),
        ("MXFP4, experts", f"{LAYER}mlp.experts.down_proj_blocks", ""),
        ("compressed-tensors int4", f"{DENSE}weight_packed", f"{DENSE[:-1]}: .*holds no weight for it"),
        ("compressed-tensors int4", f"{DENSE}weight_scale", f"{DENSE[:-1]}: "),
        ("compressed-tensors int4, experts", f"{EXPERT}weight_scale", ""),
        ("compressed-tensors int4, experts", f"{EXPERT}weight_shape", "experts.down_proj: expected tensors"),
    ])  # fmt: skip
    def test_a_missing_part_is_named(
        self, name: str, lost: str, named: str, saved: Callable[[str], Path], tmp_path: Path
    ) -> None:
        """Numbers without their scale would be weights a hundred times too large."""
        folder = with_tensors(saved(need(name)), tmp_path, lambda tensors: tensors.pop(lost))
        with pytest.raises(CheckpointError, match=named or f"{lost}: expected it in the checkpoint with"):
            load(folder, MOVES, device="cpu")

    @pytest.mark.parametrize("rows", [0, 3])
    @pytest.mark.parametrize(("name", "part", "target"), [
        ("fp8, blocks", f"{DENSE}weight_scale_inv", f"{DENSE}weight"),
        ("fp8, blocks, experts", f"{EXPERT}weight", f"{LAYER}mlp.experts.down_proj"),
        ("MXFP4, experts", f"{LAYER}mlp.experts.down_proj_scales", f"{LAYER}mlp.experts.down_proj"),
        ("compressed-tensors int4", f"{DENSE}weight_packed", DENSE[:-1]),
        ("compressed-tensors int4, dequantised", f"{DENSE}weight_shape", f"{DENSE}weight"),
    ])  # fmt: skip
    def test_a_shape_that_does_not_fit_is_named(
        self, name: str, part: str, target: str, rows: int, saved: Callable[[str], Path], tmp_path: Path
    ) -> None:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors[part] = torch.zeros(rows, 5).to(tensors[part].dtype)

        with pytest.raises(CheckpointError, match=f"{target}: expected .*{part}"):
            load(with_tensors(saved(need(name)), tmp_path, change), MOVES, device="cpu")

    @pytest.mark.parametrize("value", [0.0, float("nan")])
    def test_odd_scales_are_taken_as_the_library_does(
        self, value: float, saved: Callable[[str], Path], tmp_path: Path
    ) -> None:
        key = f"{DENSE}weight_scale_inv"
        folder = with_tensors(saved("fp8, blocks"), tmp_path, lambda tensors: tensors[key].fill_(value))
        model, handle = load(folder, MOVES, device="cpu")
        with handle:
            torch.testing.assert_close(logits(model), logits(resident(folder)), rtol=0, atol=0, equal_nan=True)
            assert handle.stats().moved_by_store["cpu"] > 0


class TestOnAGpu:
    """What can be tested without one: which tensors the modules for a GPU have, and where the files hold them."""

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    @pytest.mark.parametrize("name", ["fp8, blocks", "fp8, blocks, experts"])
    def test_fp8_streams_as_it_lies(self, name: str, saved: Callable[[str], Path]) -> None:
        folder = saved(name)
        model = build_meta_model(folder, device=torch.device("cuda"))
        found = match(model, Checkpoint.open(folder), torch.device("cuda"))
        assert not found.weights.recipes
        assert not found.missing + found.unexpected
        num_bytes = sum(tensor.num_bytes for tensor in found.weights.checkpoint.tensors.values())
        assert sum(source.file_bytes for source in found.weights.sources.values()) == num_bytes
        converted = [name for name, source in found.weights.sources.items() if source.is_converted]
        assert all(name.endswith(_in_float32(model)) for name in converted)
        scaled = "self_attn.o_proj.weight_scale_inv" if "experts" not in name else "mlp.experts.gate_up_proj_scale_inv"
        assert found.weights.sources[f"model.layers.1.{scaled}"].dtype == torch.float32

    def test_a_missing_scale_is_named(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        """Which transformers would make up."""
        key = f"{DENSE}weight_scale_inv"
        folder = with_tensors(saved("fp8, blocks"), tmp_path, lambda tensors: tensors.pop(key))
        model = build_meta_model(folder, device=torch.device("cuda"))
        with pytest.raises(CheckpointError, match=f"expected a tensor '{key}'"):
            match(model, Checkpoint.open(folder), torch.device("cuda"))

    def test_mxfp4_kernels_that_are_missing_are_named(
        self, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("is_kernels_available", "is_triton_available"):
            monkeypatch.setattr(f"transformers.quantizers.quantizer_mxfp4.{name}", lambda *_: True)
        monkeypatch.setattr(
            "transformers.quantizers.quantizer_mxfp4.get_current_accelerator", lambda: torch.device("cuda")
        )
        with pytest.raises(CheckpointError, match=r"mxfp4 for cuda: .*pip install kernels"):
            build_meta_model(saved("MXFP4, experts"), device=torch.device("cuda"))


class TestPlan:
    @pytest.mark.parametrize("name", HAND_MADE)
    def test_for_a_gpu_sizes_are_those_of_the_files(
        self, name: str, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("transformers.utils.quantization_config.is_compressed_tensors_available", lambda: False)
        folder = saved(name)
        opened = open_model(folder, device="cuda", to_plan=True)
        held = {name: tensor.num_bytes for name, tensor in opened.match.weights.checkpoint.tensors.items()}
        if FORMATS[name].package == "compressed_tensors":  # runs decompressed
            packed = [name for name in held if name.endswith((".weight", ".weight_packed"))]
            assert opened.inventory.num_bytes > sum(held[name] for name in packed)
        else:
            rest = sum(storage.num_bytes for storage in opened.inventory.storages if not storage.is_saved)
            twice = sum(held[name] for name in held if name.endswith(_in_float32(opened.module)))
            assert opened.inventory.num_bytes - rest - sum(held.values()) == twice
            assert all(
                name.endswith("_proj_scale_inv") for name in opened.match.rearranged
            )  # of experts, in small pieces
        assert (opened.note is None) == name.startswith(("fp8", "MXFP4"))  # which need no package to be built
        assert not opened.match.missing + opened.match.unexpected

    @pytest.mark.parametrize("name", COMPRESSED)
    def test_without_the_library_as_with_it(
        self, name: str, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = saved(need(name))
        with_it = headrace.make_plan(folder, None, device="cpu")
        monkeypatch.setattr("transformers.utils.quantization_config.is_compressed_tensors_available", lambda: False)
        without = headrace.make_plan(folder, None, device="cpu")
        # Scales of NVFP4 run in the dtype of the model.
        assert without.device_bytes == pytest.approx(with_it.device_bytes, rel=0.03 if "NVFP4" in name else 0)

    @pytest.mark.parametrize("name", [name for name in FORMATS if name not in REFUSED])
    def test_is_that_of_the_load(self, name: str, saved: Callable[[str], Path]) -> None:
        folder = saved(need(name))
        plan = headrace.make_plan(folder, MOVES, device="cpu")
        model, handle = load(folder, plan, device="cpu")
        assert plan.offloaded_bytes > 0
        assert {**handle.plan.resident} == {**plan.resident}
        handle.remove()
        assert sum(storage.num_bytes for storage in take_inventory(model).storages) >= plan.device_bytes - 2**20

    def test_a_budget_counts_packed_weights(self, tmp_path: Path) -> None:
        """Of a library, whose names alone moved them: no budget below the size of the model could be met."""
        form = replace(FORMATS[need("GPTQ int4")], sizes={"hidden_size": 512, "num_hidden_layers": 8})
        folder = form.write(tmp_path)
        everything = headrace.make_plan(folder, None, device="cpu").device_bytes
        model, handle = load(folder, headrace.Budget(everything * 2 // 3, mode="cpu"), device="cpu")
        with handle:
            assert torch.equal(logits(model), logits(resident(folder)))
            assert handle.stats().moved_by_store["cpu"] > 0

    def test_says_why_it_is_from_headers(self, saved: Callable[[str], Path]) -> None:
        opened = open_model(saved("AWQ int4"), device="cuda", to_plan=True)
        (said,) = opened.differences
        assert "planned from the headers of the files, with quantised weights as stored there" in said
        assert "(awq for cuda: torch sees no CUDA device)" in said

    def test_scales_that_are_exponents_are_refused_on_a_gpu(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        """Their library takes them for another dtype after it has loaded them."""

        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors.update({name: tensor.to(torch.uint8) for name, tensor in tensors.items() if "scale" in name})

        folder = with_tensors(saved("fp8, blocks"), tmp_path, change)
        with pytest.raises(CheckpointError, match="scales that are exponents alone"):
            open_model(folder, device="cuda")

    def test_an_older_transformers_is_refused(
        self, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(HfQuantizer, "get_new_dtype")
        with pytest.raises(CheckpointError, match=r"expected transformers 5\.23 or newer"):
            open_model(saved("fp8, blocks"))

    def test_experts_that_no_layer_has_count_nothing(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        """Layers beyond the configuration's (multi-token prediction) are not loaded, and not planned."""
        folder = saved("fp8, blocks, experts")
        with_config(folder, tmp_path, num_hidden_layers=2)
        whole, less = (open_model(each, device="cuda", to_plan=True) for each in (folder, tmp_path))
        layer = sum(s.num_bytes for s in whole.inventory.storages if s.name.startswith("model.layers.2."))
        assert whole.inventory.num_bytes - less.inventory.num_bytes == layer


class TestOffload:
    @pytest.mark.parametrize("name", [name for name in FORMATS if name not in (*COMPRESSED, *REFUSED)])
    def test_equals_the_resident_model(self, name: str, saved: Callable[[str], Path]) -> None:
        equal, moved = by_offload(saved(need(name)))
        assert equal
        assert moved > 0

    @torch.no_grad()
    def test_weights_in_buffers_are_within_a_budget(self) -> None:
        model = nn.Sequential(*(Packed() for _ in range(8)))
        x = torch.rand(2, 512)
        expected = model(x)
        num_bytes = sum(buffer.nbytes for buffer in model.buffers())
        with headrace.offload(model, headrace.Budget(num_bytes * 2 // 5, mode="cpu")) as handle:
            assert torch.equal(model(x), expected)
            moved = {entry.storage.rpartition(".")[2] for unit in handle.plan.units for entry in unit.entries}
            assert moved == {"qweight", "scales"}

    def test_scales_move_with_their_weight(self, saved: Callable[[str], Path]) -> None:
        """Bitsandbytes keeps them in an object beside the numbers, which `model.to()` alone would move to a GPU."""
        model = resident(saved(need("bitsandbytes nf4, scales quantised")))
        logits(model)
        with headrace.offload(model, MOVES) as handle:
            name = "model.layers.1.mlp.up_proj.weight:quant_state:absmax"
            assert handle.plan.mechanism_of(name) == "prefetch"

    @pytest.mark.parametrize(("name", "is_warm", "message"), [
        ("compressed-tensors int4", False, "exchanged by compressed-tensors in the first forward; load it with"),
        ("bitsandbytes int8", True, "writes its weight in every forward; quantise it to 4 bits"),
    ])  # fmt: skip
    def test_refuses_by_name(self, name: str, is_warm: bool, message: str, saved: Callable[[str], Path]) -> None:
        model = resident(saved(need(name)))
        if is_warm:
            logits(model)
        with pytest.raises(OptionError, match=message):
            headrace.offload(model, MOVES)

    @torch.no_grad()
    def test_compressed_tensors_after_its_first_forward(self, saved: Callable[[str], Path]) -> None:
        """0.17 leaves plain weights then, which move; newer versions exchange them again (``ct_decompress_hook``)."""
        model = resident(saved(need("compressed-tensors int4")))
        expected = logits(model)
        if any(not isinstance(m._parameters, dict) or hasattr(m, "ct_decompress_hook") for m in model.modules()):
            with pytest.raises(OptionError, match="exchanged by compressed-tensors in the first forward; load it with"):
                headrace.offload(model, MOVES)
            return
        with headrace.offload(model, MOVES) as handle:
            assert torch.equal(logits(model), expected)
            assert sum(handle.stats().moved_by_store.values()) > 0

    @pytest.mark.parametrize(("attr", "message"), [
        ("q_handle", "runs on addresses that it took once; load it with another backend"),
        ("gate_up_proj_precision_config", r"objects of triton_kernels.*load it with headrace's load\(\)"),
    ])  # fmt: skip
    def test_refuses_kernels_that_hold_the_weights(self, attr: str, message: str) -> None:
        """Neither can be made without a GPU: ExLlama's layers have the first attribute, MXFP4's experts the second."""
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        setattr(model[1], attr, object())
        with pytest.raises(OptionError, match=message):
            headrace.offload(model, MOVES)

    def test_refuses_a_first_forward_that_repacks(self, saved: Callable[[str], Path]) -> None:
        model = resident(saved(need("bitsandbytes nf4")))
        if not model.model.layers[0].mlp.up_proj.support_avx512bf16_for_cpu:
            pytest.skip("bitsandbytes repacks on CPUs with AVX512-BF16 alone")
        with pytest.raises(OptionError, match="repacks its weight in its first forward; run the model once before"):
            headrace.offload(model, MOVES)

    def test_refuses_weights_that_are_packed_for_another_device(self, saved: Callable[[str], Path]) -> None:
        model = resident(saved(need("bitsandbytes nf4")))
        logits(model)
        layer = model.model.layers[0].mlp.up_proj
        if not getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
            pytest.skip("bitsandbytes repacks on CPUs with AVX512-BF16 alone")
        with pytest.raises(OptionError, match="has packed its weight for a CPU; offload it before its first forward"):
            reject_self_managed_weights("up_proj", layer, torch.device("cuda"))
