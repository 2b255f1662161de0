"""Random tensors through the code exp3: does every bit come back?

A tensor of a random dtype, size and distribution is encoded as its bytes, as a unit's are, and decoded: on the
host, or with ``--device cuda`` by the kernel. Half of the bytes are random bits.

    python benchmarks/code_every_bit.py --tensors 10000 --num-bytes 20e9 --out rows.jsonl
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import harness
from headrace.codec.exponents import Piece, decode, encode

DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8,
    torch.int32, torch.int64,
)  # fmt: skip
_ALIGN_BYTES = 256  # of a unit's slab


def tensors(number: int, num_bytes: float, device: torch.device) -> Iterator[torch.Tensor]:
    """``number`` tensors of ``num_bytes`` in all, as bytes (uint8, 1-D)."""
    made = torch.Generator(device).manual_seed(0)
    sizes = np.random.default_rng(0).lognormal(0, 1.5, number)
    sizes = np.maximum(_ALIGN_BYTES, sizes / sizes.sum() * num_bytes).astype(int) // _ALIGN_BYTES * _ALIGN_BYTES
    for index, size in enumerate(sizes.tolist()):
        dtype = DTYPES[index // 2 % len(DTYPES)]
        if index % 2:
            yield torch.randint(0, 256, (size,), dtype=torch.uint8, device=device, generator=made)
            continue
        scale = 10.0 ** (index % 40 - 20)
        values = torch.randn(size // dtype.itemsize, device=device, generator=made) * scale
        if index % 14 == 0:
            values.fill_(scale)  # constant
        elif index % 14 == 2:
            values[values.abs() < scale] = 0  # sparse
        yield values.to(dtype).view(torch.uint8)


def check(weights: torch.Tensor) -> tuple[bool, int]:
    """Whether ``weights`` come back from their code, and its bytes; they are their own code if there is none."""
    code = encode(weights)
    if code is None:
        return True, weights.numel()
    if weights.is_cuda:
        from headrace.codec.decode_kernels import decode_on_gpu

        again = torch.empty_like(weights)
        decode_on_gpu(Piece(0, weights.numel(), True, 0, code.numel()), code, again)
        return torch.equal(again, weights), code.numel()
    host = np.empty(weights.numel() // 2, np.uint16)
    decode(code.numpy(), len(host), 0, host)
    return np.array_equal(host.view(np.uint8), weights.numpy()), code.numel()


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--num-bytes", type=float, default=20e9)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    args = parser.parse_args()
    on_gpu = args.device.type == "cuda"
    where = f"by the kernel, {torch.cuda.get_device_name(args.device)}" if on_gpu else "on the host"
    found: Counter[str] = Counter()
    for weights in tensors(args.tensors, args.num_bytes, args.device):
        equal, code_bytes = check(weights)
        num_bytes = weights.numel()
        longer, coded = code_bytes > num_bytes, code_bytes < num_bytes
        found.update(
            tensors=1, num_bytes=num_bytes, coded=coded, code_bytes=code_bytes, longer=longer, differ=not equal
        )
    row: dict[str, Any] = {"table": "code-every-bit", "case": f"exp3, {where}", "rows": 1, **found}
    row["bit_equal"] = not found["differ"] and not found["longer"]
    harness.append(row, args.out)
    print(row)
    harness.finish("code-every-bit", [row])


if __name__ == "__main__":
    main()
