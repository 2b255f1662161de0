"""The promise: of a tensor-parallel model each rank offloads its own shards, and the bits stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import headrace
from headrace.model.inventory import take_inventory
from headrace.testing import assert_moved, assert_same_bits
from ranks import outcomes

PLAN = {
    "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(), "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(), "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}  # fmt: skip


def llama() -> nn.Module:
    """A small Llama of transformers', its layers split over all ranks."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(config).eval()


def split(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, PLAN)
    return model


def shards(rank: int, policy: Any) -> dict[str, Any]:
    tokens = torch.arange(6).reshape(1, 6)
    with torch.no_grad():
        model = llama()
        whole = model(tokens, use_cache=False).logits
        expected = split(model)(tokens, use_cache=False).logits
        # heads are split, so sums are taken in another order; the same function all the same
        torch.testing.assert_close(expected, whole)
        parameters = dict(model.named_parameters())
        handle = headrace.offload(model, policy)
        for _ in range(2):
            assert_same_bits(model(tokens, use_cache=False).logits, expected)
        assert_moved(handle, 2)
        handle_bytes = handle.plan.prefetched_bytes
        state = {name: tensor.to_local() for name, tensor in model.state_dict().items() if isinstance(tensor, DTensor)}
        handle.remove()
        assert_same_bits(model(tokens, use_cache=False).logits, expected)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        if isinstance(parameter, DTensor):
            assert_same_bits(state[name], parameter.to_local())
    return {"bytes": handle_bytes, "split": sum(isinstance(p, DTensor) for p in parameters.values())}


def test_each_rank_offloads_its_local_shards() -> None:
    for facts in outcomes(2, shards, headrace.Prefetch(params=["layers"], prefetch_step=2)):
        assert facts["split"] == 4 * 7
        # 4 layers: seven projections, half of each here, and two norms that every rank has
        assert facts["bytes"] == 4 * 4 * ((4 * 128 * 128 + 3 * 128 * 256) // 2 + 2 * 128)


def budget(rank: int) -> Any:
    model = split(llama())
    inventory = take_inventory(model)
    assert inventory.num_bytes == sum(
        (p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters()
    ) + sum(b.nbytes for b in model.buffers())
    return shards(rank, headrace.Budget(inventory.num_bytes * 2 // 3))


def test_a_budget_counts_local_bytes() -> None:
    assert all(facts["bytes"] > 0 for facts in outcomes(2, budget))
