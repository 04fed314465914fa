"""Does this launch fit the cluster as it stands? Asks Ray what there is; packing.py decides.

Looks once before anything is touched, and again while bundles wait for their place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util import placement_group_table

from cluster.config import ClusterConfig
from cluster.errors import StartupError
from cluster.packing import Bundle, Domain, Node, choose_domain, explain_unplaced, first_unplaced
from cluster.pools import group_bundles, pools

PLACEMENT_WAIT_S = 20.0  # a bundle that waits longer than this for its place will not get one


def is_head_node() -> bool:
    """Whether this process runs where the ingress will."""
    here = ray.get_runtime_context().get_node_id()
    return any(
        node["NodeID"] == here and "node:__internal_head__" in node["Resources"]
        for node in ray.nodes()
    )


class Preflight:
    """What one application asks for, `sizes` groups of each pool, against what the nodes have."""

    def __init__(self, config: ClusterConfig, sizes: Mapping[str, int]) -> None:
        self._config = config
        self._bundles = [
            bundle
            for name, pool in pools(config).items()
            for group in range(sizes[name])
            for bundle in _named(f"{name} group {group}", group_bundles(pool))
        ]
        self._waiting_since: dict[str, float] = {}

    def domain(self, preferred: Domain | None = None) -> Domain | None:
        """Where it fits: one domain, or None where no GPU needs one. StartupError: it does not."""
        return choose_domain(self._nodes(), self._bundles, preferred=preferred)

    def check_in(self, domain: Domain | None) -> None:
        """StartupError if it does not fit where the application runs already."""
        nodes = _within(self._nodes(), domain)
        lacking = first_unplaced(nodes, self._bundles)
        if lacking is not None:
            raise StartupError(explain_unplaced(nodes, lacking, self._bundles))

    def fits_beside_itself(self, domain: Domain | None) -> bool:
        """Whether a new version can start before the running one ends."""
        nodes = _within(self._nodes(own_is_free=False), domain)
        return first_unplaced(nodes, self._bundles) is None

    def check_waiting(self, clock: Callable[[], float] = time.monotonic) -> None:
        """StartupError once a group has waited too long: somebody was faster, or a node left."""
        waiting = {group["name"] for group in self._groups() if group["state"] == "PENDING"}
        now = clock()
        self._waiting_since = {name: self._waiting_since.get(name, now) for name in waiting}
        for name, since in self._waiting_since.items():
            if now - since > PLACEMENT_WAIT_S:
                self.domain()  # which says what lacks, if it does not fit any more
                raise StartupError(
                    f"{name} has waited {PLACEMENT_WAIT_S:.0f} s for its place though it should "
                    "fit; the Ray dashboard shows its placement group"
                )

    def _nodes(self, *, own_is_free: bool = True) -> list[Node]:
        """Living nodes. What the application holds itself it can keep or give up."""
        free = {node: dict(has) for node, has in available_resources_per_node().items()}
        for group in self._groups() if own_is_free else ():
            for index, node in group["bundles_to_node_id"].items():
                for name, amount in group["bundles"][index].items():
                    if node in free:
                        free[node][name] = free[node].get(name, 0.0) + amount
        on_gpus = any(pool.gpus for pool in pools(self._config).values())
        return [
            Node(
                name=node["NodeManagerHostname"],
                free=free.get(node["NodeID"], {}),
                total=node["Resources"],
                labels=node.get("Labels", {}) if on_gpus else {},
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def _groups(self) -> list[dict[str, Any]]:
        """The application's placement groups, placed or waiting; Serve names them by replica."""
        prefix = f"SERVE_REPLICA::{self._config.name}#"
        return [
            group
            for group in placement_group_table().values()
            if group["name"].startswith(prefix) and group["state"] != "REMOVED"
        ]


def _within(nodes: list[Node], domain: Domain | None) -> list[Node]:
    if domain is None:
        return nodes
    return [node for node in nodes if node.labels.get(domain.label) == domain.value]


def _named(group: str, bundles: list[dict[str, float]]) -> list[Bundle]:
    head, *ranks = bundles
    return [
        Bundle(f"the head of {group}", head),
        *[Bundle(f"rank {index} of {group}", needs) for index, needs in enumerate(ranks)],
    ]
