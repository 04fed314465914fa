"""Membership and the choice of ranks: values in, values out."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from cluster.limits import longest_served
from cluster.membership import Roster
from cluster.messages import Load, Member, NoWorkers, Role, Route, Routed
from cluster.policy import choose
from tests.cluster.fakes import LOAD, endpoint


def member(
    name: str,
    role: Role = "decode",
    *,
    incarnation: str = "1",
    draining: bool = False,
    **load: float,
) -> Member:
    return Member(
        endpoint=endpoint(name, role, f"{name}:{incarnation}"),
        load=LOAD.model_copy(update=load),
        draining=draining,
    )


P = member("p0", "prefill")
ROUTE = Route(request_id="r", length=100, longest=160)  # 10 blocks of 16


def pick(*members: Member, route: Route = ROUTE, colocated: bool = False) -> Routed | NoWorkers:
    roster = Roster.of(members, now=0.0)
    return choose(roster, route, colocated=colocated, retry_after_s=0.5)


def decode_of(*members: Member, route: Route = ROUTE) -> str:
    answer = pick(P, *members, route=route)
    assert isinstance(answer, Routed)
    return answer.decode.name


def prefill_of(*members: Member, route: Route = ROUTE) -> str:
    answer = pick(member("d0"), *members, route=route)
    assert isinstance(answer, Routed)
    assert answer.prefill is not None
    return answer.prefill.name


# ------------------------------------------------------------------ who is chosen


def test_ranks_of_one_group_are_chosen_each_by_what_it_has_left_itself() -> None:
    """Blocks and requests are a rank's own, whoever it shares experts with."""
    full, free = member("d0/0", free_blocks=0), member("d0/1", running=2)
    other = member("d1/0", running=3)
    assert decode_of(full, free, other) == "d0/1"
    roster, chosen = Roster.of((P, full, free, other), now=0.0), []
    for _ in range(4):
        routed = choose(roster, ROUTE, colocated=False, retry_after_s=0.5)
        assert isinstance(routed, Routed)
        chosen.append(routed.decode.name)
        roster = roster.charge(ROUTE, routed)
    assert chosen == ["d0/1", "d1/0", "d0/1", "d1/0"]


def test_the_prefill_rank_with_the_fewest_queued_tokens_is_chosen() -> None:
    busy = member("p1", "prefill", waiting_tokens=500)
    idle = member("p2", "prefill", waiting_tokens=100, running=3)
    assert prefill_of(busy, idle) == "p2"


def test_the_decode_rank_with_the_fewest_requests_is_chosen() -> None:
    assert decode_of(member("d0", running=3), member("d1", running=2)) == "d1"
    assert decode_of(member("d0", running=2, waiting=1), member("d1", running=2)) == "d1"


def test_of_equally_busy_ones_the_emptier_is_chosen() -> None:
    assert decode_of(member("d0", free_blocks=20), member("d1", free_blocks=30)) == "d1"


def test_a_rank_with_room_comes_before_an_idle_one_without() -> None:
    full = member("d0", free_blocks=9)
    no_slot = member("d1", free_slots=0)
    roomy = member("d2", running=7, free_blocks=10)
    assert decode_of(full, no_slot, roomy) == "d2"
    assert prefill_of(
        member("p0", "prefill", free_blocks=6), member("p1", "prefill", waiting_tokens=9)
    ) == ("p1")


def test_a_full_rank_is_better_than_none() -> None:
    """Only the rank itself knows when it will have room."""
    assert decode_of(member("d0", free_slots=0)) == "d0"


def test_a_draining_lost_or_short_rank_is_never_chosen() -> None:
    good = member("d9", running=100, free_blocks=0)
    lost = member("d1")
    route = ROUTE.model_copy(update={"avoid": (lost.endpoint.incarnation,)})
    short = member("d2", max_length=159)
    assert decode_of(member("d0", draining=True), lost, short, good, route=route) == "d9"


def test_the_longest_that_fits_exactly_is_taken() -> None:
    assert decode_of(member("d0", max_length=160)) == "d0"


def test_colocated_needs_no_prefill_rank() -> None:
    answer = pick(member("d0"), colocated=True)
    assert answer == Routed(prefill=None, decode=member("d0").endpoint)


def test_a_place_alone_needs_no_prefill_rank() -> None:
    route = ROUTE.model_copy(update={"decode_only": True})
    assert pick(member("d0"), route=route) == Routed(prefill=None, decode=member("d0").endpoint)


LOADS = st.builds(
    Load,
    waiting=st.integers(0, 3),
    running=st.integers(0, 3),
    waiting_tokens=st.integers(0, 300),
    free_blocks=st.integers(0, 20),
    free_slots=st.integers(0, 2),
    max_length=st.sampled_from([0, 128, 256]),
    block_tokens=st.just(16),
)
MEMBERS = st.lists(
    st.builds(
        lambda name, role, load, draining: Member(
            endpoint=endpoint(name, role, f"{name}:1"), load=load, draining=draining
        ),
        st.sampled_from([f"m{n}" for n in range(8)]),
        st.sampled_from(["prefill", "decode"]),
        LOADS,
        st.booleans(),
    ),
    max_size=8,
    unique_by=lambda one: one.endpoint.name,
)


@given(MEMBERS, st.randoms(use_true_random=False), st.booleans())
def test_the_choice_does_not_depend_on_the_order_of_reports(
    members: list[Member], order: random.Random, colocated: bool
) -> None:
    shuffled = members.copy()
    order.shuffle(shuffled)
    assert pick(*members, colocated=colocated) == pick(*shuffled, colocated=colocated)


@given(MEMBERS)
def test_there_is_a_choice_exactly_when_both_pools_have_one_who_may(
    members: list[Member],
) -> None:
    able = [one for one in members if not one.draining and one.load.max_length != 128]
    roles = {one.endpoint.role for one in able}
    answer = pick(*members)
    assert isinstance(answer, Routed) == (roles == {"prefill", "decode"})
    if isinstance(answer, Routed):
        assert answer.decode in [one.endpoint for one in able if one.endpoint.role == "decode"]
        assert answer.prefill in [one.endpoint for one in able if one.endpoint.role == "prefill"]


@given(MEMBERS)
def test_nobody_with_room_is_less_busy_than_the_chosen_one(members: list[Member]) -> None:
    answer = pick(P, *members)
    roomy = [
        one
        for one in members
        if one.endpoint.role == "decode"
        and not one.draining
        and one.load.max_length != 128
        and one.load.free_slots
        and one.load.free_blocks >= 10
    ]
    if roomy:
        assert isinstance(answer, Routed)
        chosen = next(one for one in roomy if one.endpoint == answer.decode)
        busy = [one.load.waiting + one.load.running for one in roomy]
        assert chosen.load.waiting + chosen.load.running == min(busy)


# ------------------------------------------------------------------ why not


def why(*members: Member, route: Route = ROUTE) -> str:
    answer = pick(*members, route=route)
    assert isinstance(answer, NoWorkers)
    assert answer.retry_after_s == 0.5
    return answer.message


def test_an_empty_pool_is_named() -> None:
    assert why(P) == "no decode worker is up"
    assert why(member("d0")) == "no prefill worker is up"
    assert why() == "no prefill worker is up"


def test_every_reason_is_counted() -> None:
    lost = member("d2")
    route = ROUTE.model_copy(update={"avoid": (lost.endpoint.incarnation,)})
    members = (
        P,
        member("d0", draining=True),
        member("d1", draining=True),
        lost,
        member("d3", max_length=128),
    )
    assert why(*members, route=route) == (
        "no decode worker can take it: 4 up, of these 2 draining, 1 avoided by this request, "
        "1 for at most 128 tokens where 160 are asked"
    )


# ------------------------------------------------------------------ membership


def test_a_newer_life_of_a_rank_replaces_the_older_one() -> None:
    old, new = member("d0", incarnation="1"), member("d0", incarnation="2")
    roster = Roster().hear(old, 0.0).hear(new, 1.0)
    assert roster.members == (new,)
    assert roster.hear(old, 2.0).members == (new,), "a straggler does not come back"
    assert Roster().hear(new, 0.0).hear(old, 1.0).members == (new,), "whoever reports first"
    assert roster.forget(old.endpoint.incarnation).members == (new,)
    assert roster.forget(new.endpoint.incarnation).members == ()


def test_a_rank_that_says_nothing_is_forgotten() -> None:
    roster = Roster().hear(member("d0"), 0.0).hear(member("d1"), 3.0)
    assert roster.expire(4.9, 5.0) is roster
    assert roster.expire(5.0, 5.0).members == (member("d1"),)
    again = roster.hear(member("d0", running=1), 4.0)
    assert set(again.expire(5.0, 5.0).members) == {member("d0", running=1), member("d1")}


def test_watchers_must_know_who_comes_goes_and_drains_but_not_each_load() -> None:
    roster = Roster().hear(member("d0"), 0.0)
    assert roster.hear(member("d0", running=5), 1.0).shape == roster.shape
    assert roster.hear(member("d0", draining=True), 1.0).shape != roster.shape
    assert roster.hear(member("d0", incarnation="2"), 1.0).shape != roster.shape
    assert roster.hear(member("d1"), 1.0).shape != roster.shape
    assert roster.forget("d0:1").shape == frozenset()


def test_a_choice_counts_as_load_until_the_rank_reports() -> None:
    roster = Roster.of((P, member("d0"), member("d1")), now=0.0)
    chosen = []
    for _ in range(4):
        answer = choose(roster, ROUTE, colocated=False, retry_after_s=0.5)
        assert isinstance(answer, Routed)
        chosen.append(answer.decode.name)
        roster = roster.charge(ROUTE, answer)
    assert chosen == ["d0", "d1", "d0", "d1"]
    loads = {one.endpoint.name: one.load for one in roster.members}
    assert loads["p0"].waiting_tokens == 400
    assert loads["p0"].free_blocks == 64 - 4 * 7
    assert (loads["d0"].running, loads["d0"].free_blocks, loads["d0"].free_slots) == (2, 44, 6)
    assert roster.hear(member("d0"), 1.0).heard["d0"].member == member("d0")


def test_a_choice_of_somebody_who_has_left_counts_for_nobody() -> None:
    answer = Routed(prefill=P.endpoint, decode=member("d0").endpoint)
    roster = Roster.of((member("d0", incarnation="2"),), now=0.0)
    assert roster.charge(ROUTE, answer) == roster


def test_the_smaller_pool_limit_is_what_is_served() -> None:
    assert longest_served([]) is None
    assert longest_served([member("d0", max_length=0)]) is None
    assert longest_served([member("d0", max_length=512), member("d1", max_length=1024)]) == 1024
    assert (
        longest_served([member("p0", "prefill", max_length=256), member("d0", max_length=512)])
        == 256
    )


# ------------------------------------------------------------------ short prompts, promised memory


def near(*members: Member, local_tokens: int, route: Route = ROUTE) -> str | None:
    """The decode rank that runs the prompt itself; None if it is handed over."""
    answer = choose(
        Roster.of((P, *members), now=0.0),
        route,
        colocated=False,
        retry_after_s=0.5,
        local_tokens=local_tokens,
    )
    assert isinstance(answer, Routed)
    return None if answer.prefill else answer.decode.name


def test_a_short_prompt_is_run_by_the_least_busy_decode_rank_with_room_at_once() -> None:
    busy, idle, full = member("d0", running=3), member("d1"), member("d2", free_blocks=2)
    assert near(busy, idle, full, local_tokens=100) == "d1"
    assert near(busy, full, local_tokens=100) == "d0"
    assert near(full, member("d3", free_slots=0), local_tokens=100) is None
    assert near(member("d4", draining=True), full, local_tokens=100) is None


def test_a_longer_prompt_is_handed_over_and_by_default_every_one_is() -> None:
    assert near(member("d0"), local_tokens=99) is None
    assert near(member("d0"), local_tokens=0) is None


def test_prompts_that_a_decode_rank_has_still_to_run_count_too() -> None:
    assert near(member("d0", waiting_tokens=50), local_tokens=150) == "d0"
    assert near(member("d0", waiting_tokens=51), local_tokens=150) is None
    roster = Roster.of((P, member("d0")), now=0.0)
    local = choose(roster, ROUTE, colocated=False, retry_after_s=0.5, local_tokens=150)
    assert isinstance(local, Routed)
    charged = roster.charge(ROUTE, local).heard["d0"].member
    assert near(charged, local_tokens=150) is None


def test_a_place_for_state_that_is_there_already_is_no_prompt_to_run() -> None:
    placing = ROUTE.model_copy(update={"decode_only": True})
    roster = Roster.of((P, member("d0")), now=0.0)
    placed = choose(roster, placing, colocated=False, retry_after_s=0.5, local_tokens=200)
    assert isinstance(placed, Routed)
    assert roster.charge(placing, placed).heard["d0"].member.load.waiting_tokens == 0


def test_room_is_what_a_rank_takes_at_the_start_but_all_of_it_for_a_preempted_request() -> None:
    """100 positions and 60 to come: 7 blocks for the next token, 9 for half of it, 10 for all."""
    for part, blocks in ((0.0, 7), (0.5, 9), (1.0, 10)):
        enough = member("d1", running=9, free_blocks=blocks, output_reserved=part)
        scarce = member("d0", free_blocks=blocks - 1, output_reserved=part)
        assert decode_of(scarce, enough) == "d1"
    whole = ROUTE.model_copy(update={"whole": True})
    assert decode_of(enough, member("d2", running=10, free_blocks=10), route=whole) == "d1"
    promised = member("d0", free_blocks=9, output_reserved=0.0)
    assert decode_of(promised, member("d2", running=10, free_blocks=10), route=whole) == "d2"
