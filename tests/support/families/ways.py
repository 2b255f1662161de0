"""One case offloaded in one way, compared bit for bit with the resident model."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import headrace
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.config import Rule
from headrace.errors import BudgetError, CheckpointError, HeadraceError
from headrace.model.inventory import take_inventory
from headrace.model.memory_profile import profile_of
from models import aligned

from . import WAYS
from .builders import Case, hush, quiet

SHARE = 0.4  # of the weights: the budget
FORWARDS = 2

Calls = list[tuple[str, dict[str, Any]]]


@dataclass
class Outcome:
    """What came of a case in one way.

    Attributes:
        what: equal, differs, refused (an error of headrace's), crashed (another one), moved nothing, cannot build.
        share: of the weights, the budget: the least there is where 40 % is below that; 0 without a budget.
        warned: headrace's warnings.
        checkpoint: why the folder that the library saved could not be the checkpoint of the live model.
    """

    family: str
    way: str
    what: str
    detail: str = ""
    share: float = 0.0
    moved_bytes: int = 0
    seconds: float = 0.0
    warned: str = ""
    checkpoint: str = ""


# -- running and comparing --------------------------------------------------------------------------------------------


def forward(model: nn.Module, calls: Calls) -> list[Any]:
    """What the calls return, on fresh copies of their arguments, after the random numbers are seeded."""
    found = []
    with torch.no_grad():
        for name, inputs in calls:
            torch.manual_seed(5)
            given = copy.deepcopy(inputs)
            found.append(model(**given) if name == "forward" else getattr(model, name)(**given))
    return found


def leaves_of(value: Any) -> dict[str, torch.Tensor]:
    """Copies of all tensors in ``value`` by path: containers, dataclasses and plain objects such as caches."""
    found: dict[str, torch.Tensor] = {}
    _collect(value, "", found, set())
    return found


def _collect(value: Any, path: str, found: dict[str, torch.Tensor], seen: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        found[path] = value.detach().clone()
    elif value is None or isinstance(value, str | bytes | int | float | nn.Module | type) or id(value) in seen:
        return
    else:
        seen.add(id(value))
        for name, inner in _children(value):
            _collect(inner, f"{path}.{name}" if path else str(name), found, seen)


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple | set):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    if type(value).__module__.startswith(("transformers", "diffusers")) and "config" not in type(value).__module__:
        return list(vars(value).items()) if hasattr(value, "__dict__") else []
    return []


def difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> str:
    """In words, the first tensor that is not the same; empty if all are."""
    if found.keys() != expected.keys():
        odd = sorted(found.keys() ^ expected.keys())
        return f"other tensors: {', '.join(odd[:3])}"
    wrong = [name for name in expected if not same(found[name], expected[name])]
    return f"{len(wrong)} of {len(expected)} tensors: {', '.join(wrong[:3])}" if wrong else ""


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """``torch.equal``, where NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    if not one.is_floating_point() or not torch.equal(one.isnan(), other.isnan()):
        return False
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of what ``state_dict`` holds, and of the buffers that it leaves out."""
    state = {name: t.detach().clone() for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    return state | {f"buffer {name}": t.detach().clone() for name, t in model.named_buffers()}


# -- a case with its reference ----------------------------------------------------------------------------------------


def _not_read_back(saved: nn.Module, model: nn.Module) -> list[str]:
    """Matrices of ``model`` with no value of those that were saved: the library has drawn them at random."""
    ours, theirs = saved.state_dict(), model.state_dict()
    same_shape = (name for name in theirs if name in ours and ours[name].shape == theirs[name].shape)
    return [n for n in same_shape if ours[n].dim() > 1 and not torch.any(ours[n] == theirs[n])]


class Reference:
    """A case saved, with what its resident model gives in three forwards.

    The resident model is the one that the library reads back from the folder, so that all ways have the same weights.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder, self.cannot_load = case, folder, ""
        model = case.model
        try:
            with quiet():
                model.save_pretrained(folder)
                if case.from_pretrained is not None:
                    model = aligned(case.from_pretrained(str(folder)).eval())
        except Exception as error:
            self.cannot_load = f"{type(error).__name__}: {first_line(error)}"
            model = case.model
        if not self.cannot_load and case.loads and (missing := _not_read_back(case.model, model)):
            self.cannot_load = f"its names are not read back: {len(missing)} tensors are drawn anew ({missing[0]}, ...)"
            model = case.model
        self.model = model
        self.num_bytes = take_inventory(model).num_bytes
        fresh = copy.deepcopy(model)
        with quiet():
            self.state = state_of(fresh)
            self.outputs = [leaves_of(forward(fresh, case.calls)) for _ in range(FORWARDS + 1)]
            again = [leaves_of(forward(model, case.calls)) for _ in range(FORWARDS + 1)]
        self.model = copy.deepcopy(case.model) if self.cannot_load else model
        self.steady = next((d for a, b in zip(again, self.outputs, strict=True) if (d := difference(a, b))), "")

    def own_names(self) -> Path:
        """A folder with the live model's tensors under the names that they have in it."""
        folder = self.folder / "own-names"
        if not folder.exists():
            folder.mkdir()
            own = {id(t): (name, t) for name, t in reversed(self.model.state_dict(keep_vars=True).items())}
            state = {name: t.detach().contiguous().clone() for name, t in own.values()}
            save_file(state, folder / "model.safetensors")
        return folder

    def doubled(self) -> Path:
        """The folder with its weights in float64, which come back without a change where they are converted."""
        folder = self.folder / "doubled"
        if not folder.exists():
            shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("*.safetensors*", "own-names"))
            checkpoint = Checkpoint.open(self.folder)
            tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
            wide = {name: t.double() if t.dtype == torch.float32 else t for name, t in tensors.items()}
            save_file(wide, folder / "model.safetensors", {"format": "pt"})
        return folder


def first_line(error: BaseException) -> str:
    """The first line of the message, shortened."""
    lines = str(error).strip().splitlines()
    return lines[0][:400] if lines else ""


def offloaded(reference: Reference, outcome: Outcome, share: float = SHARE) -> tuple[nn.Module, headrace.Handle]:
    """The model offloaded and its handle; ``outcome`` gets the share that the budget was in the end."""
    budget = int(share * reference.num_bytes)
    outcome.share = share
    try:
        if outcome.way in ("load", "convert", "cached in files"):
            from headrace.adapters.transformers import load

            if outcome.way == "cached in files":
                outcome.share = 0.0
                in_files = headrace.Rules([(name, "cache") for name in cacheable(reference.model)], 2, "disk", 2)
                return load(reference.folder, in_files, model_class=type(reference.model))
            folder = reference.folder if outcome.way == "load" else reference.doubled()
            dtype = None if outcome.way == "load" else reference.model.dtype
            return load(folder, budget, model_class=type(reference.model), dtype=dtype)
        model = copy.deepcopy(reference.model)
        if outcome.way == "cached":
            outcome.share = 0.0
            rules: list[Rule] = [(name, "cache") for name in cacheable(model)]
            return model, headrace.offload(model, headrace.Rules(rules, expert_slots=2))
        if outcome.way == "prefetch":
            outcome.share = 0.0
            policy = headrace.Prefetch(1, 1, 1, params=[headrace.config.ALL_MODEL_PARAMS])
            return model, headrace.offload(model, policy)
        try:
            return model, headrace.offload(model, budget, checkpoint=reference.folder)
        except CheckpointError as error:
            outcome.checkpoint = f"own names, because: {first_line(error)}"
            return model, headrace.offload(model, budget, checkpoint=reference.own_names())
    except BudgetError as error:
        if not budget < error.minimum_bytes < reference.num_bytes:
            raise
        return offloaded(reference, outcome, (error.minimum_bytes + 1) / reference.num_bytes)


def cacheable(model: nn.Module) -> list[str]:
    """The experts of ``model`` that a cache can hold, by name."""
    readers = set(profile_of(model).row_readers)
    return [storage.name for storage in take_inventory(model).storages if not readers.isdisjoint(storage.modules)]


def compare(reference: Reference, way: str) -> Outcome:
    """Offload, run, remove, run; the first thing that is wrong decides."""
    outcome = Outcome(reference.case.family, way, "equal")
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _compare(reference, way, outcome)
        except HeadraceError as error:
            outcome.what, outcome.detail = "refused", f"{type(error).__name__}: {first_line(error)}"
        except Exception as error:
            outcome.what, outcome.detail = "crashed", f"{type(error).__name__}: {first_line(error)} {place_of(error)}"
    said = [str(w.message) for w in caught if issubclass(w.category, headrace.HeadraceWarning)]
    outcome.warned = " | ".join(said)[:600]
    outcome.seconds = round(time.perf_counter() - start, 2)
    return outcome


def _compare(reference: Reference, way: str, outcome: Outcome) -> None:
    hush()
    model, handle = offloaded(reference, outcome)
    calls, wrong = reference.case.calls, []
    try:
        for index in range(FORWARDS):
            if said := difference(leaves_of(forward(model, calls)), reference.outputs[index]):
                wrong.append(f"forward {index + 1}: {said}")
        # A table would be read in place in any plan, so it alone shows nothing.
        lookups = {s.name for s in take_inventory(model).storages if s.is_lookup} if handle.plan.uva else set()
        in_place = sum(size for name, size in handle.plan.uva.items() if name not in lookups)
        outcome.moved_bytes = handle.stats().bytes_moved + in_place
        if way == "convert" and handle.stats().store_bytes["file"] <= handle.plan.store_bytes["disk"]:
            wrong.append("the files hold no more than the slots get: nothing was converted")
    finally:
        handle.remove()
    if said := difference(state_of(model), reference.state):
        wrong.append(f"state after remove: {said}")
    if said := difference(leaves_of(forward(model, calls)), reference.outputs[FORWARDS]):
        wrong.append(f"forward after remove: {said}")
    if wrong:
        outcome.what, outcome.detail = "differs", "; ".join(wrong)[:600]
    elif not outcome.moved_bytes:
        outcome.what = "moved nothing"


def place_of(error: BaseException) -> str:
    """The innermost place outside torch, as file:line."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    return f"({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def outcomes(case: Case, ways: tuple[str, ...] = WAYS) -> list[Outcome]:
    """A case in all ways. A family whose resident model does not repeat itself has no outcome."""
    with tempfile.TemporaryDirectory(prefix="headrace-families-") as folder:
        reference = Reference(case, Path(folder))
        if reference.steady:
            return [Outcome(case.family, "all", "cannot build", f"resident runs differ: {reference.steady}")]
        found = []
        for way in ways:
            loads = way in ("load", "convert", "cached in files")
            if (loads and not case.loads) or ("cached" in way and not cacheable(reference.model)):
                continue
            if loads and reference.cannot_load:
                found.append(Outcome(case.family, way, "cannot build", f"save or read back: {reference.cannot_load}"))
                continue
            found.append(compare(reference, way))
        return found
