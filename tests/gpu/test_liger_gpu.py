"""liger-kernel's RMSNorm on a GPU: offloaded, in graphs or not, a model has the bits that it has resident with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.adapters.transformers import load
from headrace.adapters.transformers.liger import use_liger_norms
from headrace.testing import assert_same_bits
from moe_models import IDS, cached, gpt_oss, qwen

pytest.importorskip("liger_kernel", reason="needs liger-kernel")
pytestmark = pytest.mark.usefixtures("no_grad")
MOVING: dict[str, Any] = {
    "cached": lambda: cached(3),
    "prefetched": lambda: headrace.Prefetch(1, 1, 1),
    "norms": lambda: headrace.Prefetch(1, 1, 1, ["re:.*norm.weight"]),
    "in place": lambda: headrace.Rules([("experts", "uva")]),
}


def answers(model: Any) -> list[torch.Tensor]:
    ids = IDS.cuda()
    return [model(ids).logits, *(model(ids[:, at : at + 1]).logits for at in range(3))]


@pytest.mark.parametrize("way", MOVING)
@pytest.mark.parametrize("make", [qwen, gpt_oss])
def test_offloaded(make: Any, way: str) -> None:
    model = make().bfloat16().cuda()
    model.set_experts_implementation("headrace")
    plain = answers(model)
    use_liger_norms(model, torch.device("cuda"))
    expected = answers(model)
    torch.testing.assert_close(expected, plain, rtol=0.05, atol=0.05)
    with headrace.offload(model, MOVING[way]()) as handle:
        assert_same_bits(answers(model), expected)
        assert handle.stats().bytes_moved > 0 or handle.plan.uva_bytes > 0
    assert_same_bits(answers(model), expected)


@pytest.mark.parametrize("graphs", [True, False])
def test_loaded(graphs: bool, tmp_path: Path) -> None:
    qwen().bfloat16().save_pretrained(tmp_path)
    ids = IDS.cuda()
    found, moved = [], []
    for policy in ("1GiB", cached(3)):
        model, handle = load(tmp_path, policy, device="cuda", graphs=graphs, use_liger_kernel=True)
        with handle:
            text = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
            found.append([*answers(model), text])
            moved.append(handle.stats().bytes_moved)
    assert_same_bits(found[1], found[0])
    assert moved[0] == 0 < moved[1]
    plain, handle = load(tmp_path, "1GiB", device="cuda", graphs=graphs)
    with handle:
        torch.testing.assert_close(answers(plain), found[0][:-1], rtol=0.05, atol=0.05)
