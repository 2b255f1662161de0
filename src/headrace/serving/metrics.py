"""Metrics of a server for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from headrace.serving.engine import Engine
from headrace.serving.switch import Switch

_GAUGES: dict[str, tuple[str, Callable[[Engine], int]]] = {
    "running_requests": ("Answers that are generated.", lambda engine: engine.running),
    "waiting_requests": ("Answers that wait for others to end.", lambda engine: engine.waiting),
    "cache_tokens": (
        "Tokens that the cache has room for.",
        lambda engine: engine.rows.num_rows * engine.rows.num_tokens,
    ),
    "cache_used_tokens": ("Of them, those of answers that run.", lambda engine: engine.used_tokens),
}
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
        models, switch = self._switch.models, self._switch
        label = ["model"] if len(models) > 1 else []

        def family(kind: type[Any], name: str, text: str, values: Iterable[int]) -> Metric:
            found: Any = kind(f"headrace_{name}", text, labels=label)
            for model, value in zip(models, values, strict=True):
                found.add_metric(model.names[: len(label)], value)
            return found  # type: ignore[no-any-return]

        gauge = partial(family, GaugeMetricFamily)
        yield gauge("alive", "1 while requests can run.", [model.problem is None for model in models])
        yield gauge("on_device", "1 while the model is there.", [model is switch.running for model in models])
        text = "Answers that wait for the turn of their model."
        yield gauge("switch_requests", text, [switch.waiting_for(model) for model in models])
        engines = [None if model.served is None else model.served.engine.engine for model in models]
        for name, (text, read) in _GAUGES.items():
            yield gauge(name, text, [0 if engine is None else read(engine) for engine in engines])
        counts = [model.counts() for model in models]
        for name in [name for name in _COUNTS if any(name in found for found in counts)]:
            yield family(CounterMetricFamily, name, _COUNTS[name], [found[name] for found in counts])
