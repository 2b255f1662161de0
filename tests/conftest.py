"""What every test gets: no environment variable of penstock's from outside, few threads, the same random numbers."""

from __future__ import annotations

import os

import pytest
import torch

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _clean_slate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PENSTOCK_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PENSTOCK_READERS", "2")
    torch.manual_seed(0)
