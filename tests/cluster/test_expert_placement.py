"""Where experts go: sizes, hand cases, and what holds for any loads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.expert_packing import replicate
from cluster.expert_placement import (
    NEWEST,
    Placement,
    extra_experts,
    first_placement,
    place,
    rank_slots,
    worthwhile,
)


def doubles(placement: Placement) -> int:
    """Slots whose expert sits in an earlier slot of the same rank too."""
    ordered = np.sort(placement.slots, axis=-1)
    return int((ordered[..., 1:] == ordered[..., :-1]).sum())


# Sizes


@pytest.mark.parametrize(
    ("experts", "least", "ranks", "extra"),
    [
        (384, 0, 2, 0),
        (384, 0, 64, 0),
        (384, 0, 72, 48),
        (384, 32, 4, 32),
        (384, 32, 32, 32),
        (384, 32, 64, 64),
        (384, 32, 72, 48),
        (128, 32, 64, 64),
        (8, 0, 3, 1),
        (256, 0, 3, 2),
    ],
)
def test_redundant_experts_are_rounded_up_until_they_divide(
    experts: int, least: int, ranks: int, extra: int
) -> None:
    assert extra_experts(experts, least, ranks) == extra


@pytest.mark.parametrize(
    ("extra", "ranks", "smallest"), [(1, 2, 2), (0, 3, 1), (2, 3, 4), (9, 2, 10)]
)
def test_a_number_that_does_not_divide_is_refused_with_the_smallest_that_does(
    extra: int, ranks: int, smallest: int
) -> None:
    with pytest.raises(
        ValueError, match=rf"8 experts and {extra} .* by {ranks} ranks.* {smallest},"
    ):
        rank_slots(8, extra, ranks)


def test_numbers_that_divide_are_taken_as_they_are() -> None:
    assert rank_slots(8, 2, 2) == 5
    assert rank_slots(8, 8, 2) == 8
    assert rank_slots(384, 128, 64) == 8


def test_a_negative_number_is_refused_and_the_smallest_named() -> None:
    with pytest.raises(ValueError, match=r"-1 redundant experts.*256 experts on 3 ranks is 2"):
        extra_experts(256, -1, 3)


def test_experts_that_do_not_fit_are_refused_with_the_slots_they_need() -> None:
    with pytest.raises(ValueError, match="3 slots a rank are the fewest"):
        place(np.ones((1, 9)), ranks=4, slots_per_rank=2)


@pytest.mark.parametrize("loads", [[[1.0, -1.0]], [[1.0, float("nan")]], [1.0, 2.0]])
def test_loads_that_are_none_are_refused(loads: list[object]) -> None:
    with pytest.raises(ValueError, match="loads"):
        place(np.array(loads), ranks=2, slots_per_rank=1)


def test_a_placement_without_some_expert_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="layer 1: expert 2 has no slot"):
        Placement(np.array([[[0, 1], [2, 0]], [[0, 1], [1, 0]]]), 3)


# Hand cases


def test_the_hot_expert_gets_the_redundant_slot_and_ranks_are_level() -> None:
    placement = place([[6.0, 2.0, 1.0]], ranks=2, slots_per_rank=2)
    assert placement.copies().tolist() == [[2, 1, 1]]
    assert sorted(placement.rank_loads([[6.0, 2.0, 1.0]])[0].tolist()) == [4.0, 5.0]


def test_one_expert_with_all_the_load_is_on_every_rank() -> None:
    loads = np.zeros((1, 6))
    loads[0, 3] = 100
    placement = place(loads, ranks=4, slots_per_rank=3)
    assert (placement.slots == 3).any(-1).all()
    assert placement.imbalance(loads).tolist() == [1.0]
    assert doubles(placement) == 0


def test_no_load_at_all_still_places_every_expert() -> None:
    placement = place(np.zeros((2, 8)), ranks=2, slots_per_rank=5)
    assert (placement.copies() >= 1).all()
    assert placement.imbalance(np.zeros((2, 8))).tolist() == [1.0, 1.0]


def test_fewer_experts_than_ranks() -> None:
    placement = place([[3.0, 1.0]], ranks=4, slots_per_rank=1)
    assert placement.copies().tolist() == [[3, 1]]
    assert placement.imbalance([[3.0, 1.0]]).tolist() == [1.0]


def test_without_redundancy_the_heaviest_meet_the_lightest() -> None:
    placement = place([[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]], ranks=4, slots_per_rank=2)
    assert placement.imbalance([[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]]).tolist() == [1.0]


def test_more_slots_than_distinct_experts_fill_up_with_doubles() -> None:
    placement = place([[1.0, 1.0]], ranks=2, slots_per_rank=3)
    assert placement.copies().tolist() == [[3, 3]]


def test_experts_that_rise_together_are_parted_once_that_was_seen() -> None:
    """Pairs (0, 1) and (2, 3) rise in turn, so that on smoothed average all four are alike."""
    level, rise = np.full(4, 6.0), np.array([4.0, 4.0, -4.0, -4.0])
    windows = np.stack([level + rise, level - rise * (1 - NEWEST) / NEWEST, level])[:, None]
    together = Placement(np.array([[[0, 1], [2, 3]]]), 4)

    def placed(seen: np.ndarray) -> Placement:
        return place(seen, ranks=2, slots_per_rank=2, previous=together)

    assert placed(windows[-1]).imbalance([level + rise])[0] > 1.6
    assert placed(windows).imbalance([level + rise]).tolist() == [1.0]
    assert placed(windows).imbalance([level - rise]).tolist() == [1.0]


def test_the_first_placement_is_experts_in_order_then_from_the_first_again() -> None:
    assert first_placement(1, 5, 2, 4).slots.tolist() == [[[0, 1, 2, 3], [4, 0, 1, 2]]]


def test_a_layer_that_is_idle_keeps_its_placement() -> None:
    loads = np.array([[5.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    before = first_placement(2, 4, 2, 3)
    after = place(loads, ranks=2, slots_per_rank=3, previous=before)
    assert (after.copies() >= 1).all()
    assert after.imbalance(loads)[0] <= before.imbalance(loads)[0]


def test_a_placement_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="of two groups"):
        place(np.ones((1, 4)), ranks=2, slots_per_rank=2, previous=first_placement(1, 4, 2, 3))


def test_moves_are_experts_that_a_rank_did_not_hold() -> None:
    before = Placement(np.array([[[0, 1], [2, 3]]]), 4)
    assert Placement(np.array([[[1, 0], [3, 2]]]), 4).moves_from(before).tolist() == [[0, 0]]
    assert Placement(np.array([[[1, 2], [3, 0]]]), 4).moves_from(before).tolist() == [[1, 1]]


def test_moving_is_worth_it_when_steps_save_more_than_the_link_takes() -> None:
    def saves(seconds: float) -> bool:
        return worthwhile(
            seconds_saved_a_step=seconds,
            steps_until_next=1000,
            bytes_of_busiest_rank=45e9,
            bytes_a_second=45e9,
        )

    assert saves(1.1e-3)
    assert not saves(0.9e-3)
    assert not saves(-1.0)


# Any loads


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Windows of loads [W, L, E], ranks, slots a rank; sizes that fit."""
    experts, ranks = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    slots = draw(st.integers(-(-experts // ranks), -(-experts // ranks) + 4))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), experts)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    loads = random.lognormal(0, draw(st.sampled_from([0.0, 1.0, 4.0])), shape)
    loads[random.random(shape) < draw(st.sampled_from([0.0, 0.5, 0.95]))] = 0
    loads[random.random(shape[:2]) < 0.2] = 0
    return loads * draw(st.sampled_from([1e-9, 1.0, 1e9])), ranks, slots


@settings(max_examples=40, deadline=None)
@given(problems())
def test_any_loads_are_placed_whole_apart_and_alike(problem: tuple[np.ndarray, int, int]) -> None:
    windows, ranks, slots = problem
    placement = place(windows, ranks=ranks, slots_per_rank=slots)
    copies = placement.copies()
    assert placement.shape == (windows.shape[1], ranks, slots)
    assert (copies >= 1).all()
    assert (copies.sum(-1) == ranks * slots).all()
    if slots <= windows.shape[2]:
        assert doubles(placement) == 0
    again = place(windows, ranks=ranks, slots_per_rank=slots)
    assert np.array_equal(placement.slots, again.slots)


@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(0, 20), st.integers(0, 2**32 - 1))
def test_from_any_placement_moves_stay_within_the_limit_and_experts_stay_apart(
    problem: tuple[np.ndarray, int, int], most_moves: int, seed: int
) -> None:
    windows, ranks, slots = problem
    other = np.random.default_rng(seed).lognormal(0, 1, windows.shape[1:])
    before = place(other, ranks=ranks, slots_per_rank=slots)
    untouched = before.slots.copy()
    after = place(
        windows, ranks=ranks, slots_per_rank=slots, previous=before, most_moves=most_moves
    )
    assert after.moves_from(before).sum() <= most_moves
    assert (after.slots != before.slots).sum() <= most_moves
    assert (after.copies() >= 1).all()
    assert doubles(after) <= doubles(before)
    assert np.array_equal(before.slots, untouched)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_copies_follow_the_published_rule(problem: tuple[np.ndarray, int, int]) -> None:
    """One more copy at a time to the heaviest has the same largest load a copy, capped at ranks."""
    windows, ranks, slots = problem
    loads = windows[0]
    if slots > loads.shape[1]:
        return
    copies = replicate(loads, ranks, slots)
    for load, mine in zip(loads, copies, strict=True):
        counts = np.ones(len(load), dtype=np.int64)
        for _ in range(ranks * slots - len(load)):
            counts[np.where(counts < ranks, load / counts, -1.0).argmax()] += 1
        assert (load / mine).max() == pytest.approx((load / counts).max(), rel=1e-4, abs=1e-12)
