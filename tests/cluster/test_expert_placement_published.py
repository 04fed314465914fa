"""Our placement beside the published algorithm: small traces here, full size in the benchmark."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.expert_placement import Placement, place
from tests.cluster.published_eplb import pack_floats, pack_tensors, rebalance, replicate
from tests.expert_traces import Trace, Traffic

SMALL = Traffic(windows=14, layers=4, experts=48, tokens=32_768, upset=7)
RANKS, SLOTS = 8, 8


def published(loads: np.ndarray) -> Placement:
    slots = rebalance(loads.astype(np.float64), RANKS * SLOTS, RANKS, packing=pack_floats)
    return Placement(slots.reshape(len(loads), RANKS, SLOTS), loads.shape[-1])


# The peer itself


def test_the_peer_gives_copies_to_the_largest_load_a_copy() -> None:
    expert_of, copy_of, copies = replicate(np.array([[9.0, 4.0, 2.0]]), 6)
    assert copies.tolist() == [[3, 2, 1]]  # 9 -> 4.5, then 4.5 -> 3, then 4 -> 2
    assert expert_of.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert copy_of.tolist() == [[0, 0, 0, 1, 2, 1]]


@pytest.mark.parametrize("pack", [pack_tensors, pack_floats])
def test_the_peer_packs_the_longest_first_into_the_lightest_bin(pack: object) -> None:
    assert callable(pack)
    bin_of, place_of = pack(np.array([[5.0, 1.0, 4.0, 3.0, 2.0, 0.0]]), 2)
    assert bin_of.tolist() == [[0, 0, 1, 1, 0, 1]]  # 5 | 4, 4+3, 5+2, then 1 for the 7 = 7: first
    assert place_of.tolist() == [[0, 2, 0, 1, 1, 2]]


def test_the_peer_keeps_groups_on_nodes() -> None:
    loads = np.random.default_rng(0).lognormal(0, 1, (3, 16))
    slots = rebalance(loads, 24, 4, groups=4, nodes=2).reshape(3, 2, 12)
    for layer in slots:
        homes = [{int(expert) // 4 for expert in node} for node in layer]
        assert not homes[0] & homes[1]
        assert {int(expert) for expert in layer.ravel()} == set(range(16))


def test_both_forms_of_the_peer_agree() -> None:
    loads = np.random.default_rng(1).lognormal(0, 1, (2, 48))
    assert np.array_equal(
        rebalance(loads, 64, 8, packing=pack_tensors), rebalance(loads, 64, 8, packing=pack_floats)
    )


# Ours beside it


@pytest.mark.parametrize(("ranks", "slots"), [(8, 6), (8, 7), (8, 8), (4, 20), (2, 24), (16, 4)])
@pytest.mark.parametrize("sigma", [0.3, 0.8, 1.5])
def test_a_cold_placement_is_about_as_level_on_its_own_window(
    ranks: int, slots: int, sigma: float
) -> None:
    loads = np.random.default_rng(2).lognormal(0, sigma, (8, 48))
    peer = rebalance(loads, ranks * slots, ranks, packing=pack_floats)
    theirs = Placement(peer.reshape(8, ranks, slots), 48).imbalance(loads)
    ours = place(loads, ranks=ranks, slots_per_rank=slots).imbalance(loads)
    assert ours.mean() <= theirs.mean() * 1.005


@pytest.mark.parametrize("seed", range(3))
def test_the_next_windows_are_more_level_for_a_tenth_of_the_moves(seed: int) -> None:
    loads = Trace(SMALL, seed).loads
    ours, theirs = place(loads[:1], ranks=RANKS, slots_per_rank=SLOTS), published(loads[0])
    our_moves = their_moves = 0
    our_imbalance, their_imbalance = [], []
    for window in range(1, len(loads)):
        our_imbalance.append(ours.imbalance(loads[window]).mean())
        their_imbalance.append(theirs.imbalance(loads[window]).mean())
        next_ours = place(
            loads[: window + 1],
            ranks=RANKS,
            slots_per_rank=SLOTS,
            previous=ours,
            most_moves=int(0.08 * SMALL.layers * RANKS * SLOTS),
        )
        next_theirs = published(loads[window])
        our_moves += int(next_ours.moves_from(ours).sum())
        their_moves += int(next_theirs.moves_from(theirs).sum())
        ours, theirs = next_ours, next_theirs
    assert np.mean(our_imbalance) <= np.mean(their_imbalance)
    assert our_moves <= 0.1 * their_moves


def test_a_trace_is_what_its_parameters_say() -> None:
    trace = Trace(SMALL, 0)
    assert (trace.loads.sum(-1) == SMALL.tokens * SMALL.experts_a_token).all()
    assert np.array_equal(trace.loads, Trace(SMALL, 0).loads)
    step = np.sort(trace.step(64), axis=-1)
    assert step.shape == (SMALL.layers, 64, SMALL.experts_a_token)
    assert (step[..., 1:] != step[..., :-1]).all()
