"""A decode step of a real ``transformers`` model on a GPU, offloaded in several ways, against the floor.

    python benchmarks/decode_step.py --model qwen3-8b --rows 1,16 --variants resident+graph,even:0.25,accelerate

Every variant holds its own copy of the weights and its own cache; a step is the same token at the same position again
and again. All of them use the plain (math) attention: with the fused kernels the *resident* model does not repeat its
own bits from 8 sequences on, so that there would be nothing to be equal to.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import headrace
from decoder_models import CONFIGS, DecodeStep, build_model, own_routing, routers, routing, spread_routing
from harness import LinkProbe, Timing, append, capture, counts, finish, interleave, parser_of, print_step, time_cuda
from headrace.cli.bench_step import parse_policy
from headrace.config import UVA, Budget, Policy
from headrace.memory.pinned import device_view, pinned_region
from headrace.model.inventory import Inventory, take_inventory
from headrace.plan.plan import Plan, assemble
from headrace.testing import boundaries

_GATHER_ROWS = 64


class _Variant:
    """One model under one way of offloading it."""

    def __init__(self, model_name: str, num_layers: int | None, text: str, device: torch.device) -> None:
        self.name = text
        options = set(text.split("+")[1:])
        self.compiled = "compile" in options
        self.graph = "graph" in options
        self._device = device
        kind = text.split("+")[0]
        config = CONFIGS[model_name](**({} if num_layers is None else {"num_hidden_layers": num_layers}))
        stays = kind == "resident" or kind.startswith("still:")
        self.model = build_model(config, device if stays else "cpu", device)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        if kind.startswith("still:"):
            # The resident reference of compiled variants: the same boundaries, and nothing moves (contract 1).
            self._still = boundaries(self.model, _policy(self.model, kind.replace("still:", "even:")))
            self._still.__enter__()
            kind = "resident"
        self.handle = _offload(self.model, kind, device)
        self.peak_bytes = torch.cuda.max_memory_allocated(device) - before
        self.planned_bytes = 0 if self.handle is None else self.handle.plan.device_bytes
        self.link_bytes = 0 if self.handle is None else self.handle.plan.moved_bytes
        self._steps: dict[int, DecodeStep] = {}  # a captured graph reads their tokens and caches
        self._code: Callable[..., Any] = self.model
        if self.compiled:
            self._code = torch.compile(self.model, fullgraph=True, dynamic=False)

    def step(self, batch: int) -> tuple[Callable[[], Any], torch.Tensor]:
        """The step for ``batch`` sequences, warm, and the tensor that holds its result."""
        own_routing(self.model)  # the prompt has other rows than a step
        step = self._steps[batch] = DecodeStep(self.model, self._code, batch, self._device)
        spread_routing(self.model, batch, self._device)
        out = step()
        if not self.graph:
            return step, out.clone()
        step()
        return capture(step)


def _offload(model: Any, kind: str, device: torch.device) -> Any:
    inventory = take_inventory(model)
    if kind == "resident":
        return None
    if kind == "accelerate":
        return _Accelerated(model, device)
    if kind == "diffusers":
        return _Diffused(model, device)
    if kind == "experts":
        return headrace.offload(model, UVA(params=["experts"]), device=device)
    if kind == "unselected":
        return headrace.offload(model, _unselected(inventory), device=device)
    return headrace.offload(model, _policy(model, kind), device=device)


def _policy(model: Any, text: str) -> Policy:
    """The policy of a variant, confined to the layers; shares are of the layers' bytes."""
    storages = take_inventory(model).storages
    layer_bytes = sum(s.num_bytes for s in storages if ".layers." in s.name)
    policy = parse_policy(text, layer_bytes, layer_bytes // model.config.num_hidden_layers)
    if isinstance(policy, Budget):
        outside = sum(s.num_bytes for s in storages) - layer_bytes
        return Budget(policy.num_bytes + outside, ["layers"])
    return replace(policy, params=["layers"])


def _unselected(inventory: Inventory) -> Plan:
    """As many bytes in place as the experts have, taken in the order of the model."""
    left = sum(s.num_bytes for s in inventory.storages if ".experts." in s.name)
    chosen = []
    for storage in inventory.storages:
        if storage.has_parameter and storage.num_bytes <= left:
            chosen.append(storage)
            left -= storage.num_bytes
    return assemble(inventory, [], 0, "cpu", uva=chosen)


class _Foreign:
    """Another library's offload of the same model; it has no plan."""

    plan = assemble(Inventory((), (), {}), [], 0, "cpu")


class _Accelerated(_Foreign):
    """accelerate: every fourth layer on the CPU, as the group rule 4/1 has it."""

    def __init__(self, model: Any, device: torch.device) -> None:
        from accelerate import dispatch_model

        num_layers = model.config.num_hidden_layers
        where: dict[str, Any] = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), 0)
        where |= {f"model.layers.{i}": "cpu" if i % 4 == 3 else 0 for i in range(num_layers)}
        dispatch_model(model, where, main_device=0)


class _Diffused(_Foreign):
    """diffusers: group offloading of all layers, leaf by leaf, with streams."""

    def __init__(self, model: Any, device: torch.device) -> None:
        from diffusers.hooks import apply_group_offloading

        decoder: Any = model.model
        host = torch.device("cpu")
        apply_group_offloading(
            decoder.layers, onload_device=device, offload_device=host, offload_type="leaf_level", use_stream=True
        )
        for module in (decoder.embed_tokens, decoder.norm, decoder.rotary_emb, model.lm_head):
            module.to(device)


def run(
    model_name: str,
    num_layers: int | None,
    variants: Sequence[str],
    batches: Sequence[int],
    rounds: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Yield one result per variant and batch size."""
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        models = [_Variant(model_name, num_layers, text, device) for text in ["resident", *variants]]
        link, gather = LinkProbe(device), _GatherProbe(device)
        for batch in batches:
            prepared = {model.name: model.step(batch) for model in models}
            steps = {name: step for name, (step, _) in prepared.items()}
            timings = interleave({**steps, "link": link.copy, "gather": gather.copy}, rounds, repeats, time_cuda)
            rates = link.num_bytes / timings["link"].ms * 1e3, gather.num_bytes / timings["gather"].ms * 1e3
            for model in models:
                yield _row(model, batch, timings, rates, {name: out for name, (_, out) in prepared.items()})


def _row(
    model: _Variant,
    batch: int,
    timings: dict[str, Timing],
    rates: tuple[float, float],
    outputs: dict[str, torch.Tensor],
) -> dict[str, Any]:
    timing = timings[model.name]
    # The eager resident step is the reference of eager variants, the captured one of captured ones.
    reference = "resident+graph" if model.graph and "resident+graph" in timings else "resident"
    if model.compiled:
        reference = next(name for name in timings if name.startswith("still:"))
    resident_ms = timings[reference].ms
    routed = _routed_bytes(model, batch)
    floor_ms = max(resident_ms, model.link_bytes / rates[0] * 1e3)
    if routed:
        floor_ms = routed / rates[1] * 1e3 + resident_ms
    return {
        "case": model.name,
        "rows": batch,
        "ms": timing.ms,
        "spread_ms": timing.spread_ms,
        "floor_ms": floor_ms,
        "resident_ms": resident_ms,
        "bytes_moved": model.link_bytes + routed,
        "link_gb_per_s": rates[0] / 1e9,
        "gather_gb_per_s": rates[1] / 1e9,
        "peak_device_bytes": model.peak_bytes,
        "planned_device_bytes": model.planned_bytes,
        "bit_equal": bool(torch.equal(outputs[model.name], outputs[reference])),
    }


def _routed_bytes(model: _Variant, batch: int) -> int:
    """Bytes of the distinct experts that a step reads in place, by the routing that was set."""
    in_place = {} if model.handle is None else model.handle.plan.uva
    modules = [
        (name, module) for name, module in model.model.named_modules() if type(module).__name__.endswith("Experts")
    ]
    total = 0
    for layer, (router, (name, module)) in enumerate(zip(routers(model.model), modules, strict=True)):
        held = [p for attr, p in module.named_parameters() if f"{name}.{attr}" in in_place]
        num_experts = len(routing(router, layer, batch).unique())
        total += num_experts * sum(p[0].numel() * p.element_size() for p in held)
    return total


class _GatherProbe:
    """Half of the rows of a pinned gigabyte, read in place in random order."""

    num_bytes = 1 << 29

    def __init__(self, device: torch.device) -> None:
        region = pinned_region(2 * self.num_bytes)
        self._rows = device_view(region, device).view(_GATHER_ROWS, -1)
        self._chosen = torch.randperm(_GATHER_ROWS, device=device)[: _GATHER_ROWS // 2]

    def copy(self) -> None:
        """Gather them."""
        self._rows[self._chosen]


def main() -> None:
    parser = parser_of(__doc__, rounds=5, repeats=8)
    parser.add_argument("--model", choices=CONFIGS, required=True)
    parser.add_argument("--layers", type=int, help="fewer than the published model has")
    parser.add_argument("--rows", type=counts, default=[1, 16], help="sequences that decode together")
    parser.add_argument(
        "--variants",
        default="even:0.25,group:4/1/2,group:1/1/2",
        help="even:F, memory:F, group:A/B/C, each with +graph or +compile; still:F, accelerate, diffusers, "
        "experts, unselected, resident",
    )
    given = parser.parse_args()
    results = []
    for row in run(given.model, given.layers, given.variants.split(","), given.rows, given.rounds, given.repeats):
        results.append(row)
        print_step(row)
        append(row, given.out)
    finish("decode step", results)


if __name__ == "__main__":
    main()
