"""What the pools of a configuration are, and what one group of each asks of Ray. Pure."""

from __future__ import annotations

from cluster.config import ClusterConfig, PoolSection

HEAD_CPUS = 0.05  # a group's head sleeps nearly always; Ray only needs something to place


def pools(config: ClusterConfig) -> dict[str, PoolSection]:
    """Pools by the name of their deployment; a pool of no groups is not deployed."""
    named = {"Prefill": config.prefill, "Decode": config.decode}
    return {name: pool for name, pool in named.items() if pool.groups}


def group_bundles(pool: PoolSection) -> list[dict[str, float]]:
    """Resources of one group: its head, then one bundle a rank."""
    head = {"CPU": HEAD_CPUS}
    rank = {name: amount for name, amount in (("CPU", pool.cpus), ("GPU", pool.gpus)) if amount}
    return [head, *[dict(rank or head) for _ in range(pool.ranks)]]
