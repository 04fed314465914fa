"""Each declared field in turn is damaged on its way: decode refuses it, and the answer is right.

The damage is done by a transport of the test's, in the bytes that it is given to write.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from torch import Tensor

from cluster.generation import Timeline
from kernels.push_table import Pieces
from kv_transfer.layout import SPAN_ALIGNMENT, Layout, aligned
from kv_transfer.open_transport import open_paths
from kv_transfer.plan import pack_into_pushes, spans_final_at
from kv_transfer.slab import Slab
from model.state import state_fields
from tests.tiny import TinyCluster, make_prompt, make_request, small_spec, tiny_config

LENGTH = 33  # odd, so the tail has a row; one chunk, so which write carries what is certain
CELL_BYTES = 16384
FIELDS = state_fields(small_spec())


@dataclass
class Damage:
    """To bytes start .. stop - 1 of write number `write`; once."""

    write: int
    start: int
    stop: int
    kind: Literal["dropped", "corrupted"]


class Damaging:
    """A transport that does one damage, to what it is given, and is honest otherwise."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.damage: Damage | None = None
        self.writes = 0

    def write(self, peer: str, source: Tensor, remote_offset: int) -> None:
        if self.damage is not None and self.damage.write == self.writes:
            piece = source[self.damage.start : self.damage.stop]
            if self.damage.kind == "dropped":
                piece.zero_()
            else:
                piece[len(piece) // 2] ^= 16
            self.damage = None
        self.writes += 1
        self._transport.write(peer, source, remote_offset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _places() -> Iterator[tuple[str, int, int, int, int]]:
    """(field, layer, write, start, stop) of the first span of each field and layer."""
    layout = Layout(FIELDS, 16)
    spans = spans_final_at(FIELDS, 0, LENGTH, True)
    seen = set()
    for write, push in enumerate(pack_into_pushes(spans, layout, CELL_BYTES)):
        start = 0
        for span in push:
            stop = start + layout.span_bytes(span)
            if (span.field, span.layer) not in seen:
                seen.add((span.field, span.layer))
                yield span.field, span.layer, write, start, stop
            start = aligned(stop, SPAN_ALIGNMENT)


def test_the_places_to_damage_are_the_whole_declared_list() -> None:
    declared = {(field.name, layer) for field in FIELDS for layer in field.layers}
    assert {(field, layer) for field, layer, *_ in _places()} == declared
    assert {field.name for field in FIELDS} == {
        "compressed_r2",
        "index_r2",
        "tail",
        "compressed_r1",
        "index_r1",
        "window",
        "draft_window",
    }


@pytest.mark.parametrize("kind", ["dropped", "corrupted"])
async def test_a_damaged_field_is_refused_and_the_prompt_is_prefilled_again(
    kind: Literal["dropped", "corrupted"],
) -> None:
    def damaging(*args: Any, **options: Any) -> Any:
        return Damaging(open_paths(*args, **options))

    request = make_request(make_prompt(LENGTH), max_tokens=5)
    config = tiny_config(
        prefill={"engine": {"chunk_tokens": 64}}, transfer={"cell_bytes": CELL_BYTES}
    )
    async with TinyCluster(config=config, open_transport=damaging) as cluster:
        expected = await cluster.answer(request)
        transport = cluster.prefill[0].transport
        assert isinstance(transport, Damaging)
        for field, layer, write, start, stop in _places():
            timeline = Timeline()
            transport.damage = Damage(transport.writes + write, start, stop, kind)
            assert await cluster.answer(request, timeline) == expected
            assert transport.damage is None
            (lost,) = [event for event in timeline.events if event.name == "lost"]
            assert f"{field} of layer {layer}" in str(lost.detail["error"])
        assert await cluster.settled()


# ------------------------------------------------------------------ from blocks to blocks


class DamagingPush:
    """A transport that damages the rows of one field of one layer, once, in a push."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.slab: Slab | None = None  # of its rank
        self.field: tuple[str, int] | None = None
        self.kind = ""

    def push(self, peer: str, pieces: Pieces, digests: int, *, after: Any = None) -> list[int]:
        hit = self._hit(pieces)
        if not hit.any():
            return list(self._transport.push(peer, pieces, digests, after=after))
        self.field = None
        if self.kind == "dropped":
            kept = Pieces(*(column[~hit] for column in pieces))
            return list(self._transport.push(peer, kept, digests, after=after))
        byte = ctypes.c_uint8.from_address(int(pieces.source[hit][0]) + 1)
        byte.value ^= 16
        try:
            return list(self._transport.push(peer, pieces, digests, after=after))
        finally:
            byte.value ^= 16

    def _hit(self, pieces: Pieces) -> np.ndarray[Any, np.dtype[np.bool_]]:
        if self.field is None or not isinstance(self.slab, Slab):
            return np.zeros(len(pieces.rows), dtype=bool)
        place = self.slab.layout.place(*self.field)
        memory = self.slab.blocks if place.in_blocks else self.slab.slots
        start = pieces.source - memory.data_ptr()
        inside = (start >= 0) & (start < memory.numel())
        within = start % memory.shape[1] - place.offset
        return inside & (within >= 0) & (within < place.rows * place.row_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@pytest.mark.parametrize("kind", ["dropped", "corrupted"])
async def test_a_field_damaged_on_the_direct_path_is_refused_too(kind: str) -> None:
    def damaging(*args: Any, **options: Any) -> Any:
        return DamagingPush(open_paths(*args, **options))

    request = make_request(make_prompt(LENGTH), max_tokens=5)
    config = tiny_config(prefill={"engine": {"chunk_tokens": 64}}, transfer={"path": "direct"})
    async with TinyCluster(config=config, open_transport=damaging) as cluster:
        expected = await cluster.answer(request)
        (prefill,), (decode,) = cluster.prefill, cluster.decode
        transport: Any = prefill.transport
        transport.slab, transport.kind = prefill.slab, kind
        for field in FIELDS:
            for layer in field.layers:
                for memory in (decode.slab.blocks, decode.slab.slots):
                    memory.fill_(0xA5)  # what is not written is not what was there before
                timeline = Timeline()
                transport.field = field.name, layer
                assert await cluster.answer(request, timeline) == expected
                assert transport.field is None
                (lost,) = [event for event in timeline.events if event.name == "lost"]
                assert f"{field.name} of layer {layer}" in str(lost.detail["error"])
        assert await cluster.settled()
