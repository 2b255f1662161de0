"""The promise: private names of torch, which any release may change, are used in one file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from measures import tree_of

SOURCE = Path(__file__).resolve().parents[2] / "src" / "headrace"
HOME = "model/torch_private.py"
PRIVATE = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*")

# Mere types and tools that torch's own documentation names; by file what one alone needs.
ALLOWED = {"torch._ops.OpOverload", "torch.utils._pytree", "torch.utils._python_dispatch"}
ALLOWED_IN = {
    "memory/shared.py": {"torch.distributed._symmetric_memory", "torch._C._distributed_c10d"},  # imported on demand
    "model/memory_profile.py": {"torch.fx.experimental._config"},  # switches of fake tensors
    "model/tracing.py": {"torch._dynamo.symbolic_convert"},  # in the same way: it imports all of the compiler
    "runtime/hooks.py": {"torch._dynamo.trace_rules"},  # asked for by its name in sys.modules
    "transfer/sharded_copy.py": {"torch._assert_async"},
    "graphs/decoding.py": {"torch._foreach_copy_"},
}


def dotted(node: ast.AST) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def names_in(tree: ast.AST) -> Iterator[str]:
    """Dotted names that begin with ``torch``: attributes, imports, and strings that are nothing else."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield dotted(node)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def private_names(tree: ast.AST) -> set[str]:
    """Without the operators of ``torch.ops``, whose names are part of graphs and files."""
    found = (name for name in names_in(tree) if PRIVATE.fullmatch(name))
    return {name for name in found if not name.startswith("torch.ops.")}


def is_allowed(name: str, allowed: set[str]) -> bool:
    return any(f"{name}.".startswith(f"{each}.") for each in allowed)


def test_no_other_file_uses_one() -> None:
    found = {file.relative_to(SOURCE).as_posix(): private_names(tree_of(file)) for file in SOURCE.rglob("*.py")}
    assert len(found.pop(HOME)) > 10
    wrong = {
        file: left
        for file, names in found.items()
        if (left := {name for name in names if not is_allowed(name, ALLOWED | ALLOWED_IN.get(file, set()))})
    }
    assert wrong == {}, f"give it a name in {HOME} that says what it does"
    for file, allowed in ALLOWED_IN.items():
        assert {each for each in allowed if any(is_allowed(name, {each}) for name in found[file])} == allowed, file


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._storage_Use_Count(1)",
        "torch.Tensor._make_subclass(a, b)",
        "import torch._dynamo.config",
        "from torch._C import _dispatch_keys",
        "from torch import _neg_view",
        "sys.modules.get('torch._inductor.config')",
    ],
)
def test_a_private_name_is_found(line: str) -> None:
    assert private_names(ast.parse(line))


@pytest.mark.parametrize("line", ["torch.ops.aten._embedding_bag", "torch.__version__", "x._version", "'say torch._C'"])
def test_another_is_not(line: str) -> None:
    assert private_names(ast.parse(line)) == set()
