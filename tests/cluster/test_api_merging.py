"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from cluster.api.merging import merge


class Source:
    def __init__(self, length: int, error: Exception | None = None) -> None:
        self.length = length
        self.error = error
        self.made = 0
        self.closed = False

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for item in range(self.length):
                await asyncio.sleep(0)
                self.made += 1
                yield item
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


@pytest.mark.parametrize("count", [1, 3])
async def test_every_item_of_every_source_in_its_order(count: int) -> None:
    sources = [Source(index + 2) for index in range(count)]
    got = [item async for item in merge([source.items() for source in sources])]
    for index, source in enumerate(sources):
        assert [item for one, item in got if one == index] == list(range(source.length))


@pytest.mark.parametrize("count", [1, 3])
async def test_leaving_closes_all_and_none_has_run_ahead(count: int) -> None:
    sources = [Source(1000) for _ in range(count)]
    async with aclosing(merge([source.items() for source in sources])) as items:
        for _ in range(10):
            await anext(items)
        await asyncio.sleep(0.01)
    assert sum(source.made for source in sources) <= 10 + 2 * count
    assert all(source.closed for source in sources)


async def test_the_first_error_ends_all() -> None:
    sources = [Source(1000), Source(3, KeyError("lost"))]
    with pytest.raises(KeyError):
        [item async for item in merge([source.items() for source in sources])]
    assert all(source.closed for source in sources)
    assert sources[0].made < 10
