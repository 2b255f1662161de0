"""A pipeline of vLLM over two of its nodes, without Ray: each stage is on one of them, with the bits of one process.

Outside the default run: `scripts/test-vllm-cpu`. Both nodes are on this machine, started by the command of a user:
``vllm serve --headless --nnodes 2 --node-rank 1`` for the second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_cpu_process import run_engine

pytest.importorskip("vllm", reason="vLLM is not installed: scripts/test-vllm-cpu runs this")
pytestmark = pytest.mark.slow


def engine(folder: Path, case: str) -> dict[str, Any]:
    return run_engine(folder, case, timeout_s=400, VLLM_HOST_IP="127.0.0.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    """In one process."""
    return engine(folder, "one")


@pytest.mark.parametrize("case", ["nodes", "nodes-budget"])
def test_each_stage_is_on_a_node_of_its_own(folder: Path, one: dict[str, Any], case: str) -> None:
    found = engine(folder, case)
    first, second = found["nodes"]
    assert [first["node"], second["node"]] == [0, 1]
    assert first["started_by"] != second["started_by"]
    assert found["tokens"] == one["tokens"]
    assert found["logprobs"] == one["logprobs"]
    for stats in found["ranks"]:
        assert stats["bytes_moved"] > 0
        assert stats["misses"] == 0
        assert (stats["planned_link_bytes_per_s"] is not None) == (case == "nodes-budget")
    layers = [{unit.split(".")[2] for unit in stats["units"]} for stats in found["ranks"]]
    assert layers[0].isdisjoint(layers[1])
    assert all(layers)
