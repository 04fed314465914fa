"""How much memory requests hold in pictures that they have brought, and no more than so much."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import NoRoom


class HeldBytes:
    """Of one process; used from one thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        """For as long as the block lasts. NoRoom if it would be too much."""
        if self.held + count > self._limit:
            raise NoRoom(
                f"images of running requests hold {self.held} bytes and this one has {count}; at "
                f"most {self._limit} are held (images.held_bytes)",
                retry_after_s=1.0,
            )
        self.held += count
        try:
            yield
        finally:
            self.held -= count
