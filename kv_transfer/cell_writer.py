"""A request's pushes through cells into a peer's ring: packed, written, several under way at once.

Everything was planned before: here a push is one launch, a wait for it, and one posted write. Runs
in a thread of its own, because threads that wait for a write each get less out of NIXL. Knows
nothing of rows, messages, or what a peer does with a push.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from cluster.errors import TransferError
from kv_transfer.reach import Made, Moves
from kv_transfer.transport import PreparedWrite

_AHEAD = 2  # pushes packed but not yet written: one more than the device needs to stay busy
_SPIN_S = 2e-3  # a write between GPUs takes less: looked at without a pause for so long
_POLL_S = 50e-6

Told = Callable[[int, float], None]


class Leave(Protocol):
    """What a push waits for, by its number."""

    def to_pack(self, number: int) -> bool:
        """Its rows stand. Raises TransferError if the pushes are given up."""

    def to_write(self, number: int) -> bool:
        """Its cell at the peer is free. Raises as to_pack."""

    def wait(self) -> None:
        """Until an answer may be another one than before."""


class CellWriter:
    def __init__(self, packing: Moves, writes: Sequence[PreparedWrite], cells: int) -> None:
        """Move k of `packing` fills the cell that writes[k] is from; this side has `cells` of
        them, used in turn."""
        self._packing = packing
        self._writes = tuple(writes)
        self._cells = cells

    def run(self, leave: Leave, told: Told) -> None:
        """`told` hears of each push, in order, when it stands in the peer's ring, and when its
        packing began (time.monotonic()).

        Raises TransferError; when this is left, no write is under way.
        """
        count, packed, began = len(self._writes), list[Made](), list[float]()
        begun = done = 0
        moved_at = time.monotonic()
        try:
            while done < count:
                before = len(packed) + begun + done
                if done < begun and self._writes[done].done():
                    told(done, began[done])
                    done += 1
                if self._may_pack(len(packed), begun, done) and leave.to_pack(len(packed)):
                    began.append(time.monotonic())
                    packed.append(self._packing.start(len(packed)))
                if begun < len(packed) and leave.to_write(begun):
                    packed[begun].synchronize()
                    self._writes[begun].start()
                    begun += 1
                if len(packed) + begun + done > before:
                    moved_at = time.monotonic()
                elif begun == done:
                    leave.wait()
                else:
                    time.sleep(0 if time.monotonic() - moved_at < _SPIN_S else _POLL_S)
        finally:
            for one in packed[begun:]:
                one.synchronize()  # a cell is not given back while it is being filled
            for write in self._writes[done:begun]:
                with suppress(TransferError):
                    while not write.done():
                        time.sleep(_POLL_S)

    def _may_pack(self, number: int, begun: int, done: int) -> bool:
        """There is such a push, its cell here is free, and not too many wait to be written."""
        return number < min(len(self._writes), done + self._cells) and number - begun < _AHEAD

    def digests(self) -> list[int]:
        """Of all spans of all pushes, as they were packed."""
        return self._packing.digests()

    def close(self) -> None:
        """Gives the prepared writes back."""
        for write in self._writes:
            write.close()


class Allowance:
    """Leave that other threads give. A push needs its rows, and a cell at the peer."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._changes = self._seen = 0
        self._ready = self._cells = 0
        self._given_up = False

    def rows_stand(self, pushes: int) -> None:
        """Of the first so many pushes."""
        with self._changed:
            self._ready = max(self._ready, pushes)
            self._notify()

    def release(self) -> None:
        """The peer has one cell more."""
        with self._changed:
            self._cells += 1
            self._notify()

    def give_up(self) -> None:
        with self._changed:
            self._given_up = True
            self._notify()

    def to_pack(self, number: int) -> bool:
        return number < self._look()[0]

    def to_write(self, number: int) -> bool:
        return number < self._look()[1]

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._changes > self._seen)
            self._seen = self._changes

    def _look(self) -> tuple[int, int]:
        with self._changed:
            if self._given_up:
                raise TransferError("the push was given up")
            return self._ready, self._cells

    def _notify(self) -> None:
        self._changes += 1
        self._changed.notify_all()
