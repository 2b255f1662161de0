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
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.requests import Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import X_REQUEST_ID, CBWorkerDeadError, Modality, get_response_template
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from headrace.api import Handle
from headrace.errors import OptionError
from headrace.serving import request_body
from headrace.serving.batches import Batches, settings_of
from headrace.serving.request_body import GenerationRequest, Message, RequestError, read

__all__ = ["bind", "make_app", "run_app"]

_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models")
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
    model: Any,
    handle: Handle | None,
    tokenizer: Any,
    names: list[str],
    batches: Batches,
    key: str | None,
    cors: bool = False,
) -> RequestMiddleware:
    """The server as an ASGI application.

    Args:
        model: what ``batches`` runs.
        handle: of its offload, for figures; ``None``: it is resident.
        tokenizer: of the model.
        names: that requests may call the model by; answers say the first.
        batches: what carries requests out; stopped when the application stops.
        key: what requests to ``/v1`` have to carry as ``Authorization: Bearer KEY``; ``None``: nothing.
        cors: whether pages of any origin may ask.
    """
    entry = {"object": "model", "created": int(time.time()), "owned_by": "headrace"}
    models = [{"id": name, **entry, "max_model_len": batches.admission.pool.longest} for name in names]
    # What transformers' server and handlers ask of its manager of models, and of its state: one model, one engine.
    manager = SimpleNamespace(
        list_models=lambda: models,
        get_gen_models=lambda: models,  # up to transformers 5.23
        get_model_modality=lambda *_, **__: Modality.LLM,
        shutdown=batches.stop,
    )
    state = SimpleNamespace(
        use_continuous_batching=lambda *_: True, get_manager=lambda *_, **__: batches, _compile=False
    )
    served = _Served(model, tokenizer, names, _is_parsed(model, tokenizer), manager, state)
    handlers: dict[str, Any] = {
        name: None for name in inspect.signature(build_server).parameters if name.endswith("_handler")
    }
    for name, kind in (("chat", _Chat), ("completion", _Completion), ("response", _Response)):
        handlers[f"{name}_handler"] = _Endpoint(kind, served)
    app = build_server(manager, generation_state=state, **handlers)  # type: ignore[arg-type]
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in _ROUTES]
    for error_type in (
        RequestError,
        RequestValidationError,
        HTTPException,
        RecursionError,
        CBWorkerDeadError,
        Exception,
    ):
        app.add_exception_handler(error_type, _answer_error)
    metrics = _Metrics(batches, handle)
    app.add_api_route("/metrics", metrics.answer)
    app.add_api_route("/health", lambda: _health(batches))
    return RequestMiddleware(app, batches, metrics, key, cors)


def _health(batches: Batches) -> JSONResponse:
    reason = batches.dead_reason()
    return JSONResponse({"status": "ok"} if reason is None else _error(reason, "server_error"), 503 if reason else 200)


# -- the seams of transformers' server ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Served:
    """What requests share; ``is_parsed``: transformers finds reasoning and calls of tools in answers."""

    model: Any
    tokenizer: Any
    names: list[str]
    is_parsed: bool
    manager: Any
    state: Any


def _is_parsed(model: Any, tokenizer: Any) -> bool:
    """Whether transformers has a template for answers, and it fits the chat template."""
    template = get_response_template(tokenizer, model)
    if template is None or not tokenizer.chat_template or getattr(tokenizer, "response_template", None) is not None:
        return template is not None
    anchors = template.get("start_anchor") or []
    try:
        turn = tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], add_generation_prompt=True, tokenize=False
        )
    except Exception:  # templates are programs, and raise errors of any type for messages that they do not expect
        return False
    # A parser that finds no anchor takes the prompt for a part of the answer.
    return not anchors or any(anchor in turn for anchor in ([anchors] if isinstance(anchors, str) else anchors))


class _Tokenizer:
    """The tokenizer for one request: parses the answer as it was cut, not the tokens behind a stop string."""

    answer = ""

    def __init__(self, tokenizer: Any, is_parsed: bool) -> None:
        self._of_model, self.is_parsed = tokenizer, is_parsed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_model, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._of_model(*args, **options)

    def parse_response(self, _: Any, *args: Any, **options: Any) -> Any:
        return self._of_model.parse_response(self.answer, *args, **options)


class _OneRequest:
    """For a handler of transformers: serves one request, with what was read of it."""

    kind: type[GenerationRequest]
    is_chat = True

    def __init__(self, served: _Served, request: GenerationRequest) -> None:
        super().__init__(served.manager, served.state)  # type: ignore[call-arg]
        self._served, self._request = served, request

    def _validate_request(self, body: Any) -> None:
        """Nothing: :func:`read` has done it."""

    def _resolve_model(self, body: Any) -> tuple[str, Any, Any]:
        is_parsed = self.is_chat and self._served.is_parsed
        model = self._served.model
        # What handlers read of a model; without its type they look for no reasoning in its answers.
        config = model.config if is_parsed else SimpleNamespace(model_type=None)
        shown = SimpleNamespace(config=config, generation_config=model.generation_config)
        return self._served.names[0], shown, _Tokenizer(self._served.tokenizer, is_parsed)

    def _build_generation_config(self, body: Any, default: Any, use_cb: bool = False) -> Any:
        return settings_of(self._request, default)

    def _build_chunk_sse(self, *args: Any, usage: Any = None, **values: Any) -> str:
        text: str = super()._build_chunk_sse(*args, **values)  # type: ignore[misc]
        if usage is None:
            return text
        # The end of the stream, which OpenAI's has and transformers' has not.
        options = self._request.stream_options
        if options is not None and options.include_usage:
            chunk = json.loads(text.removeprefix("data: "))
            text += f"data: {json.dumps({**chunk, 'choices': [], 'usage': usage.model_dump(exclude_none=True)})}\n\n"
        return text + "data: [DONE]\n\n"

    def get_processor_inputs_from_messages(self, messages: Any, modality: Any) -> Any:
        body = self._request.model_dump(include={"tools", "chat_template_kwargs"}, exclude_none=True)
        try:
            inputs = super().get_processor_inputs_from_messages(messages, modality)  # type: ignore[misc]
            for message, shown in zip(messages, inputs, strict=True):
                # What transformers leaves out, and templates read.
                shown |= {name: message[name] for name in ("name", "reasoning_content") if name in message}
                if "tool_calls" in message:
                    shown["content"] = " ".join(part["text"] for part in message.get("content", []))
            # As the handler does next, and after it the tokenizer.
            self._served.tokenizer.apply_chat_template(
                inputs,
                add_generation_prompt=True,
                tokenize=False,
                load_audio_from_video=False,
                tools=ResponseHandler._normalize_tools(body.get("tools")),
                **body.get("chat_template_kwargs", {}),
            ).encode()
        except Exception as error:  # templates are programs, and raise errors of any type
            raise RequestError(
                f"the chat template refuses messages, tools or chat_template_kwargs: {type(error).__name__}: {error}"
            ) from None
        return inputs


class _Chat(_OneRequest, ChatCompletionHandler):
    kind = request_body.Chat


class _Completion(_OneRequest, CompletionHandler):
    kind, is_chat = request_body.Completion, False


class _Response(_OneRequest, ResponseHandler):
    kind = request_body.Response

    def _normalize_input(self, body: Any) -> Any:  # type: ignore[override]
        try:
            messages = super()._normalize_input(body)
        except (LookupError, TypeError, AttributeError, HTTPException) as error:
            raise RequestError(f"input: expected a text or a list of messages and calls of tools ({error})") from None
        return [read(Message, message).model_dump(exclude_none=True) for message in messages]


class _Endpoint:
    """Stands for a handler of transformers: checks a request, and has a handler of its own serve it."""

    def __init__(self, handler: type[_OneRequest], served: _Served) -> None:
        self._handler, self._served = handler, served
        self._taken = set(inspect.signature(served.tokenizer.apply_chat_template).parameters)

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        served = self._served
        if self._handler.is_chat and not served.tokenizer.chat_template:
            raise RequestError(f"{served.names[0]!r} has no chat template; send texts to {_ROUTES[1]}", status=404)
        request = read(self._handler.kind, body)
        if request.model is not None and request.model not in served.names:
            raise RequestError(
                f"model {request.model[:200]!r} is not served here, {served.names[0]!r} is", "model", 404
            )
        given = request.model_dump(include=set(type(request).model_fields), exclude_none=True)
        if given.get("tools") and not served.is_parsed:
            raise RequestError("tools is not supported: the tokenizer has no template for answers", "tools")
        if not self._taken.isdisjoint(given.get("chat_template_kwargs", {})):
            raise RequestError(
                "chat_template_kwargs: expected variables of the chat template alone", "chat_template_kwargs"
            )
        handler: Any = self._handler(served, request)
        return await handler.handle_request({**given, "stream": bool(request.stream)}, request_id)


# -- errors ------------------------------------------------------------------------------------------------------------


def _error(message: str, kind: str = "invalid_request_error", field: str | None = None) -> dict[str, Any]:
    # Names of fields may hold halves of surrogates.
    shown = [text and text.encode(errors="backslashreplace").decode() for text in (message, field)]
    return {"error": {"message": shown[0], "type": kind, "param": shown[1], "code": None}}


def _answer_error(request: Request | None, error: Exception) -> JSONResponse:
    """Any error in the form of OpenAI's."""
    match error:
        case RequestError():
            kind = {401: "authentication_error", 429: "rate_limit_error"}.get(error.status, "invalid_request_error")
            headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(error.status)
            if error.status in (408, 413):
                headers = {"Connection": "close"}
            return JSONResponse(_error(str(error), kind, error.field), error.status, headers)
        case RequestValidationError():
            found = "; ".join(str(each["msg"]) for each in error.errors())
            return JSONResponse(_error(f"the body: expected an object, Content-Type: application/json ({found})"), 400)
        case RecursionError():
            return JSONResponse(_error("the body: expected objects and lists of less depth"), 400)
        case HTTPException():
            asked = "" if request is None else f"{request.method} {request.url.path}: "
            there = f"; there are {', '.join(_ROUTES)}, /health and /metrics" if error.status_code == 404 else ""
            return JSONResponse(_error(f"{asked}{error.detail}{there}"), error.status_code)
        case CBWorkerDeadError():
            return JSONResponse(_error(str(error), "server_error"), 503)
    return JSONResponse(_error(f"{type(error).__name__}: {error}", "server_error"), 500)


# -- figures -----------------------------------------------------------------------------------------------------------


class _Metrics(Collector):
    """What Prometheus reads; of a registry of its own."""

    def __init__(self, batches: Batches, handle: Handle | None) -> None:
        self._batches, self._handle = batches, handle
        self._registry = registry = CollectorRegistry()
        counted = "Requests by path and HTTP status; 499: the client left."
        self.requests = Counter("headrace_requests", counted, ("path", "status"), registry=registry)
        buckets = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
        first, whole = (f"From a request to the {what} of its answer." for what in ("first byte", "end"))
        self.first = Histogram("headrace_first_byte_seconds", first, registry=registry, buckets=buckets)
        self.whole = Histogram("headrace_request_seconds", whole, registry=registry, buckets=buckets)
        registry.register(self)

    def answer(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def collect(self) -> Iterator[Metric]:
        batches, admission = self._batches, self._batches.admission
        gauges: list[tuple[str, str, float]] = [
            ("alive", "1 while requests are carried out.", batches.dead_reason() is None),
            ("running_requests", "Requests that generate.", admission.running),
            ("waiting_requests", "Requests that wait for room or for another's end.", admission.waiting),
            ("cache_tokens", "Tokens that the cache has room for.", admission.pool.num_tokens),
            ("cache_reserved_tokens", "Of them, reserved by running requests.", admission.reserved_tokens),
        ]
        counters: list[tuple[str, str, float]] = [
            ("prompt_tokens", "Tokens of prompts of finished requests.", batches.prompt_tokens),
            ("generated_tokens", "Tokens of answers of finished requests.", batches.generated_tokens),
        ]
        if self._handle is not None:
            stats = self._handle.stats()
            counters.append(("moved_bytes", "Bytes of weights copied to the device.", stats.bytes_moved))
            counters.append(("stalls", "Waits of compute for a copy.", stats.stalls))
        yield from (GaugeMetricFamily(f"headrace_{name}", text, value) for name, text, value in gauges)
        yield from (CounterMetricFamily(f"headrace_{name}", text, value) for name, text, value in counters)


# -- around everything -------------------------------------------------------------------------------------------------


class RequestMiddleware:
    """The outermost application: key, length, a name for the request, its figures, and its end if the client leaves."""

    def __init__(self, app: App, batches: Batches, metrics: _Metrics, key: str | None, cors: bool) -> None:
        self._app, self._batches, self._metrics, self._key = app, batches, metrics, key
        self._longest_body = _BODY_BYTES + _BYTES_PER_TOKEN * batches.admission.pool.longest
        self._arrivals: set[asyncio.Timeout] = set()
        # Around the key, which a browser does not send when it asks whether it may.
        everybody: Any = {"allow_origins": ["*"], "allow_methods": ["*"], "allow_headers": ["*"]}
        self._entrance: App = CORSMiddleware(self._answer, **everybody) if cors else self._answer

    def stop(self) -> None:
        """Refuse requests whose bodies are not here, and limit the time of the others."""
        for arrival in self._arrivals:
            if not arrival.expired():
                arrival.reschedule(0)
        asyncio.get_running_loop().call_later(_STOP_S, self._batches.stop)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._entrance if scope["type"] == "http" else self._app)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin, first, status, ended = time.perf_counter(), 0.0, 499, False

        async def observed(message: MutableMapping[str, Any]) -> None:
            nonlocal first, status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                first = first or time.perf_counter() - begin
                ended = not message.get("more_body", False)
            await send(message)

        request_id, path = uuid.uuid4().hex, scope["path"]
        headers = [(name, value) for name, value in scope["headers"] if name != X_REQUEST_ID.encode()]
        # Not the client's own name, which two requests may share.
        scope = {**scope, "headers": [*headers, (X_REQUEST_ID.encode(), request_id.encode())]}
        try:
            body = await self._read(Request(scope, receive))
            await self._serve(scope, body, receive, observed, lambda: ended)
        except ClientDisconnect:
            pass
        except RequestError as refusal:
            await _answer_error(None, refusal)(scope, receive, observed)
        finally:
            self._batches.cancel_request(request_id)
            known = path in (*_ROUTES, "/health", "/metrics")
            self._metrics.requests.labels(path if known else "other", status if ended else 499).inc()
            if path in _ROUTES[:3] and ended and status == 200:
                self._metrics.first.observe(first)
                self._metrics.whole.observe(time.perf_counter() - begin)

    async def _read(self, request: Request) -> bytes:
        """The body of a request that has the key."""
        if self._key is not None and request.scope["path"].startswith("/v1"):
            given = dict(request.scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, b"Bearer " + os.fsencode(self._key)):
                text = "the API key is missing or wrong: send the header Authorization: Bearer KEY"
                raise RequestError(text, status=401)
        body = bytearray()
        arrival = asyncio.timeout(_ARRIVAL_S)
        self._arrivals.add(arrival)
        try:
            async with arrival:
                async for part in request.stream():
                    body += part
                    if len(body) > self._longest_body:
                        text = f"the body is longer than {self._longest_body} bytes, more than a prompt that fits has"
                        raise RequestError(text, status=413)
        except TimeoutError:
            text = f"of the body {len(body)} bytes came within {_ARRIVAL_S} s, or before the server stopped, not all"
            raise RequestError(text, status=408) from None
        finally:
            self._arrivals.discard(arrival)
        return bytes(body)

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
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:  # the latter: no port is as large
        found = getattr(error, "strerror", None) or error
        raise OptionError(
            f"--host {host} --port {port}: expected a free address of this machine, found: {found}; "
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

    def __init__(self, config: uvicorn.Config, gate: RequestMiddleware, ready: Callable[[], None]) -> None:
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


def run_app(app: RequestMiddleware, bound: socket.socket, ready: Callable[[], None]) -> None:
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
