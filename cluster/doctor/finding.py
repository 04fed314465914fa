"""What a check has found, and a run of checks that none of them can hold up. Knows no checks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]
LIMIT_S = 10.0


@dataclass(frozen=True)
class Finding:
    name: str
    level: Level
    what: str
    next: str = ""  # what to do about it; nothing where all is well

    def __str__(self) -> str:
        line = f"{self.level:<5} {self.name:<14} {self.what}"
        return f"{line}\n{'':<20} -> {self.next}" if self.next else line


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[], Finding]


def run_checks(checks: Iterable[Check], limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """One finding a check, as soon as it is there.

    A check that takes longer than `limit_s`, or breaks, has failed: the next one goes on.
    """
    for check in checks:
        yield _run(check, limit_s)


def _run(check: Check, limit_s: float) -> Finding:
    found: list[Finding] = []

    def run() -> None:
        try:
            found.append(check.run())
        except Exception as error:  # a check of ours that is wrong says so, and stops no other
            what = f"the check broke: {type(error).__name__}: {error}"
            found.append(Finding(check.name, "fail", what, "report this with its message"))

    thread = threading.Thread(target=run, name=f"doctor {check.name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if found:
        return found[0]
    return Finding(
        check.name,
        "fail",
        f"no answer within {limit_s:g} s",
        "something hangs, or the machine is very busy: try again, or with a longer --limit",
    )
