"""SGLang's offload flags and ``HEADRACE_SGLANG='{"device_memory": "20GiB"}'`` -> one policy.

====================  ================================================================================================
key                   meaning
====================  ================================================================================================
``device_memory``     a budget for the weights on each GPU, ``"20GiB"``: headrace makes the plan, in place of the flags
``batch``             sequences per step that a budget is planned for, ``[1, 16, 256]``; default 1
``params``            name patterns of tensors that a group size or a budget may offload
``rules``             ``["experts=uva", ...]``: mechanisms that the planner may not choose; with a budget
``measure_stalls``    time every wait for a unit; costs two events each
====================  ================================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headrace.adapters.engine_interface import Refusal, refuse_flags
from headrace.config import Budget
from headrace.errors import OptionError
from headrace.flags import EngineKeys, EngineOptions, OffloadFlags, engine_surface, flag_of

VARIABLE = "HEADRACE_SGLANG"
FORM = f"""write {VARIABLE}=1, or {VARIABLE}='{{"device_memory": "20GiB"}}'"""
_KEYS = EngineKeys(
    prefix=VARIABLE,
    place=VARIABLE,
    form=FORM,
    shared=("device_memory", "batch", "params", "rules", "measure_stalls"),
    surface=engine_surface("SGLang"),
)
_MODES = {
    "meta": "stores no weights, so every token would be wrong; `headrace plan MODEL` shows sizes without loading",
    "sharded_gpu": "stores parts of the weights on other GPUs, which needs ranks of one world, and SGLang's data-"
    "parallel ranks are separate worlds; --offload-mode shm_cpu keeps one copy for all of them",
}
_HALVES = "runs parts of a batch through the layers at once, and they would share one slot"
_MOVES = "moves experts between ranks or within memory, but headrace stores them elsewhere"
_FUSED = "reads the weights of many layers in one kernel, which waits for no layer's copy"
_SHARES = "shares the memory of weights with other processes, and slots hold another layer every moment"
_LATE = "writes weights after they have left the device"
_LORA = "replaces linear modules after their weights have left the device"
_COMPILER = "compiles the model, and this has not been tried with SGLang's compiler"
REFUSED = (
    Refusal("enable_eplb", _MOVES),
    Refusal("elastic_ep_backend", _MOVES),
    Refusal("enable_elastic_expert_backup", _MOVES),
    Refusal("enable_paged_experts", "has its own slots for experts"),
    Refusal("kt_weight_path", "computes experts on the CPU by itself"),
    Refusal("dwdp_size", "copies experts between GPUs by itself", lambda size: size > 1),
    Refusal("ple_offload_embedding", "keeps embeddings in host memory by itself"),
    Refusal("enable_two_batch_overlap", _HALVES),
    Refusal("enable_single_batch_overlap", _HALVES),
    Refusal("enable_pdmux", _HALVES),
    # N-grams are no model: their guesses are verified by ModelRunner.forward, as any batch.
    Refusal("speculative_algorithm", "runs a draft model with weights of this one", lambda name: name != "NGRAM"),
    Refusal("enable_lora", _LORA),
    Refusal("lora_paths", _LORA),
    Refusal("enable_memory_saver", "frees and restores weights that headrace stores elsewhere"),
    Refusal("enable_weights_cpu_backup", "keeps a second copy of the weights in host memory"),
    Refusal("startup_weight_load_mode", _LATE, lambda mode: mode != "serial"),
    Refusal("weight_cache_mode", _SHARES, lambda mode: mode != "off"),
    Refusal("remote_instance_weight_loader_start_seed_via_transfer_engine", _SHARES),
    Refusal("checkpoint_engine_wait_weights_before_ready", _LATE),
    Refusal("enable_torch_compile", _COMPILER),
    Refusal("enable_nvidia_megakernel", _FUSED),
    Refusal("enable_amd_monokernel", _FUSED),
)


def parse_keys(value: str) -> Mapping[str, Any]:
    """The keys in ``HEADRACE_SGLANG``; ``"1"`` gives none.

    Raises:
        OptionError, OptionTypeError: it is neither 1 nor a JSON object of known keys.
    """
    if value == "1":
        return {}
    try:
        return _KEYS.known(json.loads(value))
    except json.JSONDecodeError as error:
        raise OptionError(f"{VARIABLE} {value!r}: expected 1 or a JSON object ({error}); {FORM}") from None


def read_options(keys: Mapping[str, Any], field: Callable[[str], Any]) -> EngineOptions:
    """The options of ``keys`` and of SGLang's flags together.

    Args:
        keys: keys of :func:`parse_keys`.
        field: the value of a field of SGLang's configuration, resolved.

    Raises:
        OptionError, OptionTypeError: options that contradict one another or have no effect, an invalid value, or a
            feature of SGLang that headrace cannot run with.
    """
    mode, group_size = field("offload_mode"), field("offload_group_size")
    if mode in _MODES:
        raise OptionError(f"--offload-mode {mode} {_MODES[mode]}; leave it out, or unset {VARIABLE}")
    flags = OffloadFlags(
        cpu_offload_gb=field("cpu_offload_gb") or None,
        offload_group_size=group_size if group_size > 0 else None,
        # 1 and cpu are SGLang's defaults, whether they were given or not.
        offload_num_in_group=_unless(field("offload_num_in_group"), 1),
        offload_prefetch_step=_unless(field("offload_prefetch_step"), 1),
        offload_mode=_unless(mode, "cpu"),
    )
    options = _KEYS.options(keys, flags, {})
    if isinstance(options.policy, Budget):
        options = replace(options, policy=replace(options.policy, codec="none"))  # not supported there
    if options.policy is not None:
        refuse_flags(REFUSED, field, f"unset {VARIABLE}")
        graphs = field("cuda_graph_config")
        if graphs is not None and graphs.prefill.backend == "tc_piecewise":
            raise OptionError(
                f"--cuda-graph-backend-prefill tc_piecewise {_COMPILER}; leave it out (SGLang's default is breakable), "
                f"or unset {VARIABLE}"
            )
        if options.mode == "shm_cpu":
            _require_replicas(field)
    return options


def _unless(value: Any, default: Any) -> Any:
    return None if value == default else value


def _require_replicas(field: Callable[[str], Any]) -> None:
    """Refuse all but data-parallel ranks of one host: one copy serves them, and each has the complete model."""
    for name, allowed in (("tp_size", 1), ("nnodes", 1)):
        if field(name) != allowed:
            raise OptionError(
                f"--offload-mode shm_cpu keeps one copy for the data-parallel ranks of one host, each with all of the "
                f"model: expected {flag_of(name)} {allowed}, found {field(name)}; leave the mode out"
            )
    if field("dp_size") < 2:
        raise OptionError(
            "--offload-mode shm_cpu keeps one copy for data-parallel ranks, and this is the only one: add "
            "--dp-size N, or leave the mode out"
        )
