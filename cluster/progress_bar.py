"""How far a run is: a bar that is drawn anew on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 30
_LINES = 10  # where it is no terminal


class ProgressBar:
    """`done` of `total` were there before this run, and say nothing of its speed."""

    def __init__(
        self,
        total: int,
        out: TextIO,
        *,
        done: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._first = self._done = done
        self._out = out
        self._clock = clock
        self._started = clock()
        self._terminal = out.isatty()

    def step(self, note: str) -> None:
        """One more is done; `note` stands behind the bar."""
        self._done += 1
        step = max(1, self._total // _LINES)
        if not self._terminal and self._done % step and self._done < self._total:
            return
        full = _WIDTH * self._done // self._total
        bar = "#" * full + "-" * (_WIDTH - full)
        line = f"[{bar}] {self._done}/{self._total}  {note}  {self._left()}"
        self._out.write(f"\r{line}\x1b[K" if self._terminal else f"{line}\n")
        self._out.flush()

    def end(self) -> None:
        if self._terminal:
            self._out.write("\n")

    def _left(self) -> str:
        passed_s = self._clock() - self._started
        seconds = passed_s / (self._done - self._first) * (self._total - self._done)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"
