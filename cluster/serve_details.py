"""What Serve's REST says of applications. Pure: its JSON in, answers and words for people out."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal, NamedTuple

Json = dict[str, Any]
FAILED_TO_START = "failed to start"  # Serve's words for a replica whose constructor raised


def declared(details: Json) -> list[Json]:
    """Applications that were deployed like ours, as they must be written back to stay as they are;
    those of serve.run are not ours to write."""
    return [
        _at_its_scale(application)
        for application in details["applications"].values()
        if application.get("deployed_app_config") and application["status"] != "DELETING"
    ]


def _at_its_scale(application: Json) -> Json:
    """Its schema, with the sizes that it has been scaled to since it was deployed."""
    schema: Json = application["deployed_app_config"]
    running = application["deployments"]
    deployments = [
        one | {"num_replicas": running[one["name"]]["target_num_replicas"]}
        if one["name"] in running and isinstance(one.get("num_replicas"), int)
        else one
        for one in schema.get("deployments", [])
    ]
    return schema | {"deployments": deployments}


def arguments_of(application: Json | None) -> Json:
    """What the application's builder was given; nothing if it was not deployed like ours."""
    config = (application or {}).get("deployed_app_config") or {}
    arguments: Json = config.get("args", {})
    return arguments


def config_of(application: Json | None) -> Json | None:
    """The configuration tree that its replicas have got; None if it was not deployed like ours."""
    schema = (application or {}).get("deployed_app_config") or {}
    for deployment in schema.get("deployments", []):
        if deployment.get("user_config"):
            tree: Json = deployment["user_config"]
            return tree
    arguments: Json | None = schema.get("args", {}).get("config")
    return arguments


def drain_s(application: Json | None) -> float:
    """How long its replicas may drain."""
    limit_s: float = (config_of(application) or {}).get("life", {}).get("drain_timeout_s", 0.0)
    return limit_s


def not_running(name: str, details: Json) -> str:
    """What to say of an application that is not there."""
    others = ", ".join(details["applications"]) or "none"
    return f"no application {name!r} runs on this Ray cluster (running: {others})"


def proxy_options(details: Json) -> Json:
    """Of a running Serve, as they must be written back: it cannot change them."""
    options = {k: v for k, v in (details.get("http_options") or {}).items() if v is not None}
    return {"proxy_location": details["proxy_location"], "http_options": options}


def sizes_of(application: Json) -> dict[str, int]:
    """Replicas that each deployment shall have."""
    deployments = application["deployments"]
    return {name: one["target_num_replicas"] for name, one in deployments.items()}


class DeploymentState(NamedTuple):
    """Of one deployment on its way to a number of replicas."""

    line: str
    done: bool
    failed: bool


def deployment_state(deployment: Json, size: int) -> DeploymentState:
    """Done when there are just so many replicas and all run: none starts, none drains."""
    states = Counter(replica["state"] for replica in deployment["replicas"])
    healthy = deployment["status"] == "HEALTHY"
    others = "".join(
        f", {count} {state.lower()}"
        for state, count in sorted(states.items())
        if state != "RUNNING"
    )
    return DeploymentState(
        line=f"{states['RUNNING']}/{size}{others}",
        done=healthy and states == Counter({"RUNNING": size}),
        failed=not healthy and FAILED_TO_START in deployment["message"],
    )


def state_of(application: Json | None) -> Literal["starting", "healthy", "failed"]:
    """Failed at the first failure: Serve would try again, and fail again, for a minute."""
    if application is None:
        return "starting"
    deployments = application["deployments"].values()
    if application["status"] == "RUNNING" and all(d["status"] == "HEALTHY" for d in deployments):
        return "healthy"
    failing = any(FAILED_TO_START in deployment["message"] for deployment in deployments)
    return "failed" if failing or application["status"] == "DEPLOY_FAILED" else "starting"


def progress(application: Json | None) -> str:
    """One line."""
    if application is None:
        return "waiting for Serve"
    parts = []
    for name, deployment in application["deployments"].items():
        running = sum(replica["state"] == "RUNNING" for replica in deployment["replicas"])
        parts.append(f"{name} {running}/{deployment['target_num_replicas']}")
    return f"{application['status']}: {', '.join(parts) or 'building the application'}"


def why_failed(application: Json | None) -> str:
    """The failing process's own words: the end of its trace, wherever Serve keeps it."""
    assert application is not None
    failed = [
        f"{name}: {_last_words(deployment['message'])}"
        for name, deployment in application["deployments"].items()
        if FAILED_TO_START in deployment["message"]
    ]
    return "; ".join(failed) or _last_words(application["message"])


def _last_words(message: str) -> str:
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    raised = [n for n, line in enumerate(lines) if line.startswith("cluster.errors.")]
    words = "\n".join(lines[raised[-1] :] if raised else lines[-1:])
    return words.removeprefix("cluster.errors.").removeprefix("StartupError: ")
