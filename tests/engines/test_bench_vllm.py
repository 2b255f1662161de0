"""The promise: benchmarks inside vLLM fill weights, choose experts and compare outputs as they say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import driven_routing
import seeded_models
import vllm_offload
from vllm_offload import CASES, LOADS, SHAPES

Fill = Callable[..., list[torch.Tensor]]


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Fill:
    """A start of vLLM's loader, which fills parameters of these names and dtypes one after another."""
    loader: Any = ModuleType("vllm.model_executor.model_loader")
    loader.dummy_loader, loader.weight_utils = ModuleType("dummy_loader"), ModuleType("weight_utils")
    for name in ("vllm", "vllm.model_executor", loader.__name__):
        monkeypatch.setitem(sys.modules, name, loader)

    def start(*wanted: tuple[str, torch.dtype]) -> list[torch.Tensor]:
        seeded_models.use_seeded_weights()
        made = [torch.zeros(8, 256, dtype=dtype) for _, dtype in wanted]
        for (name, _), weight in zip(wanted, made, strict=True):
            loader.dummy_loader.initialize_single_dummy_weight(weight, name=name)
        return made

    return start


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32])
def test_weights_differ_by_layer_and_not_by_start(fill: Fill, dtype: torch.dtype) -> None:
    wanted = [(f"layers.{layer}.weight", dtype) for layer in range(2)]
    first, second = fill(*wanted), fill(*wanted)
    assert not torch.equal(first[0].view(torch.uint8), first[1].view(torch.uint8))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("packed", [torch.float8_e4m3fn, torch.int8])
def test_a_weight_of_eight_bits_is_as_large_as_one_of_sixteen(fill: Fill, packed: torch.dtype) -> None:
    weight, scale = fill(("weight", packed), ("weight_scale", torch.float32))
    assert 0.01 < (weight.float() * scale).std() < 0.1


def test_driven_routers_choose_by_the_bits_of_a_token_and_some_experts_more_often() -> None:
    tokens = torch.randn(2000, 64, dtype=torch.bfloat16)
    chosen = driven_routing.choices(tokens, 16, 4, 1.0)
    assert torch.equal(driven_routing.choices(tokens[7:9].clone(), 16, 4, 1.0), chosen[7:9])
    assert all(len(set(row)) == 4 for row in chosen.tolist())
    counts = chosen.flatten().bincount(minlength=16)
    ranks = torch.arange(16) * 37 % 16
    assert counts[ranks.argmin()] == counts.max()
    assert counts.max() > 4 * counts.min() > 0


def test_replayed_routers_take_one_step_after_another() -> None:
    table = torch.arange(3 * 2 * 4).view(3, 2, 4)
    replay = driven_routing.Replay(num_layers=2, num_steps=3, top_k=4, device="cpu")
    replay.begin(table)
    for step in (0, 1, 2, 0):
        for begins_at in (0, 1):  # of each layer
            weights, ids = replay.route(3, torch.int64)
            assert torch.equal(ids, table[(step + begins_at) % 3][[0, 1, 0]])
            assert torch.equal(weights, torch.full((3, 4), 0.25))


def test_every_case_has_a_shape_and_loads() -> None:
    assert {shape for shape, _, _ in CASES.values()} == SHAPES.keys() == LOADS.keys()


def test_outputs_are_compared_to_the_last_bit() -> None:
    row = {"tokens": [[1, 2], [3, 4]], "logprobs": [[-0.5, -1.0], [-2.0, -3.0]]}
    assert vllm_offload.compared(row, row).startswith("2 of 2 sequences equal, 4 of 4 log-probabilities")
    other = {"tokens": [[1, 2], [3, 5]], "logprobs": [[-0.5, -1.0], [-2.0, -3.25]]}
    assert "1 of 2 sequences equal, 3 of 4" in vllm_offload.compared(row, other)
    assert "worst difference 2.5e-01" in vllm_offload.compared(row, other)


@pytest.mark.slow
def test_an_engine_that_fails_or_takes_too_long_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    for then, said in (("exit 0", ""), ("exit 3", "case: exit 3, see"), ("exec sleep 60", "ended after 1 s, see")):
        command = ["/bin/sh", "-c", f"echo why; {then}"]
        assert vllm_offload.run_logged("case", command, {}, log, 0.9 if "sleep" in then else 60) == (not said)
        assert said in capsys.readouterr().out
        assert log.read_text() == "why\n"
