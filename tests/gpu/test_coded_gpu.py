"""Coded units on a GPU: the kernel against the weights, and every way to run a model."""

from __future__ import annotations

import pytest
import torch
from gpu_files import captured
from gpu_models import build, offloaded, twins

import headrace
from headrace import Budget, Prefetch
from headrace.codec.decode_kernels import decode_on_gpu
from headrace.codec.exponents import Piece, encode

pytestmark = pytest.mark.usefixtures("no_grad")

PARAMS = ["gate_proj", "up_proj", "down_proj"]  # the packed weights are int8
EVERY = Prefetch(1, 1, 2, PARAMS, codec="exp3")


def decoded(weights: torch.Tensor) -> torch.Tensor | None:
    if (code := encode(weights)) is None:
        return None
    into = torch.empty_like(weights)
    decode_on_gpu(Piece(0, len(weights), True, 0, len(code)), code, into)
    return into


def test_ten_gigabytes_of_weights_come_back() -> None:
    """Of ten scales, with random bits among them, in pieces as units have them."""
    made = torch.Generator("cuda").manual_seed(0)
    for number in range(320):
        weights = (torch.randn(1 << 24, generator=made, device="cuda") * 10.0 ** (number % 10 - 5)).bfloat16()
        bits = weights.view(torch.int16)
        places = torch.randint(0, len(bits), (1 << 14,), generator=made, device="cuda")
        bits[places] = torch.randint(-(1 << 15), 1 << 15, (1 << 14,), generator=made, device="cuda").to(torch.int16)
        assert torch.equal(decoded(weights.view(torch.uint8)), weights.view(torch.uint8))


def test_ten_thousand_tensors_come_back() -> None:
    made = torch.Generator().manual_seed(0)
    coded = 0
    for _ in range(10_000):
        count = 128 * int(torch.randint(8, 64, (1,), generator=made))
        weights = torch.randint(0, 256, (2 * count,), generator=made, dtype=torch.uint8, device="cpu")
        if torch.rand(1, generator=made) < 0.8:
            weights = (torch.randn(count, generator=made) * 0.02).bfloat16().view(torch.uint8)
        on_gpu = weights.cuda()
        if (found := decoded(on_gpu)) is not None:
            coded += 1
            assert torch.equal(found, on_gpu)
    assert coded > 7_000


@pytest.mark.parametrize("policy", [EVERY, Prefetch(2, 1, 1, PARAMS, codec="exp3")], ids=["every", "every other"])
def test_eager(policy: Prefetch) -> None:
    resident, model = twins()
    ids = torch.arange(8, device="cuda")
    with offloaded(model, policy) as handle:
        for _ in range(4):
            assert torch.equal(model(ids), resident(ids))
        stats = handle.stats()
        copies = sum(unit.copies for unit in stats.units)
        assert 0 < stats.bytes_moved < 0.76 * copies * handle.plan.units[0].payload_bytes
    assert torch.equal(model.to("cuda")(ids), resident(ids))


@pytest.mark.parametrize("slots", [1, 2])
def test_forwards_on_two_streams(slots: int) -> None:
    """Each begins while the other reads what was decoded for it: all units are decoded in the same memory."""
    resident, model = twins()
    streams = [torch.cuda.Stream() for _ in range(2)]
    prompts = [torch.randint(0, 1000, (2048,), device="cuda") for _ in range(6)]
    expected = [resident(ids) for ids in prompts]
    with offloaded(model, Prefetch(1, 1, slots, PARAMS, codec="exp3")) as handle:
        torch.cuda.synchronize()
        found = []
        for number, ids in enumerate(prompts):
            with torch.cuda.stream(streams[number % 2]):
                found.append(model(ids))
        torch.cuda.synchronize()
        assert handle.stats().bytes_moved > 0
        assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


def test_a_graph_holds_copies_and_kernels() -> None:
    resident, model = twins()
    ids = torch.arange(8, device="cuda")
    with offloaded(model, EVERY):
        graph, out = captured(model, ids)
        for start in (0, 8, 16):
            ids.copy_(torch.arange(start, start + 8))
            graph.replay()
            assert torch.equal(out, resident(ids))
            assert torch.equal(model(ids), resident(ids)), "eager after a replay"


def large_pair() -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model whose units have several pieces, on the GPU, and the same on the host."""
    torch.manual_seed(0)
    resident = (
        torch.nn.Sequential(
            *(
                torch.nn.Linear(12288, 6144, bias=False) if i % 2 else torch.nn.Linear(6144, 12288, bias=False)
                for i in range(6)
            )
        )
        .bfloat16()
        .cuda()
    )
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in resident))
    for module, other in zip(model, resident, strict=True):
        module.weight = torch.nn.Parameter(other.weight.detach().cpu(), requires_grad=False)
    return resident, model.eval()


def test_units_of_several_pieces() -> None:
    resident, model = large_pair()
    x = torch.randn(4, 6144, device="cuda").bfloat16()
    with offloaded(model, Prefetch(1, 1, 2, codec="exp3"), device="cuda") as handle:
        assert all(unit.num_bytes > 2 * (32 << 20) for unit in handle.plan.units)
        for _ in range(5):
            assert torch.equal(model(x), resident(x))
        graph, out = captured(model, x)
        for _ in range(5):
            graph.replay()
        assert torch.equal(out, resident(x))


@pytest.mark.parametrize("decoder", ["gpu", "cpu"])
def test_weights_are_read_back(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU decodes them, and where it has no room the CPU."""

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    resident, model = large_pair()
    expected = {name: each.cpu() for name, each in resident.state_dict().items()}
    with offloaded(model, Prefetch(1, 1, 2, codec="exp3"), device="cuda") as handle:
        module = (
            "headrace.stores.coded_host.decode" if decoder == "gpu" else "headrace.codec.decode_kernels.decode_on_gpu"
        )
        monkeypatch.setattr(module, refuse)
        found = model.state_dict()
        assert all(torch.equal(found[name].cpu(), each) for name, each in expected.items())
        assert len(handle.plan.coded_units) == len(expected)
    assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())


def test_device_memory_is_the_plans() -> None:
    model = build(device="cpu")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with offloaded(model, EVERY, device="cuda") as handle:
        for _ in range(3):
            model(torch.arange(8, device="cuda"))
        assert torch.cuda.max_memory_allocated() - before <= handle.plan.device_bytes + (64 << 20)
        assert handle.plan.decoding_bytes


def test_a_budget_is_kept() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2048, 2048, bias=False) for _ in range(48)]
    model = torch.nn.Sequential(*layers).bfloat16().eval().requires_grad_(False)
    x = torch.randn(4, 2048).bfloat16().cuda()
    expected = model.cuda()(x)
    model.cpu()
    with headrace.offload(model, Budget("150MiB", codec="exp3"), device="cuda") as handle:
        assert torch.equal(model(x), expected)
        assert handle.plan.coded_units
        assert handle.plan.device_bytes <= 150 << 20
        assert handle.stats().bytes_moved
