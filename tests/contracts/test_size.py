"""The promise: the package stays small enough to read, and each measure of that goes down only.

A commit that raises a measure raises its bound here and says why in its body; one that lowers a measure by more than
``SLACK`` lowers the bound with it. ``python tests/support/measures.py`` prints the table.
"""

from __future__ import annotations

import subprocess

import pytest

import measures

BOUNDS = {
    "lines of src": 29767,
    "lines of the core": 17699,
    "files of src": 203,
    "lines of tests": 51879,
    "longest class": 351,
    "Prefetcher": 298,
    "branches on a kind of store": 4,
    "files that headrace.api loads": 36,
    "lines that headrace.api loads": 6624,
    "lines of the spine": 5283,
    "files of the spine": 53,
    "files to the first copy": 42,
    "functions to the first copy": 400,
}
# What a measure may lie below its bound, so that not every small change edits the table.
SLACK = dict.fromkeys(["lines of src", "lines of the core", "lines that headrace.api loads", "lines of the spine"], 60)
SLACK["lines of tests"] = 300

ROOT_NAMES = {
    ".ci", ".github", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md",
    "benchmarks", "docs", "mkdocs.yml", "pyproject.toml", "requirements.txt", "scripts", "setup.py", "src", "tests",
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, int]:
    return dict(measures.measures())


@pytest.mark.slow
def test_every_measure_is_at_its_bound(found: dict[str, int]) -> None:
    assert found.keys() == BOUNDS.keys()
    assert {name: value for name, value in found.items() if value > BOUNDS[name]} == {}, "more than the bound"
    low = {name: value for name, value in found.items() if value < BOUNDS[name] - SLACK.get(name, 2)}
    assert low == {}, "less than the bound: lower it"


@pytest.mark.slow
def test_no_file_of_the_spine_imports_a_wing_at_its_top() -> None:
    names = [each.relative_to(measures.SOURCE).as_posix() for each in measures.FILES]
    missing = {wing for wing in measures.WINGS if not any(wing in (name, name.partition("/")[0]) for name in names)}
    assert missing == set(), "no file, or room"
    spine = [name for name in measures.entered()["spine"] if not measures.is_wing(name)]
    assert len(spine) > 20
    opened = {name: measures.wings_opened_at_top(measures.SOURCE / name) for name in spine}
    assert {name: wings for name, wings in opened.items() if wings} == {}, "import it in the function that needs it"


def test_a_wing_that_a_function_imports_is_not_opened_at_the_top(tmp_path: measures.Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nfrom headrace.plan import candidates\nimport headrace.ranks.group\n"
        "if TYPE_CHECKING:\n    from headrace.plan.build import Planner\n"
        "def f():\n    from headrace.codec.layout import parts_of\n"
        "try:\n    from headrace.experts.rows import RowMap\nexcept ImportError:\n    pass\n"
    )
    assert measures.wings_opened_at_top(file) == {"plan/candidates.py", "ranks/group.py", "experts/rows.py"}


def test_a_line_of_code_is_no_comment_and_no_docstring(tmp_path: measures.Path) -> None:
    file = tmp_path / "file.py"
    file.write_text('"""A\nB"""\n\n# c\nx = """1\n2"""\n\n\ndef f():\n    """D."""\n    return x  # e\n')
    assert measures.code_lines(file) == {5, 6, 9, 11}


def test_the_root_has_only_names_that_are_listed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=measures.ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    assert {line.partition("/")[0] for line in listed.stdout.splitlines()} == ROOT_NAMES
