"""Processes of this machine by number, told from later ones that got the same number."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

Family = dict[int, str]
"""Process numbers, each with the tick since boot in which its process was born."""


def born(pid: int) -> str | None:
    """When the process started, in ticks since boot; None if it is gone."""
    fields = _stat(pid)
    return fields[19] if fields else None


def family_of(pid: int) -> Family:
    """The process and all that descend from it, as of now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return {one: birth for one in found if (birth := born(one)) is not None}


def alive(family: Family) -> list[int]:
    """Those of the family that still run."""
    return [pid for pid, birth in family.items() if born(pid) == birth]


def send(family: Family, number: signal.Signals) -> None:
    """To those that still run."""
    for pid in alive(family):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_gone(family: Family, limit_s: float) -> bool:
    """Whether all have ended within the limit."""
    deadline = time.monotonic() + limit_s
    while alive(family):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the name; None where a process has ended, reaped or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields
