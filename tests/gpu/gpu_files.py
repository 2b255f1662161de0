"""Models in files for the tests on a GPU, and graphs of their forwards."""

from __future__ import annotations

from pathlib import Path

import torch
from gpu_models import Stack
from safetensors.torch import save_file

from headrace import UVA, Budget, Handle, Prefetch, Rules

IDS = 8


POLICIES = {
    "units mod slots = 0": Prefetch(1, 1, 7, mode="disk"),
    "units mod slots != 0": Prefetch(1, 1, 3, mode="disk"),
    "two slots": Prefetch(1, 1, 2, mode="disk"),
    "one slot": Prefetch(1, 1, 1, mode="disk"),
    "everything": Prefetch(1, 1, 2, params=["ALL_MODEL_PARAMS"], mode="disk"),
    "table in place": Rules([("embed", "uva"), ("layers", "prefetch")], mode="disk"),
    "in place only": UVA(params=["embed", "up_proj"], mode="disk"),
    "budget": Budget("12MiB", mode="disk"),
}


def save(model: Stack, folder: Path) -> Path:
    save_file({name: tensor.cpu() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    return folder


def inputs(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 1000, (IDS,), device="cuda", generator=generator)


class Graph(torch.cuda.CUDAGraph):
    """With the input that its replays read: who has the graph has that memory."""

    ids: torch.Tensor


def captured(model: Stack, ids: torch.Tensor) -> tuple[Graph, torch.Tensor]:
    model(ids)
    graph = Graph()
    graph.ids = ids
    with torch.cuda.graph(graph):
        out = model(ids)
    return graph, out


def replay(graph: torch.cuda.CUDAGraph, times: int = 1) -> None:
    """And wait for the end."""
    for _ in range(times):
        graph.replay()
    torch.cuda.synchronize()


def require_bits_in_any_order(model: Stack, expected: list[torch.Tensor]) -> None:
    """Of eager forwards and of replays of two graphs; ``expected``: the outputs of ``inputs(0)`` to ``inputs(3)``."""
    for seed in range(4):
        assert torch.equal(model(inputs(seed)), expected[seed])
    ids = inputs()
    graphs = [captured(model, ids), captured(model, ids)]
    for seed in (0, 1, 2, 3, 1):
        ids.copy_(inputs(seed))
        graph, out = graphs[seed % 2]
        for _ in range(3):
            out.zero_()
            graph.replay()
            assert torch.equal(out, expected[seed])
        assert torch.equal(model(inputs(seed)), expected[seed])


def bytes_read_by_ten(graph: torch.cuda.CUDAGraph, handle: Handle) -> int:
    """Of files, by ten replays that ask for no piece out of turn."""
    replay(graph)
    before = handle.stats().staging
    replay(graph, 10)
    after = handle.stats().staging
    assert before is not None
    assert after is not None
    assert after.misses == before.misses
    return after.bytes_read - before.bytes_read
