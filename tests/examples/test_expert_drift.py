"""The example that shows a rebalance: its traffic drifts, and it says what came of it."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.expert_messages import ExpertDecision, GroupBalance
from cluster.expert_placement import Placement, first_placement
from cluster.expert_tables import packed_counts, table_of
from examples.expert_drift import Watch, drifting

LOADS = np.array([[9, 9, 9, 9, 1, 1, 1, 1]])
GIVEN = ExpertDecision(at=1.0, outcome="given", version=1, why="it pays", moved=(3,))


def seen(windows: int, placement: Placement, *decisions: ExpertDecision) -> GroupBalance:
    return GroupBalance(
        group="decode-0",
        version=0,
        given=None,
        table=table_of(placement),
        loads=packed_counts(LOADS, 10),
        imbalance=(),
        windows=windows,
        steps=0,
        doing="",
        preparing="",
        decisions=decisions,
    )


def test_traffic_is_questions_first_a_mixture_then_and_functions_last() -> None:
    kinds = ["def " in prompt for prompt in drifting(90)]
    assert not any(kinds[:30])
    assert 10 < sum(kinds[30:60]) < 20
    assert all(kinds[61:])
    assert len(set(drifting(90))) > 40  # not one prompt again and again


def test_a_placement_is_told_once_and_its_worth_against_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    in_order = first_placement(1, 8, 2, 4)
    level = Placement(np.array([[[0, 1, 4, 5], [2, 3, 6, 7]]]), 8)
    watch = Watch(lambda: pytest.fail("asked"))
    watch.take(seen(1, in_order, GIVEN))
    watch.take(seen(1, in_order, GIVEN))  # nothing new
    watch.take(seen(2, level, GIVEN))
    told = capsys.readouterr().out
    assert told.count("version 1 given, 3 slots moved") == 1
    (line,) = watch.summary()
    assert line == (
        "decode-0: 2 windows seen; busiest rank over mean in the last 1: 1.000, and 1.800 had "
        "experts stayed in order"
    )
