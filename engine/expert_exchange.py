"""How the ranks of a group agree on a step and exchange rows between attention and experts.

A step begins with `agree`; each layer of experts then takes three calls: `share_counts`,
`dispatch` and `combine`. All ranks make the same calls in the same order, with rows or without.
The sizes of what travels follow from the counts, which every rank has, so nothing is dropped and
no buffer can be too small. Between steps a group may be at rest; `ring` wakes it.

`LocalExchange` joins ranks of one process; engine/expert_collectives.py those of several. Backends
with kernels of their own (DeepEP, NIXL-EP) fit the same calls: `dispatch` and `combine` are one
rank's half of an all-to-all with known sizes. A form for captured graphs, whose shapes must not
change, has `sizes` that are all `Header.rows` of the busiest rank times the experts of a row: what
`agree` has told, and never too small. Nothing here does that yet.
Knows nothing of experts, placements or requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from cluster.replica_dispatch import Ints

# R = ranks, E = experts, N = rows


class GroupLost(Exception):
    """The group cannot step any more: a rank has died, hangs, or is out of step. No request is to
    blame, and nothing that this rank computes from now on would be right."""


class Header(NamedTuple):
    """What each rank says of itself before a step."""

    rows: int = 0  # that it computes in this step; 0: it has nothing to do
    answers: int = 0  # of them, rows of running answers
    version: int = 0  # placement that it is ready to switch to; 0: none
    digest: int = 0  # of that placement
    leaving: int = 0  # 1: it takes part only until all others leave too


class Collectives(Protocol):
    """One rank's end of what some ranks do together, in the engine's threads.

    Each call raises GroupLost when a rank has gone or does not come in time.
    """

    index: int
    size: int

    def share_counts(self, counts_E: Ints) -> Ints:
        """[R, E] from each rank's [E]."""
        ...

    def dispatch(self, rows: Tensor, sizes: Ints) -> Tensor:
        """The rows [N, any] that all ranks have for this one, rank after rank.

        `sizes` [R, R] rows go from the first rank to the second; `rows` are ours, in the order of
        where they go.
        """
        ...

    def combine(self, rows: Tensor, sizes: Ints) -> Tensor:
        """The way back: `rows` as dispatch gave them, in the order in which they were sent."""
        ...


class Exchange(Collectives, Protocol):
    """A group's. Calls are made in the engine's thread, except `ring` and `close`."""

    def all_up(self, limit_s: float) -> None:
        """Returns when every rank has called it: from then on each can make steps. Blocks.

        Raises StartupError when some have not within the limit.
        """
        ...

    def agree(self, header: Header) -> tuple[Header, ...]:
        """The headers of all ranks, in their order."""
        ...

    def part(self, size: int) -> Collectives:
        """Of this rank and its neighbours: ranks 0 to size - 1, the next so many, and so on. All
        ranks of the group call it, equally often.
        """
        ...

    def rest(self, heard: Callable[[], None]) -> None:
        """All ranks have agreed that there is nothing to do: `heard` is called, in any thread, when
        one of them has rung after this."""
        ...

    def ring(self) -> None:
        """Wake all ranks that are at rest, or are about to be."""
        ...

    def close(self) -> None:
        """The others get GroupLost from whatever they wait for. In any thread, at any time."""
        ...


def local_exchanges(size: int, *, timeout_s: float = 30.0) -> list[LocalExchange]:
    """The ends of one group whose ranks are threads of this process."""
    meeting = _Meeting(size, timeout_s)
    return [LocalExchange(meeting, index) for index in range(size)]


class LocalExchange:
    def __init__(self, meeting: _Meeting, index: int) -> None:
        self._meeting = meeting
        self.index, self.size = index, meeting.size

    def all_up(self, limit_s: float) -> None:
        """Who starts threads knows when they are there, and may start them one after another."""

    def agree(self, header: Header) -> tuple[Header, ...]:
        return tuple(self._meeting.swap(self.index, header))

    def share_counts(self, counts_E: Ints) -> Ints:
        return np.stack(self._meeting.swap(self.index, counts_E))

    def dispatch(self, rows: Tensor, sizes: Ints) -> Tensor:
        return self._all_to_all(rows, sizes)

    def combine(self, rows: Tensor, sizes: Ints) -> Tensor:
        return self._all_to_all(rows, sizes.T)

    def part(self, size: int) -> LocalExchange:
        return LocalExchange(self._meeting.part(self.index // size, size), self.index % size)

    def rest(self, heard: Callable[[], None]) -> None:
        self._meeting.rest(self.index, heard)

    def ring(self) -> None:
        self._meeting.ring(self.index)

    def close(self) -> None:
        self._meeting.end()

    def _all_to_all(self, rows: Tensor, sizes: Ints) -> Tensor:
        parts = torch.split(rows, sizes[self.index].tolist())
        return torch.cat([theirs[self.index] for theirs in self._meeting.swap(self.index, parts)])


class _Meeting:
    """Where threads lay something down for each other and wait until all have."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._all_here = threading.Barrier(size)
        self._all_read = threading.Barrier(size)
        self._given: list[Any] = [None] * size
        self._lock = threading.Lock()
        self._rests = [0] * size  # how often each rank has come to rest
        self._rung = -1  # the last rest that somebody has ended
        self._resting: dict[int, Callable[[], None]] = {}
        self._parts: dict[tuple[int, int], _Meeting] = {}

    def part(self, number: int, size: int) -> _Meeting:
        with self._lock:
            return self._parts.setdefault((number, size), _Meeting(size, self._timeout_s))

    def swap(self, index: int, value: Any) -> Sequence[Any]:
        """What all have given, by index."""
        try:
            self._given[index] = value
            self._all_here.wait(self._timeout_s)
            found = list(self._given)
            self._all_read.wait(self._timeout_s)  # before anybody lays down the next
        except threading.BrokenBarrierError as error:
            self.end()
            raise GroupLost(
                f"rank {index} of {self.size} waited for another one that has gone, or that has "
                f"not come for {self._timeout_s:g} s"
            ) from error
        return found

    def rest(self, index: int, heard: Callable[[], None]) -> None:
        with self._lock:
            rung = self._rung >= self._rests[index]
            if not rung:
                self._resting[index] = heard
            self._rests[index] += 1
        if rung:
            heard()

    def ring(self, index: int) -> None:
        """The caller's last rest is everybody's, whether they have come to it or not."""
        with self._lock:
            self._rung = max(self._rung, self._rests[index] - 1)
        self._wake_all()

    def end(self) -> None:
        self._all_here.abort()
        self._all_read.abort()
        for part in self._parts.values():
            part.end()
        self._wake_all()

    def _wake_all(self) -> None:
        with self._lock:
            woken, self._resting = self._resting, {}
        for heard in woken.values():
            heard()
