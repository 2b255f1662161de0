"""The rate of each rank's copies while tensor-parallel ranks exchange activations, and the time of that exchange.

    python benchmarks/copies_beside_collectives.py [--ranks 2] [--tiny] [--out FILE.jsonl]

Every rank copies from pinned memory on one stream and all-reduces the activations of a step on another one: 8192 rows
as in a prefill step, 16 as in a decode step. Each is timed alone (all ranks at once), then while the other runs for
longer. ``slower`` is the time beside the other over the time alone, less one.

Expected on GPUs with NVLink: copies use the host's link and NCCL does not, so within 3 % in both directions. vLLM's
thread 51710 claims 9.7 % of the first-token time. If a row says more than 3 %, copies have to be paced around
collectives; run it again first, since the rate of a shared host's memory changes. All-reduces of 16 rows are bound by
their launch, which the thread that launches copies delays. On a CPU both use the same memory and cores (gloo): this
shows only that the script runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from harness import append, finish, parser_of
from headrace.memory.pinned import pinned_region

COPY_BYTES = 256 << 20
ROWS = (8192, 16)
HIDDEN = 8192
SECONDS = 1.0  # of each measurement
LONGER = 1.5  # than what is timed, so that it never runs alone


def measure(num_ranks: int, tiny: bool = False) -> list[dict[str, Any]]:
    """One row for each rank and number of rows; each rank is a process with a GPU, if there are any."""
    answers = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (num_ranks, str(Path(folder) / "store"), tiny, answers), nprocs=num_ranks)  # type: ignore[no-untyped-call]
    rows = [row for _ in range(num_ranks) for row in answers.get()]
    return sorted(rows, key=lambda row: (-row["rows"], row["rank"]))


def _rank(rank: int, num_ranks: int, store: str, tiny: bool, answers: Any) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks
    )
    ranks = Ranks(dist.new_group(backend="gloo"), num_ranks)
    copy, is_equal = _copies(device, COPY_BYTES >> (8 if tiny else 0))
    seconds = SECONDS / (20 if tiny else 1)
    num_copies, copy_s = ranks.timed_alone(copy, seconds)
    rows = []
    for count in ROWS:
        values = torch.full((count, HIDDEN >> (5 if tiny else 0)), rank + 1, dtype=torch.bfloat16, device=device)
        dist.all_reduce(values)
        equal = bool((values == num_ranks * (num_ranks + 1) / 2).all())
        exchange = _exchanges(values.zero_())
        num_exchanges, exchange_s = ranks.timed_alone(exchange, seconds)
        copy_beside_s = ranks.timed_beside(copy, num_copies, exchange, num_exchanges)
        exchange_beside_s = ranks.timed_beside(exchange, num_exchanges, copy, num_copies)
        rows.append(
            {
                "case": "copies beside collectives",
                "rank": rank,
                "ranks": num_ranks,
                "rows": count,
                "copy_gb_per_s": copy.num_bytes / copy_s / 1e9,
                "copy_beside_gb_per_s": copy.num_bytes / copy_beside_s / 1e9,
                "copy_slower": copy_beside_s / copy_s - 1,
                "all_reduce_ms": exchange_s * 1e3,
                "all_reduce_beside_ms": exchange_beside_s * 1e3,
                "all_reduce_slower": exchange_beside_s / exchange_s - 1,
                "bit_equal": equal and is_equal(),
            }
        )
    answers.put(rows)
    dist.destroy_process_group()


class Repeated:
    """Calls of ``once``, one after the other on one stream. ``num_bytes``: of each."""

    def __init__(self, once: Callable[[], object], stream: Any, num_bytes: int) -> None:
        self._once, self._stream, self.num_bytes = once, stream, num_bytes

    def __call__(self, count: int) -> float:
        """Seconds of ``count`` calls, until the device has done them."""
        begin = perf_counter()
        with torch.cuda.stream(self._stream):  # of None: no effect
            for _ in range(count):
                self._once()
        if self._stream is not None:
            self._stream.synchronize()
        return perf_counter() - begin


def _copies(device: torch.device, num_bytes: int) -> tuple[Repeated, Callable[[], bool]]:
    """Copies to ``device``, and whether the bytes there are those of the host."""
    on_gpu = device.type == "cuda"
    host = pinned_region(num_bytes, near=device) if on_gpu else torch.empty(num_bytes, dtype=torch.uint8)
    host.view(torch.int32).random_()
    into = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    copies = Repeated(
        lambda: into.copy_(host, non_blocking=True), torch.cuda.Stream(device) if on_gpu else None, num_bytes
    )
    return copies, lambda: torch.equal(into.cpu(), host)


def _exchanges(values: torch.Tensor) -> Repeated:
    stream = torch.cuda.current_stream(values.device) if values.is_cuda else None
    return Repeated(lambda: dist.all_reduce(values), stream, values.nbytes)


class Ranks:
    """Times the same work in all processes at once. ``group``: on the host, for agreeing and meeting."""

    def __init__(self, group: Any, num_ranks: int) -> None:
        self.group, self._num_ranks = group, num_ranks

    def timed_alone(self, work: Repeated, seconds: float) -> tuple[int, float]:
        """How many calls take ``seconds``, the same number in every rank, and the seconds of one."""
        work(3)
        dist.barrier(self.group)
        counts: list[int] = [0] * self._num_ranks
        dist.all_gather_object(counts, max(4, int(8 * seconds / work(8))), self.group)
        count = max(counts)
        dist.barrier(self.group)
        return count, work(count) / count

    def timed_beside(self, work: Repeated, count: int, other: Repeated, other_count: int) -> float:
        """The seconds of one call of ``work`` while ``other`` runs for longer."""
        with ThreadPoolExecutor(1) as thread:
            dist.barrier(self.group)
            running = thread.submit(other, int(LONGER * other_count))
            elapsed_s = work(count)
            running.result()
        return elapsed_s / count


def describe(row: dict[str, Any]) -> str:
    """One line about one result."""
    return (
        f"rank {row['rank']} of {row['ranks']}, {row['rows']:5d} rows: copies {row['copy_gb_per_s']:6.2f} GB/s, beside "
        f"all-reduces {row['copy_beside_gb_per_s']:6.2f} ({row['copy_slower']:+.1%}); an all-reduce "
        f"{row['all_reduce_ms']:7.3f} ms, beside copies {row['all_reduce_beside_ms']:7.3f} "
        f"({row['all_reduce_slower']:+.1%}); {'same' if row['bit_equal'] else 'OTHER'} bits"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes, each with a GPU")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    given = parser.parse_args()
    rows = measure(given.ranks, given.tiny)
    for row in rows:
        print(describe(row), flush=True)
        append(row, given.out)
    finish("copies_beside_collectives", rows)


if __name__ == "__main__":
    main()
