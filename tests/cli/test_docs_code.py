"""The promise: the Python code of the quickstart and of the guide for plain modules runs as it stands, and the site
shows what the pages show.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["quickstart.md", "guides/module.md"])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert len(blocks) >= 2
    code = "\n".join(blocks) + "\nassert handle.stats().bytes_moved > 0\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_pictures_of_pages_are_shown_by_the_site(tmp_path: Path) -> None:
    """They lost their links, as links to files outside of the site do."""
    sources = {
        page.relative_to(DOCS): re.findall(r"!\[[^\]]*\]\((?!https?:)([^)\s]+)\)", page.read_text())
        for page in DOCS.rglob("*.md")
    }
    assert sources[Path("index.md")] == ["benchmarks/steps-beside-others.svg"]
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    for page, pictures in sources.items():
        html = tmp_path / ("" if page.name == "index.md" else page.with_suffix("")) / "index.html"
        shown = (
            [html.parent / name for name in re.findall(r'<img [^>]*src="([^":]+)"', html.read_text())]
            if pictures
            else []
        )
        for picture in pictures:
            (found,) = [path.resolve() for path in shown if path.name == Path(picture).name]
            assert found.read_bytes() == (DOCS / page.parent / picture).read_bytes()
