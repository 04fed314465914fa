"""The push kernel does what its reference says: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from kernels.push_table import Pieces, row_formats, tabulate
from kernels.row_hash import row_hashes, unit_factors, word_factors
from tests.kernels.pushes import RandomPush

REAL = (288, 68, 528, 4096)  # rows of the real model


@pytest.mark.parametrize("row_bytes", [4, 7, 34, 68, 528])
@pytest.mark.parametrize("unit_bytes", [1, 2, 4])
def test_hashes_by_units_are_the_hashes_by_words(row_bytes: int, unit_bytes: int) -> None:
    if row_bytes % unit_bytes:
        pytest.skip("no whole units")
    rows = np.random.default_rng(row_bytes).integers(0, 256, (5, row_bytes), dtype=np.uint8)
    units = rows.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[unit_bytes]).astype(np.uint64)
    sums = (units * unit_factors(row_bytes, unit_bytes)).sum(axis=1)
    padded = np.pad(rows, ((0, 0), (0, -row_bytes % 4))).view(np.uint32).astype(np.uint64)
    assert np.array_equal(sums, (padded * word_factors(padded.shape[1])).sum(axis=1))


def test_a_row_number_changes_a_hash() -> None:
    rows = np.zeros((2, 8), dtype=np.uint8)
    first, second = row_hashes(rows, np.array([1, 2], dtype=np.uint64))
    assert first != second


def test_tiles_hold_pieces_of_one_format_and_all_of_them() -> None:
    push = RandomPush.of(REAL[:2], 100, 64, seed=3)
    table = tabulate(push.pieces, row_formats(REAL))
    found = np.concatenate([columns for _, columns in table.by_format()], axis=1)
    wanted = np.stack(push.pieces[:5])
    assert sorted(map(tuple, found.T.tolist())) == sorted(map(tuple, wanted.T.tolist()))
    for form, columns in table.by_format():
        assert (((columns[0] | columns[1]) % 16 == 0) == form.wide).all()
    assert table.nbytes == int((push.pieces.rows * push.pieces.row_bytes).sum())


def test_a_misaligned_piece_of_a_wide_format_is_refused() -> None:
    one = np.array([1], dtype=np.int64)
    pieces = Pieces(one * 8, one * 16, one, one, one, one * 288)
    with pytest.raises(ValueError, match="odd addresses"):
        tabulate(pieces, row_formats(REAL))


def test_the_interpreted_kernel_is_its_reference() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-m", "tests.kernels.pushes"], env=environment, check=True)


@pytest.mark.full
@pytest.mark.parametrize("capability", [90, 100])
def test_the_kernel_compiles_without_a_gpu(capability: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled_push", str(capability)]
    subprocess.run(command, env=environment, check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, 8, 132])
@pytest.mark.parametrize("sizes", [REAL, (34, 72, 132, 1024)], ids=["real", "tiny"])
def test_the_compiled_kernel_is_its_reference(sizes: tuple[int, ...], programs: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU can be seen")
    piece_rows = 8 if 4096 in sizes else 16
    RandomPush.of(sizes, 500, piece_rows, seed=programs).check(torch.device("cuda", 0), programs)
    RandomPush.of(sizes[:1], 500, 64, seed=programs).check(torch.device("cuda", 0), programs)
