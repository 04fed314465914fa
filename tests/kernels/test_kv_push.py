"""The push kernel does what its reference says: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest
import torch

from kernels.push_table import Pieces, row_formats, tabulate
from kernels.row_hash import GROUP_BYTES, group_rows, row_hashes, unit_factors, word_factors
from tests.kernels.pushes import RandomPush

REAL = (288, 68, 528, 4096)  # rows of the real model


@pytest.mark.parametrize("row_bytes", [4, 7, 34, 68, 528])
@pytest.mark.parametrize("unit_bytes", [1, 2, 4])
def test_hashes_by_units_are_the_hashes_by_words(row_bytes: int, unit_bytes: int) -> None:
    if row_bytes % unit_bytes:
        pytest.skip("no whole units")
    group = group_rows(row_bytes)
    rows = np.random.default_rng(row_bytes).integers(0, 256, (group, row_bytes), dtype=np.uint8)
    units = rows.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[unit_bytes]).astype(np.uint64)
    total = (units.reshape(-1) * unit_factors(row_bytes, unit_bytes)).sum()
    padded = np.pad(rows, ((0, 0), (0, -row_bytes % 4))).view(np.uint32).astype(np.uint64)
    assert total == (padded.reshape(-1) * word_factors(padded.size)).sum()


def test_a_row_number_changes_a_hash() -> None:
    rows = np.zeros((3, 8), dtype=np.uint8)
    rows[:2] = 1
    first, second, _ = row_hashes(rows, np.array([1, 2, 64], dtype=np.uint64))
    assert first != second
    assert first != row_hashes(rows[:1], np.array([65], dtype=np.uint64))[0]


def test_all_places_of_a_group_have_factors_of_their_own() -> None:
    factors = word_factors(GROUP_BYTES // 4)
    assert len(np.unique(factors)) == len(factors)
    assert (factors % 2 == 1).all()
    assert factors.max() < 2**32


def test_tiles_hold_pieces_of_one_format_and_all_of_them() -> None:
    push = RandomPush.of(REAL[:2], 100, 64, seed=3)
    table = tabulate(push.pieces, row_formats(REAL))
    found = {
        (source + row * form.row_bytes, target + row * form.row_bytes, first + row, digest)
        for form, columns in table.by_format()
        for source, target, rows, first, digest in columns.T.tolist()
        for row in range(rows)
    }
    assert found == {
        (source + row * size, target + row * size, first + row, digest)
        for source, target, rows, first, digest, size in np.stack(push.pieces).T.tolist()
        for row in range(rows)
    }
    for form, columns in table.by_format():
        if form.wide:
            assert ((columns[0] | columns[1]) % 16 == 0).all()
            assert (columns[2] * form.row_bytes % 16 == 0).all()
    assert table.nbytes == int((push.pieces.rows * push.pieces.row_bytes).sum())


def test_only_what_does_not_fill_a_lane_goes_the_narrow_way() -> None:
    piece = Pieces(*(np.array([value]) for value in (0, 4096, 63, 64, 2, 68)))
    table = tabulate(piece, row_formats(REAL))
    found = {(form.row_bytes, form.wide): columns for form, columns in table.by_format()}
    assert found[68, True].T.tolist() == [[0, 4096, 60, 64, 2]]
    assert found[68, False].T.tolist() == [[60 * 68, 4096 + 60 * 68, 3, 124, 2]]


def test_a_misaligned_piece_of_a_wide_format_is_refused() -> None:
    one = np.array([1], dtype=np.int64)
    pieces = Pieces(one * 8, one * 16, one, one, one, one * 288)
    with pytest.raises(ValueError, match="odd addresses"):
        tabulate(pieces, row_formats(REAL))


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.5.0" and version("triton").startswith("3.6."),
    reason="Triton 3.6 interprets loops with what NumPy 2.5 no longer allows",
)
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
    RandomPush.of(sizes, 500, 8 if 4096 in sizes else 16, seed=programs).check(
        torch.device("cuda", 0), programs
    )
    RandomPush.of(sizes[:1], 500, 64, seed=programs).check(torch.device("cuda", 0), programs)
