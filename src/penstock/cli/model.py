"""MODEL on the command line: a folder with config.json and safetensors files, opened without reading weights."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import Budget, Policy
from penstock.errors import BudgetError, OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from penstock.inventory import Inventory
    from penstock.plan import Plan
    from penstock.store.disk import DiskOptions
    from penstock.weights import WeightMap

__all__ = ["OpenedModel", "open_model", "require_causal_lm", "require_writable"]


@dataclass(frozen=True)
class OpenedModel:
    """A model on ``meta`` with what is known about its weights; ``module`` has no data."""

    folder: Path
    module: PreTrainedModel
    inventory: Inventory
    weights: WeightMap

    @property
    def name(self) -> str:
        """What the user calls it: the name of the folder."""
        return self.folder.absolute().name

    def plan(self, policy: Policy | Plan | None) -> Plan:
        """The plan for ``policy``; ``None`` keeps every tensor resident; a finished plan is compared with the model.

        Raises:
            OptionError: a plan that cannot be; a plan for another model or machine.
        """
        import torch

        from penstock.adapters.transformers import plan_for
        from penstock.limits import describe_device
        from penstock.plan.model import Plan, assemble

        if isinstance(policy, Plan):
            policy.check(self.inventory)
            policy.check_machine(describe_device(torch.device("cpu")))
            return policy

        if policy is None:
            return assemble(self.inventory, [], 0, "disk")
        with _no_collections():
            return plan_for(self.module, self.weights, policy)

    def save(self, plan: Plan, path: Path) -> None:
        """Write ``plan`` as one for this model on the device that the command line computes on."""
        import torch

        from penstock.limits import describe_device

        replace(plan, model_name=self.name, made_for=describe_device(torch.device("cpu"))).save(path)

    def minimum_bytes(self) -> int:
        """The smallest ``--device-memory`` for which a plan exists."""
        try:
            return self.plan(Budget(1)).device_bytes
        except BudgetError as error:
            return error.minimum_bytes

    def check_files(self, options: DiskOptions) -> None:
        """Open the weight files in the way ``options`` ask for, which the file system may refuse; reads nothing."""
        from penstock.store.disk import DiskStore

        DiskStore(dict(self.weights.sources), options).close()


def open_model(model: str) -> OpenedModel:
    """Read config and file headers of the folder ``model``.

    Raises:
        CheckpointError: not a folder, or without a config or safetensors files that fit together.
    """
    from penstock.adapters.transformers import build_meta_model, weight_map
    from penstock.checkpoint import Checkpoint
    from penstock.inventory import take_inventory

    folder = Path(model).expanduser()
    with _no_collections():
        module = build_meta_model(folder)
        weights = weight_map(module, Checkpoint.open(folder))
        # After the weights: a checkpoint may undo a tie.
        return OpenedModel(folder, module, take_inventory(module), weights)


@contextmanager
def _no_collections() -> Iterator[None]:
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


def require_writable(path: Path, flag: str) -> None:
    """Refuse an output file that cannot be written, before hours of work go into it."""
    if not path.parent.is_dir() or path.is_dir():
        raise OptionError(f"{flag} {str(path)!r}: expected a file name in a folder that exists")
