"""What pools, groups and ranks are called, and what one group asks of Ray. Pure."""

from __future__ import annotations

from cluster.config import ClusterConfig, PoolSection

HEAD_CPUS = 0.05  # a group's head sleeps nearly always; Ray only needs something to place


def pools(config: ClusterConfig) -> dict[str, PoolSection]:
    """Pools by the name of their deployment; a pool of no groups is not deployed."""
    named = {"Prefill": config.prefill, "Decode": config.decode}
    return {name: pool for name, pool in named.items() if pool.groups}


def group_of(rank: str) -> str:
    """A rank's name is its group's, and its index there: of decode-0/1 it is decode-0."""
    return rank.rpartition("/")[0]


def pool_of(group: str) -> str:
    """A group's name begins with its pool's: of decode-0 it is decode."""
    return group.partition("-")[0]


def group_bundles(pool: PoolSection) -> list[dict[str, float]]:
    """Resources of one group: its head, then one bundle a rank."""
    head = {"CPU": HEAD_CPUS}
    rank = {name: amount for name, amount in (("CPU", pool.cpus), ("GPU", pool.gpus)) if amount}
    return [head, *[dict(rank or head) for _ in range(pool.ranks)]]
