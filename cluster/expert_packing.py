"""A placement from nothing: how many copies each expert gets, and on which rank each copy sits.

Pure arrays, all layers at once. Knows nothing of an earlier placement, of history or of cost.

    L layers   E experts   R ranks   S slots a rank   P = R * S slots a layer
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# An idle expert still needs a slot; this share of a layer's load makes divisions safe.
IDLE_SHARE = 1e-12
# Busiest rank over mean rank up to which a layer is left as the quick rounds pack it: what the
# traffic changes until the next window is several times more.
EVEN = 1.02


def pack(loads: Floats, ranks: int, slots_per_rank: int) -> Ints:
    """Expert of each slot [L, R, S] for loads [L, E], no expert twice on a rank if avoidable.

    Quick rounds first, which even out nearly every layer that has redundant slots; layers that
    stay uneven are packed copy by copy as well, and keep the better of the two.
    """
    copies = replicate(loads, ranks, slots_per_rank)
    each = loads / copies
    order = np.argsort(-each, axis=-1, kind="stable")
    queue = np.repeat(order, np.take_along_axis(copies, order, -1).ravel()).reshape(len(loads), -1)
    weight = np.take_along_axis(each, queue, -1)

    slots, busiest = _in_rounds(queue, weight, ranks)
    uneven = np.nonzero(busiest > EVEN * loads.sum(-1) / ranks)[0]
    if len(uneven):
        singly, their_busiest = _one_by_one(queue[uneven], weight[uneven], ranks)
        better = their_busiest < busiest[uneven]
        slots[uneven[better]] = singly[better]
    return slots


def _in_rounds(queue: Ints, weight: Floats, ranks: int) -> tuple[Ints, Floats]:
    """Slots [L, R, S] and busiest rank [L] for copies [L, P] in order of falling load.

    They fill the first slot of every rank, then the second with the heaviest for the rank that
    has least so far, and so on. Copies of one expert stand next to each other, so they can meet
    on a rank only where two rounds meet; there the ranks that have one already choose last.
    """
    layers, items = queue.shape
    slots = np.empty((layers, ranks, items // ranks), dtype=np.int64)
    filled = np.zeros((layers, ranks))
    rows = np.arange(layers)[:, None]
    for place in range(items // ranks):
        turn = slice(place * ranks, (place + 1) * ranks)
        has_it = (slots[:, :, :place] == queue[:, turn.start, None, None]).any(-1)
        by_load = np.argsort(np.where(has_it, np.inf, filled), axis=-1, kind="stable")
        slots[rows, by_load, place] = queue[:, turn]
        filled[rows, by_load] += weight[:, turn]
    return slots, filled.max(-1)


def _one_by_one(queue: Ints, weight: Floats, ranks: int) -> tuple[Ints, Floats]:
    """The same, each copy to the lightest rank with room and without that expert.

    A layer where no such rank was left at some point counts as infinitely busy.
    """
    layers, items = queue.shape
    places = items // ranks
    slots = np.zeros((layers, ranks, places), dtype=np.int64)
    filled, taken = np.zeros((layers, ranks)), np.zeros((layers, ranks), dtype=np.int64)
    rows, stuck = np.arange(layers), np.zeros(layers, dtype=bool)
    has_it = np.zeros((layers, ranks), dtype=bool)
    for item in range(items):
        has_it[queue[:, item] != queue[:, item - 1]] = False
        cost = np.where(has_it | (taken == places), np.inf, filled)
        rank = cost.argmin(-1)
        stuck |= np.isinf(cost[rows, rank])
        slots[rows, rank, np.minimum(taken[rows, rank], places - 1)] = queue[:, item]
        filled[rows, rank] += weight[:, item]
        taken[rows, rank] += 1
        has_it[rows, rank] = True
    return slots, np.where(stuck, np.inf, filled.max(-1))


def replicate(loads: Floats, ranks: int, slots_per_rank: int) -> Ints:
    """Copies [L, E] of each expert: at least one, no more than ranks, R * S in all.

    They keep the largest load of a copy small: the smallest bound t for which ceil(load / t)
    copies fit is found by bisection, and what is left goes to the heaviest copies. More copies
    than ranks are made only where slots would stay empty otherwise.
    """
    experts = loads.shape[1]
    slots = ranks * slots_per_rank
    most = ranks * -(-slots_per_rank // experts)
    wanted = np.maximum(loads, np.maximum(loads.sum(-1, keepdims=True), 1.0) * IDLE_SHARE)

    def copies_for(bound: Floats) -> Ints:
        return np.asarray(np.clip(np.ceil(wanted / bound), 1, most), dtype=np.int64)

    high = wanted.max(-1, keepdims=True)
    low = wanted.sum(-1, keepdims=True) / (2 * slots)
    for _ in range(20):
        middle = (low + high) / 2
        fits = copies_for(middle).sum(-1, keepdims=True) <= slots
        high, low = np.where(fits, middle, high), np.where(fits, low, middle)
    copies = copies_for(high)

    left = slots - copies.sum(-1)
    while left.any():
        heaviest = np.argsort(np.where(copies < most, -wanted / copies, np.inf), -1, kind="stable")
        turn = np.minimum(left, (copies < most).sum(-1))
        given = np.arange(experts) < turn[:, None]
        np.put_along_axis(
            copies, heaviest, np.take_along_axis(copies, heaviest, -1) + given, axis=-1
        )
        left -= turn
    return copies
