"""What was read of a model's folder, kept so that planning it again needs neither torch nor transformers.

One file per folder, beside the kept probe of the machine. It counts only while everything that the reading depended on
is the same (:func:`_state`): config.json, headers, sizes and times of the files, the code of the model's classes and
ours, the versions of all installed packages. Anything else, a damaged file too, is as if nothing were kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headrace.checkpoint.safetensors_header import Checkpoint, FileFingerprint, FileTensor, raw_header
from headrace.checkpoint.weight_map import FilePart, TensorSource, WeightMap
from headrace.environment import cache_disabled, cache_folder, read_kept, replace_file
from headrace.errors import CheckpointError
from headrace.model.records import Inventory, Location, ModelProfile, Place, StorageInfo, TensorInfo

if TYPE_CHECKING:
    import torch

__all__ = ["ElementType", "FolderFacts", "folder_facts"]

# Raise it with any change of what is written.
_SCHEMA = 4
_MOST_FILES = 64  # those used last; a model of 46,000 tensors takes 4 MB
_MOST_BYTES = 1 << 28
_OURS = Path(__file__).parents[1]


@dataclass(frozen=True)
class FolderFacts:
    """What planning needs of a model in a folder.

    Attributes:
        inventory: of the model as its files hold it.
        profile: of the model beyond names and sizes.
        weights: where the files hold its tensors.
        differences: between the files and the model, for warnings.
    """

    inventory: Inventory
    profile: ModelProfile
    weights: WeightMap
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class ElementType:
    """Stands in kept records for the ``torch.dtype`` of that name; ``itemsize`` in bytes."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


def folder_facts(folder: Path, read: Callable[[], tuple[FolderFacts, Iterable[str]]], options: str = "") -> FolderFacts:
    """What is kept of ``folder`` if it still holds, or else what ``read`` returns, which is then kept.

    Args:
        read: returns the facts, and the files with the code that they came from. What it raises passes.
        options: what it depends on besides the folder; for other options something else is kept.
    """
    place = _place(folder, options)
    kept = None if place is None else _load(place, folder)
    if kept is not None:
        return kept
    with suppress(OSError):  # a folder that cannot be listed: read() says so
        before = _listing(folder)
    facts, code = read()
    if place is not None:
        with suppress(OSError, CheckpointError):  # as if nothing were kept, too
            if before == _listing(folder):
                _save(place, folder, facts, sorted(set(code)))
    return facts


def _load(place: Path, folder: Path) -> FolderFacts | None:
    with suppress(Exception):  # of an entry that is damaged nothing is used: wrong records lead to errors of any type
        head, _, body = read_kept(place, _MOST_BYTES).partition(b"\n")
        key = json.loads(head)
        state, stamps = _state(folder, [folder / file for file in key["files"]], key["code"])
        if (key["state"], key["body"]) == (state, _digest(body)):
            os.utime(place)  # of many files those that were not used for longest go first
            return _decode(json.loads(body), folder.absolute(), stamps)
    return None


def _save(place: Path, folder: Path, facts: FolderFacts, code: Sequence[str]) -> None:
    checkpoint = facts.weights.checkpoint
    state, stamps = _state(folder, checkpoint.files, code)
    if tuple(stamps) != checkpoint.stamps:
        return  # a file changed since it was read
    body = json.dumps(_encode(facts), separators=(",", ":"))
    names = [os.path.relpath(file, checkpoint.root) for file in checkpoint.files]
    key = {"state": state, "body": _digest(body.encode()), "files": names, "code": code}
    replace_file(place, f"{json.dumps(key)}\n{body}")
    ours = place.parent.glob(f"{'[0-9a-f]' * 32}.json")  # the folder may be a link to one of other files
    by_use = sorted(ours, key=lambda file: file.stat().st_mtime_ns)
    for oldest in by_use[:-_MOST_FILES]:
        oldest.unlink(missing_ok=True)


def _place(folder: Path, options: str) -> Path | None:
    cache = None if cache_disabled() else cache_folder()
    name = _digest(os.fsencode(folder.absolute()) + b"\n" + options.encode())[:32]
    return None if cache is None else cache / "folders" / f"{name}.json"


# -- what the reading depends on ---------------------------------------------------------------------------------------


def _state(folder: Path, files: Iterable[Path], code: Iterable[str]) -> tuple[str, list[FileFingerprint]]:
    """A digest of everything that reading ``folder`` depends on, and the fingerprints of its safetensors ``files``."""
    # A program may have set another default; then it has imported torch.
    default = str(sys.modules["torch"].get_default_dtype()) if "torch" in sys.modules else "torch.float32"
    classes = _stamps([*_OURS.rglob("*.py"), *map(Path, code)])
    facts: list[object] = [_SCHEMA, sys.version, default, _packages(), classes, _listing(folder)]
    stamps = []
    for file in files:
        raw, stamp = raw_header(file.absolute())
        stamps.append(stamp)
        facts.append((_digest(raw), *astuple(stamp)))
    return _digest(json.dumps(facts, default=str).encode()), stamps


def _listing(folder: Path) -> list[object]:
    """The files of ``folder`` that say what it holds; others, such as a plan that is saved there, change nothing."""
    names = sorted(os.listdir(folder))
    texts = [name for name in names if name.startswith(("config", "model")) and name.endswith(".json")]
    return [
        # Reading a named pipe would wait for a writer.
        *((name, _digest((folder / name).read_bytes())) for name in texts if (folder / name).is_file()),
        *_stamps(folder / name for name in names if name.endswith(".safetensors")),
    ]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _packages() -> list[str]:
    """Names and versions of all installed packages, from the names of their folders of metadata."""
    found: set[str] = set()
    for folder in sys.path:
        with suppress(OSError):
            found.update(name for name in os.listdir(folder or ".") if name.endswith((".dist-info", ".egg-info")))
    return sorted(found)


def _stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    status = ((str(file), file.stat()) for file in files)
    return sorted((name, found.st_size, found.st_mtime_ns) for name, found in status)


# -- records as JSON ---------------------------------------------------------------------------------------------------


def _encode(facts: FolderFacts) -> dict[str, Any]:
    inventory, sources = facts.inventory, facts.weights.sources
    parts = [part.tensor for source in sources.values() for part in source.parts]
    dtypes = {str(tensor.dtype): tensor.dtype.itemsize for s in inventory.storages for tensor in s.tensors}
    in_files = [*(source.dtype for source in sources.values()), *(part.dtype for part in parts)]
    dtypes |= {str(dtype): dtype.itemsize for dtype in in_files}
    shapes = {shape: index for index, shape in enumerate(dict.fromkeys(part.shape for part in parts))}
    files = {file: index for index, file in enumerate(facts.weights.checkpoint.files)}
    return {
        "storages": [
            [list(map(_encode_tensor, storage.tensors)), storage.num_bytes, storage.is_lookup, storage.is_saved]
            for storage in inventory.storages
        ],
        "empty": inventory.empty,
        "modules": inventory.modules,
        "lookups": sorted(inventory.lookups),
        "containers": sorted(inventory.containers),
        "shared": [astuple(place) for place in inventory.shared],
        "profile": asdict(facts.profile),
        "differences": facts.differences,
        "dtypes": dtypes,
        "sources": {
            # Parts of one source have one dtype; where that is not the model's they are converted.
            name: [len(each.parts), each.shape, str(each.dtype), str(each.parts[0].tensor.dtype)]
            for name, each in sources.items()
        },
        "shapes": list(shapes),
        "parts": [
            [part.name for part in parts],
            [shapes[part.shape] for part in parts],
            [files[part.path] for part in parts],
            [part.offset for part in parts],
            [part.num_bytes for part in parts],
        ],
    }


def _encode_tensor(tensor: TensorInfo) -> list[Any]:
    places = [[place.module, place.attr, place.kind, place.inner] for place in tensor.locations]
    return [places, tensor.byte_offset, tensor.shape, tensor.stride, str(tensor.dtype), tensor.aliases]


def _decode(kept: dict[str, Any], root: Path, stamps: Sequence[FileFingerprint]) -> FolderFacts:
    # Where these records go only the size and the name of a dtype count.
    dtypes = {name: cast("torch.dtype", ElementType(name, size)) for name, size in kept["dtypes"].items()}

    def tensor(kept: list[Any]) -> TensorInfo:
        places, offset, shape, stride, dtype, aliases = kept
        locations = tuple(Location(module, attr, kind, tuple(inner)) for module, attr, kind, inner in places)
        return TensorInfo(locations, offset, tuple(shape), tuple(stride), dtypes[dtype], tuple(aliases))

    inventory = Inventory(
        tuple(StorageInfo(tuple(map(tensor, tensors)), *rest) for tensors, *rest in kept["storages"]),
        tuple(kept["empty"]),
        kept["modules"],
        frozenset(kept["lookups"]),
        frozenset(kept["containers"]),
        tuple(Place(*place) for place in kept["shared"]),
    )
    profile = ModelProfile(**{**kept["profile"], "row_readers": tuple(kept["profile"]["row_readers"])})
    checkpoint = Checkpoint(root, _UnreadTensors(root), tuple(stamps))
    weights = WeightMap(checkpoint, _KeptSources(kept, dtypes, checkpoint.files))
    return FolderFacts(inventory, profile, weights, tuple(kept["differences"]))


class _KeptSources(Mapping[str, TensorSource]):
    """Sources that are made when they are asked for: a plan needs few of 46,000 parts, or none."""

    def __init__(self, kept: dict[str, Any], dtypes: Mapping[str, torch.dtype], files: Sequence[Path]) -> None:
        self._sources, self._parts = kept["sources"], kept["parts"]
        self._shapes = [tuple(shape) for shape in kept["shapes"]]
        self._dtypes, self._files = dtypes, files
        counts = [count for count, *_ in self._sources.values()]
        self._first = dict(zip(self._sources, accumulate(counts, initial=0), strict=False))

    def __getitem__(self, name: str) -> TensorSource:
        (count, shape, dtype_name, stored_name), first = self._sources[name], self._first[name]
        dtype, stored, parts, start = self._dtypes[dtype_name], self._dtypes[stored_name], [], 0
        for part, index, file, offset, num_bytes in zip(*(c[first : first + count] for c in self._parts), strict=True):
            tensor = FileTensor(part, stored, self._shapes[index], self._files[file], offset, num_bytes)
            parts.append(FilePart(tensor, start))
            start += num_bytes // stored.itemsize * dtype.itemsize
        return TensorSource(tuple(parts), tuple(shape), dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources


class _UnreadTensors(Mapping[str, FileTensor]):
    """The tensors of a checkpoint, read when they are asked for: messages of errors name some of them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @cached_property
    def _tensors(self) -> Mapping[str, FileTensor]:
        return Checkpoint.open(self._root).tensors

    def __getitem__(self, name: str) -> FileTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
