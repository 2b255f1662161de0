"""The offloading flags of the command line and of engines: one table, its checks, and the policy that flags mean.

Each field of :class:`OffloadFlags` is one flag with its help, the flags that it needs, and those that it excludes. The
command line makes its options from the table; an engine's adapter fills the same class from the engine's configuration.
So a contradiction is refused by one check in one wording, wherever the flags come from. Flags that vLLM has keep their
names and meanings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, cast, get_args

from headrace.config import UVA, Backend, Budget, Mechanism, Mode, Policy, Prefetch, Rule, Rules, Workload
from headrace.errors import OptionError

__all__ = ["COMMAND_LINE", "OffloadFlags", "Surface", "counts", "flag_of", "parse_rules"]

_PREFETCH = ("offload_group_size", "offload_num_in_group", "offload_prefetch_step")
_UVA = ("cpu_offload_gb", "cpu_offload_params")
# Flags that select what is offloaded; the others shape what one of these selects.
_ASKING = ("device_memory", "offload_group_size", *_UVA, "offload_rule")
_SHAPING = (
    "batch", "context", "host_memory", "peer_memory", "offload_backend", *_PREFETCH[1:], "offload_params",
    "expert_slots", "offload_mode",
)  # fmt: skip


def _flag(
    metavar: str, text: str, *, needs: Sequence[str] = (), excludes: Sequence[str] = (), why: str = "", off: Any = None
) -> Any:
    """A field with its row of the table; ``why`` is the reason why the flags of ``excludes`` contradict it."""
    row = {"metavar": metavar, "help": text, "needs": needs, "excludes": excludes, "why": why}
    return field(default=off, metadata=row)


@dataclass(frozen=True)
class Surface:
    """Where flags are written, as far as that changes what is allowed, and how errors name them.

    Attributes:
        modes: the stores that can be opened there.
        inside: for errors, e.g. ``" inside vLLM"``.
        backends: values of ``--offload-backend``.
        needs: rows of the table that differ there.
        spelling: names of flags that are not written as flags.
    """

    modes: tuple[Mode, ...] = get_args(Mode)
    inside: str = ""
    backends: tuple[str, ...] = get_args(Backend)
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    spelling: Mapping[str, str] = field(default_factory=dict)

    def name_of(self, flag: str) -> str:
        """How a user of this surface writes ``flag``."""
        return self.spelling.get(flag, flag_of(flag))


COMMAND_LINE = Surface()


@dataclass(frozen=True)
class OffloadFlags:
    """The flags as given. ``None``, ``False``, an empty list, and 0 for numbers that vLLM turns off by 0: not given."""

    device_memory: str | None = _flag(
        "SIZE",
        "Device memory for weights, i.e. residents and slots, e.g. 20GiB; headrace makes the plan.",
        excludes=(*_PREFETCH, *_UVA, "offload_backend"),
        why="with a budget headrace makes the plan",
    )
    batch: str | None = _flag(
        "N,N,...", "Rows of a step to plan for, e.g. 1,16,256 (default 1).", needs=("device_memory",)
    )
    context: int | None = _flag(
        "N", "Tokens per sequence: cache and activations count in --device-memory, too.", needs=("device_memory",)
    )
    host_memory: str | None = _flag(
        "SIZE",
        "Offloaded weights in host memory stay within this, e.g. 64GiB (default what is free); the rest stays in the "
        "files.",
        needs=("device_memory",),
    )
    peer_memory: str | None = _flag(
        "SIZE",
        "Memory of another, idle GPU that holds offloaded weights before host memory does, e.g. 60GiB.",
        needs=("device_memory",),
    )
    offload_backend: str | None = _flag("NAME", "auto (default): as the other flags imply; prefetch, uva or none.")
    cpu_offload_gb: float | None = _flag("N", "Read up to N GiB in place instead of copying; 0: off.")
    cpu_offload_params: list[str] | None = _flag("NAME...", "Names that may be read in place.")
    offload_group_size: int | None = _flag(
        "N",
        "Group every N layers; the last of each are offloaded; 0: off.",
        excludes=_UVA,
        why="each says what is offloaded",
    )
    offload_num_in_group: int | None = _flag(
        "N", "Layers of each group that are offloaded (default 1).", needs=("offload_group_size",)
    )
    offload_prefetch_step: int | None = _flag(
        "N",
        "Units copied ahead = number of slots (default 1; with rules 2).",
        needs=("offload_group_size", "offload_rule"),
    )
    offload_params: list[str] | None = _flag(
        "NAME...",
        "Names that may be offloaded: segments, groups, globs or re:REGEX.",
        needs=("device_memory", "offload_group_size"),
    )
    offload_rule: list[str] | None = _flag(
        "RULE...",
        "PATTERN=MECHANISM: how what a pattern matches is reached: resident, prefetch, uva or cache; the first match "
        "counts.",
        excludes=(*_PREFETCH[:2], *_UVA, "offload_backend"),
        why="rules say how each tensor is reached",
    )
    expert_slots: int | None = _flag(
        "N",
        "Experts of each layer that the device holds of what is cached (default: as many as --device-memory allows).",
        needs=("device_memory", "offload_rule"),
    )
    offload_mode: str | None = _flag(
        "NAME",
        "Where all offloaded weights rest: cpu, disk (default on a CPU), meta (nowhere; plan only); under torchrun "
        "shm_cpu, sharded_cpu or sharded_gpu. Default on a GPU: cpu, and disk for what does not fit there.",
        needs=_ASKING,
    )
    device: str | None = _flag("NAME", "Where compute runs: cpu or cuda (default cuda where there is one).")
    plan: Path | None = _flag(
        "FILE",
        "Carry out the plan that `headrace plan MODEL ... --save FILE` wrote.",
        excludes=(*_ASKING, *_SHAPING),
        why="the plan says already what is offloaded and how",
    )
    disk_direct: bool = _flag("", "Read files past the page cache (O_DIRECT).", off=False)
    disk_drop_cache: bool = _flag("", "Give pages of the files back to the system after reading.", off=False)
    measure_stalls: bool = _flag("", "Time every wait for a unit.", needs=_ASKING, off=False)

    def given(self, name: str) -> bool:
        """Whether the flag of the field ``name`` was given; ``--context 0`` was, and ``--offload-backend auto`` not."""
        value = getattr(self, name)
        if name == "offload_backend":
            return value not in (None, "auto")
        return value is not None if name == "context" else value not in (None, 0, [], ())

    def policy(self, surface: Surface = COMMAND_LINE, default_mode: Mode = "cpu") -> Policy | None:
        """The policy that the flags ask for, ``--plan`` aside; ``None`` where nothing is to be offloaded.

        ``default_mode``: the store without ``--offload-mode``; a budget decides by itself.

        Raises:
            OptionError: flags that contradict one another or have no effect, or a value that a flag cannot have.
        """
        self._check(surface)
        mode = cast(Mode, self.offload_mode or default_mode)
        if self.device_memory is not None:
            rows = (1,) if self.batch is None else counts(surface.name_of("batch"), self.batch)
            return Budget(
                self.device_memory,
                self.offload_params or (),
                cast("Mode | None", self.offload_mode),
                parse_rules(self.offload_rule or ()),
                Workload(rows, self.context or 0),
                self.host_memory,
                self.expert_slots,
                self.peer_memory,
            )
        if self.offload_rule:
            rules = parse_rules(self.offload_rule)
            step = self.offload_prefetch_step
            if step is not None and all(mechanism != "prefetch" for _, mechanism in rules):
                name = surface.name_of("offload_prefetch_step")
                raise OptionError(
                    f"{name} has no effect without a rule that says prefetch: add one, or leave {name} out"
                )
            return Rules(rules, 2 if step is None else step, mode, self.expert_slots)
        if self.given("offload_group_size"):
            numbers = (self.offload_num_in_group, self.offload_prefetch_step)
            num_in_group, step = (1 if number is None else number for number in numbers)
            return Prefetch(cast(int, self.offload_group_size), num_in_group, step, self.offload_params or (), mode)
        if self.given("cpu_offload_gb") or self.given("cpu_offload_params"):
            gib = self.cpu_offload_gb
            if gib and not 1 <= gib * 2**30 < math.inf:  # NaN is neither
                raise OptionError(
                    f"--cpu-offload-gb {gib:g}: expected a number of GiB, at least one byte, such as 4 or 0.5; 0 turns "
                    f"it off"
                )
            return UVA(int(gib * 2**30) if gib else None, self.cpu_offload_params or (), mode)
        return None

    def _check(self, surface: Surface) -> None:
        """Raise ``OptionError`` for the first contradiction, and for the first flag that has no effect."""
        if self.offload_mode is not None and self.offload_mode not in surface.modes:
            raise OptionError(
                f"{surface.name_of('offload_mode')} {self.offload_mode!r}: expected one of {', '.join(surface.modes)}"
                f"{surface.inside}"
            )
        for row in self._given_rows():
            for other in row.metadata["excludes"]:
                if self.given(other):
                    raise OptionError(
                        f"{surface.name_of(row.name)} and {surface.name_of(other)} contradict each other: "
                        f"{row.metadata['why']}; leave one of the two out"
                    )
        # Contradictions first: of two flags that exclude each other one may also lack what it needs.
        self._check_backend(surface)
        for row in self._given_rows():
            needs = surface.needs.get(row.name, row.metadata["needs"])
            if needs and not any(self.given(name) for name in needs):
                name, missing = surface.name_of(row.name), [surface.name_of(need) for need in needs]
                alternatives = " or ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
                raise OptionError(
                    f"{name} has no effect without {alternatives}{surface.inside}: add "
                    f"{'it' if len(missing) == 1 else 'one of them'}, or leave {name} out"
                )

    def _check_backend(self, surface: Surface) -> None:
        """``--offload-backend`` repeats what the other flags imply: they have to agree."""
        backend, name = self.offload_backend or "auto", surface.name_of("offload_backend")
        if backend not in surface.backends:
            raise OptionError(f"{name} {backend!r}: expected one of {', '.join(surface.backends)}{surface.inside}")
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

    def _given_rows(self) -> list[Field[Any]]:
        return [row for row in fields(self) if self.given(row.name)]


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


def parse_rules(texts: Sequence[str]) -> list[Rule]:
    """The rules ``PATTERN=MECHANISM``; the pattern may contain ``=``.

    Raises:
        OptionError: not of that form, or no such mechanism.
    """
    rules: list[Rule] = []
    for text in texts:
        pattern, _, mechanism = text.rpartition("=")  # the last one: regular expressions contain it too
        if not pattern or mechanism not in get_args(Mechanism):
            found = f"a mechanism, found {mechanism!r}" if pattern else "a mechanism"
            raise OptionError(
                f"--offload-rule {text!r}: expected a name pattern, '=' and {found}; write PATTERN=MECHANISM with "
                f"one of {', '.join(get_args(Mechanism))}, e.g. experts=uva or 're:.*\\.down_proj\\..*=prefetch'"
            )
        rules.append((pattern, cast(Mechanism, mechanism)))
    return rules
