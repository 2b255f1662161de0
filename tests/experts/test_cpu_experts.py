"""The promise: experts on a CPU have the bits of the order of sums, whatever the processor, threads and neighbours.

The references are C of another make (``tests/support/ordered.c``) and torch. Planted faults are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace.adapters.transformers.ordered_experts  # noqa: F401 - which transformers then knows
from cpu_experts import activated, case, dots, of_library, variant
from headrace.errors import HeadraceWarning, OptionError
from headrace.experts import order, ordered
from headrace.experts.cpu import pool
from headrace.experts.cpu.native import INSTRUCTIONS, library
from headrace.experts.order import Projection
from moe_models import IDS, gpt_oss, qwen
from ordered_c import (
    FORMATS,
    GPT_OSS,
    activated_in_c,
    compared_with_c,
    different,
    dots_in_c,
    experts_in_c,
    projection,
    spread,
)

# One NaN in x makes all outputs NaN: where they are rare, others are seen. Products of tiny ones are no exact float32;
# where x is large, MXFP4 has the least scales.
NUMBERS = {
    "narrow": {}, "wide": {"wide": 4.0}, "special": {"wide": 1.0, "special": 0.02},
    "rare": {"wide": 1.0, "special": 0.0004}, "tiny": {"wide": 2.0, "size": 1e-20},
    "large": {"wide": 1.0, "size": 1e10},
}  # fmt: skip
LENGTHS = (32, 64, 96, 288, 544, 768, 1184, 2048, 2880, 4320)
# Of bf16 only.
ODD_LENGTHS = (1, 7, 63, 65, 301, 1023)


@pytest.fixture
def made() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return variant(tmp_path_factory.mktemp("tested"))


@pytest.fixture(scope="module")
def pools() -> Iterator[list[pool.Pool]]:
    """Each kind of instructions that this processor has, on one thread, as many as cores, and more than cores."""
    kinds = range(library().experts_best() + 1)
    made = [of_library(library(), threads, kind) for kind in kinds for threads in (1, 2, 3, 7)]
    yield made
    for each in made:
        each.stop()


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("form", ["bf16", "mxfp4", "int4", "fp8"])
def test_products_before_they_are_rounded(form: str, numbers: str, made: torch.Generator, tested: Any) -> None:
    for inputs in (*LENGTHS, *(ODD_LENGTHS if form == "bf16" else ())):
        weights = projection(form, 2, 37, inputs, made=made, **NUMBERS[numbers])
        x = spread(inputs, made=made, **NUMBERS[numbers])
        expected = dots_in_c(weights, 1, x)
        for kind in range(tested.experts_best() + 1):
            assert different(dots(tested, kind, weights, 1, x), expected) == 0, (inputs, INSTRUCTIONS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bf16", "mxfp4", "int4", "fp8"])
def test_a_million_rows(form: str, made: torch.Generator, tested: Any) -> None:
    """Of 50 lengths, with 10 inputs each; a sixth of each kind of numbers."""
    count = 0
    for shape in range(50):
        numbers = list(NUMBERS.values())[shape % len(NUMBERS)]
        inputs = 32 * int(torch.randint(1, 40, (1,), generator=made)) + (shape % 3 if form == "bf16" else 0)
        weights = projection(form, 1, 2000, inputs, made=made, **numbers)
        for x in spread(10, inputs, made=made, **numbers):
            expected = dots_in_c(weights, 0, x)
            for kind in range(1, tested.experts_best() + 1):
                assert different(dots(tested, kind, weights, 0, x), expected) == 0, (inputs, INSTRUCTIONS[kind])
            count += len(expected)
    assert count == 1_000_000


@pytest.mark.parametrize("glu", [(), GPT_OSS], ids=["silu", "clamped"])
def test_every_number_is_activated(glu: tuple[float, ...], tested: Any) -> None:
    gate = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    for up in (torch.ones_like(gate), gate.flip(0), gate.roll(12345)):
        assert different(activated(tested, gate, up, glu), activated_in_c(gate, up, glu)) == 0


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("form", FORMATS)
def test_experts(form: str, numbers: str, made: torch.Generator, pools: list[pool.Pool]) -> None:
    """Of 1 to 8 rows; both activations; weights of the router in both types."""
    for tokens in range(1, 9):
        lengths = ((96, 160), (352, 288), (64, 32))[tokens % 3]
        x, ids, weights, *rest = case(form, tokens, made, *lengths, is_oss=tokens % 2 == 0, **NUMBERS[numbers])
        for given in ((x, ids, weights, *rest), (x, ids.int(), weights.float(), *rest)):
            expected = experts_in_c(*given)
            assert [different(pool.run(*given, pool=each), expected) for each in pools] == [0] * len(pools)
            assert tokens > 2 or different(order.run_experts(*given), expected) == 0


def test_weights_are_read_where_they_lie(made: torch.Generator) -> None:
    """A cache's rows, or a part of a larger tensor: other strides, and an odd place."""
    for form in ("bf16", "mxfp4"):
        x, ids, weights, first, second, *rest = case(form, 3, made)
        expected = experts_in_c(x, ids, weights, first, second, *rest)
        moved = []
        for each in (first, second):
            around = each.weight.new_zeros(9, each.weight.shape[1] + 3, each.weight.shape[2] + 5)
            around[2:7, 1:-2, 3:-2] = each.weight
            moved.append(each._replace(weight=around[2:7, 1:-2, 3:-2]))
        assert different(pool.run(x, ids, weights, *moved, *rest), expected) == 0


def test_a_number_that_is_no_expert_is_seen(made: torch.Generator) -> None:
    x, ids, *rest = case("bf16", 3, made)
    ids[1, 2], ids[2, 0] = 5, -1
    assert pool.run(x, ids, *rest).isnan().all(1).tolist() == [False, True, True]
    assert pool.run(x, torch.full_like(ids, 7), *rest).isnan().all()
    assert pool.run(x[:0], ids[:0], rest[0][:0], *rest[1:]).shape == (0, 96)


def test_denormals_are_kept_where_the_caller_has_them_off(made: torch.Generator) -> None:
    given = case("bf16", 8, made, 512, 512, **NUMBERS["special"])
    expected = experts_in_c(*given)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        new = of_library(library(), 2, 0)  # its threads start in the mode
        assert different(pool.run(*given, pool=new), expected) == 0
        assert torch.tensor(1e-39) * 0.5 == 0  # the caller's mode is what it was
    finally:
        torch.set_flush_denormal(False)
        new.stop()


FAULTS = {
    "chunks of 128": ({"CHUNK = 256": "CHUNK = 128"}, ()),
    "another tree": ({"_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d)": "_mm256_hadd_ps(a, c), _mm256_hadd_ps(b, d)"}, ()),
    "lanes of codes": ({"8 * (pair % 2) + 4 * block": "4 * (pair % 2) + 8 * block"}, ()),
    "fused": ({'target("avx2")': 'target("avx2,fma")'}, ("-ffp-contract=fast",)),
    "no infinity": ({"s ? s << 23": "s ? (s < 255 ? s : 127) << 23"}, ()),
    "no NaN of fp8": ({"value = _mm256_or_ps(value, _mm256_castsi256_ps(is_nan));": ""}, ()),
    "weights of fp8 are not rounded": ({"rounded_8(value), _mm": "value, _mm"}, ()),
    "no denormal scale": ({"1 << 22": "0"}, ()),
    "the last step is lost": ({"if (k < end) {": "if (k + 40 < end) {"}, ()),
    "activation": ({"2.12194440e-4f": "2.1e-4f"}, ()),
    "not rounded between": ({"out[n] = rounded(DOTS": "out[n] = (DOTS"}, ()),
    "order of experts": ({"int64_t pair = t * r->top_k; pair < (t + 1) * r->top_k; pair++":
                          "int64_t pair = (t + 1) * r->top_k - 1; pair >= t * r->top_k; pair--"}, ()),
    "a tile is lost": ({"row = tile * TILE": "row = (tile ? tile : 1) * TILE"}, ()),
    "one input of all rows": ({"*pair / r->top_k * p->x_stride": "0 * r->top_k"}, ()),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, tmp_path: Path, made: torch.Generator) -> None:
    changed = variant(tmp_path, *FAULTS[fault])
    if not changed.experts_best():
        pytest.skip("faults are in the kernels of x86")
    few = of_library(changed, 2, 1)
    assert any(differences(changed, few, made))
    few.stop()


def differences(changed: Any, few: pool.Pool, made: torch.Generator) -> Iterator[int]:
    """Numbers of values that a library and its pool compute otherwise than the one that ships."""
    gate = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    yield different(activated(changed, gate, gate, ()), activated_in_c(gate, gate, ()))
    for form in ("bf16", "mxfp4", "int4", "fp8"):
        for numbers in NUMBERS.values():
            given = case(form, 8, made, 1184, 288 + 5 * (form == "bf16"), **numbers)
            yield different(pool.run(*given, pool=few), experts_in_c(*given))
            yield different(dots(changed, 1, given[3], 1, given[0][0]), dots_in_c(given[3], 1, given[0][0]))


class TestChoice:
    def test_a_cpu_runs_them_without_the_interpreter(
        self, made: torch.Generator, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
    ) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr(order, "run_experts", None)
        given = case("mxfp4", 2, made)
        assert different(ordered.run(*given), experts_in_c(*given)) == 0
        assert [each for each in recwarn if each.category is HeadraceWarning] == []

    @pytest.mark.parametrize("build", [qwen, gpt_oss])
    def test_a_model(self, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        model = build().bfloat16()
        model.set_experts_implementation("headrace")
        with compared_with_c() as counts, torch.inference_mode():
            model(IDS)
        assert counts == [0, 0]

    def test_instructions_that_the_processor_lacks_are_not_chosen(self, tmp_path: Path) -> None:
        old = variant(tmp_path, {'__builtin_cpu_supports("avx512f")': "0"})
        assert old.experts_best() < 2
        with pytest.raises(OptionError, match=r"instructions: expected one of .*AVX2.*, found 2"):
            of_library(old, 1, 2)

    def test_refused(self, made: torch.Generator) -> None:
        x, ids, weights, first, second, *rest = case("bf16", 1, made)
        with pytest.raises(OptionError, match=r"in torch.bfloat16, found torch.float32"):
            pool.run(x.float(), ids, weights, first, second, *rest)
        with pytest.raises(OptionError, match=r"found torch.float16"):
            pool.run(x, ids, weights.half(), first, second, *rest)
        for wrong in ((x[:, 1:], first, second), (x, first, first), (x, first, Projection(second.weight[:4]))):
            with pytest.raises(OptionError, match="expected tensors that fit together"):
                pool.run(wrong[0], ids, weights, *wrong[1:], *rest)
