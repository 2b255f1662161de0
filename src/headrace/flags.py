"""The offloading flags of the command line and of engines: one table, its checks, and the policy that flags mean.

Each field of :class:`OffloadFlags` is one flag with its help, the check of its value, the flags that it needs, and
those that it excludes. The command line makes its options from the table; an engine's adapter fills the same class from
the engine's configuration and from keys of headrace's own (:class:`EngineKeys`). So a value or a contradiction is
refused by one check in one wording, wherever it comes from. Flags that vLLM has keep their names and meanings.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

from headrace.config import (
    CODES,
    UVA,
    Backend,
    Budget,
    Check,
    Mechanism,
    Mode,
    Policy,
    Prefetch,
    Rule,
    Rules,
    Workload,
    check_pattern,
    codec,
    count,
    names,
    one_of,
    row_counts,
    rules,
    size,
    size_or_auto,
)
from headrace.errors import OptionError, OptionTypeError

_GROUP = ("offload_group_size", "offload_num_in_group")
_PREFETCH = (*_GROUP, "offload_prefetch_step")
_UVA = ("cpu_offload_gb", "cpu_offload_params")
# Numbers that vLLM turns off by 0.
_OFF_BY_ZERO = ("cpu_offload_gb", "offload_group_size")
# Flags that select what is offloaded; the others shape what one of these selects.
_ASKING = ("device_memory", "offload_group_size", *_UVA, "offload_rule")
_SHAPING = (
    "batch", "context", "host_memory", "peer_memory", "offload_backend", *_PREFETCH[1:], "offload_params",
    "expert_slots", "offload_mode", "offload_codec",
)  # fmt: skip
# Flags that have no effect without one of others.
_NEEDS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("batch", "context", "host_memory", "peer_memory"), ("device_memory",)),
    "offload_num_in_group": ("offload_group_size",),
    "offload_prefetch_step": ("offload_group_size", "offload_rule"),
    "offload_params": ("device_memory", "offload_group_size"),
    "expert_slots": ("device_memory", "offload_rule"),
    "offload_codec": ("device_memory", "offload_group_size", "offload_rule"),
    **dict.fromkeys(("offload_mode", "measure_stalls"), _ASKING),
}
# On the command line rules, and names for reads in place, need no other flag; in engines they do.
_ENGINE_NEEDS = {
    **_NEEDS,
    **dict.fromkeys(("offload_rule", "expert_slots"), ("device_memory",)),
    "offload_codec": ("device_memory", "offload_group_size"),
    "offload_prefetch_step": ("offload_group_size",),
    "cpu_offload_params": ("cpu_offload_gb",),
    **dict.fromkeys(("offload_mode", "measure_stalls"), (*_ASKING[:2], "cpu_offload_gb")),
}
# Flags that contradict others, and why.
EXCLUDES: Mapping[str, tuple[Sequence[str], str]] = {
    "device_memory": ((*_PREFETCH, *_UVA, "offload_backend"), "with a budget headrace makes the plan"),
    "offload_group_size": (_UVA, "each says what is offloaded"),
    "offload_rule": ((*_GROUP, *_UVA, "offload_backend"), "rules say how each tensor is reached"),
    "plan": ((*_ASKING, *_SHAPING), "the plan says already what is offloaded and how"),
}


# -- the checks that flags have beside those of policies ---------------------------------------------------------------


def flag_of(name: str) -> str:
    """The flag of a field: ``--offload-rule`` of ``offload_rule``."""
    return "--" + name.replace("_", "-")


def counts(flag: str, text: str) -> list[int]:
    """Numbers of rows, each at least 1, comma-separated.

    Raises:
        OptionError: anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    # isdigit() alone holds for digits of other scripts.
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise OptionError(f"{flag} {text!r}: expected numbers of rows, each at least 1, such as {flag} 1,16,256")
    return [int(part) for part in parts]


def parse_rules(name: str, texts: Any) -> tuple[Rule, ...]:
    """The rules ``PATTERN=MECHANISM``; the pattern may contain ``=``.

    Raises:
        OptionError: not of that form, or no such mechanism.
    """
    pairs = []
    for text in names(name, texts):
        pattern, _, mechanism = text.rpartition("=")  # the last one: regular expressions contain it too
        if not pattern or mechanism not in get_args(Mechanism):
            found = f"a mechanism, found {mechanism!r}" if pattern else "a mechanism"
            raise OptionError(
                f"{name} {text!r}: expected a name pattern, '=' and {found}; write PATTERN=MECHANISM with one of "
                f"{', '.join(get_args(Mechanism))}, e.g. experts=uva or 're:.*\\.down_proj\\..*=prefetch'"
            )
        check_pattern(pattern)
        pairs.append((pattern, mechanism))
    return rules(name, pairs)


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    for pattern in (patterns := names(name, value)):
        check_pattern(pattern)
    return patterns


def _batch(name: str, value: Any) -> Sequence[int]:
    if isinstance(value, str):
        return counts(name, value)
    return row_counts(name, [value] if isinstance(value, int) else value)


def _gib(name: str, value: float) -> int:
    if not 1 <= value * 2**30 < math.inf:  # NaN is neither
        raise OptionError(
            f"{name} {value:g}: expected a number of GiB, at least one byte, such as 4 or 0.5; 0 turns it off"
        )
    return int(value * 2**30)


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionTypeError(f"{name}: expected true or false, found {value!r}")
    return value


# -- the table ---------------------------------------------------------------------------------------------------------


def _as_it_is(name: str, value: Any) -> Any:
    return value


def row(metavar: str, text: str, check: Check = _as_it_is, off: Any = None) -> Any:
    """A field of a table of flags: its metavar and help, the check of its value, and the value of a flag not given."""
    return field(default=off, metadata={"metavar": metavar, "help": text, "check": check})


@dataclass(frozen=True)
class Surface:
    """Place where flags are written, as far as it changes what is allowed, and how errors name them.

    Attributes:
        modes: the stores that can be opened there.
        inside: for errors, e.g. ``" inside vLLM"``.
        backends: values of ``--offload-backend``.
        needs: flags that have no effect without one of others.
        spelling: names of flags that are not written as flags.
    """

    modes: tuple[Mode, ...] = get_args(Mode)
    inside: str = ""
    backends: tuple[str, ...] = get_args(Backend)
    needs: Mapping[str, Sequence[str]] = field(default_factory=lambda: _NEEDS)
    spelling: Mapping[str, str] = field(default_factory=dict)

    def name_of(self, flag: str) -> str:
        """How a user of this surface writes ``flag``."""
        return self.spelling.get(flag, flag_of(flag))

    def check_of(self, flag: str) -> Check:
        """The check of a value of ``flag``."""
        if flag == "offload_mode":
            return one_of(self.modes, self.inside)
        if flag == "offload_backend":
            return one_of(self.backends, self.inside)
        if flag == "device_memory" and self.needs is _ENGINE_NEEDS:  # engines give caches what is left
            return size
        return cast(Check, _ROWS[flag].metadata["check"])


COMMAND_LINE = Surface()


def engine_surface(engine: str) -> Surface:
    """Surface of the flags and keys inside an engine."""
    return Surface(("cpu", "shm_cpu"), f" inside {engine}", ("auto", "prefetch", "uva"), _ENGINE_NEEDS)


@dataclass(frozen=True)
class OffloadFlags:
    """The flags as given. ``None``, ``False``, an empty list, and 0 for numbers that vLLM turns off by 0: not given."""

    device_memory: str | None = row(
        "SIZE", "Device memory for weights, e.g. 20GiB, or auto: what is free; headrace makes the plan.", size_or_auto
    )
    batch: str | None = row("N,N,...", "Rows of a step to plan for, e.g. 1,16,256 (default 1).", _batch)
    context: int | None = row(
        "N", "Tokens per sequence: cache and activations count in --device-memory, too.", partial(count, at_least=0)
    )
    host_memory: str | None = row(
        "SIZE", "Host memory for offloaded weights, e.g. 64GiB (default what is free); the rest stays in files.", size
    )
    peer_memory: str | None = row(
        "SIZE", "Memory of another, idle GPU for offloaded weights, filled before host memory, e.g. 60GiB.", size
    )
    offload_backend: str | None = row("NAME", "auto (default): as the other flags imply; prefetch, uva or none.")
    cpu_offload_gb: float | None = row("N", "Read up to N GiB in place instead of copying; 0: off.", _gib)
    cpu_offload_params: list[str] | None = row("NAME...", "Names that may be read in place.", _patterns)
    offload_group_size: int | None = row("N", "Group every N layers; the last of each are offloaded; 0: off.", count)
    offload_num_in_group: int | None = row("N", "Layers of each group that are offloaded (default 1).", count)
    offload_prefetch_step: int | None = row(
        "N", "Units copied ahead = number of slots (default 1; with rules 2).", count
    )
    offload_params: list[str] | None = row(
        "NAME...", "Names that may be offloaded: segments, groups, globs or re:REGEX.", _patterns
    )
    offload_rule: list[str] | None = row(
        "RULE...",
        "PATTERN=MECHANISM: access mechanism for the tensors that PATTERN matches: resident, prefetch, uva or cache; "
        "the first match counts.",
        parse_rules,
    )
    expert_slots: int | None = row(
        "N", "Cached experts of each layer on the device (default: as many as --device-memory allows).", count
    )
    offload_mode: str | None = row(
        "NAME",
        "Where offloaded weights are stored: cpu, disk (default on a CPU), meta (nowhere; plan only); under torchrun "
        "shm_cpu, sharded_cpu or sharded_gpu. Default on a GPU: cpu, and disk for what does not fit there.",
    )
    offload_codec: str | None = row(
        "NAME",
        "exp3: bf16 that is prefetched crosses the link in 0.70 of its bytes; none; auto (default with "
        "--device-memory): where a step is predicted to be faster with it.",
        codec,
    )
    device: str | None = row("NAME", "Where compute runs: cpu or cuda (default cuda where there is one).")
    plan: Path | None = row("FILE", "Use the plan that `headrace plan MODEL ... --save FILE` wrote.")
    disk_direct: bool = row("", "Read files past the page cache (O_DIRECT).", off=False)
    disk_drop_cache: bool = row("", "Drop the files' pages from the page cache after reading.", off=False)
    measure_stalls: bool = row("", "Time every wait for a unit.", _switch, off=False)

    def given(self, name: str) -> bool:
        """Whether the flag of the field ``name`` was given; ``--context 0`` was, and ``--offload-backend auto`` not."""
        value = getattr(self, name)
        if name in _OFF_BY_ZERO:
            return bool(value)
        is_off = name == "offload_backend" and value == "auto"
        return value is not None and value is not False and value not in ([], ()) and not is_off

    def _given(self) -> list[str]:
        return [name for name in _ROWS if self.given(name)]

    def asks(self) -> bool:
        """Whether a flag asks for an offload; others only say how."""
        return self.plan is not None or any(map(self.given, _ASKING))

    def policy(self, surface: Surface = COMMAND_LINE, default_mode: Mode = "cpu") -> Policy | None:
        """The policy that the flags ask for, ``--plan`` aside; ``None`` where nothing is to be offloaded.

        ``default_mode``: the store without ``--offload-mode``; a budget decides by itself.

        Raises:
            OptionError: flags that contradict one another or have no effect, or a value that a flag cannot have.
        """
        given = {name: surface.check_of(name)(surface.name_of(name), getattr(self, name)) for name in self._given()}
        self._check_combination(surface)
        params, codec = given.get("offload_params", ()), given.get("offload_codec", "none")
        mode: Mode = given.get("offload_mode", "cpu" if codec in CODES else default_mode)
        if "device_memory" in given:
            return Budget(
                given["device_memory"],
                params,
                given.get("offload_mode"),
                given.get("offload_rule", ()),
                Workload(given.get("batch", (1,)), given.get("context", 0)),
                given.get("host_memory"),
                given.get("expert_slots"),
                given.get("peer_memory"),
                given.get("offload_codec", "auto"),
            )
        if rules := given.get("offload_rule"):
            if "offload_prefetch_step" in given and all(mechanism != "prefetch" for _, mechanism in rules):
                name = surface.name_of("offload_prefetch_step")
                raise OptionError(
                    f"{name} has no effect without a rule that says prefetch: add one, or leave {name} out"
                )
            return Rules(rules, given.get("offload_prefetch_step", 2), mode, given.get("expert_slots"), codec)
        if "offload_group_size" in given:
            num_in_group, step = given.get("offload_num_in_group", 1), given.get("offload_prefetch_step", 1)
            return Prefetch(given["offload_group_size"], num_in_group, step, params, mode, codec)
        if given.keys() & {*_UVA}:
            return UVA(given.get("cpu_offload_gb"), given.get("cpu_offload_params", ()), mode)
        return None

    def _check_combination(self, surface: Surface) -> None:
        """Raise ``OptionError`` for the first contradiction, and for the first flag that has no effect."""
        for name in self._given():
            others, why = EXCLUDES.get(name, ((), ""))
            for other in filter(self.given, others):
                raise OptionError(
                    f"{surface.name_of(name)} and {surface.name_of(other)} contradict each other: {why}; leave one of "
                    f"the two out"
                )
        # Contradictions first: of two flags that exclude each other one may also lack what it needs.
        self._check_backend(surface)
        for flag in self._given():
            needs = surface.needs.get(flag, ())
            if needs and not any(map(self.given, needs)):
                name, missing = surface.name_of(flag), [surface.name_of(need) for need in needs]
                alternatives = " or ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
                raise OptionError(
                    f"{name} has no effect without {alternatives}{surface.inside}: add "
                    f"{'it' if len(missing) == 1 else 'one of them'}, or leave {name} out"
                )

    def _check_backend(self, surface: Surface) -> None:
        """``--offload-backend`` repeats what the other flags imply: they have to agree."""
        backend, name = self.offload_backend or "auto", surface.name_of("offload_backend")
        if backend == "auto":
            return
        own = {"prefetch": ("offload_group_size",), "uva": _UVA}.get(backend, ())
        if own and not any(self.given(flag) for flag in own):
            raise OptionError(f"{name} {backend} needs {surface.name_of(own[0])}, which is not set")
        for flag in _ASKING:
            if self.given(flag) and flag not in own:
                raise OptionError(
                    f"{surface.name_of(flag)} has no effect with {name} {backend}; leave one of the two out"
                )


_ROWS = {row.name: row for row in fields(OffloadFlags)}


# -- keys of engines ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineOptions:
    """Options of an offloader inside an engine.

    Attributes:
        policy: ``None``: nothing is offloaded.
        mode: the store.
        replicas: number of engines of this host that share one store, where vLLM has no group of them.
        measure_stalls: time every wait.
    """

    policy: Prefetch | UVA | Budget | None
    mode: Mode = "cpu"
    replicas: int | None = None
    measure_stalls: bool = False


@dataclass(frozen=True)
class EngineKeys:
    """headrace's own keys in the configuration of an engine, which has no flags for them.

    Attributes:
        prefix: prefix of a key in errors, ``"headrace"`` of ``headrace.batch``.
        place: where keys are written, for errors.
        form: how to write them, for errors.
        shared: keys that have the meaning of a flag of headrace's command line.
        surface: what the engine allows.
        others: keys that the adapter reads itself.
    """

    prefix: str
    place: str
    form: str
    shared: tuple[str, ...]
    surface: Surface
    others: tuple[str, ...] = ()

    @property
    def flag_of_key(self) -> dict[str, str]:
        """The field of :class:`OffloadFlags` of each shared key."""
        renamed = {
            "params": "offload_params",
            "rules": "offload_rule",
            "mode": "offload_mode",
            "codec": "offload_codec",
        }
        return {key: renamed.get(key, key) for key in self.shared}

    @property
    def names(self) -> tuple[str, ...]:
        """All keys."""
        return (*self.shared, *self.others)

    def known(self, given: Any) -> Mapping[str, Any]:
        """``given``, an object that has none but these keys.

        Raises:
            OptionError, OptionTypeError: it is none, or has another key.
        """
        if not isinstance(given, Mapping):
            raise OptionTypeError(
                f"{self.prefix}: expected an object, found {type(given).__name__} {given!r}; {self.form}"
            )
        for key in given:
            if key not in self.names:
                nearest = difflib.get_close_matches(str(key), self.names, n=1, cutoff=0.4)
                hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
                raise OptionError(f"{self.prefix}.{key} is unknown: expected one of {', '.join(self.names)}{hint}")
        return given

    def options(self, keys: Mapping[str, Any], flags: OffloadFlags, spelling: Mapping[str, str]) -> EngineOptions:
        """Options that ``keys`` and ``flags`` together ask for; errors name flags by ``spelling``.

        Raises:
            OptionError, OptionTypeError: an invalid value, or one that is given twice; options that contradict one
                another or have no effect.
        """
        names, values = {**spelling}, {}
        for key, flag in self.flag_of_key.items():
            if key not in keys:
                continue
            names[flag], values[flag] = f"{self.prefix}.{key}", keys[key]
            check = self.surface.check_of(flag)
            value = check(names[flag], keys[key])
            if flags.given(flag) and check(flag_of(flag), getattr(flags, flag)) != value:
                raise OptionError(
                    f"{names[flag]} is given twice: {keys[key]!r} in {self.place} and {getattr(flags, flag)!r} as a "
                    f"flag; leave one of them out"
                )
        merged = replace(flags, **values)
        policy = merged.policy(replace(self.surface, spelling=names))
        assert not isinstance(policy, Rules)  # rules need a budget in an engine
        mode = cast(Mode, merged.offload_mode or "cpu")
        if isinstance(policy, Budget):
            policy = replace(policy, mode=mode)
        return EngineOptions(policy, mode, None, merged.measure_stalls)
