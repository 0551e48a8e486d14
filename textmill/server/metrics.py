"""Figures of the server for Prometheus: requests, tokens, the queue, latencies, and the process."""

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lm.inference.scheduler import Scheduler
from textmill.server.choices import Choice

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ServerMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def counter(name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"textmill_{name}", help_text, labels, registry=registry)

        def histogram(name: str, help_text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
            return Histogram(f"textmill_{name}_seconds", help_text, labels, registry=registry, buckets=buckets)

        self.requests = counter("requests", "Finished requests.", ["endpoint", "status"])
        request_help = "Seconds from the start of a request to the end of its response."
        self.request_seconds = histogram("request", request_help, _SECONDS, ["endpoint"])
        first_help = "Seconds from a request to the first token of a completion, with the time in the queue."
        self._first_token_seconds = histogram("time_to_first_token", first_help, _SECONDS)
        token_help = "Mean seconds from one token of a completion to the next."
        token_buckets = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
        self._token_seconds = histogram("time_per_output_token", token_help, token_buckets)
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._cached_tokens = counter("cached_prompt_tokens", "Tokens of prompts that were in the prefix cache.")
        self._completion_tokens = counter("completion_tokens", "Generated tokens.")
        self._guessed_tokens = counter("guessed_tokens", "Tokens that speculative decoding guessed.")
        self._accepted_tokens = counter("accepted_tokens", "Guessed tokens that the model sampled.")
        for name, help_text, get in (
            ("textmill_running_completions", "Completions in the batch.", lambda: scheduler.running_count),
            ("textmill_waiting_completions", "Completions in the queue.", lambda: scheduler.waiting_count),
        ):
            Gauge(name, help_text, registry=registry).set_function(get)

    def record_completion(self, choice: Choice) -> None:
        """Count a finished completion. It may have no token, if its client disconnected. A prompt that was computed
        counts once."""
        generation = choice.generation
        if choice.is_first_of_prompt and generation.is_prefilled:
            self._prompt_tokens.inc(len(generation.prompt))
            self._cached_tokens.inc(generation.num_cached_tokens)
        self._completion_tokens.inc(len(generation.ids))
        self._guessed_tokens.inc(generation.num_draft_tokens)
        self._accepted_tokens.inc(generation.num_accepted_tokens)
        if choice.first_token_at is not None:
            self._first_token_seconds.observe(choice.first_token_at - choice.created_at)
            if (others := len(generation.ids) - 1) > 0:
                self._token_seconds.observe((time.monotonic() - choice.first_token_at) / others)

    def response(self) -> Response:
        """Return all metrics in Prometheus's text format."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


class CountRequests:
    """ASGI middleware that counts requests by endpoint and status. Paths outside ``endpoints`` count as ``other``."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, endpoints: frozenset[str]) -> None:
        self._app, self._metrics, self._endpoints = app, metrics, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the application, and count its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint = scope["path"] if scope["path"] in self._endpoints else "other"
        status, started = 500, time.monotonic()

        async def count_and_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, count_and_send)
        finally:
            self._metrics.requests.labels(endpoint, str(status)).inc()
            self._metrics.request_seconds.labels(endpoint).observe(time.monotonic() - started)
