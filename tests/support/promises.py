"""Writes ``tests/README.md``: each test file with its promise, the first paragraph of its docstring.

``python tests/support/promises.py`` refreshes it.
"""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
README = TESTS / "README.md"
HEAD = """# Tests: where each promise is kept

One file per promise. `scripts/test` runs all folders but `gpu`, whose tests skip themselves without a CUDA device
(`scripts/test-gpu` runs them). What several tests share is in `support/`; no test imports another test.
This page is generated from the docstrings: `python tests/support/promises.py`.
"""


def map_of_promises() -> str:
    """The text of ``tests/README.md``."""
    folders = sorted({file.parent for file in TESTS.rglob("test_*.py")})
    return HEAD + "".join(_table(folder) for folder in folders)


def _table(folder: Path) -> str:
    rows = [
        f"| [{file.stem}]({file.relative_to(TESTS)}) | {_promise(file)} |" for file in sorted(folder.glob("test_*.py"))
    ]
    return "\n".join(["", f"## {folder.relative_to(TESTS)}", "", "| file | promise |", "|---|---|", *rows, ""])


def _promise(file: Path) -> str:
    docstring = re.match(r'"""(.*?)(\n\n|""")', file.read_text(), re.DOTALL)
    text = "" if docstring is None else docstring[1].strip().replace("\n", " ")
    text = text.removeprefix("The promise: ").replace("|", "\\|")
    return text[:1].upper() + text[1:]


if __name__ == "__main__":
    README.write_text(map_of_promises())
