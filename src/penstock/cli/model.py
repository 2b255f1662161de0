"""MODEL on the command line: a folder with config.json and safetensors files, opened without reading weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import Policy
from penstock.errors import BudgetError, CheckpointError, OptionError

if TYPE_CHECKING:
    from torch import nn

    from penstock.inventory import Inventory
    from penstock.plan import Plan
    from penstock.store.disk import DiskOptions
    from penstock.weights import WeightMap

__all__ = ["OpenedModel", "open_model", "require_causal_lm", "require_writable"]


@dataclass(frozen=True)
class OpenedModel:
    """A model on ``meta`` with what is known about its weights; ``module`` has no data."""

    folder: Path
    module: nn.Module
    inventory: Inventory
    weights: WeightMap

    def plan(self, policy: Policy | None) -> Plan:
        """The plan for ``policy``, all tensors resident for ``None``; offloaded tensors are found in the files.

        Raises:
            OptionError, CheckpointError: a plan that cannot be carried out.
        """
        from penstock.plan import build_plan
        from penstock.plan.model import assemble

        if policy is None:
            return assemble(self.inventory, [], 0, "disk")
        plan = build_plan(self.inventory, policy, "disk")
        if plan.mode != "meta":
            for storage in self.inventory.storages:
                if plan.mechanism_of(storage.name) != "resident":
                    self.weights.source(storage)
        return plan

    def minimum_bytes(self) -> int:
        """The smallest ``--device-memory`` for which a plan exists."""
        from penstock.config import Budget
        from penstock.plan import build_plan

        try:
            return build_plan(self.inventory, Budget(1), "disk").device_bytes
        except BudgetError as error:
            return error.minimum_bytes

    def check_files(self, options: DiskOptions) -> None:
        """Open the weight files in the way ``options`` ask for, which the file system may refuse; reads nothing."""
        from penstock.store.disk import DiskStore

        DiskStore(dict(self.weights.sources), options).close()


def open_model(model: str) -> OpenedModel:
    """Read config and file headers of the folder ``model``.

    Raises:
        CheckpointError: not a folder, or without a config or safetensors files.
    """
    folder = _folder(model)
    from penstock.adapters.transformers import build_meta_model, weight_map
    from penstock.checkpoint import Checkpoint
    from penstock.inventory import take_inventory

    checkpoint = Checkpoint.open(folder)
    module = build_meta_model(folder)
    return OpenedModel(folder, module, take_inventory(module), weight_map(module, checkpoint))


def _folder(model: str) -> Path:
    folder = Path(model).expanduser()
    if not folder.is_dir():
        found = "a file" if folder.exists() else "no such folder"
        raise CheckpointError(
            f"MODEL {model!r}: expected a folder with config.json and safetensors files, found {found}; penstock "
            f"downloads nothing: fetch it first, e.g. `hf download NAME --local-dir FOLDER`"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"MODEL {model!r}: expected a config.json in the folder, found none; give the folder that "
            f"model.save_pretrained(FOLDER) or a download wrote"
        )
    return folder


def require_causal_lm(module: nn.Module) -> None:
    """Refuse models that cannot go on from a text."""
    config: Any = module.config
    generates: Any = getattr(module, "can_generate", lambda: False)
    if not generates() or getattr(config, "is_encoder_decoder", False):
        raise OptionError(
            f"penstock generate needs a causal language model (architectures [\"...ForCausalLM\"] in config.json), found "
            f"{type(module).__name__}"
        )


def require_writable(path: Path, flag: str) -> None:
    """Refuse an output file that cannot be written, before hours of work go into it."""
    if not path.parent.is_dir() or path.is_dir():
        raise OptionError(f"{flag} {str(path)!r}: expected a file name in a folder that exists")
