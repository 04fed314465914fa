"""What is counted of a request, from the record of what happened to it."""

from __future__ import annotations

from cluster.metrics import Metrics
from cluster.timeline import Timeline
from tests.cluster.test_api_front import counts

HANDOFF = {"bytes": 4096, "pushes": 2, "push_s": 0.25, "tail_s": 0.125, "path": "memory"}


def told(*events: tuple[str, dict[str, object]]) -> str:
    timeline = Timeline()
    for name, detail in events:
        timeline.record(name, **detail)
    metrics = Metrics(lambda: 0)
    metrics.happened(timeline)
    return metrics.text().decode()


def test_a_handed_over_request_tells_its_queue_its_transfer_and_its_end() -> None:
    text = told(
        ("routed", {"attempt": 1, "prefill": "prefill-0/0", "decode": "decode-0/0"}),
        ("started", {"queued_s": 0.5}),
        ("reserved", {"decode": "decode-0/0", "reservation": "r"}),
        ("handed_over", HANDOFF),
        ("finished", {"outcome": "length"}),
    )
    assert counts(text, "tandem_queue_seconds_sum") == {'{pool="prefill"}': 0.5}
    assert counts(text, "tandem_handoff_bytes_total") == {'{path="memory"}': 4096}
    assert counts(text, "tandem_push_seconds_sum") == {'{path="memory"}': 0.25}
    assert counts(text, "tandem_handoff_seconds_sum") == {'{path="memory"}': 0.125}
    ends = counts(text, "tandem_answers_total")
    assert ends.pop('{outcome="length"}') == 1
    assert set(ends.values()) == {0}
    assert set(counts(text, "tandem_retries_total").values()) == {0}


def test_losses_are_retries_and_a_client_that_left_is_an_abort() -> None:
    text = told(
        ("routed", {"attempt": 1, "prefill": None, "decode": "decode-0/0"}),
        ("started", {"queued_s": 0.5}),
        ("lost", {"attempt": 1, "error": "decode-0 died"}),
        ("routed", {"attempt": 2, "prefill": "prefill-0/0", "decode": "decode-1/0"}),
        ("started", {"queued_s": 0.25}),
        ("place_lost", {"decode": "decode-1/0", "error": "gone"}),
        ("place_lost", {"decode": "decode-2/0", "error": "gone"}),
        ("preempted", {"attempt": 2, "error": "room"}),
        ("finished", {"outcome": "cancelled"}),
    )
    assert counts(text, "tandem_queue_seconds_sum") == {
        '{pool="decode"}': 0.5,
        '{pool="prefill"}': 0.25,
    }
    assert counts(text, "tandem_retries_total") == {
        '{outcome="prefilled_again"}': 1,
        '{outcome="placed_again"}': 2,
        '{outcome="preempted"}': 1,
    }
    assert counts(text, "tandem_answers_total")['{outcome="cancelled"}'] == 1


def test_no_label_but_pool_path_and_outcome() -> None:
    metrics = Metrics(lambda: 0)
    metrics.ended("/v1/completions", "ok")
    timeline = Timeline()
    timeline.record("started", queued_s=0.0)
    timeline.record("handed_over", **HANDOFF)
    metrics.happened(timeline)
    labels = {
        name for one in metrics.families() for sample in one.samples for name in sample.labels
    }
    assert labels == {"pool", "path", "outcome", "le"}
