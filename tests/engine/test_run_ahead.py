"""Steps that are begun ahead change no token, whoever joins, leaves or fails meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from cluster.errors import BadRequest
from engine.request import Broken, Finished, Preempted, Removed, Running
from engine.step_loop import Execute, Outcome, Work
from model.packed.rows import PackedRows
from tests.engine.packed_engine import Rig, Scripted, Spoiled, a_request, small_model, straight
from tests.model.running import float64


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64():
        yield


DRAWN = {"temperature": 1.2, "seed": 11}
MANY = (
    a_request(5, 1),
    a_request(20, 2, **DRAWN),
    a_request(1, 3, max_tokens=11),
    a_request(33, 4, **DRAWN, top_k=20, top_p=0.9),
    a_request(9, 5, max_tokens=2),
)


@pytest.mark.parametrize("ahead", [True, False])
def test_answers_are_those_of_the_reference(ahead: bool) -> None:
    rig = Rig(ahead=ahead)
    assert rig.play(*MANY) == [straight(one) for one in MANY]
    used, unused = rig.executor.rows_ahead
    assert (used > 20) == ahead
    assert unused == 0  # ends were foreseen: all are by length


def test_without_tables_on_the_device_nothing_runs_ahead_and_the_answers_are_the_same() -> None:
    rig = Rig(small_model(on_device=False))
    assert rig.play(*MANY[:3]) == [straight(one) for one in MANY[:3]]
    assert rig.executor.rows_ahead == (0, 0)
    assert rig.steps.player.launched


def test_who_joins_in_mid_run_finds_others_steps_in_flight() -> None:
    joining = a_request(12, 6, max_tokens=6), a_request(3, 7, **DRAWN)
    script: dict[int, Callable[[], None]] = {}
    rig = Rig(execute=lambda execute: Scripted(execute, script))
    late = [rig.running(one) for one in joining]
    script |= {6: lambda: _add(rig, late[0]), 8: lambda: _add(rig, late[1])}
    first = rig.running(a_request(5, 1, max_tokens=30))
    rig.loop.add(first)
    with rig.turning():
        rig.ears.until(lambda: rig.ears.ended(first, *late))
    for one in (first, *late):
        assert tuple(rig.ears.tokens(one)) == straight(one.request)
    used, unused = rig.executor.rows_ahead
    assert used > 25
    assert unused == 0


def test_who_is_removed_leaves_the_others_and_a_row_for_nothing() -> None:
    script: dict[int, Callable[[], None]] = {}
    rig = Rig(execute=lambda execute: Scripted(execute, script))
    stays, goes = (rig.running(a_request(6, seed, max_tokens=12)) for seed in (1, 2))
    script[5] = lambda: rig.loop.remove(goes)
    rig.loop.add(stays)
    rig.loop.add(goes)
    with rig.turning():
        rig.ears.until(lambda: rig.ears.ended(stays, goes))
    assert tuple(rig.ears.tokens(stays)) == straight(stays.request)
    told = tuple(rig.ears.tokens(goes))
    assert told == straight(goes.request)[: len(told)]
    assert rig.ears.end(goes) == Removed()
    assert rig.executor.rows_ahead[1] == 1


def test_a_stop_id_that_nobody_could_foresee_ends_the_answer() -> None:
    free = a_request(8, 9, max_tokens=10)
    answer = straight(free)
    stop = next(token for token in answer[2:] if token not in answer[:2])
    request = a_request(8, 9, max_tokens=10, ignore_stop=False, stop_token_ids=(stop,))
    other = a_request(6, 1, max_tokens=12)
    rig = Rig()
    one, beside = rig.running(request), rig.running(other)
    rig.loop.add(one)
    rig.loop.add(beside)
    with rig.turning():
        rig.ears.until(lambda: rig.ears.ended(one, beside))
    assert tuple(rig.ears.tokens(one)) == answer[: answer.index(stop) + 1]
    assert rig.ears.end(one) == Finished("stop")
    assert tuple(rig.ears.tokens(beside)) == straight(other)


def test_penalties_and_logprobs_are_made_step_by_step() -> None:
    plain, other = a_request(7, 1), a_request(7, 2, repetition_penalty=1.5, logprobs=2)
    rig = Rig()
    assert rig.play(plain, other) == [straight(plain), straight(other)]
    choices = [news.choice for news in rig.ears.news if news.choice is not None]
    assert sum(choice.logprobs is not None for choice in choices) == 8
    # as long as one of them has to be seen by the host, no step is begun ahead
    assert rig.executor.rows_ahead == (0, 0)


def test_answers_that_take_turns_soon_stop_running_ahead() -> None:
    requests = [a_request(4, seed, max_tokens=12) for seed in range(5)]
    rig = Rig(max_rows=2)
    assert rig.play(*requests) == [straight(one) for one in requests]
    assert rig.executor.rows_ahead[1] < 10  # of some 60 steps' rows


def test_who_gives_way_is_settled_before_its_memory_is_anybodys() -> None:
    """Blocks for one and a half answers: the younger one is preempted."""
    rig = Rig(num_blocks=12)
    old, young = (a_request(6, seed, max_tokens=30) for seed in (1, 2))
    first, second = rig.running(old, length=7), rig.running(young, length=7)
    rig.loop.add(first)
    rig.loop.add(second)
    with rig.turning():
        rig.ears.until(lambda: rig.ears.ended(first, second))
    assert rig.ears.end(second) == Preempted()
    assert tuple(rig.ears.tokens(first)) == straight(old)
    told = tuple(rig.ears.tokens(second))
    assert len(told) > 3
    assert told == straight(young)[: len(told)]
    assert rig.executor.rows_ahead[0] > len(told)  # all but the steps that need another block


def test_an_error_of_one_request_leaves_the_others_answers_right() -> None:
    """Its forward fails in the middle: all begin again, alone, and it fails by itself."""
    bad = a_request(4, 5, max_tokens=9)

    class Failing:
        def __init__(self, execute: Execute) -> None:
            self._execute = execute

        def __call__(self, work: Sequence[Work]) -> Sequence[Outcome]:
            outcomes = self._execute(work)
            for one in work:
                if one.running.request == bad and one.running.output_length == 4:
                    raise BadRequest("the test says so")
            return outcomes

    rig = Rig(execute=Failing)
    good = [rig.running(a_request(6, seed, max_tokens=12)) for seed in (1, 2)]
    guilty = rig.running(bad)
    for one in (*good, guilty):
        rig.loop.add(one)
    with rig.turning():
        rig.ears.until(lambda: rig.ears.ended(*good, guilty))
    assert isinstance(rig.ears.end(guilty), Broken)
    for one in good:
        assert tuple(rig.ears.tokens(one)) == straight(one.request)


def test_logits_that_are_no_numbers_end_their_request_alone() -> None:
    def spoil(rows: PackedRows, logits_TV: Tensor) -> Tensor:
        return logits_TV.masked_fill((rows.positions_T == 12).unsqueeze(1), torch.nan)

    rig = Rig()
    rig.steps._model = Spoiled(rig.model, spoil)  # type: ignore[assignment]
    good, bad = rig.running(a_request(6, 1, max_tokens=6)), rig.running(a_request(9, 2))
    rig.loop.add(good)
    rig.loop.add(bad)
    with rig.turning():
        rig.ears.until(lambda: rig.ears.ended(good, bad))
    end = rig.ears.end(bad)
    assert isinstance(end, Broken)
    assert "position 12 are no numbers" in str(end.error)
    assert tuple(rig.ears.tokens(good)) == straight(good.request)


def test_a_loop_that_stops_in_flight_parts_from_its_requests() -> None:
    script: dict[int, Callable[[], None]] = {}
    rig = Rig(execute=lambda execute: Scripted(execute, script))
    one = rig.running(a_request(6, 1, max_tokens=40))
    rig.loop.add(one)
    with rig.turning():
        rig.ears.until(lambda: len(rig.ears.tokens(one)) > 5)
    if not isinstance(rig.ears.end(one), Finished):
        assert rig.ears.end(one) == Removed()
    told = tuple(rig.ears.tokens(one))
    assert told == straight(one.request)[: len(told)]


def _add(rig: Rig, running: Running) -> None:
    assert rig.loop.add(running)
