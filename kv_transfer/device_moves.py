"""Moves of rows, planned before they are made: all tables in one upload, digests at the end.

What a rank knows early (its blocks, a reservation's length) need not be computed when every
microsecond counts: then a move is one launch. Moves of one plan add to one set of digests, which
are read once. Knows nothing of fields, peers or cells.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels.ops.kv_push import kv_push
from kernels.push_table import Pieces, PushTable
from kv_transfer.layout import aligned
from kv_transfer.reach import Move

_ALIGNMENT = 2  # numbers; a kernel is compiled apart for addresses that 16 does not divide


class DeviceMoves:
    def __init__(
        self,
        moves: Sequence[Move],
        digests: int,
        *,
        tabulated: Callable[[Pieces], PushTable],
        stream: torch.cuda.Stream,
        lock: threading.Lock,
        programs: int,
    ) -> None:
        """Uploads the tables on `stream`; pieces name digests 0 to `digests` - 1."""
        self._moves = tuple(moves)
        self._stream, self._lock, self._programs = stream, lock, programs
        tables = [tabulated(move.pieces) for move in moves]
        places, total = [], 0
        for table in tables:
            places.append(slice(total, total + table.numbers.numel()))
            total = aligned(places[-1].stop, _ALIGNMENT)
        pinned = torch.empty(total, dtype=torch.int64, pin_memory=True)
        for table, place in zip(tables, places, strict=True):
            pinned[place] = table.numbers
        with lock, torch.cuda.stream(stream):
            numbers = torch.empty(total, dtype=torch.int64, device=stream.device)
            numbers.copy_(pinned, non_blocking=True)
            self._found = torch.zeros(1 + digests, dtype=torch.int64, device=stream.device)
        self._done, self._digests = self._found[:1], self._found[1:]
        self._answer = torch.empty(1 + digests, dtype=torch.int64, pin_memory=True)
        self._tables = [
            PushTable(numbers[place], table.formats, table.pieces, table.nbytes)
            for table, place in zip(tables, places, strict=True)
        ]
        self._started = 0

    def start(self, number: int, after: Any = None) -> Any:
        """Make move `number`, after an event of the device if one is given; an event behind it."""
        move = self._moves[number]
        hashed = move.hashed and len(self._digests) > 0
        with self._lock, torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            self._started += 1
            kv_push(
                self._tables[number], self._digests, self._done, self._programs, move.copy, hashed
            )
            return self._stream.record_event()

    def digests(self) -> list[int]:
        """Waits for all that was started; what stands at the targets can be seen there. Begins
        anew: the same moves can be made again."""
        with self._lock, torch.cuda.stream(self._stream):
            self._answer.copy_(self._found, non_blocking=True)
            done = self._stream.record_event()
            self._found.zero_()
        done.synchronize()
        programs, *values = self._answer.tolist()
        assert programs == self._programs * self._started, "a program of a push did not finish"
        self._started = 0
        return [value % 2**64 for value in values]
