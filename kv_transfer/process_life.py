"""One life of a process on this host: whether it has ended, without asking the process.

The proof that a writer will write no more: an ended process has no memory mapped and no work on a
device. Knows nothing of what processes do.
"""

from __future__ import annotations

import os
import select
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import TransferError


@dataclass(frozen=True)
class Life:
    """`host` is one boot of one machine as one set of processes sees it: there `pid` counts, and
    `started` (in clock ticks since boot) tells lives of one number apart."""

    host: str
    pid: int
    started: int

    @property
    def is_here(self) -> bool:
        """On this host, so that watch() can tell its end."""
        return self.host == _host()

    @property
    def is_own(self) -> bool:
        return self == own_life()


class Watch:
    """Sees one life end. `close` it."""

    def __init__(self, life: Life) -> None:
        """Raises TransferError if it has ended already, or is not on this host."""
        if not life.is_here:
            raise TransferError(f"process {life.pid} of {life.host} is on another host")
        try:
            self._fd = os.pidfd_open(life.pid)
        except OSError as error:
            raise TransferError(f"process {life.pid} has ended") from error
        if _started(life.pid) != life.started or self.has_ended:
            self.close()
            raise TransferError(f"process {life.pid} has ended")

    @property
    def has_ended(self) -> bool:
        return self.wait(0)

    def fileno(self) -> int:
        """Can be read from once it has ended: for an event loop."""
        return self._fd

    def wait(self, seconds: float) -> bool:
        """Whether it has ended by then."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Unwatched:
    """Of a life on another host, of whose end somebody else has to tell."""

    has_ended = False

    def close(self) -> None:
        pass


def own_life() -> Life:
    return life_of(os.getpid())


def life_of(pid: int) -> Life:
    """The process of this host that has that number now."""
    return Life(_host(), pid, _started(pid))


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int:
    """0 if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])  # fields after the name begin with the third
