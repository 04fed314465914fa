"""Which copy serves a token: quotas, assignment, and a choice that knows no batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.expert_placement import Placement, place
from cluster.replica_dispatch import assign, assign_by_key, quotas, token_keys
from tests.expert_traces import Trace, Traffic


def test_a_copy_on_a_busy_rank_gets_fewer_tokens() -> None:
    """Experts 0 and 1 sit alone; expert 2 has a copy beside each of them."""
    placement = Placement(np.array([[[0, 2], [1, 2]]]), 3)
    quota = quotas([[60, 20, 40]], placement)
    assert abs(quota[0].sum(-1) - 60).max() <= 1
    assert quota[0, 0, 1] < quota[0, 1, 1]


def test_quotas_reach_the_level_that_a_level_split_can_have() -> None:
    placement = Placement(np.array([[[0, 2], [1, 2]]]), 3)
    assert quotas([[50, 30, 40]], placement).sum(-1).tolist() == [[60, 60]]


def test_no_tokens_need_no_quotas() -> None:
    placement = Placement(np.array([[[0, 2], [1, 2]]]), 3)
    assert quotas([[0, 0, 0]], placement).sum() == 0


def test_counts_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="counts"):
        quotas([[1, 2]], Placement(np.array([[[0, 2], [1, 2]]]), 3))


def test_a_decode_step_is_level_where_random_copies_are_not() -> None:
    ranks, tokens = 16, 64
    trace = Trace(Traffic(windows=6, layers=2, experts=96, upset=None), seed=0)
    placement = place(trace.loads, ranks=ranks, slots_per_rank=8)
    experts = trace.step(ranks * tokens)
    counts = np.stack([np.bincount(layer.ravel(), minlength=96) for layer in experts])
    of_rank = quotas(counts, placement).sum(-1)
    keys = token_keys(7, np.arange(ranks * tokens))
    random = np.stack(
        [
            np.bincount(assign_by_key(e, s, keys).ravel() // 8, minlength=ranks)
            for e, s in zip(experts, placement.slots, strict=True)
        ]
    )
    level, by_chance = (loads.max(-1) / loads.mean(-1) for loads in (of_rank, random))
    assert level.mean() <= 1.03
    assert by_chance.mean() >= 1.07


@st.composite
def steps(draw: st.DrawFn) -> tuple[Placement, np.ndarray]:
    """A placement of one layer and the experts [T, K] of some tokens."""
    experts, ranks = draw(st.integers(1, 10)), draw(st.integers(1, 6))
    slots = -(-experts // ranks) + draw(st.integers(0, 2))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    placement = place(random.lognormal(0, 2, (1, experts)), ranks=ranks, slots_per_rank=slots)
    chosen = random.integers(0, experts, (draw(st.integers(0, 40)), draw(st.integers(1, 3))))
    return placement, chosen


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(0, 40))
def test_quotas_and_slots_match_for_one_source_or_two(
    step: tuple[Placement, np.ndarray], cut: int
) -> None:
    placement, experts = step
    counts = np.bincount(experts.ravel(), minlength=placement.experts)
    quota = quotas(counts[None], placement)[0]
    slots = placement.slots[0]
    for expert, count in enumerate(counts):
        assert quota[slots == expert].sum() == count
    assert quota.min(initial=0) >= 0

    slot = assign(experts, slots, quota)
    assert np.array_equal(slots.ravel()[slot], experts)
    assert np.array_equal(np.bincount(slot.ravel(), minlength=slots.size), quota.ravel())

    first, second = experts[:cut], experts[cut:]
    earlier = np.bincount(first.ravel(), minlength=placement.experts)
    parts = [assign(first, slots, quota), assign(second, slots, quota, earlier)]
    total = np.bincount(np.concatenate(parts).ravel(), minlength=slots.size)
    assert np.array_equal(total, quota.ravel())


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_the_copy_of_a_token_does_not_depend_on_its_batch(
    step: tuple[Placement, np.ndarray], seed: int, order_seed: int
) -> None:
    placement, experts = step
    keys = token_keys(seed, np.arange(len(experts)))
    slot = assign_by_key(experts, placement.slots[0], keys)
    assert np.array_equal(placement.slots[0].ravel()[slot], experts)
    order = np.random.default_rng(order_seed).permutation(len(experts))[: len(experts) // 2 + 1]
    alone = assign_by_key(experts[order], placement.slots[0], keys[order])
    assert np.array_equal(alone, slot[order])


def test_keys_use_all_copies_about_alike() -> None:
    slots = np.array([[0, 1], [0, 1], [0, 1], [0, 1]])
    chosen = np.tile([0, 1], (4000, 1))
    slot = assign_by_key(chosen, slots, token_keys(3, np.arange(4000)))
    used = np.bincount(slot.ravel(), minlength=8)
    assert used.min() > 900  # 1000 expected, deviation 27
