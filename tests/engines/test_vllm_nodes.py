"""A pipeline of vLLM over two of its nodes, without Ray: each stage is on one of them, with the bits of one process.

Outside the default run: `scripts/test-vllm-cpu`. Both nodes are on this machine, started by the command of a user:
``vllm serve --headless --nnodes 2 --node-rank 1`` for the second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "support"
pytest.importorskip("vllm", reason="vLLM is not installed: scripts/test-vllm-cpu runs this")
pytestmark = pytest.mark.slow


def engine(folder: Path, case: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT / "benchmarks", HERE, HERE / "without_operators"))),
    }
    command = [sys.executable, str(HERE / "vllm_cpu_engine.py"), str(folder), case, "eager"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / f"{case}-eager.json").read_text())
    return found


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
