"""The promise: a modular pipeline of diffusers, and one that shares its components, makes the same images."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import headrace
from headrace.errors import ModelChangedError, StateError
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
    pytest.mark.filterwarnings("error::headrace.HeadraceWarning"),
]


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The modular pipeline of the components of the pipeline ``name``."""
    if name == "flux":
        from diffusers.modular_pipelines.flux.modular_blocks_flux import FluxAutoBlocks as Blocks
    else:
        from diffusers.modular_pipelines.wan.modular_blocks_wan22 import Wan22Blocks as Blocks
    return filled(Blocks().init_pipeline(), pipelines.build(name).to(dtype).components)


def filled(pipe: Any, parts: dict[str, Any]) -> Any:
    pipe.update_components(**{name: part for name, part in parts.items() if name in pipe.component_names})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(pipe: Any, **more: Any) -> torch.Tensor:
    given: dict[str, Any] = {"prompt": "a b c", "num_inference_steps": 3, "height": 16, "width": 16}
    given |= {"output_type": "pt", "max_sequence_length": 16, "generator": torch.Generator().manual_seed(0)}
    if "Wan" in type(pipe).__name__:
        given |= {"num_frames": 5, "negative_prompt": "d"}
    made: torch.Tensor = pipe(output="videos" if "num_frames" in given else "images", **given | more)
    return made


def load(pipe: Any, share: float, **options: Any) -> PipelineHandle:
    from headrace.adapters import diffusers

    budget = int(share * take_inventory(diffusers.Components(pipe)).num_bytes)
    handle = diffusers.load(pipe, budget, **options)[1]
    assert handle.plan.device_bytes <= budget
    return handle


def moved_by(handle: headrace.Handle, found: torch.Tensor, expected: torch.Tensor) -> int:
    assert_same_bits(found, expected)
    assert handle.stats().notes == (), "nothing was promoted"
    return handle.stats().bytes_moved


@pytest.fixture(autouse=True)
def _clean_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wan's blocks clean texts by a package that is not installed here."""
    from diffusers.modular_pipelines.wan import encoders

    monkeypatch.setattr(encoders, "ftfy", SimpleNamespace(fix_text=str), raising=False)


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_the_same_images_in_one_budget(name: str) -> None:
    pipe, twin = build(name), build(name)
    pipeline_class, expected = type(pipe), call(twin)
    if name == "flux":
        assert_same_bits(expected, pipelines.call(pipelines.build(name)))
    handle = load(pipe, 0.5)
    first = moved_by(handle, call(pipe), expected)
    assert first > 0
    missed = handle.stats().misses
    assert moved_by(handle, call(pipe), expected) > first
    assert handle.stats().misses == missed, "the order of the first call was learned"
    assert moved_by(handle, call(pipe, num_inference_steps=2), call(twin, num_inference_steps=2)) > 2 * first
    handle.remove()
    assert type(pipe) is pipeline_class
    assert_same_bits(call(pipe), expected)


def test_weights_in_8_bits() -> None:
    pipe, twin = (build("flux", torch.bfloat16) for _ in range(2))
    twin.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    handle = load(pipe, 0.5, storage_dtype=torch.float8_e4m3fn)
    assert moved_by(handle, call(pipe), call(twin)) > 0


def test_a_folder(tmp_path: Path) -> None:
    from headrace.adapters import diffusers

    twin = build("flux", torch.bfloat16)
    twin.save_pretrained(str(tmp_path))
    policy = headrace.Prefetch(params=[headrace.config.ALL_MODEL_PARAMS], mode="disk")
    pipe, handle = diffusers.load(tmp_path, policy, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    assert moved_by(handle, call(pipe), call(twin)) > 0
    assert handle.plan.reads_files


def test_pipelines_that_share_components() -> None:
    """The other one, modular or not, runs them by hand; neither is offloaded a second time."""
    from headrace.adapters import diffusers

    pipe, twin = build("flux"), pipelines.build("flux")
    expected = pipelines.call(twin)
    handle = load(pipe, 0.5)
    whole = pipelines._quiet(type(twin)(**{name: pipe.components.get(name) for name in twin.components}))
    other = filled(type(pipe).__mro__[1](blocks=pipe.blocks), pipe.components)
    for run in (lambda: call(pipe), lambda: pipelines.call(whole), lambda: call(other), lambda: call(pipe)):
        assert moved_by(handle, run(), expected) > 0
    for shares in (whole, other):
        with pytest.raises(StateError, match="is offloaded already"):
            diffusers.load(shares, "12MiB")
    with pytest.raises(ModelChangedError, match=r"handle\.remove"):
        whole.to(torch.bfloat16)
    assert moved_by(handle, call(pipe), expected) > 0
    handle.remove()
    assert moved_by(load(whole, 0.5), pipelines.call(whole), expected) > 0


def test_what_else_would_move_or_exchange_components() -> None:
    pipe = build("flux")
    expected, vae = call(pipe), pipe.vae
    handle = load(pipe, 0.5)
    with pytest.raises(StateError, match=r"to\(\) would move components"):
        pipe.to("cpu")
    pipe.unload_components("vae")
    with pytest.raises(StateError, match=r"vae of the pipeline was replaced.*handle\.remove\(\)"):
        call(pipe)
    pipe.update_components(vae=vae)
    assert moved_by(handle, call(pipe), expected) > 0
