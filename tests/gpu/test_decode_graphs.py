"""``generate`` in CUDA graphs of an offloaded model: the bits of the resident one, whatever happens between calls."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from gpu_models import offloaded

import headrace
from checks import run_threads
from headrace import UVA, Budget, Prefetch, Rules
from headrace.errors import StateError
from headrace.memory.system import rss_bytes
from headrace.model.inventory import take_inventory
from headrace.model.memory_profile import profile_of

pytestmark = pytest.mark.usefixtures("no_grad")

transformers = pytest.importorskip("transformers")
decoding = pytest.importorskip("headrace.graphs.decoding")

SIZES = {
    "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 4}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}


def build(kind: str, attention: str = "eager") -> Any:
    """``attention``: fused kernels do not repeat their own bits behind long prompts."""
    torch.manual_seed(0)
    config, factory = {
        "qwen3": lambda: (transformers.Qwen3Config(**SIZES), transformers.Qwen3ForCausalLM),
        "gemma3": lambda: (transformers.Gemma3TextConfig(**SIZES, **WINDOWS), transformers.Gemma3ForCausalLM),
        "experts": lambda: (transformers.Qwen3MoeConfig(**SIZES, **EXPERTS), transformers.Qwen3MoeForCausalLM),
    }[kind]()
    config._attn_implementation = attention
    return factory(config).to("cuda", torch.bfloat16).eval().requires_grad_(False)


ALL = ["ALL_MODEL_PARAMS"]
CASES = {
    "every fourth layer": ("qwen3", lambda model: Prefetch(4, 1, 2, params=ALL)),
    "all layers, one slot": ("qwen3", lambda model: Prefetch(1, 1, 1, params=ALL)),
    "budget": ("qwen3", lambda model: Budget(int(take_inventory(model).num_bytes * 0.6))),
    "in place": ("qwen3", lambda model: UVA(params=["mlp"])),
    "sliding windows": ("gemma3", lambda model: Prefetch(2, 1, 2, params=ALL)),
    "cached experts": ("experts", lambda model: Rules([("experts", "cache")], expert_slots=6)),
    "prefetched experts": ("experts", lambda model: Prefetch(2, 1, 2, params=ALL)),
}


def prompt(length: int, sequences: int = 1) -> torch.Tensor:
    ids = torch.randint(1, 1000, (sequences, length), generator=torch.Generator().manual_seed(length))
    return ids.cuda()


def run(model: Any, length: int = 12, tokens: int = 20, sequences: int = 1) -> torch.Tensor:
    """Logits of every token: [tokens, sequences, vocabulary]."""
    ids = prompt(length, sequences)
    found: list[torch.Tensor] = []

    def note(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        found.append(scores.clone())
        return scores

    processors = transformers.LogitsProcessorList([note])
    model.generate(ids, max_new_tokens=tokens, do_sample=False, logits_processor=processors)
    return torch.stack(found)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any, headrace.Handle]]:
    """A resident model that decodes in graphs, an offloaded one that does, and its handle."""
    kind, policy = CASES[request.param]
    resident = build(kind)
    model = copy.deepcopy(resident)
    headrace.decode_in_graphs(resident)
    handle = headrace.offload(model, policy(model))
    yield resident, model, handle
    handle.remove()  # graphs of ours need no word about their release


def moved(handle: headrace.Handle) -> bool:
    stats = handle.stats()
    return stats.bytes_moved > 0 or handle.plan.uva_bytes > 0 or sum(layer.fetched for layer in stats.experts) > 0


def test_logits_are_those_of_the_resident_model(case: Any) -> None:
    """Of several calls with prompts of other lengths, alone and with another number of sequences between."""
    resident, model, handle = case
    graphs = headrace.decode_in_graphs(model)
    for length, sequences in ((12, 1), (30, 1), (9, 3), (12, 1), (300, 1)):
        found, expected = run(model, length, sequences=sequences), run(resident, length, sequences=sequences)
        equal = [torch.equal(*pair) for pair in zip(found, expected, strict=True)]
        assert all(equal), f"{length} tokens, {sequences} sequences: {equal}"
    assert graphs.replays > 60
    assert moved(handle)


def test_graphs_have_the_bits_of_eager_steps(case: Any) -> None:
    resident, model, handle = case
    vars(resident).pop("generate")

    def eager(length: int) -> torch.Tensor:
        cache = transformers.StaticCache(config=resident.config, max_cache_len=256)
        ids, found = prompt(length), []
        out = resident.generate(
            ids, max_new_tokens=20, do_sample=False, disable_compile=True, output_logits=True,
            return_dict_in_generate=True, **{decoding.CACHE_NAME: cache},
        )  # fmt: skip
        found = [each.float() for each in out.logits]
        return torch.stack(found)

    headrace.decode_in_graphs(model)
    for length in (12, 40):
        assert torch.equal(run(model, length), eager(length))
    assert moved(handle)


def test_eager_forwards_between_two_calls(case: Any) -> None:
    resident, model, handle = case
    headrace.decode_in_graphs(model)
    for length in (5, 50, 500):
        assert torch.equal(run(model), run(resident))
        assert torch.equal(model(prompt(length)).logits, resident(prompt(length)).logits)
    assert moved(handle)


def test_an_interrupt_between_announcement_and_replay(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    resident, model, _ = case
    headrace.decode_in_graphs(model)
    expected, replay, steps = run(resident), decoding.StepGraph.replay, []
    for launched in (False, True):
        with monkeypatch.context() as patch:

            def interrupted(step: Any, inputs: Any, launched: bool = launched) -> Any:
                steps.append(step)
                if len(steps) % 7:
                    return replay(step, inputs)
                if launched:
                    replay(step, inputs)
                raise KeyboardInterrupt

            patch.setattr(decoding.StepGraph, "replay", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run(model)
        assert torch.equal(run(model), expected)


def test_two_threads_that_generate_at_once(case: Any) -> None:
    resident, model, _ = case
    headrace.decode_in_graphs(model)
    tokens = [resident.generate(prompt(length), max_new_tokens=20, do_sample=False) for length in (12, 13)]
    found: list[list[torch.Tensor]] = [[], []]

    def work(which: int) -> None:
        with torch.no_grad():
            for _ in range(4):
                found[which].append(model.generate(prompt(12 + which), max_new_tokens=20, do_sample=False).cpu())

    run_threads([partial(work, 0), partial(work, 1)], 120)
    assert [len(each) for each in found] == [4, 4]
    # One of two that run at once decodes eagerly, with a cache of another shape: greedy tokens agree, logits need not.
    agree = [torch.equal(each, tokens[which].cpu()) for which in range(2) for each in found[which]]
    assert sum(agree) >= 4


@pytest.mark.filterwarnings("ignore:.*resident from now on")
@pytest.mark.parametrize("budget", [None, "60GiB"])
def test_weights_that_are_read_and_written_while_graphs_exist(budget: str | None) -> None:
    """A write goes to the store or makes the weight resident; graphs that would not see it are captured again."""
    resident = build("qwen3")
    model = copy.deepcopy(resident)
    headrace.decode_in_graphs(resident)
    rules = [("re:.*layers.[1-6].mlp.*", "prefetch")]
    policy = Prefetch(2, 1, 2, params=ALL) if budget is None else Rules(rules)
    with offloaded(model, policy) as handle:
        graphs = headrace.decode_in_graphs(model)
        for change in (torch.sum, lambda weight: weight.mul_(2)):
            assert torch.equal(run(model), run(resident))
            for each in (model, resident):
                change(each.model.layers[1].mlp.up_proj.weight)
            replays = graphs.replays
            assert torch.equal(run(model), run(resident))
            assert graphs.replays > replays
        assert handle.stats().bytes_moved > 0


def test_other_captures_are_refused_until_graphs_are_removed() -> None:
    model, ids = build("qwen3", "sdpa"), prompt(12)  # whose masks can be made in a capture
    expected = copy.deepcopy(model)(ids).logits
    with offloaded(model, Prefetch(4, 1, 2, params=ALL)):
        graphs = headrace.decode_in_graphs(model)
        run(model)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(StateError, match=r"generate\(\) has graphs of its own"), torch.cuda.graph(graph):
            model(ids)
        assert torch.equal(model(ids).logits, expected)
        graphs.remove()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(ids).logits
        for _ in range(2):
            graph.replay()
            assert torch.equal(out, expected)
            assert torch.equal(model(ids).logits, expected)


class _Synchronizes:
    """Garbage that only a collection of cycles frees, by a call that ends a capture, as one for pinned memory does."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        torch.cuda.synchronize()


@pytest.mark.filterwarnings("error::headrace.errors.HeadraceWarning")
def test_no_garbage_is_collected_in_a_capture() -> None:
    model = build("qwen3")
    expected = run(model)
    model.model.layers[2].register_forward_pre_hook(lambda *_: _Synchronizes() and None)
    graphs = headrace.decode_in_graphs(model)
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        found = run(model)
    finally:
        gc.set_threshold(*thresholds)
    assert graphs.replays > 10
    assert found.argmax(-1).equal(expected.argmax(-1))


@pytest.mark.alone
def test_graphs_take_the_memory_that_is_planned_for_them() -> None:
    model = build("experts")
    graphs = headrace.decode_in_graphs(model)
    run(model)
    planned = profile_of(model, 256)
    assert 0 < graphs.num_bytes <= planned.workload_bytes(1, 256) - planned.cache_bytes(1, 256)


def test_nothing_is_left_of_200_calls_and_10000_tokens() -> None:
    """Device memory, host memory, tensors and file descriptors are those after two calls."""
    model = build("qwen3")
    handle = headrace.offload(model, Prefetch(4, 1, 2, params=ALL))
    graphs = headrace.decode_in_graphs(model)

    def held() -> tuple[int, int, int, int]:
        gc.collect()
        torch.cuda.empty_cache()
        tensors = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
        return torch.cuda.memory_reserved(), rss_bytes(), tensors, len(os.listdir("/proc/self/fd"))

    def call(number: int) -> None:
        length = (3, 300)[number % 2]
        out = model.generate(prompt(length), max_new_tokens=50, do_sample=False)
        assert out.shape[1] == length + 50

    for number in range(4):
        call(number)
    before = held()
    for number in range(200):
        call(number)
    device, host, tensors, descriptors = (after - earlier for earlier, after in zip(before, held(), strict=True))
    assert device <= 2 << 20
    assert host <= 32 << 20
    assert tensors <= 0
    assert descriptors <= 0
    assert graphs.replays >= 9_000
    graphs.remove()
    handle.remove()
