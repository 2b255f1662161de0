"""Many requests to ``headrace serve`` at once, a third of which leave: answers, errors, memory.

    python benchmarks/served_soak.py --out FILE               on a GPU
    python benchmarks/served_soak.py --device cpu --tiny      tries the script

The model is Qwen3-8B of ``--layers`` layers, every fourth of which is offloaded, with the server of the command in a
thread. Clients are threads of another process. Rounds: ``--burst`` requests at once, twice, then ``--requests`` from
``--clients`` clients. Every third request closes its connection after its first token.

An answer is right if each of its tokens has the greatest logit of the resident model's, or one that is at most twice
``rounding`` below it: by so much the logits of the resident model itself differ between one row and ``NUM_ROWS``, since
products of another number of rows round in another order. ``shortfall`` is the most of all tokens; a token by chance
would have the whole height of the greatest logit (``height``).
``memory_mib``: of the process, and of the device, after each round and each third of the last.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

import headrace
from card_24gb import Rehearsal, add_card_arguments, free_memory, rehearsals, rest_on_host
from harness import finish, kept, parser_of
from headrace.config import Prefetch
from seeded_models import write_words
from served_steps import Served, prompts_of

NUM_ROWS, NUM_PROMPTS, PROMPT, NUM_TOKENS = 16, 32, 24, 8

CLIENT = """
import http.client, json, sys, threading
asked = json.loads(sys.stdin.read())
left, found, lock = list(range(asked["requests"])), [], threading.Lock()
def ask(at):
    connection = http.client.HTTPConnection("127.0.0.1", asked["port"], timeout=500)
    which = at % len(asked["prompts"])
    body = {"prompt": asked["prompts"][which], "max_tokens": asked["tokens"], "ignore_eos": True}
    body |= {"temperature": 0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer, text = connection.getresponse(), ""
    if answer.status != 200:
        return [which, answer.status, answer.read().decode()[:200]]
    for line in answer:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                return [which, 500, line.decode()[:200]]
            text += "".join(choice["text"] for choice in event.get("choices") or [])
            if at % 3 == 2:
                connection.close()
                return [which, 499, ""]
    return [which, 200, text]
def run():
    while True:
        with lock:
            if not left: return
            at = left.pop()
        try:
            one = ask(at)
        except Exception as error:
            one = [at % len(asked["prompts"]), 0, repr(error)]
        with lock: found.append(one)
threads = [threading.Thread(target=run) for _ in range(asked["clients"])]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(found))
"""


def memory_mib(device: torch.device) -> list[float]:
    """Of this process, and of the device."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    used = 0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
    return [int(line.split()[1]) / 1024, used / 2**20]


def logits_of(model: Any, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Of the places before each of the last ``NUM_TOKENS``: ``[texts, NUM_TOKENS, vocabulary]`` in float32."""
    ids = torch.tensor(texts, device=next(model.parameters()).device)
    with torch.inference_mode():
        logits: torch.Tensor = model(ids, use_cache=False).logits[:, -NUM_TOKENS - 1 : -1].float()
    return logits


def shortfalls(model: Any, texts: Sequence[Sequence[int]]) -> tuple[list[float], float, float]:
    """How far below the greatest logit each text's tokens are at most; what rounding alone moves; the height."""
    found, rounding, height = [], 0.0, 0.0
    for begin in range(0, len(texts), NUM_ROWS):
        some = texts[begin : begin + NUM_ROWS]
        together = logits_of(model, some)
        for row, text in enumerate(some):
            alone = logits_of(model, [text])[0]
            chosen = alone.gather(1, torch.tensor(text[-NUM_TOKENS:], device=alone.device)[:, None])[:, 0]
            found.append(float((alone.amax(1) - chosen).max()))
            rounding = max(rounding, float((together[row] - alone).abs().max()))
            height = max(height, float((alone.amax(1) - alone.mean(1)).max()))
    return found, rounding, height


def rows_of(rehearsal: Rehearsal, burst: int, requests: int, clients: int) -> Iterator[dict[str, Any]]:
    """One result per round."""
    device, model = rehearsal.device, rehearsal.build()
    vocabulary = model.config.vocab_size
    prompts = prompts_of(NUM_PROMPTS, PROMPT, vocabulary)
    answers: list[list[tuple[int, str]]] = []
    rows: list[dict[str, Any]] = []
    rest_on_host(model)
    handle = headrace.offload(model, Prefetch(4, 1, 2), device=device)
    with tempfile.TemporaryDirectory() as folder:
        write_words(Path(folder), vocabulary)
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    server = Served(model, handle, NUM_ROWS, PROMPT + NUM_TOKENS + 8, tokenizer, max_waiting=burst)
    thirds = [requests // 3] * 3
    cases = [("burst", burst, burst), ("burst", burst, burst), *(("soak", third, clients) for third in thirds)]
    for case, num, at_once in cases:
        moved, begin = handle.stats().bytes_moved, time.perf_counter()
        asked = {"port": server.port, "prompts": prompts, "requests": num, "clients": at_once, "tokens": NUM_TOKENS}
        done = subprocess.run(
            [sys.executable, "-c", CLIENT], input=json.dumps(asked), capture_output=True, text=True, check=True
        )
        found = json.loads(done.stdout)
        seconds = time.perf_counter() - begin
        statuses = Counter(status for _, status, _ in found)
        whole = [(which, text) for which, status, text in found if status == 200]
        answers.append(whole)
        failures = [text for _, status, text in found if status not in (200, 499)][:3]
        moved = handle.stats().bytes_moved - moved
        rows.append(
            {
                "table": "soak", "case": case, "requests": num, "clients": at_once, "seconds": seconds,
                "statuses": {str(key): value for key, value in sorted(statuses.items())}, "failures": failures,
                "generated_tokens": len(whole) * NUM_TOKENS, "moved_gb": moved / 1e9,
                "memory_mib": memory_mib(device), "layers": model.config.num_hidden_layers,
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            }
        )  # fmt: skip
    server.close()
    handle.remove()
    model.to(device)
    texts = {each: [*prompts[each[0]], *(int(word[1:]) for word in each[1].split())] for each in set(chain(*answers))}
    whole_texts = {each: text for each, text in texts.items() if len(text) == PROMPT + NUM_TOKENS}
    found_for, rounding, height = shortfalls(model, list(whole_texts.values()))
    shortfall_of = dict(zip(whole_texts, found_for, strict=True))
    for row, whole in zip(rows, answers, strict=True):
        row |= {
            "rounding": rounding,
            "height": height,
            "shortfall": max(shortfall_of.get(each, height) for each in whole),
        }
        row["wrong"] = sum(shortfall_of.get(each, height) > 2 * rounding for each in whole)
        row["bit_equal"] = not (row["wrong"] or row["failures"]) and row["moved_gb"] > 0
        yield row
    free_memory(device)


def describe(row: Mapping[str, Any]) -> str:
    """One line about a result."""
    host, device = row["memory_mib"]
    below = f"{row['wrong']} wrong, {row['shortfall']:.3f} below, rounding {row['rounding']:.3f} of {row['height']:.2f}"
    return (
        f"{row['case']:<6} {row['requests']:>5} requests of {row['clients']:>4} clients {row['seconds']:6.1f} s  "
        f"{row['statuses']}  {below}  host {host:.0f}, device {device:.0f} MiB  {row['failures'] or ''}"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--burst", type=int, default=500)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--clients", type=int, default=64)
    add_card_arguments(parser)
    parser.set_defaults(models=["qwen3-8b"], layers=12)
    given = parser.parse_args()
    results = [
        row
        for rehearsal in rehearsals(given, ["graphs"])
        for row in kept(rows_of(rehearsal, given.burst, given.requests, given.clients), describe, given.out)
    ]
    finish("served soak", results)


if __name__ == "__main__":
    main()
