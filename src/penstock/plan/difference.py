"""In what a plan and the model, or the machine, it is given to differ. Pure; the words of refusals."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

from penstock.config import format_gib
from penstock.model.inventory import Inventory, StorageInfo
from penstock.plan.machine import Machine

__all__ = [
    "foreign_machine",
    "foreign_model",
    "misplaced_storage",
    "nested_units",
    "storages_digest",
    "uncalled_anchor",
]

_SHOWN = 3
_MEND = "make it again for this one: `penstock plan MODEL ... --save FILE`, or pass a policy instead of a plan"


def storages_digest(storages: Mapping[str, int]) -> str:
    """What identifies a model to a plan, in hexadecimal.

    SHA-256 of the sorted list of [storage name, bytes], written as JSON in ASCII without spaces.
    """
    text = json.dumps(sorted(storages.items()), separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def foreign_model(
    planned: Mapping[str, int], found: Mapping[str, int], missing_modules: Sequence[str], name: str | None
) -> str:
    """Why a plan with storages ``planned`` is not for a model with storages ``found`` (name -> bytes)."""
    differing = list(_differences(planned, found))
    parts = []
    if differing:
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        count = f"{len(differing)} of {len(planned.keys() | found.keys())} storages differ"
        parts.append(f"{count}: {', '.join(differing[:_SHOWN])}{more}")
    if missing_modules:
        parts.append(f"the model has no module {missing_modules[0]!r}")
    return (
        f"the plan was made for another model{f' ({name})' if name else ''}: {'; '.join(parts)}. The plan places "
        f"{_total(planned)}, the model has {_total(found)}; {_MEND}"
    )


def foreign_machine(made_for: Machine, here: Machine) -> str:
    """Why a plan for ``made_for`` is not carried out ``here``."""
    return f"the plan was made for another machine: for {made_for}, and this is {here}; {_MEND}"


def uncalled_anchor(inventory: Inventory, anchor: str) -> str | None:
    """Why no unit can be waited for at ``anchor``; ``None`` if one can."""
    if anchor not in inventory.uncalled:
        return None
    why = "has no forward" if anchor in inventory.containers else "is not called by the module around it"
    return (
        f"the plan has a unit at {anchor!r} ({inventory.modules[anchor]}), which {why}, so that nothing would wait for "
        f"its tensors; expected a module that is called; {_MEND}"
    )


def misplaced_storage(inventory: Inventory, storage: StorageInfo, anchor: str) -> str | None:
    """Why ``storage`` cannot travel in a unit that is waited for at ``anchor``; ``None`` if it can."""
    outside = sorted(module for module in storage.modules if anchor not in inventory.dominators(module))
    if not outside:
        return None
    where = "hangs in another place, too," if anchor in inventory.ancestors(outside[0]) else "is not in there"
    return (
        f"the plan has {storage.name} in the unit of {anchor!r}, but module {outside[0]!r}, which holds it, {where} "
        f"and would read it before it has arrived; {_MEND}"
    )


def nested_units(inventory: Inventory, anchors: Sequence[str]) -> str | None:
    """What is wrong with units waited for at ``anchors``, in their order; ``None`` if no two run at the same time.

    While a module runs its unit must keep its slot, and those inside it would need theirs in turn.
    """
    unit_at: dict[str, int] = {}
    for index, anchor in enumerate(anchors):
        if anchor in unit_at:
            return _at_once(unit_at[anchor], anchor, index, anchor)
        unit_at[anchor] = index
    for index, anchor in enumerate(anchors):
        if outer := sorted(unit_at.keys() & inventory.ancestors(anchor)):
            return _at_once(unit_at[outer[0]], outer[0], index, anchor)
    return None


def _at_once(outer: int, outer_anchor: str, inner: int, inner_anchor: str) -> str:
    return (
        f"the plan has units {outer} and {inner} at {outer_anchor!r} and {inner_anchor!r}; expected modules none of "
        f"which runs inside another, because one would be overwritten while it is read; {_MEND}"
    )


def _differences(planned: Mapping[str, int], found: Mapping[str, int]) -> Iterator[str]:
    """Each storage that is not the same in both, those of another size first."""
    for name in sorted(planned.keys() & found.keys()):
        if planned[name] != found[name]:
            yield f"{name} ({planned[name]} bytes in the plan, {found[name]} in the model)"
    for name in sorted(planned.keys() - found.keys()):
        yield f"{name} ({planned[name]} bytes, in the plan alone)"
    for name in sorted(found.keys() - planned.keys()):
        yield f"{name} ({found[name]} bytes, in the model alone)"


def _total(storages: Mapping[str, int]) -> str:
    total = sum(storages.values())
    return f"{len(storages)} storages, {format_gib(total)} ({total} bytes)"
