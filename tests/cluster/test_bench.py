"""The benchmarks run, and measure what they say."""

from __future__ import annotations

from cluster.bench_route import measure, members, routes
from cluster.bench_wire import tokens_a_second
from cluster.membership import Roster
from cluster.policy import choose


def test_the_route_benchmark_has_an_answer_for_each_question() -> None:
    ranks, questions = members(4, 64), routes(200)
    cost = measure(ranks, questions)
    assert 0 < cost.p50_us <= cost.p99_us
    roster = Roster.of(ranks, now=0.0)
    answers = {choose(roster, one, colocated=False, retry_after_s=1.0) for one in questions}
    assert len({type(answer) for answer in answers}) == 1


async def test_the_wire_benchmark_counts_messages() -> None:
    assert await tokens_a_second(640) > 640, "more than a second for so few"
