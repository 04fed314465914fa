"""Every order of messages, losses and deaths, up to a bound: the promises P2 to P5."""

from __future__ import annotations

import pytest

from tests.faults.protocol_model import Model
from tests.faults.protocol_world import Rules, Violated


def test_without_faults_an_answer_ends_well_or_is_left() -> None:
    worlds, outcomes = Model(faults=0).explore()
    assert outcomes == {"length", "stop", "cancelled"}
    assert worlds > 1000


@pytest.mark.parametrize(
    ("faults", "attempts", "ends"),
    [
        pytest.param(1, 2, False, id="one fault, two attempts"),
        pytest.param(1, 1, True, id="one fault, preempted or stopped"),
        pytest.param(1, 2, True, id="the same, two attempts", marks=pytest.mark.full),
        pytest.param(2, 1, False, id="two faults, one attempt", marks=pytest.mark.full),
    ],
)
def test_no_order_of_events_breaks_a_promise(faults: int, attempts: int, ends: bool) -> None:
    worlds, outcomes = Model(faults=faults, attempts=attempts, ends=ends).explore()
    print(f"{worlds} worlds")
    assert worlds > 30_000
    assert outcomes - {"failed"} == {"length", "cancelled"} | ({"stop"} if ends else set())
    assert ("failed" in outcomes) is (faults >= attempts)  # an error only when no attempt is left


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        (Rules(digests=False), "nobody has promised"),
        (Rules(quarantine=False), "its last writer may write"),
        (Rules(push_failed=False), "nothing can happen any more"),
        (Rules(whole=False), "preempted again"),
    ],
    ids=["digests", "quarantine", "push_failed", "whole"],
)
def test_each_rule_is_needed(rules: Rules, complaint: str) -> None:
    """The model would see it."""
    with pytest.raises(Violated, match=complaint):
        Model(faults=1, attempts=1, ends=not rules.whole, rules=rules).explore()
