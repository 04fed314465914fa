"""Who holds which numbered units, and the books over them.

A unit is free, or belongs to one holding that is leased, quarantined (a peer may still write
into it) or cached (kept for reuse, by a prefix index once there is one). Blocks, slots and ring
segments are all such units. Thread-safe, with one lock a stock, because an engine's thread and
the event loop beside it both take and release. Knows nothing of memory, lengths or peers; an
owner is a name.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Literal, Self

from cluster.errors import NoRoom

State = Literal["leased", "quarantined", "cached", "released"]


@dataclass(frozen=True)
class Ledger:
    """How many units of one kind are in which state."""

    free: int
    leased: int
    quarantined: int
    cached: int
    total: int

    def check(self) -> None:
        """Raises AssertionError when a unit was lost or counted twice."""
        assert self.free + self.leased + self.quarantined + self.cached == self.total, self


class Holding:
    """Units held together; leaving a `with` releases them.

    `release` may be called any number of times, and does nothing to a quarantined holding: that
    one ends by `clear`, once its owner has answered or is proven gone. Ids are never reused.
    """

    def __init__(self, stock: Stock, wanted: Mapping[str, int]) -> None:
        """Raises NoRoom, and holds nothing, unless all wanted units are free."""
        self.state: State = "leased"
        self.owner: str | None = None
        self._stock = stock
        self.id, self.units = stock._take(self, wanted)

    def grow(self, kind: str, number: int) -> None:
        """Hold `number` more units of one kind.

        Raises NoRoom if they are not free; then nobody new gets units of that kind until this
        holding has got its own, or has ended: who is inside comes before who is not.
        """
        self._stock._grow(self, kind, number)

    def release(self) -> None:
        self._stock._free(self, "leased")

    def quarantine(self, owner: str) -> None:
        """Keep the units from everybody until `owner`, who may still write, is done with them."""
        self._stock._quarantine(self, owner)

    def clear(self) -> None:
        """The writer has answered or is proven gone: end the quarantine, if there is one."""
        self._stock._free(self, "quarantined")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class Stock:
    """All units of one or more kinds, such as {"blocks": 512, "slots": 16}."""

    def __init__(self, totals: Mapping[str, int]) -> None:
        self._totals = dict(totals)
        self._lock = threading.Lock()
        # the unit freed last is taken first: its memory is the most likely to be in cache
        self._unused = {kind: list(reversed(range(total))) for kind, total in totals.items()}
        self._holdings: dict[int, Holding] = {}
        self._starving: set[tuple[int, str]] = set()  # (holding, kind): could not grow by that
        self._ids = count()

    def clear(self, owner: str) -> int:
        """End every quarantine of `owner`; how many there were."""
        with self._lock:
            owned = [holding for holding in self._holdings.values() if holding.owner == owner]
        for holding in owned:
            holding.clear()
        return len(owned)

    def ledger(self, kind: str) -> Ledger:
        with self._lock:
            held: Counter[State] = Counter()
            for holding in self._holdings.values():
                held[holding.state] += len(holding.units.get(kind, ()))
            return Ledger(
                free=len(self._unused[kind]),
                leased=held["leased"],
                quarantined=held["quarantined"],
                cached=held["cached"],
                total=self._totals[kind],
            )

    def _take(
        self, holding: Holding, wanted: Mapping[str, int]
    ) -> tuple[int, dict[str, tuple[int, ...]]]:
        with self._lock:
            promised = {kind for _, kind in self._starving}
            short = [
                f"{number} {kind} ({len(self._unused[kind])} of {self._totals[kind]} free)"
                for kind, number in wanted.items()
                if number > len(self._unused[kind]) or kind in promised
            ]
            if short:
                raise NoRoom(f"no room for {' and '.join(short)}; try again when others finish")
            units = {kind: self._pop(kind, number) for kind, number in wanted.items()}
            serial = next(self._ids)
            self._holdings[serial] = holding
            return serial, units

    def _grow(self, holding: Holding, kind: str, number: int) -> None:
        with self._lock:
            assert holding.state == "leased", "only what is leased can grow"
            free = len(self._unused[kind])
            if number > free:
                self._starving.add((holding.id, kind))
                raise NoRoom(f"no room for {number} more {kind} ({free} free)")
            self._starving.discard((holding.id, kind))
            holding.units = {
                **holding.units,
                kind: holding.units.get(kind, ()) + self._pop(kind, number),
            }

    def _pop(self, kind: str, number: int) -> tuple[int, ...]:
        return tuple(self._unused[kind].pop() for _ in range(number))

    def _quarantine(self, holding: Holding, owner: str) -> None:
        with self._lock:
            assert holding.state == "leased", "only what is still leased can be quarantined"
            holding.state, holding.owner = "quarantined", owner

    def _free(self, holding: Holding, expected: State) -> None:
        with self._lock:
            if holding.state != expected:
                return
            holding.state, holding.owner = "released", None
            del self._holdings[holding.id]
            for kind, numbers in holding.units.items():
                self._unused[kind].extend(reversed(numbers))
                self._starving.discard((holding.id, kind))
