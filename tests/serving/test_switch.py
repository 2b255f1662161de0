"""The promise: several models take turns on one device; each answers as it does alone, none keeps the others out."""

from __future__ import annotations

import gc
import http.client
import json
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from checks import eventually
from headrace.api import Handle
from headrace.cli.demo_run import ModelSize, ensure_model
from headrace.config import Prefetch
from headrace.errors import BudgetError, LimitError
from headrace.graphs.cache_rows import Rows
from headrace.lifetime import host_copies, parking
from headrace.serving.listening import bind
from headrace.serving.switch import Hosted
from models import aligned
from servers import EVERY_LAYER, SMALL, Several, serving, serving_several

PROMPTS = ("Water", "The sea is", "x")
TOKENS = 8
SIZES = {
    "a": SMALL,
    "b": ModelSize(hidden=96, intermediate=256, layers=3, heads=2, key_value_heads=2),
    "c": ModelSize(hidden=64, intermediate=384, layers=2, heads=4, key_value_heads=2),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("switch") / name for name in SIZES}
    for name, folder in made.items():
        ensure_model(folder, SIZES[name])
    return made


@pytest.fixture(scope="module")
def two(folders: dict[str, Path]) -> dict[str, Path]:
    return {name: folders[name] for name in "ab"}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[tuple[str, str], str]:
    """What transformers alone answers, by model and prompt."""
    found = {}
    for name, folder in folders.items():
        model: Any = aligned(AutoModelForCausalLM.from_pretrained(folder).eval())
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            tokens = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0, ids.shape[1] :]
            found[name, prompt] = str(tokenizer.decode(tokens, skip_special_tokens=True))
    assert len(set(found.values())) > 2
    return found


def text_of(served: Several, name: str, prompt: str = "Water", **fields: Any) -> str:
    answer = served.complete(prompt, **{"model": name, "max_tokens": TOKENS, **fields})
    assert answer["model"] == name
    return str(answer["choices"][0]["text"])


def switches(served: Several) -> dict[str, float]:
    found = served.metrics()
    kinds = ("load", "resume", "park")
    return {kind: found.get(f'headrace_switch_seconds_count{{kind="{kind}"}}', 0) for kind in kinds}


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, served: Several, name: str) -> Iterator[threading.Event]:
    """Within, steps of one model wait for the event; others run."""
    mine, go, step = served.of(name).served, threading.Event(), Rows._step
    assert mine is not None
    rows = mine.engine.engine.rows

    def wait(self: Rows, *args: Any) -> Any:
        assert self is not rows or go.wait(60)
        return step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "_step", wait)
        try:
            yield go
        finally:
            go.set()


def long_request(pool: ThreadPoolExecutor, served: Several, name: str, **fields: Any) -> Any:
    """An answer that has begun."""
    key = f'headrace_running_requests{{model="{name}"}}'
    before = served.metrics()[key]
    answer = pool.submit(text_of, served, name, **fields)
    assert eventually(lambda: served.metrics()[key] > before, 60)
    return answer


def waits(served: Several, name: str, num: int = 1) -> bool:
    return eventually(lambda: served.switch.waiting_for(served.of(name)) == num, 60)


class TestAnswers:
    @pytest.mark.parametrize(
        "policy", [EVERY_LAYER, Prefetch(1, 1, 1, mode="disk"), "8MiB"], ids=["cpu", "disk", "resident"]
    )
    def test_are_those_of_each_alone(
        self, two: dict[str, Path], expected: dict[tuple[str, str], str], policy: Any
    ) -> None:
        with serving_several(two, policy) as served:
            assert served.state() == {"a": "running", "b": "parked"}
            before = {name: served.of(name).counts()["moved_bytes"] for name in "ab"}
            for at in range(12):
                name, prompt = "ab"[at % 2], PROMPTS[at % 3]
                assert text_of(served, name, prompt) == expected[name, prompt]
                assert served.state() == {each: "running" if each == name else "parked" for each in "ab"}
            for name in "ab":
                model = served.of(name)
                assert model.handle is not None
                is_moved = model.counts()["moved_bytes"] > before[name]
                assert is_moved or model.handle.plan.resident_bytes == model.handle.plan.weight_bytes > 0
            assert switches(served) == {"load": 0, "resume": 11, "park": 0}
            found = served.metrics()
            assert found['headrace_switch_seconds_sum{kind="resume"}'] > 0
            for name in "ab":
                assert found[f'headrace_generated_tokens_total{{model="{name}"}}'] == 6 * TOKENS
                assert found[f'headrace_on_device{{model="{name}"}}'] == (name == "b")

    def test_from_their_files_where_host_memory_is_short(
        self, folders: dict[str, Path], expected: dict[tuple[str, str], str]
    ) -> None:
        """Room for two of three: the one that was used least recently is released, and nothing of it stays."""
        with serving_several(folders, EVERY_LAYER, host_bytes=10, limit=20) as served:
            assert served.state() == {"a": "running", "b": "parked", "c": "unloaded"}
            gone = weakref.ref(served.of("b").served.model)  # type: ignore[union-attr]
            assert text_of(served, "c") == expected["c", "Water"]
            assert served.state() == {"a": "parked", "b": "unloaded", "c": "running"}
            assert gone() is None
            assert text_of(served, "a") == expected["a", "Water"]
            assert text_of(served, "b") == expected["b", "Water"]
            assert served.state() == {"a": "parked", "b": "running", "c": "unloaded"}
            assert switches(served) == {"load": 2, "resume": 1, "park": 0}
            found = served.metrics()  # of engines that it has had
            assert found['headrace_generated_tokens_total{model="c"}'] == TOKENS
            assert found['headrace_moved_bytes_total{model="c"}'] > 0

    def test_one_that_fits_no_other_beside_it(self, two: dict[str, Path], expected: dict[tuple[str, str], str]) -> None:
        with serving_several(two, EVERY_LAYER, host_bytes=10, limit=5) as served:
            for name in "abab":
                assert text_of(served, name) == expected[name, "Water"]
                assert served.state() == {each: "running" if each == name else "unloaded" for each in "ab"}
            assert switches(served)["load"] == 3

    def test_of_many_clients(self, folders: dict[str, Path], expected: dict[tuple[str, str], str]) -> None:
        """Of all models at once: every request is answered, and models take turns, not requests."""
        with serving_several(folders, EVERY_LAYER, host_bytes=10, limit=20, after_s=0) as served:
            asked = [(name, prompt) for _ in range(4) for name in folders for prompt in PROMPTS]
            with ThreadPoolExecutor(len(asked)) as pool:
                answers = list(pool.map(lambda each: text_of(served, *each), asked))
            assert answers == [expected[each] for each in asked]
            assert sum(switches(served).values()) < len(asked)


class TestTurns:
    def test_a_switch_lets_running_requests_end(
        self, two: dict[str, Path], expected: dict[tuple[str, str], str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with (
            serving_several(two, EVERY_LAYER) as served,
            ThreadPoolExecutor(4) as pool,
            held(monkeypatch, served, "a") as go,
        ):
            first = long_request(pool, served, "a")
            other = pool.submit(text_of, served, "b")
            assert waits(served, "b")
            assert served.metrics()['headrace_switch_requests{model="b"}'] == 1
            second = pool.submit(text_of, served, "a", "x")  # the turn has not been too long yet
            assert eventually(lambda: served.metrics()['headrace_waiting_requests{model="a"}'] == 1, 60)
            assert served.state() == {"a": "running", "b": "parked"}
            assert not other.done()
            go.set()
            answers = [each.result(60) for each in (first, second, other)]
        assert answers == [expected["a", "Water"], expected["a", "x"], expected["b", "Water"]]

    def test_a_turn_ends(
        self, two: dict[str, Path], expected: dict[tuple[str, str], str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A request of the running model that comes later than ``switch_after`` waits behind the other's."""
        order: list[str] = []

        def ask(served: Several, name: str, prompt: str) -> str:
            text = text_of(served, name, prompt)
            order.append(name + prompt)
            return text

        with (
            serving_several(two, EVERY_LAYER, after_s=0.2) as served,
            ThreadPoolExecutor(4) as pool,
            held(monkeypatch, served, "a") as go,
        ):
            first = long_request(pool, served, "a")
            other = pool.submit(ask, served, "b", "Water")
            assert waits(served, "b")
            time.sleep(0.3)
            late = pool.submit(ask, served, "a", "x")
            assert waits(served, "a")
            go.set()
            assert first.result(60) == expected["a", "Water"]
            assert other.result(60) == expected["b", "Water"]
            assert late.result(60) == expected["a", "x"]
        assert order == ["bWater", "ax"]

    def test_two_that_are_always_wanted(self, two: dict[str, Path]) -> None:
        """Neither keeps the other out."""
        with serving_several(two, EVERY_LAYER, after_s=0.5) as served:
            end, done = time.monotonic() + 5, {"a": 0, "b": 0}

            def ask(name: str) -> None:
                while time.monotonic() < end:
                    text_of(served, name)
                    done[name] += 1

            with ThreadPoolExecutor(4) as pool:
                list(pool.map(ask, "aabb"))
            made = sum(switches(served).values())
            assert made > 2
            assert min(done.values()) > made / 2 - 2

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_leaves_while_it_waits(
        self, two: dict[str, Path], monkeypatch: pytest.MonkeyPatch, stream: bool
    ) -> None:
        with (
            serving_several(two, EVERY_LAYER, after_s=0) as served,
            ThreadPoolExecutor(2) as pool,
            held(monkeypatch, served, "a") as go,
        ):
            first = long_request(pool, served, "a")
            address = http.client.urlsplit(served.url)
            connection = http.client.HTTPConnection(str(address.hostname), address.port)
            body = json.dumps({"model": "b", "prompt": "hi", "stream": stream})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            assert waits(served, "b")
            held_back = pool.submit(text_of, served, "a")
            assert waits(served, "a")
            connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()
            assert waits(served, "b", 0)
            assert waits(served, "a", 0)  # which nothing holds back any more
            go.set()
            first.result(60)
            held_back.result(60)
            assert served.state() == {"a": "running", "b": "parked"}
            assert sum(switches(served).values()) == 0
            assert text_of(served, "b")

    def test_too_many_wait(self, two: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        with (
            serving_several(two, EVERY_LAYER, max_waiting=2) as served,
            ThreadPoolExecutor(4) as pool,
            held(monkeypatch, served, "a") as go,
        ):
            first = long_request(pool, served, "a")
            waiting = pool.submit(served.send, "/v1/completions", {"model": "b", "prompt": "hi", "n": 2})
            assert waits(served, "b", 2)
            status, text = served.send("/v1/completions", {"model": "b", "prompt": "hi"})
            assert status == 429
            assert "2 requests wait for 'b', the limit of --max-queue" in text
            go.set()
            first.result(60)
            assert waiting.result()[0] == 200

    def test_a_client_that_reads_nothing_does_not_keep_the_device(
        self, two: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its answer fills the buffers of the socket, and stays there."""

        def small(*address: Any) -> socket.socket:
            bound = bind(*address)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            return bound

        monkeypatch.setattr("servers.bind", small)
        with serving_several(two, EVERY_LAYER, longest=400) as served, socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            address = http.client.urlsplit(served.url)
            connection.connect((address.hostname, address.port))
            fields = {"model": "a", "prompt": "hi", "max_tokens": 300, "stream": True, "ignore_eos": True}
            body = json.dumps({**fields, "n": 4}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert eventually(lambda: served.metrics()['headrace_running_requests{model="a"}'] == 4, 60)
            assert text_of(served, "b")
            running = served.of("a").served
            assert running is not None
            assert not running.engine.is_busy
            assert served.metrics().get('headrace_requests_total{path="/v1/completions",status="200"}') == 1


class TestErrors:
    def test_names(self, two: dict[str, Path]) -> None:
        with serving_several(two, EVERY_LAYER) as served:
            for path in ("/v1/completions", "/v1/messages"):
                status, text = served.send(path, {"model": "gpt", "prompt": "hi"})
                assert (status, "model 'gpt' is not served here, 'a', 'b' are" in text) == (404, True)
            for fields in ({}, {"model": 5}, {"model": None}):
                status, text = served.send("/v1/completions", {"prompt": "hi", **fields})
                assert (status, "model: expected one of 'a', 'b', found" in text) == (400, True)
            assert served.send("/v1/models/gpt")[0] == served.send("/v1/models/gpt/park", {})[0] == 404
            assert json.loads(served.send("/v1/models/b")[1])["state"] == "parked"

    def test_a_wrong_request_is_no_reason_to_switch(self, two: dict[str, Path]) -> None:
        with serving_several(two, EVERY_LAYER) as served:
            assert served.send("/v1/completions", {"model": "b", "prompt": "hi", "temperature": 9})[0] == 400
            assert served.send("/v1/chat/completions", {"model": "b", "messages": []})[0] == 404
            assert served.state()["a"] == "running"
            assert sum(switches(served).values()) == 0

    def test_a_model_that_cannot_be_loaded(
        self, folders: dict[str, Path], expected: dict[tuple[str, str], str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with serving_several(folders, EVERY_LAYER, host_bytes=10, limit=20) as served:
            model, real = served.of("c"), served.of("c").load
            monkeypatch.setattr(model, "load", lambda progress: (_ for _ in ()).throw(OSError("no such disk")))
            with ThreadPoolExecutor(3) as pool:
                answers = list(pool.map(lambda _: served.send("/v1/completions", {"model": "c", "prompt": "x"}), "123"))
            why = "load of 'c' failed, and its next request tries it again: OSError: no such disk"
            assert {status for status, _ in answers} == {503}
            assert all(why in json.loads(text)["error"]["message"] for _, text in answers)
            status, text = served.send("/health")
            assert (status, json.loads(text)) == (200, {"status": "degraded", "problems": {"c": why}})
            assert json.loads(served.send("/v1/models/c")[1])["error"] == why
            assert served.metrics()['headrace_alive{model="c"}'] == 0
            for name in "ab":
                assert text_of(served, name) == expected[name, "Water"]
            monkeypatch.setattr(model, "load", real)
            assert text_of(served, "c") == expected["c", "Water"]
            assert json.loads(served.send("/health")[1]) == {"status": "ok"}

    def test_a_model_that_cannot_resume(
        self, two: dict[str, Path], expected: dict[tuple[str, str], str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with serving_several(two, EVERY_LAYER) as served:
            with monkeypatch.context() as patch:
                mine, resume = served.of("b").handle, Handle.resume

                def fail(handle: Handle) -> int:
                    if handle is mine:
                        raise BudgetError("cuda:0 has no room", 1)
                    return resume(handle)

                patch.setattr(Handle, "resume", fail)
                status, text = served.send("/v1/completions", {"model": "b", "prompt": "hi"})
                assert (status, "resume of 'b' failed" in text, "cuda:0 has no room" in text) == (503, True, True)
                assert text_of(served, "a") == expected["a", "Water"]
            assert text_of(served, "b") == expected["b", "Water"]

    def test_a_model_that_cannot_be_parked(
        self, two: dict[str, Path], expected: dict[tuple[str, str], str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its weights are in its files, too, and the other model has to run."""
        with serving_several(two, EVERY_LAYER) as served:
            with monkeypatch.context() as patch:
                error = LimitError("no host memory for the residents", "host memory", 2, 1)
                patch.setattr(Handle, "park", lambda *_, **__: (_ for _ in ()).throw(error))
                assert text_of(served, "b") == expected["b", "Water"]
                assert served.state() == {"a": "unloaded", "b": "running"}
            assert text_of(served, "a") == expected["a", "Water"]

    def test_host_memory_that_is_taken_meanwhile(
        self, folders: dict[str, Path], expected: dict[tuple[str, str], str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Others are released until the model fits."""
        with serving_several(folders, EVERY_LAYER) as served:
            model, real = served.of("b"), served.of("b").load
            assert real is not None
            text_of(served, "c")
            served.switch.running = None  # as if b had not fitted at the start
            model.release()

            def load(progress: Any) -> Any:
                if served.of("a").served is not None:
                    raise LimitError("no host memory", "host memory", 2, 1)
                return real(progress)

            monkeypatch.setattr(model, "load", load)
            assert text_of(served, "b") == expected["b", "Water"]
            assert served.state()["a"] == "unloaded"

    def test_a_dead_engine(
        self, two: dict[str, Path], expected: dict[tuple[str, str], str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with serving_several(two, EVERY_LAYER) as served:
            with monkeypatch.context() as patch:
                patch.setattr(Rows, "prompts", lambda *_: (_ for _ in ()).throw(SystemExit("gone")))
                status, text = served.send("/v1/completions", {"model": "a", "prompt": "hi"})
                assert (status, "the engine has ended: SystemExit: gone" in text) == (503, True)
                assert served.send("/health")[0] == 503
            assert text_of(served, "b") == expected["b", "Water"]
            assert json.loads(served.send("/health")[1])["status"] == "degraded"
            assert served.send("/v1/completions", {"model": "a", "prompt": "hi"})[0] == 503
            assert text_of(served, "b") == expected["b", "Water"]


class TestParking:
    def test_by_its_route(self, two: dict[str, Path], expected: dict[tuple[str, str], str]) -> None:
        headers = {"Authorization": "Bearer k"}
        with serving_several(two, EVERY_LAYER, key="k") as served:
            assert served.send("/v1/models/a/park", {})[0] == 401
            status, text = served.send("/v1/models/a/park", {}, headers)
            assert (status, json.loads(text)["state"]) == (200, "parked")
            assert served.switch.running is None
            assert json.loads(served.send("/v1/models/b/park", {}, headers)[1])["state"] == "parked"
            body = {"model": "a", "prompt": "Water", "max_tokens": TOKENS}
            status, text = served.send("/v1/completions", body, headers)
            assert json.loads(text)["choices"][0]["text"] == expected["a", "Water"]
            assert switches(served) == {"load": 0, "resume": 1, "park": 1}

    def test_behind_what_runs(self, two: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        with (
            serving_several(two, EVERY_LAYER) as served,
            ThreadPoolExecutor(4) as pool,
            held(monkeypatch, served, "a") as go,
        ):
            first = long_request(pool, served, "a")
            parked = pool.submit(served.send, "/v1/models/a/park", {})
            assert waits(served, "a")
            other = pool.submit(text_of, served, "b")
            assert waits(served, "b")
            go.set()
            first.result(60)
            assert json.loads(parked.result(60)[1])["state"] == "parked"
            assert other.result(60)
            assert served.state() == {"a": "parked", "b": "running"}

    @pytest.mark.parametrize("keep_alive", [0, "0s", "50ms", 0.05])
    def test_after_a_request(self, two: dict[str, Path], expected: dict[tuple[str, str], str], keep_alive: Any) -> None:
        with serving_several(two, EVERY_LAYER) as served:
            for _ in range(3):
                assert text_of(served, "a", keep_alive=keep_alive) == expected["a", "Water"]
                assert eventually(lambda: served.state() == {"a": "parked", "b": "parked"}, 60)
            assert eventually(lambda: switches(served) == {"load": 0, "resume": 2, "park": 3}, 60)

    def test_the_last_request_decides(self, two: dict[str, Path]) -> None:
        with serving_several(two, EVERY_LAYER) as served:
            for later in ({}, {"keep_alive": -1}, {"keep_alive": "5m"}):
                text_of(served, "a", keep_alive="300ms")
                text_of(served, "a", **later)
                time.sleep(0.5)
                assert served.state()["a"] == "running"

    def test_a_later_request_ends_the_wait_of_the_one_before(self, two: dict[str, Path]) -> None:
        with serving_several(two, EVERY_LAYER) as served:
            model, waits = served.of("a"), list[Any]()
            for keep_alive in ("1h", "2h", None):
                text_of(served, "a", keep_alive=keep_alive)
                assert eventually(lambda: not model.is_busy and model.expiry is not None, 10)
                waits.append(model.expiry)
            assert eventually(lambda: all(each.cancelled() for each in waits), 10)  # no timer keeps the model

    def test_one_model(self, folders: dict[str, Path], expected: dict[tuple[str, str], str]) -> None:
        with serving(folders["a"], EVERY_LAYER) as served:
            for fields in ({"keep_alive": 0}, {}):
                answer = served.complete("Water", max_tokens=TOKENS, **fields)
                assert answer["choices"][0]["text"] == expected["a", "Water"]
                if fields:
                    assert eventually(lambda: "parked" in repr(served.handle), 60)
            assert "parked" not in repr(served.handle)
            assert json.loads(served.send("/v1/models/tiny/park", {})[1])["state"] == "parked"
            assert "parked" in repr(served.handle)

    @pytest.mark.parametrize("place", [(host_copies, "read_limits"), (parking, "free_slots")])
    def test_one_model_that_cannot_be_parked(
        self, place: tuple[Any, str], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It runs on, and the next request tries it again."""
        real = getattr(*place)

        def fail_once(*_: Any, **__: Any) -> None:
            monkeypatch.setattr(*place, real)
            raise LimitError("no host memory for the residents", "host memory", 2, 1)

        with serving(folders["a"], EVERY_LAYER) as served:
            monkeypatch.setattr(*place, fail_once)
            status, text = served.send("/v1/models/tiny/park", {})
            assert (status, "park of 'tiny' failed" in text) == (503, True)
            found = json.loads(served.send("/v1/models/tiny")[1])
            assert (found["state"], "error" in found) == ("running", False)
            assert json.loads(served.send("/health")[1]) == {"status": "ok"}
            assert served.complete("Water", max_tokens=2)
            assert json.loads(served.send("/v1/models/tiny/park", {})[1])["state"] == "parked"
            assert "parked" in repr(served.handle)

    def test_frees_the_cache(self, two: dict[str, Path]) -> None:
        with serving_several(two, EVERY_LAYER) as served:
            text_of(served, "a")
            caches = [weakref.ref(layer) for layer in _rows(served.of("a"))._layers]
            text_of(served, "b")
            gc.collect()
            assert [cache() for cache in caches] == [None, None]
            assert not any(layer.is_initialized for layer in _rows(served.of("a"))._layers)


def _rows(model: Hosted) -> Rows:
    assert model.served is not None
    return model.served.engine.engine.rows


@pytest.mark.parametrize("what", ["load", "resume"])
def test_a_stop_in_a_switch(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The request that waits fails, and the load ends with the next piece that is read."""
    begun = threading.Event()
    with serving_several(folders, EVERY_LAYER, host_bytes=10, limit=20) as served, ThreadPoolExecutor(1) as pool:
        model = served.of("c" if what == "load" else "b")

        def slow(*_: Any) -> Any:
            begun.set()
            for _ in range(600):
                time.sleep(0.1)
                served.switch._on_progress(0, 1)

        if what == "load":
            monkeypatch.setattr(model, "load", slow)
        else:
            monkeypatch.setattr(Handle, "resume", slow)
        answer = pool.submit(served.send, "/v1/completions", {"model": model.names[0], "prompt": "hi"})
        assert begun.wait(60)
        served.switch.stop()
        status, text = answer.result(60)
        assert (status, "the server stops" in text) == (503, True)
