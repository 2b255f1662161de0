"""vLLM's offload flags and ``--additional-config '{"headrace": {...}}'`` -> one policy.

====================  ================================================================================================
key under "headrace"  meaning
====================  ================================================================================================
``device_memory``     a budget for the weights on each GPU, ``"20GiB"``: headrace makes the plan, in place of the flags
``batch``             sequences per step that a budget is planned for, ``[1, 16, 256]``; default 1
``params``            name patterns of tensors that may be offloaded, as ``--offload-params``
``rules``             ``["experts=uva", ...]``: mechanisms that the planner may not choose; with a budget
``expert_slots``      experts of each layer on the GPU where a budget caches them; default: as many as fit it
``mode``              the store: ``cpu``, or ``shm_cpu`` for one copy per host among data-parallel ranks
``codec``             ``exp3``: prefetched bf16 is copied in 0.70 of its bytes; ``none``; ``auto``, a budget's default
``replicas``          with ``shm_cpu`` and a dense model: engines that ``--data-parallel-size`` starts on this host
``measure_stalls``    time every wait for a unit; costs two events each
====================  ================================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.adapters.engine_interface import Refusal, refuse_flags
from headrace.config import UVA, count
from headrace.errors import OptionError
from headrace.flags import EngineKeys, EngineOptions, OffloadFlags, engine_surface

if TYPE_CHECKING:
    from headrace.offloaders.layerwise import EnginePolicy

_HALVES = "runs parts of a batch through the layers at once, and they would share one slot"


# Features of vLLM that move or replace weights, run a layer twice at once, or build no layers.
REFUSED = (
    Refusal("parallel_config.enable_eplb", "rearranges experts in place, but headrace stores them elsewhere"),
    Refusal("parallel_config.enable_dbo", _HALVES),
    Refusal("parallel_config.ubatch_size", _HALVES, lambda size: size > 1),
    Refusal(
        "weight_transfer_config",
        "writes new weights piece by piece into slots, which the next copy overwrites (the worker's reload_weights "
        "takes them whole)",
    ),
    Refusal(
        "load_config.load_format",
        "maps weights of another process on this GPU, so that offloading them would free nothing",
        lambda name: name == "ipc_cache",
    ),
    Refusal(
        "speculative_config.rejection_sample_method",
        "accepts guesses by chance, so that the tokens are not those of the model",
        lambda method: method == "synthetic",
    ),
    Refusal(
        "model_config.multimodal_config.mm_encoder_only",
        "builds no layers of a language model, and headrace offloads only these",
    ),
)
# Models that run parts of a layer without calling the layer: nothing would wait for its copy.
_NEVER_CALLED = ("AliceAIForCausalLM",)
FORM = """write it like --additional-config '{"headrace": {"device_memory": "20GiB"}}'"""
_SHARED = ("device_memory", "batch", "params", "rules", "expert_slots", "mode", "codec", "measure_stalls")
_KEYS = EngineKeys("headrace", "--additional-config", FORM, _SHARED, engine_surface("vLLM"), ("replicas",))
KEYS = _KEYS.names
FLAG_OF_KEY = _KEYS.flag_of_key


def read_options(offload_config: Any, additional_config: Any) -> EngineOptions:
    """The options of a worker.

    Args:
        offload_config: vLLM's ``OffloadConfig``.
        additional_config: vLLM's ``additional_config``; only its key ``headrace`` is read.

    Raises:
        OptionError, OptionTypeError: as :func:`engine_options`.
    """
    prefetch, uva = offload_config.prefetch, offload_config.uva
    flags = OffloadFlags(
        offload_backend=offload_config.offload_backend,
        cpu_offload_gb=uva.cpu_offload_gb,
        cpu_offload_params=sorted(uva.cpu_offload_params),
        offload_group_size=prefetch.offload_group_size,
        # 1 is vLLM's default of both, whether it was given or not.
        offload_num_in_group=prefetch.offload_num_in_group if prefetch.offload_num_in_group != 1 else None,
        offload_prefetch_step=prefetch.offload_prefetch_step if prefetch.offload_prefetch_step != 1 else None,
        offload_params=sorted(prefetch.offload_params),
    )
    # `vllm serve` has flags for none of these but --offload-params.
    spelling = {flag: f"headrace.{key}" for key, flag in FLAG_OF_KEY.items() if key != "params"}
    return engine_options(additional_config, flags, spelling)


def refuse_unsupported(config: Any, policy: EnginePolicy) -> None:
    """Refuse features that would read or write offloaded weights, before a model loads.

    Args:
        config: vLLM's ``VllmConfig``.
        policy: policy of the worker.

    Raises:
        OptionError: a flag of :data:`REFUSED`, a model whose layers are never called, another kind of additional
            configuration.
    """
    refuse_flags(REFUSED, partial(getattr, config), "offload nothing")
    model = config.model_config.architecture
    if model in _NEVER_CALLED and not isinstance(policy, UVA):
        raise OptionError(
            f"{model} runs the parts of its layers without calling these, so nothing would wait for weights that are "
            f"copied; read them in place (--cpu-offload-gb), or offload nothing"
        )
    if not isinstance(config.additional_config, dict):
        raise OptionError(
            f"additional_config: expected a dict (--additional-config JSON), found "
            f"{type(config.additional_config).__name__}; the plan has to be part of vLLM's compile cache key"
        )
    decoder = config.additional_config.get("decode_backend", "auto")
    if decoder != "auto":
        raise OptionError(
            f"decode_backend {decoder!r} (--additional-config) runs steps without calling the layers, so nothing would "
            f"wait for weights that are copied; leave it out, or offload nothing"
        )


def engine_options(
    additional_config: Any, flags: OffloadFlags, spelling: Mapping[str, str] | None = None
) -> EngineOptions:
    """The options of the keys of ``additional_config`` and of ``flags`` together; errors name flags by ``spelling``.

    Raises:
        OptionError, OptionTypeError: options that contradict one another or have no effect, an unknown key, an invalid
            value; the message has the fix.
    """
    given = additional_config.get("headrace", {}) if isinstance(additional_config, Mapping) else {}
    keys = _KEYS.known(given)
    replicas = count("headrace.replicas", keys["replicas"], at_least=2) if "replicas" in keys else None
    options = _KEYS.options(keys, flags, spelling or {})
    if replicas is not None and options.mode != "shm_cpu":
        raise OptionError(
            f"headrace.replicas = {replicas} has no effect with mode {options.mode!r}: add "
            f'"mode": "shm_cpu", or leave it out'
        )
    return replace(options, replicas=replicas)
