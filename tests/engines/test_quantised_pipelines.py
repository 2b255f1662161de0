"""The promise: transformers that diffusers keeps in 4 to 8 bits are planned and copied packed, with the same images.

Formats: GGUF, torchao and bitsandbytes (`quantised_transformers`). Each is compared with the resident one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.errors import BudgetError, CheckpointError, ModelChangedError, OptionError
from headrace.model.inventory import inner_tensors, take_inventory
from headrace.testing import assert_same_bits

if importlib.util.find_spec("diffusers") is None or importlib.util.find_spec("peft") is None:
    pytest.skip("diffusers and peft are not installed", allow_module_level=True)

import pipelines
import quantised_transformers
from quantised_transformers import FORMATS, pipeline, step

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("error::headrace.HeadraceWarning"),
]
MOVES = headrace.Prefetch(prefetch_step=1, params=[headrace.config.ALL_MODEL_PARAMS], mode="cpu")
TAKEN = [name for name in FORMATS if name != "bitsandbytes int8"]
EACH_LIBRARY = ["GGUF Q4_K", "torchao int8", "bitsandbytes nf4"]
SAVED = EACH_LIBRARY[1:]
SHARE = 0.2  # of a pipeline's weights, which moves some of the transformer, too


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transformers")


@pytest.fixture
def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Makes the transformer in a format; the same weights every time."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        quantised_transformers.run_bitsandbytes_on_a_cpu(monkeypatch)
    return lambda name: quantised_transformers.transformer(name, folder)


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes repacks no weights, as on a GPU."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


def lora() -> dict[str, torch.Tensor]:
    """An adapter of the first block's attention."""
    generator, state = torch.Generator().manual_seed(1), {}
    for layer in ("to_q", "to_v"):
        for part, shape in (("A", (4, 256)), ("B", (256, 4))):
            value = torch.randn(shape, generator=generator).to(torch.bfloat16) / 9
            state[f"transformer.transformer_blocks.0.attn.{layer}.lora_{part}.weight"] = value
    return state


def packed(model: Any) -> dict[str, torch.Tensor]:
    """The plain tensors of ``model`` by name, with those inside of subclasses and beside them."""
    state = dict(model.named_parameters())
    return {
        ":".join((name, *path)): inner.as_subclass(torch.Tensor).clone()
        for name, tensor in state.items()
        for path, inner in inner_tensors(tensor)
    }


def load(pipe: Any, share: float, **options: Any) -> headrace.Handle:
    from headrace.adapters import diffusers

    budget = int(share * take_inventory(diffusers.Components(pipe)).num_bytes)
    return diffusers.load(pipe, budget, device="cpu", **options)[1]


def assert_moves(handle: headrace.Handle, run: Callable[[], torch.Tensor], expected: torch.Tensor) -> None:
    for _ in range(2):
        before = handle.stats().bytes_moved
        assert_same_bits(run(), expected)
        assert handle.stats().bytes_moved > before
    assert handle.stats().notes == (), "nothing was promoted"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["all", "budget"])
@pytest.mark.parametrize("name", TAKEN)
def test_a_component_has_the_bits_of_the_resident_one(name: str, policy: str, make: Callable[[str], Any]) -> None:
    model = make(name)
    expected, weights = step(model), packed(model)
    assert expected.isfinite().all()
    kinds = {key: type(tensor) for key, tensor in model.named_parameters()}
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    given = MOVES if policy == "all" else int(0.7 * num_bytes)
    plan = headrace.make_plan(model, given, device="cpu")
    assert plan.weight_bytes == num_bytes
    with headrace.offload(model, given, device="cpu") as handle:
        assert handle.plan.weight_bytes == num_bytes
        assert policy == "all" or handle.plan.device_bytes <= given
        assert_moves(handle, lambda: step(model), expected)
        assert {key: type(tensor) for key, tensor in model.named_parameters()} == kinds
    assert_same_bits(packed(model), weights)
    assert_same_bits(step(model), expected)


@pytest.mark.slow
def test_compiled(make: Callable[[str], Any]) -> None:
    model = make("GGUF Q4_K")
    expected = step(model)
    with headrace.offload(model, MOVES, device="cpu") as handle:
        model.compile(backend="eager")
        assert_moves(handle, lambda: step(model), expected)


@pytest.mark.slow
def test_layers_that_were_one_tensor_of_the_file(make: Callable[[str], Any]) -> None:
    """Published GGUF files hold queries, keys and values as one; diffusers cuts it, so that they share memory."""
    model = make("GGUF Q4_K")
    attention = model.transformer_blocks[0].attn
    layers = [attention.to_q, attention.to_k, attention.to_v]
    cut = torch.chunk(torch.cat([layer.weight for layer in layers]), 3, dim=0)
    for layer, weight in zip(layers, cut, strict=True):
        layer._parameters["weight"] = weight
    assert len({layer.weight.untyped_storage().data_ptr() for layer in layers}) == 1
    expected = step(model)
    with headrace.offload(model, MOVES, device="cpu") as handle:
        assert_moves(handle, lambda: step(model), expected)
    assert_same_bits(step(model), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH_LIBRARY)
def test_a_pipeline_in_one_budget(name: str, make: Callable[[str], Any]) -> None:
    pipe = pipeline(make(name))
    expected = pipelines.call(pipe)
    handle = load(pipe, SHARE)
    assert_moves(handle, lambda: pipelines.call(pipe), expected)
    assert any(name.startswith("transformer.") for name in handle.plan.offloaded_names)
    handle.remove()
    assert_same_bits(pipelines.call(pipe), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GGUF Q4_0", "torchao int8"])
def test_weights_are_read_outside_of_a_forward(name: str, make: Callable[[str], Any]) -> None:
    """As LoRA and ``dequantize()`` of diffusers do. bitsandbytes' own state_dict() unpacks what a CPU has packed."""
    model, twin = make(name), make(name)
    with headrace.offload(model, MOVES, device="cpu"):
        state, expected = model.state_dict(), twin.state_dict()
        assert state.keys() == expected.keys()
        for key, tensor in expected.items():
            assert type(state[key]) is type(tensor)
            for (path, inner), (_, found) in zip(inner_tensors(tensor), inner_tensors(state[key]), strict=True):
                parts = (each.as_subclass(torch.Tensor) for each in (found, inner))
                assert torch.equal(*parts), (key, path)
        key = "transformer_blocks.0.ff.net.2.weight"
        with pytest.raises(ModelChangedError, match=r"ff\.net\.2\.weight"):
            next(inner for _, inner in inner_tensors(state[key])).zero_()
        if name.startswith("GGUF"):
            from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor as values

            # With the model's own tensors, which have hooks.
            assert vars(model.state_dict(keep_vars=True)[key]).keys() == vars(expected[key]).keys()
            weight, same = (each.transformer_blocks[0].ff.net[2].weight for each in (model, twin))
            with pytest.warns(headrace.HeadraceWarning, match="It is resident from now on"):
                assert_same_bits(values(weight), values(same))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EACH_LIBRARY, "bitsandbytes nf4, scales quantised"])
def test_lora_on_packed_weights(name: str, make: Callable[[str], Any], unpacked: None) -> None:
    pipe, twin, state = pipeline(make(name)), pipeline(make(name)), lora()
    plain = pipelines.call(twin)
    handle = load(pipe, SHARE)
    assert any(name.startswith("transformer.") for name in handle.plan.offloaded_names)
    for each in (pipe, twin):
        each.load_lora_weights(dict(state))
    expected = pipelines.call(twin)
    assert not torch.equal(plain, expected)
    assert_moves(handle, lambda: pipelines.call(pipe), expected)
    pipe.unload_lora_weights()
    assert_moves(handle, lambda: pipelines.call(pipe), plain)


@pytest.mark.slow
@pytest.mark.parametrize("loads", [
    lambda pipe: pipe.load_lora_weights(lora()), lambda pipe: pipe.transformer.state_dict(),
])  # fmt: skip
def test_what_bitsandbytes_packed_for_a_cpu_is_not_unpacked_in_place(
    loads: Callable[[Any], object], make: Callable[[str], Any], unpacked: None
) -> None:
    """Its ``state_dict()`` writes the weights, which diffusers calls to load adapters: later calls raised."""
    pipe = pipeline(make("bitsandbytes nf4"))
    from bitsandbytes.functional import _convert_weight_packed_for_cpu as pack

    layers = [module for module in pipe.transformer.modules() if type(module).__name__ == "Linear4bit"]
    for layer in layers:  # as its first forward does on a CPU with AVX512-BF16
        layer.weight.data, layer.weight.quant_state = pack(layer.weight.data, layer.weight.quant_state)
    expected = packed(pipe.transformer)
    handle = load(pipe, SHARE)
    with pytest.raises(ModelChangedError, match=r"unpack .*blocks\.0\..*\.weight in place.*remove\(\) first"):
        loads(pipe)
    assert all(layer.weight.quant_state.packing_format_for_cpu for layer in layers)
    assert not hasattr(pipe.transformer, "peft_config")
    handle.remove()
    assert_same_bits(packed(pipe.transformer), expected)
    pipe.transformer.state_dict()


@pytest.mark.parametrize("name", ["GGUF Q4_0", "torchao int8"])
def test_mode_disk_refuses_packed_weights_by_name(name: str, make: Callable[[str], Any], tmp_path: Path) -> None:
    """Which would stay on the device, all of the transformer's; without a mode a budget that fails for them says so."""
    from headrace.adapters.diffusers import load as load_pipeline

    pipe = pipeline(make(name))
    for part in ("vae", "text_encoder", "text_encoder_2"):
        getattr(pipe, part).save_pretrained(tmp_path / part)
    everything = headrace.Prefetch(params=[headrace.config.ALL_MODEL_PARAMS], mode="disk")
    for policy in (everything, headrace.Budget("3MiB", mode="disk"), headrace.Budget("12MiB", mode="disk")):
        with pytest.raises(OptionError, match=r"\d+ packed tensors \(transformer\..*use mode 'cpu'") as caught:
            load_pipeline(pipe, policy, checkpoint=tmp_path)
        assert not isinstance(caught.value, BudgetError)
    with pytest.raises(BudgetError, match=r"too small.*the files do not hold .*\(transformer\..*use mode 'cpu'"):
        load_pipeline(pipe, "3MiB", checkpoint=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_a_saved_pipeline(name: str, make: Callable[[str], Any], tmp_path: Path) -> None:
    """Its folder is planned with the packed bytes, from headers alone, and those are what ``load`` then finds."""
    from diffusers import FluxPipeline

    from headrace.adapters.diffusers import Components

    pipeline(make(name)).save_pretrained(tmp_path)
    with pytest.warns(headrace.HeadraceWarning, match="planned from the configs of its components"):
        plan = headrace.make_plan(tmp_path, "8MiB", machine="h200", dtype=torch.bfloat16)
    pipe = FluxPipeline.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    sizes = take_inventory(Components(pipe)).num_bytes
    assert plan.weight_bytes == pytest.approx(sizes, rel=0.01)  # codes and shapes of bitsandbytes beside it
    expected = pipelines.call(pipe)
    handle = load(pipe, 0.45, checkpoint=tmp_path)
    assert_moves(handle, lambda: pipelines.call(pipe), expected)
    handle.remove()
    assert_same_bits(pipelines.call(pipe), expected)


@pytest.mark.slow
def test_a_folder_whose_layers_are_unknown_is_not_planned(make: Callable[[str], Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    pipeline(make("torchao int8")).save_pretrained(tmp_path)
    file = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, file)
    with pytest.raises(CheckpointError, match=r"quantised weights of layers of FluxTransformer2DModel, found model\."):
        headrace.make_plan(tmp_path, "8MiB", machine="h200")


@pytest.mark.slow
def test_eight_bits_of_bitsandbytes_are_refused_by_name(make: Callable[[str], Any]) -> None:
    pipe = pipeline(make("bitsandbytes int8"))
    expected = pipelines.call(pipe)
    with pytest.raises(OptionError, match=r"transformer.*writes its weight in every forward; quantise it to 4 bits"):
        load(pipe, SHARE)
    assert_same_bits(pipelines.call(pipe), expected)
