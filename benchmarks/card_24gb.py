"""Tokens per second of ``model.generate`` where 24 GB are all the device memory there is, against the floor.

    python benchmarks/card_24gb.py --out FILE                 on a GPU that can hold the models, as a reference
    python benchmarks/card_24gb.py --device cpu --tiny        tries the script; NF4 needs bitsandbytes

One allocation holds what the GPU has beyond ``--card`` bytes. What is left is for weights, slots, cached experts, KV
cache, activations, libraries and CUDA itself, while the model is offloaded and while it runs; more cannot be had. The
peak is that of torch's allocator with what other allocations hold at the end. headrace gets ``--card`` less
``--reserve`` bytes as its budget, which is for weights alone.

The models have seeded weights of published shapes, drawn layer by layer and in host memory when they are offloaded:

* ``llama-3.3-70b-nf4``: Llama-3.3-70B with its layers in NF4 and quantised scales (bitsandbytes), 0.516 bytes a weight.
  Of the formats of 4 bits that move packed and give equal bits it has the fewest bytes, needs one package, and is in
  use for this model. compressed-tensors moves bf16, torchao's numbers of 4 bits take a byte each, GPTQ and AWQ need
  more packages. ``budget``: a budget alone.
* ``qwen3-8b``: Qwen3-8B in bf16, every fourth layer prefetched, as an engine's flags have it.
* ``qwen3-30b-a3b``: Qwen3-30B-A3B in bf16. ``budget``: a budget alone, which without ``headrace probe`` does not cache
  experts; ``cache``: the rule ``experts=cache``, which is also what a budget chooses with a probe. Routers follow a
  seeded trace (``plan/routing_traces.py``): random ones send all tokens to the same experts.

``generate`` is called as users do, greedy; times are those between two tokens. ``eager`` is transformers as it is, with
a cache that grows; ``graphs`` is what ``load`` gives: a static cache, and steps that are replayed. Every case runs
twice from the same prompt in each way, one offload after the other way's, and the second run is timed. Logits of all
tokens have to equal those of the resident model run in the same way, to the last bit.

    floor = max(resident, bytes that cross the link / link)

No step of a GPU can be faster. Experts that are missed or read in place arrive while nothing else runs on the GPU, so a
GPU that is busy all the time would need the sum; an eager step of Qwen3-30B-A3B waits for the host instead.

Expected at 55 GB/s, with 22 GB for weights (plans for an H200):

=================  ======  =======================  ===================  =====================================
model              case    weights                  comes for a token    the link's part
=================  ======  =======================  ===================  =====================================
llama-3.3-70b-nf4  budget  39.5 GB (35.3 layers)    15.83 of 37.4 GB     288 ms, 3.5 tokens/s
qwen3-30b-a3b      cache   61.1 GB (58.0 experts)   0.4 of 6.1 GB        7 ms: 44 of 128 experts, 89 % hit
qwen3-30b-a3b      budget  the same                 2.5 of 6.1 GB        45 ms: 39 GB of experts in place
=================  ======  =======================  ===================  =====================================
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

import headrace
from decoder_models import CONFIGS, FollowedTraces, build_model, routers
from harness import Timing, append, finish, link_bytes_per_s, parser_of, words_of
from headrace.config import Budget, Prefetch
from headrace.model.inventory import take_inventory
from headrace.plan.plan import Plan
from headrace.plan.routing_traces import seeded_trace
from headrace.plan_model import plan_model
from headrace.planning.request import PlanRequest
from headrace.sizes import parse_size
from headrace.stats import Stats

PROMPT_TOKENS = 128
_TINY_TOKENS = 8, 4  # of the prompt, and new ones
_TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """What is run of a model: how many new tokens, which cases, and what makes it tiny."""

    num_tokens: int
    rules: dict[str, tuple[tuple[str, Any], ...] | Prefetch]  # of the budget of each case, or a policy without one
    tiny: dict[str, Any]


_TINY_EXPERTS = {**_TINY, "moe_intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 4}


MODELS = {
    "qwen3-8b": Model(64, {"every 4th layer": Prefetch(4, 1, 2)}, {**_TINY, "num_hidden_layers": 16}),
    "llama-3.3-70b-nf4": Model(24, {"budget": ()}, _TINY),
    "qwen3-30b-a3b": Model(128, {"cache": (("experts", "cache"),), "budget": ()}, _TINY_EXPERTS),
}


CASES = list(dict.fromkeys(case for model in MODELS.values() for case in model.rules))


def free_memory(device: torch.device) -> None:
    """Give back what nothing uses any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Card:
    """Leaves ``num_bytes`` of the device's memory, CUDA's own part included, and holds the rest; a CPU has no limit."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes, self._device = num_bytes, device
        self._rest: torch.Tensor | None = None

    def __enter__(self) -> Card:
        free_memory(self._device)
        if self._device.type == "cuda":
            total = torch.cuda.mem_get_info(self._device)[1]
            self._rest = torch.empty(total - self._num_bytes, dtype=torch.uint8, device=self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def peak_bytes(self) -> int | None:
        """Of the memory that was left, the most that was in use; what is outside torch's allocator counts as it is."""
        if self._rest is None:
            return None
        free, total = torch.cuda.mem_get_info(self._device)
        outside = total - free - torch.cuda.memory_reserved(self._device)
        return torch.cuda.max_memory_reserved(self._device) + outside - self._rest.nbytes

    def __exit__(self, *_: object) -> None:
        self._rest = None
        free_memory(self._device)


class Clock(BaseStreamer):  # type: ignore[misc]
    """Notes when tokens are on the host, which is where ``generate`` hands them to a streamer; the prompt comes first.

    ``at_first`` is called when the first new token is there, and is not timed.
    """

    def __init__(self, at_first: Callable[[], object]) -> None:
        self._at_first = at_first
        self._moments: list[float] = []
        self._called_s = 0.0

    def put(self, value: torch.Tensor) -> None:
        """The prompt, or a token."""
        self._moments.append(time.perf_counter() - self._called_s)
        if len(self._moments) == 2:
            begin = time.perf_counter()
            self._at_first()
            self._called_s = time.perf_counter() - begin

    def end(self) -> None:
        """Nothing follows."""

    def samples_ms(self) -> list[float]:
        """Of the first token and of each later one."""
        return [(after - before) * 1e3 for before, after in pairwise(self._moments)]


@dataclass(frozen=True)
class _Run:
    """One call of ``generate``: times of the tokens after the first, and logits of all: [tokens, vocabulary]."""

    first_token_ms: float
    samples_ms: tuple[float, ...]
    logits: torch.Tensor

    @property
    def ms(self) -> float:
        """Mean, and not the median: hits of cached experts differ from token to token."""
        return statistics.mean(self.samples_ms)


class _Sequence:
    """One prompt and what follows it, the same in every run of a model."""

    def __init__(self, model: Any, prompt_tokens: int, num_tokens: int, device: torch.device) -> None:
        self._model, self._num_tokens, config = model, num_tokens, model.config
        self.num_tokens = prompt_tokens + num_tokens
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        generator = torch.Generator().manual_seed(0)
        self._prompt = torch.randint(1, config.vocab_size, (1, prompt_tokens), generator=generator).to(device)
        traces = [
            seeded_trace(layer, prompt_tokens + num_tokens, router.num_experts, router.top_k)
            for layer, router in enumerate(routers(model))
        ]
        self.routing = FollowedTraces(model, traces, device)

    def run(self, at_first: Callable[[], object] = lambda: None) -> _Run:
        """Generate; ``at_first`` is called when the first new token is there."""
        self.routing.restart()
        clock = Clock(at_first)
        found: list[torch.Tensor] = []

        def keep(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            found.append(scores.clone())
            return scores

        self._model.generate(
            self._prompt,
            attention_mask=torch.ones_like(self._prompt),
            max_new_tokens=self._num_tokens,
            streamer=clock,
            logits_processor=LogitsProcessorList([keep]),
        )
        logits = torch.cat([step.cpu() for step in found])
        if len(logits) != self._num_tokens or not logits.isfinite().all():
            raise RuntimeError(f"expected finite logits of {self._num_tokens} tokens, found {tuple(logits.shape)}")
        first_ms, *samples_ms = clock.samples_ms()
        return _Run(first_ms, tuple(samples_ms), logits)


@contextmanager
def _way(way: str, model: Any) -> Iterator[Any]:
    """Within, ``generate`` decodes in that way."""
    graphs = headrace.decode_in_graphs(model) if way == "graphs" else None
    try:
        yield graphs
    finally:
        if graphs is not None:
            graphs.remove()


def rest_on_host(model: Any) -> None:
    """Move all parameters to host memory, where those of a model are that was loaded without a GPU."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            continue
        # Touched by all cores first: the one thread of the copy would do it at a fraction of the speed.
        host = torch.empty(parameter.shape, dtype=parameter.dtype).zero_()
        parameter.data = host.copy_(parameter.data)
        if getattr(parameter, "quant_state", None) is not None:
            parameter.quant_state.to("cpu")


@dataclass(frozen=True)
class _Traffic:
    """What crosses the link for a token, in bytes: prefetched or read in place, and of experts once they are chosen."""

    ahead: float
    experts: float
    hits: float | None


def _note(found: list[Stats], handle: headrace.Handle) -> None:
    found.append(handle.stats())


def traffic(plan: Plan, before: Stats, after: Stats, num_tokens: int, config: Any) -> _Traffic:
    """Counted between two tokens where headrace counts it; what is read in place follows from the plan."""
    ahead = float(sum(unit.bytes_moved for unit in after.units) - sum(unit.bytes_moved for unit in before.units))
    used, missed, fetched = 0, 0, 0.0
    for new, old in zip(after.experts, before.experts, strict=True):
        misses = new.fetched + new.in_place - old.fetched - old.in_place
        used, missed = used + misses + new.hits - old.hits, missed + misses
        fetched += misses * new.expert_bytes
    ahead, fetched = ahead / num_tokens, fetched / num_tokens
    for name, num_bytes in plan.uva.items():
        if ".experts." in name:
            fetched += num_bytes * config.num_experts_per_tok / config.num_experts
        elif "embed_tokens" not in name:  # one row
            ahead += num_bytes
    return _Traffic(ahead, fetched, 1 - missed / used if used else None)


# -- cases -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rehearsal:
    """A model, and the card that it runs on."""

    name: str
    layers: int | None  # None: all that the model has
    tiny: bool
    card_bytes: int
    reserve_bytes: int
    device: torch.device
    ways: Sequence[str]

    def build(self) -> Any:
        """The model on the device."""
        sizes = dict(MODELS[self.name].tiny) if self.tiny else {}
        sizes |= {} if self.layers is None else {"num_hidden_layers": self.layers}
        config = CONFIGS[self.name](**sizes, eos_token_id=None)  # nothing ends the text
        has_experts = hasattr(config, "num_experts")
        return build_model(config, self.device, self.device, "grouped_mm" if has_experts else None)

    def policy(self, case: str, weight_bytes: int) -> Budget | Prefetch:
        """A budget for the weights, of half of those of a tiny model, unless the case has a policy."""
        rules = MODELS[self.name].rules[case]
        num_bytes = weight_bytes // 2 if self.tiny else self.card_bytes - self.reserve_bytes
        return rules if isinstance(rules, Prefetch) else Budget(num_bytes, rules=rules)

    def rows(self, cases: Sequence[str], failed: list[str]) -> Iterator[dict[str, Any]]:
        """One result per case; a case that raises is printed, and its name put into ``failed``."""
        link = link_bytes_per_s(self.device, 5)
        resident: dict[str, _Run] = {}
        for case in cases:
            try:
                begin = time.perf_counter()
                model = self.build()
                lengths = _TINY_TOKENS if self.tiny else (PROMPT_TOKENS, MODELS[self.name].num_tokens)
                sequence = _Sequence(model, *lengths, self.device)
                built_s = time.perf_counter() - begin
                for way in self.ways if not resident else ():
                    with _way(way, model):
                        sequence.run()
                        resident[way] = sequence.run()
                    print(f"{self.name} {way}: resident {resident[way].ms:.2f} ms", flush=True)
                for row in self._measure(case, model, sequence, resident, link):
                    yield {"built_s": built_s, **row}
            except Exception:
                traceback.print_exc()
                failed.append(f"{self.name} {case}")
            model = sequence = None
            free_memory(self.device)  # the next one needs it

    def _measure(
        self, case: str, model: Any, sequence: _Sequence, resident: Mapping[str, _Run], link: float
    ) -> Iterator[dict[str, Any]]:
        begin = time.perf_counter()
        rest_on_host(model)
        weight_bytes = take_inventory(model).num_bytes
        with Card(self.card_bytes, self.device) as card:
            on_host_s = time.perf_counter() - begin
            policy = self.policy(case, weight_bytes)
            planner = plan_model(PlanRequest(model, policy, device=self.device)).planner
            handle = headrace.offload(model, policy, device=self.device)
            facts = {"on_host_s": on_host_s, "start_s": time.perf_counter() - begin - on_host_s}
            facts |= {"link_gb_per_s": link / 1e9, "weight_bytes": weight_bytes}
            facts |= {"layers": model.config.num_hidden_layers}
            facts |= {"expected_ms": planner.forecast(handle.plan, 1, sequence.num_tokens).step_s * 1e3}
            facts |= {"rates": planner.rates.machine, "is_measured": planner.rates.is_measured}
            for way in self.ways:
                with _way(way, model) as graphs:
                    first = sequence.run()
                    found: list[Stats] = []
                    timed = sequence.run(partial(_note, found, handle))
                    _note(found, handle)
                    facts["graph_bytes"] = 0 if graphs is None else graphs.num_bytes
                    peak_bytes = card.peak_bytes()
                moved = traffic(handle.plan, *found, len(timed.samples_ms), model.config)
                runs = first, timed, resident[way]
                yield facts | self._row(case, way, handle.plan, moved, runs, link, peak_bytes)

    def _row(
        self,
        case: str,
        way: str,
        plan: Plan,
        moved: _Traffic,
        runs: tuple[_Run, _Run, _Run],
        link: float,
        peak_bytes: int | None,
    ) -> dict[str, Any]:
        first, timed, resident = runs
        if not moved.ahead + moved.experts > 0:
            raise RuntimeError(f"expected bytes that cross the link, found none in the plan {plan}")
        floor_ms = max(resident.ms, (moved.ahead + moved.experts) / link * 1e3)
        return {
            "table": "card",
            "model": self.name,
            "case": case,
            "way": way,
            "rows": 1,
            "prompt_tokens": _TINY_TOKENS[0] if self.tiny else PROMPT_TOKENS,
            "new_tokens": len(timed.logits),
            "ms": timed.ms,
            "spread_ms": Timing(timed.samples_ms).spread_ms,
            "first_token_ms": timed.first_token_ms,
            "floor_ms": floor_ms,
            "resident_ms": resident.ms,
            "resident_first_token_ms": resident.first_token_ms,
            "tokens_per_s": 1e3 / timed.ms,
            "floor_tokens_per_s": 1e3 / floor_ms,
            "bytes_moved": moved.ahead + moved.experts,
            "expert_bytes_moved": moved.experts,
            "hits": moved.hits,
            "expert_slots": [layer.num_slots for layer in plan.cached],
            "card_bytes": self.card_bytes,
            "peak_device_bytes": peak_bytes,
            "planned_device_bytes": plan.device_bytes,
            "within_card": peak_bytes is None or peak_bytes <= self.card_bytes,
            "bit_equal": all(torch.equal(each.logits, resident.logits) for each in (first, timed)),
            "repeats": torch.equal(first.logits, timed.logits),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
        }


def describe(row: Mapping[str, Any]) -> str:
    """One line about a result."""
    peak = "no limit" if row["peak_device_bytes"] is None else f"peak {row['peak_device_bytes'] / 1e9:.2f} GB"
    hits = "" if row["hits"] is None else f", {row['hits']:.1%} of experts hit"
    return (
        f"{row['model']:<18} {row['case']:<15} {row['way']:<7} floor {row['floor_ms']:8.2f}  mean "
        f"{row['ms']:8.2f} ms (spread {row['spread_ms']:.2f}, {row['ms'] / row['floor_ms']:.3f} x floor)  "
        f"expected {row['expected_ms']:.2f}  {row['tokens_per_s']:.2f} of {row['floor_tokens_per_s']:.2f} tokens/s  "
        f"resident {row['resident_ms']:.2f} ms  "
        f"{row['bytes_moved'] / 1e9:.3f} GB a token at {row['link_gb_per_s']:.1f} GB/s{hits}  {peak} of "
        f"{row['card_bytes'] / 1e9:.0f}  first token {row['first_token_ms']:.0f} ms  offloaded in "
        f"{row['start_s']:.1f} s  {'same bits' if row['bit_equal'] else 'OTHER BITS'}"
    )


def add_card_arguments(parser: ArgumentParser) -> None:
    """Those of a script that runs models of this one on a smaller card."""
    parser.add_argument("--card", default="24GB", help="device memory that is left")
    parser.add_argument("--reserve", default="2GB", help="of it, what is no weights: CUDA, activations, cache, ...")
    parser.add_argument("--layers", type=int, help="fewer than the published model has")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small layers, half of them in the budget")


def rehearsals(given: Namespace, ways: Sequence[str]) -> Iterator[Rehearsal]:
    """One per model that was asked for, on the current device of its type."""
    device = torch.device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    for name in given.models:
        sizes = parse_size(given.card), parse_size(given.reserve)
        yield Rehearsal(name, given.layers, given.tiny, *sizes, device, ways)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", type=words_of(list(MODELS)), default=list(MODELS))
    parser.add_argument("--cases", type=words_of(CASES), default=CASES)
    parser.add_argument("--ways", type=words_of(["eager", "graphs"]), default=["eager", "graphs"])
    add_card_arguments(parser)
    given = parser.parse_args()
    results, failed = [], []
    for rehearsal in rehearsals(given, given.ways):
        for row in rehearsal.rows([case for case in MODELS[rehearsal.name].rules if case in given.cases], failed):
            results.append(row)
            append(row, given.out)
            print(describe(row), flush=True)
    failed += [f"{row['model']} {row['case']}: beyond the card" for row in results if not row["within_card"]]
    finish("24 GB card", results, failed=failed)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
