"""Two models behind one port: from a request for the one that is parked to its first token.

    python benchmarks/switching.py --out FILE              on a GPU that can build each of the models
    python benchmarks/switching.py --device cpu --tiny     tries the script

Qwen3-8B, resident, and Qwen3-30B-A3B, with experts cached, on a GPU of which ``--card`` (24 GB) are left, less what is
no weights (``--reserve``). Each answers one prompt alone; then requests alternate, so that each is a switch: the other
model is parked, this one resumes, and its prompt runs. A request is timed by its client, up to the first token.

    floor = bytes that resuming copies before the prompt runs / link

``bit_equal``: every answer is that of the model alone. ``device_growth_bytes`` and ``host_growth_bytes``: medians of
what is in use after the last fifth of the switches, less those of the second fifth; of the device also while all are
parked, beside what was in use before any model was loaded (``parked_device_bytes``).
"""

from __future__ import annotations

import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from transformers import GenerationConfig, PreTrainedTokenizerFast

import headrace
from card_24gb import MODELS, Card, Rehearsal, add_card_arguments, free_memory, rehearsals, rest_on_host
from harness import finish, kept, link_bytes_per_s, parser_of
from headrace.config import Budget
from headrace.memory.system import rss_bytes
from headrace.model.inventory import take_inventory
from headrace.serving.app import App
from headrace.serving.async_engine import AsyncEngine
from headrace.serving.endpoint import ServedModel
from headrace.serving.listening import bind
from headrace.serving.switch import Hosted, Switch
from seeded_models import write_words

PROMPT, LONGEST, ROWS = 64, 512, 4
SWITCHES = 'headrace_switch_seconds_sum{kind="resume"}'


class Model:
    """One of the two, in host memory until it is offloaded."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.name, self._rehearsal = rehearsal.name, rehearsal
        self.module = rehearsal.build()
        self.module.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        rest_on_host(self.module)
        self.weight_bytes = take_inventory(self.module).num_bytes
        with tempfile.TemporaryDirectory() as folder:
            write_words(Path(folder), self.module.config.vocab_size)
            self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        generator = torch.Generator().manual_seed(PROMPT)
        self.prompt = torch.randint(1, self.module.config.vocab_size, (PROMPT,), generator=generator).tolist()

    def offload(self) -> None:
        """On the device, within the card."""
        given = self._rehearsal
        rules = MODELS[self.name].rules.get("cache", ()) if given.device.type == "cuda" else ()
        num_bytes = self.weight_bytes // 2 if given.tiny else given.card_bytes - given.reserve_bytes
        self.handle = headrace.offload(self.module, Budget(num_bytes, rules=rules), device=given.device)

    def hosted(self) -> Hosted:
        """With an engine of its own."""
        served = ServedModel(self.module, self._tokenizer, [self.name], AsyncEngine(self.module, ROWS, LONGEST, 64))
        return Hosted([self.name], LONGEST, served=served, handle=self.handle)


@contextmanager
def port_of(switch: Switch) -> Iterator[int]:
    """The port of a server in a thread."""
    bound = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(App(switch, None), log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        bound.close()


def ask(port: int, model: Model, num_tokens: int) -> tuple[float, str]:
    """Seconds to the first token, and the answer."""
    connection, text, first_s = http.client.HTTPConnection("127.0.0.1", port, timeout=500), "", 0.0
    body = {"model": model.name, "prompt": model.prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    begin = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"])
            text += "".join(choice["text"] for choice in event["choices"])
            first_s = first_s or time.perf_counter() - begin
    connection.close()
    return first_s, text


def switch_seconds(port: int) -> float:
    """Of all switches so far, by the server's metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(SWITCHES)), 0.0)


def used_bytes(device: torch.device) -> int:
    """Memory of the device in use, by whatever program; of a CPU none."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def growth(samples: Sequence[int]) -> int:
    """The median of the last fifth less that of the second one."""
    fifth = max(1, len(samples) // 5)
    return int(statistics.median(samples[-fifth:]) - statistics.median(samples[fifth : 2 * fifth] or samples))


def switched(port: int, models: Sequence[Model], alone: Mapping[str, str], num: int, tokens: int) -> Iterator[Any]:
    """A row per switch; the first of them goes to the second model."""
    device = models[0].module.device
    for at in range(num):
        model, before_s = models[1 - at % 2], switch_seconds(port)
        first_s, text = ask(port, model, tokens)
        moved = model.handle.plan.resident_bytes
        yield {
            "table": "switches", "case": f"to {model.name}", "model": model.name, "at": at, "ms": first_s * 1e3,
            "switch_ms": (switch_seconds(port) - before_s) * 1e3, "bytes_moved": moved,
            "bit_equal": text == alone[model.name], "device_bytes": used_bytes(device), "host_bytes": rss_bytes(),
        }  # fmt: skip


def summary(rows: Sequence[Mapping[str, Any]], parked_bytes: int, link: float, device: str) -> Iterator[dict[str, Any]]:
    """A row per model, the last row of each being its newest."""
    grown = {f"{name}_growth_bytes": growth([row[f"{name}_bytes"] for row in rows]) for name in ("device", "host")}
    for case in sorted({row["case"] for row in rows}):
        mine = [row for row in rows if row["case"] == case]
        times = [row["ms"] for row in mine]
        yield {
            "table": "switching", "case": case, "model": mine[0]["model"], "device": device, "switches": len(mine),
            "ms": statistics.median(times), "least_ms": min(times), "most_ms": max(times),
            "switch_ms": statistics.median(row["switch_ms"] for row in mine), "link_gb_per_s": link / 1e9,
            "floor_ms": mine[0]["bytes_moved"] / link * 1e3, "bytes_moved": mine[0]["bytes_moved"],
            "bit_equal": all(row["bit_equal"] for row in mine), "parked_device_bytes": parked_bytes, **grown,
        }  # fmt: skip


def run(given: Sequence[Rehearsal], num: int, tokens: int) -> Iterator[dict[str, Any]]:
    """A row per switch, and then the summaries."""
    device, alone, found = given[0].device, dict[str, str](), list[dict[str, Any]]()
    link, models = link_bytes_per_s(device, 5), [Model(each) for each in given]
    with Card(given[0].card_bytes, device):
        before = used_bytes(device)
        for model in reversed(models):
            model.offload()
            moved = model.handle.stats().bytes_moved
            with port_of(Switch([model.hosted()], 64)) as port:
                alone[model.name] = ask(port, model, tokens)[1]
            if not model.handle.plan.resident_bytes and model.handle.stats().bytes_moved == moved:
                raise RuntimeError(f"{model.name}: nothing was offloaded, and nothing is resident")
            if model is not models[0]:
                model.handle.park()
        with port_of(Switch([model.hosted() for model in models], 64)) as port:
            for row in switched(port, models, alone, num, tokens):
                found.append(row)
                yield row
        for model in models:
            model.handle.park()
        free_memory(device)
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        yield from summary(found, used_bytes(device) - before, link, kind)


def describe(row: Mapping[str, Any]) -> str:
    """One line about a result."""
    bits = "same answers" if row["bit_equal"] else "OTHER ANSWERS"
    if row["table"] == "switches":
        return (
            f"{row['at']:4} {row['case']:<18} first token {row['ms']:8.1f} ms, switch {row['switch_ms']:8.1f}  {bits}"
        )
    return (
        f"{row['case']:<18} {row['switches']} switches: first token {row['ms']:.1f} ms ({row['least_ms']:.1f} to "
        f"{row['most_ms']:.1f}), the switch {row['switch_ms']:.1f}, floor {row['floor_ms']:.1f}; device "
        f"{row['device_growth_bytes'] / 2**20:+.1f} MiB, host {row['host_growth_bytes'] / 2**20:+.1f} MiB, all parked "
        f"{row['parked_device_bytes'] / 2**20:+.1f} MiB of device memory  {bits}"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--switches", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=16, help="new ones of each request")
    add_card_arguments(parser)
    given = parser.parse_args()
    given.models = ["qwen3-8b", "qwen3-30b-a3b"]
    rows = run(list(rehearsals(given, ["graphs"])), given.switches, given.tokens)
    finish("switching", list(kept(rows, describe, given.out)))


if __name__ == "__main__":
    main()
