"""A step of ``headrace serve`` beside a token of ``generate``, of one model in one process, by turns.

    python benchmarks/served_steps.py --out FILE              on a GPU that can hold the models, as a reference
    python benchmarks/served_steps.py --device cpu --tiny     tries the script

The models are those of ``card_24gb.py``, with seeded weights. The server is the one of the command, in a thread; its
clients are threads of another process, which read streams. A step is the median of the times between two tokens of
all answers, of requests that arrived together; ``answer_ms`` is the time from the first to the last token of the answer
that took longest, by its number of tokens but one: prompts of the others are in it.

* ``resident``: 1, 4 and 16 requests at once; ``generate`` with caches for 512, 4,096 and 32,768 tokens, of which the
  text fills 192; and behind a text of 30,000 tokens.
* ``offloaded``: every fourth layer prefetched (Qwen3-8B), or experts cached in 24 GB (Qwen3-30B-A3B, whose routers
  follow a seeded trace); 1 and 16 requests, or 1.

    floor = max(resident step of as many requests, bytes that cross the link in a step / link)

``bit_equal``: the tokens of one request equal those of ``generate`` of the resident model in captured steps.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import uvicorn
from transformers import GenerationConfig, PreTrainedTokenizerFast

import headrace
from card_24gb import Card, Clock, Rehearsal, add_card_arguments, free_memory, rehearsals, rest_on_host
from decoder_models import FollowedTraces, routers
from harness import counts, finish, kept, link_bytes_per_s, parser_of, words_of
from headrace.model.inventory import take_inventory
from headrace.plan.routing_traces import seeded_trace
from headrace.serving.app import App
from headrace.serving.async_engine import AsyncEngine
from headrace.serving.endpoint import ServedModel
from headrace.serving.listening import bind
from headrace.serving.switch import Switch
from seeded_models import write_words

CASES = {"qwen3-8b": "every 4th layer", "qwen3-30b-a3b": "cache"}
CONTEXTS = [512, 4096, 32768]
PROMPT, LONG_PROMPT = 64, 30_000

CLIENT = """
import http.client, json, sys, threading, time
asked = json.loads(sys.stdin.read())
found = [None] * len(asked["prompts"])
def ask(at):
    connection = http.client.HTTPConnection("127.0.0.1", asked["port"], timeout=500)
    body = {"prompt": asked["prompts"][at], "max_tokens": asked["tokens"], "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    moments, text, used = [], "", 0
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        for choice in event.get("choices") or []:
            moments += [time.perf_counter()]
            text += choice["text"]
        used = (event.get("usage") or {}).get("completion_tokens", used)
    found[at] = {"moments": moments, "text": text, "tokens": used}
threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(found))]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(found))
"""


def prompts_of(num: int, length: int, vocabulary: int) -> list[list[int]]:
    """Different ones, the same in each run."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(1, vocabulary, (num, length), generator=generator).tolist()  # type: ignore[no-any-return]


class Served:
    """The server of a model, in a thread."""

    def __init__(
        self, model: Any, handle: headrace.Handle | None, num_rows: int, longest: int, tokenizer: Any,
        max_waiting: int = 64,
    ) -> None:  # fmt: skip
        self.engine = AsyncEngine(model, num_rows, longest, max_waiting)
        # Whole prompts run: traces of experts count the tokens that do.
        self.engine.engine._longest_prefix = lambda _: (0, 0)  # type: ignore[method-assign]
        app = App(Switch.of(ServedModel(model, tokenizer, ["model"], self.engine), handle), None)
        self._bound = bind("127.0.0.1", 0)
        self.port = self._bound.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._bound])))
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def step(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, float, list[list[int]]]:
        """Milliseconds of a step of all, of a token of the slowest answer, and the tokens of each."""
        asked = json.dumps({"port": self.port, "prompts": prompts, "tokens": num_tokens})
        done = subprocess.run([sys.executable, "-c", CLIENT], input=asked, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        if any(each["tokens"] != num_tokens for each in found):
            raise RuntimeError(f"expected {num_tokens} tokens of each, found {[each['tokens'] for each in found]}")
        gaps = [after - before for each in found for before, after in pairwise(each["moments"])]
        seconds = max(each["moments"][-1] - each["moments"][0] for each in found)
        tokens = [[int(word[1:]) for word in each["text"].split()] for each in found]
        return statistics.median(gaps) * 1e3, seconds / (num_tokens - 1) * 1e3, tokens

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._bound.close()
        self.engine.engine.rows.release()


class _Bench:
    """One model, resident or offloaded, as it is served and as it generates."""

    def __init__(self, model: Any, device: torch.device, num_tokens: int, longest: int, tokenizer: Any) -> None:
        self.model, self._device, self.num_tokens, self._tokenizer = model, device, num_tokens, tokenizer
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        traces = [
            seeded_trace(layer, longest, router.num_experts, router.top_k)
            for layer, router in enumerate(routers(model))
        ]
        self._routing = FollowedTraces(model, traces, device)

    def generate(self, prompt: Sequence[int], context: int, rounds: int) -> tuple[float, list[int]]:
        """Milliseconds of a token after the first, and the tokens; the first run is not timed."""
        graphs = headrace.decode_in_graphs(self.model, context) if self._device.type == "cuda" else None
        ids, found = torch.tensor([prompt], device=self._device), list[float]()
        try:
            for _ in range(rounds + 1):
                self._routing.restart()
                clock = Clock(lambda: None)
                out = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.num_tokens, streamer=clock
                )
                found.append(statistics.mean(clock.samples_ms()[1:]))
        finally:
            if graphs is not None:
                graphs.remove()
        return statistics.median(found[1:]), out[0, len(prompt) :].tolist()

    @contextmanager
    def served(self, handle: headrace.Handle | None, num_rows: int, longest: int) -> Iterator[Served]:
        """The server, for requests of this model."""
        running = Served(self.model, handle, num_rows, longest, self._tokenizer)
        try:
            yield running
        finally:
            running.close()

    def serve(self, server: Served, num: int, length: int, rounds: int) -> tuple[dict[str, float], list[list[int]]]:
        """Times of a step of ``num`` requests at once, and their tokens; the first run is not timed."""
        prompts, found = prompts_of(num, length, self.model.config.vocab_size), list[tuple[float, float]]()
        for _ in range(rounds + 1):
            self._routing.restart()
            *ms, tokens = server.step(prompts, self.num_tokens)
            found.append((ms[0], ms[1]))
        steps, answers = zip(*found[1:], strict=True)
        return {"ms": statistics.median(steps), "answer_ms": statistics.median(answers)}, tokens


def rows_of(
    rehearsal: Rehearsal, at_once: Sequence[int], contexts: Sequence[int], num_tokens: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """One result per case: of the resident model, then of the offloaded one."""
    device, name, case = rehearsal.device, rehearsal.name, CASES[rehearsal.name]
    if device.type == "cpu" and case == "cache":
        case = "budget"
    link, model = link_bytes_per_s(device, 5), rehearsal.build()
    has_experts = bool(routers(model))
    lengths = [PROMPT] if rehearsal.tiny or has_experts else [PROMPT, LONG_PROMPT]
    longest = max(lengths) + num_tokens + 8
    at_once = [1] if has_experts else at_once
    about = {"table": "served-steps", "model": name, "tokens": num_tokens, "link_gb_per_s": link / 1e9}
    about |= {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        write_words(Path(folder), model.config.vocab_size)
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    bench = _Bench(model, device, num_tokens, longest, tokenizer)
    (prompt,) = prompts_of(1, PROMPT, model.config.vocab_size)
    expected, resident = list[int](), dict[int, float]()

    for context in [PROMPT + num_tokens] if has_experts else contexts:
        ms, expected = bench.generate(prompt, context, rounds)
        yield about | {"case": "resident", "way": "generate", "at_once": 1, "context": context, "ms": ms}
    for length in lengths[1:]:
        ms, _ = bench.generate(prompts_of(1, length, model.config.vocab_size)[0], 0, 1)
        yield about | {"case": "resident", "way": "generate", "at_once": 1, "context": length, "ms": ms}
    with bench.served(None, max(at_once), longest) as server:
        for num in at_once:
            times, tokens = bench.serve(server, num, PROMPT, rounds)
            resident[num] = times["ms"]
            same = {"bit_equal": tokens[0] == expected} if num == 1 else {}
            yield about | {"case": "resident", "way": "serve", "at_once": num} | times | same
        for length in lengths[1:]:
            times, _ = bench.serve(server, 1, length, 1)
            yield about | {"case": "resident", "way": "serve", "at_once": 1, "context": length} | times
    del server  # and its cache

    rest_on_host(model)
    weight_bytes = take_inventory(model).num_bytes
    with Card(rehearsal.card_bytes, device):
        handle = headrace.offload(model, rehearsal.policy(case, weight_bytes), device=device)
        ms, tokens = bench.generate(prompt, 0, rounds)
        yield about | {"case": case, "way": "generate", "at_once": 1, "ms": ms, "bit_equal": tokens == expected}
        with bench.served(handle, max(at_once), PROMPT + num_tokens + 8) as server:  # the cache fits the card
            for num in at_once:
                if num not in (1, 16):
                    continue
                before = handle.stats().bytes_moved
                times, tokens = bench.serve(server, num, PROMPT, rounds)
                moved = (handle.stats().bytes_moved - before) / ((rounds + 1) * num_tokens)
                same = {"bit_equal": tokens[0] == expected and moved > 0} if num == 1 else {}
                floor = max(resident[num], moved / link * 1e3)
                row = {"case": case, "way": "serve", "at_once": num, "floor_ms": floor, "bytes_moved": moved}
                yield about | row | times | same
        handle.remove()
    del model, bench
    gc.collect()
    free_memory(device)


def describe(row: Mapping[str, Any]) -> str:
    """One line about a result."""
    floor = f", {row['ms'] / row['floor_ms']:.3f} x floor" if "floor_ms" in row else ""
    bits = ("  same tokens" if row["bit_equal"] else "  OTHER TOKENS") if "bit_equal" in row else ""
    about = f"{row['model']:<14} {row['case']:<16} {row['way']:<9} {row['at_once']:>3} at once"
    return f"{about}  context {row.get('context', '-')!s:>6}  {row['ms']:8.2f} ms{floor}{bits}"


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--models", type=words_of(list(CASES)), default=list(CASES))
    parser.add_argument("--at-once", type=counts, default=[1, 4, 16])
    parser.add_argument("--contexts", type=counts, default=CONTEXTS)
    parser.add_argument("--tokens", type=int, default=128, help="new ones of each request")
    add_card_arguments(parser)
    given = parser.parse_args()
    contexts = [512] if given.tiny else given.contexts
    results = [
        row
        for rehearsal in rehearsals(given, ["graphs"])
        for row in kept(rows_of(rehearsal, given.at_once, contexts, given.tokens, given.rounds), describe, given.out)
    ]
    finish("served steps", results)


if __name__ == "__main__":
    main()
