"""A rank that cannot start."""

from __future__ import annotations

from typing import Any


class CursedRank:
    def __init__(self, **_: Any) -> None: ...

    async def start(self) -> None:
        raise RuntimeError("the weights are cursed")
