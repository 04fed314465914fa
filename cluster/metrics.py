"""Counts and times of requests as their caller sees them, in Prometheus' text format.

The one place where they are defined; those of ranks and router are in metric_samples.py, which
also hands these on to Ray. Labels are pool, path and outcome only, all from short lists: nothing
that a client sends becomes one. Knows nothing of HTTP beyond the names of its paths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    generate_latest,
)

from cluster.timeline import Timeline, TimelineEvent

PATHS = ("/v1/completions", "/v1/models", "/health", "/ready", "/metrics", "/openapi.json")
_HTTP_OUTCOMES = {401: "unauthorized", 404: "not_found", 429: "no_room", 499: "cancelled"}
_OUTCOMES = ("stop", "length", "cancelled", "failed")
_REPEATS = {"lost": "prefilled_again", "preempted": "preempted", "place_lost": "placed_again"}
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_LONG = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """One registry of its own, so that several servers of one process stay apart."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, running: Callable[[], int]) -> None:
        """`running()` is how many answers are being generated now."""
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "tandem_http_requests",
            "HTTP requests that have ended, streams included",
            ("path", "outcome"),
            registry=registry,
        )
        self._answers = Counter(
            "tandem_answers",
            "Answers that have ended, by why; those that clients left are cancelled",
            ("outcome",),
            registry=registry,
        )
        self._retries = Counter(
            "tandem_retries",
            "Losses that requests outlived: the prompt was run again, or another place was found",
            ("outcome",),
            registry=registry,
        )
        self._ttft = Histogram(
            "tandem_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=_LONG,
            registry=registry,
        )
        self._tpot = Histogram(
            "tandem_time_per_output_token_seconds",
            "Mean time per token after the first, of one answer",
            buckets=_SHORT,
            registry=registry,
        )
        self._queued = Histogram(
            "tandem_queue_seconds",
            "From a rank's taking a request to the first step for it",
            ("pool",),
            buckets=_LONG,
            registry=registry,
        )
        self._handoff = Histogram(
            "tandem_handoff_seconds",
            "From the end of the prompt's last chunk until decode has all of the state",
            ("path",),
            buckets=_SHORT,
            registry=registry,
        )
        self._push = Histogram(
            "tandem_push_seconds",
            "Time in which one request's state was gathered and written",
            ("path",),
            buckets=_SHORT,
            registry=registry,
        )
        self._moved = Counter(
            "tandem_handoff_bytes", "State handed over", ("path",), registry=registry
        )
        self._prompt_tokens = Counter(
            "tandem_prompt_tokens", "Tokens of prompts taken in", registry=registry
        )
        self._output_tokens = Counter("tandem_output_tokens", "Tokens generated", registry=registry)
        in_flight = Gauge(
            "tandem_answers_in_flight", "Answers being generated now", registry=registry
        )
        in_flight.set_function(running)
        for outcome in _OUTCOMES:  # from the start: a rate needs a first value
            self._answers.labels(outcome)
        for outcome in _REPEATS.values():
            self._retries.labels(outcome)

    def ended(self, path: str, outcome: str) -> None:
        """An HTTP request."""
        known = next((one for one in PATHS if path == one or path.startswith(one + "/")), "other")
        self._requests.labels(known, outcome).inc()

    def answer(
        self, prompt_tokens: int, clock: Callable[[], float] = time.perf_counter
    ) -> AnswerClock:
        """To be told of each piece of an answer that begins now."""
        self._prompt_tokens.inc(prompt_tokens)
        return AnswerClock(self._ttft, self._tpot, self._output_tokens, clock)

    def happened(self, timeline: Timeline) -> None:
        """All that befell a request, once it has ended."""
        pool = "prefill"
        for event in timeline.events:
            if event.name == "routed":
                pool = "prefill" if event.detail.get("prefill") else "decode"
            self._count(event, pool)

    def _count(self, event: TimelineEvent, pool: str) -> None:
        """`pool` is the one that runs the prompt."""
        match event.name, event.detail:
            case "started", {"queued_s": queued_s}:
                self._queued.labels(pool).observe(queued_s)
            case "handed_over", {"bytes": moved, "push_s": push_s, "tail_s": tail_s, "path": path}:
                self._moved.labels(path).inc(moved)
                self._push.labels(path).observe(push_s)
                self._handoff.labels(path).observe(tail_s)
            case "finished", {"outcome": outcome}:
                self._answers.labels(outcome).inc()
            case name, _ if name in _REPEATS:
                self._retries.labels(_REPEATS[name]).inc()

    def families(self) -> Iterable[Metric]:
        """As the client library collects them."""
        return self._registry.collect()

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
    if status in _HTTP_OUTCOMES:
        return _HTTP_OUTCOMES[status]
    return "bad_request" if status < 500 else "unavailable" if status == 503 else "error"
