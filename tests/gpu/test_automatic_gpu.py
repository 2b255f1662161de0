"""The promise: a budget of "auto" fits what is free on the GPU that is there, and outputs are the resident model's."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_models import build

import headrace
from commands import run, tiny_model
from headrace.memory.system import read_limits
from headrace.transfer import link_rates as links
from headrace.transfer.cards import find_card, rates_of_gpu
from headrace.transfer.link_rates import link_rates, with_measured_link

pytestmark = pytest.mark.alone
model = tiny_model

GPU = torch.device("cuda", 0)
GIB = 2**30


def leave(num_bytes: int) -> torch.Tensor:
    """Take all memory of the GPU but so much."""
    gc.collect()
    torch.cuda.empty_cache()
    free = read_limits(GPU).device_free_bytes
    assert free is not None
    return torch.empty(free - num_bytes, dtype=torch.uint8, device=GPU)


@torch.no_grad()
def test_of_a_full_gpu() -> None:
    resident = build(24)
    total = sum(p.numel() * p.element_size() for p in resident.parameters())
    ids = torch.randint(0, 1000, (2, 16), device=GPU)
    expected = resident(ids)
    model = build(24, device="cpu")
    model.load_state_dict(resident.state_dict())
    del resident
    block = leave(GIB + total // 2)
    with headrace.offload(model, "auto", device="cuda") as handle:
        assert handle.plan.device_bytes <= total // 2 + 4 * 2**20
        assert torch.equal(model(ids), expected)
        assert handle.stats().bytes_moved > 0
        del block  # remove() makes everything resident


@torch.no_grad()
def test_a_model_that_fits_stays(model: Path) -> None:
    block = leave(6 * GIB)
    plain = run("generate", model, "--prompt", "Water", "--max-new-tokens", 8)
    assert plain.exit_code == 0, plain.output
    assert "the weights fit, and nothing is offloaded" in plain.stderr
    assert " 0 B moved" in plain.stderr
    offloaded = run("generate", model, "--prompt", "Water", "--max-new-tokens", 8, "--device-memory", "2MiB")
    assert offloaded.exit_code == 0, offloaded.output
    assert " 0 B moved" not in offloaded.stderr
    assert offloaded.stdout == plain.stdout
    del block


def test_served_by_default(model: Path) -> None:
    for package in ("starlette", "uvicorn"):
        pytest.importorskip(package)
    dry = run("serve", model, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "auto: " in dry.stderr


def test_planned_by_default(model: Path) -> None:
    planned = run("plan", model, "--device-memory", "auto")
    assert planned.exit_code == 0, planned.output
    assert "nothing is offloaded" in " ".join(planned.stdout.split())


def test_the_card_and_its_link_are_found() -> None:
    name = torch.cuda.get_device_name(GPU)
    rates, size = rates_of_gpu(GPU.index), 64 * 2**20
    assert find_card(name) is not None, f"cards.json lacks {name}"
    assert rates.machine.startswith(f"{name} on PCIe ")
    measured = link_rates(GPU, sizes=(size,), seconds=0.5)[size]
    assert rates.copy_bytes_per_s(size) == pytest.approx(measured, rel=0.3)


def test_a_plan_measures_the_link() -> None:
    """In half a second, without memory that it keeps."""
    nominal, size = rates_of_gpu(GPU.index), 64 * 2**20
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(GPU)
    time.sleep(2)  # the engines that copy clear what a test before has freed, 130 GB of it: 20 of 54 GB/s meanwhile
    begin = time.perf_counter()
    links._links.clear()  # of other tests
    rates = with_measured_link(nominal, GPU)
    assert time.perf_counter() - begin < 0.6
    assert torch.cuda.memory_reserved(GPU) <= before
    measured = link_rates(GPU, sizes=(size,), seconds=0.5)[size]
    assert rates.copy_bytes_per_s(size) == pytest.approx(measured, rel=0.1)
    assert (
        rates.machine == f"{nominal.machine} but for the link, measured at {rates.copy_bytes_per_s(size) / 1e9:g} GB/s"
    )


def test_without_memory_the_link_stays_nominal() -> None:
    nominal = rates_of_gpu(GPU.index)
    block = leave(32 * 2**20)
    links._links.clear()  # of other tests
    rates = with_measured_link(nominal, GPU)
    del block
    torch.cuda.empty_cache()
    assert rates == replace(nominal, machine=rates.machine)
    assert "could not be measured: no memory for it" in rates.machine
