"""The promise: the Python code of the quickstart and of the guide for plain modules runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["quickstart.md", "guides/module.md"])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert len(blocks) >= 2
    code = "\n".join(blocks) + "\nassert handle.stats().bytes_moved > 0\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
