"""The promise: experts that run in the order of sums have its bits, in Triton's interpreter, in torch and in C.

Lengths are no multiples of lanes or chunks, exponents are spread, and some numbers are denormal, infinite or none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.errors import OptionError, StateError
from headrace.experts import order, ordered
from headrace.experts.order import Projection
from headrace.experts.ordered import Launch
from ordered_c import FORMATS, GPT_OSS, activated_in_c, different, dots_in_c, experts_in_c, projection, spread
from ordered_dots import dots_by_kernel

# numpy speaks of infinities.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

NUMBERS = {"narrow": {}, "wide": {"wide": 4.0}, "special": {"wide": 1.0, "special": 0.02}}


def every_form_and(quick: set[tuple[str, str]]) -> pytest.MarkDecorator:
    """Each form with each kind of numbers, of which the quick suite has the pairs in ``quick``."""
    return pytest.mark.parametrize(("form", "numbers"), [
        pytest.param(form, NUMBERS[kind], id=f"{form}-{kind}", marks=[] if (form, kind) in quick else pytest.mark.slow)
        for form in FORMATS for kind in NUMBERS
    ])  # fmt: skip


@pytest.fixture
def made() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.slow
@every_form_and({("bf16", "wide"), ("transposed", "special"), ("mxfp4", "special")})
def test_dots(form: str, numbers: dict[str, float], made: torch.Generator) -> None:
    """Of one chunk and a part, of several groups of chunks, and of less than the lanes."""
    for inputs in (288, 1184, 32):
        weights = projection(form, 2, 50, inputs, made=made, **numbers)
        x = spread(2, inputs, made=made, **numbers)
        found, expected = dots_by_kernel(weights, 1, x), torch.stack([dots_in_c(weights, 1, row) for row in x])
        assert different(found, expected) == 0
        assert different(torch.stack([order.dot(weights.values(1), row.float()) for row in x]), expected) == 0


@pytest.mark.parametrize("inputs", [7, 301])
def test_an_odd_number_of_inputs(inputs: int, made: torch.Generator) -> None:
    weights, x = projection("bf16", 2, 9, inputs, made=made), spread(1, inputs, made=made)
    assert different(dots_by_kernel(weights, 1, x)[0], dots_in_c(weights, 1, x[0])) == 0


def test_another_order_has_other_bits(made: torch.Generator) -> None:
    """Faults: two lanes that are no neighbours change places; another chunk; other lanes."""
    weights, x = projection("bf16", 1, 200, 1216, made=made), spread(1, 1216, made=made)
    found = dots_by_kernel(weights, 0, x)[0]
    place = torch.arange(1216)
    swapped = place.view(-1, 64)[:, [0, 62, *range(2, 62), 1, 63]].reshape(-1)
    others = [
        dots_in_c(Projection(weights.weight[..., swapped].contiguous()), 0, x[0, swapped]),
        dots_in_c(weights, 0, x[0], chunk=512),
        dots_in_c(weights, 0, x[0], lanes=32),
        weights.weight[0].float() @ x[0].float(),
    ]
    assert [different(found, other) > 20 for other in others] == [True] * 4, [different(found, o) for o in others]


@pytest.mark.slow
@pytest.mark.parametrize("launch", [Launch(2, 1, 1), Launch(16, 4, 2), Launch(8, 16, 4)])
def test_a_division_of_work_changes_no_bit(
    launch: Launch, made: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered, "LAUNCHES", dict.fromkeys(ordered.LAUNCHES, (launch, launch)))
    for form in FORMATS:
        weights, x = projection(form, 1, 3, 608, made=made), spread(1, 608, made=made)
        assert different(dots_by_kernel(weights, 0, x)[0], dots_in_c(weights, 0, x[0])) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("lanes", "chunk"), [(32, 256), (128, 1024), (64, 128)])
def test_other_constants(lanes: int, chunk: int, made: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and the reference in C take them as parameters, so that others can be measured."""
    monkeypatch.setattr(order, "LANES", lanes)
    monkeypatch.setattr(order, "CHUNK", chunk)
    for form in FORMATS:
        weights, x = projection(form, 1, 20, 1184, made=made), spread(1, 1184, made=made)
        assert different(dots_by_kernel(weights, 0, x)[0], dots_in_c(weights, 0, x[0], lanes, chunk)) == 0


@pytest.mark.parametrize("glu", [(), GPT_OSS], ids=["silu", "clamped"])
def test_every_number_is_activated(glu: tuple[float, ...]) -> None:
    """Each of the 65,536 numbers of bf16, in torch and in C; and torch's own SiLU, but for two results near 1e-37."""
    gate = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    for up in (torch.ones_like(gate), gate.flip(0), gate.roll(12345)):
        assert different(order.activated(gate, up, glu), activated_in_c(gate, up, glu)) == 0
    if not glu:
        found = order.activated(gate, torch.ones_like(gate), ())
        assert different(found, torch.nn.functional.silu(gate)) == 2


def case(form: str, tokens: int, made: torch.Generator, **numbers: float) -> tuple[Any, ...]:
    """Experts of 96 numbers in and out and 160 within, of which each token uses three, some of them twice."""
    oss = form != "bf16"
    first = projection(form, 5, 320, 96, bias=oss, made=made, **numbers)
    second = projection(form, 5, 96, 160, bias=oss, made=made, **numbers)
    ids, weights = torch.randint(0, 5, (tokens, 3), generator=made), torch.rand(tokens, 3, generator=made)
    return spread(tokens, 96, made=made, **numbers), ids, weights.bfloat16(), first, second, oss, GPT_OSS if oss else ()


@pytest.mark.slow
@every_form_and({("bf16", "special"), ("transposed", "wide"), ("mxfp4", "wide"), ("mxfp4", "narrow")})
def test_experts(form: str, numbers: dict[str, float], made: torch.Generator) -> None:
    given = case(form, 1 + (form == "bf16"), made, **numbers)
    expected = experts_in_c(*given)
    assert different(ordered.run(*given), expected) == 0
    assert different(order.run_experts(*given), expected) == 0
    assert not numbers.get("special") or expected.isnan().any()
    assert numbers.get("special") or expected.isfinite().all()
    x, ids, weights, *rest = given
    given = (x, ids, weights.float(), *rest)  # which transformers multiplies in float32
    assert different(order.run_experts(*given), experts_in_c(*given)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_more_experts(form: str, made: torch.Generator) -> None:
    for tokens in (1, 3, 8):
        x, ids, weights, *rest = case(form, tokens, made, wide=tokens / 4)
        assert different(ordered.run(x, ids, weights, *rest), experts_in_c(x, ids, weights, *rest)) == 0
        given = (x, ids, weights.float(), *rest)
        assert different(ordered.run(*given), experts_in_c(*given)) == 0


@pytest.mark.slow
def test_a_token_has_its_bits_beside_any_others(made: torch.Generator) -> None:
    """And wherever an expert lies: in another order, and twice."""
    x, ids, weights, first, second, *rest = case("bf16", 3, made)
    together = ordered.run(x, ids, weights, first, second, *rest)
    places = torch.tensor([3, 0, 4, 1, 2, 0, 3])
    moved = [each._replace(weight=each.weight[places]) for each in (first, second)]
    rows = torch.tensor([5, 3, 4, 6, 2])[ids]
    assert different(ordered.run(x[2:3], rows[2:3], weights[2:3], *moved, *rest)[0], together[2]) == 0


@pytest.mark.slow
def test_a_number_that_is_no_expert_is_seen(made: torch.Generator) -> None:
    x, ids, *rest = case("bf16", 3, made)
    ids[1, 2], ids[2, 0] = 5, -1
    given = (x, ids, *rest)
    for found in (ordered.run(*given), order.run_experts(*given), experts_in_c(*given)):
        assert found.isnan().all(1).tolist() == [False, True, True]


@pytest.mark.slow
def test_mxfp4_has_the_bits_of_its_values_in_bf16(made: torch.Generator) -> None:
    x, ids, weights, first, second, *rest = case("mxfp4", 1, made)
    plain = [Projection(order.mxfp4_values(*each[:2]).bfloat16(), None, each.bias) for each in (first, second)]
    assert (
        different(ordered.run(x, ids, weights, first, second, *rest), ordered.run(x, ids, weights, *plain, *rest)) == 0
    )


@pytest.mark.parametrize("by", ["kernel", "threads"])
@every_form_and({(form, kind) for form in FORMATS for kind in NUMBERS})
def test_unpacked_weights(
    form: str, numbers: dict[str, float], by: str, made: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many rows are multiplied: words at the end of a program's, and experts that lie anywhere."""
    if by == "threads":
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    weights, out = projection(form, 3, 130, 288, made=made, **numbers), torch.empty(130, 288, dtype=torch.bfloat16)
    for expert in (0, 2):
        assert different(ordered.unpack(weights, expert, out.fill_(7)), weights.values(expert).bfloat16()) == 0
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match="expected one from 0 to 2"):
            ordered.unpack(weights, wrong, out)
    if form == "int4":  # where they lie apart
        apart = torch.empty(3, 130, weights.scales.shape[2], 2, dtype=torch.bfloat16)[..., 0]  # type: ignore[union-attr]
        apart.copy_(weights.scales)  # type: ignore[arg-type]
        apart = weights._replace(scales=apart)
        assert different(ordered.unpack(apart, 1, out.fill_(7)), weights.values(1).bfloat16()) == 0


@pytest.mark.parametrize("by", ["kernel", "threads"])
@pytest.mark.parametrize("group", [8, 16, 48])
def test_groups_that_no_kernel_reads(group: int, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "threads":
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    codes, scales = torch.zeros(2, 64, 12, dtype=torch.int32), torch.ones(2, 64, 96 // group, dtype=torch.bfloat16)
    with pytest.raises(OptionError, match="each of a whole number of outputs and of 32 inputs, found"):
        ordered.unpack(Projection(codes, scales), 1, torch.empty(64, 96, dtype=torch.bfloat16))


def test_refused(made: torch.Generator) -> None:
    x, ids, weights, *rest = case("bf16", 1, made)
    with pytest.raises(OptionError, match=r"in torch.bfloat16, found torch.float32"):
        ordered.run(x.float(), ids, weights, *rest)
    with pytest.raises(OptionError, match=r"found torch.float16"):
        ordered.run(x, ids, weights.half(), *rest)
    with pytest.raises(StateError, match=r"call model.set_experts_implementation"):
        ordered.run(x.requires_grad_(), ids, weights, *rest).sum().backward()
