"""Five ordinary journeys through the package, in a process of their own; prints which functions they enter, as JSON.

They are: a group rule with two forwards, counters and the end; a budget; a budget with files; rules, a use outside of
the forward and a state dict; a plan that is printed. ``measures.py`` turns functions into lines.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType

import torch
from safetensors.torch import save_file
from torch import nn

import headrace
from headrace import Prefetch, Rules, make_plan, offload

SOURCE = str(Path(headrace.__file__).parent)
COPIES = ("ThreadLink.copy", "StreamLink.copy")


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, size: int = 256, count: int = 8) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block(size) for _ in range(count)), nn.Linear(size, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Trace:
    """Functions of headrace's that are called, in all threads, and how many there were at the first copy."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.first_copy: dict[str, int] | None = None

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & CO_OPTIMIZED and not code.co_name.startswith("<")
        if event == "call" and is_function and code.co_filename.startswith(SOURCE):
            self.codes.add(code)
            if self.first_copy is None and code.co_qualname in COPIES:
                files = {code.co_filename for code in self.codes}
                self.first_copy = {"files": len(files), "functions": len(self.codes)}


def traced(journey: Callable[[], object]) -> Trace:
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        journey()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return trace


@torch.inference_mode()
def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    state = {name: tensor.clone() for name, tensor in Model().state_dict().items()}
    folder, x = tempfile.mkdtemp(), torch.randn(2, 256)
    save_file(state, f"{folder}/model.safetensors")

    def model() -> Model:
        made = Model().eval()
        made.load_state_dict(state)
        return made

    def by_group() -> None:
        module = model()
        handle = offload(module, Prefetch(1, 1, 2))
        module(x), module(x), handle.stats()
        handle.remove()

    def by_budget(**options: str) -> None:
        module = model()
        handle = offload(module, "6MiB", **options)
        module(x)
        handle.remove()

    def by_rules() -> None:
        module = model()
        handle = offload(module, Rules([("up", "prefetch")]))
        module(x), module.layers[0].up.weight.sum(), module.state_dict()
        handle.remove()

    with_files = traced(lambda: by_budget(checkpoint=folder))
    others = (by_group, by_budget, by_rules, lambda: str(make_plan(model(), "6MiB")))
    codes = {code for trace in (with_files, *map(traced, others)) for code in trace.codes}
    functions = sorted({(code.co_filename, code.co_firstlineno) for code in codes})
    print(json.dumps({"functions": functions, "first copy": with_files.first_copy}))


if __name__ == "__main__":
    main()
