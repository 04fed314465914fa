"""How memory of another process is got at: what a direct transport needs of a kind of memory.

Two forms: memory of GPUs that map each other's (cuda_reach.py) and of one host (host_reach.py).
Knows nothing of rings, peers' names or rows' meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kernels.push_table import Pieces
from kv_transfer.process_life import Life


class Move(NamedTuple):
    """What is to be done with some rows: copied, hashed where they come from, or both."""

    pieces: Pieces
    copy: bool = True
    hashed: bool = True


class Opened(Protocol):
    """A memory of another process; `address` is what pieces and copies name it by here."""

    @property
    def address(self) -> int: ...

    def close(self) -> None:
        """Nothing may be under way to it. Harmless if repeated."""


class Made(Protocol):
    def synchronize(self) -> None:
        """Wait until the move is made."""


class Moves(Protocol):
    """Moves planned together (device_moves.py): made one by one, their digests read once."""

    def start(self, number: int, after: Any = None) -> Made:
        """Begin it, after an event of the device if one is given."""

    def digests(self) -> list[int]:
        """Waits for all that was begun; then the same moves can be made again."""


class Reach(Protocol):
    """All of it may be called by any thread, and blocks."""

    @property
    def path(self) -> str:
        """For people and metrics: "nvlink/cuda_ipc"."""

    @property
    def spans_hosts(self) -> bool:
        """Whether a peer may be where the end of its process cannot be seen."""

    def takes(self, memory: Tensor) -> bool:
        """Whether it is memory of this kind."""

    def export(self, memory: Tensor) -> bytes:
        """What open() of another process needs. Raises StartupError if it cannot be reached."""

    def open(self, exported: bytes, owner: Life) -> Opened:
        """Raises TransferError if this process cannot get at it, ProtocolError for other bytes."""

    def copy(self, owner: Life, source: int, target: int, nbytes: int) -> None:
        """Bytes at an address here to an address there; done, and visible there, on return."""

    def push(self, owner: Life, pieces: Pieces, digests: int, after: Any = None) -> list[int]:
        """Copy the pieces, done and visible there on return; their digests, summed as given.

        `after`: what has to happen first, an event of the device. Rows at the sources must not
        change meanwhile.
        """

    def prepare_push(self, owner: Life, pieces: Pieces, digests: int) -> Callable[[], list[int]]:
        """A push to be made later, when its rows stand, by calling what this returns."""

    def move(self, pieces: Pieces, digests: int, *, copy: bool = True) -> list[int]:
        """The same between addresses of this process; without `copy` rows are only hashed."""

    def plan(self, moves: Sequence[Move], digests: int) -> Moves:
        """Everything of the moves that can be done before their rows exist."""

    def close(self) -> None:
        """Give back everything; nothing may be under way."""
