"""Slots of one rank: what is offered is brought in peace, and put in place when all are ready."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.expert_placement import Placement
from cluster.placement_file import GroupPlacement
from engine.expert_slots import NOTHING, ExpertSlots, Fetch, Moved, Prepared
from engine.experts import LayerSlots, SlotWeights, ValueForm
from model.options import ModelOptions
from tests.groups import tiny_spec

EXPERTS = 4  # on two ranks of two slots and one redundant one each, in two layers
FIRST = [[0, 1, 2], [3, 0, 1]]
OTHER = [[0, 3, 3], [1, 2, 0]]


class Numbered:
    """Weights whose values say which expert they are of; it counts what is read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        *_, layer, expert, _part = name.split(".")
        return torch.full((4, 4), float(100 * int(layer) + int(expert)))

    def table_rows(self, name: str, rows: Tensor) -> Tensor:
        raise KeyError(name)


def placed(version: int, *layers: Sequence[Sequence[int]], group: str = "g") -> GroupPlacement:
    return GroupPlacement(group, version, Placement(np.array(layers), EXPERTS))


class Rank:
    """Rank 0, and the wait for what it prepares."""

    def __init__(self, fetch: Fetch | None = None) -> None:
        self.weights = Numbered()
        self.slots = ExpertSlots(placed(0, FIRST, FIRST), index=0, fetch=fetch)
        form = ValueForm(self.weights, tiny_spec(), ModelOptions())
        self.layers = [LayerSlots(form, f"layers.{n}.", FIRST[0]) for n in range(2)]
        for layer in self.layers:
            self.slots.add_layer(layer)
        self.weights.read.clear()
        self._ready = threading.Semaphore(0)
        self.slots.on_prepared = self._ready.release

    def ready(self) -> Prepared:
        assert self._ready.acquire(timeout=20)
        return self.slots.announce()

    def held(self, layer: int) -> list[int]:
        """What the values in the slots say."""
        found = [self.layers[layer].copy_of(expert) for expert in range(EXPERTS)]
        holds = self.layers[layer].holds
        for expert, copy in enumerate(found):
            assert copy is None or bool((copy.tensors[1] == 100 * layer + expert).all())
        return [
            next(expert for expert in range(EXPERTS) if holds(slot, expert)) for slot in range(3)
        ]


def test_a_rank_begins_with_the_placement_of_its_group() -> None:
    rank = Rank()
    assert rank.slots.placed.version == 0
    assert [rank.held(layer) for layer in (0, 1)] == [FIRST[0], FIRST[0]]
    assert (rank.slots.announce(), rank.slots.preparing()) == (NOTHING, None)


def test_an_offer_changes_nothing_until_it_is_switched_to() -> None:
    rank = Rank()
    wanted = placed(4, OTHER, FIRST)
    rank.slots.offer(wanted)
    ready = rank.ready()
    assert ready == Prepared.of(wanted)
    assert rank.slots.preparing() == "version 4: ready, waits for the other ranks"
    assert rank.held(0) == FIRST[0]
    rank.slots.switch(ready)
    assert [rank.held(layer) for layer in (0, 1)] == [OTHER[0], FIRST[0]]
    assert rank.slots.placed is wanted
    assert (rank.slots.announce(), rank.slots.preparing()) == (NOTHING, None)


def test_an_expert_is_read_once_and_one_that_is_here_is_not_read_at_all() -> None:
    rank = Rank()
    rank.slots.offer(placed(1, [[1, 3, 3], [2, 0, 0]], FIRST))
    rank.slots.switch(rank.ready())
    assert {name.rpartition(".")[0] for name in rank.weights.read} == {"layers.0.3"}
    last = rank.slots.last_switch
    assert last is not None
    assert (last.version, last.experts, last.nbytes) == (1, 3, 4 * (4 * 8 + 4 * 4))


def test_experts_come_from_a_peer_that_has_them() -> None:
    asked: list[Moved] = []

    def fetch(moved: Moved) -> SlotWeights:
        asked.append(moved)
        return SlotWeights(moved.name, (torch.full((4, 8), 3.0), torch.full((4, 4), 3.0)))

    rank = Rank(fetch)
    rank.slots.offer(placed(1, OTHER, FIRST))
    rank.slots.switch(rank.ready())
    assert asked == [Moved(0, 3, "layers.0.3.", (1,))]
    assert (rank.held(0), rank.weights.read) == (OTHER[0], [])


@pytest.mark.parametrize(
    "brought",
    [
        SlotWeights("layers.1.3.", (torch.zeros(4, 8), torch.zeros(4, 4))),
        SlotWeights("layers.0.3.", (torch.zeros(4, 6), torch.zeros(4, 4))),
    ],
    ids=["of another expert", "of another shape"],
)
def test_weights_that_are_not_those_that_were_asked_for_are_never_used(
    brought: SlotWeights,
) -> None:
    rank = Rank(lambda moved: brought)
    rank.slots.offer(placed(1, OTHER, FIRST))
    _until(lambda: "failed" in (rank.slots.preparing() or ""))
    assert (rank.slots.announce(), rank.held(0)) == (NOTHING, FIRST[0])


def test_a_peer_that_fails_leaves_all_as_it_was_and_the_next_offer_is_taken() -> None:
    answers = iter([OSError("the peer has gone"), None])

    def fetch(moved: Moved) -> None:
        if (error := next(answers)) is not None:
            raise error

    rank = Rank(fetch)
    rank.slots.offer(placed(1, OTHER, FIRST))
    _until(lambda: rank.slots.preparing() == "version 1: failed: OSError: the peer has gone")
    rank.slots.offer(placed(2, OTHER, FIRST))
    rank.slots.switch(rank.ready())
    assert rank.held(0) == OTHER[0]


def test_a_newer_offer_replaces_one_on_its_way() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def fetch(moved: Moved) -> None:
        begun.set()
        assert go_on.wait(20)

    rank = Rank(fetch)
    rank.slots.offer(placed(1, OTHER, OTHER))
    assert begun.wait(20)
    assert rank.slots.preparing() == "version 1: 0 of 2 experts are here"
    rank.slots.offer(placed(2, FIRST, OTHER))
    go_on.set()
    rank.slots.switch(rank.ready())
    assert rank.slots.placed.version == 2
    assert [rank.held(layer) for layer in (0, 1)] == [FIRST[0], OTHER[0]]


def test_what_was_announced_can_be_switched_to_though_a_newer_offer_has_come() -> None:
    """Both are ready before the switch; the newer one then lacks what the older has changed."""
    rank = Rank()
    rank.slots.offer(placed(1, OTHER, FIRST))
    announced = rank.ready()
    rank.slots.offer(placed(2, FIRST, OTHER))
    assert rank._ready.acquire(timeout=20)
    rank.slots.switch(announced)
    assert rank.held(0) == OTHER[0]
    rank.slots.switch(rank.ready())
    assert (rank.slots.placed.version, rank.held(0), rank.held(1)) == (2, FIRST[0], OTHER[0])


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (placed(5, OTHER, FIRST, group="h"), "offered to g"),
        (placed(5, OTHER), "it has|g has"),
        (placed(2, OTHER, FIRST), "has or fetches version 3"),
        (placed(3, FIRST, FIRST), "two placements of version 3"),
    ],
)
def test_a_placement_that_cannot_be_right_is_refused(wanted: GroupPlacement, why: str) -> None:
    rank = Rank()
    rank.slots.offer(placed(3, OTHER, FIRST))
    ready = rank.ready()
    for _ in ("fetched", "in use"):
        with pytest.raises(ValueError, match=why):
            rank.slots.offer(wanted)
        if rank.slots.placed.version == 0:
            rank.slots.switch(ready)


def test_the_same_offer_again_changes_nothing() -> None:
    rank = Rank()
    rank.slots.offer(placed(1, OTHER, FIRST))
    ready = rank.ready()
    rank.slots.offer(placed(1, OTHER, FIRST))
    rank.slots.switch(ready)
    rank.slots.offer(placed(1, OTHER, FIRST))
    assert rank.slots.preparing() is None


def test_counts_are_taken_once() -> None:
    slots = Rank().slots
    slots.count(np.array([[1, 0, 2, 0], [0, 0, 0, 3]]))
    slots.count(np.array([[1, 0, 0, 0], [0, 0, 0, 0]]))
    counts, steps = slots.take_counts()
    assert (counts.tolist(), steps) == ([[2, 0, 2, 0], [0, 0, 0, 3]], 2)
    counts, steps = slots.take_counts()
    assert (int(counts.sum()), steps) == (0, 0)


def _until(reached: Callable[[], bool]) -> None:
    """For what the fetching thread brings about and tells nobody."""
    for thread in threading.enumerate():
        if thread.name.startswith("experts of"):
            thread.join(20)
    assert reached()
