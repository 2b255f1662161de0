"""The promise: a resident that was written since its copy has another fingerprint, by torch and by the kernel."""

from __future__ import annotations

import os

import pytest
import torch

from headrace.errors import HeadraceWarning
from headrace.lifetime import host_copies
from headrace.lifetime.host_copies import HostCopies

PART_BYTES = 4 * host_copies._PART
CPU = torch.device("cpu")


def prints(buffer: torch.Tensor) -> torch.Tensor:
    return HostCopies(CPU)._fingerprints({"a": buffer})["a"]


def random_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


SIZES = [1, 3, 4, 4096, PART_BYTES - 4, PART_BYTES, PART_BYTES + 1, PART_BYTES + 4, 3 * PART_BYTES + 18]


@pytest.mark.parametrize("num_bytes", SIZES)
def test_each_byte_counts(num_bytes: int) -> None:
    buffer = random_bytes(num_bytes)
    before = prints(buffer)
    assert len(before) == -(-num_bytes // PART_BYTES)
    for at in {0, 1, num_bytes // 2, num_bytes - 2, num_bytes - 1} & set(range(num_bytes)):
        for bit in (0, 7):
            buffer[at] ^= 1 << bit
            changed = (prints(buffer) != before).nonzero().flatten().tolist()
            assert changed == [at // PART_BYTES]
            buffer[at] ^= 1 << bit
    assert torch.equal(prints(buffer), before)


def test_words_that_change_places_or_signs() -> None:
    words = random_bytes(2 * PART_BYTES).view(torch.int32)
    before = prints(words.view(torch.uint8))
    for other in (words.roll(1), words.roll(host_copies._PART // 2), words.flip(0)):
        assert (prints(other.view(torch.uint8)) != before).all()
    signs = words.clone()
    signs[[5, 9]] ^= -(1 << 31)
    assert prints(signs.view(torch.uint8))[0] != before[0]


def test_at_any_address_in_any_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = random_bytes(5 * PART_BYTES + 22)
    before = prints(buffer)
    for offset in (1, 2, 4):
        shifted = torch.cat([torch.zeros(offset, dtype=torch.uint8), buffer])[offset:]
        assert torch.equal(prints(shifted), before)
    monkeypatch.setattr(host_copies, "_PARTS", 2)
    assert torch.equal(prints(buffer), before)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("num_words", [1, 2048, 2049, 5000, 12_288, 12_289])
def test_the_kernel_has_the_sums_of_torch(num_words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from headrace.lifetime.print_kernels import sums_on_gpu

    monkeypatch.setattr(host_copies, "_PART", 4096)
    buffers = [random_bytes(4 * count) for count in (num_words, 8000, num_words)]
    found = sums_on_gpu([each.view(torch.int32) for each in buffers], host_copies._key(CPU))
    assert torch.equal(found, torch.cat([prints(each) for each in buffers]))


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, and the sums of torch from then on."""
    buffer = random_bytes(4096)
    copies = HostCopies(CPU)
    copies._has_kernel = True

    def refuse(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch.cuda, "device", refuse)
    with pytest.warns(HeadraceWarning, match=r"park\(\) takes some ms more.*C compiler"):
        found = copies._fingerprints({"a": buffer, "b": buffer})
    assert torch.equal(found["b"], prints(buffer))
    assert not copies._has_kernel


def test_what_lies_side_by_side_is_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As residents of a GPU do, with padding between them; elsewhere each has its own."""
    sizes = {"a": 300, "b": 256, "c": 7, "d": 512}
    copies, counted = HostCopies(CPU), list[int]()
    made = {name: torch.randint(256, (size,), dtype=torch.uint8) for name, size in sizes.items()}
    copies.update(made)
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *args, **kw: counted.append(1) or copy(*args, **kw))
    for order, most in (("abcd", 1), ("abdc", 3), ("dcba", 4)):
        padded = [-(-sizes[name] // 256) * 256 for name in order]
        parts = torch.zeros(sum(padded), dtype=torch.uint8).split(padded)
        places = {name: part[: sizes[name]] for name, part in zip(order, parts, strict=True)}
        counted.clear()
        assert copies.fill(places) == sum(sizes.values())
        assert len(counted) == most
        assert all(torch.equal(places[name], made[name]) for name in sizes)
    apart = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    copies.fill(apart)
    assert all(torch.equal(apart[name], made[name]) for name in sizes)
