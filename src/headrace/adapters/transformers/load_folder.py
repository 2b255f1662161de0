"""transformers models from a local folder of safetensors, loaded within the memory of their plan.

:func:`load` builds the model on ``meta`` from config.json, matches it with the headers of the files, makes the plan,
and reads only what the plan keeps on the device or in host memory. Units in files stay in the unmodified files until
a forward needs them.

The result equals that of ``from_pretrained(folder)``, tensor for tensor: the same class, dtype, ties, conversions,
buffers, and the same treatment of tensors that are missing or too many. Nothing is downloaded, and no code from the
folder is run.
"""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import meta_device_safe_creation_ops
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers import quantizer_mxfp4

from headrace.adapters.transformers.conversion import Match, match
from headrace.adapters.transformers.liger import use_liger_norms
from headrace.adapters.transformers.ordered_experts import (
    NAME,
    keep_quantised,
    prefer_ordered,
    put_mxfp4_experts,
    require_effect,
)
from headrace.adapters.transformers.quantised import (
    INITIALISED,
    method_of,
    move_wrappers,
    open_quantizer,
    put_in_modules,
    stated_quantisation,
)
from headrace.adapters.transformers.speculating import Speculating, heads_cost
from headrace.api import Handle, start
from headrace.checkpoint.model_folder import model_folder
from headrace.checkpoint.safetensors_header import Checkpoint, FileTensor, read_json
from headrace.checkpoint.weight_map import WeightMap
from headrace.config import AUTO, SHARDED_MODES, Policy, instead_of
from headrace.errors import CheckpointError, OptionError, OptionTypeError, warn_user
from headrace.formatting import format_size, listed
from headrace.graphs.decoding import decode_in_graphs
from headrace.memory.system import gc_paused
from headrace.model.live_tensors import BoundStorage
from headrace.model.torch_private import storage_id
from headrace.plan.cpu_share import CpuShareForecast
from headrace.plan.plan import Plan
from headrace.plan.speculation import Speculation
from headrace.planning.context import not_in_files
from headrace.planning.request import PlanRequest, Target, compute_device, has_triton, require_kinds
from headrace.runtime.prepare import Prepared, module_context, open_ranks, prepare
from headrace.stores.file_reads import DiskOptions
from headrace.stores.store import Progress, new_buffer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    ModelClass = type[PreTrainedModel] | type[_BaseAutoModelClass]

_SETTERS = (torch.ops.aten.zero_, torch.ops.aten.fill_, torch.ops.aten.copy_)
_MANY_LAYERS, _MANY_MODULES, _MANY_LABELS, _LARGE = 1000, 20_000, 1_000_000, 10_000_000
# Ends of the names for a number of layers in configurations: num_hidden_layers, n_layer, depths, ...
_DEPTHS = ("layers", "layer", "depth", "depths", "blocks", "dense_replace")


@instead_of(torch_dtype='dtype, e.g. dtype="bfloat16"')
def load(
    path: str | os.PathLike[str],
    policy: Policy | Plan | str | int,
    *,
    model_class: ModelClass | None = None,
    dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
    experts_implementation: str | None = None,
    use_liger_kernel: bool = False,
    device: torch.device | str | None = None,
    disk: DiskOptions | None = None,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
    graphs: bool = True,
    speculate: Speculation | str | None = None,
    cpu_experts: bool | Literal["auto"] = False,
) -> tuple[PreTrainedModel, Handle]:
    """Load a model and offload it in one go; memory stays within the plan while loading, too.

    Args:
        path: a folder with config.json and safetensors files, quantised ones too, as ``save_pretrained`` or a download
            leaves it, or the name of a model in the local cache of the Hugging Face Hub, such as ``"Qwen/Qwen3-8B"``
            (:func:`~headrace.checkpoint.model_folder.model_folder`).
        policy: as for :func:`headrace.offload`; on a CPU a size such as ``"20GiB"`` streams from the files (mode
            ``disk``), for a GPU it fills pinned host memory from them (mode ``cpu``), and weights that do not fit
            there stream from the files (mode ``disk``).
        model_class: a transformers class, ``Auto`` classes included; default the one that config.json names.
        dtype: dtype of the weights, a torch.dtype or its name such as ``"bfloat16"``; default, and ``"auto"``, the
            checkpoint's own. Tensors of another dtype in the files are converted when they are read, at loading or at
            every use; such tensors are not streamed from files to a GPU, but stored in host memory.
        attn_implementation: as for ``from_pretrained``: ``"sdpa"``, ``"eager"`` or another that transformers has, not
            the name of a kernel on the Hub; default the model's own choice.
        experts_implementation: likewise: ``"grouped_mm"``, ``"batched_mm"``, or ``"headrace"``: experts of up to 8 rows
            have the same bits wherever they run, and are not copied
            (:mod:`~headrace.adapters.transformers.ordered_experts`); the default on a GPU where it runs the model.
        use_liger_kernel: the RMSNorm of the package liger-kernel runs in this model, on a GPU: fewer kernels, and other
            bits than transformers' own (:mod:`~headrace.adapters.transformers.liger`).
        device: where compute runs; default a GPU where there is one, else the CPU.
        disk: how the files are read.
        progress: called with (bytes loaded, bytes to load) while weights are read or moved.
        group: as for :func:`headrace.offload`: ranks that load the same folder and share its bytes.
        graphs: on a GPU, without a ``group``, ``generate`` decodes in CUDA graphs
            (:func:`~headrace.graphs.decoding.decode_in_graphs`).
        speculate: ``"lookup"``, ``"mtp"``, a draft model, or a :class:`headrace.Speculation`: ``generate`` verifies
            several guesses in one pass. A draft is resident, and part of a budget; so are heads (``mtp``).
        cpu_experts: the CPU computes a share of the cached experts that a step misses, as many as it turns out to be
            fast enough for (:mod:`~headrace.adapters.transformers.shared_experts`); no bit depends on it. It needs
            ``experts_implementation="headrace"``, the default on a GPU. ``"auto"``: where the plan expects it to be
            1.05 times as fast (:mod:`~headrace.plan.cpu_share`); ``handle.stats().notes`` says why or why not.

    Returns:
        the model in evaluation mode, ready for ``generate``, and its handle; ``handle.remove()`` makes everything
        resident.

    Raises:
        CheckpointError: no folder, no model in it, files for another configuration, or quantised weights that cannot
            be loaded here.
        OptionError, OptionTypeError: an invalid policy, class, dtype, attention or experts; a plan for another
            model or machine.
        LimitError: the plan does not fit the device or the host; raised before anything is allocated.
        PeerError: another rank of ``group`` failed, ended, or did not connect in time.

    To measure stalls, :func:`headrace.offload` a model that is built already.
    """
    # First, so that a wrong folder in one rank raises in all ranks, instead of in one while the others wait.
    with open_ranks(group) as ranks:
        require_kinds(device, disk)
        if not isinstance(cpu_experts, bool) and cpu_experts != AUTO:
            raise OptionTypeError(f"cpu_experts: expected True, False or 'auto', found {cpu_experts!r}")
        if torch.get_default_device().type == "meta":  # what transformers computes while loading would have no values
            raise OptionError(
                "load: expected a default device that has memory, found meta; call it outside of torch.device('meta') "
                "and torch.set_default_device('meta'): it builds the model there itself"
            )
        given = speculate if isinstance(speculate, Speculation | None) else Speculation(speculate)
        # Unlike from_pretrained, nothing is read yet: the plan decides which weights are read at all.
        with gc_paused():
            target = compute_device(None, device)
            model = build_meta_model(
                path, model_class=model_class, dtype=dtype, attn_implementation=attn_implementation, device=target,
                experts_implementation=experts_implementation, use_liger_kernel=use_liger_kernel,
            )  # fmt: skip
            folder = model_folder(path)
            found = match(model, Checkpoint.open(folder), target)
        for difference in differences(model, found, is_chosen=model_class is not None):
            warn_user(difference)
        request = PlanRequest(model, policy, device=device, disk=disk, ranks=ranks, speculation=given)
        if given is not None:
            request = _speculated(request, given, found, target)
        share: CpuShareForecast | str | bool = cpu_experts is True
        if cpu_experts == AUTO:
            request, share = _with_share_of_cpu(request, found, target)
        return model, load_matched(folder, request, found, progress, graphs, share)


def _speculated(request: PlanRequest, speculation: Speculation, found: Match, device: torch.device) -> PlanRequest:
    """``request`` with its plan, which has room for a draft, and the number of guesses."""
    target = Target.of(device)
    context = module_context(_with_files(request, found), target).with_draft(
        lambda draft: module_context(replace(draft, model=build_meta_model(draft.model, device=device)), target),
        lambda context: heads_cost(context, request.model),
    )
    plan = context.plan()
    forecast = context.forecast_speculation(plan, speculation)
    if not forecast.is_faster:
        measured = ", or state what you have measured (accepted=)" if forecast.is_assumed else ""
        warn_user(f"{forecast}: leave speculate out{measured}")
    speculation = replace(speculation, guesses=forecast.guesses)
    return replace(request, policy=plan, speculation=speculation)


def _with_share_of_cpu(
    request: PlanRequest, found: Match, device: torch.device
) -> tuple[PlanRequest, CpuShareForecast | str]:
    """``request`` with its plan, and the forecast of the CPU's share in missed experts, or why there is none."""
    context = module_context(_with_files(request, found), Target.of(device)).sized()
    plan, workload = context.plan(), request.expected
    forecast = context.planner.forecast_cpu_share(plan, workload.batch_sizes[0], workload.context)
    return replace(request, policy=plan, workload=workload), forecast


def _with_files(request: PlanRequest, found: Match) -> PlanRequest:
    unstreamable = not_in_files(found.inventory, found.weights)
    return replace(request, inventory=found.inventory, checkpoint=found.weights, unstreamable=unstreamable)


def load_matched(
    folder: Path, request: PlanRequest, found: Match, progress: Progress | None, graphs: bool = False,
    cpu_experts: CpuShareForecast | str | bool = False,
) -> Handle:  # fmt: skip
    """:func:`load` for a model on ``meta`` that has been built and matched with its files; warns of nothing.

    ``cpu_experts``: for ``"auto"`` what is expected of the CPU's share.
    """
    model, speculating = request.model, None
    if request.speculation is not None:  # first: what its draft takes is not free for the model
        speculating = Speculating(model, request.speculation, compute_device(model, request.device), graphs)
    prepared = prepare(_with_files(request, found))
    _materialise(model, found, prepared)
    if model.can_generate() and hasattr(model, "adjust_generation_fn"):  # SpeechT5 has another generate
        adjust: Any = model.adjust_generation_fn
        # As from_pretrained passes for a local folder.
        options = {"cache_dir": None, "force_download": False, "proxies": None, "local_files_only": True, "token": None}
        adjust(None, False, None, os.fspath(folder), **options, revision="main", subfolder="", trust_remote_code=False)
    model.train(False)
    handle = start(prepared, progress=progress)
    move_wrappers(model)
    if cpu_experts:
        from headrace.adapters.transformers.shared_experts import share_experts, share_if_worthwhile

        share_experts(model) if cpu_experts is True else share_if_worthwhile(model, cpu_experts)
    if graphs and request.ranks is None and prepared.device.type == "cuda" and model.can_generate():
        decode_in_graphs(model, handle.plan.context, with_hooks=False)
    if speculating is not None:
        speculating.attach()
    return handle


# -- config.json -> a model on meta ------------------------------------------------------------------------------------


def build_meta_model(
    path: str | os.PathLike[str],
    *,
    model_class: ModelClass | None = None,
    dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
    device: torch.device | None = None,
    experts_implementation: str | None = None,
    use_liger_kernel: bool = False,
) -> PreTrainedModel:
    """The model of a folder on ``meta``, from its config.json alone: names, shapes, dtypes, ties, and no data.

    Arguments as for :func:`load`. A quantised one has the modules that its quantizer puts in for ``device``; without a
    device it is built as if it were plain.

    Where config.json states no dtype, that of the first floating-point tensor in the folder's files counts, if there
    are any, as in ``from_pretrained``.

    Raises:
        CheckpointError: no folder, or no model in it that transformers can build.
        OptionError, OptionTypeError: an invalid class, dtype, attention or experts.
    """
    folder = model_folder(path)
    raw = read_json(folder / "config.json")
    if raw.get("transformers_weights") is not None:
        raise CheckpointError(
            f"{folder}/config.json: expected weights in model.safetensors or its shards, found the name of another "
            f"file (transformers_weights = {str(raw['transformers_weights'])[:99]!r}): load the model with "
            f'from_pretrained(), and give it to headrace.offload(model, "8GiB")'
        )
    _refuse_values(folder, raw)
    if model_class is None or hasattr(model_class, "from_config"):
        _refuse_unknown(folder, raw)
    maker = model_class or _named_class(folder, raw) or _unnamed_class(folder, raw)
    config = _make_config(folder, raw, maker)
    config.name_or_path = str(folder)  # what transformers reads later, and a name it would look for on the Hub
    _refuse_implementation("attn_implementation", attn_implementation, "sdpa", ALL_ATTENTION_FUNCTIONS.valid_keys())
    known = ALL_EXPERTS_FUNCTIONS.valid_keys()
    _refuse_implementation("experts_implementation", experts_implementation, "grouped_mm", known)
    can_order = device is None or has_triton(device)
    if experts_implementation == NAME and not can_order:
        raise OptionError(
            f"experts_implementation {NAME!r}: expected Triton, whose kernels it runs, found none; install it (pip "
            f"install triton, on Windows triton-windows), or leave it out"
        )
    is_free = experts_implementation is None and device is not None and device.type == "cuda" and can_order
    has_kernels = quantizer_mxfp4.is_kernels_available()  # type: ignore[attr-defined]
    by_own_kernels = experts_implementation == NAME or (is_free and not has_kernels)
    by_own_kernels &= method_of(stated_quantisation(config) or {}) == "mxfp4"
    quantizer = None if device is None or by_own_kernels else open_quantizer(folder, config, device)
    chosen = _choose_dtype(folder, config, dtype)
    if quantizer is not None:
        config.dtype = chosen = quantizer.update_dtype(chosen)
    model = _build(folder, maker, config, chosen, attn_implementation, experts_implementation)
    if quantizer is not None and device is not None:
        put_in_modules(folder, model, quantizer, chosen, device)
        if experts_implementation == NAME:
            keep_quantised(model, quantizer, _tensors(folder))
    elif by_own_kernels:
        put_mxfp4_experts(model)
    if experts_implementation is not None:
        require_effect(model, experts_implementation)
    elif is_free:
        prefer_ordered(model)
    if use_liger_kernel:
        use_liger_norms(model, compute_device(None, device))
    return model


def _refuse_values(folder: Path, raw: dict[str, Any]) -> None:
    """Refuse code on the Hub, and counts of what transformers would make for minutes, in any part of ``raw``."""
    left: list[tuple[str, Any, bool]] = [("", raw, False)]
    while left:  # no recursion, which a file that is nested deeply would end
        name, value, in_list = left.pop()
        most = _LARGE if in_list else value
        most = _MANY_LAYERS if name.endswith(_DEPTHS) else _MANY_LABELS if name.endswith("labels") else most
        if isinstance(value, dict):  # of an implementation: by part of the model
            left += [(name if name.endswith("_implementation") else key, each, False) for key, each in value.items()]
        elif isinstance(value, list):
            left += [(name, each, True) for each in value]
        elif isinstance(value, str) and "/" in value and name.endswith("_implementation"):
            raise CheckpointError(
                f"{folder}/config.json: expected no kernel on the Hub, found {name} = {value[:99]!r}; remove the entry"
            )
        elif isinstance(value, int) and value > most and value > (held := len(_tensors(folder))):
            raise CheckpointError(
                f"{folder}/config.json: expected no larger number than its safetensors files have tensors ({held}), "
                f"or {most}, found {name} = {str(value)[:20]}; correct config.json, or download it again"
            )


def _tensors(folder: Path) -> Mapping[str, FileTensor]:
    return Checkpoint.open(folder).tensors if any(folder.glob("*.safetensors")) else {}


def _limit_modules(folder: Path) -> Any:
    """The hook that refuses a model of many more modules than its files have tensors, while it is built."""
    numbers, thread = count(1), threading.get_ident()

    def check(*_: Any) -> None:  # of all threads
        built = next(numbers) if threading.get_ident() == thread else 0
        if built > _MANY_MODULES and built % 1000 == 0 and built > (most := 10 * len(_tensors(folder))):
            raise CheckpointError(
                f"{folder}/config.json: expected ten modules for each tensor in its safetensors files ({most}), or "
                f"{_MANY_MODULES}, found more (experts, codebooks, ...); correct config.json, or download it again"
            )

    return register_module_module_registration_hook(check)


def _refuse_unknown(folder: Path, raw: dict[str, Any]) -> None:
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        return
    if kind is None and raw.get("_class_name"):
        raise CheckpointError(
            f"{folder}: expected a transformers model, found {raw['_class_name']} of diffusers; load it with "
            f"diffusers, model = {raw['_class_name']}.from_pretrained({str(folder)!r}), then offload it: "
            f'headrace.offload(model, "8GiB")'
        )
    if raw.get("auto_map"):
        raise CheckpointError(
            f"{folder}: model_type {kind!r} is not part of transformers {transformers.__version__} and comes with code "
            f"of its own (auto_map in config.json), which headrace does not run; load it with "
            f"from_pretrained(..., trust_remote_code=True) and pass the model to headrace.offload"
        )
    nearest = ", ".join(difflib.get_close_matches(str(kind), CONFIG_MAPPING.keys())) or "none"
    raise CheckpointError(
        f"{folder}/config.json: expected a model_type that transformers {transformers.__version__} knows, found "
        f"{kind!r} (the nearest it knows: {nearest}); correct config.json, or install a transformers that knows it"
    )


def _named_class(folder: Path, raw: dict[str, Any]) -> type[PreTrainedModel] | None:
    names = raw.get("architectures")
    if not names:
        return None
    found = getattr(transformers, str(names[0]), None)
    if isinstance(found, type) and issubclass(found, PreTrainedModel):
        return found
    raise CheckpointError(
        f"{folder}/config.json: expected an architecture that transformers {transformers.__version__} has, found "
        f"{names[0]!r}; pass model_class=, e.g. transformers.AutoModelForCausalLM"
    )


def _unnamed_class(folder: Path, raw: dict[str, Any]) -> ModelClass:
    """The class for a config.json that names none: with a language-model head if the files hold one."""
    is_causal = str(raw.get("model_type")) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and "lm_head.weight" in _tensors(folder)
    return AutoModelForCausalLM if is_causal else AutoModel


def _make_config(folder: Path, raw: dict[str, Any], maker: Any) -> PretrainedConfig:
    # A concrete class reads config.json with its own configuration class, which may be a part of a composite one.
    is_auto = hasattr(maker, "from_config")
    if not is_auto and not (isinstance(maker, type) and issubclass(maker, PreTrainedModel)):
        raise OptionTypeError(f"model_class: expected a transformers model class, found {maker!r}")
    reader = AutoConfig if is_auto or maker.config_class is None else maker.config_class
    try:
        return _without_code_of_parts(reader.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    except Exception as error:  # configuration classes raise errors of any type for values that they do not expect
        raise CheckpointError(
            f"{folder}/config.json: transformers {transformers.__version__} makes no {raw.get('model_type')} "
            f"configuration of it: {error}"
        ) from error


def _without_code_of_parts(config: PretrainedConfig) -> PretrainedConfig:
    # Classes build their parts by Auto classes without trust_remote_code, which ask on stdin whether to run such code.
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            vars(_without_code_of_parts(part)).pop("auto_map", None)
    return config


def _refuse_implementation(option: str, name: str | None, example: str, known: list[str]) -> None:
    if name is None:
        return
    if not isinstance(name, str):
        raise OptionTypeError(f"{option}: expected a name such as {example!r}, found {name!r}")
    if name not in ("eager", *known):  # for example the name of a repository, whose code transformers would run
        plain = sorted({"eager", *(each for each in known if not each.startswith("paged"))})
        raise OptionError(
            f"{option} {name!r}: expected one that transformers {transformers.__version__} has ({', '.join(plain)}); "
            f"leave it out for the model's own choice"
        )


def _choose_dtype(folder: Path, config: PretrainedConfig, asked: torch.dtype | str | None) -> torch.dtype:
    if asked is not None and asked != "auto":
        found = getattr(torch, asked, None) if isinstance(asked, str) else asked
        if not isinstance(found, torch.dtype):
            kind = OptionError if isinstance(asked, str) else OptionTypeError
            raise kind(f"dtype: expected 'bfloat16', 'float16', 'float32' or a torch.dtype, found {asked!r}")
        if not found.is_floating_point:
            raise OptionError(f"dtype {found}: expected a floating-point dtype; leave it out for the checkpoint's own")
        return found
    stated: torch.dtype | str | None = config.dtype
    if stated is not None:
        return getattr(torch, stated) if isinstance(stated, str) else stated
    tensors = sorted(_tensors(folder).values(), key=lambda tensor: (tensor.path, tensor.name))
    stored = [tensor.dtype for tensor in tensors if tensor.path == tensors[0].path]
    return next((t for t in stored if t.is_floating_point and t.itemsize > 1), torch.get_default_dtype())


def _build(
    folder: Path, maker: Any, config: PretrainedConfig, dtype: torch.dtype, attention: str | None, experts: str | None
) -> PreTrainedModel:
    options: dict[str, Any] = {"dtype": dtype} | ({} if attention is None else {"attn_implementation": attention})
    options |= {} if experts is None else {"experts_implementation": experts}
    try:
        with torch.device("meta"), meta_device_safe_creation_ops(), _limit_modules(folder):
            if hasattr(maker, "from_config"):
                model: PreTrainedModel = maker.from_config(config, trust_remote_code=False, **options)
            else:
                model = maker._from_config(config, **options)
        if any(tensor.device.type != "meta" for tensor in (*model.parameters(), *model.buffers())):
            # Some classes create a tensor in a way that ignores the default device (`torch.Tensor(size)`).
            nn.Module.to(model, torch.device("meta"))
            model.tie_weights(recompute_mapping=False)
    except Exception as error:  # model classes raise errors of any type for configurations that they do not expect
        if attention is not None and not isinstance(error, CheckpointError):
            raise OptionError(
                f"attn_implementation {attention!r}: {maker.__name__} cannot be built with it here: "
                f"{str(error).rstrip('.')}; leave it out, or name another"
            ) from error
        if isinstance(error, ImportError | CheckpointError):
            raise  # a limit, or a package the architecture needs; its message says which
        raise CheckpointError(
            f"{folder}: {maker.__name__} cannot be built from its config.json: {error}; correct the file, or pass "
            f"another model_class"
        ) from error
    return model


# -- tensors that are not streamed ------------------------------------------------------------------------------------


def _materialise(model: PreTrainedModel, found: Match, prepared: Prepared) -> None:
    """Allocate and initialise the tensors that the offload neither reads from files nor converts."""
    plan, bound, inventory = prepared.plan, prepared.bound, prepared.inventory
    if plan.mode != "meta":
        for recipe in dict.fromkeys(found.weights.recipes.values()):
            storages = [inventory.by_name[name] for name in recipe.names]
            # A rank that stores a part of every tensor reads it from ranges of files or from live tensors.
            split = plan.mode in SHARDED_MODES and any(plan.mechanism_of(s.name) != "resident" for s in storages)
            if not split and all(found.weights.recipe(storage) is not None for storage in storages):
                continue  # the offload makes them directly in the store, tensor by tensor
            made = recipe.make({part.name: found.weights.checkpoint.read(part.name) for part in recipe.parts})
            for storage in storages:
                _allocate(bound[storage.name])
            for name, value in made.items():
                (live,) = [t.tensor for t in bound[inventory.by_name[name].name].tensors if name in t.info.names]
                live.data.copy_(value)
        for storage in inventory.storages:
            if found.loaded.isdisjoint(storage.names):
                _allocate(bound[storage.name])
    # Not state_dict(), in which bitsandbytes unpacks its weights.
    state = dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))
    loaded = found.loaded & state.keys()  # the inner tensors of a quantised one have no mark
    for name in loaded:
        setattr(state[name], INITIALISED, True)
    initialise: Any = model.initialize_weights
    with _Writes({storage_id(state[name]): name for name in loaded if state[name].is_meta}, prepared, found.weights):
        initialise()


class _Writes(TorchDispatchMode):
    """Writes to loaded tensors (``names``, by storage) while transformers initialises the others.

    Some initialisers set a part of a loaded tensor (ChineseCLIP zeroes its padding rows, Zaya sets a bias). Where files
    have that value nothing is to be done; a resident gets it, as from_pretrained sets it; others are refused.
    """

    def __init__(self, names: dict[int, str], prepared: Prepared, weights: WeightMap) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._prepared, self._weights = names, prepared, weights

    def _set(self, name: str, part: torch.Tensor, write: Callable[[torch.Tensor], object]) -> bool:
        """``write`` to ``part`` of the tensor as the files hold it; ``False``: it is changed, and not resident."""
        source = self._weights.sources.get(name)
        if source is None or len(source.parts) > 1:
            return False
        storage = self._prepared.bound[self._prepared.inventory.by_name[name].name]
        (live,) = [each for each in storage.tensors if name in each.info.names]
        whole = live.tensor.data
        if storage.on_meta:
            whole = self._weights.checkpoint.read_range(source.parts[0].tensor).to(part.dtype).view(whole.shape)
        written = whole.as_strided(part.shape, part.stride(), part.storage_offset())
        before = written.clone()
        write(written)
        plan = self._prepared.plan
        if torch.equal(before, written) or plan.mode == "meta":  # which has no bytes
            return True
        if plan.mechanism_of(storage.info.name) != "resident":
            return False
        if storage.on_meta:
            _allocate(storage)
            live.tensor.data.copy_(whole)
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.scalar_tensor.default:  # the value of `bias[-1] = -1.0`, which torch makes on meta
            return func(*args, **kwargs | {"device": "cpu"})
        target = args[0] if args and func._schema.is_mutable else None
        name = self._names.get(storage_id(target)) if isinstance(target, torch.Tensor) else None
        if name is not None:
            is_known = func.overloadpacket in _SETTERS and not any(getattr(arg, "is_meta", False) for arg in args[1:])
            if not is_known or not self._set(name, args[0], lambda part: func(part, *args[1:], **kwargs)):
                raise CheckpointError(
                    f"{name}: Transformers changes a part of this tensor after it is read ({func}), so it cannot be "
                    f"streamed from the files: keep it resident (a rule, --offload-rule {name}=resident), or build the "
                    f"model with from_pretrained() and give it to headrace.offload()"
                )
        return func(*args, **kwargs)


def _allocate(storage: BoundStorage) -> None:
    """Move a storage from ``meta`` to the CPU with its ties and views, filled with zeros."""
    if storage.on_meta:
        storage.adopt(new_buffer(storage.info.num_bytes).zero_())


# -- warnings ---------------------------------------------------------------------------------------------------------


def differences(model: PreTrainedModel, found: Match, *, is_chosen: bool = False) -> Iterator[str]:
    """Warnings: tensors that are missing, unused, untied or not streamed, and an assumed class.

    ``is_chosen``: the user named the class of the model.
    """
    root = found.weights.checkpoint.root
    if not model.config.architectures and not is_chosen:
        causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model.config.model_type, "")
        other = f'; for text name {causal} there, "architectures": ["{causal}"]' if "ForCausal" in causal else ""
        yield (
            f"{root}/config.json names no class (architectures), so it is taken for a {type(model).__name__}"
            f"{'' if model.can_generate() else other}"
        )
    if found.missing:
        yield (
            f"{listed(found.missing, 'tensor')} of {type(model).__name__} not in {root}: newly initialised, as "
            f"from_pretrained does; outputs that depend on them are meaningless until they are trained"
        )
    if found.unexpected:
        yield (
            f"{listed(found.unexpected, 'tensor')} in {root} not used: {type(model).__name__} does not have "
            f"{'it' if len(found.unexpected) == 1 else 'them'}"
        )
    if found.untied:
        yield (
            f"{listed(found.untied, 'tensor')} in {root} differ from the tensors that config.json ties them to: not "
            f"tied, as from_pretrained does; set tie_word_embeddings to false in config.json"
        )
    if found.rearranged:
        tensors = {name: tensor for s in found.inventory.storages for tensor in s.tensors for name in tensor.names}
        sizes = {name: tensors[name].extent_bytes for name in found.rearranged if name in tensors}
        named = [f"{name} ({size} bytes, {found.rearranged[name]})" for name, size in sizes.items()]
        yield (
            f"{listed(named, 'tensor')}, {format_size(sum(sizes.values()))} in total, cannot be streamed from "
            f"unmodified files: converted while loading, tensor by tensor, and resident in mode 'disk'; a checkpoint "
            f"saved in the layout and dtype of the model streams them"
        )
