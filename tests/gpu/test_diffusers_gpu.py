"""Pipelines of diffusers on a GPU: same bits in one budget, also with a compiled transformer."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headrace.errors import StateError
from headrace.model.inventory import take_inventory
from headrace.testing import boundaries

if importlib.util.find_spec("diffusers") is None or importlib.util.find_spec("peft") is None:
    pytest.skip("diffusers and peft are not installed", allow_module_level=True)

import pipelines

if TYPE_CHECKING:  # importing diffusers takes a second, also where this file is only collected
    from headrace.adapters.diffusers import PipelineHandle

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


def offloaded(pipe: Any, share: float) -> PipelineHandle:
    from headrace.adapters.diffusers import Components, load

    _, handle = load(pipe, int(share * take_inventory(Components(pipe)).num_bytes), device="cuda")
    return handle


@pytest.mark.parametrize("name", pipelines.CASES)
def test_the_same_images(name: str) -> None:
    pipe, twin = pipelines.build(name), pipelines.build(name).to("cuda")
    handle = offloaded(pipe, 0.4)
    misses = []
    for _ in range(3):
        assert torch.equal(pipelines.call(pipe), pipelines.call(twin))
        misses.append(handle.stats().misses)
    assert handle.stats().bytes_moved > 0
    assert misses[0] == misses[2]
    handle.remove()
    assert {tensor.device.type for tensor in pipe.vae.parameters()} == {"cpu"}


def test_compiled_blocks() -> None:
    """The reference has the same boundaries: without them a compiler fuses, and rounds, otherwise."""
    from headrace.adapters.diffusers import Components

    pipe, twin = pipelines.build("flux"), pipelines.build("flux").to("cuda")
    handle = offloaded(pipe, 0.4)
    for p in (pipe, twin):
        p.transformer.compile_repeated_blocks(fullgraph=True)
    with boundaries(Components(twin), handle.plan):
        expected = pipelines.call(twin)
    assert torch.equal(pipelines.call(pipe), expected)
    assert torch.equal(pipelines.call(pipe), expected)
    assert handle.stats().bytes_moved > 0


def test_graphs_are_refused() -> None:
    pipe = pipelines.build("flux")
    offloaded(pipe, 0.4)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), pytest.raises(StateError, match="a CUDA graph was being captured"), torch.cuda.graph(graph):
        pipe.text_encoder(torch.zeros(1, 8, dtype=torch.int64, device="cuda"))


@pytest.mark.parametrize("name", ["stable diffusion", "flux", "wan"])
def test_weights_that_are_cast_at_use(name: str) -> None:
    from headrace.adapters.diffusers import Components, load

    pipe, twin = (pipelines.build(name).to(torch.bfloat16) for _ in range(2))
    for part in ("unet", "transformer", "transformer_2"):
        if (model := getattr(twin, part, None)) is not None:
            model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    twin.to("cuda")
    budget = int(0.5 * take_inventory(Components(twin)).num_bytes)
    _, handle = load(pipe, budget, device="cuda", storage_dtype=torch.float8_e4m3fn)
    for _ in range(2):
        assert torch.equal(pipelines.call(pipe), pipelines.call(twin))
    assert handle.stats().bytes_moved > 0
