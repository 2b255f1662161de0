"""What headrace relies on of an engine, name by name, and how an engine differs from it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headrace.adapters.engine_interface import names_in, version_number


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


def differences(names: Iterable[Name], version: str) -> list[str]:
    """Those of ``names`` that are missing or differ from what is expected of ``version``. Imports their modules."""
    number = version_number(version)
    assert number is not None
    return [problem for name in names if number >= name.since and (problem := _difference(name))]


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
    if missing := [word for word in name.mentions if code is None or word not in names_in(code)]:
        return f"{where} no longer uses {', '.join(missing)}"
    if name.parameters is not None:
        taken = tuple(inspect.signature(found).parameters)
        if taken[: len(name.parameters)] != name.parameters:
            return f"{where} takes ({', '.join(taken)}), expected ({', '.join(name.parameters)}, ...)"
    return ""
