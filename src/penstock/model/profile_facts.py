"""What the planner has to know of a model beyond names and sizes."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import OptionError

__all__ = ["ModelProfile"]


@dataclass(frozen=True)
class ModelProfile:
    """Facts that an adapter reads from a model's configuration; the defaults claim nothing.

    Attributes:
        experts_per_token: how many experts of a mixture-of-experts layer one row is routed to (``top_k``); ``None``
            means that every row uses all of every tensor.
        kv_bytes_per_token: bytes one token of one sequence takes in the caches of all layers together.
        kv_window_bytes_per_token: the same for the layers that keep no more than ``window`` tokens; comes on top.
        window: tokens that those layers keep.
        state_bytes_per_sequence: bytes per sequence that do not grow with the context (recurrent states, convolutions).
        activation_bytes_per_row: peak of live intermediate tensors of a step per row, logits included.
        attention_bytes_per_token: peak of what the attention of one layer makes anew in a step per token of the context
            of every sequence (a cache that grows by copying, latents that are expanded).
        max_context: the longest context the model was made for, in tokens; ``None`` if it states none.
    """

    experts_per_token: int | None = None
    kv_bytes_per_token: int = 0
    kv_window_bytes_per_token: int = 0
    window: int = 0
    state_bytes_per_sequence: int = 0
    activation_bytes_per_row: int = 0
    attention_bytes_per_token: int = 0
    max_context: int | None = None

    def check_context(self, context: int) -> None:
        """Raise OptionError if ``context`` is longer than what the model was made for."""
        if self.max_context is not None and context > self.max_context:
            raise OptionError(
                f"a context of {context} tokens is longer than the {self.max_context} that the model was made for "
                f"(max_position_embeddings in its configuration); use --context {self.max_context} or less"
            )

    def cache_bytes(self, batch: int, context: int) -> int:
        """Bytes of the caches of ``batch`` sequences of ``context`` tokens each."""
        per_sequence = (
            context * self.kv_bytes_per_token
            + min(context, self.window) * self.kv_window_bytes_per_token
            + self.state_bytes_per_sequence
        )
        return batch * per_sequence

    def workload_bytes(self, batch: int, context: int) -> int:
        """Device memory beside the weights: caches, and activations of a step of ``batch`` rows; 0 without context."""
        if context == 0:
            return 0
        anew = self.activation_bytes_per_row + context * self.attention_bytes_per_token
        return self.cache_bytes(batch, context) + batch * anew
