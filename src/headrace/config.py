"""What a user may set: policies, and environment variables (:data:`VARIABLES`).

Policies are frozen dataclasses that check themselves when made, so that a wrong value is refused where it was written
and not where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from headrace.errors import OptionError, OptionTypeError, RuleError, SizeError, warn_user
from headrace.figures import parse_size

__all__ = [
    "ALL_MODEL_PARAMS",
    "HOST_MODES",
    "RANK_MODES",
    "SHARDED_MODES",
    "UVA",
    "VARIABLES",
    "Budget",
    "Mechanism",
    "Mode",
    "OffloadConfig",
    "Place",
    "Policy",
    "Prefetch",
    "Rule",
    "Rules",
    "Workload",
    "as_policy",
    "cache_disabled",
    "cache_folder",
    "debug_enabled",
    "peer_timeout_s",
    "pin_memory_disabled",
    "reader_threads",
    "uva_disabled",
    "warn_about_variables",
]

ALL_MODEL_PARAMS = "ALL_MODEL_PARAMS"

Mode = Literal["cpu", "shm_cpu", "sharded_cpu", "disk", "sharded_gpu", "meta"]
# Where a unit rests: in a store, or beside host memory on a peer, which is another GPU of this process.
Place = Literal[Mode, "peer"]
# Stores of which each rank of a group keeps a part, and all stores that need a group.
SHARDED_MODES: tuple[Mode, ...] = ("sharded_cpu", "sharded_gpu")
# Stores whose bytes are host memory; those of shm_cpu exist once for all ranks of a host.
HOST_MODES: tuple[Mode, ...] = ("cpu", "shm_cpu", "sharded_cpu")
RANK_MODES: tuple[Mode, ...] = ("shm_cpu", *SHARDED_MODES)
Mechanism = Literal["resident", "prefetch", "uva", "cache"]
Backend = Literal["auto", "prefetch", "uva", "none"]

_MOST_READERS = 1024


def _size_of(name: str, size: str | int, flag: str) -> int:
    """:func:`parse_size`, with errors that name what the size is of."""
    try:
        return parse_size(size)
    except (SizeError, OptionTypeError) as error:
        raise type(error)(f"{name}: {str(error).removeprefix('size: ')} ({flag})") from None


def _check_int(name: str, value: object, flag: str, at_least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionTypeError(f"{name}: expected an int, found {type(value).__name__} {value!r} ({flag})")
    if value < at_least:
        raise OptionError(f"{name} = {value}: expected at least {at_least} ({flag})")


def _check_mode(mode: str) -> None:
    if mode not in get_args(Mode):
        raise OptionError(f"mode {mode!r}: expected one of {', '.join(get_args(Mode))} (--offload-mode)")


def _as_names(params: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(params, str):
        raise OptionTypeError(f"params: expected a list of names, found the string {params!r}; write [{params!r}]")
    if params is not None and not isinstance(params, Iterable):
        raise OptionTypeError(f"params: expected a list of names, found {type(params).__name__} {params!r}")
    names = tuple(params or ())
    for name in names:
        if not isinstance(name, str):
            raise OptionTypeError(f"params: expected names, found {type(name).__name__} {name!r}")
    return names


def _as_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    form = 'write rules like [("experts", "uva"), ("re:.*norm.*", "resident")]'
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise OptionTypeError(f"rules: expected a list of pairs, found {type(rules).__name__} {rules!r}; {form}")
    checked: list[Rule] = []
    for rule in rules:
        if not isinstance(rule, tuple | list) or len(rule) != 2 or not all(isinstance(part, str) for part in rule):
            raise OptionTypeError(f"rules: expected pairs of a name pattern and a mechanism, found {rule!r}; {form}")
        pattern, mechanism = rule
        if mechanism not in get_args(Mechanism):
            raise OptionError(
                f"rule {pattern}={mechanism}: expected one of {', '.join(get_args(Mechanism))} as the mechanism; {form}"
            )
        other = dict(checked).get(pattern, mechanism)
        if other != mechanism:
            raise RuleError(
                f"rules '{pattern}={other}' and '{pattern}={mechanism}' contradict each other: one pattern has one "
                f"mechanism; leave one of them out (--offload-rule)"
            )
        checked.append((pattern, mechanism))
    return tuple(checked)


@dataclass(frozen=True)
class Prefetch:
    """Copy units into slots ahead of use, whole layers by the group rule.

    Attributes:
        group_size: layers per group (``--offload-group-size``).
        num_in_group: of every group, the last this many are offloaded (``--offload-num-in-group``).
        prefetch_step: how many units ahead the copies run = number of slots (``--offload-prefetch-step``).
        params: name patterns (:mod:`headrace.model.patterns`) that narrow what is offloaded inside those layers; empty
            means every parameter of 64 KiB or more.
        mode: the store (``--offload-mode``).
    """

    group_size: int = 1
    num_in_group: int = 1
    prefetch_step: int = 1
    params: Sequence[str] = ()
    mode: Mode = "cpu"

    def __post_init__(self) -> None:
        _check_int("group_size", self.group_size, "--offload-group-size")
        _check_int("num_in_group", self.num_in_group, "--offload-num-in-group")
        _check_int("prefetch_step", self.prefetch_step, "--offload-prefetch-step")
        if self.num_in_group > self.group_size:
            raise OptionError(
                f"num_in_group = {self.num_in_group} is larger than group_size = {self.group_size}: of a group of "
                f"{self.group_size} layers at most {self.group_size} can be offloaded; lower --offload-num-in-group"
            )
        _check_mode(self.mode)
        object.__setattr__(self, "params", _as_names(self.params))


@dataclass(frozen=True)
class UVA:
    """Read tensors in place from where they rest, without a slot.

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
        if self.max_bytes is not None:
            object.__setattr__(self, "max_bytes", _size_of("max_bytes", self.max_bytes, "--cpu-offload-gb"))
        _check_mode(self.mode)
        object.__setattr__(self, "params", _as_names(self.params))

    @property
    def limit_bytes(self) -> int | None:
        """``max_bytes`` as a number."""
        return cast("int | None", self.max_bytes)


@dataclass(frozen=True)
class Workload:
    """What the planner expects to run: it decides which plan is fastest, and what memory is left for weights.

    Attributes:
        batch_sizes: rows of a step, i.e. sequences that decode together; the plan has to fit the largest, and is the
            one with the least geometric mean of step times over all of them (``--batch``).
        context: tokens per sequence in the KV cache; 0 plans without a cache and without activations, so that the
            budget is for the weights alone (``--context``).
        repeated: name patterns of what every step runs. The rest runs once per call, so none of it stays on the device
            that may be offloaded. Empty means that every step runs everything.
    """

    batch_sizes: Sequence[int] = (1,)
    context: int = 0
    repeated: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.batch_sizes, int | str) or not self.batch_sizes:
            raise OptionTypeError(
                f"batch_sizes: expected a list such as [1, 16], found {self.batch_sizes!r} (--batch 1,16)"
            )
        for size in self.batch_sizes:
            _check_int("batch size", size, "--batch 1,16,256")
        object.__setattr__(self, "batch_sizes", tuple(dict.fromkeys(self.batch_sizes)))
        _check_int("context", self.context, "--context 4096", at_least=0)
        object.__setattr__(self, "repeated", _as_names(self.repeated))


# (name pattern, mechanism): what matches the pattern and no earlier one is reached this way.
Rule = tuple[str, Mechanism]


@dataclass(frozen=True)
class Budget:
    """A device-memory budget; headrace makes the plan.

    Attributes:
        device_memory: residents and slots together stay within this, and the KV cache and activations of the workload
            too where it states a context (``--device-memory``).
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
    """

    device_memory: str | int
    params: Sequence[str] = ()
    mode: Mode | None = None
    rules: Sequence[Rule] = ()
    workload: Workload = Workload()
    host_memory: str | int | None = None
    expert_slots: int | None = None
    peer_memory: str | int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "device_memory", _size_of("device_memory", self.device_memory, "--device-memory"))
        for name in ("host_memory", "peer_memory"):
            if (size := getattr(self, name)) is not None:
                object.__setattr__(self, name, _size_of(name, size, f"--{name.replace('_', '-')}"))
        if self.mode is not None:
            _check_mode(self.mode)
        object.__setattr__(self, "params", _as_names(self.params))
        object.__setattr__(self, "rules", _as_rules(self.rules))
        if not isinstance(self.workload, Workload):
            found = type(self.workload).__name__
            raise OptionTypeError(f"workload: expected a headrace.config.Workload, found {found}")
        if self.expert_slots is not None:
            _check_int("expert_slots", self.expert_slots, "--expert-slots")

    @property
    def num_bytes(self) -> int:
        """The budget in bytes."""
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
    """

    rules: Sequence[Rule]
    prefetch_step: int = 2
    mode: Mode = "cpu"
    expert_slots: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", _as_rules(self.rules))
        if not self.rules:
            raise OptionError('rules: expected at least one, e.g. [("experts", "uva")] (--offload-rule experts=uva)')
        _check_int("prefetch_step", self.prefetch_step, "--offload-prefetch-step")
        _check_mode(self.mode)
        if self.expert_slots is not None:
            _check_int("expert_slots", self.expert_slots, "--expert-slots")
        if (self.expert_slots is not None) != any(mechanism == "cache" for _, mechanism in self.rules):
            raise OptionError(
                f"expert_slots = {self.expert_slots}: without a budget, a rule that says cache needs a number of "
                f"slots, and no other rule takes one; give both, e.g. --offload-rule experts=cache --expert-slots 16, "
                f"or a budget (--device-memory SIZE)"
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
        if self.backend not in get_args(Backend):
            raise OptionError(
                f"backend {self.backend!r}: expected one of {', '.join(get_args(Backend))} (--offload-backend)"
            )
        for name, needs in (("prefetch", "--offload-group-size"), ("uva", "--cpu-offload-gb")):
            if self.backend == name and getattr(self, name) is None:
                raise OptionError(f"backend {name!r} needs {needs}, which is not set")
        if self.backend == "auto" and self.prefetch is not None and self.uva is not None:
            raise OptionError(
                "both --offload-group-size and --cpu-offload-gb are set, and each says what is offloaded: leave one of "
                "them out (of OffloadConfig, or say which with backend='prefetch' or backend='uva')"
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
        "1: poison released slots, verify a checksum whenever a unit arrives or leaves; the command line shows "
        "tracebacks",
    ),
    "HEADRACE_READERS": (
        "cores",
        "readers of files, 1 to 1024. The default leaves one core in eight free for a GPU's ring, with 14 readers at "
        "most; loading uses 8 to 16",
    ),
    "HEADRACE_DISABLE_PIN_MEMORY": (
        "0",
        "1: host memory of a GPU's stores is ordinary memory (slow, cannot be captured)",
    ),
    "HEADRACE_DISABLE_UVA": ("0", "1: what a GPU would read in place is moved into a slot on demand instead"),
    "HEADRACE_DISABLE_CACHE": (
        "0",
        "1: what was read of a model's folder is neither kept nor used",
    ),
    "HEADRACE_PEER_TIMEOUT": ("600", "seconds that a rank waits for another one during an offload with `group=`"),
    "HEADRACE_API_KEY": ("none", "`headrace serve`: what requests have to carry as a bearer token, as `--api-key`"),
    "HEADRACE_SGLANG": (
        "0",
        "1, or a JSON object of options: headrace is the weight offloader of SGLang in this environment",
    ),
    "HEADRACE_BENCH_WITHOUT": (
        "none",
        "benchmarks inside vLLM: optional modules that this machine lacks, by commas",
    ),
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


def cache_folder() -> Path | None:
    """Where what was measured or read is kept: ``XDG_CACHE_HOME``, else ``~/.cache``; ``None`` without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "headrace"
    except RuntimeError:  # neither HOME nor an entry in passwd, as a container with a bare user id has it
        return None


def cache_disabled() -> bool:
    """Whether ``HEADRACE_DISABLE_CACHE`` forbids keeping, and using, what was read of folders."""
    return _switch("HEADRACE_DISABLE_CACHE")


def _switch(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("", "0", "1"):
        raise OptionError(f"{name}={value!r}: expected 0 or 1")
    return value == "1"


def peer_timeout_s() -> float:
    """Seconds that a rank waits for another one during an offload that they share: ``HEADRACE_PEER_TIMEOUT``."""
    return float(_count("HEADRACE_PEER_TIMEOUT", os.environ.get("HEADRACE_PEER_TIMEOUT", "600"), "seconds", 10**7))


def reader_threads(at_least: int = 1, at_most: int | None = None, spare_one_in: int | None = None) -> int:
    """Threads that read files: of the CPU link, of the readers' process of a GPU, and of loading.

    ``HEADRACE_READERS``, or one per core this process may use, but for ``spare_one_in`` so many, within ``at_least``
    and ``at_most``.
    """
    value = os.environ.get("HEADRACE_READERS")
    if value is None:
        cores = len(os.sched_getaffinity(0))  # not os.cpu_count(): a container may have a few cores of many
        if spare_one_in is not None:
            cores -= cores // spare_one_in
        return max(at_least, cores if at_most is None else min(cores, at_most))
    return _count("HEADRACE_READERS", value, "threads", _MOST_READERS)


def _count(name: str, value: str, what: str, most: int) -> int:
    # By its length first: int() refuses thousands of digits in words of its own.
    if not value.isdecimal() or len(value) > len(str(most)) or not 1 <= int(value) <= most:
        raise OptionError(f"{name}={value[:40]!r}: expected a whole number of {what}, at least 1 and at most {most}")
    return int(value)
