"""A token of ``generate`` with the CPU's share in missed experts, beside the link alone; and the doorbell by itself.

    python benchmarks/shared_experts.py --out FILE --layers 12
    TRITON_INTERPRET=1 python benchmarks/shared_experts.py --device cpu --tiny    tries the script

Models have seeded weights of published shapes; routers follow a seeded trace (``plan/routing_traces.py``), and
``--slots`` says how many experts of a layer are on the device, so how many are hits. By turns: the link alone, then the
CPU with so many threads; with the link free, and with copies of another stream that leave ``--held`` GB/s of it
(``held_link.py``). A row of ``held`` says what they left, measured before and after each run (``held_gb_per_s``), and
how long the resident model takes beside them (``resident_held_ms``), as copies take registers of the GPU, too. With
``--throttle`` there are no such copies, and the kernel that fetches experts has fewer reads under way.

    taskset -c 0,1 python benchmarks/shared_experts.py --layers 12 --slots 40 --threads 1 --ways none    two cores

    python benchmarks/shared_experts.py --layers 12 --slots 24 --steps 10000    compares bits alone

``bit_equal``: logits equal those of the resident model, all tokens.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

import headrace
from card_24gb import Rehearsal, _Sequence, add_card_arguments, free_memory, rehearsals, rest_on_host
from harness import finish, kept, link_bytes_per_s, parser_of, words_of
from headrace.adapters.transformers.shared_experts import share_experts
from headrace.experts import ordered
from headrace.experts.cpu.pool import physical_cores
from headrace.experts.cpu.share import LayerShare, wait
from headrace.experts.ordered import Launch
from held_link import HeldLink, ThrottledLink
from ordered_experts import _TINY, GPT_OSS_120B, MODELS, gpt_oss

# Forced shares of the CPU whose bits are compared: of n missing experts.
FORCED = {"none": [0], "30 %": [round(0.3 * n) for n in range(65)], "all": list(range(65))}


def about_run(rehearsal: Rehearsal, model: Any) -> dict[str, Any]:
    """What all rows of a run say."""
    device = torch.cuda.get_device_name(rehearsal.device) if rehearsal.device.type == "cuda" else "cpu"
    row = {"table": "shared-experts", "model": rehearsal.name, "layers": model.config.num_hidden_layers}
    return row | {"device": device, "cores": len(physical_cores())}


def build(rehearsal: Rehearsal) -> Any:
    if not rehearsal.name.startswith("gpt-oss"):
        model = rehearsal.build()
        model.set_experts_implementation("headrace")
        return model
    sizes = {**GPT_OSS_120B, **(_TINY if rehearsal.tiny else {})}
    sizes |= {} if rehearsal.layers is None else {"num_hidden_layers": rehearsal.layers}
    kinds = (["sliding_attention", "full_attention"] * 18)[: sizes["num_hidden_layers"]]
    return gpt_oss({**sizes, "layer_types": kinds}, rehearsal.device)


def held_links(
    device: torch.device, held: Sequence[float], throttles: bool
) -> dict[float, tuple[HeldLink | None, float | None]]:
    """What holds the link by GB/s that it is to leave, and what it leaves; none where the link is free, or a CPU's."""
    found: dict[float, tuple[HeldLink | None, float | None]] = {}
    for goal in held:
        if not goal or device.type != "cuda":
            found[goal] = None, None
            continue
        link = (ThrottledLink if throttles else HeldLink)(device)
        try:
            free, left = link.left_bytes_per_s() / 1e9, link.calibrate(goal * 1e9) / 1e9
            with link.held():
                latency_ms = link.latency_ms()
        except Exception as error:  # rows of a free link are worth having without those of a held one
            print(f"held: no rows of {goal:g} GB/s: {error}", flush=True)
            continue
        how = "throttled" if throttles else "held"
        is_near = "" if abs(left - goal) <= 1 else f", and not the {goal:g} that were asked for"
        print(
            f"{how}: {link.programs} programs leave {left:.1f} of {free:.1f} GB/s{is_near}; an op that does nothing "
            f"takes {latency_ms:.3f} ms beside them", flush=True,
        )  # fmt: skip
        found[goal] = link, left
    return found


def rows_of(
    rehearsal: Rehearsal, slots: Sequence[int], threads: Sequence[int], held: Sequence[float], rounds: int,
    ways: Sequence[str], throttles: bool = False,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    device, tiny = rehearsal.device, rehearsal.tiny
    if tiny:  # each program takes the interpreter 50 ms
        ordered.LAUNCHES.update(dict.fromkeys(ordered.LAUNCHES, (Launch(256, 1, 1), Launch(128, 1, 1))))
    model = build(rehearsal)
    sequence = _Sequence(model, *((8, 2) if tiny else (128, 128)), device)
    is_cuda = device.type == "cuda"

    def measured(link: HeldLink | None = None) -> tuple[Any, float | None]:
        """A run, and GB/s that are left of a link that is held."""
        left: list[float] = []
        with link.held() if link else nullcontext():
            if link:
                left.append(link.left_bytes_per_s() / 1e9)
            graphs = headrace.decode_in_graphs(model) if is_cuda else None
            try:
                sequence.run()
                run = sequence.run()
            finally:
                if graphs is not None:
                    graphs.remove()
            if link:
                left.append(link.left_bytes_per_s() / 1e9)
        return run, statistics.mean(left) if left else None

    resident, links = measured()[0], held_links(device, held, throttles)
    about = about_run(rehearsal, model) | {"link_gb_per_s": link_bytes_per_s(device, 5) / 1e9}
    about |= {"resident_ms": resident.ms}
    resident_held_ms = {goal: measured(link)[0].ms if link else None for goal, (link, _) in links.items()}
    rest_on_host(model)
    all_cores, slower = physical_cores(), "throttled" if throttles else "held"
    for count in slots:
        policy = headrace.Rules([("experts", "cache")], expert_slots=count)
        with headrace.offload(model, policy, device=device) as handle:
            for name in (name for name in FORCED if name in ways):
                share = share_experts(model, all_cores[1:] or all_cores, FORCED[name])
                run = measured()[0]
                if name == "none" and is_cuda:
                    about["doorbell_us"] = doorbell_us(model, share, device)
                share.remove()
                row = {"case": "bits", "way": name, "slots": count, "computed": share.doorbell.computed, "ms": run.ms}
                yield about | row | {"bit_equal": torch.equal(run.logits, resident.logits)}
            for goal, (link, calibrated) in links.items():
                found: dict[tuple[str, int], list[float]] = {}
                facts: dict[tuple[str, int], dict[str, Any]] = {}
                lefts: dict[tuple[str, int], list[float]] = {}
                for _ in range(rounds):
                    for number in (0, *threads):
                        before = handle.stats().experts
                        cores = all_cores[-number:] if number <= len(all_cores) else list(range(1, number + 1))
                        share = share_experts(model, cores) if number else None
                        run, left = measured(link)
                        after = handle.stats().experts
                        key = ("share" if number else "link", number)
                        equal = torch.equal(run.logits, resident.logits)
                        found.setdefault(key, []).append(run.ms if equal else float("nan"))
                        hits, fetched = (
                            sum(getattr(a, field) - getattr(b, field) for a, b in zip(after, before, strict=True))
                            for field in ("hits", "fetched")
                        )
                        computed = 0 if share is None else share.doorbell.computed
                        facts[key] = {"hits": hits / (hits + fetched + computed), "computed": computed}
                        facts[key] |= {"fetched": fetched}
                        if left:
                            lefts.setdefault(key, []).append(left)
                            facts[key] |= {"held_gb_per_s": statistics.mean(lefts[key])}
                        if share is not None:
                            facts[key] |= {"us": [round(x, 1) for x in share.doorbell.us_per_expert]}
                            facts[key] |= {"shares": share.doorbell.shares[:9].tolist()}
                            share.remove()
                for (way, number), samples in found.items():
                    ms = statistics.median(samples)
                    row = about | {"case": slower if goal else "free", "slots": count, "way": way}
                    if goal:
                        row |= {"held_to": goal, "calibrated_gb_per_s": calibrated}
                        row |= {"held_programs": link and link.programs, "resident_held_ms": resident_held_ms[goal]}
                    row |= {"threads": number, "ms": ms, "samples_ms": samples, "bit_equal": ms == ms}
                    yield row | {"against_link": ms / statistics.median(found["link", 0])} | facts[way, number]
    free_memory(device)


@contextmanager
def changing(shares: torch.Tensor, is_random: bool) -> Iterator[None]:
    """Within, every millisecond others: of n missing experts the CPU computes any number."""
    ended, made = threading.Event(), torch.Generator().manual_seed(0)

    def run() -> None:
        while not ended.wait(1e-3):
            shares.copy_((torch.rand(len(shares), generator=made) * torch.arange(1, len(shares) + 1)).long())

    thread = threading.Thread(target=run)
    if is_random:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if is_random:
            thread.join()


def long_rows(rehearsal: Rehearsal, slots: Sequence[int], steps: int, ways: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Logits of ``steps`` steps in each way beside those of the link alone, which equal the resident model's."""
    device, tiny = rehearsal.device, rehearsal.tiny
    if tiny:
        ordered.LAUNCHES.update(dict.fromkeys(ordered.LAUNCHES, (Launch(256, 1, 1), Launch(128, 1, 1))))
    model = build(rehearsal)
    tokens = min(steps, 32 if tiny else 128)
    runs = -(-steps // tokens)
    sequence, cores = _Sequence(model, 8 if tiny else 128, tokens, device), physical_cores()
    resident = sequence.run().logits
    rest_on_host(model)
    for count in slots:
        with headrace.offload(model, headrace.Rules([("experts", "cache")], expert_slots=count), device=device):
            for name, shares in {**FORCED, "random": list(range(65))}.items():
                if name not in ways:
                    continue
                share = share_experts(model, cores[1:] or cores, shares)
                graphs = headrace.decode_in_graphs(model) if device.type == "cuda" else None
                different, began = 0, time.perf_counter()
                with changing(share.doorbell.shares, name == "random"):
                    for _ in range(runs):
                        different += int((sequence.run().logits != resident).any(-1).sum())
                if graphs is not None:
                    graphs.remove()
                share.remove()
                row = about_run(rehearsal, model) | {"case": "steps", "way": name, "slots": count}
                row |= {"steps": runs * tokens, "different": different, "computed": share.doorbell.computed}
                yield row | {"ms": (time.perf_counter() - began) / runs / tokens * 1e3, "bit_equal": not different}
    free_memory(device)


def doorbell_us(model: Any, share: Any, device: torch.device) -> float:
    """One way and back, in a graph, for a request without experts."""
    config = model.config
    pairs = config.num_experts_per_tok
    ids = torch.zeros(1, pairs, dtype=torch.int64, device=device)
    x = torch.zeros(1, config.hidden_size, dtype=torch.bfloat16, device=device)
    asked = [torch.full((1,), number, dtype=torch.int32, device=device) for number in (1, 0)]
    layer, stream, times = LayerShare(share.doorbell, 0), torch.cuda.Stream(device), []
    for fetched in asked:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            layer.ring(ids, ids, x, fetched)
            wait(*share.doorbell.memory, 8)
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(200):
                layer.ring(ids, ids, x, fetched)
                wait(*share.doorbell.memory, 8)
        for _ in range(5):
            begin = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            elapsed = time.perf_counter() - begin
        times.append(elapsed / 200 * 1e6)
    print(f"doorbell: {times[0]:.2f} us with an answer, {times[1]:.2f} us if nothing is asked", flush=True)
    return times[0]


def describe(row: dict[str, Any]) -> str:
    """One line about a result."""
    bits = "same bits" if row["bit_equal"] else "OTHER BITS"
    if row["case"] == "steps":
        return (
            f"{row['model']:<14} {row['slots']:>3} slots, forced {row['way']:<6} {row['computed']:6} computed, "
            f"{row['different']} of {row['steps']} steps differ, {row['ms']:.1f} ms each"
        )
    if row["case"] == "bits":
        return (
            f"{row['model']:<14} {row['slots']:>3} slots, forced {row['way']:<5} {row['computed']:6} computed  {bits}"
        )
    return (
        f"{row['model']:<14} {row['slots']:>3} slots, {row['case']}{row.get('held_gb_per_s', 0):5.1f}  {row['way']:<5} "
        f"{row['threads']:>2} threads {row['ms']:7.2f} ms {row['against_link']:.3f} x, {row['hits']:.1%} hit, "
        f"{row['computed']:6} computed of {row['computed'] + row['fetched']}, us {row.get('us')} {row.get('shares')} "
        f"{bits}"
    )


def main() -> None:
    parser = parser_of(__doc__, rounds=2)
    parser.add_argument("--models", type=words_of(MODELS), default=["qwen3-30b-a3b"])
    parser.add_argument("--slots", type=lambda text: [int(word) for word in text.split(",")], default=[40])
    parser.add_argument("--threads", type=lambda text: [int(word) for word in text.split(",")], default=[4, 8, 15])
    parser.add_argument(
        "--held", type=lambda text: [float(word) for word in text.split(",")], default=[0.0, 22.0],
        help="GB/s of the link that copies of another stream leave; 0: there are none",
    )  # fmt: skip
    parser.add_argument("--throttle", action="store_true", help="the link has fewer reads under way, and no others")
    parser.add_argument(
        "--ways", type=words_of([*FORCED, "random"]), default=[*FORCED, "random"], help="whose bits are compared"
    )
    parser.add_argument("--steps", type=int, help="compare the bits of so many steps in each way, and measure nothing")
    add_card_arguments(parser)
    given = parser.parse_args()
    results = []
    for rehearsal in rehearsals(given, ["graphs"]):
        rows = rows_of(rehearsal, given.slots, given.threads, given.held, given.rounds, given.ways, given.throttle)
        rows = long_rows(rehearsal, given.slots, given.steps, given.ways) if given.steps else rows
        results += kept(rows, describe, given.out)
    finish("shared experts", results)


if __name__ == "__main__":
    main()
