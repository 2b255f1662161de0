"""The promise: the public names are these, and importing them costs and changes nothing."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
import measures

SOURCE = Path(headrace.__file__).parent

PUBLIC = [
    "UVA", "BaseOffloader", "Budget", "DiskOptions", "Handle", "HeadraceError", "HeadraceWarning",
    "NoopOffloader", "OffloadConfig", "Plan", "Prefetch", "PrefetchOffloader", "Rules", "Speculation",
    "UVAOffloader", "Workload", "create_offloader", "decode_in_graphs", "expert_rows", "get_offloader",
    "make_plan", "offload", "set_offloader",
]  # fmt: skip

# Of docs/architecture.md, left to right: a room imports from rooms to its left, and from its own.
ROOMS = [
    ("errors",), ("forks", "formatting", "json_files", "sizes"), ("config",), ("flags",), ("stats", "ranks"),
    ("memory",), ("codec",), ("model",), ("plan",), ("kinds",), ("checkpoint",), ("experts",), ("stores",),
    ("transfer",), ("planning",), ("runtime",), ("lifetime",), ("offloaders",), ("api",), ("graphs",),
    ("adapters", "testing"), ("plan_model",), ("serving",), ("cli",), ("__main__",),
]  # fmt: skip
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_are_frozen() -> None:
    assert headrace.__all__ == PUBLIC
    assert all(hasattr(headrace, name) for name in PUBLIC)
    assert isinstance(headrace.__version__, str)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name: str) -> None:
    thing = getattr(headrace, name)
    assert (thing.__doc__ or "").strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["headrace", "headrace.offload"])
def test_help_begins_with_an_example_that_runs(name: str) -> None:
    documented = headrace if name == "headrace" else headrace.offload
    example = (inspect.getdoc(documented) or "").split("::\n", 1)[1]
    lines = itertools.takewhile(lambda line: not line or line.startswith("    "), example.splitlines())
    code = "import torch, headrace\n" + textwrap.dedent("\n".join(lines))
    assert re.search(r"moved in [1-9]\d* copies", run(code + "\nassert handle.stats().bytes_moved > 0")), code


FACTS = """
import json, logging, sys, threading, warnings
import numpy, safetensors, torch, torch.nn.modules.module as module

things = [torch, torch.nn.Module, torch.nn.Linear, torch.Tensor, torch.nn.functional, torch.cuda, module]

def state():
    return [
        [len(logging.root.handlers), logging.root.level, list(map(str, warnings.filters))],
        [{name: id(value) for name, value in vars(thing).items() if callable(value)} for thing in things],
        [len(module._global_forward_hooks), len(module._global_forward_pre_hooks), threading.active_count()],
    ]

before = state()
import headrace
print(json.dumps({
    "unchanged": [one == other for one, other in zip(before, state())],
    "modules": sorted({name.split(".")[0] for name in sys.modules}),
    "cuda": torch.cuda.is_initialized(),
}))
"""


@pytest.fixture(scope="module")
def facts() -> Any:
    return json.loads(run(FACTS))


class TestImport:
    @pytest.mark.slow
    def test_loads_no_extras(self, facts: Any) -> None:
        extras = {
            "transformers", "matplotlib", "accelerate", "fastapi", "openai", "prometheus_client", "tokenizers", "vllm",
        }  # fmt: skip
        assert extras.isdisjoint(facts["modules"])

    @pytest.mark.slow
    def test_opens_no_cuda_context(self, facts: Any) -> None:
        assert facts["cuda"] is False

    def test_configures_no_logging_patches_nothing_starts_no_thread(self, facts: Any) -> None:
        assert facts["unchanged"] == [True, True, True]

    @pytest.mark.slow
    def test_works_without_extras(self) -> None:
        """As on a machine that has only the core dependencies."""
        run(
            "import sys\n"
            "sys.modules.update(dict.fromkeys(['transformers', 'matplotlib', 'accelerate', 'fastapi', 'tokenizers']))\n"
            "import torch, headrace\n"
            "model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(3))).eval()\n"
            "handle = headrace.offload(model, headrace.Prefetch())\n"
            "with torch.no_grad(): model(torch.ones(1, 200))\n"
            "assert handle.stats().bytes_moved > 0\n"
        )


def statements(parent: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(parent):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield child
            yield from statements(child)


def imports_of(file: Path) -> set[str]:
    """Modules of headrace that ``file`` imports when it is imported itself, or when a function of it runs."""
    found: set[str] = set()
    for node in statements(measures.tree_of(file)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
            if node.module == "headrace":
                found.update(f"headrace.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            pytest.fail(f"{file}: relative import")
    return {name for name in found if name.split(".")[0] == "headrace"}


def room_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


FILES = sorted(file for file in SOURCE.rglob("*.py") if file != SOURCE / "__init__.py")


def test_imports_point_left_only() -> None:
    new = {room_of(file) for file in FILES} - RANK.keys()
    assert new == set(), "new rooms: give them a place in ROOMS and in docs/architecture.md"
    wrong = []
    for file, name in ((each, name) for each in FILES for name in imports_of(each)):
        room, parts = room_of(file), name.split(".")
        if len(parts) == 1 or parts[1] in headrace.__all__:
            if RANK[room] < RANK["adapters"]:  # others may use headrace as its users do
                wrong.append(f"{file} imports the package itself")
        elif parts[1] != room and RANK[parts[1]] >= RANK[room]:
            wrong.append(f"{file} imports {name}, which is not left of {room}")
    assert wrong == []


def others_loaded(root: str) -> set[str]:
    """Libraries that importing ``root`` loads, without headrace, Python's own, and what torch and numpy load."""
    theirs = {name for library in ("torch", "numpy") for name in measures.loaded_libraries(library)}
    theirs = theirs - {"torch", "numpy"} | {"headrace"} | set(sys.stdlib_module_names)
    return {name for name in measures.loaded_libraries(root) - theirs if not name.startswith("_")}


@pytest.mark.slow
def test_an_offload_loads_torch_and_what_torch_needs() -> None:
    assert others_loaded("headrace.api") <= {"torch", "safetensors", "numpy"}


@pytest.mark.parametrize("name", ["headrace.plan.plan", "headrace.plan.kinds", "headrace.plan.schedule"])
def test_plans_load_no_torch(name: str) -> None:
    assert {"torch", "rich"}.isdisjoint(measures.loaded_libraries(name))


@pytest.mark.slow
def test_the_solver_loads_numpy_alone() -> None:
    assert others_loaded("headrace.plan.build") <= {"numpy"}


def test_plans_need_no_torch_device_code() -> None:
    """Up to and including the plan everything is arithmetic on names and sizes."""
    pure = [file for file in FILES if room_of(file) in ("errors", "figures", "config", "plan")]
    assert pure
    for file in pure:
        text = file.read_text()
        assert "torch.cuda" not in text, file
        assert ".to(" not in text, file
