"""What carries the ranks of an offline engine. Knows nothing of prompts and answers."""

from __future__ import annotations

from typing import Protocol

from cluster.generation import Caller


class Carrier(Protocol):
    """From start() to stop() there are ranks, a router that knows them all, and a caller."""

    async def start(self) -> Caller:
        """StartupError, in one line, if they cannot be."""
        ...

    async def stop(self) -> None:
        """All are gone, and their memory; also after a start that failed half-way."""
        ...
