"""The vLLM that is installed has every name, parameter, field and call that headrace relies on, and no other door.

Doors are methods that reach the weights of a model from outside: a new one would read or write slots.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_names import differences
from headrace.adapters.vllm.interface import require_supported
from vllm_names import NAMES

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'headrace[vllm]'")

NOTE = Path(__file__).parents[2] / "docs" / "notes" / "vllm.md"
# Classes whose methods are called from outside, by file. Runners hold the model and run it: of them only what reads or
# writes weights by name counts.
WORKERS = {"v1/worker/gpu_worker.py": "Worker", "v1/worker/worker_base.py": "WorkerBase"}
RUNNERS = {"v1/worker/gpu/model_runner.py": "GPUModelRunner", "v1/worker/gpu_model_runner.py": "GPUModelRunner"}
BY_NAME = {
    *("named_parameters", "parameters", "named_buffers", "buffers", "state_dict", "load_state_dict", "load_weights"),
    *("reload_weights", "zero_weights", "compute_tensor_digests", "save_model", "weight_loader"),
}
OF_WORKERS = {*BY_NAME, "get_model", "sleep_mode_backend", "weight_transfer_engine", "self.model_runner.model"}


def test_the_interface_is_as_expected() -> None:
    assert differences(NAMES, vllm.__version__) == []


def test_the_version_is_supported() -> None:
    require_supported(vllm.__version__)


def doors() -> Iterator[str]:
    root = Path(vllm.__file__).parent
    for classes, words in ((WORKERS, OF_WORKERS), (RUNNERS, BY_NAME)):
        for file, name in classes.items():
            tree = ast.parse((root / file).read_text())
            (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
            for method in (node for node in found.body if isinstance(node, ast.FunctionDef)):
                nodes = list(ast.walk(method))
                used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
                used |= {node.id for node in nodes if isinstance(node, ast.Name)}
                used |= {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
                if not used.isdisjoint(words):
                    yield method.name


def test_every_door_to_the_weights_is_in_the_table_of_the_notes() -> None:
    found = set(doors())
    assert len(found) > 10
    rows = re.findall(r"^\| (`.*?) \|", NOTE.read_text(), re.MULTILINE)
    decided = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert found - decided == set()
