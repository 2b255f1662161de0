"""What the package measures: lines of code, what imports load, branches on a kind of store, and what a journey enters.

``python tests/support/measures.py`` prints the table of ``tests/contracts/test_size.py``.

A line of code holds a token that is no comment and no part of a docstring (``tokenize``).
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "headrace"

# Rooms outside the core: engines, commands, and what is opened on demand.
OUTSIDE = {"adapters", "cli", "serving", "experts", "offloaders", "graphs", "codec"}
# Rooms and files that a function opens when it needs them; no file of the spine imports one at its top.
WINGS = OUTSIDE | {
    "checkpoint", "kinds", "lifetime", "ranks", "plan_model.py", "memory/pages.py", "memory/pinned.py",
    "memory/shared.py", "memory/split_range.py", "plan/alternatives.py", "plan/build.py", "plan/candidates.py",
    "plan/codec_choice.py", "plan/cpu_share.py", "plan/engines.py",
    "plan/cost_model.py", "plan/prediction.py", "plan/routing_traces.py", "plan/speculation.py",
    "plan/staging_ring.py", "plan/tables.py", "plan/units.py", "runtime/debug.py", "stores/checkpoint_files.py",
    "stores/coded_host.py", "stores/expert_files.py", "stores/expert_ranges.py", "stores/file_reads.py",
    "stores/no_bytes.py", "stores/peer.py", "stores/product_bits.py", "stores/rank_stores.py", "stores/sharded.py",
    "stores/shared_host.py", "transfer/cards.py", "transfer/cuda_stream.py", "transfer/decoded_units.py",
    "transfer/expert_reads.py", "transfer/expert_tiers.py", "transfer/link_rates.py", "transfer/machine_probe.py",
    "transfer/measuring.py",
    "transfer/ring.py", "transfer/ring_process.py", "transfer/ring_readers.py", "transfer/ring_streams.py",
    "transfer/sharded_copy.py",
}  # fmt: skip
# Values that tell kinds of store apart, and names of groups of them.
KINDS = {"cpu", "disk", "peer", "meta", "shm_cpu", "sharded_cpu", "sharded_gpu", "exp3"}
GROUPS = {"HOST_MODES", "SHARDED_MODES", "RANK_MODES", "CODES"}

_NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
)  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def code_lines(file: Path) -> frozenset[int]:
    """Numbers of the lines of code of ``file``."""
    lines: set[int] = set()
    with file.open("rb") as stream:
        for token in tokenize.tokenize(stream.readline):
            if token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree_of(file)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return frozenset(lines)


def size_of(file: Path, node: ast.AST | None = None) -> int:
    """Lines of code of ``file``, or of one function or class in it, without its decorators."""
    lines = code_lines(file)
    if node is None:
        return len(lines)
    return sum(node.lineno <= line <= node.end_lineno for line in lines)  # type: ignore[attr-defined]


FILES = sorted(SOURCE.rglob("*.py"))


def in_core(file: Path) -> bool:
    return file.relative_to(SOURCE).parts[0] not in OUTSIDE


def longest_class() -> tuple[int, str]:
    """Lines of code of the longest class, and its name."""
    classes = ((file, node) for file in FILES for node in ast.walk(tree_of(file)) if isinstance(node, ast.ClassDef))
    return max((size_of(file, node), node.name) for file, node in classes)


def class_size(name: str) -> int:
    """Lines of code of the class ``name``."""
    return next(
        size_of(file, node)
        for file in FILES
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.ClassDef) and node.name == name
    )


def kind_branches() -> dict[str, int]:
    """Comparisons with a kind of store in the core, by file."""
    core = [file for file in FILES if in_core(file)]
    found = {file.relative_to(SOURCE).as_posix(): sum(map(_asks_kind, ast.walk(tree_of(file)))) for file in core}
    return {name: count for name, count in found.items() if count}


def _asks_kind(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare):
        return False
    text = ast.unparse(node)
    if any(device in text for device in (".type", ".device", "device ==", "device !=")):
        return False  # "cpu" is the name of a device there
    parts = list(ast.walk(node))
    values = {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
    return bool(values & KINDS or {part.id for part in parts if isinstance(part, ast.Name)} & GROUPS)


# -- imports -----------------------------------------------------------------------------------------------------------


def imported_on_load(root: str) -> list[Path]:
    """Files with code that are loaded with the module ``root``, by a process that does just that."""
    code = (
        f"import sys, {root}; print(*(m.__file__ for n, m in sorted(sys.modules.items()) "
        f"if n.split('.')[0] == 'headrace' and getattr(m, '__file__', None)), sep='\\n')"
    )
    return [file for file in map(Path, _python("-c", code).splitlines()) if size_of(file)]


def loaded_libraries(root: str) -> set[str]:
    """Top-level names of all modules that are loaded with the module ``root``."""
    return set(_python("-c", f"import sys, {root}; print(*{{n.split('.')[0] for n in sys.modules}})").split())


def _python(*arguments: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE.parent), str(Path(__file__).parent)])}
    done = subprocess.run([sys.executable, *arguments], env=env, check=True, capture_output=True, text=True)
    return done.stdout


def is_wing(name: str) -> bool:
    """Whether the file ``name`` within the package is, or is in, one of ``WINGS``."""
    return not WINGS.isdisjoint({name, name.partition("/")[0]})


def wings_opened_at_top(file: Path) -> set[str]:
    """Files of ``WINGS`` that ``file`` imports when it is imported itself."""
    modules = {each.relative_to(SOURCE.parent).with_suffix("").as_posix().replace("/", "."): each for each in FILES}
    found = {name for name in _imports_at_top(tree_of(file)) if name in modules}
    names = {modules[name].relative_to(SOURCE).as_posix() for name in found}
    return {name for name in names if is_wing(name)}


def _imports_at_top(node: ast.AST) -> Iterator[str]:
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.Import):
            yield from (alias.name for alias in part.names)
        elif isinstance(part, ast.ImportFrom):
            yield part.module or ""
            yield from (f"{part.module}.{alias.name}" for alias in part.names)
        elif not (isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_checkers(part)):
            yield from _imports_at_top(part)


def _is_for_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


# -- journeys ----------------------------------------------------------------------------------------------------------


@cache
def entered() -> dict[str, dict[str, int]]:
    """What ``journeys.py`` enters: lines of code by file (``spine``), functions and files to the first copy."""
    told = json.loads(_python(str(Path(__file__).with_name("journeys.py"))))
    sizes: dict[tuple[str, int], int] = {}
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                sizes[str(file), first] = size_of(file, node) + len(node.decorator_list)
    spine: dict[str, int] = {}
    for name, line in told["functions"]:
        if (name, line) in sizes:
            key = Path(name).relative_to(SOURCE).as_posix()
            spine[key] = spine.get(key, 0) + sizes[name, line]
    return {"spine": spine, "first copy": told["first copy"]}


def measures() -> Iterator[tuple[str, int]]:
    """Each measure by its name in the table."""
    yield "lines of src", sum(map(size_of, FILES))
    yield "lines of the core", sum(size_of(file) for file in FILES if in_core(file))
    yield "files of src", len(FILES)
    yield "lines of tests", sum(size_of(file) for file in sorted((ROOT / "tests").rglob("*.py")))
    yield "longest class", longest_class()[0]
    yield "Prefetcher", class_size("Prefetcher")
    yield "branches on a kind of store", sum(kind_branches().values())
    loaded = imported_on_load("headrace.api")
    yield "files that headrace.api loads", len(loaded)
    yield "lines that headrace.api loads", sum(map(size_of, loaded))
    found = entered()
    yield "lines of the spine", sum(found["spine"].values())
    yield "files of the spine", len(found["spine"])
    yield "files to the first copy", found["first copy"]["files"]
    yield "functions to the first copy", found["first copy"]["functions"]


if __name__ == "__main__":
    for name, value in measures():
        print(f'    "{name}": {value},')
    print("longest:", longest_class(), "branches:", kind_branches())
    print("spine:", dict(sorted(entered()["spine"].items(), key=lambda item: -item[1])))
