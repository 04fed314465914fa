"""Where rows of positions lie, and how they turn: by hand, interpreted, compiled, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kernels.ops.joined.position_addresses import Rule, position_addresses
from kernels.ops.joined.position_turns import position_turns
from kernels.ops.joined.window_addresses import window_addresses
from kernels.ops.row_addresses import Records
from tests.kernels import interpreted_places
from tests.kernels.test_compile import Case, compile_for

RECORDS = Records(rows=4, record_bytes=1000, row_bytes=10)
TABLES = torch.tensor([[7, 3], [5, 9]])
OWNERS = torch.tensor([0, 0, 0, 1, 1, 1])
STARTS = torch.tensor([2, 11])
POSITIONS = torch.tensor([2, 3, -1, 11, 12, 13])


@pytest.mark.parametrize(
    ("rule", "ratio", "expected"),
    [
        ("completed", 2, [-1, 7010, -1, 9010, -1, 9020]),  # rows 1, 5 and 6
        ("completed", 1, [7020, 7030, -1, 9030, 9000, 9010]),
        ("before", 2, [-1, -1, -1, 9020, -1, -1]),  # 10, before the first of owner 1
        ("open", 2, [7020, -1, -1, -1, 9000, -1]),
    ],
)
def test_each_rule_names_one_row(rule: Rule, ratio: int, expected: list[int]) -> None:
    """Past a table's end its last record is a ring: position 12 is row 0 of it."""
    found = position_addresses(POSITIONS, OWNERS, STARTS, TABLES, RECORDS, rule, ratio)
    assert found.tolist() == expected


def test_a_window_ends_at_its_own_position_and_begins_at_the_floor() -> None:
    ring, rings = Records(rows=5, record_bytes=100, row_bytes=10), torch.tensor([2, 6])
    positions, owners = torch.tensor([1, 9, -1]), torch.tensor([0, 1, 0])
    floors = torch.tensor([0, 8])
    found = window_addresses(positions, owners, floors, rings, ring, 3, keeps_all=True)
    assert found.seen_TW.tolist() == [[-1, 200, 210], [-1, 630, 640], [-1, -1, -1]]
    assert found.own_T.tolist() == [210, 640, -1]
    above = torch.tensor([2, 8])
    found = window_addresses(positions, owners, above, rings, ring, 3, keeps_all=False)
    assert found.own_T.tolist() == [-1, 640, -1]


def test_turns_are_of_the_position_or_of_the_one_before() -> None:
    frequencies = torch.tensor([[1.0, 0.5], [0.25, 0.125]], dtype=torch.float64)
    found = position_turns(torch.tensor([4, 0]), frequencies, (0, 1))
    expected = torch.tensor([[[4.0, 2.0], [0, 0]], [[0.75, 0.375], [0, 0]]])
    assert torch.allclose(found.angle(), torch.angle(torch.polar(torch.ones(2, 2, 2), expected)))


def test_kernels_are_their_references_in_the_interpreter() -> None:
    """In a process of its own: Triton reads the variable when it is imported."""
    command = [sys.executable, "-m", "tests.kernels.interpreted_places"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "ok", done.stderr


@pytest.mark.gpu
def test_kernels_are_their_references_on_a_gpu() -> None:
    interpreted_places.compare(torch.device("cuda"))


POINTERS = ("positions", "owners", "starts", "floors", "rings", "table", "own", "seen", "out")
I64 = dict.fromkeys(POINTERS, "*i64")
SIZES = {"ROWS": 64, "RECORD_BYTES": 890048, "ROW_BYTES": 288}
COMPILED: dict[str, Case] = {
    rule: (
        "ops.joined.position_addresses",
        "_position_addresses",
        {
            **{name: I64[name] for name in ("positions", "owners", "starts", "table", "out")},
            **{"count": "i32", "places": "i32"},
        },
        {"RULE": number, "RATIO": 2, **SIZES, "BLOCK": 32},
    )
    for number, rule in enumerate(("completed", "before", "open"))
} | {
    "window": (
        "ops.joined.window_addresses",
        "_window_addresses",
        {name: I64[name] for name in ("positions", "owners", "floors", "rings", "own", "seen")},
        {"W": 128, **SIZES, "KEEPS_ALL": False, "BLOCK": 128},
    ),
    "turns": (
        "ops.joined.position_turns",
        "_turns",
        {"positions": "*i64", "frequencies": "*fp64", "out": "*fp32", "rows": "i32"},
        {"BACKS": 4, "P": 32},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("chip", [90, 100])
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_machine_code(name: str, chip: int) -> None:
    compile_for(chip, COMPILED[name], warps=1)
