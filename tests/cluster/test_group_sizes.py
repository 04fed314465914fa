"""Sizes of groups that share experts: what a configuration may say of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import ClusterConfig, load_config
from cluster.errors import StartupError
from cluster.launch import DEFAULT_CONFIG, remarks
from cluster.live_settings import restarted_for

SHARED = Path(DEFAULT_CONFIG).with_name("local_ep2.toml")


def sizes(*overrides: str) -> ClusterConfig:
    return load_config(None, overrides, {})


def test_ranks_of_a_group_share_their_experts_unless_told_otherwise() -> None:
    assert not sizes().decode.shares_experts
    assert sizes("decode.ranks=2").decode.shares_experts
    assert sizes("decode.ranks=4", "decode.ep=4").decode.shares_experts
    assert not sizes("decode.ranks=2", "decode.ep=1").decode.shares_experts


def test_parts_of_a_group_are_refused_with_what_to_say_instead() -> None:
    with pytest.raises(StartupError, match="have more groups of 2 ranks each"):
        sizes("decode.ranks=8", "decode.ep=2")


def test_a_negative_number_of_redundant_experts_is_refused() -> None:
    with pytest.raises(StartupError, match="extra_experts"):
        sizes("decode.ranks=2", "decode.extra_experts=-1")


@pytest.mark.parametrize(
    ("ranks", "asked", "given"), [(2, 1, 2), (3, 0, 2), (2, 2, None), (2, 16, None)]
)
def test_launch_says_what_it_rounds_up(ranks: int, asked: int, given: int | None) -> None:
    """16 experts of tandem-mini, before anything is started."""
    config = load_config(
        DEFAULT_CONFIG, [f"decode.ranks={ranks}", f"decode.extra_experts={asked}"], {}
    )
    said = [one for one in remarks(config) if "redundant" in one]
    wanted = f"decode: {given} redundant experts a layer, not {asked}: 16 and these must divide"
    assert [one.startswith(wanted) for one in said] == ([] if given is None else [True])


def test_the_shipped_configuration_shares_experts_in_both_pools() -> None:
    config = load_config(SHARED, (), {})
    assert config.prefill.shares_experts
    assert config.decode.shares_experts
    assert config.decode.groups > 1


def test_other_sizes_replace_the_groups_of_their_pool_only() -> None:
    assert restarted_for("decode.extra_experts") == restarted_for("decode.ep") == ("Decode",)
