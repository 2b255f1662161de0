"""GB/s into each device: one link alone, the links of all ranks (`sharded_cpu`), and peers' memory (`sharded_gpu`).

torchrun --nproc-per-node 4 benchmarks/peers.py [--unit-mb 200] [--units 8] [--rounds 40] [--layers 6] [--out FILE]
python benchmarks/peers.py --ways budget,idle      # one process beside an idle GPU

Every figure is the median over rounds of a whole step through units whose compute is nothing, so that the copies are
all there is; the bytes are those that the plan brings in a step. Then a step of layers of Qwen3-8B's shape (1 row), all
of them offloaded through two slots. ``alone``: rank 0 works while the others wait. ``each``: every rank brings whole
units over its own link, all at once. ``budget``: a budget of half of the weights, the others in host memory; ``idle``:
the same budget, the others in the memory of an idle GPU. Each result is compared with the resident model's, bit for
bit. On a machine without a GPU the same runs over gloo, as a smoke test: give it small sizes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

import headrace
from harness import append, capture, writable_file
from headrace.cli.bench_step import QWEN3_8B, build_stack
from headrace.stores import rank_stores

WAYS = {"alone": "cpu", "each": "cpu", "pooled": "sharded_cpu", "sharded": "sharded_gpu"}  # and their modes
BUDGETS = ("budget", "idle")


class Weight(nn.Module):
    """Reads its first byte."""

    def __init__(self, num_bytes: int, seed: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(seed)
        value = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device, generator=generator)
        self.weight = nn.Parameter(value, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [1]; a checksum of few bytes keeps compute at nothing."""
        return x * 3 % 1_000_003 + self.weight[:: max(1, self.weight.numel() // 64)].sum(dtype=torch.int64)


class Units(nn.Module):
    """Weights of one size, one after another."""

    def __init__(self, count: int, num_bytes: int, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Weight(num_bytes, index, device) for index in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [1], int64."""
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True)
class Row:
    """One result, of the slowest rank."""

    case: str
    way: str
    captured: bool
    ranks: int
    ms: float
    gb_per_s: float
    bit_equal: bool
    bytes_moved: int
    host_bytes: int


def time_steps(step: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Median of a step in ms. Every rank runs the same number of steps, since the ranks of sharded_cpu go in step."""
    samples = []
    for index in range(rounds + 3):
        begin = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if index >= 3:
            samples.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(samples)


def steps_of(
    model: nn.Module, x: torch.Tensor, device: torch.device
) -> Iterator[tuple[bool, Callable[[], torch.Tensor]]]:
    """The step eager and, on a GPU, captured; one by one, since an eager step is another once there are graphs."""
    yield False, lambda: model(x)
    if device.type == "cuda":
        model(x)
        replay, out = capture(lambda: model(x))

        def step() -> torch.Tensor:
            replay()
            return out

        yield True, step


def policy_of(way: str, model: nn.Module) -> headrace.Policy:
    """What is offloaded, and to where."""
    if way not in BUDGETS:
        return headrace.Prefetch(params=["layers"], prefetch_step=2, mode=WAYS[way])
    num_bytes = sum(tensor.nbytes for tensor in model.parameters())
    peer_bytes = num_bytes if way == "idle" else None
    return headrace.Budget(num_bytes // 2, ["layers"], peer_memory=peer_bytes, codec="none")


def measure(case: str, model: nn.Module, x: torch.Tensor, way: str, rounds: int, device: torch.device) -> list[Row]:
    """All rows of one way; collective."""
    expected = model(x).clone()
    rows: list[Row] = []
    if way != "alone" or dist.get_rank() == 0:
        policy = policy_of(way, model)
        group = dist.group.WORLD if way in ("pooled", "sharded") else None
        with headrace.offload(model, policy, device=device, group=group) as handle:
            store = handle._session._store
            for captured, step in steps_of(model, x, device):
                same = all(torch.equal(step(), expected) for _ in range(2))
                ms = time_steps(step, rounds, device)
                moved = handle.plan.moved_bytes + handle.plan.uva_bytes
                gb_per_s = moved / ms / 1e6
                size = dist.get_world_size()
                rows.append(Row(case, way, captured, size, ms, gb_per_s, same, moved, store.host_bytes))
                del step  # the graph holds the slots
            handle.remove(graphs_released=True)
    dist.barrier()
    return rows


def slowest(rows: list[Row]) -> list[Row]:
    """Of every case the rank that took longest; equal only if all are."""
    gathered: list[list[Row]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, rows)
    found: dict[tuple[str, str, bool], Row] = {}
    for row in (row for rank in gathered for row in rank):
        key = row.case, row.way, row.captured
        old = found.get(key, row)
        worst = max(old, row, key=lambda row: row.ms)
        found[key] = replace(worst, bit_equal=old.bit_equal and row.bit_equal)
    return list(found.values())


def show(rows: list[Row]) -> None:
    """A table, with each rate against that of one link alone."""
    base = {(row.case, row.captured): row.gb_per_s for row in rows if row.way in ("alone", "budget")}
    nan = float("nan")
    print(f"{'case':10} {'way':8} {'graph':5} {'ms':>9} {'GB/s each':>10} {'x alone':>8}  bits   host GiB per rank")
    for row in rows:
        ratio = row.gb_per_s / base.get((row.case, row.captured), nan)
        print(
            f"{row.case:10} {row.way:8} {'yes' if row.captured else 'no':5} {row.ms:9.3f} {row.gb_per_s:10.1f} "
            f"{ratio:8.2f}  {'equal' if row.bit_equal else 'DIFFER'}  {row.host_bytes / 2**30:.3f}"
        )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit-mb", type=float, default=200.0, help="decimal MB of a unit")
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--layers", type=int, default=6, help="of Qwen3-8B's shape")
    parser.add_argument("--hidden", type=int, default=QWEN3_8B.hidden, help="smaller for a smoke test")
    parser.add_argument("--chunk-mib", type=float, default=rank_stores.CHUNK_BYTES / 2**20, help="of mode sharded_cpu")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join((*WAYS, *BUDGETS))}")
    parser.add_argument("--out", type=writable_file, help="append results here, one JSON object per line")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    """Measure, print, write."""
    args = parse()
    rank_stores.CHUNK_BYTES = int(args.chunk_mib * 2**20)
    gpu = torch.cuda.is_available()
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", **alone)
    device = torch.device("cuda", dist.get_rank()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    scale = QWEN3_8B.hidden // args.hidden
    shape = replace(
        QWEN3_8B,
        num_layers=args.layers,
        hidden=args.hidden,
        **{name: getattr(QWEN3_8B, name) // scale for name in ("intermediate", "query", "key_value")},
    )
    unit_bytes = int(args.unit_mb * 1e6) // 256 * 256
    cases: list[tuple[str, nn.Module, torch.Tensor]] = [
        ("units", Units(args.units, unit_bytes, device), torch.ones(1, dtype=torch.int64, device=device)),
        (
            "qwen3-8b",
            build_stack(shape, torch.bfloat16, device, device),
            torch.ones(1, args.hidden, dtype=torch.bfloat16, device=device),
        ),
    ]
    wanted = [(case, way) for case in cases for way in args.ways.split(",")]
    # A checksum reads its unit in place, so a budget would move nothing.
    wanted = [(case, way) for case, way in wanted if way not in BUDGETS or case[0] != "units"]
    rows = [row for case, way in wanted for row in measure(*case, way, args.rounds, device)]
    rows = slowest(rows)
    if dist.get_rank() == 0:
        show(rows)
        for row in rows:
            append(asdict(row), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
