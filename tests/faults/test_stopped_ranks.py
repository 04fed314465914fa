"""Real processes, real NIXL and real direct pushes: ranks that are stopped or killed at a step.

The prefill rank, its gates and the caller are in this process; the decode ranks are not.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from cluster.config import ClusterConfig
from cluster.generation import Timeline
from tests.faults.gates import GatedCluster
from tests.plain_loop import straight
from tests.rank_process import RankProcess
from tests.tiny import load_tiny, make_prompt, make_request, tiny_config, until

pytestmark = pytest.mark.rank

T_DETECT_S = 1.0
PATHS = {"packed": "nixl/UCX", "direct": "host/cma"}


def config_of(path: str) -> ClusterConfig:
    return tiny_config(
        transfer={"path": path, "transport": "nixl", "cell_bytes": 65536},
        wire={"heartbeat_s": 0.2, "t_detect_s": T_DETECT_S},
    )


REQUEST = make_request(make_prompt(70), "gated", max_tokens=5)


class Mixed:
    """One gated prefill rank here, two decode ranks in processes of their own."""

    def __init__(self, path: str, cluster: GatedCluster, decode: dict[str, RankProcess]) -> None:
        self.path = path
        self.cluster = cluster
        self.decode = decode

    async def answer_over(self, step: str, fault: signal.Signals) -> float:
        """`fault` befalls the decode rank at that step; seconds from then to the whole answer."""
        timeline, gate = Timeline(), self.cluster.gates.arm(step)
        answer = asyncio.create_task(self.cluster.answer(REQUEST, timeline))
        await gate.reached()
        reserved = timeline.last("reserved")
        assert reserved is not None
        name = str(reserved.detail["decode"])
        self.decode[name].kill(fault)
        started = time.monotonic()
        gate.open()
        async with asyncio.timeout(20):
            assert tuple(await answer) == straight(REQUEST), timeline.summary()
        print(timeline.summary())
        taken_over, handed_over = timeline.last("taken_over"), timeline.last("handed_over")
        assert taken_over is not None
        assert handed_over is not None
        assert handed_over.detail["path"] == PATHS[self.path]
        assert taken_over.detail["decode"] != name
        return time.monotonic() - started


@pytest.fixture
async def mixed(path: str) -> AsyncIterator[Mixed]:
    straight(REQUEST)
    config = config_of(path)
    async with GatedCluster(prefill=1, decode=0, model=load_tiny(), config=config) as cluster:
        assert cluster.address is not None
        with ExitStack() as life:
            processes = [
                life.enter_context(RankProcess("decode", number, config, cluster.address))
                for number in range(2)
            ]
            endpoints = [await asyncio.to_thread(process.ready) for process in processes]
            await until(lambda: len(cluster.router.members()) == 3)
            names = [endpoint.name for endpoint in endpoints]
            yield Mixed(path, cluster, dict(zip(names, processes, strict=True)))


STOP, KILL = signal.SIGSTOP, signal.SIGKILL


LONG = pytest.mark.full


@pytest.mark.parametrize(
    ("path", "step", "fault"),
    [
        ("packed", "open_push", STOP),  # its NIXL hears nothing of ours: a write can never end
        pytest.param("packed", "write 0", STOP, marks=LONG),
        pytest.param("packed", "write 1", STOP, marks=LONG),
        pytest.param("packed", "commit", STOP, marks=LONG),
        pytest.param("packed", "write 0", KILL, marks=LONG),
        pytest.param("packed", "write 1", KILL, marks=LONG),
        pytest.param("packed", "commit", KILL, marks=LONG),
        ("direct", "write 1", KILL),
        pytest.param("direct", "write 0", KILL, marks=LONG),
        pytest.param("direct", "commit", KILL, marks=LONG),
        pytest.param("direct", "open_push", STOP, marks=LONG),
        pytest.param("direct", "write 0", STOP, marks=LONG),
        pytest.param("direct", "write 1", STOP, marks=LONG),
        pytest.param("direct", "commit", STOP, marks=LONG),
    ],
)
async def test_decode_is_lost_in_mid_handover_and_the_state_goes_to_another(
    step: str, fault: signal.Signals, mixed: Mixed
) -> None:
    limit_s = 3.0 + (T_DETECT_S if fault is STOP else 0.0)  # nothing but its silence tells
    steps = mixed.cluster.prefill[0].health().steps
    assert await mixed.answer_over(step, fault) < limit_s
    assert mixed.cluster.prefill[0].health().steps == steps + 3  # nothing was computed again
    assert await mixed.cluster.settled()
    for process in mixed.decode.values():
        if fault is STOP:
            process.kill(signal.SIGCONT)
            async with asyncio.timeout(5):
                while await asyncio.to_thread(process.held):
                    await asyncio.sleep(0.02)
