"""A plan as a file: written whole or not at all, and believed only after every figure in it has been checked.

The file is :meth:`Plan.to_json` as UTF-8 JSON. Sizes in it are bytes. What follows from the units and tensors
(``slot_bytes``, ``moved_bytes``, the digest of the model, ...) stands there for readers; on load it is computed anew
and has to be the same, so that a file edited by hand in one place alone is found out.

=============  =======================================================================================================
key            meaning
=============  =======================================================================================================
``schema``     version of this table; another one is refused
``model``      ``name`` (or null), ``num_storages``, ``weight_bytes``, ``sha256`` over the sorted (storage, bytes)
``machine``    null, or what it was made for: ``device`` (``"cpu"`` or a GPU's name), ``device_bytes`` (or null)
``mode``       the store of what is read in place, and of the units that do not rest in ``disk`` beside it:
               ``cpu``, ``shm_cpu``, ``disk``, ``sharded_gpu`` or ``meta``
``num_ranks``  over how many ranks every unit is split
``num_slots``  slots, each of ``slot_bytes``
``units``      ``index``, ``anchor``, ``slot``, ``num_bytes``, ``store`` (as ``mode``, or ``disk`` where that is ``cpu``
               and units are not split over ranks), and ``entries`` of ``storage``, ``offset``, ``num_bytes``
``resident``   storage name -> bytes
``uva``        the same, of what is read in place
the others     sums over the above, in bytes; ``store_bytes`` by where they rest
``outlook``    only in what ``penstock plan --json`` prints: predictions; not read back
=============  =======================================================================================================
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, get_args

from penstock.config import Mode
from penstock.errors import OptionError, OptionTypeError, PlanFileError
from penstock.plan.machine import Machine
from penstock.plan.plan import SCHEMA_VERSION, SLAB_ALIGNMENT_BYTES, Plan, SlabEntry, Unit
from penstock.plan.slots import slot_of

__all__ = ["load_plan", "require_place", "save_plan"]

_MEND = "make it again with `penstock plan MODEL ... --save FILE`"

T = TypeVar("T")


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write ``plan`` to ``path``; a reader sees the file that was there before or the whole new one.

    Raises:
        OptionError: no file can be written there.
    """
    target = require_place(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as file:
            json.dump(plan.to_json(), file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except OSError as error:
        raise OptionError(f"{str(target)!r}: the plan cannot be written there: {error.strerror}") from error
    finally:
        with suppress(OSError):
            draft.unlink()


def require_place(path: str | os.PathLike[str]) -> Path:
    """``path`` as one that a plan can be written to; looks, and writes nothing.

    Raises:
        OptionError: in no folder that exists, or something else than a file is there.
        OptionTypeError: no path.
    """
    target = _as_path(path)
    if not target.parent.is_dir():
        raise OptionError(f"{str(target)!r}: expected a file name in a folder that exists, found no such folder")
    if target.exists() and not target.is_file():
        found = "a folder" if target.is_dir() else "something that is no file"
        raise OptionError(f"{str(target)!r}: expected the name of a file to write the plan to, found {found}")
    return target.resolve() if target.is_symlink() else target


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in the file at ``path``.

    Raises:
        PlanFileError: no such file; not JSON; another schema; a key or value that is missing, unknown, of another type,
            or at odds with the rest. The message says where in the file.
        OptionTypeError: no path.
    """
    source = _as_path(path)
    try:
        data = json.loads(_read(source), object_pairs_hook=_without_doubles)
    except PlanFileError:
        raise
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError, and so is a PlanFileError
        raise PlanFileError(f"{source}: expected a plan in JSON, found: {error}; {_MEND}") from error
    try:
        return _plan(data)
    except _FieldError as problem:
        raise PlanFileError(f"{source}: {problem}; {_MEND}") from None


def _as_path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise OptionTypeError(f"path: expected a str or path of a plan file, found {type(path).__name__}")
    return Path(path).expanduser()


def _read(source: Path) -> str:
    try:
        return source.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanFileError(f"{source}: expected a plan file, found: {error.strerror}; {_MEND}") from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no key stands twice; ``json`` itself would keep the last and drop the others."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {double!r} twice in one object")
    return found


class _FieldError(Exception):
    """What is wrong, and where in the file."""

    def __init__(self, place: str, expected: str, found: object) -> None:
        super().__init__(f"{place or 'the file'}: expected {expected}, found {_shown(found)}")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


# -- JSON values of a type, or a problem at their place ----------------------------------------------------------------


def _typed(value: object, kind: type[T], words: str, place: str) -> T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _FieldError(place, words, value)
    return value


def _count(value: object, place: str, minimum: int = 0) -> int:
    number = _typed(value, int, "a whole number", place)
    if number < minimum:
        raise _FieldError(place, f"at least {minimum}", number)
    return number


def _text(value: object, place: str) -> str:
    return _typed(value, str, "a string", place)


def _object(value: object, keys: tuple[str, ...], place: str) -> dict[str, Any]:
    found: dict[str, Any] = _typed(value, dict, "an object", place)
    for key in keys:
        if key not in found:
            raise _FieldError(place, f"the key {key!r}", sorted(found))
    for key in found:
        if key not in keys:
            raise _FieldError(place, f"no key but {', '.join(keys)}", key)
    return found


def _list(value: object, place: str) -> Iterator[tuple[str, Any]]:
    found: list[Any] = _typed(value, list, "a list", place)
    return ((f"{place}[{index}]", item) for index, item in enumerate(found))


# -- the parts of a plan -----------------------------------------------------------------------------------------------


def _plan(data: object) -> Plan:
    given = _typed(data, dict, "an object", "")
    version = given.get("schema")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise _FieldError("schema", f"{SCHEMA_VERSION}, the version that this penstock reads and writes", version)
    keys = tuple(Plan((), 0, "cpu", {}, {}).to_json())
    values = _object({key: value for key, value in given.items() if key != "outlook"}, keys, "")
    num_slots = _count(values["num_slots"], "num_slots")
    model = _object(values["model"], ("name", "num_storages", "weight_bytes", "sha256"), "model")
    items = list(_list(values["units"], "units"))
    if not min(1, len(items)) <= num_slots <= len(items):
        expected = f"1 to {len(items)}, the number of units" if items else "0 without units"
        raise _FieldError("num_slots", expected, num_slots)
    mode, num_ranks = _mode(values["mode"], "mode"), _count(values["num_ranks"], "num_ranks", 1)
    stores = {mode, "disk"} if mode == "cpu" and num_ranks == 1 else {mode}
    units = tuple(_unit(item, place, num_slots, stores) for place, item in items)
    plan = Plan(
        units=_in_order(units),
        num_slots=num_slots,
        mode=mode,
        resident=_sizes(values["resident"], "resident"),
        uva=_sizes(values["uva"], "uva"),
        model_name=None if model["name"] is None else _text(model["name"], "model.name"),
        made_for=_machine(values["machine"]),
        num_ranks=num_ranks,
    )
    _refuse_placed_twice(plan)
    _compare(plan.to_json(), values, "")
    return plan


def _mode(value: object, place: str, allowed: Collection[str] = get_args(Mode)) -> Mode:
    for mode in get_args(Mode):
        if value == mode and mode in allowed:
            return mode  # type: ignore[no-any-return]
    names = [mode for mode in get_args(Mode) if mode in allowed]
    raise _FieldError(place, f"one of {', '.join(names)}" if len(names) > 1 else f"{names[0]}, the plan's mode", value)


def _machine(value: object) -> Machine | None:
    if value is None:
        return None
    fields = _object(value, ("device", "device_bytes"), "machine")
    total = fields["device_bytes"]
    return Machine(
        _text(fields["device"], "machine.device"),
        None if total is None else _count(total, "machine.device_bytes", 1),
    )


def _sizes(value: object, place: str) -> dict[str, int]:
    found: dict[str, Any] = _typed(value, dict, "an object of storage names with their bytes", place)
    return {name: _count(size, f"{place}[{name!r}]", 1) for name, size in found.items()}


def _unit(value: object, place: str, num_slots: int, stores: Collection[str]) -> Unit:
    fields = _object(value, ("index", "anchor", "slot", "entries", "num_bytes", "store"), place)
    index = _count(fields["index"], f"{place}.index")
    slot = _count(fields["slot"], f"{place}.slot")
    if slot != slot_of(index, num_slots):
        raise _FieldError(f"{place}.slot", f"{slot_of(index, num_slots)}, which is index mod num_slots", slot)
    entries = tuple(_entry(item, at) for at, item in _list(fields["entries"], f"{place}.entries"))
    if not entries:
        raise _FieldError(f"{place}.entries", "at least one entry", [])
    end = _end_of(entries, f"{place}.entries")
    num_bytes = _count(fields["num_bytes"], f"{place}.num_bytes")
    if num_bytes < end or num_bytes % SLAB_ALIGNMENT_BYTES:
        expected = f"a multiple of {SLAB_ALIGNMENT_BYTES} that is at least {end}, where its last entry ends"
        raise _FieldError(f"{place}.num_bytes", expected, num_bytes)
    store = _mode(fields["store"], f"{place}.store", stores)
    return Unit(index, _text(fields["anchor"], f"{place}.anchor"), slot, entries, num_bytes, store)


def _entry(value: object, place: str) -> SlabEntry:
    fields = _object(value, ("storage", "offset", "num_bytes"), place)
    offset = _count(fields["offset"], f"{place}.offset")
    if offset % SLAB_ALIGNMENT_BYTES:
        raise _FieldError(f"{place}.offset", f"a multiple of {SLAB_ALIGNMENT_BYTES}", offset)
    num_bytes = _count(fields["num_bytes"], f"{place}.num_bytes", 1)
    return SlabEntry(_text(fields["storage"], f"{place}.storage"), offset, num_bytes)


def _end_of(entries: tuple[SlabEntry, ...], place: str) -> int:
    """Where the last of ``entries`` ends; they may not overlap."""
    end = 0
    for index, entry in enumerate(entries):
        if entry.offset < end:
            raise _FieldError(f"{place}[{index}].offset", f"at least {end}, where the entry before ends", entry.offset)
        end = entry.offset + entry.num_bytes
    return end


def _in_order(units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    for index, unit in enumerate(units):
        if unit.index != index:
            raise _FieldError(f"units[{index}].index", f"{index}, its position", unit.index)
    return units


def _refuse_placed_twice(plan: Plan) -> None:
    places: dict[str, str] = {}
    for name, place in _placements(plan):
        if name in places:
            raise _FieldError(place, f"each storage in one place, and {name} is in {places[name]} already", name)
        places[name] = place


def _placements(plan: Plan) -> Iterator[tuple[str, str]]:
    yield from ((name, "resident") for name in plan.resident)
    yield from ((name, "uva") for name in plan.uva)
    for unit in plan.units:
        yield from ((entry.storage, f"units[{unit.index}].entries[{i}]") for i, entry in enumerate(unit.entries))


def _compare(expected: Mapping[str, Any], found: Mapping[str, Any], place: str) -> None:
    """What the file says of sums and digests against what follows from its units and tensors."""
    for key, value in expected.items():
        at = f"{place}.{key}" if place else key
        if isinstance(value, dict) and isinstance(found[key], dict) and key == "model":
            _compare(value, found[key], at)
        elif _text_of(value) != _text_of(found[key]):
            raise _FieldError(at, f"{_shown(value)}, which follows from the rest of the file", found[key])


def _text_of(value: object) -> str:
    """Equal for equal values: neither true nor 1.0 is 1, and the order of keys means nothing."""
    return json.dumps(value, sort_keys=True)
