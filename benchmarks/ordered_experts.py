"""A token of ``generate`` with experts in the one order of sums, beside transformers' own kernels; one model a process.

    python benchmarks/ordered_experts.py --out FILE           on a GPU that can hold the models, as a reference
    python benchmarks/ordered_experts.py --liger-kernel       a third way: ``ordered`` with liger-kernel's RMSNorm
    python benchmarks/ordered_experts.py --device cpu --tiny  tries the script

Models have seeded weights of published shapes; routers follow a seeded trace (``plan/routing_traces.py``). Each runs
resident, then with its experts cached in ``--card`` bytes; by turns with the implementation that headrace's decoder
chooses by itself (``own``) and with ``experts_implementation="headrace"`` (``ordered``). gpt-oss in MXFP4 has the
tensors of published files and runs ``ordered`` alone: transformers' kernels for it are a package of their own.

``bit_equal``: offloaded logits equal those of the resident model with the same implementation, all tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GptOssConfig

import headrace
from card_24gb import Card, Rehearsal, _Sequence, add_card_arguments, free_memory, rehearsals, rest_on_host
from harness import finish, kept, link_bytes_per_s, parser_of, words_of
from headrace.adapters.transformers.liger import use_liger_norms
from headrace.adapters.transformers.ordered_experts import put_mxfp4_experts
from headrace.config import Budget
from headrace.model.inventory import take_inventory
from published_configs import GPT_OSS_20B, GPT_OSS_120B
from seeded_models import _fill

MODELS = ("qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b")
PROMPT_TOKENS, NUM_TOKENS = 128, 128
_TINY = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_local_experts": 16}


def gpt_oss(sizes: Mapping[str, Any], device: torch.device) -> Any:
    """A gpt-oss whose experts are MXFP4, seeded."""
    config = GptOssConfig(**{**sizes, "eos_token_id": None})
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    put_mxfp4_experts(model)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        _fill(parameter.data, generator, name, "scales" in name, 1.0)
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.config._experts_implementation = "headrace"
    return model.eval()


def rows_of(rehearsal: Rehearsal, rounds: int, cases: Sequence[str], with_liger: bool) -> Iterator[dict[str, Any]]:
    """One result per implementation: resident, then cached."""
    name, device, tiny = rehearsal.name, rehearsal.device, rehearsal.tiny
    if name.startswith("gpt-oss"):
        changes: dict[str, Any] = dict(_TINY) if tiny else {}
        changes |= {} if rehearsal.layers is None else {"num_hidden_layers": rehearsal.layers}
        published = GPT_OSS_20B if name == "gpt-oss-20b" else GPT_OSS_120B
        layers = {**published, **changes}["num_hidden_layers"]
        kinds = (published.get("layer_types") or ["sliding_attention", "full_attention"] * 18)[:layers]
        model, ways = gpt_oss({**published, **changes, "layer_types": kinds}, device), ("ordered",)
    else:
        model, ways = rehearsal.build(), ("own", "ordered")
    norms: dict[Any, Any] = {}
    if with_liger:
        use_liger_norms(model, device)
        norms = {each: vars(each).pop("forward") for each in model.modules() if "forward" in vars(each)}
        ways = (*ways, "liger")
    sequence = _Sequence(model, *((8, 4) if tiny else (PROMPT_TOKENS, NUM_TOKENS)), device)
    link = link_bytes_per_s(device, 5)
    about = {"table": "ordered-experts", "model": name, "layers": model.config.num_hidden_layers}
    about |= {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    expected: dict[str, torch.Tensor] = {}

    def measured(way: str) -> tuple[float, torch.Tensor]:
        model.set_experts_implementation("grouped_mm" if way == "own" else "headrace")
        if way == "liger":
            for norm, forward in norms.items():
                norm.forward = forward
        graphs = headrace.decode_in_graphs(model) if device.type == "cuda" else None
        try:
            sequence.run()
            run = sequence.run()
        finally:
            for norm in norms:
                vars(norm).pop("forward", None)
            if graphs is not None:
                graphs.remove()
        return run.ms, run.logits

    def by_turns() -> dict[str, list[float]]:
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                ms, logits = measured(way)
                expected.setdefault(way, logits)
                found[way].append(ms if torch.equal(expected[way], logits) else float("nan"))
        return found

    def described(found: Mapping[str, Sequence[float]], case: str) -> Iterator[dict[str, Any]]:
        for way, samples in found.items():
            ms = statistics.median(samples)
            row = about | {"case": case, "way": way, "ms": ms, "samples_ms": list(samples)}
            yield row | {"tokens_per_s": 1e3 / ms, "bit_equal": ms == ms}

    yield from described(by_turns(), "resident")
    if "cached" not in cases:
        return
    rest_on_host(model)
    weights = take_inventory(model).num_bytes
    rules = (("experts", "cache"),) if device.type == "cuda" else ()
    with Card(rehearsal.card_bytes, device):
        budget = weights // 2 if tiny else rehearsal.card_bytes - rehearsal.reserve_bytes
        handle = headrace.offload(model, Budget(budget, rules=rules), device=device)
        with handle:
            before = handle.stats()
            found = by_turns()
            after = handle.stats()
            slots = [layer.num_slots for layer in handle.plan.cached]
            used = sum(each.hits + each.fetched + each.in_place for each in after.experts)
            hits = sum(each.hits for each in after.experts) / used if used else None
            facts = {"expert_slots": slots[:1], "hits": hits, "link_gb_per_s": link / 1e9}
            for row in described(found, "cached"):
                row["bit_equal"] &= after.bytes_moved > before.bytes_moved
                yield row | facts
    free_memory(device)


def describe(row: Mapping[str, Any]) -> str:
    """One line about a result."""
    hits = f", {row['hits']:.1%} of experts hit" if row.get("hits") else ""
    bits = "same bits" if row["bit_equal"] else "OTHER BITS"
    return (
        f"{row['model']:<14} {row['case']:<9} {row['way']:<8} {row['ms']:7.2f} ms  {row['tokens_per_s']:6.1f} tokens/s"
        f"{hits}  {bits}"
    )


def main() -> None:
    parser = parser_of(__doc__, rounds=2)
    parser.add_argument("--models", type=words_of(MODELS), default=["qwen3-30b-a3b"])
    parser.add_argument("--cases", type=words_of(["resident", "cached"]), default=["resident", "cached"])
    parser.add_argument(
        "--liger-kernel", action="store_true", help="also with liger-kernel's RMSNorm (pip install liger-kernel)"
    )
    add_card_arguments(parser)
    given = parser.parse_args()
    results = [
        row
        for rehearsal in rehearsals(given, ["graphs"])
        for row in kept(rows_of(rehearsal, given.rounds, given.cases, given.liger_kernel), describe, given.out)
    ]
    finish("ordered experts", results)


if __name__ == "__main__":
    main()
