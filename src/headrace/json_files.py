"""Files of headrace's own: dataclasses as JSON, written atomically and read back with every value checked.

Plan files, probes and the cache of model metadata are read by the same rules: a file may have been cut off, edited or
put there by somebody else. A field's type hint says what it may hold: ints are not negative and fit 64 bits
(:data:`Positive`: nor 0), floats are positive and finite, everything else is as the hint says. Keys that no field has
are ignored; a field with a default may be missing.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints
from uuid import uuid4

Positive = Annotated[int, 1]
"""A whole number of at least 1."""

# Within these bounds no sum or quotient of rates overflows.
_LEAST, _MOST = 1e-30, 1e30
_MAX_DIGITS = 18


class FormatError(ValueError):
    """A file does not hold what is read from it; the text says where, what was expected and what was found."""

    def __init__(self, problem: str, place: str = "") -> None:
        super().__init__(f"{place or 'the file'}: {problem}")


def require(holds: bool, place: str, expected: str, found: object) -> None:
    """Refuse the file that is being read unless ``holds``."""
    if not holds:
        text = json.dumps(found, default=str)
        raise FormatError(f"expected {expected}, found {text if len(text) <= 60 else f'{text[:60]}...'}", place)


# -- files -------------------------------------------------------------------------------------------------------------


def read_file(path: Path, most_bytes: int = 1 << 20) -> bytes:
    """The content of a regular file; opening anything else may block forever, and reading it never end.

    Raises:
        OSError, ValueError: there is none, or a larger one.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("no regular file")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"more than {most_bytes} bytes")
    return content


def write_file(path: Path, text: str) -> None:
    """Write ``path``; a reader finds the former file or the whole new one, and no draft stays behind.

    A link is replaced itself, since what it leads to may be no file of headrace's.

    Raises:
        OSError: it cannot be written.
    """
    # In the same folder, since a rename is atomic within one file system only.
    draft = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # before the rename, or a crash could leave an empty file under the name
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink()


def parse(content: bytes) -> Any:
    """The JSON in ``content``.

    Raises:
        ValueError: not UTF-8, not JSON, nested too deep, or a key twice in one object.
    """
    try:
        # decode() is UTF-8, as the format demands; json.loads of bytes would take UTF-16 and UTF-32, too.
        return json.loads(content.decode(), object_pairs_hook=_without_doubles)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no key occurs twice; ``json`` itself would keep the last and drop the others."""
    found = dict(pairs)
    if len(found) < len(pairs):
        [(double, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {double!r} twice in one object")
    return found


# -- values ------------------------------------------------------------------------------------------------------------


def encode(value: Any, *, as_rows: bool = False) -> Any:
    """``value`` as JSON types; ``as_rows``: dataclasses as lists of their fields, which take less room."""
    if is_dataclass(value):
        found = {each.name: encode(getattr(value, each.name), as_rows=as_rows) for each in fields(value) if each.init}
        return list(found.values()) if as_rows else found
    if isinstance(value, Mapping):
        return {key: encode(item, as_rows=as_rows) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [encode(item, as_rows=as_rows) for item in (sorted(value) if isinstance(value, frozenset) else value)]
    return value


def decode(kind: Any, data: Any, place: str = "") -> Any:
    """The value of type ``kind``, a type hint, of which ``data`` is :func:`encode`; ``place`` is its name in errors.

    Raises:
        FormatError: ``data`` is something else.
    """
    if kind in _SCALARS:
        holds, expected = _SCALARS[kind]
        require(holds(data), place, expected, data)
        return float(data) if kind is float else data
    origin, args = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _record_from(kind, data, place)
    if origin is Literal:
        require(type(data) is str and data in args, place, f"one of {', '.join(args)}", data)
        return data
    if origin in (Union, UnionType):  # of one type and None
        return None if data is None else decode(args[0], data, place)
    if origin in (tuple, frozenset):
        require(type(data) is list, place, "a list", data)
        if len(args) < 2 or args[-1] is Ellipsis:
            if args[0] in _SCALARS and all(map(_SCALARS[args[0]][0], data)):  # long columns of plain values
                return origin(data)
            args = args[:1] * len(data)
        require(len(data) == len(args), place, f"{len(args)} values", data)
        return origin(
            decode(each, item, f"{place}[{i}]") for i, (each, item) in enumerate(zip(args, data, strict=True))
        )
    require(type(data) is dict, place, "an object", data)
    numbers, found = args[0] is int, {}
    for key, item in data.items():
        is_number = key.isascii() and key.isdecimal() and len(key) <= _MAX_DIGITS and int(key) > 0
        require(is_number or not numbers, place, "whole numbers above 0 as keys", key)
        found[int(key) if numbers else key] = decode(args[1], item, f"{place}[{key!r}]")
    return found


def _record_from(kind: Any, data: Any, place: str) -> Any:
    known = [each for each in fields(kind) if each.init]
    if type(data) is list:
        require(len(data) == len(known), place, f"{len(known)} values", data)
        data = dict(zip((each.name for each in known), data, strict=True))
    require(type(data) is dict, place, "an object", data)
    hints, values = _hints(kind), {}
    for each in known:
        if each.name in data:
            values[each.name] = decode(
                hints[each.name], data[each.name], f"{place}.{each.name}" if place else each.name
            )
        elif each.default is MISSING and each.default_factory is MISSING:
            raise FormatError(f"expected the key {each.name!r}, which is missing", place)
    return kind(**values)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


# By type(): to isinstance() the `true` of JSON is an int.
_SCALARS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    Any: (lambda data: True, ""),
    bool: (lambda data: type(data) is bool, "true or false"),
    str: (lambda data: type(data) is str, "a string"),
    int: (lambda data: type(data) is int and 0 <= data < 1 << 63, "a whole number of at least 0"),
    Positive: (lambda data: type(data) is int and 0 < data < 1 << 63, "a whole number of at least 1"),
    float: (lambda data: type(data) in (int, float) and _LEAST <= data <= _MOST, "a finite number above 0"),
}
