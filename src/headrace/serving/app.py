"""transformers' server over one model: its handlers and routes, with what they lack around them.

Added here: an API key, ``/metrics``, a ``/health`` that looks at the batching loop, errors in OpenAI's form, refusals
before anything runs, and the end of a request whose client has gone. Taken away: routes that load, drop or need other
models.
"""

from __future__ import annotations

import asyncio
import copy
import faulthandler
import gc
import inspect
import json
import os
import secrets
import signal
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import X_REQUEST_ID, CBWorkerDeadError, GenerationState, get_response_template
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from headrace.api import Handle
from headrace.errors import OptionError
from headrace.serving.batches import Batches, settings_of
from headrace.serving.request_body import RequestError, Wanted, read_chat, read_completion

__all__ = ["bind", "make_app", "run_app"]

_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models")
# More than any text of so many tokens has, so that no longer one is read and tokenised.
_BYTES_PER_TOKEN = 256
_BODY_BYTES = 2**20
_ARRIVAL_S = 30  # for the head of a request, and then for its body
_STOP_S = 300  # for the requests that run when the server is stopped

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def make_app(
    model: Any, handle: Handle | None, tokenizer: Any, names: list[str], batches: Batches, key: str | None
) -> _Gate:
    """The server as an ASGI application.

    Args:
        model: what ``batches`` runs.
        handle: of its offload, for figures; ``None``: it is resident.
        tokenizer: of the model.
        names: that requests may call the model by; answers say the first.
        batches: what carries requests out; stopped when the application stops.
        key: what requests to ``/v1`` have to carry as ``Authorization: Bearer KEY``; ``None``: nothing.
    """
    manager = _OneModel(model, tokenizer, names, batches)
    state = _OneState(batches)
    handlers: dict[str, Any] = {
        name: None for name in inspect.signature(build_server).parameters if name.endswith("_handler")
    }
    arguments = inspect.signature(tokenizer.apply_chat_template).parameters

    def read_messages(body: Mapping[str, Any]) -> Wanted:
        if not tokenizer.chat_template:
            raise RequestError(f"{names[0]!r} has no chat template; send texts to {_ROUTES[1]}", status=404)
        return read_chat(body, arguments)

    chat = _Endpoint(_Chat, read_messages, manager, state)
    completion = _Endpoint(_Completion, read_completion, manager, state)
    handlers |= {"chat_handler": chat, "completion_handler": completion}
    app = build_server(manager, generation_state=state, **handlers)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in _ROUTES]
    _answer_errors(app)
    metrics = _Metrics(batches, handle)
    app.add_api_route("/metrics", metrics.answer)
    app.add_api_route("/health", lambda: _health(batches))
    return _Gate(app, batches, metrics, key, _BODY_BYTES + _BYTES_PER_TOKEN * batches.admission.pool.longest)


def _health(batches: Batches) -> JSONResponse:
    reason = batches.dead_reason()
    return JSONResponse({"status": "ok"} if reason is None else _error(reason, "server_error"), 503 if reason else 200)


# -- the seams of transformers' server ---------------------------------------------------------------------------------


class _OneModel(ModelManager):
    """Knows one model, which is loaded already."""

    def __init__(self, model: Any, tokenizer: Any, names: list[str], batches: Batches) -> None:
        super().__init__()
        self.tokenizer, self._names, self._batches = tokenizer, names, batches
        # What the handlers read of a model; without its type they look for no reasoning in its answers.
        config = model.config if _parses_answers(model, tokenizer) else SimpleNamespace(model_type=None)
        self._model = SimpleNamespace(config=config, generation_config=model.generation_config)
        self._since = int(time.time())

    def load_model_and_processor(self, model_id_and_revision: str, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self._model, self.tokenizer

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id

    def list_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        longest = self._batches.admission.pool.longest
        shared = {"object": "model", "created": self._since, "owned_by": "headrace", "max_model_len": longest}
        return [{"id": name, **shared} for name in self._names]

    get_gen_models: Any = list_models  # up to transformers 5.23

    def name_of(self, asked: str | None) -> str:
        """The name that an answer says.

        Raises:
            RequestError: no model has the name asked for.
        """
        if asked is not None and asked not in self._names:
            raise RequestError(f"model {asked[:200]!r} is not served here, {self._names[0]!r} is", "model", 404)
        return self._names[0]

    def shutdown(self) -> None:
        self._batches.stop()


def _parses_answers(model: Any, tokenizer: Any) -> bool:
    """Whether transformers' template for answers of this type of model fits the chat template that comes with it."""
    template = get_response_template(tokenizer, model)
    anchors = (template or {}).get("start_anchor") or []
    if getattr(tokenizer, "response_template", None) is not None or not anchors or not tokenizer.chat_template:
        return True
    try:
        turn = tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], add_generation_prompt=True, tokenize=False
        )
    except Exception:  # templates are programs, and raise errors of any type for messages that they do not expect
        return False
    # A parser that finds no anchor takes the prompt for a part of the answer.
    return any(anchor in turn for anchor in ([anchors] if isinstance(anchors, str) else anchors))


class _OneState(GenerationState):
    """Gives every request to the same batches."""

    def __init__(self, batches: Batches) -> None:
        super().__init__(continuous_batching=True)
        self._batches = batches

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        return True

    def get_manager(self, model_id: str, use_cb: bool = False) -> Batches:
        return self._batches

    def is_cb_alive(self) -> bool:
        return self._batches.dead_reason() is None


class _OneRequest:
    """For a handler of transformers: serves one request, with the sampling and the last chunks that it asked for."""

    def __init__(self, manager: _OneModel, state: _OneState, wanted: Wanted) -> None:
        super().__init__(manager, state)  # type: ignore[call-arg]
        self._wanted, self._tokenizer = wanted, manager.tokenizer

    def _build_generation_config(self, body: Any, default: Any, use_cb: bool = False) -> Any:
        return settings_of(self._wanted, default)

    def _build_chunk_sse(self, *args: Any, usage: Any = None, **values: Any) -> str:
        text: str = super()._build_chunk_sse(*args, **values)  # type: ignore[misc]
        if usage is None:
            return text
        # The end of the stream, which OpenAI's has and transformers' has not.
        if self._wanted.include_usage:
            chunk = json.loads(text.removeprefix("data: "))
            text += f"data: {json.dumps({**chunk, 'choices': [], 'usage': usage.model_dump(exclude_none=True)})}\n\n"
        return text + "data: [DONE]\n\n"


class _Chat(_OneRequest, ChatCompletionHandler):
    def get_processor_inputs_from_messages(self, *args: Any) -> Any:  # type: ignore[override]
        inputs = super().get_processor_inputs_from_messages(*args)
        given, render = self._wanted.body.get("chat_template_kwargs", {}), self._tokenizer.apply_chat_template
        try:  # as the handler does next, and after it the tokenizer
            render(inputs, add_generation_prompt=True, tokenize=False, load_audio_from_video=False, **given).encode()
        except Exception as error:  # templates are programs, and raise errors of any type
            raise RequestError(
                f"the chat template refuses messages or chat_template_kwargs: {type(error).__name__}: {error}"
            ) from None
        return inputs


class _Completion(_OneRequest, CompletionHandler):
    pass


class _Endpoint:
    """Stands for a handler of transformers: checks a request, and has a handler of its own serve it."""

    def __init__(
        self, handler: type[_OneRequest], read: Callable[[Any], Wanted], manager: _OneModel, state: _OneState
    ) -> None:
        self._handler, self._read, self._manager, self._state = handler, read, manager, state

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        wanted = self._read(body)
        name = self._manager.name_of(wanted.body["model"])
        handler: Any = self._handler(self._manager, self._state, wanted)
        return await handler.handle_request({**wanted.body, "model": name}, request_id)


# -- errors ------------------------------------------------------------------------------------------------------------


def _error(message: str, kind: str = "invalid_request_error", field: str | None = None) -> dict[str, Any]:
    # Names of fields may hold halves of surrogates.
    shown = [text and text.encode(errors="backslashreplace").decode() for text in (message, field)]
    return {"error": {"message": shown[0], "type": kind, "param": shown[1], "code": None}}


def _answer_errors(app: FastAPI) -> None:
    """Give every error the form of OpenAI's."""

    @app.exception_handler(RequestError)
    async def _refused(_: Any, error: RequestError) -> JSONResponse:
        kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
        headers = {"Retry-After": "1"} if error.status == 429 else None
        return JSONResponse(_error(str(error), kind, error.field), error.status, headers)

    @app.exception_handler(RequestValidationError)
    async def _no_object(_: Any, error: RequestValidationError) -> JSONResponse:
        found = "; ".join(str(each["msg"]) for each in error.errors())
        return JSONResponse(_error(f"the body: expected an object, Content-Type: application/json ({found})"), 400)

    @app.exception_handler(HTTPException)
    async def _other(request: Any, error: Any) -> JSONResponse:
        served = f"; there are {', '.join(_ROUTES)}, /health and /metrics" if error.status_code == 404 else ""
        return JSONResponse(_error(f"{request.method} {request.url.path}: {error.detail}{served}"), error.status_code)

    @app.exception_handler(RecursionError)
    async def _too_deep(_: Any, error: RecursionError) -> JSONResponse:
        return JSONResponse(_error("the body: expected objects and lists of less depth"), 400)

    @app.exception_handler(CBWorkerDeadError)
    async def _dead(_: Any, error: CBWorkerDeadError) -> JSONResponse:
        return JSONResponse(_error(str(error), "server_error"), 503)

    @app.exception_handler(Exception)
    async def _unexpected(_: Any, error: Exception) -> JSONResponse:
        return JSONResponse(_error(f"{type(error).__name__}: {error}", "server_error"), 500)


# -- figures -----------------------------------------------------------------------------------------------------------


class _Metrics(Collector):
    """What Prometheus reads; of a registry of its own."""

    def __init__(self, batches: Batches, handle: Handle | None) -> None:
        self._batches, self._handle = batches, handle
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "headrace_requests", "Requests by path and HTTP status; 499: the client left.", ("path", "status"),
            registry=self._registry,
        )  # fmt: skip
        buckets = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
        self.first = Histogram(
            "headrace_first_byte_seconds", "From a request to the first byte of its answer.", registry=self._registry,
            buckets=buckets,
        )  # fmt: skip
        self.whole = Histogram(
            "headrace_request_seconds", "From a request to the end of its answer.", registry=self._registry,
            buckets=buckets,
        )  # fmt: skip
        self._registry.register(self)

    def answer(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def collect(self) -> Iterator[Metric]:
        admission = self._batches.admission
        gauges: list[tuple[str, str, float]] = [
            ("alive", "1 while requests are carried out.", self._batches.dead_reason() is None),
            ("running_requests", "Requests that generate.", admission.running),
            ("waiting_requests", "Requests that wait for room or for another batch's end.", admission.waiting),
            ("cache_tokens", "Tokens that the cache has room for.", admission.pool.num_tokens),
            ("cache_reserved_tokens", "Of them, reserved by running requests.", admission.reserved_tokens),
        ]
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"headrace_{name}", text, value)
        counters: list[tuple[str, str, float]] = [
            ("prompt_tokens", "Tokens of prompts of finished requests.", self._batches.prompt_tokens),
            ("generated_tokens", "Tokens of answers of finished requests.", self._batches.generated_tokens),
        ]
        if self._handle is not None:
            stats = self._handle.stats()
            counters += [
                ("moved_bytes", "Bytes of weights copied to the device.", stats.bytes_moved),
                ("stalls", "Waits of compute for a copy.", stats.stalls),
            ]
        for name, text, value in counters:
            yield CounterMetricFamily(f"headrace_{name}", text, value)


# -- around everything -------------------------------------------------------------------------------------------------


class _Gate:
    """The outermost application: key, length, a name for the request, its figures, and its end if the client leaves."""

    def __init__(self, app: App, batches: Batches, metrics: _Metrics, key: str | None, longest_body: int) -> None:
        self._app, self._batches, self._metrics = app, batches, metrics
        self._key, self._longest_body = key, longest_body
        self._arrivals: set[asyncio.Timeout] = set()

    def stop(self) -> None:
        """Refuse requests whose bodies are not here, and limit the time of the others."""
        for arrival in self._arrivals:
            if not arrival.expired():
                arrival.reschedule(0)
        asyncio.get_running_loop().call_later(_STOP_S, self._batches.stop)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status, ended = time.perf_counter(), 499, False

        async def observed(message: MutableMapping[str, Any]) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status != 499 and not ended:
                if not first:
                    first.append(time.perf_counter() - begin)
                ended = not message.get("more_body", False)
            await send(message)

        first: list[float] = []
        request_id = uuid.uuid4().hex
        headers = [(name, value) for name, value in scope["headers"] if name != X_REQUEST_ID.encode()]
        try:
            # Not the client's own name, which two requests may share.
            scope = {**scope, "headers": [*headers, (X_REQUEST_ID.encode(), request_id.encode())]}
            refusal, body = await self._read(scope, receive)
            if refusal is not None:
                await refusal(scope, receive, observed)
            elif body is not None:
                await self._serve(scope, body, receive, observed, lambda: ended)
        finally:
            self._batches.cancel_request(request_id)
            path = scope["path"] if scope["path"] in (*_ROUTES, "/health", "/metrics") else "other"
            self._metrics.requests.labels(path, status if ended else 499).inc()
            if path in _ROUTES[:2] and ended and status == 200:
                self._metrics.first.observe(first[0])
                self._metrics.whole.observe(time.perf_counter() - begin)

    async def _read(self, scope: Scope, receive: Receive) -> tuple[JSONResponse | None, bytes | None]:
        """What refuses the request, or else its body; neither, if the client has left."""
        if self._key is not None and scope["path"].startswith("/v1"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, b"Bearer " + os.fsencode(self._key)):
                text = "the API key is missing or wrong: send the header Authorization: Bearer KEY"
                return JSONResponse(_error(text, "authentication_error"), 401, {"WWW-Authenticate": "Bearer"}), None
        body = bytearray()
        arrival = asyncio.timeout(_ARRIVAL_S)
        self._arrivals.add(arrival)
        try:
            async with arrival:
                while len(body) <= self._longest_body:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None, None
                    body += message.get("body", b"")
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            text = f"of the body {len(body)} bytes came within {_ARRIVAL_S} s, or before the server stopped, not all"
            return JSONResponse(_error(text), 408, {"Connection": "close"}), None
        finally:
            self._arrivals.discard(arrival)
        if len(body) > self._longest_body:
            text = f"the body is longer than {self._longest_body} bytes, more than a prompt that fits may have"
            return JSONResponse(_error(text), 413, {"Connection": "close"}), None
        return None, bytes(body)

    async def _serve(
        self, scope: Scope, body: bytes, receive: Receive, send: Send, has_ended: Callable[[], bool]
    ) -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        left = asyncio.Event()

        async def replay() -> MutableMapping[str, Any]:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        answer = asyncio.ensure_future(self._app(scope, replay, send))
        watch = asyncio.ensure_future(receive())  # nothing but the end of the connection is left to receive
        try:
            await asyncio.wait({answer, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and not has_ended():
                left.set()
                answer.cancel()
            with suppress(asyncio.CancelledError):
                await answer
        finally:
            watch.cancel()
            answer.cancel()


# -- the process -------------------------------------------------------------------------------------------------------


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address, and refuses connections until :func:`run_app` listens on it.

    Raises:
        OptionError: the address is no address of this machine, is taken, or may not be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise OptionError(
            f"--host {host} --port {port}: expected a free address of this machine, found: {error.strerror or error}; "
            f"choose another port, or 0 for a free one"
        ) from error
    return bound


class _Connection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """Ends if no request comes, for which uvicorn has no limit once a byte has come."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(_ARRIVAL_S, self._look, None)

    def _look(self, last: object) -> None:
        """``last``: the request that had been answered at the look before; the connection itself if one was not."""
        request = self if self.cycle is not None and not self.cycle.response_complete else self.cycle
        if request is last is not self:
            self.transport.close()
        if not self.transport.is_closing():
            self.loop.call_later(_ARRIVAL_S, self._look, request)


class _Server(uvicorn.Server):
    """Calls ``ready`` once it listens."""

    def __init__(self, config: uvicorn.Config, gate: _Gate, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._gate, self._ready = gate, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gate.stop()
        # If a forward never ends, neither does the batching loop, which Python would wait for.
        faulthandler.dump_traceback_later(2 * _STOP_S, exit=True)
        await super().shutdown(sockets)


def run_app(app: _Gate, bound: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM, then finish what has been asked, in limited time; a second SIGINT ends at once.

    ``ready``: called once requests are answered.
    """
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    limit_s = _STOP_S + 5  # of clients that do not read their answers, which are there by then
    settings = uvicorn.Config(
        app, http=_Connection, log_config=config, lifespan="on", server_header=False, timeout_graceful_shutdown=limit_s
    )
    server = _Server(settings, app, ready)
    # transformers collects garbage at the end of every batch, which takes seconds where torch's objects count.
    gc.collect()
    gc.freeze()
    # uvicorn raises the signal that ended it once more at the end, for whoever called it: nobody here.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[bound])
        if server.force_exit:
            os._exit(130)  # the batching loop, a thread, would finish its requests first
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        gc.unfreeze()  # or Triton's bindings print at the end that they leak
        bound.close()
