"""Forced routing: even or heavy by exactly what is asked for."""

from __future__ import annotations

import pytest
import torch

from examples.bench.routing import Routing, forced


def _counts(routing: Routing, rows: int, chosen: int, experts: int) -> torch.Tensor:
    told = forced(routing, rows, chosen, experts)
    assert told.shape == (rows, chosen)
    assert all(len(set(row)) == chosen for row in told.tolist())
    return torch.bincount(told.flatten(), minlength=experts)


@pytest.mark.parametrize(("rows", "chosen", "experts"), [(8, 4, 16), (33, 6, 384), (1, 2, 4)])
def test_balanced_gives_each_expert_as_many(rows: int, chosen: int, experts: int) -> None:
    counts = _counts(Routing("balanced"), rows, chosen, experts)
    assert int(counts.max() - counts.min()) <= 1


@pytest.mark.parametrize("ratio", [1.0, 1.8, 3.0])
@pytest.mark.parametrize(("chosen", "experts", "groups"), [(4, 16, 8), (6, 384, 64), (6, 384, 8)])
def test_skewed_gives_the_first_part_its_multiple_of_the_average(
    ratio: float, chosen: int, experts: int, groups: int
) -> None:
    rows = 400
    counts = _counts(Routing("skewed", ratio, groups), rows, chosen, experts)
    hot = experts // groups
    assert abs(int(counts[:hot].sum()) - ratio * rows * chosen / groups) <= 1
    for part in (counts[:hot], counts[hot:]):
        assert int(part.max() - part.min()) <= 1


@pytest.mark.parametrize("ratio", [0.5, 9.0, float("nan")])
def test_an_imbalance_that_cannot_be_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="imbalance"):
        Routing("skewed", ratio, 8)


def test_more_than_a_part_can_take_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 2 experts of the first one for a row of 4"):
        forced(Routing("skewed", 6.0, 8), 5, 4, 16)
