"""Finds the folder of a model by its path or name; errors for other folders and files say what to do with them.

A path, a name of the Hugging Face Hub that the local cache holds, or the cache's own folder of a name. Nothing is
downloaded here, and torch is not imported: a mistyped path is answered at once.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from headrace.errors import CheckpointError, OptionError, OptionTypeError
from headrace.formatting import listed
from headrace.json_files import read_file

_REPOSITORY = "models--"  # of the cache's folder for ORGANISATION/NAME: models--ORGANISATION--NAME
# ORGANISATION/NAME, or NAME alone as in "gpt2" (https://huggingface.co/docs/hub/repositories-getting-started).
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# Others load models, or ask whether to run code. By name, since a class whose packages are missing has another base.
_TOKENIZER = re.compile(r"(?!Auto|Rag)\w+(Tokenizer|Backend)")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# Formats that names on the Hub tell, and headrace's loader does not read.
_OTHER_FORMATS = {
    "GGUF, a format of llama.cpp": r".*[-_.]gguf",
    "MLX, a format for Apple's GPUs": r"mlx-community/.*|.*[-_]mlx([-_].*)?",
    "EXL, a format of ExLlama": r".*[-_]exl[23]([-_].*)?",
    "a format of NVIDIA's Model Optimizer (modelopt)": r"nvidia/.*-(nvfp4|fp4|fp8)([-_].*)?",
}
_WANTED = "expected a folder with config.json and safetensors files"


class NotFetchedError(CheckpointError):
    """The Hub's local cache lacks a model of that name."""


def model_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of the model that ``path`` names.

    Args:
        path: a folder with config.json, or that file (``~``: the home folder); or a name of the Hub, such as
            ``"Qwen/Qwen3-8B"``, that is in the local cache (``HF_HUB_CACHE``, ``HF_HOME``); or the cache's folder of
            one (``models--Qwen--Qwen3-8B``). A folder comes before a name of the Hub.

    Raises:
        CheckpointError: no such folder or name, or what is there cannot be loaded: an adapter, a pipeline, GGUF or
            pickled weights; with what to do instead.
        OptionError, OptionTypeError: there is no home folder; no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise OptionTypeError(f"path: expected a str or path of a folder, found {type(path).__name__}")
    try:
        folder = Path(path).expanduser()
    except (RuntimeError, ValueError) as error:  # ValueError: a name that no path can have
        raise OptionError(
            f"MODEL {os.fspath(path)!r}: user {os.geteuid()} has no home folder for ~ to stand for ({error}); write "
            f"the whole path"
        ) from error
    if folder.name == "config.json" and folder.is_file():
        folder = folder.parent
    if not folder.is_dir():
        folder = _in_hub_cache(os.fspath(path)) if not folder.exists() else _beside(folder)
    elif folder.name.startswith(_REPOSITORY) and not (folder / "config.json").is_file():
        folder = _snapshot(folder)
    _require_model(folder)
    return folder


def model_to_plan(path: str | os.PathLike[str]) -> Path | str:
    """:func:`model_folder`, or else the name of a model that is known without any file, which is enough to plan it.

    Such a name may lack its organisation, and its case does not matter. A folder may also be that of a pipeline of
    diffusers.
    """
    if (Path(path) / "model_index.json").is_file():
        return Path(path)
    known = None if Path(path).exists() else _known_name(os.fspath(path))
    if known is None:
        return model_folder(path)
    with suppress(CheckpointError):  # not in the cache
        return model_folder(path)
    return known


def name_on_hub(path: str) -> str | None:
    """The name on the Hub that ``path`` may stand for; ``None`` for a path, and for an unknown name alone."""
    name = _known_name(path) or path
    return name if "/" in name and _HUB_NAME.fullmatch(name) and not Path(path).exists() else None


def _known_name(name: str) -> str | None:
    from headrace.checkpoint.metadata_cache import known_models

    wanted = name.lower()
    return next((known for known in known_models() if wanted in (known.lower(), known.lower().split("/")[-1])), None)


def draft_folder(name: str) -> Path:
    """:func:`model_folder` of the draft model that ``--speculate`` names."""
    try:
        return model_folder(name)
    except CheckpointError as error:
        raise CheckpointError(f"--speculate: neither lookup, mtp nor a draft model: {error}") from error


def draft_to_plan(name: str) -> Path | str:
    """:func:`model_to_plan` of the draft model that ``--speculate`` names."""
    with suppress(CheckpointError):
        return model_to_plan(name)
    return draft_folder(name)  # with the error about a draft


def model_name(folder: Path | str) -> str:
    """The name of the model in ``folder``: that on the Hub if it is in the cache, else that of the folder."""
    if isinstance(folder, str):  # known by name
        return folder
    repository = folder.absolute().parent.parent.name
    if folder.absolute().parent.name == "snapshots" and repository.startswith(_REPOSITORY):
        return _hub_name(repository)
    return folder.absolute().name


def is_quantised(folder: Path) -> bool:
    """Whether config.json speaks of quantised weights, in whatever part of it."""
    with suppress(OSError):
        return b'"quantization_config"' in (folder / "config.json").read_bytes()
    return False  # reading it raises the error


def indexed_bytes(folder: Path) -> int | None:
    """Bytes of all tensors by the index of the files, which need not be there; ``None`` without one."""
    metadata = _stated(folder / "model.safetensors.index.json", "metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return int(total) if isinstance(total, int | float) else None


def _hub_name(repository: str) -> str:
    return repository.removeprefix(_REPOSITORY).replace("--", "/")


def open_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model's folder.

    Raises:
        CheckpointError: there is none that transformers can read.
    """
    import transformers

    try:
        files = [folder / "tokenizer_config.json", folder / "config.json"]
        names = [str(_stated(file, "tokenizer_class")).removesuffix("Fast") for file in files]
        if other := [name for name in names if hasattr(transformers, name) and not _TOKENIZER.fullmatch(name)]:
            raise ValueError(f"tokenizer_class is {other[0]!r}")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes one if its files are missing
            raise ValueError("no token of text")
        tokenizer("?")  # reads what making it does not
    except Exception as error:  # classes raise errors of any type for values that they do not expect
        raise CheckpointError(
            f"{folder}: expected a tokenizer that transformers can read (tokenizer.json), found none: {error}; mend it"
        ) from error
    return tokenizer


# -- the local cache of the Hub ----------------------------------------------------------------------------------------


def _in_hub_cache(name: str) -> Path:
    """The snapshot of ``name`` in the cache; CheckpointError with what is there instead."""
    from headrace.checkpoint.metadata_cache import known_models

    advice = "fetch the model first, e.g. `hf download ORGANISATION/NAME`"
    if _HUB_NAME.fullmatch(name) is None:
        raise CheckpointError(f"{name!r}: {_WANTED}, found no such folder; {advice}")
    try:
        from huggingface_hub.constants import HF_HUB_CACHE  # 0.05 s; functions of the library take 0.3 s to import
    except ImportError as error:
        raise CheckpointError(f"{name!r}: {_WANTED}, found no such folder; {advice}") from error
    cache, known = Path(HF_HUB_CACHE), _known_name(name)
    for each in filter(None, (name, known)):
        if (repository := cache / (_REPOSITORY + each.replace("/", "--"))).is_dir():
            return _snapshot(repository)
    if found := next((text for text, form in _OTHER_FORMATS.items() if re.fullmatch(form, name.lower())), None):
        bases = accumulate(name.split("/")[-1].split("-"), "{}-{}".format)
        base = next(filter(None, map(_known_name, reversed([*bases]))), None)
        raise CheckpointError(
            f"{name!r}: {found}, which headrace does not load; take the model's own safetensors release"
            f"{f', {base},' if base else ''} or one in fp8, MXFP4, AWQ, GPTQ or bitsandbytes"
        )
    cached = _cached_names(cache)
    likely = difflib.get_close_matches(name, cached) or cached[:3]
    held = f"which has {', '.join(likely)}" if likely else "which has no models"
    full = known or (name if "/" in name else f"ORGANISATION/{name}")
    near = ", ".join(difflib.get_close_matches(name, known_models()))
    without = f"`headrace plan {known}` needs no file" if known else f"known without files: {near}" if near else ""
    raise NotFetchedError(
        f"{name!r}: {_WANTED}, or a name in the Hub's local cache, found no such folder, nor the name in {cache}, "
        f"{held}; fetch the model first, e.g. `hf download {full}`; to plan it, its config is enough: "
        f'`hf download {full} --include "*.json"`{without and f" ({without})"}'
    )


def _cached_names(cache: Path) -> list[str]:
    return sorted(_hub_name(entry.name) for entry in cache.glob(f"{_REPOSITORY}*"))


def _snapshot(repository: Path) -> Path:
    """The revision ``main`` of a model in the cache, as the cache's own library finds it."""
    from huggingface_hub import snapshot_download

    name = _hub_name(repository.name)
    try:
        return Path(snapshot_download(name, cache_dir=repository.parent, local_files_only=True))
    except Exception as error:  # classes differ by release: not found, not a valid name
        others = sorted(str(entry) for entry in repository.glob("snapshots/*"))
        found = f"other revisions ({', '.join(others)}): give the folder of one, or" if others else "no revision:"
        raise NotFetchedError(
            f"{repository}: expected the revision main of {name} in the Hub's local cache, found {found} fetch it with "
            f"`hf download {name}`"
        ) from error


# -- other folders and files -------------------------------------------------------------------------------------------


def _beside(file: Path) -> Path:
    """Raise for a path that is no folder, with the folder or the format that it belongs to."""
    if file.suffix == ".gguf":
        raise CheckpointError(_gguf(file.parent, [file.name]))
    fix = f"give the folder that it is in, {str(file.parent)!r}"
    raise CheckpointError(f"{str(file)!r}: {_WANTED}, found a file; {fix}")


def _require_model(folder: Path) -> None:
    """Raise CheckpointError unless ``folder`` holds a config.json and no weights of another format alone."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(
            f"{folder}: expected a folder that user {os.geteuid()} can read, found {error.strerror}; check its "
            f"permissions (`chmod u+rX` as the owner)"
        ) from error
    has_config = (folder / "config.json").is_file()
    if "model_index.json" in names:
        raise CheckpointError(
            f"{folder}: expected one model, found a diffusers pipeline (model_index.json), which is several; load all "
            f'of them in one budget: headrace.adapters.diffusers.load({str(folder)!r}, "12GiB")'
        )
    if "adapter_config.json" in names:
        raise CheckpointError(_adapter(folder))
    if any(name.endswith(".safetensors") for name in names):
        if has_config:
            return
    elif gguf := [name for name in names if name.endswith(".gguf")]:
        raise CheckpointError(_gguf(folder, gguf))
    elif pickles := [name for name in names if name.endswith(_PICKLES)]:
        raise CheckpointError(
            f"{folder}: {_WANTED}, found pickled weights alone ({listed(pickles)}), which have no headers to plan from "
            f"and may run code; if you trust them, write safetensors once: "
            f"{_class_of(folder)}.from_pretrained({str(folder)!r}).save_pretrained(FOLDER)"
        )
    if not has_config:
        raise CheckpointError(_no_config(folder, names))


def _no_config(folder: Path, names: Sequence[str]) -> str:
    """The error for a folder without a config.json: where the model may be instead."""
    start = f"{folder}: a folder that is no model: expected a config.json in it, found"
    for place in (folder, folder / "hub"):
        if known := _cached_names(place):
            return f"{start} a cache of the Hub; give the name of a model in it: {listed(known)}"
    models = [name for name in names if (folder / name / "config.json").is_file()]
    if models:
        return f"{start} none, but one in {listed(models)}; give, for example, {str(folder / models[0])!r}"
    return f"{start} none; give the folder that model.save_pretrained(FOLDER) or a download wrote"


def _adapter(folder: Path) -> str:
    base = _stated(folder / "adapter_config.json", "base_model_name_or_path")
    return (
        f"{folder}: expected a whole model, found an adapter{f' of {base}' if base else ''} (adapter_config.json); "
        f"load both with peft, model = AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}), then offload it, "
        f'headrace.offload(model, "8GiB"), or write a whole model once: '
        f"model.merge_and_unload().save_pretrained(FOLDER)"
    )


def _gguf(folder: Path, files: Sequence[str]) -> str:
    return (
        f"{folder}: {_WANTED}, found GGUF ({listed(files)}), a format of llama.cpp; use the model's safetensors "
        f"release, or convert it once: AutoModelForCausalLM.from_pretrained({str(folder)!r}, gguf_file={files[0]!r})"
        f".save_pretrained(FOLDER)"
    )


def _class_of(folder: Path) -> object:
    named = _stated(folder / "config.json", "architectures")
    return named[0] if isinstance(named, list) and named else "AutoModelForCausalLM"


def _stated(file: Path, key: str) -> object:
    """The value of ``key`` in a JSON file, for advice; ``None`` if it cannot be read."""
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        return json.loads(read_file(file, 1 << 30)).get(key)
    return None
