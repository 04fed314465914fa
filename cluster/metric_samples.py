"""What ranks, router and ingress tell Ray's metrics, from what they know anyway. Pure.

Labels are pool, state, path and outcome, each from a short list: never a request, a rank or
anything that a client sends. Read once a second; nothing here costs a token any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cluster.messages import Member


@dataclass(frozen=True)
class Metric:
    """A counter's value only grows, within one process."""

    name: str
    kind: Literal["gauge", "counter"]
    meaning: str
    labels: tuple[str, ...] = ("pool",)


@dataclass(frozen=True)
class Sample:
    """A metric's value now, for one choice of its labels."""

    metric: Metric
    value: float
    labels: tuple[str, ...]


BLOCKS = Metric("tandem_blocks", "gauge", "blocks of request state by state", ("pool", "state"))
SLOTS = Metric("tandem_slots", "gauge", "slots of request state by state", ("pool", "state"))
REQUESTS = Metric("tandem_requests", "gauge", "requests in ranks by state", ("pool", "state"))
WAITING = Metric("tandem_waiting_tokens", "gauge", "known tokens that are not yet computed")
STUCK = Metric("tandem_stuck_seconds", "gauge", "time without a step while there is work")
HOMELESS = Metric("tandem_homeless_blocks", "gauge", "blocks of prompts that wait for a place")
STEPS = Metric("tandem_engine_steps", "counter", "steps made by engines")
TOKENS = Metric("tandem_engine_tokens", "counter", "tokens made by engines")
STEP_TIME = Metric("tandem_step_seconds", "counter", "spent in steps by engines")
WAIT_TIME = Metric("tandem_step_wait_seconds", "counter", "of these, waiting for the device")
DECODE_STEPS = Metric(
    "tandem_decode_steps",
    "counter",
    "steps of answers' rows apart from others: graph, or launched one by one",
    ("pool", "path"),
)
ROWS_AHEAD = Metric(
    "tandem_rows_ahead",
    "counter",
    "rows that were begun before they were asked for: used, unused",
    ("pool", "outcome"),
)
GRAPHS = Metric("tandem_graphs", "gauge", "CUDA graphs of decode steps")
GRAPH_BYTES = Metric("tandem_graph_bytes", "gauge", "device memory of CUDA graphs, about")
PREEMPTIONS = Metric("tandem_preemptions", "counter", "answers that gave their memory to others")
HANDOFFS = Metric("tandem_handoffs", "counter", "requests handed over", ("pool", "path"))
MOVED = Metric("tandem_transfer_bytes", "counter", "state handed over", ("pool", "path"))
MOVE_TIME = Metric(
    "tandem_transfer_seconds", "counter", "spent in gathering and writing it", ("pool", "path")
)
HIDDEN_TIME = Metric(
    "tandem_transfer_hidden_seconds", "counter", "of these, while the prompt ran", ("pool", "path")
)
PAIRS_MET = Metric(
    "tandem_pairs_met",
    "counter",
    "decode ranks that prefill has met, by path: ok, slow, or a fallback from the direct path",
    ("pool", "path", "outcome"),
)
PATH_SPEED = Metric(
    "tandem_path_bytes_per_second",
    "gauge",
    "of the slowest pair of ranks on a path, as measured when they met",
    ("pool", "path"),
)
RANKS = Metric("tandem_ranks", "gauge", "ranks that report to the router", ("pool", "state"))
STARTS = Metric("tandem_rank_starts", "counter", "lives of ranks that the router has met")

METRICS = (
    BLOCKS,
    SLOTS,
    REQUESTS,
    WAITING,
    STUCK,
    HOMELESS,
    STEPS,
    TOKENS,
    STEP_TIME,
    WAIT_TIME,
    DECODE_STEPS,
    ROWS_AHEAD,
    GRAPHS,
    GRAPH_BYTES,
    PREEMPTIONS,
    HANDOFFS,
    MOVED,
    MOVE_TIME,
    HIDDEN_TIME,
    PAIRS_MET,
    PATH_SPEED,
    RANKS,
    STARTS,
)

STATES = ("free", "leased", "cached", "quarantined")
POOLS = ("prefill", "decode")


def rank_samples(status: Mapping[str, Any]) -> Iterator[Sample]:
    """Of what a rank's status() says."""
    pool = status["role"]
    for metric, kind in ((BLOCKS, "blocks"), (SLOTS, "slots")):
        ledger = status["ledger"][kind]
        for state in STATES:
            yield Sample(metric, ledger[state], (pool, state))
    load, health = status["load"], status["health"]
    yield Sample(REQUESTS, load["waiting"], (pool, "waiting"))
    yield Sample(REQUESTS, load["running"], (pool, "running"))
    yield Sample(WAITING, load["waiting_tokens"], (pool,))
    yield Sample(STUCK, health["stuck_s"], (pool,))
    yield Sample(STEPS, health["steps"], (pool,))
    yield Sample(TOKENS, status["tokens"], (pool,))
    yield from _step_samples(pool, status["steps"])
    yield Sample(PREEMPTIONS, status["preempted"], (pool,))
    if "moved" in status:  # it sends
        yield Sample(HOMELESS, status["homeless_blocks"], (pool,))
        for path, moved in status["moved"].items():
            yield Sample(HANDOFFS, moved["handoffs"], (pool, path))
            yield Sample(MOVED, moved["nbytes"], (pool, path))
            yield Sample(MOVE_TIME, moved["seconds"], (pool, path))
            yield Sample(HIDDEN_TIME, moved["hidden_s"], (pool, path))
        yield from _path_samples(pool, status)


def _step_samples(pool: str, steps: Mapping[str, Any]) -> Iterator[Sample]:
    yield Sample(STEP_TIME, steps["steps_s"], (pool,))
    yield Sample(WAIT_TIME, steps["waited_s"], (pool,))
    yield Sample(DECODE_STEPS, steps["replayed"], (pool, "graph"))
    yield Sample(DECODE_STEPS, steps["launched"], (pool, "launched"))
    yield Sample(ROWS_AHEAD, steps["rows_ahead_used"], (pool, "used"))
    yield Sample(ROWS_AHEAD, steps["rows_ahead_unused"], (pool, "unused"))
    yield Sample(GRAPHS, steps["graphs"], (pool,))
    yield Sample(GRAPH_BYTES, steps["graph_bytes"], (pool,))


def _path_samples(pool: str, status: Mapping[str, Any]) -> Iterator[Sample]:
    for met in status["met"]:
        yield Sample(PAIRS_MET, met["number"], (pool, met["path"], met["outcome"]))
    slowest: dict[str, float] = {}
    for pair in status["pairs"]:
        if pair["gb_per_s"]:  # measured
            speed = pair["gb_per_s"] * 1e9
            slowest[pair["path"]] = min(speed, slowest.get(pair["path"], speed))
    for path, speed in slowest.items():
        yield Sample(PATH_SPEED, speed, (pool, path))


class RouterSamples:
    """Remembers which lives of ranks it has met, so that a restart shows."""

    def __init__(self) -> None:
        self._met: dict[str, set[str]] = {pool: set() for pool in POOLS}

    def of(self, members: Iterable[Member]) -> list[Sample]:
        here: dict[tuple[str, str], int] = {
            (pool, state): 0 for pool in POOLS for state in ("ready", "draining")
        }
        for member in members:
            role = member.endpoint.role
            here[role, "draining" if member.draining else "ready"] += 1
            self._met[role].add(member.endpoint.incarnation)
        counts = [Sample(RANKS, number, labels) for labels, number in here.items()]
        return counts + [Sample(STARTS, len(met), (pool,)) for pool, met in self._met.items()]


def server_samples(families: Iterable[Any]) -> Iterator[Sample]:
    """Of a Prometheus registry's families, as `collect()` gives them.

    Of a histogram its sum and its count: a mean. Its buckets stay with the server's own /metrics.
    """
    for family in families:
        for sample in family.samples:
            kind = _KINDS.get((family.type, sample.name.removeprefix(family.name)))
            if kind is None:
                continue  # a bucket, or when a metric was created
            labels = tuple(sorted(sample.labels))
            name = sample.name.removesuffix("_total")
            metric = Metric(name, kind, family.documentation or name, labels)
            yield Sample(metric, sample.value, tuple(sample.labels[one] for one in labels))


_KINDS: Mapping[tuple[str, str], Literal["gauge", "counter"]] = {
    ("gauge", ""): "gauge",
    ("counter", "_total"): "counter",
    ("histogram", "_sum"): "counter",
    ("histogram", "_count"): "counter",
}
"""By a family's type and the end of a sample's name."""


def shown_name(metric: Metric) -> str:
    """As Prometheus shows it: Ray puts its prefix before a name, and `_total` behind a counter."""
    return f"ray_{metric.name}_total" if metric.kind == "counter" else f"ray_{metric.name}"
