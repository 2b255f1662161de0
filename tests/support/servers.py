"""A server of headrace's in a thread of the test process."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import uvicorn
from transformers import AutoTokenizer

from headrace.adapters.transformers import load
from headrace.api import Handle
from headrace.cli.demo_run import ModelSize
from headrace.config import Policy, Prefetch
from headrace.serving.app import App
from headrace.serving.async_engine import AsyncEngine
from headrace.serving.endpoint import ServedModel
from headrace.serving.engine import Engine
from headrace.serving.listening import bind
from headrace.serving.switch import Hosted, Switch
from headrace.stores.store import Progress

NAME = "tiny"
# For tests of requests, to which the model is only what takes time.
SMALL = ModelSize(hidden=64, intermediate=256, layers=2, heads=2, key_value_heads=1)
EVERY_LAYER = Prefetch(1, 1, 1)


@dataclass
class Client:
    """A running server, as its clients see it."""

    url: str

    def client(self, key: str = "none") -> Any:
        from openai import OpenAI  # on demand, as it takes half a second in each process of the tests

        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def send(self, path: str, body: object = None, headers: dict[str, str] | None = None) -> tuple[int, str]:
        """Status and text of one request; a body that is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(f"{self.url}{path}", data, given)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def complete(self, prompt: str, **fields: Any) -> dict[str, Any]:
        status, text = self.send("/v1/completions", {"prompt": prompt, **fields})
        assert status == 200, text
        return json.loads(text)  # type: ignore[no-any-return]

    def metrics(self) -> dict[str, float]:
        status, text = self.send("/metrics")
        assert status == 200
        lines = [line for line in text.splitlines() if not line.startswith("#") and "_created" not in line]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@dataclass
class Served(Client):
    """A running server of one model."""

    handle: Handle
    engine: Engine
    running: dict[Any, Any]  # answers that have not ended
    tokenizer: Any
    model: Any
    folder: Path


@dataclass
class Several(Client):
    """A running server of several models."""

    switch: Switch

    def state(self) -> dict[str, str]:
        return {each["id"]: each["state"] for each in json.loads(self.send("/v1/models")[1])["data"]}

    def of(self, name: str) -> Hosted:
        return self.switch.find(name)


@contextmanager
def serving(
    folder: Path, policy: Policy | str, *, sequences: int = 4, longest: int = 256, max_waiting: int = 64,
    key: str | None = None, cors: bool = False, hosts: Collection[str] = (),
) -> Iterator[Served]:  # fmt: skip
    """A server of the model in ``folder``, offloaded as ``policy`` says, on a free port."""
    model, handle = load(folder, policy, device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = AsyncEngine(model, sequences, longest, max_waiting)
    switch = Switch.of(ServedModel(model, tokenizer, [NAME, "alias"], engine), handle)
    try:
        with listening(App(switch, key, cors, hosts)) as url:
            yield Served(url, handle, engine.engine, engine._running, tokenizer, model, folder)
    finally:
        handle.remove()


@contextmanager
def serving_several(
    folders: Mapping[str, Path], policy: Policy | str, *, host_bytes: int = 0, limit: float = inf,
    after_s: float = 10.0, longest: int = 256, max_waiting: int = 64, key: str | None = None, device: str = "cpu",
) -> Iterator[Several]:  # fmt: skip
    """A server of the models in ``folders``, by name, of which the first is on the device."""

    def host(name: str, folder: Path) -> Hosted:
        def load_it(progress: Progress) -> tuple[ServedModel, Handle]:
            model, handle = load(folder, policy, device=device, progress=progress)
            engine = AsyncEngine(model, 4, longest, max_waiting)
            return ServedModel(model, AutoTokenizer.from_pretrained(folder), [name], engine), handle

        return Hosted([name], longest, load_it, host_bytes)

    switch = Switch([host(*each) for each in folders.items()], max_waiting, limit, after_s)
    for each in reversed(switch.first()):
        switch.bring(each, lambda done, total: None)
    with listening(App(switch, key)) as url:
        yield Several(url, switch)


@contextmanager
def listening(app: App) -> Iterator[str]:
    """The address of ``app``, served by a thread."""
    bound = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        bound.close()
