"""Two ranks' tokens in one row, however they arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ProtocolError
from cluster.messages import FinishReason, TokenLogprobs, Tokens
from cluster.token_order import Delta, TokenOrder


def tokens(first: int, *token_ids: int, finish: FinishReason | None = None) -> Tokens:
    return Tokens(first=first, token_ids=token_ids, finish=finish)


@given(
    start=st.integers(0, 5),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    late=st.integers(0, 6),
)
def test_the_row_does_not_depend_on_when_the_first_token_comes(
    start: int, sizes: list[int], late: int
) -> None:
    """`late` messages of decode overtake the first token; grouping is decode's own."""
    end = start + 1 + sum(sizes)
    order = TokenOrder(start, end, colocated=False)
    parts, at = [], start + 1
    for size in sizes:
        finish: FinishReason | None = "length" if at + size == end else None
        parts.append(tokens(at, *range(at, at + size), finish=finish))
        at += size
    deltas: list[Delta] = []
    for index, part in enumerate(parts):
        if index == late:
            deltas += order.from_prefill(tokens(start, start))
        deltas += order.from_decode(part)
    if late >= len(parts):
        assert deltas == []
        deltas += order.from_prefill(tokens(start, start))
    assert [token for delta in deltas for token in delta.token_ids] == list(range(start, end))
    assert all(delta.first == delta.token_ids[0] for delta in deltas)
    assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_an_end_without_a_token_is_passed_on() -> None:
    order = TokenOrder(0, 9, colocated=True)
    assert order.from_decode(tokens(0, 5)) == [Delta((5,), 0)]
    assert order.from_decode(tokens(1, finish="stop")) == [Delta((), 1, "stop")]


def test_logprobs_stay_with_their_tokens_and_one_too_few_is_an_error() -> None:
    some = [TokenLogprobs(logprob=-float(index)) for index in range(3)]
    order = TokenOrder(0, 9, colocated=False)
    late = Tokens(first=1, token_ids=(5, 6), logprobs=tuple(some[1:]))
    assert order.from_decode(late) == []
    first = Tokens(first=0, token_ids=(4,), logprobs=(some[0],))
    assert order.from_prefill(first) == [
        Delta((4,), 0, logprobs=(some[0],)),
        Delta((5, 6), 1, logprobs=tuple(some[1:])),
    ]
    with pytest.raises(ProtocolError, match="2 tokens from index 3 with 1 logprobs"):
        order.from_decode(Tokens(first=3, token_ids=(7, 8), logprobs=(some[0],)))


@pytest.mark.parametrize("wrong", [tokens(0, 1), tokens(2, 1), tokens(1, *range(9))])
def test_a_double_a_gap_and_too_many_are_errors(wrong: Tokens) -> None:
    order = TokenOrder(0, 9, colocated=False)
    order.from_prefill(tokens(0, 1))
    with pytest.raises(ProtocolError):
        order.from_decode(wrong)


def test_prefill_owes_exactly_one_token() -> None:
    with pytest.raises(ProtocolError, match="one first token"):
        TokenOrder(0, 9, colocated=False).from_prefill(tokens(0, 1, 2))
    with pytest.raises(ProtocolError, match="index 0 is next"):
        TokenOrder(0, 9, colocated=False).from_prefill(tokens(1, 1))
    order = TokenOrder(0, 9, colocated=False)
    assert not order.first_is_here
    order.from_prefill(tokens(0, 1))
    assert order.first_is_here
    with pytest.raises(ProtocolError, match="one first token"):
        order.from_prefill(tokens(1, 1))


def test_decode_cannot_go_on_where_prefill_ended() -> None:
    order = TokenOrder(0, 9, colocated=False)
    order.from_decode(tokens(1, 1))
    with pytest.raises(ProtocolError, match="went on"):
        order.from_prefill(tokens(0, 1, finish="stop"))
