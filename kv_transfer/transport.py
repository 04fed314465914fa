"""The seam between ranks' memories: what every way of moving bytes promises.

One-sided and blocking: `write` puts bytes from registered memory here into the receive ring of a
peer, and has no effect any more once it has returned or raised; only if the peer was removed in
the middle of it, something may still come into that ring. Telling the peer is the control plane's
business. Knows nothing of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class PreparedWrite(Protocol):
    """One write, made ready before its bytes are there: beginning it costs next to nothing.

    Once it is done it can be started again. It is no longer anything once its peer was removed.
    """

    def start(self) -> None:
        """Begin, without waiting. Raises TransferError if the peer is gone."""

    def done(self) -> bool:
        """Whether it has ended; to be asked until it has. Raises TransferError if it has failed,
        or the peer was removed."""

    def close(self) -> None:
        """It is not wanted any more, and not under way. Harmless if repeated."""


class WriteAtOnce:
    """A prepared write of a transport that cannot leave a write to itself."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write

    def start(self) -> None:
        self._write()

    def done(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Transport(Protocol):
    """`add_peer` and `write` block: call them in a thread. Any thread may call anything."""

    @property
    def path(self) -> str:
        """What carries the bytes, for people and metrics: "nixl/UCX"."""

    def register(self, memory: Tensor, *, source_only: bool = False) -> None:
        """Make uint8 [n] known to the transport, which keeps it until `close`.

        Peers may write into it, at offsets from its start, unless it is `source_only`; there can
        be one such receive ring. Raises ValueError for other tensors and for a second ring.
        """

    def metadata(self) -> bytes:
        """What a peer's `add_peer` needs to write into the receive ring registered so far."""

    def add_peer(self, metadata: bytes) -> str:
        """Get ready to write to a peer; its id. An earlier life of the same name is dropped.

        Raises ProtocolError for bytes that are no metadata, TransferError if the peer is gone.
        """

    def remove_peer(self, peer: str) -> None:
        """Forget a peer and all that was cached about it. Harmless if it is unknown.

        A write to it that does not end is given up.
        """

    def write(self, peer: str, source: Tensor, remote_offset: int) -> None:
        """Copy `source`, uint8 [n] within registered memory, into the peer's ring; wait for it.

        Its bytes are there already: what a device still has to write is the caller's to wait for.
        Raises TransferError if the peer is unknown, gone or its ring ends before that, ValueError
        if `source` is not registered.
        """

    def prepare_write(self, peer: str, source: Tensor, remote_offset: int) -> PreparedWrite:
        """A write to be started later, perhaps several at a time, by one thread. Errors as of
        write, which it may also raise when it is started."""

    def close(self) -> None:
        """Wait for writes under way, then give back everything. Harmless if repeated."""
