"""Reads the headers of safetensors files: names, dtypes, shapes and offsets of tensors, never their weights.

The format (https://github.com/huggingface/safetensors#format): 8 bytes, the little-endian length N; N bytes
of UTF-8 JSON, ``{name: {"dtype", "shape", "data_offsets": [begin, end]}}``, perhaps ``__metadata__``; data.
Offsets count from the start of the data, which tensors fill without overlap, hole or remainder: all checked.
"""

from __future__ import annotations

import difflib
import errno
import heapq
import math
import os
import reprlib
import resource
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from headrace.errors import CheckpointError
from headrace.formatting import listed
from headrace.json_files import parse

# Functions that need torch import it. The process that fills a staging ring uses FileFingerprint and the errors of
# files from here, and starts faster without torch.
if TYPE_CHECKING:
    import torch

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_FIRST_READ_BYTES = 128 * 1024  # holds the header of a shard of about 1,000 tensors
_FOREIGN = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
_CONVERT = "Load it with the library that wrote it, then `model.save_pretrained(folder)` writes safetensors."
_REWRITE = "Write the file again with safetensors.torch.save_file, or download it again."
_AGAIN = "Download or copy it again."
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


@dataclass(frozen=True)
class FileFingerprint:
    """A file as it was when opened: size, times in ns since 1970, inode (of a link's target).

    Attributes:
        modified_ns: time in ns of the last write; a writer may set it back (``cp -p``, ``rsync -t``).
        changed_ns: time in ns of the last change of content or attributes, which the kernel alone sets.
    """

    path: Path
    num_bytes: int
    modified_ns: int
    inode: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> FileFingerprint:
        """Fingerprint of the file with this status."""
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)

    def check(self) -> None:
        """Raise CheckpointError if the file on disk is gone or no longer the one that was opened."""
        with opened(self.path) as (_, now):
            if now != self:
                raise _fault(self.path, str(self), str(now), "It changed while in use: open it again.")


class FileTensor(NamedTuple):  # made faster than a dataclass, 46,000 times
    """One tensor in a file: ``num_bytes`` bytes at ``offset`` (in bytes, absolute) of ``path``, row-major."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder or file, by (file, offset); ``root`` is the folder's absolute path."""

    root: Path
    tensors: Mapping[str, FileTensor]
    stamps: tuple[FileFingerprint, ...]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read the headers of a folder, a ``.safetensors`` file or an index ``.json``.

        Of a folder, the first that exists, as for transformers: ``model.safetensors``,
        ``model.safetensors.index.json`` (only tensors it names count), every ``*.safetensors``. Raises CheckpointError
        for files that are missing, unreadable, damaged, of another format or at odds with the index.
        """
        root, files = _find_files(Path(path).absolute())
        named = _index_shards(files[0]) if files[0].suffix == ".json" else None
        headers = [_read_header(file) for file in sorted(named or files)]
        tensors: dict[str, FileTensor] = {}
        for found, stamp in headers:
            kept = found if named is None else _only_named(stamp.path, found, named[stamp.path])
            if both := sorted(tensors.keys() & kept.keys()):
                elsewhere = f"{len(both)} ({listed(both)}) also in {tensors[both[0]].path}"
                fix = f"Remove one of the two files, or add a {_INDEX} that says which one counts."
                raise _fault(stamp.path, "each tensor in one file only", elsewhere, fix)
            tensors.update(kept)
        return cls(root, tensors, tuple(stamp for _, stamp in headers))

    @property
    def num_bytes(self) -> int:
        """Sum of the tensors' bytes, headers not counted."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files, sorted; an index is not among them."""
        return tuple(stamp.path for stamp in self.stamps)

    def __getitem__(self, name: str) -> FileTensor:
        """The tensor of that name; CheckpointError with the nearest names when there is none."""
        if name not in self.tensors:
            raise self.lacks(name, "Use a name from `.tensors`.")
        return self.tensors[name]

    def lacks(self, name: str, fix: str) -> CheckpointError:
        """The error for a missing tensor, with the nearest names."""
        # Shared trigrams first: difflib alone takes seconds on 45,000 names.
        grams = {name[i : i + 3] for i in range(len(name))}
        likely = heapq.nlargest(100, self.tensors, key=lambda other: sum(gram in other for gram in grams))
        nearest = ", ".join(difflib.get_close_matches(name, likely) or likely[:3])
        found = f"{len(self.tensors)} others, the nearest are {nearest}" if self.tensors else "no tensors at all"
        return _fault(self.root, f"a tensor {name!r}", found, fix)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, byte for byte, in new CPU memory; CheckpointError if the file is short or changed."""
        return self.read_range(self[name])

    def read_range(self, tensor: FileTensor) -> torch.Tensor:
        """Bytes of any range of a file, which may begin within a tensor and end in its neighbour."""
        import torch

        result = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        with opened(tensor.path) as (fd, _):
            _fill(fd, result.reshape(-1).view(torch.uint8).numpy().data, tensor.offset, tensor.path)
        # After the read, so that a change during it counts too.
        next(stamp for stamp in self.stamps if stamp.path == tensor.path).check()
        return result


def _fault(path: Path, expected: str, found: str, fix: str = _AGAIN) -> CheckpointError:
    """The error for a file that is not as expected; ``fix`` says what to do."""
    message = f"{path}: expected {expected}; found {found}. {fix}"
    return CheckpointError(message.encode(errors="backslashreplace").decode())  # JSON may hold half a character


def require_file(path: Path) -> None:
    """Raise CheckpointError for anything but a file or a folder."""
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:
        raise _fault(path, "a path", str(error), "Correct it.") from error
    if kind := _KINDS.get(stat.S_IFMT(mode)):
        raise _fault(path, "a regular file", kind, "Write the weights to a file, or link to one.")


def too_many_open(error: OSError) -> str:
    """The fix for an error that the limit of open files caused; empty for other errors."""
    if error.errno != errno.EMFILE:
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"Raise the limit of open files (ulimit -n), which is {limit}, or save the weights in fewer shards."


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """Every OSError of the block becomes a CheckpointError."""
    try:
        yield
    except OSError as error:
        fix = too_many_open(error) or "Check the path, its permissions (`chmod u+rX` as the owner) and the disk."
        raise _fault(path, f"files that user {os.geteuid()} can read", str(error.strerror), fix) from error


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, FileFingerprint]]:
    """A file descriptor and the fingerprint of its file. Every OSError becomes a CheckpointError."""
    with _faults_of(path):
        require_file(path)  # before open(), which blocks on a pipe until another process writes to it
        with open(path, "rb", buffering=0) as file:  # no bare descriptor, which an interrupt could leave open
            yield file.fileno(), FileFingerprint.of(path, os.fstat(file.fileno()))


def _fill(fd: int, target: memoryview | bytearray, offset: int, path: Path) -> None:
    """Read ``len(target)`` bytes at ``offset``."""
    view, done = memoryview(target), 0
    while done < len(view):  # one call of Linux reads 2 GiB at most
        if not (count := os.preadv(fd, [view[done:]], offset + done)):
            raise _fault(path, f"{len(view)} bytes at byte {offset}", f"{done} and the end of the file")
        done += count


def _read(fd: int, offset: int, num_bytes: int, path: Path) -> bytes:
    raw = bytearray(num_bytes)
    _fill(fd, raw, offset, path)
    return bytes(raw)


def _find_files(start: Path) -> tuple[Path, list[Path]]:
    """Folder, and its index or its safetensors files. Hidden files (macOS leaves ``._*``) do not count."""
    with _faults_of(start):
        require_file(start)
        names = sorted(os.listdir(start)) if start.is_dir() else [start.name]
    foreign = [name for name in names if name.endswith(_FOREIGN)]
    if not start.is_dir() and not foreign:
        return start.parent, [start]
    every = [name for name in names if name.endswith(".safetensors") and name[0] != "."]
    if chosen := [name for name in ("model.safetensors", _INDEX) if name in names][:1] or every:
        return start, [start / name for name in chosen]
    if foreign:
        raise _fault(start, "safetensors files", f"{listed(foreign)} of another format", _CONVERT)
    found = f"{len(names)} ({listed(names)})" if names else "an empty folder"
    raise _fault(start, "safetensors files", found, "Give the folder of the weights.")


def _index_shards(index: Path) -> dict[Path, set[str]]:
    """Shard -> names of the tensors that the index's ``weight_map`` (``{name: file}``) places in it."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise _fault(index, 'an index with "weight_map": {tensor: file}', reprlib.repr(files))
    names_in: defaultdict[str, set[str]] = defaultdict(set)
    for name, file in files.items():
        names_in[file].add(name)
    shards: defaultdict[Path, set[str]] = defaultdict(set)
    for file, names in names_in.items():  # several spellings may lead to one file
        # Judged by its text: in a Hugging Face cache every shard is a link that leads out.
        pure = PurePosixPath(file)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise _fault(index, "shards inside its folder", repr(file), "Do not use it, or correct its weight_map.")
        shards[index.parent / pure] |= names
    if missing := [str(shard) for shard in sorted(shards) if not os.path.exists(shard)]:
        found = f"{len(shards) - len(missing)}, missing: {len(missing)} ({listed(missing)})"
        raise _fault(index, f"{len(shards)} shards in its folder", found, "Download or copy what is missing.")
    return shards


def _only_named(shard: Path, found: Mapping[str, FileTensor], names: set[str]) -> dict[str, FileTensor]:
    if absent := sorted(names - found.keys()):
        have = f"{len(names) - len(absent)} of them, missing: {len(absent)} ({listed(absent)})"
        fix = "One of the two is of another checkpoint: download or copy both again."
        raise _fault(shard, f"all {len(names)} tensors that the index places here", have, fix)
    return {name: tensor for name, tensor in found.items() if name in names}


def raw_header(path: Path) -> tuple[bytes, FileFingerprint]:
    """The bytes of one file before its data, and which file that was; CheckpointError if it has no such header."""
    with opened(path) as (fd, stamp):
        raw = _read(fd, 0, min(stamp.num_bytes, _FIRST_READ_BYTES), path)
        length, found = int.from_bytes(raw[:8], "little"), f"a file of {stamp.num_bytes} bytes"
        if raw.startswith(b"version https://git-lfs"):
            raise _fault(path, "a safetensors file", "a Git LFS pointer to one", "Fetch it: `git lfs pull`.")
        if stamp.num_bytes < 8:
            raise _fault(path, "at least the 8 bytes of the header length", found)
        if length > _MAX_HEADER_BYTES:
            raise _fault(path, f"a header of at most {_MAX_HEADER_BYTES} bytes", f"a length of {length}")
        if 8 + length > stamp.num_bytes:
            raise _fault(path, f"8 + {length} bytes of length and header", f"{found}, it is truncated")
        return (raw + _read(fd, len(raw), max(0, 8 + length - len(raw)), path))[: 8 + length], stamp


def _read_header(path: Path) -> tuple[dict[str, FileTensor], FileFingerprint]:
    """The tensors of one file by offset, every rule of the format checked."""
    # Not by the safetensors library: it does not give a tensor's offset in its file, and stores read or map the
    # unmodified files at these offsets.
    raw, stamp = raw_header(path)
    header = _parse_object(path, raw[8:])
    tensors = [_tensor(path, name, entry, len(raw)) for name, entry in header.items() if name != "__metadata__"]
    # By size as well: an empty tensor begins where the next one does, and must come before it.
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes, tensor.name))
    end = len(raw)
    for tensor in tensors:
        if tensor.offset != end:
            found = f"{'an overlap' if tensor.offset < end else 'a hole'}: it begins at byte {tensor.offset - len(raw)}"
            raise _fault(path, f"{tensor.name!r} at data byte {end - len(raw)}", found, _REWRITE)
        end += tensor.num_bytes
    if end != stamp.num_bytes:
        kind = "it is truncated" if stamp.num_bytes < end else "it has trailing bytes"
        raise _fault(path, f"a file of {end} bytes", f"{stamp.num_bytes} bytes, {kind}")
    return {tensor.name: tensor for tensor in tensors}, stamp


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model's folder; CheckpointError if there is none, or a key twice in it."""
    with opened(path) as (fd, stamp):
        return _parse_object(path, _read(fd, 0, stamp.num_bytes, path))


def _parse_object(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        parsed = parse(raw)
    except ValueError as error:
        raise _fault(path, "UTF-8 JSON", str(error)) from error
    if not isinstance(parsed, dict):
        raise _fault(path, "a JSON object", reprlib.repr(parsed))
    return parsed


@cache
def _dtypes() -> dict[str, torch.dtype]:
    """Dtypes by the format's codes."""
    import torch

    # Without the sub-byte F6, of which torch has no dtype; of F4 it has one for two elements.
    return {
        "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
        "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
        "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2": torch.float8_e5m2,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu, "F4": torch.float4_e2m1fn_x2,
    }  # fmt: skip


def _tensor(path: Path, name: str, entry: object, data_start: int) -> FileTensor:
    dtypes = _dtypes()
    if isinstance(entry, dict):
        code, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if isinstance(code, str) and _are_counts(shape) and _are_counts(offsets) and len(offsets) == 2:
            begin, end = offsets
            is_packed = code == "F4" and shape and shape[-1] % 2 == 0  # the file counts elements, a byte holds two
            if code not in dtypes or (code == "F4" and not is_packed):
                kind = "sub-byte" if code.startswith(("F4", "F6")) else "unknown"
                expected = f"{name!r} of a supported dtype ({', '.join(dtypes)})"
                raise _fault(path, expected, f"the {kind} {code!r}", "Save it as one of these; packed bytes as U8.")
            shape = [*shape[:-1], shape[-1] // 2] if is_packed else shape
            num_bytes = math.prod(shape) * dtypes[code].itemsize
            if not num_bytes and math.prod(size or 1 for size in shape) >= 1 << 63:
                raise _fault(path, f"{name!r} of a shape that torch can have", str(shape), _REWRITE)
            if end - begin != num_bytes:
                expected = f"{name!r} of {num_bytes} bytes ({code}, shape {shape})"
                raise _fault(path, expected, f"{end - begin} bytes, data_offsets [{begin}, {end}]", _REWRITE)
            return FileTensor(name, dtypes[code], tuple(shape), path, data_start + begin, end - begin)
    expected = f"{name!r} as {{dtype: text, shape: [sizes >= 0], data_offsets: [begin >= 0, end >= 0]}}"
    raise _fault(path, expected, reprlib.repr(entry), _REWRITE)


def _are_counts(numbers: object) -> TypeGuard[list[int]]:
    # Not isinstance(), for which the `true` of JSON is an int.
    return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)
