"""Plan files: JSON that is written whole or not at all, and read back by building and comparing.

This module is independent of plans. A reader builds an object from the few facts that nothing else follows from, writes
it as JSON again, and compares that with the file (:func:`require_same`): sums, offsets and digests of the file have
to be what follows, so that a file that was edited in one place only is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import OptionError, OptionTypeError, PlanFileError

__all__ = ["load_json", "require", "require_same", "save_json"]

_FIX = "make it again with `headrace plan MODEL ... --save FILE`"

T = TypeVar("T")


def require(holds: bool, place: str, expected: str, found: object) -> None:
    """Refuse the file that is being read unless ``holds``; :func:`load_json` adds the name of the file."""
    if not holds:
        raise PlanFileError(f"{place or 'the file'}: expected {expected}, found {_shown(found)}")


def require_same(expected: Any, found: Any, place: str = "") -> None:
    """Refuse the file unless what it says at ``place`` is ``expected``, which follows from the rest; names where."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in expected:
            require(key in found, place, f"the key {key!r}", sorted(found))
        for key, value in found.items():
            require(key in expected, place, f"no key but {', '.join(expected)}", key)
            require_same(expected[key], value, f"{place}.{key}" if place else key)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, pair in enumerate(zip(expected, found, strict=True)):
            require_same(*pair, f"{place}[{index}]")
    else:  # neither true nor 1.0 is 1
        same = type(expected) is type(found) and expected == found
        require(same, place, f"{_shown(expected)}, which follows from the rest of the file", found)


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."


def save_json(data: Any, path: str | os.PathLike[str]) -> None:
    """Write ``data`` to ``path``; a reader sees the file that was there before or the whole new one.

    Raises:
        OptionError: in no folder that exists, or something else than a file is there; or it cannot be written.
        OptionTypeError: no path.
    """
    target = _as_path(path)
    if not target.parent.is_dir():
        raise OptionError(f"{str(target)!r}: expected a file name in a folder that exists, found no such folder")
    if target.exists() and not target.is_file():
        found = "a folder" if target.is_dir() else "something that is no file"
        raise OptionError(f"{str(target)!r}: expected the name of a file to write the plan to, found {found}")
    # The rename would replace the link itself.
    if target.is_symlink():
        target = target.resolve()
    # In the same folder, since a rename is atomic within one file system only.
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())  # before the rename, or a crash could leave an empty file under the name
        draft.replace(target)
    except OSError as error:
        raise OptionError(f"{str(target)!r}: the plan cannot be written there: {error.strerror}") from error
    finally:
        with suppress(OSError):
            draft.unlink()


def load_json(path: str | os.PathLike[str], build: Callable[[Any], T]) -> T:
    """What ``build`` makes of the JSON in the file at ``path``.

    Raises:
        PlanFileError: no such file; not JSON; refused by ``build``. The message says where in the file.
        OptionTypeError: no path.
    """
    source = _as_path(path)
    try:
        return build(json.loads(source.read_text(encoding="utf-8"), object_pairs_hook=_without_doubles))
    except PlanFileError as error:
        problem = str(error)
    except OSError as error:
        problem = f"expected a plan file, found: {error.strerror}"
    except KeyError as error:
        problem = f"expected the key {error}, which is missing"
    except (TypeError, AttributeError) as error:
        problem = f"expected the objects and lists of a plan, found: {error}"
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        problem = f"expected a plan in JSON, found: {error}"
    raise PlanFileError(f"{source}: {problem}; {_FIX}")


def _as_path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise OptionTypeError(f"path: expected a str or path of a plan file, found {type(path).__name__}")
    return Path(path).expanduser()


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no key occurs twice; ``json`` itself would keep the last and drop the others."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {double!r} twice in one object")
    return found
