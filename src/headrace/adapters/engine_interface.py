"""Whether an engine or library is one that was tried, and has the functions that headrace hooks.

The full tables of what headrace relies on are tests (``tests/support/vllm_names.py``, ``sglang_names.py``).
"""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
import re
from collections.abc import Collection, Mapping
from types import CodeType

from headrace.errors import OptionError, warn_user

__all__ = ["missing_hooks", "names_in", "require_names", "version_number"]


def version_number(version: str) -> tuple[int, ...] | None:
    """Major, minor and patch number of ``version``; ``None`` if it is no version number."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return None if match is None else tuple(int(part or 0) for part in match.groups())


def missing_hooks(hooks: Mapping[str, Collection[str]]) -> list[str]:
    """What is missing of ``hooks``: functions by dotted name, each with the names that its code uses. Imports them."""
    problems = []
    for target, expected in hooks.items():
        try:
            found = pkgutil.resolve_name(target)
        except (ImportError, AttributeError) as error:
            problems.append(f"{target} is missing ({error})")
            continue
        code = getattr(inspect.unwrap(found), "__code__", None) if expected else None
        if lacks := [name for name in expected if code is None or name not in names_in(code)]:
            problems.append(f"{target} no longer uses {', '.join(lacks)}")
    return problems


def names_in(code: CodeType) -> set[str]:
    """Attributes, variables, global names and strings in the code of a function, and of functions inside it."""
    inner = (names_in(part) for part in code.co_consts if isinstance(part, CodeType))
    strings = {part for part in code.co_consts if isinstance(part, str)}  # names given to getattr()
    return strings.union(code.co_names, code.co_varnames, *inner)


def require_names(library: str, oldest: tuple[int, int], newest: tuple[int, int], *names: str) -> None:
    """Warn of a version of ``library`` that was not tried; ``OptionError`` for one that lacks one of ``names``."""
    version = importlib.metadata.version(library)
    number = version_number(version) or newest
    tried = f"{'.'.join(map(str, oldest))} to {'.'.join(map(str, newest))}"
    if found := missing_hooks(dict.fromkeys(names, ())):
        raise OptionError(
            f"{library} {version}: expected what {tried} have, found that {'; '.join(found)}; install one"
        )
    if not oldest <= number[:2] <= newest:
        warn_user(f"{library} {version} was not tried with this headrace; {tried} were")
