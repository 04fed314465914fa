"""A batch on its way to the device: one buffer, its padding, and who leaves at the cut layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from model.batch import Chunk, ForwardBatch, build_batch
from model.options import ModelOptions
from model.packed.place_rows import chunk_rows, decode_rows, fill
from model.packed.ranges import named
from model.packed.rows import Shape, buffer_size, rows_in
from tests.model.cases import BY_NAME

CPU = torch.device("cpu")
SPEC = BY_NAME["micro"].spec


@dataclass(frozen=True)
class Place:
    block_table: npt.NDArray[np.int64]
    slot: int


PLACES = [Place(np.array([4, 9, 2]), 1), Place(np.array([7]), 3)]


def batch(*chunks: Chunk) -> ForwardBatch:
    return build_batch(chunks, image_token_id=SPEC.image_token_id, ngram=4)


def test_rows_lie_in_one_buffer() -> None:
    shape = Shape(3, 2, 4, in_place=True)
    buffer = torch.arange(buffer_size(shape, 4))
    rows = rows_in(buffer, shape, 4)
    assert rows.ngrams_TN.shape == (3, 4)
    assert rows.tables_RP.shape == (2, 4)
    rows.tables_RP[1, 3] = -5
    assert buffer[-1] == -5  # tables come last: who has them already copies what is before them
    numbers = [one for one in vars(rows).values() if isinstance(one, torch.Tensor)]
    assert sum(one.numel() for one in numbers) == len(buffer)


def test_padding_stands_nowhere() -> None:
    one, other = Chunk([5, 6, 7], 2, 1, window_start=1), Chunk([8, 9], 0, 2)
    rows = decode_rows(batch(one, other), PLACES, Shape(5, 4, 3, in_place=True), CPU)
    assert rows.positions_T.tolist() == [2, 0, 1, -1, -1]
    assert rows.requests_T.tolist() == [0, 1, 1, 0, 0]
    assert rows.ngrams_TN[:2].tolist() == [[7, 6, 5, -1], [8, -1, -1, -1]]
    assert rows.ngrams_TN[3].tolist() == [-1] * 4
    assert rows.slots_R.tolist() == [1, 3, 0, 0]
    assert rows.tables_RP[:2].tolist() == [[4, 9, 2], [7, 0, 0]]
    assert (rows.starts_R[:2].tolist(), rows.first_R[:2].tolist()) == ([2, 0], [0, 1])
    assert (rows.floors_R[:2].tolist(), rows.clips_R[:2].tolist()) == ([0, 0], [1, 0])


@pytest.mark.parametrize("shape", [(2, 2, 3), (3, 1, 3), (3, 2, 2)])
def test_what_does_not_fit_a_shape_is_refused(shape: tuple[int, int, int]) -> None:
    given = batch(Chunk([5, 6], 1, 1), Chunk([8, 9], 0, 2))
    small = Shape(*shape, in_place=True)
    with pytest.raises(ValueError, match="3 rows of 2 requests, 3 blocks wide"):
        fill(torch.empty(buffer_size(small, 4), dtype=torch.int64), given, PLACES, small)


def test_rows_that_leave_take_their_windows_along() -> None:
    options = ModelOptions(truncation="compact")
    given = batch(
        Chunk(list(range(10, 30)), 8, 6, window_start=12, logits="last"),
        Chunk(list(range(40, 50)), 5, 2, logits="all"),
    )
    chunks = chunk_rows(given, PLACES, SPEC, options, CPU)
    leaving = chunks.extras.leaving
    assert leaving is not None
    assert leaving.going_on_T.tolist() == [4, 5, 6, 7]
    assert leaving.rows.positions_T.tolist() == [12, 13, 5, 6]
    assert leaving.rows.starts_R.tolist() == [12, 5]
    assert leaving.rows.floors_R.tolist() == [12, 0]
    assert leaving.rows.clips_R.tolist() == [12, 0]
    assert leaving.rows.first_R.tolist() == [0, 2]
    assert chunks.extras.ends_R.tolist() == [14, 7]
    assert chunks.extras.logit_rows.tolist() == [1, 2, 3]


def test_names_are_recorded_only_while_somebody_looks() -> None:
    assert named("one") is named("other")
    with torch.profiler.profile() as profile, named("a part"):
        torch.ones(2).sum()
    assert any(event.key == "a part" for event in profile.key_averages())
