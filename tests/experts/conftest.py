"""What all tests of experts share."""

from __future__ import annotations

import pytest

from headrace.experts import ordered
from headrace.experts.ordered import Launch


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs one program after another, each 50 ms: with a GPU's launches a test takes minutes."""
    monkeypatch.setattr(ordered, "LAUNCHES", dict.fromkeys(ordered.LAUNCHES, (Launch(256, 1, 1), Launch(128, 1, 1))))
