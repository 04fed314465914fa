"""Names of blocks: equal exactly when everything that makes the state is equal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.block_hash import ImageSpan, block_hashes
from cluster.messages import pack_ids

IDS = list(range(100, 164))  # four blocks of 16


def hashes(
    token_ids: list[int],
    *,
    model: str = "m",
    block_tokens: int = 16,
    images: tuple[ImageSpan, ...] = (),
) -> tuple[bytes, ...]:
    return block_hashes(pack_ids(token_ids), model=model, block_tokens=block_tokens, images=images)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=80), st.sampled_from([2, 8, 16]))
def test_full_blocks_have_a_name_and_a_partial_one_has_none(
    token_ids: list[int], block_tokens: int
) -> None:
    names = hashes(token_ids, block_tokens=block_tokens)
    assert len(names) == len(token_ids) // block_tokens
    assert len(set(names)) == len(names)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=64),
    st.lists(st.integers(0, 9), min_size=1, max_size=64),
)
def test_names_are_equal_exactly_as_far_as_the_tokens_are(
    ours: list[int], theirs: list[int]
) -> None:
    """Compared with the definition: the whole prefix up to the end of the block."""
    for index, (mine, other) in enumerate(
        zip(hashes(ours, block_tokens=4), hashes(theirs, block_tokens=4), strict=False)
    ):
        end = 4 * (index + 1)
        assert (mine == other) == (ours[:end] == theirs[:end])


def test_a_changed_token_changes_its_block_and_all_later_ones() -> None:
    changed = IDS.copy()
    changed[20] += 1
    same = [ours == theirs for ours, theirs in zip(hashes(IDS), hashes(changed), strict=True)]
    assert same == [True, False, False, False]


def test_model_and_block_size_are_part_of_the_name() -> None:
    names = {hashes(IDS)[0], hashes(IDS, model="n")[0], hashes(IDS, block_tokens=8)[1]}
    assert len(names) == 3


def test_equal_blocks_at_other_places_have_other_names() -> None:
    assert len(set(hashes([7] * 64))) == 4


def test_another_picture_is_another_state_from_its_first_block_on() -> None:
    def shown(key: bytes) -> tuple[bytes, ...]:
        return hashes(IDS, images=(ImageSpan(20, 40, key),))

    assert shown(b"cat") == shown(b"cat")
    same = [ours == theirs for ours, theirs in zip(shown(b"cat"), shown(b"dog"), strict=True)]
    assert same == [True, False, False, False]
    same = [ours == theirs for ours, theirs in zip(shown(b"cat"), hashes(IDS), strict=True)]
    assert same == [True, False, False, False]


def test_where_a_picture_lies_is_part_of_the_name() -> None:
    starts = {hashes(IDS, images=(ImageSpan(start, 40, b"k"),))[1] for start in range(15, 20)}
    ends = {hashes(IDS, images=(ImageSpan(15, stop, b"k"),))[1] for stop in range(17, 33)}
    assert len(starts) == 5
    assert len(ends) == 16


def test_two_pictures_in_one_block_are_told_apart_by_their_order() -> None:
    one = hashes(IDS, images=(ImageSpan(0, 8, b"a"), ImageSpan(8, 16, b"b")))
    other = hashes(IDS, images=(ImageSpan(0, 8, b"b"), ImageSpan(8, 16, b"a")))
    assert one[0] != other[0]


def test_the_names_are_stable_over_releases() -> None:
    """They lie in caches that outlive a process; a change here must be on purpose."""
    assert [name.hex() for name in hashes([1, 2, 3, 4, 5], block_tokens=2)] == [
        "ff5b13c4710905e20f4feca253877135",
        "1b8e629ee6b872942b8e33db70f76e4b",
    ]
