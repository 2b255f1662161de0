"""The promise: a server that names errors, cancels requests of clients that have left, and reports its own state."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from checks import eventually, raising
from headrace.cli.demo_run import ensure_model
from headrace.serving.engine import Engine
from servers import EVERY_LAYER, NAME, SMALL, Served, serving

KEY = "s3cret"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.role }}"
    "{{ m.content }}{% endfor %}{{ greeting }}{{ number + 1 if number else '' }}{{ data | tojson if data else '' }}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model without a chat template."""
    plain = tmp_path_factory.mktemp("server") / "plain"
    ensure_model(plain, SMALL)
    return plain


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(folder, EVERY_LAYER, sequences=2, longest=256, max_waiting=2) as running:
        yield running


@pytest.fixture(scope="module")
def chatting(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same with a template that has variables."""
    chats = Path(shutil.copytree(folder, tmp_path_factory.mktemp("chats") / "model"))
    (chats / "chat_template.jinja").write_text(TEMPLATE)
    with serving(chats, EVERY_LAYER) as running:
        yield running


def metrics(served: Served) -> dict[str, float]:
    status, text = served.send("/metrics")
    assert status == 200
    lines = [line for line in text.splitlines() if not line.startswith("#") and "_created" not in line]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def error_of(answer: tuple[int, str]) -> tuple[int, str]:
    status, text = answer
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return status, error["message"]


class TestErrors:
    @pytest.mark.parametrize(("path", "body", "status", "message"), [
        ("/v1/completions", b"{", 400, "application/json (Expecting property name"),
        ("/v1/completions", b"[1]", 400, "the body: expected an object"),
        ("/v1/completions", b"\xff\xfe", 400, "body"),
        ("/v1/completions", b"[" * 100_000, 400, "body"),
        ("/v1/completions", {"prompt": "hi", "best_of": 2}, 400, "best_of = 2 is not supported (expected 1)"),
        ("/v1/completions", {"prompt": "hi", "n": 5}, 400, "n: 5 answers to a request are more than the 4 that may"),
        ("/v1/completions", {"prompt": "hi", "model": "gpt"}, 404, f"model 'gpt' is not served here, {NAME!r} is"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 255}, 400, "more than the 256 that a sequence may have"),
        ("/v1/completions", {"prompt": "hi", "\ud800": 1}, 400, "unable to parse raw data as a unicode string"),
        ("/v1/completions", b'{"prompt": "hi", "seed": ' + b"9" * 9999 + b"}", 400, "body"),
        ("/v1/completions", {"prompt": "hi" * 200}, 400, "send a shorter prompt"),
        ("/v1/completions", {"prompt": "hi", "top_p": 0.5}, 400, "top_p has no effect on greedy decoding"),
        ("/v1/chat/completions", {"messages": []}, 404, "has no chat template; send texts to /v1/completions"),
        ("/v1/responses", {"input": "hi"}, 404, "has no chat template; send texts to /v1/completions"),
        ("/v1/systemone", {}, 404, "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/m"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 1, "max_output_tokens": 1}, 400, "expected only one of"),
        ("/reset", {}, 404, "POST /reset: Not Found"),
        ("/load_model", {"model": "other"}, 404, "POST /load_model: Not Found"),
        ("/v1/models", {}, 405, "POST /v1/models: Method Not Allowed"),
    ])  # fmt: skip
    def test_in_the_form_of_openais(self, served: Served, path: str, body: Any, status: int, message: str) -> None:
        before = served.handle.stats().bytes_moved
        found, text = error_of(served.send(path, body))
        assert found == status
        assert message in text
        assert served.handle.stats().bytes_moved == before
        assert served.complete("hi", max_tokens=2)["usage"]["completion_tokens"] == 2

    @pytest.mark.parametrize("depth", [100, 400, 900, 950, 980, 2000])
    @pytest.mark.parametrize("name", ["n", "prompt", "other"])
    def test_objects_in_objects(self, served: Served, name: str, depth: int) -> None:
        """Whoever reads them, and however much of Python's stack is left there."""
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        assert (
            error_of(served.send("/v1/completions", b'{"prompt": "hi", "%s": %s}' % (name.encode(), nested)))[0] == 400
        )

    def test_a_body_without_a_content_type(self, served: Served) -> None:
        """As curl sends it without -H."""
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        status, text = error_of(served.send("/v1/completions", {"prompt": "hi"}, form))
        assert status == 400
        assert "expected an object, Content-Type: application/json" in text

    def test_a_body_too_long_to_fit(self, served: Served) -> None:
        status, text = error_of(served.send("/v1/completions", {"prompt": "a" * 2_000_000}))
        assert status == 413
        assert "the body is longer than" in text

    @pytest.mark.slow
    def test_a_full_queue(self, served: Served) -> None:
        """Two run, two wait, and the others are told to come again; nobody's answer suffers."""
        with ThreadPoolExecutor(8) as pool:
            asked = {"prompt": "a" * 200, "max_tokens": 50}
            answers = list(pool.map(lambda _: served.send("/v1/completions", asked), range(8)))
        statuses = sorted(status for status, _ in answers)
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 4
        texts = {json.loads(text)["choices"][0]["text"] for status, text in answers if status == 200}
        assert len(texts) == 1
        assert "wait, the limit of --max-queue" in next(text for status, text in answers if status == 429)


class TestChats:
    @pytest.mark.parametrize(("path", "body"), [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
    ])  # fmt: skip
    def test_others_are_answered_while_a_prompt_is_tokenised(
        self, chatting: Served, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, ends, tokenise = threading.Event(), threading.Event(), type(chatting.tokenizer).__call__

        def wait(*args: Any, **options: Any) -> Any:
            begun.set()
            assert ends.wait(30)
            return tokenise(*args, **options)

        monkeypatch.setattr(type(chatting.tokenizer), "__call__", wait)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(chatting.send, path, {**body, "max_tokens": 2})
            assert begun.wait(60)
            assert chatting.send("/health")[0] == 200
            assert not answer.done()
            ends.set()
            assert answer.result()[0] == 200

    @pytest.mark.parametrize(("path", "field"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input")])
    def test_more_messages_than_tokens(self, chatting: Served, path: str, field: str) -> None:
        status, text = error_of(chatting.send(path, {field: [{"role": "user", "content": "hi"}] * 257}))
        assert (status, text) == (
            400,
            f"{field}: 257 items are more than the 256 tokens of a sequence here (--context)",
        )

    @pytest.mark.parametrize(("fields", "message"), [
        ({"messages": [{"role": "\ud800", "content": "hi"}]}, "chat_template_kwargs: TypeError: TextEncodeInput"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "chat_template_kwargs: TypeError: TextEncodeInput"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "tools or chat_template_kwargs: Temp"),
        *(
            ({"chat_template_kwargs": {name: value}}, "chat_template_kwargs")
            for name, value in (
                ("messages", []), ("self", 1), ("conversations", 1), ("tools", 1),
                ("greeting", "\ud800"), ("number", "many"),
            )
        ),
    ])  # fmt: skip
    @pytest.mark.parametrize("stream", [False, True])
    def test_mistakes(self, chatting: Served, fields: dict[str, Any], message: str, stream: bool) -> None:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": stream}
        status, text = error_of(chatting.send("/v1/chat/completions", {**chat, **fields}))
        assert status == 400
        assert message in text
        before = chatting.handle.stats().bytes_moved
        answer = chatting.send("/v1/chat/completions", {**chat, "chat_template_kwargs": {"greeting": "\ud83d\ude00"}})
        assert answer[0] == 200, answer
        assert chatting.handle.stats().bytes_moved > before

    @pytest.mark.parametrize("depth", [100, 200, 400, 900, 950, 980])
    @pytest.mark.parametrize("name", ["data", "other"])
    def test_objects_in_objects(self, chatting: Served, name: str, depth: int) -> None:
        nested = b'{"%s":' % name.encode() + b"[" * depth + b"]" * depth + b"}"
        body = (
            b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "chat_template_kwargs": %s}' % nested
        )
        status, text = chatting.send("/v1/chat/completions", body)
        assert status in (200, 400), text


class TestLeaving:
    @pytest.mark.parametrize("stream", [False, True])
    def test_the_request_of_a_client_that_leaves_ends(self, served: Served, stream: bool) -> None:
        address = http.client.urlsplit(served.url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port)
        body = json.dumps({"prompt": "hi", "max_tokens": 250, "stream": stream})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert eventually(lambda: metrics(served)["headrace_running_requests"] == 1, 60)
        assert metrics(served)["headrace_cache_used_tokens"] > 0
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        assert eventually(lambda: metrics(served)["headrace_running_requests"] == 0, 60)
        assert metrics(served)["headrace_cache_used_tokens"] == 0
        assert served.running == {}
        assert served.complete("hi", max_tokens=2)["usage"]["completion_tokens"] == 2

    @pytest.mark.slow
    def test_names_of_clients_do_not_meet(self, served: Served) -> None:
        """Two requests of one name at once: each gets its own answer."""
        alone = [served.complete(prompt, max_tokens=40)["choices"][0]["text"] for prompt in ("Water", "x")]

        def ask(prompt: str) -> Any:
            return json.loads(
                served.send("/v1/completions", {"prompt": prompt, "max_tokens": 40}, {"x-request-id": "same"})[1]
            )

        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(ask, ("Water", "x")))
        assert [answer["choices"][0]["text"] for answer in answers] == alone
        assert len({answer["id"] for answer in answers}) == 2


class TestMetrics:
    def test_counts(self, served: Served) -> None:
        before = metrics(served)
        served.complete("hi", max_tokens=5)
        served.send("/v1/completions", b"{")
        after = metrics(served)
        ok = 'headrace_requests_total{path="/v1/completions",status="200"}'
        assert after[ok] == before.get(ok, 0) + 1
        wrong = 'headrace_requests_total{path="/v1/completions",status="400"}'
        assert after[wrong] == before.get(wrong, 0) + 1
        assert after["headrace_prompt_tokens_total"] == before["headrace_prompt_tokens_total"] + 2
        assert after["headrace_generated_tokens_total"] == before["headrace_generated_tokens_total"] + 5
        assert after["headrace_moved_bytes_total"] == served.handle.stats().bytes_moved > 0
        assert after["headrace_first_byte_seconds_count"] == before["headrace_first_byte_seconds_count"] + 1
        assert after["headrace_cache_tokens"] == 512
        assert after["headrace_alive"] == 1


@pytest.mark.slow
def test_a_key(folder: Path) -> None:
    with serving(folder, EVERY_LAYER, key=KEY) as served:
        asked, before = {"prompt": "hi", "max_tokens": 2}, served.handle.stats().bytes_moved
        wrong = (
            {"Authorization": "Bearer"},
            {"Authorization": f"Bearer {KEY}x"},
            {"X-Api-Key": f"{KEY}x"},
            {"Host": "h/#"},
        )
        for headers in ({}, *wrong):
            for path, body in (("/v1/completions", asked), ("/v1/models", None), ("/v1/other", None)):
                status, text = error_of(served.send(path, body, headers))
                assert status == 401
                assert "send the header Authorization: Bearer KEY" in text
        assert served.handle.stats().bytes_moved == before
        for headers in (WITH_KEY, {"X-Api-Key": KEY}):  # Anthropic's clients send the latter
            assert served.send("/v1/completions", asked, headers)[0] == 200
        assert served.send("/v1/models", None, {"Authorization": f"bearer {KEY}"})[0] == 200  # RFC 7235
        assert next(model.id for model in served.client(KEY).models.list()) == NAME
        assert served.send("/health")[0] == served.send("/metrics")[0] == 200


@pytest.mark.slow
def test_hosts_of_other_sites(folder: Path, served: Served) -> None:
    """A page whose name leads to this machine (DNS rebinding) reads nothing; with a key it has nothing to gain."""
    before, asked = served.handle.stats().bytes_moved, {"prompt": "hi", "max_tokens": 2}
    for host in (
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1@e",
    ):
        for path, body in (("/v1/completions", asked), ("/health", None), ("/metrics", None), ("/v1/models", None)):
            status, text = error_of(served.send(path, body, {"Host": host}))
            assert status == 421
            assert text.startswith(f"Host: {host.removesuffix(':8000')!r} is none of this server's names")
    assert served.handle.stats().bytes_moved == before
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "[::1]"):
        assert served.send("/v1/completions", asked, {"Host": host})[0] == 200
    with serving(folder, EVERY_LAYER, hosts=["Server.example"]) as named:
        assert named.send("/v1/completions", asked, {"Host": "server.Example:80"})[0] == 200
        assert error_of(named.send("/v1/completions", asked, {"Host": "evil.example"}))[0] == 421
    for options in ({"hosts": ["*"]}, {"key": KEY}):
        with serving(folder, EVERY_LAYER, **options) as open_to_all:
            assert open_to_all.send("/v1/models", None, {"Host": "other.example", **WITH_KEY})[0] == 200


@pytest.mark.slow
def test_pages_of_any_origin(folder: Path, served: Served) -> None:
    """May ask with --cors, and read refusals; a browser asks for leave without the key."""
    asks = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    assert served.complete("hi", max_tokens=2)
    with serving(folder, EVERY_LAYER, key=KEY, cors=True) as open_to_all:
        for running, allowed in ((open_to_all, "*"), (served, None)):
            host, _, port = running.url.removeprefix("http://").partition(":")
            for method, headers in (("OPTIONS", asks), ("POST", {"Origin": "http://page"})):
                connection = http.client.HTTPConnection(host, int(port))
                connection.request(method, "/v1/completions", "{}", {**headers, "Content-Type": "application/json"})
                answer = connection.getresponse()
                assert answer.headers.get("Access-Control-Allow-Origin") == allowed
                assert (answer.status == 200) == (method == "OPTIONS" and allowed == "*")
                connection.close()


@pytest.mark.slow
def test_a_key_that_is_no_utf8(folder: Path) -> None:
    """As the command line hands it over: its bytes are the key, and requests without it are refused."""
    given = b"caf\xe9"
    with serving(folder, EVERY_LAYER, key=os.fsdecode(given)) as served:
        for headers in ({}, WITH_KEY, {"Authorization": "Bearer caf\u00e8"}):
            assert error_of(served.send("/v1/models", None, headers))[0] == 401
        assert served.send("/v1/models", None, {"Authorization": f"Bearer {given.decode('latin-1')}"})[0] == 200


@pytest.mark.slow
def test_the_end_of_the_engine_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To those who wait, to those who come, to whoever asks for the health, and with its place to the log."""
    with serving(folder, EVERY_LAYER) as served:
        assert served.send("/health") == (200, '{"status":"ok"}')
        expected = served.complete("hi", max_tokens=2)["choices"]
        with monkeypatch.context() as patch:  # a prompt that fails is an error of its request alone
            patch.setattr(served.engine.rows, "prompts", raising(RuntimeError('out of "luck"')))
            for stream in (False, True):
                status, text = served.send("/v1/completions", {"prompt": "hi", "stream": stream})
                assert (status, "RuntimeError: out of" in text) == (200 if stream else 500, True)
            logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
            assert [str(each) for each in logged] == ['out of "luck"'] * 2
        assert served.send("/health")[0] == 200
        assert served.complete("hi", max_tokens=2)["choices"] == expected

        monkeypatch.setattr(served.engine.rows, "step", raising(RuntimeError('out of "luck"')))
        status, text = error_of(served.send("/v1/completions", {"prompt": "hi"}))
        assert status == 503
        assert 'out of "luck"' in text
        assert eventually(lambda: served.send("/health")[0] == 503, 60)
        status, text = error_of(served.send("/v1/completions", {"prompt": "hi", "stream": True}))
        assert status == 503
        assert re.search('the engine has ended: RuntimeError: out of "luck"', text)
        assert [record.getMessage() for record in caplog.records if record.exc_info][2:] == ["the engine has ended"]
        assert metrics(served)["headrace_alive"] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_end_of_the_models_thread_is_reported(folder: Path) -> None:
    """By an exception that its loop does not catch, such as the one of sys.exit()."""
    with serving(folder, EVERY_LAYER) as served:
        served.complete("hi", max_tokens=2)
        served.model.forward = raising(SystemExit(3))
        status, text = error_of(served.send("/v1/completions", {"prompt": "hi"}))
        assert (status, text) == (503, "the engine has ended: SystemExit: 3")
        assert error_of(served.send("/health")) == (503, text)
        assert metrics(served)["headrace_alive"] == 0


def test_a_thread_that_the_system_does_not_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is named in the answer, and the next request tries again."""
    with serving(folder, EVERY_LAYER) as served:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "start", raising(RuntimeError("can't start new thread")))
            status, text = error_of(served.send("/v1/completions", {"prompt": "hi"}))
        assert status == 503
        assert text.startswith("the server starts no further thread (can't start new thread): raise this process's")
        assert served.complete("hi", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.slow
def test_a_forward_that_hangs_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the request that it belongs to was answered, until it ends; an idle server does not hang."""
    with serving(folder, EVERY_LAYER) as served:
        served.complete("hi", max_tokens=2)
        monkeypatch.setattr("headrace.serving.engine._STEP_S", 2)
        time.sleep(3)
        assert served.send("/health")[0] == 200
        ends, forward = threading.Event(), served.model.forward
        served.model.forward = lambda *args, **options: ends.wait(60) and forward(*args, **options)
        try:
            status, text = error_of(served.send("/v1/completions", {"prompt": "hi"}))
            assert status == 503
            assert text.startswith("the model hangs: its step has run for ")
            status, text = error_of(served.send("/health"))
            assert status == 503
            assert text.startswith("the model hangs: its step has run for ")
            assert served.send("/v1/completions", {"prompt": "hi"})[0] == 503
        finally:
            ends.set()
        assert eventually(lambda: served.send("/health")[0] == 200, 60)
        assert served.complete("hi", max_tokens=2)["usage"]["completion_tokens"] == 2
