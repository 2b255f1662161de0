"""Metrics of a server for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from headrace.api import Handle
from headrace.serving.async_engine import AsyncEngine


class Metrics(Collector):
    """Counts requests, and reads the others when they are asked for.

    Attributes:
        requests: by path and status.
        first_byte, request: seconds of requests that generate.
    """

    def __init__(self, engine: AsyncEngine, handle: Handle | None) -> None:
        self._engine, self._handle = engine, handle
        self._registry = registry = CollectorRegistry()
        text = "Requests by path and HTTP status; 499: the client has left."
        self.requests = Counter("headrace_requests", text, ("path", "status"), registry=registry)
        buckets = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
        seconds = partial(Histogram, unit="seconds", registry=registry, buckets=buckets)
        self.first_byte = seconds("headrace_first_byte", "From a request to the first byte of its answer.")
        self.request = seconds("headrace_request", "From a request to the end of its answer.")
        registry.register(self)

    def answer(self) -> Response:
        """All of them as text."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        outer, engine = self._engine, self._engine.engine
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield gauge("headrace_alive", "1 while the engine runs.", outer.why_dead() is None)
        yield gauge("headrace_running_requests", "Answers that are generated.", engine.running)
        yield gauge("headrace_waiting_requests", "Answers that wait for others to end.", engine.waiting)
        room = engine.rows.num_rows * engine.rows.num_tokens
        yield gauge("headrace_cache_tokens", "Tokens that the cache has room for.", room)
        yield gauge("headrace_cache_used_tokens", "Of them, those of answers that run.", engine.used_tokens)
        yield counter("headrace_prompt_tokens", "Tokens of prompts of finished answers.", outer.prompt_tokens)
        yield counter("headrace_generated_tokens", "Tokens of finished answers.", outer.generated_tokens)
        if self._handle is not None:
            stats = self._handle.stats()
            yield counter("headrace_moved_bytes", "Bytes of weights copied to the device.", stats.bytes_moved)
            yield counter("headrace_stalls", "Waits of compute for a copy.", stats.stalls)
            if (guessed := stats.speculation) is not None:
                yield counter("headrace_speculation_passes", "Steps that verified guesses.", guessed.passes)
                yield counter("headrace_speculation_tokens", "Tokens of these steps.", guessed.tokens)
