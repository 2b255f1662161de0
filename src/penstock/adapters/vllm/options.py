"""vLLM's offload flags and ``--additional-config '{"penstock": {...}}'`` -> one policy.

====================  ================================================================================================
key under "penstock"  meaning
====================  ================================================================================================
``device_memory``     a budget for the weights on each GPU, ``"20GiB"``: penstock makes the plan, in place of the flags
``batch``             sequences per step that a budget is planned for, ``[1, 16, 256]``; default 1
``params``            name patterns that narrow what a budget may offload (:mod:`penstock.select`)
``rules``             ``["experts=uva", ...]``: mechanisms that are not the planner's to choose, with a budget
``mode``              the store: ``cpu``, or ``shm_cpu`` for one copy per host among data-parallel ranks
``measure_stalls``    time every wait for a unit; costs two events each
====================  ================================================================================================
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config import UVA, Budget, Mode, Prefetch, Workload, parse_rule
from penstock.errors import OptionError, OptionTypeError
from penstock.offloaders.engine import EnginePolicy

__all__ = ["KEYS", "EngineOptions", "read_options"]

KEYS = ("device_memory", "batch", "params", "rules", "mode", "measure_stalls")
_MODES: tuple[Mode, ...] = ("cpu", "shm_cpu")
_BUDGET_ONLY = ("batch", "params", "rules")
_FORM = """write it like --additional-config '{"penstock": {"device_memory": "20GiB"}}'"""


@dataclass(frozen=True)
class EngineOptions:
    """What a worker is to do.

    Attributes:
        policy: ``None``: nothing is offloaded.
        mode: the store.
        measure_stalls: time every wait.
    """

    policy: EnginePolicy | None
    mode: Mode = "cpu"
    measure_stalls: bool = False


def read_options(offload_config: Any, additional_config: Any) -> EngineOptions:
    """The options of a worker.

    Args:
        offload_config: vLLM's ``OffloadConfig``.
        additional_config: vLLM's ``additional_config``; only its key ``penstock`` is read.

    Raises:
        OptionError, OptionTypeError: flags that contradict one another, an unknown key, a value it cannot have; the
            message says what to write.
    """
    given = _own(additional_config)
    mode = _choice(given.get("mode", "cpu"))
    measure_stalls = given.get("measure_stalls", False)
    if not isinstance(measure_stalls, bool):
        raise OptionTypeError(f"penstock.measure_stalls: expected true or false, found {measure_stalls!r}; {_FORM}")
    flags = _flag_policy(offload_config, mode)
    budget = _budget(given, mode)
    if flags is not None and budget is not None:
        raise OptionError(
            f"both penstock.device_memory = {given['device_memory']!r} and vLLM's offload flags are set, and each says "
            f"what is offloaded: leave one of them out"
        )
    return EngineOptions(flags or budget, mode, measure_stalls)


def _own(additional_config: Any) -> Mapping[str, Any]:
    given = additional_config.get("penstock", {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise OptionTypeError(f"penstock: expected an object, found {type(given).__name__} {given!r}; {_FORM}")
    for key in given:
        if key not in KEYS:
            nearest = difflib.get_close_matches(str(key), KEYS, n=1, cutoff=0.4)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise OptionError(f"penstock.{key}: expected one of {', '.join(KEYS)}{hint}")
    return given


def _choice(mode: Any) -> Mode:
    if mode not in _MODES:
        raise OptionError(f"penstock.mode {mode!r}: expected one of {', '.join(_MODES)} inside vLLM")
    return mode  # type: ignore[no-any-return]


def _flag_policy(config: Any, mode: Mode) -> Prefetch | UVA | None:
    """What vLLM's flags ask for; its own code only warns of the contradictions refused here."""
    backend = config.offload_backend
    group_size, gib = config.prefetch.offload_group_size, config.uva.cpu_offload_gb
    if group_size > 0 and gib > 0:
        raise OptionError(
            f"both --offload-group-size {group_size} (prefetch) and --cpu-offload-gb {gib:g} (zero-copy) are set, and "
            f"each says what is offloaded: leave one of them out"
        )
    for name, value, flag in (("prefetch", group_size, "--offload-group-size"), ("uva", gib, "--cpu-offload-gb")):
        if backend == name and not value:
            raise OptionError(f"--offload-backend {name} needs {flag}, which is not set")
    if group_size > 0:
        prefetch = config.prefetch
        names = sorted(prefetch.offload_params)
        return Prefetch(group_size, prefetch.offload_num_in_group, prefetch.offload_prefetch_step, names, mode)
    if gib > 0:
        return UVA(int(gib * 2**30), sorted(config.uva.cpu_offload_params), mode)
    return None


def _budget(given: Mapping[str, Any], mode: Mode) -> Budget | None:
    if "device_memory" not in given:
        if idle := [key for key in _BUDGET_ONLY if key in given]:
            raise OptionError(f"penstock.{idle[0]} has no effect without penstock.device_memory; {_FORM}")
        return None
    batch = given.get("batch", [1])
    rules = [parse_rule(rule) for rule in _names("rules", given.get("rules", []))]
    return Budget(
        given["device_memory"],
        _names("params", given.get("params", [])),
        mode,
        rules,
        Workload([batch] if isinstance(batch, int) else batch),
    )


def _names(key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise OptionTypeError(f"penstock.{key}: expected a list of strings, found {value!r}")
    return value
