"""Pushes through cells: in order, never before their leave, and none under way at the end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cluster.errors import TransferError
from kv_transfer.cell_writer import Allowance, CellWriter


class Steps:
    """Moves, writes and leave that note what is done to them; a write ends at its second look."""

    def __init__(self, *, cells: int, count: int, fails: int | None = None) -> None:
        self.cells, self.count = cells, count
        self.seen: list[str] = []
        self.writes = [Write(self, number, number == fails) for number in range(count)]

    def start(self, number: int, after: Any = None) -> Steps:
        for earlier in range(number - self.cells + 1):
            assert not self.writes[earlier].running, "its cell is still being written"
        self.seen.append(f"pack {number}")
        return self

    def synchronize(self) -> None:
        pass

    def digests(self) -> list[int]:
        return [len(self.seen)]

    def told(self, number: int, began: float) -> None:
        self.seen.append(f"told {number}")


class Write:
    def __init__(self, steps: Steps, number: int, fails: bool) -> None:
        self.steps, self.number, self.fails = steps, number, fails
        self.running, self.closed, self.looks = False, False, 0

    def start(self) -> None:
        assert f"pack {self.number}" in self.steps.seen
        self.steps.seen.append(f"write {self.number}")
        self.running, self.looks = True, 0

    def done(self) -> bool:
        self.looks += 1
        if self.fails and self.looks > 1:
            self.running = False
            raise TransferError("the peer is gone")
        if self.looks > 1:
            self.running = False
        return not self.running

    def close(self) -> None:
        assert not self.running
        self.closed = True


def allowing(pushes: int, cells: int) -> Allowance:
    allowance = Allowance()
    allowance.rows_stand(pushes)
    for _ in range(cells):
        allowance.release()
    return allowance


@pytest.mark.parametrize("cells", [1, 2, 5])
def test_every_push_is_packed_written_and_told_of_once_and_in_order(cells: int) -> None:
    steps = Steps(cells=cells, count=5)
    writer = CellWriter(steps, steps.writes, cells)
    writer.run(allowing(5, 5), steps.told)
    for what in ("pack", "write", "told"):
        found = [step for step in steps.seen if step.startswith(what)]
        assert found == [f"{what} {number}" for number in range(5)]
    writer.close()
    assert all(write.closed for write in steps.writes)


def test_a_later_push_is_packed_while_an_earlier_one_is_written() -> None:
    steps = Steps(cells=3, count=3)
    CellWriter(steps, steps.writes, 3).run(allowing(3, 3), steps.told)
    assert steps.seen.index("pack 1") < steps.seen.index("told 0")


def test_it_waits_for_rows_and_for_cells_of_the_peer_without_a_write_under_way() -> None:
    steps, allowance = Steps(cells=4, count=3), allowing(2, 1)
    heard = [threading.Event() for _ in range(3)]

    def told(number: int, began: float) -> None:
        steps.told(number, began)
        heard[number].set()

    writer = CellWriter(steps, steps.writes, 4)
    thread = threading.Thread(target=writer.run, args=(allowance, told))
    thread.start()
    assert heard[0].wait(10)
    assert "write 1" not in steps.seen  # the peer had one cell
    allowance.release()
    assert heard[1].wait(10)
    allowance.release()
    assert "pack 2" not in steps.seen  # its rows do not stand
    allowance.rows_stand(3)
    thread.join(10)
    assert steps.seen[-1] == "told 2"


def test_given_up_it_ends_and_leaves_no_write_under_way() -> None:
    steps, allowance = Steps(cells=4, count=3), allowing(3, 2)
    failed: list[Exception] = []

    def run() -> None:
        try:
            CellWriter(steps, steps.writes, 4).run(allowance, lambda *_: allowance.give_up())
        except TransferError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert "given up" in str(failed)
    assert not any(write.running for write in steps.writes)


def test_a_write_that_fails_ends_it_after_the_others_under_way() -> None:
    steps = Steps(cells=4, count=4, fails=1)
    with pytest.raises(TransferError, match="is gone"):
        CellWriter(steps, steps.writes, 4).run(allowing(4, 4), steps.told)
    assert not any(write.running for write in steps.writes)
    assert "told 1" not in steps.seen
