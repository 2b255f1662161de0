"""What an adapter relies on of an engine: names, parameters, fields and calls, and how an engine differs from them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from headrace.errors import OptionError, warn_user

__all__ = ["Name", "differences", "require_names", "version_number"]


@dataclass(frozen=True)
class Name:
    """A function or class of an engine, and what headrace relies on.

    Attributes:
        module: that defines it.
        path: its name there, dotted.
        parameters: the first ones, in order, that headrace passes or receives; ``None``: not checked.
        fields: of a configuration, those that headrace reads.
        mentions: attributes and functions that its code uses: calls that headrace waits for, attributes it changes.
        since_later: older versions lack its module, and what headrace uses it for.
        since: the first version that has it; older ones do without.
    """

    module: str
    path: str
    parameters: tuple[str, ...] | None = None
    fields: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    since_later: bool = False
    since: tuple[int, int] = (0, 0)


def version_number(version: str) -> tuple[int, ...] | None:
    """Major, minor and patch number of ``version``; ``None`` if it is no version number."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return None if match is None else tuple(int(part or 0) for part in match.groups())


def differences(names: Iterable[Name], version: tuple[int, ...]) -> list[str]:
    """Those of ``names`` that are missing or differ from what is expected of ``version``. Imports their modules."""
    return [problem for name in names if version >= name.since and (problem := _difference(name))]


def require_names(library: str, oldest: tuple[int, int], newest: tuple[int, int], names: Iterable[Name] = ()) -> None:
    """Warn of a version of ``library`` that was not tried; ``OptionError`` for one that lacks one of ``names``."""
    version = importlib.metadata.version(library)
    number = version_number(version) or newest
    tried = f"{'.'.join(map(str, oldest))} to {'.'.join(map(str, newest))}"
    if found := differences(names, number):
        raise OptionError(
            f"{library} {version}: expected what {tried} have, found that {'; '.join(found)}; install one"
        )
    if not oldest <= number[:2] <= newest:
        warn_user(f"{library} {version} was not tried with this headrace; {tried} were")


def _difference(name: Name) -> str:
    where = f"{name.module}.{name.path}"
    if name.since_later and importlib.util.find_spec(name.module) is None:
        return ""
    try:
        found: Any = importlib.import_module(name.module)
        for part in name.path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        return f"{where} is missing ({error})"
    if name.fields:
        # Annotations, since a field with a default factory is no attribute of its class.
        known = {field for base in found.__mro__ for field in inspect.get_annotations(base)}
        if missing := [field for field in name.fields if field not in known]:
            return f"{where} has no field {', '.join(missing)}"
    code = getattr(inspect.unwrap(found), "__code__", None)
    if missing := [word for word in name.mentions if code is None or word not in _names_in(code)]:
        return f"{where} no longer uses {', '.join(missing)}"
    if name.parameters is not None:
        taken = tuple(inspect.signature(found).parameters)
        if taken[: len(name.parameters)] != name.parameters:
            return f"{where} takes ({', '.join(taken)}), expected ({', '.join(name.parameters)}, ...)"
    return ""


def _names_in(code: CodeType) -> set[str]:
    """Attributes, variables, global names and strings in the code of a function, and of functions inside it."""
    inner = (_names_in(part) for part in code.co_consts if isinstance(part, CodeType))
    strings = {part for part in code.co_consts if isinstance(part, str)}  # names given to getattr()
    return strings.union(code.co_names, code.co_varnames, *inner)
