"""The promise: a GPU's limits are the ones that hold, and a plan made for one is carried out on one like it alone."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_models import build

import headrace
from headrace import Budget, Plan, Prefetch
from headrace.errors import LimitError, OptionError
from headrace.memory.system import Limits, read_limits
from headrace.planning import context as planning_context
from headrace.planning.request import describe_device

pytestmark = pytest.mark.alone

GPU = torch.device("cuda", 0)
MIB = 2**20


def test_free_device_memory_counts_what_the_allocator_would_give_back() -> None:
    gc.collect()  # what earlier tests left in cycles is not to go while this one looks
    before = read_limits(GPU).device_free_bytes
    assert before is not None
    block = torch.empty(256 * MIB, dtype=torch.uint8, device=GPU)
    held = read_limits(GPU).device_free_bytes
    del block
    after = read_limits(GPU).device_free_bytes
    assert held is not None
    assert after is not None
    assert abs(before - held - 256 * MIB) <= 4 * MIB
    assert abs(after - before) <= 4 * MIB


@torch.no_grad()
def test_too_large_for_the_device_is_refused_with_a_budget_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = build(8).cpu()
    model = build(8).cpu()
    model.load_state_dict(resident.state_dict())
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    devices = {p.device for p in model.parameters()}
    monkeypatch.setattr(
        planning_context, "read_limits", lambda device, pinned_bytes=0: Limits(device_free_bytes=total // 2)
    )
    gc.collect()  # what earlier tests left in cycles is not to go while this one looks
    allocated = torch.cuda.memory_allocated()
    message = r"of device memory, .* A smaller budget should fit, about --device-memory"
    with pytest.raises(LimitError, match=message) as caught:
        headrace.offload(model, Budget(int(total * 0.9)), device="cuda")
    assert torch.cuda.memory_allocated() == allocated
    assert {p.device for p in model.parameters()} == devices
    budget = caught.value.budget_bytes
    assert budget is not None
    ids = torch.arange(8, device="cuda")
    with headrace.offload(model, budget, device="cuda") as handle:
        assert handle.plan.device_bytes <= total // 2
        assert torch.equal(model(ids), resident.to("cuda")(ids))


@torch.no_grad()
def test_a_saved_plan_is_for_this_gpu(tmp_path: Path) -> None:
    model, ids = build(4), torch.arange(8, device="cuda")
    expected = model(ids)
    with headrace.offload(model, Prefetch(1, 1, 2)) as handle:
        assert handle.plan.made_for == describe_device(GPU)
        handle.plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    with headrace.offload(model, plan) as handle:
        assert torch.equal(model(ids), expected)
        assert handle.stats().bytes_moved > 0
    assert plan.made_for is not None
    larger = replace(plan, made_for=replace(plan.made_for, device_bytes=(plan.made_for.device_bytes or 0) + MIB))
    for other in (larger, replace(plan, made_for=replace(plan.made_for, device="NVIDIA A100"))):
        with pytest.raises(OptionError, match=f"another machine: for {other.made_for}, and this is {plan.made_for}"):
            headrace.offload(model, other)
    with pytest.raises(OptionError, match=f"another machine: for {plan.made_for}, and this is cpu"):
        headrace.offload(model.cpu(), plan)


UNPRIVILEGED = """
import os, resource, torch, warnings
from headrace.memory.system import read_limits
from headrace.memory.system import memlock_bytes
from headrace.memory.pinned import pinned_region
torch.empty(1, device="cuda")
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
assert memlock_bytes() == 65536
limit = read_limits(torch.device("cuda", 0), pinned_bytes=1 << 28).memlock_bytes
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    region = pinned_region(1 << 28)
assert (limit is None) == (not said), (limit, [str(entry.message) for entry in said])
"""


@pytest.mark.skipif(os.getuid() != 0, reason="gives up privileges, so it needs some")
def test_rlimit_memlock_counts_if_the_driver_keeps_to_it() -> None:
    """Drivers known to us pin as much as an unprivileged user likes; what this one does is asked and not assumed."""
    done = subprocess.run([sys.executable, "-c", UNPRIVILEGED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
