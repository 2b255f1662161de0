"""The promise: a model on a GPU that is not the current one runs there with the same bits, eagerly and in graphs."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from gpu_files import save
from gpu_models import build, offloaded

import headrace
from headrace import UVA, Prefetch, Rules

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
NEXT = torch.device("cuda", 1)
LAYERS, ALL = ["layers"], ["ALL_MODEL_PARAMS"]
POLICIES = {
    "slots": Prefetch(1, 1, 2, params=LAYERS),
    "one slot": Prefetch(1, 1, 1, params=LAYERS),
    "in place": UVA(params=["up_proj"]),
    "coded": Prefetch(1, 1, 2, params=["gate_proj", "up_proj"], codec="exp3"),
    "files": Prefetch(1, 1, 2, params=LAYERS, mode="disk"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_forwards(name: str, tmp_path: Path) -> None:
    assert torch.cuda.current_device() == 0
    resident = build(device="cuda:1")
    is_file = POLICIES[name].mode == "disk"
    model = build(device="meta") if is_file else copy.deepcopy(resident)
    checkpoint = save(resident, tmp_path) if is_file else None
    with offloaded(model, POLICIES[name], device="cuda:1", checkpoint=checkpoint) as handle:
        for seed in range(4):
            ids = torch.arange(8, device=NEXT) + seed
            assert torch.equal(model(ids), resident(ids))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(NEXT), torch.cuda.graph(graph, stream=torch.cuda.Stream(NEXT)):
            captured = model(ids)
        for seed in range(4):
            ids.copy_(torch.arange(8) + seed)
            graph.replay()
            assert torch.equal(captured, resident(ids))
        assert handle.stats().bytes_moved > 0 or name == "in place"
        assert torch.cuda.current_device() == 0
        del graph


SIZES = {
    "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
    "attn_implementation": "eager", "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("policy", [
    None, Prefetch(4, 1, 2, params=ALL), Rules([("experts", "cache")], expert_slots=6),
], ids=["resident", "slots", "cached experts"])  # fmt: skip
@pytest.mark.parametrize("captured_before", [False, True])
def test_generate_in_graphs(policy: Prefetch | Rules | None, captured_before: bool) -> None:
    """Also where the process has captured on the other GPU before, from which torch keeps its stream."""
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES)).to(NEXT, torch.bfloat16).eval()
    ids = torch.randint(1, 1000, (1, 12), device=NEXT)
    expected = model.generate(ids, max_new_tokens=24, do_sample=False)
    if captured_before:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(8, device="cuda:0").add_(1)
    handle = None if policy is None else headrace.offload(model, policy)
    graphs = headrace.decode_in_graphs(model)
    for _ in range(2):
        assert torch.equal(model.generate(ids, max_new_tokens=24, do_sample=False), expected)
    assert graphs.replays > 20
    graphs.remove()
    if handle is not None:
        assert handle.stats().bytes_moved > 0
        handle.remove()
