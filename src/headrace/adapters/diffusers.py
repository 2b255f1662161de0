"""Pipelines of diffusers under one budget: :func:`load`.

The modules of a pipeline are offloaded as one model, :class:`Components`, whose forward is a call of the pipeline. So
there is one plan: all components share its slots, components that every step runs get the remaining budget for resident
weights, and while a component runs its last units the first ones of the next are copied. The order and number of runs
are learned from the calls (``repeats`` of :class:`~headrace.runtime.prefetcher.Prefetcher`).

While it is offloaded, the pipeline object has a special class. It makes a call a forward, refuses methods
that would move the components as well, and plans again around methods that change their weights (IP-adapters, merged
LoRA). If no plan fits then, neither it nor its components run until it is offloaded again, or the handle removed.
Adapters that are loaded beside the weights become residents of the plan in force.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModularPipeline
from torch import nn
from torch.utils.hooks import RemovableHandle

from headrace.adapters.engine_interface import require_names
from headrace.adapters.layerwise_casting import casting_of, store_again, store_in
from headrace.adapters.pipeline_peaks import CallProfile, describe
from headrace.api import Handle, handle_of, refuse_second_offload, start
from headrace.checkpoint.safetensors_header import Checkpoint, FileFingerprint, FileTensor
from headrace.checkpoint.weight_map import TensorSource, WeightMap
from headrace.config import Budget, Policy, Rules, as_policy
from headrace.errors import BudgetError, CheckpointError, OptionError, OptionTypeError, StateError
from headrace.formatting import listed
from headrace.model.inventory import take_inventory, without_lora
from headrace.model.records import Inventory
from headrace.plan.plan import Plan
from headrace.plan.units import selected
from headrace.planning.context import not_in_files
from headrace.planning.request import PlanRequest, require_kinds
from headrace.runtime.prepare import prepare
from headrace.stats import Stats
from headrace.stores.file_reads import DiskOptions
from headrace.stores.store import Progress

__all__ = ["Components", "PipelineHandle", "load"]

require_names("diffusers", (0, 42), (0, 42))

# The modules of diffusers with the classes of models that every step runs.
_STEP_MODELS = ("diffusers.models.transformers", "diffusers.models.unets", "diffusers.models.controlnets")
# The planner's rows of a step: tokens of an image of 1024 x 1024 (2 x 2 patches of latents an eighth of its size).
_ROWS = 4096

# Of a component of diffusers or of transformers, in the order in which each looks for them.
_WEIGHT_FILES = (
    "diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors",
    "model.safetensors", "model.safetensors.index.json",
)  # fmt: skip

_MODULAR_INDEX = "modular_model_index.json"
_MOVERS = ("to", "enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload")
# Those that add or drop weights beside the offloaded ones, which stay what they are.
_ADAPTS = ("load_lora_weights", "unload_lora_weights", "delete_adapters")
_CHANGES = (
    "fuse_lora", "unfuse_lora", "load_ip_adapter", "unload_ip_adapter",
    "load_textual_inversion", "unload_textual_inversion", "fuse_qkv_projections", "unfuse_qkv_projections",
)  # fmt: skip
# Those that write existing weights, so that the files no longer have them.
_WRITES = ("fuse_lora", "unfuse_lora")


def load(
    pipeline: DiffusionPipeline | ModularPipeline | str | os.PathLike[str],
    policy: Policy | Plan | str | int,
    *,
    device: torch.device | str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    disk: DiskOptions | None = None,
    progress: Progress | None = None,
    measure_stalls: bool = False,
    storage_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    **options: Any,
) -> tuple[Any, PipelineHandle]:
    """Offload all components of a pipeline within one budget; its output is the same bit for bit.

    For example::

        pipe, handle = headrace.adapters.diffusers.load(folder, "12GiB", dtype=torch.bfloat16)
        image = pipe("a weir in spring").images[0]

    Args:
        pipeline: a pipeline, modular ones too, with its weights in host memory, or the folder of one (or its name in
            the local cache of the Hub), which ``from_pretrained`` reads. Nothing is downloaded.
        policy: as for :func:`headrace.offload`; a budget is for the weights of all components together. Names in
            patterns begin with that of the component: ``transformer.blocks.0.attn1.to_q.weight``.
        device: where compute runs; default a GPU where there is one, else the CPU.
        checkpoint: folder that a ``pipeline`` that is built already was loaded from; default none. With it
            mode ``disk`` works, and weights that do not fit host memory stay in its files.
        disk, progress, measure_stalls: as for :func:`headrace.offload`.
        storage_dtype: a dtype such as ``torch.float8_e4m3fn`` in which the models that every step runs are stored and
            copied, and from which their weights are cast where they are used (layerwise casting of diffusers, with its
            exceptions such as norms); or dtypes by names of components. The weights are rounded before the plan is made
            and stay so, also after an error. Where layerwise casting was enabled before, it is in force without this.
        options: for ``from_pretrained``, such as ``dtype``, ``variant`` or a component; only with a folder.

    Returns:
        the pipeline and its handle. ``handle.remove()`` undoes everything.

    Raises:
        The errors of :func:`headrace.offload`; StateError also if diffusers or accelerate moves a component already.
    """
    require_kinds(device, disk)
    if isinstance(pipeline, str | os.PathLike):
        pipe, checkpoint = _from_folder(pipeline, options)
    elif isinstance(pipeline, DiffusionPipeline | ModularPipeline) and not options:
        pipe = pipeline
    else:
        found = f"unknown arguments {', '.join(options)}" if options else type(pipeline).__name__
        raise OptionTypeError(
            f"pipeline: expected a DiffusionPipeline or ModularPipeline, or a folder and arguments of from_pretrained, "
            f"found {found}"
        )
    if storage_dtype is not None:
        if not isinstance(policy, Plan):
            as_policy(policy)  # which raises for what is none, before weights are rounded
        components = Components(pipe)
        _refuse_hooks(pipe, components)
        refuse_second_offload(components)
        store_in(pipe, storage_dtype, tuple(_step_models(components)))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments = {"progress": progress, "measure_stalls": measure_stalls}
    handle = PipelineHandle(
        pipe, functools.partial(_offload, pipe, policy, device, checkpoint, disk, options, arguments)
    )
    return pipe, handle


def _from_folder(folder: str | os.PathLike[str], options: dict[str, Any]) -> tuple[Any, Path]:
    if "device_map" in options:
        raise OptionError("device_map moves components itself: expected none together with a budget; leave it out")
    path = Path(folder)
    is_modular = (path / _MODULAR_INDEX).is_file()
    # Or the name of one; of a folder, download() would ask the Hub.
    if not is_modular and not (path / "model_index.json").is_file():
        chosen = {key: options[key] for key in ("revision", "variant", "cache_dir") if key in options}
        try:
            path = Path(DiffusionPipeline.download(os.fspath(folder), local_files_only=True, **chosen))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{os.fspath(folder)!r}: expected the folder of a diffusers pipeline (with a model_index.json), or the "
                f"name of one in the Hub's local cache, found neither; fetch it with `hf download`"
            ) from error
    try:
        if is_modular:
            pipe = ModularPipeline.from_pretrained(os.fspath(path), local_files_only=True)
            pipe.load_components(local_files_only=True, **options)
            return pipe, path
        return DiffusionPipeline.from_pretrained(path, local_files_only=True, **options), path
    except Exception as error:  # of any type, for files with errors
        raise CheckpointError(
            f"{path}: expected a pipeline that diffusers can load{' with these options' if options else ''}, found "
            f"{type(error).__name__}: {error}; download or copy it again, or install what the message names"
        ) from error


class Components(nn.Module):
    """The modules of ``pipe`` as one model, whose forward is a call of the pipeline."""

    def __init__(self, pipe: Any) -> None:
        super().__init__()
        found = modules_of(pipe)
        # Until a call has shown its own order.
        expected = (getattr(pipe, "model_cpu_offload_seq", None) or "").split("->")
        for name in sorted(found, key=lambda name: expected.index(name) if name in expected else -1):
            self.add_module(name, found[name])
        self.training = any(module.training for module in found.values())

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def modules_of(pipe: Any) -> dict[str, nn.Module]:
    """The components of ``pipe`` that are modules, by name; compiled ones without their wrapper."""
    every = ((name, getattr(part, "_orig_mod", part)) for name, part in pipe.components.items())
    return {name: part for name, part in every if isinstance(part, nn.Module)}


class PipelineHandle(Handle):
    """An active offload of a pipeline; ``plan`` and ``stats()`` begin with the last change of its weights."""

    def __init__(self, pipe: Any, begin: Callable[[Components], Handle]) -> None:
        """``begin``: plans and offloads the components as they are."""
        held = vars(pipe).get("_headrace")
        if held is not None and held._stopped:
            held.remove()
        elif held is not None:
            raise StateError(
                "the pipeline is offloaded already: call remove() on the handle that load() returned for it first"
            )
        self.pipe = pipe
        self._begin = begin
        self._class: type[Any] = type(pipe)
        self._stopped = ""  # why no call runs: weights were changed, and could not be offloaded again
        self._gates: list[RemovableHandle] = []
        self._attach()

    def _attach(self) -> None:
        components = Components(self.pipe)
        self._planned = dict(components.named_parameters())
        self._adapters: dict[str, int] = {}
        try:
            super().__init__(components, self._begin(components)._session)
            self.pipe._headrace = self
            self.pipe.__class__ = _offloaded_class(self._class)
        except BaseException:
            # Also after an interrupt: without a handle the offload could not be removed.
            if (begun := handle_of(components)) is not None:
                begun.remove()
            self._restore()
            raise

    @property
    def plan(self) -> Plan:
        """Plan in force, with adapters that were loaded since as residents."""
        self._require_offload()
        plan = super().plan
        return replace(plan, resident={**plan.resident, **self._adapters}) if self._adapters else plan

    def stats(self) -> Stats:
        self._require_offload()
        return super().stats()

    def __repr__(self) -> str:
        return f"<headrace.Handle of {self._class.__name__}: {self._stopped}>" if self._stopped else super().__repr__()

    def _require_offload(self, *_: Any) -> None:
        if self._stopped:
            raise StateError(self._stopped)

    def remove(self, *, graphs_released: bool = False) -> None:
        super().remove(graphs_released=graphs_released)
        self._restore()

    def _restore(self) -> None:
        """Restore the class of the pipeline, which runs without an offload then."""
        self._stopped = ""
        for gate in self._gates:
            gate.remove()
        self.pipe.__class__ = self._class
        vars(self.pipe).pop("_headrace", None)

    def call(self, run: Callable[[], Any]) -> Any:
        """``run()``, which is a call of the pipeline, as a forward of its components."""
        self._require_offload()
        _refuse_hooks(self.pipe, self.model)  # added since
        offloaded, now = self.model._modules, modules_of(self.pipe)  # named_children() has each module once
        for name in offloaded.keys() | now.keys():
            if offloaded.get(name) is not now.get(name):
                raise StateError(
                    f"{name} of the pipeline was replaced after the pipeline was offloaded: expected the components "
                    f"that the plan was made for; call handle.remove(), then load() again"
                )
        self.count_adapters()  # that were loaded into a component
        self.refuse_8_bits()
        return self.model(run)

    def count_adapters(self) -> None:
        """Count adapters as residents, beside the budget; plan anew if weights that are offloaded were exchanged."""
        now = dict(self.model.named_parameters())
        offloaded = {id(self._planned[name]) for name in super().plan.offloaded_names if name in self._planned}
        if self._stopped or not offloaded <= set(map(id, now.values())):
            with self.without_offload("load_lora_weights"):
                return
        planned = set(map(id, self._planned.values()))
        self._adapters = {name: each.nbytes for name, each in now.items() if id(each) not in planned}

    def refuse_8_bits(self) -> None:
        """Raise StateError if an adapter that is in use was loaded in 8 bits, beside weights that are cast at use."""
        if not self._adapters:
            return
        idle = {id(parameter) for module in self.model.modules() for parameter in _idle_adapters(module)}
        for name, parameter in self.model.named_parameters():
            is_used = name in self._adapters and id(parameter) not in idle
            if is_used and parameter.is_floating_point() and parameter.dtype.itemsize == 1:
                raise StateError(
                    f"{name} was loaded in {parameter.dtype}, in which the weights beside it are stored, and torch "
                    f"computes nothing in it, in a resident pipeline either: call unload_lora_weights(); to have "
                    f"adapters, load them into a pipeline built anew, then call load(pipe, ..., storage_dtype=...)"
                )

    @contextmanager
    def without_offload(self, method: str) -> Iterator[None]:
        """Within, the pipeline is not offloaded; afterwards it is planned and offloaded again."""
        if method in _WRITES and super().plan.reads_files:
            raise StateError(
                f"{method}() writes weights, and some are in files, which headrace does not write: expected all of "
                f"them in host memory; call handle.remove(), {method}() and save_pretrained(), then load that folder"
            )
        self.remove()
        try:
            yield
        finally:
            try:
                self._attach()
            except BaseException as error:
                self._stop(method)
                error.add_note(f"headrace: {self._stopped}")
                raise

    def _stop(self, method: str) -> None:
        """Have calls of the pipeline and of its components raise, instead of running without an offload."""
        self._stopped = (
            f"{method}() has changed the pipeline, and then it could not be offloaded again: it is not offloaded, and "
            f"its weights are resident where they are stored; call load(pipe, ...) again, with a larger budget or in "
            f"place of a finished plan with a budget, or handle.remove() to run it there"
        )
        self.pipe._headrace = self
        self.pipe.__class__ = _offloaded_class(self._class)
        modules = Components(self.pipe).modules()  # of all, since a VAE's decode() is no forward of it
        self._gates = [module.register_forward_pre_hook(self._require_offload) for module in modules]


def _idle_adapters(layer: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of adapters that a ``layer`` of peft does not compute with now."""
    if isinstance(active := getattr(layer, "active_adapters", None), list):
        used = set() if getattr(layer, "disable_adapters", False) else set(active)
        yield from (each for name, each in layer.named_parameters() if used.isdisjoint(name.split(".")))


def _offload(
    pipe: Any,
    policy: Policy | Plan | str | int,
    device: torch.device | str,
    folder: str | os.PathLike[str] | None,
    disk: DiskOptions | None,
    options: Mapping[str, Any],
    arguments: dict[str, Any],
    components: Components,
) -> Handle:
    _refuse_hooks(pipe, components)
    _refuse_upcast(pipe)
    refuse_second_offload(components)
    store_again(components)
    inventory = take_inventory(components)
    given = policy if isinstance(policy, Plan) else as_policy(policy)
    # A policy with another store than files does not read them.
    reads = given.reads_files if isinstance(given, Plan) else given.mode in (None, "disk")
    weights = _weights(Path(folder), components, options) if folder is not None and reads else None
    unstreamable = () if weights is None else not_in_files(inventory, weights)
    if isinstance(given, Budget) and not given.workload.repeated:
        patterns = tuple(f"re:{name}\\..*" for name in _step_models(components))
        rows = given.workload.batch_sizes if isinstance(policy, Budget) else (_ROWS,)
        given = replace(given, workload=replace(given.workload, repeated=patterns, batch_sizes=rows))
    request = PlanRequest(components, given, checkpoint=weights, device=device, disk=disk)
    if isinstance(given, Budget) and given.workload.call_size:
        request = replace(request, profile=CallProfile(pipeline=_described(pipe, given)))
    stay = _kept_from_files(components, given, device, inventory, unstreamable)
    try:
        prepared = prepare(replace(request, inventory=inventory, unstreamable=unstreamable))
    except BudgetError as error:
        if stay:
            raise BudgetError(f"{error}; {stay}", error.minimum_bytes) from error
        raise
    return start(prepared, repeats=True, **arguments)


def _kept_from_files(
    components: Components,
    given: Policy | Plan,
    device: torch.device | str,
    inventory: Inventory,
    unstreamable: Collection[str],
) -> str:
    """Sentence on selected weights that stay on the device since no file holds them in this form, or nothing.

    Raises:
        OptionError: mode ``disk`` was asked for, and some of them are packed.
    """
    is_asked = given.mode == "disk"
    if isinstance(given, Plan | Rules) or not (is_asked or torch.device(device).type == "cpu"):  # whose default it is
        return ""
    missing = set(unstreamable)
    stay = [s.name for s in selected(inventory, given.params) if s.name in missing and s.is_saved]
    kinds = {name: type(each) for name, each in components.named_parameters(remove_duplicate=False)}
    # Quantised weights are parameters of classes of their own; one of torchao has its tensors as "weight:qdata".
    packed = [name for name in stay if kinds.get(name.partition(":")[0], nn.Parameter) is not nn.Parameter]
    text = "the files do not hold {} in this form, so that mode 'disk' would keep them on the device: use mode 'cpu'"
    if packed and is_asked:
        raise OptionError(text.format(listed(packed, "packed tensor")))
    return text.format(listed(stay, "tensor")) if stay else ""


def _described(pipe: Any, budget: Budget) -> str:
    """The pipeline, whose call ``budget`` states a size of, to be counted."""
    if isinstance(pipe, ModularPipeline):
        raise OptionError(
            f"{', '.join(budget.workload.call_size)}: expected a DiffusionPipeline, whose call is counted, found "
            f"{type(pipe).__name__}, which is modular; leave them out, and give a budget for the weights alone"
        )
    if budget.workload.tiling and not getattr(getattr(pipe, "vae", None), "use_tiling", False):
        raise OptionError(
            "tiling: expected a pipeline whose VAE decodes in tiles, found one that decodes whole images, which takes "
            "more than would be counted; call pipe.vae.enable_tiling() before load(pipe, ...), or leave tiling out"
        )
    kind = type(pipe)
    return describe({**pipe.config, "_class_name": kind.__qualname__}, pipe.components, module=kind.__module__)


def _step_models(components: Components) -> list[str]:
    # Those that a user has derived from them, too.
    kinds = ((name, type(part).__mro__) for name, part in components.named_children())
    return [name for name, bases in kinds if any(base.__module__.startswith(_STEP_MODELS) for base in bases)]


def _weights(folder: Path, components: Components, options: Mapping[str, Any]) -> WeightMap:
    """The files of all components, by the names of ``components``; one without safetensors is left out.

    ``options``: of ``from_pretrained``. A component among them is the caller's own, and no file need hold it.
    """
    tensors: dict[str, FileTensor] = {}
    sources: dict[str, TensorSource] = {}
    stamps: list[FileFingerprint] = []
    for name, part in components.named_children():
        if name in options:
            continue
        try:
            found = Checkpoint.open(weight_file(folder / name, options.get("variant")))
        except CheckpointError:
            continue  # pickled, for example: such weights stay in host memory, or mode 'disk' refuses them by name
        stamps += found.stamps
        casts = {at: hook.compute_dtype for at, module in part.named_modules() if (hook := casting_of(module))}
        # Not state_dict(), which unpacks and rounds what bitsandbytes has packed for a CPU.
        held = (*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False))
        for key, live in held:
            # PEFT wraps layers in layers with adapters, so that live names differ from those in the files.
            tensor = found.tensors.get(without_lora(key))
            # Through the dtype of compute some are rounded twice, which a conversion of the file's bytes would not do.
            exact = tensor is not None and tensor.dtype in (live.dtype, casts.get(key.rpartition(".")[0], tensor.dtype))
            if tensor is not None and exact and tensor.shape == tuple(live.shape):
                tensors[f"{name}.{key}"] = tensor
                sources[f"{name}.{key}"] = replace(TensorSource.of(tensor), dtype=live.dtype)
    return WeightMap(Checkpoint(folder.absolute(), tensors, tuple(stamps)), sources)


def weight_file(folder: Path, variant: str | None) -> Path:
    """The file or index that ``from_pretrained`` reads of a component's folder; else the folder itself.

    Files of several variants lie side by side in one folder, with the same tensors.
    """
    stems = (name.rpartition(".") for name in _WEIGHT_FILES if variant is not None)
    names = (*(f"{stem}.{variant}.{ending}" for stem, _, ending in stems), *_WEIGHT_FILES)
    return next((folder / name for name in names if (folder / name).is_file()), folder)


def _refuse_hooks(pipe: DiffusionPipeline, components: nn.Module) -> None:
    """Raise ``StateError`` if diffusers or accelerate moves a component already."""
    if getattr(pipe, "hf_device_map", None) is not None:
        raise StateError("the pipeline was loaded with a device_map, which moves its components: load it without")
    for name, module in components.named_modules():
        registry = getattr(module, "_diffusers_hook", None)
        is_grouped = registry is not None and any("offload" in hook for hook in registry.hooks)
        if is_grouped or hasattr(module, "_hf_hook"):
            how = "diffusers' group offloading" if is_grouped else "accelerate (enable_model_cpu_offload and the like)"
            raise StateError(
                f"{name} ({type(module).__name__}) is moved by {how}: expected a pipeline that nothing else offloads; "
                f"load it without (or remove accelerate's hooks first: pipe.remove_all_hooks(), or "
                f"disable_auto_cpu_offload() of a ComponentsManager)"
            )


def _refuse_upcast(pipe: Any) -> None:
    """Raise ``OptionError`` if each call would cast the VAE to float32, as SDXL in float16 does before it decodes."""
    vae = getattr(pipe, "vae", None)
    casts = hasattr(pipe, "upcast_vae") and getattr(getattr(vae, "config", None), "force_upcast", False)
    if casts and getattr(vae, "dtype", None) is torch.float16:
        raise OptionError(
            "the VAE is in float16, and this pipeline casts it to float32 in each call (force_upcast), which offloaded "
            "weights refuse: expected dtype=torch.bfloat16, or, of a VAE that works in float16, "
            "pipe.vae.register_to_config(force_upcast=False) before load(pipe, ...)"
        )


# -- the class of an offloaded pipeline ----------------------------------------------------------------------------


def _offloaded_class(base: type[Any]) -> type[Any]:
    """A class like ``base``, with its name, whose calls and changes go through ``_headrace``, the handle."""
    made: dict[str, Any] = {"__module__": base.__module__, "__doc__": base.__doc__}
    made["__call__"] = _through(base.__call__, lambda handle, run: handle.call(run))
    made["__reduce_ex__"] = _through(base.__reduce_ex__, _refuse_copy)  # of copy and pickle
    # Of the class itself, or pickle would look for this one by its name.
    made |= {name: getattr(base, name) for name in ("from_pipe", "from_pretrained") if hasattr(base, name)}
    around: dict[str, Callable[[PipelineHandle, Callable[[], Any]], Any]] = dict.fromkeys(_ADAPTS, _adapt)
    around |= {name: functools.partial(_refuse, name) for name in _MOVERS}
    around |= {name: functools.partial(_change, name) for name in _CHANGES}
    made |= {name: _through(getattr(base, name), call) for name, call in around.items() if hasattr(base, name)}
    return type(base.__name__, (base,), made)


def _through(original: Callable[..., Any], around: Callable[[PipelineHandle, Callable[[], Any]], Any]) -> Any:
    """A method that calls ``around(handle, run)``, in which ``run()`` is ``original``."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = vars(self).get("_headrace")
        run = functools.partial(original, self, *args, **kwargs)
        # type(pipe)(**pipe.components) has the same components and no handle: it works as it is.
        return run() if handle is None else around(handle, run)

    return method


def _adapt(handle: PipelineHandle, run: Callable[[], Any]) -> Any:
    try:
        found = run()
    finally:
        handle.count_adapters()
    handle.refuse_8_bits()
    return found


def _change(name: str, handle: PipelineHandle, run: Callable[[], Any]) -> Any:
    with handle.without_offload(name):
        return run()


def _refuse_copy(handle: PipelineHandle, run: Callable[[], Any]) -> Any:
    raise StateError(
        f"an offloaded {handle._class.__name__} cannot be copied or pickled: its weights are stored elsewhere; call "
        f"handle.remove() first, or use save_pretrained()"
    )


def _refuse(name: str, handle: PipelineHandle, run: Callable[[], Any]) -> Any:
    raise StateError(
        f"{name}() would move components that headrace moves: expected no such call while the pipeline is offloaded; "
        f"leave it out (compute runs on the device of load()), or call handle.remove() first"
    )
