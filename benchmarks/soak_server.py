"""``headrace serve`` under load for minutes: does every well-formed request succeed, and does memory stay flat?

Clients send requests one after another: greedy and sampled, streamed or not, as texts and as chats, malformed,
oversized, with fields that would have no effect, and some leave before their answer. Greedy answers are compared with
``generate`` of the resident model on the same device, a GPU where there is one. Anything but an expected answer ends
the script with exit code 1, and so does memory, of the host or of the GPU, that grows by more than ``--growth-mib``
between the end of the first fifth and the end.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from headrace.cli.demo_run import ModelSize, ensure_model

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
PROMPTS = ["Water", "The sea is", "1, 2, 3, 4,", "x", "Höhe", "a" * 90]
TOKENS = 16
CONTEXT = 128
SIZE = ModelSize(hidden=128, intermediate=384, layers=4, heads=4, key_value_heads=2)
WRONG: list[tuple[bytes, int]] = [
    (b"{", 400),
    (b"[]", 400),
    (b"\xff", 400),
    (b"[" * 5000, 400),
    (b'{"prompt": "x", "n": 2}', 400),
    (b'{"prompt": "x", "logprobs": 5}', 400),
    (b'{"prompt": "x", "max_tokens": -1}', 400),
    (b'{"prompt": "x", "max_tokens": 100000}', 400),
    (b'{"prompt": "x", "temperature": 1e-30}', 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b'{"prompt": "' + b"a" * 5000 + b'"}', 400),
    (b'{"prompt": "' + b"a" * 3_000_000 + b'"}', 413),
    (b'{"prompt": "x", "model": "other"}', 404),
]


def expected_texts(folder: Path) -> dict[str, str]:
    """What the resident model says to every prompt, and to every chat, where the server computes, too."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).eval().to(device)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    texts = {}
    for prompt in PROMPTS:
        for key, text in ((prompt, prompt), (f"chat {prompt}", f"[user]{prompt}")):
            ids = tokenizer(text, return_tensors="pt").input_ids.to(device)
            with torch.no_grad():
                tokens = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0, ids.shape[1] :]
            texts[key] = tokenizer.decode(tokens, skip_special_tokens=True)
    return texts


@contextlib.contextmanager
def server(folder: Path, budget: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The running command and its port."""
    words = ["serve", str(folder), "--device-memory", budget, "--port", "0", "--context", str(CONTEXT)]
    words += ["--batch", "4", "--served-model-name", "m"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *words], stdout=subprocess.DEVNULL, stderr=log, text=True
        )
        try:
            found = None
            while found is None:
                if process.poll() is not None:
                    raise SystemExit("the server has ended: " + (log.seek(0) or log.read())[-2000:])
                time.sleep(0.2)
                log.seek(0)
                found = re.search(r"at http://127\.0\.0\.1:(\d+)/v1", log.read())
            yield process, int(found[1])
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def device_mib(process: int) -> float:
    """GPU memory of a process; 0 where it has none."""
    if shutil.which("nvidia-smi") is None:
        return 0.0
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return sum(float(used) for pid, used in (line.split(", ") for line in lines) if int(pid) == process)


class Client(threading.Thread):
    """Sends requests until ``end``; counts kinds of answers in ``counts``, and puts what is wrong into ``failures``."""

    def __init__(self, port: int, seed: int, texts: dict[str, str], end: float) -> None:
        super().__init__()
        self.port, self.texts, self.until = port, texts, end
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def run(self) -> None:
        kinds = {
            self.greedy: 8, self.streamed: 4, self.sampled: 2, self.seeded: 1, self.wrong: 4, self.leaving: 3,
        }  # fmt: skip
        while time.monotonic() < self.until and not self.failures:
            kind = self.random.choices(list(kinds), list(kinds.values()))[0]
            try:
                kind()
            except Exception as error:
                self.failures.append(f"{kind.__name__}: {type(error).__name__}: {error}")
            self.counts[kind.__name__] += 1

    def send(self, body: bytes | dict[str, Any], path: str = "/v1/completions") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            data = body if isinstance(body, bytes) else json.dumps(body)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a long body is refused while it is sent
                connection.request("POST", path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def expect(self, found: object, expected: object, what: str) -> None:
        if found != expected:
            self.failures.append(f"{what}: expected {expected!r}, found {found!r}")

    def asked(self) -> tuple[str, str, dict[str, Any]]:
        """A prompt's key, the path, and the body that asks for it."""
        prompt, fields = self.random.choice(PROMPTS), {"model": "m", "max_tokens": TOKENS}
        if self.random.random() < 0.5:
            return prompt, "/v1/completions", {**fields, "prompt": prompt}
        return f"chat {prompt}", "/v1/chat/completions", {**fields, "messages": [{"role": "user", "content": prompt}]}

    def greedy(self) -> None:
        key, path, body = self.asked()
        status, text = self.send(body, path)
        self.expect(status, 200, text)
        choice = json.loads(text)["choices"][0]
        self.expect(choice["message"]["content"] if "message" in choice else choice["text"], self.texts[key], key)

    def streamed(self) -> None:
        key, path, body = self.asked()
        status, text = self.send({**body, "stream": True, "stream_options": {"include_usage": True}}, path)
        self.expect(status, 200, text)
        *events, last = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        self.expect(last, "[DONE]", key)
        chunks = [json.loads(event) for event in events]
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        parts = [choice["delta"].get("content") if "delta" in choice else choice["text"] for choice in choices]
        got = "".join(filter(None, parts))
        # A stream ends before the bytes of a character that is not complete.
        self.expect(got, self.texts[key][: len(got)], key)
        self.expect(len(self.texts[key]) - len(got) <= 3, True, f"{key}: the length of the stream")
        self.expect(chunks[-1]["usage"]["completion_tokens"], TOKENS, key)

    def sampled(self) -> None:
        _, path, body = self.asked()
        status, text = self.send({**body, "temperature": 0.8}, path)
        self.expect(status, 200, text)
        self.expect(json.loads(text)["usage"]["completion_tokens"], TOKENS, "sampled")

    def seeded(self) -> None:
        body = {"prompt": "Water", "max_tokens": TOKENS, "temperature": 1.2, "seed": 5}
        answers = [json.loads(self.send(body)[1])["choices"][0]["text"] for _ in range(2)]
        self.expect(answers[0], answers[1], "a seed")

    def wrong(self) -> None:
        body, expected = self.random.choice(WRONG)
        status, text = self.send(body)
        self.expect(status, expected, f"{body[:60]!r}: {text[:200]}")

    def leaving(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        body = {"prompt": "Water", "max_tokens": 100, "stream": self.random.random() < 0.5}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        time.sleep(self.random.random() * 0.3)
        connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="how long (default 600)")
    parser.add_argument("--clients", type=int, default=8, help="at the same time (default 8)")
    parser.add_argument("--growth-mib", type=float, default=32, help="of memory that is no leak (default 32)")
    parser.add_argument("--out", type=Path, help="append the result to this file, as JSON")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-")) / "model"
    try:
        ensure_model(folder, SIZE)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        texts = expected_texts(folder)
        with server(folder, "4MiB") as (process, port):
            memory, begin = psutil.Process(process.pid), time.monotonic()
            clients = [Client(port, seed, texts, begin + arguments.seconds) for seed in range(arguments.clients)]
            for client in clients:
                client.start()
            sizes: list[tuple[float, float, float]] = []
            while any(client.is_alive() for client in clients):
                time.sleep(min(5, arguments.seconds / 20))
                rss = memory.memory_info().rss / 2**20
                sizes.append((time.monotonic() - begin, rss, device_mib(process.pid)))
            metrics = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            metrics.request("GET", "/metrics")
            text = metrics.getresponse().read().decode()
            seconds = time.monotonic() - begin
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)
    figures = dict(re.findall(r"^(headrace_\w+) (\S+)$", text, re.M))
    warm = next(index for index, (at, *_) in enumerate(sizes) if at >= seconds / 5)
    failures = [failure for client in clients for failure in client.failures]
    for column, kind in ((1, "host"), (2, "device")):
        first, last = sizes[warm][column], sizes[-1][column]
        if last - first > arguments.growth_mib:
            failures.append(f"{kind} memory grew from {first:.1f} to {last:.1f} MiB")
    for name in ("running_requests", "waiting_requests", "cache_reserved_tokens"):
        if float(figures[f"headrace_{name}"]):
            failures.append(f"{name} = {figures[f'headrace_{name}']} after the last request")
    if process.returncode != 0:
        failures.append(f"the server ended with exit code {process.returncode}")
    counts = sum((client.counts for client in clients), Counter[str]())
    result = {
        "case": "soak",
        "seconds": round(seconds, 1),
        "clients": arguments.clients,
        "requests": sum(counts.values()),
        **counts,
        "generated_tokens": int(float(figures["headrace_generated_tokens_total"])),
        "moved_gb": round(float(figures["headrace_moved_bytes_total"]) / 1e9, 3),
        "memory_mib": [round(rss, 1) for _, rss, _ in (sizes[0], *sizes[len(sizes) // 5 :: max(1, len(sizes) // 5)])],
        "last_memory_mib": round(sizes[-1][1], 1),
        "device_mib": [sizes[warm][2], sizes[-1][2]],
        "failures": failures,
    }
    print(json.dumps(result))
    if arguments.out is not None:
        with arguments.out.open("a") as file:
            file.write(json.dumps(result) + os.linesep)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
