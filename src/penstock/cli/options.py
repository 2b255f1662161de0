"""The flags that say what is offloaded, how, and from where; the same for every verb that takes a model.

Flags that vLLM has keep their names and meanings there. Contradictions and flags without effect are errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from penstock.cli.values import counts, target_device
from penstock.config import UVA, Budget, Mode, OffloadConfig, Policy, Prefetch, Rules, Workload, gib_limit, parse_rule
from penstock.errors import OptionError

if TYPE_CHECKING:
    import torch

    from penstock.plan import Plan
    from penstock.stores.disk import DiskOptions

__all__ = ["LIST_FLAGS", "OffloadFlags", "with_offload_flags", "with_some_offload_flags"]

# Flags that take a list, each with a value to show.
LIST_FLAGS = {"--cpu-offload-params": "mlp", "--offload-params": "mlp", "--offload-rule": "experts=uva"}

_PREFETCH_FLAGS = ("offload_group_size", "offload_num_in_group", "offload_prefetch_step")
_WORKLOAD_FLAGS = ("batch", "context", "host_memory")
_UVA_FLAGS = ("cpu_offload_gb", "cpu_offload_params")
_DISK_FLAGS = ("disk_direct", "disk_drop_cache")

# The stores that a verb can open.
_MODES = ("cpu", "shm_cpu", "disk", "meta")


def _option(flag: str, metavar: str, text: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=text, rich_help_panel="Offloading", show_default=False)


@dataclass(frozen=True)
class OffloadFlags:
    """The offloading flags as given; ``None`` and ``()`` mean not given. Each field's help says what it means."""

    device_memory: Annotated[
        str | None,
        _option(
            "--device-memory",
            "SIZE",
            "Device memory for weights, i.e. residents and slots, e.g. 20GiB; penstock makes the plan.",
        ),
    ] = None
    batch: Annotated[
        str | None, _option("--batch", "N,N,...", "Rows of a step to plan for, e.g. 1,16,256 (default 1).")
    ] = None
    context: Annotated[
        int | None,
        _option("--context", "N", "Tokens per sequence: cache and activations count in --device-memory, too."),
    ] = None
    host_memory: Annotated[
        str | None,
        _option(
            "--host-memory",
            "SIZE",
            "Offloaded weights in host memory stay within this, e.g. 64GiB (default what is free); the rest stays in "
            "the files.",
        ),
    ] = None
    offload_backend: Annotated[
        str | None,
        _option("--offload-backend", "NAME", "auto (default): as the other flags imply; prefetch, uva or none."),
    ] = None
    cpu_offload_gb: Annotated[
        float | None, _option("--cpu-offload-gb", "N", "Read up to N GiB in place instead of copying; 0: off.")
    ] = None
    cpu_offload_params: Annotated[
        list[str] | None, _option("--cpu-offload-params", "NAME...", "Names that may be read in place.")
    ] = None
    offload_group_size: Annotated[
        int | None,
        _option("--offload-group-size", "N", "Group every N layers; the last of each are offloaded; 0: off."),
    ] = None
    offload_num_in_group: Annotated[
        int | None, _option("--offload-num-in-group", "N", "Layers of each group that are offloaded (default 1).")
    ] = None
    offload_prefetch_step: Annotated[
        int | None,
        _option("--offload-prefetch-step", "N", "Units copied ahead = number of slots (default 1; with rules 2)."),
    ] = None
    offload_params: Annotated[
        list[str] | None,
        _option("--offload-params", "NAME...", "Names that may be offloaded: segments, groups, globs or re:REGEX."),
    ] = None
    offload_rule: Annotated[
        list[str] | None,
        _option(
            "--offload-rule",
            "PATTERN=MECHANISM...",
            "How what a pattern matches is reached: resident, prefetch or uva; the first match counts.",
        ),
    ] = None
    offload_mode: Annotated[
        str | None,
        _option(
            "--offload-mode",
            "NAME",
            "Where all offloaded weights rest: cpu, shm_cpu (torchrun), disk (default on a CPU), meta (nowhere; "
            "plan only). Default on a GPU: cpu, and disk for what does not fit there.",
        ),
    ] = None
    device: Annotated[
        str | None, _option("--device", "NAME", "Where compute runs: cpu or cuda (default cuda where there is one).")
    ] = None
    plan: Annotated[
        Path | None, _option("--plan", "FILE", "Carry out the plan that `penstock plan MODEL ... --save FILE` wrote.")
    ] = None
    disk_direct: Annotated[bool, _option("--disk-direct", "", "Read files past the page cache (O_DIRECT).")] = False
    disk_drop_cache: Annotated[
        bool, _option("--disk-drop-cache", "", "Give pages of the files back to the system after reading.")
    ] = False

    def policy(self, on_gpu: bool | None = None, in_engine: bool = False) -> Policy | Plan | None:
        """What the flags ask for; ``None`` when they ask for nothing to be offloaded.

        ``on_gpu``: whether it is for a GPU; ``None`` asks :meth:`target`. ``in_engine``: for an engine, which has other
        stores than our own verbs and says itself which.

        Raises:
            OptionError: flags that contradict one another or have no effect; a plan file that is none.
        """
        if not in_engine:
            self._refuse_mode()
        if self.plan is not None:
            return self._saved_plan(self.plan)
        if self.device_memory is not None:
            return self._budget(self.device_memory)
        self._refuse_workload()
        mode = self._mode(self.target().type == "cuda" if on_gpu is None else on_gpu)
        if self.offload_rule:
            return self._rules(self.offload_rule, mode)
        self._refuse_lone_flags()
        config = OffloadConfig(self._backend, self._prefetch(mode), self._uva(mode))  # type: ignore[arg-type]
        chosen = config.resolved
        if chosen != "prefetch":
            self._refuse(("offload_group_size", "offload_params"), f"with --offload-backend {chosen}")
        if chosen != "uva":
            self._refuse(_UVA_FLAGS, f"with --offload-backend {chosen}")
        if chosen == "none":
            self._refuse(("offload_mode",), "when nothing is offloaded; add --device-memory or --offload-group-size")
            return None
        return config.prefetch if chosen == "prefetch" else config.uva

    def disk(self) -> DiskOptions | None:
        """How checkpoint files are read; ``None`` where no flag says."""
        from penstock.stores.disk import DiskOptions

        if not (self.disk_direct or self.disk_drop_cache):
            return None

        return DiskOptions(direct=self.disk_direct, drop_cache=self.disk_drop_cache)

    def target(self) -> torch.device:
        """Where compute runs.

        Raises:
            OptionError: ``--device`` names none that is here.
        """
        return target_device(self.device)

    @property
    def _backend(self) -> str:
        return self.offload_backend or "auto"

    def _mode(self, on_gpu: bool) -> Mode:
        # Verbs open checkpoints, whose files are a store already: for a CPU a second copy has to be asked for.
        return self.offload_mode or ("cpu" if on_gpu else "disk")  # type: ignore[return-value]

    def _refuse_mode(self) -> None:
        if self.offload_mode is None or self.offload_mode in _MODES:
            return
        why = ""
        if self.offload_mode == "sharded_gpu":
            why = (
                "; sharded_gpu is for programs that pass group= to penstock.offload: use shm_cpu, under torchrun, for "
                "one copy of the weights per host, or cpu"
            )
        raise OptionError(f"--offload-mode {self.offload_mode!r}: expected one of {', '.join(_MODES)}{why}")

    def _given(self, name: str) -> bool:
        # Zero is the "off" of vLLM's numeric flags.
        return getattr(self, name) not in (None, 0, [], ())

    def _refuse(self, names: Sequence[str], why: str) -> None:
        for name in names:
            if self._given(name):
                raise OptionError(f"{_flag(name)} has no effect {why}")

    def _saved_plan(self, path: Path) -> Plan:
        # All but how files are read: a plan says everything else.
        for name in (field.name for field in fields(self) if field.name not in ("plan", "device", *_DISK_FLAGS)):
            if self._given(name) and (name, self._backend) != ("offload_backend", "auto"):
                raise OptionError(
                    f"--plan and {_flag(name)} contradict each other: the plan in {str(path)!r} says already what is "
                    f"offloaded and how; leave one of the two out"
                )
        from penstock.plan import Plan

        return Plan.load(path)

    def _budget(self, size: str) -> Budget:
        for name in (*_PREFETCH_FLAGS, *_UVA_FLAGS, "offload_backend"):
            if self._given(name) and (name, self._backend) != ("offload_backend", "auto"):
                raise OptionError(
                    f"--device-memory and {_flag(name)} contradict each other: with a budget penstock makes the plan; "
                    f"leave one of the two out"
                )
        return Budget(
            size,
            self.offload_params or (),
            self.offload_mode,  # type: ignore[arg-type]
            [parse_rule(text) for text in self.offload_rule or ()],
            self._workload(),
            self.host_memory,
        )

    def _workload(self) -> Workload:
        batch_sizes = (1,) if self.batch is None else counts("--batch", self.batch)
        return Workload(batch_sizes, 0 if self.context is None else self.context)

    def _rules(self, texts: Sequence[str], mode: Mode) -> Rules:
        for name in (*_PREFETCH_FLAGS[:2], *_UVA_FLAGS, "offload_backend"):
            if self._given(name) and (name, self._backend) != ("offload_backend", "auto"):
                raise OptionError(
                    f"--offload-rule and {_flag(name)} contradict each other: rules say how each tensor is reached; "
                    f"leave one of the two out, or give --device-memory with the rules"
                )
        self._refuse(("offload_params",), "with --offload-rule; add a rule for these names, or --device-memory")
        rules = [parse_rule(text) for text in texts]
        if all(mechanism != "prefetch" for _, mechanism in rules):
            self._refuse(("offload_prefetch_step",), "without a rule that says prefetch")
        if self.offload_prefetch_step is None:
            return Rules(rules, mode=mode)
        return Rules(rules, self.offload_prefetch_step, mode)

    def _prefetch(self, mode: Mode) -> Prefetch | None:
        if not self._given("offload_group_size"):
            return None
        return Prefetch(
            group_size=self.offload_group_size or 1,
            num_in_group=1 if self.offload_num_in_group is None else self.offload_num_in_group,
            prefetch_step=1 if self.offload_prefetch_step is None else self.offload_prefetch_step,
            params=self.offload_params or (),
            mode=mode,
        )

    def _uva(self, mode: Mode) -> UVA | None:
        if not any(self._given(name) for name in _UVA_FLAGS):
            return None
        limit = gib_limit(self.cpu_offload_gb) if self.cpu_offload_gb else None
        return UVA(limit, self.cpu_offload_params or (), mode)

    def _refuse_workload(self) -> None:
        for name in _WORKLOAD_FLAGS:
            if getattr(self, name) is not None:
                raise OptionError(f"{_flag(name)} has no effect without --device-memory, which plans for it")

    def _refuse_lone_flags(self) -> None:
        if not self._given("offload_group_size"):
            self._refuse(_PREFETCH_FLAGS[1:], "without --offload-group-size")
            self._refuse(("offload_params",), "without --device-memory or --offload-group-size")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def with_offload_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """Add the flags of :class:`OffloadFlags` to ``verb``, which receives them as its argument ``flags``."""
    return with_some_offload_flags(*(field.name for field in fields(OffloadFlags)))(verb)


def with_some_offload_flags(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As :func:`with_offload_flags`, for a verb that takes only these."""

    def add(verb: Callable[..., None]) -> Callable[..., None]:
        @wraps(verb)
        def run(**values: Any) -> None:
            flags = OffloadFlags(**{name: values.pop(name) for name in names})
            verb(**values, flags=flags)

        parameters = [*_own_parameters(verb), *_flag_parameters(names)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        del run.__wrapped__
        return run

    return add


def _own_parameters(verb: Callable[..., None]) -> list[inspect.Parameter]:
    hints = get_type_hints(verb, include_extras=True)
    parameters = inspect.signature(verb).parameters.values()
    return [p.replace(annotation=hints[p.name]) for p in parameters if p.name != "flags"]


def _flag_parameters(names: Sequence[str]) -> list[inspect.Parameter]:
    hints = get_type_hints(OffloadFlags, include_extras=True)
    return [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(OffloadFlags)
        if f.name in names
    ]
