"""The server as an ASGI application: its routes, its errors, and the limits on requests."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import MORE_THREADS
from headrace.serving.async_engine import Updates
from headrace.serving.chat_completions import ChatCompletions
from headrace.serving.completions import Completions
from headrace.serving.endpoint import Endpoint
from headrace.serving.messages import Messages
from headrace.serving.metrics import Metrics
from headrace.serving.request_body import RequestError
from headrace.serving.responses import Responses
from headrace.serving.switch import Hosted, Switch

_log = logging.getLogger(__name__)
RECEIVE_S = 30  # for the head of a request, and then for its body

_GENERATE: dict[str, type[Endpoint]] = {
    "/v1/chat/completions": ChatCompletions,
    "/v1/completions": Completions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
}
_ROUTES = (*_GENERATE, "/v1/models", "/v1/models/NAME/park", "/health", "/metrics")
# More than texts of that many tokens have (an escaped emoji: 12), so that longer ones are neither read nor tokenised.
_BYTES_PER_TOKEN = 32
_BODY_BYTES = 2**18


class App:
    """The outermost application: checks the key and the length of a request, counts it, and cancels it.

    Attributes:
        switch: runs the requests; stopped when the application stops.
    """

    def __init__(
        self,
        switch: Switch,
        key: str | None,
        cors: bool = False,
        hosts: Collection[str] | None = None,
    ) -> None:
        """Args:
        switch: the models, and what runs them.
        key: requests to ``/v1`` need ``Authorization: Bearer KEY``; ``None``: they need none.
        cors: whether pages of any origin may send requests.
        hosts: names of the server in requests, besides those of this machine; ``*``: any.
        """
        self.switch, self._key, self._created = switch, key, int(time.time())
        self._metrics = Metrics(switch)
        self._hosts = {host.lower() for host in hosts or ()}
        self._longest_body = _BODY_BYTES + _BYTES_PER_TOKEN * max(model.longest for model in switch.models)
        self._body_timeouts: set[asyncio.Timeout] = set()
        routes = [Route(path, partial(self._generate, kind), methods=["POST"]) for path, kind in _GENERATE.items()]
        for path, get in (
            ("/v1/models", self._list), ("/v1/models/{name:path}", self._model), ("/health", self._health),
            ("/metrics", lambda _: self._metrics.answer()),
        ):  # fmt: skip
            routes.append(Route(path, get))
        routes.append(Route("/v1/models/{name:path}/park", self._park, methods=["POST"]))
        self._router = Router(routes, lifespan=self._lifespan)
        # Outside the check of the key, which the preflight requests of browsers do not carry.
        cors_options: Any = {"allow_origins": ["*"], "allow_methods": ["*"], "allow_headers": ["*"]}
        self._entrance: ASGIApp = CORSMiddleware(self._answer, **cors_options) if cors else self._answer

    @asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncIterator[None]:
        yield
        self.switch.stop()

    def refuse_unread(self) -> None:
        """Refuse requests whose bodies are incomplete."""
        for timeout in self._body_timeouts:
            if not timeout.expired():
                timeout.reschedule(0)

    # -- routes --------------------------------------------------------------------------------------------------------

    async def _generate(self, kind: type[Endpoint], request: Request) -> Response:
        content_type = request.headers.get("content-type", "")
        body = await asyncio.to_thread(_object, await request.body(), content_type)  # seconds for a long one
        model = self.switch.find(body.get("model"))
        ready = await self._made(kind, model, body)
        async with self.switch.turn(model, ready):
            (endpoint,) = ready or await self._made(kind, model, body)
            ready.clear()
            model.keep_alive_s, engine = endpoint.request.keep_alive, endpoint.served.engine
            updates = engine.submit(endpoint.answers)
            request.scope["at end"].callback(engine.cancel, endpoint.answers)
        if endpoint.request.stream:
            return StreamingResponse(self._events(endpoint, updates), media_type="text/event-stream")
        async for _ in updates:
            pass
        return _json(endpoint.whole())

    async def _made(self, kind: type[Endpoint], model: Hosted, body: dict[str, Any]) -> list[Endpoint]:
        """The request; nothing while its model is unloaded."""
        served = model.served
        return [] if served is None else [await asyncio.to_thread(kind, served, body)]

    async def _events(self, endpoint: Endpoint, updates: Updates) -> AsyncIterator[str]:
        try:
            yield _sent(endpoint.begin())
            async for news in updates:
                yield _sent(event for answer, pieces in news for event in endpoint.events(answer, pieces))
            yield _sent(endpoint.end())
        except Exception as error:  # the status is sent already
            yield _sent(endpoint.failure(_body_of(_refusal("", error))["error"]))

    def _list(self, _: Request) -> Response:
        data = [self._entry(model, name) for model in self.switch.models for name in model.names]
        return _json({"object": "list", "data": data})

    def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        return _json(self._entry(self.switch.find(name), name))

    def _entry(self, model: Hosted, name: str) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": self._created, "owned_by": "headrace"}
        error = {} if model.problem is None else {"error": model.problem}
        return {**about, "max_model_len": model.longest, "state": self.switch.state_of(model), **error}

    async def _park(self, request: Request) -> Response:
        model = self.switch.find(name := request.path_params["name"])
        if model.handle is None and model.load is None:
            raise RequestError(f"{name!r} is resident, and cannot be parked")
        async with self.switch.turn(model, [], parks=True):
            return _json(self._entry(model, name))

    def _health(self, _: Request) -> Response:
        problems = {model: model.problem for model in self.switch.models if model.problem}
        if self.switch.running in problems or len(problems) == len(self.switch.models):
            raise RequestError("; ".join(map(str, problems.values())), status=503)
        found = {model.names[0]: why for model, why in problems.items()}
        return _json({"status": "degraded", "problems": found} if found else {"status": "ok"})

    # -- a request -----------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # by it a router raises errors
        await (self._entrance if scope["type"] == "http" else self._router)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin, first_byte_s, started, status = time.perf_counter(), 0.0, 0, 499
        path, request_id = scope["path"], uuid.uuid4().hex

        async def observe(message: Message) -> None:
            nonlocal first_byte_s, started, status
            if message["type"] == "http.response.start":
                started = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            else:
                first_byte_s = first_byte_s or time.perf_counter() - begin
                status = status if message.get("more_body") else started
            await send(message)

        try:
            with ExitStack() as scope["at end"]:
                read = await self._read(Request(scope, receive))
                messages = [{"type": "http.request", "body": read, "more_body": False}]

                async def replay() -> Message:
                    return messages.pop() if messages else await asyncio.Future()

                answer = asyncio.ensure_future(self._router(scope, replay, observe))
                # Only the end of the connection is left to receive.
                connection = asyncio.ensure_future(receive())
                connection.add_done_callback(lambda _: status == 499 and answer.cancel())
                answer.add_done_callback(lambda _: connection.cancel())
                await answer
        except (ClientDisconnect, asyncio.CancelledError):
            pass
        except Exception as error:
            refusal = _refusal(f"{scope['method']} {path}", error)
            body = {"type": "error"} if path == "/v1/messages" else {}  # Anthropic's form
            await _json(body | _body_of(refusal), refusal.status)(scope, receive, observe)
        finally:
            self._metrics.requests.labels(path if path in _ROUTES else "other", status).inc()
            if path in _GENERATE and status == 200:
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
            headers = dict(request.scope["headers"])
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            given = given if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")  # as Anthropic's clients
            if not secrets.compare_digest(given, os.fsencode(self._key)):
                text = "the API key is missing or wrong: send the header Authorization: Bearer KEY"
                raise RequestError(text, status=401)
        body, timeout = bytearray(), asyncio.timeout(RECEIVE_S)
        self._body_timeouts.add(timeout)
        try:
            async with timeout:
                async for part in request.stream():
                    body += part
                    if len(body) > self._longest_body:
                        text = f"the body is longer than {self._longest_body} bytes"
                        raise RequestError(f"{text}, 32 for each token of --context and 256 KiB", status=413)
        except TimeoutError:
            text = f"the body is incomplete: {len(body)} bytes came within {RECEIVE_S} s, or before the server stopped"
            raise RequestError(text, status=408) from None
        finally:
            self._body_timeouts.discard(timeout)
        return bytes(body)


# -- bodies ------------------------------------------------------------------------------------------------------------

_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_ERROR_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}, 429: {"Retry-After": "1"}}


def _object(body: bytes, content_type: str) -> dict[str, Any]:
    expected = "the body: expected an object, Content-Type: application/json"
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise RequestError(f"{expected}, found {content_type[:200]!r}")
    try:
        found = json.loads(body)
    except ValueError as error:  # of its syntax, its encoding, or a number of too many digits
        raise RequestError(f"{expected} ({error})") from None
    if not isinstance(found, dict):
        raise RequestError(f"{expected}, found {type(found).__name__}")
    return found


def _text(value: object) -> str:
    # Names of fields may hold halves of surrogate pairs, which UTF-8 has not.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace").decode()


def _json(value: object, status: int = 200) -> Response:
    return Response(_text(value), status, _ERROR_HEADERS.get(status), "application/json")


def _sent(events: Iterable[dict[str, Any] | str]) -> str:
    """Server-sent events; those of OpenAI's newer interfaces have names."""
    parts = []
    for event in events:
        name = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
        parts.append(f"{name}data: {event if isinstance(event, str) else _text(event)}\n\n")
    return "".join(parts)


def _refusal(request: str, error: Exception) -> RequestError:
    """Any error as that of a request, which is given by its method and path."""
    match error:
        case RequestError():
            return error
        case RecursionError():
            return RequestError("the body: objects and lists are nested too deeply")
        case HTTPException():
            paths = f"; there are {', '.join(_ROUTES)}" if error.status_code == 404 else ""
            return RequestError(f"{request}: {error.detail}{paths}", status=error.status_code)
        case RuntimeError() if "start new thread" in str(error):
            return RequestError(f"the server starts no further thread ({error}): {MORE_THREADS}", status=503)
        case _:
            _log.error("%s: status 500", request or "a stream", exc_info=error)
            return RequestError(f"{type(error).__name__}: {error}", status=500)


def _body_of(refusal: RequestError) -> dict[str, Any]:
    """In OpenAI's form."""
    kind = _ERROR_TYPES.get(refusal.status, "invalid_request_error")
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.field, "code": None}}
