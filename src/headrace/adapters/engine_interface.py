"""Checks of an engine or library: its version, the functions that headrace hooks, and flags that it cannot run with.

The full tables of names that headrace relies on are tests (``tests/support/vllm_names.py``, ``sglang_names.py``).
"""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from types import CodeType
from typing import TYPE_CHECKING, Any

from headrace.errors import OptionError, StateError, warn_user
from headrace.flags import flag_of

if TYPE_CHECKING:
    from headrace.offloaders.layerwise import EngineOffloader


def version_number(version: str) -> tuple[int, ...] | None:
    """Major, minor and patch number of ``version``; ``None`` if it is no version number."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return None if match is None else tuple(int(part or 0) for part in match.groups())


def missing_hooks(hooks: Mapping[str, Collection[str]]) -> list[str]:
    """Import ``hooks``, functions by dotted name, each with names that its code uses; list those that are missing."""
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


def require_hooks(engine: str, hooks: Mapping[str, Collection[str]], instead: str) -> None:
    """Refuse an ``engine`` of a supported version without one of ``hooks``, as a patched build may be."""
    if found := missing_hooks(hooks):
        raise OptionError(
            f"{engine} differs from the tested versions: {'; '.join(found)}. Use an unchanged {instead} headrace"
        )


def names_in(code: CodeType) -> set[str]:
    """Attributes, variables, global names and strings in the code of a function, and of functions inside it."""
    inner = (names_in(part) for part in code.co_consts if isinstance(part, CodeType))
    strings = {part for part in code.co_consts if isinstance(part, str)}  # names given to getattr()
    return strings.union(code.co_names, code.co_varnames, *inner)


def require_names(library: str, oldest: tuple[int, int], newest: tuple[int, int], *names: str) -> None:
    """Warn about a version of ``library`` that was not tried; ``OptionError`` if it lacks one of ``names``."""
    version = importlib.metadata.version(library)
    number = version_number(version) or newest
    tried = f"{'.'.join(map(str, oldest))} to {'.'.join(map(str, newest))}"
    if found := missing_hooks(dict.fromkeys(names, ())):
        raise OptionError(
            f"{library} {version}: expected the functions of {tried}, found that {'; '.join(found)}; install one of "
            f"these versions"
        )
    if not oldest <= number[:2] <= newest:
        warn_user(f"{library} {version} was not tried with this headrace; {tried} were")


# -- flags of an engine that headrace cannot run with ------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """A flag of an engine that is refused, before the model loads, while weights are offloaded.

    Attributes:
        field: field of the engine's configuration, dotted; its last word is that of the flag.
        reason: what the flag does, to follow its name in a message.
        refused: whether a value is refused; by default every one that sets the flag.
    """

    field: str
    reason: str
    refused: Callable[[Any], bool] = bool

    @property
    def flag(self) -> str:
        """The spelling on the command line."""
        return flag_of(self.field.rpartition(".")[2])


def refuse_flags(refusals: Iterable[Refusal], field: Callable[[str], Any], instead: str) -> None:
    """Refuse a flag of the table that is in use.

    Args:
        refusals: the table.
        field: the value of an attribute of the engine's configuration, by its name.
        instead: an alternative for the user, as the end of the message.

    Raises:
        OptionError: names the flag; or a field that the configuration does not have, as it may have been renamed.
    """
    for refusal in refusals:
        first, *path = refusal.field.split(".")
        try:
            value = reduce(lambda owner, name: None if owner is None else getattr(owner, name), path, field(first))
        except (AttributeError, LookupError) as error:
            raise OptionError(
                f"{refusal.flag} {refusal.reason}: expected a field {refusal.field} in the engine's configuration "
                f"for it, found none; install a version that was tried, or {instead}"
            ) from error
        if value and refusal.refused(value):
            shown = f" {value}" if isinstance(value, str | int) and value is not True else ""
            raise OptionError(f"{refusal.flag}{shown} {refusal.reason}; leave it out, or {instead}")


# -- new weights in all ranks, or in none ------------------------------------------------------------------------------

# A value of this rank to those of all ranks of the engine.
Gather = Callable[[Any], list[Any]]


def gathered(value: Any, group: Any) -> list[Any]:
    """``value`` of every rank of ``group``, a ``GroupCoordinator`` of vLLM's or SGLang's."""
    from torch import distributed as dist  # the command line imports this file, and starts without torch

    found = [value] * group.world_size
    if group.world_size > 1:
        dist.all_gather_object(found, value, group.cpu_group)
    return found


@contextmanager
def all_or_none(offloader: EngineOffloader, call: str, gather: Gather) -> Iterator[None]:
    """Within, the engine writes new weights to its model, which takes them over at the end if no rank has failed.

    Raises:
        StateError: another rank has failed; the weights of this one are the old ones, too.
    """
    error: BaseException | None = None
    try:
        new = offloader.new_weights(call)
        with new.written():
            yield
    except BaseException as found:
        found.add_note(f"headrace: {call} has failed, and the weights are the ones from before")
        error = found
    require_no_failure(call, gather("" if error is None else f"{type(error).__name__}: {error}"), error)
    new.take_over()


def require_no_failure(call: str, failures: list[str], error: BaseException | None = None) -> None:
    """Raise ``error``, that of this rank, or else the first of ``failures``; the empty ones are none."""
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure:
            raise StateError(f"{call}: nothing was changed, because rank {rank} has failed: {failure}")
