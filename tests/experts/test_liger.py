"""The promise: with ``use_liger_kernel`` a model has its resident bits in every way to offload it, and no other model
changes. Kernels run in Triton's interpreter.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from triton.runtime import interpreter

import headrace
from checkpoints import resident
from headrace.adapters.transformers import liger, load
from headrace.adapters.transformers.liger import use_liger_norms
from headrace.errors import OptionError
from headrace.testing import assert_same_bits
from moe_models import cached, gpt_oss, outputs, qwen

pytest.importorskip("liger_kernel", reason="needs liger-kernel")
CPU = torch.device("cpu")
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=100)).eval()


@pytest.fixture(autouse=True)
def whole_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler has and the interpreter lacks: floats as scalars of float32, and functions of libdevice."""
    as_before = interpreter._implicit_cvt

    def converted(arg: Any) -> Any:
        if not isinstance(arg, float):
            return as_before(arg)
        handle = interpreter.TensorHandle(np.array([arg], np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    monkeypatch.setattr(import_module("liger_kernel.ops.rms_norm"), "rsqrt", lambda x: 1 / tl.sqrt(x))


MODELS = {"qwen3_moe": (qwen, 9), "gpt_oss": (gpt_oss, 5), "llama": (llama, 7)}
MOVING: dict[str, Any] = {
    "cached": lambda: cached(3),
    "prefetch": lambda: headrace.Prefetch(1, 1, 1),
    "norms": lambda: headrace.Prefetch(1, 1, 1, ["re:.*norm.weight"]),
}


def names_of(model: Any) -> dict[str, Any]:
    """All that the modeling file of ``model`` holds, and what its classes do."""
    names = vars(import_module(type(model).__module__))
    return {**names, **{f"{at}.forward": each.forward for at, each in names.items() if hasattr(each, "forward")}}


@pytest.mark.parametrize("name", MODELS)
def test_resident_and_offloaded(name: str) -> None:
    make, norms = MODELS[name]
    model, other = make().bfloat16(), make().bfloat16()
    plain, names = outputs(other), names_of(model)
    use_liger_norms(model, CPU)
    assert names_of(model) == names
    assert sum(type(each).__name__.endswith("RMSNorm") and "forward" in vars(each) for each in model.modules()) == norms
    expected = outputs(model)
    assert_same_bits(outputs(other), plain)
    torch.testing.assert_close(expected, plain, rtol=0.05, atol=0.05)
    assert not all(map(torch.equal, expected, plain))
    for way, policy in MOVING.items():
        if way != "cached" or name != "llama":
            with headrace.offload(model, policy()) as handle:
                assert_same_bits(outputs(model), expected)
                assert handle.stats().bytes_moved > 0
    assert_same_bits(outputs(model), expected)


def test_load(tmp_path: Path) -> None:
    llama().bfloat16().save_pretrained(tmp_path)
    model = resident(tmp_path)
    plain = outputs(model)
    use_liger_norms(model, CPU)
    expected = outputs(model)
    loaded, handle = load(tmp_path, headrace.Prefetch(1, 1, 1), device="cpu", use_liger_kernel=True)
    with handle:
        assert_same_bits(outputs(loaded), expected)
        assert handle.stats().bytes_moved > 0
    loaded, handle = load(tmp_path, headrace.Prefetch(1, 1, 1), device="cpu")
    with handle:
        assert_same_bits(outputs(loaded), plain)


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    t5 = T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=9))
    with pytest.raises(OptionError, match="found 't5': leave it out"):
        use_liger_norms(t5, CPU)
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"found none: pip install 'headrace\[liger\]'"):
        use_liger_norms(llama(), CPU)
    monkeypatch.delenv("TRITON_INTERPRET")
    llama().save_pretrained(tmp_path)
    with pytest.raises(OptionError, match=r"expected a GPU, .* found cpu"):
        load(tmp_path, "1GiB", device="cpu", use_liger_kernel=True)
