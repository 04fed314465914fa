"""What the ranks of one group say, as one placement and one load; and tables as bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.expert_messages import ExpertCounts, ExpertReport, ExpertSwitch, ExpertTable
from cluster.expert_placement import Placement, first_placement
from cluster.expert_tables import counts_of, packed_counts, placement_of, table_of
from cluster.expert_windows import GroupWords

FIRST = first_placement(2, 6, 3, 3)
SECOND = Placement(np.roll(FIRST.slots, 1, axis=1), 6)


def report(
    index: int, version: int = 0, placement: Placement = FIRST, **more: object
) -> ExpertReport:
    said = {"group": "d0", "index": index, "version": version, "table": table_of(placement)}
    return ExpertReport.model_validate(said | more)


def words(*reports: ExpertReport) -> GroupWords:
    heard = GroupWords("d0")
    for one in reports:
        heard.hear(one)
    return heard


def whole(version: int = 0, placement: Placement = FIRST) -> list[ExpertReport]:
    return [report(index, version, placement) for index in range(3)]


def test_a_group_has_a_placement_when_all_its_ranks_have_it() -> None:
    heard = words(report(0), report(2))
    assert heard.placed is None
    heard.hear(report(1))
    assert heard.placed is not None
    assert heard.placed.version == 0

    heard.hear(report(0, 1, SECOND))
    assert heard.placed is None  # the others have not said so yet
    heard.hear(report(1, 1, SECOND))
    heard.hear(report(2, 1, SECOND))
    assert heard.placed is not None
    assert np.array_equal(heard.placed.placement.slots, SECOND.slots)


def test_one_version_with_two_contents_is_no_placement() -> None:
    assert words(report(0), report(1), report(2, 0, SECOND)).placed is None


def test_a_rank_that_leaves_takes_the_placement_with_it() -> None:
    heard = words(*whole())
    heard.forget(1)
    assert heard.placed is None
    heard.hear(report(1))
    assert heard.placed is not None


def test_a_rank_tells_its_table_once_a_version() -> None:
    heard = words(*whole())
    heard.hear(report(0, table=None))
    assert heard.placed is not None
    with pytest.raises(ValueError, match="rank 0 of d0 has not told its placement"):
        heard.hear(report(0, 1, table=None))
    assert heard.placed.version == 0  # what was refused has changed nothing


def test_a_group_that_starts_anew_with_another_model_is_another_group() -> None:
    heard = words(*whole())
    heard.hear(report(0, counts=packed_counts(np.ones((2, 6)), 1)))
    other = first_placement(1, 4, 1, 4)
    heard.hear(report(0, 0, other))
    heard.forget(1)
    heard.forget(2)
    assert heard.placed is not None
    assert heard.placed.placement.experts == 4
    assert heard.take() is None


@given(
    st.lists(st.integers(1, 5), min_size=3, max_size=3),
    st.lists(st.integers(0, 1000), min_size=12, max_size=12),
)
def test_a_groups_load_is_the_sum_of_its_ranks_loads_a_step(
    periods: list[int], tokens: list[int]
) -> None:
    """Whoever has reported more often than the others counts no more than they do."""
    heard = words(*whole())
    a_step = np.array(tokens).reshape(2, 6)
    for index, period in enumerate(periods):
        for _ in range(period):
            heard.hear(report(index, table=None, counts=packed_counts(a_step * 10, 10)))
    taken = heard.take()
    assert taken is not None
    total, steps = taken
    assert steps == max(periods) * 10
    assert np.allclose(total / steps, 3 * a_step)
    assert heard.take() is None  # each count is taken once


def test_the_longest_stall_and_all_bytes_are_the_groups() -> None:
    switches = [ExpertSwitch(fetch_s=1, stall_s=stall, moved_bytes=5) for stall in (0.1, 0.3, 0)]
    heard = words(
        *(report(index, 1, switch=switch) for index, switch in enumerate(switches)),
    )
    assert heard.stall_s == 0.3
    assert heard.moved_bytes == 15


def test_whoever_prepares_something_is_shown() -> None:
    heard = words(report(0), report(1, preparing="version 3: 1 of 2"), report(2))
    assert heard.preparing == "version 3: 1 of 2"


# Bytes


@given(st.data())
def test_a_placement_comes_back_as_it_was(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 4096))
    ranks = data.draw(st.integers(1, 4))
    slots = -(-experts // ranks) + data.draw(st.integers(0, 2))
    placement = first_placement(data.draw(st.integers(1, 3)), experts, ranks, slots)
    back = placement_of(table_of(placement))
    assert back.experts == experts
    assert np.array_equal(back.slots, placement.slots)


def test_a_table_that_is_no_placement_is_refused() -> None:
    with pytest.raises(ValueError, match="expert 2 has no slot"):
        placement_of(
            ExpertTable(layers=1, ranks=1, slots=3, experts=3, held=bytes([0, 0, 1, 0, 0, 0]))
        )
    with pytest.raises(ValueError, match=r"outside 0\.\.1"):
        placement_of(ExpertTable(layers=1, ranks=1, slots=2, experts=2, held=bytes([0, 0, 9, 0])))


@given(st.lists(st.integers(0, 2**40), min_size=6, max_size=6))
def test_counts_come_back_as_they_were_up_to_the_most_that_fits(tokens: list[int]) -> None:
    back = counts_of(packed_counts(np.array(tokens).reshape(2, 3), 7))
    assert back.ravel().tolist() == [min(one, 2**32 - 1) for one in tokens]


@pytest.mark.parametrize(
    "shape",
    [{"layers": 2}, {"slots": 4}, {"ranks": 0}, {"experts": 5000}, {"layers": 10**6}],
)
def test_a_shape_that_does_not_fit_its_bytes_is_refused(shape: dict[str, int]) -> None:
    good = {"layers": 1, "ranks": 1, "slots": 3, "experts": 3, "held": bytes(6)}
    ExpertTable.model_validate(good)
    with pytest.raises(ValidationError):
        ExpertTable.model_validate(good | shape)


@pytest.mark.parametrize("shape", [{"layers": 2}, {"experts": 4}, {"steps": 0}])
def test_counts_that_do_not_fit_their_bytes_are_refused(shape: dict[str, int]) -> None:
    good = {"layers": 1, "experts": 3, "steps": 1, "tokens": bytes(12)}
    ExpertCounts.model_validate(good)
    with pytest.raises(ValidationError):
        ExpertCounts.model_validate(good | shape)
