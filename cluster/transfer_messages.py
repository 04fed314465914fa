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
    """Where rows stand in decode's memory, so that a sender who can reach it puts them there."""

    kind: Literal["connected"] = "connected"
    metadata: bytes = b""  # the transport's own description of ring and state memory
    ring_bytes: int
    block_tokens: int = Field(ge=1, le=1 << 20)
    ring_slack: int = Field(ge=0, le=1 << 20)
    why_packed: str = ""  # no memory is offered to this sender, because


class OpenPush(Value):
    """`direct`: rows will be written where they shall stand, not into the segment."""

    kind: Literal["open_push"] = "open_push"
    reservation: str
    length: int  # positions whose state will have been pushed at Commit
    direct: bool = False


class PushOpened(Value):
    """The reservation waits for this sender alone, who may write from now on.

    If the push is direct: into these blocks, int32, little endian, in the sequence's order, and
    into this slot. Else into the segment.
    """

    kind: Literal["push_opened"] = "push_opened"
    blocks: bytes = b""
    slot: int = -1


class Span(Value):
    """Rows `start` .. `stop` - 1 of one field of one layer, packed, in row order.

    A row's number is its index j for fields that grow per token, and its position for rings and
    tails.
    """

    field: str
    layer: int
    start: int
    stop: int


class Planned(Value):
    """All pushes of a packed state, before the first of them: their spans, by number.

    So that whoever unpacks them on a device can get ready; Pushed has no spans then.
    """

    kind: Literal["planned"] = "planned"
    pushes: tuple[tuple[Span, ...], ...]


class Pushed(Value):
    """The spans of push number `seq` are written, and can be seen: those named here, or planned.

    If the push is direct they stand in their blocks and slot. Else they lie in its cell one after
    another, each from a multiple of 16 bytes (kv_transfer/staging.py).
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


class AskPairs(Value):
    """Which decode ranks is a prefill rank connected to, and how?"""

    kind: Literal["ask_pairs"] = "ask_pairs"


class PairPath(Value):
    """One pair of ranks as it was measured when they met; zeros before that."""

    decode: str  # the rank's name
    path: str  # what carries the bytes, "nvlink/cuda_ipc"
    direct: bool
    why: str = ""  # it is not direct, because
    latency_s: float = 0.0
    gb_per_s: float = 0.0
    expected_gb_per_s: float = 0.0


class Pairs(Value):
    kind: Literal["pairs"] = "pairs"
    pairs: tuple[PairPath, ...]


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
