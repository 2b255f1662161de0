"""Tensors that are not there: shape, dtype and the stretches of files that hold their bytes in row-major order.

transformers fuses, splits and rearranges weights while it loads. Its own conversion code runs on these instead of on
data: stacking, concatenating, cutting and reshaping stretches gives stretches again, so the result can be read from the
unmodified files into place, and any other operation shows itself by failing. That way nothing here knows the names of
conversions, which change from release to release.

Rejected: running the conversion on tensors of running numbers and looking where they end up. It needs eight bytes per
element, that is, several times the memory of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from penstock.checkpoint.safetensors_header import FileTensor
from penstock.checkpoint.weight_map import FilePart, TensorSource

__all__ = ["NotStretchesError", "Stretches"]

# More and smaller pieces than this are no longer a stream: each costs a system call and some Python.
_FEW_STRETCHES = 64
_WORTH_A_READ_BYTES = 64 * 2**10


class NotStretchesError(Exception):
    """The operation does more than stack, concatenate and cut; internal, never seen by users."""


class Stretches:
    """Stands in for a tensor in ``torch.stack``, ``cat``, ``chunk``, ``split`` and ``.contiguous()``."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, stretches: Iterable[FileTensor]) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.stretches = list(stretches)

    @classmethod
    def of(cls, tensor: FileTensor) -> Stretches:
        """All of one tensor of a file."""
        return cls(tensor.shape, tensor.dtype, [tensor])

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(function)
        if handler is None:
            raise NotStretchesError(getattr(function, "__name__", str(function)))
        return handler(*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int) -> int:
        """Length of one dimension."""
        return self.shape[dim]

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def contiguous(self) -> Stretches:
        """Itself: stretches are in row-major order."""
        return self

    def reshape(self, *shape: Any) -> Stretches:
        """The same stretches in another shape, at most one length -1, as ``torch.Tensor.reshape`` has it."""
        lengths = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        known = math.prod(length for length in lengths if length != -1)
        if lengths.count(-1) == 1 and known:
            lengths[lengths.index(-1)] = self.numel() // known
        if math.prod(lengths) != self.numel() or -1 in lengths:
            raise NotStretchesError(f"reshape of {list(self.shape)} to {list(shape)}")
        return Stretches(lengths, self.dtype, self.stretches)

    view = reshape

    def squeeze(self, dim: int) -> Stretches:
        """Without a dimension of length one."""
        dim = range(self.ndim)[dim]
        return self if self.shape[dim] != 1 else Stretches(_without(self.shape, dim), self.dtype, self.stretches)

    def to_source(self) -> TensorSource:
        """Where the bytes are, neighbours joined.

        Raises:
            NotStretchesError: in too many small pieces to be read in time.
        """
        joined = _join(self.stretches)
        num_bytes = sum(stretch.num_bytes for stretch in joined)
        if len(joined) > max(_FEW_STRETCHES, num_bytes // _WORTH_A_READ_BYTES):
            raise NotStretchesError(f"{len(joined)} pieces of {num_bytes // len(joined)} bytes")
        parts, offset = [], 0
        for stretch in joined:
            parts.append(FilePart(stretch, offset))
            offset += stretch.num_bytes
        return TensorSource(tuple(parts), tuple(self.shape), self.dtype)


def _cat(tensors: Sequence[Stretches], dim: int = 0) -> Stretches:
    first = tensors[0]
    dim = range(len(first.shape))[dim]
    for tensor in tensors[1:]:
        if _without(tensor.shape, dim) != _without(first.shape, dim) or tensor.dtype != first.dtype:
            raise NotStretchesError(f"cat of {list(first.shape)} and {list(tensor.shape)}")
    shape = [*first.shape[:dim], sum(tensor.shape[dim] for tensor in tensors), *first.shape[dim + 1 :]]
    if dim == 0:
        return Stretches(shape, first.dtype, [stretch for tensor in tensors for stretch in tensor.stretches])
    num_rows = math.prod(first.shape[:dim])
    rows = [_cut(tensor.stretches, [_num_bytes(tensor) // num_rows] * num_rows) for tensor in tensors]
    return Stretches(shape, first.dtype, [piece for row in zip(*rows, strict=True) for part in row for piece in part])


def _stack(tensors: Sequence[Stretches], dim: int = 0) -> Stretches:
    dim = range(len(tensors[0].shape) + 1)[dim]
    if dim == 0 and len({(tensor.shape, tensor.dtype) for tensor in tensors}) == 1:  # experts, by the hundred
        every = [stretch for tensor in tensors for stretch in tensor.stretches]
        return Stretches([len(tensors), *tensors[0].shape], tensors[0].dtype, every)
    return _cat([Stretches([*t.shape[:dim], 1, *t.shape[dim:]], t.dtype, t.stretches) for t in tensors], dim)


def _split(tensor: Stretches, sizes: int | Sequence[int], dim: int = 0) -> tuple[Stretches, ...]:
    dim = range(len(tensor.shape))[dim]
    length = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    num_rows = math.prod(tensor.shape[:dim])
    unit = _num_bytes(tensor) // (num_rows * length)
    pieces = _cut(tensor.stretches, [size * unit for _ in range(num_rows) for size in sizes])
    return tuple(
        Stretches(
            [*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]],
            tensor.dtype,
            [stretch for piece in pieces[index :: len(sizes)] for stretch in piece],
        )
        for index, size in enumerate(sizes)
    )


def _chunk(tensor: Stretches, chunks: int, dim: int = 0) -> tuple[Stretches, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.split: _split,
    torch.chunk: _chunk,
}


def _num_bytes(tensor: Stretches) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _cut(stretches: Sequence[FileTensor], sizes: Iterable[int]) -> list[list[FileTensor]]:
    """Cut the run of ``stretches`` into consecutive pieces of these sizes, in bytes."""
    sizes = list(sizes)
    if sizes == [stretch.num_bytes for stretch in stretches]:
        return [[stretch] for stretch in stretches]
    left = list(reversed(stretches))
    pieces: list[list[FileTensor]] = []
    for size in sizes:
        piece: list[FileTensor] = []
        while size:
            stretch = left.pop()
            if stretch.num_bytes > size:
                left.append(_part(stretch, size, stretch.num_bytes - size))
                stretch = _part(stretch, 0, size)
            piece.append(stretch)
            size -= stretch.num_bytes
        pieces.append(piece)
    return pieces


def _join(stretches: Iterable[FileTensor]) -> list[FileTensor]:
    """Runs of neighbours in a file as one stretch each."""
    runs: list[tuple[FileTensor, int]] = []  # the first, and the bytes of the run
    for stretch in stretches:
        if runs and _is_next(*runs[-1], stretch):
            first, num_bytes = runs[-1]
            runs[-1] = first, num_bytes + stretch.num_bytes
        else:
            runs.append((stretch, stretch.num_bytes))
    return [first if first.num_bytes == num_bytes else _part(first, 0, num_bytes) for first, num_bytes in runs]


def _is_next(first: FileTensor, num_bytes: int, stretch: FileTensor) -> bool:
    return first.offset + num_bytes == stretch.offset and first.path == stretch.path


def _part(stretch: FileTensor, start: int, num_bytes: int) -> FileTensor:
    shape = (num_bytes // stretch.dtype.itemsize,)
    return FileTensor(stretch.name, stretch.dtype, shape, stretch.path, stretch.offset + start, num_bytes)
