"""Several ranks do one forward: every one of them ends with the bits of a rank alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model.context_parallel import mirrored
from tests.model.cases import BY_NAME, Case
from tests.model.running import PackedRows, Request, build

NAMES = ("micro", "narrow", "other_layers", "one_ratio", "images", "fp8", "compact", "mask")
CHUNKS = {"whole": (), "pieces": (13, 1, 2, 20), "tiny_pieces": (1, 2, 3)}
RING = 40


@dataclass
class Meeting:
    """Threads that gather rows from each other."""

    size: int
    brought: dict[int, Tensor] = field(default_factory=dict)
    rounds: int = 0

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)

    def seat(self, index: int) -> Seat:
        return Seat(self, index)


@dataclass
class Seat:
    meeting: Meeting
    index: int

    @property
    def size(self) -> int:
        return self.meeting.size

    def __call__(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        assert len(rows) == counts[self.index]
        self.meeting.brought[self.index] = rows
        self.meeting.barrier.wait()
        brought = [self.meeting.brought[index] for index in range(self.size)]
        assert [len(part) for part in brought] == list(counts)
        if self.meeting.barrier.wait() == 0:
            self.meeting.rounds += 1
        return torch.cat(brought)


def sizes(case: Case, chunks: Sequence[int]) -> list[int]:
    return [*chunks, case.length - sum(chunks)]


def run(request: Request, chunks: Sequence[int], seat: Seat | None = None) -> Tensor:
    torch.set_num_threads(1)
    parts = []
    for size in sizes(request.case, chunks):
        with torch.inference_mode():
            parts.append(request.model.forward(request._batch(size), request.cache, seat))
        request.length += size
    return torch.cat(parts)


def together(
    requests: Sequence[Request], chunks: Sequence[int], meeting: Meeting
) -> Sequence[Tensor]:
    """Each in a thread; the first failure ends the others' waiting, and is raised."""
    failures: list[Exception] = []

    def one(index: int) -> Tensor | None:
        try:
            return run(requests[index], chunks, meeting.seat(index))
        except Exception as failure:
            failures.append(failure)
            meeting.barrier.abort()
            return None

    with ThreadPoolExecutor(len(requests)) as threads:
        found = list(threads.map(one, range(len(requests))))
    if failures:
        raise failures[0]
    return [logits for logits in found if logits is not None]


def often(name: str, ranks: int) -> bool:
    return (name, ranks) in (("micro", 4), ("narrow", 3), ("images", 2), ("compact", 4))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=[] if often(name, ranks) else [pytest.mark.full])
        for name in NAMES
        for ranks in (2, 3, 4)
    ],
)
def test_every_rank_has_the_logits_and_the_state_of_one_alone(name: str, ranks: int) -> None:
    case = BY_NAME[name]
    model = build(case)
    for chunks in CHUNKS.values():
        alone = Request.of(model, case, PackedRows(model.spec, RING))
        expected = run(alone, chunks)
        meeting = Meeting(ranks)
        requests = [Request.of(model, case, PackedRows(model.spec, RING)) for _ in range(ranks)]
        found = together(requests, chunks, meeting)
        assert meeting.rounds > len(sizes(case, chunks))
        for request, logits in zip(requests, found, strict=True):
            assert torch.equal(logits, expected)
            assert_same(request.cache, alone.cache)


def assert_same(found: object, expected: object) -> None:
    assert isinstance(found, PackedRows)
    assert isinstance(expected, PackedRows)
    assert expected.rows
    assert found.rows.keys() == expected.rows.keys()
    for place, rows in expected.rows.items():
        assert found.rows[place].keys() == rows.keys()
        assert all(torch.equal(found.rows[place][row], rows[row]) for row in rows), place


counts = st.lists(st.integers(1, 300), min_size=1, max_size=5)


@given(counts, st.integers(1, 8))
def test_a_split_gives_each_row_to_one_rank(counts: list[int], ranks: int) -> None:
    owned = mirrored(np.array(counts), ranks)
    assert sorted(np.concatenate(owned).tolist()) == list(range(sum(counts)))
    assert all((np.diff(rows) > 0).all() for rows in owned)


@given(st.integers(1, 5000), st.integers(1, 8))
def test_a_split_evens_out_rows_and_the_keys_that_they_see(count: int, ranks: int) -> None:
    owned = mirrored(np.array([count]), ranks)
    piece = -(-count // (2 * ranks))
    assert max(map(len, owned)) <= 2 * piece
    if count % (2 * ranks) == 0:
        assert {len(rows) for rows in owned} == {2 * piece}
        assert len({int(rows.sum()) for rows in owned}) == 1


def test_the_chunks_of_this_file_leave_ranks_without_rows() -> None:
    owned = [len(rows) for rows in mirrored(np.array([1]), 4)]
    assert sorted(owned) == [0, 0, 0, 1]
    assert all(one != other for one, other in pairwise(CHUNKS.values()))
