"""One request over the packed path, in the GPU transfer benchmark: planned once, then pipelined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from cluster.messages import Span
from kv_transfer.bench_gpu_side import GpuSide


class _Write(Protocol):
    def done(self) -> bool: ...


class _Receiver(Protocol):
    """The other process, by the names of GpuSide's methods; answers come in order."""

    def ask(self, method: str, *arguments: Any) -> Any: ...

    def tell(self, method: str, *arguments: Any) -> None: ...

    def answer(self) -> Any: ...


class PackedRequest:
    """Everything is planned here, on both sides; `start` begins to write a cell to a place in the
    peer's ring, and does not wait."""

    def __init__(
        self,
        side: GpuSide,
        pushes: Sequence[Sequence[Span]],
        cell_bytes: int,
        start: Callable[[Tensor, int], _Write],
        receiver: _Receiver,
    ) -> None:
        cells = side.cells(pushes, cell_bytes)
        self._packing = side.mover.packing(side.lease, cells)
        receiver.ask("plan_unpacking", pushes, cell_bytes)
        self._parts = [cell for _, cell in cells]
        self._places = [cell.data_ptr() - side.ring.data_ptr() for cell in self._parts]
        self._cells = len(set(self._places))
        self._start, self._receiver = start, receiver

    def write_all(self) -> None:
        """The packed bytes alone: no more under way than the ring has cells."""
        started: list[_Write] = []
        for number in range(len(self._parts)):
            while number >= self._cells and not started[number - self._cells].done():
                pass
            started.append(self._start(self._parts[number], self._places[number]))
        for one in started:
            while not one.done():
                pass

    def hand_over(self) -> None:
        """A write follows each packing, an unpacking each write. Raises RuntimeError if what then
        stands in the receiver's blocks is not what stands here."""
        count, cells = len(self._parts), self._cells
        packed = [self._packing.start(number) for number in range(min(cells, count))]
        writes: list[_Write] = []
        told = answered = 0
        for number in range(count):
            while answered <= number - cells:  # the cell has to be unpacked first
                while told <= answered:
                    told += self._tell_done(writes, told)
                self._receiver.answer()
                answered += 1
            if number >= cells:
                packed.append(self._packing.start(number))
            packed[number].synchronize()
            writes.append(self._start(self._parts[number], self._places[number]))
            told += self._tell_done(writes, told)
        while told < count:
            told += self._tell_done(writes, told)
        for _ in range(count - answered):
            self._receiver.answer()
        if self._receiver.ask("unpacked") != self._packing.digests():
            raise RuntimeError("digests differ")

    def _tell_done(self, writes: Sequence[_Write], told: int) -> int:
        """Announce writes that are done, in order; how many."""
        count = 0
        while told + count < len(writes) and writes[told + count].done():
            self._receiver.tell("unpack", told + count)
            count += 1
        return count
