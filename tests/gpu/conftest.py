"""Marks every test in this folder `gpu`, skips it with the reason where there is no CUDA device, and plants faults."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from faulty_readers import Faults
from headrace.transfer import ring_readers
from headrace.transfer.ring_streams import RingLink


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # pytest hands a folder's conftest the items of the whole run.
    here = Path(__file__).parent
    own = [item for item in items if item.path.is_relative_to(here)]
    has_cuda = torch.cuda.is_available()
    for item in own:
        item.add_marker(pytest.mark.gpu)
        if not has_cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Of the disk, as the readers of every offload that begins from now on see it."""
    monkeypatch.setattr(ring_readers, "PROGRAM", "faulty_readers")
    return Faults(tmp_path / "faults", monkeypatch.setenv)


@pytest.fixture(params=["small ring", "whole ring"])
def ring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three entries of 64 KiB, so that every unit goes around several times; or the ring as it is."""
    if request.param == "small ring":
        link = partial(RingLink, entry_bytes=1 << 16, max_entries=3)
        monkeypatch.setattr("headrace.transfer.ring_streams.RingLink", link)
