"""Rows of a cache decode on a GPU, in CUDA graphs, as ``generate`` in graphs does; their memory does not grow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

import headrace
from checks import eventually
from headrace.config import Prefetch
from headrace.graphs.cache_rows import Rows
from headrace.serving.engine import Engine, Request

SIZES = {
    "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 4096, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 3}
FAMILIES: dict[str, Any] = {
    "full": (transformers.Qwen3Config, SIZES),
    "windows": (transformers.Gemma3TextConfig, {**SIZES, **WINDOWS}),
    "sinks": (
        transformers.GptOssConfig,
        {**SIZES, **WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"},
    ),
    "recurrences": (
        transformers.Qwen3_5TextConfig,
        {**SIZES, "layer_types": ["linear_attention", "full_attention"] * 3, "linear_num_key_heads": 4,
         "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    ),
}  # fmt: skip
TOKENS = 40


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    config, sizes = FAMILIES[request.param]
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = transformers.AutoModelForCausalLM.from_config(config(**sizes), dtype=torch.float32)
    return made.eval().requires_grad_(False)


@contextmanager
def offloaded(model: Any, is_offloaded: bool) -> Iterator[Any]:
    if not is_offloaded:
        yield None
        return
    with headrace.offload(model, Prefetch(2, 1, 2, ("ALL_MODEL_PARAMS",))) as handle:
        yield handle


def all_ended(asked: list[Request]) -> bool:
    return all(each.has_ended or each.error for each in asked)


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_served_tokens_are_those_of_generate(model: Any, is_offloaded: bool) -> None:
    """In float32, in which rows that run together choose the same tokens; more requests than rows."""
    prompts = [
        torch.randint(1, 512, (length,)).tolist() for length in (5, 230, 17, 1, 90)
    ]  # one grows beyond the first part
    options = {"max_new_tokens": TOKENS, "do_sample": False}
    expected = [model.generate(torch.tensor([ids]).cuda(), **options)[0, len(ids) :].tolist() for ids in prompts]
    assert len({tuple(each) for each in expected}) == len(prompts)
    with offloaded(model, is_offloaded) as handle:
        rows = Rows(model, 3, 512)
        engine = Engine(rows, model.device, 64, lambda _: None)
        engine.start()
        used = []
        for _ in range(3):
            asked = [Request(ids, TOKENS, (), transformers.LogitsProcessorList) for ids in prompts]
            for each in asked:
                engine.submit(each)
            assert eventually(partial(all_ended, asked), 120)
            assert [each.error for each in asked] == [None] * len(asked)
            assert [each.tokens for each in asked] == expected
            torch.cuda.empty_cache()  # prompts of experts by batched_mm take gigabytes
            used.append(torch.cuda.memory_reserved())
        engine.stop(30)
        assert rows.replays > 2 * TOKENS
        assert used[2] - used[0] < 64 << 20, "memory grows"
        if handle is not None:
            assert handle.stats().bytes_moved > 2 * TOKENS * handle.plan.moved_bytes > 0
        rows.release()


# cuDNN's does not repeat its bits beside other processes: docs/contracts.md, 1.
@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def test_one_row_has_the_bits_of_generate_in_graphs() -> None:
    """bfloat16: the same kernels on the same shapes."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen3Config(**SIZES), dtype=torch.bfloat16
        )
    model.eval().requires_grad_(False)
    ids = torch.randint(1, 512, (1, 40), device="cuda")
    graphs = headrace.decode_in_graphs(model)
    out = model.generate(ids, max_new_tokens=300, do_sample=False, return_dict_in_generate=True, output_logits=True)
    graphs.remove()
    rows, text = Rows(model, 4, 512), ids[0].tolist()
    found = [rows.prompts(0, [text])[0]]
    while len(found) < 300:
        found.append(rows.step([int(found[-1].argmax())], [len(text) + len(found) - 1])[0])
    assert rows.replays > 200
    assert [int(each.argmax()) for each in found] == out.sequences[0, 40:].tolist()
    differ = [at for at, (mine, theirs) in enumerate(zip(found, out.logits, strict=True)) if not mine.equal(theirs[0])]
    assert differ == []
