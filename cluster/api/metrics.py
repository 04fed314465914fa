"""Counts and times of one HTTP server, in Prometheus' text format.

Labels are path and outcome only, both from short lists: nothing that a client sends becomes one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

PATHS = ("/v1/completions", "/v1/models", "/health", "/ready", "/metrics", "/openapi.json")
_OUTCOMES = {401: "unauthorized", 404: "not_found", 429: "no_room", 499: "cancelled"}
_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TPOT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class Metrics:
    """One registry of its own, so that several servers of one process stay apart."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, running: Callable[[], int]) -> None:
        """`running()` is how many answers are being generated now."""
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "tandem_http_requests",
            "HTTP requests that have ended, streams included",
            ("path", "outcome"),
            registry=self._registry,
        )
        self._ttft = Histogram(
            "tandem_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=_TTFT_BUCKETS,
            registry=self._registry,
        )
        self._tpot = Histogram(
            "tandem_time_per_output_token_seconds",
            "Mean time per token after the first, of one answer",
            buckets=_TPOT_BUCKETS,
            registry=self._registry,
        )
        self._prompt_tokens = Counter(
            "tandem_prompt_tokens", "Tokens of prompts taken in", registry=self._registry
        )
        self._output_tokens = Counter(
            "tandem_output_tokens", "Tokens generated", registry=self._registry
        )
        in_flight = Gauge(
            "tandem_answers_in_flight", "Answers being generated now", registry=self._registry
        )
        in_flight.set_function(running)

    def ended(self, path: str, outcome: str) -> None:
        known = next((one for one in PATHS if path == one or path.startswith(one + "/")), "other")
        self._requests.labels(known, outcome).inc()

    def answer(
        self, prompt_tokens: int, clock: Callable[[], float] = time.perf_counter
    ) -> AnswerClock:
        """To be told of each piece of an answer that begins now."""
        self._prompt_tokens.inc(prompt_tokens)
        return AnswerClock(self._ttft, self._tpot, self._output_tokens, clock)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class AnswerClock:
    """Times one answer; costs one reading of the clock a piece."""

    def __init__(
        self,
        ttft: Histogram,
        tpot: Histogram,
        tokens: Counter,
        clock: Callable[[], float],
    ) -> None:
        self._ttft, self._tpot, self._tokens, self._clock = ttft, tpot, tokens, clock
        self._begun = clock()
        self._first: float | None = None
        self._last = 0.0
        self._first_count = 0

    def got(self, count: int) -> None:
        """`count` tokens are here in all."""
        self._last = self._clock()
        if self._first is None:
            self._first, self._first_count = self._last, count
            self._ttft.observe(self._last - self._begun)

    def end(self, count: int) -> None:
        """However the answer ended, with `count` tokens."""
        self._tokens.inc(count)
        if self._first is not None and count > self._first_count:
            self._tpot.observe((self._last - self._first) / (count - self._first_count))


def outcome_of(status: int) -> str:
    """What a response's status says of the request."""
    if status < 400:
        return "ok"
    if status in _OUTCOMES:
        return _OUTCOMES[status]
    return "bad_request" if status < 500 else "unavailable" if status == 503 else "error"
