"""What Serve is told of each deployment: resources, patience, sizes, settings. Pure.

The same values go into the application that `build` makes and, as overrides, into what launch
asks of Serve. Serve replaces the replicas of one deployment when its `ray_actor_options` or its
bundles change, all of them when the application's arguments do, and nobody when only
`user_config` does: replicas take that over. So settings travel as user_config, and what a
deployment must be replaced for is a digest in its environment.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.config import ClusterConfig
from cluster.live_settings import Json, digest
from cluster.pools import HEAD_CPUS, group_bundles, pools

STOP_MARGIN_S = 10.0  # what Serve grants a replica beyond its drain, before it kills it
DIGEST = "TANDEM_SETTINGS"
ON_THE_HEAD_NODE = {"node:__internal_head__": 0.001}
POLICY = "cluster.autoscale:PoolPolicy"


def deployment_options(config: ClusterConfig) -> dict[str, Json]:
    """By deployment, in the words of Serve's schema; without the numbers of replicas."""
    tree = config.model_dump(mode="json")
    common: Json = {
        "health_check_period_s": config.life.health_period_s,
        "graceful_shutdown_timeout_s": config.life.drain_timeout_s + STOP_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "user_config": tree,
    }
    resources: dict[str, Json] = {
        "Ingress": {"num_cpus": 0.0, "resources": ON_THE_HEAD_NODE},
        "Router": {"num_cpus": 0.0},
        **{name: {"num_cpus": HEAD_CPUS} for name in pools(config)},
    }
    options: dict[str, Json] = {
        name: common | {"ray_actor_options": asked | _marked(digest(config, name))}
        for name, asked in resources.items()
    }
    options["Ingress"]["max_ongoing_requests"] = config.http.max_concurrent
    for name, pool in pools(config).items():
        options[name] |= {
            "placement_group_bundles": group_bundles(pool),
            "placement_group_strategy": "PACK",
        }
    return options


def replica_options(config: ClusterConfig, sizes: Mapping[str, int]) -> dict[str, Json]:
    """By deployment: how many replicas, or that Serve chooses, as `autoscaling` has told it."""
    chosen = autoscaling(config)
    return {
        name: {"num_replicas": "auto" if name in chosen else size} for name, size in sizes.items()
    }


def autoscaling(config: ClusterConfig) -> dict[str, Json]:
    """By deployment, for those that Serve scales: its bounds, delays and our policy.

    For `build` only: as an override Serve would import the policy where nothing of ours is.
    """
    section = config.autoscale
    of_pool = {"Prefill": section.prefill, "Decode": section.decode}
    return {
        name: {
            "min_replicas": of_pool[name].min_groups,
            "max_replicas": of_pool[name].max_groups,
            "upscale_delay_s": section.up_delay_s,
            "downscale_delay_s": section.down_delay_s,
            "policy": {
                "policy_function": POLICY,
                "policy_kwargs": {
                    "slack": section.slack,
                    **of_pool[name].model_dump(exclude={"min_groups", "max_groups"}),
                },
            },
        }
        for name in pools(config)
        if section.enabled
    }


def _marked(mark: str) -> Json:
    return {"runtime_env": {"env_vars": {DIGEST: mark}}}
