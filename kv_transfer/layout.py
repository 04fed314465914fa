"""From the declared list of request state to bytes: where each row lies in memory.

A block record holds `block_tokens` positions: for each PerToken field and layer the rows of those
positions, one after another. A slot record holds the rest of one sequence: for each Ring field
and layer a ring of rows, for each Tail field and layer a few, the row of position p at p % rows.
Knows nothing of pools, peers or what a field means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from cluster.messages import Span
from model.state import PerToken, Ring, StateField, Tail

ALIGNMENT = 64  # bytes; a cache line, and a multiple of every word that rows are moved in
SPAN_ALIGNMENT = 16  # bytes; in a push, so that the widest accesses stay whole there too
WIRE_VERSION = 2
REQUESTS_ON_A_DEVICE = 4  # that a prefill rank's staging holds all cells of, if it is on a device


@dataclass(frozen=True)
class Place:
    """Where the rows of one field of one layer lie within their record."""

    field: StateField
    layer: int
    offset: int  # bytes from the start of the record
    rows: int  # in one record

    @cached_property
    def row_bytes(self) -> int:
        return self.field.row_bytes

    @cached_property
    def word_bytes(self) -> int:
        """The largest of 8, 4, 2 and 1 that divides a row: what its bytes are moved in."""
        return min(8, self.row_bytes & -self.row_bytes)

    @cached_property
    def in_blocks(self) -> bool:
        return isinstance(self.field.growth, PerToken)

    @cached_property
    def stride(self) -> int:
        """How far apart the row numbers of neighbouring rows are."""
        growth = self.field.growth
        return growth.ratio if isinstance(growth, Tail) else 1

    def capacity(self, length: int) -> range:
        """Row numbers that a sequence of up to `length` positions can have."""
        growth = self.field.growth
        return growth.rows(length) if isinstance(growth, PerToken) else range(length)


@dataclass(frozen=True)
class Layout:
    """Places of all fields. `ring_slack` rows beyond the window: what a step may write ahead.

    Two ranks must agree on `wire_form` only; block size, slack and counts are each one's own.
    """

    fields: tuple[StateField, ...]
    block_tokens: int
    ring_slack: int = 0

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.ring_slack < 0:
            raise ValueError(f"impossible sizes: {self.block_tokens=}, {self.ring_slack=}")
        for field in self.fields:
            match field.growth:
                case PerToken(ratio) if self.block_tokens % ratio:
                    raise ValueError(
                        f"block_tokens {self.block_tokens} is not a multiple of {ratio}, "
                        f"the ratio of {field.name}"
                    )
        if len({field.name for field in self.fields}) < len(self.fields):
            raise ValueError("two fields have the same name")

    @cached_property
    def places(self) -> Mapping[tuple[str, int], Place]:
        """By (field name, layer), in the declared order."""
        found: dict[tuple[str, int], Place] = {}
        ends = {True: 0, False: 0}  # of block and slot record
        for field in self.fields:
            for layer in field.layers:
                in_blocks = isinstance(field.growth, PerToken)
                place = Place(field, layer, ends[in_blocks], self._rows(field))
                ends[in_blocks] += aligned(place.rows * place.row_bytes)
                found[field.name, layer] = place
        return found

    def _rows(self, field: StateField) -> int:
        match field.growth:
            case PerToken(ratio):
                return self.block_tokens // ratio
            case Ring(window):
                return window + self.ring_slack
            case Tail():
                return 1 + self.ring_slack

    @cached_property
    def block_bytes(self) -> int:
        return self._record_bytes(in_blocks=True)

    @cached_property
    def slot_bytes(self) -> int:
        return self._record_bytes(in_blocks=False)

    def _record_bytes(self, *, in_blocks: bool) -> int:
        return sum(
            aligned(place.rows * place.row_bytes)
            for place in self.places.values()
            if place.in_blocks == in_blocks
        )

    def place(self, field: str, layer: int) -> Place:
        """Raises ValueError for what is not declared."""
        try:
            return self.places[field, layer]
        except KeyError:
            raise ValueError(f"no field {field!r} in layer {layer} is declared") from None

    def check_span(self, span: Span, length: int) -> Place:
        """Where `span` lies in a sequence of up to `length` positions.

        Raises ValueError unless it is declared, not empty, within the sequence, and no more than
        a ring can hold at once.
        """
        place = self.place(span.field, span.layer)
        bounds = place.capacity(length)
        if not bounds.start <= span.start < span.stop <= bounds.stop:
            raise ValueError(
                f"rows {span.start} to {span.stop} of {span.field} in layer {span.layer} are not "
                f"among the {bounds.stop} rows of {length} positions"
            )
        if not place.in_blocks and span.stop - span.start > place.rows:
            raise ValueError(
                f"{span.stop - span.start} rows of {span.field} in layer {span.layer} exceed "
                f"its ring of {place.rows}"
            )
        return place

    def span_bytes(self, span: Span) -> int:
        """Bytes of a span's rows, unpadded."""
        return (span.stop - span.start) * self.place(span.field, span.layer).row_bytes

    def state_bytes(self, length: int) -> int:
        """Bytes of all rows that a continuation after `length` positions needs."""
        return sum(
            len(place.field.growth.rows(length)) * place.row_bytes for place in self.places.values()
        )

    def wire_form(self) -> str:
        """What two ranks must agree on to move state: equal strings, or they cannot.

        Rows travel in the order of their numbers, so neither ring slack nor block size shows.
        """
        lines = [f"request state, version {WIRE_VERSION}"]
        for field in self.fields:
            layers = ",".join(str(layer) for layer in field.layers)
            lines.append(f"{field.name} [{layers}] {field.row_format} {field.dim} {field.growth}")
        return "\n".join(lines)


def aligned(nbytes: int, to: int = ALIGNMENT) -> int:
    """The next multiple of `to`."""
    return -(-nbytes // to) * to
