"""Sizes that follow from what is asked for, as DeepInfer's rules derive them."""

from __future__ import annotations

import pytest

from offline.parallel_sizes import parallel_sizes


@pytest.mark.parametrize(
    ("asked", "dp", "world", "replicas"),
    [
        ({"ep": 1}, 1, 1, 1),
        ({"ep": 4}, 4, 4, 1),
        ({"ep": 64}, 64, 64, 1),
        ({"ep": 2, "dp": 8}, 8, 8, 4),
        ({"ep": 2, "cp": 8}, 1, 8, 4),
        ({"ep": 8, "cp": 2}, 4, 8, 1),
        ({"ep": 8, "cp": 8}, 1, 8, 1),
        ({"dp": 3}, 3, 3, 3),
    ],
)
def test_sizes_follow(asked: dict[str, int], dp: int, world: int, replicas: int) -> None:
    sizes = parallel_sizes(**asked)
    assert (sizes.dp, sizes.world, sizes.expert_replicas) == (dp, world, replicas)
    groups = sizes.expert_groups()
    assert [len(group) for group in groups] == [sizes.ep] * replicas
    assert [rank for group in groups for rank in group] == list(range(world))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"ep": 6, "cp": 4}, r"^--ep 6: dp 1 \(derived.* make 4 ranks.*; --dp 3 would make 12$"),
        (
            {"ep": 4, "dp": 6},
            r"^--ep 4: dp 6 \(given\) x cp 1 make 6 ranks.*; --dp 4 would make 4$",
        ),
        ({"ep": 0}, r"^--ep 0: must be 1 or more$"),
        ({"dp": -1}, r"^--dp -1: must be 0 or more$"),
        ({"cp": 0}, r"^--cp 0: must be 1 or more$"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(asked: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        parallel_sizes(**asked)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "groups", "ranks"),
    [
        ({"ep": 8}, 1, 8),
        ({"ep": 2, "dp": 8}, 4, 2),
        ({"ep": 2, "cp": 8}, 1, 8),
        ({"ep": 8, "cp": 2}, 1, 8),
        ({"ep": 1, "cp": 2, "dp": 3}, 3, 2),
        ({"ep": 6, "cp": 4, "dp": 3}, 1, 12),
    ],
)
def test_groups_hold_whole_teams_and_whole_sets_of_experts(
    asked: dict[str, int], groups: int, ranks: int
) -> None:
    sizes = parallel_sizes(**asked)
    assert (sizes.groups, sizes.group_ranks) == (groups, ranks)


def test_the_way_out_that_is_named_works() -> None:
    for ep in range(1, 9):
        for cp in range(1, 9):
            try:
                parallel_sizes(ep=ep, cp=cp)
            except ValueError as error:
                dp = int(str(error).rpartition("--dp ")[2].split()[0])
                assert parallel_sizes(ep=ep, cp=cp, dp=dp).world % ep == 0
