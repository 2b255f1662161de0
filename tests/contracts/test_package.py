"""What a release tells of itself: one version, links that lead somewhere, and dependencies that the package imports."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
URL = "https://host.example/owner/headrace"


def metadata(folder: Path, url: str) -> Message:
    """What `setup.py` and `pyproject.toml` give, built in a folder of its own: a build writes beside its sources."""
    for name in ("README.md", "LICENSE", "pyproject.toml", "setup.py"):
        (folder / name).write_text((ROOT / name).read_text())
    (folder / "src").symlink_to(ROOT / "src")
    code = "import setuptools.build_meta as b; print(b.prepare_metadata_for_build_wheel('out'))"
    (folder / "out").mkdir()
    env = {"REPOSITORY_URL": url, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, check=True, capture_output=True)
    (found,) = (folder / "out").glob("*.dist-info/METADATA")
    return message_from_string(found.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("url", [URL, ""], ids=["published", "nowhere"])
def test_links_of_the_readme_work_outside_the_repository(tmp_path: Path, url: str) -> None:
    told = metadata(tmp_path, url)
    assert told["Version"] == headrace.__version__
    text = told.get_payload()
    targets = re.findall(r"(?<!!)\[[^\[\]]+\]\(([^)\s]+)\)", text)
    inside = f"{url}/blob/v{headrace.__version__}/"
    assert {target for target in targets if not target.startswith("https://")} == set()
    leading = [target.removeprefix(inside).partition("#")[0] for target in targets if url and target.startswith(inside)]
    assert len(leading) > 20 if url else not leading
    assert [path for path in leading if not (ROOT / path).exists()] == []
    pictures = re.findall(r"!\[[^\[\]]+\]\(([^)\s]+)\)", text)
    shown = [target.removeprefix(f"{url}/raw/v{headrace.__version__}/") for target in pictures]  # the file, not a page
    assert shown == re.findall(r"!\[.*?\]\((.+?)\)", (ROOT / "README.md").read_text()) if url else not pictures
    assert "!Time" not in text
    assert [path for path in shown if not (ROOT / path).is_file()] == []
    urls = dict(line.split(", ") for line in told.get_all("Project-URL", []))
    assert ("Repository" in urls) == bool(url)
    assert all(value.startswith(url) for value in urls.values())


def test_one_version() -> None:
    assert "version" not in PROJECT["project"]
    for page in ("README.md", "docs/quickstart.md"):
        found = set(re.findall(r"headrace-(\d+\.\d+\.\d+)-py3", (ROOT / page).read_text()))
        assert found == {headrace.__version__}, page
    sections = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert sections[:2] == ["Unreleased", headrace.__version__]


def test_what_is_required_is_imported() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    required = {re.match(r"[\w-]+", line)[0] for line in PROJECT["project"]["dependencies"]}  # type: ignore[index]
    assert required == {"torch", "safetensors", "numpy"}
    assert {name for name in required if not re.search(rf"^\s*(import|from) {name}\b", source, re.M)} == set()
    assert "psutil" not in required
    assert PROJECT["dependency-groups"].keys() == {"test", "docs"}
    assert not PROJECT["project"]["optional-dependencies"].keys() & {"test", "docs"}


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_without_its_extra_says_what_to_install(missing: str) -> None:
    assert PROJECT["project"]["optional-dependencies"]["cli"] == ["typer", "rich"]
    module, _, function = PROJECT["project"]["scripts"]["headrace"].partition(":")
    code = f"import sys; sys.modules[{missing!r}] = None; from {module} import {function} as run; run()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    line = f"error: the command needs {missing}, which is not installed: pip install 'headrace[cli]'"
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (2, "", [line])


def test_no_file_names_a_place_on_a_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    place = re.compile(rb"(?<![\w.])/(work|root|home|Users|mnt|tmp|opt|venv)/\w")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    named = {str(file): place.findall(text) for file in files if b"\0" not in (text := file.read_bytes())}
    assert len(named) > 500
    assert {file: found for file, found in named.items() if found} == {}
