"""Models in files for the tests on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from gpu_models import Stack
from safetensors.torch import save_file

from headrace import UVA, Budget, Prefetch, Rules

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
