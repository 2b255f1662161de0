"""The process of a server: its socket, its connections, and how it ends."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import resource
import signal
import socket
from functools import cache
from typing import Any

import uvicorn
from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from headrace.errors import OptionError
from headrace.serving.app import RECEIVE_S, App

_CONNECTIONS = 1024  # and one for each request that may wait
_STOP_S = 300  # for the requests that run when the server is stopped


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
        self.loop.call_later(RECEIVE_S, self._check, None)
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
            self.loop.call_later(RECEIVE_S, self._check, request)


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
        app: App = self.config.app  # type: ignore[assignment]
        app.refuse_unread()
        asyncio.get_running_loop().call_later(_STOP_S, app.switch.stop)
        # A forward that hangs does not end.
        faulthandler.dump_traceback_later(2 * _STOP_S, exit=True)
        await super().shutdown(sockets)


def run_app(app: App, bound: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, then finish the requests, in limited time; a second SIGINT ends at once."""
    LOGGING_CONFIG["handlers"]["access"]["stream"] = "ext://sys.stderr"
    settings = uvicorn.Config(app, http=_Connection, lifespan="on", server_header=False)
    settings.timeout_graceful_shutdown = _STOP_S + 5  # for clients that do not read their answers, complete by then
    most = _CONNECTIONS + len(app.switch.models) * app.switch.max_waiting
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = max(soft, min(hard, 4 * most))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # A quarter of the limit: connections are accepted that many at a time, and a new one has to be read before it is
    # the oldest.
    settings.backlog = min(most, soft // 4) // 4
    with bound:
        _Server(settings).run(sockets=[bound])
