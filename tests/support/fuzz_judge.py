"""Runs one case of the fuzzer beside its resident twin and says what came of it."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import headrace
from fuzz_models import ModelSpec, build
from fuzz_steps import STEPS, Env, Raised, StuckThreadError
from models import aligned
from peers import stand_in

# From the best outcome to the worst.
OUTCOMES = ("equal", "refused", "DIFFERS", "CRASHED", "HUNG")
BAD = OUTCOMES[2:]
_OURS = re.compile(r"headrace|offload|handle\.remove", re.IGNORECASE)


@dataclass(frozen=True)
class PolicySpec:
    """A policy whose sizes are shares of the model's."""

    kind: str
    group_size: int = 1
    num_in_group: int = 1
    prefetch_step: int = 1
    params: tuple[str, ...] = ()
    share: float = 1.0
    rules: tuple[tuple[str, str], ...] = ()
    mode: str | None = "cpu"
    peer: float = 0.0
    expert_slots: int | None = None
    codec: str = "none"

    def and_fallbacks(self) -> list[PolicySpec]:
        """This one, and what to try when it is refused, so that few cases end there."""
        more = [dataclasses.replace(self, share=share) for share in (0.7, 0.85, 0.95) if share > self.share]
        last = PolicySpec("prefetch", prefetch_step=self.prefetch_step, params=("ALL_MODEL_PARAMS",))
        return [self, *(more if self.kind == "budget" else []), last]

    def make(self, num_bytes: int) -> Any:
        """The policy for a model of ``num_bytes``."""
        size = max(int(num_bytes * self.share), 1)
        if self.kind == "prefetch":
            return headrace.Prefetch(
                self.group_size,
                self.num_in_group,
                self.prefetch_step,
                list(self.params),
                self.mode or "cpu",
                self.codec,
            )
        if self.kind == "uva":
            return headrace.UVA(size if self.share < 1 else None, list(self.params), self.mode or "cpu")
        if self.kind == "rules":
            return headrace.Rules(
                list(self.rules), self.prefetch_step, self.mode or "cpu", self.expert_slots, self.codec
            )
        if not (self.mode or self.params or self.codec != "none"):
            return size
        peer = int(num_bytes * self.peer) if self.peer else None
        return headrace.Budget(size, list(self.params), self.mode, peer_memory=peer, codec=self.codec)


@dataclass(frozen=True)
class CaseSpec:
    """A case: a model, a policy and a program.

    Attributes:
        grad: ``no_grad``, ``inference`` or ``grad``.
        checkpoint: whether the weights are given as a file too.
        debug: with ``HEADRACE_DEBUG=1``.
        steps: names in :data:`fuzz_steps.STEPS`, each with a number that it makes its choices from.
    """

    seed: int
    model: ModelSpec
    policy: PolicySpec
    steps: tuple[tuple[str, int], ...]
    grad: str = "no_grad"
    checkpoint: bool = False
    debug: bool = False


@dataclass
class Verdict:
    """What came of a case; ``where`` and ``why`` the step that decided, ``notes`` lines for people."""

    outcome: str = "equal"
    where: str = ""
    why: str = ""
    notes: list[str] = field(default_factory=list)

    def add(self, outcome: str, where: str, note: str) -> None:
        """The worst outcome counts, and of equal ones the first."""
        self.notes.append(f"{where}: {outcome}: {note}")
        if OUTCOMES.index(outcome) > OUTCOMES.index(self.outcome):
            self.outcome, self.where, self.why = outcome, where, self.notes[-1]


def judge(
    case: CaseSpec, log: Callable[[str], None] = lambda line: None, offload: Callable[..., Any] = headrace.offload
) -> Verdict:
    """Run ``case``; ``log`` is told every step. ``offload``: what stands for headrace's, in tests of the fuzzer."""
    with (
        tempfile.TemporaryDirectory(prefix="headrace-fuzz-", dir=_memory_folder()) as folder,
        warnings.catch_warnings(),
        stand_in(),
        _compiler_options(case),
    ):
        warnings.simplefilter("ignore")
        os.environ["HEADRACE_DEBUG"] = "1" if case.debug else "0"
        torch.compiler.reset()
        return _Case(case, Path(folder), log, offload).run()


def _compiler_options(case: CaseSpec) -> AbstractContextManager[None]:
    """What lets torch keep its own promises for a model and its twin in one process."""
    from torch._dynamo import config  # which imports triton, that reads its environment then

    # Without guards on hooks, code of a layer without one runs for a sibling to which the user has given one.
    has_hooks = "add_hook" in dict(case.steps) or "Hooked" in dict(case.model.layers)
    # Both models are of the same classes, of whose code objects torch keeps this many versions.
    return config.patch(skip_nnmodule_hook_guards=not has_hooks, recompile_limit=2 * config.recompile_limit)


class _Case:
    """One run of a case."""

    def __init__(self, case: CaseSpec, folder: Path, log: Callable[[str], None], offload: Callable[..., Any]) -> None:
        self.case, self.log, self.verdict, self.offload_function = case, log, Verdict(), offload
        dtype = torch.bfloat16 if case.model.dtype == "bfloat16" else torch.float32
        self.twin = Env(*build(case.model), mode=case.grad, dtype=dtype, has_peer=case.policy.peer > 0)
        aligned(self.twin.model)
        self.subject = Env(*build(case.model), mode=case.grad, dtype=dtype, has_peer=case.policy.peer > 0)
        self.sizes = sum(parameter.nbytes for parameter in self.twin.model.parameters())
        self.files = _save(self.twin.model, folder) if case.checkpoint else None
        self.states = [_snapshot(self.twin.model)]  # of the twin, one for every step that changed it
        self.results: list[tuple[str, Any, Any]] = []
        self.written: set[str] = set()
        self.stateful = any(getattr(module, "stateful", False) for module in self.twin.model.modules())

    def run(self) -> Verdict:
        if not self._offload():
            return self.verdict
        for index, (name, arg) in enumerate(self.case.steps):
            if not self._step(f"{index} {name}", name, arg):
                break
        else:
            self._conclude()
        for handle in (self.subject.other_handle, self.subject.handle):
            if handle is not None:
                with suppress(BaseException):
                    handle.remove()
        return self.verdict

    # -- the parts of a run -----------------------------------------------------------------------------------------

    def _offload(self) -> bool:
        """Put the subject under the policy, or a fallback of it; what is refused must be as it was."""
        for spec in self.case.policy.and_fallbacks():
            policy = spec.make(self.sizes)
            try:
                self.subject.handle = self._put_under(self.subject.model, policy)
            except BaseException as error:
                last = error
                if is_ours(error):
                    continue
                break
            self.log(f"plan of {policy}: {_plan_words(self.subject.handle.plan)}")
            self.subject.offload = functools.partial(self._put_under, policy=policy)
            return True
        self._judge_error("offload", last, None)
        self._compare("forward after a refused offload", *self._both("forward", 0))
        self._compare_states("state after a refused offload")
        return False

    def _put_under(self, model: nn.Module, policy: Any) -> Any:
        if model is not self.subject.model:
            return self.offload_function(model, headrace.UVA(params=["ALL_MODEL_PARAMS"]))
        return self.offload_function(model, policy, checkpoint=self.files)

    def _step(self, where: str, name: str, arg: int) -> bool:
        """One step in both worlds. Returns whether the program can go on."""
        kind = STEPS[name]
        expected, found = self._both(name, arg)
        self._note_changes()
        refused = self._compare(where, expected, found, kind.own_errors)
        self.log(f"{where} {arg}: {self.verdict.notes[-1] if refused or self.verdict.outcome in BAD else 'equal'}")
        if self.verdict.outcome in BAD:
            return False
        if refused and (kind.changes or self.written or self.stateful):
            self._after_refusal(where)
            return False
        if refused and name in ("again", "remove", "remove_between", "other_offload", "other_remove"):
            return False  # the worlds differ in what is offloaded, which later steps rely on
        if not isinstance(found, Raised):
            self.results.append((where, expected, found))
        if name in ("state_dict", "again"):
            self._compare_states(f"{where}, state_dict()")
        return self.verdict.outcome not in BAD

    def _both(self, name: str, arg: int) -> tuple[Any, Any]:
        """The results of a step in the twin and in the subject; :class:`Raised` for what was raised."""
        results = []
        for env in (self.twin, self.subject):
            try:
                with env.context():
                    results.append(STEPS[name].run(env, arg))
            except BaseException as error:
                results.append(Raised(error))
        return results[0], results[1]

    def _note_changes(self) -> None:
        """Keep the twin's state if it is another one than before."""
        state = _snapshot(self.twin.model)
        last = self.states[-1]
        changed = {name for name in last.keys() | state.keys() if not _same(last.get(name), state.get(name))}
        if changed:
            self.states.append(state)
            self.written |= changed

    def _after_refusal(self, where: str) -> None:
        """A change was refused, or a forward behind it: every weight has bits that it had at some time in the twin."""
        for what in ("state_dict() behind the refusal", "state_dict() after remove()"):
            try:
                if "remove" in what and self.subject.handle is not None:
                    self.subject.handle.remove()
                found = _snapshot(self.subject.model)
            except BaseException as error:
                self._judge_error(f"{where}, {what}", error, None)
                continue
            for name, value in found.items():
                if (self.stateful and name in self.written) or "write_inside" in where:
                    continue  # changed by every forward, those that were cut short included
                if not any(_same(value, state[name]) for state in self.states if name in state):
                    self.verdict.add("DIFFERS", f"{where}, {what}", f"{name} has neither the old nor the new bits")
                    return

    def _conclude(self) -> None:
        """The end of every program: state, ``remove()``, state, a forward, and what was handed out before."""
        refused = self._compare("forward at the end", *self._both("forward", 1))
        self._note_changes()
        if refused and (self.written or self.stateful):
            self._after_refusal("forward at the end")
            return
        self._compare_states("state_dict() at the end")
        for name in ("other_remove", "remove"):
            if self.verdict.outcome in BAD:
                return
            if self._compare(f"{name} at the end", *self._both(name, 0)):
                return
        self._compare_states("state_dict() after remove()", skip_written=False)
        self._compare("forward after remove()", *self._both("forward", 2))
        self._compare("other forward after remove()", *self._both("other_forward", 2))
        if self.written:
            return  # a view of a written weight may show the write or not
        for where, expected, found in self.results:
            self._compare(f"what {where} returned, at the end", expected, found)
        if len(self.twin.kept) == len(self.subject.kept):  # or a step that keeps one was refused
            self._compare("kept views at the end", self.twin.kept, self.subject.kept)

    # -- comparisons ------------------------------------------------------------------------------------------------

    def _compare(self, where: str, expected: Any, found: Any, own_errors: str | None = None) -> bool:
        """Judge one pair of results. Returns whether the subject's was refused."""
        if isinstance(found, Raised):
            return self._judge_error(where, found.error, expected, own_errors)
        if isinstance(expected, Raised):
            if type(expected.error).__name__ == "Unsupported":
                return False  # by Dynamo: where hooks are, it leaves such code to Python
            self.verdict.add("DIFFERS", where, f"no error where the resident model raises {expected.error!r:.200}")
            return False
        if _has_raised(found) or _has_raised(expected):  # in some threads
            refusals = [
                self._compare(f"{where}[{index}]", one, other)
                for index, (one, other) in enumerate(zip(expected, found, strict=True))
            ]
            return any(refusals)
        try:
            ours, theirs = _leaves(found), _leaves(expected)
        except BaseException as error:
            return self._judge_error(where, error, None)
        refused = False
        if len(ours) != len(theirs):
            self.verdict.add("DIFFERS", where, f"{len(ours)} leaves, expected {len(theirs)}")
        for (path, one), (_, other) in zip(ours, theirs, strict=False):
            if isinstance(one, Raised) or isinstance(other, Raised):
                refused |= self._compare(f"{where}{path}", other, one)
                continue
            try:
                same = _same(one, other)
            except BaseException as error:
                refused |= self._judge_error(f"{where}{path}", error, None)
                continue
            if not same:
                self.verdict.add("DIFFERS", where, f"output{path}: {_difference(one, other)}")
                break
        return refused

    def _judge_error(self, where: str, error: BaseException, expected: Any, own_errors: str | None = None) -> bool:
        if isinstance(error, StuckThreadError):
            self.verdict.add("HUNG", where, str(error))
        elif isinstance(expected, Raised) and type(expected.error) is type(error):
            pass
        elif isinstance(error, headrace.errors.RaceError):  # nothing here plants one
            self.verdict.add("CRASHED", where, _words(error))
        elif is_ours(error) or (own_errors and re.search(own_errors, str(error))) or self._is_skipped(error):
            self.verdict.add("refused", where, _words(error))
            return True
        else:
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            place = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
            self.verdict.add("CRASHED", where, f"{_words(error)} at {place}")
        return False

    def _is_skipped(self, error: BaseException) -> bool:
        """By torch, which compiles no code again whose compiling has ended in an error, here one of ours."""
        return self.verdict.outcome == "refused" and "found no compiled frames" in str(error)

    def _compare_states(self, where: str, skip_written: bool = True) -> None:
        try:
            found, expected = _snapshot(self.subject.model), _snapshot(self.twin.model)
        except BaseException as error:
            self._judge_error(where, error, None)
            return
        if found.keys() != expected.keys():
            self.verdict.add("DIFFERS", where, f"names {sorted(found.keys() ^ expected.keys())[:4]}")
            return
        for name, value in expected.items():
            if not (skip_written and name in self.written) and not _same(found[name], value):
                self.verdict.add("DIFFERS", where, f"{name}: {_difference(found[name], value)}")
                return


class NoHandle:
    """Of :func:`no_offload`."""

    plan = None

    def remove(self) -> None:
        """Nothing was done."""


def no_offload(model: nn.Module, policy: Any, **options: Any) -> Any:
    """Leaves the model alone: a case that is not equal then is a fault of the fuzzer."""
    return NoHandle()


def is_ours(error: BaseException) -> bool:
    """Whether headrace raised this, or an error of torch's that names what to do about the offload."""
    if isinstance(error, headrace.HeadraceError):
        return True
    return isinstance(error, RuntimeError | TypeError) and _OURS.search(str(error)) is not None


def _has_raised(results: Any) -> bool:
    return isinstance(results, list) and any(isinstance(result, Raised) for result in results)


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Tensors and other leaves of nested lists, dicts and dataclasses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, Raised):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return [leaf for key in value for leaf in _leaves(value[key], f"{path}.{key}")]
    if isinstance(value, list | tuple):
        return [leaf for index, item in enumerate(value) for leaf in _leaves(item, f"{path}[{index}]")]
    return [(path, value)]


def _same(one: Any, other: Any) -> bool:
    if not isinstance(other, torch.Tensor) or not isinstance(one, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    one, other = one.detach(), other.detach()
    if torch.equal(one, other):
        return True
    return bool(one.is_floating_point() and torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5)))


def _difference(one: Any, other: Any) -> str:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return f"{one!r:.80}, expected {other!r:.80}"
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{one.dtype} {list(one.shape)}, expected {other.dtype} {list(other.shape)}"
    gap = (one.detach().double() - other.detach().double()).abs().max().item()
    return f"{int((one != other).sum())} of {other.numel()} values differ, at most by {gap:.3g}"


def _snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _save(model: nn.Module, folder: Path) -> Path:
    """A safetensors file of the state; tied tensors are in it once."""
    state: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, int]] = set()
    for name, tensor in model.state_dict().items():
        if (tensor.data_ptr(), tensor.numel()) not in seen:
            seen.add((tensor.data_ptr(), tensor.numel()))
            state[name] = tensor.contiguous()
    path = folder / "model.safetensors"
    save_file(state, path)
    return path


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


def _plan_words(plan: Any) -> str:
    with suppress(Exception):
        return f"{len(plan.units)} units in {plan.num_slots} slots, in place {sorted(plan.uva)}, mode {plan.mode}"
    return repr(plan)
