"""Rows of one static cache: sequences that decode together, each at its own position.

A prompt runs eagerly into the row of its sequence, in chunks. A step runs one token of every row. On a GPU it is a CUDA
graph, which is captured from the eager step where its number of rows (1, 2, 4, 8, ...) or the part of the cache that it
reads (256, 512, 1,024, ... tokens) is first reached: a step costs what its text costs, not what the cache has room for.

Layers of linear attention (recurrences, convolutions) keep a state per row, which a step updates in place. The state is
that of all tokens so far: it takes no padding, and there is none of a prompt's beginning that another could share.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer, StaticLayer

from headrace.api import session_of
from headrace.errors import OptionError, warn_user
from headrace.experts.rows import IS_CHECKED, setting
from headrace.graphs.decoding import CACHE_NAME, GRAPH_DEVICES, LENGTH_STEP, CapturedSteps, bucket
from headrace.memory.system import round_up
from headrace.stats import timed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)
_ALIGNMENT = 8  # tokens; kernels of attention with a mask read so many at once
_MASKED_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "hybrid"}
_UNMASKED_KINDS = {"linear_attention", "conv", "moe", "mlp"}
# Of a cache, by name: transformers 5.17 has no DummyLayer.
_LAYERS = {
    "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer",
    "DummyLayer",
}  # fmt: skip
_ROPES_OF_ALL_ROWS = ("dynamic", "longrope")  # whose frequencies the longest sequence of a forward sets


def why_not_in_rows(model: PreTrainedModel, num_tokens: int = 0, *, guesses: bool = False) -> str | None:
    """Why sequences of ``num_tokens`` of ``model``, or with ``guesses``, cannot share a cache; ``None``: they can."""
    config: Any = model.config.get_text_config(decoder=True)
    taken = inspect.signature(type(model).forward).parameters
    if lacking := [name for name in ("position_ids", CACHE_NAME) if name not in taken]:
        return f"{type(model).__name__}.forward takes no {lacking[0]}, and rows have their own"
    if any(hasattr(each, "create_position_ids_from_input_ids") for each in model.modules()):
        return f"{type(model).__name__} counts positions from padding, and rows have their own"
    if reason := _why_not_masked(model, config):
        return f"{config.model_type} has {reason}, and rows share full, sliding, chunked and linear attention"
    if guesses and _has_states(config):
        return "it cannot remove guesses from its states; leave --speculate out"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"attention {config._attn_implementation!r} takes no mask of rows, as sdpa and eager do"
    for rope in (of_all := getattr(config, "rope_parameters", None) or {}, *of_all.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in _ROPES_OF_ALL_ROWS:
            limit = min(config.max_position_embeddings, rope.get("original_max_position_embeddings") or num_tokens)
            if num_tokens > limit:
                return (
                    f"beyond {limit} tokens its {rope['rope_type']} positions depend on the longest of all rows; use a "
                    f"context of {limit} or less"
                )
    return None


def _why_not_masked(model: PreTrainedModel, config: Any) -> str | None:
    """Part of a model, other than a mask of rows, that decides which tokens attend to which."""
    if model.config.is_encoder_decoder:
        return "an encoder"
    # Configs of BERT's kind alone have the first; GPT-NeoX's says that it is no decoder, and it is one.
    is_encoder = hasattr(config, "add_cross_attention") and getattr(config, "is_decoder", True) is False
    if is_encoder or getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return "bidirectional attention"
    if getattr(config, "alibi", False):
        return "ALiBi, which it computes from another mask"
    if not hasattr(config, "num_hidden_layers"):
        return "layers of several stacks"
    own = [name for name, each in model.named_buffers() if each.dtype == torch.bool and each.ndim == 4]
    layers = {type(layer).__name__ for layer in DynamicCache(config=config).layers} - _LAYERS
    if (model._is_stateful or _has_states(config)) and "update_conv_state" not in _code_of(model):
        return "states outside of its cache"
    kinds = set(getattr(config, "layer_types", None) or ()) - _MASKED_KINDS - _UNMASKED_KINDS
    found = sorted(layers | kinds)
    return ", ".join(found) or (f"a mask of its own ({own[0]})" if own else None)


def _has_states(config: Any) -> bool:
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers)


def _code_of(model: PreTrainedModel) -> str:
    """Python code of the layers of ``model``: nothing else says how they use their states."""
    names = {type(module).__module__ for module in model.modules()}
    return "".join(inspect.getsource(sys.modules[name]) for name in names if name.startswith("transformers.models."))


@dataclass
class _Reach:
    """Part of every layer that a forward writes and reads: tokens of some rows, or one of each of the first rows.

    Attributes:
        first: first row of prompts; ``None``: a step.
        start: tokens of those rows so far.
        num_rows: rows of a step.
        indices, slots: [rows, 1] and [rows, tokens] of a step, the rows and the positions that each writes.
        num_tokens: the part of each row that is read.
    """

    first: int | None = None
    start: int = 0
    num_rows: int = 0
    indices: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    num_tokens: int = 0


class _RowsLayer(LinearAttentionLayer, StaticLayer):  # type: ignore[misc, no-untyped-call, override]
    """Keys and values of one layer, [rows, heads, tokens, head size], and its states, [rows + 1, ...], if it has any.

    The last state is that of the prompt that runs: a step of more rows than sequences changes those behind them.
    """

    keys: Any
    values: Any

    def __init__(self, num_rows: int, num_tokens: int, num_states: int, reach: _Reach) -> None:
        StaticLayer.__init__(self, num_tokens)
        LinearAttentionLayer.__init__(self, num_states)
        self._num_rows, self._reach = num_rows, reach
        self._states: list[tuple[dict[int, Any], int, torch.Tensor]] = []  # where the model finds which rows of what

    def _make(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self._num_rows, like.shape[1], self.max_cache_len, like.shape[3])

    def lazy_initialization(self, *args: Any, state_idx: int = 0, **like: Any) -> None:
        """Make states like those of the first prompt."""
        LinearAttentionLayer.lazy_initialization(self, state_idx=state_idx, **like)
        found: dict[int, Any] = self.conv_states if "conv_states" in like else self.recurrent_states
        made = found[state_idx].new_zeros(self._num_rows + 1, *found[state_idx].shape[1:])
        found[state_idx] = made[-1:]
        self._states.append((found, state_idx, made))

    def begin(self) -> None:
        """Let the model find the states of the rows of the next forward."""
        reach, is_step = self._reach, self._reach.first is None
        for found, at, states in self._states:
            found[at] = states[: reach.num_rows] if is_step else states[-1:]
        self.has_previous_state = dict.fromkeys(self.has_previous_state, is_step or reach.start > 0)

    def parts(self, num_tokens: int) -> Iterator[torch.Tensor]:
        """Tensors of rows, [rows, ...]: the first tokens, and states."""
        if self.is_initialized:
            yield from (self.keys[:, :, :num_tokens], self.values[:, :, :num_tokens])
        yield from (states for _, _, states in self._states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.keys, self.values = self._make(key_states), self._make(value_states)
            self.is_initialized = True
        reach = self._reach
        num_rows, end = key_states.shape[0], reach.num_tokens
        mine = slice(0, num_rows) if reach.first is None else slice(reach.first, reach.first + num_rows)
        for ours, new in ((self.keys, key_states), (self.values, value_states)):
            if reach.first is None:
                ours[reach.indices, :, reach.slots] = new.transpose(1, 2)
            else:
                ours[mine, :, reach.start : end] = new
        return self.keys[mine, :, :end], self.values[mine, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._reach.num_tokens, 0

    def get_seq_length(self) -> int:
        return self._reach.start


class Rows:
    """The cache, and the forwards that fill and read it. Belongs to one thread.

    Attributes:
        num_rows: sequences that decode together.
        num_tokens: tokens of the longest sequence, prompt and answer.
        has_states: some layers keep a state of all tokens: prompts run one by one, and rows share no beginnings.
        continues: a prompt may run in parts, each from the state after the one before.
        guesser: guesses tokens of the first row, for :meth:`verify`; ``None``: nothing does.
    """

    def __init__(self, model: PreTrainedModel, num_rows: int, num_tokens: int) -> None:
        """``model``: offloaded or resident.

        Raises:
            OptionError: its sequences cannot share a cache of rows.
        """
        session = session_of(model)
        attached = [] if session is None else session.attachments
        self.guesser: Any = next((each for each in attached if each.counts is not None), None)
        if reason := why_not_in_rows(model, num_tokens, guesses=self.guesser is not None):
            raise OptionError(f"{type(model).__name__} cannot decode in rows: {reason}")
        self._model: Any = model
        self.num_rows, self.num_tokens = num_rows, num_tokens
        # The last position of a row is written by a step that has more rows than sequences, and read by none.
        length, self._reach = round_up(num_tokens + 1, _ALIGNMENT), _Reach()
        self._length = length
        config: Any = model.config.get_text_config(decoder=True)
        self._config, layers = config, DynamicCache(config=config).layers
        self.has_states, self.continues = _has_states(config), True
        if self.has_states and "update_recurrent_state" in (code := _code_of(model)):  # many scans begin with zeros
            self.continues = re.search(r"initial_states?=recurrent_state", code) is not None
        self._num_states = [getattr(layer, "number_of_states", 1) for layer in layers]
        self._make_cache()
        self._indices = torch.arange(num_rows, device=model.device)
        self._takes_number = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        on_gpu = model.device.type in GRAPH_DEVICES
        self._graphs = CapturedSteps(model, session) if on_gpu else None
        self._is_first = True

    def _make_cache(self) -> None:
        self._layers = [_RowsLayer(self.num_rows, self._length, num, self._reach) for num in self._num_states]
        self._cache = Cache(layers=self._layers)  # type: ignore[arg-type]

    @property
    def replays(self) -> int:
        """Steps that were replayed so far."""
        return 0 if self._graphs is None else self._graphs.replays

    def check(self) -> None:
        """Raise ``StateError`` where what the last step gave, which has ended, is not to be used."""
        if self._graphs is not None:
            self._graphs.check()

    def release(self) -> None:
        """Free the graphs; the next steps make new ones."""
        if self._graphs is not None:
            self._graphs.drop()

    def clear(self) -> None:
        """Free the graphs and the memory of all rows; the next prompts take new memory."""
        self.release()
        self._make_cache()

    @torch.no_grad()
    def prompts(
        self, first: int, tokens: Sequence[Sequence[int]], start: int = 0, wants_all: bool = False
    ) -> torch.Tensor:
        """Run tokens of the sequences in rows ``first``, ..., of which each has ``start`` before them.

        With states, of one sequence, whose parts follow one another.

        Returns:
            float32 logits of the last token of each, [sequences, vocabulary]; with ``wants_all``, for one sequence,
            those of all its tokens.
        """
        device, longest = self._model.device, max(map(len, tokens))
        # What fills a row behind a shorter prompt is written over, token by token, before it is read.
        ids = torch.tensor([[*each, *[each[-1]] * (longest - len(each))] for each in tokens]).to(device)
        positions = torch.arange(start, start + longest, device=device)[None].expand_as(ids)
        reach = self._reach
        reach.first, reach.start, reach.num_tokens = first, start, start + longest
        ends = torch.tensor([len(each) - 1 for each in tokens], device=device)
        options = {"logits_to_keep": ends} if self._takes_number and not wants_all else {}
        with timed(_log, f"first prompt of {list(ids.shape)} tokens", device) if self._is_first else nullcontext():
            output = self._run_model(input_ids=ids, position_ids=positions, **options)
        self._is_first = False
        if self.has_states:
            self.move(-1, first, 0)
        if wants_all:
            return output.logits[0].float()  # type: ignore[no-any-return]
        at = self._indices[: len(tokens)]
        return output.logits[at, at if options else ends].float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Run one token of each of the first rows, given with its position; float32 logits, [rows, vocabulary]."""
        return self._step([[each] for each in ids], positions)[:, 0]

    @torch.no_grad()
    def verify(self, ids: Sequence[int], position: int) -> torch.Tensor:
        """Run tokens of the first row, from ``position`` on; float32 logits of each, [tokens, vocabulary].

        Those behind the last right one are written over before they are read.
        """
        return self._step([ids], [position])[0]

    def _step(self, ids: Sequence[Sequence[int]], starts: Sequence[int]) -> torch.Tensor:
        num, count, device = len(ids), len(ids[0]), self._model.device
        num_rows = bucket(num, 1, self.num_rows)
        num_tokens = bucket(max(starts) + count, min(LENGTH_STEP, self._length), self._length)
        positions = [[*range(start, start + count)] for start in starts]
        more, unread = [[0] * count] * (num_rows - num), [[self._length - 1] * count] * (num_rows - num)
        sent = torch.tensor([[*ids, *more], [*positions, *more], [*positions, *unread]]).to(device, non_blocking=True)
        inputs = {"ids": sent[0], "positions": sent[1], "slots": sent[2]}
        call: Callable[..., torch.Tensor] = lambda **given: self._forward(num_tokens, **given)  # noqa: E731
        if (graphs := self._graphs) is None or graphs.eager_because is not None:
            return call(**inputs)[:num]
        logits: torch.Tensor = graphs.run((num_rows, count, num_tokens), call, inputs)
        if graphs.eager_because is not None:
            warn_user(f"steps run eagerly, without CUDA graphs: {graphs.eager_because}")
        return logits[:num]

    def _forward(
        self, num_tokens: int, *, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        reach, (num_rows, count) = self._reach, ids.shape
        reach.first, reach.start, reach.num_tokens = None, num_tokens - count, num_tokens
        reach.num_rows, reach.indices, reach.slots = num_rows, self._indices[:num_rows, None], slots
        masks = {kind: self._mask(kind, slots, num_tokens) for kind in self._kinds}
        output = self._run_model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=masks if hasattr(self._config, "layer_types") else next(iter(masks.values())),
            **({"logits_to_keep": count} if self._takes_number else {}),
        )
        return output.logits.float()  # type: ignore[no-any-return]

    def _run_model(self, **inputs: Any) -> Any:
        for layer in self._layers:
            layer.begin()
        with setting(IS_CHECKED, True) if self._graphs is not None else nullcontext():
            return self._model(**inputs, **{CACHE_NAME: self._cache}, use_cache=True)

    @property
    def _kinds(self) -> set[str]:
        """Kinds of attention, by the rule of ``transformers.masking_utils.create_masks_for_generate``."""
        config = self._config
        if hasattr(config, "layer_types"):
            kinds = set(config.layer_types)
            return kinds | {"full_attention", *_UNMASKED_KINDS} if "hybrid" in kinds else kinds
        if getattr(config, "sliding_window", None) is not None:
            return {"sliding_attention"}
        return {"chunked_attention" if getattr(config, "attention_chunk_size", None) is not None else "full_attention"}

    def _mask(self, kind: str, slots: torch.Tensor, num_tokens: int) -> torch.Tensor | None:
        """[rows, 1, tokens, tokens]: what each token reads; added to the scores of transformers' own attention."""
        if kind in _UNMASKED_KINDS:
            return None
        at, row = torch.arange(num_tokens, device=slots.device), slots[:, :, None]
        seen = at <= row
        if kind == "sliding_attention":
            seen = seen & (at > row - self._config.sliding_window)
        if kind == "chunked_attention":
            chunk = self._config.attention_chunk_size
            seen = seen & (at // chunk == row // chunk)
        mask = seen[:, None]
        if self._config._attn_implementation == "sdpa":
            return mask
        dtype = self._model.dtype
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)

    def move(self, row: int, to: int, num_tokens: int) -> None:
        """Copy the first tokens of ``row`` to another one, and its states."""
        for part in self._parts(num_tokens):
            part[to] = part[row]

    def swap(self, row: int, other: int, num_tokens: int) -> None:
        """Exchange the first tokens of two rows, and their states."""
        for part in self._parts(num_tokens):
            part[[row, other]] = part[[other, row]]

    def _parts(self, num_tokens: int) -> Iterator[torch.Tensor]:
        return (part for layer in self._layers for part in layer.parts(num_tokens))
