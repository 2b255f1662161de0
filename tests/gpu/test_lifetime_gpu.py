"""The promise: on a GPU ``park()`` gives back all device memory of the weights, with the bits of the resident twin.

What is measured here beside bits: device memory of a parked offload, and that of ``update()``;
times are for a benchmark.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace import UVA, Budget, Prefetch, Workload
from headrace.lifetime.host_copies import HostCopies
from headrace.memory.pinned import CudaRegistrar
from headrace.testing import assert_same_bits
from moe_models import cached, outputs, qwen

pytestmark = pytest.mark.gpu

DIM, LAYERS, MIB = 2048, 12, 1 << 20
WEIGHT_BYTES = 2 * DIM * DIM


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS))).bfloat16().eval()


POLICIES: dict[str, Any] = {
    "budget": f"{LAYERS * WEIGHT_BYTES // 2}B",
    "all resident": "8GiB",
    "two slots": Prefetch(1, 1, 2),
    "coded": Prefetch(1, 1, 2, codec="exp3"),
    "in place": UVA(f"{4 * WEIGHT_BYTES}B"),
}


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
@pytest.mark.parametrize("way", POLICIES)
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_memory_and_bits(way: str, home: str) -> None:
    """Within 64 MiB of what was in use before; the second park copies nothing."""
    twin, x = dense().cuda(), torch.randn(4, DIM, device="cuda").bfloat16()
    model = copy.deepcopy(twin)
    with torch.inference_mode():
        expected = twin(x)  # takes memory of cuBLAS, which stays
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0] + LAYERS * WEIGHT_BYTES
    model = model.to(home)
    with torch.inference_mode():
        handle = headrace.offload(model, POLICIES[way], device="cuda")
        assert_same_bits(model(x), expected)
        assert handle.park() == handle.plan.resident_bytes
        assert torch.cuda.mem_get_info()[0] >= before - 64 * MIB
        assert handle.resume() == handle.plan.resident_bytes
        assert_same_bits(model(x), expected)
        assert handle.park(resume="auto") == 0
        assert torch.cuda.mem_get_info()[0] >= before - 64 * MIB
        assert_same_bits(model(x), expected)
        handle.park()
        handle.remove()
        assert_same_bits(model.cuda()(x), expected)


@pytest.mark.alone
@pytest.mark.parametrize("call", ["park", "resize"])
def test_one_tensor_that_came_from_the_device_keeps_no_memory_of_others(call: str) -> None:
    """As the inverse frequencies of a rotary embedding, which are made where the model runs."""
    model, x = dense(), torch.randn(4, DIM, device="cuda").bfloat16()
    model.register_buffer("frequencies", torch.ones(64, device="cuda"))
    sizes = [LAYERS * WEIGHT_BYTES * part // 2 for part in (3, 1, 3)]
    with torch.inference_mode():
        expected = copy.deepcopy(model).cuda()(x)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        handle = headrace.offload(model, headrace.Budget(sizes[0]), device="cuda")
        if call == "park":
            handle.park()
            assert handle.resume() == LAYERS * WEIGHT_BYTES + 256
        else:
            assert [handle.resize(size) > 0 for size in sizes[1:]] == [True, True]
        assert_same_bits(model(x), expected)
        handle.remove()
        torch.cuda.empty_cache()
        assert [each.device.type for each in (model.frequencies, model[0].weight)] == ["cuda", "cpu"]
        assert torch.cuda.memory_reserved() - before <= 4 * MIB


@pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
@pytest.mark.parametrize("way", POLICIES)
@pytest.mark.parametrize("source", ["cpu", "cuda", "pinned", "pinned and strided"])
def test_update(way: str, source: str) -> None:
    """From host memory or the device, in no more device memory than what codes a tensor: eight times its bytes."""
    twin, x = dense().cuda(), torch.randn(4, DIM, device="cuda").bfloat16()
    model, side = copy.deepcopy(twin).cpu(), torch.cuda.Stream()

    def new_values() -> dict[str, torch.Tensor]:
        """Under way on another stream, if they are on the device."""
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            device = "cuda" if source == "cuda" else "cpu"
            values = {name: torch.randn_like(each).mul_(0.02).to(device) for name, each in twin.named_parameters()}
            for name, weight in twin.named_parameters():
                weight.copy_(values[name])
        if source == "pinned and strided":
            values = {name: value.t().contiguous().t() for name, value in values.items()}
        return {name: value.pin_memory() for name, value in values.items()} if "pinned" in source else values

    with headrace.offload(model, POLICIES[way], device="cuda") as handle, torch.inference_mode():
        assert_same_bits(model(x), twin(x))
        values = new_values()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        assert handle.update(values) == LAYERS * WEIGHT_BYTES
        assert torch.cuda.max_memory_allocated() - before <= 8 * WEIGHT_BYTES
        for value in values.values():
            value.zero_()  # it has been read when the call returns
        assert_same_bits(model(x), twin(x))
        handle.park()
        handle.update(new_values())
        handle.resume()
        torch.cuda.synchronize()
        assert_same_bits(model(x), twin(x))


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
@pytest.mark.parametrize("way", POLICIES)
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_resize(way: str, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the plan, bits, and host memory that is pinned once: the second time nothing is."""
    twin, x = dense().cuda(), torch.randn(4, DIM, device="cuda").bfloat16()
    model = copy.deepcopy(twin)
    with torch.inference_mode():
        expected = twin(x)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0] + LAYERS * WEIGHT_BYTES
    model, sizes = model.to(home), [LAYERS * WEIGHT_BYTES * part // 6 for part in (3, 6, 2, 3, 6, 2)]
    registered: list[int] = []
    register = CudaRegistrar.register
    monkeypatch.setattr(CudaRegistrar, "register", lambda *args: registered.append(args[2]) or register(*args))
    with torch.inference_mode():
        handle = headrace.offload(model, POLICIES[way], device="cuda")
        for number, size in enumerate(sizes):
            registered.clear()
            was_coded = bool(handle.plan.coded_units)  # what is decoded passes through buffers
            handle.resize(size)
            before_bytes = handle.stats().bytes_moved
            for _ in range(2):
                assert_same_bits(model(x), expected)
            torch.cuda.synchronize()
            assert handle.stats().bytes_moved > before_bytes or not handle.plan.prefetched_bytes
            assert before - torch.cuda.mem_get_info()[0] <= handle.plan.device_bytes + 64 * MIB
            assert number < 3 or not registered or was_coded or handle.plan.coded_units
        handle.park()
        assert torch.cuda.mem_get_info()[0] >= before - 64 * MIB
        handle.resize(sizes[0])
        assert_same_bits(model(x), expected)
        handle.remove()
        assert_same_bits(model.cuda()(x), expected)


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
def test_resize_gives_memory_back() -> None:
    """Though slots are allocated meanwhile, which the allocator may cut from the memory that residents have left."""
    width, layers = 8192, 8
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).bfloat16().eval()
    x = torch.randn(4, width, device="cuda").bfloat16()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    budget = Budget("8GiB", workload=Workload([8192]))  # of so many rows nothing is read in place
    with torch.inference_mode(), headrace.offload(model, budget, device="cuda") as handle:
        expected = model(x)
        for weights in (4, 6, 3):
            handle.resize(weights * 2 * width * width)
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() - before <= handle.plan.device_bytes + 128 * MIB
            assert_same_bits(model(x), expected)
            assert handle.plan.slots_bytes
            assert handle.stats().bytes_moved


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
def test_resize_where_the_device_is_full() -> None:
    """Residents that stay pass through host memory; what does not fit is refused before anything changes."""
    twin, x = dense().cuda(), torch.randn(4, DIM, device="cuda").bfloat16()
    model = copy.deepcopy(twin).cpu()
    with torch.inference_mode(), headrace.offload(model, f"{LAYERS * WEIGHT_BYTES}B", device="cuda") as handle:
        expected = twin(x)
        assert_same_bits(model(x), expected)
        torch.cuda.empty_cache()
        # Of the residents that stay, so much that no second copy of them fits.
        filler = torch.empty(torch.cuda.mem_get_info()[0] - WEIGHT_BYTES, dtype=torch.uint8, device="cuda")
        handle.resize(LAYERS * WEIGHT_BYTES * 2 // 3)
        assert_same_bits(model(x), expected)
        torch.cuda.empty_cache()
        more = torch.empty(torch.cuda.mem_get_info()[0] - WEIGHT_BYTES, dtype=torch.uint8, device="cuda")
        with pytest.raises(headrace.errors.LimitError):
            handle.resize(LAYERS * WEIGHT_BYTES * 2)
        assert_same_bits(model(x), expected)
        del filler, more
        torch.cuda.empty_cache()  # or small tensors of the next tests split it, and torch keeps the rest


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
def test_resize_with_cached_experts() -> None:
    twin = qwen(hidden_size=512, moe_intermediate_size=1024).cuda()
    model, ids = copy.deepcopy(twin), torch.arange(7, device="cuda")[None] * 13 % 97
    num_bytes = sum(each.nbytes for each in twin.parameters())
    with headrace.offload(model, cached(3)) as handle, torch.inference_mode():
        for part in (10, 7, 20, 7):
            handle.resize(num_bytes * part // 10)
            for _ in range(2):
                assert_same_bits(model(ids).logits, twin(ids).logits)


@pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
def test_resize_captures_graphs_again() -> None:
    from headrace.graphs.decoding import decode_in_graphs

    twin = qwen(hidden_size=512, num_hidden_layers=4).cuda()
    model, prompt = copy.deepcopy(twin), torch.arange(9, device="cuda")[None]
    num_bytes = sum(each.nbytes for each in twin.parameters())
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    with headrace.offload(model, Prefetch(1, 1, 2)) as handle:
        graphs = decode_in_graphs(model)
        for part in (7, 8, 20, 7):
            before = graphs.replays
            for _ in range(2):
                assert_same_bits(model.generate(prompt, **options), twin.generate(prompt, **options))
            assert graphs.replays > before
            handle.resize(num_bytes * part // 10)
        assert_same_bits(model.generate(prompt, **options), twin.generate(prompt, **options))


@pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
def test_resize_of_compiled_code() -> None:
    twin, x = dense().cuda(), torch.randn(4, DIM, device="cuda").bfloat16()
    model = copy.deepcopy(twin)
    with torch.inference_mode(), headrace.offload(model, Prefetch(1, 1, 2)) as handle:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for part in (3, 2, 4):
            assert_same_bits(compiled(x), twin(x))
            handle.resize(LAYERS * WEIGHT_BYTES * part // 6)
        assert_same_bits(compiled(x), twin(x))


@pytest.mark.parametrize("offset", [0, 4, 6])
def test_fingerprints(offset: int) -> None:
    """Those of the kernel, one launch for all, are those of torch, on the device and on a CPU."""
    sizes = (1, 4, 6, 2048, MIB, 20 * MIB + 4, 20 * MIB + 6)
    found = {size: torch.randint(256, (offset + size,), dtype=torch.uint8, device="cuda")[offset:] for size in sizes}
    buffers = {str(size): each for size, each in found.items()}
    copies, without = HostCopies(torch.device("cuda")), HostCopies(torch.device("cuda"))
    without._has_kernel = False
    on_cpu = {name: each.cpu() for name, each in buffers.items()}
    expected = HostCopies(torch.device("cpu"))._fingerprints(on_cpu)
    for each in (copies, without):
        assert_same_bits(each._fingerprints(buffers), expected)
    assert copies._has_kernel, "Triton has compiled it"


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
def test_cached_experts() -> None:
    """Their slots are unmapped and mapped again at their addresses."""
    twin = qwen(hidden_size=512, moe_intermediate_size=1024).cuda()
    model = copy.deepcopy(twin)
    with headrace.offload(model, cached(3)) as handle, torch.inference_mode():
        ids = torch.arange(7, device="cuda")[None] * 13 % 97
        for _ in range(3):
            assert_same_bits(model(ids).logits, twin(ids).logits)
            free = torch.cuda.mem_get_info()[0]
            handle.park()
            assert torch.cuda.mem_get_info()[0] > free
            handle.resume()
            assert_same_bits(model(ids).logits, twin(ids).logits)
            name = next(name for name, _ in twin.named_parameters() if "experts" in name)
            value = torch.randn_like(twin.get_parameter(name)) * 0.05
            twin.get_parameter(name).copy_(value)
            handle.update({name: value})
    assert len(outputs(twin.cpu())) == 4


@pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
def test_graphs_of_generate() -> None:
    """Freed at park, captured again; an update needs neither."""
    from headrace.graphs.decoding import decode_in_graphs

    twin = qwen(hidden_size=512, num_hidden_layers=4).cuda()
    model, prompt = copy.deepcopy(twin), torch.arange(9, device="cuda")[None]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    with headrace.offload(model, Prefetch(1, 1, 2)) as handle:
        graphs = decode_in_graphs(model)
        for _ in range(3):
            before = graphs.replays
            for _ in range(2):
                assert_same_bits(model.generate(prompt, **options), twin.generate(prompt, **options))
            assert graphs.replays > before
            name = "model.layers.1.self_attn.q_proj.weight"
            value = torch.randn_like(twin.get_parameter(name)) * 0.05
            twin.get_parameter(name).data.copy_(value)
            handle.update({name: value})
            assert_same_bits(model.generate(prompt, **options), twin.generate(prompt, **options))
            handle.park(resume="auto")
