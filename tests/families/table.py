"""What the general rules get wrong, family by family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """How a family is built where the general rules do not do it.

    Attributes:
        model_class: name of the class.
        model_type: of the config; default the family's first.
        way: the only one of ``shrink.WAYS`` to try, because it is known to work.
        changes: arguments of the config by dotted path, in addition to those that are found.
        config: makes the whole config.
        inputs: makes the inputs from the config.
        more: inputs in addition to those that are found.
        why_not: why there is no case.
    """

    model_class: str = ""
    model_type: str = ""
    way: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    config: Callable[[], Any] | None = None
    inputs: Callable[[Any], dict[str, Any]] | None = None
    more: dict[str, Any] = field(default_factory=dict)
    why_not: str = ""


TABLE: dict[str, Entry] = {}
