"""The text of an answer: the same however its tokens are grouped, and what a plain search finds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.api.answer_text import AnswerText, Piece
from cluster.api.logprobs import logprobs_body, spell
from cluster.api.stop_strings import StopStrings
from cluster.generation import Delta
from cluster.messages import FinishReason, TokenLogprobs
from tests.cluster.fake_engine import TOKENIZER

FEW = "ab\u00e9\U0001fae0"
LETTERS = st.text(FEW, min_size=1, max_size=3)
BYTES = st.sampled_from(  # of those characters, pieces of them, and what is no UTF-8
    [
        token_id
        for token_id in range(TOKENIZER.size)
        if set(TOKENIZER.token_bytes(token_id)) <= set(FEW.encode() + b"\xc1\xff")
    ]
)


def deltas(
    token_ids: Sequence[int], sizes: Sequence[int], finish: FinishReason = "length"
) -> list[Delta]:
    """Groups of those sizes, the rest one by one."""
    made, first = [], 0
    for size in [*sizes, *[1] * len(token_ids)]:
        ids = tuple(token_ids[first : first + size])
        if ids:
            last = first + len(ids) == len(token_ids)
            told = tuple(TokenLogprobs(logprob=-float(token_id)) for token_id in ids)
            made.append(Delta(ids, first, finish if last else None, told))
        first += size
    return made


def run(
    parts: Sequence[Delta], stops: Sequence[str] = (), **options: Any
) -> tuple[list[Piece], AnswerText]:
    """The pieces up to the one that ends the answer."""
    text = AnswerText(TOKENIZER, StopStrings(stops), **options)
    pieces = []
    for delta in parts:
        pieces.append(text.feed(delta))
        if pieces[-1].finish is not None:
            break
    return pieces, text


def joined(pieces: Sequence[Piece]) -> tuple[Any, ...]:
    return (
        "".join(piece.text for piece in pieces),
        [token for piece in pieces for token in piece.tokens],
        pieces[-1].finish,
    )


def search(token_ids: Sequence[int], stops: Sequence[str], min_tokens: int) -> tuple[str, str, int]:
    """(text, finish, tokens used), the slow way: look at the text after each token."""
    for count in range(min_tokens + 1, len(token_ids) + 1):
        before = known(token_ids[: count - 1])
        now = known(token_ids[:count])
        for end in range(len(before) + 1, len(now) + 1):
            ending = [stop for stop in stops if now[:end].endswith(stop)]
            if ending:
                return now[: end - max(map(len, ending))], "stop", count
    whole = TOKENIZER.decode(token_ids)
    flushed = whole[len(known(token_ids)) :]
    assert flushed in ("", "\ufffd")
    return whole, "length", len(token_ids)


def known(token_ids: Sequence[int]) -> str:
    """The characters that no further byte can change."""
    raw = b"".join(map(TOKENIZER.token_bytes, token_ids))
    one, other = (
        (raw + b"a").decode(errors="replace")[:-1],
        (raw + b"\x80").decode(errors="replace"),
    )
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(character for character, _ in same)


@given(
    st.lists(BYTES, min_size=1, max_size=14),
    st.lists(LETTERS, max_size=3),
    st.lists(st.integers(1, 5), max_size=6),
    st.integers(0, 4),
)
def test_any_grouping_gives_what_a_plain_search_gives(
    token_ids: list[int], stops: list[str], sizes: list[int], min_tokens: int
) -> None:
    options = {"min_tokens": min_tokens}
    pieces, text = run(deltas(token_ids, sizes), stops, **options)
    alone, _ = run(deltas(token_ids, []), stops, **options)
    assert joined(pieces) == joined(alone)
    shown, finish, used = search(token_ids, stops, min_tokens)
    assert (joined(pieces)[0], pieces[-1].finish, text.count) == (shown, finish, used)
    plain, _ = run(deltas(token_ids, sizes), stops, tell_tokens=False, **options)
    assert joined(plain) == (shown, [], finish)


@given(st.lists(BYTES, min_size=1, max_size=14), st.lists(LETTERS, max_size=3))
def test_tokens_are_told_with_the_text_that_they_begin(
    token_ids: list[int], stops: list[str]
) -> None:
    pieces, _ = run(deltas(token_ids, []), stops)
    shown = 0
    for piece in pieces:
        shown += len(piece.text)
        assert all(token.end <= shown or piece.finish for token in piece.tokens)
    text, tokens, finish = joined(pieces)
    assert [token.token_id for token in tokens] == token_ids[: len(tokens)]
    if finish == "length":
        assert len(tokens) == len(token_ids)
    else:
        assert all(token.start < len(text) or token.start == token.end for token in tokens)


def test_no_character_of_a_stop_string_is_ever_shown() -> None:
    token_ids = TOKENIZER.encode("abc STOP def")
    for sizes in ([], [2, 3], [99]):
        pieces, text = run(deltas(token_ids, sizes), [" STOP", "never"])
        assert joined(pieces)[0] == "abc"
        assert joined(pieces)[2] == "stop"
        assert text.count < len(token_ids)


def test_what_was_held_back_is_shown_when_nothing_comes_of_it() -> None:
    pieces, _ = run(deltas(TOKENIZER.encode("abc STO"), []), [" STOP"])
    assert joined(pieces)[0] == "abc STO"
    assert pieces[-1].finish == "length"


def test_the_longest_of_those_that_are_complete_together_counts() -> None:
    token_ids = TOKENIZER.encode("xxabcyy")
    assert joined(run(deltas(token_ids, []), ["c", "bc", "abc", "cy"])[0])[0] == "xx"
    assert joined(run(deltas(token_ids, []), ["abcyy", "b"])[0])[0] == "xxa"


def test_the_stop_string_itself_is_shown_on_demand() -> None:
    pieces, _ = run(deltas(TOKENIZER.encode("one. two."), []), ["."], show_stop=True)
    assert joined(pieces)[0] == "one."


def test_a_stop_token_has_a_place_but_no_text() -> None:
    token_ids = [token_id for letter in "abc" for token_id in TOKENIZER.encode(letter)]
    shown, tokens, finish = joined(run(deltas(token_ids, [], "stop"))[0])
    assert (shown, finish) == ("ab", "stop")
    assert [token.token_id for token in tokens] == token_ids
    assert joined(run(deltas(token_ids, [99], "stop"), tell_tokens=False)[0])[0] == "ab"
    assert joined(run(deltas(token_ids, [], "stop"), show_stop=True)[0])[0] == "abc"


def test_a_thousand_stop_strings_cost_one_step_a_character() -> None:
    strings = [f"{number:04d}" for number in range(1000)]
    many = StopStrings(strings)
    node = 0
    for character in "xx0x00x000":
        node = many.step(node, character)
    assert many.depth[node] == 3
    assert many.found[many.step(node, "7")] == 4


def test_logprobs_have_an_entry_a_token_and_offsets_into_the_text() -> None:
    token_ids = TOKENIZER.encode("a\u00e9b")
    pieces, _ = run(deltas(token_ids, []), offset=10)
    body = logprobs_body([token for piece in pieces for token in piece.tokens], TOKENIZER)
    assert body["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert body["text_offset"] == [10, 11, 11, 12]
    assert body["token_logprobs"] == [-float(token_id) for token_id in token_ids]
    assert [list(top) for top in body["top_logprobs"]] == [[word] for word in body["tokens"]]


@pytest.mark.parametrize("token_id", [0, TOKENIZER.size - 1, TOKENIZER.vocab_size - 1])
def test_every_token_has_a_spelling(token_id: int) -> None:
    assert spell(token_id, TOKENIZER)
