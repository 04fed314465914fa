"""The packed request of the benchmark: no cell is overwritten before its time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kv_transfer.bench_gpu_packed import PackedRequest
from kv_transfer.host_reach import HostReach
from kv_transfer.plan import pack_into_pushes
from kv_transfer.row_mover import RowMover
from kv_transfer.staging import push_bytes
from kv_transfer.transport import WriteAtOnce
from tests.kv_transfer.stores import FIELDS, Store, equal, needed, random_rows

LENGTH = 129
CELL = 16 << 10


class Side:
    """A rank on the host, in the form of GpuSide."""

    def __init__(self, many: int) -> None:
        self.store = Store(FIELDS["tiny"])
        self.lease = self.store.lease(LENGTH)
        self.mover = RowMover(self.store.slab, HostReach())
        self.ring = torch.zeros(many * CELL, dtype=torch.uint8)

    def cells(self, pushes: Any, cell_bytes: int) -> Any:
        many = self.ring.numel() // cell_bytes
        return [
            (spans, self.ring[number % many * cell_bytes :][: push_bytes(self.store.layout, spans)])
            for number, spans in enumerate(pushes)
        ]


class Receiver(Side):
    """Answers in order, each only when it is asked for."""

    def __init__(self, many: int) -> None:
        super().__init__(many)
        self.told: list[int] = []

    def ask(self, method: str, *arguments: Any) -> Any:
        if method == "plan_unpacking":
            self.unpacking = self.mover.unpacking(self.lease, self.cells(*arguments))
            return None
        assert method == "unpacked"
        assert not self.told
        return self.unpacking.digests()

    def tell(self, method: str, number: int, hashed: bool) -> None:
        assert method == "unpack"
        assert hashed
        self.told.append(number)

    def answered(self) -> bool:
        return False  # only when it is waited for: cells stay in use as long as they can

    def answer(self) -> None:
        number = self.told.pop(0)
        self.unpacking.start(2 * number)
        self.unpacking.start(2 * number + 1)


class LateWrite:
    """Its bytes land at the third look."""

    def __init__(self, part: torch.Tensor, place: torch.Tensor) -> None:
        self.part, self.place = part, place
        self.looks = 3

    def start(self) -> None:
        self.looks = 0

    def done(self) -> bool:
        self.looks += 1
        if self.looks == 3:
            self.place.copy_(self.part)
        return self.looks >= 3

    def close(self) -> None:
        assert self.looks >= 3


@pytest.mark.parametrize("many", [1, 3, 64])
def test_all_rows_arrive_however_few_cells_there_are(many: int) -> None:
    sender, receiver = Side(many), Receiver(many)
    rows = random_rows(FIELDS["tiny"], LENGTH, seed=1)
    sender.store.fill(sender.lease, rows, LENGTH)
    pushes = pack_into_pushes(needed(FIELDS["tiny"], LENGTH), sender.store.layout, CELL)
    assert len(pushes) > 3

    request = PackedRequest(
        sender,  # type: ignore[arg-type]
        pushes,
        CELL,
        lambda part, place: LateWrite(part, receiver.ring[place : place + len(part)]),
        receiver,
    )
    request.hand_over()
    assert equal(receiver.store.rows(receiver.lease, LENGTH), rows)
    receiver.store.slab.blocks.zero_()
    request.hand_over()
    assert equal(receiver.store.rows(receiver.lease, LENGTH), rows)


def test_a_row_that_changes_on_the_way_fails_the_request() -> None:
    sender, receiver = Side(64), Receiver(64)
    sender.store.fill(sender.lease, random_rows(FIELDS["tiny"], LENGTH, seed=2), LENGTH)
    pushes = pack_into_pushes(needed(FIELDS["tiny"], LENGTH), sender.store.layout, CELL)

    def prepare(part: torch.Tensor, place: int) -> WriteAtOnce:
        def write() -> None:
            receiver.ring[place : place + len(part)] = part
            receiver.ring[place] ^= 1

        return WriteAtOnce(write)

    request = PackedRequest(sender, pushes, CELL, prepare, receiver)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="digests differ"):
        request.hand_over()
