"""Small versions of configs: the same structure with fewer layers and narrower matrices, found by names and values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

MAX_LAYERS = 4
VOCAB = 512
MAX_POSITIONS = 512
SMALL_IMAGE = 64

_HIDDEN = (
    "hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "embedding_size", "encoder_hidden_size",
    "projection_dim", "n_embed", "emb_dim",
)  # fmt: skip
_HEADS = (
    "num_attention_heads", "n_head", "num_cross_attention_heads", "encoder_attention_heads", "num_heads", "n_heads",
    "attention_heads", "decoder_attention_heads", "encoder_num_attention_heads",
)  # fmt: skip
_IS_HEADS = re.compile(r"(^|_)n?u?m?_?(attn_|attention_|self_attn_|kv_)?heads?$|_heads$|^n_head$|heads_list|head_kv")
_IS_LAYERS = re.compile(
    r"(^|_)(num_)?(n_)?(hidden_|conv_|attention_|encoder_|decoder_|transformer_)?(layers?|blocks|depths?|n_layer)$"
    r"|num_.*_layers$|num_.*_blocks$|_depth$|layers_num$"
)
_IS_EXPERTS = re.compile(r"(num|n)_.*experts$|^num_experts$|moe_num_experts$|^num_local_experts$")
_IS_TOP = re.compile(r"top_?k$|experts_per_tok|per_token$|topk_group|moe_k$|num_selected")
_IS_TOKEN = re.compile(r"(_token|_id|_index|_idx|_tokens?_ids?)$|token_id|_token_index")
_IS_VOCAB = re.compile(r"vocab_size|^codebook_size$|audio_vocab|num_embeddings$|^n_token|vocabulary")
_IS_INDICES = re.compile(r"indices|indexes|_layers_to|feature_layer|hooks|out_layers|index$|layer_ids")
_LEAVE = re.compile(
    r"head_dim|dim_head|patch|stride|kernel|channels?_in|num_channels|in_chans|in_channels|sampling|sample_rate|window|"
    r"length|_bins|n_fft|hop|frames|chunk|context|labels|bucket|seed|theta|position|seq|upsampl|downsampl|"
    r"ratio|num_mel|n_mels|frequency|fps|max_|min_|mrope|dilation|group|num_quer|num_latents|resolution|hash|"
    r"temperature|padding|axes|d_kv|d_state|state_size|conv_pos|second|lag|prediction|input_dim|"
    r"char|expand|time_per|norm_num|pretraining_tp|budget|block_size|grid|threshold|start|num_codebooks|queries"
)
_IS_IMAGE_SIZE = re.compile(r"(^|_)(image_size|img_size|input_size|image_resolution)$")
_IGNORED = frozenset({"id2label", "label2id", "transformers_version", "architectures", "torch_dtype", "dtype"})
_LIST_LIMIT = 64


@dataclass(frozen=True)
class Way:
    """How small a config becomes.

    Attributes:
        hidden: the width that the main part shall have.
        small_images: images of a few patches instead of the config's own.
        one_factor: all parts are divided by one number, which keeps equal what is equal across parts.
        multiple: widths are multiples of it, for norms over groups of channels.
    """

    hidden: int = 256
    small_images: bool = True
    one_factor: bool = True
    multiple: int = 4
    max_layers: int = MAX_LAYERS


WAYS = (
    Way(),
    Way(small_images=False),
    Way(one_factor=False, multiple=32),
    Way(one_factor=False, small_images=False),
    Way(hidden=512, small_images=False, multiple=32),
)


def shrink(config: PreTrainedConfig, way: Way) -> dict[str, Any]:
    """The arguments that make a small config of the class of ``config``."""
    parts = _parts(config)
    main = next((parts[n] for n in ("text_config", "decoder", "language_config") if n in parts), config)
    factor = _factor(main, way.hidden)
    if factor is None:
        factor = _factor(config, way.hidden) or 1.0
    changed = _shrink_part(config, way, factor, ids=_Ids())
    _fit_parts(config, changed)
    return changed


def _fit_parts(config: PreTrainedConfig, changed: dict[str, Any]) -> None:
    """A vision tower that says the width of its output says that of the text model; not all defaults do."""
    parts = _parts(config)
    if not {"vision_config", "text_config"} <= parts.keys():
        return
    width = changed["text_config"].get("hidden_size", read(parts["text_config"], "hidden_size"))
    for name in ("out_hidden_size", "text_hidden_size", "output_hidden_size"):
        if _is_int(read(parts["vision_config"], name)) and _is_int(width):
            changed["vision_config"][name] = width
    if parts["vision_config"].model_type == "qwen2_vl_vision":
        changed["vision_config"]["hidden_size"] = width


def _parts(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    return {name: value for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}


def _factor(config: PreTrainedConfig, target: int) -> float | None:
    """What widths of ``config`` are divided by, so that heads stay whole and keep their size; None without a width."""
    for value in vars(config).values():
        if isinstance(value, list | tuple) and _is_heads_list(config, value):
            least = min(value)
            return float(least) if all(v % least == 0 for v in value) else 1.0
    hidden = next((v for n in _HIDDEN if isinstance(v := read(config, n, None), int)), None)
    heads = next((v for n in _HEADS if isinstance(v := read(config, n, None), int)), None)
    if hidden is None:
        return None
    if heads is None or heads < 2 or hidden % heads:
        return max(1.0, float(2 ** round_down_log2(hidden / target)))
    fewer = max(1 if heads * 64 < target else 2, round(target / (hidden / heads)))
    return max(1.0, heads / fewer)


def _is_heads_list(config: PreTrainedConfig, value: Any) -> bool:
    return any(
        other is value and re.search("head", name) and value and all(isinstance(v, int) for v in value)
        for name, other in vars(config).items()
    )


def round_down_log2(number: float) -> int:
    """The largest n >= 0 with 2**n <= ``number``."""
    count = 0
    while number >= 2:
        number, count = number / 2, count + 1
    return count


class _Ids:
    """Hands out token ids of a small vocabulary, from its end."""

    def __init__(self) -> None:
        self._next = VOCAB - 2
        self._known: dict[int, int] = {}

    def map(self, value: int) -> int:
        if value < 16:
            return value
        if value not in self._known:
            self._known[value] = self._next
            self._next -= 1
        return self._known[value]


def _shrink_part(config: PreTrainedConfig, way: Way, factor: float, ids: _Ids) -> dict[str, Any]:
    kept = _kept_layers(config, way.max_layers)
    changed: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name in ("_out_features", "_out_indices"):
            name = name[1:]
        if name.startswith("_") or name in _IGNORED or value is None or isinstance(value, bool | str):
            continue
        if isinstance(value, PreTrainedConfig) and value.model_type == "timm_backbone":
            changed[name] = _resnet_for(value)  # timm is not installed
            continue
        if isinstance(value, PreTrainedConfig):
            own = None if way.one_factor else _factor(value, way.hidden)
            part = _shrink_part(value, way, own or factor, ids)
            changed[name] = {**_plain(value, kept), **part}
            continue
        new = _new_value(name, value, config, way, factor, ids, kept)
        if new is not None and new != value:
            changed[name] = new
    if isinstance(layers := config.to_diff_dict().get("per_layer_config"), dict):
        own = {int(index): values for index, values in layers.items()}
        changed["per_layer_config"] = {place: own[old] for place, old in enumerate(kept[1]) if old in own}
    _fit_heads(config, changed)
    return changed


def _resnet_for(timm: PreTrainedConfig) -> dict[str, Any]:
    indices = [min(index, 4) for index in getattr(timm, "out_indices", None) or [4]]
    sizes = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 256], "depths": [1, 1, 1, 1]}
    return {"model_type": "resnet", **sizes, "out_features": [f"stage{index}" for index in dict.fromkeys(indices)]}


def _plain(config: PreTrainedConfig, kept: Any) -> dict[str, Any]:
    """What the config says beside what follows from other values."""
    said = config.to_diff_dict()
    return {
        name: value
        for name, value in said.items()
        if name not in _IGNORED and not (isinstance(value, list) and len(value) > MAX_LAYERS) and value is not None
    } | {"model_type": config.model_type}


def _kept_layers(config: PreTrainedConfig, max_layers: int) -> tuple[int, list[int]]:
    """How many layers there are, and which of them stay: of each kind the first, then from the front."""
    count = next((v for n in ("num_hidden_layers", "n_layer", "num_layers") if _is_int(v := read(config, n, 0))), 0)
    kinds = [v for v in vars(config).values() if isinstance(v, list | tuple) and len(v) == count and count > 1]
    kept: list[int] = []
    for values in kinds:
        if all(isinstance(v, str | bool) for v in values):
            kept += [values.index(kind) for kind in dict.fromkeys(values)]
    kept = sorted(set(kept))
    for index in range(count):
        if len(kept) < min(max_layers, count) and index not in kept:
            kept.append(index)
    return count, sorted(kept)


def read(config: PreTrainedConfig, name: str, default: Any = None) -> Any:
    """An attribute, or the default where there is none, or another one for every layer."""
    try:
        return getattr(config, name, default)
    except Exception:
        return default


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _new_value(
    name: str, value: Any, config: PreTrainedConfig, way: Way, factor: float, ids: _Ids, kept: tuple[int, list[int]]
) -> Any:
    if isinstance(value, list | tuple):
        return _new_list(name, value, way, factor, ids, kept)
    if not isinstance(value, int):
        return None
    if _IS_VOCAB.search(name):
        return min(value, VOCAB)
    if _IS_TOKEN.search(name):
        return ids.map(value) if value >= 16 else None
    if _IS_LAYERS.search(name) and "feat_extract" not in name and 1 < value < 200:
        return len(kept[1]) if value == kept[0] else min(value, way.max_layers)
    if _IS_EXPERTS.search(name):
        return min(value, 8)
    if _IS_TOP.search(name):
        return min(value, 2)
    if name in ("n_group", "num_expert_group"):
        return min(value, 2)
    if name in ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", "n_shared_experts"):
        return min(value, 1)
    if _IS_HEADS.search(name):
        return _fewer(value, factor)
    if name in ("n_positions", "n_ctx") or (
        name == "max_position_embeddings" and not hasattr(config, "rope_parameters")
    ):
        return min(value, MAX_POSITIONS + 2)
    if _IS_IMAGE_SIZE.search(name):
        return _image_size(config, value) if way.small_images else None
    if name != "upsample_groups" and (_LEAVE.search(name) or value < 64):
        return None
    return _narrow(value, factor, way.multiple)


def _new_list(name: str, value: Any, way: Way, factor: float, ids: _Ids, kept: tuple[int, list[int]]) -> Any:
    if not value or (len(value) > _LIST_LIMIT and len(value) != kept[0]):
        return None
    if len(value) == kept[0] and kept[0] > way.max_layers:
        chosen = [value[index] for index in kept[1]]
        return _new_list(name, chosen, way, factor, ids, (0, [])) or chosen
    if _IS_IMAGE_SIZE.search(name) and way.small_images and all(_is_int(v) for v in value):
        return type(value)(min(v, SMALL_IMAGE) for v in value)
    if all(isinstance(v, str) and re.fullmatch(r"stage\d+", v) for v in value):
        numbers = _indices([int(v[5:]) for v in value], way.max_layers + 1)
        return numbers and [f"stage{number}" for number in numbers]
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return None
    if name == "out_indices":
        return _indices(list(value), way.max_layers + 1)
    if _IS_INDICES.search(name):
        return _indices(list(value), way.max_layers)
    if _IS_TOKEN.search(name):
        return type(value)(ids.map(v) for v in value)
    if re.search("depth|layers|blocks", name):
        return type(value)(min(v, 2) for v in value)
    if "head" in name and "head_dim" not in name:
        return type(value)(_fewer(v, factor) for v in value)
    if _LEAVE.search(name) or max(value) < 64:
        return None
    return type(value)(_narrow(v, factor, way.multiple) if v >= 16 else v for v in value)


def _indices(value: list[int], count: int) -> list[int] | None:
    """As many of the last of ``count`` layers, unless all are among them."""
    if max(value) < count:
        return None
    last = count - 1
    return [max(0, last - (len(value) - 1 - place)) for place in range(len(value))]


def _fewer(heads: int, factor: float) -> int:
    return max(1, int(heads / factor + 1e-6))


def _narrow(value: int, factor: float, multiple: int) -> int:
    exact = value / factor
    if exact == int(exact) and exact >= 8 and int(exact) % multiple == 0:
        return int(exact)
    step = max(16, multiple)
    return max(step, step * round(exact / step))


def _image_size(config: PreTrainedConfig, size: int) -> int:
    patch = read(config, "patch_size", None)
    if isinstance(patch, list | tuple):
        patch = patch[-1]
    if not _is_int(patch) or patch < 8:
        return min(size, SMALL_IMAGE)
    return min(size, patch * 4)


def _fit_heads(config: PreTrainedConfig, changed: dict[str, Any]) -> None:
    """Heads that divide the new width, where the head's size follows from it, and key-value heads that divide heads."""

    def value_of(name: str) -> Any:
        return changed.get(name, read(config, name))

    hidden = next((v for n in _HIDDEN if _is_int(v := value_of(n))), None)
    for name in list(vars(config)):
        heads = value_of(name)
        if not (_IS_HEADS.search(name) and _is_int(heads)) or hidden is None:
            continue
        if re.search("key_value|kv", name):
            full = next((v for n in _HEADS if _is_int(v := value_of(n))), heads)
            while full % heads:
                heads -= 1
        elif not value_of("head_dim"):
            while heads > 1 and (hidden % heads or hidden // heads % 2):
                heads -= 1
        if heads != read(config, name):
            changed[name] = heads
    heads = next((v for n in _HEADS if _is_int(v := value_of(n))), None)
    if hidden and heads and "head_dim" in vars(config) and not value_of("head_dim"):
        changed["head_dim"] = hidden // heads
    if heads and "num_key_value_heads" in vars(config) and not value_of("num_key_value_heads"):
        changed["num_key_value_heads"] = heads
