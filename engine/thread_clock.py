"""How long another thread has computed, whatever else the machine does. Knows not what it computes.

By the kernel's books rather than by the thread's own clock, which must not be asked for a thread
that may have ended.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_TICKS_S = os.sysconf("SC_CLK_TCK")


class ThreadClock:
    """Made in the thread that it watches; asked from any."""

    def __init__(self) -> None:
        self._books = Path(f"/proc/self/task/{threading.get_native_id()}/stat")
        self._made_at = time.monotonic()
        self._first_s = self._told_s() or 0.0

    def passed_s(self) -> float:
        """Processor time since then, to 10 ms; where nobody keeps the books, or the thread has
        ended, all time counts."""
        told_s = self._told_s()
        return time.monotonic() - self._made_at if told_s is None else told_s - self._first_s

    def _told_s(self) -> float | None:
        try:
            fields = self._books.read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / _TICKS_S  # user and system
        except (OSError, ValueError, IndexError):
            return None
