"""What a configuration's groups mean for the experts of a model. Pure; launch says it first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.expert_placement import extra_experts
from cluster.pools import pools


def routed_experts(model: Path) -> int | None:
    """Experts of a layer, as the model's config.json says; None if none says anything of them."""
    path = model / "config.json"
    if not path.is_file():
        return None
    told = json.loads(path.read_text(encoding="utf-8"))
    count = told.get("text_config", told).get("n_routed_experts")
    return count if isinstance(count, int) else None


def expert_remarks(config: ClusterConfig, experts: int) -> Iterator[str]:
    """What of the sizes is not as it was asked for."""
    for name, pool in pools(config).items():
        where = name.lower()
        if pool.ranks > 1 and not pool.shares_experts:
            yield f"{where}: each of a group's {pool.ranks} ranks holds all experts (ep 1)"
        elif not pool.shares_experts:
            if pool.extra_experts:
                yield (
                    f"{where}.extra_experts {pool.extra_experts} has no effect: groups of one rank "
                    "have each expert once"
                )
        elif (extra := extra_experts(experts, pool.extra_experts, pool.ranks)) != (
            pool.extra_experts
        ):
            yield (
                f"{where}: {extra} redundant experts a layer, not {pool.extra_experts}: {experts} "
                f"and these must divide by {pool.ranks} ranks"
            )
