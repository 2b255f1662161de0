"""The metadata that depends on where the repository is published; pyproject.toml holds everything else.

REPOSITORY_URL (https://host/owner/name) makes links of the README absolute, to the tag of the version, and becomes the
project URLs; pictures get the address of the file itself. Without it, as in an editable install, links become plain
text and pictures are left out: they lead nowhere outside the repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\[\]]+)\]\((?!https?:|#)([^)\s]+)\)")


def version() -> str:
    return re.search(r'^__version__ = "([^"]+)"', (ROOT / "src/headrace/__init__.py").read_text(), re.M)[1]


def readme(url: str) -> str:
    def absolute(link: re.Match[str]) -> str:
        picture, text, path = link.groups()
        if not url:
            return "" if picture else text
        return f"{picture}[{text}]({url}/{'raw' if picture else 'blob'}/v{version()}/{path})"

    return LINK.sub(absolute, (ROOT / "README.md").read_text())


def project_urls(url: str) -> dict[str, str]:
    if not url:
        return {}
    tree = f"{url}/blob/v{version()}"
    return {
        "Repository": url,
        "Issues": f"{url}/issues",
        "Documentation": f"{tree}/docs/index.md",
        "Changelog": f"{tree}/CHANGELOG.md",
    }


url = os.environ.get("REPOSITORY_URL", "").rstrip("/")
setup(long_description=readme(url), long_description_content_type="text/markdown", project_urls=project_urls(url))
