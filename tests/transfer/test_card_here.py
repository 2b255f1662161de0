"""Without a probe, a plan takes the rates of the card that is there, on the link that it is on, and says so."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headrace
from headrace.plan.nominal_rates import NOMINAL_GPU
from headrace.plan.plan import DeviceName
from headrace.plan.rates import Rates
from headrace.transfer import cards, link_rates, machine_probe
from headrace.transfer.cards import CARDS, find_card, rates_of_gpu
from headrace.transfer.machine_probe import Probe, named_machine, planning_rates
from models import Stack, on_meta

GIB = 2**30
H100, CONSUMER, UNKNOWN = "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 4090 Laptop GPU"


def gpu(name: str = H100, gib: float = 79.2, **facts: Any) -> SimpleNamespace:
    """Properties as torch has them."""
    found = {
        "name": name, "total_memory": int(gib * GIB), "major": 9, "minor": 0, "multi_processor_count": 132,
        "pci_domain_id": 0, "pci_bus_id": 0x1B, "pci_device_id": 0, "is_integrated": 0, **facts,
    }  # fmt: skip
    return SimpleNamespace(**found)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[SimpleNamespace]:
    """GPUs of this machine, for tests to add; nothing is kept, and of their links nothing is known."""
    found: list[SimpleNamespace] = []
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: len(found),
        "current_device": lambda: 0,
        "get_device_properties": lambda index=None: found[index or 0],
        "get_device_name": lambda index=None: found[index or 0].name,
        "mem_get_info": lambda index=None: (found[index or 0].total_memory, found[index or 0].total_memory),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cards, "SYSFS", tmp_path)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(link_rates, "_links", {})
    monkeypatch.setattr(link_rates, "link_rates", no_memory)
    return found


def no_memory(*_: Any, **__: Any) -> dict[int, float]:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")


def put(sysfs: Path, *ends: tuple[str, str] | None, address: str = "0000:1b:00.0") -> None:
    """The device at ``address``, below a port, each with its greatest speed and width, as Linux writes them."""
    device = sysfs / "devices/pci0000:00/0000:00:01.0" / address
    device.mkdir(parents=True)
    for folder, end in zip((device, device.parent), ends, strict=False):
        for name, text in zip(("speed", "width"), end or (), strict=False):
            (folder / f"max_link_{name}").write_text(f"{text}\n")
    (sysfs / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (sysfs / "bus/pci/devices" / address).symlink_to(device)


def copies(rates: Rates) -> float:
    return max(rate for _, rate in rates.copy_bytes_per_s.points)


# -- the card ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", CARDS)
def test_every_card_is_found_by_the_name_that_its_driver_gives(key: str) -> None:
    for name in (CARDS[key]["device"], *CARDS[key].get("names", ()), CARDS[key]["device"].removeprefix("NVIDIA ")):
        assert find_card(name) is CARDS[key]
    assert named_machine(key)[0].device == CARDS[key]["device"]


@pytest.mark.parametrize(("name", "key"), [
    ("NVIDIA H100 PCIe", "h100pcie"), ("NVIDIA H100 NVL", "h100nvl"), ("NVIDIA H200", "h200sxm"),
    ("NVIDIA H200 NVL", "h200nvl"), ("A100-SXM4-40GB", "a10040gb"), ("NVIDIA A100-PCIE-40GB", "a10040gb"),
    ("NVIDIA A100 80GB PCIe", "a100pcie"), ("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"), ("NVIDIA A10", "a10"),
    ("Tesla T4", "t4"), ("NVIDIA RTX 6000 Ada Generation", "6000ada"), ("NVIDIA B200", "b200"),
    ("NVIDIA RTX A6000", "a6000"), ("NVIDIA GB10", "gb10"), ("NVIDIA GH200 480GB", "gh200"),
])  # fmt: skip
def test_names_of_drivers(name: str, key: str) -> None:
    assert find_card(name) is CARDS[key]


def test_a_superchip_is_not_on_pcie(here: list[SimpleNamespace], tmp_path: Path) -> None:
    here.append(gpu("NVIDIA GH200 480GB", 94.5))
    put(tmp_path, ("32.0 GT/s PCIe", "1"))
    rates = rates_of_gpu(0)
    assert rates.machine == "NVIDIA GH200 480GB on nvlink-c2c, nominal"
    assert copies(rates) == copies(named_machine("gh200")[1])


@pytest.mark.parametrize("name", [UNKNOWN, "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A10G", "NVIDIA L40", ""])
def test_a_name_that_is_like_another(name: str) -> None:
    assert find_card(name) is None


def test_a_card_that_was_measured_elsewhere_is_nominal_here(here: list[SimpleNamespace]) -> None:
    here.append(gpu("NVIDIA H200", 139.8))
    rates, measured = planning_rates(torch.device("cuda", 0)), named_machine("NVIDIA H200")[1]
    assert (rates.is_measured, measured.is_measured) == (False, True)
    assert copies(rates) == pytest.approx(copies(measured), rel=0.02)


def test_one_of_the_same_name_with_less_memory(here: list[SimpleNamespace]) -> None:
    """Of the RTX 3060 there is one with 8 GB, on 128 bits in place of 192."""
    clocks = {"clock_rate": 1_777_000, "memory_clock_rate": 7_501_000, "multi_processor_count": 28}
    here.extend([gpu(CONSUMER, 11.7), gpu(CONSUMER, 7.7, major=8, minor=6, memory_bus_width=128, **clocks)])
    whole, half = (rates_of_gpu(index) for index in (0, 1))
    assert half.device_bytes_per_s / whole.device_bytes_per_s == pytest.approx(240 / 360, rel=0.01)
    assert half.product_s_per_byte(8192) == pytest.approx(whole.product_s_per_byte(8192), rel=0.01)


def test_one_that_no_table_knows(here: list[SimpleNamespace], tmp_path: Path) -> None:
    put(tmp_path, ("16.0 GT/s PCIe", "8"), ("32.0 GT/s PCIe", "16"))
    reported = {"clock_rate": 2_040_000, "memory_clock_rate": 9_001_000, "memory_bus_width": 256}
    here.extend([gpu(UNKNOWN, 15.6, major=8, minor=9, multi_processor_count=76, **reported), gpu(UNKNOWN, 15.6)])
    known, unknown = (rates_of_gpu(index) for index in (0, 1))
    assert known.machine == f"{UNKNOWN} on PCIe 4.0 x8, nominal"
    assert known.device_bytes_per_s == pytest.approx(0.86 * 576e9, rel=1e-3)
    assert 1 / known.product_s_per_byte(8192) == pytest.approx(0.82 * 76 * 2.04e9 * 512 / 8192)
    assert unknown.machine == f"{UNKNOWN}, taken for a GPU of 1 TB/s and 150 TFLOP/s, on PCIe 4.0 x8, nominal"
    assert unknown.device_bytes_per_s == pytest.approx(0.86e12)
    assert copies(unknown) == copies(known) == pytest.approx(0.87 * 16e9)


def test_the_card_that_computes(here: list[SimpleNamespace]) -> None:
    here.extend([gpu(), gpu(CONSUMER, 11.7)])
    devices = DeviceName("cuda"), *map(torch.device, ("cuda:0", "cuda:1"))
    found = [planning_rates(device).machine.partition(" (its link")[0] for device in devices]
    assert found == [f"{H100} on PCIe 5.0 x16, nominal"] * 2 + [f"{CONSUMER} on PCIe 4.0 x16, nominal"]


def test_none_at_all(here: list[SimpleNamespace]) -> None:
    assert planning_rates(torch.device("cuda", 0)) is NOMINAL_GPU


# -- the link ----------------------------------------------------------------------------------------------------------

GEN5, GEN4, GEN3 = ("32.0 GT/s PCIe", "16"), ("16.0 GT/s PCIe", "16"), ("8.0 GT/s PCIe", "16")


@pytest.mark.parametrize(("ends", "link"), [
    ((GEN5, GEN5), "5.0 x16"),
    ((GEN5, GEN4), "4.0 x16"),
    ((GEN5, ("16.0 GT/s PCIe", "8")), "4.0 x8"),
    ((GEN5, ("8 GT/s", "4")), "3.0 x4"),
    ((("64.0 GT/s PCIe", "16"), ("64.0 GT/s PCIe", "16")), "5.0 x16"),
    ((GEN4, ("Unknown", "0")), "4.0 x16"),
    ((("Unknown", "16"), GEN3), "3.0 x16"),
    ((GEN3,), "3.0 x16"),
    ((GEN5, ("16.0 GT/s PCIe", "32")), "5.0 x16"),
    ((GEN5, ("2.5 GT/s PCIe", "1")), "5.0 x16"),
    ((("", ""), ("Unknown",)), "5.0 x16"),
    ((), "5.0 x16"),
])  # fmt: skip
def test_the_lesser_end_of_the_link(
    here: list[SimpleNamespace], tmp_path: Path, ends: tuple[Any, ...], link: str
) -> None:
    """The card's own where the driver does not say, or where a virtual machine or a cable pretends a port."""
    put(tmp_path, *ends)
    here.append(gpu())
    rates = rates_of_gpu(0)
    assert rates.machine == f"{H100} on PCIe {link}, nominal"
    generation, lanes = link.split(".0 x")
    assert copies(rates) == pytest.approx(0.87e9 * int(lanes) * 2 ** (int(generation) - 3))
    assert rates_of_gpu(0, of_card_alone=True).machine == f"{H100} on PCIe 5.0 x16, nominal"


def test_an_address_is_that_of_sysfs(here: list[SimpleNamespace], tmp_path: Path) -> None:
    put(tmp_path, GEN3, GEN3, address="10a0:ff:1f.0")
    here.append(gpu(pci_domain_id=0x10A0, pci_bus_id=0xFF, pci_device_id=0x1F))
    assert " on PCIe 3.0 x16" in rates_of_gpu(0).machine


def test_ranks_come_to_the_same_rates_whatever_their_slots(here: list[SimpleNamespace], tmp_path: Path) -> None:
    put(tmp_path, GEN5, GEN3)
    here.extend([gpu(), gpu(pci_bus_id=0x2B)])
    devices = [torch.device("cuda", index) for index in (0, 1)]
    assert len({planning_rates(device).machine for device in devices}) == 2
    assert len({planning_rates(device, in_group=True).machine for device in devices}) == 1


# -- plans -------------------------------------------------------------------------------------------------------------


def plan_here() -> Any:
    return headrace.make_plan(on_meta(Stack, num_layers=24, dim=4096), "600MiB", device="cuda:0")


def test_a_plan_says_which_card_and_link(here: list[SimpleNamespace], tmp_path: Path) -> None:
    here.append(gpu())
    fast, why = plan_here(), "(its link could not be measured: no memory for it)"
    assert f"Rates of {H100} on PCIe 5.0 x16, nominal {why}; run `headrace probe`" in " ".join(str(fast).split())
    put(tmp_path, GEN5, GEN3)
    slow = plan_here()
    assert "on PCIe 3.0 x16, nominal" in str(slow)
    assert slow.prediction.forecasts[0].step_s > 3 * fast.prediction.forecasts[0].step_s
    assert fast.made_for == slow.made_for


def measuring_at(*rates: float) -> tuple[Any, list[torch.device]]:
    """A measurement that finds one of ``rates`` after the other, and the devices that it is of."""
    left, asked = list(rates), list[torch.device]()

    def measure(device: torch.device, *, sizes: tuple[int, ...], seconds: float) -> dict[int, float]:
        assert sizes == (64 * 2**20,)
        assert seconds < 0.5
        asked.append(device)
        return {sizes[0]: left.pop(0)}

    return measure, asked


@pytest.mark.slow
def test_the_link_is_measured(here: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a process; of another start, which measures a little more, the plan is the same."""
    here.append(gpu())
    nominal, plans = rates_of_gpu(0), []
    for found in (26.95e9, 27.04e9):
        measure, asked = measuring_at(found)
        monkeypatch.setattr(link_rates, "link_rates", measure)
        monkeypatch.setattr(link_rates, "_links", {})
        plans += [plan_here(), plan_here()]
        assert asked == [torch.device("cuda", 0)]
    assert plans == plans[:1] * 4
    said = f"Rates of {H100} on PCIe 5.0 x16, nominal but for the link, measured at 27 GB/s; run `headrace probe`"
    assert {said in " ".join(str(plan).split()) for plan in plans} == {True}
    rates = link_rates.with_measured_link(nominal, torch.device("cuda", 0))
    assert copies(rates) == pytest.approx(27e9)
    factor = 27e9 / copies(nominal)
    assert rates.copy_bytes_per_s(2**18) == pytest.approx(factor * nominal.copy_bytes_per_s(2**18))
    for name in ("in_place_s_per_byte", "in_place_grouped_s_per_byte"):
        assert getattr(rates, name)(1) == pytest.approx(getattr(nominal, name)(1) / factor)
    assert rates.fetch_bytes_per_s == pytest.approx(factor * (nominal.fetch_bytes_per_s or 0))
    assert rates.product_s_per_byte == nominal.product_s_per_byte
    assert not rates.is_measured


@pytest.mark.slow
def test_the_link_is_not_measured(
    here: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a probe, for another machine, and by ranks, whose links differ."""
    here.append(gpu())
    measure, asked = measuring_at()
    monkeypatch.setattr(link_rates, "link_rates", measure)
    model, ranks = on_meta(Stack, num_layers=24, dim=4096), {"device": "cuda:0", "num_ranks": 2}
    named = headrace.make_plan(model, "600MiB", machine="h100")
    assert "Rates of NVIDIA H100 80GB HBM3, nominal; run" in " ".join(str(named).split())
    with caplog.at_level("INFO", "headrace"):
        split = headrace.make_plan(model, headrace.Budget("600MiB", mode="sharded_cpu"), **ranks)  # type: ignore[arg-type]
    assert f"Rates of {H100} on PCIe 5.0 x16, nominal; run" in " ".join(str(split).split())
    assert "so none measures its own link" in caplog.text
    machine_probe.save(kept())
    plan_here()
    assert asked == []


def kept() -> Probe:
    """A probe of this machine with a GPU, as if it had been measured."""
    of_gpu = named_machine("h200")[1]
    by_rows = {rows: of_gpu.product_s_per_byte(rows) for rows in (1, 256)}
    return Probe(
        machine_probe.describe_machine(),
        h2d_bytes_per_s={2**20: 3e10},
        device_copy_bytes_per_s=4e12,
        product_s_per_byte=by_rows,
        grouped_s_per_byte=by_rows,
        in_place_s_per_byte=by_rows,
        in_place_grouped_s_per_byte=by_rows,
        kernel_s=1e-6,
        cached_read_bytes_per_s=8e9,
    )


def test_a_kept_probe_wins(here: list[SimpleNamespace]) -> None:
    here.append(gpu())
    machine_probe.save(kept())
    for in_group in (False, True):
        rates = planning_rates(torch.device("cuda", 0), in_group=in_group)
        assert (rates.machine, rates.is_measured, copies(rates)) == (H100, True, 3e10)
    assert "nominal" not in str(plan_here())


def test_a_kept_probe_is_of_the_first_card_and_its_like(here: list[SimpleNamespace]) -> None:
    here.extend([gpu(), gpu(CONSUMER, 11.7), gpu()])
    machine_probe.save(kept())
    found = [planning_rates(torch.device("cuda", index)).is_measured for index in range(3)]
    assert found == [True, False, True]


def test_plans_for_other_machines_ask_nothing_of_this_one(here: list[SimpleNamespace]) -> None:
    """Where torch is not imported for them, there is nothing to ask."""
    before = named_machine("h100")
    here.append(gpu(CONSUMER, 11.7))
    assert named_machine("h100") == before
    assert named_machine(H100) == before
