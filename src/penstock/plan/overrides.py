"""Offload rules -> a mechanism per storage. Of several rules that match a storage the first counts.

The order is llama.cpp's for ``--override-tensor``. What makes no sense is refused and not silently without effect: a
rule that matches nothing, one that earlier rules leave nothing to, and one that no plan can obey.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from penstock.config import Mechanism, Rule
from penstock.errors import RuleError, warn_user
from penstock.model.inventory import Inventory, StorageInfo
from penstock.model.patterns import matching
from penstock.plan.layers import draft_units, stranded, why_stranded

__all__ = ["settle_rules", "some_names", "warn_of_stranded"]

_NAMES_SHOWN = 3


def settle_rules(
    inventory: Inventory, rules: Sequence[Rule], unstreamable: Collection[str] = ()
) -> dict[str, Mechanism]:
    """The mechanism of every storage that a rule matches, by its name, in model order.

    What cannot leave the device is resident; a warning per rule names it.

    Args:
        inventory: of the model.
        rules: pairs of pattern and mechanism, the first match counts.
        unstreamable: storages that the files which are to be read from do not hold as they are, or not at all.

    Raises:
        SelectionError: a pattern matches nothing.
        RuleError: a rule can never apply, contradicts another one, or cannot be obeyed for anything it settles.
    """
    owners: dict[str, int] = {}  # index of the first rule that matches a storage
    for index, (pattern, _) in enumerate(rules):
        matched = matching(inventory, pattern)
        left = matched - owners.keys()
        if not left:
            raise RuleError(_never_applies(rules, index, sorted({owners[name] for name in matched})))
        owners.update(dict.fromkeys(left, index))
    wanted = {s.name: rules[owners[s.name]][1] for s in inventory.storages if s.name in owners}
    reasons = _reasons_to_stay(inventory, wanted, unstreamable)
    for index, rule in enumerate(rules):
        mine = [name for name in wanted if owners[name] == index]
        stay = {name: reasons[name] for name in mine if name in reasons}
        if stay:
            message = (
                f"rule {_shown(rule)}: {len(stay)} of the {len(mine)} tensors that it settles ({_listed(list(stay))}) "
                f"cannot leave the device: {'; '.join(dict.fromkeys(stay.values()))}"
            )
            if len(stay) == len(mine):
                raise RuleError(message)
            warn_user(f"{message}. They stay resident")
    return {name: "resident" if name in reasons else mechanism for name, mechanism in wanted.items()}


def _never_applies(rules: Sequence[Rule], index: int, earlier: Sequence[int]) -> str:
    same = [other for other in earlier if rules[other][0] == rules[index][0]]
    if same and rules[same[0]][1] != rules[index][1]:
        return (
            f"rules {_shown(rules[same[0]])} and {_shown(rules[index])} contradict each other: one pattern has one "
            f"mechanism; leave one of them out"
        )
    settled = " and ".join(_shown(rules[other]) for other in earlier)
    return (
        f"rule {_shown(rules[index])} can never apply: all that it matches is settled by {settled} before it. The "
        f"first rule that matches counts: put the narrower one first, e.g. --offload-rule "
        f"'re:.*\\.layers\\.0\\..*=resident' mlp=prefetch"
    )


def _reasons_to_stay(
    inventory: Inventory, wanted: Mapping[str, Mechanism], unstreamable: Collection[str]
) -> dict[str, str]:
    """Why a storage that a rule would offload has to stay, by its name."""
    moving = [s for s in inventory.storages if wanted.get(s.name) == "prefetch"]
    placed = {storage.name for draft in draft_units(inventory, moving) for storage in draft.storages}
    shared = "several modules share it or its module runs around other units"
    why = {s.name: shared for s in moving if s.name not in placed}
    why |= {s.name: why_stranded(inventory, s) for s in stranded(inventory, moving, placed)}
    reasons = {name: f"no unit can hold it, because {reason} (uva would do)" for name, reason in why.items()}
    for name, mechanism in wanted.items():
        if mechanism != "resident" and name in unstreamable:
            saved = inventory.by_name[name].is_saved
            what = "made or rearranged while loading" if saved else "a buffer that is not persistent, in no state dict,"
            reasons[name] = f"it is {what} and cannot be streamed from the files; use mode 'cpu' (--offload-mode cpu)"
    return reasons


def warn_of_stranded(inventory: Inventory, storages: Sequence[StorageInfo]) -> None:
    """Say that ``storages``, of :func:`penstock.plan.layers.stranded`, stay resident, and why, if there are any."""
    if storages:
        warn_user(
            f"{some_names([s.name for s in storages])}: cannot be prefetched, because "
            f"{why_stranded(inventory, storages[0])}. They stay resident; read them in place "
            f"(--offload-rule '{storages[0].name}=uva'), or hold them in a module whose forward reads them"
        )


def some_names(names: Sequence[str]) -> str:
    """How many tensors, and the first of their names."""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({_listed(names)})"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")


def _shown(rule: Rule) -> str:
    return "'" + "=".join(rule) + "'"
