"""What the site does to pages: links to files outside of docs/ become plain text, and the command line is generated."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import typer.cli

from headrace.cli import app

DOCS = Path(__file__).parent
LINK = re.compile(r"(?<!!)\[([^\[\]]+)\]\((?!https?:|#)([^)\s]+)\)")  # pictures are none: the site holds them


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """In the repository these links open the file; the site does not hold it."""

    def keep_or_flatten(link: re.Match[str]) -> str:
        target = (DOCS / page.file.src_uri).parent / link[2].partition("#")[0]
        return link[0] if target.suffix == ".md" and target.resolve().is_relative_to(DOCS) else link[1]

    markdown = LINK.sub(keep_or_flatten, markdown)
    return markdown.replace("<!-- command line -->", _command_line())


def _command_line() -> str:
    group = typer.main.get_command(app)
    return typer.cli.get_docs_for_click(obj=group, ctx=click.Context(group), name="headrace")
