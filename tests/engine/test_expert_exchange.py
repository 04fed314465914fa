"""Ranks that exchange numbers and rows, as threads of one process and as processes over gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cluster.errors import StartupError
from cluster.messages import Address
from cluster.seat import Seat, listen
from engine.expert_collectives import interface_of, join
from engine.expert_exchange import GroupLost, Header, local_exchanges
from kernels.accelerator import CPU
from tests.engine.exchange_scripts import (
    HOST,
    in_processes,
    in_threads,
    numbers,
    one_goes,
    rests_and_rings,
    there_and_back,
    waits_for_all,
)

Run = Callable[..., list[Any]]

either_way = pytest.mark.parametrize("run", [in_threads, in_processes], ids=["threads", "gloo"])


@either_way
def test_all_ranks_hear_the_same_of_each_other(run: Run) -> None:
    told = run(3, numbers)
    headers = [Header(rows=n, version=5, digest=1 << 40, leaving=n % 2) for n in range(3)]
    assert [list(one) for one, _ in told] == [headers] * 3
    assert [counts for _, counts in told] == [[[0, 0], [1, 10], [2, 20]]] * 3


@either_way
def test_rows_go_where_they_are_wanted_and_come_back_in_order(run: Run) -> None:
    """Rank 1 has none; all of rank 2's go to rank 0, more than anybody else gets."""
    told = run(3, there_and_back, [[1, 2, 0], [0, 0, 0], [4, 0, 0]])
    assert [came for came, _ in told] == [[0, 200, 201, 202, 203], [1, 2], []]
    assert [back for _, back in told] == [[1, 2, 3], [], [201, 202, 203, 204]]


@either_way
def test_rows_that_stay_where_they_are_need_nobody(run: Run) -> None:
    told = run(2, there_and_back, [[2, 0], [0, 1]])
    assert told == [([0, 1], [1, 2]), ([100], [101])]


@either_way
def test_a_ring_wakes_all_ranks_whether_they_rest_already_or_not(run: Run) -> None:
    assert run(3, rests_and_rings, 7) == [7, 7, 7]


@either_way
@pytest.mark.parametrize("doing", ["agree", "dispatch"])
def test_a_rank_that_dies_is_an_error_to_the_others_at_once(run: Run, doing: str) -> None:
    waited = run(3, one_goes, doing)
    assert all(seconds < 10 for seconds in waited[:2])  # the calls' own limit is 20


def test_a_rank_that_does_not_come_is_an_error_after_a_while() -> None:
    with pytest.raises(GroupLost, match="rank 0 of 2 waited"):
        local_exchanges(2, timeout_s=0.05)[0].agree(Header())


def test_whoever_is_at_rest_hears_that_the_group_has_ended() -> None:
    ears, (one, other) = threading.Event(), local_exchanges(2)
    one.rest(ears.set)
    other.close()
    assert ears.is_set()


def test_ranks_that_nobody_joins_say_so() -> None:
    with listen(HOST) as listener:
        address = Address(host=HOST, port=listener.getsockname()[1])
        for seat in (
            Seat(0, 2, address).with_listener(listener),
            Seat(1, 2, Address(host=HOST, port=9)),
        ):
            with pytest.raises(StartupError, match=r"rank . of 2 has not met the others at"):
                join(seat, CPU, host=HOST, start_timeout_s=0.3, timeout_s=1)
    assert not torch.distributed.is_initialized()


def test_ranks_wait_until_all_have_loaded() -> None:
    first, second, last = in_processes(3, waits_for_all)
    assert first.endswith("2 to be ready")
    assert second.startswith("rank 1 of 3 waited 0 s for rank ")
    assert last == ""


def test_the_interface_of_an_address_is_known() -> None:
    assert interface_of(HOST) == "lo"
    assert interface_of("192.0.2.1") is None
