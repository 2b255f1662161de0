"""Prompts through packed experts: unpacked by torch, as before, and by kernels or threads, by turns.

    python benchmarks/packed_prompts.py --out FILE                    a layer of gpt-oss-20b's shape on this CPU
    python benchmarks/packed_prompts.py --device cuda --out FILE      18 layers of gpt-oss-120b's shape in 14 GB

On a CPU the layer runs in MXFP4, int4 and fp8 blocks; on a GPU prompts of ``generate``, whose logits are compared.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear, silu

import headrace
from card_24gb import Card, Rehearsal, _Sequence, rest_on_host
from headrace.adapters.transformers import ordered_experts
from headrace.experts.order import MAX_ROWS, Projection
from headrace.sizes import parse_size
from shared_experts import build

ROWS, ROUNDS = (9, 64, 256, 1024), 3
NUM_EXPERTS, TOP_K, SIZE = 32, 4, 2880
_NOW = ordered_experts._run_quantised
_CARD, _RESERVE = "14GB", "5GB"


def before(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, module: Any) -> torch.Tensor:
    """Forward of packed experts up to commit 4bba2b0f."""
    first, second, is_interleaved, glu = ordered_experts.arguments_of(module)
    if len(x) <= MAX_ROWS:
        return _NOW(x, ids, weights, module)
    outputs = x.new_empty(*ids.shape, x.shape[1])
    for row in ids.unique().tolist():
        token, place = torch.where(ids == row)
        biases = [None if each.bias is None else each.bias[row] for each in (first, second)]
        both = linear(x[token], first.values(row).to(x.dtype), biases[0])
        gate, up = (both[:, ::2], both[:, 1::2]) if is_interleaved else both.chunk(2, -1)
        inner = silu(gate) * up
        if glu:
            gate, up = gate.clamp(max=glu[1]), up.clamp(-glu[1], glu[1])
            inner = (up + 1) * (gate * torch.sigmoid(gate * glu[0]))
        outputs[token, place] = linear(inner, second.values(row).to(x.dtype), biases[1])
    return (outputs * weights[..., None]).sum(1).to(x.dtype)


class Layer:
    """Stands in for a module with packed experts of random weights."""

    num_experts = NUM_EXPERTS

    def __init__(self, form: str, made: torch.Generator) -> None:
        self.form = form
        self.projections = [self._made(outputs, SIZE, made) for outputs in (2 * SIZE, SIZE)]

    def _made(self, outputs: int, inputs: int, made: torch.Generator) -> Projection:
        each, few = (NUM_EXPERTS, outputs), (NUM_EXPERTS, outputs // 64, inputs // 64)
        bits = torch.randint(-(2**62), 2**62, (*each, inputs // 8), generator=made).to(torch.int32)
        if self.form == "int4":
            return Projection(bits, torch.rand(*each, inputs // 32, generator=made).bfloat16() / 64)
        if self.form == "fp8":
            weight = torch.randn(*each, inputs, generator=made, dtype=torch.bfloat16)
            return Projection(weight.to(torch.float8_e4m3fn), torch.rand(few, generator=made) / 64)
        scales = torch.randint(115, 121, (*each, inputs // 32), generator=made).to(torch.uint8)
        return Projection(bits.view(torch.uint8), scales)


def cpu_rows() -> Any:
    """Milliseconds of a layer by rows and format."""
    made = torch.Generator().manual_seed(0)
    ordered_experts.arguments_of = lambda module: (*module.projections, False, ())
    for form in ("mxfp4", "int4", "fp8"):
        layer = Layer(form, made)
        for rows in ROWS:
            x = torch.randn(rows, SIZE, generator=made).bfloat16()
            ids = torch.rand(rows, NUM_EXPERTS, generator=made).topk(TOP_K).indices
            weights = torch.rand(rows, TOP_K, generator=made).bfloat16()
            times: dict[str, list[float]] = {"before_ms": [], "ms": []}
            for number in range(ROUNDS + 1):
                for name, forward in (("before_ms", before), ("ms", _NOW)):
                    begin = time.perf_counter()
                    forward(x, ids, weights, layer)
                    if number:
                        times[name].append((time.perf_counter() - begin) * 1e3)
            yield {"device": "cpu", "format": form, "rows": rows, "experts": NUM_EXPERTS, "top_k": TOP_K, **times}


def gpu_rows() -> Any:
    """Milliseconds of a prompt of 2,047 tokens, resident and in 14 GB, and of 8,191 tokens in chunks of 1,024."""
    device, sizes = torch.device("cuda"), (parse_size(_CARD), parse_size(_RESERVE))
    model = build(Rehearsal("gpt-oss-120b", 18, False, *sizes, device, ["graphs"]))

    def run(prompt: int, forward: Any = _NOW, chunk: int | None = None) -> tuple[float, torch.Tensor]:
        ordered_experts._run_quantised = forward
        sequence = _Sequence(model, prompt, 1, device)
        model.generation_config.prefill_chunk_size = chunk
        try:
            found = sequence.run()
        finally:
            sequence.routing.remove()
        return found.first_token_ms, found.logits

    def by_turns(prompt: int, expected: torch.Tensor, rounds: int) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {"before_ms": [], "ms": []}
        for _ in range(rounds):
            for name, forward in (("before_ms", before), ("ms", _NOW)):
                ms, logits = run(prompt, forward)
                if not torch.equal(logits, expected):
                    raise RuntimeError(f"{name}: logits differ from those of the resident model")
                times[name].append(ms)
        return times

    expected = run(2047)[1]
    yield {"device": "NVIDIA H200", "case": "resident", "rows": 2047, **by_turns(2047, expected, 2)}
    rest_on_host(model)
    with Card(sizes[0], device) as card:
        budget = headrace.Budget(sizes[0] - sizes[1], rules=(("experts", "cache"),))
        with headrace.offload(model, budget, device=device) as handle:
            yield {"device": "NVIDIA H200", "case": "offloaded", "rows": 2047, **by_turns(2047, expected, 3)}
            ms = [run(8191, chunk=1024)[0]]
            peak = card.peak_bytes()
            yield {"device": "NVIDIA H200", "case": "offloaded", "rows": 8191, "ms": ms, "peak_device_bytes": peak}
            if not handle.stats().bytes_moved:
                raise RuntimeError("expected experts that are copied, found none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with torch.inference_mode(), given.out.open("a") as file:
        for row in cpu_rows() if given.device == "cpu" else gpu_rows():
            print(row, flush=True)
            file.write(json.dumps({"table": "packed-prompts", **row}) + "\n")


if __name__ == "__main__":
    main()
