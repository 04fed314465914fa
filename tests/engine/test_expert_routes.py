"""Where rows go: what one rank sends is what another expects, slot for slot."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.expert_placement import Placement, extra_experts, first_placement, rank_slots
from engine.expert_routes import LayerTable

Chosen = list[np.ndarray]


@st.composite
def steps(draw: st.DrawFn) -> tuple[Placement, Chosen]:
    """A layer's placement and the choices [T, K] of each rank; some have none."""
    experts, ranks = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    extra = extra_experts(experts, draw(st.integers(0, 6)), ranks)
    first = first_placement(1, experts, ranks, rank_slots(experts, extra, ranks))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    slots = random.permutation(first.slots.ravel()).reshape(first.slots.shape)
    choices = draw(st.integers(1, min(3, experts)))
    hot = draw(st.booleans())
    chosen = [
        np.stack([random.permutation(experts)[:choices] for _ in range(rows)])
        if rows and not hot
        else np.tile(np.arange(choices), (rows, 1))
        for rows in draw(st.lists(st.integers(0, 20), min_size=ranks, max_size=ranks))
    ]
    return Placement(slots, experts), chosen


def _counts(placement: Placement, chosen: Chosen) -> np.ndarray:
    return np.stack([np.bincount(one.ravel(), minlength=placement.experts) for one in chosen])


@settings(max_examples=150, deadline=None)
@given(steps())
def test_every_choice_reaches_a_slot_of_its_expert_once(step: tuple[Placement, Chosen]) -> None:
    placement, chosen = step
    table, counts = LayerTable(placement, 0), _counts(*step)
    routes = [table.routes(one, counts, index) for index, one in enumerate(chosen)]
    for there, route in enumerate(routes):
        assert (route.sizes == routes[0].sizes).all()
        arriving = []  # experts of the rows that come, as their senders know them
        for here, other in enumerate(routes):
            first = other.sizes[here, :there].sum()
            sent = other.order[first : first + other.sizes[here, there]]
            arriving += chosen[here].ravel()[sent].tolist()
        assert placement.slots[0, there][route.slots].tolist() == arriving
    for route, one in zip(routes, chosen, strict=True):
        assert sorted(route.order.tolist()) == list(range(one.size))


@settings(max_examples=100, deadline=None)
@given(steps(), st.integers(0, 99))
def test_how_many_rows_a_slot_gets_does_not_depend_on_their_order(
    step: tuple[Placement, Chosen], seed: int
) -> None:
    placement, chosen = step
    table, counts = LayerTable(placement, 0), _counts(*step)
    random = np.random.default_rng(seed)
    for index, one in enumerate(chosen):
        shuffled = one[random.permutation(len(one))]
        given, other = (table.routes(rows, counts, index) for rows in (one, shuffled))
        assert (given.sizes == other.sizes).all()
        assert (given.slots == other.slots).all()


def test_copies_of_a_busy_expert_share_its_rows() -> None:
    """Expert 0 has all the tokens, and a slot on each rank."""
    table = LayerTable(Placement(np.array([[[0, 1], [0, 2]]]), 3), 0)
    counts = np.array([[40, 0, 0], [0, 0, 0]])
    route = table.routes(np.zeros((40, 1), np.int64), counts, 0)
    assert route.sizes.tolist() == [[20, 20], [0, 0]]


def test_a_step_without_rows_sends_nothing() -> None:
    table = LayerTable(Placement(np.array([[[0, 1], [0, 2]]]), 3), 0)
    route = table.routes(np.empty((0, 1), np.int64), np.zeros((2, 3), np.int64), 1)
    assert route.sizes.sum() == len(route.order) == len(route.slots) == 0
