"""Two faults for one request, each at a random step: the second often meets the recovery."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from cluster.generation import Timeline
from tests.faults.gates import GatedCluster, Verdict
from tests.faults.test_every_step import CONFIG, REQUEST, STEPS
from tests.tiny import until

ANSWER_S = 12.0
RANKS = ("prefill-0/0", "prefill-1/0", "decode-0/0", "decode-1/0")
DAMAGED: dict[str, tuple[Verdict, ...]] = {
    "write 0": ("fail", "drop", "corrupt"),
    "write 3": ("fail", "drop", "corrupt"),
    "pushed 0": ("swap",),
    "commit": ("corrupt",),
}


async def _befall(
    cluster: GatedCluster, step: str, name: str, dice: random.Random, story: list[str]
) -> None:
    """Whoever reaches `step` first stands there while something happens to that rank."""
    gate = cluster.gates.arm(step)
    await gate.reached()
    what = dice.choice(("cut", "kill", "damage"))
    story.append(f"{step}: {what} {name}")
    verdict: Verdict = "pass"
    match what:
        case "cut":
            cluster.cut(name)
        case "kill":
            killing = asyncio.create_task(cluster.kill(name))
            await asyncio.sleep(0)
            gate.open("fail" if step.startswith("write") else "pass")
            await killing
        case "damage":
            verdict = dice.choice(DAMAGED.get(step, ("pass",)))
    gate.open(verdict)


@pytest.mark.parametrize(
    "rounds", [12, pytest.param(300, marks=[pytest.mark.full, pytest.mark.timeout(600)])]
)
async def test_two_faults_leave_one_answer_and_no_memory(rounds: int) -> None:
    dice = random.Random(rounds)
    async with GatedCluster(prefill=2, decode=2, config=CONFIG) as cluster:
        expected = await cluster.answer(REQUEST)
        for _ in range(rounds):
            story: list[str] = []
            timeline = Timeline()
            faults = [
                asyncio.create_task(_befall(cluster, step, name, dice, story))
                for step, name in zip(dice.sample(STEPS, 2), dice.sample(RANKS, 2), strict=True)
            ]
            try:
                async with asyncio.timeout(ANSWER_S):
                    assert await cluster.answer(REQUEST, timeline) == expected
            except BaseException:
                print(story, timeline.summary(), sep="\n")
                raise
            finally:
                cluster.gates.disarm()
                for fault in faults:
                    if not fault.done():  # nobody has come to its step, or it still restarts
                        await asyncio.wait([fault], timeout=2.0 if len(story) == 2 else 0.0)
                    fault.cancel()
                    with suppress(asyncio.CancelledError):
                        await fault
            await until(lambda: len(cluster.router.members()) == len(RANKS))
            assert await cluster.settled(), story
