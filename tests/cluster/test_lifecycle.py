"""Every state with every event, against the pairs that are written down here."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from cluster.lifecycle import (
    Begun,
    Decoding,
    Done,
    Event,
    Finished,
    InvalidTransition,
    PlaceLost,
    Placing,
    Prefilling,
    Pushing,
    Queued,
    RoomFound,
    SentToDecode,
    SentToPrefill,
    State,
    TakenOver,
    WorkerGone,
    advance,
)
from tests.cluster.fakes import endpoint

P = endpoint("prefill-0/0", role="prefill", incarnation="p1")
Q = endpoint("prefill-1/0", role="prefill", incarnation="q1")
D = endpoint("decode-0/0", incarnation="d1")
E = endpoint("decode-1/0", incarnation="e1")

STATES: tuple[State, ...] = (
    Queued(),
    Prefilling(P),
    Placing(P),
    Pushing(P, D, "d1:1"),
    Decoding(D),
    Finished("stop"),
)
EVENTS: tuple[Event, ...] = (
    SentToPrefill(Q),
    SentToDecode(E),
    Begun(),
    RoomFound(E, "e1:9"),
    PlaceLost(),
    TakenOver(),
    WorkerGone(),
    Done("length"),
)
LEGAL: dict[tuple[State, Event], State] = {
    (Queued(), SentToPrefill(Q)): Prefilling(Q),
    (Queued(), SentToDecode(E)): Decoding(E),
    (Prefilling(P), Begun()): Placing(P),
    (Placing(P), RoomFound(E, "e1:9")): Pushing(P, E, "e1:9"),
    (Pushing(P, D, "d1:1"), PlaceLost()): Placing(P),
    (Pushing(P, D, "d1:1"), TakenOver()): Decoding(D),
    (Decoding(D), TakenOver()): Decoding(D),
    **{(state, WorkerGone()): Queued() for state in STATES[:-1]},
    **{(state, Done("length")): Finished("length") for state in STATES[:-1]},
    (Finished("stop"), WorkerGone()): Finished("stop"),
    (Finished("stop"), Done("length")): Finished("stop"),
}


def test_every_state_and_every_event_is_here() -> None:
    assert {type(state) for state in STATES} == set(get_args(State))
    assert {type(event) for event in EVENTS} == set(get_args(Event))
    assert all(state in STATES and event in EVENTS for state, event in LEGAL)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_a_pair_goes_where_it_is_written_or_is_impossible(state: State, event: Event) -> None:
    before = replace(state)
    if (state, event) in LEGAL:
        assert advance(state, event) == LEGAL[state, event]
    else:
        with pytest.raises(InvalidTransition, match=type(event).__name__):
            advance(state, event)
    assert state == before
