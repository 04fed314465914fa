"""Experts over a group: the same bits whatever its size, its copies, its placement, its idle ranks.

Ranks are threads; each has a model of its own whose routed experts are shared, and is compared with
the whole model in one piece. Prompts and answers of several requests advance together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.expert_placement import Placement
from cluster.placement_file import GroupPlacement
from engine.expert_exchange import Exchange, GroupLost, LocalExchange, local_exchanges
from engine.expert_group import ExpertGroup
from model.batch import Chunk, build_batch
from model.cache import Cache
from model.dense_cache import DenseCache
from model.state import state_fields
from model.transformer import Transformer
from model.weights import random_weights
from tests.engine.exchange_scripts import in_threads
from tests.groups import KeptWeights
from tests.model.cases import BY_NAME

SPEC = BY_NAME["micro"].spec  # 10 layers of 6 experts, 2 a row
LENGTHS = (5, 19, 1, 11)  # prompts, after which two more rows follow one by one


class Lopsided(KeptWeights):
    """All tokens choose experts 0 and 1."""

    def __getitem__(self, name: str) -> Tensor:
        if not name.endswith("gate.bias"):
            return super().__getitem__(name)
        return torch.tensor([100.0, 50.0, *[0.0] * 4])[: len(super().__getitem__(name))]


@cache
def weights(lopsided: bool = False) -> KeptWeights:
    torch.set_num_threads(1)
    return (Lopsided if lopsided else KeptWeights)(random_weights(SPEC, 0))


@cache
def ids(length: int) -> list[int]:
    random = np.random.default_rng(length)
    return [int(one) for one in random.integers(3, 250, length + 2)]


class Requests:
    """Some requests of one rank, over a cache; `forward` takes all one step further."""

    def __init__(self, model: Transformer, lengths: Sequence[int]) -> None:
        self._model, self._lengths = model, lengths
        self._cache = DenseCache(state_fields(SPEC), len(lengths))
        self._done = [0] * len(lengths)

    def forward(self, cache: Cache | None = None) -> list[Tensor]:
        """Logits [V] of each one's newest row."""
        chunks = []
        for number, length in enumerate(self._lengths):
            start = self._done[number]
            self._done[number] = max(length, start + 1)
            chunks.append(Chunk(ids(length), start, self._done[number] - start))
        batch = build_batch(chunks, image_token_id=SPEC.image_token_id, ngram=4)
        with torch.inference_mode():
            return list(self._model.forward(batch, cache or self._cache))


@cache
def expected(length: int, lopsided: bool = False) -> list[Tensor]:
    """Logits of one request alone, step after step, by the whole model."""
    alone = Requests(Transformer(SPEC, weights(lopsided)), [length])
    return [alone.forward()[0] for _ in range(3)]


def part(exchange: Exchange, extra: int, lopsided: bool = False) -> tuple[ExpertGroup, Transformer]:
    experts = ExpertGroup.first(exchange, "group", SPEC, extra)
    return experts, Transformer(SPEC, weights(lopsided), make_experts=experts.make_experts)


def all_steps(exchange: Exchange, extra: int, lopsided: bool) -> dict[int, list[Tensor]]:
    """What each request of this rank gets; the last rank of several has none."""
    experts, model = part(exchange, extra, lopsided)
    busy = max(exchange.size - 1, 1)
    mine = LENGTHS[exchange.index :: busy] if exchange.index < busy else ()
    requests = Requests(model, mine)
    found: dict[int, list[Tensor]] = {length: [] for length in mine}
    for _ in range(3):
        with experts.step():
            for length, logits in zip(mine, requests.forward() if mine else [], strict=True):
                found[length].append(logits)
    return found


@pytest.mark.parametrize(("size", "extra"), [(1, 0), (2, 0), (2, 2), (4, 0), (4, 6)])
def test_a_group_of_any_size_computes_the_same_bits(size: int, extra: int) -> None:
    found = in_threads(size, all_steps, extra, False)
    together = {length: logits for one in found for length, logits in one.items()}
    assert together.keys() == set(LENGTHS)
    for length, logits in together.items():
        assert all(map(torch.equal, logits, expected(length)))


def test_all_rows_may_go_to_one_rank() -> None:
    found = in_threads(3, all_steps, 0, True)
    for length, logits in found[1].items():
        assert all(map(torch.equal, logits, expected(length, True)))
        assert not torch.equal(logits[0], expected(length)[0])


def rebalanced(exchange: Exchange, placements: Sequence[Placement]) -> list[Tensor]:
    """Another placement before every step; the first comes before any token has."""
    experts, model = part(exchange, 2)
    requests = Requests(model, LENGTHS[exchange.index :: 2])
    logits: list[Tensor] = []
    for version, placement in enumerate(placements, 1):
        ready = Event()
        experts.slots.on_prepared = ready.set
        experts.slots.offer(GroupPlacement("group", version, placement))
        assert ready.wait(20)
        experts.slots.switch(experts.slots.announce())
        experts.renew_tables()
        with experts.step():
            logits += requests.forward()
    counts, steps = experts.slots.take_counts()
    assert steps == len(placements)
    assert counts.sum(1).tolist() == [counts[0].sum()] * SPEC.num_hidden_layers
    return logits


def test_a_new_placement_at_every_step_changes_no_bit() -> None:
    random = np.random.default_rng(3)
    placements = [
        Placement(
            np.stack(
                [
                    random.permutation([*range(6), *random.integers(0, 6, 2)]).reshape(2, 4)
                    for _ in range(SPEC.num_hidden_layers)
                ]
            ),
            6,
        )
        for _ in range(3)
    ]
    for index, logits in enumerate(in_threads(2, rebalanced, placements)):
        wanted = [expected(length) for length in LENGTHS[index::2]]
        assert all(map(torch.equal, logits, [one[step] for step in range(3) for one in wanted]))


class FailingCache(DenseCache):
    """What fails a forward in its fourth layer."""

    def write(self, field: str, layer: int, *where: Any) -> None:
        if layer == 3:
            raise RuntimeError("poisoned")
        super().write(field, layer, *where)


def one_fails(exchange: Exchange) -> list[Tensor]:
    experts, model = part(exchange, 0)
    requests = Requests(model, [LENGTHS[exchange.index]])
    logits: list[Tensor] = []
    for step in range(3):
        if exchange.index == 0 and step == 1:
            with pytest.raises(RuntimeError, match="poisoned"), experts.step():
                requests.forward(FailingCache(state_fields(SPEC), 1))
        else:
            with experts.step():
                logits += requests.forward()
    return logits


def test_a_forward_that_fails_on_one_rank_leaves_the_others_in_step() -> None:
    failed, other = in_threads(2, one_fails)
    assert len(failed) == 2
    assert all(map(torch.equal, other, expected(LENGTHS[1])))


def test_a_layer_that_fails_between_ranks_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could tell whose rows those were."""

    def fail(*_: object) -> Tensor:
        raise RuntimeError("the device")

    (exchange,) = local_exchanges(1)
    experts, model = part(exchange, 0)
    monkeypatch.setattr(LocalExchange, "combine", fail)
    with pytest.raises(GroupLost, match=r"layer 0 failed .*the device"), experts.step():
        Requests(model, [5]).forward()
