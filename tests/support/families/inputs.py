"""Example inputs for a model, from the names of what its forward takes and the numbers in its config."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .shrink import read

BATCH, LENGTH = 2, 12
_MISMATCH = re.compile(r"tokens:? ?(\d+).*?features:? ?\D{0,12}(\d+)", re.S)

Inputs = dict[str, Any]


def value_of(config: PreTrainedConfig, *names: str, default: Any = None) -> Any:
    """The first value under one of ``names`` in the config or, after it, in its parts."""
    for name in names:
        for part in parts_of(config):
            value = read(part, name)
            if value is not None and not isinstance(value, PreTrainedConfig | dict):
                return value
    return default


def parts_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The config and all that are nested in it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from parts_of(value)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator())


def _ids(config: PreTrainedConfig, length: int = LENGTH) -> torch.Tensor:
    text = next(
        (getattr(config, n) for n in ("text_config", "decoder") if _is_config(getattr(config, n, None))), config
    )
    limit = min(value_of(text, "vocab_size", default=100), 400)
    return torch.randint(min(20, limit // 2), limit, (BATCH, length), generator=_generator())


def _is_config(value: Any) -> bool:
    return isinstance(value, PreTrainedConfig)


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        return size.get("height", 64), size.get("width", 64)
    return (size[-2], size[-1]) if isinstance(size, list | tuple) and len(size) > 1 else (int(size), int(size))


def _images(config: PreTrainedConfig) -> list[Any]:
    names = ("image_size", "img_size", "input_size", "image_resolution", "resolution")
    vision = next((p for p in parts_of(config) if "vision" in p.model_type or "vit" in p.model_type), config)
    found = value_of(vision, *names) or value_of(config, *names)
    channels = value_of(vision, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if isinstance(channels, int) else 3
    height, width = _pair(found) if found else (64, 64)
    frames = value_of(config, "num_frames", default=2)
    still, moving = _floats(BATCH, channels, height, width), _floats(1, frames, channels, height, width)
    larger = _floats(BATCH, channels, 224, 224)
    return [still, moving, larger, _floats(BATCH, 1, channels, height, width)]


def _features(config: PreTrainedConfig) -> list[Any]:
    mel = value_of(
        config, "num_mel_bins", "input_feat_per_channel", "feature_size", "num_mel_filters", "mel_bins", default=80
    )
    size = value_of(config, "feature_projection_input_dim", "input_dim", "input_feat_size", default=mel)
    size, mel = (v if isinstance(v, int) else 80 for v in (size, mel))
    longest = 2 * min(value_of(config, "max_source_positions", default=50), 1500)
    return [
        _floats(BATCH, mel, longest),
        _floats(BATCH, 64, size),
        _floats(BATCH, mel, 128),
        _floats(BATCH, 1, 64, mel),
    ]


def _waves(config: PreTrainedConfig) -> list[Any]:
    wave = torch.sin(torch.arange(8000.0) / 7) * 0.3 + _floats(BATCH, 8000) * 0.1
    mel = value_of(config, "num_mel_bins", default=80)
    frames = value_of(config, "max_length", default=64)
    return [wave, wave[:, None], _floats(BATCH, frames if isinstance(frames, int) else 64, mel)]


def _boxes(config: PreTrainedConfig) -> list[Any]:
    corners = torch.randint(0, 60, (BATCH, LENGTH, 2), generator=_generator())
    return [torch.cat([corners, corners + 9], -1), torch.rand(BATCH, LENGTH, 8, generator=_generator())]


MAKERS: dict[str, Callable[[PreTrainedConfig], list[Any]]] = {
    "input_ids": lambda c: [_ids(c)],
    "decoder_input_ids": lambda c: [_ids(c, 7)],
    "attention_mask": lambda c: [torch.ones(BATCH, LENGTH, dtype=torch.long)],
    "pixel_values": _images,
    "pixel_values_videos": lambda c: _images(c)[1:2],
    "input_features": _features,
    "input_values": _waves,
    "bbox": _boxes,
    "audio_values": _waves,
    "audio_features": _features,
    "inputs_embeds": lambda c: [_floats(BATCH, LENGTH, value_of(c, "hidden_size", "d_model", default=64))],
    "hidden_states": lambda c: [_floats(BATCH, LENGTH, value_of(c, "hidden_size", "d_model", default=64))],
    "spectrogram": lambda c: [_floats(BATCH, 20, value_of(c, "model_in_dim", "num_mel_bins", default=80))],
    "input_points": lambda c: [torch.tensor([[[[9.0, 13.0]]]] * BATCH)],
    "past_values": lambda c: [
        _floats(BATCH, value_of(c, "context_length", default=32), value_of(c, "num_input_channels", default=1))
    ],
    "flattened_patches": lambda c: [
        torch.cat(
            [torch.ones(BATCH, 16, 2), _floats(BATCH, 16, value_of(c, "patch_embed_hidden_size", default=768))], 2
        )
    ],
    "states": lambda c: [_floats(BATCH, 5, value_of(c, "state_dim", default=17))],
}


def candidates(model: nn.Module, limit: int = 24) -> Iterator[Inputs]:
    """Inputs to try, those that run most of the model first."""
    given = inspect.signature(model.forward).parameters
    config: Any = model.config
    main = getattr(model, "main_input_name", "input_ids")
    needed = [n for n, p in given.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    first = [main] if main in given else []
    with_decoder = ["decoder_input_ids"] if "decoder_input_ids" in given else []
    every = [
        n for n in ("input_ids", "pixel_values", "input_features", "input_values", "audio_values", "bbox") if n in given
    ]
    least = list(dict.fromkeys([*needed, *first]))
    if "flattened_patches" in least or "input_ids" not in given:
        every = [n for n in every if n != "bbox"]
    wanted = [
        [*least, *every, *with_decoder], [*least, *with_decoder], least,
        [*least, "attention_mask"] if "attention_mask" in given else least, every[:1],
    ]  # fmt: skip
    count, seen = 0, set()
    for names in wanted:
        names = tuple(dict.fromkeys(names))
        if names in seen or not names or any(n not in MAKERS for n in names):
            continue
        seen.add(names)
        for values in itertools.product(*(MAKERS[n](config) for n in names)):
            if (count := count + 1) > limit:
                return
            yield dict(zip(names, values, strict=True))


def with_image_tokens(config: PreTrainedConfig, inputs: Inputs, num_tokens: int, kind: str = "image") -> Inputs:
    """The same inputs with ``num_tokens`` placeholders in all among the text."""
    place = value_of(config, f"{kind}_token_id", f"{kind}_token_index", f"{kind}_token")
    if not isinstance(place, int) or "input_ids" not in inputs:
        return inputs
    ids = _ids(config)
    each = math.ceil(num_tokens / len(ids))
    holders = torch.full((len(ids), each), place)
    return {**inputs, "input_ids": torch.cat([ids[:, :2], holders, ids[:, 2:]], 1)}


def mended(config: PreTrainedConfig, inputs: Inputs, error: Exception) -> list[Inputs]:
    """Inputs with as many placeholders as the error says there are features, if it says that.

    Some errors count features and some the numbers in them.
    """
    found = _MISMATCH.search(str(error))
    if found is None or "feature" not in str(error):
        return []
    text = next((p for n in ("text_config", "language_config") if _is_config(p := read(config, n))), config)
    features, hidden = int(found[2]), value_of(text, "hidden_size", default=1)
    kind = "audio" if "udio" in str(error) else "video" if "ideo" in str(error) else "image"
    counts = [features // hidden] if features % hidden == 0 else []
    return [with_image_tokens(config, inputs, count, kind) for count in (*counts, features)]
