"""Betters a placement by a few moves: exchanges between ranks, and copies given to another expert.

Pure arrays, all layers at once. Knows nothing of requests, versions or links; a move is one slot
that must be filled with another expert's weights.

What is minimised. The next window is taken as `expected` plus a random change like those seen
before, so the load of rank r is about normal, with mean m and variance v. The expected largest of
the ranks is at most log(sum_r E[exp(b * load_r)]) / b = log(sum_r exp(b * m + b * b * v / 2)) / b
for every b: a sum over ranks, so an exchange between two of them is judged by these two alone, and
exchanges of disjoint pairs add up. The variance makes it spread experts that rise together.

    L layers   E experts   R ranks   S slots a rank   C known changes   H pairs of ranks
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Parts = npt.NDArray[np.float32]  # single precision: half the time, and gains are far above its step
Flags = npt.NDArray[np.bool_]

# b above, for loads in units of the mean rank load. Small b looks at all ranks, large b at the
# worst and at what may come; 5 to 12 measure alike at 64 ranks, 60 is worse.
SHARPNESS = 6.0
# Exchanges in one round need this share of the round's best gain in their layer: the rest waits
# for the next round, in which the ranks are paired anew.
WORTH_NOW = 0.1
ROUNDS = 8
# Smaller gains (a share of the sum over ranks) are not worth the bytes of a move.
LEAST_GAIN = 1e-4
# An exchange that makes a rank this much worse than the worst (in exponents) is never the best.
HOPELESS = 50.0
# Of ranks with more slots each round looks at so many, another part each time: the pairs to look
# at grow with the square, and the need for them shrinks.
MOST_PLACES = 32
# One expert takes a copy from another when its copies are this many times heavier afterwards.
UNEVEN = 2.0
EXCHANGES_OF_COPIES = 5


class Forecast(NamedTuple):
    """Loads of the next window: `expected` [L, E], and earlier changes [C, L, E] as likely.

    Each change is scaled so that their squares add up to the variance. A layer's expected loads
    sum to the number of ranks: the mean rank load is 1.
    """

    expected: Floats
    changes: Floats

    def of(self, layers: Ints) -> Forecast:
        return Forecast(self.expected[layers], self.changes[:, layers])


def refine(slots: Ints, forecast: Forecast, *, most_moves: int) -> Ints:
    """Expert of each slot [L, R, S] after at most `most_moves` moves; every expert keeps a slot."""
    slots = slots.copy()
    if not len(slots) or slots.shape[1] < 2:  # nothing to exchange with
        return slots
    copies = count_copies(slots, forecast.expected.shape[1])
    moves = move_copies(slots, copies, forecast, most_moves=most_moves // 2)
    exchange(slots, copies, forecast, most_moves=most_moves - moves)
    return slots


def count_copies(slots: Ints, experts: int) -> Ints:
    """Copies [L, E] of each expert in slots [L, R, S]."""
    layers = slots.shape[0]
    numbered = slots.reshape(layers, -1) + np.arange(layers)[:, None] * experts
    return np.bincount(numbered.ravel(), minlength=layers * experts).reshape(layers, experts)


def move_copies(slots: Ints, copies: Ints, forecast: Forecast, *, most_moves: int) -> int:
    """Gives the heaviest expert a copy of the lightest replicated one, in place; returns moves."""
    layers, ranks, _ = slots.shape
    rows = np.arange(layers)
    high = forecast.expected + np.sqrt((forecast.changes**2).sum(0))
    moves = 0
    for _ in range(EXCHANGES_OF_COPIES):
        heavy = np.where(copies < ranks, high / copies, -1.0).argmax(-1)
        after = np.where(copies > 1, high / np.maximum(copies - 1, 1), np.inf)
        after[rows, heavy] = np.inf
        light = after.argmin(-1)

        load = rank_loads(slots, forecast.expected / copies)
        is_light = slots == light[:, None, None]
        barred = ~is_light.any(-1) | (slots == heavy[:, None, None]).any(-1)
        rank = np.where(barred, np.inf, load).argmin(-1)
        worth = (high / copies)[rows, heavy] > UNEVEN * after[rows, light]
        layer = np.nonzero(worth & ~barred[rows, rank])[0][: most_moves - moves]
        if not len(layer):
            break
        place = is_light[layer, rank[layer]].argmax(-1)
        slots[layer, rank[layer], place] = heavy[layer]
        copies[layer, heavy[layer]] += 1
        copies[layer, light[layer]] -= 1
        moves += len(layer)
    return moves


def rank_loads(slots: Ints, each: Floats) -> Floats:
    """Loads [L, R] of the ranks when one copy of an expert carries each [L, E]."""
    layers = slots.shape[0]
    loads = np.take_along_axis(each, slots.reshape(layers, -1), -1).reshape(slots.shape)
    return np.asarray(loads.sum(-1))


class _State(NamedTuple):
    """What exchanges change, in place: the experts, what each slot carries, what each rank does.

    The last axis is the expected load, times b, and then the C changes, times b / sqrt(2): the
    exponent of a rank in the sum above is the first plus the squares of the others.
    """

    slots: Ints  # [L, R, S]
    slot_parts: Parts  # [L, R, S, 1 + C]
    rank_parts: Parts  # [L, R, 1 + C]


class _Exchanges(NamedTuple):
    """Of each pair of ranks the best exchange: place `mine` of `heavy` for `theirs` of `light`."""

    gain: Parts  # [L, H], the share of the sum over ranks that it takes away
    heavy: Ints
    light: Ints
    mine: Ints
    theirs: Ints


def exchange(slots: Ints, copies: Ints, forecast: Forecast, *, most_moves: int) -> int:
    """Rounds of exchanges between heavy and light ranks, in place; returns moves, two each."""
    rows = np.arange(slots.shape[0])[:, None, None]
    scaled = [SHARPNESS * forecast.expected[None], SHARPNESS / np.sqrt(2) * forecast.changes]
    parts = np.concatenate(scaled).transpose(1, 2, 0) / copies[:, :, None]
    slot_parts = parts.astype(np.float32)[rows, slots]
    state = _State(slots, slot_parts, slot_parts.sum(2))

    moves, fruitless = 0, 0
    for round_number in range(ROUNDS):
        if moves + 2 > most_moves or fruitless == 2:  # one round of each way to pair
            break
        best = _best_exchanges(state, round_number)
        least = np.maximum(WORTH_NOW * best.gain.max(-1, keepdims=True), LEAST_GAIN)
        layer, pair = np.nonzero(best.gain >= least)
        best_first = np.argsort(-best.gain[layer, pair], kind="stable")
        chosen = best_first[: (most_moves - moves) // 2]
        _apply(state, best, layer[chosen], pair[chosen])
        moves += 2 * len(chosen)
        fruitless = 0 if len(chosen) else fruitless + 1
    return moves


def _apply(state: _State, best: _Exchanges, layer: Ints, pair: Ints) -> None:
    """Makes the chosen exchanges; no rank is in two of them."""
    heavy, light = best.heavy[layer, pair], best.light[layer, pair]
    here = layer, heavy, best.mine[layer, pair]
    there = layer, light, best.theirs[layer, pair]
    gone = state.slot_parts[here] - state.slot_parts[there]
    state.rank_parts[layer, heavy] -= gone
    state.rank_parts[layer, light] += gone
    state.slots[here], state.slots[there] = state.slots[there], state.slots[here]
    state.slot_parts[here] -= gone
    state.slot_parts[there] += gone


def _best_exchanges(state: _State, round_number: int) -> _Exchanges:
    """The heavier half of the ranks meets the lighter: heaviest with lightest, or shifted."""
    slots, slot_parts, rank_parts = state
    exponent = rank_parts[..., 0] + _squares(rank_parts)
    exponent -= exponent.max(-1, keepdims=True)
    terms = np.exp(exponent)  # of the sum over ranks, the largest as 1
    order = np.argsort(-exponent, axis=-1, kind="stable")
    half = order.shape[1] // 2
    heavy, light = order[:, :half], order[:, ::-1][:, :half]
    if round_number % 2:
        light = np.roll(light, 3 * (round_number // 2) + 1, axis=1)

    stride = -(-slots.shape[2] // MOST_PLACES)
    seen = np.arange(round_number % stride, slots.shape[2], stride)
    rows = np.arange(len(slots))[:, None]
    mine, theirs = slot_parts[rows, heavy][:, :, seen], slot_parts[rows, light][:, :, seen]
    cross = 2 * (mine[..., 1:] @ theirs[..., 1:].swapaxes(-1, -2))  # [L, H, S, S]

    def terms_after(rank: Ints, sign: int) -> Parts:
        """Of the rank, once it has all of `mine` (1) or of `theirs` (-1) for the other."""
        held = rank_parts[rows, rank]
        by_mine, by_theirs = _change(held, mine, sign), _change(held, theirs, -sign)
        by_mine += exponent[rows, rank][..., None]
        after = by_mine[..., :, None] + by_theirs[..., None, :]
        after -= cross
        return np.asarray(np.exp(np.minimum(after, HOPELESS, out=after), out=after))

    before = terms[rows, heavy] + terms[rows, light]
    gain = before[..., None, None] - terms_after(heavy, -1) - terms_after(light, 1)
    gain /= terms.sum(-1)[:, None, None, None]
    gain[_held_by(slots, heavy, light)[..., seen]] = 0
    gain.swapaxes(-1, -2)[_held_by(slots, light, heavy)[..., seen]] = 0
    flat = gain.reshape(*heavy.shape, -1)
    best = flat.argmax(-1)
    mine_place, their_place = np.divmod(best, len(seen))
    most = np.take_along_axis(flat, best[..., None], -1)[..., 0]
    return _Exchanges(most, heavy, light, seen[mine_place], seen[their_place])


def _change(held: Parts, added: Parts, sign: int) -> Parts:
    """How the exponent of a rank [.., 1 + C] grows by each slot [.., S, 1 + C] coming or going."""
    along = (added[..., 1:] @ held[..., 1:, None])[..., 0]
    return np.asarray(sign * (added[..., 0] + 2 * along) + _squares(added))


def _held_by(slots: Ints, giver: Ints, taker: Ints) -> Flags:
    """Whether the taker of each pair holds the expert in each place [L, H, S] of the giver."""
    rows = np.arange(len(slots))[:, None]
    equal = slots[rows, giver][..., :, None] == slots[rows, taker][..., None, :]
    return np.asarray(equal.any(-1))


def _squares(parts: Parts) -> Parts:
    """Sum of the squared changes [...] of parts [..., 1 + C]."""
    return np.asarray(np.einsum("...c,...c->...", parts[..., 1:], parts[..., 1:]))
