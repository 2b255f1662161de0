"""The promise: a newcomer finds what the docs name, and the modules of the package form no circles."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from measures import tree_of
from promises import README, map_of_promises

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "headrace"
FILES = sorted(SOURCE.rglob("*.py"))
ARCHITECTURE = ROOT / "docs" / "architecture.md"
MAX_WORDS = 1200

LINK = re.compile(r"\[`(?P<name>[\w.]+)(?:\(\))?`\]\(\.\./(?P<path>src/[\w/]+\.py)\)")


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


BY_NAME = ("import_module", "__import__")
MODULES = {module_name(file): file for file in FILES}


def imported_by(file: Path) -> set[str]:
    """Modules of the package that ``file`` imports, inside functions, for type checkers and by name, too."""
    found = set()
    for node in ast.walk(tree_of(file)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in BY_NAME:
            names = [str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)]
        for name in names:
            while name and name not in MODULES:
                name = name.rpartition(".")[0]
            if name:
                found.add(name)
    return found - {module_name(file)}


def circles() -> Iterator[list[str]]:
    """Groups of modules that import one another: strongly connected components of more than one (Tarjan 1972)."""
    edges = {name: imported_by(file) for name, file in MODULES.items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> Iterator[list[str]]:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in edges[name]:
            if other not in index:
                yield from visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                yield group

    for name in edges:
        if name not in index:
            yield from visit(name)


def test_no_import_circles() -> None:
    assert list(circles()) == []


def test_one_name_one_module() -> None:
    counts = Counter(file.name for file in FILES if file.name not in ("__init__.py", "__main__.py"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_test_imports_another_test() -> None:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    assert [str(file) for file in tests if re.search(r"^\s*(from|import) test_", file.read_text(), re.M)] == []


def test_the_map_of_promises_is_current() -> None:
    assert README.read_text() == map_of_promises(), "run: python tests/support/promises.py"


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", README, *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if heading and file.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, target


@pytest.fixture(scope="module")
def architecture() -> str:
    return ARCHITECTURE.read_text()


class TestArchitecture:
    def test_is_short(self, architecture: str) -> None:
        assert len(architecture.split()) <= MAX_WORDS

    def test_links_lead_to_what_they_name(self, architecture: str) -> None:
        links = [(match["name"], match["path"]) for match in LINK.finditer(architecture)]
        assert len(links) >= 15
        for name, path in links:
            defined = names_in(ROOT / path)
            assert name in defined, f"{path} defines no {name}"

    def test_every_link_has_that_form(self, architecture: str) -> None:
        """A link to a file without a name in it would not be checked."""
        assert len(re.findall(r"\]\(\.\./src/[^)]*\.py\)", architecture)) == len(LINK.findall(architecture))

    def test_names_every_room(self, architecture: str) -> None:
        rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
        assert {room for room in rooms if f"`{room}/`" not in architecture} == set()


def names_in(file: Path) -> set[str]:
    """Functions, classes and methods (``Class.method``) that ``file`` defines."""
    found = set()
    for node in tree_of(file).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found.update(f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef))
    return found
