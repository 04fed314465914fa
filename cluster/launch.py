"""One command starts the cluster: python cluster/launch.py --config deploy/configs/local.toml

    ray job submit --working-dir . -- python cluster/launch.py --config ...

It checks that everything fits, asks Serve for the application that `build` describes, and waits
until it is healthy. The application outlives the job; submitted again unchanged, nothing restarts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if __name__ == "__main__":  # a script's own folder is first on the path; the root belongs there
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from cluster import environment, local_ray
from cluster.config import ClusterConfig, load_config, parse_config, setting_names
from cluster.deployment_options import autoscaling, deployment_options
from cluster.errors import StartupError
from cluster.expert_sizes import expert_remarks, routed_experts
from cluster.packing import domain_of
from cluster.pools import pools
from cluster.serve_details import Json, arguments_of
from cluster.wanted import differences, sizes_to_ask, wanted_of

if TYPE_CHECKING:
    from ray import serve

    from cluster.application import Applications

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_CONFIG = ROOT / "deploy" / "configs" / "local.toml"
SERVE_START_S = 60.0  # what Serve may take on top of what the ranks may take
UNDO_S = 20.0  # what ending an application may take that never became healthy
Say = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    options = parser.parse_args(arguments)
    local_ray.prefer()
    # so that `ray job stop` ends what was begun; it sends SIGKILL three seconds later
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
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
    except KeyboardInterrupt:
        print("launch interrupted; what it began is taken back", file=sys.stderr)
        return 130
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
    parser.add_argument(
        "--disable_eplb",
        dest="set",
        action="append_const",
        const="experts.disable_eplb=true",
        help="leave experts where they are, whatever their load; same as --set with that setting",
    )


def timed(stream: TextIO | None = None) -> Say:
    """Prints lines with the seconds since now in front, each at once."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {line}", file=stream, flush=True)

    return say


def remarks(config: ClusterConfig) -> list[str]:
    """What a configuration asks for that this version holds but does not use."""
    pools = (config.prefill, config.decode)
    found = []
    if any(pool.gpus and (config.model.dtype == "float32" or pool.cp > 1) for pool in pools):
        found.append(
            "on GPUs float32, in which ranks that run prompts together (cp) compute too, goes op "
            "by op: right, but slow"
        )
    experts = routed_experts(ROOT / config.model.path)
    return [*found, *expert_remarks(config, experts)] if experts else found


def launch(config: ClusterConfig, *, say: Say) -> None:
    """Until the application is healthy. StartupError leaves what ran before as it was."""
    from cluster.application import Applications, connect
    from cluster.http_port import check_http_port, fingerprint
    from cluster.preflight import Preflight, is_head_node
    from cluster.ray_services import ApplicationKeys

    _check_files(config)
    for remark in [*remarks(config), *environment.remarks(os.environ, setting_names())]:
        say(f"note: {remark}")
    applications = Applications(connect())
    keys = ApplicationKeys(config.name)
    running = applications.find(config.name)
    sizes = sizes_to_ask(config, running, keys.asked_sizes())
    say(f"{config.name}: " + ", ".join(f"{name} x {size}" for name, size in sizes.items()))
    preflight = Preflight(config, sizes)
    domain = preflight.domain(preferred=domain_of(arguments_of(running)))
    if is_head_node():
        secret = keys.find_secret()  # who has it may listen beside its predecessor
        owner = fingerprint(secret) if secret else None
        asyncio.run(check_http_port(config.http.host, config.http.port, owner))
    surge = preflight.fits_beside_itself(domain)
    wanted = wanted_of(config, sizes, domain, code=_code(applications), surge=surge)
    for change in differences(running, wanted):
        say(change)
    launch_id = keys.begin_launch()

    def ask_again() -> None:  # another launch read what there is before it could see ours
        if keys.launch() != launch_id:
            raise StartupError(f"{config.name} was taken down while it started")
        applications.put(wanted)

    try:
        with applications.trial(wanted):
            applications.wait_until_healthy(
                config.name,
                limit_s=config.life.start_timeout_s + SERVE_START_S,
                say=say,
                check=preflight.check_waiting,
                lost=ask_again,
            )
    except BaseException:
        if running is None:
            keys.delete_all()  # at once: a job that is stopped has three seconds
            applications.remove(config.name, limit_s=UNDO_S)
            keys.delete_all()  # what was still being built may have made them again
        else:
            say("what ran before goes on")
            keys.end_launch()
        raise
    keys.end_launch()
    keys.remember_sizes({"prefill": config.prefill.groups, "decode": config.decode.groups})
    say(f"healthy; HTTP on http://{config.http.host}:{config.http.port}/v1")


def build(args: Mapping[str, Any]) -> serve.Application:
    """The Serve application: args are `config`, a tree, and `domain`, a label selector or None.

    A launch sends only the outline of its configuration and overrides the options of each
    deployment; elsewhere, in a RayService for example, the whole of it may stand in the args.
    """
    from ray import serve

    from cluster.deployments import Group
    from cluster.ingress import Ingress
    from cluster.ray_services import ApplicationKeys
    from cluster.router_deployment import RouterDeployment

    config = parse_config(args["config"])
    domain = args.get("domain")
    ApplicationKeys(config.name).make_secret()
    options = deployment_options(config)
    chosen = autoscaling(config)
    router = serve.deployment(RouterDeployment, name="Router", **options["Router"])
    groups = [
        serve.deployment(
            Group,
            name=name,
            placement_group_bundle_label_selector=[domain] if domain else None,
            num_replicas=None if name in chosen else pool.groups,
            autoscaling_config=chosen.get(name),
            **options[name],
        ).bind(name.lower())
        for name, pool in pools(config).items()
    ]
    ingress = serve.deployment(Ingress, name="Ingress", **options["Ingress"])
    return ingress.bind([router.bind(), *groups])


def _check_files(config: ClusterConfig) -> None:
    folder = ROOT / config.model.path
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise StartupError(f"model.path: {config.model.path} has no {name}")


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
