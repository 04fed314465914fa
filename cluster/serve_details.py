"""What Serve's REST says of applications. Pure: its JSON in, answers and words for people out."""

from __future__ import annotations

from typing import Any, Literal

Json = dict[str, Any]
FAILED_TO_START = "failed to start"  # Serve's words for a replica whose constructor raised


def declared(details: Json) -> list[Json]:
    """Applications that were deployed like ours; those of serve.run are not ours to write."""
    return [
        application["deployed_app_config"]
        for application in details["applications"].values()
        if application.get("deployed_app_config") and application["status"] != "DELETING"
    ]


def arguments_of(application: Json | None) -> Json:
    """What the application's builder was given; nothing if it was not deployed like ours."""
    config = (application or {}).get("deployed_app_config") or {}
    arguments: Json = config.get("args", {})
    return arguments


def drain_s(application: Json | None) -> float:
    """How long its replicas may drain."""
    life = arguments_of(application).get("config", {}).get("life", {})
    limit_s: float = life.get("drain_timeout_s", 0.0)
    return limit_s


def proxy_options(details: Json) -> Json:
    """Of a running Serve, as they must be written back: it cannot change them."""
    options = {k: v for k, v in (details.get("http_options") or {}).items() if v is not None}
    return {"proxy_location": details["proxy_location"], "http_options": options}


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
