"""The promise: weights that diffusers casts at use are stored and copied as they are stored, with the same images.

The reference is always the resident pipeline with diffusers' own layerwise casting.
"""

from __future__ import annotations

import importlib.util
import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import headrace
from checks import raising
from headrace.errors import BudgetError, HeadraceError, OptionError, OptionTypeError, SizeError, StateError
from headrace.model.inventory import take_inventory
from headrace.testing import assert_same_bits

if importlib.util.find_spec("diffusers") is None or importlib.util.find_spec("peft") is None:
    pytest.skip("diffusers and peft are not installed", allow_module_level=True)

import pipelines

if TYPE_CHECKING:
    from headrace.adapters.diffusers import PipelineHandle

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("error::headrace.HeadraceWarning"),
]
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
STEPS = ("unet", "controlnet", "transformer", "transformer_2")


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def build(name: str, dtype: torch.dtype = BF16) -> Any:
    return pipelines.build(name).to(dtype)


def cast(pipe: Any, storage: torch.dtype = FP8, compute: torch.dtype = BF16) -> Any:
    """``pipe`` with diffusers' layerwise casting on what every step runs."""
    for name in STEPS:
        if (part := getattr(pipe, name, None)) is not None:
            part.enable_layerwise_casting(storage_dtype=storage, compute_dtype=compute)
    return pipe


def num_bytes(pipe: Any) -> int:
    from headrace.adapters.diffusers import Components

    return take_inventory(Components(pipe)).num_bytes


def load(pipe: Any, policy: Any, **options: Any) -> PipelineHandle:
    from headrace.adapters import diffusers

    return diffusers.load(pipe, policy, **options)[1]


def moved_by(handle: headrace.Handle, run: Callable[[], Any], expected: torch.Tensor) -> int:
    before = handle.stats().bytes_moved
    assert_same_bits(run(), expected)
    assert handle.stats().notes == (), "nothing was promoted"
    return handle.stats().bytes_moved - before


# -- one budget ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", ["by load", "before"])
@pytest.mark.parametrize(
    ("name", "storage", "compute"),
    [
        ("stable diffusion", FP8, BF16), ("controlnet", torch.float8_e5m2, torch.float16), ("flux", FP8, BF16),
        ("wan", FP8, BF16), ("flux", FP8, torch.float32), ("wan", BF16, torch.float32),
    ],
)  # fmt: skip
def test_the_images_of_the_resident_pipeline(
    name: str, storage: torch.dtype, compute: torch.dtype, enabled: str
) -> None:
    pipe, twin = build(name, compute), cast(build(name, compute), storage, compute)
    plain, expected = pipelines.call(pipe), pipelines.call(twin)
    assert not torch.equal(plain, expected)
    budget = int(0.5 * num_bytes(twin))
    handle = load(cast(pipe, storage, compute), budget) if enabled == "before" else None
    handle = handle or load(pipe, budget, storage_dtype=storage)
    assert handle.plan.weight_bytes == num_bytes(twin)
    assert handle.plan.device_bytes <= budget
    for _ in range(2):
        assert moved_by(handle, lambda: pipelines.call(pipe), expected) > 0
    state, reference = (
        dict(getattr(p, "unet", None or p.components.get("transformer")).state_dict()) for p in (pipe, twin)
    )
    assert storage in {tensor.dtype for tensor in state.values()}
    assert_same_bits(state, reference)
    handle.remove()
    assert_same_bits(pipelines.call(pipe), expected)


def test_the_kernel_of_the_resident_weight() -> None:
    """matmul takes another one, which rounds differently, if the weight requires gradients: under no_grad, too."""
    from diffusers.hooks import apply_layerwise_casting
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names += [func.__name__] if "mm" in func.__name__ else []
            return func(*args, **kwargs or {})

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1, bias=False)).eval()
    apply_layerwise_casting(model, storage_dtype=torch.float16, compute_dtype=torch.float32)
    x = torch.randn(1, 4, 3, 16).permute(0, 1, 3, 2)
    with torch.no_grad(), Products() as resident:
        expected = model(x)
    with pytest.warns(headrace.HeadraceWarning, match="more than all weights, which have 6 B"):
        headrace.offload(model, headrace.Prefetch(params=[headrace.config.ALL_MODEL_PARAMS]))
    with torch.no_grad(), Products() as offloaded:
        assert_same_bits(model(x), expected)
    assert offloaded.names == resident.names != []
    with torch.no_grad():
        assert_same_bits(torch.compile(model)(x), expected)  # as the resident one compiled


@pytest.mark.parametrize("name", ["stable diffusion", "flux", "wan"])
def test_bytes_of_one_component(name: str) -> None:
    """Offloaded alone with all weights, it moves 8 bits where bf16 moves 16, but for the few that diffusers skips."""
    moved, offloaded = [], []
    for pipe, twin in ((build(name), build(name)), (cast(build(name)), cast(build(name)))):
        part = getattr(pipe, "unet", None) or pipe.transformer
        handle = headrace.offload(part, headrace.Prefetch(params=[headrace.config.ALL_MODEL_PARAMS]))
        moved.append(moved_by(handle, lambda pipe=pipe: pipelines.call(pipe), pipelines.call(twin)))
        offloaded.append(handle.plan.offloaded_bytes)
    stored = sum(parameter.numel() for parameter in part.parameters() if parameter.dtype == FP8)
    assert offloaded[0] - offloaded[1] == pytest.approx(stored, rel=0.06), "but for what is too small to move"
    assert moved[1] / moved[0] == pytest.approx(offloaded[1] / offloaded[0], rel=0.01)


def test_components_by_name() -> None:
    pipe, twin = build("flux"), build("flux")
    twin.vae.enable_layerwise_casting(storage_dtype=torch.float8_e5m2, compute_dtype=BF16)
    expected, plain = pipelines.call(twin), pipelines.call(pipe)
    stored = {"vae": torch.float8_e5m2}
    handle = load(pipe, int(0.4 * num_bytes(twin)), storage_dtype=stored)
    assert moved_by(handle, lambda: pipelines.call(pipe), expected) > 0
    assert not torch.equal(plain, expected)
    assert FP8 not in {parameter.dtype for parameter in pipe.transformer.parameters()}
    handle.remove()
    handle = load(pipe, int(0.4 * num_bytes(twin)), storage_dtype=stored)
    assert moved_by(handle, lambda: pipelines.call(pipe), expected) > 0, "what is stored so already is taken as such"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [("flux", "regional"), ("wan", "in place")],
)
def test_compiled(name: str, how: str) -> None:
    """In whole graphs, where diffusers' own casts break a graph at every layer."""

    pipe, expected = cast(build(name)), pipelines.call(cast(build(name)))
    handle = load(pipe, int(0.5 * num_bytes(pipe)))
    if how == "regional":
        pipe.transformer.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    else:
        pipe.transformer.compile(backend="aot_eager")
    for _ in range(2):
        assert moved_by(handle, lambda: pipelines.call(pipe), expected) > 0


def test_an_adapter() -> None:
    """Added before, as diffusers needs it: later ones would be in 8 bits, in which no product is computed."""
    from peft import LoraConfig

    pipe, twin = build("flux"), build("flux")
    for p in (pipe, twin):
        torch.manual_seed(5)
        config = LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_v"])
        p.transformer.add_adapter(config, adapter_name="one")
    cast(twin)
    handle = load(pipe, int(0.5 * num_bytes(twin)), storage_dtype=FP8)
    expected = pipelines.call(twin)
    for _ in range(2):
        assert moved_by(handle, lambda: pipelines.call(pipe), expected) > 0
    for p in (pipe, twin):
        p.transformer.set_adapters("one", 0.5)
    assert moved_by(handle, lambda: pipelines.call(pipe), pipelines.call(twin)) > 0
    assert not torch.equal(pipelines.call(twin), expected)


@pytest.mark.parametrize("added", ["to the pipeline", "to a component"])
def test_an_adapter_that_comes_later_is_refused(added: str) -> None:
    """torch would say that it has no product of 8 bits, as in a resident pipeline."""
    from peft import LoraConfig

    pipe, twin = build("flux"), cast(build("flux"))
    handle, expected = load(pipe, int(0.5 * num_bytes(twin)), storage_dtype=FP8), pipelines.call(twin)
    names = {f"transformer.transformer_blocks.0.attn.to_q.lora_{part}.weight" for part in "AB"}
    state = {name: torch.ones((4, 128) if "_A" in name else (128, 4), dtype=BF16) for name in names}
    config = LoraConfig(r=4, target_modules=["to_q"])
    if added == "to a component":
        pipe.transformer.add_adapter(config)
    run = partial(pipe.load_lora_weights, state) if added == "to the pipeline" else partial(pipelines.call, pipe)
    with pytest.raises(StateError, match=r"to_q\.lora_A.* was loaded in torch.float8_e4m3fn.*unload_lora_weights"):
        run()
    with pytest.raises(StateError, match="was loaded"):
        pipelines.call(pipe)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(pipe.transformer), "load_lora_adapter", raising(KeyError("an error of diffusers")))
        with pytest.raises(KeyError, match="an error of diffusers"):
            pipe.load_lora_weights(state)
    pipe.disable_lora()
    assert moved_by(handle, lambda: pipelines.call(pipe), expected) > 0
    pipe.enable_lora()
    with pytest.raises(StateError, match="was loaded"):
        pipelines.call(pipe)
    pipe.unload_lora_weights()
    assert moved_by(handle, lambda: pipelines.call(pipe), expected) > 0


@pytest.mark.parametrize("stored", [BF16, torch.float32])
def test_a_folder(stored: torch.dtype, tmp_path: Path) -> None:
    """Read from the files at each use; not where the dtype of compute lies between those of the files and the store."""
    from diffusers import DiffusionPipeline

    build("flux", stored).save_pretrained(tmp_path)
    twin = cast(DiffusionPipeline.from_pretrained(tmp_path, dtype=BF16))
    from headrace.adapters import diffusers

    options = {"dtype": BF16, "storage_dtype": FP8}
    in_files = headrace.Prefetch(params=[headrace.config.ALL_MODEL_PARAMS], mode="disk")
    pipe, handle = diffusers.load(tmp_path, in_files, **options)
    for p in (pipe, twin):
        p.set_progress_bar_config(disable=True)
    for _ in range(2):
        assert moved_by(handle, lambda: pipelines.call(pipe), pipelines.call(twin)) > 0
    live = dict(diffusers.Components(pipe).named_parameters())
    streamed = {name for name in handle.plan.offloaded_names if live[name].dtype == FP8}
    assert bool(streamed) is (stored is BF16)
    assert handle.plan.reads_files
    if stored is not BF16:
        few = int(0.33 * num_bytes(twin))
        for mode in ("disk", None):
            with pytest.raises(BudgetError, match=r"do not hold \d+ tensors \(transformer\..*use mode 'cpu'"):
                diffusers.load(tmp_path, headrace.Budget(few, mode=mode), **options)
        diffusers.load(tmp_path, headrace.Budget(few, mode="cpu"), **options)


# -- what goes wrong -----------------------------------------------------------------------------------------------


class Falls(nn.Linear):
    """Raises in its forward when told to, and remembers its calls."""

    falls, calls, dtype = False, 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls, self.dtype = self.calls + 1, self.weight.dtype
        if self.falls:
            raise ValueError("it fell")
        return super().forward(x)


def layers(storage: torch.dtype = FP8) -> nn.Module:
    from diffusers.hooks import apply_layerwise_casting

    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(Falls(256, 256), nn.Linear(256, 256)) for _ in range(4))).eval()
    apply_layerwise_casting(model, storage_dtype=storage, compute_dtype=torch.float32)
    return model


EVERYTHING = headrace.Prefetch(1, 1, 1, params=[headrace.config.ALL_MODEL_PARAMS])


@torch.no_grad()
def test_an_error_in_a_forward() -> None:
    """Diffusers would leave the weights of the module cast."""
    model, twin, x = layers(), layers(), torch.randn(4, 256)
    handle = headrace.offload(model, EVERYTHING)
    model[1][0].falls = True
    with pytest.raises(ValueError, match="it fell"):
        model(x)
    model[1][0].falls = False
    for _ in range(2):
        assert moved_by(handle, lambda: model(x), twin(x)) > 0
    assert (model[1][0].calls, model[1][0].dtype) == (3, torch.float32), "what a forward sets stays set"
    assert {parameter.dtype for parameter in model.parameters()} == {FP8}
    handle.remove()
    assert_same_bits(model(x), twin(x))


def test_threads() -> None:
    model, twin = layers(), layers()
    inputs = [torch.randn(4, 256) for _ in range(4)]
    with torch.no_grad():
        expected = [twin(x) for x in inputs]
    found: dict[int, torch.Tensor] = {}

    def run(index: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                found[index] = model(inputs[index])

    with headrace.offload(model, EVERYTHING) as handle:
        threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert handle.stats().bytes_moved > 0
    assert_same_bits([found[index] for index in range(4)], expected)


@torch.no_grad()
def test_used_outside_of_the_forward_of_its_block() -> None:
    """It is promoted like other weights, in 8 bits."""
    model, twin, x = layers(), layers(), torch.randn(4, 256)
    with headrace.offload(model, headrace.Prefetch(1, 1, 1)) as handle:
        with pytest.warns(headrace.HeadraceWarning, match="resident from now"):
            assert_same_bits(model[2][1](x), twin[2][1](x))
        assert model[2][1].weight.dtype == FP8
        assert_same_bits(model(x), twin(x))
        assert handle.stats().bytes_moved > 0


def _around(model: nn.Module) -> None:
    from diffusers.hooks import apply_layerwise_casting_hook

    apply_layerwise_casting_hook(model[1], FP8, torch.float32, False)


def _wrapped(model: nn.Module) -> None:
    from diffusers.hooks import apply_layerwise_casting

    plain = model[1][1].forward
    model[1][1].forward = lambda x: plain(x)
    apply_layerwise_casting(model, FP8, torch.float32)


def _rounds(model: nn.Module) -> None:
    from diffusers.hooks import apply_layerwise_casting

    apply_layerwise_casting(model, torch.float16, BF16)


@pytest.mark.parametrize(
    ("enable", "message"),
    [
        (_around, r"'1' \(Sequential\): .*casts together with the modules inside"),
        (_wrapped, r"'1\.1' \(Linear\): .*had its forward wrapped before"),
        (_rounds, r"'0\.0' \(Linear\): .*rounds in each forward, from float16 to bfloat16 and back"),
    ],
    ids=["around others", "wrapped", "rounds"],
)
def test_casts_that_are_refused(enable: Callable[[nn.Module], None], message: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)) for _ in range(3))).eval()
    enable(model)
    with pytest.raises(OptionError, match=message + r".*; build or load it anew, and enable layerwise casting last"):
        headrace.offload(model, EVERYTHING)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("fp8", OptionTypeError, r"expected a dtype, such as torch\.float8_e4m3fn, .* found str 'fp8'"),
        ({"unets": FP8}, OptionError, r"components of diffusers' own \(vae, unet\), found 'unets'"),
        ({"text_encoder": FP8}, OptionError, "components of diffusers' own .* found 'text_encoder'"),
        ({}, OptionError, "expected a component to store in it, found none"),
        (torch.int8, OptionError, r"expected a floating dtype smaller than torch\.bfloat16, .* found torch\.int8"),
        ({"unet": FP8, "vae": torch.float32}, OptionError, r"in which vae computes, .* found torch\.float32"),
        ({"unet": "fp8"}, OptionError, "found fp8"),
        (torch.float8_e8m0fnu, OptionError, r"unet cannot be stored in torch\.float8_e8m0fnu: diffusers rounds"),
        (torch.float4_e2m1fn_x2, OptionError, r"unet cannot be stored in torch\.float4_e2m1fn_x2: torch casts nothing"),
    ],
)
def test_wrong_storage_dtypes(given: Any, error: type[HeadraceError], message: str) -> None:
    pipe = build("stable diffusion")
    with pytest.raises(error, match=f"storage_dtype: .*{message}"):
        load(pipe, "9MiB", storage_dtype=given)
    assert {parameter.dtype for parameter in pipe.unet.parameters()} == {BF16}
    assert "_headrace" not in vars(pipe)


def test_another_storage_dtype_than_before() -> None:
    pipe = cast(build("stable diffusion"))
    with pytest.raises(OptionError, match=r"stores unet in torch\.float8_e4m3fn .*found torch\.float8_e5m2"):
        load(pipe, "9MiB", storage_dtype=torch.float8_e5m2)
    with pytest.raises(BudgetError):
        load(pipe, 1, storage_dtype=FP8)
    expected = pipelines.call(cast(build("stable diffusion")))
    assert_same_bits(pipelines.call(pipe), expected)
    assert moved_by(load(pipe, int(0.5 * num_bytes(pipe))), lambda: pipelines.call(pipe), expected) > 0


def test_a_wrong_budget_rounds_nothing() -> None:
    pipe = build("flux")
    with pytest.raises(SizeError, match="6 Gibs"):
        load(pipe, "6 Gibs", storage_dtype=FP8)
    assert {weight.dtype for weight in pipe.transformer.parameters()} == {BF16}


def test_a_model_with_two_names_is_cast_once() -> None:
    pipe = build("wan")
    pipe.transformer_2 = pipe.transformer
    twin = cast(build("wan"))
    twin.transformer_2 = twin.transformer
    handle = load(pipe, int(0.5 * num_bytes(pipe)), storage_dtype={"transformer": FP8, "transformer_2": FP8})
    assert moved_by(handle, lambda: pipelines.call(pipe), pipelines.call(twin)) > 0


# -- casts of a part -----------------------------------------------------------------------------------------------


def test_an_interrupt_while_weights_are_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves is not taken for a model that is cast."""
    from diffusers.hooks.layerwise_casting import LayerwiseCastingHook

    pipe, calls, initialize = build("flux"), itertools.count(), LayerwiseCastingHook.initialize_hook

    def interrupted(self: Any, module: nn.Module) -> nn.Module:
        if next(calls) == 24:
            raise KeyboardInterrupt
        return initialize(self, module)

    with monkeypatch.context() as patched:
        patched.setattr(LayerwiseCastingHook, "initialize_hook", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            load(pipe, "6MiB", storage_dtype=FP8)
    assert "cast in part: build or load it anew" in caught.value.__notes__[0]
    with pytest.raises(
        OptionError, match=r"stores a part of transformer in .*, and not transformer\.transformer_blocks"
    ):
        load(pipe, "6MiB", storage_dtype=FP8)


def test_casts_of_a_part_are_kept_as_they_are() -> None:
    from diffusers.hooks import apply_layerwise_casting

    pipe, twin = build("flux"), build("flux")
    for each in (pipe, twin):
        apply_layerwise_casting(each.transformer.transformer_blocks[0], FP8, BF16)
    with pytest.raises(OptionError, match="leave storage_dtype out to keep it so"):
        load(pipe, "6MiB", storage_dtype=FP8)
    handle = load(pipe, int(0.5 * num_bytes(pipe)))
    assert moved_by(handle, lambda: pipelines.call(pipe), pipelines.call(twin)) > 0


def test_weights_that_left_their_storage() -> None:
    """They go back there if they have its values, as those of the resident model do in its next forward."""
    pipe, twin = cast(build("flux")), cast(build("flux"))
    size, expected = num_bytes(twin), pipelines.call(twin)
    pipe.transformer.to(BF16)
    handle = load(pipe, int(0.5 * size))
    assert handle.plan.weight_bytes == size
    assert moved_by(handle, lambda: pipelines.call(pipe), expected) > 0
    handle.remove()
    pipe.transformer.to(BF16)
    with torch.no_grad():
        pipe.transformer.transformer_blocks[0].attn.to_q.weight.mul_(1.03)
    with pytest.raises(OptionError, match=r"to_q' \(Linear\).* has weights in torch\.bfloat16 that diffusers"):
        load(pipe, int(0.5 * size), storage_dtype=FP8)
