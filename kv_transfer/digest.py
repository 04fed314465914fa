"""Digests of stored rows: did every row arrive, under its own number, with all its bits?

A digest is the sum, modulo 2**64, of one hash a row (kernels/row_hash.py), so it depends neither
on the order in which rows came nor on pushes, block size or place in a ring; rows in two parts
add up. Guards against accidents, not against forgery.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from torch import Tensor

from cluster.errors import Rejected
from cluster.messages import PieceDigest, Span
from kernels.row_hash import group_rows, hash_sum, row_hashes
from kv_transfer.blocks import Lease
from kv_transfer.staging import rows_of_push
from kv_transfer.state_memory import StateMemory
from model.state import StateField

_MASK = 2**64 - 1
_CACHED_BYTES = 256 << 10  # hashed at once: these rows, and their words spread to 64 bits, fit L2


def digest_rows(rows: Tensor, row_numbers: Tensor) -> int:
    """Digest of uint8 [n, row_bytes] standing for the rows numbered int64 [n]."""
    return int(row_hashes(rows.numpy(), row_numbers.numpy().astype(np.uint64)).sum())


def digest_span(slab: StateMemory, lease: Lease, span: Span) -> int:
    """Digest of the span's rows as they stand in the slab."""
    digest = 0
    for start, stop in _cuts(span, slab.layout.place(span.field, span.layer).row_bytes):
        part = Span(field=span.field, layer=span.layer, start=start, stop=stop)
        digest += hash_sum(slab.read_rows(part, lease).numpy(), start)
    return digest & _MASK


def piece_digests(
    slab: StateMemory, lease: Lease, fields: Sequence[StateField], length: int
) -> list[PieceDigest]:
    """One digest for each field and layer of what a continuation after `length` positions needs.

    Computed from the slab, all of it. Fields without rows at this length have digest 0.
    """
    return [
        PieceDigest(**span.model_dump(), digest=digest_span(slab, lease, span))
        for span in _needed(fields, length)
    ]


class RunningDigest:
    """The same digests, summed up push by push, so that nothing is left to do at the end.

    Every row must be added once; a row added twice, or not at all, shows as a difference. Threads
    may add at the same time.
    """

    def __init__(self, slab: StateMemory, lease: Lease) -> None:
        self._slab = slab
        self._lease = lease
        self._sums: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    def add(self, spans: Sequence[Span]) -> None:
        """Take in rows that now stand in the slab and will not change."""
        for span in spans:
            self._add(span, digest_span(self._slab, self._lease, span))

    def add_known(self, spans: Sequence[Span], digests: Sequence[int]) -> None:
        """Take in rows whose digests a device has computed from where they stand."""
        for span, digest in zip(spans, digests, strict=True):
            self._add(span, digest)

    def add_packed(self, spans: Sequence[Span], data: Tensor) -> None:
        """Take in the same rows out of a push packed just now: nearer at hand for its sender."""
        for span, rows in rows_of_push(self._slab.layout, spans, data):
            for start, stop in _cuts(span, rows.shape[1]):
                part = rows[start - span.start : stop - span.start]
                self._add(span, hash_sum(part.numpy(), start))

    def _add(self, span: Span, digest: int) -> None:
        key = span.field, span.layer
        with self._lock:
            self._sums[key] = self._sums.get(key, 0) + digest & _MASK

    def pieces(self, fields: Sequence[StateField], length: int) -> list[PieceDigest]:
        """As piece_digests, if exactly the rows for `length` positions have been added."""
        found = []
        for field in fields:
            rows = field.growth.rows(length)
            for layer in field.layers:
                digest = self._sums.get((field.name, layer), 0)
                found.append(
                    PieceDigest(
                        field=field.name,
                        layer=layer,
                        start=rows.start,
                        stop=rows.stop,
                        digest=digest,
                    )
                )
        return found


def check_pieces(ours: Sequence[PieceDigest], theirs: Sequence[PieceDigest]) -> None:
    """Raises Rejected, naming the first piece that is missing, extra or different."""
    expected = {(piece.field, piece.layer): piece for piece in theirs}
    for piece in ours:
        sent = expected.pop((piece.field, piece.layer), None)
        if sent is None or _promised(sent) != _promised(piece):
            what = "was not announced" if sent is None else "does not match its digest"
            raise Rejected(
                f"{piece.field} of layer {piece.layer}, rows {piece.start} to {piece.stop}, "
                f"{what}; the prompt will be prefilled again"
            )
    if expected or len(ours) != len(theirs):
        raise Rejected("pieces were announced that this rank does not have, or twice")


def _promised(piece: PieceDigest) -> tuple[int, int, int]:
    """Quicker to compare than two messages; somebody waits for 54 of them."""
    return piece.start, piece.stop, piece.digest


def _cuts(span: Span, row_bytes: int) -> Iterator[tuple[int, int]]:
    """The span's rows in parts that are hashed in one go: whole groups, but for the ends."""
    size = group_rows(row_bytes)
    step = max(1, _CACHED_BYTES // (row_bytes * size)) * size
    stops = range(span.start - span.start % step + step, span.stop, step)
    if span.start < span.stop:
        yield from pairwise([span.start, *stops, span.stop])


def _needed(fields: Sequence[StateField], length: int) -> Iterator[Span]:
    for field in fields:
        rows = field.growth.rows(length)
        for layer in field.layers:
            yield Span(field=field.name, layer=layer, start=rows.start, stop=rows.stop)
