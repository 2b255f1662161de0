"""headrace's ways of ``contest_files.py`` under settings, beside kvikio: the ring, and the loader to a device.

    python benchmarks/trial_files.py [--small] [--files 4] [--rounds 2] [--seconds 100] [--out FILE.jsonl]

Ring settings: MiB of an entry, entries, MiB of a read, readers. Loader settings: uploader, MiB of a buffer, buffers,
readers, and whether cached pages are looked for. Uploaders: ``one`` (one thread at a time starts the copies of all full
buffers) and ``each`` (every reader starts its own).
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import contest_ways
from contest_readers import LAYERS_PER_FILE, SMALL, Ground, prepare
from contest_ways import Contestant, HeadraceRing, Load, ReaderLoad, ReaderRing
from harness import append, finish, link_bytes_per_s, parser_of, read_plainly
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.cli.bench_step import QWEN3_8B
from headrace.memory.pinned import CudaRegistrar
from headrace.stores import loader
from headrace.stores.sources import ALIGN_BYTES, DiskOptions
from headrace.transfer import ring_streams

MIB = 1 << 20
RINGS = [
    (16, 8, 4, 14), (16, 8, 4, 8), (16, 8, 16, 8), (16, 12, 16, 12), (16, 16, 16, 12), (16, 16, 16, 8),
    (8, 16, 8, 8), (8, 16, 8, 12), (8, 24, 8, 12), (4, 32, 4, 10),
]  # fmt: skip
LOADS = [
    ("one", 4, 12, 16, None), ("one", 4, 32, 16, None), ("one", 16, 24, 16, None), ("one", 16, 12, 8, None),
    ("each", 4, 12, 16, None), ("each", 4, 24, 8, False), ("each", 8, 24, 16, None), ("each", 8, 16, 8, None),
    ("each", 16, 16, 16, None), ("each", 16, 24, 16, None), ("each", 16, 24, 16, False), ("each", 16, 16, 8, None),
    ("each", 16, 16, 12, None), ("each", 32, 24, 16, None), ("each", 32, 16, 8, None),
]  # fmt: skip


class Each(loader.UploadRing):
    """Each reader starts its own copies."""

    def upload(self, reads: Sequence[loader.Read]) -> None:
        buffer, wait = self._free.get()
        try:
            wait()
            wait = self._start(loader._read_all(reads, buffer))
        finally:
            self._free.put((buffer, wait))


class EachUploader(loader.CudaUploader):
    """The same, to a device."""

    upload = Each.upload


@contextmanager
def changed(module: Any, **values: Any):
    """Attributes of a module for a while."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def make_ring(ground: Ground, setting: Sequence[int], graph: bool, steps: int) -> Contestant:
    """The stack, with this ring."""
    entry, entries, read, readers = setting
    sizes = {"entry_bytes": entry * MIB, "max_entries": entries, "num_threads": readers}

    def open_link(store: Any, device: torch.device, recorder: Any, measure_stalls: bool) -> Any:
        return link(device, measure_stalls=measure_stalls, **sizes)

    link = ring_streams.RingLink
    reads_of = partial(ring_streams.reads_of, read_bytes=read * MIB)
    with changed(ring_streams, open_link=open_link, reads_of=reads_of):
        return HeadraceRing(ground, False, steps, graph)


class LoadAs(Load):
    """The loader, changed."""

    def __init__(self, setting: Sequence[Any], *args: Any) -> None:
        super().__init__(*args)
        self._setting = setting

    def load(self) -> list[torch.Tensor]:
        uploader, buffer, buffers, readers, direct = self._setting
        kind = EachUploader if uploader == "each" else loader.CudaUploader
        size = buffer * MIB
        os.environ["HEADRACE_READERS"] = str(readers)
        try:
            with (
                changed(loader.CudaUploader, piece_bytes=size - ALIGN_BYTES),
                changed(loader, NUM_BUFFERS=buffers, _BUFFER_BYTES=size + 4 * ALIGN_BYTES),
                changed(contest_ways, CudaUploader=kind, DiskOptions=lambda direct=None, d=direct: DiskOptions(d),
                        deliver=partial(loader.deliver, piece_bytes=max(size, loader.PIECE_BYTES))),
            ):  # fmt: skip
                return super().load()
        finally:
            del os.environ["HEADRACE_READERS"]


def take_turns(name: str, ways: dict[str, Callable[[], Contestant]], num_bytes: int, rounds: int, until: float,
               keep: Callable[[dict[str, Any]], None]) -> None:  # fmt: skip
    """Each alone, opened and closed, twice in a row in each round; the order is another in each round."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    shuffle = random.Random(0)
    for number in range(rounds):
        for way in shuffle.sample(list(ways), len(ways)):
            if number and time.monotonic() > until:
                break
            row = {"case": f"{name}: {way}", "contest": name, "way": way, "phase": number}
            try:
                one = ways[way]()
                for _ in range(2):
                    ms, right = one.measure()
                    found[way].append(ms)
                    keep({**row, "ms": ms, "gb_per_s": num_bytes / ms / 1e6, "bit_equal": right})
                one.close()
            except Exception as error:
                keep({**row, "error": f"{type(error).__name__}: {error}"[:500]})
                print(f"  {way}: {type(error).__name__}: {error}"[:300], flush=True)
    print(f"{name}:")
    for way, all_ms in found.items():
        if all_ms:
            ms = statistics.median(all_ms)
            spread, rate = f"({min(all_ms):.1f} to {max(all_ms):.1f})", num_bytes / ms / 1e6
            print(f"  {way:<32} {ms:8.1f} ms {spread}  {rate:5.1f} GB/s", flush=True)


@torch.no_grad()
def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--files", type=int, default=4, help=f"of {LAYERS_PER_FILE} layers each")
    parser.add_argument("--small", action="store_true", help="small layers: whether everything runs")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=100.0, help="the ring's second round ends after 60 %% of them")
    parser.add_argument("--folder", default=None)
    given = parser.parse_args()
    begin, rows = time.monotonic(), []
    device = torch.device(given.device)

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        append(row, given.out)

    with tempfile.TemporaryDirectory(prefix="headrace-trial-", dir=given.folder) as folder:
        ground = prepare(Path(folder), SMALL if given.small else QWEN3_8B, given.files, device)
        link, size = link_bytes_per_s(device, 5) / 1e9, ground.files[0].stat().st_size
        plain = [size / read_plainly(ground.files[:1], False, 8 << 20) / 1e9 for _ in range(3)]
        print(f"written in {time.monotonic() - begin:.1f} s; link {link:.1f} GB/s; plain reads {plain}", flush=True)
        keep({"case": "limits", "link_gb_per_s": link, "plain_gb_per_s": plain})
        sizes = [file.numel() for file in ground.truth]
        places = list(torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(sizes))
        args: Any = (ground, False, len(sizes), lambda: places)
        for name, make in {
            "Checkpoint.open": lambda: Checkpoint.open(ground.folder),
            "CudaUploader": lambda: device.type == "cuda" and loader.CudaUploader(device, CudaRegistrar(device)),
        }.items():
            times = []
            for _ in range(3):
                start = time.perf_counter()
                made = make()
                times.append((time.perf_counter() - start) * 1e3)
                del made
            print(f"{name}: {', '.join(f'{ms:.1f}' for ms in times)} ms", flush=True)
        loads: dict[str, Any] = {str(setting): partial(LoadAs, setting, *args) for setting in LOADS}
        rings: dict[str, Any] = {str(setting): partial(make_ring, ground, setting, False, 10) for setting in RINGS}
        if device.type == "cuda":
            rings |= {f"{s}, graph": partial(make_ring, ground, s, True, 10) for s in (RINGS[0], RINGS[2], RINGS[4])}
            loads["kvikio (16, 4)"] = partial(ReaderLoad, *args, device, "kvikio", (16, 4))
            rings["kvikio (12, 4)"] = partial(ReaderRing, ground, "kvikio", (12, 4), False, 10)
        take_turns("load to device", loads, sum(sizes), given.rounds, begin + 0.35 * given.seconds, keep)
        take_turns("ring", rings, sizes[0], given.rounds, begin + given.seconds, keep)
    print(f"{time.monotonic() - begin:.0f} s")
    finish("trial of files", rows)


if __name__ == "__main__":
    main()
