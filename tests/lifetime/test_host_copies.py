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
    buffer = random_bytes(4 * num_words)
    assert torch.equal(sums_on_gpu(buffer.view(torch.int32), host_copies._key(CPU)), prints(buffer))


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
