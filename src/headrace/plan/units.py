"""How a model is cut into units, and how a policy without a budget chooses them: the group rule, offload rules, limits.

Hooks of a unit's module wait for the unit and release it. So this module is called (it has a forward of its own), every
path to the unit's tensors leads through it, and no module of a unit runs inside that of another.

Of several offload rules that match a storage the first counts: the order of llama.cpp's ``--override-tensor``. Refused
are a rule that matches nothing, one that earlier rules leave nothing to, and one that no plan can obey.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from headrace.config import Mechanism, Prefetch, Rule
from headrace.errors import RuleError, SelectionError, warn_user
from headrace.formatting import listed
from headrace.model.layers import MIN_PART_BYTES, are_apart, called_within, find_layers, weights_of
from headrace.model.patterns import matching, select
from headrace.model.records import Inventory, StorageInfo, common_prefix
from headrace.model.semantic_groups import semantic_groups
from headrace.plan.cached_experts import why_not_cached
from headrace.plan.plan import Plan, UnitSpec, assemble, with_code
from headrace.plan.schedule import usable_slots
from headrace.plan.slabs import slab_bytes

# Norms, biases and scales: together a thousandth of a layer, but each would cost a copy of its own.
TINY_BYTES = 64 * 2**10


# Tensors of adapters by the names that PEFT's methods give them (lora_A.default.weight): a hundredth of a model, and
# exchanged while it is offloaded.
_ADAPTER = re.compile(r"(?:.*\.)?(?:lora|ia3|hada|lokr|oft|boft|vera|vblora|fourierft|hra|bone|miss|randlora)_.*")


def group_rule(num_layers: int, group_size: int, num_in_group: int) -> list[int]:
    """Indices of the layers that are offloaded: of every ``group_size``, the last ``num_in_group``."""
    return [index for index in range(num_layers) if index % group_size >= group_size - num_in_group]


def worth_moving(storages: Iterable[StorageInfo]) -> list[StorageInfo]:
    """Offloaded by default: storages that hold weights, are not tiny and are no adapter's."""
    large = (s for s in weights_of(storages) if s.num_bytes >= TINY_BYTES)
    return [s for s in large if not _ADAPTER.fullmatch(s.name)]


def outside_units(inventory: Inventory, candidates: Sequence[StorageInfo], layers: Collection[str]) -> list[UnitSpec]:
    """Units for candidates outside ``layers`` (those that have units themselves): for example an untied lm_head.

    Each is hooked on the innermost module that every path to it leads through and that is called. Left out, hence
    resident: what no module but the root is called around, and what would be hooked inside or around another unit's
    module, since one would be overwritten while it is read.
    """
    inside = {storage.name for layer in layers for storage in inventory.under(layer)}
    specs: dict[str, list[StorageInfo]] = {}
    for storage in candidates:
        around = common_prefix([inventory.dominators(module) for module in storage.modules])
        # Not at the root, whose name is empty: every other unit would run inside it.
        fqn = next((name for name in reversed(around) if name not in inventory.uncalled), None)
        if fqn and storage.name not in inside:
            specs.setdefault(fqn, []).append(storage)
    outer = {name for fqn in (*layers, *specs) for name in inventory.ancestors(fqn)}
    return [
        UnitSpec(fqn, tuple(storages))
        for fqn, storages in specs.items()
        if fqn not in outer and inventory.ancestors(fqn).isdisjoint(layers)
    ]


def specs_at(inventory: Inventory, fqns: Iterable[str], wanted: Collection[str]) -> list[UnitSpec]:
    """A unit at each of the modules ``fqns`` that alone leads to any of the storages ``wanted`` (by name)."""
    specs = (UnitSpec(fqn, tuple(s for s in inventory.under(fqn) if s.name in wanted)) for fqn in fqns)
    return [spec for spec in specs if spec.storages]


def unit_specs(inventory: Inventory, storages: Sequence[StorageInfo]) -> list[UnitSpec]:
    """``storages`` as one unit per layer, and per module outside the layers, in order of execution.

    Left out: what several layers share, and what :func:`outside_units` leaves out.
    """
    wanted = {storage.name for storage in storages}
    specs = specs_at(inventory, find_layers(inventory), wanted)
    specs += outside_units(inventory, storages, [spec.module_fqn for spec in specs])
    order = {name: index for index, name in enumerate(inventory.modules)}
    return sorted(specs, key=lambda spec: order[spec.module_fqn])


def stranded(inventory: Inventory, candidates: Iterable[StorageInfo], placed: Collection[str]) -> list[StorageInfo]:
    """Storages of ``candidates`` not ``placed`` in units (by name) that modules without a forward hold."""
    return [s for s in candidates if s.name not in placed and not inventory.containers.isdisjoint(s.modules)]


def why_unreachable(inventory: Inventory, storage: StorageInfo) -> str:
    """Why no unit can hold a tensor of :func:`stranded`; goes on after "because"."""
    holder = min(inventory.containers & storage.modules)
    return (
        f"{holder or 'the model'} ({inventory.modules[holder]}), which holds it, has no forward before which it could "
        f"be waited for, and the one around it is the model itself or runs around other units"
    )


def split_by_part(inventory: Inventory, layers: Sequence[UnitSpec]) -> list[UnitSpec]:
    """Each of ``layers`` as one unit per child that holds any of its storages, in the order of the children.

    Part i of a layer then shares its slots with part i of the others. So all of them have to have as many parts, each
    with a forward, none of these tiny, and nothing that belongs to two; otherwise the layers are not split.
    """
    every: list[UnitSpec] = []
    counts = set()
    for layer in layers:
        parts = specs_at(inventory, inventory.children(layer.module_fqn), {storage.name for storage in layer.storages})
        counts.add(len(parts))
        every += parts
    # A tensor of a layer itself, or one that two children share, would belong to no part.
    num_storages = sum(len(layer.storages) for layer in layers)
    apart = are_apart(inventory, {part.module_fqn: part.storages for part in every}, num_storages)
    large = all(slab_bytes(s.num_bytes for s in part.storages) >= MIN_PART_BYTES for part in every)
    can_split = len(counts) == 1 and apart and large and inventory.uncalled.isdisjoint(p.module_fqn for p in every)
    return every if can_split else list(layers)


# -- offload rules -----------------------------------------------------------------------------------------------------


def resolve_rules(
    inventory: Inventory,
    rules: Sequence[Rule],
    unstreamable: Collection[str] = (),
    refused: Mapping[str, str] | None = None,
) -> dict[str, Mechanism]:
    """The mechanism of every storage that a rule matches, by its name, in model order.

    What cannot leave the device is resident; a warning per rule names it.

    Args:
        inventory: inventory of the model.
        rules: pairs of pattern and mechanism, the first match counts.
        unstreamable: storages whose bytes are not in the files that are read, or not unchanged.
        refused: storages that cannot be read in place, each with the reason; it follows the name.

    Raises:
        SelectionError: a pattern matches nothing.
        RuleError: a rule can never apply, or no plan can carry it out for any of its storages.
    """
    owners: dict[str, int] = {}  # index of the first rule that matches a storage
    for index, (pattern, _) in enumerate(rules):
        matched = matching(inventory, pattern)
        left = matched - owners.keys()
        if not left:
            earlier = " and ".join(_shown(rules[other]) for other in sorted({owners[name] for name in matched}))
            raise RuleError(
                f"rule {_shown(rules[index])} can never apply: all that it matches is matched by {earlier} before it. "
                f"The first rule that matches counts: put the narrower one first, e.g. --offload-rule "
                f"'re:.*\\.layers\\.0\\..*=resident' mlp=prefetch"
            )
        owners.update(dict.fromkeys(left, index))
    wanted = {s.name: rules[owners[s.name]][1] for s in inventory.storages if s.name in owners}
    reasons = _reasons_to_stay(inventory, wanted, unstreamable, refused or {})
    for index, rule in enumerate(rules):
        mine = [name for name in wanted if owners[name] == index]
        stay = {name: reasons[name] for name in mine if name in reasons}
        if stay:
            message = (
                f"rule {_shown(rule)}: {len(stay)} of the {len(mine)} tensors that it decides ({listed(stay)}) "
                f"cannot leave the device: {'; '.join(dict.fromkeys(stay.values()))}"
            )
            if len(stay) == len(mine):
                raise RuleError(message)
            warn_user(f"{message}. They stay resident")
    return {name: "resident" if name in reasons else mechanism for name, mechanism in wanted.items()}


def _reasons_to_stay(
    inventory: Inventory,
    wanted: Mapping[str, Mechanism],
    unstreamable: Collection[str],
    refused: Mapping[str, str],
) -> dict[str, str]:
    """Why a storage that a rule would offload has to stay, by its name."""
    moving = [s for s in inventory.storages if wanted.get(s.name) == "prefetch"]
    placed = {storage.name for spec in unit_specs(inventory, moving) for storage in spec.storages}
    shared = "several modules share it or its module runs around other units"
    why = {s.name: shared for s in moving if s.name not in placed}
    why |= {s.name: why_unreachable(inventory, s) for s in stranded(inventory, moving, placed)}
    reasons = {name: f"no unit can hold it, because {reason} (uva would do)" for name, reason in why.items()}
    cached = {name for name, mechanism in wanted.items() if mechanism == "cache"}
    not_cached = why_not_cached(inventory, cached) if cached else {}
    for name, mechanism in wanted.items():
        if mechanism == "cache" and name in not_cached:
            reasons[name] = f"a cache of experts cannot hold it: {not_cached[name]} (uva would do)"
        if mechanism == "uva" and name in refused:
            reasons[name] = f"a tensor that {refused[name]} cannot be read in place (prefetch would do)"
        if mechanism != "resident" and name in unstreamable:
            saved = inventory.by_name[name].is_saved
            what = "made or rearranged while loading" if saved else "a buffer that is not persistent, in no state dict,"
            reasons[name] = f"it is {what} and cannot be streamed from the files; use mode 'cpu' (--offload-mode cpu)"
    return reasons


def warn_of_stranded(inventory: Inventory, storages: Sequence[StorageInfo]) -> None:
    """Warn that ``storages``, of :func:`stranded`, stay resident, and why; no effect if there are none."""
    if storages:
        warn_user(
            f"{listed((s.name for s in storages), 'tensor')}: cannot be prefetched, because "
            f"{why_unreachable(inventory, storages[0])}. They stay resident; read them in place "
            f"(--offload-rule '{storages[0].name}=uva'), or hold them in a module whose forward reads them"
        )


def _shown(rule: Rule) -> str:
    return "'" + "=".join(rule) + "'"


# -- plans without a budget --------------------------------------------------------------------------------------------


def plan_group_rule(
    inventory: Inventory,
    policy: Prefetch,
    stacks: Sequence[Sequence[str]],
    in_place: Callable[[StorageInfo], bool] = lambda storage: False,
    *,
    by_part: bool = False,
    candidates: Sequence[StorageInfo] | None = None,
) -> Plan:
    """The plan of the group rule over stacks of layers, each given by its dotted names in order.

    Args:
        inventory: inventory of the model.
        policy: the group rule.
        stacks: stacks of layers that it counts.
        in_place: whether a candidate is read in place, because it is in no layer of these stacks.
        by_part: copy the parts of a layer (attention, feed-forward) one by one, each into a slot of its own, in the
            same device memory: a part can be refilled while the next computes.
        candidates: storages that may move; default those that ``policy`` selects.
    """
    candidates = selected(inventory, policy.params) if candidates is None else candidates
    if not candidates:
        raise _all_tiny("copied", "--offload-params")
    uva = [s for s in candidates if in_place(s)]
    chosen = {s.name for s in candidates} - {s.name for s in uva}
    layers: list[UnitSpec] = []
    for stack in stacks:
        for index in group_rule(len(stack), policy.group_size, policy.num_in_group):
            layers += specs_at(inventory, called_within(inventory, stack[index]), chosen)
    fqns = [fqn for stack in stacks for layer in stack for fqn in called_within(inventory, layer)]
    within = {s.name for fqn in fqns for s in inventory.under(fqn)}
    warn_of_stranded(inventory, stranded(inventory, (s for s in candidates if s.name in chosen), within))
    if not layers and not uva:
        raise SelectionError(
            f"group rule {policy.group_size}/{policy.num_in_group} selects none of the {sum(map(len, stacks))} layers' "
            f"tensors; lower --offload-group-size or widen --offload-params"
        )
    reached = {s.name for spec in layers for s in spec.storages} | {s.name for s in uva}
    for pattern in policy.params:
        if matching(inventory, pattern).isdisjoint(reached):
            warn_user(
                f"pattern {pattern!r} selects nothing in the layers that the group rule offloads; what it names stays "
                f"resident (a budget, --device-memory, can also offload modules outside the layers)"
            )
    # The flag counts layers; with parts every layer's slot becomes one per part.
    num_slots = usable_slots(policy.prefetch_step, len(layers))
    units = split_by_part(inventory, layers) if by_part else layers
    plan = assemble(inventory, units, num_slots * len(units) // max(1, len(layers)), policy.mode, uva=uva)
    return with_code(plan, inventory, policy.codec)


def move_on_demand(inventory: Inventory, plan: Plan, num_slots: int = 1) -> Plan:
    """``plan`` with everything it reads in place moved into slots instead, for devices that cannot address the host.

    A storage joins the unit of the layer that reads it, or becomes one of the module that does.
    """
    if not plan.uva:
        return plan
    wanted = set(plan.offloaded_names)
    moving = [storage for storage in inventory.storages if storage.name in wanted]
    specs = unit_specs(inventory, moving)
    warn_of_stranded(inventory, stranded(inventory, moving, {s.name for spec in specs for s in spec.storages}))
    # A storage that joins a unit has the unit's store.
    places = {unit.module_fqn: unit.store for unit in plan.units}
    stores = [replace(spec, store=places.get(spec.module_fqn)) for spec in specs]
    # A plan that read everything in place had no slot.
    return assemble(inventory, stores, plan.num_slots or min(num_slots, len(stores)), plan.mode)


def selected(inventory: Inventory, params: Sequence[str]) -> list[StorageInfo]:
    """The storages that the name patterns ``params`` select; without any, those worth moving."""
    return select(inventory, params) if params else worth_moving(inventory.storages)


def _all_tiny(how: str, flag: str) -> SelectionError:
    return SelectionError(
        f"nothing can be {how}: no parameter of this model has 64 KiB or more; name smaller ones with {flag}, or leave "
        f"the model resident"
    )


def read_in_place(
    inventory: Inventory,
    candidates: Sequence[StorageInfo],
    limit_bytes: int | None,
    refused: Mapping[str, str] | None = None,
) -> list[StorageInfo]:
    """Candidates that fit into ``limit_bytes``, without those ``refused`` (name -> reason).

    A token needs a few experts but all dense weights, so experts are the cheapest to read in place and come first.
    """
    if stay := [s.name for s in candidates if s.name in (refused or {})]:
        message = f"{listed(stay, 'tensor')} cannot be read in place: {stay[0]} {(refused or {})[stay[0]]}"
        candidates = [s for s in candidates if s.name not in stay]
        if not candidates:
            raise SelectionError(f"{message}; prefetch them instead (--offload-backend prefetch)")
        warn_user(f"{message}. They stay resident")
    if not candidates:
        raise _all_tiny("read in place", "--cpu-offload-params")
    experts = semantic_groups(inventory)["experts"]
    chosen: list[StorageInfo] = []
    left = sum(s.num_bytes for s in candidates) if limit_bytes is None else limit_bytes
    # A stable sort: within both kinds the order is that of the model.
    for storage in sorted(candidates, key=lambda storage: storage.name not in experts):
        if storage.num_bytes <= left:
            chosen.append(storage)
            left -= storage.num_bytes
    if not chosen:
        smallest = min(s.num_bytes for s in candidates)
        raise SelectionError(
            f"a limit of {limit_bytes} bytes offloads nothing: the smallest candidate has {smallest} bytes; raise "
            f"--cpu-offload-gb or select other names"
        )
    return chosen
