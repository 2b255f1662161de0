"""Quantised checkpoints on a GPU: the bits of their library's own model, loaded and offloaded, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers.integrations import hub_kernels
from transformers.quantizers import HfQuantizer, quantizer_mxfp4

import headrace
import local_mxfp4_kernels
import plain_fp8
import quantised_checkpoints
from headrace.adapters.transformers import load
from headrace.errors import HeadraceError
from quantised_checkpoints import FORMATS, IDS, MOVES, OSS, SIZE, by_load, by_offload, logits, resident

pytestmark = pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")

REFUSED = {(by_load, "bitsandbytes int8"), (by_offload, "bitsandbytes int8")}
IS_OLD = not hasattr(HfQuantizer, "get_new_dtype")
# An old transformers leaves them in a cache of compressed-tensors also where it has dequantised them.
CACHED = [name for name in FORMATS if name.startswith("compressed-tensors") and (IS_OLD or "dequ" not in name)]
REFUSED |= {(by_offload, name) for name in CACHED}
# Kernels of GPTQModel that need no compiler, and their class. Left to itself it takes Marlin, and compiles it.
KERNELS = [
    ("GPTQ int4", "torch", "TorchLinear"),
    ("GPTQ int4", "triton", "TritonV2Linear"),
    ("GPTQ int4, in another order", "torch", "TorchLinear"),
    ("GPTQ int4, in another order", "triton", "TritonV2Linear"),
    ("GPTQ int8", "torch", "TorchLinear"),
    ("GPTQ int8", "triton", "TritonV2Linear"),
    ("AWQ int4", "torch_awq", "AwqTorchLinear"),
    ("AWQ int4", "gemm_triton", "AwqGEMMTritonLinear"),
]


@pytest.mark.parametrize("way", [by_load, by_offload])
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_library(name: str, way: Callable[[Path, str], tuple[bool, int]], tmp_path: Path) -> None:
    if not FORMATS[name].is_here:
        pytest.skip(f"{FORMATS[name].package} is not installed")
    transformers.logging.set_verbosity_error()
    plain_fp8.install()
    folder = FORMATS[name].write(tmp_path)
    is_old = way is by_load and IS_OLD
    if is_old or (way, name) in REFUSED:
        with pytest.raises(HeadraceError, match="transformers 5.23 or newer" if is_old else "expected weights that"):
            way(folder, "cuda")
        return
    equal, moved = way(folder, "cuda")
    assert equal
    assert moved > 0


@pytest.mark.skipif(IS_OLD, reason="load() needs transformers 5.23 or newer")
@pytest.mark.parametrize("way", [by_load, by_offload])
@pytest.mark.parametrize(("name", "backend", "kernel"), KERNELS)
def test_kernels_of_gptqmodel(
    name: str, backend: str, kernel: str, way: Callable[[Path, str], tuple[bool, int]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not FORMATS[name].is_here:
        pytest.skip(f"{FORMATS[name].package} is not installed")
    # Up to 128 rows AWQ's Triton kernel adds up with atomics, in any order: it does not repeat its own bits.
    monkeypatch.setattr(quantised_checkpoints, "IDS", torch.arange(192).remainder(128).reshape(2, 96))
    form = FORMATS[name]
    folder = replace(form, config={**(form.config or {}), "backend": backend}).write(tmp_path)
    assert type(resident(folder, "cuda").get_submodule("model.layers.1.mlp.up_proj")).__name__ == kernel
    equal, moved = way(folder, "cuda")
    assert equal
    assert moved > 0


@pytest.mark.skipif(IS_OLD, reason="load() needs transformers 5.23 or newer")
@pytest.mark.parametrize(
    ("name", "backend"),
    [("GPTQ int4", "triton"), ("AWQ int4", "torch_awq"), ("GPTQ int4", "marlin"), ("AWQ int4", "marlin")],
)
def test_packed_weights_that_nothing_names(name: str, backend: str, tmp_path: Path) -> None:
    """Within a budget, and read in place: GPTQModel holds them in buffers, which stay by default in other modules."""
    form = FORMATS[name]
    if not form.is_here:
        pytest.skip(f"{form.package} is not installed")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}
    folder = replace(form, config={**(form.config or {}), "backend": backend}, sizes=sizes).write(tmp_path)
    expected = logits(resident(folder, "cuda"))
    num_bytes = headrace.make_plan(folder, None, device="cuda").device_bytes
    model, handle = load(folder, headrace.Budget(num_bytes * 2 // 3, mode="cpu"), device="cuda")
    with handle:
        assert torch.equal(logits(model), expected)
        assert handle.stats().moved_by_store["cpu"] > 0
    live = resident(folder, "cuda")
    with headrace.offload(live, headrace.UVA()) as handle:
        assert torch.equal(logits(live), expected)
        assert handle.plan.mechanism_of("model.layers.3.mlp.up_proj.qweight") == "uva"


CAPTURED: list[tuple[str, str | None]] = [
    *((name, None) for name, form in FORMATS.items() if form.package != "gptqmodel" and name != "bitsandbytes int8"),
    *((name, backend) for name, backend, _ in KERNELS if backend != "gemm_triton"),
]
# Formats whose resident decoding step cannot be captured either, and why.
EAGER = dict.fromkeys(
    ("compressed-tensors fp8, channels", "compressed-tensors int8", "AWQ int4"),
    "its library copies a CPU tensor that is not pinned, in each forward",
)


@pytest.mark.skipif(IS_OLD, reason="load() needs transformers 5.23 or newer")
@pytest.mark.parametrize(("name", "backend"), CAPTURED)
def test_decodes_in_graphs(name: str, backend: str | None, tmp_path: Path) -> None:
    """As the resident model does in graphs, where its kernels can be captured."""
    form = FORMATS[name]
    if not form.is_here:
        pytest.skip(f"{form.package} is not installed")
    plain_fp8.install()
    if backend is not None:
        form = replace(form, config={**(form.config or {}), "backend": backend})
    folder = form.write(tmp_path)
    expected, replays = _decoded(resident(folder, "cuda"))
    model, handle = load(folder, MOVES, device="cuda")
    with handle:
        found, own_replays = _decoded(model)
        assert torch.equal(found, expected)
        assert sum(handle.stats().moved_by_store.values()) > 0
    assert (replays > 0, own_replays > 0) == (name not in EAGER,) * 2


def _decoded(model: transformers.PreTrainedModel) -> tuple[torch.Tensor, int]:
    """Logits of two greedy calls, and how many of their steps were replayed."""
    graphs = headrace.decode_in_graphs(model)
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    ids = IDS[:1].cuda()
    outputs = [model.generate(ids, eos_token_id=None, pad_token_id=0, **options) for _ in range(2)]
    graphs.remove()
    return torch.cat([logit for output in outputs for logit in output.logits]), graphs.replays


@pytest.fixture
def mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that transformers runs with its MXFP4 kernels."""
    if (why := local_mxfp4_kernels.missing()) is not None:
        pytest.skip(why)
    for module, attr in [(hub_kernels, "get_kernel"), (quantizer_mxfp4, "is_kernels_available")]:
        monkeypatch.setattr(module, attr, getattr(module, attr))  # so that what is installed ends with the test
    local_mxfp4_kernels.install()
    sizes = OSS | {"hidden_size": 256, "intermediate_size": 256, "num_local_experts": 16}
    folder = replace(FORMATS["MXFP4, experts"], sizes=sizes).write(tmp_path)
    model = resident(folder, "cuda")
    assert type(model.get_submodule("model.layers.1.mlp.experts")).__name__ == "Mxfp4GptOssExperts"
    assert logits(model).isfinite().all()
    assert torch.equal(logits(model), logits(model))
    return folder


def test_kernels_of_mxfp4(mxfp4: Path) -> None:
    """A live model is refused before anything moves: what it runs on are objects."""
    with pytest.raises(HeadraceError, match="keeps its weights in objects of triton_kernels"):
        by_offload(mxfp4, "cuda")
    if IS_OLD:
        with pytest.raises(HeadraceError, match=r"5\.23 or newer"):
            by_load(mxfp4, "cuda")
        return
    equal, moved = by_load(mxfp4, "cuda")
    assert equal
    assert moved > 0


@pytest.mark.skipif(IS_OLD, reason="load() needs transformers 5.23 or newer")
@pytest.mark.parametrize("how", ["cache", "uva"])
def test_experts_of_mxfp4(mxfp4: Path, how: headrace.config.Mechanism, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached or read in place, also in graphs; with the cache each call compares the rows that a kernel has read."""
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    expected, (decoded, replays) = logits(resident(mxfp4, "cuda")), _decoded(resident(mxfp4, "cuda"))
    policy = headrace.Rules([("experts", how)], expert_slots=6 if how == "cache" else None)
    model, handle = load(mxfp4, policy, device="cuda")
    with handle:
        assert torch.equal(logits(model), expected)
        found, own_replays = _decoded(model)
        assert torch.equal(found, decoded)
        assert (own_replays > 0) == (replays > 0)
        assert handle.plan.uva_bytes > 0 or all(layer.fetched > 0 for layer in handle.stats().experts)
        assert len(handle.stats().experts) == (SIZE["num_hidden_layers"] if how == "cache" else 0)
