"""A prompt's log-probabilities in one row: each position once, over any number of attempts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ProtocolError
from cluster.messages import PromptLogprobs, TokenLogprobs
from cluster.prompt_order import PromptOrder


def scored(first: int, stop: int) -> PromptLogprobs:
    """Of positions first .. stop - 1; the number of each is in it."""
    return PromptLogprobs(
        first=first,
        logprobs=tuple(TokenLogprobs(logprob=-float(place)) for place in range(first, stop)),
    )


@settings(deadline=None)
@given(
    length=st.integers(1, 20),
    chunks=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    lost=st.lists(st.integers(0, 8), max_size=3),
)
def test_each_comes_once_however_often_an_attempt_is_lost(
    length: int, chunks: list[int], lost: list[int]
) -> None:
    """Attempt k is lost after lost[k] messages, the last is not; chunks differ in each."""
    got: list[float] = []
    for attempt, messages in enumerate([*lost, length]):
        order = PromptOrder(range(1, length), len(got))
        size, first = chunks[attempt % len(chunks)], 1
        for _ in range(messages):
            if first >= length:
                break
            stop = min(first + size, length)
            for delta in order.take(scored(first, stop)):
                assert (delta.token_ids, delta.finish) == ((), None)
                got += [one.logprob for one in delta.prompt_logprobs]
            first = stop
    order.check_complete()
    assert got == [-float(place) for place in range(1, length)]


@pytest.mark.parametrize("wrong", [scored(2, 5), scored(5, 6), scored(4, 9), scored(0, 4)])
def test_a_double_a_gap_and_too_many_are_errors(wrong: PromptLogprobs) -> None:
    order = PromptOrder(range(1, 8), 0)
    order.take(scored(1, 4))
    with pytest.raises(ProtocolError, match=r"where 4 is next and the prompt has 8"):
        order.take(wrong)


def test_a_token_before_the_last_of_them_is_an_error() -> None:
    order = PromptOrder(range(1, 8), 5)  # what others have passed on does not count
    order.take(scored(1, 7))
    with pytest.raises(ProtocolError, match="from position 7 on"):
        order.check_complete()
    order.take(scored(7, 8))
    order.check_complete()


def test_what_nobody_asked_for_is_an_error() -> None:
    order = PromptOrder(range(1, 1), 0)
    order.check_complete()
    with pytest.raises(ProtocolError):
        order.take(scored(1, 2))
