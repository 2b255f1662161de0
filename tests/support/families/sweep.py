"""All families in all ways, each family in a process that may hang or end without ending the sweep.

``python -m families.sweep [NAMES...]``; ``scripts/test-families`` calls it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import importlib.util
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from . import BAD, WAYS

Row = dict[str, Any]


# -- the worker -------------------------------------------------------------------------------------------------------


def serve(pipe: Connection) -> None:
    """Answer each name with the rows of its family, until there is none."""
    import torch

    torch.set_num_threads(1)
    while (name := pipe.recv()) is not None:
        pipe.send(rows_of(name))


def rows_of(name: str) -> list[Row]:
    """The outcomes of one family as rows of the report."""
    from . import builders, diffusion, ways

    start = time.perf_counter()
    try:
        case = diffusion.build(name) if name.startswith("diffusers/") else builders.build(name)
    except builders.CannotBuildError as error:
        return [row(name, "all", "cannot build", detail=str(error)[:3000])]
    building_s = round(time.perf_counter() - start, 2)
    found = [dataclasses.asdict(outcome) for outcome in ways.outcomes(case)]
    return [{**entry, **case.notes, "building_s": building_s} for entry in found]


def row(family: str, way: str, what: str, detail: str = "") -> Row:
    """A row of the report without figures."""
    return {"family": family, "way": way, "what": what, "detail": detail}


class Worker:
    """A process that takes one family at a time; ended when it takes too long."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.family, self.deadline = timeout_s, "", 0.0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, family: str) -> None:
        """Begin with ``family``; the first one includes the import of the libraries."""
        if not self.process.is_alive():
            self._start()
        self.family, self.deadline = family, time.monotonic() + self.timeout_s
        self.pipe.send(family)

    def take(self) -> list[Row] | None:
        """The rows of the family given, or None while it is under way."""
        try:
            if self.pipe.poll():
                return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(5)
            code, family = self.process.exitcode, self.family
            return [row(family, "all", "crashed", f"the process ended with {code}")]
        if time.monotonic() > self.deadline:
            self.process.kill()
            self.process.join()
            return [row(self.family, "all", "timeout", f"more than {self.timeout_s:.0f} s")]
        return None

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()


# -- the sweep --------------------------------------------------------------------------------------------------------


def sweep(names: list[str], jobs: int, timeout_s: float, report: Path) -> list[Row]:
    """Rows of all families, written to ``report`` as they come."""
    todo, rows = collections.deque(names), []
    workers = [Worker(timeout_s) for _ in range(min(jobs, len(names)))]
    busy: set[Worker] = set()
    with report.open("a") as file:
        while todo or busy:
            for worker in workers:
                if worker not in busy and todo:
                    worker.give(todo.popleft())
                    busy.add(worker)
            wait([worker.pipe for worker in busy], timeout=1)
            for worker in list(busy):
                if (found := worker.take()) is None:
                    continue
                busy.remove(worker)
                rows += found
                file.writelines(json.dumps(entry) + "\n" for entry in found)
                file.flush()
                print(progress_line(found, len(names) - len(todo) - len(busy), len(names)), flush=True)
    for worker in workers:
        worker.end()
    return rows


def progress_line(rows: list[Row], done: int, total: int) -> str:
    """One line for one family."""
    said = "  ".join(f"{entry['way']}: {entry['what']}" for entry in rows)
    return f"[{done}/{total}] {rows[0]['family']:32} {said}"


def summary(rows: list[Row]) -> str:
    """How many families came to what, way by way, and the names of those that are wrong."""
    kinds = sorted({entry["what"] for entry in rows})
    counts = collections.Counter((entry["way"], entry["what"]) for entry in rows)
    ways = [w for w in (*WAYS, "all") if any(entry["way"] == w for entry in rows)]
    lines = ["", f"{'way':10}" + "".join(f"{kind:>15}" for kind in kinds)]
    lines += [f"{way:10}" + "".join(f"{counts[way, kind]:>15}" for kind in kinds) for way in ways]
    built = {entry["family"] for entry in rows if entry["what"] != "cannot build"}
    lines.append(f"{len(built)} families were run, {len({entry['family'] for entry in rows}) - len(built)} not built")
    for entry in rows:
        if entry["what"] in BAD | {"refused"}:
            lines.append(f"  {entry['what']:9} {entry['family']} ({entry['way']}): {entry['detail'][:200]}")
    return "\n".join(lines)


def every_name() -> list[str]:
    """All families of transformers, then those of diffusers, where it is installed."""
    from . import builders, diffusion

    names = list(builders.families())
    if importlib.util.find_spec("diffusers") is None:
        print("diffusers is not installed: its models are left out")
        return names
    return names + list(diffusion.CASES)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/test-families", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="families (default: all), for example bert diffusers/flux")
    parser.add_argument("--report", type=Path, default=Path("build/families.jsonl"), help="one object per outcome")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes, of one thread each")
    parser.add_argument("--timeout", type=float, default=60, help="seconds per family")
    parser.add_argument("--resume", action="store_true", help="keep the report's rows and run what is not in it")
    return parser.parse_args()


def earlier_rows(report: Path) -> list[Row]:
    """The rows of a report that was begun; a line that was cut short is left out."""
    rows = []
    for line in report.read_text().splitlines() if report.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if "family" in entry:
            rows.append(entry)
    return rows


def main() -> int:
    """Run the sweep; 1 if a family is wrong."""
    options = arguments()
    names = options.names or every_name()
    kept = earlier_rows(options.report) if options.resume else []
    done = {entry["family"] for entry in kept}
    options.report.parent.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        options.report.write_text(json.dumps(header()) + "\n")
    rows = kept + sweep([name for name in names if name not in done], options.jobs, options.timeout, options.report)
    print(summary(rows))
    print(f"report: {options.report}")
    return 1 if any(entry["what"] in BAD for entry in rows) else 0


def header() -> Row:
    """When and with what the report was made."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in ("torch", "transformers", "diffusers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {"date": datetime.datetime.now().isoformat(timespec="seconds"), "versions": versions}


if __name__ == "__main__":
    sys.exit(main())
