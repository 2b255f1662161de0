"""New weights for a model inside an engine: its own code loads them, into host memory, and all are taken over at once.

An engine's loaders know how a checkpoint becomes the tensors of its model (fused, split over ranks, repacked), and
write to the tensors of the model. Those of an offload view slots. So while they run, each tensor views a copy of its
bytes in host memory; then :func:`headrace.lifetime.update.update` writes what the copies have to where the bytes are.
An error on the way there leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headrace.errors import ModelChangedError, OptionError, StateError
from headrace.lifetime.host_copies import HostCopies
from headrace.lifetime.parking import Lifetime
from headrace.lifetime.update import update


class NewWeights:
    """Copies of all tensors of a model, from the first new value to :meth:`take_over`."""

    def __init__(self, life: Lifetime, model: nn.Module, call: str) -> None:
        """``call``: of the engine, for messages.

        Raises:
            OptionError: weights are stored or read in a way that this cannot write.
            StateError: the weights are asleep.
            LimitError: the host has no room for the copies.
        """
        session = life.session
        if life.parked is not None:
            raise StateError(f'{call}: the weights are asleep; call wake_up(tags=["weights"]) first')
        if (why := _why_not(life)) is not None:
            raise OptionError(f"{call} is refused: {why}; nothing was changed. Start the engine with the new weights")
        self._life, self._model, self._call = life, model, call
        copies = HostCopies(life.device)
        copies.make_room({name: bound.info.num_bytes for name, bound in session._bound.items()}, f"copies for {call}")
        # By tensor: what it views while it is written. Of offloaded ones also the same bytes in host memory.
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._values: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, bound in session._bound.items():
                host = copies.bytes_of(name)
                if name in session.plan.resident:
                    host.copy_(bound.current_bytes())
                else:
                    session._store.read(name, host)
                written = host
                if life.device.type == "cuda":
                    from headrace.memory.pinned import device_view

                    written = device_view(host, life.device)
                for each in bound.tensors:
                    with torch.inference_mode(each.original.is_inference()):
                        self._views.append((each.tensor, each.view_of(written)))
                    self._values[each.name] = each.view_of(host)
            known = {id(tensor) for tensor, _ in self._views}
            self._others: list[tuple[torch.Tensor, torch.Tensor]] = []
            for tensor in (*model.parameters(), *model.buffers()):
                if id(tensor) not in known:
                    with torch.inference_mode(tensor.is_inference()):
                        self._others.append((tensor, tensor.data.clone()))

    @contextmanager
    def written(self) -> Iterator[None]:
        """Within, what writes to tensors of the model writes to the copies; no forward runs.

        Raises:
            ModelChangedError: the model has another tensor than before in some place, and has its own ones back.
        """
        dicts: list[dict[str, Any]] = [
            each for module in self._model.modules() for each in (vars(module), module._parameters, module._buffers)
        ]
        held = [{**each} for each in dicts]
        before = [(tensor, tensor.data) for tensor, _ in (*self._views, *self._others)]
        try:
            for tensor, view in (*self._views, *self._others):
                tensor.data = view
            yield
            if self._life.device.type == "cuda":
                torch.cuda.synchronize(self._life.device)  # the device writes to the copies, and the host reads them
            now = {id(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}
            if not now >= {id(tensor) for tensor, _ in before}:
                raise ModelChangedError(
                    f"{self._call}: the engine has put other tensors into the model; nothing was changed. Start the "
                    f"engine with the new weights"
                )
        except BaseException:
            for own, kept in zip(dicts, held, strict=True):
                own.clear()
                own.update(kept)
            raise
        finally:
            for tensor, data in before:
                tensor.data = data
            self._note_versions()

    def _note_versions(self) -> None:
        """Writes to the tensors until now were meant, and nothing is lost."""
        for bound in self._life.session._bound.values():
            for each in bound.tensors:
                each.note_version()

    def take_over(self) -> int:
        """Make what the copies have the weights of the model; returns bytes written.

        Raises:
            StateError: the device has failed in the middle; no forward runs until this is done again.
        """

        def write_others() -> None:
            for tensor, value in self._others:
                tensor.data.copy_(value)

        try:
            return update(self._life, self._values, write_others)
        finally:
            self._note_versions()


def _why_not(life: Lifetime) -> str | None:
    """Reason for which new weights cannot be written; ``None``: they can."""
    session: Any = life.session
    plan = session.plan
    kinds = {kind for placement in plan.placements.values() if (kind := placement.kind) is not None}
    if plan.coded_units:
        return "slots and graphs have the length of the codes of the weights (codec)"
    if plan.cached:
        return "the engine would make its kernels of cached experts anew, past the cache"
    if session.has_ranks or any(not kind.on_host or kind.needs_ranks for kind in kinds):
        return f"mode {plan.kind.name!r} takes no new values"
    if any(place.inner for bound in session._bound.values() for each in bound.tensors for _, place in each.places):
        return "weights are tensors of a subclass"
    return None
