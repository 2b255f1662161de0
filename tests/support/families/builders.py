"""From the name of a family to a tiny model with random weights and inputs that it runs on."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

from headrace.plan.units import TINY_BYTES

from .inputs import Inputs, candidates, mended
from .shrink import WAYS, Way, shrink
from .table import TABLE, Entry

MAX_PARAMETERS = 60_000_000
_MIN_MOVABLE = 0.6  # of the bytes, in storages that a budget moves; with less 40 % cannot be reached
_HEADS_FIRST = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES", "MODEL_FOR_CTC_MAPPING_NAMES",
)  # fmt: skip


class CannotBuildError(Exception):
    """No class, config and inputs were found that run."""


@dataclass
class Case:
    """A model and what it is called with.

    Attributes:
        calls: name of a method and its keyword arguments, one after the other in every forward.
        from_pretrained: reads the saved model back; None where the library cannot.
        loads: whether the transformers adapter reads its folder.
    """

    family: str
    model: nn.Module
    calls: list[tuple[str, Inputs]]
    from_pretrained: Callable[[str], nn.Module] | None = None
    loads: bool = True
    notes: dict[str, Any] = field(default_factory=dict)


def families() -> dict[str, list[str]]:
    """The folders of transformers' models, each with its model types, the one that stands for all first."""
    found: dict[str, list[str]] = {}
    known = {name for mapping in _mappings() for name in mapping}
    for model_type in configuration_auto.CONFIG_MAPPING_NAMES:
        if model_type in known:
            found.setdefault(configuration_auto.model_type_to_module_name(model_type), []).append(model_type)
    for folder, types in found.items():
        types.sort(key=lambda t, f=folder: (t.replace("-", "_") != f, len(t)))
    return found


def _mappings() -> list[dict[str, Any]]:
    names = [name for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES") and name != "CONFIG_MAPPING_NAMES"]
    names.sort(
        key=lambda n: _HEADS_FIRST.index(n) if n in _HEADS_FIRST else len(_HEADS_FIRST) + (n != "MODEL_MAPPING_NAMES")
    )
    return [getattr(modeling_auto, name) for name in names]


def _classes(model_type: str) -> list[type[nn.Module]]:
    """The classes for a config, those with a language head first, then the base model, then other heads."""
    names: list[str] = []
    for mapping in _mappings():
        given = mapping.get(model_type, ())
        names += [given] if isinstance(given, str) else list(given)
    return [c for name in dict.fromkeys(names) if (c := getattr(transformers, name, None)) is not None][:4]


def build(family: str) -> Case:
    """The case of a family of transformers, found by its entry in the table and the general rules.

    Raises:
        CannotBuildError: nothing runs; says why for each attempt.
    """
    entry = TABLE.get(family, Entry())
    if entry.why_not:
        raise CannotBuildError(entry.why_not)
    failures: list[str] = []
    spare: Case | None = None
    for model_type, way, model_class in _attempts(family, entry):
        label = f"{model_class.__name__} {WAYS.index(way)}"
        try:
            with quiet():
                case = _attempt(family, model_type, model_class, way, entry)
        except Exception as error:
            failures.append(f"{label}: {type(error).__name__}: {_first_line(error)}")
            continue
        case.notes["size"] = WAYS.index(way)
        if case.notes["movable"] >= _MIN_MOVABLE:
            return case
        if spare is None or case.notes["movable"] > spare.notes["movable"]:
            spare = case
        failures.append(f"{label}: only {case.notes['movable']:.2f} of the bytes in storages that a budget moves")
    if spare is not None:
        return spare
    raise CannotBuildError(" | ".join(dict.fromkeys(failures)) or "no class")


def _attempts(family: str, entry: Entry) -> Iterator[tuple[str, Way, type[nn.Module]]]:
    ways = WAYS if entry.way is None else (WAYS[entry.way],)
    for model_type in [entry.model_type] if entry.model_type else families()[family][:3]:
        classes = [class_named(entry.model_class)] if entry.model_class else _classes(model_type)
        for model_class in classes[:2]:
            for way in ways:
                yield model_type, way, model_class


def class_named(name: str) -> Any:
    """``BertModel``, or a class that transformers does not export: ``models.x.modeling_x:Name``."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        return getattr(importlib.import_module(f"transformers.{module}"), attribute)
    return getattr(transformers, name)


def _attempt(family: str, model_type: str, model_class: Any, way: Way, entry: Entry) -> Case:
    config = small_config(model_type, model_class, way, entry)
    model = new_model(model_class, config)
    inputs, leaves = find_inputs(model, entry)
    if not leaves:
        raise CannotBuildError("no tensors come out")
    notes = {
        "class": model_class.__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "inputs": {name: list(value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor)},
        "movable": movable(model),
    }
    return Case(family, model, [("forward", inputs)], model_class.from_pretrained, notes=notes)


def small_config(model_type: str, model_class: Any, way: Way, entry: Entry) -> PreTrainedConfig:
    """A small config of ``model_type``, or of the class that ``model_class`` wants."""
    if entry.config is not None:
        return entry.config()
    config_class = configuration_auto.CONFIG_MAPPING[model_type]
    changed = shrink(config_class(), way)
    for path, value in entry.changes.items():
        place = changed
        *outer, last = path.split(".")
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = value
    return config_class(**{name: value for name, value in changed.items() if value is not DROP})


DROP = "families:drop"


def new_model(model_class: Any, config: PreTrainedConfig, seed: int = 3) -> nn.Module:
    """A random model in evaluation mode of which no two tensors are equal, norms, biases and statistics included."""
    _refuse_large(model_class, config)
    torch.manual_seed(seed)
    make = getattr(model_class, "_from_config", model_class)
    model: nn.Module = make(copy.deepcopy(config)).eval()
    if (dtype := next((p.dtype for p in model.parameters() if p.is_floating_point()), None)) != torch.float32:
        model = model.float() if dtype is not None else model
    scramble(model, seed)
    return model


def scramble(model: nn.Module, seed: int) -> None:
    """Add noise to every parameter and to statistics of batches, so that a tensor that is wrong shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.03)
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0  # as in checkpoints that were trained; ChineseCLIP zeroes it anew
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(torch.rand(buffer.shape, generator=generator) * 0.1)


def _refuse_large(model_class: Any, config: PreTrainedConfig) -> None:
    try:
        with torch.device("meta"):
            model = model_class(copy.deepcopy(config))
    except Exception:
        return  # not every class can be made without data; then its size shows when it is made
    count = sum(p.numel() for p in model.parameters())
    if count > MAX_PARAMETERS:
        raise CannotBuildError(f"{count / 1e6:.0f} million parameters")


def movable(model: nn.Module) -> float:
    """The share of the bytes that lies in storages which a budget moves."""
    sizes = [p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values()]
    return sum(size for size in sizes if size >= TINY_BYTES) / max(1, sum(sizes))


def find_inputs(model: nn.Module, entry: Entry) -> tuple[Inputs, int]:
    """The first inputs that the model runs on, and how many tensors come out."""
    failures: list[str] = []
    options = iter([entry.inputs(model.config)]) if entry.inputs is not None else candidates(model)
    for inputs in options:
        todo = [{**inputs, **entry.more}]
        tries = 4
        while todo and (tries := tries - 1) >= 0:
            given = todo.pop(0)
            try:
                return given, _run_once(model, given)
            except Exception as error:
                failures.append(f"{'+'.join(given)}: {type(error).__name__}: {_first_line(error)}")
                todo = todo or mended(model.config, given, error)
    raise CannotBuildError("; ".join(dict.fromkeys(failures)) or "no inputs known")


def _run_once(model: nn.Module, inputs: Inputs) -> int:
    from .ways import forward, leaves_of

    leaves = leaves_of(forward(model, [("forward", inputs)]))
    broken = [name for name, leaf in leaves.items() if leaf.is_floating_point() and leaf.numel() and leaf.isnan().all()]
    if broken:
        raise CannotBuildError(f"{broken[0]} is NaN throughout")
    return len(leaves)


def hush() -> None:
    """No progress bars and log lines of transformers from now on."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings, progress bars and log lines of the libraries."""
    hush()
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return " ".join(text.split())[:300]
