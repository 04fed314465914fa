"""Framing, without a socket."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cluster.frame import DATA, HEADER_BYTES, MORE, Frame, FrameReader, cut, header

FRAMES = st.lists(
    st.builds(Frame, st.integers(0, 2**32 - 1), st.integers(0, 255), st.binary(max_size=300)),
    max_size=8,
)


def as_bytes(frames: list[Frame]) -> bytes:
    return b"".join(
        header(frame.stream, frame.kind, len(frame.body or b"")) + (frame.body or b"")
        for frame in frames
    )


@given(FRAMES, st.lists(st.integers(0, 2600)), st.integers(0, 300))
def test_frames_do_not_depend_on_how_their_bytes_arrive(
    frames: list[Frame], cuts: list[int], max_body: int
) -> None:
    """Those that are too long come as empty frames, and nothing after them is lost."""
    whole = as_bytes(frames)
    edges = sorted({0, len(whole), *(at for at in cuts if at < len(whole))})
    reader = FrameReader(max_body)
    read: list[Frame] = []
    for start, stop in pairwise(edges):
        read += reader.feed(whole[start:stop])
    assert read == [
        frame if len(frame.body or b"") <= max_body else frame._replace(body=None)
        for frame in frames
    ]


def test_a_frame_that_is_too_long_is_never_kept() -> None:
    reader = FrameReader(max_body=100)
    assert reader.feed(header(1, DATA, 10**9)) == [Frame(1, DATA, None)]
    for _ in range(1000):
        assert reader.feed(bytes(1000)) == []
        assert len(reader._rest) < HEADER_BYTES


@given(st.binary(max_size=1000), st.integers(1, 400))
def test_pieces_make_the_message(body: bytes, cut_bytes: int) -> None:
    pieces = list(cut(body, cut_bytes))
    assert b"".join(bytes(piece) for _, piece in pieces) == body
    assert [kind for kind, _ in pieces] == [MORE] * (len(pieces) - 1) + [DATA]
    assert all(len(piece) == cut_bytes for _, piece in pieces[:-1])
    assert len(pieces) == max(1, -(-len(body) // cut_bytes))
