"""headrace's plugin for SGLang with CUDA graphs, captured as SGLang captures them: bits, and copies beside compute."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

import sglang_stand_in as sglang
from engines import VOCABULARY, Layer

WIDTH = 512
KINDS = ("eager", "decode", "prefill", "decode", "decode", "eager", "prefill", "prefill", "eager", "decode")


def runner(monkeypatch: pytest.MonkeyPatch, asked: str | None, **fields: Any) -> Any:
    sglang.install(monkeypatch, [lambda: importlib.import_module("headrace.adapters.sglang").register()], **fields)
    monkeypatch.setattr(sglang, "WIDTH", WIDTH)
    monkeypatch.delenv("HEADRACE_SGLANG", raising=False)
    if asked is not None:
        monkeypatch.setenv("HEADRACE_SGLANG", asked)
    sglang.load_plugins()
    made = sys.modules["sglang.srt.model_executor.model_runner"].ModelRunner("cuda", lambda idx: Layer(WIDTH))
    made.init_cuda_graphs()
    return made


def outputs(made: Any, stream: torch.cuda.Stream) -> list[torch.Tensor]:
    """As SGLang's scheduler, on a stream of its own, and without waiting between two forwards."""
    found = []
    with torch.cuda.stream(stream):
        for seed, kind in enumerate(KINDS):
            ids = torch.randint(VOCABULARY, (2, 3), generator=torch.Generator().manual_seed(seed)).cuda()
            found.append(made.forward(sglang.batch(ids, kind)))
    stream.synchronize()
    return found


@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        ("1", {"offload_group_size": 4}),
        ("1", {"offload_group_size": 3, "offload_num_in_group": 2, "offload_prefetch_step": 2}),
        ("1", {"offload_group_size": 1, "offload_prefetch_step": 3}),
        ("1", {"cpu_offload_gb": 1}),
        ('{"device_memory": "40MB"}', {}),
    ],
    ids=["group", "two of three", "every layer", "limited", "budget"],
)
def test_same_bits_eager_and_in_graphs(monkeypatch: pytest.MonkeyPatch, asked: str, fields: dict[str, Any]) -> None:
    stream = torch.cuda.Stream()
    plain = outputs(runner(monkeypatch, None), stream)
    made = runner(monkeypatch, asked, **fields)
    before = made.headrace_offloader.metrics()
    for _ in range(3):
        for index, (found, expected) in enumerate(zip(outputs(made, stream), plain, strict=True)):
            assert torch.equal(found, expected), KINDS[index]
    stats = made.headrace_offloader.metrics()
    if "device_memory" in asked:  # which reads layers as small as these in place
        assert stats["uva_bytes"] > 10_000_000
        return
    assert stats["prefetched_bytes"] > 10_000_000
    # Replays of full graphs move bytes in captured copies, which the host does not count.
    assert stats["bytes_moved"] - before["bytes_moved"] > 9 * stats["prefetched_bytes"]
    assert stats["captured_copies"] > 0
