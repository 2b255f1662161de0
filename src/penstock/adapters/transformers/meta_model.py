"""A transformers model on ``meta``, from the config.json of a folder alone; no code of the folder is run."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.initialization import meta_device_safe_creation_ops
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from penstock.checkpoint.safetensors_header import Checkpoint
from penstock.errors import CheckpointError, OptionError, OptionTypeError

if TYPE_CHECKING:
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    ModelClass = type[PreTrainedModel] | type[_BaseAutoModelClass]

__all__ = ["build_meta_model"]

_MANY_LAYERS = 1000
# num_hidden_layers, n_layer, depth, ...: what configurations call a number of layers.
_DEPTHS = ("layers", "layer", "depth", "blocks")


def build_meta_model(
    path: str | os.PathLike[str], *, model_class: ModelClass | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The model of a folder on ``meta``, from its config.json alone: names, shapes, dtypes, ties, and no data.

    Where config.json states no dtype, that of the first floating-point tensor in the folder's files counts, if there
    are any; that is what ``from_pretrained`` does.

    Raises:
        CheckpointError: no folder, or no model in it that transformers can build.
        OptionError, OptionTypeError: a class or dtype that cannot be.
    """
    folder = _folder(path)
    raw = _read_config(folder)
    _refuse_quantised(folder, raw)
    _refuse_impossible_depth(folder, raw)
    if model_class is None or hasattr(model_class, "from_config"):
        _refuse_unknown(folder, raw)
    maker = model_class or _named_class(folder, raw) or AutoModel
    config = _make_config(folder, raw, maker)
    config.name_or_path = str(path)
    return _build(folder, maker, config, _choose_dtype(folder, config, dtype))


# -- the folder -------------------------------------------------------------------------------------------------------


def _folder(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise OptionTypeError(f"path: expected a str or path of a folder, found {type(path).__name__}")
    folder = Path(path)
    if not folder.is_dir():
        found = "a file" if folder.exists() else "no such folder"
        raise CheckpointError(
            f"{str(path)!r}: expected a folder with config.json and safetensors files, found {found}; penstock "
            f"downloads nothing: fetch the model first, e.g. `hf download NAME --local-dir FOLDER`"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: a folder that is no model: expected a config.json in it, found none; give the folder that "
            f"model.save_pretrained(FOLDER) or a download wrote"
        )
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder}: expected a whole model, found an adapter (adapter_config.json), which is not supported yet; "
            f"merge it into its base model and save that (peft: merge_and_unload(), save_pretrained)"
        )
    return folder


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or not JSON
        raise CheckpointError(f"{file}: expected a JSON object, found: {error}; download or copy it again") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(raw).__name__}; download it again")
    return raw


def _refuse_quantised(folder: Path, raw: dict[str, Any]) -> None:
    for part in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        quantised = part.get("quantization_config") or part.get("compression_config")
        if quantised:
            method = quantised.get("quant_method", "unnamed") if isinstance(quantised, dict) else "unnamed"
            raise CheckpointError(
                f"{folder}: expected plain weights, found quantised ones (quantization_config in config.json, method "
                f"{method!r}), which are not supported yet; use the model's unquantised checkpoint"
            )


def _refuse_impossible_depth(folder: Path, raw: dict[str, Any]) -> None:
    """transformers builds every layer that it is asked for, which takes minutes for 100,000 of them."""
    for part in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        for key, count in part.items():
            if not key.endswith(_DEPTHS) or not isinstance(count, int) or count <= _MANY_LAYERS:
                continue
            held = len(Checkpoint.open(folder).tensors) if any(folder.glob("*.safetensors")) else 0
            if count > held:
                raise CheckpointError(
                    f"{folder}/config.json: expected no more layers than its safetensors files have tensors ({held}), "
                    f"or {_MANY_LAYERS}, found {key} = {str(count)[:20]}; mend config.json, or download it again"
                )


def _refuse_unknown(folder: Path, raw: dict[str, Any]) -> None:
    kind = raw.get("model_type")
    if kind in CONFIG_MAPPING:
        return
    if raw.get("auto_map"):
        raise CheckpointError(
            f"{folder}: model_type {kind!r} is not part of transformers {transformers.__version__} and comes with code "
            f"of its own (auto_map in config.json), which penstock does not run; load it with "
            f"from_pretrained(..., trust_remote_code=True) and hand the model to penstock.offload"
        )
    nearest = ", ".join(difflib.get_close_matches(str(kind), CONFIG_MAPPING.keys())) or "none"
    raise CheckpointError(
        f"{folder}/config.json: expected a model_type that transformers {transformers.__version__} knows, found "
        f"{kind!r} (the nearest it knows: {nearest}); mend config.json, or install a transformers that knows it"
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


# -- the model on meta ------------------------------------------------------------------------------------------------


def _make_config(folder: Path, raw: dict[str, Any], maker: Any) -> PretrainedConfig:
    # A concrete class reads config.json with its own configuration class, which may be a part of a composite one.
    is_auto = hasattr(maker, "from_config")
    if not is_auto and not (isinstance(maker, type) and issubclass(maker, PreTrainedModel)):
        raise OptionTypeError(f"model_class: expected a transformers model class, found {maker!r}")
    reader = AutoConfig if is_auto or maker.config_class is None else maker.config_class
    try:
        config: PretrainedConfig = reader.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a configuration class makes of values it does not expect
        raise CheckpointError(
            f"{folder}/config.json: transformers {transformers.__version__} makes no {raw.get('model_type')} "
            f"configuration of it: {error}"
        ) from error
    return config


def _choose_dtype(folder: Path, config: PretrainedConfig, asked: torch.dtype | None) -> torch.dtype:
    if asked is not None:
        if not isinstance(asked, torch.dtype):
            raise OptionTypeError(f"dtype: expected a torch.dtype such as torch.bfloat16, found {asked!r}")
        if not asked.is_floating_point:
            raise OptionError(f"dtype {asked}: expected a floating-point dtype; leave it out for the checkpoint's own")
        return asked
    stated: torch.dtype | str | None = config.dtype
    if isinstance(stated, str):
        return getattr(torch, stated)  # type: ignore[no-any-return]
    if stated is not None:
        return stated
    return _first_float_dtype(folder) if any(folder.glob("*.safetensors")) else torch.get_default_dtype()


def _first_float_dtype(folder: Path) -> torch.dtype:
    checkpoint = Checkpoint.open(folder)
    first_file = [tensor for tensor in checkpoint.tensors.values() if tensor.path == checkpoint.files[0]]
    stored = [tensor.dtype for tensor in sorted(first_file, key=lambda tensor: tensor.name)]
    return next((t for t in stored if t.is_floating_point and t.itemsize > 1), torch.get_default_dtype())


def _build(folder: Path, maker: Any, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    make = getattr(maker, "from_config", None) or maker._from_config
    try:
        with torch.device("meta"), meta_device_safe_creation_ops():
            model: PreTrainedModel = make(config, dtype=dtype)
        if any(tensor.device.type != "meta" for tensor in (*model.parameters(), *model.buffers())):
            # Some classes create a tensor in a way that ignores the device asked for (`torch.Tensor(size)`).
            nn.Module.to(model, torch.device("meta"))
            model.tie_weights(recompute_mapping=False)
    except ImportError:
        raise  # a package the architecture needs; its message says which
    except Exception as error:  # whatever a model class makes of a configuration it does not expect
        raise CheckpointError(
            f"{folder}: {maker.__name__} cannot be built from its config.json: {error}; mend the file, or pass "
            f"another model_class"
        ) from error
    return model
