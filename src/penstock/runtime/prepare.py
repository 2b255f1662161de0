"""What every entry point does with a plan before it is carried out, so that none leaves out a check."""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.env import pin_memory_disabled, uva_disabled
from penstock.model.inventory import Inventory
from penstock.plan import Plan, move_on_demand
from penstock.ranks.peers import Peers
from penstock.runtime.limits import describe_device
from penstock.runtime.parts import splits_units

__all__ = ["can_read_in_place", "settle_plan"]


def can_read_in_place(device: torch.device) -> bool:
    """Whether compute on ``device`` may address host memory; memory that is not pinned has no address on a GPU."""
    return device.type != "cuda" or not (uva_disabled() or pin_memory_disabled())


def settle_plan(plan: Plan, inventory: Inventory, device: torch.device, peers: Peers | None, made_here: bool) -> Plan:
    """``plan`` checked against the model and the machine, in the form that this machine can carry out.

    Args:
        made_here: the plan was made from a policy on this machine, and is bound to it from now on.

    Raises:
        OptionError: a plan for another model or machine.
    """
    here = describe_device(device)
    plan.check(inventory)
    plan.check_machine(here)
    made_for = here if made_here else plan.made_for
    split = splits_units(plan, peers)  # and then no rank has a whole tensor to read in place
    num_ranks = peers.size if peers is not None and split else 1
    if split or not can_read_in_place(device):
        plan = replace(move_on_demand(inventory, plan), model_name=plan.model_name, made_for=plan.made_for)
    if (made_for, num_ranks) == (plan.made_for, plan.num_ranks):
        return plan
    return replace(plan, made_for=made_for, num_ranks=num_ranks)
