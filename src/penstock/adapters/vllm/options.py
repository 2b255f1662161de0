"""vLLM's offload flags and ``--additional-config '{"penstock": {...}}'`` -> one policy.

====================  ================================================================================================
key under "penstock"  meaning
====================  ================================================================================================
``device_memory``     a budget for the weights on each GPU, ``"20GiB"``: penstock makes the plan, in place of the flags
``batch``             sequences per step that a budget is planned for, ``[1, 16, 256]``; default 1
``params``            name patterns that narrow what a budget may offload (:mod:`penstock.model.patterns`)
``rules``             ``["experts=uva", ...]``: mechanisms that are not the planner's to choose, with a budget
``mode``              the store: ``cpu``, or ``shm_cpu`` for one copy per host among data-parallel ranks
``replicas``          with ``shm_cpu`` and a dense model: engines that ``--data-parallel-size`` starts on this host
``measure_stalls``    time every wait for a unit; costs two events each
``boundaries_only``   compile the model as if it were offloaded and move nothing: the reference for equal bits
====================  ================================================================================================
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.config import UVA, Budget, Mode, Prefetch, Rule, Workload, gib_limit, parse_rule, parse_size
from penstock.errors import OptionError, OptionTypeError

if TYPE_CHECKING:
    from penstock.offloaders.layerwise import EnginePolicy

__all__ = ["KEYS", "REFUSED", "EngineOptions", "read_options"]

KEYS = ("device_memory", "batch", "params", "rules", "mode", "replicas", "measure_stalls", "boundaries_only")
_HALVES = "runs parts of a batch through the layers at once, and they would share one slot"
# Features of vLLM, by their flags, that move weights themselves or run a layer twice at once.
REFUSED = {
    "--enable-eplb": "rearranges experts in place, which penstock keeps elsewhere",
    "--enable-dbo": _HALVES,
    "--ubatch-size": _HALVES,
}
_MODES: tuple[Mode, ...] = ("cpu", "shm_cpu")
_BUDGET_ONLY = ("batch", "params", "rules")
_FORM = """write it like --additional-config '{"penstock": {"device_memory": "20GiB"}}'"""


@dataclass(frozen=True)
class EngineOptions:
    """What a worker is to do.

    Attributes:
        policy: ``None``: nothing is offloaded.
        mode: the store.
        replicas: engines of this host that share one, where vLLM does not know them.
        measure_stalls: time every wait.
        boundaries_only: trace the policy's boundaries, and offload nothing.
    """

    policy: EnginePolicy | None
    mode: Mode = "cpu"
    replicas: int | None = None
    measure_stalls: bool = False
    boundaries_only: bool = False


def read_options(offload_config: Any, additional_config: Any) -> EngineOptions:
    """The options of a worker.

    Args:
        offload_config: vLLM's ``OffloadConfig``.
        additional_config: vLLM's ``additional_config``; only its key ``penstock`` is read.

    Raises:
        OptionError, OptionTypeError: flags that contradict one another or have no effect, an unknown key, a value it
            cannot have; the message says what to write.
    """
    given = _own(additional_config)
    mode = _choice(given.get("mode", "cpu"))
    replicas = _replicas(given, mode)
    switches = [_switch(given, key) for key in ("measure_stalls", "boundaries_only")]
    flags = _flag_policy(offload_config, mode)
    budget = _budget(given, mode)
    if flags is not None and budget is not None:
        raise OptionError(
            f"both penstock.device_memory = {given['device_memory']!r} and vLLM's offload flags are set, and each says "
            f"what is offloaded: leave one of them out"
        )
    _refuse_lone_flags(offload_config, budget)
    policy = flags or budget
    _require_patterns(policy)
    if flags is None and budget is None and given:
        raise OptionError(
            f"penstock.{next(iter(given))} has no effect while nothing is offloaded: add penstock.device_memory, "
            f"--offload-group-size or --cpu-offload-gb; {_FORM}"
        )
    return EngineOptions(policy, mode, replicas, *switches)


def _require_patterns(policy: EnginePolicy | None) -> None:
    """What they match shows once there is a model; what is no pattern at all would be found only then, too."""
    rules = policy.rules if isinstance(policy, Budget) else ()
    patterns = [*(policy.params if policy is not None else ()), *(pattern for pattern, _ in rules)]
    if patterns:
        from penstock.model.patterns import compile_pattern

        for pattern in patterns:
            compile_pattern(pattern)


def _own(additional_config: Any) -> Mapping[str, Any]:
    given = additional_config.get("penstock", {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise OptionTypeError(f"penstock: expected an object, found {type(given).__name__} {given!r}; {_FORM}")
    for key in given:
        if key not in KEYS:
            nearest = difflib.get_close_matches(str(key), KEYS, n=1, cutoff=0.4)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise OptionError(f"penstock.{key} is unknown: expected one of {', '.join(KEYS)}{hint}")
    return given


def _choice(mode: Any) -> Mode:
    if mode not in _MODES:
        raise OptionError(
            f"penstock.mode {mode!r}: expected one of {', '.join(_MODES)} inside vLLM; leave it out for cpu"
        )
    return mode  # type: ignore[no-any-return]


def _replicas(given: Mapping[str, Any], mode: Mode) -> int | None:
    if "replicas" not in given:
        return None
    value = given["replicas"]
    if not isinstance(value, int) or isinstance(value, bool):
        raise OptionTypeError(f"penstock.replicas: expected a number of engines, found {value!r}; {_FORM}")
    if value < 2:
        raise OptionError(f"penstock.replicas = {value}: expected at least 2 engines that share one copy")
    if mode != "shm_cpu":
        raise OptionError(
            f'penstock.replicas = {value} has no effect with mode {mode!r}: add "mode": "shm_cpu", or leave it out'
        )
    return value


def _switch(given: Mapping[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise OptionTypeError(f"penstock.{key}: expected true or false, found {value!r}; {_FORM}")
    return value


def _flag_policy(config: Any, mode: Mode) -> Prefetch | UVA | None:
    """What vLLM's flags ask for; its own code only warns of the contradictions refused here."""
    backend = config.offload_backend
    group_size, gib = config.prefetch.offload_group_size, config.uva.cpu_offload_gb
    if group_size > 0 and gib > 0:
        raise OptionError(
            f"both --offload-group-size {group_size} (prefetch) and --cpu-offload-gb {gib:g} (zero-copy) are set, and "
            f"each says what is offloaded: leave one of them out"
        )
    limit = gib_limit(gib) if gib else 0
    for name, value, flag in (("prefetch", group_size, "--offload-group-size"), ("uva", gib, "--cpu-offload-gb")):
        if backend == name and not value:
            raise OptionError(f"--offload-backend {name} needs {flag}, which is not set")
    if group_size > 0:
        prefetch = config.prefetch
        names = sorted(prefetch.offload_params)
        return Prefetch(group_size, prefetch.offload_num_in_group, prefetch.offload_prefetch_step, names, mode)
    if limit:
        return UVA(limit, sorted(config.uva.cpu_offload_params), mode)
    return None


def _refuse_lone_flags(config: Any, budget: Budget | None) -> None:
    """Refuse flags of vLLM that narrow or shape an offload which no other flag asks for; vLLM ignores them."""
    prefetch, uva = config.prefetch, config.uva
    lone = {
        "--offload-params": not prefetch.offload_group_size and bool(prefetch.offload_params),
        "--offload-num-in-group": not prefetch.offload_group_size and prefetch.offload_num_in_group != 1,
        "--offload-prefetch-step": not prefetch.offload_group_size and prefetch.offload_prefetch_step != 1,
        "--cpu-offload-params": not uva.cpu_offload_gb and bool(uva.cpu_offload_params),
    }
    for flag in (flag for flag, is_lone in lone.items() if is_lone):
        needs = "--cpu-offload-gb" if flag.startswith("--cpu") else "--offload-group-size"
        mend = f"add {needs}, or leave {flag} out"
        if budget is not None and flag.endswith("-params"):
            mend = "with penstock.device_memory put the names into penstock.params"
        raise OptionError(f"{flag} has no effect without {needs}: {mend}")


def _budget(given: Mapping[str, Any], mode: Mode) -> Budget | None:
    if "device_memory" not in given:
        if idle := [key for key in _BUDGET_ONLY if key in given]:
            instead = " (with flags: --offload-params, --cpu-offload-params)" if idle[0] == "params" else ""
            raise OptionError(f"penstock.{idle[0]} has no effect without penstock.device_memory{instead}; {_FORM}")
        return None
    with _named("device_memory"):
        parse_size(given["device_memory"])
    with _named("batch"):
        workload = _workload(given.get("batch", [1]))
    with _named("rules"):
        rules = _rules(_names("rules", given.get("rules", [])))
    return Budget(given["device_memory"], _names("params", given.get("params", [])), mode, rules, workload)


def _workload(batch: Any) -> Workload:
    sizes = batch if isinstance(batch, list) else [batch]
    if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise OptionError(f"expected numbers of sequences, each at least 1, such as [1, 16, 256], found {batch!r}")
    return Workload(sizes)


def _rules(texts: Sequence[str]) -> list[Rule]:
    """Two mechanisms for one pattern are found here; what needs the names of the model, once it is built."""
    rules = [parse_rule(text) for text in texts]
    first: dict[str, str] = {}
    for text, (pattern, mechanism) in zip(texts, rules, strict=True):
        if first.setdefault(pattern, mechanism) != mechanism:
            raise OptionError(
                f"{pattern}={first[pattern]} and {text} contradict each other: one pattern has one mechanism; leave "
                f"one of them out"
            )
    return rules


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Within, an error says which key of ours it is about, and not which flag of our own command line."""
    try:
        yield
    except (OptionError, OptionTypeError) as error:
        text = str(error).removeprefix("--offload-rule ").removeprefix(f"penstock.{key}: ")
        raise type(error)(f"penstock.{key}: {text}") from None


def _names(key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise OptionTypeError(f'penstock.{key}: expected a list of strings such as ["mlp"], found {value!r}')
    return value
