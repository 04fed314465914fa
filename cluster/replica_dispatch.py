"""Which copy of an expert serves a token, inside one step: the noise that no placement removes.

`quotas` evens out the ranks from the step's counts, `assign` turns quotas into a slot for each
token. `assign_by_key` looks at the token alone instead, for runs whose results must not depend on
the batch. Pure arrays and deterministic. Knows nothing of how counts and tokens travel.

    L layers   E experts   R ranks   S slots a rank   T tokens   K experts a token
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cluster.expert_placement import Placement

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# Busiest rank over mean with 64 tokens a rank, 64 ranks of 8 slots: 1.031 after 10 rounds, 1.015
# after 24, 1.008 after 60, where an even split has 1.12.
ROUNDS = 24
# Over-relaxation of the scaling below: 1 converges surely and slowly, above 2 it may swing.
RELAXATION = 1.8
# A rank without tokens attracts as if it had this share of the mean.
LEAST_LOAD = 0.1


def quotas(counts: npt.ArrayLike, placement: Placement) -> Ints:
    """Tokens for each slot [L, R, S]; `counts` [L, E] are the step's tokens of each expert.

    Alternating scaling (Sinkhorn, over-relaxed) from the even split: ranks scale their slots
    towards the mean load, then the copies of each expert are scaled back to share all of it. The
    best round counts, so the result is never worse than an even split but for whole tokens.
    """
    wanted = np.asarray(counts, dtype=np.float64)
    layers, ranks, _ = placement.shape
    if wanted.shape != (layers, placement.experts):
        raise ValueError(f"counts {wanted.shape} are not {(layers, placement.experts)}")
    slots = placement.slots.reshape(layers, -1)
    numbered = slots + np.arange(layers)[:, None] * placement.experts
    tokens = np.take_along_axis(wanted, slots, -1)
    mean = np.maximum(wanted.sum(-1), 1.0)[:, None] / ranks

    share = _sharing(np.ones(slots.shape), numbered)
    best, lowest = share, np.full(layers, np.inf)
    for _ in range(ROUNDS):
        load = (share * tokens).reshape(placement.shape).sum(-1) / mean
        better = load.max(-1) < lowest
        best = np.where(better[:, None], share, best)
        lowest = np.minimum(lowest, load.max(-1))
        pull = np.maximum(load, LEAST_LOAD) ** -RELAXATION
        scaled = share.reshape(placement.shape) * pull[..., None]
        share = _sharing(scaled.reshape(slots.shape), numbered)
    return _whole(best * tokens, slots).reshape(placement.shape)


def _sharing(weight: Floats, numbered: Ints) -> Floats:
    """Weights [L, P], scaled so that those of one expert (`numbered` over all layers) sum to 1."""
    total = np.bincount(numbered.ravel(), weight.ravel())
    return np.asarray(weight / total[numbered])


def _whole(tokens: Floats, slots: Ints) -> Ints:
    """Whole tokens [L, P]: running sums, expert after expert, are rounded, so each sum is kept."""
    order = np.argsort(slots, axis=-1, kind="stable")
    running = np.rint(np.cumsum(np.take_along_axis(tokens, order, -1), axis=-1)).astype(np.int64)
    whole = np.empty_like(slots)
    np.put_along_axis(whole, order, np.diff(running, prepend=0, axis=-1), -1)
    return whole


def assign(
    experts: npt.ArrayLike, slots: npt.ArrayLike, quota: npt.ArrayLike, earlier: npt.ArrayLike = 0
) -> Ints:
    """Slot number [T, K] in 0 .. R * S - 1 of each choice `experts` [T, K], in one layer.

    `slots` and `quota` [R, S] are of that layer. The tokens of an expert fill its slots in order
    up to each one's quota. When several ranks assign tokens counted together, `earlier` [E] are
    the tokens of each expert on the ranks before this one.
    """
    chosen, order = np.asarray(experts), np.argsort(np.ravel(slots), kind="stable")
    sorted_slots = np.ravel(slots)[order]
    ends = np.cumsum(np.ravel(quota)[order])
    first_slot = np.searchsorted(sorted_slots, np.arange(sorted_slots[-1] + 1))
    start = np.concatenate([[0], ends])[first_slot] + np.asarray(earlier)

    by_expert = np.argsort(chosen.ravel(), kind="stable")
    ordered = chosen.ravel()[by_expert]
    nth = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
    slot = np.empty_like(by_expert)
    slot[by_expert] = order[np.searchsorted(ends, start[ordered] + nth, side="right")]
    return slot.reshape(chosen.shape)


def assign_by_key(experts: npt.ArrayLike, slots: npt.ArrayLike, keys: npt.ArrayLike) -> Ints:
    """Slot number [T, K] of each choice `experts` [T, K]: a hash of the token's key and expert.

    `keys` [T] name a request and a position (`token_keys`), so the copy depends neither on the
    batch nor on the row or rank of the token. Ranks are as even as a random choice makes them.
    """
    chosen, order = np.asarray(experts), np.argsort(np.ravel(slots), kind="stable")
    sorted_slots = np.ravel(slots)[order]
    first = np.searchsorted(sorted_slots, chosen)
    copies = np.searchsorted(sorted_slots, chosen, side="right") - first
    words = _mixed(np.asarray(keys, dtype=np.uint64)[:, None] ^ _mixed(chosen.astype(np.uint64)))
    return np.asarray(order[first + (words % copies.astype(np.uint64)).astype(np.int64)])


def token_keys(request_seed: int, positions: npt.ArrayLike) -> Words:
    """Keys [T] of tokens at `positions` [T] of one request, whose seed is any 64-bit number."""
    return _mixed(np.asarray(positions, dtype=np.uint64)) ^ np.uint64(request_seed)


def _mixed(words: Words) -> Words:
    """A bijection of 64-bit words that spreads each bit over all: the finaliser of SplitMix64."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
