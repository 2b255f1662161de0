"""What is known of other libraries' modules and tensors, where nothing in their structure says it."""

from __future__ import annotations

__all__ = ["without_lora"]


def without_lora(name: str) -> str:
    """The name of a tensor before LoRA wrapped its module in one that has it as a child ``base_layer``."""
    return name.replace(".base_layer.", ".")
