"""The promise: groups of any size, with redundant experts or without, give the same tokens.

Ranks are threads of this process; the model is the tiny one, against a loop over it as a whole.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cluster.expert_placement import Placement
from cluster.placement_file import GroupPlacement
from engine.expert_slots import ExpertSlots
from tests.groups import GroupedCluster
from tests.plain_loop import straight
from tests.tiny import make_prompt, make_request, tiny_config

REQUESTS = [
    make_request(make_prompt(length), f"r{length}", max_tokens=5) for length in (3, 33, 70, 17)
]


@pytest.mark.parametrize(
    ("prefill", "decode", "extra"),
    [
        pytest.param((1,), (2,), 0, id="1-to-2"),
        pytest.param((2,), (4,), 3, id="2-to-4-with-copies"),
        pytest.param((4,), (2, 2), 0, id="4-to-2-and-2", marks=pytest.mark.full),
        pytest.param((2,), (1,), 3, id="2-to-1-with-copies", marks=pytest.mark.full),
    ],
)
async def test_groups_of_any_sizes_hand_over_to_each_other_and_answer_alike(
    prefill: tuple[int, ...], decode: tuple[int, ...], extra: int
) -> None:
    config = tiny_config()
    async with GroupedCluster(config, prefill=prefill, decode=decode, extra=extra) as cluster:
        answers = await asyncio.gather(*(cluster.answer(one) for one in REQUESTS))
        assert [tuple(answer) for answer in answers] == [straight(one) for one in REQUESTS]
        assert await cluster.settled()


async def test_experts_move_while_one_rank_answers_and_the_other_is_idle() -> None:
    """Another placement is offered as soon as the last one is in use; none of it is seen."""
    request = make_request(make_prompt(40), max_tokens=14, temperature=1.2, seed=5)
    config = tiny_config(router={"colocated": True})
    async with GroupedCluster(config, prefill=(), decode=(2,), extra=3) as cluster:
        slots = [rank.experts.slots for rank in cluster.decode if rank.experts is not None]
        switched, random = 0, np.random.default_rng(1)
        tokens: list[int] = []
        async for delta in cluster.deltas(request):
            tokens += delta.token_ids
            if all(one.placed.version == switched for one in slots):
                switched += 1
                wanted = another(slots[0], switched, random)
                for one in slots:
                    one.offer(wanted)
        assert tuple(tokens) == straight(request)
        assert switched > 2
        assert await cluster.settled()
    last = slots[0].last_switch
    assert last is not None
    assert last.experts > 0


def another(slots: ExpertSlots, version: int, random: np.random.Generator) -> GroupPlacement:
    """The same experts and copies in another order, in every layer."""
    placed = slots.placed
    layers, ranks, each = placed.placement.shape
    mixed = [random.permutation(layer.ravel()) for layer in placed.placement.slots]
    table = np.stack(mixed).reshape(layers, ranks, each)
    return GroupPlacement(placed.group, version, Placement(table, placed.placement.experts))
