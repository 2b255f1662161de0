"""Cached experts on a GPU: one range over two memories, kernels in captured graphs, and memory that is given back."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import headrace
from headrace import Rules
from headrace.memory.split_range import SplitRange
from headrace.plan.cached_experts import PIECE_BYTES
from headrace.testing import assert_same_bits

CUDA = torch.device("cuda", 0)


def test_a_range_over_two_memories() -> None:
    """What the host writes the device reads behind its own memory, and the other way round."""
    whole = SplitRange(2 * PIECE_BYTES, 3 * PIECE_BYTES, 8 * PIECE_BYTES, CUDA)
    assert whole.whole.numel() == 8 * PIECE_BYTES
    assert whole.host.is_cpu
    whole.host.copy_(torch.arange(whole.host.numel()) % 251)
    on_device = whole.whole[3 * PIECE_BYTES :]
    assert torch.equal(on_device.cpu(), whole.host)
    whole.whole[: 2 * PIECE_BYTES].copy_(on_device[: 2 * PIECE_BYTES])
    assert torch.equal(whole.whole[: 2 * PIECE_BYTES].cpu(), whole.host[: 2 * PIECE_BYTES])
    on_device.fill_(7)
    torch.cuda.synchronize()
    assert bool((whole.host == 7).all())


def test_memory_is_given_back() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info(CUDA)[0]
    whole = SplitRange(32 * PIECE_BYTES, 32 * PIECE_BYTES, 64 * PIECE_BYTES, CUDA)
    assert before - torch.cuda.mem_get_info(CUDA)[0] >= 32 * PIECE_BYTES
    view = whole.host[:1]
    del whole
    gc.collect()
    view.fill_(1)  # a view keeps both memories
    del view
    gc.collect()
    assert before - torch.cuda.mem_get_info(CUDA)[0] < 4 * PIECE_BYTES


class Experts(nn.Module):
    """Its ids are given, so that a test drives them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(16, 512, 384, dtype=torch.bfloat16), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(16, 3, dtype=torch.bfloat16), requires_grad=False)  # rows of 6 bytes

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        experts, rows = headrace.expert_rows(self, ids)
        weighed = experts.up[rows] * experts.scale[rows].sum(-1)[..., None, None]
        return torch.einsum("bkoi,bi->bko", weighed, x)


@pytest.mark.parametrize("num_slots", [1, 5, 16])
@torch.no_grad()
def test_bits_in_replays_and_between(num_slots: int) -> None:
    """Eager steps and replays of a graph share one cache, whatever each of them leaves in it."""
    model = Experts().to(CUDA).eval()
    steps = [torch.randint(0, 16, (2, 3), generator=torch.Generator().manual_seed(seed)) for seed in range(40)]
    x = torch.randn(2, 384, device=CUDA, dtype=torch.bfloat16)
    expected = [model(x, ids.to(CUDA)) for ids in steps]
    with headrace.offload(model, Rules([("up", "cache"), ("scale", "cache")], expert_slots=num_slots)) as handle:
        chosen = steps[0].to(CUDA)
        model(x, chosen)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x, chosen)
        begin = handle.stats().experts[0]
        found = []
        for number, ids in enumerate(steps):
            if number % 3 == 1:
                found.append(model(x, ids.to(CUDA)))
            else:
                chosen.copy_(ids)
                graph.replay()
                found.append(captured.clone())
        assert_same_bits(found, expected)
        end = handle.stats().experts[0]
        assert end.steps - begin.steps == len(steps)
        used = sum(len(ids.unique()) for ids in steps)
        assert sum(getattr(end, n) - getattr(begin, n) for n in ("hits", "fetched", "in_place")) == used
        assert end.fetched > begin.fetched
        assert (end.evicted > 0) == (num_slots < 16)
        del graph
    assert_same_bits([model(x, steps[0].to(CUDA))], expected[:1])


@torch.no_grad()
def test_no_step_waits_for_the_device() -> None:
    model = Experts().to(CUDA).eval()
    with headrace.offload(model, Rules([("up", "cache"), ("scale", "cache")], expert_slots=4)):
        x, ids = torch.randn(2, 384, device=CUDA, dtype=torch.bfloat16), torch.tensor([[1, 2], [3, 9]], device=CUDA)
        model(x, ids)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x, ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")
