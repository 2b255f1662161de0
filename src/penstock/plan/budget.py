"""A byte budget -> which storages leave, spread evenly over the layers.

Offloading a quarter of *every* layer beats offloading every fourth layer: slots are a quarter of the size and no
stretch of compute goes without a copy behind it. So the solver picks *roles* (``mlp.down_proj.weight``), the same in
every layer, and then keeps single units resident, evenly spaced, while memory is left.

It tries every set of roles (they are few: the large tensors of one layer) and takes the one that moves the fewest
bytes; of equals the one with the smaller slots.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from penstock.config import Mode, format_gib
from penstock.errors import BudgetError, PenstockWarning
from penstock.inventory import Inventory, StorageInfo
from penstock.plan.model import Plan, UnitDraft, assemble
from penstock.plan.units import find_stacks, outside_units

__all__ = ["solve"]

_MAX_ROLES = 10
_PREFERRED_SLOTS = 2


@dataclass(frozen=True)
class _Choice:
    """A set of units and slots, with what it costs."""

    drafts: tuple[UnitDraft, ...]
    num_slots: int
    device_bytes: int

    @property
    def moved_bytes(self) -> int:
        return sum(s.num_bytes for draft in self.drafts for s in draft.storages)

    @property
    def rank(self) -> tuple[int, int, int]:
        return (-self.num_slots, self.moved_bytes, self.device_bytes)


def solve(inventory: Inventory, candidates: Sequence[StorageInfo], budget_bytes: int, mode: Mode) -> Plan:
    """The plan that moves the fewest bytes within ``budget_bytes``.

    Raises:
        BudgetError: even with everything offloaded the budget is too small; carries the minimum.
    """
    if inventory.num_bytes <= budget_bytes:
        warnings.warn(
            f"the weights ({format_gib(inventory.num_bytes)}) fit the budget ({format_gib(budget_bytes)}): nothing is "
            f"offloaded; a smaller --device-memory would",
            PenstockWarning,
            stacklevel=5,
        )
        return assemble(inventory, [], 0, mode)
    # Rows of a lookup table are read in place, from the mapped file or over the link: that costs neither memory nor a
    # copy, and stays right when a model reads the table again at its end (tied weights that are not tied tensors).
    lookups = [s for s in candidates if s.is_lookup] if mode != "meta" else []
    movable = [s for s in candidates if s not in lookups]
    base_bytes = inventory.num_bytes - sum(s.num_bytes for s in lookups)
    if base_bytes <= budget_bytes:
        return assemble(inventory, [], 0, mode, uva=lookups)
    choices = [_Choice((), 0, base_bytes), *_choices(inventory, movable, base_bytes, budget_bytes)]
    fitting = [choice for choice in choices if choice.device_bytes <= budget_bytes]
    if not fitting:
        minimum = min(choice.device_bytes for choice in choices)
        raise BudgetError(_too_small(budget_bytes, minimum, inventory), minimum)
    best = min(fitting, key=lambda choice: choice.rank)
    return assemble(inventory, best.drafts, best.num_slots, mode, uva=lookups)


def _choices(
    inventory: Inventory, movable: Sequence[StorageInfo], base_bytes: int, budget_bytes: int
) -> Iterator[_Choice]:
    stacks = find_stacks(inventory)
    layers = [layer for stack in stacks for layer in stack.layers]
    in_layers = _by_layer(inventory, layers, movable)
    outside = outside_units(inventory, movable, stacks)
    order = {name: index for index, name in enumerate(inventory.modules)}
    for roles in _role_sets(in_layers):
        drafts = [_draft(layer, in_layers[layer], roles) for layer in layers]
        units = [draft for draft in drafts if draft.storages]
        for extra in ([], outside) if outside else ([],):
            every = sorted([*units, *extra], key=lambda draft: order[draft.anchor])
            for num_slots in (_PREFERRED_SLOTS, 1):
                if len(every) >= num_slots:
                    yield _thin_out(every, num_slots, base_bytes, budget_bytes)


def _thin_out(drafts: Sequence[UnitDraft], num_slots: int, base_bytes: int, budget_bytes: int) -> _Choice:
    """Keep as many of ``drafts`` resident as the budget allows, those that stay in the pipe evenly spaced.

    If nothing fits, all of them: through one slot no choice needs less, and that is the minimum to report.
    """
    low, high = num_slots, len(drafts)
    while low < high:
        middle = (low + high) // 2
        if _cost(_spaced(drafts, middle), num_slots, base_bytes).device_bytes <= budget_bytes:
            high = middle
        else:
            low = middle + 1
    return _cost(_spaced(drafts, low), num_slots, base_bytes)


def _spaced(drafts: Sequence[UnitDraft], count: int) -> list[UnitDraft]:
    # The gap comes after the last one: what its slot needs next is then copied beside the compute that remains.
    return [drafts[index * len(drafts) // count] for index in range(count)]


def _cost(drafts: Sequence[UnitDraft], num_slots: int, base_bytes: int) -> _Choice:
    moved = sum(s.num_bytes for draft in drafts for s in draft.storages)
    slots = sum(max(draft.num_bytes for draft in drafts[slot::num_slots]) for slot in range(num_slots))
    return _Choice(tuple(drafts), num_slots, base_bytes - moved + slots)


def _by_layer(
    inventory: Inventory, layers: Sequence[str], movable: Sequence[StorageInfo]
) -> dict[str, dict[str, StorageInfo]]:
    """Per layer: role (the name inside the layer) -> storage."""
    names = {s.name for s in movable}
    return {
        layer: {s.name.removeprefix(layer + "."): s for s in inventory.under(layer) if s.name in names}
        for layer in layers
    }


def _role_sets(in_layers: dict[str, dict[str, StorageInfo]]) -> Iterator[frozenset[str]]:
    totals: dict[str, int] = {}
    for roles in in_layers.values():
        for role, storage in roles.items():
            totals[role] = totals.get(role, 0) + storage.num_bytes
    ordered = sorted(totals, key=lambda role: (-totals[role], role))
    # Beyond the ten largest, roles move together: they add choices but hardly any bytes.
    atoms = [frozenset({role}) for role in ordered[: _MAX_ROLES - 1]]
    if ordered[_MAX_ROLES - 1 :]:
        atoms.append(frozenset(ordered[_MAX_ROLES - 1 :]))
    for count in range(len(atoms) + 1):  # none at all, too: what lies outside the layers may be enough
        for chosen in combinations(atoms, count):
            yield frozenset().union(*chosen)


def _draft(layer: str, roles: dict[str, StorageInfo], chosen: frozenset[str]) -> UnitDraft:
    return UnitDraft(layer, tuple(storage for role, storage in roles.items() if role in chosen))


def _too_small(budget_bytes: int, minimum: int, inventory: Inventory) -> str:
    return (
        f"a budget of {format_gib(budget_bytes)} ({budget_bytes} bytes) is too small: this model's weights are "
        f"{format_gib(inventory.num_bytes)} and with everything offloaded penstock still needs {format_gib(minimum)} "
        f"({minimum} bytes) for residents and slots; use --device-memory {-(-minimum // 2**20)}MiB or more"
    )
