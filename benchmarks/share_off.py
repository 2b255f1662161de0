"""A token of ``generate`` with cached experts that the link brings alone, by several trees of headrace that take turns.

    git archive 52b5cb7e^ src benchmarks | tar x -C before    the tree before the CPU's share in missed experts
    python benchmarks/share_off.py --trees before=before,now=. --out FILE
    TRITON_INTERPRET=1 python benchmarks/share_off.py --trees a=.,b=. --device cpu --tiny    tries the script

What the share costs those who do not use it: twelve layers of Qwen3-30B-A3B, 24 slots, CUDA graphs. Each tree has a
process of its own, with its own ``src`` and ``benchmarks``, and one at a time generates, in each round the other way
round. What else has changed between two trees shows as well; 52b5cb7e itself is the share and nothing else.

``bit_equal``: all runs have the logits of the first tree and of the resident model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "qwen3-30b-a3b"


def serve(given: argparse.Namespace) -> None:
    """Generate once for each line of stdin, and write what was found; modules are those of the tree of the process."""
    import torch

    import headrace
    import headrace.adapters.transformers.ordered_experts  # "headrace" is known from here on
    from card_24gb import Rehearsal, _Sequence, rest_on_host
    from headrace.experts import ordered

    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device(given.device)
    if given.tiny:  # each program takes the interpreter 50 ms
        launches = ordered.Launch(256, 1, 1), ordered.Launch(128, 1, 1)
        ordered.LAUNCHES.update(dict.fromkeys(ordered.LAUNCHES, launches))
    model = Rehearsal(NAME, given.layers, given.tiny, 24 << 30, 2 << 30, device, ["graphs"]).build()
    model.set_experts_implementation("headrace")
    sequence = _Sequence(model, *((8, 2) if given.tiny else (128, 128)), device)

    def logits_of(run: Any) -> str:
        return hashlib.sha256(run.logits.view(torch.int16).numpy().tobytes()).hexdigest()

    is_cuda = device.type == "cuda"
    graphs = headrace.decode_in_graphs(model) if is_cuda else None
    resident = logits_of(sequence.run())
    if graphs is not None:
        graphs.remove()
    rest_on_host(model)
    with headrace.offload(model, headrace.Rules([("experts", "cache")], expert_slots=given.slots), device=device) as it:
        graphs = headrace.decode_in_graphs(model) if is_cuda else None
        for _ in range(2):
            sequence.run()
        tell({"headrace": str(Path(headrace.__file__).parent), "logits": resident})
        for _ in sys.stdin:
            before = sum(layer.fetched for layer in it.stats().experts)
            run = sequence.run()
            after = sum(layer.fetched for layer in it.stats().experts)
            tell({"ms": run.ms, "median_ms": statistics.median(run.samples_ms), "logits": logits_of(run),
                  "fetched": after - before})  # fmt: skip
        if graphs is not None:
            graphs.remove()


def tell(row: dict[str, Any]) -> None:
    print("found:", json.dumps(row), flush=True)


def heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a tree says next; other lines are those of libraries."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("found: "):
            return dict(json.loads(line.removeprefix("found: ")))
    raise RuntimeError(f"expected a line of {process.args}, found its end with exit code {process.wait()}")


def start(folder: Path, given: argparse.Namespace) -> subprocess.Popen[str]:
    paths = [str(folder / "src"), str(folder / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    options = ["--device", given.device, "--slots", str(given.slots), *["--tiny"] * given.tiny]
    options += [] if given.layers is None else ["--layers", str(given.layers)]
    command = [sys.executable, __file__, "--serve", *options]
    return subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def rows_of(trees: dict[str, Path], given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    processes = {name: start(folder, given) for name, folder in trees.items()}
    try:
        started = {name: heard(process) for name, process in processes.items()}
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
        for each in range(given.rounds):
            for name in list(trees)[:: 1 if each % 2 else -1]:
                stdin = processes[name].stdin
                assert stdin is not None
                print(file=stdin, flush=True)
                found[name].append(heard(processes[name]))
    finally:
        for process in processes.values():
            process.kill()
    first = found[next(iter(trees))]
    for name, runs in found.items():
        place = Path(started[name]["headrace"])
        assert place.is_relative_to(trees[name].resolve()), f"expected headrace of {trees[name]}, found {place}"
        row: dict[str, Any] = {"table": "share-off", "case": name, "model": NAME, "layers": given.layers}
        row |= {"slots": given.slots, "fetched": statistics.median(run["fetched"] for run in runs)}
        for field in ("ms", "median_ms"):
            row |= {field: statistics.median(run[field] for run in runs), f"samples_{field}": [r[field] for r in runs]}
            ratios = [run[field] / other[field] for run, other in zip(runs, first, strict=True)]
            row |= {f"against_first_{field}": statistics.median(ratios), f"ratios_{field}": ratios}
        yield row | {"bit_equal": {run["logits"] for run in (*first, *runs)} == {started[name]["logits"]}}


def describe(row: dict[str, Any]) -> str:
    """One line about a result."""
    spread = max(row["ratios_ms"]) - min(row["ratios_ms"])
    return (
        f"{row['case']:<10} {row['ms']:.3f} ms a token (median of tokens {row['median_ms']:.3f}), "
        f"{row['against_first_ms']:.4f} x the first ({row['against_first_median_ms']:.4f}), spread {spread:.4f}, "
        f"{row['fetched']} fetched  {'same bits' if row['bit_equal'] else 'OTHER BITS'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", default="now=.", help="NAME=FOLDER, ...: the first is what others are compared with")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--slots", type=int, default=24)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given)
        return
    from harness import finish, kept  # of this tree

    trees = {name: Path(folder) for name, _, folder in (each.partition("=") for each in given.trees.split(","))}
    finish("share off", list(kept(rows_of(trees, given), describe, given.out)))


if __name__ == "__main__":
    main()
