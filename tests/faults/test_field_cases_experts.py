"""Field cases FC-39, 40, 43 and 44: groups that share their experts, of any size, under any load.

Ranks are threads of this process; every answer is compared with the model as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.config import ClusterConfig, parse_config
from cluster.errors import StartupError
from cluster.expert_placement import Floats, Placement, extra_experts, place, rank_slots
from cluster.expert_sizes import expert_remarks
from cluster.messages import Request
from cluster.placement_file import GroupPlacement
from model.transformer import Transformer
from tests import groups
from tests.faults.field_cases import config_of
from tests.groups import GroupedCluster, KeptWeights, tiny_spec, tiny_weights
from tests.plain_loop import straight
from tests.tiny import TinyCluster, make_prompt, make_request, until

LONG = (pytest.mark.full, pytest.mark.timeout(600))
HANG_S = 100.0  # on a machine with thirty runnable threads a core
EXPERTS, LAYERS = 8, 10  # of the tiny model, of which a token takes two


# ------------------------------------------------------------------ FC-39: what does not divide


def with_groups(ranks: int, extra: int, **more: Any) -> ClusterConfig:
    return parse_config({"decode": {"ranks": ranks, "extra_experts": extra, **more}})


@pytest.mark.parametrize(
    ("experts", "ranks", "asked", "got"),
    [(8, 2, 1, 2), (8, 3, 0, 1), (8, 2, 2, 2), (8, 2, 8, 8), (256, 3, 0, 2)],
)
def test_fc39_redundant_experts_are_rounded_up_and_launch_says_so_first(
    experts: int, ranks: int, asked: int, got: int
) -> None:
    assert extra_experts(experts, asked, ranks) == got
    said = list(expert_remarks(with_groups(ranks, asked), experts))
    if got == asked:
        assert said == []
    else:
        (line,) = said
        for number in (f"{got} redundant", f"not {asked}", f"{experts} and", f"{ranks} ranks"):
            assert number in line


def test_fc39_an_exact_number_that_does_not_fit_names_the_smallest_that_does() -> None:
    with pytest.raises(ValueError, match=r"number of redundant experts from 1 on that does is 2,"):
        rank_slots(8, 1, 2)
    with pytest.raises(ValueError, match="smallest of all 2"):
        rank_slots(256, 0, 3)


def test_fc39_a_negative_number_is_refused_by_name() -> None:
    with pytest.raises(StartupError, match=r"decode\.extra_experts"):
        with_groups(2, -1)


def test_fc39_a_part_of_a_group_cannot_share_experts() -> None:
    with pytest.raises(StartupError, match="ep 3 with ranks 4"):
        with_groups(4, 0, ep=3)


def test_fc39_redundancy_without_groups_is_said_to_be_without_effect() -> None:
    (line,) = expert_remarks(with_groups(1, 4), 8)
    assert "decode.extra_experts 4 has no effect" in line


async def test_fc39_balancing_waits_for_no_group_that_shares_nothing() -> None:
    async with TinyCluster() as cluster:
        balance = cluster.router.experts.balance()
        assert balance.waiting_for == ()
        assert balance.groups == ()


# ------------------------------------------------------------------ FC-40: rebalances in mid-stream


def requests(tokens: int, number: int = 4) -> list[Request]:
    return [
        make_request(make_prompt(20 + 13 * each), f"r{each}", max_tokens=tokens)
        for each in range(number)
    ]


@asynccontextmanager
async def beside(work: Any) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def reshuffle(ranks: list[Any], seed: int, done: list[int]) -> None:
    """Another random placement for the group as soon as it has the last one."""
    draw = np.random.default_rng(seed)
    slots = [rank.experts.slots for rank in ranks]
    layers, size, each = slots[0].placed.placement.shape
    for version in count(1):
        table = np.empty((layers, size * each), np.int64)
        for layer in table:
            extra = draw.integers(0, EXPERTS, size * each - EXPERTS)
            layer[:] = draw.permutation(np.concatenate([np.arange(EXPERTS), extra]))
        placement = Placement(table.reshape(layers, size, each), EXPERTS)
        wanted = GroupPlacement(slots[0].placed.group, version, placement)
        for one in slots:
            one.offer(wanted)
        await until(lambda: all(one.placed.version > len(done) for one in slots), HANG_S)
        done.append(version)


@pytest.mark.parametrize(("tokens", "number"), [(12, 2), pytest.param(64, 4, marks=LONG)])
async def test_fc40_answers_are_the_same_through_every_kind_of_rebalance(
    tokens: int, number: int
) -> None:
    asked = requests(tokens, number)
    done: list[int] = []
    config = config_of(router={"colocated": True})
    async with GroupedCluster(config, prefill=(), decode=(2,), extra=2) as cluster:
        async with beside(reshuffle(cluster.decode, 0, done)):
            await until(lambda: bool(done), HANG_S)  # the first one comes before any traffic
            answers = await asyncio.gather(*(cluster.answer(one) for one in asked))
        assert len(done) > 3, "a rebalance in mid-stream was wanted"
        assert [tuple(one) for one in answers] == [straight(one) for one in asked]
        assert await cluster.settled()


async def test_fc40_the_router_rebalances_a_running_group_by_what_it_counts() -> None:
    """From counts of real requests to placements in use; the gate is open, windows are short."""
    asked = requests(12, 2)
    config = config_of(
        router={"colocated": True},
        experts={
            "report_s": 0.05,
            "window_steps": 4,
            "most_moved_share": 0.5,
            "seconds_a_token": 1.0,
            "expert_bytes": 1,
        },
    )
    async with GroupedCluster(config, prefill=(), decode=(2,), extra=2) as cluster:
        answers = await asyncio.gather(*(cluster.answer(one) for one in asked))
        assert [tuple(one) for one in answers] == [straight(one) for one in asked]

        def arrived() -> bool:
            (group,) = cluster.router.experts.balance().groups
            return any(one.outcome == "arrived" for one in group.decisions)

        await until(arrived, HANG_S)
        (group,) = cluster.router.experts.balance().groups
        given = next(one for one in group.decisions if one.outcome == "given")
        assert sum(given.after) < sum(given.before)
        again = await cluster.answer(asked[0])
        assert tuple(again) == straight(asked[0])
        assert await cluster.settled()


ZERO = np.zeros((LAYERS, EXPERTS))
ONE_EXPERT = np.eye(1, EXPERTS).repeat(LAYERS, 0) * 1000
IDLE_LAYER = (
    np.arange(1.0, LAYERS * EXPERTS + 1).reshape(LAYERS, EXPERTS)
    * (np.arange(LAYERS) != 3)[:, None]
)


@pytest.mark.parametrize("loads", [ZERO, ONE_EXPERT, IDLE_LAYER], ids=["zero", "one", "idle"])
def test_fc40_whatever_was_counted_every_expert_keeps_a_slot(loads: Floats) -> None:
    first = place(loads, ranks=2, slots_per_rank=5)
    again = place(loads, ranks=2, slots_per_rank=5, previous=first)
    for placement in (first, again):
        assert placement.copies().min() >= 1
        assert np.isfinite(placement.imbalance(loads)).all()


# ------------------------------------------------------------------ FC-43: empty and full ranks


@pytest.mark.parametrize("steps", [16, pytest.param(100, marks=LONG)])
async def test_fc43_a_rank_without_tokens_waits_for_nobody_and_nobody_for_it(steps: int) -> None:
    """One request at a time; its prompt apart, each step has one row on one rank, none beside."""
    request = make_request(make_prompt(5), max_tokens=steps)
    async with GroupedCluster(
        config_of(router={"colocated": True}), prefill=(), decode=(2,)
    ) as cluster:
        async with asyncio.timeout(HANG_S):
            assert tuple(await cluster.answer(request)) == straight(request)
        tokens = sorted(rank.engine.tokens for rank in cluster.decode)
        assert tokens == [0, steps]
        assert await cluster.settled()


class Biased:
    """Weights whose gates choose experts of the first rank only."""

    def __init__(self, weights: KeptWeights) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Tensor:
        found = self._weights[name]
        if ".ffn.gate.bias" in name and found.numel() == EXPERTS:
            return found + torch.tensor([1e4] * (EXPERTS // 2) + [0.0] * (EXPERTS // 2))
        return found

    def table_rows(self, name: str, rows: Tensor) -> Tensor:
        return self._weights.table_rows(name, rows)


async def test_fc43_all_tokens_to_one_rank_are_all_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More rows than a step of the busy rank has of its own: nothing is dropped, no buffer ends."""
    biased = Biased(tiny_weights())
    asked, config = requests(5, 3), config_of(router={"colocated": True})
    alone = Transformer(tiny_spec(), biased)
    async with TinyCluster(prefill=0, model=alone, config=config) as cluster:
        expected = [await cluster.answer(one) for one in asked]
    assert tuple(expected[0]) != straight(asked[0])  # the bias counts
    monkeypatch.setattr(groups, "tiny_weights", lambda: biased)
    async with GroupedCluster(config, prefill=(), decode=(2,)) as cluster:
        counted = [rank.experts.slots for rank in cluster.decode if rank.experts]
        async with asyncio.timeout(HANG_S):
            assert await asyncio.gather(*(cluster.answer(one) for one in asked)) == expected
        total = np.sum([one.take_counts()[0] for one in counted], axis=0)
        assert total[:, : EXPERTS // 2].sum() > 0
        assert total[:, EXPERTS // 2 :].sum() == 0


async def test_fc43_more_requests_than_a_step_takes_are_cut_into_steps() -> None:
    config = config_of(
        decode={"max_rows": 8, "num_slots": 16, "num_blocks": 128}, router={"colocated": True}
    )
    asked = [make_request(make_prompt(9 + each), f"r{each}", max_tokens=3) for each in range(9)]
    async with GroupedCluster(config, prefill=(), decode=(2,)) as cluster:
        async with asyncio.timeout(HANG_S):
            answers = await asyncio.gather(*(cluster.answer(one) for one in asked))
        assert [tuple(one) for one in answers] == [straight(one) for one in asked]


# ------------------------------------------------------------------ FC-44: sizes that differ


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
async def test_fc44_groups_of_different_sizes_hand_over_whole_state(
    prefill: int, decode: int
) -> None:
    """A row of state is never cut over ranks, so there is nothing that could be cut differently."""
    asked = [make_request(make_prompt(length), f"r{length}") for length in (17, 64, 300)]
    async with GroupedCluster(config_of(), prefill=(prefill,), decode=(decode,)) as cluster:
        async with asyncio.timeout(HANG_S):
            answers = await asyncio.gather(*(cluster.answer(one) for one in asked))
        assert [tuple(one) for one in answers] == [straight(one) for one in asked]
        assert await cluster.settled()
