"""The promise: models that take turns on a GPU answer as each does alone, and use no more of it than the larger one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.cli.demo_run import ModelSize, ensure_model
from headrace.config import Prefetch
from servers import Several, serving_several

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SIZES = {
    "a": ModelSize(hidden=1024, intermediate=4096, layers=12, heads=8, key_value_heads=4),
    "b": ModelSize(hidden=1536, intermediate=4096, layers=8, heads=12, key_value_heads=4),
}


def used_bytes() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def answer(served: Several, name: str) -> Any:
    """Long enough for steps that are captured, and replayed."""
    return served.complete("The sea is", model=name, max_tokens=24)["choices"][0]["text"]


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
@pytest.mark.parametrize("policy", [Prefetch(1, 1, 2), "8GiB"], ids=["two slots", "resident"])
def test_memory_and_answers(tmp_path: Path, policy: Any) -> None:
    folders = {name: tmp_path / name for name in SIZES}
    for name, folder in folders.items():
        ensure_model(folder, SIZES[name])
    expected, alone = {}, {}
    with serving_several(
        folders, policy, device="cuda"
    ) as served:  # takes the memory of kernels and cuBLAS, which stays
        for name in folders:
            answer(served, name)
    for name, folder in folders.items():
        with serving_several({name: folder}, policy, device="cuda") as served:
            expected[name], alone[name] = answer(served, name), used_bytes()
            served.of(name).release()
    with serving_several(folders, policy, device="cuda") as served:
        before = {name: served.of(name).counts()["moved_bytes"] for name in folders}
        found = []
        for _ in range(5):
            for name in ("b", "a"):
                assert answer(served, name) == expected[name]
                found.append(used_bytes())
        assert max(found) <= max(alone.values()) + 64 * MIB
        assert max(found[-2:]) <= max(found[2:4]) + 8 * MIB
        for name in folders:
            handle = served.of(name).handle
            assert handle is not None
            assert served.of(name).counts()["moved_bytes"] > before[name] or handle.plan.resident_bytes > 0
            served.send(f"/v1/models/{name}/park", {})
        assert used_bytes() <= min(found) - 64 * MIB
