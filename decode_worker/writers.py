"""Processes that may write into this rank's blocks, and what is kept for them until they cannot.

What was named to a writer is given to nobody until it has said that it writes no more, or its
process has ended. Neither a broken connection nor a clock frees anything. Knows nothing of blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.process_life import Unwatched, Watch

Free = Callable[[], None]


@dataclass
class _Writer:
    """One life of a sender."""

    watch: Watch | Unwatched
    connected: int = 1  # introductions that have not ended
    kept: dict[str, Free] = field(default_factory=dict)  # by reservation


class Writers:
    """By incarnation. Leave it by close()."""

    def __init__(self) -> None:
        self._writers: dict[str, _Writer] = {}
        self._loop = asyncio.get_running_loop()

    def met(self, incarnation: str, watch: Watch | Unwatched) -> None:
        """It has introduced itself; `watch` is this object's to close."""
        if known := self._writers.get(incarnation):
            known.connected += 1
            watch.close()
            return
        self._writers[incarnation] = _Writer(watch)
        if isinstance(watch, Watch):
            self._loop.add_reader(watch.fileno(), self._has_ended, incarnation)

    def parted(self, incarnation: str) -> None:
        """It is not connected any more, which says nothing of its writes."""
        if writer := self._writers.get(incarnation):
            writer.connected -= 1
            self._forget_idle(incarnation, writer)

    def knows(self, incarnation: str) -> bool:
        """Its end would be noticed: only such a writer is told where blocks are."""
        return incarnation in self._writers

    def begin(self, incarnation: str, reservation: str, free: Free) -> None:
        """It is told where to write; `free` is called once it cannot write there any more."""
        self._writers[incarnation].kept[reservation] = free

    def said(self, incarnation: str, reservation: str) -> None:
        """It writes no more into that reservation. Harmless if nothing is kept for it."""
        writer = self._writers.get(incarnation)
        if writer and (free := writer.kept.pop(reservation, None)):
            free()
            self._forget_idle(incarnation, writer)

    def close(self) -> None:
        for incarnation in list(self._writers):
            self._forget(incarnation)

    def _has_ended(self, incarnation: str) -> None:
        kept = self._writers[incarnation].kept
        self._forget(incarnation)
        for free in kept.values():
            free()

    def _forget_idle(self, incarnation: str, writer: _Writer) -> None:
        if not writer.connected and not writer.kept:
            self._forget(incarnation)

    def _forget(self, incarnation: str) -> None:
        watch = self._writers.pop(incarnation).watch
        if isinstance(watch, Watch):
            self._loop.remove_reader(watch.fileno())
        watch.close()
