"""Metrics of a server for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from headrace.serving.engine import Engine
from headrace.serving.switch import Hosted, Switch

_COUNTS = {
    "prompt_tokens": "Tokens of prompts of finished answers.",
    "generated_tokens": "Tokens of finished answers.",
    "moved_bytes": "Bytes of weights copied to the device.",
    "stalls": "Waits of compute for a copy.",
    "speculation_passes": "Steps that verified guesses.",
    "speculation_tokens": "Tokens of these steps.",
}


class Metrics(Collector):
    """Counts requests, and reads the others when they are asked for.

    Attributes:
        requests: by path and status.
        first_byte, request: seconds of requests that generate.
    """

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self._registry = registry = CollectorRegistry()
        text = "Requests by path and HTTP status; 499: the client has left."
        self.requests = Counter("headrace_requests", text, ("path", "status"), registry=registry)
        buckets = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
        seconds = partial(Histogram, unit="seconds", registry=registry, buckets=buckets)
        self.first_byte = seconds("headrace_first_byte", "From a request to the first byte of its answer.")
        self.request = seconds("headrace_request", "From a request to the end of its answer.")
        self._switches = seconds(
            "headrace_switch", "Of a switch: a model parked, another resumed or loaded.", ("kind",)
        )
        switch.observe = lambda kind, seconds: self._switches.labels(kind).observe(seconds)
        registry.register(self)

    def answer(self) -> Response:
        """All of them as text."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def collect(self) -> Iterator[Metric]:
        """For the registry; of several models, each with its name."""
        models = self._switch.models
        rows = {model: model.served.engine.engine for model in models if model.served is not None}
        counts = {model: model.counts() for model in models}
        labels = ["model"] if len(models) > 1 else []

        def metric(kind: type[Any], name: str, text: str, value: Callable[[Hosted], float]) -> Metric:
            found: Any = kind(name, text, labels=labels)
            for model in models:
                found.add_metric(model.names[:1] if labels else [], value(model))
            return found  # type: ignore[no-any-return]

        def of_rows(value: Callable[[Engine], float]) -> Callable[[Hosted], float]:
            return lambda model: value(rows[model]) if model in rows else 0

        def of_counts(name: str, model: Hosted) -> int:
            return counts[model][name]

        waiting, runs = of_rows(lambda engine: engine.waiting), of_rows(lambda engine: engine.running)
        room = of_rows(lambda engine: engine.rows.num_rows * engine.rows.num_tokens)
        gauge = partial(metric, GaugeMetricFamily)
        yield gauge("headrace_alive", "1 while requests can run.", lambda model: model.problem is None)
        yield gauge("headrace_running", "1 while the model is on the device.", lambda m: m is self._switch.running)
        yield gauge("headrace_running_requests", "Answers that are generated.", runs)
        text = "Answers that wait for others to end, or for a switch."
        yield gauge("headrace_waiting_requests", text, lambda m: waiting(m) + self._switch.waiting_for(m))
        yield gauge("headrace_cache_tokens", "Tokens that the cache has room for.", room)
        text = "Of them, those of answers that run."
        yield gauge("headrace_cache_used_tokens", text, of_rows(lambda engine: engine.used_tokens))
        for name, text in _COUNTS.items():
            if any(name in found for found in counts.values()):
                yield metric(CounterMetricFamily, f"headrace_{name}", text, partial(of_counts, name))
