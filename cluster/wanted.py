"""What a launch asks of Serve, and what that changes for what runs already. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.config import ClusterConfig, parse_config
from cluster.deployment_options import deployment_options, replica_options
from cluster.live_settings import changes
from cluster.packing import Domain
from cluster.serve_details import Json, arguments_of, config_of

IMPORT_PATH = "cluster.launch:build"


@dataclass(frozen=True)
class Wanted:
    """What a launch asks of Serve."""

    name: str
    args: Json  # a change restarts every deployment
    deployments: Sequence[Json]  # options of each; see deployment_options.py
    external_scaler: bool  # `tandem scale` decides on sizes, not Serve's autoscaler
    runtime_env: Json
    proxy_port: int  # of Serve's own proxy, if Serve is not running yet; 0: none
    proxy_host: str

    def schema(self) -> Json:
        return {
            "name": self.name,
            "route_prefix": f"/{self.name}",
            "import_path": IMPORT_PATH,
            "runtime_env": self.runtime_env,
            "external_scaler_enabled": self.external_scaler,
            "args": self.args,
            "deployments": list(self.deployments),
        }

    def proxy(self) -> Json:
        return {
            "proxy_location": "HeadOnly" if self.proxy_port else "Disabled",
            "http_options": {"host": self.proxy_host, "port": self.proxy_port or 8000},
        }


def sizes_to_ask(
    config: ClusterConfig, running: Json | None, asked_before: Mapping[str, int]
) -> dict[str, int]:
    """Replicas by deployment: the scale that is running, unless the configuration's number has
    changed since the last launch."""
    asked = {"prefill": config.prefill.groups, "decode": config.decode.groups}
    sizes = {"Ingress": 1, "Router": 1} | {
        name.capitalize(): groups for name, groups in asked.items() if groups
    }
    for name, deployment in (running["deployments"] if running else {}).items():
        same = asked_before.get(name.lower()) == asked.get(name.lower())
        if name in sizes and same:
            sizes[name] = max(1, deployment["target_num_replicas"])
    return sizes


def outline(config: ClusterConfig, domain: Domain | None) -> Json:
    """Arguments of `build`: what deployments there are, and where. A change restarts them all."""
    config_outline = {
        "name": config.name,
        "prefill": {"groups": min(config.prefill.groups, 1)},
        "decode": {"groups": min(config.decode.groups, 1)},
        "autoscale": config.autoscale.model_dump() if config.autoscale.enabled else {},
    }
    return {"config": config_outline, "domain": domain.selector if domain else None}


def wanted_of(
    config: ClusterConfig, sizes: Mapping[str, int], domain: Domain | None, code: Json, surge: bool
) -> Wanted:
    """`code`: the runtime environment. `surge`: is there room for all of it beside what runs?"""
    options, replicas = deployment_options(config), replica_options(config, sizes)
    room = {"max_surge_percent": 100 if surge else 0}
    return Wanted(
        name=config.name,
        args=outline(config, domain),
        deployments=[{"name": one, **options[one], **replicas[one], **room} for one in sizes],
        external_scaler=not config.autoscale.enabled,
        runtime_env=code,
        proxy_port=config.http.proxy_port,
        proxy_host=config.http.host,
    )


def differences(running: Json | None, wanted: Wanted) -> list[str]:
    """What changes for what runs already, a line each; nothing for a first launch."""
    before, after = config_of(running), config_of({"deployed_app_config": wanted.schema()})
    if running is None or before is None or after is None:
        return []
    lines = [f"changed: {change}" for change in changes(parse_config(before), parse_config(after))]
    if running["deployed_app_config"].get("runtime_env") != wanted.runtime_env:
        lines.append("changed: the code: restarts everything; streams finish first")
    if arguments_of(running).get("domain") != wanted.args["domain"]:
        lines.append("changed: the domain: restarts everything; streams finish first")
    return lines
