"""The packed request of the benchmark: no cell is overwritten before its time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kv_transfer.bench_gpu_packed import PackedRequest
from kv_transfer.host_reach import HostReach
from kv_transfer.plan import pack_into_pushes
from kv_transfer.row_mover import RowMover
from kv_transfer.staging import push_bytes
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
    """Answers in order, each only when it is asked for: a cell stays in use until then."""

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

    def tell(self, method: str, number: int) -> None:
        assert method == "unpack"
        self.told.append(number)

    def answer(self) -> None:
        number = self.told.pop(0)
        self.unpacking.start(2 * number)
        self.unpacking.start(2 * number + 1)


@pytest.mark.parametrize("many", [1, 3, 64])
def test_all_rows_arrive_however_few_cells_there_are(many: int) -> None:
    sender, receiver = Side(many), Receiver(many)
    rows = random_rows(FIELDS["tiny"], LENGTH, seed=1)
    sender.store.fill(sender.lease, rows, LENGTH)
    pushes = pack_into_pushes(needed(FIELDS["tiny"], LENGTH), sender.store.layout, CELL)
    assert len(pushes) > 3

    def start(part: torch.Tensor, place: int) -> Any:
        looks = iter([False, False])

        def done() -> bool:  # bytes land at the third look
            if next(looks, True):
                receiver.ring[place : place + len(part)] = part
                return True
            return False

        return SimpleNamespace(done=done)

    request = PackedRequest(sender, pushes, CELL, start, receiver)  # type: ignore[arg-type]
    request.hand_over()
    assert equal(receiver.store.rows(receiver.lease, LENGTH), rows)
    receiver.store.slab.blocks.zero_()
    request.hand_over()
    assert equal(receiver.store.rows(receiver.lease, LENGTH), rows)


def test_a_row_that_changes_on_the_way_fails_the_request() -> None:
    sender, receiver = Side(64), Receiver(64)
    sender.store.fill(sender.lease, random_rows(FIELDS["tiny"], LENGTH, seed=2), LENGTH)
    pushes = pack_into_pushes(needed(FIELDS["tiny"], LENGTH), sender.store.layout, CELL)

    def start(part: torch.Tensor, place: int) -> Any:
        receiver.ring[place : place + len(part)] = part
        receiver.ring[place] ^= 1
        return SimpleNamespace(done=lambda: True)

    request = PackedRequest(sender, pushes, CELL, start, receiver)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="digests differ"):
        request.hand_over()
