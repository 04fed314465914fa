"""What runs, for `tandem status`: the application, its deployments, groups and ranks, the router.

Four sources, each asked once: Serve (deployments), Ray (actors and pids), the router (loads),
and each prefill rank (the paths to the decode ranks that it knows).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from ray.util.state import list_actors

from cluster.application import MOST_ACTORS, Applications
from cluster.config import ClusterConfig, parse_config
from cluster.errors import ClusterError, StartupError
from cluster.members import ask_members, ask_pairs
from cluster.messages import Member
from cluster.ray_services import ApplicationKeys
from cluster.serve_details import Json, config_of
from cluster.wire import Identity, new_incarnation


def collect(name: str, dashboard: str) -> Json:
    """One JSON value; `application` is null where none of that name runs."""
    application = Applications(dashboard).find(name)
    if application is None:
        return {"application": None, "deployments": [], "groups": [], "pairs": [], "router": None}
    tree = config_of(application)
    config = ClusterConfig() if tree is None else parse_config(tree)
    keys = ApplicationKeys(name)
    router, members, pairs = asyncio.run(_ask_ranks(keys, config))
    return {
        "application": {
            "name": name,
            "status": application["status"],
            "message": application["message"],
            "http": f"http://{config.http.host}:{config.http.port}/v1",
        },
        "deployments": [
            {
                "name": deployment["name"],
                "status": deployment["status"],
                "running": sum(one["state"] == "RUNNING" for one in deployment["replicas"]),
                "target": deployment["target_num_replicas"],
                "message": deployment["message"],
            }
            for deployment in application["deployments"].values()
        ],
        "groups": _groups(name, application, dashboard, members),
        "pairs": pairs,
        "router": router,
    }


def render(status: Json) -> str:
    """For people."""
    if status["application"] is None:
        return "no application runs; `tandem up` starts one"
    application = status["application"]
    lines = [f"{application['name']}  {application['status']}  {application['http']}"]
    if application["message"]:
        lines.append(f"  {application['message'].splitlines()[-1]}")
    for one in status["deployments"]:
        lines.append(f"  {one['name']:<8} {one['status']:<10} {one['running']}/{one['target']}")
    for group in status["groups"]:
        lines.append(f"{group['name']}  {group['state']}  head pid {group['pid']}")
        for rank in group["ranks"]:
            load = rank["load"]
            shown = "not heard of by the router"
            if load is not None:
                shown = (
                    f"{load['running']} running, {load['waiting']} waiting, "
                    f"{load['free_blocks']}/{load['total_blocks']} blocks free"
                )
            if rank["follows"]:  # it takes no requests
                shown = "computes prompts of the rank before it"
            leaving = ", draining" if rank["draining"] else ""
            lines.append(f"  {rank['name']:<20} pid {rank['pid']:<8} {shown}{leaving}")
    lines += [_pair_line(pair) for pair in status["pairs"]]
    router = status["router"]
    if router is None:
        lines.append("router: none is published")
    else:
        answers = "answers" if router["answers"] else f"does not answer: {router['error']}"
        lines.append(f"router {router['incarnation']} at {router['address']} {answers}")
    return "\n".join(lines)


def _pair_line(pair: Json) -> str:
    line = f"  {pair['prefill']} to {pair['decode']}: {pair['path']}"
    if pair["gb_per_s"]:
        line += f", {pair['gb_per_s']:.1f} GB/s, {pair['latency_s'] * 1e6:.0f} us"
        if pair["gb_per_s"] < pair["expected_gb_per_s"]:
            line += f" (slow: {pair['expected_gb_per_s']:.0f} GB/s expected)"
    return f"{line}; not direct: {pair['why']}" if pair["why"] else line


async def _ask_ranks(
    keys: ApplicationKeys, config: ClusterConfig
) -> tuple[Json | None, dict[str, Member], list[Json]]:
    """Where the leader is, its members by rank name, and pairs of ranks that have met."""
    record = keys.router()
    if record is None:
        return None, {}, []
    router: Json = {
        "incarnation": record.incarnation,
        "address": f"{record.address.host}:{record.address.port}",
        "answers": False,
        "error": None,
    }
    identity = Identity("caller", new_incarnation(), keys.secret())
    try:
        members = await ask_members(record.address, identity, config.wire)
    except ClusterError as error:
        return router | {"error": str(error)}, {}, []
    pairs: list[Json] = []
    for member in members:
        if member.endpoint.role == "prefill":
            with suppress(ClusterError):  # one that has just gone has no pairs to show
                known = await ask_pairs(member.endpoint, identity, config.wire)
                pairs += [{"prefill": member.endpoint.name, **pair.model_dump()} for pair in known]
    by_name = {member.endpoint.name: member for member in members}
    return router | {"answers": True}, by_name, pairs


def _groups(name: str, application: Json, dashboard: str, members: dict[str, Member]) -> list[Json]:
    ranks = _rank_actors(name, dashboard)
    groups = []
    for deployment in ("Prefill", "Decode"):
        for replica in application["deployments"].get(deployment, {}).get("replicas", []):
            group = f"{deployment.lower()}-{replica['replica_id']}"
            mine = sorted(rank for rank in ranks if rank.rpartition("/")[0] == group)
            groups.append(
                {
                    "name": group,
                    "deployment": deployment,
                    "state": replica["state"],
                    "pid": replica.get("pid"),
                    "node": replica.get("node_ip"),
                    "ranks": [_rank(ranks[rank], members.get(rank)) for rank in mine],
                }
            )
    return groups


def _rank(actor: Any, member: Member | None) -> Json:
    return {
        "name": actor.name,
        "pid": actor.pid,
        "node": actor.node_id,
        "load": member.load.model_dump() if member else None,
        "draining": bool(member and member.draining),
        "follows": bool(member and member.follows),
    }


def _rank_actors(name: str, dashboard: str) -> dict[str, Any]:
    wanted = [("class_name", "=", "RankActor"), ("state", "=", "ALIVE")]
    try:
        actors = list_actors(address=dashboard, filters=wanted, limit=MOST_ACTORS)
    except Exception as error:  # Ray raises a dozen types here
        raise StartupError(f"the dashboard does not list actors: {error}") from error
    return {actor.name: actor for actor in actors if actor.ray_namespace == name}
