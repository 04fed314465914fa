"""Transport within one process: plain copies between registered tensors, found by id.

For tests and for prefill and decode in one process; held to the same tests as NIXL.
"""

from __future__ import annotations

import threading
from functools import partial
from itertools import count

from torch import Tensor

from cluster.errors import ProtocolError, TransferError
from kv_transfer.registered_memory import RegisteredMemory
from kv_transfer.transport import PreparedWrite, WriteAtOnce

_MARK = b"local transport "


class _Registry:
    """The open transports of this process, as a network would know its hosts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.serials = count(1)
        self.open: dict[str, LocalTransport] = {}


_REGISTRY = _Registry()


class LocalTransport:
    path = "local/memcpy"

    def __init__(self, name: str) -> None:
        self.name = name
        self._memory = RegisteredMemory()
        self._peers: dict[str, str] = {}  # id of one life -> name
        with _REGISTRY.lock:
            self.id = f"{name}#{next(_REGISTRY.serials)}"
            _REGISTRY.open[self.id] = self

    def register(self, memory: Tensor, *, source_only: bool = False) -> None:
        with _REGISTRY.lock:
            self._check_open()
            self._memory.add(memory, source_only=source_only)

    def metadata(self) -> bytes:
        with _REGISTRY.lock:
            self._check_open()
        return _MARK + self.id.encode()

    def add_peer(self, metadata: bytes) -> str:
        if not metadata.startswith(_MARK):
            raise ProtocolError(f"{len(metadata)} bytes are not a local transport's metadata")
        peer = metadata.removeprefix(_MARK).decode(errors="replace")
        with _REGISTRY.lock:
            self._check_open()
            if peer not in _REGISTRY.open:
                raise TransferError(f"{self.name}: {peer} is gone; choose another rank")
            name = _REGISTRY.open[peer].name
            for old in [known for known, called in self._peers.items() if called == name]:
                del self._peers[old]
            self._peers[peer] = name
        return peer

    def remove_peer(self, peer: str) -> None:
        with _REGISTRY.lock:
            self._peers.pop(peer, None)

    def write(self, peer: str, source: Tensor, remote_offset: int) -> None:
        with _REGISTRY.lock:  # held to the end: `close` of either side waits for it
            self._check_open()
            self._memory.check_source(source)
            target = _REGISTRY.open.get(peer) if peer in self._peers else None
            if target is None:
                raise TransferError(f"{self.name}: {peer} is gone; push to another decode rank")
            ring, stop = target._memory.ring, remote_offset + source.numel()
            if ring is None or remote_offset < 0 or stop > ring.numel():
                raise TransferError(
                    f"{self.name}: bytes {remote_offset} to {stop} are not in the ring of {peer}"
                )
            ring[remote_offset:stop] = source

    def prepare_write(self, peer: str, source: Tensor, remote_offset: int) -> PreparedWrite:
        return WriteAtOnce(partial(self.write, peer, source, remote_offset))

    def close(self) -> None:
        with _REGISTRY.lock:
            _REGISTRY.open.pop(self.id, None)
            self._peers.clear()
            self._memory.clear()

    def _check_open(self) -> None:
        if self.id not in _REGISTRY.open:
            raise TransferError(f"{self.name}: this transport is closed")
