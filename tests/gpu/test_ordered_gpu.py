"""The order of sums of experts on a GPU: bits of C, of the resident model wherever experts lie, and times beside
transformers' own kernels."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations import moe

import headrace
import ordered_dots
from headrace.adapters.transformers import load, ordered_experts
from headrace.experts import ordered
from headrace.experts.order import Projection
from headrace.experts.ordered import Launch
from headrace.memory.pinned import device_view
from headrace.testing import assert_same_bits
from moe_models import IDS, cached, gpt_oss, qwen
from ordered_c import FORMATS, GPT_OSS, compared_with_c, different, dots_in_c, experts_in_c, on_cpu, projection, spread
from quantised_checkpoints import FORMATS as CHECKPOINTS
from quantised_checkpoints import OSS

pytestmark = pytest.mark.usefixtures("no_grad")
TIMES, ROWS = 200, 1_000_000


def step(model: Any) -> torch.Tensor:
    return model(IDS[:, 1:3].cuda()).logits


def to_gpu(given: Projection) -> Projection:
    tensors = (None if each is None else each.cuda() for each in given[:3])
    return Projection(*tensors, given.is_transposed)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMATS)
def test_a_million_rows_have_the_bits_of_c(form: str) -> None:
    """Forty shapes, five times each: exponents spread from not at all to far, a tenth with denormals, infinities, NaN.

    A kernel is compiled for each shape, which takes longer than all else; with 200 shapes no row differed on an H200.
    """
    made, choose = torch.Generator("cuda").manual_seed(0), torch.Generator().manual_seed(1)
    lengths = [int(torch.randint(1, 129 if at % 4 else 257, (1,), generator=choose)) * 32 for at in range(10)]
    wrong: dict[tuple[int, ...], Future[int]] = {}
    rows = 0

    def num_different(weights: Projection, x: torch.Tensor, found: torch.Tensor) -> int:
        return different(found, dots_in_c(weights, 0, x))

    with ThreadPoolExecutor() as threads:
        for time in range(TIMES):
            spreads, at = divmod(time, 10)
            inputs = lengths[at] - int(form in ("bf16", "transposed")) * (at % 3)  # odd ones, too
            outputs = ROWS // TIMES + time % 8
            numbers = {"wide": spreads % 5 * 1.5, "special": 0.01 * (spreads % 10 == 9)}
            weights = projection(form, 1, outputs, inputs, made=made, **numbers)
            x = spread(1, inputs, made=made, **numbers)
            found = ordered_dots.dots_by_kernel(weights, 0, x)[0].cpu()
            wrong[time, outputs, inputs] = threads.submit(num_different, on_cpu(weights), x[0].cpu(), found)
            rows += outputs
    assert rows >= ROWS
    assert {about: count for about, future in wrong.items() if (count := future.result())} == {}


@pytest.mark.parametrize("form", FORMATS)
def test_experts_of_one_to_eight_rows(form: str) -> None:
    made = torch.Generator().manual_seed(0)
    oss = form != "bf16"
    for tokens in range(1, 9):
        numbers = {"wide": tokens % 4 * 1.0, "special": 0.01 * (tokens == 8)}
        first = projection(form, 9, 2 * 480, 736, bias=oss, made=made, **numbers)
        second = projection(form, 9, 736, 480, bias=oss, made=made, **numbers)
        ids = torch.randint(0, 9, (tokens, 4), generator=made)
        x, weights = spread(tokens, 736, made=made, **numbers), torch.rand(tokens, 4, generator=made)
        for given in (weights, weights.bfloat16()):
            rest: Any = (oss, GPT_OSS if oss else ())
            found = ordered.run(x.cuda(), ids.cuda(), given.cuda(), to_gpu(first), to_gpu(second), *rest)
            assert different(found, experts_in_c(x, ids, given, first, second, *rest)) == 0


@pytest.mark.parametrize("form", FORMATS)
def test_unpacked_weights(form: str) -> None:
    """Of gpt-oss-120b's size, and where they are read in host memory; a tenth of the numbers are special."""
    made = torch.Generator("cuda").manual_seed(0)
    for special in (0.0, 0.1):
        weights = projection(form, 3, 5760, 2880, made=made, wide=2.0, special=special)
        for expert in range(3):
            found = ordered.unpack(weights, expert, torch.full((5760, 2880), 7, dtype=torch.bfloat16, device="cuda"))
            assert different(found.cpu(), weights.values(expert).bfloat16().cpu()) == 0
        host = weights.weight.cpu().pin_memory()
        read = device_view(host.view(-1).view(torch.uint8), found.device).view(host.dtype).view(host.shape)
        there = ordered.unpack(weights._replace(weight=read), 2, torch.empty_like(found))
        assert different(there.cpu(), found.cpu()) == 0


@pytest.mark.parametrize("launch", [Launch(1, 1, 1), Launch(2, 8, 2), Launch(4, 16, 4), Launch(8, 4, 8)])
def test_a_division_of_work_changes_no_bit(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "LAUNCHES", dict.fromkeys(ordered.LAUNCHES, (launch, launch)))
    made = torch.Generator().manual_seed(0)
    for form in FORMATS:
        weights, x = projection(form, 1, 1000, 2880, made=made), spread(1, 2880, made=made)
        found = ordered_dots.dots_by_kernel(to_gpu(weights), 0, x.cuda())[0]
        assert different(found, dots_in_c(weights, 0, x[0])) == 0


@pytest.mark.parametrize("form", FORMATS)
def test_no_rounding_is_left_out(form: str) -> None:
    """The compiler fuses no multiplication with an addition, and flushes no denormal number."""
    made = torch.Generator().manual_seed(0)
    weights, x = projection(form, 1, 64, 2880, made=made), spread(1, 2880, made=made)
    ptx = ordered_dots.launch(to_gpu(weights), 0, x.cuda())[1].asm["ptx"]
    assert "fma." not in ptx
    assert ".ftz" not in ptx


class TestModels:
    @pytest.mark.parametrize("make", [qwen, gpt_oss])
    @pytest.mark.parametrize("way", ["cache", "uva", "prefetch"])
    def test_offloaded(self, make: Any, way: str) -> None:
        model = make().bfloat16().cuda()
        model.set_experts_implementation("headrace")
        assert len(model.model.layers) == 2
        with compared_with_c() as counts:
            expected = [step(model) for _ in range(2)]
        assert counts == [0] * 4
        policy = headrace.Rules([("experts", way)], expert_slots=3 if way == "cache" else None)
        with headrace.offload(model, policy) as handle:
            assert_same_bits([step(model) for _ in range(2)], expected)
            stats = handle.stats()
            assert stats.bytes_moved > 0 or handle.plan.uva_bytes > 0

    @pytest.mark.parametrize("way", ["resident", "cache"])
    def test_mxfp4(self, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HEADRACE_DEBUG", "1")
        sizes = OSS | {"hidden_size": 256, "intermediate_size": 256, "num_local_experts": 16}
        replace(CHECKPOINTS["MXFP4, experts"], sizes=sizes).write(tmp_path)
        policy = cached(6) if way == "cache" else "1GiB"
        model, handle = load(tmp_path, policy, device="cuda", experts_implementation="headrace")
        with handle:
            found = [step(model), step(model)]
            ids = torch.arange(20, device="cuda")[None]  # more rows than are multiplied in the order of sums
            text = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
            assert (handle.stats().bytes_moved > 0) == (way == "cache")
        with compared_with_c() as counts:
            assert_same_bits([step(model), step(model)], found)
        assert set(counts) == {0}
        again = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert torch.equal(again, text)

    @pytest.mark.parametrize("tokens", [1, 4, 8])
    def test_in_a_graph(self, tokens: int) -> None:
        model = qwen("headrace", hidden_size=512, moe_intermediate_size=256).bfloat16().cuda()
        experts, ids = model.model.layers[0].mlp.experts, torch.randint(0, 8, (tokens, 2), device="cuda")
        x, weights = torch.randn(tokens, 512, device="cuda").bfloat16(), torch.rand(tokens, 2, device="cuda").bfloat16()
        experts(x, ids, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = experts(x, ids, weights)
        for _ in range(3):
            ids.copy_(torch.randint(0, 8, (tokens, 2)))
            x.copy_(torch.randn(tokens, 512))
            graph.replay()
            first, second = (on_cpu(Projection(each)) for each in (experts.gate_up_proj, experts.down_proj))
            assert different(found, experts_in_c(x, ids, weights, first, second, False, ())) == 0


@pytest.mark.alone
def test_times_beside_batched_mm() -> None:
    """Printed, not asserted: one layer of Qwen3-30B-A3B, one row, in a graph."""
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 1, "num_experts": 128}
    with torch.device("cuda"):
        experts = qwen(**sizes, num_experts_per_tok=8).bfloat16().model.layers[0].mlp.experts
    x, weights = torch.randn(1, 2048, device="cuda").bfloat16(), torch.rand(1, 8, device="cuda").bfloat16()
    choices = [torch.randperm(128, device="cuda")[:8][None] for _ in range(32)]
    for forward in (moe.batched_mm_experts_forward, ordered_experts.ordered_experts_forward):
        forward(experts, x, choices[0], weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for ids in choices:
                forward(experts, x, ids, weights)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        print(f"{forward.__name__}: {begin.elapsed_time(end) * 1e3 / len(choices):.1f} us a layer")
