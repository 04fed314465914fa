"""A cache that passes on when a layer's per-token rows are final, while its forward still runs.

Only the forward knows: a row that was sent before would be wrong on both sides, and no digest
would tell. Knows nothing of who wants to know.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from model.cache import Cache


class WatchedCache:
    """`cache`, for one forward; `on_final(layer)` is called as soon as the forward says so."""

    def __init__(self, cache: Cache, on_final: Callable[[int], None]) -> None:
        self._cache = cache
        self._on_final = on_final

    def write(self, field: str, layer: int, requests: Tensor, rows: Tensor, values: Tensor) -> None:
        self._cache.write(field, layer, requests, rows, values)

    def read(self, field: str, layer: int, requests: Tensor, rows: Tensor) -> Tensor:
        return self._cache.read(field, layer, requests, rows)

    def rows_are_final(self, layer: int) -> None:
        self._cache.rows_are_final(layer)
        self._on_final(layer)
