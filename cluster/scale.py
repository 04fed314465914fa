"""Other numbers of groups for a running application, through the dashboard server's scale API.

Refused before anything changes where it cannot be placed; taken back where a new group does not
get healthy. A group that leaves takes nothing new and lets its streams finish.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from cluster.application import POLL_S, Applications, NotRunning, connect
from cluster.config import ClusterConfig, parse_config
from cluster.deployment_options import STOP_MARGIN_S
from cluster.errors import StartupError
from cluster.packing import domain_of
from cluster.pools import pools
from cluster.preflight import Preflight
from cluster.serve_details import (
    Json,
    arguments_of,
    config_of,
    deployment_state,
    not_running,
    sizes_of,
    why_failed,
)

Say = Callable[[str], None]
WAIT_MARGIN_S = 30.0  # for Serve to act, on top of what starting and draining may take


def scale(name: str, wanted: Mapping[str, int], *, say: Say, wait: bool = True) -> Json:
    """`wanted`: groups by pool. StartupError says why not, and then all is as before."""
    applications = Applications(connect())
    running = applications.find(name)
    tree = config_of(running)
    if running is None or tree is None:
        raise NotRunning(not_running(name, applications.details()))
    config = parse_config(tree)
    sizes = deployments_to_scale(config, wanted)
    before = sizes_of(running)
    preflight = Preflight(config, before | sizes)
    if any(size > before[one] for one, size in sizes.items()):
        preflight.check_in(domain_of(arguments_of(running)))
    for deployment, size in sizes.items():
        say(f"{deployment}: {before[deployment]} -> {size}")
        applications.scale(name, deployment, size)
    if wait:
        try:
            _wait(applications, name, sizes, config, preflight, say)
        except BaseException:
            for deployment in sizes:
                applications.scale(name, deployment, before[deployment])
            say("back to what it was")
            raise
    return {
        "application": name,
        "waited": wait,
        "pools": {
            one.lower(): {"before": before[one], "after": size} for one, size in sizes.items()
        },
    }


def deployments_to_scale(config: ClusterConfig, wanted: Mapping[str, int]) -> dict[str, int]:
    """By the names of deployments. StartupError for a pool that is not there, or not ours to
    scale."""
    there = {one.lower(): one for one in pools(config)}
    if unknown := [pool for pool in wanted if pool not in there]:
        raise StartupError(
            f"unknown pool {unknown[0]!r}: {config.name} has {' and '.join(sorted(there))}"
        )
    if config.autoscale.enabled:
        bounds = {pool: getattr(config.autoscale, pool) for pool in wanted}
        between = ", ".join(
            f"{pool} {one.min_groups} to {one.max_groups}" for pool, one in bounds.items()
        )
        raise StartupError(
            f"autoscale.enabled: Serve chooses the number of groups ({between}); change the "
            "bounds in [autoscale] and launch again, or switch it off there"
        )
    return {there[pool]: size for pool, size in wanted.items()}


def _wait(
    applications: Applications,
    name: str,
    sizes: Mapping[str, int],
    config: ClusterConfig,
    preflight: Preflight,
    say: Say,
) -> None:
    """Until each deployment has just so many replicas, all healthy; says each change."""
    life = config.life
    limit_s = max(life.start_timeout_s, life.drain_timeout_s + STOP_MARGIN_S) + WAIT_MARGIN_S
    deadline = time.monotonic() + limit_s
    said = ""
    while True:
        application = applications.find(name)
        if application is None:
            raise NotRunning(f"{name} has ended meanwhile")
        states = {
            one: deployment_state(application["deployments"][one], size)
            for one, size in sizes.items()
        }
        line = ", ".join(f"{one} {state.line}" for one, state in states.items())
        if line != said:
            said = line
            say(line)
        if any(state.failed for state in states.values()):
            raise StartupError(why_failed(application))
        if all(state.done for state in states.values()):
            return
        if time.monotonic() > deadline:
            raise StartupError(f"not done after {limit_s:.0f} s: {line}")
        preflight.check_waiting()
        time.sleep(POLL_S)
