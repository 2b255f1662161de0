"""Marks every test in this folder `gpu` and skips it, with the reason, where there is no CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # pytest hands a folder's conftest the items of the whole run.
    here = Path(__file__).parent
    own = [item for item in items if item.path.is_relative_to(here)]
    has_cuda = torch.cuda.is_available()
    for item in own:
        item.add_marker(pytest.mark.gpu)
        if not has_cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))
