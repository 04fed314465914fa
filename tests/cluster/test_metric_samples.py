"""What is told to Ray's metrics: the mapping, the counting of what is new, and the names."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster import ray_metrics
from cluster.messages import Address, Endpoint, Load, Member, PairPath, Role
from cluster.metric_samples import (
    METRICS,
    POOLS,
    STATES,
    Metric,
    RouterSamples,
    Sample,
    rank_samples,
    server_samples,
)

LABELS = {"pool", "state", "path", "outcome"}
STEPS = {
    "graphs": 12,
    "graph_bytes": 3000,
    "replayed": 30,
    "launched": 2,
    "rows_ahead_used": 25,
    "rows_ahead_unused": 3,
    "steps_s": 4.5,
    "waited_s": 4.25,
}


def status(**more: Any) -> dict[str, Any]:
    blocks = {"free": 5, "leased": 3, "cached": 0, "quarantined": 2, "total": 10}
    slots = {"free": 1, "leased": 1, "cached": 0, "quarantined": 0, "total": 2}
    return {
        "role": "decode",
        "path": "nixl/UCX",
        "health": {"alive": True, "pending": 1, "steps": 40, "stuck_s": 0.5},
        "ledger": {"blocks": blocks, "slots": slots},
        "load": Load(waiting=4, running=2, waiting_tokens=99).model_dump(),
        "tokens": 17,
        "preempted": 1,
        "steps": STEPS,
        **more,
    }


def told(samples: Any) -> dict[tuple[str, ...], float]:
    return {(one.metric.name, *one.labels): one.value for one in samples}


def member(name: str, role: Role, incarnation: str, *, draining: bool = False) -> Member:
    address = Address(host="127.0.0.1", port=1)
    endpoint = Endpoint(name=name, role=role, incarnation=incarnation, address=address)
    return Member(endpoint=endpoint, load=Load(), draining=draining)


def test_a_decode_rank_tells_blocks_by_state_queues_and_counts() -> None:
    assert told(rank_samples(status())) == {
        ("tandem_blocks", "decode", "free"): 5,
        ("tandem_blocks", "decode", "leased"): 3,
        ("tandem_blocks", "decode", "cached"): 0,
        ("tandem_blocks", "decode", "quarantined"): 2,
        ("tandem_slots", "decode", "free"): 1,
        ("tandem_slots", "decode", "leased"): 1,
        ("tandem_slots", "decode", "cached"): 0,
        ("tandem_slots", "decode", "quarantined"): 0,
        ("tandem_requests", "decode", "waiting"): 4,
        ("tandem_requests", "decode", "running"): 2,
        ("tandem_waiting_tokens", "decode"): 99,
        ("tandem_stuck_seconds", "decode"): 0.5,
        ("tandem_engine_steps", "decode"): 40,
        ("tandem_engine_tokens", "decode"): 17,
        ("tandem_step_seconds", "decode"): 4.5,
        ("tandem_step_wait_seconds", "decode"): 4.25,
        ("tandem_decode_steps", "decode", "graph"): 30,
        ("tandem_decode_steps", "decode", "launched"): 2,
        ("tandem_rows_ahead", "decode", "used"): 25,
        ("tandem_rows_ahead", "decode", "unused"): 3,
        ("tandem_graphs", "decode"): 12,
        ("tandem_graph_bytes", "decode"): 3000,
        ("tandem_preemptions", "decode"): 1,
    }


def test_a_prefill_rank_tells_what_it_has_moved_by_path_and_how_pairs_came_out() -> None:
    moved = {
        "nixl/UCX": {"handoffs": 2, "nbytes": 1000, "seconds": 0.25, "hidden_s": 0.0},
        "host/cma": {"handoffs": 1, "nbytes": 10, "seconds": 0.5, "hidden_s": 0.4},
    }
    met = [
        {"path": "nixl/UCX", "outcome": "fallback", "number": 3},
        {"path": "host/cma", "outcome": "ok", "number": 2},
    ]
    pairs = [
        PairPath(decode="d0", path="host/cma", direct=True, gb_per_s=4.0).model_dump(),
        PairPath(decode="d1", path="host/cma", direct=True, gb_per_s=2.5).model_dump(),
        PairPath(decode="d2", path="nixl/UCX", direct=False).model_dump(),  # not yet measured
    ]
    samples = told(
        rank_samples(status(role="prefill", homeless_blocks=7, moved=moved, met=met, pairs=pairs))
    )
    assert samples["tandem_homeless_blocks", "prefill"] == 7
    assert samples["tandem_handoffs", "prefill", "nixl/UCX"] == 2
    assert samples["tandem_handoffs", "prefill", "host/cma"] == 1
    assert samples["tandem_transfer_bytes", "prefill", "nixl/UCX"] == 1000
    assert samples["tandem_transfer_seconds", "prefill", "nixl/UCX"] == 0.25
    assert samples["tandem_transfer_hidden_seconds", "prefill", "host/cma"] == 0.4
    assert samples["tandem_pairs_met", "prefill", "nixl/UCX", "fallback"] == 3
    assert samples["tandem_path_bytes_per_second", "prefill", "host/cma"] == 2.5e9
    assert ("tandem_path_bytes_per_second", "prefill", "nixl/UCX") not in samples


def test_the_router_counts_ranks_and_the_lives_it_has_met() -> None:
    samples = RouterSamples()
    first = [member("prefill-0/0", "prefill", "1"), member("decode-0/0", "decode", "2")]
    assert told(samples.of(first)) == {
        ("tandem_ranks", "prefill", "ready"): 1,
        ("tandem_ranks", "prefill", "draining"): 0,
        ("tandem_ranks", "decode", "ready"): 1,
        ("tandem_ranks", "decode", "draining"): 0,
        ("tandem_rank_starts", "prefill"): 1,
        ("tandem_rank_starts", "decode"): 1,
    }
    samples.of(first[:1])  # the decode rank has died: its life stays counted
    again = [first[0], member("decode-0/0", "decode", "3", draining=True)]
    after = told(samples.of(again))
    assert after["tandem_rank_starts", "decode"] == 2
    assert after["tandem_ranks", "decode", "ready"] == 0
    assert after["tandem_ranks", "decode", "draining"] == 1


def test_a_servers_registry_is_told_without_its_buckets() -> None:
    registry = CollectorRegistry()
    requests = Counter("tandem_asked", "Asked", ("path", "outcome"), registry=registry)
    requests.labels("/v1/completions", "ok").inc(3)
    Gauge("tandem_open", "Open", registry=registry).set(2)
    times = Histogram("tandem_wait_seconds", "Waited", buckets=(1.0,), registry=registry)
    for value in (0.5, 2.0):
        times.observe(value)
    samples = list(server_samples(registry.collect()))
    assert told(samples) == {
        ("tandem_asked", "ok", "/v1/completions"): 3,
        ("tandem_open",): 2,
        ("tandem_wait_seconds_sum",): 2.5,
        ("tandem_wait_seconds_count",): 2,
    }
    assert {one.metric.labels for one in samples} == {("outcome", "path"), ()}
    assert {one.metric.name: one.metric.kind for one in samples} == {
        "tandem_asked": "counter",
        "tandem_open": "gauge",
        "tandem_wait_seconds_sum": "counter",
        "tandem_wait_seconds_count": "counter",
    }


def test_labels_are_few_and_names_are_those_of_prometheus() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"tandem_[a-z_]+", metric.name)
        assert set(metric.labels) <= LABELS
        assert not metric.name.endswith("_total")  # Ray and Prometheus put it there themselves
    assert POOLS == ("prefill", "decode")
    assert "total" not in STATES  # it is the sum of the others


Calls = list[tuple[str, str, float]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What Ray's metrics are told, instead of telling them."""
    noted: Calls = []

    class Noting:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert description
            self.name, self.tag_keys = name, tag_keys

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(self.tag_keys)
            noted.append((self.name, "set", value))

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(self.tag_keys)
            assert value > 0  # Ray refuses others
            noted.append((self.name, "inc", value))

    monkeypatch.setattr("ray.util.metrics.Gauge", Noting)
    monkeypatch.setattr("ray.util.metrics.Counter", Noting)
    return noted


def test_counters_get_what_is_new_and_gauges_what_is(calls: Calls) -> None:
    depth = Metric("depth", "gauge", "how deep")
    seen = Metric("seen", "counter", "how many")
    metrics = ray_metrics.RayMetrics()
    for number, deep in ((3, 9.0), (3, 0.0), (10, 4.0)):
        metrics.take([Sample(seen, number, ("decode",)), Sample(depth, deep, ("decode",))])
    metrics.take([Sample(seen, 1, ("prefill",))])
    assert calls == [
        ("seen", "inc", 3),
        ("depth", "set", 9.0),
        ("depth", "set", 0.0),
        ("seen", "inc", 7),
        ("depth", "set", 4.0),
        ("seen", "inc", 1),
    ]


async def test_a_reader_that_breaks_is_logged_once_and_asked_again(
    calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Metric("seen", "counter", "how many")
    answers: list[Any] = [RuntimeError("not yet"), RuntimeError("not yet"), 5.0]
    done = asyncio.Event()

    def read() -> list[Sample]:
        if not answers:
            done.set()
            return []
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [Sample(seen, answer, ("decode",))]

    task = asyncio.create_task(ray_metrics.export(read, every_s=0.0))
    await asyncio.wait_for(done.wait(), 10)
    task.cancel()
    assert calls == [("seen", "inc", 5.0)]
    assert caplog.text.count("metrics cannot be exported") == 1
