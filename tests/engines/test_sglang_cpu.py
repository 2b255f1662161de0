"""SGLang itself, on a CPU: same tokens and log-probabilities with and without headrace, and bytes moved.

Outside the default run: `scripts/test-sglang-cpu` installs what it takes. SGLang's graphs need a GPU; everything
else of the plugin runs here as it does there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sglang_cpu_engine
from engine_names import differences
from headrace.adapters.sglang.keys import REFUSED
from sglang_names import NAMES

sglang = pytest.importorskip("sglang", reason="SGLang is not installed: scripts/test-sglang-cpu runs this")
pytestmark = pytest.mark.slow

Engine = Callable[[str], dict[str, Any]]
MODULES = ["headrace", "headrace.adapters", "headrace.adapters.sglang"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


def run(folder: Path, case: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(sglang_cpu_engine.__file__)), str(folder), case]
    environment = sglang_cpu_engine.environment(folder, case)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    """What an engine of this case gives; each is run once."""

    def given(case: str) -> dict[str, Any]:
        kept = folder / f"{case}.json"
        if not kept.exists():
            done = run(folder, case)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        found: dict[str, Any] = json.loads(kept.read_text())
        return found

    return given


def test_the_interface_is_as_expected() -> None:
    assert differences(NAMES, sglang.__version__) == []


# All fields of SGLang's configuration that are read.
FIELDS = (
    "cpu_offload_gb",
    "offload_group_size",
    "offload_num_in_group",
    "offload_prefetch_step",
    "offload_mode",
    "cuda_graph_config",
    "tp_size",
    "dp_size",
    "nnodes",
    *(refusal.field for refusal in REFUSED),
)


def test_every_field_that_is_read_is_one_of_sglangs() -> None:
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.server_args import ServerArgs

    assert set(FIELDS) <= set(namespace_of(ServerArgs))


@pytest.mark.parametrize("case", ["prefetch", "several", "named", "limited", "budget", "moe-prefetch"])
def test_same_log_probabilities_as_resident(engine: Engine, case: str) -> None:
    resident, offloaded = engine("moe-resident" if case.startswith("moe") else "resident"), engine(case)
    assert offloaded["tokens"] == resident["tokens"]
    assert offloaded["logprobs"] == resident["logprobs"]
    stats = offloaded["stats"]
    assert stats["prefetched_bytes"] > 1_000_000
    assert stats["bytes_moved"] >= 12 * stats["prefetched_bytes"]


def test_without_the_variable_nothing_is_imported_or_changed(engine: Engine) -> None:
    found = engine("resident")
    assert found["imported"] == MODULES
    assert found["stats"] is None


@pytest.mark.parametrize("case", sglang_cpu_engine.UPDATED)
def test_new_weights_are_those_of_a_fresh_engine(engine: Engine, case: str) -> None:
    """By disk, and by tensors in a session; after an error the weights are the old ones."""
    found, fresh = engine(case), engine("fresh")
    old, new = ({key: each[key] for key in ("tokens", "logprobs")} for each in (found, fresh))
    assert old["logprobs"] != new["logprobs"]
    for name, expected in (("no folder", old), ("wrong", old), ("disk", new), ("tensors", old)):
        assert {key: found[name][key] for key in old} == expected, name
        assert found[name]["answer"][0] == (name in ("disk", "tensors"))
    assert "the weights are the ones from before" in found["no folder"]["answer"][1]
    assert "nothing was changed, because rank 0 has failed" in found["wrong"]["answer"][1]
    assert found["in a session"] == new, "until its end it answers as before"


def test_what_would_read_slots_or_free_them_is_refused_and_the_server_goes_on(engine: Engine) -> None:
    found = engine("prefetch")
    assert found["checked"][0] is False
    assert "headrace offloads this model" in found["checked"][1]
    assert found["read"] is None
    assert "release_memory_occupation is refused: it needs --enable-memory-saver" in found["released"]
    assert found["again"]["tokens"] == found["tokens"]


def test_saved_weights_are_the_true_ones(engine: Engine, folder: Path) -> None:
    from safetensors.torch import load_file

    assert engine("resident")["again"]
    assert engine("prefetch")["stats"]["bytes_moved"] > 0
    saved = [
        {
            name: weight
            for file in sorted((folder / f"{case}-saved").glob("*.safetensors"))
            for name, weight in load_file(file).items()
        }
        for case in ("resident", "prefetch")
    ]
    assert saved[0].keys() == saved[1].keys()
    assert all(weight.equal(saved[1][name]) for name, weight in saved[0].items())


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("invalid", "HEADRACE_SGLANG.device_memroy is unknown: expected one of device_memory"),
        ("lora", "--enable-lora replaces linear modules after their weights have left the device"),
    ],
)
def test_refusals_end_the_server_before_the_model_loads(folder: Path, case: str, message: str) -> None:
    done = run(folder, case)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert "Load weight begin" not in done.stdout + done.stderr


def test_nothing_to_do_is_said(folder: Path) -> None:
    done = run(folder, "nothing")
    assert done.returncode == 0
    assert "headrace has nothing to do" in done.stdout + done.stderr
