"""Policies that a user sets, and the checks of their values, which flags and the keys of engines share.

Policies are frozen dataclasses that check themselves when made, so that a wrong value is refused where it was written
and not where it is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, cast, get_args

from headrace.errors import OptionError, OptionTypeError, RuleError, SelectionError, SizeError, warn_user
from headrace.sizes import parse_size

ALL_MODEL_PARAMS = "ALL_MODEL_PARAMS"

Mode = Literal["cpu", "shm_cpu", "sharded_cpu", "disk", "sharded_gpu", "meta"]
# How what is prefetched from host memory is coded there and on the link.
Code = Literal["exp3"]
Codec = Literal["none", Code, "auto"]
CODES: tuple[Code, ...] = get_args(Code)
# Where a unit is stored: in a store, or beside host memory on a peer, which is another GPU of this process, or there in
# a code.
StoreName = Literal[Mode, "peer", Code]
# Stores of which each rank of a group keeps a part, and all stores that need a group.
SHARDED_MODES: tuple[Mode, ...] = ("sharded_cpu", "sharded_gpu")
RANK_MODES: tuple[Mode, ...] = ("shm_cpu", *SHARDED_MODES)
Mechanism = Literal["resident", "prefetch", "uva", "cache"]
Backend = Literal["auto", "prefetch", "uva", "none"]
# (name pattern, mechanism): what matches the pattern and no earlier one is reached this way.
Rule = tuple[str, Mechanism]

# -- the check of each kind of value -----------------------------------------------------------------------------------

# A budget of what is free on a GPU, and the tokens per sequence that it has room for unless a workload says so.
AUTO = "auto"
CALL_SIZE = ("height", "width", "frames", "tiling", "steps")  # of a Workload: about a pipeline of diffusers
AUTO_CONTEXT = 4096

# Takes the name of an option, as its user writes it, and a value; returns the value to keep.
Check = Callable[[str, Any], Any]


def size(name: str, value: Any) -> int:
    """:func:`parse_size` as a check."""
    return parse_size(value, name)


def size_or_auto(name: str, value: Any) -> int | str:
    """:func:`parse_size` as a check, or ``"auto"``."""
    try:
        return AUTO if value == AUTO else parse_size(value, name)
    except SizeError as error:
        raise SizeError(f"{error}; or auto") from None


def count(name: str, value: Any, at_least: int = 1) -> int:
    """An int of at least ``at_least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionTypeError(f"{name}: expected an int, found {type(value).__name__} {value!r}")
    if value < at_least:
        raise OptionError(f"{name} = {value}: expected at least {at_least}")
    return value


def one_of(choices: Sequence[str], where: str = "") -> Check:
    """The check for one of ``choices``; ``where``: for errors, what has no others, e.g. ``" inside vLLM"``."""

    def check(name: str, value: Any) -> Any:
        if value not in choices:
            raise OptionError(f"{name} {value!r}: expected one of {', '.join(choices)}{where}")
        return value

    return check


def names(name: str, value: Any) -> tuple[str, ...]:
    """Name patterns (:mod:`headrace.model.patterns`); ``None`` are none."""
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    found = tuple(value) if is_list else () if value is None else (None,)
    if not all(isinstance(pattern, str) for pattern in found):
        fix = f"; write [{value!r}]" if isinstance(value, str) else ""
        raise OptionTypeError(f'{name}: expected a list of strings such as ["mlp"], found {value!r}{fix}')
    return found


def check_pattern(pattern: str) -> None:
    """Raise ``SelectionError`` for a name pattern that is empty, or no valid regular expression."""
    if not pattern:
        raise SelectionError(
            "an empty name pattern; write a segment such as 'mlp', a group such as '@attention', a glob, 're:...' or "
            "ALL_MODEL_PARAMS"
        )
    try:
        re.compile(pattern[3:] if pattern.startswith("re:") else "")
    except re.error as error:
        raise SelectionError(f"pattern {pattern!r} is not a regular expression: {error}") from None


def rules(name: str, value: Any) -> tuple[Rule, ...]:
    """Pairs of a name pattern and a mechanism, of which one pattern has one."""
    form = 'write rules like [("experts", "uva"), ("re:.*norm.*", "resident")]'
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise OptionTypeError(f"{name}: expected a list of pairs, found {type(value).__name__} {value!r}; {form}")
    checked: list[Rule] = []
    for rule in value:
        if not isinstance(rule, tuple | list) or len(rule) != 2 or not all(isinstance(part, str) for part in rule):
            raise OptionTypeError(f"{name}: expected pairs of a name pattern and a mechanism, found {rule!r}; {form}")
        pattern, mechanism = rule
        one_of(get_args(Mechanism), f" as the mechanism of {pattern!r}; {form}")(name, mechanism)
        other = dict(checked).get(pattern, mechanism)
        if other != mechanism:
            raise RuleError(
                f"{name} '{pattern}={other}' and '{pattern}={mechanism}' contradict each other: one pattern has one "
                f"mechanism; leave one of them out"
            )
        checked.append((pattern, mechanism))
    return tuple(checked)


def row_counts(name: str, value: Any) -> tuple[int, ...]:
    """Numbers of rows, each at least 1 and once."""
    if not isinstance(value, list | tuple) or not value:
        raise OptionTypeError(f"{name}: expected numbers of rows such as [1, 16, 256], found {value!r}")
    return tuple(dict.fromkeys(count(name, rows) for rows in value))


def _workload(name: str, value: Any) -> Workload:
    if not isinstance(value, Workload):
        raise OptionTypeError(f"{name}: expected a headrace.config.Workload, found {type(value).__name__}")
    return value


_mode = one_of(get_args(Mode))
codec = one_of(get_args(Codec))


def _check(policy: object, **checks: Check) -> None:
    """Replace the fields of these names by what their checks return; ``None`` stays where it is the default."""
    for name, check in checks.items():
        value = getattr(policy, name)
        if value is not None or vars(type(policy)).get(name, ...) is not None:  # a dataclass keeps its defaults there
            object.__setattr__(policy, name, check(name, value))


def _check_codec(policy: Prefetch | Budget | Rules) -> None:
    _check(policy, codec=codec if isinstance(policy, Budget) else one_of(["none", *CODES], " without a budget"))
    if policy.codec in CODES and policy.mode is None:
        object.__setattr__(policy, "mode", "cpu")
    if policy.codec in CODES and policy.mode != "cpu":
        raise OptionError(
            f"codec {policy.codec!r}: expected mode 'cpu', since what is in host memory is coded, found "
            f"{policy.mode!r}; leave one of the two out (--offload-codec, --offload-mode)"
        )


# -- words of other libraries ------------------------------------------------------------------------------------------

_P = ParamSpec("_P")
_R = TypeVar("_R")
_POLICY = 'the policy as the second argument, e.g. "20GiB"'
_INSTEAD = {
    "budget": _POLICY,
    "device_memory": _POLICY,
    "max_memory": _POLICY,
    "device_map": 'device="cuda" for where compute runs, and a policy such as "20GiB" for how much stays there',
    "offload_folder": "nothing: weights that do not fit are read from the files of the checkpoint",
    "mode": 'it into a policy, e.g. headrace.Budget("20GiB", mode="cpu")',
}


def instead_of(**words: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator: for an argument that only other libraries have, the error says what to write here."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for word, instead in (_INSTEAD | words).items():
                if word in kwargs:
                    raise OptionTypeError(f"{function.__name__}() has no argument {word!r}: write {instead}")
            return function(*args, **kwargs)

        return call

    return decorate


# -- policies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prefetch:
    """Copy units into slots ahead of use, whole layers by the group rule.

    Attributes:
        group_size: layers per group (``--offload-group-size``).
        num_in_group: the last this many of every group are offloaded (``--offload-num-in-group``).
        prefetch_step: how many units ahead the copies run = number of slots (``--offload-prefetch-step``).
        params: name patterns (:mod:`headrace.model.patterns`) that narrow what is offloaded inside those layers; empty
            means every parameter of 64 KiB or more.
        mode: the store (``--offload-mode``).
        codec: ``"exp3"``: units of bf16 are coded in 0.70 of their bytes, in host memory and on the link, and decoded
            on the device. Lossless (``--offload-codec``).
    """

    group_size: int = 1
    num_in_group: int = 1
    prefetch_step: int = 1
    params: Sequence[str] = ()
    mode: Mode = "cpu"
    codec: Codec = "none"

    def __post_init__(self) -> None:
        _check(self, group_size=count, num_in_group=count, prefetch_step=count, params=names, mode=_mode)
        _check_codec(self)
        if self.num_in_group > self.group_size:
            raise OptionError(
                f"num_in_group = {self.num_in_group} is larger than group_size = {self.group_size}: of a group of "
                f"{self.group_size} layers at most {self.group_size} can be offloaded; lower num_in_group"
            )


@dataclass(frozen=True)
class UVA:
    """Read tensors in place from where they are stored, without a slot.

    Attributes:
        max_bytes: at most this much is offloaded, in the order of the model; ``None`` means no limit
            (``--cpu-offload-gb``).
        params: name patterns that narrow what is offloaded (``--cpu-offload-params``).
        mode: the store; on a CPU ``disk`` maps the checkpoint file (``--offload-mode``).
    """

    max_bytes: str | int | None = None
    params: Sequence[str] = ()
    mode: Mode = "cpu"

    def __post_init__(self) -> None:
        _check(self, max_bytes=size, params=names, mode=_mode)

    @property
    def limit_bytes(self) -> int | None:
        """``max_bytes`` as a number."""
        return cast("int | None", self.max_bytes)


@dataclass(frozen=True)
class Workload:
    """Steps that the planner expects: they decide which plan is fastest, and what memory is left for weights.

    Attributes:
        batch_sizes: rows of a step, i.e. sequences that decode together; the plan has to fit the largest, and is the
            one with the least geometric mean of step times over all of them (``--batch``).
        context: tokens per sequence in the KV cache; 0 plans without a cache and without activations, so that the
            budget is for the weights alone (``--context``).
        repeated: name patterns of what every step runs. The rest runs once per call, so none of it stays on the device
            that may be offloaded. Empty means that every step runs everything.
        height, width, frames: size in pixels and length of what a call of a pipeline of diffusers makes; with one of
            them the budget is for the activations of that call too, the others are the pipeline's own (``--height``,
            ``--width``, ``--frames``).
        tiling: the pipeline's VAE decodes in tiles, as after ``pipe.vae.enable_tiling()``, which comes before ``load``
            (``--tiling``); alone it counts a call of the pipeline's own size.
        steps: denoising steps of the call, diffusers' ``num_inference_steps``, whose time a plan that predicts steps
            notes (``--steps``); memory does not depend on them.
    """

    batch_sizes: Sequence[int] = (1,)
    context: int = 0
    repeated: Sequence[str] = ()
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    tiling: bool = False
    steps: int | None = None

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(("height", "width", "frames", "steps"), count)
        _check(self, batch_sizes=row_counts, context=partial(count, at_least=0), repeated=names, **sizes)

    @property
    def call_size(self) -> dict[str, int]:
        """Stated sizes of a pipeline's call, by name."""
        return {name: size for name in CALL_SIZE if (size := getattr(self, name))}


@dataclass(frozen=True)
class Budget:
    """A device-memory budget; headrace makes the plan.

    Attributes:
        device_memory: residents and slots together stay within this, and the KV cache and activations of the workload
            too where it states a context (``--device-memory``). ``"auto"``: what is free on the GPU less 1 GiB, with a
            context of 4096 unless the workload states one; a model that fits is not offloaded.
        params: name patterns that narrow what may be offloaded; empty means every parameter of 64 KiB or more.
        mode: the store; ``None`` means ``disk`` when a checkpoint is given and the device is a CPU, else ``cpu``, and
            given a checkpoint ``disk`` beside it for the units that host memory has no room for.
        rules: mechanisms that are not the planner's to choose; of several that match a tensor the first counts
            (``--offload-rule PATTERN=MECHANISM``).
        workload: what the plan is made for.
        host_memory: offloaded bytes in host memory, and the staging ring of what comes from files, stay within this;
            ``None`` means what is free (``--host-memory``).
        peer_memory: so much of the memory of another GPU, idle and of this process alone, holds units before host
            memory does: of the next one that the device can address (``--peer-memory``).
        expert_slots: experts of each layer that the device holds of what a rule says to cache; ``None``: as many as
            there is room for (``--expert-slots``).
        codec: as for :class:`Prefetch`; ``"auto"``: ``exp3`` where the step is predicted to be faster with it.
    """

    device_memory: str | int
    params: Sequence[str] = ()
    mode: Mode | None = None
    rules: Sequence[Rule] = ()
    workload: Workload = Workload()
    host_memory: str | int | None = None
    expert_slots: int | None = None
    peer_memory: str | int | None = None
    codec: Codec = "auto"

    def __post_init__(self) -> None:
        _check_codec(self)
        _check(self, device_memory=size_or_auto, host_memory=size, peer_memory=size, params=names, mode=_mode)
        _check(self, rules=rules, workload=_workload, expert_slots=count)
        if self.device_memory == AUTO and not self.workload.context:
            object.__setattr__(self, "workload", replace(self.workload, context=AUTO_CONTEXT))

    @property
    def num_bytes(self) -> int:
        """The budget in bytes; that of ``"auto"`` is known once there is a device."""
        return cast(int, self.device_memory)

    @property
    def host_limit_bytes(self) -> int | None:
        """``host_memory`` as a number."""
        return cast("int | None", self.host_memory)

    @property
    def peer_limit_bytes(self) -> int:
        """``peer_memory`` as a number."""
        return cast("int | None", self.peer_memory) or 0


@dataclass(frozen=True)
class Rules:
    """A mechanism for everything that a pattern matches, without a budget; what no rule matches stays resident.

    Attributes:
        rules: pairs of a name pattern (:mod:`headrace.model.patterns`) and a mechanism; of several that match a tensor
            the first counts (``--offload-rule PATTERN=MECHANISM``). What is prefetched is one unit per layer, and one
            per module outside the layers.
        prefetch_step: how many units ahead the copies run = number of slots (``--offload-prefetch-step``).
        mode: the store (``--offload-mode``).
        expert_slots: experts of each layer that the device holds of what a rule says to cache (``--expert-slots``).
        codec: as for :class:`Prefetch`.
    """

    rules: Sequence[Rule]
    prefetch_step: int = 2
    mode: Mode = "cpu"
    expert_slots: int | None = None
    codec: Codec = "none"

    def __post_init__(self) -> None:
        _check_codec(self)
        _check(self, rules=rules, prefetch_step=count, mode=_mode, expert_slots=count)
        if not self.rules:
            raise OptionError('rules: expected at least one, e.g. [("experts", "uva")]')
        if (self.expert_slots is not None) != any(mechanism == "cache" for _, mechanism in self.rules):
            raise OptionError(
                f"expert_slots = {self.expert_slots}: without a budget, a rule that says cache needs a number of "
                f"slots, and no other rule takes one; give both, e.g. the rule experts=cache and 16 expert slots, or a "
                f"budget"
            )


Policy = Prefetch | UVA | Budget | Rules


def as_policy(policy: Policy | str | int | None) -> Policy:
    """A policy as given, or a :class:`Budget` for a size such as ``"20GiB"``."""
    if isinstance(policy, Prefetch | UVA | Budget | Rules):
        return policy
    if isinstance(policy, str | int) and not isinstance(policy, bool):
        return Budget(policy)
    raise OptionTypeError(
        f"policy: expected a size such as '20GiB', headrace.Prefetch, headrace.UVA, headrace.Budget, "
        f"headrace.Rules or a headrace.Plan, found {type(policy).__name__}"
    )


@dataclass(frozen=True)
class OffloadConfig:
    """The engines' flags as one object; :func:`headrace.create_offloader` turns it into an offloader.

    Attributes:
        backend: ``auto`` means prefetch if ``prefetch`` is set, else uva if ``uva`` is set, else none
            (``--offload-backend``).
        prefetch: set when a group size is given.
        uva: set when a byte budget or names for zero-copy are given.
    """

    backend: Backend = "auto"
    prefetch: Prefetch | None = None
    uva: UVA | None = None

    def __post_init__(self) -> None:
        _check(self, backend=one_of(get_args(Backend)))
        if self.backend in ("prefetch", "uva") and getattr(self, self.backend) is None:
            raise OptionError(f"backend {self.backend!r} needs {self.backend}=, which is not set")
        if self.backend == "auto" and self.prefetch is not None and self.uva is not None:
            raise OptionError(
                "prefetch and uva are both set, and each says what is offloaded: leave one of them out, or say which "
                "with backend='prefetch' or backend='uva'"
            )

    @property
    def resolved(self) -> Literal["prefetch", "uva", "none"]:
        """The backend that ``auto`` stands for here."""
        if self.backend != "auto":
            return self.backend
        return "prefetch" if self.prefetch is not None else "uva" if self.uva is not None else "none"


# -- environment variables ---------------------------------------------------------------------------------------------


# All that there are, with default and meaning; docs/reference.md has the same table (a test compares them).
VARIABLES = {
    "HEADRACE_DEBUG": (
        "0",
        "1: poison released slots, verify a checksum at every copy of a unit; the command line shows tracebacks",
    ),
    "HEADRACE_READERS": (
        "cores",
        "threads that read files, 1 to 1024; default: one per core, 7/8 of them (at most 14) when streaming to a GPU, "
        "8 to 16 when loading",
    ),
    "HEADRACE_DISABLE_PIN_MEMORY": ("0", "1: stores of a GPU use ordinary host memory (slow, cannot be captured)"),
    "HEADRACE_DISABLE_UVA": ("0", "1: what a GPU would read in place is copied into a slot on demand instead"),
    "HEADRACE_DISABLE_CACHE": ("0", "1: no on-disk cache of the metadata of models' folders"),
    "HEADRACE_PEER_TIMEOUT": ("600", "seconds that a rank waits for another one during an offload with `group=`"),
    "HEADRACE_API_KEY": ("none", "`headrace serve`: the bearer token that requests have to carry, as `--api-key`"),
    "HEADRACE_SGLANG": ("0", "1, or a JSON object of options: headrace is the weight offloader of SGLang"),
}
_reported: set[str] = set()


def warn_about_variables() -> None:
    """Warn, once each, of variables ``HEADRACE_*`` in the environment that nothing reads."""
    unknown = [name for name in os.environ if name.upper().startswith("HEADRACE_") and name not in VARIABLES]
    for name in sorted({*unknown} - _reported):
        from difflib import get_close_matches

        _reported.add(name)
        (near,) = get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0)
        warn_user(
            f"the environment variable {name} has no effect: headrace reads none of that name; the nearest is {near} "
            f"(all: {', '.join(VARIABLES)})"
        )


def debug_enabled() -> bool:
    """Whether ``HEADRACE_DEBUG`` asks for poisoned slots and checksums."""
    return _switch("HEADRACE_DEBUG")


def pin_memory_disabled() -> bool:
    """Whether ``HEADRACE_DISABLE_PIN_MEMORY`` forbids page-locked host memory."""
    return _switch("HEADRACE_DISABLE_PIN_MEMORY")


def uva_disabled() -> bool:
    """Whether ``HEADRACE_DISABLE_UVA`` forbids reading host memory in place from a GPU."""
    return _switch("HEADRACE_DISABLE_UVA")


def cache_disabled() -> bool:
    """Whether ``HEADRACE_DISABLE_CACHE`` forbids the on-disk cache of model metadata."""
    return _switch("HEADRACE_DISABLE_CACHE")


def peer_timeout_s() -> float:
    """Seconds that a rank waits for another one during an offload that they share: ``HEADRACE_PEER_TIMEOUT``."""
    return float(number_in("HEADRACE_PEER_TIMEOUT", "seconds", 10**7) or 600)


def number_in(name: str, what: str, most: int) -> int | None:
    """The whole number, from 1 to ``most``, that a variable holds; ``None`` where it is not set.

    Raises:
        OptionError: anything else; ``what`` is counted.
    """
    value = os.environ.get(name)
    if value is None:
        return None
    # By its length first: int() refuses thousands of digits in words of its own.
    if not value.isdecimal() or len(value) > len(str(most)) or not 1 <= int(value) <= most:
        raise OptionError(f"{name}={value[:40]!r}: expected a whole number of {what}, at least 1 and at most {most}")
    return int(value)


def _switch(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("", "0", "1"):
        raise OptionError(f"{name}={value!r}: expected 0 or 1")
    return value == "1"


# -- the on-disk cache -------------------------------------------------------------------------------------------------


def cache_folder() -> Path | None:
    """The folder of this package's cache: in ``XDG_CACHE_HOME``, else ``~/.cache``; ``None`` without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:  # a relative path counts as none (https://specifications.freedesktop.org/basedir-spec)
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "headrace"
    except RuntimeError:  # neither HOME nor an entry in passwd, as a container with a bare user id has it
        return None
