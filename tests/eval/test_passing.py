"""Pass@1 against numbers that others have printed or computed."""

from __future__ import annotations

import statistics

import pytest

from eval.passing import pass_at_1


def test_one_answer_each_has_wilsons_interval() -> None:
    right = {str(n): [n < 81] for n in range(263)}
    score = pass_at_1(right)
    assert score.share == pytest.approx(81 / 263)
    # Newcombe (1998), table I, method 3
    assert (round(score.low, 4), round(score.high, 4)) == (0.2553, 0.3662)


@pytest.mark.parametrize(("count", "high"), [(20, 0.1611), (29, 0.1170)])
def test_nothing_right_is_not_certainly_nothing(count: int, high: float) -> None:
    score = pass_at_1({str(n): [False] for n in range(count)})
    assert (score.share, score.low, round(score.high, 4)) == (0.0, 0.0, high)


def test_several_answers_are_no_more_questions() -> None:
    right = {"a": [True] * 8, "b": [False] * 8, "c": [True] * 4 + [False] * 4}
    score = pass_at_1(right)
    error = statistics.stdev([1.0, 0.0, 0.5]) / 3**0.5
    assert score.share == 0.5
    assert score.high - score.low == pytest.approx(min(1.0, 2 * 1.959963985 * error), abs=1e-9)
    assert (score.questions, score.answers) == (3, 24)


def test_every_question_weighs_the_same_however_many_answers_it_has() -> None:
    assert pass_at_1({"a": [True], "b": [False] * 9}).share == 0.5


def test_without_answers_there_is_no_score() -> None:
    with pytest.raises(ValueError, match="no answer"):
        pass_at_1({})
