"""Transport over NIXL's UCX backend, between memories of one kind, same host or not.

The only file that knows NIXL; its errors become ours here. It uses NIXL's bindings rather than
their Python wrapper, because the wrapper's progress thread has no pause and takes a whole core.
Other facts it works around: a peer must be removed before another life of it is added; a write by
CMA holds its thread for the whole copy, so writes go in pieces; deregistering is no fence against
a peer's late write, so memory is reused by its owner's rules, never by a transport's; a write to
a peer that has stopped may never end, so it is given up when the peer is removed.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from nixl import _bindings as nixl
from torch import Tensor

from cluster.errors import StartupError, TransferError
from kv_transfer.nixl_metadata import HOST, NixlMetadata
from kv_transfer.registered_memory import RegisteredMemory

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_WHOLE = 1 << 30  # over VRAM no thread is held: a write is one piece, as large as can be
_BACKEND = "UCX"
_PROGRESS_US = 5000  # longest sleep of NIXL's progress thread; events wake it earlier
_POLL_S = 50e-6  # between looks at a write that did not finish at once (no CMA: other hosts)
_SPIN_S = 2e-3  # between GPUs most writes take less: looked at without a pause for so long


@dataclass(frozen=True)
class _Peer:
    """One life of a named rank, and where its ring begins in its own memory."""

    name: str
    metadata: bytes
    agent: str  # NIXL's name of that life, our peer id
    device: int  # as it counts them; of host memory HOST
    address: int
    nbytes: int

    @property
    def segment(self) -> Any:
        return nixl.DRAM_SEG if self.device == HOST else nixl.VRAM_SEG


class NixlWrite:
    """A transfer request of NIXL's, made before it is posted: making one takes 10 us or so, 8 MiB
    over NVLink take 22. Counted as a write from start() until done() has said that it has ended."""

    def __init__(self, transport: NixlTransport, peer: str, nbytes: int, request: Any) -> None:
        self._transport = transport
        self.peer = peer
        self.nbytes = nbytes
        self.request = request  # None once it was given back
        self.running = False

    def start(self) -> None:
        self._transport.post(self)

    def done(self) -> bool:
        return not self.running or self._transport.has_ended(self)

    def close(self) -> None:
        self._transport.give_back(self)


class NixlTransport:
    path = f"nixl/{_BACKEND}"

    def __init__(
        self, name: str, *, write_bytes: int = 1 << 20, device: torch.device = _CPU
    ) -> None:
        """Starts an agent, half a second; on a GPU more. Raises StartupError if NIXL cannot."""
        if device.type != "cpu":
            device = torch.device(device.type, device.index or 0)
        self._device = device
        self.name = name
        self._write_bytes = write_bytes if device.type == "cpu" else _WHOLE
        self._memory = RegisteredMemory(lambda memory: memory.device == device)
        self._segment = nixl.DRAM_SEG if device.type == "cpu" else nixl.VRAM_SEG
        self._spin_s = 0.0 if device.type == "cpu" else _SPIN_S
        # as this process counts its devices
        self._device_id = HOST if device.type == "cpu" else device.index or 0
        self._registrations: list[Any] = []
        self._ring: Any = nixl.nixlRegDList(self._segment)  # its registration, once there is one
        self._peers: dict[str, _Peer] = {}
        self._writes: Counter[str] = Counter()  # under way, by peer
        self._prepared: dict[str, set[NixlWrite]] = {}  # requests that wait to be posted, by peer
        self._lock = threading.Condition()
        self._agent: Any
        self._agent, self._backend = _start_agent(name)
        self._posted_by: Any = self._agent  # also when this transport is being closed

    def register(self, memory: Tensor, *, source_only: bool = False) -> None:
        self._be_on_device()
        with self._lock:
            agent = self._open_agent()
            self._memory.add(memory, source_only=source_only)
            region = (memory.data_ptr(), memory.numel(), self._device_id, "")
            registration = nixl.nixlRegDList(self._segment, [region])
            try:
                agent.registerMem(registration, [self._backend])
            except Exception as error:
                raise StartupError(
                    f"{self.name}: NIXL cannot register {memory.numel()} bytes "
                    f"({_described(error)}); is there enough lockable memory?"
                ) from error
            self._registrations.append(registration)
            if not source_only:
                self._ring = registration

    def metadata(self) -> bytes:
        with self._lock:  # of this rank's registrations only the ring is told to peers
            blob = self._open_agent().getLocalPartialMD(self._ring, True, [self._backend])
            ring = self._memory.ring
            address, nbytes = (0, 0) if ring is None else (ring.data_ptr(), ring.numel())
        return NixlMetadata(self.name, self._device_id, address, nbytes, bytes(blob)).pack()

    def add_peer(self, metadata: bytes) -> str:
        name, device, address, nbytes, blob = NixlMetadata.parse(metadata)
        self._be_on_device()
        with self._lock:
            self._open_agent()
            for known in [peer for peer in self._peers.values() if peer.name == name]:
                if known.metadata == metadata:
                    return known.agent
                self._forget(known)
            agent = self._open_agent()
            try:
                peer: str = agent.loadRemoteMD(blob).decode()
            except Exception as error:
                raise TransferError(
                    f"{self.name}: {name} cannot be reached over {self.path} "
                    f"({_described(error)}); choose another rank"
                ) from error
            self._peers[peer] = _Peer(name, metadata, peer, device, address, nbytes)
            return peer

    def remove_peer(self, peer: str) -> None:
        with self._lock:
            if peer in self._peers:
                self._forget(self._peers[peer])

    def write(self, peer: str, source: Tensor, remote_offset: int) -> None:
        with self._writing(peer, source, remote_offset) as address:
            for start in range(0, source.numel(), self._write_bytes):
                piece = source[start : start + self._write_bytes]
                self._write_pieces(peer, [(piece.data_ptr(), address + start, piece.numel())])

    def prepare_write(self, peer: str, source: Tensor, remote_offset: int) -> NixlWrite:
        """Several can be under way from one thread, which is quicker over VRAM than threads are."""
        with self._writing(peer, source, remote_offset) as address, self._lock:
            agent, target = self._open_agent(), self._peer(peer)
            here = [(source.data_ptr(), source.numel(), self._device_id)]
            there = [(address, source.numel(), target.device)]
            try:
                request = agent.createXferReq(
                    nixl.NIXL_WRITE,
                    nixl.nixlXferDList(self._segment, here),
                    nixl.nixlXferDList(target.segment, there),
                    peer, "", [self._backend],
                )  # fmt: skip
            except Exception as error:
                raise self._lost(peer, source.numel(), _described(error)) from error
            write = NixlWrite(self, peer, source.numel(), request)
            self._prepared.setdefault(peer, set()).add(write)
            return write

    def post(self, write: NixlWrite) -> None:
        self._be_on_device()
        with self._lock:
            agent = self._open_agent()
            self._peer(write.peer)
            write.running = True
            self._writes[write.peer] += 1
        try:
            agent.postXferReq(write.request)
        except Exception as error:
            self._ended(write)
            raise self._lost(write.peer, write.nbytes, _described(error)) from error

    def has_ended(self, write: NixlWrite) -> bool:
        """Of one that is running. Raises TransferError if it has failed or is given up."""
        known = write.peer in self._peers
        state = self._posted_by.getXferStatus(write.request) if known else "the peer was removed"
        if state == nixl.NIXL_IN_PROG:
            return False
        self._ended(write)
        if state != nixl.NIXL_SUCCESS:
            raise self._lost(write.peer, write.nbytes, str(state))
        return True

    def _ended(self, write: NixlWrite) -> None:
        with self._lock:
            write.running = False
            self._writes -= Counter([write.peer])
            self._lock.notify_all()

    def give_back(self, write: NixlWrite) -> None:
        assert not write.running, "what is under way is asked for until it has ended"
        with self._lock:
            self._prepared.get(write.peer, set()).discard(write)
            self._release(write)

    def _release(self, write: NixlWrite) -> None:
        request, write.request = write.request, None
        if request is not None:
            with _logged("a transfer request stays until its agent ends"):
                self._posted_by.releaseXferReq(request)

    def write_pages(self, peer: str, source: Tensor, page_bytes: int, order: Sequence[int]) -> None:
        """Page k of `source` to page order[k] of the ring, a descriptor each, in one transfer.

        What block-to-block transfers over NIXL do; to be measured, not used: see docs.
        """
        with self._writing(peer, source, 0) as address:
            begin = source.data_ptr()
            self._write_pieces(
                peer,
                [
                    (begin + page * page_bytes, address + place * page_bytes, page_bytes)
                    for page, place in enumerate(order)
                ],
            )

    def _be_on_device(self) -> None:
        """UCX takes the GPU that is current in the calling thread, in a new thread none."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    @contextmanager
    def _writing(self, peer: str, source: Tensor, remote_offset: int) -> Iterator[int]:
        """The address at the peer; it is not forgotten meanwhile."""
        self._be_on_device()
        with self._lock:
            self._open_agent()
            self._memory.check_source(source)
            target = self._peer(peer)
            stop = remote_offset + source.numel()
            if remote_offset < 0 or stop > target.nbytes:
                raise TransferError(
                    f"{self.name}: bytes {remote_offset} to {stop} are not in "
                    f"the ring of {peer}, which has {target.nbytes}"
                )
            self._writes[peer] += 1
        try:
            yield target.address + remote_offset
        finally:
            with self._lock:
                self._writes -= Counter([peer])
                self._lock.notify_all()

    def close(self) -> None:
        with self._lock:
            if self._agent is None:
                return
            agent, self._agent = self._agent, None  # no new writes or pieces of writes
            for peer in list(self._peers.values()):
                self._forget(peer, agent)
            self._lock.wait_for(lambda: not self._writes)
            for registration in self._registrations:
                with _logged(f"{self.name}: deregistering"):
                    agent.deregisterMem(registration, [self._backend])
            self._registrations.clear()
            self._memory.clear()
            self._posted_by = None
        # the agent's threads and sockets end here, with its last reference

    def _write_pieces(self, peer: str, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Address here, address there, bytes: a descriptor each. Returns when all are done, have
        failed, or the peer is removed meanwhile.

        A peer that stopped before it ever heard of this agent would keep us here for ever.
        """
        with self._lock:
            agent = self._open_agent()
            target = self._peer(peer)
        here = [(source, nbytes, self._device_id) for source, _, nbytes in pieces]
        there = [(address, nbytes, target.device) for _, address, nbytes in pieces]
        local = nixl.nixlXferDList(self._segment, here)
        remote = nixl.nixlXferDList(target.segment, there)
        total = sum(nbytes for *_, nbytes in pieces)
        request = None
        try:
            request = agent.createXferReq(nixl.NIXL_WRITE, local, remote, peer, "", [self._backend])
            state = agent.postXferReq(request)
            began = time.monotonic()
            while state == nixl.NIXL_IN_PROG and peer in self._peers:
                soon = time.monotonic() - began < self._spin_s
                time.sleep(0 if soon else _POLL_S)
                state = agent.getXferStatus(request)
        except Exception as error:
            raise self._lost(peer, total, _described(error)) from error
        finally:
            if request is not None:
                with _logged("a transfer request stays until its agent ends"):
                    agent.releaseXferReq(request)
        if state != nixl.NIXL_SUCCESS:
            raise self._lost(peer, total, str(state))

    def _lost(self, peer: str, nbytes: int, why: str) -> TransferError:
        return TransferError(
            f"{self.name}: writing {nbytes} bytes to {peer} failed ({why}); "
            f"push to another decode rank"
        )

    def _peer(self, peer: str) -> _Peer:
        if peer not in self._peers:
            raise TransferError(f"{self.name}: {peer} is gone; push to another decode rank")
        return self._peers[peer]

    def _open_agent(self) -> Any:
        if self._agent is None:
            raise TransferError(f"{self.name}: this transport is closed")
        return self._agent

    def _forget(self, peer: _Peer, agent: Any = None) -> None:
        """Start no more pieces to the peer, give up the one under way, drop what NIXL has."""
        agent = agent or self._agent
        self._peers.pop(peer.agent, None)
        self._lock.wait_for(lambda: not self._writes[peer.agent])
        for write in self._prepared.pop(peer.agent, set()):
            self._release(write)
        with _logged(f"{self.name}: dropping {peer.agent}"):
            agent.invalidateRemoteMD(peer.agent)


def available_backends() -> list[str]:
    """Backends that this installation of NIXL brings, by name; which of them work is not said."""
    return sorted(nixl.nixlAgent("asking", nixl.nixlAgentConfig()).getAvailPlugins())


def _start_agent(name: str) -> tuple[Any, Any]:
    """An agent that has a name of its own in each life, and its backend."""
    config = nixl.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = _PROGRESS_US
    config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT  # event loop and worker threads both call it
    try:
        agent = nixl.nixlAgent(f"{name}#{uuid.uuid4().hex[:12]}", config)
        return agent, agent.createBackend(_BACKEND, {})
    except Exception as error:
        raise StartupError(f"{name}: NIXL's {_BACKEND} does not start: {error}") from error


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """For clearing up, where a failure leaves nothing better to do."""
    try:
        yield
    except Exception as error:
        logger.warning("%s: %s", what, _described(error))


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
