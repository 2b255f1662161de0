"""transformers' server for one model: its handlers and routes, and what they lack.

Added here: an API key, ``/metrics``, errors in OpenAI's form, checks before anything runs, limits on time and length,
and cancellation when a client leaves. Removed: routes that load, unload or need other models.
"""

from __future__ import annotations

import asyncio
import copy
import faulthandler
import inspect
import json
import logging
import os
import re
import resource
import secrets
import signal
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import cache, partial
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers.cli.serving import response
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import X_REQUEST_ID, Modality, get_response_template
from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from headrace.api import Handle
from headrace.errors import MORE_THREADS, OptionError
from headrace.serving import request_body
from headrace.serving.batches import Batches, settings_of
from headrace.serving.request_body import GenerationRequest, RequestError, read
from headrace.serving.structured import GrammarProcessor, Grammars

_GENERATES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_ROUTES = (*_GENERATES, "/v1/models", "/health", "/metrics")
# More than texts of that many tokens have (an escaped emoji: 12), so that longer ones are neither read nor tokenised.
_BYTES_PER_TOKEN = 32
_BODY_BYTES = 2**18
_LISTS = ("messages", "input", "tools")  # each item takes at least one token
_RECEIVE_S = 30  # for the head of a request, and then for its body
_CONNECTIONS = 1024  # and one for each request that may wait
_STOP_S = 300  # for the requests that run when the server is stopped


def make_app(
    model: Any,
    handle: Handle | None,
    tokenizer: Any,
    names: list[str],
    batches: Batches,
    key: str | None,
    cors: bool = False,
    hosts: Collection[str] | None = None,
) -> RequestMiddleware:
    """The server as an ASGI application.

    Args:
        model: the model that ``batches`` runs.
        handle: the handle of its offload, for metrics; ``None``: it is resident.
        tokenizer: the tokenizer of the model.
        names: names of the model in requests; answers contain the first.
        batches: runs the requests; stopped when the application stops.
        key: requests to ``/v1`` need ``Authorization: Bearer KEY``; ``None``: they need none.
        cors: whether pages of any origin may send requests.
        hosts: names of the server in requests, besides those of this machine; ``*``: any.
    """
    tokenizer.response_template = _response_template(tokenizer, model)
    tokenizer.apply_chat_template = _rendering(tokenizer.apply_chat_template)
    # Handlers look for a template in the tokenizer, and then by the type of the model.
    stub = SimpleNamespace(config=SimpleNamespace(model_type=None), generation_config=model.generation_config)
    entry = {"object": "model", "created": int(time.time()), "owned_by": "headrace"}
    entry["max_model_len"] = batches.longest
    # Of the managers of transformers' server, what its routes and handlers call, for one model that is loaded already.
    manager: Any = SimpleNamespace(
        model=stub,
        tokenizer=tokenizer,
        names=names,
        list_models=lambda: [{"id": name, **entry} for name in names],
        get_model_modality=lambda *_, **__: Modality.LLM,
        use_continuous_batching=lambda *_: True,
        get_manager=lambda *_, **__: batches,
        is_cb_alive=batches.require_alive,
        shutdown=batches.stop,
        grammars=Grammars(tokenizer, model),
    )
    manager.get_gen_models = manager.list_models  # up to transformers 5.23
    # The handlers of other kinds of models, of which newer versions have more, are of no route that is left.
    handlers: dict[str, Any] = {name: None for name in inspect.signature(build_server).parameters if "_handler" in name}
    handlers |= {"chat_handler": _Chat(manager, manager), "completion_handler": _Completion(manager, manager)}
    handlers |= {"response_handler": _Response(manager, manager)}
    response._ResponseStreamBuilder = _Events  # type: ignore[misc]
    app = build_server(manager, generation_state=manager, **handlers)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in _ROUTES]
    errors: Any = (RequestError, RequestValidationError, HTTPException, RecursionError, Exception)
    app.exception_handlers |= dict.fromkeys(errors, _answer_error)
    metrics = _Metrics(batches, handle)
    app.add_api_route("/metrics", metrics.answer)
    return RequestMiddleware(app, batches, metrics, key, cors, hosts)


# -- the handlers of transformers --------------------------------------------------------------------------------------


def _response_template(tokenizer: Any, model: Any) -> dict[str, Any] | None:
    """Finds reasoning and tool calls in answers; ``None``: transformers has none that fits the chat template."""
    template = get_response_template(tokenizer, model)
    if template is None or getattr(tokenizer, "response_template", None) is not None:
        return template
    asked, turn = [{"role": "user", "content": "?"}], ""
    with suppress(Exception):  # templates are programs, and raise errors of any type
        turn = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    # A parser that finds no anchor takes the prompt for a part of the answer.
    anchors = template.get("start_anchor") or ""
    return template if any(anchor in turn for anchor in ([anchors] if isinstance(anchors, str) else anchors)) else None


def _rendering(render: Callable[..., Any]) -> Callable[..., Any]:
    """``render``, the chat template of a tokenizer, with its errors as those of the request."""

    def apply_chat_template(messages: Any, /, **options: Any) -> Any:
        try:
            return render(messages, **options)
        except Exception as error:  # templates are programs, and raise errors of any type
            raise RequestError(
                f"the chat template refuses messages, tools or chat_template_kwargs: {type(error).__name__}: {error}"
            ) from None

    return apply_chat_template


class _Inputs(Exception):  # noqa: N818 - no error: it ends a handler of transformers where it has the tokens
    """The inputs of a model."""


class _CheckedHandler:
    """Checks a request before the handler of transformers that it is mixed into serves it."""

    kind: type[GenerationRequest]
    is_chat = True
    model_manager: Any
    _request: GenerationRequest
    _inputs: Any = None  # of the model, once they are made
    _grammar: GrammarProcessor | None = None

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        handler, given = await asyncio.to_thread(self._prepare, body)  # seconds for a long body
        return await super(_CheckedHandler, handler).handle_request(given, request_id)  # type: ignore[misc]

    def _prepare(self, body: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A handler of this request alone that has the tokens of its prompt, and the body without the prompt."""
        manager = self.model_manager
        name, tokenizer = manager.names[0], manager.tokenizer
        if self.is_chat and not tokenizer.chat_template:
            raise RequestError(f"{name!r} has no chat template; send texts to /v1/completions", status=404)
        longest = manager.get_manager().longest
        for field in _LISTS:
            if isinstance(items := body.get(field), list) and len(items) > longest:
                text = f"{field}: {len(items)} items are more than the {longest} tokens of a sequence here (--context)"
                raise RequestError(text, field)
        request = read(self.kind, body)
        if request.model is not None and request.model not in manager.names:
            raise RequestError(f"model {request.model[:200]!r} is not served here, {name!r} is", "model", 404)
        given = request.model_dump(include=set(type(request).model_fields), exclude_none=True)
        if given.get("tools") and tokenizer.response_template is None:
            raise RequestError("tools is not supported: the tokenizer has no template for answers", "tools")
        # Arguments of the tokenizer, and one that handlers add to them.
        reserved = {*inspect.signature(type(tokenizer).apply_chat_template).parameters, "load_audio_from_video"}
        field = "chat_template_kwargs"
        if reserved & given.get(field, {}).keys():
            raise RequestError(f"{field}: expected only variables of the chat template", field)
        handler: Any = copy.copy(self)
        handler._request = request
        given["stream"] = bool(request.stream)
        try:
            super(_CheckedHandler, handler).handle_request(given, "").send(None)  # type: ignore[misc] # to the tokens
        except _Inputs as made:
            (handler._inputs,) = made.args
        template = tokenizer.response_template if self.is_chat else None
        handler._grammar = manager.grammars.processor(request, handler._inputs["input_ids"], template)
        return handler, {**given, "messages": [], "input": [], "prompt": ""}

    def _validate_request(self, body: Any) -> None:
        """Nothing: :func:`read` has validated it."""

    def _resolve_model(self, body: Any) -> tuple[str, Any, Any]:
        manager = self.model_manager
        tokenizer = copy.copy(manager.tokenizer)  # each request has its own, because Batches changes it, too
        tokenize = manager.tokenizer.apply_chat_template if self.is_chat else manager.tokenizer

        def inputs(*args: Any, **options: Any) -> Any:
            if self._inputs is None:
                raise _Inputs(tokenize(*args, **options))
            return self._inputs

        tokenizer.apply_chat_template = inputs
        if not self.is_chat:
            tokenizer.response_template, tokenizer.tokenizer = None, inputs
        return manager.names[0], manager.model, tokenizer

    def _build_generation_config(self, body: Any, default: Any, use_cb: bool = False) -> Any:
        return settings_of(self._request, default, self._grammar)

    def get_processor_inputs_from_messages(self, messages: Any, modality: Any) -> Any:
        # transformers' own drops names, reasoning, and texts beside tool calls, which templates read.
        return [{**each, "content": " ".join(part["text"] for part in each.get("content", []))} for each in messages]

    def _build_chunk_sse(self, *args: Any, usage: Any = None, **values: Any) -> str:
        text: str = super()._build_chunk_sse(*args, **values)  # type: ignore[misc]
        if usage is None:
            return text
        # transformers does not end its streams as OpenAI does.
        options = self._request.stream_options
        if options is not None and options.include_usage:
            chunk = json.loads(text.removeprefix("data: "))
            chunk.update(choices=[], usage=usage.model_dump(exclude_none=True))
            text += self.chunk_to_sse(json.dumps(chunk))  # type: ignore[attr-defined]
        return text + "data: [DONE]\n\n"


class _Chat(_CheckedHandler, ChatCompletionHandler):
    kind = request_body.Chat


class _Completion(_CheckedHandler, CompletionHandler):
    kind, is_chat = request_body.Completion, False


class _Events(response._ResponseStreamBuilder):
    """transformers' own, but the calls follow the only message, which it would send again in the place of a call."""

    def finish_message(self) -> list[str]:
        return []  # it stays open

    def tool_call(self, *call: str) -> list[str]:
        self.tool_calls.append(call)  # type: ignore[arg-type] # until completed()
        return []

    def completed(self, usage: Any) -> list[str]:
        calls, self.tool_calls = self.tool_calls, []
        events = super().finish_message()
        for call in calls:
            events += super().tool_call(*call)
        return events + super().completed(usage)


class _Response(_CheckedHandler, response.ResponseHandler):
    kind = request_body.Response

    def _normalize_input(self, body: Any) -> Any:  # type: ignore[override]
        items = body["input"]
        if isinstance(items, list):  # transformers would take a message without content for an empty one
            items = [{"content": None, **item} if "role" in item else item for item in items]
        try:
            messages = super()._normalize_input({"input": items})
        except (LookupError, TypeError, AttributeError, HTTPException) as error:
            raise RequestError(f"input: expected a text or a list of messages and tool calls ({error})") from None
        if body.get("instructions"):  # transformers would put them in the place of a system message
            messages.insert(0, {"role": "system", "content": body["instructions"]})
        return [read(request_body.Message, message).model_dump(exclude_none=True) for message in messages]


# -- errors ------------------------------------------------------------------------------------------------------------

_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_ERROR_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}, 429: {"Retry-After": "1"}}


def _answer_error(request: Request, error: Exception) -> Response:
    """Any error in OpenAI's form."""
    match error:
        case RequestError():
            refusal = error
        case RequestValidationError():
            found = error.errors()[0]["msg"]
            refusal = RequestError(f"the body: expected an object, Content-Type: application/json ({found})")
        case RecursionError():
            refusal = RequestError("the body: objects and lists are nested too deeply")
        case HTTPException():
            paths = f"; there are {', '.join(_ROUTES)}" if error.status_code == 404 else ""
            message = f"{request.method} {request.url.path}: {error.detail}{paths}"
            refusal = RequestError(message, status=error.status_code)
        case RuntimeError() if "start new thread" in str(error):
            refusal = RequestError(f"the server starts no further thread ({error}): {MORE_THREADS}", status=503)
        case _:
            refusal = RequestError(f"{type(error).__name__}: {error}", status=500)
    kind = _ERROR_TYPES.get(refusal.status, "invalid_request_error")
    shown = {"message": str(refusal), "type": kind, "param": refusal.field, "code": None}
    # Not a JSONResponse: names of fields may hold halves of surrogate pairs, which UTF-8 has not.
    body = json.dumps({"error": shown})
    return Response(body, refusal.status, _ERROR_HEADERS.get(refusal.status), "application/json")


# -- metrics -----------------------------------------------------------------------------------------------------------


class _Metrics(Collector):
    """Metrics for Prometheus, in a registry of their own."""

    def __init__(self, batches: Batches, handle: Handle | None) -> None:
        self._batches, self._handle = batches, handle
        self._registry = registry = CollectorRegistry()
        text = "Requests by path and HTTP status; 499: the client has left."
        self.requests = Counter("headrace_requests", text, ("path", "status"), registry=registry)
        buckets = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
        seconds = partial(Histogram, unit="seconds", registry=registry, buckets=buckets)
        self.first_byte = seconds("headrace_first_byte", "From a request to the first byte of its answer.")
        self.request = seconds("headrace_request", "From a request to the end of its answer.")
        registry.register(self)

    def answer(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def collect(self) -> Iterator[Metric]:
        batches, engine = self._batches, self._batches.engine
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield gauge("headrace_alive", "1 while the engine runs.", batches.dead_reason() is None)
        yield gauge("headrace_running_requests", "Requests that generate.", engine.running)
        yield gauge("headrace_waiting_requests", "Requests that wait for others to end.", engine.waiting)
        yield gauge(
            "headrace_cache_tokens", "Tokens that the cache has room for.", engine.rows.num_rows * batches.longest
        )
        yield gauge("headrace_cache_used_tokens", "Of them, those of requests that run.", engine.used_tokens)
        yield counter("headrace_prompt_tokens", "Tokens of prompts of finished requests.", batches.prompt_tokens)
        yield counter("headrace_generated_tokens", "Tokens of answers of finished requests.", batches.generated_tokens)
        if self._handle is not None:
            stats = self._handle.stats()
            yield counter("headrace_moved_bytes", "Bytes of weights copied to the device.", stats.bytes_moved)
            yield counter("headrace_stalls", "Waits of compute for a copy.", stats.stalls)
            if (guessed := stats.speculation) is not None:
                yield counter("headrace_speculation_passes", "Steps that verified guesses.", guessed.passes)
                yield counter("headrace_speculation_tokens", "Tokens of these steps.", guessed.tokens)


# -- around the application --------------------------------------------------------------------------------------------


class RequestMiddleware:
    """The outermost application: checks the key and the length of a request, counts it, and cancels it."""

    def __init__(
        self, app: ASGIApp, batches: Batches, metrics: _Metrics, key: str | None, cors: bool, hosts: Any
    ) -> None:
        self._app, self.batches, self._metrics, self._key = app, batches, metrics, key
        self._hosts = {host.lower() for host in hosts or ()}
        self._longest_body = _BODY_BYTES + _BYTES_PER_TOKEN * batches.longest
        self._body_timeouts: set[asyncio.Timeout] = set()
        # Outside the check of the key, which the preflight requests of browsers do not carry.
        cors_options: Any = {"allow_origins": ["*"], "allow_methods": ["*"], "allow_headers": ["*"]}
        self._entrance: ASGIApp = CORSMiddleware(self._answer, **cors_options) if cors else self._answer

    def stop(self) -> None:
        """Refuse requests whose bodies are incomplete, and limit how long the others may run."""
        for timeout in self._body_timeouts:
            if not timeout.expired():
                timeout.reschedule(0)
        asyncio.get_running_loop().call_later(_STOP_S, self.batches.stop)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._entrance if scope["type"] == "http" else self._app)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin, first_byte_s, started, status = time.perf_counter(), 0.0, 0, 499
        path, request_id = scope["path"], uuid.uuid4().hex
        # Not the client's own name, which two requests may share.
        MutableHeaders(scope=scope)[X_REQUEST_ID] = request_id

        async def observe(message: Message) -> None:
            nonlocal first_byte_s, started, status
            if message["type"] == "http.response.start":
                started = message["status"]
            else:
                first_byte_s = first_byte_s or time.perf_counter() - begin
                status = status if message.get("more_body") else started
            await send(message)

        try:
            body = await self._read(Request(scope, receive))
            messages = [{"type": "http.request", "body": body, "more_body": False}]

            async def replay() -> Message:
                return messages.pop() if messages else await asyncio.Future()

            answer = asyncio.ensure_future(self._app(scope, replay, observe))
            # Only the end of the connection is left to receive.
            connection = asyncio.ensure_future(receive())
            connection.add_done_callback(lambda _: status == 499 and answer.cancel())
            answer.add_done_callback(lambda _: connection.cancel())
            await answer
        except (ClientDisconnect, asyncio.CancelledError):
            pass
        except RequestError as refusal:
            await _answer_error(Request(scope), refusal)(scope, receive, observe)
        finally:
            self.batches.cancel_request(request_id)
            self._metrics.requests.labels(path if path in _ROUTES else "other", status).inc()
            if path in _GENERATES and status == 200:
                self._metrics.first_byte.observe(first_byte_s)
                self._metrics.request.observe(time.perf_counter() - begin)

    def _check_host(self, address: str, given: str) -> None:
        """Refuse a name that a page of another site may have made lead to this machine (DNS rebinding)."""
        host, local = re.sub(r":\d*$", "", given.lower()), ip_address(address.removeprefix("::ffff:")).is_loopback
        known = {"", "*", "localhost", "127.0.0.1", "[::1]", address, *self._hosts}
        if "*" not in self._hosts and host not in known and (self._hosts or (local and self._key is None)):
            text = "is none of this server's names: use localhost, or start it with --allowed-hosts NAME, or --api-key"
            raise RequestError(f"Host: {host[:200]!r} {text}", status=421)

    async def _read(self, request: Request) -> bytes:
        """The body of a request, after a check of its host and key."""
        self._check_host(request.scope["server"][0], request.headers.get("host", ""))
        # Not request.url, on which the header Host has an influence.
        if self._key is not None and request.scope["path"].startswith("/v1"):
            scheme, _, given = dict(request.scope["headers"]).get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not secrets.compare_digest(given, os.fsencode(self._key)):
                text = "the API key is missing or wrong: send the header Authorization: Bearer KEY"
                raise RequestError(text, status=401)
        body, timeout = bytearray(), asyncio.timeout(_RECEIVE_S)
        self._body_timeouts.add(timeout)
        try:
            async with timeout:
                async for part in request.stream():
                    body += part
                    if len(body) > self._longest_body:
                        text = f"the body is longer than {self._longest_body} bytes"
                        raise RequestError(f"{text}, 32 for each token of --context and 256 KiB", status=413)
        except TimeoutError:
            text = f"the body is incomplete: {len(body)} bytes came within {_RECEIVE_S} s, or before the server stopped"
            raise RequestError(text, status=408) from None
        finally:
            self._body_timeouts.discard(timeout)
        return bytes(body)


# -- the process -------------------------------------------------------------------------------------------------------


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address, and refuses connections until :func:`run_app` listens on it.

    Raises:
        OptionError: the address does not belong to this machine, is taken, or may not be used.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OptionError(
            f"--host {host} --port {port}: expected a free address of this machine, found: {error.strerror or error}; "
            f"choose another port, or 0 for a free one"
        ) from error
    return bound


class _Connection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """Closes itself if no request comes, for which uvicorn has no limit once a byte has come.

    At the limit of connections a new one takes the place of the oldest that has not sent its request yet.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(_RECEIVE_S, self._check, None)
        self._opened_s = self.loop.time()
        if len(self.connections) > (limit := 4 * self.config.backlog):
            _log_full(limit)
            min(filter(_Connection._is_silent, self.connections), key=lambda each: each._opened_s).transport.close()

    def _is_silent(self) -> bool:
        waits = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
        return waits and not self.transport.is_closing()

    def _check(self, last: object) -> None:
        """``last``: the request that had been answered at the previous check; ``self`` if one was running."""
        request = self if self.cycle is not None and not self.cycle.response_complete else self.cycle
        if request is last is not self:
            self.transport.close()
        if not self.transport.is_closing():
            self.loop.call_later(_RECEIVE_S, self._check, request)


@cache  # once
def _log_full(limit: int) -> None:
    logging.getLogger("uvicorn.error").warning(
        "%d connections at once are the limit (a quarter of ulimit -n): the oldest without a request are closed", limit
    )


class _Server(uvicorn.Server):
    """Ends in limited time, and not by the signal, which uvicorn would raise again."""

    def handle_exit(self, sig: int, frame: object) -> None:
        if self.should_exit and sig == signal.SIGINT:
            os._exit(130)  # at once, whatever the engine runs
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.stop()  # type: ignore[union-attr] # a RequestMiddleware
        # A forward that hangs does not end.
        faulthandler.dump_traceback_later(2 * _STOP_S, exit=True)
        await super().shutdown(sockets)


def run_app(app: RequestMiddleware, bound: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, then finish the requests, in limited time; a second SIGINT ends at once."""
    LOGGING_CONFIG["handlers"]["access"]["stream"] = "ext://sys.stderr"
    settings = uvicorn.Config(app, http=_Connection, lifespan="on", server_header=False)
    settings.timeout_graceful_shutdown = _STOP_S + 5  # for clients that do not read their answers, complete by then
    most, (soft, hard) = _CONNECTIONS + app.batches.max_waiting, resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = max(soft, min(hard, 4 * most))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # A quarter of the limit: connections are accepted that many at a time, and a new one has to be read before it is
    # the oldest.
    settings.backlog = min(most, soft // 4) // 4
    with bound:
        _Server(settings).run(sockets=[bound])
