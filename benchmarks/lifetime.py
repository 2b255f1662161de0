"""Park, resume and update of an offload, against the bytes that cross the link.

    python benchmarks/lifetime.py --out FILE                  on a GPU
    python benchmarks/lifetime.py --device cpu --tiny         tries the script

The models are those of ``card_24gb.py``, with seeded weights. Cases: ``resident`` (a budget above the weights),
``offloaded`` (every fourth layer prefetched), ``resized`` (12 GiB; ``halve`` makes it 6, ``double`` 12 again; in
``resized-coded`` the planner may code weights), ``cache`` (experts cached in ``--card`` bytes). In each cycle the
offload parks, which leaves ``left_mib`` more device memory in use than before it, and resumes, ``at once`` or after
half a second (``resume``), in which the driver is done with what was freed; ``first_step_ms`` is the first forward of
one token after that. ``update`` writes the same values again, from pinned host memory, ``pageable`` from memory that is
not pinned. Steps before and after have to have the same bits. ``remove`` leaves the memory of libraries, and of nothing
else.

    at_link_ms = bytes that the call copied / link
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import headrace
from card_24gb import Card, Rehearsal, add_card_arguments, free_memory, rehearsals, rest_on_host
from harness import finish, kept, link_bytes_per_s, parser_of, words_of
from headrace.config import Budget, Prefetch
from headrace.model.inventory import take_inventory

_PAUSE_S = 0.5
CASES = {"qwen3-8b": ("resident", "offloaded", "resized", "resized-coded"), "qwen3-30b-a3b": ("cache",)}


def rows_of(rehearsal: Rehearsal, cycles: int, cases: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One result per case and call."""
    device, name = rehearsal.device, rehearsal.name
    link = link_bytes_per_s(device, 5)
    model = rehearsal.build()
    rest_on_host(model)
    weights, ids = take_inventory(model).num_bytes, torch.tensor([[1]], device=device)
    about = {"table": "lifetime", "model": name, "layers": model.config.num_hidden_layers, "link_gb_per_s": link / 1e9}
    about |= {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def timed(call: Callable[[], Any]) -> tuple[float, Any]:
        wait()
        begin = time.perf_counter()
        found = call()
        wait()
        return (time.perf_counter() - begin) * 1e3, found

    def used() -> int:
        if device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(device)
        return total - free

    def step() -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model(ids, use_cache=False).logits
        return found

    large = weights * 3 // 4 if rehearsal.tiny else 12 << 30
    small = large // 2
    for case in [each for each in CASES[name] if each in cases]:
        is_resized = case.startswith("resized")
        with Card(rehearsal.card_bytes, device):
            if case == "offloaded":
                policy: Budget | Prefetch = Prefetch(4, 1, 2)
            elif is_resized:
                policy = Budget(large, codec="auto" if case == "resized-coded" else "none")
            elif case == "resident" or device.type == "cpu":
                policy = Budget(2 * weights)
            else:
                policy = Budget(rehearsal.card_bytes - rehearsal.reserve_bytes, rules=(("experts", "cache"),))
            at_first = used()
            with headrace.offload(model, policy, device=device) as handle:
                expected = step()  # takes the memory of libraries
                step()
                handle.park()
                before = used()  # of libraries alone
                handle.resume()
                found: dict[str, list[float]] = {}
                facts = dict[str, dict[str, Any]]()
                is_equal = True
                for call, pause_s in (("at once", 0.0), ("resume", _PAUSE_S)) * cycles:
                    ms, _ = timed(handle.park)
                    found.setdefault("park", []).append(ms)
                    facts["park"] = {"left_mib": (used() - before) / 2**20}
                    time.sleep(pause_s)
                    ms, moved = timed(handle.resume)
                    found.setdefault(call, []).append(ms)
                    ms, logits = timed(step)
                    found.setdefault("first_step", []).append(ms)
                    facts[call] = {"bytes_moved": moved, "at_link_ms": moved / link * 1e3}
                    is_equal &= torch.equal(logits, expected)
                if is_resized:
                    for size, call in ((small, "halve"), (large, "double")) * cycles:
                        ms, moved = timed(partial(handle.resize, size))
                        found.setdefault(call, []).append(ms)
                        facts[call] = {"bytes_moved": moved, "at_link_ms": moved / link * 1e3}
                        is_equal &= torch.equal(step(), expected)
                elif case != "cache":
                    values = {key: value.to("cpu", copy=True) for key, value in model.state_dict().items()}
                    num_bytes = sum(value.nbytes for value in values.values())
                    for call in ("pageable", "update"):
                        if call == "update" and device.type == "cuda":
                            values = {key: value.pin_memory() for key, value in values.items()}
                        for _ in range(3):
                            ms, _ = timed(partial(handle.update, values))
                            found.setdefault(call, []).append(ms)
                        facts[call] = {"bytes_moved": num_bytes, "at_link_ms": num_bytes / link * 1e3}
                        is_equal &= torch.equal(step(), expected)
                ms, _ = timed(handle.remove)
                free_memory(device)
                found["remove"], facts["remove"] = [ms], {"left_mib": (used() - at_first) / 2**20}
                first_ms = statistics.median(found.pop("first_step"))
                facts["resume"]["first_step_ms"] = first_ms
                for call, samples in found.items():
                    row = about | {"case": case, "call": call, "ms": statistics.median(samples), "samples_ms": samples}
                    yield row | facts[call] | {"bit_equal": is_equal}
            free_memory(device)


def describe(row: Mapping[str, Any]) -> str:
    """One line about a result."""
    at_link = row.get("at_link_ms")
    more = f", {row['ms'] / at_link:.3f} x the link's {at_link:.0f} ms" if at_link else ""
    more += f", {row['left_mib']:+.0f} MiB left" if "left_mib" in row else ""
    more += f", first step {row['first_step_ms']:.0f} ms" if "first_step_ms" in row else ""
    bits = "same bits" if row["bit_equal"] else "OTHER BITS"
    return f"{row['model']:<14} {row['case']:<9} {row['call']:<7} {row['ms']:8.1f} ms{more}  {bits}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", type=words_of(list(CASES)), default=list(CASES))
    every = [case for cases in CASES.values() for case in cases]
    parser.add_argument("--cases", type=words_of(every), default=every)
    parser.add_argument("--cycles", type=int, default=5)
    add_card_arguments(parser)
    given = parser.parse_args()
    results = [
        row
        for rehearsal in rehearsals(given, ["graphs"])
        for row in kept(rows_of(rehearsal, given.cycles, given.cases), describe, given.out)
    ]
    finish("lifetime", results)


if __name__ == "__main__":
    main()
