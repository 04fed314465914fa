"""What a decode rank says of its memory is believed only where it can be."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.errors import ProtocolError
from cluster.messages import Connected, PushOpened
from kv_transfer.direct_transport import Area
from kv_transfer.layout import Layout
from kv_transfer.path_probe import PathReport
from prefill_worker.pair import Pair, StateThere
from tests.kv_transfer.stores import TINY

LAYOUT = Layout(TINY, 32, 6)
BLOCKS, SLOTS = 10, 3
CONNECTED = Connected(ring_bytes=4096, block_tokens=32, ring_slack=6)
OFFERED = Area(4096, BLOCKS * LAYOUT.block_bytes), Area(1 << 30, SLOTS * LAYOUT.slot_bytes)


def opened(*blocks: int, slot: int = 0) -> PushOpened:
    return PushOpened(blocks=np.array(blocks, dtype="<i4").tobytes(), slot=slot)


def test_rows_stand_in_the_blocks_and_the_slot_that_were_named() -> None:
    there = StateThere.of(TINY, CONNECTED, OFFERED)
    assert there.layout == LAYOUT
    at = there.standing(opened(7, 2, 9, slot=2), 70)
    assert at.block_table.tolist() == [7, 2, 9]
    place = LAYOUT.place("window", 0)
    (address,) = at.addresses(place, np.array([70]))
    row = 70 % place.rows * place.row_bytes
    assert address == (1 << 30) + 2 * LAYOUT.slot_bytes + place.offset + row


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (opened(), "0 blocks were named for 70 positions"),
        (opened(1, 2), "2 blocks were named for 70 positions"),
        (opened(1, 2, 1), "or twice"),
        (opened(1, 2, BLOCKS), "not among 10"),
        (opened(1, 2, -1), "not among 10"),
        (opened(1, 2, 3, slot=SLOTS), "slot 3 was named"),
        (opened(1, 2, 3, slot=-1), "slot -1 was named"),
        (PushOpened(blocks=b"abc", slot=0), "0 blocks were named"),
    ],
)
def test_places_that_are_not_there_are_refused(word: PushOpened, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        StateThere.of(TINY, CONNECTED, OFFERED).standing(word, 70)


def test_sizes_that_cannot_be_are_refused() -> None:
    odd = CONNECTED.model_copy(update={"block_tokens": 31})
    with pytest.raises(ProtocolError, match="31 is not a multiple of 2"):
        StateThere.of(TINY, odd, OFFERED)
    with pytest.raises(ProtocolError, match="not 1 memories"):
        StateThere.of(TINY, CONNECTED, OFFERED[:1])
    huge = CONNECTED.model_copy(update={"block_tokens": 1 << 20})
    with pytest.raises(ProtocolError, match="not among 0"):
        StateThere.of(TINY, huge, OFFERED).standing(opened(0), 70)


def test_a_pair_tells_its_path_before_and_after_it_was_measured() -> None:
    pair = Pair("decode-0/0", "decode-0#1", "nixl/UCX", b"", why="another host")
    assert not pair.direct
    assert pair.told().gb_per_s == 0.0
    pair.report = PathReport("decode-0#1", "nixl/UCX", 1e-5, 2.5, 4096, 0.0)
    assert (pair.told().gb_per_s, pair.told().latency_s, pair.told().why) == (
        2.5,
        1e-5,
        "another host",
    )
