"""Ranks that are threads of one program: many of them leave together."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from offline.engine_args import EngineArgs, engine_config
from offline.rank_threads import RankThreads
from tests.offline.greedy_loop import MINI


async def test_a_group_leaves_at_once_however_few_threads_its_loop_had(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A rank that leaves waits, in a thread, for the others to leave too."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    args = EngineArgs(expert_parallel_size=2, max_model_len=64, max_num_seqs=1)
    config = engine_config(MINI, args, device="cpu", state_bytes=1 << 24, environ={})
    ranks = RankThreads(config)
    await ranks.start()
    with caplog.at_level(logging.INFO):
        await ranks.stop()
    assert not [one for one in caplog.records if "has not ended" in one.getMessage()]
