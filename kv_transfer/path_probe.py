"""What one pair of ranks gets from its path: measured when they connect, not believed.

A path that silently fell back to something slower shows here, at the first connection. Knows
nothing of how bytes move: it times what it is given.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from torch import Tensor

from kv_transfer.transport import Transport

logger = logging.getLogger(__name__)

_SMALL_BYTES = 4096
_ROUNDS = 5


@dataclass(frozen=True)
class PathReport:
    """One pair as it was found. `gb_per_s` is of writes of `nbytes`, each waited for."""

    peer: str
    path: str
    latency_s: float  # median of a write of 4 KiB
    gb_per_s: float
    nbytes: int
    expected_gb_per_s: float  # less is a fault of the machine's set-up; 0: nothing is expected

    @property
    def is_slow(self) -> bool:
        return self.gb_per_s < self.expected_gb_per_s

    def __str__(self) -> str:
        found = (
            f"{self.peer} by {self.path}: {self.gb_per_s:.1f} GB/s at {self.nbytes >> 10} KiB, "
            f"{self.latency_s * 1e6:.0f} us at the least"
        )
        return f"{found}, {self.expected_gb_per_s:.0f} GB/s expected" if self.is_slow else found


def probe(
    transport: Transport,
    peer: str,
    source: Tensor,
    remote_offset: int,
    *,
    path: str | None = None,
    expected_gb_per_s: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> PathReport:
    """Write `source`, uint8 [n] in registered memory, into the peer's ring a few times.

    Only into cells that the peer has given to this rank and that nothing was announced for: what
    stands in such a cell counts for nothing. Logs what it found, as a warning if it is slow.
    Raises TransferError if the peer is gone.
    """

    def seconds(nbytes: int) -> float:
        found = []
        for _ in range(_ROUNDS):
            began = clock()
            transport.write(peer, source[:nbytes], remote_offset)
            found.append(clock() - began)
        return median(found)

    transport.write(peer, source, remote_offset)  # the first one wires up the pair
    large = seconds(source.numel())
    report = PathReport(
        peer=peer,
        path=path or transport.path,
        latency_s=seconds(min(_SMALL_BYTES, source.numel())),
        gb_per_s=source.numel() / large / 1e9,
        nbytes=source.numel(),
        expected_gb_per_s=expected_gb_per_s,
    )
    logger.log(logging.WARNING if report.is_slow else logging.INFO, "%s", report)
    return report
