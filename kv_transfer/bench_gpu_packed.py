"""One request over the packed path, in the GPU transfer benchmark: planned once, then pipelined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from cluster.messages import Span
from kv_transfer.bench_gpu_side import GpuSide
from kv_transfer.cell_writer import CellWriter
from kv_transfer.transport import PreparedWrite


class _Receiver(Protocol):
    """The other process, by the names of GpuSide's methods; answers come in order."""

    def ask(self, method: str, *arguments: Any) -> Any: ...

    def tell(self, method: str, *arguments: Any) -> None: ...

    def answer(self) -> Any: ...

    def answered(self) -> bool:
        """Whether an answer can be had without waiting."""


class PackedRequest:
    """Everything is planned here, on both sides; `prepare` makes a write of a cell to a place in
    the peer's ring. As ranks do it, but for their messages: here a pipe."""

    def __init__(
        self,
        side: GpuSide,
        pushes: Sequence[Sequence[Span]],
        cell_bytes: int,
        prepare: Callable[[Tensor, int], PreparedWrite],
        receiver: _Receiver,
        *,
        hashed: bool = True,
    ) -> None:
        cells = side.cells(pushes, cell_bytes)
        packing = side.mover.packing(side.lease, cells, hashed=hashed)
        receiver.ask("plan_unpacking", pushes, cell_bytes)
        parts = [cell for _, cell in cells]
        self._writes = [prepare(part, part.data_ptr() - side.ring.data_ptr()) for part in parts]
        self._cells = side.ring.numel() // cell_bytes
        self._writer = CellWriter(packing, self._writes, self._cells)
        self._receiver = receiver
        self._hashed = hashed
        self._freed = self._told = 0

    def write_all(self) -> None:
        """The packed bytes alone: no more under way than the ring has cells."""
        for number, write in enumerate(self._writes):
            while number >= self._cells and not self._writes[number - self._cells].done():
                pass
            write.start()
        while not all(write.done() for write in self._writes):
            pass

    def hand_over(self) -> None:
        """A write follows each packing, an unpacking each write. Raises RuntimeError if what then
        stands in the receiver's blocks is not what stands here, as far as it is hashed."""
        self._freed = self._told = 0
        self._writer.run(self, self._tell)
        while self._freed < self._told:
            self.wait()
        if self._receiver.ask("unpacked") != self._writer.digests():
            raise RuntimeError("digests differ")

    def close(self) -> None:
        self._writer.close()

    def _tell(self, number: int, _: float) -> None:
        self._receiver.tell("unpack", number, self._hashed)
        self._told += 1

    # ---------------------------------------------------------------- as a Leave

    def to_pack(self, number: int) -> bool:
        return True

    def to_write(self, number: int) -> bool:
        while self._receiver.answered():
            self.wait()
        return number < self._freed + self._cells

    def wait(self) -> None:
        self._receiver.answer()
        self._freed += 1
