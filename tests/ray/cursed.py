"""Ranks that cannot start."""

from __future__ import annotations

import asyncio
from typing import Any


class CursedRank:
    def __init__(self, **_: Any) -> None: ...

    async def start(self) -> None:
        raise RuntimeError("the weights are cursed")


class HangingRank(CursedRank):
    async def start(self) -> None:
        await asyncio.Event().wait()
