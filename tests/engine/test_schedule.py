"""Both schedulers, on random mixes of requests: bounds hold, nobody starves, order is kept."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.scheduler import schedule as decode_schedule
from engine.schedule import Grant, Progress
from prefill_worker.scheduler import schedule as prefill_schedule

rows = st.integers(1, 12)


@st.composite
def engines(draw: st.DrawFn) -> list[Progress]:
    requests = []
    for index in range(draw(st.integers(0, 8))):
        done = draw(st.integers(0, 20))
        length = done + draw(st.integers(1, 20))
        requests.append(Progress(index, done, length, draw(st.integers(0, 30))))
    return requests


def _check(requests: list[Progress], grants: list[Grant]) -> None:
    """What holds for any schedule."""
    assert len({grant.index for grant in grants}) == len(grants)
    for grant in grants:
        request = requests[grant.index]
        assert grant.start == request.done
        assert 1 <= grant.count <= request.remaining
        assert grant.samples == (grant.start + grant.count == request.length)


@given(engines(), rows)
def test_prefill_is_first_come_first_served_and_fills_its_chunk(
    requests: list[Progress], chunk: int
) -> None:
    grants = prefill_schedule(requests, chunk_tokens=chunk)
    _check(requests, grants)
    assert [grant.index for grant in grants] == list(range(len(grants)))
    wanted = sum(request.remaining for request in requests)
    assert sum(grant.count for grant in grants) == min(chunk, wanted)
    assert all(grant.samples for grant in grants[:-1])


@given(engines(), rows, rows, rows)
def test_decode_gives_every_answer_a_row_and_prompts_a_bounded_part(
    requests: list[Progress], chunk: int, beside: int, max_rows: int
) -> None:
    """Less of a part where answers share the step: their time per token stays bounded."""
    grants = decode_schedule(requests, chunk_tokens=chunk, beside_tokens=beside, max_rows=max_rows)
    _check(requests, grants)
    answers = [request for request in requests if request.remaining == 1]
    served = [grant for grant in grants if requests[grant.index].remaining == 1]
    prompts = [grant for grant in grants if requests[grant.index].remaining > 1]
    assert len(served) == min(max_rows, len(answers))
    wanted = sum(request.remaining for request in requests if request.remaining > 1)
    most = min(chunk, beside) if answers else chunk
    assert sum(grant.count for grant in prompts) == min(most, wanted)


@given(engines(), rows, rows, rows, st.booleans())
def test_a_neighbours_answer_bounds_prompts_as_one_here_does(
    requests: list[Progress], chunk: int, beside: int, max_rows: int, suspect: bool
) -> None:
    if requests and suspect:
        requests[0] = replace(requests[0], alone=True)
    grants = decode_schedule(
        requests,
        chunk_tokens=chunk,
        beside_tokens=beside,
        max_rows=max_rows,
        neighbours_answer=True,
    )
    _check(requests, grants)
    prompts = [grant for grant in grants if requests[grant.index].remaining > 1]
    assert sum(grant.count for grant in prompts) <= min(chunk, beside)
    assert bool(grants) == bool(requests)


@given(st.integers(1, 20), rows)
def test_no_answer_starves_when_there_are_more_than_rows(answers: int, max_rows: int) -> None:
    requests = [Progress(index, 5, 6) for index in range(answers)]
    runs = [0] * answers
    turn = 0
    for _ in range(3 * answers):
        for grant in decode_schedule(requests, chunk_tokens=4, beside_tokens=4, max_rows=max_rows):
            turn += 1
            runs[grant.index] += 1
            requests[grant.index] = replace(requests[grant.index], turn=turn)
    assert max(runs) - min(runs) <= 1


@given(engines(), rows, st.data())
def test_a_suspect_runs_alone(requests: list[Progress], chunk: int, data: st.DataObject) -> None:
    if not requests:
        return
    suspect = data.draw(st.integers(0, len(requests) - 1))
    requests[suspect] = replace(requests[suspect], alone=True)
    for grants in (
        prefill_schedule(requests, chunk_tokens=chunk),
        decode_schedule(requests, chunk_tokens=chunk, beside_tokens=chunk, max_rows=3),
    ):
        _check(requests, grants)
        assert [grant.index for grant in grants] == [suspect]
        assert grants[0].count <= chunk
