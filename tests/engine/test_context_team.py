"""A team runs a rank's prompts together: its leader's tokens and state are those of one alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch

from engine.context_step import ContextStep
from engine.context_team import ContextTeam, TeamModel
from engine.executor import Executor
from engine.expert_exchange import local_exchanges
from engine.request import Running
from engine.runner import DenseRunner
from engine.schedule import Grant
from engine.step_loop import Work
from kv_transfer.blocks import BlockPool
from kv_transfer.layout import Layout
from kv_transfer.slab import Slab
from model.batch import Chunk, build_batch
from model.state import state_fields
from tests.plain_loop import straight
from tests.tiny import load_tiny, make_prompt, make_request

BLOCK, TOKENS = 16, 4


class Member:
    """One rank of a team, with a slab of its own."""

    def __init__(self, team: ContextTeam) -> None:
        model = load_tiny()
        self.team, self.fields = team, state_fields(model.spec)
        self.slab = Slab(Layout(self.fields, BLOCK), 64, 8)
        self.slab.blocks.zero_()
        self.slab.slots.zero_()
        self.runner = DenseRunner(TeamModel(model, team), self.slab, team=team)
        self.executor = Executor(self.runner)


@contextmanager
def team_of(size: int) -> Iterator[list[Member]]:
    ends = local_exchanges(size)
    yield [Member(ContextTeam(end, torch.device("cpu"), torch.float32)) for end in ends]
    for end in ends:
        end.close()


def step(members: Sequence[Member], work: Sequence[Work]) -> list[int | None]:
    leader, *others = members
    assert leader.team.leads
    with ThreadPoolExecutor(len(others)) as threads:
        following = [threads.submit(other.runner.follow) for other in others]
        outcomes = leader.executor(work)
        for one in following:
            one.result(30)
    return [getattr(outcome, "token", None) for outcome in outcomes]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_prompts_and_answers_beside_each_other_are_those_of_one_rank(size: int) -> None:
    torch.set_num_threads(1)
    requests = [
        make_request(make_prompt(length), f"{length}", max_tokens=TOKENS, temperature=1.0, seed=3)
        for length in (1, 45, 100)
    ]
    pool = BlockPool(64, 8, BLOCK)
    with team_of(size) as members, ExitStack() as leases:
        running = [
            Running(one, leases.enter_context(pool.lease(one.longest)), list(one.token_ids))
            for one in requests
        ]
        while any(one.output_length < TOKENS for one in running):
            live = [one for one in running if one.output_length < TOKENS]
            counts = [min(32, len(one.token_ids) - one.done) for one in live]
            work = [
                Work(one, Grant(0, one.done, count, one.done + count == len(one.token_ids)))
                for one, count in zip(live, counts, strict=True)
            ]
            for one, count, token in zip(live, counts, step(members, work), strict=True):
                one.done += count
                if token is not None:
                    one.token_ids.append(token)
        for one in running:
            assert tuple(one.token_ids[one.request.prompt_length :]) == straight(one.request)
        leader, *others = members
        for other in others:
            assert torch.equal(other.slab.blocks, leader.slab.blocks)
            assert torch.equal(other.slab.slots, leader.slab.slots)
        assert leader.slab.blocks.any()


def test_a_batch_that_cannot_be_made_holds_nobody_up() -> None:
    request = make_request(make_prompt(5), max_tokens=1)
    with team_of(2) as members, BlockPool(64, 8, BLOCK).lease(6) as lease:
        beyond = Work(
            Running(request, lease, list(request.token_ids)), Grant(0, 0, 9, samples=True)
        )
        heard = threading.Event()

        def follow() -> None:
            members[1].runner.follow()
            heard.set()

        other = threading.Thread(target=follow)
        other.start()
        with pytest.raises(ValueError, match="lacks token ids"):
            members[0].executor([beyond])
        other.join(30)
        assert heard.is_set()


def test_a_step_survives_as_numbers() -> None:
    chunks = [Chunk([5, 6, 7, 8], 1, 3, 2), Chunk([9] * 20, 0, 20, logits="none")]
    batch = build_batch(chunks, image_token_id=7, ngram=3)
    pool = BlockPool(8, 4, BLOCK)
    with pool.lease(4) as short, pool.lease(20) as long:
        numbers = ContextStep(batch, [short, long]).numbers()
        found = ContextStep.of(numbers)
        for one, lease in zip(found.leases, (short, long), strict=True):
            assert (one.block_ids, one.slot) == (lease.block_ids, lease.slot)
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(found.batch, name), value), name
    with pytest.raises(ValueError, match="a step of"):
        ContextStep.of(np.append(numbers, 0))
