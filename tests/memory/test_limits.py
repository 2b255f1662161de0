"""The promise: a plan that does not fit this machine is refused before anything is allocated, by a message that names
the limit, by how much it is exceeded, and a budget that should fit (contract 3)."""

from __future__ import annotations

import os
import re
import resource
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headrace
from headrace import Budget, Plan, Prefetch, PrefetchOffloader
from headrace.errors import HeadraceWarning, LimitError, OptionError
from headrace.memory import system
from headrace.memory.pinned import pinning_fix
from headrace.memory.system import Limits, Needs, cgroup_available_bytes, host_available_bytes, memlock_bytes
from headrace.model.inventory import take_inventory
from headrace.plan.build import build_plan
from headrace.plan.plan import Machine
from headrace.planning import context as planning_context
from headrace.planning.checks import check_limits, finalize_plan, needs_of
from headrace.planning.request import gpu_memory_kind
from headrace.sizes import parse_size
from models import Stack, all_layers, on_meta, rows, save, state_of
from plans import part_bytes

pytestmark = pytest.mark.usefixtures("no_grad")

KIB, MIB, GIB = 2**10, 2**20, 2**30


# -- what the kernel says ----------------------------------------------------------------------------------------------


class TestHostMemory:
    def test_available_not_free(self) -> None:
        text = "MemTotal:       131981020 kB\nMemFree:          100 kB\nMemAvailable:     2048 kB\nCached:  9999 kB\n"
        assert host_available_bytes(text) == 2 * MIB

    @pytest.mark.slow
    def test_the_limit_of_address_space(self, tmp_path: Path) -> None:
        """What takes more of it than there is is refused before anything is allocated."""
        layers = [torch.nn.Linear(2048, 2048, bias=False) for _ in range(16)]
        folder = save(torch.nn.Sequential(*layers), tmp_path)
        with torch.device("meta"):
            model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(16))).eval()
        before, status = resource.getrlimit(resource.RLIMIT_AS), Path("/proc/self/status").read_text()
        (taken,) = re.findall(r"^VmSize:\s+(\d+) kB", status, re.MULTILINE)
        resource.setrlimit(resource.RLIMIT_AS, (int(taken) * KIB + 64 * MIB, before[1]))
        policy = Prefetch(1, 1, 2, params=["re:.*"])
        try:
            with pytest.raises(LimitError, match=r"of host memory.*raise `ulimit -v`"):
                headrace.offload(model, policy, checkpoint=folder)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        with headrace.offload(model, policy, checkpoint=folder) as handle:
            assert torch.equal(model(layers[0].weight), torch.nn.Sequential(*layers)(layers[0].weight))
            assert handle.stats().bytes_moved > 0

    def test_a_kernel_that_does_not_say(self) -> None:
        assert host_available_bytes("MemTotal: 100 kB\n") is None

    def test_here(self) -> None:
        found = host_available_bytes()
        assert found is not None
        assert MIB < found < 2**60


def group(folder: Path, limit: object = None, used: int = 0, cache: tuple[int, int] = (0, 0), version: int = 2) -> None:
    """The files of a control group, as the kernel writes them; no limit: as in a root group of v2."""
    folder.mkdir(parents=True, exist_ok=True)
    limit_file, use_file = ("memory.max", "memory.current") if version == 2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes"
    )  # fmt: skip
    if limit is not None:
        (folder / limit_file).write_text(f"{limit}\n")
        (folder / use_file).write_text(f"{used}\n")
    names = ("inactive_file", "active_file")
    own = [f"{name} {1 if version == 1 else size}" for name, size in zip(names, cache, strict=True)]
    total = [f"total_{name} {size}" for name, size in zip(names, cache, strict=True)] if version == 1 else []
    (folder / "memory.stat").write_text("\n".join(["anon 77", "file 5", *own, "unevictable 5", *total]) + "\n")


class TestCgroups:
    def test_v2(self, tmp_path: Path) -> None:
        group(tmp_path / "a", 10 * GIB, 4 * GIB)
        assert cgroup_available_bytes("0::/a\n", tmp_path) == 6 * GIB

    def test_v2_the_tightest_of_all_ancestors(self, tmp_path: Path) -> None:
        group(tmp_path)
        group(tmp_path / "a", 10 * GIB, 9 * GIB)
        group(tmp_path / "a/b", "max", 2 * GIB)
        group(tmp_path / "a/b/c", 5 * GIB, 1 * GIB)
        assert cgroup_available_bytes("0::/a/b/c\n", tmp_path) == 1 * GIB
        assert cgroup_available_bytes("0::/a/b\n", tmp_path) == 1 * GIB
        assert cgroup_available_bytes("0::/other\n", tmp_path) is None

    def test_page_cache_is_no_use(self, tmp_path: Path) -> None:
        group(tmp_path / "a", 10 * GIB, 9 * GIB, (3 * GIB, 2 * GIB))
        assert cgroup_available_bytes("0::/a\n", tmp_path) == 6 * GIB
        group(tmp_path / "a", 10 * GIB, 1 * GIB, (3 * GIB, 2 * GIB))  # files read at different moments
        assert cgroup_available_bytes("0::/a\n", tmp_path) == 10 * GIB

    def test_over_its_limit(self, tmp_path: Path) -> None:
        group(tmp_path / "a", 1 * GIB, 2 * GIB)
        assert cgroup_available_bytes("0::/a\n", tmp_path) == 0

    def test_unlimited_and_absent(self, tmp_path: Path) -> None:
        group(tmp_path / "a", "max", 2 * GIB)
        assert cgroup_available_bytes("0::/a\n", tmp_path) is None
        assert cgroup_available_bytes("0::/nowhere\n", tmp_path / "none") is None
        assert cgroup_available_bytes("", tmp_path) is None
        (tmp_path / "a" / "memory.max").write_text(f"{GIB}\n")
        (tmp_path / "a" / "memory.stat").unlink()
        (tmp_path / "a" / "memory.current").write_text("0\n")
        assert cgroup_available_bytes("0::/a\n", tmp_path) == GIB

    V1 = "9:name=systemd:/a/b\n5:cpu,cpuacct:/x\n4:memory:/a/b\n0::/\n"

    def test_v1(self, tmp_path: Path) -> None:
        group(tmp_path / "memory", 2**63 - 4096, 50 * GIB, version=1)
        group(tmp_path / "memory/a", 8 * GIB, 7 * GIB, (GIB, 2 * GIB), version=1)
        group(tmp_path / "memory/a/b", 2**63 - 4096, 3 * GIB, version=1)
        assert cgroup_available_bytes(self.V1, tmp_path) == 4 * GIB
        group(tmp_path / "memory/a/b", 4 * GIB, 3 * GIB, version=1)
        assert cgroup_available_bytes(self.V1, tmp_path) == 1 * GIB

    def test_a_container_that_sees_its_own_group_as_the_root(self, tmp_path: Path) -> None:
        group(tmp_path / "memory", 8 * GIB, 7 * GIB, version=1)
        assert cgroup_available_bytes("4:memory:/docker/0123abcd\n", tmp_path) == GIB
        group(tmp_path / "v2", 6 * GIB, 4 * GIB)
        assert cgroup_available_bytes("0::/../../kubepods/x\n", tmp_path / "v2") == 2 * GIB

    def test_both_versions_mounted(self, tmp_path: Path) -> None:
        group(tmp_path / "memory/a", 8 * GIB, 7 * GIB, version=1)
        group(tmp_path / "b", 3 * GIB, 1 * GIB)
        assert cgroup_available_bytes("4:memory:/a\n0::/b\n", tmp_path) == GIB

    def test_here(self) -> None:
        found = cgroup_available_bytes()
        assert found is None or found > 0


class TestLockedMemory:
    STATUS = "Name:\tpython\nVmLck:\t     128 kB\nVmPin:\t 0 kB\nCapEff:\t{}\n"

    def test_limit_less_use(self) -> None:
        assert memlock_bytes(self.STATUS.format("0000000000000000"), 8 * MIB) == 8 * MIB - 128 * KIB
        assert memlock_bytes(self.STATUS.format("0000000000000000"), 64 * KIB) == 0

    def test_not_bound(self) -> None:
        assert memlock_bytes(self.STATUS.format("0000000000000000"), resource.RLIM_INFINITY) is None
        assert memlock_bytes(self.STATUS.format("000001fffeffffff"), 8 * MIB) is None, "CAP_IPC_LOCK"
        assert memlock_bytes(self.STATUS.format("000001fffeffbfff"), 8 * MIB) == 8 * MIB - 128 * KIB


def test_the_cpu_has_no_device_memory_and_pins_nothing() -> None:
    limits = system.read_limits(torch.device("cpu"), pinned_bytes=GIB)
    assert (limits.device_free_bytes, limits.memlock_bytes) == (None, None)
    assert limits.host_available_bytes is not None


# -- what a plan needs -------------------------------------------------------------------------------------------------


class TestNeeds:
    def plan(self, mode: str = "cpu") -> Plan:
        return build_plan(take_inventory(Stack(4)), all_layers(2, mode))

    def test_gpu(self) -> None:
        plan = self.plan()
        names = {storage.name for storage in take_inventory(Stack(4)).storages}
        slabs = sum(unit.num_bytes for unit in plan.units)
        assert needs_of(plan, on_gpu=True) == Needs(sum(plan.slot_bytes), slabs, slabs)
        moved = needs_of(plan, on_gpu=True, elsewhere=names)
        assert moved.device_bytes == sum(plan.slot_bytes) + 512 + 256, "head.weight and head.bias, aligned"
        assert moved.host_bytes == slabs + 384, "each passes through the host"

    def test_memory_that_ranks_share_is_pinned_too(self) -> None:
        assert needs_of(self.plan("shm_cpu"), on_gpu=True) == needs_of(self.plan("cpu"), on_gpu=True)

    def test_gpu_without_pinning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HEADRACE_DISABLE_PIN_MEMORY", "1")
        needs = needs_of(self.plan(), on_gpu=True)
        assert needs.pinned_bytes == 0
        assert needs.host_bytes > 0

    def test_meta_keeps_nothing_in_the_host(self) -> None:
        plan = self.plan("meta")
        assert needs_of(plan, on_gpu=True) == Needs(device_bytes=sum(plan.slot_bytes))

    @pytest.mark.parametrize("mode", ["sharded_cpu", "sharded_gpu"])
    def test_units_split_over_ranks(self, mode: str) -> None:
        plan = replace(self.plan(mode), num_ranks=4)
        slabs, slots = sum(unit.num_bytes for unit in plan.units), sum(plan.slot_bytes)
        assert slabs / 4 <= part_bytes(plan) <= slabs / 4 + 256 * len(plan.units)
        on_device = mode == "sharded_gpu"
        parts = 0 if on_device else part_bytes(plan)
        device_parts = part_bytes(plan) - parts
        assert needs_of(plan, on_gpu=True) == Needs(slots + device_parts, parts, parts)
        assert needs_of(plan, on_gpu=False) == Needs(host_bytes=slots + part_bytes(plan))
        assert plan.device_bytes == plan.resident_bytes + slots + device_parts

    def test_cpu(self) -> None:
        plan = self.plan()
        names = {storage.name for storage in take_inventory(Stack(4)).storages}
        slots, residents = sum(plan.slot_bytes), plan.resident_bytes
        assert needs_of(plan, on_gpu=False) == Needs(host_bytes=slots), "adopted where it is"
        from_files = needs_of(plan, on_gpu=False, elsewhere=names, on_meta=names)
        assert from_files == Needs(host_bytes=slots + residents + plan.offloaded_bytes)
        shared = self.plan("shm_cpu")
        assert needs_of(shared, on_gpu=False) == Needs(host_bytes=slots + plan.offloaded_bytes), (
            "live tensors are copied"
        )
        assert needs_of(shared, on_gpu=False, elsewhere=names, on_meta=names) == from_files
        streamed = needs_of(self.plan("disk"), on_gpu=False, elsewhere=names, on_meta=names)
        assert streamed == Needs(host_bytes=slots + residents)


# -- refusals ----------------------------------------------------------------------------------------------------------


class TestRefusals:
    @pytest.mark.parametrize(
        ("limits", "limit", "available"),
        [
            (Limits(device_free_bytes=99), "device memory", 99),
            (Limits(device_free_bytes=GIB, host_available_bytes=98), "host memory", 98),
            (Limits(GIB, 500, 97), "host memory under its cgroup's limit", 97),
            (Limits(GIB, GIB, GIB, 96), "locked memory (RLIMIT_MEMLOCK)", 96),
        ],
    )
    def test_the_limit_and_the_figures(self, limits: Limits, limit: str, available: int) -> None:
        plan = build_plan(take_inventory(Stack(4)), all_layers())
        needs = needs_of(plan, on_gpu=True)
        with pytest.raises(LimitError) as caught:
            check_limits(plan, limits, needs)
        error = caught.value
        needed = needs.device_bytes if limit == "device memory" else needs.host_bytes
        assert (error.limit, error.needed_bytes, error.available_bytes) == (limit, needed, available)
        assert f"({needed} bytes) of {limit}, and {available} B ({available} bytes) can be had" in str(error)
        assert f"({needed - available} bytes) too little" in str(error)
        assert isinstance(error, OptionError)

    def test_exactly_enough(self) -> None:
        plan = build_plan(take_inventory(Stack(4)), all_layers())
        needs = needs_of(plan, on_gpu=True)
        enough = Limits(needs.device_bytes, needs.host_bytes, needs.host_bytes, needs.pinned_bytes)
        check_limits(plan, enough, needs)
        check_limits(plan, Limits(), needs)

    @pytest.mark.parametrize(
        ("limits", "start", "which"),
        [
            (Limits(device_free_bytes=10 * MIB), "15MiB", "smaller"),
            (Limits(GIB, 10 * MIB), "6MiB", "larger"),
            (Limits(GIB, GIB, 10 * MIB), "6MiB", "larger"),
            (Limits(GIB, GIB, GIB, 10 * MIB), "6MiB", "larger"),
        ],
    )
    def test_the_budget_it_names_fits(self, limits: Limits, start: str, which: str) -> None:
        with torch.device("meta"):
            model = Stack(72, dim=256)  # 18.1 MiB
        inventory = take_inventory(model)
        names = {storage.name for storage in inventory.storages}

        def check(budget: str | int) -> None:
            plan = build_plan(inventory, Budget(budget))
            check_limits(plan, limits, needs_of(plan, on_gpu=True, elsewhere=names))

        with pytest.raises(LimitError, match=f"A {which} budget should fit, about --device-memory") as caught:
            check(start)
        size = re.search(r"--device-memory (\S+);", str(caught.value))
        assert size
        assert parse_size(size[1]) == caught.value.budget_bytes
        check(size[1])

    def test_no_budget_fits(self) -> None:
        inventory = take_inventory(Stack(4))
        names = {storage.name for storage in inventory.storages}
        plan = build_plan(inventory, all_layers())
        needs = needs_of(plan, on_gpu=True, elsewhere=names)
        for limits in (Limits(10, GIB), Limits(GIB, 10), Limits(needs.device_bytes, 5000), Limits(9000, 18000)):
            with pytest.raises(LimitError, match="Offload less or in smaller units, or ") as caught:
                check_limits(plan, limits, needs)
            assert caught.value.budget_bytes is None


# -- offload -----------------------------------------------------------------------------------------------------------


def limited(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    monkeypatch.setattr(planning_context, "read_limits", lambda device, pinned_bytes=0: Limits(**limits))


class TestOffload:
    @pytest.mark.parametrize("policy", [Budget("12KiB", ["layers"]), all_layers(), "plan"], ids=str)
    def test_every_policy_before_anything_is_allocated(self, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        model = Stack(5).eval()
        if policy == "plan":
            policy = build_plan(take_inventory(model), all_layers())
        limited(monkeypatch, host_available_bytes=100)
        before = state_of(model)
        monkeypatch.setattr(torch, "empty", _no_allocation)
        with pytest.raises(LimitError, match=r"bytes\) of host memory, and 100 B \(100 bytes\) can be had"):
            headrace.offload(model, policy)
        monkeypatch.undo()
        assert state_of(model) == before
        expected = model(rows())
        with headrace.offload(model, policy):
            assert torch.equal(model(rows()), expected)

    def test_the_budget_it_names_works(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        resident = Stack(6, dim=256).eval()
        save(resident, tmp_path)
        model = on_meta(Stack, 6, dim=256)
        limited(monkeypatch, host_available_bytes=MIB, cgroup_available_bytes=2 * MIB)
        with pytest.raises(LimitError, match="A smaller budget should fit, about --device-memory") as caught:
            headrace.offload(model, "1300KiB", checkpoint=tmp_path)
        budget = caught.value.budget_bytes
        assert budget is not None
        with headrace.offload(model, budget, checkpoint=tmp_path) as handle:
            assert handle.plan.device_bytes <= MIB
            assert torch.equal(model(rows(256)), resident(rows(256)))

    def test_mode_cpu_from_files_costs_the_weights(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        resident = Stack(6).eval()
        save(resident, tmp_path)
        limited(monkeypatch, host_available_bytes=take_inventory(resident).num_bytes)
        model = on_meta(Stack, 6)
        with pytest.raises(LimitError, match=r"store the weights in the files \(--offload-mode disk\)"):
            headrace.offload(model, all_layers(), checkpoint=tmp_path)
        with headrace.offload(model, all_layers(mode="disk"), checkpoint=tmp_path):
            assert torch.equal(model(rows()), resident(rows()))
        with headrace.offload(resident, all_layers()):  # adopted: the slots alone are new
            pass

    def test_what_is_coded_is_in_no_file(self) -> None:
        plan = build_plan(take_inventory(on_meta(Stack, 6, dim=256).bfloat16()), Prefetch(1, 1, 2, codec="exp3"))
        with pytest.raises(LimitError, match=r"--offload-mode disk, no codec\), or .*FOLDER and no mode or codec"):
            check_limits(plan, Limits(GIB, 100 * KIB), needs_of(plan, on_gpu=True))

    def test_the_offloaders_of_engines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        limited(monkeypatch, host_available_bytes=100)
        offloader = PrefetchOffloader(1, 1, 2, ["linear"])
        model = Stack(3).eval()
        offloader.wrap_modules(layer for layer in model.layers)
        before = state_of(model)
        with pytest.raises(LimitError, match="of host memory"):
            offloader.post_init()
        assert state_of(model) == before


def _no_allocation(*size: Any, **options: Any) -> torch.Tensor:
    raise AssertionError(f"allocates {size}")


def test_a_full_disk(tmp_path: Path) -> None:
    system.require_disk(tmp_path, 1, "")
    with pytest.raises(LimitError, match=r"are free on its disk: .* GiB too little; take another"):
        system.require_disk(tmp_path, 2**60, "take another")


class TestWhereMemoryIsTheHosts:
    """No such machine is at hand: what torch and the driver would say is put in their place."""

    @pytest.fixture
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        facts = SimpleNamespace(is_integrated=0, coherent=0, code=0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
        name = "CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES"
        driver = SimpleNamespace(CUdevice_attribute=SimpleNamespace(**{name: 100}))
        driver.cuDeviceGetAttribute = lambda attribute, index: (
            facts.code,
            facts.coherent if attribute == 100 else None,
        )
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
        return facts

    def test_found_out(self, gpu: SimpleNamespace) -> None:
        device = torch.device("cuda", 0)
        assert gpu_memory_kind(device) == "own"
        gpu.coherent = 1
        assert gpu_memory_kind(device) == "coherent"
        gpu.code = 1
        assert gpu_memory_kind(device) == "own"
        gpu.is_integrated = 1
        assert gpu_memory_kind(device) == "shared"
        assert gpu_memory_kind(torch.device("cpu")) == "shared"

    def test_said(self, gpu: SimpleNamespace) -> None:
        """Only where it would free nothing: in host memory, and not in files."""
        inventory, device = take_inventory(Stack(4)), torch.device("cuda", 0)
        gpu.is_integrated = 1
        plan, machine = build_plan(inventory, Prefetch(1, 1, 2, params=["layers"])), Machine("cpu")
        in_files = build_plan(inventory, Prefetch(1, 1, 2, params=["layers"], mode="disk"))
        with pytest.warns(HeadraceWarning, match=r"computes in the host's memory, .* frees nothing: .*mode disk"):
            finalize_plan(plan, inventory, device, machine)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            finalize_plan(in_files, inventory, device, machine)
            gpu.is_integrated = 0
            finalize_plan(plan, inventory, device, machine)

    def test_wsl(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "ulimit -l" in pinning_fix()
        release = SimpleNamespace(release="6.6.87.2-microsoft-standard-WSL2")
        monkeypatch.setattr(os, "uname", lambda: release)
        assert "raise memory= in .wslconfig" in pinning_fix()
