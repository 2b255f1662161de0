"""What ``scripts/test-wheel`` runs in an environment that holds the wheel: ``python installed.py [EXTRAS]``."""

from __future__ import annotations

import sys
import tempfile
from importlib import metadata
from pathlib import Path

import torch

import headrace


def check_core() -> None:
    home = Path(headrace.__file__)
    assert home.is_relative_to(sys.prefix), f"expected the installed package, found {home}"
    assert headrace.__version__ == metadata.version("headrace")
    assert (home.parent / "py.typed").exists()
    assert (home.parent / "experts/cpu/experts.c").exists()  # compiled where it runs

    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).eval()
    x = torch.randn(4, 256)
    with torch.inference_mode():
        expected = model(x)
        handle = headrace.offload(model, "1MiB")  # of 2 MiB of weights
        assert torch.equal(model(x), expected)
    assert handle.stats().bytes_moved > 0
    handle.remove()
    print(headrace.make_plan(model, "1MiB", machine="h200"))  # a data file of the wheel


def check_extras() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    import headrace.adapters.diffusers
    import headrace.serving.app
    from headrace.adapters.transformers import load

    assert headrace.adapters.diffusers.load is not load
    assert headrace.serving.app.__doc__
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    resident, ids = LlamaForCausalLM(config).eval(), torch.arange(8)[None]
    expected = resident.generate(ids, max_new_tokens=4, do_sample=False)
    with tempfile.TemporaryDirectory() as folder:
        resident.save_pretrained(folder)
        model, handle = load(folder, "1MiB", device="cpu")
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
        assert handle.stats().bytes_moved > 0
        handle.remove()


if __name__ == "__main__":
    check_core()
    if sys.argv[1:] == ["[serve,diffusers]"]:
        check_extras()
