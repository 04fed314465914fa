"""What the tests of sockets and requests are held to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio


@pytest_asyncio.fixture
async def nothing_is_left_behind(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """In debug mode: no task outlives its test, and asyncio has nothing to complain about."""
    asyncio.get_running_loop().set_debug(True)
    yield
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    left = (await asyncio.wait(tasks, timeout=0.2))[1] if tasks else None  # some are just ending
    assert not left, f"still running: {left}"
    complaints = [
        record.getMessage()
        for record in caplog.get_records("call")
        if record.name == "asyncio" and record.levelno >= logging.ERROR
    ]
    assert not complaints
