"""Device memory of a pipeline's call beside the weights: its own ``__call__`` runs on ``meta``, and is counted.

So guidance, the scheduler, the VAE and its tiling take part as they are, and no pipeline has a formula. The denoising
loop has one step. Embeddings of the prompt are given, in their full length: text encoders do not run. Kernels count as
on a GPU: attention without a matrix of scores, norms without float32 copies, convolutions with the channels-last copies
that cuDNN makes of their inputs and outputs. Workspaces of cuBLAS and the allocator's fragmentation are not counted.

For the time of steps the same call is run again, with all blocks, and its operations are counted (:func:`count_step`).
"""

from __future__ import annotations

import inspect
import json
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from itertools import starmap, zip_longest
from typing import Any, NamedTuple

import torch
from diffusers.configuration_utils import ConfigMixin
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakTensorKeyDictionary

from headrace.config import Workload
from headrace.errors import OptionError
from headrace.formatting import format_size, format_time, pluralize
from headrace.model.records import ModelProfile

_ALIGN_BYTES = 512  # of the allocator of CUDA
# Where the configuration of a transformer says how wide embeddings of the prompt are.
_TEXT_WIDTHS = ("joint_attention_dim", "text_dim", "text_embed_dim", "caption_channels", "cross_attention_dim")
# Where a pipeline says how many frames more make one more of its latents.
_FRAME_STEPS = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
_BLOCKS = ("transformer", "connectors")  # components of equal blocks
_STEP_MODELS = ("transformer", "unet", "controlnet")  # components that steps run
_BLENDS = ("blend_v", "blend_h", "blend_t")  # of a VAE that decodes in tiles
_TEXT_LENGTH = 77  # tokens of CLIP, where a call has no max_sequence_length
_SIDE = 32  # pixels; every pipeline takes multiples of it
_MOST = 4  # times the size that was asked for, in the search for the largest
_aten = torch.ops.aten


class Call(NamedTuple):
    """Peak that was counted; ``frames``: 0 for an image, of which a video has ``step`` more or less."""

    peak_bytes: int
    height: int
    width: int
    frames: int
    step: int

    def __str__(self) -> str:
        return f"{f'{self.frames} frames of ' if self.frames else ''}{self.height} x {self.width}"

    @property
    def room_bytes(self) -> int:
        """The peak, and a hundredth for what was measured above counts, and the last gap of expandable segments."""
        return self.peak_bytes + self.peak_bytes // 100


@dataclass(frozen=True)
class CallProfile(ModelProfile):
    """Profile of a pipeline in whose call a workload states a size.

    Attributes:
        pipeline: as :func:`describe` returns it.
        asked: height, width and frames, ``None`` for the pipeline's own; whether the VAE decodes in tiles.
        steps: of the call, whose time a note says; ``None``: no note.
    """

    pipeline: str = ""
    asked: tuple[int | None, int | None, int | None, bool] = (None, None, None, False)
    steps: int | None = None

    def _for_call(self, workload: Workload) -> CallProfile:
        asked = workload.height, workload.width, workload.frames, workload.tiling
        return replace(self, asked=asked, steps=workload.steps)

    @property
    def call(self) -> Call:
        """The call that was asked for."""
        return count_call(self.pipeline, *self.asked)

    def workload_bytes(self, batch: int, context: int) -> int:
        return self.call.room_bytes

    def describe(self, batch: int, context: int) -> str:
        return str(self.call)

    def smaller(self, room_bytes: int, batch: int, context: int) -> str:
        return str(self.largest(room_bytes) or "")

    def notes(self, context: int, room_bytes: Callable[[], int | None], pass_s: Callable[..., float]) -> list[str]:
        text = f"a call for {self.call} takes up to {format_size(self.call.peak_bytes)} beside the weights"
        if not self.asked[-1]:
            text += " (--tiling counts a VAE that decodes in tiles)"
        if (room := room_bytes()) is not None:
            larger = f"{_MOST} times as {'many frames' if self.call.frames else 'high'}"
            text += f"; with the fewest weights resident fits, up to {larger}: {self.largest(room) or 'none'}"
        gaps = "without PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True gaps of torch's allocator take a third more"
        found = [f"{text}. Counted without a GPU; {gaps}"]
        if self.steps is not None:
            passes = count_step(self.pipeline, *self.asked[:3])
            seconds, teraflop = self.steps * sum(starmap(pass_s, passes)), sum(each for _, each in passes) / 1e12
            found.append(
                f"{pluralize(self.steps, 'step')} of {pluralize(len(passes), 'pass', 'passes')} each: "
                f"{format_time(seconds)} of copies, or of products and attention ({teraflop:,.1f} TFLOP a step) at the "
                f"rate of products. Not in it: other kernels (with them an H200 took 1.2 to 1.4 times as long), VAE, "
                f"and text encoders, which the predicted step above has"
            )
        return found

    def largest(self, room_bytes: int) -> Call | None:
        """The call with the most frames, or for the largest image, that takes no more; up to 4 times what was asked."""
        call = self.call
        asked = (call.frames - 1) // call.step + 1 if call.frames else call.height // _SIDE

        def of(number: int) -> Call:
            if call.frames:
                size = (call.height, call.width, call.step * (number - 1) + 1)
                return count_call(self.pipeline, *size, self.asked[-1])
            width = _SIDE * max(1, round(call.width * number / call.height))  # of the same shape
            return count_call(self.pipeline, _SIDE * number, width, None, self.asked[-1])

        def peak_bytes(number: int) -> int:
            try:
                return of(number).room_bytes
            except OptionError:  # a pipeline may refuse sizes that the search tries
                return sys.maxsize

        fitting = bisect_right(range(1, _MOST * asked + 1), room_bytes, key=peak_bytes)
        return of(fitting) if fitting else None


# -- the pipeline on meta ----------------------------------------------------------------------------------------------


def describe(
    index: Mapping[str, Any],
    parts: Mapping[str, Any],
    configs: Mapping[str, Any] | None = None,
    module: str = "diffusers",
) -> str:
    """A pipeline as JSON: what its model_index.json states, and its schedulers and models of diffusers as configs.

    Args:
        index: the content of model_index.json.
        parts: components, on any device; those of other libraries are left out.
        configs: components that are not built, in the form that is returned: module, class, config, dtype, state.
        module: where the class of the pipeline is.
    """
    configs = dict(configs or {})
    for name, part in parts.items():
        part = getattr(part, "_orig_mod", part)  # torch.compile's wrapper
        if isinstance(part, ConfigMixin):
            # As enable_tiling() and enable_slicing() leave them.
            state = {key: each for key, each in vars(part).items() if key.startswith(("use_", "tile_"))}
            dtype = str(part.dtype).removeprefix("torch.") if isinstance(part, nn.Module) else None
            configs[name] = [type(part).__module__, type(part).__qualname__, dict(part.config), dtype, state]
    kept = {key: each for key, each in index.items() if not isinstance(each, list | tuple)}
    return json.dumps({"index": kept, "configs": configs, "module": module}, default=lambda each: None)


def on_meta(description: str, whole: bool = False) -> Any:
    """The pipeline without text encoders and tokenizers, and weights without bytes; ``whole``: with all blocks."""
    stated = json.loads(description)
    kind = _class_of(stated.get("module", "diffusers"), stated["index"]["_class_name"])
    parts: dict[str, Any] = {}
    for name, (module, named, config, dtype, state) in stated["configs"].items():
        with torch.device("meta" if dtype else "cpu"):
            parts[name] = part = _class_of(module, named).from_config(config, trust_remote_code=False)
        if dtype:
            nn.Module.to(part, getattr(torch, dtype)).eval()
            vars(part).update(state)
            # Thousands of operators on rows of pixels, in place, that take next to nothing.
            vars(part).update({blend: lambda before, tile, extent: tile for blend in _BLENDS if hasattr(part, blend)})
            if name.startswith(_BLOCKS) and not whole:
                _shorten(part)
    for needed in (("transformer", "unet"), ("vae",)):
        if parts.keys().isdisjoint(needed):
            raise ValueError(f"expected a {' or '.join(needed)} that is a model of diffusers, found none")
    names = [name for name in inspect.signature(kind.__init__).parameters if name != "self"]
    pipe = kind(**{name: parts.get(name, stated["index"].get(name)) for name in names})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _class_of(module: str, name: str) -> Any:
    """The class of that name, as a user may have derived it from one of diffusers."""
    found = getattr(import_module(module), name, None)
    if found is None:
        raise ValueError(f"expected {name} at the top of {module}, where it can be built anew, found none there")
    return found


def _shorten(model: nn.Module) -> None:
    """Leave two of equal blocks: they run one after another, and one takes as much as the next."""
    for blocks in model.modules():
        if isinstance(blocks, nn.ModuleList):
            kinds = {(type(block), *(p.shape for p in block.parameters())) for block in blocks}
            if len(kinds) == 1:
                del blocks[2:]


@cache
def count_call(pipeline: str, height: int | None, width: int | None, frames: int | None, tiling: bool) -> Call:
    """A call of the pipeline for one image or video.

    Raises:
        OptionError: it takes no such size, or does not run on ``meta``.
    """

    def prepare(pipe: Any, live: LiveBytes) -> FusedKernels:
        if tiling:
            pipe.vae.enable_tiling()
        live.run_once(pipe.vae.decoder)
        return FusedKernels()

    pipe, made, live = _call(pipeline, (height, width, frames), prepare)
    known = inspect.signature(type(pipe).__call__).parameters
    made_frames, (high, wide) = made.shape[1] if "num_frames" in known else 0, made.shape[-2:]
    step = next((step for key in _FRAME_STEPS if (step := getattr(pipe, key, None))), 1)
    return Call(live.peak_bytes, high, wide, made_frames, step)


@cache
def count_step(pipeline: str, height: int | None, width: int | None, frames: int | None) -> tuple[tuple[str, int], ...]:
    """Passes of a step of the pipeline: the component that runs, and its operations.

    Raises:
        OptionError: as :func:`count_call`.
    """
    counter, starts = FlopCounterMode(display=False), list[tuple[str, int]]()

    def prepare(pipe: Any, live: LiveBytes) -> FlopCounterMode:
        for name, part in pipe.components.items():
            if name.startswith(_STEP_MODELS) and part is not None:
                part.register_forward_pre_hook(lambda *_, name=name: starts.append((name, counter.get_total_flops())))
        return counter

    _call(pipeline, (height, width, frames), prepare, whole=True)
    ends = (*(begin for _, begin in starts[1:]), counter.get_total_flops())  # schedulers multiply no matrices
    return tuple((name, end - begin) for (name, begin), end in zip(starts, ends, strict=True))


def _call(pipeline: str, asked: tuple[Any, ...], prepare: Callable[[Any, LiveBytes], Any], whole: bool = False) -> Any:
    """The pipeline on ``meta``, what it makes in one step in the mode that ``prepare`` returns, and what that takes.

    ``whole``: with all blocks and no VAE.
    """
    name, live = json.loads(pipeline)["index"].get("_class_name"), LiveBytes()
    names, output = ("height", "width", "num_frames"), "latent" if whole else "pt"
    size = {key: each for key, each in zip(names, asked, strict=True) if each is not None}
    try:
        pipe = on_meta(pipeline, whole)
        mode, known = prepare(pipe, live), inspect.signature(type(pipe).__call__).parameters
        if missing := size.keys() - known.keys():
            raise ValueError(f"its call has no argument {', '.join(missing)}")
        with torch.no_grad(), live, mode:
            given = {key: each.to("meta") for key, each in prompt(pipe, known).items()}
            return pipe, pipe(**given, **size, num_inference_steps=1, output_type=output, return_dict=False)[0], live
    except Exception as error:  # of any type: the code of any pipeline, on tensors without data
        stated = ", ".join(f"{key} = {each}" for key, each in size.items()) or "its own size"
        raise OptionError(
            f"the call of {name} for {stated} cannot be counted: {type(error).__name__}: {error}; use a size that the "
            f"pipeline takes, or leave height, width and frames out (--height, --width, --frames)"
        ) from error


def prompt(pipe: Any, known: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Embeddings of a prompt of the greatest length, for each argument that takes some; of ones, on a CPU."""
    model = getattr(pipe, "transformer", None) or pipe.unet
    width = next((model.config[key] for key in _TEXT_WIDTHS if model.config.get(key)), 0)
    if (connectors := getattr(pipe, "connectors", None)) is not None:  # LTX-2: of all layers of its text encoder
        width = connectors.config.caption_channels * connectors.config.text_proj_in_factor
    length = known["max_sequence_length"].default if "max_sequence_length" in known else _TEXT_LENGTH
    made = {}
    for name in known:
        if name.endswith("pooled_prompt_embeds"):
            made[name] = torch.ones(1, model.config.pooled_projection_dim, dtype=model.dtype)
        elif name.endswith("prompt_embeds"):
            made[name] = torch.ones(1, length, width, dtype=model.dtype)
        elif name.endswith(("prompt_embeds_mask", "prompt_attention_mask")):
            made[name] = torch.ones(1, length, dtype=torch.int64)
    return made


# -- what is counted ---------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators make on ``meta`` and that are alive.

    Integers that come from a CPU keep their values (positions, masks), on which shapes depend. Other values that are
    asked for are 1.

    Attributes:
        peak_bytes: the most at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = self._live_bytes = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._values = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        is_on_meta = any(each.is_meta for each in tensors)
        is_moved = func is _aten._to_copy.default and not args[0].is_floating_point()
        value = self._value(func, args, kwargs) if is_on_meta or is_moved else None
        if is_on_meta and func is _aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype).item() if value is None else value
        if is_on_meta and func is _aten.nonzero.default:
            count = args[0].numel() if value is None else len(value)
            result: Any = args[0].new_empty((count, args[0].dim()), dtype=torch.int64)
        else:
            result = func(*args, **kwargs)
        if value is None and func._schema.is_mutable and tensors:
            self._values.pop(tensors[0], None)
        for made, known in zip_longest(tree_leaves(result), tree_leaves(value)):
            if isinstance(made, torch.Tensor) and made.is_meta:
                if not func.is_view:
                    self._add(made.untyped_storage())
                if known is not None and not known.is_floating_point():
                    self._values[made] = known
        if is_on_meta and func is _aten.convolution.default:
            self.peak_bytes = max(self.peak_bytes, self._live_bytes + args[0].nbytes + result.nbytes)
        return result

    def _value(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of ``func`` on a CPU; ``None``: values of its arguments are not known."""
        try:
            args, kwargs = tree_map(self._on_cpu, (args, kwargs))
        except KeyError:
            return None
        return func(*args, **kwargs)

    def _on_cpu(self, each: Any) -> Any:
        if isinstance(each, torch.Tensor) and each.is_meta:
            return self._values[each]
        return torch.device("cpu") if isinstance(each, torch.device) else each

    def run_once(self, module: nn.Module) -> None:
        """Have ``module`` run once for arguments of equal layouts: the next tile, or frames, take as much.

        Lists among the arguments are caches, in which the next calls leave what the first did.
        """
        run, seen = module.forward, {}

        def forward(*args: Any, **kwargs: Any) -> Any:
            caches = [each for each in (*args, *kwargs.values()) if isinstance(each, list)]
            key, before_bytes, peak_bytes = str(tree_map(_maker, (args, kwargs))), self._live_bytes, self.peak_bytes
            if key not in seen:
                self.peak_bytes = before_bytes
                result = run(*args, **kwargs)
                seen[key] = self.peak_bytes - before_bytes, tree_map(_maker, [result, *caches])
            else:
                result, *left = tree_map(_made, seen[key][1])
                for cache, values in zip(caches, left, strict=True):
                    cache[:] = values
            self.peak_bytes = max(peak_bytes, before_bytes + seen[key][0])
            return result

        module.forward = forward

    def _add(self, storage: Any) -> None:
        key, num_bytes = storage._cdata, -(-storage.nbytes() // _ALIGN_BYTES) * _ALIGN_BYTES
        if key in self._storages:
            return
        self._storages[key] = weakref.ref(storage, lambda _: self._drop(key, num_bytes))
        self._live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _drop(self, key: int, num_bytes: int) -> None:
        del self._storages[key]
        self._live_bytes -= num_bytes


def _maker(value: Any) -> Any:
    """Function that makes a tensor of the layout of ``value``; other values themselves."""
    if not isinstance(value, torch.Tensor):
        return value
    return partial(torch.empty_strided, value.shape, value.stride(), dtype=value.dtype, device="meta")


def _made(maker: Any) -> Any:
    return maker() if isinstance(maker, partial) else maker


class FusedKernels(TorchFunctionMode):
    """Functions that are one kernel on a GPU, with what it allocates."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func in (torch.rms_norm, functional.rms_norm):
            return torch.empty_like(args[0])
        return func(*args, **kwargs)


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **more: Any) -> torch.Tensor:
    """Rows in the order of memory in which flash and memory-efficient kernels return them."""
    beside = [query.new_empty(query.shape[:-1], dtype=torch.float32)]  # sums of rows, and the mask as a bias
    beside += [] if attn_mask is None else [torch.empty_like(attn_mask, dtype=query.dtype)]
    *batch, heads, rows, _ = query.shape
    made: torch.Tensor = query.new_empty(*batch, rows, heads, value.shape[-1])
    return made.transpose(-3, -2)
