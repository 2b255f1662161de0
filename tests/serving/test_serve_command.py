"""The promise of ``headrace serve MODEL``: refused before anything is loaded, or ready once it answers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from commands import changed, error_of, run, succeed, tiny_model
from headrace.serving.listening import bind

model = tiny_model
pytestmark = pytest.mark.usefixtures("nothing_is_loaded")


@pytest.mark.parametrize(("flags", "message"), [
    (["--tensor-parallel-size", "2"], "--tensor-parallel-size: headrace serve has no such flag; flags of"),
    (["--measure-stalls"], "--measure-stalls has no effect without --engine vllm"),
    (["--additional-config", "{}"], "--additional-config has no effect without --engine vllm"),
    (["--dtype", "int8"], "--dtype 'int8': expected one of bfloat16, float16, float32"),
    (["--generation-config", "vllm"], "--generation-config 'vllm': expected one of auto, none"),
    (["--offload-mode", "meta", "--device-memory", "2MiB"], "--offload-mode 'meta': expected one of cpu, disk of"),
    (["--offload-mode", "shm_cpu", "--device-memory", "2MiB"], "'shm_cpu': expected one of cpu, disk of headrace"),
    (["--batch", "0"], "--batch '0': expected numbers of rows"),
    (["--context", "0"], "--context = 0: expected at least 1"),
    (["--context", "0", "--device-memory", "2MiB"], "--context = 0: expected at least 1"),
    (["--context", "5000"], "a context of 5000 tokens is longer than the 4096 that the model was made for"),
    (["--device-memory", "1KiB"], "1.0 KiB"),
    (["--batch", "100000000"], "the plan does not fit this machine"),
    (["--port", "65536"], "--port 65536: expected a port from 1 to 65535, or 0 for a free one"),
    (["--max-queue", "0"], "--max-queue = 0: expected at least 1"),
    (["--speculate", "mtp"], "--speculate mtp reads hidden states, which rows do not return; use lookup or a draft"),
    (["--guesses", "3"], "--guesses has no effect without --speculate"),
    (["--speculate", "lookup", "--accepted", "1"], "leave --speculate out"),
    (["--host", "1.2.3.4"], "--host 1.2.3.4 --port 8000: expected a free address of this machine"),
])  # fmt: skip
def test_what_cannot_be_served(model: Path, flags: list[str], message: str) -> None:
    assert message in error_of("serve", model, *flags)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["own", "vllm"])
def test_a_key_that_is_empty(model: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a shell variable that is not set: it opened the server to all."""
    words = ("serve", model, "--engine", engine, "--dry-run")
    assert "--api-key: expected a text without blanks around it, found an empty one" in error_of(
        *words, "--api-key", ""
    )
    assert "--api-key: expected a text without" in error_of(*words, "--api-key", "k\r")
    monkeypatch.setenv("HEADRACE_API_KEY", "")
    assert "HEADRACE_API_KEY: expected a text without" in error_of(*words)
    assert run(*words, "--api-key", "k").exit_code == 0
    for flag in ("--host", "--served-model-name"):
        assert f"{flag}: expected a text without" in error_of(*words, "--api-key", "k", flag, "")


@pytest.mark.slow
def test_a_port_that_is_taken(model: Path) -> None:
    with bind("127.0.0.1", 0) as other:
        other.listen()
        port = other.getsockname()[1]
        assert f"--port {port}: expected a free address" in error_of("serve", model, "--port", port)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, f"{name} = {value}: it is not applied here") for name, value in {
        "encoder_repetition_penalty": 1.5, "token_healing": True, "max_time": 2.0, "penalty_alpha": 0.6,
        "dola_layers": "low", "num_beams": 3, "exponential_decay_length_penalty": [2, 1.5], "min_p": 0.1,
        "num_return_sequences": 2, "guidance_scale": 2.0, "cache_implementation": "offloaded", "use_mtp": True,
    }.items()),
    ({"do_sample": True, "temperature": "x"}, "temperature = x: `temperature` (=x) has to be a strictly positive"),
    ({"top_p": float("nan")}, "top_p = nan: expected a finite number"),
    ({"repetition_penalty": -1.0}, "repetition_penalty = -1.0: `penalty` has to be a strictly positive float"),
    ({"eos_token_id": 1.5}, "eos_token_id = 1.5: expected the number of a token"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), SETTINGS)
def test_settings_that_rows_cannot_have(model: Path, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    """They were left out in silence, or ended the start with errors of transformers."""
    found = error_of("serve", changed(model, tmp_path / "changed", "generation_config.json", **fields))
    assert f"/generation_config.json: {message}" in found
    assert "; take it out of the file, leave its sampling out with --generation-config none, or use --eng" in found


@pytest.mark.slow
def test_settings_that_are_left_out(model: Path, tmp_path: Path) -> None:
    fields = {name: value for fields, _ in SETTINGS[:-1] for name, value in fields.items()}
    folder = changed(model, tmp_path / "changed", "generation_config.json", **fields)
    succeed("serve", folder, "--generation-config", "none", "--dry-run")


@pytest.mark.slow
def test_a_template_that_is_none(model: Path, tmp_path: Path) -> None:
    """It was found in every request to a chat, and not at the start."""
    folder = changed(model, tmp_path / "changed", "generation_config.json")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    message = error_of("serve", folder)
    assert ": expected a chat template that Jinja can read, found: unexpected '}' (line 2); download it" in message
    (folder / "chat_template.jinja").write_text("{% generation %}{{ messages }}{% endgeneration %}")
    assert run("serve", folder, "--dry-run").exit_code == 0


def test_a_damaged_generation_config(model: Path, tmp_path: Path) -> None:
    """It was left out in silence, with the tokens that end an answer."""
    folder = changed(model, tmp_path / "changed", "generation_config.json")
    (folder / "generation_config.json").write_text('{"eos_token')
    assert "generation_config.json: expected UTF-8 JSON; found Unterminated string" in error_of("serve", folder)


def test_without_the_extra(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cli.arguments.find_spec", lambda name: None if name == "uvicorn" else find_spec(name))
    message = error_of("serve", model)
    assert "needs packages that are not installed (uvicorn): pip install 'headrace[serve]'" in message


@pytest.mark.slow
def test_a_dry_run_prints_plan_and_cache(model: Path) -> None:
    result = succeed("serve", model, "--device-memory", "2MiB", "--batch", "4", "--dry-run")
    assert "3.26 MiB of weights in 1.94 MiB of device memory" in result.stderr
    assert "cache: 4 sequences of 2048 tokens; 16.00 MiB beside" in result.stderr
    counted = run("serve", model, "--device-memory", "20MiB", "--batch", "4", "--context", "512", "--dry-run", "-v")
    assert "headrace.planning.checks: plan: " in counted.stderr
    assert "4 sequences of 512 tokens; 4.00 MiB counted in --device-memory" in counted.stderr
    assert max(map(len, result.stderr.splitlines())) <= 120


class TestSeveralModels:
    @pytest.fixture
    def other(self, model: Path, tmp_path: Path) -> Path:
        return changed(model, tmp_path / "other", "generation_config.json")

    @pytest.mark.parametrize(("flags", "message"), [
        (["--engine", "vllm"], "--engine vllm serves one model, and there are 2 ("),
        (["--served-model-name", "m"], "expected --served-model-name with a name for each of the 2 models, in their"),
        (["--served-model-name", "m", "m"], "other have one name in requests, 'm'; tell them apart by --served-model-"),
        (["--plan", "p.json"], "--plan: expected one model, found 2, which take turns on the device"),
        (["--speculate", "/some/draft"], "--speculate /some/draft: expected one model, found 2"),
        (["--switch-after", "-1"], "--switch-after -1: expected a number of seconds, 0 or more"),
        (["--switch-after", "nan"], "--switch-after nan: expected a number of seconds, 0 or more"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size: headrace serve has no such flag; flags of"),
    ])  # fmt: skip
    def test_what_cannot_be_served(self, model: Path, other: Path, flags: list[str], message: str) -> None:
        assert message in error_of("serve", model, other, *flags)

    def test_two_of_one_name(self, model: Path, tmp_path: Path) -> None:
        other = changed(model, tmp_path / model.name, "generation_config.json")
        message = error_of("serve", model, other)
        assert f"{model} and {other} have one name in requests, {model.name!r}; tell them apart by --served-" in message

    def test_no_such_model(self, model: Path) -> None:
        assert "no/such" in error_of("serve", model, "no/such")

    def test_a_turn_of_one_model(self, model: Path) -> None:
        assert "--switch-after has no effect with one model" in error_of("serve", model, "--switch-after", "1")
        assert "--switch-after has no effect inside vLLM" in error_of(
            "serve", model, "--engine", "vllm", "--switch-after", "1"
        )

    @pytest.mark.slow
    def test_a_dry_run(self, model: Path, other: Path) -> None:
        result = succeed("serve", model, other, "--device-memory", "2MiB", "--offload-mode", "cpu", "--dry-run")
        assert result.stderr.count("3.26 MiB of weights in 1.94 MiB of device memory") == 2
        assert "several models take turns in it alone" in result.stderr
        assert re.search(r"^tiny: [\d.]+ MiB of host memory; parked beside others$", result.stderr, re.MULTILINE)
        short = ("--host-memory", "4MiB", "--device-memory", "2MiB", "--offload-mode", "cpu", "--dry-run")
        found = succeed("serve", model, other, *short).stderr
        assert "of host memory; loaded from its files when it is wanted (--host-memory)" in found
        assert "parked beside others" in found

    @pytest.mark.slow
    def test_serves_both(self, model: Path, other: Path) -> None:
        """By the last parts of their names and as they are written; Ctrl-C between two switches is no error."""
        with command(model, others=[other]) as (process, url):
            texts = {name: ask(url, 8, "", name)["choices"][0]["text"] for name in ("tiny", "other", str(other))}
            assert len({*texts.values()}) == 1  # they have the same weights
            with urllib.request.urlopen(f"{url}/v1/models") as answer:
                data = json.load(answer)["data"]
            states = {each["id"]: each["state"] for each in data}
            assert states == {"tiny": "parked", str(model): "parked", "other": "running", str(other): "running"}
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "Traceback" not in err

    @pytest.mark.slow
    def test_a_signal_in_a_switch(self, model: Path, other: Path) -> None:
        """The switch ends, and the request that waits is answered."""
        slow = "from headrace.api import Handle; import time; resume = Handle.resume"
        slow += "; Handle.resume = lambda handle: [time.sleep(3), resume(handle)][1]"
        answers: list[Any] = []
        with command(model, "-c", IMPATIENT.format(30, 60, slow), others=[other]) as (process, url):
            waiting = threading.Thread(target=lambda: answers.append(ask(url, 8, "", "other")))
            waiting.start()
            wait_for(url, 'headrace_switch_requests{model="other"} 1.0')
            process.send_signal(signal.SIGINT)
            waiting.join(60)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "Traceback" not in err
        assert answers[0]["usage"]["completion_tokens"] == 8


@contextmanager
def command(
    model: Path, *program: str, others: Sequence[Path] = (), **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running command and its address, found in what it prints; ``program``: what Python runs instead of it."""
    words = ["serve", str(model), *map(str, others), "--device-memory", "2MiB", "--port", "0"]
    words += [] if others else ["--served-model-name", "m"]
    package = Path(sys.modules["headrace"].__file__ or "").parent.parent
    with subprocess.Popen(
        [sys.executable, *(program or ("-m", "headrace")), *words],
        env={**os.environ, "PYTHONPATH": str(package), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            printed = ""
            while "Ctrl-C ends it" not in printed:
                line = process.stderr.readline()
                assert line, printed
                printed += line
            found = re.search(r"serving \S.* at (http://127\.0\.0\.1:\d+)/v1, Ctrl-C ends it", printed)
            assert found is not None, printed
            yield process, found[1]
        finally:
            process.kill()


def ask(url: str, tokens: int, key: str, model: str = "m") -> Any:
    body = json.dumps({"model": model, "prompt": "Water", "max_tokens": tokens}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=120) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_sigterm_lets_requests_finish(model: Path) -> None:
    """Ready once it prints its address; the key comes from the environment; the end is no error."""
    with command(model, HEADRACE_API_KEY="k") as (process, url):
        short = ask(url, 16, "k")["choices"][0]["text"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(url, 16, "")
        answers: list[Any] = []
        waiting = threading.Thread(target=lambda: answers.append(ask(url, 300, "k")))
        waiting.start()
        wait_for(url, "headrace_running_requests 1.0")
        process.send_signal(signal.SIGTERM)
        waiting.join(120)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == ""
    assert "Traceback" not in err
    assert "nanobind" not in err  # of Triton's bindings: "leaked 4 instances", and 28 lines more
    assert answers[0]["usage"]["completion_tokens"] == 300
    assert answers[0]["choices"][0]["text"].startswith(short[:-3])


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
# The command with shorter limits, in seconds: to receive a request, and to stop.
IMPATIENT = """
from headrace.cli import main
from headrace.serving import app, listening
app.RECEIVE_S = listening.RECEIVE_S = {}
listening._STOP_S = {}
{}
main()
"""


def opened(url: str, sent: bytes) -> socket.socket:
    """A connection on which so much has been sent."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(sent)
    return connection


def request_of(**fields: Any) -> bytes:
    body = json.dumps({"prompt": "W", **fields}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def wait_for(url: str, metric: str) -> None:
    while metric.encode() not in urllib.request.urlopen(f"{url}/metrics").read():
        time.sleep(0.05)


def received_from(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.slow
def test_requests_that_do_not_come(model: Path) -> None:
    """Half a head, half a body and, after an answer, half a second head end the connection in limited time."""
    with command(model, "-c", IMPATIENT.format(1, 60, "")) as (_, url):
        begin = time.monotonic()
        bodies = [b"", b'{"prompt": "W']
        halves = [opened(url, HEAD + b"Content-Length: 40\r\n\r\n" + body) for body in bodies]
        heads = [
            opened(url, b""),
            opened(url, HEAD),
            opened(url, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he"),
        ]
        for body, half in zip(bodies, halves, strict=True):
            answer = received_from(half)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"the body is incomplete: %d bytes came within 1 s" % len(body) in answer
        assert [len(received_from(head)) > 0 for head in heads] == [False, False, True]
        assert time.monotonic() - begin < 30
        assert ask(url, 4, "")["usage"]["completion_tokens"] == 4


@pytest.mark.slow
def test_silent_connections_leave_room_for_requests(model: Path) -> None:
    """More than the process may have descriptors: the oldest silent ones go, none that has sent a request."""
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 256))"
    with command(model, "-c", IMPATIENT.format(60, 60, few)) as (process, url):
        asked = opened(url, request_of(max_tokens=250, ignore_eos=True))
        wait_for(url, "headrace_running_requests 1.0")
        heads = [HEAD, HEAD + b"Content-Length: 40\r\n\r\n{"]
        silent = [opened(url, heads[i % 2]) for i in range(330)]
        with urllib.request.urlopen(f"{url}/health", timeout=20) as health:
            assert health.status == 200
        assert Path(f"/proc/{process.pid}/limits").read_text().split("Max open files")[1].split()[0] == "256"
        assert asked.recv(12) == b"HTTP/1.1 200"
        for connection in (asked, *silent):
            connection.close()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert err.count("connections at once are the limit") == 1


@pytest.mark.slow
def test_sigterm_beside_half_a_request(model: Path) -> None:
    """The server ends at once; it used to stay for as long as the client liked."""
    with command(model) as (process, url):
        head, body = opened(url, HEAD), opened(url, HEAD + b"Content-Length: 40\r\n\r\n{")
        assert ask(url, 4, "")["usage"]["completion_tokens"] == 4
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert received_from(body).startswith(b"HTTP/1.1 408 ")
        assert received_from(head) == b""
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - begin < 20
    assert process.returncode == 0
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_stop_ends_requests_that_take_too_long(model: Path) -> None:
    slow = "embed = torch.nn.Embedding.forward; wait = lambda *a: time.sleep(0.05) or embed(*a)"
    slow = f"import time, torch; {slow}; torch.nn.Embedding.forward = wait"
    with command(model, "-c", IMPATIENT.format(30, 3, slow)) as (process, url):
        asked = opened(url, request_of(max_tokens=2000, ignore_eos=True))
        wait_for(url, "headrace_running_requests 1.0")
        process.send_signal(signal.SIGTERM)
        answer = received_from(asked)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"the server stops" in answer
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_stop_ends_forwards_that_never_end(model: Path) -> None:
    # On meta, where the cache is measured before the server listens, it does not hang.
    hang = "embed = torch.nn.Embedding.forward; wait = lambda s, i: embed(s, i) if i.is_meta else time.sleep(3600)"
    hang = f"import time, torch; {hang}; torch.nn.Embedding.forward = wait"
    with command(model, "-c", IMPATIENT.format(30, 1, hang)) as (process, url), opened(url, request_of(max_tokens=2)):
        wait_for(url, "headrace_running_requests 1.0")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Timeout" in err


@pytest.mark.slow
def test_a_stop_beside_a_client_that_reads_nothing(model: Path) -> None:
    """Its answer fills the buffers of the socket, and stays there."""
    small = "s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)"
    small = f"import socket; bind = listening.bind; listening.bind = lambda *a: [s := bind(*a), {small}][0]"
    with command(model, "-c", IMPATIENT.format(30, 7, small)) as (process, url), socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        connection.sendall(request_of(max_tokens=500, ignore_eos=True, stream=True))
        wait_for(url, "headrace_generated_tokens_total 500.0")
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert time.monotonic() - begin > 7, "the answer fit the buffers"
