"""torch.compile captures forwards in graphs of its own: whole, in parts, and beside eager ones. Bits stay equal."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from gpu_models import build, offloaded, twins
from torch import nn

from headrace import Prefetch
from headrace.errors import StateError
from headrace.testing import boundaries

POLICY = Prefetch(1, 1, 2)  # so that each unit shares its slot
MODE = "reduce-overhead"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    # Or two compiles choose the shapes of reductions by time, and so the order in which they sum.
    with torch.no_grad(), torch._inductor.config.patch(deterministic=True):
        yield
    torch._dynamo.reset()


def ids(seed: int) -> torch.Tensor:
    return torch.randint(1000, (8,), generator=torch.Generator().manual_seed(seed)).cuda()


def outputs(model: nn.Module, eager: nn.Module | None = None) -> list[torch.Tensor]:
    """Of eight calls in graphs, with one in eager mode between two of them."""
    found = []
    for step in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        found.append(model(ids(step)).clone())
        if eager is not None and step % 3 == 2:
            found.append(eager(ids(step)).clone())
    return found


def expected(resident: nn.Module, beside_eager: bool) -> list[torch.Tensor]:
    """Of the resident model with the same boundaries; its compiled code rounds as that of the offloaded one."""
    with boundaries(resident, POLICY):
        found = outputs(torch.compile(resident, mode=MODE), resident if beside_eager else None)
    torch._dynamo.reset()
    return found


@pytest.mark.filterwarnings("ignore:.*its bytes are copied for every such use:headrace.HeadraceWarning")
@pytest.mark.parametrize("partition", [False, True])
@pytest.mark.parametrize("beside_eager", [False, True])
def test_whole_forwards(partition: bool, beside_eager: bool) -> None:
    with torch._inductor.config.patch(graph_partition=partition):
        resident = build()
        weights = {name: weight.detach().clone() for name, weight in resident.named_parameters()}
        wanted = expected(copy.deepcopy(resident), beside_eager)
        with offloaded(resident, POLICY) as handle, warnings.catch_warnings():
            warnings.filterwarnings("error", message="a CUDA graph holds a part")
            found = outputs(torch.compile(resident, mode=MODE), resident if beside_eager else None)
            assert all(map(torch.equal, found, wanted))
            assert sum(unit.captured_copies for unit in handle.stats().units) >= len(handle.plan.units)
            # Behind a replay, of which nothing of ours is told.
            assert all(torch.equal(weight.clone(), weights[name]) for name, weight in resident.named_parameters())


def broken(model: nn.Module) -> nn.Module:
    model.layers[3].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    return model


@pytest.mark.parametrize("beside_eager", [False, True])
def test_forwards_with_a_graph_break(beside_eager: bool) -> None:
    resident = broken(build())
    wanted = expected(broken(build()), beside_eager)
    with offloaded(resident, POLICY) as handle:
        with pytest.warns(UserWarning, match="a CUDA graph holds a part of a forward"):
            found = outputs(torch.compile(resident, mode=MODE), resident if beside_eager else None)
        assert all(map(torch.equal, found, wanted))
        assert handle.stats().bytes_moved > 0


@pytest.mark.filterwarnings("ignore:a CUDA graph holds a part of a forward")
def test_layers_compiled_one_by_one() -> None:
    def by_layer(model: nn.Module) -> nn.Module:
        for layer in model.layers:
            layer.compile(mode=MODE)
        return model

    resident = build()
    with boundaries(other := copy.deepcopy(resident), POLICY):
        wanted = outputs(by_layer(other))
    torch._dynamo.reset()
    with offloaded(resident, POLICY) as handle:
        assert all(map(torch.equal, outputs(by_layer(resident)), wanted))
        assert handle.stats().bytes_moved > 0


class Partitioned(nn.Module):
    """Computes on the CPU in the middle, where inductor cuts its graph in two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = build(seed=1), build(seed=2)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        ids = self.first(given).argmax(-1).cpu()
        return self.second(((ids * 7) % 1000).cuda())


def test_a_partitioned_graph_is_an_error_and_leaves_the_gpu_usable() -> None:
    with torch._inductor.config.patch(graph_partition=True):
        model = Partitioned()
        with offloaded(model, POLICY), pytest.raises(StateError, match="graph_partition"):
            outputs(torch.compile(model, mode=MODE))
    assert torch.equal(torch.ones(4, device="cuda").sum().cpu(), torch.tensor(4.0))


@pytest.mark.filterwarnings("ignore:a CUDA graph holds a part of a forward")
def test_a_module_captured_by_itself() -> None:
    resident, model = twins()
    hidden = torch.randn(8, 512, device="cuda", dtype=torch.bfloat16)
    with offloaded(model, Prefetch(1, 1, 2)) as handle:
        model(ids(0))
        for layer, other in zip(model.layers, resident.layers, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = layer(hidden)
            for _ in range(3):
                graph.replay()
                assert torch.equal(out, other(hidden))
                assert torch.equal(model(ids(1)), resident(ids(1)))
            assert handle.stats().bytes_moved > 0


@pytest.mark.parametrize("implementation", ["static"])
def test_generate_of_transformers_with_a_static_cache(implementation: str) -> None:
    """Prefill outside of graphs, decoding inside, two prompts of different length."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
    )  # fmt: skip
    resident = transformers.Qwen3ForCausalLM(config).to("cuda", torch.bfloat16).eval().requires_grad_(False)
    policy = Prefetch(2, 1, 2, params=["ALL_MODEL_PARAMS"])

    def run(model: nn.Module) -> list[torch.Tensor]:
        found = []
        for length in (12, 31):
            out = model.generate(
                ids(length).repeat(4)[None, :length], max_new_tokens=12, min_new_tokens=12, do_sample=False,
                cache_implementation=implementation, return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
            found += [out.sequences, *out.logits]
        return found

    with boundaries(other := copy.deepcopy(resident), policy):
        wanted = run(other)
    torch._dynamo.reset()
    with offloaded(resident, policy) as handle:
        assert all(map(torch.equal, run(resident), wanted))
        assert sum(unit.captured_copies for unit in handle.stats().units) >= len(handle.plan.units)
