"""One answer as its reader sees it: deltas to iterate over, and a way to say where it ends.

Knows nothing of how the deltas are made.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType

from cluster.token_order import Delta


class Answer(AsyncGenerator[Delta, None]):
    """An asynchronous generator; leaving it early (aclose, break, del) cancels the request."""

    def __init__(self, deltas: AsyncGenerator[Delta, None], stop: Callable[[int], None]) -> None:
        self._deltas = deltas
        self._stop = stop

    async def stop(self, index: int) -> None:
        """The answer ends before output index `index`, by what the reader found in it.

        Like aclose(), but the request has ended well, and its ranks are told how long it is: a
        cancelled one may have been of any length. To be called between two deltas.
        """
        self._stop(index)
        await self.aclose()

    def __anext__(self) -> Awaitable[Delta]:  # type: ignore[override]  # without a frame between
        return self._deltas.__anext__()

    async def asend(self, value: None) -> Delta:
        return await self._deltas.asend(value)

    async def athrow(  # type: ignore[override]
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> Delta:
        error = kind if isinstance(kind, BaseException) else value or kind()
        return await self._deltas.athrow(error)

    async def aclose(self) -> None:
        await self._deltas.aclose()
