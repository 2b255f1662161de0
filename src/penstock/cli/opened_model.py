"""MODEL on the command line: a folder with config.json and safetensors files, opened without reading weights."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import Budget, Policy
from penstock.errors import BudgetError, OptionError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from penstock.adapters.transformers.conversion import Match
    from penstock.checkpoint.weight_map import WeightMap
    from penstock.model.inventory import Inventory
    from penstock.plan.build import Planner
    from penstock.plan.cost_model import Rates
    from penstock.plan.plan import Machine, Plan
    from penstock.stores.file_reader import DiskOptions

__all__ = ["OpenedModel", "minimum_bytes", "no_collections", "open_model", "require_causal_lm"]


@dataclass(frozen=True)
class OpenedModel:
    """A model on ``meta`` with what is known about its weights; ``module`` has no data."""

    folder: Path
    module: PreTrainedModel
    match: Match

    @property
    def inventory(self) -> Inventory:
        """Of the model as its checkpoint wants it, which may undo a tie."""
        return self.match.inventory

    @property
    def weights(self) -> WeightMap:
        """Where the files hold the tensors of the model."""
        return self.match.weights

    @property
    def name(self) -> str:
        """What the user calls it: the name of the folder."""
        return self.folder.absolute().name

    def planner(self, device: torch.device, rates: Rates | None = None, disk: DiskOptions | None = None) -> Planner:
        """The planner for this model on ``device``, with ``rates`` instead of those of this machine if given.

        ``disk``: how files are read.
        """
        from penstock.runtime.prepare import make_planner, not_in_files

        fixed = not_in_files(self.inventory, self.weights)
        return make_planner(self.module, self.inventory, device, self.weights, rates, fixed, disk)

    def plan(self, planner: Planner, policy: Policy | Plan | None, machine: Machine) -> Plan:
        """The plan for ``policy``; ``None`` keeps every tensor resident; a finished plan is compared with the model.

        Raises:
            OptionError: a plan that cannot be; a plan for another model, or for another machine than ``machine``.
        """
        from penstock.plan.plan import Plan, assemble

        if isinstance(policy, Plan):
            policy.check(self.inventory)
            policy.check_machine(machine)
            return policy
        if policy is None:
            return assemble(self.inventory, [], 0, planner.default_mode)
        with no_collections():
            return replace(planner.plan(policy), model_name=self.name, made_for=machine)


def minimum_bytes(planner: Planner) -> int:
    """The smallest ``--device-memory`` for which a plan exists."""
    try:
        return planner.plan(Budget(1)).device_bytes
    except BudgetError as error:
        return error.minimum_bytes


def open_model(model: str) -> OpenedModel:
    """Read config and file headers of the folder ``model``.

    Raises:
        CheckpointError: not a folder, or without a config or safetensors files that fit together.
    """
    from penstock.adapters.transformers import build_meta_model
    from penstock.adapters.transformers.conversion import match
    from penstock.checkpoint.safetensors_header import Checkpoint

    try:
        folder = Path(model).expanduser()
    except RuntimeError as error:
        raise OptionError(
            f"MODEL {model!r}: user {os.geteuid()} has no home folder for ~ to stand for; write the whole path"
        ) from error
    with no_collections():
        module = build_meta_model(folder)
        return OpenedModel(folder, module, match(module, Checkpoint.open(folder)))


@contextmanager
def no_collections() -> Iterator[None]:
    """Within, Python looks for no cycles: 46,000 tensors set that off time and again, and each walks all of torch."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def require_causal_lm(module: PreTrainedModel) -> None:
    """Refuse models that cannot go on from a text."""
    config: Any = module.config
    generates: Any = getattr(module, "can_generate", lambda: False)
    if not generates() or getattr(config, "is_encoder_decoder", False):
        raise OptionError(
            f'penstock generate needs a causal language model (architectures ["...ForCausalLM"] in config.json), found '
            f"{type(module).__name__}"
        )
