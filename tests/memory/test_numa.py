"""The promise: readers stay near the GPU where the machine has more than one memory node, and are free otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.memory.system import local_cpus, parse_cpu_list

ADDRESS = "0000:1b:00.0"


def plant(root: Path, nodes: int = 2, numa_node: str = "1\n", cpus: str = "4-7\n") -> Path:
    for node in range(nodes):
        (root / f"devices/system/node/node{node}").mkdir(parents=True)
    (root / "devices/system/node/online").parent.mkdir(parents=True, exist_ok=True)
    (root / "devices/system/node/online").write_text("0-1\n")
    device = root / "bus/pci/devices" / ADDRESS
    device.mkdir(parents=True)
    (device / "numa_node").write_text(numa_node)
    (device / "local_cpulist").write_text(cpus)
    return root


@given(st.sets(st.integers(0, 300)))
def test_lists_are_read_back(cpus: set[int]) -> None:
    text = ",".join(str(cpu) for cpu in sorted(cpus))
    assert parse_cpu_list(text) == cpus


def test_ranges() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpu_list("\n") == frozenset()
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpu_list("0-x")


def test_the_local_ones_that_are_allowed(tmp_path: Path) -> None:
    assert local_cpus(ADDRESS, range(6), plant(tmp_path)) == {4, 5}


@pytest.mark.parametrize(
    "tree",
    [
        {"nodes": 1},
        {"numa_node": "-1\n"},
        {"numa_node": "what\n"},
        {"cpus": "\n"},
        {"cpus": "8-9\n"},  # none of ours
        {"cpus": "0-7\n"},  # all of ours
    ],
)
def test_nothing_to_choose(tmp_path: Path, tree: dict[str, object]) -> None:
    assert local_cpus(ADDRESS, range(8), plant(tmp_path, **tree)) is None  # type: ignore[arg-type]


def test_a_container_without_sysfs(tmp_path: Path) -> None:
    assert local_cpus(ADDRESS, range(8), tmp_path) is None
    assert local_cpus("0000:ff:00.0", range(8), plant(tmp_path)) is None
