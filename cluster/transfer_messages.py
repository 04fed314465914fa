"""What prefill and decode say to each other about the state of one request on its way.

cluster/messages.py lists who says what, and is where everybody else imports these from.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cluster.request import Value


class Segment(Value):
    """A reservation's part of the receive ring: `cells` cells of `cell_bytes` from `offset`.

    Push number q goes into cell q % cells, once Unpacked(q - cells) has given it back.
    """

    offset: int
    cell_bytes: int
    cells: int


class Connect(Value):
    """Prefill introduces itself; `wire_form` must equal decode's own."""

    kind: Literal["connect"] = "connect"
    wire_form: str  # fingerprint of fields, row formats, window, model
    metadata: bytes = b""  # the transport's own description of the sender


class Connected(Value):
    kind: Literal["connected"] = "connected"
    metadata: bytes = b""  # the transport's own description of the receive ring
    ring_bytes: int


class OpenPush(Value):
    kind: Literal["open_push"] = "open_push"
    reservation: str
    length: int  # positions whose state will have been pushed at Commit


class PushOpened(Value):
    """The reservation waits for this sender alone; its segment may be written from now on."""

    kind: Literal["push_opened"] = "push_opened"


class Span(Value):
    """Rows `start` .. `stop` - 1 of one field of one layer, packed, in row order.

    A row's number is its index j for fields that grow per token, and its position for rings and
    tails.
    """

    field: str
    layer: int
    start: int
    stop: int


class Pushed(Value):
    """Push number `seq` is in its cell: the spans lie one after another from its start.

    Each begins at a multiple of 8 bytes (kv_transfer/staging.py).
    """

    kind: Literal["pushed"] = "pushed"
    seq: int
    spans: tuple[Span, ...]


class Unpacked(Value):
    """Push `seq` has been copied out; its cell may be written again."""

    kind: Literal["unpacked"] = "unpacked"
    seq: int


class PieceDigest(Value):
    """What one field of one layer must hold: rows start .. stop - 1 and their digest."""

    field: str
    layer: int
    start: int
    stop: int
    digest: int = Field(ge=0, lt=2**64)


class Commit(Value):
    """Every write is done. `first_token` is output index len(request.output)."""

    kind: Literal["commit"] = "commit"
    length: int
    first_token: int
    pieces: tuple[PieceDigest, ...]


class Accepted(Value):
    kind: Literal["accepted"] = "accepted"


class RejectedNow(Value):
    kind: Literal["rejected"] = "rejected"
    why: str
