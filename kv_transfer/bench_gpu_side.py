"""One GPU's half of the transfer benchmark: a request's state, and ways to move and hash it.

Runs in the process of bench_gpu.py for the sender, and in one of its own, which sees its own GPU
only, for the receiver.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from cluster.messages import Span
from kernels.ops.kv_push import kv_push
from kernels.push_table import Pieces, PushTable, row_formats, tabulate
from kv_transfer.blocks import Lease
from kv_transfer.cuda_reach import CudaReach
from kv_transfer.direct_transport import Area, DirectTransport
from kv_transfer.layout import Layout
from kv_transfer.plan import spans_final_at
from kv_transfer.reach import Moves
from kv_transfer.row_mover import RowMover
from kv_transfer.row_pieces import Standing, standing
from kv_transfer.staging import push_bytes
from model.state import StateField

BLOCK_TOKENS = 128
_SPIN_CYCLES = 600_000  # a third of a millisecond in which the host gets ahead of the device


class GpuSide:
    """State for `longest` positions in shuffled blocks, and a ring; one transport over them."""

    def __init__(
        self, name: str, fields: Sequence[StateField], longest: int, ring_bytes: int
    ) -> None:
        self.fields = tuple(fields)
        self.device = torch.device("cuda", 0)
        self.layout = Layout(self.fields, BLOCK_TOKENS)
        num_blocks = -(-longest // BLOCK_TOKENS)
        self.blocks = self._memory(num_blocks * self.layout.block_bytes)
        self.slots = self._memory(self.layout.slot_bytes)
        self.ring = self._memory(ring_bytes)
        order = np.random.default_rng(len(name)).permutation(num_blocks)
        self.block_table = order.astype(np.int64)
        sizes = {field.row_bytes for field in self.fields}
        self.formats = row_formats(sizes)
        self.reach = CudaReach(self.device, row_bytes=sizes)
        lease = SimpleNamespace(length=longest, block_table=self.block_table, slot=0)
        self.lease = cast(Lease, lease)  # of all memory, in shuffled order
        self.mover = RowMover(self, self.reach)
        self._unpacking: Moves = self.reach.plan([], 0)
        self.transport = DirectTransport(name, self.reach)
        self.transport.register(self.ring)
        self.transport.offer(self.blocks)
        self.transport.offer(self.slots)
        self.transport.offer(self.ring)  # for pages in any order
        self.stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._nixl: Any = None

    def _memory(self, nbytes: int) -> torch.Tensor:
        return torch.randint(256, (nbytes,), dtype=torch.uint8, device=self.device)

    def metadata(self) -> bytes:
        return self.transport.metadata()

    def nixl(self) -> Any:
        """A NIXL transport over the same ring, made when it is first wanted."""
        if self._nixl is None:
            from kv_transfer.nixl_transport import NixlTransport

            self._nixl = NixlTransport(self.transport.name, device=self.device)
            self._nixl.register(self.ring)
        return self._nixl

    def nixl_metadata(self) -> bytes:
        metadata: bytes = self.nixl().metadata()
        return metadata

    def spans(self, length: int) -> list[Span]:
        return spans_final_at(self.fields, 0, length, last=True)

    def stands(self, areas: Sequence[Area] = (), table: Any = None) -> Standing:
        """This side's state, or a peer's that offered `areas` and has blocks `table`."""
        if areas:
            return Standing(self.layout, areas[0].address, areas[1].address, table, 0)
        blocks, slots = self.blocks.data_ptr(), self.slots.data_ptr()
        return Standing(self.layout, blocks, slots, self.block_table, 0)

    def tables(self) -> Any:
        return self.block_table

    # ---------------------------------------------------------------- timed work

    def table(self, pieces: Pieces) -> PushTable:
        return tabulate(pieces, self.formats).to(self.device)

    def push_s(
        self,
        table: PushTable,
        digests: int,
        programs: int,
        *,
        copy: bool = True,
        hashed: bool = True,
    ) -> float:
        found = torch.zeros(digests, dtype=torch.int64, device=self.device)
        done = torch.zeros(1, dtype=torch.int64, device=self.device)
        return self.device_s(lambda: kv_push(table, found, done, programs, copy, hashed))

    def device_s(self, work: Callable[[], object], rounds: int = 7) -> float:
        """Median seconds of the device, on the side's stream, without the host's part."""
        with torch.cuda.stream(self.stream):
            work()
            found = []
            for _ in range(rounds):
                start, stop = timing_event(), timing_event()
                torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
                start.record()
                work()
                stop.record()
                stop.synchronize()
                found.append(float(start.elapsed_time(stop)) / 1e3)
        return median(found)

    def hash_state(self, length: int) -> tuple[list[int], float]:
        """Digests of what stands here, and wall seconds."""
        spans = self.spans(length)
        began = time.perf_counter()
        digests = self.reach.move(standing(spans, self.stands()), len(spans), copy=False)
        return digests, time.perf_counter() - began

    def hash_device_s(self, length: int, programs: int) -> float:
        spans = self.spans(length)
        table = self.table(standing(spans, self.stands()))
        return self.push_s(table, len(spans), programs, copy=False)

    def planned_hash_s(self, length: int) -> float:
        """Median wall seconds of the same, planned when the reservation was made."""
        digests = self.mover.planned_digests(self.lease, self.spans(length))
        found = []
        for _ in range(9):
            began = time.perf_counter()
            digests()
            found.append(time.perf_counter() - began)
        return median(found)

    # ---------------------------------------------------------------- packed pushes

    def cells(
        self, pushes: Sequence[Sequence[Span]], cell_bytes: int
    ) -> list[tuple[Sequence[Span], torch.Tensor]]:
        """Each push with its bytes in the ring, whose cells are used in turn."""
        many = self.ring.numel() // cell_bytes
        found = []
        for number, spans in enumerate(pushes):
            begin = number % many * cell_bytes
            found.append((spans, self.ring[begin : begin + push_bytes(self.layout, spans)]))
        return found

    def plan_unpacking(self, pushes: Sequence[Sequence[Span]], cell_bytes: int) -> None:
        self._unpacking = self.mover.unpacking(self.lease, self.cells(pushes, cell_bytes))

    def unpack(self, number: int, hashed: bool) -> None:
        """Its cell is free again when this returns; digests of the blocks are on their way."""
        stored = self._unpacking.start(2 * number)
        if hashed:
            self._unpacking.start(2 * number + 1)
        stored.synchronize()

    def unpacked(self) -> list[int]:
        return self._unpacking.digests()

    def clear(self) -> None:
        for memory in (self.blocks, self.slots, self.ring):
            memory.zero_()
        torch.cuda.synchronize()

    def close(self) -> None:
        self.transport.close()
        if self._nixl is not None:
            self._nixl.close()


def timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def serve(
    pipe: Connection, fields: Sequence[StateField], longest: int, ring_bytes: int, gpu: int
) -> None:
    """The receiving process: does what it is asked, until the pipe ends."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)  # nothing of CUDA has been asked for yet
    side = GpuSide("receiver", fields, longest, ring_bytes)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            side.close()
            return
        try:
            pipe.send((getattr(side, method)(*arguments), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))
