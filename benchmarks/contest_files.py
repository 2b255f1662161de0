"""The staging ring and the loader, beside libraries that read files: kvikio, fastsafetensors, Run:ai, InstantTensor.

    python benchmarks/contest_files.py [--seconds 370] [--libraries kvikio,runai] [--small] [--out FILE.jsonl]

*Ring*: a stack of which every step streams all layers from one file into the same two slots, in mode ``disk``, against
a loop that has each library read the same ranges into two slots, one layer ahead. *Load*: all files into pinned memory
that is there already, into the GPU's, and into pinned memory that is not there yet. Files are in the page cache
(``cached``), or read past it (``direct``; Run:ai has only buffered reads, whose pages are dropped). Each library reads
with the fastest of its :data:`SETTINGS`, found in this run; then all take turns, in another order in each round. A
row is at the bar if it takes at most 1.10 times as long as headrace. All bytes are compared.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from contest_readers import LAYERS_PER_FILE, LIBRARIES, SETTINGS, SMALL, Ground, prepare
from contest_ways import Contestant, HeadraceRing, Load, Offload, ReaderLoad, ReaderRing, TensorLoad, TensorRing
from harness import append, finish, link_bytes_per_s, parser_of, read_plainly, words_of, writable_folder
from headrace.cli.bench_step import QWEN3_8B

BAR = 1.10


# -- the contest -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contest:
    """Who takes part: by name, how to open it with each setting; headrace is first, and has one."""

    name: str
    num_bytes: int
    rounds: int
    ways: dict[str, dict[str, Callable[[], Contestant]]]


def contests(ground: Ground, libraries: Sequence[str], rounds: int, steps: dict[bool, int]) -> list[Contest]:
    """All of them, in order."""
    found: list[Contest] = []
    cpu, cuda, names = torch.device("cpu"), ground.device.type == "cuda", {False: "cached", True: "direct"}
    for direct in (False, True):
        ring = partial(HeadraceRing, ground, direct, steps[direct])
        ways: dict[str, dict[str, Callable[[], Contestant]]] = {"headrace": {"": partial(ring, False)}}
        if cuda:
            ways["headrace, graph"] = {"": partial(ring, True)}
        for library in libraries:
            to: Any = (
                partial(TensorRing, ground) if library == "instanttensor" else partial(ReaderRing, ground, library)
            )
            ways[library] = {str(s): partial(to, s, direct, steps[direct]) for s in SETTINGS[library][direct]}
        found.append(Contest(f"ring, {names[direct]}", ground.truth[0].numel(), rounds, ways))
    for direct in (False, True):
        num_files = min(2, len(ground.files)) if direct else len(ground.files)
        sizes = [file.numel() for file in ground.truth[:num_files]]
        gpu = list(torch.empty(sum(sizes), dtype=torch.uint8, device=ground.device).split(sizes))
        places = {"pinned": partial(ground.host_places, num_files), "device": lambda gpu=gpu: gpu}
        for where, place in places.items():
            on = cpu if where == "pinned" else ground.device
            args: Any = (ground, direct, num_files, place)
            ways = {"headrace": {"": partial(Load, *args)}}
            for library in libraries:
                if library != "instanttensor":
                    to = partial(ReaderLoad, *args, on, library)
                elif where == "device":
                    to = partial(TensorLoad, *args)
                else:
                    continue  # it loads to GPUs only
                ways[library] = {str(s): partial(to, s) for s in SETTINGS[library][direct]}
            found.append(Contest(f"load to {where}, {names[direct]}", sum(sizes), rounds, ways))
    fresh: Any = (ground, False, len(ground.files), ground.fresh_places)
    ways = {"headrace": {"": partial(Offload, *fresh)}}
    for library in libraries:
        if library != "instanttensor":
            ways[library] = {str(s): partial(ReaderLoad, *fresh, cpu, library, s) for s in SETTINGS[library][False][:1]}
    return [*found, Contest("load to fresh pinned, cached", ground.pinned.numel(), rounds, ways)]


def hold(contest: Contest, until: float, keep: Callable[[dict[str, Any]], None]) -> None:
    """Find the fastest setting of each, then all take turns, until ``until`` at most."""
    best: dict[str, tuple[float, str, Contestant]] = {}

    def turn(
        way: str, setting: str, phase: int | str, make: Callable[[], Contestant]
    ) -> tuple[float, Contestant] | None:
        row = {
            "case": f"{contest.name}: {way}",
            "contest": contest.name,
            "way": way,
            "setting": setting,
            "phase": phase,
        }
        try:
            one = make()
            ms, right = one.measure()
        except Exception as error:  # of any library: the others go on
            keep({**row, "error": f"{type(error).__name__}: {error}"[:500]})
            return None
        keep({**row, "ms": ms, "gb_per_s": contest.num_bytes / ms / 1e6, "bit_equal": right})
        return ms, one

    for way, settings in contest.ways.items():
        for setting, make in settings.items():
            if (found := turn(way, setting, "tuning", make)) is None:
                continue
            ms, loser = found
            if way not in best or ms < best[way][0]:
                loser, best[way] = best[way][2] if way in best else None, (ms, setting, loser)  # type: ignore[assignment]
            if loser is not None:
                loser.close()
    shuffle = random.Random(0)
    for number in range(contest.rounds):
        if number and time.monotonic() > until:
            break
        for way in shuffle.sample(list(best), len(best)):
            _, setting, one = best[way]
            if turn(way, setting, number, lambda one=one: one) is None:  # type: ignore[misc]
                del best[way]
    for _, _, one in best.values():
        one.close()
    gc.collect()


def summary(rows: Sequence[dict[str, Any]], contest: Contest) -> list[str]:
    """For people: one line for each way."""
    lines = []
    ours: float | None = None
    for way in contest.ways:  # headrace first
        mine = [row for row in rows if row.get("contest") == contest.name and row["way"] == way]
        timed = [row for row in mine if isinstance(row["phase"], int)]
        errors = {row["error"] for row in mine if "error" in row}
        if not timed:
            lines.append(f"  {way:<16} failed: {'; '.join(errors)[:150]}")
            continue
        all_ms = [row["ms"] for row in timed]
        ms = statistics.median(all_ms)
        ours = ours or ms
        rate = statistics.median(row["gb_per_s"] for row in timed)
        bits = "" if all(row["bit_equal"] for row in mine if "ms" in row) else "  OTHER BITS"
        lines.append(
            f"  {way:<16} {ms:9.1f} ms ({min(all_ms):.1f} to {max(all_ms):.1f}, {len(timed)} rounds) "
            f"{rate:6.2f} GB/s  {ms / ours:5.2f} x {'<=' if ms / ours <= BAR else ' >'} {BAR:.2f}  "
            f"{timed[0]['setting']}{bits}"
        )
    return lines


@torch.no_grad()
def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--libraries", type=words_of(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--files", type=int, default=8, help=f"of {LAYERS_PER_FILE} layers each")
    parser.add_argument("--small", action="store_true", help="small layers: whether everything runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=370.0, help="no round begins after its share of them")
    parser.add_argument("--folder", type=writable_folder, help="on the disk to read from (default: temporary files)")
    given = parser.parse_args()
    begin, rows = time.monotonic(), []
    device = torch.device(given.device)

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        append(row, given.out)

    with tempfile.TemporaryDirectory(prefix="headrace-contest-", dir=given.folder) as folder:
        ground = prepare(Path(folder), SMALL if given.small else QWEN3_8B, given.files, device)
        wrote_s = time.monotonic() - begin
        link = link_bytes_per_s(device, 5) / 1e9
        for number, contest in enumerate(held := contests(ground, given.libraries, given.rounds, {False: 20, True: 2})):
            size = ground.files[0].stat().st_size
            plain = [size / read_plainly(ground.files[:1], direct, 8 << 20) / 1e9 for direct in (False, True)]
            read_plainly(ground.files, False, 8 << 20)
            limits = f"link {link:.1f} GB/s, plain reads {plain[0]:.1f} cached, {plain[1]:.2f} direct"
            row = {"link_gb_per_s": link, "plain_gb_per_s": plain, "wrote_s": wrote_s}
            keep({"case": f"{contest.name}: limits", **row})
            left = begin + given.seconds - time.monotonic()
            hold(contest, time.monotonic() + left / (len(held) - number) * 2, keep)
            print("\n".join([f"{contest.name}: {limits}", *summary(rows, contest)]), flush=True)
    print(f"\n{torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}, {os.cpu_count()} cores, "
          f"{time.monotonic() - begin:.0f} s, files written in {wrote_s:.0f} s, GPUDirect Storage: "
          f"{Path('/proc/driver/nvidia-fs').exists()}")  # fmt: skip
    finish("contest of files", rows)


if __name__ == "__main__":
    main()
