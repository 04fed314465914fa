"""Transport that takes for each pair the quickest path that works: direct, else NIXL.

A pair that cannot map each other's memory is named in a warning: on NVLink, NIXL with many
descriptors or over TCP is slower by orders of magnitude, so nobody shall find out by a benchmark.
Knows nothing of how either path works.
"""

from __future__ import annotations

import logging
import struct

from torch import Tensor

from cluster.errors import ProtocolError, TransferError
from kv_transfer.direct_transport import DirectTransport
from kv_transfer.transport import Transport

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<4sI")  # mark, bytes of the direct part
_MARK = b"TCH1"


class ChosenTransport:
    """Peers are known by the id of the path they are reached on."""

    def __init__(self, direct: DirectTransport, fallback: Transport) -> None:
        """Owns both from now on."""
        self.direct = direct
        self._fallback = fallback
        self._paths: dict[str, Transport] = {}  # by peer

    @property
    def path(self) -> str:
        return f"{self.direct.path} or {self._fallback.path}"

    def path_to(self, peer: str) -> str:
        """What carries the bytes to one peer."""
        return self._of(peer).path

    def is_direct(self, peer: str) -> bool:
        """Rows can be pushed into its state memory; else packed, into its ring."""
        return self._of(peer) is self.direct

    def register(self, memory: Tensor, *, source_only: bool = False) -> None:
        self.direct.register(memory, source_only=source_only)
        self._fallback.register(memory, source_only=source_only)

    def metadata(self) -> bytes:
        direct = self.direct.metadata()
        return _LENGTH.pack(_MARK, len(direct)) + direct + self._fallback.metadata()

    def add_peer(self, metadata: bytes) -> str:
        direct, fallback = _parts(metadata)
        try:
            peer, path = self.direct.add_peer(direct), self.direct
        except TransferError as error:
            peer = self._fallback.add_peer(fallback)
            logger.warning("%s: %s takes %s instead", error, peer, self._fallback.path)
            self._paths[peer] = self._fallback
            return peer
        logger.info("%s: %s is reached by %s", self.direct.name, peer, path.path)
        self._paths[peer] = path
        return peer

    def remove_peer(self, peer: str) -> None:
        path = self._paths.pop(peer, None)
        if path is not None:
            path.remove_peer(peer)

    def write(self, peer: str, source: Tensor, remote_offset: int) -> None:
        self._of(peer).write(peer, source, remote_offset)

    def close(self) -> None:
        self._paths.clear()
        self.direct.close()
        self._fallback.close()

    def _of(self, peer: str) -> Transport:
        try:
            return self._paths[peer]
        except KeyError:
            raise TransferError(
                f"{self.direct.name}: {peer} is gone; push to another decode rank"
            ) from None


def _parts(metadata: bytes) -> tuple[bytes, bytes]:
    try:
        mark, nbytes = _LENGTH.unpack_from(metadata)
    except struct.error as error:
        raise ProtocolError(f"{len(metadata)} bytes are not metadata: {error}") from error
    if mark != _MARK:
        raise ProtocolError(f"{len(metadata)} bytes are no metadata of a choice of transports")
    return metadata[_LENGTH.size :][:nbytes], metadata[_LENGTH.size + nbytes :]
