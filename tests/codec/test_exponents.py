"""The code exp3: every weight comes back with its bits, from any range, on the host and by the kernel."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.codec.exponents import Piece, decode, encode
from headrace.codec.layout import WIDTH, coded_bytes, cut_pieces, parts_of


def normal(count: int, seed: int = 0, scale: float = 0.02) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=made) * scale).bfloat16().view(torch.uint8)


def decoded(code: torch.Tensor, count: int, first: int = 0, number: int | None = None) -> np.ndarray:
    into = np.empty(count if number is None else number, np.uint16)
    decode(code.numpy(), count, first, into)
    return into


def same(weights: torch.Tensor) -> bool:
    """Whether ``weights`` come back; they have to be coded."""
    code = encode(weights)
    assert code is not None
    assert len(code) < len(weights)
    return np.array_equal(decoded(code, len(weights) // 2), weights.numpy().view(np.uint16))


@pytest.mark.parametrize("count", [1024, 7040, 8192, 100_096])
def test_normal_weights_come_back(count: int) -> None:
    assert same(normal(count))


def test_normal_weights_take_what_plans_expect() -> None:
    code = encode(normal(1 << 20))
    assert code is not None
    assert len(code) < 0.705 * (2 << 20)
    assert abs(len(code) / coded_bytes(2 << 20) - 1) < 0.002


def test_a_code_that_would_be_longer_is_not_made() -> None:
    """Of a few weights the last block, which is whole, would be longer than the weights."""
    assert encode(normal(128)) is None


SPECIAL = {
    "NaN payloads": range(0x7F81, 0x8000),
    "negative NaN payloads": range(0xFF81, 0x10000),
    "denormals": range(0x0001, 0x0080),
    "infinities and zeros": [0x7F80, 0xFF80, 0x0000, 0x8000],
}


@pytest.mark.parametrize("values", SPECIAL.values(), ids=SPECIAL.keys())
def test_special_values_come_back(values: object) -> None:
    bits = normal(1 << 16).view(torch.int16).clone()
    special = torch.tensor(list(values), dtype=torch.int32).to(torch.int16)  # type: ignore[call-overload]
    places = torch.randperm(len(bits), generator=torch.Generator().manual_seed(1))[: len(special)]
    bits[places] = special
    assert same(bits.view(torch.uint8))


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan"), 3e38])
def test_constant_tensors_come_back(value: float) -> None:
    assert same(torch.full((1024,), value).bfloat16().view(torch.uint8))


@pytest.mark.parametrize("more", [0, 1])
def test_exponents_that_the_table_lacks_are_escapes(more: int) -> None:
    number = (1 << WIDTH) - 1 + more
    weights = (((torch.arange(4096) % number + 100).to(torch.int16)) << 7).view(torch.uint8)
    code = encode(weights)
    assert code is not None
    assert (len(code) > parts_of(4096, 0).end) == bool(more)
    assert same(weights)


def test_random_bits_are_not_coded() -> None:
    assert encode(torch.randint(0, 256, (1 << 16,), dtype=torch.uint8)) is None


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_range_comes_back(data: st.DataObject) -> None:
    count = 128 * data.draw(st.integers(1, 40), "blocks")
    weights = normal(count, data.draw(st.integers(0, 99), "seed"), data.draw(st.sampled_from([1e-30, 0.02, 1e30])))
    bits = weights.view(torch.int16)
    for place in data.draw(st.lists(st.integers(0, count - 1), max_size=count // 64)):
        bits[place] = data.draw(st.integers(-(1 << 15), (1 << 15) - 1))
    if (code := encode(weights)) is None:
        return
    first = data.draw(st.integers(0, count - 1), "first")
    number = data.draw(st.integers(1, count - first), "number")
    expected = weights.numpy().view(np.uint16)[first : first + number]
    assert np.array_equal(decoded(code, count, first, number), expected)


def test_pieces_cover_a_slab() -> None:
    for num_bytes in (256, 4 << 20, (4 << 20) + 256, 36 << 20, (36 << 20) + 256, 100 << 20):
        pieces = list(cut_pieces(num_bytes))
        starts = [start for start, _ in pieces]
        assert starts == [sum(size for _, size in pieces[:number]) for number in range(len(pieces))]
        assert sum(size for _, size in pieces) == num_bytes
        assert all(0 < size <= 32 << 20 and size % 256 == 0 for _, size in pieces)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels need a GPU or Triton's interpreter")
@pytest.mark.parametrize("count", [1024, 8192, 70_016])
def test_the_kernel_writes_the_weights_and_nothing_else(count: int) -> None:
    pytest.importorskip("triton")
    from headrace.codec.decode_kernels import decode_on_gpu

    weights = normal(count)
    weights.view(torch.int16)[[0, count // 2, count - 1]] = torch.tensor([0x7FC1, 0x0001, -128], dtype=torch.int16)
    code = encode(weights)
    assert code is not None
    slot = torch.full((2 * count + 512,), 0xAB, dtype=torch.uint8)
    decode_on_gpu(Piece(256, 2 * count, True, 0, len(code)), torch.cat([code, code]), slot)
    assert torch.equal(slot[256:-256], weights)
    assert (slot[:256] == 0xAB).all()
    assert (slot[-256:] == 0xAB).all()
