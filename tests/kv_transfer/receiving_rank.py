"""The receiving half of handoffs, in this process or in one of its own.

`Here` and `Elsewhere` give the same calls; the second runs them in a process forked from a fork
server that has imported torch once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from cluster.messages import PieceDigest, Segment, Span
from kv_transfer.blocks import Lease
from kv_transfer.digest import piece_digests
from kv_transfer.direct_transport import DirectTransport
from kv_transfer.open_transport import open_transport
from kv_transfer.ring import ReceiveRing, SegmentLease
from kv_transfer.staging import push_bytes, unpack_push
from kv_transfer.transport import Transport
from model.state import StateField
from tests.kv_transfer.stores import FIELDS, POISON, Store

CELL_BYTES = 65536
CELLS = 2
BLOCK_TOKENS = 32
RING_SLACK = 6

_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload([__name__])


ON_GPUS = ("nvlink", "nixl-vram")


def memory_of(kind: str, *, receiving: bool = False) -> torch.device:
    """Of two GPUs the receiving process takes the second."""
    if kind not in ON_GPUS:
        return torch.device("cpu")
    return torch.device("cuda", min(1, torch.cuda.device_count() - 1) if receiving else 0)


def opened(kind: str, name: str, device: torch.device, *, write_bytes: int = 1 << 20) -> Transport:
    """A transport of one of the kinds that are tested: NIXL is two, by where its memory is."""
    known = kind.removesuffix("-vram")
    return open_transport(known, name, write_bytes=write_bytes, device=device)


class ReceivingRank:
    """A ring, a transport, and for each kind of fields a slab of a shape of its own."""

    def __init__(self, kind: str, name: str) -> None:
        device = memory_of(kind, receiving=True)
        self.ring = ReceiveRing(8 * CELL_BYTES * CELLS, CELL_BYTES, CELLS)
        self.ring.memory = self.ring.memory.to(device)
        self.transport = opened(kind, name, device)
        self.transport.register(self.ring.memory)
        self.stores = {
            name: Store(fields, block_tokens=BLOCK_TOKENS, ring_slack=RING_SLACK)
            for name, fields in FIELDS.items()
        }
        self.held: dict[int, tuple[Store, Lease, SegmentLease]] = {}
        self.memories: list[tuple[Tensor, Tensor]] = []  # of a store, and where peers write it
        if isinstance(self.transport, DirectTransport):
            for store in self.stores.values():
                for memory in (store.slab.blocks, store.slab.slots):
                    self.memories.append((memory, memory.to(device)))
                    self.transport.offer(self.memories[-1][1])

    def metadata(self) -> bytes:
        return self.transport.metadata()

    def reserve(self, fields: str, longest: int) -> tuple[int, Segment]:
        store = self.stores[fields]
        lease, segment = store.lease(longest), self.ring.lease()
        self.held[lease.id] = store, lease, segment
        return lease.id, segment.segment

    def unpack(self, reservation: int, seq: int, spans: Sequence[Span]) -> None:
        store, lease, segment = self.held[reservation]
        cell = self.ring.view(segment.segment, seq, push_bytes(store.layout, spans))
        self.fetch()
        unpack_push(store.slab, lease, spans, cell.cpu())
        for memory, written in self.memories:
            written.copy_(memory)

    def place(self, reservation: int) -> tuple[Sequence[int], int]:
        """Where a reservation's rows stand: its blocks and its slot."""
        _, lease, _ = self.held[reservation]
        return lease.block_ids, lease.slot

    def fetch(self) -> None:
        """What peers have written into a device's memory, into the stores."""
        for memory, written in self.memories:
            memory.copy_(written)

    def spoil(self) -> None:
        """As another sequence might have left it."""
        for memory, written in self.memories:
            memory.fill_(POISON)
            written.fill_(POISON)

    def digests(
        self, reservation: int, fields: Sequence[StateField], length: int
    ) -> list[PieceDigest]:
        self.fetch()
        store, lease, _ = self.held[reservation]
        return piece_digests(store.slab, lease, fields, length)

    def rows(self, reservation: int, length: int) -> dict[tuple[str, int], bytes]:
        self.fetch()
        store, lease, _ = self.held[reservation]
        found = store.rows(lease, length)
        return {key: rows.numpy().tobytes() for key, rows in found.items()}

    def release(self, reservation: int) -> None:
        _, lease, segment = self.held.pop(reservation)
        lease.release()
        segment.release()

    def peek(self, offset: int, nbytes: int) -> bytes:
        """What stands in the ring."""
        return self.ring.memory[offset : offset + nbytes].cpu().numpy().tobytes()

    def close(self) -> None:
        self.transport.close()


class Here:
    def __init__(self, kind: str, name: str) -> None:
        self._rank = ReceivingRank(kind, name)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._rank, method)(*args)

    def die(self) -> None:
        """Within one process the nearest to a death is to close."""
        self._rank.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._rank.close()


class Elsewhere:
    def __init__(self, kind: str, name: str) -> None:
        self._pipe, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_serve, args=(theirs, kind, name), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *args: Any) -> Any:
        self._pipe.send((method, args))
        answer, failure = self._pipe.recv()
        if failure is not None:
            raise RuntimeError(f"in the other process:\n{failure}")
        return answer

    def die(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pipe.close()  # it ends by itself then
        self._process.join(10)
        if self._process.is_alive():
            self.die()


def _serve(pipe: Connection, kind: str, name: str) -> None:
    torch.set_num_threads(1)
    rank = ReceivingRank(kind, name)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            rank.close()
            return
        try:
            pipe.send((getattr(rank, method)(*args), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))
