"""What a timeline tells, on a clock that the test turns."""

from __future__ import annotations

import json

from cluster.timeline import Timeline


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def recorded() -> Timeline:
    clock = Clock()
    timeline = Timeline(clock)
    for at_s, name, detail in (
        (0.001, "routed", {"attempt": 1, "prefill": "prefill-0/0", "decode": "decode-3/1"}),
        (0.002, "started", {"queued_s": 0.0005}),
        (0.004, "reserved", {"decode": "decode-3/1", "reservation": "d:7"}),
    ):
        clock.now = 100.0 + at_s
        timeline.record(name, **detail)
    clock.now = 100.010
    timeline.tokens(1)
    clock.now = 100.012
    timeline.record("handed_over", bytes=1234567, pushes=3, push_s=0.002, path="nixl/UCX")
    for at_s in (0.030, 0.040):
        clock.now = 100.0 + at_s
        timeline.tokens(2)
    return timeline


def test_first_token_and_time_per_token() -> None:
    timeline = recorded()
    assert timeline.ttft_s is not None
    assert timeline.tpot_s is not None
    assert abs(timeline.ttft_s - 0.010) < 1e-9
    assert abs(timeline.tpot_s - (0.040 - 0.010) / 4) < 1e-9


def test_before_there_are_tokens_there_are_no_figures() -> None:
    timeline = Timeline()
    assert (timeline.ttft_s, timeline.tpot_s) == (None, None)
    timeline.tokens(1)
    assert timeline.ttft_s is not None
    assert timeline.tpot_s is None
    assert timeline.last("routed") is None


def test_it_goes_through_json() -> None:
    told = json.loads(json.dumps(recorded().as_dict()))
    assert told["events"][0] == {
        "event": "routed",
        "at_s": 0.001,
        "attempt": 1,
        "prefill": "prefill-0/0",
        "decode": "decode-3/1",
    }
    assert told["token_times_s"] == [0.01, 0.03, 0.03, 0.04, 0.04]


def test_the_summary_reads_in_order_of_time() -> None:
    assert recorded().summary().splitlines() == [
        "      1.0 ms  routed       attempt 1  prefill prefill-0/0  decode decode-3/1",
        "      2.0 ms  started      queued 0.5 ms",
        "      4.0 ms  reserved     decode decode-3/1  reservation d:7",
        "     10.0 ms  first_token  index 0",
        "     12.0 ms  handed_over  bytes 1,234,567  pushes 3  push 2.0 ms  path nixl/UCX",
        "5 tokens, TTFT 10.0 ms, TPOT 7.50 ms",
    ]
