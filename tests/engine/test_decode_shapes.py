"""Shapes of decode steps: every step has one, few are needed, and the common ones stand in."""

from __future__ import annotations

import pytest

from engine.decode_shapes import DecodeShapes, holds
from model.packed.rows import Shape


def shape(rows: int, blocks: int) -> Shape:
    return Shape(rows, rows, blocks, in_place=True)


def test_rows_are_padded_to_the_next_bucket_and_tables_to_the_next_power_of_two() -> None:
    shapes = DecodeShapes(20, 100)
    assert shapes.rows == (1, 2, 4, 8, 16, 20)
    assert DecodeShapes(20, 100, interval=6).rows == (1, 2, 4, 6, 12, 18, 20)
    assert DecodeShapes(5, 100, interval=1).rows == (1, 2, 3, 4, 5)
    assert shapes.blocks == (4, 8, 16, 32, 64, 128)
    assert shapes.of(3, 5) == shape(4, 8)
    assert shapes.of(17, 100) == shape(20, 128)
    with pytest.raises(ValueError, match="21 rows"):
        shapes.of(21, 1)


@pytest.mark.parametrize("most", [(1, 1), (2, 4), (64, 1024), (7, 3)])
def test_every_step_has_a_shape_that_holds_it(most: tuple[int, int]) -> None:
    shapes = DecodeShapes(*most)
    for rows in range(1, most[0] + 1):
        for blocks in {1, most[1] // 2 + 1, most[1]}:
            assert holds(shapes.of(rows, blocks), shape(rows, blocks))


def test_the_common_shapes_can_stand_in_for_all_and_begin_with_the_largest() -> None:
    shapes = DecodeShapes(64, 1024)
    common = shapes.common(64)
    assert common[0] == shape(64, 1024)
    assert {one.blocks for one in common} == {64, 1024}
    assert len(common) == 2 * len(shapes.rows)
    for rows in shapes.rows:
        for blocks in shapes.blocks:
            assert any(holds(one, shape(rows, blocks)) for one in common)
