"""A rank's transport to all its peers: for each pair the quickest path that works.

Direct: rows go from the blocks of one rank into the blocks of the other, where their memories can
be reached. Packed: through cells and a receive ring, anywhere. Which one a pair takes is tried when
it meets, with a write, not believed; what falls back is named in a warning, because on NVLink the
difference is one of orders of magnitude. Knows nothing of how either path works.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cluster.errors import ProtocolError, StartupError, TransferError
from kernels.push_table import Pieces
from kv_transfer.direct_transport import Area, DirectTransport
from kv_transfer.path_probe import PathReport, probe
from kv_transfer.process_life import Unwatched, Watch
from kv_transfer.reach import Reach
from kv_transfer.transport import PreparedWrite, Transport

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<4sI")  # mark, bytes of the direct part
_MARK = b"TCH2"
_HOST = torch.device("cpu")
_TRIED_BYTES = 64
_HOST_PROBE, _DEVICE_PROBE = 1 << 20, 16 << 20  # bytes; a device's copy engine needs many
_EXPECTED = {"nvlink/cuda_ipc": 100.0}  # GB/s at 16 MiB: NVLink gives 250 there, PCIe 50


class ChosenTransport:
    """Peers are known by the id of the path they are reached on.

    Besides rings and state memory, either side of a direct pair has a scratch: memory that counts
    for nothing, and is written to when a pair is tried and measured.
    """

    def __init__(
        self,
        name: str,
        direct: DirectTransport | None,
        packed: Transport | None,
        *,
        why_packed: str = "",
        cells: torch.device = _HOST,
        reach: Reach | None = None,
    ) -> None:
        """Owns both, of which one may be missing, from now on. `why_packed`: there is no direct
        one, because; "" if nobody wants one. `cells`: where cells and rings of the packed path
        have to be; `reach`: what packs and unpacks there by kernel, if state memory is there too.
        """
        assert direct or packed, "a rank needs a path"
        self.name = name
        self.direct = direct
        self.packed = packed
        self.why_packed = why_packed
        self.cells = cells
        self.reach = reach
        self.fallbacks = 0  # pairs that could not go direct
        self._paths: dict[str, Transport | DirectTransport] = {}  # by peer
        self._why: dict[str, str] = {}  # a peer is not reached directly
        self._scratch: Tensor | None = None

    @property
    def path(self) -> str:
        return " or ".join(one.path for one in (self.direct, self.packed) if one)

    # ---------------------------------------------------------------- memory

    def register(self, memory: Tensor, *, source_only: bool = False) -> None:
        """Cells to write from, or the receive ring, for pairs that are not direct."""
        if self.packed:
            self.packed.register(memory, source_only=source_only)

    def push_from(self, *memories: Tensor) -> None:
        """State memory whose rows shall be pushed to peers."""
        if self.direct:
            for memory in memories:
                self.direct.register(memory.view(-1), source_only=True)
            self._scratch = _scratch(memories[0].device)
            self.direct.register(self._scratch, source_only=True)

    def offer(self, *memories: Tensor) -> None:
        """State memory that peers shall push rows into.

        Raises StartupError for memory that cannot be reached from other processes if there is no
        other path; else that is a warning.
        """
        if not self.direct:
            return
        try:
            for memory in memories:
                self.direct.offer(memory)
            self._scratch = _scratch(memories[0].device)
            self.direct.register(self._scratch)
        except StartupError as error:
            if not self.packed:
                raise
            logger.warning("%s: %s; all peers take %s instead", self.name, error, self.packed.path)
            self.direct.close()
            self.direct, self.why_packed = None, str(error)

    def metadata(self, *, direct: bool = True) -> bytes:
        """`direct` off: no state memory is offered to whom this is for."""
        first = self.direct.metadata() if self.direct and direct else b""
        rest = self.packed.metadata() if self.packed else b""
        return _LENGTH.pack(_MARK, len(first)) + first + rest

    # ---------------------------------------------------------------- peers

    def add_peer(self, metadata: bytes, why_packed: str = "") -> str:
        """Choose a path to it by trying; its id. `why_packed`: it offers nothing, because.

        Raises ProtocolError for bytes that are no metadata, TransferError if no path is left.
        """
        direct, packed = _parts(metadata)
        why = self.why_packed or (why_packed if self.direct else "")
        if self.direct and not why:
            try:
                peer = self._reached(self.direct, direct)
            except TransferError as error:
                why = str(error)
            else:
                logger.info("%s: %s is reached by %s", self.name, peer, self.direct.path)
                self._paths[peer] = self.direct
                return peer
        if not (self.packed and packed):
            raise TransferError(
                f"{self.name}: no path is left ({why or 'one side has none but direct ones'}); "
                'transfer.path = "auto" would allow another'
            )
        peer = self.packed.add_peer(packed)
        self._paths[peer] = self.packed
        if why:
            self.fallbacks += 1
            self._why[peer] = why
            logger.warning("%s: %s takes %s instead", why, peer, self.packed.path)
        return peer

    def _reached(self, direct: DirectTransport, metadata: bytes) -> str:
        """That a write arrives is not known before one has: a kernel may forbid it."""
        assert self._scratch is not None, "memory is declared before peers are added"
        if not metadata:
            raise TransferError(f"{self.name}: a peer offers no memory")
        peer = direct.add_peer(metadata)
        try:
            direct.write(peer, self._scratch[:_TRIED_BYTES], 0)
        except TransferError:
            direct.remove_peer(peer)
            raise
        return peer

    def remove_peer(self, peer: str) -> None:
        self._why.pop(peer, None)
        path = self._paths.pop(peer, None)
        if path is not None:
            path.remove_peer(peer)

    def path_to(self, peer: str) -> str:
        """What carries the bytes to one peer."""
        return self._of(peer).path

    def is_direct(self, peer: str) -> bool:
        """Rows can be pushed into its state memory; else packed, into its ring."""
        return self._of(peer) is self.direct

    def why(self, peer: str) -> str:
        """It is not direct, because; "" if it is, or nobody wanted that."""
        return self._why.get(peer, "")

    def offered(self, peer: str) -> tuple[Area, ...]:
        """Of a direct peer, as addresses for the targets of push()."""
        return self._directly(peer).offered(peer)

    def watch(self, metadata: bytes) -> Watch | Unwatched:
        """Sees the end of the process that has made `metadata`, which must have a direct part.

        Raises ProtocolError for other bytes, TransferError if it has ended or is not to be seen.
        """
        direct, _ = _parts(metadata)
        if not (self.direct and direct):
            raise TransferError(f"{self.name}: one of both has no direct path")
        return self.direct.watch(direct)

    # ---------------------------------------------------------------- bytes

    def write(self, peer: str, source: Tensor, remote_offset: int) -> None:
        """As Transport.write, to a peer that is not direct."""
        path = self._of(peer)
        assert path is self.packed, "state is pushed to a direct peer, not written into its ring"
        path.write(peer, source, remote_offset)

    def prepare_write(self, peer: str, source: Tensor, remote_offset: int) -> PreparedWrite:
        """As Transport.prepare_write, to a peer that is not direct."""
        path = self._of(peer)
        assert path is self.packed, "state is pushed to a direct peer, not written into its ring"
        return path.prepare_write(peer, source, remote_offset)

    def push(self, peer: str, pieces: Pieces, digests: int, *, after: Any = None) -> list[int]:
        """As DirectTransport.push, to a peer that is direct."""
        return self._directly(peer).push(peer, pieces, digests, after=after)

    def prepare_push(self, peer: str, pieces: Pieces, digests: int) -> Callable[[], list[int]]:
        """As DirectTransport.prepare_push, to a peer that is direct."""
        return self._directly(peer).prepare_push(peer, pieces, digests)

    def measure(self, peer: str, source: Tensor | None = None, offset: int = 0) -> PathReport:
        """What the pair gets. To a peer that is not direct: `source`, in registered memory, is
        written to a place of its ring that is this rank's. Raises TransferError if it is gone."""
        path = self._of(peer)
        if path is self.direct:
            source, offset = self._scratch, 0
        assert source is not None, "a ring is measured with somebody's cell"
        expected = _EXPECTED.get(path.path, 0.0)
        return probe(path, peer, source, offset, expected_gb_per_s=expected)

    def close(self) -> None:
        self._paths.clear()
        for path in (self.direct, self.packed):
            if path:
                path.close()
        if self.reach and not (self.direct and self.direct.reach is self.reach):
            self.reach.close()

    def _directly(self, peer: str) -> DirectTransport:
        path = self._of(peer)
        assert isinstance(path, DirectTransport), "this peer is not direct"
        return path

    def _of(self, peer: str) -> Transport | DirectTransport:
        try:
            return self._paths[peer]
        except KeyError:
            raise TransferError(
                f"{self.name}: {peer} is gone; push to another decode rank"
            ) from None


def _scratch(device: torch.device) -> Tensor:
    nbytes = _HOST_PROBE if device.type == "cpu" else _DEVICE_PROBE
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def _parts(metadata: bytes) -> tuple[bytes, bytes]:
    try:
        mark, nbytes = _LENGTH.unpack_from(metadata)
    except struct.error as error:
        raise ProtocolError(f"{len(metadata)} bytes are not metadata: {error}") from error
    if mark != _MARK or nbytes > len(metadata) - _LENGTH.size:
        raise ProtocolError(f"{len(metadata)} bytes are no metadata of a choice of transports")
    return metadata[_LENGTH.size :][:nbytes], metadata[_LENGTH.size + nbytes :]
