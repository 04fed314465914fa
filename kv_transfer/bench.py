"""How quick is moving request state between two processes, against memcpy in the same run?

    python -m kv_transfer.bench [--mib 16] [--rounds 15]

Three figures count, all as ratios: bytes alone through the transport; a whole packed handoff
(pack, write, unpack, and a digest on either side) as ranks do it, push by push with a few cells of
credit; and a direct one, from blocks to blocks, with the same digests. Rounds alternate, so that a
busy machine slows all alike. One thread a process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch

from cluster.config import TransferSection
from cluster.messages import PieceDigest
from kv_transfer.blocks import BlockPool
from kv_transfer.digest import RunningDigest, check_pieces
from kv_transfer.direct_transport import DirectTransport
from kv_transfer.host_reach import HostReach
from kv_transfer.layout import Layout
from kv_transfer.open_transport import open_transport
from kv_transfer.plan import pack_into_pushes, spans_final_at
from kv_transfer.ring import ReceiveRing
from kv_transfer.row_mover import RowMover
from kv_transfer.row_pieces import Standing
from kv_transfer.slab import Slab
from kv_transfer.staging import pack_push, push_bytes, unpack_push
from model.spec import ModelSpec
from model.state import StateField, state_fields

_MODEL = Path(__file__).parents[1] / "deploy" / "models" / "deepseek-v41-flash"
_BLOCK_TOKENS = 128
_BARS = {"write": 0.35, "packed handoff": 0.10, "direct handoff": 0.10}  # of memcpy


class _Side:
    """Request state of one length in a slab; what both processes have."""

    def __init__(self, fields: tuple[StateField, ...], length: int) -> None:
        torch.set_num_threads(1)
        self.fields, self.length = fields, length
        self.layout = Layout(fields, _BLOCK_TOKENS)
        num_blocks = -(-length // _BLOCK_TOKENS)
        self.slab = Slab(self.layout, num_blocks, 1)
        self.lease = BlockPool(num_blocks, 1, _BLOCK_TOKENS).lease(length)
        self.cells = TransferSection().cells
        self.cell_bytes = TransferSection().cell_bytes


class _Receiver(_Side):
    """Runs in the other process: unpacks what it is told of, and answers with digests."""

    def __init__(
        self, pipe: Connection, fields: tuple[StateField, ...], length: int, nbytes: int
    ) -> None:
        super().__init__(fields, length)
        self._pipe = pipe
        self._ring = ReceiveRing(nbytes + self.cells * self.cell_bytes, self.cell_bytes, self.cells)
        self._segment = self._ring.lease().segment
        self._transport = open_transport("nixl", "receiver")
        self._transport.register(self._ring.memory)
        self._direct = DirectTransport("receiver", HostReach())
        for memory in (self.slab.blocks, self.slab.slots):
            self._direct.offer(memory)

    def serve(self) -> None:
        self._pipe.send((self._transport.metadata(), self._direct.metadata()))
        digest, seq = RunningDigest(self.slab, self.lease), 0
        while (told := self._pipe.recv()) is not None:
            spans, direct = told
            if direct:
                digest.add(spans)
            elif spans:
                size = push_bytes(self.layout, spans)
                cell = self._ring.view(self._segment, seq, size)
                unpack_push(self.slab, self.lease, spans, cell)
                digest.add(spans)
                self._pipe.send(seq)
                seq += 1
            else:  # the end of a handoff
                self._pipe.send(digest.pieces(self.fields, self.length))
                digest, seq = RunningDigest(self.slab, self.lease), 0
        self._transport.close()
        self._direct.close()


class _Sender(_Side):
    def __init__(
        self, pipe: Connection, fields: tuple[StateField, ...], length: int, nbytes: int
    ) -> None:
        super().__init__(fields, length)
        self._pipe = pipe
        for memory in (self.slab.blocks, self.slab.slots):
            memory.random_(256)
        self.source = torch.randint(256, (nbytes,)).byte()
        self.copy = torch.zeros_like(self.source)
        self._transport = open_transport(
            "nixl", "sender", write_bytes=TransferSection().write_bytes
        )
        self._transport.register(self.source, source_only=True)
        packed, direct = pipe.recv()
        self._peer = self._transport.add_peer(packed)
        self._direct = DirectTransport("sender", HostReach())
        for memory in (self.slab.blocks, self.slab.slots):
            self._direct.register(memory.view(-1), source_only=True)
        self._there = self._direct.add_peer(direct)
        blocks, slots = self._direct.offered(self._there)
        self._standing = Standing(  # the two slabs are alike
            self.layout, blocks.address, slots.address, self.lease.block_table, self.lease.slot
        )
        self._mover = RowMover(self.slab, self._direct.reach)
        self.path = self._transport.path
        spans = spans_final_at(fields, 0, length, last=True)
        self.pushes = pack_into_pushes(spans, self.layout, self.cell_bytes)

    def memcpy(self) -> None:
        self.copy.copy_(self.source)

    def write(self) -> None:
        self._transport.write(self._peer, self.source, 0)

    def pack(self) -> None:
        for push in self.pushes:
            pack_push(self.slab, self.lease, push, self.source)

    def digest(self) -> list[PieceDigest]:
        digest = RunningDigest(self.slab, self.lease)
        for push in self.pushes:
            digest.add(push)
        return digest.pieces(self.fields, self.length)

    def handoff(self) -> None:
        """Raises Rejected if not every row arrived."""
        digest = RunningDigest(self.slab, self.lease)
        for seq, push in enumerate(self.pushes):
            if seq >= self.cells:
                self._pipe.recv()  # a cell is free again
            nbytes = pack_push(self.slab, self.lease, push, self.source)
            digest.add_packed(push, self.source)
            cell = seq % self.cells * self.cell_bytes
            self._transport.write(self._peer, self.source[:nbytes], cell)
            self._pipe.send((push, False))
        for _ in self.pushes[-self.cells :]:
            self._pipe.recv()
        self._end(digest)

    def direct_handoff(self) -> None:
        """The same from blocks to blocks."""
        digest = RunningDigest(self.slab, self.lease)
        for push in self.pushes:
            digest.add(push)
            pieces = self._mover.pieces(self.lease, push, self._standing)
            self._direct.push(self._there, pieces, 0)
            self._pipe.send((push, True))
        self._end(digest)

    def _end(self, digest: RunningDigest) -> None:
        self._pipe.send(([], False))
        check_pieces(self._pipe.recv(), digest.pieces(self.fields, self.length))

    def close(self) -> None:
        self._pipe.send(None)
        self._transport.close()
        self._direct.close()


def _receive(pipe: Connection, fields: tuple[StateField, ...], length: int, nbytes: int) -> None:
    _Receiver(pipe, fields, length, nbytes).serve()


def measure(fields: tuple[StateField, ...], length: int, rounds: int) -> str:
    """Runs both processes and gives the table. Raises Rejected if the state did not arrive."""
    nbytes = Layout(fields, _BLOCK_TOKENS).state_bytes(length)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs, fields, length, nbytes), daemon=True)
    process.start()
    sender = _Sender(ours, fields, length, nbytes)
    steps: dict[str, Callable[[], object]] = {
        "memcpy": sender.memcpy,
        "write": sender.write,
        "packed handoff": sender.handoff,
        "direct handoff": sender.direct_handoff,
        "pack alone": sender.pack,
        "digest alone": sender.digest,
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()  # the first time wires up, and is where a wrong digest shows
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    sender.close()
    process.join()
    title = (
        f"{length} positions, {nbytes / 2**20:.1f} MiB, {len(sender.pushes)} pushes, "
        f"{sender.path}, {rounds} rounds"
    )
    return title + "\n" + _table(seconds, nbytes)


def _table(seconds: dict[str, list[float]], nbytes: int) -> str:
    lines = [f"{'':16}{'median ms':>10}{'best ms':>9}{'GB/s':>7}{'of memcpy':>11}{'bar':>7}"]
    for name, times in seconds.items():
        ratio = median(seconds["memcpy"]) / median(times)
        bar = f"{_BARS[name]:.2f}" if name in _BARS else ""
        lines.append(
            f"{name:16}{median(times) * 1e3:10.2f}{min(times) * 1e3:9.2f}"
            f"{nbytes / median(times) / 1e9:7.2f}{ratio:11.2f}{bar:>7}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="How quick is moving request state?")
    parser.add_argument("--model", type=Path, default=_MODEL, help="folder with config.json")
    parser.add_argument("--mib", type=float, default=16.0, help="about how much state to move")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    fields = state_fields(ModelSpec.load(arguments.model))
    layout = Layout(fields, _BLOCK_TOKENS)
    start = layout.state_bytes(_BLOCK_TOKENS)
    each = layout.state_bytes(2 * _BLOCK_TOKENS) - start
    blocks = 1 + max(0, round((arguments.mib * 2**20 - start) / each))
    print(measure(fields, blocks * _BLOCK_TOKENS, arguments.rounds))


if __name__ == "__main__":
    main()
