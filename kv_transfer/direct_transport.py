"""Transport between memories that one device can address both: no agent, no descriptors.

Besides the ring, a rank may offer its state memory: then peers write rows where they shall stand
(`push`), with no packing and no unpacking. For this the rules are stricter than for a ring: a late
write lands in live memory. So blocks that were named to a writer stay in quarantine until the
writer has answered that it writes no more, or its process has ended (`has_ended`); a connection
that broke is no proof.

Knows nothing of how the memory is reached (reach.py), nor what rows mean.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from cluster.errors import ProtocolError, TransferError
from kernels.push_table import Pieces
from kv_transfer.process_life import Life, Unwatched, Watch, own_life
from kv_transfer.reach import Opened, Reach
from kv_transfer.registered_memory import RegisteredMemory
from kv_transfer.transport import PreparedWrite, WriteAtOnce

logger = logging.getLogger(__name__)

_MARK = b"TDR1"
_MOST_PID = 1 << 31
_MOST_BYTES = 1 << 48  # of one memory: no machine has more, and sums of two such are no overflow


class Area(NamedTuple):
    """Memory of a peer as this process addresses it."""

    address: int
    nbytes: int


@dataclass(frozen=True)
class _Peer:
    """One life of a named rank, and what of its memory is open here."""

    name: str
    id: str
    life: Life
    watch: Watch | Unwatched
    opened: tuple[Opened, ...]
    ring: Area
    offered: tuple[Area, ...]

    def close(self) -> None:
        for one in self.opened:
            one.close()
        self.watch.close()


class DirectTransport:
    def __init__(self, name: str, reach: Reach) -> None:
        self.name = name
        self.id = f"{name}#{uuid.uuid4().hex[:12]}"
        self.reach = reach
        self._memory = RegisteredMemory(reach.takes)
        self._ring: tuple[bytes, int] | None = None
        self._offered: list[tuple[bytes, int]] = []
        self._peers: dict[str, _Peer] = {}
        self._writes: Counter[str] = Counter()  # under way, by peer
        self._lock = threading.Condition()
        self._closed = False

    @property
    def path(self) -> str:
        return self.reach.path

    def register(self, memory: Tensor, *, source_only: bool = False) -> None:
        with self._lock:
            self._check_open()
            self._memory.add(memory, source_only=source_only)
            if not source_only:
                self._ring = self.reach.export(memory), memory.numel()

    def offer(self, memory: Tensor) -> None:
        """Let peers write anywhere in it, contiguous uint8 of any shape: state memory.

        Kept until `close`. Peers know it by how many were offered before.
        """
        with self._lock:
            self._check_open()
            self._memory.add(memory.view(-1), source_only=True)
            self._offered.append((self.reach.export(memory), memory.numel()))

    def metadata(self) -> bytes:
        with self._lock:
            self._check_open()
            areas = [self._ring or (b"", 0), *self._offered]
            told = {
                "name": self.name,
                "id": self.id,
                "life": asdict(own_life()),
                "areas": [[exported.hex(), nbytes] for exported, nbytes in areas],
            }
        return _MARK + json.dumps(told).encode()

    def add_peer(self, metadata: bytes) -> str:
        name, id, life, areas = _parse(metadata)
        with self._lock:
            self._check_open()
            if id in self._peers and not self._peers[id].watch.has_ended:
                return id
            for known in [peer for peer in self._peers.values() if peer.name == name]:
                self._forget(known)
            self._check_open()  # forgetting waits, and lets others in
            self._peers[id] = self._opened(name, id, life, areas)
            return id

    def remove_peer(self, peer: str) -> None:
        with self._lock:
            if peer in self._peers:
                self._forget(self._peers[peer])

    def write(self, peer: str, source: Tensor, remote_offset: int) -> None:
        nbytes = source.numel()
        with self._writing(peer) as target:
            self._memory.check_source(source)
            if remote_offset < 0 or remote_offset + nbytes > target.ring.nbytes:
                raise TransferError(
                    f"{self.name}: bytes {remote_offset} to {remote_offset + nbytes} are not in "
                    f"the ring of {peer}, which has {target.ring.nbytes}"
                )
            if nbytes:
                address = target.ring.address + remote_offset
                self.reach.copy(target.life, source.data_ptr(), address, nbytes)

    def offered(self, peer: str) -> tuple[Area, ...]:
        """What a peer has offered, as addresses for the targets of `push`."""
        with self._lock:
            return self._peer(peer).offered

    def prepare_write(self, peer: str, source: Tensor, remote_offset: int) -> PreparedWrite:
        return WriteAtOnce(partial(self.write, peer, source, remote_offset))

    def push(self, peer: str, pieces: Pieces, digests: int, *, after: Any = None) -> list[int]:
        """Copy rows from memory here into what the peer has offered; their digests.

        With `digests` 0 a host may leave the hashing out. On return every byte is visible there,
        so that a word sent now comes after it. `after`: an event of the device to wait for first;
        without it the rows are there already.
        Raises TransferError if the peer is gone or a piece is not within what it has offered,
        ValueError if one does not begin in registered memory.
        """
        with self._writing(peer) as target:
            self._check(target, pieces)
            return self.reach.push(target.life, pieces, digests, after)

    def prepare_push(self, peer: str, pieces: Pieces, digests: int) -> Callable[[], list[int]]:
        """As push, of rows that do not exist yet: call what this returns when they do."""
        with self._writing(peer) as target:
            self._check(target, pieces)
            prepared = self.reach.prepare_push(target.life, pieces, digests)

        def push() -> list[int]:
            with self._writing(peer):
                return prepared()

        return push

    def _check(self, target: _Peer, pieces: Pieces) -> None:
        nbytes = pieces.rows * pieces.row_bytes
        self._memory.check_ranges(pieces.source, nbytes)
        if not _within(target.offered, pieces.target, nbytes):
            raise TransferError(
                f"{self.name}: a push to {target.id} names memory that it has not offered"
            )

    def has_ended(self, peer: str) -> bool:
        """The peer's process is no more: nothing it began can still write, or be written to.

        Never so for a peer on another host: there its group's head or its node has to say it.
        """
        with self._lock:
            return self._peer(peer).watch.has_ended

    def watch(self, metadata: bytes) -> Watch | Unwatched:
        """Sees the end of the process whose transport has made `metadata`; close it.

        Raises ProtocolError for bytes that are no metadata, TransferError if it has ended, or
        could never be seen to end.
        """
        _, _, life, _ = _parse(metadata)
        return self._watch(life)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for peer in list(self._peers.values()):
                self._forget(peer)
            self._lock.wait_for(lambda: not self._writes)
            self.reach.close()
            self._memory.clear()

    @contextmanager
    def _writing(self, peer: str) -> Iterator[_Peer]:
        """The peer stays open meanwhile. Its death before the end makes the write an error."""
        with self._lock:
            self._check_open()
            target = self._peer(peer)
            self._writes[peer] += 1
        try:
            self._check_alive(target)
            yield target
            self._check_alive(target)
        finally:
            with self._lock:
                self._writes -= Counter([peer])
                self._lock.notify_all()

    def _opened(self, name: str, id: str, life: Life, areas: list[tuple[bytes, int]]) -> _Peer:
        opened: list[Opened] = []
        found = []
        try:
            watch = self._watch(life)
        except TransferError as error:
            raise TransferError(f"{self.name}: {name} is gone ({error})") from error
        try:
            for exported, nbytes in areas:
                if exported:
                    opened.append(self.reach.open(exported, life))
                found.append(Area(opened[-1].address if exported else 0, nbytes))
        except (TransferError, ProtocolError) as error:
            for one in opened:
                one.close()
            watch.close()
            raise type(error)(f"{self.name}: {name} cannot be reached: {error}") from error
        return _Peer(name, id, life, watch, tuple(opened), found[0], tuple(found[1:]))

    def _watch(self, life: Life) -> Watch | Unwatched:
        return Unwatched() if self.reach.spans_hosts and not life.is_here else Watch(life)

    def _check_alive(self, peer: _Peer) -> None:
        if peer.watch.has_ended:
            raise TransferError(f"{self.name}: {peer.id} has ended; push to another decode rank")

    def _peer(self, peer: str) -> _Peer:
        if peer not in self._peers:
            raise TransferError(f"{self.name}: {peer} is gone; push to another decode rank")
        return self._peers[peer]

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError(f"{self.name}: this transport is closed")

    def _forget(self, peer: _Peer) -> None:
        """Begin no more writes to it, wait for those under way, close what is open of it."""
        self._peers.pop(peer.id, None)
        self._lock.wait_for(lambda: not self._writes[peer.id])
        peer.close()


def _within(areas: tuple[Area, ...], starts: Any, nbytes: Any) -> bool:
    inside = np.zeros(len(starts), dtype=bool)
    for area in areas:
        inside |= (starts >= area.address) & (starts + nbytes <= area.address + area.nbytes)
    return bool(inside.all())


def _parse(metadata: bytes) -> tuple[str, str, Life, list[tuple[bytes, int]]]:
    """Name, id, life, and the exported memories with their sizes: the ring, then the offered."""
    try:
        if not metadata.startswith(_MARK):
            raise ValueError("another mark")
        told = json.loads(metadata.removeprefix(_MARK))
        life = Life(
            str(told["life"]["host"]), int(told["life"]["pid"]), int(told["life"]["started"])
        )
        areas = [(bytes.fromhex(exported), int(nbytes)) for exported, nbytes in told["areas"]]
        if not 0 < life.pid < _MOST_PID:
            raise ValueError(f"no process has the number {life.pid}")
        if not areas or not all(0 <= nbytes < _MOST_BYTES for _, nbytes in areas):
            raise ValueError("no ring, or memories of impossible sizes")
        return str(told["name"]), str(told["id"]), life, areas
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(
            f"{len(metadata)} bytes are not a direct transport's metadata: {error}"
        ) from error
