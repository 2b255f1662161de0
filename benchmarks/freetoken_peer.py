"""Tokens per second of FreeToken 0.2.1 with a published shape, random weights, experts in host memory.

    PYTHONPATH=SITE:src:benchmarks python benchmarks/freetoken_peer.py --folder /dev/shm/freetoken --out FILE
    ... --model gpt-oss-120b --layers 18 --card 14GB      its experts in MXFP4, the rest in bf16

SITE holds the wheels freetoken 0.2.1, flashlib 0.4.0, apache-tvm-ffi 0.1.13.post3, pyzmq and msgpack, installed without
their dependencies. Under torch 2.11 its ``kernel/_pinned_tensor`` has to be built from its own source: built for 2.14,
it reads tensors by another layout.

The engine runs in this process (``freetoken.llm.LLM``) with dummy weights, experts in pinned host memory and its slots
on the device, of so many bytes that all fits ``--card``; once it has started, the rest of the device is held. Choices
of experts come from the seeded trace (``plan/routing_traces.py``), a row for each token, in prompts and in captured
graphs; the router's product remains. A token is the slope between answers of 8 and 136 tokens after a prompt of 16;
hits are those that the engine counts between the two. Each prompt of ``--prompts`` runs once before it is timed. With
``--strategy hybrid`` the CPU computes missed experts, too. ``--turns``: as in ``peers.py``. The engine initialises
CUDA, and nothing here may do so before it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import triton
import triton.language as tl

from headrace.plan.routing_traces import seeded_trace
from headrace.sizes import parse_size
from peers import PROMPTS, Turns
from published_configs import GPT_OSS_120B, MXFP4, QWEN3_30B_A3B
from seeded_models import write_config

MODELS = {  # config, and its key for the experts of a layer
    "qwen3-30b-a3b": (QWEN3_30B_A3B, "num_experts"),
    "gpt-oss-120b": ({**GPT_OSS_120B, "quantization_config": MXFP4}, "num_local_experts"),
}
CONTEXT, TRACE = 8448, 1024  # tokens of the KV cache; rows of the trace, from the beginning again at its end
SHORT, LONG, PROMPT, REPEATS = 8, 136, 16, 3


class Tokenizer:
    """Stands in for one: prompts are token ids, and no text is read."""

    eos_token_id = None

    def decode(self, *_: Any, **__: Any) -> str:
        return ""


def use_fast_weights() -> dict[Any, torch.Tensor]:
    """Have FreeToken copy its dummy weights from a few blocks, which are returned: its own fill uses one core."""
    from freetoken.engine import engine
    from freetoken.moe import expert_banks

    blocks: dict[Any, torch.Tensor] = {}
    made = engine._make_dummy_weight_state_dict

    def dense(*args: Any, **kwargs: Any) -> Any:
        state = made(*args, **kwargs)
        for weight in state.values():
            weight.fill_(1) if weight.dim() == 1 else weight.mul_(0.02)
        return state

    def fill(role: str, tensor: torch.Tensor) -> None:
        key = role, tensor.shape
        if key not in blocks:
            if tensor.dtype is not torch.uint8:
                block = torch.randn(tensor.shape, dtype=tensor.dtype, device="cuda") * 0.02
            elif role.endswith("_scale"):
                block = torch.full(tensor.shape, 120, dtype=torch.uint8)  # exponents of E8M0: 2 ** -7
            else:
                block = torch.randint(256, tensor.shape, dtype=torch.uint8, device="cuda")
            blocks[key] = block.cpu()
        tensor.copy_(blocks[key])

    engine._make_dummy_weight_state_dict, expert_banks._dummy_fill = dense, fill
    return blocks


class Replay:
    """Choices of each layer, from the trace: row after row, one a token."""

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        self._shape = layers, experts, top_k
        self._table: torch.Tensor | None = None

    def route(self, layer: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and experts of the tokens of a layer, [tokens, top_k] each."""
        layers, experts, top_k = self._shape
        if self._table is None:  # the first call is in the engine's warm-up, before a graph is captured
            rows: Any = np.stack([seeded_trace(each, TRACE, experts, top_k) for each in range(layers)])
            with torch.inference_mode(False):
                self._table = torch.from_numpy(rows).to("cuda", torch.int32)
                self._row = torch.zeros(1, dtype=torch.int64, device="cuda")
        ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device="cuda")
        weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device="cuda")
        count = num_tokens * top_k
        _replay_kernel[(-(-count // 512),)](self._table, self._row, ids, weights, count, layer, TRACE, top_k)
        if layer == layers - 1:
            self._row += num_tokens
        return weights, ids

    def install(self) -> None:
        """Have FreeToken's layers take these choices."""
        from freetoken.layers.moe import OffloadMoELayer
        from freetoken.models.gpt_oss.moe import GptOssOffloadMoELayer

        def forward(layer: Any, x: torch.Tensor, router_logits: Any = None) -> Any:
            return layer.routed_forward(x, *self.route(layer.layer_id, len(x)))

        OffloadMoELayer.forward = GptOssOffloadMoELayer.forward = forward


@triton.jit
def _replay_kernel(table, row, ids, weights, count, layer, rows, TOP_K: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * 512 + tl.arange(0, 512)
    token = (tl.load(row) + at // TOP_K) % rows
    choice = tl.load(table + (layer * rows + token) * TOP_K + at % TOP_K, mask=at < count)
    tl.store(ids + at, choice, mask=at < count)
    tl.store(weights + at, tl.full([512], 1 / TOP_K, tl.float32), mask=at < count)


def row_of(given: argparse.Namespace) -> dict[str, Any]:
    published, experts_key = MODELS[given.model]
    config = {**published, "num_hidden_layers": given.layers or published["num_hidden_layers"]}
    write_config(given.folder, config)
    layers, experts, top_k = (config[key] for key in ("num_hidden_layers", experts_key, "num_experts_per_tok"))
    hidden, head, groups = (config[key] for key in ("hidden_size", "head_dim", "num_key_value_heads"))
    attention = hidden * head * 2 * (config["num_attention_heads"] + groups)
    rest = 2 * (2 * config["vocab_size"] * hidden + layers * (attention + hidden * experts))
    rest += CONTEXT * layers * 2 * groups * head * 2  # KV cache

    import freetoken.scheduler.scheduler as scheduler
    from freetoken.core import SamplingParams
    from freetoken.llm import LLM

    scheduler.load_tokenizer = lambda _: Tokenizer()
    blocks, turns = use_fast_weights(), Turns(given.turns)
    Replay(layers, experts, top_k).install()
    before, begin = psutil.virtual_memory().available, time.perf_counter()
    llm = LLM(
        str(given.folder), use_dummy_weight=True, moe_strategy=given.strategy,
        moe_cache_mem=given.card - rest - given.reserve, num_token_override=CONTEXT, max_running_req=1,
        cuda_graph_bs=[1], cuda_graph_max_bs=1, attention_backend="triton", cache_type="naive",
        max_extend_tokens=8192, decode_log_interval=10**9, moe_collect_stats=True,
    )  # fmt: skip
    torch.cuda.synchronize()
    start_s = time.perf_counter() - begin
    blocks.clear()
    host_bytes = before - psutil.virtual_memory().available
    free, total = torch.cuda.mem_get_info()
    if total - free > given.card:
        raise RuntimeError(f"expected at most {given.card} bytes after the start, found {total - free}: --reserve more")
    held = torch.empty(total - given.card, dtype=torch.uint8, device="cuda")  # so that the engine lives in the card
    torch.cuda.reset_peak_memory_stats()
    made = random.Random(1)

    counts: Any = llm.engine.moe_offload_cache.lru_stats  # [layers, (choices, missed ones, calls)]

    def seconds(num_prompt: int, num_tokens: int) -> float:
        prompt = [made.randrange(config["vocab_size"]) for _ in range(num_prompt)]
        begin = time.perf_counter()
        (answer,) = llm.generate([prompt], SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens))
        if len(answer["token_ids"]) != num_tokens:
            raise RuntimeError(f"expected {num_tokens} tokens, found {len(answer['token_ids'])}")
        return time.perf_counter() - begin

    with turns.mine():
        for _ in range(2):
            seconds(PROMPT, LONG)
        pairs, used = [], torch.zeros(2, dtype=torch.int64)
        for _ in range(REPEATS):
            begun = counts.sum(0).cpu()
            short, between = seconds(PROMPT, SHORT), counts.sum(0).cpu()
            pairs.append((short, seconds(PROMPT, LONG)))
            used += (counts.sum(0).cpu() - 2 * between + begun)[:2]
        slopes = [(long - short) / (LONG - SHORT) * 1e3 for short, long in pairs]
        rates = {}
        for num in given.prompts:
            seconds(num, 1)
            rates[str(num)] = num / statistics.median(seconds(num, 1) for _ in range(REPEATS))
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    ms = statistics.median(slopes)
    return {
        "table": "peers", "peer": "FreeToken 0.2.1", "model": given.model, "layers": layers,
        "case": f"{given.strategy}, {llm.engine.moe_offload_cache.cache_size} of {layers * experts} experts in slots",
        "hits": 1 - (used[1] / used[0]).item(),
        "ms": ms, "tokens_per_s": 1e3 / ms, "spread_ms": max(slopes) - min(slopes), "prompt_tokens_per_s": rates,
        "start_s": start_s, "peak_device_bytes": torch.cuda.max_memory_reserved() + outside - held.nbytes,
        "card_bytes": given.card, "host_bytes": host_bytes, "device": torch.cuda.get_device_name(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/freetoken"))
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--card", type=parse_size, default=parse_size("24GB"), help="CUDA's own part included")
    parser.add_argument(
        "--reserve", type=parse_size, default=parse_size("2.5GB"), help="what is no weights, KV cache or slots"
    )
    parser.add_argument("--strategy", default="offload", choices=["offload", "hybrid", "cpu"])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prompts", type=int, nargs="*", default=PROMPTS)
    parser.add_argument("--turns", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one rank, and no name of this host to look up
    code = 0
    try:
        line = json.dumps(row_of(given))
        print(line, flush=True)
        if given.out is not None:
            with given.out.open("a") as file:
                file.write(line + "\n")
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)  # the engine's threads and pinned memory need no orderly end


if __name__ == "__main__":
    main()
