"""Expert placement: which expert sits in each slot of each rank, with copies of the busy ones.

`place` is one pure function, the same in production, tests and simulation. Knows nothing of
requests, processes or weights. Whether a placement is worth the bytes that it moves is asked of
`worthwhile`.

    W windows, oldest first   L layers   E experts   R ranks   S slots a rank
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.expert_packing import EVEN, pack
from cluster.expert_refinement import Forecast, count_copies, rank_loads, refine

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Weight of a window against all before it. Traffic drifts faster than one window is noisy: with
# 0.6 to 1.0 the next window is balanced alike, with 0.4 and less worse.
NEWEST = 0.8


def extra_experts(experts: int, least_extra: int, ranks: int) -> int:
    """Redundant experts a layer: the smallest number from `least_extra` on that divides.

    Rounds up until (experts + extra) is a multiple of the ranks, as DeepInfer does.
    ValueError for a negative number, no experts or no ranks.
    """
    if experts < 1 or ranks < 1:
        raise ValueError(f"{experts} experts on {ranks} ranks: both must be positive")
    if least_extra < 0:
        raise ValueError(
            f"{least_extra} redundant experts: the number must not be negative; "
            f"the smallest valid one for {experts} experts on {ranks} ranks is {-experts % ranks}"
        )
    return least_extra + -(experts + least_extra) % ranks


def rank_slots(experts: int, extra: int, ranks: int) -> int:
    """Slots of a rank; ValueError, naming the smallest valid number, if `extra` does not fit."""
    fitting = extra_experts(experts, extra, ranks)
    if fitting != extra:
        raise ValueError(
            f"{experts} experts and {extra} redundant ones do not divide by {ranks} ranks; the "
            f"smallest number of redundant experts from {extra} on that does is {fitting}, the "
            f"smallest of all {-experts % ranks}"
        )
    return (experts + extra) // ranks


@dataclass(frozen=True, eq=False)
class Placement:
    """Expert of each slot [L, R, S]; every expert of a layer has at least one slot."""

    slots: Ints
    experts: int

    def __post_init__(self) -> None:
        if self.slots.ndim != 3:
            raise ValueError(f"slots of a placement are [layers, ranks, slots], not {self.shape}")
        if self.slots.size and not 0 <= self.slots.min() <= self.slots.max() < self.experts:
            raise ValueError(f"a slot holds an expert outside 0..{self.experts - 1}")
        layer, expert = np.nonzero(self.copies() == 0)
        if len(layer):
            raise ValueError(f"layer {layer[0]}: expert {expert[0]} has no slot")

    @property
    def shape(self) -> tuple[int, ...]:
        """Layers, ranks and slots a rank."""
        return self.slots.shape

    def copies(self) -> Ints:
        """Copies [L, E] of each expert."""
        return count_copies(self.slots, self.experts)

    def rank_loads(self, loads: npt.ArrayLike) -> Floats:
        """Loads [L, R] of the ranks when the copies of an expert share its load [L, E] evenly."""
        return rank_loads(self.slots, np.asarray(loads, dtype=np.float64) / self.copies())

    def imbalance(self, loads: npt.ArrayLike) -> Floats:
        """Busiest rank over the mean rank, [L]; 1 for a layer without load."""
        of_rank = self.rank_loads(loads)
        mean = of_rank.mean(-1)
        busy = mean > 0
        return np.where(busy, of_rank.max(-1) / np.where(busy, mean, 1.0), 1.0)

    def moves_from(self, previous: Placement) -> Ints:
        """Slots [L, R] whose weights a rank must fetch: experts that it did not hold before."""
        if self.shape != previous.shape or self.experts != previous.experts:
            raise ValueError(f"placements of {previous.shape} and {self.shape} cannot be compared")
        held = (self.slots[..., :, None] == previous.slots[..., None, :]).any(-1)
        return np.asarray((~held).sum(-1))


def first_placement(layers: int, experts: int, ranks: int, slots: int) -> Placement:
    """Experts in order, then again from 0 in the redundant slots, cut into equal parts."""
    _check_size(experts, ranks, slots)
    in_order = np.arange(ranks * slots) % experts
    return Placement(np.tile(in_order, (layers, 1)).reshape(layers, ranks, slots), experts)


def place(
    loads: npt.ArrayLike,
    *,
    ranks: int,
    slots_per_rank: int,
    previous: Placement | None = None,
    most_moves: int | None = None,
) -> Placement:
    """The placement for the window after `loads` [L, E] or [W, L, E].

    With `previous` it keeps slots and makes at most `most_moves` moves (default: as many as help),
    without it starts anew. Several windows show how loads change, and the placement is made for
    the changes too. Equal input gives equal output. ValueError for sizes that cannot be placed,
    loads that are negative or no numbers, and a `previous` of another size.
    """
    windows = np.asarray(loads, dtype=np.float64)
    if windows.ndim == 2:
        windows = windows[None]
    if windows.ndim != 3 or 0 in windows.shape:
        raise ValueError(
            f"loads are [layers, experts] or [windows, layers, experts], not {windows.shape}"
        )
    if not np.isfinite(windows).all() or windows.min() < 0:
        raise ValueError("loads must be finite and not negative")
    _, layers, experts = windows.shape
    _check_size(experts, ranks, slots_per_rank)

    forecast = _forecast(windows, ranks)
    unlimited = layers * ranks * slots_per_rank
    if previous is None:
        slots = pack(forecast.expected, ranks, slots_per_rank)
        unfinished = _unfinished(slots, forecast)
        slots[unfinished] = refine(slots[unfinished], forecast.of(unfinished), most_moves=unlimited)
        return Placement(slots, experts)
    if previous.shape != (layers, ranks, slots_per_rank) or previous.experts != experts:
        raise ValueError(
            f"the previous placement is of {previous.experts} experts in {previous.shape}, the "
            f"loads are of {experts} in {(layers, ranks, slots_per_rank)}: they are of two groups"
        )
    moves = unlimited if most_moves is None else max(most_moves, 0)
    return Placement(refine(previous.slots, forecast, most_moves=moves), experts)


def worthwhile(
    *,
    seconds_saved_a_step: float,
    steps_until_next: float,
    bytes_of_busiest_rank: float,
    bytes_a_second: float,
) -> bool:
    """Whether the steps until the next placement save more time than its weights take to come."""
    return seconds_saved_a_step * steps_until_next > bytes_of_busiest_rank / bytes_a_second


def _check_size(experts: int, ranks: int, slots: int) -> None:
    if min(experts, ranks, slots) < 1 or ranks * slots < experts:
        raise ValueError(
            f"{experts} experts do not fit on {ranks} ranks with {slots} slots each; "
            f"{-(-experts // max(ranks, 1))} slots a rank are the fewest that do"
        )


def _forecast(windows: Floats, ranks: int) -> Forecast:
    """What to expect of the next window: the newest ones, and changes as from window to window.

    Windows count by their shares, so a quiet one counts as much as a busy one.
    """
    shares = _shares(windows)
    expected = shares[0]
    for share in shares[1:]:
        expected = NEWEST * share + (1 - NEWEST) * expected
    changes = np.diff(shares, axis=0)
    return Forecast(expected * ranks, changes * (ranks / np.sqrt(max(len(changes), 1))))


def _unfinished(slots: Ints, forecast: Forecast) -> Ints:
    """Layers that exchanges can better after packing: all whose changes are known, else uneven."""
    if len(forecast.changes):
        return np.arange(len(slots))
    each = forecast.expected / count_copies(slots, forecast.expected.shape[1])
    return np.nonzero(rank_loads(slots, each).max(-1) > EVEN)[0]


def _shares(windows: Floats) -> Floats:
    """Share [W, L, E] of each expert in its layer's load; an idle layer looks as it last did."""
    total = windows.sum(-1)
    busy = total > 0
    shares = windows / np.where(busy, total, 1.0)[..., None]
    layers, experts = windows.shape[1:]
    first = shares[busy.argmax(0), np.arange(layers)]
    shown = np.where(busy.any(0)[:, None], first, 1.0 / experts)
    for window, has_load in enumerate(busy):
        shown = shares[window] = np.where(has_load[:, None], shares[window], shown)
    return shares
