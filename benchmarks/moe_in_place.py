"""Tokens of a small mixture of experts on a CPU: resident, and by a budget with experts read in place in the files.

    OMP_NUM_THREADS=1 python benchmarks/moe_in_place.py [--rounds 5] [--tokens 32] [--folder DIR] [--out FILE.jsonl]

The model has Qwen3-MoE's architecture and 0.79 GiB of random weights in fp32: 4 layers of 32 experts, 4 of them per
token. The cases take turns in one process, in another order in each round:

* ``resident``: ``from_pretrained``, and all weights copied into memory of the process;
* ``in place, fused`` and ``in place, one by one``: a budget of 30 % of the weights, over files that hold the
  experts of a layer as one tensor, and over those that ``save_pretrained`` writes by default;
* ``streamed``: the same budget with a rule that experts are prefetched, which is what a budget did before.

A step is one token of greedy decoding. The floor of reads in place is the resident step. All cases have to give
the same logits.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import headrace
from harness import append, finish, parser_of, writable_folder
from headrace.adapters.transformers import load
from headrace.checkpoint.safetensors_header import Checkpoint

SHARE = 0.30
PROMPT = torch.arange(32)[None]


@dataclass(frozen=True)
class Case:
    """A way to run the model; ``handle`` is ``None`` for the resident one."""

    name: str
    model: Any
    handle: headrace.Handle | None


def write(folder: Path) -> None:
    """The model in both layouts, seeded."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=258,
        hidden_size=1024,
        intermediate_size=3072,
        moe_intermediate_size=512,
        num_experts=32,
        num_experts_per_tok=4,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
        architectures=["Qwen3MoeForCausalLM"],
    )
    torch.manual_seed(20)
    model: Any = Qwen3MoeForCausalLM(config)
    model.model.embed_tokens.weight.data.normal_()  # with similar tokens all of them would be routed alike
    model.save_pretrained(folder / "one by one")
    model.save_pretrained(folder / "fused", save_original_format=False)


def cases(folder: Path) -> list[Case]:
    """Load the model in every way."""
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    resident = factory.from_pretrained(folder / "fused").eval()
    for parameter in resident.parameters():
        parameter.data = parameter.data.clone()
    found = [Case("resident", resident, None)]
    budget = int(SHARE * Checkpoint.open(folder / "fused").num_bytes)
    for layout in ("fused", "one by one"):
        model, handle = load(folder / layout, budget, device="cpu")
        assert handle.plan.uva_bytes > 0.9 * handle.plan.weight_bytes, "experts are not read in place"
        found.append(Case(f"in place, {layout}", model, handle))
    streamed = headrace.Budget(budget, rules=[("experts", "prefetch")])
    return [*found, Case("streamed", *load(folder / "fused", streamed, device="cpu"))]


@torch.inference_mode()
def decode(model: Any, tokens: int) -> tuple[float, torch.Tensor]:
    """Seconds per token of the steps after the prefill, and the logits [tokens, vocabulary]."""
    ends: list[float] = []
    hook = model.register_forward_hook(lambda *_: ends.append(time.perf_counter()))
    output = model.generate(
        PROMPT, max_new_tokens=tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    hook.remove()
    return (ends[-1] - ends[0]) / (len(ends) - 1), torch.cat(output.logits)


def measure(found: list[Case], rounds: int, tokens: int, out: Path | None) -> list[dict[str, Any]]:
    """One row per case."""
    steps: dict[str, list[float]] = {case.name: [] for case in found}
    logits: dict[str, torch.Tensor] = {}
    moved: dict[str, int] = dict.fromkeys(steps, 0)
    for number in range(rounds + 1):  # the first one maps and caches pages
        for case in (*found[number % len(found) :], *found[: number % len(found)]):
            before = case.handle.stats().bytes_moved if case.handle else 0
            count = tokens if case.name != "streamed" else max(3, tokens // 8)
            seconds, output = decode(case.model, count)
            if number:
                steps[case.name].append(1e3 * seconds)
            logits[case.name] = output
            moved[case.name] = (case.handle.stats().bytes_moved - before) // count if case.handle else 0
    resident_ms = median(steps["resident"])
    rows = []
    for case in found:
        mine, plan = steps[case.name], case.handle.plan if case.handle else None
        expected = logits["resident"][: len(logits[case.name])]
        rows.append(
            {
                "table": f"moe-{torch.get_num_threads()}",
                "case": case.name,
                "rows": 1,
                "ms": median(mine),
                "spread_ms": max(mine) - min(mine),
                "floor_ms": resident_ms,
                "resident_ms": resident_ms,
                "tokens_per_s": 1e3 / median(mine),
                "rounds_ms": mine,
                "bytes_moved": moved[case.name],
                "uva_bytes": plan.uva_bytes if plan else 0,
                "link_gb_per_s": None,
                "peak_device_bytes": None,  # of a CPU: mapped pages would count, and the kernel takes them back
                "planned_device_bytes": plan.device_bytes if plan else None,
                "threads": torch.get_num_threads(),
                "bit_equal": torch.equal(logits[case.name], expected),
            }
        )
        append(rows[-1], out)
    return rows


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--tokens", type=int, default=32, help="new tokens per round; an eighth of them streamed")
    parser.add_argument("--folder", type=writable_folder, help="where the model is written (default: temporary)")
    given = parser.parse_args()
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-moe-", dir=given.folder) as place:
        write(Path(place))
        rows = measure(cases(Path(place)), given.rounds, given.tokens, given.out)
    for row in rows:
        resident = row["resident_ms"]
        step = f"{row['ms']:8.1f} ms +- {row['spread_ms']:.1f}, floor {row['floor_ms']:.1f}"
        print(f"{row['case']:<22} {step}  {row['tokens_per_s']:6.1f} tokens/s, {resident / row['ms']:.2f} x resident")
    finish("moe", rows)


if __name__ == "__main__":
    main()
