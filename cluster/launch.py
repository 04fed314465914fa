"""One command starts the cluster: python cluster/launch.py --config deploy/configs/local.toml

    ray job submit --working-dir . -- python cluster/launch.py --config ...

It checks that everything fits, asks Serve for the application that `build` describes, and waits
until it is healthy. The application outlives the job; submitted again unchanged, nothing restarts.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # a script's own folder is first on the path; the root belongs there
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from cluster import local_ray
from cluster.config import ClusterConfig, load_config, parse_config
from cluster.errors import StartupError
from cluster.packing import Domain
from cluster.serve_details import Json, arguments_of

if TYPE_CHECKING:
    from ray import serve

    from cluster.application import Applications

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_CONFIG = ROOT / "deploy" / "configs" / "local.toml"
SERVE_START_S = 60.0  # what Serve may take on top of what the ranks may take
STOP_MARGIN_S = 10.0  # what Serve grants a replica beyond its drain, before it kills it
Say = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    options = parser.parse_args(arguments)
    local_ray.prefer()
    try:
        launch(load_config(options.config, options.set), say=timed())
    except StartupError as error:
        print(f"launch failed: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(
            f"launch failed: {sys.executable} lacks {error.name}; submit the job with the "
            "cluster's python: ray job submit ... -- /path/to/python cluster/launch.py",
            file=sys.stderr,
        )
        return 1
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        default=str(DEFAULT_CONFIG),
        help="TOML file with the sections of cluster/config.py (default: %(default)s)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one value of the file; may be repeated",
    )


def timed() -> Say:
    """Prints lines with the seconds since now in front, each at once."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {line}", flush=True)

    return say


def remarks(config: ClusterConfig) -> list[str]:
    """What a configuration asks for that this version holds but does not use."""
    pools = (config.prefill, config.decode)
    found = []
    if any(pool.gpus for pool in pools):
        found.append(
            "the engine computes on the CPU so far: ranks hold their GPUs and leave them idle"
        )
    if any(pool.ranks > 1 for pool in pools):
        found.append("ranks of a group do not share experts so far: each loads the whole model")
    return found


def launch(config: ClusterConfig, *, say: Say) -> None:
    """Until the application is healthy. StartupError leaves what ran before as it was."""
    from cluster.application import Applications, Wanted, connect
    from cluster.http_port import check_http_port, fingerprint
    from cluster.preflight import Preflight, is_head_node
    from cluster.ray_services import ApplicationKeys

    _check_files(config)
    for remark in remarks(config):
        say(f"note: {remark}")
    applications = Applications(connect())
    keys = ApplicationKeys(config.name)
    running = applications.find(config.name)
    sizes = sizes_to_ask(config, running, keys.asked_sizes())
    say(f"{config.name}: " + ", ".join(f"{name} x {size}" for name, size in sizes.items()))
    preflight = Preflight(config, sizes)
    domain = preflight.domain(preferred=_domain_of(running))
    if is_head_node():
        owner = fingerprint(keys.secret()) if running else None
        asyncio.run(check_http_port(config.http.host, config.http.port, owner))
    wanted = Wanted(
        name=config.name,
        args=build_arguments(config, domain),
        sizes=sizes,
        surge=preflight.fits_beside_itself(domain),
        runtime_env=_code(applications),
        proxy_port=config.http.proxy_port,
        proxy_host=config.http.host,
    )
    undo = applications.put(wanted)
    try:
        applications.wait_until_healthy(
            config.name,
            limit_s=config.life.start_timeout_s + SERVE_START_S,
            say=say,
            check=preflight.check_waiting,
        )
    except BaseException:
        undo()
        raise
    keys.remember_sizes({"prefill": config.prefill.groups, "decode": config.decode.groups})
    say(f"healthy; HTTP on http://{config.http.host}:{config.http.port}/v1")


def build(args: Mapping[str, Any]) -> serve.Application:
    """The Serve application: args are `config`, a tree, and `domain`, a label selector or None."""
    from ray import serve

    from cluster.deployments import Group, RouterDeployment
    from cluster.ingress import Ingress
    from cluster.preflight import HEAD_CPUS, group_bundles, pools
    from cluster.ray_services import ApplicationKeys

    config = parse_config(args["config"])
    domain = args.get("domain")
    ApplicationKeys(config.name).make_secret()
    patience = {
        "health_check_period_s": config.life.health_period_s,
        "graceful_shutdown_timeout_s": config.life.drain_timeout_s + STOP_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 0.1,
    }
    router = serve.deployment(
        RouterDeployment, name="Router", ray_actor_options={"num_cpus": 0.0}, **patience
    )
    groups = [
        serve.deployment(
            Group,
            name=name,
            num_replicas=pool.groups,
            ray_actor_options={"num_cpus": HEAD_CPUS},
            placement_group_bundles=group_bundles(pool),
            placement_group_strategy="PACK",
            placement_group_bundle_label_selector=[domain] if domain else None,
            **patience,
        ).bind(name.lower(), config)
        for name, pool in pools(config).items()
    ]
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        ray_actor_options={"num_cpus": 0.0, "resources": {"node:__internal_head__": 0.001}},
        max_ongoing_requests=config.http.max_concurrent,
        **patience,
    )
    return ingress.bind(config, [router.bind(config), *groups])


# ------------------------------------------------------------------ what to ask for


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


def _check_files(config: ClusterConfig) -> None:
    folder = ROOT / config.model.path
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise StartupError(f"model.path: {config.model.path} has no {name}")


def build_arguments(config: ClusterConfig, domain: Domain | None) -> Json:
    """Of `build`. Without the numbers of groups: scaling must not restart anything."""
    tree = config.model_dump(mode="json")
    for pool in ("prefill", "decode"):
        tree[pool]["groups"] = min(tree[pool]["groups"], 1)
    return {"config": tree, "domain": domain.selector if domain else None}


def _domain_of(running: Json | None) -> Domain | None:
    selector = arguments_of(running).get("domain") or {}
    return next((Domain(label, value) for label, value in selector.items()), None)


def _code(applications: Applications) -> Json:
    """Which code the application runs: the job's own package, or this folder's content."""
    import ray

    job = ray.get_runtime_context().runtime_env
    kept = {key: job[key] for key in ("py_modules", "pip", "uv", "conda") if job.get(key)}
    if job.get("working_dir"):
        return kept | {"working_dir": job["working_dir"]}
    if (ROOT / "pyproject.toml").is_file():
        return {"working_dir": applications.package(str(ROOT))}
    return {}  # installed on every node


if __name__ == "__main__":
    sys.exit(main())
