"""The code exp4: every weight comes back with its bits, from any range, on the host and by the kernel."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.coding.exp4 import Piece, decode, encode
from headrace.coding.layout import NUM_EXPONENTS, PIECE_BYTES, coded_bytes, cut_pieces, offsets


def normal(count: int, seed: int = 0, scale: float = 0.02) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=made) * scale).bfloat16().view(torch.uint8)


def decoded(code: torch.Tensor, count: int, patches: int, first: int = 0, number: int | None = None) -> np.ndarray:
    into = np.empty(count if number is None else number, np.uint16)
    decode(code.numpy(), count, patches, first, into)
    return into


def same(weights: torch.Tensor) -> bool:
    """Whether ``weights`` come back; they have to be coded."""
    found = encode(weights)
    assert found is not None
    code, patches = found
    assert len(code) == offsets(len(weights) // 2, patches)[-1] < len(weights)
    return np.array_equal(decoded(code, len(weights) // 2, patches), weights.numpy().view(np.uint16))


@pytest.mark.parametrize("count", [128, 256, 384, 8192, 100_096])
def test_normal_weights_come_back(count: int) -> None:
    assert same(normal(count))


def test_normal_weights_take_three_quarters() -> None:
    found = encode(normal(1 << 20))
    assert found is not None
    assert len(found[0]) < 0.7505 * (2 << 20)


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
    assert same(torch.full((256,), value).bfloat16().view(torch.uint8))


def test_as_many_exponents_as_the_table_has_need_no_patch() -> None:
    bits = (torch.arange(1024) % NUM_EXPONENTS + 100).to(torch.int16) << 7
    found = encode(bits.view(torch.uint8))
    assert found is not None
    assert found[1] == 0
    assert same(bits.view(torch.uint8))


def test_random_bits_are_not_coded() -> None:
    assert encode(torch.randint(0, 256, (1 << 16,), dtype=torch.uint8)) is None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_range_comes_back(data: st.DataObject) -> None:
    count = 128 * data.draw(st.integers(1, 40), "blocks")
    weights = normal(count, data.draw(st.integers(0, 99), "seed"), data.draw(st.sampled_from([1e-30, 0.02, 1e30])))
    bits = weights.view(torch.int16)
    for place in data.draw(st.lists(st.integers(0, count - 1), max_size=count // 64)):
        bits[place] = data.draw(st.integers(-(1 << 15), (1 << 15) - 1))
    if (found := encode(weights)) is None:
        return
    first = data.draw(st.integers(0, count - 1), "first")
    number = data.draw(st.integers(1, count - first), "number")
    expected = weights.numpy().view(np.uint16)[first : first + number]
    assert np.array_equal(decoded(found[0], count, found[1], first, number), expected)


def test_pieces_cover_a_slab() -> None:
    for num_bytes in (256, PIECE_BYTES, PIECE_BYTES + 256, 3 * PIECE_BYTES):
        pieces = list(cut_pieces(num_bytes))
        assert sum(size for _, size in pieces) == num_bytes
        assert all(size % 256 == 0 for _, size in pieces)
        assert coded_bytes(num_bytes) == num_bytes * 3 // 4 + NUM_EXPONENTS * len(pieces)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels need a GPU or Triton's interpreter")
@pytest.mark.parametrize("count", [128, 8192, 70_016])
def test_kernels_write_the_weights_and_nothing_else(count: int) -> None:
    pytest.importorskip("triton")
    from headrace.coding.decode_kernels import decode_on_gpu

    weights = normal(count)
    weights.view(torch.int16)[[0, count // 2, count - 1]] = torch.tensor([0x7FC1, 0x0001, -128], dtype=torch.int16)
    found = encode(weights)
    assert found is not None
    code, patches = found
    slot = torch.full((2 * count + 512,), 0xAB, dtype=torch.uint8)
    decode_on_gpu(Piece(256, 2 * count, patches, code), torch.cat([code, code]), slot)
    assert patches or count == 128
    assert torch.equal(slot[256:-256], weights)
    assert (slot[:256] == 0xAB).all()
    assert (slot[-256:] == 0xAB).all()
