"""Whether fetches of missing experts hide: behind the products of those in slots, or begun a layer ahead by a hint.

    PYTHONPATH=src:benchmarks python3 benchmarks/experts_overlap.py --out FILE             about a minute, on one GPU
    TRITON_INTERPRET=1 PYTHONPATH=src:benchmarks python3 benchmarks/experts_overlap.py --tiny   bits alone, on a CPU

Layers of Qwen3-30B-A3B's experts in bf16, half of them in slots. Between the experts of two layers resident products
stand in for attention. Routing is driven: it hits a stated share. A step is one CUDA graph. Cases:

    today       the cache's admission and fetch, then the products
    sort-first  the fetch beside the sorting of pairs by their experts, then the products
    hits-first  products of experts in slots beside the fetch of the others, whose products follow; one sum at the end
    hint N      a hint for the next layer is admitted beside this one, to the slots used least recently; of what that
                layer would miss N % are right
    both N      hits-first and hint N

Parts are timed in the same rounds: *fetch* (admissions and fetches alone), *resident* (all experts on the device, with
attention's time), *between* (that time alone). *link* is *fetch*, scaled to the bytes of the case. Then

    sum   = link + resident
    bound = between + max(link, resident - between) for hits-first, which cannot hide behind attention;
            max(link, resident) for hints

Products are grouped (``F.grouped_mm``, what transformers' experts run) or by pairs (a kernel that needs no sorting).
All cases share caches and slots, and go on with the routing where the case before stopped.

Predicted before the first run (H200, ms a layer, 30 us between, grouped products; 184 us for a fetched expert):

    rows  hits  today  sort-first  hits-first  hint 50  hint 80  both 80
    1     67 %  0.60   0.585       0.565       0.75     0.61     0.60
    1     91 %  0.25   0.235       0.235       0.24     0.195    0.20
    4     67 %  1.61   1.595       1.56        2.25     1.78     1.77
    4     91 %  0.56   0.545       0.52        0.64     0.50     0.49

Products by pairs: 0.03 less at 1 row, the same at 4, and nothing to sort. So hits-first gains 3 to 7 %, and a hint only
where the link is idle for a part of the step and most of what it says is right.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
import triton

import headrace.experts.cache as cache_module
from expert_products import PRODUCTS, Pass, Weights, split_kernel
from expert_steps import SHAPES, ExpertsShape, shares
from harness import Timing, append, capture, counts, event_times, finish, interleave, parser_of, time_host, words_of
from headrace.experts.cache import ExpertCache
from headrace.experts.kernels import fetch_kernel
from headrace.plan.cached_experts import CachedLayer
from headrace.stores.expert_ranges import ExpertRanges
from hinted_routing import HINTS, Routing, driven, shared_experts

TINY = ExpertsShape(num_layers=2, num_experts=24, top_k=4, hidden=32, intermediate=16)

_WARM_UP_STEPS = 6
_COMPARED_STEPS = 6 if torch.cuda.is_available() else 2  # kernels are interpreted without a GPU
_MATRICES = 8  # of attention's stand-in: more than the L2 cache holds


@dataclass(frozen=True)
class Case:
    """What a step does.

    Attributes:
        is_cached, has_products, has_between: without one of these it is a part.
        hint: the share of misses that the hint for the next layer predicts; ``None``: there is no hint.
    """

    name: str
    is_cached: bool = True
    has_products: bool = True
    has_between: bool = True
    sort_first: bool = False
    hits_first: bool = False
    hint: float | None = None


CASES = (
    Case("today"),
    Case("sort-first", sort_first=True),
    Case("hits-first", hits_first=True),
    *(Case(f"hint {share:.0%}".rstrip("%"), hint=share) for share in HINTS),
    Case("both 80", hits_first=True, hint=0.8),
)
PARTS = (
    Case("resident", is_cached=False),
    Case("between", is_cached=False, has_products=False),
    Case("fetch", has_products=False, has_between=False),
)


# -- beside ------------------------------------------------------------------------------------------------------------


class Beside:
    """Work beside the current stream, on a second one. On a CPU it is done as late as it may be, when it is joined."""

    def __init__(self, device: torch.device) -> None:
        # A fetch waits for the link, so it begins before kernels that fill the device.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def launch(self, work: Callable[[], object]) -> Callable[[], object]:
        """Begin ``work`` after what the current stream has to do so far; what is returned joins it."""
        if self._stream is None:
            return work
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)


class _FetchBeside:
    """Stands in for the fetch kernel in an admission, and launches it beside."""

    def __init__(self, beside: Beside) -> None:
        self._beside = beside
        self.joins: list[Callable[[], object]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **sizes: self.joins.append(
            self._beside.launch(partial(fetch_kernel[grid], *args, **sizes))
        )

    def join(self) -> None:
        for each in self.joins:
            each()


@contextmanager
def fetch_beside(beside: Beside) -> Iterator[_FetchBeside]:
    """Admissions launch their fetches beside the current stream."""
    launcher = _FetchBeside(beside)
    cache_module.fetch_kernel = launcher
    try:
        yield launcher
    finally:
        cache_module.fetch_kernel = fetch_kernel


# -- the stack ---------------------------------------------------------------------------------------------------------


class Between:
    """Stands in for attention: resident products of about the same time."""

    def __init__(self, hidden: int, device: torch.device, generator: torch.Generator) -> None:
        shape = (_MATRICES, hidden, hidden)
        self._matrices = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self._matrices.normal_(0.0, hidden**-0.5, generator=generator)
        self.num_products = 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` plus a tenth of the products, of any number of rows."""
        if self.num_products == 0:
            return x
        y = F.rms_norm(x, x.shape[-1:])
        for index in range(self.num_products):
            y = F.linear(y, self._matrices[index % _MATRICES])
        return x + 0.1 * y

    def calibrate(self, microseconds: float, x: torch.Tensor) -> None:
        """Choose the number of products by the time that each takes in a graph."""
        if not x.is_cuda:
            return
        times = {}
        for self.num_products in (16, 48):
            self(x)
            replay, _ = capture(lambda: self(x))
            replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                replay()
            end.record()
            end.synchronize()
            times[self.num_products] = begin.elapsed_time(end) * 100
        self.num_products = round(microseconds / ((times[48] - times[16]) / 32))


class Stack:
    """Layers of experts: resident ones and cached ones with the same bytes.

    Attributes:
        at: int64 [1] on the device: the step of the routing that comes next.
        between: attention's stand-in.
        caches: of each layer; all cases change them.
        hinted: int64 [1] on the device: experts that hints have fetched.
    """

    def __init__(self, shape: ExpertsShape, num_slots: int, device: torch.device) -> None:
        self.shape, self._device = shape, device
        generator = torch.Generator(device).manual_seed(0)
        experts, hidden, inner = shape.num_experts, shape.hidden, shape.intermediate
        sizes = {"up": (experts, 2 * inner, hidden), "down": (experts, hidden, inner)}
        layers = [
            CachedLayer(
                f"{index}",
                experts,
                num_slots,
                {f"{index}.{name}": 2 * torch.Size(size).numel() for name, size in sizes.items()},
            )
            for index in range(shape.num_layers)
        ]
        ranges = ExpertRanges(layers, device)
        pinned = device.type == "cuda"
        staging = {name: torch.empty(size, dtype=torch.bfloat16, pin_memory=pinned) for name, size in sizes.items()}
        self._resident: list[Weights] = []
        for layer in layers:
            tensors = []
            for storage, name in zip(layer.storages, sizes, strict=True):
                tensor = torch.empty(sizes[name], dtype=torch.bfloat16, device=device)
                tensors.append(tensor.normal_(0.0, 0.02, generator=generator))
                staging[name].copy_(tensor)
                ranges.destinations[storage].copy_(staging[name].flatten().view(torch.uint8))
            self._resident.append((tensors[0], tensors[1]))
        ranges.finish()
        self._cached: list[Weights] = []
        self.caches = []
        for layer in layers:
            rows = [ranges.rows(storage) for storage in layer.storages]
            up, down = (
                each.view(torch.bfloat16).view(-1, *size[1:]) for each, size in zip(rows, sizes.values(), strict=True)
            )
            self._cached.append((up, down))
            home = layer.first_row + torch.arange(experts, device=device)
            self.caches.append(ExpertCache(rows, home, num_slots))
        self.between = Between(hidden, device, generator)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.hinted = torch.zeros(1, dtype=torch.int64, device=device)
        self._fetches, self._hints = Beside(device), Beside(device)

    def step(self, case: Case, x: torch.Tensor, routing: Routing, weights: torch.Tensor, products: str) -> torch.Tensor:
        """One step of ``case`` with the choices of the step :attr:`at`; those that admit go on to the next step.

        Args:
            x: [rows, hidden].
            routing: its tensors stay where they are.
            weights: [rows, top_k], of the experts of each row.
            products: one of :data:`expert_products.PRODUCTS`.
        """
        ids = routing.ids.index_select(0, self.at)[0]
        hints = routing.hints[case.hint].index_select(0, self.at)[0] if case.hint is not None else None
        joins: list[Callable[[], object]] = [_nothing] * (len(ids) + 1)
        for layer, chosen in enumerate(ids):
            if hints is not None and layer + 1 < len(ids):
                joins[layer + 1] = self._hints.launch(partial(self._admit_hint, layer + 1, hints[layer + 1]))
            if case.has_between:
                x = self.between(x)
            joins[layer]()
            if case.has_products:
                x = x + self._experts(case, layer, x, chosen, weights, products)
            elif case.is_cached:
                self.caches[layer].admit(chosen)
        if case.is_cached:
            self.at.add_(1).remainder_(len(routing.ids))
        return x

    def _admit_hint(self, layer: int, ids: torch.Tensor) -> None:
        self.caches[layer].admit(ids)
        self.hinted.add_(self.caches[layer]._fetched[0])

    def _experts(
        self, case: Case, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, products: str
    ) -> torch.Tensor:
        cache = self.caches[layer]
        normed = F.rms_norm(x, x.shape[-1:])  # before the fetch in every case, since routers need it
        tensors = self._cached[layer] if case.is_cached else self._resident[layer]
        if not case.is_cached:
            passes: list[Pass] = [(ids.flatten(), _nothing)]
        elif not (case.sort_first or case.hits_first):
            passes = [(cache.admit(ids).flatten(), _nothing)]
        else:
            with fetch_beside(self._fetches) as fetches:
                rows = cache.admit(ids).flatten()
            passes = [(rows, fetches.join)]
        if case.hits_first:
            first, second = torch.empty_like(rows), torch.empty_like(rows)
            split_kernel[(1,)](
                rows, cache._fetched, first, second, rows.numel(), cache.num_slots, tensors[0].shape[0],
                BLOCK=triton.next_power_of_2(rows.numel()),
            )  # fmt: skip
            passes = [(first, _nothing), (second, fetches.join)]
        # Of every pair, whichever pass has computed it, in the order of the router.
        output = PRODUCTS[products](normed, passes, tensors, ids.shape[1]).view(*ids.shape, -1)
        return (output * weights[..., None]).sum(1)

    def moved(self) -> tuple[int, int, int]:
        """(steps, experts that have crossed the link, of these by hints) so far."""
        found = [cache.counts() for cache in self.caches]
        return found[0].steps, sum(each.fetched + each.in_place for each in found), int(self.hinted)


def _nothing() -> None:
    """There is nothing to wait for."""


# -- measuring ---------------------------------------------------------------------------------------------------------


class _Timed:
    """A case as a graph, and what its runs have moved."""

    def __init__(self, stack: Stack, case: Case, run: Callable[[], torch.Tensor]) -> None:
        self.case, self._stack, self._run = case, stack, run
        self.output = run()
        self._replay: Callable[[], object] | None = None
        if stack.at.is_cuda:
            self._replay, self.output = capture(run)
        self.moved = (0, 0, 0)

    def __call__(self) -> None:
        if self._replay is None:
            self.output = self._run()
        else:
            self._replay()

    def outputs(self, begin: int) -> list[torch.Tensor]:
        """Of some steps, from ``begin`` on."""
        found = []
        for step in range(begin, begin + _COMPARED_STEPS):
            self._stack.at.fill_(step)
            self()
            found.append(self.output.clone())
        return found

    def timed(self, repeats: int) -> list[float]:
        """Time of each step in ms, and count what crosses the link."""
        before = self._stack.moved()
        samples = _time_cuda(self, repeats) if self._replay else time_host(self, repeats)
        added = (after - first for after, first in zip(self._stack.moved(), before, strict=True))
        self.moved = tuple(map(sum, zip(self.moved, added, strict=True)))  # type: ignore[assignment]
        return samples


def _time_cuda(step: Callable[[], object], repeats: int) -> list[float]:
    """Device time of each run in ms. There is less before than the harness's 0.2 s, since there are many cases."""
    for _ in range(_WARM_UP_STEPS):
        step()
    return event_times(step, repeats)


def run(
    shape: ExpertsShape,
    num_slots: int,
    all_rows: Sequence[int],
    hits: Sequence[float],
    products: Sequence[str],
    rounds: int,
    repeats: int,
    between_us: float,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """Yield one result for each of :data:`CASES`, by rows, share of hits and products."""
    with torch.no_grad():
        num_filling = {
            (rows, share): _filling_steps(num_slots, rows, share, shape.top_k) for rows in all_rows for share in hits
        }
        # A routing that began again would find experts in slots by accident.
        num_timed = rounds * (len(CASES) + len(PARTS)) * (_WARM_UP_STEPS + repeats)
        num_steps = max(num_filling.values()) + 2 * len(CASES) * _COMPARED_STEPS + num_timed + 1
        driven_by = {
            rows: {share: driven(shape, num_slots, rows, share, num_steps) for share in hits} for rows in all_rows
        }
        stack = Stack(shape, num_slots, device)
        generator = torch.Generator(device).manual_seed(1)
        for rows in all_rows:
            x = torch.randn(rows, shape.hidden, device=device, generator=generator).to(torch.bfloat16)
            weights = torch.rand(rows, shape.top_k, device=device, generator=generator)
            weights = (weights / weights.sum(-1, keepdim=True)).to(torch.bfloat16)
            stack.between.calibrate(between_us, x)
            routings = driven_by[rows]
            first = routings[hits[0]]
            routing = Routing(first.ids.to(device), {share: ids.to(device) for share, ids in first.hints.items()})
            for name in products:
                timed = [
                    _Timed(stack, case, partial(stack.step, case, x, routing, weights, name))
                    for case in (*CASES, *PARTS)
                ]
                for share, each in routings.items():
                    routing.ids.copy_(each.ids)
                    for hint, ids in each.hints.items():
                        routing.hints[hint].copy_(ids)
                    for row in _measure(stack, timed, num_filling[rows, share], rounds, repeats):
                        yield {"rows": rows, "hits": share, "products": name, "slots": num_slots, **row}


def _filling_steps(num_slots: int, rows: int, hits: float, top_k: int) -> int:
    """Steps until slots hold what was used last, whatever they held before."""
    return 8 + ceil(num_slots / ((1 - hits) * rows * (top_k - shared_experts(rows, top_k))))


def _measure(
    stack: Stack, timed: Sequence[_Timed], num_filling: int, rounds: int, repeats: int
) -> Iterator[dict[str, Any]]:
    by_name = {each.case.name: each for each in timed}
    cases = [by_name[case.name] for case in CASES]
    stack.at.zero_()
    for _ in range(num_filling):
        by_name["fetch"]()
    is_equal = _equal_bits(stack, by_name["resident"], cases)
    for each in timed:
        each.moved = (0, 0, 0)
    times = interleave(by_name, rounds, repeats, lambda step, repeats: step.timed(repeats))  # type: ignore[attr-defined]
    for name, equal in _equal_bits(stack, by_name["resident"], cases).items():
        is_equal[name] &= equal
    for case in cases:
        yield _row(stack, case, by_name["fetch"], times, is_equal[case.case.name])


def _equal_bits(stack: Stack, resident: _Timed, cases: Sequence[_Timed]) -> dict[str, bool]:
    """Whether each case, by name, has the outputs of ``resident``: each in the next steps, so that all of them miss."""
    found = {}
    for case in cases:
        begin, before = int(stack.at), stack.moved()
        expected = resident.outputs(begin)
        if not all(output.isfinite().all() for output in expected) or torch.equal(expected[0], expected[1]):
            raise RuntimeError("expected finite outputs that differ from step to step")
        outputs = case.outputs(begin)
        if stack.moved()[1] == before[1]:
            raise RuntimeError(f"{case.case.name}: expected experts that cross the link, found none")
        if int(stack.at) != begin + _COMPARED_STEPS:
            raise RuntimeError(f"expected a routing of more steps, found {int(stack.at)} after {begin}")
        found[case.case.name] = all(map(torch.equal, outputs, expected))
    return found


def _row(stack: Stack, timed: _Timed, fetch: _Timed, times: Mapping[str, Timing], bit_equal: bool) -> dict[str, Any]:
    case, layers = timed.case, stack.shape.num_layers
    steps, moved, hinted = timed.moved
    alone_steps, alone_moved, _ = fetch.moved
    if min(moved, alone_moved) == 0:
        raise RuntimeError(f"{case.name}: expected experts that cross the link, found none")
    resident_ms, between_ms, fetch_ms, today_ms = (times[name].ms for name in ("resident", "between", "fetch", "today"))
    link_ms = fetch_ms * (moved / steps) / (alone_moved / alone_steps)
    if case.hint is not None:
        bound_ms = max(link_ms, resident_ms)
    elif case.hits_first:
        bound_ms = between_ms + max(link_ms, resident_ms - between_ms)
    else:
        bound_ms = link_ms + resident_ms
    return {
        "case": case.name,
        "layers": layers,
        "ms": times[case.name].ms,
        "spread_ms": times[case.name].spread_ms,
        "ms_per_layer": times[case.name].ms / layers,
        "gain": today_ms / times[case.name].ms - 1,
        "sum_ms": link_ms + resident_ms,
        "bound_ms": bound_ms,
        "link_ms": link_ms,
        "resident_ms": resident_ms,
        "between_ms": between_ms,
        "fetch_ms": fetch_ms,
        "fetch_gb_per_s": alone_moved / alone_steps * stack.shape.expert_bytes / fetch_ms / 1e6,
        "bytes_moved": moved / steps * stack.shape.expert_bytes,
        "missed_per_layer": (moved - hinted) / steps / layers,
        "hinted_per_layer": hinted / steps / layers,
        "bit_equal": bit_equal,
    }


_LINE = "{:<8} {:>4} {:>5} {:<11} {:>8} {:>7} {:>7} {:>7} {:>7} {:>8} {:>7} {:>7}  {}"
_HEAD = (
    "products",
    "rows",
    "hits",
    "case",
    "ms/layer",
    "spread",
    "gain",
    "sum",
    "bound",
    "resident",
    "missed",
    "hinted",
)


def describe(row: Mapping[str, Any]) -> str:
    """One line of the table; times in ms a layer, experts a layer."""
    each = (f"{row[name] / row['layers']:.4f}" for name in ("spread_ms", "sum_ms", "bound_ms", "resident_ms"))
    spread, total, bound, resident = each
    return _LINE.format(
        row["products"], row["rows"], f"{row['hits']:.0%}", row["case"], f"{row['ms_per_layer']:.4f}", spread,
        f"{row['gain']:+.1%}", total, bound, resident, f"{row['missed_per_layer']:.2f}",
        f"{row['hinted_per_layer']:.2f}", "same bits" if row["bit_equal"] else "OTHER BITS",
    )  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, rounds=3, repeats=10)
    parser.add_argument("--layers", type=int, help="default 12; 48 take 58 GB of host memory")
    parser.add_argument("--rows", type=counts, help="sequences of a step (default: 1,4)")
    parser.add_argument("--hits", type=shares, help="of the experts of a step (default: 0.67,0.91)")
    parser.add_argument("--slots", type=int, help="experts of each layer on the device (default: half of them)")
    parser.add_argument("--between-us", type=float, default=30.0, help="attention's time in each layer")
    parser.add_argument("--products", type=words_of(list(PRODUCTS)), default=list(PRODUCTS), help="grouped, pairs")
    parser.add_argument("--tiny", action="store_true", help="small layers; with TRITON_INTERPRET=1 on a CPU")
    given = parser.parse_args()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and not torch.cuda.is_available():
        parser.error("expected a GPU, found none; --tiny with TRITON_INTERPRET=1 compares bits without one")
    if interpreted and not given.tiny:
        parser.error("TRITON_INTERPRET=1: expected --tiny, since kernels are interpreted")
    device = torch.device("cpu") if interpreted else torch.device("cuda", torch.cuda.current_device())
    shape = TINY if given.tiny else replace(SHAPES["qwen3-30b-a3b"], num_layers=12)
    shape = replace(shape, num_layers=given.layers or shape.num_layers)
    all_rows = given.rows or ([1, 2] if given.tiny else [1, 4])
    hits = given.hits or ([0.5, 0.67] if given.tiny else [0.67, 0.91])
    slots = given.slots or shape.num_experts // 2
    if shape.num_layers < 2 or not max(all_rows) * shape.top_k <= slots < shape.num_experts:
        parser.error(f"expected 2 layers or more, and slots for {max(all_rows)} rows, but not all experts: --slots")
    if given.between_us < 0 or not all(0 < share < 1 for share in hits):
        parser.error("expected --between-us of at least 0, and --hits between 0 and 1")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    results = []
    for row in run(shape, slots, all_rows, hits, given.products, given.rounds, given.repeats, given.between_us, device):
        results.append(row)
        append({"experiment": "experts overlap", "device": name, **row}, given.out)
        print(describe(row), flush=True)
    print("", f"{name}, {shape.num_layers} layers, {slots} of {shape.num_experts} experts in slots", sep="\n")
    print(_LINE.format(*_HEAD, ""))
    print(*map(describe, results), sep="\n")
    finish("experts overlap", results)


if __name__ == "__main__":
    main()
