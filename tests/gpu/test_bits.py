"""Same bits as the resident model of the same mode, for every mechanism, in every order of eager runs and replays."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from gpu_models import build, offloaded, twins

import headrace
from headrace import UVA, Budget, Handle, Plan, Prefetch
from headrace.model.inventory import take_inventory
from headrace.plan.build import build_plan
from headrace.plan.plan import UnitSpec, assemble
from headrace.plan.units import move_on_demand

pytestmark = pytest.mark.usefixtures("no_grad")


def mixed_plan(model: torch.nn.Module) -> Plan:
    """Some tensors resident, some prefetched, some zero-copy, in every layer."""
    inventory = take_inventory(model)
    prefetched = build_plan(inventory, Prefetch(1, 1, 2, ["down_proj"]))
    in_place = build_plan(inventory, UVA(params=["up_proj", "embed"]))
    specs = [
        UnitSpec(unit.module_fqn, tuple(inventory.by_name[entry.storage] for entry in unit.entries))
        for unit in prefetched.units
    ]
    return assemble(inventory, specs, 2, "cpu", uva=[inventory.by_name[name] for name in in_place.uva])


CODABLE = ["gate_proj", "up_proj", "down_proj"]  # beside them a block has integers
POLICIES = {
    "even": lambda model: Budget(int(take_inventory(model).num_bytes * 0.7)),
    "group, units mod slots = 0": lambda model: Prefetch(1, 1, 7),
    "group, units mod slots != 0": lambda model: Prefetch(1, 1, 3),
    "all, two slots": lambda model: Prefetch(1, 1, 2),
    "all, one slot": lambda model: Prefetch(1, 1, 1),
    "one unit": lambda model: Prefetch(7, 1, 1),
    "step larger than units": lambda model: Prefetch(3, 1, 9),
    "uva": lambda model: UVA(params=["up_proj", "packed", "head", "embed"]),
    "mixed": mixed_plan,
    "coded, two slots": lambda model: Prefetch(1, 1, 2, CODABLE, codec="exp3"),
    "coded, one slot": lambda model: Prefetch(1, 1, 1, CODABLE, codec="exp3"),
    "coded, units mod slots != 0": lambda model: Prefetch(1, 1, 3, CODABLE, codec="exp3"),
}


@pytest.fixture(params=POLICIES, ids=list(POLICIES))
def pair(request: pytest.FixtureRequest):
    """A resident model and its offloaded twin."""
    resident, model = twins()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", headrace.HeadraceWarning)
        handle = headrace.offload(model, POLICIES[request.param](model))
    yield resident, handle
    handle.remove(graphs_released=True)


def inputs(rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 1000, (rows,), device="cuda", generator=generator)


def capture(module, ids: torch.Tensor):
    """What a user writes: warm up, capture, nothing about offloading."""
    for _ in range(2):
        module(ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(ids)
    return graph, out


def assert_moved(handle: Handle) -> None:
    stats = handle.stats()
    if handle.plan.units:
        assert stats.bytes_moved > 0
        assert stats.copies + sum(unit.captured_copies for unit in stats.units) >= len(handle.plan.units)
    else:
        assert stats.mechanism_bytes["uva"] > 0


def test_eager(pair) -> None:
    resident, handle = pair
    for seed in range(5):
        ids = inputs(16, seed)
        assert torch.equal(handle.model(ids), resident(ids))
    assert_moved(handle)
    assert handle.stats().misses == 0
    assert handle.stats().bytes_moved >= 5 * handle.plan.moved_bytes


def test_graph_and_eager_in_any_order(pair) -> None:
    resident, handle = pair
    small, large = inputs(3), inputs(64)
    graph_small, out_small = capture(handle.model, small)
    graph_large, out_large = capture(handle.model, large)
    for round_ in range(100):
        fresh_small, fresh_large = inputs(3, round_), inputs(64, round_ + 100)
        small.copy_(fresh_small)
        large.copy_(fresh_large)
        graph_small.replay()
        assert torch.equal(out_small, resident(fresh_small))
        if round_ % 3 == 0:
            assert torch.equal(handle.model(fresh_large), resident(fresh_large))
        graph_large.replay()
        graph_large.replay()
        assert torch.equal(out_large, resident(fresh_large))
        if round_ % 4 == 0:
            assert torch.equal(handle.model(fresh_small), resident(fresh_small))
    assert_moved(handle)


def test_piecewise_graphs(pair) -> None:
    """Each layer is a graph of its own, what lies between is eager, all graphs share the slots."""
    resident, handle = pair
    model = handle.model
    ids = inputs(8)
    model(ids)
    hidden = torch.empty(8, 512, device="cuda", dtype=torch.bfloat16)
    graphs, outs = [], []
    handle.sync_prev_onload()
    for layer in model.layers:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(hidden)
            handle.join_after_forward()
        graphs.append(graph)
        outs.append(out)

    def run(tokens: torch.Tensor) -> torch.Tensor:
        handle.sync_prev_onload()
        x = model.embed(tokens)
        for graph, out in zip(graphs, outs, strict=True):
            hidden.copy_(x * 1.0)
            graph.replay()
            x = out
        return model.head(x)

    for seed in range(10):
        tokens = inputs(8, seed)
        assert torch.equal(run(tokens), resident(tokens))
        if seed % 2:
            assert torch.equal(model(tokens), resident(tokens))
    assert_moved(handle)


def test_own_streams_and_threads(pair) -> None:
    """Warm up in one thread on one stream, capture on the caller's, loop in another thread on a third."""
    import threading

    resident, handle = pair
    ids = inputs(16)
    expected = resident(ids)
    torch.cuda.synchronize()
    failures: list[str] = []

    def run(label: str) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                out = handle.model(ids)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(out, expected):
                    failures.append(label)

    for label in ("warm-up thread", "loop thread"):
        thread = threading.Thread(target=run, args=(label,))
        thread.start()
        thread.join()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        handle.model(ids)
        with torch.cuda.graph(graph, stream=stream):
            out = handle.model(ids)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    run("main thread")
    assert not failures
    assert_moved(handle)


@pytest.mark.parametrize("name", ["even", "group, units mod slots != 0", "uva", "mixed"])
def test_compiled(name: str) -> None:
    """One full graph, no break; bits of the compiled resident model with the same boundaries; then captured as well."""
    from headrace.testing import boundaries

    resident = build(5)
    model = copy.deepcopy(resident)
    ids = inputs(16)
    with offloaded(model, POLICIES[name](model)) as handle:
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True)
        outs = [compiled(ids).clone() for _ in range(3)]
        graph, captured = capture(compiled, ids)
        for _ in range(3):
            graph.replay()
        outs.append(captured.clone())
        eager = model(ids)
        assert_moved(handle)
        with boundaries(resident, handle.plan):
            torch._dynamo.reset()
            reference = torch.compile(resident, fullgraph=True)(ids)
        for out in outs:
            assert torch.equal(out, reference), (out - reference).abs().max()
        assert torch.equal(eager, resident(ids))


def test_two_models_in_one_process() -> None:
    pairs = []
    for seed in (0, 1):
        resident = build(seed=seed)
        model = copy.deepcopy(resident)
        pairs.append((resident, headrace.offload(model, Prefetch(1, 1, 2))))
    ids = inputs(16)
    graphs = [capture(handle.model, ids) for _, handle in pairs]
    for _ in range(10):
        for (resident, handle), (graph, out) in zip(pairs, graphs, strict=True):
            graph.replay()
            assert torch.equal(out, resident(ids))
            assert torch.equal(handle.model(ids), resident(ids))
    for _, handle in pairs:
        assert_moved(handle)
        handle.remove(graphs_released=True)


def test_uva_disabled_moves_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DISABLE_UVA", "1")
    resident, model = twins()
    ids = inputs(16)
    with offloaded(model, UVA(params=["up_proj", "head", "embed"])) as handle:
        assert handle.plan == move_on_demand(take_inventory(resident), handle.plan)
        assert handle.plan.uva_bytes == 0
        for _ in range(3):
            assert torch.equal(model(ids), resident(ids))
        assert handle.stats().bytes_moved >= 3 * handle.plan.moved_bytes > 0


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_encoder_layers_of_torch(activation: str, captured: bool) -> None:
    """They leave their fast path for hooks, and its GELU is another one on a GPU."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 8, 1024, activation=activation, batch_first=True)
    resident = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).eval().to("cuda", torch.bfloat16)
    x = torch.randn(2, 17, 256, device="cuda", dtype=torch.bfloat16)
    with headrace.offload(copy.deepcopy(resident), Prefetch(1, 1, 1, ["ALL_MODEL_PARAMS"])) as handle:
        if captured:
            graph, out = capture(handle.model, x)
            graph.replay()
        else:
            out = handle.model(x)
        assert torch.equal(out, resident(x))
        assert_moved(handle)
        if captured:
            del graph
            handle.remove(graphs_released=True)
