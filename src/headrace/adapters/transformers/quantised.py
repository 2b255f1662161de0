"""Quantised checkpoints of transformers: its own quantizer (``HfQuantizer``) replaces, fills and finishes modules.

There are three cases, by method and device.

*As stored.* Packed weights and their scales are parameters of the quantizer's modules (fp8 on a GPU) and are matched
with the files like those of any model.

*Dequantised.* The quantizer leaves the model plain and its converters dequantise tensor by tensor (fp8 and MXFP4 on a
CPU, experts of compressed-tensors): recipes like any other conversion.

*Built by the library.* Everything else. The first forward is included, because it repacks in some (GPTQ, AWQ and
bitsandbytes on a CPU) and decompresses in others (compressed-tensors)::

    tensors of the files (parts)     template: the quantizer's module, on meta
                 |                          |
                 +------------+-------------+
                              v
    _ModuleBuilder.make(): fill, decompress, finish, first forward
                              |
             finished module, with its bytes
                 |                          |
    the first of a signature:        every module, while loading:
    copied on meta into the          values(), one module at a time,
    model, so a plan has the         which a Conversion copies into
    final sizes                      the store

So modules that cannot run here are refused before anything is loaded.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import set_param_for_module
from transformers.quantizers.auto import AutoHfQuantizer

from headrace.adapters.self_managed import reject_self_managed_weights
from headrace.checkpoint.safetensors_header import Checkpoint, FileTensor
from headrace.checkpoint.weight_map import Conversion, TensorSource
from headrace.errors import CheckpointError
from headrace.model.inventory import inner_tensors
from headrace.model.memory_profile import is_routed
from headrace.model.records import Location, dotted_name, dotted_prefixes
from headrace.model.torch_private import make_subclass

if TYPE_CHECKING:
    from transformers.quantizers.base import HfQuantizer

# Their kernels need a GPU; on a CPU transformers dequantises such weights while it loads them.
_DEQUANTISED_ON_CPU = ("fp8", "mxfp4")
# Their modules compute with the tensors of the files as stored.
_AS_STORED = ("fp8",)
# Their modules run on weights of the model's dtype, made in the first forward.
_DECOMPRESSED = ("compressed-tensors",)
# Their tensor subclasses hold the tensors of the files as stored.
_WRAPPED = ("torchao",)
# Compared with the library's own model. Another method may keep state of the first forward.
_COMPARED = {*_DEQUANTISED_ON_CPU, *_AS_STORED, *_DECOMPRESSED, *_WRAPPED, "gptq", "awq", "bitsandbytes"}
Assembly: TypeAlias = Any  # that of .conversion, which imports this module
INITIALISED = "_is_hf_initialized"  # transformers initialises tensors without this attribute
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.Size, Enum)


class NotHereError(CheckpointError):
    """Quantised weights cannot run on this machine, because of ``why``; headers are enough to plan them. Internal."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


def stated_quantisation(config: Any) -> dict[str, Any] | None:
    """The ``quantization_config`` of a configuration, or of its text model, as transformers looks for it."""
    for part in (config, config.get_text_config(decoder=True)):
        stated = getattr(part, "quantization_config", None)
        if stated is not None:
            return dict(stated) if isinstance(stated, Mapping) else stated.to_dict()
    return None


def open_quantizer(folder: Any, config: PretrainedConfig, device: torch.device) -> HfQuantizer | None:
    """The quantizer that ``config`` asks for, checked for ``device``; ``None``: plain weights.

    Raises:
        NotHereError: a package or a chip is missing.
        CheckpointError: a method that transformers does not have.
    """
    stated = stated_quantisation(config)
    if stated is None:
        return None
    method = method_of(stated)
    try:
        supports: Any = AutoHfQuantizer.supports_quant_method
        if not supports(stated):
            raise ValueError(f"transformers has no quantisation {method!r}")
    except ValueError as error:
        raise CheckpointError(
            f"{folder}/config.json: expected a quant_method that transformers knows in quantization_config, found "
            f"{method!r} ({error}); correct config.json, or install a transformers that knows it"
        ) from error
    is_absent = device.type == "cuda" and not torch.cuda.is_available()  # a GPU to plan for
    try:
        if method not in _COMPARED:
            raise RuntimeError(f"headrace loads {', '.join(sorted(_COMPARED))}")
        if is_absent and method not in (*_DECOMPRESSED, *_AS_STORED):
            raise RuntimeError("torch sees no CUDA device")
        quantization: Any = AutoHfQuantizer.merge_quantization_configs(stated, None)
        config.quantization_config = quantization
        if device.type == "cpu" and method in _DEQUANTISED_ON_CPU:
            quantization.dequantize = True
        quantizer: HfQuantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=True)
        if not hasattr(quantizer, "get_new_dtype"):
            raise RuntimeError(f"expected transformers 5.23 or newer, found {transformers.__version__}")
        validate: Any = quantizer.validate_environment
        if not (is_absent and method in _AS_STORED):  # of which it would make weights for a CPU
            validate(device_map={"": torch.device("cpu") if is_absent else device}, weights_only=True)
    except Exception as error:  # a quantizer raises ImportError, RuntimeError or ValueError
        raise refusal(folder, method, device, error) from error
    return quantizer


def put_in_modules(
    folder: Path, model: PreTrainedModel, quantizer: HfQuantizer, dtype: torch.dtype, device: torch.device
) -> None:
    """Have ``quantizer`` replace the modules of ``model``, on ``meta``; the model has it as ``hf_quantizer`` then."""
    files = [os.fspath(file) for file in Checkpoint.open(folder).files]
    try:
        with torch.device("meta"):
            quantizer.preprocess_model(
                model=model, dtype=dtype, device_map={"": device}, checkpoint_files=files, use_kernels=False
            )
    except Exception as error:  # of any type, from the libraries
        raise refusal(folder, _method(quantizer), device, error) from error
    vars(model)["hf_quantizer"] = quantizer
    hook: Any = vars(model).pop("ct_decompress_hook", None)
    if hook is not None:  # compressed-tensors decompresses all modules before the first forward; here each is by then
        hook.remove()
        status = import_module("compressed_tensors.quantization").QuantizationStatus.DECOMPRESSED
        cast(Any, quantizer).compressor.quantization_config.quantization_status = status  # for save_pretrained


def method_of(stated: Mapping[str, Any]) -> str:
    """The name of the method in a ``quantization_config``."""
    found = stated.get("quant_method", "unnamed")
    return str(getattr(found, "value", found))


def _method(quantizer: HfQuantizer) -> str:
    return method_of(vars(quantizer.quantization_config))


def refusal(folder: Any, method: str, device: Any, reason: object) -> NotHereError:
    """The error for a method that does not run here; ``reason``: in words, or the error of its library."""
    said = str(reason) or str(getattr(reason, "__context__", ""))
    why = f"{method} for {device}: " + " ".join(said.split()).rstrip(".")
    return NotHereError(
        f"{folder}: expected weights that can be loaded here, found quantised ones (quantization_config in "
        f"config.json) that cannot: {why}; fix that, or use the model's unquantised checkpoint (`headrace plan` "
        f"sizes both)",
        why,
    )


def is_packed(tensor: FileTensor) -> bool:
    """Whether a tensor of a file holds quantised numbers: integers, or floats of one byte."""
    return not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1


def use_file_layout(
    model: PreTrainedModel, checkpoint: Checkpoint, rename: Callable[[str], tuple[str, str | None]]
) -> tuple[dict[str, TensorSource], set[str], list[str]]:
    """Give the modules of a plain ``model`` on ``meta`` the tensors of the files, in place of their own.

    So a plan has the sizes of packed weights, scales and zero points without the library that runs them.

    Returns:
        their sources, all names in the files that they stand for, and the weights that stay because
        they run decompressed.
    """
    runs_dense = method_of(stated_quantisation(model.config) or {}) in _DECOMPRESSED
    state, modules = model.state_dict(), dict(model.named_modules())
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    holders = {
        path for path, module in modules.items() if any(value is not None for value in module._parameters.values())
    }
    plain: set[str] = set()
    sources: dict[str, TensorSource] = {}
    held: dict[str, str] = {}
    for key, tensor in checkpoint.tensors.items():
        name, _ = rename(key)
        owner = next(path for path in reversed(dotted_prefixes(name.rpartition(".")[0])) if path in modules)
        if name in state and not is_packed(tensor):
            plain.add(name)
            continue
        if owner not in holders or any(p.search(key) for p in ignored):
            continue  # of no module that is quantised: reported as unused
        held[key] = owner
        attr = key.removeprefix(f"{owner}.").replace(".", "_")
        is_spent = key.endswith((".weight", ".weight_packed")) or name.rpartition(".")[0] != owner
        if not (runs_dense and is_spent):
            stored = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            modules[owner].register_parameter(attr, nn.Parameter(stored, requires_grad=False))
            sources[dotted_name(owner, attr)] = TensorSource.of(tensor)
    left = [(owner, attr) for owner in sorted(set(held.values())) for attr in list(modules[owner]._parameters)]
    known = plain | sources.keys()
    replaced = [(owner, attr) for owner, attr in left if dotted_name(owner, attr) not in known]
    if runs_dense:
        return sources, set(held), [dotted_name(owner, attr) for owner, attr in replaced]
    for owner, attr in replaced:
        modules[owner]._parameters[attr] = None
    return sources, set(held), []


# -- modules that the library builds -----------------------------------------------------------------------------------


def select_library_modules(model: PreTrainedModel, collected: dict[str, Assembly]) -> dict[str, list[Assembly]]:
    """Take the assemblies of modules that the library has to build out of ``collected``; by module."""
    quantizer: Any = model.hf_quantizer
    if getattr(quantizer.quantization_config, "dequantize", False):
        return {}
    if _method(quantizer) in _AS_STORED:
        exponents = [name for name, found in collected.items() if found.parts[0][1].dtype == torch.uint8]
        if exponents:
            own = f"scales that are exponents alone, such as {exponents[0]}, were not compared yet"
            raise refusal(model.config.name_or_path, _method(quantizer), "a GPU", own)
        return {}
    by_module: dict[str, list[Assembly]] = {}
    for target, assembly in collected.items():
        by_module.setdefault(target.rpartition(".")[0], []).append(assembly)
    chosen = {
        name: assemblies
        for name, assemblies in by_module.items()
        if (hasattr(model.get_submodule(name), "in_features") or is_routed(model.get_submodule(name)))
        and any(is_packed(tensor) for assembly in assemblies for _, tensor in assembly.parts)
    }
    for assembly in (assembly for assemblies in chosen.values() for assembly in assemblies):
        del collected[assembly.target]
    packed = {name for name, module in model.named_modules() if hasattr(module, "quantization_scheme")} - chosen.keys()
    if (step := quantizer.get_load_operations().get("deserialize")) is not None:  # it makes one tensor of several
        operations = {target: getattr(each.converter, "operations", ()) for target, each in collected.items()}
        packed |= {target for target, steps in operations.items() if any(isinstance(each, step) for each in steps)}
    if packed:
        why = f"expected quantised weights in linear layers alone, found {', '.join(sorted(packed)[:4])}"
        raise refusal(model.config.name_or_path, _method(quantizer), "any device", why)
    return chosen


def build_library_module(
    model: PreTrainedModel, chosen: Mapping[str, Sequence[Assembly]], checkpoint: Checkpoint, device: torch.device
) -> tuple[dict[str, TensorSource], dict[str, Conversion]]:
    """Replace the ``chosen`` modules by finished ones on ``meta``; the sources and recipes of their tensors, by name.

    Raises:
        NotHereError: the library cannot finish or run the first module of a signature here.
        CheckpointError: a module stores weights where they cannot be moved.
    """
    quantizer: Any = model.hf_quantizer
    device = device if device.type == "cpu" or torch.cuda.is_available() else torch.device("cpu")  # to plan for a GPU
    sources: dict[str, TensorSource] = {}
    recipes: dict[str, Conversion] = {}
    # By signature: a finished module on meta, and each of its tensors with the part that it is, if it is one unchanged.
    finished: dict[str, tuple[nn.Module, list[tuple[str, int | None]]]] = {}
    templates = {name: _on_meta(model.get_submodule(name), name) for name in chosen}
    if chosen:  # make() calls it module by module, with bytes
        quantizer._process_model_after_weight_loading = lambda model, **_: model
    quantizer.postprocess_model(model)
    vars(quantizer).pop("_process_model_after_weight_loading", None)
    for name, assemblies in chosen.items():
        builder = _ModuleBuilder(model, quantizer, name, templates[name], assemblies, device)
        if builder.signature not in finished:
            read = {part.name: checkpoint.read(part.name) for part in builder.parts}
            try:
                made = builder.make(read)
                vars(model).update(builder.model_attrs)
                reject_self_managed_weights(name, made, device)
                empty = _on_meta(made, name)
            except Exception as error:  # of any type: a kernel that is missing, a shape it does not support
                raise refusal(f"{checkpoint.root}: {name}", _method(quantizer), device, error) from error
            indices = {read[part.name].data_ptr(): index for index, part in enumerate(builder.parts)}
            stored = indices if _method(quantizer) in _WRAPPED else {}
            origins = [(label, stored.get(tensor.data_ptr())) for label, tensor in _tensors(made)]
            finished[builder.signature] = empty, origins
        like, origins = finished[builder.signature]
        fresh = _on_meta(like, name)
        model.set_submodule(name, fresh)
        builder.expected_attrs = _plain_attrs(fresh)
        sources |= {
            dotted_name(name, label): TensorSource.of(builder.parts[o]) for label, o in origins if o is not None
        }
        labels = tuple(dotted_name(name, label) for label, origin in origins if origin is None)
        recipes |= dict.fromkeys(labels, Conversion(labels, builder.parts, builder.values))
    return sources, recipes


@dataclass(eq=False)
class _ModuleBuilder:
    """Builds one module on ``device`` from ``template``, the module as the quantizer put it on ``meta``."""

    model: PreTrainedModel
    quantizer: HfQuantizer
    name: str
    template: nn.Module
    assemblies: Sequence[Assembly]
    device: torch.device
    expected_attrs: Mapping[str, str] | None = None  # plain attributes of the finished module in the plan
    model_attrs: Mapping[str, Any] = field(default_factory=dict)  # that the quantizer gave the model

    @cached_property
    def parts(self) -> tuple[FileTensor, ...]:
        """The tensors of the files that it is filled from."""
        return tuple({tensor.name: tensor for each in self.assemblies for _, tensor in each.parts}.values())

    @property
    def signature(self) -> str:
        """Equal for modules that differ in the values of their tensors alone."""
        shapes = [(part.name.rpartition(self.name)[2], part.dtype, part.shape) for part in self.parts]
        return repr((type(self.template), _plain_attrs(self.template), shapes))

    @torch.no_grad()
    def make(self, parts: Mapping[str, torch.Tensor]) -> nn.Module:
        """The module as it is after its first forward."""
        module = _on_meta(self.template, self.name)
        model = _OneModuleModel(self.model, self.name, module)
        report: Any = SimpleNamespace(missing_keys=set(), unexpected_keys=set(), mismatched_keys=set())
        report.conversion_errors = {}
        routed = is_routed(module)  # its converter sets objects of triton_kernels
        for assembly in self.assemblies:
            made = assembly.run(model, partial(self._part, parts, assembly.dtype), report if routed else None)
            for target, value in made.items():
                set_param_for_module(model, target, value, report, self.quantizer)  # type: ignore[arg-type]
        if report.mismatched_keys or report.unexpected_keys:
            raise ValueError(f"{self.name} has no place for {report.mismatched_keys or report.unexpected_keys}")
        compressor = getattr(self.quantizer, "compressor", None)
        if compressor is not None:  # as its hook does before the first forward of the model
            decompress_module = import_module("compressed_tensors.compressors.base").decompress_module

            decompress_module(module, compressor.force_compression_format)
        before = set(vars(model))
        gc.freeze()  # gptqmodel collects garbage after each call; this way it skips all older objects
        try:
            self.quantizer._process_model_after_weight_loading(model)  # type: ignore[arg-type]
        finally:
            gc.unfreeze()
        self.model_attrs = {key: value for key, value in vars(model).items() if key not in before}
        module.eval()
        config: Any = self.model.config
        if routed:
            packed = import_module("headrace.experts.packed")  # it imports Triton
            for attr, stated in packed.PROJECTIONS.items():
                objects = getattr(module, attr), getattr(module, stated)
                if not packed.hold_packed(module, attr, *objects, module.num_experts):
                    raise ValueError("its kernels for this GPU mix the bytes of experts")
        else:
            module(torch.zeros(1, cast(int, module.in_features), dtype=config.dtype, device=self.device))
        if lacks := [label for label, tensor in _tensors(module) if tensor.is_meta]:
            raise ValueError(f"the checkpoint holds no {', '.join(lacks)} for it")
        for attr, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):  # as a buffer it is found under the same name, and can be moved
                delattr(module, attr)
                module.register_buffer(attr, value, persistent=False)
        return module

    def _part(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype | None, tensor: FileTensor) -> torch.Tensor:
        return parts[tensor.name].to(self.device, dtype)

    def values(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of the module by name, in host memory.

        Raises:
            CheckpointError: its attributes differ from those of the module in the plan.
        """
        try:
            module = self.make(parts)
        except Exception as error:  # of any type, for values that the library does not expect
            raise refusal(self.name, _method(self.quantizer), self.device, error) from error
        attrs, expected = _plain_attrs(module), self.expected_attrs or {}
        if attrs != expected:
            found = sorted(dict(attrs.items() ^ expected.items()))
            raise CheckpointError(
                f"{self.name}: expected a module like the first of its kind, found another {', '.join(found)}: its "
                f"library chooses by the values in it; load the model with from_pretrained and offload it"
            )
        return {dotted_name(self.name, label): tensor.cpu().contiguous() for label, tensor in _tensors(module)}


class _OneModuleModel(nn.Module):
    """The model with one of its modules, under its own name, for a quantizer that works on models."""

    def __init__(self, model: PreTrainedModel, name: str, module: nn.Module) -> None:
        super().__init__()
        self.config = model.config
        for owner in dotted_prefixes(name)[1:-1]:
            self.set_submodule(owner, nn.Module())
        self.set_submodule(name, module)

    get_parameter_or_buffer = PreTrainedModel.get_parameter_or_buffer


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors of ``module`` that have elements, those inside of subclasses too, named as in an inventory."""
    for attr, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            for path, inner in inner_tensors(tensor):
                if inner.numel():  # GPTQModel's Marlin leaves empty tensors in place of those it does not need
                    yield Location("", attr, "parameter", path).name, inner


def _plain_attrs(module: nn.Module) -> dict[str, str]:
    """The plain values among the attributes of ``module``, as text."""
    return {
        key: repr(value)
        for key, value in vars(module).items()
        if (isinstance(value, _PLAIN) or hasattr(value, "model_dump")) and key != INITIALISED
    }


def _on_meta(module: nn.Module, name: str) -> nn.Module:
    """A copy of ``module`` without bytes.

    Raises:
        CheckpointError: an attribute that is no tensor holds one.
    """
    held = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
    memo: dict[int, Any] = {id(inner): _empty(inner) for tensor in held for _, inner in inner_tensors(tensor)}
    memo |= {id(tensor): _empty(tensor) for tensor in held}
    try:
        with _RefuseBytes():  # type: ignore[no-untyped-call]
            fresh = deepcopy(module, memo)
            for tensor in held:
                if not hasattr(tensor, "__tensor_flatten__"):  # its attributes may lead back to the module
                    vars(memo[id(tensor)]).update(deepcopy(vars(tensor), memo))
            _rebind_compiled(module, fresh)
    except _BytesError as error:
        raise CheckpointError(
            f"{name}: expected weights in parameters, buffers and attributes, found some in another place of "
            f"{type(module).__name__}, from where they cannot be moved; load the model with from_pretrained"
        ) from error
    marked: list[Any] = [fresh, *fresh._parameters.values(), *fresh._buffers.values()]
    for each in marked:
        if each is not None:
            setattr(each, INITIALISED, True)
    return fresh


def _rebind_compiled(module: nn.Module, fresh: nn.Module) -> None:
    """Compile for ``fresh``, a copy of ``module``, the methods that ``module`` has compiled for itself.

    A copy shares functions, such as the result of ``torch.compile`` for a bound method, which would run on the weights
    of ``module``. GPTQModel compiles methods by default.
    """
    for attr, value in vars(module).items():
        bound = getattr(value, "_torchdynamo_orig_callable", None)
        if isinstance(bound, MethodType) and bound.__self__ is module:
            setattr(fresh, attr, torch.compile(MethodType(bound.__func__, fresh)))


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` on ``meta``, its inner tensors too if it is of a subclass."""
    if hasattr(tensor, "__tensor_flatten__"):
        return _rebuilt(tensor, _empty)
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return make_subclass(type(tensor), empty, tensor.requires_grad)


def _rebuilt(tensor: Any, inner: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A tensor of the same subclass around ``inner`` of each of its inner tensors."""
    names, context = tensor.__tensor_flatten__()
    parts = {name: inner(getattr(tensor, name)) for name in names}
    made: Any = type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
    if isinstance(tensor, nn.Parameter):
        made._is_param = True  # as nn.Parameter() does, which would also detach and so replace the inner tensors
    return cast(torch.Tensor, made)


def move_wrappers(model: nn.Module) -> None:
    """Give tensors of subclasses the device of their inner tensors, which are no longer on ``meta``."""
    # A subclass keeps the device that it was made with.
    for module in model.modules():
        for attr, tensor in module._parameters.items():
            if tensor is None or not hasattr(tensor, "__tensor_flatten__"):
                continue
            if tensor.is_meta and not any(inner.is_meta for _, inner in inner_tensors(tensor)):
                module._parameters[attr] = cast(nn.Parameter, _rebuilt(tensor, lambda part: part))


class _BytesError(Exception):
    """A copy met a tensor with bytes; internal."""


class _RefuseBytes(TorchDispatchMode):
    """Ends a copy of a module that meets a tensor with bytes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves(args):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                raise _BytesError
        return func(*args, **(kwargs or {}))
