"""Segments of the receive ring."""

from __future__ import annotations

import pytest

from cluster.errors import NoRoom, ProtocolError
from kv_transfer.holding import Ledger
from kv_transfer.ring import ReceiveRing


def test_segments_share_no_byte() -> None:
    ring = ReceiveRing(1000, 64, 3)  # 1000 bytes are 5 segments of 192, and a rest
    leases = [ring.lease() for _ in range(5)]
    for number, lease in enumerate(leases):
        for seq in range(3):
            ring.view(lease.segment, seq, 64).fill_(10 * number + seq)
    assert len(ring.memory) == 5 * 192
    found = {
        int(byte)
        for number, lease in enumerate(leases)
        for seq in range(3)
        for byte in ring.view(lease.segment, seq, 64) - (10 * number + seq)
    }
    assert found == {0}


def test_pushes_take_turns_in_the_cells() -> None:
    ring = ReceiveRing(4 * 128, 128, 2)
    segment = ring.lease().segment
    views = [ring.view(segment, seq, 100) for seq in range(4)]
    starts = [view.data_ptr() - ring.memory.data_ptr() - segment.offset for view in views]
    assert starts == [0, 128, 0, 128]
    assert all(view.shape == (100,) for view in views)


def test_a_full_ring_has_no_room_until_a_segment_comes_back() -> None:
    ring = ReceiveRing(256, 64, 2)
    with ring.lease() as first, ring.lease():
        with pytest.raises(NoRoom, match=r"1 segments \(0 of 2 free\)"):
            ring.lease()
        first.release()
        with ring.lease() as again:
            assert again.segment == first.segment
            assert again.id != first.id
    assert ring.ledger() == Ledger(free=2, leased=0, quarantined=0, cached=0, total=2)


def test_a_segment_whose_writer_is_silent_is_nobodys() -> None:
    ring = ReceiveRing(128, 64, 2)
    with ring.lease() as lease:
        lease.quarantine("prefill-0")
    with pytest.raises(NoRoom):
        ring.lease()
    assert ring.ledger() == Ledger(free=0, leased=0, quarantined=1, cached=0, total=1)
    assert ring.clear("prefill-0") == 1
    ring.lease().release()


@pytest.mark.parametrize(("seq", "nbytes"), [(0, 65), (0, -1), (-1, 8)])
def test_impossible_pushes_are_the_peers_fault(seq: int, nbytes: int) -> None:
    ring = ReceiveRing(128, 64, 2)
    with pytest.raises(ProtocolError, match=f"push {seq} of {nbytes} bytes does not fit"):
        ring.view(ring.lease().segment, seq, nbytes)


def test_a_ring_holds_at_least_one_segment_of_aligned_cells() -> None:
    with pytest.raises(ValueError, match="less than 2 cells"):
        ReceiveRing(127, 64, 2)
    with pytest.raises(ValueError, match="not a multiple"):
        ReceiveRing(4096, 100, 2)
