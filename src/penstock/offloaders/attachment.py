"""A plan in force on a model: tensors pointed at slots, files or host memory, hooks in place, copies running.

:class:`Attachment` is what the handle and the engines' offloaders have in common. Building one either succeeds or
leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

from penstock.config import debug_enabled
from penstock.errors import CheckpointError, ModelChangedError, OptionError
from penstock.inventory import Inventory, StorageInfo
from penstock.link.base import Link
from penstock.link.threads import ThreadLink
from penstock.offloaders.binding import BoundStorage, bind
from penstock.offloaders.hooks import UnitHook
from penstock.offloaders.pipeline import SlotPipeline
from penstock.plan.model import Plan
from penstock.store.base import Store, new_blob
from penstock.store.cpu import CpuStore
from penstock.store.disk import DiskOptions, DiskStore
from penstock.store.meta import MetaStore
from penstock.telemetry import Recorder, Stats
from penstock.weights import WeightMap

__all__ = ["Attachment", "Progress"]

Progress = Callable[[int, int], None]


class Attachment:
    """Executes ``plan`` on ``model`` until :meth:`remove`.

    Args:
        model: on a CPU or on ``meta``; tensors on ``meta`` are filled from ``weights``.
        plan: made from ``inventory``.
        inventory: of ``model`` as it is now.
        weights: the checkpoint; needed by mode ``disk`` and for tensors on ``meta``.
        disk: how checkpoint files are read.
        progress: called with (bytes loaded, bytes to load) while residents are read.
        link: moves the units; by default worker threads.

    Raises:
        CheckpointError, OptionError, TransferError: before the model is touched, or with everything undone.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        inventory: Inventory,
        *,
        weights: WeightMap | None = None,
        disk: DiskOptions | None = None,
        progress: Progress | None = None,
        link: Link | None = None,
    ) -> None:
        self.plan = plan
        self.recorder = Recorder()
        self._model = model
        self._weights = weights
        self._bound = bind(model, inventory.storages)
        self._hooks: list[UnitHook] = []
        self._module_hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._pipeline: SlotPipeline | None = None
        self._removed = False
        self._store = self._open_store(disk)
        try:
            self._load_residents(inventory, disk, progress or (lambda done, total: None))
            self._attach_units(link)
            for name in plan.uva:
                self._bound[name].point_at(self._store.in_place(name))
            self._guard_state_dict()
            self._prime()
        except BaseException:
            self._undo()
            raise
        if plan.mode != "cpu":
            for name in self._offloaded:
                self._bound[name].forget_original()

    def stats(self) -> Stats:
        """Counters since the offload began."""
        sizes = {
            "resident": self.plan.resident_bytes,
            "prefetch": self.plan.prefetched_bytes,
            "uva": self.plan.uva_bytes,
        }
        return Stats(tuple(self._pipeline.stats) if self._pipeline else (), sizes)

    def rewind(self) -> None:
        """Make the slots hold what the next forward needs first."""
        if self._pipeline is not None:
            self._pipeline.prime()

    def remove(self) -> None:
        """Give the model its tensors back, all resident, and everything else to the system. Idempotent."""
        if self._removed:
            return
        # Read everything first: if a file is gone the offload stays in force and nothing is lost.
        restored = {name: self._read(name) for name in self._offloaded if self._must_read(name)}
        self._detach()
        for name in self._offloaded:
            if name in restored:
                self._bound[name].point_at(restored[name])
            else:
                self._bound[name].restore()
        self._store.close()
        self._removed = True

    @property
    def _offloaded(self) -> list[str]:
        return [entry.storage for unit in self.plan.units for entry in unit.entries] + list(self.plan.uva)

    def _must_read(self, name: str) -> bool:
        if self.plan.mode == "meta":
            return False
        return self.plan.mode == "disk" or self._bound[name].on_meta

    def _read(self, name: str) -> torch.Tensor:
        blob = new_blob(self._bound[name].info.num_bytes)
        self._store.read(name, blob)
        return blob

    # -- building ---------------------------------------------------------------------------------------------------

    def _open_store(self, disk: DiskOptions | None) -> Store:
        offloaded = [self._bound[name] for name in self._offloaded]
        if self.plan.mode == "meta":
            return _meta_store(offloaded)
        if self.plan.mode == "cpu":
            return CpuStore({bound.info.name: self._host_bytes(bound) for bound in offloaded})
        store = DiskStore({bound.info.name: self._weights_or_error().source(bound.info) for bound in offloaded}, disk)
        _refuse_misaligned(self.plan.uva, self._bound, store)
        _compare_with_files(offloaded, store)
        return store

    def _host_bytes(self, bound: BoundStorage) -> torch.Tensor:
        if not bound.on_meta:
            return bound.original_bytes()
        blob = new_blob(bound.info.num_bytes)
        store = DiskStore({bound.info.name: self._weights_or_error().source(bound.info)})
        store.read(bound.info.name, blob)
        store.close()
        return blob

    def _weights_or_error(self) -> WeightMap:
        if self._weights is None:
            raise OptionError(
                "this offload reads weights from safetensors files, and none were given: pass checkpoint=FOLDER to "
                "penstock.offload (model.save_pretrained(FOLDER) or safetensors.torch.save_model writes one)"
            )
        return self._weights

    def _load_residents(self, inventory: Inventory, disk: DiskOptions | None, progress: Progress) -> None:
        missing = [s for s in inventory.storages if s.name in self.plan.resident and self._bound[s.name].on_meta]
        if self.plan.mode == "meta" or not missing:
            return
        total = sum(storage.num_bytes for storage in missing)
        done = 0
        loader = DiskStore({s.name: self._weights_or_error().source(s) for s in missing}, disk)
        for storage in missing:
            progress(done, total)
            blob = new_blob(storage.num_bytes)
            loader.read(storage.name, blob)
            self._bound[storage.name].point_at(blob)
            done += storage.num_bytes
        progress(done, total)
        loader.close()

    def _attach_units(self, link: Link | None) -> None:
        if not self.plan.units:
            return
        link = link or ThreadLink(recorder=self.recorder)
        self._pipeline = SlotPipeline(self.plan, self._store, link, self.recorder, debug_enabled())
        for unit in self.plan.units:
            memory = self._pipeline.slot_memory(unit.index)
            storages = [self._bound[entry.storage] for entry in unit.entries]
            for entry, bound in zip(unit.entries, storages, strict=True):
                bound.point_at(memory[entry.offset : entry.offset + entry.num_bytes])
            anchor = self._model.get_submodule(unit.anchor)
            self._hooks.append(UnitHook(anchor, unit.index, storages, self._pipeline))
        self._module_hooks.append(self._model.register_forward_hook(self._after_forward, always_call=True))

    def _prime(self) -> None:
        if self._pipeline is not None:
            self._pipeline.prime()

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            self.rewind()

    # -- state dict -------------------------------------------------------------------------------------------------

    def _guard_state_dict(self) -> None:
        """``state_dict()`` must give the weights and not what a slot happens to hold; loading must not be lost."""
        for module in self._owners(self._offloaded):
            for register, hook in (
                (module.register_state_dict_post_hook, partial(self._true_state)),
                (module.register_load_state_dict_pre_hook, _refuse_load),
            ):
                self._module_hooks.append(register(hook))  # type: ignore[no-untyped-call]

    def _owners(self, names: Iterable[str]) -> list[nn.Module]:
        owners = {owner for name in names for owner in self._bound[name].info.modules}
        return [self._model.get_submodule(owner) for owner in sorted(owners)]

    def _true_state(self, module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: object) -> None:
        for name in self._offloaded:
            for bound in self._bound[name].tensors:
                keys = [prefix + place.attr for holder, place in bound.places if holder is module and not place.inner]
                for key in keys:
                    if key in state and not bound.lost:
                        state[key] = bound.view_of(self._read(name))

    # -- taking apart -----------------------------------------------------------------------------------------------

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for handle in self._module_hooks:
            handle.remove()
        if self._pipeline is not None:
            self._pipeline.close()

    def _undo(self) -> None:
        self._detach()
        for bound in self._bound.values():
            bound.restore()
        self._store.close()


def _refuse_load(module: nn.Module, *args: object) -> None:
    raise ModelChangedError(
        "load_state_dict on an offloaded model would write into slots and be lost; call handle.remove() first, load, "
        "then offload again"
    )


def _meta_store(offloaded: list[BoundStorage]) -> MetaStore:
    for bound in offloaded:
        if not bound.on_meta:
            raise OptionError(
                f"mode 'meta' keeps no bytes, and {bound.info.name} has some; build the model under "
                f"torch.device('meta'), or use mode 'cpu' or 'disk'"
            )
    return MetaStore({bound.info.name: bound.info.num_bytes for bound in offloaded})


def _refuse_misaligned(names: Iterable[str], bound: dict[str, BoundStorage], store: DiskStore) -> None:
    """Rows copied out of a table are the same at any address; a matrix kernel may sum in another order."""
    for name in names:
        info: StorageInfo = bound[name].info
        address = store.in_place(name).data_ptr()
        itemsize = info.tensors[0].dtype.itemsize
        if address % (itemsize if info.is_lookup else 64):
            raise OptionError(
                f"{name} starts at an address of its file that is not a multiple of 64 bytes, so a matrix product that "
                f"reads it in place may round differently; prefetch it instead, or rewrite the checkpoint aligned"
            )


def _compare_with_files(offloaded: list[BoundStorage], store: DiskStore) -> None:
    """A live model's weights are about to be dropped in favour of the files': they must be the same."""
    for bound in offloaded:
        if bound.on_meta:
            continue
        blob = new_blob(bound.info.num_bytes)
        store.read(bound.info.name, blob)
        if not torch.equal(blob, bound.original_bytes()):
            raise CheckpointError(
                f"{bound.info.name}: the model's values differ from the checkpoint's; save the model first "
                f"(save_pretrained), or use mode 'cpu'"
            )
