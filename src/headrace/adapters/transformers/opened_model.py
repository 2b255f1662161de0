"""A model folder as the planner sees it: the model on ``meta``, matched with the headers of its files."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from headrace.adapters.transformers.conversion import Match, match
from headrace.adapters.transformers.load_folder import build_meta_model
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.checkpoint.weight_map import WeightMap
from headrace.config import Policy
from headrace.plan.build import Planner
from headrace.plan.cost_model import Rates
from headrace.plan.plan import Machine, Plan, assemble
from headrace.runtime.prepare import make_planner, not_in_files
from headrace.stores.sources import DiskOptions

__all__ = ["OpenedModel", "no_collections", "open_model"]


@dataclass(frozen=True)
class OpenedModel:
    """A model on ``meta`` with what is known about its weights; ``module`` has no data."""

    folder: Path
    module: PreTrainedModel
    match: Match

    @property
    def weights(self) -> WeightMap:
        """Where the files hold the tensors of the model."""
        return self.match.weights

    @property
    def name(self) -> str:
        """The name of the folder, as the model's name in output."""
        return self.folder.absolute().name

    def planner(self, device: torch.device, rates: Rates | None = None, disk: DiskOptions | None = None) -> Planner:
        """The planner for this model on ``device``, with ``rates`` instead of those of this machine if given.

        ``disk``: how files are read.
        """
        # Not take_inventory(): the checkpoint may hold different values for tied tensors, and match() cut these ties.
        inventory = self.match.inventory
        fixed = not_in_files(inventory, self.weights)
        return make_planner(self.module, inventory, device, self.weights, rates, fixed, disk)

    def plan(self, planner: Planner, policy: Policy | Plan | None, machine: Machine) -> Plan:
        """The plan for ``policy``; ``None`` keeps every tensor resident; a finished plan is compared with the model.

        Raises:
            OptionError: an impossible plan; a plan for another model, or for another machine than ``machine``.
        """
        if isinstance(policy, Plan):
            policy.check(self.match.inventory)
            policy.check_machine(machine)
            return policy
        if policy is None:
            return assemble(self.match.inventory, [], 0, planner.default_mode)
        with no_collections():
            return replace(planner.plan(policy), model_name=self.name, made_for=machine)


def open_model(folder: Path) -> OpenedModel:
    """Read config and file headers of a model.

    Raises:
        CheckpointError: not a folder, or without a config or safetensors files that fit together.
    """
    with no_collections():
        module = build_meta_model(folder)
        return OpenedModel(folder, module, match(module, Checkpoint.open(folder)))


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage collection of cycles within the block."""
    # A large checkpoint makes 46,000 tensors. They would trigger many collections, each over all objects of torch.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
