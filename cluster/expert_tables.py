"""Placements and counts as arrays, from and to their messages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cluster.expert_messages import ExpertCounts, ExpertTable
from cluster.expert_placement import Placement

_SLOT = np.dtype("<u2")
_COUNT = np.dtype("<u4")
_MOST = np.iinfo(_COUNT).max


def table_of(placement: Placement) -> ExpertTable:
    """ValidationError for a size that no message holds."""
    layers, ranks, slots = placement.shape
    return ExpertTable(
        layers=layers,
        ranks=ranks,
        slots=slots,
        experts=placement.experts,
        held=placement.slots.astype(_SLOT).tobytes(),
    )


def placement_of(table: ExpertTable) -> Placement:
    """ValueError for a table in which an expert is missing, or that holds one there is not."""
    held = np.frombuffer(table.held, _SLOT).reshape(table.layers, table.ranks, table.slots)
    return Placement(held.astype(np.int64), table.experts)


def counts_of(counts: ExpertCounts) -> npt.NDArray[np.int64]:
    """Tokens [L, E]."""
    tokens = np.frombuffer(counts.tokens, _COUNT).reshape(counts.layers, counts.experts)
    return tokens.astype(np.int64)


def packed_counts(tokens: npt.ArrayLike, steps: int) -> ExpertCounts:
    """Of tokens [L, E]; one that does not fit counts as the most that does."""
    whole = np.asarray(tokens)
    layers, experts = whole.shape
    return ExpertCounts(
        layers=layers,
        experts=experts,
        steps=steps,
        tokens=np.minimum(whole, _MOST).astype(_COUNT).tobytes(),
    )
