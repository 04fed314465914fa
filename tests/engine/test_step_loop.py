"""The step loop against a model of ten lines: it turns, parks, and outlives every request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import pytest

from decode_worker.scheduler import schedule
from engine.choice import Choice
from engine.request import Broken, Finished, Prefilled, Removed
from engine.step_loop import Outcome, StepLoop, Work
from tests.engine.loops import EOS, POISON, Ears, FakeModel, running


def start(model: Callable[[Sequence[Work]], Sequence[Outcome]], ears: Ears) -> StepLoop:
    loop = StepLoop(
        schedule=partial(schedule, chunk_tokens=4, beside_tokens=4, max_rows=8),
        execute=model,
        deliver=ears,
        name="test",
    )
    loop.start()
    return loop


def test_a_request_is_prefilled_in_chunks_and_decoded_to_its_end() -> None:
    model, ears = FakeModel(), Ears()
    loop = start(model, ears)
    one = running(1, 2, 3, 4, 5, 6)
    loop.add(one)
    ears.until(lambda: ears.ended(one))
    assert ears.tokens(one) == [21, 42, 84, 168]
    assert ears.end(one) == Finished("length")
    assert model.steps == [[(0, 4)], [(4, 2)], [(6, 1)], [(7, 1)], [(8, 1)]]
    assert loop.steps == 5
    assert loop.stop(10)


def test_a_stop_id_ends_the_answer_unless_it_is_ignored() -> None:
    ears = Ears()
    loop = start(lambda work: [Choice(EOS)] * len(work), ears)
    stops, goes_on = running(5, ignore_stop=False), running(6, ignore_stop=True)
    loop.add(stops)
    loop.add(goes_on)
    ears.until(lambda: ears.ended(stops, goes_on))
    assert (ears.tokens(stops), ears.end(stops)) == ([EOS], Finished("stop"))
    assert (ears.tokens(goes_on), ears.end(goes_on)) == ([EOS] * 4, Finished("length"))
    assert loop.stop(10)


def test_a_prefill_leaves_with_its_first_token() -> None:
    ears = Ears()
    loop = start(FakeModel(), ears)
    goes_on, complete = running(2, 3, once=True), running(4, once=True, max_tokens=1)
    loop.add(goes_on)
    loop.add(complete)
    ears.until(lambda: ears.ended(goes_on, complete))
    assert (ears.tokens(goes_on), ears.end(goes_on)) == ([5], Prefilled())
    assert (ears.tokens(complete), ears.end(complete)) == ([4], Finished("length"))
    assert loop.stop(10)


def test_a_poisoned_request_fails_alone_and_its_neighbours_answers_stay_right() -> None:
    model, ears = FakeModel(), Ears()
    loop = start(model, ears)
    good, bad, later = running(2, 3), running(POISON, 1), running(5)
    loop.add(good)
    ears.until(lambda: bool(ears.tokens(good)))
    loop.add(bad)
    ears.until(lambda: ears.ended(good, bad))
    end = ears.end(bad)
    assert isinstance(end, Broken)
    assert "poisoned" in str(end.error)
    assert "r13" in str(end.error)
    assert ears.tokens(good) == [5, 10, 20, 40]
    loop.add(later)
    ears.until(lambda: ears.ended(later))
    assert ears.tokens(later) == [5, 10, 20, 40]
    assert loop.alive
    assert loop.stop(10)


def test_a_removed_request_leaves_before_the_next_step() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def gated(work: Sequence[Work]) -> list[Outcome]:
        entered.set()
        assert go_on.wait(10)
        return [Choice(7)] * len(work)

    ears = Ears()
    loop = start(gated, ears)
    one = running(2, max_tokens=100)
    loop.add(one)
    assert entered.wait(10)
    loop.remove(one)
    go_on.set()
    ears.until(lambda: ears.ended(one))
    assert ears.tokens(one) == [7]
    assert ears.end(one) == Removed()
    loop.remove(one)  # once more is harmless
    assert loop.stop(10)


def test_a_request_is_announced_before_its_first_step_has_run() -> None:
    announced = threading.Event()
    ears = Ears()

    def gated(work: Sequence[Work]) -> list[Outcome]:
        assert announced.wait(10)
        return [Choice(7)] * len(work)

    loop = start(gated, ears)
    one = running(2, max_tokens=1)
    loop.add(one)
    ears.until(lambda: bool(ears.news))
    assert ears.tokens(one) == []
    announced.set()
    ears.until(lambda: ears.ended(one))
    assert loop.stop(10)


def test_an_idle_loop_parks() -> None:
    model, ears = FakeModel(), Ears()
    loop = start(model, ears)
    one = running(3, max_tokens=1)
    loop.add(one)
    ears.until(lambda: ears.ended(one))
    moved = loop.moved_at
    assert not threading.Event().wait(0.05)  # time in which a spinning loop would turn
    assert loop.steps == 1
    assert loop.moved_at - moved < 0.05
    assert loop.stop(10)


def test_a_loop_that_stops_parts_from_what_it_still_has() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def gated(work: Sequence[Work]) -> list[Outcome]:
        entered.set()
        assert go_on.wait(10)
        return [Choice(7)] * len(work)

    ears = Ears()
    loop = start(gated, ears)
    inside, queued = running(2, max_tokens=100), running(3)
    loop.add(inside)
    assert entered.wait(10)
    loop.add(queued)
    assert not loop.stop(0.01)  # the step is still running
    go_on.set()
    assert loop.stop(10)
    assert ears.end(inside) == ears.end(queued) == Removed()
    assert not loop.add(running(4))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_dies_says_so_to_everybody() -> None:
    ears = Ears()

    def broken_schedule(requests: object) -> list[object]:
        raise AssertionError("our own mistake")

    loop = StepLoop(
        schedule=cast("Callable[..., list[object]]", broken_schedule),  # type: ignore[arg-type]
        execute=FakeModel(),
        deliver=ears,
        name="test",
    )
    loop.start()
    one = running(2)
    loop.add(one)
    ears.until(lambda: ears.ended(one))
    assert loop.stop(10)
    assert not loop.alive
    end = ears.end(one)
    assert isinstance(end, Broken)
    assert "our own mistake" in str(end.error)
