"""How many groups a pool should have: cases in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from cluster.autoscale import Measures, PoolPolicy, measure, wanted_groups
from cluster.config import ClusterConfig, parse_config
from cluster.deployment_options import autoscaling, replica_options
from cluster.messages import Load

PREFILL = {"waiting_tokens": 1000.0}
DECODE = {"requests": 10.0, "used_blocks": 0.8}


def tokens(*waiting: float) -> list[Measures]:
    return [{"waiting_tokens": one} for one in waiting]


def decoding(*groups: tuple[float, float]) -> list[Measures]:
    return [{"requests": requests, "used_blocks": used} for requests, used in groups]


@pytest.mark.parametrize(
    ("groups", "carried", "targets", "wanted"),
    [
        # up: as many as bring the total to the target
        (1, tokens(1001), PREFILL, 2),
        (1, tokens(5200), PREFILL, 6),
        (2, tokens(3000, 0), PREFILL, 3),
        # at the target, and a little below it: as it is
        (2, tokens(1000, 1000), PREFILL, 2),
        (2, tokens(500, 400), PREFILL, 2),
        # down: only if one group fewer would stay a fifth below the target
        (2, tokens(400, 400), PREFILL, 1),
        (2, tokens(400, 401), PREFILL, 2),
        (5, tokens(0, 0, 0, 0, 0), PREFILL, 1),
        # the measure that wants most decides, upwards and downwards
        (1, decoding((3, 0.9)), DECODE, 2),
        (1, decoding((25, 0.1)), DECODE, 3),
        (3, decoding((1, 0.7), (1, 0.7), (1, 0.7)), DECODE, 3),
        (3, decoding((1, 0.3), (1, 0.3), (1, 0.3)), DECODE, 2),
        # nothing known, or nothing asked for: as it is
        (3, [], DECODE, 3),
        (3, tokens(9999), {"waiting_tokens": 0.0}, 3),
    ],
)
def test_so_many_groups(
    groups: int, carried: list[Measures], targets: dict[str, float], wanted: int
) -> None:
    assert wanted_groups(groups, carried, targets, slack=0.2) == wanted


def test_a_steady_load_never_flaps() -> None:
    """Spread over what was wanted, the same load wants the same number again."""
    for load in range(0, 20_000, 37):
        groups = wanted_groups(1, tokens(load), PREFILL, slack=0.2)
        spread = tokens(*[load / groups] * groups)
        assert wanted_groups(groups, spread, PREFILL, slack=0.2) == groups


def test_a_group_carries_what_its_ranks_do() -> None:
    ranks = [
        Load(waiting=1, running=2, waiting_tokens=30, free_blocks=40, total_blocks=100),
        Load(waiting=0, running=3, waiting_tokens=5, free_blocks=0, total_blocks=100),
    ]
    assert measure(ranks) == {"requests": 6.0, "waiting_tokens": 35.0, "used_blocks": 0.8}


@dataclass
class Context:
    """What Serve gives a policy."""

    target_num_replicas: int
    aggregated_metrics: dict[str, dict[str, float]] = field(default_factory=dict)


def test_serve_may_call_it() -> None:
    policy = PoolPolicy(slack=0.2, requests=10.0, used_blocks=0.8)
    metrics = {"requests": {"a": 12.0, "b": 11.0}, "used_blocks": {"a": 0.1, "b": 0.1}}
    assert policy(Context(2, metrics)) == (3, {})
    assert policy(Context(2)) == (2, {})


def test_switched_off_the_sizes_are_asked_for() -> None:
    sizes = {"Router": 1, "Decode": 9}
    assert replica_options(ClusterConfig(), sizes)["Decode"] == {"num_replicas": 9}
    assert autoscaling(ClusterConfig()) == {}


def test_switched_on_serve_is_given_bounds_and_the_policy() -> None:
    config = parse_config(
        {"autoscale": {"enabled": True, "decode": {"max_groups": 8, "requests": 7}}}
    )
    assert replica_options(config, {"Router": 1, "Decode": 9}) == {
        "Router": {"num_replicas": 1},
        "Decode": {"num_replicas": "auto"},
    }
    decode = autoscaling(config)["Decode"]
    assert (decode["min_replicas"], decode["max_replicas"]) == (1, 8)
    assert decode["policy"]["policy_kwargs"]["requests"] == 7
    PoolPolicy(**decode["policy"]["policy_kwargs"])
