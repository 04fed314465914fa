"""When a group gets another placement: windows, the gate, versions, static files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cluster.config import ExpertsSection
from cluster.expert_balancer import Balancer, Keep
from cluster.expert_placement import Placement, first_placement
from cluster.expert_question import Question
from cluster.placement_file import GroupPlacement, read, write

EXPERTS, RANKS, SLOTS = 8, 2, 5
SETTINGS = ExpertsSection(
    window_steps=10, windows=3, most_moved_share=0.4, expert_bytes=1000, bytes_a_second=1e9
)


def with_settings(**changed: object) -> ExpertsSection:
    return SETTINGS.model_copy(update=changed)


UNEVEN = np.array([[90, 80, 70, 60, 1, 1, 1, 1]])  # rank 0 does nearly everything


def start(group: str = "d0", version: int = 0) -> GroupPlacement:
    return GroupPlacement(group, version, first_placement(1, EXPERTS, RANKS, SLOTS))


def balancer(
    *groups: str,
    settings: ExpertsSection = SETTINGS,
    static: dict[str, GroupPlacement] | None = None,
    saved: dict[str, GroupPlacement] | None = None,
) -> Balancer:
    return Balancer(settings, static or {}, saved or {}).with_live(frozenset(groups))


def busy(
    settings: ExpertsSection = SETTINGS, static: dict[str, GroupPlacement] | None = None
) -> Balancer:
    """One group with one full window of uneven counts."""
    known = balancer("d0", settings=settings, static=static).reported(start(), now=0.0)
    return known.counted("d0", UNEVEN * 10, steps=10)


def why(state: Balancer, group: str = "d0", now: float = 1.0) -> str:
    decision, _ = state.decide(group, now=now)
    assert isinstance(decision, Keep)
    return decision.why


def test_a_full_window_of_uneven_counts_gives_a_better_placement() -> None:
    decision, _ = busy().decide("d0", now=1.0)
    assert isinstance(decision, GroupPlacement)
    assert (decision.group, decision.version) == ("d0", 1)
    assert decision.placement.imbalance(UNEVEN)[0] < start().placement.imbalance(UNEVEN)[0] - 0.1
    assert decision.placement.moves_from(start().placement).sum() <= 4


def test_nothing_is_decided_before_the_window_is_full() -> None:
    known = balancer("d0").reported(start(), now=0.0).counted("d0", UNEVEN, steps=9)
    assert why(known) == "its window is not full"
    decision, _ = known.counted("d0", UNEVEN, steps=1).decide("d0", now=1.0)
    assert isinstance(decision, GroupPlacement)


def test_one_window_is_decided_on_once() -> None:
    level = np.ones((1, EXPERTS))
    known = balancer("d0").reported(start(), now=0.0).counted("d0", level, steps=10)
    first, known = known.decide("d0", now=1.0)
    assert isinstance(first, Keep)
    assert "would save" in first.why
    assert why(known) == "its window is not full"


def test_what_saves_less_time_than_it_moves_is_not_done() -> None:
    slow = with_settings(bytes_a_second=1.0)
    assert "move 0.001 MB to one rank" in why(busy(slow))


def test_a_version_on_its_way_is_waited_for() -> None:
    given, known = busy().decide("d0", now=1.0)
    assert isinstance(given, GroupPlacement)
    again = known.counted("d0", UNEVEN * 10, steps=10)
    assert why(again) == "version 1 is on its way"
    assert why(again.reported(start(), now=2.0)) == "version 1 is on its way"  # not there yet

    arrived = again.reported(given, now=2.0)
    decision, _ = arrived.decide("d0", now=2.0)
    assert not (isinstance(decision, Keep) and "on its way" in decision.why)


def test_a_version_that_never_arrives_is_given_up_in_time() -> None:
    _, known = busy().decide("d0", now=1.0)
    late = 1.0 + SETTINGS.answer_timeout_s + 0.1
    known = known.counted("d0", UNEVEN * 10, steps=10).reported(start(), now=late)
    decision, _ = known.decide("d0", now=late)
    assert isinstance(decision, GroupPlacement)
    assert decision.version == 2


def test_a_group_that_starts_anew_is_not_waited_for() -> None:
    known = balancer("d0").reported(start(version=5), now=0.0)
    _, known = known.counted("d0", UNEVEN * 10, steps=10).decide("d0", now=1.0)
    known = known.reported(start(version=0), now=1.5).counted("d0", UNEVEN * 10, steps=10)
    decision, _ = known.decide("d0", now=2.0)
    assert isinstance(decision, GroupPlacement)
    assert decision.version == 7  # 6 was given and may still live somewhere


def test_after_a_restart_all_live_groups_report_before_a_version_is_given() -> None:
    known = balancer("d0", "d1").reported(start("d0", version=3), now=0.0)
    known = known.counted("d0", UNEVEN * 10, steps=10)
    assert why(known) == "waiting for the first report of d1"
    decision, _ = known.reported(start("d1", version=41), now=0.5).decide("d0", now=1.0)
    assert isinstance(decision, GroupPlacement)
    assert decision.version == 42


def test_groups_that_are_gone_are_forgotten_but_not_their_versions() -> None:
    known = balancer("d0", "d1").reported(start("d1", version=41), now=0.0)
    known = known.with_live(frozenset({"d0"})).reported(start("d0"), now=1.0)
    assert set(known.groups) == {"d0"}
    decision, _ = known.counted("d0", UNEVEN * 10, steps=10).decide("d0", now=1.0)
    assert isinstance(decision, GroupPlacement)
    assert decision.version == 42
    assert why(known, "d1") == "group d1 is not live"


def test_reports_and_counts_of_groups_that_are_not_live_change_nothing() -> None:
    known = balancer("d0")
    assert known.reported(start("d9", version=9), now=0.0) is known
    assert known.counted("d9", UNEVEN, steps=10) is known


def test_one_groups_counts_never_move_another_groups_experts() -> None:
    known = balancer("d0", "d1").reported(start("d0"), now=0.0).reported(start("d1"), now=0.0)
    known = known.counted("d0", UNEVEN * 10, steps=10)
    assert why(known, "d1") == "its window is not full"


def test_counts_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="d0: counts"):
        busy().counted("d0", np.ones((1, 9)), steps=1)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_what_is_no_count_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="d0: counts must be finite"):
        busy().counted("d0", np.full((1, EXPERTS), wrong), steps=1)


def test_a_group_of_another_size_under_an_old_name_starts_without_history() -> None:
    larger = GroupPlacement("d0", 0, first_placement(1, 9, 3, 4))
    known = busy().reported(larger, now=1.0)
    assert known.groups["d0"].windows == ()
    assert known.groups["d0"].placed is larger


def test_disabled_balancing_keeps_everything() -> None:
    assert why(busy(with_settings(disable_eplb=True))) == "expert balancing is disabled"


def test_a_group_of_one_rank_has_nothing_to_balance() -> None:
    alone = GroupPlacement("d0", 0, first_placement(1, EXPERTS, 1, EXPERTS))
    known = balancer("d0").reported(alone, now=0.0).counted("d0", UNEVEN * 10, steps=10)
    assert why(known) == "it has one rank"


def test_counts_of_zero_move_nothing() -> None:
    known = balancer("d0").reported(start(), now=0.0)
    known = known.counted("d0", np.zeros((1, EXPERTS)), steps=10)
    assert "would save 0 ms" in why(known)


def test_a_static_placement_is_given_once_and_kept() -> None:
    slots = np.array([[[0, 1, 2, 3, 4], [4, 5, 6, 7, 0]]])
    fixed = GroupPlacement("*", 1, Placement(slots, EXPERTS))
    known = balancer("d0", static={"*": fixed}).reported(start(version=6), now=0.0)
    given, known = known.decide("d0", now=1.0)
    assert isinstance(given, GroupPlacement)
    assert given.version == 7
    assert np.array_equal(given.placement.slots, slots)
    known = known.reported(given, now=2.0).counted("d0", UNEVEN * 10, steps=10)
    assert why(known) == "its placement is static"


def test_a_static_placement_of_another_size_says_so() -> None:
    fixed = GroupPlacement("d0", 1, first_placement(1, 9, 3, 3))
    assert "of 9 experts in (1, 3, 3)" in why(busy(static={"d0": fixed}))


def test_a_static_placement_for_every_group_leaves_groups_of_another_size_alone() -> None:
    fixed = GroupPlacement("*", 1, first_placement(1, 9, 3, 3))
    decision, _ = busy(static={"*": fixed}).decide("d0", now=1.0)
    assert isinstance(decision, GroupPlacement)


def test_an_answer_to_a_group_that_has_changed_meanwhile_is_dropped() -> None:
    question, asked = busy().ask("d0")
    assert isinstance(question, Question)
    answer = question.answer()
    assert answer.wanted is not None
    for changed in (
        asked.with_live(frozenset()),
        asked.reported(start(version=3), now=1.0),
        asked.reported(GroupPlacement("d0", 0, first_placement(1, 9, 3, 4)), now=1.0),
    ):
        decision, after = changed.conclude(answer, now=2.0)
        assert decision == Keep("it has changed since this was asked")
        assert after is changed
    decision, _ = asked.conclude(answer, now=2.0)
    assert isinstance(decision, GroupPlacement)


def test_an_answer_says_what_was_and_what_would_be() -> None:
    question, _ = busy().ask("d0")
    assert isinstance(question, Question)
    answer = question.answer()
    assert answer.before[0] == pytest.approx(start().placement.imbalance(UNEVEN)[0])
    assert answer.after[0] < answer.before[0]
    assert 0 < answer.moved.sum() <= 4
    assert "it saves" in answer.why


# What new groups begin with


def learnt(group: str, version: int) -> GroupPlacement:
    slots = np.roll(first_placement(1, EXPERTS, RANKS, SLOTS).slots, version, axis=-1)
    return GroupPlacement(group, version, Placement(slots, EXPERTS))


def first_given(state: Balancer, group: str) -> GroupPlacement | None:
    decision, _ = state.decide(group, now=1.0)
    return decision if isinstance(decision, GroupPlacement) else None


def test_a_new_group_begins_with_its_own_saved_placement_else_its_pools_newest() -> None:
    saved = {one.group: one for one in (learnt("d-1", 1), learnt("d-2", 3), learnt("p-1", 4))}
    known = balancer("d-1", "d-9", saved=saved)
    for group in ("d-1", "d-9"):
        known = known.reported(start(group), now=0.0)
    own, of_pool = first_given(known, "d-1"), first_given(known, "d-9")
    assert own is not None
    assert of_pool is not None
    assert np.array_equal(own.placement.slots, saved["d-1"].placement.slots)
    assert np.array_equal(of_pool.placement.slots, saved["d-2"].placement.slots)


def test_it_begins_so_once() -> None:
    known = balancer("d-9", saved={"d-1": learnt("d-1", 1)}).reported(start("d-9"), now=0.0)
    given, known = known.decide("d-9", now=1.0)
    assert isinstance(given, GroupPlacement)
    late = 1.0 + SETTINGS.answer_timeout_s + 0.1
    known = known.reported(start("d-9"), now=late)  # it could not prepare it
    assert why(known, "d-9", late) == "its window is not full"


def test_a_group_that_is_not_new_or_of_another_size_keeps_what_it_has() -> None:
    saved = {"d-1": learnt("d-1", 1)}
    older = balancer("d-9", saved=saved).reported(start("d-9", version=2), now=0.0)
    assert why(older, "d-9") == "its window is not full"
    larger = GroupPlacement("d-9", 0, first_placement(1, 9, 3, 4))
    assert why(balancer("d-9", saved=saved).reported(larger, now=0.0), "d-9") == (
        "its window is not full"
    )


def test_of_groups_that_are_gone_only_the_newest_placement_is_kept() -> None:
    known = balancer("d-1")
    for version in range(1, 5):
        group = f"d-{version}"
        known = known.with_live(frozenset({group})).reported(learnt(group, version), now=0.0)
    assert set(known.saved) == {"d-4"}
    both = known.with_live(frozenset({"d-4", "p-1"})).reported(learnt("p-1", 5), now=0.0)
    assert set(both.saved) == {"d-4", "p-1"}


# The file


def test_placements_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "placements.json"
    write(path, [start("d0", 3), start("d1", 4)])
    write(path, [start("d0", 5), start("*", 2)])
    back = read(path)
    assert {name: one.version for name, one in back.items()} == {"d0": 5, "*": 2}
    assert np.array_equal(back["d0"].placement.slots, start().placement.slots)
    assert [found.name for found in tmp_path.iterdir()] == ["placements.json"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "not a file of expert placements"),
        ('{"format": 2, "placements": []}', "format 2 is not 1"),
        ('{"format": 1}', "'placements' is missing"),
        ('{"format": 1, "placements": [{"group": "a", "version": 1}]}', "'experts' is missing"),
        (
            '{"format": 1, "placements": '
            '[{"group": "a", "version": 1, "experts": 3, "slots": [[[0, 1], [1, 0]]]}]}',
            "layer 0: expert 2 has no slot",
        ),
        (
            '{"format": 1, "placements": '
            '[{"group": "a", "version": 1, "experts": 2, "slots": [[[0, 1], [1]]]}]}',
            "inhomogeneous",
        ),
        (
            '{"format": 1, "placements": '
            '[{"group": "a", "version": 1, "experts": 2, "slots": [[[0, 1.5]]]}]}',
            "numbers of experts",
        ),
        (
            '{"format": 1, "placements": '
            '[{"group": "a", "version": true, "experts": 2, "slots": [[[0, 1]]]}]}',
            "whole numbers",
        ),
    ],
)
def test_a_file_that_is_none_says_what_is_wrong(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "placements.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason) as raised:
        read(path)
    assert str(path) in str(raised.value)
