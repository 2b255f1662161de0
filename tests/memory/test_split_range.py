"""Memory of two kinds in one range of addresses, with a stand-in for the driver."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from checks import raising
from cuda_driver import Driver
from headrace.memory import split_range
from headrace.memory.split_range import MappedMemory, SplitRange

MIB = 1 << 20
CUDA = torch.device("cuda", 0)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr("torch.cuda.device", nullcontext)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: made.calls.append(("synchronize", ())))
    monkeypatch.setattr(split_range, "import_module", lambda name: made)
    monkeypatch.setattr(torch, "as_tensor", lambda data, device: data)
    monkeypatch.setattr(torch, "from_numpy", lambda data: data)
    monkeypatch.setattr(split_range.np, "asarray", lambda data: data)
    return made


def test_host_memory_that_is_there_is_mapped_again(driver: Driver) -> None:
    """No second copy of it is made, and it outlives the mapping in which it was made."""
    made = MappedMemory(8 * MIB, CUDA)
    driver.calls.clear()
    whole = SplitRange(2 * MIB, 4 * MIB, 12 * MIB, CUDA, host=made)
    calls = [name for name, _ in driver.calls]
    assert [given[0] for name, given in driver.calls if name == "cuMemCreate"] == [2 * MIB]  # of the device alone
    assert ("cuMemRetainAllocationHandle", (made.address,)) in driver.calls
    assert [given[:2] for name, given in driver.calls if name == "cuMemMap"] == [
        (1 << 40, 2 * MIB),
        ((1 << 40) + 4 * MIB, 8 * MIB),
    ]
    assert calls.count("cuMemRelease") == 2  # mappings keep the memory
    driver.calls.clear()
    del made
    ends = [given for name, given in driver.calls if name == "cuMemUnmap"]
    assert ends == [(1 << 40, 2 * MIB), ((1 << 40) + 2 * MIB, 8 * MIB)]
    driver.calls.clear()
    del whole
    assert len([name for name, _ in driver.calls if name == "cuMemUnmap"]) == 2


def test_a_host_range_begins_behind_memory_of_the_device(driver: Driver) -> None:
    """Else torch would take it for memory of the host, and copy it."""
    made = MappedMemory(6 * MIB, CUDA)
    created = [(given[0], given[1].location.type) for name, given in driver.calls if name == "cuMemCreate"]
    assert created == [(2 * MIB, "device"), (6 * MIB, "host")]
    readers = [[each.location.type for each in given[2]] for name, given in driver.calls if name == "cuMemSetAccess"]
    assert readers == [["device"], ["device", "host"]]
    assert (made.address, made.num_bytes) == ((1 << 40) + 2 * MIB, 6 * MIB)
    assert made.__cuda_array_interface__["data"][0] == 1 << 40


def test_memory_that_torch_keeps_is_given_back(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as free when a plan is made, and the driver does not have it."""
    driver.codes["cuMemCreate"] = "CUDA_ERROR_OUT_OF_MEMORY"
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: driver.codes.clear())
    SplitRange(2 * MIB, 4 * MIB, 12 * MIB, CUDA)
    created = [given[0] for name, given in driver.calls if name == "cuMemCreate"]
    assert created == [2 * MIB, 2 * MIB, 8 * MIB]


@pytest.mark.parametrize("next_one", ["ends", "is made"])
@pytest.mark.parametrize("thread", ["this", "another"])
def test_what_ends_in_a_capture_waits_for_its_end(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, next_one: str, thread: str
) -> None:
    """To wait for the device would make the capture invalid, and the memory would never be given back."""
    refused = raising(RuntimeError("operation not permitted when stream is capturing"))
    ending, other = MappedMemory(6 * MIB, CUDA), MappedMemory(4 * MIB, CUDA)
    driver.calls.clear()
    with monkeypatch.context() as capture:
        if thread == "this":
            capture.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
        else:
            capture.setattr("torch.cuda.synchronize", refused)
        del ending
    assert driver.calls == []
    if next_one == "ends":
        del other
    else:
        MappedMemory(2 * MIB, CUDA)
    unmapped = [given[1] for name, given in driver.calls if name == "cuMemUnmap"]
    assert 6 * MIB in unmapped
    assert [name for name, _ in driver.calls].count("cuMemAddressFree") == 2
