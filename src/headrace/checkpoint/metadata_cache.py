"""On-disk cache of the metadata of model folders, so that planning again needs neither torch nor transformers.

One file per folder, beside the probe of the machine. An entry is valid only while everything that it depends on is the
same (:func:`_state`): config.json, headers, sizes and times of the files, the code of the model's classes and ours, the
versions of all installed packages. Any other entry, a damaged one too, is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from headrace.checkpoint.safetensors_header import Checkpoint, FileFingerprint, FileTensor, raw_header
from headrace.checkpoint.weight_map import FilePart, TensorSource, WeightMap
from headrace.config import cache_disabled, cache_folder
from headrace.errors import CheckpointError
from headrace.json_files import decode, encode, parse, read_file, write_file
from headrace.model.records import DType, Inventory, ModelProfile

# Raise it with any change of the entries.
_SCHEMA = 7
_MOST_FILES = 64  # those used last; a model of 46,000 tensors takes 4 MB
_MOST_BYTES = 1 << 28
_OURS = Path(__file__).parents[1]
# Entries of popular models, made from their published configs by benchmarks/known_models.py.
KNOWN_MODELS = Path(__file__).with_name("known_models.zip")


@dataclass(frozen=True)
class FolderFacts:
    """A model in a folder as planning needs it.

    Attributes:
        inventory: inventory of the model as its files hold it.
        profile: profile of the model beyond names and sizes.
        weights: where the files hold its tensors.
        differences: between the files and the model, for warnings.
        step_rows: rows of a step of the transformer of a pipeline of diffusers; 0 for other models.
        pipeline: its description (``headrace.adapters.pipeline_peaks.describe``); empty for other models.
    """

    inventory: Inventory
    profile: ModelProfile
    weights: WeightMap
    differences: tuple[str, ...] = ()
    step_rows: int = 0
    pipeline: str = ""


def folder_facts(folder: Path, read: Callable[[], tuple[FolderFacts, Iterable[str]]], options: str = "") -> FolderFacts:
    """The valid entry of ``folder``, or else the result of ``read``, which becomes its entry.

    Args:
        read: returns the facts, and the files with the code that they came from.
        options: what they depend on besides the folder; each has its own entry.
    """
    place = _place(folder, options)
    kept = None if place is None else _load(place, folder)
    if kept is not None:
        return kept
    with suppress(OSError):  # a folder that cannot be listed: read() raises
        before = _listing(folder)
    facts, code = read()
    if place is not None:
        with suppress(OSError, CheckpointError):  # no entry
            if before == _listing(folder):
                _save(place, folder, facts, sorted(set(code)))
    return facts


def known_models() -> list[str]:
    """Names of models that can be planned without any file of theirs."""
    with ZipFile(KNOWN_MODELS) as archive:
        return [name.removesuffix(".json") for name in archive.namelist() if name.endswith(".json")]


def known_facts(name: str, context: int) -> FolderFacts:
    """Facts of a model of :func:`known_models`; without a ``context`` nothing that was measured for one."""
    with ZipFile(KNOWN_MODELS) as archive:
        body: _Body = decode(_Body, parse(archive.read(f"{name}.json")))
        pipeline = archive.read(f"{name}.pipeline").decode() if body.step_rows else ""
    if not context:
        stated = body.profile
        profile = ModelProfile(stated.experts_per_token, max_context=stated.max_context, row_readers=stated.row_readers)
        body = replace(body, profile=profile)
    return replace(_facts_of(body, Path(name), ()), pipeline=pipeline)


def _load(place: Path, folder: Path) -> FolderFacts | None:
    with suppress(Exception):  # an entry that is damaged or forged is ignored
        head, _, body = read_file(place, _MOST_BYTES).partition(b"\n")
        key: _Key = decode(_Key, parse(head))
        state, stamps = _state(folder, [folder / file for file in key.files], key.code)
        if (key.state, key.body) == (state, _digest(body)):
            os.utime(place)  # the least recently used entries are deleted first
            return _facts_of(decode(_Body, parse(body)), folder.absolute(), stamps)
    return None


def _save(place: Path, folder: Path, facts: FolderFacts, code: Sequence[str]) -> None:
    checkpoint = facts.weights.checkpoint
    state, stamps = _state(folder, checkpoint.files, code)
    if tuple(stamps) != checkpoint.stamps:
        return  # a file changed since it was read
    body = body_text(facts)
    names = [os.path.relpath(file, checkpoint.root) for file in checkpoint.files]
    key = _Key(state, _digest(body.encode()), tuple(names), tuple(code))
    place.parent.mkdir(parents=True, exist_ok=True)
    write_file(place, f"{json.dumps(encode(key))}\n{body}")
    ours = place.parent.glob(f"{'[0-9a-f]' * 32}.json")  # the folder may be a link to one of other files
    by_use = sorted(ours, key=lambda file: file.stat().st_mtime_ns)
    for oldest in by_use[:-_MOST_FILES]:
        oldest.unlink(missing_ok=True)


def _place(folder: Path, options: str) -> Path | None:
    cache = None if cache_disabled() else cache_folder()
    name = _digest(os.fsencode(folder.absolute()) + b"\n" + options.encode())[:32]
    return None if cache is None else cache / "folders" / f"{name}.json"


# -- dependencies of an entry ------------------------------------------------------------------------------------------


def _state(folder: Path, files: Iterable[Path], code: Iterable[str]) -> tuple[str, list[FileFingerprint]]:
    """A digest of everything that an entry depends on, and the fingerprints of the safetensors ``files``."""
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
    """The files of ``folder`` that an entry depends on; others, such as a saved plan, do not matter."""
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


# -- an entry ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Key:
    """The first line of an entry: digests of its dependencies and of the second line; files and code."""

    state: str
    body: str
    files: tuple[str, ...]
    code: tuple[str, ...]


@dataclass(frozen=True)
class _Sources:
    """Sources in columns, since there may be 46,000 parts.

    Attributes:
        by_name: number of parts, shape and dtype, and the dtype of the parts in the files.
        shapes: shapes that parts have.
        names, shape_of, file_of, offsets, sizes: by part.
    """

    by_name: dict[str, tuple[int, tuple[int, ...], DType, DType]]
    shapes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    shape_of: tuple[int, ...]
    file_of: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class _Body:
    inventory: Inventory
    profile: ModelProfile
    differences: tuple[str, ...]
    sources: _Sources
    step_rows: int = 0


def _body_of(facts: FolderFacts) -> _Body:
    # Without files the sources follow from the inventory.
    sources = facts.weights.sources if facts.weights.checkpoint.files else {}
    parts = [part.tensor for source in sources.values() for part in source.parts]
    shapes = {shape: index for index, shape in enumerate(dict.fromkeys(part.shape for part in parts))}
    files = {file: index for index, file in enumerate(facts.weights.checkpoint.files)}
    # Parts of one source have one dtype; where that is not the model's they are converted.
    by_name = {
        name: (len(each.parts), each.shape, each.dtype, each.parts[0].tensor.dtype) for name, each in sources.items()
    }
    columns = (
        tuple(part.name for part in parts),
        tuple(shapes[part.shape] for part in parts),
        tuple(files[part.path] for part in parts),
        tuple(part.offset for part in parts),
        tuple(part.num_bytes for part in parts),
    )
    found = _Sources(by_name, tuple(shapes), *columns)
    return _Body(facts.inventory, facts.profile, facts.differences, found, facts.step_rows)


def body_text(facts: FolderFacts) -> str:
    """``facts`` as an entry of the cache, or of :data:`KNOWN_MODELS`, holds them."""
    rows = encode(_body_of(facts), as_rows=True)
    return json.dumps(rows, default=lambda dtype: [str(dtype), dtype.itemsize], separators=(",", ":"))


def _facts_of(body: _Body, root: Path, stamps: Sequence[FileFingerprint]) -> FolderFacts:
    """The records of an entry; an error of any type where they do not fit together."""
    modules, sources = body.inventory.modules.keys(), body.sources
    for storage in body.inventory.storages:
        ends = [tensor.byte_offset + tensor.extent_bytes for tensor in storage.tensors]
        if not storage.modules <= modules or max(ends) > storage.num_bytes or not all(t.names for t in storage.tensors):
            raise ValueError(storage.name)
    if not {name for alias in body.inventory.shared for name in (alias.parent, alias.module)} <= modules:
        raise ValueError("a module that is not there")
    if not stamps:
        weights = WeightMap.expected(body.inventory, root)
        return FolderFacts(body.inventory, body.profile, weights, body.differences, body.step_rows)
    checkpoint = Checkpoint(root, _UnreadTensors(root), tuple(stamps))
    columns = zip(sources.names, sources.shape_of, sources.file_of, sources.offsets, sources.sizes, strict=True)
    parts = [(name, sources.shapes[shape], checkpoint.files[file], *rest) for name, shape, file, *rest in columns]
    if sum(count for count, *_ in sources.by_name.values()) != len(parts):
        raise ValueError("parts of no source")
    return FolderFacts(
        body.inventory, body.profile, WeightMap(checkpoint, _KeptSources(sources, parts)), body.differences
    )


class _KeptSources(Mapping[str, TensorSource]):
    """Sources that are made on demand: a plan needs few of 46,000 parts, or none."""

    def __init__(self, sources: _Sources, parts: Sequence[tuple[Any, ...]]) -> None:
        self._sources, self._parts = sources.by_name, parts
        counts = [count for count, *_ in self._sources.values()]
        self._first = dict(zip(self._sources, accumulate(counts, initial=0), strict=False))

    def __getitem__(self, name: str) -> TensorSource:
        (count, shape, dtype, stored), first = self._sources[name], self._first[name]
        parts, start = [], 0
        for part, part_shape, file, offset, num_bytes in self._parts[first : first + count]:
            parts.append(FilePart(FileTensor(part, stored, part_shape, file, offset, num_bytes), start))
            start += num_bytes // stored.itemsize * dtype.itemsize
        return TensorSource(tuple(parts), shape, dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources


class _UnreadTensors(Mapping[str, FileTensor]):
    """The tensors of a checkpoint, read on demand: messages of errors name some of them."""

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
